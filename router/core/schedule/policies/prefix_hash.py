"""The same replica for the same adapter and first blocks, as long as it has no more than its share of the load."""

from math import ceil
from typing import ClassVar

from lorafleet.identity import rendezvous_score
from router.core.schedule.cost import ReplicaScore
from router.core.schedule.decision import FleetSnapshot, RoutingRequest

# A replica takes no more than this much of the average load: what HAProxy suggests for its hash-balance-factor.
# Source: Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads, 2016.
_BALANCE = 1.25


class PrefixHashPolicy:
    """Consistent hashing with bounded load: the next replica in the prefix's own order takes what is too much."""

    name: ClassVar[str] = "prefix_hash"

    def choose(self, request: RoutingRequest, snapshot: FleetSnapshot) -> tuple[int, ReplicaScore]:
        able = snapshot.able(request)
        loads = {i: snapshot.loads.in_flight(i) for i in able}
        most = ceil(_BALANCE * (sum(loads.values()) + 1) / len(able))
        key, replicas = f"{request.engine_name}:{request.first_blocks}", snapshot.roster.replicas
        within = [i for i in able if loads[i] < most]
        return snapshot.scored(request, max(within or able, key=lambda i: rendezvous_score(key, replicas[i].id)))
