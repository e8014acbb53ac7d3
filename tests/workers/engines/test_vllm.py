"""Whether an engine's error counts against the adapter or the engine."""

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.serving import serving
from workers.core.errors import EngineError
from workers.engines.sglang import SglangClient
from workers.engines.vllm import VllmClient


def _failing(message: str) -> Starlette:
    """An engine with one adapter that fails all loads and unloads."""

    async def fail(_request):
        return JSONResponse({"error": {"message": message}, "error_message": message}, 500)

    async def models(_request):
        return JSONResponse({"data": [{"id": "tiny"}, {"id": "sql/v1@1", "root": "/sql", "parent": "tiny"}]})

    paths = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/unload_lora_adapter")
    return Starlette(routes=[Route("/v1/models", models), *(Route(path, fail, methods=["POST"]) for path in paths)])


@pytest.mark.parametrize("kind", [VllmClient, SglangClient])
async def test_failed_unload_is_an_engine_error(kind):
    async with serving(_failing("no")) as url:
        engine = kind(url)
        with pytest.raises(EngineError, match=r"unload sql/v1@1: the engine answered 500: no") as failed:
            await engine.unload("sql/v1@1", timeout_s=5)
        await engine.aclose()
    assert failed.value.code == "engine_failed"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("Call to add_lora method failed: LoRA rank 64 is greater than max_lora_rank 16.", "adapter_refused"),
        ("Call to add_lora method failed: Server shutting down", "engine_failed"),
        ("EngineCore encountered an issue. See stack trace (above) for the root cause.", "engine_failed"),
    ],
)
async def test_load_failed_by_a_dying_engine_does_not_blame_the_adapter(tmp_path, message, code):
    async with serving(_failing(message)) as url:
        engine = VllmClient(url)
        with pytest.raises(EngineError, match="load legal/v1@2") as failed:
            await engine.load("legal/v1@2", tmp_path, timeout_s=5)
        await engine.aclose()
    assert failed.value.code == code


@pytest.mark.parametrize("data", [["sql"], {"a": 1}, [{"parent": "tiny"}], [{"id": 5, "parent": "tiny"}], [None], 7])
@pytest.mark.parametrize("kind", [VllmClient, SglangClient])
async def test_list_that_names_no_models_is_an_engine_error(kind, data):
    async def models(_request):
        return JSONResponse({"data": data})

    async with serving(Starlette(routes=[Route("/v1/models", models)])) as url:
        engine = kind(url)
        with pytest.raises(EngineError, match="is no list of models") as failed:
            await engine.list_adapters()
        await engine.aclose()
    assert failed.value.code == "engine_unreachable"
