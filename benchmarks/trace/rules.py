"""What a peer's rule may see, and the router that follows one.

What all rules share: nothing waits in the router, prompts are known in blocks of 512 tokens (where a peer cuts text in
smaller pieces it would match a little deeper), and engine figures are as old as everybody's reports.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import ClassVar

from benchmarks.trace.fleet import Changes, EngineReading, TraceFleet
from benchmarks.trace.workload import BLOCK, TraceRequest
from lorafleet.identity import BlockHash
from router.core.kv.index import KvIndex, WorkerId


class Rule:
    """What a rule may see: its router's own requests, the reports, and KV events where it `follows_events`."""

    follows_events: ClassVar[bool] = False

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        self.workers = workers
        self.blocks = blocks
        self.rng = rng
        self.now = 0.0
        self.in_flight = [0] * workers
        self.readings: list[EngineReading | None] = [None] * workers

    def choose(self, request: TraceRequest) -> int:
        """The worker for this request."""
        raise NotImplementedError

    def sent(self, request: TraceRequest, worker: int) -> None:
        """It has been sent there."""

    def first_token(self, request: TraceRequest) -> None:
        """Its prefill is over."""

    def ended(self, request: TraceRequest) -> None:
        """It is over."""

    def cached(self, worker: int, changes: Changes) -> None:
        """KV events."""

    def least_busy(self) -> int:
        """The worker with the fewest requests of this router, equal ones by chance."""
        return self.least(self.in_flight)

    def least(self, costs: Sequence[float]) -> int:
        """The worker of the least cost, equal ones by chance."""
        best = min(costs)
        return self.rng.choice([n for n, cost in enumerate(costs) if cost == best])


class Exact(Rule):
    """An index that follows KV events, with the adapter in its keys."""

    follows_events: ClassVar[bool] = True

    def __init__(self, workers: int, blocks: int, rng: Random) -> None:
        super().__init__(workers, blocks, rng)
        self._index = KvIndex(BLOCK)
        self._ids = [WorkerId(str(n)) for n in range(workers)]

    def depths(self, request: TraceRequest) -> Mapping[int, int]:
        """Matching blocks per worker."""
        return {int(worker): depth for worker, depth in self._index.match(request.keys).items()}  # type: ignore[arg-type]

    def uncached(self, request: TraceRequest) -> list[int]:
        """Tokens of the prompt that each worker would compute."""
        depths = self.depths(request)
        return [max(1, request.prompt_tokens - depths.get(n, 0) * BLOCK) for n in range(self.workers)]

    def cached(self, worker: int, changes: Changes) -> None:
        """Into the index."""
        for key, is_new in changes:
            (self._index.add if is_new else self._index.drop)(self._ids[worker], [BlockHash(key)])


class Peer:
    """A router that follows one rule. In place of a lost engine it takes the one with the fewest requests."""

    def __init__(self, rule: type[Rule], fleet: TraceFleet, seed: int) -> None:
        self._fleet = fleet
        self._rule = rule(len(fleet.engines), fleet.setting.hardware.blocks, Random(seed))
        self._lost: set[int] = set()

    def offer(self, request: TraceRequest, now: float) -> None:
        """Send it at once."""
        self._rule.now = now
        worker = self._rule.choose(request)
        if worker in self._lost:
            worker = min(set(range(self._rule.workers)) - self._lost, key=self._rule.in_flight.__getitem__)
        self._rule.in_flight[worker] += 1
        self._fleet.send(request, worker)
        self._rule.sent(request, worker)

    def first_token(self, request: TraceRequest) -> None:
        """Its prefill is over."""
        self._rule.now = self._fleet.now
        self._rule.first_token(request)

    def ended(self, request: TraceRequest) -> None:
        """It is over, or its client has left."""
        self._rule.now = self._fleet.now
        self._rule.in_flight[request.worker] -= 1
        self._rule.ended(request)

    def read(self, reading: EngineReading) -> None:
        """The newest report."""
        self._lost.discard(reading.worker)
        self._rule.readings[reading.worker] = reading

    def lost(self, worker: int) -> None:
        """An engine is gone."""
        self._lost.add(worker)

    def cached(self, worker: int, changes: Changes) -> None:
        """KV events."""
        if self._rule.follows_events:
            self._rule.cached(worker, changes)
