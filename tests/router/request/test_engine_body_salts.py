"""Engines whose KV connector tells adapters apart by `cache_salt` alone, or not at all."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from starlette.responses import JSONResponse

from lorafleet.identity import adapter_salt, engine_name
from lorafleet.keys.key_files import hash_key
from lorafleet.local.tiny_model import make_adapters, make_model
from orchestrator.model.adapter_documents import EnsureAnswer
from router.core.errors import BadBody
from router.protocols.routes import ROUTES
from router.request.cache_salt import salt_for
from router.request.engine_body import NO_OPTIONS, EngineOptions, dialect_of
from tests.patience import until
from tests.router.doubles import BASE, DIGEST, EngineDouble, error_of, fleet, with_sql
from tests.router.fleet.test_discovery import ask, routing
from tests.serving import client_of
from tests.workers.running import sim_inside

SQL = engine_name("sql/v1", DIGEST)
LONG = "The quick brown fox jumps over the lazy dog, again and again and again. " * 20
REFUSAL = "KV connector ExampleConnector gives one adapter another's KV; its key: tokens and images"


async def post(client: httpx.AsyncClient, **body) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "a", **body})


async def test_adapters_and_clients_salts_are_salted_at_such_an_engine_alone():
    control, salted, other = with_sql("w0", "w1"), EngineDouble("w0"), EngineDouble("w1")
    control.salted = frozenset({"w0"})
    async with fleet(salted, other, control=control, policy="round_robin") as (client, _, _):
        for more in ({"model": "sql/v1"}, {"model": "sql/v1", "cache_salt": "pepper"}, {"model": BASE},
                     {"model": BASE, "cache_salt": "pepper"}):  # fmt: skip
            asked = len(salted.bodies), len(other.bodies)
            for _ in range(8):
                assert (await post(client, **more)).status_code == 200
            given = more.get("cache_salt")
            wanted = adapter_salt(SQL if more["model"] == "sql/v1" else "", given or "") or None
            assert {body.get("cache_salt") for body in salted.bodies[asked[0] :]} == {wanted}
            assert {body.get("cache_salt") for body in other.bodies[asked[1] :]} == {given}


async def test_each_item_of_a_batch_is_salted_for_its_own_adapter():
    control, engine = with_sql("w0"), EngineDouble("w0")
    control.salted = frozenset({"w0"})
    async with fleet(engine, control=control) as (client, _, _):
        await client.post("/generate", json={"text": ["a", "b"], "lora_path": ["sql/v1", None], "cache_salt": "pepper"})
        salts = {body["model"]: body["cache_salt"] for body in engine.bodies}
        assert salts == {SQL: adapter_salt(SQL, "pepper"), BASE: adapter_salt("", "pepper")}


async def test_salt_that_is_none_is_refused_where_it_would_have_to_be_salted():
    control, engine = with_sql("w0"), EngineDouble("w0")
    control.salted = frozenset({"w0"})
    async with fleet(engine, control=control) as (client, _, _):
        for wrong in ("", 7, ["a"]):
            answer = await post(client, model="sql/v1", cache_salt=wrong)
            assert (error_of(answer), answer.json()["error"]["param"]) == ((400, "invalid_request_body"), "cache_salt")
        assert (await post(client, model="sql/v1", cache_salt=None)).status_code == 200
        assert [body["cache_salt"] for body in engine.bodies] == [adapter_salt(SQL)]


def test_adapter_is_refused_at_routes_whose_body_takes_no_salt():
    rerank, chat, tokenize = (
        ROUTES["POST", "/v2/embed"],
        ROUTES["POST", "/v1/chat/completions"],
        ROUTES["POST", "/tokenize"],
    )
    with pytest.raises(BadBody, match="/v2/embed"):
        salt_for(rerank, SQL, None)
    assert salt_for(rerank, "", None) == ""
    assert salt_for(tokenize, SQL, None) == ""
    assert salt_for(chat, SQL, None) == adapter_salt(SQL) != ""


def test_salt_is_written_in_each_dialect_in_place_of_the_clients():
    body = {"cache_salt": msgspec.Raw(b'"own"'), "n": msgspec.Raw(b"1")}
    for kind in ("vllm", "sglang"):
        engine_body = dialect_of(kind, SQL).body
        assert json.loads(engine_body(body, "m", EngineOptions(cache_salt="ours"))) == {
            "cache_salt": "ours",
            "n": 1,
            "model": "m",
        }
        assert json.loads(engine_body(body, "m", NO_OPTIONS))["cache_salt"] == "own"


async def test_adapter_that_only_refusing_engines_could_have_gets_the_reason_at_once():
    async def ensure(_control, lora_id):
        told = EnsureAnswer(
            lora_id=lora_id,
            digest=DIGEST,
            state="registered",
            ready=(),
            loading=(),
            expected_s=None,
            fits_nowhere=True,
            error=f"no worker of {BASE} takes adapters ({REFUSAL})",
        )
        return JSONResponse(told.model_dump(mode="json"))

    control = with_sql()
    control.refusals, control.ensure = {"w0": REFUSAL}, ensure
    async with fleet(EngineDouble("w0"), control=control) as (client, _, _):
        answer = await post(client, model="sql/v1")
        assert error_of(answer) == (503, "no_capacity")
        assert f"no worker of {BASE} takes adapters ({REFUSAL})" in answer.json()["error"]["message"]
        assert (await post(client, model=BASE)).status_code == 200


async def test_no_adapter_is_sent_to_a_refusing_engine_or_asked_of_its_agent():
    control = with_sql("w0")  # an agent that says both: it holds the adapter, and takes none
    control.refusals = {"w0": REFUSAL}
    engine = EngineDouble("w0")
    async with fleet(engine, control=control) as (client, _, parts):
        assert not parts.discovery.fleet.replicas["w0"].residents
        control.down = True
        answer = await post(client, model="sql/v1")
        assert error_of(answer) == (503, "no_capacity")
        assert "ExampleConnector" in answer.json()["error"]["message"]
        explained = (await client.post("/v1/route", json={"model": "sql/v1", "prompt": "a"})).json()
        assert explained["rejected"] == [{"worker_id": "w0", "reason": f"takes no adapters: {REFUSAL}"}]
    assert (engine.bodies, control.loads) == ([], [])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    into = tmp_path_factory.mktemp("adapters")
    adapters = {str(folder.relative_to(into)): folder for folder in make_adapters(into)}
    return make_model(tmp_path_factory.mktemp("model")), adapters


@contextlib.asynccontextmanager
async def one_sim(folders, *flags: str, **settings) -> AsyncIterator:
    """(client, parts, engine) of a router alone before one sim that lists `sql`."""
    model, adapters = folders
    async with sim_inside(model, "--block-size", "32", *flags) as url, client_of(url) as engine:
        body = {"lora_name": "sql", "lora_path": str(adapters["sql-expert/v1"])}
        (await engine.post("/v1/load_lora_adapter", json=body)).raise_for_status()
        async with routing(f"e0={url}", **settings) as (client, parts):
            yield client, parts, engine


async def cached(client: httpx.AsyncClient, **body) -> tuple[int, int]:
    """(predicted, told by the engine)."""
    answer = await client.post("/v1/completions", json={"prompt": LONG, "max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"] or {}
    return int(answer.headers["x-lorafleet-cached-tokens"]), details.get("cached_tokens") or 0


async def test_predictions_stay_exact_at_an_engine_that_is_salted(folders):
    async with one_sim(folders, engine_salt="always") as (client, parts, engine):
        await until(lambda: parts.accuracy.state("e0") == "exact")
        assert parts.discovery.fleet.replicas["e0"].is_salted
        index = parts.feeds.index(BASE, 32)
        # Of the same prompt, sent past the router without a salt, no request through it finds anything.
        (
            await engine.post("/v1/completions", json={"model": "sql", "prompt": LONG, "max_tokens": 1})
        ).raise_for_status()
        await until(lambda: index.block_counts().get("e0", 0) > 10)
        for more in (
            {"model": "sql"},
            {"model": "sql", "cache_salt": "a"},
            {"model": BASE},
            {"model": BASE, "cache_salt": "a"},
        ):
            before = index.block_counts().get("e0", 0)
            predicted, told = await cached(client, **more)
            assert (predicted, told) == (0, 0)
            await until(lambda before=before: index.block_counts().get("e0", 0) > before)
            predicted, told = await cached(client, **more)
            assert predicted == told > 128


async def test_adapters_of_an_engine_that_does_not_tell_its_connector_are_refused_with_the_reason(folders):
    config = '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'
    async with one_sim(folders, "--kv-transfer-config", config) as (client, parts, _):
        assert not parts.discovery.fleet.replicas["e0"].residents
        answer = await ask(client, "sql")
        assert error_of(answer) == (409, "adapter_failed")
        assert "engine_salt" in answer.json()["error"]["message"]
        assert (await ask(client, BASE)).status_code == 200
    async with one_sim(folders, "--kv-transfer-config", config, engine_salt="never") as (client, parts, _):
        assert (await ask(client, "sql")).status_code == 200
        assert not parts.discovery.fleet.replicas["e0"].is_salted


async def test_engine_without_a_connector_is_asked_as_before(folders):
    async with one_sim(folders) as (client, parts, _):
        replica = parts.discovery.fleet.replicas["e0"]
        assert (replica.refusal, replica.is_salted) == ("", False)
        assert (await ask(client, "sql")).status_code == 200
    async with one_sim(folders, engine_salt="no_adapters") as (client, _, _):
        assert error_of(await ask(client, "sql")) == (409, "adapter_failed")


async def test_adapter_is_served_by_the_engine_that_takes_it_where_another_refuses(folders):
    model, adapters = folders
    config = '{"kv_connector": "Mine", "kv_role": "kv_both"}'
    async with sim_inside(model, "--kv-transfer-config", config) as first, sim_inside(model) as second:
        async with client_of() as http:
            body = {"lora_name": "sql", "lora_path": str(adapters["sql-expert/v1"])}
            for url in (first, second):
                (await http.post(f"{url}/v1/load_lora_adapter", json=body)).raise_for_status()
        async with routing(f"a={first}", f"b={second}") as (client, _):
            answers = [await ask(client, "sql") for _ in range(4)]
            assert {(answer.status_code, answer.headers["x-lorafleet-worker"]) for answer in answers} == {(200, "b")}


async def test_router_without_an_orchestrator_keeps_caches_apart_by_its_own_setting(folders, tmp_path):
    keys = tmp_path / "keys.yaml"
    rows = [f"- {{sha256: {hash_key(name)}, tenant: {name}, scopes: [infer]}}\n" for name in ("acme", "rival")]
    keys.write_text("keys:\n" + "".join(rows))
    for cache, is_found in (("shared", True), ("tenant", False)):
        async with one_sim(folders, cache=cache, key_files=(keys,)) as (client, parts, _):
            await until(lambda parts=parts: parts.accuracy.state("e0") == "exact")
            index, found = parts.feeds.index(BASE, 32), []
            for tenant in ("acme", "acme", "rival"):
                client.headers["authorization"] = f"Bearer {tenant}"
                before = index.block_counts().get("e0", 0)
                predicted, told = await cached(client, model="sql")
                found.append(told)
                # The header shows a tenant what it has asked itself alone.
                assert predicted == told or (tenant, cache) == ("rival", "shared")
                if not told:
                    await until(lambda before=before, index=index: index.block_counts().get("e0", 0) > before)
            assert [tokens > 128 for tokens in found] == [False, True, is_found]
