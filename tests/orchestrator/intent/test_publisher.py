"""Publishing under names, over REST, with agents that are doubles: versions, their loads, retention, interruptions."""

import asyncio
import itertools

import pytest

from lorafleet.identity import engine_name
from lorafleet.keys.key_edits import add_key
from tests.orchestrator.doubles import digest_of
from tests.patience import patience, within


@pytest.fixture
async def fleet(service):
    """Two workers of four slots, ready."""
    for worker_id in ("w0", "w1"):
        await service.worker(worker_id)
    return service


async def publish(fleet, name="policy", source="/run/step-1", *, url="", **spec):
    """The answer to a publish below this URL, with passes meanwhile."""
    call = asyncio.create_task(fleet.http.post(f"{url}/v1/published/{name}", json={"source": source} | spec))
    while not call.done():
        await fleet.turn()
        fleet.clock.now += 0.2  # drains end by reports that are younger than they
        await asyncio.wait([call], timeout=0.01)
    return call.result()


async def drained(fleet, clock):
    """Passes until all that is to be unloaded is, with time for drains to end."""
    for _ in range(3):
        await fleet.settle()
        clock.now += 31


async def targets(fleet, name="policy"):
    """What routers get when they are asked for the name."""
    aliases = {alias["name"]: alias["targets"] for alias in (await fleet.catalog())["aliases"]}
    return [target["lora_id"] for target in aliases.get(name, ())]


async def test_first_publish_makes_version_one_ready_on_every_worker_before_it_answers(fleet):
    answer = await publish(fleet)

    assert answer.status_code == 200, answer.text
    now = answer.json()["status"]
    assert (now["lora_id"], now["digest"], now["is_new"]) == ("policy/v1", digest_of("/run/step-1"), True)
    assert now["workers"] == ["w0", "w1"]
    assert all("policy/v1" in agent.loaded for agent in fleet.agents.values())
    assert await targets(fleet) == ["policy/v1"]
    assert (await fleet.adapter("policy/v1"))["status"]["published_as"] == "policy"


async def test_place_that_bytes_came_from_is_never_read_again(fleet):
    await publish(fleet)

    loads = [body for agent in fleet.agents.values() for verb, body in agent.calls if verb == "load_lora"]
    assert {body["source"] for body in loads} == {f"fleet:{digest_of('/run/step-1')}"}


async def test_second_publish_is_next_version_and_name_points_at_it(fleet):
    await publish(fleet)

    item = (await publish(fleet, source="/run/step-2")).json()

    assert (item["status"]["lora_id"], item["status"]["version"]) == ("policy/v2", 2)
    assert await targets(fleet) == ["policy/v2"]
    assert [version["lora_id"] for version in item["status"]["versions"]] == ["policy/v2", "policy/v1"]


async def test_same_bytes_again_answer_without_a_load(fleet):
    first = (await publish(fleet)).json()
    loads = sum(verb == "load_lora" for agent in fleet.agents.values() for verb, _ in agent.calls)

    answer = await fleet.http.post("/v1/published/policy", json={"source": "/run/step-1"})

    assert answer.json() == first | {"status": first["status"] | {"is_new": False}}
    assert loads == sum(verb == "load_lora" for agent in fleet.agents.values() for verb, _ in agent.calls)


async def test_bytes_of_a_kept_version_are_pointed_at_again(fleet):
    await publish(fleet)
    await publish(fleet, source="/run/step-2")

    item = (await publish(fleet, source="/run/step-1")).json()

    assert (item["status"]["lora_id"], item["status"]["is_new"]) == ("policy/v1", False)
    assert await targets(fleet) == ["policy/v1"]


async def test_a_publish_that_expects_another_version_changes_nothing(fleet):
    new = await publish(fleet, expected_version=0)
    assert (new.status_code, new.json()["status"]["version"]) == (200, 1)
    for expected, step, status in ((0, 2, 409), (2, 2, 409), (0, 1, 200), (1, 2, 200), (1, 2, 200), (1, 3, 409)):
        answer = await publish(fleet, source=f"/run/step-{step}", expected_version=expected)
        assert answer.status_code == status, (expected, step, answer.text)
        if status == 409:
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("version_conflict", "expected_version")
            assert f"is at version {2 if step == 3 else 1}," in error["message"]
    assert await targets(fleet) == ["policy/v2"]
    assert (
        (await publish(fleet, "other", expected_version=1))
        .json()["error"]["message"]
        .startswith("'other' has no version, and the publish expected version 1")
    )
    await fleet.http.delete("/v1/published/policy")
    await fleet.settle()
    assert (await publish(fleet, expected_version=0)).status_code == 200


