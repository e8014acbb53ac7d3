"""Published names: which version a name gets next, what a publish waits for, and which versions are retired. Pure.

A published name is an alias that the fleet keeps pointed at its newest version. Each version is an ordinary adapter,
with bytes that never change. Times here are Unix times, as they are stored.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from lorafleet.identity import version_id
from orchestrator.core.failures import ENGINE_REFUSALS
from orchestrator.core.placement.context import usable_slots
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import AliasTarget, NameVersion, Publication, Replicas, ServedName
from orchestrator.model.snapshot import AdapterFailure, Intent, ObservedWorker, Pair

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
UNSEEN_CODES = frozenset({"source_not_found", "adapter_incomplete", "digest_mismatch"})
"""Codes for bytes that are not there, not whole, or older ones: a network mount may show a new file seconds later."""
TORN_CODES = frozenset(
    {"adapter_config_invalid", "adapter_invalid", "tensor_unpaired", "weights_corrupt", "weights_empty"}
)
"""Codes for bytes that may be the first half of a file; see `TORN_S`."""
TORN_S = 5.0
"""Bytes that an agent finds broken for this long are broken. A guess: a mount that lags shows the end of a file within
a second or two of its beginning."""


def kept_count(record: Publication, policy: PlacementPolicy) -> int:
    """Newest versions that stay: the name's own number, else the policy's."""
    return policy.keep_versions if record.spec.keep_versions is None else record.spec.keep_versions


def stale_after_s(record: Publication, policy: PlacementPolicy) -> float:
    """How long a superseded version stays: the name's own time, else the policy's. 0: no limit."""
    own = record.spec.max_staleness_s
    return policy.max_staleness_s if own is None else own


def with_next_version(
    name: str, record: Publication, digest: str, taken: Container[str], now: float
) -> tuple[Publication, NameVersion]:
    """The record with a new version of these bytes, and that version.

    taken  lora_ids in use: an adapter that somebody registered as `name/v3` is no version of the name
    """
    number = record.next_number
    while (lora_id := version_id(name, number)) in taken:
        number += 1
    version = NameVersion(lora_id=lora_id, number=number, digest=digest, registered_at=now)
    return replace(record, next_number=number + 1, versions=(*record.versions, version)), version


def after_pointing(name: ServedName, lora_id: str, now: float) -> ServedName:
    """The published name, pointed at this version alone: the one before is superseded, and a rollout is over."""

    def after(version: NameVersion) -> NameVersion:
        """The version as it is from now on."""
        if version.lora_id == lora_id:
            return replace(version, pointed_at=now, superseded_at=None)
        is_current = version.pointed_at is not None and version.superseded_at is None
        return replace(version, superseded_at=now) if is_current else version

    record = name.published or Publication()
    versions = tuple(map(after, record.versions))
    pointed = replace(record, versions=versions, published_at=now, deleted_at=None)
    return replace(name, targets=(AliasTarget(lora_id),), rollout=None, published=pointed)


def after_deletion(name: ServedName, now: float) -> ServedName:
    """The published name after its deletion: it points at nothing, and its versions are about to go."""

    def after(version: NameVersion) -> NameVersion:
        """The version as it is from now on."""
        return replace(version, superseded_at=now) if version.superseded_at is None else version

    record = name.published or Publication()
    deleted = replace(record, versions=tuple(map(after, record.versions)), deleted_at=now)
    return replace(name, targets=(), rollout=None, published=deleted)


def taken_over(theirs: Publication, here: ServedName, registered: Container[str], now: float) -> ServedName:
    """The name with another fleet's versions and retention: of the versions those that are registered here.

    here  the name as it is here; it need not be published
    """
    known = {version.lora_id: version for version in (here.published.versions if here.published is not None else ())}
    current = {target.lora_id for target in here.targets}

    def version_here(version: NameVersion) -> NameVersion:
        """The version as it is here, or as one that the name has had here since now."""
        superseded_at = None if version.lora_id in current else now
        fresh = replace(version, registered_at=now, pointed_at=now, superseded_at=superseded_at)
        return known.get(version.lora_id, fresh)

    before = here.published or Publication(published_at=now)
    versions = tuple(version_here(version) for version in theirs.versions if version.lora_id in registered)
    next_number = max(theirs.next_number, before.next_number, *(v.number + 1 for v in versions), 1)
    record = replace(
        theirs,
        versions=versions,
        next_number=next_number,
        published_at=before.published_at,
        used_at=before.used_at,
        deleted_at=None,
    )
    return replace(here, published=record)


def without_versions(record: Publication, gone: Container[str]) -> Publication:
    """The record without these versions, whose bytes count as dropped unless another version has them."""
    kept = tuple(version for version in record.versions if version.lora_id not in gone)
    held = {version.digest for version in kept}
    dropped = [*record.dropped, *(version.digest for version in record.versions if version.lora_id in gone)]
    latest = tuple(digest for digest in dict.fromkeys(dropped) if digest not in held)
    return replace(record, versions=kept, dropped=latest[-MOST_DROPPED:])


def retired_versions(
    record: Publication,
    targets: Collection[str],
    policy: PlacementPolicy,
    now: float,
    busy: Container[str] = (),
) -> tuple[str, ...]:
    """lora_ids of the versions that are to be drained and deleted: too many, too old, or of a publish that failed.

    targets  lora_ids that some name points at, or is about to: they are never retired
    busy     lora_ids with requests that wait or run: they stay, but not for longer than `MOST_LINGER_S`
    """
    keep, stale_s = kept_count(record, policy), stale_after_s(record, policy)
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


def last_used_at(record: Publication, last_asked_at: float | None) -> float:
    """Unix time at which somebody last published the name or asked for it."""
    registered = [version.registered_at for version in record.versions]
    return max(record.published_at, record.used_at, last_asked_at or 0.0, *registered)


def is_unused(record: Publication, last_asked_at: float | None, policy: PlacementPolicy, now: float) -> bool:
    """Whether nobody has published the name, or asked for it, in the policy's `unused_name_s`."""
    return bool(policy.unused_name_s) and now - last_used_at(record, last_asked_at) >= policy.unused_name_s


