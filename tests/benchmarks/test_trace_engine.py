"""The trace benchmark's engine equals the sim's batch step by step, apart from its additions."""

from dataclasses import replace
from random import Random

import pytest

from benchmarks.trace.engine import NEVER, Hardware, TraceEngine, TraceJob
from lorafleet.sim.blocks import BlockChain, BlockPool, ChainRoot
from lorafleet.sim.timing import EngineBatch, EngineJob, EngineLimits, FinishReason

BLOCK = 4
PLAIN = Hardware(
    blocks=40, block_size=BLOCK, max_num_seqs=5, max_num_batched_tokens=24, max_loras=2, max_cpu_loras=3,
    prefill_s=0.01, attention_s=0.0, decode_s=0.1, decode_seq_s=0.0, decode_context_s=0.0,
    to_device_s=0.0, load_s=1.0, load_sigma=0.0,
)  # fmt: skip


def draw(rng: Random, jobs: int) -> list[tuple[float, int, list[int], int]]:
    """(arrival, adapter, prompt's tokens, answer's length) from a small forest of shared prefixes."""
    stems = [[tree] * BLOCK * rng.randrange(1, 8) for tree in range(4)]
    drawn = []
    now = 0.0
    for number in range(jobs):
        now += rng.expovariate(rng.choice((0.3, 3.0)))
        prompt = list(rng.choice(stems)) + [1000 + number] * rng.randrange(0, 9)
        drawn.append((now, rng.randrange(6), prompt, rng.randrange(1, 30)))
    return drawn


def by_batch(drawn, hardware):
    """The sim's batch, step by step."""
    pace = EngineLimits(
        max_num_seqs=hardware.max_num_seqs, max_num_batched_tokens=hardware.max_num_batched_tokens,
        max_loras=hardware.max_loras, max_cpu_loras=hardware.max_cpu_loras, load_s=hardware.load_s,
        prefill_tokens_per_s=1 / hardware.prefill_s, decode_tokens_per_s=1 / hardware.decode_s,
    )  # fmt: skip
    batch = EngineBatch(BlockPool(hardware.blocks + 1, BLOCK), pace)
    jobs = []
    for arrived_at, adapter, prompt, output in drawn:
        name = str(adapter) if adapter else None
        chain = BlockChain(list(prompt), ChainRoot(lora_name=name), BLOCK)
        reply = [-1 - len(jobs)] * output  # unshared
        job = EngineJob(
            chain=chain,
            prompt_tokens=len(prompt),
            reply=reply,
            reply_finish_reason=FinishReason.LENGTH,
            arrived_at=arrived_at,
        )
        job.adapter = adapter or None
        jobs.append(job)
    line, now, loads = list(jobs), 0.0, 0
    while line or batch.has_work:
        if not batch.has_work:
            now = max(now, line[0].arrived_at)
        while line and line[0].arrived_at <= now:
            batch.add(line.pop(0))
        step = batch.begin_step(now)
        loads += len(step.reloads)
        now += step.duration_s
        batch.end_step(step, now)
    return jobs, batch, loads


def by_engine(drawn, hardware):
    """The fast engine, in stretches of steps."""
    engine = TraceEngine(hardware, Random(0))
    jobs = []
    names: dict[tuple[object, ...], int] = {}
    for number, (_, adapter, prompt, output) in enumerate(drawn):
        full = range(BLOCK, len(prompt) + 1, BLOCK)
        keys = [names.setdefault((adapter, *prompt[:end]), len(names)) for end in full]
        jobs.append(TraceJob(number, keys, len(prompt), output, adapter or None))
    held = set()
    line = [(arrived_at, job) for (arrived_at, *_), job in zip(drawn, jobs, strict=True)]
    while line or engine.due < NEVER:
        if line and line[0][0] <= engine.due:
            arrived_at, job = line.pop(0)
            engine.add(job, arrived_at)
        else:
            engine.finish()
        for key, is_new in engine.blocks.take_changes():
            assert (key in held) is not is_new, "a change that changes nothing"
            held ^= {key}
    assert held == set(engine.blocks.first)
    return jobs, engine


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("blocks", [17, 40])
def test_the_fast_engine_does_what_the_sims_batch_does(seed, blocks):
    hardware = replace(PLAIN, blocks=blocks)
    drawn = draw(Random(seed), 40)
    slow, batch, loads = by_batch(drawn, hardware)
    fast, engine = by_engine(drawn, hardware)
    for one, other in zip(slow, fast, strict=True):
        assert other.scheduled == pytest.approx(one.scheduled_at)
        assert other.first_token == pytest.approx(one.first_token_at)
        assert other.last_token == pytest.approx(one.last_token_at)
        assert (other.cached_tokens, other.preemptions) == (one.cached_tokens, one.preemptions)
    assert engine.counters.loads == loads
    assert len(engine.blocks.first) == len(batch.pool.copies)
    assert engine.kv_usage == 0.0


def test_the_random_workloads_preempt_share_blocks_and_evict_adapters():
    counted = [by_engine(draw(Random(seed), 40), replace(PLAIN, blocks=17)) for seed in range(10)]
    assert sum(engine.counters.preemptions for _, engine in counted) > 10
    assert sum(engine.counters.loads for _, engine in counted) >= 30
    assert sum(job.cached_tokens for jobs, _ in counted for job in jobs) > 100
