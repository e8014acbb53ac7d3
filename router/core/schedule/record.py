"""Decisions as JSON: a record has all that a decision read, so that it can be made again with the same result."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from types import MappingProxyType
from typing import Any

import msgspec

from router.core.fleet import EngineReport, Excluded, Replica, ResidentAdapter, Roster
from router.core.kv.index import WorkerId
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.load_snapshot import FleetLoad, ReplicaLoad
from router.core.schedule.policies import POLICIES
from router.core.schedule.policy import Decision, decide
from router.core.schedule.request import RoutingRequest
from router.core.schedule.snapshot import FleetSnapshot

_NO_DEFAULT = object()
_SETS = ("engine_names", "fresh", "draining")


def record_of(decision: Decision) -> dict[str, Any]:
    """The decision as JSON data for `replay_decision`; its keys are part of the REST API.

    Fields with their default value are left out, and so are adapters that the request did not name.
    """
    request, snapshot = decision.request, decision.snapshot
    return {
        "policy": decision.policy,
        "ask": _changed_fields(request) | {"excluded": sorted(list(pair) for pair in request.excluded)},
        "replicas": [_plain_replica(replica, request.engine_name) for replica in snapshot.roster.replicas],
        "loads": [_changed_fields(own) for own in snapshot.loads],
        "depths": dict(snapshot.depths),
        "lower": {worker: list(blocks) for worker, blocks in snapshot.lower.items()},
        "ranks": dict(snapshot.ranks),
        "backlog": dict(snapshot.backlog),
        "shut": sorted(list(pair) for pair in snapshot.open_circuits),
        "rho": snapshot.rho,
        "context_tokens": snapshot.context_tokens,
        "now": snapshot.now,
        "seed": snapshot.seed,
        "turn": snapshot.turn,
        # In full: another version may have other defaults.
        "costs": asdict(snapshot.costs),
    }


def replay_decision(record: Mapping[str, Any]) -> Decision:
    """Make a decision again from its record. Raises NoReplica as the first time, KeyError or TypeError for bad data."""
    data = dict(record)
    policy = POLICIES[data.pop("policy")]()
    request_data = data.pop("ask")
    (only,) = _decode_incarnations([request_data["only"]]) if request_data.get("only") else (None,)
    request = RoutingRequest(
        **request_data | {"excluded": _decode_incarnations(request_data["excluded"]), "only": only}
    )
    snapshot = FleetSnapshot(
        roster=Roster(tuple(_decode_replica(plain) for plain in data.pop("replicas"))),
        loads=FleetLoad.of(ReplicaLoad(**_with_sets(plain)) for plain in data.pop("loads")),
        lower={worker: (host, storage) for worker, (host, storage) in data.pop("lower").items()},
        open_circuits=_decode_incarnations(data.pop("shut", ())),
        costs=CostSettings(**data.pop("costs")),
        **data,
    )
    return decide(policy, request, snapshot)


def _changed_fields(thing: Any) -> dict[str, Any]:
    """The fields of a value that differ from their defaults, sets as sorted lists."""
    found = {}
    for name, default in _fields_with_defaults(type(thing)):
        value = getattr(thing, name)
        if value != default:
            assert not isinstance(value, float) or math.isfinite(value), "JSON has no infinity; only defaults may be"
            found[name] = sorted(value) if isinstance(value, frozenset) else value
    return found


def _fields_with_defaults(kind: Any) -> Iterator[tuple[str, Any]]:
    """(name, default) of the fields of a struct, named tuple or dataclass; `_NO_DEFAULT` where there is none."""
    if issubclass(kind, msgspec.Struct):
        for known in msgspec.structs.fields(kind):
            yield known.name, _NO_DEFAULT if known.default is msgspec.NODEFAULT else known.default
        return
    if issubclass(kind, tuple):
        for name in kind._fields:
            yield name, kind._field_defaults.get(name, _NO_DEFAULT)
        return
    for field in fields(kind):
        yield field.name, field.default_factory() if field.default_factory is not MISSING else field.default


def _plain_replica(replica: Replica, engine_name: str) -> dict[str, Any]:
    """A replica as JSON data, with the request's adapter alone."""
    resident = replica.residents.get(engine_name)
    plain = _changed_fields(replica) | {"report": _changed_fields(replica.report), "draining": []}
    plain["residents"] = {engine_name: _changed_fields(resident)} if resident is not None else {}
    if engine_name in replica.draining:
        plain["draining"] = [engine_name]
    return plain


def _decode_replica(plain: Mapping[str, Any]) -> Replica:
    """The replica of JSON data; the inverse of `_plain_replica`."""
    residents = {name: ResidentAdapter(**resident) for name, resident in plain["residents"].items()}
    return Replica(
        **_with_sets(plain) | {"report": EngineReport(**plain["report"]), "residents": MappingProxyType(residents)}
    )


def _decode_incarnations(plain: Iterable[Sequence[str]]) -> Excluded:
    """(worker, boot id) pairs of JSON data as incarnations."""
    return frozenset((WorkerId(worker), boot) for worker, boot in plain)


def _with_sets(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with lists as sets or tuples where the value had those."""
    found = {name: frozenset(value) if name in _SETS else value for name, value in plain.items()}
    return found | {"victims": tuple(map(tuple, found["victims"]))} if "victims" in found else found
