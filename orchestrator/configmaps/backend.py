"""A Backend on ConfigMaps: reads come from memory, which a watch keeps true; writes go out beside whoever wrote."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lorafleet.kube.client import KubeClient
from lorafleet.kube.errors import KubeError
from lorafleet.kube.watch import follow
from orchestrator.configmaps.journal import HistoryJournal
from orchestrator.configmaps.mirror import ConfigMapMirror
from orchestrator.configmaps.objects import FLEET, kind_of, mark_of, rollout_of, text_of, uid_of, version_of
from orchestrator.configmaps.rendering import KINDS, AcceptedText, ObjectRendering
from orchestrator.configmaps.tables import (
    SHARDS,
    RememberedAdapter,
    StoreTables,
    counters_in,
    known_in,
    read,
    row_of,
    shard_of,
)
from orchestrator.configmaps.writer import ObjectWriter, WriteKey
from orchestrator.core.errors import OrchestratorError, OrchestratorUnavailable, StateConflict, StoreError
from orchestrator.store.backend import HistoryEntry, StoreChange, StoredIntent, Subject

_HISTORY_AFTER_S = 2.0  # so that a burst of loads is one write of a part; a crash may lose this much of the history

_FINISH_S = 2.0  # a guess: less than any lease lasts, and than a pod is given to end
_AGAIN_S = 10.0  # until what was not written, and nobody waits for, is tried again


class ConfigMapBackend:
    """Intent in the ConfigMaps of one namespace that are labelled with this fleet's name.

    on_undone   something that was written here was not to be, and `read` knows nothing of it any more
    """

    backup_name = "lorafleet-backup.json"

    def __init__(
        self, kube: KubeClient, *, namespace: str, fleet: str, give_up_s: float = 30.0, call_s: float = 5.0
    ) -> None:
        self._kube = kube
        self.fleet = fleet
        self._folder = f"/api/v1/namespaces/{namespace}/configmaps"
        self._news = asyncio.Event()
        self.mirror = ConfigMapMirror(self._hear, self._prove)
        self.on_undone: Callable[[], None] = lambda: None
        self._journal = HistoryJournal(fleet)
        self.drafts = ObjectRendering(fleet, self.mirror, self._journal, StoreTables(fleet), on_state=self.take_back)
        self._journal_due: asyncio.TimerHandle | None = None
        self._parts: set[str] = set()
        self._is_writing = False
        self._edition = self._journal_edition = -1
        self._is_undone = self._is_caught_up = False
        self._undone: set[tuple[str, str]] = set()  # rows of which the store still knows what was not to be
        self._barrier = 0
        self.writer = ObjectWriter(
            kube,
            folder=self._folder,
            mirror=self.mirror,
            make=self.drafts.made,
            on_written=self._stands,
            on_refused=self._undo,
            give_up_s=give_up_s,
            call_s=call_s,
        )

    @property
    def tables(self) -> StoreTables:
        """What is written and what is on its way to be."""
        return self.drafts.tables

    # -- Backend --------------------------------------------------------------------------------------------------

    def read(self) -> StoredIntent:
        if not self._is_writing and self._edition != self.mirror.edition:
            self.drafts.tables, self._edition = read(self.mirror, self.fleet), self.mirror.edition
        return self.tables.stored()

    def write(self, changes: Sequence[StoreChange], entries: Sequence[HistoryEntry]) -> None:
        if not self._is_writing:
            raise OrchestratorUnavailable("this orchestrator does not lead, so it writes nothing", code="not_leading")
        for change in changes:
            row = change.table, change.key
            if change.value is not None and row in self._undone:
                message = f"{change.table} {change.key!r}: the change before this one was refused; look, and ask again"
                raise OrchestratorUnavailable(message, code="store_unreachable")
        for change in changes:
            row = change.table, change.key
            if change.table in ("adapters", "aliases") and change.value is None:
                self.drafts.leave(change.table, change.key)
            elif change.table in KINDS and row not in self.tables.homes:
                self.drafts.unwritten.add(row)
        self.tables.apply(changes)
        self.writer.mark({key for change in changes for key in _keys(change)})
        if entries:
            self._parts |= self._journal.add(entries)
            if self._journal_due is None:
                loop = asyncio.get_running_loop()
                self._journal_due = loop.call_later(_HISTORY_AFTER_S, self._write_the_journal)

    async def saved(self, about: Collection[Subject] | None = None) -> None:
        await self.writer.saved(None if about is None else {key for it in about for key in _keys(StoreChange(*it, 0))})

    async def catch_up(self) -> None:
        """The counters are asked for by name: whoever raises them does so from what nobody else has raised since."""
        if not self.mirror.is_synced:
            raise OrchestratorUnavailable("the ConfigMaps have not been listed yet", code="starting")
        try:
            found = await self.writer.look(self.tables.state_name("counters"))
        except KubeError as exc:
            raise OrchestratorUnavailable(f"the store's ConfigMaps: {exc}", code="store_unreachable") from exc
        if found is None:
            self.mirror.forget(self.tables.state_name("counters"))
        counters_in(found)
        self.end_term()
        self.drafts.writer = secrets.token_hex(8)
        self.read()
        self._journal.load(self.mirror.objects)
        self._is_writing = True
        self.mirror.changed.update(self.mirror.of_people())
        self._news.set()

    @property
    def is_caught_up(self) -> bool:
        return self._is_caught_up

    @property
    def is_read(self) -> bool:
        return self.mirror.is_synced

    def end_term(self) -> None:
        self.writer.drop()
        self._is_writing = False
        self._barrier, self._is_caught_up = 0, False
        self._edition = self._journal_edition = -1
        self.drafts.clear()
        self._parts.clear()
        if self._journal_due is not None:
            self._journal_due.cancel()
            self._journal_due = None

    def history(
        self, *, kinds: Sequence[str] = (), subject: str | None = None, before: int | None = None, limit: int
    ) -> list[HistoryEntry]:
        if not self._is_writing and self._journal_edition != self.mirror.edition:
            self._journal.load(self.mirror.objects)
            self._journal_edition = self.mirror.edition
        return self._journal.find(kinds=kinds, subject=subject, before=before, limit=limit)

    def backup(self, path: Path) -> None:
        """A List for `kubectl apply -f`: adapters with what was found of them, aliases, policy and cordons."""
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError as exc:
            raise StoreError(f"backup {path}: {exc.strerror}; name a new file in a folder that can be written") from exc
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode({"apiVersion": "v1", "kind": "List", "items": self.drafts.copies()}))

    def close(self) -> None:
        self.end_term()

    # -- beside it ------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Keep the memory true, until cancelled."""
        await follow(
            self._kube,
            self._folder,
            label_selector=f"{FLEET}={self.fleet}",
            on_list=self.mirror.listed,
            on_event=self.mirror.event,
        )

    async def listed(self, within_s: float) -> bool:
        """Whether they were listed within this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self.mirror.is_synced:
                    await self.news()
        return self.mirror.is_synced

    async def news(self) -> None:
        """Until there is something that others did, and that may not have been looked at yet."""
        await self._news.wait()
        self._news.clear()

    def look_again(self) -> None:
        """`news` returns at once."""
        self._news.set()

    async def finish(self) -> None:
        """Write what may wait, the history too, if that is quick: the orderly end of a term."""
        if self._is_writing:
            self._write_the_journal()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FINISH_S):
                    await self.writer.done()

    def accept(self, table: str, key: str, name: str) -> None:
        """What is written under this key next comes from that object's text, which stays as it is."""
        found = self.mirror.objects[name]
        self.tables.homes[table, key] = name
        self.drafts.accepting[table, key] = AcceptedText(mark_of(text_of(found, kind_of(found))))
        self.drafts.said.pop(name, None)

    def accepted(self, table: str, key: str, name: str) -> None:
        """It is taken in; also where nothing of it was new, so that the object says so."""
        self.drafts.taken((table, key))
        self.drafts.lost.discard(name)
        self.say(name, "")
        self.writer.mark([WriteKey(1, table, key)])

    def refuse(self, table: str, key: str, *, had: str | None) -> None:
        """It is not taken in: `had` is the object that it stood in before, if in any."""
        self.drafts.accepting.pop((table, key), None)
        if had is None:
            self.tables.homes.pop((table, key), None)
        else:
            self.tables.homes[table, key] = had

    def say(self, name: str, status: str) -> None:
        """Have an object's status say this; "": the usual."""
        if status != self.drafts.said.get(name, ""):
            if status:
                self.drafts.said[name] = status
            else:
                self.drafts.said.pop(name, None)
            self.writer.mark([WriteKey(1, "status", name)], is_promised=False)

    def say_as_usual(self, table: str, key: str, name: str) -> None:
        """Have a row's object say again what it says while nothing is wrong."""
        self.say(name, "")
        self.writer.mark([WriteKey(1, table, key)], is_promised=False)

    def absorb(self, table: str, key: str, value: Any, name: str) -> None:
        """Somebody who led before us has written this: take it as it is."""
        if table in KINDS:
            self.tables.homes.setdefault((table, key), name)
        self.tables.apply([StoreChange(table, key, value)])  # type: ignore[arg-type]

    def take_back(self) -> None:
        """Somebody else wrote what we remember of deletions, or an older store was put back: what it says counts."""
        for shard in SHARDS:
            name = self.tables.state_name(f"adapters-{shard}")
            if name in self.mirror.changed:
                self.mirror.changed.discard(name)
                there = known_in(self.mirror.objects.get(name))
                kept = {lora_id: it for lora_id, it in self.tables.known.items() if shard_of(lora_id) != shard}
                self.tables.known = kept | there

    def make_again(self, table: str, key: str) -> None:
        """The object of this row is gone, and nobody deleted it."""
        self.drafts.unwritten.add((table, key))

    def lose(self, name: str) -> None:
        """The object is gone for good, and what it said is on its way out: do not make it again."""
        self.drafts.lost.add(name)

    def forget(self, lora_id: str) -> None:
        """It need not be remembered any more that this adapter was there."""
        if self.tables.known.pop(lora_id, None) is not None:
            self.writer.mark([WriteKey(2, "known", shard_of(lora_id))], is_promised=False)

    def is_pending(self, table: str, key: str) -> bool:
        return self.writer.is_pending(WriteKey(1, table, key))

    def is_leaving(self, name: str) -> bool:
        """Whether this very object is to be deleted, because what it says is."""
        return self.drafts.is_leaving(name)

    def remember(self, lora_id: str) -> None:
        """So that its deletion is noticed, even if no orchestrator is there to see it."""
        adapter, name = self.tables.adapters[lora_id], self.tables.home("adapters", lora_id)
        known = RememberedAdapter(name, uid_of(self.mirror.objects[name]), adapter.digest)
        if self.tables.known.get(lora_id) != known:
            self.tables.known[lora_id] = known
            self.writer.mark([WriteKey(2, "known", shard_of(lora_id))], is_promised=False)

    def _hear(self) -> None:
        """The watch or a list brought something."""
        name = self.tables.state_name("counters")
        # Our first write of the counters comes back by the watch, and after everything that was written before it;
        # not at that version, though, where the cluster was put back meanwhile.
        has_come = self.mirror.watched.get(name, 0) >= self._barrier or name in self.mirror.doubtful
        self._is_caught_up = self._is_caught_up or (self._barrier > 0 and has_come)
        self._news.set()

    def _stands(self, key: WriteKey) -> None:
        """It is written."""
        row = key.table, key.name
        if key.table in KINDS:
            self.drafts.stands(row)
        if key.table == "adapters" and key.name in self.tables.adapters:
            if self.tables.home(*row) in self.mirror.objects:
                self.remember(key.name)
        elif key.table == "counters" and not self._barrier:
            self._barrier = version_of(self.mirror.objects[self.tables.state_name("counters")])
            self._hear()

    def _prove(self, name: str) -> None:
        """What an object of our own state remembers proves deletions from here on: it is to say so."""
        prefix = self.tables.state_name("adapters-")
        if self._is_writing and name.startswith(prefix):
            self.writer.mark([WriteKey(2, "known", name.removeprefix(prefix))], is_promised=False)

    def _undo(self, key: WriteKey, error: OrchestratorError) -> None:
        """Take back a row whose write was refused: the row becomes what its object in the API server says.

        After a conflict the object is looked at at once, because somebody has changed it. After any other refusal it is
        looked at later, because the API server would refuse the same write again.
        """
        again_s = 0.0 if isinstance(error, StateConflict) else _AGAIN_S
        row = key.table, key.name
        self.drafts.accepting.pop(row, None)
        self.drafts.leaving.pop(row, None)
        if key.table in KINDS:
            self._undo_row(key.table, key.name, again_s)
        elif key.table == "tombstones":
            # No object goes whose deletion is not written down.
            for table, lora_id in [row for row in self.drafts.leaving if shard_of(row[1]) == key.name]:
                if table == "adapters":
                    self.drafts.leaving.pop((table, lora_id))
                    self._undo_row(table, lora_id, again_s)
        elif key.table in ("workers", "counters"):
            setattr(self.tables, key.table, getattr(read(self.mirror, self.fleet), key.table))
        else:  # nobody was promised that
            asyncio.get_running_loop().call_later(_AGAIN_S, self._try_again, key)
            return
        if not self._is_undone:
            self._is_undone = True
            asyncio.get_running_loop().call_soon(self.tell_undone)

    def _try_again(self, key: WriteKey) -> None:
        if self._is_writing:
            self.writer.mark([key], is_promised=False)

    def _undo_row(self, table: Any, key: str, again_s: float) -> None:
        name = self.tables.home(table, key)
        stands = row_of(self.mirror.record(name))
        is_there = stands is not None and stands[:2] == (table, key)
        changes = [StoreChange(table, key, stands[2] if stands is not None and is_there else None)]
        if table == "aliases":
            changes.append(StoreChange("rollouts", key, rollout_of(self.mirror.objects[name]) if is_there else None))
        self.tables.apply(changes)
        self._undone.add((table, key))
        self.drafts.unwritten.discard((table, key))
        if is_there:
            self.tables.homes[table, key] = name
        else:
            self.tables.homes.pop((table, key), None)
        asyncio.get_running_loop().call_later(again_s, self._doubt_again, name)

    def _doubt_again(self, name: str) -> None:
        if self._is_writing:
            self.mirror.changed.add(name)
            self._news.set()

    def tell_undone(self) -> None:
        """The store knows nothing any more of what was not to be."""
        if self._is_undone:
            self._is_undone = False
            self._undone.clear()
            self.on_undone()

    def _write_the_journal(self) -> None:
        if self._journal_due is not None:
            self._journal_due.cancel()
        self._journal_due = None
        parts, self._parts = self._parts, set()
        self.writer.mark([WriteKey(3, "history", part) for part in parts], is_promised=False)


def _keys(change: StoreChange) -> Iterable[WriteKey]:
    match change.table:
        case "adapters":
            yield WriteKey(1, "adapters", change.key)
            if change.value is None:
                yield WriteKey(0, "tombstones", shard_of(change.key))
        case "aliases" | "rollouts":
            yield WriteKey(1, "aliases", change.key)
        case "tombstones":
            yield WriteKey(0, "tombstones", shard_of(change.key))
        case "policy":
            yield WriteKey(1, "policy", "")
        case "workers":
            yield WriteKey(0, "workers", "")
        case "counters":
            yield WriteKey(0, "counters", "")
