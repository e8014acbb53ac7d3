"""Lets all apps of a process share what FastAPI makes anew for each route of each app."""

from typing import Any

import fastapi._compat.v2 as fastapi_fields
from pydantic import TypeAdapter

_made: dict[str, TypeAdapter[Any]] = {}


def share_type_adapters() -> None:
    """Make each route's type adapter once: they are two thirds of what it takes to build an app."""
    make = fastapi_fields.TypeAdapter

    def shared(kind: Any, **settings: Any) -> TypeAdapter[Any]:
        # An `Annotated` type cannot always be hashed; its text names all of it.
        key = f"{kind!r} {settings!r}"
        if key not in _made:
            _made[key] = make(kind, **settings)
        return _made[key]

    fastapi_fields.TypeAdapter = shared  # type: ignore[misc,assignment]
