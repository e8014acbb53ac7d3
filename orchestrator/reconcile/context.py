"""What the parts of the reconciler share. `Reconciler` makes it once."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from lorafleet.service.tasks import BackgroundTasks
from orchestrator.config import OrchestratorSettings
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.worker_reports import WorkerReports
from orchestrator.store.store import IntentStore


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """One orchestrator's settings, what it knows, and the way to its agents.

    tasks          actions under way; cancelled at the end of a term
    request_pass   has the next pass begin at once
    on_lease_lost  ends our term; takes the reason
    """

    settings: OrchestratorSettings
    store: IntentStore
    reports: WorkerReports
    agents: AgentClient
    metrics: OrchestratorMetrics
    tasks: BackgroundTasks
    request_pass: Callable[[], None]
    on_lease_lost: Callable[[str], None]
    rng: Random
    clock: Callable[[], float]
