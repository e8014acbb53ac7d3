"""Each able replica in turn."""

from typing import ClassVar

from router.core.schedule.cost import ReplicaScore, replica_score
from router.core.schedule.request import RoutingRequest
from router.core.schedule.snapshot import FleetSnapshot


class RoundRobinPolicy:
    """Knows nothing of caches, adapters in use or queues."""

    name: ClassVar[str] = "round_robin"

    def choose(self, request: RoutingRequest, snapshot: FleetSnapshot) -> tuple[int, ReplicaScore]:
        """Position in the roster and score of the chosen replica, by the snapshot's turn; raises NoReplica."""
        able = snapshot.able(request)
        position = able[snapshot.turn % len(able)]
        return position, replica_score(request, snapshot, position)
