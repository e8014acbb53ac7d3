"""The same replica for the same adapter and first blocks, as long as it has no more than its share of the load."""

from math import ceil
from typing import ClassVar

from lorafleet.identity import rendezvous_score
from router.core.schedule.cost import ReplicaScore, replica_score
from router.core.schedule.request import RoutingRequest
from router.core.schedule.snapshot import FleetSnapshot

# The most that a replica takes, as a multiple of the average load: what HAProxy suggests for its hash-balance-factor.
# Source: Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads, 2016.
_BALANCE = 1.25


class PrefixHashPolicy:
    """Consistent hashing with bounded load: what is too much for one replica goes to the next in the prefix's order."""

    name: ClassVar[str] = "prefix_hash"

    def choose(self, request: RoutingRequest, snapshot: FleetSnapshot) -> tuple[int, ReplicaScore]:
        """Position in the roster and score of the first replica with room in the prefix's order; raises NoReplica."""
        able = snapshot.able(request)
        loads = {i: snapshot.loads[i].all_in_flight for i in able}
        most = ceil(_BALANCE * (sum(loads.values()) + 1) / len(able))
        prefix, replicas = f"{request.engine_name}:{request.first_blocks}", snapshot.roster.replicas
        within = [i for i in able if loads[i] < most]
        position = max(within or able, key=lambda i: rendezvous_score(prefix, replicas[i].id))
        return position, replica_score(request, snapshot, position)
