"""Fields of a request's body that its route does not know: refused, with the names of those that it knows.

Bodies between services ignore them in a sender's name: a newer version may send more. Services say so by a header.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lorafleet.service.settings import is_unknown_field

WIRE_HEADER = "x-lorafleet-wire"
"""Header of calls between services of a fleet: fields that the receiver does not know are of a newer version."""
WIRE_HEADERS: Mapping[str, str] = {WIRE_HEADER: "1"}
_MOST_NAMED = 3


def unknown_fields_text(route: object, errors: Iterable[Mapping[str, Any]]) -> str:
    """`NAME: there is no such field; known: ...` for pydantic's findings of unknown fields; empty without one."""
    model = _body_type(route)
    found = [error["loc"] for error in errors if is_unknown_field(error)]
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
        type_adapter(model).validate_json(body, extra="forbid")
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_context=False, include_input=False)
        first = next((error for error in errors if is_unknown_field(error)), None)
        if first is not None:
            return ".".join(map(str, first["loc"])), unknown_fields_text(route, errors)
    return None


def _body_type(route: object) -> Any:
    """The model of a route's body; None for a route without one, or with a body of another kind."""
    field = route.body_field if isinstance(route, APIRoute) else None
    annotation = None if field is None else _annotation_of(field.field_info)
    return annotation if any(True for _ in _models_in(annotation)) else None


def _annotation_of(field: FieldInfo) -> Any:
    """The annotation of a field as it was written, with its metadata."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def _models_in(annotation: Any) -> Iterator[type]:
    """The models and resources of an annotation, such as that of `tuple[Model, ...] | None`.

    A part that has a `resource` stands for a part of that resource's fields.
    """
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation)):
        yield annotation
    if not isinstance(annotation, type) and isinstance(resource := getattr(annotation, "resource", None), type):
        yield resource
    for part in get_args(annotation):
        yield from _models_in(part)


def _fields_of(model: type) -> Mapping[str, Any]:
    """name -> annotation of the fields of a model or resource."""
    if issubclass(model, BaseModel):
        return {name: _annotation_of(field) for name, field in model.model_fields.items()}
    return get_type_hints(model, include_extras=True)


def _known_at(annotation: Any, path: Sequence[object]) -> list[str]:
    """Names of the fields that the model at this path of a body has; empty where that is unknown."""
    models = list(_models_in(annotation))
    for part in path:
        if isinstance(part, str):
            found = [fields[part] for fields in map(_fields_of, models) if part in fields]
            models = [inner for annotation in found for inner in _models_in(annotation)]
    return list(dict.fromkeys(name for model in models for name in _fields_of(model)))


@cache
def type_adapter(annotation: Any) -> TypeAdapter[Any]:
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
        config = getattr(model, "model_config", None) or getattr(model, "__pydantic_config__", {})
        if config.get("extra") != "forbid":
            return True
        waiting += [inner for annotation in _fields_of(model).values() for inner in _models_in(annotation)]
    return False
