"""Aliases and their rollouts, as REST takes and answers them."""

from typing import Literal

from pydantic import Field

from orchestrator.model.documents import ServiceDocument, WrittenDocument
from orchestrator.model.served_names import AliasSpec, Phase, RolloutSpec, RolloutStep, Targets


class AliasPending(ServiceDocument):
    """A change of the targets to those of the spec that has not been made.

    state   placing: waits for `lacks`; failed: the alias keeps its targets, `error` says why
    lacks   lora_id -> what is missing before the alias shifts
    """

    state: Literal["placing", "failed"]
    since: str
    deadline: str
    lacks: dict[str, str] = Field(default_factory=dict)
    error: str | None = None


class AliasStatus(ServiceDocument):
    """Where requests for the alias go. `targets`: now; `pending`: why these are not those of the spec yet."""

    targets: Targets
    pending: AliasPending | None = None


class AliasItem(ServiceDocument):
    """One alias. `spec`: the targets last asked for; a rollout leads to them in steps."""

    name: str
    spec: AliasSpec
    status: AliasStatus


class AliasList(ServiceDocument):
    data: tuple[AliasItem, ...]
    next: str | None = None


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


class RolloutStatus(ServiceDocument):
    """A rollout, in progress or over.

    state      placing (a step waits for its replicas), watching, done, rolled_back, aborted, failed (nothing shifted)
    steps      all steps, the last of weight 1; `step`: index of the present one
    weight     the new version's present share
    lacks      lora_id -> what is missing before the step's shift
    old, new   requests since the last shift; `needed`: requests of the new version that the step waits for
    worse      why the new version is worse so far, by the rollout's own limits, before `needed` is reached; "": it is
               not, or there are too few requests to tell
    """

    before: Targets
    to: Targets
    state: Phase
    paused: bool
    steps: tuple[RolloutStep, ...]
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


class RolloutItem(ServiceDocument):
    """A rollout of the alias `name`. `spec`: of a change of the alias, which has no steps, the alias's own."""

    name: str
    spec: RolloutSpec | AliasSpec
    status: RolloutStatus
