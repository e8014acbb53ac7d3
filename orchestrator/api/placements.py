"""Routes for placements: the global policy, the list, what-if plans, a pass on request, and orphans."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Query, Response
from pydantic import BaseModel

from lorafleet.keys.auth import ApiKeys, requires
from orchestrator.api.tenancy import Actor, Cursor, IfMatch, Limit, TenantView, page_after, tenant_view_of
from orchestrator.api.views import WireViews
from orchestrator.core.errors import NotFound, OrchestratorRequestError
from orchestrator.core.placement.what_if import Hypothesis, PlacementInputs, what_if
from orchestrator.intent.registry import AdapterRegistry, changed_policy, changed_spec
from orchestrator.model.adapter_documents import AdoptRequest, BatchAnswer, OrphanList
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.cards import AdapterCard
from orchestrator.model.changes import PolicyChanges
from orchestrator.model.plans import PlacementList, Plan, PlanRequest
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import Intent
from orchestrator.reconcile.orphans import adopt, orphans
from orchestrator.reconcile.reconciler import Reconciler

PLAN_EXAMPLE = {
    "demand": {"sql-expert/v1": {"factor": 10}},
    "workers_gone": ["w0"],
    "workers_more": [{"like": "w1", "count": 2}],
    "policy": {"reserve_slots": 0},
    "adapter_policies": {"legal/v2": {"min_replicas": 2}},
    "adapters": [{"lora_id": "tax/v1", "source": "file:///srv/adapters/tax/v1", "policy": {"loading": "eager"}}],
}


class PlacementListQuery(BaseModel):
    """Filters of the list of placements."""

    lora_id: str | None = None
    worker_id: str | None = None
    state: str | None = None
    desired: bool | None = None
    limit: Limit = 1000
    cursor: Cursor = None


def placement_routes(keys: ApiKeys, reconciler: Reconciler, views: WireViews, clock: Callable[[], float]) -> APIRouter:
    """The routes that list placements, plan or run a pass, and list or adopt orphans.

    Reads and plans need scope `view`, a pass `operate`, an adoption `admin`.
    """
    api = APIRouter(tags=["placements"])
    view = [Depends(requires(keys, "view"))]
    operate = [Depends(requires(keys, "operate"))]
    admin = [Depends(requires(keys, "admin"))]
    reports, store = reconciler.reports, reconciler.store
    seen_by = Annotated[TenantView, Depends(tenant_view_of(store))]
    # One plan at a time: plans share one core, and the lease needs a free thread of the pool.
    plan_lock = asyncio.Lock()

    @api.get("/v1/placements", dependencies=view)
    async def placements(wanted: Annotated[PlacementListQuery, Query()], seen: seen_by) -> PlacementList:
        """Present and desired placements that match all filters."""
        asked = wanted.model_dump(include={"lora_id", "worker_id", "state", "desired"}, exclude_none=True)
        rows = {
            f"{row.lora_id} {row.worker_id}": row
            for row in views.placements()
            if seen.sees_adapter(row.lora_id) and all(getattr(row, name) == value for name, value in asked.items())
        }
        page, following = page_after(sorted(rows), wanted.limit, wanted.cursor)
        return PlacementList(data=tuple(rows[key] for key in page), next=following)

    @api.post("/v1/placements/plan", dependencies=view)
    async def plan(seen: seen_by, ask: Annotated[PlanRequest | None, Body(examples=[PLAN_EXAMPLE])] = None) -> Plan:
        """The actions that passes would take, with reasons and cost; starts nothing.

        Without a body: of the next pass. With one: of all passes under its assumptions, until nothing is left to do.
        """
        if ask is None:
            desired, actions = reconciler.planned_actions()
            return seen.plan(views.plan(actions, desired))
        for lora_id in (*ask.demand, *ask.adapter_policies, *(spec.lora_id for spec in ask.adapters)):
            if lora_id in store.adapters:
                seen.require_adapter(lora_id)
        inputs = _placement_inputs(reconciler, clock())
        hypothesis = _plan_hypothesis(ask, inputs)
        # In a thread: on a large fleet this takes seconds, and heartbeats must not wait for it.
        async with plan_lock:
            outcome = await asyncio.to_thread(what_if, inputs, hypothesis, passes=ask.passes)
        return seen.plan(views.what_if_plan(outcome))

    @api.post("/v1/rebalance", dependencies=operate)
    async def rebalance() -> Plan:
        """Run a pass now; returns the actions that it started."""
        actions = reconciler.run_pass()
        return views.plan(actions, reconciler.queries.last_pass.desired)

    @api.get("/v1/orphans", dependencies=view)
    async def list_orphans(seen: seen_by, limit: Limit = 1000, cursor: Cursor = None) -> OrphanList:
        """Adapters that workers hold and that are not registered; they serve no requests and are not removed."""
        # Orphans have no tenants, so a tenant sees none.
        found = orphans(reports, store) if seen.is_whole else []
        rows = {f"{item.lora_id} {item.card.digest} {item.engine_name}": item for item in found}
        page, following = page_after(sorted(rows), limit, cursor)
        return OrphanList(data=tuple(rows[key] for key in page), next=following)

    @api.post("/v1/orphans/adopt", dependencies=admin)
    async def adopt_orphans(
        actor: Actor,
        ask: Annotated[AdoptRequest, Body(examples=[{"lora_ids": ["sql-expert/v1"]}])] = AdoptRequest(),  # noqa: B008
    ) -> BatchAnswer:
        """Register orphans as they are, all or those named; one result each. Answers once they are stored.

        Only those that another client loaded are loaded again, on as many workers as had them, under the fleet's name.
        """
        foreign = {item.lora_id: len(item.workers) for item in orphans(reports, store) if item.is_foreign}
        results = adopt(ask, reports, store, actor)
        await reconciler.publish_change(*(("adapters", result.lora_id) for result in results))
        for lora_id in [each.lora_id for each in results if each.error is None and each.lora_id in foreign]:
            replicas = reconciler.allowed_replicas(lora_id, foreign[lora_id])
            reconciler.ensure_replicas(lora_id, replicas, actor)
        return BatchAnswer(data=tuple(results))

    return api


def _placement_inputs(reconciler: Reconciler, now: float) -> PlacementInputs:
    """The inputs of a pass now, copied so that a thread may use them."""
    store, observed = reconciler.store, reconciler.queries.observe()
    stored = Intent(
        adapters=dict(store.adapters), tombstones=dict(store.tombstones), next_numbers=dict(store.next_numbers)
    )
    return PlacementInputs(
        intent=reconciler.wanted_intent(stored, observed),
        observed=replace(observed, memory=reconciler.queries.last_pass.desired.memory),
        demand=reconciler.demand.snapshot(now),
        policy=store.rules,
        now=now,
    )


def _plan_hypothesis(ask: PlanRequest, inputs: PlacementInputs) -> Hypothesis:
    """The hypothesis of a plan request. Raises NotFound, OrchestratorRequestError."""
    workers, known = inputs.observed.workers, inputs.intent.adapters
    for worker_id in (*ask.workers_gone, *(more.like for more in ask.workers_more if more.like is not None)):
        if worker_id not in workers:
            known_ids = ", ".join(sorted(workers)) or "none"
            raise NotFound(f"worker {worker_id!r} has not registered; known: {known_ids}", code="worker_not_found")
    added = {
        spec.lora_id: RegisteredAdapter(
            spec=spec, card=AdapterCard(rank=spec.rank or 0, size_bytes=spec.size_bytes or 0)
        )
        for spec in ask.adapters
    }
    for lora_id in (*ask.demand, *ask.adapter_policies):
        if lora_id not in known and lora_id not in added:
            raise NotFound(f"adapter {lora_id!r} is not registered, and not among `adapters`", param=lora_id)
    for lora_id, policy in ask.adapter_policies.items():
        adapter = added.get(lora_id) or known[lora_id]
        added[lora_id] = replace(adapter, spec=changed_spec(adapter.spec, {"policy": policy}))
    ready = [worker.id for worker in workers.values() if worker.state == "ready"]
    if ask.workers_more and not ready:
        raise OrchestratorRequestError(
            "no worker is ready that others could be like; name one in `like`", param="workers_more"
        )
    return Hypothesis(
        factors={name: change.factor for name, change in ask.demand.items() if change.factor is not None},
        rates={name: change.requests_per_s for name, change in ask.demand.items() if change.requests_per_s is not None},
        workers_gone=ask.workers_gone,
        workers_more=[(more.like or min(ready), more.count) for more in ask.workers_more],
        policy=changed_policy(inputs.policy, ask.policy) if ask.policy else None,
        adapters=added,
    )


POLICY_EXAMPLE = {"loading": "lazy", "reserve_slots": 0, "loads_per_worker": 1}


def policy_routes(keys: ApiKeys, registry: AdapterRegistry, reconciler: Reconciler) -> APIRouter:
    """The routes that read, replace and change the global policy. Reads need scope `view`, changes `operate`."""
    api = APIRouter(tags=["policy"])
    view = [Depends(requires(keys, "view"))]
    operate = [Depends(requires(keys, "operate"))]

    @api.get("/v1/policy", dependencies=view)
    async def get_policy(response: Response) -> PlacementPolicy:
        """The global placement policy, with an ETag for a later change."""
        response.headers["etag"] = registry.policy_etag()
        return registry.policy()

    @api.put("/v1/policy", dependencies=operate)
    async def put_policy(
        policy: Annotated[PlacementPolicy, Body(examples=[POLICY_EXAMPLE])],
        response: Response,
        actor: Actor,
        if_match: IfMatch = None,
    ) -> PlacementPolicy:
        """Replace the policy; missing fields take their defaults. Needs If-Match: the ETag of the last read, or *."""
        before = registry.policy_etag()
        return await _policy_written(registry.put_policy(policy, if_match, actor), before, response)

    @api.patch("/v1/policy", dependencies=operate)
    async def patch_policy(
        changes: Annotated[PolicyChanges, Body(examples=[{"loading": "eager"}])],
        response: Response,
        actor: Actor,
        if_match: IfMatch = None,
    ) -> PlacementPolicy:
        """Change the named fields of the policy. Answers once a change is stored."""
        before = registry.policy_etag()
        return await _policy_written(registry.patch_policy(changes, if_match, actor), before, response)

    async def _policy_written(policy: PlacementPolicy, before: str, response: Response) -> PlacementPolicy:
        """Set the response's ETag and, if the policy has changed, publish the change; returns the policy."""
        response.headers["etag"] = registry.policy_etag()
        if response.headers["etag"] != before:
            reconciler.catalog.emit_event("policy_changed")
            await reconciler.publish_change(("policy", ""))
        return policy

    return api
