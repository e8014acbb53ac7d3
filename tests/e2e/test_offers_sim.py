"""A fleet in which a request brings back its adapter by itself: the engine loads it with the request."""

import asyncio

import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from tests.certified import certify
from tests.e2e.small_fleets import SmallFleet, small_fleet
from tests.patience import patience

pytestmark = pytest.mark.fleet

NAMES = ("a/v1", "b/v1")


async def test_adapters_that_take_turns_in_one_slot_are_loaded_by_a_call_once_each(tmp_path):
    model, shelf = make_model(tmp_path / "model"), tmp_path / "shelf"
    for name in NAMES:
        make_adapter(shelf, name, rank=8)
    slots = ("--max-loras", "1", "--max-cpu-loras", "1")
    async with small_fleet(tmp_path / "fleet", model, shelf=shelf, routers=1, agent=slots, has_reports=True) as fleet:
        for name in NAMES:
            spec = {"lora_id": name, "source": f"file://{shelf}/{name}"}
            (await fleet.http.post("/v1/adapters", json=spec)).raise_for_status()

        async def ask(name: str) -> str:
            body = {"model": name, "prompt": "select", "max_tokens": 4, "temperature": 0}
            answer = await fleet.routers[0].post("/v1/completions", json=body, timeout=patience(60))
            return answer.raise_for_status().json()["choices"][0]["text"]

        first = [await ask(name) for name in NAMES]
        assert [await ask(name) for name in NAMES] == first
        # Several at once wait for one load.
        assert await asyncio.gather(*(ask(NAMES[0]) for _ in range(4))) == [first[0]] * 4
        assert await loads_by_call(fleet) == dict.fromkeys(NAMES, 1.0)
        # A name that the fleet does not have is no offer.
        assert (
            await fleet.routers[0].post("/v1/completions", json={"model": "c/v1", "prompt": "x"})
        ).status_code == 404
        (await fleet.http.delete(f"/v1/adapters/{NAMES[0]}")).raise_for_status()
        assert (
            await fleet.routers[0].post("/v1/completions", json={"model": NAMES[0], "prompt": "x"})
        ).status_code == 404


async def test_adapter_that_must_be_equal_is_compared_before_each_return_and_never_offered(tmp_path):
    model, shelf = make_model(tmp_path / "model"), tmp_path / "shelf"
    for name in NAMES:
        certify(make_adapter(shelf, name, rank=8))
    slots = ("--max-loras", "1", "--max-cpu-loras", "1")
    async with small_fleet(tmp_path / "fleet", model, shelf=shelf, routers=1, agent=slots, has_reports=True) as fleet:
        for name, mode in zip(NAMES, ("require", "warn"), strict=True):
            spec = {"lora_id": name, "source": f"file://{shelf}/{name}", "policy": {"acceptance": mode}}
            (await fleet.http.post("/v1/adapters", json=spec)).raise_for_status()
        for name in NAMES * 2:
            body = {"model": name, "prompt": "select", "max_tokens": 4}
            answer = await fleet.routers[0].post("/v1/completions", json=body, timeout=patience(60))
            assert answer.status_code == 200, answer.text
        assert await loads_by_call(fleet) == {NAMES[0]: 2.0, NAMES[1]: 1.0}


async def loads_by_call(fleet: SmallFleet) -> dict[str, float]:
    """lora_id -> how often an agent's call has loaded it, and not a request."""
    page = (await fleet.agents["w0"].get("/metrics")).text.splitlines()
    start = 'lora_load_duration_seconds_count{lora_id="'
    counts = [line.removeprefix(start).split() for line in page if line.startswith(start)]
    return {labels.partition('"')[0]: float(count) for labels, count in counts}
