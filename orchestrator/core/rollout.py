"""Rollouts: an alias moves from old targets to new ones in steps: place, shift, watch, and roll back on a regression.

Make before break: before each step the targets that gain weight get replicas in proportion to their share of what the
old ones had, but no more than there are workers that can hold them. Only then does the alias shift. A switch is a
rollout of one step without a limits. All times are Unix times, because a rollout outlives the process that began it.

A new version is worse when, with at least `min_requests` of its requests over since the last shift,

- its error rate is above the old one's by more than the margin, and by more than chance explains: the lower bound of
  the difference (Newcombe's, from two Wilson scores, one-sided 99.5 %) is above 0. The comparison is repeated all the
  time: at 95 % it would roll back one sound version in five on a fleet in trouble, at 99.5 % one in fifty;
- or its mean first-token time is above the old one's by more than the ratio, with at least `min_requests` first tokens
  of each. Only sums are known, so this has no test for chance.

The baseline is the old version over the same time or, with too few requests in that, over all that is known of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor, sqrt

from orchestrator.model.served_names import (
    AliasTarget,
    Phase,
    RequestTally,
    Rollout,
    RolloutSpec,
    RolloutStep,
    Targets,
    traffic_shares,
)
from orchestrator.model.usage import RequestCounts

_LEAST_REQUESTS = 10
"""With fewer requests no rates are compared, even if `min_requests` is lower."""
_Z = 2.576
"""The normal distribution's 99.5 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutObservation:
    """What a rollout's next step is decided from.

    ready      lora_id -> number of workers that serve it
    most       lora_id -> replicas that its policy allows
    room       lora_id -> number of workers that can hold it, or do
    unusable   lora_id -> why it will not become ready until an operator acts
    unplaced   lora_id -> why it is not ready yet
    known      lora_ids that an agent has inspected
    old, new   request counts of old_ids and new_ids since the last observation
    """

    ready: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    room: Mapping[str, int] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)
    unplaced: Mapping[str, str] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    old: RequestTally = field(default_factory=RequestTally)
    new: RequestTally = field(default_factory=RequestTally)


def tally_of(counts: RequestCounts) -> RequestTally:
    """The counts that a rollout compares: of requests that an engine had, by what the engine did."""
    return RequestTally(
        requests=counts.sent,
        errors=counts.engine_errors,
        first_tokens=sum(counts.first_token.values()),
        first_token_s=counts.engine_first_token_s,
    )


def with_last_step(spec: RolloutSpec) -> RolloutSpec:
    """The spec; a last step of weight 1 and duration 0 is added where it is missing."""
    steps = spec.steps
    return spec if steps[-1].weight >= 1 else replace(spec, steps=(*steps, RolloutStep(1.0, 0.0)))


def targets_at(rollout: Rollout, step: int) -> Targets:
    """The alias's targets in the step with this index; -1: before the first step."""
    if step < 0:
        return rollout.before
    weight = rollout.steps[step].weight
    if weight >= 1:
        return rollout.after
    old, new = traffic_shares(rollout.before), traffic_shares(rollout.after)
    former_share = sum(share for name, share in old.items() if name in new)
    if weight <= former_share:
        return _targets_with_weights(old)
    rest = (1 - weight) / (1 - former_share)
    return _targets_with_weights({name: new[name] * weight if name in new else old[name] * rest for name in old | new})


def _targets_with_weights(shares: Mapping[str, float]) -> Targets:
    """Targets with these weights."""
    return tuple(AliasTarget(lora_id, weight) for lora_id, weight in shares.items())


def current_targets(rollout: Rollout) -> Targets:
    """The targets that the rollout gives its alias now; after its end the new ones if it is done, else the old ones."""
    if rollout.phase == "done":
        return rollout.after
    if not rollout.is_active:
        return rollout.before
    return targets_at(rollout, rollout.step if rollout.phase == "watching" else rollout.step - 1)


def replica_floors(rollout: Rollout) -> dict[str, int]:
    """lora_id -> minimum of replicas during the rollout: new targets for their step, old ones for a rollback.

    Empty for a rollout that is over or has no scale.
    """
    if not rollout.is_active or not rollout.scale:
        return {}
    found: dict[str, int] = {}
    for targets in (rollout.before, targets_at(rollout, rollout.step)):
        for lora_id, share in traffic_shares(targets).items():
            found[lora_id] = max(found.get(lora_id, 0), ceil(rollout.scale * share - 1e-9))
    return found


