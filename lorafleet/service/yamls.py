"""YAML of settings files, key files and command lines."""

from pathlib import Path
from typing import Any

import yaml


class InvalidYaml(ValueError):
    """The text is not valid YAML."""


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; raises InvalidYaml.

    PyYAML raises errors outside its own tree for impossible dates (ValueError) and endless nesting (RecursionError).
    """
    try:
        return yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as exc:
        raise InvalidYaml(str(exc) or type(exc).__name__) from exc


def read_yaml(path: Path) -> Any:
    """The value of a YAML file; raises OSError, and InvalidYaml for a file that is no text or no YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidYaml(f"not text in UTF-8 (byte {exc.start}); expected a YAML file") from exc
    return parse_yaml(text)
