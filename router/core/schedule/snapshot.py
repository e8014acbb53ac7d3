"""All that one decision reads: a frozen fleet snapshot, and the filters over it."""

from collections.abc import Mapping

import msgspec

from router.core.errors import NoReplica
from router.core.fleet import Excluded, Replica, Roster, rejection
from router.core.kv.index import WorkerId
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.load_snapshot import FleetLoad
from router.core.schedule.request import NOTHING, RoutingRequest


class FleetSnapshot(msgspec.Struct, frozen=True):
    """Everything that a decision reads besides the request.

    loads           of each replica of `roster`, in its order
    depths          contiguous cached blocks in device memory, by replica
    lower           how many more blocks follow them in host memory and in storage, by replica
    ranks           the data-parallel rank with the longest prefix, by replica, where that matters
    backlog         seconds of queued work that would go to each replica before this request
    open_circuits   incarnations whose circuit is open (failover/circuit_breaker.py)
    rho             utilisation of the base model's fleet
    context_tokens  the usual context of its prefills; see cost.context
    seed            this decision's random number
    turn            this decision's number among those for the same base model and adapter
    """

    roster: Roster
    loads: FleetLoad
    depths: Mapping[WorkerId, int] = NOTHING
    lower: Mapping[WorkerId, tuple[int, int]] = NOTHING
    ranks: Mapping[WorkerId, int] = NOTHING
    backlog: Mapping[WorkerId, float] = NOTHING
    open_circuits: Excluded = frozenset()
    rho: float = 0.0
    context_tokens: float = 1000.0
    now: float = 0.0
    seed: int = 0
    turn: int = 0
    costs: CostSettings = CostSettings()

    def able(self, request: RoutingRequest) -> tuple[int, ...]:
        """Positions of the replicas that pass every filter; raises NoReplica when none does.

        Open circuits are ignored where they would leave no replica: a router that is cut off, or counts wrongly, must
        not take an adapter away.
        """
        able = self.roster.able(request.engine_name)
        if request.total_tokens:
            able = tuple(i for i in able if length_rejection(self.roster, i, request) is None)
        if request.excluded:
            able = tuple(i for i in able if self.roster.replicas[i].incarnation not in request.excluded)
        if request.only is not None:
            able = tuple(i for i in able if self.roster.replicas[i].incarnation == request.only)
        if not able:
            why = ", ".join(f"{worker}: {reason}" for worker, reason in sorted(self.rejected(request).items()))
            raise NoReplica(
                f"no replica of {request.base_model!r} can serve this now ({why or 'the fleet has none of it'})"
            )
        if self.open_circuits:
            able = tuple(i for i in able if self.roster.replicas[i].incarnation not in self.open_circuits) or able
        return able

    def rejected(self, request: RoutingRequest) -> dict[WorkerId, str]:
        """The first filter that each replica fails, without those that pass all."""
        reasons = {
            r.id: _request_rejection(r, request)
            or rejection(r, request.engine_name)
            or length_rejection(self.roster, i, request)
            for i, r in enumerate(self.roster.replicas)
        }
        rejected = {worker: reason for worker, reason in reasons.items() if reason is not None}
        shut = {
            r.id: "circuit open"
            for r in self.roster.replicas
            if r.incarnation in self.open_circuits and r.id not in rejected
        }
        return rejected | shut if len(rejected) + len(shut) < len(reasons) else rejected


def length_rejection(roster: Roster, position: int, request: RoutingRequest) -> str | None:
    """Why a request is too long for this replica, or None.

    A request that is too long for every replica that could take it is not rejected: the engine's own refusal says more.
    """
    limit = roster.replicas[position].max_model_len
    if not 0 < limit < request.total_tokens <= roster.longest(request.engine_name) or request.only is not None:
        return None
    return f"takes {limit} tokens, and this may come to {request.total_tokens}"


def _request_rejection(replica: Replica, request: RoutingRequest) -> str | None:
    """Why the request itself excludes this replica, or None."""
    if replica.incarnation in request.excluded:
        return "failed this request before"
    return "does not keep the earlier response" if request.only not in (None, replica.incarnation) else None
