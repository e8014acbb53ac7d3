"""REST: translates bodies and answers. Every decision is made elsewhere.

`lora_id` may contain '/', so the routes that end in a word (`…/ensure`) come before the bare `{lora_id:path}`.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, Query, Response
from fastapi.responses import StreamingResponse

from lorafleet.auth import Keys, requires
from orchestrator.catalog import alias_item
from orchestrator.core.demand import Use
from orchestrator.core.errors import (
    Conflict,
    NotFound,
    OrchestratorError,
    Permanent,
    RequestError,
    Transient,
    Unavailable,
)
from orchestrator.core.placement import rendezvous
from orchestrator.core.plan import Action
from orchestrator.core.state import OCCUPYING, Adapter, Want
from orchestrator.fleet import state_of
from orchestrator.metrics import Counts, Metrics
from orchestrator.reconcile import Reconciler
from orchestrator.registry import Registry, new_adapter, policy_of
from orchestrator.wire import (
    ActionItem,
    AdapterBatch,
    AdapterItem,
    AdapterList,
    AdapterPatch,
    AdapterSpec,
    AliasItem,
    AliasList,
    AliasSpec,
    BatchAnswer,
    BatchResult,
    Catalog,
    EnsureAnswer,
    EnsureRequest,
    Heartbeat,
    HeartbeatAnswer,
    PlacementItem,
    PlacementList,
    Plan,
    Policy,
    Replicas,
    Status,
    UsageAnswer,
    UsageReport,
    WorkerDrain,
    WorkerItem,
    WorkerList,
)

Limit = Annotated[int, Query(ge=1, le=10_000, description="most items in one answer")]
Cursor = Annotated[str | None, Query(description="`next` of the answer before")]
IfMatch = Annotated[str | None, Header(description="ETag of the policy that this change is based on")]

ADAPTER_EXAMPLE = {
    "lora_id": "sql-expert/v1",
    "source": "file:///srv/adapters/sql-expert/v1",
    "base_model": "tiny-qwen",
    "policy": {"loading": "eager", "min_replicas": 2},
    "tenants": ["acme"],
}
ALIAS_EXAMPLE = {"targets": [{"lora_id": "sql-expert/v1", "weight": 9}, {"lora_id": "sql-expert/v2", "weight": 1}]}
ENSURE_EXAMPLE = {"replicas": 1, "wait_s": 10.0}
POLICY_EXAMPLE = {"loading": "lazy", "reserve_slots": 1, "loads_per_worker": 1}
USAGE_EXAMPLE = {
    "router_id": "router-0",
    "boot_id": "7c1e",
    "seq": 12,
    "revision_seen": 1794900000000,
    "uses": [{"worker_id": "w0", "engine_name": "sql-expert/v1@3f9a1c2b77aa", "requests": 40, "in_flight": 2}],
}


class Views:
    """What is stored and what was reported, as the wire shows it."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._it = reconciler

    def adapter(self, adapter: Adapter, *, ready: Mapping[str, Sequence[str]] | None = None) -> AdapterItem:
        """`ready`: lora_id -> workers, made once by whoever shows many adapters."""
        if ready is None:
            ready = {adapter.lora_id: self._it.ready_on(adapter.lora_id)}
        workers = ready.get(adapter.lora_id, ())
        return AdapterItem.model_validate(
            {
                "lora_id": adapter.lora_id,
                "digest": adapter.digest,
                "base_model": adapter.base_model,
                "rank": adapter.rank,
                "size_bytes": adapter.size_bytes,
                "source": adapter.source,
                "state": self._it.state_of(adapter, ready),
                "replicas": Replicas(desired=self.desired(adapter.lora_id), ready=len(workers)),
                "workers": workers,
                "policy": policy_of(adapter),
                "tenants": adapter.tenants,
                "error": self._it.last_error(adapter.lora_id),
            }
        )

    def desired(self, lora_id: str) -> int:
        desired = self._it.view.desired
        return max(desired.targets.get(lora_id, 0), len(desired.replicas.get(lora_id, ())))

    def worker(self, worker_id: str) -> WorkerItem:
        entry = self._it.fleet.entries.get(worker_id)
        if entry is None:
            raise NotFound(f"worker {worker_id!r} has not registered", code="worker_not_found")
        report, store = entry.report, self._it.store
        held = [lora for lora in report.lora.loaded_loras if lora.state in OCCUPYING]
        orphans = [
            lora.lora_id
            for lora in held
            if (known := store.adapters.get(lora.lora_id)) is None
            or (known.digest is not None and known.digest != lora.digest)
        ]
        return WorkerItem.model_validate(
            {
                "id": worker_id,
                "agent_url": report.agent_url,
                "engine_url": report.transport.engine_url,
                "base_model": report.model.base_model,
                "state": state_of(entry, store.workers.get(worker_id)),
                "zone": report.zone,
                "node": report.node,
                "capacity": report.lora.capacity.model_dump() | {"max_lora_rank": report.lora.max_lora_rank},
                "adapters": sorted(lora.lora_id for lora in held),
                "orphans": sorted(orphans),
            }
        )

    def placements(self) -> list[PlacementItem]:
        """What is there and what should be, by lora_id and worker."""
        desired = {(lora_id, w) for lora_id, workers in self._it.view.desired.replicas.items() for w in workers}
        rows: dict[tuple[str, str], PlacementItem] = {}
        for worker in self._it.observe().workers.values():
            for held in worker.held.values():
                pair = (held.lora_id, worker.id)
                rows[pair] = PlacementItem(
                    lora_id=held.lora_id,
                    digest=held.digest,
                    worker_id=worker.id,
                    state=held.state,
                    location=held.location,
                    desired=pair in desired,
                )
        for pair in desired - rows.keys():
            adapter = self._it.store.adapters.get(pair[0])
            digest = None if adapter is None else adapter.digest
            rows[pair] = PlacementItem(
                lora_id=pair[0], digest=digest, worker_id=pair[1], state="remote", location="remote", desired=True
            )
        return [rows[pair] for pair in sorted(rows)]

    def plan(self, actions: Iterable[Action], unplaced: Iterable[str]) -> Plan:
        items = [
            ActionItem(
                operation=action.operation,
                lora_id=action.lora_id,
                worker_id=action.worker_id,
                reason=action.reason,
                evict=action.evict or action.evict_after,
            )
            for action in actions
        ]
        return Plan(actions=tuple(items), unplaced=tuple(sorted(unplaced)))

    def ensured(self, adapter: Adapter, replicas: int) -> EnsureAnswer:
        ready = tuple(self._it.ready_on(adapter.lora_id))
        expected_s = 0.0 if len(ready) >= replicas else self._it.expected_s(adapter.lora_id)
        return EnsureAnswer.model_validate(
            {
                "lora_id": adapter.lora_id,
                "digest": adapter.digest,
                "state": self._it.state_of(adapter, {adapter.lora_id: ready}),
                "ready": ready,
                "loading": self._it.loading_on(adapter.lora_id),
                "expected_s": expected_s,
                "error": None if len(ready) >= replicas else self._it.last_error(adapter.lora_id),
            }
        )

    def counts(self) -> Counts:
        """lora_id -> (ready, wanted), of every adapter that is somewhere or should be."""
        desired = self._it.view.desired
        ready = self._it.ready_table()
        ids = desired.replicas.keys() | desired.targets.keys()
        return {lora_id: (len(ready.get(lora_id, ())), self.desired(lora_id)) for lora_id in ids}

    def workers_by_state(self) -> dict[str, int]:
        counts = dict.fromkeys(("starting", "ready", "cordoned", "draining", "unmanaged", "lost"), 0)
        for worker_id, entry in self._it.fleet.entries.items():
            counts[state_of(entry, self._it.store.workers.get(worker_id))] += 1
        return counts


