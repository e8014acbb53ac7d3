"""`POST /generate`: SGLang's native route, served by completions. One batch may mix adapters and the base model.

A batch is split into bodies of `/v1/completions`. Each is routed by itself, and their answers are joined. If one item
fails, the whole call fails.

Source of the formats: SGLang 0.5 docs basic_usage/sampling_params.md and native_api, managers/io_struct.py
GenerateReqInput, managers/tokenizer_manager.py (meta_info). Parameters that vLLM does not have are refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.core.errors import BadBody, ReplicaUnreachable, StreamBroken
from router.protocols.adapter_fields import adapter_field_error, chosen_adapter, is_adapter_name
from router.protocols.bodies import BOM, DECODE_ERRORS, bad_json_error, per_item

PATH = "/generate"
ITEM_PATH = "/v1/completions"

_DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's
# A guess; every item is a request of its own.
MAX_PROMPTS = 1024

_SAME_IN_VLLM = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "n",
        "presence_penalty",
        "repetition_penalty",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
_RENAMED_IN_VLLM: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
# Output constraints; vLLM has them in one field, under these names.
_CONSTRAINTS: Mapping[str, str] = {
    "ebnf": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "structural_tag": "structural_tag",
}
_ITEM_FIELDS = frozenset({"text", "input_ids", "lora_id", "lora_path", "sampling_params", "rid"})
_SHARED_FIELDS = frozenset({"model", "stream", "cache_salt", "priority", "user"})
# Values that switch a field off: an unsupported field may have these.
_UNUSED_VALUES: Sequence[Any] = (None, False, [], {})
# Errors of parsing an answer that is not a completion.
_PARSE_ERRORS = (msgspec.DecodeError, RecursionError, ValueError, TypeError, LookupError, AttributeError)


@dataclass(frozen=True, slots=True)
class GenerateBatch:
    """A `/generate` call split into completions.

    items     bodies of `/v1/completions` as JSON, in order; some with a `lora_id`
    names     each item's id in the answer; empty takes the engine's
    is_list   whether the answer is a list
    """

    items: tuple[bytes, ...]
    names: tuple[str, ...]
    is_list: bool
    is_streamed: bool


def split_batch(body: bytes) -> GenerateBatch:
    """The completions of a call.

    raises  BadBody naming a field that has a wrong type or length, or is not supported
    """
    try:
        body_fields = msgspec.json.decode(body.removeprefix(BOM), type=dict[str, Any])
    except DECODE_ERRORS as exc:
        raise bad_json_error(body, exc) from exc
    for name, value in body_fields.items():
        if name not in _ITEM_FIELDS | _SHARED_FIELDS and value not in _UNUSED_VALUES:
            if is_adapter_name(name):
                raise adapter_field_error(name)
            raise BadBody(f"{name} is not offered by /generate here", param=name)
    prompts, is_list = _prompts(body_fields)
    count = len(prompts)
    name, adapter_names = chosen_adapter(body_fields)
    adapters = per_item(name, adapter_names, count, is_list=is_list)
    params = per_item("sampling_params", body_fields.get("sampling_params"), count, is_list=is_list, kind=dict)
    names = _names(body_fields.get("rid"), count, is_list)
    is_streamed = body_fields.get("stream") is True
    shared = {name: body_fields[name] for name in _SHARED_FIELDS - {"stream"} if body_fields.get(name) is not None}
    items = []
    for prompt, adapter, sampling in zip(prompts, adapters, params, strict=True):
        item = shared | {"prompt": prompt, "return_token_ids": True} | completion_params(sampling or {})
        if adapter:
            item["lora_id"] = adapter
        if is_streamed:
            item |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        items.append(item)
    if is_streamed and (is_list or items[0].get("n", 1) != 1):
        raise BadBody("/generate streams one text with n 1; send several calls, or leave out stream", param="stream")
    return GenerateBatch(tuple(map(msgspec.json.encode, items)), names, is_list, is_streamed)


def completion_params(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's sampling_params as vLLM's; raises BadBody for one without a counterpart."""
    params: dict[str, Any] = {"max_tokens": _DEFAULT_MAX_NEW_TOKENS}
    constraints = {}
    for name, value in sampling.items():
        if name in _SAME_IN_VLLM:
            if value is not None:
                params[name] = value
        elif name in _RENAMED_IN_VLLM:
            if value is not None:
                params[_RENAMED_IN_VLLM[name]] = value
        elif name in _CONSTRAINTS:
            if value is not None:
                constraints[_CONSTRAINTS[name]] = value
        elif value not in _UNUSED_VALUES:
            if is_adapter_name(name):
                raise adapter_field_error(f"sampling_params.{name}")
            raise BadBody(f"sampling_params.{name} has no counterpart in vLLM", param=f"sampling_params.{name}")
    if len(constraints) > 1:
        raise BadBody(
            "sampling_params may have one of json_schema, regex, ebnf, structural_tag", param="sampling_params"
        )
    if constraints:
        params["structured_outputs"] = constraints
    return params


def join_answers(batch: GenerateBatch, answers: Sequence[bytes]) -> bytes:
    """The answer to a call, joined from its items' answers in order; raises ReplicaUnreachable for a bad answer."""
    try:
        outputs = [item for answer, name in zip(answers, batch.names, strict=True) for item in _outputs(answer, name)]
    except _PARSE_ERRORS as exc:
        raise ReplicaUnreachable("an engine's answer is no completion", reason="bad_answer") from exc
    alone = not batch.is_list and len(outputs) == 1
    return msgspec.json.encode(outputs[0] if alone else outputs)


