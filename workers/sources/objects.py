"""Adapters in object stores: `s3://`, `gs://`, `az://`, through the store's fsspec library."""

import asyncio
import json
import os
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from lorafleet.service.object_stores import StoreNotOpened, open_object_store
from workers.core.errors import SourceError
from workers.core.references import bucket_and_folder, redacted
from workers.sources.base import Limits, Transfer, TransientSourceError, clear_folder, too_big_error, with_retries
from workers.verification.adapter_files import folder_description
from workers.verification.beside import MOST_TEXT_BYTES, read_names
from workers.verification.peft import CONFIG_NAME, MAX_CONFIG_BYTES

_PART_BYTES = 16 << 20
_ETAGS = ("ETag", "etag", "md5Hash", "LastModified", "updated", "last_modified")


class ObjectSource:
    """The source of one store. The library finds credentials and endpoint: environment, profile, the machine's role.

    Files are fetched in parts of 16 MiB, several at a time, each with its own retries. The finished parts are noted in
    a file, so that a later fetch continues with the others.
    """

    resumes = True

    def __init__(
        self,
        scheme: str,
        limits: Limits,
        *,
        options: Mapping[str, Any] | None = None,
        part_bytes: int = _PART_BYTES,
    ) -> None:
        """`options` are passed to the fsspec class and override our defaults."""
        self._part_bytes = part_bytes
        self._scheme = scheme
        self._limits = limits
        self._options = dict(options or {})
        self._store: Any = None

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        """Fetch the missing parts of the adapter's files and check that the files did not change.

        Raises SourceError `source_failed` if they did. See `Source.fetch`.
        """
        bucket, folder = bucket_and_folder(ref)
        folder_path = f"{bucket}/{folder}"
        await asyncio.to_thread(self._open_store, ref)
        rows = await self._list_folder(ref, folder_path)
        files = self._adapter_files(ref, rows, transfer)
        sizes = {row["name"].rpartition("/")[2]: int(row.get("size") or 0) for row in rows if row["type"] == "file"}
        for name in read_names(sizes):
            transfer.texts[name] = await self._read_text(ref, f"{folder_path}/{name}", sizes[name])
        transfer.expect(sum(size for size, _ in files.values()))
        parts = await asyncio.to_thread(_FetchedParts.read, into, files, self._part_bytes)
        for name, (size, _) in sorted(files.items()):
            await self._fetch_file(ref, f"{folder_path}/{name}", size, into / name, transfer, parts)
        if self._adapter_files(ref, await self._list_folder(ref, folder_path), transfer) != files:
            message = f"source {redacted(ref)}: its files changed while they were fetched; try again later"
            raise SourceError("source_failed", message, retry_after_s=30)
        parts.note.unlink()

    def _open_store(self, ref: str) -> None:
        """Import the store's library and create its client at the first use, and keep it. Raises SourceError."""
        if self._store is not None:
            return
        try:
            self._store = open_object_store(self._scheme, timeout_s=self._limits.timeout_s, options=self._options)
        except StoreNotOpened as exc:
            code = "source_extra_missing" if exc.is_missing else "source_unauthorized"
            raise SourceError(code, f"source {redacted(ref)}: {exc}") from exc.__cause__

    async def _list_folder(self, ref: str, folder_path: str) -> list[dict[str, Any]]:
        """Ask the store for its entries of a folder, with retries. Raises SourceError."""
        entries: list[dict[str, Any]] = await with_retries(
            lambda: self._call_store(ref, self._store._ls(folder_path, detail=True)), ref, self._limits
        )
        return entries

    def _adapter_files(self, ref: str, rows: list[dict[str, Any]], transfer: Transfer) -> dict[str, tuple[int, str]]:
        """name -> (bytes, version) of the adapter's files; raises SourceError for none, or for too many bytes."""
        folder_files = {row["name"].rpartition("/")[2]: row for row in rows if row["type"] == "file"}
        folders = [row["name"].rstrip("/").rpartition("/")[2] for row in rows if row["type"] == "directory"]
        files = {
            name: (
                int(folder_files[name].get("size") or 0),
                str([folder_files[name][key] for key in _ETAGS if key in folder_files[name]]),
            )
            for name in transfer.choose_files(folder_files, allow_pickle=self._limits.allow_pickle, folders=folders)
        }
        if CONFIG_NAME not in files:
            description = folder_description(folder_files, folders)
            message = f"source {redacted(ref)}: no {CONFIG_NAME} in that folder, {description}"
            raise SourceError("source_not_found", message)
        if (size := files[CONFIG_NAME][0]) > MAX_CONFIG_BYTES:
            message = f"source {redacted(ref)}: {CONFIG_NAME} has {size} bytes, at most {MAX_CONFIG_BYTES} are allowed"
            raise SourceError("source_too_big", message)
        if (total := sum(size for size, _ in files.values())) > self._limits.max_bytes:
            raise too_big_error(ref, total, self._limits)
        return files

    async def _fetch_file(
        self, ref: str, path: str, size: int, target_path: Path, transfer: Transfer, parts: "_FetchedParts"
    ) -> None:
        """Fetch the missing parts of a file, several at a time, and note each finished one. Raises SourceError.

        The first failure cancels the other parts.
        """
        part_slots = asyncio.Semaphore(self._limits.parts)

        async def fetch_part(fd: int, start: int) -> None:
            """Fetch the part at `start`, write and note it; a finished part is only counted in `transfer`."""
            end = min(start + self._part_bytes, size)
            if parts.has(target_path.name, start):
                transfer.advance(end - start)
                return
            async with part_slots:
                data = await with_retries(lambda: self._fetch_part(ref, path, start, end), ref, self._limits)
                await asyncio.to_thread(_write_at, fd, data, start)
                parts.add(target_path.name, start)
                transfer.advance(len(data))

        with open(target_path, "r+b", opener=_open_for_writing) as target:  # noqa: ASYNC230
            tasks = [
                asyncio.create_task(fetch_part(target.fileno(), start)) for start in range(0, size, self._part_bytes)
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_text(self, ref: str, path: str, size: int) -> bytes:
        """The beginning of a text beside the adapter. Raises SourceError."""
        end = min(size, MOST_TEXT_BYTES)
        return await with_retries(lambda: self._fetch_part(ref, path, 0, end), ref, self._limits) if end else b""

    async def _fetch_part(self, ref: str, path: str, start: int, end: int) -> bytes:
        """Fetch the bytes from `start` to `end` of a file. Raises TransientSourceError, SourceError."""
        data: bytes = await self._call_store(ref, self._store._cat_file(path, start=start, end=end))
        if len(data) != end - start:
            raise TransientSourceError(f"{len(data)} bytes received, {end - start} requested")
        return data

    async def _call_store(self, ref: str, operation: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine of the library in fsspec's event loop; cancelling this call cancels the coroutine.

        Errors are translated to class and status only, as their messages contain addresses.
        """
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(operation, self._store.loop))
        except Exception as exc:  # noqa: BLE001  (three libraries, and what each of them is built on)
            raise _translated_error(ref, exc) from None


class _FetchedParts:
    """The finished parts in a folder, noted in a file: one line for the files' versions, then one line per part."""

    def __init__(self, note: Path, done: set[tuple[str, int]]) -> None:
        self.note = note
        self._done = done

    @classmethod
    def read(cls, folder: Path, files: Mapping[str, tuple[int, str]], part_bytes: int) -> "_FetchedParts":
        """Read which parts of these files in a folder are finished; rewrites the note and deletes all other files.

        If the note is of other versions of the files, the folder is emptied.
        """
        note = folder / ".parts"
        head = json.dumps([part_bytes, sorted(files.items())])
        done: set[tuple[str, int]] = set()
        lines = note.read_text().split("\n") if note.exists() else [""]
        if lines[0] == head:
            for line in lines[1:-1]:  # the last one may be incomplete
                name, start = json.loads(line)
                done.add((name, start))
            clear_folder(folder, {note.name, *files})
        else:
            clear_folder(folder, ())
        note.write_text("\n".join((head, *map(json.dumps, sorted(done)), "")))
        return cls(note, done)

    def has(self, name: str, start: int) -> bool:
        """Whether a part was finished when the note was read."""
        return (name, start) in self._done

    def add(self, name: str, start: int) -> None:
        """Append a finished part to the note."""
        with self.note.open("a") as file:
            file.write(json.dumps((name, start)) + "\n")


def _translated_error(ref: str, exc: Exception) -> SourceError | TransientSourceError:
    """A library's exception as SourceError, or TransientSourceError if another attempt may succeed."""
    name, status = type(exc).__name__, _http_status(exc)
    subject = f"source {redacted(ref)}: {name}" + (f" (HTTP {status})" if status else "")
    if isinstance(exc, FileNotFoundError) or status in {404, 410}:
        return SourceError("source_not_found", f"{subject}: no such bucket or folder")
    # gcsfs 2026.10 (retry.py) raises a plain OSError with this prefix for a 403.
    is_refused = isinstance(exc, PermissionError) or status in {401, 403} or str(exc).startswith("Forbidden")
    if is_refused or "Credential" in name or "Authentication" in name:
        return SourceError("source_unauthorized", f"{subject}: the store refuses this worker's credentials")
    if status == 400:
        return SourceError("source_invalid", f"{subject}: the store refuses this reference")
    return TransientSourceError(subject.partition(": ")[2])


def _http_status(exc: Exception) -> int:
    """The HTTP status in a library's exception; 0 without one."""
    response = getattr(exc, "response", None)
    candidates = [getattr(exc, "status_code", None), getattr(exc, "status", None), getattr(exc, "code", None)]
    if isinstance(response, dict):  # botocore's
        candidates.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return next((int(value) for value in candidates if isinstance(value, int | str) and str(value).isdigit()), 0)


def _open_for_writing(path: str, flags: int) -> int:
    """Open a file for writing, created if it does not exist, without truncating it."""
    return os.open(path, flags | os.O_CREAT, 0o644)


def _write_at(fd: int, data: bytes, offset: int) -> None:
    """Write all data to an open file at an offset. Blocking."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
