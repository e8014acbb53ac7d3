"""The engine: runs the batch's steps in real time, and loads and unloads adapters."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

from lorafleet.engine.vllm_plugin.lora_reports import LoraReport, write_report
from lorafleet.engine.vllm_plugin.offers import mark_as_taking_offers
from lorafleet.sim.adapters import SimAdapter, read_adapter
from lorafleet.sim.blocks import BlockChain, BlockPool, ChainRoot
from lorafleet.sim.events import EventBatch, KVEventPublisher
from lorafleet.sim.metrics import SimMetrics
from lorafleet.sim.settings import SimSettings
from lorafleet.sim.text import SimReply
from lorafleet.sim.timing import EngineBatch, EngineJob, EngineLimits, EngineStep, FinishReason


class EngineDeadError(Exception):
    """The engine has died. The message is vLLM 0.32's (v1/engine/exceptions.py EngineDeadError)."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class EngineDraining(Exception):
    """The engine drains after SIGTERM and accepts no requests; answered with vLLM's message and 500."""


@dataclass(slots=True, eq=False, kw_only=True)
class StreamedJob(EngineJob):
    """A job with its text and a callback for its reader."""

    reply_text: SimReply
    on_update: Callable[["StreamedJob"], None]
    """Called when the job has more tokens or has ended."""


