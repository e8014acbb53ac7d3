"""An adapter's folder as a tar file that is never written: its size and any part of it are known before it is sent."""

import hashlib
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lorafleet.client.results import FleetError
from lorafleet.identity import FileEntry, files_digest

FILES = ("adapter_config.json", "adapter_model.safetensors")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of the archive: bytes, or a file."""

    size_bytes: int
    data: bytes = b""
    path: Path | None = None


class AdapterArchive:
    """The archive of the two files in a folder, and the digest that the fleet will find.

    The same files give the same bytes, so that a broken upload can go on in another process.
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
            info = tarfile.TarInfo(name)
            info.size = size
            header = info.tobuf(tarfile.GNU_FORMAT)  # sizes of over 8 GiB without a further header
            padding = bytes(-size % tarfile.BLOCKSIZE)
            self._parts += (_Part(len(header), header), _Part(size, path=path), _Part(len(padding), padding))
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