async def test_runs_without_keys_publish_one_name_below_urls_of_their_own(fleet):
    for run in ("r1", "r2"):
        item = (await publish(fleet, source=f"/run/{run}", url=f"/runs/{run}")).json()
        assert (item["name"], item["status"]["lora_id"]) == (f"{run}/policy", f"{run}/policy/v1")
    assert (await fleet.http.get("/runs/r1/v1/published/policy")).json()["name"] == "r1/policy"
    assert (await fleet.http.get("/v1/published/policy")).status_code == 404
    base = (await fleet.http.get("/v1/workers")).json()["data"][0]["base_model"]
    shadow = (await publish(fleet, base, url="/runs/r1")).json()
    assert (shadow["name"], shadow["status"]["shadows_base"]) == (f"r1/{base}", True)
    assert (await publish(fleet, base)).json()["error"]["code"] == "name_taken"
    assert (await fleet.http.delete("/runs/r2/v1/published/policy")).status_code == 204
    assert await targets(fleet, "r1/policy") == ["r1/policy/v1"]


async def test_name_stays_at_its_version_until_the_next_is_ready_on_all_workers(fleet):
    await publish(fleet)
    fleet.agents["w1"].hold_loads = asyncio.Event()
    call = asyncio.create_task(fleet.http.post("/v1/published/policy", json={"source": "/run/step-2"}))
    while "policy/v2" not in fleet.agents["w0"].loaded:
        await fleet.beat()
        fleet.reconciler.run_pass()
        fleet.clock.now += 0.2  # a slow worker holds the other up for two seconds
        await asyncio.wait([call], timeout=0.01)
    for _ in range(5):  # passes, and looks of the publish at its loads
        await fleet.beat()
        fleet.reconciler.run_pass()
        await asyncio.wait([call], timeout=0.02)

    assert not call.done()
    assert await targets(fleet) == ["policy/v1"]
    fleet.agents["w1"].hold_loads.set()
    while not call.done():
        await fleet.turn()
        await asyncio.wait([call], timeout=0.01)
    assert call.result().json()["status"]["lora_id"] == "policy/v2"


async def test_publish_of_a_name_that_another_call_deletes_before_it_is_confirmed_is_409(open_service):
    fleet = open_service(confirm_wait_s=patience(30))
    await fleet.worker("w0")
    seen = {"router_id": "r0", "revision_seen": fleet.reconciler.catalog.revision}
    assert (await fleet.http.get("/v1/catalog", params=seen)).is_success
    call = asyncio.create_task(fleet.http.post("/v1/published/policy", json={"source": "/run/step-1"}))
    while not fleet.store.targets_of("policy"):
        await fleet.turn()
        await asyncio.wait([call], timeout=0.01)
    deleting = asyncio.create_task(fleet.http.delete("/v1/published/policy"))
    while fleet.store.targets_of("policy"):
        await asyncio.wait([deleting], timeout=0.01)
    fleet.clock.now += 11  # the router is gone
    fleet.reconciler.confirmations.record_read("r1", fleet.reconciler.catalog.revision)
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "name_deleted")
    assert (await deleting).status_code == 204


async def test_replicas_limit_the_workers_that_must_have_a_version(fleet):
    item = (await publish(fleet, replicas=1)).json()

    assert len(item["status"]["workers"]) == 1
    assert item["spec"]["replicas"] == 1


async def test_worker_that_joins_later_gets_the_live_version(fleet):
    await publish(fleet)

    late = await fleet.worker("w2")
    await fleet.settle()

    assert "policy/v1" in late.loaded


async def test_bytes_that_engines_refuse_leave_name_as_it_was(fleet, clock):
    await publish(fleet)
    for agent in fleet.agents.values():
        agent.refuse["policy/v2"] = "adapter_refused"

    answer = await publish(fleet, source="/run/step-2")

    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "adapter_refused")
    assert await targets(fleet) == ["policy/v1"]
    await drained(fleet, clock)
    assert "policy/v2" not in fleet.store.adapters


