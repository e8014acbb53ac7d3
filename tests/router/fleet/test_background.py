"""Responses in the background: what counts for them, and for how long."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lorafleet.keys.key_files import hash_key
from router.core.errors import Saturated
from router.core.fleet import EngineReport
from router.fleet.background import Background
from router.http.engine_connection import EngineLost
from router.http.fetch import FetchRefused
from tests.patience import until
from tests.router.core.schedule.test_policy import a_replica
from tests.router.doubles import BASE, AgentDouble, EngineDouble, error_of, fleet
from workers.wire import Load

RESPONSES = "/v1/responses"
ASK = {"model": BASE, "input": "hello", "background": True}
USAGE = {"input_tokens": 10, "output_tokens": 800, "total_tokens": 810}
DELTAS = 600
KEY = {"authorization": "Bearer a"}


@dataclass
class Keeper(EngineDouble):
    """Queues responses as vLLM does, and says of each what `kept` has."""

    kept: dict[str, dict] = field(default_factory=dict)
    posted: int = 0
    asked: int = 0

    def over(self, status: str = "completed", usage: dict | None = USAGE) -> None:
        """All of them are."""
        for response in self.kept.values():
            response |= {"status": status, "usage": usage}

    @property
    def app(self):
        async def create(request: Request):
            body = await request.json()
            self.posted += 1
            response = {"id": body["request_id"], "model": body["model"], "status": "queued", "usage": None}
            self.kept[body["request_id"]] = response
            if not body.get("stream"):
                return JSONResponse(response)

            async def events():
                for kind in ("response.created", *["response.output_text.delta"] * DELTAS):
                    yield f"event: {kind}\ndata: {json.dumps({'type': kind})}\n\n".encode()
                await self.go_on.wait()
                end = {"type": "response.completed", "response": response | {"status": "completed", "usage": USAGE}}
                yield f"event: response.completed\ndata: {json.dumps(end)}\n\n".encode()

            return StreamingResponse(events(), media_type="text/event-stream")

        async def retrieve(request: Request):
            self.asked += 1
            found = self.kept.get(request.path_params["id"])
            return JSONResponse(found or {"error": {"message": "not found"}}, 200 if found else 404)

        async def cancel(request: Request):
            self.over("cancelled", None)
            return JSONResponse(self.kept[request.path_params["id"]])

        return Starlette(
            routes=[
                Route(RESPONSES, create, methods=["POST"]),
                Route(f"{RESPONSES}/{{id}}", retrieve),
                Route(f"{RESPONSES}/{{id}}/cancel", cancel, methods=["POST"]),
                Route("/tokenize", lambda _: Response(status_code=400), methods=["POST"]),
                Route("/health", lambda _: Response()),
            ]
        )


@contextlib.asynccontextmanager
async def keeping(tmp_path, **settings):
    """(client with key `a`, the engine, the router's parts, the control plane); the engine says that it is busy."""
    keys = tmp_path / "keys.json"
    limits = {"concurrent_requests": 1, "tokens_per_minute": 1000}
    keys.write_text(json.dumps({"keys": [{"sha256": hash_key("a"), "scopes": ["infer"], "limits": limits}]}))
    engine = Keeper("w0")
    busy = AgentDouble(figures=Load(running=1))
    async with fleet(engine, control=busy, key_files=(keys,), **settings) as (client, control, parts):
        client.headers.update(KEY)
        yield client, engine, parts, control


def level(parts):
    """What the key has left of its 1,000 tokens a minute."""
    (account,) = parts.quotas.accounts.values()
    return account.tokens.level


def in_flight(parts):
    return [(worker, count) for worker, _, count in parts.scheduler.load.counts_by_name()]


def over(parts):
    return until(lambda: not in_flight(parts))


async def test_background_response_holds_its_quota_until_its_engine_ends_it(tmp_path):
    async with keeping(tmp_path) as (client, engine, parts, _):
        queued = await client.post(RESPONSES, json=ASK)
        assert (queued.status_code, queued.json()["status"]) == (200, "queued")
        await until(lambda: engine.asked == 2)
        assert in_flight(parts) == [("w0", 1)]
        refused = await client.post(RESPONSES, json=ASK)
        assert error_of(refused) == (429, "rate_limited")
        assert level(parts) > 900
        engine.over()
        await over(parts)
        assert level(parts) < 400
        assert not len(parts.background)
        asked = engine.asked
        assert (await client.post(RESPONSES, json=ASK)).status_code == 200, "its key has room again"
        assert engine.asked == asked


@pytest.mark.parametrize("how", ["fetched", "cancelled"])
async def test_an_end_that_its_client_is_told_of_ends_it_at_once(tmp_path, how):
    async with keeping(tmp_path) as (client, engine, parts, _):
        made = (await client.post(RESPONSES, json=ASK)).json()["id"]
        assert (await client.get(f"{RESPONSES}/{made}")).json()["status"] == "queued"
        assert in_flight(parts) == [("w0", 1)]
        if how == "fetched":
            engine.over()
            told = await client.get(f"{RESPONSES}/{made}")
        else:
            told = await client.post(f"{RESPONSES}/{made}/cancel")
        assert told.status_code == 200
        assert not in_flight(parts)
        assert (level(parts) < 400) == (how == "fetched")


async def test_its_prompt_is_not_taken_for_computed_when_it_is_only_queued(tmp_path):
    async with keeping(tmp_path) as (client, engine, parts, _):
        await client.post(RESPONSES, json=ASK)
        assert [record.first_data_s for record in parts.decisions] == [None]
        engine.over()
        await over(parts)
        assert all(record.first_data_s is not None for record in parts.decisions)


@pytest.mark.parametrize("how", ["forgotten", "restarted"])
async def test_one_that_its_engine_does_not_work_on_any_more_is_over(tmp_path, how):
    async with keeping(tmp_path) as (client, engine, parts, control):
        await client.post(RESPONSES, json=ASK)
        if how == "forgotten":
            engine.kept.clear()
        else:
            control.boot_id = "second"
        await until(lambda: not len(parts.background))
        assert not in_flight(parts)
        assert (await client.post(RESPONSES, json=ASK)).status_code == 200


@pytest.mark.parametrize("how", ["gone", "its agent starts anew"])
async def test_a_worker_that_is_nowhere_for_a_moment_works_on(how):
    looks = []
    nowhere = None if how == "gone" else a_replica("w0", engine_url="", engine_boot_id="", state="starting")

    def replica_of(worker):
        looks.append(worker)
        return nowhere if len(looks) == 1 else a_replica(worker, engine_boot_id="b")

    async def ask(replica, response_id):
        return json.dumps({"status": "completed", "usage": USAGE}).encode()

    over = asyncio.get_running_loop().create_future()
    background = Background(ask, replica_of, most=1, tenant_share=1.0, timeout_s=60.0)
    background.enter("")
    background.follow("r", ("w0", "b"), "", lambda usage, tokens: over.set_result(usage))
    usage = await over
    assert usage is not None
    assert usage.completion_tokens == USAGE["output_tokens"]


async def test_engine_briefly_away_or_nonsensical_is_polled_again():
    refused, lost = FetchRefused("503", 503, b"busy"), EngineLost("no_answer", "closed")
    troubles = [refused, lost, b"no JSON", b'{"status": 3}', b'{"status": ""}', b"\xff", b"[" * 100_000]
    told, found = dict(enumerate(troubles)), {}

    async def ask(replica, response_id):
        answer = told.pop(int(response_id), json.dumps({"status": "completed", "usage": USAGE}).encode())
        if isinstance(answer, Exception):
            raise answer
        return answer

    replica = a_replica("w0", engine_boot_id="b")
    background = Background(ask, lambda _: replica, most=len(troubles), tenant_share=1.0, timeout_s=60.0)
    for number in told:
        background.enter("")
        over = partial(lambda number, usage, _: found.update({number: usage}), number)
        background.follow(str(number), ("w0", "b"), "", over)
    await until(lambda: not len(background))
    assert not told
    assert [usage and usage.completion_tokens for usage in found.values()] == [USAGE["output_tokens"]] * len(troubles)


async def test_responses_of_a_gone_engine_give_back_their_places():
    why = {"gone": EngineLost("connection", "refused"), "ours": RuntimeError("a mistake of ours")}
    found = []

    async def ask(replica, response_id):
        raise why[response_id]

    replica = a_replica("w0", engine_boot_id="b", state="unreachable")
    background = Background(ask, lambda _: replica, most=2, tenant_share=1.0, timeout_s=60.0)
    for response_id in why:
        background.enter("")
        background.follow(response_id, ("w0", "b"), "", lambda *told: found.append(told), shown_tokens=3)
    await until(lambda: not len(background))
    assert found == [(None, 3)] * 2
    for _ in why:
        background.enter("")  # there is room again


class Hurried(asyncio.SelectorEventLoop):
    """A loop whose clock goes on to what is next: nothing is waited for."""

    ahead_s = 0.0

    def time(self):
        return super().time() + self.ahead_s

    def _run_once(self):
        if self._scheduled and not self._ready:
            self.ahead_s += max(0.0, self._scheduled[0].when() - self.time())
        super()._run_once()


@pytest.mark.parametrize("nowhere", [None, a_replica("w0", engine_url="", engine_boot_id="", state="starting")])
def test_one_whose_worker_does_not_come_back_is_over_after_a_while(nowhere):
    async def ask(replica, response_id):
        raise AssertionError("there is nobody to ask")

    async def follow():
        loop = asyncio.get_running_loop()
        began_at, over = loop.time(), loop.create_future()
        background = Background(ask, lambda _: nowhere, most=1, tenant_share=1.0, timeout_s=600.0)
        background.enter("")
        background.follow("r", ("w0", "b"), "", lambda usage, tokens: over.set_result((usage, tokens)), shown_tokens=3)
        assert await over == (None, 3)
        assert 10 < loop.time() - began_at < 30

    with asyncio.Runner(loop_factory=Hurried) as runner:
        runner.run(follow())


def followed(replica_of, answer):
    """(when it was over, its usage, when its engine was asked), in seconds since it began; nothing is waited for.

    replica_of, answer   what is known of its worker, and what its engine says, after so many seconds
    """

    async def follow():
        loop = asyncio.get_running_loop()
        began_at, over, asked = loop.time(), loop.create_future(), []

        async def ask(replica, response_id):
            asked.append(loop.time() - began_at)
            return json.dumps(answer(asked[-1])).encode()

        def there(worker):
            replica = replica_of(loop.time() - began_at)
            if replica is None:
                return None
            return replace(replica, report=replace(replica.report, at=replica.report.at + began_at))

        background = Background(ask, there, most=1, tenant_share=1.0, timeout_s=10_000.0)
        background.enter("")
        background.follow("r", ("w0", "b"), "", lambda usage, _: over.set_result(usage))
        return await over, loop.time() - began_at, asked

    with asyncio.Runner(loop_factory=Hurried) as runner:
        usage, over_at, asked = runner.run(follow())
    return over_at, usage, asked


def busy(now):
    return a_replica("w0", engine_boot_id="b", report=EngineReport(running=1, at=now))


@pytest.mark.parametrize(("takes_s", "late_s", "most_asked"), [(0.4, 0.2, 1), (20.0, 6.0, 15), (3600.0, 10.0, 400)])
def test_end_is_seen_a_quarter_late_and_at_most_ten_seconds(takes_s, late_s, most_asked):
    over_at, usage, asked = followed(busy, lambda now: {"status": "completed" if now > takes_s else "queued"})
    assert takes_s < over_at < takes_s + late_s + 0.1
    assert len(asked) <= most_asked
    assert usage is None


def test_briefly_absent_worker_keeps_its_responses():
    def replica_of(now):
        return None if now % 30 > 20 else busy(now)

    told = {"status": "completed", "usage": USAGE}
    over_at, usage, _ = followed(replica_of, lambda now: told if now > 200 else {"status": "in_progress"})
    assert over_at > 200
    assert usage.completion_tokens == USAGE["output_tokens"]


@pytest.mark.parametrize(
    ("told", "over_s"),
    [
        (lambda now: EngineReport(at=now), 30),
        (lambda now: EngineReport(at=now, running=int(20 < now < 40)), 70),
        (lambda now: EngineReport(at=now, waiting=int(20 < now < 40)), 70),
        (lambda now: EngineReport(at=-20.0 if now < 15 else now), 45),  # what it was before says nothing
        (
            lambda now: EngineReport(at=now if now < 20 or now > 100 else 20.0),
            100,
        ),  # nor does what nobody has heard since
    ],
    ids=["always", "but for one that ran", "but for one that waited", "since it began", "as far as one has heard"],
)
def test_engine_idle_for_a_while_has_ended_its_response(told, over_s):
    over_at, usage, _ = followed(
        lambda now: a_replica("w0", engine_boot_id="b", report=told(now)), lambda _: {"status": "queued"}
    )
    assert usage is None
    assert over_s < over_at < over_s + 25


async def test_one_that_takes_longer_than_it_may_counts_no_longer(tmp_path):
    async with keeping(tmp_path, background_timeout_s=0.2) as (client, engine, parts, _):
        await client.post(RESPONSES, json=ASK)
        await over(parts)
        assert not engine.asked
        assert (await client.post(RESPONSES, json=ASK)).status_code == 200


async def test_abandoned_background_stream_goes_on_and_is_charged(tmp_path):
    async with keeping(tmp_path) as (client, engine, parts, _):
        engine.go_on.clear()
        async with client.stream("POST", RESPONSES, json=ASK | {"stream": True}) as answer:
            pieces = answer.aiter_bytes()
            assert b"response.created" in await anext(pieces)
        await until(lambda: len(parts.background) == 1)
        await until(lambda: parts.pool.connections == parts.pool.idle_connections)  # it is read no more
        assert in_flight(parts) == [("w0", 1)]
        assert level(parts) > 900
        engine.over()
        await over(parts)
        assert level(parts) < 400


async def test_sent_part_of_a_cancelled_stream_is_charged(tmp_path):
    async with keeping(tmp_path) as (client, engine, parts, _):
        engine.go_on.clear()
        async with client.stream("POST", RESPONSES, json=ASK | {"stream": True}) as answer:
            pieces, got = answer.aiter_bytes(), b""
            while got.count(b"delta\n") < DELTAS:
                got += await anext(pieces)
        await until(lambda: len(parts.background) == 1)
        (made,) = engine.kept
        await client.post(f"{RESPONSES}/{made}/cancel")
        assert level(parts) < 500
        assert not in_flight(parts)


async def test_shown_tokens_are_charged_once_at_their_largest_count():
    async def ask(replica, response_id):
        raise AssertionError("its end is told before")

    found = []
    background = Background(ask, lambda _: None, most=1, tenant_share=1.0, timeout_s=60.0)
    background.enter("")
    background.follow("r", ("w0", "b"), "", lambda *told: found.append(told), shown_tokens=3)
    for tokens in (600, 5):
        background.record_shown_tokens("r", tokens)
    background.end_if_over("r", b'{"status": "cancelled", "usage": null}')
    background.record_shown_tokens("r", 900)
    assert found == [(None, 600)]
    await background.close()


async def test_a_stream_that_is_whole_is_over_with_it(tmp_path):
    async with keeping(tmp_path) as (client, engine, parts, _):
        assert (await client.post(RESPONSES, json=ASK | {"stream": True})).status_code == 200
        await over(parts)
        assert not len(parts.background)
        assert level(parts) < 400
        assert not engine.asked


async def test_more_than_may_be_under_way_are_refused_before_they_are_sent():
    engine = Keeper("w0")
    busy = AgentDouble(figures=Load(running=1))
    async with fleet(engine, control=busy, max_background_responses=2) as (client, _, parts):
        for _ in range(2):
            assert (await client.post(RESPONSES, json=ASK)).status_code == 200
        refused = await client.post(RESPONSES, json=ASK)
        assert error_of(refused) == (429, "saturated")
        assert "2 responses are under way in the background" in refused.json()["error"]["message"]
        assert engine.posted == 2
        engine.over()
        await over(parts)
        assert (await client.post(RESPONSES, json=ASK)).status_code == 200


async def test_simultaneous_background_responses_are_bounded():
    engine = Keeper("w0")
    busy = AgentDouble(figures=Load(running=1))
    async with fleet(engine, control=busy, max_background_responses=2) as (client, _, parts):
        for _ in range(3):  # one that is never sent takes no place
            gone = await client.post(RESPONSES, json=ASK | {"previous_response_id": "resp_unknown"})
            assert error_of(gone) == (404, "response_not_found")
        answers = await asyncio.gather(*(client.post(RESPONSES, json=ASK) for _ in range(12)))
        assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 10
        assert engine.posted == len(parts.background) == 2
        engine.over()
        await over(parts)
        assert not parts.background.places


async def test_one_tenant_does_not_take_all_that_may_be_under_way(tmp_path):
    keys = tmp_path / "keys.json"
    entries = [{"sha256": hash_key(name), "tenant": name, "scopes": ["infer"]} for name in "ab"]
    keys.write_text(json.dumps({"keys": entries}))
    busy = AgentDouble(figures=Load(running=1))
    async with fleet(Keeper("w0"), control=busy, key_files=(keys,), max_background_responses=2) as (client, _, _parts):
        statuses = []
        for key in "aab":
            answer = await client.post(RESPONSES, json=ASK, headers={"authorization": f"Bearer {key}"})
            statuses.append(answer.status_code)
        assert statuses == [200, 429, 200]


def test_every_tenant_may_have_one_background_response():
    background = Background(None, None, most=3, tenant_share=0.1, timeout_s=60.0)
    background.enter("a")
    with pytest.raises(Saturated, match="1 responses of yours"):
        background.enter("a")
    background.enter("b")
    background.enter("c")
    with pytest.raises(Saturated, match=r"^3 responses are under way"):
        background.enter("d")


async def test_a_refused_background_response_is_told_when_one_should_be_over():
    now, engine = 0.0, ("w0", "boot")
    background = Background(never_asked, lambda _: None, most=2, tenant_share=1.0, timeout_s=60.0, clock=lambda: now)

    def begin(name):
        background.enter("a")
        background.follow(name, engine, "a", lambda _usage, _tokens: None)

    def retry_after_s():
        with pytest.raises(Saturated) as refused:
            background.enter("a")
        return refused.value.retry_after_s

    begin("first")
    begin("second")
    assert retry_after_s() == 10.0, "none has ended: a guess"
    now = 40.0
    background.end_if_over("first", b'{"status": "completed"}')
    begin("third")
    assert retry_after_s() == 20.0, "of two that take 40 s each, one is over after 20 s"
    await background.close()


async def never_asked(_replica, _response_id):
    raise AssertionError


async def test_background_responses_with_one_given_id_count_separately():
    engine = Keeper("w0")
    busy = AgentDouble(figures=Load(running=1))
    async with fleet(engine, control=busy) as (client, _, parts):
        for name in ("mine", "mine", "m" * 128):
            assert (await client.post(RESPONSES, json=ASK | {"request_id": name})).status_code == 200
        assert [name.partition("-")[0] for name in engine.kept][:2] == ["mine", "mine"]
        assert (len(engine.kept), len(parts.background)) == (3, 3)
        first = next(iter(engine.kept.values()))
        first |= {"status": "completed", "usage": USAGE}
        await until(lambda: len(parts.background) == 2)
        assert in_flight(parts) == [("w0", 2)]
        engine.over()
        await over(parts)


async def test_foreground_response_keeps_its_given_id():
    engine = Keeper("w0")
    async with fleet(engine) as (client, _, _):
        for _ in range(2):
            await client.post(RESPONSES, json={"model": BASE, "input": "hello", "request_id": "mine"})
        (name,) = engine.kept
        assert name.startswith("mine.")


async def test_a_router_that_stops_waits_for_none_and_leaves_no_task(tmp_path):
    async with keeping(tmp_path) as (client, engine, parts, _):
        await client.post(RESPONSES, json=ASK)
        assert len(parts.background) == 1
    assert not len(parts.background)
    assert not in_flight(parts)
    assert not [task for task in asyncio.all_tasks() if "_until_over" in repr(task)]
    parts.background.enter("")
    parts.background.follow("late", ("w0", "first"), "", lambda usage, tokens: engine.aborted.set())
    assert engine.aborted.is_set(), "what comes when it has stopped is over at once"
    assert not parts.background.places


async def test_response_of_a_worker_with_a_restarting_agent_is_retryable():
    engine = Keeper("w0")
    async with fleet(engine, control=AgentDouble(figures=Load(running=1))) as (client, control, parts):
        response_id = (await client.post(RESPONSES, json=ASK)).json()["id"]
        # It has yet to find its engine, and whether that is the one it was.
        address, control.workers["w0"] = control.workers["w0"], ""
        control.starting, control.boot_id = frozenset({"w0"}), ""
        await until(lambda: not parts.discovery.fleet.replicas["w0"].engine_url)
        answer = await client.get(f"{RESPONSES}/{response_id}")
        assert error_of(answer) == (503, "no_replica")
        assert "retry-after" in answer.headers
        control.workers["w0"], control.starting, control.boot_id = address, frozenset(), "first"
        await until(lambda: parts.discovery.fleet.replicas["w0"].engine_url)
        assert (await client.get(f"{RESPONSES}/{response_id}")).status_code == 200
