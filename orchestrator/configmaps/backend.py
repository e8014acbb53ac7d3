"""The store backend on ConfigMaps: a watch keeps the memory for reads current, writes run in the background."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lorafleet.kube.client import Json, KubeClient
from lorafleet.kube.errors import KubeError
from lorafleet.kube.watch import list_and_watch
from orchestrator.configmaps.journal import HistoryJournal
from orchestrator.configmaps.mirror import ConfigMapMirror
from orchestrator.configmaps.objects import (
    FLEET,
    KIND_OF_TABLE,
    kind_of,
    text_mark,
    text_of,
    uid_of,
    version_of,
)
from orchestrator.configmaps.rendering import AcceptedText, ObjectRendering
from orchestrator.configmaps.tables import (
    KNOWN,
    STATE_TABLES,
    RememberedAdapter,
    StoreTables,
    remembered_in_object,
    require_layout,
    row_shard,
    state_objects,
    tables_from_objects,
)
from orchestrator.configmaps.writer import ObjectWriter, WriteKey
from orchestrator.core.errors import OrchestratorError, OrchestratorUnavailable, StateConflict, StoreError
from orchestrator.model.history import HistoryEntry
from orchestrator.model.ledger import UsageBatch, UsageQuery, UsageRows
from orchestrator.store.tables import (
    ADAPTERS,
    COUNTERS,
    NAMES,
    TOMBSTONES,
    StoreChange,
    StoredRows,
    Subject,
)

_HISTORY_AFTER_S = 2.0  # a burst of loads becomes one write; a crash loses at most so many seconds of history

_FINISH_S = 2.0  # a guess: less than a lease and than a pod's grace period
_AGAIN_S = 10.0  # until a failed write that no caller waits for is retried


class Acceptance(NamedTuple):
    """A row's object, and the text that the row is accepted from, while its record is not written. None: none."""

    name: str | None
    text: AcceptedText | None


