"""The sim's batch: time, tokens, slots and memory. Time is an argument."""

from collections.abc import Iterable
from random import Random

import pytest

from lorafleet.sim.blocks import BlockChain, BlockPool, ChainRoot
from lorafleet.sim.events import BlockRemoved, BlockStored
from lorafleet.sim.timing import EngineBatch, EngineJob, EngineLimits, EngineStep, FinishReason, HostAdapters

BLOCK = 4
TOKEN_S = 0.1  # one decode step
PREFILL_S = 0.01  # one prompt token


def make_batch(blocks: int = 100, **changes: float) -> EngineBatch:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_loras": 2, "max_cpu_loras": 3}
    rates = {"prefill_tokens_per_s": 1 / PREFILL_S, "decode_tokens_per_s": 1 / TOKEN_S, "load_s": 5.0}
    return EngineBatch(BlockPool(blocks + 1, BLOCK), EngineLimits(**(limits | rates | changes)))  # type: ignore[arg-type]


def make_job(
    prompt: Iterable[int], output: int = 3, *, adapter: str | None = None, arrived_at: float = 0.0
) -> EngineJob:
    tokens = list(prompt)
    return EngineJob(
        chain=BlockChain(tokens, ChainRoot(lora_name=adapter, lora_path=adapter), BLOCK),
        prompt_tokens=len(tokens),
        reply=[9] * output,
        reply_finish_reason=FinishReason.LENGTH,
        arrived_at=arrived_at,
        adapter=adapter,
    )


def run(batch: EngineBatch, *, now: float = 0.0, steps: int = 1000) -> list[EngineStep]:
    """Run steps until all requests have ended."""
    done: list[EngineStep] = []
    while batch.has_work:
        step = batch.begin_step(now)
        assert step.work, "a step did nothing though requests are there"
        assert len(done) < steps, "the batch does not end"
        now += step.duration_s
        batch.end_step(step, now)
        done.append(step)
    return done


def test_long_prompt_is_chunked_and_its_first_token_follows_the_last_chunk() -> None:
    batch = make_batch()
    job = make_job(range(40), output=2)
    batch.add(job)
    steps = run(batch)
    assert [step.prefill_tokens for step in steps] == [16, 16, 8, 0]
    assert job.first_token_at == pytest.approx(40 * PREFILL_S)
    assert job.last_token_at == pytest.approx(40 * PREFILL_S + TOKEN_S)
    assert (job.finish_reason, job.produced) == (FinishReason.LENGTH, 2)


def test_prefill_slows_a_concurrent_decode() -> None:
    batch = make_batch()
    batch.add(make_job(range(4), output=3))
    first = batch.begin_step(0.0)
    batch.end_step(first, 0.0)
    alone = batch.begin_step(0.0).duration_s
    batch.add(make_job(range(100, 112)))
    beside = batch.begin_step(0.0)
    assert alone == pytest.approx(TOKEN_S)
    assert (beside.decoding, beside.prefill_tokens) == (1, 12)
    assert beside.duration_s == pytest.approx(TOKEN_S + 12 * PREFILL_S)


def test_cached_prefix_costs_nothing() -> None:
    batch = make_batch()
    batch.add(make_job(range(9), output=1))
    run(batch)
    job = make_job(range(9), output=1)
    batch.add(job)
    [step] = run(batch)
    assert (job.cached_tokens, step.prefill_tokens) == (8, 1)


def test_no_more_requests_run_than_max_num_seqs() -> None:
    batch = make_batch(max_num_seqs=2)
    for start in range(3):
        batch.add(make_job([start * 10], output=2))
    step = batch.begin_step(0.0)
    assert (len(step.work), len(batch.running), len(batch.waiting)) == (2, 2, 1)


def test_request_without_an_adapter_slot_is_overtaken() -> None:
    batch = make_batch(max_loras=2)
    jobs = [make_job([n], adapter=name) for n, name in enumerate(["a", "b", "c", "a", None])]
    for job in jobs:
        batch.add(job)
    step = batch.begin_step(0.0)
    assert [job for job, _ in step.work] == [jobs[0], jobs[1], jobs[3], jobs[4]]
    assert (list(batch.waiting), batch.deferred) == ([jobs[2]], 1)
    run(batch)
    assert jobs[2].finish_reason is FinishReason.LENGTH


