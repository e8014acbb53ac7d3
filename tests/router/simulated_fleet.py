"""A fleet on a simulated clock: a router's mind before simulated engines, whose own counters teach their rates."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from random import Random

from lorafleet.engine.rates import EngineRates
from lorafleet.sim.timing import EngineJob
from router.core.errors import Saturated
from router.core.fleet import EngineReport, Roster
from router.core.queue.queued_request import QueuedRequest
from router.core.schedule.policy import Decision
from router.core.schedule.replica_book import LoadEntry
from router.core.schedule.request import HashedRequest, PrefixMatch, RoutingRequest
from router.core.scheduler import Scheduler
from tests.router.core.schedule.test_policy import a_replica
from tests.simulated import SimulatedEngine

# As router/request/queue.py looks while somebody waits, and as routers read reports.
_LOOK_EVERY_S = 0.02
_REPORT_EVERY_S = 1.0


@dataclass(eq=False)
class SimulatedRequest:
    """One request, and what became of it. Times are the simulation's; infinite: it did not happen.

    is_admitted  it was sent, or let into the line
    is_late      it waited for as long as it may and was refused then
    """

    tenant: str
    prompt_tokens: int
    answer_tokens: int
    at: float
    refused: Saturated | None = None
    is_late: bool = False
    sent_at: float = inf
    first_at: float = inf
    ended_at: float = inf
    on_end: Callable[["SimulatedRequest"], None] = lambda _: None

    @property
    def is_admitted(self) -> bool:
        return self.refused is None or self.is_late


@dataclass(eq=False)
class _SentRequest:
    asked: SimulatedRequest
    flight: LoadEntry


class SimulatedFleet:
    """Call `ask` and `at`, then `run`. Engines are alike; what is learned of them is learned from their counters."""

    def __init__(
        self, engines: int = 1, *, prefill: float = 8_000, token_s: float = 0.02, max_num_seqs: int = 256,
        most_wait_s: float = 60.0, seed: int = 0, **scheduler: object,
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.most_wait_s = most_wait_s
        self.engines = [
            SimulatedEngine(prefill=prefill, token_s=token_s, max_num_seqs=max_num_seqs) for _ in range(engines)
        ]
        self.rates = [EngineRates() for _ in range(engines)]
        self.replicas = [a_replica(f"w{i}", max_num_seqs=max_num_seqs, max_model_len=0) for i in range(engines)]
        self.roster = Roster(tuple(self.replicas))
        self.scheduler = Scheduler(
            roster=lambda _: self.roster, match=lambda _: PrefixMatch(), rng=Random(seed), **scheduler
        )
        self.asked: list[SimulatedRequest] = []
        self._sent: dict[EngineJob, _SentRequest] = {}
        self._waiting: dict[QueuedRequest, SimulatedRequest] = {}
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._is_looking = False
        self._report()

    # --- what a test does --------------------------------------------------------------------------------------------

    def at(self, when: float, call: Callable[[], object]) -> None:
        """Have something done at a time."""
        heapq.heappush(self._calls, (max(when, self.now), next(self._numbers), lambda: (call(), None)[1]))

    def ask(
        self, prompt_tokens: int, answer_tokens: int, *, tenant: str = "",
        on_end: Callable[[SimulatedRequest], None] = lambda _: None,
    ) -> SimulatedRequest:  # fmt: skip
        """A request comes now; `on_end` is called when it has its answer or its refusal."""
        asked = SimulatedRequest(tenant, prompt_tokens, answer_tokens, self.now, on_end=on_end)
        self.asked.append(asked)
        queued = QueuedRequest(
            hashed=HashedRequest(RoutingRequest("m", "", prompt_tokens)), tenant=tenant, most_wait_s=self.most_wait_s
        )
        try:
            decision = self.scheduler.decide_or_enqueue(queued, self.now)
        except Saturated as exc:
            asked.refused = exc
            self.at(self.now, lambda: on_end(asked))
            return asked
        if decision is not None:
            self._send(asked, decision)
            return asked
        self._waiting[queued] = asked
        self.at(self.now + self.most_wait_s, lambda: self._expire(queued))
        self._look_soon()
        return asked

    def run(self, until: float = inf) -> None:
        """Let time pass; without an end until nothing is left to do."""
        while True:
            steps = [engine.next_at for engine in self.engines]
            calls_at = self._calls[0][0] if self._calls else inf
            to = min([until, calls_at, *steps])
            if to == inf or (until == inf and not self._is_needed()):
                return
            for i, engine in enumerate(self.engines):
                readings, told = engine.advance(to)
                for reading in readings:
                    self.rates[i].add(reading)
                self.now = to
                self._tell(told)
            self.now = to
            while self._calls and self._calls[0][0] <= to:
                heapq.heappop(self._calls)[2]()
            if to == until:
                return

    # --- what the fleet does ------------------------------------------------------------------------------------------

    def _is_needed(self) -> bool:
        # The next report is always due.
        return len(self._calls) > 1 or any(engine.batch.has_work for engine in self.engines)

    def _send(self, asked: SimulatedRequest, decision: Decision) -> None:
        asked.sent_at = self.now
        engine = self.engines[decision.position]
        flight = self.scheduler.record_dispatch(decision, self.now)
        self._sent[engine.ask(asked.prompt_tokens, asked.answer_tokens)] = _SentRequest(asked, flight)

    def _tell(self, told: "list[EngineJob] | tuple[EngineJob, ...]") -> None:
        for job in told:
            sent = self._sent[job]
            if job.produced == 1:
                sent.asked.first_at = self.now
                self.scheduler.load.record_first_token(sent.flight, self.now)
            if job.finish_reason is not None:
                sent.asked.ended_at = self.now
                del self._sent[job]
                self.scheduler.load.remove(sent.flight, self.now)
                sent.asked.on_end(sent.asked)
            self._look_soon(now=True)

    def _look_soon(self, *, now: bool = False) -> None:
        if self._waiting and (now or not self._is_looking):
            self._is_looking = self._is_looking or not now
            self.at(self.now + (0.0 if now else _LOOK_EVERY_S), lambda: self._look(is_timed=not now))

    def _look(self, *, is_timed: bool) -> None:
        if is_timed:
            self._is_looking = False
        for queued, outcome in self.scheduler.take_admissible(self.now):
            assert isinstance(outcome, Decision)
            self._send(self._waiting.pop(queued), outcome)
        if is_timed:
            self._look_soon()

    def _expire(self, queued: QueuedRequest) -> None:
        asked = self._waiting.pop(queued, None)
        if asked is not None:
            asked.is_late = True
            asked.refused = self.scheduler.queue.time_out(queued, self.now)
            self.scheduler.queue.remove(queued)
            asked.on_end(asked)

    def _report(self) -> None:
        for i, (engine, rates) in enumerate(zip(self.engines, self.rates, strict=True)):
            report = EngineReport(
                running=len(engine.batch.running),
                waiting=len(engine.batch.waiting),
                kv_usage=engine.batch.pool.usage,
                prefill_tokens_per_s=rates.prefill_tokens_per_s,
                token_s=rates.decode_step.token_s,
                sequence_s=rates.decode_step.sequence_s,
                context_token_s=rates.decode_step.context_token_s,
                output_tokens=rates.mean_output_tokens,
                request_s=rates.mean_request_s,
                at=self.now,
            )
            self.replicas[i] = replace(self.replicas[i], report=report)
            self.scheduler.load.apply_report(self.replicas[i])
        self.roster = Roster(tuple(self.replicas))
        self.at(self.now + _REPORT_EVERY_S, self._report)
