"""The adapters of one worker: resolve -> fetch -> verify -> install -> load -> announce, and the way back.

The record says what this worker should hold, the engine's list what it does; both are compared after every start and
every few seconds. An agent never evicts by itself: the caller names the victim.
"""

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import structlog
from zmq import ZMQError

from lorafleet.loops import Changes
from orchestrator.wire import UsageReport, checked_lora_id
from workers.cache import Cache
from workers.config import WorkerSettings
from workers.core.errors import EngineError, RequestError, SourceError, WorkerError
from workers.core.manifest import Manifest, is_same_base
from workers.core.rates import Rates, Reading
from workers.core.slots import Slots
from workers.engines.base import Engine, Scrape, Shape
from workers.events import Events
from workers.kv import KvLedgers
from workers.library import Library
from workers.metrics import Metrics
from workers.records import Record, Records
from workers.wire import (
    KV_HASHING,
    AgentEventType,
    AgentState,
    AvailableLora,
    DrainAnswer,
    InspectRequest,
    Load,
    LoadedLora,
    LoadRequest,
    LoraCapacity,
    LoraInfo,
    Metadata,
    ModelCard,
    RuntimeConfig,
    Transport,
    UnloadRequest,
    engine_name,
)

log = structlog.get_logger()

_FAILURES_KEPT = 64
_LOADS_KEPT = 32


