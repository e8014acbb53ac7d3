"""Names that people write: lora_ids, aliases and published names; and what every class of this folder has.

A resource is a frozen dataclass whose annotations hold its bounds. Core decides on it, so nothing here imports
pydantic: pydantic reads the annotations below by its protocol.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from lorafleet.identity import lora_id_of

WIRE = 1
"""The version of what the orchestrator and other processes tell each other."""

MESSAGE = {"extra": "ignore", "use_attribute_docstrings": True}
"""`__pydantic_config__` of an answer, and of what our own processes tell each other: versions may differ."""

RESOURCE = {"extra": "forbid", "use_attribute_docstrings": True, "allow_inf_nan": False}
"""`__pydantic_config__` of a resource: unknown keys are refused, and OpenAPI shows the docstring under a field."""


@dataclass(frozen=True, slots=True)
class Checked:
    """In an annotation: pydantic calls `check`, which returns the value or raises ValueError with the rule's text."""

    check: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        # The form of `pydantic_core.core_schema.no_info_after_validator_function`, which core may not import.
        return {
            "type": "function-after",
            "schema": handler(source),
            "function": {"type": "no-info", "function": self.check},
        }


@dataclass(frozen=True, slots=True)
class Pattern:
    """In an annotation: pydantic refuses a text that the expression does not match, and shows it in OpenAPI."""

    expression: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "pattern": self.expression}


_LORA_ID_PART = r"[A-Za-z0-9._-]([A-Za-z0-9._:@-]*[A-Za-z0-9._-])?"
_LORA_ID = re.compile(rf"{_LORA_ID_PART}(/{_LORA_ID_PART})*")
_ROUTE_WORDS = frozenset({"check", "ensure", "retry", "rollout", "history"})


def checked_lora_id(lora_id: str) -> str:
    """The lora_id. Raises ValueError, which names the rule that it breaks."""
    return checked_name(lora_id, "lora_id")


def checked_name(name: str, what: str, *, most: int = 200) -> str:
    """The name of an adapter, alias or published name. Raises ValueError, which names the rule that it breaks.

    what  the field that has it, for the error
    """
    if not 1 <= len(name) <= most:
        raise ValueError(f"{what} has {len(name)} characters; 1 to {most} are allowed")
    parts = name.split("/")
    if "" in parts:
        # `x/` is not `x`: who writes one may mean another name, so neither stands for the other.
        right = "/".join(filter(None, parts)) or "x/y"
        raise ValueError(f"{what} {name!r} has an empty part: one '/' stands between two parts, as in {right!r}")
    if "." in parts or ".." in parts:
        raise ValueError(f"{what} {name!r} may not have a '.' or '..' part")
    if not _LORA_ID.fullmatch(name):
        allowed = "letters, digits, '.', '_' and '-', in parts joined by '/', and ':' and '@' within a part"
        raise ValueError(f"{what} {name!r} may hold {allowed}")
    if lora_id_of(name) != name:
        raise ValueError(f"{what} {name!r} may not end in '@' and 12 hex digits: these name a version")
    if parts[-1] in _ROUTE_WORDS:
        raise ValueError(f"{what} {name!r} may not end in {parts[-1]!r}: that word is a route")
    return name


LoraId = Annotated[str, Checked(checked_lora_id)]


def _checked_engine_name(name: str) -> str:
    """The lora_id, or a version's name in an engine. Raises ValueError, which names the rule that it breaks."""
    checked_lora_id(lora_id_of(name))
    return name


HeldName = Annotated[str, Checked(_checked_engine_name)]
"""An adapter on a worker: its lora_id, or its engine name."""


MOST_VERSIONS = 100
"""Versions of a published name that may stay. A worker has a few slots; more would be a way to fill disks."""


_MOST_NAME_LENGTH = 180
"""A version's lora_id is longer than its name, by its number."""


def checked_published_name(name: str) -> str:
    """The published name. Raises ValueError, which names the rule that it breaks: those of lora_ids, and a length."""
    return checked_name(name, "name", most=_MOST_NAME_LENGTH)


def _checked_alias(name: str) -> str:
    """The alias. Raises ValueError, which names the rule that it breaks."""
    return checked_name(name, "alias")


AliasName = Annotated[str, Checked(_checked_alias)]


NameToPublish = Annotated[str, Checked(checked_published_name)]
"""A published name."""
