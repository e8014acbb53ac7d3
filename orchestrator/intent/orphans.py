"""Orphans: adapters that workers hold and the store does not know. They are kept, listed, and adopted on request.

Orphans remain when a store was lost, restored from a backup, or exchanged for another one. Others come from clients
that call an engine's own load route: those are foreign, because the engine has them under a name of the client's.
An adopted foreign one is registered, loaded under the fleet's engine name, and then unloaded under the old name.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from orchestrator.core.errors import NotFound, OrchestratorError, StateConflict
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.model.adapter_documents import AdoptRequest, BatchResult, OrphanItem
from orchestrator.model.adapters import AdapterSpec, RegisteredAdapter
from orchestrator.model.names import checked_lora_id
from orchestrator.model.snapshot import OCCUPYING, foreign_key
from orchestrator.reconcile.worker_reports import WorkerReports, is_foreign
from orchestrator.store.store import IntentStore
from workers.wire import WorkerAdapter


def is_orphan(lora: WorkerAdapter, store: IntentStore) -> bool:
    """Whether an adapter on a worker is not registered. One whose registration has no digest yet may be meant."""
    if is_foreign(lora):
        return not store.intent.is_deleted(foreign_key(lora.engine_name), _known_digest(lora))
    known = store.adapters.get(lora.lora_id)
    if known is not None:
        return known.digest is not None and known.digest != lora.digest
    return not store.intent.is_deleted(lora.lora_id, lora.digest)


def orphans(reports: WorkerReports, store: IntentStore) -> list[OrphanItem]:
    """All orphans, by lora_id and digest, each with the workers that hold it."""
    found: dict[tuple[str, str, bool], list[tuple[str, WorkerAdapter]]] = {}
    for worker_id, entry in sorted(reports.workers.items()):
        if entry.reach != "lost":
            for lora in entry.report.lora.loaded_loras:
                if lora.state in OCCUPYING and is_orphan(lora, store):
                    key = lora.lora_id, _known_digest(lora), is_foreign(lora)
                    found.setdefault(key, []).append((worker_id, lora))
    digests: dict[str, set[str]] = {}
    for lora_id, digest, _ in found:
        digests.setdefault(lora_id, set()).add(digest)
    return [_orphan_item(copies, len(digests[key[0]]), store) for key, copies in sorted(found.items())]


def adopt(
    ask: AdoptRequest, reports: WorkerReports, store: IntentStore, registry: AdapterRegistry, actor: str
) -> list[BatchResult]:
    """Register orphans under their own lora_ids; one result each. Those that are ours already are not moved.

    Copies that other clients loaded are to leave the engines when the adapter is ready under its own engine name.
    """
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
        spec = AdapterSpec(
            lora_id=item.lora_id,
            source=item.card.source,
            base_model=item.card.base_model or None,
            digest=item.card.digest or None,
            tenants=tenants,
        )
        adapter = RegisteredAdapter(spec=spec, card=item.card if item.card.rank else None)
        registry.adopt(adapter, actor, replaces=item.engine_name if item.is_foreign else None)
    except OrchestratorError as exc:
        return BatchResult(lora_id=item.lora_id, status=exc.status, code=exc.code, error=str(exc))
    return BatchResult(lora_id=item.lora_id, status=201)


def _missing_results(asked: Iterable[str], present: set[str]) -> Iterator[BatchResult]:
    """Error results for requested ids that are no orphans."""
    for lora_id in asked:
        if lora_id not in present:
            error = NotFound(f"no worker holds an orphan {lora_id!r}; GET /v1/orphans lists them", code="not_adoptable")
            yield BatchResult(lora_id=lora_id, status=error.status, code=error.code, error=str(error))


def _orphan_item(copies: list[tuple[str, WorkerAdapter]], versions: int, store: IntentStore) -> OrphanItem:
    """One orphan as wire model. `versions`: number of digests under its lora_id."""
    lora = next((lora for _, lora in copies if lora.source), copies[0][1])
    return OrphanItem(
        lora_id=lora.lora_id,
        card=replace(lora.card, digest=_known_digest(lora)),
        engine_name=lora.engine_name,
        workers=tuple(worker_id for worker_id, _ in copies),
        is_foreign=is_foreign(lora),
        problem=_register_problem(lora, versions, store),
    )


def _register_problem(lora: WorkerAdapter, versions: int, store: IntentStore) -> str | None:
    """Why the orphan cannot be registered as it is; None when it can."""
    known, digest = store.adapters.get(lora.lora_id), _known_digest(lora)
    if known is not None and is_foreign(lora) and known.digest == digest and not known.is_deleting:
        return None  # the same bytes under another engine name
    if known is not None:
        return f"{lora.lora_id!r} is registered with digest {known.digest}; this is {digest or 'unknown'}"
    if versions > 1:
        return f"workers hold {versions} digests of {lora.lora_id!r}; register the one that is meant"
    if is_foreign(lora) and lora.error:
        return f"another client loaded it, and its worker cannot read its files: {lora.error}"
    if is_foreign(lora) and lora.source.startswith("hf://"):
        pass  # inspected once it is registered
    elif is_foreign(lora) and not digest:
        return (
            "the digest of its files is not known yet: its agent reads them within seconds of the load, so try again;"
            " for an engine without an agent register it by hand, with its digest"
        )
    elif not digest or not lora.source or not lora.base_model:
        return "the worker does not say which source, digest and base model it has; register it by hand"
    try:
        checked_lora_id(lora.lora_id)
    except ValueError as exc:
        return str(exc)
    return None


def _known_digest(lora: WorkerAdapter) -> str:
    """The digest of the adapter, or of the files of one that another client loaded; "" while it is not known."""
    return lora.digest or lora.files_digest
