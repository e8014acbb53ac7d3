"""The replica where a request ends soonest and delays the others least: prefix, adapter and queue in one cost."""

from collections.abc import Sequence
from math import exp
from random import Random
from typing import ClassVar, Final

from lorafleet.identity import rendezvous_score
from router.core.schedule.cost import ReplicaScore, Terms
from router.core.schedule.decision import FleetSnapshot, RoutingRequest

_CACHED: Final = 1  # of Terms
_COST_S: Final = -1
# A conversation that nobody is known to have goes to its home at up to so much of the best cost: as `prefix_hash`.
_BALANCE: Final = 1.25


class KvLoraPolicy:
    """Least cost wins; what is within a few percent of it shares at random, so that several routers do not herd.

    Of an approximate prompt no event tells what other routers have sent where, so they have to agree without a word:
    among what is close it goes to where its conversation belongs. What is close is wider while this router knows of
    nobody who has more of it than others.
    """

    name: ClassVar[str] = "kv_lora"

    def choose(self, request: RoutingRequest, snapshot: FleetSnapshot) -> tuple[int, ReplicaScore]:
        able = snapshot.able(request)
        if snapshot.loads.full:
            able = within_slots(request, snapshot, able)
        if snapshot.costs.temperature_s > 0:
            at, found = snapshot.terms(request, able)
            i = likely([terms[_COST_S] for terms in found], snapshot)
        elif request.is_approximate and request.first_blocks:
            at, found = snapshot.terms(request, able)
            i = at_home(request, snapshot, at, found)
        else:
            at, found = snapshot.terms(request, able, only_close=True)
            # The seed itself is the chance: making a generator of it would take longer than all the rest.
            i = snapshot.seed % len(found)
        return at[i], snapshot.named(at[i], found[i])


def at_home(request: RoutingRequest, snapshot: FleetSnapshot, at: Sequence[int], found: Sequence[Terms]) -> int:
    """Which of these an approximate prompt goes to, by rendezvous hashing on its conversation.

    at, found  as Scene.terms answers
    """
    best_s, replicas = min(terms[_COST_S] for terms in found), snapshot.roster.replicas
    is_known = len({terms[_CACHED] for terms in found}) > 1
    limit_s = snapshot.costs.close_to(best_s if is_known else best_s * _BALANCE)
    key = f"{request.engine_name}:{request.first_blocks}"
    close = [k for k, terms in enumerate(found) if terms[_COST_S] <= limit_s]
    return max(close, key=lambda k: rendezvous_score(key, replicas[at[k]].id))


def within_slots(request: RoutingRequest, snapshot: FleetSnapshot, able: tuple[int, ...]) -> tuple[int, ...]:
    """Those where this adapter opens no slot beyond `max_loras`; all of them when there is no such replica."""
    name = request.engine_name
    if not name:
        return able
    fits = [i for i in able if snapshot.loads.has_slot(i, name)]
    return tuple(fits) or able


def likely(costs_s: Sequence[float], snapshot: FleetSnapshot) -> int:
    """Any of these, the cheaper the likelier."""
    best = min(costs_s)
    weights = [exp((best - cost) / snapshot.costs.temperature_s) for cost in costs_s]
    return Random(snapshot.seed).choices(range(len(costs_s)), weights)[0]
