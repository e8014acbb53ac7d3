"""A worker that has just joined fetches files of adapters that are asked for now and then."""

from tests.simulation.fleet import until
from tests.simulation.programs import EngineFlags

NAMES = [f"tenant/{number}" for number in range(8)]
FLAGS = EngineFlags(load_s=0.3, max_loras=1, max_cpu_loras=2)


async def test_worker_that_joins_has_more_files_than_it_loads_before_anything_is_asked_of_it(simulation):
    fleet = await simulation.fleet(workers=1, engine=FLAGS)
    for number, name in enumerate(NAMES):
        await fleet.register(name, simulation.adapter(name, seed=number))
    for _ in range(3):
        for name in NAMES:
            assert await fleet.answered_by(name) == name
    fleet.add_worker(FLAGS)

    async def has_files():
        workers = (await fleet.http.get("/v1/workers")).json()["data"]
        held = {each["id"]: each["files"]["held"] for each in workers if each["files"]}
        return held.get("w1", 0) >= FLAGS.max_cpu_loras + 2

    await until(has_files, what="two adapters' files are there beyond those that it loads before it is ready")