@dataclass(slots=True)
class SimEngine:
    """One engine process: the batch, its clock, its adapters."""

    settings: SimSettings
    publisher: KVEventPublisher | None
    metrics: SimMetrics
    on_death: Callable[[], None]
    batch: EngineBatch = field(init=False)
    adapters: dict[str, SimAdapter] = field(default_factory=dict)
    is_draining: bool = False
    is_dead: bool = False
    _int_ids: int = 0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _stall: asyncio.Lock = field(default_factory=asyncio.Lock)
    _names: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def __post_init__(self) -> None:
        """Build the batch, connect the gauges to it, and say that offers are read. Raises OSError for a bad folder."""
        settings = self.settings
        if settings.lora_reports is not None and settings.enable_lora and settings.runtime_loras:
            mark_as_taking_offers(settings.lora_reports)
        pool = BlockPool(settings.num_gpu_blocks, settings.block_size, int_hashes=settings.int_block_hashes)
        self.batch = EngineBatch(
            pool,
            EngineLimits(
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_loras=settings.max_loras,
                max_cpu_loras=settings.max_cpu_loras,
                prefill_tokens_per_s=settings.sim_prefill_tokens_per_s,
                decode_tokens_per_s=settings.sim_decode_tokens_per_s,
                load_s=settings.sim_load_s,
            ),
        )
        self.metrics.watch_batch(self.batch)

    def submit(
        self,
        prompt: Sequence[int],
        reply: SimReply,
        *,
        adapter: SimAdapter | None,
        cache_salt: str | None,
        report_reused: bool,
        on_update: Callable[[StreamedJob], None],
    ) -> StreamedJob:
        """Queue one prompt and wake the engine; returns its job. Raises `EngineDeadError` and `EngineDraining`."""
        self.check_alive()
        root = ChainRoot(cache_salt=cache_salt)
        if adapter is not None:
            root = ChainRoot(adapter.int_id, adapter.name, adapter.path, cache_salt)
        job = StreamedJob(
            chain=BlockChain(list(prompt), root, self.settings.block_size),
            prompt_tokens=len(prompt),
            reply=reply.token_ids,
            reply_finish_reason=reply.finish_reason,
            arrived_at=time.monotonic(),
            adapter=adapter,
            report_reused=report_reused,
            reply_text=reply,
            on_update=on_update,
        )
        self.batch.add(job)
        self._wake.set()
        return job

    def check_alive(self) -> None:
        """Raises `EngineDeadError` or `EngineDraining` if the engine accepts no requests."""
        if self.is_dead:
            raise EngineDeadError
        if self.is_draining:
            raise EngineDraining("cannot schedule new futures after shutdown")

    def abort(self, job: StreamedJob) -> None:
        """Abort and count a job whose reader has disconnected; no-op if it has ended."""
        if job.finish_reason is None:
            self.batch.abort(job)
            self.metrics.count_finished(job)

    async def load(self, name: str, path: str) -> None:
        """Read and load an adapter, stalling all requests meanwhile; takes an adapter number even if it fails.

        raises  `NoAdapterFound`, `AdapterRefused`, `EngineDraining`
        """
        if self.is_draining:
            raise EngineDraining("Server shutting down")
        int_id = self.next_int_id()  # used up even if the load fails, as in vLLM
        settings = self.settings
        async with self._stall:
            with self.metrics.frozen_gauges():
                adapter = await asyncio.to_thread(
                    read_adapter,
                    int_id,
                    name,
                    path,
                    max_rank=settings.max_lora_rank,
                    target_modules=settings.lora_target_modules,
                    uncalled_modules=settings.sim_uncalled,
                )
                await asyncio.sleep(settings.sim_load_s)
                if settings.lora_reports is not None:
                    report = LoraReport(
                        0,
                        1,
                        adapter.modules,
                        adapter.ignored,
                        lora_int_id=int_id,
                        uncalled=adapter.uncalled,
                        calls_seen="yes",
                    )
                    # On a full disk the agent finds no report, as with vLLM, and compares answers.
                    with contextlib.suppress(OSError):
                        await asyncio.to_thread(write_report, settings.lora_reports, name, report)
            self.batch.host.use(adapter)
        self.adapters[name] = adapter

    async def resolve(self, name: str) -> SimAdapter | None:
        """Load an adapter that is offered under this name, once, and return it; None: it is not offered.

        raises  as `load`
        """
        async with self._name_lock(name):
            if name in self.adapters:
                return self.adapters[name]
            offer = await self.settings.offers.find(name)
            if offer is None:
                self.next_int_id()
                return None
            await self.load(name, offer.path)
            return self.adapters[name]

    def _name_lock(self, name: str) -> asyncio.Lock:
        """The lock of a name's loads and unloads, which exists while somebody holds it or waits for it."""
        return self._names.setdefault(name, asyncio.Lock())

    def next_int_id(self) -> int:
        """Use up and return an adapter number. vLLM also uses one up for each request for an unknown model."""
        self._int_ids += 1
        return self._int_ids

    async def unload(self, name: str) -> bool:
        """Remove the adapter's name; False if it is not loaded, also after a load of it that has begun.

        Its weights stay in host memory, and requests in flight finish.
        """
        async with self._name_lock(name):
            return self.adapters.pop(name, None) is not None

    async def drain(self) -> None:
        """Refuse new requests; returns when the last request has ended, or the engine has died."""
        self.is_draining = True
        while self.batch.has_work and not self.is_dead:
            await self._idle.wait()

    async def run(self) -> None:
        """Run steps until cancelled, or until the engine dies because an adapter's files have been deleted."""
        due = time.monotonic()
        while True:
            if not self.batch.has_work:
                self._wake.clear()
                self._idle.set()
                await self._wake.wait()
                self._idle.clear()
                due = time.monotonic()
            async with self._stall:
                due = max(due, time.monotonic() - 0.05)  # make up for late timers, but not for long stalls
                step = self.batch.begin_step(time.monotonic())
                if not _has_reload_files(step):
                    self._die()
                    return
                due += step.duration_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self._finish_step(step)

    def _finish_step(self, step: EngineStep) -> None:
        """Publish the step's KV events, count it and pass its tokens on to the readers."""
        now = time.monotonic()
        if step.events and self.publisher is not None:
            self.publisher.publish(EventBatch(time.time(), list(step.events), 0))
        jobs = self.batch.end_step(step, now)
        self.metrics.count_step(step, jobs)
        for job in jobs:
            if job.finish_reason is not None:
                self.metrics.count_finished(job)
            if isinstance(job, StreamedJob):
                job.on_update(job)

    def _die(self) -> None:
        """Die as vLLM's EngineCore does when it reads deleted adapter files: all requests fail; calls `on_death`."""
        self.is_dead = True
        for job in [*self.batch.running, *self.batch.waiting]:
            self.batch.abort(job, FinishReason.ERROR)
            if isinstance(job, StreamedJob):
                job.on_update(job)
        self.on_death()


def _has_reload_files(step: EngineStep) -> bool:
    """Whether the files of all adapters that the step reads from disk again exist."""
    return all(
        (Path(adapter.path) / "adapter_config.json").is_file()
        for adapter in step.reloads
        if isinstance(adapter, SimAdapter)
    )
