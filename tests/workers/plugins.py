"""Downloader plugins for tests."""

import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

from tests.workers.source_servers import SECRET
from workers.plugin import LoraDownloaderBase, LoraEvent, LoraManager, LoraModel


class CopyingDownloader(LoraDownloaderBase):
    """A plugin that copies from a folder into its own, and records its events."""

    root = Path()

    def __init__(self) -> None:
        self.events: list[LoraEvent] = []
        self.downloads: dict[str, Path] = {}
        self.manager: LoraManager | None = None

    def download_lora_to_disk(self, name: str) -> LoraModel:
        if name == "secret":
            raise RuntimeError(SECRET)
        if name in self.downloads:
            raise RuntimeError("one name is fetched once at a time")
        folder = Path(tempfile.mkdtemp(dir=self.root))
        self.downloads[name] = folder / "copy"
        shutil.copytree(self.root / name, folder / "copy")
        return LoraModel(name, local_path=str(folder / "copy"))

    def delete_lora_from_disk(self, name: str) -> None:
        shutil.rmtree(self.downloads.pop(name, Path("/nonexistent")), ignore_errors=True)

    def on_start(self, manager: LoraManager) -> None:
        self.manager = manager
        raise RuntimeError("started")

    def on_event(self, event: LoraEvent) -> None:
        self.events.append(event)
        raise RuntimeError("told")


class AsyncCopyingDownloader(CopyingDownloader):
    async def download_lora_to_disk(self, name: str) -> LoraModel:
        return CopyingDownloader.download_lora_to_disk(self, name)

    async def delete_lora_from_disk(self, name: str) -> None:
        CopyingDownloader.delete_lora_from_disk(self, name)


class JournalingDownloader(CopyingDownloader):
    """Records events and deletions in order, each with the digests that the agent has installed by then."""

    journal: ClassVar[list[tuple[str, str, list[str]]]] = []
    cache = Path()

    def delete_lora_from_disk(self, name: str) -> None:
        super().delete_lora_from_disk(name)
        self.journal.append(("deleted", name, self.installed()))

    def on_start(self, manager: LoraManager) -> None:
        self.manager = manager

    def on_event(self, event: LoraEvent) -> None:
        self.journal.append((event.event_type.name, event.lora_model.name, self.installed()))

    def installed(self) -> list[str]:
        return [path.name for path in self.cache.iterdir() if len(path.name) == 64]


class NotADownloader:
    """A class that is no LoraDownloaderBase."""
