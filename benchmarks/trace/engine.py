"""One vLLM engine: continuous batching, chunked prefill, prefix cache, adapter slots; fast enough for a whole trace.

Who runs in a step follows lorafleet/sim/timing.py (after vLLM 0.32 v1/core/sched/scheduler.py), and a test holds
the two together. Added are what a router's own formula does not know: attention's quadratic part, decode steps that
grow with the batch and its context, copies of adapters to the device, and loads of varying length. Steps in which
nothing but decoding happens, and in which no block is needed and nobody ends, are computed together in closed form.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from math import ceil, exp, sqrt
from random import Random

from benchmarks.trace.blocks import Blocks

NEVER = float("inf")
# By how much each adapter of a batch lengthens a step, by the batch's largest rank, to which kernels pad. The first
# three are defaults of inference-sim (f90a1e3a, defaults.yaml, `step_overhead_tiers`); the others go on by the same
# factor, a guess.
RANK_SHARES = {8: 0.02, 16: 0.035, 32: 0.06, 64: 0.1, 128: 0.17}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """An engine's limits and speeds. Seconds unless named otherwise; 0 means for free.

    By arithmetic for an 8B model (32 layers, width 4096, 128 KB of KV a token) on one 80 GB H100: 16 GFLOP a prompt
    token at 500 TFLOP/s, attention's 4 x 4096 x 32 FLOP for each token of context beside it at the same, and in a
    decode step 16 GB of weights and the batch's KV read at 3 TB/s, with 3 ms of overhead.
    """

    blocks: int = 750
    block_size: int = 512
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_loras: int = 8
    max_cpu_loras: int = 32
    prefill_s: float = 32e-6
    """One prompt token."""
    attention_s: float = 1.05e-9
    """One prompt token over one token of context."""
    decode_s: float = 0.008
    """A step in which somebody decodes."""
    decode_seq_s: float = 0.0001
    """Each request in it."""
    decode_context_s: float = 43e-9
    """Each token of context in it."""
    to_device_s: float = 0.02
    """An adapter from host memory to the device: rank 64 of an 8B model is 336 MB."""
    load_s: float = 0.5
    """Median of an adapter's way from disk to host memory, during which nothing else happens."""
    load_sigma: float = 0.26
    """Of the loads' log-normal spread: p90 1.4 and p99 1.9 times the median, as real ones have."""
    sizes: tuple[float, ...] = (1.0,)
    """Relative sizes of adapters, which adapters have in turn: factors of `to_device_s` and `load_s`."""
    ranks: tuple[int, ...] = ()
    """Ranks of adapters, which adapters have in turn; empty: adapters cost a step nothing."""

    def size_of(self, adapter: int) -> float:
        """Relative size of an adapter."""
        return self.sizes[adapter % len(self.sizes)]

    def step_factor(self, adapters: Collection[int]) -> float:
        """The factor by which these adapters lengthen a step: each adds a share, which the largest rank decides."""
        if not self.ranks or not adapters:
            return 1.0
        return 1 + RANK_SHARES[max(self.ranks[adapter % len(self.ranks)] for adapter in adapters)] * len(adapters)

    def at_speed(self, factor: float) -> "Hardware":
        """The same engine on hardware `factor` times as fast; loads do not depend on that."""
        return replace(
            self,
            prefill_s=self.prefill_s / factor,
            attention_s=self.attention_s / factor,
            decode_s=self.decode_s / factor,
            decode_seq_s=self.decode_seq_s / factor,
            decode_context_s=self.decode_context_s / factor,
        )


@dataclass(slots=True, eq=False)
class TraceJob:
    """One request at an engine. `keys` are its prompt's full blocks; blocks of its answer are nobody else's."""

    number: int
    keys: list[int]
    prompt_tokens: int
    output_tokens: int
    adapter: int | None

    table: list[int] = field(default_factory=list)
    computed: int = 0
    stored: int = 0
    produced: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    order: int = 0
    """Grows with each admission: the running jobs in this order."""
    ahead: int | None = None
    """While decoding: what `TraceEngine.steps` lacks to this job's computed tokens."""
    scheduled: float = -1.0
    first_token: float = -1.0
    last_token: float = -1.0
    load_s: float = 0.0
    """What reading its adapter from disk cost, if it had to be."""
    is_over: bool = False

    @property
    def tokens(self) -> int:
        """Prompt and answer so far."""
        return self.prompt_tokens + self.produced

    def name_blocks(self, blocks: int) -> None:
        """Give the first `blocks` blocks names; those that the answer fills are unique."""
        self.keys += [-(self.number * 4096 + i) - 1 for i in range(len(self.keys), blocks)]


