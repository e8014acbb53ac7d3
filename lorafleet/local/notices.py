"""Lines that `lorafleet up` prints while it starts: settings in force, adapters of earlier runs, states of workers."""

from collections.abc import Collection, Mapping

from lorafleet.local.options import SERVICES, FleetOptions, prefix_of, unknown_variables

_MOST_NAMED = 5


def startup_notices(options: FleetOptions, environment: Mapping[str, str]) -> list[str]:
    """A line for each settings source besides the flags of `up`, and for variables that nothing reads."""
    lines = []
    prefixes = {prefix_of(service) for service in SERVICES}
    if names := sorted(name for name in environment if name.startswith(tuple(prefixes))):
        lines.append(f"settings from the environment: {', '.join(names)}")
    lines += [
        f"settings file of the {service}: {path}"
        for service in SERVICES
        if (path := options.options_of(service).config)
    ]
    if names := unknown_variables(environment):
        known_prefixes = " or ".join(sorted(prefixes))
        lines.append(f"no service reads {', '.join(names)}; settings begin with {known_prefixes}")
    return [*lines, *_gpu_notices(options)]


def _gpu_notices(options: FleetOptions) -> list[str]:
    """The line that says which GPUs the workers have, where --devices does not."""
    visible = ",".join(options.visible_gpus)
    if options.devices and visible:
        each = ", ".join(f"w{number}: {names}" for number, names in enumerate(options.devices))
        return [f"GPUs of each worker: {each}; visible are {visible}, and --devices and --workers choose others"]
    if options.workers > 1 and visible:
        return [
            f"all {options.workers} workers start on the same GPUs ({visible}), of which vLLM takes most of the memory;"
            " start fewer with --workers, or give each a part: -- --gpu-memory-utilization 0.4"
        ]
    return []


def earlier_adapter_notices(registered: Mapping[str, str | None], now: Collection[str], base_model: str) -> list[str]:
    """A line for adapters registered in earlier runs, and one for those of another base model.

    registered  lora_id -> base model, None if it is not known yet
    now         lora_ids of this run
    """
    others = {lora_id: base for lora_id, base in registered.items() if lora_id not in now}
    foreign = [lora_id for lora_id, base in others.items() if base not in (None, base_model)]
    lines = []
    if others_here := sorted(others.keys() - set(foreign)):
        lines.append(f"{len(others_here)} more are registered from earlier runs: {_first_names(others_here)}")
    if foreign:
        bases = ", ".join(sorted({str(others[lora_id]) for lora_id in foreign}))
        lines.append(
            f"{len(foreign)} from earlier runs are for base model {bases} and cannot be served by {base_model}:"
            f" {_first_names(foreign)}; `lorafleet adapters rm NAME` removes one; --state-dir keeps fleets apart"
        )
    return lines


def _first_names(names: Collection[str]) -> str:
    """The first few names, and `...` if there are more."""
    shown = sorted(names)[:_MOST_NAMED]
    return ", ".join(shown) + (", ..." if len(names) > _MOST_NAMED else "")


def held_back_notice(worker: str, state: str, command: str) -> str:
    """The line for a worker that an earlier run cordoned or drained, with the command that ends that.

    command  `lorafleet` with the flags that reach this fleet
    """
    undo = f"to undo that: {command} workers uncordon {worker}"
    if state == "cordoned":
        return f"{worker}: cordoned since an earlier run: it gets no adapters; {undo}"
    return f"{worker}: drained since an earlier run: it takes no requests; {undo}"


def starting_status(engine: str, now: str) -> str:
    """The status of a worker that is not up yet; `now` is its state, with a reason if there is one."""
    reason = now.splitlines()[0].removeprefix("starting").removeprefix(": ")
    return f"starting {engine} ({reason})" if reason else f"starting {engine}"
