"""Engines that refuse, break off at any byte, hang, trickle or talk nonsense, behind a whole router."""

import asyncio
import json

import pytest

from lorafleet.engine.errors import ENGINE_DEAD, SHUTTING_DOWN
from tests.lorafleet.keys.test_auth import no_more_files
from tests.patience import patience, until, within
from tests.router.doubles import UNHEARD, AgentDouble, with_sql
from tests.router.faults.faulty_fleet import (
    BASE,
    CHAT,
    COMPLETIONS,
    DONE,
    EVENTS,
    STREAM,
    STREAM_HEAD,
    WHOLE,
    answering,
    error_of,
    events_of,
    faulty_fleet,
    pieces,
    saying,
    sound,
)
from tests.router.faults.test_limits import key_file
from tests.router.request.test_run import ready_on_w0

CLEAN = b"".join(EVENTS)
FIRST_EVENT_AT = len(STREAM_HEAD) + len(pieces(EVENTS[0])) - len(b"\r\n")


def places(raw: bytes, *edges: int) -> list[int]:
    """Where to break off: at the edges, a byte before and after, and every 23 bytes."""
    near = {at + off for at in edges for off in (-1, 0, 1)}
    return sorted(at for at in near | set(range(0, len(raw), 23)) if 0 <= at < len(raw))


async def test_refusing_engine_is_passed_over_and_refusing_fleet_is_503():
    async with faulty_fleet(2) as router:
        router.engines[0].server.close()
        await router.engines[0].server.wait_closed()
        answers = await asyncio.gather(*(router.ask(f"p{n}") for n in range(20)))
        assert [answer.status_code for answer in answers] == [200] * 20
        assert {answer.headers["x-lorafleet-worker"] for answer in answers} == {"w1"}
        router.engines[1].server.close()
        await router.engines[1].server.wait_closed()
        for engine in router.engines:
            for writer in list(engine.open):
                writer.transport.abort()
        answer = await router.ask("nobody")
        assert error_of(answer) == (503, "no_replica")
        assert int(answer.headers["retry-after"]) >= 1
        assert "127.0.0.1" not in answer.text


async def test_router_without_file_descriptors_does_not_blame_an_engine():
    async with faulty_fleet(1, breaker_failures=1) as router:
        assert (await router.ask("first")).status_code == 200
        assert router.parts.pool.connections == router.parts.pool.idle_connections
        for connection in list(router.parts.pool.open_connections):
            connection.close()
        with no_more_files():
            refused = await router.ask("x")
        assert error_of(refused) == (503, "no_replica")
        breaker, replicas = router.parts.scheduler.breaker, router.parts.discovery.fleet.replicas.values()
        assert {breaker.state(replica, router.parts.clock()) for replica in replicas} == {"closed"}
        assert router.parts.metrics.retries.label_values == [("no_descriptors",)]
        assert (await router.ask("x")).status_code == 200


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("is_connected", [True, False])
async def test_stream_broken_at_any_byte_is_retried_or_ends_with_an_error(how, is_connected):
    async with faulty_fleet(2) as router:
        for at in places(STREAM, len(STREAM_HEAD), FIRST_EVENT_AT, FIRST_EVENT_AT + 60, len(STREAM) - 5):
            if is_connected:
                await router.connect()
            answer = await router.ask(f"at {at}", saying(STREAM[:at], how), stream=True)
            assert answer.status_code == 200, at
            if at < FIRST_EVENT_AT:
                assert (answer.content, router.play.asked[f"at {at}"]) == (CLEAN, 2), at
                continue
            events = events_of(answer.content)
            if router.play.asked[f"at {at}"] == 2:
                # A reset may take bytes with it that were sent before.
                assert (how, answer.content) == ("reset", CLEAN), at
                continue
            if events == list(EVENTS):
                assert at >= len(STREAM) - 7, at  # all was there but the end of the framing
                continue
            *good, error, done = events
            assert EVENTS[: len(good)] == tuple(good), at
            assert good, at
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "stream_broken", at
            assert done == DONE, at


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
async def test_stream_broken_behind_its_last_event_ends_without_an_error(line_end):
    said = STREAM_HEAD + pieces(*(event.replace(b"\n", line_end) for event in EVENTS))
    async with faulty_fleet(1) as router:
        answer = await router.ask("x", saying(said, "close"), stream=True)
        assert answer.content.replace(b"\r\n", b"\n") == b"".join(EVENTS)
        assert router.parts.metrics.requests.labels(COMPLETIONS, 200, "").value == 1


UNCHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
FINISHED = b'data: {"id":"1","choices":[{"index":0,"text":"!","finish_reason":"length"}]}\n\n'
USAGE_EVENT = b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'


def typed(kind: str) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind}).encode())


STREAMS = {
    COMPLETIONS: ({"prompt": "x"}, EVENTS[:2]),
    CHAT: ({"messages": [{"role": "user", "content": "x"}]}, EVENTS[:2]),
    "/v1/responses": (
        {"input": "x"},
        (typed("response.created"), typed("response.output_text.delta"), typed("response.output_text.done")),
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
        (typed("message_start"), typed("content_block_delta"), typed("message_delta")),
    ),
    "/generate": (
        {"text": "x"},
        (b'data: {"id":"1","choices":[{"index":0,"text":"a"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n',),
    ),
}
LAST = {"/v1/responses": typed("response.completed"), "/v1/messages": typed("message_stop")}


async def streamed(router, path, raw, then="stay"):
    """What a client of this route gets of a stream whose engine says these bytes."""
    router.play.usual = saying(raw, then)
    body = {"model": BASE, "stream": True, **STREAMS[path][0]}
    if path == "/generate":
        del body["model"]
    return (await router.client.post(path, json=body)).content


@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("path", STREAMS)
async def test_stream_ended_early_by_its_engine_ends_with_an_error(path, is_chunked):
    events = STREAMS[path][1]
    raw = STREAM_HEAD + pieces(*events) + b"0\r\n\r\n" if is_chunked else UNCHUNKED + b"".join(events)
    async with faulty_fleet(1) as router:
        got = await streamed(router, path, raw, "stay" if is_chunked else "close")
        error = got.removesuffix(DONE).split(b"\n\n")[-2]
        assert b"error" in error
        assert b"in the middle of its answer" in error
        labels = [labels for labels in router.parts.metrics.requests.label_values if "stream_broken" in labels]
        assert labels == [(path, 200, "stream_broken")]


@pytest.mark.parametrize(
    "end",
    [(FINISHED,), (FINISHED, USAGE_EVENT), (b'data: {"error":{"message":"no","code":500}}\n\n',), (DONE,)],
    ids=["finished", "with usage", "an error of the engine's", "done"],
)
async def test_stream_with_a_finish_reason_is_relayed_unchanged(end):
    async with faulty_fleet(1) as router:
        said = (*EVENTS[:2], *end)
        for line_end in (b"\n", b"\r\n"):
            events = [event.replace(b"\n", line_end) for event in said]
            shown = [event for event, plain in zip(events, said, strict=True) if plain != USAGE_EVENT]
            got = await streamed(router, COMPLETIONS, STREAM_HEAD + pieces(*events) + b"0\r\n\r\n")
            assert got == b"".join(shown)


@pytest.mark.parametrize("path", STREAMS)
async def test_engine_not_ending_its_body_holds_neither_client_nor_quota(path, tmp_path):
    events = (*STREAMS[path][1], LAST.get(path, DONE))
    async with faulty_fleet(1, **key_file(tmp_path, concurrent_requests=1), idle_timeout_s=3600.0) as router:
        router.client.headers["authorization"] = "Bearer a"
        for _ in range(2):
            async with within(10):
                got = await streamed(router, path, STREAM_HEAD + pieces(*events), "hang")
            assert b"error" not in got
            assert got.endswith(LAST.get(path, DONE))
        # Nor is its connection used again, nor kept.
        await until(lambda: not router.parts.pool.connections)


ENGINE_ERRORS = {
    "/v1/responses": b'event: response.failed\ndata: {"type":"response.failed","response":{"status":"failed"}}\n\n',
    "/v1/messages": b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"no"}}\n\n',
}
USUAL_ERROR = b'data: {"error": {"message": "no", "type": "InternalServerError", "code": 500}}\n\n'


@pytest.mark.parametrize("ends_with_done", [True, False])
@pytest.mark.parametrize("path", STREAMS)
async def test_stream_that_an_engine_ends_with_its_own_error_counts_as_failed(path, ends_with_done):
    said = (*STREAMS[path][1], ENGINE_ERRORS.get(path, USUAL_ERROR), *([DONE] if ends_with_done else []))
    async with faulty_fleet(1) as router:
        for raw in (pieces(*said), pieces(b"".join(said))):
            got = await streamed(router, path, STREAM_HEAD + raw + b"0\r\n\r\n")
            assert got.endswith(b"".join(said[len(STREAMS[path][1]) :])), "as the engine said it, and nothing else"
        assert router.parts.metrics.requests.label_values == [(path, 200, "engine_error")]


