"""Tells the orchestrator that this worker is there, with all it knows: every second, and at once when it changes."""

import asyncio
import contextlib
from random import Random

import httpx
import structlog

from lorafleet.service.loops import backoff_s
from lorafleet.service.own_key import OwnKey
from orchestrator.wire import Heartbeat, HeartbeatAnswer
from workers.agent.agent import WorkerAgent

log = structlog.get_logger()

_FIRST_BACKOFF_S, _MOST_BACKOFF_S = 0.4, 10.0
_LAST_S = 2.0
_WARMING_S = 0.1  # a worker that only waits to hear that it is warm asks more often
_GATHER_S = 0.02  # a load changes several things within milliseconds: they go out together


class HeartbeatSender:
    """Posts heartbeats until cancelled; an orchestrator that is away costs nothing but log lines."""

    def __init__(self, agent: WorkerAgent, client: httpx.AsyncClient, *, own: OwnKey, rng: Random) -> None:
        self._agent = agent
        self._client = client
        self._rng = rng
        settings = agent.settings
        self._urls = [f"{url}/v1/workers/register" for url in settings.orchestrator_urls]
        self._at = 0
        self._answer_s = agent.timers.heartbeat_answer_s
        self._own = own
        self._every_s = settings.heartbeat_s
        self._told = -1  # the newest version that was taken

    @property
    def _url(self) -> str:
        """Of the orchestrator that answered last, or whose turn it is to be asked."""
        return self._urls[self._at % len(self._urls)]

    async def run(self) -> None:
        failures = 0
        while True:
            told = self._agent.residency.version
            try:
                await self._beat(timeout_s=self._answer_s)
                if failures:
                    log.info("orchestrator takes heartbeats again", url=self._url)
                failures = 0
            except Exception as exc:  # noqa: BLE001  (the top of a loop: a worker without heartbeats is lost, whatever the fault)
                failures += 1
                self._agent.metrics.heartbeat_failures.inc()
                if failures > len(self._urls):
                    self._agent.warmed()  # nobody there to say what it should hold
                if failures in {1, 10} or failures % 100 == 0:
                    log.warning("heartbeat not taken", url=self._url, failures=failures, error=repr(exc))
                self._at += 1
                if failures < len(self._urls):
                    continue  # another one may take it right now
            await self._pause(told, failures)

    async def last(self) -> None:
        """Say at once what changed last, unless that has been said; an orchestrator that is away is not waited for."""
        if self._told != self._agent.residency.version:
            with contextlib.suppress(Exception):  # nothing more can be done about it
                await self._beat(timeout_s=_LAST_S)

    async def _beat(self, *, timeout_s: float) -> None:
        version = self._agent.residency.version
        metadata = self._agent.metadata()
        body = Heartbeat(metadata=metadata).model_dump_json()
        headers = {"content-type": "application/json", **self._own.headers}
        async with asyncio.timeout(timeout_s):  # the client's own is for each piece of an answer
            answer = await self._client.post(self._url, content=body, headers=headers, timeout=timeout_s)
        if answer.is_error:  # with the reason, which the operator of this worker has to read
            raise httpx.HTTPStatusError(
                f"HTTP {answer.status_code}: {answer.text[:500]}", request=answer.request, response=answer
            )
        self._told = version
        told = HeartbeatAnswer.model_validate_json(answer.content)
        # Whoever answers heartbeats leads; commands of an older epoch are refused from now on.
        self._agent.records.raise_epoch(told.epoch)
        self._agent.link.told(told.in_flight)
        if metadata.is_warming and told.is_warm:
            self._agent.warmed()

    async def _pause(self, told: int, failures: int) -> None:
        if failures:
            await asyncio.sleep(backoff_s(failures, _FIRST_BACKOFF_S, _MOST_BACKOFF_S, self._rng))
            return
        every_s = min(self._every_s, _WARMING_S) if self._agent.is_warming else self._every_s
        every_s *= self._rng.uniform(0.8, 1.0)
        if await self._agent.residency.changes.until(lambda: self._agent.residency.version != told, timeout_s=every_s):
            await asyncio.sleep(_GATHER_S)
