"""Adapters in local folders: `file:///path` and plain paths, below allowed roots only."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from lorafleet.service.files import mode_of, stamp_of
from workers.core.errors import SourceError
from workers.core.references import is_like_repository, relative_problem
from workers.sources.base import Transfer
from workers.sources.file_system import FileSystemCalls
from workers.verification.adapter_files import folder_description
from workers.verification.beside import MOST_TEXT_BYTES, read_names
from workers.verification.peft import CONFIG_NAME, MAX_CONFIG_BYTES


class RepositoryProbe(Protocol):
    """Knows which repositories there are."""

    async def repository_problem(self, ref: str) -> str:
        """Why a repository cannot be read, in a few words and within seconds; "" if it can. Raises nothing."""


class LocalSource:
    """The source for local folders: copies files below `roots`. Symbolic links must stay below them.

    The file system is asked in threads alone: a network file system may hang.
    """

    def __init__(
        self,
        roots: Iterable[Path],
        *,
        max_bytes: int,
        allow_pickle: bool = False,
        calls: FileSystemCalls | None = None,
        hub: RepositoryProbe | None = None,
    ) -> None:
        """
        calls  runs what asks the file system, which may hang; default: for 30 s without a byte
        hub    is asked whether `org/name` is a repository; None: nobody is
        """
        self._calls = calls or FileSystemCalls(timeout_s=30.0)
        self._roots = tuple(root.absolute() for root in roots)
        self._max_bytes = max_bytes
        self._allow_pickle = allow_pickle
        self._hub = hub

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        """Copy the adapter's files from a folder below the roots, in a thread.

        Raises SourceError, `source_failed` also if its file system hangs. See `Source.fetch`.
        """
        if problem := relative_problem(_reference_path(ref)):
            raise await self._relative_error(ref, problem)

        def copy() -> None:
            self._copy_files(ref, self._existing_folder(ref), into, transfer)

        await self._calls.run(
            copy, place=self._place_of(ref), progress=lambda: transfer.progress.done_bytes, cancel=transfer.cancel
        )

    async def _relative_error(self, ref: str, problem: str) -> SourceError:
        """The error of a path that is not absolute: what lies at it below the roots, or on the hub."""
        path = _reference_path(ref)

        def is_below_a_root() -> bool:
            """Whether a folder of this name is where requests may name folders."""
            if not path or ".." in Path(path).parts:
                return False
            return any(stat.S_ISDIR(mode_of(Path(os.path.realpath(root / path)))) for root in self._roots)

        if await self._calls.run(is_below_a_root, place=self._place_of(ref)):
            message = f"source {ref!r}: {problem}; a folder of that name lies below one of this worker's `lora_roots`"
            return SourceError("source_relative", message)
        message = f"source {ref!r}: {problem}; no folder of that name lies below this worker's `lora_roots`"
        if self._hub is None or not is_like_repository(ref):
            return SourceError("source_relative", message)
        if missing := await self._hub.repository_problem(f"hf://{ref}"):
            return SourceError("source_relative", f"{message}, and on the hub: {missing}")
        return SourceError("source_is_repository", f"source {ref!r}: a repository on the hub; write hf://{ref}")

    async def check(self, ref: str) -> None:
        """Raises SourceError if the folder is not below the roots, `source_failed` if its file system hangs."""
        await self._calls.run(self._resolved_path, ref, place=self._place_of(ref))

    def _place_of(self, ref: str) -> str:
        """The root that the reference is below, by its text alone; else its path. Raises SourceError."""
        path = os.path.normpath(_reference_path(ref))
        return next((str(root) for root in self._roots if Path(path).is_relative_to(root)), path)

    def _resolved_path(self, ref: str) -> Path:
        """The resolved path of a reference. Raises SourceError if it is not below the roots."""
        path = _reference_path(ref)
        if problem := relative_problem(path):
            raise SourceError("source_relative", f"source {ref!r}: {problem}")
        return self._resolve_below_roots(Path(path), ref)

    def _existing_folder(self, ref: str) -> Path:
        """The resolved folder of a reference. Raises SourceError if it is not below the roots, or no folder."""
        folder = self._resolved_path(ref)
        if not stat.S_ISDIR(mode_of(folder)):
            raise SourceError("source_not_found", f"source {ref!r}: no such folder")
        return folder

    def _resolve_below_roots(self, path: Path, ref: str) -> Path:
        """The path without symbolic links. Raises SourceError if it is not below the roots."""
        # Checked before any access: the answer must not reveal whether a path outside the roots exists.
        try:
            resolved = Path(os.path.realpath(path))  # unlike `resolve()`, never raises for circular links
        except ValueError as exc:
            raise SourceError("source_invalid", f"source {ref!r}: not a path: {exc}") from exc
        # The root that it names comes first: another one's file system may hang.
        roots = sorted(self._roots, key=lambda root: not path.is_relative_to(root))
        if not any(resolved.is_relative_to(os.path.realpath(root)) for root in roots):
            message = f"source {ref!r}: outside the folders that requests may name; see `lora_roots` of the worker"
            raise SourceError("source_forbidden", message)
        return resolved

    def _copy_files(self, ref: str, folder: Path, into: Path, transfer: Transfer) -> None:
        """Copy the adapter's files and count their bytes in `transfer`. Blocking.

        Raises SourceError, `source_failed` if they changed meanwhile, TransferCancelled.
        """
        entries = list(folder.iterdir())
        found = [entry.name for entry in entries]
        folders = [entry.name for entry in entries if entry.is_dir()]
        names = sorted(transfer.choose_files(found, allow_pickle=self._allow_pickle, folders=folders))
        if CONFIG_NAME not in names:
            description = folder_description(found, folders)
            raise SourceError("source_not_found", f"source {ref!r}: no {CONFIG_NAME} in it, {description}")
        stamps = [stamp_of(folder / name) for name in names]
        for name in read_names(found):
            transfer.texts[name] = self._read_text(folder / name, f"{ref.rstrip('/')}/{name}")
        left = self._max_bytes
        for name in names:
            limit = min(left, MAX_CONFIG_BYTES) if name == CONFIG_NAME else left
            left -= self._copy_file(folder / name, into / name, limit, transfer, f"{ref.rstrip('/')}/{name}")
        if [stamp_of(folder / name) for name in names] != stamps:
            message = f"source {ref!r}: its files changed while they were copied; try again later"
            raise SourceError("source_failed", message, retry_after_s=30)

    def _copy_file(self, path: Path, target_path: Path, limit: int, transfer: Transfer, ref: str) -> int:
        """Copy a regular file of at most `limit` bytes, counting them in `transfer`; returns its size.

        ref     of the file, as the request names its folder
        raises  SourceError
        """
        with self._open_file(path, ref) as source:
            if (size := os.fstat(source.fileno()).st_size) > limit:
                raise SourceError("source_too_big", f"source {ref!r}: {size} bytes, at most {limit} are allowed")
            with target_path.open("xb") as target:
                while chunk := source.read(1 << 20):
                    target.write(chunk)
                    transfer.advance(len(chunk))
                    if target.tell() > limit:  # the file grew during the copy
                        raise SourceError("source_too_big", f"source {ref!r}: at most {limit} bytes are allowed")
                return target.tell()

    def _read_text(self, path: Path, ref: str) -> bytes:
        """The beginning of a text beside the adapter. Raises SourceError."""
        with self._open_file(path, ref) as source:
            return source.read(MOST_TEXT_BYTES)

    def _open_file(self, path: Path, ref: str) -> BinaryIO:
        """Open a regular file below the roots, for reading. Raises SourceError."""
        resolved = self._resolve_below_roots(path, ref)
        try:
            # NONBLOCK: opening a FIFO must not block. NOFOLLOW: the path is resolved, so a link is an attack.
            fd = os.open(resolved, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as exc:
            raise SourceError("source_not_found", f"source {ref!r}: {exc.strerror}") from exc
        source = os.fdopen(fd, "rb")
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            source.close()
            raise SourceError("source_invalid", f"source {ref!r}: not a regular file")
        return source


def _reference_path(ref: str) -> str:
    """The path of a reference. Raises SourceError for a file:// reference with a host."""
    if "://" not in ref:
        return ref
    parts = urlsplit(ref)
    if parts.netloc not in {"", "localhost"}:
        raise SourceError("source_invalid", f"source {ref!r}: file:// takes no host; write file:///path")
    return unquote(parts.path)
