"""Third-party sources: a downloader plugin, and entry points of the group `lorafleet.sources`."""

import asyncio
import importlib
import inspect
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import entry_points
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import structlog

from lorafleet.service.settings import SettingsError
from workers import plugin as plugin_interface
from workers.core.errors import SourceError, WorkerError
from workers.core.references import redacted
from workers.plugin import (
    CacheLocation,
    HuggingFaceDownloader,
    LoraDownloaderBase,
    LoraEvent,
    LoraEventType,
    LoraManager,
    LoraModel,
    LoraStatus,
)
from workers.sources.base import PLUGIN_SCHEME, Limits, Source, Transfer, run_in_daemon_thread
from workers.sources.file_system import FileSystemCalls
from workers.sources.local import LocalSource
from workers.wire import AgentEvent

log = structlog.get_logger()

GROUP = "lorafleet.sources"

DEFAULT_DOWNLOADER = f"{HuggingFaceDownloader.__module__}.{HuggingFaceDownloader.__qualname__}"
"""The downloader where neither a plugin nor `lora_path` is set."""


_AFTER_EVENT = {
    LoraEventType.DOWNLOADING: (LoraStatus.DOWNLOADING, CacheLocation.REMOTE),
    LoraEventType.DOWNLOADED_TO_DISK: (LoraStatus.DOWNLOADED, CacheLocation.DISK),
    LoraEventType.DELETED_FROM_DISK: (LoraStatus.REMOTE, CacheLocation.REMOTE),
    LoraEventType.LOADED_TO_DEVICE: (LoraStatus.READY_FOR_USE, CacheLocation.DEVICE),
    LoraEventType.UNLOADED_FROM_DEVICE: (LoraStatus.DOWNLOADED, CacheLocation.DISK),
    LoraEventType.LOAD_FAILED: (LoraStatus.FAILED, CacheLocation.DISK),
    LoraEventType.UNLOAD_FAILED: (LoraStatus.READY_FOR_USE, CacheLocation.DEVICE),
}
"""An adapter's status and location after each event."""


class PluginSource:
    """`plugin://name`: copies the folder that a downloader downloads, and then lets it delete that folder."""

    def __init__(self, downloader: LoraDownloaderBase, limits: Limits) -> None:
        self._downloader = downloader
        self._limits = limits
        self._file_system = FileSystemCalls(timeout_s=limits.timeout_s)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        """Have the plugin download the adapter, and copy its files into `into`.

        The plugin deletes its folder at the end of the transfer, when the agent has verified and installed its copy, or
        at once if the fetch fails. A second fetch of the name waits for that. Raises SourceError, also for a plugin's
        wrong result. See `Source.fetch`.
        """
        name = ref.partition("://")[2]
        lock = self._locks.setdefault(name, asyncio.Lock())
        await lock.acquire()

        async def release() -> None:
            """Let the plugin delete its folder, which a failure only logs, and let the next fetch of the name begin."""
            try:
                await self._call_plugin(ref, self._downloader.delete_lora_from_disk, name)
            except SourceError as exc:
                log.warning("the downloader plugin deleted nothing", name=name, error=str(exc))
            finally:
                lock.release()

        transfer.at_end(release)
        try:
            await self._copy_download(ref, name, into, transfer)
        except BaseException:
            await transfer.finish()
            raise

    async def _copy_download(self, ref: str, name: str, into: Path, transfer: Transfer) -> None:
        """Have the plugin download the adapter, and copy its files into `into`. Raises SourceError."""
        model = await self._call_plugin(ref, self._downloader.download_lora_to_disk, name)
        if not isinstance(model, LoraModel):
            raise SourceError("source_failed", _wrong_download(ref, type(model).__name__))
        if not isinstance(model.local_path, str | PathLike) or not str(model.local_path):
            found = "without a local_path" if not model.local_path else f"whose local_path is {model.local_path!r}"
            raise SourceError("source_failed", _wrong_download(ref, f"LoraModel {found}"))
        folder, limits = Path(model.local_path), self._limits
        local = LocalSource(
            [folder], max_bytes=limits.max_bytes, allow_pickle=limits.allow_pickle, calls=self._file_system
        )
        await local.fetch(str(folder), into, transfer)
        transfer.pinned = f"{PLUGIN_SCHEME}://{model.pinned or name}"

    async def _call_plugin(self, ref: str, function: Callable[[str], Any], name: str) -> Any:
        """Call a method of the plugin, in a thread unless it is a coroutine. Raises SourceError."""
        try:
            return await _call_plugin_method(function, name)
        except WorkerError:
            raise
        except FileNotFoundError:
            raise SourceError("source_not_found", f"source {redacted(ref)}: the plugin knows no such adapter") from None
        except Exception as exc:  # noqa: BLE001  (third-party code)
            owner, method = type(self._downloader).__name__, getattr(function, "__name__", "method")
            failure = f"{owner}.{method}: {type(exc).__name__}"
            raise SourceError("source_failed", f"source {redacted(ref)}: {failure}", retry_after_s=30) from None


