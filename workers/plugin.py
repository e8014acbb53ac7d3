"""Interface of downloader plugins: subclass `LoraManager` and name the class with `--lora-downloader-plugin`."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class LoraStatus(StrEnum):
    """State of an adapter on a worker, as in docs/protocol.md."""

    REMOTE = "remote"
    DOWNLOADING = "downloading"
    ON_DISK = "on_disk"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class CacheLocation(StrEnum):
    """Where an adapter's weights are."""

    REMOTE = "remote"
    DISK = "disk"
    HOST = "host"
    DEVICE = "device"


class LoraEventType(StrEnum):
    """The agent's events that a manager receives."""

    DOWNLOADING = "DOWNLOADING"
    DOWNLOADED_TO_DISK = "DOWNLOADED_TO_DISK"
    DELETED_FROM_DISK = "DELETED_FROM_DISK"
    LOADED_TO_DEVICE = "LOADED_TO_DEVICE"
    UNLOADED_FROM_DEVICE = "UNLOADED_FROM_DEVICE"
    LOAD_FAILED = "LOAD_FAILED"
    UNLOAD_FAILED = "UNLOAD_FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModel:
    """A downloaded adapter. `path` is a folder with `adapter_config.json` and `*.safetensors`.

    The agent reads `path` only; the other fields are for the plugin's own use.
    """

    name: str
    path: Path
    base_model: str = ""
    size_bytes: int = 0
    status: LoraStatus = LoraStatus.ON_DISK
    location: CacheLocation = CacheLocation.DISK


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraEvent:
    """An event of any adapter of this worker; `at` is ISO 8601 in UTC.

    digest                   "" while it is not known
    done_bytes, total_bytes  of DOWNLOADING, about once a second; None if the source does not report it
    error                    of the failure events: an error code and a sentence
    """

    type: LoraEventType
    name: str
    digest: str
    at: str
    done_bytes: int | None = None
    total_bytes: int | None = None
    error: str | None = None


class LoraManager(ABC):
    """Fetches adapters by name. The agent creates one instance, without arguments, when it starts.

    Both methods may be coroutines; plain methods run in a thread. Several names may be fetched at a time.
    """

    @abstractmethod
    def download_lora_to_disk(self, name: str) -> LoraModel | Awaitable[LoraModel]:
        """Return the adapter in a complete folder. The agent copies and verifies the files.

        Raise FileNotFoundError for an unknown name; after any other error the agent tries again later. Only the
        error's class is reported, so its message may contain secrets.
        """

    @abstractmethod
    def delete_lora_from_disk(self, name: str) -> Awaitable[None] | None:
        """Called when the agent no longer needs the folder: it has its copy, or the fetch failed. May keep it."""

    def on_event(self, event: LoraEvent) -> None:
        """Receive an event. Called in the agent's event loop, so it must return at once."""
        del event
