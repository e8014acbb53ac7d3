"""Chat messages and tools as vLLM hands them to the chat template.

vLLM's pydantic models drop and add fields; its message parser flattens contents and decodes tool arguments. Both are
repeated here, so that the template renders the same prompt.

Source: vLLM 0.32 renderers/chat_utils.py, entrypoints/openai/chat_completion/protocol.py.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from lorafleet.tokenizer.template_cache import Roles

_TEXT_PARTS: Final[Mapping[str, str]] = {  # type of a content part -> the key that holds its text
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# Fields that vLLM's types declare for a content part. Other fields reach templates that take parts.
_PART_FIELDS: Final = frozenset(
    [
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    ]
)
_FUNCTION_FIELDS: Final[Mapping[str, type]] = {"description": str, "parameters": dict, "strict": bool}
_BILLING_HEADER: Final = "x-anthropic-billing-header"  # vLLM drops this line: it changes with every request
Message = dict[str, Any]
T = TypeVar("T", bool, None)
USUAL_ARGUMENTS: Final[Mapping[str, Any]] = {"add_generation_prompt": True, "continue_final_message": False}
_PLAIN_ROLES: Final = frozenset(["system", "user", "assistant"])


class VllmMadeFunction(dict[str, Any]):
    """The function of a tool call that vLLM itself builds from a request: its keys keep their order.

    source  vLLM 0.32 entrypoints/openai/responses/utils.py: such messages reach the template without being parsed again
    """


class VllmMadeTools(list[Message]):
    """The tools that vLLM itself builds from a request. The list may be empty; a template can tell that from no list.

    source  vLLM 0.32 renderers/online_renderer.py render_responses: the list goes to the template, empty or not
    """


class PictureStandIn(dict[str, Any]):
    """A content part in place of a picture: the template shows the picture's place, without its file."""


class Picture(NamedTuple):
    """A picture of a chat: its data URL, and the id that the client gave it, if any."""

    url: str
    given_id: str | None


class Untokenizable(ValueError):
    """A request body cannot be tokenized here, but the engine may accept it. The message says why."""


class HasMedia(Untokenizable):
    """A chat has parts other than text; see `without_pictures`."""


def read_tools(tools: Any) -> list[Message] | None:
    """A request's tools as vLLM's pydantic models dump them, None without any; raises Untokenizable.

    Declared keys only, in order, null where absent.
    """
    if tools is None:
        return None
    if not isinstance(tools, list) or not (tools or isinstance(tools, VllmMadeTools)):
        raise Untokenizable("tools must be a list with at least one tool")
    return [_read_tool(tool) for tool in tools]


def _read_tool(tool: Any) -> Message:
    """One tool as vLLM's pydantic models dump it; raises Untokenizable."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise Untokenizable("each tool must be an object with a function that has a name")
    dumped: Message = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        dumped["strict"] = read_flag(function, "strict", usual=None)
    deferred = read_flag(tool, "defer_loading", usual=None)
    inner = read_flag(function, "defer_loading", usual=None)
    if inner is not None or deferred is not None:
        dumped["defer_loading"] = inner if inner is not None else deferred
    outer: Message = {"type": tool.get("type", "function"), "function": dumped}
    if deferred is not None:
        outer["defer_loading"] = deferred
    return outer


def read_flag(body: Mapping[str, Any], name: str, *, usual: T) -> bool | T:
    """A boolean field of a body, or `usual` where absent; raises Untokenizable for any other value.

    vLLM also accepts 0, "no" and a dozen more spellings; such a request is tokenized at the engine.
    """
    value = body.get(name, usual)
    if value is usual or isinstance(value, bool):
        return value
    raise Untokenizable(f"{name} is {value!r}, not true or false")


def read_messages(messages: Any, *, as_parts: bool) -> list[Message]:
    """A request's messages as vLLM's message parser returns them; raises Untokenizable.

    as_parts  contents become lists of parts, for templates that loop over these
    """
    if not isinstance(messages, list) or not messages:
        raise Untokenizable("messages must be a list with at least one message")
    return [_read_message(message, as_parts=as_parts) for message in messages]


def has_media(messages: Any) -> bool:
    """Whether a chat has a content part that is no text."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, Mapping)]
            if any(part.get("type") not in _TEXT_PARTS for part in parts):
                return True
    return False


