"""A gateway's requests take the stages of the router's own front: the same answers, errors, books and counts."""

import asyncio
import contextlib
import json
import random

import grpc
import pytest
from starlette.responses import JSONResponse

from lorafleet.keys.key_files import hash_key
from router.gateway.messages import FULL_DUPLEX_STREAMED, ProcessingRequest
from router.gateway.server import PickingHandler
from router.gateway.stream import GatewayStream
from tests.patience import patience, until
from tests.router.doubles import BASE, CHAT, AgentDouble, EngineDouble, chunk, counted, fleet_and_app, with_sql
from tests.router.gateway.envoy_client import BodyMode, GatewayAnswer, gateway_of

PATH = "/v1/chat/completions"
STREAM = {**CHAT, "stream": True}
JSON = {"content-type": "application/json"}
# What the front's own answers have besides, and Envoy adds itself.
_FRAMING = {"content-length", "transfer-encoding", "x-request-id", "x-lorafleet-first-token-s"}


@contextlib.asynccontextmanager
async def picking_fleet(*engines, **settings):
    """(gateway, client of the router's own front, control, parts)."""
    async with (
        fleet_and_app(*engines, ext_proc=0, **settings) as (client, control, parts, app),
        gateway_of(app.state.picker.port) as gateway,
    ):
        yield gateway, client, control, parts


async def nothing_left(parts):
    """No request counts anywhere any more."""
    await until(lambda: not list(parts.scheduler.load.counts_by_name()))
    assert not parts.pool.connections - parts.pool.idle_connections


async def test_the_engine_with_the_adapter_gets_the_request_and_the_client_its_own_name_back():
    engines = [EngineDouble("w0"), EngineDouble("w1")]
    async with picking_fleet(*engines, control=with_sql("w1")) as (gateway, client, control, parts):
        for body in ({**CHAT, "model": "sql/v1"}, {**STREAM, "model": "sql/v1"}):
            got = await gateway.ask(PATH, body)
            direct = await client.post(PATH, json=body)
            assert got.picked.endpoint == control.workers["w1"].removeprefix("http://")
            assert engines[0].bodies == []
            assert engines[1].bodies[-2] == engines[1].bodies[-1]
            assert (got.status, got.body) == (direct.status_code, direct.content)
            assert b'"sql/v1"' in got.body
            assert got.headers["x-lorafleet-worker"] == "w1"
            assert got.headers.keys() - _FRAMING == direct.headers.keys() - _FRAMING
        await nothing_left(parts)
        assert counted(control, parts)["sql/v1"].requests == 4


async def test_pieces_of_an_answer_go_on_as_they_come():
    async with picking_fleet(EngineDouble("w0")) as (gateway, _, _, parts):
        call, body = gateway.call(), json.dumps(STREAM).encode()
        await call.send_head("POST", PATH, JSON, ends=False)
        await call.send_body(body)
        await call.read_decision()
        assert list(parts.scheduler.load.counts_by_name())
        await call.send_answer_head(200, {"content-type": "text/event-stream", "content-length": "7"})
        first, second = chunk(BASE, "one"), chunk(BASE, "two")
        await call.send_answer(first, ends=False)
        head = await call.read_answer_head()
        assert (head.status, head.headers["content-type"]) == (200, "text/event-stream")
        assert "content-length" not in head.headers
        assert await call.read_piece() == (first, False)
        await call.send_answer(second[:10], ends=False)
        await call.send_answer(second[10:], ends=False)
        assert await call.read_piece() == (second, False)
        await call.send_answer(b"data: [DONE]\n\n", ends=False)
        assert await call.read_piece() == (b"data: [DONE]\n\n", False)
        # The engine's own end is waited for, so that it keeps its connection to the gateway.
        await call.send_answer(b"", ends=True)
        assert await call.read_piece() == (b"", True)
        assert await call.ended() is grpc.StatusCode.OK
        await nothing_left(parts)