async def test_bytes_that_no_worker_sees_are_waited_for(fleet):
    for agent in fleet.agents.values():
        agent.refuse["policy/v1"] = "source_not_found"
    call = asyncio.create_task(fleet.http.post("/v1/published/policy", json={"source": "/run/step-1"}))
    while len(fleet.agents["w0"].calls) + len(fleet.agents["w1"].calls) < 3:
        await asyncio.wait([call], timeout=0.01)
    for agent in fleet.agents.values():
        agent.refuse.clear()
    while not call.done():
        await fleet.turn()
        await asyncio.wait([call], timeout=0.01)

    assert call.result().json()["status"]["lora_id"] == "policy/v1"


async def test_bytes_that_never_appear_end_in_an_error_that_says_so(fleet, clock):
    for agent in fleet.agents.values():
        agent.refuse["policy/v1"] = "source_not_found"
    call = asyncio.create_task(fleet.http.post("/v1/published/policy", json={"source": "/nowhere"}))
    while not fleet.agents["w0"].calls or not fleet.agents["w1"].calls:
        await asyncio.wait([call], timeout=0.01)
    clock.now += 30

    answer = await call

    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "bytes_not_visible")
    assert "policy" not in fleet.store.names


async def test_publish_without_a_worker_says_so(service):
    answer = await publish(service)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")


async def test_publish_waits_until_every_router_goes_by_the_name(fleet):
    await fleet.http.get("/v1/catalog?router_id=r0&revision_seen=1")
    call = asyncio.create_task(fleet.http.post("/v1/published/policy", json={"source": "/run/step-1"}))
    while await targets(fleet) != ["policy/v1"]:
        await fleet.turn()
        await asyncio.wait([call], timeout=0.01)
    assert not call.done()

    await fleet.http.get(f"/v1/catalog?router_id=r0&revision_seen={(await fleet.catalog())['revision']}")

    assert (await call).status_code == 200


async def test_publishes_of_one_name_take_turns(fleet):
    calls = [
        asyncio.create_task(fleet.http.post("/v1/published/policy", json={"source": f"/run/step-{n}"}))
        for n in range(1, 4)
    ]
    while not all(call.done() for call in calls):
        await fleet.turn()
        await asyncio.wait(calls, timeout=0.01)

    items = [call.result().json() for call in calls]
    assert sorted(item["status"]["version"] for item in items) == [1, 2, 3]
    assert await targets(fleet) == ["policy/v3"]


async def test_versions_beyond_keep_versions_leave_workers_and_store(fleet, clock):
    for step in range(1, 5):
        await publish(fleet, source=f"/run/step-{step}", keep_versions=2)
    await drained(fleet, clock)

    kept = ["policy/v3", "policy/v4"]
    assert [lora_id for lora_id in fleet.store.adapters if lora_id.startswith("policy/")] == kept
    assert all(sorted(agent.loaded) == kept for agent in fleet.agents.values())
    assert fleet.store.tombstones == {}


async def test_worker_that_comes_back_with_a_retired_version_unloads_it(fleet, clock):
    for step in range(1, 4):
        await publish(fleet, source=f"/run/step-{step}", keep_versions=1)
    await drained(fleet, clock)

    fleet.agents["w0"].put("policy/v1", "/run/step-1")
    await drained(fleet, clock)

    assert sorted(fleet.agents["w0"].loaded) == ["policy/v3"]


async def test_superseded_version_is_deleted_when_it_is_stale_though_no_trainer_calls(fleet, clock):
    await publish(fleet, max_staleness_s=60)
    await publish(fleet, source="/run/step-2")

    clock.now += 59
    await fleet.settle()
    assert "policy/v1" in fleet.store.adapters

    clock.now += 2
    await drained(fleet, clock)
    assert "policy/v1" not in fleet.store.adapters


async def test_publish_cut_off_by_the_end_of_its_leader_leaves_old_version_and_is_repeatable(
    fleet, open_service, clock
):
    await publish(fleet)
    fleet.agents["w1"].hold_loads = asyncio.Event()
    call = asyncio.create_task(fleet.http.post("/v1/published/policy", json={"source": "/run/step-2"}))
    while "policy/v2" not in fleet.store.adapters:
        await asyncio.wait([call], timeout=0.01)
    call.cancel()
    await asyncio.wait([call])

    successor = open_service()
    for agent in fleet.agents.values():
        agent.hold_loads = None
        await successor.join(agent)
    assert await targets(successor) == ["policy/v1"]
    item = (await publish(successor, source="/run/step-2")).json()

    assert (item["status"]["lora_id"], item["status"]["is_new"]) == ("policy/v2", False)
    assert await targets(successor) == ["policy/v2"]


