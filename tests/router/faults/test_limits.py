"""What one key, one tenant or one deadline may take, end to end; and that each refusal is counted."""

import asyncio
import contextlib
import json

import pytest

from lorafleet.keys.key_files import hash_key, with_marks
from lorafleet.service.http import HttpError
from router.protocols.stored_responses import tagged_response_id
from tests.patience import patience, until
from tests.router.doubles import BASE, UNHEARD, AgentDouble
from tests.router.faults.faulty_fleet import (
    CHAT,
    COMPLETIONS,
    DONE,
    EVENTS,
    STREAM_HEAD,
    answering,
    error_of,
    events_of,
    faulty_fleet,
    pieces,
    saying,
)
from tests.wires import error_of as error_said

USAGE = {"prompt_tokens": 10, "completion_tokens": 50, "total_tokens": 60}
COUNTED = json.dumps({"id": "1", "model": BASE, "choices": [{"index": 0, "text": "hi"}], "usage": USAGE}).encode()
USAGE_EVENT = b"data: " + json.dumps({"choices": [], "usage": USAGE}, separators=(",", ":")).encode() + b"\n\n"


def key_file(folder, names="ab", **limits):
    """Keys `a` and `b` of tenants of the same names; `a` has these limits, if any."""
    path = folder / "keys.yaml"
    mine = {"limits": limits} if limits else {}
    keys = [
        {"sha256": hash_key(name), "tenant": name, "scopes": ["infer"], **(mine if name == "a" else {})}
        for name in names
    ]
    path.write_text(json.dumps({"keys": keys}))
    return {"key_files": (path,)}


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def counted(router, name, *labels):
    """A counter's value, by the metric's name here and its labels' values."""
    metric = getattr(router.parts.metrics, name)
    return metric.labels(*labels).value if labels in metric.label_values else 0


async def test_key_has_its_requests_per_minute_and_limit_headers(tmp_path):
    async with faulty_fleet(1, **key_file(tmp_path, requests_per_minute=3)) as router:
        for left in (2, 1, 0):
            answer = await router.ask("x", headers=bearer("a"))
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
        refused = await router.ask("x", headers=bearer("a"))
        assert error_of(refused) == (429, "rate_limited")
        assert 15 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert "3 requests per minute" in refused.json()["error"]["message"]
        assert router.play.asked["x"] == 3
        other = await router.ask("x", headers=bearer("b"))
        assert other.status_code == 200
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]
        assert counted(router, "rate_limited", "requests_per_minute") == 1
        assert counted(router, "requests", COMPLETIONS, 429, "rate_limited") == 1


async def test_keys_of_a_tenant_have_its_limits_together(tmp_path):
    path = tmp_path / "keys.yaml"
    keys = [{"sha256": hash_key(name), "tenant": "acme", "scopes": ["infer"]} for name in "ab"]
    keys[0]["limits"] = {"requests_per_minute": 10, "bytes_per_minute": 10**6}
    path.write_text(json.dumps({"keys": keys, "tenants": {"acme": {"limits": {"requests_per_minute": 3}}}}))
    async with faulty_fleet(1, key_files=(path,)) as router:
        for key in "aab":
            answer = await router.ask("x", headers=bearer(key))
            assert (answer.status_code, answer.headers["x-ratelimit-limit-requests"]) == (200, "3")
        for key in "ab":
            refused = await router.ask("x", headers=bearer(key))
            assert error_of(refused) == (429, "rate_limited")
            assert "all keys of tenant acme together have a limit of 3" in refused.json()["error"]["message"]
        assert counted(router, "rate_limited", "tenant_requests_per_minute") == 2


