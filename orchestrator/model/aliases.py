"""Aliases: names whose requests are shared between adapters."""

from math import isfinite
from typing import Literal

from pydantic import ConfigDict, Field, field_validator

from orchestrator.model.documents import ServiceDocument, WrittenDocument
from orchestrator.model.names import LoraId


class AliasTarget(ServiceDocument):
    """One target of an alias, with its share relative to the other targets."""

    model_config = ConfigDict(allow_inf_nan=False)

    lora_id: LoraId
    weight: float = Field(default=1.0, ge=0)


class AliasTargetSpec(AliasTarget):
    """The same as a person writes it: unknown keys are refused. In the catalog they are ignored, as routers need."""

    model_config = ConfigDict(extra="forbid")


class AliasSpec(WrittenDocument):
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


class AliasPending(ServiceDocument):
    """The targets that an alias is about to get.

    state   placing: waits for `lacks`; failed: the alias keeps its targets, `error` says why
    lacks   lora_id -> what is missing before the alias shifts
    """

    targets: tuple[AliasTarget, ...]
    state: Literal["placing", "failed"]
    since: str
    deadline: str
    lacks: dict[str, str] = Field(default_factory=dict)
    error: str | None = None


class AliasItem(ServiceDocument):
    """One alias. `targets`: those that routers use now; `pending`: those that it is about to get."""

    name: str
    targets: tuple[AliasTarget, ...]
    pending: AliasPending | None = None


class AliasList(ServiceDocument):
    data: tuple[AliasItem, ...]
    next: str | None = None
