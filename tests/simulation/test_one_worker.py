"""A fleet of one worker: its engine dies, its base model has other names, and its adapters are gone or another's."""

import shutil

import pytest

from tests.simulation.fleet import until


@pytest.mark.parametrize("model", ["tiny-qwen", "good/v1"])
async def test_a_request_waits_for_the_only_engine_to_start_again(simulation, model):
    fleet = await simulation.fleet()
    await fleet.register("good/v1", simulation.adapter("good/v1"))
    assert (await fleet.ask("good/v1")).status_code == 200
    fleet.kill("engine0", away_s=20)

    async def is_known():
        return 'lorafleet_router_replicas{state="ready"} 0.0' in (await fleet.routers[0].get("/metrics")).text

    await until(is_known, within_s=20, what="the router knows")
    answer = await fleet.ask(model)
    assert answer.status_code == 200, answer.text


async def test_an_adapter_may_call_the_base_model_as_a_hub_does(simulation):
    fleet = await simulation.fleet()
    await fleet.register("hub/v1", simulation.adapter("hub/v1", base_model="Org/Tiny-Qwen"))
    assert (await fleet.ask("hub/v1")).json()["choices"][0]["text"]


async def test_an_adapter_of_another_base_model_is_refused_until_somebody_vouches(simulation):
    fleet, folder = await simulation.fleet(), simulation.adapter("other/v1", base_model="org/other")
    await fleet.register("other/v1", folder)

    async def error():
        return (await fleet.adapter("other/v1"))["status"]["error"]

    assert (await until(error, what="it is refused")).startswith("base_model_mismatch")
    await fleet.register("other/v1", folder, base_model="tiny-qwen")
    assert await fleet.answered_by("other/v1") == "other/v1"


async def test_an_adapter_that_is_nowhere_any_more_is_answered_with_the_cause_until_it_is_restored(simulation):
    fleet, source = await simulation.fleet(), simulation.adapter("gone/v1")
    await fleet.register("gone/v1", source, base_model="tiny-qwen")
    assert (await fleet.ask("gone/v1")).is_success
    away = source.rename(simulation.folder / "away")
    shutil.rmtree(fleet.files_of("w0") / "cache" / (await fleet.adapter("gone/v1"))["spec"]["digest"])
    fleet.kill("engine0", away_s=1)
    fleet.kill("w0", away_s=1)
    await until(fleet.is_whole, what="the worker is back")
    answer = await fleet.ask("gone/v1")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "adapter_failed")
    assert "source_not_found" in error["message"]
    assert str(simulation.shelf) not in error["message"]
    away.rename(source)
    assert "lorafleet adapters retry gone/v1" in error["message"]
    assert (await fleet.http.post("/v1/adapters/gone/v1/retry")).is_success
    assert (await fleet.ask("gone/v1")).status_code == 200