async def test_trailers_end_both_bodies():
    async with picking_fleet(EngineDouble("w0")) as (gateway, _, _, parts):
        call, body = gateway.call(), json.dumps(STREAM).encode()
        await call.send_head("POST", PATH, JSON, ends=False)
        await call.send_body(body, has_trailers=True)
        head, piece, trailers = [await call.read() for _ in range(3)]
        assert head.request_headers is not None
        sent = piece.request_body.response.body_mutation.streamed_response
        assert json.loads(sent.body)["stream"] is True
        assert not sent.end_of_stream
        assert trailers.request_trailers is not None
        await call.send_answer_head(200, {"content-type": "text/event-stream"})
        await call.send_answer(chunk(BASE, "one") + b"data: [DONE]\n\n", ends=False)
        await call.send_answer_trailers()
        assert (await call.read()).response_headers is not None
        assert (await call.read_piece())[1] is False
        assert (await call.read()).response_trailers is not None
        assert await call.ended() is grpc.StatusCode.OK
        await nothing_left(parts)


async def test_errors_are_those_of_the_routers_own_front(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        f"keys:\n- {{sha256: {hash_key('user')}, tenant: acme, scopes: [infer]}}\n"
        f"- {{sha256: {hash_key('few')}, tenant: acme, scopes: [infer], limits: {{requests_per_minute: 1}}}}\n"
        f"- {{sha256: {hash_key('agent')}, scopes: [register]}}\n"
    )
    cases = [
        (PATH, CHAT, {}, 401),
        (PATH, CHAT, {"authorization": "Bearer agent"}, 403),
        (PATH, {**CHAT, "model": "nobody/v1"}, {"authorization": "Bearer user"}, 404),
        (PATH, {**CHAT, "stream": [1]}, {"x-api-key": "user", "x-lorafleet-timeout-s": "soon"}, 400),
        (PATH, CHAT, {"authorization": "Bearer user", "content-type": "text/plain"}, 400),
        (PATH, {**CHAT, "user": "x" * 3000}, {"authorization": "Bearer user"}, 413),
        ("/v1/messages", {**CHAT, "model": "nobody"}, {"x-api-key": "user"}, 404),
        (PATH, None, {"authorization": "Bearer user"}, 405),
    ]
    settings = {"key_files": (keys,), "max_body_bytes": 2000}
    async with picking_fleet(EngineDouble("w0"), **settings) as (gateway, client, _, parts):
        for path, body, headers, status in cases:
            method = "GET" if body is None else "POST"
            direct = await client.request(method, path, json=body, headers=headers)
            got = await gateway.ask(path, body, headers)
            assert got.picked is None
            assert (got.status, got.body) == (direct.status_code, direct.content), (path, status)
            assert got.status == status
            left = {name: value for name, value in direct.headers.items() if name not in {*_FRAMING, "connection"}}
            assert left == {name: value for name, value in got.headers.items() if name not in _FRAMING}
        few = {"authorization": "Bearer few"}
        assert (await gateway.ask(PATH, CHAT, few)).status == 200
        limited = await gateway.ask(PATH, CHAT, few)
        assert (limited.status, limited.json()["error"]["code"]) == (429, "rate_limited")
        assert int(limited.headers["retry-after"]) > 0
        await nothing_left(parts)
        assert not parts.discovery.fleet.roster(BASE).replicas[0].is_suspect


async def test_what_is_no_inference_route_is_not_found():
    async with picking_fleet(EngineDouble("w0")) as (gateway, _, _, _):
        for path in ("/metrics", "/v1/adapters", "/nowhere"):
            got = await gateway.ask(path)
            assert (got.status, got.json()["error"]["code"]) == (404, "not_found")


async def test_an_engine_gets_no_key_and_no_cookie_of_the_client(tmp_path):
    keys, engine = tmp_path / "keys.yaml", EngineDouble("w0")
    keys.write_text(f"keys:\n- {{sha256: {hash_key('user')}, tenant: acme, scopes: [infer]}}\n")
    own = {"authorization": "Bearer user", "x-api-key": "user", "cookie": "a=b", "x-odd": "1", "x-envoy-attempt": "1"}
    async with picking_fleet(engine, key_files=(keys,)) as (gateway, _, _, _):
        assert (await gateway.ask(PATH, CHAT, own)).status == 200
        (headers,) = engine.headers
        assert not headers.keys() & {"authorization", "x-api-key", "cookie", "x-odd"}
        assert headers["x-envoy-attempt"] == "1"
        assert headers["accept-encoding"] == "identity"
        assert "transfer-encoding" not in headers


