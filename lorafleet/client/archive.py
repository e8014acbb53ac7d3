"""An adapter's folder as a tar file that is never written: its size and any part of it are known before it is sent."""

import hashlib
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lorafleet.client.results import FleetError
from lorafleet.identity import FileEntry, files_digest
from workers.core.errors import SourceError
from workers.verification.beside import FileUse, known_name, notes_on_files, read_names, text_head

FILES = ("adapter_config.json", "adapter_model.safetensors")
_CHUNK_BYTES = 1 << 20
_MOST_NAMED = 500
"""Files beside an adapter's that an archive names; a worker takes 1000 entries."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of the archive: bytes, or a file."""

    size_bytes: int
    data: bytes = b""
    path: Path | None = None


class AdapterArchive:
    """The archive of the two files in a folder, and the digest that the fleet will find.

    What lies beside them is named: by an entry without content, and a text that workers compare with the base model's
    by its beginning. The same files give the same bytes, so that a broken upload can go on in another process.
    """

    def __init__(self, folder: Path) -> None:
        """Read the files once, for the digest. Blocking. Raises FleetError if the folder is no adapter's."""
        entries, self._parts = list[FileEntry](), list[_Part]()
        for name in FILES:
            path = folder / name
            try:
                with path.open("rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                    size = file.tell()
            except OSError as exc:
                expected = " and ".join(FILES)
                message = f"{path}: {exc.strerror}; expected an adapter's folder, with {expected}"
                raise FleetError(message) from exc
            entries.append(FileEntry(name, size, sha256))
            self._parts += _parts_of(name, _Part(size, path=path))
        for name, text in _named_beside(folder).items():
            self._parts += _parts_of(name, _Part(len(text), text))
        end = bytes(2 * tarfile.BLOCKSIZE)
        self._parts.append(_Part(len(end), end))
        self.digest = files_digest(entries)
        self.size_bytes = sum(part.size_bytes for part in self._parts)

    def chunks(self, start: int) -> Iterator[bytes]:
        """The bytes of the archive from `start` on. Raises FleetError if a file is gone or shorter meanwhile."""
        at = 0
        for part in self._parts:
            skipped = min(max(0, start - at), part.size_bytes)
            at += part.size_bytes
            if part.path is None:
                if skipped < part.size_bytes:
                    yield part.data[skipped:]
                continue
            left = part.size_bytes - skipped
            try:
                file = part.path.open("rb")
            except OSError as exc:
                message = f"{part.path}: {exc.strerror}, while the folder was sent; push it again"
                raise FleetError(message) from exc
            with file:
                file.seek(skipped)
                while left:
                    chunk = file.read(min(left, _CHUNK_BYTES))
                    if not chunk:
                        raise FleetError(f"{part.path}: it became shorter while it was sent; push the folder again")
                    left -= len(chunk)
                    yield chunk


def _parts_of(name: str, content: _Part) -> tuple[_Part, _Part, _Part]:
    """The pieces of an entry: its header, its content, and the padding behind it."""
    info = tarfile.TarInfo(name)
    info.size = content.size_bytes
    header = info.tobuf(tarfile.GNU_FORMAT)  # sizes of over 8 GiB without a further header
    padding = bytes(-content.size_bytes % tarfile.BLOCKSIZE)
    return _Part(len(header), header), content, _Part(len(padding), padding)


def _named_beside(folder: Path) -> dict[str, bytes]:
    """What an archive says of the files beside an adapter's: name -> the beginning of a text that is compared, or b"".

    A subfolder is named by an entry in it. Raises FleetError for a file that workers would refuse.
    """
    try:
        others = {path.name: path for path in sorted(folder.iterdir()) if path.name not in FILES}
        folders = {name for name, path in others.items() if path.is_dir()}
        notes_on_files(others, folders)
        texts = {name: text_head(others[name]) for name in read_names(others) if others[name].is_file()}
    except OSError as exc:
        raise FleetError(f"{folder}: {exc.strerror}; expected an adapter's folder that can be read") from exc
    except SourceError as exc:
        raise FleetError(f"{folder}: {exc}", code=exc.code) from exc
    shown = [name for name in others if known_name(name + "/" * (name in folders)).use is not FileUse.HARMLESS]
    return {f"{name}/" * (name in folders) + name: texts.get(name, b"") for name in shown[:_MOST_NAMED]}
