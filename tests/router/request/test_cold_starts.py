"""Requests for adapters that are loaded nowhere, before a real router: bounded, fair, and in nobody's way."""

import asyncio
import json
import re
import time
from dataclasses import replace

import pytest
from starlette.responses import JSONResponse, Response
from structlog.testing import capture_logs

from lorafleet.identity import rendezvous_order
from lorafleet.service.loops import ChangeSignal
from orchestrator.model.catalog import CatalogAdapter, CatalogAlias
from orchestrator.model.served_names import AliasTarget
from router.core.errors import (
    AdapterFailed,
    ColdStartTimeout,
    DeadlineExceeded,
    ModelNotFound,
    NoCapacity,
    Saturated,
    without_places,
)
from router.core.fleet import RouterFleet
from router.core.queue.admission import QueueLimits, QueueUsage
from router.http.engine_connection import EngineLost
from router.http.fetch import FetchRefused
from router.request.cold_starts import ColdStarts, LoadTrouble, waits_for_retry
from router.telemetry.metrics import RouterMetrics
from tests.patience import patience, until, within
from tests.router.core.schedule.test_policy import a_replica
from tests.router.doubles import BASE, CHAT, DIGEST, AgentDouble, EngineDouble, counted, error_of, fleet, with_sql
from tests.router.fleet.test_background import Hurried


def many_adapters(count):
    control = AgentDouble()
    for number in range(count):
        control.add_adapter(f"cold-{number}/v1")
    control.add_adapter("hot/v1", on=["w0"])
    return control


async def never(control, lora_id):
    await asyncio.Event().wait()


def loading(lora_id, expected_s=None, **more):
    told = {"lora_id": lora_id, "digest": DIGEST, "state": "loading", "ready": [], "loading": ["w0"]}
    return JSONResponse({**told, "expected_s": expected_s, **more})


async def at_once(control, lora_id):
    return loading(lora_id)


async def stop(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def outcomes(parts):
    """Answers to loads asked for, by what the metrics say of them."""
    (counted,) = parts.metrics.cold_starts.collect()
    return {sample.labels["outcome"]: sample.value for sample in counted.samples if sample.name.endswith("_total")}


def bringing():
    return [task for task in asyncio.all_tasks() if "_bring" in repr(task)]


async def test_hot_requests_flow_while_the_hold_is_full():
    control = many_adapters(40)
    control.ensure = never
    async with fleet(EngineDouble("w0"), control=control, max_held_requests=40) as (client, _, parts):

        def ask(lora_id):
            return client.post("/v1/chat/completions", json={**CHAT, "lora_id": lora_id})

        held = [asyncio.create_task(ask(f"cold-{number}/v1")) for number in range(40)]
        await until(lambda: parts.cold_starts.held.requests == 40)
        refused = await ask("cold-0/v1")
        assert refused.status_code == 429
        assert "40 requests wait already" in refused.json()["error"]["message"]
        (counts,) = counted(control, parts).values()
        assert counts.codes == {"429 saturated max_held_requests": 1}
        # One that a request may go to after all is not waited for.
        assert (await parts.cold_starts.until_resident("hot/v1")).lora_id == "hot/v1"
        shown = (await client.get("/metrics")).text
        assert "lorafleet_router_held_requests 40.0" in shown
        assert f"lorafleet_router_held_bytes {parts.cold_starts.held.size_bytes:.1f}" in shown
        assert parts.cold_starts.held.size_bytes > 40 * len(json.dumps(CHAT)) / 2
        answers = await asyncio.gather(*[ask("hot/v1") for _ in range(20)])
        assert [answer.status_code for answer in answers] == [200] * 20
        assert parts.cold_starts.held.requests == 40  # nobody's hold is over yet
        # One that was let in, and whose replica went while it waited in the line.
        displaced = asyncio.create_task(parts.cold_starts.until_resident("cold-0/v1", is_displaced=True))
        await until(lambda: parts.cold_starts.held.requests == 41)
        await stop([displaced])
        assert parts.cold_starts.held.requests == 40
        await stop(held)
        await until(lambda: not parts.cold_starts.held.requests)
        assert "lorafleet_router_held_requests 0.0" in (await client.get("/metrics")).text
        assert parts.cold_starts.loading == parts.cold_starts.wanted == parts.cold_starts.held.tenants == {}


async def nobody_leads(control, lora_id):
    return Response(status_code=503)


async def test_request_with_a_full_home_is_served_once_an_orchestrator_leads():
    async def placed(control, lora_id):
        control.residents["w0"] = [lora_id]
        return loading(lora_id, ready=["w0"], loading=[], state="ready")

    control = with_sql()
    control.ensure, control.is_full = nobody_leads, True
    async with fleet(EngineDouble("w0"), control=control) as (client, _, _):
        body = {**CHAT, "lora_id": "sql/v1"}
        asks = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(2)]
        await until(lambda: control.loads)
        control.ensure = placed
        assert [answer.status_code for answer in await asyncio.gather(*asks)] == [200, 200]
    assert len(control.loads) == 1


async def test_adapter_that_is_not_inspected_yet_waits_for_an_orchestrator():
    async def placed(control, lora_id):
        (adapter,) = control.adapters
        control.adapters = [replace(adapter, base_model=BASE, digest=DIGEST)]
        control.residents["w0"] = [lora_id]
        control.tell()
        return loading(lora_id, ready=["w0"], loading=[], state="ready")

    control = AgentDouble()
    control.add_adapter("new/v1", base_model=None, digest=None)
    control.ensure = nobody_leads
    async with fleet(EngineDouble("w0"), control=control) as (client, _, _):
        asked = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "lora_id": "new/v1"}))
        await until(lambda: len(control.ensured) >= 3)
        assert not asked.done()
        control.ensure = placed
        assert (await asked).status_code == 200
    assert control.loads == []


async def test_adapter_that_no_orchestrator_inspects_is_refused_with_the_reason():
    control = AgentDouble()
    control.add_adapter("new/v1", base_model=None, digest=None)
    control.ensure = nobody_leads
    async with fleet(EngineDouble("w0"), control=control, cold_start_timeout_s=patience(0.1)) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "new/v1"})
    assert error_of(answer) == (503, "no_replica")
    assert "once an orchestrator leads and has read its files" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) > 0