def timestamp() -> str:
    """Now, as the wire has times."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Agent:
    """One worker's adapters and what is known of its engine. The event loop is the only writer."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        cache: Cache,
        library: Library,
        records: Records,
        events: Events,
        metrics: Metrics,
        boot_id: str,
        agent_url: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.cache = cache
        self.library = library
        self.records = records
        self.events = events
        self.metrics = metrics
        self.boot_id = boot_id
        self.agent_url = agent_url
        self.changes = Changes()
        self.version = 0
        self.state: AgentState = "starting"
        self.state_reason = ""
        self.engine_boot_id = ""
        self.transport = Transport(engine_url="")
        self._clock = clock
        self._engine: Engine | None = None
        self._kv: KvLedgers | None = None
        self._shape = Shape()
        self._slots = Slots(settings.max_loras, settings.max_cpu_loras)
        self._scrape = Scrape()
        self._scraped_at: float | None = None
        self._rates = Rates()
        self._is_draining = False
        self._engine_lock = asyncio.Lock()
        self._adapter_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._progress: dict[str, LoadedLora] = {}
        self._failures: OrderedDict[str, LoadedLora] = OrderedDict()
        self._usage: dict[tuple[str, str], tuple[int, dict[str, int]]] = {}

    # --- the engine comes and goes -------------------------------------------------------------------------------

    def set_state(self, state: AgentState, reason: str = "") -> None:
        """What /metadata says. A drained worker stays draining until its agent restarts."""
        self.state = "draining" if self._is_draining and state == "ready" else state
        self.state_reason = reason
        self._changed()

    async def engine_up(self, engine: Engine, *, engine_boot_id: str, transport: Transport) -> None:
        """Take a healthy engine into use: load what should be there, then say ready. Raises EngineError."""
        self._shape = await engine.shape()
        self._slots = Slots(self.settings.max_loras, self.settings.max_cpu_loras)
        self._rates = Rates()
        self._engine, self.engine_boot_id = engine, engine_boot_id
        self.transport = await self._with_ledger(transport)
        self._changed()
        async with self._engine_lock:
            for name in await engine.adapters():
                self._slots = self._slots.loaded(name)
        await self._restore()
        await self._preload()
        if self._engine is not engine:
            raise EngineError("engine_down", "the engine went away while its adapters were loaded again")
        self.metrics.engine_up.set(1)
        self.events.add("ENGINE_UP")
        self.set_state("ready")
        log.info("ready", engine=engine.url, engine_boot_id=engine_boot_id, adapters=len(self._slots.registered))

    async def engine_down(self, reason: str) -> None:
        """The engine is gone, and with it all that it held; the record keeps what should be there."""
        was_up = self._engine is not None
        self._engine, self.engine_boot_id = None, ""
        await self.close_ledgers()
        self._scrape, self._scraped_at = Scrape(), None
        self._slots = Slots(self.settings.max_loras, self.settings.max_cpu_loras)
        self.metrics.engine_up.set(0)
        if was_up:
            self.events.add("ENGINE_DOWN", error=reason)
        self.set_state("engine_down", reason)

    async def _with_ledger(self, transport: Transport) -> Transport:
        """Begin the ledger of an engine that publishes KV events, and say so where routers look."""
        await self.close_ledgers()
        card = self._card()
        block_size = card.runtime_config.block_size
        if not transport.kv_events or not block_size:
            return transport
        try:
            self._kv = KvLedgers(
                transport=transport,
                base_model=card.base_model,
                block_size=block_size,
                engine_boot_id=self.engine_boot_id,
                metrics=self.metrics,
                total_blocks=card.runtime_config.total_kv_blocks,
            )
        except (ZMQError, ValueError) as exc:
            # The engine serves well without; routers find the sockets in the metadata and may do better.
            log.warning("no KV ledger", endpoints=transport.kv_events, error=str(exc))
            return transport
        return transport.model_copy(update={"kv_ledger": KV_HASHING})

    def kv_ledgers(self) -> KvLedgers:
        """The ledger of the engine's blocks; raises EngineError `not_ready` while there is none."""
        if self._kv is None:
            message = "no KV ledger: the engine is not up, or publishes no KV events"
            raise EngineError("not_ready", message, retry_after_s=5)
        return self._kv

    def end_streams(self) -> None:
        """Every stream ends now, so that the server can."""
        self.events.close()
        if self._kv is not None:
            self._kv.end_streams()

    async def close_ledgers(self) -> None:
        """Nothing of the engine's blocks is known any more."""
        ledgers, self._kv = self._kv, None
        self.transport = self.transport.model_copy(update={"kv_ledger": 0})
        if ledgers is not None:
            await ledgers.close()

    async def _restore(self) -> None:
        for record in self.records.all():
            if not record.is_loaded or self._slots.has(record.engine_name):
                continue
            if self._slots.free == 0:
                log.warning("adapter not loaded again: no free slot", lora_id=record.lora_id)
                self.records.put(replace(record, is_loaded=False))
                continue
            try:
                await self._restore_one(record)
            except SourceError as exc:
                self.records.put(replace(record, is_loaded=False))
                self._failed(record.lora_id, record.digest, exc)
            except EngineError as exc:
                if not await self._is_adapters_fault(exc):
                    raise
                self.records.put(replace(record, is_loaded=False))
                self._failed(record.lora_id, record.digest, exc)

    async def _restore_one(self, record: Record) -> None:
        if not await self.cache.has(record.digest):
            async with self.cache.fetch(record.source) as folder:
                manifest = await self.cache.verify(folder)
                _check_digest(record.lora_id, manifest.digest, record.digest)
                await self.cache.install(folder, record.digest)
        await self._load(replace(record, path=str(self.cache.path(record.digest))), evict=None)

    async def _is_adapters_fault(self, exc: EngineError) -> bool:
        """A refusal is this adapter's fault, and so is a load too slow for an engine that is well otherwise.

        Anything else is the engine's, and then it is all of them. Told apart, or one adapter on slow storage would
        have the engine started again for ever.
        """
        if exc.code != "engine_timeout":
            return exc.code in {"adapter_refused", "no_free_slot"}
        engine = self._engine
        return engine is not None and await engine.is_healthy(timeout_s=self.settings.health_timeout_s)

    async def _preload(self) -> None:
        for lora_id in self.settings.preload_loras:
            try:
                await self._ensure(LoadRequest(lora_id=lora_id))
            except (SourceError, RequestError) as exc:
                log.error("preload failed", lora_id=lora_id, code=exc.code, error=str(exc))  # noqa: TRY400
            except EngineError as exc:
                if not await self._is_adapters_fault(exc):
                    raise
                log.error("preload failed", lora_id=lora_id, code=exc.code, error=str(exc))  # noqa: TRY400

    # --- what callers ask for ------------------------------------------------------------------------------------

    def fence(self, epoch: int | None, *, is_destructive: bool) -> None:
        """Refuse a leader that has been replaced, and harm done by nobody in particular.

        raises RequestError `stale_epoch`, `epoch_required`
        """
        if epoch is None:
            if is_destructive and self.settings.orchestrator_url:
                raise RequestError(
                    "epoch_required",
                    "this worker belongs to an orchestrator: only it may unload or evict (header x-lorafleet-epoch);"
                    " without an epoch a load may take a free slot",
                )
            return
        if epoch < self.records.epoch:
            raise RequestError(
                "stale_epoch", f"epoch {epoch} is over: epoch {self.records.epoch} has been seen; read the lease again"
            )
        self.records.raise_epoch(epoch)

    async def load(self, request: LoadRequest) -> LoadedLora:
        """The adapter, ready in the engine; at once when it was there already. Raises WorkerError."""
        self._require_ready()
        return await self._ensure(request)

    async def _ensure(self, request: LoadRequest) -> LoadedLora:
        _check_id(request.lora_id)
        async with self._adapter_locks[request.lora_id]:
            with self._reported(request):
                record = await self._installed(request)
                self._show(record.lora_id, record.digest, "loading")
                return self._loaded(await self._load(record, evict=request.evict))

    async def _installed(self, request: LoadRequest) -> Record:
        """resolve, fetch, verify, install: the record of files that are on this disk with every byte right."""
        self._check_base(request.base_model)
        known = self._known(request)
        if known is not None and (self._slots.has(known.engine_name) or await self.cache.has(known.digest)):
            return known
        is_held = any(self._slots.has(record.engine_name) for record in self.records.of(request.lora_id))
        if not is_held and not self._has_room(request.evict):
            raise self._no_free_slot()  # before a fetch for nothing; what is held may be the very version asked for
        source = self._resolve(request)
        self._show(request.lora_id, request.digest or "", "downloading")
        with self._timed("fetch"):
            async with self.cache.fetch(source) as folder:
                with self._timed("verify"):
                    manifest = await self.cache.verify(folder)
                    _check_digest(request.lora_id, manifest.digest, request.digest)
                with self._timed("install"):
                    path = await self.cache.install(folder, manifest.digest)
        return self._remember(request.lora_id, source, manifest, path)

    def _known(self, request: LoadRequest) -> Record | None:
        """A record that answers this request without a look at its source: same digest, and no other source named.

        A digest alone grants nothing: the record exists because this lora_id's own source was verified here.
        """
        asked = request.source or request.lora_path
        for record in reversed(self.records.of(request.lora_id)):
            if request.digest is not None and record.digest == request.digest and asked in {None, record.source}:
                return record
        if request.digest is None and asked is None and self.library.path(request.lora_id) is None:
            return next(iter(reversed(self.records.of(request.lora_id))), None)
        return None

    def _resolve(self, request: LoadRequest) -> str:
        if asked := request.source or request.lora_path:
            return asked
        for record in reversed(self.records.of(request.lora_id)):
            if request.digest == record.digest:
                return record.source
        path = self.library.path(request.lora_id)
        if path is None:
            where = self.library.folder or "lora_path (not set)"
            raise RequestError(
                "adapter_unknown", f"adapter {request.lora_id!r}: not in {where}; give `source` or put it there"
            )
        return str(path)

    def _remember(self, lora_id: str, source: str, manifest: Manifest, path: Path) -> Record:
        name = engine_name(lora_id, manifest.digest)
        self.events.add("DOWNLOADED_TO_DISK", lora_id=lora_id, digest=manifest.digest, engine_name=name)
        if (known := self.records.get(name)) is not None:
            return self.records.put(replace(known, source=source, path=str(path)))
        return self.records.put(
            Record(
                lora_id=lora_id,
                digest=manifest.digest,
                engine_name=name,
                path=str(path),
                source=source,
                base_model=manifest.base_model,
                rank=manifest.rank,
                size_bytes=manifest.size_bytes,
            )
        )

    async def _load(self, record: Record, *, evict: str | None) -> Record:
        """The load stage: one at a time, because each one stalls the engine for everybody."""
        async with self._engine_lock:
            engine = self._require_engine()
            if self._slots.has(record.engine_name):
                return record if record.is_loaded else self.records.put(replace(record, is_loaded=True))
            victim = await self._make_room(engine, evict)
            began = self._clock()
            try:
                with self._timed("load"):
                    await self._load_and_check(engine, record)
            except EngineError:
                if victim is not None:
                    await self._put_back(engine, victim)
                raise
            self._slots = self._slots.loaded(record.engine_name)
            if self._kv is not None:
                self._kv.forget_adapter(record.engine_name)
            if displaced := self._slots.displaced():
                log.info("live adapters left the engine's host memory (estimated)", engine_names=displaced)
            announced = self._announce(record, load_seconds=round(self._clock() - began, 4))
            if victim is not None:
                # Only now: an agent killed between the two halves comes back with the victim, not with a gap.
                self._forget_load(victim)
            return announced

    async def _load_and_check(self, engine: Engine, record: Record) -> None:
        await engine.load(record.engine_name, Path(record.path), timeout_s=self.settings.load_deadline_s)
        if record.engine_name not in await engine.adapters():
            message = f"load {record.engine_name}: the engine said yes, but does not list it"
            raise EngineError("adapter_refused", message)

    def _announce(self, record: Record, *, load_seconds: float | None) -> Record:
        self._failures.pop(record.lora_id, None)
        self._progress.pop(record.lora_id, None)
        order = self.records.next_order()
        announced = self.records.put(
            replace(record, is_loaded=True, loaded_at=timestamp(), load_seconds=load_seconds, order=order)
        )
        self.events.add(
            "LOADED_TO_DEVICE", lora_id=record.lora_id, digest=record.digest, engine_name=record.engine_name
        )
        self._changed()
        return announced

    async def _make_room(self, engine: Engine, evict: str | None) -> Record | None:
        """Unload the named victim if the slots are full; a free slot spares it. Raises EngineError `no_free_slot`."""
        if self._slots.free > 0:
            return None
        victim = self._victim(evict)
        if victim is None:
            raise self._no_free_slot()
        await self._unload_one(engine, victim)  # its record waits until the newcomer is there
        return victim

    async def _put_back(self, engine: Engine, victim: Record) -> None:
        try:
            await engine.load(victim.engine_name, Path(victim.path), timeout_s=self.settings.load_deadline_s)
        except EngineError as exc:
            log.warning("the evicted adapter could not be put back", lora_id=victim.lora_id, error=str(exc))
            if exc.code == "adapter_refused":
                self._forget_load(victim)
            return  # else the engine is dying or gone: its restart loads what the record still says
        if self._engine is not engine:
            return
        self._slots = self._slots.loaded(victim.engine_name)
        self._announce(victim, load_seconds=victim.load_seconds)

    async def unload(self, request: UnloadRequest) -> tuple[str, ...]:
        """Engine names that were unloaded; requests in flight on them go on. Raises WorkerError `not_loaded`."""
        _check_id(request.lora_id)
        async with self._adapter_locks[request.lora_id], self._engine_lock:
            engine = self._require_engine()
            records = [
                record
                for record in self.records.of(request.lora_id)
                if self._slots.has(record.engine_name) and request.digest in {None, record.digest}
            ]
            if not records:
                version = f" with digest {request.digest}" if request.digest else ""
                raise RequestError("not_loaded", f"adapter {request.lora_id!r}{version} is not loaded here")
            for record in records:
                await self._unload_one(engine, record)
                self._forget_load(record)
            return tuple(record.engine_name for record in records)

    async def _unload_one(self, engine: Engine, record: Record) -> None:
        names = {"lora_id": record.lora_id, "digest": record.digest, "engine_name": record.engine_name}
        try:
            with self.metrics.unload_seconds.time():
                await engine.unload(record.engine_name, timeout_s=self.settings.load_deadline_s)
        except EngineError as exc:
            self.events.add("UNLOAD_FAILED", **names, error=str(exc))
            raise
        self._slots = self._slots.unloaded(record.engine_name)
        self.events.add("UNLOADED_FROM_DEVICE", **names)
        self._changed()

    def _forget_load(self, record: Record) -> None:
        self.records.put(replace(self.records.get(record.engine_name) or record, is_loaded=False))

    async def inspect(self, request: InspectRequest) -> AvailableLora:
        """Fetch, verify, install; load nothing. Raises WorkerError."""
        _check_id(request.lora_id)
        self._check_base(request.base_model)
        async with self._adapter_locks[request.lora_id]:
            async with self.cache.fetch(request.source) as folder:
                manifest = await self.cache.verify(folder)
                path = await self.cache.install(folder, manifest.digest)
            record = self._remember(request.lora_id, request.source, manifest, path)
        self._changed()
        return self._available_of(record)

    async def drain(self, deadline_s: float) -> DrainAnswer:
        """Say draining, refuse loads, and wait until the engine has nothing left or the deadline has passed."""
        if not self._is_draining:
            self._is_draining = True
            self.events.add("DRAINING")
        if self.state == "ready":
            self.set_state("draining")
        deadline = self._clock() + deadline_s
        while True:
            left_s = deadline - self._clock()
            try:
                async with asyncio.timeout(max(1.0, left_s)):
                    scrape = await self._engine.scrape() if self._engine is not None else Scrape()
            except (EngineError, TimeoutError) as exc:  # unheard is not drained: asked again while there is time
                if self._clock() >= deadline:
                    message = "draining, but the engine does not say what still runs; ask again"
                    raise EngineError("engine_timeout", message, retry_after_s=2) from exc
                await asyncio.sleep(0.2)
                continue
            left_s = deadline - self._clock()
            if scrape.running + scrape.waiting == 0 or left_s <= 0:
                return DrainAnswer(
                    is_drained=scrape.running + scrape.waiting == 0, running=scrape.running, waiting=scrape.waiting
                )
            await asyncio.sleep(min(0.2, left_s))

    def usage(self, report: UsageReport) -> bool:
        """Take a router's counts; false for one that was taken before. Uses move adapters up in the estimated LRU."""
        key = (report.router_id, report.boot_id)
        last_seq, counts = self._usage.get(key, (-1, {}))
        if report.seq <= last_seq:
            return False
        if key not in self._usage and len(self._usage) >= 256:
            self._usage.pop(next(iter(self._usage)))
        mine = [use for use in report.uses if use.worker_id == self.settings.instance_id]
        for use in mine:
            record = self.records.get(use.engine_name)
            before = counts.get(use.engine_name, 0)
            new = use.requests - before if use.requests >= before else use.requests  # a router may count anew
            if record is not None and new > 0:
                self._slots = self._slots.used(use.engine_name)
                self.records.keep(replace(record, request_count=record.request_count + new, last_used=timestamp()))
        # What a report leaves out has not been counted back to zero.
        self._usage[key] = (report.seq, counts | {use.engine_name: use.requests for use in mine})
        return True

    # --- what is read every so often -----------------------------------------------------------------------------

    async def scrape(self) -> None:
        """Read the engine's own counters. Raises EngineError."""
        if self._engine is None:
            return
        self._scrape = scrape = await self._engine.scrape()
        self._scraped_at = self._clock()
        self._rates.add(
            Reading(
                at_s=self._scraped_at,
                running=scrape.running,
                computed_tokens=scrape.computed_tokens,
                steps=scrape.steps,
                ended=scrape.ended,
                ended_prefill_tokens=scrape.ended_prefill_tokens,
                ended_prefill_seconds=scrape.ended_prefill_seconds,
                ended_output_tokens=scrape.ended_output_tokens,
                ended_seconds=scrape.ended_seconds,
                token_gaps=scrape.token_gaps,
                gap_seconds=scrape.gap_seconds,
            )
        )
        self.metrics.rates(self._rates)

    async def look(self) -> None:
        """Look at the folder and at the engine's own list, and put the record right where they differ."""
        if await self.library.scan():
            self._changed()
        async with self._engine_lock:
            engine = self._engine
            if engine is None or self.state not in {"ready", "draining"}:
                return
            listed = set(await engine.adapters())
            if self._engine is engine and listed != self._slots.registered:
                self._correct(listed)

    def _correct(self, listed: set[str]) -> None:
        for name in self._slots.registered - listed:
            self._slots = self._slots.unloaded(name)
        for name in listed - self._slots.registered:
            self._slots = self._slots.loaded(name)
        for record in self.records.all():
            if record.is_loaded == (record.engine_name in listed):
                continue
            kind: AgentEventType = "LOADED_TO_DEVICE" if record.engine_name in listed else "UNLOADED_FROM_DEVICE"
            log.warning("the engine's list differs from the record", engine_name=record.engine_name, found=kind)
            self.records.put(replace(record, is_loaded=record.engine_name in listed))
            self.events.add(kind, lora_id=record.lora_id, digest=record.digest, engine_name=record.engine_name)
        self._changed()

    def measure(self) -> None:
        """Bring the gauges up to date."""
        if self._kv is not None:
            self._kv.measure()
        loaded = [record for record in self.records.all() if self._slots.has(record.engine_name)]
        self.metrics.loaded.set(len(self._slots.registered))
        self.metrics.ghosts.set(self._slots.ghosts)
        self.metrics.memory_bytes.set(sum(record.size_bytes for record in loaded))
        self.metrics.requests.set(sum(record.request_count for record in loaded))
        self.metrics.disk_free_bytes.set(self.cache.free_bytes())

    # --- what is told --------------------------------------------------------------------------------------------

    def metadata(self) -> Metadata:
        """Everything that a router or an orchestrator may know of this worker."""
        settings = self.settings
        return Metadata(
            instance_id=settings.instance_id,
            namespace=settings.namespace,
            state=self.state,
            state_reason=self.state_reason,
            agent_url=self.agent_url,
            zone=settings.zone,
            node=settings.node,
            model=self._card(),
            transport=self.transport,
            lora=self._lora(),
            load=self._load_figures(),
            agent_boot_id=self.boot_id,
            engine_boot_id=self.engine_boot_id,
            epoch=self.records.epoch,
        )

    def loaded(self) -> tuple[LoadedLora, ...]:
        """In the engine, on the way there, or failed; unknown names that the engine lists come without a digest."""
        names = self._slots.registered
        records = [record for record in self.records.all() if record.engine_name in names]
        known = {record.engine_name for record in records}
        strangers = [
            LoadedLora(lora_id=name, digest="", engine_name=name, state="ready", location=self._slots.location(name))
            for name in sorted(names - known)
        ]
        return (*map(self._loaded, records), *strangers, *self._progress.values(), *self._failures.values())

    def available(self) -> tuple[AvailableLora, ...]:
        """Adapters whose verified files are on this disk: of the folder, and of the cache."""
        shelved = {
            (item.lora_id, item.manifest.digest): AvailableLora(
                lora_id=item.lora_id,
                path=str(item.path),
                base_model=item.manifest.base_model,
                rank=item.manifest.rank,
                digest=item.manifest.digest,
                size_bytes=item.manifest.size_bytes,
            )
            for item in self.library.adapters
            if item.manifest is not None
        }
        cached = {(record.lora_id, record.digest): self._available_of(record) for record in self.records.all()}
        return tuple((shelved | cached).values())

    def catalog(self) -> tuple[AvailableLora | LoadedLora, ...]:
        """One item a lora_id: in the engine before on disk before failed."""
        items: dict[str, AvailableLora | LoadedLora] = {
            shelved.lora_id: LoadedLora(
                lora_id=shelved.lora_id,
                digest="",
                engine_name="",
                state="failed",
                location="disk",
                path=str(shelved.path),
                error=shelved.error,
            )
            for shelved in self.library.adapters
            if shelved.manifest is None
        }
        items |= {item.lora_id: item for item in self.loaded() if item.state == "failed"}
        items |= {item.lora_id: item for item in self.available()}
        items |= {item.lora_id: item for item in self.loaded() if item.state != "failed"}
        return tuple(items[lora_id] for lora_id in sorted(items))

    def _card(self) -> ModelCard:
        settings, shape = self.settings, self._shape
        name = settings.model_name or shape.model_name
        return ModelCard(
            name=name,
            base_model=settings.base_name or name,
            runtime_config=RuntimeConfig(
                block_size=shape.block_size or settings.block_size or 0,
                total_kv_blocks=shape.total_kv_blocks or settings.num_gpu_blocks_override or 0,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_model_len=shape.max_model_len or settings.max_model_len or 0,
            ),
        )

    def _lora(self) -> LoraInfo:
        settings, slots = self.settings, self._slots
        return LoraInfo(
            enabled=True,
            max_loras=settings.max_loras,
            max_cpu_loras=settings.max_cpu_loras,
            max_lora_rank=settings.max_lora_rank,
            available_loras=self.available(),
            loaded_loras=self.loaded(),
            capacity=LoraCapacity(
                loaded_count=len(slots.registered),
                available_slots=slots.free,
                device_slots=settings.max_loras,
                host_slots=settings.max_cpu_loras,
                ghosts=slots.ghosts,
                disk_free_bytes=self.cache.free_bytes(),
            ),
        )

    def _load_figures(self) -> Load:
        scrape = self._scrape
        return Load(
            running=scrape.running,
            waiting=scrape.waiting,
            waiting_for_slot=scrape.waiting_for_slot,
            kv_usage=scrape.kv_usage,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_tokens_per_s=self._rates.decode_tokens_per_s,
            inter_token_s=self._rates.inter_token_s,
            mean_output_tokens=self._rates.mean_output_tokens,
            mean_request_s=self._rates.mean_request_s,
            load_seconds=self._load_seconds(),
            read_age_s=0.0 if self._scraped_at is None else self._clock() - self._scraped_at,
        )

    def _load_seconds(self) -> float:
        """The middle of the latest loads, one an adapter, as the records have kept them over restarts; 0.0 for none."""
        measured = [record.load_seconds for record in self.records.all() if record.load_seconds is not None]
        return median(measured[-_LOADS_KEPT:]) if measured else 0.0

    def _loaded(self, record: Record) -> LoadedLora:
        return LoadedLora(
            lora_id=record.lora_id,
            digest=record.digest,
            engine_name=record.engine_name,
            state="ready",
            location=self._slots.location(record.engine_name),
            rank=record.rank,
            base_model=record.base_model,
            path=record.path,
            source=record.source,
            size_bytes=record.size_bytes,
            loaded_at=record.loaded_at,
            last_used=record.last_used,
            memory_mb=round(record.size_bytes / 1e6, 3),
            request_count=record.request_count,
            load_seconds=record.load_seconds,
        )

    def _available_of(self, record: Record) -> AvailableLora:
        return AvailableLora(
            lora_id=record.lora_id,
            path=record.path,
            base_model=record.base_model,
            rank=record.rank,
            digest=record.digest,
            size_bytes=record.size_bytes,
            state="ready" if self._slots.has(record.engine_name) else "on_disk",
        )

    def _changed(self) -> None:
        self.version += 1
        self.changes.notify()

    # --- small questions -----------------------------------------------------------------------------------------

    def _require_ready(self) -> None:
        if self._is_draining:
            raise EngineError("draining", "this worker is draining; load on another one", retry_after_s=30)
        if self.state != "ready":
            reason = f": {self.state_reason}" if self.state_reason else ""
            raise EngineError("not_ready", f"this worker is {self.state}{reason}; try again soon", retry_after_s=5)

    def _require_engine(self) -> Engine:
        if self._engine is None:
            raise EngineError("engine_down", f"the engine is down: {self.state_reason}", retry_after_s=5)
        return self._engine

    def _check_base(self, base_model: str | None) -> None:
        rules = self.cache.rules
        if base_model is not None and not is_same_base(base_model, rules.base_names, rules.base_check):
            names = ", ".join(sorted(rules.base_names))
            raise SourceError("base_model_mismatch", f"base_model {base_model!r}: this worker serves {names}")

    def _has_room(self, evict: str | None) -> bool:
        return self._slots.free > 0 or self._victim(evict) is not None

    def _victim(self, evict: str | None) -> Record | None:
        loaded = [record for record in self.records.all() if self._slots.has(record.engine_name)]
        return next((record for record in loaded if evict in {record.engine_name, record.lora_id}), None)

    def _no_free_slot(self) -> EngineError:
        names = ", ".join(sorted(self._slots.registered))
        return EngineError(
            "no_free_slot",
            f"all {self.settings.max_cpu_loras} adapter slots are taken ({names}); unload one,"
            " or name a victim that is loaded with `evict`",
        )

    def _show(self, lora_id: str, digest: str, state: str) -> None:
        name = engine_name(lora_id, digest) if digest else ""
        if self._slots.has(name):
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
        self._changed()

    @contextmanager
    def _reported(self, request: LoadRequest) -> Iterator[None]:
        try:
            yield
        except WorkerError as exc:
            self._failed(request.lora_id, request.digest or "", exc)
            raise
        finally:
            self._progress.pop(request.lora_id, None)

    def _failed(self, lora_id: str, digest: str, exc: WorkerError) -> None:
        name = engine_name(lora_id, digest) if digest else ""
        log.warning("load failed", lora_id=lora_id, code=exc.code, error=str(exc))
        self.metrics.load_failures.labels(exc.code).inc()
        self.events.add("LOAD_FAILED", lora_id=lora_id, digest=digest or None, error=f"{exc.code}: {exc}")
        # A full worker says nothing about the adapter.
        if exc.code != "no_free_slot" and not self._slots.has(name):
            self._failures[lora_id] = LoadedLora(
                lora_id=lora_id, digest=digest, engine_name=name, state="failed", location="disk", error=str(exc)
            )
            while len(self._failures) > _FAILURES_KEPT:
                self._failures.popitem(last=False)
        self._changed()

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        with self.metrics.load_seconds.labels(stage).time():
            yield


def _check_id(lora_id: str) -> None:
    try:
        checked_lora_id(lora_id)
    except ValueError as exc:
        raise RequestError("invalid_lora_id", str(exc), param="lora_id") from exc


def _check_digest(lora_id: str, found: str, expected: str | None) -> None:
    if expected is not None and found != expected:
        raise SourceError(
            "digest_mismatch",
            f"adapter {lora_id!r}: its source has digest {found}, asked for was {expected};"
            " new bytes need a new lora_id",
        )