def test_adapter_dropped_from_host_memory_is_read_again_in_the_step() -> None:
    batch = make_batch(max_cpu_loras=2)
    assert [batch.host.use(name) for name in ("a", "b")] == [True, True]
    batch.add(make_job([1], output=1, adapter="a"))
    [hot] = run(batch)
    batch.host.use("c")  # drops b, the least recently used
    batch.add(make_job([2], output=1, adapter="b"))
    [cold] = run(batch)
    assert (hot.reloads, cold.reloads) == ([], ["b"])
    assert cold.duration_s == pytest.approx(hot.duration_s + 5.0)


def test_unloaded_adapter_stays_in_host_memory_as_a_ghost() -> None:
    host = HostAdapters(2)
    host.use("ghost")
    host.use("live")
    host.use("new")
    assert list(host.lru) == ["live", "new"]
    assert host.use("ghost")


def test_abort_during_a_step_frees_the_blocks_at_once() -> None:
    batch = make_batch()
    job, waiting = make_job(range(8)), make_job(range(50, 54))
    batch.add(job)
    step = batch.begin_step(0.0)
    batch.add(waiting)
    assert batch.pool.usage > 0
    batch.abort(job)
    batch.abort(waiting)
    assert batch.pool.usage == 0
    assert batch.end_step(step, 1.0) == []
    assert not batch.has_work
    assert (job.finish_reason, job.produced) == (FinishReason.ABORT, 0)


def test_youngest_request_is_preempted_without_memory_and_still_finishes() -> None:
    batch = make_batch(blocks=6)
    old, young = make_job(range(8), output=10), make_job(range(20, 28), output=10)
    batch.add(old)
    batch.add(young)
    run(batch)
    assert (old.preemptions, old.produced) == (0, 10)
    assert young.preemptions > 0
    assert young.produced == 10


def test_block_event_is_sent_when_its_last_token_is_computed() -> None:
    batch = make_batch()
    job = make_job(range(6), output=4)
    batch.add(job)
    stored = []
    for step in run(batch):
        assert not any(isinstance(event, BlockRemoved) for event in step.events)
        stored.append([event.token_ids for event in step.events if isinstance(event, BlockStored)])
    # 6 prompt tokens fill one block; the 7th and 8th are generated and computed in the two steps that follow.
    assert stored == [[[0, 1, 2, 3]], [], [[4, 5, 9, 9]], []]


@pytest.mark.parametrize("seed", range(20))
def test_all_limits_hold_and_all_requests_end_under_random_load(seed: int) -> None:
    rng = Random(seed)
    batch = make_batch(blocks=20)
    jobs = []
    now = 0.0
    for _ in range(150):
        if rng.random() < 0.4:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 30))]
            job = make_job(prompt, rng.randint(1, 20), adapter=rng.choice([None, "a", "b", "c", "d"]), arrived_at=now)
            jobs.append(job)
            batch.add(job)
        if jobs and rng.random() < 0.05:
            batch.abort(rng.choice(jobs))
        step = batch.begin_step(now)
        assert sum(tokens for _, tokens in step.work) <= 16
        assert len(batch.running) <= 4
        assert len({job.adapter for job, _ in step.work} - {None}) <= 2
        now += step.duration_s
        batch.end_step(step, now)
    run(batch, now=now, steps=5000)
    assert all(job.finish_reason in {FinishReason.LENGTH, FinishReason.ABORT} for job in jobs)
    assert batch.pool.usage == 0
    for job in jobs:
        if job.finish_reason is FinishReason.LENGTH:
            assert job.scheduled_at is not None
            assert job.first_token_at is not None
            assert job.last_token_at is not None
            assert job.arrived_at <= job.scheduled_at < job.first_token_at <= job.last_token_at
