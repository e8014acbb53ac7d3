"""Downloader plugins for tests."""

import shutil
import tempfile
from pathlib import Path

from tests.workers.source_servers import SECRET
from workers.plugin import LoraEvent, LoraManager, LoraModel


class CopyingManager(LoraManager):
    """A plugin that copies from a folder into its own, and records its events."""

    root = Path()

    def __init__(self) -> None:
        self.events: list[LoraEvent] = []
        self.downloads: dict[str, Path] = {}

    def download_lora_to_disk(self, name: str) -> LoraModel:
        if name == "secret":
            raise RuntimeError(SECRET)
        folder = Path(tempfile.mkdtemp(dir=self.root))
        self.downloads[name] = folder / "copy"
        shutil.copytree(self.root / name, folder / "copy")
        return LoraModel(name=name, path=folder / "copy")

    def delete_lora_from_disk(self, name: str) -> None:
        shutil.rmtree(self.downloads.pop(name, Path("/nonexistent")), ignore_errors=True)

    def on_event(self, event: LoraEvent) -> None:
        self.events.append(event)
        raise RuntimeError("told")


class AsyncCopyingManager(CopyingManager):
    async def download_lora_to_disk(self, name: str) -> LoraModel:
        return CopyingManager.download_lora_to_disk(self, name)

    async def delete_lora_from_disk(self, name: str) -> None:
        CopyingManager.delete_lora_from_disk(self, name)


class NotAManager:
    """A class that is no LoraManager."""
