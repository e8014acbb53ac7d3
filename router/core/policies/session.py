"""The same replica for the same session, for as long as it is there."""

from random import Random
from typing import ClassVar

from router.core.decision import Ask, Scene
from router.core.homes import claim_on


class Session:
    """Rendezvous hashing on the session; a replica that goes moves only its own sessions. Without one: at random."""

    name: ClassVar[str] = "session"

    def choose(self, ask: Ask, scene: Scene) -> int:
        able = scene.able(ask)
        if not ask.session:
            return Random(scene.seed).choice(able)
        claim = claim_on(ask.session)
        return max(able, key=lambda i: claim(scene.roster.replicas[i]))
