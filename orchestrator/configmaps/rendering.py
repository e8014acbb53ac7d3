"""What each ConfigMap is to be, from the tables and from what stands in it now."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec

from lorafleet.kube.client import Json
from orchestrator.configmaps.journal import HistoryJournal
from orchestrator.configmaps.mirror import ConfigMapMirror
from orchestrator.configmaps.objects import (
    STATUS,
    AdapterRecord,
    AliasRecord,
    PolicyRecord,
    Record,
    adapter_text,
    alias_text,
    annotation,
    asked_of,
    asked_targets,
    copy_of,
    differences,
    kind_of,
    mark_of,
    name_of,
    new_object,
    policy_text,
    release_of,
    text_of,
    uid_of,
    with_notes,
    with_ours,
)
from orchestrator.configmaps.tables import StoreTables, counters_in, counters_made, row_of, shard_made, workers_made
from orchestrator.configmaps.writer import DesiredObject, WriteKey
from orchestrator.core.errors import StateConflict
from orchestrator.core.rollout import Rollout
from orchestrator.core.state import PlacementPolicy, RegisteredAdapter

KINDS = {"adapters": "adapter", "aliases": "alias", "policy": "policy"}
Row = tuple[str, str]
"""(table, key)"""


class AcceptedText(NamedTuple):
    """A text that a row is taken from: its mark, and what it asks for (None: not worked out yet)."""

    mark: str
    asked: Any = None


@dataclass(slots=True)
class ObjectRendering:
    """Objects as they are to be written.

    accepting   row -> text that it is taken from, and that stays as it is unless REST asks for something else
    leaving     row -> (object, uid) that is to be deleted
    unwritten   rows that stand in no object yet: only their objects are made, all others are updated
    lost        objects that are gone for good, though what they said is still in the tables: not to be made again
    said        object -> its status, where it is not the usual one
    writer      this term's own mark in the counters: an epoch that somebody else took is not ours too
    on_state    called before what is remembered of deletions is written: somebody else may have written it
    """

    fleet: str
    mirror: ConfigMapMirror
    journal: HistoryJournal
    tables: StoreTables
    on_state: Callable[[], None] = lambda: None
    writer: str = ""
    accepting: dict[Row, AcceptedText] = field(default_factory=dict)
    leaving: dict[Row, tuple[str, str]] = field(default_factory=dict)
    unwritten: set[Row] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    said: dict[str, str] = field(default_factory=dict)

    def clear(self) -> None:
        """Nothing is under way."""
        self.accepting.clear()
        self.leaving.clear()
        self.unwritten.clear()
        self.lost.clear()
        self.said.clear()

    def leave(self, table: str, key: str) -> None:
        """It is deleted: the object that it stands in goes, and is remembered no more."""
        name, row = self.tables.home(table, key), (table, key)
        found = self.mirror.objects.get(name)
        if found is not None and name not in self.lost and self._stands_in(found, row):
            self.leaving[row] = name, uid_of(found)
        self.unwritten.discard(row)
        self.lost.discard(name)
        self.tables.homes.pop((table, key), None)
        if table == "adapters":
            self.tables.known.pop(key, None)

    def _stands_in(self, found: Json, row: Row) -> bool:
        """Whether this is the object that the row was taken from or written to, and none made in its place since."""
        said = row_of(self.mirror.record(name_of(found)))
        if said is not None and said[:2] == row:
            return True
        taken = self.accepting.get(row)
        return taken is not None and taken.mark == mark_of(text_of(found, KINDS[row[0]]))

    def taken(self, row: Row) -> None:
        """The text that is being accepted says what the row is now: what differs from here on REST has asked for."""
        taken = self.accepting.get(row)
        if taken is not None and taken.asked is None:
            self.accepting[row] = taken._replace(asked=self._asked(row))

    def _asked(self, row: Row) -> object:
        table, key = row
        match table:
            case "adapters":
                adapter = self.tables.adapters.get(key)
                return adapter and asked_of(adapter)
            case "aliases":
                targets = self.tables.aliases.get(key)
                return targets and asked_targets(targets, self.tables.rollouts.get(key))
            case _:
                return self.tables.policy.get("", PlacementPolicy())

    def stands(self, row: Row) -> None:
        """What was to be written of this row by now is."""
        name = self.tables.home(*row)
        record = self.mirror.record(name)
        said = row_of(record)
        if record is not None and said is not None and said[:2] == row:
            self.unwritten.discard(row)
            # Where they differ, a text was taken in since, and is still to be written.
            if record.of == mark_of(text_of(self.mirror.objects[name], KINDS[row[0]])):
                self.accepting.pop(row, None)
        if row[1] in getattr(self.tables, row[0]) or self.pending_deletion(*row) is None:
            self.leaving.pop(row, None)

    def is_leaving(self, name: str) -> bool:
        """Whether the object that stands there is to be deleted."""
        found = self.mirror.objects.get(name)
        if found is None or not self.leaving:
            return False
        said = row_of(self.mirror.record(name))
        rows = self.leaving if said is None else (said[:2],)
        return any(self.leaving.get(row) == (name, uid_of(found)) for row in rows)

    def pending_deletion(self, table: str, key: str) -> DesiredObject | None:
        """The very object that it stood in is to go; not one that somebody made in its place."""
        name, uid = self.leaving.get((table, key), ("", ""))
        found = self.mirror.objects.get(name)
        return DesiredObject(name, None, uid) if found is not None and uid_of(found) == uid else None

    def made(self, key: WriteKey) -> DesiredObject | None:
        """What is to be written. Raises StateConflict where somebody else has said something different meanwhile."""
        match key.table:
            case "adapters":
                return self._adapter(key.name)
            case "aliases":
                return self._alias(key.name)
            case "policy":
                return self._policy()
            case "status":
                return self._status(key.name)
            case "history":
                ring, _, part = key.name.rpartition("-")
                name = self.journal.name(ring, int(part))
                return DesiredObject(name, self.journal.made(key.name, self.mirror.objects.get(name)))
            case "tombstones" | "known":
                self.on_state()
                return self._shard(key.name)
            case "workers":
                return self._state("workers", lambda _: workers_made(self.tables))
            case _:
                return self._counters()

    def _shard(self, shard: str) -> DesiredObject:
        """What is remembered of adapters proves deletions only with the object's own uid: not before it is proven."""
        what = f"adapters-{shard}"
        is_proven = self.tables.state_name(what) not in self.mirror.unproven
        return self._state(what, lambda known: shard_made(self.tables, shard, known if is_proven else None))

    def _state(self, what: str, data: Callable[[Json | None], dict[str, str]]) -> DesiredObject:
        name = self.tables.state_name(what)
        known = self.mirror.objects.get(name)
        found = known if known is not None else new_object(self.fleet, "state", name)
        return DesiredObject(name, {**found, "data": data(known)})

    def _counters(self) -> DesiredObject | None:
        wish = self._state("counters", lambda _: counters_made(self.tables) | {"writer": self.writer})
        known = self.mirror.objects.get(wish.name)
        epoch, writer = counters_in(known).get("epoch", 0), ((known or {}).get("data") or {}).get("writer")
        if writer != self.writer and epoch >= self.tables.counters.get("epoch", 0) > 0:
            raise StateConflict(f"somebody else has written epoch {epoch}, so we do not lead", code="not_leading")
        return wish

    def _adapter(self, lora_id: str) -> DesiredObject | None:
        adapter = self.tables.adapters.get(lora_id)
        if adapter is None:
            return self.pending_deletion("adapters", lora_id)
        name = self.tables.home("adapters", lora_id)
        if name in self.lost:
            return None
        record = self.mirror.record(name)
        was = record.adapter if isinstance(record, AdapterRecord) and record.adapter.lora_id == lora_id else None
        row = "adapters", lora_id
        if was is None and adapter.is_deleting and row not in self.unwritten | self.accepting.keys():
            return None  # somebody has made another object in its place, which waits until this one is deleted
        return self._wish(
            row,
            name,
            is_asked=was is None or asked_of(was) != asked_of(adapter),
            text=lambda: adapter_text(adapter),
            record=lambda of: AdapterRecord(of, adapter),
            status=_status_of(adapter),
        )

    def _alias(self, alias: str) -> DesiredObject | None:
        targets, rollout = self.tables.aliases.get(alias), self.tables.rollouts.get(alias)
        if targets is None:
            return self.pending_deletion("aliases", alias)
        name = self.tables.home("aliases", alias)
        if name in self.lost:
            return None
        asked = asked_targets(targets, rollout)
        record = self.mirror.record(name)
        was = record.asked if isinstance(record, AliasRecord) and record.name == alias else None
        return self._wish(
            ("aliases", alias),
            name,
            is_asked=was != asked,
            text=lambda: alias_text(alias, asked),
            record=lambda of: AliasRecord(of, alias, targets, asked),
            status="accepted" if rollout is None else f"{rollout.phase}: {rollout.reason}".removesuffix(": "),
            rollout=rollout,
        )

    def _policy(self) -> DesiredObject | None:
        rules = self.tables.policy.get("", PlacementPolicy())
        name = self.tables.home("policy", "")
        record = self.mirror.record(name)
        return self._wish(
            ("policy", ""),
            name,
            is_asked=not isinstance(record, PolicyRecord) or record.rules != rules,
            text=lambda: policy_text(rules),
            record=lambda of: PolicyRecord(of, rules),
            status="accepted",
        )

    def _wish(
        self,
        row: Row,
        name: str,
        *,
        is_asked: bool,
        text: Callable[[], str],
        record: Callable[[str], Record],
        status: str,
        rollout: Rollout | None = None,
    ) -> DesiredObject | None:
        """The object of a row. Its text is written anew only where a caller has asked for something else than it says.

        is_asked   whether callers have, since it was written last

        Raises StateConflict when a person has changed the text too.
        """
        kind = KINDS[row[0]]
        known = self.mirror.objects.get(name)
        if known is None and row not in self.unwritten:
            return None
        found = known if known is not None else new_object(self.fleet, kind, name)
        there, before = text_of(found, kind), self.mirror.record(name)
        mark, new = mark_of(there), None
        if known is None:
            new = text()
            mark = mark_of(new)
        elif (taken := self.accepting.get(row)) is not None and taken.mark == mark:
            if taken.asked != self._asked(row) and not self._is_owned(name, found):
                new = text()
                mark = mark_of(new)
        elif before is None or before.of != mark:
            if is_asked:
                message = (
                    f"ConfigMap {name} says something else by now; look at it, and ask again if it still has to be"
                )
                raise StateConflict(message, code="conflict")
            assert before is not None, "what is not asked for is in a record"
            mark = before.of
        elif is_asked and not self._is_owned(name, found):
            new = text()
            mark = mark_of(new)
        status = self.said.get(name) or status + self._aside(name, found, text, is_new=new is not None)
        body = with_ours(found, kind, text=new, record=record(mark), status=status, rollout=rollout)
        return DesiredObject(name, body)

    def _is_owned(self, name: str, found: Json) -> bool:
        """Whether somebody owns the text who would meet a conflict if it were written here: an upgrade would fail."""
        return bool(release_of(found)) or name in self.mirror.applied

    def _aside(self, name: str, found: Json, text: Callable[[], str], *, is_new: bool) -> str:
        """What is in force and not in the text, in words; "" where it is all there."""
        if is_new or not self._is_owned(name, found):
            return ""
        others = differences(found, kind_of(found), text())
        owner = f"Helm release {release_of(found)}" if release_of(found) else "whoever applies it"
        return f"; set over REST, beside the text of {owner}: {', '.join(others)}" if others else ""

    def _status(self, name: str) -> DesiredObject | None:
        found, status = self.mirror.objects.get(name), self.said.get(name)
        if found is None or status is None or annotation(found, STATUS) == status:
            return None
        return DesiredObject(name, with_notes(found, {STATUS: status}))

    def copies(self) -> list[Json]:
        """For a backup: what is put back must take nothing from a fleet."""
        copies: list[Json] = []
        for lora_id, adapter in sorted(self.tables.adapters.items()):
            text = adapter_text(adapter)
            record = AdapterRecord(mark_of(text), replace(adapter, is_deleting=False))
            copies.append(self._copy("adapters", lora_id, text, record))
        for alias, targets in sorted(self.tables.aliases.items()):
            text = alias_text(alias, targets)
            copies.append(self._copy("aliases", alias, text, AliasRecord(mark_of(text), alias, targets, targets)))
        if (rules := self.tables.policy.get("")) is not None:
            text = policy_text(rules)
            copies.append(self._copy("policy", "", text, PolicyRecord(mark_of(text), rules)))
        workers = {name: it for name, it in self.tables.workers.items() if it.state != "draining"}
        state = new_object(self.fleet, "state", self.tables.state_name("workers"))
        return [*copies, {**state, "data": workers_made(StoreTables(self.fleet, workers=workers))}]

    def _copy(self, table: str, key: str, text: str, record: Record) -> Json:
        """An object that somebody else owns is copied as they made it: put back, it takes no field from them."""
        name, kind = self.tables.home(table, key), KINDS[table]
        found, was = self.mirror.objects.get(name), self.mirror.record(name)
        if found is None or was is None or not self._is_owned(name, found):
            found = new_object(self.fleet, kind, name)
            return with_ours(found, kind, text=text, record=record, status="accepted")
        record = msgspec.structs.replace(record, of=was.of)
        return with_ours(copy_of(found), kind, text=None, record=record, status=annotation(found, STATUS))


def _status_of(adapter: RegisteredAdapter) -> str:
    if adapter.is_deleting:
        return "deleting"
    if adapter.quarantine is not None:
        return f"quarantined: {adapter.quarantine}"
    return "accepted, and verified" if adapter.is_inspected else "accepted"
