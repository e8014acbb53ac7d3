"""Faults that the fleet once had, planted again one by one: how many seeds it takes until one of them finds each.

`python -m tests.simulation.planted` works on a copy of the tree. A fault that no seed finds is one that the model of
the fleet cannot show: extend the model.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PARTS = ("lorafleet", "router", "orchestrator", "workers", "tests", "pyproject.toml")


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """A former fault, and the edit that brings it back. `mended`: the commit that mended it."""

    name: str
    mended: str
    file: str
    now: str
    then: str


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
        "        self._failed_at = self.clock()\n",
        "        self._failed_at = None\n",
    ),
    PlantedFault(
        "a leader acts on after its lease",
        "8e4864f0",
        "orchestrator/core/lease.py",
        "return 0.0 if self._until is None else max(0.0, self._until - now)",
        "return 0.0 if self._until is None else max(0.0, self._until + 10.0 - now)",
    ),
    PlantedFault(
        "agents take the commands of a replaced leader",
        "",
        "workers/agent/agent.py",
        "if epoch < self.context.installed.epoch:",
        "if False and epoch < self.context.installed.epoch:",
    ),
    PlantedFault(
        "a request that waits for a version fails when that is deleted",
        "abe1bdee",
        "router/request/run.py",
        "renamed = await self._follow_name(target)",
        "renamed = None",
    ),
    PlantedFault(
        "a restarted router goes by its saved catalog before it asks",
        "61a212b8",
        "router/fleet/discovery.py",
        "if self._url and not (self.has_catalog and self._catalog.has_asked):",
        "if self._url and not self.has_catalog:",
    ),
    PlantedFault(
        "a request whose engine dies is not sent again",
        "",
        "router/request/run.py",
        "self._check_retry(exc, target)",
        "raise",
    ),
    PlantedFault(
        "the restart of an attached engine is not noticed",
        "",
        "workers/agent/supervisor.py",
        "return await client.boot_mark() != self._agent.engine.boot_id",
        "return False",
    ),
    PlantedFault(
        "a worker that returns keeps what was deleted",
        "e4a62907",
        "orchestrator/store/store.py",
        "if digest is not None and not is_retired_version(",
        "if False and not is_retired_version(",
    ),
    PlantedFault(
        "the store does not flush its commits",
        "",
        "orchestrator/store/sqlite.py",
        'db.execute("PRAGMA synchronous = FULL")',
        'db.execute("PRAGMA synchronous = NORMAL")',
    ),
    PlantedFault(
        "every tenant may use every adapter",
        "",
        "lorafleet/keys/roles.py",
        'return tenants is None or self.may("load")',
        'return True or self.may("load")',
    ),
    PlantedFault(
        "requests of all salts share their KV where adapters are salted",
        "",
        "router/request/engine_body.py",
        'return adapter_salt(engine_name, cache_salt or "")',
        'return adapter_salt(engine_name, "")',
    ),
    PlantedFault(
        "an aborted rollout goes on to its end",
        "",
        "orchestrator/core/rollout.py",
        "return (ended, rollout.before) if rollout.is_active",
        "return (ended, rollout.after) if rollout.is_active",
    ),
)


def main() -> int:
    """Print a line for each fault: the seeds that it took, or that none found it."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="most seeds for each fault")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="", help="faults whose name has this text")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if given.only in fault.name]
    return max([_hunt(fault, given.first, given.seeds) for fault in chosen], default=0)


def _hunt(fault: PlantedFault, first: int, most: int) -> int:
    """Plant a fault in a copy of the tree, and run seeds there until one breaks a promise."""
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
        seeds = [sys.executable, "-m", "tests.simulation", "seeds", str(most), "--from", str(first), "--first-broken"]
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONHASHSEED": "0"}
        tried, broken = 0, ""
        with subprocess.Popen(seeds, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            for line in running.stdout:
                tried += " simulated, " in line
                broken = broken or (line.strip() if line.startswith("  BROKEN") else "")
    outcome = f"found after {tried} seeds: {broken[:150]}" if broken else f"not found in {tried} seeds"
    print(f"{fault.name}: {outcome}", flush=True)
    return 0 if broken else 1


if __name__ == "__main__":
    sys.exit(main())
