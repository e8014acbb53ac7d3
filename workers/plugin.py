"""For downloaders of your own: subclass `LoraManager` and name the class with `--lora-downloader-plugin`."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class LoraStatus(StrEnum):
    """As the agent's adapter states (docs/protocol.md)."""

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
    """What a manager is told of; the agent's other events are its own business."""

    DOWNLOADING = "DOWNLOADING"
    DOWNLOADED_TO_DISK = "DOWNLOADED_TO_DISK"
    DELETED_FROM_DISK = "DELETED_FROM_DISK"
    LOADED_TO_DEVICE = "LOADED_TO_DEVICE"
    UNLOADED_FROM_DEVICE = "UNLOADED_FROM_DEVICE"
    LOAD_FAILED = "LOAD_FAILED"
    UNLOAD_FAILED = "UNLOAD_FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModel:
    """A downloaded adapter: `path` is a folder with `adapter_config.json` and `*.safetensors`; the rest is for you."""

    name: str
    path: Path
    base_model: str = ""
    size_bytes: int = 0
    status: LoraStatus = LoraStatus.ON_DISK
    location: CacheLocation = CacheLocation.DISK


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraEvent:
    """Something that happened to an adapter of this worker, whatever its source; `at` is ISO 8601 in UTC.

    digest                   "" where it is not known yet
    done_bytes, total_bytes  of DOWNLOADING, about once a second; None where the source has not said it
    error                    of what failed: a code and a sentence
    """

    type: LoraEventType
    name: str
    digest: str
    at: str
    done_bytes: int | None = None
    total_bytes: int | None = None
    error: str | None = None


class LoraManager(ABC):
    """Fetches adapters by name. Made once, without arguments, when the agent starts.

    Both methods may be coroutines; plain ones run in a thread of their own. Several names may be fetched at a time.
    """

    @abstractmethod
    def download_lora_to_disk(self, name: str) -> LoraModel | Awaitable[LoraModel]:
        """The adapter, in a folder that is complete. The agent copies, verifies and keeps its own copy.

        Raise FileNotFoundError for a name that does not exist; anything else is tried again later. Only the error's
        class is told to others, so a message may say what it likes.
        """

    @abstractmethod
    def delete_lora_from_disk(self, name: str) -> Awaitable[None] | None:
        """The agent needs that folder no more: it has its copy, or the fetch failed. Keep it if that is cheaper."""

    def on_event(self, event: LoraEvent) -> None:
        """Called in the agent's event loop; must return at once."""
        del event
