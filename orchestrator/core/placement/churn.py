"""Whether too much moves that nobody waits for: then moves stop until it is calm again.

Repairs count, because a fleet whose workers come and go is no time to rearrange anything, but are never held back, and
neither is what a request waits for, nor what somebody asked for over REST.
"""

from orchestrator.core.state import ChurnHistory, PlacementPolicy

Step = tuple[str, str, str]
"""(lora_id, worker_id, load or unload)"""


def is_frozen(storm: ChurnHistory, policy: PlacementPolicy, workers: int, now: float) -> bool:
    """Whether moves stand still: as many as allowed in the window, and, once that was so, until they are half of it.

    Never without a worker, between which nothing could move.
    """
    if not workers:
        return False
    most = limit(policy, workers)
    count = churn(storm, policy, now)
    return count >= most or (storm.frozen_since is not None and count > most / 2)


def limit(policy: PlacementPolicy, workers: int) -> int:
    """Steps that the window may hold."""
    return policy.storm_moves_per_worker * workers


def churn(storm: ChurnHistory, policy: PlacementPolicy, now: float) -> int:
    """Steps in the window."""
    return sum(count for second, count in storm.counts if now - second < policy.storm_window_s)


def watched(
    storm: ChurnHistory, steps: frozenset[Step], policy: PlacementPolicy, *, is_held: bool, now: float
) -> ChurnHistory:
    """What to remember after a pass that named these steps. One that was named before is the same one, still under way.

    is_held  whether moves stood still in that pass
    """
    counts = [entry for entry in storm.counts if now - entry[0] < policy.storm_window_s]
    fresh = len(steps - storm.named)
    if fresh:
        second = int(now)
        if counts and counts[-1][0] == second:
            counts[-1] = (second, counts[-1][1] + fresh)
        else:
            counts.append((second, fresh))
    since = (now if storm.frozen_since is None else storm.frozen_since) if is_held else None
    return ChurnHistory(named=steps, counts=tuple(counts), frozen_since=since)


def why_frozen(storm: ChurnHistory, policy: PlacementPolicy, workers: int, now: float) -> str:
    return (
        f"storm: {churn(storm, policy, now)} loads and unloads within {policy.storm_window_s:g} s that no request "
        f"waited for, and {limit(policy, workers)} are allowed; moves stand still until they are half as many"
    )
