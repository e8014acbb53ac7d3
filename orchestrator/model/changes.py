"""Changes of a resource: a part of its fields, as PATCH, plans, records and applied files have them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from orchestrator.model.adapters import CHANGEABLE, AdapterSpec
from orchestrator.model.policy import PlacementPolicy

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Changes:
    """In an annotation of a dict: the changed fields of a resource, each checked by its own bounds.

    A field that is left out stays as it is. A field that is a resource itself has changes likewise.

    only        fields that may change; empty: all
    is_lenient  unknown fields are ignored, not refused
    named_by    fields that may not be left out: which resource it is
    """

    resource: type
    only: tuple[str, ...] = ()
    is_lenient: bool = False
    named_by: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        parts = {}
        for name, hint in get_type_hints(self.resource, include_extras=True).items():
            if self.only and name not in self.only:
                continue
            is_resource = isinstance(hint, type) and is_dataclass(hint)
            changed = Annotated[dict[str, Any], Changes(hint, is_lenient=self.is_lenient)] if is_resource else hint
            schema = handler.generate_schema(changed)
            parts[name] = core_schema.typed_dict_field(schema, required=name in self.named_by)
        whole = core_schema.typed_dict_schema(parts, extra_behavior="forbid")
        return core_schema.no_info_before_validator_function(self._known, whole) if self.is_lenient else whole

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


def _with_secret_ref(written: Any) -> Any:
    """What is written, with `secret_ref` for Kubernetes' spelling of it."""
    if not isinstance(written, Mapping) or "secretRef" not in written or "secret_ref" in written:
        return written
    return {"secret_ref" if name == "secretRef" else name: value for name, value in written.items()}


_SECRET_REF = BeforeValidator(_with_secret_ref)

PolicyChanges = Annotated[dict[str, Any], Changes(PlacementPolicy)]

AdapterChanges = Annotated[dict[str, Any], Changes(AdapterSpec, only=CHANGEABLE), _SECRET_REF]
"""`PATCH /v1/adapters/{lora_id}`: source, digest and base model are immutable."""

WrittenAdapter = Annotated[dict[str, Any], Changes(AdapterSpec, named_by=("lora_id", "source")), _SECRET_REF]
"""The fields of an `AdapterSpec` that somebody wrote. `secretRef` is accepted for `secret_ref`."""

RecordedAdapter = Annotated[
    dict[str, Any], Changes(AdapterSpec, named_by=("lora_id", "source"), is_lenient=True), _SECRET_REF
]
"""As `WrittenAdapter`, from another fleet. `source`: the immutable reference that workers fetch from there."""


@cache
def reader_of(resource: type) -> TypeAdapter[Any]:
    """What reads and checks a resource; making one takes milliseconds."""
    return TypeAdapter(resource)


def as_written(resource: Any) -> dict[str, Any]:
    """The resource as JSON values, without fields at their default."""
    model: type = type(resource)
    written: dict[str, Any] = reader_of(model).dump_python(resource, mode="json", exclude_defaults=True)
    return written


def with_changes(present: R, changes: Mapping[str, Any]) -> R:
    """The resource with these changes, checked as a whole. Raises pydantic's ValidationError."""
    resource: type = type(present)
    reader = reader_of(resource)
    changed: R = reader.validate_python(_merged_fields(reader.dump_python(present), changes))
    return changed


def _merged_fields(present: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with these changes; a mapping in both is merged likewise."""
    merged = dict(present)
    for name, value in changes.items():
        before = present.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged_fields(before or {}, value) if both else value
    return merged
