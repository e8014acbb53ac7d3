"""A ConfigMap and what it says: the part that people write, and the part that is ours.

People write `data["adapter.yaml"]`: the body of `POST /v1/adapters`. What we have to add is in annotations, where
tools that put manifests in order do not look: `lorafleet.io/record` is what was accepted of that text and found of
its bytes since, `lorafleet.io/status` says it in words.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
import xxhash
import yaml
from pydantic import BaseModel, ValidationError

from lorafleet.kube.client import Json
from lorafleet.service.http import said_wrong
from orchestrator.core.errors import OrchestratorRequestError, StoreError
from orchestrator.core.rollout import Rollout, Targets, rollout_json
from orchestrator.core.state import PlacementPolicy, RegisteredAdapter
from orchestrator.store.typed import rollout_in
from orchestrator.wire import AdapterPolicy, AdapterSpec, AliasSpec, LoraId, Policy, SecretRef

KIND, FLEET = "lorafleet.io/kind", "lorafleet.io/fleet"
RECORD, STATUS, ROLLOUT = "lorafleet.io/record", "lorafleet.io/status", "lorafleet.io/rollout"
KINDS = ("adapter", "alias", "policy")
_RELEASE = "meta.helm.sh/release-name"
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_MAX_TEXT_BYTES = 128 * 2**10  # more than all fields fill; 1 MiB of brackets would take seconds to read
_MAX_DEPTH = 32  # the deepest that we know is 3; the C loader recurses and takes the process with it at 200,000

M = TypeVar("M", bound=BaseModel)


class NamedAlias(AliasSpec):
    """What an alias's ConfigMap says: the body of `PUT /v1/aliases/{name}`, and the name."""

    name: LoraId


MODELS: Mapping[str, type[BaseModel]] = {"adapter": AdapterSpec, "alias": NamedAlias, "policy": Policy}
"""What each kind's text says, as REST is sent it."""


class AdapterRecord(msgspec.Struct, frozen=True):
    """`of`: the mark of the text that this was accepted from."""

    of: str
    adapter: RegisteredAdapter


class AliasRecord(msgspec.Struct, frozen=True):
    """`targets`: what the alias points at now; `asked`: what somebody last asked for, which a rollout may go to."""

    of: str
    name: str
    targets: Targets
    asked: Targets


class PolicyRecord(msgspec.Struct, frozen=True):
    of: str
    rules: PlacementPolicy


Record = AdapterRecord | AliasRecord | PolicyRecord
_RECORDS: Mapping[str, type[Record]] = {"adapter": AdapterRecord, "alias": AliasRecord, "policy": PolicyRecord}


def adapter_object_name(lora_id: str) -> str:
    """Of the ConfigMaps that we make; a lora_id may hold what a name may not."""
    return f"lora-{hashlib.sha256(lora_id.encode()).hexdigest()[:32]}"


def alias_object_name(name: str) -> str:
    return f"alias-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def new_object(fleet: str, kind: str, name: str) -> Json:
    """Without namespace: the path says it."""
    labels = {KIND: kind, FLEET: fleet, "app.kubernetes.io/managed-by": "lorafleet"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}, "data": {}}


def copy_of(found: Json) -> Json:
    """The object as whoever made it would apply it: no uid, no version, nothing that a tool keeps for itself."""
    meta = found["metadata"]
    notes = {key: value for key, value in (meta.get("annotations") or {}).items() if key != _LAST_APPLIED}
    kept = {"name": meta["name"], "labels": meta.get("labels") or {}, "annotations": notes}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": kept, "data": found.get("data") or {}}


def name_of(found: Json) -> str:
    return str(found["metadata"]["name"])


def uid_of(found: Json) -> str:
    return str(found["metadata"].get("uid") or "")


def version_of(found: Json) -> int:
    """The resourceVersion; Kubernetes 1.35 says that they may be compared, and they always were etcd's counter."""
    version = str(found["metadata"].get("resourceVersion") or "0")
    return int(version) if version.isdecimal() else 0


def age_of(found: Json) -> tuple[str, str]:
    """Orders objects, the oldest first."""
    return str(found["metadata"].get("creationTimestamp") or ""), name_of(found)


def lean(found: Json) -> Json:
    """Without the API server's own bookkeeping, which is as long as all else; a PUT that leaves it out keeps it."""
    found["metadata"].pop("managedFields", None)
    return found


def is_applied(found: Json) -> bool:
    """Whether somebody applies the text on the server: `kubectl apply --server-side`, Helm 4, Flux. Their next apply is
    a conflict once anybody else has written that field.

    source  Kubernetes' `metadata.managedFields`, before `lean`
    """
    texts = {f"f:{kind}.yaml" for kind in KINDS}
    return any(
        entry.get("operation") == "Apply" and texts & (entry.get("fieldsV1") or {}).get("f:data", {}).keys()
        for entry in found["metadata"].get("managedFields") or ()
    )


def release_of(found: Json) -> str:
    """The Helm release that made the object; "" where none did."""
    return annotation(found, _RELEASE)


def kind_of(found: Json) -> str:
    return str((found["metadata"].get("labels") or {}).get(KIND, ""))


def annotation(found: Json, name: str) -> str:
    return str((found["metadata"].get("annotations") or {}).get(name, ""))


