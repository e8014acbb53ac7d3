"""The client: sends each request when it is due, whatever became of the others, and times every token."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.fleet.workload import FleetRequest

TIMEOUT_S = 120.0
_clock = time.perf_counter


@dataclass(slots=True)
class FleetOutcome:
    """What came of one request: seconds from when it was due. `failure`: why its answer is not whole."""

    first_s: float | None = None
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    failure: str = ""

    def add_token(self, at_s: float) -> None:
        """A token came, so many seconds after the request was due."""
        if self.last_s is None:
            self.first_s = at_s
        else:
            self.gaps_s.append(at_s - self.last_s)
        self.last_s = at_s


async def replay(url: str, requests: Sequence[FleetRequest]) -> list[FleetOutcome]:
    """Send them to a router, open loop; returns when all have ended."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        began = _clock()
        return await asyncio.gather(*(_ask(session, url, request, began + request.at_s) for request in requests))


async def _ask(session: aiohttp.ClientSession, url: str, request: FleetRequest, due: float) -> FleetOutcome:
    await asyncio.sleep(max(0.0, due - _clock()))
    outcome, is_done = FleetOutcome(), False
    headers = {"content-type": "application/json"}
    try:
        async with session.post(f"{url}/v1/chat/completions", data=request.body, headers=headers) as answer:
            if answer.status != 200:
                outcome.failure = f"{answer.status} {(await answer.text())[:200]}"
                return outcome
            async for line in answer.content:
                if not line.startswith(b"data:"):
                    continue
                event = line[5:].strip()
                is_done = is_done or event == b"[DONE]"
                if not is_done and has_text(event):
                    outcome.add_token(_clock() - due)
    except (aiohttp.ClientError, TimeoutError, ValueError) as exc:
        outcome.failure = repr(exc)
        return outcome
    if not is_done or outcome.first_s is None:
        outcome.failure = "the stream ended without its last event" if not is_done else "an answer without a token"
    return outcome


def has_text(event: bytes) -> bool:
    """Whether an event of a streamed chat brings text. Raises ValueError for what is no JSON."""
    choices = json.loads(event).get("choices") or ()
    return any((choice.get("delta") or {}).get("content") for choice in choices)
