"""Whether an engine that answers with errors is well: it is asked for something of our own.

One request at a time for each engine, of one token; see `router.core.failover.circuit_breaker` for who wants to know.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
import structlog

from router.core.failover.circuit_breaker import is_fault
from router.core.fleet import Incarnation, Replica
from router.http.engine_pool import EngineLost
from router.http.fetch import FetchRefused

log = structlog.get_logger()

Finding = Literal["well", "unwell", "unknown"]

# What a model that generates can do, and what one that pools can.
_ASKED = (("/v1/completions", {"prompt": "a", "max_tokens": 1}), ("/pooling", {"input": "a"}))
_UNTOLD = frozenset({"no_answer_in_time", "no_descriptors"})


class HealthProbes:
    """Asks engines, and tells what it found."""

    def __init__(
        self, ask: Callable[[Replica, str, bytes], Awaitable[bytes]], told: Callable[[Replica, Finding], None]
    ) -> None:
        """
        ask   what a replica's engine answers to a POST of JSON; may raise EngineLost and Refused
        told  is called once for each look that came to its end
        """
        self._ask = ask
        self._told = told
        self._under_way: dict[Incarnation, asyncio.Task[None]] = {}

    def look(self, replica: Replica) -> None:
        """Ask this one, unless it is being asked."""
        who = replica.incarnation
        if who not in self._under_way:
            task = self._under_way[who] = asyncio.create_task(self._look(replica))
            task.add_done_callback(lambda _: self._under_way.pop(who))

    async def close(self) -> None:
        """Ask none any more."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, replica: Replica) -> None:
        try:
            found = await self._found(replica)
            self._told(replica, found)
        except Exception:  # whatever it is, of one look: there will be another
            log.exception("an engine that answers with errors could not be looked at", worker=replica.id)
            return
        log.warning("an engine answered errors, and was asked for something of our own", worker=replica.id, found=found)

    async def _found(self, replica: Replica) -> Finding:
        for path, wanted in _ASKED:
            try:
                await self._ask(replica, path, msgspec.json.encode({"model": replica.model_name, **wanted}))
            except FetchRefused as exc:
                if is_fault(exc.status):
                    return "unwell"
            except EngineLost as exc:
                return "unknown" if exc.reason in _UNTOLD else "unwell"
            else:
                return "well"
        # It takes neither, so nothing of ours speaks against its errors.
        return "unwell"
