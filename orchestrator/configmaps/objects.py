"""The content of a ConfigMap: the text that people write, and our annotations.

People write `data["adapter.yaml"]`: the body of `POST /v1/adapters`. Our part is in annotations, which tools that apply
manifests leave alone: `lorafleet.io/record` is the accepted text with inspection results, `lorafleet.io/status` is for
readers.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Generic, TypeVar

import msgspec
import xxhash
import yaml
from pydantic import ValidationError

from lorafleet.kube.client import Json
from lorafleet.service.http import validation_message
from orchestrator.core.errors import OrchestratorRequestError
from orchestrator.model.adapters import CHANGEABLE, AdapterSpec, RegisteredAdapter
from orchestrator.model.changes import WrittenAdapter, as_written, reader_of
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import NamedAlias, Targets, weight_pairs
from orchestrator.store.tables import ADAPTERS, NAMES, POLICY, Table

KIND, FLEET = "lorafleet.io/kind", "lorafleet.io/fleet"
RECORD, STATUS = "lorafleet.io/record", "lorafleet.io/status"
KIND_OF_TABLE: Mapping[str, str] = {ADAPTERS.name: "adapter", NAMES.name: "alias", POLICY.name: "policy"}
"""People's tables -> kind of their objects, as in the label."""
TABLE_OF_KIND: Mapping[str, Table[Any]] = {"adapter": ADAPTERS, "alias": NAMES, "policy": POLICY}
_RELEASE = "meta.helm.sh/release-name"
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_MAX_TEXT_BYTES = 128 * 2**10  # more than all fields need; 1 MiB of brackets would take seconds to parse
_MAX_DEPTH = 32  # fields need 3; the C loader recurses and crashes the process at 200,000

R = TypeVar("R")


MODELS: Mapping[str, Any] = {"adapter": WrittenAdapter, "alias": NamedAlias, "policy": PlacementPolicy}
"""kind -> model of its text, as in REST."""


class Record(msgspec.Struct, Generic[R], frozen=True):
    """An accepted row, as its object has it. `of`: mark of the text that it was accepted from."""

    of: str
    table: str
    key: str
    row: R

    @property
    def subject(self) -> tuple[str, str]:
        """(table, key) of the row."""
        return self.table, self.key


_GENERIC_RECORD: Any = Record
_RECORDS: Mapping[str, Any] = {kind: _GENERIC_RECORD[table.row] for kind, table in TABLE_OF_KIND.items()}


def adapter_object_name(lora_id: str) -> str:
    """Name of the ConfigMap that we create for an adapter: a hash, as not every lora_id is a valid name."""
    return f"lora-{hashlib.sha256(lora_id.encode()).hexdigest()[:32]}"


def alias_object_name(name: str) -> str:
    """Name of the ConfigMap that we create for an alias or a published name: a hash, as not each is a valid name."""
    return f"alias-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def new_object(fleet: str, kind: str, name: str) -> Json:
    """A new ConfigMap with our labels, without namespace, which is in the URL."""
    labels = {KIND: kind, FLEET: fleet, "app.kubernetes.io/managed-by": "lorafleet"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}, "data": {}}


def applicable_copy(found: Json) -> Json:
    """The object as a manifest to apply: without uid, version and kubectl's own annotation."""
    meta = found["metadata"]
    notes = {key: value for key, value in (meta.get("annotations") or {}).items() if key != _LAST_APPLIED}
    kept = {"name": meta["name"], "labels": meta.get("labels") or {}, "annotations": notes}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": kept, "data": found.get("data") or {}}


def name_of(found: Json) -> str:
    """The object's name."""
    return str(found["metadata"]["name"])


def uid_of(found: Json) -> str:
    """The object's uid; "" before it is created."""
    return str(found["metadata"].get("uid") or "")


def version_of(found: Json) -> int:
    """The resourceVersion as a number. Kubernetes 1.35 allows comparing them; they are etcd's counter."""
    version = str(found["metadata"].get("resourceVersion") or "0")
    return int(version) if version.isdecimal() else 0


def age_order(found: Json) -> tuple[str, str]:
    """Sort key: the oldest object first."""
    return str(found["metadata"].get("creationTimestamp") or ""), name_of(found)


def without_managed_fields(found: Json) -> Json:
    """`found`, with `managedFields` removed in place: they are half of its size, and a PUT without them keeps them."""
    found["metadata"].pop("managedFields", None)
    return found


def is_applied(found: Json) -> bool:
    """Whether the text is applied on the server side (`kubectl apply --server-side`, Helm 4, Flux).

    Such an owner gets a conflict at its next apply if another client has written the field.

    found   with `metadata.managedFields`
    """
    texts = {f"f:{kind}.yaml" for kind in TABLE_OF_KIND}
    return any(
        entry.get("operation") == "Apply" and texts & (entry.get("fieldsV1") or {}).get("f:data", {}).keys()
        for entry in found["metadata"].get("managedFields") or ()
    )


def release_of(found: Json) -> str:
    """The Helm release that made the object; "" where none did."""
    return annotation(found, _RELEASE)


def kind_of(found: Json) -> str:
    """The object's kind by our label: adapter, alias, policy or state; "" without the label."""
    return str((found["metadata"].get("labels") or {}).get(KIND, ""))


def annotation(found: Json, name: str) -> str:
    """The value of an annotation; "" without it."""
    return str((found["metadata"].get("annotations") or {}).get(name, ""))


