"""What a router counts for the console: each end of a request once, in batches that are sent until accepted."""

import asyncio
import json
import sys
import time

import pytest
from starlette.responses import JSONResponse, StreamingResponse

from router.fleet.traffic import BATCH_S, TrafficLog
from tests.patience import until
from tests.router.doubles import CHAT, EngineDouble, chunk, fleet, with_sql

SQL = {**CHAT, "lora_id": "sql/v1"}
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3},
}


def rows(log, now=None):
    """All rows of what was counted so far, by adapter."""
    batches = log.batches(time.monotonic() if now is None else now, is_last=True)
    return {row.adapter or row.base_model: row for batch in batches for row in batch.rows}


async def whole(engine, body):
    return JSONResponse({"id": "1", "model": body["model"], "choices": [], "usage": USAGE})


async def streamed(engine, body):
    async def pieces():
        yield chunk(body["model"], "one")
        yield b"data: [DONE]\n\n"

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def failing(engine, body):
    return JSONResponse({"error": {"message": "out of order"}}, 500)


async def counted(answer, body):
    async with fleet(EngineDouble("w0", answer), control=with_sql("w0"), max_tries=1, failover_wait_s=0.01) as (
        client,
        _,
        parts,
    ):
        await client.post("/v1/chat/completions", json=body)
        await until(lambda: not parts.scheduler.load.total_in_flight)
        return rows(parts.usage.traffic)


async def test_a_whole_answer_counts_with_its_tokens_and_duration():
    row = (await counted(whole, SQL))["sql/v1"]
    assert (row.requests, row.prompt_tokens, row.output_tokens, row.codes) == (1, 5, 7, {})
    assert sum(row.whole.values()) == 1
    assert row.first_token == {}
    assert row.worker


async def test_a_streamed_answer_counts_with_its_first_token():
    row = (await counted(streamed, SQL | {"stream": True}))["sql/v1"]
    assert sum(row.first_token.values()) == sum(row.whole.values()) == 1


async def test_a_failed_request_counts_by_its_code_and_not_in_the_durations():
    row = (await counted(failing, SQL))["sql/v1"]
    assert row.requests == 1
    assert [code for code in row.codes if code.startswith("5")] == list(row.codes)
    assert (row.whole, row.first_token) == ({}, {})


async def test_base_model_and_refused_requests_count_too():
    async with fleet(EngineDouble("w0", whole), control=with_sql("w0"), max_tries=1, failover_wait_s=0.01) as (
        client,
        _,
        parts,
    ):
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/chat/completions", json=CHAT | {"model": "unknown"})
        await client.post("/v1/chat/completions", content=b"{")
        await until(lambda: not parts.scheduler.load.total_in_flight)
        found = rows(parts.usage.traffic)
    assert found[CHAT["model"]].requests == 1
    assert found[""].codes == {"404 model_not_found": 1, "400 invalid_request_body": 1}


def test_a_batch_is_sent_until_it_is_accepted_and_then_never_again():
    log = TrafficLog(offset_s=0.0)
    log.counts_of(101.0, adapter="sql/v1").requests += 1
    assert log.batches(104.9) == ()
    first = log.batches(105.0)
    log.counts_of(110.0, adapter="sql/v1").requests += 1
    both = log.batches(116.0)
    assert [batch.number for batch in both] == [first[0].number, first[0].number + 1]
    assert both[0].age_s == 116.0 - 102.5
    log.accept(both)
    assert log.batches(200.0, is_last=True) == ()


def test_batches_are_of_the_same_five_seconds_in_every_router():
    for offset_s in (0.0, 1.7, 1_800_000_003.25):
        log = TrafficLog(offset_s=offset_s)
        for now in (100.0, 101.3, 107.0, 109.9):
            log.counts_of(now, adapter="sql/v1").requests += 1
        batches = log.batches(120.0)
        middles = [(120.0 - batch.age_s + offset_s) % BATCH_S for batch in batches]
        assert middles == pytest.approx([BATCH_S / 2] * len(batches))
        assert sum(row.requests for batch in batches for row in batch.rows) == 4


def test_batches_of_a_long_silence_are_merged_and_lose_nothing():
    log, hours = TrafficLog(), 3
    for second in range(0, 3600 * hours, 5):
        log.counts_of(float(second), adapter="sql/v1").add_error("503 no_replica")
        log.batches(float(second) + BATCH_S)
    batches = log.batches(3600.0 * hours, is_last=True)
    assert len(batches) <= 60
    assert sum(row.requests for batch in batches for row in batch.rows) == 720 * hours
    assert sum(row.codes["503 no_replica"] for batch in batches for row in batch.rows) == 720 * hours


def test_rows_of_one_batch_are_bounded_and_lose_no_request():
    log = TrafficLog()
    for number in range(6000):
        log.counts_of(0.0, adapter=f"a{number}", base_model="qwen", worker="w0", key=f"k{number}").requests += 1
    (batch,) = log.batches(BATCH_S, is_last=True)
    assert len(batch.rows) <= 5001
    assert sum(row.requests for row in batch.rows) == 6000


def test_counting_a_request_takes_few_calls():
    log, counts = TrafficLog(), []

    def count_one(now):
        row = log.counts_of(now, adapter="sql/v1")
        row.requests += 1
        row.add_tokens(9, 2, 3, 3)
        row.add_times(0.2, 1.0, decode_tokens=1)

    count_one(0.0)

    def count(_frame, event, _arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    for _ in range(5):  # a garbage collection has calls of its own, now and then
        calls = 0
        sys.setprofile(count)
        count_one(0.1)
        sys.setprofile(None)
        counts.append(calls)
    # The row, tokens and times, for each of two durations a bucket (itself, log2, ceil, min) and a look-up; and one for
    # count_one itself.
    assert min(counts) <= 16 + 1


async def test_a_report_that_does_not_arrive_is_repeated():
    async with fleet(EngineDouble("w0", whole), control=with_sql("w0"), max_tries=1, failover_wait_s=0.01) as (
        client,
        _,
        parts,
    ):
        await asyncio.gather(*(client.post("/v1/chat/completions", json=SQL) for _ in range(3)))
        now = time.monotonic() + 2 * BATCH_S
        for _ in range(2):
            report = parts.usage.report(1, now)
            assert [row.requests for batch in report.traffic for row in batch.rows] == [3]
        parts.usage.traffic.accept(report.traffic)
        assert parts.usage.report(1, now).traffic == ()
        assert report.now.policy == "kv_lora"


async def spelled(engine, body):
    async def pieces():
        yield chunk(body["model"], "one")
        await asyncio.sleep(0.05)
        usage = {"id": "1", "model": body["model"], "choices": [], "usage": USAGE}
        yield b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n"

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def test_a_streamed_answer_counts_the_time_of_its_tokens_after_the_first():
    async with fleet(EngineDouble("w0", spelled), control=with_sql("w0"), tokenizer="off") as (client, _, parts):
        await client.post("/v1/chat/completions", json=SQL | {"stream": True})
        row = rows(parts.usage.traffic)["sql/v1"]
    assert row.decode_tokens == USAGE["completion_tokens"] - 1
    assert row.decode_s >= 0.05
    assert row.first_token_sum_s > 0
