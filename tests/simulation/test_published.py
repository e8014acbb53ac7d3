"""Trainers' own calls at two routers of a fleet of sim engines: loads, next versions, answers under way, unloads."""

import asyncio
import json
import shutil

from lorafleet.keys.key_edits import add_key
from tests.simulation.fleet import until
from tests.workers.changed_adapters import adapter_of_zeros

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
CHAT = [{"role": "user", "content": "hi"}]


def written(simulation, run, step):
    """The folder of a run, which a trainer has overwritten with the adapter of this step."""
    shutil.rmtree(simulation.shelf / run, ignore_errors=True)
    return simulation.adapter(run, seed=step)


async def everywhere(fleet, name):
    """The versions that answered at each router, each asked once."""
    return set(await fleet.answered_everywhere(name, messages=CHAT))


async def test_trainer_publishes_by_the_engines_own_calls(simulation):
    fleet = await simulation.fleet(workers=2, routers=2)
    first, second = fleet.routers

    folder = written(simulation, "run", 1)
    body = {"lora_name": "policy", "lora_path": str(folder)}
    answer = await first.post(LOAD, json=body)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'policy' added successfully.")
    shutil.rmtree(folder)  # TRL deletes it now
    assert await everywhere(fleet, "policy") == {"policy/v1"}
    assert sorted((await fleet.adapter("policy/v1"))["status"]["workers"]) == ["w0", "w1"]

    # What was asked for before goes on with its version.
    async with fleet.streaming("policy", messages=CHAT, max_tokens=400) as under_way:
        written(simulation, "run", 2)
        assert (await second.post(LOAD, json=body | {"load_inplace": True})).status_code == 200
        assert await everywhere(fleet, "policy") == {"policy/v2"}
        events = await under_way.rest()
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert under_way.response.headers["x-lorafleet-adapter"].startswith("policy/v1@")

    # The same bytes again are no version of their own; SGLang's form has its fields.
    again = await second.post("/load_lora_adapter", json=body)
    assert again.json() == {"success": True, "error_message": None, "loaded_adapters": {"policy": str(folder)}}
    assert await everywhere(fleet, "policy") == {"policy/v2"}

    # A fresh adapter, whose B is zero, is TRL's first one.
    zeros = adapter_of_zeros(folder, simulation.shelf / "zeros")
    body = {"lora_name": "trl-policy-v0", "lora_path": str(zeros)}
    assert (await first.post("/skyrl/v1/load_lora_adapter", json=body)).status_code == 200
    assert await everywhere(fleet, "trl-policy-v0") == {"trl-policy-v0/v1"}

    assert all({"policy", "trl-policy-v0"} <= set(names) for names in await fleet.models())
    answer = await second.post(UNLOAD, json={"lora_name": "policy"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'policy' removed successfully.")
    assert await everywhere(fleet, "policy") == {404}
    for path in (UNLOAD, "/unload_lora_adapter"):
        missing = await first.post(path, json={"lora_name": "policy"})
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")

    async def is_gone():
        workers = (await fleet.http.get("/v1/workers")).json()["data"]
        return not any(lora_id.startswith("policy/") for worker in workers for lora_id in worker["adapters"])

    await until(is_gone, what="the versions of the deleted name have left the workers")


async def test_loads_that_cannot_be_say_so_as_engines_do(simulation):
    fleet = await simulation.fleet(router={"publish_timeout_s": 30})

    async def refused(**body):
        answer = await fleet.routers[0].post(LOAD, json=body)
        error = answer.json()["error"]
        assert error["code"] == answer.status_code
        return answer.status_code, error["message"]

    status, message = await refused(lora_name="policy", lora_path=str(simulation.shelf / "nowhere"))
    assert status == 500
    assert "no such folder" in message
    status, message = await refused(lora_name="policy", lora_path="/etc")
    assert status == 400
    assert "lora_roots" in message
    assert (await refused(lora_name="policy"))[0] == 400
    status, message = await refused(lora_name="tiny-qwen", lora_path=str(written(simulation, "other", 1)))
    assert status == 400
    assert "may_shadow_base" in message


async def test_folder_that_a_network_mount_shows_late_is_waited_for(simulation):
    fleet = await simulation.fleet()
    folder = written(simulation, "late", 1)
    hidden = folder.rename(simulation.folder / "hidden")
    body = {"lora_name": "late", "lora_path": str(folder)}
    load = asyncio.create_task(fleet.routers[0].post(LOAD, json=body))
    await asyncio.sleep(2.0)  # the first looks find nothing
    assert not load.done()
    hidden.rename(folder)
    assert (await load).status_code == 200


async def test_runs_of_two_teams_use_one_name_and_one_of_them_the_base_models(simulation):
    fleet = await simulation.fleet()
    (router,) = fleet.routers

    def headers(tenant, namespace, **naming):
        key = add_key(fleet.paths.key_file, tenant, ["infer", "register"], namespace=namespace, **naming)
        return {"headers": {"authorization": f"Bearer {key}"}}

    team, rival = headers("acme", "team-a", may_shadow_base=True), headers("globex", "team-b")

    async def is_known():
        answers = [await client.get("/v1/whoami", **rival) for client in (router, fleet.http)]
        return all(answer.is_success for answer in answers)

    await until(is_known, what="the services have read the new keys")
    for step, key in enumerate((team, rival)):
        body = {"lora_name": "trl-policy-v1", "lora_path": str(written(simulation, f"run-{step}", step))}
        assert (await router.post(LOAD, json=body, **key)).status_code == 200
    assert await fleet.answered_by("trl-policy-v1", messages=CHAT, **team) == "team-a/trl-policy-v1/v1"
    assert await fleet.answered_by("trl-policy-v1", messages=CHAT, **rival) == "team-b/trl-policy-v1/v1"
    assert await fleet.answered_by("team-a/trl-policy-v1", messages=CHAT, **rival) == 404

    body = {"lora_name": "tiny-qwen", "lora_path": str(written(simulation, "run-9", 9))}
    assert (await router.post(LOAD, json=body, **rival)).status_code == 400
    assert (await router.post(LOAD, json=body, **team)).status_code == 200
    assert await fleet.answered_by("tiny-qwen", messages=CHAT, **team) == "team-a/tiny-qwen/v1"
    assert await fleet.answered_by("tiny-qwen", messages=CHAT, **rival) == "base"
    cards = (await router.get("/v1/models", **team)).json()["data"]
    assert (cards[0]["id"], cards[0]["root"]) == ("tiny-qwen", "team-a/tiny-qwen/v1")
    assert "trl-policy-v1" in {card["id"] for card in cards}
    listed = (await fleet.http.get("/v1/published/tiny-qwen", **team)).json()
    assert listed["status"]["shadows_base"]


async def test_a_relative_path_is_a_400_at_once_that_says_what_is_there(simulation):
    simulation.adapter("outputs/lora")
    fleet, shelf = await simulation.fleet(tenants=("acme",)), simulation.shelf
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
    for path in (str(shelf / "outputs"), "/etc", str(simulation.folder)):
        load = {"lora_name": "acme/policy", "lora_path": path}
        answer = await fleet.routers[0].post(LOAD, json=load, headers=fleet.as_("acme"))
        assert answer.status_code >= 400, answer.text
        assert path in answer.text
        left = answer.text.replace(path, "")
        assert "lora'" not in left
        assert str(shelf) not in left
        assert str(shelf.parent) not in left
