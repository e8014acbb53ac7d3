"""What a router keeps of the orchestrator's catalog, and adapters that only engines without an agent list."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from lorafleet.identity import CacheScope, engine_name
from orchestrator.model.catalog import Catalog, CatalogAdapter, CatalogAlias, CatalogWorker
from orchestrator.model.changes import reader_of
from orchestrator.model.names import checked_lora_id
from orchestrator.model.pauses import PauseLease
from workers.wire import Metadata, WorkerAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCatalog:
    """The catalog at one revision.

    adapters  by lora_id, without those that are being deleted; these are in `deleting`
    draining  worker id -> engine names that take no new requests on that worker
    """

    revision: int = 0
    adapters: Mapping[str, CatalogAdapter] = field(default_factory=dict)
    aliases: Mapping[str, CatalogAlias] = field(default_factory=dict)
    deleting: frozenset[str] = frozenset()
    draining: Mapping[str, frozenset[str]] = field(default_factory=dict)
    workers: tuple[CatalogWorker, ...] = ()
    pauses: tuple[PauseLease, ...] = ()
    cache: CacheScope = "tenant"

    def names(self) -> frozenset[str]:
        """All lora_ids and alias names, which no engine's own list can redefine."""
        return self.deleting.union(self.adapters, self.aliases)


def read_catalog(content: bytes) -> Catalog:
    """A catalog, or its changes, without fields that a later orchestrator may add. Raises pydantic.ValidationError."""
    catalog: Catalog = reader_of(Catalog).validate_json(content, extra="ignore")
    return catalog


def router_catalog(catalog: Catalog) -> RouterCatalog:
    """The router's form of a whole catalog."""
    return _with_entries(RouterCatalog(), catalog)


def with_changes(known: RouterCatalog, changes: Catalog) -> RouterCatalog | None:
    """The catalog after these changes, which may repeat what is known; None where some before them are missing."""
    if changes.since is None or changes.since > known.revision:
        return None
    return known if changes.revision <= known.revision else _with_entries(known, changes)


def _with_entries(known: RouterCatalog, changes: Catalog) -> RouterCatalog:
    """The catalog with these entries in place of those of the same names, and with these drains, workers and pauses."""
    deleting = {adapter.lora_id for adapter in changes.adapters if adapter.is_deleting}
    named = {adapter.lora_id for adapter in changes.adapters}.union(changes.gone_adapters)
    adapters = dict(known.adapters)
    for lora_id in deleting.union(changes.gone_adapters):
        adapters.pop(lora_id, None)
    adapters |= {a.lora_id: a for a in changes.adapters if not a.is_deleting}
    aliases = {name: alias for name, alias in known.aliases.items() if name not in changes.gone_aliases}
    aliases |= {alias.name: alias for alias in changes.aliases}
    return RouterCatalog(
        revision=changes.revision,
        adapters=MappingProxyType(adapters),
        aliases=MappingProxyType(aliases),
        deleting=frozenset((known.deleting - named) | deleting),
        draining=MappingProxyType(_draining_by_worker(changes)),
        workers=changes.workers,
        pauses=changes.pauses,
        cache=changes.cache,
    )


def _draining_by_worker(catalog: Catalog) -> dict[str, frozenset[str]]:
    """Worker id -> engine names that take no new requests on that worker."""
    names: dict[str, set[str]] = {}
    for entry in catalog.draining:
        names.setdefault(entry.worker_id, set()).add(engine_name(entry.lora_id, entry.digest))
    return {worker: frozenset(worker_names) for worker, worker_names in names.items()}


