"""Routes for adapters: register, list, show, change, delete."""

from bisect import bisect_left
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Response
from pydantic import BaseModel, Field

from lorafleet.engine.acceptance import AcceptanceError, parse_acceptance
from lorafleet.identity import rendezvous_score
from lorafleet.keys.auth import ApiKeys, requires
from lorafleet.keys.roles import Caller
from lorafleet.service.http import add_routes
from orchestrator.api.tenancy import (
    Cursor,
    IfMatch,
    Limit,
    TenantView,
    WhoCalls,
    given_names,
    page_after,
    tenant_view_of,
)
from orchestrator.api.views import WireViews
from orchestrator.core.errors import (
    InvalidAdapter,
    OrchestratorError,
    OrchestratorRequestError,
    OrchestratorUnavailable,
    WorkerFailed,
)
from orchestrator.core.placement.choose import limits_by_base_model, placement_misfit
from orchestrator.intent import owners
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.model.adapter_documents import (
    AcceptanceAnswer,
    AcceptanceQuestion,
    AdapterBatch,
    AdapterItem,
    AdapterList,
    AdapterState,
    BatchAnswer,
    BatchResult,
)
from orchestrator.model.adapters import AdapterSpec, RegisteredAdapter
from orchestrator.model.changes import AdapterChanges, WrittenAdapter
from orchestrator.model.names import LoraId
from orchestrator.reconcile.reconciler import Reconciler

ADAPTER_EXAMPLE = {
    "lora_id": "sql-expert/v1",
    "source": "file:///srv/adapters/sql-expert/v1",
    "base_model": "tiny-qwen",
    "policy": {"loading": "eager", "min_replicas": 2},
    "tenants": ["acme"],
}


PATCH_EXAMPLE = {"policy": {"min_replicas": 2, "priority": 5}, "tenants": None}
BATCH_EXAMPLE = {"adapters": [ADAPTER_EXAMPLE, {"lora_id": "legal/v2", "source": "s3://bucket/legal-v2"}]}


_SOURCE_CHECKS = 3  # workers asked about a source; a guess: they are configured alike


class AdapterListQuery(BaseModel):
    """Filters of the list of adapters."""

    state: AdapterState | None = None
    base_model: str | None = None
    tenant: str | None = Field(
        default=None, description="adapters that this tenant may use, those open to everyone included"
    )
    worker: str | None = Field(default=None, description="adapters that are ready on this worker")
    prefix: str | None = Field(default=None, description="beginning of the lora_id")
    quarantined: bool | None = None
    has_error: bool | None = Field(default=None, description="adapters with, or without, a reason why they lack copies")
    limit: Limit = 1000
    cursor: Cursor = None


def adapter_routes(keys: ApiKeys, registry: AdapterRegistry, reconciler: Reconciler, views: WireViews) -> APIRouter:
    """The routes that register, list, read, change, retry and delete adapters.

    Reads need scope `view`, changes `tenant-admin`.
    """
    api = APIRouter()
    add_routes(
        api,
        _read_routes(keys, registry, reconciler, views),
        _check_routes(keys, registry, reconciler),
        _change_routes(keys, registry, reconciler, views),
    )
    return api


def _read_routes(keys: ApiKeys, registry: AdapterRegistry, reconciler: Reconciler, views: WireViews) -> APIRouter:
    """The routes that list adapters and read one."""
    api = APIRouter(tags=["adapters"], dependencies=[Depends(requires(keys, "view"))])
    store = reconciler.store
    seen_by = Annotated[TenantView, Depends(tenant_view_of(store))]

    @api.get("/v1/adapters", response_model=AdapterList)
    async def adapters(wanted: Annotated[AdapterListQuery, Query()], seen: seen_by) -> Response:
        """Registered adapters by lora_id that match all filters."""
        ready = reconciler.queries.ready_workers_by_adapter()
        rows = _matching_ids(wanted, reconciler, ready, seen)
        page, following = page_after(rows, wanted.limit, wanted.cursor)
        copies = reconciler.queries.copies_with_notes(frozenset(page))
        items = tuple(seen.adapter(views.adapter(store.adapters[name], ready=ready, copies=copies)) for name in page)
        # Serialized here: the framework would validate thousands of items a second time.
        return Response(AdapterList(data=items, next=following).model_dump_json(), media_type="application/json")

    @api.get("/v1/adapters/{lora_id:path}")
    async def adapter(lora_id: LoraId, response: Response, seen: seen_by) -> AdapterItem:
        """One adapter, with an ETag for a later change."""
        seen.require_adapter(lora_id)
        return _with_etag(registry.adapter(lora_id), response, seen, registry, views)

    return api