async def test_adapter_fitting_on_no_worker_is_refused_at_once():
    async def too_big(control, lora_id):
        return loading(lora_id, state="registered", loading=[], fits_nowhere=True, error="rank 128 at http://w0:8090")

    control = with_sql()
    control.ensure = too_big
    async with fleet(EngineDouble("w0"), control=control, cold_start_timeout_s=600) as (client, _, parts):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
        assert outcomes(parts) == {"no_capacity": 1}
        counts = counted(control, parts)["sql/v1"]
        assert counts.codes == {"503 no_capacity": 1}
        assert (parts.cold_starts.held.requests, parts.cold_starts.loading) == (0, {})
    assert error_of(answer) == (503, "no_capacity")
    assert answer.json()["error"]["message"] == "adapter 'sql/v1' fits on no worker: rank 128 at <address>"
    assert answer.headers["retry-after"] == "60"
    assert control.ensured == ["sql/v1"]


async def test_what_is_ready_somewhere_is_not_refused_for_its_rank():
    async def placed(control, lora_id):
        control.residents["w0"] = [lora_id]
        return loading(lora_id, ready=["w0"], loading=[], state="ready", fits_nowhere=True)

    control = with_sql()
    control.ensure = placed
    async with fleet(EngineDouble("w0"), control=control) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
    assert answer.status_code == 200


async def test_request_with_a_full_home_gets_no_capacity_without_details():
    control = with_sql()
    control.ensure, control.is_full = nobody_leads, True
    async with fleet(EngineDouble("w0"), control=control, cold_start_timeout_s=patience(0.1)) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
    assert error_of(answer) == (503, "no_capacity")
    assert "its home 'w0' has no free slot" in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    assert int(answer.headers["retry-after"]) > 0


async def test_hundred_requests_are_one_load_while_the_orchestrator_is_away():
    async def unreachable(control, lora_id):
        return Response(status_code=500)

    control = with_sql()
    control.ensure = unreachable
    async with fleet(EngineDouble("w0"), EngineDouble("w1"), control=control) as (client, _, parts):
        body = {**CHAT, "lora_id": "sql/v1"}
        answers = await asyncio.gather(*[client.post("/v1/chat/completions", json=body) for _ in range(100)])
        assert outcomes(parts) == {"placed": 1}
    assert [answer.status_code for answer in answers] == [200] * 100
    assert [load["lora_id"] for load in control.loads] == ["sql/v1"]
    assert control.ensured == ["sql/v1"]


@pytest.mark.parametrize("larger", ["w0", "w1"])
async def test_home_without_an_orchestrator_takes_the_adapters_rank(larger):
    control = AgentDouble(max_lora_ranks={"w0": 16, "w1": 16, larger: 64})
    control.add_adapter("big/v1", rank=64)
    control.add_adapter("huge/v1", rank=65)
    control.ensure = nobody_leads
    async with fleet(EngineDouble("w0"), EngineDouble("w1"), control=control) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "big/v1"})
        assert (answer.status_code, answer.headers["x-lorafleet-worker"]) == (200, larger)
        refused = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "huge/v1"})
    assert error_of(refused) == (503, "no_replica")
    assert [load["lora_id"] for load in control.loads] == ["big/v1"]


async def test_full_home_yields_to_the_next_without_an_orchestrator():
    workers = ["w0", "w1", "w2"]
    *full, free = [replica.id for replica in rendezvous_order("sql/v1", [a_replica(w) for w in workers])]
    control = with_sql()
    control.ensure, control.full = nobody_leads, set(full)
    async with fleet(*map(EngineDouble, workers), control=control, cold_start_timeout_s=60) as (client, _, parts):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
        assert (answer.status_code, answer.headers["x-lorafleet-worker"]) == (200, free)
        assert outcomes(parts) == {"placed": 1}
    assert control.loads_at == [*full, free]


async def test_home_that_keeps_the_adapter_out_is_not_asked_without_an_orchestrator():
    workers = ["w0", "w1"]
    home, other = [replica.id for replica in rendezvous_order("sql/v1", [a_replica(w) for w in workers])]
    control = with_sql()
    control.ensure, control.kept_out = nobody_leads, {home: ("sql/v1",)}
    async with fleet(*map(EngineDouble, workers), control=control) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
        assert (answer.status_code, answer.headers["x-lorafleet-worker"]) == (200, other)
    assert control.loads_at == [other]


async def test_request_without_free_slots_or_leader_gets_no_capacity():
    control = with_sql()
    control.ensure, control.is_full = nobody_leads, True
    async with fleet(EngineDouble("w0"), EngineDouble("w1"), control=control, cold_start_timeout_s=0.3) as (
        client,
        _,
        _,
    ):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
    assert error_of(answer) == (503, "no_capacity")
    assert "none of the 2 workers that take it has a free slot" in answer.json()["error"]["message"]


ORCHESTRATOR = "http://orchestrator"


