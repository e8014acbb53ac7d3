"""Interface of downloader plugins: subclass `LoraDownloaderBase`, and name the class with `--lora-downloader-plugin`.

The names are those of Dynamo's LoRA proposal; docs/founding.md says where they differ.
"""

import asyncio
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from workers.core.errors import SourceError
from workers.core.references import parse_hub_reference
from workers.sources.base import Limits, Source, Transfer
from workers.sources.hub import HubSource

_LARGEST_BYTES = 8 << 30


class LoraStatus(StrEnum):
    """State of an adapter on a worker, as in docs/protocol.md."""

    REMOTE = "remote"
    DOWNLOADING = "downloading"
    ON_DISK = "on_disk"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    # The proposal's names. An adapter that the engine has loaded is ready for use.
    DOWNLOADED = "on_disk"
    LOADED = "ready"
    READY_FOR_USE = "ready"


class CacheLocation(StrEnum):
    """Where an adapter's weights are."""

    REMOTE = "remote"
    DISK = "disk"
    HOST = "host"
    DEVICE = "device"


class LoraEventType(StrEnum):
    """The agent's events that a downloader receives."""

    DOWNLOADING = "DOWNLOADING"
    DOWNLOADED_TO_DISK = "DOWNLOADED_TO_DISK"
    DELETED_FROM_DISK = "DELETED_FROM_DISK"
    LOADED_TO_DEVICE = "LOADED_TO_DEVICE"
    UNLOADED_FROM_DEVICE = "UNLOADED_FROM_DEVICE"
    LOAD_FAILED = "LOAD_FAILED"
    UNLOAD_FAILED = "UNLOAD_FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModel:
    """An adapter on a worker.

    local_path  its folder, with `adapter_config.json` and `adapter_model.safetensors`; None: not on this disk
    digest      "" while it is not known
    pinned      of a download: the plugin's name for exactly these bytes, under which the agent fetches them again;
                "": the same name

    Of a downloaded adapter the agent reads `local_path` and `pinned` only.
    """

    name: str
    status: LoraStatus = LoraStatus.ON_DISK
    cache_location: CacheLocation = CacheLocation.DISK
    local_path: Path | None = None
    base_model: str = ""
    size_bytes: int = 0
    digest: str = ""
    pinned: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraEvent:
    """An event of any adapter of this worker; `timestamp` is in UTC.

    instance_id              the worker's
    done_bytes, total_bytes  of DOWNLOADING, about once a second; None if the source does not report it
    error                    of the failure events: an error code and a sentence
    """

    event_type: LoraEventType
    lora_model: LoraModel
    timestamp: datetime
    instance_id: str
    done_bytes: int | None = None
    total_bytes: int | None = None
    error: str | None = None


class LoraManager(Protocol):
    """The adapters of one worker, as its downloader sees them. The agent is the manager; see `on_start`."""

    def lora_models(self) -> Sequence[LoraModel]:
        """The worker's adapters, on disk and in the engine, sorted by name."""

    def load_lora(self, name: str) -> Awaitable[LoraModel]:
        """Load an adapter into a free slot of the engine, fetched first if needed. Raises WorkerError."""

    def unload_lora(self, name: str) -> Awaitable[LoraModel]:
        """Unload an adapter; its files stay on disk.

        Raises WorkerError, `epoch_required` where an orchestrator decides.
        """


class LoraDownloaderBase(ABC):
    """Fetches adapters by name. The agent creates one instance, without arguments, when it starts.

    Both download methods may be coroutines; plain methods run in a thread. Several names may be fetched at a time; one
    name is fetched once at a time.
    """

    @abstractmethod
    def download_lora_to_disk(self, name: str) -> LoraModel | Awaitable[LoraModel]:
        """Return the adapter in a complete folder. The agent copies and verifies the files.

        Raise FileNotFoundError for an unknown name; after any other error the agent tries again later. Only the
        error's class is reported, so its message may contain secrets.
        """

    @abstractmethod
    def delete_lora_from_disk(self, name: str) -> LoraModel | Awaitable[LoraModel | None] | None:
        """Called when the agent no longer needs the folder: its copy is verified, or the adapter refused. May keep it.

        The event DOWNLOADED_TO_DISK or LOAD_FAILED follows, and says which.

        The answer is for other callers; the agent ignores it.
        """

    def on_start(self, manager: LoraManager) -> None:
        """Receive this worker's manager. Called once in the agent's event loop, so it must return at once."""
        del manager

    def on_event(self, event: LoraEvent) -> None:
        """Receive an event. Called in the agent's event loop, so it must return at once."""
        del event


class HuggingFaceDownloader(LoraDownloaderBase):
    """Downloads `org/repo[/folder][@revision]` from a Hugging Face hub, by the agent's own `hf://` source.

    The agent's default where `lora_path` is not set.
    """

    def __init__(self, hub: Source | None = None, folder: Path | None = None) -> None:
        """`hub`: the source of `hf://`, with the agent's limits and token. `folder`: for downloads; default: TMPDIR."""
        self._hub = hub or HubSource(Limits(max_bytes=_LARGEST_BYTES))
        self._folder = folder
        self._downloads: dict[str, Path] = {}

    async def download_lora_to_disk(self, name: str) -> LoraModel:
        """Download an adapter into a folder of its own, which `delete_lora_from_disk` deletes; `pinned` is its commit.

        raises  FileNotFoundError if the name is no hub repository's; SourceError of the hub
        """
        try:
            reference = parse_hub_reference(f"hf://{name}")
        except SourceError as exc:
            raise FileNotFoundError(str(exc)) from exc
        # In cache_dir, `.partial-` folders that a crash left behind are deleted after an hour.
        folder = self._downloads[name] = Path(tempfile.mkdtemp(prefix=".partial-hub-", dir=self._folder))
        transfer = Transfer()
        await self._hub.fetch(f"hf://{name}", folder, transfer)
        pinned = transfer.pinned.removeprefix("hf://")
        return LoraModel(name=reference.repo, local_path=folder, size_bytes=transfer.progress.done_bytes, pinned=pinned)

    async def delete_lora_from_disk(self, name: str) -> LoraModel:
        """Delete an adapter's download, if there is one."""
        if folder := self._downloads.pop(name, None):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return LoraModel(name=name, status=LoraStatus.REMOTE, cache_location=CacheLocation.REMOTE)
