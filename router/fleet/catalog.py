"""The orchestrator's catalog: what it says, and the last copy of it on disk."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import structlog
from pydantic import ValidationError

from lorafleet.identity import engine_name
from orchestrator.wire import Catalog
from router.core.fleet import AdapterAlias, RoutableAdapter

log = structlog.get_logger()


def named_by(catalog: Catalog) -> tuple[Mapping[str, RoutableAdapter], Mapping[str, AdapterAlias]]:
    """Adapters by lora_id, aliases by name; what is being deleted is not there any more."""
    adapters = {
        # Only a quarantine is the adapter's own fault; any other error passes, and a request may wait for that.
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
    """Worker id -> engine names that take no new request there."""
    names: dict[str, set[str]] = {}
    for entry in catalog.draining:
        names.setdefault(entry.worker_id, set()).add(engine_name(entry.lora_id, entry.digest))
    return {worker: frozenset(found) for worker, found in names.items()}


def read_catalog(file: Path) -> Catalog | None:
    """The saved copy, if there is one that can be used."""
    try:
        return Catalog.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as exc:
        log.warning("saved catalog not used", file=str(file), error=str(exc))
        return None


def save_catalog(file: Path, content: bytes) -> None:
    """Keep this copy. A disk that is full costs a line in the log."""
    # Several processes may keep it in one place.
    partial = file.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(file)
    except OSError as exc:
        log.warning("catalog not saved", file=str(file), error=str(exc))
