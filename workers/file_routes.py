"""The agent's routes for files by digest, which other workers and the orchestrator read."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from lorafleet.keys.auth import ApiKeys, requires
from workers.agent.agent import WorkerAgent
from workers.agent.file_uploads import FileUploads
from workers.epochs import Epoch
from workers.wire import AdapterFiles, MarkFilesRequest

Digest = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{64}$")]
_CHUNK_BYTES = 1 << 20


def file_routes(agent: WorkerAgent, keys: ApiKeys) -> APIRouter:
    """Routes that read files (scope `worker`, `export` or `agent`), and the one that marks them (`agent`)."""
    api = APIRouter()
    # Other agents, other fleets, and orchestrators. No key of publishers: a digest would show it others' adapters.
    readers = [Depends(requires(keys, "worker", "export", "agent"))]
    leading = [Depends(requires(keys, "agent"))]

    @api.get("/v1/files/{digest}", dependencies=readers)
    async def files(
        digest: Digest,
        recheck: Annotated[bool, Query(description="read them again: wrong bytes came from here")] = False,
    ) -> AdapterFiles:
        """The files of a verified adapter on this worker's disk."""
        return await agent.adapter_files(digest, is_recheck=recheck)

    @api.get("/v1/files/{digest}/{name}", dependencies=readers, response_class=FileResponse)
    async def file(digest: Digest, name: str) -> FileResponse:
        """One file of a verified adapter; takes ranges. Its ETag is the digest, the same on every worker.

        503 `files_busy` while `max_uploads` files are being sent.
        """
        path = await agent.adapter_file(digest, name)
        headers = {"etag": f'"{digest}"'}
        return _Upload(agent.uploads, path, media_type="application/octet-stream", headers=headers)

    @api.post("/v1/admin/mark_files", dependencies=leading, status_code=204)
    async def mark_files(body: MarkFilesRequest, epoch: Epoch) -> None:
        """Keep the files of these digests, fetched from others if needed; or let them be deleted again.

        A stale epoch is refused.
        """
        agent.check_epoch(epoch, is_destructive=body.mark != "kept")
        await agent.mark_files(body)

    return api


class _Upload(FileResponse):
    """A file, sent within the bounds of the worker's uploads."""

    chunk_size = _CHUNK_BYTES

    def __init__(self, uploads: FileUploads, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self._uploads = uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file piece by piece. Raises WorkerBusy."""

        async def send_in_turn(message: Message) -> None:
            """Send a message of the answer, once its bytes may go out."""
            if body := message.get("body"):
                await self._uploads.wait_turn(len(body))
            await send(message)

        # Not `http.response.pathsend`: the server would send the whole file at once.
        with self._uploads.uploading():
            await super().__call__({**scope, "extensions": {}}, receive, send_in_turn)
