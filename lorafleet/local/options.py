"""The options of `lorafleet up`: its flags, arguments for the engines, and settings of its services.

The first source that has a setting counts: a flag of `up`, the engine's arguments, the environment, the service's file,
the default of `up`. A setting that `up` must choose by itself, such as a port of an agent, is refused by name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafleet.engine import arguments
from lorafleet.service.failure import CommandFailed
from lorafleet.service.settings import SettingsError, did_you_mean, read_file

HOUSES = ("router", "orchestrator", "workers")
DEFAULT_WORKERS = 2
DEFAULT_SLOTS = 2
_PORTS = {"router": 8000, "orchestrator": 8080}
_OTHERS = ("LORAFLEET_URL_", "LORAFLEET_TOKEN", "LORAFLEET_FLEET_MARK")

_OF_ALL = {
    "host": "everything of it listens on loopback; for other addresses run the services by themselves",
    "port_file": "it reads the ports from files of its own",
    "key_files": "give --key-file, which is for every service",
    "token": "its services are given a key of their own",
    "token_file": "its services are given a key of their own",
}
_ENGINE_OF_ITS_OWN = "it starts the engines; for a running one use `python -m workers`"
_OWN: Mapping[str, Mapping[str, str]] = {
    "router": {**_OF_ALL, "orchestrator_url": "its router follows its own orchestrator"},
    "orchestrator": {**_OF_ALL, "store": "the store is in --state-dir"},
    "workers": {
        **_OF_ALL,
        "port": "each agent takes a free port",
        "instance_id": "its workers are w0, w1 and so on",
        "engine_url": _ENGINE_OF_ITS_OWN,
        "engine_advertise_url": _ENGINE_OF_ITS_OWN,
        "engine_host": "everything of it listens on loopback; for other addresses run the services by themselves",
        "engine_port": "each engine takes a free port",
        "advertise_url": "its agents are reached on loopback",
        "orchestrator_url": "its agents report to its own orchestrator",
        "state_dir": "each worker has a folder of its own in --state-dir",
        "ipc_dir": "the sockets are in a folder that goes with the fleet",
    },
}
_OWN_WORDS = {
    "--model": "give --model of `lorafleet up`",
    "--model-path": "give --model of `lorafleet up`",
    "--host": "everything of `lorafleet up` listens on loopback",
    "--port": "each engine takes a free port",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Settings of one service that a person gave, by name: texts of the environment over values of its file."""

    config: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str, default: float) -> float:
        """The setting; the default where it is not given, or is no number, which the service itself refuses."""
        try:
            return float(self.values[name])
        except (KeyError, TypeError, ValueError):
            return default


NOTHING = ServiceOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """A fleet as it was asked for.

    max_loras   the flag alone: None where it was not given
    devices     CUDA_VISIBLE_DEVICES of each worker; empty where no device was named
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
    given: Mapping[str, ServiceOptions] = field(default_factory=dict)
    engine_words: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    demo: bool = False
    once: bool = False
    grace_s: float = 10.0

    def of(self, house: str) -> ServiceOptions:
        return self.given.get(house, NOTHING)

    def said_of_workers(self) -> dict[str, Any]:
        """Every setting of the agents that a person gave, by the engine's arguments, the environment or a file."""
        shape = dict.fromkeys(arguments.said_of_shape(self.engine_words, self.engine))
        return {**self.of("workers").values, **shape, **arguments.said(self.engine_words, self.engine)}


def asked(
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
    words: Sequence[str],
    environment: Mapping[str, str],
    demo: bool,
    once: bool,
) -> FleetOptions:
    """The fleet that flags, arguments for the engines, environment and files add up to. Raises Failure, status 2.

    configs   service -> its file
    words     arguments for the engines, each by itself
    """
    try:
        given = {house: _given(house, configs.get(house), environment) for house in HOUSES}
        of_workers = given["workers"].values
        kind = _kind(engine or str(of_workers.get("engine") or "vllm"))
        all_words = (*_texts(of_workers, "engine_args"), *_begun_with_a_flag(words))
        _check_words(all_words, max_loras, kind)
        arguments.refuse(all_words, kind, environment)
        number = workers if workers is not None else len(_named(devices)) or DEFAULT_WORKERS
        return FleetOptions(
            engine=kind,
            workers=number,
            model=model or (Path(str(of_workers["model"])) if of_workers.get("model") else None),
            adapters=adapters,
            max_loras=max_loras,
            router_port=_port("router", router_port, given["router"]),
            orchestrator_port=_port("orchestrator", orchestrator_port, given["orchestrator"]),
            state_dir=state_dir,
            key_file=key_file,
            given=given,
            engine_words=all_words,
            devices=device_groups(_named(devices), number),
            demo=demo,
            once=once,
        )
    except (SettingsError, arguments.EngineArgumentsError) as exc:
        raise CommandFailed(str(exc), status=2) from exc