async def test_stream_that_an_engine_ends_with_an_error_of_the_clients_is_no_failure():
    refusal = b'data: {"error": {"message": "too long", "code": 400}}\n\n'
    async with faulty_fleet(1) as router:
        await streamed(router, CHAT, STREAM_HEAD + pieces(*EVENTS[:2], refusal, DONE) + b"0\r\n\r\n")
        assert router.parts.metrics.requests.label_values == [(CHAT, 200, "")]


async def test_connection_ended_right_behind_the_last_event_is_reused():
    async def in_two_writes(writer, body):
        writer.write(STREAM_HEAD + pieces(*EVENTS))
        await writer.drain()
        await go_on.wait()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    go_on = asyncio.Event()
    async with faulty_fleet(1) as router:
        router.play.usual = in_two_writes
        assert (await router.ask("x", stream=True)).content == CLEAN
        go_on.set()
        await until(lambda: router.parts.pool.idle_connections)
        assert (await router.ask("y", stream=True)).content == CLEAN
        assert router.engines[0].connections == 1


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("is_connected", [True, False])
async def test_whole_answer_broken_at_any_byte_is_retried_elsewhere(how, is_connected):
    raw = answering(WHOLE)
    async with faulty_fleet(2) as router:
        for at in places(raw, raw.index(b"\r\n\r\n") + 4, len(raw) - 1):
            if is_connected:
                await router.connect()
            answer = await router.ask(f"at {at}", saying(raw[:at], how))
            assert (answer.status_code, answer.content) == (200, WHOLE), at
            assert router.play.asked[f"at {at}"] == 2, at


@pytest.mark.parametrize("is_connected", [True, False])
async def test_an_engine_that_hangs_before_its_answer_is_given_up_in_time(is_connected):
    before = {"nothing": b"", "half a head": STREAM_HEAD[:40], "no event": STREAM_HEAD, "half an event": STREAM[:150]}
    async with faulty_fleet(2, first_data_timeout_s=0.1, idle_timeout_s=0.1) as router:
        asked = {name: router.ask(name, saying(raw, "hang"), stream=True) for name, raw in before.items()}
        asked["a whole answer"] = router.ask("a whole answer", saying(answering(WHOLE)[:80], "hang"))
        for name, asking in asked.items():
            if is_connected:
                await router.connect()
            assert (error_of(await asking), router.play.asked[name]) == ((504, "no_answer_in_time"), 1), name


async def test_an_engine_that_hangs_inside_a_stream_is_given_up_in_time():
    async with faulty_fleet(2, first_data_timeout_s=patience(60), idle_timeout_s=0.1) as router:
        answer = await router.ask("x", saying(STREAM_HEAD + pieces(*EVENTS[:2]), "hang"), stream=True)
        *good, error, done = events_of(answer.content)
        assert (tuple(good), done) == (EVENTS[:2], DONE)
        assert b'"stream_broken"' in error


