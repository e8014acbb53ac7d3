"""Routes for rollouts: an alias moves to another version in steps, and back on a regression."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Response

from lorafleet.keys.auth import ApiKeys, requires
from orchestrator.api.tenancy import TenantView, WhoCalls, tenant_view_of
from orchestrator.api.traffic import Range, traffic_total
from orchestrator.api.views import timestamp
from orchestrator.core.comparison import GUARD, baseline_of, worse_targets
from orchestrator.core.rollout import current_targets, regression_so_far
from orchestrator.intent import owners
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.model.aliases import (
    AliasItem,
    AliasPending,
    AliasStatus,
    RolloutItem,
    RolloutPatch,
    RolloutStatus,
    RolloutTally,
)
from orchestrator.model.names import AliasName
from orchestrator.model.served_names import (
    AliasSpec,
    RequestTally,
    Rollout,
    RolloutSpec,
    ServedName,
    Targets,
    weight_pairs,
)
from orchestrator.model.traffic import AliasComparison, ComparedTarget
from orchestrator.model.usage import RequestCounts
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.reconcile.served_names import NameMover
from orchestrator.traffic.book import TrafficBook

ROLLOUT_EXAMPLE = {
    "to": "sql-expert/v2",
    "steps": [{"weight": 0.05, "for_s": 600}, {"weight": 0.5, "for_s": 600}],
    "max_error_rate_increase": 0.02,
    "max_first_token_ratio": 1.5,
    "min_requests": 50,
}


def rollout_routes(keys: ApiKeys, registry: AdapterRegistry, reconciler: Reconciler, book: TrafficBook) -> APIRouter:
    """The routes; include them before those of the alias, whose name matches every path."""
    api = APIRouter(tags=["aliases"])
    view = [Depends(requires(keys, "view"))]
    change = [Depends(requires(keys, "tenant-admin"))]
    mover, store = reconciler.names, reconciler.store

    def item(name: str, rollout: Rollout) -> RolloutItem:
        """The rollout as wire model; the name may be gone by now."""
        present = store.names.get(name) or ServedName(name=name)
        return rollout_item(replace(present, rollout=rollout), rollout, mover)

    seen_by = Annotated[TenantView, Depends(tenant_view_of(store))]

    @api.post("/v1/aliases/{name:path}/rollout", dependencies=change, status_code=201, response_model=RolloutItem)
    async def start_rollout(
        name: AliasName,
        spec: Annotated[RolloutSpec, Body(examples=[ROLLOUT_EXAMPLE])],
        response: Response,
        caller: WhoCalls,
        seen: seen_by,
    ) -> RolloutItem:
        """Move the alias to another version in steps: 201; 200 when this rollout is in progress already."""
        owners.require_alias(store, caller, name, [spec.to], "change")
        registry.require_rollout_target(name, spec.to)
        rollout, is_new = mover.start_rollout(name, spec, caller.name)
        await reconciler.publish_change(("names", name))
        response.status_code = 201 if is_new else 200
        return seen.rollout(item(name, rollout))

    @api.get("/v1/aliases/{name:path}/rollout", dependencies=view)
    async def get_rollout(name: AliasName, seen: seen_by) -> RolloutItem:
        """The rollout in progress, or the last one."""
        seen.require_alias(name)
        registry.alias(name)
        return seen.rollout(item(name, mover.rollout_of(name)))

    @api.patch("/v1/aliases/{name:path}/rollout", dependencies=change)
    async def patch_rollout(name: AliasName, patch: RolloutPatch, caller: WhoCalls, seen: seen_by) -> RolloutItem:
        """Pause or resume the rollout. A paused one does not advance, but a regression still rolls it back."""
        owners.require_write(store, caller, "alias", name, "change")
        rollout = mover.set_paused(name, patch.paused, caller.name)
        await reconciler.publish_change(("names", name))
        return seen.rollout(item(name, rollout))

    @api.delete("/v1/aliases/{name:path}/rollout", dependencies=change)
    async def abort_rollout(name: AliasName, caller: WhoCalls, seen: seen_by) -> RolloutItem:
        """End the rollout: the alias gets its former targets at once."""
        owners.require_write(store, caller, "alias", name, "change")
        rollout = mover.abort_rollout(name, caller.name)
        await reconciler.publish_change(("names", name))
        return seen.rollout(item(name, rollout))

    @api.get("/v1/aliases/{name:path}/comparison", dependencies=view)
    async def comparison(name: AliasName, seen: seen_by, range_s: Range = 3600.0) -> AliasComparison:
        """The alias's targets side by side: all their requests in a range, and which is worse, as a rollout judges."""
        seen.require_alias(name)
        targets = registry.alias(name).targets
        found = await book.totals("adapter", range_s)
        traffic = {
            lora_id: found[lora_id].counts if lora_id in found else RequestCounts()
            for lora_id in (target.lora_id for target in targets)
            if seen.sees_traffic("adapter", lora_id)
        }
        return _alias_comparison(name, targets, traffic, range_s)

    return api


