"""The replica where a request ends soonest and delays the others least: prefix, adapter and queue in one cost."""

from collections.abc import Sequence
from math import exp
from random import Random
from typing import ClassVar, Final

from router.core.cost import Score
from router.core.decision import Ask, Scene

_COST_S: Final = -1  # of Terms


class KvLora:
    """Least cost wins; what is within a few percent of it shares at random, so that several routers do not herd."""

    name: ClassVar[str] = "kv_lora"

    def choose(self, ask: Ask, scene: Scene) -> tuple[int, Score]:
        able = scene.able(ask)
        if scene.loads.full:
            able = within_slots(ask, scene, able)
        found = scene.terms(ask, able)
        i = pick([terms[_COST_S] for terms in found], scene) if len(found) > 1 else 0
        return able[i], Score(*found[i])


def within_slots(ask: Ask, scene: Scene, able: tuple[int, ...]) -> tuple[int, ...]:
    """Those where this adapter opens no slot beyond `max_loras`; all of them when there is no such replica."""
    name = ask.engine_name
    if not name:
        return able
    fits = [i for i in able if scene.loads.has_slot(i, name)]
    return tuple(fits) or able


def pick(costs_s: Sequence[float], scene: Scene) -> int:
    """Which of these is taken: one of the cheapest at random; with a temperature any, the cheaper the likelier."""
    best, costs = min(costs_s), scene.costs
    if costs.temperature_s > 0:
        weights = [exp((best - cost) / costs.temperature_s) for cost in costs_s]
        return Random(scene.seed).choices(range(len(costs_s)), weights)[0]
    limit = best * (1 + costs.tie_share) + costs.tie_s
    close = [i for i, cost in enumerate(costs_s) if cost <= limit]
    # The seed itself is the chance: making a generator of it would take longer than all the rest.
    return close[scene.seed % len(close)]
