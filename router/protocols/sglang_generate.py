"""`POST /generate`: SGLang's native route, served by completions. One batch may mix adapters and the base model.

A batch is split into bodies of `/v1/completions`. Each is routed by itself, and their answers are joined. If one item
fails, the whole call fails. An item that goes to an SGLang goes there in SGLang's own form, and so does its answer.

Source of the formats: SGLang 0.5 docs basic_usage/sampling_params.md and native_api, managers/io_struct.py
GenerateReqInput, managers/tokenizer_manager.py (meta_info). Parameters that vLLM does not have are refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lorafleet.service.decoding import DECODE_ERRORS
from router.core.errors import BadBody, ReplicaUnreachable, StreamBroken
from router.protocols import sglang_logprobs
from router.protocols.adapter_fields import adapter_field_error, chosen_adapter, is_adapter_name
from router.protocols.bodies import BOM, ItemAnswer, bad_json_error, data_lines, is_streamed_call, per_item
from router.protocols.sglang_logprobs import LogprobsRequest

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
_KNOWN_FIELDS = _ITEM_FIELDS | _SHARED_FIELDS | {*sglang_logprobs.FIELDS}
# SGLang passes this on to its scheduler, and a salt as `extra_key`; the rest of an item is its own.
_NATIVE_SHARED = ("priority",)
# Fields that trainers send, and what there is in their place.
_NOT_OFFERED: Mapping[str, str] = {
    "image_data": "send pictures to /v1/chat/completions, as image_url",
    "return_hidden_states": "hidden states are at /pooling, of an engine with a model that pools",
    "return_routed_experts": "vLLM and SGLang encode routed experts differently; train without replaying them",
    "token_ids_logprob": "ask for top_logprobs_num, or for logprob_start_len with the tokens in the prompt",
}
# Values that switch a field off: an unsupported field may have these.
_UNUSED_VALUES: Sequence[Any] = (None, False, [], {})
# Errors of parsing an answer that is not a completion.
_PARSE_ERRORS = (*DECODE_ERRORS, ValueError, TypeError, LookupError, AttributeError)


@dataclass(frozen=True, slots=True)
class GenerateBatch:
    """A `/generate` call split into completions.

    items     bodies of `/v1/completions` as JSON, in order; some with a `lora_id`
    names     each item's id in the answer; empty takes the engine's
    is_list   whether the answer is a list
    natives   each item in SGLang's own form, without its prompt and adapter
    logprobs  the log-probabilities that each item's answer has; None: none
    """

    items: tuple[bytes, ...]
    names: tuple[str, ...]
    natives: tuple[Mapping[str, Any], ...]
    logprobs: tuple[LogprobsRequest | None, ...]
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
        if name not in _KNOWN_FIELDS and value not in _UNUSED_VALUES:
            if is_adapter_name(name):
                raise adapter_field_error(name)
            instead = f": {_NOT_OFFERED[name]}" if name in _NOT_OFFERED else ""
            raise BadBody(f"{name} is not offered by /generate here{instead}", param=name)
    prompts, is_list = _call_prompts(body_fields)
    count = len(prompts)
    name, adapter_names = chosen_adapter(body_fields)
    adapters = per_item(name, adapter_names, count, is_list=is_list)
    params = per_item("sampling_params", body_fields.get("sampling_params"), count, is_list=is_list, kind=dict)
    names = _item_ids(body_fields.get("rid"), count, is_list)
    is_streamed = is_streamed_call(body_fields.get("stream"))
    shared = {name: body_fields[name] for name in _SHARED_FIELDS - {"stream"} if body_fields.get(name) is not None}
    logprobs = sglang_logprobs.logprobs_requests(body_fields, count, is_list=is_list)
    own = {name: shared[name] for name in _NATIVE_SHARED if name in shared}
    items, natives = [], []
    for prompt, adapter, sampling, wanted in zip(prompts, adapters, params, logprobs, strict=True):
        item = shared | {"prompt": prompt, "return_token_ids": True} | completion_params(sampling or {})
        native = own | {"sampling_params": sampling or {}, "stream": is_streamed}
        if wanted is not None:
            item |= wanted.completion_fields()
            native |= wanted.native_fields()
        natives.append(native)
        if adapter:
            item["lora_id"] = adapter
        if is_streamed:
            item |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        items.append(item)
    if is_streamed and (is_list or items[0].get("n", 1) != 1):
        raise BadBody("/generate streams one text with n 1; send several calls, or leave out stream", param="stream")
    encoded = tuple(map(msgspec.json.encode, items))
    return GenerateBatch(encoded, names, tuple(natives), tuple(logprobs), is_list, is_streamed)


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


def join_answers(batch: GenerateBatch, answers: Sequence[ItemAnswer]) -> bytes:
    """The answer to a call, joined from its items' answers in order; raises ReplicaUnreachable for a bad answer."""
    try:
        outputs = [
            output
            for answer, name, wanted in zip(answers, batch.names, batch.logprobs, strict=True)
            for output in _completion_outputs(answer, name, wanted)
        ]
    except _PARSE_ERRORS as exc:
        raise ReplicaUnreachable("an engine's answer is no completion", reason="bad_answer") from exc
    if not outputs:
        raise ReplicaUnreachable("an engine's answer is no completion", reason="bad_answer")
    alone = not batch.is_list and len(outputs) == 1
    return msgspec.json.encode(outputs[0] if alone else outputs)


