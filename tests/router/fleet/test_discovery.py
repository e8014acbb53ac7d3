"""Engines without an agent: a router that has nothing else serves their base model and the adapters that they list."""

import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.testing import capture_logs

from lorafleet.engine.agentless import AgentlessEngine, StatusRefused, engines_by_id, has_start_time, process_boot_id
from lorafleet.engine.metrics_page import SERVER_INFO
from lorafleet.local.tiny_model import make_adapters, make_model
from lorafleet.service.settings import load as load_settings
from orchestrator.model.catalog import CatalogWorker
from router.app import build
from router.config import RouterSettings
from router.fleet.catalog import discovered_adapters
from router.http.engine_connection import EngineLost
from tests.engines import RunningEngine, start_engine
from tests.patience import patience, until
from tests.router.doubles import AgentDouble, EngineDouble, error_of, fleet
from tests.serving import client_of, serving

BASE = "tiny-qwen"
SQL = "sql-expert/v1"
# 19 tokens a sentence and more: several blocks of 32.
LONG = "The quick brown fox jumps over the lazy dog, again and again and again. " * 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    model = make_model(tmp_path_factory.mktemp("model"))
    into = tmp_path_factory.mktemp("adapters")
    return model, {str(folder.relative_to(into)): folder for folder in make_adapters(into)}


@pytest.fixture(scope="module")
def engines(folders: tuple[Path, dict[str, Path]]) -> Iterator[tuple[RunningEngine, RunningEngine]]:
    model, adapters = folders
    first = start_engine("sim", model, flags=("--max-loras", "4", "--max-cpu-loras", "8"))
    second = start_engine("sim", model, flags=("--kv-events-config", "{}"))
    try:
        load(first, "sql", adapters[SQL])
        load(first, "both", adapters["legal/v2"])
        load(second, "both", adapters["legal/v2"])
        yield first, second
    finally:
        first.stop()
        second.stop()


def load(engine: RunningEngine, name: str, path: Path) -> None:
    answer = httpx.post(
        f"{engine.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}, timeout=patience(10)
    )
    assert answer.status_code == 200, answer.text


def unload(engine: RunningEngine, name: str) -> None:
    httpx.post(
        f"{engine.url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=patience(10)
    ).raise_for_status()


@contextlib.asynccontextmanager
async def routing(*named: str, **settings) -> AsyncIterator:
    """(client, parts) of a router whose workers are these engines."""
    app, parts = build(
        RouterSettings(**{"engines": named, "metadata_poll_s": 0.1, "cold_start_timeout_s": 1.0, **settings})
    )
    async with serving(app, http=app.state.http) as url, client_of(url) as client:
        assert await parts.discovery.changes.until(parts.discovery.is_synced, timeout_s=patience(10))
        yield client, parts


async def ask(client: httpx.AsyncClient, model: str, prompt: str = "hello") -> httpx.Response:
    return await client.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 4})


@pytest.mark.fleet
async def test_a_router_needs_nothing_but_engines_to_serve_base_and_listed_adapters(engines) -> None:
    first, second = engines
    async with routing(f"a={first.url}", f"b={second.url}") as (client, _):
        assert (await client.get("/ready")).status_code == 200
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        assert cards.keys() == {BASE, "sql", "both"}
        assert cards["sql"]["parent"] == BASE
        answer = await ask(client, "sql")
        assert answer.status_code == 200, answer.text
        assert (answer.headers["x-lorafleet-worker"], answer.json()["model"]) == ("a", "sql")
        by_base = await ask(client, f"{BASE}:sql")
        assert by_base.json()["choices"][0]["text"] == answer.json()["choices"][0]["text"]
        assert (await ask(client, BASE)).json()["choices"][0]["text"] != answer.json()["choices"][0]["text"]
        assert {(await ask(client, "both")).status_code for _ in range(4)} == {200}
        assert error_of(await ask(client, "nobody")) == (404, "model_not_found")


