"""YAML from people's files and command lines."""

from typing import Any

import yaml


class BadYaml(ValueError):
    """A text that is none."""


def parsed(text: str) -> Any:
    """The value of a YAML text. Raises BadYaml, whatever is wrong with it: a date that is none and a nest without end
    fail outside PyYAML's own errors.
    """
    try:
        return yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as exc:
        raise BadYaml(str(exc) or type(exc).__name__) from exc
