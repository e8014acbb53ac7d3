"""An alias on its way from some targets to others: place, shift, watch, and back when the new ones are worse.

Make before break: before each step the targets that gain get as many replicas as their share of what the old ones had,
or one on each worker that can hold them where those are fewer. Only then does the alias shift. A switch is a rollout
of one step that nobody watches. All times are Unix times, as a rollout outlives the process that began it.

A new version is worse when, with at least `min_requests` of its requests over since the last shift,

- its error rate is above the old one's by more than the margin, and by more than chance explains: the lower bound of
  the difference (Newcombe's, from two Wilson scores, one-sided 99.5 %) is above 0. It is looked at again and
  again: with 95 % every fifth sound version of a fleet in trouble would go back, with this one in fifty;
- or its mean first-token time is above the old one's by more than the ratio, with as many first tokens of each. Only
  the sum is known, so there is no test for chance here: the number of requests must do.

What it is held against is the old version over the same time, or, where that had too few requests, over all that is
known of it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import ceil, floor, sqrt
from typing import Any, Literal

Targets = tuple[tuple[str, float], ...]
"""(lora_id, weight) each."""
Phase = Literal["placing", "watching", "done", "rolled_back", "aborted", "failed"]

ACTIVE: frozenset[Phase] = frozenset({"placing", "watching"})
_LEAST_REQUESTS = 10
"""Below that no two rates are compared, however few were asked for."""
_Z = 2.576
"""The normal distribution's 99.5 %."""


@dataclass(frozen=True, slots=True)
class WeightStep:
    """The new targets' share of the alias (0 < weight <= 1), and for how long at least it stays.

    New targets that the alias points at already keep the share that they had where that is more.
    """

    weight: float
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGuard:
    """When the new version is worse; see above. `max_first_token_ratio`: None looks at errors alone."""

    max_error_rate_increase: float = 0.02
    max_first_token_ratio: float | None = 1.5
    min_requests: int = 50


