"""NaN, and by policy weights that are far too large, are refused with their code by every way into a fleet.

Diverged training runs publish such.
"""

from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from tests.e2e.small_fleets import small_fleet
from tests.e2e.test_uploads_sim import tar_of
from tests.patience import until
from tests.serving import client_of
from tests.workers.changed_adapters import adapter_of_nan, adapter_of_size
from tests.workers.running import metadata_of

pytestmark = pytest.mark.fleet

EPOCH = {"x-lorafleet-epoch": "9"}
CODE = "weights_not_finite"
NEXT_STEP = "publish its last checkpoint before that"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("finite-model") / "model")


async def test_nan_is_refused_by_every_way_in_and_no_engine_gets_it(tmp_path, model):
    shelf = tmp_path / "shelf"
    diverged = adapter_of_nan(make_adapter(tmp_path, "good"), shelf / "diverged")
    async with small_fleet(tmp_path / "fleet", model, shelf=shelf, workers=2, routers=1) as fleet:
        router = fleet.routers[0]
        refusals = {}
        body = {"lora_id": "registered/v1", "source": str(diverged)}
        assert (await fleet.http.post("/v1/adapters", json=body)).is_success

        async def has_failed():
            return (await fleet.adapter("registered/v1"))["status"]["error"]

        refusals["registered"] = await until(has_failed, what="the registration has its verdict")
        asked = await router.post("/v1/completions", json={"model": "registered/v1", "prompt": "a", "max_tokens": 1})
        assert asked.status_code == 409
        refusals["asked"] = asked.text
        refusals["uploaded"] = (await fleet.http.put("/v1/adapters/uploaded/v1", content=tar_of(diverged))).text
        load = {"lora_name": "run", "lora_path": str(diverged)}
        refusals["published"] = (await router.post("/v1/load_lora_adapter", json=load)).text

        # A script loads it at an engine: its agent reads the files, and unloads it.
        await fleet.script_loads("w0", "mine", diverged)

        async def is_unloaded():
            engine = (await metadata_of(fleet.agents["w0"])).transport.engine_url
            async with client_of(engine) as client:
                return "mine" not in [card["id"] for card in (await client.get("/v1/models")).json()["data"]]

        await until(is_unloaded, what="the script's load has left the engine")

        # It lies in an agent's --lora-path, and a caller loads it there by its name.
        own = await fleet.agents["w1"].post("/v1/admin/load_lora", json={"lora_id": "diverged"}, headers=EPOCH)
        refusals["lora_path"] = own.text
        listed = (await fleet.agents["w1"].get("/v1/metadata/loras/diverged")).json()
        assert listed["state"] == "failed"

        missing = {way: text for way, text in refusals.items() if CODE not in text or NEXT_STEP not in text}
        assert missing == {}
        for agent in fleet.agents.values():
            entries = (await metadata_of(agent)).lora.loaded_loras
            assert [lora.engine_name for lora in entries if lora.state == "ready"] == []


async def test_weights_that_are_too_large_are_noted_or_refused_by_every_way_in(tmp_path, model):
    shelf = tmp_path / "shelf"
    good = make_adapter(tmp_path, "good")
    usual, grown, huge = (adapter_of_size(good, shelf / f"of-{size:g}", size) for size in (0.1, 0.5, 4.0))
    async with small_fleet(tmp_path / "fleet", model, shelf=shelf, workers=1, routers=1) as fleet:

        async def publish(folder):
            return await fleet.http.post("/v1/published/run", json={"source": f"file://{folder}"})

        assert (await publish(usual)).json()["status"]["note"] == ""
        assert (await fleet.http.patch("/v1/policy", json={"large_weights": "refuse"})).is_success
        body = {"lora_id": "registered/v1", "source": f"file://{huge}"}
        assert (await fleet.http.post("/v1/adapters", json=body)).is_success

        async def has_failed():
            return (await fleet.adapter("registered/v1"))["status"]["error"]

        refusals = {
            "registered": await until(has_failed, what="the registration has its verdict"),
            "uploaded": (await fleet.http.put("/v1/adapters/uploaded/v1", content=tar_of(huge))).text,
            "published": (await publish(huge)).text,
            "grown": (await publish(grown)).text,
        }
        assert {way: text for way, text in refusals.items() if "weights_too_large" not in text} == {}
        assert (await fleet.http.get("/v1/published/run")).json()["status"]["version"] == 1

        assert (await fleet.http.patch("/v1/policy", json={"large_weights": "note"})).is_success
        status = (await publish(grown)).json()["status"]
        assert status["version"] == 2
        assert "the former version's is" in status["note"]
