"""What a router reports of its requests: cumulative, of every end that a request may come to."""

import asyncio
import json
import time

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from orchestrator.model.usage import UsageReport
from router.core.schedule.load import LoadBook
from router.fleet.usage_report import HeldRequests, UsageCounts
from tests.patience import patience, until
from tests.router.doubles import CHAT, EngineDouble, chunk, error_of, fleet, with_sql

SQL = {**CHAT, "lora_id": "sql/v1"}
TOLD = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}


def the_use(parts):
    (use,) = parts.usage.report(1, time.monotonic()).uses
    return use


async def whole(engine, body):
    return JSONResponse({"id": "1", "model": body["model"], "choices": [], "usage": TOLD})


async def streamed(engine, body):
    async def pieces():
        yield chunk(body["model"], "one")
        await engine.go_on.wait()
        usage = {"id": "1", "model": body["model"], "choices": [], "usage": TOLD}
        yield b"data: " + json.dumps(usage, separators=(",", ":")).encode() + b"\n\ndata: [DONE]\n\n"

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def broken(engine, body):
    async def pieces():
        yield chunk(body["model"], "one")
        raise ConnectionResetError

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def erring(engine, body):
    async def pieces():
        yield chunk(body["model"], "one")
        yield b'data: {"error": {"message": "out of order", "code": 500}}\n\ndata: [DONE]\n\n'

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def failing(engine, body):
    return JSONResponse({"error": {"message": "out of order"}}, 500)


async def refusing(engine, body):
    return JSONResponse({"error": {"message": "your fault"}}, 400)


async def full(engine, body):
    return Response(status_code=503)


async def test_an_answers_tokens_and_work_are_counted_and_its_first_token_where_it_was_streamed():
    for answer, first_tokens in ((whole, 0), (streamed, 1)):
        async with fleet(EngineDouble("w0", answer), control=with_sql("w0")) as (client, _, parts):
            said = await client.post("/v1/chat/completions", json=SQL | {"stream": answer is streamed})
            assert said.status_code == 200
            use = the_use(parts)
            assert (use.requests, use.output_tokens, use.errors, use.in_flight) == (1, 7, 0, 0)
            assert use.first_tokens == first_tokens
            assert (use.first_token_s > 0) == bool(first_tokens)
            assert use.work_s > 0


@pytest.mark.parametrize(("answer", "errors"), [(failing, 1), (broken, 1), (erring, 1), (refusing, 0), (full, 0)])
async def test_an_engines_failure_counts_as_error_and_its_refusal_does_not(answer, errors):
    async with fleet(EngineDouble("w0", answer), control=with_sql("w0"), max_tries=1, failover_wait_s=0.01) as (
        client,
        _,
        parts,
    ):
        is_streamed = answer in (broken, erring)
        await client.post("/v1/chat/completions", json=SQL | {"stream": is_streamed})
        use = the_use(parts)
        assert (use.requests, use.errors, use.output_tokens > 0, use.in_flight) == (1, errors, is_streamed, 0)
        if not is_streamed:
            assert (use.work_s, use.first_tokens) == (0.0, 0)


@pytest.mark.parametrize("question", [SQL, CHAT], ids=["adapter", "base model"])
async def test_a_client_that_leaves_is_no_engine_error(question):
    engine = EngineDouble("w0", streamed)
    engine.go_on.clear()
    async with fleet(engine, control=with_sql("w0")) as (client, _, parts):
        async with client.stream("POST", "/v1/chat/completions", json=question | {"stream": True}) as answer:
            await anext(answer.aiter_bytes())
            assert the_use(parts).in_flight == 1
        await until(lambda: the_use(parts).in_flight == 0)
        use = the_use(parts)
        assert (use.errors, use.output_tokens, use.first_tokens) == (0, 1, 1)


async def never(control, lora_id):
    await asyncio.Event().wait()


async def without_room(control, lora_id):
    entry = {"lora_id": lora_id, "digest": None, "state": "registered", "ready": [], "loading": [], "expected_s": None}
    return JSONResponse({**entry, "error": "no slot"})


@pytest.mark.parametrize(
    ("ensure", "headers", "entry"),
    [
        (never, {}, (503, "adapter_loading")),
        (without_room, {}, (503, "no_capacity")),
        (never, {"x-lorafleet-timeout-s": "0.05"}, (504, "deadline_exceeded")),
    ],
)
async def test_a_rejected_held_request_counts_as_hold_and_shed(ensure, headers, entry):
    control = with_sql()
    control.ensure = ensure
    async with fleet(EngineDouble("w0"), control=control, cold_start_timeout_s=patience(0.1)) as (client, _, parts):
        answer = await client.post("/v1/chat/completions", json=SQL, headers=headers)
        assert error_of(answer) == entry
        assert "sql/v1" in answer.json()["error"]["message"]
        (hold,) = parts.usage.report(1, time.monotonic()).holds
        assert (hold.lora_id, hold.held, hold.sheds) == ("sql/v1", 1, 1)
        assert 0 < hold.hold_s < patience(10)  # a part of the deadline may have passed before the hold began