async def test_a_budget_tells_its_soft_line_and_refuses_at_its_hard_line(tmp_path):
    limits = key_file(tmp_path, soft_tokens_per_day=60, tokens_per_day=120)
    async with faulty_fleet(1, **limits) as router:
        router.play.usual = saying(answering(COUNTED))
        told = []
        for _ in range(2):
            answer = await router.ask("x", headers=bearer("a"))
            assert answer.status_code == 200
            told.append(answer.headers.get("x-lorafleet-budget", ""))
        assert told[0] == ""
        assert told[1].startswith("tokens_per_day; spent=60, soft=60, hard=120, resets=")
        for body in ("x", "x" * 100_000):
            refused = await router.ask(body, headers=bearer("a"))
            assert error_of(refused) == (429, "budget_exhausted")
            assert 1 <= int(refused.headers["retry-after"]) <= 86_400
            message = refused.json()["error"]["message"]
            assert "a budget of 120 tokens a day, of which 120 are spent; it is reset at 20" in message
        batch = await router.client.post("/generate", json={"text": ["t0", "t1"]}, headers=bearer("a"))
        assert error_of(batch) == (429, "budget_exhausted")
        assert (router.play.asked["x"], router.play.asked["t0"]) == (2, 0)
        assert (await router.ask("x", headers=bearer("b"))).status_code == 200
        assert counted(router, "rate_limited", "tokens_per_day") == 3
        assert counted(router, "requests", COMPLETIONS, 429, "budget_exhausted") == 2
        for line in ("soft", "hard"):
            await until(lambda line=line: counted(router, "budget_lines", "tokens_per_day", line) == 1)
        raised = {"keys": [{"sha256": hash_key("a"), "scopes": ["infer"], "limits": {"tokens_per_day": 121}}]}
        limits["key_files"][0].write_text(with_marks(json.dumps(raised)))

        async def opens():
            return (await router.ask("x", headers=bearer("a"))).status_code == 200

        await until(opens)


@pytest.mark.parametrize("stream", [False, True])
async def test_key_is_charged_the_engines_token_count(tmp_path, stream):
    said = saying(STREAM_HEAD + pieces(*EVENTS[:2], USAGE_EVENT, DONE) + b"0\r\n\r\n" if stream else answering(COUNTED))
    async with faulty_fleet(1, **key_file(tmp_path, tokens_per_minute=100)) as router:
        for _ in range(2):
            answer = await router.ask("x", said, stream=stream, headers=bearer("a"))
            assert answer.status_code == 200
            assert b"usage" not in answer.content or not stream
            assert answer.headers["x-ratelimit-limit-tokens"] == "100"
        (account,) = router.parts.quotas.accounts.values()
        assert -20 <= account.tokens.level < -15
        refused = await router.ask("x", said, stream=stream, headers=bearer("a"))
        assert error_of(refused) == (429, "rate_limited")
        assert int(refused.headers["retry-after"]) > 10
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        assert counted(router, "rate_limited", "tokens_per_minute") == 1


async def test_answer_of_bytes_keeps_its_metadata_and_is_charged_by_it(tmp_path):
    usage = {"prompt_tokens": 70, "total_tokens": 70}
    decoded = {"id": "e", "model": BASE, "data": [{"start": 0, "end": 8}], "usage": usage}
    head = b"content-type: application/octet-stream\r\nmetadata: %b\r\n" % json.dumps(decoded).encode()
    async with faulty_fleet(1, **key_file(tmp_path, tokens_per_minute=100)) as router:
        router.play.usual = saying(b"HTTP/1.1 200 OK\r\n%bcontent-length: 8\r\n\r\n%b" % (head, bytes(8)))
        for left in (100, 30):
            body = {"model": BASE, "input": "", "encoding_format": "bytes"}
            answer = await router.client.post("/v1/embeddings", json=body, headers=bearer("a"))
            assert (answer.status_code, answer.content) == (200, bytes(8))
            assert json.loads(answer.headers["metadata"]) == decoded
            assert left - 25 < int(answer.headers["x-ratelimit-remaining-tokens"]) <= left


async def test_failed_and_refused_requests_cost_no_tokens_and_free_their_slot(tmp_path):
    refusal = answering(b'{"error": {"message": "no"}}', status=b"400 Bad Request")
    limits = key_file(tmp_path, tokens_per_minute=1000, concurrent_requests=1)
    async with faulty_fleet(1, control=AgentDouble(figures=UNHEARD), **limits, failover_wait_s=0.05) as router:
        key = bearer("a")
        assert (await router.ask("refused", saying(refusal), headers=key)).status_code == 400
        # Twice: a connection that was used before may have been closed for having been idle.
        broken = await router.ask("broken", saying(b"", "close"), saying(b"", "close"), headers=key)
        assert error_of(broken) == (503, "no_replica")
        assert error_of(await router.ask("absent", model="absent", headers=key)) == (404, "model_not_found")
        (account,) = router.parts.quotas.accounts.values()
        assert account.tokens.level == 1000
        late = await router.ask("late", saying(b"", "hang"), headers=key | {"x-lorafleet-timeout-s": "0.1"})
        assert error_of(late) == (504, "deadline_exceeded")
        leaving = asyncio.create_task(router.ask("left", saying(b"", "hang"), headers=key))
        await until(lambda: router.play.asked["left"])
        over = await router.ask("second", headers=key)
        assert error_of(over) == (429, "rate_limited")
        assert "1 requests at once" in over.json()["error"]["message"]
        assert counted(router, "rate_limited", "concurrent_requests") == 1
        leaving.cancel()
        await until(router.is_idle)
        assert (await router.ask("well", headers=key)).status_code == 200


