"""Routes for the history of changes, and for a backup of the store."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import FileResponse
from starlette.background import BackgroundTask

from lorafleet.service.auth import ApiKeys, requires
from orchestrator.api.parameters import Limit
from orchestrator.api.tenancy import TenantView, tenant_view_of
from orchestrator.api.views import timestamp
from orchestrator.core.errors import OrchestratorRequestError
from orchestrator.store.backend import HistoryEntry
from orchestrator.store.store import KINDS, IntentStore
from orchestrator.wire import HistoryItem, HistoryList

BACKUP_TYPES = {".db": "application/vnd.sqlite3", ".json": "application/vnd.lorafleet.backup+json"}
ALIAS_KINDS = ("alias_set", "alias_deleted", "alias_rollout")
HistoryCursor = Annotated[int | None, Query(ge=1, description="`next` of the answer before")]


def history_routes(keys: ApiKeys, store: IntentStore) -> APIRouter:
    """The routes that read the history and back up the store."""
    api = APIRouter(tags=["history"])
    view = [Depends(requires(keys, "view"))]
    admin = [Depends(requires(keys, "admin"))]

    seen_by = Annotated[TenantView, Depends(tenant_view_of(store))]

    @api.get("/v1/history", dependencies=view)
    async def history(
        seen: seen_by,
        kind: Annotated[list[str] | None, Query(description="such as adapter_registered; may be repeated")] = None,
        subject: Annotated[str | None, Query(description="a lora_id, an alias, or a worker")] = None,
        limit: Limit = 100,
        cursor: HistoryCursor = None,
    ) -> HistoryList:
        """Changes of intent, newest first; of each kind the newest are kept. 400 for an unknown kind."""
        if unknown := sorted(set(kind or ()) - set(KINDS)):
            raise OrchestratorRequestError(f"kind {unknown[0]!r} is unknown; known: {', '.join(KINDS)}", param="kind")
        return history_page(store, limit, cursor, kinds=tuple(kind or ()), subject=subject, seen=seen)

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
) -> HistoryList:
    """One page of the history, newest first, and the cursor of the next.

    A tenant's page may be short, even empty, with a next one: entries of others are passed over, so many at a time.
    """
    # One more than the limit, to know whether there is a next page.
    found = store.history(kinds=kinds, subject=subject, before=cursor, limit=limit + 1)
    page = found[:limit]
    return HistoryList(
        data=tuple(_history_item(entry, seen) for entry in page if seen.sees_entry(entry)),
        next=str(page[-1].id) if len(found) > limit else None,
    )


def _history_item(entry: HistoryEntry, seen: TenantView) -> HistoryItem:
    """A history entry as the caller may see it."""
    return HistoryItem(
        id=entry.id,
        at=timestamp(entry.at),
        kind=entry.kind,
        subject=entry.subject,
        actor=seen.actor(entry.actor),
        body=seen.body(entry.body),
    )
