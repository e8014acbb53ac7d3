"""Actions that fail: which worker is asked next, and when."""

import asyncio
import math

import pytest

from lorafleet.identity import rendezvous_score
from tests.orchestrator.doubles import FakeAgent
from tests.properties import THOROUGH


async def test_registered_bytes_that_two_engines_refuse_are_quarantined_until_retry(service, clock):
    agents = [await service.worker(f"w{i}") for i in range(3)]
    await service.register()
    await service.settle()
    for agent in agents:
        agent.refuse["sql/v1"] = "adapter_refused"
    await service.ensure()
    done = await service.settle()
    assert [action.operation for action in done] == ["load", "load"]
    assert len({action.worker_id for action in done}) == 2
    item = await service.adapter()
    assert item["status"]["state"] == "failed"
    assert "adapter_refused" in item["status"]["error"]
    answer = await service.ensure()
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "adapter_failed"
    clock.now += 10_000
    assert await service.settle() == []

    for agent in agents:
        agent.refuse.clear()
    assert (await service.http.post("/v1/adapters/sql/v1/retry")).json()["status"]["error"] is None
    await service.ensure()
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "ready"


async def test_an_adapter_refused_by_one_engine_is_tried_on_another(service):
    agents = {name: await service.worker(name) for name in ("w0", "w1")}
    await service.register()
    await service.settle()
    home = "w0" if rendezvous_score("sql/v1", "w0") > rendezvous_score("sql/v1", "w1") else "w1"
    agents[home].refuse["sql/v1"] = "adapter_refused"
    await service.ensure()
    loads = await service.settle()
    assert [action.worker_id for action in loads] == [home, ({"w0", "w1"} - {home}).pop()]
    assert (await service.adapter())["status"]["state"] == "ready"


async def test_a_refusal_does_not_unload_copies_elsewhere(service, clock):
    agents = {name: await service.worker(name) for name in ("w0", "w1", "w2")}
    await service.register()
    await service.settle()
    await service.ensure()
    await service.settle()
    (there,) = [name for name, agent in agents.items() if agent.loaded]
    for name in agents.keys() - {there}:
        agents[name].refuse["sql/v1"] = "adapter_refused"
    await service.ensure(replicas=3)
    assert len(await service.settle()) == 2
    assert (await service.adapter())["status"]["state"] == "ready"
    assert (await service.ensure()).json()["ready"] == [there]


async def test_an_adapter_refused_by_the_only_engine_is_retried_later(service, clock):
    agent = await service.worker()
    await service.register()
    await service.settle()
    agent.refuse["sql/v1"] = "adapter_refused"
    await service.ensure()
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "failed"
    assert (await service.ensure()).json()["error"]["code"] == "adapter_failed"

    agent.refuse.clear()
    clock.now += service.store.rules.failure_expiry_s
    await service.ensure()
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "ready"


@pytest.mark.parametrize("code", ["adapter_invalid", "adapter_refused", "source_not_found", "digest_mismatch"])
async def test_a_never_inspected_adapter_fails_and_is_retried_ever_more_rarely(service, clock, code):
    agent = await service.worker()
    agent.refuse["sql/v1"] = code
    await service.register()
    await service.settle()
    item = await service.adapter()
    assert item["status"]["state"] == "failed"
    assert code in item["status"]["error"]
    assert (await service.ensure()).json()["error"]["code"] == "adapter_failed"
    lasts_s = wait_s = service.store.rules.failure_expiry_s
    for _ in range(3):
        clock.now += wait_s
        assert [action.operation for action in await service.settle()] == ["inspect"]
        assert (await service.adapter())["status"]["state"] == "failed"
        clock.now += 1.4 * lasts_s
        assert await service.settle() == []  # twice as long as before, less a quarter by chance
        lasts_s, wait_s = 2 * lasts_s, 0.6 * lasts_s

    agent.refuse.clear()
    assert (await service.http.post("/v1/adapters/sql/v1/retry")).json()["status"]["error"] is None
    await service.ensure()
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "ready"


