"""The replica where a request ends soonest and delays the others least: prefix, adapter and queue in one cost."""

from collections.abc import Sequence
from math import exp
from random import Random
from typing import ClassVar, Final

from router.core.cost import Score
from router.core.decision import Ask, Scene
from router.core.homes import claim_on

_COST_S: Final = -1  # of Terms


class KvLora:
    """Least cost wins; what is within a few percent of it shares at random, so that several routers do not herd.

    An approximate prompt goes to that one of them to which its conversation belongs: no event tells a router what
    others have sent where, so they have to agree without a word.
    """

    name: ClassVar[str] = "kv_lora"

    def choose(self, ask: Ask, scene: Scene) -> tuple[int, Score]:
        able = scene.able(ask)
        if scene.loads.full:
            able = within_slots(ask, scene, able)
        if scene.costs.temperature_s > 0:
            at, found = scene.terms(ask, able)
            i = likely([terms[_COST_S] for terms in found], scene)
        else:
            at, found = scene.terms(ask, able, only_close=True)
            # The seed itself is the chance: making a generator of it would take longer than all the rest.
            i = scene.seed % len(found)
            if ask.is_approximate and ask.first_blocks:
                claim = claim_on(f"{ask.engine_name}:{ask.first_blocks}")
                i = max(range(len(found)), key=lambda k: claim(scene.roster.replicas[at[k]]))
        return at[i], scene.named(at[i], found[i])


def within_slots(ask: Ask, scene: Scene, able: tuple[int, ...]) -> tuple[int, ...]:
    """Those where this adapter opens no slot beyond `max_loras`; all of them when there is no such replica."""
    name = ask.engine_name
    if not name:
        return able
    fits = [i for i in able if scene.loads.has_slot(i, name)]
    return tuple(fits) or able


def likely(costs_s: Sequence[float], scene: Scene) -> int:
    """Any of these, the cheaper the likelier."""
    best = min(costs_s)
    weights = [exp((best - cost) / scene.costs.temperature_s) for cost in costs_s]
    return Random(scene.seed).choices(range(len(costs_s)), weights)[0]