async def test_too_large_answer_is_charged_its_prompt(tmp_path):
    async with faulty_fleet(1, **key_file(tmp_path, tokens_per_minute=10_000), max_answer_bytes=10_000) as router:
        for _ in range(3):
            large = saying(answering(b"a" * 20_000))
            answer = await router.ask("x" * 8000, large, headers=bearer("a"))
            assert error_of(answer) == (400, "answer_too_large")
        left = (await router.ask("y", headers=bearer("a"))).headers["x-ratelimit-remaining-tokens"]
        assert int(left) < 5000


async def test_batch_items_are_counted_queued_and_refused_beyond_the_quota(tmp_path):
    async with faulty_fleet(1, **key_file(tmp_path, requests_per_minute=5, concurrent_requests=2)) as router:
        choice = {"index": 0, "text": "hi", "finish_reason": "stop", "token_ids": [1]}
        router.play.usual = saying(answering(json.dumps(json.loads(COUNTED) | {"choices": [choice]}).encode()))
        key = bearer("a")

        async def batch(count):
            return await router.client.post("/generate", json={"text": [f"t{n}" for n in range(count)]}, headers=key)

        assert error_of(await batch(6)) == (400, "invalid_request_body")  # its body was read: it counts as one request
        assert error_of(await batch(5)) == (429, "rate_limited")
        assert len((await batch(4)).json()) == 4
        assert error_of(await batch(2)) == (429, "rate_limited")
        assert counted(router, "rate_limited", "requests_per_minute") == 2
        assert counted(router, "rate_limited", "concurrent_requests") == 0


async def test_batch_holds_its_quota_from_start_to_end(tmp_path):
    choice = {"index": 0, "text": "hi", "finish_reason": "stop", "token_ids": [1]}
    answered, go_on = answering(json.dumps(json.loads(COUNTED) | {"choices": [choice]}).encode()), asyncio.Event()

    async def slow(writer, _body):
        await go_on.wait()
        writer.write(answered)
        await writer.drain()
        return True

    async with faulty_fleet(1, **key_file(tmp_path, requests_per_minute=5, concurrent_requests=2)) as router:
        key, ask = bearer("a"), {"text": ["t0", "t1", "t2", "t3"]}
        router.play.usual = slow
        single = asyncio.create_task(router.ask("single", headers=key))
        await until(lambda: router.play.asked["single"] == 1)
        batch = asyncio.create_task(router.client.post("/generate", json=ask, headers=key))
        await until(lambda: router.play.asked["t0"] == 1)
        assert not router.play.asked["t1"], "the key may have two under way, and has the single one"
        refused = await router.ask("more", headers=key)
        assert error_of(refused) == (429, "rate_limited")
        assert "requests at once" in refused.json()["error"]["message"]
        go_on.set()
        assert [answer.status_code for answer in await asyncio.gather(single, batch)] == [200, 200]
        (account,) = router.parts.quotas.accounts.values()
        assert (account.running, account.requests.level < 1) == (0, True)
        refused = await router.client.post("/generate", json={"text": ["u0", "u1", "u2"]}, headers=key)
        assert error_of(refused) == (429, "rate_limited")
        assert 20 < int(refused.headers["retry-after"]) <= 36
        assert not router.play.asked["u0"], "all or none, before anything is sent"


