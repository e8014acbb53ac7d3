"""Aliases that move: make before break, rollouts in steps, and what a restart remembers of them."""

import pytest

from orchestrator.core.rollout import RequestTally

V1, V2 = "sql/v1", "sql/v2"
STEPS = [{"weight": 0.1, "for_s": 10}, {"weight": 0.5, "for_s": 10}]


def code(answer):
    return answer.json()["error"]["code"]


class ReportingRouter:
    """A router's reports: adds to what it counted of an adapter, and says so."""

    def __init__(self, house):
        self.house = house
        self.uses = {}
        self.seq = 0

    async def report(self, lora_id=None, **more):
        if lora_id is not None:
            use = self.uses.setdefault(lora_id, {"worker_id": "w0", "engine_name": f"{lora_id}@ab"})
            for name, amount in more.items():
                use[name] = use.get(name, 0) + amount
        self.seq += 1
        assert (await self.house.usage(1, *self.uses.values(), seq=self.seq))["accepted"]

    async def served(self, lora_id, requests, *, errors=0, first_token_s=0.1):
        await self.report(
            lora_id,
            requests=requests,
            errors=errors,
            first_tokens=requests,
            first_token_s=requests * first_token_s,
        )


@pytest.fixture
async def two_versions(house):
    """v1 on two of three workers under the alias `sql`; v2 is registered and nowhere."""
    for name in ("w0", "w1", "w2"):
        await house.worker(name)
    await house.register(V1)
    await house.settle()
    await house.ensure(V1, replicas=2)
    await house.settle()
    await point(house, V1)
    await house.register(V2)
    return house


async def point(house, *targets, **more):
    body = {"targets": [{"lora_id": lora_id} for lora_id in targets]} | more
    return await house.http.put("/v1/aliases/sql", json=body)


async def start(house, **more):
    return await house.http.post("/v1/aliases/sql/rollout", json={"to": V2, "steps": STEPS, "min_requests": 20} | more)


async def status(house):
    return (await house.http.get("/v1/aliases/sql/rollout")).json()


async def told(house):
    """What routers are told that the alias points at."""
    (alias,) = (await house.catalog())["aliases"]
    return {target["lora_id"]: target["weight"] for target in alias["targets"]}


async def ready(house, lora_id):
    return (await house.adapter(lora_id))["replicas"]["ready"]


async def test_a_switch_waits_until_the_new_version_is_where_the_old_one_is(two_versions):
    house = two_versions
    answer = await point(house, V2)
    assert answer.status_code == 202
    assert answer.json()["targets"] == [{"lora_id": V1, "weight": 1.0}]
    assert answer.json()["pending"]["targets"] == [{"lora_id": V2, "weight": 1.0}]
    assert answer.json()["pending"]["lacks"] == {V2: "0 of 2 replicas ready"}
    seen = []
    for _ in range(12):
        seen.append((await ready(house, V2), await told(house)))
        await house.turn()
    assert all(at == {V1: 1.0} for count, at in seen if count < 2)
    assert seen[-1] == (2, {V2: 1.0})
    assert await ready(house, V1) == 2
    answer = await house.http.get("/v1/aliases/sql")
    assert answer.json()["pending"] is None
    history = (await house.http.get("/v1/aliases/sql/history")).json()["data"]
    assert [entry["body"]["targets"][0][0] for entry in history if entry["kind"] == "alias_set"] == [V2, V1]


async def test_a_switch_to_what_is_there_already_and_one_that_may_not_wait_are_made_at_once(two_versions):
    house = two_versions
    assert (await point(house, V2, place_s=0)).status_code == 200
    assert await told(house) == {V2: 1.0}
    await house.settle()
    # Nothing of v2 is anywhere, and v1 is where it was.
    assert (await point(house, V1)).status_code == 200
    assert await told(house) == {V1: 1.0}


async def test_a_version_that_cannot_be_placed_leaves_the_old_one_and_the_answer_says_why(two_versions, clock):
    house = two_versions
    for agent in house.agents.values():
        agent.ranks["file:///big"] = 512
    await house.register("sql/big", source="file:///big")
    assert (await point(house, "sql/big", place_s=30)).status_code == 202
    for _ in range(5):
        await house.turn()
        clock.now += 10
    pending = (await house.http.get("/v1/aliases/sql")).json()["pending"]
    assert (pending["state"], await told(house)) == ("failed", {V1: 1.0})
    assert "not placed within 30 s" in pending["error"]
    assert "512" in pending["error"]


