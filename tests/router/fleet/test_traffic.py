"""What a router counts for the console: each end of a request once, in batches that are sent until accepted."""

import asyncio
import json
import sys

import pytest
from starlette.responses import JSONResponse, StreamingResponse

from router.fleet.traffic import SLICE_S, TrafficLog, add_error, add_first_token, add_tokens, add_whole
from router.protocols.usage import EngineUsage
from tests.patience import until
from tests.router.doubles import CHAT, EngineDouble, chunk, counted, fleet, with_sql

SQL = {**CHAT, "lora_id": "sql/v1"}
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3},
}


async def whole(engine, body):
    return JSONResponse({"id": "1", "model": body["model"], "choices": [], "usage": USAGE})


async def streamed(engine, body):
    async def pieces():
        yield chunk(body["model"], "one")
        yield b"data: [DONE]\n\n"

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def failing(engine, body):
    return JSONResponse({"error": {"message": "out of order"}}, 500)


async def counted_of(answer, body):
    """The counts of one request, by adapter, and its worker."""
    async with fleet(EngineDouble("w0", answer), control=with_sql("w0"), max_tries=1, failover_wait_s=0.01) as (
        client,
        control,
        parts,
    ):
        await client.post("/v1/chat/completions", json=body)
        await until(lambda: not parts.scheduler.load.total_in_flight)
        return counted(control, parts)


async def test_a_whole_answer_counts_with_its_tokens_and_duration():
    row = (await counted_of(whole, SQL))["sql/v1"]
    assert (row.requests, row.prompt_tokens, row.output_tokens, row.codes) == (1, 5, 7, {})
    assert row.prompt_cached_tokens == 3
    assert sum(row.whole.values()) == 1
    assert row.first_token == {}
    assert row.sent == 1


async def test_a_streamed_answer_counts_with_its_first_token():
    row = (await counted_of(streamed, SQL | {"stream": True}))["sql/v1"]
    assert sum(row.first_token.values()) == sum(row.whole.values()) == 1


async def test_a_failed_request_counts_by_its_code_and_not_in_the_durations():
    row = (await counted_of(failing, SQL))["sql/v1"]
    assert row.requests == 1
    assert [code for code in row.codes if code.startswith("5")] == list(row.codes)
    assert (row.whole, row.first_token) == ({}, {})


async def test_base_model_and_refused_requests_count_too():
    async with fleet(EngineDouble("w0", whole), control=with_sql("w0"), max_tries=1, failover_wait_s=0.01) as (
        client,
        control,
        parts,
    ):
        await client.post("/v1/chat/completions", json=CHAT)
        await client.post("/v1/chat/completions", json=CHAT | {"model": "unknown"})
        await client.post("/v1/chat/completions", content=b"{")
        await until(lambda: not parts.scheduler.load.total_in_flight)
        found = counted(control, parts)
    assert found[CHAT["model"]].requests == 1
    assert found[""].codes == {"404 model_not_found": 1, "400 invalid_request_body": 1}


def test_a_batch_is_sent_until_it_is_accepted_and_then_never_again():
    log = TrafficLog("r0", offset_s=0.0)
    log.counts_of(101.0, adapter="sql/v1").requests += 1
    first = log.batches(104.0)
    log.counts_of(110.0, adapter="sql/v1").requests += 1
    both = log.batches(116.0)
    assert [batch.number for batch in both] == [first[0].number, first[0].number + 1]
    assert (first[0].age_s, both[0].age_s, both[1].age_s) == (2.0, 14.0, 116.0 - 112.5)
    log.accept(both)
    assert log.batches(200.0) == ()


def test_a_report_ends_a_batch_and_the_next_begins_there():
    log = TrafficLog("r0", offset_s=0.0)
    for now in (101.0, 103.0, 104.0):
        log.counts_of(now, adapter="sql/v1").requests += 1
        batches = log.batches(now + 0.5)
    assert [120.0 - (batch.age_s + 15.5) for batch in batches] == [100.75, 102.5, 104.0]
    log.counts_of(104.7, adapter="sql/v1").requests += 1
    assert [batch.number for batch in log.batches(105.5)] == [1, 2, 3, 4], "it lies in the slice of its request"
    assert log.batches(105.5)[-1].age_s == pytest.approx(105.5 - 104.75)


def test_batches_are_of_the_same_five_seconds_in_every_router():
    for offset_s in (0.0, 1.7, 1_800_000_003.25):
        log = TrafficLog("r0", offset_s=offset_s)
        for now in (100.0, 101.3, 107.0, 109.9):
            log.counts_of(now, adapter="sql/v1").requests += 1
        batches = log.batches(120.0)
        middles = [(120.0 - batch.age_s + offset_s) % SLICE_S for batch in batches]
        assert middles == pytest.approx([SLICE_S / 2] * len(batches))
        assert sum(row.counts.requests for batch in batches for row in batch.rows) == 4


