"""Orphans: adapters that workers hold and the store does not know. They are kept, listed, and adopted on request.

Orphans remain when a store was lost, restored from a backup, or exchanged for another one.
"""

from collections.abc import Iterable, Iterator

from orchestrator.core.errors import NotFound, OrchestratorError, StateConflict
from orchestrator.core.state import OCCUPYING, RegisteredAdapter
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.reconcile.worker_reports import WorkerReports
from orchestrator.store.store import IntentStore
from orchestrator.wire import AdoptRequest, BatchResult, OrphanItem, checked_lora_id
from workers.wire import LoadedLora


def is_orphan(lora: LoadedLora, store: IntentStore) -> bool:
    """Whether an adapter on a worker is not registered. One whose registration has no digest yet may be meant."""
    known = store.adapters.get(lora.lora_id)
    if known is not None:
        return known.digest is not None and known.digest != lora.digest
    return not store.intent.is_deleted(lora.lora_id, lora.digest)


def orphans(reports: WorkerReports, store: IntentStore) -> list[OrphanItem]:
    """All orphans, by lora_id and digest, each with the workers that hold it."""
    found: dict[tuple[str, str], list[tuple[str, LoadedLora]]] = {}
    for worker_id, entry in sorted(reports.workers.items()):
        if entry.reach != "lost":
            for lora in entry.report.lora.loaded_loras:
                if lora.state in OCCUPYING and is_orphan(lora, store):
                    found.setdefault((lora.lora_id, lora.digest), []).append((worker_id, lora))
    digests: dict[str, int] = {}
    for lora_id, _ in found:
        digests[lora_id] = digests.get(lora_id, 0) + 1
    return [_orphan_item(copies, digests[lora_id], store) for (lora_id, _), copies in sorted(found.items())]


def adopt(
    ask: AdoptRequest, reports: WorkerReports, store: IntentStore, registry: AdapterRegistry, actor: str
) -> list[BatchResult]:
    """Register orphans under their own lora_ids, without loading or unloading anything; one result each."""
    present = orphans(reports, store)
    wanted = present if ask.lora_ids is None else [item for item in present if item.lora_id in set(ask.lora_ids)]
    with store.together():
        results = [_adopt_one(item, ask.tenants, registry, actor) for item in wanted]
    return [*results, *_missing_results(ask.lora_ids or (), {item.lora_id for item in present})]


def _adopt_one(item: OrphanItem, tenants: tuple[str, ...] | None, registry: AdapterRegistry, actor: str) -> BatchResult:
    """Register one orphan with its reported source, digest and rank: status 201. An error becomes its result."""
    try:
        if item.problem is not None:
            raise StateConflict(item.problem, code="not_adoptable")
        registry.adopt(
            RegisteredAdapter(
                lora_id=item.lora_id,
                source=item.source,
                base_model=item.base_model,
                digest=item.digest,
                rank=item.rank,
                size_bytes=item.size_bytes,
                tenants=None if tenants is None else tuple(sorted(set(tenants))),
            ),
            actor,
        )
    except OrchestratorError as exc:
        return BatchResult(lora_id=item.lora_id, status=exc.status, code=exc.code, error=str(exc))
    return BatchResult(lora_id=item.lora_id, status=201)


def _missing_results(asked: Iterable[str], present: set[str]) -> Iterator[BatchResult]:
    """Error results for requested ids that are no orphans."""
    for lora_id in asked:
        if lora_id not in present:
            error = NotFound(f"no worker holds an orphan {lora_id!r}; GET /v1/orphans lists them", code="not_adoptable")
            yield BatchResult(lora_id=lora_id, status=error.status, code=error.code, error=str(error))


def _orphan_item(copies: list[tuple[str, LoadedLora]], versions: int, store: IntentStore) -> OrphanItem:
    """One orphan as wire model. `versions`: number of digests under its lora_id."""
    lora = next((lora for _, lora in copies if lora.source), copies[0][1])
    return OrphanItem(
        lora_id=lora.lora_id,
        digest=lora.digest,
        engine_name=lora.engine_name,
        base_model=lora.base_model,
        rank=lora.rank,
        size_bytes=lora.size_bytes or None,
        source=lora.source,
        workers=tuple(worker_id for worker_id, _ in copies),
        problem=_problem(lora, versions, store),
    )


def _problem(lora: LoadedLora, versions: int, store: IntentStore) -> str | None:
    """Why the orphan cannot be registered as it is; None when it can."""
    known = store.adapters.get(lora.lora_id)
    if known is not None:
        return f"{lora.lora_id!r} is registered with digest {known.digest}; this is {lora.digest or 'unknown'}"
    if versions > 1:
        return f"workers hold {versions} digests of {lora.lora_id!r}; register the one that is meant"
    if not lora.digest or not lora.source or not lora.base_model:
        return "the worker does not say which source, digest and base model it has; register it by hand"
    try:
        checked_lora_id(lora.lora_id)
    except ValueError as exc:
        return str(exc)
    return None
