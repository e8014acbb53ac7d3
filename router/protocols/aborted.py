"""Answers that a pause with mode `abort` ends: what an engine says of a request that was aborted.

Source: vLLM 0.32, which answers an aborted request with `finish_reason: "abort"` and the tokens so far, under 200 (seen
running). The tokens of an unstreamed answer are at the engine and are lost: its choices are empty.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from router.protocols.routes import COMPLETIONS, GENERATE_TOKENS

_CHATS = "/v1/chat/completions"
_UNSET = (b"null", b"false")


class AbortedAnswer(msgspec.Struct, frozen=True):
    """The end of one answer: `body`, where it is not streamed, or the last `events` of its stream."""

    body: bytes
    events: bytes


def aborted_answer(
    path: str, fields: Mapping[str, msgspec.Raw], *, answer_id: str, model: str, choices: int, prompt_tokens: int
) -> AbortedAnswer | None:
    """The end of an aborted answer of this route; None: its format has no word for that.

    fields   of the request's body
    choices  sequences that it asked for
    """
    if path == GENERATE_TOKENS:
        return _aborted_tokens(fields, answer_id, prompt_tokens)
    if path not in (COMPLETIONS, _CHATS):
        return None
    has_logprobs = _is_set(fields, "logprobs")
    ids: dict[str, Any] = {"token_ids": []} if _is_set(fields, "return_token_ids") else {}
    if path == COMPLETIONS:
        empty: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        whole: dict[str, Any] = {"text": ""}
        piece: dict[str, Any] = {"text": ""}
        kinds = "text_completion", "text_completion"
    else:
        empty = {"content": []}
        whole, piece = {"message": {"role": "assistant", "content": ""}}, {"delta": {}}
        kinds = "chat.completion", "chat.completion.chunk"
    ending = ids | {"logprobs": empty if has_logprobs else None, "finish_reason": "abort", "stop_reason": None}
    head = {"id": answer_id, "created": 0, "model": model}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 0, "total_tokens": prompt_tokens}
    numbers = range(choices)
    body = head | {"object": kinds[0], "choices": [{"index": i} | whole | ending for i in numbers], "usage": usage}
    event = head | {"object": kinds[1], "choices": [{"index": i} | piece | ending for i in numbers], "usage": usage}
    return AbortedAnswer(msgspec.json.encode(body), b"data: " + msgspec.json.encode(event) + b"\n\ndata: [DONE]\n\n")


def _aborted_tokens(fields: Mapping[str, msgspec.Raw], answer_id: str, prompt_tokens: int) -> AbortedAnswer:
    """The end of an aborted answer of `/inference/v1/generate`, which is the same whole and streamed."""
    has_logprobs = "sampling_params" in fields and b'"logprobs"' in bytes(fields["sampling_params"])
    choice: dict[str, Any] = {
        "index": 0,
        "logprobs": {"content": []} if has_logprobs else None,
        "finish_reason": "abort",
    }
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 0, "total_tokens": prompt_tokens}
    body = msgspec.json.encode({"request_id": answer_id, "choices": [choice | {"token_ids": []}], "usage": usage})
    return AbortedAnswer(body, b"data: " + body + b"\n\ndata: [DONE]\n\n")


def _is_set(fields: Mapping[str, msgspec.Raw], name: str) -> bool:
    """Whether the body has this field with a value that asks for something."""
    return name in fields and bytes(fields[name]).strip() not in _UNSET
