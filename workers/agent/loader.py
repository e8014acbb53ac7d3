"""load -> announce, and the way back: what the engine holds, changed one adapter at a time."""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from workers.agent.engine_link import CurrentEngine
from workers.agent.installer import Installer, check_id
from workers.agent.inventory import Inventory
from workers.agent.operations import OperationsInProgress
from workers.agent.records import InstalledAdapter
from workers.config import WorkerSettings
from workers.core.errors import AgentRequestError, EngineError, SourceError
from workers.engines.base import EngineClient
from workers.metrics import WorkerMetrics
from workers.wire import AvailableLora, InspectRequest, LoadedLora, LoadRequest, UnloadRequest

log = structlog.get_logger()


class Loader:
    """One operation an adapter at a time; one load or unload an engine at a time."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        link: CurrentEngine,
        intake: Installer,
        residency: Inventory,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._link = link
        self._intake = intake
        self._residency = residency
        self._metrics = metrics
        self._clock = clock
        self._underway = OperationsInProgress()
        # Weak: there are as many as are held or waited for, not as many as names were ever asked for.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def ensure(self, request: LoadRequest) -> LoadedLora:
        """The adapter, ready in the engine; at once when it was there already. Raises WorkerError."""
        check_id(request.lora_id)
        try:
            return await self._underway.run(request.lora_id, request.digest, self._ensured(request))
        except AgentRequestError as exc:
            if exc.code == "cancelled":
                self._residency.failed(request.lora_id, request.digest or "", exc)
            raise

    async def _ensured(self, request: LoadRequest) -> LoadedLora:
        async with self._lock(request.lora_id):
            with self._residency.reported(request):
                record = await self._intake.installed(request)
                self._residency.show(record.lora_id, record.digest, "loading")
                return self._residency.loaded_of(await self._load(record, evict=request.evict))

    async def inspect(self, request: InspectRequest) -> AvailableLora:
        """Fetch, verify, install; load nothing. Raises WorkerError."""
        check_id(request.lora_id)
        record = await self._underway.run(request.lora_id, None, self._inspected(request))
        self._residency.changed()
        return self._residency.available_of(record)

    async def _inspected(self, request: InspectRequest) -> InstalledAdapter:
        async with self._lock(request.lora_id):
            return await self._intake.inspected(request)

    async def unload(self, request: UnloadRequest) -> tuple[str, ...]:
        """Engine names that were unloaded; requests in flight on them go on. Loads under way are called off.

        raises  WorkerError, `not_loaded` when there was neither
        """
        check_id(request.lora_id)
        was_under_way = await self._underway.cancel(request.lora_id, request.digest)
        async with self._lock(request.lora_id), self._link.lock:
            engine = self._link.require()
            records = [
                record
                for record in self._residency.records.of(request.lora_id)
                if self._residency.slots.has(record.engine_name) and request.digest in {None, record.digest}
            ]
            if not records and not was_under_way:
                version = f" with digest {request.digest}" if request.digest else ""
                raise AgentRequestError("not_loaded", f"adapter {request.lora_id!r}{version} is not loaded here")
            for record in records:
                await self._unload_one(engine, record)
                self._residency.forget_load(record)
            return tuple(record.engine_name for record in records)

    def stop(self) -> None:
        """This process ends: what the engine has not been asked for yet is called off."""
        self._underway.stop()

    def _lock(self, lora_id: str) -> asyncio.Lock:
        return self._locks.setdefault(lora_id, asyncio.Lock())

    # --- after a start -------------------------------------------------------------------------------------------

    async def adopt(self) -> None:
        """Take note of what the engine holds already, also in the record. Raises EngineError."""
        async with self._link.lock:
            engine = self._link.require()
            self._residency.begin(keeps_ghosts=engine.traits.keeps_ghosts)
            asked_at = self._clock()
            for name in await engine.adapters():
                self._residency.found(name)
            self._residency.agreed(asked_at)

    async def restore(self) -> None:
        """Load what the record says the engine should hold. Raises EngineError when it is the engine that fails."""
        slots = self._residency.slots
        wanted = [each for each in self._residency.records.all() if each.is_loaded and not slots.has(each.engine_name)]
        for record in wanted[slots.free :]:
            log.warning("adapter not loaded again: no free slot", lora_id=record.lora_id)
            self._residency.forget_load(record)
        turns = iter(wanted[: slots.free])
        loads_at_once = self._link.require().traits.loads_at_once
        room = asyncio.Semaphore(loads_at_once)

        async def restore_in_turn() -> None:
            for record in turns:
                await self._restore_one(record, room)

        # One more than it takes at once: that one looks for the next one's files meanwhile.
        lanes = [asyncio.create_task(restore_in_turn()) for _ in range(loads_at_once + 1)]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
        if restored := [record for record in wanted if self._residency.slots.has(record.engine_name)]:
            await self._check_listed(restored)

    async def _restore_one(self, record: InstalledAdapter, room: asyncio.Semaphore) -> None:
        """Its files found and loaded; where the adapter itself is what fails, that is noted. Raises EngineError."""
        try:
            record = replace(record, path=str(await self._files_of(record)))
            async with room:
                await self._load_again(record)
        except (SourceError, EngineError) as exc:
            if isinstance(exc, EngineError) and not await self._is_adapters_fault(exc):
                raise
            self._residency.forget_load(record)
            self._residency.failed(record.lora_id, record.digest, exc)

    async def _files_of(self, record: InstalledAdapter) -> Path:
        async with self._lock(record.lora_id):  # files that are gone are fetched by one alone
            return await self._intake.again(record)

    async def _load_again(self, record: InstalledAdapter) -> None:
        """As `_load`, though what the engine then lists is looked at once, when all are back."""
        async with self._link.shared():
            began = self._clock()
            await self._load_one(self._link.require(), record)
            self._link.forget_adapter(record.engine_name)
            self._residency.loaded_again(record, load_seconds=round(self._clock() - began, 4))

    async def _check_listed(self, records: Collection[InstalledAdapter]) -> None:
        async with self._link.lock:
            asked_at = self._clock()
            listed = await self._link.require().adapters()
            for record in records:
                if record.engine_name not in listed:
                    self._residency.unloaded_now(record)
                    self._residency.forget_load(record)
                    self._residency.failed(record.lora_id, record.digest, _not_listed(record))
            self._residency.agreed(asked_at)

    async def bring_back(self, digests: Collection[str]) -> None:
        """Fetch files again that somebody took from under an engine: its next look at them would kill it."""
        for record in self._residency.records.all():
            if record.digest in digests and record.is_loaded:
                log.error("an adapter in use has lost its files", lora_id=record.lora_id, digest=record.digest)
                try:
                    await self._files_of(record)
                except SourceError as exc:
                    self._residency.failed(record.lora_id, record.digest, exc)

    async def preload(self) -> None:
        """Load what the settings name. Raises EngineError when it is the engine that fails."""
        for lora_id in self._settings.preload_loras:
            try:
                await self.ensure(LoadRequest(lora_id=lora_id))
            except (SourceError, AgentRequestError) as exc:
                log.error("preload failed", lora_id=lora_id, code=exc.code, error=str(exc))  # noqa: TRY400
            except EngineError as exc:
                if not await self._is_adapters_fault(exc):
                    raise
                log.error("preload failed", lora_id=lora_id, code=exc.code, error=str(exc))  # noqa: TRY400

    async def _is_adapters_fault(self, exc: EngineError) -> bool:
        """A refusal is this adapter's fault, and so is a load too slow for an engine that is well otherwise.

        Anything else is the engine's, and then it is all of them. Told apart, or one adapter on slow storage would
        have the engine started again for ever.
        """
        if exc.code != "engine_timeout":
            return exc.code in {"adapter_refused", "no_free_slot"}
        return await self._link.is_healthy()

    # --- the engine ----------------------------------------------------------------------------------------------

    async def look(self, is_settled: Callable[[], bool]) -> None:
        """Compare the engine's own list with the record, unless a start is under way. Raises EngineError."""
        async with self._link.lock:
            engine = self._link.engine
            # Asked behind the lock: what a starting engine does not list yet is still wanted.
            if engine is None or not is_settled():
                return
            asked_at = self._clock()
            listed = set(await engine.adapters())
            known = self._residency.slots.registered
            if known - listed and not await self._link.is_same_start():
                return  # another engine's list is empty, and its adapters are still wanted: the supervisor will see
            if self._link.engine is not engine:
                return
            self._residency.agreed(asked_at)
            if listed != known:
                for name in listed - known:
                    self._link.forget_adapter(name)  # loaded by somebody else, or brought back by a request
                self._residency.correct(listed)

    async def _load(self, record: InstalledAdapter, *, evict: str | None) -> InstalledAdapter:
        """The load stage: one at a time, because each one stalls the engine for everybody."""
        async with self._link.lock:
            self._underway.commit(record.lora_id)
            engine = self._link.require()
            if self._residency.slots.has(record.engine_name):
                return record if record.is_loaded else self._residency.records.put(replace(record, is_loaded=True))
            victim = await self._make_room(engine, evict)
            began = self._clock()
            try:
                await self._load_and_check(engine, record)
            except EngineError:
                if victim is not None:
                    await self._put_back(engine, victim)
                raise
            self._link.forget_adapter(record.engine_name)
            announced = self._residency.loaded_now(record, load_seconds=round(self._clock() - began, 4))
            if displaced := self._residency.slots.displaced():
                log.info("live adapters left the engine's host memory (estimated)", engine_names=displaced)
            if victim is not None:
                # Only now: an agent killed between the two halves comes back with the victim, not with a gap.
                self._residency.forget_load(victim)
            return announced

    def suspect(self, reason: str, *, patience_s: float) -> None:
        """The engine hangs: that is told, and nothing more is loaded there until it is trusted again."""
        log.warning("the engine is suspect", reason=reason)
        self._link.suspect(reason, patience_s=patience_s)
        self._metrics.engine_suspect.set(1)
        self._residency.events.add("SUSPECT", error=reason)
        self._residency.changed()

    def trust(self) -> None:
        """It has given a token again, or computed something."""
        self._link.trust()
        self._metrics.engine_suspect.set(0)
        self._residency.events.add("TRUSTED")
        self._residency.changed()

    async def _load_and_check(self, engine: EngineClient, record: InstalledAdapter) -> None:
        await self._load_one(engine, record)
        asked_at = self._clock()
        if record.engine_name not in (listed := await engine.adapters()):
            raise _not_listed(record)
        if self._residency.slots.registered <= listed.keys():
            self._residency.agreed(asked_at)

    async def _load_one(self, engine: EngineClient, record: InstalledAdapter) -> None:
        try:
            with self._metrics.load_seconds(record.lora_id).time():
                await engine.load(record.engine_name, Path(record.path), timeout_s=self._settings.load_deadline_s)
        except EngineError as exc:
            if exc.code == "engine_timeout" and self._link.engine is engine:
                reason = f"the load of {record.lora_id} hangs since {self._settings.load_deadline_s:g} s"
                self.suspect(reason, patience_s=self._settings.hang_after_s)
            raise

    async def _make_room(self, engine: EngineClient, evict: str | None) -> InstalledAdapter | None:
        """Unload the named victim if the slots are full; a free slot spares it. Raises EngineError `no_free_slot`."""
        if self._residency.slots.free > 0:
            return None
        victim = self._residency.victim(evict)
        if victim is None:
            raise self._residency.no_free_slot()
        await self._unload_one(engine, victim)  # its record waits until the newcomer is there
        return victim

    async def _put_back(self, engine: EngineClient, victim: InstalledAdapter) -> None:
        try:
            await engine.load(victim.engine_name, Path(victim.path), timeout_s=self._settings.load_deadline_s)
        except EngineError as exc:
            log.warning("the evicted adapter could not be put back", lora_id=victim.lora_id, error=str(exc))
            if exc.code == "adapter_refused":
                self._residency.forget_load(victim)
            return  # else the engine is dying or gone: its restart loads what the record still says
        if self._link.engine is engine:
            self._residency.loaded_now(victim, load_seconds=victim.load_seconds)

    async def _unload_one(self, engine: EngineClient, record: InstalledAdapter) -> None:
        try:
            with self._metrics.unload_seconds(record.lora_id).time():
                await engine.unload(record.engine_name, timeout_s=self._settings.load_deadline_s)
        except EngineError as exc:
            self._residency.events.add(
                "UNLOAD_FAILED",
                lora_id=record.lora_id,
                digest=record.digest,
                engine_name=record.engine_name,
                error=str(exc),
            )
            raise
        self._residency.unloaded_now(record)


def _not_listed(record: InstalledAdapter) -> EngineError:
    message = f"load {record.engine_name}: the engine said yes, but does not list it"
    return EngineError("adapter_refused", message)
