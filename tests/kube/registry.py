"""Create, replace, patch and delete as a real server does, without HTTP.

source  k8s.io/apiserver pkg/registry/generic/registry/store.go and rest/{create,update,delete}.go, 1.36
"""

import datetime
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.kube import managers, status
from tests.kube.kinds import BY_PLURAL, RESOURCES, ResourceKind
from tests.kube.managers import FieldWriter
from tests.kube.store import Object, VersionedObjects
from tests.kube.validation import check, check_change, tidied, typed

_SUFFIX = "bcdfghjklmnpqrstvwxz2456789"  # as k8s.io/apimachinery's names: no vowels, no words
_POD_GRACE_S = 30
_ARRANGED = FieldWriter()  # by a test itself, without a request
_SYSTEM = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "selfLink")


@dataclass(slots=True)
class ObjectRegistry:
    """The rules around a store. `allow_loopback`: see `validation.check`."""

    store: VersionedObjects = field(default_factory=VersionedObjects)
    allow_loopback: bool = True
    rng: random.Random = field(default_factory=random.Random)

    def get(self, resource: ResourceKind, namespace: str, name: str) -> Object:
        found = self.store.get(resource, namespace, name)
        if found is None:
            raise status.not_found(resource, name)
        return found

    def create(
        self, resource: ResourceKind, namespace: str, given: Any, *, by: FieldWriter = _ARRANGED, dry_run: bool = False
    ) -> Object:
        obj = self._named(resource, namespace, given)
        return self._made(resource, obj, by=by, dry_run=dry_run)

    def _named(self, resource: ResourceKind, namespace: str, given: Any) -> Object:
        """The object to create, with its name. Raises 404 without its namespace, 409 if it exists."""
        obj = self._taken(resource, namespace, given)
        meta = obj["metadata"]
        if meta.get("resourceVersion"):
            raise status.ApiError(500, "", "resourceVersion should not be set on objects to be created")
        if not meta.get("name"):
            if not meta.get("generateName"):
                raise status.invalid(
                    resource, "", [("metadata.name", "Required value: name or generateName is required")]
                )
            meta["name"] = meta["generateName"] + "".join(self.rng.choices(_SUFFIX, k=5))
        if resource.namespaced and self.store.get(BY_PLURAL["namespaces"], "", namespace) is None:
            raise status.not_found(BY_PLURAL["namespaces"], namespace)
        if self.store.get(resource, namespace, meta["name"]) is not None:
            raise status.already_exists(resource, meta["name"])
        return obj

    def replace(
        self,
        resource: ResourceKind,
        namespace: str,
        name: str,
        given: Any,
        *,
        by: FieldWriter = _ARRANGED,
        dry_run: bool = False,
    ) -> tuple[Object, bool]:
        """The object as stored, and whether it was created. With the part "status" only the status is written."""
        obj = self._taken(resource, namespace, given)
        meta = obj["metadata"]
        if (said := meta.setdefault("name", name)) != name:
            raise status.bad_request(f"the name of the object ({said}) does not match the name on the URL ({name})")
        old = self.store.get(resource, namespace, name)
        if old is None:
            if not resource.created_by_update or by.part:
                raise status.not_found(resource, name)
            if uid := meta.get("uid"):
                raise status.conflict(resource, name, _other_uid(uid, ""))
            meta.pop("resourceVersion", None)  # a version that is gone is no obstacle: there is nothing to overwrite
            return self._made(resource, obj, by=by, dry_run=dry_run), True
        if meta.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            raise status.conflict(resource, name, _other_uid(meta["uid"], old["metadata"]["uid"]))
        version = meta.get("resourceVersion") or ""
        if not version and not resource.unconditional:
            problem = "Invalid value: 0x0: must be specified for an update"
            raise status.invalid(resource, name, [("metadata.resourceVersion", problem)])
        if version and version != old["metadata"]["resourceVersion"]:
            raise status.conflict(resource, name)
        return self._updated(resource, old, obj, by=by, dry_run=dry_run), False

    def patch(
        self,
        resource: ResourceKind,
        namespace: str,
        name: str,
        change: Callable[[Object], Any],
        *,
        by: FieldWriter = _ARRANGED,
        dry_run: bool = False,
    ) -> Object:
        """Patch an object; `change` returns its new state.

        A patch without a resourceVersion is never a conflict, not even for a Lease: it is no lock.
        """
        old = self.get(resource, namespace, name)
        obj = self._patched(resource, old, self._taken(resource, namespace, change(_copy(old))))
        return self._updated(resource, old, obj, by=by, dry_run=dry_run)

    def apply(
        self,
        resource: ResourceKind,
        namespace: str,
        name: str,
        config: Any,
        *,
        by: FieldWriter,
        force: bool,
        dry_run: bool,
    ) -> tuple[Object, bool]:
        """Server-side apply: the object as stored, and whether it was created."""
        config = self._taken(resource, namespace, config)
        if (said := config["metadata"].setdefault("name", name)) != name:
            raise status.bad_request(f"the name of the object ({said}) does not match the name on the URL ({name})")
        old = self.store.get(resource, namespace, name)
        new = managers.applied(resource, old, config, by, force=force)
        if old is None:
            return self._made(resource, self._named(resource, namespace, new), by=None, dry_run=dry_run), True
        new = self._patched(resource, old, new)
        return self._updated(resource, old, new, by=by, is_applied=True, dry_run=dry_run), False

    def _patched(self, resource: ResourceKind, old: Object, obj: Object) -> Object:
        """Raise 409 or 422 when name, version or uid differ."""
        meta = old["metadata"]
        if obj["metadata"].get("name") != meta["name"]:
            raise status.invalid(resource, meta["name"], [("metadata.name", "Invalid value: field is immutable")])
        if obj["metadata"].get("resourceVersion", "") not in ("", meta["resourceVersion"]):
            raise status.conflict(resource, meta["name"])
        if obj["metadata"].get("uid", meta["uid"]) != meta["uid"]:
            raise status.conflict(resource, meta["name"], _other_uid(obj["metadata"]["uid"], meta["uid"]))
        return obj

    def delete(
        self, resource: ResourceKind, namespace: str, name: str, options: dict[str, Any], *, dry_run: bool = False
    ) -> tuple[Object, bool]:
        """Delete: the object, and whether it is gone; finalizers and a pod's grace period keep it for a while."""
        old = self.get(resource, namespace, name)
        meta = old["metadata"]
        wanted = options.get("preconditions") or {}
        if wanted.get("uid", meta["uid"]) != meta["uid"]:
            raise status.conflict(resource, name, _other_uid(wanted["uid"], meta["uid"]))
        if wanted.get("resourceVersion", meta["resourceVersion"]) != meta["resourceVersion"]:
            raise status.conflict(
                resource,
                name,
                f"the ResourceVersion in the precondition ({wanted['resourceVersion']}) does not match the "
                f"ResourceVersion in record ({meta['resourceVersion']}). The object might have been modified",
            )
        if dry_run:
            return old, True
        grace_s = self._grace_s(resource, old, options)
        if meta.get("finalizers") or grace_s:
            return self._marked(resource, old, grace_s), False
        if resource.kind == "Namespace":
            self._emptied(name)
        return self.store.remove(resource, old), True

    # --- what they share -----------------------------------------------------------------------------------------

    def _taken(self, resource: ResourceKind, namespace: str, given: Any) -> Object:
        """A copy of the sent object, with kind and namespace."""
        if problem := typed(resource, given):
            raise problem
        obj: Object = {"apiVersion": resource.api_version, "kind": resource.kind} | _copy(given)
        meta = obj["metadata"] = dict(obj.get("metadata") or {})
        if resource.namespaced and meta.setdefault("namespace", namespace) != namespace:
            raise status.bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        return obj

    def _made(self, resource: ResourceKind, obj: Object, *, by: FieldWriter | None, dry_run: bool) -> Object:
        """Store a new object. `by` None: its own `managedFields` count."""
        meta = {key: value for key, value in obj["metadata"].items() if key not in _SYSTEM}
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now()}
        if resource.has_generation:
            meta["generation"] = 1
        if resource.has_status:
            obj = {"status": {}} | {key: value for key, value in obj.items() if key != "status"}
        obj = tidied(resource, obj | {"metadata": _without_empty(meta)})
        if by is not None:
            obj = managers.updated(resource, None, obj, by)
        check(resource, obj, allow_loopback=self.allow_loopback)
        return obj if dry_run else self.store.put(resource, obj)

    def _updated(
        self,
        resource: ResourceKind,
        old: Object,
        obj: Object,
        *,
        by: FieldWriter,
        is_applied: bool = False,
        dry_run: bool,
    ) -> Object:
        """Store a changed object. `is_applied`: its own `managedFields` count."""
        if by.part == "status":
            obj = old | {"status": obj.get("status"), "metadata": old["metadata"]}
        elif resource.has_status:
            obj = obj | {"status": old.get("status", {})}
        meta = obj["metadata"] | {key: old["metadata"][key] for key in _SYSTEM if key in old["metadata"]}
        meta["resourceVersion"] = old["metadata"]["resourceVersion"]
        obj = tidied(resource, obj | {"metadata": _without_empty(meta)})
        if not is_applied:
            obj = managers.updated(resource, old, obj, by)
        if resource.has_generation and _said(obj) != _said(old):
            obj["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
        check(resource, obj, allow_loopback=self.allow_loopback)
        check_change(resource, old, obj)
        if dry_run or obj == old:
            return obj  # a write that changes nothing is no write: no version, no event
        if obj["metadata"].get("deletionTimestamp") and not obj["metadata"].get("finalizers") and not resource.graceful:
            self.store.remove(resource, old)  # its last finalizer was what kept it
            return obj
        return self.store.put(resource, obj)

    def _grace_s(self, resource: ResourceKind, old: Object, options: dict[str, Any]) -> int:
        if not resource.graceful:
            return 0
        spec = old.get("spec") or {}
        if not spec.get("nodeName"):
            return 0  # nobody runs it, so nobody has to end it
        return int(options.get("gracePeriodSeconds", spec.get("terminationGracePeriodSeconds", _POD_GRACE_S)))

    def _marked(self, resource: ResourceKind, old: Object, grace_s: int) -> Object:
        if old["metadata"].get("deletionTimestamp"):
            return old
        gone_at = datetime.datetime.fromtimestamp(time.time(), datetime.UTC) + datetime.timedelta(seconds=grace_s)
        mark = {"deletionTimestamp": _stamp(gone_at), "deletionGracePeriodSeconds": grace_s}
        return self.store.put(resource, old | {"metadata": old["metadata"] | mark})

    def _emptied(self, namespace: str) -> None:
        """Remove all objects of a deleted namespace at once; in a cluster a controller does it soon."""
        for resource in RESOURCES:
            for obj in self.store.find(resource, namespace) if resource.namespaced else ():
                self.store.remove(resource, obj)


def _said(obj: Object) -> Object:
    return {key: value for key, value in obj.items() if key not in ("metadata", "status")}


def _without_empty(meta: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meta.items() if value or key not in ("labels", "annotations", "finalizers")}


def _other_uid(asked: str, there: str) -> str:
    return (
        f"StorageError: invalid object, Code: 4, AdditionalErrorMsg: Precondition failed: "
        f"UID in precondition: {asked}, UID in object meta: {there}"
    )


def _copy(obj: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(obj))


def _now() -> str:
    return _stamp(datetime.datetime.fromtimestamp(time.time(), datetime.UTC))


def _stamp(when: datetime.datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")
