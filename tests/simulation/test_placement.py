"""Adapters follow the traffic over few slots, come back when a worker is lost, and are there before their worker is."""

import asyncio

from tests.simulation.fleet import is_ready, until
from tests.simulation.programs import EngineFlags

FIVE = ("sql/v1", "python/v1", "legal/v2", "cold/v1", "late/v1")


async def few_slots(simulation):
    """Two workers with two slots each for five adapters: of all four, two stay free for moves."""
    fleet = await simulation.fleet(workers=2, engine=EngineFlags(max_loras=2, max_cpu_loras=4))
    await fleet.set_policy(reserve_slots=2)
    for seed, name in enumerate(FIVE):
        await fleet.register(name, simulation.adapter(name, seed=seed))
    return fleet


async def ask_in_turns(fleet, names, times):
    """Ask for each, four requests at a time."""
    free = asyncio.Semaphore(4)

    async def ask(name):
        async with free:
            return await fleet.ask(name, max_tokens=8)

    answers = await asyncio.gather(*(ask(name) for name in names * times))
    assert [answer.status_code for answer in answers] == [200] * len(answers), [
        answer.text for answer in answers if answer.status_code != 200
    ]


async def test_adapters_follow_the_traffic_and_no_request_fails(simulation):
    fleet = await few_slots(simulation)

    async def on_engines():
        """Worker -> adapters that its engine itself lists."""
        return {
            worker: {name.rpartition("@")[0] for name in await fleet.engine_models(worker) if "@" in name}
            for worker in fleet.agents
        }

    async def placed():
        """Worker -> adapters that are ready there, by the orchestrator; empty while anything is loading."""
        rows = (await fleet.http.get("/v1/placements")).json()["data"]
        if any(row["state"] not in ("ready", "on_disk", "remote") for row in rows):
            return {}
        return {
            worker: {row["lora_id"] for row in rows if (row["worker_id"], row["state"]) == (worker, "ready")}
            for worker in fleet.agents
        }

    for hot in ((FIVE[0], FIVE[1]), (FIVE[2], FIVE[3]), (FIVE[4], FIVE[0]), (FIVE[1], FIVE[2])):
        await ask_in_turns(fleet, hot, 8)
        held = set().union(*[await fleet.ready_on(worker) for worker in fleet.agents])
        assert held.issuperset(hot)

    async def agree():
        return await on_engines() == await placed()

    await until(agree, what="engines and placements agree")
    held = await on_engines()
    assert all(len(names) <= 4 for names in held.values())
    assert len(set().union(*held.values())) >= 2


async def test_a_lost_workers_hot_adapters_are_elsewhere_within_five_seconds_plus_the_load(simulation):
    fleet, hot = await few_slots(simulation), FIVE[:2]

    async def is_known():
        counted = (await fleet.http.get("/metrics")).text
        return all(f'lora_usage_requests_total{{lora_id="{lora_id}"}}' in counted for lora_id in hot)

    for _ in range(2):
        await ask_in_turns(fleet, hot, 6)
        await until(is_known, what="the orchestrator knows which adapters are hot")
    ready = {worker: await fleet.ready_on(worker) for worker in fleet.agents}
    gone = next(worker for worker in ready if ready[worker].intersection(hot))
    (left,) = fleet.agents.keys() - {gone}
    lost = ready[gone].intersection(hot)
    for process in (gone, gone.replace("w", "engine")):
        fleet.pause(process, for_s=60)

    async def are_elsewhere():
        return lost <= await fleet.ready_on(left)

    # A worker is missed after some three seconds, and an adapter is loaded in 0.3 s.
    await until(are_elsewhere, within_s=5.3 + 0.3, every_s=0.1, what=f"{lost} on {left}")
    await asyncio.sleep(60)
    await until(fleet.is_whole, within_s=20, what=f"{gone} is back")


NAMES = [f"team/a{number}" for number in range(12)]


async def test_a_worker_that_is_added_under_load_is_warm_before_it_is_ready(simulation):
    flags = EngineFlags(max_loras=4, max_cpu_loras=16, load_s=0.05)
    fleet = await simulation.fleet(engine=flags)
    for name in NAMES:
        await fleet.register(name, simulation.adapter(name))
    answers = []

    async def ask(number):
        answers.append(await fleet.ask(NAMES[number % len(NAMES)], prompt=f"{number} hello", max_tokens=2))

    async def ask_on():
        """Requests for all adapters in turn, one a few milliseconds after the other."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(1_000_000):
                tasks.create_task(ask(number))
                await asyncio.sleep(0.05)

    def answered():
        return {answer.headers["x-lorafleet-adapter"].partition("@")[0] for answer in answers}

    running = asyncio.create_task(ask_on())
    await until(lambda: answered() == set(NAMES), what="all are asked for")
    cold = await fleet.figure(0, "lorafleet_router_cold_starts_total")
    worker = fleet.add_worker(flags)
    await until(lambda: is_ready(fleet.agents[worker]), every_s=0.05, what="the new worker is ready")
    share = await fleet.ready_on(worker)
    assert 2 <= len(share) < len(NAMES)
    at_new = lambda: sum(answer.headers.get("x-lorafleet-worker") == worker for answer in answers)  # noqa: E731
    await until(lambda: at_new() > 5, every_s=0.1, what="the new worker answers")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert {answer.status_code for answer in answers} == {200}
    assert await fleet.figure(0, "lorafleet_router_cold_starts_total") == cold


async def test_a_request_waits_for_another_worker_where_an_engine_dies_before_its_metrics_were_read(simulation):
    fleet = await simulation.fleet(workers=2)
    await fleet.register("sql/v1", simulation.adapter("sql/v1"))
    worker = (await fleet.ask("sql/v1")).headers["x-lorafleet-worker"]
    fleet.kill(worker.replace("w", "engine"), away_s=60)
    answer = await fleet.ask("sql/v1")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-lorafleet-worker"] != worker
