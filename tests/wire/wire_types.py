"""Every wire type as a JSON schema, and which changes between two snapshots break a neighbouring version."""

import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel, TypeAdapter

import orchestrator.model
import router.wire
import workers.wire
from orchestrator.model.names import WIRE

LAST_RELEASE = Path(__file__).parent / "last_release"
_FILE = "types.json"
_VERSIONS = {"workers": workers.wire.WIRE, "orchestrator": WIRE, "router": router.wire.WIRE}
_REF = "#/$defs/{model}"
# Prose, and defaults: a default may change, because a receiver fills in its own.
_LEFT_OUT = frozenset({"title", "description", "default", "examples"})

JsonSchema = dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class WireChange:
    """A difference that breaks a peer of the last release. `field` is empty for a whole type."""

    type: str
    field: str
    what: str

    @property
    def key(self) -> str:
        """How `agreed.py` names this change."""
        return f"{self.type}.{self.field}" if self.field else self.type

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


@dataclass(frozen=True, slots=True)
class WireSnapshot:
    """`versions`: WIRE of each service; `types`: type name -> JSON schema, whose references are type names."""

    versions: Mapping[str, int]
    types: Mapping[str, JsonSchema]

    def schema_of(self, name: str) -> JsonSchema:
        """A complete JSON schema of one type."""
        return {"$ref": _REF.format(model=name), "$defs": self.types}


def classes() -> Iterator[type]:
    """The wire types of all services, without private bases: of both `wire.py` and of `orchestrator/model/`."""
    parts = pkgutil.iter_modules(orchestrator.model.__path__, f"{orchestrator.model.__name__}.")
    for module in (workers.wire, *(importlib.import_module(part.name) for part in parts), router.wire):
        for name, found in inspect.getmembers(module, inspect.isclass):
            is_type = issubclass(found, BaseModel | msgspec.Struct) or hasattr(found, "__pydantic_config__")
            if is_type and found.__module__ == module.__name__ and not name.startswith("_"):
                yield found


def todays_snapshot() -> WireSnapshot:
    """The snapshot of the code at hand."""
    models = [(found, TypeAdapter(found)) for found in classes() if not issubclass(found, msgspec.Struct)]
    structs = [found for found in classes() if issubclass(found, msgspec.Struct)]
    _, read = TypeAdapter.json_schemas([(model, "validation", it) for model, it in models], ref_template=_REF)
    _, sent = TypeAdapter.json_schemas([(model, "serialization", it) for model, it in models], ref_template=_REF)
    types = read["$defs"]
    for name, schema in sent["$defs"].items():
        # Computed fields are sent and never read.
        for field, found in schema.get("properties", {}).items():
            types[name].setdefault("properties", {}).setdefault(field, found)
    types |= msgspec.json.schema_components(structs, ref_template="#/$defs/{name}")[1]
    return WireSnapshot(_VERSIONS, {name: _stripped(schema) for name, schema in sorted(types.items())})


def load_snapshot(folder: Path = LAST_RELEASE) -> WireSnapshot:
    """The snapshot of the last release."""
    content = json.loads((folder / _FILE).read_text())
    return WireSnapshot(content["versions"], content["types"])


def save_snapshot(snapshot: WireSnapshot, folder: Path) -> None:
    """Write the snapshot's file, one line a field."""
    blocks = [f"  {json.dumps(name)}: {_readable(schema)}" for name, schema in snapshot.types.items()]
    body = ",\n".join(blocks)
    (folder / _FILE).write_text(f'{{\n "versions": {json.dumps(snapshot.versions)},\n "types": {{\n{body}\n }}\n}}\n')


def changes(old: WireSnapshot, new: WireSnapshot) -> list[WireChange]:
    """What breaks a peer of the old version: removed, changed and newly required fields, and removed types.

    New types and new optional fields are none: every version ignores fields that it does not know.
    """
    found = [
        WireChange("WIRE", service, f"was {version}, is {new.versions.get(service)}")
        for service, version in old.versions.items()
        if new.versions.get(service) != version
    ]
    for name, before in old.types.items():
        after = new.types.get(name)
        if after is None:
            found.append(WireChange(name, "", "this type is gone"))
        elif "properties" in before:
            found += _field_changes(name, before, after)
        elif before != after:
            found.append(WireChange(name, "", f"was {json.dumps(before)}, is {json.dumps(after)}"))
    return sorted(found)


def _field_changes(name: str, before: JsonSchema, after: JsonSchema) -> Iterator[WireChange]:
    """The changes within one type, field by field."""
    old_fields, new_fields = before["properties"], after.get("properties", {})
    for field, schema in old_fields.items():
        if field not in new_fields:
            yield WireChange(name, field, "this field is gone")
        elif new_fields[field] != schema:
            yield WireChange(name, field, f"was {json.dumps(schema)}, is {json.dumps(new_fields[field])}")
    for field in after.get("required", ()):
        if field not in before.get("required", ()):
            yield WireChange(name, field, "this field is newly required")
    if after.get("additionalProperties") is False and before.get("additionalProperties") is not False:
        yield WireChange(name, "", "unknown fields are newly refused")


def _stripped(schema: Any) -> Any:
    """A schema without prose and defaults; a field may have any name."""
    if isinstance(schema, list):
        return [_stripped(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _stripped(field) for name, field in value.items()} if key == "properties" else _stripped(value)
        for key, value in schema.items()
        if key not in _LEFT_OUT
    }


def _readable(schema: JsonSchema) -> str:
    """JSON with one line a keyword, and one line a field."""
    lines = []
    for key, value in schema.items():
        if isinstance(value, dict) and key == "properties":
            fields = ",\n".join(f"     {json.dumps(name)}: {json.dumps(field)}" for name, field in value.items())
            lines.append(f"   {json.dumps(key)}: {{\n{fields}\n   }}")
        else:
            lines.append(f"   {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n  }"
