"""Adapters in object stores: `s3://`, `gs://`, `az://`, each by the fsspec library of that store."""

import asyncio
import importlib
import json
import os
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from workers.core.errors import SourceError
from workers.core.manifest import CONFIG_NAME, MAX_CONFIG_BYTES, adapter_names
from workers.core.references import bucket_and_folder, shown
from workers.sources.base import Limits, Transfer, TransientSourceError, clear, retried, too_big

_LIBRARIES = {
    "s3": ("s3fs", "S3FileSystem"),
    "gs": ("gcsfs.core", "GCSFileSystem"),
    "az": ("adlfs", "AzureBlobFileSystem"),
}
# gcsfs.core: what gcsfs itself offers asks a gRPC service for each bucket's layout first (2026.10), wherever it is.
_PART_BYTES = 16 << 20
_ETAGS = ("ETag", "etag", "md5Hash", "LastModified", "updated", "last_modified")


class ObjectSource:
    """One store. Credentials and endpoint are the library's own: environment, profile, the machine's role.

    A file comes in parts of 16 MiB, several at the same time, each tried again by itself. Which are here is noted
    beside them, so that a later fetch asks for the others alone.
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
        """`options` go to the fsspec class, over those that keep to the limits."""
        self._part_bytes = part_bytes
        self._scheme = scheme
        self._limits = limits
        self._options = dict(options or {})
        self._files: Any = None

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        bucket, folder = bucket_and_folder(ref)
        place = f"{bucket}/{folder}"
        await asyncio.to_thread(self._open, ref)
        before = self._chosen(ref, await self._listed(ref, place))
        transfer.expect(sum(size for size, _ in before.values()))
        parts = await asyncio.to_thread(_FetchedParts.of, into, before, self._part_bytes)
        for name, (size, _) in sorted(before.items()):
            await self._file(ref, f"{place}/{name}", size, into / name, transfer, parts)
        if self._chosen(ref, await self._listed(ref, place)) != before:
            message = f"source {shown(ref)}: its files changed while they were fetched; try again when they rest"
            raise SourceError("source_failed", message, retry_after_s=30)
        parts.note.unlink()

    def _open(self, ref: str) -> None:
        if self._files is not None:
            return
        module, name = _LIBRARIES[self._scheme]
        try:
            library = importlib.import_module(module)
        except ImportError as exc:
            needs = module.partition(".")[0]
            message = f"source {shown(ref)}: {self._scheme}:// needs {needs}; pip install 'lorafleet[{self._scheme}]'"
            raise SourceError("source_extra_missing", message) from exc
        try:
            self._files = getattr(library, name)(**self._defaults() | self._options)
        except Exception as exc:  # noqa: BLE001  (each store's library has its own errors for credentials)
            message = f"source {shown(ref)}: {module} cannot be set up ({type(exc).__name__}): are credentials set?"
            raise SourceError("source_unauthorized", message) from None

    def _defaults(self) -> dict[str, Any]:
        common: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self._scheme == "s3":
            # One attempt of botocore's for each of s3fs', or their attempts multiply with ours.
            retries = {"max_attempts": 0}
            common["config_kwargs"] = {
                "connect_timeout": 10,
                "read_timeout": self._limits.timeout_s,
                "retries": retries,
            }
        if self._scheme == "gs":
            common["requests_timeout"] = self._limits.timeout_s
        if self._scheme == "az" and "AZURE_STORAGE_CONNECTION_STRING" not in os.environ:
            common["anon"] = False  # then adlfs looks for an identity
        return common

    async def _listed(self, ref: str, place: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await retried(
            lambda: self._called(ref, self._files._ls(place, detail=True)), ref, self._limits
        )
        return found

    def _chosen(self, ref: str, rows: list[dict[str, Any]]) -> dict[str, tuple[int, str]]:
        """name -> (bytes, version) of the adapter's files; raises SourceError for none, or for too many bytes."""
        beside = {row["name"].rpartition("/")[2]: row for row in rows if row["type"] == "file"}
        files = {
            name: (
                int(beside[name].get("size") or 0),
                str([beside[name][key] for key in _ETAGS if key in beside[name]]),
            )
            for name in adapter_names(beside, allow_pickle=self._limits.allow_pickle)
        }
        if CONFIG_NAME not in files:
            raise SourceError("source_not_found", f"source {shown(ref)}: no {CONFIG_NAME} in that folder")
        if (size := files[CONFIG_NAME][0]) > MAX_CONFIG_BYTES:
            message = f"source {shown(ref)}: {CONFIG_NAME} has {size} bytes, at most {MAX_CONFIG_BYTES} are allowed"
            raise SourceError("source_too_big", message)
        if (total := sum(size for size, _ in files.values())) > self._limits.max_bytes:
            raise too_big(ref, total, self._limits)
        return files

    async def _file(self, ref: str, path: str, size: int, to: Path, transfer: Transfer, parts: "_FetchedParts") -> None:
        turns = asyncio.Semaphore(self._limits.parts)

        async def part(fd: int, start: int) -> None:
            end = min(start + self._part_bytes, size)
            if parts.has(to.name, start):
                transfer.advance(end - start)
                return
            async with turns:
                data = await retried(lambda: self._part(ref, path, start, end), ref, self._limits)
                await asyncio.to_thread(_write_at, fd, data, start)
                parts.add(to.name, start)
                transfer.advance(len(data))

        with open(to, "r+b", opener=_opened) as target:  # noqa: ASYNC230
            tasks = [asyncio.create_task(part(target.fileno(), start)) for start in range(0, size, self._part_bytes)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _part(self, ref: str, path: str, start: int, end: int) -> bytes:
        data: bytes = await self._called(ref, self._files._cat_file(path, start=start, end=end))
        if len(data) != end - start:
            raise TransientSourceError(f"{len(data)} bytes came where {end - start} were asked for")
        return data

    async def _called(self, ref: str, step: Coroutine[Any, Any, Any]) -> Any:
        """One step of the library, in fsspec's own loop and thread; cancelling reaches it there.

        Its errors hold addresses, so only their class and status are told.
        """
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(step, self._files.loop))
        except Exception as exc:  # noqa: BLE001  (three libraries, and what each of them is built on)
            raise _judged(ref, exc) from None


