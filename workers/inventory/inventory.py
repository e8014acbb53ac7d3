"""What this worker has: installed adapters, the engine's adapter slots, loads in progress, the latest failures."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal

import structlog

from lorafleet.engine.probe_adapters import PROBE_PREFIX
from lorafleet.identity import engine_name
from lorafleet.kv.connectors import NO_CONNECTOR, ConnectorVerdict
from lorafleet.service.loops import ChangeSignal
from lorafleet.service.times import utc_text
from workers.config import WorkerSettings
from workers.core.errors import EngineError, WorkerError
from workers.core.slots import AdapterSlots
from workers.engines.kinds import engine_traits
from workers.inventory.event_log import CORRECTING, RESTORING, AgentEventLog, Requester, UnrecordedHistory
from workers.inventory.installed_adapters import InstalledAdapters
from workers.inventory.pool_requests import PoolRequests
from workers.metrics import WorkerMetrics
from workers.sources.base import FetchProgress
from workers.wire import AgentEventType, LoadRequest, WorkerAdapter

log = structlog.get_logger()

_FAILURES_KEPT = 64

is_answered = ContextVar("is_answered", default=False)
"""Whether this is a call of an orchestrator, whose answer tells what the call changes."""


def timestamp() -> str:
    """The time now as the wire has it: ISO 8601 in UTC, with milliseconds."""
    return utc_text(datetime.now(UTC))


class Inventory:
    """The adapters of one worker. The event loop is the only writer.

    version    grows with each change
    due_version  the version that a heartbeat is to tell at once: that of the last change that no answer tells
    changes    wakes the sender of heartbeats
    kv_connector  what the engine's KV connector allows adapters
    device_refusal  why the engine's device runs no adapters of its base model; ""
    refused_names  engine names that the engine still lists, though their adapters were refused for their effect
    preloaded      lora_id -> engine name of the adapters that `preload_loras` has brought
    engine_modules  engine names of the adapters that the engine itself had at its start, such as its --lora-modules
    takes_loads    whether the engine loads and unloads adapters while it runs
    """

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        installed: InstalledAdapters,
        events: AgentEventLog,
        metrics: WorkerMetrics,
    ) -> None:
        self.installed = installed
        self.events = events
        self.changes = ChangeSignal()
        self.version = self.due_version = 0
        self.slots = AdapterSlots(settings.max_loras, settings.max_cpu_loras)
        self.kv_connector: ConnectorVerdict = NO_CONNECTOR
        self.device_refusal = ""
        self._settings = settings
        self._metrics = metrics
        self.history = UnrecordedHistory(timestamp)
        self._pool_requests = PoolRequests(metrics, settings.lora_reports)
        self.listed_at: float | None = None  # by the caller's clock; see `confirm_list`
        self.refused_names: set[str] = set()
        self.preloaded: dict[str, str] = {}
        self.engine_modules: frozenset[str] = frozenset()
        self.takes_loads = engine_traits(settings.engine).takes_adapters == "while running"
        self._listed_paths: Mapping[str, str] = {}
        self._progress: dict[str, WorkerAdapter] = {}
        self._failures: OrderedDict[str, WorkerAdapter] = OrderedDict()

    @property
    def loads_in_progress(self) -> Collection[WorkerAdapter]:
        """Adapters that are being downloaded or loaded."""
        return self._progress.values()

    @property
    def failed_loads(self) -> Collection[WorkerAdapter]:
        """The latest failed load of each adapter, at most 64."""
        return self._failures.values()

    def mark_changed(self) -> None:
        """Count a change, and wake the sender of heartbeats unless an answer to the orchestrator tells the change."""
        self.version += 1
        if not is_answered.get():
            self.due_version = self.version
            self.changes.notify()

    # --- changes -------------------------------------------------------------------------------------------------

    def reset_slots(self, *, keeps_ghosts: bool = True) -> None:
        """Empty the slots, for an engine without adapters; its list is not confirmed.

        keeps_ghosts  see EngineTraits
        """
        self.slots = AdapterSlots(self._settings.max_loras, self._settings.max_cpu_loras, keeps_ghosts=keeps_ghosts)
        self.listed_at, self._listed_paths = None, {}
        self.refused_names.clear()

    def record_paths(self, listed: Mapping[str, str]) -> None:
        """Record the engine's own list: engine name -> path."""
        self._listed_paths = dict(listed)

    def foreign_paths(self) -> dict[str, str]:
        """engine name -> path of the adapters in the engine that no request to this agent loaded."""
        names = self.slots.registered - {adapter.engine_name for adapter in self.installed.all()}
        return {name: self._listed_paths.get(name, "") for name in sorted(names)}

    def confirm_list(self, at_s: float) -> None:
        """Record that the engine's own list, requested at this time, agrees with this inventory."""
        self.listed_at = at_s

    @property
    def refusal(self) -> str:
        """Why the engine must get no adapters at all; "" if it may."""
        return self.kv_connector.refusal or self.device_refusal

    def adopt(self, name: str) -> None:
        """Record an adapter that the engine has already as loaded and wanted.

        An agent may have died after loading it.
        """
        self.slots = self.slots.after_load(name)
        adapter = self.installed.get(name)
        if adapter is not None and not adapter.is_wanted:
            self.installed.store(replace(adapter, is_wanted=True))

    def store_installed(self, adapter: WorkerAdapter) -> WorkerAdapter:
        """Publish and store an adapter whose files were just installed; an older entry keeps its counts and times."""
        self.events.add(
            "DOWNLOADED_TO_DISK",
            lora_id=adapter.lora_id,
            digest=adapter.digest,
            engine_name=adapter.engine_name,
            source=adapter.pinned_source,
        )
        stored = self.installed.get(adapter.engine_name)
        if stored is not None:
            adapter = replace(
                stored,
                source=adapter.source,
                pinned_source=adapter.pinned_source,
                path=adapter.path,
                base_model=adapter.base_model,
                acceptance_file=adapter.acceptance_file,
                rules=adapter.rules,
            )
        return self.installed.store(adapter)

    def report_download(self, lora_id: str, progress: FetchProgress) -> None:
        """Publish the progress of a fetch as an event, and show it in /metadata."""
        if (shown := self._progress.get(lora_id)) is not None:
            self._progress[lora_id] = replace(shown, fetched_bytes=progress.done_bytes)
        self.events.add(
            "DOWNLOADING", lora_id=lora_id, done_bytes=progress.done_bytes, total_bytes=progress.total_bytes
        )

    def mark_loaded(self, adapter: WorkerAdapter, *, load_seconds: float | None, by: Requester) -> WorkerAdapter:
        """Record and publish that the engine has loaded the adapter: it is wanted, and last in load order."""
        self.slots = self.slots.after_load(adapter.engine_name)
        return self._add_loaded(self._store_wanted(replace(adapter, load_seconds=load_seconds)), by)

    def mark_offered(self, adapter: WorkerAdapter, *, by: Requester) -> WorkerAdapter:
        """Record and publish that the engine loads the adapter with its first request: it is wanted, and on disk."""
        self.slots = self.slots.after_offer(adapter.engine_name)
        return self._add_loaded(self._store_wanted(adapter), by)

    def _store_wanted(self, adapter: WorkerAdapter) -> WorkerAdapter:
        """Store the adapter as wanted, loaded now, and last in load order."""
        order = self.installed.next_load_order()
        return self.installed.store(replace(adapter, is_wanted=True, loaded_at=timestamp(), order=order))

    def mark_taken(self, adapter: WorkerAdapter) -> None:
        """Record that the engine has loaded an adapter that was offered to it, with what was found of its effect."""
        self.slots = self.slots.after_load(adapter.engine_name)
        self.installed.store(adapter)
        self.mark_changed()

    def mark_restored(self, adapter: WorkerAdapter, *, load_seconds: float) -> None:
        """Record and publish that a restarted engine has loaded the adapter again.

        Writes no file unless its path or its effect changed.
        """
        stored = self.installed.get(adapter.engine_name)
        adapter = replace(adapter, loaded_at=timestamp(), load_seconds=load_seconds)
        if stored is None or (stored.path, stored.effect, stored.note) != (adapter.path, adapter.effect, adapter.note):
            self.installed.store(adapter)
        else:
            self.installed.update_in_memory(adapter)
        self.slots = self.slots.after_load(adapter.engine_name)
        self._add_loaded(adapter, RESTORING)

    def _add_loaded(self, adapter: WorkerAdapter, by: Requester) -> WorkerAdapter:
        """Drop the adapter's failure and progress, publish the event and wake the heartbeats."""
        adapter = replace(adapter, location=self.slots.location(adapter.engine_name))
        self._failures.pop(adapter.lora_id, None)
        self._progress.pop(adapter.lora_id, None)
        self.events.add(
            "LOADED_TO_DEVICE", lora_id=adapter.lora_id, digest=adapter.digest, engine_name=adapter.engine_name
        )
        log.info(
            "lora_loaded",
            lora_id=adapter.lora_id,
            worker_id=self._settings.instance_id,
            duration_sec=adapter.load_seconds,
            memory_mb=adapter.held_mb,
            asked_by=by.name,
            reason=by.reason,
        )
        self.history.record_operation(
            "load",
            by,
            lora_id=adapter.lora_id,
            digest=adapter.digest,
            duration_s=adapter.load_seconds,
            memory_mb=adapter.held_mb,
        )
        self.mark_changed()
        return adapter

    def mark_unloaded(self, adapter: WorkerAdapter, by: Requester) -> None:
        """Free the adapter's slot and publish its unload; a restarted engine may still load it again."""
        self.slots = self.slots.after_unload(adapter.engine_name)
        self.events.add(
            "UNLOADED_FROM_DEVICE", lora_id=adapter.lora_id, digest=adapter.digest, engine_name=adapter.engine_name
        )
        worker_id = self._settings.instance_id
        log.info("lora_unloaded", lora_id=adapter.lora_id, worker_id=worker_id, asked_by=by.name, reason=by.reason)
        self.history.record_operation("unload", by, lora_id=adapter.lora_id, digest=adapter.digest)
        self.mark_changed()

    def mark_refused(self, adapter: WorkerAdapter) -> None:
        """Record that the engine has loaded an adapter that is refused for its effect: it takes no slot.

        Its weights stay in the engine's memory as a ghost.
        """
        self.refused_names.add(adapter.engine_name)
        self.slots = self.slots.after_load(adapter.engine_name).after_unload(adapter.engine_name)

    def displaced_by_probe(self) -> str | None:
        """The loaded adapter that would leave the engine's memory for one more adapter; None: none would."""
        lost = set(self.slots.after_load(PROBE_PREFIX).displaced()).difference(self.slots.displaced())
        return next(iter(lost), None)

    def note_touched(self, name: str) -> None:
        """Record that a request of our own used an adapter, which makes it the newest one in the engine's memory."""
        self.slots = self.slots.after_use(name)

    def note_probe(self, kind: str) -> None:
        """Record that a probe of this kind of module was loaded and unloaded: its weights stay as a ghost."""
        name = PROBE_PREFIX + kind
        self.slots = self.slots.after_load(name).after_unload(name)

    def mark_foreign_unloaded(self, name: str, by: Requester) -> None:
        """Record and publish that the engine has unloaded an adapter that another client had loaded."""
        self.slots = self.slots.after_unload(name)
        self.installed.forget_foreign(name)
        self.events.add("UNLOADED_FROM_DEVICE", engine_name=name)
        self.history.record_operation("unload", by, lora_id=name, digest="")
        self.mark_changed()

    def mark_foreign_restored(self, adapter: WorkerAdapter) -> None:
        """Record and publish that a restarted engine has loaded again what another client had loaded."""
        self.slots = self.slots.after_load(adapter.engine_name)
        self.events.add("LOADED_TO_DEVICE", engine_name=adapter.engine_name)
        self.history.record_operation("load", RESTORING, lora_id=adapter.lora_id, digest="")
        self.mark_changed()

    def mark_unwanted(self, adapter: WorkerAdapter) -> None:
        """Store that a restarted engine must not load the adapter again; does not unload it."""
        self.installed.store(replace(self.installed.get(adapter.engine_name) or adapter, is_wanted=False))

    def forget_deleted(self, digests: Collection[str]) -> None:
        """Count adapters deleted from the cache, and forget them in the inventory, with events, unless wanted."""
        if not digests:
            return
        self._metrics.cache_deleted.inc(len(digests))
        forgotten = frozenset(digests) - self.wanted_digests()
        for adapter in self.installed.all():
            if adapter.digest in forgotten:
                self.installed.remove(adapter)
                self.events.add(
                    "DELETED_FROM_DISK", lora_id=adapter.lora_id, digest=adapter.digest, engine_name=adapter.engine_name
                )
        self.mark_changed()

    def wanted_digests(self) -> frozenset[str]:
        """Digests whose files must stay: loaded (also by another client), to be loaded again, or being loaded."""
        loaded = [
            adapter.digest
            for adapter in self.installed.all()
            if adapter.is_wanted or self.slots.has(adapter.engine_name)
        ]
        loading = [item.digest for item in self._progress.values() if item.digest]
        foreign = [
            adapter.files_digest
            for name, adapter in self.installed.foreign.items()
            if adapter.files_digest and self.slots.has(name)
        ]
        return frozenset((*loaded, *loading, *foreign))

    def correct_from_list(self, listed: set[str]) -> None:
        """Adjust slots and installed adapters to the engine's own list; logs and publishes differences."""
        for name in self.slots.registered - listed:
            self.slots = self.slots.after_unload(name)
        for name in listed - self.slots.registered:
            self.slots = self.slots.after_load(name)
        for adapter in self.installed.all():
            if adapter.is_wanted == (adapter.engine_name in listed):
                continue
            kind: AgentEventType = "LOADED_TO_DEVICE" if adapter.engine_name in listed else "UNLOADED_FROM_DEVICE"
            log.warning("the engine's list differs from the inventory", engine_name=adapter.engine_name, found=kind)
            self.installed.store(replace(adapter, is_wanted=adapter.engine_name in listed))
            self.events.add(kind, lora_id=adapter.lora_id, digest=adapter.digest, engine_name=adapter.engine_name)
            self.history.record_operation(
                "load" if adapter.engine_name in listed else "unload",
                CORRECTING,
                lora_id=adapter.lora_id,
                digest=adapter.digest,
            )
        self.mark_changed()

    def show_progress(self, lora_id: str, digest: str, state: Literal["downloading", "loading"]) -> None:
        """Show a load ("downloading" or "loading") in /metadata, unless the engine has the adapter already.

        Marks the inventory as changed.
        """
        name = engine_name(lora_id, digest) if digest else ""
        if self.slots.has(name):
            return
        self._progress[lora_id] = WorkerAdapter(
            lora_id=lora_id,
            digest=digest,
            engine_name=name,
            state=state,
            location="remote" if state == "downloading" else "disk",
            fetched_bytes=0 if state == "downloading" else None,
        )
        self.mark_changed()

    @contextmanager
    def recording_failure(self, request: LoadRequest, by: Requester) -> Iterator[None]:
        """Record a WorkerError of the block as a failed load, and raise it; end the load's progress in any case."""
        try:
            yield
        except WorkerError as exc:
            self.record_failure(request.lora_id, request.digest or "", exc, by)
            raise
        finally:
            self._progress.pop(request.lora_id, None)

    def record_failure(self, lora_id: str, digest: str, exc: WorkerError, by: Requester) -> None:
        """Log, count and publish a failed load, and keep it for `failed_loads`, where the oldest make room.

        Not kept if no slot was free, the load was cancelled, or the adapter is loaded.
        """
        name = engine_name(lora_id, digest) if digest else ""
        log.warning("load failed", lora_id=lora_id, code=exc.code, error=str(exc))
        self._metrics.count_load_failure(lora_id, exc.code)
        self.history.record_operation("load", by, lora_id=lora_id, digest=digest, error=f"{exc.code}: {exc}")
        if exc.code == "disk_full":
            self.history.record_incident("disk_full", f"{lora_id}: {exc}")
        self.events.add("LOAD_FAILED", lora_id=lora_id, digest=digest or None, error=f"{exc.code}: {exc}")
        # Neither a full worker nor a cancelled load says anything about the adapter.
        if exc.code not in {"no_free_slot", "cancelled"} and not self.slots.has(name):
            self._failures[lora_id] = WorkerAdapter(
                lora_id=lora_id, digest=digest, engine_name=name, state="failed", location="disk", error=str(exc)
            )
            while len(self._failures) > _FAILURES_KEPT:
                self._failures.popitem(last=False)
        self.mark_changed()

    def mark_used(self, requests: Mapping[str, int]) -> None:
        """Count requests by where their adapters were, and move these to the front of the engine's (estimated) LRU."""
        self._pool_requests.count(requests, self.slots)
        for name in requests:
            self.slots = self.slots.after_use(name)

    # --- slots ---------------------------------------------------------------------------------------------------

    def has_room(self, evict: str | None) -> bool:
        """Whether a load finds a free slot, or the victim named by `evict` is loaded."""
        return self.slots.free > 0 or self.named_victim(evict) is not None

    def named_victim(self, evict: str | None) -> WorkerAdapter | None:
        """The loaded adapter with this lora_id or engine name; None if `evict` is None or names none."""
        return next(
            (adapter for adapter in self.loaded_adapters() if evict in {adapter.engine_name, adapter.lora_id}), None
        )

    def has_loaded(self, lora_id: str, digest: str | None) -> bool:
        """Whether the engine has the adapter loaded, with this digest; None: any."""
        return any(
            adapter.lora_id == lora_id and digest in {None, adapter.digest} for adapter in self.loaded_adapters()
        )

    def no_free_slot_error(self) -> EngineError:
        """The error of a load for which no slot is free."""
        # Routers pass it on to tenants, so it names no adapter: they may belong to other tenants.
        return EngineError(
            "no_free_slot",
            f"all {self._settings.max_cpu_loras} adapter slots are taken; unload one of GET /v1/admin/loras,"
            " or name a victim that is loaded with `evict`",
        )

    def loaded_adapters(self) -> list[WorkerAdapter]:
        """The installed adapters that the engine has loaded."""
        return [adapter for adapter in self.installed.all() if self.slots.has(adapter.engine_name)]

    def update_gauges(self) -> None:
        """Set the gauges of loaded adapters and ghosts, and the adapters' memory and request series."""
        loaded = self.loaded_adapters()
        self._metrics.loaded.set(len(self.slots.registered))
        self._metrics.ghosts.set(self.slots.ghosts)
        differing = [each for each in loaded if each.acceptance is not None and each.acceptance.result == "differs"]
        self._metrics.differing_adapters.set(len(differing))
        self._metrics.partial_adapters.set(sum(adapter.ignored_modules is not None for adapter in loaded))
        self._metrics.unproved_adapters.set(sum(adapter.effect == "unknown" for adapter in loaded))
        self._metrics.set_loaded_adapters(
            replace(adapter, location=self.slots.location(adapter.engine_name)) for adapter in loaded
        )
        self._pool_requests.read_misses()