async def test_an_answer_that_trickles_lives_however_long_it_takes():
    idle_s = patience(0.3)
    async with faulty_fleet(1, first_data_timeout_s=patience(60), idle_timeout_s=idle_s) as router:
        # Each takes half as long again as it may be silent.
        slow = saying(STREAM, each=4, pause_s=1.5 * idle_s / (len(STREAM) // 4))
        whole = saying(answering(WHOLE), each=1, pause_s=1.5 * idle_s / len(answering(WHOLE)))
        streamed, unstreamed = await asyncio.gather(router.ask("a", slow, stream=True), router.ask("b", whole))
        assert (streamed.content, unstreamed.content) == (CLEAN, WHOLE)


async def test_engine_silent_after_an_answer_gets_a_new_connection():
    async with faulty_fleet(1) as router:
        for number in range(3):
            answer = await router.ask(f"{number}", saying(answering(WHOLE), "half_close"))
            assert (answer.status_code, answer.content) == (200, WHOLE)
        answer = await router.ask("cut", saying(STREAM_HEAD + pieces(EVENTS[0]), "half_close"), stream=True)
        assert b'"stream_broken"' in answer.content


async def test_a_head_without_measure_is_no_answer_and_another_engine_gives_one():
    huge = b"x-huge: " + b"a" * 100_000
    async with faulty_fleet(2) as router:
        answer = await router.ask("huge", saying(answering(WHOLE, huge)))
        assert (answer.status_code, answer.content) == (200, WHOLE)
        many = [b"x-%d: a" % n for n in range(10_000)]
        answer = await router.ask("many", saying(answering(WHOLE, *many)), saying(answering(WHOLE, *many)))
        assert error_of(answer) == (503, "no_replica")


@pytest.mark.parametrize("status", [b"000 x", b"099 x", b"101 Switching Protocols", b"600 x", b"999 x"])
async def test_a_status_that_is_none_is_no_answer(status):
    async with faulty_fleet(2) as router:
        answer = await router.ask("odd", saying(answering(WHOLE, status=status)))
        assert (answer.status_code, answer.content) == (200, WHOLE)


NONSENSE = [
    b"",
    b"{",
    b"nonsense",
    b'{"choices": 3}',
    b'{"choices":[{}],"usage":[]}',
    b'{"id":"\xff\xfe"}',
    b"[]",
    b"null",
    pytest.param(b'{"choices":' + b"[" * 20_000, id="nested"),
]


@pytest.mark.parametrize("body", NONSENSE)
async def test_odd_answers_reach_the_client_unchanged(body):
    said = b"data: " + body + b"\n\n"
    async with faulty_fleet(1) as router:
        whole = await router.ask("whole", saying(answering(body)))
        assert (whole.status_code, whole.content) == (200, body)
        streamed = await router.ask("streamed", saying(STREAM_HEAD + pieces(said, DONE) + b"0\r\n\r\n"), stream=True)
        assert (streamed.status_code, streamed.content) == (200, said + DONE)


@pytest.mark.parametrize("body", NONSENSE)
async def test_generate_with_a_nonsensical_answer_is_502_or_ends_with_an_error(body):
    good = {"index": 0, "text": "hi", "finish_reason": None, "token_ids": [1]}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    first = b"data: " + json.dumps({"id": "1", "choices": [good], "usage": usage}).encode() + b"\n\n"
    said = b"data: " + body + b"\n\n"
    async with faulty_fleet(1) as router:
        router.play.acts["whole"] = [saying(answering(body))]
        whole = await router.client.post("/generate", json={"text": "whole"})
        assert error_of(whole) == (502, "replica_unreachable")
        for name, events in (("at first", (said,)), ("later", (first, said))):
            raw = STREAM_HEAD + b"".join(pieces(event) for event in events) + pieces(DONE) + b"0\r\n\r\n"
            router.play.acts[name] = [saying(raw, each=len(STREAM_HEAD + pieces(events[0])), pause_s=0.01)]
            answer = await router.client.post("/generate", json={"text": name, "stream": True})
            assert events_of(answer.content)[-1] == DONE, (name, answer.content)
            assert b'"stream_broken"' in answer.content, (name, answer.content)


HALF = b'data: {"id": "1", "cho'


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("how", ["last chunk", "close"])
async def test_generate_ending_in_half_an_event_ends_with_an_error(how, at_once):
    good = {"index": 0, "text": "hi", "finish_reason": None, "token_ids": [1]}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    first = b"data: " + json.dumps({"id": "1", "choices": [good], "usage": usage}).encode() + b"\n\n"
    if how == "close":
        head, then = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n", "close"
        begun, rest = head + first, HALF
    else:
        begun, rest, then = STREAM_HEAD + pieces(first), pieces(HALF) + b"0\r\n\r\n", "stay"
    async with faulty_fleet(1) as router:
        each = len(begun + rest) if at_once else len(begun)
        router.play.usual = saying(begun + rest, then, each=each, pause_s=0.01)
        answer = await router.client.post("/generate", json={"text": "a", "stream": True})
        good_event, error, done = events_of(answer.content)
        assert json.loads(good_event.removeprefix(b"data: "))["text"] == "hi"
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "stream_broken"
        assert done == DONE


@pytest.mark.parametrize("field", [b"message", b"error"])
async def test_too_deeply_nested_error_reaches_the_client_unchanged(field):
    body = b'{"%b":' % field + b"[" * 100_000
    async with faulty_fleet(1) as router:
        answer = await router.ask("whole", saying(answering(body, status=b"400 Bad Request")))
        assert (answer.status_code, answer.content) == (400, body)
        first = saying(STREAM_HEAD + pieces(b'data: {"error":' + b"[" * 100_000 + b"\n\n") + b"0\r\n\r\n")
        assert error_of(await router.ask("streamed", first, stream=True)) == (503, "no_replica")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [*ENGINE_DEAD, SHUTTING_DOWN])
async def test_answer_of_an_ending_engine_is_retried_elsewhere(words, stream):
    said = json.dumps({"error": {"message": f"{words} (and so on)", "code": 500}}).encode()
    async with faulty_fleet(2) as router:
        ending = saying(answering(said, status=b"500 Internal Server Error"))
        answer = await router.ask("ending", ending, stream=stream)
        assert answer.status_code == 200
        assert router.play.asked == {"ending": 2}


@pytest.mark.parametrize("status", [b"429 Too Many Requests", b"500 Internal Server Error"])
async def test_other_engine_errors_and_their_retry_after_reach_the_client(status):
    said = b'{"error":{"message":"a bug","type":"x","param":null,"code":"x"}}'
    async with faulty_fleet(2) as router:
        answer = await router.ask("refused", saying(answering(said, b"retry-after: 7", status=status)))
        assert (answer.status_code, answer.content) == (int(status[:3]), said)
        assert answer.headers["retry-after"] == "7"
        assert router.play.asked == {"refused": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "status", [b"401 Unauthorized", b"403 Forbidden", b"407 Proxy Authentication Required"], ids=["401", "403", "407"]
)
async def test_engine_refusing_the_routers_key_is_not_a_client_error(status, stream):
    refused = saying(answering(b'{"error": "Unauthorized"}', b"www-authenticate: Bearer", status=status))
    async with faulty_fleet(2, breaker_failures=3) as router:
        answer = await router.ask("one", refused, stream=stream)
        assert (answer.status_code, router.play.asked["one"]) == (200, 2)
        answer = await router.ask("all", refused, refused, stream=stream)
        assert error_of(answer) == (503, "no_replica")
        assert "does not take this router's key (see engine_key" in answer.json()["error"]["message"]
        assert "www-authenticate" not in answer.headers
        assert router.parts.metrics.retries.label_values == [("engine_unauthorized",)]
        router.play.usual = refused
        for n in range(3):
            await router.ask(f"{n}", stream=stream)
        replicas = router.parts.discovery.fleet.replicas.values()
        assert {router.parts.scheduler.breaker.state(replica, router.parts.clock()) for replica in replicas} == {"open"}


async def test_held_back_choice_end_is_sent_when_its_stream_breaks():
    end = b'data: {"id":"1","choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n'
    async with faulty_fleet(1) as router:
        broken = saying(STREAM_HEAD + pieces(EVENTS[0], end), "close")
        answer = await router.ask("broken", broken, stream=True)
        *events, error, done = events_of(answer.content)
        assert (events, done) == ([EVENTS[0], end], DONE)
        assert b'"stream_broken"' in error


async def test_refusal_in_a_streams_internal_error_reaches_the_client():
    """vLLM 0.32's `/v1/messages`, of a schema that it can't compile."""
    said = "{'error': {'message': 'Invalid grammar', 'type': 'BadRequestError', 'param': None, 'code': 400}}"
    event = {"type": "error", "error": {"type": "internal_error", "message": said}}
    data = b"event: error\ndata: %b\n\n" % json.dumps(event, separators=(",", ":")).encode()
    async with faulty_fleet(2) as router:
        router.play.acts["None"] = [saying(STREAM_HEAD + pieces(data) + b"0\r\n\r\n")]
        body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": True}
        answer = await router.client.post("/v1/messages", json=body)
        assert (answer.status_code, answer.json()) == (400, event)
        assert router.play.asked == {"None": 1}


@pytest.mark.parametrize("kinds", [(b"response.created", b"response.in_progress"), ()])
async def test_a_response_that_no_engine_gets_beyond_its_begin_opens_no_circuit(kinds):
    """vLLM 0.32: of a schema that it can't compile; of `"truncation": null`, with nothing behind the head."""
    events = [b'event: %b\ndata: {"type":"%b"}\n\n' % (kind, kind) for kind in kinds]
    async with faulty_fleet(2, breaker_failures=3) as router:
        parts = router.parts
        for n in range(8):
            router.play.acts[f"p{n}"] = [saying(STREAM_HEAD + pieces(*events), "close")] * 2
            body = {"model": BASE, "input": "hi", "prompt": f"p{n}", "stream": True}
            answer = await router.client.post("/v1/responses", json=body)
            assert error_of(answer) == (503, "no_replica")
            assert "begun and nothing more" in answer.json()["error"]["message"]
            assert router.play.asked[f"p{n}"] == 2
        replicas = parts.discovery.fleet.replicas.values()
        assert {parts.scheduler.breaker.state(replica, parts.clock()) for replica in replicas} == {"closed"}


@pytest.mark.parametrize("lora_id", [None, "sql/v1"])
@pytest.mark.parametrize("is_heard", [True, False])
async def test_only_engine_is_retried_after_it_has_answered_again(lora_id, is_heard, monkeypatch):
    control = AgentDouble() if is_heard else AgentDouble(figures=UNHEARD)
    control.add_adapter("sql/v1", on=["w0"])
    named = {} if lora_id is None else {"lora_id": lora_id}
    wait_s = patience(20) if is_heard else 0.5
    async with faulty_fleet(1, control=control, failover_wait_s=wait_s, cold_start_timeout_s=wait_s) as router:
        decide, admitted = router.parts.queue.decide_or_enqueue, []

        def noted_decide(queued):
            admitted.append(queued)
            return decide(queued)

        monkeypatch.setattr(router.parts.queue, "decide_or_enqueue", noted_decide)
        await router.connect()
        answer = await router.ask("once", *[saying(b"", "reset")] * 2, **named)
        if not is_heard:
            assert answer.status_code == 503
            assert router.play.asked["once"] == 2  # the first on an idle connection says nothing
        else:
            assert answer.status_code == 200
            assert router.play.asked["once"] == 3
            # Twice says more of the request than of the engine.
            answer = await router.ask("always", *[saying(b"", "reset")] * 4, **named)
            assert error_of(answer) == (503, "no_replica")
            assert router.play.asked["always"] == 3
        # No request waits in the queue a second time.
        assert len(admitted) == (2 if is_heard else 1)


async def test_requests_missing_their_adapter_are_served_once_it_is_listed_again():
    control = with_sql("w0")
    control.list_age_s, control.ensure = 3600.0, ready_on_w0
    said = json.dumps({"error": {"message": "The model `sql/v1@abababababab` does not exist."}}).encode()
    lacking = saying(answering(said, status=b"404 Not Found"))
    # An engine that computed nothing is asked again without regard to the budget for retries.
    async with faulty_fleet(1, control=control, retry_share=0.0, retry_floor_per_s=0.0) as router:
        asks = [asyncio.create_task(router.ask(f"p{n}", lacking, lora_id="sql/v1")) for n in range(10)]
        await until(lambda: router.parts.cold_starts.held.requests == 10)
        # The agent's word is older than the engine's: it is not taken for the adapter's return.
        seen_at = router.parts.clock()
        await until(lambda: router.parts.discovery.fleet.replicas["w0"].report.at > seen_at)
        assert set(router.play.asked.values()) == {1}
        control.list_age_s = 0.0
        control.tell()
        answers = await asyncio.gather(*asks)
        assert [answer.status_code for answer in answers] == [200] * 10
        assert set(router.play.asked.values()) == {2}


@pytest.mark.parametrize("lora_id", [None, "sql/v1"])
async def test_long_request_waits_for_the_only_engine_that_takes_it(lora_id):
    control = AgentDouble(max_model_lens={"w0": 100})
    control.add_adapter("sql/v1", on=["w0", "w1"])
    named = {} if lora_id is None else {"lora_id": lora_id}
    async with faulty_fleet(
        2, control=control, failover_wait_s=patience(20), cold_start_timeout_s=patience(20)
    ) as router:
        await router.connect()
        prompt = list(range(200))
        router.play.acts[str(prompt)] = [saying(b"", "reset")] * 2
        answer = await router.client.post(COMPLETIONS, json={"model": BASE, "prompt": prompt, **named})
        assert (answer.status_code, answer.headers.get("x-lorafleet-worker")) == (200, "w1")
        assert router.play.asked[str(prompt)] == 3


@pytest.mark.parametrize("lora_id", [None, "sql/v1"])
async def test_living_engine_with_a_stream_error_is_not_waited_for(lora_id):
    """vLLM 0.32, of a number over 64 bits such as `top_k`."""
    error = {"message": "", "type": "InternalServerError", "param": None, "code": 500}
    event = b"data: %b\n\n" % json.dumps({"error": error}).encode()
    control = AgentDouble()
    control.add_adapter("sql/v1", on=["w0"])
    named = {} if lora_id is None else {"lora_id": lora_id}
    async with faulty_fleet(1, control=control, failover_wait_s=6000.0, cold_start_timeout_s=6000.0) as router:
        async with within(10):
            refused = await router.ask("x", saying(STREAM_HEAD + pieces(event, DONE)), stream=True, **named)
        assert error_of(refused) == (503, "no_replica")
        assert "w0: failed this request before" in refused.json()["error"]["message"]
        assert 'the last attempt: replica w0: 500 b\'{"error"' in refused.json()["error"]["message"]
        assert not control.ensured, "nothing is loaded elsewhere for it"
        assert (await router.ask("x", stream=True, **named)).content == CLEAN


async def test_requests_of_a_dying_engine_are_retried_once_and_alone():
    at_once, most, served = 0, 0, []

    async def careful(writer, body):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.005)
        at_once -= 1
        served.append(body["prompt"])
        return await sound(writer, body)

    async with faulty_fleet(2) as router:
        dies = asyncio.Event()

        async def doomed(writer, body):
            await dies.wait()
            return False

        router.play.usual = careful
        asking = [asyncio.create_task(router.ask(f"p{n}", doomed)) for n in range(12)]
        await _until_asked(router, 12)
        dies.set()
        answers = await asyncio.gather(*asking)
        assert [answer.status_code for answer in answers] == [200] * 12
        assert sorted(served) == sorted(f"p{n}" for n in range(12))
        assert set(router.play.asked.values()) == {2}
        # Two engines, and each had only the other's: one at a time at each.
        assert most <= 2