def unread(environment: Mapping[str, str]) -> list[str]:
    """Variables that are named like settings of ours and that no service and no command reads."""
    known = (*(prefix_of(house) for house in HOUSES), *_OTHERS)
    return sorted(name for name in environment if name.startswith("LORAFLEET_") and not name.startswith(known))


def lora_roots(options: FleetOptions, own: Path) -> list[str]:
    """Folders that the agents may read adapters from: ours, and those that a person gave. Raises Failure."""
    try:
        return [str(own), *_texts(options.of("workers").values, "lora_roots")]
    except SettingsError as exc:
        raise CommandFailed(str(exc), status=2) from exc


def device_groups(devices: Sequence[str], workers: int) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of each worker: the devices dealt out in order, as many to each. Raises SettingsError."""
    if not devices:
        return ()
    if twice := sorted({name for name in devices if devices.count(name) > 1}):
        raise SettingsError(f"--devices: {', '.join(twice)} is named twice; one device is one worker's")
    if len(devices) % workers:
        raise SettingsError(
            f"--devices names {len(devices)} for {workers} workers: each gets as many; give --workers, or name"
            f" {workers} devices or a multiple of it"
        )
    size = len(devices) // workers
    return tuple(",".join(devices[at : at + size]) for at in range(0, len(devices), size))


def _named(devices: str | None) -> list[str]:
    if devices is None:
        return []
    names = [name.strip() for name in devices.split(",")]
    if not all(names):
        raise SettingsError(f"--devices {devices!r}: give names with commas between them, as 0,1,2,3")
    return names


def _kind(engine: str) -> str:
    if engine not in arguments.SAME:
        known = arguments.SAME
        raise SettingsError(
            f"engine {engine!r}: there is no such engine; known: {', '.join(known)}{did_you_mean(engine, known)}"
        )
    return engine


def _begun_with_a_flag(words: Sequence[str]) -> Sequence[str]:
    if words and not words[0].startswith("-"):
        raise SettingsError(
            f"{words[0]!r}: `lorafleet up` takes no such word; arguments for the engines stand behind `--` and begin"
            " with a flag: lorafleet up -- --dtype bfloat16"
        )
    return words


def _check_words(words: Sequence[str], max_loras: int | None, engine: str) -> None:
    for word in words:
        flag, _, rest = word.partition(" ")
        if flag.startswith("--") and "=" not in flag and rest:
            raise SettingsError(f"each argument of an engine by itself: {flag!r}, {rest!r}; found {word!r} as one")
    for flag, why in _OWN_WORDS.items():
        if arguments.has(words, flag):
            raise SettingsError(f"{flag} cannot be given to the engines of `lorafleet up`: {why}")
    said = arguments.said(words, engine).get("max_loras")
    if max_loras is not None and said is not None and said != str(max_loras):
        raise SettingsError(f"--max-loras is {max_loras}, and {said} by the engine's arguments: give only one")


def prefix_of(house: str) -> str:
    """How the variables begin that are settings of this service."""
    return f"LORAFLEET_{house.upper()}_"


def _given(house: str, config: Path | None, environment: Mapping[str, str]) -> ServiceOptions:
    prefix = prefix_of(house)
    by_environment = {
        name.removeprefix(prefix).lower(): text for name, text in environment.items() if name.startswith(prefix)
    }
    named = str(config) if config is not None else by_environment.pop("config", "")
    by_environment.pop("config", None)
    by_file = read_file(Path(named)) if named else {}
    for name, why in _OWN[house].items():
        where = f"{prefix}{name.upper()}" if by_environment.get(name) else f"{name} in {named}"
        if by_environment.get(name) or by_file.get(name):
            raise SettingsError(f"{where} cannot be set for `lorafleet up`: {why}")
    return ServiceOptions(config=Path(named) if named else None, values=by_file | by_environment)


def _port(house: str, flag: int | None, given: ServiceOptions) -> int:
    if flag is not None:
        return flag
    said = str(given.values.get("port", _PORTS[house]))
    if not said.isdigit() or int(said) > 65535:
        raise SettingsError(f"port {said!r} of the {house}: expected is a number up to 65535; 0 picks a free one")
    return int(said)


def _texts(values: Mapping[str, Any], name: str) -> list[str]:
    """A setting that is a list of texts, as JSON in the environment or as YAML's. Raises SettingsError."""
    found = values.get(name) or []
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as exc:
            raise SettingsError(
                f'{prefix_of("workers")}{name.upper()}: a list is JSON: ["a", "b"]; found {found!r}'
            ) from exc
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise SettingsError(f'{name} of the workers: expected is a list of texts, as ["--seed", "1"]; found {found!r}')
    return found
