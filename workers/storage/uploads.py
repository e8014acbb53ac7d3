"""Adapters whose bytes clients send: received in pieces, kept while unfinished, then a source like any other.

    .partial-<agent>-again-<upload>/        one upload, in the cache folder; deleted after an hour without growth
    .partial-<agent>-again-<upload>/.files  its `UploadState` as JSON; how many bytes have come is read from the disk

From its announcement on, room is kept on the disk for all that has not come of an upload, and as much again for an
archive, which is unpacked beside itself. The room is free again once the upload is installed, dropped or too old.

A broken connection loses nothing: the next one sends the rest. So does a restarted agent, but not a restarted machine,
whose files may have holes.
"""

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, TypeVar
from weakref import WeakValueDictionary

from lorafleet.engine.acceptance import FILE_NAME as ACCEPTANCE_NAME
from lorafleet.service.files import make_private_folder
from lorafleet.service.tasks import finish_even_if_cancelled
from workers.core.errors import AgentRequestError, SourceError
from workers.sources.archive import unpack
from workers.sources.base import Limits, Transfer
from workers.storage.cache_folder import UPLOAD_NOTE, CacheFolder, boot_id
from workers.verification.adapter_files import WEIGHTS_NAME
from workers.verification.peft import CONFIG_NAME, MAX_CONFIG_BYTES
from workers.wire import BeginFileRequest, ReceivedFile, UploadState

ARCHIVE = "archive"
"""Name of a tar or zip file as a part of an upload."""
UPLOADED_FILES = (ARCHIVE, CONFIG_NAME, WEIGHTS_NAME, ACCEPTANCE_NAME)
_SMALL_FILES = (CONFIG_NAME, ACCEPTANCE_NAME)
_PACKED = ".packed"
# A tar file has up to 10 KiB around its members, and each member's header.
_ARCHIVE_OVERHEAD_BYTES = 1 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

T = TypeVar("T")