def missing_by_adapter(rollout: Rollout, seen: RolloutObservation) -> dict[str, str]:
    """lora_id -> what is still missing before the alias may shift to the current step; empty when it may."""
    former_share, needed = traffic_shares(targets_at(rollout, rollout.step - 1)), replica_floors(rollout)
    # If the old version cannot be used either, an uninspected new one breaks nothing.
    is_used = any(name in seen.known and name not in seen.unusable for name in former_share)
    lacks: dict[str, str] = {}
    for lora_id, share in traffic_shares(targets_at(rollout, rollout.step)).items():
        if share <= former_share.get(lora_id, 0.0):
            continue
        wanted = needed.get(lora_id, 0)
        # At least one replica is required, even where no worker can hold the adapter.
        wanted = min(wanted, seen.most.get(lora_id, wanted), max(1, seen.room.get(lora_id, wanted)))
        why = seen.unplaced.get(lora_id)
        if seen.ready.get(lora_id, 0) < wanted:
            lacks[lora_id] = f"{seen.ready.get(lora_id, 0)} of {wanted} replicas ready" + (f" ({why})" if why else "")
        elif is_used and lora_id not in seen.known:
            lacks[lora_id] = "not inspected yet" + (f" ({why})" if why else "")
    return lacks


def regression_reason(limits: RolloutSpec, old: RequestTally, new: RequestTally) -> str | None:
    """Why the new version is worse than the old one; None when it is not, or with too few requests to tell."""
    least = max(limits.min_requests, _LEAST_REQUESTS)
    if new.requests >= least:
        increase = new.error_rate - old.error_rate
        if increase > limits.max_error_rate_increase and _is_more_than_chance(old, new):
            return (
                f"error rate {new.error_rate:.1%} of {new.requests:.0f} requests, against"
                f" {old.error_rate:.1%} of {old.requests:.0f}"
            )
    was, is_ = old.mean_first_token_s, new.mean_first_token_s
    if limits.max_first_token_ratio is None or was is None or is_ is None:
        return None
    if min(old.first_tokens, new.first_tokens) >= least and is_ > was * limits.max_first_token_ratio:
        return f"first token after {is_:.3g} s on average, against {was:.3g} s"
    return None


def regression_so_far(rollout: Rollout) -> str | None:
    """Why the new version is worse since the last shift, whether or not the step's requests are complete; None: not."""
    if rollout.spec is None:
        return None
    return regression_reason(replace(rollout.spec, min_requests=0), rollout.old, rollout.new)


def advance(rollout: Rollout, seen: RolloutObservation, now: float) -> tuple[Rollout, Targets | None]:
    """The rollout after one observation, and the alias's new targets (None: unchanged).

    Adds the observed counts, so use each observation once. It advances by one phase at most; call it again, without
    counts, while the phase changes.

    now  Unix seconds. Where a clock was set back, or a new leader's is behind, a step's time begins anew
    """
    if not rollout.is_active:
        return rollout, None
    if now < rollout.since:
        rollout = replace(rollout, since=now, paused_at=None if rollout.paused_at is None else now)
    rollout = replace(rollout, old=rollout.old + seen.old, new=rollout.new + seen.new)
    if rollout.scale is None:
        rollout = replace(rollout, scale=_replicas_for_all_traffic(rollout, seen))
    why = _unusable_reason(rollout, seen) or _regression_so_far(rollout)
    if why is not None:
        return _rolled_back(rollout, why, now)
    if rollout.phase == "placing":
        return _advance_placing(rollout, seen, now)
    return _advance_watching(rollout, seen, now), None


def paused_rollout(rollout: Rollout, now: float) -> Rollout:
    """The rollout, paused: it does not advance and its times stand still, but a regression still rolls it back."""
    return replace(rollout, paused_at=now) if rollout.is_active and rollout.paused_at is None else rollout


def resumed_rollout(rollout: Rollout, now: float) -> Rollout:
    """The rollout, resumed; the time of the pause does not count. Unchanged if it is not paused."""
    if rollout.paused_at is None:
        return rollout
    return replace(rollout, since=rollout.since + now - rollout.paused_at, paused_at=None)


def aborted_rollout(rollout: Rollout, now: float) -> tuple[Rollout, Targets | None]:
    """The rollout, ended by an operator, and the alias's old targets (None: it was over already)."""
    ended = replace(rollout, phase="aborted", reason="aborted", since=now, paused_at=None)
    return (ended, rollout.before) if rollout.is_active else (rollout, None)