def text_of(found: Json, kind: str) -> str | None:
    """What a person wrote; None when that key is missing."""
    text = (found.get("data") or {}).get(f"{kind}.yaml")
    return None if text is None else str(text)


def mark_of(text: str | None) -> str:
    """Tells one text from another."""
    return "" if text is None else xxhash.xxh3_64_hexdigest(text.encode())


def record_of(found: Json, kind: str) -> Record | None:
    """What is accepted of an object; None when nothing is, or what stands there is no record of ours."""
    text = annotation(found, RECORD)
    if not text or kind not in _RECORDS:
        return None
    try:
        return msgspec.json.decode(text, type=_RECORDS[kind])
    except msgspec.MsgspecError:
        return None


def rollout_of(found: Json) -> Rollout | None:
    text = annotation(found, ROLLOUT)
    try:
        return rollout_in(text, f"annotation {ROLLOUT}") if text else None
    except ValueError as exc:
        raise StoreError(f"ConfigMap {name_of(found)} cannot be read: {exc}; delete that annotation") from exc


def declared(found: Json, kind: str, model: type[M]) -> M:
    """What a person wrote, checked as REST checks it. Raises OrchestratorRequestError with the message of REST."""
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
        return model.model_validate(body)
    except ValidationError as exc:
        raise OrchestratorRequestError(said_wrong(exc.errors()), param=key) from exc


def differences(found: Json, kind: str, text: str) -> list[str]:
    """Fields that people may change and that this text says otherwise than the object's own, which was accepted."""
    try:
        there = declared(found, kind, MODELS[kind])
    except OrchestratorRequestError:  # it was accepted by another version
        return []
    wanted = declared({"data": {f"{kind}.yaml": text}}, kind, MODELS[kind])
    names = {"adapter": ("policy", "tenants", "secret_ref"), "alias": ("targets",)}.get(kind) or MODELS[
        kind
    ].model_fields
    return [name for name in names if getattr(there, name) != getattr(wanted, name)]


def _is_shallow(text: str) -> bool:
    """Whether it is safe to load; asked of the parser's events, which do not recurse. Raises yaml.YAMLError."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                return False
    except yaml.YAMLError as exc:
        # libyaml 0.2.6 (PyYAML 6.0.4) looks ahead, and ends at 1,000 levels before it has told of one.
        if "nesting depth" in str(exc):
            return False
        raise
    return True


def adapter_text(adapter: RegisteredAdapter) -> str:
    """As a person would write it: only what is not as it is anyway."""
    policy = AdapterPolicy.model_validate({name: getattr(adapter, name) for name in AdapterPolicy.model_fields})
    secret = SecretRef.of(adapter.secret)
    body: dict[str, Any] = {
        "lora_id": adapter.lora_id,
        "source": adapter.source,
        "base_model": adapter.base_model,
        "digest": adapter.digest,
        "policy": policy.model_dump(mode="json", exclude_defaults=True) or None,
        "tenants": None if adapter.tenants is None else list(adapter.tenants),
        "secretRef": None if secret is None else secret.model_dump(),
    }
    return as_yaml({name: value for name, value in body.items() if value is not None})


def alias_text(name: str, targets: Targets) -> str:
    rows = [{"lora_id": lora_id} | ({"weight": weight} if weight != 1 else {}) for lora_id, weight in targets]
    return as_yaml({"name": name, "targets": rows})


def policy_text(rules: PlacementPolicy) -> str:
    """Only what is not the default, which REST takes for whatever is left out."""
    usual = asdict(PlacementPolicy())
    return as_yaml({name: value for name, value in asdict(rules).items() if value != usual[name]})


def as_yaml(body: Mapping[str, Any]) -> str:
    return str(yaml.dump(dict(body), Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def with_ours(
    found: Json, kind: str, *, text: str | None, record: Record, status: str, rollout: Rollout | None = None
) -> Json:
    """The object with this text, record and status, and with all else that is in it."""
    notes = {RECORD: msgspec.json.encode(record).decode(), STATUS: status}
    if rollout is not None:
        notes[ROLLOUT] = msgspec.json.encode(rollout_json(rollout)).decode()
    changed = with_notes(found, notes, without=() if rollout is not None else (ROLLOUT,))
    if text is not None and text != text_of(found, kind):
        changed["data"] = {**(found.get("data") or {}), f"{kind}.yaml": text}
    return changed


def with_notes(found: Json, notes: Mapping[str, str], *, without: tuple[str, ...] = ()) -> Json:
    """The object with these annotations, and without those."""
    annotations = {**(found["metadata"].get("annotations") or {}), **notes}
    for name in without:
        annotations.pop(name, None)
    return {**found, "metadata": {**found["metadata"], "annotations": annotations}}


def asked_of(adapter: RegisteredAdapter) -> tuple[Any, ...]:
    """What people may change of an adapter."""
    return adapter.tenants, adapter.secret, *(getattr(adapter, name) for name in AdapterPolicy.model_fields)


def asked_targets(targets: Targets, rollout: Rollout | None) -> Targets:
    """What was asked for last: where a rollout goes, or would have gone, unless somebody called it off."""
    return targets if rollout is None or rollout.phase == "aborted" else rollout.after
