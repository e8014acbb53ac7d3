"""The bodies and responses of the orchestrator's REST API.

Bodies that people write refuse unknown keys, so that a typing error is not ignored. Bodies between our own processes
ignore unknown keys, so that versions may differ.
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

from lorafleet.identity import lora_id_of
from orchestrator.wire_traffic import (
    AliasComparison,
    Ask,
    AskedAnswer,
    AskedAnswers,
    ComparedTarget,
    Count,
    FleetNow,
    KeyItem,
    KeyList,
    RelayedDecision,
    RelayedDecisions,
    RelayedRequests,
    RequestQuery,
    RoutedAsk,
    RouterItem,
    RouterList,
    RouterNow,
    RouterQuestion,
    RouterQuestions,
    RouterReply,
    Seconds,
    TrafficBatch,
    TrafficPoints,
    TrafficRow,
    TrafficSeries,
    TrafficShare,
    TrafficShares,
    TrafficTotal,
    TrafficTotals,
    WorkerLoad,
)
from workers.wire import (
    AdapterEffectState,
    AdapterOperation,
    AgentIncident,
    IgnoredModules,
    LogTail,
    Metadata,
    ReceivedFile,
)

# Routers and people's programs import this module alone.
__all__ = [
    "AliasComparison",
    "Ask",
    "AskedAnswer",
    "AskedAnswers",
    "ComparedTarget",
    "FleetNow",
    "KeyItem",
    "KeyList",
    "LogTail",
    "RelayedDecision",
    "RelayedDecisions",
    "RelayedRequests",
    "RequestQuery",
    "RoutedAsk",
    "RouterItem",
    "RouterList",
    "RouterNow",
    "RouterQuestion",
    "RouterQuestions",
    "RouterReply",
    "TrafficBatch",
    "TrafficPoints",
    "TrafficRow",
    "TrafficSeries",
    "TrafficShare",
    "TrafficShares",
    "TrafficTotal",
    "TrafficTotals",
    "WorkerLoad",
]

WIRE = 1

AdapterState = Literal["registered", "inspecting", "loading", "ready", "failed", "deleting"]
WorkerState = Literal["starting", "ready", "cordoned", "draining", "unmanaged", "lost"]
Loading = Literal["lazy", "eager", "weighted"]

_LORA_ID_PART = r"[A-Za-z0-9._-]([A-Za-z0-9._:@-]*[A-Za-z0-9._-])?"
_LORA_ID = re.compile(rf"{_LORA_ID_PART}(/{_LORA_ID_PART})*")
_ROUTE_WORDS = frozenset({"ensure", "retry", "rollout", "history"})


def checked_lora_id(lora_id: str) -> str:
    """The lora_id. Raises ValueError, which names the rule that it breaks."""
    return checked_name(lora_id, "lora_id")


def checked_name(name: str, what: str, *, most: int = 200) -> str:
    """The name of an adapter, alias or published name. Raises ValueError, which names the rule that it breaks.

    what  the field that has it, for the error
    """
    if not 1 <= len(name) <= most:
        raise ValueError(f"{what} has {len(name)} characters; 1 to {most} are allowed")
    parts = name.split("/")
    if "" in parts:
        # `x/` is not `x`: who writes one may mean another name, so neither stands for the other.
        right = "/".join(filter(None, parts)) or "x/y"
        raise ValueError(f"{what} {name!r} has an empty part: one '/' stands between two parts, as in {right!r}")
    if "." in parts or ".." in parts:
        raise ValueError(f"{what} {name!r} may not have a '.' or '..' part")
    if not _LORA_ID.fullmatch(name):
        allowed = "letters, digits, '.', '_' and '-', in parts joined by '/', and ':' and '@' within a part"
        raise ValueError(f"{what} {name!r} may hold {allowed}")
    if lora_id_of(name) != name:
        raise ValueError(f"{what} {name!r} may not end in '@' and 12 hex digits: these name a version")
    if parts[-1] in _ROUTE_WORDS:
        raise ValueError(f"{what} {name!r} may not end in {parts[-1]!r}: that word is a route")
    return name


LoraId = Annotated[str, AfterValidator(checked_lora_id)]

MOST_VERSIONS = 100
"""Versions of a published name that may stay. A worker has a few slots; more would be a way to fill disks."""


_MOST_NAME_LENGTH = 180
"""A version's lora_id is longer than its name, by its number."""


def checked_published_name(name: str) -> str:
    """The published name. Raises ValueError, which names the rule that it breaks: those of lora_ids, and a length."""
    return checked_name(name, "name", most=_MOST_NAME_LENGTH)


def _checked_alias(name: str) -> str:
    """The alias. Raises ValueError, which names the rule that it breaks."""
    return checked_name(name, "alias")


AliasName = Annotated[str, AfterValidator(_checked_alias)]
NameToPublish = Annotated[str, AfterValidator(checked_published_name)]
"""A published name."""


_WITH_SECRETS = ("hf://", "https://")


class _OrchestratorModel(BaseModel):
    """A response, or a body from one of our own processes."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _PersonWrittenModel(BaseModel):
    """A body that a person writes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# -- adapters ------------------------------------------------------------------------------------------------


