"""The REST API: translates between HTTP and the parts that decide.

`lora_id` may contain '/', so the routes that end in a word (`…/ensure`) come before the bare `{lora_id:path}`.
"""

import time
from collections.abc import Callable

from fastapi import APIRouter

from lorafleet.keys.auth import ApiKeys, metrics_dependencies
from lorafleet.keys.whoami import whoami_routes
from lorafleet.service.http import add_routes
from orchestrator.api.adapters import adapter_routes
from orchestrator.api.aliases import alias_routes, published_routes
from orchestrator.api.decisions import decision_routes, request_routes
from orchestrator.api.fleet import (
    copy_routes,
    fleet_routes,
    heartbeat_routes,
    inspection_routes,
    offer_routes,
    worker_routes,
)
from orchestrator.api.history import history_routes, record_routes
from orchestrator.api.open_routes import health_routes, ui_routes
from orchestrator.api.placements import placement_routes, policy_routes
from orchestrator.api.rollouts import rollout_routes
from orchestrator.api.routers import pause_routes, router_routes
from orchestrator.api.traffic import live_routes, traffic_routes
from orchestrator.api.uploads import upload_routes
from orchestrator.api.usage import usage_routes
from orchestrator.api.views import WireViews
from orchestrator.intent.publisher import NamePublisher
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.intent.uploads import AdapterUploads
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.store.ledger import Ledger
from orchestrator.traffic.book import TrafficBook
from orchestrator.traffic.questions import RouterMailbox


def build_router(
    *,
    keys: ApiKeys,
    registry: AdapterRegistry,
    reconciler: Reconciler,
    agents: AgentClient,
    book: TrafficBook,
    ledger: Ledger,
    mailbox: RouterMailbox,
    uploads: AdapterUploads,
    metrics: OrchestratorMetrics,
    is_stopping: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    metrics_need_key: bool = False,
) -> APIRouter:
    """All routes of the API. Also connects the gauges of the fleet in `metrics` to the reconciler's state."""
    views = WireViews(reconciler, clock, wall)
    metrics.observe_fleet(views.replica_counts, views.workers_by_state, views.pool_figures, views.orphans_by_origin)
    publisher = NamePublisher(registry, reconciler, metrics, clock=clock, wall=wall)
    api = APIRouter()
    add_routes(
        api,
        ui_routes(keys),
        whoami_routes(keys),
        health_routes(reconciler, metrics, is_stopping, metrics_dependencies(keys, need_key=metrics_need_key)),
        router_routes(keys, registry, reconciler, views, book, ledger, is_stopping=is_stopping, clock=clock),
        usage_routes(keys, reconciler.store, ledger, reconciler.settings.price_file, wall),
        traffic_routes(keys, reconciler, book, wall),
        live_routes(keys, reconciler, views.workers_by_state, is_stopping, clock, wall),
        decision_routes(keys, mailbox),
        request_routes(keys, mailbox),
        inspection_routes(keys, reconciler.reports, agents),
        worker_routes(keys, reconciler, views),
        adapter_routes(keys, registry, reconciler, views),
        upload_routes(keys, reconciler.store, uploads, publisher, views),
        rollout_routes(keys, registry, reconciler, book),
        alias_routes(keys, registry, reconciler),
        published_routes(keys, reconciler.store, publisher),
        policy_routes(keys, registry, reconciler),
        history_routes(keys, reconciler.store),
        heartbeat_routes(keys, reconciler),
        offer_routes(keys, reconciler, clock),
        fleet_routes(keys, registry, reconciler, views),
        copy_routes(keys, registry, reconciler, views),
        record_routes(keys, registry, reconciler, uploads.relay),
        pause_routes(keys, reconciler, is_stopping),
        placement_routes(keys, reconciler, views, clock),
    )
    return api