async def test_suspect_waiting_for_its_turn_counts_nowhere_and_blocks_no_request():
    go_on, dies = asyncio.Event(), asyncio.Event()

    async def slow(writer, body):
        await go_on.wait()
        return await sound(writer, body)

    async def doomed(writer, body):
        await dies.wait()
        return False

    async with faulty_fleet(2) as router:
        router.play.usual = slow
        asking = [asyncio.create_task(router.ask(f"p{n}", doomed)) for n in range(12)]
        await _until_asked(router, 12)
        dies.set()
        await _until_asked(router, 14)  # one at each
        assert [count for _, _, count in router.parts.scheduler.load.counts_by_name()] == [1, 1]
        router.play.usual = sound
        async with within(5):
            assert (await router.ask("meanwhile")).status_code == 200
        go_on.set()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}


async def _until_asked(router, count):
    await until(lambda: sum(router.play.asked.values()) >= count)


async def test_later_suspects_do_not_join_the_running_one():
    async with faulty_fleet(1) as router:
        parts, inside, most = router.parts, 0, 0
        go_on = asyncio.Event()

        async def suspect(wait):
            nonlocal inside, most
            async with parts.alone("w0"):
                inside += 1
                most = max(most, inside)
                await wait.wait()
                inside -= 1

        first_out = asyncio.Event()
        tasks = [asyncio.create_task(suspect(first_out)), asyncio.create_task(suspect(go_on))]
        await asyncio.sleep(0)
        first_out.set()
        while not tasks[0].done():
            await asyncio.sleep(0)
        tasks.append(asyncio.create_task(suspect(go_on)))
        for _ in range(5):
            await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*tasks)
        assert most == 1


async def test_an_answer_larger_than_may_be_held_is_not_asked_for_again():
    async with faulty_fleet(2, max_answer_bytes=10_000) as router:
        answer = await router.ask("large", saying(answering(b"a" * 20_000)))
        assert error_of(answer) == (400, "answer_too_large")
        assert "stream it, or ask for less" in answer.json()["error"]["message"]
        assert "retry-after" not in answer.headers
        assert router.play.asked["large"] == 1
        endless = b"data: " + b"a" * (9 * 2**20)
        answer = await router.ask("first", saying(STREAM_HEAD + pieces(endless), "hang"), stream=True)
        assert error_of(answer) == (400, "answer_too_large")
        assert "ask for less, or without stream" in answer.json()["error"]["message"]
        answer = await router.ask("endless", saying(STREAM_HEAD + pieces(EVENTS[0], endless), "hang"), stream=True)
        *_, error, _done = events_of(answer.content)
        assert b'"stream_broken"' in error