async def test_version_of_a_publish_that_nobody_repeats_is_deleted(fleet, clock):
    await publish(fleet)
    for agent in fleet.agents.values():
        agent.hold_loads = asyncio.Event()
    call = asyncio.create_task(fleet.http.post("/v1/published/policy", json={"source": "/run/step-2"}))
    while "policy/v2" not in fleet.store.adapters:
        await asyncio.wait([call], timeout=0.01)
    call.cancel()
    await asyncio.wait([call])
    for agent in fleet.agents.values():
        agent.hold_loads.set()

    clock.now += 130
    await drained(fleet, clock)

    assert "policy/v2" not in fleet.store.adapters
    assert await targets(fleet) == ["policy/v1"]


async def test_deleted_name_is_gone_from_workers_and_a_second_delete_says_404(fleet, clock):
    await publish(fleet)

    assert (await fleet.http.delete("/v1/published/policy")).status_code == 204
    await drained(fleet, clock)

    assert all(agent.loaded == {} for agent in fleet.agents.values())
    assert await targets(fleet) == []
    answer = await fleet.http.delete("/v1/published/policy")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "name_not_found")


async def test_names_of_adapters_aliases_and_base_models_cannot_be_published(fleet):
    await fleet.register("sql/v1")
    await fleet.http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "sql/v1"}]})

    for name in ("sql/v1", "sql", "tiny-qwen"):
        answer = await publish(fleet, name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "name_taken"), name


async def test_full_workers_make_room_for_a_version_by_one_that_no_name_points_at(fleet):
    for step in range(1, 7):
        answer = await publish(fleet, source=f"/run/step-{step}", keep_versions=100)
        assert answer.status_code == 200, answer.text

    for agent in fleet.agents.values():
        assert {"policy/v5", "policy/v6"} <= agent.loaded.keys()
        assert len(agent.loaded) == 4


async def test_names_that_nobody_uses_any_more_refuse_nobody_a_slot(fleet, clock):
    for number in range(4):
        assert (await publish(fleet, f"run-{number}", f"/run/{number}")).is_success
    await fleet.register()

    reports = itertools.count(1)

    async def asked_for():
        """Why an adapter that is asked for, while a router reports, has no place; None once it is loaded."""
        for _ in range(8):
            await fleet.usage(1, seq=next(reports))
            await fleet.ensure(timeout_s=0.01)
            await fleet.settle()
            clock.now += 1  # drains end by reports that are younger than they
            error = (await fleet.adapter())["status"]["error"]
        return None if any("sql/v1" in agent.loaded for agent in fleet.agents.values()) else error

    assert "nothing there may be evicted" in await asked_for()
    clock.now += 300
    assert await asked_for() is None


async def test_a_name_is_in_use_for_as_long_as_the_policy_says_after_its_last_request(fleet, clock):
    assert (await publish(fleet)).is_success
    await fleet.http.patch("/v1/policy", json={"scale_down_after_s": 7200})

    async def is_idle(report, *uses):
        await fleet.usage(1, *uses, seq=report)
        await fleet.turn()
        demand, retention = fleet.reconciler.demand.snapshot(clock.now), fleet.reconciler.retention
        return "policy" in retention.idle_names(demand, retention.last_asked_at(demand))

    clock.now += 7300
    asked = {"worker_id": "w0", "engine_name": engine_name("policy/v1", digest_of("/run/step-1"))}
    asked |= {"requests": 1, "in_flight": 0, "last_dispatch_age_s": 0.0}
    assert not await is_idle(1, asked)
    clock.now += 7100  # routers' counts are kept for an hour
    assert not await is_idle(2)
    clock.now += 200
    assert await is_idle(3)


def loads_of(fleet, name):
    """Number of loads of the name's versions that agents were asked for."""
    asked = [body["lora_id"] for agent in fleet.agents.values() for verb, body in agent.calls if verb == "load_lora"]
    return sum(lora_id.startswith(f"{name}/") for lora_id in asked)


