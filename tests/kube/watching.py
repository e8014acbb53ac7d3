"""Watches: changes since a version, then each change as it comes, with bookmarks."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.kube import validation
from tests.kube.kinds import ResourceKind
from tests.kube.status import ApiError
from tests.kube.store import Object, StoredWrite, VersionedObjects

_LONGEST_S = 1800.0
_LAST_BOOKMARK_S = 2.0  # before the end [measured on a real one]
_INITIAL_EVENTS_END = "k8s.io/initial-events-end"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRequest:
    """A watch request. `version` None: all present objects first, then changes."""

    resource: ResourceKind
    namespace: str
    version: int | None
    holds: Callable[[Object], bool]
    bookmarks: bool
    marks_initial: bool
    timeout_s: float | None
    bookmark_s: float


async def lines(watch: WatchRequest, store: VersionedObjects) -> AsyncIterator[bytes]:
    """Events as one JSON object a line, until the watch's time is over.

    A version that is too old is no HTTP error: the stream says ERROR and ends.
    """
    queue = store.watch(watch.resource)
    try:
        if watch.version is None:
            for obj in store.find(watch.resource, watch.namespace):
                if watch.holds(obj):
                    yield _line("ADDED", msgspec.json.encode(obj))
            if watch.marks_initial:
                yield _bookmark(watch, store, {"annotations": {_INITIAL_EVENTS_END: "true"}})
        else:
            try:
                missed = store.changes_since(watch.resource, watch.version)
            except ApiError as exc:
                yield _line("ERROR", msgspec.json.encode(exc.body()))
                return
            for change in missed:
                if line := _seen(watch, change):
                    yield line
        async for line in _live(watch, store, queue):
            yield line
    finally:
        store.unwatch(watch.resource, queue)


async def _live(
    watch: WatchRequest, store: VersionedObjects, queue: "asyncio.Queue[StoredWrite]"
) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    ends_at = clock() + (watch.timeout_s or random.uniform(_LONGEST_S, 2 * _LONGEST_S))
    last_at = ends_at - _LAST_BOOKMARK_S if watch.bookmarks else 0.0
    marks_at = min(clock() + watch.bookmark_s, last_at)
    while (now := clock()) < ends_at:
        is_marked = now < last_at
        try:
            async with asyncio.timeout((marks_at if is_marked else ends_at) - now):
                change = await queue.get()
        except TimeoutError:
            # Not while a change waits to be told: whoever resumed from the bookmark would never hear of it.
            if is_marked and queue.empty():
                yield _bookmark(watch, store, {})
                marks_at = min(clock() + watch.bookmark_s, last_at)
            continue
        if line := _seen(watch, change):
            yield line


def _seen(watch: WatchRequest, change: StoredWrite) -> bytes | None:
    """The change as this watch sees it: an object that leaves its selector is deleted, one that enters is added."""
    if watch.namespace and change.new["metadata"].get("namespace") != watch.namespace:
        return None
    before = change.old is not None and watch.holds(change.old)
    now = change.type != "DELETED" and watch.holds(change.new)
    if now:
        return _line("MODIFIED" if before else "ADDED", change.encoded)
    if not before:
        return None
    gone = change.old | {"metadata": change.old["metadata"] | {"resourceVersion": str(change.version)}}
    return _line("DELETED", msgspec.json.encode(gone))


def _bookmark(watch: WatchRequest, store: VersionedObjects, meta: dict[str, Any]) -> bytes:
    resource = watch.resource
    typed = {"kind": resource.kind, "apiVersion": resource.api_version}
    meta = {"resourceVersion": str(store.version)} | meta
    return _line("BOOKMARK", msgspec.json.encode(typed | {"metadata": meta} | validation.nothing(resource)))


def _line(kind: str, encoded: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), encoded)