class FakeDiscovery:
    """What discovery knows of an adapter with a secret, and of these replicas."""

    def __init__(self, *replicas):
        adapter = CatalogAdapter(
            lora_id="sql/v1",
            base_model="m",
            digest=DIGEST,
            source="s3://adapters/sql",
            secret="store/key",
            rank=32,
            acceptance="require",
            ignored_modules="accept",
        )
        self.fleet = RouterFleet(1, {replica.id: replica for replica in replicas}, {"sql/v1": adapter})
        self.changes = ChangeSignal()
        self.report_ages_s = {}

    def poll_now(self, worker):
        raise AssertionError("nothing was placed")

    def catalog_age_s(self):
        return 0.0

    def kept_out(self, worker):
        return frozenset()

    def report_age_s(self, worker):
        return self.report_ages_s.get(worker, 0.0)


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (EngineLost("connection", "refused"), ColdStartTimeout),
        (FetchRefused("503", 503, b"busy"), ColdStartTimeout),
        (FetchRefused("503", 503, b'{"error": {"code": "no_free_slot"}}'), ColdStartTimeout),
        (FetchRefused("409", 409, b'{"error": {"code": "digest_mismatch"}}'), ColdStartTimeout),
        (FetchRefused("409", 409, b'{"error": {"code": "no_free_slot"}}'), NoCapacity),
    ],
)
async def test_only_no_free_slot_means_full_and_other_errors_are_waited_out(trouble, error, monkeypatch):
    monkeypatch.setattr("router.request.cold_starts._ASK_AGAIN_S", patience(300))
    asked = []

    async def post(url, path, *, body, timeout_s):
        if url == ORCHESTRATOR:
            raise EngineLost("connection", "refused")
        asked.append((url, path, json.loads(body), timeout_s))
        raise trouble

    # Of all that serve the base model one alone can load: the others are starting, engines and no more, or too small.
    others = [a_replica(f"s{n}", state="starting") for n in range(9)]
    others += [a_replica(f"e{n}", agent_url="") for n in range(9)]
    others += [a_replica(f"r{n}", max_lora_rank=31) for n in range(9)]
    known = FakeDiscovery(*others, a_replica("w0", max_lora_rank=32))
    cold = ColdStarts(post, known, RouterMetrics(), ORCHESTRATOR, held_s := patience(0.5), max_held=10)
    with pytest.raises(error):
        await cold.until_resident("sql/v1")
    ((url, path, wanted, timeout_s),) = asked
    assert (url, path, timeout_s) == ("http://w0", "/v1/admin/load_lora", held_s)
    assert wanted.pop("wire")
    assert wanted == {
        "lora_id": "sql/v1",
        "source": "s3://adapters/sql",
        "base_model": "m",
        "digest": DIGEST,
        "secret": "store/key",
        "is_awaited": True,
        "from_fleet": False,
        "neighbours": [],
        "only_files": False,
        "keeps_files": False,
        "acceptance": "require",
        "ignored_modules": "accept",
        "acceptance_file": "",
    }


def refused(status, code):
    return FetchRefused(str(status), status, json.dumps({"error": {"code": code}}).encode())


@pytest.mark.parametrize(
    ("trouble", "goes_on"),
    [
        (EngineLost("connection", "refused"), True),
        (refused(409, "no_free_slot"), True),
        (refused(503, "draining"), True),
        (refused(503, "not_ready"), True),
        (refused(504, "engine_timeout"), True),
        (refused(507, "disk_full"), True),
        (refused(403, "source_forbidden"), True),
        (FetchRefused("502", 502, b"<html>"), True),
        (refused(409, "digest_mismatch"), False),
        (refused(422, "adapter_refused"), False),
        (refused(413, "source_too_big"), False),
    ],
)
async def test_the_next_home_is_asked_unless_the_adapter_itself_was_refused(trouble, goes_on, monkeypatch):
    monkeypatch.setattr("router.request.cold_starts._ASK_AGAIN_S", patience(300))
    asked = []

    async def post(url, path, *, body, timeout_s):
        asked.append(url)
        raise EngineLost("connection", "refused") if url == ORCHESTRATOR else trouble

    replicas = [a_replica(f"w{n}") for n in range(3)]
    metrics = RouterMetrics()
    cold = ColdStarts(post, FakeDiscovery(*replicas), metrics, ORCHESTRATOR, patience(300), max_held=10)
    waiting = asyncio.create_task(cold.until_resident("sql/v1"))
    await until(lambda: metrics.registry.get_sample_value("lorafleet_router_cold_starts_total", {"outcome": "asked"}))
    waiting.cancel()
    order = [f"http://{replica.id}" for replica in rendezvous_order("sql/v1", replicas)]
    assert asked == [ORCHESTRATOR, *order[: 3 if goes_on else 1]]


async def test_an_agent_that_hangs_keeps_no_adapter_from_the_next_home(monkeypatch):
    monkeypatch.setattr("router.request.cold_starts._ASK_AGAIN_S", 0.001)
    replicas = [a_replica(f"w{n}") for n in range(2)]
    first, second = rendezvous_order("sql/v1", replicas)
    known, asked = FakeDiscovery(*replicas), []

    async def post(url, path, *, body, timeout_s):
        asked.append(url)
        if url == ORCHESTRATOR:
            raise EngineLost("connection", "refused")
        if url == first.agent_url:
            # It falls silent only when it has been asked: later it is the last to be asked.
            known.report_ages_s[first.id] = 3600.0
            await asyncio.sleep(3600)
        raise EngineLost("connection", "refused")

    cold = ColdStarts(post, known, RouterMetrics(), ORCHESTRATOR, 3600.0, max_held=10, silent_after_s=6.0)
    waiting = asyncio.create_task(cold.until_resident("sql/v1"))
    await until(lambda: asked.count(second.agent_url) >= 2)
    assert asked[:5] == [ORCHESTRATOR, first.agent_url, second.agent_url, ORCHESTRATOR, second.agent_url]
    await stop([waiting])


async def test_cold_start_trouble_is_logged_once(monkeypatch):
    monkeypatch.setattr("router.request.cold_starts._ASK_AGAIN_S", 0.001)
    asked, trouble = [], [EngineLost("connection", "refused")]

    async def post(url, path, *, body, timeout_s):
        asked.append(url)
        raise trouble[-1]

    cold = ColdStarts(post, FakeDiscovery(a_replica("w0")), RouterMetrics(), ORCHESTRATOR, 60.0, max_held=10)
    with capture_logs() as said:
        waiting = asyncio.create_task(cold.until_resident("sql/v1"))
        await until(lambda: asked.count("http://w0") >= 5)
        assert [entry["event"] for entry in said] == [
            "orchestrator away, asking the adapter's homes itself",
            "home does not load it",
        ]
        assert (said[1]["lora_id"], said[1]["worker"]) == ("sql/v1", "w0")
        trouble.append(FetchRefused("503", 503, b"busy"))
        before = len(asked)
        await until(lambda: len(asked) >= before + 10)
        assert ["FetchRefused" in entry["error"] for entry in said] == [False, False, True, True]
        cold.discovery.fleet = FakeDiscovery(a_replica("w1")).fleet  # another home says the same
        await until(lambda: asked.count("http://w1") >= 2)
        assert [entry.get("worker") for entry in said[4:]] == ["w1"]
        await stop([waiting])


@pytest.mark.parametrize(
    "answer",
    [Response("<html>welcome</html>"), JSONResponse({}), JSONResponse({"error": {"message": "whose key?"}}, 401)],
)
async def test_invalid_orchestrator_answer_counts_as_absence(answer):
    async def other(control, lora_id):
        return answer

    control = with_sql()
    control.ensure = other
    async with fleet(EngineDouble("w0"), control=control) as (client, _, _):
        assert (await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})).status_code == 200
    assert len(control.loads) == 1


