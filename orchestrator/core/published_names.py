"""Published names: which version a name gets next, which workers must have it, and which versions are retired. Pure.

A published name is an alias that the fleet keeps pointed at its newest version. Each version is an ordinary adapter,
with bytes that never change. Times here are Unix times, as they are stored.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from lorafleet.identity import version_id
from orchestrator.core.placement.context import usable_slots
from orchestrator.core.rollout import Targets
from orchestrator.model.snapshot import Intent, ObservedWorker, PlacementPolicy, RegisteredAdapter

LINGER_S = 5.0
"""A version stays at least this long after its name has left it, and longer while requests for it wait or run: a router
reports its requests each second, and those that it has resolved to a version go on with it."""
MOST_LINGER_S = 900.0
"""A request may run that long on a version that is to go; engines finish a request whose adapter they unload."""
MOST_DROPPED = 16
"""Digests of retired versions that are remembered: workers drop their files within seconds. One that is away for longer
deletes them when it needs room."""
UNFINISHED_S = 120.0
"""A version that its name has not been pointed at for this long belongs to a publish that failed. No publish may take
as long, so that a repeated one still finds the version of the interrupted one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameVersion:
    """One version of a published name.

    pointed_at     when the name was last pointed at it; None: a publish is in progress, or failed
    superseded_at  when the name was pointed elsewhere; None while it is the name's target
    """

    lora_id: str
    number: int
    digest: str
    registered_at: float
    pointed_at: float | None = None
    superseded_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedName:
    """A name that a trainer publishes versions under.

    tenant           tenant that may publish under it and use it; None: operators publish, everyone uses
    next_number      number of the next version; numbers are never used twice
    versions         registered versions, the oldest first
    published_at     when it was last published
    used_at          when a request for it was last noted; more recent ones may be known
    replicas         workers that must have a version before the name points at it; None: all
    keep_versions    newest versions that stay; None: the policy's
    max_staleness_s  how long a superseded version stays; None: the policy's
    dropped          digests of the versions retired last, whose files workers may delete at once
    deleted_at       when the name was deleted, and its versions are about to go; None while the name exists
    shadows_base     whether keys that may shadow a base model get the name in place of the base model of this name
    """

    name: str
    tenant: str | None = None
    next_number: int = 1
    versions: tuple[NameVersion, ...] = ()
    published_at: float = 0.0
    used_at: float = 0.0
    replicas: int | None = None
    keep_versions: int | None = None
    max_staleness_s: float | None = None
    shadows_base: bool = False
    dropped: tuple[str, ...] = ()
    deleted_at: float | None = None

    def kept_count(self, policy: PlacementPolicy) -> int:
        """Newest versions that stay: the name's own number, else the policy's."""
        return policy.keep_versions if self.keep_versions is None else self.keep_versions

    def stale_after_s(self, policy: PlacementPolicy) -> float:
        """How long a superseded version stays: the name's own time, else the policy's. 0: no limit."""
        return policy.max_staleness_s if self.max_staleness_s is None else self.max_staleness_s

    def version_of(self, digest: str) -> NameVersion | None:
        """The newest version with these bytes; None without one."""
        return next((version for version in reversed(self.versions) if version.digest == digest), None)


def with_next_version(
    record: PublishedName, digest: str, taken: Container[str], now: float
) -> tuple[PublishedName, NameVersion]:
    """The record with a new version of these bytes, and that version.

    taken  lora_ids in use: an adapter that somebody registered as `name/v3` is no version of the name
    """
    number = record.next_number
    while (lora_id := version_id(record.name, number)) in taken:
        number += 1
    version = NameVersion(lora_id=lora_id, number=number, digest=digest, registered_at=now)
    return replace(record, next_number=number + 1, versions=(*record.versions, version)), version


def after_pointing(record: PublishedName, lora_id: str, now: float) -> PublishedName:
    """The record after its name was pointed at this version: the one before is superseded from now on."""

    def after(version: NameVersion) -> NameVersion:
        """The version as it is from now on."""
        if version.lora_id == lora_id:
            return replace(version, pointed_at=now, superseded_at=None)
        is_current = version.pointed_at is not None and version.superseded_at is None
        return replace(version, superseded_at=now) if is_current else version

    return replace(record, versions=tuple(map(after, record.versions)), published_at=now, deleted_at=None)


def after_deletion(record: PublishedName, now: float) -> PublishedName:
    """The record after its name was deleted: no version is its target any more."""

    def after(version: NameVersion) -> NameVersion:
        """The version as it is from now on."""
        return replace(version, superseded_at=now) if version.superseded_at is None else version

    return replace(record, versions=tuple(map(after, record.versions)), deleted_at=now)