@pytest.mark.parametrize(
    "code", ["source_forbidden", "adapter_invalid", "digest_mismatch", "disk_full", "rank_too_big"]
)
async def test_one_workers_failure_does_not_fail_an_inspected_adapter(service, code):
    agents = [await service.worker(f"w{i}") for i in range(2)]
    await service.register()
    await service.settle()
    for agent in agents:
        agent.refuse["sql/v1"] = code
    await service.ensure()
    await service.turn()
    (first,) = [agent for agent in agents if ("load_lora", "sql/v1") in agent.operations()]
    for agent in agents:
        if agent is not first:
            agent.refuse.clear()
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "ready"
    assert first.loaded == {}
    assert len([verb for verb, _ in first.operations() if verb == "load_lora"]) == 1


async def test_a_reregistered_adapter_starts_without_failures(service):
    agent = await service.worker()
    agent.refuse["sql/v1"] = "source_not_found"
    await service.register(source="file:///wrong")
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "failed"
    await service.http.delete("/v1/adapters/sql/v1")
    await service.settle()
    agent.refuse.clear()
    assert (await service.register(source="file:///right"))["status"]["error"] is None
    await service.ensure()
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "ready"


async def test_failures_of_an_earlier_term_are_dropped(open_service):
    service = open_service()
    agent = await service.worker()
    agent.refuse["sql/v1"] = "source_not_found"
    await service.register(source="file:///wrong")
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "failed"
    service.built.leadership.on_newer_leader("another leads")
    other = open_service()
    await other.join(agent)
    await other.http.delete("/v1/adapters/sql/v1")
    await other.settle()
    agent.refuse.clear()
    await other.register(source="file:///right")
    await other.settle()
    await other.built.leadership.release()
    await service.reconciler.prepare_term()
    service.built.leadership.lead_until(math.inf)
    await service.settle()
    item = await service.adapter()
    assert (item["spec"]["source"], item["status"]["state"], item["status"]["error"]) == (
        "file:///right",
        "registered",
        None,
    )
    await service.ensure()
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "ready"


async def _with_its_base_model(service):
    await service.register(source="hf://team/sql", base_model="tiny-qwen")


async def _with_a_secret(service):
    answer = await service.http.patch("/v1/adapters/sql/v1", json={"secret_ref": {"name": "hub", "key": "token"}})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("code", "mend"), [("base_model_mismatch", _with_its_base_model), ("source_unauthorized", _with_a_secret)]
)
async def test_a_changed_registration_is_inspected_again_after_a_refusal(service, code, mend):
    agents = [await service.worker(name) for name in ("w0", "w1")]
    for agent in agents:
        agent.refuse["sql/v1"] = code
    await service.register(source="hf://team/sql")
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "failed"
    for agent in agents:
        agent.refuse.clear()
    await mend(service)
    item = await service.adapter()
    assert (item["status"]["state"], item["status"]["error"]) == ("registered", None)
    await service.settle()
    assert (await service.adapter())["status"]["card"]["rank"] == 8


async def test_a_refusal_of_the_former_registration_is_ignored(service):
    agent = await service.worker()
    agent.refuse["sql/v1"] = "base_model_mismatch"
    inspect, may_answer = agent.inspect_lora, asyncio.Event()

    async def held(body):
        agent.has_called.set()
        await may_answer.wait()
        return await inspect(body)

    agent.inspect_lora = held
    await service.register()
    await service.beat()
    service.reconciler.run_pass()
    await agent.has_called.wait()
    await service.register(base_model="tiny-qwen")
    may_answer.set()
    await service.reconciler.wait_for_actions()
    agent.refuse.clear()
    assert (await service.adapter())["status"]["error"] is None
    await service.settle()
    assert (await service.adapter())["status"]["card"]["rank"] == 8


