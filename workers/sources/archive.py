"""Unpacking of an adapter from an untrusted `.tar`, `.tar.gz` or `.zip`; its first bytes say which it is."""

import contextlib
import gzip
import io
import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from workers.core.errors import SourceError
from workers.core.references import redacted
from workers.sources.base import Transfer
from workers.verification.adapter_files import PICKLES, folder_description, is_adapter_file
from workers.verification.beside import MOST_TEXT_BYTES, read_names
from workers.verification.peft import CONFIG_NAME, MAX_CONFIG_BYTES

_CHUNK_BYTES = 1 << 20
_MAX_MEMBERS = 1000
_MAX_PATH = 1000
# Weights of zeros alone, as of a trainer's first step, shrink a thousand times; small archives of them are harmless.
_FREE_BYTES = 64 << 20
_MAX_RATIO = 100
# Limit for headers, which tarfile and zipfile keep in memory: larger ones are an attack.
_MAX_READ_BYTES = 4 << 20

_GZIP = b"\x1f\x8b"
_ZIP = b"PK"  # also of an empty one

_DAMAGED = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, gzip.BadGzipFile, EOFError, NotImplementedError,
    RuntimeError, ValueError, UnicodeError, OverflowError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Bounds:
    """How much an archive of so many bytes may unpack to, where an adapter may have `max_bytes`."""

    max_bytes: int
    packed_bytes: int

    @property
    def unpacked_bytes(self) -> int:
        """The most bytes of all entries together."""
        return min(self.max_bytes, max(_FREE_BYTES, _MAX_RATIO * self.packed_bytes))

    def excess_text(self) -> str:
        """What is too much: a clause for an error message."""
        if self.unpacked_bytes == self.max_bytes:
            return f"more than {self.max_bytes} bytes, see max_adapter_bytes; pack the adapter's two files alone"
        return (
            f"more than {self.unpacked_bytes} bytes, packed are {self.packed_bytes}; accepted are {_MAX_RATIO} times"
            f" the archive's size, or {_FREE_BYTES} bytes: pack it as a plain .tar, or send its two files"
        )


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """One entry of an archive; `kind` is "file", "folder", "link" or another text for error messages."""

    name: str
    size_bytes: int
    kind: str


def unpack(
    packed: Path, into: Path, ref: str, max_bytes: int, transfer: Transfer, *, allow_pickle: bool = False
) -> None:
    """Unpack the files of the one adapter in the archive into the folder and delete the archive.

    Kind, name and total size are checked before a member is read. Of a member's path only the last part is used.

    raises  SourceError: `source_unsafe`, `source_too_big`, `source_invalid`, `source_not_found`, `adapter_pickled`
    """
    try:
        bounds = _Bounds(max_bytes, packed.stat().st_size)
        members = _zip_members(packed) if _first_bytes(packed).startswith(_ZIP) else _tar_members(packed)
        folder_files = _unpack_adapter_files(members, into, ref, bounds, transfer)
        _keep_adapter_folder(folder_files, into, ref, transfer, allow_pickle=allow_pickle)
        packed.unlink()
    except _UnreadableMember as exc:
        hint = "; Windows packs large files by Deflate64: use a .tar" if "method 9;" in str(exc) else ""
        raise SourceError("source_invalid", f"source {redacted(ref)}: {exc}{hint}") from None
    except _DAMAGED:
        message = f"source {redacted(ref)}: damaged, or of another type; expected a .tar, .tar.gz, .tgz or .zip"
        raise SourceError("source_invalid", message) from None


class _UnreadableMember(Exception):
    """A zip file's entry that cannot be read; the message says why."""


ArchiveEntries = Iterator[tuple[ArchiveMember, "IO[bytes] | None"]]


