"""Who runs in an engine step, and how long it takes: continuous batching with chunked prefill. No clock, no socket.

A step costs `prefill tokens / prefill rate`, plus one token's time (`1 / decode rate`) when somebody decodes, plus
`load_s` for each adapter that must be read again. So a prefill slows the decodes beside it, decodes ride along with
each other for free, and a load stalls everybody. Which request gets what follows vLLM 0.32 v1/core/sched/scheduler.py.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from workers.engines.sim.blocks import BlockChain, BlockPool
from workers.engines.sim.events import KVEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The engine's limits and speeds. Rates in tokens per second, 0 means for free."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    max_cpu_loras: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Of one request."""
    load_s: float
    """One adapter from disk into host memory, during which nothing else happens."""


class FinishReason(StrEnum):
    """Why a request has no more tokens to come; vLLM's `finished_reason` labels."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False, kw_only=True)
class EngineJob:
    """One prompt being answered with `reply`, one token a step. Times are those given to `begin` and `end`."""

    chain: BlockChain
    prompt_tokens: int
    reply: Sequence[int]
    reply_ended: FinishReason
    arrived: float
    adapter: Hashable = None
    """Equal for requests that may share a device slot; None is the base model."""
    report_reused: bool = False
    """Announce blocks found in the cache as well (vLLM's kv_cache_report_mode full)."""

    table: list[int] = field(default_factory=list)
    computed: int = 0
    stored: int = 0
    produced: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    gap_s: float = 0.0
    """Between its last token and the one before."""
    ended: FinishReason | None = None

    @property
    def is_decoding(self) -> bool:
        """Its whole prompt is in the cache and one token at a time remains."""
        return self.computed >= self.prompt_tokens and self.produced > 0


@dataclass(slots=True)
class EngineStep:
    """What one pass over the model does."""

    work: list[tuple[EngineJob, int]] = field(default_factory=list)
    """Requests and how many tokens of each are computed."""
    prefill_tokens: int = 0
    decoding: int = 0
    reloads: list[Hashable] = field(default_factory=list)
    """Adapters that had fallen out of host memory and are read from disk within the step."""
    duration_s: float = 0.0
    events: list[KVEvent] = field(default_factory=list)


class HostAdapters:
    """Adapters in host memory, least recently used first out. Unloading a name leaves its weights here: a ghost."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: OrderedDict[Hashable, None] = OrderedDict()

    def use(self, adapter: Hashable) -> bool:
        """Make `adapter` the most recently used; True when it was absent, so that it must be read from disk."""
        missed = adapter not in self.held
        if missed and len(self.held) >= self.capacity:
            self.held.popitem(last=False)
        self.held[adapter] = None
        self.held.move_to_end(adapter)
        return missed


class EngineBatch:
    """All requests of one engine. Call `begin`, let `duration_s` pass, call `end`."""

    def __init__(self, pool: BlockPool, pace: EngineLimits) -> None:
        self.pool = pool
        self.pace = pace
        self.host = HostAdapters(pace.max_cpu_loras)
        self.running: list[EngineJob] = []
        self.waiting: deque[EngineJob] = deque()
        self.deferred = 0
        """How many of the waiting were passed over in the last step for want of an adapter slot."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.waiting)

    def add(self, job: EngineJob) -> None:
        """Queue `job` behind the others."""
        self.waiting.append(job)

    def abort(self, job: EngineJob, ended: FinishReason = FinishReason.ABORT) -> None:
        """Drop `job` wherever it is; its full blocks stay cached. Harmless when it has ended."""
        if job.ended is not None:
            return
        job.ended = ended
        if job in self.running:
            self.running.remove(job)
        else:
            self.waiting.remove(job)
        self._give_back(job)

    def begin(self, now: float) -> EngineStep:
        """Schedule one step: running requests first, then the waiting in order, within every limit."""
        step = EngineStep()
        budget = self.pace.max_num_batched_tokens
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            job = self.running[index]
            tokens = min(len(job.chain.tokens) - job.computed, budget)
            while not self._grow(job, tokens):
                preempted = True
                if self._preempt_last() is job:
                    break
            if index >= len(self.running):
                break
            budget -= self._schedule(step, job, tokens)
            index += 1
        self.deferred = 0
        if not preempted:
            self._admit(step, budget, now)
        self._price(step)
        step.events = self.pool.take_events()
        return step

    def end(self, step: EngineStep, now: float) -> list[EngineJob]:
        """Count the step as done; the requests that got a token, some of which have `ended` with it."""
        told = []
        for job, tokens in step.work:
            if job.ended is not None:  # aborted meanwhile
                continue
            job.computed += tokens
            if job.computed < len(job.chain.tokens):
                continue
            job.chain.tokens.append(job.reply[job.produced])
            job.produced += 1
            job.first_token = now if job.first_token is None else job.first_token
            job.gap_s = 0.0 if job.last_token is None else now - job.last_token
            job.last_token = now
            told.append(job)
            if job.produced == len(job.reply):
                job.ended = job.reply_ended
                self.running.remove(job)
                self._give_back(job)
        return told

    def _admit(self, step: EngineStep, budget: int, now: float) -> None:
        slots = {job.adapter for job, _ in step.work} - {None}
        passed_over: list[EngineJob] = []
        while self.waiting and budget > 0 and len(self.running) < self.pace.max_num_seqs:
            job = self.waiting[0]
            if job.adapter is not None and job.adapter not in slots and len(slots) >= self.pace.max_loras:
                passed_over.append(self.waiting.popleft())
                continue
            tokens = self._start(job, budget)
            if not tokens:
                break
            self.running.append(self.waiting.popleft())
            job.scheduled = now if job.scheduled is None else job.scheduled
            if job.adapter is not None:
                slots.add(job.adapter)
            budget -= self._schedule(step, job, tokens)
        self.waiting.extendleft(reversed(passed_over))
        self.deferred = len(passed_over)

    def _start(self, job: EngineJob, budget: int) -> int:
        """Tokens of `job` that go into this step, its cached prefix left out; 0 when the pool has no room for all."""
        hits = self.pool.match(job.chain)
        if job.report_reused and hits:
            self.pool.announce(job.chain, 0, len(hits))
        # vLLM lets a request in only if its whole prompt fits (--scheduler-reserve-full-isl, on by default).
        if not self.pool.room_for(hits, self._blocks(len(job.chain.tokens)) - len(hits)):
            return 0
        self.pool.hold(hits)
        job.table = hits
        job.stored = len(hits)
        job.computed = len(hits) * self.pool.block_size
        if not job.preemptions:
            job.cached_tokens = job.computed
        tokens = min(len(job.chain.tokens) - job.computed, budget)
        grown = self._grow(job, tokens)
        assert grown, "room_for has promised it"
        return tokens

    def _grow(self, job: EngineJob, tokens: int) -> bool:
        """Room for `tokens` more of `job`; what they fill is cached at once, so that the next request finds it."""
        missing = self._blocks(job.computed + tokens) - len(job.table)
        if not self.pool.room_for((), missing):
            return False
        job.table += self.pool.allocate(missing)
        full = (job.computed + tokens) // self.pool.block_size
        self.pool.store(job.chain, job.table, job.stored, full)
        job.stored = max(job.stored, full)
        return True

    def _preempt_last(self) -> EngineJob:
        job = self.running.pop()
        self._give_back(job)
        job.computed = 0
        job.preemptions += 1
        self.waiting.appendleft(job)
        return job

    def _give_back(self, job: EngineJob) -> None:
        self.pool.release(job.table)
        job.table = []
        job.stored = 0

    def _schedule(self, step: EngineStep, job: EngineJob, tokens: int) -> int:
        step.work.append((job, tokens))
        if job.is_decoding:
            step.decoding += 1
        else:
            step.prefill_tokens += tokens
        if job.adapter is not None and self.host.use(job.adapter):
            step.reloads.append(job.adapter)
        return tokens

    def _price(self, step: EngineStep) -> None:
        pace = self.pace
        if step.prefill_tokens and pace.prefill_tokens_per_s:
            step.duration_s += step.prefill_tokens / pace.prefill_tokens_per_s
        if step.decoding and pace.decode_tokens_per_s:
            step.duration_s += 1 / pace.decode_tokens_per_s
        step.duration_s += len(step.reloads) * pace.load_s

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)
