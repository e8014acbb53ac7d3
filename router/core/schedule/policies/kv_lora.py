"""The replica where a request ends soonest and delays the others least: prefix, adapter and queue in one cost."""

from collections.abc import Sequence
from math import exp
from random import Random
from typing import ClassVar, Final

from lorafleet.identity import rendezvous_score
from router.core.schedule.cost import ReplicaScore
from router.core.schedule.cost_loop import RosterCosts, roster_costs
from router.core.schedule.request import RoutingRequest
from router.core.schedule.snapshot import FleetSnapshot

# A conversation that no replica is known to have goes to its home at up to this multiple of the best cost: its next
# turns save at the home what this one computes.
_BALANCE: Final = 2.0


class KvLoraPolicy:
    """Least cost wins; ties, within a few percent, share at random, so that several routers do not herd.

    No KV event tells where other routers sent an approximate prompt. So that all routers choose alike, among ties it
    goes to the home of its conversation; the tie is wider while no replica is known to have more of it than others.
    """

    name: ClassVar[str] = "kv_lora"

    def choose(self, request: RoutingRequest, snapshot: FleetSnapshot) -> tuple[int, ReplicaScore]:
        """Position in the roster and score of the chosen replica: least cost; raises NoReplica.

        Ties are broken at random. An approximate prompt goes to its home, see `home_choice`. With a temperature the
        choice is random, see `weighted_choice`.
        """
        able = snapshot.able(request)
        if snapshot.loads.without_slot:
            able = within_slots(request, snapshot, able)
        if snapshot.costs.temperature_s > 0:
            found = roster_costs(request, snapshot, able)
            k = weighted_choice(found.costs_s(), snapshot)
        elif request.is_approximate and request.first_blocks:
            found = roster_costs(request, snapshot, able)
            k = home_choice(request, snapshot, found)
        else:
            found = roster_costs(request, snapshot, able, only_close=True)
            # The seed itself is the random number: making a generator of it would take longer than all the rest.
            k = snapshot.seed % len(found.positions)
        return found.positions[k], found.score(k)

    def may_choose(
        self, request: RoutingRequest, snapshot: FleetSnapshot, positions: Sequence[int], other: int
    ) -> bool:
        """Whether one of these positions may be chosen: whether any ties with, or beats, another one that is able.

        Always true where cost does not decide alone, or where the other one may be out for its lack of a slot.
        """
        if snapshot.costs.temperature_s > 0 or (request.is_approximate and request.first_blocks):
            return True
        if snapshot.loads.without_slot and not snapshot.loads[other].has_slot(request.engine_name):
            return True
        found = roster_costs(request, snapshot, sorted((*positions, other)), only_close=True)
        return found.positions != [other]


def home_choice(request: RoutingRequest, snapshot: FleetSnapshot, found: RosterCosts) -> int:
    """Index into these costs of the replica for an approximate prompt, by rendezvous hashing on its conversation."""
    costs_s, replicas = found.costs_s(), snapshot.roster.replicas
    is_known = len(set(found.cached_tokens())) > 1
    limit_s = snapshot.costs.tie_limit_s(min(costs_s) if is_known else min(costs_s) * _BALANCE)
    conversation = f"{request.engine_name}:{request.first_blocks}"
    close = [k for k, cost_s in enumerate(costs_s) if cost_s <= limit_s]
    return max(close, key=lambda k: rendezvous_score(conversation, replicas[found.positions[k]].id))


def within_slots(request: RoutingRequest, snapshot: FleetSnapshot, able: tuple[int, ...]) -> tuple[int, ...]:
    """The positions where this adapter needs no slot beyond `max_loras`; all positions if there is none."""
    name = request.engine_name
    if not name:
        return able
    return tuple([i for i in able if snapshot.loads[i].has_slot(name)]) or able


def weighted_choice(costs_s: Sequence[float], snapshot: FleetSnapshot) -> int:
    """A random index into these costs, the cheaper the likelier; the same for the same snapshot."""
    best = min(costs_s)
    weights = [exp((best - cost) / snapshot.costs.temperature_s) for cost in costs_s]
    return Random(snapshot.seed).choices(range(len(costs_s)), weights)[0]
