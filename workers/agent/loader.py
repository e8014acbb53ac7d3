"""load -> announce, and unload: changes to the engine's adapters, one at a time."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from lorafleet.engine.canary import PROMPTS, EngineSilent
from lorafleet.engine.probe_adapters import PROBE_PREFIX
from orchestrator.model.acceptance import AdapterAcceptance
from workers.agent.checks.acceptance_check import AcceptanceCheck, not_accepted_error
from workers.agent.checks.effect_check import EffectCheck, with_effect_of
from workers.agent.checks.module_probes import ModuleProbes
from workers.agent.current_engine import CurrentEngine
from workers.agent.installer import Installer, check_lora_id
from workers.agent.offered_adapters import OfferedAdapters
from workers.agent.operations import AgentOperations, FetchOrder
from workers.core.errors import AgentRequestError, EngineError, SourceError, WorkerError
from workers.engines.base import EngineClient
from workers.engines.kinds import refusal_at_start
from workers.inventory.context import AgentContext
from workers.inventory.event_log import (
    CHECKING,
    PRELOADING,
    REFETCHING,
    RESTORING,
    VERIFYING,
    Requester,
    gave_back,
    made_room,
)
from workers.inventory.inventory import Inventory
from workers.inventory.inventory_report import InventoryReport
from workers.sources.base import Source
from workers.verification.beside import chat_template_digests
from workers.verification.manifest import RULES_VERSION
from workers.wire import CheckRequest, InspectRequest, LoadRequest, UnloadRequest, WorkerAdapter

log = structlog.get_logger()

_ADAPTERS_FAULTS = frozenset(
    {"adapter_refused", "adapter_no_effect", "modules_ignored", "not_accepted", "acceptance_unknown", "no_free_slot"}
)
_CHECKS_A_PASS = 16
"""Adapters compared with their acceptance files in one pass of the agent's reconciliation."""
_VERIFYING_S = 2.0
"""Of one pass, for adapters that are verified again."""
_MOST_TOUCHED = 8
"""Adapters that are used before one probe, so that it pushes none of them out: a request of one token each."""


