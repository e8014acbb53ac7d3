"""Engines, their agents' reports and KV events, and the routers, on one clock. Routers share nothing."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from statistics import median
from typing import Protocol

from benchmarks.trace.engine import NEVER, Hardware, TraceEngine, TraceJob
from benchmarks.trace.workload import ADAPTERS, TraceRequest
from lorafleet.engine.decode_step import DecodeStep
from lorafleet.engine.metrics_page import EngineMetrics
from lorafleet.engine.rates import EngineRates
from workers.core.slots import AdapterSlots, Location

Changes = list[tuple[int, bool]]

SPEEDS = (0.8, 0.87, 0.93, 0.98, 1.02, 1.07, 1.13, 1.2)
SLOWED = 0.25
SCRAPE_S = 1.0
"""How often an agent reads its engine's counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One fleet. `report_s`: how often each agent's report is read, so that it is up to that old.

    speeds     of the replicas, around 1
    slows_at_s when the first replica becomes four times slower
    gone_s     from when until when the first replica is gone; never by default
    events_s   from the end of an engine's step until the routers know what it cached
    timeout_s  after which a client without a first token leaves
    """

    hardware: Hardware = field(default_factory=Hardware)
    speeds: tuple[float, ...] = SPEEDS
    slows_at_s: float = NEVER
    gone_s: tuple[float, float] = (NEVER, NEVER)
    routers: int = 1
    report_s: float = 1.0
    events_s: float = 0.03
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What an agent tells of its engine: read at `at`, rates and loads learned, adapters placed by the LRU's rule."""

    worker: int
    at: float
    running: int
    waiting: int
    kv_usage: float
    prefill_tokens_per_s: float
    decode_step: DecodeStep
    output_tokens: float
    load_s: float
    loads_s: tuple[float, ...]
    """Each adapter's own load, as it was measured when the adapter was placed there."""
    locations: tuple[Location, ...]
    running_adapters: frozenset[int]
    waiting_adapters: frozenset[int]


class TraceRouter(Protocol):
    """One router. What it is told is all that it may know."""

    def offer(self, request: TraceRequest, now: float) -> None:
        """A request has come: `send` it now or later, or shed it."""

    def first_token(self, request: TraceRequest) -> None:
        """A request of its own has its first token."""

    def ended(self, request: TraceRequest) -> None:
        """A request of its own has ended, or its client has left."""

    def read(self, reading: EngineReading) -> None:
        """A report has come; the engine has come back if it was lost."""

    def lost(self, worker: int) -> None:
        """An engine is gone: its connections have broken, and new ones are refused."""

    def cached(self, worker: int, changes: Changes) -> None:
        """KV events have come; told before anything else that happens later."""


