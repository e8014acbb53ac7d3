"""Converts `/v1/responses` and `/v1/messages` bodies to the chat that vLLM makes of them, to compute their token ids.

The body itself goes to the engine unchanged. If only the engine can know the prompt (a stored conversation, a file),
the result is None, and the request is routed by an approximate prompt (see `router/tokenizing/approximate.py`).

Source: vLLM 0.32 entrypoints/openai/responses/utils.py construct_input_messages, responses/protocol.py
input_item_parsing and build_chat_params; tool_parsers/utils.py get_function_tools; entrypoints/anthropic/serving.py
to_chat_completion_request. A test compares the token ids with a running engine's `/v1/responses/render` and
`/v1/messages/render`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from lorafleet.tokenizer.messages import VllmMadeFunction, VllmMadeTools
from router.protocols.routes import PromptKind

Body = Mapping[str, Any]
Message = dict[str, Any]

_BILLING_HEADER = "x-anthropic-billing-header"  # Claude Code's; it changes with every request, and vLLM drops it
_UNFINISHED = ("in_progress", "incomplete")
_TEXT_PARTS = frozenset({"input_text", "text"})
# Content blocks of a message that vLLM accepts and shows to no model.
_UNSEEN_BLOCKS = frozenset({"redacted_thinking", "tool_reference"})
# Content blocks of an inline system message that change the list of tools.
_TOOL_CHANGES = frozenset({"tool_addition", "tool_removal"})
# Tools of a response that vLLM 0.32 accepts and shows to no model. Other kinds it refuses, or they are newer.
_IGNORED_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
# The one argument of the function that replaces a custom tool.
_CUSTOM_INPUT = "input"


class TemplateTraits(Protocol):
    """Traits of a base model's chat template that decide how vLLM converts an Anthropic request."""

    @property
    def wants_system_first(self) -> bool:
        """Whether system messages in the middle are an error, so that vLLM moves them to the front."""

    @property
    def disabled_effort(self) -> str:
        """The reasoning effort that means no thinking: "none", or "low" if the template ignores it."""


class _PromptUnknown(Exception):
    """Only the engine can know the prompt, or it refuses this body."""


# Errors of converting a body. A tool's input nested almost as deep as a body may be cannot be written as JSON again.
_PROMPT_ERRORS = (_PromptUnknown, LookupError, TypeError, AttributeError, ValueError, RecursionError)


def prompt_body(kind: PromptKind, body: Body, template: TemplateTraits | None = None) -> Body | None:
    """The chat or completion that has the same prompt as this body; None if only the engine can know the prompt.

    template  traits of the base model's template, if known; without them, messages that depend on it give None
    """
    if kind == "chat":
        return body
    if kind == "completion":
        return {name: value for name, value in body.items() if name != "messages"}
    if kind == "input":
        return _prompt_of_input(body)
    if kind == "responses":
        return chat_of_responses(body)
    return chat_of_messages(body, template) if kind == "messages" else None


def _prompt_of_input(body: Body) -> Body | None:
    """The chat or completion with the prompt of an embedding or classification; None for several texts at once.

    source  vLLM 0.32 entrypoints/pooling/base/protocol.py: a chat has no generation prompt unless it asks for one
    """
    if body.get("padding") is not None:
        return None
    if "messages" in body:
        return {"add_generation_prompt": False, **body}
    texts = body.get("input")
    if isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], str | list):
        (texts,) = texts
    is_one = isinstance(texts, str) or (isinstance(texts, list) and set(map(type, texts)) == {int})
    return {**body, "prompt": texts} if is_one else None


def may_be_truncated(kind: PromptKind | None, body: Body) -> bool:
    """Whether the engine cuts this body's prompt, if that is longer than the model takes.

    source  vLLM 0.32 entrypoints/openai/responses/protocol.py build_tok_params: also where `truncation` is null
    """
    return kind == "responses" and body.get("truncation", "disabled") != "disabled"


# --- OpenAI's responses ------------------------------------------------------------------------------------------


def chat_of_responses(body: Body) -> Body | None:
    """The chat that vLLM makes of a `/v1/responses` body; None if only the engine can know it."""
    if body.get("previous_response_id") or body.get("previous_input_messages"):
        return None
    try:
        return _responses_chat(body)
    except _PROMPT_ERRORS:
        return None  # vLLM refuses it, or its form is unknown here