def build_router(
    *,
    keys: Keys,
    registry: Registry,
    reconciler: Reconciler,
    metrics: Metrics,
    is_stopping: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> APIRouter:
    """All routes."""
    views = Views(reconciler)
    metrics.observe(views.counts, views.workers_by_state)
    api = APIRouter()
    api.include_router(_open(reconciler, metrics, is_stopping))
    api.include_router(_for_routers(keys, registry, reconciler, views, is_stopping, clock))
    api.include_router(_workers(keys, reconciler, views))
    api.include_router(_adapters(keys, registry, reconciler, views))
    api.include_router(_aliases_and_policy(keys, registry, reconciler))
    api.include_router(_fleet(keys, registry, reconciler, views))
    return api


def _open(reconciler: Reconciler, metrics: Metrics, is_stopping: Callable[[], bool]) -> APIRouter:
    api = APIRouter(tags=["health"])

    def status(word: str) -> Status:
        return Status(status=word, epoch=reconciler.store.epoch, revision=reconciler.catalog.revision)

    @api.get("/health")
    async def health() -> Status:
        """Alive."""
        return status("ok")

    @api.get("/ready")
    async def ready() -> Status:
        """Synced: the store is read and the fleet has had time to speak. 503 before that, and while stopping."""
        if is_stopping():
            raise Unavailable("stopping", code="stopping")
        if not reconciler.is_settled:
            raise Unavailable("started, listening to the fleet before anything is decided", code="starting")
        return status("ready")

    @api.get("/metrics")
    async def prometheus() -> Response:
        """Prometheus text."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return api


def _for_routers(
    keys: Keys,
    registry: Registry,
    reconciler: Reconciler,
    views: Views,
    is_stopping: Callable[[], bool],
    clock: Callable[[], float],
) -> APIRouter:
    api = APIRouter(tags=["routers"], dependencies=[Depends(requires(keys, "load"))])
    catalog, settings = reconciler.catalog, reconciler.settings

    @api.get("/v1/catalog", response_model=Catalog)
    async def get_catalog(if_none_match: Annotated[str | None, Header()] = None) -> Response:
        """Everything a router follows, at one revision; 304 when the ETag still holds."""
        reconciler.refresh_catalog()
        revision, body = catalog.body()
        headers = {"etag": f'"{revision}"', "cache-control": "no-cache"}
        seen = {tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")}
        if headers["etag"] in seen:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)

    @api.get("/v1/events")
    async def events(
        since: Annotated[int | None, Query(description="last revision known")] = None,
        last_event_id: Annotated[int | None, Header()] = None,
    ) -> StreamingResponse:
        """Events after a revision, as SSE; 410 when they are no longer kept: fetch the catalog, follow from there."""
        reconciler.refresh_catalog()
        start = last_event_id if last_event_id is not None else since
        start = catalog.revision if start is None else start
        catalog.since(start)
        stream = catalog.follow(start, keep_alive_s=settings.keep_alive_s, is_stopping=is_stopping)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})

    @api.post("/v1/usage")
    async def usage(report: Annotated[UsageReport, Body(examples=[USAGE_EXAMPLE])]) -> UsageAnswer:
        """A router's counts. Repeats and late ones are recognised by `seq` and change nothing."""
        uses = [
            Use(
                lora_id=use.engine_name.rpartition("@")[0],
                worker_id=use.worker_id,
                engine_name=use.engine_name,
                requests=use.requests,
                in_flight=use.in_flight,
            )
            for use in report.uses
            if "@" in use.engine_name
        ]
        accepted = reconciler.demand.report(
            report.router_id, report.boot_id, report.seq, report.revision_seen, uses, clock()
        )
        if accepted and reconciler.has_drains:
            reconciler.poke()  # it may have been the last word that a drain waited for
        return UsageAnswer(accepted=accepted, revision=catalog.revision)

    @api.post("/v1/adapters/{lora_id:path}/ensure")
    async def ensure(
        lora_id: str,
        ask: Annotated[EnsureRequest, Body(examples=[ENSURE_EXAMPLE])] = EnsureRequest(),  # noqa: B008
    ) -> EnsureAnswer:
        """Have the adapter somewhere; answers when it is, or after `wait_s` with what is known by then."""
        return await _ensured(
            lora_id, ask, registry=registry, reconciler=reconciler, views=views, is_stopping=is_stopping, clock=clock
        )

    return api


def _workers(keys: Keys, reconciler: Reconciler, views: Views) -> APIRouter:
    api = APIRouter(tags=["fleet"], dependencies=[Depends(requires(keys, "load"))])

    @api.get("/v1/workers")
    async def workers(limit: Limit = 1000, cursor: Cursor = None) -> WorkerList:
        """The fleet."""
        ids = sorted(reconciler.fleet.entries)
        page, following = _page(ids, limit, cursor)
        return WorkerList(data=tuple(views.worker(worker_id) for worker_id in page), next=following)

    @api.get("/v1/workers/{worker_id}")
    async def worker(worker_id: str) -> WorkerItem:
        """One worker."""
        return views.worker(worker_id)

    return api


def _adapters(keys: Keys, registry: Registry, reconciler: Reconciler, views: Views) -> APIRouter:
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
        page, following = _page(rows, limit, cursor)
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


def _aliases_and_policy(keys: Keys, registry: Registry, reconciler: Reconciler) -> APIRouter:
    api = APIRouter(dependencies=[Depends(requires(keys, "admin"))])
    store = reconciler.store

    @api.get("/v1/aliases", tags=["aliases"])
    async def aliases(limit: Limit = 1000, cursor: Cursor = None) -> AliasList:
        """Aliases by name."""
        page, following = _page(store.alias_names, limit, cursor)
        return AliasList(data=tuple(alias_item(name, store.aliases[name]) for name in page), next=following)

    @api.put("/v1/aliases/{name:path}", tags=["aliases"], response_model=AliasItem)
    async def put_alias(
        name: str, spec: Annotated[AliasSpec, Body(examples=[ALIAS_EXAMPLE])], response: Response
    ) -> AliasItem:
        """Point a name at adapters: 201 when new, else 200."""
        response.status_code = 201 if registry.put_alias(name, spec) else 200
        reconciler.changed()
        return alias_item(name, store.aliases[name])

    @api.get("/v1/aliases/{name:path}", tags=["aliases"])
    async def get_alias(name: str) -> AliasItem:
        """One alias."""
        return alias_item(name, registry.alias(name))

    @api.delete("/v1/aliases/{name:path}", tags=["aliases"], status_code=204)
    async def drop_alias(name: str) -> Response:
        """Forget the name; its adapters stay."""
        registry.drop_alias(name)
        reconciler.changed()
        return Response(status_code=204)

    @api.get("/v1/policy", tags=["policy"])
    async def get_policy(response: Response) -> Policy:
        """The global placement policy, with an ETag for a later change."""
        response.headers["etag"] = registry.policy_etag()
        return registry.policy()

    @api.put("/v1/policy", tags=["policy"])
    async def put_policy(
        policy: Annotated[Policy, Body(examples=[POLICY_EXAMPLE])], response: Response, if_match: IfMatch = None
    ) -> Policy:
        """Replace it; what is left out takes its default."""
        return _policy_written(registry.put_policy(policy, if_match), response)

    @api.patch("/v1/policy", tags=["policy"])
    async def patch_policy(
        changes: Annotated[dict[str, Any], Body(examples=[{"loading": "eager"}])],
        response: Response,
        if_match: IfMatch = None,
    ) -> Policy:
        """Change what is named, keep the rest."""
        return _policy_written(registry.patch_policy(changes, if_match), response)

    def _policy_written(policy: Policy, response: Response) -> Policy:
        reconciler.catalog.emit("policy_changed")
        reconciler.changed()
        response.headers["etag"] = registry.policy_etag()
        return policy

    return api


def _fleet(keys: Keys, registry: Registry, reconciler: Reconciler, views: Views) -> APIRouter:
    api = APIRouter(tags=["fleet"], dependencies=[Depends(requires(keys, "admin"))])

    @api.post("/v1/workers/register")
    async def heartbeat(body: Heartbeat) -> HeartbeatAnswer:
        """An agent's report; the answer says how soon to send the next."""
        reconciler.hear(body.metadata)
        return HeartbeatAnswer(
            epoch=reconciler.store.epoch,
            revision=reconciler.catalog.revision,
            interval_s=reconciler.settings.heartbeat_interval_s,
        )

    @api.post("/v1/workers/{worker_id}/cordon")
    async def cordon(worker_id: str) -> WorkerItem:
        """Keep what it has, give it nothing new."""
        return _set_worker(worker_id, "cordoned")

    @api.post("/v1/workers/{worker_id}/uncordon")
    async def uncordon(worker_id: str) -> WorkerItem:
        """Use it again; also takes back a drain that has not reached the agent."""
        return _set_worker(worker_id, None)

    @api.post("/v1/workers/{worker_id}/drain")
    async def drain(worker_id: str, body: WorkerDrain = WorkerDrain()) -> WorkerItem:  # noqa: B008
        """Move its adapters elsewhere, make before break, then have it take no more requests."""
        deadline_s = reconciler.store.rules.drain_deadline_s if body.deadline_s is None else body.deadline_s
        return _set_worker(worker_id, "draining", drain_s=deadline_s)

    def _set_worker(worker_id: str, state: str | None, *, drain_s: float | None = None) -> WorkerItem:
        registry.set_worker(worker_id, state, drain_s=drain_s)
        reconciler.undrained(worker_id)
        reconciler.changed()
        return views.worker(worker_id)

    @api.get("/v1/placements")
    async def placements(
        limit: Limit = 1000, cursor: Cursor = None, lora_id: str | None = None, worker_id: str | None = None
    ) -> PlacementList:
        """What is where, and what should be."""
        rows = {
            f"{row.lora_id} {row.worker_id}": row
            for row in views.placements()
            if lora_id in (None, row.lora_id) and worker_id in (None, row.worker_id)
        }
        page, following = _page(sorted(rows), limit, cursor)
        return PlacementList(data=tuple(rows[key] for key in page), next=following)

    @api.post("/v1/placements/plan")
    async def plan() -> Plan:
        """What the next pass would do, and why; does nothing."""
        desired, actions = reconciler.plan()
        return views.plan(actions, desired.unplaced)

    @api.post("/v1/rebalance")
    async def rebalance() -> Plan:
        """One pass now; answers with what it started."""
        actions = reconciler.run_pass()
        return views.plan(actions, reconciler.view.desired.unplaced)

    return api


async def _ensured(
    lora_id: str,
    ask: EnsureRequest,
    *,
    registry: Registry,
    reconciler: Reconciler,
    views: Views,
    is_stopping: Callable[[], bool],
    clock: Callable[[], float],
) -> EnsureAnswer:
    replicas, deadline = reconciler.clipped(lora_id, ask.replicas or 1), clock() + ask.wait_s
    while True:
        adapter = registry.adapter(lora_id)
        if adapter.is_deleting:
            raise NotFound(f"adapter {lora_id!r} is being deleted", param="lora_id")
        if adapter.quarantine is not None:
            raise Conflict(f"{lora_id!r} failed: {adapter.quarantine}", code="adapter_failed", param="lora_id")
        left_s = deadline - clock()
        if len(reconciler.ready_on(lora_id)) >= replicas or is_stopping():
            return views.ensured(adapter, replicas)
        reconciler.ensure(lora_id, Want(replicas=replicas))
        if left_s <= 0:
            return views.ensured(adapter, replicas)
        # Looked at again each interval too: a replica that an agent reports need not make an event.
        await reconciler.catalog.changed.wait(min(left_s, reconciler.settings.pass_interval_s))


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


def _page(rows: Sequence[str], limit: int, cursor: str | None) -> tuple[Sequence[str], str | None]:
    """Rows after the cursor, which is itself a row: a page stays right while others come and go."""
    start = 0 if cursor is None else bisect_right(rows, cursor)
    page = list(rows[start : start + limit])
    return page, page[-1] if page and start + limit < len(rows) else None
