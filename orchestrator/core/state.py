"""What is wanted, what was last reported, and what is asked for: frozen snapshots that one pass decides from.

All times are seconds of one monotonic clock, that of the process which took the snapshot.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Pair = tuple[str, str]
"""(lora_id, worker_id)"""

SERVING = frozenset({"ready", "cordoned", "unmanaged"})
"""Worker states in which an adapter that is there counts as a replica that will stay."""
OCCUPYING = frozenset({"loading", "ready", "draining"})
"""States of an adapter on a worker in which it takes one of the worker's slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredAdapter:
    """One registered adapter. digest, rank and size_bytes are None until an agent has inspected it.

    secret         name/key of the credentials for its source, which workers have in a file
    pinned_source  where those very bytes are, of a source that moves on: a branch as the commit that was inspected
    """

    lora_id: str
    source: str
    base_model: str | None = None
    digest: str | None = None
    rank: int | None = None
    size_bytes: int | None = None
    loading: str | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None
    pinned: bool = False
    priority: int = 0
    weight: float = 1.0
    tenants: tuple[str, ...] | None = None
    secret: str | None = None
    pinned_source: str | None = None
    quarantine: str | None = None
    is_deleting: bool = False

    @property
    def fetched_from(self) -> str:
        """Where workers find it."""
        return self.pinned_source or self.source

    @property
    def is_inspected(self) -> bool:
        return self.digest is not None and self.rank is not None and self.base_model is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """The global placement policy; the same fields as `wire.Policy`, where they are described."""

    loading: str = "lazy"
    min_replicas: int = 1
    max_replicas: int = 64
    reserve_slots: int = 0
    loads_per_worker: int = 1
    loads_fleet_wide: int = 16
    min_residency_s: float = 10.0
    drain_deadline_s: float = 30.0
    failure_expiry_s: float = 60.0
    demand_window_s: float = 60.0
    target_utilisation: float = 0.7
    scale_down_after_s: float = 300.0
    storm_window_s: float = 60.0
    storm_moves_per_worker: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """All that was asked for over REST and is stored. `tombstones`: lora_id -> digest of adapters that were deleted."""

    adapters: Mapping[str, RegisteredAdapter] = field(default_factory=dict)
    tombstones: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedAdapter:
    """An adapter on a worker, as its agent reported it. `since`: when it became ready there."""

    lora_id: str
    digest: str
    engine_name: str
    state: str
    location: str = "device"
    since: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorker:
    """A worker as last reported. `slots`: how many adapters it can hold at all; `running`: requests in its engine.

    base_model    by its name in the fleet
    reported_at   when the report was made, so that "nothing runs" can be told from "nothing ran a while ago"
    is_terminating  its pod is being ended: it is left alone, and what it holds is needed elsewhere
    refusal       why it takes no adapters at all; empty: it takes them
    """

    id: str
    state: str
    base_model: str
    slots: int
    max_lora_rank: int
    refusal: str = ""
    held: Mapping[str, ReportedAdapter] = field(default_factory=dict)
    zone: str = ""
    node: str = ""
    running: int = 0
    load: float = 0.0
    drain_deadline: float | None = None
    is_agent_draining: bool = False
    is_terminating: bool = False
    reported_at: float = 0.0

    def fits(self, base_model: str | None, rank: int) -> bool:
        """Whether it is ready for an adapter of this base model and rank, full or not."""
        is_open = self.state == "ready" and self.slots > 0
        return is_open and base_model == self.base_model and rank <= self.max_lora_rank

    def serves(self, base_model: str | None) -> bool:
        """Whether requests for an adapter of this base model go there; None: not known yet.

        What its engine holds may be of another: an agent that starts again under another name brings it back.
        """
        return base_model in (None, self.base_model)

    @property
    def occupied(self) -> int:
        return sum(held.state in OCCUPYING for held in self.held.values())

    def holds(self, lora_id: str) -> bool:
        """Whether the adapter takes a slot there; one that is only on its disk, or failed, does not."""
        held = self.held.get(lora_id)
        return held is not None and held.state in OCCUPYING


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFailure:
    """That an adapter failed on a worker, until when that counts, and why."""

    until: float
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingTarget:
    """A replica target above 1 that stands, and since when demand has asked for clearly less."""

    replicas: int
    below_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnHistory:
    """Steps of late that no request waited for.

    named         those that the last pass named, so that one step is counted once however long it takes
    counts        (second, how many were named in it), oldest first
    frozen_since  when there were too many; None while all is calm
    """

    named: frozenset[tuple[str, str, str]] = frozenset()
    counts: tuple[tuple[int, int], ...] = ()
    frozen_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """What one pass hands to the next, and all that does: losing it costs no more than some patience.

    scales   lora_id -> the target that stands
    moves    (lora_id, worker_id it leaves) -> worker_id it goes to
    """

    scales: Mapping[str, StandingTarget] = field(default_factory=dict)
    moves: Mapping[Pair, str] = field(default_factory=dict)
    storm: ChurnHistory = field(default_factory=ChurnHistory)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedFleet:
    """The fleet as reported, and what we know to be under way there."""

    workers: Mapping[str, ObservedWorker] = field(default_factory=dict)
    failures: Mapping[Pair, AdapterFailure] = field(default_factory=dict)
    busy: Mapping[str, int] = field(default_factory=dict)
    """worker_id -> loads and unloads that we have started there and not yet heard the end of"""
    inspecting: Mapping[str, str] = field(default_factory=dict)
    """lora_id -> worker_id that fetches and verifies it right now"""
    loads_in_flight: int = 0
    owed: Mapping[Pair, str] = field(default_factory=dict)
    """named victims of loads that took the reserve, and what they made room for: they leave as soon as they drained"""
    evicting: frozenset[Pair] = frozenset()
    """named victims of loads that are on their way: each is gone when its load is there"""
    memory: PassMemory = field(default_factory=PassMemory)
    """what the last pass left in `DesiredPlacement.memory`"""

    def failed(self, lora_id: str, worker_id: str, now: float) -> AdapterFailure | None:
        """The failure that counts there now; one under the worker_id "" counts everywhere."""
        for where in (worker_id, ""):
            failure = self.failures.get((lora_id, where))
            if failure is not None and failure.until > now:
                return failure
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedReplicas:
    """Somebody asks for an adapter that is not, or not often enough, there.

    may_evict   whether somebody else may be thrown out for it
    is_repair   it lost its place with a worker, and no request waits for it
    since       when the first of those who ask began to; seconds of the clock that passes are told
    is_left     who asks asks again every few seconds, and nobody did: they have gone
    tenants     who asks, "" for all that have no tenant; empty where nobody says
    """

    replicas: int
    may_evict: bool = True
    is_repair: bool = False
    since: float = 0.0
    is_left: bool = False
    tenants: frozenset[str] = frozenset()

    @property
    def is_waited_for(self) -> bool:
        """Whether requests wait for it, as far as is known."""
        return not self.is_repair and not self.is_left


