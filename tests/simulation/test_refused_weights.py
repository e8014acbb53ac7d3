"""Weights that no fleet should serve, refused by every way in: NaN, by policy far too large ones, and other answers.

Diverged training runs publish such. `acceptance.jsonl` beside an adapter says what its answers are.
"""

from tests.archives import tar_of
from tests.certified import certify
from tests.simulation.fleet import until
from tests.workers.changed_adapters import adapter_of_nan, adapter_of_size

EPOCH = {"x-lorafleet-epoch": "9"}
CODE = "weights_not_finite"
NEXT_STEP = "publish its last checkpoint before that"


async def verdict(fleet, name):
    """The error of a registration, once it is there."""

    async def error():
        return (await fleet.adapter(name))["status"]["error"]

    return await until(error, what="the registration has its verdict")


async def test_nan_is_refused_by_every_way_in_and_no_engine_gets_it(simulation):
    diverged = adapter_of_nan(simulation.adapter("good", beside=True), simulation.shelf / "diverged")
    fleet = await simulation.fleet(workers=2)
    router, refusals = fleet.routers[0], {}
    await fleet.register("registered/v1", str(diverged))
    refusals["registered"] = await verdict(fleet, "registered/v1")
    asked = await fleet.ask("registered/v1", max_tokens=1)
    assert asked.status_code == 409
    refusals["asked"] = asked.text
    refusals["uploaded"] = (await fleet.http.put("/v1/adapters/uploaded/v1", content=tar_of(diverged))).text
    load = {"lora_name": "run", "lora_path": str(diverged)}
    refusals["published"] = (await router.post("/v1/load_lora_adapter", json=load)).text

    # A script loads it at an engine: its agent reads the files, and unloads it.
    await fleet.script_loads("w0", "mine", diverged)

    async def is_unloaded():
        return "mine" not in await fleet.engine_models("w0")

    await until(is_unloaded, what="the script's load has left the engine")

    # It lies in an agent's --lora-path, and a caller loads it there by its name.
    own = await fleet.agents["w1"].post("/v1/admin/load_lora", json={"lora_id": "diverged"}, headers=EPOCH)
    refusals["lora_path"] = own.text
    listed = (await fleet.agents["w1"].get("/v1/metadata/loras/diverged")).json()
    assert listed["state"] == "failed"

    missing = {way: text for way, text in refusals.items() if CODE not in text or NEXT_STEP not in text}
    assert missing == {}
    assert [await fleet.ready_on(worker) for worker in fleet.agents] == [set(), set()]


async def test_weights_that_are_too_large_are_noted_or_refused_by_every_way_in(simulation):
    good = simulation.adapter("good", beside=True)
    usual, grown, huge = (adapter_of_size(good, simulation.shelf / f"of-{size:g}", size) for size in (0.1, 0.5, 4.0))
    fleet = await simulation.fleet()

    async def publish(folder):
        return await fleet.http.post("/v1/published/run", json={"source": f"file://{folder}"})

    assert (await publish(usual)).json()["status"]["note"] == ""
    await fleet.set_policy(large_weights="refuse")
    await fleet.register("registered/v1", huge)
    refusals = {
        "registered": await verdict(fleet, "registered/v1"),
        "uploaded": (await fleet.http.put("/v1/adapters/uploaded/v1", content=tar_of(huge))).text,
        "published": (await publish(huge)).text,
        "grown": (await publish(grown)).text,
    }
    assert {way: text for way, text in refusals.items() if "weights_too_large" not in text} == {}
    assert (await fleet.http.get("/v1/published/run")).json()["status"]["version"] == 1

    await fleet.set_policy(large_weights="note")
    status = (await publish(grown)).json()["status"]
    assert status["version"] == 2
    assert "the former version's is" in status["note"]


async def test_publish_of_what_differs_fails_and_the_former_version_stays(simulation):
    steps = [simulation.adapter(f"step-{number}", seed=number) for number in range(3)]
    certify(steps[0])
    certify(steps[1], of=steps[2])
    fleet = await simulation.fleet()
    await fleet.set_policy(acceptance="require", min_residency_s=0)
    made = await fleet.http.post("/v1/published/policy", json={"source": f"file://{steps[0]}"})
    assert made.status_code == 200, made.text
    assert {one["result"] for one in made.json()["status"]["acceptance"].values()} == {"equal"}
    for source, said in ((steps[1], "differs"), (steps[2], "it has no acceptance.jsonl")):
        refused = await fleet.http.post("/v1/published/policy", json={"source": f"file://{source}", "timeout_s": 100})
        assert refused.status_code >= 400, refused.text
        assert said in refused.json()["error"]["message"]
    assert (await fleet.http.get("/v1/published/policy")).json()["status"]["version"] == 1
    asked = await fleet.ask("policy", prompt=[5] * 40, max_tokens=2)
    assert asked.headers["x-lorafleet-adapter"].startswith("policy/v1@")
