"""The real `place`, `diff` and `DemandBook`, acting on the simulated fleet as the reconciler acts on a real one."""

from benchmarks.placement.workload import MOST_RANK
from benchmarks.placement.world import Copy, SimulatedWorker, World
from orchestrator.core.demand import DemandBook
from orchestrator.core.placement.place import place
from orchestrator.core.plan import WorkerAction, diff
from orchestrator.model.adapter_index import adapter_index
from orchestrator.model.adapters import AdapterSpec, RegisteredAdapter
from orchestrator.model.cards import AdapterCard
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import (
    DesiredPlacement,
    Intent,
    LoadFigures,
    ObservedFleet,
    ObservedWorker,
    Pair,
    ReportedAdapter,
    WantedReplicas,
)
from orchestrator.model.usage import CountBatch, CountedRow, RequestCounts, UsageReport

PASS_S = 2
"""Between passes when nothing happens."""
CONFIRM_S = 0.2
"""From a drain's mark until every router has said that it knows it; on loopback it takes them a tenth of that."""
WANTED_S = 60.0
GREEDY = "greedy"
"""The tenant with many adapters of its own; each other adapter is a tenant of its own."""


class LorafleetOrchestrator:
    """One orchestrator."""

    name = "lorafleet"

    def __init__(self, world: World, rules: PlacementPolicy | None = None) -> None:
        self.world = world
        self.rules = rules or PlacementPolicy()
        self.book = DemandBook(self.rules.demand_window_s)
        adapters = {
            lora_id(n): RegisteredAdapter(
                spec=AdapterSpec(lora_id=lora_id(n), source="s3://a", base_model="m", digest=f"{n:064x}"),
                card=AdapterCard(rank=world.scene.rank_of(n), size_bytes=10**8),
            )
            for n in range(world.scene.all_adapters)
        }
        self.intent = Intent(adapters=adapters, known_index=adapter_index(adapters))
        self.desired = DesiredPlacement()
        self.drains: dict[Pair, float] = {}
        self.reserve_victims: dict[Pair, str] = {}
        self.seconds = 0
        self.reported: dict[tuple[int, str], tuple[int, float]] = {}
        self.unasked = 0
        """Loads begun that no request waited for and that mend nothing."""
        self.frozen_s = 0
        self._is_due = False
        self._looks_at = 0.0

    def wanted(self, adapter: int) -> None:
        now = self.world.now
        tenants = frozenset({GREEDY} if adapter >= self.world.scene.first_greedy else ())
        want = WantedReplicas(replicas=1, since=now, tenants=tenants)
        if self.book.add_want(lora_id(adapter), want, now + WANTED_S):
            self._poke()

    def loaded(self, worker: SimulatedWorker) -> None:
        del worker
        self._poke()

    def lost(self, worker: SimulatedWorker) -> None:
        for adapter in worker.copies:
            name = lora_id(adapter)
            is_hot = self.book.request_rate(name, self.world.now) > 0
            now, there = self.world.now, len(self.world.ready_on(adapter))
            self.book.add_want(
                name, WantedReplicas(replicas=there + 1, may_evict=is_hot, is_repair=True, since=now), now + WANTED_S
            )
        self._poke()

    def joined(self) -> None:
        self._poke()

    def second(self) -> None:
        self.seconds += 1
        self._report()
        for adapter in self.world.waiting:  # as routers ask again while somebody waits
            self.wanted(adapter)
        self.frozen_s += self.desired.frozen_reason is not None
        if self.seconds % PASS_S == 0 or self.drains:
            self.run_pass()

    def _report(self) -> None:
        """One router's report: what has ended since the last one, and what runs and waits."""
        rows, in_flight = [], dict[str, dict[str, int]]()
        for (adapter, name), (requests, work_s) in self.world.sent.items():
            engine = self.world.workers.get(name)
            copy = None if engine is None else engine.copies.get(adapter)
            running = 0 if copy is None else copy.in_flight
            if running:
                in_flight.setdefault(name, {})[engine_name(adapter)] = running
            ended, reported_s = self.reported.get((adapter, name), (0, 0.0))
            self.reported[adapter, name] = requests - running, work_s
            counts = RequestCounts(sent=max(0, requests - running - ended), work_s=work_s - reported_s)
            if counts.sent or counts.work_s:
                rows.append(CountedRow(adapter=lora_id(adapter), worker=name, counts=counts))
        report = UsageReport(
            router_id="r0",
            boot_id="b0",
            seq=self.seconds,
            revision_seen=self.seconds,
            batches=(CountBatch(number=self.seconds, rows=tuple(rows)),),
            in_flight=in_flight,
            waiting={lora_id(adapter): len(line) for adapter, line in self.world.line.items() if line},
            asked_age_s={row.adapter: 0.0 for row in rows},
        )
        self.book.record_report(report, self.world.now)

    def _poke(self) -> None:
        if not self._is_due:
            self._is_due = True
            self.world.at(self.world.now, self.run_pass)

    def run_pass(self) -> None:
        """Observe, place, diff, act."""
        self._is_due = False
        now = self.world.now
        for name, want in self.book.open_wants(now).items():
            if len(self.world.ready_on(number(name))) >= want.replicas:
                self.book.drop_want(name)
        observed = self._observed()
        desired = place(self.intent, observed, self.book.snapshot(now), self.rules, now)
        self.desired = desired
        if desired.look_again_at is not None and not now < self._looks_at < desired.look_again_at:
            self._looks_at = max(now, desired.look_again_at)
            self.world.at(self._looks_at, self._poke)
        actions = diff(desired, observed, self.rules, 0, now)
        self._end_drains(desired)
        wants = self.book.open_wants(now)
        for action in actions:
            self._act(action, is_asked=action.lora_id in wants)

    def _observed(self) -> ObservedFleet:
        workers = {name: self._worker(engine) for name, engine in self.world.known.items()}
        busy = {name: engine.loads for name, engine in self.world.known.items()}
        return ObservedFleet(
            workers=workers,
            busy=busy,
            loads_in_flight=sum(busy.values()),
            reserve_victims=dict(self.reserve_victims),
            drains={pair: self._is_drained(pair, since) for pair, since in self.drains.items()},
            memory=self.desired.memory,
            load_figures=LoadFigures(seconds=self.world.scene.load_s, size_bytes=10**8),
        )

    def _worker(self, engine: SimulatedWorker) -> ObservedWorker:
        held = {
            lora_id(adapter): ReportedAdapter(
                lora_id=lora_id(adapter),
                digest=f"{adapter:064x}",
                engine_name=engine_name(adapter),
                state=copy.state,
                since=copy.since,
            )
            for adapter, copy in engine.copies.items()
        }
        return ObservedWorker(
            id=engine.name,
            state="ready",
            base_model="m",
            slots=engine.slots,
            max_lora_rank=MOST_RANK,
            adapters=held,
            node=engine.name,
            load=max(0.0, engine.free_at - self.world.now),
            finishes_unloaded=True,
        )

    def _is_drained(self, pair: Pair, since: float) -> bool:
        copy = self._copy(pair)
        is_over = self.world.now - since >= self.rules.drain_deadline_s
        is_known = self.world.now >= since + CONFIRM_S
        return copy is None or is_over or (copy.in_flight == 0 and is_known)

    def _copy(self, pair: Pair) -> Copy | None:
        engine = self.world.known.get(pair[1])
        return None if engine is None else engine.copies.get(number(pair[0]))

    def _end_drains(self, desired: DesiredPlacement) -> None:
        wanted = {(step.lora_id, step.worker_id) for step in desired.removals}
        wanted |= {(load.evict, load.worker_id) for load in desired.loads if load.evict is not None}
        for pair in [pair for pair in self.drains if pair not in wanted]:
            engine = self.world.known.get(pair[1])
            if engine is None or not engine.loads:
                del self.drains[pair]
                copy = self._copy(pair)
                if copy is not None and copy.state == "draining":
                    copy.state = "ready"
                    self.world.release(number(pair[0]))
        self.reserve_victims = {
            pair: name
            for pair, name in self.reserve_victims.items()
            if pair in wanted or (pair[1] in self.world.known and self.world.known[pair[1]].loads)
        }

    def _act(self, action: WorkerAction, *, is_asked: bool) -> None:
        engine = self.world.known[action.worker_id]
        if not engine.is_up:
            return
        pair = (action.lora_id, action.worker_id)
        if action.operation == "drain":
            self.drains[pair] = self.world.now
            self.world.at(self.world.now + CONFIRM_S, self._poke)
            engine.copies[number(action.lora_id)].state = "draining"
        elif action.operation == "unload":
            del engine.copies[number(action.lora_id)]
            self.drains.pop(pair, None)
            self._poke()
        elif action.operation == "load":
            if action.evict is not None:
                del engine.copies[number(action.evict)]
                self.drains.pop((action.evict, action.worker_id), None)
            if action.evict_after is not None:
                self.reserve_victims[action.evict_after, action.worker_id] = action.lora_id
            self.unasked += not is_asked
            self.world.load(number(action.lora_id), engine)

    def target(self, adapter: int) -> int:
        """Replicas that are due now."""
        return self.desired.targets.get(lora_id(adapter), 1)


def lora_id(adapter: int) -> str:
    return f"a{adapter}/v1"


def number(name: str) -> int:
    return int(name[1:-3])


def engine_name(adapter: int) -> str:
    """The name that engines have for an adapter."""
    return f"{lora_id(adapter)}@{adapter:012x}"
