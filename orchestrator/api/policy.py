"""The global placement policy."""

from typing import Annotated

from fastapi import APIRouter, Body, Depends, Response

from lorafleet.keys.auth import ApiKeys, requires
from orchestrator.api.parameters import Actor, IfMatch
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.model.changes import PolicyChanges
from orchestrator.model.policy import PlacementPolicy
from orchestrator.reconcile.reconciler import Reconciler

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
