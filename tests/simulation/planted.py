"""Faults that the fleet once had, planted again one by one: how many seeds it takes until one of them finds each.

`python -m tests.simulation.planted` works on a copy of the tree. Seeds that cannot reach the planted lines are counted,
and not run. A fault that no seed finds is one that the model of the fleet cannot show: extend the model.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from tests.simulation.draw import draw_scenario
from tests.simulation.scenario import Event, FaultScenario

_ROOT = Path(__file__).parents[2]
_PARTS = ("lorafleet", "router", "orchestrator", "workers", "tests", "pyproject.toml")


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """A former fault, and the edit that brings it back.

    mended  the commit that mended it; empty: it never was one, and is planted to see a check fail
    needs   whether a scenario may reach the planted lines at all
    """

    name: str
    mended: str
    file: str
    now: str
    then: str
    needs: Callable[[FaultScenario], bool] = lambda _scenario: True


_ENDS = frozenset({"kill", "stop", "power"})


def _hits(scenario: FaultScenario, kinds: frozenset[str], *services: str, at_least_s: float = 0.0) -> list[Event]:
    """Faults of these kinds at processes of these services, which last for a while."""
    return [
        event
        for event in scenario.faults
        if event.kind in kinds
        and event.about.get("node", "").rstrip("0123456789") in services
        and event.about.get("for_s", at_least_s) >= at_least_s
    ]


def _is_followed(scenario: FaultScenario, faults: Sequence[Event], *kinds: str, within_s: float) -> bool:
    """Whether a call of these kinds comes soon after one of these faults."""
    return any(
        event.kind in kinds and fault.at_s <= event.at_s <= fault.at_s + within_s
        for fault in faults
        for event in scenario.events
    )


def _has_new_leader(scenario: FaultScenario) -> bool:
    """Whether a trainer publishes until a new leader answers, and routers hear of it late."""
    is_published = any(event.about.get("again_for_s") for event in scenario.events)
    return is_published and scenario.fleet.settings["router"].get("catalog_poll_s", 0.0) > 1


def _has_paused_leader(scenario: FaultScenario) -> bool:
    return scenario.fleet.orchestrators > 1 and bool(_hits(scenario, frozenset({"pause"}), "orch", at_least_s=3))


def _has_new_router(scenario: FaultScenario) -> bool:
    return bool(_hits(scenario, _ENDS, "router"))


def _has_new_router_in_an_outage(scenario: FaultScenario) -> bool:
    """Whether a change meets a full disk of a router, which starts again before the orchestrators do."""
    full = _hits(scenario, frozenset({"disk_full"}), "router")
    ends = _hits(scenario, _ENDS, "router", "orch")
    is_changed = _is_followed(scenario, full, "publish", "point", "delete", within_s=1)
    return is_changed and any(
        len({end.about["node"] for end in ends if each.at_s < end.at_s < each.at_s + 15} - {each.about["node"]})
        == scenario.fleet.orchestrators
        for each in full
    )


def _has_one_dead_engine(scenario: FaultScenario) -> bool:
    dead = _hits(scenario, frozenset({"kill"}), "engine")
    return len(scenario.faults) == len(dead) == 1 and scenario.fleet.workers > 1


def _has_new_engine(scenario: FaultScenario) -> bool:
    return bool(_hits(scenario, _ENDS, "engine"))


def _has_fast_trainer(scenario: FaultScenario) -> bool:
    """Whether a name gets three versions within the time of two loads."""
    moments = defaultdict(list)
    for event in scenario.events:
        if event.kind == "publish":
            moments[event.about["name"]].append(event.at_s)
    within_s = 2 * scenario.fleet.engine.load_s
    return any(
        last - first <= within_s for times in moments.values() for first, last in zip(times, times[2:], strict=False)
    )


def _has_deletion_without_a_worker(scenario: FaultScenario) -> bool:
    """Whether an adapter is deleted while all agents are away."""
    ends = [event.at_s for event in _hits(scenario, _ENDS, "w")]
    away = [event for event in _hits(scenario, _ENDS, "w") if ends.count(event.at_s) == scenario.fleet.workers]
    return _is_followed(scenario, away, "delete", within_s=1)


def _has_deletion_at_a_late_api_server(scenario: FaultScenario) -> bool:
    late = [event for event in scenario.faults if event.kind == "api" and event.about["how"] == "is late"]
    return _is_followed(scenario, late, "delete", within_s=10)


def _has_power_loss_of_the_store(scenario: FaultScenario) -> bool:
    return bool(_hits(scenario, frozenset({"power"}), "orch"))


def _has_strangers(scenario: FaultScenario) -> bool:
    owners = scenario.fleet.owners
    return any(
        event.about.get("tenant") not in {None, "", owners.get(event.about["name"])} for event in _asks(scenario)
    )


def _has_salted_adapters(scenario: FaultScenario) -> bool:
    return "engine_salt" in scenario.fleet.settings["agent"] and bool(scenario.fleet.tenants)


def _has_aborted_rollout(scenario: FaultScenario) -> bool:
    return any(event.kind == "rollout" and event.about["abort_after_s"] is not None for event in scenario.events)


def _asks(scenario: FaultScenario) -> list[Event]:
    """Those of adapters and names that one tenant alone may use."""
    return [event for event in scenario.events if event.kind == "ask" and event.about["name"] in scenario.fleet.owners]


FAULTS = (
    PlantedFault(
        "a publish is answered before routers go by it",
        "",
        "orchestrator/reconcile/confirmations.py",
        "name\n            for name, router in self._routers.items()\n            if router.revision < revision and",
        "name\n            for name, router in self._routers.items()\n            if False and",
    ),
    PlantedFault(
        "a new leader answers before any router is heard of",
        "a3363b01",
        "orchestrator/reconcile/confirmations.py",
        "self._expected, self._gathers_until = expected, self._clock() + gather_s",
        "self._expected, self._gathers_until = 0, self._clock()",
        _has_new_leader,
    ),
    PlantedFault(
        "a heartbeat that was on its way takes the result of a load back",
        "1bc99149",
        "orchestrator/reconcile/agent_view.py",
        "newer = [change for change in view.changes if as_of(report).is_before(change.at)]",
        "newer = []",
    ),
    PlantedFault(
        "a saved catalog goes on with a gap after a failed write",
        "988b6126",
        "router/fleet/saved_catalog.py",
        "            self._retry_at = now + backoff_s(self._failures, *_RETRY_S)\n",
        "            self._retry_at = None\n",
        _has_new_router_in_an_outage,
    ),
    PlantedFault(
        "a leader acts on after its lease",
        "8e4864f0",
        "orchestrator/core/lease.py",
        "return 0.0 if self._until is None else max(0.0, self._until - now)",
        "return 0.0 if self._until is None else max(0.0, self._until + 10.0 - now)",
        _has_paused_leader,
    ),
    PlantedFault(
        "agents take the commands of a replaced leader",
        "",
        "workers/agent/agent.py",
        "if epoch < self.context.installed.epoch:",
        "if False and epoch < self.context.installed.epoch:",
        _has_paused_leader,
    ),
    PlantedFault(
        "a request that waits for a version fails when that is deleted",
        "abe1bdee",
        "router/request/run.py",
        "renamed = await self._follow_name(target)",
        "renamed = None",
        _has_fast_trainer,
    ),
    PlantedFault(
        "a restarted router goes by its saved catalog before it asks",
        "61a212b8",
        "router/fleet/discovery.py",
        "if self._url and not (self.has_catalog and self._catalog.has_asked):",
        "if self._url and not self.has_catalog:",
        _has_new_router,
    ),
    PlantedFault(
        "a request whose engine dies is not sent again",
        "",
        "router/request/run.py",
        "self._check_retry(exc, target)",
        "raise",
        _has_one_dead_engine,
    ),
    PlantedFault(
        "the restart of an attached engine is not noticed",
        "",
        "workers/agent/supervisor.py",
        "return await client.boot_mark() != self._agent.engine.boot_id",
        "return False",
        _has_new_engine,
    ),
    PlantedFault(
        "a worker that returns keeps what was deleted",
        "e4a62907",
        "orchestrator/store/store.py",
        "if digest is not None and not is_retired_version(",
        "if False and not is_retired_version(",
        _has_deletion_without_a_worker,
    ),
    PlantedFault(
        "what was deleted comes back with the API server's watch",
        "a7b480ac",
        "orchestrator/configmaps/mirror.py",
        "if self._deleted.get(name) == uid_of(found):\n            return",
        "if False:\n            return",
        _has_deletion_at_a_late_api_server,
    ),
    PlantedFault(
        "the store does not flush its commits",
        "",
        "orchestrator/store/sqlite.py",
        'db.execute("PRAGMA synchronous = FULL")',
        'db.execute("PRAGMA synchronous = NORMAL")',
        _has_power_loss_of_the_store,
    ),
    PlantedFault(
        "every tenant may use every adapter",
        "",
        "lorafleet/keys/roles.py",
        'return tenants is None or self.may("load")',
        'return True or self.may("load")',
        _has_strangers,
    ),
    PlantedFault(
        "requests of all salts share their KV where adapters are salted",
        "",
        "router/request/cache_salt.py",
        "return adapter_salt(engine_name, _checked_salt(cache_salt))",
        'return adapter_salt(engine_name, "")',
        _has_salted_adapters,
    ),
    PlantedFault(
        "everyone finds tenants' cached prompts",
        "",
        "router/request/cache_salt.py",
        "return own_salt(tenant, key_id, _checked_salt(given))",
        "return _checked_salt(given)",
        lambda scenario: bool(scenario.fleet.tenants),
    ),
    PlantedFault(
        "an aborted rollout goes on to its end",
        "",
        "orchestrator/core/rollout.py",
        "return (ended, rollout.before) if rollout.is_active",
        "return (ended, rollout.after) if rollout.is_active",
        _has_aborted_rollout,
    ),
)


def main() -> int:
    """Print a line for each fault: the seeds that it took, or that none found it."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted", description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="most seeds that are run for each fault")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="", help="faults whose name has this text")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if given.only in fault.name]
    return max([_hunt(fault, given.first, given.runs) for fault in chosen], default=0)