class AdapterPolicy(_PersonWrittenModel):
    """The placement policy of one adapter; None: the global policy's value."""

    loading: Loading | None = None
    min_replicas: int | None = Field(default=None, ge=0)
    max_replicas: int | None = Field(default=None, ge=1)
    pinned: bool = False
    priority: int = Field(default=0, ge=-1000, le=1000)
    weight: float = Field(default=1.0, gt=0)
    ttl_s: float | None = Field(
        default=None, ge=0, description="unload after so many seconds without a request; 0: never; null: the policy's"
    )
    ignored_modules: Literal["accept", "refuse"] | None = Field(
        default=None,
        description="what to do where an engine ignores a part of its modules; null: the worker's setting of this name",
    )


class SecretRef(_PersonWrittenModel):
    """A key of a Secret that workers have mounted (`secrets_dir`). The orchestrator never reads its value."""

    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")
    key: str = Field(pattern=r"^[-_a-zA-Z0-9][-._a-zA-Z0-9]{0,252}$")

    def __str__(self) -> str:
        """The stored form `name/key`."""
        return f"{self.name}/{self.key}"

    @classmethod
    def of(cls, text: str | None) -> "SecretRef | None":
        """The reference in its stored form `name/key`; None for no text."""
        name, _, key = (text or "").partition("/")
        return cls(name=name, key=key) if name else None


Secret = Annotated[
    SecretRef | None,
    Field(
        default=None,
        validation_alias=AliasChoices("secret_ref", "secretRef"),
        description="reference to the credentials for `source`; the Secret's key `sources` lists their sources",
    ),
]


Tenants = Annotated[
    tuple[Annotated[str, Field(max_length=100)], ...] | None,
    Field(max_length=1000, description="tenants that may use it; null: everyone"),
]
"""At most 1000: a Kubernetes object must have room for them twice, in its text and in its record."""


class AdapterSpec(_PersonWrittenModel):
    """`POST /v1/adapters`. `secretRef`, the spelling of Kubernetes, is accepted for `secret_ref`."""

    lora_id: LoraId
    source: str = Field(min_length=1, max_length=2000)
    base_model: str | None = None
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    policy: AdapterPolicy = AdapterPolicy()
    tenants: Tenants = None
    secret_ref: Secret = None

    @model_validator(mode="after")
    def _secret_ref_fits_source(self) -> Self:
        """Raises ValueError for a secret_ref unless the source is hf:// or https://."""
        if self.secret_ref is not None and not self.source.startswith(_WITH_SECRETS):
            raise ValueError(f"secret_ref counts for hf:// and https:// sources, found source {self.source[:80]!r}")
        return self


class AdapterPatch(_PersonWrittenModel):
    """`PATCH /v1/adapters/{lora_id}`: the changeable fields. source, digest and base_model are immutable."""

    policy: AdapterPolicy | None = None
    tenants: Tenants = None
    secret_ref: Secret = None


class Replicas(_OrchestratorModel):
    """Replicas of an adapter: desired by the placement, and ready now."""

    desired: int
    ready: int


class FileCopiesItem(_OrchestratorModel):
    """How the files of an adapter are kept that are nowhere but in the fleet.

    state    kept: as many copies as wanted; copying: more are being made; short: too few workers can keep one;
             lost: on no disk; unknown: workers have not reported all of their files yet
    kept_by  workers that keep them; `held_by`: that have them at the moment
    reason   why there are too few, and what to do; "" where there are enough
    """

    wanted: int
    state: Literal["kept", "copying", "short", "lost", "unknown"]
    kept_by: tuple[str, ...] = ()
    held_by: tuple[str, ...] = ()
    reason: str = ""


class AdapterItem(_OrchestratorModel):
    """One registered adapter.

    copies   null for an adapter with a source outside the fleet
    workers  where it is ready
    ignored_modules  modules of its file that an engine does not have: the worst of its copies; null without any
    effect   whether it changes the engines' answers, as agents say (docs/protocol.md); the least proved of its copies
    published_as  published name that it is a version of; null for any other adapter
    note     what to know of a copy that is ready, with the worker's name; "" without any
    idle_s   seconds since it was asked for last; null without a `ttl_s` or a copy, and where nobody has asked yet
    """

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
    idle_s: float | None = None
    error: str | None = None
    ignored_modules: IgnoredModules | None = None
    effect: AdapterEffectState = ""
    note: str = ""
    published_as: str | None = None
    copies: FileCopiesItem | None = None


class UploadedAdapter(AdapterItem):
    """`PUT /v1/adapters/{lora_id}`: the adapter that the uploaded bytes are.

    kept_on         workers that keep its files; empty with an upload store, and where it was registered before
    note_on_copies  what to know of that: fewer workers than `fleet_copies`, say; "" if there is nothing
    """

    kept_on: tuple[str, ...] = ()
    note_on_copies: str = ""


class UploadProgress(_OrchestratorModel):
    """`GET /v1/uploads/{lora_id}`, and a PUT that has brought a part: what has come, and what is missing.

    missing         files that have not come whole, in the order to send them
    received_bytes  of the first of them: the next request sends the bytes from there on
    """

    lora_id: str
    files: tuple[ReceivedFile, ...]
    missing: tuple[str, ...]
    received_bytes: int


class AdapterList(_OrchestratorModel):
    data: tuple[AdapterItem, ...]
    next: str | None = None


class AdapterBatch(_PersonWrittenModel):
    """`POST /v1/adapters:batch`: each adapter is registered or refused on its own."""

    adapters: tuple[AdapterSpec, ...] = Field(min_length=1, max_length=1000)


class BatchResult(_OrchestratorModel):
    """The result for one adapter: 201 registered, 200 registered already, 409 and others refused."""

    lora_id: str
    status: int
    code: str | None = None
    error: str | None = None


