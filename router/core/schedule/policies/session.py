"""The same replica for the same session, for as long as it is there."""

from random import Random
from typing import ClassVar

from lorafleet.identity import rendezvous_score
from router.core.schedule.cost import ReplicaScore, replica_score
from router.core.schedule.request import RoutingRequest
from router.core.schedule.snapshot import FleetSnapshot


class SessionPolicy:
    """Rendezvous hashing on the session; a lost replica moves only its own sessions. Without a session: at random."""

    name: ClassVar[str] = "session"

    def choose(self, request: RoutingRequest, snapshot: FleetSnapshot) -> tuple[int, ReplicaScore]:
        """Position in the roster and score of the chosen replica, by its session; raises NoReplica."""
        able = snapshot.able(request)
        if request.session:
            session, replicas = request.session, snapshot.roster.replicas
            position = max(able, key=lambda i: rendezvous_score(session, replicas[i].id))
        else:
            position = Random(snapshot.seed).choice(able)
        return position, replica_score(request, snapshot, position)