@pytest.mark.fleet
async def test_without_an_orchestrator_no_catalog_grows_old(engines) -> None:
    async with routing(f"a={engines[0].url}") as (client, _):
        assert "\nlorafleet_router_catalog_age_seconds 0.0\n" in (await client.get("/metrics")).text


async def test_an_api_server_that_is_nowhere_is_no_fault_of_ours(tmp_path) -> None:
    with capture_logs() as logs:
        async with fleet(EngineDouble("w0"), kube_selector="app=vllm", kubeconfig=tmp_path / "none") as (_, _, parts):
            await until(lambda: "API server not configured" in {line["event"] for line in logs})
            assert parts.metrics.loop_failures.labels("slices").value == 0


@pytest.mark.fleet
async def test_adapters_come_and_go_with_the_engines_own_list(engines, folders) -> None:
    first, _ = engines
    async with routing(f"a={first.url}") as (client, parts):
        assert error_of(await ask(client, "late")) == (404, "model_not_found")
        load(first, "late", folders[1]["python-expert/v1"])
        await until(lambda: "late" in parts.discovery.fleet.adapters)
        assert (await ask(client, "late")).status_code == 200
        unload(first, "late")
        await until(lambda: "late" not in parts.discovery.fleet.adapters)
        assert error_of(await ask(client, "late")) == (404, "model_not_found")


@pytest.mark.fleet
async def test_an_engines_kv_events_are_found_and_followed_without_being_named(engines) -> None:
    first, _ = engines
    async with routing(f"a={first.url}") as (client, parts):
        await until(lambda: parts.accuracy.state("a") == "exact")
        await ask(client, "sql", LONG)
        index = parts.feeds.index(BASE, 32)
        await until(lambda: index.block_counts().get("a", 0) > 8)
        again = await ask(client, "sql", LONG)
        assert int(again.headers["x-lorafleet-cached-tokens"]) > 256
        # The same prompt under another name has nothing of it.
        assert (await ask(client, "both", LONG)).headers["x-lorafleet-cached-tokens"] == "0"


@pytest.mark.fleet
async def test_without_events_what_is_cached_is_an_estimate(engines) -> None:
    _, second = engines
    async with routing(f"b={second.url}") as (client, parts):
        await ask(client, BASE, LONG)
        assert parts.accuracy.state("b") == "estimate"
        again = await ask(client, BASE, LONG)
        assert int(again.headers["x-lorafleet-cached-tokens"]) > 256


@pytest.mark.fleet
async def test_an_adapter_whose_engine_is_away_is_waited_for_and_never_unknown(engines, folders) -> None:
    lone = start_engine("sim", folders[0])
    try:
        load(lone, "alone", folders[1][SQL])
        async with routing(f"a={lone.url}", f"b={engines[1].url}", unreachable_after_s=0.3) as (client, parts):
            assert (await ask(client, "alone")).status_code == 200
            lone.stop()
            await until(lambda: parts.discovery.fleet.replicas["a"].state == "unreachable")
            assert error_of(await ask(client, "alone")) == (503, "adapter_loading")
            assert (await ask(client, BASE)).headers["x-lorafleet-worker"] == "b"
    finally:
        lone.stop()


async def test_a_router_whose_engines_are_all_away_says_that_it_knows_nothing_yet() -> None:
    app, _ = build(RouterSettings(engines=("http://127.0.0.1:9",), first_sync_wait_s=0.1))
    async with serving(app, http=app.state.http) as url, client_of(url) as client:
        answer = await ask(client, BASE)
        assert error_of(answer) == (503, "catalog_unavailable")
        ready = await client.get("/ready")
        assert error_of(ready) == (503, "not_synced")
        assert "worker" in ready.json()["error"]["message"]
        for told in (answer, ready, await client.get("/v1/models")):  # there is none to start, or to look for
            assert "orchestrator" not in told.text