class BatchAnswer(_OrchestratorModel):
    data: tuple[BatchResult, ...]


# -- aliases -------------------------------------------------------------------------------------------------


class AliasTarget(_OrchestratorModel):
    """One target of an alias, with its share relative to the other targets."""

    model_config = ConfigDict(allow_inf_nan=False)

    lora_id: LoraId
    weight: float = Field(default=1.0, ge=0)


class AliasTargetSpec(AliasTarget):
    """The same as a person writes it: unknown keys are refused. In the catalog they are ignored, as routers need."""

    model_config = ConfigDict(extra="forbid")


class AliasSpec(_PersonWrittenModel):
    """`PUT /v1/aliases/{name}`."""

    targets: tuple[AliasTargetSpec, ...] = Field(min_length=1, max_length=16)
    place_s: float = Field(
        default=300.0,
        ge=0,
        le=86400,
        description="how long to wait for the new targets' replicas; 0 shifts at once, placed or not",
    )

    @field_validator("targets")
    @classmethod
    def _weights_are_valid(cls, targets: tuple[AliasTargetSpec, ...]) -> tuple[AliasTargetSpec, ...]:
        """Raises ValueError for a target that is named twice, or weights whose sum is not finite."""
        names = [target.lora_id for target in targets]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is named twice; name it once, with the weight of both")
        if not isfinite(sum(target.weight for target in targets)):
            raise ValueError("the weights add up to more than a number can be; only their proportions count")
        return targets


class AliasPending(_OrchestratorModel):
    """The targets that an alias is about to get.

    state   placing: waits for `lacks`; failed: the alias keeps its targets, `error` says why
    lacks   lora_id -> what is missing before the alias shifts
    """

    targets: tuple[AliasTarget, ...]
    state: Literal["placing", "failed"]
    since: str
    deadline: str
    lacks: dict[str, str] = {}
    error: str | None = None


class AliasItem(_OrchestratorModel):
    """One alias. `targets`: those that routers use now; `pending`: those that it is about to get."""

    name: str
    targets: tuple[AliasTarget, ...]
    pending: AliasPending | None = None


class AliasList(_OrchestratorModel):
    data: tuple[AliasItem, ...]
    next: str | None = None


# -- published names -----------------------------------------------------------------------------------------


class PublishSpec(_PersonWrittenModel):
    """`POST /v1/published/{name}`: the bytes of the name's next version, and how the name is kept.

    A field of retention that is left out keeps its value.
    """

    source: str | None = Field(
        default=None, min_length=1, max_length=2000, description="where the bytes are now; they are copied"
    )
    digest: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="digest of the bytes; without `source`, of bytes that the fleet has. With it, other bytes at"
        " `source` count as not visible yet",
    )
    base_model: str | None = Field(default=None, max_length=500)
    replicas: int | Literal["all"] | None = Field(
        default=None, description='workers that must have a version before the name points at it; at first "all"'
    )
    keep_versions: int | None = Field(default=None, ge=1, le=MOST_VERSIONS, description="null: the policy's")
    max_staleness_s: float | None = Field(default=None, ge=0, description="0: no limit; null: the policy's")
    timeout_s: float = Field(
        default=28.0, gt=0, le=110, description="how long the call may wait for the bytes, the loads and the routers"
    )
    expected_version: int | None = Field(
        default=None,
        ge=0,
        description="the number that the name's version must have now, 0: none; at another one only the bytes of that"
        " version are accepted, as of a call that is repeated. null: any",
    )

    @model_validator(mode="after")
    def _names_bytes(self) -> Self:
        """Raises ValueError without a source and a digest, and for less than one replica."""
        if self.source is None and self.digest is None:
            raise ValueError("name `source`, where the bytes are, or `digest`, of bytes that the fleet has")
        if isinstance(self.replicas, int) and self.replicas < 1:
            raise ValueError(f'replicas must be at least 1, or "all"; found {self.replicas}')
        return self


class PublishedVersion(_OrchestratorModel):
    """A version of a published name.

    published_at   when the name was last pointed at it; null while a publish of it is in progress
    superseded_at  when the name was pointed elsewhere; null for the version that it points at
    """

    lora_id: str
    version: int
    digest: str
    published_at: str | None
    superseded_at: str | None = None


class PublishedItem(_OrchestratorModel):
    """A published name.

    lora_id, digest, version  what it points at; null before its first version is ready
    versions      all that are kept, the newest first
    workers       workers on which that version is ready
    is_new        whether this call made the version; false where its bytes were there already, and for reads
    replicas      workers that must have a version before the name points at it
    shadows_base  whether keys that may shadow base models get it in place of the base model of this name
    revision      of the catalog that says all this; 0 from an older orchestrator
    """

    name: str
    lora_id: str | None
    digest: str | None
    version: int | None
    versions: tuple[PublishedVersion, ...]
    workers: tuple[str, ...]
    is_new: bool = False
    tenant: str | None = None
    replicas: int | Literal["all"] = "all"
    keep_versions: int
    max_staleness_s: float
    shadows_base: bool = False
    revision: int = 0


class PublishedList(_OrchestratorModel):
    data: tuple[PublishedItem, ...]
    next: str | None = None


# -- rollouts ------------------------------------------------------------------------------------------------


class RolloutStep(_PersonWrittenModel):
    """One step of a rollout."""

    weight: float = Field(gt=0, le=1, description="share of the alias's sessions that go to the new version")
    for_s: float = Field(
        default=300.0, ge=0, le=30 * 86400, description="shortest duration; with 0 `min_requests` does not count"
    )