def _unpack_adapter_files(
    entries: ArchiveEntries, into: Path, ref: str, bounds: _Bounds, transfer: Transfer
) -> dict[PurePosixPath, list[str]]:
    """Write what is read of every archive folder into a subfolder `.<number>`; returns folder -> file names.

    The names include those of files that are not written; of a text that is compared, the beginning is.
    raises  SourceError `source_unsafe`, `source_too_big`; TransferCancelled
    """
    total, count = 0, 0
    folder_files: dict[PurePosixPath, list[str]] = {}
    for member, content in entries:
        count, total = count + 1, total + member.size_bytes
        path = _checked_path(member, ref)
        if count > _MAX_MEMBERS:
            message = (
                f"source {redacted(ref)}: has more than {_MAX_MEMBERS} entries; pack the adapter's two files alone"
            )
            raise SourceError("source_too_big", message)
        if total > bounds.unpacked_bytes:
            raise SourceError("source_too_big", f"source {redacted(ref)}: unpacks to {bounds.excess_text()}")
        if member.kind != "file":
            continue
        if path.name == CONFIG_NAME and member.size_bytes > MAX_CONFIG_BYTES:
            message = f"source {redacted(ref)}: {CONFIG_NAME} has more than {MAX_CONFIG_BYTES} bytes"
            raise SourceError("source_too_big", message)
        names = folder_files.setdefault(path.parent, [])
        if path.name in names:
            raise SourceError("source_unsafe", f"source {redacted(ref)}: has {path.name} twice in one folder")
        names.append(path.name)
        if content is not None and _is_read(path.name):
            target = into / f".{list(folder_files).index(path.parent)}"
            target.mkdir(exist_ok=True)
            most = MOST_TEXT_BYTES if read_names([path.name]) else None
            _write_file(content, target / path.name, transfer, most)
    return folder_files


def _with_slashes(path: str) -> str:
    """A member's path; archives that Windows has made may have its own separator."""
    return path.replace("\\", "/")


def _is_read(name: str) -> bool:
    """Whether a file is an adapter's, a pickle, or a text that is compared or carried."""
    return is_adapter_file(name) or name in PICKLES or bool(read_names([name]))


def _keep_adapter_folder(
    folder_files: dict[PurePosixPath, list[str]], into: Path, ref: str, transfer: Transfer, *, allow_pickle: bool
) -> None:
    """Move the files of the one folder with an adapter up, and delete all others. Raises SourceError."""
    folders = [folder for folder, names in folder_files.items() if CONFIG_NAME in names]
    if len(folders) != 1:
        code = "source_invalid" if folders else "source_not_found"
        message = f"source {redacted(ref)}: {CONFIG_NAME} is in {len(folders)} of its folders; expected one adapter"
        if not folders:
            # macOS adds a file `._<name>` beside each file.
            all_names = {name for names in folder_files.values() for name in names if not name.startswith(".")}
            message += f", {folder_description(all_names)}"
        raise SourceError(code, message)
    (folder,) = folders
    names, unpacked = folder_files[folder], into / f".{list(folder_files).index(folder)}"
    below = (other.relative_to(folder) for other in folder_files if other.is_relative_to(folder) and other != folder)
    chosen = transfer.choose_files(names, allow_pickle=allow_pickle, folders={path.parts[0] for path in below})
    transfer.texts.update((name, (unpacked / name).read_bytes()) for name in read_names(names))
    for name in chosen:
        (unpacked / name).rename(into / name)
    for other in range(len(folder_files)):
        shutil.rmtree(into / f".{other}", ignore_errors=True)


def _checked_path(member: ArchiveMember, ref: str) -> PurePosixPath:
    """The member's path. Raises SourceError for links, special files and paths outside of the archive."""
    path = PurePosixPath(member.name)
    name = ascii(member.name[:100])
    if len(member.name) > _MAX_PATH:
        message = f"source {redacted(ref)}: {name}... is a path of {len(member.name)} characters; at most {_MAX_PATH}"
        raise SourceError("source_unsafe", f"{message} are taken")
    if member.kind not in {"file", "folder"}:
        message = f"source {redacted(ref)}: {name} is a {member.kind}; only files and folders are taken"
        raise SourceError("source_unsafe", message)
    if path.is_absolute() or ".." in path.parts or "\0" in member.name:
        raise SourceError("source_unsafe", f"source {redacted(ref)}: {name} leads out of the archive's folder")
    return path