class SimulatedAgent:
    """What stands beside an engine: learned rates, and where it believes its adapters to be."""

    def __init__(self, hardware: Hardware, rng: Random, loads: Random) -> None:
        """`loads` draws how long each adapter's own load took."""
        self._rates = EngineRates()
        names = [str(adapter) for adapter in range(ADAPTERS)]
        self._slots = AdapterSlots(hardware.max_loras, hardware.max_cpu_loras, frozenset(names))
        self._names = names
        # Its own loads by name, done when the adapters were placed: the median of five.
        sizes = [hardware.size_of(adapter) for adapter in rng.sample(range(ADAPTERS), 5)]
        draws = [size * rng.lognormvariate(0, hardware.load_sigma) * hardware.load_s for size in sizes]
        self._load_s = median(draws)
        self._loads_s = tuple(
            hardware.size_of(adapter) * loads.lognormvariate(0, hardware.load_sigma) * hardware.load_s
            for adapter in range(ADAPTERS)
        )

    def used(self, adapter: int) -> None:
        """A router has sent a request for it."""
        self._slots = self._slots.after_use(self._names[adapter])

    def restarted(self) -> None:
        """Reset the slots of an engine that has started again: all adapters are on disk alone."""
        self._slots = AdapterSlots(self._slots.max_loras, self._slots.max_cpu_loras, frozenset(self._names))

    def scrape(self, engine: TraceEngine, now: float) -> None:
        """Read the engine's counters and learn from them."""
        counters = engine.read(now)
        self._rates.add(
            EngineMetrics(
                at_s=now,
                running=len(engine.running),
                kv_usage=engine.kv_usage,
                block_size=engine.hardware.block_size,
                total_kv_blocks=engine.hardware.blocks,
                computed_tokens=counters.computed_tokens,
                steps=counters.steps,
                ended=counters.ended,
                ended_prefill_tokens=counters.ended_prefill_tokens,
                ended_prefill_seconds=counters.ended_prefill_seconds,
                ended_output_tokens=counters.ended_output_tokens,
                ended_seconds=counters.ended_seconds,
                token_gaps=counters.token_gaps,
                gap_seconds=counters.gap_seconds,
                first_tokens=counters.first_tokens,
            )
        )

    def reading(self, worker: int, engine: TraceEngine, now: float) -> EngineReading:
        """The report at `now`."""
        host_lru = [entry.name for entry in self._slots.host_lru]
        where: dict[str, Location] = dict.fromkeys(host_lru, "host")
        where |= dict.fromkeys(host_lru[-self._slots.max_loras :], "device")
        return EngineReading(
            worker=worker,
            at=now,
            running=len(engine.running),
            waiting=len(engine.waiting),
            kv_usage=engine.kv_usage,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_step=self._rates.decode_step,
            output_tokens=self._rates.mean_output_tokens,
            load_s=self._load_s,
            loads_s=self._loads_s,
            locations=tuple([where.get(name, "disk") for name in self._names]),
            running_adapters=frozenset(job.adapter for job in engine.running if job.adapter is not None),
            waiting_adapters=frozenset(adapter for adapter in engine.waiting.lines if adapter is not None),
        )