def _responses_chat(body: Body) -> Body:
    """The chat of a `/v1/responses` body; raises _PromptUnknown."""
    messages: list[Message] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": _require_text(instructions)})
    items = body["input"]
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
        goes_on = False
    else:
        goes_on = _continues_message(items)
        conversation: list[Message] = []
        for item in items:
            _add_item(conversation, item)
        messages += conversation
    chat: Message = {
        "messages": messages,
        "add_generation_prompt": not goes_on,
        "continue_final_message": goes_on,
        # Unlike a chat's: vLLM 0.32 entrypoints/openai/responses/protocol.py build_tok_params leaves it at its default.
        "add_special_tokens": True,
    }
    if given_tools := body.get("tools"):
        chat["tools"] = VllmMadeTools(shown for tool in given_tools for shown in _responses_tools(tool))
    reasoning = body.get("reasoning") or {}
    if (effort := reasoning.get("effort")) is not None:
        chat["reasoning_effort"] = _require_text(effort)
    return _with_fields(chat, body, ("chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs"))


_CALLS_AND_RESULTS = frozenset({"function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"})


def _continues_message(items: Sequence[Any]) -> bool:
    """Whether the last item is an unfinished assistant message, which the model continues. Raises _PromptUnknown."""
    last = items[-1] if items else {}
    if last.get("status") not in _UNFINISHED:
        return False
    if last.get("type") == "message" and last.get("role") == "assistant" and isinstance(last.get("content"), list):
        return True
    if last.get("type") in _CALLS_AND_RESULTS:
        return False
    raise _PromptUnknown


def _add_item(messages: list[Message], item: Mapping[str, Any]) -> None:
    """Append an item as a message, or add it to the assistant message before it. Raises _PromptUnknown."""
    kind = item.get("type", "message")
    before = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "function_call":
        _add_call(
            messages, before, item, _flat_name(item.get("namespace"), item["name"]), _require_text(item["arguments"])
        )
    elif kind == "custom_tool_call":
        _add_call(messages, before, item, _require_text(item["name"]), _custom_arguments(item.get("input") or ""))
    elif kind in {"function_call_output", "custom_tool_call_output"}:
        output = item["output"]
        messages.append(
            {"role": "tool", "content": _message_content(output), "tool_call_id": _require_text(item["call_id"])}
        )
    elif kind == "reasoning":
        _add_to_assistant_turn(messages, before, "reasoning", _reasoning_text(item))
    elif kind == "message" and item["role"] == "assistant":
        _add_to_assistant_turn(messages, before, "content", _assistant_text(item))
    elif kind == "message" and item["role"] in {"user", "system", "developer"}:
        messages.append({"role": item["role"], "content": _message_content(item["content"])})
    else:
        raise _PromptUnknown


def _add_call(
    messages: list[Message], before: Message | None, item: Mapping[str, Any], name: str, arguments: str
) -> None:
    """Add a tool call to the assistant message before it, or append one. Raises _PromptUnknown."""
    function = VllmMadeFunction(name=name, arguments=arguments)
    call = {"id": _require_text(item["call_id"]), "function": function, "type": "function"}
    if before is None:
        messages.append({"role": "assistant", "tool_calls": [call]})
    else:
        before.setdefault("tool_calls", []).append(call)