def _alias_comparison(
    name: str, targets: Targets, traffic: Mapping[str, RequestCounts], range_s: float
) -> AliasComparison:
    """The comparison as wire model; a target that `traffic` lacks has no figures."""
    whole, worse = sum(target.weight for target in targets), worse_targets(targets, traffic)
    return AliasComparison(
        name=name,
        range_s=range_s,
        baseline=baseline_of(targets),
        needed=GUARD.min_requests,
        data=tuple(
            ComparedTarget(
                lora_id=lora_id,
                weight=weight,
                share=round(weight / whole, 6) if whole else 0.0,
                total=traffic_total(lora_id, traffic[lora_id], range_s) if lora_id in traffic else None,
                worse=worse.get(lora_id, ""),
            )
            for lora_id, weight in weight_pairs(targets)
        ),
    )


def rollout_item(name: ServedName, rollout: Rollout, mover: NameMover) -> RolloutItem:
    """A rollout of the name as REST answers it, with its present weights, counts and missing replicas."""
    shares = dict(weight_pairs(current_targets(rollout)))
    new_share = sum(shares.get(lora_id, 0.0) for lora_id in rollout.new_ids) / sum(shares.values())
    status = RolloutStatus(
        before=rollout.before,
        to=rollout.after,
        state=rollout.phase,
        paused=rollout.paused_at is not None,
        steps=rollout.steps,
        step=rollout.step,
        weight=round(new_share, 6),
        began_at=timestamp(rollout.began_at),
        since=timestamp(rollout.since),
        lacks=dict(mover.missing_for(name)),
        old=_rollout_tally(rollout.old),
        new=_rollout_tally(rollout.new),
        needed=rollout.spec.min_requests if rollout.spec is not None else 0,
        reason=rollout.reason,
        worse=regression_so_far(rollout) or "",
    )
    return RolloutItem(name=name.name, spec=rollout.spec or _switch_spec(rollout), status=status)


def alias_item(name: ServedName, mover: NameMover) -> AliasItem:
    """The name as REST answers it: what was asked for, and where its requests go now."""
    rollout = name.rollout
    is_switch = rollout is not None and rollout.spec is None
    spec = _switch_spec(rollout) if rollout is not None and is_switch else AliasSpec(targets=name.asked_targets)
    pending = None
    if rollout is not None and is_switch and rollout.phase in ("placing", "failed"):
        pending = AliasPending(
            state="placing" if rollout.phase == "placing" else "failed",
            since=timestamp(rollout.began_at),
            deadline=timestamp(rollout.began_at + rollout.place_s),
            lacks=dict(mover.missing_for(name)),
            error=rollout.reason or None,
        )
    return AliasItem(name=name.name, spec=spec, status=AliasStatus(targets=name.targets, pending=pending))


def _switch_spec(rollout: Rollout) -> AliasSpec:
    """The change of the alias that this rollout makes."""
    return AliasSpec(targets=rollout.after, place_s=rollout.place_s)


def _rollout_tally(tally: RequestTally) -> RolloutTally:
    """A rollout's request counts, as REST answers them."""
    return RolloutTally(
        requests=round(tally.requests),
        errors=round(tally.errors),
        error_rate=tally.error_rate,
        first_tokens=round(tally.first_tokens),
        mean_first_token_s=tally.mean_first_token_s,
    )
