"""The churn limiter: when too many loads and unloads that no request waits for come together, moves are frozen.

Repairs count, because a fleet whose workers come and go should not be rearranged, but they are never held back.
Neither is a load that a request waits for or that an operator asked for over REST.
"""

from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import ChurnHistory

PlacementStep = tuple[str, str, str]
"""(lora_id, worker_id, load or unload)"""


def is_frozen(history: ChurnHistory, policy: PlacementPolicy, workers: int, now: float) -> bool:
    """Whether moves are frozen: from the limit on, until no more than half of it is in the window.

    workers  ready workers; without any, moves are never frozen
    """
    if not workers:
        return False
    most = step_limit(policy, workers)
    count = steps_in_window(history, policy, now)
    return count >= most or (history.frozen_since is not None and count > most / 2)


def step_limit(policy: PlacementPolicy, workers: int) -> int:
    """Steps that the policy allows in one window with so many ready workers."""
    return policy.storm_moves_per_worker * workers


def steps_in_window(history: ChurnHistory, policy: PlacementPolicy, now: float) -> int:
    """Number of steps in the window that ends now."""
    return sum(count for second, count in history.step_counts if now - second < policy.storm_window_s)


def history_after(
    history: ChurnHistory, steps: frozenset[PlacementStep], policy: PlacementPolicy, *, is_held: bool, now: float
) -> ChurnHistory:
    """The history after a pass that named these steps.

    steps    a step that the pass before named too is the same step, still in progress, and is not counted again
    is_held  whether moves were frozen in that pass
    """
    step_counts = [entry for entry in history.step_counts if now - entry[0] < policy.storm_window_s]
    fresh = len(steps - history.named_steps)
    if fresh:
        second = int(now)
        if step_counts and step_counts[-1][0] == second:
            step_counts[-1] = (second, step_counts[-1][1] + fresh)
        else:
            step_counts.append((second, fresh))
    since = (now if history.frozen_since is None else history.frozen_since) if is_held else None
    return ChurnHistory(named_steps=steps, step_counts=tuple(step_counts), frozen_since=since)


def freeze_reason(history: ChurnHistory, policy: PlacementPolicy, workers: int, now: float) -> str:
    """Why moves are frozen, in words for an operator."""
    return (
        f"storm: {steps_in_window(history, policy, now)} loads and unloads within {policy.storm_window_s:g} s that no"
        f" request waited for, and {step_limit(policy, workers)} are allowed; moves stand still until they are half as"
        " many"
    )
