"""The choice of one replica: filter -> cost -> pick."""

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

import msgspec

from router.core.fleet import Replica
from router.core.kv.index import WorkerId
from router.core.schedule.cost import ReplicaScore, kappa, replica_score
from router.core.schedule.request import RoutingRequest
from router.core.schedule.snapshot import FleetSnapshot


class Decision(msgspec.Struct, frozen=True):
    """The chosen replica, its position in the snapshot's roster, and everything that it was chosen from.

    The same policy, request and snapshot give the same decision again.
    """

    policy: str
    request: RoutingRequest
    snapshot: FleetSnapshot
    position: int
    replica: Replica
    score: ReplicaScore

    @property
    def rank(self) -> int | None:
        """The data-parallel rank to ask for; None: the engine chooses."""
        return self.snapshot.ranks.get(self.replica.id)

    @property
    def kappa(self) -> float:
        """Price of work against waiting in this decision."""
        return kappa(self.snapshot.rho, self.snapshot.costs)

    @property
    def scores(self) -> tuple[ReplicaScore, ...]:
        """The cost terms of every able replica."""
        able = self.snapshot.able(self.request)
        return tuple([replica_score(self.request, self.snapshot, position) for position in able])

    @property
    def rejected(self) -> dict[WorkerId, str]:
        """The filter that each replica failed, without those that pass all."""
        return self.snapshot.rejected(self.request)


class RoutingPolicy(Protocol):
    """A rule that picks one replica. It keeps nothing between decisions that could change one."""

    name: ClassVar[str]

    def choose(self, request: RoutingRequest, snapshot: FleetSnapshot) -> tuple[int, ReplicaScore]:
        """The position in the roster, and its score; raises NoReplica when every replica failed a filter."""
        ...


@runtime_checkable
class ForeseeablePolicy(RoutingPolicy, Protocol):
    """A policy that can tell which replicas it does not choose, at less than the cost of a choice."""

    def may_choose(
        self, request: RoutingRequest, snapshot: FleetSnapshot, positions: Sequence[int], other: int
    ) -> bool:
        """Whether `choose` may return one of these positions; False only if it certainly does not.

        positions, other  all able; the other one is likely to be better than these
        """
        ...


def decide(policy: RoutingPolicy, request: RoutingRequest, snapshot: FleetSnapshot) -> Decision:
    """The policy's decision on this request; raises NoReplica."""
    position, score = policy.choose(request, snapshot)
    return Decision(policy.name, request, snapshot, position, snapshot.roster.replicas[position], score)
