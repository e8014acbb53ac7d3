"""Real vLLMs that share a KV connector without adapters in its key: their answers, and what the fleet does."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from lorafleet.identity import adapter_salt
from lorafleet.local.tiny_model import make_adapter, make_model
from router.app import build as build_router
from router.config import RouterSettings
from tests.engines import RunningEngine, start_engine
from tests.patience import patience, until
from tests.router.doubles import error_of
from tests.serving import serving
from tests.workers.running import RunningWorker, code, post
from workers.wire import Metadata

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BASE = "tiny-qwen"
LONG = "The quick brown fox jumps over the lazy dog, again and again and again. " * 20
HITS = "vllm:external_prefix_cache_hits_total"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("crossing")


@pytest.fixture(scope="module")
def engines(folder) -> Iterator[tuple[RunningEngine, RunningEngine]]:
    """Two engines with `sql` loaded. The first has its development routes, and so reports its configuration."""
    model, sql = make_model(folder / "model"), make_adapter(folder / "adapters", "sql")
    (folder / "kv").mkdir()
    config = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = {"shared_storage_path": str(folder / "kv")}
    flags = ("--kv-transfer-config", json.dumps(config), "--lora-modules", f"sql={sql}")
    first = start_engine("vllm", model, flags=flags, environment={"VLLM_SERVER_DEV_MODE": "1"})
    try:
        second = start_engine("vllm", model, flags=flags)
        yield first, second
        second.stop()
    finally:
        first.stop()


def asked(engine: RunningEngine, model: str, **more: str) -> tuple[list[str], int]:
    """(the tokens of the answer, prompt tokens that the connector brought for it)."""
    with httpx.Client(base_url=engine.url, timeout=patience(60)) as client:
        before = brought(client)
        body = {"model": model, "prompt": LONG, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        answer = client.post("/v1/completions", json=body | more)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["logprobs"]["tokens"], brought(client) - before


def brought(client: httpx.Client) -> int:
    lines = client.get("/metrics").text.splitlines()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(HITS))


def forget(engine: RunningEngine, folder: Path) -> None:
    """All KV of the connector's folder, and the engine's own."""
    for found in (folder / "kv").iterdir():
        shutil.rmtree(found)
    httpx.post(f"{engine.url}/reset_prefix_cache", timeout=patience(60)).raise_for_status()


def test_engines_that_share_the_example_connector_answer_one_adapter_from_anothers_kv(engines, folder):
    first, second = engines
    adapters_own, none = asked(second, "sql")
    from_the_adapters, by_adapter = asked(first, BASE)
    forget(first, folder)
    bases_own, nothing = asked(first, BASE)
    from_the_bases, by_base = asked(first, "sql")
    salted, by_salt = asked(first, "sql", cache_salt=adapter_salt("sql"))

    assert (none, nothing) == (0, 0)
    assert min(by_adapter, by_base, by_salt) > 128
    assert from_the_adapters != bases_own, "the base model was answered from the adapter's KV"
    assert from_the_bases != adapters_own, "the adapter was answered from the base model's KV"
    assert salted == from_the_bases, "a salt is no help"


async def test_a_router_gives_no_adapter_to_engines_that_share_the_example_connector(engines):
    first, second = engines
    named = (f"e0={first.url}", f"e1={second.url}")
    app, parts = build_router(RouterSettings(engines=named, metadata_poll_s=0.1))
    async with (
        serving(app, http=app.state.http) as url,
        httpx.AsyncClient(base_url=url, timeout=patience(20)) as client,
    ):
        assert await parts.discovery.changes.until(parts.discovery.is_synced, timeout_s=patience(30))

        def refusal_of(name: str) -> str:
            return parts.discovery.fleet.replicas[name].refusal

        # A busy engine may tell its configuration only when it is asked again.
        await until(lambda: "ExampleConnector" in refusal_of("e0"), what="the connector is named")
        assert "engine_salt" in refusal_of("e1")
        answer = await client.post("/v1/completions", json={"model": "sql", "prompt": LONG, "max_tokens": 1})
        assert error_of(answer) == (409, "adapter_failed")
        base = await client.post("/v1/completions", json={"model": BASE, "prompt": LONG, "max_tokens": 1})
        assert base.status_code == 200


async def test_an_agent_loads_no_adapter_into_an_engine_with_the_example_connector(engines, folder, tmp_path):
    for engine, reason in zip(engines, ("ExampleConnector", "engine_salt"), strict=True):
        worker = RunningWorker(
            folder / "model", folder / "adapters", tmp_path / reason, "--engine", "vllm", "--engine-url", engine.url
        )
        async with worker.inside() as client:
            refused = await post(client, "load_lora", lora_id="sql")
            assert (refused.status_code, code(refused)) == (409, "adapters_refused")
            lora = Metadata.model_validate((await client.get("/metadata")).json()).lora
            assert (lora.enabled, lora.loaded_loras) == (False, ())
            assert reason in lora.refusal
