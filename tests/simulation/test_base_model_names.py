"""One base model under several names: the fleet's, what its engines serve it as, and what trainers called it."""

from tests.simulation.fleet import until
from tests.simulation.programs import EngineFlags

BASE, SERVED = "tiny", {"w0": "tiny-small", "w1": "acme/tiny-large"}


async def test_workers_that_serve_one_base_model_under_other_names_answer_for_it_and_its_adapters(simulation):
    fleet = await simulation.fleet(workers=0, routers=0)
    for served in SERVED.values():
        flags = EngineFlags(more=("--served-model-name", served))
        fleet.add_worker(flags, served_model_name=served, base_model=BASE)
    fleet.add_router(policy="round_robin", max_tries=1)
    await until(fleet.is_whole, what="the fleet is ready")
    # Without a base model, as `lorafleet adapters add` does.
    await fleet.register("sql/v1", simulation.adapter("sql/v1", base_model="Hub/Tiny"))
    assert await fleet.ensure("sql/v1", replicas=2) == ["w0", "w1"]
    assert (await fleet.adapter("sql/v1"))["spec"]["base_model"] == BASE
    router = fleet.processes.services.routers["router0"]
    await until(lambda: router.tokenizers.knows(BASE), what="an engine agrees with the tokenizer")
    held = router.discovery.fleet
    await until(lambda: len(held.holding(held.adapters["sql/v1"].engine_name)) == 2, what="the router knows both")
    assert await fleet.models() == [[BASE, "sql/v1"]]
    for name in (BASE, "sql/v1"):
        answered = set()
        for kind in ({"prompt": "hello"}, {"messages": [{"role": "user", "content": "hello"}]}):
            for _ in SERVED:
                answer = await fleet.ask(name, **kind)
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == name
                answered.add((*kind, answer.headers["x-lorafleet-worker"]))
        assert len(answered) == 4