def taken_over(
    theirs: PublishedName, here: PublishedName | None, targets: Targets, registered: Container[str], now: float
) -> PublishedName:
    """Another fleet's published name as this fleet keeps it: with the versions that are registered here.

    here     the name as it is here; None: it is new
    targets  what the name's alias points at here
    """
    known = {version.lora_id: version for version in (here.versions if here is not None else ())}
    current = {lora_id for lora_id, _ in targets}

    def version_here(version: NameVersion) -> NameVersion:
        """The version as it is here, or as one that the name has had here since now."""
        superseded_at = None if version.lora_id in current else now
        fresh = replace(version, registered_at=now, pointed_at=now, superseded_at=superseded_at)
        return known.get(version.lora_id, fresh)

    versions = tuple(version_here(version) for version in theirs.versions if version.lora_id in registered)
    numbers = [theirs.next_number, 1 if here is None else here.next_number, *(v.number + 1 for v in versions)]
    times = (now, 0.0) if here is None else (here.published_at, here.used_at)
    return replace(
        theirs, versions=versions, next_number=max(numbers), published_at=times[0], used_at=times[1], deleted_at=None
    )


def without_versions(record: PublishedName, gone: Container[str]) -> PublishedName:
    """The record without these versions, whose bytes count as dropped unless another version has them."""
    kept = tuple(version for version in record.versions if version.lora_id not in gone)
    held = {version.digest for version in kept}
    dropped = [*record.dropped, *(version.digest for version in record.versions if version.lora_id in gone)]
    latest = tuple(digest for digest in dict.fromkeys(dropped) if digest not in held)
    return replace(record, versions=kept, dropped=latest[-MOST_DROPPED:])


def retired_versions(
    record: PublishedName,
    targets: Collection[str],
    policy: PlacementPolicy,
    now: float,
    busy: Container[str] = (),
) -> tuple[str, ...]:
    """lora_ids of the versions that are to be drained and deleted: too many, too old, or of a publish that failed.

    targets  lora_ids that some name points at, or is about to: they are never retired
    busy     lora_ids with requests that wait or run: they stay, but not for longer than `MOST_LINGER_S`
    """
    keep, stale_s = record.kept_count(policy), record.stale_after_s(policy)
    pointed = [version for version in record.versions if version.pointed_at is not None]
    newest = sorted(pointed, key=lambda version: (version.pointed_at or 0.0, version.number), reverse=True)
    kept = {version.lora_id for version in newest[: max(1, keep)]} | set(targets)

    def is_retired(version: NameVersion) -> bool:
        """Whether the version is to go."""
        if version.lora_id in targets:
            return False
        if version.pointed_at is None and record.deleted_at is None:
            return now - version.registered_at >= UNFINISHED_S
        left_s = inf if version.superseded_at is None else now - version.superseded_at
        if left_s < LINGER_S or (version.lora_id in busy and left_s < MOST_LINGER_S):
            return False
        if record.deleted_at is not None:
            return True
        is_stale = bool(stale_s) and version.superseded_at is not None and left_s >= stale_s
        return version.lora_id not in kept or is_stale

    return tuple(version.lora_id for version in record.versions if is_retired(version))


def last_used_at(record: PublishedName, last_asked_at: float | None) -> float:
    """Unix time at which somebody last published the name or asked for it."""
    registered = [version.registered_at for version in record.versions]
    return max(record.published_at, record.used_at, last_asked_at or 0.0, *registered)


def is_unused(record: PublishedName, last_asked_at: float | None, policy: PlacementPolicy, now: float) -> bool:
    """Whether nobody has published the name, or asked for it, in the policy's `unused_name_s`."""
    return bool(policy.unused_name_s) and now - last_used_at(record, last_asked_at) >= policy.unused_name_s


def is_trained(record: PublishedName, policy: PlacementPolicy, now: float) -> bool:
    """Whether another version of the name is to be expected: it had several, the last one in `scale_down_after_s`."""
    return record.next_number > 2 and now - record.published_at < policy.scale_down_after_s


def current_versions(names: Iterable[str], aliases: Mapping[str, Targets]) -> dict[str, str]:
    """Published name -> lora_id of the version that its requests get, of the names that have one."""
    return {name: aliases[name][0][0] for name in names if aliases.get(name)}


def meant_workers(
    workers: Iterable[ObservedWorker], base_model: str | None, rank: int, replicas: int | None
) -> tuple[frozenset[str], int]:
    """Workers that may get a version, and how many of them must have it before its name may point at it."""

    def is_open(worker: ObservedWorker) -> bool:
        """Whether the worker may get the version."""
        return worker.has_agent and worker.drain is None and worker.can_accept(base_model, rank)

    able = frozenset(worker.id for worker in workers if is_open(worker))
    return able, len(able) if replicas is None else min(replicas, len(able))