def test_what_failed_on_one_worker_is_not_told_while_another_loads():
    asked = []

    async def post(url, path, *, body, timeout_s):
        asked.append(path)
        assert 0 < json.loads(body)["wait_s"] < timeout_s  # it waits with its answer, and may take that long
        # At first there is no room at all, then there is.
        more = {} if len(asked) > 1 else {"loading": [], "state": "registered"}
        return loading("sql/v1", error="w1: no slot", **more).body

    async def wait():
        cold = ColdStarts(post, FakeDiscovery(), RouterMetrics(), ORCHESTRATOR, 3.5, max_held=10)
        with pytest.raises(ColdStartTimeout):
            await cold.until_resident("sql/v1")
        assert len(asked) == 4

    with asyncio.Runner(loop_factory=Hurried) as runner:
        runner.run(wait())


def test_discovered_adapter_is_not_loaded_until_a_catalog_has_it():
    known, asked = FakeDiscovery(), []
    listed = CatalogAdapter(lora_id="sql/v1", base_model="m", digest=None, engine_name="sql/v1")

    async def post(url, path, *, body, timeout_s):
        asked.append(path)
        return loading("sql/v1").body

    async def wait():
        in_catalog, known.fleet = known.fleet, RouterFleet(1, {}, {"sql/v1": listed})
        cold = ColdStarts(post, known, RouterMetrics(), ORCHESTRATOR, 9.5, max_held=10)
        waiting = asyncio.create_task(cold.until_resident("sql/v1"))
        await asyncio.sleep(5.5)
        assert not asked
        known.fleet = in_catalog
        with pytest.raises(ColdStartTimeout):
            await waiting
        assert set(asked) == {"/v1/adapters/sql/v1/ensure"}

    with asyncio.Runner(loop_factory=Hurried) as runner:
        runner.run(wait())


def pointing(name, lora_id):
    return (CatalogAlias(name=name, targets=(AliasTarget(lora_id=lora_id),)),)


@pytest.mark.parametrize("how", ["deleted", "failed"])
@pytest.mark.parametrize("asked", ["run", "run/v3"])
async def test_request_by_a_name_that_moves_while_it_waits_gets_the_version_of_now(asked, how):
    async def refuse(_control, lora_id):
        waits.set()
        await moved.wait()
        error = {"message": f"adapter {lora_id!r} is {how}"}
        return JSONResponse({"error": error}, 404 if how == "deleted" else 409)

    waits, moved, control = asyncio.Event(), asyncio.Event(), AgentDouble()
    control.add_adapter("run/v3")
    control.aliases, control.ensure = pointing("run", "run/v3"), refuse
    async with fleet(EngineDouble("w0"), control=control) as (client, _, parts):
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"model": asked}))
        await waits.wait()
        control.adapters.clear()
        control.add_adapter("run/v5", on=["w0"])
        control.aliases = pointing("run", "run/v5")
        control.tell()
        moved.set()
        answer = await asking
        if asked == "run":
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-lorafleet-adapter"].startswith("run/v5@")
            assert answer.json()["model"] == "run"
        else:
            assert error_of(answer) == ((404, "model_not_found") if how == "deleted" else (409, "adapter_failed"))
        assert (len(parts.cold_starts.held), parts.cold_starts.loading) == (0, {})


def test_adapter_leaving_the_catalog_is_refused_as_the_orchestrator_says():
    known, asked = FakeDiscovery(), []

    async def post(url, path, *, body, timeout_s):
        asked.append(path)
        if known.fleet.adapters:
            known.fleet = RouterFleet(2, {}, {})
            return loading("sql/v1").body
        raise FetchRefused("404", 404, b'{"error": {"message": "it was deleted"}}')

    async def wait():
        cold = ColdStarts(post, known, RouterMetrics(), ORCHESTRATOR, 9.5, max_held=10)
        with pytest.raises(ModelNotFound, match="it was deleted"):
            await cold.until_resident("sql/v1")
        assert len(asked) == 2

    with asyncio.Runner(loop_factory=Hurried) as runner:
        runner.run(wait())


def test_placed_adapters_worker_is_polled_until_it_reports_it():
    known, looked = FakeDiscovery(), []
    known.poll_now = looked.append

    async def post(url, path, *, body, timeout_s):
        return loading("sql/v1", ready=["w0"], loading=[], state="ready", error="w1: no slot").body

    async def wait():
        cold = ColdStarts(post, known, RouterMetrics(), ORCHESTRATOR, 3.5, max_held=10)
        with pytest.raises(ColdStartTimeout):
            await cold.until_resident("sql/v1")
        assert set(looked) == {"w0"}
        assert len(looked) > 8  # once a second would be 4

    with asyncio.Runner(loop_factory=Hurried) as runner:
        runner.run(wait())


async def test_where_an_adapter_was_placed_is_looked_at_at_once():
    async def placed(control, lora_id):
        control.residents["w0"] = [lora_id]
        return loading(lora_id, ready=["w0"], loading=[], state="ready")

    control = with_sql()
    control.ensure = placed
    async with fleet(EngineDouble("w0"), control=control, metadata_poll_s=60.0, catalog_poll_s=60.0) as (
        client,
        _,
        parts,
    ):
        assert (await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})).status_code == 200
        assert outcomes(parts) == {"placed": 1}


async def test_hanging_orchestrator_is_given_up_once_it_is_silent():
    control = with_sql()
    control.ensure = never
    settings = {"catalog_poll_s": 0.1, "control_timeout_s": 0.2, "cold_start_timeout_s": 8}
    async with fleet(EngineDouble("w0"), control=control, **settings) as (client, _, _):
        ask = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"}))
        await until(lambda: control.ensured)
        control.down = True  # its catalog is not to be had either: what is asked of it already stays without an answer
        assert (await ask).status_code == 200
    assert [load["lora_id"] for load in control.loads] == ["sql/v1"]


