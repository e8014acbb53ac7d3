"""Three routers of one fleet: what was registered, moved or deleted holds for the very next request at any of them."""

import asyncio
from itertools import cycle
from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from tests.e2e.small_fleets import small_fleet

pytestmark = pytest.mark.fleet

LOOPS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("prompt-model") / "model")


async def ask(router, name):
    """The status of a chat with this adapter, and the adapter that answered."""
    body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = await router.post("/v1/chat/completions", json=body)
    return answer.status_code, answer.headers.get("x-lorafleet-adapter", "").partition("@")[0]


async def test_a_change_holds_for_the_next_request_at_any_router(tmp_path, model):
    shelf = tmp_path / "shelf"
    source = f"file://{make_adapter(shelf, 'any', rank=8)}"
    async with small_fleet(tmp_path / "fleet", model, shelf=shelf, workers=2, routers=3) as fleet:
        routers = cycle(fleet.routers)

        async def change(method, path, **body):
            answer = await fleet.http.request(method, f"/v1{path}", **({"json": body} if body else {}))
            assert answer.is_success, answer.text

        async def register(name):
            await change("POST", "/adapters", lora_id=name, source=source)

        async def everywhere(name):
            return await asyncio.gather(*(ask(router, name) for router in fleet.routers))

        for n in range(LOOPS):
            await register(f"new/v{n}")
            assert await ask(next(routers), f"new/v{n}") == (200, f"new/v{n}")
            await change("DELETE", f"/adapters/new/v{n}")
            assert await everywhere(f"new/v{n}") == [(404, "")] * 3
        await register("old/v0")
        await register("old/v1")
        for n in range(LOOPS):
            await change("PUT", "/aliases/old", targets=[{"lora_id": f"old/v{n % 2}"}], place_s=0)
            assert await everywhere("old") == [(200, f"old/v{n % 2}")] * 3
        await change("DELETE", "/aliases/old")
        assert await everywhere("old") == [(404, "")] * 3