async def test_a_second_writer_with_what_it_saw_before_does_not_undo_a_pending_switch(two_versions):
    house = two_versions
    seen = (await house.http.get("/v1/aliases/sql")).headers["etag"]
    assert (await point(house, V2)).status_code == 202
    body = {"targets": [{"lora_id": V1}]}
    answer = await house.http.put("/v1/aliases/sql", json=body, headers={"if-match": seen})
    assert (answer.status_code, code(answer)) == (412, "precondition_failed")
    # Without a condition the newer word counts: the old targets again end the switch.
    assert (await point(house, V1)).status_code == 200
    await house.settle()
    assert (await told(house), await ready(house, V2)) == ({V1: 1.0}, 0)


async def test_a_rollout_goes_step_by_step_places_before_it_shifts_and_ends_at_the_new_version(two_versions, clock):
    house, router = two_versions, ReportingRouter(two_versions)
    await router.report()
    assert (await start(house)).status_code == 201
    assert (await start(house)).status_code == 200
    found = []
    for _ in range(30):
        await router.served(V1, 30)
        await router.served(V2, 30)
        await house.turn()
        at = await told(house)
        if not found or found[-1] != at:
            found.append(at)
            assert await ready(house, V2) >= (0 if V2 not in at else 1 if V1 in at else 2)
        clock.now += 4
    assert found == [{V1: 1.0}, {V1: 0.9, V2: 0.1}, {V1: 0.5, V2: 0.5}, {V2: 1.0}]
    item = await status(house)
    assert (item["state"], item["weight"], item["paused"]) == ("done", 1.0, False)
    assert (await house.http.delete("/v1/aliases/sql/rollout")).status_code == 409


@pytest.mark.parametrize(("bad", "why"), [({"errors": 15}, "error rate"), ({"first_token_s": 0.9}, "first token")])
async def test_a_version_that_fails_or_is_slow_goes_back_by_itself_and_says_why(two_versions, clock, bad, why):
    house, router = two_versions, ReportingRouter(two_versions)
    await router.report()
    await start(house)
    await house.settle()
    assert await told(house) == {V1: 0.9, V2: 0.1}
    await router.served(V1, 30)
    await house.turn()
    await router.served(V1, 30)
    await router.served(V2, 30, **bad)
    await house.turn()
    item = await status(house)
    assert (item["state"], await told(house)) == ("rolled_back", {V1: 1.0})
    assert why in item["reason"]
    (entry,) = (await house.http.get("/v1/history", params={"kind": "alias_rollout", "limit": 1})).json()["data"]
    assert (entry["subject"], entry["body"]["what"]) == ("sql", "rolled_back")
    assert why in entry["body"]["why"]


async def test_a_version_that_its_only_engine_lost_and_takes_no_more_goes_back_at_once(house):
    agent = await house.worker()
    for version in (V1, V2):
        await house.register(version)
    await house.settle()
    await house.ensure(V1)
    await house.settle()
    await point(house, V1)
    await start(house)
    await house.settle()
    assert (await told(house))[V2] == 0.1

    del agent.loaded[V2]
    agent.refuse[V2] = "adapter_refused"
    await house.settle()
    ended = await status(house)
    assert (ended["state"], await told(house)) == ("rolled_back", {V1: 1.0})
    assert ended["reason"].startswith(f"{V2} cannot be used: adapter_refused")


async def test_while_a_rollout_runs_the_alias_cannot_be_set_and_its_adapters_cannot_be_deleted(two_versions):
    house = two_versions
    await start(house)
    for answer in (await point(house, V1), await start(house, to=V2, min_requests=1)):
        assert (answer.status_code, code(answer)) == (409, "rollout_running")
        assert "DELETE /v1/aliases/sql/rollout" in answer.json()["error"]["message"]
    answer = await house.http.delete(f"/v1/adapters/{V2}")
    assert (answer.status_code, code(answer)) == (409, "in_use")
    item = (await house.http.delete("/v1/aliases/sql/rollout")).json()
    assert (item["state"], await told(house)) == ("aborted", {V1: 1.0})
    assert (await point(house, V2)).status_code == 202