@dataclass(frozen=True, slots=True)
class TrafficFigures:
    """What routers count of one adapter; a second, or in all.

    work_s   seconds of engine work for its requests; a second, this is how many workers it keeps busy
    held     requests that waited in a router, for a load or for room, `hold_s` how long together; `sheds` were refused
    """

    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    work_s: float = 0.0
    errors: float = 0.0
    first_tokens: float = 0.0
    first_token_s: float = 0.0
    held: float = 0.0
    hold_s: float = 0.0
    sheds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandSnapshot:
    """What routers say they sent, and what they ask for.

    rates    lora_id -> requests a second
    work     lora_id -> seconds of engine work a second; 0 where routers do not say
    habits   lora_id -> requests a second over a time 15 times as long: who comes back though nobody asks just now
    last     lora_id -> when the last request for it was reported
    surges   lora_id -> as `work`, over a sixth of the time: seen sooner, and by that less sure
    backlog  lora_id -> seconds of engine work that wait in routers, because workers that have the adapter are full
    is_blind no router has reported of late: that nothing is counted is no sign that nothing is asked for
    in_use   (lora_id, worker_id) with a request in flight
    wants    lora_id -> what is asked for and not there yet; none that has expired
    turns    tenant -> when the last load of what it waits for began
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[str, float] = field(default_factory=dict)
    surges: Mapping[str, float] = field(default_factory=dict)
    habits: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    backlog: Mapping[str, float] = field(default_factory=dict)
    is_blind: bool = False
    in_use: frozenset[Pair] = frozenset()
    wants: Mapping[str, WantedReplicas] = field(default_factory=dict)
    turns: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoad:
    """Put this adapter there; `evict` names the adapter that has to make room."""

    lora_id: str
    worker_id: str
    reason: str
    evict: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRemoval:
    """Take this adapter away from there: a tombstone, a finished move, or a load whose victim it is."""

    lora_id: str
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedInspection:
    """Have this worker fetch and verify an adapter whose digest and rank nobody knows yet."""

    lora_id: str
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredPlacement:
    """Where adapters should be, and the steps that lead there.

    replicas   lora_id -> workers where it is and stays, or will be
    targets    lora_id -> how many replicas it should have (only where that is not 0)
    unplaced   lora_id -> why fewer replicas than the target could be placed, or none could be if it was asked for
    fits_nowhere  those of them that no worker could hold, whatever became free there
    leaving    workers that may now be told to drain, as nothing there has to be moved any more
    frozen     why nothing is moved at present though it should be; None when nothing is frozen
    memory     for the next pass
    """

    replicas: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    targets: Mapping[str, int] = field(default_factory=dict)
    loads: tuple[PlannedLoad, ...] = ()
    removals: tuple[PlannedRemoval, ...] = ()
    inspections: tuple[PlannedInspection, ...] = ()
    unplaced: Mapping[str, str] = field(default_factory=dict)
    fits_nowhere: Mapping[str, str] = field(default_factory=dict)
    leaving: tuple[str, ...] = ()
    frozen: str | None = None
    memory: PassMemory = field(default_factory=PassMemory)