class CumulativeStream:
    """Converts a completion's stream to SGLang's form, where each event has all of the text so far.

    An SGLang's own stream gets the id and the weights alone.

    weights  those that make the answer, see `ItemAnswer`; set before the first event
    """

    def __init__(self, name: str, logprobs: LogprobsRequest | None = None) -> None:
        self.weights = ""
        self._name = name
        self._wanted = logprobs
        self._logprobs: dict[str, list[Any]] = {}
        self._text: list[str] = []
        self._ids: list[int] = []
        self._last: dict[str, Any] = {}

    def events(self, events: bytes) -> bytes:
        """SGLang's events for whole events of the engine.

        The event that ends the text waits for the usage that follows, since only that has the cached tokens. An error
        event is passed on. Raises StreamBroken for anything else.
        """
        try:
            return b"".join(filter(None, map(self._event, data_lines(events))))
        except _PARSE_ERRORS as exc:
            raise StreamBroken("the engine sent what is no completion's event") from exc

    def _event(self, data: bytes) -> bytes:
        """SGLang's event for one event of the engine, whose text is added; empty if it must wait."""
        if data == b"[DONE]":
            return self._take_last_event() + b"data: [DONE]\n\n"
        chunk = msgspec.json.decode(data)
        if "meta_info" in chunk:
            return b"data: " + msgspec.json.encode(_signed_output(chunk, self._name, self.weights)) + b"\n\n"
        choices, usage = chunk.get("choices"), chunk.get("usage")
        if choices is None:
            return self._take_last_event() + b"data: " + data + b"\n\n"
        if not choices:
            if self._last:
                self._last = self._output(chunk, usage, self._last["meta_info"]["finish_reason"])
            return self._take_last_event()
        (choice,) = choices
        self._text.append(choice["text"])
        new_ids = choice.get("token_ids") or []
        self._ids += new_ids
        if self._wanted is not None:
            if not self._logprobs:
                self._logprobs = sglang_logprobs.input_logprobs(choice, self._wanted)
            for name, values in sglang_logprobs.output_logprobs(choice, new_ids, self._wanted).items():
                self._logprobs.setdefault(name, []).extend(values)
        reason = _finish_reason(choice, self._ids)
        output = self._output(chunk, usage, reason)
        if reason is not None:
            self._last = output
            return b""
        return b"data: " + msgspec.json.encode(output) + b"\n\n"

    def _output(self, chunk: Mapping[str, Any], usage: Mapping[str, Any], reason: Any) -> dict[str, Any]:
        """SGLang's output with all of the text so far."""
        name = self._name or chunk["id"]
        return _output(name, ("".join(self._text), self._ids), usage, reason, self.weights, self._logprobs)

    def _take_last_event(self) -> bytes:
        """Take the event that waits, encoded; empty where none waits."""
        last, self._last = self._last, {}
        return b"data: " + msgspec.json.encode(last) + b"\n\n" if last else b""


def _call_prompts(body_fields: Mapping[str, Any]) -> tuple[list[Any], bool]:
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


def _item_ids(rid: Any, count: int, is_list: bool) -> tuple[str, ...]:
    """Each item's id from `rid`; empty where it has none. Raises BadBody."""
    if rid is None:
        return ("",) * count
    if isinstance(rid, str):
        return tuple(f"{rid}_{i}" for i in range(count)) if is_list else (rid,)
    return tuple(name or "" for name in per_item("rid", rid, count, is_list=is_list))


def _completion_outputs(answer: ItemAnswer, name: str, wanted: LogprobsRequest | None) -> list[dict[str, Any]]:
    """SGLang's outputs for the choices of one completion, or of an SGLang's own answer."""
    whole = msgspec.json.decode(answer.body)
    if isinstance(whole, list) or "meta_info" in whole:
        return [
            _signed_output(output, name, answer.weights) for output in (whole if isinstance(whole, list) else [whole])
        ]
    outputs = []
    for choice in whole["choices"]:
        ids = choice.get("token_ids") or []
        counted = whole["usage"] | {"completion_tokens": len(ids)}  # the engine's own is of all choices together
        logprobs = {}
        if wanted is not None:
            logprobs = sglang_logprobs.input_logprobs(choice, wanted)
            logprobs |= sglang_logprobs.output_logprobs(choice, ids, wanted)
        reason = _finish_reason(choice, ids)
        outputs.append(_output(name or whole["id"], (choice["text"], ids), counted, reason, answer.weights, logprobs))
    return outputs


def _output(
    name: str,
    text: tuple[str, list[int]],
    usage: Mapping[str, Any],
    reason: Any,
    weights: str,
    logprobs: Mapping[str, Any],
) -> dict[str, Any]:
    """One output in SGLang's form. `text`: the text and its token ids."""
    meta = {
        "id": name,
        "finish_reason": reason,
        "prompt_tokens": usage["prompt_tokens"],
        "weight_version": weights,
        "completion_tokens": usage["completion_tokens"],
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    }
    return {"text": text[0], "output_ids": text[1], "meta_info": {**meta, **logprobs}}


def _signed_output(output: dict[str, Any], name: str, weights: str) -> dict[str, Any]:
    """An SGLang's own output with the client's id, if it gave one, and the weights by the fleet's name."""
    meta = output["meta_info"] | {"weight_version": weights}
    return output | {"meta_info": meta | {"id": name} if name else meta}


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
