"""The slow source: a downloader plugin that every agent of the process shares."""

import tempfile
import threading
import time
from pathlib import Path
from typing import ClassVar

from workers.plugin import LoraDownloaderBase, LoraModel

_PIECE_BYTES = 1 << 16


class SlowDownloader(LoraDownloaderBase):
    """The source: a folder whose files come at `bytes_per_s`, shared by all readers. `served` counts the bytes."""

    folder: ClassVar[Path] = Path()
    bytes_per_s: ClassVar[float] = 1e6
    served: ClassVar[int] = 0
    _free_at: ClassVar[float] = 0.0
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def download_lora_to_disk(self, name: str) -> LoraModel:
        """Copy the folder of an adapter, as slowly as the source is."""
        into = Path(tempfile.mkdtemp())
        for path in sorted((self.folder / name).iterdir()):
            with path.open("rb") as source, (into / path.name).open("wb") as target:
                while piece := source.read(_PIECE_BYTES):
                    self._wait(len(piece))
                    target.write(piece)
        return LoraModel(name=name, local_path=str(into))

    def delete_lora_from_disk(self, name: str) -> None:
        """Nothing: the folders go with the run."""

    @classmethod
    def _wait(cls, size_bytes: int) -> None:
        """Wait until the source has sent these bytes."""
        with cls._lock:
            SlowDownloader.served += size_bytes
            SlowDownloader._free_at = max(cls._free_at, time.monotonic()) + size_bytes / cls.bytes_per_s
            until = cls._free_at
        time.sleep(max(0.0, until - time.monotonic()))