async def test_only_an_endpoint_that_the_gateway_allows_is_picked():
    engines = [EngineDouble(f"w{n}") for n in range(4)]
    async with picking_fleet(*engines) as (gateway, _, control, parts):
        among = [control.workers["w2"].removeprefix("http://"), "10.0.0.1:8000"]
        for _ in range(5):
            assert (await gateway.ask(PATH, CHAT, among=among)).picked.endpoint == among[0]
        for none in ([], ["10.0.0.1:8000"]):
            got = await gateway.ask(PATH, CHAT, among=none)
            assert (got.status, got.json()["error"]["code"]) == (503, "no_replica")
            assert got.headers["retry-after"] == "1"
        await nothing_left(parts)


async def test_a_gateway_that_would_hold_bodies_back_is_told_which_mode_to_set():
    async with picking_fleet(EngineDouble("w0")) as (gateway, _, _, _):
        for mode in (BodyMode.NONE, BodyMode.BUFFERED, BodyMode.STREAMED):
            call = gateway.call()
            await call.send_head("POST", PATH, JSON, ends=False, mode=mode)
            got = await call.read_decision()
            assert isinstance(got, GatewayAnswer)
            assert (got.status, got.json()["error"]["code"]) == (500, "gateway_misconfigured")
            assert "FULL_DUPLEX_STREAMED" in got.json()["error"]["message"]


async def test_an_engine_that_fails_is_not_asked_again_and_counts_as_failed():
    async def busy(engine, body):
        return JSONResponse({"error": {"message": "busy"}}, 503)

    engines = [EngineDouble("w0", busy), EngineDouble("w1", busy)]
    async with picking_fleet(*engines) as (gateway, _, _, parts):
        got = await gateway.ask(PATH, CHAT)
        assert (got.status, got.json()["error"]["code"]) == (503, "no_replica")
        assert len(engines[0].bodies) + len(engines[1].bodies) == 1
        assert parts.metrics.retries.labels("engine_unavailable").value == 1
        await nothing_left(parts)


@pytest.mark.parametrize("when", ["before its body", "in the middle of its body", "at the engine", "while it streams"])
async def test_a_client_that_leaves_at_any_time_leaves_nothing_behind(when, tmp_path):
    keys = tmp_path / "keys.yaml"
    limits = "limits: {concurrent_requests: 1}"
    keys.write_text(f"keys:\n- {{sha256: {hash_key('user')}, tenant: acme, scopes: [infer], {limits}}}\n")
    headers = {**JSON, "authorization": "Bearer user"}
    async with picking_fleet(EngineDouble("w0"), key_files=(keys,)) as (gateway, _, _, parts):
        call = gateway.call()
        await call.send_head("POST", PATH, headers, ends=False)
        if when == "in the middle of its body":
            await call.send_part(b'{"model')
        if when in ("at the engine", "while it streams"):
            await call.send_body(json.dumps(STREAM).encode())
            await call.read_decision()
        if when == "while it streams":
            await call.send_answer_head(200, {"content-type": "text/event-stream"})
            await call.send_answer(chunk(BASE, "one"), ends=False)
            await call.read_answer_head()
        call.cancel()

        async def is_free():
            return (await gateway.ask(PATH, CHAT, headers)).status == 200

        await until(is_free)
        await nothing_left(parts)