async def test_a_digest_stated_during_an_inspection_binds_the_next_one(service):
    agent = await service.worker()
    inspect, may_answer = agent.inspect_lora, asyncio.Event()

    async def held(body):
        agent.has_called.set()
        await may_answer.wait()
        return await inspect(body)

    agent.inspect_lora = held
    await service.register()
    await service.beat()
    service.reconciler.run_pass()
    await agent.has_called.wait()
    await service.register(digest="0" * 64)
    may_answer.set()
    await service.reconciler.wait_for_actions()
    await service.settle()
    item = await service.adapter()
    assert (item["spec"]["digest"], item["status"]["error"][:15]) == ("0" * 64, "digest_mismatch")


@pytest.mark.parametrize(
    "code",
    ["source_not_found", "source_unauthorized", "source_address_forbidden", "source_extra_missing", "source_unsafe"],
)
async def test_a_missing_source_is_tried_on_a_few_workers_only(service, code):
    agents = [await service.worker(f"w{i}") for i in range(6)]
    for agent in agents:
        agent.refuse["sql/v1"] = code
    await service.register()
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "failed"
    assert sum(len(agent.calls) for agent in agents) == 3


async def test_a_failed_load_is_tried_on_another_worker(service, clock):
    agents = [await service.worker(f"w{i}") for i in range(2)]
    await service.register()
    await service.settle()
    await service.ensure()
    for agent in agents:
        agent.refuse["sql/v1"] = "engine_unreachable"
    await service.settle()
    assert "engine_unreachable" in (await service.adapter())["status"]["error"]
    assert [len([v for v, _ in a.operations() if v == "load_lora"]) for a in agents] == [1, 1]
    for agent in agents:
        agent.refuse.clear()
    assert await service.settle() == []
    clock.now += service.store.rules.failure_expiry_s + 1
    await service.ensure()
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "ready"


@pytest.mark.parametrize(("code", "after_s"), [("engine_down", 1.5), ("not_ready", 1.5), ("source_failed", 61.0)])
async def test_a_restarting_worker_is_retried_soon_and_other_failures_later(service, clock, code, after_s):
    agent = await service.worker()
    await service.register()
    await service.settle()
    agent.refuse["sql/v1"] = code
    await service.ensure()
    await service.settle()
    agent.refuse.clear()
    clock.now += after_s - 1.0
    await service.settle()
    assert (await service.adapter())["status"]["state"] != "ready"
    clock.now += 1.0
    await service.ensure()
    await service.settle()
    assert (await service.adapter())["status"]["state"] == "ready"


async def test_an_adapter_of_unknown_base_model_is_tried_on_each(service):
    agents = {name: await service.worker(name, base_model=f"base-{name}") for name in ("w0", "w1")}
    for agent in agents.values():
        agent.refuse["sql/v1"] = "base_model_mismatch"
    await service.register()
    await service.settle()
    assert all(agent.operations() == [("inspect_lora", "sql/v1")] for agent in agents.values())
    assert (await service.adapter())["status"]["state"] == "failed"


async def test_bytes_with_another_digest_are_a_failure(service):
    await service.worker()
    await service.register(digest="0" * 64)
    await service.settle()
    item = await service.adapter()
    assert item["status"]["state"] == "failed"
    assert "digest_mismatch" in item["status"]["error"]
    assert item["spec"]["digest"] == "0" * 64


async def test_any_failed_call_is_mended_by_later_passes(open_service, clock, tmp_path):
    calls = ("inspect a", "load a", "inspect b", "load b into the reserve", "unload a", "unload b")
    for nth in range(1, len(calls) + 1):
        service = open_service(tmp_path / f"{nth}.db")
        agent = await service.worker(slots=2)
        agent.fail_calls = {nth}
        await service.http.patch("/v1/policy", json={"min_residency_s": 0, "reserve_slots": 1})
        for lora_id in ("a/v1", "b/v1"):
            await service.register(lora_id)
            for _ in range(4):
                await service.settle()
                clock.now += service.store.rules.failure_expiry_s + 1
                await service.ensure(lora_id)
            await service.settle()
        assert list(agent.loaded) == ["b/v1"], f"call {nth}"
        await service.http.delete("/v1/adapters/b/v1")
        for _ in range(3):
            await service.settle()
            clock.now += service.store.rules.failure_expiry_s + 1
        assert agent.loaded == {}, f"call {nth}"
        assert "b/v1" not in service.store.adapters
        assert len([verb for verb, _ in agent.calls if verb != "mark_files"]) == len(calls) + 1
        service.agents.clear()


