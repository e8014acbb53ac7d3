"""What others write into our ConfigMaps becomes intent, as if they had said it over REST; or they are told why not.

Level-driven: an object is looked at whenever it changed, and as long as it is refused, whenever anything else did.
So objects may be applied in any order: an alias waits for its adapters.

A deletion is explicit or it is none. It counts when the API server, asked by name, says that there is no such object,
and either the watch showed its end, or a ConfigMap of our own in the same store remembers it with the uid it had. A
ConfigMap of our own that was itself lost, or made again since the last list, proves no deletion.
What only vanished changes nothing: a label, an empty list, a store that was put back and brings its own memory.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from lorafleet.kube.client import Json
from lorafleet.kube.errors import KubeError
from orchestrator.configmaps.backend import ConfigMapBackend
from orchestrator.configmaps.events import KubeEvents, reason_of
from orchestrator.configmaps.mirror import DoubtReason
from orchestrator.configmaps.objects import (
    FLEET,
    KIND,
    MODELS,
    STATUS,
    NamedAlias,
    age_of,
    annotation,
    declared,
    kind_of,
    mark_of,
    rollout_of,
    text_of,
    uid_of,
)
from orchestrator.configmaps.tables import row_of, shard_of
from orchestrator.core.errors import OrchestratorError, OrchestratorRequestError, StateConflict
from orchestrator.core.state import RegisteredAdapter
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.store.backend import StoreChange
from orchestrator.store.store import IntentStore
from orchestrator.wire import AdapterSpec

log = structlog.get_logger()

ACTOR = "configmap"
_GATHER_S = 0.05  # an apply of many objects is looked at in few rounds
_AGAIN_S = 1.0  # until what could not be asked for is asked for again
_AT_ONCE = 16
_REFUSED = "refused: "
_TABLES = {"adapter": "adapters", "alias": "aliases", "policy": "policy"}


class ObjectEdits:
    """Looks at what changed, while we lead. `on_taken`: intent is another now."""

    def __init__(
        self,
        backend: ConfigMapBackend,
        store: IntentStore,
        registry: AdapterRegistry,
        notices: KubeEvents,
        *,
        is_leading: Callable[[], bool],
        on_taken: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._mirror = backend.mirror
        self._store = store
        self._registry = registry
        self._notices = notices
        self._is_leading = is_leading
        self._on_taken = on_taken
        self._refused: set[str] = set()
        self._deleted: set[str] = set()  # lora_ids whose objects are gone, and which something still holds here
        self._epoch = self._writes = 0
        self._read: dict[str, tuple[Json, Any]] = {}  # object -> what it said when it was last refused

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            # What is refused may do now, and what could not be asked for may answer.
            is_waiting = self._refused or self._deleted or self._mirror.doubtful
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S if is_waiting else None):
                    await self._backend.news()
            await asyncio.sleep(_GATHER_S)
            try:
                await self.turn()
            except Exception:  # the top of a loop: it logs and goes on
                log.exception("objects not taken in")

    async def turn(self) -> None:
        """One look at all that changed; before the first one of a term nothing is decided."""
        if not self._is_leading() or not self._backend.is_caught_up:
            return
        if self._epoch != self._store.epoch:
            self._begin()
        missing = await self._missing()
        if not self._is_leading():
            return
        self._backend.tell_undone()
        self._backend.take_back()
        before = self._store.writes
        self._end(missing)
        names, self._mirror.changed = self._mirror.changed, set()
        if self._writes != before or self._deleted:
            names |= self._refused  # also what says the same as one that was deleted, as when an object is renamed
        self._writes = before
        for name in sorted(names & self._mirror.objects.keys(), key=self._order):
            self._look_at(name)
        for lora_id in sorted(self._deleted):
            if self._backend.tables.homes.get(("adapters", lora_id)) in self._mirror.objects:
                self._deleted.discard(lora_id)
            else:
                self._delete(lora_id)
        if self._store.writes != before:
            self._on_taken()
            self._backend.look_again()

    def _begin(self) -> None:
        """A term: everything is looked at once, and what was there when somebody last led is looked for."""
        self._epoch = self._store.epoch
        self._refused.clear()
        self._deleted.clear()
        for lora_id, known in self._backend.tables.known.items():
            found = self._mirror.objects.get(known.object_name)
            if found is None or (uid_of(found) != known.uid and lora_id not in self._store.adapters):
                self._mirror.doubtful.setdefault(known.object_name, DoubtReason.MISSING)

    def _order(self, name: str) -> tuple[int, tuple[str, str]]:
        """Adapters before the aliases that point at them; then the oldest first."""
        found = self._mirror.objects[name]
        return kind_of(found) == "alias", age_of(found)

    # -- what is there --------------------------------------------------------------------------------------------

    def _look_at(self, name: str) -> None:
        found = self._mirror.objects[name]
        kind = kind_of(found)
        table = _TABLES.get(kind)
        if table is None:
            if kind not in ("state", ""):
                message = f"label {KIND} is {kind!r}, expected adapter, alias or policy"
                self._notices.warn(found, "UnknownKind", message)
            return
        if (found["metadata"].get("labels") or {}).get(FLEET) != self._backend.fleet:
            return  # lost its label: what it said stays, and `_missing` has told so
        if self._backend.is_leaving(name):
            return  # the object goes in a moment, and an edit of it with it
        record = self._mirror.record(name)
        row = row_of(record)
        if row is not None and record is not None:
            is_as_accepted = record.of == mark_of(text_of(found, kind))
            self._absorb(name, *row)
            if is_as_accepted and self._stands_in(name, *row[:2]):
                self._refused.discard(name)
                if annotation(found, STATUS).startswith(_REFUSED):  # an edit that was taken back
                    self._backend.accepted(*row[:2], name)
                return
        self._take(name, found, kind, table)

    def _stands_in(self, name: str, table: str, key: str) -> bool:
        return self._backend.tables.homes.get((table, key)) == name

    def _absorb(self, name: str, table: Any, key: str, value: Any) -> None:
        """What another orchestrator accepted while it led, or what stood there before a store was put back."""
        backend = self._backend
        known, home = getattr(backend.tables, table).get(key), backend.tables.homes.get((table, key))
        if home not in (None, name) or backend.is_pending(table, key):
            return
        if table == "adapters" and known is not None:
            value = _with_what_was_found(value, known)
        if value != known:
            backend.absorb(table, key, value, name)
            self._store.absorb(StoreChange(table, key, value))
            log.info("taken over", object=name, table=table, key=key)
            if table == "aliases" and (rollout := rollout_of(self._mirror.objects[name])) is not None:
                backend.absorb("rollouts", key, rollout, name)
                self._store.absorb(StoreChange("rollouts", key, rollout))
        if table == "adapters":
            backend.remember(key)

    def _take(self, name: str, found: Json, kind: str, table: str) -> None:
        key, had = "", None
        try:
            key, write = self._asked(name, found, kind)
            had = self._backend.tables.homes.get((table, key))
            if had is not None and had != name and had in self._mirror.objects:
                what = f"{kind} {key!r}" if key else kind
                raise StateConflict(
                    f"{what} stands in ConfigMap {had!r} already; delete one of them", code="name_taken"
                )
            self._backend.accept(table, key, name)
            write()
        except OrchestratorError as exc:
            if key or kind == "policy":
                self._backend.refuse(table, key, had=had)
            self._refuse(name, found, exc)
        else:
            self._refused.discard(name)
            self._read.pop(name, None)
            self._backend.accepted(table, key, name)

    def _asked(self, name: str, found: Json, kind: str) -> tuple[str, Callable[[], object]]:
        """Its key, and what to do for it. Raises OrchestratorRequestError."""
        said = self._said(name, found, kind)
        if isinstance(said, OrchestratorError):
            raise said
        if isinstance(said, AdapterSpec):
            return said.lora_id, lambda: self._registry.apply_spec(said, ACTOR)
        if isinstance(said, NamedAlias):
            return said.name, lambda: self._registry.put_alias(said.name, said, ACTOR)
        return "", lambda: self._registry.put_policy(said, "*", ACTOR)

    def _said(self, name: str, found: Json, kind: str) -> Any:
        """What it says, or the error that it is; parsed once, however often it is refused."""
        known = self._read.get(name)
        if known is None or known[0] is not found:
            try:
                known = found, declared(found, kind, MODELS[kind])
            except OrchestratorRequestError as exc:
                known = found, exc
            self._read[name] = known
        return known[1]

    def _refuse(self, name: str, found: Json, exc: OrchestratorError) -> None:
        self._refused.add(name)
        row = row_of(self._mirror.record(name))
        stays = "" if row is None or not self._stands_in(name, *row[:2]) else "; it stays as it was accepted before"
        self._backend.say(name, f"{_REFUSED}{exc}{stays}")
        self._notices.warn(found, reason_of(exc.code), f"{exc}{stays}")

    # -- what is not there any more -------------------------------------------------------------------------------

    async def _missing(self) -> list[str]:
        """Ask for every doubtful object by name; returns those of which there is none."""
        gate, missing = asyncio.Semaphore(_AT_ONCE), []

        async def ask(name: str) -> None:
            async with gate:
                try:
                    found = await self._backend.writer.look(name)
                except KubeError as exc:
                    log.info("object not asked for", object=name, error=str(exc))
                    return
            if found is None:
                missing.append(name)
            elif (found["metadata"].get("labels") or {}).get(FLEET) != self._backend.fleet:
                message = f"the label {FLEET} is gone; nothing is deleted by that: delete the ConfigMap if it should be"
                self._notices.warn(found, "LabelRemoved", message)

        await asyncio.gather(*map(ask, list(self._mirror.doubtful)))
        return missing

    def _end(self, missing: list[str]) -> None:
        """These were not there when they were asked for by name.

        An object leaves the mirror and what it said is on its way out in one step: a write in between would make the
        object again.
        """
        if not missing:
            return
        # An adapter that is remembered and gone was deleted. Where the memory has vanished as well, or was made again
        # since, the store may have lost both, and nobody deleted anything. So the memory is looked at first.
        mirror, tables = self._mirror, self._backend.tables
        for name in missing:
            found, doubt = mirror.objects.get(name), mirror.doubtful.get(name)
            if found is not None and kind_of(found) == "state" and doubt in {DoubtReason.MISSING, DoubtReason.DELETED}:
                mirror.forget(name)
        homes = {home: row for row, home in tables.homes.items()}
        remembered = {known.object_name: lora_id for lora_id, known in tables.known.items()}
        for name in missing:
            doubt, lora_id = mirror.doubtful.get(name), remembered.get(name)
            if doubt is None or (doubt is DoubtReason.ASKED and self._is_followed(name)):
                continue  # it is there after all, or the watch will tell how it went
            memory = "" if lora_id is None else tables.state_name(f"adapters-{shard_of(lora_id)}")
            if memory in mirror.doubtful:
                continue  # the memory could not be asked for yet
            is_explicit = doubt is DoubtReason.DELETED or (lora_id is not None and memory not in mirror.unproven)
            mirror.forget(name)
            self._refused.discard(name)
            self._read.pop(name, None)
            if lora_id is not None and lora_id not in self._store.adapters:
                self._bury(lora_id) if is_explicit else self._backend.forget(lora_id)
            elif name in homes:
                is_explicit &= doubt is DoubtReason.DELETED or lora_id == homes[name][1]
                self._end_row(*homes[name], name, is_explicit=is_explicit)

    def _is_followed(self, name: str) -> bool:
        """Whether the watch, or the next list, tells of the object's end; not where its label is gone."""
        found = self._mirror.objects.get(name)
        return found is not None and (found["metadata"].get("labels") or {}).get(FLEET) == self._backend.fleet

    def _end_row(self, table: str, key: str, name: str, *, is_explicit: bool) -> None:
        if table == "policy" or not is_explicit:
            log.warning("object gone, and made again: nobody was seen to delete it", object=name)
            self._backend.make_again(table, key)
            self._backend.accepted(table, key, name)
        elif table == "adapters":
            self._backend.lose(name)
            self._deleted.add(key)
        else:
            self._registry.delete_alias(key, ACTOR)

    def _bury(self, lora_id: str) -> None:
        """Deleted while nobody led: whoever holds it gives it up."""
        digest = self._backend.tables.known[lora_id].digest
        log.info("deleted while nobody led", lora_id=lora_id)
        self._store.record_deletion(lora_id, digest, ACTOR)
        self._backend.forget(lora_id)

    def _delete(self, lora_id: str) -> None:
        """As DELETE does it; what an alias points at waits until it does not."""
        adapter = self._store.adapters.get(lora_id)
        if adapter is None or adapter.is_deleting:
            self._deleted.discard(lora_id)
            return
        try:
            self._registry.delete_adapter(lora_id, ACTOR)
        except OrchestratorError as exc:
            for alias in (
                name for name, targets in self._store.aliases.items() if any(t[0] == lora_id for t in targets)
            ):
                home = self._backend.tables.homes.get(("aliases", alias))
                if home is not None and (found := self._mirror.objects.get(home)) is not None:
                    self._notices.warn(found, "TargetDeleted", f"the ConfigMap of its target is deleted: {exc}")
        else:
            self._deleted.discard(lora_id)


def _with_what_was_found(value: RegisteredAdapter, known: RegisteredAdapter) -> RegisteredAdapter:
    """What was found of its bytes stays found."""
    if value.digest is not None or known.digest is None or (value.source != known.source):
        return value
    return replace(
        value,
        digest=known.digest,
        rank=known.rank,
        size_bytes=known.size_bytes,
        base_model=known.base_model,
        pinned_source=known.pinned_source,
    )