@pytest.mark.fleet
async def test_beside_a_catalog_its_adapters_are_found_by_their_engine_names_and_keep_their_names(
    engines, folders
) -> None:
    first, second = engines
    control = AgentDouble()
    control.add_adapter("team/sql")
    control.add_adapter("sql", tenants=())
    ours = f"team/sql@{'ab' * 6}"
    load(first, ours, folders[1][SQL])
    try:
        async with serving(control.app) as url:
            control.url = url
            async with routing(f"a={first.url}", f"b={second.url}", orchestrator_url=url) as (client, parts):
                await until(lambda: len(parts.discovery.fleet.replicas) == 2)
                answer = await ask(client, "team/sql")
                assert (answer.status_code, answer.headers["x-lorafleet-worker"]) == (200, "a")
                known = parts.discovery.fleet.adapters
                assert known.keys() == {"team/sql", "sql", "both"}
                # A name of the catalog's is the catalog's, with its digest; nobody reports that one.
                assert not known["sql"].is_listed
                assert known["both"].is_listed
    finally:
        unload(first, ours)


@pytest.mark.fleet
async def test_a_worker_of_the_catalog_without_an_agent_is_asked_itself(engines) -> None:
    class OneEngine(AgentDouble):
        @property
        def app(self):
            app = super().app

            async def catalog(_request):
                worker = CatalogWorker(id="e0", agent_url="", engine_url=engines[0].url, state="ready")
                return JSONResponse({"revision": 1, "workers": [asdict(worker)]})

            app.router.routes.insert(0, Route("/v1/catalog", catalog))
            return app

    control = OneEngine()
    async with serving(control.app) as url:
        app, parts = build(RouterSettings(orchestrator_url=url, metadata_poll_s=0.1))
        async with serving(app, http=app.state.http) as router, client_of(router) as client:
            await until(lambda: "e0" in parts.discovery.fleet.replicas)
            assert (await ask(client, "sql")).headers["x-lorafleet-worker"] == "e0"


async def test_no_adapter_of_an_engine_is_believed_that_is_no_vllm() -> None:
    """Four of seven engines answer 200 from the base model for an adapter that they lack."""
    engine = EngineDouble("x")
    listed = [{"id": BASE, "owned_by": "llamacpp"}, {"id": "sql", "owned_by": "llamacpp", "parent": BASE}]
    app = engine.app
    app.router.routes += [
        Route("/v1/models", lambda _: JSONResponse({"data": listed})),
        Route("/metrics", lambda _: PlainTextResponse("")),
    ]
    async with serving(app) as url, routing(f"x={url}") as (client, _):
        assert error_of(await ask(client, "sql")) == (404, "model_not_found")
        assert (await ask(client, BASE)).status_code == 200
        assert engine.bodies[-1]["model"] == BASE


class GuardedEngine:
    """An engine that may want a key, as vLLM does with --api-key; what each call showed it is in `shown`."""

    def __init__(self, wants: str = "") -> None:
        self.wants = wants
        self.shown: dict[str, set[str | None]] = {}
        self.engine = EngineDouble("x", ids=[1, 2, 3])

    @property
    def app(self) -> ASGIApp:
        inner = self.engine.app
        inner.router.routes += [
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": BASE, "owned_by": "vllm"}]})),
            Route("/metrics", lambda _: PlainTextResponse("")),
        ]

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                shown = dict(scope["headers"]).get(b"authorization", b"").decode() or None
                self.shown.setdefault(scope["path"], set()).add(shown)
                if self.wants and scope["path"].startswith("/v1/") and shown != f"Bearer {self.wants}":
                    await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                    return
            await inner(scope, receive, send)

        return app


async def test_our_own_key_is_shown_to_no_engine() -> None:
    guarded = GuardedEngine()
    async with serving(guarded.app) as url, routing(f"x={url}", token="secret", tokenizer="remote") as (client, _):
        assert (await ask(client, BASE)).status_code == 200
        assert guarded.shown.keys() >= {"/health", "/v1/models", "/metrics", "/tokenize", "/v1/completions"}
        assert set.union(*guarded.shown.values()) == {None}