class RolloutSpec(_PersonWrittenModel):
    """`POST /v1/aliases/{name}/rollout`. A last step of weight 1 is added where it is missing."""

    to: LoraId
    steps: tuple[RolloutStep, ...] = Field(
        default=(RolloutStep(weight=0.05), RolloutStep(weight=0.25), RolloutStep(weight=1.0)),
        min_length=1,
        max_length=32,
    )
    max_error_rate_increase: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="roll back when the error rate exceeds the old version's by more than this",
    )
    max_first_token_ratio: float | None = Field(
        default=1.5,
        ge=1,
        description="roll back when the mean first-token time is above this factor of the old version's; null: never",
    )
    min_requests: int = Field(
        default=50, ge=0, description="finished requests of the new version in each step before it is compared"
    )
    place_s: float = Field(default=300.0, gt=0, le=86400, description="how long each step may wait for its replicas")

    @field_validator("steps")
    @classmethod
    def _weights_rise(cls, steps: tuple[RolloutStep, ...]) -> tuple[RolloutStep, ...]:
        """Raises ValueError unless each step's weight is above the one before."""
        weights = [step.weight for step in steps]
        if any(later <= earlier for earlier, later in pairwise(weights)):
            raise ValueError(f"weights must rise from step to step, found {weights}")
        return steps


class RolloutPatch(_PersonWrittenModel):
    """`PATCH /v1/aliases/{name}/rollout`: pause or resume it."""

    paused: bool


class RolloutTally(_OrchestratorModel):
    """Finished requests of one version since the last shift."""

    requests: int
    errors: int
    error_rate: float
    first_tokens: int
    mean_first_token_s: float | None


class RolloutItem(_OrchestratorModel):
    """A rollout, in progress or over.

    state      placing (a step waits for its replicas), watching, done, rolled_back, aborted, failed (nothing shifted)
    step       index of the step in `steps`; `weight`: the new version's present share
    lacks      lora_id -> what is missing before the step's shift
    old, new   requests since the last shift; `needed`: requests of the new version that the step waits for
    worse      why the new version is worse so far, by the rollout's own limits, before `needed` is reached; "": it is
               not, or there are too few requests to tell
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
    worse: str = ""


# -- the global policy ---------------------------------------------------------------------------------------


class Policy(_PersonWrittenModel):
    """The global placement policy. `reserve_slots` of each worker stay free for moves."""

    loading: Loading = Field(
        default="lazy",
        description="lazy: an adapter is loaded with its first request; eager: `min_replicas` of it at once; weighted:"
        " slots that no other adapter needs are divided among adapters by `weight`",
    )
    min_replicas: int = Field(default=1, ge=0, description="least copies of an adapter that is loaded")
    max_replicas: int = Field(default=64, ge=1, description="most copies of an adapter, however much it is asked for")
    reserve_slots: int = Field(default=0, ge=0, description="slots of each worker that stay free for moves")
    loads_per_worker: int = Field(default=1, ge=1, description="loads at one worker at a time")
    loads_fleet_wide: int = Field(default=16, ge=1, description="loads in the whole fleet at a time")
    load_spread_s: float = Field(
        default=2.0,
        ge=0,
        description="half of a base model's workers load the same adapter at once, because an engine stalls while it"
        " loads; the others follow when these have it, or after this long; 0: all at once",
    )
    min_residency_s: float = Field(
        default=10.0, ge=0, description="a copy of an adapter that is asked for is not evicted before it is so old"
    )
    drain_deadline_s: float = Field(
        default=30.0, ge=0, description="how long an unload waits for the requests of the adapter"
    )
    failure_expiry_s: float = Field(
        default=60.0, gt=0, description="a load that failed is tried again at the same worker after so long, and later"
    )
    demand_window_s: float = Field(default=60.0, gt=0, description="window of the exponentially weighted demand")
    target_utilisation: float = Field(
        default=0.7, gt=0, le=1, description="busy part of a worker above which an adapter gets one more replica"
    )
    scale_down_after_s: float = Field(
        default=300.0, ge=0, description="a replica is removed when demand has been lower for this long"
    )
    storm_window_s: float = Field(default=60.0, ge=1, description="window of `storm_moves_per_worker`")
    storm_moves_per_worker: int = Field(
        default=4,
        ge=0,
        description="more loads and unloads than this in the window that no request waits for freeze all moves",
    )
    ttl_s: float = Field(
        default=0.0,
        ge=0,
        description="an adapter that nobody asked for in so many seconds is unloaded, never below its minimum;"
        " 0: never",
    )
    keep_versions: int = Field(
        default=2, ge=1, le=MOST_VERSIONS, description="newest versions of a published name that stay"
    )
    max_staleness_s: float = Field(
        default=3600.0,
        ge=0,
        description="a version that its published name left so many seconds ago is deleted, also if it is one of"
        " `keep_versions`; 0: never",
    )
    unused_name_s: float = Field(
        default=7 * 86400.0,
        ge=0,
        description="a published name that nobody published or asked for in so many seconds is deleted; 0: never",
    )


# -- placements and plans ------------------------------------------------------------------------------------


class PlacementItem(_OrchestratorModel):
    """An adapter on a worker, present, desired, or both."""

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
    """Demand for one adapter: a factor on the present one, or requests a second."""

    factor: float | None = Field(default=None, ge=0, le=1e6)
    requests_per_s: float | None = Field(default=None, ge=0, le=1e6)

    @model_validator(mode="after")
    def _has_one_field(self) -> Self:
        """Raises ValueError unless exactly one of the fields is set."""
        if (self.factor is None) == (self.requests_per_s is None):
            raise ValueError("name one of factor and requests_per_s")
        return self


MOST_SUPPOSED = 2000
"""A pass over so many workers takes about a second; over 100,000 a plan takes more than a minute."""


class MoreWorkers(_PersonWrittenModel):
    """`count` empty workers like an existing one; `like` defaults to the first ready worker."""

    like: str | None = None
    count: int = Field(default=1, ge=1, le=1000)


class SupposedAdapter(AdapterSpec):
    """An adapter that is not registered. Rank and size default to the median of the registered ones."""

    rank: int | None = Field(default=None, ge=1, le=1024)
    size_bytes: int | None = Field(default=None, ge=0, le=1 << 50)


class PlanRequest(_PersonWrittenModel):
    """`POST /v1/placements/plan`: the changes to assume. `passes`: most passes to simulate."""

    demand: dict[LoraId, DemandChange] = Field(default={}, max_length=10_000)
    workers_gone: tuple[str, ...] = Field(default=(), max_length=10_000)
    workers_more: tuple[MoreWorkers, ...] = Field(default=(), max_length=100)
    policy: dict[str, Any] = Field(default={}, description="changed fields of the global policy")
    adapter_policies: dict[LoraId, AdapterPolicy] = Field(default={}, max_length=10_000)
    adapters: tuple[SupposedAdapter, ...] = Field(
        default=(), max_length=1000, description="adapters registered in addition"
    )
    passes: int = Field(default=30, ge=1, le=200)

    @field_validator("workers_more")
    @classmethod
    def _is_small_enough(cls, more: tuple[MoreWorkers, ...]) -> tuple[MoreWorkers, ...]:
        """Raises ValueError for more new workers than a plan may have."""
        total = sum(workers.count for workers in more)
        if total > MOST_SUPPOSED:
            raise ValueError(f"{total} more workers are assumed, at most {MOST_SUPPOSED} may be")
        return more


class TargetChange(_OrchestratorModel):
    """An adapter's replica target, now and under the assumed changes."""

    before: int
    after: int


