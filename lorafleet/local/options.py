"""The options of `lorafleet up`: its flags, arguments for the engines, and settings of its services.

A setting is taken from the first source that has it: a flag of `up`, the engine's arguments, the environment, the
service's file, the default of `up`. Settings that `up` must choose itself, such as an agent's port, are refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafleet.engine import arguments
from lorafleet.engine.arguments import with_config_file
from lorafleet.engine.devices import gpus_per_engine, is_on_cpu
from lorafleet.service.failure import CommandFailed
from lorafleet.service.settings import SettingsError, did_you_mean, read_file

SERVICES = ("router", "orchestrator", "workers")
DEFAULT_WORKERS = 2
DEFAULT_SLOTS = 2
_PORTS = {"router": 8000, "orchestrator": 8080}
_OTHER_PREFIXES = (
    "LORAFLEET_URL_",
    "LORAFLEET_TOKEN",
    "LORAFLEET_FROM_TOKEN",
    "LORAFLEET_TLS_CA",
    "LORAFLEET_FLEET_MARK",
)

_FIXED_FOR_ALL = {
    "host": "all services listen on loopback; for other addresses start them yourself",
    "port_file": "it uses port files of its own",
    "tls_cert": "give --tls, which makes certificates; for your own start the services yourself",
    "tls_key": "give --tls, which makes certificates",
    "tls_ca": "give --tls, which makes an authority",
    "key_files": "give --key-file, which holds for every service",
    "token": "its services have a key of their own",
    "token_file": "its services have a key of their own",
}
_FIXED_FOR_CALLERS = dict.fromkeys(("agent_token", "agent_token_file"), "its services have keys of their own")
_STARTS_ENGINES = "it starts the engines; for a running engine use `lorafleet agent`"
_FIXED_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "router": {**_FIXED_FOR_ALL, **_FIXED_FOR_CALLERS, "orchestrator_url": "its router follows its own orchestrator"},
    "orchestrator": {**_FIXED_FOR_ALL, **_FIXED_FOR_CALLERS, "store": "the store is in --state-dir"},
    "workers": {
        **_FIXED_FOR_ALL,
        "port": "each agent takes a free port",
        "instance_id": "its workers are w0, w1 and so on",
        "engine_url": _STARTS_ENGINES,
        "engine_advertise_url": _STARTS_ENGINES,
        "engine_host": "all services listen on loopback; for other addresses start them yourself",
        "engine_port": "each engine takes a free port",
        "advertise_url": "its agents are reached on loopback",
        "orchestrator_url": "its agents report to its own orchestrator",
        "state_dir": "each worker has its own folder in --state-dir",
        "ipc_dir": "the sockets are in a temporary folder",
    },
}
_RECORD_VARIABLE = "VLLM_LORA_ADAPTER_CACHE"
"""vLLM's name of the agents' `record_dir`, below which each worker has a folder."""

_FIXED_ENGINE_FLAGS = {
    "--model": "give --model of `lorafleet up`",
    "--model-path": "give --model of `lorafleet up`",
    "--host": "all services of `lorafleet up` listen on loopback",
    "--port": "each engine takes a free port",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Settings of one service from its environment variables and its file, by name; the environment comes first."""

    config: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str, default: float) -> float:
        """A numeric setting; the default if it is missing or not a number, which the service itself refuses."""
        try:
            return float(self.values[name])
        except (KeyError, TypeError, ValueError):
            return default


NO_OPTIONS = ServiceOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """All options of one `lorafleet up`.

    max_loras, max_lora_rank  the flags; None if they were not given
    known_arguments  the engine arguments, with those of a `--config` file before them
    devices    CUDA_VISIBLE_DEVICES of each worker; empty if all workers have the same GPUs, or none
    visible_gpus  the GPUs that `up` may give to workers; empty where --devices names some, and for engines without GPU
    upload_store  the flag, with an absolute path; None if it was not given
    opens_console  whether the console is opened in a browser when the fleet is ready
    tls        whether the services have certificates, of an authority made at each start
    """

    engine: str
    workers: int
    model: Path | None
    adapters: Path | None
    max_loras: int | None
    router_port: int
    orchestrator_port: int
    state_dir: Path
    key_file: Path | None = None
    service_options: Mapping[str, ServiceOptions] = field(default_factory=dict)
    engine_arguments: tuple[str, ...] = ()
    known_arguments: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    visible_gpus: tuple[str, ...] = ()
    max_lora_rank: int | None = None
    upload_store: str | None = None
    demo: bool = False
    once: bool = False
    opens_console: bool = False
    tls: bool = False
    grace_s: float = 10.0

    def options_of(self, service: str) -> ServiceOptions:
        """The options of one service."""
        return self.service_options.get(service, NO_OPTIONS)

    def worker_settings(self) -> dict[str, Any]:
        """All settings given for the agents by engine arguments, environment or file.

        Block size, block count and longest request are None if engine arguments set them: the engine reports them.
        """
        shape = dict.fromkeys(arguments.shape_settings_in_arguments(self.known_arguments, self.engine))
        return {
            **self.options_of("workers").values,
            **shape,
            **arguments.settings_in_arguments(self.known_arguments, self.engine),
        }


