"""The frozen snapshots that one pass decides from: stored intent, reported fleet, measured demand, and the decision.

All times are seconds of the monotonic clock of the process that took the snapshot.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from lorafleet.identity import lora_id_of
from orchestrator.model.acceptance import AcceptanceResult
from orchestrator.model.adapter_index import AdapterIndex, adapter_index
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.served_names import is_retired_version

Pair = tuple[str, str]
"""(lora_id, worker_id)"""

SERVING = frozenset({"ready", "cordoned", "unmanaged"})
"""Worker states in which an adapter on the worker counts as a lasting replica."""
UNREACHABLE = frozenset({"unmanaged", "lost"})
"""Worker states in which its agent does not answer."""
OCCUPYING = frozenset({"loading", "ready", "draining"})
"""Adapter states in which the adapter takes one of the worker's slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """The stored intent that placement needs.

    tombstones    lora_id -> digests of its deleted versions
    next_numbers  published name -> number of its next version; all before were used
    superseded    versions of published names that no name points at any longer
    known_index   the index of `adapters`, where the store keeps one; see `index`
    """

    adapters: Mapping[str, RegisteredAdapter] = field(default_factory=dict)
    tombstones: Mapping[str, frozenset[str]] = field(default_factory=dict)
    next_numbers: Mapping[str, int] = field(default_factory=dict)
    superseded: frozenset[str] = frozenset()
    known_index: AdapterIndex | None = None

    @property
    def index(self) -> AdapterIndex:
        """The index of `adapters`: the store's, or made here."""
        return adapter_index(self.adapters) if self.known_index is None else self.known_index

    def with_raised(self, adapters: Mapping[str, RegisteredAdapter]) -> "Intent":
        """The intent in which these adapters, which it has, have another policy."""
        index = None if self.known_index is None else self.known_index.with_standing(adapters)
        return replace(self, adapters={**self.adapters, **adapters}, known_index=index)

    def is_deleted(self, lora_id: str, digest: str) -> bool:
        """Whether this version of the adapter was deleted, and is not what is registered now."""
        known = self.adapters.get(lora_id)
        if known is not None and known.digest in (None, digest):
            return False  # registered again; without a digest the same bytes may be meant
        if digest in self.tombstones.get(lora_id, ()):
            return True
        # Ten thousand versions of a name leave no tombstones: the next number says as much.
        return is_retired_version(lora_id, self.next_numbers, self.adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedAdapter:
    """An adapter on a worker, as the worker's agent reported it.

    since         when it became ready there
    last_used_at  when a router last told the agent of a request for it; None: never, or not known
    is_foreign    another client loaded it: the digest is that of its files, and routers send it nothing
    is_configured the worker's settings name it
    acceptance    how its answers there compare with the trainer's; None: not compared
    """

    lora_id: str
    digest: str
    engine_name: str
    state: str
    location: str = "device"
    since: float = 0.0
    last_used_at: float | None = None
    is_foreign: bool = False
    is_configured: bool = False
    acceptance: AcceptanceResult | None = None


def foreign_key(engine_name: str) -> str:
    """The key, in place of a lora_id, of an adapter that another client loaded. It is never equal to a lora_id."""
    # No lora_id ends in a digest or in "@", see `checked_lora_id`.
    return engine_name if lora_id_of(engine_name) != engine_name else f"{engine_name}@"


def lora_id_of_held(held: ReportedAdapter) -> str:
    """The lora_id of an adapter on a worker. A second version there is keyed by its engine name, `lora_id@digest12`.

    The key of an adapter that another client loaded is returned as it is, because it is no registered one.
    """
    return lora_id_of(held.lora_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIntent:
    """An operator's orders for a worker, as they are stored. Times are Unix times: an order outlives its leader.

    state       None: the worker is in use, but for the adapters that are kept out
    since       when it was given
    until       when a drain stops waiting for moves, at the earliest; None: not computed yet
    deadline_s  seconds for moves, as the operator named them; None: they follow what must be moved
    moves       adapters that had to be moved when the drain began, and their bytes; None: not counted yet
    kept_out    lora_ids (of another client's adapter its engine name) that get no copy there, in order
    """

    state: Literal["cordoned", "draining"] | None = None
    since: float
    until: float | None = None
    deadline_s: float | None = None
    moves: int | None = None
    move_bytes: int = 0
    kept_out: tuple[str, ...] = ()

    def with_kept_out(self, names: Iterable[str]) -> "WorkerIntent | None":
        """The orders with these adapters kept out; None: no order is left."""
        kept_out = tuple(sorted(set(names)))
        return replace(self, kept_out=kept_out) if kept_out or self.state is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDrainOrder:
    """An operator's order to drain a worker.

    deadline    when the drain stops waiting for moves, at the earliest; None: not computed yet
    is_fixed    the operator named the deadline, so what must be moved does not change it
    moves       adapters that had to be moved when the drain began, and their bytes; None: not counted yet
    """

    began_at: float
    deadline: float | None = None
    is_fixed: bool = False
    moves: int | None = None
    move_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainProgress:
    """How far a worker's drain is.

    moves, move_bytes  adapters that had to be moved when the drain began, and their bytes
    left               adapters that are not ready elsewhere yet
    expected_s         seconds until they are, by the loads measured
    deadline           when the drain stops waiting for them; None without an operator's order
    """

    moves: int
    move_bytes: int
    left: tuple[str, ...]
    left_bytes: int
    expected_s: float
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """Median duration and bytes of the last loads; 1 s is a guess, for a fleet that has loaded nothing.

    size_bytes  0: not known, so that the time of all of an adapter's bytes is added
    s_per_byte  time of each byte beyond; the default is a network disk's speed, a guess
    """

    seconds: float = 1.0
    size_bytes: float = 0.0
    s_per_byte: float = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorker:
    """A worker as last reported.

    state           a `wire.WorkerState`, or "warming" (see `warm_up.py`)
    slots           adapters that the engine can hold at all
    running         requests in the engine, its queue included
    refusal         why the worker takes no adapters at all; empty: it takes them
    adapters        lora_id -> adapter on the worker, in any state
    drain           an operator's order to drain it; None without one
    is_agent_draining  the agent has been told to drain
    is_terminating  Kubernetes is ending its pod: nothing is done there, and its adapters are needed elsewhere
    reported_at     when the report was made, so that "nothing runs" differs from "nothing ran a while ago"
    has_agent       an agent keeps files there: without one, the engine loads none that only the fleet has
    kept_out        as in `WorkerIntent`
    finishes_unloaded  its engine finishes the requests that run on an adapter which is unloaded, and refuses later ones
    disk_room_bytes  of further files on its disk, before others are deleted for them
    """

    id: str
    state: str
    base_model: str
    slots: int
    max_lora_rank: int
    refusal: str = ""
    adapters: Mapping[str, ReportedAdapter] = field(default_factory=dict)
    zone: str = ""
    node: str = ""
    running: int = 0
    load: float = 0.0
    drain: WorkerDrainOrder | None = None
    is_agent_draining: bool = False
    is_terminating: bool = False
    reported_at: float = 0.0
    has_agent: bool = True
    kept_out: frozenset[str] = frozenset()
    finishes_unloaded: bool = False
    disk_room_bytes: int = 0

    def can_accept(self, base_model: str | None, rank: int) -> bool:
        """Whether the worker is ready and its engine takes adapters of this base model and rank; it may be full."""
        is_open = self.state == "ready" and self.slots > 0
        return is_open and base_model == self.base_model and rank <= self.max_lora_rank

    def can_take(self, adapter: RegisteredAdapter) -> bool:
        """Whether the worker `can_accept` the adapter, and no operator keeps it out."""
        return adapter.lora_id not in self.kept_out and self.can_accept(adapter.base_model, adapter.rank or 0)

    def keeps_out(self, held: ReportedAdapter) -> bool:
        """Whether an operator keeps out this adapter on the worker."""
        return bool(self.kept_out) and not self.kept_out.isdisjoint((lora_id_of_held(held), held.engine_name))

    def can_serve(self, base_model: str | None) -> bool:
        """Whether requests for an adapter of this base model may go to the worker. None (not known yet) counts as yes.

        An engine may hold adapters of another base model: after a restart its agent may name the model otherwise.
        """
        return base_model in (None, self.base_model)

    @property
    def occupied_slots(self) -> int:
        """Number of slots that adapters on the worker take."""
        return sum(held.state in OCCUPYING for held in self.adapters.values())

    @property
    def is_full(self) -> bool:
        """Whether no slot is free, those in reserve included."""
        return self.occupied_slots >= self.slots

    def has_in_slot(self, lora_id: str) -> bool:
        """Whether the adapter takes a slot on the worker. An adapter that is only on disk, or failed, takes none."""
        held = self.adapters.get(lora_id)
        return held is not None and held.state in OCCUPYING


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFailure:
    """An adapter's failure on a worker. It blocks loads there until `until`."""

    until: float
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingTarget:
    """A replica target above 1 from an earlier pass.

    below_since  since when demand needs clearly fewer replicas; None while it does not
    """

    replicas: int
    below_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnHistory:
    """Recent placement steps that no request waited for: what the churn limiter counts.

    named_steps   steps of the last pass; a step that takes many passes is counted once
    step_counts   (second, new steps in that second), oldest first
    frozen_since  when the limit was reached; None while moves are allowed
    """

    named_steps: frozenset[tuple[str, str, str]] = frozenset()
    step_counts: tuple[tuple[int, int], ...] = ()
    frozen_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """All that one pass hands to the next. Losing it only delays scale-downs and moves.

    standing_targets  lora_id -> target of an earlier pass
    moves             (lora_id, worker_id it leaves) -> worker_id it goes to
    """

    standing_targets: Mapping[str, StandingTarget] = field(default_factory=dict)
    moves: Mapping[Pair, str] = field(default_factory=dict)
    churn: ChurnHistory = field(default_factory=ChurnHistory)


@dataclass(frozen=True, slots=True, kw_only=True)
class OngoingFetch:
    """A fetch of a digest's files. `moved_at`: when it began or its bytes last grew."""

    worker_id: str
    moved_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesSnapshot:
    """Files on the workers' disks.

    is_known  whether it was observed; otherwise every load fetches for itself
    is_whole  whether every worker that answers has said all that it has
    holders   digest -> workers with verified files
    fetches   digest -> fetches under way
    """

    is_known: bool = False
    is_whole: bool = False
    holders: Mapping[str, Collection[str]] = field(default_factory=dict)
    fetches: Mapping[str, Sequence[OngoingFetch]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedFleet:
    """The fleet as reported, and the operations in progress there."""

    workers: Mapping[str, ObservedWorker] = field(default_factory=dict)
    failures: Mapping[Pair, AdapterFailure] = field(default_factory=dict)
    busy: Mapping[str, int] = field(default_factory=dict)
    """worker_id -> loads and unloads in progress there"""
    inspecting: Mapping[str, str] = field(default_factory=dict)
    """lora_id -> worker_id that fetches and verifies it now"""
    checking: Mapping[str, str] = field(default_factory=dict)
    """worker_id -> lora_id that it compares with its acceptance file now"""
    loads_in_flight: int = 0
    fetching: frozenset[Pair] = frozenset()
    """(lora_id, worker_id) of fetches in progress that are ahead of a load"""
    load_began: Mapping[Pair, float] = field(default_factory=dict)
    """(lora_id, worker_id) of each load in progress -> since when"""
    reserve_victims: Mapping[Pair, str] = field(default_factory=dict)
    """(lora_id, worker_id) that leaves once drained -> adapter whose load took the reserve slot instead of waiting"""
    drains: Mapping[Pair, bool] = field(default_factory=dict)
    """(lora_id, worker_id) of each drain in progress -> whether it has finished"""
    loading_victims: frozenset[Pair] = frozenset()
    """victims of loads in progress: the agent unloads the victim as part of the load"""
    load_figures: LoadFigures = field(default_factory=LoadFigures)
    files: FilesSnapshot = field(default_factory=FilesSnapshot)
    """adapters' files on the workers' disks"""
    memory: PassMemory = field(default_factory=PassMemory)
    """`DesiredPlacement.memory` of the last pass"""

    def makes_room(self, copy: Pair) -> bool:
        """Whether a load has taken the slot of this copy (lora_id, worker_id): the copy leaves, now or once drained."""
        return copy in self.loading_victims or copy in self.reserve_victims

    def current_failure(self, lora_id: str, worker_id: str, now: float) -> AdapterFailure | None:
        """The adapter's failure that blocks loads on the worker now, or None. Worker_id "" means every worker."""
        for where in (worker_id, ""):
            failure = self.failures.get((lora_id, where))
            if failure is not None and failure.until > now:
                return failure
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedReplicas:
    """Replicas of an adapter that `ensure` callers, or the loss of a worker, ask for and that are not all ready.

    may_evict     whether another adapter may be evicted for it
    is_repair     the adapter was lost with a worker or engine, and no request waits for it
    since         when the first caller asked
    is_abandoned  no caller has repeated its `ensure` of late: the waiting clients have gone
    tenants       tenants of the waiting requests, "" for requests without tenant; empty: not known
    """

    replicas: int
    may_evict: bool = True
    is_repair: bool = False
    since: float = 0.0
    is_abandoned: bool = False
    tenants: frozenset[str] = frozenset()

    @property
    def is_waited_for(self) -> bool:
        """Whether requests wait for the adapter, as far as is known."""
        return not self.is_repair and not self.is_abandoned


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandSnapshot:
    """Demand as routers report it, and the replicas that are asked for.

    rates            lora_id -> requests a second over the demand window
    work             lora_id -> seconds of engine work a second; 0 where routers do not report it
    surges           lora_id -> as `work`, over a sixth of the window: sooner, and less certain
    habits           lora_id -> requests a second over 15 windows: adapters whose requests come back
    last_request_at  lora_id -> when its last request was reported
    last_asked_at    lora_id -> when a request was last sent, ran, waited or was refused, or `ensure` was called for it
    backlog          lora_id -> seconds of engine work queued in routers because the adapter's workers are full
    is_blind         no router has reported of late, so low figures do not mean low demand
    has_unheard_routers  a router may be at work that does not report: silence does not mean that nobody asks
    in_use           (lora_id, worker_id) with a request in flight
    wants            lora_id -> replicas asked for and not all ready
    last_load_at     tenant -> when the last load for its waiting requests began
    held_from_zero   base model -> requests that routers hold for its first ready worker
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[str, float] = field(default_factory=dict)
    surges: Mapping[str, float] = field(default_factory=dict)
    habits: Mapping[str, float] = field(default_factory=dict)
    last_request_at: Mapping[str, float] = field(default_factory=dict)
    last_asked_at: Mapping[str, float] = field(default_factory=dict)
    backlog: Mapping[str, float] = field(default_factory=dict)
    is_blind: bool = False
    has_unheard_routers: bool = False
    in_use: frozenset[Pair] = frozenset()
    wants: Mapping[str, WantedReplicas] = field(default_factory=dict)
    last_load_at: Mapping[str, float] = field(default_factory=dict)
    held_from_zero: Mapping[str, int] = field(default_factory=dict)

    @property
    def hears_every_router(self) -> bool:
        """Whether routers report, and none may be unheard: only then does silence mean that nobody asks."""
        return not self.is_blind and not self.has_unheard_routers

    def asked_at(self, lora_id: str) -> float:
        """When the adapter was asked for last, as far as routers have reported; -inf for never."""
        return max(self.last_asked_at.get(lora_id, -inf), self.last_request_at.get(lora_id, -inf))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoad:
    """Load the adapter on the worker.

    evict            the adapter that makes room
    evicts_at_once   that adapter need not drain first: its engine finishes what runs on it and refuses what comes later
    """

    lora_id: str
    worker_id: str
    reason: str
    evict: str | None = None
    evicts_at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRemoval:
    """Unload the adapter from the worker: it was deleted, moved, expired, or made room for a load.

    is_expired  nobody asked for it in its `ttl_s`
    """

    lora_id: str
    worker_id: str
    reason: str
    is_expired: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedInspection:
    """Let the worker fetch and verify an adapter whose digest and rank are not known yet."""

    lora_id: str
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredPlacement:
    """Where adapters should be, and the steps that lead there.

    replicas          lora_id -> workers where it is and stays, or will be
    targets           lora_id -> replicas that it should have (only where that is not 0)
    fetches           loads that requests wait for, also those without room yet: their files may be fetched ahead
    unplaced          lora_id -> why fewer replicas than the target can be placed, or none at all
    fits_nowhere      lora_id -> error code of an adapter that no worker could hold, however empty
    workers_to_drain  workers that may be told to drain now: no adapter there has to be moved any more
    drains            worker_id -> how far the drain of a draining worker is
    last_asked_at     lora_id -> when it was asked for last, of adapters that may expire; see `expiry.py`
    frozen_reason     why the churn limiter stops moves; None while they are allowed
    look_again_at     when a request will have waited long enough to evict a copy that stays for now; None: nobody waits
    memory            `PassMemory` for the next pass
    """

    replicas: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    targets: Mapping[str, int] = field(default_factory=dict)
    loads: tuple[PlannedLoad, ...] = ()
    fetches: tuple[PlannedLoad, ...] = ()
    removals: tuple[PlannedRemoval, ...] = ()
    inspections: tuple[PlannedInspection, ...] = ()
    unplaced: Mapping[str, str] = field(default_factory=dict)
    fits_nowhere: Mapping[str, str] = field(default_factory=dict)
    workers_to_drain: tuple[str, ...] = ()
    drains: Mapping[str, DrainProgress] = field(default_factory=dict)
    last_asked_at: Mapping[str, float] = field(default_factory=dict)
    frozen_reason: str | None = None
    look_again_at: float | None = None
    memory: PassMemory = field(default_factory=PassMemory)
