"""The placement policy: of the fleet, and of one adapter."""

from typing import Literal

from pydantic import Field

from orchestrator.model.names import MOST_VERSIONS, WrittenDocument

Loading = Literal["lazy", "eager", "weighted"]


class AdapterPolicy(WrittenDocument):
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


class Policy(WrittenDocument):
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
