"""Passes against agents that are served for real."""


async def test_an_adapter_is_inspected_then_loaded_when_somebody_asks_and_then_nothing_happens(house):
    agent = await house.worker()
    assert (await house.register())["state"] == "registered"
    await house.settle()
    item = await house.adapter()
    assert (item["state"], item["rank"], item["base_model"]) == ("registered", 8, "tiny-qwen")
    assert agent.operations() == [("inspect_lora", "sql/v1")]

    answer = (await house.ensure()).json()
    assert answer["ready"] == []
    await house.settle()
    answer = (await house.ensure()).json()
    assert answer["ready"] == ["w0"]
    assert answer["state"] == "ready"
    assert answer["expected_s"] == 0.0
    assert agent.operations()[-1] == ("load_lora", "sql/v1")
    assert await house.turn() == []
