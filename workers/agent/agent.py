"""The agent of one engine: resolve -> fetch -> verify -> install -> load -> announce, and unload.

The installed adapters say what the engine should have loaded, the engine's own list says what it has. Both are compared
after every start and every few seconds. An agent never evicts by itself: the caller names the victim.

The Installer puts files on disk, the Loader loads them into the engine, the Inventory knows which adapter is where.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import structlog

from lorafleet.engine.vllm_plugin.engine_reports import EngineProcessReport, has_no_gpu_kernels, punica_names
from lorafleet.kv.connectors import NO_CONNECTOR, apply_setting
from workers.agent.checks.module_probes import ModuleProbes
from workers.agent.current_engine import CurrentEngine
from workers.agent.foreign_reader import ForeignFilesReader
from workers.agent.installer import Installer
from workers.agent.kv_ledger import KvLedgers
from workers.agent.loader import Loader
from workers.agent.uploaded_adapters import UploadedAdapters
from workers.core.errors import AgentRequestError, EngineError
from workers.engines.base import EngineClient
from workers.engines.kinds import engine_traits
from workers.engines.vllm_tables import with_version
from workers.inventory.adapter_usage import AdapterUsage
from workers.inventory.context import AgentContext
from workers.inventory.event_log import Requester
from workers.inventory.inventory import Inventory, timestamp
from workers.inventory.inventory_report import InventoryReport
from workers.verification.verify import base_model_or_none, model_folder
from workers.wire import (
    AdapterFile,
    AdapterFiles,
    AgentState,
    CheckRequest,
    DeploymentCard,
    DrainAnswer,
    InspectRequest,
    LoadRequest,
    MarkFilesRequest,
    Metadata,
    Transport,
    UnloadRequest,
    WorkerAdapter,
)

log = structlog.get_logger()

_NO_LOAD_ROUTE = "has no route to load adapters: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


class WorkerAgent:
    """One worker's adapters and engine, as the REST routes use them. The event loop is the only writer."""

    def __init__(self, context: AgentContext) -> None:
        self.context = context
        self.engine = CurrentEngine(context.settings, context.metrics, clock=context.clock)
        self.inventory = Inventory(
            settings=context.settings, installed=context.installed, events=context.events, metrics=context.metrics
        )
        self.report = InventoryReport(context, self.inventory)
        self.usage = AdapterUsage(
            context.settings.state / "usage.json",
            context.installed,
            now=timestamp,
        )
        self._installer = Installer(context, inventory=self.inventory, engine=self.engine)
        self._probes = ModuleProbes(context.settings, self.engine, command=context.command, clock=context.clock)
        self._loader = Loader(
            context,
            engine=self.engine,
            installer=self._installer,
            inventory=self.inventory,
            report=self.report,
            probes=self._probes,
        )
        self._uploaded = UploadedAdapters(context, loader=self._loader, report=self.report)
        self._foreign_reader = ForeignFilesReader(context, self.inventory, self._loader)
        self._facts = context.facts
        self.inventory.kv_connector = apply_setting(context.settings.engine_salt, context.connector or NO_CONNECTOR)
        self._state: AgentState = "starting"
        self._state_reason = ""
        self._drain_state: Literal["serving", "ordered", "draining", "stopping"] = "serving"
        self._warming: asyncio.Event | None = None

    @property
    def is_warming(self) -> bool:
        """Whether the worker waits for the orchestrator to load adapters before it becomes ready."""
        return self._warming is not None

    @property
    def state(self) -> AgentState:
        """The worker's state in /metadata: "draining" in place of "ready" during a drain."""
        return "draining" if self._drain_state != "serving" and self._state == "ready" else self._state

    @property
    def state_reason(self) -> str:
        """Why the worker is not ready, or why its engine is suspect; "" without a reason."""
        return self._state_reason or self.engine.suspicion

    # --- the engine comes and goes -------------------------------------------------------------------------------

    def set_state(self, state: AgentState, reason: str = "") -> None:
        """Set the worker's state and its reason, and wake the sender of heartbeats."""
        self._state, self._state_reason = state, reason
        self.inventory.mark_changed()

    async def attach_engine(
        self,
        client: EngineClient,
        *,
        engine_boot_id: str,
        transport: Transport,
        printed: EngineProcessReport | None = None,
    ) -> None:
        """Use a healthy engine: load the wanted adapters, then become ready. Raises EngineError.

        printed  as of `CurrentEngine.attach`

        Reads the base model's shapes and the engine's KV connector first, and waits for the first scan of lora_path and
        for the files of adapters that the engine had, so that the report of a ready worker has all adapters. No adapter
        is loaded, and the reason logged, where a connector mixes adapters or the device cannot run them.
        """
        await self.engine.attach(client, boot_id=engine_boot_id, transport=transport, printed=printed)
        self._check_kernels()
        self.context.cache.folder.engine_url = transport.engine_url
        self.inventory.mark_changed()
        self.engine.version = await client.version()
        self.inventory.takes_loads = await client.takes_loads()
        if not self.inventory.takes_loads and client.traits.takes_adapters == "while running":
            log.warning("the engine loads no adapters while it runs", reason=f"it {_NO_LOAD_ROUTE}")
        await self._read_base_model(self.engine.version)
        await self._probes.begin(self.context.cache.rules.base)
        self._use_measured()
        reported = await client.kv_connector() if self.context.connector is None else self.context.connector
        connector = self.inventory.kv_connector = apply_setting(self.context.settings.engine_salt, reported)
        if connector.reason:
            log.info("KV connector", separation=connector.separation, reason=connector.reason)
        self.inventory.device_refusal = self._device_refusal()
        if refusal := self.inventory.refusal:
            log.error("engine takes no adapters", reason=refusal)
            self.inventory.reset_slots(keeps_ghosts=client.traits.keeps_ghosts)
        is_new = not refusal and await self._load_wanted_adapters()
        if not self.context.local_adapters.has_scanned.is_set():
            self.set_state("starting", "the adapters in lora_path are read")
            await self.context.local_adapters.has_scanned.wait()
        if not refusal:
            await self._foreign_reader.read_new()
        if is_new:
            await self._wait_until_warm()
        if self.engine.client is not client:
            raise EngineError("engine_down", "the engine was lost while its adapters were loaded")
        self.context.metrics.engine_up.set(1)
        self.context.events.add("ENGINE_UP")
        self.set_state("ready")
        adapters = len(self.inventory.slots.registered)
        log.info("ready", engine=client.url, engine_boot_id=engine_boot_id, adapters=adapters)

    async def adapters_at_start(self) -> dict[str, Path]:
        """Install the adapters of `preload_loras` for an engine that starts with them: engine name -> folder.

        An adapter at fault is logged and left out.
        """
        return {adapter.engine_name: Path(adapter.path) for adapter in await self._loader.install_preloads()}

    async def _load_wanted_adapters(self) -> bool:
        """Load the adapters from before a restart, other clients' included, and `preload_loras`.

        Returns whether the fleet had loaded none before.

        An engine that takes adapters at its start alone has them already: False.
        """
        await self._loader.adopt_engine_list()
        if not self.inventory.takes_loads:
            return False
        await self._loader.restore()
        await self._loader.restore_foreign()
        is_new = not self.inventory.loaded_adapters()
        await self._loader.preload()
        return is_new

    async def _read_base_model(self, version: str) -> None:
        """Read the base model into the rules, if it is missing or the engine's version has another table.

        The hub cache is incomplete before the engine has started.
        """
        facts = with_version(self._facts, version) if self._facts.table else self._facts
        is_known = self.context.cache.rules.base is not None and facts == self._facts
        if is_known or not self.context.settings.check_shapes:
            return
        folder = await asyncio.to_thread(model_folder, self.context.settings.model)
        if folder is None:
            return
        if self._facts.table and facts.table is None:
            log.warning("this version of the engine has no table of its modules", version=version)
        base = await asyncio.to_thread(base_model_or_none, folder, facts)
        self._facts = facts
        tokenizer = folder if not facts.tokenizer else await asyncio.to_thread(model_folder, facts.tokenizer)
        self.context.cache.rules = replace(self.context.cache.rules, base=base, tokenizer=tokenizer)
        self.context.local_adapters.use_rules(self.context.cache.rules)

    def _device_refusal(self) -> str:
        """Why the engine's device runs no adapters of this base model; "" if it does, or if that is not known.

        source  vLLM 0.32 lora/layers/fused_moe.py: the layer of experts with adapters calls Triton's kernels
        """
        base, devices = self.context.cache.rules.base, {report.device for report in self.engine.reports}
        if self.context.settings.engine != "vllm" or devices != {"cpu"} or base is None or not base.has_experts:
            return ""
        return (
            "its base model is a mixture of experts, for which vLLM runs adapters on GPUs alone: on the CPU the engine"
            " would die of its first request for one"
        )

    def _use_measured(self) -> None:
        """Check adapters by what was measured in this engine, once all of it is; by its table alone until then."""
        rules, measured = self.context.cache.rules, self._probes.decided()
        if rules.base is not None and rules.base.measured != measured:
            self.context.cache.rules = replace(rules, base=replace(rules.base, measured=measured))
            self.context.local_adapters.use_rules(self.context.cache.rules)
        self.inventory.mark_changed()

    def _check_kernels(self) -> None:
        """Record as an incident that an engine on a GPU runs adapters without its device's kernels."""
        reports = self.engine.reports
        if has_no_gpu_kernels(reports):
            punica, device = punica_names(reports), reports[0].device
            log.error("engine runs adapters without LoRA kernels", punica=punica, device=device)
            cause = f"on {device} its wrapper is {punica or 'none'}; expected is PunicaWrapperGPU or PunicaWrapperXPU"
            self.inventory.history.record_incident("lora_kernels_missing", cause)

    async def _wait_until_warm(self) -> None:
        """Wait until the orchestrator has loaded a new worker's share of hot adapters, at most `warm_deadline_s`.

        Sets the state to "starting"; a passed deadline is logged. No-op without an orchestrator or deadline.
        """
        settings = self.context.settings
        if not settings.orchestrator_url or not settings.warm_deadline_s:
            return
        self._warming = asyncio.Event()
        self.set_state("starting", "its share of the hot adapters is loaded before it is ready")
        try:
            async with asyncio.timeout(settings.warm_deadline_s):
                await self._warming.wait()
        except TimeoutError:
            log.warning("ready before all its adapters were loaded", after_s=settings.warm_deadline_s)
        finally:
            self._warming = None
            self.set_state("starting")

    def end_warming(self) -> None:
        """Let a warming worker become ready: adapters are loaded, or no orchestrator is reachable. Else a no-op."""
        if self._warming is not None:
            self._warming.set()

    async def check_trust(self, client: EngineClient) -> bool:
        """Check whether the engine works; marks a stalled engine as suspect, and trusts it again when it computes.

        The health route of a hanging engine still answers, so a stalled engine must compute, or return a token on
        request.
        """
        engine, timeout_s = self.engine, self.context.settings.health_timeout_s
        was_suspect, stalled_s = bool(engine.suspicion), engine.stalled_s()
        if not was_suspect and not engine.has_stalled:
            return await client.is_healthy(timeout_s=timeout_s)
        # A full engine computes without answering our own request.
        is_well = was_suspect and engine.has_computed_since_suspect
        if is_well or await client.can_generate(engine.model_card().name, timeout_s=timeout_s):
            if was_suspect:
                self._loader.clear_suspicion()
            return True
        if not was_suspect:
            reason = f"the engine has requests, and has computed nothing for {stalled_s:.0f} s"
            self._loader.mark_suspect(reason, patience_s=self.context.settings.stuck_after_s)
        return False

    def mark_down(self, reason: str) -> None:
        """Answer as a worker whose engine is down from now on; `detach_engine` follows, and publishes it."""
        self._state, self._state_reason = "engine_down", reason

    async def detach_engine(self, reason: str) -> None:
        """Record and publish that the engine is down, with all its adapters; they stay wanted for the restart.

        Empties the slots, clears a suspicion, and closes the KV ledgers.
        """
        was_up = self.engine.client is not None
        self.mark_down(reason)  # before the first await
        await self.engine.detach(reason)
        self.inventory.reset_slots()
        self.context.metrics.engine_up.set(0)
        self.context.metrics.engine_suspect.set(0)
        if was_up:
            self.context.events.add("ENGINE_DOWN", error=reason)
        self.set_state("engine_down", reason)

    def kv_ledgers(self) -> KvLedgers:
        """The ledgers of the engine's KV blocks; raises EngineError `not_ready` while there are none."""
        return self.engine.kv_ledgers()

    def stop(self) -> None:
        """Drain for good, cancel loads and scans, and end all streams, because the process stops. Ends no engine."""
        self.context.cache.is_stopping = True
        self._begin_drain("draining")
        self._drain_state = "stopping"
        self._loader.cancel_all()
        self.context.local_adapters.stop()
        self.context.events.close()
        self.engine.end_kv_streams()

    # --- REST commands -------------------------------------------------------------------------------------------

    def check_epoch(self, epoch: int | None, *, is_destructive: bool) -> None:
        """Raises AgentRequestError if a command of this leader epoch is not allowed; else stores a new highest epoch.

        raises  `stale_epoch` for a replaced leader, `epoch_required` for a destructive command
                without an epoch where there is an orchestrator
        """
        if epoch is None:
            if is_destructive and self.context.settings.orchestrator_url:
                url, name = self.context.settings.orchestrator_urls[0], self.context.settings.instance_id
                raise AgentRequestError(
                    "epoch_required",
                    "this worker belongs to an orchestrator: only it may unload or evict (header x-lorafleet-epoch)."
                    f" `lorafleet workers unload {name} LORA_ID` asks it to, or DELETE"
                    f" {url}/v1/workers/{name}/adapters/LORA_ID; without an epoch a load may take a free slot",
                )
            return
        if epoch < self.context.installed.epoch:
            raise AgentRequestError(
                "stale_epoch",
                f"epoch {epoch} is over: epoch {self.context.installed.epoch} has been seen; read the lease again",
            )
        self.context.installed.raise_epoch(epoch)

    async def load(self, request: LoadRequest, by: Requester) -> WorkerAdapter:
        """Load an adapter into the engine; returns at once if it is loaded already. Raises WorkerError.

        Refused while the worker drains, is not ready, takes no adapters, or suspects its engine. A request for only the
        files loads nothing.
        """
        if self._drain_state != "serving":
            raise EngineError("draining", "this worker is draining; load on another one", retry_after_s=30)
        if self.state != "ready" and not self.is_warming:
            reason = f": {self.state_reason}" if self.state_reason else ""
            raise EngineError("not_ready", f"this worker is {self.state}{reason}; try again soon", retry_after_s=5)
        if refusal := self.inventory.refusal:
            raise EngineError("adapters_refused", f"this worker takes no adapters: {refusal}; load on another one")
        if not self.inventory.takes_loads and not self.inventory.has_loaded(request.lora_id, request.digest):
            raise EngineError("adapters_refused", self._no_loads_message(request.lora_id))
        if self.engine.suspicion:
            message = f"this worker takes no loads: {self.engine.suspicion}; load on another one"
            raise EngineError("not_ready", message, retry_after_s=5)
        return await (self._loader.fetch_ahead if request.only_files else self._loader.load)(request, by)

    def _no_loads_message(self, lora_id: str) -> str:
        """Why the engine loads nothing while it runs, and what to do for an adapter."""
        if engine_traits(self.context.settings.engine).takes_adapters == "while running":
            return f"this worker's engine {_NO_LOAD_ROUTE}, or load {lora_id!r} on another worker"
        return (
            f"{self.context.settings.engine} takes adapters at its start alone: add {lora_id!r} to preload_loras and"
            " restart this worker, or load on another one"
        )

    async def unload(self, request: UnloadRequest, by: Requester) -> tuple[str, ...]:
        """Unload an adapter and cancel its loads in progress; returns the unloaded engine names. Raises WorkerError.

        Requests that use it finish.
        """
        return await self._loader.unload(request, by)

    async def check(self, request: CheckRequest, by: Requester) -> WorkerAdapter:
        """Compare a loaded adapter with its acceptance file now; returns it with the result. Raises WorkerError."""
        return await self._loader.check_loaded(request, by)

    async def adapter_files(self, digest: str, *, is_recheck: bool = False) -> AdapterFiles:
        """The files of a verified adapter on this disk. Raises AgentRequestError `files_not_found`.

        is_recheck  as in `AdapterCache.has_intact`; files found damaged are reported as gone
        """
        if is_recheck and not await self.context.cache.has_intact(digest, is_recheck=True):
            log.error("files of an adapter are damaged", digest=digest)
            self.inventory.mark_changed()
        sizes = await self.context.cache.files(digest)
        if not sizes:
            raise AgentRequestError("files_not_found", f"digest {digest}: no intact files on this worker's disk")
        files = tuple(AdapterFile(name=name, size_bytes=size) for name, size in sorted(sizes.items()))
        return AdapterFiles(digest=digest, files=files)

    async def adapter_file(self, digest: str, name: str) -> Path:
        """The path of one file of a verified adapter. Raises AgentRequestError `files_not_found`."""
        files = await self.adapter_files(digest)
        if name not in {file.name for file in files.files}:
            raise AgentRequestError("files_not_found", f"digest {digest}: has no file {name[:100]!r}", param="name")
        return self.context.cache.path(digest) / name

    async def mark_files(self, request: MarkFilesRequest) -> None:
        """Keep files on this disk, fetched from other workers if needed, or let them be deleted. Raises SourceError."""
        try:
            if request.mark == "kept":
                for digest in request.digests:
                    await self._installer.keep(digest, request.neighbours)
            else:
                await self.context.cache.release(request.digests, is_dropped=request.mark == "gone")
        finally:
            self.inventory.mark_changed()

    async def check_source(self, source: str) -> None:
        """Raises SourceError if this worker's settings forbid the source; fetches nothing."""
        await self.context.cache.check_source(source)

    async def inspect(self, request: InspectRequest) -> WorkerAdapter:
        """Fetch, verify and install an adapter without loading it. Raises WorkerError."""
        return await self._loader.inspect(request)

    async def install_upload(self, upload_id: str, request: InspectRequest) -> WorkerAdapter:
        """Unpack, verify and install an upload; a second call finds it installed. Raises WorkerError.

        An upload whose bytes are refused is deleted.
        """
        return await self._uploaded.install(upload_id, request)

    async def drain(self, deadline_s: float, *, is_ordered: bool = False) -> DrainAnswer:
        """Start a drain, and wait until the engine is idle or the deadline passes. Raises EngineError.

        The drain lasts until `undrain`.

        is_ordered  by an orchestrator, which takes its orders back; a pod's own drain is for good
        """
        self._begin_drain("ordered" if is_ordered else "draining")
        quiet_s = max(self.context.timers.quiet_s, 2 * self.engine.full_step_s())
        return await self.engine.wait_until_idle(deadline_s=deadline_s, quiet_s=quiet_s)

    def _begin_drain(self, state: Literal["ordered", "draining"]) -> None:
        """Refuse loads from now on, with an event and a heartbeat. A drain that runs stays, but an ordered one."""
        if self._drain_state == "serving":
            self.context.events.add("DRAINING")
        if self._drain_state == "serving" or (self._drain_state == "ordered" and state == "draining"):
            self._drain_state = state
            self.inventory.mark_changed()

    def undrain(self) -> None:
        """End a drain, with an event and a heartbeat. Raises EngineError `draining` if the process stops."""
        if self._drain_state == "stopping":
            raise EngineError("draining", "this agent is stopping; it cannot serve again", retry_after_s=30)
        if self._drain_state != "serving":
            self._drain_state = "serving"
            self.context.events.add("UNDRAINED")
            self.inventory.mark_changed()

    def count_uses(self, uses: Mapping[str, int]) -> None:
        """Add requests by adapter to the counts, and move the used adapters up in the LRU."""
        self.inventory.mark_used(self.usage.count_uses(uses))

    # --- background loops ----------------------------------------------------------------------------------------

    async def reconcile(self) -> None:
        """Read free disk bytes, scan lora_path, and correct the inventory from the engine's list. Raises EngineError.

        Verifies loaded adapters of older rules, checks the effect of one adapter where it is not proved yet, compares
        some with acceptance files, and measures kinds of modules.
        The list is ignored while the agent is neither ready nor draining, or its KV connector is refused.
        """
        await self.context.cache.update_free_bytes()
        if await self.context.local_adapters.scan():
            self.inventory.mark_changed()
        # An engine that takes no adapters gets no requests for them: ignore its list.
        if not self.inventory.refusal:
            await self._loader.reconcile_with_engine_list(lambda: self.state in {"ready", "draining"})
            if self.state == "ready" and not self.engine.suspicion:
                await self._loader.verify_loaded_again()
                await self._loader.check_unproved()
                await self._loader.check_acceptance()
                if self.inventory.takes_loads and await self._loader.measure_modules():
                    self._use_measured()
                    await self._loader.check_measured()

    async def read_foreign_files(self) -> None:
        """Record what another client loaded into the engine, and read its files, so that it can be adopted.

        Not while the agent ignores the engine's list; see `reconcile`.
        """
        if self.state in {"ready", "draining"} and not self.inventory.refusal:
            await self._foreign_reader.read_new()

    async def run_maintenance(self) -> None:
        """Save counts, renew leases on wanted adapters, enforce the cache's limit and forget deleted adapters.

        Fetches the lost files of loaded adapters again.
        """
        installed_digests = frozenset(adapter.digest for adapter in self.context.installed.all())
        self.context.installed.retry_writes()
        self.usage.save()
        lost_files, deleted = await self.context.cache.maintain_folder(
            self.inventory.wanted_digests(), installed_digests, self._installer.digests_in_use
        )
        self.inventory.forget_deleted(deleted)
        await self._loader.refetch_lost_files(lost_files)

    def update_gauges(self) -> None:
        """Set all gauges that are not set as their values change."""
        self.engine.update_gauges()
        self.inventory.update_gauges()
        self.context.metrics.cache_used_bytes.set(self.context.cache.used_bytes)
        self.context.metrics.cache_held_bytes.set(self.context.cache.held_bytes)
        self.context.metrics.cache_limit_bytes.set(self.context.cache.folder.max_bytes)
        self.context.metrics.cache_adapters.set(self.context.cache.adapters)
        self.context.metrics.disk_free_bytes.set(self.context.cache.free_bytes)
        self.context.metrics.kept_adapters.set(self.context.cache.held.kept_count)

    # --- reports -------------------------------------------------------------------------------------------------

    def metadata(self, *, with_available: bool = True) -> Metadata:
        """The worker's state as `GET /metadata` and heartbeats have it.

        with_available  as of `InventoryReport.info`
        """
        settings, model = self.context.settings, self.engine.model_card()
        in_engine = {"punica": punica_names(self.engine.reports), "measured": self._probes.table}
        lora = self.report.info(with_available=with_available).model_copy(update=in_engine)
        return Metadata(
            instance_id=settings.instance_id,
            namespace=settings.namespace,
            component=settings.component,
            state=self.state,
            state_reason=self.state_reason,
            is_suspect=bool(self.engine.suspicion),
            is_warming=self.is_warming,
            is_drain_ordered=self._drain_state == "ordered",
            agent_url=self.context.agent_url,
            pool=settings.pool,
            zone=settings.zone,
            node=settings.node,
            model=model,
            mdc=DeploymentCard.of(model, lora),
            transport=self.engine.transport,
            engine_version=self.engine.version,
            lora=lora,
            load=self.engine.load_figures(load_seconds=self.report.load_seconds()),
            agent_boot_id=self.context.boot_id,
            engine_boot_id=self.engine.boot_id,
            epoch=self.context.installed.epoch,
            report_number=self._report_number,
        )

    def as_of(self) -> str:
        """The value of `REPORT_HEADER` now."""
        return f"{self.context.boot_id}/{self._report_number}"

    @property
    def _report_number(self) -> int:
        """The number of a report that is made now. Every change of a field that decides is counted."""
        return self.inventory.version + 1
