"""A picker before a real Envoy, its health, and how its port starts and ends."""

import asyncio
import contextlib
import sys

import grpc
import pytest
from pydantic import ValidationError
from starlette.responses import JSONResponse, StreamingResponse

from router.app import build
from router.config import RouterSettings
from router.factories import PickerUnavailable
from router.gateway.messages import (
    HEALTH_SERVICE,
    NOT_SERVING,
    SERVICE,
    SERVICE_UNKNOWN,
    SERVING,
    HealthCheckRequest,
    HealthCheckResponse,
)
from tests.patience import patience, until
from tests.router.doubles import CHAT, EngineDouble, chunk, error_of, fleet_and_app, with_sql
from tests.router.gateway.envoy_client import PROCESS, gateway_of
from tests.router.gateway.envoy_server import config_of, envoy

PATH = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def behind_envoy(folder, *engines, mode="FULL_DUPLEX_STREAMED", **settings):
    """(client of Envoy, client of the router's own front, control, parts)."""
    async with fleet_and_app(*engines, ext_proc=0, **settings) as (client, control, parts, app):
        config = config_of(app.state.picker.port, list(control.workers.values()), mode)
        async with envoy(folder, config) as front:
            yield front, client, control, parts


async def nothing_left(parts):
    """No request counts anywhere any more."""
    await until(lambda: not list(parts.scheduler.load.counts_by_name()))


@pytest.mark.fleet
async def test_envoy_sends_each_request_to_the_engine_with_its_adapter(tmp_path):
    engines = [EngineDouble("w0"), EngineDouble("w1")]
    async with behind_envoy(tmp_path, *engines, control=with_sql("w1")) as (front, client, _, parts):
        for ask in ({}, {"stream": True}):
            body = {**CHAT, "model": "sql/v1", **ask}
            got, direct = [await each.post(PATH, json=body) for each in (front, client)]
            assert got.status_code == 200, got.text
            assert got.text == direct.text
            assert got.headers["content-type"] == direct.headers["content-type"]
            assert got.headers["x-lorafleet-worker"] == "w1"
        long = [{"role": "user", "content": "word " * 60_000}]
        assert (await front.post(PATH, json={**CHAT, "messages": long})).status_code == 200
        assert long in [body["messages"] for engine in engines for body in engine.bodies]
        assert error_of(await front.post(PATH, json={**CHAT, "model": "nobody"})) == (404, "model_not_found")
        assert error_of(await front.get("/nowhere")) == (404, "not_found")
        await nothing_left(parts)


@pytest.mark.fleet
async def test_engines_that_fail_behind_envoy_are_503_and_slow_ones_504(tmp_path):
    async def fail_by_body(engine, body):
        if body["messages"][0]["content"] == "busy":
            return JSONResponse({"error": {"message": "busy"}}, 503)
        await engine.go_on.wait()
        return JSONResponse({})

    engine = EngineDouble("w0", fail_by_body)
    engine.go_on.clear()
    short = {"first_data_timeout_s": 0.2, "max_answer_s": 0.2}
    async with behind_envoy(tmp_path, engine, **short) as (front, _, _, parts):
        busy = {**CHAT, "messages": [{"role": "user", "content": "busy"}]}
        got = await front.post(PATH, json=busy)
        assert error_of(got) == (503, "no_replica")
        assert got.headers["retry-after"] == "1"
        got = await front.post(PATH, json=CHAT)
        assert error_of(got) == (504, "no_answer_in_time")
        engine.go_on.set()
        await nothing_left(parts)


@pytest.mark.fleet
async def test_an_engine_behind_envoy_ends_when_its_client_leaves(tmp_path):
    async def endless(engine, body):
        async def pieces():
            try:
                while True:
                    yield chunk(body["model"], "word")
                    await asyncio.sleep(0)
            finally:
                engine.aborted.set()

        return StreamingResponse(pieces(), media_type="text/event-stream")

    engine = EngineDouble("w0", endless)
    async with behind_envoy(tmp_path, engine) as (front, _, _, parts):
        async with front.stream("POST", PATH, json={**CHAT, "stream": True}) as answer:
            await anext(answer.aiter_bytes())
            assert list(parts.scheduler.load.counts_by_name())
        await asyncio.wait_for(engine.aborted.wait(), patience(20))
        await nothing_left(parts)


@pytest.mark.fleet
async def test_an_envoy_that_holds_bodies_back_says_which_mode_to_set(tmp_path):
    async with behind_envoy(tmp_path, EngineDouble("w0"), mode="BUFFERED") as (front, _, _, _):
        got = await front.post(PATH, json=CHAT)
        assert error_of(got) == (500, "gateway_misconfigured")
        assert "FULL_DUPLEX_STREAMED" in got.json()["error"]["message"]


async def health_of(port, name):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = channel.unary_unary(
            f"/{HEALTH_SERVICE}/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )
        return (await check(HealthCheckRequest(service=name), timeout=patience(10))).status


async def test_health_is_that_of_ready_and_liveness_that_of_the_process():
    async with fleet_and_app(EngineDouble("w0"), ext_proc=0) as (_, _, parts, app):
        port = app.state.picker.port
        await until(parts.discovery.is_synced)
        for name in ("", "readiness", SERVICE, "liveness"):
            assert await health_of(port, name) == SERVING
        parts.stopping = True
        for name in ("", "readiness", SERVICE):
            assert await health_of(port, name) == NOT_SERVING
        assert await health_of(port, "liveness") == SERVING
        assert await health_of(port, "another") == SERVICE_UNKNOWN


async def test_bytes_that_are_no_message_end_the_call_as_its_callers_fault():
    async with fleet_and_app(EngineDouble("w0"), ext_proc=0) as (_, _, _, app):
        port = app.state.picker.port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream(PROCESS)(timeout=patience(20))
            await call.write(b"\xff\xff\xff")
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "not a ProcessingRequest" in await call.details()
        assert await health_of(port, "liveness") == SERVING


async def test_calls_in_flight_are_answered_before_the_port_closes():
    async with fleet_and_app(EngineDouble("w0"), ext_proc=0) as (_, _, _, app):
        picker = app.state.picker
        async with gateway_of(picker.port) as gateway:
            call = gateway.call()
            await call.send_head("POST", PATH, {"content-type": "application/json"}, ends=False)
            picker.end_within(patience(20))
            closing = asyncio.create_task(picker.close())
            await call.send_body(b'{"model": "nobody"}')
            assert (await call.read_decision()).status == 404
            await asyncio.wait_for(closing, patience(20))


async def test_a_port_for_gateways_without_grpc_says_what_to_install(monkeypatch):
    for name in ("router.gateway.server", "router.gateway.stream", "router.gateway.tls"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(PickerUnavailable, match=r"grpc is missing: pip install 'lorafleet\[gateway\]'"):
        build(RouterSettings(ext_proc=9002))


def test_processes_need_a_port_that_they_share():
    with pytest.raises(ValidationError, match="give a port, such as 9002"):
        RouterSettings(ext_proc=0, processes=2)
    assert RouterSettings(ext_proc=9002, processes=2).ext_proc == 9002