async def test_failed_batch_gives_back_the_quota_of_unbegun_items(tmp_path):
    async with faulty_fleet(1, **key_file(tmp_path, requests_per_minute=10, concurrent_requests=1)) as router:
        key, ask = bearer("a"), {"text": [f"t{n}" for n in range(8)]}

        def left():
            (account,) = router.parts.quotas.accounts.values()
            return account.running, round(account.requests.level)

        router.play.acts["t1"] = [saying(answering(b'{"error": {"message": "no"}}', status=b"400 Bad Request"))]
        choice = {"index": 0, "text": "hi", "finish_reason": "stop", "token_ids": [1]}
        router.play.usual = saying(answering(json.dumps(json.loads(COUNTED) | {"choices": [choice]}).encode()))
        assert (await router.client.post("/generate", json=ask, headers=key)).status_code == 400
        begun = router.play.asked.total()
        assert 2 <= begun <= 3, "the next one may have begun before all ended"
        assert left() == (0, 10 - begun)
        router.play.acts["t0"] = [saying(b"", "hang")]
        ask["text"] = ask["text"][:6]
        leaving = asyncio.create_task(router.client.post("/generate", json=ask, headers=key))
        await until(lambda: router.play.asked["t0"] == 2)
        assert left() == (1, 4 - begun)
        leaving.cancel()
        await until(lambda: left() == (0, 9 - begun))


async def never(control, lora_id):
    await asyncio.Event().wait()


async def test_tenant_cannot_fill_the_cold_start_queue_or_all_loads(tmp_path):
    control = AgentDouble(ensure=never)
    for number in range(4):
        control.add_adapter(f"cold-{number}/v1")
    limits = {"max_held_requests": 4, "tenant_share": 0.5, "max_cold_adapters_per_tenant": 1}
    async with faulty_fleet(1, control=control, **key_file(tmp_path), **limits) as router:

        def ask(key, number):
            return router.ask("x", lora_id=f"cold-{number}/v1", model=None, headers=bearer(key))

        def held(key, number):
            return asyncio.create_task(ask(key, number))

        waiting = [held("a", 0)]
        await until(lambda: router.parts.cold_starts.held.requests == 1)
        another = await ask("a", 1)
        assert error_of(another) == (429, "saturated")
        assert int(another.headers["retry-after"]) >= 1
        assert "1 adapters are being loaded for you" in another.json()["error"]["message"]
        waiting.append(held("a", 0))
        await until(lambda: router.parts.cold_starts.held.requests == 2)
        assert "2 requests of yours" in (await ask("a", 0)).text
        waiting += [held("b", 2), held("b", 2)]
        await until(lambda: router.parts.cold_starts.held.requests == 4)
        assert "4 requests wait already" in (await ask("b", 2)).text
        assert control.ensured == ["cold-0/v1", "cold-2/v1"]
        assert counted(router, "requests", COMPLETIONS, 429, "saturated") == 3
        waiting[0].cancel()
        await until(lambda: router.parts.cold_starts.held.requests == 3)
        waiting.append(held("a", 0))
        await until(lambda: router.parts.cold_starts.held.requests == 4)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(router.is_idle)


async def test_a_deadline_ends_a_request_wherever_it_is_and_its_engine_stops():
    control = AgentDouble(ensure=never)
    control.add_adapter("cold/v1")
    limit, later = {"x-lorafleet-timeout-s": "0.15"}, {"x-lorafleet-timeout-s": str(patience(0.3))}
    begun = saying(STREAM_HEAD + pieces(EVENTS[0]), "hang")
    async with faulty_fleet(1, control=control) as router:
        cold = router.ask("cold", lora_id="cold/v1", model=None, headers=limit)
        hanging = router.ask("hanging", saying(b"", "hang"), headers=limit)
        # These two have to begin in time.
        streaming = router.ask("streaming", begun, stream=True, headers=later)
        router.play.acts["batch"] = [saying(b"", "hang")]
        router.play.acts["batch, streamed"] = [begun]
        batch = router.client.post("/generate", json={"text": ["batch", "well"]}, headers=limit)
        streamed = router.client.post("/generate", json={"text": "batch, streamed", "stream": True}, headers=later)
        *ended, broken, _grown = await asyncio.wait_for(
            asyncio.gather(cold, hanging, batch, streaming, streamed), patience(5)
        )
        assert [error_of(answer) for answer in ended] == [(504, "deadline_exceeded")] * 3
        *_, error, done = events_of(broken.content)
        assert (b'"deadline_exceeded"' in error, done) == (True, DONE)
        assert counted(router, "requests", "/generate", 504, "deadline_exceeded") == 1
        await until(router.is_idle)


