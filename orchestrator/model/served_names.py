"""Served names: an alias or a published name points at adapters and moves, one stored object for each.

All times are Unix times, because a name outlives the process that moves it.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

from lorafleet.identity import split_version_id
from orchestrator.model.names import MOST_VERSIONS, RESOURCE, AliasName, LoraId, NameToPublish, Pattern

Phase = Literal["placing", "watching", "done", "rolled_back", "aborted", "failed"]

ACTIVE: frozenset[Phase] = frozenset({"placing", "watching"})


DEFAULT_PLACE_S = 300.0
"""How long a name's new targets may wait for their replicas, unless somebody says otherwise; a guess."""

Replicas = Annotated[int, Ge(1)] | Literal["all"]


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """One target of a name, with its share relative to the other targets."""

    __pydantic_config__ = RESOURCE

    lora_id: LoraId
    weight: Annotated[float, Ge(0)] = 1.0


Targets = tuple[AliasTarget, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasSpec:
    """`PUT /v1/aliases/{name}`."""

    __pydantic_config__ = RESOURCE

    targets: Annotated[Targets, Len(1, 16)]
    place_s: Annotated[float, Ge(0), Le(86400)] = DEFAULT_PLACE_S
    """how long to wait for the new targets' replicas; 0 shifts at once, placed or not"""

    def __post_init__(self) -> None:
        """Raises ValueError for a target that is named twice, or weights whose sum is not finite."""
        names = [target.lora_id for target in self.targets]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is named twice; name it once, with the weight of both")
        if not isfinite(sum(target.weight for target in self.targets)):
            raise ValueError("the weights add up to more than a number can be; only their proportions count")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAlias(AliasSpec):
    """An alias as people write it into a file or a ConfigMap."""

    __pydantic_config__ = RESOURCE

    name: AliasName


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """One step of a rollout. New targets that the name points at already keep a higher share."""

    __pydantic_config__ = RESOURCE

    weight: Annotated[float, Gt(0), Le(1)]
    """share of the alias's sessions that go to the new version"""
    for_s: Annotated[float, Ge(0), Le(30 * 86400)] = 300.0
    """shortest duration; with 0 `min_requests` does not count"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """`POST /v1/aliases/{name}/rollout`. A last step of weight 1 is added where it is missing."""

    __pydantic_config__ = RESOURCE

    to: LoraId
    steps: Annotated[tuple[RolloutStep, ...], Len(1, 32)] = (RolloutStep(0.05), RolloutStep(0.25), RolloutStep(1.0))
    max_error_rate_increase: Annotated[float, Ge(0), Lt(1)] = 0.02
    """roll back when the error rate exceeds the old version's by more than this"""
    max_first_token_ratio: Annotated[float, Ge(1)] | None = 1.5
    """roll back when the mean first-token time is above this factor of the old version's; null: never"""
    min_requests: Annotated[int, Ge(0)] = 50
    """finished requests of the new version in each step before it is compared"""
    place_s: Annotated[float, Gt(0), Le(86400)] = DEFAULT_PLACE_S
    """how long each step may wait for its replicas"""

    def __post_init__(self) -> None:
        """Raises ValueError unless each step's weight is above the one before."""
        weights = [step.weight for step in self.steps]
        if any(later <= earlier for earlier, later in pairwise(weights)):
            raise ValueError(f"weights must rise from step to step, found {weights}")


@dataclass(frozen=True, slots=True)
class RequestTally:
    """Counts of finished requests, failed ones, and first tokens with the sum of their times."""

    requests: float = 0.0
    errors: float = 0.0
    first_tokens: float = 0.0
    first_token_s: float = 0.0

    def __add__(self, other: "RequestTally") -> "RequestTally":
        """The sum of each count."""
        return RequestTally(
            self.requests + other.requests,
            self.errors + other.errors,
            self.first_tokens + other.first_tokens,
            self.first_token_s + other.first_token_s,
        )

    @property
    def error_rate(self) -> float:
        """The part of requests that failed, at most 1; 0.0 without requests."""
        return min(1.0, self.errors / self.requests) if self.requests else 0.0

    @property
    def mean_first_token_s(self) -> float | None:
        """Mean seconds until the first token; None without a first token."""
        return self.first_token_s / self.first_tokens if self.first_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A name's way to other targets. A switch is a rollout of one step that is not watched.

    before, after   old and new targets of the name, with their weights as written
    spec            as it was asked for, with a last step of weight 1; None: a switch
    place_s         how long a step may wait for its replicas
    step            index of the step that is placed or watched; `since`: when that began
    paused_at       since when it is paused; None while it runs
    scale           replicas that all of the name's traffic would need, measured when the step began; None before
    old, new        request counts of old and new targets since the last shift; `baseline`: of the old ones before it
    reason          why it ended
    """

    before: Targets
    after: Targets
    spec: RolloutSpec | None = None
    place_s: float = DEFAULT_PLACE_S
    began_at: float
    since: float
    phase: Phase = "placing"
    step: int = 0
    paused_at: float | None = None
    scale: int | None = None
    old: RequestTally = RequestTally()
    new: RequestTally = RequestTally()
    baseline: RequestTally = RequestTally()
    reason: str = ""

    @property
    def steps(self) -> tuple[RolloutStep, ...]:
        """Rising weights, the last 1."""
        return self.spec.steps if self.spec is not None else (RolloutStep(1.0, 0.0),)

    @property
    def is_active(self) -> bool:
        """Whether the rollout is still placing or watching a step."""
        return self.phase in ACTIVE

    @property
    def old_ids(self) -> frozenset[str]:
        """lora_ids that only the old targets have."""
        return frozenset(traffic_shares(self.before)) - self.new_ids

    @property
    def new_ids(self) -> frozenset[str]:
        """lora_ids of the new targets, without those of weight 0."""
        return frozenset(traffic_shares(self.after))


@dataclass(frozen=True, slots=True, kw_only=True)
class NameVersion:
    """One version of a published name.

    pointed_at     when the name was last pointed at it; None: a publish is in progress, or failed
    superseded_at  when the name was pointed elsewhere; None while it is the name's target
    """

    lora_id: LoraId
    number: Annotated[int, Ge(1)]
    digest: Annotated[str, Pattern(r"^[0-9a-f]{64}$")]
    registered_at: float
    pointed_at: float | None = None
    superseded_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSpec:
    """How a published name is kept."""

    __pydantic_config__ = RESOURCE

    tenant: str | None = None
    """tenant that may publish under the name and use it; null: operators publish, everyone uses"""
    replicas: Replicas = "all"
    """workers that must have a version before the name points at it"""
    keep_versions: Annotated[int, Ge(1), Le(MOST_VERSIONS)] | None = None
    """newest versions that stay; null: the policy's"""
    max_staleness_s: Annotated[float, Ge(0)] | None = None
    """how long a superseded version stays, 0: no limit; null: the policy's"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPublishedSpec(PublishedSpec):
    """How a published name is kept, as people write it into a file."""

    __pydantic_config__ = RESOURCE

    name: NameToPublish


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What a published name has beyond its targets: the versions that a trainer publishes, and how they are kept.

    spec          how the name is kept, as written
    next_number   number of the next version; numbers are never used twice
    versions      registered versions, the oldest first
    published_at  when it was last published
    used_at       when a request for it was last noted; more recent ones may be known
    shadows_base  whether keys that may shadow a base model get the name in place of the base model of this name
    dropped       digests of the versions retired last, whose files workers may delete at once
    deleted_at    when the name was deleted, and its versions are about to go; None while the name exists
    """

    spec: PublishedSpec = PublishedSpec()
    next_number: Annotated[int, Ge(1)] = 1
    versions: Annotated[tuple[NameVersion, ...], Len(0, 10_000)] = ()
    published_at: float = 0.0
    used_at: float = 0.0
    shadows_base: bool = False
    dropped: tuple[str, ...] = ()
    deleted_at: float | None = None

    @property
    def lora_ids(self) -> frozenset[str]:
        """lora_ids of the versions."""
        return frozenset(version.lora_id for version in self.versions)

    def version_of(self, digest: str) -> NameVersion | None:
        """The newest version with these bytes; None without one."""
        return next((version for version in reversed(self.versions) if version.digest == digest), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedName:
    """A name that requests ask for: an alias, or a published name, which trainers point at its newest version.

    targets    what requests get now; empty: a first publish is in progress, or the name was deleted
    rollout    the way to other targets, in progress or the last one; None: none since the name was last pointed
    published  versions and retention of a published name; None: an alias
    """

    name: AliasName
    targets: Annotated[Targets, Len(0, 16)] = ()
    rollout: Rollout | None = None
    published: Publication | None = None

    @property
    def active_rollout(self) -> Rollout | None:
        """The rollout in progress."""
        return self.rollout if self.rollout is not None and self.rollout.is_active else None

    @property
    def asked_targets(self) -> Targets:
        """The targets last asked for: those of the rollout, unless it was aborted, else the present ones."""
        return self.targets if self.rollout is None or self.rollout.phase == "aborted" else self.rollout.after

    @property
    def needed_ids(self) -> frozenset[str]:
        """lora_ids that the name points at, or that its rollout in progress leads from or to."""
        going = self.active_rollout
        ids = frozenset(target.lora_id for target in self.targets)
        return ids if going is None else ids | going.old_ids | going.new_ids

    @property
    def current_version(self) -> NameVersion | None:
        """The version that a published name points at; None before its first is ready, and for an alias."""
        ids = {target.lora_id for target in self.targets}
        versions = () if self.published is None else self.published.versions
        return next((each for each in versions if each.lora_id in ids and each.pointed_at is not None), None)


def traffic_shares(targets: Targets) -> dict[str, float]:
    """lora_id -> share of the name's traffic, without targets of weight 0, or too small a weight for any share."""
    total = sum(target.weight for target in targets)
    return {each.lora_id: each.weight / total for each in targets if each.weight > 0 and each.weight / total > 0}


def weight_pairs(targets: Targets) -> list[tuple[str, float]]:
    """(lora_id, weight) of each target: how the history and ETags have them."""
    return [(target.lora_id, target.weight) for target in targets]


def is_retired_version(lora_id: str, next_numbers: Mapping[str, int], registered: Container[str]) -> bool:
    """Whether this was the version of a published name: its number has been used, and it is not registered any more.

    Nothing needs to be remembered of such a version.

    next_numbers  published name -> number of its next version
    registered    registered lora_ids
    """
    found = split_version_id(lora_id)
    return found is not None and found[1] < next_numbers.get(found[0], 0) and lora_id not in registered