class ConfigMapBackend:
    """Intent in the ConfigMaps of one namespace that are labelled with this fleet's name.

    mirror     the objects as last seen
    rendering  the objects as they are to be written
    writer     writes them
    on_undone  called when a refused write was taken back: `read` returns the state without it
    """

    backup_name = "lorafleet-backup.json"

    def __init__(
        self,
        kube: KubeClient,
        *,
        namespace: str,
        fleet: str,
        on_undone: Callable[[], None],
        give_up_s: float = 30.0,
        call_s: float = 5.0,
    ) -> None:
        self._kube = kube
        self.fleet = fleet
        self._folder = f"/api/v1/namespaces/{namespace}/configmaps"
        self._has_changes = asyncio.Event()
        self.mirror = ConfigMapMirror(self._on_mirror_news, self._on_proven_object)
        self._on_undone = on_undone
        self._journal = HistoryJournal(fleet)
        self.rendering = ObjectRendering(
            fleet, self.mirror, self._journal, StoreTables(fleet), on_state=self.reload_remembered
        )
        self._journal_due: asyncio.TimerHandle | None = None
        self._parts: set[str] = set()
        self._is_writing = False
        self._tables_edition = self._journal_edition = -1
        self._is_undone = self._is_caught_up = False
        self._undone_rows: set[tuple[str, str]] = set()  # rows that were taken back here and that the store still holds
        self._barrier = 0
        self.writer = ObjectWriter(
            kube,
            folder=self._folder,
            mirror=self.mirror,
            render=self.rendering.render,
            on_written=self._on_object_written,
            on_refused=self._on_write_refused,
            give_up_s=give_up_s,
            call_s=call_s,
        )

    @property
    def tables(self) -> StoreTables:
        """The rows, including those whose write is pending."""
        return self.rendering.tables

    # -- Backend --------------------------------------------------------------------------------------------------

    def read(self) -> StoredRows:
        """The stored intent. Unless we write, the tables are rebuilt first if the mirror has changed."""
        if not self._is_writing and self._tables_edition != self.mirror.edition:
            self.rendering.tables, self._tables_edition = (
                tables_from_objects(self.mirror, self.fleet),
                self.mirror.edition,
            )
        return self.tables.intent()

    def write(self, changes: Sequence[StoreChange], entries: Sequence[HistoryEntry]) -> None:
        """Apply the changes to the tables at once and queue their objects' writes; history is written seconds later.

        Raises OrchestratorUnavailable unless we lead, and for a row that was taken back and not yet reported.
        """
        if not self._is_writing:
            raise OrchestratorUnavailable("this orchestrator does not lead, so it writes nothing", code="not_leading")
        for change in changes:
            row = change.table, change.key
            if change.row is not None and row in self._undone_rows:
                message = f"{change.table} {change.key!r}: the change before this one was refused; look, and ask again"
                raise OrchestratorUnavailable(message, code="store_unreachable")
        for change in changes:
            row = change.table, change.key
            if change.row is None and change.table in (ADAPTERS.name, NAMES.name):
                self.rendering.mark_deleted(change.table, change.key)
            elif change.table in KIND_OF_TABLE and row not in self.tables.object_names:
                self.rendering.unwritten.add(row)
        self.tables.apply_changes(changes)
        self.writer.mark_dirty({key for change in changes for key in _write_keys(change)})
        if entries:
            self._parts |= self._journal.add(entries)
            if self._journal_due is None:
                loop = asyncio.get_running_loop()
                self._journal_due = loop.call_later(_HISTORY_AFTER_S, self._queue_history_writes)

    async def wait_durable(self, about: Collection[Subject] | None = None) -> None:
        """Wait until the API server has the writes of these subjects (None: all). Raises a refused write's error."""
        await self.writer.wait_durable(
            None if about is None else {key for subject in about for key in _write_keys(StoreChange(*subject, 0))}
        )

    async def catch_up(self) -> None:
        """Begin a term as the writer: rebuild the tables and the history from the mirror.

        Reads the counters by name, so that they are raised from their present value. All objects of people are checked
        again. Raises OrchestratorUnavailable.
        """
        if not self.mirror.is_synced:
            raise OrchestratorUnavailable("the ConfigMaps have not been listed yet", code="starting")
        try:
            found = await self.writer.read_object(name := self.tables.state_name(COUNTERS.name))
        except KubeError as exc:
            raise OrchestratorUnavailable(f"the store's ConfigMaps: {exc}", code="store_unreachable") from exc
        if found is None:
            self.mirror.forget(name)
        require_layout(found)
        self.end_term()
        self.rendering.term_mark = secrets.token_hex(8)
        self.read()
        self._journal.load(self.mirror.objects)
        self._is_writing = True
        self.mirror.changed.update(self.mirror.people_object_names())
        self._has_changes.set()

    @property
    def is_caught_up(self) -> bool:
        """Whether the watch has shown our first write of this term, and so all earlier writes."""
        return self._is_caught_up

    @property
    def is_read(self) -> bool:
        """Whether the ConfigMaps have been listed."""
        return self.mirror.is_synced

    def end_term(self) -> None:
        """Stop being the writer: drop all pending writes, and read from the mirror again.

        Forgets acceptances and statuses, and cancels the history timer.
        """
        self.writer.drop_all()
        self._is_writing = False
        self._barrier, self._is_caught_up = 0, False
        self._tables_edition = self._journal_edition = -1
        self.rendering.clear()
        self._parts.clear()
        if self._journal_due is not None:
            self._journal_due.cancel()
            self._journal_due = None

    trouble = ""
    """Empty: a change that the API server does not take is refused by itself, after `give_up_s`."""

    def check(self) -> str:
        """Return "": there is no file that could be lost."""
        return ""

    def history(
        self, *, kinds: Sequence[str] = (), subject: str | None = None, before: int | None = None, limit: int
    ) -> list[HistoryEntry]:
        """Matching history entries, newest first; unless we write, those of the mirror, reread if it has changed."""
        if not self._is_writing and self._journal_edition != self.mirror.edition:
            self._journal.load(self.mirror.objects)
            self._journal_edition = self.mirror.edition
        return self._journal.find_entries(kinds=kinds, subject=subject, before=before, limit=limit)

    has_ledger = False

    async def add_usage(self, batches: Sequence[UsageBatch], now: float) -> UsageRows:  # noqa: ARG002  (the interface's)
        """Drop the batches: a row for each tenant, key, adapter and hour is too much for ConfigMaps."""
        return {}

    async def usage(self, query: UsageQuery) -> UsageRows:  # noqa: ARG002  (the interface's)
        """Raises StateConflict: there is no ledger."""
        raise StateConflict(
            "this fleet keeps no usage, because its store is ConfigMaps: use a store that has a ledger, an SQLite file"
            " or postgresql://user@host/database",
            code="no_ledger",
        )

    def backup(self, path: Path) -> None:
        """Write a List for `kubectl apply -f`: adapters with inspection results, aliases, policy and cordons.

        Raises StoreError if the file exists or cannot be created.
        """
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError as exc:
            raise StoreError(f"backup {path}: {exc.strerror}; name a new file in a folder that can be written") from exc
        with os.fdopen(handle, "wb") as file:
            file.write(
                msgspec.json.encode({"apiVersion": "v1", "kind": "List", "items": self.rendering.backup_objects()})
            )

    def close(self) -> None:
        """End the term: pending writes are dropped."""
        self.end_term()

    # -- for the loops beside it ----------------------------------------------------------------------------------

    async def follow(self) -> None:
        """List and watch the ConfigMaps and update the mirror, until cancelled."""
        await list_and_watch(
            self._kube,
            self._folder,
            label_selector=f"{FLEET}={self.fleet}",
            on_list=self.mirror.on_list,
            on_event=self.mirror.on_event,
        )

    async def wait_until_listed(self, within_s: float) -> bool:
        """Wait at most `within_s` seconds for the first list; returns whether it came."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self.mirror.is_synced:
                    await self.wait_for_changes()
        return self.mirror.is_synced

    async def wait_for_changes(self) -> None:
        """Wait until the mirror has news or `request_check` was called since the last call. Clears that mark."""
        await self._has_changes.wait()
        self._has_changes.clear()

    def request_check(self) -> None:
        """Make `wait_for_changes` return at once."""
        self._has_changes.set()

    async def write_remaining(self) -> None:
        """Write everything pending, history included, within `_FINISH_S` seconds. For an orderly end of a term."""
        if self._is_writing:
            self._queue_history_writes()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FINISH_S):
                    await self.writer.wait_idle()

    def acceptance(self, table: str, key: str) -> Acceptance:
        """The row's object, and its accepted text while that is not written."""
        row = table, key
        return Acceptance(self.tables.object_names.get(row), self.rendering.accepting.get(row))

    def is_accepted_text(self, table: str, key: str, name: str) -> bool:
        """Whether the row is accepted from the present text of this very object, and that is still to be written."""
        found, taken = self.mirror.objects[name], self.rendering.accepting.get((table, key))
        return taken is not None and (taken.mark, taken.uid) == (_text_mark(found), uid_of(found))

    def begin_acceptance(self, table: str, key: str, name: str) -> None:
        """Begin to accept the object's text for this row: its next change comes from that text. Drops its status."""
        found = self.mirror.objects[name]
        self.tables.object_names[table, key] = name
        self.rendering.accepting[table, key] = AcceptedText(_text_mark(found), uid_of(found))
        self.rendering.statuses.pop(name, None)

    def finish_acceptance(self, table: str, key: str, name: str) -> None:
        """Finish accepting the object's text: queue a write of its record and default status, also without a change."""
        self.rendering.fix_accepted_values((table, key))
        self.rendering.lost.discard(name)
        self.set_status(name, "")
        self.writer.mark_dirty([_row_key(table, key)])

    def cancel_acceptance(self, table: str, key: str, former: Acceptance) -> None:
        """The text was refused: restore the row's former object, and the text that was accepted before, if any."""
        row = table, key
        if former.name is None:
            self.tables.object_names.pop(row, None)
        else:
            self.tables.object_names[row] = former.name
        if former.text is None:
            self.rendering.accepting.pop(row, None)
        else:
            self.rendering.accepting[row] = former.text

    def set_status(self, name: str, status: str) -> None:
        """Set an object's status and queue its write, if it changed; "" restores the default one."""
        if status != self.rendering.statuses.get(name, ""):
            if status:
                self.rendering.statuses[name] = status
            else:
                self.rendering.statuses.pop(name, None)
            self.writer.mark_dirty([WriteKey(1, "status", name)], is_promised=False)

    def clear_status(self, table: str, key: str, name: str) -> None:
        """Restore the default status of a row's object, and queue its write."""
        self.set_status(name, "")
        self.writer.mark_dirty([_row_key(table, key)], is_promised=False)

    def absorb(self, table: str, key: str, value: Any, name: str) -> None:
        """Take over a row that an earlier leader has written: into the tables, without a write."""
        if table in KIND_OF_TABLE:
            self.tables.object_names.setdefault((table, key), name)
        self.tables.apply_changes([StoreChange(table, key, value)])

    def reload_remembered(self) -> None:
        """Reload remembered adapters from shards that another process or a restore has written."""
        for table, shard in state_objects():
            name = self.tables.state_name(table, shard)
            if table == KNOWN.name and name in self.mirror.changed:
                self.mirror.changed.discard(name)
                others = {
                    key: row for key, row in self.tables.rows.of(KNOWN).items() if row_shard(KNOWN.name, key) != shard
                }
                reloaded = remembered_in_object(self.mirror.objects.get(name))
                self.tables.rows.replace(KNOWN, others | reloaded)

    def recreate_object(self, table: str, key: str) -> None:
        """Have the row's object created again by its next write: it is gone, and no deletion was seen."""
        self.rendering.unwritten.add((table, key))

    def mark_lost(self, name: str) -> None:
        """Do not create the object again: it was deleted, and its row is about to be."""
        self.rendering.lost.add(name)

    def forget_adapter_object(self, lora_id: str) -> None:
        """Stop remembering the adapter for the detection of its deletion, and queue that write."""
        if self.tables.rows.of(KNOWN).pop(lora_id, None) is not None:
            self.writer.mark_dirty([_memory_key(lora_id)], is_promised=False)

    def is_pending(self, table: str, key: str) -> bool:
        """Whether a write of the row is pending."""
        return self.writer.is_pending(_row_key(table, key))

    def will_delete_object(self, object_name: str) -> bool:
        """Whether this object is about to be deleted, because its row was."""
        return self.rendering.will_delete_object(object_name)

    def record_adapter_object(self, lora_id: str) -> None:
        """Remember the adapter's object and queue that write, so that a deletion without an orchestrator is noticed.

        No write if nothing changed.
        """
        adapter, name = self.tables.rows.of(ADAPTERS)[lora_id], self.tables.object_name(ADAPTERS.name, lora_id)
        known = RememberedAdapter(name, uid_of(self.mirror.objects[name]), adapter.digest)
        remembered = self.tables.rows.of(KNOWN)
        if remembered.get(lora_id) != known:
            remembered[lora_id] = known
            self.writer.mark_dirty([_memory_key(lora_id)], is_promised=False)

    def _on_mirror_news(self) -> None:
        """After a list or watch event: update `is_caught_up`, and wake `wait_for_changes`."""
        name = self.tables.state_name(COUNTERS.name)
        # Our first write of the counters comes back by the watch after all earlier writes. After a restore of the
        # cluster it does not come back at that version.
        has_come = self.mirror.watched.get(name, 0) >= self._barrier or name in self.mirror.doubtful
        self._is_caught_up = self._is_caught_up or (self._barrier > 0 and has_come)
        self._has_changes.set()

    def _on_object_written(self, key: WriteKey) -> None:
        """After a successful write: update the bookkeeping, remember the adapter, set the barrier of the counters."""
        row = key.table, key.name
        if key.table in KIND_OF_TABLE:
            self.rendering.on_written(row)
        if key.table == ADAPTERS.name and self.tables.has_row(row):
            if self.tables.object_name(*row) in self.mirror.objects:
                self.record_adapter_object(key.name)
        elif key.table == COUNTERS.name and not self._barrier:
            self._barrier = version_of(self.mirror.objects[self.tables.state_name(COUNTERS.name)])
            self._on_mirror_news()

    def _on_proven_object(self, name: str) -> None:
        """Queue another write of a state object, whose memory proves deletions from now on."""
        prefix = f"{self.tables.state_name(KNOWN.name)}-"
        if self._is_writing and name.startswith(prefix):
            self.writer.mark_dirty([WriteKey(2, KNOWN.name, name.removeprefix(prefix))], is_promised=False)

    def _on_write_refused(self, key: WriteKey, error: OrchestratorError) -> None:
        """Take back a row whose write was refused: the row becomes what its object in the API server holds.

        After a conflict the object is checked at once, because it has changed. After any other refusal it is checked
        later, because the API server would refuse the same write again.
        """
        again_s = 0.0 if isinstance(error, StateConflict) else _AGAIN_S
        row = key.table, key.name
        self.rendering.accepting.pop(row, None)
        self.rendering.deleting.pop(row, None)
        if key.table in KIND_OF_TABLE:
            self._restore_row(key.table, key.name, again_s)
        elif key.table == TOMBSTONES.name:
            # An object is deleted only after its deletion is written down.
            for table, lora_id in [row for row in self.rendering.deleting if row_shard(KNOWN.name, row[1]) == key.name]:
                if table == ADAPTERS.name:
                    self.rendering.deleting.pop((table, lora_id))
                    self._restore_row(table, lora_id, again_s)
        elif key.table in STATE_TABLES and key.table != KNOWN.name:
            own = STATE_TABLES[key.table]
            self.tables.rows.replace(own, tables_from_objects(self.mirror, self.fleet).rows.of(own))
        else:  # no caller waits for the others
            asyncio.get_running_loop().call_later(_AGAIN_S, self._retry_write, key)
            return
        if not self._is_undone:
            self._is_undone = True
            asyncio.get_running_loop().call_soon(self.report_undone)

    def _retry_write(self, key: WriteKey) -> None:
        """Queue the write again, if we still write."""
        if self._is_writing:
            self.writer.mark_dirty([key], is_promised=False)

    def _restore_row(self, table: Any, key: str, again_s: float) -> None:
        """Set the row to what its object holds, mark it as undone, and check the object again after `again_s` seconds.

        Without an object the row is deleted.
        """
        name = self.tables.object_name(table, key)
        record = self.mirror.accepted_record(name)
        stands = None if record is None or record.subject != (table, key) else record
        self.tables.apply_changes([StoreChange(table, key, None if stands is None else stands.row)])
        self._undone_rows.add((table, key))
        self.rendering.unwritten.discard((table, key))
        if stands is not None:
            self.tables.object_names[table, key] = name
        else:
            self.tables.object_names.pop((table, key), None)
        asyncio.get_running_loop().call_later(again_s, self._recheck_object, name)

    def _recheck_object(self, name: str) -> None:
        """Mark the object as changed, so that it is checked again, and wake `wait_for_changes`; only while we write."""
        if self._is_writing:
            self.mirror.changed.add(name)
            self._has_changes.set()

    def report_undone(self) -> None:
        """Call `on_undone` if rows were taken back since the last call."""
        if self._is_undone:
            self._is_undone = False
            self._undone_rows.clear()
            self._on_undone()

    def _queue_history_writes(self) -> None:
        """Queue the writes of all changed history parts now, and cancel the timer for it."""
        if self._journal_due is not None:
            self._journal_due.cancel()
        self._journal_due = None
        parts, self._parts = self._parts, set()
        self.writer.mark_dirty([WriteKey(3, "history", part) for part in parts], is_promised=False)


def _text_mark(found: Json) -> str:
    """The mark of the object's present text."""
    return text_mark(text_of(found, kind_of(found)))


def _write_keys(change: StoreChange) -> Iterable[WriteKey]:
    """The write keys of a change; for a removed adapter also its tombstone shard's."""
    table, key = change.table, change.key
    yield WriteKey(0, table, row_shard(table, key)) if table in STATE_TABLES else _row_key(table, key)
    if table == ADAPTERS.name and change.row is None:
        yield WriteKey(0, TOMBSTONES.name, row_shard(KNOWN.name, key))


def _row_key(table: str, key: str) -> WriteKey:
    """The write key of a row with an object of its own."""
    # Names first: a version that no name knows would never be retired.
    return WriteKey(0 if table == NAMES.name else 1, table, key)


def _memory_key(lora_id: str) -> WriteKey:
    """The write key of the memory of an adapter's object: after the object itself."""
    return WriteKey(2, KNOWN.name, row_shard(KNOWN.name, lora_id))
