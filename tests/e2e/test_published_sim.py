"""Versions that a trainer publishes by the engines' own calls leave nothing behind: files have real ages here."""

import shutil
from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_adapter, make_model
from tests.e2e.small_fleets import small_fleet
from tests.patience import until
from tests.serving import client_of

pytestmark = pytest.mark.fleet

LOAD = "/v1/load_lora_adapter"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("published-model") / "model")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


def written(shelf: Path, run: str, step: int) -> Path:
    """The folder of a run, which a trainer has overwritten with the adapter of this step."""
    shutil.rmtree(shelf / run, ignore_errors=True)
    return make_adapter(shelf, run, seed=step)


async def answered_by(router, name, **more):
    """The version that answered a chat; the status of a refusal."""
    body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = await router.post("/v1/chat/completions", json=body, **more)
    return answer.headers["x-lorafleet-adapter"].partition("@")[0] if answer.is_success else answer.status_code


VERSIONS = 12


@pytest.mark.slow
async def test_versions_leave_nothing_behind_on_workers(tmp_path, model, shelf):
    async with small_fleet(
        tmp_path / "fleet",
        model,
        shelf=shelf,
        workers=2,
        routers=1,
        agent=("--cache-grace-s", "1"),
    ) as fleet:
        (router,) = fleet.routers
        for step in range(1, VERSIONS + 1):
            body = {"lora_name": "policy", "lora_path": str(written(shelf, "run", step)), "load_inplace": True}
            assert (await router.post(LOAD, json=body)).status_code == 200
            assert await answered_by(router, "policy") == f"policy/v{step}"
        kept = {f"policy/v{VERSIONS}", f"policy/v{VERSIONS - 1}"}
        digests = {(await fleet.adapter(lora_id))["spec"]["digest"] for lora_id in kept}

        async def is_clean(worker) -> bool:
            """Whether disk, engine, agent and its record have nothing but the versions that are kept."""
            folders = {path.name for path in (tmp_path / "fleet" / worker / "cache").glob("*") if len(path.name) == 64}
            report = (await fleet.agents[worker].get("/metadata")).json()
            lora = report["lora"]
            known = {each["lora_id"] for each in (*lora["loaded_loras"], *lora["available_loras"])}
            async with client_of(report["transport"]["engine_url"]) as engine:
                models = {card["id"] for card in (await engine.get("/v1/models")).json()["data"] if card["parent"]}
            loaded = {name.partition("@")[0] for name in models}
            return (
                folders <= digests and {name for name in known if name.startswith("policy/")} <= kept and loaded <= kept
            )

        for worker in ("w0", "w1"):
            await until(lambda name=worker: is_clean(name), within_s=60, what=f"{worker} has the kept versions alone")
