"""Adapters' files by digest: how many workers keep a copy, where a load gets its files, what of an upload has come.

Of files that are nowhere but in the fleet, copies are kept. Only a mark on a worker's disk counts as a copy: agents
delete what is not marked when they need room. A worker that is gone for a while, or that is to go, counts no longer. A
mark is taken off a copy beyond the number wanted, and off files that were deleted by name; never because nothing is
known of them.
"""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lorafleet.identity import FileMark, fleet_digest, rendezvous_score
from orchestrator.core.errors import OrchestratorRequestError
from orchestrator.model.snapshot import FilesSnapshot, OngoingFetch

CopyStatus = Literal["kept", "copying", "short", "lost", "unknown"]
"""kept: as many as wanted; copying: more under way; short: too few workers; lost: on no disk; unknown: not all said."""
COPIES_AT_ONCE = 8
"""Copies under way in the fleet: a lost worker had thousands, and adapters are loaded meanwhile. A guess."""
MOST_MARKED = 1000
"""Digests in one request to an agent: 70 KB."""
STALLED_S = 15.0
"""A fetch without a new byte for this long no longer keeps others from the source: a guess, more than a slow check of
the bytes takes, less than a client waits."""
READERS_PER_HOLDER = 4
"""Fetches from one worker at a time. Each that ends adds a worker to fetch from; an agent refuses more than its
`max_uploads`."""
NEIGHBOURS_NAMED = 4
"""Workers named in one load: one that fails leaves enough others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDisk:
    """A worker's disk.

    files         digest -> whether it is kept
    is_whole      the worker has said all that it has
    is_safe       copies here count: the worker answers, or has for a moment not, and is not to go
    is_reachable  its agent answers, so that others may fetch from it
    takes_copies  it may get new ones
    """

    worker_id: str
    disk_id: str
    base_model: str = ""
    zone: str = ""
    node: str = ""
    files: Mapping[str, bool] = field(default_factory=dict)
    is_whole: bool = True
    is_safe: bool = True
    is_reachable: bool = True
    takes_copies: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyState:
    """How an adapter's files are kept. `reason`: why there are fewer copies than wanted, and what to do."""

    status: CopyStatus
    kept_by: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkStep:
    """Have a worker mark its files of these digests. `neighbours`: workers to fetch those from that it is to keep."""

    worker_id: str
    digests: tuple[str, ...]
    mark: FileMark
    neighbours: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """The steps of a pass, and the state of each digest that is not simply kept."""

    keeps: tuple[MarkStep, ...] = ()
    releases: tuple[MarkStep, ...] = ()
    states: Mapping[str, CopyState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFacts:
    """What a pass over all copies knows.

    needs      digest -> base model, of all files that only the fleet has
    keepers    digest -> workers that keep it, by their reports
    copies     kept copies wanted of each digest, on as many disks
    under_way  (digest, worker_id) of copies that are being made
    blocked    (digest, worker_id) where a copy failed of late
    deleted    digests of deleted adapters: every worker that has their files may delete them
    dropping   (digest, worker_id) of workers that have been told so
    """

    needs: Mapping[str, str]
    disks: Sequence[WorkerDisk]
    keepers: Mapping[str, Collection[str]]
    copies: int
    under_way: Collection[tuple[str, str]] = ()
    blocked: Collection[tuple[str, str]] = ()
    deleted: Collection[str] = ()
    dropping: Collection[tuple[str, str]] = ()


def plan_copies(facts: CopyFacts) -> CopyPlan:
    """The steps towards as many kept copies of each digest as wanted."""
    return _CopyPass(facts).run()


class _CopyPass:
    """One pass over all digests. The many that are kept as wanted cost one look-up each."""

    def __init__(self, facts: CopyFacts) -> None:
        self.facts = facts
        self.disks = {disk.worker_id: disk for disk in facts.disks}
        self.busy = {worker_id for _, worker_id in facts.under_way}
        self.room = COPIES_AT_ONCE - len(facts.under_way)
        self.keeps: list[MarkStep] = []
        self.surplus: dict[str, list[str]] = {}
        self.states: dict[str, CopyState] = {}
        self.unsafe = {disk.worker_id for disk in facts.disks if not disk.is_safe}
        self.disk_ids = len({disk.disk_id for disk in facts.disks}) < len(facts.disks)
        # Before all workers have reported all of their files, nothing is known to be missing.
        self.is_whole = all(disk.is_whole for disk in facts.disks if disk.is_reachable)

    def run(self) -> CopyPlan:
        """Decide for every digest. Call it once."""
        for digest, base_model in self.facts.needs.items():
            keepers = self.facts.keepers.get(digest, ())
            is_simple = len(keepers) == self.facts.copies and not self.disk_ids and self.unsafe.isdisjoint(keepers)
            if not is_simple:
                self._decide(digest, base_model, keepers)
        dropped = self._dropped() if self.facts.deleted else {}
        releases = [*self._releases(self.surplus, "held"), *self._releases(dropped, "gone")]
        return CopyPlan(keeps=tuple(self.keeps), releases=tuple(releases), states=self.states)

    def _dropped(self) -> dict[str, list[str]]:
        """worker_id -> digests of deleted adapters on its disk, marked or not, that it may delete."""
        found: dict[str, list[str]] = {}
        for worker_id, disk in self.disks.items():
            for digest in disk.files.keys() & self.facts.deleted:
                if digest not in self.facts.needs and (digest, worker_id) not in self.facts.dropping:
                    found.setdefault(worker_id, []).append(digest)
        return found

    def _decide(self, digest: str, base_model: str, keepers: Collection[str]) -> None:
        """Add the steps and the state of one digest."""
        safe: dict[str, str] = {}  # disk id -> the worker that counts for it
        for worker_id in sorted(keepers):
            disk = self.disks.get(worker_id)
            if disk is not None and disk.is_safe:
                safe.setdefault(disk.disk_id, worker_id)
        kept_by = tuple(sorted(safe.values()))
        if len(safe) >= self.facts.copies:
            self._release_surplus(digest, keepers, safe)
            if len(keepers) > self.facts.copies:
                self.states[digest] = CopyState(status="kept", kept_by=kept_by)
            return
        going = [name for named, name in self.facts.under_way if named == digest]
        missing = self.facts.copies - len(safe) - len(going)
        holders = [name for name, disk in self.disks.items() if disk.is_reachable and digest in disk.files]
        if not holders and not going:
            self.states[digest] = self._missing_state(digest, kept_by)
            return
        targets = self._targets(digest, base_model, safe, holders, going)
        for worker_id in targets[: max(0, missing)]:
            is_here = worker_id in holders
            if not is_here and (self.room <= 0 or worker_id in self.busy):
                continue
            self.room -= not is_here
            if not is_here:
                self.busy.add(worker_id)
            neighbours = sorted(set(holders) - {worker_id}, key=lambda name: rendezvous_score(digest + worker_id, name))
            self.keeps.append(
                MarkStep(
                    worker_id=worker_id, digests=(digest,), mark="kept", neighbours=tuple(neighbours[:NEIGHBOURS_NAMED])
                )
            )
        if len(targets) < missing:
            possible = len(safe) + len(going) + len(targets)
            reason = (
                f"{self.facts.copies} copies are wanted; disks that can keep one: {possible};"
                " add workers with disks of their own, raise max_disk_bytes on full ones, or lower fleet_copies"
            )
            self.states[digest] = CopyState(status="short", kept_by=kept_by, reason=reason)
        else:
            reason = f"{len(safe)} of {self.facts.copies} copies are kept; more are being made"
            self.states[digest] = CopyState(status="copying", kept_by=kept_by, reason=reason)

    def _targets(
        self, digest: str, base_model: str, safe: Mapping[str, str], holders: Sequence[str], going: Sequence[str]
    ) -> list[str]:
        """Workers that may keep one more copy, the best first, one a disk.

        First comes another machine than those of the kept copies; then a worker that has the files, which needs no
        transfer; then one of the adapter's base model, where a load finds them; then another zone.
        """
        taken = [self.disks[name] for name in (*safe.values(), *(name for name in going if name in self.disks))]
        disks_taken = {disk.disk_id for disk in taken}
        zones, nodes = {disk.zone for disk in taken if disk.zone}, {disk.node for disk in taken if disk.node}

        def rank(disk: WorkerDisk) -> tuple[bool, bool, bool, bool, int]:
            return (
                disk.node in nodes,
                disk.worker_id not in holders,
                disk.base_model != base_model,
                disk.zone in zones,
                -rendezvous_score(digest, disk.worker_id),
            )

        able = [
            disk
            for disk in self.disks.values()
            if disk.takes_copies and disk.is_safe and disk.disk_id not in disks_taken
            if (digest, disk.worker_id) not in self.facts.blocked
        ]
        found: dict[str, str] = {}
        for disk in sorted(able, key=rank):
            found.setdefault(disk.disk_id, disk.worker_id)
        return list(found.values())

    def _release_surplus(self, digest: str, keepers: Collection[str], safe: Mapping[str, str]) -> None:
        """Release copies beyond the number wanted, at workers that answer: the last by rendezvous order."""
        order = sorted(safe.values(), key=lambda name: rendezvous_score(digest, name), reverse=True)
        stay = set(order[: self.facts.copies])
        for worker_id in keepers:
            disk = self.disks.get(worker_id)
            # A second mark on a shared disk is the same mark.
            if disk is not None and worker_id in order and worker_id not in stay and disk.is_reachable:
                self.surplus.setdefault(worker_id, []).append(digest)

    def _missing_state(self, digest: str, kept_by: tuple[str, ...]) -> CopyState:
        """The state of a digest that no worker which answers has."""
        silent = sorted(name for name, disk in self.disks.items() if not disk.is_reachable and digest in disk.files)
        if not self.is_whole:
            return CopyState(status="unknown", kept_by=kept_by, reason="not every worker has reported its files yet")
        where = f"worker {', '.join(silent)}, which does not answer" if silent else "no worker's disk"
        advice = "bring that worker back, or " if silent else ""
        reason = f"the files of digest {digest} are on {where}: {advice}upload or publish them again"
        return CopyState(status="lost", kept_by=kept_by, reason=reason)

    def _releases(self, digests_of: Mapping[str, Sequence[str]], mark: FileMark) -> list[MarkStep]:
        """One step for each worker that answers, of at most as many digests as a request may have."""
        return [
            MarkStep(worker_id=name, digests=tuple(sorted(digests)[:MOST_MARKED]), mark=mark)
            for name, digests in sorted(digests_of.items())
            if name in self.disks and self.disks[name].is_reachable
        ]


# --- where a load gets its files -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FetchChoice:
    """Where the files of a load come from: first these workers, then the source. `is_held`: the load must wait."""

    neighbours: tuple[str, ...] = ()
    is_held: bool = False


_AT_ONCE, _HELD = FetchChoice(), FetchChoice(is_held=True)


def fetch_choice(
    source: str,
    digest: str,
    worker_id: str,
    files: FilesSnapshot,
    *,
    reachable: Collection[str],
    begun: Sequence[OngoingFetch],
    now: float,
) -> FetchChoice:
    """Where a worker gets the files of a digest, so that the source is asked once in a fleet.

    The first worker asks the source, and all others wait for it. Whoever has the files sends them to a few at a time. A
    fetch whose worker is gone, or that has stalled, holds nobody back: one more worker asks the source then.

    reachable  workers whose agents answer
    begun      fetches of the digest that this pass has begun
    """
    if not files.is_known or is_path(source):
        return _AT_ONCE
    held_by = files.holders.get(digest, ())
    if worker_id in held_by:
        return _AT_ONCE
    holders = [name for name in held_by if name in reachable]
    live = [
        fetch
        for fetch in (*files.fetches.get(digest, ()), *begun)
        if fetch.worker_id in reachable and fetch.worker_id not in held_by and now - fetch.moved_at < STALLED_S
    ]
    if not holders:
        is_lost = fleet_digest(source) is not None and files.is_whole
        return _HELD if live or is_lost else _AT_ONCE
    if len(live) >= READERS_PER_HOLDER * len(holders):
        return _HELD
    # In another order for each reader, so that all holders send.
    order = sorted(holders, key=lambda name: rendezvous_score(f"{digest}{worker_id}", name))
    return FetchChoice(neighbours=tuple(order[:NEIGHBOURS_NAMED]))


def is_path(source: str) -> bool:
    """Whether the source is a path, which is read where it is: on the worker's own disk, or on its mount."""
    return fleet_digest(source) is None and ("://" not in source or source.lower().startswith("file://"))


# --- uploads ---------------------------------------------------------------------------------------------------------

ARCHIVE = "archive"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ACCEPTANCE = "acceptance.jsonl"
UPLOAD_FILES = (ARCHIVE, CONFIG, WEIGHTS, ACCEPTANCE)
"""What a request may send: an archive of the adapter, one of its two files, or the acceptance file beside them."""

_NAMES_SHOWN = 5
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)")


