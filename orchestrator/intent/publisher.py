"""Publishing: the next version of a name, copied, loaded on every worker meant, and only then pointed at.

`publish` either leaves the name at the new version, or as it was. Whoever is interrupted may repeat the call: it goes
on with the version that the interrupted one has made. Passes load the version, as they do any adapter with a minimum
of replicas; `VersionRetention` deletes what no publish has finished.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog

from lorafleet.identity import fleet_source
from lorafleet.keys.roles import Caller
from lorafleet.service.times import unix_text
from orchestrator.core.errors import (
    InvalidAdapter,
    OrchestratorError,
    OrchestratorRequestError,
    PublishUnfinished,
    StateConflict,
)
from orchestrator.core.failures import CONTENT_CODES
from orchestrator.core.published_names import (
    kept_count,
    load_progress,
    meant_workers,
    stale_after_s,
    with_next_version,
)
from orchestrator.core.source_rules import secret_part, without_secrets
from orchestrator.intent import owners
from orchestrator.intent.bytes_copier import BytesCopier, PublishDeadline
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.model.adapters import RegisteredAdapter
from orchestrator.model.cards import large_growth
from orchestrator.model.names import checked_published_name
from orchestrator.model.policy import AdapterPolicy
from orchestrator.model.published import PublishedItem, PublishedStatus, PublishedVersion, PublishSpec
from orchestrator.model.served_names import AliasTarget, NameVersion, Publication, PublishedSpec, ServedName
from orchestrator.reconcile.actor import require_usual_weights
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.store.store import IntentStore

log = structlog.get_logger()

_RETRY_S = 1.0
"""A load that failed for a reason of the moment is repeated so often."""
_LOOK_S = 0.5
"""Loads are looked at so often, besides at every event of the catalog."""


class NamePublisher:
    """Publishes versions under names, and deletes names. Publishes of one name run one after another."""

    def __init__(
        self,
        registry: AdapterRegistry,
        reconciler: Reconciler,
        metrics: OrchestratorMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._reconciler = reconciler
        self._store = store = reconciler.store
        self._metrics = metrics
        self._copier = BytesCopier(reconciler)
        metrics.published_names.set_function(
            lambda: sum(each.deleted_at is None for each in _stored_publications(store))
        )
        metrics.published_versions.set_function(lambda: sum(len(each.versions) for each in _stored_publications(store)))
        self._clock = clock
        self._wall = wall
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()

    async def publish(self, name: str, spec: PublishSpec, caller: Caller) -> PublishedItem:
        """Make the bytes the name's version, and return the name once every router sends requests to it.

        The bytes of a version that the name still has are pointed at again. On an error the name points where it did.
        Two things may stay: settings that the spec gave, and for a while a version whose loads were too slow, so that
        the call can be repeated. Counts and logs the outcome.

        Raises OrchestratorRequestError for a wrong name or source, StateConflict for a name that is another's,
        InvalidAdapter for wrong bytes, PublishUnfinished when the time is over, and OrchestratorUnavailable without a
        worker, store or leader.
        """
        began_at = self._clock()
        try:
            item = await self._publish(name, spec, caller)
        except OrchestratorError as exc:
            is_refused = isinstance(exc, OrchestratorRequestError | InvalidAdapter)
            is_late = isinstance(exc, PublishUnfinished)
            self._metrics.publishes.labels("unfinished" if is_late else "refused" if is_refused else "failed").inc()
            log.warning("name not published", name=name, code=exc.code, error=str(exc), asked_by=caller.name)
            raise
        self._metrics.publishes.labels("new" if item.status.is_new else "same").inc()
        self._metrics.publish_seconds.observe(self._clock() - began_at)
        return item

    async def _publish(self, name: str, spec: PublishSpec, caller: Caller) -> PublishedItem:
        """Publish; raises as `publish`."""
        self._require_publishable(name, spec, caller)
        now = self._clock()
        deadline = PublishDeadline(now, now + spec.timeout_s, self._clock)
        async with self._turn(name, deadline):
            self._require_publishable(name, spec, caller)
            found = await self._copier.copied(name, self._next_id(name), spec, deadline)
            # Another call may have taken the name while the bytes were copied.
            self._require_publishable(name, spec, caller)
            self._require_expected(name, spec, found)
            version, is_new = await self._registered(name, spec, found, caller)
            # Until its loads are done they are the caller's in the history; those of later workers are the fleet's.
            self._reconciler.audit.note_requester(version.lora_id, caller.name)
            # A version that the name has left may be loaded nowhere any more.
            self._reconciler.retention.awaited.add(version.lora_id)
            try:
                await self._wait_for_loads(name, version, deadline)
            finally:
                self._reconciler.retention.awaited.discard(version.lora_id)
                self._reconciler.audit.forget_requester(version.lora_id)
            revision = await self._point(name, version, caller, is_new=is_new)
            self._require_there(name, version.lora_id)
            log.info("name published", name=name, lora_id=version.lora_id, is_new=is_new, asked_by=caller.name)
            return self.item(name, is_new=is_new, revision=revision)

    async def delete(self, name: str, caller: Caller) -> None:
        """Delete the name and its versions: routers forget it at once, and what runs finishes.

        Raises NotFound, Forbidden, StateConflict while another alias points at one of its versions.
        """
        owners.require_write(self._store, caller, "published name", name, "change")
        record = self._store.publication_of(name) or Publication()
        users = [
            each.name
            for each in self._store.names.values()
            if each.name != name and any(target.lora_id in record.lora_ids for target in each.targets)
        ]
        if users:
            message = f"versions of {name!r} are targets of alias {', '.join(map(repr, users))}; change that first"
            raise StateConflict(message, code="in_use", param="name")
        self._reconciler.retention.delete_name(name, caller.name, "deleted")
        await self._reconciler.publish_change(("names", name))

    def require_own_bytes(self, spec: PublishSpec, caller: Caller) -> None:
        """Raise OrchestratorRequestError unless the caller may use the bytes that the digest names.

        A digest is no permission: a tenant names bytes by digest of adapters that it may use.
        """
        if spec.source is not None and spec.source.strip().lower().startswith("fleet:"):
            message = "a source may not be of the fleet's own bytes; name their `digest` without a `source`"
            raise OrchestratorRequestError(message, code="source_forbidden", param="source")
        param = "digest" if spec.source is None else "source"
        owners.require_own_bytes(self._store, caller, spec.source or fleet_source(str(spec.digest)), param)

    def item(self, name: str, *, is_new: bool = False, revision: int | None = None) -> PublishedItem:
        """The published name as wire model. The name must exist.

        revision  of the catalog that has it so; default: the present one
        """
        found, rules = self._store.names[name], self._store.rules
        record, current = found.published or Publication(), found.current_version
        adapter = current and self._store.adapters.get(current.lora_id)
        status = PublishedStatus(
            lora_id=current and current.lora_id,
            digest=current and current.digest,
            version=current and current.number,
            versions=tuple(map(_version_item, reversed(record.versions))),
            workers=tuple(self._reconciler.queries.ready_workers(current.lora_id)) if current else (),
            acceptance=self._reconciler.queries.acceptance(current.lora_id) if current else {},
            note=adapter.card.files_note if adapter and adapter.card else "",
            is_new=is_new,
            keep_versions=kept_count(record, rules),
            max_staleness_s=stale_after_s(record, rules),
            shadows_base=record.shadows_base,
            revision=self._reconciler.catalog.revision if revision is None else revision,
        )
        return PublishedItem(name=name, spec=record.spec, status=status)

    # -- stages ------------------------------------------------------------------------------------------------

    def _require_publishable(self, name: str, spec: PublishSpec, caller: Caller) -> None:
        """Raise OrchestratorRequestError or StateConflict when the caller may not publish this under the name."""
        owners.require_write(self._store, caller, "published name", name, "give")
        try:
            checked_published_name(name)
        except ValueError as exc:
            raise OrchestratorRequestError(str(exc), param="name") from exc
        if spec.source is not None and (part := secret_part(spec.source)) is not None:
            message = f"source {without_secrets(spec.source)} has {part} with it; give credentials to workers instead"
            raise OrchestratorRequestError(message, code="source_has_credentials", param="source")
        short = caller.short_name(name)
        if short in self._reconciler.reports.base_model_names() and not caller.may_shadow_base:
            message = (
                f"{short!r} is a base model that a worker serves; publish under its name below a run's own base URL,"
                " /runs/NAME, for that run alone, or with a key that has a `namespace` and `may_shadow_base: true`"
            )
            raise StateConflict(message, code="name_taken", param="name")
        if self._store.publication_of(name) is None:
            self._registry.require_free(name, "name")

    def _require_expected(self, name: str, spec: PublishSpec, found: RegisteredAdapter) -> None:
        """Raise StateConflict where the name is not at the version that the publish expects.

        Unless it has these bytes there: then the publish is a repeated one.
        """
        present = self._store.names.get(name)
        current = None if present is None else present.current_version
        number = 0 if current is None else current.number
        if spec.expected_version in (None, number) or (current is not None and current.digest == found.digest):
            return
        at = f"is at version {number}" if number else "has no version"
        expected = f"version {spec.expected_version}" if spec.expected_version else "no version yet"
        message = (
            f"{name!r} {at}, and the publish expected {expected}: nothing was changed; another one publishes it, too"
        )
        raise StateConflict(message, code="version_conflict", param="expected_version")

    @asynccontextmanager
    async def _turn(self, name: str, deadline: PublishDeadline) -> AsyncIterator[None]:
        """Hold the name's turn for the time of the block. Raises PublishUnfinished when it does not come in time."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._waiting[name] += 1
        try:
            try:
                async with asyncio.timeout(deadline.left_s):
                    await lock.acquire()
            except TimeoutError as exc:
                raise PublishUnfinished(
                    f"another publish of {name!r} is in progress; nothing was changed: repeat the call"
                ) from exc
            try:
                yield
            finally:
                lock.release()
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name], self._locks[name]

    async def _registered(
        self, name: str, spec: PublishSpec, found: RegisteredAdapter, caller: Caller
    ) -> tuple[NameVersion, bool]:
        """The version with these bytes, registered durably, and whether this call registered it.

        Raises InvalidAdapter for weights that the policy refuses, OrchestratorError when it cannot be stored.
        """
        assert found.digest is not None, "an inspection names the digest"
        now = self._wall()
        shadows = caller.short_name(name) in self._reconciler.reports.base_model_names()
        present = self._store.names.get(name) or ServedName(name=name)
        record = present.published or Publication(spec=PublishedSpec(tenant=caller.tenant))
        record = replace(record, spec=_with_settings(record.spec, spec), shadows_base=shadows, deleted_at=None)
        version, is_new = record.version_of(found.digest), False
        if version is not None and self._is_usable(version):
            record = replace(record, versions=tuple(_renewed_versions(record.versions, version, now)))
        else:
            is_new = True
            record, version = with_next_version(name, record, found.digest, self._taken_ids(), now)
        verified = self._with_weights_checked(found, present) if is_new else found
        with self._store.together():
            self._store.put_name(replace(present, published=record))
            if is_new:
                adapter = verified.with_spec(
                    lora_id=version.lora_id,
                    source=fleet_source(found.digest),
                    # Copies of a version that no name points at may make room: its name's settings alone count.
                    policy=AdapterPolicy(loading="lazy"),
                    tenants=None if record.spec.tenant is None else (record.spec.tenant,),
                )
                self._store.put_adapter(replace(adapter, pinned_source=None))
        self._reconciler.on_intent_changed()
        await self._store.wait_durable([("names", name), ("adapters", version.lora_id)])
        return version, is_new

    def _with_weights_checked(self, found: RegisteredAdapter, name: ServedName) -> RegisteredAdapter:
        """The inspected adapter, noted where its weights are far beyond those of the version that the name is at.

        Raises InvalidAdapter where the policy refuses them.
        """
        assert found.card is not None, "an inspection has a card"
        current = name.current_version
        known = None if current is None else self._store.adapters.get(current.lora_id)
        former = None if known is None else known.card
        try:
            require_usual_weights(found.card, self._store.rules.large_weights, former)
        except InvalidAdapter as exc:
            raise InvalidAdapter(f"{exc}; {name.name!r} is as it was", code=exc.code) from exc
        grown = "" if former is None else large_growth(found.card, former)
        note = "; ".join(filter(None, (found.card.files_note, grown)))
        return replace(found, card=replace(found.card, files_note=note))

    def _is_usable(self, version: NameVersion) -> bool:
        """Whether the version is registered and may be loaded."""
        adapter = self._store.adapters.get(version.lora_id)
        return adapter is not None and not adapter.is_deleting and adapter.quarantine is None

    async def _wait_for_loads(self, name: str, version: NameVersion, deadline: PublishDeadline) -> None:
        """Wait until the version is ready on every worker meant. Raises InvalidAdapter, PublishUnfinished.

        A version that engines refuse is deleted at once.
        """
        reconciler, lora_id = self._reconciler, version.lora_id
        meant, mended_at = self._able_workers(version), self._clock()
        while True:
            await reconciler.leadership.confirm_leading()
            record = self._require_there(name, lora_id)
            able = meant & self._able_workers(version)
            progress = load_progress(
                lora_id,
                able,
                record.spec.replicas,
                reconciler.queries.ready_workers(lora_id),
                reconciler.operations.failures.by_pair,
                CONTENT_CODES,
            )
            if progress.is_done:
                return
            if progress.refused is not None:
                await self._take_back(name, version)
                raise InvalidAdapter(f"{progress.refused.message}; {name!r} is as it was", code=progress.refused.code)
            if deadline.left_s <= 0:
                raise PublishUnfinished(self._load_lack(name, lora_id, progress.ready, progress.lacking, deadline))
            if not able:
                meant = self._able_workers(version)
            if self._clock() - mended_at >= _RETRY_S:
                # A failure of the moment blocks a worker for a minute, and here a trainer waits.
                mended_at = self._clock()
                for worker_id in progress.lacking:
                    reconciler.operations.failures.record_success((lora_id, worker_id))
                reconciler.request_pass()
            await reconciler.catalog.changed.wait(min(deadline.left_s, _LOOK_S))

    def _require_there(self, name: str, lora_id: str) -> Publication:
        """The name, which another call may have deleted while this one waited. Raises StateConflict."""
        record = self._store.publication_of(name)
        if record is None or record.deleted_at is not None or lora_id not in self._store.adapters:
            raise StateConflict(
                f"{name!r} was deleted while it was published; publish it again", code="name_deleted", param="name"
            )
        return record

    def _load_lack(
        self, name: str, lora_id: str, ready: frozenset[str], lacking: frozenset[str], deadline: PublishDeadline
    ) -> str:
        """What a publish lacks whose time is over, in words."""
        where = ", ".join(sorted(lacking)) or "any worker"
        why = self._reconciler.queries.last_error(lora_id)
        why = why or self._reconciler.queries.last_pass.desired.unplaced.get(lora_id)
        reason = f": {why}" if why else ": no free slot there, or a load takes longer (engines need max_cpu_loras > 1)"
        return (
            f"{lora_id} is ready on {len(ready)} workers and not on {where} after {deadline.since_s:.0f} s{reason};"
            f" {name!r} is as it was, and the same call goes on where this one ended"
        )

    def _able_workers(self, version: NameVersion) -> frozenset[str]:
        """Workers that may get the version now."""
        adapter = self._store.adapters.get(version.lora_id)
        if adapter is None:
            return frozenset()
        workers = self._reconciler.queries.observe().workers.values()
        return meant_workers(workers, adapter.base_model, adapter.rank or 0, "all")[0]

    async def _take_back(self, name: str, version: NameVersion) -> None:
        """Delete a version that cannot be used, unless the name points at it."""
        if self._store.publication_of(name) is not None and version.pointed_at is None:
            self._reconciler.retention.drop_versions(name, {version.lora_id})
            self._reconciler.on_intent_changed()

    async def _point(self, name: str, version: NameVersion, caller: Caller, *, is_new: bool) -> int:
        """Point the name at the version, end a rollout of it, and wait until that is durable and routers go by it.

        Returns the catalog's revision that has it so.

        Older versions stay: `VersionRetention` retires them in a pass. Raises LeaseLost, and what the store raises.
        """
        if self._store.targets_of(name) != (AliasTarget(version.lora_id),):
            await self._reconciler.leadership.confirm_leading()
            self._reconciler.names.point_at_version(name, version, caller.name, is_new=is_new)
        return await self._reconciler.publish_change(("names", name))

    def _next_id(self, name: str) -> str:
        """lora_id of the name's next version, if its bytes are new."""
        known = self._store.publication_of(name) or Publication()
        return with_next_version(name, known, "", self._taken_ids(), 0.0)[1].lora_id

    def _taken_ids(self) -> frozenset[str]:
        """lora_ids that a new version may not get: registered ones, and those that workers hold."""
        held = {
            lora.lora_id
            for entry in self._reconciler.reports.workers.values()
            for lora in entry.report.lora.loaded_loras
        }
        return frozenset(held | self._store.adapters.keys())


def _stored_publications(store: IntentStore) -> Iterator[Publication]:
    """What the store has of each published name, deleted ones too."""
    return (name.published for name in store.names.values() if name.published is not None)


def _with_settings(kept: PublishedSpec, spec: PublishSpec) -> PublishedSpec:
    """How the name is kept, with the settings that the publish names."""
    given = {field: getattr(spec, field) for field in spec.model_fields_set & {"keep_versions", "max_staleness_s"}}
    return replace(kept, replicas=spec.replicas or kept.replicas, **given)


def _renewed_versions(versions: tuple[NameVersion, ...], version: NameVersion, now: float) -> Iterator[NameVersion]:
    """The versions, with a fresh time for this one if its publish has not finished: this one may take as long."""
    for each in versions:
        is_renewed = each.lora_id == version.lora_id and each.pointed_at is None
        yield replace(each, registered_at=now) if is_renewed else each


def _version_item(version: NameVersion) -> PublishedVersion:
    """A version as REST answers it."""
    return PublishedVersion(
        lora_id=version.lora_id,
        version=version.number,
        digest=version.digest,
        published_at=None if version.pointed_at is None else unix_text(version.pointed_at),
        superseded_at=None if version.superseded_at is None else unix_text(version.superseded_at),
    )
