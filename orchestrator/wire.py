"""What the orchestrator serves and is told.

Bodies that people write (adapters, aliases, policies) refuse unknown keys, because a typing error there
would be obeyed in silence; bodies between our own processes ignore them, so that versions can differ.
"""

import re
from itertools import pairwise
from math import isfinite
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    field_validator,
    model_validator,
)

from workers.wire import Metadata

WIRE = 1

AdapterState = Literal["registered", "inspecting", "loading", "ready", "failed", "deleting"]
WorkerState = Literal["starting", "ready", "cordoned", "draining", "unmanaged", "lost"]
Loading = Literal["lazy", "eager", "weighted"]

_LORA_ID = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_ROUTE_WORDS = frozenset({"ensure", "retry", "rollout", "history"})


def checked_lora_id(lora_id: str) -> str:
    """The lora_id itself; raises ValueError that names the rule it breaks."""
    if not 1 <= len(lora_id) <= 200:
        raise ValueError(f"lora_id has {len(lora_id)} characters; 1 to 200 are allowed")
    if not _LORA_ID.fullmatch(lora_id):
        raise ValueError(f"lora_id {lora_id!r} may hold letters, digits, '.', '_' and '-', in parts joined by '/'")
    parts = lora_id.split("/")
    if "." in parts or ".." in parts:
        raise ValueError(f"lora_id {lora_id!r} may not have a '.' or '..' part")
    if parts[-1] in _ROUTE_WORDS:
        raise ValueError(f"lora_id {lora_id!r} may not end in {parts[-1]!r}: that word is a route")
    return lora_id


LoraId = Annotated[str, AfterValidator(checked_lora_id)]
_WITH_SECRETS = ("hf://", "https://")


