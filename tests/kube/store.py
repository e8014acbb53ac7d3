"""Versioned objects, with the history for watches."""

import asyncio
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from tests.kube.kinds import ResourceKind
from tests.kube.status import expired

Object = dict[str, Any]
Key = tuple[str, str]  # namespace, name


@dataclass(frozen=True)
class StoredWrite:
    """One write. `old`: None for a creation; `new`: the last state for a removal."""

    version: int
    type: str
    new: Object
    old: Object | None

    @cached_property
    def encoded(self) -> bytes:
        return msgspec.json.encode(self.new)


@dataclass(slots=True)
class VersionedObjects:
    """The part of etcd: one version counter for all objects, and a history that can be compacted.

    An object that is in here is never changed, only replaced: lists and watches hand the same one out.
    """

    version: int = 1000
    oldest: dict[ResourceKind, int] = field(default_factory=lambda: defaultdict(int))
    _objects: dict[ResourceKind, dict[Key, Object]] = field(default_factory=lambda: defaultdict(dict))
    _history: dict[ResourceKind, list[StoredWrite]] = field(default_factory=lambda: defaultdict(list))
    _watches: dict[ResourceKind, dict["asyncio.Queue[StoredWrite]", None]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def get(self, resource: ResourceKind, namespace: str, name: str) -> Object | None:
        return self._objects[resource].get((namespace, name))

    def find(self, resource: ResourceKind, namespace: str = "") -> list[Object]:
        """Objects of one namespace or of all, in the order of keys."""
        found = self._objects[resource]
        return [found[key] for key in sorted(found, key="/".join) if not namespace or key[0] == namespace]

    def put(self, resource: ResourceKind, obj: Object) -> Object:
        """Store the object under its name as the next version."""
        key = _key(obj)
        old = self._objects[resource].get(key)
        new = self._next(obj)
        self._objects[resource][key] = new
        self._tell(resource, StoredWrite(self.version, "MODIFIED" if old else "ADDED", new, old))
        return new

    def remove(self, resource: ResourceKind, obj: Object) -> Object:
        """Remove the object; returns its last state at the version of the removal, for watches."""
        old = self._objects[resource].pop(_key(obj))
        gone = self._next(old)
        self._tell(resource, StoredWrite(self.version, "DELETED", gone, old))
        return gone

    def changes_since(self, resource: ResourceKind, version: int) -> list[StoredWrite]:
        """Changes since the version. Raises 410 when they are compacted; a future version has none."""
        oldest = self.oldest[resource]
        if version < oldest:
            raise expired(f"too old resource version: {version} ({oldest})")
        history = self._history[resource]
        return history[bisect_right(history, version, key=lambda change: change.version) :]

    def watch(self, resource: ResourceKind) -> "asyncio.Queue[StoredWrite]":
        """A queue of each change from now on, until `unwatch`."""
        queue: asyncio.Queue[StoredWrite] = asyncio.Queue()
        self._watches[resource][queue] = None
        return queue

    def unwatch(self, resource: ResourceKind, queue: "asyncio.Queue[StoredWrite]") -> None:
        self._watches[resource].pop(queue, None)

    def compact(self, resources: tuple[ResourceKind, ...]) -> None:
        """Drop the history. The version counter goes on."""
        self.version += 100
        for resource in resources:
            self._history[resource].clear()
            self.oldest[resource] = self.version

    def rewind(self, resources: tuple[ResourceKind, ...]) -> None:
        """Lower all versions, as after a restored etcd backup."""
        self.version = 1
        for resource in resources:
            self._history[resource].clear()
            self.oldest[resource] = 0
            self._objects[resource] = {key: self._next(obj) for key, obj in self._objects[resource].items()}
        for resource in resources:
            self.oldest[resource] = self.version

    def __iter__(self) -> Iterator[tuple[ResourceKind, Object]]:
        return ((resource, obj) for resource, found in self._objects.items() for obj in found.values())

    def _next(self, obj: Object) -> Object:
        self.version += 1
        return obj | {"metadata": obj["metadata"] | {"resourceVersion": str(self.version)}}

    def _tell(self, resource: ResourceKind, change: StoredWrite) -> None:
        self._history[resource].append(change)
        for queue in self._watches[resource]:
            queue.put_nowait(change)


def _key(obj: Object) -> Key:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
