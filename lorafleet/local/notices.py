"""Lines that `lorafleet up` says on its way: what steers the fleet, what its folder knows, what its workers do."""

from collections.abc import Collection, Mapping
from pathlib import Path

from lorafleet.local.options import HOUSES, FleetOptions, prefix_of, unread

_MOST_NAMED = 5


def told_of(options: FleetOptions, environment: Mapping[str, str]) -> list[str]:
    """A line for each thing beside the flags of `up` that steers this fleet, or that somebody may think does."""
    lines = []
    given = {prefix_of(house) for house in HOUSES}
    if names := sorted(name for name in environment if name.startswith(tuple(given))):
        lines.append(f"settings of the environment: {', '.join(names)}")
    lines += [f"settings of the {house}: {path}" for house in HOUSES if (path := options.of(house).config)]
    if names := unread(environment):
        prefixes = " or ".join(sorted(given))
        lines.append(f"no service reads {', '.join(names)}: settings begin with {prefixes}")
    if options.engine != "sim" and options.workers > 1 and not options.devices and Path("/dev/nvidia0").exists():
        lines.append(
            f"all {options.workers} workers start on the same GPUs, and each takes most of their memory:"
            " --devices 0,1,... gives each its own"
        )
    return lines


def known_before(known: Mapping[str, str | None], now: Collection[str], base_model: str) -> list[str]:
    """A line for the registered adapters that this run did not register, and one for those that it cannot serve.

    known   lora_id -> base model, None where nobody has looked at it yet
    now     lora_ids of this run
    """
    others = {lora_id: base for lora_id, base in known.items() if lora_id not in now}
    foreign = [lora_id for lora_id, base in others.items() if base not in (None, base_model)]
    lines = []
    if rest := sorted(others.keys() - set(foreign)):
        lines.append(f"{len(rest)} more are registered from earlier runs: {_some(rest)}")
    if foreign:
        bases = ", ".join(sorted({str(others[lora_id]) for lora_id in foreign}))
        lines.append(
            f"{len(foreign)} from earlier runs are of base model {bases} and cannot be served here, by {base_model}:"
            f" {_some(foreign)}; `lorafleet adapters rm NAME` forgets one, another --state-dir keeps fleets apart"
        )
    return lines


def _some(names: Collection[str]) -> str:
    shown = sorted(names)[:_MOST_NAMED]
    return ", ".join(shown) + (", ..." if len(names) > _MOST_NAMED else "")


def held_back(worker: str, state: str, command: str) -> str:
    """What a worker does that was cordoned or drained in an earlier run, and the command that lifts it.

    command   `lorafleet` with the flags that reach this fleet
    """
    lift = f"to lift that: {command} workers uncordon {worker}"
    if state == "cordoned":
        return f"{worker}: cordoned since an earlier run: it is given no adapter; {lift}"
    return f"{worker}: drained since an earlier run: it is up and takes no request; {lift}"


def starting(engine: str, now: str) -> str:
    """What a worker that is not up does; `now` is a state, or a state and its reason."""
    reason = now.splitlines()[0].removeprefix("starting").removeprefix(": ")
    return f"starting {engine} ({reason})" if reason else f"starting {engine}"