class _OrchestratorModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _PersonWrittenModel(BaseModel):
    """A body that a person writes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class AdapterPolicy(_PersonWrittenModel):
    """Where and how often one adapter should be; `None` means: as the global policy says."""

    loading: Loading | None = None
    min_replicas: int | None = Field(default=None, ge=0)
    max_replicas: int | None = Field(default=None, ge=1)
    pinned: bool = False
    priority: int = Field(default=0, ge=-1000, le=1000)
    weight: float = Field(default=1.0, gt=0)


class SecretRef(_PersonWrittenModel):
    """A key of a Secret that workers have mounted (`secrets_dir`); what is in it is neither asked for nor copied."""

    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")
    key: str = Field(pattern=r"^[-_a-zA-Z0-9][-._a-zA-Z0-9]{0,252}$")

    def __str__(self) -> str:
        return f"{self.name}/{self.key}"

    @classmethod
    def of(cls, text: str | None) -> "SecretRef | None":
        """As it is stored: name/key."""
        name, _, key = (text or "").partition("/")
        return cls(name=name, key=key) if name else None


Secret = Annotated[
    SecretRef | None,
    Field(
        default=None,
        validation_alias=AliasChoices("secret_ref", "secretRef"),
        description="the credentials for `source`, by reference; its key `sources` says which sources they are for",
    ),
]


Tenants = Annotated[
    tuple[Annotated[str, Field(max_length=100)], ...] | None,
    Field(max_length=1000, description="who may use it; null means everyone"),
]
"""As many as an object of Kubernetes has room for twice: as somebody wrote them, and as they were accepted."""


class AdapterSpec(_PersonWrittenModel):
    """`POST /v1/adapters`. `secretRef`, as Kubernetes writes it, is `secret_ref` too."""

    lora_id: LoraId
    source: str = Field(min_length=1, max_length=2000)
    base_model: str | None = None
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    policy: AdapterPolicy = AdapterPolicy()
    tenants: Tenants = None
    secret_ref: Secret = None

    @model_validator(mode="after")
    def _secrets_are_for_what_takes_them(self) -> Self:
        if self.secret_ref is not None and not self.source.startswith(_WITH_SECRETS):
            raise ValueError(f"secret_ref counts for hf:// and https:// sources, found source {self.source[:80]!r}")
        return self


class AdapterPatch(_PersonWrittenModel):
    """`PATCH /v1/adapters/{lora_id}`: only what may change. source, digest and base_model are immutable."""

    policy: AdapterPolicy | None = None
    tenants: Tenants = None
    secret_ref: Secret = None


class Replicas(_OrchestratorModel):
    desired: int
    ready: int


class AdapterItem(_OrchestratorModel):
    lora_id: str
    digest: str | None
    base_model: str | None
    rank: int | None
    size_bytes: int | None = None
    source: str
    state: AdapterState
    replicas: Replicas
    workers: tuple[str, ...]
    policy: AdapterPolicy
    tenants: tuple[str, ...] | None
    secret_ref: SecretRef | None = None
    requests_per_s: float = 0.0
    error: str | None = None


class AdapterList(_OrchestratorModel):
    data: tuple[AdapterItem, ...]
    next: str | None = None


class AliasTarget(_PersonWrittenModel):
    lora_id: LoraId
    weight: float = Field(default=1.0, ge=0)


class AliasSpec(_PersonWrittenModel):
    targets: tuple[AliasTarget, ...] = Field(min_length=1, max_length=16)
    place_s: float = Field(
        default=300.0,
        ge=0,
        le=86400,
        description="how long the new targets may take to be where the old ones are; 0 shifts at once, placed or not",
    )

    @field_validator("targets")
    @classmethod
    def _add_up(cls, targets: tuple[AliasTarget, ...]) -> tuple[AliasTarget, ...]:
        names = [target.lora_id for target in targets]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is named twice; name it once, with the weight of both")
        if not isfinite(sum(target.weight for target in targets)):
            raise ValueError("the weights add up to more than a number can be; only their proportions count")
        return targets


class AliasPending(_OrchestratorModel):
    """What an alias is about to point at. `failed`: it stays as it is, `error` says why; else `lacks` what is missing.

    lacks   lora_id -> what it still needs before the alias shifts
    """

    targets: tuple[AliasTarget, ...]
    state: Literal["placing", "failed"]
    since: str
    deadline: str
    lacks: dict[str, str] = {}
    error: str | None = None


class AliasItem(_OrchestratorModel):
    """`targets` is what routers are told now; `pending` what they will be, where that differs."""

    name: str
    targets: tuple[AliasTarget, ...]
    pending: AliasPending | None = None


class RolloutStep(_PersonWrittenModel):
    weight: float = Field(gt=0, le=1, description="share of the alias's sessions that the new version gets")
    for_s: float = Field(default=300.0, ge=0, le=30 * 86400, description="how long at least; 0 asks for no requests")


class RolloutSpec(_PersonWrittenModel):
    """`POST /v1/aliases/{name}/rollout`. The last step is followed by one of weight 1, unless it is that."""

    to: LoraId
    steps: tuple[RolloutStep, ...] = Field(
        default=(RolloutStep(weight=0.05), RolloutStep(weight=0.25), RolloutStep(weight=1.0)),
        min_length=1,
        max_length=32,
    )
    max_error_rate_increase: float = Field(
        default=0.02, ge=0, lt=1, description="more than this above the old version's rate is worse"
    )
    max_first_token_ratio: float | None = Field(
        default=1.5, ge=1, description="more than this times the old version's mean is worse; null: not looked at"
    )
    min_requests: int = Field(default=50, ge=0, description="of the new version in each step, before anything is told")
    place_s: float = Field(default=300.0, gt=0, le=86400, description="how long each step may wait for its replicas")

    @field_validator("steps")
    @classmethod
    def _rise(cls, steps: tuple[RolloutStep, ...]) -> tuple[RolloutStep, ...]:
        weights = [step.weight for step in steps]
        if any(later <= earlier for earlier, later in pairwise(weights)):
            raise ValueError(f"weights must rise from step to step, found {weights}")
        return steps


class RolloutPatch(_PersonWrittenModel):
    """`PATCH /v1/aliases/{name}/rollout`: hold it where it is, or let it go on."""

    paused: bool


class RolloutTally(_OrchestratorModel):
    requests: int
    errors: int
    error_rate: float
    first_tokens: int
    mean_first_token_s: float | None


class RolloutItem(_OrchestratorModel):
    """A rollout, under way or over.

    state      placing (a step waits for its replicas), watching, done, rolled_back, aborted, failed (nothing shifted)
    step       of `steps`, from 0; `weight` is what the new version has now
    lacks      lora_id -> what it needs before the step's shift
    old, new   what came of their requests since the last shift; `needed` so many of the new one's are waited for
    """

    alias: str
    before: tuple[AliasTarget, ...]
    to: tuple[AliasTarget, ...]
    steps: tuple[RolloutStep, ...]
    state: Literal["placing", "watching", "done", "rolled_back", "aborted", "failed"]
    paused: bool
    step: int
    weight: float
    began_at: str
    since: str
    lacks: dict[str, str] = {}
    old: RolloutTally
    new: RolloutTally
    needed: int
    reason: str = ""


class AliasList(_OrchestratorModel):
    data: tuple[AliasItem, ...]
    next: str | None = None


class Policy(_PersonWrittenModel):
    """The global placement policy. Times in seconds; `reserve_slots` per worker stay free for moves."""

    loading: Loading = "lazy"
    min_replicas: int = Field(default=1, ge=0)
    max_replicas: int = Field(default=64, ge=1)
    reserve_slots: int = Field(default=0, ge=0)
    loads_per_worker: int = Field(default=1, ge=1)
    loads_fleet_wide: int = Field(default=16, ge=1)
    min_residency_s: float = Field(default=10.0, ge=0)
    drain_deadline_s: float = Field(default=30.0, ge=0)
    failure_expiry_s: float = Field(default=60.0, gt=0)
    demand_window_s: float = Field(default=60.0, gt=0, description="demand is weighted exponentially over this time")
    target_utilisation: float = Field(default=0.7, gt=0, le=1, description="of a worker, by one adapter alone")
    scale_down_after_s: float = Field(default=300.0, ge=0, description="demand is less for so long before a copy goes")
    storm_window_s: float = Field(default=60.0, ge=1)
    storm_moves_per_worker: int = Field(
        default=4, ge=0, description="more moves than this in the window, that no request waits for, freeze all moves"
    )


class AdapterBatch(_PersonWrittenModel):
    """`POST /v1/adapters:batch`: each is registered or refused on its own."""

    adapters: tuple[AdapterSpec, ...] = Field(min_length=1, max_length=1000)


class BatchResult(_OrchestratorModel):
    """201 registered, 200 was registered already, 409 and others refused, with the reason."""

    lora_id: str
    status: int
    code: str | None = None
    error: str | None = None


class BatchAnswer(_OrchestratorModel):
    data: tuple[BatchResult, ...]


class EnsureRequest(_OrchestratorModel):
    """`POST /v1/adapters/{lora_id}/ensure`. `tenants`: whose requests wait for it, "" for those of nobody's."""

    replicas: int | None = Field(default=None, ge=1)
    wait_s: float = Field(default=0.0, ge=0, le=600)
    tenants: Annotated[tuple[str, ...], FailFast()] = Field(
        default=(), description="whose requests wait; none said: the adapter's only tenant, else by itself"
    )
    wire: int = WIRE


