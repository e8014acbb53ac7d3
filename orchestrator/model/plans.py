"""Placements, plans, and what-if questions."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from orchestrator.model.adapters import AdapterSpec
from orchestrator.model.changes import Changes, PolicyChanges
from orchestrator.model.documents import ServiceDocument, WrittenDocument
from orchestrator.model.names import LoraId
from orchestrator.model.policy import AdapterPolicy


class PlacementItem(ServiceDocument):
    """An adapter on a worker, present, desired, or both."""

    lora_id: str
    digest: str | None
    worker_id: str
    state: str
    location: str
    desired: bool


class PlacementList(ServiceDocument):
    data: tuple[PlacementItem, ...]
    next: str | None = None


class DemandChange(WrittenDocument):
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


class MoreWorkers(WrittenDocument):
    """`count` empty workers like an existing one; `like` defaults to the first ready worker."""

    like: str | None = None
    count: int = Field(default=1, ge=1, le=1000)


_OwnPolicy = Annotated[dict[str, Any], Changes(AdapterPolicy)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupposedAdapter(AdapterSpec):
    """An adapter that is not registered. Rank and size default to the median of the registered ones."""

    rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    size_bytes: Annotated[int, Field(ge=0, le=1 << 50)] | None = None


class PlanRequest(WrittenDocument):
    """`POST /v1/placements/plan`: the changes to assume. `passes`: most passes to simulate."""

    demand: dict[LoraId, DemandChange] = Field(default={}, max_length=10_000)
    workers_gone: tuple[str, ...] = Field(default=(), max_length=10_000)
    workers_more: tuple[MoreWorkers, ...] = Field(default=(), max_length=100)
    policy: PolicyChanges = Field(default={}, description="changed fields of the global policy")
    adapter_policies: dict[LoraId, _OwnPolicy] = Field(default={}, max_length=10_000)
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


class TargetChange(ServiceDocument):
    """An adapter's replica target, now and under the assumed changes."""

    before: int
    after: int


class PlanCost(ServiceDocument):
    """The cost of a plan. `bytes`: of all loads with a known size; `seconds`: until the last load has ended."""

    loads: int
    unloads: int
    bytes: int
    seconds: float


class ActionItem(ServiceDocument):
    """One action of a pass, with its reason.

    turn        the pass that takes it: 0 is the next
    size_bytes  size of a loaded adapter; null for other actions and unknown sizes
    seconds     duration of a load, the median of those measured
    """

    operation: Literal["inspect", "fetch", "load", "check", "drain", "unload"]
    lora_id: str
    worker_id: str
    reason: str
    evict: str | None = None
    turn: int = 0
    size_bytes: int | None = None
    seconds: float | None = None


class Plan(ServiceDocument):
    """A plan: actions in order.

    unplaced    adapters with fewer replicas than their target; `reasons`: why
    targets     replica targets that change
    is_settled  whether nothing is left to do afterwards; null for a plan of one pass
    """

    actions: tuple[ActionItem, ...]
    unplaced: tuple[str, ...] = ()
    reasons: dict[str, str] = Field(default_factory=dict)
    targets: dict[str, TargetChange] = Field(default_factory=dict)
    cost: PlanCost
    is_settled: bool | None = None
