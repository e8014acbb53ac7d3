"""What engines do with an adapter is in its item, the history and the events; its own policy reaches the agents."""

import pytest

from lorafleet.cli import tables
from lorafleet.cli.resources import ADAPTERS

SQL, SOURCE = "team/sql", "s3://bucket/sql"
PARTIAL = {
    "ignored_modules": {"count": 12, "names": ["model.vision_tower.layers.0.q_proj"]},
    "effect": "applied",
    "note": "the engine ignores 12 of its 28 modules: model.vision_tower.layers.0.q_proj and 11 more",
}


async def loaded_on(service, *effects):
    """A fleet with one copy of the adapter on each worker, whose engines do this with it."""
    for index, effect in enumerate(effects):
        agent = await service.worker(f"w{index}")
        agent.effects[SQL] = effect
    await service.register(SQL, source=SOURCE, policy={"min_replicas": len(effects)})
    await service.settle()
    return await service.adapter(SQL)


async def test_card_is_what_inspection_found_with_the_effect_of_a_copy(service):
    assert (await service.register("new/v1"))["status"]["card"] is None
    item = await loaded_on(service, {"effect": "seen"})
    assert item["status"]["card"] == {
        "base_model": "tiny-qwen",
        "rank": 8,
        "alpha": 16.0,
        "target_modules": ["q_proj", "v_proj"],
        "dtype": "BF16",
        "size_bytes": 1000,
        "digest": item["spec"]["digest"],
        "source": SOURCE,
        "effect": "seen",
        "files_note": "",
        "weight_change": 0.0,
        "weight_change_in": "",
        "acceptance_file": "",
    }


async def test_ignored_modules_are_in_the_item_the_history_and_the_event(service):
    item = await loaded_on(service, PARTIAL)
    assert item["status"]["ignored_modules"] == PARTIAL["ignored_modules"]
    assert (item["status"]["card"]["effect"], item["status"]["note"]) == ("applied", f"w0: {PARTIAL['note']}")
    (listed,) = (await service.http.get("/v1/adapters")).json()["data"]
    assert listed["status"]["note"] == item["status"]["note"]
    (load,) = (await service.http.get("/v1/history", params={"kind": "load"})).json()["data"]
    assert load["body"]["note"] == PARTIAL["note"]


@pytest.mark.parametrize("order", [1, -1])
async def test_item_shows_the_copy_of_which_least_is_proved(service, order):
    unproved = {"effect": "unknown", "note": "its effect is not proved: the engine did not answer within 2 s"}
    item = await loaded_on(service, *[PARTIAL, {"effect": "seen"}, unproved][::order])
    assert (item["status"]["state"], item["status"]["card"]["effect"], item["status"]["ignored_modules"]) == (
        "ready",
        "unknown",
        None,
    )
    assert item["status"]["note"].endswith(unproved["note"])


async def test_copies_of_older_agents_say_nothing(service):
    item = await loaded_on(service, {})
    assert (item["status"]["card"]["effect"], item["status"]["note"], item["status"]["ignored_modules"]) == (
        "",
        "",
        None,
    )


async def test_adapters_own_policy_on_ignored_modules_is_sent_with_its_loads(service):
    agent = await service.worker("w0")
    await service.register(SQL, source=SOURCE, policy={"min_replicas": 1, "ignored_modules": "accept"})
    await service.register("other", source="s3://bucket/other", policy={"min_replicas": 1})
    await service.settle()
    asked = {body["lora_id"]: body.get("ignored_modules") for verb, body in agent.calls if verb == "load_lora"}
    assert asked == {SQL: "accept", "other": None}
    changed = await service.http.patch(f"/v1/adapters/{SQL}", json={"policy": {"ignored_modules": "refuse"}})
    assert changed.json()["spec"]["policy"]["ignored_modules"] == "refuse"
    unknown = await service.http.patch(f"/v1/adapters/{SQL}", json={"policy": {"ignored_modules": "often"}})
    assert unknown.status_code == 400


@pytest.mark.parametrize("code", ["adapter_no_effect", "modules_ignored"])
async def test_adapter_that_two_engines_do_not_use_is_failed_with_the_reason(service, code):
    for name in ("w0", "w1"):
        (await service.worker(name)).refuse[SQL] = code
    await service.register(SQL, source=SOURCE, digest="ab" * 32, base_model="tiny-qwen", policy={"min_replicas": 1})
    await service.settle()
    item = await service.adapter(SQL)
    assert item["status"]["state"] == "failed"
    assert code in item["status"]["error"]


async def test_notes_are_a_column_of_the_list_only_where_there_are_some(service):
    item = await loaded_on(service, PARTIAL)
    headers = [str(column.header) for column in tables.listing(ADAPTERS.view, [item]).columns]
    assert headers[-1] == "note"
    item["status"]["note"] = ""
    assert "note" not in [str(column.header) for column in tables.listing(ADAPTERS.view, [item]).columns]
