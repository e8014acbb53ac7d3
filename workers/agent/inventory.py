"""What this worker holds and tells: records, the engine's slots, loads under way, the latest failures."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from statistics import median

import structlog

from lorafleet.identity import engine_name
from lorafleet.kv.connectors import NO_CONNECTOR, ConnectorVerdict
from lorafleet.service.loops import ChangeSignal
from workers.agent.event_log import AgentEventLog
from workers.agent.installed_adapters import InstalledAdapter, InstalledAdapters
from workers.config import WorkerSettings
from workers.core.errors import EngineError, WorkerError
from workers.core.slots import AdapterSlots
from workers.metrics import WorkerMetrics
from workers.sources.base import FetchProgress
from workers.storage.cache import AdapterCache
from workers.storage.local_adapters import LocalAdapters
from workers.wire import AgentEventType, AvailableLora, LoadedLora, LoadRequest, LoraCapacity, LoraInfo

log = structlog.get_logger()

_FAILURES_KEPT = 64
_LOADS_KEPT = 32
_AVAILABLE_TOLD = 100


def timestamp() -> str:
    """Now, as the wire has times."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Inventory:
    """The event loop is the only writer. `changes` wakes whoever tells others; `version` grows with each change."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        cache: AdapterCache,
        local_adapters: LocalAdapters,
        installed: InstalledAdapters,
        events: AgentEventLog,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.installed = installed
        self.events = events
        self.changes = ChangeSignal()
        self.version = 0
        self.slots = AdapterSlots(settings.max_loras, settings.max_cpu_loras)
        self.connector: ConnectorVerdict = NO_CONNECTOR
        """What the engine's KV connector allows."""
        self._settings = settings
        self._cache = cache
        self._local_adapters = local_adapters
        self._metrics = metrics
        self._clock = clock
        self._listed_at: float | None = None
        self._progress: dict[str, LoadedLora] = {}
        self._failures: OrderedDict[str, LoadedLora] = OrderedDict()
        self._summary_cache: tuple[tuple[int, int], tuple[int, str]] = ((-1, -1), (0, ""))

    def mark_changed(self) -> None:
        self.version += 1
        self.changes.notify()

    # --- what happened -------------------------------------------------------------------------------------------

    def reset_slots(self, *, keeps_ghosts: bool = True) -> None:
        """An engine that holds nothing. `keeps_ghosts`: as its traits have it."""
        self.slots = AdapterSlots(self._settings.max_loras, self._settings.max_cpu_loras, keeps_ghosts=keeps_ghosts)
        self._listed_at = None

    def confirm_list(self, at_s: float) -> None:
        """The engine's own list, asked for at this time by our clock, had what we say that it holds."""
        self._listed_at = at_s

    def adopt(self, name: str) -> None:
        """The engine lists this name already: one that an agent loaded and died before it could note it, perhaps."""
        self.slots = self.slots.loaded(name)
        adapter = self.installed.get(name)
        if adapter is not None and not adapter.is_loaded:
            self.installed.store(replace(adapter, is_loaded=True))

    def store_installed(self, adapter: InstalledAdapter) -> InstalledAdapter:
        """Files that are installed and verified; what an older record of them knows is kept."""
        self.events.add(
            "DOWNLOADED_TO_DISK",
            lora_id=adapter.lora_id,
            digest=adapter.digest,
            engine_name=adapter.engine_name,
            source=adapter.pinned_source,
        )
        known = self.installed.get(adapter.engine_name)
        if known is not None:
            adapter = replace(
                known,
                source=adapter.source,
                pinned_source=adapter.pinned_source,
                path=adapter.path,
                base_model=adapter.base_model,
            )
        return self.installed.store(adapter)

    def report_download(self, lora_id: str, progress: FetchProgress) -> None:
        """How far a fetch is."""
        self.events.add(
            "DOWNLOADING", lora_id=lora_id, done_bytes=progress.done_bytes, total_bytes=progress.total_bytes
        )

    def mark_loaded(self, adapter: InstalledAdapter, *, load_seconds: float | None) -> InstalledAdapter:
        """The engine has taken it."""
        order = self.installed.next_load_order()
        adapter = replace(adapter, is_loaded=True, loaded_at=timestamp(), load_seconds=load_seconds, order=order)
        return self._add_loaded(self.installed.store(adapter))

    def mark_reloaded(self, adapter: InstalledAdapter, *, load_seconds: float) -> None:
        """The engine, started again, has taken back what the record had: nothing has to be written for that."""
        known = self.installed.get(adapter.engine_name)
        adapter = replace(adapter, loaded_at=timestamp(), load_seconds=load_seconds)
        if known is None or known.path != adapter.path:
            self.installed.store(adapter)
        else:
            self.installed.update_in_memory(adapter)
        self._add_loaded(adapter)

    def _add_loaded(self, adapter: InstalledAdapter) -> InstalledAdapter:
        self.slots = self.slots.loaded(adapter.engine_name)
        self._failures.pop(adapter.lora_id, None)
        self._progress.pop(adapter.lora_id, None)
        self.events.add(
            "LOADED_TO_DEVICE", lora_id=adapter.lora_id, digest=adapter.digest, engine_name=adapter.engine_name
        )
        self.mark_changed()
        return adapter

    def mark_unloaded(self, adapter: InstalledAdapter) -> None:
        """The engine has given it up; the record may still want it."""
        self.slots = self.slots.unloaded(adapter.engine_name)
        self.events.add(
            "UNLOADED_FROM_DEVICE", lora_id=adapter.lora_id, digest=adapter.digest, engine_name=adapter.engine_name
        )
        self.mark_changed()

    def mark_unwanted(self, adapter: InstalledAdapter) -> None:
        """No restart shall load it again."""
        self.installed.store(replace(self.installed.get(adapter.engine_name) or adapter, is_loaded=False))

    def forget_deleted(self, digests: Collection[str]) -> None:
        """Their files are gone from the cache, and with them what nobody wants to load."""
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
        """Digests whose files must stay: in the engine, to be there after a restart, or on the way."""
        held = [
            adapter.digest
            for adapter in self.installed.all()
            if adapter.is_loaded or self.slots.has(adapter.engine_name)
        ]
        return frozenset((*held, *(item.digest for item in self._progress.values() if item.digest)))

    def correct_from_list(self, listed: set[str]) -> None:
        """Put the record right where the engine's own list differs."""
        for name in self.slots.registered - listed:
            self.slots = self.slots.unloaded(name)
        for name in listed - self.slots.registered:
            self.slots = self.slots.loaded(name)
        for adapter in self.installed.all():
            if adapter.is_loaded == (adapter.engine_name in listed):
                continue
            kind: AgentEventType = "LOADED_TO_DEVICE" if adapter.engine_name in listed else "UNLOADED_FROM_DEVICE"
            log.warning("the engine's list differs from the record", engine_name=adapter.engine_name, found=kind)
            self.installed.store(replace(adapter, is_loaded=adapter.engine_name in listed))
            self.events.add(kind, lora_id=adapter.lora_id, digest=adapter.digest, engine_name=adapter.engine_name)
        self.mark_changed()

    def show_progress(self, lora_id: str, digest: str, state: str) -> None:
        """A load's stage, for whoever looks; the engine's own word stands where it has the adapter."""
        name = engine_name(lora_id, digest) if digest else ""
        if self.slots.has(name):
            return
        self._progress[lora_id] = LoadedLora.model_validate(
            {
                "lora_id": lora_id,
                "digest": digest,
                "engine_name": name,
                "state": state,
                "location": "remote" if state == "downloading" else "disk",
            }
        )
        self.mark_changed()

    @contextmanager
    def recording_failure(self, request: LoadRequest) -> Iterator[None]:
        """A load whose failure is kept for those who ask later."""
        try:
            yield
        except WorkerError as exc:
            self.record_failure(request.lora_id, request.digest or "", exc)
            raise
        finally:
            self._progress.pop(request.lora_id, None)

    def record_failure(self, lora_id: str, digest: str, exc: WorkerError) -> None:
        """A load that failed: logged, counted, told."""
        name = engine_name(lora_id, digest) if digest else ""
        log.warning("load failed", lora_id=lora_id, code=exc.code, error=str(exc))
        self._metrics.load_failures.labels(exc.code).inc()
        self.events.add("LOAD_FAILED", lora_id=lora_id, digest=digest or None, error=f"{exc.code}: {exc}")
        # A full worker says nothing about the adapter, and neither does a caller who wants it no more.
        if exc.code not in {"no_free_slot", "cancelled"} and not self.slots.has(name):
            self._failures[lora_id] = LoadedLora(
                lora_id=lora_id, digest=digest, engine_name=name, state="failed", location="disk", error=str(exc)
            )
            while len(self._failures) > _FAILURES_KEPT:
                self._failures.popitem(last=False)
        self.mark_changed()

    def mark_used(self, names: Collection[str]) -> None:
        """Requests ran on these: they move up in the engine's LRU."""
        for name in names:
            self.slots = self.slots.used(name)

    # --- slots ---------------------------------------------------------------------------------------------------

    def has_room(self, evict: str | None) -> bool:
        return self.slots.free > 0 or self.named_victim(evict) is not None

    def named_victim(self, evict: str | None) -> InstalledAdapter | None:
        """The loaded adapter that the caller named, by lora_id or engine name."""
        return next(
            (adapter for adapter in self.loaded_adapters() if evict in {adapter.engine_name, adapter.lora_id}), None
        )

    def no_free_slot_error(self) -> EngineError:
        # A router that asked for a tenant tells it this, so it names no adapter: they may be others' own.
        return EngineError(
            "no_free_slot",
            f"all {self._settings.max_cpu_loras} adapter slots are taken; unload one of GET /v1/admin/loras,"
            " or name a victim that is loaded with `evict`",
        )

    def loaded_adapters(self) -> list[InstalledAdapter]:
        """Records of what the engine holds."""
        return [adapter for adapter in self.installed.all() if self.slots.has(adapter.engine_name)]

    def update_gauges(self) -> None:
        """Bring the gauges up to date."""
        resident = self.loaded_adapters()
        self._metrics.loaded.set(len(self.slots.registered))
        self._metrics.ghosts.set(self.slots.ghosts)
        self._metrics.resident((each.lora_id, each.size_bytes, each.request_count) for each in resident)

    # --- what is told --------------------------------------------------------------------------------------------

    def info(self) -> LoraInfo:
        """The adapters' part of the metadata."""
        settings, slots, refusal = self._settings, self.slots, self.connector.refusal
        count, digest = self._available_summary()
        return LoraInfo(
            enabled=not refusal,
            max_loras=settings.max_loras,
            max_cpu_loras=settings.max_cpu_loras,
            max_lora_rank=settings.max_lora_rank,
            available_loras=tuple(islice(self.available(), _AVAILABLE_TOLD)),
            available_count=count,
            available_digest=digest,
            loaded_loras=self.loaded(),
            list_age_s=None if self._listed_at is None else self._clock() - self._listed_at,
            refusal=refusal,
            is_salted=self.connector.separation == "salted",
            capacity=LoraCapacity(
                loaded_count=len(slots.registered),
                available_slots=0 if refusal else slots.free,
                device_slots=settings.max_loras,
                host_slots=settings.max_cpu_loras,
                ghosts=slots.ghosts,
                disk_free_bytes=self._cache.free_bytes,
            ),
        )

    def loaded(self) -> tuple[LoadedLora, ...]:
        """In the engine, on the way there, or failed; unknown names that the engine lists come without a digest."""
        resident = self.loaded_adapters()
        known = {adapter.engine_name for adapter in resident}
        strangers = [
            LoadedLora(lora_id=name, digest="", engine_name=name, state="ready", location=self.slots.location(name))
            for name in sorted(self.slots.registered - known)
        ]
        return (*map(self.loaded_of, resident), *strangers, *self._progress.values(), *self._failures.values())

    def available(self) -> Iterator[AvailableLora]:
        """Adapters whose verified files are on this disk, latest load first, then those of the folder alone."""
        cached = set()
        for adapter in reversed(self.installed.all()):
            cached.add((adapter.lora_id, adapter.digest))
            yield self.available_of(adapter)
        for item in self._local_adapters.adapters:
            if item.manifest is not None and (item.lora_id, item.manifest.digest) not in cached:
                yield AvailableLora(
                    lora_id=item.lora_id,
                    path=str(item.path),
                    base_model=item.manifest.base_model,
                    rank=item.manifest.rank,
                    digest=item.manifest.digest,
                    size_bytes=item.manifest.size_bytes,
                )

    def _available_summary(self) -> tuple[int, str]:
        """How many are on this disk, and a digest of which. Made anew only when one comes or goes: it costs 15 ms
        at 5,000, and a heartbeat follows each step of a load."""
        known = (self.installed.revision, self._local_adapters.revision)
        if self._summary_cache[0] != known:
            names = {f"{adapter.lora_id}@{adapter.digest}" for adapter in self.installed.all()}
            names |= {
                f"{item.lora_id}@{item.manifest.digest}" for item in self._local_adapters.adapters if item.manifest
            }
            digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]
            self._summary_cache = (known, (len(names), digest))
        return self._summary_cache[1]

    def catalog(self) -> tuple[AvailableLora | LoadedLora, ...]:
        """One item a lora_id: in the engine before on disk before failed."""
        items: dict[str, AvailableLora | LoadedLora] = {
            local_adapter.lora_id: LoadedLora(
                lora_id=local_adapter.lora_id,
                digest="",
                engine_name="",
                state="failed",
                location="disk",
                path=str(local_adapter.path),
                error=local_adapter.error,
            )
            for local_adapter in self._local_adapters.adapters
            if local_adapter.manifest is None
        }
        items |= {item.lora_id: item for item in self.loaded() if item.state == "failed"}
        items |= {item.lora_id: item for item in reversed(tuple(self.available()))}
        items |= {item.lora_id: item for item in self.loaded() if item.state != "failed"}
        return tuple(items[lora_id] for lora_id in sorted(items))

    def load_seconds(self) -> float:
        """The middle of the latest loads, one an adapter, as the records have kept them over restarts; 0.0 for none."""
        measured = [adapter.load_seconds for adapter in self.installed.all() if adapter.load_seconds is not None]
        return median(measured[-_LOADS_KEPT:]) if measured else 0.0

    def loaded_of(self, adapter: InstalledAdapter) -> LoadedLora:
        return LoadedLora(
            lora_id=adapter.lora_id,
            digest=adapter.digest,
            engine_name=adapter.engine_name,
            state="ready",
            location=self.slots.location(adapter.engine_name),
            rank=adapter.rank,
            base_model=adapter.base_model,
            path=adapter.path,
            source=adapter.source,
            size_bytes=adapter.size_bytes,
            loaded_at=adapter.loaded_at,
            last_used=adapter.last_used,
            memory_mb=round(adapter.size_bytes / 1e6, 3),
            request_count=adapter.request_count,
            load_seconds=adapter.load_seconds,
            error=self._source_changed_error(adapter),
        )

    def _source_changed_error(self, adapter: InstalledAdapter) -> str | None:
        """Why this is not what its source holds any more: somebody put new bytes under an old name."""
        local_adapter = self._local_adapters.find(adapter.lora_id)
        if local_adapter is None or local_adapter.manifest is None or local_adapter.manifest.digest == adapter.digest:
            return None
        if adapter.source not in {str(local_adapter.path), local_adapter.path.as_uri()}:
            return None
        return (
            f"digest_mismatch: {local_adapter.path} now has digest {local_adapter.manifest.digest}, what is served is"
            f" {adapter.digest}; new bytes need a new lora_id"
        )

    def available_of(self, adapter: InstalledAdapter) -> AvailableLora:
        return AvailableLora(
            lora_id=adapter.lora_id,
            path=adapter.path,
            base_model=adapter.base_model,
            rank=adapter.rank,
            digest=adapter.digest,
            size_bytes=adapter.size_bytes,
            state="ready" if self.slots.has(adapter.engine_name) else "on_disk",
            source=adapter.pinned_source or adapter.source,
        )
