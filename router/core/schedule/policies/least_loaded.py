"""The replica with the fewest requests."""

from random import Random
from typing import ClassVar

from router.core.schedule.cost import ReplicaScore
from router.core.schedule.decision import FleetSnapshot, RoutingRequest


class LeastLoadedPolicy:
    """Ours and everybody else's in flight, counted alike; equal ones share at random."""

    name: ClassVar[str] = "least_loaded"

    def choose(self, request: RoutingRequest, snapshot: FleetSnapshot) -> tuple[int, ReplicaScore]:
        able = snapshot.able(request)
        counts = [snapshot.loads.in_flight(i) for i in able]
        fewest = min(counts)
        return snapshot.scored(
            request, Random(snapshot.seed).choice([i for i, count in zip(able, counts, strict=True) if count == fewest])
        )