class PlanCost(_OrchestratorModel):
    """The cost of a plan. `bytes`: of all loads with a known size; `seconds`: until the last load has ended."""

    loads: int
    unloads: int
    bytes: int
    seconds: float


class ActionItem(_OrchestratorModel):
    """One action of a pass, with its reason.

    turn        the pass that takes it: 0 is the next
    size_bytes  size of a loaded adapter; null for other actions and unknown sizes
    seconds     duration of a load, the median of those measured
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
    """A plan: actions in order.

    unplaced    adapters with fewer replicas than their target; `reasons`: why
    targets     replica targets that change
    is_settled  whether nothing is left to do afterwards; null for a plan of one pass
    """

    actions: tuple[ActionItem, ...]
    unplaced: tuple[str, ...] = ()
    reasons: dict[str, str] = {}
    targets: dict[str, TargetChange] = {}
    cost: PlanCost
    is_settled: bool | None = None


# -- orphans -------------------------------------------------------------------------------------------------


class OrphanItem(_OrchestratorModel):
    """An adapter that workers hold and that is not registered with this digest.

    problem     why it cannot be adopted
    is_foreign  another client loaded it into the engine; `digest` is that of its files, as the worker has read them
    """

    lora_id: str
    digest: str
    engine_name: str
    base_model: str
    rank: int
    size_bytes: int | None
    source: str
    workers: tuple[str, ...]
    problem: str | None = None
    is_foreign: bool = False


class OrphanList(_OrchestratorModel):
    data: tuple[OrphanItem, ...]
    next: str | None = None


class AdoptRequest(_PersonWrittenModel):
    """`POST /v1/orphans/adopt`. Orphans have lost their tenants with the store, so none may use them by default."""

    lora_ids: tuple[str, ...] | None = Field(
        default=None, max_length=10_000, description="orphans to adopt; null: all that can be adopted"
    )
    tenants: Tenants = Field(
        default=(), description="tenants that may use them, besides operators and servers without keys; null: everyone"
    )


# -- the record: export, import, sync ------------------------------------------------------------------------


class RecordedAdapter(_OrchestratorModel):
    """An adapter in a fleet's record. `source`: the immutable reference that workers fetch from there."""

    lora_id: LoraId
    source: str = Field(min_length=1, max_length=2000)
    base_model: str | None = None
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    rank: int | None = None
    size_bytes: int | None = None
    policy: AdapterPolicy = AdapterPolicy()
    tenants: Tenants = None
    secret_ref: Secret = None

    @field_validator("policy", mode="before")
    @classmethod
    def _drops_unknown_fields(cls, policy: object) -> object:
        """The policy's fields that this version knows: the record may be that of a newer fleet."""
        return _known_fields(policy, AdapterPolicy)


class RecordedAlias(_OrchestratorModel):
    """An alias in a fleet's record."""

    name: AliasName
    targets: tuple[AliasTarget, ...] = Field(min_length=1, max_length=16)


class RecordedVersion(_OrchestratorModel):
    """A version of a published name in a fleet's record."""

    lora_id: LoraId
    version: int = Field(ge=1)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")