async def test_a_name_that_nobody_asks_for_is_not_loaded_again_after_each_publish_of_another(service, clock):
    for worker_id in ("w0", "w1"):
        await service.worker(worker_id, slots=2)
    await publish(service, "old", "/old")
    for step in range(5):
        assert (await publish(service, "run", f"/run/{step}")).is_success
        for _ in range(12):  # a step of the trainer, in which the version before last leaves the workers
            await service.turn()
            clock.now += 1

    assert loads_of(service, "old") == 2
    # The slot is anybody's who asks.
    await service.register()
    await service.ensure(timeout_s=0.01)
    await service.settle()
    clock.now += 31
    await service.settle()
    assert (await service.adapter())["status"]["workers"]
    assert (await service.http.post("/v1/adapters/old/v1/ensure", json={"wait_s": 0})).is_success
    await drained(service, clock)
    assert (await service.adapter("old/v1"))["status"]["workers"]


async def test_publishes_to_one_worker_each_run_at_once_on_several_workers(service, clock):
    for worker_id in ("w0", "w1", "w2", "w3"):
        agent = await service.worker(worker_id, slots=2)
        agent.hold_loads = asyncio.Event()
    await service.http.patch("/v1/policy", json={"loads_per_worker": 4})  # two names may have one home
    names = [f"run{n}" for n in range(4)]
    calls = [asyncio.create_task(publish_when_let(service, name)) for name in names]
    async with within(10):
        while sum(loads_of(service, name) for name in names) < 4:
            await service.beat()
            service.reconciler.run_pass()
            await asyncio.wait(calls, timeout=0.01)
            assert not any(call.done() for call in calls)
    for agent in service.agents.values():
        agent.hold_loads.set()
    while not all(call.done() for call in calls):
        await service.turn()
        clock.now += 0.2
        await asyncio.wait(calls, timeout=0.01)
    assert all(call.result().is_success for call in calls)


async def publish_when_let(fleet, name):
    """The answer to a publish to one worker; the test runs the passes."""
    return await fleet.http.post(f"/v1/published/{name}", json={"source": f"/{name}", "replicas": 1})


async def test_published_names_are_listed_with_their_versions(fleet):
    await publish(fleet)
    await publish(fleet, "other", "/other")

    page = (await fleet.http.get("/v1/published?limit=1")).json()

    assert [item["name"] for item in page["data"]] == ["other"]
    rest = (await fleet.http.get(f"/v1/published?cursor={page['next']}")).json()
    assert [item["name"] for item in rest["data"]] == ["policy"]


async def test_history_has_an_entry_for_each_publish(fleet):
    await publish(fleet)
    await publish(fleet, source="/run/step-2")

    entries = (await fleet.http.get("/v1/history?kind=name_published")).json()["data"]

    assert [entry["body"]["lora_id"] for entry in entries] == ["policy/v2", "policy/v1"]


@pytest.fixture
async def keyed(open_service, tmp_path):
    """A fleet with keys, and a function that makes one: it returns its headers."""
    path = tmp_path / "keys.yaml"
    admin = {"authorization": f"Bearer {add_key(path, None, ['admin'])}"}

    def headers(tenant, namespace=None, **naming):
        key = add_key(path, tenant, ["infer", "register"], namespace=namespace, **naming)
        return {"authorization": f"Bearer {key}"}

    team, rival, shadow = (
        headers("acme", "team-a"),
        headers("globex", "team-b"),
        headers("acme", "team-a", may_shadow_base=True),
    )
    narrow, free = headers("acme", lora_ids=("run-7/*",)), headers("globex", lora_ids=("*",))
    service = open_service(key_files=(path,), token=admin["authorization"].removeprefix("Bearer "))
    service.http.headers.update(admin)
    await service.worker("w0")
    service.team, service.rival, service.shadow, service.narrow, service.free = team, rival, shadow, narrow, free
    return service


async def published(service, headers, name="policy", source="/run/step-1"):
    call = asyncio.create_task(service.http.post(f"/v1/published/{name}", json={"source": source}, headers=headers))
    while not call.done():
        await service.turn()
        await asyncio.wait([call], timeout=0.01)
    return call.result()


async def test_two_teams_publish_under_one_name_and_see_their_own_alone(keyed):
    assert (await published(keyed, keyed.team)).json()["name"] == "team-a/policy"
    assert (await published(keyed, keyed.rival, source="/other")).json()["name"] == "team-b/policy"

    for headers, name in ((keyed.team, "team-a/policy"), (keyed.rival, "team-b/policy")):
        listed = (await keyed.http.get("/v1/published", headers=headers)).json()["data"]
        assert [item["name"] for item in listed] == [name]
        assert (await keyed.http.get("/v1/published/policy", headers=headers)).json()["name"] == name
    assert (await keyed.http.get("/v1/published/team-a/policy", headers=keyed.rival)).status_code == 404
    assert keyed.store.adapters["team-a/policy/v1"].tenants == ("acme",)


