"""The YAML file of arguments that an engine reads by its `--config`.

source  vLLM 0.32 utils/argparse_utils.py, SGLang 0.5.23 srt/server_args_config_parser.py
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lorafleet.engine.arguments import EngineArgumentsError
from lorafleet.service import yamls

_FLAG = "--config"


def with_config_file(arguments: Sequence[str]) -> tuple[str, ...]:
    """The arguments of the engine's `--config` file, then the given ones, so that the last of a flag counts.

    Engines read the file only if its name is a separate argument.

    raises  EngineArgumentsError for a file that cannot be read or is no mapping
    """
    name = next((following for argument, following in pairwise((*arguments, "")) if argument == _FLAG), None)
    return tuple(arguments) if name is None else (*_arguments_in(name), *arguments)


def _arguments_in(name: str) -> list[str]:
    """The arguments in the file; raises EngineArgumentsError."""
    if not name:
        raise EngineArgumentsError(f"{_FLAG} names no file: give a YAML file of the engine's arguments behind it")
    try:
        content = yamls.read_yaml(Path(name), last_wins=True) or {}  # as engines read it
    except (OSError, ValueError) as exc:  # ValueError: no text, or no YAML
        raise EngineArgumentsError(
            f"{_FLAG} {name}: {exc}; give a YAML file of the engine's arguments that this process can read"
        ) from exc
    if not isinstance(content, dict):
        raise EngineArgumentsError(
            f"{_FLAG} {name}: expected a mapping of the engine's arguments, found {type(content).__name__}"
        )
    return [argument for flag, value in content.items() for argument in _arguments_of(str(flag), value)]


def _arguments_of(flag: str, value: Any) -> list[str]:
    """One entry of the file as arguments."""
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list):
        return [f"--{flag}", *map(str, value)] if value else []
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
