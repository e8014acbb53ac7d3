"""The loop that lets simulated time pass, and the adapters served by name."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workers.engines.sim.adapters import SimAdapter, read_adapter
from workers.engines.sim.blocks import BlockChain, BlockPool, ChainRoot
from workers.engines.sim.events import EventBatch
from workers.engines.sim.metrics import SimMetrics
from workers.engines.sim.publisher import KVEventPublisher
from workers.engines.sim.settings import SimSettings
from workers.engines.sim.text import SimReply
from workers.engines.sim.timing import EngineBatch, EngineJob, EngineLimits, EngineStep, FinishReason


class EngineDeadError(Exception):
    """The engine has ended under its requests. vLLM 0.32's text (v1/engine/exceptions.py EngineDeadError)."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class EngineDraining(Exception):
    """SIGTERM has come: what runs is finished, nothing new is taken. vLLM's text, and its 500."""


@dataclass(slots=True, eq=False, kw_only=True)
class StreamedJob(EngineJob):
    """A job with what its reader needs."""

    reply_text: SimReply
    told: Callable[["StreamedJob"], None]
    """Called whenever the job has more tokens, or has ended."""


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

    def __post_init__(self) -> None:
        """Build the batch and let the gauges read it."""
        given = self.settings
        pool = BlockPool(given.num_gpu_blocks, given.block_size, int_hashes=given.int_block_hashes)
        self.batch = EngineBatch(
            pool,
            EngineLimits(
                max_num_seqs=given.max_num_seqs,
                max_num_batched_tokens=given.max_num_batched_tokens,
                max_loras=given.max_loras,
                max_cpu_loras=given.max_cpu_loras,
                prefill_tokens_per_s=given.sim_prefill_tokens_per_s,
                decode_tokens_per_s=given.sim_decode_tokens_per_s,
                load_s=given.sim_load_s,
            ),
        )
        self.metrics.watch(self.batch)

    def submit(
        self,
        prompt: Sequence[int],
        reply: SimReply,
        *,
        adapter: SimAdapter | None,
        cache_salt: str | None,
        report_reused: bool,
        told: Callable[[StreamedJob], None],
    ) -> StreamedJob:
        """Queue one prompt. Raises `EngineDeadError` and `EngineDraining`."""
        self.check_alive()
        root = ChainRoot(cache_salt=cache_salt)
        if adapter is not None:
            root = ChainRoot(adapter.int_id, adapter.name, adapter.path, cache_salt)
        job = StreamedJob(
            chain=BlockChain(list(prompt), root, self.settings.block_size),
            prompt_tokens=len(prompt),
            reply=reply.token_ids,
            reply_ended=reply.ended,
            arrived=time.monotonic(),
            adapter=adapter,
            report_reused=report_reused,
            reply_text=reply,
            told=told,
        )
        self.batch.add(job)
        self._wake.set()
        return job

    def check_alive(self) -> None:
        """Raise what a request gets instead of an answer."""
        if self.is_dead:
            raise EngineDeadError
        if self.is_draining:
            raise EngineDraining("cannot schedule new futures after shutdown")

    def abort(self, job: StreamedJob) -> None:
        """Its reader has gone."""
        if job.ended is None:
            self.batch.abort(job)
            self.metrics.finished(job)

    async def load(self, name: str, path: str) -> None:
        """Read an adapter, stall everybody for as long, serve it. Raises `NoAdapterFound`, `AdapterRefused`."""
        if self.is_draining:
            raise EngineDraining("Server shutting down")
        int_id = self.next_int_id()  # burnt even when the load fails, as in vLLM
        given = self.settings
        async with self._stall:
            with self.metrics.stalled():
                adapter = await asyncio.to_thread(read_adapter, int_id, name, path, max_rank=given.max_lora_rank)
                await asyncio.sleep(given.sim_load_s)
            self.batch.host.use(adapter)
        self.adapters[name] = adapter

    def next_int_id(self) -> int:
        """The number of the next adapter. vLLM takes one for each unknown model asked for, too."""
        self._int_ids += 1
        return self._int_ids

    def unload(self, name: str) -> None:
        """Forget the name. The weights stay in host memory, and requests in flight go on."""
        del self.adapters[name]

    async def drain(self) -> None:
        """Take nothing new; returns when the last request has ended."""
        self.is_draining = True
        while self.batch.has_work and not self.is_dead:
            await self._idle.wait()

    async def run(self) -> None:
        """Step for ever. Ends only by cancellation, or with the engine when an adapter's files have vanished."""
        due = time.monotonic()
        while True:
            if not self.batch.has_work:
                self._wake.clear()
                self._idle.set()
                await self._wake.wait()
                self._idle.clear()
                due = time.monotonic()
            async with self._stall:
                due = max(due, time.monotonic() - 0.05)  # a late timer is made up for, a long stall is not
                step = self.batch.begin(time.monotonic())
                if not _files_are_there(step):
                    self._die()
                    return
                due += step.duration_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self._finish(step)

    def _finish(self, step: EngineStep) -> None:
        now = time.monotonic()
        if step.events and self.publisher is not None:
            self.publisher.publish(EventBatch(time.time(), list(step.events), 0))
        told = self.batch.end(step, now)
        self.metrics.stepped(step, told)
        for job in told:
            if job.ended is not None:
                self.metrics.finished(job)
            if isinstance(job, StreamedJob):
                job.told(job)

    def _die(self) -> None:
        """A registered adapter was read again and is gone: vLLM's EngineCore ends there, with all its requests."""
        self.is_dead = True
        for job in [*self.batch.running, *self.batch.waiting]:
            self.batch.abort(job, FinishReason.ERROR)
            if isinstance(job, StreamedJob):
                job.told(job)
        self.on_death()


def _files_are_there(step: EngineStep) -> bool:
    return all(
        (Path(adapter.path) / "adapter_config.json").is_file()
        for adapter in step.reloads
        if isinstance(adapter, SimAdapter)
    )
