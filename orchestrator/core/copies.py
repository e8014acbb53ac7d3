"""Copies of files that are nowhere but in the fleet: how many workers keep them, and the steps to as many as wanted.

Only a mark on a worker's disk counts as a copy: agents delete what is not marked when they need room. A worker that is
gone for a while, or that is to go, counts no longer. A mark is taken off a copy beyond the number wanted, and off files
that were deleted by name; never because nothing is known of them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lorafleet.identity import rendezvous_score

CopyStatus = Literal["kept", "copying", "short", "lost", "unknown"]
"""kept: as many as wanted; copying: more under way; short: too few workers; lost: on no disk; unknown: not all said."""
COPIES_AT_ONCE = 8
"""Copies under way in the fleet: a lost worker had thousands, and adapters are loaded meanwhile. A guess."""
MOST_RELEASED = 1000
"""Digests in one request to an agent."""


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
class KeepStep:
    """Have a worker keep the files of a digest, which it has or fetches from `neighbours`."""

    digest: str
    worker_id: str
    neighbours: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseStep:
    """Have a worker take the marks off these digests. `is_dropped`: their adapters were deleted."""

    worker_id: str
    digests: tuple[str, ...]
    is_dropped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """The steps of a pass, and the state of each digest that is not simply kept."""

    keeps: tuple[KeepStep, ...] = ()
    releases: tuple[ReleaseStep, ...] = ()
    states: Mapping[str, CopyState] = field(default_factory=dict)


def plan_copies(
    needs: Mapping[str, str],
    disks: Sequence[WorkerDisk],
    keepers: Mapping[str, Collection[str]],
    *,
    copies: int,
    under_way: Collection[tuple[str, str]] = (),
    blocked: Collection[tuple[str, str]] = (),
    deleted: Collection[str] = (),
    dropping: Collection[tuple[str, str]] = (),
) -> CopyPlan:
    """The steps towards `copies` kept copies of each digest, on as many disks.

    needs      digest -> base model, of all files that only the fleet has
    keepers    digest -> workers that keep it, by their reports
    under_way  (digest, worker_id) of copies that are being made
    blocked    (digest, worker_id) where a copy failed of late
    deleted    digests of deleted adapters: every worker that has their files may delete them
    dropping   (digest, worker_id) of workers that have been told so
    """
    return _CopyPass(needs, disks, keepers, copies, under_way, blocked, deleted, dropping).run()


class _CopyPass:
    """One pass over all digests. The many that are kept as wanted cost one look-up each."""

    def __init__(  # noqa: PLR0917  (as `plan_copies`)
        self,
        needs: Mapping[str, str],
        disks: Sequence[WorkerDisk],
        keepers: Mapping[str, Collection[str]],
        copies: int,
        under_way: Collection[tuple[str, str]],
        blocked: Collection[tuple[str, str]],
        deleted: Collection[str],
        dropping: Collection[tuple[str, str]],
    ) -> None:
        self.needs = needs
        self.disks = {disk.worker_id: disk for disk in disks}
        self.keepers = keepers
        self.copies = copies
        self.under_way = under_way
        self.blocked = blocked
        self.deleted = deleted
        self.dropping = dropping
        self.busy = {worker_id for _, worker_id in under_way}
        self.room = COPIES_AT_ONCE - len(under_way)
        self.keeps: list[KeepStep] = []
        self.surplus: dict[str, list[str]] = {}
        self.states: dict[str, CopyState] = {}
        self.unsafe = {disk.worker_id for disk in disks if not disk.is_safe}
        self.disk_ids = len({disk.disk_id for disk in disks}) < len(disks)
        # Before all workers have reported all of their files, nothing is known to be missing.
        self.is_whole = all(disk.is_whole for disk in disks if disk.is_reachable)

    def run(self) -> CopyPlan:
        """Decide for every digest. Call it once."""
        for digest, base_model in self.needs.items():
            keepers = self.keepers.get(digest, ())
            is_simple = len(keepers) == self.copies and not self.disk_ids and self.unsafe.isdisjoint(keepers)
            if not is_simple:
                self._decide(digest, base_model, keepers)
        dropped = self._dropped() if self.deleted else {}
        releases = [*self._releases(self.surplus, is_dropped=False), *self._releases(dropped, is_dropped=True)]
        return CopyPlan(keeps=tuple(self.keeps), releases=tuple(releases), states=self.states)

    def _dropped(self) -> dict[str, list[str]]:
        """worker_id -> digests of deleted adapters on its disk, marked or not, that it may delete."""
        found: dict[str, list[str]] = {}
        for worker_id, disk in self.disks.items():
            for digest in disk.files.keys() & self.deleted:
                if digest not in self.needs and (digest, worker_id) not in self.dropping:
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
        if len(safe) >= self.copies:
            self._release_surplus(digest, keepers, safe)
            if len(keepers) > self.copies:
                self.states[digest] = CopyState(status="kept", kept_by=kept_by)
            return
        going = [name for named, name in self.under_way if named == digest]
        missing = self.copies - len(safe) - len(going)
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
            self.keeps.append(KeepStep(digest=digest, worker_id=worker_id, neighbours=tuple(neighbours[:4])))
        if len(targets) < missing:
            reason = (
                f"{self.copies} copies are wanted; disks that can keep one: {len(safe) + len(going) + len(targets)};"
                " add workers with disks of their own, raise max_disk_bytes on full ones, or lower fleet_copies"
            )
            self.states[digest] = CopyState(status="short", kept_by=kept_by, reason=reason)
        else:
            reason = f"{len(safe)} of {self.copies} copies are kept; more are being made"
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
            if (digest, disk.worker_id) not in self.blocked
        ]
        found: dict[str, str] = {}
        for disk in sorted(able, key=rank):
            found.setdefault(disk.disk_id, disk.worker_id)
        return list(found.values())

    def _release_surplus(self, digest: str, keepers: Collection[str], safe: Mapping[str, str]) -> None:
        """Release copies beyond the number wanted, at workers that answer: the last by rendezvous order."""
        order = sorted(safe.values(), key=lambda name: rendezvous_score(digest, name), reverse=True)
        stay = set(order[: self.copies])
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

    def _releases(self, digests_of: Mapping[str, Sequence[str]], *, is_dropped: bool) -> list[ReleaseStep]:
        """One step for each worker that answers, of at most as many digests as a request may have."""
        return [
            ReleaseStep(worker_id=name, digests=tuple(sorted(digests)[:MOST_RELEASED]), is_dropped=is_dropped)
            for name, digests in sorted(digests_of.items())
            if name in self.disks and self.disks[name].is_reachable
        ]
