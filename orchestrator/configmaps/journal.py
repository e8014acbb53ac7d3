"""The history in ConfigMaps: a ring each for loads, publishes, incidents and changes.

So neither traffic nor a trainer pushes out what people changed.

The newest object of a ring takes entries until it is full; then the oldest is overwritten. So one entry costs a write
of 64 KiB at most, and a ring keeps about two thousand entries.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

import msgspec

from lorafleet.kube.client import Json
from orchestrator.configmaps.objects import name_of, new_object
from orchestrator.core.incidents import KINDS_OF_INCIDENTS
from orchestrator.model.history import HistoryEntry

RINGS = ("changes", "loads", "incidents", "publishes")
PARTS = 8
PART_BYTES = 64 * 1024
_KEY = "entries.jsonl"
_RING_OF = {
    "load": "loads",
    "unload": "loads",
    "name_published": "publishes",
    **dict.fromkeys(KINDS_OF_INCIDENTS, "incidents"),
}


class HistoryJournal:
    """All history entries in memory, by ring and part."""

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._parts: dict[str, list[list[HistoryEntry]]] = {ring: [[] for _ in range(PARTS)] for ring in RINGS}
        self._sizes: dict[str, list[int]] = {ring: [0] * PARTS for ring in RINGS}
        self._newest = dict.fromkeys(RINGS, 0)
        self._last = 0

    def name(self, ring: str, part: int) -> str:
        """Name of the part's object."""
        return f"{self._fleet}-history-{ring}-{part}"

    def names(self) -> list[str]:
        """Names of all parts' objects."""
        return [self.name(ring, part) for ring in RINGS for part in range(PARTS)]

    def load(self, objects: dict[str, Json]) -> None:
        """Replace all entries by those in the objects. Lines that cannot be read are left out."""
        for ring in RINGS:
            for part in range(PARTS):
                text = ((objects.get(self.name(ring, part)) or {}).get("data") or {}).get(_KEY, "")
                self._parts[ring][part], self._sizes[ring][part] = _parsed_entries(text), len(text)
            self._newest[ring] = max(range(PARTS), key=lambda part: _last_id(self._parts[ring][part]))
        self._last = max(_last_id(entries) for parts in self._parts.values() for entries in parts)

    def add(self, entries: Iterable[HistoryEntry]) -> set[str]:
        """Add entries under new ids, over the oldest part when full; returns the parts to write, as `ring-part`."""
        touched = set()
        for entry in entries:
            ring = _RING_OF.get(entry.kind, "changes")
            self._last += 1
            kept = replace(entry, id=self._last)
            size, part = len(_json_line(kept)), self._newest[ring]
            if self._sizes[ring][part] + size > PART_BYTES:
                part = self._newest[ring] = (part + 1) % PARTS
                self._parts[ring][part], self._sizes[ring][part] = [], 0
            self._parts[ring][part].append(kept)
            self._sizes[ring][part] += size
            touched.add(f"{ring}-{part}")
        return touched

    def part_object(self, which: str, known: Json | None) -> Json:
        """The object of a part, to be written over the present object `known`; `which` is `ring-part`."""
        ring, _, part = which.rpartition("-")
        name = self.name(ring, int(part))
        found = known if known is not None else new_object(self._fleet, "state", name)
        assert name_of(found) == name
        return {**found, "data": {_KEY: "".join(_json_line(entry) for entry in self._parts[ring][int(part)])}}

    def find_entries(
        self, *, kinds: Sequence[str], subject: str | None, before: int | None, limit: int
    ) -> list[HistoryEntry]:
        """Entries with ids below `before`, of these kinds (empty: all) and this subject (None: all), newest first."""
        wanted = frozenset(kinds)
        found = [
            entry
            for parts in self._parts.values()
            for entries in parts
            for entry in entries
            if (not wanted or entry.kind in wanted)
            and (subject is None or entry.subject == subject)
            and (before is None or entry.id < before)
        ]
        return sorted(found, key=lambda entry: entry.id, reverse=True)[:limit]


def _json_line(entry: HistoryEntry) -> str:
    """The entry as a line of JSON."""
    return msgspec.json.encode(asdict(entry)).decode() + "\n"


def _parsed_entries(text: str) -> list[HistoryEntry]:
    """The entries of a part's text, without lines that cannot be read.

    A line ends at a line feed alone: texts in its JSON may hold other line separators, such as U+2028.
    """
    found = []
    for line in text.split("\n"):
        with contextlib.suppress(msgspec.MsgspecError):
            found.append(msgspec.json.decode(line, type=HistoryEntry))
    return found


def _last_id(entries: Sequence[HistoryEntry]) -> int:
    """The id of the last entry; 0 without one."""
    return entries[-1].id if entries else 0