def _change_routes(keys: ApiKeys, registry: AdapterRegistry, reconciler: Reconciler, views: WireViews) -> APIRouter:
    """The routes that register, change, retry and delete adapters."""
    api = APIRouter(tags=["adapters"], dependencies=[Depends(requires(keys, "tenant-admin"))])
    store = reconciler.store
    seen_by = Annotated[TenantView, Depends(tenant_view_of(store))]

    @api.post("/v1/adapters", status_code=201, response_model=AdapterItem)
    async def register(
        written: Annotated[WrittenAdapter, Body(examples=[ADAPTER_EXAMPLE])],
        response: Response,
        caller: WhoCalls,
        seen: seen_by,
        dry_run: Annotated[bool, Query(description="fetch and verify the adapter without registering it")] = False,
    ) -> AdapterItem:
        """Register an adapter: 201; the same body again: 200; another source, digest or base model: 409 `immutable`.

        A new source is first checked with workers that may read it. A dry run inspects it only: 200.
        """
        spec = _spec_owned_by_caller(written, caller, reconciler)
        if dry_run:
            response.status_code = 200
            return await _dry_run(spec, registry, reconciler, views)
        await _require_readable_source(spec, registry, reconciler)
        adapter, is_new = registry.register(spec, caller.name)
        await reconciler.publish_change(("adapters", spec.lora_id))
        response.status_code = 201 if is_new else 200
        return _with_etag(adapter, response, seen, registry, views)

    @api.post("/v1/adapters:batch")
    async def batch(body: Annotated[AdapterBatch, Body(examples=[BATCH_EXAMPLE])], caller: WhoCalls) -> BatchAnswer:
        """Register many adapters; each is registered or refused on its own. Answers once they are stored."""
        with store.together():
            results = [_batch_result(registry, written, caller, reconciler) for written in body.adapters]
        await reconciler.publish_change(*(("adapters", written["lora_id"]) for written in body.adapters))
        return BatchAnswer(data=tuple(results))

    @api.post("/v1/adapters/{lora_id:path}/retry")
    async def retry(lora_id: LoraId, caller: WhoCalls, seen: seen_by) -> AdapterItem:
        """Drop the adapter's failures and quarantine, and try again. Answers once the change is stored."""
        owners.require_write(store, caller, "adapter", lora_id, "change")
        adapter = registry.unquarantine(lora_id, caller.name)
        reconciler.operations.failures.forget_adapter(lora_id)
        await reconciler.publish_change(("adapters", lora_id))
        return seen.adapter(views.adapter(adapter))

    @api.patch("/v1/adapters/{lora_id:path}")
    async def patch(
        lora_id: LoraId,
        body: Annotated[AdapterChanges, Body(examples=[PATCH_EXAMPLE])],
        response: Response,
        caller: WhoCalls,
        seen: seen_by,
        if_match: IfMatch = None,
    ) -> AdapterItem:
        """Change the named fields of policy, tenants and secret; in force at the next pass."""
        owners.require_patch(store, caller, lora_id, body)
        changed = registry.patch_adapter(lora_id, body, caller.name, if_match=if_match)
        await reconciler.publish_change(("adapters", lora_id))
        return _with_etag(changed, response, seen, registry, views)

    @api.delete(
        "/v1/adapters/{lora_id:path}",
        status_code=202,
        response_class=Response,
        responses={204: {"description": "gone already"}},
    )
    async def delete(lora_id: LoraId, caller: WhoCalls, if_match: IfMatch = None) -> Response:
        """Drain the adapter everywhere, unload it, delete it: 204 when that is done at once, else 202."""
        owners.require_write(store, caller, "adapter", lora_id, "change")
        registry.delete_adapter(lora_id, caller.name, if_match=if_match)
        reconciler.audit.note_requester(lora_id, caller.name)
        await reconciler.publish_change(("adapters", lora_id))
        if reconciler.is_settled:
            reconciler.finish_deletions()
            if lora_id in store.adapters:
                reconciler.run_pass()
            await store.wait_durable([("adapters", lora_id), ("tombstones", lora_id)])
        return Response(status_code=202 if lora_id in store.adapters else 204)

    return api


