"""Field ownership and server-side apply.

source  sigs.k8s.io/structured-merge-diff 6 merge/update.go; k8s.io/apimachinery 0.36 pkg/util/managedfields
"""

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tests.kube.fields import (
    DuplicateField,
    Fields,
    Path,
    as_fields_v1,
    from_fields_v1,
    leaves,
    merged,
    owned_part,
    shown,
    without,
)
from tests.kube.kinds import ResourceKind
from tests.kube.status import ApiError, bad_request

Object = dict[str, Any]


class FieldWriter(NamedTuple):
    """The writer of a request: its `fieldManager` or user agent. `part`: the subresource."""

    manager: str = "tests"
    part: str = ""


class _ManagerKey(NamedTuple):
    """The key of a `managedFields` entry."""

    manager: str
    operation: str
    part: str


@dataclass(frozen=True, slots=True)
class _ManagedFieldsEntry:
    api_version: str
    fields: Fields
    time: str


_Owners = Mapping[_ManagerKey, _ManagedFieldsEntry]


def updated(resource: ResourceKind, old: Object | None, new: Object, by: FieldWriter) -> Object:
    """The object with owners: the writer of a value owns it alone, and a removed field has no owner.

    Owners that the object brings itself count, as where a client hands over from one manager to another.
    """
    owners = _owners(new) or _owners(old or {})
    before, after = leaves(owned_part(old or {})), leaves(owned_part(new))
    changed = frozenset(path for path, value in after.items() if before.get(path, _NONE) != value)
    if by.part != "status":
        changed = frozenset(path for path in changed if path[0] != "status")
    who = _ManagerKey(by.manager, "Update", by.part)
    mine = owners[who].fields if who in owners else frozenset()
    taken = {key: replace(it, fields=it.fields - changed) for key, it in owners.items() if key != who}
    taken[who] = _ManagedFieldsEntry(resource.api_version, mine | changed, _now())
    return _with(new, _living(taken, after), owners)


def applied(resource: ResourceKind, live: Object | None, config: Object, by: FieldWriter, *, force: bool) -> Object:
    """The object after a server-side apply by this manager. `status` cannot be written through the main resource.

    raises  409 where another manager owns what would change; 500 where a list has an item twice
    """
    if config.get("metadata", {}).get("managedFields"):
        raise bad_request("metadata.managedFields must be nil")
    config = {key: value for key, value in config.items() if key != "status"} if resource.has_status else config
    said = owned_part(config)
    try:
        fields = frozenset(leaves(said))
    except DuplicateField as exc:
        meta = (live or config)["metadata"]
        named = f"{meta.get('namespace', '')}/{meta['name']}; {resource.api_version}, Kind={resource.kind}"
        message = f"failed to create typed patch object ({named}): {exc}"
        raise ApiError(500, "InternalError", message) from exc
    who = _ManagerKey(by.manager, "Apply", by.part)
    owners = _owners(live or {})
    others = {key: entry for key, entry in owners.items() if key != who}
    held = frozenset().union(*(entry.fields for entry in others.values()))
    last = owners[who].fields if who in owners else frozenset()
    gone = frozenset(path for path in last - fields if not _is_held(path, held))
    # The name stays: a conflict speaks of it, and so does every check after this.
    before = owned_part(live or {})
    new = without(merged(before, said), gone)
    old_leaves, new_leaves = leaves(before), leaves(new)
    changed = frozenset(path for path, value in new_leaves.items() if old_leaves.get(path, _NONE) != value)
    conflicts = [(key, path) for key, entry in others.items() for path in sorted(entry.fields & changed, key=repr)]
    if conflicts and not force and not {path for _, path in conflicts} <= _handed_over(live or {}, by):
        raise _conflict([(key, owners[key], path) for key, path in conflicts])
    taken = {key: replace(entry, fields=entry.fields - changed) for key, entry in others.items()}
    taken[who] = _ManagedFieldsEntry(resource.api_version, fields, _now())
    kept = {key: value for key, value in (live or {}).items() if key in ("apiVersion", "kind")}
    meta = {**(live or config).get("metadata", {}), **_meta(new)}
    for name in ("labels", "annotations", "finalizers", "ownerReferences"):
        if name not in new.get("metadata", {}):
            meta.pop(name, None)
    if version := config.get("metadata", {}).get("resourceVersion"):
        meta["resourceVersion"] = version
    rest = {key: value for key, value in new.items() if key != "metadata"}
    return _with({**kept, **rest, "metadata": meta}, _living(taken, new_leaves), owners)


