"""Orphans: adapters that workers have and the store does not know. They are kept, listed and adopted.

Those that the operator's own settings name are adopted at once (`adopt` of the policy), others on request. Orphans
remain when a store was lost, restored from a backup, or exchanged for another one. Others come from clients that call
an engine's own load route: those are foreign, because the engine has them under a name of the client's. An adopted
foreign one is registered, loaded under the fleet's engine name, and then unloaded under the old name.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import structlog

from orchestrator.core.adoption import adopted_adapter, judged, to_adopt
from orchestrator.core.errors import NotFound, OrchestratorError, StateConflict
from orchestrator.model.adapter_documents import AdoptRequest, BatchResult
from orchestrator.model.orphans import OrphanItem
from orchestrator.model.snapshot import OCCUPYING, foreign_key
from orchestrator.reconcile.served_names import name_problem
from orchestrator.reconcile.worker_reports import WorkerReports, is_foreign
from orchestrator.store.store import NOBODY, IntentStore
from workers.wire import WorkerAdapter

log = structlog.get_logger()


def is_orphan(lora: WorkerAdapter, store: IntentStore) -> bool:
    """Whether an adapter on a worker is not registered. One whose registration has no digest yet may be meant."""
    digest, is_deleted = known_digest(lora), store.intent.is_deleted
    if is_foreign(lora):
        was_deleted = lora.is_configured and is_deleted(lora.lora_id, digest)
        return not (was_deleted or is_deleted(foreign_key(lora.engine_name), digest))
    known = store.adapters.get(lora.lora_id)
    if known is not None:
        return known.digest is not None and known.digest != digest
    return not is_deleted(lora.lora_id, digest)


def orphans(reports: WorkerReports, store: IntentStore, *, is_configured: bool | None = None) -> list[OrphanItem]:
    """All orphans, by lora_id and digest, each with the workers that have it.

    is_configured  only those that settings name, or only the others; None: all
    """
    found: dict[tuple[str, str, bool], dict[str, WorkerAdapter]] = {}
    for worker_id, lora in _candidates(reports):
        if is_configured in (None, lora.is_configured) and is_orphan(lora, store):
            key = lora.lora_id, known_digest(lora), is_foreign(lora)
            found.setdefault(key, {}).setdefault(worker_id, lora)
    items = [_orphan_item(copies, reports) for _, copies in sorted(found.items())]
    return judged(items, store.adapters, partial(name_problem, store, reports))


def _candidates(reports: WorkerReports) -> Iterator[tuple[str, WorkerAdapter]]:
    """(worker_id, adapter) of all that workers hold in a slot, and all that their settings name.

    Not what an engine had at its start that loads nothing else: routers serve that under the engine's own names.
    """
    for worker_id, entry in reports.workers.items():
        if entry.reach != "lost":
            held = (lora for lora in entry.report.lora.loaded_loras if lora.state in OCCUPYING)
            for lora in (*held, *reports.configured_adapters(entry)):
                if entry.report.lora.enabled or not (lora.is_configured and is_foreign(lora)):
                    yield worker_id, lora


def adopt_by_policy(reports: WorkerReports, store: IntentStore) -> list[OrphanItem]:
    """Register the orphans that the policy's `adopt` names; returns them. Those with a problem stay orphans.

    What settings name is for everyone, as an operator's adapter without tenants; anything else is for no tenant. The
    deletion of an adapter that settings name still is not forgotten.
    """
    rule = store.rules.adopt
    if rule == "none":
        return []
    for _, lora in _candidates(reports):
        if lora.is_configured and lora.lora_id in store.tombstones:
            store.renew_tombstone(lora.lora_id, known_digest(lora))
    adopted = to_adopt(orphans(reports, store, is_configured=True if rule == "configured" else None), rule)
    with store.together():
        for item in adopted:
            _register(item, None if item.is_configured else (), store, NOBODY, is_adopted=item.is_configured)
    return adopted


def adopt(ask: AdoptRequest, reports: WorkerReports, store: IntentStore, actor: str) -> list[BatchResult]:
    """Register orphans under their own lora_ids; one result each. Those that are ours already are not moved.

    Copies that other clients loaded are to leave the engines when the adapter is ready under its own engine name.
    """
    present = orphans(reports, store)
    wanted = present if ask.lora_ids is None else [item for item in present if item.lora_id in set(ask.lora_ids)]
    with store.together():
        results = [_adopt_one(item, ask.tenants, store, actor) for item in wanted]
    return [*results, *_missing_results(ask.lora_ids or (), {item.lora_id for item in present})]


def _adopt_one(item: OrphanItem, tenants: tuple[str, ...] | None, store: IntentStore, actor: str) -> BatchResult:
    """Register one orphan with its reported source, digest and rank: status 201. An error becomes its result."""
    try:
        if item.problem is not None:
            raise StateConflict(item.problem, code="not_adoptable")
        _register(item, tenants, store, actor, is_adopted=False)
    except OrchestratorError as exc:
        return BatchResult(lora_id=item.lora_id, status=exc.status, code=exc.code, error=str(exc))
    return BatchResult(lora_id=item.lora_id, status=201)


def _register(
    item: OrphanItem, tenants: tuple[str, ...] | None, store: IntentStore, actor: str, *, is_adopted: bool
) -> None:
    """Store an orphan without a problem, with a history entry. Nothing is loaded.

    The engine's own name of a foreign one is to leave the workers, once it can.
    """
    adapter = adopted_adapter(item, tenants, is_adopted=is_adopted)
    with store.together():
        if item.is_foreign:
            store.put_tombstone(foreign_key(item.engine_name), adapter.digest or "")
        if item.lora_id not in store.adapters:
            store.put_adapter(adapter)
        body = {name: getattr(adapter, name) for name in ("source", "base_model", "digest", "tenants")}
        why = {"named_by": item.workers} if item.is_configured else {"held_by": item.workers}
        store.record("adapter_adopted", item.lora_id, body | why, actor)
    log.info(
        "adapter adopted", lora_id=item.lora_id, digest=item.card.digest, source=item.card.source, workers=item.workers
    )


def _missing_results(asked: Iterable[str], present: set[str]) -> Iterator[BatchResult]:
    """Error results for requested ids that are no orphans."""
    for lora_id in asked:
        if lora_id not in present:
            error = NotFound(f"no worker holds an orphan {lora_id!r}; GET /v1/orphans lists them", code="not_adoptable")
            yield BatchResult(lora_id=lora_id, status=error.status, code=error.code, error=str(error))


def _orphan_item(copies: dict[str, WorkerAdapter], reports: WorkerReports) -> OrphanItem:
    """One orphan, by what the workers say that have it.

    What settings name is of its worker's base model once it has passed that worker's checks; a faulty one is of none.
    """
    worker_id, lora = next(((name, lora) for name, lora in copies.items() if lora.source), next(iter(copies.items())))
    is_checked = lora.is_configured and bool(known_digest(lora))
    base_model = reports.workers[worker_id].report.model.base_model if is_checked else lora.base_model
    return OrphanItem(
        lora_id=lora.lora_id,
        card=replace(lora.card, digest=known_digest(lora), base_model=base_model),
        engine_name=lora.engine_name,
        workers=tuple(copies),
        is_foreign=is_foreign(lora),
        is_configured=any(copy.is_configured for copy in copies.values()),
        error=lora.error,
    )


def known_digest(lora: WorkerAdapter) -> str:
    """The digest of the adapter, or of the files of one that another client loaded; "" while it is not known."""
    return lora.digest or lora.files_digest
