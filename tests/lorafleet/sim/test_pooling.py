"""The sim's routes for models that pool, in the form of vLLM's answers."""

import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from router.api.openapi import EXAMPLES
from router.protocols.usage import usage_of
from tests.serving import client_of
from tests.workers.running import sim_inside
from workers.engines.vllm import VllmClient

ROUTES = ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("pooling"))


def keys_of(value):
    """The names of an answer's fields, at every depth."""
    if isinstance(value, dict):
        return {name: keys_of(inner) for name, inner in value.items()}
    return [keys_of(value[0])] if isinstance(value, list) and value else None


def has_all(found, wanted) -> bool:
    """Whether an answer has all fields of the example."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(name in found and has_all(found[name], wanted[name]) for name in wanted)
    return not isinstance(wanted, list) or (isinstance(found, list) and has_all(found[0], wanted[0]))


async def test_every_pooling_route_answers_as_its_example_and_by_its_adapter(model, tmp_path):
    adapter = make_adapter(tmp_path, "sql", rank=1)
    async with (
        sim_inside(model, "--runner", "pooling") as url,
        client_of(url) as http,
    ):
        body = {"lora_name": "sql@1", "lora_path": str(adapter)}
        assert (await http.post("/v1/load_lora_adapter", json=body)).is_success
        for path in ROUTES:
            sent, shown = EXAMPLES[path]
            base, own = [await http.post(path, json=sent | {"model": name}) for name in ("tiny-qwen", "sql@1")]
            assert (base.status_code, own.status_code) == (200, 200), base.text
            assert has_all(keys_of(own.json()), keys_of(shown)), own.text
            assert usage_of("openai", own.content) is not None
            numbers = [str(answer.json().get("data") or answer.json()["results"]) for answer in (base, own)]
            assert numbers[0] != numbers[1], path
            missing = await http.post(path, json=sent | {"model": "no-such"})
            assert (missing.status_code, "no-such" in missing.text) == (404, True)
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert (await http.post(path, json={"prompt": "a"})).status_code == 404


@pytest.mark.parametrize(("runner", "cached"), [("pooling", True), ("generate", False)])
async def test_an_engine_that_pools_shows_that_it_computes_and_whether_it_caches(model, runner, cached):
    flags = ("--runner", runner, *(() if cached else ("--no-enable-prefix-caching",)))
    async with sim_inside(model, *flags) as url:
        client = VllmClient(url)
        try:
            assert await client.can_generate("tiny-qwen", timeout_s=10)
            shape = await client.read_shape()
            assert (shape.runtime.caches_prefixes, shape.model_path) == (cached, str(model))
        finally:
            await client.aclose()
