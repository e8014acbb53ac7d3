"""What a failed attempt means, by its reason: one table for retries, circuits, rollouts and poison requests.

An attempt has failed when no part of its answer has reached the client. docs/operations.md has the same table for
operators, with what happened under each reason.
"""

from collections.abc import Mapping, Set
from typing import Literal, NamedTuple

Retry = Literal["elsewhere", "alone", "never"]
"""Whether the request gets another attempt.

elsewhere  yes, at another replica
alone      once, and no other suspected request is at that replica meanwhile: the engine may have died of this one
never      another replica would give the same answer
"""

Blamed = Literal["replica", "adapter", "request"]
"""Against whom the failure counts; an empty set: nobody.

replica  its circuit
adapter  the errors of its version, which roll a rollout back; of the base model where there is no adapter
request  the poison books: what engines died of is held back
"""

Sign = Literal["answered", "listed", "served", "restarted"]
"""The event after which the replica may get this request again; a restart of its engine always is one.

answered   the engine has answered its agent, or the router itself, and is not said to hang
listed     the engine's own list of adapters was read again: where the adapter is not in it, it is not resident
served     the engine has answered another request of this router
restarted  nothing less: the engine is ending, or what it said is about this request
"""


class Verdict(NamedTuple):
    """What one failed attempt means.

    may_wait      the next attempt may wait for a cold start or a restart; False: only replicas that are ready now,
                  because the engine is up and said no
    costs_budget  the next attempt counts against the retry budget; False: the engine has computed nothing
    """

    retry: Retry
    blames: Set[Blamed]
    back_after: Sign
    may_wait: bool = True
    costs_budget: bool = True


_NOBODY: frozenset[Blamed] = frozenset()
_REPLICA: frozenset[Blamed] = frozenset({"replica"})
_ADAPTER: frozenset[Blamed] = frozenset({"adapter"})
_REPLICA_AND_ADAPTER: frozenset[Blamed] = frozenset({"replica", "adapter"})
_ALL: frozenset[Blamed] = frozenset({"replica", "adapter", "request"})

VERDICTS: Mapping[str, Verdict] = {
    "connection": Verdict("elsewhere", _REPLICA, "answered"),
    "no_descriptors": Verdict("elsewhere", _NOBODY, "answered"),
    "no_answer": Verdict("alone", _ALL, "answered"),
    "begun_only": Verdict("alone", _ADAPTER, "answered"),
    "hung": Verdict("alone", _ALL, "answered"),
    "no_answer_in_time": Verdict("never", _REPLICA_AND_ADAPTER, "served"),
    "engine_unavailable": Verdict("elsewhere", _REPLICA, "served", may_wait=False),
    "engine_unauthorized": Verdict("elsewhere", _REPLICA, "served", may_wait=False),
    "engine_draining": Verdict("elsewhere", _REPLICA, "restarted"),
    "engine_dead": Verdict("alone", _ALL, "restarted"),
    "first_event_error": Verdict("alone", _REPLICA_AND_ADAPTER, "restarted", may_wait=False),
    "adapter_missing": Verdict("elsewhere", _NOBODY, "listed", costs_budget=False),
    "answer_too_large": Verdict("never", _NOBODY, "restarted"),
    "unknown_dialect": Verdict("elsewhere", _NOBODY, "restarted"),
}
"""Reason of a ReplicaUnreachable -> its verdict."""

# The attempts at a request that engines may have died of: the first, and one alone.
MAX_DEATHS = 2


def reasons_blaming(blamed: Blamed) -> frozenset[str]:
    """The reasons of failed attempts that count against a replica, an adapter or a request."""
    return frozenset([reason for reason, verdict in VERDICTS.items() if blamed in verdict.blames])
