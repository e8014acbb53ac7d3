"""Sends planned requests to a router and measures what comes back."""

import asyncio
import json
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import httpx

from lorafleet.cli.bench.plan import PlannedRequest
from lorafleet.cli.bench.report import RequestOutcome
from lorafleet.service.http.event_streams import json_events

_CONNECT_S = 10.0


async def run_load(
    url: str,
    token: str,
    planned: Iterable[PlannedRequest],
    *,
    output_tokens: int,
    concurrency: int | None,
    timeout_s: float,
    on_end: Callable[[RequestOutcome], None],
    verify: ssl.SSLContext | bool = True,
) -> tuple[list[RequestOutcome], float]:
    """Send every request at its time; their outcomes in the order of `planned`, and the seconds that all took.

    planned      ordered by `at_s`; read at most one request ahead of what has been sent
    concurrency  most requests at a time; a request whose turn comes late is measured from when it is sent
    on_end       called with each outcome as it comes
    verify       what the router's certificate is checked by, as for httpx
    """
    headers = {"authorization": f"Bearer {token}"} if token else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S, pool=None)
    turns = asyncio.Semaphore(concurrency or sys.maxsize)
    sent: list[asyncio.Task[RequestOutcome]] = []
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=timeout, trust_env=False, verify=verify
    ) as client:
        start = time.perf_counter()

        def elapsed_s() -> float:
            """Seconds since the start."""
            return time.perf_counter() - start

        async def one(request: PlannedRequest) -> RequestOutcome:
            """Send the request, and give its turn to the next."""
            try:
                outcome = await send(client, request, output_tokens, elapsed_s)
            finally:
                turns.release()
            on_end(outcome)
            return outcome

        async with asyncio.TaskGroup() as running:
            for request in planned:
                await asyncio.sleep(request.at_s - elapsed_s())
                await turns.acquire()
                sent.append(running.create_task(one(request)))
        return [task.result() for task in sent], elapsed_s()


async def send(
    client: httpx.AsyncClient, request: PlannedRequest, output_tokens: int, elapsed_s: Callable[[], float]
) -> RequestOutcome:
    """Stream one completion and measure it; a failure is an outcome, too."""
    body = {
        "model": request.model,
        "prompt": list(request.tokens),
        "max_tokens": output_tokens,
        "ignore_eos": True,  # else random prompts have answers of random lengths
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s = elapsed_s()
    chunk_s: list[float] = []
    usage: Mapping[str, Any] = {}
    predicted: int | None = None
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                code, message = code_and_message(await answer.aread(), answer.status_code)
                return RequestOutcome(
                    model=request.model,
                    began_s=began_s,
                    ended_s=elapsed_s(),
                    error=f"{answer.status_code} {code}".strip(),
                    error_message=message,
                )
            with suppress(ValueError):
                predicted = int(answer.headers.get("x-lorafleet-cached-tokens", ""))
            async for event in json_events(answer):
                if "error" in event:
                    error = f"stream {event['error'].get('code') or event['error'].get('type')}"
                    return RequestOutcome(model=request.model, began_s=began_s, ended_s=elapsed_s(), error=error)
                if event.get("choices"):
                    chunk_s.append(elapsed_s())
                usage = event.get("usage") or usage
    except (httpx.HTTPError, ValueError, AttributeError) as exc:
        error = f"connection {type(exc).__name__}"
        return RequestOutcome(
            model=request.model, began_s=began_s, ended_s=elapsed_s(), error=error, error_message=str(exc)
        )
    if not chunk_s:
        return RequestOutcome(model=request.model, began_s=began_s, ended_s=elapsed_s(), error="empty answer")
    details = usage.get("prompt_tokens_details") or {}
    return RequestOutcome(
        model=request.model,
        began_s=began_s,
        ended_s=chunk_s[-1],
        prompt_tokens=usage.get("prompt_tokens", len(request.tokens)),
        output_tokens=usage.get("completion_tokens", len(chunk_s)),
        chunk_s=tuple(chunk_s),
        predicted_tokens=predicted,
        cached_tokens=details.get("cached_tokens"),
    )


def code_and_message(body: bytes, status: int) -> tuple[str, str]:
    """The code of an error answer, or its type where the code is the status, as vLLM's is; and its message."""
    try:
        error = json.loads(body)["error"]
        code, message = error.get("code"), str(error.get("message") or "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "", ""
    return str(error.get("type") or "" if code in (status, str(status), None) else code), message
