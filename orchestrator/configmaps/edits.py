"""Object edits: what people write into ConfigMaps becomes intent, as if sent over REST, or is refused with an Event.

Level-driven: an object is checked when it changes and, while it is refused, when any other object changes. So objects
may be applied in any order: an alias waits for its adapters.

Only an explicit deletion deletes. It counts when the API server, asked by name, has no such object and either the
watch showed its deletion or a state ConfigMap of ours remembers the object with its uid. A state ConfigMap that was
lost, or created since the last list, proves no deletion. A removed label, an empty list or a restored cluster deletes
nothing.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import structlog

from lorafleet.kube.client import Json
from lorafleet.kube.errors import KubeError
from orchestrator.configmaps.backend import Acceptance, ConfigMapBackend
from orchestrator.configmaps.events import KubeEvents, reason_of
from orchestrator.configmaps.mirror import DoubtReason
from orchestrator.configmaps.objects import (
    FLEET,
    KIND,
    STATUS,
    TABLE_OF_KIND,
    Record,
    age_order,
    annotation,
    kind_of,
    parse_declared,
    text_mark,
    text_of,
    uid_of,
)
from orchestrator.configmaps.tables import KNOWN, row_shard
from orchestrator.core.errors import OrchestratorError, OrchestratorRequestError, StateConflict
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.model.adapters import AdapterSpec, RegisteredAdapter
from orchestrator.model.served_names import NamedAlias
from orchestrator.store.store import IntentStore
from orchestrator.store.tables import ADAPTERS, NAMES, POLICY, TABLES, StoreChange

log = structlog.get_logger()

ACTOR = "configmap"
_GATHER_S = 0.05  # so that an apply of many objects takes few rounds
_AGAIN_S = 1.0  # until a failed read is repeated
_AT_ONCE = 16
_REFUSED = "refused: "


class ObjectEdits:
    """Applies changed objects to the intent while we lead. `on_changed`: called when the intent has changed."""

    def __init__(
        self,
        backend: ConfigMapBackend,
        store: IntentStore,
        registry: AdapterRegistry,
        events: KubeEvents,
        *,
        is_leading: Callable[[], bool],
        on_changed: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._mirror = backend.mirror
        self._store = store
        self._registry = registry
        self._events = events
        self._is_leading = is_leading
        self._on_changed = on_changed
        self._refused: set[str] = set()
        self._deleted: set[str] = set()  # lora_ids whose objects are deleted, while an alias keeps the adapter
        self._epoch = self._writes = 0
        self._read: dict[str, tuple[Json, Any]] = {}  # object -> its parsed text, or the error

    async def run(self) -> None:
        """Apply edits whenever objects change, until cancelled. Errors are logged.

        While objects are refused, deleted or doubtful, edits are also applied at intervals.
        """
        while True:
            # Refused objects may be acceptable now, and failed reads may succeed.
            is_waiting = self._refused or self._deleted or self._mirror.doubtful
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S if is_waiting else None):
                    await self._backend.wait_for_changes()
            await asyncio.sleep(_GATHER_S)
            try:
                await self.apply_edits()
            except Exception:  # the top of a loop: it logs and goes on
                log.exception("object edits not applied")

    async def apply_edits(self) -> None:
        """Apply all changed objects once, and end the rows of deleted ones. Only while we lead and are caught up.

        Reads doubtful objects first. Refused ones are tried again if intent has changed. Calls `on_changed` after a
        write.
        """
        if not self._is_leading() or not self._backend.is_caught_up:
            return
        if self._epoch != self._store.epoch:
            self._begin_term()
        missing = await self._confirmed_missing()
        if not self._is_leading():
            return
        self._backend.report_undone()
        self._backend.reload_remembered()
        before = self._store.writes
        self._resolve_missing(missing)
        names, self._mirror.changed = self._mirror.changed, set()
        if self._writes != before or self._deleted:
            names |= self._refused  # e.g. an object that was renamed: the old one held its name
        self._writes = before
        for name in sorted(names & self._mirror.objects.keys(), key=self._apply_order):
            self._apply_or_refuse(name)
        for lora_id in sorted(self._deleted):
            if self._backend.tables.object_names.get((ADAPTERS.name, lora_id)) in self._mirror.objects:
                self._deleted.discard(lora_id)
            else:
                self._delete_adapter(lora_id)
        if self._store.writes != before:
            self._on_changed()
            self._backend.request_check()

    def _begin_term(self) -> None:
        """Begin a term: take the store's epoch, forget refusals and deletions, and doubt remembered objects.

        An object is in doubt where it is missing, or replaced while its adapter is not registered.
        """
        self._epoch = self._store.epoch
        self._refused.clear()
        self._deleted.clear()
        for lora_id, known in self._backend.tables.rows.of(KNOWN).items():
            found = self._mirror.objects.get(known.object_name)
            if found is None or (uid_of(found) != known.uid and lora_id not in self._store.adapters):
                self._mirror.doubtful.setdefault(known.object_name, DoubtReason.MISSING)

    def _apply_order(self, name: str) -> tuple[int, tuple[str, str]]:
        """Sort key of an object to apply: adapters before aliases, then the oldest first."""
        found = self._mirror.objects[name]
        return kind_of(found) == "alias", age_order(found)

    # -- present objects --------------------------------------------------------------------------------------------

    def _apply_or_refuse(self, name: str) -> None:
        """Check one object; one that cannot be read, or that a fault of ours stops, never holds up the others."""
        try:
            self._apply_object(name)
        except OrchestratorError as exc:
            self._refuse_edit(name, self._mirror.objects[name], exc)
        except Exception:
            log.exception("object not checked", object=name)
            self._refused.add(name)  # checked again when any other object changes

    def _apply_object(self, name: str) -> None:
        """Check one object: take over its accepted row, and accept its text unless it is the accepted one.

        Objects without our label or about to be deleted are left alone. One of an unknown kind gets an Event. Raises
        OrchestratorError for a text to be refused, or annotations that cannot be read.
        """
        found = self._mirror.objects[name]
        kind = kind_of(found)
        if kind not in TABLE_OF_KIND:
            if kind not in ("state", ""):
                message = f"label {KIND} is {kind!r}, expected adapter, alias or policy"
                self._events.warn(found, "UnknownKind", message)
            return
        if (found["metadata"].get("labels") or {}).get(FLEET) != self._backend.fleet:
            return  # without its label: the row stays, and `_confirmed_missing` has sent an Event
        if self._backend.will_delete_object(name):
            return  # the object is about to be deleted, with any edit of it
        record = self._mirror.accepted_record(name)
        if record is not None:
            self._adopt_accepted(name, record)
            # While another text's record is to be written, the one before it is a new edit.
            is_written = self._backend.acceptance(*record.subject).text is None
            is_as_accepted = is_written and record.of == text_mark(text_of(found, kind))
            if is_as_accepted and self._is_object_of_row(name, record):
                self._refused.discard(name)
                if annotation(found, STATUS).startswith(_REFUSED):  # an edit that was taken back
                    self._backend.finish_acceptance(*record.subject, name)
                return
        self._accept_edit(name, found, kind)

    def _is_object_of_row(self, name: str, record: Record[Any]) -> bool:
        """Whether the tables name this object as that of the record's row."""
        return self._backend.tables.object_names.get(record.subject) == name

    def _adopt_accepted(self, name: str, record: Record[Any]) -> None:
        """Take over a row that another leader accepted, or that a restored cluster holds, and remember the adapter.

        Logged. Does nothing if another object has the row, or a write of ours is pending.
        """
        backend, (table, key), value = self._backend, record.subject, record.row
        known = backend.tables.rows.of(TABLES[table]).get(key)
        home = backend.tables.object_names.get(record.subject)
        if home not in (None, name) or backend.is_pending(table, key):
            return
        if table == ADAPTERS.name and known is not None:
            value = _keep_inspection(value, known)
        if value != known:
            backend.absorb(table, key, value, name)
            self._store.absorb(StoreChange(table, key, value))
            log.info("row taken over", object=name, table=table, key=key)
        if table == ADAPTERS.name:
            backend.record_adapter_object(key)

    def _accept_edit(self, name: str, found: Json, kind: str) -> None:
        """Apply the object's text to the intent. Raises OrchestratorError for a text that is to be refused.

        A text that is accepted already is not applied over what REST has asked for since.
        """
        table, key, former = TABLE_OF_KIND[kind].name, "", Acceptance(None, None)
        try:
            key, write = self._edit_of(name, found, kind)
            former = self._backend.acceptance(table, key)
            self._require_own_row(name, kind, key, former)
            if not self._backend.is_accepted_text(table, key, name):
                self._backend.begin_acceptance(table, key, name)
                write()
        except Exception:  # raised again: the text would pass for accepted the next time
            if key or kind == "policy":
                self._backend.cancel_acceptance(table, key, former)
            raise
        self._refused.discard(name)
        self._read.pop(name, None)
        self._backend.finish_acceptance(table, key, name)

    def _require_own_row(self, name: str, kind: str, key: str, former: Acceptance) -> None:
        """Raises StateConflict if another object has the row."""
        if former.name not in (None, name) and former.name in self._mirror.objects:
            row_label = f"{kind} {key!r}" if key else kind
            raise StateConflict(
                f"{row_label} stands in ConfigMap {former.name!r} already; delete one of them", code="name_taken"
            )

    def _edit_of(self, name: str, found: Json, kind: str) -> tuple[str, Callable[[], object]]:
        """The row's key, and the function that applies the edit. Raises OrchestratorRequestError."""
        parsed = self._parsed_object(name, found, kind)
        if isinstance(parsed, OrchestratorError):
            raise parsed
        if isinstance(parsed, AdapterSpec):
            return parsed.lora_id, lambda: self._registry.apply_spec(parsed, ACTOR)
        if isinstance(parsed, NamedAlias):
            return parsed.name, lambda: self._registry.put_alias(parsed.name, parsed, ACTOR)
        return "", lambda: self._registry.put_policy(parsed, "*", ACTOR)

    def _parsed_object(self, name: str, found: Json, kind: str) -> Any:
        """The object's parsed text, or the error of parsing it; kept per version of the object."""
        known = self._read.get(name)
        if known is None or known[0] is not found:
            try:
                known = found, parse_declared(found, kind)
            except OrchestratorRequestError as exc:
                known = found, exc
            self._read[name] = known
        return known[1]

    def _refuse_edit(self, name: str, found: Json, exc: OrchestratorError) -> None:
        """Set the object's status to the refusal and queue an Event; the object is checked again later."""
        self._refused.add(name)
        record = self._mirror.accepted_record(name)
        is_kept = record is not None and self._is_object_of_row(name, record)
        stays = "; it stays as it was accepted before" if is_kept else ""
        self._backend.set_status(name, f"{_REFUSED}{exc}{stays}")
        self._events.warn(found, reason_of(exc.code), f"{exc}{stays}")

    # -- missing objects -------------------------------------------------------------------------------

    async def _confirmed_missing(self) -> list[str]:
        """Read every doubtful object by name, which updates the mirror; returns the names that do not exist.

        An object without its label gets an Event.
        """
        gate, missing = asyncio.Semaphore(_AT_ONCE), []

        async def ask(name: str) -> None:
            """Read the object by name: a missing one goes to `missing`, one without our label gets a warning Event."""
            async with gate:
                try:
                    found = await self._backend.writer.read_object(name)
                except KubeError as exc:
                    log.info("object not read", object=name, error=str(exc))
                    return
            if found is None:
                missing.append(name)
            elif (found["metadata"].get("labels") or {}).get(FLEET) != self._backend.fleet:
                message = f"the label {FLEET} is gone; nothing is deleted by that: delete the ConfigMap if it should be"
                self._events.warn(found, "LabelRemoved", message)

        await asyncio.gather(*map(ask, list(self._mirror.doubtful)))
        return missing

    def _resolve_missing(self, object_names: list[str]) -> None:
        """Handle objects that do not exist: delete their rows, or create the objects again.

        Mirror and row change in one step, as a write in between would create the object again. Objects that exist after
        all, or whose remembering object is unread, are left for later.
        """
        if not object_names:
            return
        # A remembered adapter that is gone was deleted. If the remembering object is gone too, or is new, both may have
        # been lost without a deletion. So the remembering objects are checked first.
        mirror, tables = self._mirror, self._backend.tables
        for name in object_names:
            found, doubt = mirror.objects.get(name), mirror.doubtful.get(name)
            if found is not None and kind_of(found) == "state" and doubt in {DoubtReason.MISSING, DoubtReason.DELETED}:
                mirror.forget(name)
        homes = {home: row for row, home in tables.object_names.items()}
        remembered = {known.object_name: lora_id for lora_id, known in tables.rows.of(KNOWN).items()}
        for name in object_names:
            doubt, lora_id = mirror.doubtful.get(name), remembered.get(name)
            if doubt is None or (doubt is DoubtReason.ASKED and self._is_followed(name)):
                continue  # it exists after all, or the watch will show its deletion
            memory = "" if lora_id is None else tables.state_name(KNOWN.name, row_shard(KNOWN.name, lora_id))
            if memory in mirror.doubtful:
                continue  # the remembering object could not be read yet
            is_explicit = doubt is DoubtReason.DELETED or (lora_id is not None and memory not in mirror.unproven)
            is_ours = self._backend.will_delete_object(name)
            mirror.forget(name)
            self._refused.discard(name)
            self._read.pop(name, None)
            if lora_id is not None and lora_id not in self._store.adapters:
                self._record_missed_deletion(lora_id) if is_explicit else self._backend.forget_adapter_object(lora_id)
            elif name in homes and not is_ours:  # ours: the row was registered again meanwhile, and is to be written
                is_explicit &= doubt is DoubtReason.DELETED or lora_id == homes[name][1]
                self._end_row(*homes[name], name, is_explicit=is_explicit)

    def _is_followed(self, name: str) -> bool:
        """Whether the object has its label, so that watch and list show its deletion."""
        found = self._mirror.objects.get(name)
        return found is not None and (found["metadata"].get("labels") or {}).get(FLEET) == self._backend.fleet

    def _end_row(self, table: str, key: str, name: str, *, is_explicit: bool) -> None:
        """Handle a row whose object is gone: delete it after an explicit deletion, else create the object again.

        Logged.
        """
        if table == POLICY.name or not is_explicit or self._store.publication_of(key) is not None:
            log.warning("object gone without a deletion, created again", object=name)
            self._backend.recreate_object(table, key)
            self._backend.finish_acceptance(table, key, name)
        elif table == ADAPTERS.name:
            self._backend.mark_lost(name)
            self._deleted.add(key)
        else:
            self._registry.delete_alias(key, ACTOR)

    def _record_missed_deletion(self, lora_id: str) -> None:
        """Record, and log, the deletion of an adapter whose object was deleted while no orchestrator led; forget it."""
        digest = self._backend.tables.rows.of(KNOWN)[lora_id].digest
        log.info("adapter was deleted while no orchestrator led", lora_id=lora_id)
        self._store.record_deletion(lora_id, digest, ACTOR)
        self._backend.forget_adapter_object(lora_id)

    def _delete_adapter(self, lora_id: str) -> None:
        """Delete the adapter as the REST route does, unless an alias targets it: then the alias gets an Event.

        That deletion is tried again later. One that is done is forgotten.
        """
        adapter = self._store.adapters.get(lora_id)
        if adapter is None or adapter.is_deleting:
            self._deleted.discard(lora_id)
            return
        try:
            self._registry.delete_adapter(lora_id, ACTOR)
        except OrchestratorError as exc:
            for alias, name in self._store.names.items():
                if all(target.lora_id != lora_id for target in name.targets):
                    continue
                home = self._backend.tables.object_names.get((NAMES.name, alias))
                if home is not None and (found := self._mirror.objects.get(home)) is not None:
                    self._events.warn(found, "TargetDeleted", f"the ConfigMap of its target is deleted: {exc}")
        else:
            self._deleted.discard(lora_id)


def _keep_inspection(value: RegisteredAdapter, known: RegisteredAdapter) -> RegisteredAdapter:
    """`value` with the inspection results of the registered adapter, where the source is the same."""
    if value.digest is not None or known.digest is None or (value.source != known.source):
        return value
    return value.with_inspection_of(known)