async def test_an_orchestrator_that_takes_its_time_and_is_there_is_waited_for():
    waits = asyncio.Event()

    async def slowly(control, lora_id):
        await waits.wait()
        control.residents["w0"] = [lora_id]
        return loading(lora_id, ready=["w0"], loading=[], state="ready")

    control = with_sql()
    control.ensure = slowly
    settings = {"catalog_poll_s": 0.1, "control_timeout_s": 0.2, "cold_start_timeout_s": 8}
    async with fleet(EngineDouble("w0"), control=control, **settings) as (client, _, parts):
        ask = asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"}))
        await until(lambda: control.ensured)
        confirmed_at = parts.discovery.confirmed_at
        await until(lambda: parts.discovery.confirmed_at > confirmed_at + 1.5)
        assert not control.loads
        waits.set()
        assert (await ask).status_code == 200
    assert control.ensured == ["sql/v1"]
    assert not control.loads


async def test_one_tenant_that_asks_for_a_thousand_adapters_leaves_room_for_others():
    control = many_adapters(30)
    control.ensure = never
    async with fleet(EngineDouble("w0"), control=control) as (_, _, parts):
        cold = parts.cold_starts
        cold.tenant_adapters = 5
        cold.held = QueueUsage(QueueLimits(requests=16, tenant_share=0.5))
        greedy = [asyncio.create_task(cold.until_resident(f"cold-{n}/v1", tenant="greedy")) for n in range(5)]
        await until(lambda: len(cold.held) == 5)
        with pytest.raises(Saturated, match="5 adapters are being loaded for you"):
            await cold.until_resident("cold-9/v1", tenant="greedy")
        # The same adapter once more is no further load; but requests are bounded, too.
        greedy += [asyncio.create_task(cold.until_resident("cold-0/v1", tenant="greedy")) for _ in range(3)]
        await until(lambda: len(cold.held) == 8)
        with pytest.raises(Saturated, match="8 requests of yours"):
            await cold.until_resident("cold-0/v1", tenant="greedy")
        modest = asyncio.create_task(cold.until_resident("cold-9/v1", tenant="modest"))
        await until(lambda: len(cold.held) == 9)
        await stop(greedy)
        assert list(cold.wanted) == ["modest"]
        # What it has left is on its way still.
        with pytest.raises(Saturated, match="5 adapters are being loaded for you"):
            await cold.until_resident("cold-8/v1", tenant="greedy")
        again = asyncio.create_task(cold.until_resident("cold-4/v1", tenant="greedy"))
        await until(lambda: len(cold.held) == 2)
        await stop([modest, again])
        assert cold.wanted == cold.held.tenants == {}


async def test_the_orchestrator_is_told_whose_requests_wait():
    control = many_adapters(2)
    control.ensure = at_once
    async with fleet(EngineDouble("w0"), control=control) as (_, _, parts):
        cold = parts.cold_starts
        waiting = {name: asyncio.create_task(cold.until_resident("cold-0/v1", tenant=name)) for name in ("b", "a")}
        other = asyncio.create_task(cold.until_resident("cold-1/v1"))
        await until(lambda: ["a", "b"] in control.asked_for and [""] in control.asked_for)
        await stop([waiting["b"]])
        await until(lambda: ["a"] in control.asked_for)
        await stop([waiting["a"], other])


async def test_held_requests_are_bounded_in_bytes():
    control = many_adapters(3)
    control.ensure = never
    async with fleet(EngineDouble("w0"), control=control) as (_, _, parts):
        cold = parts.cold_starts
        cold.held = QueueUsage(QueueLimits(size_bytes=100))
        held = asyncio.create_task(cold.until_resident("cold-0/v1", size_bytes=80))
        await until(lambda: len(cold.held))
        with pytest.raises(Saturated, match="80 bytes"):
            await cold.until_resident("cold-1/v1", size_bytes=30)
        await stop([held])


async def test_a_deadline_ends_the_wait_and_says_so():
    control = with_sql()
    control.ensure = never
    async with fleet(EngineDouble("w0"), control=control) as (_, _, parts):
        began_at = parts.cold_starts.clock()
        with pytest.raises(DeadlineExceeded, match="sql/v1"):
            await parts.cold_starts.until_resident("sql/v1", deadline_at=began_at + 0.2)
        assert 0.15 < parts.cold_starts.clock() - began_at < 3
        with pytest.raises(DeadlineExceeded):
            await parts.cold_starts.until_resident("sql/v1", deadline_at=began_at)
        parts.cold_starts.timeout_s = 0.1
        with pytest.raises(ColdStartTimeout):
            await parts.cold_starts.until_resident("sql/v1", deadline_at=parts.cold_starts.clock() + 60)


async def test_cancelled_load_cancels_no_waiting_request():
    control = with_sql()
    control.ensure = never
    async with fleet(EngineDouble("w0"), control=control) as (_, _, parts):
        waiting = asyncio.create_task(parts.cold_starts.until_resident("sql/v1"))
        await until(lambda: control.ensured)
        parts.cold_starts.loading["sql/v1"].task.cancel()
        with pytest.raises(ColdStartTimeout):
            await waiting
        assert not parts.cold_starts.loading


async def test_retry_after_is_the_orchestrators_estimate_else_measured_else_a_guess():
    control = many_adapters(3)
    seen = []

    async def slow(control, lora_id):
        seen.append(lora_id)
        return loading(lora_id, expected_s=3.0 if lora_id == "cold-0/v1" else None)

    control.ensure = slow
    async with fleet(EngineDouble("w0"), control=control, cold_start_timeout_s=patience(0.1)) as (_, _, parts):

        async def told_s(lora_id, error=ColdStartTimeout):
            with pytest.raises(error) as refused:
                await parts.cold_starts.until_resident(lora_id)
            return refused.value.retry_after_s

        assert await told_s("cold-0/v1") == 3.0
        assert await told_s("cold-1/v1") == 5.0
        parts.cold_starts.loads_s.extend([7.0, 9.0, 70.0])
        assert await told_s("cold-1/v1") == 9.0
        assert await told_s("cold-0/v1") == 3.0

        async def full(control, lora_id):
            return loading(lora_id, state="registered", loading=[], error="no slot")

        control.ensure = full
        assert await told_s("cold-2/v1", NoCapacity) == 9.0
        parts.cold_starts.tenant_adapters = 0
        assert await told_s("cold-2/v1", Saturated) == 9.0