def _hunt(fault: PlantedFault, first: int, most: int) -> int:
    """Plant a fault in a copy of the tree, and run seeds there until one breaks a promise."""
    tried = list(islice((seed for seed in count(first) if fault.needs(draw_scenario(seed))), most))
    with tempfile.TemporaryDirectory() as folder:
        for part in _PARTS:
            source = _ROOT / part
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, Path(folder) / part)
        target = Path(folder) / fault.file
        text = target.read_text()
        if text.count(fault.now) != 1:
            print(f"{fault.name}: {fault.file} has the text {text.count(fault.now)} times, not once: mend this table")
            return 1
        target.write_text(text.replace(fault.now, fault.then))
        seeds = [
            sys.executable,
            "-m",
            "tests.simulation",
            "seeds",
            "0",
            "--no-shrink",
            "--only",
            ",".join(map(str, tried)),
        ]
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONHASHSEED": "0"}
        runs, broken = 0, ""
        with subprocess.Popen(
            [*seeds, "--first-broken"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        ) as running:
            assert running.stdout is not None
            for line in running.stdout:
                runs += " simulated, " in line
                broken = broken or (line.strip() if line.startswith("  BROKEN") else "")
    last = tried[runs - 1] if runs else first
    is_found = bool(broken) and _holds_without(last)
    found = f"found by seed {last}: {broken[:150]}" if is_found else "not found"
    if broken and not is_found:
        found = f"seed {last} breaks a promise without it, too: mend that first"
    print(f"{fault.name}: {found}; {last - first + 1} seeds drawn, {runs} run", flush=True)
    return 0 if is_found else 1


def _holds_without(seed: int) -> bool:
    """Whether a seed holds every promise in the tree as it is."""
    command = [sys.executable, "-m", "tests.simulation", "seeds", "0", "--only", str(seed), "--no-shrink"]
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "PYTHONHASHSEED": "0"}
    return subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.DEVNULL, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