def writer_of(query: Mapping[str, str], user_agent: str, part: str) -> FieldWriter:
    """Raise 422 for a name that is too long."""
    manager = query.get("fieldManager") or user_agent.partition("/")[0] or "unknown"
    if len(manager) > _LONGEST:
        raise _refused(f"Too long: may not be more than {_LONGEST} bytes")
    return FieldWriter(manager, part)


def require_manager(query: Mapping[str, str]) -> None:
    """Raise 422 for an apply without a field manager."""
    if not query.get("fieldManager"):
        raise _refused("Required value: is required for apply patch")


def _refused(why: str) -> ApiError:
    return ApiError(422, "Invalid", f'PatchOptions.meta.k8s.io "" is invalid: fieldManager: {why}')


_LONGEST = 128
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_NONE = object()


def _meta(new: Object) -> dict[str, Any]:
    found: dict[str, Any] = new.get("metadata", {})
    return found


def _is_held(path: Path, held: Fields) -> bool:
    """Whether the field stays: it is owned, or it is a keyed item in which a field is owned."""
    if path in held:
        return True
    return isinstance(path[-1], tuple) and any(other[: len(path)] == path for other in held)


def _handed_over(live: Object, by: FieldWriter) -> frozenset[Path]:
    """Fields that kubectl has applied on the client side; on the server side it takes them without a conflict.

    source  k8s.io/apimachinery 0.36 util/managedfields/internal/lastappliedmanager.go
    """
    text = (live.get("metadata", {}).get("annotations") or {}).get(_LAST_APPLIED)
    if by.manager != "kubectl" or not text:
        return frozenset()
    there = leaves(owned_part(live))
    return frozenset(path for path, value in leaves(owned_part(json.loads(text))).items() if there.get(path) == value)


def _owners(obj: Object) -> dict[_ManagerKey, _ManagedFieldsEntry]:
    found = {}
    for entry in (obj.get("metadata") or {}).get("managedFields") or ():
        if "manager" in entry and "fieldsV1" in entry:
            who = _ManagerKey(entry["manager"], entry["operation"], entry.get("subresource", ""))
            fields = from_fields_v1(entry["fieldsV1"])
            found[who] = _ManagedFieldsEntry(entry.get("apiVersion", ""), fields, entry.get("time", ""))
    return found


def _living(owners: _Owners, there: Mapping[Path, Any]) -> dict[_ManagerKey, _ManagedFieldsEntry]:
    """The entries without removed fields and without managers that own nothing."""
    found = {who: replace(entry, fields=entry.fields & there.keys()) for who, entry in owners.items()}
    return {who: entry for who, entry in found.items() if entry.fields}


def _with(obj: Object, owners: _Owners, before: _Owners) -> Object:
    """The object with these owners. An unchanged entry keeps its time, so that a write without a change is none."""
    written = []
    for who, entry in owners.items():
        was = before.get(who)
        time = was.time if was is not None and was.fields == entry.fields else entry.time
        row = {
            "manager": who.manager,
            "operation": who.operation,
            "apiVersion": entry.api_version,
            "time": time,
            "fieldsType": "FieldsV1",
            "fieldsV1": as_fields_v1(entry.fields),
        }
        written.append(row | ({"subresource": who.part} if who.part else {}))
    meta = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return {**obj, "metadata": meta | ({"managedFields": written} if written else {})}


def _conflict(found: list[tuple[_ManagerKey, _ManagedFieldsEntry, Path]]) -> ApiError:
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {_said(who, entry)}", "field": shown(path)}
        for who, entry, path in found
    ]
    if len(found) == 1:
        message = f"Apply failed with 1 conflict: conflict with {_said(*found[0][:2])}: {shown(found[0][2])}"
    else:
        lines = []
        for who, entry in {(who, entry) for who, entry, _ in found}:
            lines.append(f"conflicts with {_said(who, entry)}:")
            lines += [f"- {shown(path)}" for other, _, path in found if other == who]
        message = f"Apply failed with {len(found)} conflicts: " + "\n".join(lines)
    return ApiError(409, "Conflict", message, {"causes": causes})


def _said(who: _ManagerKey, entry: _ManagedFieldsEntry) -> str:
    part = f' with subresource "{who.part}"' if who.part else ""
    using = f" using {entry.api_version} at {entry.time}" if who.operation == "Update" else ""
    return f'"{who.manager}"{part}{using}'


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