def without_pictures(messages: Any) -> tuple[list[Any], list[Picture]]:
    """The messages with stand-ins for their pictures, and the pictures in order. Does not modify `messages`.

    Raises Untokenizable for pictures that are not in the request, and for video, audio and files.
    """
    if not isinstance(messages, list):
        raise Untokenizable("messages must be a list with at least one message")
    shown, pictures = [], []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            parts = [_picture_in(part) or part for part in content]
            pictures += [part for part in parts if isinstance(part, Picture)]
            parts = [PictureStandIn() if isinstance(part, Picture) else part for part in parts]
            shown.append(dict(message) | {"content": parts})
        else:
            shown.append(message)
    return shown, pictures


def _picture_in(part: Any) -> Picture | None:
    """The picture in a content part; None for a part of another type. Raises Untokenizable for one by another URL."""
    if not isinstance(part, Mapping) or part.get("type") != "image_url":
        return None
    place, given_id = part.get("image_url"), part.get("uuid")
    url = place.get("url") if isinstance(place, Mapping) else None
    if not isinstance(url, str) or not url.startswith("data:") or not isinstance(given_id, str | None):
        raise Untokenizable("only pictures in data URLs can be tokenized here: others may change")
    return Picture(url, given_id)


def plain_turns(messages: Any) -> tuple[Roles, list[str]] | None:
    """Roles and texts of a conversation; None unless every message is a plain text that vLLM does not change."""
    roles, texts = [], []
    try:
        for message in messages:
            role, text = message["role"], message["content"]
            if type(text) is not str or role not in _PLAIN_ROLES or len(message) != 2:
                return None
            if role == "system" and text.startswith(_BILLING_HEADER):
                return None
            roles.append(role)
            texts.append(text)
    except (KeyError, TypeError):
        return None
    return (tuple(roles), texts) if roles else None