def _wrong_download(ref: str, found: str) -> str:
    """The message about a plugin's download that is no folder."""
    return f"source {redacted(ref)}: the plugin returned a {found}, not a LoraModel with its folder"


def create_downloader(path: str, *, hub: Source, folder: Path) -> LoraDownloaderBase:
    """Import and create the plugin `package.module.Class`. Raises SettingsError unless it is a downloader.

    hub, folder  for a HuggingFaceDownloader: the source of `hf://`, and where to download
    """
    module, _, name = path.rpartition(".")
    try:
        plugin = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        advice = _plugin_advice(module, name)
        raise SettingsError(f"lora_downloader_plugin {path!r}: {exc}; {advice}") from exc
    if not _is_subclass_of(plugin, LoraDownloaderBase):
        raise SettingsError(f"lora_downloader_plugin {path!r}: must be a subclass of workers.plugin.LoraDownloaderBase")
    try:
        downloader: LoraDownloaderBase = (
            plugin(hub, folder) if _is_subclass_of(plugin, HuggingFaceDownloader) else plugin()
        )
    except TypeError as exc:
        raise SettingsError(f"lora_downloader_plugin {path!r}: cannot be made without arguments: {exc}") from exc
    return downloader


def _plugin_advice(module: str, name: str) -> str:
    """What to give in place of a plugin's path that cannot be imported."""
    if name in plugin_interface.__dict__:
        return f"give {plugin_interface.__name__}.{name}"
    importable = module.replace("-", "_")
    if importable != module:
        return (
            f"give the name by which Python imports the package, such as {importable}.{name},"
            f" or put a folder {module.partition('.')[0]!r} with it on PYTHONPATH"
        )
    return "expected package.module.Class, of a package that is installed or on PYTHONPATH"


def _is_subclass_of(value: object, base: type) -> bool:
    """Whether a value is a class with this class among its bases."""
    return isinstance(value, type) and base in value.__mro__


async def _call_plugin_method(function: Callable[[str], Any], name: str) -> Any:
    """A method's result, called in a thread unless it is a coroutine."""
    if inspect.iscoroutinefunction(function):
        return await function(name)
    result = await run_in_daemon_thread(function, name)
    return await result if inspect.isawaitable(result) else result


def entry_point_sources(limits: Limits, taken_schemes: frozenset[str]) -> dict[str, Source]:
    """Create the sources of installed entry points, by scheme; each is called with the limits. Raises SettingsError."""
    sources: dict[str, Source] = {}
    for point in entry_points(group=GROUP):
        if point.name in taken_schemes or point.name in sources:
            raise SettingsError(f"entry point {point.name} = {point.value} of {GROUP}: that scheme is taken")
        try:
            sources[point.name] = point.load()(limits)
        except (ImportError, AttributeError, TypeError) as exc:
            raise SettingsError(f"entry point {point.name} = {point.value} of {GROUP}: {exc}") from exc
    return sources


def start_downloader(downloader: LoraDownloaderBase, manager: LoraManager) -> None:
    """Pass this worker's manager to the downloader; logs errors of `on_start`."""
    try:
        downloader.on_start(manager)
    except Exception as exc:  # noqa: BLE001  (third-party code)
        log.warning("the downloader plugin failed at its start", error=type(exc).__name__)


def event_forwarder(
    downloader: LoraDownloaderBase, path_of: Callable[[str], Path] = Path
) -> Callable[[AgentEvent], None]:
    """A callback that passes adapter events to the downloader and logs errors of `on_event`.

    path_of  the folder of a verified adapter, by its digest
    """

    def listen(event: AgentEvent) -> None:
        """Pass an adapter's event to the downloader; other events are ignored, the downloader's errors logged."""
        if event.type not in LoraEventType.__members__ or event.lora_id is None:
            return
        digest = event.digest or ""
        event_type = LoraEventType[event.type]
        status, location = _AFTER_EVENT[event_type]
        location = location if digest else CacheLocation.REMOTE
        lora_event = LoraEvent(
            event_type=event_type,
            lora_model=LoraModel(
                event.lora_id,
                status,
                location,
                "" if location is CacheLocation.REMOTE else str(path_of(digest)),
                digest=digest,
            ),
            timestamp=datetime.fromisoformat(event.at),
            instance_id=event.instance_id,
            done_bytes=event.done_bytes,
            total_bytes=event.total_bytes,
            error=event.error,
        )
        try:
            downloader.on_event(lora_event)
        except Exception as exc:  # noqa: BLE001  (third-party code)
            log.warning("the downloader plugin failed on an event", type=event.type, error=type(exc).__name__)

    return listen
