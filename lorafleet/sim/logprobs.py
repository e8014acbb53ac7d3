"""The `logprobs` of answers with vLLM 0.32's keys: of completions, chats and /inference/v1/generate."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from lorafleet.sim.adapters import SimAdapter
from lorafleet.sim.engine import StreamedJob
from lorafleet.sim.text import top_logprobs


def completion_logprobs(job: StreamedJob, count: int, *, by_id: bool) -> dict[str, Any]:
    """Those of a completion. `by_id`: tokens are named `token_id:N`, else by their text; then `count` is at most 1."""
    names = _names(job, by_id=by_id)
    places = _places(job, count)
    return {
        "text_offset": list(accumulate(map(len, names[:-1]), initial=0)),
        "token_logprobs": [place[token] for place, token in zip(places, job.reply, strict=True)],
        "tokens": names,
        "top_logprobs": [
            {(name if token == own else f"token_id:{token}"): value for token, value in place.items()}
            for place, own, name in zip(places, job.reply, names, strict=True)
        ],
    }


def chat_logprobs(job: StreamedJob, count: int, *, by_id: bool) -> dict[str, Any]:
    """Those of a chat, named as in `completion_logprobs`; 0 likeliest tokens are none."""
    content = []
    for place, own, name in zip(_places(job, count), job.reply, _names(job, by_id=by_id), strict=True):
        rows = [_chat_row(name if token == own else f"token_id:{token}", value) for token, value in place.items()]
        content.append({**_chat_row(name, place[own]), "top_logprobs": rows[:count]})
    return {"content": content}


def token_logprobs(job: StreamedJob, count: int, seen: int, until: int) -> dict[str, Any]:
    """Those of tokens `seen` to `until` in /inference/v1/generate, and of the `count` likeliest at each place."""
    places = _places(job, count)[seen:until]
    return {"content": [_place(place, token) for place, token in zip(places, job.reply[seen:until], strict=True)]}


def _places(job: StreamedJob, count: int) -> list[dict[int, float]]:
    digest = job.adapter.digest if isinstance(job.adapter, SimAdapter) else b""
    return top_logprobs(digest, list(job.chain.tokens[: job.prompt_tokens]), list(job.reply), count)


def _names(job: StreamedJob, *, by_id: bool) -> list[str]:
    return [f"token_id:{token}" for token in job.reply] if by_id else list(job.reply_text.pieces)


def _chat_row(name: str, value: float) -> dict[str, Any]:
    return {"token": name, "logprob": value, "bytes": list(name.encode())}


def _place(place: Mapping[int, float], sampled: int) -> dict[str, Any]:
    """The log-probabilities at one place: the sampled token, and the likeliest."""
    rows = [{"token_id": token, "logprob": value, "rank": rank} for rank, (token, value) in enumerate(place.items(), 1)]
    (own,) = [row for row in rows if row["token_id"] == sampled]
    return {**own, "top_logprobs": rows}