@dataclass(frozen=True, slots=True)
class RequestTally:
    """Requests that are over, those of them that failed, and the first-token times of those that were streamed."""

    requests: float = 0.0
    errors: float = 0.0
    first_tokens: float = 0.0
    first_token_s: float = 0.0

    def __add__(self, other: "RequestTally") -> "RequestTally":
        return RequestTally(
            self.requests + other.requests,
            self.errors + other.errors,
            self.first_tokens + other.first_tokens,
            self.first_token_s + other.first_token_s,
        )

    @property
    def error_rate(self) -> float:
        # An error may be reported a moment before the end of its request.
        return min(1.0, self.errors / self.requests) if self.requests else 0.0

    @property
    def mean_first_token_s(self) -> float | None:
        return self.first_token_s / self.first_tokens if self.first_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Where it stands.

    before, after   what the alias pointed at, and what it shall; their weights are as they were written
    steps           rising, the last of weight 1
    guard           None: a switch, which nobody watches
    place_s         how long a step may wait for its replicas
    step            the one that is being placed or watched; `since`: when that began
    scale           replicas that the alias would need with one target, when the step began; None until it is measured
    old, new        what came of their requests since the last shift; `baseline`: of the old ones before that
    reason          why it ended as it did
    """

    alias: str
    before: Targets
    after: Targets
    steps: tuple[WeightStep, ...] = (WeightStep(1.0, 0.0),)
    guard: RolloutGuard | None = None
    place_s: float = 300.0
    began_at: float
    since: float
    phase: Phase = "placing"
    step: int = 0
    paused_at: float | None = None
    scale: int | None = None
    old: RequestTally = RequestTally()
    new: RequestTally = RequestTally()
    baseline: RequestTally = RequestTally()
    reason: str = ""

    @property
    def is_active(self) -> bool:
        return self.phase in ACTIVE

    @property
    def old_ids(self) -> frozenset[str]:
        """What only the alias as it was points at."""
        return frozenset(_shares(self.before)) - self.new_ids

    @property
    def new_ids(self) -> frozenset[str]:
        return frozenset(_shares(self.after))


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutObservation:
    """What one look at the fleet found.

    ready      lora_id -> workers that serve it
    most       lora_id -> replicas that its policy allows
    room       lora_id -> workers that can hold it, or do
    unusable   lora_id -> why it never will be ready, until somebody acts
    unplaced   lora_id -> why it is not ready yet
    known      lora_ids that some agent has inspected
    old, new   what came of the requests of old_ids and new_ids since the last look
    """

    ready: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    room: Mapping[str, int] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)
    unplaced: Mapping[str, str] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    old: RequestTally = RequestTally()
    new: RequestTally = RequestTally()


def with_last_step(steps: tuple[WeightStep, ...]) -> tuple[WeightStep, ...]:
    """Steps that end at 1: one that is left out follows the last, and lasts for no time."""
    return steps if steps and steps[-1].weight >= 1 else (*steps, WeightStep(1.0, 0.0))


def targets_at(rollout: Rollout, step: int) -> Targets:
    """What the alias points at in a step; before the first, what it did."""
    if step < 0:
        return rollout.before
    weight = rollout.steps[step].weight
    if weight >= 1:
        return rollout.after
    old, new = _shares(rollout.before), _shares(rollout.after)
    had = sum(share for name, share in old.items() if name in new)
    if weight <= had:
        return tuple(old.items())
    rest = (1 - weight) / (1 - had)
    return tuple((name, new[name] * weight if name in new else old[name] * rest) for name in old | new)


def targets_now(rollout: Rollout) -> Targets:
    """What the alias points at now, if nobody but the rollout has set it."""
    if rollout.phase == "done":
        return rollout.after
    if not rollout.is_active:
        return rollout.before
    return targets_at(rollout, rollout.step if rollout.phase == "watching" else rollout.step - 1)


def floors(rollout: Rollout) -> dict[str, int]:
    """lora_id -> replicas that it needs while this goes on: the new ones for their step, the old ones to go back to."""
    if not rollout.is_active or not rollout.scale:
        return {}
    found: dict[str, int] = {}
    for targets in (rollout.before, targets_at(rollout, rollout.step)):
        for lora_id, share in _shares(targets).items():
            found[lora_id] = max(found.get(lora_id, 0), ceil(rollout.scale * share - 1e-9))
    return found


def missing(rollout: Rollout, seen: RolloutObservation) -> dict[str, str]:
    """lora_id -> what it still lacks before the alias may shift to this step."""
    had, needed = _shares(targets_at(rollout, rollout.step - 1)), floors(rollout)
    # Where nobody could use the old version either, there is nothing to break.
    is_used = any(name in seen.known and name not in seen.unusable for name in had)
    lacks: dict[str, str] = {}
    for lora_id, share in _shares(targets_at(rollout, rollout.step)).items():
        if share <= had.get(lora_id, 0.0):
            continue
        wanted = needed.get(lora_id, 0)
        # One at least: where no worker can hold it, that is what it lacks.
        wanted = min(wanted, seen.most.get(lora_id, wanted), max(1, seen.room.get(lora_id, wanted)))
        why = seen.unplaced.get(lora_id)
        if seen.ready.get(lora_id, 0) < wanted:
            lacks[lora_id] = f"{seen.ready.get(lora_id, 0)} of {wanted} replicas ready" + (f" ({why})" if why else "")
        elif is_used and lora_id not in seen.known:
            lacks[lora_id] = "not inspected yet" + (f" ({why})" if why else "")
    return lacks


def worse(guard: RolloutGuard, old: RequestTally, new: RequestTally) -> str | None:
    """Why the new version is worse, or None: it is not, or there are too few requests to tell."""
    least = max(guard.min_requests, _LEAST_REQUESTS)
    if new.requests >= least:
        increase = new.error_rate - old.error_rate
        if increase > guard.max_error_rate_increase and _is_more_than_chance(old, new):
            return (
                f"error rate {new.error_rate:.1%} of {new.requests:.0f} requests, against"
                f" {old.error_rate:.1%} of {old.requests:.0f}"
            )
    was, is_ = old.mean_first_token_s, new.mean_first_token_s
    if guard.max_first_token_ratio is None or was is None or is_ is None:
        return None
    if min(old.first_tokens, new.first_tokens) >= least and is_ > was * guard.max_first_token_ratio:
        return f"first token after {is_:.3g} s on average, against {was:.3g} s"
    return None


def advance(rollout: Rollout, seen: RolloutObservation, now: float) -> tuple[Rollout, Targets | None]:
    """The rollout after one look, and what the alias shall point at from now on (None: as it does).

    At most one step of the way; to be called again while it changes something.
    """
    if not rollout.is_active:
        return rollout, None
    rollout = replace(rollout, old=rollout.old + seen.old, new=rollout.new + seen.new)
    if rollout.scale is None:
        rollout = replace(rollout, scale=_scale(rollout, seen))
    why = _why_unusable(rollout, seen) or _why_back(rollout)
    if why is not None:
        return _back(rollout, why, now)
    if rollout.phase == "placing":
        return _placed(rollout, seen, now)
    return _watched(rollout, seen, now), None


def paused(rollout: Rollout, now: float) -> Rollout:
    """It goes no further, and no time counts; it still goes back when the new version is worse."""
    return replace(rollout, paused_at=now) if rollout.is_active and rollout.paused_at is None else rollout


def resumed(rollout: Rollout, now: float) -> Rollout:
    """On from where it was."""
    if rollout.paused_at is None:
        return rollout
    return replace(rollout, since=rollout.since + now - rollout.paused_at, paused_at=None)


def aborted(rollout: Rollout, now: float) -> tuple[Rollout, Targets | None]:
    """Back to what it was, because somebody says so."""
    ended = replace(rollout, phase="aborted", reason="aborted", since=now, paused_at=None)
    return (ended, rollout.before) if rollout.is_active else (rollout, None)


def as_json(rollout: Rollout) -> dict[str, Any]:
    return asdict(rollout)


def _placed(rollout: Rollout, seen: RolloutObservation, now: float) -> tuple[Rollout, Targets | None]:
    lacks = missing(rollout, seen)
    if rollout.paused_at is not None:
        return rollout, None
    if lacks:
        if now - rollout.since < rollout.place_s:
            return rollout, None
        what = "; ".join(f"{lora_id}: {lack}" for lora_id, lack in sorted(lacks.items()))
        return _back(rollout, f"not placed within {rollout.place_s:g} s: {what}", now)
    shifted = replace(
        rollout,
        phase="watching",
        since=now,
        old=RequestTally(),
        new=RequestTally(),
        baseline=rollout.baseline + rollout.old,
    )
    return shifted, targets_at(rollout, rollout.step)


def _watched(rollout: Rollout, seen: RolloutObservation, now: float) -> Rollout:
    step = rollout.steps[rollout.step]
    if rollout.paused_at is not None or now - rollout.since < step.for_s:
        return rollout
    # A step that lasts for no time asks for no evidence either.
    if rollout.guard is not None and step.for_s > 0 and rollout.new.requests < rollout.guard.min_requests:
        return rollout
    if rollout.step + 1 == len(rollout.steps):
        return replace(rollout, phase="done", since=now)
    scale = max(rollout.scale or 0, _scale(rollout, seen))
    return replace(rollout, phase="placing", step=rollout.step + 1, since=now, scale=scale)


def _why_unusable(rollout: Rollout, seen: RolloutObservation) -> str | None:
    """Routers refuse what cannot be used before any engine sees it: no count of errors would ever tell."""
    for lora_id in _shares(rollout.after):
        if lora_id in seen.unusable:
            return f"{lora_id} cannot be used: {seen.unusable[lora_id]}"
    return None


def _why_back(rollout: Rollout) -> str | None:
    if rollout.guard is None or (rollout.phase == "placing" and rollout.step == 0):
        return None
    has_enough = rollout.old.requests >= max(rollout.guard.min_requests, _LEAST_REQUESTS)
    return worse(rollout.guard, rollout.old if has_enough else rollout.old + rollout.baseline, rollout.new)


def _back(rollout: Rollout, why: str, now: float) -> tuple[Rollout, Targets | None]:
    """It ends; where the alias has not shifted yet, it stays as it is."""
    has_shifted = rollout.phase == "watching" or rollout.step > 0
    phase: Phase = "rolled_back" if has_shifted else "failed"
    ended = replace(rollout, phase=phase, reason=why, since=now, paused_at=None)
    return ended, rollout.before if has_shifted else None


def _scale(rollout: Rollout, seen: RolloutObservation) -> int:
    """Replicas that all sessions of the alias would need together, by what the old targets have for their shares.

    Not their sum: a target with a small share has one replica, too, and many sessions would have room there.
    """
    ready = {lora_id: seen.ready.get(lora_id, 0) for lora_id in _shares(rollout.before)}
    whole = min(ready[lora_id] / share for lora_id, share in _shares(rollout.before).items())
    return max(*ready.values(), floor(whole + 1e-9))


def _shares(targets: Targets) -> dict[str, float]:
    """lora_id -> share of the alias, those that have one."""
    total = sum(weight for _, weight in targets)
    return {lora_id: weight / total for lora_id, weight in targets if weight > 0}


def _is_more_than_chance(old: RequestTally, new: RequestTally) -> bool:
    low, _ = _wilson(new)
    _, high = _wilson(old)
    spread = sqrt((new.error_rate - low) ** 2 + (high - old.error_rate) ** 2)
    return new.error_rate - old.error_rate > spread


def _wilson(tally: RequestTally) -> tuple[float, float]:
    """Bounds of an error rate; of no requests at all, that there are no errors."""
    n, p = tally.requests, tally.error_rate
    if n <= 0:
        return 0.0, 0.0
    middle = p + _Z**2 / (2 * n)
    spread = _Z * sqrt(max(0.0, p * (1 - p) / n + _Z**2 / (4 * n**2)))
    return max(0.0, (middle - spread) / (1 + _Z**2 / n)), min(1.0, (middle + spread) / (1 + _Z**2 / n))
