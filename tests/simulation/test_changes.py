"""Three routers of one fleet: what was registered, moved or deleted holds for the very next request at any of them."""

from itertools import cycle

LOOPS = 10


async def test_a_change_holds_for_the_next_request_at_any_router(simulation):
    fleet, source = await simulation.fleet(workers=2, routers=3), simulation.adapter("any")
    routers = cycle(range(3))
    for n in range(LOOPS):
        await fleet.register(f"new/v{n}", source)
        assert await fleet.answered_by(f"new/v{n}", router=next(routers)) == f"new/v{n}"
        assert (await fleet.http.delete(f"/v1/adapters/new/v{n}")).is_success
        assert await fleet.answered_everywhere(f"new/v{n}") == [404] * 3
    await fleet.register("old/v0", source)
    await fleet.register("old/v1", source)
    for n in range(LOOPS):
        alias = {"targets": [{"lora_id": f"old/v{n % 2}"}], "place_s": 0}
        assert (await fleet.http.put("/v1/aliases/old", json=alias)).is_success
        assert await fleet.answered_everywhere("old") == [f"old/v{n % 2}"] * 3
    assert (await fleet.http.delete("/v1/aliases/old")).is_success
    assert await fleet.answered_everywhere("old") == [404] * 3