class CumulativeStream:
    """Converts a completion's stream to SGLang's form, where each event has all of the text so far."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text: list[str] = []
        self._ids: list[int] = []
        self._last: dict[str, Any] = {}

    def events(self, events: bytes) -> bytes:
        """SGLang's events for whole events of the engine.

        The event that ends the text waits for the usage that follows, since only that has the cached tokens. An error
        event is passed on. Raises StreamBroken for anything else.
        """
        try:
            return b"".join(filter(None, map(self._event, _data_lines(events))))
        except _PARSE_ERRORS as exc:
            raise StreamBroken("the engine sent what is no completion's event") from exc

    def _event(self, data: bytes) -> bytes:
        """SGLang's event for one event of the engine, whose text is added; empty if it must wait."""
        if data == b"[DONE]":
            return self._take_last_event() + b"data: [DONE]\n\n"
        chunk = msgspec.json.decode(data)
        choices, usage = chunk.get("choices"), chunk.get("usage")
        if choices is None:
            return self._take_last_event() + b"data: " + data + b"\n\n"
        if not choices:
            if self._last:
                self._last = _output(self._name or chunk["id"], self._text_and_ids(), usage, self._last["meta_info"])
            return self._take_last_event()
        (choice,) = choices
        self._text.append(choice["text"])
        self._ids += choice.get("token_ids") or []
        reason = _finish_reason(choice, self._ids)
        output = _output(self._name or chunk["id"], self._text_and_ids(), usage, {"finish_reason": reason})
        if reason is not None:
            self._last = output
            return b""
        return b"data: " + msgspec.json.encode(output) + b"\n\n"

    def _text_and_ids(self) -> tuple[str, list[int]]:
        """Text and token ids of all events so far."""
        return "".join(self._text), self._ids

    def _take_last_event(self) -> bytes:
        """Take the event that waits, encoded; empty where none waits."""
        last, self._last = self._last, {}
        return b"data: " + msgspec.json.encode(last) + b"\n\n" if last else b""


def _prompts(body_fields: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """The prompts of a call, and whether they are a list; raises BadBody."""
    text, ids = body_fields.get("text"), body_fields.get("input_ids")
    if (text is None) == (ids is None):
        raise BadBody("one of text and input_ids must be there", param="text")
    name, prompt = ("text", text) if ids is None else ("input_ids", ids)
    is_list = isinstance(prompt, list) and (name == "text" or (bool(prompt) and isinstance(prompt[0], list)))
    prompts: list[Any] = list(prompt) if isinstance(prompt, list) and is_list else [prompt]
    if not prompts or len(prompts) > MAX_PROMPTS:
        raise BadBody(f"{name} must have 1 to {MAX_PROMPTS} prompts, found {len(prompts)}", param=name)
    for item in prompts:
        is_right = isinstance(item, str) if name == "text" else _is_ids(item)
        if not is_right:
            raise BadBody(f"{name} must be {'text' if name == 'text' else 'token ids'}, or a list of them", param=name)
    return prompts, is_list


def _is_ids(value: Any) -> bool:
    """Whether this is a list of token ids that is not empty."""
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


def _names(rid: Any, count: int, is_list: bool) -> tuple[str, ...]:
    """Each item's id from `rid`; empty where it has none. Raises BadBody."""
    if rid is None:
        return ("",) * count
    if isinstance(rid, str):
        return tuple(f"{rid}_{i}" for i in range(count)) if is_list else (rid,)
    return tuple(name or "" for name in per_item("rid", rid, count, is_list=is_list))


def _outputs(answer: bytes, name: str) -> list[dict[str, Any]]:
    """SGLang's outputs for the choices of one completion."""
    whole = msgspec.json.decode(answer)
    outputs = []
    for choice in whole["choices"]:
        ids = choice.get("token_ids") or []
        counted = whole["usage"] | {"completion_tokens": len(ids)}  # the engine's own is of all choices together
        finish = {"finish_reason": _finish_reason(choice, ids)}
        outputs.append(_output(name or whole["id"], (choice["text"], ids), counted, finish))
    return outputs


def _output(
    name: str, text: tuple[str, list[int]], usage: Mapping[str, Any], finish: Mapping[str, Any]
) -> dict[str, Any]:
    """One output in SGLang's form. `text`: the text and its token ids; `finish`: has the `finish_reason`."""
    meta = {
        "id": name,
        "finish_reason": finish["finish_reason"],
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    }
    return {"text": text[0], "output_ids": text[1], "meta_info": meta}


def _finish_reason(choice: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any] | None:
    """SGLang's finish reason for a choice; None while it is unfinished."""
    reason, matched = choice.get("finish_reason"), choice.get("stop_reason")
    if reason is None:
        return None
    if reason == "length":
        return {"type": "length", "length": len(ids)}
    if reason == "stop":
        # vLLM names no stop reason for the end-of-text token, which is then the last one.
        return {"type": "stop", "matched": matched if matched is not None else (ids[-1] if ids else None)}
    return {"type": reason}


def _data_lines(events: bytes) -> list[bytes]:
    """The data of each of these events."""
    return [line[len(b"data:") :].strip() for line in events.split(b"\n") if line.startswith(b"data:")]
