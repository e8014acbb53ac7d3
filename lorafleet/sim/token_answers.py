"""Answers of /inference/v1/generate with vLLM 0.32's keys in its order (scale_out/token_in_token_out/protocol.py)."""

from collections.abc import Sequence
from typing import Any

from lorafleet.sim.answers import AnswerHead, openai_finish_reason, usage_of_jobs
from lorafleet.sim.engine import StreamedJob
from lorafleet.sim.logprobs import token_logprobs


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
        "choices": [_choice(head, index, job, 0, len(job.reply)) for index, job in enumerate(jobs)],
    }


def token_chunk(head: AnswerHead, index: int, job: StreamedJob, seen: int, until: int) -> dict[str, Any]:
    """A chunk with tokens `seen` to `until` of one choice; the first has the prompt's ids, if they were asked for."""
    chunk: dict[str, Any] = {"request_id": head.id, "usage": None}
    if head.token_ids and not seen:
        chunk["prompt_token_ids"] = prompt_ids(job)
    return chunk | {"output_mode": "tokens", "choices": [_choice(head, index, job, seen, until)]}


def token_usage_chunk(head: AnswerHead, jobs: Sequence[StreamedJob]) -> dict[str, Any]:
    """The last chunk of a stream with `stream_options.include_usage`."""
    usage = usage_of_jobs(head, jobs, whole=False)
    return {"request_id": head.id, "usage": usage, "output_mode": "tokens", "choices": []}


def prompt_ids(job: StreamedJob) -> list[int]:
    """The token ids of a job's prompt."""
    return list(job.chain.tokens[: job.prompt_tokens])


def _choice(head: AnswerHead, index: int, job: StreamedJob, seen: int, until: int) -> dict[str, Any]:
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
