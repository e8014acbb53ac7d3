"""Rollouts: an alias shifted to another adapter step by step."""

from itertools import pairwise
from typing import Literal

from pydantic import Field, field_validator

from orchestrator.model.aliases import AliasTarget
from orchestrator.model.documents import ServiceDocument, WrittenDocument
from orchestrator.model.names import LoraId


class RolloutStep(WrittenDocument):
    """One step of a rollout."""

    weight: float = Field(gt=0, le=1, description="share of the alias's sessions that go to the new version")
    for_s: float = Field(
        default=300.0, ge=0, le=30 * 86400, description="shortest duration; with 0 `min_requests` does not count"
    )


class RolloutSpec(WrittenDocument):
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


class RolloutPatch(WrittenDocument):
    """`PATCH /v1/aliases/{name}/rollout`: pause or resume it."""

    paused: bool


class RolloutTally(ServiceDocument):
    """Finished requests of one version since the last shift."""

    requests: int
    errors: int
    error_rate: float
    first_tokens: int
    mean_first_token_s: float | None


class RolloutItem(ServiceDocument):
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
    lacks: dict[str, str] = Field(default_factory=dict)
    old: RolloutTally
    new: RolloutTally
    needed: int
    reason: str = ""
    worse: str = ""