def _add_to_assistant_turn(messages: list[Message], before: Message | None, field: str, text: str) -> None:
    """Set a field of the assistant message before it, or append a new message where it has that field, or is none."""
    if before is not None and before.get(field) is None:
        before[field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _reasoning_text(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item: its first part alone. Raises _PromptUnknown where it is encrypted."""
    if item.get("encrypted_content"):
        raise _PromptUnknown
    parts = item.get("content") or item["summary"]
    return _require_text(parts[0]["text"]) if parts else ""


def _assistant_text(item: Mapping[str, Any]) -> str:
    """The text of an assistant message: its first part alone, as in vLLM. Raises _PromptUnknown for other content."""
    content = item["content"]
    if isinstance(content, str):
        return content
    if item.get("type") != "message" or content[0].get("type") != "output_text":
        raise _PromptUnknown
    return _require_text(content[0]["text"])


def _message_content(content: Any) -> str | list[Message]:
    """A message's content: text, or a list of texts and pictures; raises _PromptUnknown for others."""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        if part.get("type") == "input_image":
            parts.append(_picture_part(part.get("image_url")))
        elif part.get("type") in _TEXT_PARTS:
            parts.append({"type": "text", "text": _require_text(part["text"])})
        else:
            raise _PromptUnknown
    return parts


def _picture_part(url: Any) -> Message:
    """A picture as a part of a chat. Raises _PromptUnknown for what is no URL, such as an uploaded file's id."""
    return {"type": "image_url", "image_url": {"url": _require_text(url)}}


def _responses_tools(tool: Mapping[str, Any]) -> Iterator[Message]:
    """The functions that the model is shown for one tool; several or none for some kinds. Raises _PromptUnknown."""
    kind = tool.get("type")
    if kind == "function":
        yield _function_tool(tool)
    elif kind == "custom":
        if (tool.get("format") or {}).get("type") == "grammar":
            raise _PromptUnknown  # vLLM refuses it
        yield _function_tool(
            {"name": tool["name"], "description": tool.get("description"), "parameters": _custom_schema()}
        )
    elif kind == "namespace":
        for inner in tool["tools"]:
            if inner["type"] == "function":
                yield _function_tool({**inner, "name": _flat_name(tool["name"], inner["name"])})
    elif kind not in _IGNORED_TOOLS:
        raise _PromptUnknown


def _function_tool(function: Mapping[str, Any]) -> Message:
    """A function as a chat's tool."""
    return {"type": "function", "function": {name: value for name, value in function.items() if name != "type"}}


def _flat_name(namespace: Any, name: Any) -> str:
    """`namespace__name`, or the name alone. Raises _PromptUnknown for what is no text."""
    return f"{_require_text(namespace)}__{_require_text(name)}" if namespace else _require_text(name)


def _custom_schema() -> Message:
    """Parameters of the function that replaces a custom tool.

    Source: vLLM 0.32 tool_parsers/utils.py custom_tool_parameters.
    """
    payload = {"type": "string", "description": "The freeform text payload for this tool."}
    return {
        "type": "object",
        "properties": {_CUSTOM_INPUT: payload},
        "required": [_CUSTOM_INPUT],
        "additionalProperties": False,
    }


def _custom_arguments(payload: Any) -> str:
    """Arguments, as JSON, of the function that replaces a custom tool. Raises _PromptUnknown."""
    return json.dumps({_CUSTOM_INPUT: _require_text(payload)}, ensure_ascii=False)


# --- Anthropic's messages ----------------------------------------------------------------------------------------


def chat_of_messages(body: Body, template: TemplateTraits | None = None) -> Body | None:
    """The chat that vLLM makes of a `/v1/messages` body; None if only the engine can know it."""
    try:
        return _messages_chat(body, template)
    except _PROMPT_ERRORS:
        return None


def _messages_chat(body: Body, template: TemplateTraits | None) -> Body:
    """The chat of a `/v1/messages` body; raises _PromptUnknown."""
    items = body["messages"]
    has_inline = any(message["role"] == "system" for message in items)
    if has_inline and template is None:
        raise _PromptUnknown
    moves_inline = has_inline and template is not None and template.wants_system_first
    system = _system_texts(body.get("system"), inline=False)
    if moves_inline:
        for message in items:
            if message["role"] == "system":
                system += _system_texts(message["content"], inline=True)
    messages: list[Message] = [{"role": "system", "content": "".join(system)}] if system else []
    for message in items:
        if message["role"] == "system":
            text = "".join(_system_texts(message["content"], inline=True))
            if text and not moves_inline:
                messages.append({"role": "system", "content": text})
        else:
            _add_message(messages, message)
    chat: Message = {"messages": messages}
    if (tools := _tools_in_effect(body)) is not None:
        chat["tools"] = VllmMadeTools(_messages_tool(tool) for tool in tools)
    if (effort := _reasoning_effort(body, template)) is not None:
        chat["reasoning_effort"] = effort
    return _with_fields(chat, body, ("chat_template_kwargs",))


def _system_texts(system: Any, *, inline: bool) -> list[str]:
    """The texts of a system prompt, without Claude Code's header. A plain top-level text keeps it, as in vLLM.

    Changes of the tools show no text. Raises _PromptUnknown.
    """
    if isinstance(system, str):
        return [] if not system or (inline and system.startswith(_BILLING_HEADER)) else [system]
    texts = []
    for block in system or ():
        if block["type"] in _TOOL_CHANGES and not inline:
            raise _PromptUnknown  # vLLM refuses it
        text = block.get("text")
        if block["type"] == "text" and text and not text.startswith(_BILLING_HEADER):
            texts.append(_require_text(text))
    return texts


def _add_message(messages: list[Message], message: Mapping[str, Any]) -> None:
    """Append a message, after its tool results as messages of role `tool`.

    A user message of tool results only adds no other. Raises _PromptUnknown for a role or block that we cannot convert.
    """
    role, content = message["role"], message["content"]
    if role not in {"user", "assistant"}:
        raise _PromptUnknown
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    turn: Message = {"role": role}
    parts: list[Message] = []
    for block in content:
        _add_block(messages, turn, parts, block)
    if len(parts) == 1 and parts[0]["type"] == "text":
        turn["content"] = parts[0]["text"]
    elif parts:
        turn["content"] = parts
    if role == "assistant" or "content" in turn:
        messages.append(turn)


def _add_block(messages: list[Message], turn: Message, parts: list[Message], block: Mapping[str, Any]) -> None:
    """Add a content block to `turn` or its `parts`; append a tool result to `messages`. Raises _PromptUnknown."""
    kind = block["type"]
    if kind == "text":
        if block.get("text"):
            parts.append({"type": "text", "text": _require_text(block["text"])})
    elif kind == "image" and (source := block.get("source")):
        parts.append(_picture_part(_picture_url(source)))
    elif kind == "thinking":
        if block.get("thinking") is not None:
            turn["reasoning"] = turn.get("reasoning", "") + _require_text(block["thinking"])
    elif kind == "tool_use":
        function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
        turn.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
    elif kind == "tool_result" and turn["role"] == "user":
        messages += _tool_result(block)
    elif kind == "tool_result":
        # As Python writes the value: vLLM converts it by `str`.
        parts.append({"type": "text", "text": f"Tool result: {_result_content(block) or ''}"})
    elif kind not in _UNSEEN_BLOCKS:
        raise _PromptUnknown


def _picture_url(source: Mapping[str, Any]) -> Any:
    """The URL of a picture's source: its own, or a data URL of its bytes."""
    if source.get("type") == "url":
        return source.get("url", "")
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def _result_content(block: Mapping[str, Any]) -> str | list[Mapping[str, Any]] | None:
    """A tool result's content: text, or a list of objects. Raises _PromptUnknown for what vLLM refuses."""
    content = block.get("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise _PromptUnknown
    return content


def _tool_result(block: Mapping[str, Any]) -> list[Message]:
    """The messages of a tool result: its texts, then its pictures, then the tools that it names.

    Parts of other kinds (`document`, `search_result`) are shown to no model. Raises _PromptUnknown.
    """
    content, call_id = _result_content(block), block.get("tool_use_id") or ""
    texts = [content] if isinstance(content, str) else []
    pictures: list[Message] = []
    tools: list[Message] = []
    for part in content if isinstance(content, list) else ():
        kind = part.get("type")
        if kind == "text":
            texts.append(_require_text(part.get("text", "")))
        elif kind == "image" and (url := _picture_url(part.get("source", {}))):
            pictures.append(_picture_part(url))
        elif kind == "tool_reference" and (name := part.get("tool_name") or part.get("name")):
            tools.append({"type": "tool_reference", "name": _require_text(name)})
    messages: list[Message] = [{"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}]
    if pictures:
        messages.append({"role": "user", "content": pictures})
    if tools:
        messages.append({"role": "tool", "tool_call_id": call_id, "content": tools})
    return messages


def _tools_in_effect(body: Body) -> Sequence[Mapping[str, Any]] | None:
    """The tools at the end of a conversation, after all additions and removals; None without any list.

    Raises _PromptUnknown for a change of a tool that is not declared.
    """
    given: Sequence[Mapping[str, Any]] | None = body.get("tools")
    changes = [
        block
        for message in body["messages"]
        if not isinstance(message["content"], str)
        for block in message["content"]
        if block["type"] in _TOOL_CHANGES
    ]
    if not changes:
        return given
    tools = {tool["name"]: tool for tool in given or ()}
    removed: set[str] = set()
    for block in changes:
        change = block["tool"]
        if change["type"] == "tool_definition" and block["type"] == "tool_addition":
            name = change["definition"]["name"]
            tools[name] = change["definition"]
        elif change["type"] == "tool_reference" and change["name"] in tools:
            name = change["name"]
            if block["type"] == "tool_addition":
                tools[name] = {**tools[name], "defer_loading": None}
        else:
            raise _PromptUnknown
        (removed.add if block["type"] == "tool_removal" else removed.discard)(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _messages_tool(tool: Mapping[str, Any]) -> Message:
    """Anthropic's tool in OpenAI's form, as vLLM converts it."""
    schema = tool["input_schema"]
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}


def _reasoning_effort(body: Body, template: TemplateTraits | None) -> str | None:
    """The reasoning effort of a `/v1/messages` body; None if not given. Raises _PromptUnknown."""
    if (body.get("thinking") or {}).get("type") == "disabled":
        if template is None:
            raise _PromptUnknown
        return template.disabled_effort
    effort = (body.get("output_config") or {}).get("effort")
    return None if effort is None else _require_text(effort)


def _with_fields(chat: Message, body: Body, names: Sequence[str]) -> Message:
    """The chat with these fields of the body, where they are set."""
    return chat | {name: body[name] for name in names if body.get(name) is not None}


def _require_text(value: Any) -> str:
    """The value, if it is text. Raises _PromptUnknown."""
    if not isinstance(value, str):
        raise _PromptUnknown
    return value
