"""Which adapter should be on which worker: pure, so that any decision can be replayed from its inputs.

For every adapter a target number of replicas (`targets.py`), for every missing one, by whose turn it is (`turns.py`),
a worker (`choose.py`) and, where it is full, who makes room (`victims.py`); then, while all is calm (`churn.py`), what
moves and what is one too many (`moves.py`).
What one pass has to know of the one before is in `ObservedFleet.memory`, and nowhere else.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice

from lorafleet.identity import rendezvous_score
from orchestrator.core.placement import churn
from orchestrator.core.placement.choose import PlacementMisfit, fits_nowhere, limits_of, next_load, why_not
from orchestrator.core.placement.context import PlacementContext, is_same, usable_slots
from orchestrator.core.placement.moves import finished, new_moves, surplus, unfinished
from orchestrator.core.placement.targets import ReplicaTarget, targets
from orchestrator.core.placement.tenant_order import in_turn, turn_of
from orchestrator.core.state import (
    OCCUPYING,
    SERVING,
    DemandSnapshot,
    DesiredPlacement,
    Intent,
    ObservedFleet,
    ObservedWorker,
    Pair,
    PassMemory,
    PlacementPolicy,
    PlannedInspection,
    PlannedLoad,
    PlannedRemoval,
    RegisteredAdapter,
    ReportedAdapter,
)

__all__ = ["place", "usable_slots"]

INSPECTIONS = 64
"""Most inspections named in one pass; far more than can be under way, far fewer than may be waiting."""
LOADS = 128
"""Most loads named in one pass, for the same reason."""


def place(
    intent: Intent, observed: ObservedFleet, demand: DemandSnapshot, policy: PlacementPolicy, now: float
) -> DesiredPlacement:
    """Where everything should be. The same input gives the same output, whatever the order of its mappings.

    Nothing is ever listed for removal because nobody asks for it: only tombstones, finished moves and copies above the
    target are, never the last one, and victims are named in the load that needs their slot. Adapters that no intent
    knows are left alone.
    """
    return _PlacementPass(PlacementContext(intent, observed, demand, policy, now)).run()


class _PlacementPass:
    """One pass. `left`: how many more steps it may name that no request waits for; `steps`: those it named."""

    def __init__(self, board: PlacementContext) -> None:
        self.board = board
        self.targets: dict[str, ReplicaTarget] = {}
        self.storm = board.observed.memory.storm
        self.workers = sum(worker.state == "ready" for worker in board.workers)
        self.is_frozen = churn.is_frozen(self.storm, board.policy, self.workers, board.now)
        count = churn.churn(self.storm, board.policy, board.now)
        self.left = 0 if self.is_frozen else churn.limit(board.policy, self.workers) - count
        self.steps: set[churn.Step] = set()

    def run(self) -> DesiredPlacement:
        board = self.board
        self.targets, scales = targets(board)
        board.targets = {lora_id: target.replicas for lora_id, target in self.targets.items()}
        board.needed = {lora_id: target.needed for lora_id, target in self.targets.items()}
        unplaced: dict[str, str] = {}
        loads = self._fill(unplaced)
        misfits = self._misfits()
        unplaced |= self._unserved() | {lora_id: misfit.message for lora_id, misfit in misfits.items()}
        removals = {(step.lora_id, step.worker_id): step for step in self._removals()}
        moves = unfinished(board)
        for step in self._calm_removals(moves):
            removals.setdefault((step.lora_id, step.worker_id), step)
        if self.left > 0 and len(loads) < LOADS:
            for load, leaves in islice(new_moves(board, moves), min(self.left, LOADS)):
                moves[load.lora_id, leaves] = load.worker_id
                loads.append(load)
                self.steps.add((load.lora_id, load.worker_id, "load"))
        why = churn.why_frozen(self.storm, board.policy, self.workers, board.now) if self.is_frozen else None
        kept = churn.watched(self.storm, frozenset(self.steps), board.policy, is_held=self.is_frozen, now=board.now)
        return DesiredPlacement(
            replicas={lora_id: tuple(sorted(held)) for lora_id, held in board.holders.items() if held},
            targets=board.targets,
            loads=tuple(loads),
            removals=tuple(removals[pair] for pair in sorted(removals, key=lambda pair: (pair[1], pair[0]))),
            inspections=tuple(islice(self._inspections(), INSPECTIONS)),
            unplaced=unplaced,
            fits_nowhere={lora_id: misfit.code for lora_id, misfit in misfits.items()},
            leaving=tuple(self._leaving()),
            frozen=why,
            memory=PassMemory(scales=scales, moves=moves, storm=kept),
        )

    def _fill(self, unplaced: dict[str, str]) -> list[PlannedLoad]:
        board = self.board
        loads: list[PlannedLoad] = []
        for adapter in self._hungry():
            target = self.targets[adapter.lora_id]
            while board.copies(adapter.lora_id) < target.replicas:
                if len(loads) == LOADS:
                    return loads
                load = next_load(board, adapter)
                if load is None:
                    reason = why_not(board, adapter)
                    if reason is not None and board.copies(adapter.lora_id) < max(1, target.asked):
                        unplaced[adapter.lora_id] = reason
                    break
                want = board.demand.wants.get(adapter.lora_id)
                is_asked = want is not None or board.copies(adapter.lora_id) < target.asked
                if not is_asked and not self._may_step((load.lora_id, load.worker_id, "load")):
                    break
                if want is not None and want.is_repair:
                    self.steps.add((load.lora_id, load.worker_id, "load"))
                board.take(load)
                loads.append(load)
        return loads

    def _may_step(self, step: churn.Step) -> bool:
        """Whether a step that nobody waits for may be named; one that was named before is counted and goes on."""
        if step not in self.storm.named:
            if self.left <= 0:
                return False
            self.left -= 1
        self.steps.add(step)
        return True

    def _calm_removals(self, moves: Mapping[Pair, str]) -> Iterable[PlannedRemoval]:
        """Old halves of moves, which are finished in a storm as well, and surplus copies, which wait for its end."""
        for step in finished(self.board, moves):
            self.steps.add((step.lora_id, step.worker_id, "unload"))
            self.board.leaving.add((step.lora_id, step.worker_id))
            yield step
        for step in surplus(self.board, [lora_id for lora_id, _ in moves]):
            if self._may_step((step.lora_id, step.worker_id, "unload")):
                self.board.leaving.add((step.lora_id, step.worker_id))
                yield step

    def _hungry(self) -> Iterator[RegisteredAdapter]:
        """Adapters with fewer replicas than their target, by whose turn it is.

        Those with none, those waited for, those whose turn comes first, the hottest first. What nobody waits for any
        more comes later: clients that leave sooner than their turn comes would have all loads else.
        """
        board, demand = self.board, self.board.demand
        short = [lora_id for lora_id, n in board.targets.items() if board.copies(lora_id) < n]

        def rank(adapter: RegisteredAdapter) -> tuple[int, bool, bool]:
            want = demand.wants.get(adapter.lora_id)
            is_waiting = want is not None and want.is_waited_for
            return -adapter.priority, bool(board.copies(adapter.lora_id)), not is_waiting

        def order(adapter: RegisteredAdapter) -> tuple[object, ...]:
            want = demand.wants.get(adapter.lora_id)
            turn = turn_of(want) if want is not None and want.is_waited_for else 0.0
            return (*rank(adapter), want is None, turn, -demand.rates.get(adapter.lora_id, 0.0), adapter.lora_id)

        adapters = sorted((board.intent.adapters[lora_id] for lora_id in short), key=order)
        had = Counter[str]()
        # All at once: what is named a load meanwhile has another rank.
        for (_, _, is_idle), alike in [(key, list(them)) for key, them in groupby(adapters, key=rank)]:
            yield from alike if is_idle else in_turn(board, alike, had)

    def _removals(self) -> Iterable[PlannedRemoval]:
        for worker in self.board.workers:
            if worker.state in ("lost", "unmanaged", "starting"):
                continue
            for lora_id in sorted(worker.held):
                held = worker.held[lora_id]
                reason = self._why_removed(worker, held) if held.state in OCCUPYING else None
                if reason is not None:
                    yield PlannedRemoval(lora_id=lora_id, worker_id=worker.id, reason=reason)

    def _why_removed(self, worker: ObservedWorker, held: ReportedAdapter) -> str | None:
        board = self.board
        adapter = board.intent.adapters.get(held.lora_id)
        owed_to = board.observed.owed.get((held.lora_id, worker.id))
        if owed_to is not None and held.lora_id not in board.demand.wants:
            return f"made room for {owed_to}"
        if adapter is None:
            return "deleted" if board.intent.tombstones.get(held.lora_id) == held.digest else None
        if adapter.is_deleting:
            return "deleted"
        if not worker.serves(adapter.base_model):
            return f"of {adapter.base_model!r}, which this worker does not serve"
        if (
            worker.state == "draining"
            and not worker.is_terminating
            and not adapter.quarantine
            and is_same(adapter, held)
        ):
            ready = self._ready_elsewhere(adapter, worker.id)
            if ready >= max(1, min(board.floor(adapter), board.most(adapter))):
                return f"moved: {ready} ready elsewhere, this worker drains"
        return None

    def _ready_elsewhere(self, adapter: RegisteredAdapter, worker_id: str) -> int:
        lora_id = adapter.lora_id
        return sum(
            w.id != worker_id and w.state in SERVING and w.held[lora_id].state == "ready"
            for w in self.board.workers
            if lora_id in w.held and w.serves(adapter.base_model)
        )

    def _leaving(self) -> Iterable[str]:
        for worker in self.board.workers:
            if worker.state == "draining" and not worker.is_agent_draining and not worker.is_terminating:
                is_empty = not any(held.lora_id in self.board.movers for held in worker.held.values())
                is_late = worker.drain_deadline is not None and self.board.now >= worker.drain_deadline
                if is_empty or is_late:
                    yield worker.id

    def _unserved(self) -> dict[str, str]:
        """Adapters that nobody can look at, as no ready worker serves the base model that they were registered for."""
        served = {worker.base_model for worker in self.board.workers if worker.state == "ready"}
        if not served:
            return {}
        return {
            adapter.lora_id: f"no ready worker serves {adapter.base_model!r}; those there are serve {sorted(served)}"
            for adapter in self.board.intent.adapters.values()
            if not adapter.is_inspected and not adapter.is_deleting
            if adapter.base_model is not None and adapter.base_model not in served
        }

    def _misfits(self) -> dict[str, PlacementMisfit]:
        """Adapters that no worker could hold, ready or not: one that starts, or is lost, may be back in a moment."""
        limits = limits_of(self.board.workers)
        found = {}
        for adapter in self.board.intent.adapters.values():
            if adapter.is_inspected and not adapter.is_deleting and not self.board.copies(adapter.lora_id):
                misfit = fits_nowhere(adapter, limits)
                if misfit is not None:
                    found[adapter.lora_id] = misfit
        return found

    def _inspections(self) -> Iterable[PlannedInspection]:
        board = self.board
        ready = [w for w in board.workers if w.state == "ready" and w.max_lora_rank > 0]
        unknown = [
            adapter
            for adapter in board.intent.adapters.values()
            if not adapter.is_inspected and not adapter.is_deleting and adapter.quarantine is None
        ]
        wants = board.demand.wants

        def order(adapter: RegisteredAdapter) -> tuple[bool, str]:
            # A request waits for a minute; of thousands that are registered at once the last is looked at later.
            return adapter.lora_id not in wants, adapter.lora_id

        for adapter in sorted(unknown, key=order) if ready else ():
            lora_id = adapter.lora_id
            if lora_id in board.observed.inspecting:
                continue
            able = [w for w in ready if w.serves(adapter.base_model)]
            able = [w for w in able if board.failed(lora_id, w.id) is None]
            if able:
                home = min(able, key=lambda w: (-rendezvous_score(lora_id, w.id), w.id))
                yield PlannedInspection(lora_id=lora_id, worker_id=home.id, reason="digest and rank are not known yet")
