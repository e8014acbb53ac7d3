"""Trainers' own calls at two routers of a fleet of sim engines: loads, next versions, answers under way, unloads."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from lorafleet.keys.key_edits import add_key
from lorafleet.local.tiny_model import make_adapter, make_model
from tests.e2e.small_fleets import small_fleet
from tests.patience import patience, until
from tests.serving import client_of
from tests.workers.changed_adapters import adapter_of_zeros

pytestmark = pytest.mark.fleet

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


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


async def everywhere(fleet, name, **more):
    """The versions that answered at each router, each asked once."""
    return set(await asyncio.gather(*(answered_by(router, name, **more) for router in fleet.routers)))


async def test_trainer_publishes_by_the_engines_own_calls(tmp_path, model, shelf):
    async with small_fleet(
        tmp_path / "fleet",
        model,
        shelf=shelf,
        workers=2,
        routers=2,
        engine=("--sim-decode-tokens-per-s", "200"),
    ) as fleet:
        first, second = fleet.routers

        folder = written(shelf, "run", 1)
        body = {"lora_name": "policy", "lora_path": str(folder)}
        answer = await first.post(LOAD, json=body)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'policy' added successfully.")
        shutil.rmtree(folder)  # TRL deletes it now
        assert await everywhere(fleet, "policy") == {"policy/v1"}
        assert sorted((await fleet.adapter("policy/v1"))["status"]["workers"]) == ["w0", "w1"]

        # What was asked for before goes on with its version.
        chat = {
            "model": "policy",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
        }
        async with first.stream("POST", "/v1/chat/completions", json=chat) as under_way:
            lines = under_way.aiter_lines()
            await anext(lines)
            written(shelf, "run", 2)
            assert (await second.post(LOAD, json=body | {"load_inplace": True})).status_code == 200
            assert await everywhere(fleet, "policy") == {"policy/v2"}
            rest = [line async for line in lines if line.startswith("data: {")]
            assert json.loads(rest[-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert under_way.headers["x-lorafleet-adapter"].startswith("policy/v1@")

        # The same bytes again are no version of their own; SGLang's form has its fields.
        again = await second.post("/load_lora_adapter", json=body)
        assert again.json() == {"success": True, "error_message": None, "loaded_adapters": {"policy": str(folder)}}
        assert await everywhere(fleet, "policy") == {"policy/v2"}

        # A fresh adapter, whose B is zero, is TRL's first one.
        zeros = adapter_of_zeros(folder, shelf / "zeros")
        body = {"lora_name": "trl-policy-v0", "lora_path": str(zeros)}
        assert (await first.post("/skyrl/v1/load_lora_adapter", json=body)).status_code == 200
        assert await everywhere(fleet, "trl-policy-v0") == {"trl-policy-v0/v1"}

        listed = await fleet.models()
        assert all({"policy", "trl-policy-v0"} <= set(names) for names in listed)
        answer = await second.post(UNLOAD, json={"lora_name": "policy"})
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'policy' removed successfully.")
        assert await everywhere(fleet, "policy") == {404}
        for path in (UNLOAD, "/unload_lora_adapter"):
            missing = await first.post(path, json={"lora_name": "policy"})
            assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")

        async def is_gone() -> bool:
            workers = (await fleet.http.get("/v1/workers")).json()["data"]
            return not any(lora_id.startswith("policy/") for worker in workers for lora_id in worker["adapters"])

        await until(is_gone, within_s=60, what="the versions of the deleted name have left the workers")


async def test_loads_that_cannot_be_say_so_as_engines_do(tmp_path, model, shelf):
    async with small_fleet(
        tmp_path / "fleet", model, shelf=shelf, workers=1, routers=1, router_settings={"publish_timeout_s": patience(1)}
    ) as fleet:
        (router,) = fleet.routers

        async def refused(**body):
            answer = await router.post(LOAD, json=body)
            error = answer.json()["error"]
            assert error["code"] == answer.status_code
            return answer.status_code, error["message"]

        status, message = await refused(lora_name="policy", lora_path=str(shelf / "nowhere"))
        assert status == 500
        assert "no such folder" in message
        status, message = await refused(lora_name="policy", lora_path="/etc")
        assert status == 400
        assert "lora_roots" in message
        assert (await refused(lora_name="policy"))[0] == 400
        status, message = await refused(lora_name="tiny-qwen", lora_path=str(written(shelf, "other", 1)))
        assert status == 400
        assert "may_shadow_base" in message


async def test_folder_that_a_network_mount_shows_late_is_waited_for(tmp_path, model, shelf):
    async with small_fleet(tmp_path / "fleet", model, shelf=shelf, workers=1, routers=1) as fleet:
        (router,) = fleet.routers
        folder = written(shelf, "late", 1)
        shutil.move(folder, shelf / "hidden")
        load = asyncio.create_task(router.post(LOAD, json={"lora_name": "late", "lora_path": str(folder)}))
        await asyncio.sleep(0.3)  # the first look finds nothing, unless the machine is slow
        shutil.move(shelf / "hidden", folder)
        assert (await load).status_code == 200


async def test_runs_of_two_teams_use_one_name_and_one_of_them_the_base_models(tmp_path, model, shelf):
    async with small_fleet(tmp_path / "fleet", model, shelf=shelf, workers=1, routers=1) as fleet:
        (router,) = fleet.routers
        path = tmp_path / "fleet/keys.yaml"

        def headers(tenant, namespace, **naming):
            key = add_key(path, tenant, ["infer", "register"], namespace=namespace, **naming)
            return {"headers": {"authorization": f"Bearer {key}"}}

        team, rival = headers("acme", "team-a", may_shadow_base=True), headers("globex", "team-b")

        async def is_known() -> bool:
            answers = [await client.get("/v1/whoami", **rival) for client in (router, fleet.http)]
            return all(answer.is_success for answer in answers)

        await until(is_known, what="the services have read the new keys")
        for step, key in enumerate((team, rival)):
            body = {"lora_name": "trl-policy-v1", "lora_path": str(written(shelf, f"run-{step}", step))}
            assert (await router.post(LOAD, json=body, **key)).status_code == 200
        assert await answered_by(router, "trl-policy-v1", **team) == "team-a/trl-policy-v1/v1"
        assert await answered_by(router, "trl-policy-v1", **rival) == "team-b/trl-policy-v1/v1"
        assert await answered_by(router, "team-a/trl-policy-v1", **rival) == 404

        body = {"lora_name": "tiny-qwen", "lora_path": str(written(shelf, "run-9", 9))}
        assert (await router.post(LOAD, json=body, **rival)).status_code == 400
        assert (await router.post(LOAD, json=body, **team)).status_code == 200
        assert await answered_by(router, "tiny-qwen", **team) == "team-a/tiny-qwen/v1"
        assert await answered_by(router, "tiny-qwen", **rival) == "base"
        cards = (await router.get("/v1/models", **team)).json()["data"]
        assert (cards[0]["id"], cards[0]["root"]) == ("tiny-qwen", "team-a/tiny-qwen/v1")
        assert "trl-policy-v1" in {card["id"] for card in cards}
        listed = (await fleet.http.get("/v1/published/tiny-qwen", **team)).json()
        assert listed["status"]["shadows_base"]


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


async def test_a_relative_path_is_a_400_at_once_that_says_what_is_there(tmp_path, model):
    shelf = tmp_path / "shelf"
    make_adapter(shelf / "outputs", "lora")
    hurried = {"publish_timeout_s": 3}
    async with small_fleet(
        tmp_path / "fleet", model, shelf=shelf, routers=1, tenants=("acme",), router_settings=hurried
    ) as fleet:
        for path, words in (
            ("outputs/lora", "a folder of that name lies below one of this worker's `lora_roots`"),
            ("./outputs/other", "no folder of that name lies below"),
            ("~/outputs/lora", "a home folder of yours"),
            ("C:\\runs\\lora", "a path of Windows"),
        ):
            for route in (LOAD, "/load_lora_adapter"):
                answer = await fleet.routers[0].post(route, json={"lora_name": "policy", "lora_path": path})
                assert (answer.status_code, words in answer.text) == (400, True), answer.text
                assert "absolute path" in answer.text
            direct = await fleet.http.post("/v1/published/policy", json={"source": path})
            assert (direct.status_code, direct.json()["error"]["code"]) == (422, "source_relative")
        assert (await fleet.http.get("/v1/published")).json()["data"] == []
        # A tenant that names a wrong folder learns neither what else is in it nor which folders workers may read.
        acme = {"authorization": f"Bearer {fleet.keys['acme']}"}
        for path in (str(shelf / "outputs"), "/etc", str(tmp_path)):
            load = {"lora_name": "acme/policy", "lora_path": path}
            answer = await fleet.routers[0].post(LOAD, json=load, headers=acme)
            assert answer.status_code >= 400, answer.text
            assert path in answer.text
            left = answer.text.replace(path, "")
            assert "lora'" not in left
            assert str(shelf) not in left
            assert str(tmp_path) not in left