@dataclass(frozen=True, slots=True)
class SentBytes:
    """The bytes of a file that a request has.

    start  of the first one; None: the request has none, and asks to finish what has come
    length  how many they are; None: not known before their end
    total  of the whole file; None: not known before its end
    is_resumed  they continue what has come before; otherwise the file begins anew
    """

    start: int | None
    length: int | None
    total: int | None
    is_resumed: bool


def sent_bytes(content_range: str | None, content_length: str | None) -> SentBytes:
    """The bytes that a request's headers announce. Raises OrchestratorRequestError for a Content-Range of another form.

    curl -C sends the form of RFC 9110 14.4 (lib/http.c): `bytes 100-199/200`; `bytes */200` sends nothing.
    """
    length = int(content_length) if content_length is not None else None
    if content_range is None:
        return SentBytes(0, length, length, is_resumed=False)
    match = _CONTENT_RANGE.fullmatch(content_range.strip())
    problem = "" if match is not None else "expected the form `bytes 100-199/200`, or `bytes */200` without a body"
    if match is not None and match[1] is not None:
        first, last, total = int(match[1]), int(match[2]), None if match[3] == "*" else int(match[3])
        if last < first or (total is not None and last >= total):
            problem = "its numbers contradict each other"
        elif length is not None and length != last - first + 1:
            problem = f"the body has {length} bytes, the range {last - first + 1}"
        else:
            return SentBytes(first, last - first + 1, total, is_resumed=first > 0)
    elif match is not None and length:
        problem = f"it announces no bytes, and the body has {length}"
    if problem or match is None:
        message = f"header Content-Range {content_range[:100]!r}: {problem}"
        raise OrchestratorRequestError(message, code="invalid_content_range", param="Content-Range")
    return SentBytes(None, 0, None if match[3] == "*" else int(match[3]), is_resumed=True)