async def test_deadline_behind_a_streams_last_event_adds_no_error():
    async with faulty_fleet(1) as router:
        said = saying(STREAM_HEAD + pieces(*EVENTS), "hang")
        answer = await router.ask("x", said, stream=True, headers={"x-lorafleet-timeout-s": str(patience(0.3))})
        assert answer.content == b"".join(EVENTS)
        assert counted(router, "requests", COMPLETIONS, 200, "") == 1
        await until(router.is_idle)


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "soon", "", "1e400"])
async def test_invalid_deadline_is_400_and_distant_one_changes_nothing(given):
    async with faulty_fleet(1) as router:
        refused = await router.ask("x", headers={"x-lorafleet-timeout-s": given})
        assert error_of(refused) == (400, "invalid_request_body")
        assert (await router.ask("y", headers={"x-lorafleet-timeout-s": "1e300"})).status_code == 200


def begun(key, size_bytes):
    """A request with so much of the 10,000 bytes of its body."""
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    )
    return f"{head}content-length: 10000\r\n\r\n".encode() + b" " * size_bytes


def is_known(keys, key):
    with contextlib.suppress(HttpError):
        return keys.caller(f"Bearer {key}") is not None
    return False


async def test_no_tenant_takes_all_memory_for_bodies(tmp_path):
    settings = {"max_body_bytes": 10_000, "max_bodies_bytes": 20_000, **key_file(tmp_path)}
    async with faulty_fleet(1, **settings) as router, contextlib.AsyncExitStack() as clients:

        async def begin(key, size_bytes):
            client = await clients.enter_async_context(await router.raw())
            client.send(begun(key, size_bytes))
            return client

        strangers = [await begin("wrong", 9000) for _ in range(3)]
        await until(lambda: sum(each.body_bytes for each in router.listener.connections) == 27_000)
        assert router.listener.intake.room.held_bytes == 0
        await begin("a", 9000)
        await until(lambda: router.listener.intake.room.held_bytes == 9000)
        assert error_said(await (await begin("a", 1001)).rest()) == (429, "saturated")
        assert (await router.ask("x", headers=bearer("b"))).status_code == 200
        strangers[0].send(b" " * 1000)
        status, _, body = await strangers[0].answer()
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
        assert router.listener.intake.room.held_bytes == 9000


async def test_key_that_became_valid_during_its_body_gets_401(tmp_path):
    settings = key_file(tmp_path)
    async with faulty_fleet(1, max_body_bytes=10_000, **settings) as router, await router.raw() as client:
        client.send(begun("late", 9000))
        await until(lambda: any(each.body_bytes == 9000 for each in router.listener.connections))
        key_file(tmp_path, names=["late"])
        await until(lambda: is_known(router.parts.keys, "late"))
        client.send(b" " * 1000)
        status, _, body = await client.answer()
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")


async def test_every_refusal_is_counted_under_its_own_code(tmp_path):
    control = AgentDouble(ensure=never, figures=UNHEARD)
    control.add_adapter("cold/v1")
    settings = {"max_body_bytes": 1000, "cold_start_timeout_s": 0.1, "failover_wait_s": 0.05, **key_file(tmp_path)}
    settings["metrics_need_key"] = False
    async with faulty_fleet(1, control=control, **settings) as router:
        key = bearer("a")
        broken = saying(b"", "close")
        await router.ask("no key")
        await router.ask("absent", model="absent", headers=key)
        await router.ask("cold", lora_id="cold/v1", model=None, headers=key)
        await router.ask("broken", broken, headers=key)
        await router.client.post(COMPLETIONS, content=b"{", headers=key)
        await router.client.post(COMPLETIONS, content=b"a" * 2000, headers=key)
        await router.client.get(COMPLETIONS)
        async with await router.raw() as client:
            client.send(b"GET / HTTP/1.1\r\n\r\n")
            await client.rest()
        shown = (await router.client.get("/metrics")).text
        for status, code in (
            (400, "invalid_request_body"),
            (401, "invalid_api_key"),
            (404, "model_not_found"),
            (405, "method_not_allowed"),
            (503, "adapter_loading"),
            (503, "no_replica"),
        ):
            labels = f'{{code="{code}",route="{COMPLETIONS}",status="{status}"}}'
            assert f"lorafleet_router_requests_total{labels} 1.0" in shown, (code, shown)
        for code in ("body_too_large", "invalid_http"):
            assert f'lorafleet_router_refused_requests_total{{code="{code}"}} 1.0' in shown
        assert 'lorafleet_router_retries_total{reason="no_answer"} 1.0' in shown