def is_trained(record: Publication, policy: PlacementPolicy, now: float) -> bool:
    """Whether another version of the name is to be expected: it had several, the last one in `scale_down_after_s`."""
    return record.next_number > 2 and now - record.published_at < policy.scale_down_after_s


def current_versions(names: Iterable[ServedName]) -> dict[str, str]:
    """Published name -> lora_id of the version that its requests get, of the names that have one."""
    return {name.name: name.targets[0].lora_id for name in names if name.published is not None and name.targets}


def meant_workers(
    workers: Iterable[ObservedWorker], base_model: str | None, rank: int, replicas: Replicas
) -> tuple[frozenset[str], int]:
    """Workers that may get a version, and how many of them must have it before its name may point at it."""

    def is_open(worker: ObservedWorker) -> bool:
        """Whether the worker may get the version."""
        return worker.has_agent and worker.drain is None and worker.can_accept(base_model, rank)

    able = frozenset(worker.id for worker in workers if is_open(worker))
    return able, _needed_count(replicas, len(able))


def _needed_count(replicas: Replicas, able: int) -> int:
    """How many of these workers must have a version before its name may point at it."""
    return able if replicas == "all" else min(replicas, able)


def with_published_floors(
    intent: Intent,
    names: Iterable[ServedName],
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
    names          all names; those that are not published need nothing
    last_asked_at  name -> when a request for it came last; by the clock of `Publication.published_at`
    awaited        lora_ids of versions that were published before, and that publishes wait for again
    idle           names that nobody has used of late
    trained        names of which another version is to be expected soon
    """
    asked = last_asked_at or {}
    published = [(name, name.published) for name in names if name.published is not None]
    if not published:
        return intent
    order = sorted(published, key=lambda each: (-last_used_at(each[1], asked.get(each[0].name)), each[0].name))
    wanted = list(_needed_versions(order, intent, awaited))
    current = {needed.adapter.lora_id for needed in wanted}
    slots: dict[str, _SlotsTaken] = {}
    has_next = {needed.adapter.base_model for needed in wanted if needed.is_awaited}
    raised: dict[str, RegisteredAdapter] = {}
    for adapter, name, replicas, is_awaited in wanted:
        if name in idle and not is_awaited:
            continue
        able, count = meant_workers(workers, adapter.base_model, adapter.rank or 0, replicas)
        sizes = [usable_slots(worker.slots, reserve_slots) for worker in workers if worker.id in able]
        taken = slots.setdefault(adapter.base_model or "", _SlotsTaken())
        if count and taken.take(count, sizes):
            own = adapter.policy
            most = max(count, most_replicas if own.max_replicas is None else own.max_replicas)
            least = min(most, max(count, own.min_replicas or 0))
            raised[adapter.lora_id] = adapter.with_policy(min_replicas=least, max_replicas=most)
        if count and name in trained and adapter.base_model not in has_next:
            has_next.add(adapter.base_model)  # one for all trainers: few publish in the same moment
            taken.take(count, sizes)
    superseded = frozenset().union(*(record.lora_ids for _, record in published)) - current
    return replace(intent.with_raised(raised), superseded=superseded)


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
    name: str
    replicas: Replicas
    is_awaited: bool


def _needed_versions(
    order: Sequence[tuple[ServedName, Publication]], intent: Intent, awaited: Container[str]
) -> Iterator[_NeededVersion]:
    """Versions that publishes wait for, then those that names point at; each in the order of the names."""
    for name, record in order:
        for version in record.versions:
            is_awaited = version.pointed_at is None or version.lora_id in awaited
            if is_awaited and (found := intent.adapters.get(version.lora_id)) is not None:
                yield _NeededVersion(found, name.name, record.spec.replicas, is_awaited=True)
    for name, record in order:
        own = {version.lora_id for version in record.versions if version.pointed_at is not None}
        for target in name.targets:
            if target.lora_id in own and (found := intent.adapters.get(target.lora_id)) is not None:
                yield _NeededVersion(found, name.name, record.spec.replicas, is_awaited=False)


# -- what a publish waits for ------------------------------------------------------------------------------------


def may_become_visible(code: str, since_s: float) -> bool:
    """Whether bytes that an agent refuses with this code may be right a moment later.

    since_s  seconds since the publish began
    """
    return code in UNSEEN_CODES or (code in TORN_CODES and since_s < TORN_S)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far the loads of a version are.

    ready    workers on which it is ready, of those that count
    lacking  the others that count
    refused  the failure that no repetition mends; None without one
    """

    ready: frozenset[str]
    lacking: frozenset[str]
    is_done: bool
    refused: AdapterFailure | None


def load_progress(
    lora_id: str,
    able: Collection[str],
    replicas: Replicas,
    ready: Collection[str],
    failures: Mapping[Pair, AdapterFailure],
    content_codes: Collection[str],
) -> LoadProgress:
    """How far the loads of a version are on the workers that may have it.

    able           workers that may have it: those that were there when the publish began, and still are
    replicas       how many of them must have it
    content_codes  codes about an adapter's bytes: other workers have the same bytes
    """
    counted = frozenset(able)
    found = counted.intersection(ready)
    needed = _needed_count(replicas, len(counted))
    refusals = (failures.get((lora_id, worker_id)) for worker_id in ("", *sorted(counted - found)))
    refused = next(
        (
            failure
            for failure in refusals
            if failure is not None and (failure.code in content_codes or failure.code in ENGINE_REFUSALS)
        ),
        None,
    )
    return LoadProgress(found, counted - found, bool(needed) and len(found) >= needed, refused)
