"""Fields of a request's body that its route does not know: refused, with the names of those that it knows.

Bodies between services ignore them in a sender's name: a newer version may send more. Services say so by a header.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args

from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError

WIRE_HEADER = "x-lorafleet-wire"
"""Header of calls between services of a fleet: fields that the receiver does not know are of a newer version."""
WIRE_HEADERS: Mapping[str, str] = {WIRE_HEADER: "1"}
_MOST_NAMED = 3


def unknown_fields_text(route: object, errors: Iterable[Mapping[str, Any]]) -> str:
    """`NAME: there is no such field; known: ...` for pydantic's findings of unknown fields; empty without one."""
    model = _body_type(route)
    found = [error["loc"] for error in errors if error["type"] == "extra_forbidden"]
    texts = []
    for loc in found[:_MOST_NAMED]:
        path = [part for part in loc if part != "body"]
        known = ", ".join(_known_at(model, path[:-1]))
        name = ascii(".".join(map(str, path)))[1:-1][:80]
        texts.append(f"{name}: there is no such field" + (f"; known: {known}" if known else ""))
    left = len(found) - _MOST_NAMED
    return "; ".join([*texts, f"and {left} more"] if left > 0 else texts)


def unknown_fields(route: object, body: bytes) -> tuple[str, str] | None:
    """(first unknown field, message) for a JSON body with fields that the route's model does not have; None without.

    Other faults of a body are the route's to find.
    """
    model = _body_type(route)
    if model is None or not _ignores_fields(model):
        return None
    try:
        _adapter(model).validate_json(body, extra="forbid")
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_context=False, include_input=False)
        first = next((error for error in errors if error["type"] == "extra_forbidden"), None)
        if first is not None:
            return ".".join(map(str, first["loc"])), unknown_fields_text(route, errors)
    return None


def _body_type(route: object) -> Any:
    """The model of a route's body; None for a route without one, or with a body of another kind."""
    field = route.body_field if isinstance(route, APIRoute) else None
    annotation = None if field is None else field.field_info.annotation
    return annotation if any(True for _ in _models_in(annotation)) else None


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models of an annotation, such as that of `tuple[Model, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _known_at(annotation: Any, path: Sequence[object]) -> list[str]:
    """Names of the fields that the model at this path of a body has; empty where that is unknown."""
    models = list(_models_in(annotation))
    for part in path:
        if isinstance(part, str):
            fields = [model.model_fields[part] for model in models if part in model.model_fields]
            models = [inner for field in fields for inner in _models_in(field.annotation)]
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    """The validator of an annotation; making one takes milliseconds."""
    return TypeAdapter(annotation)


@cache
def _ignores_fields(annotation: Any) -> bool:
    """Whether a model of the annotation, or of its fields, ignores unknown fields."""
    seen, waiting = set(), list(_models_in(annotation))
    while waiting:
        model = waiting.pop()
        if model in seen:
            continue
        seen.add(model)
        if model.model_config.get("extra") != "forbid":
            return True
        waiting += [inner for field in model.model_fields.values() for inner in _models_in(field.annotation)]
    return False