def _advance_placing(rollout: Rollout, seen: RolloutObservation, now: float) -> tuple[Rollout, Targets | None]:
    """The rollout and the targets to shift to once its replicas are ready; failed when they take too long.

    No targets (None) while it is paused or waits for replicas. A shift counts requests anew.
    """
    lacks = missing_by_adapter(rollout, seen)
    if rollout.paused_at is not None:
        return rollout, None
    if lacks:
        if now - rollout.since < rollout.place_s:
            return rollout, None
        missing_text = "; ".join(f"{lora_id}: {lack}" for lora_id, lack in sorted(lacks.items()))
        return _rolled_back(rollout, f"not placed within {rollout.place_s:g} s: {missing_text}", now)
    shifted = replace(
        rollout,
        phase="watching",
        since=now,
        old=RequestTally(),
        new=RequestTally(),
        baseline=rollout.baseline + rollout.old,
    )
    return shifted, targets_at(rollout, rollout.step)


def _advance_watching(rollout: Rollout, seen: RolloutObservation, now: float) -> Rollout:
    """The rollout at its next step, or done, once this step has lasted long enough with enough requests."""
    step = rollout.steps[rollout.step]
    if rollout.paused_at is not None or now - rollout.since < step.for_s:
        return rollout
    # A step of duration 0 needs no minimum of requests.
    if rollout.spec is not None and step.for_s > 0 and rollout.new.requests < rollout.spec.min_requests:
        return rollout
    if rollout.step + 1 == len(rollout.steps):
        return replace(rollout, phase="done", since=now)
    scale = max(rollout.scale or 0, _replicas_for_all_traffic(rollout, seen))
    return replace(rollout, phase="placing", step=rollout.step + 1, since=now, scale=scale)


def _unusable_reason(rollout: Rollout, seen: RolloutObservation) -> str | None:
    """Why a new target cannot be used, or None. Routers refuse its requests, so no error count would show it."""
    for lora_id in traffic_shares(rollout.after):
        if lora_id in seen.unusable:
            return f"{lora_id} cannot be used: {seen.unusable[lora_id]}"
    return None


def _regression_so_far(rollout: Rollout) -> str | None:
    """Why the new version is worse since the last shift; None when it is not, or the rollout has no limits."""
    if rollout.spec is None or (rollout.phase == "placing" and rollout.step == 0):
        return None
    has_enough = rollout.old.requests >= max(rollout.spec.min_requests, _LEAST_REQUESTS)
    return regression_reason(rollout.spec, rollout.old if has_enough else rollout.old + rollout.baseline, rollout.new)


def _rolled_back(rollout: Rollout, why: str, now: float) -> tuple[Rollout, Targets | None]:
    """The rollout, ended for this reason, and the old targets where the alias has shifted already, else None."""
    has_shifted = rollout.phase == "watching" or rollout.step > 0
    phase: Phase = "rolled_back" if has_shifted else "failed"
    ended = replace(rollout, phase=phase, reason=why, since=now, paused_at=None)
    return ended, rollout.before if has_shifted else None


def _replicas_for_all_traffic(rollout: Rollout, seen: RolloutObservation) -> int:
    """Replicas that all traffic of the alias would need, extrapolated from the old targets' replicas and shares.

    Not their sum: a target with a small share has one whole replica, with room for far more traffic.
    """
    ready = {lora_id: seen.ready.get(lora_id, 0) for lora_id in traffic_shares(rollout.before)}
    whole = min(ready[lora_id] / share for lora_id, share in traffic_shares(rollout.before).items())
    return max(*ready.values(), floor(whole + 1e-9))


def _is_more_than_chance(old: RequestTally, new: RequestTally) -> bool:
    """Whether the new targets' error rate is above the old targets' by more than chance explains."""
    low, _ = _error_rate_bounds(new)
    _, high = _error_rate_bounds(old)
    spread = sqrt((new.error_rate - low) ** 2 + (high - old.error_rate) ** 2)
    return new.error_rate - old.error_rate > spread


def _error_rate_bounds(tally: RequestTally) -> tuple[float, float]:
    """Wilson bounds of the error rate; (0, 0) without requests."""
    n, p = tally.requests, tally.error_rate
    if n <= 0:
        return 0.0, 0.0
    middle = p + _Z**2 / (2 * n)
    spread = _Z * sqrt(max(0.0, p * (1 - p) / n + _Z**2 / (4 * n**2)))
    return max(0.0, (middle - spread) / (1 + _Z**2 / n)), min(1.0, (middle + spread) / (1 + _Z**2 / n))
