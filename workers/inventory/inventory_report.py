"""The inventory as REST routes, heartbeats and events show it."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from statistics import median

from orchestrator.model.cards import card_fields
from workers.core.errors import sendable
from workers.inventory.context import AgentContext
from workers.inventory.inventory import Inventory
from workers.storage.local_adapters import LocalAdapter
from workers.wire import ListedAdapter, LoraCapacity, LoraInfo, WorkerAdapter, field_values, in_mb

_LOADS_KEPT = 32
_AVAILABLE_LISTED = 100


class InventoryReport:
    """Read-only views of an inventory, its cache and the adapters in lora_path."""

    def __init__(self, context: AgentContext, inventory: Inventory) -> None:
        self._inventory = inventory
        self._installed = inventory.installed
        self._settings = context.settings
        self._cache = context.cache
        self._local_adapters = context.local_adapters
        self._clock = context.clock
        self._summary_cache: tuple[tuple[int, int], tuple[int, str]] = ((-1, -1), (0, ""))
        self._local_cache: tuple[int, str] = (-1, "")

    @property
    def _takes_loads(self) -> bool:
        """Whether the engine loads adapters while it runs, and nothing of it forbids them."""
        return self._inventory.takes_loads and not self._inventory.refusal

    def info(self, *, with_available: bool = True) -> LoraInfo:
        """The adapters' part of /metadata: limits, adapters on disk and in the engine, free slots.

        with_available  False leaves `available_loras` out
        """
        settings, refusal = self._settings, self._inventory.refusal
        count, digest = self._available_summary()
        listed_at, loaded = self._inventory.listed_at, self.loaded()
        return LoraInfo(
            enabled=self._takes_loads,
            max_loras=settings.max_loras,
            max_cpu_loras=settings.max_cpu_loras,
            max_lora_rank=settings.max_lora_rank,
            available_loras=tuple(islice(self.available(), _AVAILABLE_LISTED)) if with_available else (),
            available_count=count,
            available_digest=digest,
            configured_digest=self._configured_digest(loaded),
            loaded_loras=loaded,
            list_age_s=None if listed_at is None else self._clock() - listed_at,
            refusal=refusal,
            is_salted=self._inventory.kv_connector.separation == "salted",
            capacity=self.capacity(),
        )

    def capacity(self) -> LoraCapacity:
        """The engine's slots, and this disk's free bytes. A worker that takes no loads has no available slot."""
        settings, slots = self._settings, self._inventory.slots
        return LoraCapacity(
            max_loras=settings.max_loras,
            loaded_count=len(slots.registered),
            available_slots=slots.free if self._takes_loads else 0,
            device_slots=settings.max_loras,
            host_slots=settings.max_cpu_loras,
            ghosts=slots.ghosts,
            disk_room_bytes=self._cache.room_bytes,
        )

    def loaded(self) -> tuple[WorkerAdapter, ...]:
        """Adapters that are loaded, being loaded, or failed; names that only the engine knows have no digest."""
        loaded = self._inventory.loaded_adapters()
        names = {adapter.engine_name for adapter in loaded}
        unknown = [self._foreign_adapter(name) for name in sorted(self._inventory.slots.registered - names)]
        return (
            *map(self.as_loaded, loaded),
            *unknown,
            *self._inventory.loads_in_progress,
            *map(self._marked, self._inventory.failed_loads),
        )

    def _foreign_adapter(self, name: str) -> WorkerAdapter:
        """An adapter that another client loaded: its digest is not known, that of the files at its path may be."""
        known = self._installed.foreign.get(name) or WorkerAdapter(lora_id=name, digest="", engine_name=name)
        return self._marked(replace(known, state="ready", location=self._inventory.slots.location(name)))

    def _marked(self, adapter: WorkerAdapter) -> WorkerAdapter:
        """The adapter, marked as configured where the operator's settings name its bytes."""
        return replace(adapter, is_configured=True) if self._is_configured(adapter) else adapter

    def _is_configured(self, adapter: WorkerAdapter) -> bool:
        """Whether the operator's settings name the adapter's bytes."""
        name, preloaded = adapter.engine_name, self._inventory.preloaded
        local = self._local_adapters.find(adapter.lora_id)
        return (
            name in self._inventory.engine_modules
            or (bool(name) and preloaded.get(adapter.lora_id) == name)
            or (adapter.state == "failed" and adapter.lora_id in self._settings.preload_loras)
            or (local is not None and local.manifest is not None and local.manifest.digest == adapter.digest)
        )

    def _local_adapter(self, item: LocalAdapter) -> WorkerAdapter:
        """An adapter in lora_path: with its bytes as they are there, or failed with the reason."""
        place = str(item.path)
        if item.manifest is None:
            return WorkerAdapter(
                lora_id=item.lora_id,
                digest="",
                state="failed",
                path=sendable(place),
                source=sendable(place),
                error=item.error,
                is_configured=True,
            )
        known = card_fields(item.manifest) | {"source": place}
        return WorkerAdapter(**known, lora_id=item.lora_id, path=place, is_configured=True)

    def configured(self) -> tuple[WorkerAdapter, ...]:
        """The adapters that the operator's settings name, sorted by lora_id; faulty ones are failed, with the reason.

        Where a folder in lora_path has other bytes than those loaded of that name, the item is the folder's. An engine
        that loads nothing while it runs serves no other folders.
        """
        items = {item.lora_id: item for item in self.loaded() if item.is_configured}
        if self._inventory.takes_loads:
            items |= {item.lora_id: self._local_adapter(item) for item in self._local_adapters.adapters}
        return tuple(items[lora_id] for lora_id in sorted(items))

    def _configured_digest(self, loaded: Iterable[WorkerAdapter]) -> str:
        """A digest of `configured`; "" without any. The part of lora_path is cached until a scan finds a change.

        loaded  as `loaded()` has them
        """
        revision = self._local_adapters.revision
        if self._local_cache[0] != revision:
            rows = (
                f"{item.path} {item.manifest.digest if item.manifest else item.error}"
                for item in self._local_adapters.adapters
            )
            self._local_cache = revision, "\n".join(rows)
        others = (
            f"{item.engine_name or item.lora_id} {item.digest or item.files_digest or item.error}"
            for item in loaded
            if item.is_configured
        )
        local = self._local_cache[1] if self._inventory.takes_loads else ""
        text = "\n".join((local, *others)).strip()
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16] if text else ""

    def available(self) -> Iterator[WorkerAdapter]:
        """Adapters with verified files on this disk: installed ones by latest load, then those only in lora_path."""
        cached = set()
        for adapter in reversed(self._installed.all()):
            cached.add((adapter.lora_id, adapter.digest))
            yield self.adapter_on_disk(adapter)
        for item in self._local_adapters.adapters:
            if item.manifest is not None and (item.lora_id, item.manifest.digest) not in cached:
                yield self._local_adapter(item)

    def _available_summary(self) -> tuple[int, str]:
        """Number of adapters on this disk, and a digest of their names.

        Cached until one is added or removed: 5,000 adapters take 15 ms, and every heartbeat has it.
        """
        revisions = (self._installed.revision, self._local_adapters.revision)
        if self._summary_cache[0] != revisions:
            names = {f"{adapter.lora_id}@{adapter.digest}" for adapter in self._installed.all()}
            names |= {
                f"{item.lora_id}@{item.manifest.digest}" for item in self._local_adapters.adapters if item.manifest
            }
            digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]
            self._summary_cache = (revisions, (len(names), digest))
        return self._summary_cache[1]

    def listed(self, adapters: Iterable[WorkerAdapter]) -> tuple[ListedAdapter, ...]:
        """Adapters of the catalog as items of `GET /v1/metadata/loras`."""
        registered = self._inventory.slots.registered
        found = []
        for adapter in adapters:
            local_adapter = self._local_adapters.find(adapter.lora_id)
            metadata = dict(local_adapter.metadata) if local_adapter else {}
            is_loaded = adapter.engine_name in registered
            found.append(ListedAdapter(**field_values(adapter), loaded=is_loaded, metadata=metadata))
        return tuple(found)

    def catalog(self) -> tuple[WorkerAdapter, ...]:
        """One item per lora_id, sorted: a loaded (or loading) adapter before one on disk before a failed one."""
        items: dict[str, WorkerAdapter] = {
            local_adapter.lora_id: self._local_adapter(local_adapter)
            for local_adapter in self._local_adapters.adapters
            if local_adapter.manifest is None
        }
        items |= {item.lora_id: item for item in self.loaded() if item.state == "failed"}
        items |= {item.lora_id: item for item in reversed(tuple(self.available()))}
        items |= {item.lora_id: item for item in self.loaded() if item.state != "failed"}
        return tuple(items[lora_id] for lora_id in sorted(items))

    def load_seconds(self) -> float:
        """Median load time of the 32 adapters loaded last, also over restarts; 0.0 without any."""
        measured = [adapter.load_seconds for adapter in self._installed.all() if adapter.load_seconds is not None]
        return median(measured[-_LOADS_KEPT:]) if measured else 0.0

    def as_loaded(self, adapter: WorkerAdapter) -> WorkerAdapter:
        """An adapter that the engine has, with its place there and what is wrong with its source."""
        location = self._inventory.slots.location(adapter.engine_name)
        return replace(
            adapter,
            location=location,
            state="ready",
            memory_mb=in_mb(adapter.held_bytes_at(location)),
            error=self._source_changed_error(adapter),
            is_configured=adapter.is_configured or self._is_configured(adapter),
        )

    def _source_changed_error(self, adapter: WorkerAdapter) -> str | None:
        """An error text if the adapter's folder in lora_path now holds other bytes; else None."""
        local_adapter = self._local_adapters.find(adapter.lora_id)
        if local_adapter is None or local_adapter.manifest is None or local_adapter.manifest.digest == adapter.digest:
            return None
        if adapter.source not in {str(local_adapter.path), local_adapter.path.as_uri()}:
            return None
        return (
            f"digest_mismatch: {local_adapter.path} now has digest {local_adapter.manifest.digest}, what is served is"
            f" {adapter.digest}; new bytes need a new lora_id"
        )

    def adapter_on_disk(self, adapter: WorkerAdapter) -> WorkerAdapter:
        """An adapter whose verified files are on this disk, and whether the engine has it."""
        if self._inventory.slots.has(adapter.engine_name):
            return self._marked(replace(adapter, state="ready"))
        return self._marked(replace(adapter, state="on_disk", lora_int_id=None))
