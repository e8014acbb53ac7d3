"""The fleet's ConfigMaps as last seen: from the watch, and from the responses to our own writes."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from lorafleet.kube.client import Json
from orchestrator.configmaps.objects import (
    TABLE_OF_KIND,
    Record,
    is_applied,
    kind_of,
    name_of,
    record_of,
    uid_of,
    version_of,
    without_managed_fields,
)


class DoubtReason(Enum):
    """Why an object may be gone.

    ASKED    a read by name found none; the watch has not shown its deletion yet
    MISSING  a list did not have it, or had an older version
    DELETED  the watch showed its deletion
    """

    ASKED = "asked"
    MISSING = "missing"
    DELETED = "deleted"


class ConfigMapMirror:
    """The objects by name.

    changed   objects that others have changed: to be checked
    doubtful  objects that may be gone: to be read by name
    watched   name -> version that the watch has brought
    applied   objects whose text is applied on the server side
    unproven  state object -> version at which it was created (infinite: it is gone). Its memory proves no deletion
              until the watch or a list has reached that version and no object is doubtful
    edition   grows with every change

    Our own writes are not `changed`: the watch may show them before the API server responds, or after our next write.
    An object that a watch or list no longer shows may only have lost its label. It stays here until a read by name
    finds none.
    """

    def __init__(
        self, on_news: Callable[[], None] = lambda: None, on_proven: Callable[[str], None] = lambda _: None
    ) -> None:
        self.objects: dict[str, Json] = {}
        self.changed: set[str] = set()
        self.doubtful: dict[str, DoubtReason] = {}
        self.is_synced = False
        self.applied: set[str] = set()
        self.unproven: dict[str, float] = {}
        self.watched: dict[str, int] = {}
        self.edition = 0
        self._brought = 0  # the highest version that the watch has brought since the last list, or that list
        self._ours: dict[str, Json] = {}  # name -> as it is being written by us, until a state after that is seen
        self._deleted: dict[str, str] = {}  # name -> uid of a deleted object that the watch may still show
        self._records: dict[str, tuple[Json, Record[Any] | None]] = {}
        self.on_news = on_news
        self.on_proven = on_proven

    def on_list(self, items: list[Json]) -> None:
        """Take a full list. Objects that it lacks or has in an older version become doubtful; none is dropped.

        Then the mirror is synced and calls `on_news`. Deletions seen before are forgotten.
        """
        names = set()
        self._deleted.clear()  # a restored cluster has deleted objects again, with their uids
        for found in items:
            names.add(name_of(found))
            self._record_seen(found)
            if version_of(found) < version_of(self.objects[name_of(found)]):
                self._mark_missing(name_of(found))  # written since, or the cluster was restored
        for name in self.objects.keys() - names:
            self._mark_missing(name)
        self._brought = max(map(version_of, items), default=0)
        self._check_proven()
        self.is_synced = True
        self.on_news()

    def on_event(self, kind: str, found: Json) -> None:
        """Take one watch event. A deleted object becomes doubtful; it is dropped by `forget`. Calls `on_news`."""
        name = name_of(found)
        if kind != "DELETED":
            self._record_seen(found)
        elif name in self.objects and uid_of(found) == uid_of(self.objects[name]):
            self.watched[name] = version_of(found)
            self.doubtful[name] = DoubtReason.DELETED
        elif self._deleted.get(name) == uid_of(found):
            del self._deleted[name]
        self._brought = max(self._brought, version_of(found))
        self._check_proven()
        self.on_news()

    def add_doubt(self, name: str) -> None:
        """Mark the object as doubtful, because a read by name found none; calls `on_news`."""
        self.doubtful.setdefault(name, DoubtReason.ASKED)
        self.on_news()

    def note_owners(self, found: Json) -> None:
        """Record whether the object's text is applied on the server side. Call it before `without_managed_fields`."""
        if "managedFields" in found["metadata"]:
            (self.applied.add if is_applied(found) else self.applied.discard)(name_of(found))

    def _note_state_object(self, found: Json) -> None:
        """Mark a new state object as unproven."""
        known = self.objects.get(name_of(found))
        if kind_of(found) == "state" and (known is None or uid_of(known) != uid_of(found)):
            self.unproven[name_of(found)] = version_of(found)

    def _check_proven(self) -> None:
        """Mark state objects as proven once every loss before their creation is known; calls `on_proven` for each."""
        if self.doubtful or not self.unproven:
            return
        for name in [name for name, version in self.unproven.items() if version <= self._brought]:
            del self.unproven[name]
            self.on_proven(name)

    def _mark_missing(self, name: str) -> None:
        """Mark the object as missing, unless the watch has shown its deletion."""
        if self.doubtful.get(name) is not DoubtReason.DELETED:
            self.doubtful[name] = DoubtReason.MISSING

    @contextmanager
    def writing(self, name: str, body: Json) -> Iterator[None]:
        """For the block, remember that we write this object: the watch may show it before the response comes."""
        self._ours[name] = body
        try:
            yield
        finally:
            if self._ours.get(name) is body:  # another write of the object may have begun meanwhile
                del self._ours[name]

    def record_object(self, found: Json) -> None:
        """Store the response to a write of ours or a read by name, unless the watch has shown a later state.

        The object is doubtful no longer.
        """
        if version_of(found) < self.watched.get(name_of(found), 0):
            return  # the watch has already brought a later state
        name = name_of(found)
        self._note_state_object(found)
        self.note_owners(found)
        self.objects[name] = without_managed_fields(found)
        self.doubtful.pop(name, None)
        self.edition += 1
        self._check_proven()

    def forget(self, name: str, uid: str | None = None) -> None:
        """Drop the object, its doubt and its record, and mark it as changed.

        With `uid` only if it still is that object. A state object then counts as unproven.
        """
        was = self.objects.get(name)
        if uid is not None and (was is None or uid_of(was) != uid):
            return
        if was is not None:
            if kind_of(was) == "state":
                self.unproven[name] = math.inf
            del self.objects[name]
            if self.doubtful.get(name) is not DoubtReason.DELETED:
                self._deleted[name] = uid_of(was)
            self.edition += 1
            self.changed.add(name)
        self.doubtful.pop(name, None)
        self._records.pop(name, None)
        self.applied.discard(name)
        self._check_proven()

    def accepted_record(self, name: str) -> Record[Any] | None:
        """The accepted record in an object, parsed once per version and kept; None if there is no such object."""
        found = self.objects.get(name)
        if found is None:
            return None
        known = self._records.get(name)
        if known is None or known[0] is not found:
            known = self._records[name] = (found, record_of(found, kind_of(found)))
        return known[1]

    def people_object_names(self) -> list[str]:
        """Names of the objects of adapters, aliases and the policy."""
        return [name for name, found in self.objects.items() if kind_of(found) in TABLE_OF_KIND]

    def _record_seen(self, found: Json) -> None:
        """Store an object from a list or watch event, unless it is older than the known one; ends its doubt.

        Marked as changed unless it is our own write. An object that we know to be deleted is ignored.
        """
        name, known = name_of(found), self.objects.get(name_of(found))
        if self._deleted.get(name) == uid_of(found):
            return  # a state before its deletion
        self.watched[name] = version_of(found)
        self.doubtful.pop(name, None)
        is_same = known is not None and uid_of(known) == uid_of(found)
        if self.is_synced:  # objects of the first list are not new
            self._note_state_object(found)
        if known is not None and is_same and version_of(found) <= version_of(known):
            return  # our own write
        self.note_owners(found)
        self.objects[name] = without_managed_fields(found)
        self.edition += 1
        # A write of ours replaces exactly the version known here, so only the next state can be ours. A later one with
        # the same content is an edit back to it.
        ours = self._ours.pop(name, None)
        if ours is None or _own_content(ours) != _own_content(found):
            self.changed.add(name)


def _own_content(found: Json) -> Json:
    """Data, labels and annotations: the object without what the API server adds."""
    meta = found["metadata"]
    return {"data": found.get("data")} | {key: meta.get(key) for key in ("labels", "annotations")}
