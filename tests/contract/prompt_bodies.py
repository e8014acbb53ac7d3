"""Bodies of `/v1/responses` and `/v1/messages` whose prompt the router renders itself."""

from typing import Any

from tests.bodies import WEATHER

WEATHER_FUNCTION = {"type": "function", **WEATHER["function"]}
WEATHER_TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"properties": {"city": {"type": "string"}}, "required": ["city"]},
}
USER = {"role": "user", "content": "Rain in Bern?"}
SAID = {"type": "output_text", "text": "Hello! How can I help?"}
CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Zürich"}'}
# Tools that Codex and agents send besides functions.
CUSTOM = {"type": "custom", "name": "patch", "description": "Applies a <patch>"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": '*** Begin "Zürich"\n'}
NAMESPACE = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers",
    "tools": [
        {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}},
        {"type": "custom", "name": "note"},
    ],
}
UNSEEN_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "web_search_preview"},
    {"type": "mcp", "server_label": "docs", "server_url": "http://127.0.0.1:1/mcp"},
    {"type": "local_shell"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "image_generation"},
    {"type": "apply_patch"},
    {"type": "shell"},
]
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "It may rain."}]}

# (name, body of a response without its model)
RESPONSES_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("a text", {"input": "Which customers ordered twice?"}),
    ("instructions", {"input": "Count orders.", "instructions": "Answer in SQL."}),
    ("messages", {"input": [{"role": "system", "content": "Be brief."}, USER]}),
    ("typed messages", {"input": [{"type": "message", **USER}]}),
    ("developer", {"input": [{"role": "developer", "content": "Be terse."}, USER]}),
    (
        "parts",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": t} for t in ("one", "two")]}]},
    ),
    (
        "several turns",
        {
            "input": [
                USER,
                {"type": "message", "role": "assistant", "content": [SAID]},
                {"role": "user", "content": "So?"},
            ]
        },
    ),
    ("turns in plain text", {"input": [USER, {"role": "assistant", "content": "Yes."}, USER]}),
    (
        "two answers in a row",
        {"input": [USER, {"role": "assistant", "content": "Yes."}, {"role": "assistant", "content": "No."}]},
    ),
    (
        "a call and its result",
        {
            "input": [USER, CALL, {"type": "function_call_output", "call_id": "c1", "output": "dry"}, USER],
            "tools": [WEATHER_FUNCTION],
        },
    ),
    ("an answer, a call and a call", {"input": [USER, {"role": "assistant", "content": "Let me see."}, CALL, CALL]}),
    (
        "reasoning before a call",
        {"input": [USER, REASONING, CALL, {"type": "function_call_output", "call_id": "c1", "output": "dry"}]},
    ),
    (
        "reasoning before an answer",
        {"input": [USER, REASONING, {"type": "message", "role": "assistant", "content": [SAID]}, USER]},
    ),
    ("tools", {"input": "Rain?", "tools": [WEATHER_FUNCTION], "instructions": "Be kind."}),
    ("an effort", {"input": "Rain?", "reasoning": {"effort": "low"}}),
    ("template arguments", {"input": "Rain?", "chat_template_kwargs": {"enable_thinking": False}}),
    (
        "an answer to be continued",
        {"input": [USER, {"type": "message", "role": "assistant", "status": "incomplete", "content": [SAID]}]},
    ),
    (
        "a schema",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}},
    ),
    ("a custom tool", {"input": "Rain?", "tools": [CUSTOM, WEATHER_FUNCTION]}),
    ("a custom tool without a word about it", {"input": "Rain?", "tools": [{"type": "custom", "name": "patch"}]}),
    (
        "a call of a custom tool and its result",
        {
            "input": [
                USER,
                CUSTOM_CALL,
                CALL,
                {"type": "custom_tool_call_output", "call_id": "c2", "output": "applied"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "dry"}]},
                USER,
            ],
            "tools": [CUSTOM],
        },
    ),
    ("a namespace of tools", {"input": "Who?", "tools": [NAMESPACE, WEATHER_FUNCTION]}),
    ("a call in a namespace", {"input": [USER, {**CALL, "name": "find", "namespace": "crm"}], "tools": [NAMESPACE]}),
    *((f"a tool of type {tool['type']}", {"input": "Rain?", "tools": [tool]}) for tool in UNSEEN_TOOLS),
    ("tools of all kinds", {"input": "Rain?", "tools": [*UNSEEN_TOOLS, CUSTOM, WEATHER_FUNCTION, NAMESPACE]}),
    ("a prompt that would be cut if it were too long", {"input": "Rain?", "truncation": "auto"}),
    ("unicode", {"input": "Zürich — naïve café 😀👍🏽 日本語 e\u0301"}),
]
# Bodies that only the engine can render, or that it refuses.
UNKNOWN_RESPONSES: list[dict[str, Any]] = [
    {"input": "x", "previous_response_id": "resp_1"},
    {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "data:,"}]}]},
    {"input": "x", "tools": [{"type": "of_tomorrow"}]},
    {"input": "x", "tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}]},
    {"input": [{"type": "local_shell_call", "id": "x", "call_id": "c"}]},
    {"input": [{"type": "item_reference", "id": "x"}]},
    {"input": 3},
    {"input": [3]},
    {},
]