class RecordedName(_OrchestratorModel):
    """A published name in a fleet's record. Its alias and its versions are recorded as any others, too."""

    name: NameToPublish
    tenant: str | None = None
    next_version: int = Field(default=1, ge=1)
    versions: tuple[RecordedVersion, ...] = Field(default=(), max_length=10_000)
    replicas: int | None = Field(default=None, ge=1, description="null: all workers")
    keep_versions: int | None = Field(default=None, ge=1, le=MOST_VERSIONS)
    max_staleness_s: float | None = Field(default=None, ge=0)
    shadows_base: bool = False


class FleetRecord(_OrchestratorModel):
    """`GET /v1/export`: a fleet's intent as one document. `revision`: of the fleet that wrote it.

    policy  null: the document has no policy
    """

    adapters: tuple[RecordedAdapter, ...] = Field(default=(), max_length=20_000)
    aliases: tuple[RecordedAlias, ...] = Field(default=(), max_length=20_000)
    published: tuple[RecordedName, ...] = Field(default=(), max_length=20_000)
    policy: Policy | None = None
    revision: int = 0
    wire: int = WIRE

    @field_validator("policy", mode="before")
    @classmethod
    def _drops_unknown_fields(cls, policy: object) -> object:
        """The policy's fields that this version knows: the record may be that of a newer fleet."""
        return _known_fields(policy, Policy)


def _known_fields(value: object, model: type[BaseModel]) -> object:
    """The value without keys that the model does not have, if it is a mapping."""
    if not isinstance(value, dict):
        return value
    return {name: found for name, found in value.items() if name in model.model_fields}


RecordPart = Literal["adapters", "aliases", "policy"]
"""Published names go with the aliases: each of them is one."""


class ImportRequest(_PersonWrittenModel):
    """`POST /v1/import`."""

    record: FleetRecord
    from_fleet: str | None = Field(
        default=None,
        pattern=r"^https?://",
        max_length=300,
        description="the other fleet's orchestrator, whose workers have the files by digest; null: each by its source",
    )
    keep_sources: bool = Field(
        default=False, description="with from_fleet: fetch hf, s3, gs, az and https sources from there all the same"
    )
    parts: tuple[RecordPart, ...] = Field(default=("adapters", "aliases", "policy"), min_length=1)
    prune: bool = Field(default=False, description="delete adapters and aliases that the record does not have")

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        """Raises ValueError for what no fleet writes: a file may have been edited by hand."""
        for alias in self.record.aliases:
            AliasSpec.model_validate({"targets": [target.model_dump() for target in alias.targets]})
        for adapter in self.record.adapters:
            if adapter.secret_ref is not None and not adapter.source.startswith(_WITH_SECRETS):
                raise ValueError(f"{adapter.lora_id}: secret_ref counts for hf:// and https:// sources")
        names = [adapter.lora_id for adapter in self.record.adapters], [alias.name for alias in self.record.aliases]
        for rows in (*names, [name.name for name in self.record.published]):
            if len(set(rows)) < len(rows):
                twice = next(name for name in rows if rows.count(name) > 1)
                raise ValueError(f"{twice!r} is in the record twice; expected once")
        return self


class RecordChange(_OrchestratorModel):
    """One difference between this fleet and a record.

    is_published  of an alias: the published name of this name, with its versions and retention
    fields  field -> [here, in the record]
    reason  why it is removed, or why it is blocked: then nothing is changed
    """

    subject: Literal["adapter", "alias", "policy"]
    name: str
    change: Literal["add", "change", "remove", "blocked"]
    is_published: bool = False
    fields: dict[str, list[Any]] = {}
    reason: str = ""


class ImportAnswer(_OrchestratorModel):
    """The differences, in order; none: this fleet meets the record. `is_done`: false for a dry run."""

    changes: tuple[RecordChange, ...]
    is_done: bool = False


# -- workers -------------------------------------------------------------------------------------------------


class WorkerDrainProgress(_OrchestratorModel):
    """How far a worker's drain is.

    phase       moving (it serves on until its adapters are elsewhere), finishing (it takes no new requests), drained
    began_at    when an operator asked for it; null for a worker that drains by itself
    deadline    when the drain stops waiting for moves, and in how many seconds; null where nothing sets one
    moves       adapters that had to be moved when it began, `moved` of which are ready elsewhere; `move_bytes`: of all
    left        adapters that are not ready elsewhere yet, `left_bytes` in all; `expected_s`: seconds until they are
    stuck       lora_id -> why no worker takes it; requests for it wait for a load once the worker is drained
    requests    requests that its engine has, or routers have sent it
    """

    phase: Literal["moving", "finishing", "drained"]
    began_at: str | None = None
    deadline: str | None = None
    deadline_in_s: float | None = None
    moves: int
    moved: int
    move_bytes: int
    left: tuple[str, ...] = ()
    left_bytes: int = 0
    expected_s: float = 0.0
    stuck: dict[str, str] = {}
    requests: int = 0


class WorkerFiles(_OrchestratorModel):
    """Adapters on a worker's disk, by digest.

    held      all; `kept`: those that stay because the fleet has them nowhere else
    is_whole  whether the agent has reported all of them
    """

    held: int
    kept: int
    is_whole: bool


