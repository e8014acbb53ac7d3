"""Answer bodies with vLLM 0.32's keys in its order (vllm/entrypoints/openai/*/protocol.py; tests/contract)."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from lorafleet.sim.adapters import SimAdapter
from lorafleet.sim.engine import StreamedJob
from lorafleet.sim.text import prompt_logprobs, top_logprobs
from lorafleet.sim.timing import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The fields that all chunks of one answer share."""

    is_chat: bool
    id: str
    created: int
    model: str
    fingerprint: str
    show_cached: bool
    """--enable-prompt-tokens-details"""
    token_ids: bool
    """The client asked for return_token_ids."""
    choices_per_prompt: int
    block_size: int
    is_tokens: bool = False
    """The answer is one of /inference/v1/generate, see `token_answers`."""
    logprobs: int | None = None
    """How many log-probabilities of each token a completion has; None: none."""
    has_prompt_logprobs: bool = False
    """A completion has the log-probabilities of its prompt's own tokens."""
    names_tokens_by_id: bool = False
    """The client asked for return_tokens_as_token_ids."""


def random_id() -> str:
    """A random id of 16 hex digits, as in vLLM."""
    return uuid.uuid4().hex[:16]


def openai_finish_reason(job: StreamedJob) -> str | None:
    """The `finish_reason` field of an answer; None while the job runs."""
    return job.finish_reason.value if job.finish_reason in {FinishReason.STOP, FinishReason.LENGTH} else None


def full_answer(head: AnswerHead, jobs: Sequence[StreamedJob], echoes: Sequence[str]) -> dict[str, Any]:
    """The answer to a request without `stream`; `echoes` has the text before each job's answer."""
    choices = [_whole_choice(head, index, job, echoes[index]) for index, job in enumerate(jobs)]
    answer: dict[str, Any] = {
        "id": head.id,
        "object": "chat.completion" if head.is_chat else "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": head.fingerprint,
        "usage": usage_of_jobs(head, jobs, whole=True),
    }
    if head.is_chat:
        ids = jobs[0].chain.tokens[: jobs[0].prompt_tokens] if head.token_ids else None
        answer |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
    return answer | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


def role_chunk(head: AnswerHead, index: int, job: StreamedJob, *, continuous: bool) -> dict[str, Any]:
    """The first chunk of a streamed chat, without text."""
    delta = {"role": "assistant", "content": ""}
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    chunk = _chunk(head, [choice])
    if continuous:
        chunk["usage"] = _running_usage(head, job, 0)
    ids = job.chain.tokens[: job.prompt_tokens] if head.token_ids else None
    return chunk | {"prompt_token_ids": ids, "prompt_text": None}


def text_chunk(
    head: AnswerHead,
    index: int,
    job: StreamedJob,
    seen: int,
    until: int,
    text: str,
    *,
    continuous: bool,
    with_fingerprint: bool,
) -> dict[str, Any]:
    """A chunk with tokens `seen` to `until` of one choice; `with_fingerprint`: the last chunk has the fingerprint."""
    reason = openai_finish_reason(job) if until == len(job.reply) else None
    ids = job.reply_text.token_ids[seen:until] if head.token_ids else None
    if head.is_chat:
        choice: dict[str, Any] = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = job.reply_text.stop_reason
    else:
        prompt_ids = job.chain.tokens[: job.prompt_tokens] if head.token_ids and not seen else None
        choice = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": job.reply_text.stop_reason if reason else None,
            "prompt_token_ids": prompt_ids,
        }
    choice["token_ids"] = ids
    chunk = _chunk(head, [choice])
    if continuous:
        chunk["usage"] = _running_usage(head, job, until)
    if reason is not None and with_fingerprint:
        chunk["system_fingerprint"] = head.fingerprint
    return chunk


def usage_chunk(head: AnswerHead, jobs: Sequence[StreamedJob]) -> dict[str, Any]:
    """The last chunk of a stream with `stream_options.include_usage`."""
    return _chunk(head, []) | {"usage": usage_of_jobs(head, jobs, whole=False), "system_fingerprint": head.fingerprint}


def model_list(names: Sequence[str], root: str, max_model_len: int, adapters: Sequence[SimAdapter]) -> dict[str, Any]:
    """`GET /v1/models`: the base model under each of its names, then the adapters."""
    cards = [_model_card(name, root, None, max_model_len) for name in names]
    cards += [_model_card(adapter.name, adapter.path, names[0], None) for adapter in adapters]
    return {"object": "list", "data": cards}


def _whole_choice(head: AnswerHead, index: int, job: StreamedJob, echo: str) -> dict[str, Any]:
    """One choice of an unstreamed chat or completion, in vLLM's form; with token ids if they were asked for."""
    text = echo + "".join(job.reply_text.pieces)
    ids = list(job.reply) if head.token_ids else None
    ending: dict[str, Any] = {
        "logprobs": None,
        "finish_reason": openai_finish_reason(job),
        "stop_reason": job.reply_text.stop_reason,
    }
    if head.is_chat:
        message = {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None}
        message |= {"function_call": None, "reasoning": None}
        if head.logprobs is not None:
            ending["logprobs"] = chat_logprobs(job, head.logprobs, by_id=head.names_tokens_by_id)
        return {"index": index, "message": message, **ending, "token_ids": ids, "routed_experts": None}
    prompt_ids = job.chain.tokens[: job.prompt_tokens] if head.token_ids else None
    if head.logprobs is not None:
        ending["logprobs"] = completion_logprobs(job, head.logprobs, by_id=head.names_tokens_by_id)
    of_prompt = _prompt_rows(job) if head.has_prompt_logprobs else None
    last = {"token_ids": ids, "prompt_logprobs": of_prompt, "prompt_token_ids": prompt_ids, "routed_experts": None}
    return {"index": index, "text": text, **ending, **last}


