"""The fleet's ConfigMaps as they were last seen: what the watch said, what our own writes were answered with."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from lorafleet.kube.client import Json
from orchestrator.configmaps.objects import (
    KINDS,
    Record,
    is_applied,
    kind_of,
    lean,
    name_of,
    record_of,
    uid_of,
    version_of,
)


class DoubtReason(Enum):
    """Why an object may be gone.

    ASKED    the API server, asked by name, had none; the watch has not told of it yet
    MISSING  a list did not have it, or had it at an older version
    DELETED  the watch showed its end
    """

    ASKED = "asked"
    MISSING = "missing"
    DELETED = "deleted"


class ConfigMapMirror:
    """By name. What others did is noted in `changed` (to be looked at) and `doubtful` (to be asked for by name). Of
    our own writes the watch may tell before the API server's answer does, or after what we did next: they are not.

    An object that vanishes from a watch or a list may have lost no more than its label: it stays here until the API
    server, asked for it by name, says that there is none.
    """

    def __init__(
        self, on_news: Callable[[], None] = lambda: None, on_proven: Callable[[str], None] = lambda _: None
    ) -> None:
        self.objects: dict[str, Json] = {}
        self.changed: set[str] = set()
        self.doubtful: dict[str, DoubtReason] = {}
        self.is_synced = False
        self.applied: set[str] = set()  # objects whose text somebody applies on the server
        # An object of our own state -> the version at which it was made anew (infinite: it is gone). What such an
        # object says of others proves nothing until the watch has come that far, or a list, and nothing is doubtful.
        self.unproven: dict[str, float] = {}
        self.watched: dict[str, int] = {}  # name -> version that the watch has brought
        self.edition = 0
        self._brought = 0  # the highest version that the watch has brought since the last list, or that list
        self._ours: dict[str, Json] = {}  # name -> as it is being written by us
        self._deleted: dict[str, str] = {}  # name -> uid of what is no more, and of which the watch may tell yet
        self._records: dict[str, tuple[Json, Record | None]] = {}
        self.on_news = on_news
        self.on_proven = on_proven

    def listed(self, items: list[Json]) -> None:
        """All there is, when it was listed."""
        names = set()
        self._deleted.clear()  # a cluster that was put back has what was deleted there, with its uid
        for found in items:
            names.add(name_of(found))
            self._seen(found)
            if version_of(found) < version_of(self.objects[name_of(found)]):
                self._miss(name_of(found))  # written since, or the cluster was put back
        for name in self.objects.keys() - names:
            self._miss(name)
        self._brought = max(map(version_of, items), default=0)
        self._prove()
        self.is_synced = True
        self.on_news()

    def event(self, kind: str, found: Json) -> None:
        """One change that the watch brought."""
        name = name_of(found)
        if kind != "DELETED":
            self._seen(found)
        elif name in self.objects and uid_of(found) == uid_of(self.objects[name]):
            self.watched[name] = version_of(found)
            self.doubtful[name] = DoubtReason.DELETED
        elif self._deleted.get(name) == uid_of(found):
            del self._deleted[name]
        self._brought = max(self._brought, version_of(found))
        self._prove()
        self.on_news()

    def doubt(self, name: str) -> None:
        """The API server, asked by name, had no such object."""
        self.doubtful.setdefault(name, DoubtReason.ASKED)
        self.on_news()

    def note_owners(self, found: Json) -> None:
        """Before `lean`, which takes them off; an object without them says nothing new."""
        if "managedFields" in found["metadata"]:
            (self.applied.add if is_applied(found) else self.applied.discard)(name_of(found))

    def _meet(self, found: Json) -> None:
        known = self.objects.get(name_of(found))
        if kind_of(found) == "state" and (known is None or uid_of(known) != uid_of(found)):
            self.unproven[name_of(found)] = version_of(found)

    def _prove(self) -> None:
        """Whatever was lost before an object of our own state was made is known to be lost by now."""
        if self.doubtful or not self.unproven:
            return
        for name in [name for name, version in self.unproven.items() if version <= self._brought]:
            del self.unproven[name]
            self.on_proven(name)

    def _miss(self, name: str) -> None:
        if self.doubtful.get(name) is not DoubtReason.DELETED:
            self.doubtful[name] = DoubtReason.MISSING

    @contextmanager
    def writing(self, name: str, body: Json) -> Iterator[None]:
        """This is being written: the watch may tell of it first."""
        self._ours[name] = body
        try:
            yield
        finally:
            if self._ours.get(name) is body:  # and not what is written of it besides: a status, say
                del self._ours[name]

    def wrote(self, found: Json) -> None:
        """The API server's answer to our own write, or to a question by name."""
        if version_of(found) < self.watched.get(name_of(found), 0):
            return  # the watch was faster, and has brought what came after it: a deletion, perhaps
        name = name_of(found)
        self._meet(found)
        self.note_owners(found)
        self.objects[name] = lean(found)
        self.doubtful.pop(name, None)
        self.edition += 1
        self._prove()

    def forget(self, name: str, uid: str | None = None) -> None:
        """There is no object of this name; with `uid`: that one is gone, and another may stand in its place."""
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
        self._prove()

    def record(self, name: str) -> Record | None:
        """What is accepted of an object, parsed once a version of it."""
        found = self.objects.get(name)
        if found is None:
            return None
        known = self._records.get(name)
        if known is None or known[0] is not found:
            known = self._records[name] = (found, record_of(found, kind_of(found)))
        return known[1]

    def of_people(self) -> list[str]:
        """Names of all objects that people write."""
        return [name for name, found in self.objects.items() if kind_of(found) in KINDS]

    def _seen(self, found: Json) -> None:
        name, known = name_of(found), self.objects.get(name_of(found))
        if self._deleted.get(name) == uid_of(found):
            return  # how it was before it went
        self.watched[name] = version_of(found)
        self.doubtful.pop(name, None)
        is_same = known is not None and uid_of(known) == uid_of(found)
        if self.is_synced:  # what the first list has was there before us
            self._meet(found)
        if known is not None and is_same and version_of(found) <= version_of(known):
            return  # our own write, come back
        self.note_owners(found)
        self.objects[name] = lean(found)
        self.edition += 1
        if name not in self._ours or _said(self._ours[name]) != _said(found):
            self.changed.add(name)


def _said(found: Json) -> Json:
    """Without what the API server adds."""
    meta = found["metadata"]
    return {"data": found.get("data")} | {key: meta.get(key) for key in ("labels", "annotations")}