class _FetchedParts:
    """Which parts of which versions are in a folder, noted there: one line what all of it is, then one a part."""

    def __init__(self, note: Path, done: set[tuple[str, int]]) -> None:
        self.note = note
        self._done = done

    @classmethod
    def of(cls, folder: Path, files: Mapping[str, tuple[int, str]], part_bytes: int) -> "_FetchedParts":
        """What is there of these files; a folder with anything else in it is emptied."""
        note = folder / ".parts"
        head = json.dumps([part_bytes, sorted(files.items())])
        done: set[tuple[str, int]] = set()
        lines = note.read_text().split("\n") if note.exists() else [""]
        if lines[0] == head:
            for line in lines[1:-1]:  # the last one ends no line: it was being written
                name, start = json.loads(line)
                done.add((name, start))
            clear(folder, {note.name, *files})
        else:
            clear(folder, ())
        note.write_text("\n".join((head, *map(json.dumps, sorted(done)), "")))
        return cls(note, done)

    def has(self, name: str, start: int) -> bool:
        return (name, start) in self._done

    def add(self, name: str, start: int) -> None:
        with self.note.open("a") as file:
            file.write(json.dumps((name, start)) + "\n")


def _judged(ref: str, exc: Exception) -> SourceError | TransientSourceError:
    name, status = type(exc).__name__, _status(exc)
    what = f"source {shown(ref)}: {name}" + (f" (HTTP {status})" if status else "")
    if isinstance(exc, FileNotFoundError) or status in {404, 410}:
        return SourceError("source_not_found", f"{what}: no such bucket or folder")
    # gcsfs 2026.10 (retry.py) raises a bare OSError that begins so for a 403.
    is_refused = isinstance(exc, PermissionError) or status in {401, 403} or str(exc).startswith("Forbidden")
    if is_refused or "Credential" in name or "Authentication" in name:
        return SourceError("source_unauthorized", f"{what}: this worker's credentials for the store do not do")
    if status == 400:
        return SourceError("source_invalid", f"{what}: the store does not take this reference")
    return TransientSourceError(what.partition(": ")[2])


def _status(exc: Exception) -> int:
    response = getattr(exc, "response", None)
    found = [getattr(exc, "status_code", None), getattr(exc, "status", None), getattr(exc, "code", None)]
    if isinstance(response, dict):  # botocore's
        found.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return next((int(value) for value in found if isinstance(value, int | str) and str(value).isdigit()), 0)


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o644)


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
