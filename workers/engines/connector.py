"""Which KV connector an engine's command asks for: read as vLLM reads it.

source  vLLM 0.32 utils/argparse_utils.py FlexibleArgumentParser, engine/arg_utils.py
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lorafleet.engine.arguments import last_value
from lorafleet.kv.connectors import ConnectorVerdict, judged, offloaded
from lorafleet.service import yamls
from workers.engines.adopt import CommandError

_CONFIG = "--kv-transfer-config"
_SIZE = "--kv-offloading-size"
_BACKEND = "--kv-offloading-backend"
# argparse takes any beginning that no other flag of vLLM's has.
_SHORTEST: Mapping[str, str] = {_CONFIG: "--kv-t", _SIZE: "--kv-offloading-s", _BACKEND: "--kv-offloading-b"}
_FILE = "--config"
# `80m` stands for a number, outside of texts.
_STRINGS = re.compile(r'("(?:[^"\\]|\\.)*")')
_SUFFIXED = re.compile(r"\b(\d+)(?:\.\d+)?[kKmMgGtT]\b")


def named_connector(words: Sequence[str]) -> ConnectorVerdict | None:
    """What the words of an engine's command say of a KV connector; None: they name none.

    Read are `--kv-transfer-config` (JSON, or its fields by `--kv-transfer-config.field value`) and
    `--kv-offloading-size`, in every spelling that vLLM takes, on the command line and in the file of `--config`.
    raises  CommandError, naming the argument, for what is no JSON object, or a file that cannot be read
    """
    words = (*_from_file(words), *words)
    config = _transfer_config(words)
    if _last(words, _SIZE) not in {None, "", "None"}:
        # vLLM writes this connector's name over the other's.
        config = {**(config or {}), **offloaded(_last(words, _BACKEND) or "native")}
    return None if config is None else judged(config)


def _transfer_config(words: Sequence[str]) -> Mapping[str, Any] | None:
    fields = list(_fields(words))
    if fields:  # vLLM puts them behind everything else, as one JSON, and the last one counts
        whole: dict[str, Any] = {}
        for path, value in fields:
            inner = whole
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
                if not isinstance(inner, dict):
                    raise CommandError(f"{_CONFIG}.{'.'.join(path)}: {name} has a value of its own already")
            inner[path[-1]] = value
        return whole
    said = _last(words, _CONFIG)
    if said is None or said in {"", "None"}:
        return None
    return _object(said)


def _object(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(_plain_numbers(text))
    except ValueError as exc:
        raise CommandError(f"{_CONFIG} {text!r}: {exc}; give vLLM's JSON object, {_EXAMPLE}") from exc
    if not isinstance(found, dict):
        raise CommandError(f"{_CONFIG} {text!r}: expected a JSON object, {_EXAMPLE}, found {type(found).__name__}")
    return found


_EXAMPLE = """as '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'"""


def _plain_numbers(text: str) -> str:
    parts = _STRINGS.split(text)
    parts[::2] = [_SUFFIXED.sub(r"\1", part) for part in parts[::2]]
    return "".join(parts)


def _fields(words: Sequence[str]) -> Iterator[tuple[list[str], Any]]:
    """(names, value) of each `--kv-transfer-config.name.name value`; a `+` behind the names makes it a list."""
    for word, following in pairwise((*words, "")):
        flag, equals, value = word.partition("=")
        head, dot, path = flag.partition(".")
        if not dot or not _is(head, _CONFIG):
            continue
        text = value if equals else following
        yield path.removesuffix("+").split("."), text.split(",") if path.endswith("+") else _value(text)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _last(words: Sequence[str], flag: str) -> str | None:
    """The value of the last such flag, in any spelling that `_is` knows; None where the flag is not given."""
    return last_value(words, lambda word: _is(word.partition("=")[0], flag))


def _is(word: str, flag: str) -> bool:
    said = word.replace("_", "-")
    return len(said) >= len(_SHORTEST[flag]) and flag.startswith(said)


def _from_file(words: Sequence[str]) -> list[str]:
    """The words that vLLM makes of its `--config` file; it reads one only where the name stands apart."""
    path = next((following for word, following in pairwise((*words, "")) if word == _FILE), None)
    if path is None:
        return []
    try:
        told = yamls.parsed(Path(path).read_text()) or {}
    except (OSError, ValueError) as exc:  # ValueError: no text, or no YAML
        raise CommandError(
            f"{_FILE} {path}: {exc}; give a YAML file of vLLM's arguments that the agent can read"
        ) from exc
    if not isinstance(told, dict):
        raise CommandError(f"{_FILE} {path}: expected a mapping of vLLM's arguments, found {type(told).__name__}")
    found = []
    for name, value in told.items():
        if not isinstance(value, bool | list):
            found += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found
