"""The replica with the fewest requests."""

from random import Random
from typing import ClassVar

from router.core.schedule.cost import ReplicaScore
from router.core.schedule.decision import FleetSnapshot, RoutingRequest


class LeastLoadedPolicy:
    """Ours and everybody else's in flight, counted alike; equal ones share at random."""

    name: ClassVar[str] = "least_loaded"

    def choose(self, ask: RoutingRequest, scene: FleetSnapshot) -> tuple[int, ReplicaScore]:
        able = scene.able(ask)
        counts = [scene.loads.in_flight(i) for i in able]
        fewest = min(counts)
        return scene.scored(
            ask, Random(scene.seed).choice([i for i, count in zip(able, counts, strict=True) if count == fewest])
        )
