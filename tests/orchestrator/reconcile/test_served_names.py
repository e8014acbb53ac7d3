"""Switches and rollouts of aliases over REST: make before break, steps, and restarts."""

import pytest

from orchestrator.model.served_names import RequestTally

V1, V2 = "sql/v1", "sql/v2"
STEPS = [{"weight": 0.1, "for_s": 10}, {"weight": 0.5, "for_s": 10}]


def code(answer):
    return answer.json()["error"]["code"]


class ReportingRouter:
    """A router that adds to an adapter's counts and reports them."""

    def __init__(self, service):
        self.service = service
        self.uses = {}
        self.seq = 0

    async def report(self, lora_id=None, **more):
        if lora_id is not None:
            use = self.uses.setdefault(lora_id, {"worker_id": "w0", "engine_name": f"{lora_id}@abababababab"})
            for name, amount in more.items():
                use[name] = use.get(name, 0) + amount
        self.seq += 1
        assert (await self.service.usage(1, *self.uses.values(), seq=self.seq))["accepted"]

    async def served(self, lora_id, requests, *, errors=0, first_token_s=0.1):
        await self.report(
            lora_id,
            requests=requests,
            errors=errors,
            first_tokens=requests,
            first_token_s=requests * first_token_s,
        )


@pytest.fixture
async def two_versions(service):
    """v1 on two of three workers under the alias `sql`; v2 is registered and unplaced."""
    for name in ("w0", "w1", "w2"):
        await service.worker(name)
    await service.register(V1)
    await service.settle()
    await service.ensure(V1, replicas=2)
    await service.settle()
    await point(service, V1)
    await service.register(V2)
    return service


async def point(service, *targets, **more):
    body = {"targets": [{"lora_id": lora_id} for lora_id in targets]} | more
    return await service.http.put("/v1/aliases/sql", json=body)


async def start(service, **more):
    return await service.http.post(
        "/v1/aliases/sql/rollout", json={"to": V2, "steps": STEPS, "min_requests": 20} | more
    )


async def status(service):
    return (await service.http.get("/v1/aliases/sql/rollout")).json()["status"]


async def told(service):
    """The alias's targets in the catalog."""
    (alias,) = (await service.catalog())["aliases"]
    return {target["lora_id"]: target["weight"] for target in alias["targets"]}


async def ready(service, lora_id):
    return (await service.adapter(lora_id))["status"]["replicas"]["ready"]


async def test_a_switch_waits_for_the_new_versions_replicas(two_versions):
    service = two_versions
    answer = await point(service, V2)
    assert answer.status_code == 202
    assert answer.json()["status"]["targets"] == [{"lora_id": V1, "weight": 1.0}]
    assert answer.json()["spec"]["targets"] == [{"lora_id": V2, "weight": 1.0}]
    assert answer.json()["status"]["pending"]["lacks"] == {V2: "0 of 2 replicas ready"}
    seen = []
    for _ in range(12):
        seen.append((await ready(service, V2), await told(service)))
        await service.turn()
    assert all(at == {V1: 1.0} for count, at in seen if count < 2)
    assert seen[-1] == (2, {V2: 1.0})
    assert await ready(service, V1) == 2
    answer = await service.http.get("/v1/aliases/sql")
    assert answer.json()["status"]["pending"] is None
    history = (await service.http.get("/v1/aliases/sql/history")).json()["data"]
    assert [entry["body"]["targets"][0][0] for entry in history if entry["kind"] == "alias_set"] == [V2, V1]


async def test_a_switch_to_placed_targets_or_without_waiting_is_immediate(two_versions):
    service = two_versions
    assert (await point(service, V2, place_s=0)).status_code == 200
    assert await told(service) == {V2: 1.0}
    await service.settle()
    # Nothing of v2 is anywhere, and v1 is where it was.
    assert (await point(service, V1)).status_code == 200
    assert await told(service) == {V1: 1.0}


async def test_an_unplaceable_version_leaves_the_old_one_with_a_reason(two_versions, clock):
    service = two_versions
    for agent in service.agents.values():
        agent.ranks["file:///big"] = 512
    await service.register("sql/big", source="file:///big")
    assert (await point(service, "sql/big", place_s=30)).status_code == 202
    for _ in range(5):
        await service.turn()
        clock.now += 10
    pending = (await service.http.get("/v1/aliases/sql")).json()["status"]["pending"]
    assert (pending["state"], await told(service)) == ("failed", {V1: 1.0})
    assert "not placed within 30 s" in pending["error"]
    assert "512" in pending["error"]


