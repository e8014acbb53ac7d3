"""Adapters of the orchestrator's catalog and of engines without an agent, and the catalog's last copy on disk."""

import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import structlog
from pydantic import ValidationError

from lorafleet.identity import engine_name
from lorafleet.service.repeats import RepeatLimiter
from orchestrator.wire import Catalog, checked_lora_id
from router.core.fleet import AdapterAlias, RoutableAdapter
from workers.wire import Metadata

log = structlog.get_logger()


def adapters_and_aliases(catalog: Catalog) -> tuple[Mapping[str, RoutableAdapter], Mapping[str, AdapterAlias]]:
    """Adapters by lora_id and aliases by name, without adapters that are being deleted."""
    adapters = {
        # A request may wait for any error to pass but a quarantine, which is the adapter's own fault.
        a.lora_id: RoutableAdapter(
            a.lora_id,
            a.base_model,
            a.digest,
            a.source,
            a.tenants,
            a.error if a.state == "failed" else None,
            a.priority,
            a.secret,
            rank=a.rank or 0,
        )
        for a in catalog.adapters
        if a.state != "deleting"
    }
    aliases = {
        a.name: AdapterAlias(a.name, tuple((target.lora_id, target.weight) for target in a.targets))
        for a in catalog.aliases
    }
    return MappingProxyType(adapters), MappingProxyType(aliases)


def draining_by_worker(catalog: Catalog) -> dict[str, frozenset[str]]:
    """Worker id -> engine names that take no new requests on that worker."""
    names: dict[str, set[str]] = {}
    for entry in catalog.draining:
        names.setdefault(entry.worker_id, set()).add(engine_name(entry.lora_id, entry.digest))
    return {worker: frozenset(worker_names) for worker, worker_names in names.items()}


def load_catalog(file: Path) -> Catalog | None:
    """The saved copy of the catalog; None if there is none, or it cannot be read, which is logged."""
    try:
        return Catalog.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as exc:
        log.warning("saved catalog not used", file=str(file), error=str(exc))
        return None


def save_catalog(file: Path, content: bytes, lines: RepeatLimiter) -> None:
    """Write a copy of the catalog. A failure is logged, as often as `lines` lets it, and nothing is raised."""
    # Several worker processes may save to the same file.
    partial = file.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(file)
    except OSError as exc:
        if failures := lines.count(file):
            log.warning("catalog not saved", file=str(file), error=str(exc), failures=failures)


def discovered_adapters(reports: Iterable[Metadata], catalog_names: Container[str]) -> Mapping[str, RoutableAdapter]:
    """Adapters that engines without an agent list and the catalog does not have, by lora_id.

    Every tenant may use them. Engine names that the fleet gave (`lora_id@digest12`) are left out: the catalog knows
    them. So are names that `checked_lora_id` refuses: vLLM accepts names that would break our headers. If two base
    models list one name, the first base model has it. An engine that takes no adapters lists them with an error; such
    an entry counts only if no other engine has the name.

    catalog_names  of its adapters and aliases
    """
    adapters_by_id: dict[str, RoutableAdapter] = {}
    for report in reports:
        base_model = report.model.base_model
        for lora in report.lora.loaded_loras:
            if lora.engine_name != lora.lora_id or lora.lora_id in catalog_names or not _is_lora_id(lora.lora_id):
                continue
            known = adapters_by_id.get(lora.lora_id)
            if known is None or _discovery_rank(base_model, lora.error) < _discovery_rank(
                known.base_model, known.error
            ):
                adapters_by_id[lora.lora_id] = RoutableAdapter(
                    lora.lora_id, base_model, None, "", error=lora.error, is_listed=True
                )
    return adapters_by_id


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