def test_a_report_counts_up_and_what_another_version_leaves_out_is_zero():
    usage = UsageCounts("r0", LoadBook())
    for _ in range(3):
        usage.record_dispatch("w0", "sql/v1@ab", 10, 1.0).record_end(0.5, 4, 0.25, 2.0, is_error=False)
    usage.record_dispatch("w0", "sql/v1@ab", 10, 1.0).record_end(0.0, 0, None, 2.0, is_error=True)
    report = usage.report(1, 1.0)
    (use,) = report.uses
    assert (use.requests, use.prompt_tokens, use.output_tokens, use.errors) == (4, 40, 12, 1)
    assert (use.work_s, use.first_tokens, use.first_token_s) == (1.5, 3, 0.75)
    assert usage.report(1, 2.0).seq == report.seq + 1
    # As a router of the version before sends it, and one of the version after.
    old = {"router_id": "r", "boot_id": "b", "seq": 1, "revision_seen": 1, "later": {}}
    read = UsageReport.model_validate(
        old | {"uses": [{"worker_id": "w0", "engine_name": "a@b", "completion_tokens": 1}]}
    )
    assert (read.uses[0].errors, read.uses[0].work_s, read.holds) == (0, 0.0, ())


def test_queued_requests_are_reported_while_they_wait():
    holds = HeldRequests()
    for _ in range(2):
        holds.start_wait("sql/v1", 0.0)
    holds.end_wait("sql/v1", 2.0, 2.0)
    holds.record_hold("sql/v1", 1.0, 3.0)
    (hold,) = holds.report(10_000.0)
    assert (hold.waiting, hold.held, hold.hold_s) == (1, 2, 3.0)
    holds.start_wait("", 0.0)
    holds.end_wait("", 1.0, 0.0)
    assert len(holds.report(10_000.0)) == 1


def test_the_base_models_holds_are_not_kept_and_old_ones_are_forgotten():
    holds = HeldRequests()
    holds.record_hold("", 1.0, 0.0)
    holds.record_shed("sql/v1", 0.0)
    assert [hold.lora_id for hold in holds.report(1.0)] == ["sql/v1"]
    assert holds.report(10_000.0) == ()


async def test_expected_waits_for_each_worker_are_reported():
    engine = EngineDouble("w0", streamed)
    async with fleet(engine, control=with_sql("w0"), max_in_flight_tokens=1) as (client, control, parts):
        engine.go_on.clear()
        asks = [asyncio.create_task(client.post("/v1/chat/completions", json=SQL | {"stream": True})) for _ in range(3)]
        await until(lambda: len(parts.scheduler.queue))
        assert parts.usage.report(1, time.monotonic()).waits_s.keys() == {"w0"}
        await until(lambda: control.usage and control.usage[-1]["waits_s"])
        engine.go_on.set()
        await asyncio.gather(*asks)
        assert parts.usage.report(1, time.monotonic()).waits_s == {}


def test_counts_of_a_long_stream_are_kept_for_a_while_after_its_end():
    load = LoadBook()
    usage = UsageCounts("r0", load)
    flight = load.add("w0", "sql/v1@ab", 0.2, 0.0)
    use = usage.record_dispatch("w0", "sql/v1@ab", 100, 0.0)
    assert usage.report(1, 5000.0).uses[0].in_flight == 1
    use.record_end(60.0, 50_000, 0.5, 5000.0, is_error=True)
    load.remove(flight, 5000.0)
    (entry,) = usage.report(1, 5001.0).uses
    assert (entry.output_tokens, entry.work_s, entry.errors, entry.in_flight) == (50_000, 60.0, 1, 0)
    assert usage.report(1, 5899.0).uses
    assert usage.report(1, 5901.0).uses == ()


async def test_a_router_that_stops_says_so_in_its_last_report():
    async with fleet(EngineDouble("w0", streamed), control=with_sql("w0")) as (client, control, _):
        assert (await client.post("/v1/chat/completions", json=SQL)).status_code == 200
        await until(lambda: control.usage and control.usage[-1]["uses"])
        assert not any(report["is_last"] for report in control.usage)
    last = control.usage[-1]
    assert (last["is_last"], [use["in_flight"] for use in last["uses"]]) == (True, [0])
    assert last["seq"] > control.usage[-2]["seq"]


def test_a_trainers_old_versions_do_not_make_reports_longer():
    usage = UsageCounts("r", LoadBook(), is_registered=lambda lora_id: lora_id == "run/v3999")
    longest = 0
    for version in range(4_000):
        now = float(version)
        usage.record_dispatch("w0", f"run/v{version}@{version:012}", 5, now).record_end(1.0, 2, 0.1, now, False)
        usage.holds.record_hold(f"run/v{version}", 0.1, now)
        report = usage.report(1, now)
        assert report.uses[-1].requests == 1, "each version is reported at least once"
        longest = max(longest, len(report.uses), len(report.holds))
    assert longest <= 32
    left = usage.report(1, 4_800.0)
    assert [use.engine_name[:9] for use in left.uses] == ["run/v3999"], "a registered one is kept longer"