async def test_a_load_is_measured_once_however_many_waited_for_it():
    control = with_sql()
    go_on = asyncio.Event()

    async def load(control, lora_id):
        await go_on.wait()
        control.residents["w0"] = [lora_id]
        control.tell()
        return loading(lora_id)

    control.ensure = load
    async with fleet(EngineDouble("w0"), control=control) as (_, _, parts):
        assert parts.discovery.fleet.resident_adapter("sql/v1") is None
        waiting = [asyncio.create_task(parts.cold_starts.until_resident("sql/v1")) for _ in range(10)]
        await until(lambda: parts.cold_starts.held.requests == 10)
        go_on.set()
        adapters = await asyncio.gather(*waiting)
        assert {adapter.lora_id for adapter in adapters} == {"sql/v1"}
        assert len(parts.cold_starts.loads_s) == 1
        assert 0 < parts.cold_starts.loads_s[0] < 5
        await until(lambda: not bringing())
        assert parts.discovery.fleet.resident_adapter("sql/v1") == adapters[0]
        (replica,) = parts.discovery.fleet.replicas.values()
        assert parts.discovery.fleet.resident_adapter("sql/v1", frozenset({replica.incarnation})) is None
        assert parts.discovery.fleet.resident_adapter("sql/v1", frozenset({("w0", "another boot")})) == adapters[0]
        assert parts.discovery.fleet.resident_adapter("no/v1") is None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            JSONResponse(
                {"error": {"message": "http://10.1.2.3:8090/x: cannot; 10.0.0.7:8100 nor worker-1:8090"}}, 409
            ),
            0,
        ),
        (loading("sql/v1", state="registered", loading=[], error="no slot on http://w0.fleet.svc:8090"), 1),
    ],
)
async def test_what_is_passed_on_names_no_address_of_ours(answer, error):
    async def refuse(control, lora_id):
        return answer

    control = with_sql()
    control.ensure = refuse
    async with fleet(EngineDouble("w0"), control=control, cold_start_timeout_s=patience(0.1)) as (_, _, parts):
        with pytest.raises((AdapterFailed, NoCapacity)[error]) as refused:
            await parts.cold_starts.until_resident("sql/v1")
    assert "<address>" in str(refused.value)
    assert "//" not in str(refused.value)
    assert not any(char.isdigit() for char in str(refused.value).replace("sql/v1", ""))


class AdjustableClock:
    """A clock that can be put forward."""

    def __init__(self):
        self.by_s = 0.0

    def __call__(self):
        return time.monotonic() + self.by_s


async def test_abandoned_loads_count_for_their_tenant_up_to_a_minute():
    async def refuse(control, lora_id):
        return JSONResponse({"error": {"message": "no"}}, 409)

    control = many_adapters(5)
    async with fleet(EngineDouble("w0"), control=control) as (_, _, parts):
        cold = parts.cold_starts
        cold.tenant_adapters, cold.clock = 2, AdjustableClock()

        async def comes_and_goes(*numbers):
            asking = [asyncio.create_task(cold.until_resident(f"cold-{n}/v1", tenant="greedy")) for n in numbers]
            await until(lambda: len(cold.held) == len(asking))
            await stop(asking)

        control.ensure = refuse
        with pytest.raises(AdapterFailed):
            await cold.until_resident("cold-4/v1", tenant="greedy")
        control.ensure = never
        await comes_and_goes(0, 1)
        with pytest.raises(Saturated, match="2 adapters are being loaded for you"):
            await cold.until_resident("cold-2/v1", tenant="greedy")
        await comes_and_goes(0)
        control.residents["w0"].append("cold-0/v1")
        control.tell()
        await until(lambda: cold.discovery.fleet.resident_adapter("cold-0/v1"))
        await comes_and_goes(2)
        with pytest.raises(Saturated):
            await cold.until_resident("cold-3/v1", tenant="greedy")
        cold.clock.by_s = 61.0
        await comes_and_goes(3)


async def test_awaited_adapter_counts_though_an_earlier_request_left():
    control = many_adapters(2)
    control.ensure = never
    async with fleet(EngineDouble("w0"), control=control) as (_, _, parts):
        cold = parts.cold_starts
        cold.tenant_adapters, cold.clock = 1, AdjustableClock()
        leaving, staying = (asyncio.create_task(cold.until_resident("cold-0/v1", tenant="greedy")) for _ in range(2))
        await until(lambda: len(cold.held) == 2)
        await stop([leaving])
        cold.clock.by_s = 61.0
        with pytest.raises(Saturated, match="1 adapters are being loaded for you"):
            await cold.until_resident("cold-1/v1", tenant="greedy")
        await stop([staying])


async def test_all_who_wait_are_told_as_soon_as_the_orchestrator_refuses():
    go_on = asyncio.Event()

    async def refuse(control, lora_id):
        await go_on.wait()
        return JSONResponse({"error": {"message": "no"}}, 409)

    control = with_sql()
    control.ensure = refuse
    quiet = {"metadata_poll_s": 6000.0, "catalog_poll_s": 6000.0, "cold_start_timeout_s": 6000.0}
    async with fleet(EngineDouble("w0"), control=control, **quiet) as (_, _, parts):
        waiting = [asyncio.create_task(parts.cold_starts.until_resident("sql/v1")) for _ in range(3)]
        await until(lambda: control.ensured)
        go_on.set()
        async with within(5):
            told = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in told] == [AdapterFailed] * 3
        assert outcomes(parts) == {"adapter_failed": 1}
        assert not parts.cold_starts.loading


async def test_waiting_for_adapters_that_are_placed_nowhere_asks_no_agent_anything():
    class Counting(AgentDouble):
        asked = 0

        def metadata(self, worker):
            self.asked += 1
            return super().metadata(worker)

    async def later(control, lora_id):
        return loading(lora_id)

    control = Counting(ensure=later)
    for number in range(5):
        control.add_adapter(f"cold-{number}/v1")
    async with fleet(EngineDouble("w0"), control=control, metadata_poll_s=60.0) as (_, _, parts):
        await until(parts.discovery.is_synced)
        before = control.asked
        waiting = [asyncio.create_task(parts.cold_starts.until_resident(f"cold-{n}/v1")) for n in range(5)]
        await until(lambda: len(control.ensured) == 10)  # each of them twice: what came of the first is over
        assert control.asked == before
        assert outcomes(parts)["asked"] >= 5
        await stop(waiting)