async def test_an_engine_that_wants_a_key_is_shown_its_own() -> None:
    guarded = GuardedEngine(wants="k")
    async with serving(guarded.app) as url:
        async with routing(f"x={url}", token="secret", engine_key="k") as (client, _):
            assert (await ask(client, BASE)).status_code == 200
            assert guarded.shown["/v1/completions"] == {"Bearer k"}
        app, parts = build(RouterSettings(engines=(url,), metadata_poll_s=0.1, first_sync_wait_s=0.1))
        async with serving(app, http=app.state.http) as router, client_of(router) as client:
            await until(lambda: None in guarded.shown["/v1/models"])
            assert error_of(await ask(client, BASE)) == (503, "catalog_unavailable")
            assert not parts.discovery.fleet.replicas


async def test_an_engine_beside_an_agent_is_shown_no_key() -> None:
    engine = EngineDouble("w0")
    async with fleet(engine, engine_key="k") as (client, _, _):
        assert (await ask(client, BASE)).status_code == 200
        assert "authorization" not in engine.headers[-1]


class EngineAnswers:
    """What an engine would answer, by path."""

    def __init__(self) -> None:
        self.paths = {"sql": "/adapters/a"}
        self.started_at = 100.0
        self.sources: object = None
        self.models: bytes | None = None
        self.config: object = None
        self.silent: set[str] = set()
        self.unanswered = 0
        self.has_connector = False

    async def __call__(self, path: str) -> bytes:
        if path in self.silent:
            self.unanswered += 1
            raise EngineLost("no_answer", f"GET {path}: timed out")
        if path == "/metrics":
            page = f"process_start_time_seconds {self.started_at}\n"
            if self.has_connector:
                page += 'vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 512.0\n'
            both = 'vllm:lora_requests_info{max_lora="3",waiting_lora_adapters="%s",running_lora_adapters="%s"} 1.0\n'
            return (page + both % ("sql", "sql") + both % ("", "")).encode()
        if path == "/v1/models" and self.models is not None:
            return self.models
        if path == "/v1/models":
            base = {"id": BASE, "owned_by": "vllm", "max_model_len": 2048, "parent": None}
            held = [{"id": name, "owned_by": "vllm", "parent": BASE, "root": root} for name, root in self.paths.items()]
            return JSONResponse({"data": [base, *held]}).body
        if path == "/kv_event_sources" and self.sources is not None:
            return JSONResponse(self.sources).body
        if path == "/health":
            return b""
        if path == SERVER_INFO and self.config is not None:
            return JSONResponse(self.config).body
        raise StatusRefused(f"GET {path}: 404", 404)


def boots(said: EngineAnswers, clock: Callable[[], float] = time.monotonic) -> AgentlessEngine:
    return AgentlessEngine("e0", "http://10.0.0.7:8100/", said, clock=clock)


async def test_a_name_with_another_path_is_another_boot_so_that_its_blocks_are_forgotten() -> None:
    said = EngineAnswers()
    engine = boots(said)
    first = (await engine.report()).engine_boot_id
    assert (await engine.report()).engine_boot_id == first
    said.paths = {}
    assert (await engine.report()).engine_boot_id == first  # blocks outlive an unload
    said.paths = {"sql": "/adapters/b"}
    moved = (await engine.report()).engine_boot_id
    assert moved != first
    assert process_boot_id(moved) == process_boot_id(first) == first
    said.started_at = 200.0
    assert (await engine.report()).engine_boot_id not in {first, moved}


