"""The KV connector in an engine's command, parsed as vLLM does.

source  vLLM 0.32 utils/argparse_utils.py FlexibleArgumentParser, engine/arg_utils.py
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lorafleet.engine.arguments import last_value
from lorafleet.kv.connectors import ConnectorVerdict, connector_verdict, offloading_config
from workers.engines.command import CommandError

_CONFIG = "--kv-transfer-config"
_SIZE = "--kv-offloading-size"
_BACKEND = "--kv-offloading-backend"
# argparse accepts any prefix that is unique among vLLM's flags.
_SHORTEST: Mapping[str, str] = {_CONFIG: "--kv-t", _SIZE: "--kv-offloading-s", _BACKEND: "--kv-offloading-b"}
# vLLM accepts numbers such as `80m` outside of strings.
_STRINGS = re.compile(r'("(?:[^"\\]|\\.)*")')
_SUFFIXED = re.compile(r"\b(\d+)(?:\.\d+)?[kKmMgGtT]\b")


def connector_from_command(words: Sequence[str]) -> ConnectorVerdict | None:
    """The verdict on the KV connector that an engine's command names; None if it names none.

    Reads `--kv-transfer-config` (JSON, or single fields by `--kv-transfer-config.field value`) and
    `--kv-offloading-size`, in every spelling that vLLM accepts.
    words   with those of a `--config` file, see `words_in_effect`
    raises  CommandError, naming the argument, for invalid JSON
    """
    config = _transfer_config(words)
    if _last_value(words, _SIZE) not in {None, "", "None"}:
        # In vLLM this connector replaces the other one.
        config = {**(config or {}), **offloading_config(_last_value(words, _BACKEND) or "native")}
    return None if config is None else connector_verdict(config)


def _transfer_config(words: Sequence[str]) -> Mapping[str, Any] | None:
    """The value of `--kv-transfer-config`, from its fields or its JSON; None without one.

    Raises CommandError for fields that clash.
    """
    fields = list(_dotted_fields(words))
    if fields:  # vLLM appends them as one JSON object, and the last argument wins
        config: dict[str, Any] = {}
        for path, value in fields:
            inner = config
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
                if not isinstance(inner, dict):
                    raise CommandError(f"{_CONFIG}.{'.'.join(path)}: {name} has a value already")
            inner[path[-1]] = value
        return config
    value = _last_value(words, _CONFIG)
    return None if value in {None, "", "None"} else _parse_object(value)


def _parse_object(text: str) -> Mapping[str, Any]:
    """The JSON object of `--kv-transfer-config`. Raises CommandError."""
    try:
        value = json.loads(_without_number_suffixes(text))
    except ValueError as exc:
        raise CommandError(f"{_CONFIG} {text!r}: {exc}; give vLLM's JSON object, {_EXAMPLE}") from exc
    if not isinstance(value, dict):
        raise CommandError(f"{_CONFIG} {text!r}: expected a JSON object, {_EXAMPLE}, found {type(value).__name__}")
    return value


_EXAMPLE = """as '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'"""


def _without_number_suffixes(text: str) -> str:
    """The text with numbers such as `80m` made valid JSON."""
    parts = _STRINGS.split(text)
    parts[::2] = [_SUFFIXED.sub(r"\1", part) for part in parts[::2]]
    return "".join(parts)


def _dotted_fields(words: Sequence[str]) -> Iterator[tuple[list[str], Any]]:
    """(names, value) of each `--kv-transfer-config.name.name value`; a `+` after the names makes the value a list."""
    for word, following in pairwise((*words, "")):
        flag, equals, value = word.partition("=")
        head, dot, path = flag.partition(".")
        if not dot or not _is_flag(head, _CONFIG):
            continue
        text = value if equals else following
        yield path.removesuffix("+").split("."), text.split(",") if path.endswith("+") else _json_or_text(text)


def _json_or_text(text: str) -> Any:
    """The JSON value of a text, or the text if it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _last_value(words: Sequence[str], flag: str) -> str | None:
    """The value of the last occurrence of a flag in any spelling; None without one."""
    return last_value(words, lambda word: _is_flag(word.partition("=")[0], flag))


def _is_flag(word: str, flag: str) -> bool:
    """Whether a word is a spelling of the flag that vLLM accepts."""
    spelling = word.replace("_", "-")
    return len(spelling) >= len(_SHORTEST[flag]) and flag.startswith(spelling)
