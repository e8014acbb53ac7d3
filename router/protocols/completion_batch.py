"""`POST /v1/completions` with an adapter for each of its prompts: a completion for each, joined into one answer.

An engine runs all prompts of a completion under one model, so this is SGLang's list form of `lora_path` alone. Answers
have vLLM 0.32's form for several prompts (entrypoints/openai/completion/serving.py): choices in the order of the
prompts, `n` of them for each, and the sums of the usage.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lorafleet.service.decoding import DECODE_ERRORS
from router.core.errors import BadBody, ReplicaUnreachable
from router.protocols.adapter_fields import LORA_ID, LORA_PATH, RawFields, text_list
from router.protocols.bodies import ItemAnswer, is_streamed_call

_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
# Fields of a call that no single completion gets.
_OF_THE_CALL = frozenset({LORA_ID, LORA_PATH, "prompt", "request_id"})
# Errors of parsing an answer that is not a completion.
_PARSE_ERRORS = (*DECODE_ERRORS, ValueError, TypeError, LookupError, AttributeError)


def split_completions(fields: RawFields, prompt: object, adapters: Sequence[str | None]) -> Iterator[bytes]:
    """The body of each prompt's completion, as JSON.

    fields    of the call
    prompt    its decoded prompts
    adapters  one for each of them; None: what `model` names
    """
    shared = {name: raw for name, raw in fields.items() if name not in _OF_THE_CALL}
    for text, adapter in zip(text_list(prompt) or (), adapters, strict=True):
        own = {"prompt": text} | ({LORA_ID: adapter} if adapter else {})
        yield msgspec.json.encode(shared | own)


def check_not_streamed(stream: object, *, param: str) -> None:
    """Raise BadBody for a stream: events of several engines have no common order.

    stream  the decoded field
    """
    if is_streamed_call(stream):
        message = "a stream has one adapter for all prompts; send one call for each adapter, or leave out stream"
        raise BadBody(f"{param} names several: {message}", param="stream")


def join_completions(answer_id: str, answers: Sequence[ItemAnswer], *, names_weights: bool = False) -> bytes:
    """The answer to the call, from its completions' answers in order; all else is of the first.

    names_weights  each choice has its own weights as `system_fingerprint`, and the answer has all of them

    raises  ReplicaUnreachable for an answer that is no completion
    """
    try:
        wholes = [msgspec.json.decode(answer.body, type=dict[str, Any]) for answer in answers]
        choices = []
        for whole, answer in zip(wholes, answers, strict=True):
            own = {"system_fingerprint": answer.weights} if names_weights else {}
            choices += [choice | own for choice in sorted(whole["choices"], key=lambda one: one["index"])]
        joined = wholes[0] | {
            "id": answer_id,
            "choices": [choice | {"index": index} for index, choice in enumerate(choices)],
            "usage": _total_usage([whole["usage"] for whole in wholes]),
        }
        if names_weights:
            joined["system_fingerprint"] = ",".join(dict.fromkeys(answer.weights for answer in answers))
    except _PARSE_ERRORS as exc:
        raise ReplicaUnreachable("an engine's answer is no completion", reason="bad_answer") from exc
    return msgspec.json.encode(joined)


def _total_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of these usages; cached tokens where one of them has any."""
    total: dict[str, Any] = dict(usages[0]) | {name: sum(usage[name] for usage in usages) for name in _USAGE}
    details = [usage.get("prompt_tokens_details") or {} for usage in usages]
    if any(details):
        total["prompt_tokens_details"] = {"cached_tokens": sum(each.get("cached_tokens") or 0 for each in details)}
    return total
