"""What failed where, until when that counts, and how much longer it counts each time it happens again."""

from collections.abc import Set
from random import Random
from typing import Literal

from orchestrator.core.placement.context import is_same
from orchestrator.core.state import AdapterFailure, ObservedFleet, Pair, RegisteredAdapter

ANYWHERE = ""
"""The worker_id of a failure that every worker shares: nobody has found good bytes at an adapter's source."""
ENGINES_NO = "adapter_refused"
"""The code of an engine's own refusal, of bytes that have their registered digest."""
MOST_REFUSALS = 2
"""Engines that refuse an adapter before no other is asked, until somebody says so."""
LONGEST_S = 3600.0
_JITTER = 0.25
"""Expiries are up to this much shorter, so that what failed together is not tried again together."""


def blamed(adapter: RegisteredAdapter, observed: ObservedFleet, now: float) -> Literal["worker", "fleet", "adapter"]:
    """Who is to blame that an engine has refused an adapter; the refusal is among the failures observed.

    One engine's word is not enough: it says the same of bytes that it cannot use and of memory that it has not got.
    Where another holds them the bytes are good ("worker"), and where another may be asked that one is. Two that refuse
    settle it ("adapter"). If there is only this one the adapter can be nowhere for now, and is tried there again
    ("fleet").
    """
    lora_id = adapter.lora_id
    copies = [worker.held[lora_id] for worker in observed.workers.values() if lora_id in worker.held]
    if any(held.state == "ready" and is_same(adapter, held) for held in copies):
        return "worker"
    failures = {id_: observed.failures.get((lora_id, id_)) for id_ in observed.workers}
    current = {id_: failure for id_, failure in failures.items() if failure is not None and failure.until > now}
    if sum(failure.code == ENGINES_NO for failure in current.values()) >= MOST_REFUSALS:
        return "adapter"
    fitting = (w.id for w in observed.workers.values() if w.fits(adapter.base_model, adapter.rank or 0))
    return "worker" if any(id_ not in current for id_ in fitting) else "fleet"


class FailureBook:
    """Failures by (lora_id, worker_id). One writer; `current` may be read at any time, expired ones included."""

    def __init__(self) -> None:
        self.current: dict[Pair, AdapterFailure] = {}
        self._of: dict[str, dict[Pair, AdapterFailure]] = {}
        self._streaks: dict[Pair, tuple[int, float]] = {}

    def add(
        self,
        pair: Pair,
        code: str,
        message: str,
        *,
        first_s: float,
        most_s: float,
        now: float,
        rng: Random,
        least_s: float = 0.0,
    ) -> AdapterFailure:
        """It failed, perhaps again: each time in a row counts twice as long, from `first_s` up to `most_s`."""
        count, _ = self._streaks.get(pair, (0, 0.0))
        lasts_s = min(first_s * 2.0 ** min(count, 30), max(first_s, most_s))
        until = now + max(lasts_s * (1.0 - _JITTER * rng.random()), least_s)
        # The row is forgotten when the next failure comes later than the wait and as long again.
        self._streaks[pair] = (count + 1, until + lasts_s)
        failure = AdapterFailure(until=until, code=code, message=message)
        self.put(pair, failure)
        return failure

    def put(self, pair: Pair, failure: AdapterFailure) -> None:
        """This failure counts there, though nobody tried there."""
        self.current[pair] = self._of.setdefault(pair[0], {})[pair] = failure

    def succeeded(self, pair: Pair) -> None:
        """The row ends."""
        self._streaks.pop(pair, None)
        self._drop(pair)

    def forget(self, lora_id: str) -> None:
        """Let the adapter be tried anywhere, as if it had never failed."""
        for pair in self._of.pop(lora_id, {}):
            del self.current[pair]
        self._streaks = {pair: row for pair, row in self._streaks.items() if pair[0] != lora_id}

    def clear(self) -> None:
        """Let every adapter be tried anywhere, as if none had ever failed."""
        self.current.clear()
        self._of.clear()
        self._streaks.clear()

    def expire(self, now: float) -> None:
        for pair in [pair for pair, failure in self.current.items() if failure.until <= now]:
            self._drop(pair)
        for pair in [pair for pair, (_, until) in self._streaks.items() if until <= now]:
            del self._streaks[pair]

    def newest(self, lora_id: str, now: float) -> AdapterFailure | None:
        """Of this adapter, wherever: the one that counts longest."""
        failures = [failure for failure in self._of.get(lora_id, {}).values() if failure.until > now]
        return max(failures, key=lambda failure: failure.until, default=None)

    def count(self, lora_id: str, now: float) -> int:
        """On how many workers it counts as failed."""
        return sum(failure.until > now for failure in self._of.get(lora_id, {}).values())

    def shared(self, lora_id: str, now: float) -> AdapterFailure | None:
        """The failure that every worker shares, while it counts."""
        failure = self.current.get((lora_id, ANYWHERE))
        return failure if failure is not None and failure.until > now else None

    @property
    def adapters(self) -> Set[str]:
        """Those with any failure at all."""
        return self._of.keys()

    def _drop(self, pair: Pair) -> None:
        if self.current.pop(pair, None) is not None:
            mine = self._of[pair[0]]
            del mine[pair]
            if not mine:
                del self._of[pair[0]]
