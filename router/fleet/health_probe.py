"""Health probes: a small request of our own to an engine that answers clients with errors.

One probe at a time for each engine, of one token; `router.core.failover.circuit_breaker` uses the finding.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
import structlog

from lorafleet.engine.canary import PROBE_REQUESTS
from router.core.failover.circuit_breaker import is_fault
from router.core.fleet import Incarnation, Replica
from router.http.engine_connection import EngineLost
from router.http.fetch import FetchRefused

log = structlog.get_logger()

Finding = Literal["well", "unwell", "unknown"]

_INCONCLUSIVE = frozenset({"no_answer_in_time", "no_descriptors"})


class HealthProbes:
    """Probes engines and reports each finding."""

    def __init__(
        self, post: Callable[[Replica, str, bytes], Awaitable[bytes]], on_finding: Callable[[Replica, Finding], None]
    ) -> None:
        """
        post        POSTs JSON to a replica's engine and returns the answer; may raise EngineLost and FetchRefused
        on_finding  called once for each completed probe
        """
        self._post = post
        self._on_finding = on_finding
        self._running: dict[Incarnation, asyncio.Task[None]] = {}

    def probe(self, replica: Replica) -> None:
        """Start a probe of this replica's engine, unless one is running."""
        incarnation = replica.incarnation
        if incarnation not in self._running:
            task = self._running[incarnation] = asyncio.create_task(self._run_probe(replica))
            task.add_done_callback(lambda _: self._running.pop(incarnation))

    @property
    def running(self) -> int:
        """Probes in progress."""
        return len(self._running)

    async def close(self) -> None:
        """Cancel all running probes and wait for their end."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_probe(self, replica: Replica) -> None:
        """Probe a replica's engine, call `on_finding` and log the finding. An error is logged, not raised."""
        try:
            finding = await self._send_probe(replica)
            self._on_finding(replica, finding)
        except Exception:  # of one probe: there will be another
            log.exception("health probe failed", worker=replica.id)
            return
        log.warning("health probe of an engine that answers with errors", worker=replica.id, found=finding)

    async def _send_probe(self, replica: Replica) -> Finding:
        """POST small requests to the engine until it supports one: well, unwell on faults, unknown if inconclusive."""
        for path, fields in PROBE_REQUESTS:
            try:
                await self._post(replica, path, msgspec.json.encode({"model": replica.model_name, **fields}))
            except FetchRefused as exc:
                if is_fault(exc.status):
                    return "unwell"
            except EngineLost as exc:
                return "unknown" if exc.reason in _INCONCLUSIVE else "unwell"
            else:
                return "well"
        # It supports neither request, so no probe contradicts its errors.
        return "unwell"
