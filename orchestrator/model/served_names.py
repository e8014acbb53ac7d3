"""Served names: an alias or a published name points at adapters and moves, one stored object for each.

All times are Unix times, because a name outlives the process that moves it.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Literal

from lorafleet.identity import split_version_id

Targets = tuple[tuple[str, float], ...]
"""(lora_id, weight) each."""
Phase = Literal["placing", "watching", "done", "rolled_back", "aborted", "failed"]

ACTIVE: frozenset[Phase] = frozenset({"placing", "watching"})


@dataclass(frozen=True, slots=True)
class WeightStep:
    """One step of a rollout: the new targets' share of the name (0 < weight <= 1), for at least `for_s` seconds.

    New targets that the name points at already keep a higher share.
    """

    weight: float
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGuard:
    """The thresholds of a regression. `max_first_token_ratio`: None compares errors only."""

    max_error_rate_increase: float = 0.02
    max_first_token_ratio: float | None = 1.5
    min_requests: int = 50


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
        # An error may be reported a moment before the end of its request.
        return min(1.0, self.errors / self.requests) if self.requests else 0.0

    @property
    def mean_first_token_s(self) -> float | None:
        """Mean seconds until the first token; None without a first token."""
        return self.first_token_s / self.first_tokens if self.first_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A name's way to other targets, in steps. A switch is a rollout of one step without a guard.

    before, after   old and new targets of the name, with their weights as written
    steps           rising weights, the last 1
    guard           None: a switch, which is not watched
    place_s         how long a step may wait for its replicas
    step            index of the step that is placed or watched; `since`: when that began
    paused_at       since when it is paused; None while it runs
    scale           replicas that all of the name's traffic would need, measured when the step began; None before
    old, new        request counts of old and new targets since the last shift; `baseline`: of the old ones before it
    reason          why it ended
    """

    before: Targets
    after: Targets
    steps: tuple[WeightStep, ...] = (WeightStep(1.0, 0.0),)
    guard: RolloutGuard | None = None
    place_s: float = 300.0
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

    lora_id: str
    number: int
    digest: str
    registered_at: float
    pointed_at: float | None = None
    superseded_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What a published name has beyond its targets: the versions that a trainer publishes, and how they are kept.

    tenant           tenant that may publish under the name and use it; None: operators publish, everyone uses
    next_number      number of the next version; numbers are never used twice
    versions         registered versions, the oldest first
    published_at     when it was last published
    used_at          when a request for it was last noted; more recent ones may be known
    replicas         workers that must have a version before the name points at it; None: all
    keep_versions    newest versions that stay; None: the policy's
    max_staleness_s  how long a superseded version stays; None: the policy's
    shadows_base     whether keys that may shadow a base model get the name in place of the base model of this name
    dropped          digests of the versions retired last, whose files workers may delete at once
    deleted_at       when the name was deleted, and its versions are about to go; None while the name exists
    """

    tenant: str | None = None
    next_number: int = 1
    versions: tuple[NameVersion, ...] = ()
    published_at: float = 0.0
    used_at: float = 0.0
    replicas: int | None = None
    keep_versions: int | None = None
    max_staleness_s: float | None = None
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

    name: str
    targets: Targets = ()
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
        ids = frozenset(lora_id for lora_id, _ in self.targets)
        return ids if going is None else ids | going.old_ids | going.new_ids

    @property
    def current_version(self) -> NameVersion | None:
        """The version that a published name points at; None before its first is ready, and for an alias."""
        ids = {lora_id for lora_id, _ in self.targets}
        versions = () if self.published is None else self.published.versions
        return next((each for each in versions if each.lora_id in ids and each.pointed_at is not None), None)


def traffic_shares(targets: Targets) -> dict[str, float]:
    """lora_id -> share of the name's traffic, without targets of weight 0, or too small a weight for any share."""
    total = sum(weight for _, weight in targets)
    return {lora_id: weight / total for lora_id, weight in targets if weight > 0 and weight / total > 0}


def is_retired_version(lora_id: str, next_numbers: Mapping[str, int], registered: Container[str]) -> bool:
    """Whether this was the version of a published name: its number has been used, and it is not registered any more.

    Nothing needs to be remembered of such a version.

    next_numbers  published name -> number of its next version
    registered    registered lora_ids
    """
    found = split_version_id(lora_id)
    return found is not None and found[1] < next_numbers.get(found[0], 0) and lora_id not in registered
