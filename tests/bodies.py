"""Requests on which our tokens must equal the engine's, and the comparison itself."""

from typing import Any

import httpx

from lorafleet.tokenizer.chat import ChatTokenizer
from tests.patience import patience

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city, in <b>plain</b> words & numbers",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# Out of order, with keys vLLM does not know and without those it adds.
LOOSE_TOOL = {
    "function": {"parameters": {"type": "object"}, "name": "now", "strict": True, "cache": "yes"},
    "x-owner": "time team",
    "type": "function",
}
CALL = {
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": [1, 2]}', "note": "kept"},
    "id": "call_1",
}

# (name, body of a chat request without its model)
CHAT_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"messages": [{"role": "user", "content": "Which customers ordered twice in May?"}]}),
    (
        "system",
        {"messages": [{"role": "system", "content": "Answer in SQL."}, {"role": "user", "content": "Count orders."}]},
    ),
    (
        "several turns",
        {
            "messages": [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hello! How can I help?"},
                {"role": "user", "content": "  def f(x):\n\treturn x  \n\n\n"},
            ]
        },
    ),
    ("tools", {"messages": [{"role": "user", "content": "Rain in Bern?"}], "tools": [WEATHER, LOOSE_TOOL]}),
    (
        "tools with a system prompt",
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}],
            "tools": [WEATHER],
        },
    ),
    (
        "a tool call and its answers",
        {
            "messages": [
                {"role": "user", "content": "Rain in Zürich?"},
                {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
                {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": false}'},
                {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "no"}]},
                {"role": "user", "content": "Thanks"},
            ],
            "tools": [WEATHER],
        },
    ),
    (
        "tool calls with broken, empty and non-object arguments",
        {
            "messages": [
                {"role": "user", "content": "Go"},
                {
                    "role": "assistant",
                    "content": "Calling",
                    "tool_calls": [
                        {"id": str(i), "type": "function", "function": {"name": "f", "arguments": arguments}}
                        for i, arguments in enumerate(["{oops", "", "[1]", '{"<a>": "é"}'])
                    ],
                },
            ]
        },
    ),
    (
        "an empty list of tool calls",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": []}]},
    ),
    (
        "content in parts",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "First part."},
                        {"type": "text", "text": "Second part.", "cache_control": {"type": "ephemeral"}},
                        "third, bare",
                    ],
                }
            ]
        },
    ),
    (
        "developer",
        {"messages": [{"role": "developer", "content": "Be terse."}, {"role": "user", "content": "Hi"}]},
    ),
    (
        "developer after system",
        {
            "messages": [
                {"role": "system", "content": "You are a lawyer."},
                {"role": "user", "content": "Hi"},
                {"role": "developer", "content": "Be terse."},
                {"role": "user", "content": "Well?"},
            ]
        },
    ),
    (
        "unicode",
        {
            "messages": [
                {
                    "role": "user",
                    "content": "Zürich — naïve café 😀👍🏽 日本語 русский e\u0301 \u200b\u00a0 ﬁ \x00 12345 don't I'LL",
                }
            ]
        },
    ),
    (
        "special tokens in text",
        {"messages": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n<tool_call>"}]},
    ),
    ("empty content", {"messages": [{"role": "user", "content": ""}]}),
    ("null content", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}),
    (
        "no generation prompt",
        {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False},
    ),
    (
        "continue the final message",
        {
            "messages": [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two, "}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    (
        "template variables the template does not know",
        {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
    ),
    (
        "a billing header in the system prompt",
        {
            "messages": [
                {"role": "system", "content": "x-anthropic-billing-header: cch=1;\nBe kind."},
                {"role": "user", "content": "Hi"},
            ]
        },
    ),
    ("long", {"messages": [{"role": "user", "content": "SELECT name FROM customers WHERE id = 7;\n" * 60}]}),
]

COMPLETION_PROMPTS: list[str] = [
    "SELECT name FROM",
    "",
    " ",
    "def main():\n    return 1\n",
    "Zürich 😀 日本語 e\u0301 ﬁ",
    "<|im_start|>user\nHi<|im_end|>\n",
    "x" * 200 + "\r\n\r\n" + "1234567890" * 5,
]


def assert_same_tokens_as_engine(chat: ChatTokenizer, engine_url: str, model: str) -> None:
    """Fails, naming the request, where `chat` and the engine's `/tokenize` differ."""
    with httpx.Client(base_url=engine_url, timeout=patience(20)) as engine:

        def engine_ids(body: dict[str, Any]) -> list[int]:
            answer = engine.post("/tokenize", json={"model": model, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()["tokens"]

        for name, body in CHAT_BODIES:
            assert chat.chat_ids(body) == engine_ids(body), f"chat request {name!r}: {chat.render(body)!r}"
        for prompt in COMPLETION_PROMPTS:
            assert chat.completion_ids(prompt) == engine_ids({"prompt": prompt}), f"prompt {prompt!r}"