def text_of(found: Json, kind: str) -> str | None:
    """The text that a person wrote; None without that key."""
    text = (found.get("data") or {}).get(f"{kind}.yaml")
    return None if text is None else str(text)


def text_mark(text: str | None) -> str:
    """A hash that tells texts apart; "" for None."""
    return "" if text is None else xxhash.xxh3_64_hexdigest(text.encode())


def record_of(found: Json, kind: str) -> Record[Any] | None:
    """The accepted record in an object; None without a readable one."""
    text = annotation(found, RECORD)
    if not text or kind not in _RECORDS:
        return None
    try:
        record: Record[Any] = msgspec.json.decode(text, type=_RECORDS[kind])
    except msgspec.MsgspecError:
        return None
    return record if record.table == TABLE_OF_KIND[kind].name else None


def parse_declared(found: Json, kind: str) -> Any:
    """The text parsed and checked as in REST. Raises OrchestratorRequestError with the message that REST gives."""
    text, key = text_of(found, kind), f"{kind}.yaml"
    if text is None:
        keys = ", ".join(sorted(found.get("data") or {})) or "nothing"
        raise OrchestratorRequestError(
            f"data has no {key!r}, found {keys}; it holds what REST would be sent", param=key
        )
    if (size := len(text.encode())) > _MAX_TEXT_BYTES:
        raise OrchestratorRequestError(f"{key} has {size:,} bytes, at most {_MAX_TEXT_BYTES:,} are read", param=key)
    try:
        if not _is_shallow(text):
            raise OrchestratorRequestError(
                f"{key} is nested deeper than {_MAX_DEPTH} levels, no field of it is", param=key
            )
        body = yaml.load(text, Loader=_Loader)  # noqa: S506  (a safe loader, the C one where there is one)
    except (yaml.YAMLError, ValueError) as exc:  # ValueError: a date or a number that cannot be
        raise OrchestratorRequestError(f"{key} is no YAML: {' '.join(str(exc).split())}", param=key) from exc
    if not isinstance(body, dict):
        raise OrchestratorRequestError(f"{key} holds {type(body).__name__}, expected fields and values", param=key)
    try:
        declared = reader_of(MODELS[kind]).validate_python(body)
        return reader_of(AdapterSpec).validate_python(declared) if kind == "adapter" else declared
    except ValidationError as exc:
        raise OrchestratorRequestError(validation_message(exc.errors()), param=key) from exc


def differing_fields(found: Json, kind: str, text: str) -> list[str]:
    """Changeable fields in which this text differs from the object's accepted text; [] if that is unreadable here.

    Raises OrchestratorRequestError for an invalid `text`.
    """
    try:
        present = parse_declared(found, kind)
    except OrchestratorRequestError:  # accepted by another version of lorafleet
        return []
    wanted = parse_declared({"data": {f"{kind}.yaml": text}}, kind)
    changeable = {"adapter": CHANGEABLE, "alias": ("targets",)}
    names = changeable.get(kind) or [field.name for field in fields(PlacementPolicy)]
    return [name for name in names if getattr(present, name) != getattr(wanted, name)]


def _is_shallow(text: str) -> bool:
    """Whether the YAML is shallow enough to load, by parser events, which do not recurse. Raises yaml.YAMLError."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                return False
    except yaml.YAMLError as exc:
        # libyaml 0.2.6 (PyYAML 6.0.4) itself stops at 1,000 levels, before it has emitted an event.
        if "nesting depth" in str(exc):
            return False
        raise
    return True


def adapter_text(adapter: RegisteredAdapter) -> str:
    """The adapter as the YAML text of its object, without fields at their default."""
    body = as_written(adapter.spec)
    return as_yaml({"secretRef" if name == "secret_ref" else name: value for name, value in body.items()})


def alias_text(name: str, targets: Targets) -> str:
    """The name and its targets as the YAML text of its object."""
    pairs = weight_pairs(targets)
    rows = [{"lora_id": lora_id} | ({"weight": weight} if weight != 1 else {}) for lora_id, weight in pairs]
    return as_yaml({"name": name, "targets": rows})


def policy_text(rules: PlacementPolicy) -> str:
    """The policy as YAML text, without fields at their default."""
    return as_yaml(as_written(rules))


def as_yaml(body: Mapping[str, Any]) -> str:
    """The fields as YAML text, in their order."""
    return str(yaml.dump(dict(body), Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def with_record(found: Json, kind: str, *, text: str | None, record: Record[Any], status: str) -> Json:
    """The object with this text (None: unchanged), record and status; all else stays."""
    changed = with_annotations(found, {RECORD: msgspec.json.encode(record).decode(), STATUS: status})
    if text is not None and text != text_of(found, kind):
        changed["data"] = {**(found.get("data") or {}), f"{kind}.yaml": text}
    return changed


def with_annotations(found: Json, notes: Mapping[str, str]) -> Json:
    """The object with the annotations `notes` added."""
    annotations = {**(found["metadata"].get("annotations") or {}), **notes}
    return {**found, "metadata": {**found["metadata"], "annotations": annotations}}


def changeable_values(adapter: RegisteredAdapter) -> tuple[Any, ...]:
    """The values of an adapter that people may change."""
    return tuple(getattr(adapter.spec, name) for name in CHANGEABLE)