class EnsureAnswer(_OrchestratorModel):
    """Where the adapter is (`ready`), where it is being loaded (`loading`), and when it should be there."""

    lora_id: str
    digest: str | None
    state: AdapterState
    ready: tuple[str, ...]
    loading: tuple[str, ...]
    expected_s: float | None
    error: str | None = None
    fits_nowhere: bool = Field(
        default=False, description="no worker could hold it, whatever became free there; `error` says why"
    )
    wire: int = WIRE


class PlacementItem(_OrchestratorModel):
    lora_id: str
    digest: str | None
    worker_id: str
    state: str
    location: str
    desired: bool


class PlacementList(_OrchestratorModel):
    data: tuple[PlacementItem, ...]
    next: str | None = None


class DemandChange(_PersonWrittenModel):
    """Demand for one adapter: so many times what it is, or so many requests a second."""

    factor: float | None = Field(default=None, ge=0, le=1e6)
    requests_per_s: float | None = Field(default=None, ge=0, le=1e6)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.factor is None) == (self.requests_per_s is None):
            raise ValueError("name one of factor and requests_per_s")
        return self


MOST_SUPPOSED = 2000
"""A pass over so many takes about a second; over a hundred thousand no plan ended within a minute."""


class MoreWorkers(_PersonWrittenModel):
    """`count` empty workers like one that there is; `like` left out means the first that is ready."""

    like: str | None = None
    count: int = Field(default=1, ge=1, le=1000)


class SupposedAdapter(AdapterSpec):
    """An adapter that is not registered; what is left out is taken from those that are: middle rank and size."""

    rank: int | None = Field(default=None, ge=1, le=1024)
    size_bytes: int | None = Field(default=None, ge=0, le=1 << 50)


