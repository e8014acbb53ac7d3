"""The agent's routes for files by digest, which other workers and the orchestrator read."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from starlette.types import Message, Receive, Scope, Send

from lorafleet.keys.auth import ApiKeys, requires
from workers.agent.agent import WorkerAgent
from workers.core.errors import WorkerBusy
from workers.epochs import Epoch
from workers.metrics import WorkerMetrics
from workers.wire import AdapterFiles, MarkFilesRequest

Digest = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{64}$")]
_CHUNK_BYTES = 1 << 20
_BUSY_RETRY_S = 1.0
_BURST_S = 0.25
"""Seconds of the rate that may go out at once: the pause between two pieces is shorter than a reader notices."""


def file_routes(agent: WorkerAgent, keys: ApiKeys) -> APIRouter:
    """Routes that read files (scope `worker`, `export` or `agent`), and the one that marks them (`agent`)."""
    api = APIRouter()
    settings = agent.context.settings
    bounds = FileSending(
        most=settings.max_uploads, bytes_per_s=settings.upload_bytes_per_s, metrics=agent.context.metrics
    )
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
        return _SentFile(bounds, path, media_type="application/octet-stream", headers=headers)

    @api.post("/v1/admin/mark_files", dependencies=leading, status_code=204)
    async def mark_files(body: MarkFilesRequest, epoch: Epoch) -> None:
        """Keep the files of these digests, fetched from others if needed; or let them be deleted again.

        A stale epoch is refused.
        """
        agent.check_epoch(epoch, is_destructive=body.mark != "kept")
        await agent.mark_files(body)

    return api


class FileSending:
    """How many files other workers and fleets read from this worker at a time, and how fast.

    They share the machine's network with the engine's answers.
    """

    def __init__(
        self,
        *,
        most: int,
        bytes_per_s: int,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        most         files at a time; more are refused
        bytes_per_s  of all together; 0: no limit
        """
        self._most = most
        self._rate = bytes_per_s
        self._metrics = metrics
        self._clock = clock
        self._count = 0
        self._free_at = clock()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Count one file during the block. Raises WorkerBusy `files_busy` beyond the limit."""
        if self._count >= self._most:
            self._metrics.uploads_refused.inc()
            message = f"{self._count} files are being sent already; ask another worker, or again later"
            raise WorkerBusy("files_busy", message, retry_after_s=_BUSY_RETRY_S)
        self._count += 1
        self._metrics.uploads.set(self._count)
        try:
            yield
        finally:
            self._count -= 1
            self._metrics.uploads.set(self._count)

    async def wait_turn(self, size_bytes: int) -> None:
        """Wait until this many bytes may go out by the rate, and count them."""
        self._metrics.uploaded_bytes.inc(size_bytes)
        if not self._rate:
            return
        now = self._clock()
        self._free_at = max(self._free_at, now - _BURST_S) + size_bytes / self._rate
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class _SentFile(FileResponse):
    """A file, sent within bounds."""

    chunk_size = _CHUNK_BYTES

    def __init__(self, bounds: FileSending, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self._bounds = bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file piece by piece. Raises WorkerBusy."""

        async def send_in_turn(message: Message) -> None:
            """Send a message of the answer, once its bytes may go out."""
            if body := message.get("body"):
                await self._bounds.wait_turn(len(body))
            await send(message)

        # Not `http.response.pathsend`: the server would send the whole file at once.
        with self._bounds.sending():
            await super().__call__({**scope, "extensions": {}}, receive, send_in_turn)