def _check_routes(keys: ApiKeys, registry: AdapterRegistry, reconciler: Reconciler) -> APIRouter:
    """The route that compares an adapter with its acceptance file; a publisher sends a new one by it."""
    api = APIRouter(tags=["adapters"], dependencies=[Depends(requires(keys, "register", "tenant-admin"))])

    @api.post("/v1/adapters/{lora_id:path}/check")
    async def check(lora_id: LoraId, caller: WhoCalls, body: AcceptanceQuestion | None = None) -> AcceptanceAnswer:
        """Compare each worker's answers with the adapter's acceptance file now; `require` unloads what is not equal."""
        owners.require_write(reconciler.store, caller, "adapter", lora_id, "change")
        content = (body and body.file) or ""
        if content:
            try:
                parse_acceptance(content.encode())
            except AcceptanceError as exc:
                raise OrchestratorRequestError(str(exc), code="acceptance_invalid", param="file") from exc
        return await reconciler.runner.check(registry.adapter(lora_id), content)

    return api


def _with_etag(
    adapter: RegisteredAdapter, response: Response, seen: TenantView, registry: AdapterRegistry, views: WireViews
) -> AdapterItem:
    """The adapter as the caller may see it; sets the response's ETag."""
    response.headers["etag"] = registry.adapter_etag(adapter)
    return seen.adapter(views.adapter(adapter))


def _matching_ids(
    wanted: AdapterListQuery, reconciler: Reconciler, ready: Mapping[str, Sequence[str]], seen: TenantView
) -> Sequence[str]:
    """lora_ids in order, of the adapters that the caller sees and that match all filters."""
    store = reconciler.store
    rows = store.adapter_ids
    if wanted.prefix:
        rows = rows[bisect_left(rows, wanted.prefix) : bisect_left(rows, wanted.prefix + chr(0x10FFFF))]
    if wanted.worker is not None:
        rows = [name for name in rows if wanted.worker in ready.get(name, ())]
    tests: list[Callable[[RegisteredAdapter], bool]] = []
    if not seen.is_whole:
        tests.append(lambda adapter: seen.sees_tenants(adapter.tenants))
    if wanted.base_model is not None:
        tests.append(lambda adapter: adapter.base_model == wanted.base_model)
    if wanted.tenant is not None:
        tests.append(lambda adapter: adapter.tenants is None or wanted.tenant in seen.known_tenants(adapter.tenants))
    if wanted.quarantined is not None:
        tests.append(
            lambda adapter: (reconciler.queries.quarantine_reason(adapter.lora_id) is not None) == wanted.quarantined
        )
    if wanted.has_error is not None:
        maybe_troubled = reconciler.queries.troubled_ids()
        tests.append(lambda adapter: _has_error(adapter, maybe_troubled, reconciler) == wanted.has_error)
    if wanted.state is not None:
        tests.append(lambda adapter: reconciler.queries.adapter_state(adapter, ready) == wanted.state)
    return [name for name in rows if all(test(store.adapters[name]) for test in tests)] if tests else rows