def discovered_adapters(
    reports: Iterable[Metadata], catalog_names: Container[str], *, has_orchestrator: bool = True
) -> Mapping[str, CatalogAdapter]:
    """Adapters that engines without an agent list and the catalog does not have, by lora_id.

    Every tenant may use them. Engine names that the fleet gave (`lora_id@digest12`) are left out: the catalog knows
    them. Without an orchestrator an agent gave them, and they answer for their lora_id, of several versions the first.
    Left out are names that `checked_lora_id` refuses, too: vLLM accepts names that would break our headers. If two base
    models list one name, the first base model has it. An engine that takes no adapters lists them with an error; such
    an entry counts only if no other engine has the name.

    catalog_names  of its adapters and aliases
    """
    adapters_by_id: dict[str, CatalogAdapter] = {}
    for report in reports:
        base_model = report.model.base_model
        for lora in report.lora.loaded_loras:
            if has_orchestrator and lora.engine_name != lora.lora_id:
                continue
            if lora.lora_id in catalog_names or not _is_lora_id(lora.lora_id):
                continue
            known = adapters_by_id.get(lora.lora_id)
            if known is None or _discovery_rank(base_model, lora.error) < _discovery_rank(
                known.base_model, known.error
            ):
                adapters_by_id[lora.lora_id] = CatalogAdapter(
                    lora_id=lora.lora_id,
                    base_model=base_model,
                    digest=None,
                    source=lora.source,
                    error=lora.error,
                    engine_name=lora.engine_name,
                )
    return adapters_by_id


def with_own_adapters(report: Metadata) -> Metadata:
    """An agent's report with those adapters alone that only its engine's own names serve.

    They are those that the engine had at its start, where it loads nothing else: the fleet cannot load them there under
    its own names.
    """
    own = () if report.lora.enabled else report.lora.loaded_loras
    listed = tuple(lora for lora in own if lora.is_configured and not lora.digest and lora.state == "ready")
    return report.model_copy(update={"lora": report.lora.model_copy(update={"loaded_loras": listed})})


def configured_adapters(lists: Iterable[tuple[str, Sequence[WorkerAdapter]]]) -> Mapping[str, CatalogAdapter]:
    """The adapters that workers' settings name, by lora_id, for a router that has no orchestrator.

    Every tenant may use them. What an engine had at its start is served under the engine's own name. A faulty adapter
    has its error, as has a name that settings give to different bytes.

    lists  base model of a worker, and what its settings name
    """
    found: dict[str, dict[str, CatalogAdapter]] = {}
    failed: dict[str, CatalogAdapter] = {}
    for base_model, items in lists:
        for item in items:
            if not _is_lora_id(item.lora_id):
                continue
            is_own = item.engine_name == item.lora_id and item.state == "ready"
            if not item.digest and not is_own:
                error = item.error or "its digest is not known"
                failed[item.lora_id] = CatalogAdapter(
                    lora_id=item.lora_id, digest=None, base_model=base_model, error=error
                )
                continue
            bytes_of = item.digest or item.files_digest or item.path
            found.setdefault(item.lora_id, {})[bytes_of] = CatalogAdapter(
                lora_id=item.lora_id,
                digest=item.digest or None,
                base_model=base_model,
                source=item.source,
                rank=item.rank,
                engine_name=item.engine_name if is_own else None,
            )
    return failed | {lora_id: _only_version(versions) for lora_id, versions in found.items()}


def _only_version(versions: Mapping[str, CatalogAdapter]) -> CatalogAdapter:
    """The one version of a name; with an error where workers' settings give the name to different bytes."""
    first = next(iter(versions.values()))
    if len(versions) == 1:
        return first
    error = (
        f"workers' settings give this name to different bytes ({', '.join(sorted(versions))}); give each its own name"
    )
    return CatalogAdapter(lora_id=first.lora_id, digest=None, base_model=first.base_model, error=error)


def _discovery_rank(base_model: str | None, error: str | None) -> tuple[bool, str]:
    """Sort key of an engine's entry for a name: usable ones first, then by base model."""
    return error is not None, base_model or ""


def _is_lora_id(name: str) -> bool:
    """Whether `checked_lora_id` accepts this name."""
    try:
        checked_lora_id(name)
    except ValueError:
        return False
    return True
