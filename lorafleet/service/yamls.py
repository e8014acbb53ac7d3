"""YAML of settings files and command lines."""

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