class WorkerItem(_OrchestratorModel):
    """A worker.

    files           null for a worker without an agent, or with one of an older version
    orphans         adapters that it holds and that are not registered
    is_terminating  Kubernetes is terminating its pod, so it drains
    refusal         why it takes no adapters at all; empty: it takes them
    drain           how far its drain is; null for a worker that does not drain
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
    files: WorkerFiles | None = None
    drain: WorkerDrainProgress | None = None
    load: WorkerLoad | None = None


class WorkerList(_OrchestratorModel):
    data: tuple[WorkerItem, ...]
    next: str | None = None


class WorkerDrain(_PersonWrittenModel):
    """`POST /v1/workers/{id}/drain`.

    deadline_s  how long its adapters may take to be ready elsewhere; null: twice the time that the loads should take by
                those measured, and the policy's `drain_deadline_s`
    """

    deadline_s: float | None = Field(default=None, ge=0, le=86400)


# -- history -------------------------------------------------------------------------------------------------


class HistoryItem(_OrchestratorModel):
    """One entry of the history.

    subject    a lora_id, an alias or a worker; "" for the policy and for incidents of the whole fleet
    severity   of an incident; null for changes, loads and unloads
    next_step  what to do about an incident; empty: nothing
    """

    id: int
    at: str
    kind: str
    subject: str
    actor: str
    body: dict[str, Any]
    severity: Literal["info", "warning", "error"] | None = None
    next_step: str = ""


class HistoryList(_OrchestratorModel):
    data: tuple[HistoryItem, ...]
    next: str | None = None


# -- agents --------------------------------------------------------------------------------------------------


MOST_HELD = 1000
"""Digests of `HeldFiles` in one heartbeat: 70 KB. More follow in the next, which is sent at once."""
Digests = Annotated[tuple[str, ...], FailFast(), Field(max_length=MOST_HELD)]


class HeldFiles(_OrchestratorModel):
    """Changes of the digests on a worker's disk since those that the orchestrator has confirmed.

    disk_id  names the folder: agents that share it have one copy
    since    the confirmed number, which these changes follow; 0: these are the first of all that is there
    upto     the number to confirm; `left`: how many changes follow it
    held, kept, gone  digests that are there, there and kept, and no longer there
    """

    disk_id: str = Field(max_length=100)
    since: int = Field(ge=0)
    upto: int = Field(ge=0)
    left: int = Field(default=0, ge=0)
    held: Digests = ()
    kept: Digests = ()
    gone: Digests = ()


class Heartbeat(_OrchestratorModel):
    """`POST /v1/workers/register`: an agent's heartbeat.

    operations  the oldest loads and unloads that no orchestrator asked for and that none has recorded
    incidents   the oldest incidents that no orchestrator has recorded
    files       null: from an agent of an older version
    agents_digest  of the list of agents that it has; the answer has the list if it is another
    """

    metadata: Metadata
    files: HeldFiles | None = None
    agents_digest: str = ""
    operations: Annotated[tuple[AdapterOperation, ...], FailFast()] = Field(default=(), max_length=1000)
    incidents: Annotated[tuple[AgentIncident, ...], FailFast()] = Field(default=(), max_length=1000)
    wire: int = WIRE


class HeartbeatAnswer(_OrchestratorModel):
    """The answer to a heartbeat.

    interval_s  when to send the next one
    is_warm     the worker need load nothing more before it is ready
    in_flight   requests of routers at its engine
    recorded    `id` up to which the agent's operations are in the history; null: this orchestrator records none
    recorded_incidents  the same, of its incidents
    files_seen  number up to which the changes of its files are known; null: this orchestrator wants none
    agents      URLs of the fleet's agents, so that it can fetch from them by itself; null: as in `agents_digest`
    """

    epoch: int
    revision: int
    interval_s: float
    recorded: int | None = None
    recorded_incidents: int | None = None
    is_warm: bool = True
    in_flight: int = 0
    files_seen: int | None = None
    agents: tuple[str, ...] | None = None
    agents_digest: str = ""
    wire: int = WIRE


# -- routers: catalog and events -----------------------------------------------------------------------------


class CatalogAdapter(_OrchestratorModel):
    """An adapter in the catalog."""

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
    published_as: str | None = Field(default=None, description="published name that it is a version of")


class CatalogWorker(_OrchestratorModel):
    """A worker in the catalog. An agentless engine has no `agent_url`; routers ask the engine instead.

    agent_boot_id  boot id of the agent that reported this state; a new agent of the worker has a state of its own
    """

    id: str
    agent_url: str
    state: WorkerState
    engine_url: str = ""
    agent_boot_id: str = ""


class Draining(_OrchestratorModel):
    """A drain: no new request for the adapter may go to the worker."""

    worker_id: str
    lora_id: str
    digest: str


PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of requests that run when a pause begins: they go on, are waited for, or are ended."""


class CatalogPause(_OrchestratorModel):
    """A pause: routers hold the new requests of its scope.

    key           of the scope, as in `UsageReport.running_in_pause`
    tenant        null: every tenant's requests; `namespace`: "" for those of every namespace
    began_at, renewals  tell a new call from one that the router knows
    lease_s       a router that hears nothing more ends the pause so many seconds after it has read it
    """

    key: str
    tenant: str | None = None
    namespace: str = ""
    mode: PauseMode = "keep"
    began_at: float
    renewals: int = 0
    expires_at: float
    lease_s: float


class Catalog(_OrchestratorModel):
    """`GET /v1/catalog`: all that routers follow, at one revision. Revisions only grow, over restarts too.

    With `since`, adapters and aliases are only those that changed after that revision; drains and workers are all.
    """

    revision: int
    since: int | None = Field(default=None, description="the revision that these are the changes to; null: all")
    adapters: tuple[CatalogAdapter, ...] = ()
    aliases: tuple[AliasItem, ...] = ()
    gone_adapters: tuple[str, ...] = Field(default=(), description="lora_ids that there are no longer")
    gone_aliases: tuple[str, ...] = Field(default=(), description="alias names that there are no longer")
    draining: tuple[Draining, ...] = ()
    workers: tuple[CatalogWorker, ...] = ()
    pauses: tuple[CatalogPause, ...] = ()
    wire: int = WIRE