def with_published_floors(
    intent: Intent,
    names: Mapping[str, PublishedName],
    aliases: Mapping[str, Targets],
    workers: Collection[ObservedWorker],
    *,
    most_replicas: int,
    reserve_slots: int = 0,
    last_asked_at: Mapping[str, float] | None = None,
    awaited: Container[str] = (),
    idle: Container[str] = (),
    trained: Container[str] = (),
) -> Intent:
    """The intent with the replicas that published names need as minimum of their versions.

    Needed are the versions that names point at, and those that publishes wait for. Names used last come first: names
    for which workers have no slot left get no minimum, nor do idle ones: what a trainer that ended has left must not
    refuse others a slot. Between publishes the next version of a trained name counts as well. Else a name that was used
    less lately would be loaded after each publish, into the slot of the old version, and evicted by the next publish.
    Versions that no name points at any longer are marked, so that they make room first.

    most_replicas  maximum of adapters that set none of their own
    reserve_slots  slots of each worker that the policy keeps free
    last_asked_at  name -> when a request for it came last; by the clock of `PublishedName.published_at`
    awaited        lora_ids of versions that were published before, and that publishes wait for again
    idle           names that nobody has used of late
    trained        names of which another version is to be expected soon
    """
    if not names:
        return intent
    asked = last_asked_at or {}
    order = sorted(names.values(), key=lambda name: (-last_used_at(name, asked.get(name.name)), name.name))
    wanted = list(_needed_versions(order, aliases, intent, awaited))
    current = {needed.adapter.lora_id for needed in wanted}
    slots: dict[str, _SlotsTaken] = {}
    has_next = {needed.adapter.base_model for needed in wanted if needed.is_awaited}
    raised: dict[str, RegisteredAdapter] = {}
    for adapter, name, is_awaited in wanted:
        if name.name in idle and not is_awaited:
            continue
        able, count = meant_workers(workers, adapter.base_model, adapter.rank or 0, name.replicas)
        sizes = [usable_slots(worker.slots, reserve_slots) for worker in workers if worker.id in able]
        taken = slots.setdefault(adapter.base_model or "", _SlotsTaken())
        if count and taken.take(count, sizes):
            raised[adapter.lora_id] = replace(
                adapter,
                min_replicas=max(count, adapter.min_replicas or 0),
                max_replicas=max(count, most_replicas if adapter.max_replicas is None else adapter.max_replicas),
            )
        if count and name.name in trained and adapter.base_model not in has_next:
            has_next.add(adapter.base_model)  # one for all trainers: few publish in the same moment
            taken.take(count, sizes)
    superseded = {version.lora_id for name in order for version in name.versions} - current
    return replace(intent, adapters={**intent.adapters, **raised}, superseded=frozenset(superseded))


@dataclass(slots=True)
class _SlotsTaken:
    """The slots of a base model's workers that minimums of published names take, wherever their copies are.

    No copy of a minimum makes room for another one, so none may be where another version alone could be.

    versions  with a minimum; `copies`: of all of them; `most`: of one of them
    has_whole whether every worker that may have one of them must have it
    """

    versions: int = 0
    copies: int = 0
    most: int = 0
    has_whole: bool = False

    def take(self, count: int, sizes: Collection[int]) -> bool:
        """Take the slots of one version's copies if all minimums can be met then; returns whether they can.

        sizes  slots of each worker that may have the version
        """
        room, copies, most = min(sizes), self.copies + count, max(self.most, count)
        has_whole = self.has_whole or count >= len(sizes)
        # All others may be on the same worker; where none needs every worker, they fill so many workers at most.
        is_met = self.versions < room if has_whole else (copies - most) // room + most <= len(sizes)
        if is_met:
            self.versions, self.copies, self.most, self.has_whole = self.versions + 1, copies, most, has_whole
        return is_met


class _NeededVersion(NamedTuple):
    """A version of a published name. `is_awaited`: a publish waits for it; otherwise the name points at it."""

    adapter: RegisteredAdapter
    name: PublishedName
    is_awaited: bool


def _needed_versions(
    order: Iterable[PublishedName], aliases: Mapping[str, Targets], intent: Intent, awaited: Container[str]
) -> Iterator[_NeededVersion]:
    """Versions that publishes wait for, then those that names point at; each in the order of the names."""
    names = list(order)
    for name in names:
        for version in name.versions:
            is_awaited = version.pointed_at is None or version.lora_id in awaited
            if is_awaited and (found := intent.adapters.get(version.lora_id)) is not None:
                yield _NeededVersion(found, name, is_awaited=True)
    for name in names:
        own = {version.lora_id for version in name.versions if version.pointed_at is not None}
        for lora_id, _weight in aliases.get(name.name, ()):
            if lora_id in own and (found := intent.adapters.get(lora_id)) is not None:
                yield _NeededVersion(found, name, is_awaited=False)
