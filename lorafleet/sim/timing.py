"""Scheduling of requests into engine steps, and a step's duration: continuous batching with chunked prefill. No clock.

A step takes `prefill tokens / prefill rate`, plus `1 / decode rate` if any request decodes, plus `load_s` for each
adapter that is read again. So a prefill delays concurrent decodes, decodes do not delay each other, and a load stalls
all requests. source  vLLM 0.32 v1/core/sched/scheduler.py
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lorafleet.sim.blocks import BlockChain, BlockPool
from lorafleet.sim.events import KVEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The engine's limits and speeds. Rates are in tokens per second; 0: takes no time."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    max_cpu_loras: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Of one request."""
    load_s: float
    """Seconds to read an adapter from disk into host memory, which stalls all requests."""


class FinishReason(StrEnum):
    """Why a request ended; vLLM's `finished_reason` labels."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False, kw_only=True)
class EngineJob:
    """One prompt that is answered with `reply`, one token per step. Times are those passed to the batch."""

    chain: BlockChain
    prompt_tokens: int
    reply: Sequence[int]
    reply_finish_reason: FinishReason
    arrived_at: float
    adapter: Hashable = None
    """Equal for requests that share a device slot; None for the base model."""
    report_reused: bool = False
    """Also send events for reused blocks (vLLM's kv_cache_report_mode full)."""

    table: list[int] = field(default_factory=list)
    computed: int = 0
    stored: int = 0
    produced: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    gap_s: float = 0.0
    """Seconds between its last two tokens."""
    finish_reason: FinishReason | None = None

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is computed, so that it gets one token per step."""
        return self.computed >= self.prompt_tokens and self.produced > 0


@dataclass(slots=True)
class EngineStep:
    """The work of one engine step."""

    work: list[tuple[EngineJob, int]] = field(default_factory=list)
    """Requests and how many tokens of each are computed."""
    prefill_tokens: int = 0
    decoding: int = 0
    reloads: list[Hashable] = field(default_factory=list)
    """Adapters that were dropped from host memory and are read from disk in this step."""
    duration_s: float = 0.0
    events: list[KVEvent] = field(default_factory=list)


class HostAdapters:
    """The LRU of adapters in host memory. An unload leaves the weights here as a ghost."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lru: OrderedDict[Hashable, None] = OrderedDict()

    def use(self, adapter: Hashable) -> bool:
        """Make `adapter` the most recently used; returns True if it was absent and must be read from disk.

        Where the cache is full, the longest unused adapter is dropped.
        """
        missed = adapter not in self.lru
        if missed and len(self.lru) >= self.capacity:
            self.lru.popitem(last=False)
        self.lru[adapter] = None
        self.lru.move_to_end(adapter)
        return missed


class EngineBatch:
    """The requests of one engine. Call `begin_step`, let `duration_s` pass, call `end_step`."""

    def __init__(self, pool: BlockPool, pace: EngineLimits) -> None:
        self.pool = pool
        self.pace = pace
        self.host = HostAdapters(pace.max_cpu_loras)
        self.running: list[EngineJob] = []
        self.waiting: deque[EngineJob] = deque()
        self.deferred = 0
        """Waiting requests that were skipped in the last step because no adapter slot was free."""

    @property
    def has_work(self) -> bool:
        """Whether any job is running or waiting."""
        return bool(self.running or self.waiting)

    def add(self, job: EngineJob) -> None:
        """Append `job` to the queue; a later step starts it."""
        self.waiting.append(job)

    def abort(self, job: EngineJob, finish_reason: FinishReason = FinishReason.ABORT) -> None:
        """End `job` and release its blocks; its full blocks stay cached. No-op if it has ended."""
        if job.finish_reason is not None:
            return
        job.finish_reason = finish_reason
        if job in self.running:
            self.running.remove(job)
        else:
            self.waiting.remove(job)
        self._release_blocks(job)

    def begin_step(self, now: float) -> EngineStep:
        """Schedule one step: running requests first, then waiting ones in order, within all limits.

        Allocates their blocks; if there are too few, the newest running requests return to the queue.
        """
        step = EngineStep()
        budget = self.pace.max_num_batched_tokens
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            job = self.running[index]
            tokens = min(len(job.chain.tokens) - job.computed, budget)
            while not self._grow_table(job, tokens):
                preempted = True
                if self._preempt_last() is job:
                    break
            if index >= len(self.running):
                break
            budget -= self._add_to_step(step, job, tokens)
            index += 1
        self.deferred = 0
        if not preempted:
            self._admit(step, budget, now)
        self._set_duration(step)
        step.events = self.pool.take_events()
        return step

    def end_step(self, step: EngineStep, now: float) -> list[EngineJob]:
        """Give each fully computed job its token and end finished jobs; returns the jobs that got a token."""
        jobs_with_token = []
        for job, tokens in step.work:
            if job.finish_reason is not None:  # aborted during the step
                continue
            job.computed += tokens
            if job.computed < len(job.chain.tokens):
                continue
            job.chain.tokens.append(job.reply[job.produced])
            job.produced += 1
            job.first_token_at = now if job.first_token_at is None else job.first_token_at
            job.gap_s = 0.0 if job.last_token_at is None else now - job.last_token_at
            job.last_token_at = now
            jobs_with_token.append(job)
            if job.produced == len(job.reply):
                job.finish_reason = job.reply_finish_reason
                self.running.remove(job)
                self._release_blocks(job)
        return jobs_with_token

    def _admit(self, step: EngineStep, budget: int, now: float) -> None:
        """Start waiting jobs within the limits and add them to the step; those without a free adapter slot wait."""
        slots = {job.adapter for job, _ in step.work} - {None}
        passed_over: list[EngineJob] = []
        while self.waiting and budget > 0 and len(self.running) < self.pace.max_num_seqs:
            job = self.waiting[0]
            if job.adapter is not None and job.adapter not in slots and len(slots) >= self.pace.max_loras:
                passed_over.append(self.waiting.popleft())
                continue
            tokens = self._start_job(job, budget)
            if not tokens:
                break
            self.running.append(self.waiting.popleft())
            job.scheduled_at = now if job.scheduled_at is None else job.scheduled_at
            if job.adapter is not None:
                slots.add(job.adapter)
            budget -= self._add_to_step(step, job, tokens)
        self.waiting.extendleft(reversed(passed_over))
        self.deferred = len(passed_over)

    def _start_job(self, job: EngineJob, budget: int) -> int:
        """Allocate a waiting job's blocks, reusing cached ones; returns its tokens to compute in this step.

        0 if its prompt does not fit in the pool. Reused blocks are announced if the job reports them.
        """
        hits = self.pool.cached_prefix(job.chain)
        if job.report_reused and hits:
            self.pool.announce(job.chain, 0, len(hits))
        # vLLM starts a request only if its whole prompt fits (--scheduler-reserve-full-isl, on by default).
        if not self.pool.has_room_for(hits, self._blocks_for(len(job.chain.tokens)) - len(hits)):
            return 0
        self.pool.add_references(hits)
        job.table = hits
        job.stored = len(hits)
        job.computed = len(hits) * self.pool.block_size
        if not job.preemptions:
            job.cached_tokens = job.computed
        tokens = min(len(job.chain.tokens) - job.computed, budget)
        grown = self._grow_table(job, tokens)
        assert grown, "has_room_for was True"
        return tokens

    def _grow_table(self, job: EngineJob, tokens: int) -> bool:
        """Allocate blocks for `tokens` more tokens of `job` and cache the full ones; False if there is no room."""
        missing = self._blocks_for(job.computed + tokens) - len(job.table)
        if not self.pool.has_room_for((), missing):
            return False
        job.table += self.pool.allocate(missing)
        full = (job.computed + tokens) // self.pool.block_size
        self.pool.store(job.chain, job.table, job.stored, full)
        job.stored = max(job.stored, full)
        return True

    def _preempt_last(self) -> EngineJob:
        """Move the running job that started last to the head of the queue and release its blocks; returns it."""
        job = self.running.pop()
        self._release_blocks(job)
        job.computed = 0
        job.preemptions += 1
        self.waiting.appendleft(job)
        return job

    def _release_blocks(self, job: EngineJob) -> None:
        """Release the job's blocks to the pool; their content stays cached until they are allocated again."""
        self.pool.release(job.table)
        job.table = []
        job.stored = 0

    def _add_to_step(self, step: EngineStep, job: EngineJob, tokens: int) -> int:
        """Add a job's tokens to the step, and mark its adapter as used; returns the number of tokens.

        An adapter that has left the host memory is added to `step.reloads`.
        """
        step.work.append((job, tokens))
        if job.is_decoding:
            step.decoding += 1
        else:
            step.prefill_tokens += tokens
        if job.adapter is not None and self.host.use(job.adapter):
            step.reloads.append(job.adapter)
        return tokens

    def _set_duration(self, step: EngineStep) -> None:
        """Set the step's duration from its prefill tokens, decoding jobs and reloads."""
        pace = self.pace
        if step.prefill_tokens and pace.prefill_tokens_per_s:
            step.duration_s += step.prefill_tokens / pace.prefill_tokens_per_s
        if step.decoding and pace.decode_tokens_per_s:
            step.duration_s += 1 / pace.decode_tokens_per_s
        step.duration_s += len(step.reloads) * pace.load_s

    def _blocks_for(self, tokens: int) -> int:
        """Number of blocks for so many tokens."""
        return -(-tokens // self.pool.block_size)