async def test_load_times_exclude_waiting_for_room_and_are_bounded():
    async def full(control, lora_id):
        return loading(lora_id, state="registered", loading=[], error="no slot")

    async def full_at_first(control, lora_id):
        return await (full if control.ensured.count(lora_id) == 1 else at_once)(control, lora_id)

    control = many_adapters(3)
    async with fleet(EngineDouble("w0"), control=control) as (_, _, parts):
        cold = parts.cold_starts
        cold.clock = AdjustableClock()

        async def arrives(lora_id, *, after_s, stuck=None, asked=1):
            waiting = asyncio.create_task(cold.until_resident(lora_id))
            trouble = LoadTrouble("room", stuck) if stuck else None
            await until(lambda: control.ensured.count(lora_id) >= asked and cold.loading[lora_id].trouble == trouble)
            cold.clock.by_s += after_s
            control.residents["w0"].append(lora_id)
            control.tell()
            await waiting

        control.ensure = full
        await arrives("cold-0/v1", after_s=100.0, stuck="no slot")
        assert not cold.loads_s
        control.ensure = full_at_first
        await arrives("cold-2/v1", after_s=100.0, asked=2)
        assert not cold.loads_s
        control.ensure = never
        await arrives("cold-1/v1", after_s=7200.0)
        assert list(cold.loads_s) == [cold.timeout_s]


def callbacks_of(task):
    """The callbacks that a task would call at its end, as text."""
    return re.search(r" cb=\[.*\]", repr(task))[0]


async def test_who_came_and_left_leaves_nothing_at_a_load_that_goes_on():
    control = many_adapters(1)
    control.ensure = never
    async with fleet(EngineDouble("w0"), control=control) as (_, _, parts):
        cold = parts.cold_starts
        staying = asyncio.create_task(cold.until_resident("cold-0/v1"))
        await until(lambda: len(cold.held) == 1)
        flight = cold.loading["cold-0/v1"]
        before = callbacks_of(flight.task)
        passing = [asyncio.create_task(cold.until_resident("cold-0/v1")) for _ in range(20)]
        await until(lambda: len(cold.held) == 21)
        await stop(passing)
        assert (callbacks_of(flight.task), flight.waiting) == (before, 1)
        await stop([staying])
        await until(lambda: not bringing())  # nobody waits: nobody is asked any more


UNHEARD_OF = "the control plane answered 404"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        *((said, UNHEARD_OF) for said in (b"<html>not here</html>", b"[]", b"{}", b"\xff")),
        *((said, UNHEARD_OF) for said in (b'{"error": "x"}', b'{"error": {}}')),
        (b'{"error": {"message": 5}}', "5"),
    ],
)
async def test_a_refusal_in_words_that_nobody_knows_is_told_in_ours(said, told):
    async def refuse(control, lora_id):
        return Response(said, 404)

    control = with_sql()
    control.ensure = refuse
    async with fleet(EngineDouble("w0"), control=control) as (client, _, parts):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
        assert error_of(answer) == (404, "model_not_found")
        assert answer.json()["error"]["message"] == told
        assert not parts.cold_starts.loading


@pytest.mark.parametrize("gone", ["the adapter", "every worker"])
async def test_what_goes_while_the_orchestrator_does_not_answer_gets_no_load(gone):
    async def away(control, lora_id):
        if gone == "the adapter":
            control.adapters.clear()
        else:
            control.starting = frozenset({"w0"})
        control.tell()
        await until(lambda: not (parts.discovery.fleet.adapters and parts.cold_starts.able_replicas(adapter)))
        return Response(status_code=500)

    control = with_sql()
    control.ensure = away
    async with fleet(EngineDouble("w0"), control=control, cold_start_timeout_s=patience(1)) as (client, _, parts):
        adapter = parts.discovery.fleet.adapters["sql/v1"]
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
        assert error_of(answer) == ((404, "model_not_found") if gone == "the adapter" else (503, "no_replica"))
        assert answer.json()["error"]["param"] == ("lora_id" if gone == "the adapter" else None)
        assert outcomes(parts).keys() == {"model_not_found" if gone == "the adapter" else "asked"}
        assert not control.loads
        assert not parts.cold_starts.loading


async def test_adapter_without_a_known_base_model_is_loaded_once():
    async def placed(control, lora_id):
        control.residents["w1"] = [lora_id]
        return loading(lora_id, ready=["w1"], loading=[], state="ready")

    control = AgentDouble(ensure=placed)
    control.add_adapter("sql/v1", base_model=None)
    async with fleet(EngineDouble("w0"), EngineDouble("w1"), control=control) as (client, _, _):
        for _ in range(3):
            answer = await client.post("/v1/chat/completions", json={**CHAT, "model": "sql/v1"})
            assert (answer.status_code, answer.headers["x-lorafleet-worker"]) == (200, "w1")
    assert control.ensured == ["sql/v1"]


async def test_an_adapter_whose_base_model_is_still_inspected_is_waited_for():
    async def placed(control, lora_id):
        control.adapters.clear()
        control.add_adapter("other/v1", base_model="other-base")
        control.add_adapter(lora_id, on=["w0"])
        control.tell()
        return loading(lora_id, ready=["w0"], loading=[], state="ready")

    control = AgentDouble(ensure=placed)
    control.add_adapter("other/v1", base_model="other-base")
    control.add_adapter("sql/v1", base_model=None, digest=None)
    async with fleet(EngineDouble("w0"), control=control) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "model": "sql/v1"})
        assert (answer.status_code, answer.headers["x-lorafleet-worker"]) == (200, "w0"), answer.text
    assert control.ensured == ["sql/v1"]


async def test_deleted_and_loaded_adapters_are_not_being_loaded_for_a_tenant():
    async def placed(control, lora_id):
        control.residents["w0"] = [lora_id]
        return loading(lora_id, ready=["w0"], loading=[], state="ready")

    control = AgentDouble(ensure=placed)
    async with fleet(EngineDouble("w0"), control=control) as (client, _, parts):
        parts.cold_starts.tenant_adapters = 2
        for version in range(8):
            control.adapters.clear()
            control.residents.clear()
            control.add_adapter(f"run/v{version}")
            control.tell()
            answer = await client.post("/v1/chat/completions", json={**CHAT, "model": f"run/v{version}"})
            assert answer.status_code == 200, answer.text