@pytest.mark.parametrize("slow", [SERVER_INFO, "/kv_event_sources"])
async def test_an_engine_that_was_slow_to_tell_its_configuration_is_asked_again(slow: str) -> None:
    said, now = EngineAnswers(), 1000.0
    said.config = {"vllm_config": {"kv_transfer_config": {"kv_connector": "ExampleConnector"}}}
    said.sources = {"0": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}}
    engine, said.silent = boots(said, lambda: now), {slow}
    first = await engine.report()
    now += 1  # an engine that never answers is not asked at each report, which would be late
    said.silent = set()
    assert ("ExampleConnector" in first.lora.refusal) == (slow != SERVER_INFO)  # each is asked by itself
    second = await engine.report()
    assert (first.lora.refusal, first.transport.kv_events) != (second.lora.refusal, second.transport.kv_events)
    assert "ExampleConnector" in second.lora.refusal
    assert second.transport.kv_events == ("tcp://10.0.0.7:5557",)
    said.silent = {SERVER_INFO, "/kv_event_sources"}  # once a start is enough
    third = await engine.report()
    assert (third.lora.refusal, third.transport) == (second.lora.refusal, second.transport)


async def test_an_engine_that_has_not_answered_yet_is_not_said_to_report_no_connector() -> None:
    said, now = EngineAnswers(), 1000.0
    said.has_connector, said.silent = True, {SERVER_INFO}
    engine = boots(said, lambda: now)
    refusal = (await engine.report()).lora.refusal
    assert "has not answered yet" in refusal
    assert "asked again" in refusal
    assert "engine_salt" in refusal
    said.silent, now = set(), now + 1
    refusal = (await engine.report()).lora.refusal
    assert "does not report which" in refusal
    assert "asked again" not in refusal


async def test_an_engine_that_never_tells_its_configuration_is_asked_ever_more_seldom() -> None:
    said, now = EngineAnswers(), 0.0
    said.silent = {SERVER_INFO}
    engine = boots(said, lambda: now)
    for _ in range(3600):
        await engine.report()
        now += 1
    assert 12 <= said.unanswered <= 40  # doubling from 1 s to 5 minutes, with jitter


async def test_an_engine_that_does_not_say_when_it_started_may_have_started_again() -> None:
    said = EngineAnswers()
    engine = boots(said)
    assert has_start_time((await engine.report()).engine_boot_id)
    said.started_at = 0.0
    assert not has_start_time((await engine.report()).engine_boot_id)
    said.paths = {"sql": "/adapters/b"}
    assert not has_start_time((await engine.report()).engine_boot_id)


async def test_a_digest_that_nobody_has_read_is_left_empty_and_slots_are_as_the_engine_tells() -> None:
    said = EngineAnswers()
    said.paths = {"sql": "/a", f"team/x@{'0' * 12}": "/b"}
    report = await boots(said).report()
    assert [(lora.lora_id, lora.digest) for lora in report.lora.loaded_loras] == [("sql", ""), ("team/x", "")]
    assert report.lora.max_loras == 3
    assert not report.lora.enabled