async def test_a_stale_writer_does_not_undo_a_pending_switch(two_versions):
    service = two_versions
    seen = (await service.http.get("/v1/aliases/sql")).headers["etag"]
    assert (await point(service, V2)).status_code == 202
    body = {"targets": [{"lora_id": V1}]}
    answer = await service.http.put("/v1/aliases/sql", json=body, headers={"if-match": seen})
    assert (answer.status_code, code(answer)) == (412, "precondition_failed")
    # Without a condition the newer word counts: the old targets again end the switch.
    assert (await point(service, V1)).status_code == 200
    await service.settle()
    assert (await told(service), await ready(service, V2)) == ({V1: 1.0}, 0)


async def test_a_rollout_places_and_shifts_step_by_step(two_versions, clock):
    service, router = two_versions, ReportingRouter(two_versions)
    await router.report()
    assert (await start(service)).status_code == 201
    assert (await start(service)).status_code == 200
    found = []
    for _ in range(30):
        await router.served(V1, 30)
        await router.served(V2, 30)
        await service.turn()
        at = await told(service)
        if not found or found[-1] != at:
            found.append(at)
            assert await ready(service, V2) >= (0 if V2 not in at else 1 if V1 in at else 2)
        clock.now += 4
    assert found == [{V1: 1.0}, {V1: 0.9, V2: 0.1}, {V1: 0.5, V2: 0.5}, {V2: 1.0}]
    item = await status(service)
    assert (item["state"], item["weight"], item["paused"]) == ("done", 1.0, False)
    assert (await service.http.delete("/v1/aliases/sql/rollout")).status_code == 409


@pytest.mark.parametrize(("bad", "why"), [({"errors": 15}, "error rate"), ({"first_token_s": 0.9}, "first token")])
async def test_a_failing_or_slow_version_is_rolled_back_with_a_reason(two_versions, clock, bad, why):
    service, router = two_versions, ReportingRouter(two_versions)
    await router.report()
    await start(service)
    await service.settle()
    assert await told(service) == {V1: 0.9, V2: 0.1}
    await router.served(V1, 30)
    await service.turn()
    await router.served(V1, 30)
    await router.served(V2, 30, **bad)
    await service.turn()
    item = await status(service)
    assert (item["state"], await told(service)) == ("rolled_back", {V1: 1.0})
    assert why in item["reason"]
    (entry,) = (await service.http.get("/v1/history", params={"kind": "alias_rollout", "limit": 1})).json()["data"]
    assert (entry["subject"], entry["body"]["what"]) == ("sql", "rolled_back")
    assert why in entry["body"]["why"]


async def test_a_version_that_becomes_unusable_is_rolled_back_at_once(service):
    agent = await service.worker()
    for version in (V1, V2):
        await service.register(version)
    await service.settle()
    await service.ensure(V1)
    await service.settle()
    await point(service, V1)
    await start(service)
    await service.settle()
    assert (await told(service))[V2] == 0.1

    del agent.loaded[V2]
    agent.refuse[V2] = "adapter_refused"
    await service.settle()
    ended = await status(service)
    assert (ended["state"], await told(service)) == ("rolled_back", {V1: 1.0})
    assert ended["reason"].startswith(f"{V2} cannot be used: adapter_refused")


async def test_a_running_rollout_protects_its_alias_and_adapters(two_versions):
    service = two_versions
    await start(service)
    for answer in (await point(service, V1), await start(service, to=V2, min_requests=1)):
        assert (answer.status_code, code(answer)) == (409, "rollout_running")
        assert "DELETE /v1/aliases/sql/rollout" in answer.json()["error"]["message"]
    answer = await service.http.delete(f"/v1/adapters/{V2}")
    assert (answer.status_code, code(answer)) == (409, "in_use")
    item = (await service.http.delete("/v1/aliases/sql/rollout")).json()["status"]
    assert (item["state"], await told(service)) == ("aborted", {V1: 1.0})
    assert (await point(service, V2)).status_code == 202