def failed(error, retry_in_s=45.0):
    async def answer(control, lora_id):
        return loading(lora_id, state="registered", loading=[], error=error, retry_in_s=retry_in_s)

    return answer


async def test_a_load_that_failed_everywhere_is_answered_at_once_with_its_cause():
    control = with_sql()
    control.ensure = failed("source_failed: source https://files.acme:8443/x: refused; kept in /srv/cache/x.tmp")
    async with fleet(EngineDouble("w0"), control=control, cold_start_timeout_s=6000) as (client, _, parts):
        async with within(5):
            answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
        assert not parts.cold_starts.loading
    assert error_of(answer) == (503, "load_failed")
    assert 40 <= int(answer.headers["retry-after"]) <= 45
    message = answer.json()["error"]["message"]
    assert "source_failed: source <address>: refused; kept in <path>" in message
    assert "lorafleet adapters retry sql/v1" in message


async def test_a_client_that_waits_longer_than_the_next_try_gets_its_answer():
    control = with_sql()
    control.ensure = failed("source_failed: refused", retry_in_s=20.0)
    limits = {"cold_start_timeout_s": 6000}
    async with fleet(EngineDouble("w0"), control=control, **limits) as (client, _, parts):
        headers = {"x-lorafleet-timeout-s": "600"}
        body = {**CHAT, "lora_id": "sql/v1"}
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=headers))
        await until(lambda: (start := parts.cold_starts.loading.get("sql/v1")) and start.trouble)
        control.residents["w0"] = ["sql/v1"]
        control.tell()
        assert (await asking).status_code == 200


async def test_a_deadline_that_passes_during_a_load_says_how_far_it_was():
    async def silent(control, lora_id):
        return loading(lora_id, progress="worker w0 has fetched 0 bytes from its source in 58 s")

    control = with_sql()
    control.ensure = silent
    async with fleet(EngineDouble("w0"), control=control, cold_start_timeout_s=patience(2)) as (client, _, _):
        body = {**CHAT, "lora_id": "sql/v1"}
        headers = {"x-lorafleet-timeout-s": str(patience(0.5))}
        late, longer = await asyncio.gather(
            client.post("/v1/chat/completions", json=body, headers=headers),
            client.post("/v1/chat/completions", json=body),
        )
    assert (error_of(late), error_of(longer)) == ((504, "deadline_exceeded"), (503, "adapter_loading"))
    for answer in (late, longer):
        assert "worker w0 has fetched 0 bytes from its source in 58 s" in answer.json()["error"]["message"]


async def test_homes_that_cannot_load_it_are_named_when_the_time_is_over():
    control = with_sql()
    control.ensure, control.load_refusals = nobody_leads, {"w0": (502, "source_failed", "source x: refused")}
    async with fleet(EngineDouble("w0"), control=control, cold_start_timeout_s=patience(0.3)) as (client, _, _):
        answer = await client.post("/v1/chat/completions", json={**CHAT, "lora_id": "sql/v1"})
    assert error_of(answer) == (503, "load_failed")
    assert "w0: source x: refused" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("retry_in_s", "left_s", "has_deadline", "waits"),
    [(1, 60, False, True), (30, 60, False, False), (30, 60, True, True), (30, 20, True, False), (1, 0.5, False, False)],
)
def test_only_a_client_with_a_deadline_waits_long_for_the_next_try(retry_in_s, left_s, has_deadline, waits):
    assert waits_for_retry(retry_in_s, left_s, has_deadline=has_deadline) is waits


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("source /srv/a/b: no folder; sql/v1 and acme/x@3f", "source <path>: no folder; sql/v1 and acme/x@3f"),
        ("source s3://bucket/a, file:///srv/x", "source <address>, <address>"),
        ("'/var/lib/x'=\"/y\"", "'<path>'=\"<path>\""),
        ("w0: 10.0.0.7:8100 and/or rank 1/2", "w0: <address> and/or rank 1/2"),
    ],
)
def test_paths_and_addresses_of_hosts_are_left_out_and_names_stay(text, shown):
    assert without_places(text) == shown


@pytest.mark.parametrize("model", [BASE, "sql/v1"])
async def test_a_request_waits_for_a_starting_replica_of_its_base_model(model):
    control = with_sql("w0")
    control.ensure, control.starting = nobody_leads, frozenset({"w0", "w1"})
    engines = EngineDouble("w0"), EngineDouble("w1")
    async with fleet(*engines, control=control, cold_start_timeout_s=6000) as (client, _, parts):
        asking = [asyncio.create_task(client.post("/v1/chat/completions", json={**CHAT, "model": model})) for _ in "ab"]
        await until(lambda: len(parts.cold_starts.held) == 2)
        control.starting = frozenset({"w1"})
        control.tell()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200, 200]
        assert not len(parts.cold_starts.held)


async def test_requests_for_a_starting_replica_are_bounded_in_number_and_time():
    control = AgentDouble(starting=frozenset({"w0"}))
    limits = {"cold_start_timeout_s": patience(1), "max_held_requests": 1}
    async with fleet(EngineDouble("w0"), control=control, **limits) as (client, _, parts):
        first = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await until(lambda: len(parts.cold_starts.held) == 1)
        assert error_of(await client.post("/v1/chat/completions", json=CHAT)) == (429, "saturated")
        refused = await first
        assert error_of(refused) == (503, "no_replica")
        assert "(w0: starting); try again" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        late = await client.post("/v1/chat/completions", json=CHAT, headers={"x-lorafleet-timeout-s": "0.05"})
        assert error_of(late) == (504, "deadline_exceeded")


async def test_a_base_model_without_any_replica_that_starts_is_refused_at_once():
    control = AgentDouble(drained={"w0": "a"})
    async with fleet(EngineDouble("w0"), control=control, cold_start_timeout_s=6000) as (client, _, parts):
        await until(lambda: [r.state for r in parts.discovery.fleet.replicas.values()] == ["draining"])
        async with within(5):
            assert error_of(await client.post("/v1/chat/completions", json=CHAT)) == (503, "no_replica")