class TraceFleet:
    """The clock. `routers` are made with `send`, `shed` and `at` of this."""

    def __init__(self, setting: Setting, seed: int, *, learns_rates: bool = True) -> None:
        """`learns_rates`: agents learn their engines' rates; most of a run's time where no policy asks for them."""
        self.setting = setting
        self._learns_rates = learns_rates
        self.now = 0.0
        rng = Random(seed)
        self.engines = [TraceEngine(setting.hardware.at_speed(speed), Random(rng.random())) for speed in setting.speeds]
        loads = Random(f"loads {seed}")
        self.agents = [SimulatedAgent(setting.hardware, rng, loads) for _ in setting.speeds]
        self.routers: list[TraceRouter] = []
        self._due = [NEVER] * len(self.engines)
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._feed: deque[tuple[float, int, Changes]] = deque()
        self._jobs: dict[int, TraceRequest] = {}
        self._flying: dict[TraceRequest, TraceJob] = {}
        self._unanswered: deque[TraceRequest] = deque()
        self._phases = [rng.random() for _ in self.engines]
        self._arrivals: list[tuple[float, int, TraceRequest]] = []
        self._gone: set[int] = set()

    # --- what routers may do -----------------------------------------------------------------------------------------

    def send(self, request: TraceRequest, worker: int) -> None:
        """Give a request to an engine, now; never to one that is lost."""
        assert worker not in self._gone, worker
        request.sent, request.worker = self.now, worker
        job = TraceJob(
            request.number, list(request.keys), request.prompt_tokens, request.output_tokens, request.adapter
        )
        self._jobs[request.number] = request
        self._flying[request] = job
        self.agents[worker].used(request.adapter)
        engine = self.engines[worker]
        engine.add(job, self.now)
        self._due[worker] = engine.due

    def shed(self, request: TraceRequest) -> None:
        """Refuse a request: it counts as failed."""
        request.is_shed = True
        self._follow(request)

    def at(self, when: float, call: Callable[[float], None]) -> None:
        """Have `call` called with the time then."""
        heapq.heappush(self._timers, (when, next(self._numbers), call))

    # --- the clock ---------------------------------------------------------------------------------------------------

    def run(self, requests: Sequence[TraceRequest]) -> None:
        """Everything that happens until the last request has ended; the requests are written into."""
        if self.setting.slows_at_s < NEVER:
            self.at(self.setting.slows_at_s, self._slow)
        gone_at_s, back_at_s = self.setting.gone_s
        if gone_at_s < NEVER:
            self.at(gone_at_s, self._die)
            self.at(back_at_s, self._return)
        for worker, phase in enumerate(self._phases):
            self.at(phase * self.setting.report_s, self._reports(worker))
            if self._learns_rates:
                self.at(phase * SCRAPE_S, self._scrapes(worker))
        left = self._arrivals
        left += [(request.arrived, request.number, request) for request in requests if not request.waits_for]
        heapq.heapify(left)
        while left or self._flying or self._unanswered:
            due = min(self._due)
            timer = self._timers[0][0]
            arrival = left[0][0] if left else NEVER
            leaves = self._unanswered[0].arrived + self.setting.timeout_s if self._unanswered else NEVER
            self.now = now = min(due, timer, arrival, leaves)
            while self._feed and self._feed[0][0] <= now:
                _, worker, changes = self._feed.popleft()
                for router in self.routers:
                    router.cached(worker, changes)
            if now == due:
                self._step(self._due.index(due))
            elif now == arrival:
                request = heapq.heappop(left)[2]
                self._unanswered.append(request)
                self.routers[request.router].offer(request, now)
            elif now == timer:
                heapq.heappop(self._timers)[2](now)
            else:
                self._leave(self._unanswered.popleft())

    def _step(self, worker: int) -> None:
        engine, now = self.engines[worker], self.now
        changes = engine.blocks.take_changes()
        if changes:
            self._feed.append((now + self.setting.events_s, worker, changes))
        told = engine.finish()
        self._due[worker] = engine.due
        for job in told:
            request = self._jobs[job.number]
            router = self.routers[request.router]
            if job.first_token == now:
                request.first_token = now
                request.cached_tokens = job.cached_tokens
                request.load_s = job.load_s
                router.first_token(request)
            if job.is_over:
                request.last_token = now
                del self._flying[request], self._jobs[job.number]
                router.ended(request)
                self._follow(request)

    def _leave(self, request: TraceRequest) -> None:
        """The client's patience is over, or was never tried."""
        if request.first_token >= 0 or request.is_shed:
            return
        job = self._flying.pop(request, None)
        if job is not None:
            engine = self.engines[request.worker]
            engine.abort(job, self.now)
            self._due[request.worker] = engine.due
            del self._jobs[request.number]
        self.routers[request.router].ended(request)
        self._follow(request)

    def _follow(self, ended: TraceRequest) -> None:
        """Let the requests come that waited for this one alone; a program goes on after a failure, too."""
        for request, pause_s in ended.then:
            request.waits_for -= 1
            if not request.waits_for:
                request.arrived = self.now + pause_s
                request.paused_s = ended.paused_s + pause_s
                heapq.heappush(self._arrivals, (request.arrived, request.number, request))

    def _slow(self, _now: float) -> None:
        self.engines[0].hardware = self.engines[0].hardware.at_speed(SLOWED)

    def _die(self, now: float) -> None:
        """The first engine is gone: requests without a token are sent again, clients of the others see an error."""
        broken = [self._jobs.pop(job.number) for job in self.engines[0].die(now)]
        self._due[0] = NEVER
        self._gone.add(0)
        self._feed.append((now + self.setting.events_s, 0, self.engines[0].blocks.take_changes()))
        for router in self.routers:
            router.lost(0)
        for request in broken:
            del self._flying[request]
            self.routers[request.router].ended(request)
        for request in broken:
            if request.first_token < 0:
                self.routers[request.router].offer(request, now)
            else:
                self._follow(request)

    def _return(self, _now: float) -> None:
        self._gone.discard(0)
        self.agents[0].restarted()

    def _scrapes(self, worker: int) -> Callable[[float], None]:
        def scrape(now: float) -> None:
            if worker not in self._gone:
                self.agents[worker].scrape(self.engines[worker], now)
            self.at(now + SCRAPE_S, scrape)

        return scrape

    def _reports(self, worker: int) -> Callable[[float], None]:
        def report(now: float) -> None:
            if worker not in self._gone:
                reading = self.agents[worker].reading(worker, self.engines[worker], now)
                for router in self.routers:
                    router.read(reading)
            self.at(now + self.setting.report_s, report)

        return report
