"""Changes on their way to the API server: what is to be written, in which order, and who waits for it.

Level-driven: a key that changed is marked, and written as it is by then, so many changes of one object are one PUT.
Every write replaces exactly the version that is known here. Where somebody else wrote in between, theirs is read, and
ours is made anew from it, or given up. An update of an object that people have deleted writes nothing.
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
from orchestrator.configmaps.objects import lean, name_of
from orchestrator.core.errors import OrchestratorError, OrchestratorUnavailable, StoreError

log = structlog.get_logger()

AT_ONCE = 16
"""Writes in flight; a guess that leaves an API server of a small cluster room for others."""
_TRIES = 8
_PAUSE_S = (0.2, 2.0)
_BUSY = frozenset({429, 500, 502, 503, 504})
# A server that was away and has just started forbids everything until it has read its Roles: 1.36 for a second or two.
_STARTING_S = 5.0


class WriteKey(NamedTuple):
    """Something that is written: a thing of the store, by what it is in there.

    order   what others rely on goes first: a deletion is written down before its object goes
    """

    order: int
    table: str
    name: str

    @property
    def is_of_people(self) -> bool:
        """Whether people write its object too, and may delete it."""
        return self.table in ("adapters", "aliases", "policy", "status")


class RenderObject(Protocol):
    """What an object is to be."""

    def __call__(self, key: WriteKey) -> "DesiredObject | None":
        """None: as it is. Raises OrchestratorError when it cannot be written as things are."""
        ...


class DesiredObject(NamedTuple):
    """An object as it is to be; `body` None: the one with this uid is not to be there."""

    name: str
    body: Json | None
    uid: str = ""


class _PendingWrite:
    """One write of these keys, which somebody may wait for. `errors`: of those that were not to be."""

    def __init__(self, keys: Iterable[WriteKey]) -> None:
        self.keys = frozenset(keys)
        self.left = set(self.keys)
        self.errors: dict[WriteKey, OrchestratorError] = {}
        self.over = asyncio.Event()

    def errors_about(self, keys: Collection[WriteKey]) -> list[OrchestratorError]:
        """Of these, and of the deletions that were written with them."""
        return [error for key, error in self.errors.items() if key in keys or key.table == "tombstones"]

    def settle(self, key: WriteKey, error: OrchestratorError | None = None) -> None:
        if error is not None:
            self.errors[key] = error
        self.left.discard(key)
        if not self.left:
            self.over.set()


class ObjectWriter:
    """Writes until `drop`.

    make        says what an object is to be
    on_written  hears of what stands as it was wished
    on_refused  hears of what is given up, and why
    """

    def __init__(
        self,
        kube: KubeClient,
        *,
        folder: str,
        mirror: ConfigMapMirror,
        make: RenderObject,
        on_written: Callable[[WriteKey], None],
        on_refused: Callable[[WriteKey, OrchestratorError], None],
        give_up_s: float = 30.0,
        call_s: float = 5.0,
        rng: random.Random | None = None,
    ) -> None:
        self._kube = kube
        self._folder = folder
        self._mirror = mirror
        self._make = make
        self._on_written = on_written
        self._on_refused = on_refused
        self._give_up_s = give_up_s
        self._call_s = call_s
        self._rng = rng or random.Random()
        self._dirty: dict[WriteKey, list[_PendingWrite]] = {}
        self._open: set[_PendingWrite] = set()
        self._work: asyncio.Task[None] | None = None
        self._gate = asyncio.Semaphore(AT_ONCE)

    def mark(self, keys: Iterable[WriteKey], *, is_promised: bool = True) -> None:
        """These are to be written. `is_promised`: `saved` waits for them."""
        ticket = _PendingWrite(keys)
        for key in ticket.left:
            self._dirty.setdefault(key, []).append(ticket)
        if is_promised and ticket.left:
            self._open.add(ticket)
        if self._dirty and self._work is None:
            self._work = asyncio.create_task(self._run())

    def is_pending(self, key: WriteKey) -> bool:
        """Whether it waits to be written, or is being written."""
        return any(key in ticket.left for ticket in self._open)

    async def saved(self, keys: Collection[WriteKey] | None = None) -> None:
        """Until all that is promised now of these (None: of any) is written.

        Raises OrchestratorError, of the first of them that was not.
        """
        waited_for = [ticket for ticket in self._open if keys is None or not ticket.keys.isdisjoint(keys)]
        for ticket in waited_for:
            await ticket.over.wait()
        for ticket in waited_for:
            for error in ticket.errors_about(ticket.keys if keys is None else keys):
                raise error

    async def done(self) -> None:
        """Until nothing is left to write, promised or not."""
        while self._work is not None:
            await asyncio.wait([self._work])

    def drop(self) -> None:
        """Nothing more is written; who waits is told."""
        if self._work is not None:
            self._work.cancel()
            self._work = None
        self._dirty.clear()
        error = OrchestratorUnavailable(
            "this orchestrator does not lead any more; it may or may not be written", code="not_leading"
        )
        for ticket in list(self._open):
            ticket.errors |= dict.fromkeys(ticket.left, error)
            ticket.left.clear()
            ticket.over.set()
        self._open.clear()

    async def _run(self) -> None:
        try:
            while self._dirty:
                batch, self._dirty = self._dirty, {}
                for order in sorted({key.order for key in batch}):
                    await asyncio.gather(*(self._settle(key, batch[key]) for key in batch if key.order == order))
        finally:
            if self._work is asyncio.current_task():
                self._work = None

    async def _settle(self, key: WriteKey, tickets: list[_PendingWrite]) -> None:
        error: OrchestratorError | None = None
        try:
            async with self._gate, asyncio.timeout(self._give_up_s):
                await self._write(key)
        except OrchestratorError as exc:
            error = exc
        except TimeoutError:
            message = f"{key.table} {key.name!r} not written: no answer from the API server in {self._give_up_s:g} s"
            error = OrchestratorUnavailable(message, code="store_unreachable", retry_after_s=5.0)
        except Exception as exc:
            log.exception("not written", table=key.table, name=key.name)
            error = StoreError(f"{key.table} {key.name!r} not written: {exc!r}")
        if error is not None:
            log.warning("not written", table=key.table, name=key.name, error=str(error))
            self._on_refused(key, error)
        else:
            self._on_written(key)
        for ticket in tickets:
            ticket.settle(key, error)
            if ticket.over.is_set():
                self._open.discard(ticket)

    async def _write(self, key: WriteKey) -> None:
        """Try until it stands or cannot. Raises OrchestratorError."""
        collisions = failures = 0
        doubtful: str | None = None
        now = asyncio.get_running_loop().time
        forbidden_at = math.inf
        while True:
            wish: DesiredObject | None = None
            try:
                if doubtful is not None:
                    if await self.look(doubtful) is None:
                        if key.is_of_people and doubtful in self._mirror.objects:
                            self._mirror.doubt(doubtful)
                            return  # deleted by somebody: whoever hears of it decides what that means
                        self._mirror.forget(doubtful)
                    doubtful = None
                wish = self._make(key)
                if wish is not None:
                    await self._ask_for(wish)
            except (Collision, KubeNotFound) as exc:
                assert wish is not None, "to look at what is not there is no error"
                collisions += 1
                if collisions >= _TRIES:
                    raise StoreError(f"ConfigMap {wish.name}: {exc}") from exc
                doubtful = wish.name
            except KubeError as exc:
                if isinstance(exc, KubeForbidden):
                    forbidden_at = min(forbidden_at, now())
                    may_pass = failures > 0 and now() - forbidden_at < _STARTING_S
                else:
                    may_pass = isinstance(exc, KubeUnreachable) or exc.status in _BUSY
                if not may_pass:
                    raise _refused(exc) from exc
                failures += 1
                await asyncio.sleep(max(backoff_s(failures, *_PAUSE_S, self._rng), exc.retry_after_s or 0.0))
            else:
                return

    async def _ask_for(self, wish: DesiredObject) -> None:
        known = self._mirror.objects.get(wish.name)
        path = f"{self._folder}/{wish.name}"
        if wish.body is None:
            options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": wish.uid}}
            with contextlib.suppress(KubeNotFound):
                await self._kube.delete(path, options, timeout_s=self._call_s)
            self._mirror.forget(wish.name, wish.uid)
        elif wish.body != known:
            with self._mirror.writing(wish.name, wish.body):
                if known is None:
                    found = await self._kube.post(self._folder, wish.body, timeout_s=self._call_s)
                else:
                    found = await self._kube.put(path, wish.body, timeout_s=self._call_s)
            self._mirror.wrote(found)

    async def look(self, name: str) -> Json | None:
        """The object as it is now, however it came to be so; None when there is none. Raises KubeError.

        One that is there is in the mirror on return; what it means that one is not, the caller decides.
        """
        try:
            found = await self._kube.get(f"{self._folder}/{name}", timeout_s=self._call_s)
        except KubeNotFound:
            return None
        self._mirror.note_owners(found)
        if lean(found) != self._mirror.objects.get(name_of(found)):
            self._mirror.changed.add(name)
        self._mirror.wrote(found)
        return found


def _refused(exc: KubeError) -> StoreError:
    if isinstance(exc, KubeForbidden):
        return StoreError(f"{exc}; the Role needs get, list, watch, create, update and delete on configmaps")
    return StoreError(str(exc))
