"""Runs one scenario in this process, which is used up by it: clock, chance and threads are replaced for good."""

import asyncio
import hashlib
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from lorafleet.keys.key_edits import add_key
from tests.simulation import programs, zmq_sockets
from tests.simulation.determinism import Replaced, running_node
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.guarantees import Broken
from tests.simulation.network import Network
from tests.simulation.scenario import FaultScenario
from tests.simulation.world import FleetWorld

SCOPES = ("admin", "register", "load", "worker", "agent", "agent-load", "infer")


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came of a run. `log_digest`: equal for equal runs."""

    broken: list[Broken]
    log_digest: str
    virtual_s: float
    callbacks: int
    operations: int


def run_scenario(
    scenario: FaultScenario,
    replaced: Replaced,
    *,
    model: Path,
    contents: Path,
    folder: Path,
    show: Callable[[str], None],
) -> RunResult:
    """Run it in `folder`, which is emptied first. Each line of the services' logs goes to `show`.

    contents  folder with the adapters' bytes, `content-0` and so on
    """
    with_loop = prepare(scenario.seed, replaced, folder=folder, show=show)
    loop = with_loop.loop
    keys = {scope: add_key(folder / "keys.yaml", None, [scope]) for scope in SCOPES}
    for tenant in scenario.fleet.tenants:
        keys[tenant] = add_key(folder / "keys.yaml", tenant, ["infer", "register"])
    paths = programs.Paths(
        model=model, shelf=contents, state=folder / "state", key_file=folder / "keys.yaml", keys=keys
    )
    began = loop.time()
    world = FleetWorld(scenario, loop, with_loop.bus, paths)
    loop.run_until_complete(world.run())
    shutil.rmtree(folder, ignore_errors=True)
    return RunResult(
        world.broken, with_loop.digest.hexdigest(), loop.time() - began, loop.callbacks, len(world.history.operations)
    )


@dataclass(frozen=True, slots=True)
class PreparedLoop:
    """A loop with a network and a bus of KV events, on which nothing runs yet. `digest`: of the log's lines so far."""

    loop: SimulatedLoop
    bus: zmq_sockets.EventBus
    digest: Any


def prepare(seed: int, replaced: Replaced, *, folder: Path, show: Callable[[str], None]) -> PreparedLoop:
    """Make this process ready for one run of this seed, in an empty `folder` with the folder `state` in it."""
    replaced.chance.seed(seed)
    random.seed(replaced.chance.getrandbits(64))  # Python gives a forked process another one
    digest = _log_into(replaced, folder, show)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "state").mkdir(parents=True)
    loop = SimulatedLoop(replaced.clock, replaced.chance)
    asyncio.set_event_loop(loop)
    loop.network = Network(loop)
    bus = zmq_sockets.EventBus(loop)
    zmq_sockets.install(bus)
    return PreparedLoop(loop, bus, digest)


def _log_into(replaced: Replaced, folder: Path, show: Callable[[str], None]) -> Any:
    """Let every log line go to `show`, with its time and its process; returns the digest of all of them."""
    digest = hashlib.sha256()

    def take(_logger: object, level: str, event: dict[str, Any]) -> Any:
        node = running_node.get()
        about = " ".join(f"{name}={value!r}" for name, value in event.items() if name != "event")
        process = node.name if node is not None else "-"
        line = f"{replaced.clock.now:11.6f} {process:8} {level:8} {event['event']} {about}".replace(str(folder), "")
        digest.update(line.encode())
        show(line)
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.processors.format_exc_info, take])
    return digest
