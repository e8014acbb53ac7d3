"""The same replica for the same session, for as long as it is there."""

from random import Random
from typing import ClassVar

from lorafleet.identity import rendezvous_score
from router.core.schedule.cost import ReplicaScore
from router.core.schedule.decision import FleetSnapshot, RoutingRequest


class SessionPolicy:
    """Rendezvous hashing on the session; a replica that goes moves only its own sessions. Without one: at random."""

    name: ClassVar[str] = "session"

    def choose(self, ask: RoutingRequest, scene: FleetSnapshot) -> tuple[int, ReplicaScore]:
        able = scene.able(ask)
        if not ask.session:
            return scene.scored(ask, Random(scene.seed).choice(able))
        session, replicas = ask.session, scene.roster.replicas
        return scene.scored(ask, max(able, key=lambda i: rendezvous_score(session, replicas[i].id)))
