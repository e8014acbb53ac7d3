"""Each able replica in its turn."""

from typing import ClassVar

from router.core.decision import Ask, Scene


class RoundRobin:
    """Knows nothing of caches, adapters in use or queues."""

    name: ClassVar[str] = "round_robin"

    def choose(self, ask: Ask, scene: Scene) -> int:
        able = scene.able(ask)
        return able[scene.turn % len(able)]