# --- other ways to be refused


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate", "/v1/messages", "/tokenize", "/v1/rerank"])
async def test_a_wrong_method_is_a_405_that_names_the_right_one(path):
    async with faulty_fleet(1) as router:
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
            answer = await router.client.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST"), method
            if method != "HEAD":
                assert error_of(answer) == (405, "method_not_allowed")
                assert answer.json().get("type") == ("error" if path == "/v1/messages" else None)
        for method, app_path, allowed in (("DELETE", "/v1/models", "GET"), ("GET", "/v1/route", "POST")):
            answer = await router.client.request(method, app_path)
            assert (error_of(answer), answer.headers["allow"]) == ((405, "method_not_allowed"), allowed)
        assert error_of(await router.client.get("/nowhere")) == (404, "not_found")


@pytest.mark.parametrize(("path", "allowed"), [("", "GET"), ("/cancel", "POST")])
async def test_wrong_method_at_a_stored_response_is_405(path, allowed):
    async with faulty_fleet(1) as router:
        for method in {"GET", "PUT", "DELETE", "POST"} - {allowed}:
            answer = await router.client.request(method, f"/v1/responses/resp_{method}{path}")
            assert (error_of(answer), answer.headers["allow"]) == ((405, "method_not_allowed"), allowed)
        assert {route for route, *_ in router.parts.metrics.requests.label_values} == {f"/v1/responses/{{id}}{path}"}
        assert error_of(await router.client.delete("/v1/responses/a/b")) == (404, "not_found")


