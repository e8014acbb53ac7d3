"""Routes for probes and metrics."""

from collections.abc import Callable, Sequence

from fastapi import APIRouter, Response
from fastapi.params import Depends
from fastapi.responses import PlainTextResponse

from orchestrator.core.errors import OrchestratorUnavailable, StoreError
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.model.health import Status
from orchestrator.reconcile.reconciler import Reconciler


def health_routes(
    reconciler: Reconciler, metrics: OrchestratorMetrics, is_stopping: Callable[[], bool], guarded: Sequence[Depends]
) -> APIRouter:
    """The routes, open without a key; `guarded`: dependencies of `/metrics`."""
    api = APIRouter(tags=["health"])

    def status(word: str) -> Status:
        """The orchestrator's epoch, revision and leader, under this status word."""
        return Status(
            status=word,
            epoch=reconciler.store.epoch,
            revision=reconciler.catalog.revision,
            is_leading=reconciler.leadership.is_leading,
            leader=reconciler.leadership.leader_url,
        )

    @api.get("/health")
    async def health() -> Status:
        """Alive."""
        return status("ok")

    @api.get("/ready")
    async def ready() -> Status:
        """Ready: the store takes changes, and workers have had time to report. 503 before that, and while stopping."""
        if is_stopping():
            raise OrchestratorUnavailable("stopping", code="stopping")
        if not reconciler.store.is_read:
            raise OrchestratorUnavailable("started, the store has not been read yet", code="starting")
        if reconciler.store.trouble:
            raise StoreError(reconciler.store.trouble)
        if not reconciler.is_settled:
            raise OrchestratorUnavailable(
                "started, waiting for workers to report before anything is decided", code="starting"
            )
        return status("ready")

    @api.get("/metrics", response_class=PlainTextResponse, dependencies=guarded)
    async def prometheus() -> Response:
        """Prometheus text."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return api
