"""Stored JSON back into the types it was written from. Anything else is a ValueError."""

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def typed(value: object, kind: type[T], label: str) -> T:
    """`value` converted to this type: dicts to dataclasses, lists to tuples; unknown fields are dropped.

    Raises ValueError, which names `label` and the place in it.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        raise ValueError(f"{label}: {exc}") from exc


def parsed(text: object, label: str) -> Any:
    """The decoded JSON text. Raises ValueError, also for a blob and for too deep nesting."""
    if not isinstance(text, str):
        raise ValueError(f"{label}: Expected JSON text, got {type(text).__name__}")  # noqa: TRY004  (data, no fault of ours)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"{label}: no JSON: {exc}") from exc
