"""Where uploaded adapters are kept outside of the workers: a folder that workers share, or an object store."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any, Protocol

from lorafleet.service.object_stores import OBJECT_SCHEMES, StoreNotOpened, open_object_store
from orchestrator.core.errors import OrchestratorUnavailable

_TIMEOUT_S = 30.0
_PART_BYTES = 16 << 20  # of an upload in parts; S3 takes 10,000 of them


class UploadStore(Protocol):
    """Keeps the files of adapters by digest."""

    def source(self, digest: str) -> str:
        """The source of an adapter that is kept here, as workers read it."""

    async def write(self, digest: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Keep one file; what is there already is replaced by the same. Raises OrchestratorUnavailable."""


def upload_store(setting: str) -> UploadStore | None:
    """The store that a setting names: s3://, gs:// or az:// with bucket and folder, or a folder; None for "".

    Raises ValueError for any other form.
    """
    if not setting:
        return None
    scheme, is_url, rest = setting.partition("://")
    if is_url and scheme in OBJECT_SCHEMES and rest.strip("/"):
        return ObjectUploadStore(scheme, rest.strip("/"))
    path = Path(rest if is_url else setting)
    if (not is_url or scheme == "file") and path.is_absolute():
        return FolderUploadStore(path)
    expected = "an absolute path, or s3://bucket/folder, gs://bucket/folder, az://container/folder"
    raise ValueError(f"upload_store {setting!r}: expected {expected}")


class FolderUploadStore:
    """A folder that the workers see under the same path, below one of their `lora_roots`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def source(self, digest: str) -> str:
        """The adapter's folder as a URL."""
        return (self._folder / digest).as_uri()

    async def write(self, digest: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Write the file beside its place, and rename it once it is on the disk. Raises OrchestratorUnavailable."""
        try:
            partial, file = await asyncio.to_thread(self._open, digest)
            try:
                async for chunk in chunks:
                    await asyncio.to_thread(file.write, chunk)
                await asyncio.to_thread(_close_and_rename, file, partial, self._folder / digest / name)
            finally:
                file.close()
                partial.unlink(missing_ok=True)
        except OSError as exc:
            raise _store_failed(str(self._folder), f"{exc.strerror or exc}") from exc

    def _open(self, digest: str) -> tuple[Path, IO[bytes]]:
        """A new file in the adapter's folder, open for writing. Blocking. Raises OSError."""
        (self._folder / digest).mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=".new-", dir=self._folder / digest)
        os.fchmod(handle, 0o644)  # workers may run as another user
        return Path(path), os.fdopen(handle, "wb")


class ObjectUploadStore:
    """A bucket of an object store, or a folder in it. The library finds credentials in the environment."""

    def __init__(self, scheme: str, place: str) -> None:
        self._scheme = scheme
        self._place = place
        self._files: Any = None

    def source(self, digest: str) -> str:
        """The adapter's folder as a URL."""
        return f"{self._scheme}://{self._place}/{digest}"

    async def write(self, digest: str, name: str, chunks: AsyncIterator[bytes]) -> None:
        """Write the file in parts; a store shows it once it is whole. Raises OrchestratorUnavailable."""
        path = f"{self._place}/{digest}/{name}"
        try:
            if self._files is None:
                self._files = await asyncio.to_thread(open_object_store, self._scheme, timeout_s=_TIMEOUT_S)
            file = await asyncio.to_thread(self._files.open, path, "wb", block_size=_PART_BYTES)
            try:
                async for chunk in chunks:
                    await asyncio.to_thread(file.write, chunk)
                await asyncio.to_thread(file.close)
            except BaseException:
                file.closed = True  # else its destructor commits a part of the file
                await asyncio.to_thread(_discard, file)
                raise
        except StoreNotOpened as exc:
            raise _store_failed(f"{self._scheme}://{self._place}", str(exc)) from exc
        except OrchestratorUnavailable:
            raise
        except Exception as exc:  # three libraries, and what each of them is built on
            # Class only: messages may have addresses with signatures.
            raise _store_failed(f"{self._scheme}://{self._place}", type(exc).__name__) from exc


def _discard(file: Any) -> None:
    """End an upload in parts without its file; errors are ignored."""
    try:
        file.discard()
    except Exception:  # noqa: BLE001  (the store forgets unfinished uploads by its own rules)
        return


def _close_and_rename(file: IO[bytes], partial: Path, target: Path) -> None:
    """Flush a file to the disk and give it its name. Blocking. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())
    partial.replace(target)


def _store_failed(place: str, why: str) -> OrchestratorUnavailable:
    """The error of a store that takes no bytes."""
    message = f"the upload store {place} takes no bytes: {why}; the upload is kept for an hour: send it again"
    return OrchestratorUnavailable(message, code="upload_store_failed", retry_after_s=5)
