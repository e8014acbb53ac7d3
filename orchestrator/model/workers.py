"""Workers and their drains."""

from typing import Literal

from pydantic import Field

from orchestrator.model.catalog import WorkerState
from orchestrator.model.documents import ServiceDocument, WrittenDocument
from workers.wire import Load, MeasuredModules


class WorkerDrainProgress(ServiceDocument):
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
    stuck: dict[str, str] = Field(default_factory=dict)
    requests: int = 0


class WorkerFiles(ServiceDocument):
    """Adapters on a worker's disk, by digest.

    held      all; `kept`: those that stay because the fleet has them nowhere else
    is_whole  whether the agent has reported all of them
    """

    held: int
    kept: int
    is_whole: bool


class WorkerItem(ServiceDocument):
    """A worker.

    files           null for a worker without an agent, or with one of an older version
    orphans         adapters that it holds and that are not registered
    kept_out        adapters that an operator keeps out: they get no copy here until they are let in again
    is_terminating  Kubernetes is terminating its pod, so it drains
    refusal         why it takes no adapters at all; empty: it takes them
    punica          class of its engine's wrapper of LoRA kernels, such as PunicaWrapperGPU; empty: it does not say
    measured        on which kinds of modules an adapter has an effect in its engine; null: that is not measured
    drain           how far its drain is; null for a worker that does not drain
    load            its load and rates by its last report
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
    kept_out: tuple[str, ...] = ()
    is_terminating: bool = False
    refusal: str = ""
    punica: str = ""
    measured: MeasuredModules | None = None
    files: WorkerFiles | None = None
    drain: WorkerDrainProgress | None = None
    load: Load | None = None


class WorkerList(ServiceDocument):
    data: tuple[WorkerItem, ...]
    next: str | None = None


class WorkerDrain(WrittenDocument):
    """`POST /v1/workers/{id}/drain`.

    deadline_s  how long its adapters may take to be ready elsewhere; null: twice the time that the loads should take by
                those measured, and the policy's `drain_deadline_s`
    """

    deadline_s: float | None = Field(default=None, ge=0, le=86400)
