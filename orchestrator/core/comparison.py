"""The targets of an alias side by side, without a rollout: by the rule of a rollout, on past traffic. Pure."""

from collections.abc import Mapping

from orchestrator.core.rollout import regression_reason, tally_of
from orchestrator.model.served_names import RolloutSpec, Targets
from orchestrator.model.usage import RequestCounts

GUARD = RolloutSpec(to="any")
"""The limits of a rollout that names none."""


def baseline_of(targets: Targets) -> str:
    """The target with the largest weight, of equal ones the first."""
    return max(targets, key=lambda target: target.weight).lora_id


def worse_targets(targets: Targets, traffic: Mapping[str, RequestCounts]) -> dict[str, str]:
    """lora_id -> why this target is worse than the baseline, by `regression_reason`; only targets that are."""
    baseline = baseline_of(targets)
    if baseline not in traffic:
        return {}
    least, old = GUARD.min_requests, tally_of(traffic[baseline])
    if old.requests < least:
        return {}
    found = {}
    for lora_id in (target.lora_id for target in targets):
        if lora_id != baseline and lora_id in traffic:
            reason = regression_reason(GUARD, old, tally_of(traffic[lora_id]))
            if reason is not None:
                found[lora_id] = reason
    return found
