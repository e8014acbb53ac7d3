"""Heartbeats to the orchestrator with the worker's metadata: as often as it says, and at once after a change.

A change by a call of the orchestrator is told by that call's answer, and waits for the heartbeat that is due next.
"""

import asyncio
import contextlib
from random import Random

import httpx
import structlog

from lorafleet.keys.own_key import OwnKey
from lorafleet.service.http.known_fields import WIRE_HEADERS
from lorafleet.service.loops import backoff_s
from orchestrator.model.agents import Heartbeat, HeartbeatAnswer
from workers.agent.agent import WorkerAgent
from workers.sources.fleet import OtherAgents
from workers.wire import MOST_DIGESTS

log = structlog.get_logger()

_FIRST_BACKOFF_S, _MOST_BACKOFF_S = 0.4, 10.0
_LAST_TIMEOUT_S = 2.0
# Until an orchestrator has said its interval; what it says counts within the bounds, so that no value of it makes this
# worker silent or busy with heartbeats.
_FIRST_INTERVAL_S = 1.0
_LEAST_INTERVAL_S, _MOST_INTERVAL_S = 0.05, 60.0
_WARMING_INTERVAL_S = 0.1  # a warming worker waits for `is_warm` in the answer
_COALESCE_S = 0.02  # a load changes several fields within milliseconds: one heartbeat has them all


class HeartbeatSender:
    """Posts heartbeats until cancelled. An unreachable orchestrator costs only log lines."""

    def __init__(
        self, agent: WorkerAgent, client: httpx.AsyncClient, *, own: OwnKey, rng: Random, agents: OtherAgents
    ) -> None:
        """`agents` gets the list that the orchestrator's answers have."""
        self._agents = agents
        self._agent = agent
        self._client = client
        self._rng = rng
        settings = agent.context.settings
        self._urls = [f"{url}/v1/workers/register" for url in settings.orchestrator_urls]
        self._url_index = 0
        self._timeout_s = agent.context.timers.heartbeat_answer_s
        self._own_key = own
        self._own_interval_s = settings.heartbeat_s
        self._every_s = settings.heartbeat_s or _FIRST_INTERVAL_S
        self._acknowledged_version = -1  # the newest inventory version that an orchestrator accepted
        self._files_seen = 0  # the number of changes of our files that it has confirmed
        self._uses_seen = 0  # the number of the last uses that it has told
        self._has_more = False  # more of them are to be sent at once

    @property
    def _url(self) -> str:
        """URL of the orchestrator that answered last, or of the next one to try."""
        return self._urls[self._url_index % len(self._urls)]

    async def run(self) -> None:
        """Send heartbeats until cancelled; after a failure try the next orchestrator, then back off.

        Failures are counted, and some are logged. If no orchestrator accepts one, a warming worker becomes ready.
        """
        failures = 0
        while True:
            version = self._agent.inventory.version
            try:
                await self._post_heartbeat(timeout_s=self._timeout_s)
                if failures:
                    log.info("heartbeats accepted again", url=self._url)
                failures = 0
            except Exception as exc:  # noqa: BLE001  (top of a loop: without heartbeats the worker counts as lost)
                failures += 1
                self._agent.context.metrics.heartbeat_failures.inc()
                if failures > len(self._urls):
                    self._agent.end_warming()  # no orchestrator can place adapters
                if failures in {1, 10} or failures % 100 == 0:
                    log.warning("heartbeat failed", url=self._url, failures=failures, error=repr(exc))
                self._url_index += 1
                if failures < len(self._urls):
                    continue  # try the next orchestrator at once
            await self._wait_until_due(version, failures)

    async def send_last(self) -> None:
        """Send a final heartbeat if the last change has not been sent, to the first orchestrator that accepts it.

        Gives up after 2 s in all and raises nothing. Call it when `run` has ended.
        """
        for _ in self._urls:
            if self._acknowledged_version == self._agent.inventory.version:
                return
            with contextlib.suppress(Exception):  # the next orchestrator may accept it
                await self._post_heartbeat(timeout_s=_LAST_TIMEOUT_S / len(self._urls))
                return
            self._url_index += 1

    async def _post_heartbeat(self, *, timeout_s: float) -> None:
        """Post one heartbeat and apply the answer: epoch, interval, requests, end of warming, agents.

        Raises at any failure.
        """
        disk_id = await self._agent.context.cache.disk_id()
        # From here to the body without an `await`: all of it is of one moment, that of the report's number.
        version = self._agent.inventory.version
        metadata = self._agent.metadata(with_available=False)
        history = self._agent.inventory.history
        body = Heartbeat(
            metadata=metadata,
            operations=history.operations(),
            incidents=history.incidents(),
            files=self._agent.context.cache.held.report_since(self._files_seen, disk_id=disk_id, most=MOST_DIGESTS),
            agents_digest=self._agents.digest,
            uses_seen=self._uses_seen,
        ).model_dump_json()
        headers = {"content-type": "application/json", **WIRE_HEADERS, **self._own_key.headers}
        async with asyncio.timeout(timeout_s):  # httpx's timeout is per chunk of the answer
            answer = await self._client.post(self._url, content=body, headers=headers, timeout=timeout_s)
        if answer.is_error:  # the operator needs the reason from the body
            raise httpx.HTTPStatusError(
                f"HTTP {answer.status_code}: {answer.text[:500]}", request=answer.request, response=answer
            )
        self._acknowledged_version = version
        reply = HeartbeatAnswer.model_validate_json(answer.content)
        # The orchestrator that answers heartbeats is the leader: refuse commands of older epochs from now on.
        self._agent.context.installed.raise_epoch(reply.epoch)
        if self._own_interval_s is None:
            self._every_s = min(max(_LEAST_INTERVAL_S, reply.interval_s), _MOST_INTERVAL_S)
        self._agent.engine.set_requests_in_flight(reply.in_flight)
        if reply.uses_number != self._uses_seen:
            self._agent.count_uses(reply.uses)
            self._uses_seen = reply.uses_number
        history.forget_recorded(operations=reply.recorded, incidents=reply.recorded_incidents)
        self._confirm_files(reply.files_seen)
        if reply.agents is not None:
            self._agents.replace(reply.agents, reply.agents_digest)
        if metadata.is_warming and reply.is_warm:
            self._agent.end_warming()

    def _confirm_files(self, seen: int) -> None:
        """Go on with the changes of our files behind the one that the orchestrator has confirmed.

        Where an answer has confirmed others than the last, what is left follows at once.
        """
        self._has_more = seen != self._files_seen and seen < self._agent.context.cache.held.revision
        self._files_seen = seen

    async def _wait_until_due(self, sent_version: int, failures: int) -> None:
        """Wait until the next heartbeat is due, or a change after `sent_version` is to be told at once.

        After failures back off.
        """
        if failures:
            await asyncio.sleep(backoff_s(failures, _FIRST_BACKOFF_S, _MOST_BACKOFF_S, self._rng))
            return
        if self._has_more:
            await asyncio.sleep(_COALESCE_S)
            return
        every_s = min(self._every_s, _WARMING_INTERVAL_S) if self._agent.is_warming else self._every_s
        every_s *= self._rng.uniform(0.8, 1.0)
        inventory = self._agent.inventory
        if await inventory.changes.until(lambda: inventory.due_version > sent_version, timeout_s=every_s):
            await asyncio.sleep(_COALESCE_S)