async def test_a_paused_rollout_stays_until_it_is_resumed_over_a_restart_too(open_service, clock):
    service = open_service()
    await service.worker("w0")
    await service.register(V1)
    await service.settle()
    await service.ensure(V1)
    await service.settle()
    await point(service, V1)
    await service.register(V2)
    await service.settle()
    await start(service, min_requests=0)
    await service.settle()
    item = (await service.http.patch("/v1/aliases/sql/rollout", json={"paused": True})).json()["status"]
    assert (item["state"], item["paused"], item["weight"]) == ("watching", True, 0.1)
    agent = service.agents["w0"]
    await service.close()
    again = open_service()
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


async def test_replicas_of_a_rollout_stay_without_demand(two_versions, clock):
    service = two_versions
    await start(service, min_requests=1000)
    await service.settle()
    assert await ready(service, V2) == 1
    for name in ("a", "b", "c", "d", "e", "f"):
        clock.now += 200
        await service.register(f"other/{name}")
        await service.settle()
        await service.ensure(f"other/{name}", replicas=3)
        await service.settle()
    assert (await ready(service, V1), await ready(service, V2)) == (2, 1)


async def test_a_rollout_shows_counts_of_finished_requests_only(two_versions):
    service, router = two_versions, ReportingRouter(two_versions)
    await router.report()
    await start(service)
    await service.settle()
    await router.served(V2, 10, errors=1)
    await router.report(V2, requests=3, in_flight=3)
    await service.turn()
    item = await status(service)
    assert (item["new"]["requests"], item["new"]["errors"], item["needed"]) == (10, 1, 20)
    assert item["worse"].startswith("error rate")  # so far, before the step has all its requests
    assert service.store.names["sql"].rollout.new == RequestTally(10, 1, 10, pytest.approx(1.0))


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
async def test_an_invalid_rollout_is_400_and_starts_nothing(two_versions, body):
    service = two_versions
    answer = await service.http.post("/v1/aliases/sql/rollout", json=body)
    assert answer.status_code == 400
    answer = await service.http.get("/v1/aliases/sql/rollout")
    assert (answer.status_code, code(answer)) == (404, "rollout_not_found")


async def test_a_rollout_needs_an_alias_and_another_version(two_versions):
    service = two_versions
    answer = await service.http.post("/v1/aliases/nope/rollout", json={"to": V2})
    assert (answer.status_code, code(answer)) == (404, "alias_not_found")
    answer = await start(service, to="sql/v9")
    assert (answer.status_code, code(answer)) == (404, "adapter_not_found")
    answer = await start(service, to=V1)
    assert (answer.status_code, code(answer)) == (400, "invalid_request")


@pytest.mark.parametrize("workers", [1, 4])
async def test_a_rollout_from_a_canary_completes_on_any_fleet_size(service, clock, workers):
    for number in range(workers):
        await service.worker(f"w{number}")
    for lora_id, replicas in ((V1, workers), (V2, 1)):
        await service.register(lora_id)
        await service.settle()
        await service.ensure(lora_id, replicas=replicas)
        await service.settle()
    targets = [{"lora_id": V1, "weight": 9}, {"lora_id": V2, "weight": 1}]
    await service.http.put("/v1/aliases/sql", json={"targets": targets})
    router = ReportingRouter(service)
    await router.report()
    await start(service, steps=[{"weight": 0.5, "for_s": 5}])
    found = []
    for _ in range(10):
        await router.served(V1, 30)
        await router.served(V2, 30)
        await service.turn()
        at = await told(service)
        found += [] if at in found else [at]
        clock.now += 4
    assert found[-2:] == [{V1: 0.5, V2: 0.5}, {V2: 1.0}]
    assert (await status(service))["state"] == "done"


async def test_weight_too_small_for_any_share_stops_no_pass(two_versions):
    tiny = {"targets": [{"lora_id": V2, "weight": 1e-320}, {"lora_id": V1, "weight": 1e300}], "place_s": 0}
    assert (await two_versions.http.put("/v1/aliases/sql", json=tiny)).is_success
    assert (await point(two_versions, V2)).status_code == 202
    await two_versions.settle()
    alias = (await two_versions.http.get("/v1/aliases/sql")).json()
    assert [target["lora_id"] for target in alias["status"]["targets"]] == [V2]
