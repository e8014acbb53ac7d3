"""The replica with the fewest requests."""

from random import Random
from typing import ClassVar

from router.core.schedule.cost import ReplicaScore, replica_score
from router.core.schedule.request import RoutingRequest
from router.core.schedule.snapshot import FleetSnapshot


class LeastLoadedPolicy:
    """Sequences in flight, ours and those of other clients alike; equal replicas share at random."""

    name: ClassVar[str] = "least_loaded"

    def choose(self, request: RoutingRequest, snapshot: FleetSnapshot) -> tuple[int, ReplicaScore]:
        """Position in the roster and score of the chosen replica: fewest sequences; raises NoReplica."""
        counts = {i: snapshot.loads[i].all_in_flight for i in snapshot.able(request)}
        fewest = min(counts.values())
        position = Random(snapshot.seed).choice([i for i, count in counts.items() if count == fewest])
        return position, replica_score(request, snapshot, position)
