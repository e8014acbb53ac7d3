"""Each able replica in its turn."""

from typing import ClassVar

from router.core.schedule.cost import ReplicaScore
from router.core.schedule.decision import FleetSnapshot, RoutingRequest


class RoundRobinPolicy:
    """Knows nothing of caches, adapters in use or queues."""

    name: ClassVar[str] = "round_robin"

    def choose(self, ask: RoutingRequest, scene: FleetSnapshot) -> tuple[int, ReplicaScore]:
        able = scene.able(ask)
        position = able[scene.turn % len(able)]
        return position, scene.score(ask, position)