async def test_key_publishes_under_its_own_names_alone(keyed):
    assert (await published(keyed, keyed.narrow, "run-7/policy")).status_code == 200
    answer = await published(keyed, keyed.narrow, "run-8/policy")

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "name_not_yours")
    assert "run-7/*" in answer.json()["error"]["message"]


async def test_name_of_another_tenant_is_taken(keyed):
    await published(keyed, keyed.narrow, "run-7/policy")

    answer = await published(keyed, keyed.free, "run-7/policy")

    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "name_taken")


async def test_base_models_name_is_published_for_a_key_that_may_shadow_it(keyed):
    answer = await published(keyed, keyed.team, "tiny-qwen")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "name_taken")
    assert "may_shadow_base" in answer.json()["error"]["message"]

    item = (await published(keyed, keyed.shadow, "tiny-qwen")).json()

    assert (item["name"], item["status"]["lora_id"], item["status"]["shadows_base"]) == (
        "team-a/tiny-qwen",
        "team-a/tiny-qwen/v1",
        True,
    )


async def test_digest_names_bytes_that_the_caller_may_use_alone(keyed):
    await published(keyed, keyed.narrow, "run-7/policy")
    digest = digest_of("/run/step-1")

    for headers, status in ((keyed.rival, 400), (keyed.team, 200)):
        call = asyncio.create_task(keyed.http.post("/v1/published/copy", json={"digest": digest}, headers=headers))
        while not call.done():
            await keyed.turn()
            await asyncio.wait([call], timeout=0.01)
        assert call.result().status_code == status, call.result().text
    for source in (f"fleet:{digest}", f"fleet+https://peer.example/{digest}"):
        answer = await published(keyed, keyed.team, source=source)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "source_forbidden")


async def test_metrics_count_publishes_by_outcome(fleet):
    await publish(fleet)
    await publish(fleet)
    await publish(fleet, "tiny-qwen")

    text = (await fleet.http.get("/metrics")).text

    for line in (
        'publishes_total{outcome="new"} 1.0',
        'publishes_total{outcome="same"} 1.0',
        'publishes_total{outcome="refused"} 1.0',
        "published_names 1.0",
        "published_versions 1.0",
    ):
        assert f"lorafleet_orchestrator_{line}" in text


async def publish_changes(fleet, *changes):
    """The answers to publishes of versions with these largest changes of a module."""
    answers = []
    for step, change in enumerate(changes, 1):
        for agent in fleet.agents.values():
            agent.weight_changes[f"/run/step-{step}"] = change
        answers.append(await publish(fleet, source=f"/run/step-{step}"))
    return answers


async def test_change_far_beyond_the_former_versions_is_noted_with_both_and_its_module(fleet):
    answers = await publish_changes(fleet, 0.5, 2.0, 30.0)
    notes = [answer.json()["status"]["note"] for answer in answers]
    assert notes[:2] == ["", ""]
    assert "30 times as large as ordinary weights, in layers.0.q_proj; the former version's is 2, in" in notes[2]
    assert (await fleet.adapter("policy/v3"))["status"]["note"] == notes[2]
    assert await targets(fleet) == ["policy/v3"]


@pytest.mark.parametrize(("change", "found"), [(30.0, "the former version's is 2"), (300.0, "about 300 times")])
async def test_policy_refuses_a_publish_of_weights_that_are_too_large_and_the_name_stays(fleet, change, found):
    await fleet.http.patch("/v1/policy", json={"large_weights": "refuse"})
    first, refused = await publish_changes(fleet, 2.0, change)
    assert (first.status_code, refused.status_code) == (200, 422), refused.text
    error = refused.json()["error"]
    assert error["code"] == "weights_too_large"
    assert found in error["message"]
    assert "large_weights: note" in error["message"]
    assert await targets(fleet) == ["policy/v1"]
    assert "policy/v2" not in fleet.store.adapters
    await fleet.http.patch("/v1/policy", json={"large_weights": "note"})
    again = await publish(fleet, source="/run/step-2")
    assert again.json()["status"]["version"] == 2
