"""Routes for other fleets: the record, its import, and adapter files by digest."""

from typing import Annotated

from fastapi import APIRouter, Body, Depends, Query, Request
from fastapi import Path as PathParameter
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from lorafleet.keys.auth import ApiKeys, requires
from orchestrator.api.parameters import Actor
from orchestrator.intent.applied import import_of_file
from orchestrator.intent.record import differences, fleet_record, import_record
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.model.apply import ApplyRequest
from orchestrator.model.record import FleetRecord, ImportAnswer, ImportRequest, RecordChange
from orchestrator.reconcile.file_copies import FileRelay, RelayedFile
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.store.tables import Subject

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
            await reconciler.publish_change(*filter(None, map(_subject, changes)))
        return ImportAnswer(changes=tuple(changes), is_done=True)

    @api.get("/v1/files/{digest}", dependencies=[Depends(may_read_files)], response_class=StreamingResponse)
    async def files(digest: Digest, request: Request, fleet: OtherFleet = "") -> StreamingResponse:
        """The list of an adapter's files by digest, as a worker of this fleet has them; else as the other fleet has.

        In the form of the agents' own route.
        """
        return await _relayed(relay, digest, "", fleet, request)

    @api.get("/v1/files/{digest}/{name}", dependencies=[Depends(may_read_files)], response_class=StreamingResponse)
    async def file(digest: Digest, name: str, request: Request, fleet: OtherFleet = "") -> StreamingResponse:
        """One file of an adapter by digest; takes ranges. Its ETag is the digest, the same in every fleet."""
        return await _relayed(relay, digest, name, fleet, request)

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


async def _relayed(relay: FileRelay, digest: str, name: str, fleet: str, request: Request) -> StreamingResponse:
    """The relayed answer. Raises as `FileRelay.open_file`."""
    return _RelayResponse(await relay.open_file(digest, name, fleet, request.headers))


def _subject(change: RecordChange) -> Subject | None:
    """The stored row of a change; None for one that was not made."""
    if change.change == "blocked":
        return None
    if change.subject == "policy":
        return "policy", ""
    return ("adapters" if change.subject == "adapter" else "names"), change.name