def upload_id(owner: str, name: str) -> str:
    """The id of a caller's unfinished upload of an adapter: each has one at a time, wherever it arrives."""
    return hashlib.sha256(f"{len(owner)}:{owner}{name}".encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class UploadQuota:
    """What one tenant's unfinished uploads may be together."""

    uploads: int
    size_bytes: int

    def problem(self, others: Mapping[str, tuple[str, int]], new_bytes: int) -> str:
        """Why a tenant may begin no further upload of this size, and what to do; "" if it may.

        others  upload id -> adapter and size, of its unfinished uploads
        """
        taken = sum(size for _, size in others.values())
        if len(others) < self.uploads and taken + new_bytes <= self.size_bytes:
            return ""
        if len(others) >= self.uploads:
            problem = f"{len(others)} uploads are unfinished, of at most {self.uploads} (max_unfinished_uploads)"
        else:
            problem = f"the {len(others)} unfinished uploads have announced {taken} bytes, with this one"
            problem += f" {taken + new_bytes} of at most {self.size_bytes} (max_unfinished_upload_bytes)"
        names = sorted({name for name, _ in others.values() if name})
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        advice = "finish one, or forget it by DELETE /v1/uploads/{lora_id}; each ends after an hour without growth"
        return f"{problem}: {shown}; {advice}"


def files_still_to_send(received: Mapping[str, tuple[int, int | None]]) -> tuple[str, ...]:
    """The files of an upload that have not come whole, in the order to send them; empty if it can be installed.

    received  file -> bytes that are there, and of the whole file (None: not known, and what is there is all)
    """
    needed: tuple[str, ...] = (ARCHIVE,) if ARCHIVE in received or not received else (CONFIG, WEIGHTS)
    needed += (ACCEPTANCE,) if ACCEPTANCE in received else ()
    return tuple(name for name in needed if name not in received or received[name][1] not in (None, received[name][0]))