class Waiting:
    """Jobs in line, in order, and in order among those whose adapter may run."""

    def __init__(self) -> None:
        self.lines: dict[int | None, deque[tuple[int, TraceJob]]] = {}
        self.count = 0
        self._front = self._back = 0

    def __len__(self) -> int:
        return self.count

    def append(self, job: TraceJob) -> None:
        self._back += 1
        self.lines.setdefault(job.adapter, deque()).append((self._back, job))
        self.count += 1

    def put_back(self, job: TraceJob) -> None:
        """In front of everybody."""
        self._front -= 1
        self.lines.setdefault(job.adapter, deque()).appendleft((self._front, job))
        self.count += 1

    def head(self, slots: set[int | None] | None) -> TraceJob | None:
        """The first whose adapter is in `slots`; None for slots: the first of all."""
        if slots is None:
            lines = list(self.lines.values())
        else:
            lines = [line for adapter in (*slots, None) if (line := self.lines.get(adapter))]
        return min(lines, key=lambda line: line[0][0])[0][1] if lines else None

    def pop(self, job: TraceJob) -> None:
        """Take out the head of an adapter's line."""
        line = self.lines[job.adapter]
        line.popleft()
        self.count -= 1
        if not line:
            del self.lines[job.adapter]

    def remove(self, job: TraceJob) -> None:
        """Take out any job."""
        line = self.lines[job.adapter]
        for i, (_, waiting) in enumerate(line):
            if waiting is job:
                del line[i]
                break
        self.count -= 1
        if not line:
            del self.lines[job.adapter]


@dataclass(slots=True)
class Counters:
    """What the engine's metrics say since its start; `ended_*` are sums over requests that have ended."""

    computed_tokens: int = 0
    """Prompt tokens that were not cached, counted when their prefill ends."""
    steps: int = 0
    """Those that gave tokens."""
    first_tokens: int = 0
    token_gaps: int = 0
    """Between two tokens of an answer, and the sum of their seconds."""
    gap_seconds: float = 0.0
    ended: int = 0
    ended_prefill_tokens: int = 0
    ended_prefill_seconds: float = 0.0
    ended_output_tokens: int = 0
    ended_seconds: float = 0.0
    """From scheduled to the last token."""
    loads: int = 0
    load_seconds: float = 0.0
    busy_seconds: float = 0.0
    preemptions: int = 0