def _write_file(content: IO[bytes], target_path: Path, transfer: Transfer, most: int | None) -> None:
    """Write a member's content, or its first `most` bytes, to a new file. Raises TransferCancelled."""
    with target_path.open("xb") as target:
        while (most is None or target.tell() < most) and (chunk := content.read(_CHUNK_BYTES)):
            target.write(chunk)
            transfer.advance(0)  # counted on download; raises if the fetch was cancelled


def _zip_members(packed: Path) -> ArchiveEntries:
    """The members of a zip file, with a stream for files that are read; reads it as they go. Raises BadZipFile."""
    with packed.open("rb") as raw, zipfile.ZipFile(_BoundedReader(raw)) as archive:
        for info in archive.infolist():
            mode = stat.S_IFMT(info.external_attr >> 16)
            name = _with_slashes(info.filename)
            kind = "folder" if name.endswith("/") else _KINDS.get(mode, "special file")
            member = ArchiveMember(name, info.file_size, kind)
            if kind != "file" or not _is_read(PurePosixPath(name).name):
                yield member, None
                continue
            if info.compress_type not in _METHODS or info.flag_bits & _ENCRYPTED:
                problem = "is encrypted" if info.flag_bits & _ENCRYPTED else f"has method {info.compress_type}"
                raise _UnreadableMember(f"{name[:100]!r} {problem}; accepted are stored, deflated, bzip2 and LZMA")
            with archive.open(info) as content:
                yield member, content


# The methods of every supported Python; 3.14 has Zstandard, too, but all workers must accept the same archives.
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA}
_ENCRYPTED = 1
_KINDS = {0: "file", stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}


def _tar_members(packed: Path) -> ArchiveEntries:
    """The members of a tar file, compressed or not, with a stream for files; reads it as they are taken."""
    with packed.open("rb") as raw, _uncompressed(raw, packed) as stream:
        archive = tarfile.TarFile(fileobj=_BoundedReader(stream), mode="r", errorlevel=2)
        while (info := archive.next()) is not None:
            member = ArchiveMember(_with_slashes(info.name), info.size, _tar_kind(info))
            yield member, archive.extractfile(info) if member.kind == "file" else None


def _uncompressed(raw: IO[bytes], packed: Path) -> "contextlib.AbstractContextManager[IO[bytes] | gzip.GzipFile]":
    """The uncompressed content of a file that may be gzip."""
    return gzip.GzipFile(fileobj=raw) if _first_bytes(packed).startswith(_GZIP) else contextlib.nullcontext(raw)


def _first_bytes(packed: Path) -> bytes:
    """The bytes that say which type of archive a file is. Raises OSError."""
    with packed.open("rb") as file:
        return file.read(max(len(_GZIP), len(_ZIP)))


def _tar_kind(info: tarfile.TarInfo) -> str:
    """The kind of a tar member: "file", "folder", "link", or a text for error messages."""
    if info.isdir():
        return "folder"
    if info.issym() or info.islnk():
        return "link"
    return "file" if info.isreg() and not info.issparse() else "device or special file"


class _BoundedReader(io.RawIOBase):
    """A file that allows only `_MAX_READ_BYTES` between two seeks, as tarfile and zipfile trust header sizes.

    source  CPython: tarfile and zipfile seek before they read a piece of a member, but not within headers. tarfile
            reads a header in one piece, since 2026 (gh-151497) in pieces of 1 MiB.
    """

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self._file = file
        self._left = _MAX_READ_BYTES

    def read(self, size: int = -1) -> bytes:
        """Read at most the rest of the allowance, and subtract it. Raises ValueError beyond it."""
        data = self._file.read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise ValueError("headers, or a directory, are too big")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        """Seek in the file, and renew the allowance."""
        self._left = _MAX_READ_BYTES
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """The position in the file."""
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