class Uploads:
    """The uploads of one agent. Of each file one connection writes at a time: the newest."""

    def __init__(self, folder: CacheFolder, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._writers: dict[tuple[str, str], asyncio.Task[object]] = {}
        # Weak: a lock exists only while somebody holds it or waits for it.
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._note_lock = asyncio.Lock()

    async def state(self, upload_id: str) -> UploadState:
        """What has come of an upload. Raises AgentRequestError `upload_unknown` if nothing has."""
        upload = await asyncio.to_thread(self._read, upload_id)
        if not upload.files:
            raise AgentRequestError("upload_unknown", f"no byte of upload {upload_id} is on this worker")
        return upload

    async def unfinished(self) -> tuple[UploadState, ...]:
        """All uploads of this agent that are not installed yet."""
        uploads = await asyncio.to_thread(self._all)
        return tuple(upload for upload in uploads.values() if not upload.digest)

    async def begin(self, upload_id: str, name: str, ask: BeginFileRequest) -> UploadState:
        """Begin a file of an upload, from its first byte; a former attempt at the file is deleted.

        raises  AgentRequestError `upload_file_unknown`, SourceError `source_too_big`, `disk_full`
        """
        self._check_name(name)
        self._check_size(name, ask.total_bytes or 0)
        async with self._only_writer(upload_id, name), self._note_lock:  # its files have one note, all uploads one disk
            return await finish_even_if_cancelled(self._on_disk(lambda: self._begin(upload_id, name, ask)))

    async def receive(self, upload_id: str, name: str, start: int, chunks: AsyncIterator[bytes]) -> UploadState:
        """Append bytes to a begun file as they come; what came before an error stays.

        start   where they belong: at most the number of bytes that are here; further ones are replaced
        raises  AgentRequestError `upload_unknown`, `upload_offset`, `upload_superseded` once another connection sends
                the file; SourceError `source_too_big`, `disk_full`; and what `chunks` raises
        """
        self._check_name(name)
        async with self._only_writer(upload_id, name):
            upload = await asyncio.to_thread(self._read, upload_id)
            known = _begun_file(upload, name)
            if known is None or upload.digest:
                raise AgentRequestError("upload_unknown", f"upload {upload_id} has no unfinished file {name}; begin it")
            if start > known.received_bytes:
                received = known.received_bytes
                message = f"bytes from {start} on were sent, but {received} are here; send from {received} on"
                raise AgentRequestError("upload_offset", message, param="start")
            total, path = known.total_bytes, _part_path(self._path(upload_id), name)
            file = await self._on_disk(lambda: _open_unshared(path))
            try:
                await asyncio.to_thread(_truncate_to_start, file, start)
                async for chunk in chunks:
                    size = file.tell() + len(chunk)
                    if total is not None and size > total:
                        message = f"{name} was announced with {total} bytes, and {size} have come"
                        raise AgentRequestError("upload_offset", message, param=name)
                    self._check_size(name, size)
                    await self._on_disk(lambda data=chunk: file.write(data))  # type: ignore[misc]
            finally:
                await finish_even_if_cancelled(self._on_disk(file.close))
            return await asyncio.to_thread(self._read, upload_id)

    def source(self, upload_id: str) -> "UploadSource":
        """The upload as a source of one adapter."""
        return UploadSource(self, upload_id)

    async def unpack(self, upload_id: str, ref: str, into: Path, transfer: Transfer) -> None:
        """Put the adapter's files into a folder. The upload stays.

        raises  AgentRequestError `upload_unknown`, `upload_incomplete`; SourceError
        """
        upload = await asyncio.to_thread(self._read, upload_id)
        if not upload.files or upload.digest:
            raise AgentRequestError("upload_unknown", f"no byte of upload {upload_id} is on this worker; send it again")
        for file in upload.files:
            if file.total_bytes not in {None, file.received_bytes}:
                message = f"of {file.name} {file.received_bytes} of {file.total_bytes} bytes have come; send the rest"
                raise AgentRequestError("upload_incomplete", message)
        await finish_even_if_cancelled(
            asyncio.to_thread(self._unpack, upload, ref, into, transfer), on_cancel=transfer.cancel
        )

    async def finish(self, upload_id: str, digest: str) -> None:
        """Note that the upload is installed with this digest, and delete its bytes. Raises SourceError `disk_full`."""
        async with self._note_lock:
            await finish_even_if_cancelled(self._on_disk(lambda: self._finish(upload_id, digest)))

    async def drop(self, upload_id: str) -> None:
        """Delete an upload and all that has come of it; nothing without it."""
        await asyncio.to_thread(shutil.rmtree, self._path(upload_id), ignore_errors=True)

    # --- helpers -------------------------------------------------------------------------------------------------

    def _path(self, upload_id: str) -> Path:
        """The folder of an upload."""
        return self._folder.resumable_folder(f"upload {upload_id} {boot_id()}")

    def _read(self, upload_id: str) -> UploadState:
        """The upload as it is on the disk; without files where there is none. Blocking."""
        return _read_note(self._path(upload_id)) or UploadState(upload_id=upload_id)

    def _write(self, upload: UploadState) -> None:
        """Write the upload's note. Blocking. Raises OSError."""
        folder = self._path(upload.upload_id)
        make_private_folder(folder)
        partial = folder / f"{UPLOAD_NOTE}.new"
        partial.write_text(upload.model_dump_json())
        partial.replace(folder / UPLOAD_NOTE)

    def _all(self) -> dict[Path, UploadState]:
        """The folder of each of this agent's uploads, and what has come of it. Blocking."""
        read = {note.parent: _read_note(note.parent) for note in self._folder.upload_notes()}
        return {folder: upload for folder, upload in read.items() if upload is not None}

    def _begin(self, upload_id: str, name: str, ask: BeginFileRequest) -> UploadState:
        """As `begin`, blocking. Raises OSError."""
        upload, folder = self._read(upload_id), self._path(upload_id)
        if upload.digest or (name == ARCHIVE) != (_begun_file(upload, ARCHIVE) is not None):
            # Installed already, or of another form: all of it is begun anew.
            shutil.rmtree(folder, ignore_errors=True)
            upload = UploadState(upload_id=upload_id)
        _part_path(folder, name).unlink(missing_ok=True)
        begun = ReceivedFile(name=name, received_bytes=0, total_bytes=ask.total_bytes)
        files = sorted((begun, *(file for file in upload.files if file.name != name)), key=_upload_order)
        upload = UploadState(upload_id=upload_id, lora_id=ask.lora_id, tenant=ask.tenant, files=tuple(files))
        others = sum(_reserved_bytes(each) for each_folder, each in self._all().items() if each_folder != folder)
        needed = _reserved_bytes(upload)
        if others + needed > self._folder.free_bytes():
            raise _NoRoom(f"the upload needs {needed} bytes, and {others} are kept for others that are unfinished")
        self._write(upload)
        return upload

    def _finish(self, upload_id: str, digest: str) -> None:
        """As `finish`, blocking. Raises OSError."""
        upload = self._read(upload_id)
        files = tuple(file.model_copy(update={"total_bytes": file.received_bytes}) for file in upload.files)
        self._write(upload.model_copy(update={"files": files, "digest": digest}))
        for file in files:
            _part_path(self._path(upload_id), file.name).unlink(missing_ok=True)

    def _unpack(self, upload: UploadState, ref: str, into: Path, transfer: Transfer) -> None:
        """Link or copy the upload's files into the folder, and unpack its archive there. Raises SourceError."""
        folder = self._path(upload.upload_id)
        for file in upload.files:
            _link_or_copy(_part_path(folder, file.name), _part_path(into, file.name))
        limits = self._limits
        if _begun_file(upload, ARCHIVE) is not None:
            unpack(into / _PACKED, into, ref, limits.max_bytes, transfer, allow_pickle=limits.allow_pickle)
        else:
            transfer.choose_files([file.name for file in upload.files], allow_pickle=False)
            carried = into / ACCEPTANCE_NAME
            if carried.exists():
                transfer.texts[carried.name] = carried.read_bytes()
                carried.unlink()

    @contextlib.asynccontextmanager
    async def _only_writer(self, upload_id: str, name: str) -> AsyncIterator[None]:
        """Be the only writer of a file during the block, in place of the present one, whose task is cancelled.

        The connection of that one may be dead without a sign. Raises AgentRequestError `upload_superseded` in the task
        that is cancelled.
        """
        key, task = (upload_id, name), asyncio.current_task()
        assert task is not None, "an upload is written by a task"
        if (before := self._writers.get(key)) is not None:
            before.cancel()
        self._writers[key] = task
        try:
            async with self._locks.setdefault(key, asyncio.Lock()):
                yield
        except asyncio.CancelledError as exc:
            if self._writers.get(key) is task or task.uncancel():
                raise
            message = "another connection sends this file now; this one has ended"
            raise AgentRequestError("upload_superseded", message) from exc
        finally:
            if self._writers.get(key) is task:
                del self._writers[key]

    @staticmethod
    def _check_name(name: str) -> None:
        """Raises AgentRequestError `upload_file_unknown` for a file that is no part of an adapter."""
        if name not in UPLOADED_FILES:
            expected = ", ".join(UPLOADED_FILES)
            message = f"{name[:100]!r} is no file of an upload; expected one of {expected}"
            raise AgentRequestError("upload_file_unknown", message, param="name")

    def _check_size(self, name: str, size_bytes: int) -> None:
        """Raises SourceError `source_too_big` for so many bytes of a file."""
        most = MAX_CONFIG_BYTES if name in _SMALL_FILES else self._limits.max_bytes
        if size_bytes > most + (_ARCHIVE_OVERHEAD_BYTES if name == ARCHIVE else 0):
            hint = "" if name in _SMALL_FILES else "; see max_adapter_bytes"
            message = f"upload: {name} has {size_bytes} bytes or more, at most {most} are allowed{hint}"
            raise SourceError("source_too_big", message)

    async def _on_disk(self, operation: Callable[[], T]) -> T:
        """The result of a blocking operation on the disk. Raises SourceError `disk_full`, OSError."""
        try:
            return await asyncio.to_thread(operation)
        except OSError as exc:
            if exc.errno not in _FULL:
                raise
            free = await asyncio.to_thread(self._folder.free_bytes)
            why = f" ({exc.strerror})" if isinstance(exc, _NoRoom) else ""
            message = f"upload: no space left in {self._folder.folder}: {free} bytes are free{why}; give it more room"
            raise SourceError("disk_full", message, retry_after_s=30) from exc


class _NoRoom(OSError):
    """The disk has less room than an upload and those before it need."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.ENOSPC, why)


class UploadSource:
    """An upload as a source: its fetch unpacks what has come."""

    def __init__(self, uploads: Uploads, upload_id: str) -> None:
        self._uploads = uploads
        self._upload_id = upload_id

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        """Put the adapter's files into the folder. Raises SourceError, AgentRequestError. See `Source.fetch`."""
        await self._uploads.unpack(self._upload_id, ref, into, transfer)


def _read_note(folder: Path) -> UploadState | None:
    """The upload in a folder; None without a valid note. Blocking."""
    try:
        upload = UploadState.model_validate_json((folder / UPLOAD_NOTE).read_bytes())
    except (OSError, ValueError):
        return None
    if upload.digest:
        return upload  # its installation has deleted the bytes
    known = [file for file in upload.files if file.name in UPLOADED_FILES]
    files = (file.model_copy(update={"received_bytes": _size_or_zero(_part_path(folder, file.name))}) for file in known)
    return upload.model_copy(update={"files": tuple(files)})


def _part_path(folder: Path, name: str) -> Path:
    """Where the bytes of a file of an upload are."""
    return folder / (_PACKED if name == ARCHIVE else name)


def _size_or_zero(path: Path) -> int:
    """Size of a file; 0 without one. Blocking."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _begun_file(upload: UploadState, name: str) -> ReceivedFile | None:
    """The upload's file of this name; None before it is begun."""
    return next((file for file in upload.files if file.name == name), None)


def _upload_order(file: ReceivedFile) -> int:
    """Place of a file in the order of `UPLOADED_FILES`."""
    return UPLOADED_FILES.index(file.name)


def _reserved_bytes(upload: UploadState) -> int:
    """Room on the disk that the rest of an upload needs, as announced: an archive is unpacked beside itself."""
    if upload.digest:
        return 0
    needed = ((file, (file.total_bytes or 0) * (2 if file.name == ARCHIVE else 1)) for file in upload.files)
    return sum(max(0, size_bytes - file.received_bytes) for file, size_bytes in needed)


def _truncate_to_start(file: IO[bytes], start: int) -> None:
    """Cut an open file to its first bytes, and go to its end. Raises OSError."""
    file.seek(start)
    file.truncate()


def _open_unshared(path: Path) -> IO[bytes]:
    """Open a file to write on in it, created if it does not exist. Raises OSError.

    One that an installation has linked is copied first: the installed adapter keeps its bytes.
    """
    if not path.exists():
        return path.open("wb")
    if path.stat().st_nlink > 1:
        copy = path.with_name(f".{path.name}.copy")
        shutil.copyfile(path, copy)
        copy.replace(path)
    return path.open("r+b")


def _link_or_copy(path: Path, target: Path) -> None:
    """Make a file the same as another; by a hard link where the file system has them. Raises OSError."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
