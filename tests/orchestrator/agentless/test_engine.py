"""Agentless engines as workers: the orchestrator loads adapters from their own disks."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from structlog.testing import capture_logs

from lorafleet.engine.vllm_plugin.catalog_offers import URL_VARIABLE
from lorafleet.identity import FileEntry, files_digest
from lorafleet.local.tiny_model import make_adapter, make_model
from orchestrator.config import OrchestratorSettings
from orchestrator.model.snapshot import AdapterFailure
from tests.engines import RunningEngine, start_engine
from tests.orchestrator.conftest import OrchestratorUnderTest
from tests.orchestrator.doubles import FakeAgent
from tests.patience import patience
from tests.serving import client_of, serving
from tests.workers.changed_adapters import adapter_of_zeros
from tests.workers.running import sim_inside

DIGEST = "ab" * 32
SQL = "team/sql"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("sql", "legal", "code"):
        make_adapter(folder, name)
    return folder


@pytest.fixture(scope="module")
def shared(model) -> Iterator[RunningEngine]:
    running = start_engine("sim", model)
    yield running
    running.stop()


@pytest.fixture
def engine(shared) -> Iterator[RunningEngine]:
    """An engine with nothing loaded, before and after the test."""
    yield shared
    for name in held(shared):
        httpx.post(
            f"{shared.url}/v1/unload_lora_adapter", json={"lora_name": name}, verify=False, timeout=patience(10)
        ).raise_for_status()


def held(engine: RunningEngine) -> dict[str, str]:
    models = httpx.get(f"{engine.url}/v1/models", verify=False, timeout=patience(10)).json()["data"]
    return {model["id"]: model["root"] for model in models if model["parent"]}


class OrchestratorOfEngines(OrchestratorUnderTest):
    """An orchestrator with agentless engines, which report at the start of each turn."""

    async def beat(self):
        await super().beat()
        await self.built.agentless.report_once(self.reconciler.monitor.record_heartbeat)


@pytest.fixture
async def house_of(tmp_path, clock):
    """Opens an orchestrator in front of these engines."""
    opened = []

    def make(*running, engines=(), **settings):
        named = (*engines, *(f"e{i}={engine.url}" for i, engine in enumerate(running)))
        opened.append(OrchestratorOfEngines(tmp_path / f"{len(opened)}.db", clock, engines=named, **settings))
        return opened[-1]

    yield make
    for service in opened:
        await service.close()


def register(service, shelf, name="sql", *, lora_id=SQL, **more):
    return service.register(
        lora_id, **{"source": f"file://{shelf / name}", "base_model": "tiny-qwen", "digest": DIGEST} | more
    )


@pytest.mark.fleet
async def test_an_adapter_on_the_engines_disk_is_loaded_and_unloaded(house_of, engine, shelf):
    service = house_of(engine, engine_slots=4, engine_roots=(shelf,))
    await register(service, shelf)
    await service.settle()
    await service.ensure(SQL)
    await service.settle()
    assert held(engine) == {f"{SQL}@{DIGEST[:12]}": str(shelf / "sql")}
    item = await service.adapter(SQL)
    assert (item["status"]["state"], item["status"]["workers"], item["spec"]["digest"]) == ("ready", ["e0"], DIGEST)
    assert await service.turn() == []

    (await service.http.delete(f"/v1/adapters/{SQL}")).raise_for_status()
    for _ in range(4):
        await service.turn()
        service.clock.now += 31
    assert held(engine) == {}


@pytest.mark.fleet
async def test_report_that_was_begun_before_a_load_does_not_take_the_load_back(house_of, engine, shelf):
    service, early = house_of(engine, engine_slots=4, engine_roots=(shelf,)), []
    await register(service, shelf)
    await service.settle()
    await service.built.agentless.report_once(early.append)
    await service.ensure(SQL)
    await service.settle()
    service.reconciler.monitor.record_heartbeat(early[0])
    assert (await service.adapter(SQL))["status"]["workers"] == ["e0"]
    late = []
    await service.built.agentless.report_once(late.append)
    (await service.http.delete(f"/v1/adapters/{SQL}")).raise_for_status()
    for _ in range(4):
        await service.turn()
        service.clock.now += 31
    service.reconciler.monitor.record_heartbeat(late[0])
    assert service.reconciler.reports.workers["e0"].report.lora.loaded_loras == ()


@pytest.mark.fleet
async def test_the_catalog_gives_routers_the_engines_url(house_of, engine):
    service = house_of(engine)
    await service.turn()
    (worker,) = (await service.http.get("/v1/catalog")).json()["workers"]
    assert worker == {
        "id": "e0",
        "agent_url": "",
        "state": "ready",
        "engine_url": engine.url,
        "agent_boot_id": "",
        "kept_out": [],
    }
    (item,) = (await service.http.get("/v1/workers")).json()["data"]
    assert (item["agent_url"], item["engine_url"], item["base_model"]) == ("", engine.url, "tiny-qwen")


@pytest.mark.fleet
async def test_a_full_engine_unloads_the_named_victim(house_of, engine, shelf):
    service = house_of(engine, engine_slots=2, engine_roots=(shelf,))
    await service.http.patch("/v1/policy", json={"min_residency_s": 0, "reserve_slots": 0})
    for number, name in enumerate(("sql", "legal", "code")):
        await register(service, shelf, name, lora_id=name, digest=f"{number}" * 64)
        await service.settle()
        await service.ensure(name)
        for _ in range(4):
            service.clock.now += 1
            await service.turn()
    assert held(engine).keys() == {f"legal@{'1' * 12}", f"code@{'2' * 12}"}


@pytest.mark.fleet
async def test_an_adapter_listed_at_engine_start_is_an_orphan_and_stays(house_of, engine, shelf):
    load = {"lora_name": "own", "lora_path": str(shelf / "legal")}
    async with client_of() as client:
        (await client.post(f"{engine.url}/v1/load_lora_adapter", json=load)).raise_for_status()
    service = house_of(engine, engine_slots=3, engine_roots=(shelf,))
    await register(service, shelf)
    await service.settle()
    await service.ensure(SQL)
    await service.settle()
    assert held(engine).keys() == {"own", f"{SQL}@{DIGEST[:12]}"}
    (item,) = (await service.http.get("/v1/workers")).json()["data"]
    assert item["orphans"] == ["own"]


async def test_no_adapter_is_loaded_into_an_engine_with_an_unknown_connector(house_of, model, shelf):
    config = '{"kv_connector": "Mine", "kv_role": "kv_both"}'
    async with sim_inside(model, "--kv-transfer-config", config) as url:
        own = {"lora_name": "own", "lora_path": str(shelf / "legal")}
        async with client_of() as client:
            (await client.post(f"{url}/v1/load_lora_adapter", json=own)).raise_for_status()
        service = house_of(engines=(f"e0={url}",), engine_slots=4, engine_roots=(shelf,))
        await register(service, shelf)
        with capture_logs() as logs:
            await service.settle()
        answer = (await service.ensure(SQL)).json()
        assert answer["fits_nowhere"]
        assert "engine_salt" in answer["error"]
        (item,) = (await service.http.get("/v1/workers")).json()["data"]
        assert "engine_salt" in item["refusal"]
        assert (item["adapters"], item["orphans"], item["capacity"]["available_slots"]) == ([], [], 0)
        told = [line for line in logs if line["event"] == "engine takes no adapters"]
        assert [line["reason"] for line in told] == [item["refusal"]]
        load = {"lora_id": SQL, "source": f"file://{shelf}/sql", "digest": DIGEST}
        refused = await service.built.agentless.handle_async_request(
            httpx.Request("POST", "plain://workers/e0/v1/admin/load_lora", json=load)
        )
        assert (refused.status_code, json.loads(refused.content)["error"]["code"]) == (409, "adapters_refused")
        assert await models_of(url) == {"tiny-qwen", "own"}

        trusting = house_of(engines=(f"e0={url}",), engine_slots=4, engine_roots=(shelf,), engine_salt="always")
        await register(trusting, shelf)
        await trusting.settle()
        await trusting.ensure(SQL)
        await trusting.settle()
        assert (await trusting.adapter(SQL))["status"]["workers"] == ["e0"]


async def models_of(url):
    async with client_of() as client:
        return {model["id"] for model in (await client.get(f"{url}/v1/models")).json()["data"]}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"digest": None}, "register team/sql with its digest"),
        ({"source": "hf://org/sql"}, "fetches nothing"),
        ({"source": "file:///etc"}, "loads from below"),
        ({"source": "file://{shelf}/../x"}, "loads from below"),
        ({"source": "file://{shelf}%2F..%2Fx"}, "loads from below"),
    ],
)
@pytest.mark.fleet
async def test_a_forbidden_source_fails_with_its_reason_before_the_engine(house_of, engine, shelf, spec, why):
    service = house_of(engine, engine_slots=4, engine_roots=(shelf,))
    spec = {key: value.format(shelf=shelf) if value else value for key, value in spec.items()}
    await register(service, shelf, **spec)
    await service.settle()
    await service.ensure(SQL)
    for _ in range(3):
        await service.turn()
    item = await service.adapter(SQL)
    assert why in item["status"]["error"]
    assert held(engine) == {}


@pytest.mark.fleet
async def test_a_missing_path_is_reported_without_quarantine(house_of, engine, shelf):
    service = house_of(engine, engine_slots=4, engine_roots=(shelf,))
    await register(service, shelf, "absent")
    await service.settle()
    answer = (await service.ensure(SQL)).json()
    for _ in range(3):
        await service.turn()
    answer = (await service.ensure(SQL)).json()
    assert "No adapter found" in answer["error"]["message"]
    assert (await service.adapter(SQL))["status"]["state"] != "failed"


@pytest.mark.fleet
async def test_an_adapter_whose_policy_requires_acceptance_is_not_loaded_without_an_agent(house_of, engine, shelf):
    service = house_of(engine, engine_slots=4, engine_roots=(shelf,))
    await register(service, shelf, policy={"acceptance": "require"})
    await service.settle()
    await service.ensure(SQL)
    for _ in range(3):
        await service.turn()
    item = await service.adapter(SQL)
    assert "acceptance_unknown" in item["status"]["error"]
    assert "has no agent that compares it" in item["status"]["error"]
    assert (held(engine), item["status"]["state"]) == ({}, "registered")


@pytest.mark.parametrize(("status", "code"), [(500, "adapter_refused"), (401, None), (503, None)])
async def test_only_engine_errors_about_the_adapter_count_against_it(house_of, status, code):
    """A wrong key or an overload must not quarantine the adapter."""
    models = {"data": [{"id": "tiny-qwen", "owned_by": "vllm"}]}
    refusing = Starlette(
        routes=[
            Route("/health", lambda _: PlainTextResponse("")),
            Route("/metrics", lambda _: PlainTextResponse("")),
            Route("/v1/models", lambda _: JSONResponse(models)),
            Route("/v1/load_lora_adapter", lambda _: PlainTextResponse("no", status), methods=["POST"]),
        ]
    )
    async with serving(refusing) as url:
        service = house_of(engines=(f"e0={url}",), engine_slots=4, engine_roots=("/adapters",))
        await service.register(SQL, source="file:///adapters/sql", base_model="tiny-qwen", digest=DIGEST)
        await service.settle()
        await service.ensure(SQL)
        await service.turn()
        await service.turn()
        item = await service.adapter(SQL)
        assert f"the engine answered {status}" in item["status"]["error"]
        assert item["status"]["state"] == ("failed" if code else "registered")


@pytest.mark.parametrize("fails", ["unload", "load"])
async def test_a_failed_unload_does_not_count_against_the_new_adapter(house_of, fails):
    old = {"id": f"team/old@{DIGEST[:12]}", "root": "/adapters/old", "parent": "tiny-qwen"}
    models = {"data": [{"id": "tiny-qwen", "owned_by": "vllm"}, *([old] if fails == "unload" else [])]}

    def fail(_request):
        return PlainTextResponse("no" if fails == "unload" else "EngineCore encountered an issue.", 500)

    failing = Starlette(
        routes=[
            Route("/health", lambda _: PlainTextResponse("")),
            Route("/metrics", lambda _: PlainTextResponse("")),
            Route("/v1/models", lambda _: JSONResponse(models)),
            Route(f"/v1/{fails}_lora_adapter", fail, methods=["POST"]),
            Route("/v1/load_lora_adapter", lambda _: PlainTextResponse(""), methods=["POST"]),
        ]
    )
    async with serving(failing) as url:
        service = house_of(engines=(f"e0={url}",), engine_slots=1, engine_roots=("/adapters",))
        for lora_id in (SQL, "team/old"):
            await service.register(lora_id, source="file:///adapters/sql", base_model="tiny-qwen", digest=DIGEST)
        await service.http.patch("/v1/policy", json={"min_residency_s": 0, "drain_deadline_s": 0})
        await service.settle()
        await service.ensure(SQL)
        service.clock.now += 2.0  # a request first waits as long as the loss of the idle copy will cost, about a second
        for _ in range(3):
            await service.turn()
        item = await service.adapter(SQL)
        assert f"{fails} team/" in item["status"]["error"]
        assert item["status"]["state"] == "registered"


@pytest.mark.fleet
async def test_an_engine_without_runtime_loading_gets_no_adapter(house_of, model, shelf):
    closed = start_engine("sim", model, environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"})
    try:
        service = house_of(closed, engine_slots=4, engine_roots=(shelf,))
        await register(service, shelf)
        await service.settle()
        await service.ensure(SQL)
        assert not [action for action in await service.turn() if action.operation == "load"]
        assert held(closed) == {}
    finally:
        closed.stop()


@pytest.mark.fleet
async def test_an_adapter_to_be_fetched_goes_to_a_worker_with_an_agent(house_of, engine):
    service = house_of(engine)
    await service.join(FakeAgent("w0"))
    await service.register("sql/v1", source="hf://org/sql")
    await service.settle()
    await service.ensure("sql/v1")
    await service.settle()
    assert (await service.adapter("sql/v1"))["status"]["workers"] == ["w0"]


@pytest.mark.fleet
async def test_a_gone_engine_is_a_lost_worker_whose_adapters_are_replaced(house_of, model, shelf):
    first, second = (start_engine("sim", model) for _ in range(2))
    try:
        service = house_of(first, second, engine_slots=4, engine_roots=(shelf,))
        await register(service, shelf)
        await service.settle()
        await service.ensure(SQL)
        await service.settle()
        (where,) = (await service.adapter(SQL))["status"]["workers"]
        gone, left = (first, second) if where == "e0" else (second, first)
        gone.stop()
        for _ in range(6):
            service.clock.now += 2
            await service.turn()
        assert held(left).keys() == {f"{SQL}@{DIGEST[:12]}"}
        states = {w["id"]: w["state"] for w in (await service.http.get("/v1/workers")).json()["data"]}
        assert states[where] == "lost"
    finally:
        first.stop()
        second.stop()


@pytest.mark.fleet
async def test_a_worker_without_an_agent_is_drained_and_used_again(house_of, engine):
    service = house_of(engine)
    await service.turn()
    (await service.http.post("/v1/workers/e0/drain", json={"deadline_s": 0})).raise_for_status()
    for _ in range(3):
        await service.turn()
    assert (await service.http.get("/v1/workers/e0")).json()["state"] == "draining"
    (await service.http.post("/v1/workers/e0/uncordon")).raise_for_status()
    await service.settle()
    await service.turn()
    assert (await service.http.get("/v1/workers/e0")).json()["state"] == "ready"


@pytest.mark.parametrize(
    "settings",
    [
        {"engine_slots": 4},
        {"engine_roots": ("/adapters",)},
        {"engine_slots": 4, "engine_roots": ("adapters",)},
        {"engines": ("e0:8100",)},
    ],
)
def test_contradictory_engine_settings_are_refused(settings):
    with pytest.raises(ValueError, match="engine"):
        OrchestratorSettings(**settings)
    assert OrchestratorSettings(engine_slots=1, engine_roots=("/a",)).engine_roots == (PurePosixPath("/a"),)


IGNORED_BY_ALL = ("--lora-target-modules", "embed_tokens")


async def agentless_item(house_of, model, shelf, name="sql", **settings):
    """The item of an adapter that an engine without an agent has been asked to load, and what that engine lists."""
    async with sim_inside(model, *IGNORED_BY_ALL) as url:
        service = house_of(engines=(f"e0={url}",), engine_slots=4, engine_roots=(shelf,), **settings)
        await register(service, shelf, name)
        await service.settle()
        await service.ensure(SQL)
        await service.settle()
        async with client_of() as client:
            models = (await client.get(f"{url}/v1/models")).json()["data"]
        return await service.adapter(SQL), [each["id"] for each in models if each["parent"]]


async def test_engine_without_an_agent_that_ignores_an_adapter_does_not_serve_it(house_of, model, shelf):
    item, listed = await agentless_item(house_of, model, shelf)
    assert (item["status"]["state"], listed) == ("failed", [])
    assert "adapter_no_effect" in item["status"]["error"]
    assert "its weights are not zero" in item["status"]["error"]


async def test_canary_of_engines_without_agents_may_warn_or_be_off(house_of, model, shelf):
    item, _ = await agentless_item(house_of, model, shelf, engine_canary="warn")
    assert (item["status"]["state"], item["status"]["card"]["effect"]) == ("ready", "unknown")
    assert "to the last bit" in item["status"]["note"]
    item, _ = await agentless_item(house_of, model, shelf, engine_canary="off")
    assert (item["status"]["state"], item["status"]["card"]["effect"], item["status"]["note"]) == ("ready", "", "")


async def test_zeros_of_an_adapter_at_an_engine_without_an_agent_are_read_where_its_folder_is(
    house_of, model, shelf, tmp_path
):
    adapter_of_zeros(shelf / "sql", tmp_path / "shelf" / "fresh")
    item, listed = await agentless_item(house_of, model, tmp_path / "shelf", "fresh")
    assert (item["status"]["state"], item["status"]["card"]["effect"], len(listed)) == ("ready", "zero", 1)


async def test_effect_that_the_engines_answers_show_is_in_the_item(house_of, model, shelf):
    async with sim_inside(model) as url:
        service = house_of(engines=(f"e0={url}",), engine_slots=4, engine_roots=(shelf,))
        await register(service, shelf)
        await service.settle()
        await service.ensure(SQL)
        await service.settle()
        assert (await service.adapter(SQL))["status"]["card"]["effect"] == "seen"


@pytest.mark.fleet
async def test_an_engine_with_our_plugin_loads_what_the_catalog_offers_and_nothing_else(house_of, model, tmp_path):
    folder = make_adapter(tmp_path, "sql")
    digest = files_digest(
        FileEntry(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in (folder / "adapter_config.json", folder / "adapter_model.safetensors")
    )
    houses = []

    async def ask_house(request):
        if not houses:
            return JSONResponse({}, 503)
        answer = await houses[0].http.get(f"{request.url.path}?{request.url.query}")
        return PlainTextResponse(answer.text, answer.status_code)

    relay = Starlette(routes=[Route("/{path:path}", ask_house)])
    async with serving(relay) as house_url:
        offers = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", URL_VARIABLE: f"{house_url}/v1/workers/e0/offers"}
        slots = ("--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "16")
        async with sim_inside(model, *slots, environment=offers) as url, client_of(url) as engine:

            async def ask(name: str) -> int:
                body = {"model": name, "prompt": "hello", "max_tokens": 1}
                return (await engine.post("/v1/completions", json=body)).status_code

            async def listed() -> dict[str, str]:
                models = (await engine.get("/v1/models")).json()["data"]
                return {card["id"]: card["root"] for card in models if card["parent"]}

            name = f"{SQL}@{digest[:12]}"
            assert await ask(name) == 404  # the catalog cannot be asked
            service = house_of(engines=(f"e0={url}",), engine_slots=4, engine_roots=(tmp_path,), engine_offers=True)
            await register(service, tmp_path, digest=digest)
            await register(service, tmp_path, lora_id="other", digest=DIGEST)
            await register(service, tmp_path, lora_id="elsewhere", digest=digest, base_model="another")
            await service.settle()
            houses.append(service)
            await service.ensure(SQL)
            await service.settle()
            assert await listed() == {name: str(tmp_path / "sql")}
            assert (await service.adapter(SQL))["status"]["state"] == "ready"
            # What was lost with an engine's names comes back with a request alone.
            (await engine.post("/v1/unload_lora_adapter", json={"lora_name": name})).raise_for_status()
            assert (await ask(name), await listed()) == (200, {name: str(tmp_path / "sql")})
            others = (SQL, "sql", str(tmp_path / "sql"), f"{SQL}@{DIGEST[:12]}", f"other@{DIGEST[:12]}")
            assert [await ask(other) for other in (*others, f"elsewhere@{digest[:12]}")] == [404] * 6

            (await engine.post("/v1/unload_lora_adapter", json={"lora_name": name})).raise_for_status()
            failures, refused = service.reconciler.operations.failures, "adapter_no_effect"
            failures.set_failure((SQL, "e0"), AdapterFailure(until=service.clock.now + 60, code=refused, message=""))
            assert await ask(name) == 404
            failures.record_success((SQL, "e0"))
            for mode, status in (("require", 404), ("warn", 200)):
                (await service.http.patch("/v1/policy", json={"acceptance": mode})).raise_for_status()
                assert await ask(name) == status

            (await service.http.delete(f"/v1/adapters/{SQL}")).raise_for_status()
            for _ in range(4):
                await service.turn()
                service.clock.now += 31
            assert (await listed(), await ask(name)) == ({}, 404)