async def test_anthropic_clients_have_their_own_header_and_error_shape(tmp_path):
    ask = {"model": BASE, "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    limits = key_file(tmp_path, requests_per_minute=2)
    first = b'event: message_start\ndata: {"type":"message_start","message":{"model":"tiny-qwen"}}\n\n'
    async with faulty_fleet(1, **limits) as router:

        async def said(body, key="a", **headers):
            found = await router.client.post("/v1/messages", json=body, headers={"x-api-key": key, **headers})
            decoded = found.json()
            assert decoded["type"] == "error"
            assert isinstance(decoded["error"]["message"], str)
            return found.status_code, decoded["error"]["code"], decoded["error"]["type"]

        assert await said(ask, key="wrong") == (401, "invalid_api_key", "authentication_error")
        assert await said({**ask, "model": "absent"}) == (404, "model_not_found", "not_found_error")
        router.play.acts["None"] = [saying(STREAM_HEAD + pieces(first), "close")]
        broken = await router.client.post("/v1/messages", json={**ask, "stream": True}, headers={"x-api-key": "a"})
        assert broken.status_code == 200
        start, error = events_of(broken.content)
        assert start == first
        assert error.startswith(b"event: error\ndata: ")
        decoded = json.loads(error.split(b"data: ")[1])
        assert (decoded["type"], decoded["error"]["type"]) == ("error", "api_error")
        assert await said(ask) == (429, "rate_limited", "rate_limit_error")
        refused = (400, "invalid_request_body", "invalid_request_error")
        assert await said(ask, key="b", **{"x-lorafleet-timeout-s": "no"}) == refused


async def waiting_for(router, path, body, *, count):
    """So many requests, of which one is at an engine that says nothing, and others wait, as many as may."""
    router.play.usual = saying(b"", "hang")
    asking = [asyncio.create_task(router.client.post(path, json=body)) for _ in range(count)]
    await until(lambda: any(task.done() for task in asking) and sum(router.play.asked.values()) == 1)
    assert len(router.parts.scheduler.queue)
    return asking


async def given_up(asking):
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_what_follows_up_on_a_response_waits_its_turn_as_everybody_does():
    async with faulty_fleet(2, late_binding_s=0.01, max_waiting_requests=3) as router:
        earlier = tagged_response_id("r", "", tenant=None, worker="w0")
        body = {"model": BASE, "input": "x" * 8000, "previous_response_id": earlier}
        asking = await waiting_for(router, "/v1/responses", body, count=5)
        assert [error_of(task.result()) for task in asking if task.done()] == [(429, "saturated")]
        await given_up(asking)


async def test_follow_up_on_a_lost_workers_response_is_refused():
    async with faulty_fleet(2) as router:
        earlier = tagged_response_id("r", "", tenant=None, worker="w9")
        for more in ({}, {"background": True}, {"stream": True}):
            body = {"model": BASE, "input": "x", "previous_response_id": earlier} | more
            answer = await router.client.post("/v1/responses", json=body)
            assert error_of(answer) == (404, "response_not_found")
            error = answer.json()["error"]
            assert ("'w9', which is gone" in error["message"], error["param"]) == (True, "previous_response_id")
        assert not router.play.asked


async def test_ids_of_responses_that_are_no_texts_are_their_engines_to_refuse():
    async with faulty_fleet(1) as router:
        given = {"model": BASE, "input": "x", "request_id": 3, "previous_response_id": [4]}
        await router.client.post("/v1/responses", json=given)
        (sent,) = [json.loads(body) for engine in router.engines for body in engine.requests]
        assert (sent["request_id"], sent["previous_response_id"]) == (3, [4])


async def test_tokenize_requests_need_no_room_and_take_none(tmp_path):
    limits = key_file(tmp_path, tokens_per_minute=100)
    async with faulty_fleet(1, late_binding_s=0.01, max_waiting_requests=3, **limits) as router:
        router.client.headers.update(bearer("b"))
        asking = await waiting_for(router, COMPLETIONS, {"model": BASE, "prompt": "x" * 8000}, count=5)
        router.play.usual = saying(answering(b'{"count": 1}'))
        for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens"):
            for more in ({}, {"x-lorafleet-timeout-s": str(patience(20))}):
                body = {"model": BASE, "prompt": "y" * 8000, "messages": [], "tokens": [1]}
                answer = await router.client.post(path, json=body, headers=bearer("a") | more)
                assert (answer.status_code, answer.headers["x-ratelimit-remaining-tokens"]) == (200, "100"), path
        await given_up(asking)


async def test_stored_response_is_asked_of_its_own_engine_only(tmp_path):
    async with faulty_fleet(2, **key_file(tmp_path)) as router:
        targets = []

        async def keeping(engine, reader, writer):
            """Answers with what was asked; `hang` hangs."""
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(size) or b"{}")
                targets.append((router.engines.index(engine), method, target))
                if "hang" in target:
                    await reader.read()  # until the router has gone
                    return
                decoded = {"id": body.get("request_id", target.split("/")[-1]), "object": "response", "model": BASE}
                writer.write(answering(json.dumps(decoded).encode()))

        for engine in router.engines:
            engine.script = keeping
        made = await router.client.post("/v1/responses", json={"model": BASE, "input": "hi"}, headers=bearer("a"))
        name, home = made.json()["id"], int(made.headers["x-lorafleet-worker"][1:])
        for method, path in (("GET", f"/v1/responses/{name}"), ("POST", f"/v1/responses/{name}/cancel")):
            kept = await router.client.request(method, path, headers=bearer("a"))
            assert (kept.status_code, kept.headers["x-lorafleet-worker"]) == (200, f"w{home}")
            assert targets[-1] == (home, method, path)
            asked = len(targets)
            foreign = await router.client.request(method, path, headers=bearer("b"))
            assert error_of(foreign) == (404, "response_not_found")
            assert len(targets) == asked
        with_query = await router.client.get(f"/v1/responses/{name}?starting_after=3&include=x", headers=bearer("a"))
        assert with_query.status_code == 200
        assert targets[-1][2].endswith("?starting_after=3&include=x")
        limit = bearer("a") | {"x-lorafleet-timeout-s": "0.1"}
        late = await asyncio.wait_for(router.client.get(f"/v1/responses/{name}?hang", headers=limit), patience(5))
        assert error_of(late) == (504, "deadline_exceeded")
        follow = {"model": BASE, "input": "more", "previous_response_id": name}
        for _ in range(4):
            answer = await router.client.post("/v1/responses", json=follow, headers=bearer("a"))
            assert (answer.status_code, answer.headers["x-lorafleet-worker"]) == (200, f"w{home}")
        router.engines[home].server.close()
        for writer in list(router.engines[home].open):
            writer.transport.abort()
        for ask in (
            router.client.get(f"/v1/responses/{name}", headers=bearer("a")),
            router.client.post("/v1/responses", json=follow, headers=bearer("a")),
        ):
            assert error_of(await ask) == (503, "no_replica")
