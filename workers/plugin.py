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
from enum import IntEnum, StrEnum
from pathlib import Path

from workers.core.errors import SourceError
from workers.core.references import parse_hub_reference
from workers.sources.base import Limits, Source, Transfer
from workers.sources.hub import HubSource

_LARGEST_BYTES = 8 << 30


class LoraStatus(IntEnum):
    """State of an adapter on a worker. LOADED: in the engine, but no longer for new requests."""

    DOWNLOADED = 1
    LOADED = 2
    READY_FOR_USE = 3
    # Beyond the proposal.
    REMOTE = 4
    DOWNLOADING = 5
    LOADING = 6
    FAILED = 7


class CacheLocation(StrEnum):
    """Where an adapter's weights are."""

    REMOTE = "remote"
    DISK = "disk"
    HOST = "host"
    DEVICE = "device"


class LoraEventType(IntEnum):
    """The agent's events that a downloader receives; their names are those of `GET /v1/events`."""

    DOWNLOADED_TO_DISK = 1
    DELETED_FROM_DISK = 2
    LOADED_TO_DEVICE = 3
    UNLOADED_FROM_DEVICE = 4
    # Beyond the proposal.
    DOWNLOADING = 5
    LOAD_FAILED = 6
    UNLOAD_FAILED = 7


@dataclass(slots=True)
class LoraModel:
    """An adapter on a worker. The first four fields are the proposal's, in its order.

    local_path  its folder, with `adapter_config.json` and `adapter_model.safetensors`; "": not on this disk
    digest      "" while it is not known
    pinned      of a download: the plugin's name for exactly these bytes, under which the agent fetches them again;
                "": the same name

    Of a downloaded adapter the agent reads `local_path` and `pinned` only.
    """

    name: str
    status: LoraStatus = LoraStatus.DOWNLOADED
    cache_location: CacheLocation = CacheLocation.DISK
    local_path: str = ""
    base_model: str = ""
    size_bytes: int = 0
    digest: str = ""
    pinned: str = ""


@dataclass(slots=True)
class LoraEvent:
    """An event of any adapter of this worker; `timestamp` is in UTC. The first four fields are the proposal's.

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


class LoraManager(ABC):
    """The adapters of one worker, as its downloader sees them. The agent's is given to `on_start`."""

    @abstractmethod
    def lora_models(self) -> Sequence[LoraModel]:
        """The worker's adapters, on disk and in the engine, sorted by name."""

    @abstractmethod
    def load_lora(self, name: str) -> Awaitable[LoraModel]:
        """Load an adapter into a free slot of the engine, fetched first if needed. Raises WorkerError."""

    @abstractmethod
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
        size_bytes = transfer.progress.done_bytes
        return LoraModel(reference.repo, local_path=str(folder), size_bytes=size_bytes, pinned=pinned)

    async def delete_lora_from_disk(self, name: str) -> LoraModel:
        """Delete an adapter's download, if there is one."""
        if folder := self._downloads.pop(name, None):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return LoraModel(name, LoraStatus.REMOTE, CacheLocation.REMOTE)
