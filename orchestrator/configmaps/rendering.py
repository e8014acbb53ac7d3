"""Rendering: each ConfigMap as it is to be, from the tables and the object's present content."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from lorafleet.kube.client import Json
from orchestrator.configmaps.journal import HistoryJournal
from orchestrator.configmaps.mirror import ConfigMapMirror
from orchestrator.configmaps.objects import (
    KIND_OF_TABLE,
    STATUS,
    Record,
    adapter_text,
    alias_text,
    annotation,
    applicable_copy,
    changeable_values,
    differing_fields,
    kind_of,
    name_of,
    new_object,
    policy_text,
    release_of,
    text_mark,
    text_of,
    uid_of,
    with_annotations,
    with_record,
)
from orchestrator.configmaps.tables import (
    KNOWN,
    LAYOUT,
    STATE_TABLES,
    StoreTables,
    row_shard,
    state_objects,
    state_rows,
)
from orchestrator.configmaps.writer import DesiredObject, WriteKey
from orchestrator.core.errors import OrchestratorUnavailable, StateConflict
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.policy import PlacementPolicy
from orchestrator.store.tables import ADAPTERS, COUNTERS, NAMES, POLICY, TOMBSTONES

Row = tuple[str, str]
"""(table, key)"""


class AcceptedText(NamedTuple):
    """A text that a row is accepted from, until the object has its record.

    uid    of the object with the text
    asked  the values that it asks for; None: not known yet
    """

    mark: str
    uid: str
    asked: Any = None


@dataclass(slots=True)
class ObjectRendering:
    """Renders the objects to be written.

    accepting   row -> text that it is accepted from; the text is kept unless REST asks for something else
    rendered    row -> accepted text that its last rendering began from, and the mark in that rendering's record
    deleting    row -> (object, uid) to be deleted
    unwritten   rows without an object: only their objects are created, all others are updated
    lost        deleted objects whose rows are still in the tables: not to be created again
    statuses    object -> status, where it is not the default
    term_mark   this term's mark in the counters, which tells our epoch from the same epoch of another process
    on_state    called before remembered adapters are written: another process may have written them
    """

    fleet: str
    mirror: ConfigMapMirror
    journal: HistoryJournal
    tables: StoreTables
    on_state: Callable[[], None] = lambda: None
    term_mark: str = ""
    accepting: dict[Row, AcceptedText] = field(default_factory=dict)
    rendered: dict[Row, tuple[AcceptedText, str]] = field(default_factory=dict)
    deleting: dict[Row, tuple[str, str]] = field(default_factory=dict)
    unwritten: set[Row] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    statuses: dict[str, str] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget all acceptances, deletions, unwritten and lost objects, and statuses; the tables stay."""
        self.accepting.clear()
        self.rendered.clear()
        self.deleting.clear()
        self.unwritten.clear()
        self.lost.clear()
        self.statuses.clear()

    def mark_deleted(self, table: str, key: str) -> None:
        """Mark a row's object for deletion, and drop the row's object name, acceptance and memory.

        An object that is gone, lost or of another row is not deleted.
        """
        name, row = self.tables.object_name(table, key), (table, key)
        found = self.mirror.objects.get(name)
        if found is not None and name not in self.lost and self._is_object_of(found, row):
            self.deleting[row] = name, uid_of(found)
        self.accepting.pop(row, None)
        self.unwritten.discard(row)
        self.lost.discard(name)
        self.tables.object_names.pop((table, key), None)
        if table == ADAPTERS.name:
            self.tables.rows.of(KNOWN).pop(key, None)

    def _is_object_of(self, found: Json, row: Row) -> bool:
        """Whether the row was accepted from or written to this object, and not to a later one of the same name."""
        if self._has_record_of(found, row):
            return True
        taken = self.accepting.get(row)
        return taken is not None and taken.mark == text_mark(text_of(found, KIND_OF_TABLE[row[0]]))

    def fix_accepted_values(self, row: Row) -> None:
        """Store the row's present values as those that its text asks for; later differences come from REST.

        Does nothing unless the row is newly accepted and has none yet.
        """
        taken = self.accepting.get(row)
        if taken is not None and taken.asked is None:
            self.accepting[row] = taken._replace(asked=self._asked_values(row))

    def _asked_values(self, row: Row) -> object:
        """The row's values as a caller asked for them."""
        table, key = row
        match table:
            case ADAPTERS.name:
                adapter = self.tables.rows.of(ADAPTERS).get(key)
                return adapter and changeable_values(adapter)
            case NAMES.name:
                name = self.tables.rows.of(NAMES).get(key)
                return name and name.asked_targets
            case _:
                return self.tables.rows.of(POLICY).get("", PlacementPolicy())

    def on_written(self, row: Row) -> None:
        """After a write of the row: end its acceptance and its deletion, if the object shows that they are done.

        Another text may have been accepted during the write; its acceptance goes on.
        """
        name = self.tables.object_name(*row)
        record = self.mirror.accepted_record(name)
        if record is not None and record.subject == row:
            self.unwritten.discard(row)
            if self.rendered.pop(row, None) == (self.accepting.get(row), record.of):
                del self.accepting[row]
        if self.tables.has_row(row) or self.pending_deletion(*row) is None:
            self.deleting.pop(row, None)

    def will_delete_object(self, object_name: str) -> bool:
        """Whether the object of this name is to be deleted."""
        found = self.mirror.objects.get(object_name)
        if found is None or not self.deleting:
            return False
        record = self.mirror.accepted_record(object_name)
        rows = self.deleting if record is None else (record.subject,)
        return any(self.deleting.get(row) == (object_name, uid_of(found)) for row in rows)

    def pending_deletion(self, table: str, key: str) -> DesiredObject | None:
        """The deletion of the row's object, by uid; None when there is none to delete."""
        name, uid = self.deleting.get((table, key), ("", ""))
        found = self.mirror.objects.get(name)
        return DesiredObject(name, None, uid) if found is not None and uid_of(found) == uid else None

    def render(self, key: WriteKey) -> DesiredObject | None:
        """The object to write for this key; None: unchanged.

        For tombstones and remembered adapters it calls `on_state` first.

        raises  StateConflict after a change by others, OrchestratorUnavailable after the end of our term
        """
        match key.table:
            case ADAPTERS.name:
                return self._render_adapter(key.name)
            case NAMES.name:
                return self._render_name(key.name)
            case POLICY.name:
                return self._render_policy()
            case "status":
                return self._render_status(key.name)
            case "history":
                ring, _, part = key.name.rpartition("-")
                name = self.journal.name(ring, int(part))
                return DesiredObject(name, self.journal.part_object(key.name, self.mirror.objects.get(name)))
            case COUNTERS.name:
                return self._render_counters()
            case _:
                return self._render_state(key.table, key.name)

    def _render_state(self, table: str, shard: str) -> DesiredObject:
        """The object of a table of our own state, or of a shard of it.

        One that remembers adapters has its own uid, without which it proves no deletion.
        """
        is_memory = table in (TOMBSTONES.name, KNOWN.name)
        if is_memory:
            self.on_state()
        name = self.tables.state_name(table, shard)
        known = self.mirror.objects.get(name)
        found = known if known is not None else new_object(self.fleet, "state", name)
        uid = "" if known is None or name in self.mirror.unproven else uid_of(known)
        data = self.tables.state_data(table, shard) | ({"uid": uid} if is_memory else {})
        return DesiredObject(name, {**found, "data": data})

    def _render_counters(self) -> DesiredObject:
        """The object of the counters. Raises OrchestratorUnavailable if another process has taken our epoch."""
        wish = self._render_state(COUNTERS.name, "")
        known = self.mirror.objects.get(wish.name)
        epoch, writer = state_rows(known, COUNTERS).get("epoch", 0), ((known or {}).get("data") or {}).get("writer")
        if writer != self.term_mark and epoch >= self.tables.rows.of(COUNTERS).get("epoch", 0) > 0:
            raise OrchestratorUnavailable(
                f"another process has written epoch {epoch}, so we do not lead", code="not_leading"
            )
        assert wish.body is not None
        wish.body["data"] |= {"layout": str(LAYOUT), "writer": self.term_mark}
        return wish

    def _render_adapter(self, lora_id: str) -> DesiredObject | None:
        """The object of an adapter, or its deletion; None: nothing to write. Raises StateConflict."""
        adapter = self.tables.rows.of(ADAPTERS).get(lora_id)
        if adapter is None:
            return self.pending_deletion(ADAPTERS.name, lora_id)
        name = self.tables.object_name(ADAPTERS.name, lora_id)
        if name in self.lost:
            return None
        row = ADAPTERS.name, lora_id
        record = self.mirror.accepted_record(name)
        was = None if record is None or record.subject != row else record.row
        if was is None and adapter.is_deleting and row not in self.unwritten | self.accepting.keys():
            return None  # another object of the name was created; it waits until this row is deleted
        return self._render_row(
            row,
            name,
            is_asked=was is None or changeable_values(was) != changeable_values(adapter),
            text=lambda: adapter_text(adapter),
            record=lambda of: Record(of, *row, adapter),
            status=_status_of(adapter),
        )

    def _render_name(self, key: str) -> DesiredObject | None:
        """The object of an alias or published name, or its deletion; None: nothing to write. Raises StateConflict."""
        row = NAMES.name, key
        name = self.tables.rows.of(NAMES).get(key)
        if name is None:
            return self.pending_deletion(*row)
        object_name = self.tables.object_name(*row)
        if object_name in self.lost:
            return None
        record = self.mirror.accepted_record(object_name)
        was = None if record is None or record.subject != row else record.row.asked_targets
        rollout = name.rollout
        return self._render_row(
            row,
            object_name,
            is_asked=was != name.asked_targets,
            text=lambda: alias_text(key, name.asked_targets),
            record=lambda of: Record(of, *row, name),
            status="accepted" if rollout is None else f"{rollout.phase}: {rollout.reason}".removesuffix(": "),
        )

    def _render_policy(self) -> DesiredObject | None:
        """The object of the global policy; None: nothing to write. Raises StateConflict."""
        row = POLICY.name, ""
        rules = self.tables.rows.of(POLICY).get("", PlacementPolicy())
        name = self.tables.object_name(*row)
        record = self.mirror.accepted_record(name)
        return self._render_row(
            row,
            name,
            is_asked=record is None or record.row != rules,
            text=lambda: policy_text(rules),
            record=lambda of: Record(of, *row, rules),
            status="accepted",
        )

    def _render_row(
        self,
        row: Row,
        name: str,
        *,
        is_asked: bool,
        text: Callable[[], str],
        record: Callable[[str], Record[Any]],
        status: str,
    ) -> DesiredObject | None:
        """The object of a row, or None: nothing to write.

        Its text is rewritten only if a REST caller has asked for other values. The values of a text that is accepted
        and not yet written are not REST's: another text in its place, even the one before it, is kept.

        is_asked   whether the row's values differ from those of the object's record

        Raises StateConflict when a person has changed the text too.
        """
        kind = KIND_OF_TABLE[row[0]]
        known = self.mirror.objects.get(name)
        if known is None and row not in self.unwritten:
            return None
        found = known if known is not None else new_object(self.fleet, kind, name)
        taken, before = self.accepting.get(row), self.mirror.accepted_record(name)
        mark = text_mark(text_of(found, kind))
        of = taken.mark if taken is not None else before.of if before is not None else None
        if taken is not None:
            is_asked = taken.asked != self._asked_values(row)
        if known is not None and self._is_conflict(row, found, is_asked=is_asked, is_accepted=of == mark):
            message = (
                f"ConfigMap {name} has been changed meanwhile; read it, and repeat the change if it is still needed"
            )
            raise StateConflict(message, code="conflict")
        new = None
        if known is None or (is_asked and of == mark and not self._is_owned(name, found)):
            new = text()
            of = text_mark(new)
        assert of is not None, "a row without a change has a record"
        if taken is not None:
            self.rendered[row] = taken, of
        status = self.statuses.get(name) or status + self._override_note(name, found, text, is_new=new is not None)
        body = with_record(found, kind, text=new, record=record(of), status=status)
        return DesiredObject(name, body)

    def _is_conflict(self, row: Row, found: Json, *, is_asked: bool, is_accepted: bool) -> bool:
        """Whether the object must not be written because people have put a text there that is still to be checked.

        is_asked     whether a REST caller has asked for other values than the accepted text
        is_accepted  whether the object has the accepted text
        """
        taken = self.accepting.get(row)
        if taken is None:
            return is_asked and not is_accepted
        if is_asked and (not is_accepted or taken.uid != uid_of(found)):
            return True
        # A new object, or one with another row's record, is not this row's any more.
        return not is_accepted and not self._has_record_of(found, row)

    def _has_record_of(self, found: Json, row: Row) -> bool:
        """Whether the object has an accepted record of this row."""
        record = self.mirror.accepted_record(name_of(found))
        return record is not None and record.subject == row

    def _is_owned(self, name: str, found: Json) -> bool:
        """Whether Helm or a server-side apply owns the text: rewriting it would make their next upgrade fail."""
        return bool(release_of(found)) or name in self.mirror.applied

    def _override_note(self, name: str, found: Json, text: Callable[[], str], *, is_new: bool) -> str:
        """Note for the status: fields set over REST that an owned text does not show; "" if there are none."""
        if is_new or not self._is_owned(name, found):
            return ""
        others = differing_fields(found, kind_of(found), text())
        owner = f"Helm release {release_of(found)}" if release_of(found) else "the client that applies it"
        return f"; set over REST, beside the text of {owner}: {', '.join(others)}" if others else ""

    def _render_status(self, name: str) -> DesiredObject | None:
        """The object with its new status; None without the object or a change."""
        found, status = self.mirror.objects.get(name), self.statuses.get(name)
        if found is None or status is None or annotation(found, STATUS) == status:
            return None
        return DesiredObject(name, with_annotations(found, {STATUS: status}))

    def backup_objects(self) -> list[Json]:
        """All objects for a backup, without deletions and drains: a restore must remove nothing from a fleet."""
        tables, copies = self.tables.backup(), []
        for lora_id, adapter in tables.rows.of(ADAPTERS).items():
            text = adapter_text(adapter)
            copies.append(self._backup_object(text, Record(text_mark(text), ADAPTERS.name, lora_id, adapter)))
        for key, name in tables.rows.of(NAMES).items():
            text = alias_text(key, name.targets)
            copies.append(self._backup_object(text, Record(text_mark(text), NAMES.name, key, name)))
        for key, rules in tables.rows.of(POLICY).items():
            text = policy_text(rules)
            copies.append(self._backup_object(text, Record(text_mark(text), POLICY.name, key, rules)))
        for table, shard in state_objects():
            if any(row_shard(table, key) == shard for key in tables.rows.of(STATE_TABLES[table])):
                found = new_object(self.fleet, "state", tables.state_name(table, shard))
                copies.append({**found, "data": tables.state_data(table, shard)})
        return copies

    def _backup_object(self, text: str, record: Record[Any]) -> Json:
        """The backup of one object. An owned object keeps its owner's text: a restore takes no field from them."""
        name, kind = self.tables.object_name(*record.subject), KIND_OF_TABLE[record.table]
        found, was = self.mirror.objects.get(name), self.mirror.accepted_record(name)
        if found is None or was is None or not self._is_owned(name, found):
            found = new_object(self.fleet, kind, name)
            return with_record(found, kind, text=text, record=record, status="accepted")
        record = msgspec.structs.replace(record, of=was.of)
        return with_record(applicable_copy(found), kind, text=None, record=record, status=annotation(found, STATUS))


def _status_of(adapter: RegisteredAdapter) -> str:
    """The default status of an adapter's object."""
    if adapter.is_deleting:
        return "deleting"
    if adapter.quarantine is not None:
        return f"quarantined: {adapter.quarantine}"
    return "accepted, and verified" if adapter.is_inspected else "accepted"
