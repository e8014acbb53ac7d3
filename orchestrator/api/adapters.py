"""Adapters: register, list, show, change, delete."""

from typing import Annotated

from fastapi import APIRouter, Body, Depends, Query, Response

from lorafleet.auth import Keys, requires
from orchestrator.api.paging import Cursor, Limit, page_of
from orchestrator.api.views import Views
from orchestrator.core.errors import OrchestratorError, Permanent, RequestError, Transient, Unavailable
from orchestrator.core.placement import rendezvous
from orchestrator.reconcile import Reconciler
from orchestrator.registry import Registry, new_adapter
from orchestrator.wire import (
    AdapterBatch,
    AdapterItem,
    AdapterList,
    AdapterPatch,
    AdapterSpec,
    BatchAnswer,
    BatchResult,
)

ADAPTER_EXAMPLE = {
    "lora_id": "sql-expert/v1",
    "source": "file:///srv/adapters/sql-expert/v1",
    "base_model": "tiny-qwen",
    "policy": {"loading": "eager", "min_replicas": 2},
    "tenants": ["acme"],
}


def adapter_routes(keys: Keys, registry: Registry, reconciler: Reconciler, views: Views) -> APIRouter:
    api = APIRouter(tags=["adapters"], dependencies=[Depends(requires(keys, "admin"))])
    store = reconciler.store

    @api.post("/v1/adapters", status_code=201, response_model=AdapterItem)
    async def register(
        spec: Annotated[AdapterSpec, Body(examples=[ADAPTER_EXAMPLE])],
        response: Response,
        dry_run: Annotated[bool, Query(description="only fetch and verify it, register nothing")] = False,
    ) -> AdapterItem:
        """Register an adapter: 201; the same body again: 200; another source, digest or base model: 409 `immutable`."""
        if dry_run:
            response.status_code = 200
            return await _dry_run(spec, registry, reconciler, views)
        adapter, is_new = registry.register(spec)
        reconciler.changed()
        response.status_code = 201 if is_new else 200
        return views.adapter(adapter)

    @api.post("/v1/adapters:batch")
    async def batch(body: AdapterBatch) -> BatchAnswer:
        """Register many; each is taken or refused on its own."""
        with store.together():
            results = [_registered(registry, spec) for spec in body.adapters]
        reconciler.changed()
        return BatchAnswer(data=tuple(results))

    @api.get("/v1/adapters", response_model=AdapterList)
    async def adapters(
        limit: Limit = 1000, cursor: Cursor = None, state: str | None = None, base_model: str | None = None
    ) -> Response:
        """Registered adapters by lora_id."""
        ready = reconciler.ready_table()
        rows = store.adapter_ids
        if base_model is not None:
            rows = [name for name in rows if store.adapters[name].base_model == base_model]
        if state is not None:
            rows = [name for name in rows if reconciler.state_of(store.adapters[name], ready) == state]
        page, following = page_of(rows, limit, cursor)
        items = tuple(views.adapter(store.adapters[name], ready=ready) for name in page)
        # Dumped here: the framework would validate thousands of items, that we have just made, once more.
        return Response(AdapterList(data=items, next=following).model_dump_json(), media_type="application/json")

    @api.post("/v1/adapters/{lora_id:path}/retry")
    async def retry(lora_id: str) -> AdapterItem:
        """Forget a failure and try again."""
        adapter = registry.unquarantine(lora_id)
        reconciler.forget_failures(lora_id)
        reconciler.changed()
        return views.adapter(adapter)

    @api.get("/v1/adapters/{lora_id:path}")
    async def adapter(lora_id: str) -> AdapterItem:
        """One adapter."""
        return views.adapter(registry.adapter(lora_id))

    @api.patch("/v1/adapters/{lora_id:path}")
    async def patch(lora_id: str, body: AdapterPatch) -> AdapterItem:
        """Change policy or tenants."""
        changed = registry.patch(lora_id, body)
        reconciler.changed()
        return views.adapter(changed)

    @api.delete("/v1/adapters/{lora_id:path}", status_code=202, responses={204: {"description": "gone already"}})
    async def delete(lora_id: str) -> Response:
        """Drain it everywhere, unload it, forget it: 204 when that is done at once, else 202."""
        registry.delete(lora_id)
        reconciler.changed()
        if reconciler.is_settled:
            reconciler.run_pass()
        return Response(status_code=202 if lora_id in store.adapters else 204)

    return api


async def _dry_run(spec: AdapterSpec, registry: Registry, reconciler: Reconciler, views: Views) -> AdapterItem:
    known = registry.check(spec)
    if known is not None:
        return views.adapter(known)
    adapter = new_adapter(spec)
    able = [
        worker
        for worker in reconciler.observe().workers.values()
        if worker.state == "ready" and (spec.base_model is None or spec.base_model in worker.base_models)
    ]
    if not able:
        raise Unavailable(f"no ready worker serves {spec.base_model or 'anything'}, so nobody can look at the adapter")
    home = max(able, key=lambda worker: (rendezvous(spec.lora_id, worker.id), worker.id))
    try:
        return views.adapter(await reconciler.inspect_only(adapter, home.id), ready={})
    except Permanent as exc:
        raise RequestError(f"preflight failed: {exc}", code=exc.code, param="source") from exc
    except Transient as exc:
        raise Unavailable(f"worker {home.id} could not look at it: {exc}", code=exc.code) from exc


def _registered(registry: Registry, spec: AdapterSpec) -> BatchResult:
    try:
        _, is_new = registry.register(spec)
    except OrchestratorError as exc:
        return BatchResult(lora_id=spec.lora_id, status=exc.status, code=exc.code, error=str(exc))
    return BatchResult(lora_id=spec.lora_id, status=201 if is_new else 200)
