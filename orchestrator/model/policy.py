"""The placement policy: of the fleet, and of one adapter."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from lorafleet.identity import CacheScope
from orchestrator.model.acceptance import AcceptanceMode
from orchestrator.model.names import MOST_VERSIONS, RESOURCE

Loading = Literal["lazy", "eager", "weighted", "everywhere"]
LargeWeightsMode = Literal["note", "refuse"]
Adopt = Literal["configured", "all", "none"]
_LEAST_FLEET_WIDE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPolicy:
    """The placement policy of one adapter; None: the global policy's value."""

    __pydantic_config__ = RESOURCE

    loading: Loading | None = None
    min_replicas: Annotated[int, Ge(0)] | None = None
    max_replicas: Annotated[int, Ge(1)] | None = None
    pinned: bool = False
    priority: Annotated[int, Ge(-1000), Le(1000)] = 0
    weight: Annotated[float, Gt(0)] = 1.0
    ttl_s: Annotated[float, Ge(0)] | None = None
    """unload after so many seconds without a request; 0: never; null: the policy's"""
    loss_factor: Annotated[float, Ge(0), Le(1000)] = 1.0
    """how much the loss of a copy counts beside other adapters' when requests wait for its slot; 0: it goes first"""
    ignored_modules: Literal["accept", "refuse"] | None = None
    """what to do where an engine ignores a part of its modules; null: the worker's setting of this name"""
    acceptance: AcceptanceMode | None = None
    """what to do with its acceptance file; null: the policy's"""
    large_weights: LargeWeightsMode | None = None
    """what to do at its registration where its weights are far too large; null: the policy's"""
    cache: CacheScope | None = None
    """who shares its cached prompts; null: the policy's"""

    def __post_init__(self) -> None:
        if self.min_replicas is not None and self.max_replicas is not None:
            require_bounds(self.min_replicas, self.max_replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """The global placement policy. `reserve_slots` of each worker stay free for moves."""

    __pydantic_config__ = RESOURCE

    loading: Loading = "lazy"
    """lazy: an adapter is loaded with its first request; eager: `min_replicas` of it at once; weighted: slots that no
    other adapter needs are divided among adapters by `weight`; everywhere: a copy on every worker that takes it, up to
    `max_replicas`, of which requests for other adapters may evict all above `min_replicas`"""
    min_replicas: Annotated[int, Ge(0)] = 1
    """least copies of an adapter that is loaded"""
    max_replicas: Annotated[int, Ge(1)] = 64
    """most copies of an adapter, however much it is asked for"""
    reserve_slots: Annotated[int, Ge(0)] = 0
    """slots of each worker that stay free for moves"""
    loads_per_worker: Annotated[int, Ge(1)] = 1
    """loads at one worker at a time"""
    loads_fleet_wide: Annotated[int, Ge(0)] = 0
    """loads in the whole fleet at a time; 0: one for each worker, and at least 16"""
    load_spread_s: Annotated[float, Ge(0)] = 2.0
    """half of a base model's workers load the same adapter at once, because an engine stalls while it loads; the others
    follow when these have it, or after this long; 0: all at once"""
    min_residency_s: Annotated[float, Ge(0)] = 10.0
    """a copy is not moved, expired or removed as surplus before it is so old; an eviction for a request goes by cost"""
    drain_deadline_s: Annotated[float, Ge(0)] = 30.0
    """how long an unload waits for the requests of the adapter"""
    failure_expiry_s: Annotated[float, Gt(0)] = 60.0
    """a load that failed is tried again at the same worker after so long, and later"""
    demand_window_s: Annotated[float, Gt(0)] = 60.0
    """window of the exponentially weighted demand"""
    target_utilisation: Annotated[float, Gt(0), Le(1)] = 0.7
    """busy part of a worker above which an adapter gets one more replica"""
    scale_down_after_s: Annotated[float, Ge(0)] = 300.0
    """a replica is removed when demand has been lower for this long"""
    storm_window_s: Annotated[float, Ge(1)] = 60.0
    """window of `storm_moves_per_worker`"""
    storm_moves_per_worker: Annotated[int, Ge(0)] = 4
    """more loads and unloads than this in the window that no request waits for freeze all moves"""
    ttl_s: Annotated[float, Ge(0)] = 0.0
    """an adapter that nobody asked for in so many seconds is unloaded, never below its minimum; 0: never"""
    keep_versions: Annotated[int, Ge(1), Le(MOST_VERSIONS)] = 2
    """newest versions of a published name that stay"""
    max_staleness_s: Annotated[float, Ge(0)] = 3600.0
    """a version that its published name left so many seconds ago is deleted, also if it is one of `keep_versions`; 0:
    never"""
    unused_name_s: Annotated[float, Ge(0)] = 7 * 86400.0
    """a published name that nobody published or asked for in so many seconds is deleted, and an adopted adapter that is
    left nowhere; 0: never"""
    acceptance: AcceptanceMode = "warn"
    """what to do with the acceptance file of an adapter that has one. off: nothing; warn: engines' answers are compared
    with the trainer's, and shown; require: an adapter is served by engines alone whose answers are equal"""
    large_weights: LargeWeightsMode = "note"
    """what to do with finite weights that are far beyond ordinary ones, or beyond those of a published name's former
    version. note: they are served with a note; refuse: the registration or publish fails"""
    cache: CacheScope = "tenant"
    """who shares the cached prompts of a base model or adapter. tenant: the keys of one tenant; key: the requests of
    one key; shared: everyone, so that a tenant who guesses another's prompt can tell that it was asked. Keys without a
    tenant share one cache under `tenant`, and so do requests without a key"""
    adopt: Adopt = "configured"
    """which adapters on workers are registered without a call. configured: those that a worker's settings name; all:
    also those that another client loaded, or that the fleet loaded with a store it has lost; none: no adapter"""

    def __post_init__(self) -> None:
        require_bounds(self.min_replicas, self.max_replicas)


def loads_fleet_wide(policy: PlacementPolicy, workers: int) -> int:
    """Loads in a fleet of so many workers at a time, by policy: fewer than there are workers let some of them idle."""
    return policy.loads_fleet_wide or max(_LEAST_FLEET_WIDE, workers)


def acceptance_mode(adapter: AdapterPolicy, fleet: PlacementPolicy) -> AcceptanceMode:
    """What to do with an adapter's acceptance file: its own policy, else the fleet's."""
    return adapter.acceptance or fleet.acceptance


def require_bounds(min_replicas: int, max_replicas: int) -> None:
    """Raise ValueError where the minimum of replicas is above the maximum."""
    if min_replicas > max_replicas:
        raise ValueError(f"min_replicas {min_replicas} is above max_replicas {max_replicas}")