class Loader:
    """One operation per adapter at a time; one load or unload in the engine at a time."""

    def __init__(
        self,
        context: AgentContext,
        *,
        engine: CurrentEngine,
        installer: Installer,
        inventory: Inventory,
        report: InventoryReport,
        probes: ModuleProbes,
    ) -> None:
        self._settings = context.settings
        self._installed = context.installed
        self._engine = engine
        self._installer = installer
        self._inventory = inventory
        self._report = report
        self._probes = probes
        self._metrics = context.metrics
        self._clock = context.clock
        self._effects = EffectCheck(
            settings=context.settings,
            engine=engine,
            metrics=context.metrics,
            describe=installer.describe,
            clock=context.clock,
        )
        self._offers = OfferedAdapters(context.settings, engine, clock=context.clock)
        self._acceptance = AcceptanceCheck(
            settings=context.settings,
            engine=engine,
            metrics=context.metrics,
            dtype=context.facts.dtype,
            templates=lambda: chat_template_digests(context.cache.rules.tokenizer),
            clock=context.clock,
        )
        self._unreadable: set[str] = set()
        """Engine names of loaded adapters whose files could not be read again; logged already."""
        self._operations = AgentOperations()
        self._fetch_order = FetchOrder()
        # Weak: a lock exists only while somebody holds it or waits for it.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load(self, request: LoadRequest, by: Requester) -> WorkerAdapter:
        """Install and load an adapter; nothing is fetched or loaded if the engine has it already. Raises WorkerError.

        A failure is recorded and published. An unload of the same adapter cancels the load until the engine is called.
        """
        check_lora_id(request.lora_id)
        try:
            return await self._operations.run(request.lora_id, request.digest, self._install_and_load(request, by))
        except AgentRequestError as exc:
            if exc.code == "cancelled":
                self._inventory.record_failure(request.lora_id, request.digest or "", exc, by)
            raise

    async def _install_and_load(self, request: LoadRequest, by: Requester) -> WorkerAdapter:
        """Install and load under the adapter's lock, publishing progress.

        A WorkerError is recorded as a failed load, and raised.
        """
        async with self._lock(request.lora_id):
            with self._inventory.recording_failure(request, by):
                with self._fetch_order.for_load():
                    adapter = await self._installer.install(request)
                    if request.acceptance_file:
                        adapter = await self._installer.with_acceptance(adapter, request)
                    if request.keeps_files:
                        await self._installer.keep(adapter.digest, request.neighbours)
                adapter = replace(
                    adapter, ignored_policy=request.ignored_modules or "", acceptance_mode=request.acceptance
                )
                self._inventory.show_progress(adapter.lora_id, adapter.digest, "loading")
                return self._report.as_loaded(await self._load_into_engine(adapter, request, by))

    async def fetch_ahead(self, request: LoadRequest, by: Requester) -> WorkerAdapter:
        """Install an adapter for a load that will come, after the fetches of loads, one adapter at a time.

        Raises WorkerError, which is recorded as that of a load.
        """
        check_lora_id(request.lora_id)
        async with self._fetch_order.ahead_of_load():
            adapter = await self._operations.run(request.lora_id, request.digest, self._install(request, by))
        self._inventory.mark_changed()
        return self._report.adapter_on_disk(adapter)

    async def _install(self, request: LoadRequest, by: Requester) -> WorkerAdapter:
        """Install an adapter under its lock, publishing progress. A WorkerError is recorded, and raised."""
        async with self._lock(request.lora_id):
            with self._inventory.recording_failure(request, by):
                return await self._installer.install(request)

    async def inspect(
        self, request: InspectRequest, *, reader: Source | None = None, digest: str | None = None
    ) -> WorkerAdapter:
        """Fetch, verify and install an adapter without loading it, even if it is installed; mark the inventory changed.

        The parameters are those of `Installer.inspect`. Raises WorkerError.
        """
        check_lora_id(request.lora_id)
        adapter = await self._operations.run(request.lora_id, None, self._inspect(request, reader, digest))
        self._inventory.mark_changed()
        return self._report.adapter_on_disk(adapter)

    async def _inspect(self, request: InspectRequest, reader: Source | None, digest: str | None) -> WorkerAdapter:
        """Fetch, verify and install an adapter under its lock. Raises WorkerError."""
        async with self._lock(request.lora_id):
            return await self._installer.inspect(request, reader=reader, digest=digest)

    async def unload(self, request: UnloadRequest, by: Requester) -> tuple[str, ...]:
        """Unload an adapter (or one version) and cancel its loads in progress; returns the unloaded engine names.

        Requests that use it finish. It is not loaded again after a restart. No names if it is not loaded, which is a
        success. Raises WorkerError.
        """
        check_lora_id(request.lora_id)
        await self._operations.cancel(request.lora_id, request.digest)
        async with self._lock(request.lora_id), self._engine.lock:
            client = self._engine.require_client()
            if request.engine_name and self._installed.get(request.engine_name) is None:
                return await self._unload_foreign(client, request.engine_name, by)
            adapters = [
                adapter
                for adapter in self._installed.versions(request.lora_id)
                if self._inventory.slots.has(adapter.engine_name) and request.digest in {None, adapter.digest}
            ]
            for adapter in adapters:
                await self._call_unload(client, adapter, by)
                self._inventory.mark_unwanted(adapter)
            return tuple(adapter.engine_name for adapter in adapters)

    async def unload_harmful(self, name: str) -> None:
        """Unload an adapter of another client whose values spoil the answers of others. Raises EngineError."""
        async with self._engine.lock:
            await self._unload_foreign(self._engine.require_client(), name, VERIFYING)

    async def _unload_foreign(self, client: EngineClient, name: str, by: Requester) -> tuple[str, ...]:
        """Unload an adapter that another client loaded; returns its engine name, or none if it is gone already.

        Raises EngineError.
        """
        if not self._inventory.slots.has(name):
            return ()
        await client.unload(name, timeout_s=self._settings.load_deadline_s)
        self._inventory.mark_foreign_unloaded(name, by)
        return (name,)

    def cancel_all(self) -> None:
        """Cancel all loads that the engine has not been called for, because the process stops.

        Does not wait for their end.
        """
        self._operations.cancel_all()

    def _lock(self, lora_id: str) -> asyncio.Lock:
        """The lock of a lora_id, created if nobody holds it."""
        return self._locks.setdefault(lora_id, asyncio.Lock())

    # --- after a start -------------------------------------------------------------------------------------------

    async def adopt_engine_list(self) -> None:
        """Empty the slots and record the adapters that a newly attached engine lists as loaded. Raises EngineError.

        Deletes reports of engines before.
        """
        await self._effects.forget_reports()
        self._offers.withdraw_all()
        async with self._engine.lock:
            client = self._engine.require_client()
            self._inventory.reset_slots(keeps_ghosts=client.traits.keeps_ghosts)
            listed_at = self._clock()
            listed = dict(await client.list_adapters())
            for name in [name for name in listed if name.startswith(PROBE_PREFIX)]:
                await client.unload(name, timeout_s=self._settings.load_deadline_s)  # of an agent that was killed
                del listed[name]
            for name in listed:
                self._inventory.adopt(name)
            self._inventory.record_paths(listed)
            foreign = self._inventory.foreign_paths()
            self._inventory.engine_modules = self._inventory.installed.names_at_start(self._engine.boot_id, foreign)
            self._inventory.confirm_list(listed_at)

    async def restore(self) -> None:
        """Load the adapters that were loaded before the engine's restart. Raises EngineError if the engine fails.

        Adapters without a free slot, or at fault for a failed load, are not loaded again after the next restart either.
        """
        slots = self._inventory.slots
        wanted = [each for each in self._installed.all() if each.is_wanted and not slots.has(each.engine_name)]
        for adapter in wanted[slots.free :]:
            log.warning("adapter not loaded again: no free slot", lora_id=adapter.lora_id)
            self._inventory.mark_unwanted(adapter)
        adapters_in_order = iter(wanted[: slots.free])
        loads_at_once = self._engine.require_client().traits.loads_at_once
        load_slots = asyncio.Semaphore(loads_at_once)

        async def restore_next() -> None:
            """Restore adapters one after the other until none is left. Raises EngineError."""
            for adapter in adapters_in_order:
                await self._restore_one(adapter, load_slots)

        # One task more than loads at once: it prepares the next adapter's files meanwhile.
        tasks = [asyncio.create_task(restore_next()) for _ in range(loads_at_once + 1)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if restored := [adapter for adapter in wanted if self._inventory.slots.has(adapter.engine_name)]:
            await self._forget_unlisted(restored)

    async def restore_foreign(self) -> None:
        """Load what other clients had loaded into the engine before its restart, as far as slots are free.

        Raises EngineError if the engine fails. An adapter at fault for a failed load is forgotten, as is one without a
        free slot.
        """
        async with self._engine.lock:
            client = self._engine.require_client()
            slots = self._inventory.slots
            foreign = sorted(self._installed.foreign.items())
            lost = [each for name, each in foreign if each.is_wanted and not slots.has(name)]
            for adapter in lost:
                try:
                    if self._inventory.slots.free <= 0:
                        raise self._inventory.no_free_slot_error()
                    await self._call_load(client, adapter)
                except EngineError as exc:
                    if not await self._is_adapters_fault(exc):
                        raise
                    log.warning("another client's adapter not loaded again", lora_id=adapter.lora_id, error=str(exc))
                    self._installed.forget_foreign(adapter.engine_name)
                else:
                    self._inventory.mark_foreign_restored(adapter)
            if lost:
                self._inventory.record_paths(await client.list_adapters())

    async def _restore_one(self, adapter: WorkerAdapter, load_slots: asyncio.Semaphore) -> None:
        """Fetch lost files and load one adapter again; raises EngineError for a fault of the engine.

        A fault of the adapter is recorded, and the adapter is no longer wanted.
        """
        try:
            adapter = replace(adapter, path=str(await self._ensure_files(adapter)))
            async with load_slots:
                await self._load_again(adapter)
        except (SourceError, EngineError) as exc:
            if isinstance(exc, EngineError) and not await self._is_adapters_fault(exc):
                raise
            self._inventory.mark_unwanted(adapter)
            self._inventory.record_failure(adapter.lora_id, adapter.digest, exc, RESTORING)

    async def _ensure_files(self, adapter: WorkerAdapter) -> Path:
        """The folder of the adapter's files, fetched again if needed. Raises SourceError."""
        async with self._lock(adapter.lora_id):  # missing files are fetched once
            return await self._installer.reinstall_if_missing(adapter)

    async def _load_again(self, adapter: WorkerAdapter) -> None:
        """Load an adapter into the restarted engine and record it. Raises EngineError.

        The engine's list is not read afterwards: `restore` does that once, at its end.
        """
        async with self._engine.shared_lock():
            client = self._engine.require_client()
            await self._effects.prepare(adapter)
            began_at = self._clock()
            await self._call_load(client, adapter)
            load_seconds = round(self._clock() - began_at, 4)
            self._engine.forget_adapter_blocks(adapter.engine_name)
            adapter = await self._check_effect(client, adapter)
            self._inventory.mark_restored(adapter, load_seconds=load_seconds)

    async def _forget_unlisted(self, adapters: Collection[WorkerAdapter]) -> None:
        """Record reloaded adapters that the engine does not list as unloaded, unwanted and failed.

        Raises EngineError.
        """
        async with self._engine.lock:
            listed_at = self._clock()
            listed = await self._engine.require_client().list_adapters()
            for adapter in adapters:
                if adapter.engine_name not in listed:
                    self._inventory.mark_unloaded(adapter, RESTORING)
                    self._inventory.mark_unwanted(adapter)
                    self._inventory.record_failure(
                        adapter.lora_id, adapter.digest, _not_listed_error(adapter), RESTORING
                    )
            self._inventory.confirm_list(listed_at)

    async def refetch_lost_files(self, digests: Collection[str]) -> None:
        """Fetch deleted files of loaded adapters again, and log each; a failure is recorded.

        The engine dies when it next reads them.
        """
        for adapter in self._installed.all():
            if adapter.digest in digests and adapter.is_wanted:
                log.error("an adapter in use has lost its files", lora_id=adapter.lora_id, digest=adapter.digest)
                try:
                    await self._ensure_files(adapter)
                except SourceError as exc:
                    self._inventory.record_failure(adapter.lora_id, adapter.digest, exc, REFETCHING)

    async def preload(self) -> None:
        """Load the adapters of `preload_loras`; an adapter's fault is logged, the engine's raises EngineError."""
        for lora_id in self._settings.preload_loras:
            try:
                adapter = await self.load(LoadRequest(lora_id=lora_id), PRELOADING)
                self._inventory.preloaded[lora_id] = adapter.engine_name
                self._inventory.mark_changed()
            except (SourceError, AgentRequestError) as exc:
                log.error("preload failed", lora_id=lora_id, code=exc.code, error=str(exc))  # noqa: TRY400
            except EngineError as exc:
                if not await self._is_adapters_fault(exc):
                    raise
                log.error("preload failed", lora_id=lora_id, code=exc.code, error=str(exc))  # noqa: TRY400

    async def install_preloads(self) -> list[WorkerAdapter]:
        """Install the adapters of `preload_loras` without loading them; an adapter's fault is logged and recorded."""
        installed = []
        for lora_id in self._settings.preload_loras:
            request = LoadRequest(lora_id=lora_id)
            try:
                async with self._lock(lora_id):
                    with self._inventory.recording_failure(request, PRELOADING):
                        adapter = await self._installer.install(request)
                        if refusal := await asyncio.to_thread(
                            refusal_at_start, self._settings.engine, Path(adapter.path)
                        ):
                            message = f"load {adapter.engine_name}: {refusal}; see docs/engines.md"
                            raise EngineError("adapter_refused", message)
                        installed.append(adapter)
                        self._inventory.preloaded[lora_id] = adapter.engine_name
            except WorkerError as exc:
                log.error("preload failed", lora_id=lora_id, code=exc.code, error=str(exc))  # noqa: TRY400
        return installed

    async def _is_adapters_fault(self, exc: EngineError) -> bool:
        """Whether a failed load is the adapter's fault: a refusal, or a timeout of an otherwise healthy engine.

        Otherwise one adapter on slow storage would restart the engine again and again.
        """
        if exc.code != "engine_timeout":
            return exc.code in _ADAPTERS_FAULTS
        return await self._engine.is_healthy()

    # --- the engine ----------------------------------------------------------------------------------------------

    async def reconcile_with_engine_list(self, is_settled: Callable[[], bool]) -> None:
        """Compare the engine's own list with the inventory and correct it; no-op while `is_settled` is False.

        Also a no-op without an engine, or if it has restarted.
        raises  EngineError
        """
        async with self._engine.lock:
            client = self._engine.client
            # Checked under the lock: what a starting engine does not list yet is still wanted.
            if client is None or not is_settled():
                return
            listed_at = self._clock()
            paths = await self._listed_without_refused(client)
            await self._settle_offers(client, paths)
            listed, registered = {*paths, *self._offers.untaken}, self._inventory.slots.registered
            if registered - listed and not await self._engine.is_same_start():
                return  # the engine restarted, so its list is empty: the supervisor loads the adapters again
            if self._engine.client is not client:
                return
            self._inventory.confirm_list(listed_at)
            self._inventory.record_paths(paths)
            if listed != registered:
                for name in listed - registered:
                    self._engine.forget_adapter_blocks(name)  # loaded by another client, or by a request (SGLang)
                self._inventory.correct_from_list(listed)

    async def _settle_offers(self, client: EngineClient, listed: dict[str, str]) -> None:
        """Check each offered adapter that the engine lists now, and load those that no request has taken in time.

        So each ends like a load by a call: the engine lists it, or its failure is recorded. Adds what was loaded to the
        list. Raises EngineError if the engine fails.
        """
        for adapter in self._inventory.loaded_adapters():
            name = adapter.engine_name
            if name not in self._offers.untaken or not (name in listed or self._offers.is_overdue(name)):
                continue
            try:
                is_taken = name in listed
                checked = await (self._check_effect if is_taken else self._load_and_check)(client, adapter)
            except EngineError as exc:
                if not await self._is_adapters_fault(exc):
                    raise
                self._offers.withdraw(name)
                listed.pop(name, None)
                self._record_unusable(adapter, exc)
            else:
                listed[name] = adapter.path
                self._offers.note_checked(name)
                current = with_effect_of(self._installed.get(name) or adapter, checked)
                self._inventory.mark_taken(replace(current, lora_int_id=checked.lora_int_id, memory=checked.memory))

    async def _load_into_engine(self, adapter: WorkerAdapter, request: LoadRequest, by: Requester) -> WorkerAdapter:
        """The load stage: evict the named victim if no slot is free, load, check the engine's list. Raises EngineError.

        A victim is loaded again if the load fails. From here on the load cannot be cancelled. An adapter that a request
        waits for is only offered to an engine that had it before: that request loads it.

        One load at a time, because each one stalls the whole engine.
        """
        async with self._engine.lock:
            self._operations.commit(adapter.lora_id)
            client = self._engine.require_client()
            if self._inventory.slots.has(adapter.engine_name):
                return adapter if adapter.is_wanted else self._installed.store(replace(adapter, is_wanted=True))
            victim = await self._evict_if_full(client, request.evict, made_room(by, adapter.lora_id))
            if request.is_awaited and await self._try_offer(adapter):
                self._engine.forget_adapter_blocks(adapter.engine_name)
                announced = self._inventory.mark_offered(replace(adapter, acceptance=None), by=by)
                if victim is not None:
                    self._inventory.mark_unwanted(victim)
                return announced
            began_at = self._clock()
            try:
                adapter = await self._load_and_check(client, adapter)
            except EngineError:
                if victim is not None:
                    await self._reload_victim(client, victim, gave_back(by, adapter.lora_id))
                raise
            self._engine.forget_adapter_blocks(adapter.engine_name)
            announced = self._inventory.mark_loaded(adapter, load_seconds=round(self._clock() - began_at, 4), by=by)
            if displaced := set(self._inventory.slots.displaced()).difference(self._offers.untaken):
                names = sorted(displaced)
                log.info("loaded adapters dropped from the engine's host memory (estimated)", engine_names=names)
            if victim is not None:
                # Last: an agent killed before this line restores the victim.
                self._inventory.mark_unwanted(victim)
            return announced

    async def _try_offer(self, adapter: WorkerAdapter) -> bool:
        """Offer the adapter to the engine, which will report on it; False: load it by a call."""
        if adapter.acceptance_mode == "require" or not self._offers.try_offer(adapter):
            return False
        await self._effects.prepare(adapter)
        return True

    def mark_suspect(self, reason: str, *, patience_s: float) -> None:
        """Log, record and publish that the engine seems to hang; nothing is loaded until it is trusted again."""
        log.warning("the engine is suspect", reason=reason)
        self._engine.mark_suspect(reason, patience_s=patience_s)
        self._metrics.engine_suspect.set(1)
        self._inventory.events.add("SUSPECT", error=reason)
        self._inventory.mark_changed()

    def clear_suspicion(self) -> None:
        """Record and publish that the engine works again, so that loads may begin."""
        self._engine.clear_suspicion()
        self._metrics.engine_suspect.set(0)
        self._inventory.events.add("TRUSTED")
        self._inventory.mark_changed()

    async def _load_and_check(self, client: EngineClient, adapter: WorkerAdapter) -> WorkerAdapter:
        """Load the adapter, check that the engine lists and uses it, and confirm the inventory if all are listed.

        Returns it with its effect. Raises EngineError; an adapter that is refused for its effect is unloaded again.
        """
        await self._effects.prepare(adapter)
        await self._call_load(client, adapter)
        listed_at = self._clock()
        if adapter.engine_name not in (listed := await client.list_adapters()):
            raise _not_listed_error(adapter)
        if self._inventory.slots.registered <= listed.keys():
            self._inventory.confirm_list(listed_at)
        return await self._check_effect(client, adapter)

    async def _check_effect(self, client: EngineClient, adapter: WorkerAdapter) -> WorkerAdapter:
        """The adapter, just loaded, with its effect, and with its acceptance where that is required.

        Unloads it again and raises EngineError if it is refused for one of them.

        A failed unload is logged: `reconcile_with_engine_list` tries again, and counts the adapter as not loaded.
        """
        try:
            checked = replace(await self._effects.check(client, adapter), acceptance=None)
            self._acceptance.forget(checked)
            if checked.acceptance_mode == "require":
                checked = await self._acceptance.require_equal(client, checked)
        except EngineError:
            self._inventory.mark_refused(adapter)
            self._offers.withdraw(adapter.engine_name)
            try:
                await client.unload(adapter.engine_name, timeout_s=self._settings.load_deadline_s)
            except EngineError as exc:
                log.warning("refused adapter not unloaded", lora_id=adapter.lora_id, error=str(exc))
            else:
                self._inventory.refused_names.discard(adapter.engine_name)
            raise
        self._offers.note_checked(adapter.engine_name)
        return checked

    async def _listed_without_refused(self, client: EngineClient) -> dict[str, str]:
        """The engine's list, without adapters that were refused for their effect; those are unloaded.

        Raises EngineError.
        """
        paths = dict(await client.list_adapters())
        for name in self._inventory.refused_names & paths.keys():
            await client.unload(name, timeout_s=self._settings.load_deadline_s)
            del paths[name]
        self._inventory.refused_names.clear()
        return paths

    async def verify_loaded_again(self) -> None:
        """Verify loaded adapters again that only older rules accepted, for `_VERIFYING_S`; unload those refused now.

        Raises EngineError if the engine fails.
        """
        ends_at = self._clock() + _VERIFYING_S
        outdated = [each for each in self._inventory.loaded_adapters() if each.rules < RULES_VERSION]
        self._unreadable &= {each.engine_name for each in outdated}
        for adapter in outdated:
            if self._clock() > ends_at:
                return
            try:
                await self._installer.verify_again(adapter)
            except OSError as exc:
                if adapter.engine_name not in self._unreadable:
                    self._unreadable.add(adapter.engine_name)
                    log.warning("an adapter cannot be read again", lora_id=adapter.lora_id, error=str(exc))
            except SourceError as exc:
                await self._unload_refused(adapter, exc)

    async def _unload_refused(self, adapter: WorkerAdapter, refusal: SourceError) -> None:
        """Unload an adapter that the newest rules refuse, and record why. Raises EngineError."""
        async with self._engine.lock:
            if (client := self._engine.client) is None or not self._inventory.slots.has(adapter.engine_name):
                return
            await self._call_unload(client, adapter, VERIFYING)
            self._inventory.mark_unwanted(adapter)
            self._inventory.record_failure(adapter.lora_id, adapter.digest, refusal, VERIFYING)

    async def check_unproved(self) -> None:
        """Compare the answers of one loaded adapter whose effect is not proved, if the engine is idle.

        It is unloaded and recorded as failed if it has no effect. Raises EngineError if the engine fails.
        """
        async with self._engine.lock:
            client = self._engine.client
            adapter = self._effects.next_unproved(self._inventory.loaded_adapters())
            if client is None or adapter is None:
                return
            try:
                checked = await self._check_effect(client, adapter)
            except EngineError as exc:
                if not await self._is_adapters_fault(exc):
                    raise
                self._record_unusable(adapter, exc)
            else:
                self._store_checked(adapter, checked)

    async def measure_modules(self) -> bool:
        """Measure kinds of modules, one after the other, while the engine is idle; returns whether now all are.

        A load waits for one of them at most. Raises EngineError if the engine fails.
        """
        while True:
            async with self._engine.lock:
                client, kind = self._engine.client, self._probes.next_kind()
                if client is None or kind is None or not await self._make_room_for_probe(client):
                    return False
                table = await self._probes.measure(client, kind)
                self._inventory.note_probe(kind)
            if not table.pending:
                return True

    async def _make_room_for_probe(self, client: EngineClient) -> bool:
        """Make sure that a probe pushes no loaded adapter out of the engine's memory, but a ghost.

        The adapters that would be pushed out are used once, which makes them the newest ones. False: without a free
        slot, or if there are too many of them.
        """
        if self._inventory.slots.free <= 0:
            return False
        for _ in range(_MOST_TOUCHED):
            name = self._inventory.displaced_by_probe()
            if name is None:
                return True
            try:
                await client.fingerprint(name, PROMPTS[0], base_model=self._engine.model_card().name)
            except EngineSilent:
                return False
            self._inventory.note_touched(name)
        return False

    async def check_measured(self) -> None:
        """Judge the loaded adapters by what was measured since their loads. Raises EngineError if the engine fails.

        One that loses everything is unloaded and recorded as failed.
        """
        for adapter in self._inventory.loaded_adapters():
            async with self._engine.lock:
                client = self._engine.client
                if client is None or not self._inventory.slots.has(adapter.engine_name):
                    continue
                try:
                    checked = await self._effects.check_measured(adapter)
                except EngineError as exc:
                    self._offers.withdraw(adapter.engine_name)
                    await client.unload(adapter.engine_name, timeout_s=self._settings.load_deadline_s)
                    self._record_unusable(adapter, exc)
                else:
                    self._store_checked(adapter, checked)

    def _store_checked(self, adapter: WorkerAdapter, checked: WorkerAdapter) -> None:
        """Store what a check has shown of an adapter, if that is new."""
        current = self._installed.get(adapter.engine_name)
        if current is not None and checked != adapter:
            self._installed.store(with_effect_of(current, checked))
            self._inventory.mark_changed()

    def _record_unusable(self, adapter: WorkerAdapter, exc: EngineError) -> None:
        """Record that the engine has no use of an adapter that it had: unloaded, unwanted and failed."""
        self._inventory.mark_unloaded(adapter, CHECKING)
        self._inventory.mark_unwanted(adapter)
        self._inventory.record_failure(adapter.lora_id, adapter.digest, exc, CHECKING)

    async def check_acceptance(self) -> None:
        """Compare loaded adapters with their acceptance files, while no request waits. Raises EngineError.

        Not under the engine's lock: nothing is changed there, and a load need not wait.
        """
        for _ in range(_CHECKS_A_PASS):
            client = self._engine.client
            loaded = [
                each for each in self._inventory.loaded_adapters() if each.engine_name not in self._offers.untaken
            ]
            adapter = self._acceptance.next_unchecked(loaded)
            if client is None or adapter is None or await self._acceptance.has_waiting(client):
                return
            self._show_acceptance(await self._acceptance.check(client, adapter))

    async def check_loaded(self, request: CheckRequest, by: Requester) -> WorkerAdapter:
        """Compare a loaded adapter with its acceptance file now; returns it with the result. Raises WorkerError.

        With `acceptance: require` it is unloaded and recorded as failed for any other result than `equal`; it stays
        where the engine only did not answer and it was equal before. A file that is sent for an adapter on disk is kept
        for its next load.
        """
        check_lora_id(request.lora_id)
        async with self._lock(request.lora_id), self._engine.shared_lock():
            client = self._engine.require_client()
            adapter = await self._installer.with_acceptance(self._adapter_to_check(request), request)
            if not self._inventory.slots.has(adapter.engine_name):
                return self._report.adapter_on_disk(self._installed.store(adapter))
            checked = await self._acceptance.check(client, replace(adapter, acceptance_mode=request.acceptance))
            self._show_acceptance(checked)
        found = checked.acceptance
        if request.acceptance == "require" and found is not None and found.result != "equal":
            refusal = not_accepted_error(checked, found)
            if _is_still_equal(adapter, found):
                raise refusal
            await self.unload(UnloadRequest(lora_id=checked.lora_id, digest=checked.digest), CHECKING)
            self._inventory.record_failure(checked.lora_id, checked.digest, refusal, by)
            raise refusal
        return self._report.as_loaded(checked)

    def _adapter_to_check(self, request: CheckRequest) -> WorkerAdapter:
        """The version that a request means: loaded, or on disk where a file is sent. Raises AgentRequestError."""
        known = [each for each in self._installed.versions(request.lora_id) if request.digest in {None, each.digest}]
        loaded = [each for each in known if self._inventory.slots.has(each.engine_name)]
        if found := loaded or (known if request.content else []):
            return found[-1]
        message = f"adapter {request.lora_id!r} is not loaded here; load it, then check it"
        raise AgentRequestError("adapter_unknown", message)

    def _show_acceptance(self, checked: WorkerAdapter) -> None:
        """Record and publish the result for an adapter that is still loaded; one that differs is an incident."""
        current = self._installed.get(checked.engine_name)
        found = checked.acceptance
        if current is None or found is None or not self._inventory.slots.has(checked.engine_name):
            return
        before = current.acceptance
        self._installed.store(
            replace(
                current,
                acceptance=before if _is_still_equal(current, found) else found,
                acceptance_file=found.file or current.acceptance_file,
                acceptance_mode=checked.acceptance_mode,
            )
        )
        if found.result == "differs" and (before is None or before.result != "differs"):
            self._inventory.history.record_incident("acceptance_differs", f"{checked.lora_id}: {found.why}")
        self._inventory.mark_changed()

    async def _call_load(self, client: EngineClient, adapter: WorkerAdapter) -> None:
        """Call the engine's load and measure it; a timeout marks the engine as suspect. Raises EngineError."""
        try:
            with self._metrics.load_seconds(adapter.lora_id).time():
                await client.load(adapter.engine_name, Path(adapter.path), timeout_s=self._settings.load_deadline_s)
        except EngineError as exc:
            if exc.code == "engine_timeout" and self._engine.client is client:
                reason = f"the load of {adapter.lora_id} hangs since {self._settings.load_deadline_s:g} s"
                self.mark_suspect(reason, patience_s=self._settings.hang_after_s)
            raise

    async def _evict_if_full(self, client: EngineClient, evict: str | None, by: Requester) -> WorkerAdapter | None:
        """Unload the named victim if no slot is free; returns it, None if there was room.

        It stays wanted. Raises EngineError, `no_free_slot` without a victim.
        """
        if self._inventory.slots.free > 0:
            return None
        victim = self._inventory.named_victim(evict)
        if victim is None:
            raise self._inventory.no_free_slot_error()
        await self._call_unload(client, victim, by)  # it stays wanted until the new adapter is loaded
        return victim

    async def _reload_victim(self, client: EngineClient, victim: WorkerAdapter, by: Requester) -> None:
        """Load an evicted adapter again, because the load that evicted it failed; another failure is only logged.

        A refused one is no longer wanted. Nothing is recorded if the engine was lost meanwhile.
        """
        try:
            await client.load(victim.engine_name, Path(victim.path), timeout_s=self._settings.load_deadline_s)
        except EngineError as exc:
            log.warning("evicted adapter not reloaded", lora_id=victim.lora_id, error=str(exc))
            if exc.code == "adapter_refused":
                self._inventory.mark_unwanted(victim)
            return  # else the engine is down: after its restart the victim is loaded, as it is still wanted
        if self._engine.client is client:
            self._inventory.mark_loaded(victim, load_seconds=victim.load_seconds, by=by)

    async def _call_unload(self, client: EngineClient, adapter: WorkerAdapter, by: Requester) -> None:
        """Call the engine's unload, measure it, and record and publish the result. Raises EngineError.

        Its offer ends before: vLLM's lock of the name lets the unload wait for a load that has begun.
        """
        self._offers.withdraw(adapter.engine_name)
        try:
            with self._metrics.unload_seconds(adapter.lora_id).time():
                await client.unload(adapter.engine_name, timeout_s=self._settings.load_deadline_s)
        except EngineError as exc:
            self._inventory.events.add(
                "UNLOAD_FAILED",
                lora_id=adapter.lora_id,
                digest=adapter.digest,
                engine_name=adapter.engine_name,
                error=str(exc),
            )
            raise
        self._inventory.mark_unloaded(adapter, by)


def _is_still_equal(adapter: WorkerAdapter, found: AdapterAcceptance) -> bool:
    """Whether a comparison had no answer, and the one before it with the same file was equal: that one holds."""
    known = adapter.acceptance
    return found.is_unanswered and known is not None and (known.result, known.file) == ("equal", found.file)


def _not_listed_error(adapter: WorkerAdapter) -> EngineError:
    """The error of a load that the engine confirmed, although its list lacks the adapter."""
    message = f"load {adapter.engine_name}: the engine confirmed the load, but does not list it"
    return EngineError("adapter_refused", message)
