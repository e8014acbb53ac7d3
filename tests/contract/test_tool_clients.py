"""Client libraries get the same tool calls through the router as from real vLLM itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.surface import (
    BASE,
    ENGINE_NAME,
    GENERATE_FLAGS,
    LORA_ID,
    STORE,
    DirectEngine,
    engine_with_adapter,
    routed,
)
from tests.contract.tool_clients import CLIENTS, NAME, PARAMETERS, reason_missing
from tests.engines import start_engine

# Libraries of others warn of their own futures.
pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def direct(model_dir: Path, adapters: dict[str, Path]) -> Iterator[DirectEngine]:
    """A vLLM that holds every call to its tool's schema: the tests' tiny model writes no sense of its own."""
    engine = start_engine(
        "vllm", model_dir, flags=(*GENERATE_FLAGS, "--tool-strict-level", "parameter"), environment=STORE
    )
    try:
        with engine_with_adapter(engine, adapters["sql"]) as direct:
            yield direct
    finally:
        engine.stop()


@pytest.mark.parametrize("module", CLIENTS)
async def test_a_client_gets_the_tool_calls_of_the_engine(module: str, direct: DirectEngine, model_dir: Path) -> None:
    if reason := reason_missing(module):
        pytest.skip(reason)
    calls_of = CLIENTS[module]
    async with routed(direct, model_dir) as (http, parts):
        for here, there in ((BASE, BASE), (ENGINE_NAME, LORA_ID)):
            for stream in (False, True):
                await calls_of(direct.engine.url, here, stream)  # from now on both find the same cache
                expected = await calls_of(direct.engine.url, here, stream)
                before = len(parts.decisions)
                assert await calls_of(str(http.base_url).rstrip("/"), there, stream) == expected, (there, stream)
                assert len(parts.decisions) == before + 1
                [call] = expected
                assert call.name == NAME
                assert call.arguments["city"] in PARAMETERS["properties"]["city"]["enum"]
                assert call.arguments["days"] in PARAMETERS["properties"]["days"]["enum"]