def fleet_options(
    *,
    engine: str | None,
    workers: int | None,
    model: Path | None,
    adapters: Path | None,
    max_loras: int | None,
    router_port: int | None,
    orchestrator_port: int | None,
    state_dir: Path,
    key_file: Path | None,
    configs: Mapping[str, Path | None],
    devices: str | None,
    engine_arguments: Sequence[str],
    environment: Mapping[str, str],
    demo: bool,
    once: bool,
    gpus: Sequence[str] = (),
    max_lora_rank: int | None = None,
    upload_store: str | None = None,
    opens_console: bool = False,
    tls: bool = False,
) -> FleetOptions:
    """The fleet's options from flags, engine arguments, environment and files; raises CommandFailed with status 2.

    configs           service -> its settings file
    engine_arguments  one each: a flag and its value are two, unless joined by `=`
    gpus              the GPUs of this machine, of which each worker gets its own if there are enough
    """
    try:
        given = {service: _service_options(service, configs.get(service), environment) for service in SERVICES}
        worker_values = given["workers"].values
        kind = _checked_engine(engine or str(worker_values.get("engine") or "vllm"))
        all_arguments = (*_text_list(worker_values, "engine_args"), *_checked_arguments(engine_arguments))
        known = with_config_file(all_arguments)
        _refuse_fixed_arguments(all_arguments)
        _refuse_contradictions(known, {"max_loras": max_loras, "max_lora_rank": max_lora_rank}, kind)
        arguments.check_engine_arguments(known, kind, environment)
        named = _device_names(devices)
        profile = str(worker_values.get("device_profile") or "auto")
        uses_gpus = kind != "sim" and not is_on_cpu(kind, profile, environment)
        visible_gpus = tuple(gpus) if uses_gpus and not named else ()
        size = gpus_per_engine(known, kind)
        number = workers or _default_workers(len(named), len(visible_gpus), size)
        chosen = named or visible_gpus[: number * size]
        return FleetOptions(
            engine=kind,
            workers=number,
            model=model or _base_model(worker_values, known),
            adapters=adapters,
            max_loras=max_loras,
            router_port=_service_port("router", router_port, given["router"]),
            orchestrator_port=_service_port("orchestrator", orchestrator_port, given["orchestrator"]),
            state_dir=state_dir,
            key_file=key_file,
            service_options=given,
            engine_arguments=all_arguments,
            known_arguments=known,
            devices=device_groups(chosen, number) if named or len(chosen) == number * size else (),
            visible_gpus=visible_gpus,
            max_lora_rank=max_lora_rank,
            upload_store=_absolute_store(upload_store),
            demo=demo,
            once=once,
            opens_console=opens_console,
            tls=tls,
        )
    except (SettingsError, arguments.EngineArgumentsError) as exc:
        raise CommandFailed(str(exc), status=2) from exc


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """LORAFLEET_ variables that no service and no command reads."""
    known = (*(prefix_of(service) for service in SERVICES), *_OTHER_PREFIXES)
    return sorted(name for name in environment if name.startswith("LORAFLEET_") and not name.startswith(known))


def lora_roots(options: FleetOptions, adapters: Path) -> list[str]:
    """Folders that agents may read adapters from: `adapters`, the configured ones, and an upload store's folder.

    Raises CommandFailed.
    """
    store = options.upload_store or str(options.options_of("orchestrator").values.get("upload_store") or "")
    folder = store.removeprefix("file://")
    kept = [folder] if folder and "://" not in folder else []
    try:
        return [str(adapters), *_text_list(options.options_of("workers").values, "lora_roots"), *kept]
    except SettingsError as exc:
        raise CommandFailed(str(exc), status=2) from exc


def _absolute_store(store: str | None) -> str | None:
    """The upload store with an absolute path, where it is a folder."""
    return store if store is None or "://" in store else str(Path(store).absolute())


def _base_model(worker_values: Mapping[str, Any], engine_arguments: Sequence[str]) -> Path | None:
    """The base model of the agents' settings; None without one. Raises SettingsError if only the engine has one."""
    if worker_values.get("model"):
        return Path(str(worker_values["model"]))
    if any(arguments.has_flag(engine_arguments, flag) for flag in ("--model", "--model-path")):
        raise SettingsError("the file of --config names a model: give --model of `lorafleet up`, which overrides it")
    return None


