"""Settings that the engine's command (or `engine_args`) also determines, for example `max_loras`.

The command's value becomes the setting; two different values prevent the start, as the agent would miscount slots.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from lorafleet.engine import arguments
from lorafleet.engine.arguments import LORA_PATHS, EngineArgumentsError, value_of, with_config_file
from workers.config import WorkerSettings

log = structlog.get_logger()


class CommandError(Exception):
    """The engine's command conflicts with the agent's settings; the message names the argument and a remedy."""


def words_in_effect(settings: WorkerSettings, own_command: Sequence[str]) -> tuple[str, ...]:
    """The words of the engine's command and of `engine_args`, with those of a `--config` file before them.

    Raises CommandError for a file that cannot be read.
    """
    try:
        return with_config_file((*own_command, *settings.engine_args))
    except EngineArgumentsError as exc:
        raise CommandError(str(exc)) from exc


def settings_from_command(
    settings: WorkerSettings, own_command: Sequence[str], environment: Mapping[str, str]
) -> WorkerSettings:
    """The settings with the values of the engine's command, which are logged.

    raises  CommandError if both give different values, or the engine does not accept the command
    """
    if settings.engine_url:
        if own_command:
            raise CommandError(f"engine_url {settings.engine_url} and an engine command: give only one of them")
        return settings
    words = words_in_effect(settings, own_command)
    try:
        arguments.check_engine_arguments(words, settings.engine, environment)
    except EngineArgumentsError as exc:
        raise CommandError(str(exc)) from exc
    if settings.preload_loras and arguments.has_flag(words, LORA_PATHS):
        message = "the engine's command has --lora-paths, and preload_loras names adapters: give only one"
        raise CommandError(message)
    flags = {name: flag for flag, name in arguments.SETTING_OF_FLAG[settings.engine].items()}
    changes: dict[str, Any] = {}
    if settings.engine == "sgl-jax" and (adapters := arguments.values_of(words, LORA_PATHS)):
        changes |= _preloads(adapters, settings.lora_path)
    for name, value in arguments.settings_in_arguments(words, settings.engine).items():
        setting = getattr(settings, name)
        if value == str(setting):
            continue
        if name in settings.model_fields_set:
            raise CommandError(
                f"the engine's command says {flags[name]} {value}, the setting {name} is {setting}: give only one"
            )
        changes[name] = value
        log.info("taken from the engine's command", setting=name, value=value)
    if (
        settings.engine not in {"sglang", "sgl-jax"}
        and _has_ranks(words)
        and value_of(words, "--api-server-count") is None
    ):
        # The default is the number of ranks, with which vLLM refuses to load adapters at run time.
        log.info("added to the engine's command", flag="--api-server-count 1")
        changes["engine_args"] = (*settings.engine_args, "--api-server-count", "1")
    set_values = {name: getattr(settings, name) for name in settings.model_fields_set}
    try:
        return WorkerSettings(**set_values | changes) if changes else settings
    except ValueError as exc:
        raise CommandError(f"the engine's command does not fit the agent's settings: {exc}") from exc


def _preloads(adapters: Sequence[str], lora_path: Path | None) -> dict[str, Any]:
    """`lora_path` and `preload_loras` for sgl-jax's adapters, each `name=folder` or a folder.

    So the agent verifies them, and the engine has them by their digests. Empty where a name is not the adapter's path
    below one folder: then the engine has them under the names of the command.
    """
    names = {Path(adapter.rpartition("=")[2]): adapter.rpartition("=")[0] for adapter in adapters}
    root = lora_path or _folder_of_all(names)
    below = {folder: folder.relative_to(root).as_posix() for folder in names if root and folder.is_relative_to(root)}
    if below.keys() != names.keys() or any(names[folder] not in {"", name} for folder, name in below.items()):
        log.info("the engine's adapters keep the names of its command", adapters=list(adapters))
        return {}
    log.info("taken from the engine's command", setting="preload_loras", value=list(below.values()))
    return {"lora_path": root, "preload_loras": tuple(below.values())}


def _folder_of_all(names: Mapping[Path, str]) -> Path | None:
    """The folder below which each adapter's folder is its name; None: there is none but the root.

    names  folder -> name; empty: any name fits
    """
    above = [str(folder).removesuffix(names[folder] or folder.name) for folder in names]
    root = Path(os.path.commonpath(above)) if all(folder.is_absolute() for folder in names) else None
    return root if root != Path("/") else None


def _has_ranks(words: Sequence[str]) -> bool:
    """Whether the command asks for several data-parallel ranks."""
    sizes = (value_of(words, "--data-parallel-size"), value_of(words, "-dp"))
    return any(size not in {None, "1"} for size in sizes)