def _read_message(message: Any, *, as_parts: bool) -> Message:
    """One message as vLLM's message parser returns it; raises Untokenizable."""
    # The type first: `isinstance(message, Mapping)` takes longer than the rest of this function.
    if not (type(message) is dict or isinstance(message, Mapping)) or not isinstance(message.get("role"), str):
        raise Untokenizable("each message must be an object with a role")
    role = message["role"]
    read: Message = {"role": role, "content": _read_content(role, message.get("content"), as_parts=as_parts)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            read["tool_calls"] = _read_tool_calls(calls)
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            read["reasoning"] = read["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        read["tool_call_id"] = message["tool_call_id"]
    if "name" in message or "task" in message:
        for key in ("name", "task"):
            if isinstance(message.get(key), str):
                read[key] = message[key]
    if role == "developer":
        read["tools"] = _read_developer_tools(message.get("tools"))
    return read


def _read_content(role: str, content: Any, *, as_parts: bool) -> str | list[Message]:
    """A message's content: text, or a list of parts with `as_parts`. Raises Untokenizable.

    A system message loses its billing header. A tool's content of texts alone is always text.
    """
    if isinstance(content, str):
        if not as_parts and not (role == "system" and content.startswith(_BILLING_HEADER)):
            return content
        content = [content]
    elif content is None:
        content = []
    elif not isinstance(content, list):
        raise Untokenizable("content must be text, a list of parts, or null")
    parts = [read for part in content if (read := _read_part(part, as_parts=as_parts)) is not None]
    if role == "system":
        parts = _without_billing_header(parts)
    if not as_parts:
        # As in vLLM, an empty text adds no line here, but is kept where parts are kept.
        return "\n".join([text for part in parts if (text := part["text" if part["type"] == "text" else "name"])])
    if role == "tool" and all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _read_part(part: Any, *, as_parts: bool) -> Message | None:
    """A text part with the client's extra fields, a picture's place, a tool reference, or None for an empty part.

    Raises HasMedia for any other part, and for a picture without `as_parts`: its place depends on the model then.
    """
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if as_parts and isinstance(part, PictureStandIn):
        return {"type": "image"}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "tool_reference" and isinstance(part.get("name"), str):
        return {"type": "tool_reference", "name": part["name"]}
    if not isinstance(kind, str) or kind not in _TEXT_PARTS or part.get("uuid") is not None:
        raise HasMedia(f"content part of type {kind!r}: only text can be tokenized here")
    text = part.get(_TEXT_PARTS[kind])
    if text is None and kind in {"text", "refusal"}:
        return None
    if not isinstance(text, str):
        raise Untokenizable(f"content part of type {kind!r} has no text")
    return {"type": "text", "text": text} | {key: value for key, value in part.items() if key not in _PART_FIELDS}


def _without_billing_header(parts: list[Message]) -> list[Message]:
    """The parts without Claude Code's billing line, which vLLM drops."""
    remaining = []
    for part in parts:
        if part["type"] == "text" and part["text"].startswith(_BILLING_HEADER):
            rest = part["text"].partition("\n")[2]
            if not rest:
                continue
            part = part | {"text": rest}  # noqa: PLW2901
        remaining.append(part)
    return remaining


def _read_tool_calls(calls: Any) -> list[Message]:
    """Tool calls with arguments as an object and keys in vLLM's order, for templates; raises Untokenizable."""
    if not isinstance(calls, list):
        raise Untokenizable("tool_calls must be a list")
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise Untokenizable("each tool call must be an object of type function with a function")
        order = () if isinstance(function, VllmMadeFunction) else ("arguments", "name")
        known = _with_keys_first(function, order) | {"arguments": _call_arguments(function.get("arguments"))}
        read.append(_with_keys_first(call, ("id", "function", "type")) | {"function": known})
    return read


def _read_developer_tools(tools: Any) -> Any:
    """A developer message's tools, keys in the order of the message types, which differ from a request's own tools.

    Raises Untokenizable for tools of other types, which vLLM parses by other rules.

    source  vLLM 0.32 renderers/chat_utils.py CustomChatCompletionMessageParam; openai 2 FunctionDefinition
    """
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise Untokenizable("a developer's tools must be a list")
    return [_read_developer_tool(tool) for tool in tools]


def _read_developer_tool(tool: Any) -> Message:
    """One tool of a developer message, its keys in order; raises Untokenizable."""
    match tool:
        case {"type": "function", "function": {"name": str(), **rest} as function} if all(
            isinstance(rest[key], kinds) for key, kinds in _FUNCTION_FIELDS.items() if key in rest
        ):
            known = _with_keys_first(function, ("name", *_FUNCTION_FIELDS))
            return _with_keys_first(tool, ("function", "type")) | {"function": known}
    raise Untokenizable("each tool of a developer must be of type function, with a function that has a name")


def _call_arguments(arguments: Any) -> Mapping[str, Any]:
    """The arguments of a tool call as an object; empty if they are not one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {}  # as in vLLM: invalid JSON in the history must not fail every later turn
    return arguments if isinstance(arguments, Mapping) else {}


def _with_keys_first(fields: Mapping[str, Any], first: Sequence[str]) -> Message:
    """`fields` with the keys `first` in front, as pydantic dumps a TypedDict: declared fields, then extra ones."""
    ordered = {key: fields[key] for key in first if key in fields}
    return ordered | {key: value for key, value in fields.items() if key not in ordered}


def merge_developer_into_system(messages: list[Message]) -> list[Message]:
    """The messages for a template without a developer role: developer and system messages become one, in front.

    Tools of a developer message are left out.
    """
    converted = []
    for message in messages:
        if message["role"] == "developer":
            rest = {key: value for key, value in message.items() if key not in {"role", "tools"}}
            converted.append({"role": "system"} | rest)
        else:
            converted.append(message)
    system = [message for message in converted if message["role"] == "system"]
    if len(system) == 1 and converted[0] is system[0]:
        return converted
    texts = [_text_of(message["content"]) for message in system]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in converted if message["role"] != "system")]


def _text_of(content: str | list[Message]) -> str:
    """The texts of a content, a line each."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)