class PlanRequest(_PersonWrittenModel):
    """`POST /v1/placements/plan`: what to suppose. `passes`: how far ahead to look, at most."""

    demand: dict[LoraId, DemandChange] = Field(default={}, max_length=10_000)
    workers_gone: tuple[str, ...] = Field(default=(), max_length=10_000)
    workers_more: tuple[MoreWorkers, ...] = Field(default=(), max_length=100)
    policy: dict[str, Any] = Field(default={}, description="fields of the global policy that are different")
    adapter_policies: dict[LoraId, AdapterPolicy] = Field(default={}, max_length=10_000)
    adapters: tuple[SupposedAdapter, ...] = Field(default=(), max_length=1000, description="registered besides")
    passes: int = Field(default=30, ge=1, le=200)

    @field_validator("workers_more")
    @classmethod
    def _can_be_thought_through(cls, more: tuple[MoreWorkers, ...]) -> tuple[MoreWorkers, ...]:
        total = sum(it.count for it in more)
        if total > MOST_SUPPOSED:
            raise ValueError(f"{total} more workers are supposed, at most {MOST_SUPPOSED} can be")
        return more


class TargetChange(_OrchestratorModel):
    """Replicas wanted: as things are, and as supposed."""

    before: int
    after: int


class PlanCost(_OrchestratorModel):
    """`bytes` is of all loads, where sizes are known; `seconds` until the last of them has ended."""

    loads: int
    unloads: int
    bytes: int
    seconds: float


class ActionItem(_OrchestratorModel):
    """One step that a pass takes or, in a plan, would take, and why.

    turn        in which pass: 0 is the next
    size_bytes  of what is loaded; null for other steps, and where it is not known
    seconds     that a load takes, by the middle of those measured
    """

    operation: Literal["inspect", "load", "drain", "unload"]
    lora_id: str
    worker_id: str
    reason: str
    evict: str | None = None
    turn: int = 0
    size_bytes: int | None = None
    seconds: float | None = None


class Plan(_OrchestratorModel):
    """Steps in order. `targets` has those that differ; `reasons` says of each of `unplaced` why.

    is_settled  whether nothing is left to do after these steps; null for the next pass alone
    """

    actions: tuple[ActionItem, ...]
    unplaced: tuple[str, ...] = ()
    reasons: dict[str, str] = {}
    targets: dict[str, TargetChange] = {}
    cost: PlanCost
    is_settled: bool | None = None


class OrphanItem(_OrchestratorModel):
    """What workers hold and nobody registered, or registered with other bytes. `problem`: why it cannot be adopted."""

    lora_id: str
    digest: str
    engine_name: str
    base_model: str
    rank: int
    size_bytes: int | None
    source: str
    workers: tuple[str, ...]
    problem: str | None = None


class OrphanList(_OrchestratorModel):
    data: tuple[OrphanItem, ...]
    next: str | None = None


class AdoptRequest(_PersonWrittenModel):
    """`POST /v1/orphans/adopt`. Whose they were went with the store, so they are nobody's until somebody says."""

    lora_ids: tuple[str, ...] | None = Field(default=None, max_length=10_000, description="null: all that can be")
    tenants: Tenants = Field(
        default=(), description="who may use them, beside operators and where no keys are needed; null means everyone"
    )


class WorkerItem(_OrchestratorModel):
    """A worker.

    is_terminating  Kubernetes is ending its pod, and so it drains
    refusal         why it takes no adapters at all; empty: it takes them
    """

    id: str
    agent_url: str
    engine_url: str
    base_model: str
    state: WorkerState
    zone: str
    node: str
    capacity: dict[str, int]
    adapters: tuple[str, ...]
    orphans: tuple[str, ...] = ()
    is_terminating: bool = False
    refusal: str = ""


class WorkerList(_OrchestratorModel):
    data: tuple[WorkerItem, ...]
    next: str | None = None


class WorkerDrain(_PersonWrittenModel):
    """`POST /v1/workers/{id}/drain`: how long its adapters may take to find a place elsewhere."""

    deadline_s: float | None = Field(default=None, ge=0, le=86400)


class HistoryItem(_OrchestratorModel):
    """What happened to what, and who asked. `subject` is a lora_id, an alias or a worker; "" for the policy."""

    id: int
    at: str
    kind: str
    subject: str
    actor: str
    body: dict[str, Any]


class HistoryList(_OrchestratorModel):
    data: tuple[HistoryItem, ...]
    next: str | None = None


class Heartbeat(_OrchestratorModel):
    """`POST /v1/workers/register`: an agent says that it is there, with all it knows."""

    metadata: Metadata
    wire: int = WIRE


class HeartbeatAnswer(_OrchestratorModel):
    """`is_warm`: nothing has to be loaded before the worker is ready. `in_flight`: requests that routers have there."""

    epoch: int
    revision: int
    interval_s: float
    is_warm: bool = True
    in_flight: int = 0
    wire: int = WIRE