class TraceEngine:
    """Call `add` when a request comes; whenever `due` has come, `finish` says who got a first token or ended."""

    def __init__(self, hardware: Hardware, rng: Random) -> None:
        self.hardware = hardware
        self.rng = rng
        self.blocks = Blocks(hardware.blocks)
        self.running: dict[TraceJob, None] = {}
        self.waiting = Waiting()
        self.host = OrderedDict[int, None]()
        self.device = OrderedDict[int, None]()
        self.counters = Counters()
        self.gaps: dict[int, int] = {}
        """Milliseconds between two tokens of an answer, and how often that happened."""
        self.steps = 0
        """Steps done so far."""
        self.due = NEVER
        """When the step, or the stretch of decode steps, that is under way ends."""
        self.durations: list[float] = []
        """Of the steps, a stretch as one; kept only where `keeps_durations`."""
        self.keeps_durations = False
        self._began = 0.0
        self._stretch = 0
        self._chunks: list[tuple[TraceJob, int]] = []
        self._decoding = 0
        self._context = 0
        self._each_s = self._growth_s = 0.0
        self._ends: list[tuple[int, int, TraceJob]] = []
        self._grows: list[tuple[int, int, TraceJob]] = []
        self._admissions = 0
        self._slots: dict[int | None, int] = {}

    def add(self, job: TraceJob, now: float) -> None:
        """Queue `job`; a stretch of decode steps under way is cut after the step that `now` falls into.

        raises  ValueError when it can never fit
        """
        size = self.hardware.blocks * self.hardware.block_size
        if job.tokens + job.output_tokens > size:
            raise ValueError(f"{job.prompt_tokens} + {job.output_tokens} tokens never fit into a cache of {size}")
        self.waiting.append(job)
        if self.due == NEVER:
            self._begin(now)
        elif self._stretch > 1:
            self._cut(now)

    def abort(self, job: TraceJob, now: float) -> None:
        """Its client has left; its full blocks stay cached. Harmless when it is over."""
        if job.is_over:
            return
        job.is_over = True
        if job in self.running:
            if self._stretch > 1:
                self._cut(now)
            # The step under way has it still; what it computes is lost.
            self._settle(job)
            self._leave(job)
            self._chunks = [(other, tokens) for other, tokens in self._chunks if other is not job]
        else:
            self.waiting.remove(job)

    def die(self, now: float) -> list[TraceJob]:
        """Lose all jobs, which are returned, all cached blocks, and all adapters but those on disk."""
        jobs = [*self.running, *(job for line in self.waiting.lines.values() for _, job in line)]
        for job in jobs:
            self.abort(job, now)
        self.blocks.clear()
        self.host.clear()
        self.device.clear()
        self.due, self._stretch, self._chunks = NEVER, 0, []
        return jobs

    def finish(self) -> list[TraceJob]:
        """The step under way is done at `due`: the jobs with a first token or that ended, and the next step begins."""
        now = self.due
        steps = self._stretch
        elapsed = now - self._began
        self.counters.busy_seconds += elapsed
        if self.keeps_durations:
            self.durations.append(elapsed)
        if self._decoding:
            self.counters.token_gaps += steps * self._decoding
            self.counters.gap_seconds += elapsed * self._decoding
            gap = int(elapsed / steps * 1000)
            self.gaps[gap] = self.gaps.get(gap, 0) + steps * self._decoding
            self._context += steps * self._decoding
        self.steps += steps
        gave_tokens = steps if self._decoding else 0
        told = []
        ended = []
        for job, tokens in self._chunks:
            job.computed += tokens
            if job.computed >= job.tokens:
                self._token(job, now)
                gave_tokens = steps
                told.append(job)
                if job.produced == job.output_tokens:
                    ended.append(job)
                else:
                    self._decodes(job)
        while self._ends and self._ends[0][0] < self.steps:
            _, order, job = heapq.heappop(self._ends)
            if job.ahead is not None and job.order == order and not job.is_over:
                self._settle(job)
                job.produced = job.output_tokens
                job.last_token = now
                ended.append(job)
                told.append(job)
        self.counters.steps += gave_tokens
        ended.sort(key=lambda job: job.order)
        for job in ended:
            job.is_over = True
            self._leave(job)
            self._count(job)
        self.due = NEVER
        if self.running or self.waiting.count:
            self._begin(now)
        return told

    def read(self, now: float) -> Counters:
        """The counters as they stand at `now`, in the middle of a stretch as well."""
        if self._stretch < 2 or self.due == NEVER:
            return self.counters
        steps = min(self._stretch, int(self._steps_by(now)))
        counters = replace(self.counters)
        counters.steps += steps
        counters.token_gaps += steps * self._decoding
        counters.gap_seconds += self._stretch_s(steps) * self._decoding
        return counters

    @property
    def kv_usage(self) -> float:
        """Share of the blocks in use by requests."""
        return self.blocks.usage

    # --- a step's beginning ------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        self._began = now
        hardware = self.hardware
        extra_s = 0.0
        decodes_are_whole = self._grow_decodes()
        chunks: list[tuple[TraceJob, int]] = []
        self._chunks = chunks
        budget = hardware.max_num_batched_tokens - self._decoding
        partial = next(reversed(self.running)) if len(self.running) > self._decoding else None
        if partial is not None and budget > 0:
            tokens = min(partial.tokens - partial.computed, budget)
            if self._grow_last(partial, tokens):
                chunks.append((partial, tokens))
                budget -= tokens
            else:
                decodes_are_whole = False
        for job in self.running:
            if job.adapter is not None:  # on the device while it runs, and by that the last to go
                self.host.move_to_end(job.adapter)
                self.device.move_to_end(job.adapter)
        if decodes_are_whole and self.waiting.count:
            extra_s = self._admit(now, budget)
        # After a preemption nobody is let in, but in the next step somebody may be.
        self._price(extra_s, may_run_on=decodes_are_whole)

    def _price(self, extra_s: float, *, may_run_on: bool) -> None:
        hardware = self.hardware
        decoding = self._decoding
        step_s = extra_s
        late_decoders = 0
        factor = hardware.step_factor([adapter for adapter in self._slots if adapter is not None])
        for job, tokens in self._chunks:
            if job.computed >= job.prompt_tokens and job.produced:
                late_decoders += 1  # the tail of an answer computed again after a preemption
                continue
            after = job.computed + tokens
            step_s += tokens * hardware.prefill_s * factor
            step_s += hardware.attention_s * (after * after - job.computed * job.computed) / 2 * factor
        each_s = 0.0
        if decoding or late_decoders:
            each_s = (
                hardware.decode_s
                + hardware.decode_seq_s * (decoding + late_decoders)
                + hardware.decode_context_s * self._context
            ) * factor
        self._stretch = 1
        if not self._chunks and not extra_s and decoding and may_run_on:
            self._each_s, self._growth_s = each_s, hardware.decode_context_s * decoding * factor
            self._stretch = self._steps_alone()
            self.due = self._began + self._stretch_s(self._stretch)
            return
        self.due = self._began + step_s + each_s

    def _steps_alone(self) -> int:
        """How many decode steps go by until somebody ends or needs a block."""
        until = self._ends[0][0] + 1
        while self._ends[0][2].order != self._ends[0][1] or self._ends[0][2].is_over:
            heapq.heappop(self._ends)
            until = self._ends[0][0] + 1
        if self._grows and self._grows[0][0] < until:
            until = self._grows[0][0]
        return max(1, until - self.steps)

    def _stretch_s(self, steps: int) -> float:
        return steps * self._each_s + self._growth_s * steps * (steps - 1) / 2

    def _cut(self, now: float) -> None:
        """End the stretch after the step that `now` falls into."""
        self._stretch = min(self._stretch, max(1, ceil(self._steps_by(now))))
        self.due = self._began + self._stretch_s(self._stretch)

    def _steps_by(self, now: float) -> float:
        """How many steps of the stretch are done at `now`, the one under way as a fraction."""
        past, growth_s = now - self._began, self._growth_s
        linear_s = self._each_s - growth_s / 2
        if growth_s:
            return (sqrt(linear_s * linear_s + 2 * growth_s * past) - linear_s) / growth_s
        return past / linear_s if linear_s else 1.0

    def _grow_decodes(self) -> bool:
        """Blocks for the decodes that need one now; False when somebody had to be preempted for it."""
        whole = True
        grows = self._grows
        while grows and grows[0][0] <= self.steps:
            _, order, job = heapq.heappop(grows)
            if job.order != order or job.is_over or job.ahead is None:
                continue
            self._settle(job)
            while not self.blocks.room_for((), 1):
                whole = False
                if self._preempt_last() is job:
                    break
            else:
                job.table += self.blocks.allocate(1)
                heapq.heappush(grows, (self.steps + self.hardware.block_size, order, job))
        return whole

    def _grow_last(self, job: TraceJob, tokens: int) -> bool:
        """Room for `tokens` more of the one prompt under way; False when it had to be preempted itself."""
        if self._grow(job, tokens):
            return True
        self._preempt_last()
        return False

    def _grow(self, job: TraceJob, tokens: int) -> bool:
        after = job.computed + tokens
        size = self.hardware.block_size
        missing = -(-after // size) - len(job.table)
        if missing > 0:
            if not self.blocks.room_for((), missing):
                return False
            job.table += self.blocks.allocate(missing)
        self._store(job, after // size)
        return True

    def _store(self, job: TraceJob, full: int) -> None:
        if full > job.stored:
            if full > len(job.keys):
                job.name_blocks(full)
            self.blocks.store(job.keys[job.stored : full], job.table[job.stored : full])
            job.stored = full

    def _admit(self, now: float, budget: int) -> float:
        """Jobs from the line into this step, within every limit; the seconds that adapters take."""
        hardware = self.hardware
        extra_s = 0.0
        slots = self._slots
        while self.waiting.count and budget > 0 and len(self.running) < hardware.max_num_seqs:
            is_full = len(slots) - (None in slots) >= hardware.max_loras
            job = self.waiting.head(set(slots) if is_full else None)
            if job is None:
                break
            tokens = self._start(job, budget)
            if not tokens:
                break
            self.waiting.pop(job)
            self._admissions += 1
            job.order = self._admissions
            self.running[job] = None
            slots[job.adapter] = slots.get(job.adapter, 0) + 1
            if job.scheduled < 0:
                job.scheduled = now
            if job.adapter is not None:
                extra_s += self._touch(job.adapter, job)
            self._chunks.append((job, tokens))
            budget -= tokens
        return extra_s

    def _start(self, job: TraceJob, budget: int) -> int:
        """Tokens of `job` that go into this step, its cached prefix left out; 0 when the pool has no room for all."""
        size = self.hardware.block_size
        hits = self.blocks.match(job.keys, (job.tokens - 1) // size)
        # vLLM lets a request in only if its whole prompt fits (--scheduler-reserve-full-isl, on by default).
        if not self.blocks.room_for(hits, -(-job.tokens // size) - len(hits)):
            return 0
        self.blocks.hold(hits)
        job.table = hits
        job.stored = len(hits)
        job.computed = len(hits) * size
        if not job.preemptions:
            job.cached_tokens = job.computed
        tokens = min(job.tokens - job.computed, budget)
        grown = self._grow(job, tokens)
        assert grown, "room_for has promised it"
        return tokens

    def _touch(self, adapter: int, job: TraceJob) -> float:
        """Seconds until `adapter` is on the device; now it is the most recently used."""
        hardware = self.hardware
        took_s, size = 0.0, hardware.size_of(adapter)
        if adapter in self.host:
            self.host.move_to_end(adapter)
        else:
            if len(self.host) >= hardware.max_cpu_loras:
                self.host.popitem(last=False)
            self.host[adapter] = None
            took_s = hardware.load_s * size
            if took_s and hardware.load_sigma:
                took_s *= exp(hardware.load_sigma * self.rng.gauss(0, 1))
            self.counters.loads += 1
            self.counters.load_seconds += took_s
            job.load_s += took_s
        if adapter in self.device:
            self.device.move_to_end(adapter)
            return took_s
        if len(self.device) >= hardware.max_loras:
            self.device.popitem(last=False)
        self.device[adapter] = None
        return took_s + hardware.to_device_s * size

    # --- a job's changes of state ------------------------------------------------------------------------------------

    def _token(self, job: TraceJob, now: float) -> None:
        """The token that a prompt's last chunk gives; after a preemption it is one more of the answer."""
        if job.first_token < 0:
            job.first_token = now
            self.counters.computed_tokens += job.prompt_tokens - job.cached_tokens
            self.counters.first_tokens += 1
        else:
            gap = int((now - job.last_token) * 1000)
            self.gaps[gap] = self.gaps.get(gap, 0) + 1
        job.last_token = now
        job.produced += 1

    def _decodes(self, job: TraceJob) -> None:
        """From the next step on it gets one token each."""
        job.ahead = job.computed - self.steps
        self._decoding += 1
        self._context += job.computed
        size = self.hardware.block_size
        heapq.heappush(self._ends, (self.steps + job.output_tokens - job.produced - 1, job.order, job))
        to_go = len(job.table) * size - job.computed
        heapq.heappush(self._grows, (self.steps + to_go, job.order, job))

    def _settle(self, job: TraceJob) -> None:
        """Write down how far a decoding job has come."""
        if job.ahead is not None:
            computed = self.steps + job.ahead
            job.produced += computed - job.computed
            job.computed = computed
            self._store(job, computed // self.hardware.block_size)

    def _leave(self, job: TraceJob) -> None:
        """Off the running ones, settled before; its blocks may be used again."""
        del self.running[job]
        left = self._slots[job.adapter] - 1
        if left:
            self._slots[job.adapter] = left
        else:
            del self._slots[job.adapter]
        if job.ahead is not None:
            self._decoding -= 1
            self._context -= job.computed
            job.ahead = None
        self.blocks.release(job.table)
        job.table = []
        job.stored = 0

    def _preempt_last(self) -> TraceJob:
        job = next(reversed(self.running))
        self._settle(job)
        if job.ahead is not None:
            job.last_token = self._began
        self._leave(job)
        job.computed = 0
        job.order = 0
        job.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.put_back(job)
        return job

    def _count(self, job: TraceJob) -> None:
        counters = self.counters
        counters.ended += 1
        counters.ended_prefill_tokens += job.prompt_tokens - job.cached_tokens
        counters.ended_prefill_seconds += job.first_token - job.scheduled
        counters.ended_output_tokens += job.output_tokens
        counters.ended_seconds += job.last_token - job.scheduled
