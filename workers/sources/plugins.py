"""Third-party sources: a `LoraManager` plugin, and entry points of the group `lorafleet.sources`."""

import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import structlog

from lorafleet.service.settings import SettingsError
from workers.core.errors import SourceError, WorkerError
from workers.core.references import redacted
from workers.plugin import LoraEvent, LoraEventType, LoraManager, LoraModel
from workers.sources.base import Limits, Source, Transfer, run_in_daemon_thread
from workers.sources.local import LocalSource
from workers.wire import AgentEvent

log = structlog.get_logger()

GROUP = "lorafleet.sources"


class PluginSource:
    """`plugin://name`: copies the folder that a `LoraManager` downloads, and then lets it delete that folder."""

    def __init__(self, manager: LoraManager, limits: Limits) -> None:
        self._manager = manager
        self._limits = limits

    async def fetch(self, ref: str, into: Path, transfer: Transfer) -> None:
        """Have the plugin download the adapter, copy its files into `into`, then let the plugin delete its folder.

        Raises SourceError, also for a plugin's wrong result. See `Source.fetch`.
        """
        name = ref.partition("://")[2]
        try:
            model = await self._call_plugin(ref, self._manager.download_lora_to_disk, name)
            if not isinstance(model, LoraModel):
                message = f"source {redacted(ref)}: the plugin returned a {type(model).__name__}, not a LoraModel"
                raise SourceError("source_failed", message)
            local = LocalSource([model.path], max_bytes=self._limits.max_bytes, allow_pickle=self._limits.allow_pickle)
            await local.fetch(str(model.path), into, transfer)
        finally:
            await self._call_plugin(ref, self._manager.delete_lora_from_disk, name)

    async def _call_plugin(self, ref: str, function: Callable[[str], Any], name: str) -> Any:
        """Call a method of the plugin, in a thread unless it is a coroutine. Raises SourceError."""
        try:
            if inspect.iscoroutinefunction(function):
                return await function(name)
            result = await run_in_daemon_thread(function, name)
            return await result if inspect.isawaitable(result) else result
        except WorkerError:
            raise
        except FileNotFoundError:
            raise SourceError("source_not_found", f"source {redacted(ref)}: the plugin knows no such adapter") from None
        except Exception as exc:  # noqa: BLE001  (third-party code)
            failure = f"{type(self._manager).__name__}.{getattr(function, '__name__', 'method')}: {type(exc).__name__}"
            raise SourceError("source_failed", f"source {redacted(ref)}: {failure}", retry_after_s=30) from None


def create_manager(path: str) -> LoraManager:
    """Import and create the plugin `package.module.Class`. Raises SettingsError unless it is a LoraManager."""
    module, _, name = path.rpartition(".")
    try:
        manager_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise SettingsError(f"lora_downloader_plugin {path!r}: {exc}; expected package.module.Class") from exc
    if not (isinstance(manager_class, type) and issubclass(manager_class, LoraManager)):
        raise SettingsError(f"lora_downloader_plugin {path!r}: must be a subclass of workers.plugin.LoraManager")
    try:
        manager: LoraManager = manager_class()
    except TypeError as exc:
        raise SettingsError(f"lora_downloader_plugin {path!r}: cannot be made without arguments: {exc}") from exc
    return manager


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


def event_forwarder(manager: LoraManager) -> Callable[[AgentEvent], None]:
    """A callback that passes adapter events to the manager and logs errors of `on_event`."""
    kinds = {kind.value for kind in LoraEventType}

    def listen(event: AgentEvent) -> None:
        """Pass an adapter's event to the manager; other events are ignored, the manager's errors logged."""
        if event.type not in kinds or event.lora_id is None:
            return
        lora_event = LoraEvent(
            type=LoraEventType(event.type),
            name=event.lora_id,
            digest=event.digest or "",
            at=event.at,
            done_bytes=event.done_bytes,
            total_bytes=event.total_bytes,
            error=event.error,
        )
        try:
            manager.on_event(lora_event)
        except Exception as exc:  # noqa: BLE001  (third-party code)
            log.warning("the downloader plugin failed on an event", type=event.type, error=type(exc).__name__)

    return listen
