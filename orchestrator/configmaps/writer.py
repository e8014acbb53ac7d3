"""Writes of objects to the API server, in order, and the callers that wait for them.

Level-driven: a changed key is marked dirty and written in its state of that time, so many changes of one object become
one PUT. Every write replaces exactly the version known here. After a conflict the object is read and rendered again,
or the write is given up. An update of an object that people have deleted writes nothing.
"""

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

import structlog

from lorafleet.kube.client import Json, KubeClient
from lorafleet.kube.errors import KubeConflict as Collision
from lorafleet.kube.errors import KubeError, KubeForbidden, KubeNotFound, KubeUnreachable
from lorafleet.service.loops import backoff_s
from orchestrator.configmaps.mirror import ConfigMapMirror
from orchestrator.configmaps.objects import KIND_OF_TABLE, name_of, without_managed_fields
from orchestrator.core.errors import OrchestratorError, OrchestratorUnavailable, StoreError
from orchestrator.store.tables import TOMBSTONES

log = structlog.get_logger()

AT_ONCE = 16
"""Writes in flight; a guess that leaves an API server of a small cluster room for others."""
_TRIES = 8
_PAUSE_S = (0.2, 2.0)
_BUSY = frozenset({429, 500, 502, 503, 504})
# An API server (1.36) that has just started forbids everything for a second or two, until it has read its Roles.
_STARTING_S = 5.0


class WriteKey(NamedTuple):
    """What a write is about: a row or state object of the store.

    order   lower first: a deletion is recorded before the object is deleted
    """

    order: int
    table: str
    name: str

    @property
    def is_of_people(self) -> bool:
        """Whether people write the object too, and may delete it."""
        return self.table in KIND_OF_TABLE or self.table == "status"


class RenderObject(Protocol):
    """Renders an object."""

    def __call__(self, key: WriteKey) -> "DesiredObject | None":
        """The object to write; None: unchanged. Raises OrchestratorError when it cannot be written now."""
        ...


class DesiredObject(NamedTuple):
    """An object to write; `body` None: the object with this uid is to be deleted."""

    name: str
    body: Json | None
    uid: str = ""


class _PendingWrite:
    """One `mark_dirty` call, which callers may wait for.

    left    keys that are not written yet
    errors  key -> why it was refused
    """

    def __init__(self, keys: Iterable[WriteKey]) -> None:
        self.keys = frozenset(keys)
        self.left = set(self.keys)
        self.errors: dict[WriteKey, OrchestratorError] = {}
        self.over = asyncio.Event()

    def errors_about(self, keys: Collection[WriteKey]) -> list[OrchestratorError]:
        """Errors of these keys, and of tombstones written with them."""
        return [error for key, error in self.errors.items() if key in keys or key.table == TOMBSTONES.name]

    def settle(self, key: WriteKey, error: OrchestratorError | None = None) -> None:
        """Record the result of one key; after the last key, wake the waiting callers."""
        if error is not None:
            self.errors[key] = error
        self.left.discard(key)
        if not self.left:
            self.over.set()


