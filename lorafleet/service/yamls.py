"""YAML of settings files, key files and command lines."""

import json
from pathlib import Path
from typing import Any

import yaml

_MERGE_TAG = "tag:yaml.org,2002:merge"


class InvalidYaml(ValueError):
    """The text is not valid YAML."""


class _UniqueKeysLoader(yaml.SafeLoader):
    """PyYAML's loader of plain values, which refuses a mapping that has a key twice; PyYAML keeps the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The mapping's node; raises yaml.YAMLError. `<<`, which merges another mapping in, may come several times."""
        node = super().compose_mapping_node(anchor)
        found = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE_TAG:
                if (key.tag, key.value) in found:
                    raise yaml.MarkedYAMLError(
                        problem=f"found the key {key.value!r} twice", problem_mark=key.start_mark
                    )
                found.add((key.tag, key.value))
        return node


def parse_yaml(text: str, *, last_wins: bool = False) -> Any:
    """The value of a YAML text; raises InvalidYaml, also for a key that a mapping has twice unless the last one wins.

    PyYAML raises errors outside its own tree for impossible dates (ValueError) and endless nesting (RecursionError).
    """
    try:
        return yaml.load(text, yaml.SafeLoader if last_wins else _UniqueKeysLoader)  # noqa: S506  (safe loaders)
    except (ValueError, RecursionError, yaml.YAMLError) as exc:
        raise InvalidYaml(str(exc) or type(exc).__name__) from exc


def parse_json_or_yaml(text: str) -> Any:
    """The value of a text that is JSON or YAML; raises InvalidYaml.

    JSON is tried first: YAML refuses its tabs, reads `1e3` as text, and takes characters apart that JSON writes as two
    escapes. It is also a hundred times as fast.
    """
    try:
        return json.loads(text, object_pairs_hook=_object_of)
    except json.JSONDecodeError:
        return parse_yaml(text)
    except (ValueError, RecursionError) as exc:  # a number of thousands of digits; endless nesting
        raise InvalidYaml(str(exc)) from exc


def _object_of(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these fields; raises InvalidYaml for a name that comes twice."""
    found: dict[str, Any] = {}
    for name, value in fields:
        if name in found:
            raise InvalidYaml(f"found the key {name!r} twice in one object")
        found[name] = value
    return found


def read_yaml(path: Path, *, last_wins: bool = False) -> Any:
    """The value of a YAML file; raises OSError, and InvalidYaml for a file that is no text or no YAML.

    last_wins  a key that a mapping has twice has its last value, and is no error
    """
    return parse_yaml(read_text(path), last_wins=last_wins)


def read_text(path: Path) -> str:
    """The text of a YAML file; raises OSError, and InvalidYaml for a file that is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidYaml(f"not text in UTF-8 (byte {exc.start}); expected a YAML file") from exc