def all_batches(log, now):
    """What a log sends until everything is accepted."""
    found = []
    while batches := log.batches(now):
        found += batches
        log.accept(batches)
    return found


def test_batches_of_a_long_silence_are_merged_and_lose_nothing():
    log, hours = TrafficLog("r0"), 3
    for second in range(0, 3600 * hours, 5):
        add_error(log.counts_of(float(second), adapter="sql/v1"), "503 no_replica")
        log.batches(float(second) + SLICE_S)
    batches = all_batches(log, 3600.0 * hours)
    assert len(batches) <= 60
    assert sum(row.counts.requests for batch in batches for row in batch.rows) == 720 * hours
    assert sum(row.counts.codes["503 no_replica"] for batch in batches for row in batch.rows) == 720 * hours


def test_a_batch_that_was_sent_keeps_its_number_and_counts_through_any_silence():
    log, sent = TrafficLog("r0"), {}
    for second in range(0, 3600, 5):
        log.counts_of(float(second), adapter="sql/v1").requests += 1
        for batch in log.batches(float(second) + SLICE_S):
            counts = sum(row.counts.requests for row in batch.rows)
            assert sent.setdefault(batch.number, counts) == counts
    for batch in all_batches(log, 3600.0):
        counts = sum(row.counts.requests for row in batch.rows)
        assert sent.setdefault(batch.number, counts) == counts
    assert sum(sent.values()) == 720


def test_rows_of_one_batch_are_bounded_and_lose_no_request():
    log = TrafficLog("r0")
    for number in range(6000):
        log.counts_of(0.0, adapter=f"a{number}", base_model="qwen", worker="w0", key=f"k{number}").requests += 1
    (batch,) = log.batches(SLICE_S)
    assert len(batch.rows) <= 5001
    assert sum(row.counts.requests for row in batch.rows) == 6000


def test_batches_that_are_merged_have_no_more_rows_than_one_and_a_report_not_many_more():
    log = TrafficLog("r0")
    for second in range(300):
        for number in range(400):
            log.counts_of(second * SLICE_S, adapter=f"a{second}-{number}", worker="w0").requests += 1
    batches = log.batches(300 * SLICE_S)
    assert sum(len(batch.rows) for batch in batches) < 25_001
    found = [*batches, *all_batches(log, 300 * SLICE_S)][len(batches) :]
    assert max(len(batch.rows) for batch in found) <= 5001
    assert sum(row.counts.requests for batch in found for row in batch.rows) == 300 * 400


def test_counting_a_request_takes_few_calls():
    log, counts, usage = TrafficLog("r0"), [], EngineUsage(9, 2, 3)

    def count_one(now):
        row = log.counts_of(now, adapter="sql/v1")
        row.requests += 1
        add_tokens(row, usage, 2, 3, 3)
        add_first_token(row, 0.2, 0.1)
        add_whole(row, 1.0)

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


def test_the_time_of_a_request_is_reported_for_a_quarter_of_an_hour_and_of_a_deleted_adapter_for_half_a_minute():
    log = TrafficLog("r0", offset_s=0.0)
    add_error(log.counts_of(101.0, adapter="sql/v1"), "429 saturated")
    log.counts_of(101.0, base_model="qwen").requests += 1
    log.batches(102.0)
    assert log.asked_ages_s(110.0, lambda _: True) == {"sql/v1": 8.0}
    assert log.asked_ages_s(1001.0, lambda _: True) == {"sql/v1": 899.0}
    assert log.asked_ages_s(1003.0, lambda _: True) == {}


def test_a_trainers_old_versions_do_not_make_reports_longer():
    log, longest = TrafficLog("r0", offset_s=0.0), 0
    for version in range(4_000):
        now = float(version)
        log.counts_of(now, adapter=f"run/v{version}", worker="w0").sent += 1
        (batch,) = log.batches(now)
        log.accept((batch,))
        assert [row.counts.sent for row in batch.rows] == [1], "each version is reported once"
        longest = max(longest, len(log.asked_ages_s(now, lambda lora_id: lora_id == "run/v3999")))
    assert longest <= 32
    assert log.asked_ages_s(4_800.0, lambda lora_id: lora_id == "run/v3999").keys() == {"run/v3999"}


async def spelled(engine, body):
    async def pieces():
        yield chunk(body["model"], "one")
        await asyncio.sleep(0.05)
        usage = {"id": "1", "model": body["model"], "choices": [], "usage": USAGE}
        yield b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n"

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def test_a_streamed_answer_counts_the_time_of_its_tokens_after_the_first():
    async with fleet(EngineDouble("w0", spelled), control=with_sql("w0"), tokenizer="off") as (client, control, parts):
        await client.post("/v1/chat/completions", json=SQL | {"stream": True})
        row = counted(control, parts)["sql/v1"]
    assert row.decode_tokens == USAGE["completion_tokens"] - 1
    assert row.decode_s >= 0.05
    assert row.first_token_sum_s > 0
