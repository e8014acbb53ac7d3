"""Copies by name: one leaves one worker by an operator's order, while requests run on it."""

from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from tests.e2e.small_fleets import small_fleet
from tests.patience import patience, until

pytestmark = pytest.mark.fleet

SQL = "sql/v1"
TOKENS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("copies-model") / "model")


async def test_a_copy_is_unloaded_while_requests_run_and_no_request_fails(tmp_path: Path, model: Path):
    shelf = tmp_path / "shelf"
    make_adapter(shelf, SQL, rank=8)
    slow = ("--sim-decode-tokens-per-s", str(TOKENS / patience(2)))
    async with small_fleet(tmp_path / "fleet", model, shelf=shelf, workers=2, routers=1, engine=slow) as fleet:
        (
            await fleet.http.post("/v1/adapters", json={"lora_id": SQL, "source": f"file://{shelf}/{SQL}"})
        ).raise_for_status()
        (holder,) = (await fleet.ensure(SQL)).json()["ready"]
        (other,) = fleet.agents.keys() - {holder}
        router = fleet.routers[0]
        ask = {"model": SQL, "prompt": "select the answer from", "ignore_eos": True}
        running = {**ask, "max_tokens": TOKENS, "stream": True}
        async with router.stream("POST", "/v1/completions", json=running, timeout=patience(60)) as answer:
            assert (answer.status_code, answer.headers["x-lorafleet-worker"]) == (200, holder)
            lines = answer.aiter_lines()
            await anext(lines)
            unloaded = await fleet.http.delete(f"/v1/workers/{holder}/adapters/{SQL}")
            assert (unloaded.status_code, unloaded.json()["kept_out"]) == (202, [SQL])
            meanwhile = await router.post("/v1/completions", json={**ask, "max_tokens": 1}, timeout=patience(60))
            assert (meanwhile.status_code, meanwhile.headers["x-lorafleet-worker"]) == (200, other)
            events = [line async for line in lines if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert len(events) >= TOKENS - 1

        async def is_gone() -> bool:
            return (await fleet.http.get(f"/v1/workers/{holder}")).json()["adapters"] == []

        await until(is_gone, what="the copy has left")
        both = (await fleet.http.post(f"/v1/adapters/{SQL}/ensure", json={"replicas": 2})).json()
        assert (both["ready"], both["loading"]) == ([other], [])
        status, output = await fleet.cli("workers", "allow", holder, SQL)
        assert status == 0, output
        assert sorted((await fleet.ensure(SQL, replicas=2)).json()["ready"]) == sorted([holder, other])
        status, output = await fleet.cli("workers", "unload", holder, SQL, "--wait")
        assert (status, f"{SQL} is not loaded on {holder}" in output) == (0, True), output
