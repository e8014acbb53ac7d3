"""A scenario: a fleet, what its clients do, and what goes wrong, each at its time. Drawn (`draw.py`) or by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    has_api_server: bool = False
    """Whether the orchestrators keep their state in ConfigMaps and lead by a Lease, each on a machine of its own."""
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
    rolling: tuple[str, ...] = ()
    """Aliases of `FIXED` that move by rollouts; at first they point at the first of these."""
    tenants: tuple[str, ...] = ()
    """Tenants whose keys clients have, beside an operator's."""
    owners: Mapping[str, str] = field(default_factory=dict)
    """Adapter or published name -> the tenant that alone may use it."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`orchestrator`, `router`, `agent` -> settings of all of these services."""
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


CALLS = frozenset({"ask", "publish", "register", "delete", "point", "rollout", "hold"})
"""Events that are a client's calls. A drain is an operator's; all others are faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultScenario:
    """A run: the fleet and all that happens to it."""

    seed: int
    fleet: FleetPlan
    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        """Put the events in the order of their times. Raises ValueError for a call of a client that the fleet lacks."""
        clients = range(self.fleet.clients)
        if strangers := {event.about["client"] for event in self.events if event.kind in CALLS} - set(clients):
            raise ValueError(f"clients {sorted(strangers)}: the fleet has {list(clients)}; give FleetPlan(clients=)")
        object.__setattr__(self, "events", tuple(sorted(self.events, key=lambda event: event.at_s)))

    @property
    def faults(self) -> tuple[Event, ...]:
        """What goes wrong."""
        return tuple(event for event in self.events if event.kind not in CALLS | {"drain"})


def without(scenario: FaultScenario, dropped: Sequence[int]) -> FaultScenario:
    """The same run without these events."""
    events = tuple(event for index, event in enumerate(scenario.events) if index not in set(dropped))
    return FaultScenario(seed=scenario.seed, fleet=scenario.fleet, events=events)