def _has_error(adapter: RegisteredAdapter, maybe_troubled: Container[str], reconciler: Reconciler) -> bool:
    """Whether a reason is known why the adapter lacks copies. `maybe_troubled`: ids that may have one."""
    if adapter.lora_id not in maybe_troubled and adapter.quarantine is None:
        return False
    return reconciler.queries.last_error(adapter.lora_id) is not None


async def _require_readable_source(spec: AdapterSpec, registry: AdapterRegistry, reconciler: Reconciler) -> None:
    """Raise OrchestratorRequestError when the adapter is new and none of the workers asked may read its source."""
    if registry.equal_registration(spec) is not None:
        return
    ready = [worker for worker in reconciler.queries.observe().workers.values() if worker.state == "ready"]
    able = [worker.id for worker in ready if spec.base_model in (None, worker.base_model)]
    able.sort(key=lambda worker_id: rendezvous_score(spec.lora_id, worker_id), reverse=True)
    why = await reconciler.runner.forbidden_source_reason(spec.source, able[:_SOURCE_CHECKS])
    if why is not None:
        raise OrchestratorRequestError(f"no worker may read the source: {why}", code=why.code, param="source")


async def _dry_run(
    spec: AdapterSpec, registry: AdapterRegistry, reconciler: Reconciler, views: WireViews
) -> AdapterItem:
    """Inspect the adapter on its home worker without registering it; a known adapter is returned as it is.

    Raises OrchestratorUnavailable if no worker is ready or it fails, OrchestratorRequestError if the adapter fits none.
    """
    known = registry.equal_registration(spec)
    if known is not None:
        return views.adapter(known)
    adapter = RegisteredAdapter(spec=spec)
    workers = reconciler.queries.observe().workers.values()
    able = [
        worker
        for worker in workers
        if worker.state == "ready" and (spec.base_model is None or spec.base_model == worker.base_model)
    ]
    if not able:
        raise OrchestratorUnavailable(
            f"no ready worker serves {spec.base_model or 'anything'}, so the adapter cannot be inspected"
        )
    home = max(able, key=lambda worker: (rendezvous_score(spec.lora_id, worker.id), worker.id))
    try:
        found = await reconciler.runner.inspect_unregistered(adapter, home.id)
    except InvalidAdapter as exc:
        raise OrchestratorRequestError(f"preflight failed: {exc}", code=exc.code, param="source") from exc
    except WorkerFailed as exc:
        raise OrchestratorUnavailable(f"worker {home.id} could not inspect it: {exc}", code=exc.code) from exc
    misfit = placement_misfit(found.base_model, found.rank or 0, limits_by_base_model(workers))
    if misfit is not None:
        raise OrchestratorRequestError(f"preflight failed: {misfit.message}", code=misfit.code, param="source")
    return views.adapter(found, ready={})


def _spec_owned_by_caller(written: Mapping[str, Any], caller: Caller, reconciler: Reconciler) -> AdapterSpec:
    """The spec as the caller may register it, with a source whose bytes it may use. Raises OrchestratorRequestError."""
    owners.require_own_bytes(reconciler.store, caller, written["source"])
    return owners.owned_spec(reconciler.store, caller, written)


def _batch_result(
    registry: AdapterRegistry, written: Mapping[str, Any], caller: Caller, reconciler: Reconciler
) -> BatchResult:
    """Register one adapter of a batch; errors become its result."""
    lora_id = written["lora_id"]
    try:
        _, is_new = registry.register(_spec_owned_by_caller(written, caller, reconciler), caller.name)
    except OrchestratorError as exc:
        seen = TenantView(caller, reconciler.store)
        error = seen.text(str(exc), given_names(caller, [lora_id]))
        return BatchResult(lora_id=lora_id, status=exc.status, code=exc.code, error=error)
    return BatchResult(lora_id=lora_id, status=201 if is_new else 200)
