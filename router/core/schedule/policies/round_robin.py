"""Each able replica in its turn."""

from typing import ClassVar

from router.core.schedule.cost import ReplicaScore
from router.core.schedule.decision import FleetSnapshot, RoutingRequest


class RoundRobinPolicy:
    """Knows nothing of caches, adapters in use or queues."""

    name: ClassVar[str] = "round_robin"

    def choose(self, request: RoutingRequest, snapshot: FleetSnapshot) -> tuple[int, ReplicaScore]:
        able = snapshot.able(request)
        position = able[snapshot.turn % len(able)]
        return position, snapshot.score(request, position)