def _chunk(head: AnswerHead, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """A chunk of a streamed answer with these choices."""
    kind = "chat.completion.chunk" if head.is_chat else "text_completion"
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices}


def _running_usage(head: AnswerHead, job: StreamedJob, produced: int) -> dict[str, Any]:
    """The `usage` of a chunk with `continuous_usage_stats`."""
    counts = {"prompt_tokens": job.prompt_tokens, "total_tokens": job.prompt_tokens + produced}
    counts["completion_tokens"] = produced
    return {**counts, "completion_tokens_details": None} if head.is_chat else counts


def usage_of_jobs(head: AnswerHead, jobs: Sequence[StreamedJob], *, whole: bool) -> dict[str, Any]:
    """The `usage` of an answer; with `whole`, of one without `stream`."""
    prompt_tokens = sum(job.prompt_tokens for job in jobs[:: head.choices_per_prompt])
    produced = sum(job.produced for job in jobs)
    usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + produced}
    usage["completion_tokens"] = produced
    details = _prompt_tokens_details(head, jobs[-1] if whole else jobs[0], whole=whole) if head.show_cached else None
    if whole:  # a stream leaves out what is null
        return usage | {"prompt_tokens_details": details, "completion_tokens_details": None}
    return usage if details is None else usage | {"prompt_tokens_details": details}


def _prompt_tokens_details(head: AnswerHead, job: StreamedJob, *, whole: bool) -> dict[str, Any]:
    """The `prompt_tokens_details` of an answer."""
    details: dict[str, Any] = {"cached_tokens": job.cached_tokens}
    if head.is_chat:
        details["created_cache_tokens"] = job.prompt_tokens // head.block_size * head.block_size - job.cached_tokens
    elif whole:
        details["created_cache_tokens"] = None
    return details | {"multimodal_tokens": None} if whole else details


def _model_card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    """One entry of `GET /v1/models`."""
    created = int(time.time())
    permission = {
        "id": f"modelperm-{random_id()}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {"id": name, "object": "model", "created": created, "owned_by": "vllm", "root": root, "parent": parent}
    return card | {"max_model_len": max_model_len, "permission": [permission]}


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


def _prompt_rows(job: StreamedJob) -> list[dict[str, dict[str, float]] | None]:
    """The log-probabilities of the prompt's own tokens, in vLLM's form: null for the first."""
    digest = job.adapter.digest if isinstance(job.adapter, SimAdapter) else b""
    prompt = list(job.chain.tokens[: job.prompt_tokens])
    values = zip(prompt[1:], prompt_logprobs(digest, prompt), strict=True)
    return [None, *({str(token): {"logprob": value}} for token, value in values)]


def _names(job: StreamedJob, *, by_id: bool) -> list[str]:
    return [f"token_id:{token}" for token in job.reply] if by_id else list(job.reply_text.pieces)


def _chat_row(name: str, value: float) -> dict[str, Any]:
    return {"token": name, "logprob": value, "bytes": list(name.encode())}


def _place(place: Mapping[int, float], sampled: int) -> dict[str, Any]:
    """The log-probabilities at one place: the sampled token, and the likeliest."""
    rows = [{"token_id": token, "logprob": value, "rank": rank} for rank, (token, value) in enumerate(place.items(), 1)]
    (own,) = [row for row in rows if row["token_id"] == sampled]
    return {**own, "top_logprobs": rows}


def full_token_answer(head: AnswerHead, jobs: Sequence[StreamedJob]) -> dict[str, Any]:
    """The answer to a request without `stream`."""
    usage = usage_of_jobs(head, jobs, whole=True)
    absent = dict.fromkeys(("prompt_logprobs", "prompt_token_id_logprobs"))
    ids = {"prompt_token_ids": prompt_ids(jobs[0]) if head.token_ids else None, "mm_placeholders": None}
    return {
        "request_id": head.id,
        "model": head.model,
        "created": head.created,
        "usage": usage,
        **absent,
        **ids,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": [_token_choice(head, index, job, 0, len(job.reply)) for index, job in enumerate(jobs)],
    }


def token_chunk(head: AnswerHead, index: int, job: StreamedJob, seen: int, until: int) -> dict[str, Any]:
    """A chunk with tokens `seen` to `until` of one choice; the first has the prompt's ids, if they were asked for."""
    chunk: dict[str, Any] = {"request_id": head.id, "usage": None}
    if head.token_ids and not seen:
        chunk["prompt_token_ids"] = prompt_ids(job)
    return chunk | {"output_mode": "tokens", "choices": [_token_choice(head, index, job, seen, until)]}


def token_usage_chunk(head: AnswerHead, jobs: Sequence[StreamedJob]) -> dict[str, Any]:
    """The last chunk of a stream with `stream_options.include_usage`."""
    usage = usage_of_jobs(head, jobs, whole=False)
    return {"request_id": head.id, "usage": usage, "output_mode": "tokens", "choices": []}


def prompt_ids(job: StreamedJob) -> list[int]:
    """The token ids of a job's prompt."""
    return list(job.chain.tokens[: job.prompt_tokens])


def _token_choice(head: AnswerHead, index: int, job: StreamedJob, seen: int, until: int) -> dict[str, Any]:
    """One choice, or its part with tokens `seen` to `until`."""
    tokens = list(job.reply[seen:until])
    is_last = until == len(job.reply)
    return {
        "index": index,
        "finish_reason": openai_finish_reason(job) if is_last else None,
        "stop_reason": job.reply_text.stop_reason if is_last else None,
        "token_ids": tokens,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        "logprobs": None if head.logprobs is None else token_logprobs(job, head.logprobs, seen, until),
    }
