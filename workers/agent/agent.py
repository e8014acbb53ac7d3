"""The adapters of one worker: resolve -> fetch -> verify -> install -> load -> announce, and the way back.

The record says what this worker should hold, the engine's list what it does; both are compared after every start and
every few seconds. An agent never evicts by itself: the caller names the victim.

The Installer puts files on disk, the Loader loads them into the engine, the Inventory knows which adapter is where.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from lorafleet.engine.metrics_page import EngineMetrics
from lorafleet.kv.connectors import NO_CONNECTOR, ConnectorVerdict, decided
from orchestrator.wire import UsageReport
from workers.agent.engine_link import CurrentEngine
from workers.agent.events import AgentEventLog
from workers.agent.installer import Installer
from workers.agent.inventory import Inventory, timestamp
from workers.agent.kv_ledger import KvLedgers
from workers.agent.loader import Loader
from workers.agent.records import InstalledAdapters
from workers.agent.usage import AdapterUsage
from workers.config import TIMERS, AgentTimers, WorkerSettings
from workers.core.errors import AgentRequestError, EngineError
from workers.engines.base import EngineClient
from workers.metrics import WorkerMetrics
from workers.storage.cache import AdapterCache
from workers.storage.credentials import Credentials
from workers.storage.local_adapters import LocalAdapters
from workers.storage.verify import known_base_model, model_folder
from workers.wire import (
    AgentState,
    AvailableLora,
    DrainAnswer,
    InspectRequest,
    LoadedLora,
    LoadRequest,
    Metadata,
    Transport,
    UnloadRequest,
)

log = structlog.get_logger()


class WorkerAgent:
    """One worker's adapters and what is known of its engine. The event loop is the only writer."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        cache: AdapterCache,
        library: LocalAdapters,
        records: InstalledAdapters,
        events: AgentEventLog,
        metrics: WorkerMetrics,
        boot_id: str,
        agent_url: str,
        connector: ConnectorVerdict | None = None,
        timers: AgentTimers = TIMERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """connector: what the engine's command says of its KV connector; None: nothing, and the engine is asked."""
        self._connector = connector
        self.settings = settings
        self.cache = cache
        self.library = library
        self.records = records
        self.events = events
        self.metrics = metrics
        self.boot_id = boot_id
        self.agent_url = agent_url
        self.timers = timers
        self._state: AgentState = "starting"
        self._state_reason = ""
        self.link = CurrentEngine(settings, metrics, clock=clock)
        self.residency = Inventory(
            settings=settings,
            cache=cache,
            library=library,
            records=records,
            events=events,
            metrics=metrics,
            clock=clock,
        )
        self.counts = AdapterUsage(
            settings.state / "usage.json", records, worker_id=settings.instance_id, now=timestamp
        )
        self._intake = Installer(
            cache=cache,
            library=library,
            residency=self.residency,
            metrics=metrics,
            credentials=Credentials(settings.secrets_dir),
            listed=self.link.held,
            base_name=lambda: self.link.card().base_model,
        )
        self._loader = Loader(
            settings=settings,
            link=self.link,
            intake=self._intake,
            residency=self.residency,
            metrics=metrics,
            clock=clock,
        )
        self.residency.judgement = decided(settings.engine_salt, connector or NO_CONNECTOR)
        self._clock = clock
        self._is_draining = False
        self._is_stopping = False
        self._warming: asyncio.Event | None = None

    @property
    def is_warming(self) -> bool:
        """Whether the engine is up and takes what the orchestrator wants loaded before this worker is ready."""
        return self._warming is not None

    @property
    def state(self) -> AgentState:
        """What /metadata says: a worker that drains and could serve is draining, not ready."""
        return "draining" if self._is_draining and self._state == "ready" else self._state

    @property
    def state_reason(self) -> str:
        return self._state_reason or self.link.suspicion

    # --- the engine comes and goes -------------------------------------------------------------------------------

    def set_state(self, state: AgentState, reason: str = "") -> None:
        """What becomes of the engine."""
        self._state, self._state_reason = state, reason
        self.residency.changed()

    async def engine_up(self, engine: EngineClient, *, engine_boot_id: str, transport: Transport) -> None:
        """Take a healthy engine into use: load what should be there, then say ready. Raises EngineError."""
        await self.link.up(engine, boot_id=engine_boot_id, transport=transport)
        self.cache.disk.engine_url = transport.engine_url
        self.residency.changed()
        await self._learn_shapes()
        found = await engine.connector() if self._connector is None else self._connector
        judgement = self.residency.judgement = decided(self.settings.engine_salt, found)
        if judgement.reason:
            log.info("KV connector", separation=judgement.separation, reason=judgement.reason)
        if judgement.refusal:
            log.error("engine takes no adapters", reason=judgement.refusal)
            self.residency.begin(keeps_ghosts=engine.traits.keeps_ghosts)
        else:
            await self._load_what_should_be_there()
        if not self.library.looked.is_set():
            self.set_state("starting", "the adapters in lora_path are read")
            await self.library.looked.wait()
        if self.link.engine is not engine:
            raise EngineError("engine_down", "the engine went away while its adapters were loaded again")
        self.metrics.engine_up.set(1)
        self.events.add("ENGINE_UP")
        self.set_state("ready")
        adapters = len(self.residency.slots.registered)
        log.info("ready", engine=engine.url, engine_boot_id=engine_boot_id, adapters=adapters)

    async def _load_what_should_be_there(self) -> None:
        await self._loader.adopt()
        await self._loader.restore()
        is_new = not self.residency.slots.registered
        await self._loader.preload()
        if is_new:
            await self._warm()

    async def _learn_shapes(self) -> None:
        """Those of a base model that its engine fetches from a hub: before it is up there may be half of them."""
        if self.settings.check_shapes and self.cache.rules.base is None:
            folder = await asyncio.to_thread(model_folder, self.settings.model)
            if folder is not None:
                base = await asyncio.to_thread(known_base_model, folder)
                self.cache.rules = self.library.rules = replace(self.cache.rules, base=base)

    async def _warm(self) -> None:
        """Wait for the orchestrator to bring what a worker that had nothing should have."""
        settings = self.settings
        if not settings.orchestrator_url or not settings.warm_deadline_s:
            return
        self._warming = asyncio.Event()
        self.set_state("starting", "its share of the hot adapters is loaded before it is ready")
        try:
            async with asyncio.timeout(settings.warm_deadline_s):
                await self._warming.wait()
        except TimeoutError:
            log.warning("ready without all that it should hold", after_s=settings.warm_deadline_s)
        finally:
            self._warming = None
            self.set_state("starting")

    def warmed(self) -> None:
        """Nothing more has to be there before this worker is ready, or nobody is there to say what."""
        if self._warming is not None:
            self._warming.set()

    async def is_trusted(self, engine: EngineClient) -> bool:
        """Whether the engine is well. Of one that hangs, in a load or else, the health route sees nothing: it has to
        compute, or to give a token.
        """
        link, timeout_s = self.link, self.settings.health_timeout_s
        was_suspect, still_s = bool(link.suspicion), link.still_s()
        if not was_suspect and not link.has_stalled:
            return await engine.is_healthy(timeout_s=timeout_s)
        # One that is full computes, and gives us no token.
        is_well = was_suspect and link.has_moved
        if is_well or await engine.gives_tokens(link.card().name, timeout_s=timeout_s):
            if was_suspect:
                self._loader.trust()
            return True
        if not was_suspect:
            reason = f"the engine has requests, and has computed nothing for {still_s:.0f} s"
            self._loader.suspect(reason, patience_s=self.settings.stuck_after_s)
        return False

    async def engine_down(self, reason: str) -> None:
        """The engine is gone, and with it all that it held; the record keeps what should be there."""
        was_up = self.link.engine is not None
        self._state, self._state_reason = "engine_down", reason  # before anybody waits: nobody shall be told "ready"
        await self.link.down(reason)
        self.residency.begin()
        self.metrics.engine_up.set(0)
        self.metrics.engine_suspect.set(0)
        if was_up:
            self.events.add("ENGINE_DOWN", error=reason)
        self.set_state("engine_down", reason)

    def kv_ledgers(self) -> KvLedgers:
        """The ledger of the engine's blocks; raises EngineError `not_ready` while there is none."""
        return self.link.kv_ledgers()

    def stop(self) -> None:
        """This process ends: that is told, for good, and every stream ends, so that the server can."""
        self._is_stopping = True
        self.cache.is_stopping = True
        self._begin_drain()
        self._loader.stop()
        self.library.stop()
        self.events.close()
        self.link.end_streams()

    # --- what callers ask for ------------------------------------------------------------------------------------

    def fence(self, epoch: int | None, *, is_destructive: bool) -> None:
        """Refuse a leader that has been replaced, and harm done by nobody in particular.

        raises RequestError `stale_epoch`, `epoch_required`
        """
        if epoch is None:
            if is_destructive and self.settings.orchestrator_url:
                raise AgentRequestError(
                    "epoch_required",
                    "this worker belongs to an orchestrator: only it may unload or evict (header x-lorafleet-epoch);"
                    " without an epoch a load may take a free slot",
                )
            return
        if epoch < self.records.epoch:
            raise AgentRequestError(
                "stale_epoch", f"epoch {epoch} is over: epoch {self.records.epoch} has been seen; read the lease again"
            )
        self.records.raise_epoch(epoch)

    async def load(self, request: LoadRequest) -> LoadedLora:
        """The adapter, ready in the engine; at once when it was there already. Raises WorkerError."""
        if self._is_draining:
            raise EngineError("draining", "this worker is draining; load on another one", retry_after_s=30)
        if self.state != "ready" and not self.is_warming:
            reason = f": {self.state_reason}" if self.state_reason else ""
            raise EngineError("not_ready", f"this worker is {self.state}{reason}; try again soon", retry_after_s=5)
        if refusal := self.residency.judgement.refusal:
            raise EngineError("adapters_refused", f"this worker takes no adapters: {refusal}; load on another one")
        if self.link.suspicion:
            message = f"this worker takes no loads: {self.link.suspicion}; load on another one"
            raise EngineError("not_ready", message, retry_after_s=5)
        return await self._loader.ensure(request)

    async def unload(self, request: UnloadRequest) -> tuple[str, ...]:
        """Engine names that were unloaded; requests in flight on them go on. Raises WorkerError `not_loaded`."""
        return await self._loader.unload(request)

    async def check_source(self, source: str) -> None:
        """Raises SourceError where this worker may not fetch it."""
        await self.cache.check_source(source)

    async def inspect(self, request: InspectRequest) -> AvailableLora:
        """Fetch, verify, install; load nothing. Raises WorkerError."""
        return await self._loader.inspect(request)

    async def drain(self, deadline_s: float) -> DrainAnswer:
        """Say draining, refuse loads, and wait until the engine has nothing left or the deadline has passed."""
        self._begin_drain()
        deadline = self._clock() + deadline_s
        quiet_s, quiet_since = max(self.timers.quiet_s, 2 * self.link.step_s()), self._clock()
        before: EngineMetrics | None = None
        while True:
            left_s = deadline - self._clock()
            engine = self.link.engine
            try:
                async with asyncio.timeout(max(1.0, left_s)):
                    scrape = await engine.scrape() if engine is not None else EngineMetrics()
            except (EngineError, TimeoutError) as exc:  # unheard is not drained: asked again while there is time
                if self._clock() >= deadline:
                    message = "draining, but the engine does not say what still runs; ask again"
                    raise EngineError("engine_timeout", message, retry_after_s=2) from exc
                await asyncio.sleep(0.2)
                quiet_since = self._clock()
                continue
            now = self._clock()
            left_s = deadline - now
            is_idle = scrape.running + scrape.waiting == 0 and scrape.ended == (before or scrape).ended
            if not is_idle:
                quiet_since = now
            before = scrape
            if now - quiet_since >= quiet_s or left_s <= 0:
                return DrainAnswer(is_drained=is_idle, running=scrape.running, waiting=scrape.waiting)
            await asyncio.sleep(min(0.2, left_s))

    def _begin_drain(self) -> None:
        if not self._is_draining:
            self._is_draining = True
            self.events.add("DRAINING")
            self.residency.changed()

    def undrain(self) -> None:
        """Serve again. Raises EngineError `draining` when this process ends."""
        if self._is_stopping:
            raise EngineError("draining", "this agent is stopping; there is no way back", retry_after_s=30)
        if self._is_draining:
            self._is_draining = False
            self.events.add("UNDRAINED")
            self.residency.changed()

    def usage(self, report: UsageReport) -> bool:
        """Take a router's counts; false for one that was taken before. Uses move adapters up in the estimated LRU."""
        used = self.counts.take(report)
        self.residency.used(used or ())
        return used is not None

    # --- what is done every so often -----------------------------------------------------------------------------

    async def look(self) -> None:
        """Look at the folders and at the engine's own list, and put the record right where they differ."""
        await self.cache.look()
        if await self.library.scan():
            self.residency.changed()
        # What an engine holds that takes none is nobody's: no request for it comes here.
        if not self.residency.judgement.refusal:
            await self._loader.look(lambda: self.state in {"ready", "draining"})

    async def tidy(self) -> None:
        """Save what is not yet, renew leases on what is wanted, keep the cache's limit, and forget what is gone."""
        known = frozenset(record.digest for record in self.records.all())
        self.records.save()
        self.counts.save()
        lost, gone = await self.cache.sweep(self.residency.wanted(), known, self._intake.in_use)
        self.residency.deleted(gone)
        await self._loader.bring_back(lost)

    def measure(self) -> None:
        """Bring the gauges up to date."""
        self.link.measure()
        self.residency.measure()
        self.metrics.cache_used_bytes.set(self.cache.used_bytes)
        self.metrics.cache_held_bytes.set(self.cache.held_bytes)
        self.metrics.cache_limit_bytes.set(self.cache.disk.max_bytes)
        self.metrics.cache_adapters.set(self.cache.adapters)
        self.metrics.disk_free_bytes.set(self.cache.free_bytes)

    # --- what is told --------------------------------------------------------------------------------------------

    def metadata(self) -> Metadata:
        """Everything that a router or an orchestrator may know of this worker."""
        settings = self.settings
        return Metadata(
            instance_id=settings.instance_id,
            namespace=settings.namespace,
            state=self.state,
            state_reason=self.state_reason,
            is_suspect=bool(self.link.suspicion),
            is_warming=self.is_warming,
            agent_url=self.agent_url,
            pool=settings.pool,
            zone=settings.zone,
            node=settings.node,
            model=self.link.card(),
            transport=self.link.transport,
            lora=self.residency.info(),
            load=self.link.load_figures(load_seconds=self.residency.load_seconds()),
            agent_boot_id=self.boot_id,
            engine_boot_id=self.link.boot_id,
            epoch=self.records.epoch,
        )