async def test_a_batch_of_several_engines_is_answered_by_the_router_itself():
    engine = EngineDouble("w0")
    control = with_sql("w0")
    control.add_adapter("pdf/v1", on=["w0"])

    async def completed(engine, body):
        choice = {"index": 0, "text": body["model"], "finish_reason": "stop"}
        return JSONResponse({"id": "1", "model": body["model"], "choices": [choice], "usage": usage})

    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    engine.answer = completed
    body = {"model": BASE, "prompt": ["a", "b"], "lora_id": ["sql/v1", "pdf/v1"]}
    async with picking_fleet(engine, control=control) as (gateway, client, _, parts):
        direct = await client.post("/v1/completions", json=body)
        got = await gateway.ask("/v1/completions", body)
        assert got.picked is None
        assert (got.status, direct.status_code) == (200, 200)
        assert [c["text"] for c in got.json()["choices"]] == [c["text"] for c in direct.json()["choices"]]
        await nothing_left(parts)


async def test_a_request_waits_for_its_adapter_and_goes_where_it_was_loaded():
    async def ensure(control, lora_id):
        control.residents.setdefault("w1", []).append(lora_id)
        control.tell()
        return JSONResponse({})

    control = AgentDouble(ensure=ensure)
    control.add_adapter("cold/v1")
    async with picking_fleet(EngineDouble("w0"), EngineDouble("w1"), control=control) as (gateway, _, _, parts):
        got = await gateway.ask(PATH, {**CHAT, "model": "cold/v1"})
        assert got.status == 200
        assert got.picked.endpoint == control.workers["w1"].removeprefix("http://")
        await nothing_left(parts)


class SlowCall:
    """A call whose gateway sends at once all that it has, and reads nothing before `reads` is set."""

    def __init__(self, messages) -> None:
        self.messages = iter(messages)
        self.taken = 0
        self.written: list = []
        self.reads = asyncio.Event()

    async def read(self):
        await asyncio.sleep(0)
        for message in self.messages:
            self.taken += 1
            return message
        return await asyncio.Event().wait()

    async def write(self, message) -> None:
        if message.WhichOneof("kind") == "response_body":
            await self.reads.wait()
        self.written.append(message)


async def test_a_gateway_that_reads_too_slowly_is_sent_for_no_further_than_it_has_read():
    event = chunk(BASE, "word" * 500)

    def messages():
        head = ProcessingRequest()
        head.protocol_config.request_body_mode = head.protocol_config.response_body_mode = FULL_DUPLEX_STREAMED
        for name, value in {":method": "POST", ":path": PATH, ":authority": "localhost", **JSON}.items():
            head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        yield head
        body = ProcessingRequest()
        body.request_body.body, body.request_body.end_of_stream = json.dumps(STREAM).encode(), True
        yield body
        while stream._phase == "picking":
            yield ProcessingRequest()
        answer = ProcessingRequest()
        for name, value in {":status": "200", "content-type": "text/event-stream"}.items():
            answer.response_headers.headers.headers.add(key=name, raw_value=value.encode())
        yield answer
        for n in range(1000):
            piece = ProcessingRequest()
            piece.response_body.body, piece.response_body.end_of_stream = event, n == 999
            yield piece

    async with fleet_and_app(EngineDouble("w0")) as (_, _, parts, app):
        call = SlowCall(messages())
        find = PickingHandler(parts).find_handler
        stream = GatewayStream(call, app.state.http.intake, find, parts.pool, max_answer_bytes=1)
        running = asyncio.create_task(stream.run())
        await until(lambda: stream.is_write_paused and not stream._may_read.is_set())
        taken = call.taken
        assert taken < 500
        for _ in range(20):
            await asyncio.sleep(0)
        assert call.taken == taken
        call.reads.set()
        await asyncio.wait_for(running, patience(20))
        got = b"".join(m.response_body.response.body_mutation.streamed_response.body for m in call.written)
        assert got.count(event) == 1000
        await nothing_left(parts)


async def test_long_bodies_come_whole_and_in_pieces_that_gateways_take():
    words = random.Random(7).choices("abcdefgh ", k=300_000)
    body = {**CHAT, "messages": [{"role": "user", "content": "".join(words)}]}
    engine = EngineDouble("w0")
    async with picking_fleet(engine) as (gateway, _, _, _):
        got = await gateway.ask(PATH, body)
        assert got.status == 200
        assert engine.bodies[0]["messages"] == body["messages"]