async def _story(service, clock):
    """A scenario of loads, an eviction, a drained worker and a deletion; each step runs until it holds."""

    async def mended(true, tell=None):
        for _ in range(8):
            if tell is not None:
                await tell()
            await service.settle()
            if await true():
                return
            clock.now += service.store.rules.failure_expiry_s * 2 + 1
            await service.beat()
        raise AssertionError("never mended")

    def is_ready(lora_id):
        async def check():
            return (await service.adapter(lora_id))["status"]["state"] == "ready"

        return check

    await service.http.patch("/v1/policy", json={"min_residency_s": 0, "reserve_slots": 1})
    for lora_id in ("a/v1", "b/v1", "c/v1"):
        await service.register(lora_id)
        await mended(is_ready(lora_id), lambda lora_id=lora_id: service.ensure(lora_id))
    await service.register("pinned/v1", policy={"loading": "eager", "pinned": True})
    await mended(is_ready("pinned/v1"))
    (home,) = (await service.adapter("pinned/v1"))["status"]["workers"]
    await service.http.post(f"/v1/workers/{home}/drain", json={"deadline_s": 80_000})
    (other,) = {"w0", "w1"} - {home}

    async def has_moved():
        clock.now += 1
        await service.beat()
        return (await service.adapter("pinned/v1"))["status"]["workers"] == [other] and service.agents[home].drained

    await mended(has_moved)
    await service.http.delete("/v1/adapters/pinned/v1")

    async def is_gone():
        clock.now += 1
        return (await service.http.get("/v1/adapters/pinned/v1")).status_code == 404

    await mended(is_gone)
    return {name: sorted(agent.loaded) for name, agent in service.agents.items()}


@pytest.mark.slow
async def test_any_failed_call_of_a_long_scenario_is_mended_by_later_passes(open_service, clock, tmp_path):
    counts, nth = [], 0
    agents = [FakeAgent(name, slots=2) for name in ("w0", "w1")]
    while nth == 0 or nth <= counts[0]:
        service, made = open_service(tmp_path / f"{nth}.db"), []
        for agent in agents:
            agent.start_anew()
            agent.made, agent.fail_made = made, nth
            await service.join(agent)
        held = await _story(service, clock)
        assert "pinned/v1" not in [lora_id for loaded in held.values() for lora_id in loaded], f"call {nth}"
        assert all(len(agent.loaded) <= agent.slots for agent in service.agents.values()), f"call {nth}"
        verbs = [verb for verb, _ in made]
        assert {"inspect_lora", "load_lora", "unload_lora", "drain"} <= set(verbs), f"call {nth}"
        counts.append(len(verbs))
        nth += 1 if THOROUGH else 3
        service.agents.clear()
    assert len(counts) > (10 if THOROUGH else 4)


async def test_registration_with_weights_that_are_too_large_fails_where_the_policy_refuses_them(service):
    agent = await service.worker("w0")
    agent.weight_changes["/sql"] = 300.0
    await service.register("sql/v1", source="/sql", policy={"large_weights": "refuse"})
    await service.register("sql/v2", source="/sql")
    await service.settle()
    refused, taken = [(await service.adapter(f"sql/v{number}"))["status"] for number in (1, 2)]
    assert refused["state"] == "failed"
    assert "weights_too_large" in refused["error"]
    assert "layers.0.q_proj is about 300 times as large as ordinary weights" in refused["error"]
    assert taken["card"]["weight_change"] == 300.0
    await service.http.patch("/v1/adapters/sql/v1", json={"policy": {"large_weights": "note"}})
    await service.http.post("/v1/adapters/sql/v1/retry")
    await service.settle()
    assert (await service.adapter("sql/v1"))["status"]["error"] is None
