"""Routes for the history of changes, and for a backup of the store."""

import shutil
import tempfile
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field
from starlette.background import BackgroundTask

from lorafleet.keys.auth import ApiKeys, requires
from orchestrator.api.parameters import Limit
from orchestrator.api.tenancy import TenantView, tenant_view_of
from orchestrator.core.errors import OrchestratorRequestError
from orchestrator.core.incidents import KINDS_OF_INCIDENTS, Severity
from orchestrator.model.history import HistoryEntry, HistoryList
from orchestrator.store.store import KINDS, IntentStore

BACKUP_TYPES = {".db": "application/vnd.sqlite3", ".json": "application/vnd.lorafleet.backup+json"}
ALIAS_KINDS = ("alias_set", "alias_deleted", "alias_rollout")
INCIDENT = "incident"
_SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")
# Entries that one call reads: at least, so that a filter does not read one by one, and at most.
_LEAST_READ, _MOST_READ = 500, 20_000
HistoryCursor = Annotated[int | None, Query(ge=1, description="`next` of the answer before")]


class HistoryQuery(BaseModel):
    """Filters of the history."""

    kind: tuple[str, ...] = Field(
        default=(), description="such as adapter_registered; may be repeated; `incident`: all kinds of incidents"
    )
    subject: str | None = Field(default=None, description="a lora_id, an alias, or a worker")
    worker: str | None = Field(default=None, description="what concerns this worker")
    adapter: str | None = Field(default=None, description="what concerns this lora_id")
    since: datetime | None = Field(default=None, description="not before this time")
    until: datetime | None = Field(default=None, description="before this time")
    severity: Severity | None = Field(default=None, description="incidents at least as bad as this")
    limit: Limit = 100
    cursor: HistoryCursor = None


@dataclass(frozen=True, slots=True)
class HistoryFilter:
    """Which entries of the history to show; None: any. Times are Unix seconds."""

    worker: str | None = None
    adapter: str | None = None
    since: float = 0.0
    until: float = inf

    def passes(self, entry: HistoryEntry) -> bool:
        """Whether the entry passes."""
        return (
            self.since <= entry.at < self.until
            and self.worker in {None, entry.subject, entry.body.get("worker_id")}
            and self.adapter in {None, entry.subject, entry.body.get("evict")}
        )


NO_FILTER = HistoryFilter()


def history_routes(keys: ApiKeys, store: IntentStore) -> APIRouter:
    """The routes that read the history and back up the store."""
    api = APIRouter(tags=["history"])
    view = [Depends(requires(keys, "view"))]
    admin = [Depends(requires(keys, "admin"))]

    seen_by = Annotated[TenantView, Depends(tenant_view_of(store))]

    @api.get("/v1/history", dependencies=view)
    async def history(asked: Annotated[HistoryQuery, Query()], seen: seen_by) -> HistoryList:
        """Changes of intent, loads, unloads and incidents, newest first; of each kind the newest are kept.

        400 for an unknown kind.
        """
        wanted = tuple(name for given in asked.kind for name in (KINDS_OF_INCIDENTS if given == INCIDENT else (given,)))
        if unknown := sorted(set(wanted) - set(KINDS)):
            known = ", ".join((INCIDENT, *KINDS))
            raise OrchestratorRequestError(f"kind {unknown[0]!r} is unknown; known: {known}", param="kind")
        if asked.severity is not None:
            bad = _kinds_at_least(asked.severity)
            wanted = tuple(name for name in wanted if name in bad) or (() if wanted else bad)
            if not wanted:
                return HistoryList(data=())
        filters = HistoryFilter(
            worker=asked.worker,
            adapter=asked.adapter,
            since=_unix_time(asked.since, 0.0),
            until=_unix_time(asked.until, inf),
        )
        return history_page(
            store, asked.limit, asked.cursor, kinds=wanted, subject=asked.subject, seen=seen, filters=filters
        )

    @api.get(
        "/v1/backup",
        dependencies=admin,
        response_class=FileResponse,
        responses={
            200: {
                "content": {kind: {} for kind in BACKUP_TYPES.values()},
                "description": "an SQLite file: use it as `store`. With ConfigMaps a List for `kubectl apply -f`",
            }
        },
    )
    async def backup() -> FileResponse:
        """A backup of the store, on which a new orchestrator can be started.

        Without deletions, drains and rollouts, which would remove adapters from a fleet after a restore.
        """
        folder = Path(tempfile.mkdtemp(prefix="lorafleet-backup-"))
        try:
            store.backup(folder / store.backup_name)
        except BaseException:
            shutil.rmtree(folder)
            raise
        gone = BackgroundTask(shutil.rmtree, folder, ignore_errors=True)
        media_type = BACKUP_TYPES[Path(store.backup_name).suffix]
        return FileResponse(
            folder / store.backup_name, media_type=media_type, filename=store.backup_name, background=gone
        )

    return api


def history_page(
    store: IntentStore,
    limit: int,
    cursor: int | None,
    *,
    kinds: tuple[str, ...],
    subject: str | None,
    seen: TenantView,
    filters: HistoryFilter = NO_FILTER,
) -> HistoryList:
    """One page of the history, newest first, and the cursor of the next.

    A page may be short, even empty, with a next one: entries that do not pass are passed over, so many at a time.
    """
    page: list[HistoryEntry] = []
    before, read, read_at = cursor, 0, inf
    while len(page) < limit and read < _MOST_READ:
        # One more than is wanted, to know whether there is a next page.
        wanted = max(_LEAST_READ if filters != NO_FILTER or not seen.is_whole else 0, limit - len(page))
        found = store.history(kinds=kinds, subject=subject, before=before, limit=wanted + 1)
        for entry in found[:wanted]:
            read, before, read_at = read + 1, entry.id, entry.at
            if filters.passes(entry) and seen.sees_entry(entry):
                page.append(entry)
            if len(page) == limit:
                break
        is_last = len(found) <= wanted and (not found or before == found[-1].id)
        if is_last or read_at < filters.since:
            before = None
            break
    return HistoryList(
        data=tuple(_shown_entry(entry, seen) for entry in page), next=None if before is None else str(before)
    )


def _kinds_at_least(severity: Severity) -> tuple[str, ...]:
    """The kinds of incidents that are at least as bad."""
    least = _SEVERITIES.index(severity)
    return tuple(name for name, kind in KINDS_OF_INCIDENTS.items() if _SEVERITIES.index(kind.severity) >= least)


def _unix_time(at: datetime | None, otherwise: float) -> float:
    """Unix seconds of a time, in UTC where it names no zone; `otherwise` without one."""
    if at is None:
        return otherwise
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def _shown_entry(entry: HistoryEntry, seen: TenantView) -> HistoryEntry:
    """A history entry as the caller may see it; an incident with its severity and the next step."""
    incident = KINDS_OF_INCIDENTS.get(entry.kind)
    return replace(
        entry,
        actor=seen.actor(entry.actor),
        body=seen.body(entry.body),
        severity=None if incident is None else incident.severity,
        next_step="" if incident is None else incident.next_step,
    )
