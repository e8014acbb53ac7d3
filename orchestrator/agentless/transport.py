"""Engines without an agent, as workers: what an agent would answer is answered here, from the engine's own HTTP.

A transport, so that whoever calls agents calls these too, under URLs of their own: `plain://workers/<id>`. Nobody
reads an adapter's bytes for us there. So nothing is fetched, what is loaded is a folder on the engine's own disk under
a digest that its registration states, and no epoch fences an engine: a leader that was replaced is stopped by its
lease alone.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx
import structlog
from pydantic import BaseModel

from lorafleet.service.http import envelope
from lorafleet.service.loops import forever
from lorafleet.service.transport import DirectTransport
from orchestrator.agentless.engine import AgentlessEngineDriver, AgentlessLoadRules, AgentlessRefusal, AgentlessWorker
from workers.wire import (
    ClaimRequest,
    DrainRequest,
    InspectRequest,
    LoadRequest,
    Metadata,
    UndrainRequest,
    UnloadRequest,
)

log = structlog.get_logger()

SCHEME = "plain://"
_ADDRESS = f"{SCHEME}workers/"


class AgentlessTransport(httpx.AsyncBaseTransport):
    """All engines without an agent. `named` says which there are now; `key` is what they want to be shown."""

    def __init__(
        self,
        named: Callable[[], Sequence[AgentlessWorker]],
        allowed: AgentlessLoadRules,
        *,
        digest_of: Callable[[str], str | None],
        key: str = "",
        timeout_s: float,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._named = named
        self._allowed = allowed
        self._digest_of = digest_of
        self._every_s = every_s
        self._clock = clock
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            transport=DirectTransport(), timeout=timeout_s, headers=headers, trust_env=False
        )
        self._hands: dict[str, AgentlessEngineDriver] = {}

    async def run(self, hear: Callable[[Metadata], object]) -> None:
        """Speak for them as their agents' heartbeats would, until cancelled."""
        await forever(partial(self.beat, hear), name="plain", every_s=self._every_s)

    async def beat(self, hear: Callable[[Metadata], object]) -> None:
        """One report of each that answers."""
        named = {worker.id: worker for worker in self._named()}
        # One that is not named any more is known for as long as it answers: absence is no reason to let it go.
        for worker in named.values():
            hand = self._hands.get(worker.id)
            if hand is None or hand.worker != worker:
                self._hands[worker.id] = AgentlessEngineDriver(
                    worker,
                    plain_url(worker.id),
                    self._client,
                    self._allowed,
                    digest_of=self._digest_of,
                    clock=self._clock,
                )
        answers = await asyncio.gather(*(self._report(hand) for hand in self._hands.values()))
        for id_, report in zip(tuple(self._hands), answers, strict=True):
            if report is not None:
                hear(report)
            elif id_ not in named:
                del self._hands[id_]

    async def _report(self, hand: AgentlessEngineDriver) -> Metadata | None:
        try:
            return await hand.metadata()
        except (OSError, httpx.HTTPError, ValueError) as exc:
            log.debug("engine not heard", worker_id=hand.worker.id, error=str(exc))
            return None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """What an agent would answer. Raises httpx.ConnectError where its engine does not."""
        hand = self._hands.get(request.url.path.split("/")[1])
        verb = request.url.path.rpartition("/")[2]
        call = _CALLS.get(verb)
        if hand is None or (call is None and verb != "metadata"):
            return _json(404, envelope(404, "not_found", f"{request.url}: no engine without an agent has that"))
        try:
            if call is None:
                return _told(await hand.metadata())
            kind, act = call
            epoch = int(request.headers.get("x-lorafleet-epoch", "0"))
            return _told(await act(hand, kind.model_validate_json(await request.aread()), epoch))
        except AgentlessRefusal as exc:
            return _json(exc.status, envelope(exc.status, exc.code, str(exc)))
        except httpx.TimeoutException as exc:
            return _json(504, envelope(504, "engine_timeout", repr(exc)))
        except (OSError, httpx.HTTPError, ValueError) as exc:
            raise httpx.ConnectError(str(exc), request=request) from exc

    async def aclose(self) -> None:
        await self._client.aclose()


_CALLS: Mapping[str, tuple[type[BaseModel], Callable[[AgentlessEngineDriver, Any, int], Awaitable[BaseModel]]]] = {
    "claim": (ClaimRequest, AgentlessEngineDriver.claim),
    "inspect_lora": (InspectRequest, AgentlessEngineDriver.inspect_lora),
    "load_lora": (LoadRequest, AgentlessEngineDriver.load_lora),
    "unload_lora": (UnloadRequest, AgentlessEngineDriver.unload_lora),
    "drain": (DrainRequest, AgentlessEngineDriver.drain),
    "undrain": (UndrainRequest, AgentlessEngineDriver.undrain),
}


def plain_url(worker_id: str) -> str:
    """Where we find a worker that has no agent; nobody else does."""
    return _ADDRESS + quote(worker_id, safe="")


def agent_url_of(report: Metadata) -> str:
    """A worker's agent's URL as others may know it: none where it has none."""
    return "" if report.agent_url.startswith(SCHEME) else report.agent_url


def _told(answer: BaseModel) -> httpx.Response:
    return httpx.Response(200, content=answer.model_dump_json(), headers={"content-type": "application/json"})


def _json(status: int, body: Mapping[str, Any]) -> httpx.Response:
    return httpx.Response(status, json=body)