class CatalogAdapter(_OrchestratorModel):
    lora_id: str
    digest: str | None
    base_model: str | None
    source: str
    rank: int | None = None
    tenants: tuple[str, ...] | None = None
    state: AdapterState = "registered"
    error: str | None = None
    priority: int = 0
    secret: str | None = Field(default=None, description="name/key of the credentials for `source`")


class CatalogWorker(_OrchestratorModel):
    """A worker; one that is an engine and no more has no `agent_url`, and routers ask its engine instead.

    agent_boot_id  of the agent whose state this is: a new agent of the same worker is in a state of its own
    """

    id: str
    agent_url: str
    state: WorkerState
    engine_url: str = ""
    agent_boot_id: str = ""


class Draining(_OrchestratorModel):
    """No new request for this adapter may go to this worker."""

    worker_id: str
    lora_id: str
    digest: str


class Catalog(_OrchestratorModel):
    """`GET /v1/catalog`: what routers follow, at one revision. Revisions only grow, over restarts too."""

    revision: int
    adapters: tuple[CatalogAdapter, ...] = ()
    aliases: tuple[AliasItem, ...] = ()
    draining: tuple[Draining, ...] = ()
    workers: tuple[CatalogWorker, ...] = ()
    wire: int = WIRE


class FleetEvent(_OrchestratorModel):
    """One SSE message of `GET /v1/events`; `id` is the revision that it belongs to."""

    id: int
    type: str
    at: str
    lora_id: str | None = None
    worker_id: str | None = None
    message: str = ""


Count = Annotated[int, Field(ge=0, le=1 << 62)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
"""Of counts and sums, what no fleet will ever come to: a router that says more has miscounted, and is told so."""


_MOST_WORKERS = 10_000
"""That a router speaks of: more than any fleet has."""


class AdapterUse(_OrchestratorModel):
    """Of one engine name on one worker, since the router's boot: counts and sums only grow.

    output_tokens   of answers whose engine told its usage; the others add none
    work_s          seconds of engine work: prefill, and each answer's share of the decode steps it rode in
    errors          requests that the engine failed: a 5xx, a broken stream, an engine that died or never answered
    first_tokens    streamed answers that began, and `first_token_s` from dispatch to then, summed
    """

    worker_id: str
    engine_name: str
    requests: Count = 0
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    work_s: Seconds = 0.0
    errors: Count = 0
    first_tokens: Count = 0
    first_token_s: Seconds = 0.0
    in_flight: Count = 0
    last_dispatch_age_s: float | None = None


class AdapterHold(_OrchestratorModel):
    """Of one adapter, since the router's boot: requests that it kept back for a load or for room.

    held, hold_s   those whose wait is over, served or not, and how long they waited, summed
    sheds          those turned away for want of room, or of time to wait for it
    waiting        those that wait for room now, at workers that have the adapter; no count, but as it is
    """

    lora_id: str
    held: Count = 0
    hold_s: Seconds = 0.0
    sheds: Count = 0
    waiting: Count = 0


class UsageReport(_OrchestratorModel):
    """`POST /v1/usage`: a router's cumulative counts; repeats and old ones are recognised by `seq`.

    waits_s  worker_id -> how long what waits in the router now for room there will have to, where that is not 0
    """

    router_id: str
    boot_id: str
    seq: int
    revision_seen: int
    # Of a million faults each would be listed, which takes seconds: the first is enough of what programs send.
    uses: Annotated[tuple[AdapterUse, ...], FailFast()] = ()
    holds: Annotated[tuple[AdapterHold, ...], FailFast()] = ()
    waits_s: dict[str, Seconds] = {}
    wire: int = WIRE

    @field_validator("waits_s", mode="before")
    @classmethod
    def _few(cls, waits_s: object) -> object:
        if isinstance(waits_s, dict) and len(waits_s) > _MOST_WORKERS:
            raise ValueError(f"names {len(waits_s)} workers, and at most {_MOST_WORKERS} are taken")
        return waits_s


class UsageAnswer(_OrchestratorModel):
    """`accepted` is false for a report that was taken before, or that is older than one that was."""

    accepted: bool
    revision: int
    wire: int = WIRE


class Status(_OrchestratorModel):
    """`GET /health` and `/ready`. `leader`: where the orchestrator is that acts, if that is known."""

    status: str
    epoch: int
    revision: int
    is_leading: bool = True
    leader: str | None = None
    wire: int = WIRE
