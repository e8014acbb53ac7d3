"""Requests that wait for room: what a release costs while many do."""

import time
from dataclasses import replace
from random import Random
from statistics import median

from benchmarks.decision.size import DecisionBenchSize
from benchmarks.report import ReportRow
from benchmarks.scenes import BLOCK_SIZE, NOW, PROMPT_TOKENS, a_fleet, hashed, lora_id, some_tokens
from router.core.fleet import RouterFleet
from router.core.kv.index import KvIndex
from router.core.queue.queued_request import QueuedRequest
from router.core.schedule.replica_book import LoadEntry
from router.core.schedule.request import HashedRequest, PrefixMatch
from router.core.scheduler import Scheduler

_REPLICAS, _ADAPTERS, _WAITING = 8, 10, 64


def waiting(size: DecisionBenchSize) -> list[ReportRow]:
    """Rows of a release, after which one of 64 waiting long prompts is sent, beside one decision."""
    fleet = a_fleet(_REPLICAS, _ADAPTERS)
    line = WaitingLine(fleet, Random(4))
    line.fill()
    releases = size.rounds * max(2, size.calls // 10)
    released, decided, sent = [], [], 0
    for _ in range(releases):
        began = time.process_time()
        line.scheduler.decide(line.probe, line.now)
        decided.append((time.process_time() - began) * 1e6)
        taken_s, count = line.release()
        released.append(taken_s * 1e6)
        sent += count
    what = f"release of an engine's room while {_WAITING} long prompts wait, {_REPLICAS} replicas"
    return [
        ReportRow(what, median(released), "us", None, "one decision, us", median(decided), 2.0),
        ReportRow(f"{what}: sent a release", sent / releases, "requests"),
    ]


class WaitingLine:
    """A scheduler whose replicas are full, and requests that wait there: for each that is sent a new one comes."""

    def __init__(self, fleet: RouterFleet, rng: Random) -> None:
        self._fleet, self._rng = fleet, rng
        self._index = KvIndex(BLOCK_SIZE)
        self.now = NOW
        self.scheduler = Scheduler(roster=fleet.roster, match=self._match, rng=rng)
        for replica in fleet.replicas.values():
            self.scheduler.load.apply_report(replace(replica, report=replace(replica.report, waiting=0)))
        self._in_flight: list[LoadEntry] = []
        self._asked = 0
        self.probe = self._hashed()

    def fill(self) -> None:
        """Send until the replicas are full, and let so many wait."""
        while len(self.scheduler.queue) < _WAITING:
            self._ask()

    def release(self) -> tuple[float, int]:
        """End the oldest request. Seconds that the release took, and how many requests were sent by it."""
        entry = self._in_flight.pop(0)
        self.now = max(self.now + 0.1, entry.began_at + entry.first_token_s)  # predictions hold
        self.scheduler.load.record_first_token(entry, self.now)
        self.scheduler.load.remove(entry, self.now, is_answered=True)
        began, sent = time.process_time(), []
        for _, decision in self.scheduler.take_admissible(self.now):
            assert not isinstance(decision, Exception), decision
            sent.append(self.scheduler.record_dispatch(decision, self.now))
        taken_s = time.process_time() - began
        self._in_flight += sent
        self.fill()
        return taken_s, len(sent)

    def _ask(self) -> None:
        request = self._hashed()
        queued = QueuedRequest(hashed=request, tenant=f"t{self._asked % 4}", adapter=request.request.engine_name)
        decision = self.scheduler.decide_or_enqueue(queued, self.now)
        if decision is not None:
            self._in_flight.append(self.scheduler.record_dispatch(decision, self.now))

    def _hashed(self) -> HashedRequest:
        self._asked += 1
        return hashed(self._fleet, lora_id(self._asked % _ADAPTERS), some_tokens(self._rng, PROMPT_TOKENS))

    def _match(self, request: HashedRequest) -> PrefixMatch:
        return PrefixMatch(self._index.match(request.chains[BLOCK_SIZE]))
