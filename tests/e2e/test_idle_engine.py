"""Short chats, then a burst, then long prompts for one idle engine: no request is refused."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from lorafleet.local.tiny_model import make_model
from router.app import build
from router.config import RouterSettings
from tests.e2e.scenarios import fresh_prompt
from tests.engines import RunningEngine, start_engine
from tests.patience import patience
from tests.serving import client_of, serving

CHATS = 12  # of 400 tokens: 24 s on the sim, about a minute on the CPU
CROWD = 60
LONG = 6


@pytest.fixture(
    params=[
        pytest.param("sim", marks=[pytest.mark.fleet, pytest.mark.thorough]),
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.thorough]),
    ]
)
def engine(request, tmp_path_factory) -> Iterator[RunningEngine]:
    running = start_engine(request.param, make_model(tmp_path_factory.mktemp("model")))
    yield running
    running.stop()


async def ask(client: httpx.AsyncClient, *, prompt: list[int] | None = None, tokens: int, said: str = "") -> int:
    """A chat, or a completion of a prompt's ids; the status."""
    body = {"model": "tiny-qwen", "max_tokens": tokens, "ignore_eos": True}
    if prompt is None:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": said}]
    else:
        path, body["prompt"] = "/v1/completions", prompt
    return (await client.post(path, json=body, timeout=patience(300))).status_code


@pytest.mark.timeout(900)
async def test_an_idle_engine_accepts_bursts_and_long_prompts(engine):
    app, parts = build(RouterSettings(engines=(f"e0={engine.url}",), max_wait_s=60.0))
    async with serving(app, http=app.state.http) as url, client_of(url) as client:
        assert await parts.discovery.changes.until(parts.discovery.is_synced, timeout_s=patience(20))
        # Their beginnings are alike, and so are cached: a token or two of each is computed.
        for number in range(CHATS):
            assert await ask(client, said=f"Say something, please, of what you like most: {number}", tokens=400) == 200
        learned = parts.discovery.fleet.replicas["e0"].report.prefill_tokens_per_s
        assert learned == 0.0 or learned > 1_000
        crowd = [ask(client, said=fresh_prompt()[:100], tokens=50) for _ in range(CROWD)]
        assert await asyncio.gather(*crowd) == [200] * CROWD
        long = [ask(client, prompt=[(7 * each + at) % 4_000 for at in range(1_500)], tokens=20) for each in range(LONG)]
        assert await asyncio.gather(*long) == [200] * LONG
