"""A chat as a completion of its token ids, for engines that run adapters at completions alone; its answer as a chat's.

Source of the fields: OpenAI's API, and sgl-jax entrypoints/openai/protocol.py (August 2026).
"""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from lorafleet.service.decoding import DECODE_ERRORS
from router.core.errors import BadBody, ReplicaUnreachable, StreamBroken
from router.protocols.adapter_fields import RawFields, is_empty
from router.protocols.bodies import data_lines

_PARSE_ERRORS = (*DECODE_ERRORS, ValueError, TypeError, LookupError, AttributeError)
# What the prompt's ids say already, and what a completion has under another name.
_PROMPT_FIELDS = frozenset(
    {
        "messages",
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template_kwargs",
        "continue_final_message",
        "max_completion_tokens",
        "response_format",
        "tool_choice",
    }
)
_NOT_OFFERED: Mapping[str, str] = {
    "tools": "no tool calls are read from its answers",
    "functions": "no tool calls are read from its answers",
    "logprobs": "it has log-probabilities in another form; ask /v1/completions for them",
    "top_logprobs": "it has log-probabilities in another form; ask /v1/completions for them",
    "echo": "it repeats no prompt",
    "chat_template": "the model's own template is used",
    "documents": "its prompt has messages alone",
    "reasoning_effort": "use chat_template_kwargs",
    "mm_processor_kwargs": "it takes text alone",
    "truncate_prompt_tokens": "shorten the messages",
}
_ANY_OBJECT = '{"type": "object"}'  # SGLang's own reading of `json_object`


def completion_of_chat(fields: RawFields, ids: "array[int] | None", max_model_len: int) -> RawFields:
    """The body of a completion with a chat's prompt as token ids; without a length it may fill the engine's context.

    raises  BadBody for what a completion cannot do, and for a prompt without ids
    """
    for name, why in _NOT_OFFERED.items():
        if name in fields and not is_empty(fields[name]):
            raise BadBody(f"{name} is not offered for chats with this adapter's engine: {why}", param=name)
    if ids is None:
        message = "the prompt of a chat with this adapter must be text that this router can tokenize, and it cannot"
        raise BadBody(f"{message}; send it to /v1/completions", param="messages")
    completion = {name: raw for name, raw in fields.items() if name not in _PROMPT_FIELDS and name not in _NOT_OFFERED}
    completion["prompt"] = _raw(ids.tolist())
    length = fields.get("max_completion_tokens")
    if length is not None and not is_empty(length):
        completion["max_tokens"] = length
    elif is_empty(completion.get("max_tokens", _raw(None))):
        completion["max_tokens"] = _raw(max(1, max_model_len - len(ids)))
    schema = _json_schema(fields.get("response_format"))
    return completion | ({"json_schema": _raw(schema)} if schema else {})


def _json_schema(response_format: msgspec.Raw | None) -> str:
    """The JSON schema that a chat's `response_format` asks for, as a text; empty: any text. Raises BadBody."""
    if response_format is None or is_empty(response_format):
        return ""
    try:
        wanted = msgspec.json.decode(response_format)
        match wanted["type"]:
            case "text":
                return ""
            case "json_object":
                return _ANY_OBJECT
            case "json_schema":
                return msgspec.json.encode(wanted["json_schema"]["schema"]).decode()
    except _PARSE_ERRORS:
        pass
    message = "response_format must have the type text, json_object, or json_schema with a schema"
    raise BadBody(message, param="response_format")


def chat_answer(body: bytes) -> bytes:
    """A completion's answer as a chat's; any other body, such as an error's, as it is. Raises ReplicaUnreachable."""
    try:
        answer = msgspec.json.decode(body)
        if answer.get("object") != "text_completion":
            return body
        choices = [_with_text(choice, "message", "assistant") for choice in answer["choices"]]
    except _PARSE_ERRORS as exc:
        raise ReplicaUnreachable("an engine's answer is no completion", reason="bad_answer") from exc
    return msgspec.json.encode(answer | {"object": "chat.completion", "choices": choices})


class ChatStream:
    """Converts a completion's stream to a chat's, whose first event of each choice has the role."""

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def events(self, events: bytes) -> bytes:
        """The chat's events for whole events of a completion; others are passed on. Raises StreamBroken."""
        try:
            return b"".join(b"data: " + self._data(data) + b"\n\n" for data in data_lines(events))
        except _PARSE_ERRORS as exc:
            raise StreamBroken("the engine sent what is no completion's event") from exc

    def _data(self, data: bytes) -> bytes:
        """The data of one event."""
        if data == b"[DONE]":
            return data
        chunk = msgspec.json.decode(data)
        if chunk.get("object") != "text_completion":
            return data
        choices = []
        for choice in chunk["choices"]:
            choices.append(_with_text(choice, "delta", "" if choice["index"] in self._begun else "assistant"))
            self._begun.add(choice["index"])
        return msgspec.json.encode(chunk | {"object": "chat.completion.chunk", "choices": choices})


def _with_text(choice: Mapping[str, Any], part: str, role: str) -> dict[str, Any]:
    """A completion's choice with its text as a chat's `message` or `delta`."""
    rest = {name: value for name, value in choice.items() if name not in {"index", "text"}}
    said = ({"role": role} if role else {}) | {"content": choice["text"]}
    return {"index": choice["index"], part: said, **rest}


def _raw(value: object) -> msgspec.Raw:
    """A value as raw JSON."""
    return msgspec.Raw(msgspec.json.encode(value))