async def test_a_paused_rollout_stays_until_it_is_resumed_over_a_restart_too(open_house, clock):
    house = open_house()
    await house.worker("w0")
    await house.register(V1)
    await house.settle()
    await house.ensure(V1)
    await house.settle()
    await point(house, V1)
    await house.register(V2)
    await house.settle()
    await start(house, min_requests=0)
    await house.settle()
    item = (await house.http.patch("/v1/aliases/sql/rollout", json={"paused": True})).json()
    assert (item["state"], item["paused"], item["weight"]) == ("watching", True, 0.1)
    agent = house.agents["w0"]
    await house.close()
    again = open_house()
    agent.url = ""
    await again.join(agent)
    clock.now += 100
    await again.settle()
    assert (await status(again))["paused"]
    assert await told(again) == {V1: 0.9, V2: 0.1}
    await again.http.patch("/v1/aliases/sql/rollout", json={"paused": False})
    clock.now += 11
    await again.settle()
    assert await told(again) == {V1: 0.5, V2: 0.5}


async def test_what_a_rollout_needs_stays_where_it_is_though_nobody_asks_for_it(two_versions, clock):
    house = two_versions
    await start(house, min_requests=1000)
    await house.settle()
    assert await ready(house, V2) == 1
    for name in ("a", "b", "c", "d", "e", "f"):
        clock.now += 200
        await house.register(f"other/{name}")
        await house.settle()
        await house.ensure(f"other/{name}", replicas=3)
        await house.settle()
    assert (await ready(house, V1), await ready(house, V2)) == (2, 1)


async def test_what_was_counted_is_shown_and_requests_under_way_are_not_over(two_versions):
    house, router = two_versions, ReportingRouter(two_versions)
    await router.report()
    await start(house)
    await house.settle()
    await router.served(V2, 10, errors=1)
    await router.report(V2, requests=3, in_flight=3)
    await house.turn()
    item = await status(house)
    assert (item["new"]["requests"], item["new"]["errors"], item["needed"]) == (10, 1, 20)
    assert house.store.rollouts["sql"].new == RequestTally(10, 1, 10, pytest.approx(1.0))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"to": V2, "steps": []},
        {"to": V2, "steps": [{"weight": 0.5}, {"weight": 0.5}]},
        {"to": V2, "steps": [{"weight": 1.5}]},
        {"to": V2, "max_first_token_ratio": 0.5},
        {"to": V2, "min_request": 5},
    ],
)
async def test_a_rollout_that_makes_no_sense_is_400_and_starts_nothing(two_versions, body):
    house = two_versions
    answer = await house.http.post("/v1/aliases/sql/rollout", json=body)
    assert answer.status_code == 400
    answer = await house.http.get("/v1/aliases/sql/rollout")
    assert (answer.status_code, code(answer)) == (404, "rollout_not_found")


async def test_a_rollout_needs_an_alias_and_another_version(two_versions):
    house = two_versions
    answer = await house.http.post("/v1/aliases/nope/rollout", json={"to": V2})
    assert (answer.status_code, code(answer)) == (404, "alias_not_found")
    answer = await start(house, to="sql/v9")
    assert (answer.status_code, code(answer)) == (404, "adapter_not_found")
    answer = await start(house, to=V1)
    assert (answer.status_code, code(answer)) == (400, "invalid_request")


@pytest.mark.parametrize("workers", [1, 4])
async def test_a_rollout_from_a_canary_arrives_on_as_many_workers_as_there_are(house, clock, workers):
    for number in range(workers):
        await house.worker(f"w{number}")
    for lora_id, replicas in ((V1, workers), (V2, 1)):
        await house.register(lora_id)
        await house.settle()
        await house.ensure(lora_id, replicas=replicas)
        await house.settle()
    targets = [{"lora_id": V1, "weight": 9}, {"lora_id": V2, "weight": 1}]
    await house.http.put("/v1/aliases/sql", json={"targets": targets})
    router = ReportingRouter(house)
    await router.report()
    await start(house, steps=[{"weight": 0.5, "for_s": 5}])
    found = []
    for _ in range(10):
        await router.served(V1, 30)
        await router.served(V2, 30)
        await house.turn()
        at = await told(house)
        found += [] if at in found else [at]
        clock.now += 4
    assert found[-2:] == [{V1: 0.5, V2: 0.5}, {V2: 1.0}]
    assert (await status(house))["state"] == "done"
