"""Objects at versions, with the history that watches are served from."""

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
    """One write. `old` is None where it made the object, `new` is the last state where it removed it."""

    version: int
    type: str
    new: Object
    old: Object | None

    @cached_property
    def encoded(self) -> bytes:
        return msgspec.json.encode(self.new)


@dataclass(slots=True)
class VersionedObjects:
    """What etcd is to an API server: one version counter for everything, and a history that can be compacted.

    An object that is in here is never changed, only replaced: lists and watches hand the same one out.
    """

    version: int = 1000
    oldest: dict[ResourceKind, int] = field(default_factory=lambda: defaultdict(int))
    _objects: dict[ResourceKind, dict[Key, Object]] = field(default_factory=lambda: defaultdict(dict))
    _history: dict[ResourceKind, list[StoredWrite]] = field(default_factory=lambda: defaultdict(list))
    _watches: dict[ResourceKind, set["asyncio.Queue[StoredWrite]"]] = field(default_factory=lambda: defaultdict(set))

    def get(self, resource: ResourceKind, namespace: str, name: str) -> Object | None:
        return self._objects[resource].get((namespace, name))

    def find(self, resource: ResourceKind, namespace: str = "") -> list[Object]:
        """In the order of keys, of one namespace or of all."""
        found = self._objects[resource]
        return [found[key] for key in sorted(found, key="/".join) if not namespace or key[0] == namespace]

    def put(self, resource: ResourceKind, obj: Object) -> Object:
        """Store it under its own name as the next version."""
        key = _key(obj)
        old = self._objects[resource].get(key)
        new = self._next(obj)
        self._objects[resource][key] = new
        self._tell(resource, StoredWrite(self.version, "MODIFIED" if old else "ADDED", new, old))
        return new

    def remove(self, resource: ResourceKind, obj: Object) -> Object:
        """The last state, at the version of its removal: what a watch is told."""
        old = self._objects[resource].pop(_key(obj))
        gone = self._next(old)
        self._tell(resource, StoredWrite(self.version, "DELETED", gone, old))
        return gone

    def changes_since(self, resource: ResourceKind, version: int) -> list[StoredWrite]:
        """Raises 410 where they are forgotten. A version of the future has none and is no error, as on a real one."""
        oldest = self.oldest[resource]
        if version < oldest:
            raise expired(f"too old resource version: {version} ({oldest})")
        history = self._history[resource]
        return history[bisect_right(history, version, key=lambda change: change.version) :]

    def watch(self, resource: ResourceKind) -> "asyncio.Queue[StoredWrite]":
        """Each change from now on, until `unwatch`."""
        queue: asyncio.Queue[StoredWrite] = asyncio.Queue()
        self._watches[resource].add(queue)
        return queue

    def unwatch(self, resource: ResourceKind, queue: "asyncio.Queue[StoredWrite]") -> None:
        self._watches[resource].discard(queue)

    def compact(self, resources: tuple[ResourceKind, ...]) -> None:
        """Forget how things came to be. The counter goes on, as it does when anything else in a cluster is written."""
        self.version += 100
        for resource in resources:
            self._history[resource].clear()
            self.oldest[resource] = self.version

    def rewind(self, resources: tuple[ResourceKind, ...]) -> None:
        """As after a restored backup of etcd: the same objects at lower versions than clients have seen."""
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
