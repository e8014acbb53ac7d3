"""Few slots: an adapter takes that of another on which requests run, or comes back with the request for it."""

import asyncio

from tests.certified import certify
from tests.simulation.fleet import until
from tests.simulation.programs import EngineFlags

TOKENS = 60
STREAM_S = 90.0


async def test_an_adapter_takes_a_slot_on_which_a_stream_runs_and_the_stream_ends_whole(simulation):
    """The streams outlast the ten seconds in which a new orchestrator may not have heard every router."""
    names = ("a/v1", "b/v1", "c/v1")
    flags = EngineFlags(max_loras=2, max_cpu_loras=2, decode_tokens_per_s=TOKENS / STREAM_S)
    fleet = await simulation.fleet(engine=flags)
    for seed, name in enumerate(names):
        await fleet.register(name, simulation.adapter(name, seed=seed))
    for name in names[:2]:
        assert await fleet.ensure(name) == ["w0"]

    async def stream(name):
        async with fleet.streaming(name, max_tokens=TOKENS) as answer:
            return await answer.rest()

    streams = [asyncio.create_task(stream(name)) for name in names[:2]]
    assert await fleet.ensure("c/v1") == ["w0"], "though both slots are in use"
    assert not any(task.done() for task in streams)
    for events in await asyncio.gather(*streams):
        assert events[-1] == "[DONE]"
        assert len(events) >= TOKENS - 1
    assert await fleet.answered_by("c/v1", max_tokens=1) == "c/v1"
    held = (await fleet.http.get("/v1/workers/w0")).json()["adapters"]
    assert len(held) == len(names) - 1, "nothing is loaded that nobody asks for"
    assert "c/v1" in held


NAMES = ("a/v1", "b/v1")


async def one_slot(simulation):
    """An engine with one slot that takes its agent's offers: a request loads its adapter by itself."""
    flags = EngineFlags(max_loras=1, max_cpu_loras=1)
    return await simulation.fleet(engine=flags, has_reports=True, agent={"probe_modules": "off"})


async def loads_by_call(fleet):
    """lora_id -> how often an agent's call has loaded it, and not a request."""
    page = (await fleet.agents["w0"].get("/metrics")).text.splitlines()
    start = 'lora_load_duration_seconds_count{lora_id="'
    counts = [line.removeprefix(start).split() for line in page if line.startswith(start)]
    return {labels.partition('"')[0]: float(count) for labels, count in counts}


async def test_adapters_that_take_turns_in_one_slot_are_loaded_by_a_call_once_each(simulation):
    fleet = await one_slot(simulation)
    for name in NAMES:
        await fleet.register(name, simulation.adapter(name))

    async def text(name):
        return (await fleet.ask(name, prompt="select")).raise_for_status().json()["choices"][0]["text"]

    first = [await text(name) for name in NAMES]
    assert [await text(name) for name in NAMES] == first
    # Several at once wait for one load.
    assert await asyncio.gather(*(text(NAMES[0]) for _ in range(4))) == [first[0]] * 4
    assert await loads_by_call(fleet) == dict.fromkeys(NAMES, 1.0)
    # A name that the fleet does not have is no offer.
    assert await fleet.answered_by("c/v1") == 404
    (await fleet.http.delete(f"/v1/adapters/{NAMES[0]}")).raise_for_status()
    assert await fleet.answered_by(NAMES[0]) == 404


async def test_adapter_that_must_be_equal_is_compared_before_each_return_and_never_offered(simulation):
    fleet = await one_slot(simulation)
    for name, mode in zip(NAMES, ("require", "warn"), strict=True):
        certify(folder := simulation.adapter(name))
        await fleet.register(name, folder, policy={"acceptance": mode})
    for name in NAMES * 2:
        assert await fleet.answered_by(name, prompt="select") == name
    assert await loads_by_call(fleet) == {NAMES[0]: 2.0, NAMES[1]: 1.0}


async def test_a_load_by_vllms_own_call_at_one_engine_reaches_every_worker_when_policy_says_so(simulation):
    fleet = await simulation.fleet(workers=3)
    await fleet.script_loads("w1", "mine", simulation.adapter("mine", beside=True))
    record = fleet.files_of("w1") / "state" / "adapters"

    async def is_orphan():
        return any(item["card"]["digest"] for item in (await fleet.http.get("/v1/orphans")).json()["data"])

    await until(is_orphan, what="its files are read")
    assert [path.name for path in record.iterdir()] == ["mine.json"]
    await fleet.set_policy(adopt="all", loading="everywhere")

    async def are_ready():
        return (await fleet.adapter("mine"))["status"]["workers"] == ["w0", "w1", "w2"]

    await until(are_ready, what="every worker has it")
    assert await fleet.answered_by("mine", max_tokens=1) == "mine"
    digest = (await fleet.adapter("mine"))["spec"]["digest"]
    await until(lambda: [path.name for path in record.iterdir()] == [f"mine@{digest[:12]}.json"], what="one record")


async def test_three_adapters_take_turns_in_the_one_slot_that_is_left_while_a_worker_is_away(simulation):
    """Each answers by its own weights all the time, and no request ends in an error."""
    names = ("a/v1", "b/v1", "c/v1")
    fleet = await simulation.fleet(workers=2, engine=EngineFlags(max_loras=1, max_cpu_loras=1))
    for seed, name in enumerate(names):
        await fleet.register(name, simulation.adapter(name, seed=seed))

    async def text(name):
        return (await fleet.ask(name)).raise_for_status().json()["choices"][0]["text"]

    async def texts(name):
        found = set()
        for _ in range(25):
            found.add(await text(name))
            await asyncio.sleep(3.0)
        return found

    own = [{await text(name)} for name in names]
    assert len(set.union(*own)) == len(names)
    clients = [asyncio.create_task(texts(name)) for name in names]
    await asyncio.sleep(10.0)
    for process in ("w0", "engine0"):
        fleet.kill(process, away_s=60)
    assert await asyncio.gather(*clients) == own
    await until(fleet.is_whole, what="the worker is back")
    assert [{await text(name)} for name in names] == own
