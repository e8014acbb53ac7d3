"""The processes of a fleet by kind, for tests that kill them."""

from tests.e2e.fleets import RunningFleet

# A guard starts an engine and ends it when its agent dies.
KINDS = ("router", "orchestrator", "workers", "engine", "guard")


def kind_of(command: str) -> str:
    words = command.split("\0")
    module = words[words.index("-m") + 1] if "-m" in words else ""
    if any(word.endswith("guard.py") for word in words):
        return "guard"
    return {"lorafleet.sim": "engine"}.get(module, module if module in KINDS else "helper")


def victims(fleet: RunningFleet) -> dict[str, set[int]]:
    """The processes of each kind. Without `up` itself, whose death ends the fleet, and without Python's own helpers."""
    found: dict[str, set[int]] = {kind: set() for kind in KINDS}
    for pid, command in fleet.processes().items():
        kind = kind_of(command)
        if pid != fleet.process.pid and kind in found:
            found[kind].add(pid)
    return found


def has_successor(fleet: RunningFleet, victim: int, whole: dict[str, int]) -> bool:
    """Whether a killed process is replaced and the fleet is whole: all processes run, and every worker is ready.

    whole  the sizes before the kill
    """
    now = victims(fleet)
    return victim not in set().union(*now.values()) and sizes(now) == whole and fleet.is_whole()


def sizes(processes: dict[str, set[int]]) -> dict[str, int]:
    return {kind: len(pids) for kind, pids in processes.items()}
