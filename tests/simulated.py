"""An engine on a simulated clock: the sim's batch, and its counters as vLLM 0.32 keeps its own.

The counters follow v1/metrics/stats.py: computed tokens at a prompt's first token, gaps at each token, the rest when a
request ends. Time is simulated.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from math import inf

from lorafleet.engine.metrics_page import EngineMetrics
from lorafleet.sim.blocks import BlockChain, BlockPool, ChainRoot
from lorafleet.sim.timing import EngineBatch, EngineJob, EngineLimits, EngineStep, FinishReason


class SimulatedEngine:
    """One engine, its clock `now` in seconds, and its counters at every whole second. Prompts share nothing.

    prefill  tokens per second
    token_s  seconds of one token
    """

    def __init__(self, *, prefill: float, token_s: float, max_num_seqs: int = 256, blocks: int = 100_000) -> None:
        pace = EngineLimits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=2048, max_loras=1, max_cpu_loras=1,
            prefill_tokens_per_s=prefill, decode_tokens_per_s=1 / token_s, load_s=0.0,
        )  # fmt: skip
        self.batch = EngineBatch(BlockPool(blocks, 32), pace)
        self.now = 0.0
        self.totals = dict.fromkeys(
            ["computed_tokens", "steps", "ended", "ended_prefill_tokens", "ended_prefill_seconds",
             "ended_output_tokens", "ended_seconds", "token_gaps", "gap_seconds", "first_tokens"], 0.0,
        )  # fmt: skip
        self.read_at = 1.0
        self._step: tuple[EngineStep, float] | None = None
        self._tokens = count()

    def ask(self, prompt_tokens: int, answer_tokens: int) -> EngineJob:
        """Submit a request now."""
        chain = BlockChain([next(self._tokens)] * prompt_tokens, ChainRoot(), 32)
        job = EngineJob(
            chain=chain,
            prompt_tokens=prompt_tokens,
            reply=[0] * answer_tokens,
            reply_finish_reason=FinishReason.LENGTH,
            arrived_at=self.now,
        )
        self.batch.add(job)
        return job

    @property
    def next_at(self) -> float:
        """End of the current step; infinite without requests."""
        if self._step is None:
            if not self.batch.has_work:
                return inf
            step = self.batch.begin_step(self.now)
            self._step = step, self.now + step.duration_s
        return self._step[1]

    def advance(self, until: float) -> tuple[list[EngineMetrics], Sequence[EngineJob]]:
        """Advance time, at most to the end of one step; returns the readings on the way and jobs with a token."""
        done_at = self.next_at
        to = min(until, done_at)
        readings = list(self._readings(to))
        self.now = to
        if self._step is None or done_at > until:
            return readings, ()
        step, self._step = self._step[0], None
        return readings, self._end_step(step, done_at)

    def _readings(self, until: float) -> Iterator[EngineMetrics]:
        while self.read_at <= until:
            yield EngineMetrics(at_s=self.read_at, running=len(self.batch.running), **self.totals)
            self.read_at += 1.0

    def _end_step(self, step: EngineStep, now: float) -> Sequence[EngineJob]:
        jobs, totals = self.batch.end_step(step, now), self.totals
        totals["steps"] += bool(jobs)
        for job in jobs:
            computed = job.prompt_tokens - job.cached_tokens
            assert job.first_token_at is not None
            assert job.scheduled_at is not None
            if job.produced == 1:
                totals["computed_tokens"] += computed
                totals["first_tokens"] += 1
            else:
                totals["token_gaps"] += 1
                totals["gap_seconds"] += job.gap_s
            if job.finish_reason is not None:
                totals["ended"] += 1
                totals["ended_prefill_tokens"] += computed
                totals["ended_prefill_seconds"] += job.first_token_at - job.scheduled_at
                totals["ended_output_tokens"] += job.produced
                totals["ended_seconds"] += now - job.scheduled_at
        return jobs