class FleetEvent(_OrchestratorModel):
    """One event of `GET /v1/events`; `id` is its revision."""

    id: int
    type: str
    at: str
    lora_id: str | None = None
    worker_id: str | None = None
    message: str = ""


# -- routers: usage and ensure -------------------------------------------------------------------------------


_MOST_WORKERS = 10_000
"""Workers in one report: more than any fleet has."""


class AdapterUse(_OrchestratorModel):
    """A router's cumulative counts of one engine name on one worker, since its boot.

    output_tokens   of responses whose engine reported its usage
    work_s          seconds of engine work: prefill, and each response's share of its decode steps
    errors          requests that failed in the engine: a 5xx, a broken stream, an engine that died or never answered
    first_tokens    streamed responses that began; `first_token_s`: the sum of the times from dispatch to first token
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
    """A router's counts of one adapter's queued requests, since its boot.

    held, hold_s   requests whose wait for a load or for room is over, served or not, and the sum of their waits
    sheds          requests refused for lack of room, or of time to wait for it
    waiting        requests that wait now for room on workers that have the adapter; not cumulative
    """

    lora_id: str
    held: Count = 0
    hold_s: Seconds = 0.0
    sheds: Count = 0
    waiting: Count = 0


class UsageReport(_OrchestratorModel):
    """`POST /v1/usage`: a router's cumulative counts; `seq` tells repeated and late reports.

    waits_s  worker_id -> seconds until the requests queued in the router for it have been sent, where not 0
    is_last  the router stops, and has no requests any more
    traffic  counts for the console that no earlier report has brought; each is sent until a report is accepted
    now      how the router is now; null from a router that is older than this field
    running_in_pause  key of a pause that the router holds -> its requests at engines; null from older versions
    """

    router_id: str
    boot_id: str
    seq: int
    revision_seen: int
    # FailFast: listing a million faults would take seconds.
    uses: Annotated[tuple[AdapterUse, ...], FailFast()] = ()
    holds: Annotated[tuple[AdapterHold, ...], FailFast()] = ()
    waits_s: dict[str, Seconds] = {}
    is_last: bool = False
    traffic: Annotated[tuple[TrafficBatch, ...], FailFast()] = Field(default=(), max_length=100)
    now: RouterNow | None = None
    running_in_pause: dict[str, Count] | None = None
    wire: int = WIRE

    @field_validator("waits_s", mode="before")
    @classmethod
    def _has_few_workers(cls, waits_s: object) -> object:
        """Raises ValueError for waits of more workers than a fleet may have."""
        if isinstance(waits_s, dict) and len(waits_s) > _MOST_WORKERS:
            raise ValueError(f"names {len(waits_s)} workers, and at most {_MOST_WORKERS} are taken")
        return waits_s


class UsageAnswer(_OrchestratorModel):
    """The answer to a report. `accepted`: false for a repeated or late report."""

    accepted: bool
    revision: int
    wire: int = WIRE


class PauseSpec(_PersonWrittenModel):
    """`POST /v1/pauses`. `lease_s`: default `pause_lease_s`, at most `pause_max_lease_s`."""

    mode: PauseMode = "keep"
    lease_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class PauseItem(_OrchestratorModel):
    """A pause. `running`: requests of its scope that run on, at routers that have reported.

    routers_behind  live routers that do not hold yet; 0 in the answer to `POST /v1/pauses`
    """

    scope: str
    tenant: str | None
    namespace: str
    mode: PauseMode
    owner: str
    began_at: str
    expires_at: str
    running: int
    routers_behind: int


class PauseList(_OrchestratorModel):
    data: tuple[PauseItem, ...]


class EnsureRequest(_OrchestratorModel):
    """`POST /v1/adapters/{lora_id}/ensure`. `tenants`: tenants of the waiting requests, "" for none."""

    replicas: int | None = Field(default=None, ge=1)
    wait_s: float = Field(default=0.0, ge=0, le=600)
    tenants: Annotated[tuple[str, ...], FailFast()] = Field(
        default=(), description="tenants of the waiting requests; default: the adapter's only tenant, if it has one"
    )
    wire: int = WIRE


class EnsureAnswer(_OrchestratorModel):
    """Where the adapter is ready, where it is loading, and in how many seconds it should be ready."""

    lora_id: str
    digest: str | None
    state: AdapterState
    ready: tuple[str, ...]
    loading: tuple[str, ...]
    expected_s: float | None
    error: str | None = None
    fits_nowhere: bool = Field(default=False, description="no worker could hold it, however empty; `error` says why")
    retry_in_s: float | None = Field(
        default=None, description="every worker that takes it failed to load it, as `error` says, until then"
    )
    progress: str | None = Field(default=None, description="how far the fetch of its files is, in words")
    wire: int = WIRE


# -- health --------------------------------------------------------------------------------------------------


class Status(_OrchestratorModel):
    """`GET /health` and `/ready`. `leader`: URL of the leading orchestrator, if known."""

    status: str
    epoch: int
    revision: int
    is_leading: bool = True
    leader: str | None = None
    wire: int = WIRE