@pytest.mark.parametrize(
    ("endpoints", "found"),
    [
        (["tcp://*:5557"], ("tcp://10.0.0.7:5557",)),
        (["tcp://*:5557", "tcp://*:5558"], ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")),
        (["tcp://[::]:5557"], ("tcp://10.0.0.7:5557",)),
        (["tcp://broker:5557"], ()),  # the engine connects there itself
        (["ipc:///tmp/kv"], ()),  # on its own machine
    ],
)
async def test_event_sockets_are_those_that_the_engine_has_bound(endpoints, found) -> None:
    said = EngineAnswers()
    said.sources = {
        str(rank): {"enable_kv_cache_events": True, "endpoint": endpoint, "topic": "kv"}
        for rank, endpoint in enumerate(endpoints)
    }
    assert (await boots(said).report()).transport.kv_events == found


ODD = {
    "a list": '{"data": [{"id": "m", "max_model_len": [1]}]}',
    "an object": '{"data": [{"id": "m", "max_model_len": {"a": 1}}]}',
    "infinite": '{"data": [{"id": "m", "max_model_len": Infinity}]}',
    "a number": "3",
    "no object": '{"data": [3]}',
    "a deep nest": "[" * 100_000,
}


@pytest.mark.parametrize("models", ODD.values(), ids=ODD)
async def test_an_odd_answer_is_one_error_whatever_is_odd_about_it(models) -> None:
    said = EngineAnswers()
    said.models = models.encode()
    with pytest.raises(ValueError, match=re.escape("http://10.0.0.7:8100")):
        await boots(said).report()


@pytest.mark.parametrize("sources", [[3], {"0": 3}, {"0": {"endpoint": [], "enable_kv_cache_events": True}}, {"x": {}}])
async def test_odd_event_sockets_are_none(sources) -> None:
    said = EngineAnswers()
    said.sources = sources
    assert (await boots(said).report()).transport.kv_events == ()


@pytest.mark.parametrize("models", [ODD["a list"], ODD["a deep nest"]])
async def test_an_engine_that_answers_oddly_is_silent_and_keeps_no_router_from_serving(models) -> None:
    async def odd(_request: Request) -> PlainTextResponse:
        return PlainTextResponse(models)

    sound, strange = (
        GuardedEngine(),
        Starlette(
            routes=[
                Route("/health", lambda _: PlainTextResponse("")),
                Route("/v1/models", odd),
                Route("/metrics", lambda _: PlainTextResponse("")),
            ]
        ),
    )
    async with serving(sound.app) as url, serving(strange) as other, routing(f"x={url}", f"y={other}") as (client, _):
        assert (await client.get("/ready")).status_code == 200
        assert (await ask(client, BASE)).status_code == 200


async def test_a_name_that_no_registration_could_have_is_not_served() -> None:
    said = EngineAnswers()
    said.paths = {"sql": "/a", "a\r\nset-cookie: b": "/b", "../x": "/c", "ünïcode": "/d", "two words": "/e"}
    assert discovered_adapters([await boots(said).report()], ()).keys() == {"sql"}


async def test_of_one_name_under_two_base_models_the_first_base_model_counts() -> None:
    said = EngineAnswers()
    report = await boots(said).report()
    other = report.model_copy(update={"model": report.model.model_copy(update={"base_model": "another"})})
    for reports in ([report, other], [other, report]):
        assert discovered_adapters(reports, ())["sql"].base_model == "another"


def test_engines_are_named_on_the_command_line_one_by_one_or_together() -> None:
    together = load_settings(RouterSettings, ["--engines", "http://e0:1,b=http://e1:2"], prog="router")
    one_by_one = load_settings(
        RouterSettings, ["--engines", "http://e0:1", "--engines", "b=http://e1:2"], prog="router"
    )
    assert together.engines == one_by_one.engines == ("http://e0:1", "b=http://e1:2")


def test_engines_have_ids_of_their_own() -> None:
    assert engines_by_id(["http://e0:8100/", "gold=https://e1"]) == {"e0:8100": "http://e0:8100", "gold": "https://e1"}


@pytest.mark.parametrize(
    "named",
    [["e0:8100"], ["=http://e0"], ["http://e0", "e0=http://e1"], ["a=ftp://e0"], ["a="], ["a=http://me:hidden@e0"]],
)
def test_engines_that_are_no_urls_or_named_twice_are_refused(named) -> None:
    with pytest.raises(ValueError, match="engines: ") as caught:
        engines_by_id(named)
    assert "hidden" not in str(caught.value)


def test_a_router_that_names_engines_has_no_orchestrator_unless_it_is_given_one() -> None:
    assert RouterSettings(engines=("http://e0",)).orchestrator_url == ""
    assert RouterSettings(engines=("http://e0",), orchestrator_url="http://o").orchestrator_url == "http://o"
    assert RouterSettings().orchestrator_url
    with pytest.raises(ValueError, match="orchestrator_url: give one"):
        RouterSettings(orchestrator_url="")
