"""Agentless engines as workers: an httpx transport that answers the agent's routes from the engine's own HTTP API.

The agent client calls these engines like agents, at `plain://workers/<id>`. No process reads adapter bytes there, so
nothing is fetched: an adapter is a folder on the engine's disk with the digest of its registration. No epoch fences an
engine: only its lease stops a replaced leader.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import quote

import httpx
import structlog
from pydantic import BaseModel

from lorafleet.engine.agentless import AGENTLESS_BOOT_ID
from lorafleet.service.http import envelope
from lorafleet.service.http.known_fields import type_adapter
from lorafleet.service.loops import forever
from lorafleet.service.network.tls import Tls
from lorafleet.service.network.transport import DirectTransport
from orchestrator.agentless.engine import AgentlessEngineDriver, AgentlessLoadRules, AgentlessRefusal, AgentlessWorker
from workers.wire import (
    REPORT_HEADER,
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
    """All agentless engines.

    workers  returns the engines that settings and EndpointSlices list now
    key      bearer key that the engines want
    """

    def __init__(
        self,
        workers: Callable[[], Sequence[AgentlessWorker]],
        allowed: AgentlessLoadRules,
        *,
        digest_of: Callable[[str], str | None],
        key: str = "",
        timeout_s: float,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
        tls: Tls | None = None,
    ) -> None:
        self._workers = workers
        self._allowed = allowed
        self._digest_of = digest_of
        self._every_s = every_s
        self._clock = clock
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            transport=DirectTransport(tls=tls), timeout=timeout_s, headers=headers, trust_env=False
        )
        self._drivers: dict[str, AgentlessEngineDriver] = {}
        # One count for all engines and drivers, so that a new driver of an engine does not begin anew.
        self._numbers = count(1)

    async def run(self, on_report: Callable[[Metadata], object]) -> None:
        """Report for the engines as their agents' heartbeats would, until cancelled."""
        await forever(partial(self.report_once, on_report), name="plain", every_s=self._every_s)

    async def report_once(self, on_report: Callable[[Metadata], object]) -> None:
        """Ask each listed engine, and report those that answer; drop an unlisted one once it no longer answers.

        A new or changed engine gets a new driver.
        """
        listed = {worker.id: worker for worker in self._workers()}
        # An engine that is not listed any more is kept while it answers.
        for worker in listed.values():
            driver = self._drivers.get(worker.id)
            if driver is None or driver.worker != worker:
                self._drivers[worker.id] = AgentlessEngineDriver(
                    worker,
                    agentless_url(worker.id),
                    self._client,
                    self._allowed,
                    digest_of=self._digest_of,
                    clock=self._clock,
                    numbers=self._numbers,
                )
        answers = await asyncio.gather(*(self._report(driver) for driver in self._drivers.values()))
        for id_, report in zip(tuple(self._drivers), answers, strict=True):
            if report is not None:
                on_report(report)
            elif id_ not in listed:
                del self._drivers[id_]

    async def _report(self, driver: AgentlessEngineDriver) -> Metadata | None:
        """The engine's report; None when the engine does not answer."""
        try:
            return await driver.metadata()
        except (OSError, httpx.HTTPError, ValueError) as exc:
            log.debug("engine not reached", worker_id=driver.worker.id, error=str(exc))
            return None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Do what the agent's route would do with the engine, and return the response that an agent would give.

        Refusals and timeouts are error responses. Raises httpx.ConnectError when the engine does not answer.
        """
        driver = self._drivers.get(request.url.path.split("/")[1])
        verb = request.url.path.rpartition("/")[2]
        call = _CALLS.get(verb)
        if driver is None or (call is None and verb != "metadata"):
            return _json_response(
                404, envelope(404, "not_found", f"{request.url}: no engine without an agent has that")
            )
        try:
            if call is None:
                return _ok_response(await driver.metadata())
            kind, act = call
            epoch = int(request.headers.get("x-lorafleet-epoch", "0"))
            answer = await act(driver, kind.model_validate_json(await request.aread()), epoch)
            return self._numbered(_ok_response(answer))
        except AgentlessRefusal as exc:
            return self._numbered(_json_response(exc.status, envelope(exc.status, exc.code, str(exc))))
        except httpx.TimeoutException as exc:
            return _json_response(504, envelope(504, "engine_timeout", repr(exc)))
        except (OSError, httpx.HTTPError, ValueError) as exc:
            raise httpx.ConnectError(str(exc), request=request) from exc

    def _numbered(self, answer: httpx.Response) -> httpx.Response:
        """The answer to an action with its place among the reports: above all that were begun before its effect."""
        answer.headers[REPORT_HEADER] = f"{AGENTLESS_BOOT_ID}/{next(self._numbers)}"
        return answer

    async def aclose(self) -> None:
        """Close the HTTP client that all engines share."""
        await self._client.aclose()


_CALLS: Mapping[str, tuple[type[BaseModel], Callable[[AgentlessEngineDriver, Any, int], Awaitable[object]]]] = {
    "claim": (ClaimRequest, AgentlessEngineDriver.claim),
    "inspect_lora": (InspectRequest, AgentlessEngineDriver.inspect_lora),
    "load_lora": (LoadRequest, AgentlessEngineDriver.load_lora),
    "unload_lora": (UnloadRequest, AgentlessEngineDriver.unload_lora),
    "drain": (DrainRequest, AgentlessEngineDriver.drain),
    "undrain": (UndrainRequest, AgentlessEngineDriver.undrain),
}


def agentless_url(worker_id: str) -> str:
    """The internal URL of an agentless worker."""
    return _ADDRESS + quote(worker_id, safe="")


def agent_url_of(report: Metadata) -> str:
    """The agent's URL to show to others; empty for an agentless worker."""
    return "" if report.agent_url.startswith(SCHEME) else report.agent_url


def _ok_response(answer: Any) -> httpx.Response:
    """A 200 response with the message as JSON."""
    kind: Any = type(answer)
    content = type_adapter(kind).dump_json(answer)
    return httpx.Response(200, content=content, headers={"content-type": "application/json"})


def _json_response(status: int, body: Mapping[str, Any]) -> httpx.Response:
    """A response with this status and a JSON body."""
    return httpx.Response(status, json=body)