THINKING = {"type": "thinking", "thinking": "It may rain.", "signature": "s"}
TOOL_USE = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Zürich"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "dry"}
TEXTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}

REFERENCE = {"type": "tool_reference", "tool_name": "get_weather", "name": "other"}
SEARCH_RESULT = {"type": "search_result", "source": "a", "title": "b", "content": [{"type": "text", "text": "found"}]}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "read"}}
NOW_TOOL = {"name": "now", "input_schema": {"type": "object"}, "description": "The time"}
ADDED = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "get_weather"}}
REMOVED = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_weather"}}
DEFINED = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {**NOW_TOOL, "strict": True}}}


def _called(answered: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation whose tool call got these blocks."""
    return [USER, {"role": "assistant", "content": [TOOL_USE]}, {"role": "user", "content": answered}]


def _changes(*blocks: dict[str, Any]) -> dict[str, Any]:
    """A system message that changes the list of tools."""
    return {"role": "system", "content": [*blocks]}


# (name, body of a message without its model and limit)
MESSAGES_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("a text", {"messages": [USER]}),
    ("a system prompt", {"messages": [USER], "system": "Answer in SQL."}),
    ("a system prompt in blocks", {"messages": [USER], "system": [BILLING, *TEXTS]}),
    ("a header in a system prompt", {"messages": [USER], "system": "x-anthropic-billing-header: a;\nBe kind."}),
    ("blocks", {"messages": [{"role": "user", "content": TEXTS}]}),
    ("one block", {"messages": [{"role": "user", "content": TEXTS[:1]}]}),
    ("several turns", {"messages": [USER, {"role": "assistant", "content": "Yes."}, USER]}),
    (
        "a system message in the middle",
        {"messages": [USER, {"role": "system", "content": "Hurry."}, USER], "system": "Hi."},
    ),
    ("a header in the middle", {"messages": [USER, {"role": "system", "content": [BILLING, *TEXTS]}, USER]}),
    (
        "a call and its result",
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [THINKING, {"type": "text", "text": "I look."}, TOOL_USE]},
                {"role": "user", "content": [RESULT, {"type": "text", "text": "And now?"}]},
            ],
            "tools": [WEATHER_TOOL],
        },
    ),
    (
        "a result in blocks",
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [TOOL_USE]},
                {"role": "user", "content": [{**RESULT, "content": TEXTS}]},
            ]
        },
    ),
    ("tools", {"messages": [USER], "tools": [WEATHER_TOOL, {"name": "now", "input_schema": {"type": "object"}}]}),
    ("no tools", {"messages": [USER], "tools": []}),
    ("thinking", {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("no thinking", {"messages": [USER], "thinking": {"type": "disabled"}}),
    ("an effort", {"messages": [USER], "output_config": {"effort": "high"}}),
    (
        "hidden thinking",
        {"messages": [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, USER]},
    ),
    *(
        (f"a result with {name}", {"messages": _called([{**RESULT, "content": content}])})
        for name, content in (
            ("a tool reference", [{"type": "tool_reference", "tool_name": "get_weather"}]),
            ("tool references and texts", [*TEXTS, {"type": "tool_reference", "name": "a"}, REFERENCE, TEXTS[0]]),
            ("a tool reference without a name", [{"type": "tool_reference"}]),
            ("a search result", [SEARCH_RESULT, TEXTS[0]]),
            ("search results alone", [SEARCH_RESULT, SEARCH_RESULT]),
            ("a document", [DOCUMENT, TEXTS[1]]),
            ("a part of a later protocol", [{"type": "of_tomorrow", "text": "x"}, TEXTS[0]]),
            ("a part without a type", [{"text": "x"}, TEXTS[0]]),
            ("a text without a text", [{"type": "text"}, TEXTS[0]]),
            ("nothing", []),
            ("null", None),
        )
    ),
    ("results in a row", {"messages": _called([RESULT, {**RESULT, "content": [REFERENCE]}, TEXTS[0], RESULT])}),
    ("a result that failed", {"messages": _called([{**RESULT, "is_error": True}])}),
    *(
        (f"a result of an assistant: {content!r}", {"messages": [USER, {"role": "assistant", "content": [block]}]})
        for content in ("dry", None, [], [{"type": "text", "text": 'it\'s "dry"', "n": [1, 2.5, True, None]}])
        for block in ({**RESULT, "content": content},)
    ),
    ("a tool reference outside a result", {"messages": [{"role": "user", "content": [REFERENCE, TEXTS[0]]}]}),
    ("citations", {"messages": [{"role": "user", "content": [{**TEXTS[0], "citations": [{"type": "x"}]}]}]}),
    ("template arguments", {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}),
    ("a deferred tool", {"messages": [USER], "tools": [{**WEATHER_TOOL, "defer_loading": True}, NOW_TOOL]}),
    (
        "a tool added by reference",
        {
            "messages": [USER, _changes(ADDED), USER],
            "tools": [{**WEATHER_TOOL, "defer_loading": True}, NOW_TOOL],
        },
    ),
    ("a tool added by definition", {"messages": [USER, _changes(DEFINED, *TEXTS), USER], "tools": [WEATHER_TOOL]}),
    ("a tool defined again", {"messages": [USER, _changes(DEFINED), USER], "tools": [NOW_TOOL, WEATHER_TOOL]}),
    ("a first tool", {"messages": [USER, _changes(DEFINED), USER]}),
    ("a tool removed", {"messages": [USER, _changes(REMOVED), USER], "tools": [WEATHER_TOOL, NOW_TOOL]}),
    ("all tools removed", {"messages": [USER, _changes(REMOVED), USER], "tools": [WEATHER_TOOL]}),
    ("a tool removed and added", {"messages": [USER, _changes(REMOVED, ADDED), USER], "tools": [WEATHER_TOOL]}),
    ("an empty turn", {"messages": [USER, {"role": "user", "content": []}, USER]}),
]
UNKNOWN_MESSAGES: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "x"}}]}]},
    {"messages": _called([{**RESULT, "content": ["dry"]}])},
    {"messages": [USER, _changes(ADDED)], "tools": [NOW_TOOL]},
    {"messages": [USER], "system": [DEFINED]},
    {"messages": [{"role": "user", "content": [DEFINED]}], "tools": []},
    {"messages": [{"role": "tool", "content": "x"}]},
    {"messages": "x"},
    {},
]
