"""What a seed draws: a fleet, what its clients do, and what goes wrong, each at its time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.simulation.programs import EngineFlags

MOST_CONTENTS = 6
FIXED = ("fixed-0", "fixed-1")
"""Adapters that have the bytes 0 and 1 for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The fleet: how many of each service, the engines' sizes, the services' settings and how slow each machine is."""

    workers: int = 1
    routers: int = 1
    orchestrators: int = 1
    clients: int = 2
    engine: EngineFlags = field(default_factory=EngineFlags)
    contents: int = MOST_CONTENTS
    """How many different adapters' bytes there are."""
    names: tuple[str, ...] = ()
    """Published names."""
    adapters: tuple[str, ...] = ()
    """Adapters that are registered by a name of their own."""
    aliases: tuple[str, ...] = ()
    """Aliases of `FIXED`, adapters that are never deleted."""
    slowness: float = 1.0
    delay_s: float = 0.0003
    """Of a packet between two machines, at least."""
    far_s: float = 0.0
    """What it takes longer between the last router and the orchestrators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happens, `at_s` seconds after the fleet is ready."""

    at_s: float
    kind: str
    about: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.at_s:8.3f} {self.kind} " + " ".join(f"{key}={value}" for key, value in self.about.items())


CALLS = frozenset({"ask", "publish", "register", "delete", "point", "hold"})
"""Events that are a client's calls. A drain is an operator's; all others are faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultScenario:
    """A run: the fleet and all that happens to it."""

    seed: int
    fleet: FleetPlan
    events: tuple[Event, ...]

    @property
    def faults(self) -> tuple[Event, ...]:
        """What goes wrong."""
        return tuple(event for event in self.events if event.kind not in CALLS | {"drain"})


def draw_scenario(seed: int) -> FaultScenario:
    """The scenario of this seed. A quarter of the seeds have no fault, another one."""
    rng = Random(seed)
    fleet = FleetPlan(
        workers=rng.choice((1, 2, 2, 3, 3, 4)),
        routers=rng.choice((1, 1, 2)),
        orchestrators=rng.choice((1, 1, 2)),
        clients=2,
        engine=EngineFlags(
            max_loras=(device := rng.randint(1, 3)),
            max_cpu_loras=device + rng.randint(2, 4),
            blocks=rng.choice((300, 2000)),
            load_s=rng.choice((0.03, 0.3, 0.3, 2.0)),
            decode_tokens_per_s=rng.choice((50.0, 200.0)),
        ),
        contents=MOST_CONTENTS,
        names=("policy", "critic")[: rng.randint(0, 2)],
        adapters=tuple(f"tenant-{number}" for number in range(rng.randint(1, 6))),
        aliases=("chat",)[: rng.randint(0, 1)],
        slowness=rng.choice((0.5, 1.0, 1.0, 4.0)),
        delay_s=rng.choice((0.0003, 0.0003, 0.005, 0.05)),
        far_s=rng.choice((0.0, 0.0, 0.02, 0.2)),
    )
    number_of_faults = rng.choice((0, 1, 2, 4))
    length_s = rng.choice((5.0, 20.0, 20.0, 60.0))
    events = [*_registrations(fleet, rng), *_calls(fleet, rng, length_s)]
    events += [_fault(fleet, rng, length_s) for _ in range(number_of_faults)]
    return FaultScenario(seed=seed, fleet=fleet, events=tuple(sorted(events, key=_time)))


def _time(event: Event) -> float:
    return event.at_s


def _registrations(fleet: FleetPlan, rng: Random) -> Iterator[Event]:
    for name in fleet.adapters:
        yield Event(at_s=rng.random(), kind="register", about=_call(fleet, rng, name, rng.randrange(fleet.contents)))
    for number, name in enumerate(FIXED if fleet.aliases else ()):
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
    everything = fleet.adapters + fleet.names + fleet.aliases
    for _ in range(rng.randint(5, 25)):
        at_s = rng.random() * length_s
        for _ in range(rng.choice((1, 1, 2, 5))):
            ask = _call(fleet, rng, rng.choice(everything))
            ask |= {
                "prefix": rng.randrange(3), "tokens": rng.choice((4, 4, 40)), "is_streamed": rng.random() < 0.4
            }  # fmt: skip
            yield Event(at_s=at_s + rng.random() * 0.05, kind="ask", about=ask)
    for _ in range(rng.randint(0, 6) if fleet.names else 0):
        about = _call(fleet, rng, rng.choice(fleet.names), rng.randrange(fleet.contents))
        about |= {"asks_after": rng.choice((0, 1, 2, 4)), "at_orchestrator": rng.random() < 0.5}
        yield Event(at_s=rng.random() * length_s, kind="publish", about=about)
    for _ in range(rng.randint(0, 3)):
        name = rng.choice(fleet.adapters)
        at_s = rng.random() * length_s
        about = _call(fleet, rng, name) | {"asks_after": rng.choice((0, 2))}
        yield Event(at_s=at_s, kind="delete", about=about)
        if rng.random() < 0.6:
            again = _call(fleet, rng, name, rng.randrange(fleet.contents))
            yield Event(at_s=at_s + rng.random() * 3, kind="register", about=again)
    for _ in range(rng.randint(1, 4) if fleet.aliases else 0):
        target = rng.randrange(len(FIXED))
        about = _call(fleet, rng, fleet.aliases[0], target) | {"to": FIXED[target]}
        yield Event(at_s=rng.random() * length_s, kind="point", about=about)
    for _ in range(rng.choice((0, 0, 1))):
        about = {"client": 0, "for_s": rng.random() * 10, "lease_s": rng.choice((5.0, 30.0))}
        yield Event(at_s=rng.random() * length_s, kind="hold", about=about)
    for _ in range(rng.choice((0, 0, 1))):
        at_s = rng.random() * length_s
        worker = rng.randrange(fleet.workers)
        yield Event(at_s=at_s, kind="drain", about={"worker": worker, "for_s": rng.random() * 10})


def _fault(fleet: FleetPlan, rng: Random, length_s: float) -> Event:
    """One thing that goes wrong."""
    processes = [
        *(f"orch{number}" for number in range(fleet.orchestrators)),
        *(f"router{number}" for number in range(fleet.routers)),
        *(f"w{number}" for number in range(fleet.workers)),
        *(f"engine{number}" for number in range(fleet.workers)),
    ]
    at_s = rng.random() * length_s
    kind = rng.choice(("kill", "kill", "kill", "stop", "pause", "partition", "loss", "reset", "clock", "events"))
    about: dict[str, Any] = {"node": rng.choice(processes)}
    if kind == "kill":
        about |= {"in_callbacks": rng.choice((1, rng.randint(1, 50), rng.randint(1, 2000)))}
        about |= {"away_s": rng.choice((0.0, rng.random(), rng.random() * 20))}
    elif kind == "stop":
        about |= {"away_s": rng.random() * 5}
    elif kind == "pause":
        about |= {"for_s": rng.choice((0.5, rng.random() * 10, rng.random() * 60))}
    elif kind == "partition":
        about |= {"other": rng.choice(processes), "for_s": rng.choice((1.0, rng.random() * 30))}
    elif kind == "loss":
        about = {"loss": rng.choice((0.01, 0.2)), "for_s": rng.random() * 20}
    elif kind == "clock":
        about |= {"by_s": rng.choice((-3600.0, -5.0, 5.0, 3600.0))}
    elif kind == "events":
        about = {"share": rng.choice((0.1, 1.0)), "for_s": rng.random() * 10}
    return Event(at_s=at_s, kind=kind, about=about)


def without(scenario: FaultScenario, dropped: Sequence[int]) -> FaultScenario:
    """The same run without these events."""
    events = tuple(event for index, event in enumerate(scenario.events) if index not in set(dropped))
    return FaultScenario(seed=scenario.seed, fleet=scenario.fleet, events=events)
