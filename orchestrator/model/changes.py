"""Changes of a resource: a part of its fields, as PATCH, plans, records and applied files have them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from orchestrator.model.policy import PlacementPolicy

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Changes:
    """In an annotation of a dict: the changed fields of a resource, each checked by its own bounds.

    A field that is left out stays as it is. A field that is a resource itself has changes likewise.

    is_lenient  unknown fields are ignored, not refused
    named_by    fields that may not be left out: which resource it is
    """

    resource: type
    is_lenient: bool = False
    named_by: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        parts = {}
        for name, hint in get_type_hints(self.resource, include_extras=True).items():
            is_resource = isinstance(hint, type) and is_dataclass(hint)
            changed = Annotated[dict[str, Any], Changes(hint, self.is_lenient)] if is_resource else hint
            parts[name] = core_schema.typed_dict_field(handler.generate_schema(changed), required=name in self.named_by)
        schema = core_schema.typed_dict_schema(parts, extra_behavior="forbid")
        return core_schema.no_info_before_validator_function(self._known, schema) if self.is_lenient else schema

    def _known(self, written: Any) -> Any:
        """What is written, without fields that the resource does not have."""
        if not isinstance(written, Mapping):
            return written
        known = {field.name for field in fields(self.resource)}
        return {name: value for name, value in written.items() if name in known}

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        shown = handler.resolve_ref_schema(handler(schema))
        described = reader_of(self.resource).json_schema()["properties"]
        for name, field in shown["properties"].items():
            if "description" in described[name]:
                field["description"] = described[name]["description"]
        return shown


PolicyChanges = Annotated[dict[str, Any], Changes(PlacementPolicy)]


@cache
def reader_of(resource: type) -> TypeAdapter[Any]:
    """What reads and checks a resource; making one takes milliseconds."""
    return TypeAdapter(resource)


def with_changes(present: R, changes: Mapping[str, Any]) -> R:
    """The resource with these changes, checked as a whole. Raises pydantic's ValidationError."""
    resource: type = type(present)
    reader = reader_of(resource)
    changed: R = reader.validate_python(_merged(reader.dump_python(present), changes))
    return changed


def _merged(present: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with these changes; a mapping in both is merged likewise."""
    merged = dict(present)
    for name, value in changes.items():
        before = present.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(before or {}, value) if both else value
    return merged