class ObjectWriter:
    """Writes dirty keys in a background task.

    render      renders the object of a key
    on_written  called after a successful write
    on_refused  called with the error when a write is given up
    """

    def __init__(
        self,
        kube: KubeClient,
        *,
        folder: str,
        mirror: ConfigMapMirror,
        render: RenderObject,
        on_written: Callable[[WriteKey], None],
        on_refused: Callable[[WriteKey, OrchestratorError], None],
        give_up_s: float = 30.0,
        call_s: float = 5.0,
        rng: random.Random | None = None,
    ) -> None:
        self._kube = kube
        self._folder = folder
        self._mirror = mirror
        self._render = render
        self._on_written = on_written
        self._on_refused = on_refused
        self._give_up_s = give_up_s
        self._call_s = call_s
        self._rng = rng or random.Random()
        self._dirty: dict[WriteKey, list[_PendingWrite]] = {}
        self._open: set[_PendingWrite] = set()
        self._work: asyncio.Task[None] | None = None
        self._gate = asyncio.Semaphore(AT_ONCE)

    def mark_dirty(self, keys: Iterable[WriteKey], *, is_promised: bool = True) -> None:
        """Queue writes of these keys, and start the background task. `is_promised`: `wait_durable` waits for them."""
        write = _PendingWrite(keys)
        for key in write.left:
            self._dirty.setdefault(key, []).append(write)
        if is_promised and write.left:
            self._open.add(write)
        if self._dirty and self._work is None:
            self._work = asyncio.create_task(self._write_all_dirty())

    def is_pending(self, key: WriteKey) -> bool:
        """Whether a promised write of the key is pending or in progress."""
        return any(key in write.left for write in self._open)

    async def wait_durable(self, keys: Collection[WriteKey] | None = None) -> None:
        """Wait until all promised writes of these keys (None: of all) are done.

        Raises the first of their errors.
        """
        waited_for = [write for write in self._open if keys is None or not write.keys.isdisjoint(keys)]
        for write in waited_for:
            await write.over.wait()
        for write in waited_for:
            for error in write.errors_about(write.keys if keys is None else keys):
                raise error

    async def wait_idle(self) -> None:
        """Wait until the background task has no key left to write."""
        while self._work is not None:
            await asyncio.wait([self._work])

    def drop_all(self) -> None:
        """Cancel the background task and give up all writes; waiting callers get OrchestratorUnavailable."""
        if self._work is not None:
            self._work.cancel()
            self._work = None
        self._dirty.clear()
        error = OrchestratorUnavailable(
            "this orchestrator does not lead any more; it may or may not be written", code="not_leading"
        )
        for write in list(self._open):
            write.errors |= dict.fromkeys(write.left, error)
            write.left.clear()
            write.over.set()
        self._open.clear()

    async def _write_all_dirty(self) -> None:
        """Write dirty keys until none is left: in their order, those of equal order together."""
        try:
            while self._dirty:
                batch, self._dirty = self._dirty, {}
                for order in sorted({key.order for key in batch}):
                    await asyncio.gather(
                        *(self._write_and_settle(key, batch[key]) for key in batch if key.order == order)
                    )
        finally:
            if self._work is asyncio.current_task():
                self._work = None

    async def _write_and_settle(self, key: WriteKey, pending: list[_PendingWrite]) -> None:
        """Write one key within `give_up_s` of its turn, and wake the callers that wait for it.

        Calls `on_written`, or `on_refused` for every failure, timeouts included. A failure is logged, not raised.
        """
        error: OrchestratorError | None = None
        try:
            async with self._gate, asyncio.timeout(self._give_up_s):
                await self._write_key(key)
        except OrchestratorError as exc:
            error = exc
        except TimeoutError:
            message = f"{key.table} {key.name!r} not written: no answer from the API server in {self._give_up_s:g} s"
            error = OrchestratorUnavailable(message, code="store_unreachable", retry_after_s=5.0)
        except Exception as exc:
            log.exception("not written", table=key.table, name=key.name)
            error = StoreError(f"{key.table} {key.name!r} not written: {exc!r}")
        try:
            if error is not None:
                log.warning("not written", table=key.table, name=key.name, error=str(error))
                self._on_refused(key, error)
            else:
                self._on_written(key)
        except Exception:  # the callers that wait, and the writes behind this one, go on
            log.exception("the result of a write is not recorded", table=key.table, name=key.name)
        for write in pending:
            write.settle(key, error)
            if write.over.is_set():
                self._open.discard(write)

    async def _write_key(self, key: WriteKey) -> None:
        """Write the object of a key, with retries after conflicts and passing errors. Raises OrchestratorError.

        An object that people have deleted is not written, but marked as doubtful.
        """
        collisions = failures = 0
        doubtful: str | None = None
        now = asyncio.get_running_loop().time
        forbidden_at = math.inf
        while True:
            desired: DesiredObject | None = None
            try:
                if doubtful is not None:
                    if await self.read_object(doubtful) is None:
                        if key.is_of_people and doubtful in self._mirror.objects:
                            self._mirror.add_doubt(doubtful)
                            return  # deleted by people: `ObjectEdits` decides what that means
                        self._mirror.forget(doubtful)
                    doubtful = None
                desired = self._render(key)
                if desired is not None:
                    await self._send_object(desired)
            except (Collision, KubeNotFound) as exc:
                assert desired is not None, "a read by name raises no conflict"
                collisions += 1
                if collisions >= _TRIES:
                    raise StoreError(f"ConfigMap {desired.name}: {exc}") from exc
                doubtful = desired.name
            except KubeError as exc:
                if isinstance(exc, KubeForbidden):
                    forbidden_at = min(forbidden_at, now())
                    may_pass = failures > 0 and now() - forbidden_at < _STARTING_S
                else:
                    may_pass = isinstance(exc, KubeUnreachable) or exc.status in _BUSY
                if not may_pass:
                    raise _store_error(exc) from exc
                failures += 1
                await asyncio.sleep(max(backoff_s(failures, *_PAUSE_S, self._rng), exc.retry_after_s or 0.0))
            else:
                return

    async def _send_object(self, desired: DesiredObject) -> None:
        """Delete, create or replace the object in the API server, and update the mirror. Raises KubeError.

        An unchanged object is not written.
        """
        known = self._mirror.objects.get(desired.name)
        path = f"{self._folder}/{desired.name}"
        if desired.body is None:
            options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": desired.uid}}
            with contextlib.suppress(KubeNotFound):
                await self._kube.delete(path, options, timeout_s=self._call_s)
            self._mirror.forget(desired.name, desired.uid)
        elif desired.body != known:
            with self._mirror.writing(desired.name, desired.body):
                if known is None:
                    found = await self._kube.post(self._folder, desired.body, timeout_s=self._call_s)
                else:
                    found = await self._kube.put(path, desired.body, timeout_s=self._call_s)
            self._mirror.record_object(found)

    async def read_object(self, name: str) -> Json | None:
        """Read the object into the mirror and return it; None when there is none. Raises KubeError.

        An object that differs from the mirror's is marked as changed.
        """
        try:
            found = await self._kube.get(f"{self._folder}/{name}", timeout_s=self._call_s)
        except KubeNotFound:
            return None
        self._mirror.note_owners(found)
        if without_managed_fields(found) != self._mirror.objects.get(name_of(found)):
            self._mirror.changed.add(name)
        self._mirror.record_object(found)
        return found


def _store_error(exc: KubeError) -> StoreError:
    """The store's error for a refusal of the API server; after a 403 it names the permissions needed."""
    if isinstance(exc, KubeForbidden):
        return StoreError(f"{exc}; the Role needs get, list, watch, create, update and delete on configmaps")
    return StoreError(str(exc))
