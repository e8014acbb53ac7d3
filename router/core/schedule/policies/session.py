"""The same replica for the same session, for as long as it is there."""

from random import Random
from typing import ClassVar

from lorafleet.identity import rendezvous_score
from router.core.schedule.cost import ReplicaScore
from router.core.schedule.decision import FleetSnapshot, RoutingRequest


class SessionPolicy:
    """Rendezvous hashing on the session; a replica that goes moves only its own sessions. Without one: at random."""

    name: ClassVar[str] = "session"

    def choose(self, request: RoutingRequest, snapshot: FleetSnapshot) -> tuple[int, ReplicaScore]:
        able = snapshot.able(request)
        if not request.session:
            return snapshot.scored(request, Random(snapshot.seed).choice(able))
        session, replicas = request.session, snapshot.roster.replicas
        return snapshot.scored(request, max(able, key=lambda i: rendezvous_score(session, replicas[i].id)))