def _default_workers(named: int, visible: int, size: int) -> int:
    """Workers without --workers, of which each takes `size` GPUs: all that the named GPUs hold, at most 2 of others."""
    if named:
        return max(1, named // size)
    return max(1, min(DEFAULT_WORKERS, visible // size)) if visible else DEFAULT_WORKERS


def device_groups(devices: Sequence[str], workers: int) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of each worker: the devices divided evenly, in order; empty without devices.

    Raises SettingsError if a device is named twice, or they cannot be divided.
    """
    if not devices:
        return ()
    if twice := sorted({name for name in devices if devices.count(name) > 1}):
        raise SettingsError(f"--devices: {', '.join(twice)} is named twice; each device belongs to one worker")
    if len(devices) % workers:
        raise SettingsError(
            f"--devices names {len(devices)} devices for {workers} workers: each gets the same number; give --workers,"
            f" or name {workers} devices or a multiple of it"
        )
    size = len(devices) // workers
    return tuple(",".join(devices[at : at + size]) for at in range(0, len(devices), size))


def _device_names(devices: str | None) -> list[str]:
    """The devices of `--devices`, [] without it. Raises SettingsError for an empty name."""
    if devices is None:
        return []
    names = [name.strip() for name in devices.split(",")]
    if not all(names):
        raise SettingsError(f"--devices {devices!r}: give names separated by commas, such as 0,1,2,3")
    return names


def takes_adapters_at_start(engine: str) -> bool:
    """Whether this kind of engine takes adapters at its start alone, so that its workers are started with all."""
    return engine == "sgl-jax"


def _checked_engine(engine: str) -> str:
    """The engine's kind; raises SettingsError if it is unknown."""
    if engine not in arguments.SETTING_OF_FLAG:
        known = arguments.SETTING_OF_FLAG
        raise SettingsError(f"engine {engine!r} is unknown; known: {', '.join(known)}{did_you_mean(engine, known)}")
    return engine


def _checked_arguments(engine_arguments: Sequence[str]) -> Sequence[str]:
    """The same engine arguments; raises SettingsError unless the first is a flag."""
    if engine_arguments and not engine_arguments[0].startswith("-"):
        raise SettingsError(
            f"{engine_arguments[0]!r}: `lorafleet up` has no such argument; engine arguments go behind `--`"
            " and begin with a flag: lorafleet up -- --dtype bfloat16"
        )
    return engine_arguments


def _refuse_fixed_arguments(engine_arguments: Sequence[str]) -> None:
    """Raises SettingsError for engine arguments that `up` sets itself, and for a flag with its value in one word."""
    for argument in engine_arguments:
        flag, _, rest = argument.partition(" ")
        if flag.startswith("--") and "=" not in flag and rest:
            raise SettingsError(f"give engine arguments one by one: {flag!r}, {rest!r}; found {argument!r} as one")
    for flag, why in _FIXED_ENGINE_FLAGS.items():
        if arguments.has_flag(engine_arguments, flag):
            raise SettingsError(f"{flag} cannot be given to the engines of `lorafleet up`: {why}")


def _refuse_contradictions(engine_arguments: Sequence[str], flags: Mapping[str, int | None], engine: str) -> None:
    """Raises SettingsError for engine arguments that contradict the flags of `up`, by setting."""
    found = arguments.settings_in_arguments(engine_arguments, engine)
    for setting, given in flags.items():
        value = found.get(setting)
        if given is not None and value is not None and value != str(given):
            flag = f"--{setting.replace('_', '-')}"
            raise SettingsError(f"{flag} is {given}, but {value} in the engine arguments: give only one")


def prefix_of(service: str) -> str:
    """The prefix of a service's environment variables."""
    return f"LORAFLEET_{service.upper()}_"


def _service_options(service: str, config: Path | None, environment: Mapping[str, str]) -> ServiceOptions:
    """The settings of one service from environment and file; raises SettingsError for settings that `up` chooses."""
    prefix = prefix_of(service)
    from_environment = {
        name.removeprefix(prefix).lower(): text for name, text in environment.items() if name.startswith(prefix)
    }
    if service == "workers" and (record := environment.get(_RECORD_VARIABLE)):
        from_environment.setdefault("record_dir", record)
    config_name = str(config) if config is not None else from_environment.pop("config", "")
    from_environment.pop("config", None)
    source = f"--{service}-config" if config is not None else f"{prefix}CONFIG"
    from_file = read_file(Path(config_name), source) if config_name else {}
    for name, why in _FIXED_SETTINGS[service].items():
        location = f"{prefix}{name.upper()}" if from_environment.get(name) else f"{name} in {config_name}"
        if from_environment.get(name) or from_file.get(name):
            raise SettingsError(f"{location} cannot be set for `lorafleet up`: {why}")
    return ServiceOptions(config=Path(config_name) if config_name else None, values=from_file | from_environment)


def _service_port(service: str, flag: int | None, given: ServiceOptions) -> int:
    """A service's port: the flag, else its setting, else the default. Raises SettingsError."""
    if flag is not None:
        return flag
    value = str(given.values.get("port", _PORTS[service]))
    if not value.isdigit() or int(value) > 65535:
        raise SettingsError(f"port {value!r} of the {service}: it must be a number up to 65535; 0 picks a free one")
    return int(value)


def _text_list(values: Mapping[str, Any], name: str) -> list[str]:
    """A setting that is a list of strings, JSON in the environment or YAML in a file; [] if unset.

    Raises SettingsError.
    """
    found = values.get(name) or []
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as exc:
            raise SettingsError(
                f'{prefix_of("workers")}{name.upper()}: it must be a JSON list such as ["a", "b"]; found {found!r}'
            ) from exc
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise SettingsError(
            f'{name} of the workers must be a list of strings, such as ["--seed", "1"]; found {found!r}'
        )
    return found
