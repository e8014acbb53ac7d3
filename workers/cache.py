"""Adapters on this worker's disk: `<cache>/<digest>/`, written once, never changed. The stages fetch, verify, install.

vLLM reads an adapter's files again whenever its host LRU dropped it, inside the engine's step: files that vanish or
change there kill the engine (vLLM 0.32, seen running). So the folder is real, complete before it has its name, and
its files are read-only.
"""

import asyncio
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from workers.core import manifest as manifests
from workers.core.errors import SourceError
from workers.core.manifest import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    WEIGHTS_NAME,
    FileEntry,
    Manifest,
    Rules,
    Shape,
    inspect,
    is_adapter_file,
    parse_header,
)
from workers.core.references import shown
from workers.sources.base import Sources, Transfer, source_for

_PARTIAL = ".partial-"


class Cache:
    """One cache folder; several agents of a machine may share it."""

    def __init__(
        self,
        folder: Path,
        *,
        sources: Sources,
        rules: Rules,
        fetch_deadline_s: float,
        source_prefixes: tuple[str, ...] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        self.rules = rules
        self._sources, self._prefixes = sources, source_prefixes
        self._fetch_deadline_s = fetch_deadline_s
        self._verified: set[str] = set()

    @asynccontextmanager
    async def fetch(self, ref: str, transfer: Transfer | None = None) -> AsyncIterator[Path]:
        """A temporary folder holding the adapter's files as the source has them; gone afterwards unless installed.

        `transfer` tells how far it is while it runs, and afterwards the reference that names these very bytes.
        """
        source = source_for(ref, self._sources, self._prefixes)
        transfer = transfer or Transfer()
        transfer.pinned = ref
        try:
            partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self.folder))
        except OSError as exc:
            raise _disk_error(ref, exc) from exc
        try:
            async with asyncio.timeout(self._fetch_deadline_s):
                await source.fetch(ref, partial, transfer)
            yield partial
        except TimeoutError as exc:
            message = f"source {shown(ref)}: not fetched within {self._fetch_deadline_s:g} s; see fetch_deadline_s"
            raise SourceError("source_failed", message, retry_after_s=5) from exc
        except OSError as exc:
            raise _disk_error(ref, exc) from exc
        finally:
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)

    async def verify(self, folder: Path) -> Manifest:
        """The manifest of the adapter in a folder; raises SourceError naming the rule it breaks."""
        return await asyncio.to_thread(read_manifest, folder, self.rules)

    async def install(self, partial: Path, digest: str) -> Path:
        """Give a verified temporary folder its name. If another agent was faster, its copy is used once checked."""
        return await asyncio.to_thread(self._install, partial, digest)

    def path(self, digest: str) -> Path:
        return self.folder / digest

    async def has(self, digest: str) -> bool:
        """Whether the adapter is here with every byte as its digest says; read through once a process."""
        if digest in self._verified and self.path(digest).is_dir():
            return True
        intact = await asyncio.to_thread(_is_intact, self.path(digest), digest)
        if intact:
            self._verified.add(digest)
        return intact

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def clean(self) -> None:
        """Remove what a killed agent left half fetched. Folders younger than an hour may be a neighbour's."""
        newest = max((path.stat().st_mtime for path in self.folder.iterdir()), default=0.0)
        for path in self.folder.glob(_PARTIAL + "*"):
            if path.stat().st_mtime < newest - 3600:
                shutil.rmtree(path, ignore_errors=True)

    def _install(self, partial: Path, digest: str) -> Path:
        target = self.path(digest)
        for file in partial.iterdir():
            file.chmod(0o444)
            _sync(file)
        partial.chmod(0o755)
        if target.exists():
            if _is_intact(target, digest):
                self._verified.add(digest)
                return target
            # Damaged on disk. Moved aside, not deleted: an engine may have it open.
            target.rename(Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self.folder)) / digest)
        try:
            partial.rename(target)
        except OSError:
            if not _is_intact(target, digest):
                raise
        _sync(self.folder)
        self._verified.add(digest)
        return target


def read_manifest(folder: Path, rules: Rules) -> Manifest:
    """The manifest of the adapter in a folder: reads every byte once, for the digest."""
    files = tuple(_entry(path) for path in sorted(folder.iterdir()) if is_adapter_file(path.name))
    names = {entry.path for entry in files}
    if missing := {CONFIG_NAME, WEIGHTS_NAME} - names:
        raise SourceError("adapter_invalid", f"{', '.join(sorted(missing))} missing; found: {', '.join(sorted(names))}")
    if (size := (folder / CONFIG_NAME).stat().st_size) > MAX_CONFIG_BYTES:
        raise SourceError("source_too_big", f"{CONFIG_NAME} has {size} bytes, at most {MAX_CONFIG_BYTES} are allowed")
    tensors: dict[str, Shape] = {}
    for entry in files:
        if entry.path != CONFIG_NAME:
            tensors |= read_shapes(folder / entry.path)
    return inspect((folder / CONFIG_NAME).read_bytes(), tensors, files, rules)


def read_shapes(path: Path) -> Mapping[str, Shape]:
    """Every tensor's shape in a safetensors file: 8 bytes of header length, little-endian, then JSON."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise SourceError("adapter_invalid", f"{path.name}: not a safetensors file, or cut short")
        header = file.read(length)
    shapes, end = parse_header(header, path.name)
    if end != size - 8 - length:
        message = f"{path.name}: its tensors take {end} bytes, the file has {size - 8 - length}: cut short or padded"
        raise SourceError("adapter_invalid", message)
    return shapes


def base_shapes(model: Path) -> dict[str, Shape]:
    """module -> [out, in] of the linear layers in a model folder's safetensors; empty when it has none."""
    shapes: dict[str, Shape] = {}
    for path in sorted(model.glob("*.safetensors")):
        shapes |= {
            name.removesuffix(".weight"): shape
            for name, shape in read_shapes(path).items()
            if name.endswith(".weight") and len(shape) == 2
        }
    return shapes


def _disk_error(ref: str, exc: OSError) -> SourceError:
    code = "disk_full" if exc.errno == errno.ENOSPC else "source_failed"
    return SourceError(code, f"source {shown(ref)}: {exc}", retry_after_s=30)


def _entry(path: Path) -> FileEntry:
    if not path.is_file():  # opening a FIFO would wait for a writer for ever
        raise SourceError("adapter_invalid", f"{path.name}: not a regular file")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256")
        return FileEntry(path.name, file.tell(), found.hexdigest())


def _is_intact(folder: Path, digest: str) -> bool:
    try:
        return manifests.digest(_entry(path) for path in folder.iterdir() if is_adapter_file(path.name)) == digest
    except (OSError, SourceError):
        return False


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
