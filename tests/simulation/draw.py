"""Draws a scenario from a seed: a fleet, what its clients do, and what goes wrong, each at its time.

Faults happen mostly within half a second of a change, and changes within seconds of a fault: that is where a fleet may
break a promise. `MODEL` grows with each change of what a seed means.
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from tests.simulation.api_server import API_SERVER, API_TROUBLES
from tests.simulation.programs import EngineFlags
from tests.simulation.scenario import FIXED, MOST_CONTENTS, Event, FaultScenario, FleetPlan

MODEL = 8

_TENANTS = ("acme", "globex")
_CHANGES = frozenset({"register", "publish", "delete", "point", "rollout", "hold", "drain"})
# Each is one that operators set, within what docs/operations.md allows.
_SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "orchestrator": {"heartbeat_interval_s": (0.5, 1.5), "pass_interval_s": (0.5, 5.0), "settle_s": (5.0,)},
    "router": {"catalog_poll_s": (0.2, 5.0), "send_prompt_ids": ("off", "all"), "failover_wait_s": (30.0,)},
    "agent": {"scan_s": (1.0, 20.0), "engine_salt": ("always",)},
}


def draw_scenario(seed: int) -> FaultScenario:
    """The scenario of this seed. A fifth of the seeds has no fault, and two fifths have one."""
    rng = Random(seed)
    fleet = _fleet(rng)
    number_of_faults = rng.choice((0, 1, 1, 2, 3))
    length_s = rng.choice((3.0, 8.0, 8.0, 20.0))
    events = [*_registrations(fleet, rng), *_calls(fleet, rng, length_s)]
    moments = [event.at_s for event in events if event.kind in _CHANGES]
    for _ in range(number_of_faults):
        fault = _fault(fleet, rng, _moment(rng, moments, length_s))
        events += [fault, *_calls_after(fleet, rng, fault)]
        if rng.random() < 0.15:
            events += _outage(fleet, rng, fault.at_s, rng.randrange(fleet.routers))
    if rng.random() < 0.3:
        events += rng.choice(_situations_of(fleet))(fleet, rng, rng.random() * length_s)
    return FaultScenario(seed=seed, fleet=fleet, events=tuple(sorted(events, key=_time)))


def _fleet(rng: Random) -> FleetPlan:
    tenants = _TENANTS[: rng.choice((0, 0, 1, 2))]
    adapters = tuple(f"lora-{number}" for number in range(rng.randint(1, 6)))
    # Each keeps a slot of a worker for good, and so do the targets of an alias that moves.
    names = (*(f"{tenant}/policy" for tenant in tenants), "policy", "critic")[: rng.randint(0, 2)]
    owners = {name: rng.choice(tenants) for name in adapters if tenants and rng.random() < 0.4}
    rolling = ("canary",)[: rng.choice((0, 0, 1))]
    return FleetPlan(
        workers=rng.choice((1, 2, 2, 3, 3, 4)),
        routers=rng.choice((1, 1, 2)),
        orchestrators=rng.choice((1, 2, 2)),
        has_api_server=rng.random() < 0.3,
        clients=2,
        engine=EngineFlags(
            max_loras=(device := rng.randint(1, 3)),
            max_cpu_loras=device + rng.randint(2, 4) + 2 * len(rolling),
            blocks=rng.choice((300, 2000)),
            load_s=rng.choice((0.03, 0.3, 0.3, 2.0)),
            decode_tokens_per_s=rng.choice((50.0, 200.0)),
        ),
        contents=MOST_CONTENTS,
        names=names,
        adapters=adapters,
        aliases=("chat",)[: rng.randint(0, 1)],
        rolling=rolling,
        tenants=tenants,
        owners=owners | {name: name.split("/")[0] for name in names if "/" in name},
        settings={
            service: {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.2}
            for service, choices in _SETTINGS.items()
        },
        slowness=rng.choice((0.5, 1.0, 1.0, 4.0)),
        delay_s=rng.choice((0.0003, 0.0003, 0.005, 0.05)),
        far_s=rng.choice((0.0, 0.0, 0.02, 0.2)),
    )


def _time(event: Event) -> float:
    return event.at_s


def _registrations(fleet: FleetPlan, rng: Random) -> Iterator[Event]:
    for name in fleet.adapters:
        yield Event(at_s=rng.random(), kind="register", about=_call(fleet, rng, name, rng.randrange(fleet.contents)))
    for number, name in enumerate(FIXED if fleet.aliases or fleet.rolling else ()):
        yield Event(at_s=rng.random(), kind="register", about=_call(fleet, rng, name, number))
    for name in fleet.names:
        yield Event(at_s=rng.random(), kind="publish", about=_call(fleet, rng, name, rng.randrange(fleet.contents)))


def _call(fleet: FleetPlan, rng: Random, name: str, content: int | None = None) -> dict[str, Any]:
    """Who calls, whom, and about what."""
    return {
        "client": rng.randrange(fleet.clients), "router": rng.randrange(fleet.routers), "name": name, "content": content
    }  # fmt: skip


def _calls(fleet: FleetPlan, rng: Random, length_s: float) -> Iterator[Event]:
    """Requests in bursts, and changes of what the names stand for."""
    for _ in range(rng.randint(5, 25)):
        at_s = rng.random() * length_s
        for _ in range(rng.choice((1, 1, 2, 5))):
            yield _ask(fleet, rng, at_s + rng.random() * 0.05)
    for _ in range(rng.randint(0, 6) if fleet.names else 0):
        yield _publish(fleet, rng, rng.random() * length_s)
    for _ in range(rng.randint(0, 3)):
        yield from _deletion(fleet, rng, rng.random() * length_s)
    for _ in range(rng.randint(1, 4) if fleet.aliases else 0):
        yield _point(fleet, rng, rng.random() * length_s)
    for _ in range(rng.randint(1, 3) if fleet.rolling else 0):
        about = _call(fleet, rng, fleet.rolling[0], rng.randrange(len(FIXED)))
        about |= {"step_s": rng.choice((0.0, 1.0, 5.0)), "abort_after_s": rng.choice((None, None, rng.random() * 5))}
        yield Event(at_s=rng.random() * length_s, kind="rollout", about=about)
    for _ in range(rng.choice((0, 0, 1))):
        about = {"client": 0, "for_s": rng.random() * 10, "lease_s": rng.choice((5.0, 30.0))}
        yield Event(at_s=rng.random() * length_s, kind="hold", about=about)
    for _ in range(rng.choice((0, 0, 1))):
        at_s = rng.random() * length_s
        worker = rng.randrange(fleet.workers)
        yield Event(at_s=at_s, kind="drain", about={"worker": worker, "for_s": rng.random() * 10})


def _ask(fleet: FleetPlan, rng: Random, at_s: float) -> Event:
    """A request: mostly by one who may use the adapter, at times by another tenant."""
    name = rng.choice(fleet.adapters + fleet.names + fleet.aliases + fleet.rolling)
    ask = _call(fleet, rng, name)
    ask |= {"prefix": rng.randrange(3), "tokens": rng.choice((4, 4, 40)), "is_streamed": rng.random() < 0.4}
    if fleet.tenants:
        ask["tenant"] = rng.choice((fleet.owners.get(name, ""), "", *fleet.tenants))
        ask["salt"] = rng.choice(("", "", "one", "two"))
    return Event(at_s=at_s, kind="ask", about=ask)


def _publish(fleet: FleetPlan, rng: Random, at_s: float) -> Event:
    about = _call(fleet, rng, rng.choice(fleet.names), rng.randrange(fleet.contents))
    about |= {"asks_after": rng.choice((0, 1, 2, 4)), "at_orchestrator": rng.random() < 0.5}
    return Event(at_s=at_s, kind="publish", about=about)


def _point(fleet: FleetPlan, rng: Random, at_s: float) -> Event:
    target = rng.randrange(len(FIXED))
    about = _call(fleet, rng, fleet.aliases[0], target) | {"to": FIXED[target], "asks_after": rng.choice((0, 2, 4))}
    return Event(at_s=at_s, kind="point", about=about)


def _deletion(fleet: FleetPlan, rng: Random, at_s: float) -> Iterator[Event]:
    name = rng.choice(fleet.adapters)
    yield Event(at_s=at_s, kind="delete", about=_call(fleet, rng, name) | {"asks_after": rng.choice((0, 2))})
    if rng.random() < 0.6:
        again = _call(fleet, rng, name, rng.randrange(fleet.contents))
        yield Event(at_s=at_s + rng.random() * 3, kind="register", about=again)


def _moment(rng: Random, moments: Sequence[float], length_s: float) -> float:
    """When a fault happens: mostly beside a change."""
    if not moments or rng.random() < 0.35:
        return rng.random() * length_s
    return max(0.0, rng.choice(moments) + rng.uniform(-0.1, 0.5))


def _fault(fleet: FleetPlan, rng: Random, at_s: float) -> Event:
    """One thing that goes wrong."""
    kind = rng.choice(
        (
            "kill", "kill", "kill", "stop", "pause", "partition", "loss", "reset", "clock", "events", "power",
            "disk_full", "engine", *(("api", "api") if fleet.has_api_server else ()),
        )
    )  # fmt: skip
    about: dict[str, Any] = {"node": _process(fleet, rng)}
    if kind == "kill":
        about |= {"in_callbacks": rng.choice((1, rng.randint(1, 50), rng.randint(1, 2000)))}
        about |= {"away_s": rng.choice((0.0, rng.random(), rng.random() * 10))}
    elif kind == "stop":
        about |= {"away_s": rng.random() * 5}
    elif kind == "power":
        about |= {"away_s": rng.choice((1.0, rng.random() * 10))}
    elif kind == "pause":
        about |= {"for_s": rng.choice((0.5, rng.random() * 5, rng.random() * 60))}
    elif kind == "partition":
        about |= {"other": _process(fleet, rng), "for_s": rng.choice((1.0, rng.random() * 20))}
    elif kind == "loss":
        about = {"loss": rng.choice((0.01, 0.2)), "for_s": rng.random() * 20}
    elif kind == "clock":
        about |= {"by_s": rng.choice((-3600.0, -5.0, 5.0, 3600.0))}
    elif kind == "events":
        about = {"share": rng.choice((0.1, 1.0)), "for_s": rng.random() * 10}
    elif kind == "disk_full":
        about |= {"for_s": rng.choice((1.0, rng.random() * 20))}
    elif kind == "api":
        about = {"how": rng.choice(API_TROUBLES), "for_s": rng.choice((1.0, rng.random() * 40))}
    elif kind == "engine":
        about = {"node": f"engine{rng.randrange(fleet.workers)}", "for_s": rng.choice((1.0, rng.random() * 40))}
        about |= {
            "how": rng.choice(("hangs", "refuses", "is late")),
            "path": rng.choice(("/", "/v1/load_lora", "/v1/completions")),
        }
    return Event(at_s=at_s, kind=kind, about=about)


def _process(fleet: FleetPlan, rng: Random) -> str:
    """Any process: each service about as often, orchestrators twice, as often an API server."""
    numbers = {"orch": fleet.orchestrators, "router": fleet.routers, "w": fleet.workers, "engine": fleet.workers}
    service = rng.choice(("orch", "orch", "router", "w", "engine", *(("api", "api") if fleet.has_api_server else ())))
    if service == "api":
        return API_SERVER
    return f"{service}{rng.randrange(numbers[service])}"


def _outage(fleet: FleetPlan, rng: Random, from_s: float, router: int) -> Iterator[Event]:
    """All orchestrators are away soon after another fault, and meanwhile this router starts again."""
    at_s, away_s = from_s + rng.random() * 3, 5 + rng.random() * 10
    for number in range(fleet.orchestrators):
        yield Event(at_s=at_s, kind="kill", about={"node": f"orch{number}", "in_callbacks": 1, "away_s": away_s})
    kind, more = rng.choice((("kill", {"in_callbacks": 1}), ("power", {})))
    yield Event(at_s=at_s + rng.random(), kind=kind, about={"node": f"router{router}", "away_s": 0.5, **more})
    for _ in range(4):
        ask = _ask(fleet, rng, at_s + 1.0 + rng.random() * (away_s - 1.0))
        ask.about["router"] = router
        yield ask


Situation = Callable[[FleetPlan, Random, float], Iterator[Event]]


def _situations_of(fleet: FleetPlan) -> Sequence[Situation]:
    """Faults and calls that belong together, as far as the fleet has what they need."""
    return (
        _deletion_without_workers,
        _change_on_a_full_disk,
        *((_new_leader, _fast_trainer) if fleet.names else ()),
        *((_changes_at_a_late_api_server,) if fleet.has_api_server else ()),
        *((_leader_without_api_server,) if fleet.names and fleet.has_api_server else ()),
    )


def _new_leader(fleet: FleetPlan, rng: Random, at_s: float) -> Iterator[Event]:
    """A trainer publishes until somebody answers, from a moment at which the leader is killed."""
    yield Event(at_s=at_s, kind="kill", about={"node": "orch0", "in_callbacks": 1, "away_s": rng.random() * 5})
    publish = _publish(fleet, rng, at_s + rng.random() * 0.3)
    publish.about.update(at_orchestrator=True, again_for_s=20.0, asks_after=4)
    yield publish


def _leader_without_api_server(fleet: FleetPlan, rng: Random, at_s: float) -> Iterator[Event]:
    """A trainer publishes until somebody answers, while an orchestrator cannot reach the API server."""
    about = {"node": f"orch{rng.randrange(fleet.orchestrators)}", "other": API_SERVER, "for_s": 5 + rng.random() * 40}
    yield Event(at_s=at_s, kind="partition", about=about)
    publish = _publish(fleet, rng, at_s + rng.random() * 20)
    publish.about.update(at_orchestrator=True, again_for_s=60.0, asks_after=4)
    yield publish


def _changes_at_a_late_api_server(fleet: FleetPlan, rng: Random, at_s: float) -> Iterator[Event]:
    """An adapter is registered and deleted while answers and watches of the API server come late, and out of order."""
    yield Event(at_s=at_s, kind="api", about={"how": "is late", "for_s": 10 + rng.random() * 20})
    for number in range(3):
        from_s = at_s + number * 5 + rng.random()
        name = rng.choice(fleet.adapters)
        yield Event(at_s=from_s, kind="register", about=_call(fleet, rng, name, rng.randrange(fleet.contents)))
        about = _call(fleet, rng, name) | {"asks_after": rng.choice((2, 4))}
        yield Event(at_s=from_s + rng.random() * 3, kind="delete", about=about)


def _fast_trainer(fleet: FleetPlan, rng: Random, at_s: float) -> Iterator[Event]:
    """Versions follow each other in less time than a load takes, and requests wait for each of them."""
    name = rng.choice(fleet.names)
    for number in range(4):
        publish = _publish(fleet, rng, at_s + number * fleet.engine.load_s * rng.random())
        publish.about["name"] = name
        yield publish
        for _ in range(2):
            ask = _ask(fleet, rng, publish.at_s + rng.random() * fleet.engine.load_s)
            ask.about.update({"name": name}, **({"tenant": ""} if fleet.tenants else {}))
            yield ask


def _deletion_without_workers(fleet: FleetPlan, rng: Random, at_s: float) -> Iterator[Event]:
    """An adapter is deleted while all agents are away, which ends when they are back."""
    for number in range(fleet.workers):
        yield Event(
            at_s=at_s, kind="kill", about={"node": f"w{number}", "in_callbacks": 1, "away_s": 1 + 9 * rng.random()}
        )
    yield from _deletion(fleet, rng, at_s + rng.random())


def _change_on_a_full_disk(fleet: FleetPlan, rng: Random, at_s: float) -> Iterator[Event]:
    """A change reaches a router whose disk is full for a moment, and soon it starts again without an orchestrator."""
    router = rng.randrange(fleet.routers)
    yield Event(at_s=at_s, kind="disk_full", about={"node": f"router{router}", "for_s": 1.0})
    if fleet.aliases:
        yield _point(fleet, rng, at_s + 0.2)
    elif fleet.names:
        yield _publish(fleet, rng, at_s + 0.2)
    else:
        yield from _deletion(fleet, rng, at_s + 0.2)
    yield from _outage(fleet, rng, at_s + 8, router)


def _calls_after(fleet: FleetPlan, rng: Random, fault: Event) -> Iterator[Event]:
    """Changes and requests while a fault lasts, or where its process has just come back."""
    lasts_s = fault.about.get("away_s", fault.about.get("for_s", 0.0))
    for _ in range(rng.choice((0, 1, 2))):
        at_s = fault.at_s + rng.choice((0.0, lasts_s)) + rng.random() * rng.choice((0.2, 3.0))
        if fleet.aliases and rng.random() < 0.5:
            yield _point(fleet, rng, at_s)
        elif fleet.names and rng.random() < 0.6:
            yield _publish(fleet, rng, at_s)
        else:
            yield from _deletion(fleet, rng, at_s)
        yield _ask(fleet, rng, at_s + rng.random())
