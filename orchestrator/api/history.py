"""Routes for what was and what should be: the history, a backup of the store, and the fleet's record."""

import shutil
import tempfile
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Query, Request
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel, Field
from starlette.background import BackgroundTask
from starlette.types import Receive, Scope, Send

from lorafleet.keys.auth import ApiKeys, requires
from lorafleet.service.times import unix_time
from orchestrator.api.tenancy import Actor, Limit, TenantView, tenant_view_of
from orchestrator.core.errors import OrchestratorRequestError
from orchestrator.core.incidents import KINDS_OF_INCIDENTS, Severity
from orchestrator.intent.applied import import_of_file
from orchestrator.intent.record import differences, fleet_record, import_record
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.model.apply import ApplyRequest
from orchestrator.model.history import HistoryEntry, HistoryList
from orchestrator.model.record import FleetRecord, ImportAnswer, ImportRequest, RecordChange
from orchestrator.reconcile.file_copies import FileRelay, RelayedFile
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.store.store import KINDS, IntentStore
from orchestrator.store.tables import Subject

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
            since=0.0 if asked.since is None else unix_time(asked.since),
            until=inf if asked.until is None else unix_time(asked.until),
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


IMPORT_EXAMPLE = {
    "record": {
        "adapters": [
            {
                "lora_id": "sql-expert/v1",
                "source": "file:///srv/adapters/sql-expert/v1",
                "base_model": "tiny-qwen",
                "digest": "3f9a1c2b77aa" + "0" * 52,
            }
        ],
        "names": [{"name": "sql", "targets": [{"lora_id": "sql-expert/v1"}]}],
    },
    "from_fleet": "https://orchestrator.eu.example",
}
APPLY_EXAMPLE = {
    "file": {
        "adapters": [{"lora_id": "sql-expert/v1", "source": "file:///srv/adapters/sql-expert/v1"}],
        "aliases": [{"name": "sql", "targets": [{"lora_id": "sql-expert/v1"}]}],
        "policy": {"loading": "eager"},
    }
}
Digest = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{64}$")]
OtherFleet = Annotated[
    str, Query(description="URL of another fleet's orchestrator, asked when no worker here has them")
]


def record_routes(keys: ApiKeys, registry: AdapterRegistry, reconciler: Reconciler, relay: FileRelay) -> APIRouter:
    """The routes that export and import the record, and relay files by digest."""
    api = APIRouter(tags=["record"])
    store = reconciler.store
    # Agents, and other fleets.
    may_read_files = requires(keys, "worker", "export")

    @api.get("/v1/export", dependencies=[Depends(requires(keys, "export"))])
    async def export() -> FleetRecord:
        """Adapters, aliases and policy as one document, for an import by another fleet. No secret values."""
        return fleet_record(store)

    @api.post("/v1/import", dependencies=[Depends(requires(keys, "admin"))])
    async def take_over(
        ask: Annotated[ImportRequest, Body(examples=[IMPORT_EXAMPLE])],
        actor: Actor,
        dry_run: Annotated[bool, Query(description="name the changes without making them")] = False,
    ) -> ImportAnswer:
        """Make this fleet's record that of the document: what is missing is added, what differs is changed.

        What only this fleet has stays unless `prune`. A second import of the same record changes nothing.
        """
        if ask.from_fleet is not None:
            relay.require_peer(ask.from_fleet)
        return await taken_over(ask, actor, dry_run)

    @api.post("/v1/apply", dependencies=[Depends(requires(keys, "admin"))])
    async def apply(
        ask: Annotated[ApplyRequest, Body(examples=[APPLY_EXAMPLE])],
        actor: Actor,
        dry_run: Annotated[bool, Query(description="name the changes without making them")] = False,
    ) -> ImportAnswer:
        """Give this fleet what the file says. Fields and sections that it leaves out stay; a second call does nothing.

        With `prune` what the file's sections do not have is deleted.
        """
        request, blocked = import_of_file(ask, store)
        answer = ImportAnswer(changes=()) if request is None else await taken_over(request, actor, dry_run)
        return answer.model_copy(update={"changes": (*blocked, *answer.changes)})

    async def taken_over(ask: ImportRequest, actor: str, dry_run: bool) -> ImportAnswer:
        """Make the changes of an import, or name them."""
        if dry_run:
            return ImportAnswer(changes=tuple(differences(store, ask)))
        changes = import_record(ask, store, registry, reconciler.retention, actor)
        if changes:
            await reconciler.publish_change(*filter(None, map(_changed_subject, changes)))
        return ImportAnswer(changes=tuple(changes), is_done=True)

    @api.get("/v1/files/{digest}", dependencies=[Depends(may_read_files)], response_class=StreamingResponse)
    async def files(digest: Digest, request: Request, fleet: OtherFleet = "") -> StreamingResponse:
        """The list of an adapter's files by digest, as a worker of this fleet has them; else as the other fleet has.

        In the form of the agents' own route.
        """
        return await _relayed_file(relay, digest, "", fleet, request)

    @api.get("/v1/files/{digest}/{name}", dependencies=[Depends(may_read_files)], response_class=StreamingResponse)
    async def file(digest: Digest, name: str, request: Request, fleet: OtherFleet = "") -> StreamingResponse:
        """One file of an adapter by digest; takes ranges. Its ETag is the digest, the same in every fleet."""
        return await _relayed_file(relay, digest, name, fleet, request)

    return api


class _RelayResponse(StreamingResponse):
    """Passes a relayed file on, and closes it even if the client has gone before the first byte."""

    def __init__(self, file: RelayedFile) -> None:
        super().__init__(file.body(), status_code=file.status, headers=file.headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file, and close it in any case."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._file.close()


async def _relayed_file(relay: FileRelay, digest: str, name: str, fleet: str, request: Request) -> StreamingResponse:
    """The relayed answer. Raises as `FileRelay.open_file`."""
    return _RelayResponse(await relay.open_file(digest, name, fleet, request.headers))


def _changed_subject(change: RecordChange) -> Subject | None:
    """The stored row of a change; None for one that was not made."""
    if change.change == "blocked":
        return None
    if change.subject == "policy":
        return "policy", ""
    return ("adapters" if change.subject == "adapter" else "names"), change.name
