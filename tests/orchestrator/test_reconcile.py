"""Passes against agents that are served for real."""

import asyncio
import gc
import math
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from lorafleet.identity import engine_name, rendezvous_score
from orchestrator.core.state import WantedReplicas
from tests.orchestrator.doubles import FakeAgent, digest_of
from tests.patience import patience
from tests.properties import THOROUGH
from tests.serving import serving

SQL = "file:///sql/v1"
SQL_ENGINE = engine_name("sql/v1", digest_of(SQL))


async def ready(house, lora_id="sql/v1", **spec):
    """Register, and have it on a worker."""
    await house.register(lora_id, **spec)
    await house.ensure(lora_id)
    await house.settle()
    assert (await house.adapter(lora_id))["state"] == "ready"


async def test_an_adapter_is_inspected_then_loaded_when_somebody_asks_and_then_nothing_happens(house):
    agent = await house.worker()
    assert (await house.register())["state"] == "registered"
    await house.settle()
    item = await house.adapter()
    assert (item["state"], item["rank"], item["base_model"]) == ("registered", 8, "tiny-qwen")
    assert agent.operations() == [("inspect_lora", "sql/v1")]

    answer = (await house.ensure()).json()
    assert answer["ready"] == []
    await house.settle()
    answer = (await house.ensure()).json()
    assert answer["ready"] == ["w0"]
    assert answer["state"] == "ready"
    assert answer["expected_s"] == 0.0
    assert agent.operations()[-1] == ("load_lora", "sql/v1")
    assert await house.turn() == []


async def test_agents_are_called_directly_whatever_proxy_the_environment_names(open_house, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    house = open_house()
    agent = await house.worker()
    await house.register()
    await house.turn()
    assert agent.operations() == [("inspect_lora", "sql/v1")]


async def test_a_branch_is_fetched_from_the_commit_that_was_inspected_and_nothing_else_is_taken_for_one(house):
    agent = await house.worker()
    commit, elsewhere = f"hf://acme/sql@{'c' * 40}", f"hf://acme/other@{'c' * 40}"
    agent.pins = {"hf://acme/sql@main": commit, "hf://acme/legal": elsewhere}
    await house.register("sql/v1", source="hf://acme/sql@main")
    await house.register("legal/v1", source="hf://acme/legal")
    await house.settle()
    catalog = (await house.http.get("/v1/catalog")).json()["adapters"]
    assert {item["lora_id"]: item["source"] for item in catalog} == {"sql/v1": commit, "legal/v1": "hf://acme/legal"}
    assert (await house.adapter("sql/v1"))["source"] == "hf://acme/sql@main"  # as it was registered, and may be again
    again = {"lora_id": "sql/v1", "source": "hf://acme/sql@main"}
    assert (await house.http.post("/v1/adapters", json=again)).status_code == 200
    await house.ensure("sql/v1")
    await house.settle()
    assert [body["source"] for verb, body in agent.calls if verb == "load_lora"] == [commit]


async def test_an_adapter_registered_before_any_worker_is_inspected_when_one_appears(house):
    await house.register()
    assert await house.turn() == []
    agent = await house.worker()
    await house.settle()
    assert agent.operations() == [("inspect_lora", "sql/v1")]


async def test_eager_adapters_are_there_without_being_asked_for(house):
    for name in ("w0", "w1", "w2"):
        await house.worker(name)
    await house.register(policy={"loading": "eager", "min_replicas": 2})
    await house.settle()
    assert len((await house.adapter())["workers"]) == 2
    assert await house.turn() == []


async def test_every_action_carries_the_epoch_and_a_key_of_its_own(house):
    agent = await house.worker()
    await ready(house)
    assert set(agent.epochs) == {house.store.epoch}
    assert len(set(agent.keys)) == len(agent.keys)


async def test_a_restored_store_never_leaves_an_agent_refusing_everyone(house):
    agent = await house.worker()
    agent.epoch = 41
    await house.beat()
    assert not house.reconciler.leadership.is_leading  # perhaps somebody newer leads: the lease is looked at first
    await house.whole.leadership.step()
    assert house.reconciler.leadership.is_leading
    assert house.store.epoch == 42
    await ready(house)
    assert agent.epoch == 42
    assert agent.refused == []


async def test_an_epoch_that_nobody_can_have_had_ends_no_term_and_is_not_written_down(house):
    agent, liar = await house.worker("w0"), await house.worker("w1")
    liar.epoch = 2**63 - 1
    await house.beat()
    assert house.reconciler.leadership.is_leading
    house.reconciler.reload_intent()
    assert house.store.epoch == 2
    liar.state, liar.epoch = "draining", 2**70
    house.agents = {"w0": agent}
    await ready(house)
    assert (await house.adapter())["workers"] == ["w0"]


async def test_an_agent_that_refuses_every_epoch_and_reports_none_ends_one_term_and_no_more(house):
    class ContraryAgent(FakeAgent):
        def metadata(self):
            return super().metadata() | {"epoch": 0}

    contrary = ContraryAgent("w1", slots=64)
    contrary.epoch = 10**9
    await house.worker("w0")
    await house.join(contrary)
    await house.register()
    while house.reconciler.leadership.is_leading:  # perhaps somebody newer leads: the lease is looked at
        house.reconciler.ensure_replicas("sql/v1", 2)
        await house.turn()
    await house.whole.leadership.step()
    await house.reconciler.wait_for_actions()
    assert house.reconciler.leadership.is_leading
    await house.ensure(replicas=2)
    await house.settle()
    assert (await house.adapter())["workers"] == ["w0"]
    assert "w1 refuses epoch" in (await house.adapter())["error"]
    assert house.store.epoch == 2


async def test_who_asks_waits_since_it_asked_first(house):
    began_at = house.clock.now
    house.reconciler.ensure_replicas("sql/v1", 1)
    house.clock.now += 5.0
    house.reconciler.ensure_replicas("sql/v1", 2)
    assert house.reconciler.demand.open_wants(house.clock.now) == {"sql/v1": WantedReplicas(replicas=2, since=began_at)}


async def test_a_load_that_begins_is_a_turn_of_those_who_wait_for_it_and_nothing_else_is(house):
    await house.worker()
    await house.register("a/v1")
    await house.register("b/v1")
    await house.ensure("a/v1", tenants=["acme"])
    await house.ensure("b/v1")
    assert {action.operation for action in await house.turn()} == {"inspect"}
    assert house.reconciler.demand.snapshot(house.clock.now).last_load_at == {}
    assert {action.lora_id for action in await house.settle()} == {"a/v1", "b/v1"}
    assert house.reconciler.demand.snapshot(house.clock.now).last_load_at == {"acme": house.clock.now}


async def test_an_agents_error_that_cannot_be_written_as_text_keeps_no_list_and_no_catalog_from_anybody(house):
    agent = await house.worker()
    await house.register()
    await house.settle()
    await house.ensure()
    agent.answers["load_lora"] = b'{"error": {"code": "adapter_refused", "message": "half a pair: \\ud800"}}'
    await house.turn()
    assert "\\ud800" in (await house.adapter())["error"]
    assert (await house.http.get("/v1/catalog")).status_code == 200


async def test_a_replaced_leader_is_refused_where_the_new_one_has_claimed_and_steps_down(open_house):
    old = open_house()
    agent = await old.worker()
    await ready(old, "a/v1", source="a")
    new = open_house()
    agent_of_new = agent.metadata()
    await new.http.post("/v1/workers/register", json={"metadata": agent_of_new})
    new.agents[agent.worker_id] = agent
    await new.register("b/v1", source="b")
    await new.ensure("b/v1")
    await new.settle()
    assert agent.claims[-1] == agent.epoch == new.store.epoch > old.store.epoch

    # The old one knows nothing of that: its clock has stood still.
    old.store.put_adapter(replace(old.store.adapters["a/v1"], lora_id="c/v1"))
    old.reconciler.ensure_replicas("c/v1", 1)
    assert [action.operation for action in old.reconciler.run_pass()] == ["load"]
    await old.reconciler.wait_for_actions()
    assert [verb for verb, _ in agent.refused] == ["load_lora"]
    assert set(agent.loaded) == {"a/v1", "b/v1"}
    assert not old.reconciler.leadership.is_leading
    assert old.reconciler.run_pass() == []


async def test_a_fresh_store_on_a_full_fleet_unloads_nothing_and_reports_orphans(house):
    agent = await house.worker(slots=2)
    agent.put("a/v1", "a")
    agent.put("b/v1", "b")
    await house.http.patch("/v1/policy", json={"loading": "eager"})
    await house.register("c/v1")
    await house.ensure("c/v1")
    await house.settle()
    assert set(agent.loaded) == {"a/v1", "b/v1"}
    assert [verb for verb, _ in agent.operations() if verb != "inspect_lora"] == []
    (item,) = (await house.http.get("/v1/workers")).json()["data"]
    assert item["orphans"] == ["a/v1", "b/v1"]
    assert "no free slot" in (await house.adapter("c/v1"))["error"]


async def test_what_an_agent_holds_already_becomes_ready_when_it_is_registered(house):
    agent = await house.worker()
    agent.put("sql/v1", SQL)
    await house.register()
    await house.settle()
    assert (await house.adapter())["workers"] == ["w0"]
    assert agent.operations() == [("inspect_lora", "sql/v1")]


async def test_a_lost_workers_adapters_are_placed_elsewhere_at_once(house, clock):
    agents = [await house.worker(f"w{i}") for i in range(2)]
    await ready(house)
    (home,) = (await house.adapter())["workers"]
    gone = house.agents.pop(home)
    other = next(agent for agent in agents if agent is not gone)
    # The same worker, but neither its agent nor its engine answers any more.
    dead = "http://127.0.0.1:9"
    report = gone.metadata() | {"agent_url": dead, "transport": {"engine_url": dead}}
    await house.http.post("/v1/workers/register", json={"metadata": report})
    clock.now += house.settings.lost_after_s + 1
    await house.turn()
    await house.settle()
    assert (await house.http.get(f"/v1/workers/{home}")).json()["state"] == "lost"
    assert (await house.adapter())["workers"] == [other.worker_id]
    assert "sql/v1" in other.loaded


async def test_a_lost_worker_is_forgotten_in_the_pass_that_would_ask_it_again_and_no_task_breaks(open_house, clock):
    house = open_house(forget_after_s=60)
    agent = await house.worker()
    report = agent.metadata() | {"agent_url": "http://127.0.0.1:9", "transport": {"engine_url": "http://127.0.0.1:9"}}
    await house.http.post("/v1/workers/register", json={"metadata": report})
    house.agents.clear()
    clock.now += house.settings.lost_after_s + 1
    await house.turn()
    assert (await house.http.get("/v1/workers/w0")).json()["state"] == "lost"
    unhandled = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))
    clock.now += 61
    await house.turn()
    assert house.reconciler.reports.workers == {}
    gc.collect()
    assert unhandled == []


async def test_a_copy_on_a_worker_that_serves_another_base_model_by_now_is_no_copy_and_gives_up_its_slot(house, clock):
    for name in ("w0", "w1"):
        await house.worker(name)
    await ready(house)
    (home,) = (await house.adapter())["workers"]
    # It was started again, under another name, and has brought back what its record says.
    house.agents[home].base_model, house.agents[home].engine_boot_id = "other", "e2"
    await house.beat()
    assert (await house.adapter())["state"] == "registered"
    assert (await house.ensure()).json()["ready"] == []
    await house.settle()
    clock.now += house.store.rules.drain_deadline_s
    await house.settle()
    assert house.agents[home].loaded == {}
    assert (await house.ensure()).json()["ready"] == [name for name in ("w0", "w1") if name != home]


async def test_a_worker_whose_address_another_one_has_is_lost_and_what_it_held_is_placed(house, clock):
    agent = await house.worker("w0")
    await house.register(policy={"loading": "eager"})
    await house.settle()
    # A pod's address that is used again: another agent, and an engine that holds nothing.
    agent.worker_id, agent.loaded, agent.engine_boot_id = "w1", {}, "e2"
    house.agents = {"w1": agent}
    clock.now += house.settings.lost_after_s + 1
    await house.turn()
    await house.settle()
    assert (await house.http.get("/v1/workers/w0")).json()["state"] == "lost"
    assert (await house.adapter())["workers"] == ["w1"]
    assert "sql/v1" in agent.loaded


async def test_a_worker_that_has_another_name_now_keeps_what_its_engine_holds_and_is_given_nothing_twice(house, clock):
    agent = await house.worker("w0")
    await ready(house)
    await house.worker("spare")
    agent.worker_id = "w1"
    house.agents = {"w1": agent, "spare": house.agents["spare"]}
    clock.now += house.settings.lost_after_s + 1
    await house.turn()
    assert await house.settle() == []
    assert (await house.http.get("/v1/workers/w0")).json()["state"] == "lost"
    assert (await house.adapter())["workers"] == ["w1"]


async def test_of_two_agents_by_one_name_the_second_is_refused_by_name_until_the_first_is_silent(house, clock):
    first = await house.worker("worker-0")
    await house.register(policy={"loading": "eager"})
    await house.settle()
    second = FakeAgent("worker-0")
    second.url = await house.stack.enter_async_context(serving(second.app))
    second.agent_boot_id = "a2"
    answer = await house.http.post("/v1/workers/register", json=second.heartbeat())
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "worker_id_taken")
    assert first.url in answer.json()["error"]["message"]
    assert second.url in answer.json()["error"]["message"]
    assert (await house.http.get("/v1/workers/worker-0")).json()["agent_url"] == first.url
    # An agent that has another address since it started is the same one.
    first.url = first.url.replace("127.0.0.1", "localhost")
    await house.beat()
    house.agents = {}
    clock.now += house.settings.probe_after_s
    assert (await house.http.post("/v1/workers/register", json=second.heartbeat())).status_code == 200
    assert (await house.http.get("/v1/workers/worker-0")).json()["agent_url"] == second.url


async def test_a_worker_whose_engine_still_answers_is_left_alone_and_keeps_its_adapters(house, clock):
    agent = await house.worker()
    await house.worker("w1")
    await ready(house)
    (home,) = (await house.adapter())["workers"]
    agent = house.agents.pop(home)
    report = agent.metadata() | {"agent_url": "http://127.0.0.1:9"}
    await house.http.post("/v1/workers/register", json={"metadata": report})
    before = len(agent.calls)
    clock.now += house.settings.lost_after_s + 1
    await house.turn()
    assert await house.settle() == []
    assert (await house.http.get(f"/v1/workers/{home}")).json()["state"] == "unmanaged"
    assert (await house.adapter())["workers"] == [home]
    assert len(agent.calls) == before


async def test_a_silent_agent_that_answers_when_asked_is_still_ready(house, clock):
    await house.worker()
    house.agents.clear()
    clock.now += 100
    await house.turn()
    assert (await house.http.get("/v1/workers/w0")).json()["state"] == "ready"


async def test_an_engine_that_restarts_empty_gets_back_what_it_held(house):
    agent = await house.worker()
    await ready(house)
    agent.loaded.clear()
    agent.engine_boot_id = "e2"
    await house.settle()
    assert list(agent.loaded) == ["sql/v1"]


async def test_bytes_of_the_right_digest_that_two_engines_refuse_are_quarantined_until_retry(house, clock):
    agents = [await house.worker(f"w{i}") for i in range(3)]
    await house.register()
    await house.settle()
    for agent in agents:
        agent.refuse["sql/v1"] = "adapter_refused"
    await house.ensure()
    done = await house.settle()
    assert [action.operation for action in done] == ["load", "load"]
    assert len({action.worker_id for action in done}) == 2
    item = await house.adapter()
    assert item["state"] == "failed"
    assert "adapter_refused" in item["error"]
    answer = await house.ensure()
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "adapter_failed"
    clock.now += 10_000
    assert await house.settle() == []

    for agent in agents:
        agent.refuse.clear()
    assert (await house.http.post("/v1/adapters/sql/v1/retry")).json()["error"] is None
    await house.ensure()
    await house.settle()
    assert (await house.adapter())["state"] == "ready"


async def test_what_one_engine_refuses_another_is_asked_for(house):
    agents = {name: await house.worker(name) for name in ("w0", "w1")}
    await house.register()
    await house.settle()
    home = "w0" if rendezvous_score("sql/v1", "w0") > rendezvous_score("sql/v1", "w1") else "w1"
    agents[home].refuse["sql/v1"] = "adapter_refused"
    await house.ensure()
    loads = await house.settle()
    assert [action.worker_id for action in loads] == [home, ({"w0", "w1"} - {home}).pop()]
    assert (await house.adapter())["state"] == "ready"


async def test_who_refuses_what_serves_elsewhere_takes_it_from_nobody(house, clock):
    agents = {name: await house.worker(name) for name in ("w0", "w1", "w2")}
    await house.register()
    await house.settle()
    await house.ensure()
    await house.settle()
    (there,) = [name for name, agent in agents.items() if agent.loaded]
    for name in agents.keys() - {there}:
        agents[name].refuse["sql/v1"] = "adapter_refused"
    await house.ensure(replicas=3)
    assert len(await house.settle()) == 2
    assert (await house.adapter())["state"] == "ready"
    assert (await house.ensure()).json()["ready"] == [there]


async def test_what_the_only_engine_refuses_is_tried_again_later(house, clock):
    agent = await house.worker()
    await house.register()
    await house.settle()
    agent.refuse["sql/v1"] = "adapter_refused"
    await house.ensure()
    await house.settle()
    assert (await house.adapter())["state"] == "failed"
    assert (await house.ensure()).json()["error"]["code"] == "adapter_failed"

    agent.refuse.clear()
    clock.now += house.store.rules.failure_expiry_s
    await house.ensure()
    await house.settle()
    assert (await house.adapter())["state"] == "ready"


@pytest.mark.parametrize("code", ["adapter_invalid", "adapter_refused", "source_not_found", "digest_mismatch"])
async def test_an_adapter_that_nobody_ever_found_good_is_failed_and_looked_at_again_ever_more_seldom(
    house, clock, code
):
    agent = await house.worker()
    agent.refuse["sql/v1"] = code
    await house.register()
    await house.settle()
    item = await house.adapter()
    assert item["state"] == "failed"
    assert code in item["error"]
    assert (await house.ensure()).json()["error"]["code"] == "adapter_failed"
    lasts_s = wait_s = house.store.rules.failure_expiry_s
    for _ in range(3):
        clock.now += wait_s
        assert [action.operation for action in await house.settle()] == ["inspect"]
        assert (await house.adapter())["state"] == "failed"
        clock.now += 1.4 * lasts_s
        assert await house.settle() == []  # twice as long as before, less a quarter by chance
        lasts_s, wait_s = 2 * lasts_s, 0.6 * lasts_s

    agent.refuse.clear()
    assert (await house.http.post("/v1/adapters/sql/v1/retry")).json()["error"] is None
    await house.ensure()
    await house.settle()
    assert (await house.adapter())["state"] == "ready"


@pytest.mark.parametrize(
    "code", ["source_forbidden", "adapter_invalid", "digest_mismatch", "disk_full", "rank_too_big"]
)
async def test_what_one_worker_cannot_get_right_is_no_fault_of_an_adapter_that_was_found_good(house, code):
    agents = [await house.worker(f"w{i}") for i in range(2)]
    await house.register()
    await house.settle()
    for agent in agents:
        agent.refuse["sql/v1"] = code
    await house.ensure()
    await house.turn()
    (first,) = [agent for agent in agents if ("load_lora", "sql/v1") in agent.operations()]
    for agent in agents:
        if agent is not first:
            agent.refuse.clear()
    await house.settle()
    assert (await house.adapter())["state"] == "ready"
    assert first.loaded == {}
    assert len([verb for verb, _ in first.operations() if verb == "load_lora"]) == 1


async def test_of_many_that_are_not_inspected_yet_the_one_that_is_asked_for_is_looked_at_first(open_house):
    house = open_house(inspects_in_flight=1)
    agent = await house.worker()
    for lora_id in ("a/v1", "b/v1", "z/v1"):
        await house.register(lora_id)
    await house.ensure("z/v1")
    await house.settle()
    inspected = [lora_id for verb, lora_id in agent.operations() if verb == "inspect_lora"]
    assert inspected == ["z/v1", "a/v1", "b/v1"]


async def test_who_asks_for_an_adapter_that_fits_on_no_worker_is_told_at_once_and_has_it_once_one_takes_it(house):
    agent = await house.worker()
    agent.ranks["file:///sql"] = 128
    await house.register(source="file:///sql")
    await house.settle()
    says = "rank 128 is above every worker's max_lora_rank (at most 64)"
    assert says in (await house.adapter())["error"]
    # It waits for nothing: no pass runs here until this is answered.
    told = (await asyncio.wait_for(house.ensure(wait_s=600), patience(10))).json()
    assert (told["fits_nowhere"], told["ready"], told["loading"]) == (True, [], [])
    assert says in told["error"]
    larger = await house.worker("w1", max_lora_rank=128)
    await house.settle()
    told = (await asyncio.wait_for(house.ensure(wait_s=600), patience(10))).json()
    assert (told["fits_nowhere"], told["ready"], told["error"]) == (False, ["w1"], None)
    assert list(larger.loaded) == ["sql/v1"]


async def test_who_asks_for_an_adapter_where_every_worker_refuses_them_is_told_why_at_once(house):
    agent = await house.worker()
    agent.refusal = "KV connector ExampleConnector"
    await house.register(source="file:///sql")
    await house.settle()
    told = (await asyncio.wait_for(house.ensure(wait_s=600), patience(10))).json()
    assert (told["fits_nowhere"], told["ready"], told["loading"]) == (True, [], [])
    assert "(w0: KV connector ExampleConnector)" in told["error"]
    assert "load_lora" not in {verb for verb, _ in agent.operations()}
    (item,) = (await house.http.get("/v1/workers")).json()["data"]
    assert (item["refusal"], item["adapters"]) == ("KV connector ExampleConnector", [])
    (entry,) = (await house.http.get("/v1/catalog")).json()["adapters"]
    assert "(w0: KV connector ExampleConnector)" in entry["error"]
    dry = await house.http.post("/v1/adapters?dry_run=1", json={"lora_id": "b/v1", "source": "file:///b"})
    assert (dry.status_code, dry.json()["error"]["code"]) == (400, "adapters_refused")

    agent.refusal = ""
    await house.settle()
    assert (await house.ensure(wait_s=600)).json()["ready"] == ["w0"]


async def test_what_is_deleted_and_registered_anew_is_not_held_to_what_failed_before(house):
    agent = await house.worker()
    agent.refuse["sql/v1"] = "source_not_found"
    await house.register(source="file:///wrong")
    await house.settle()
    assert (await house.adapter())["state"] == "failed"
    await house.http.delete("/v1/adapters/sql/v1")
    await house.settle()
    agent.refuse.clear()
    assert (await house.register(source="file:///right"))["error"] is None
    await house.ensure()
    await house.settle()
    assert (await house.adapter())["state"] == "ready"


async def test_what_failed_in_a_term_of_ours_is_not_held_against_what_another_leader_registered_since(open_house):
    house = open_house()
    agent = await house.worker()
    agent.refuse["sql/v1"] = "source_not_found"
    await house.register(source="file:///wrong")
    await house.settle()
    assert (await house.adapter())["state"] == "failed"
    await house.whole.leadership.release()
    other = open_house()
    await other.join(agent)
    await other.http.delete("/v1/adapters/sql/v1")
    await other.settle()
    agent.refuse.clear()
    await other.register(source="file:///right")
    await other.settle()
    await other.whole.leadership.release()
    await house.reconciler.prepare_term()
    house.whole.leadership.lead_until(math.inf)
    await house.settle()
    item = await house.adapter()
    assert (item["source"], item["state"], item["error"]) == ("file:///right", "registered", None)
    await house.ensure()
    await house.settle()
    assert (await house.adapter())["state"] == "ready"


async def _with_its_base_model(house):
    await house.register(base_model="tiny-qwen")


async def _with_a_secret(house):
    answer = await house.http.patch("/v1/adapters/sql/v1", json={"secret_ref": {"name": "hub", "key": "token"}})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("code", "mend"), [("base_model_mismatch", _with_its_base_model), ("source_unauthorized", _with_a_secret)]
)
async def test_what_was_refused_is_asked_for_anew_once_it_is_registered_otherwise(house, code, mend):
    agents = [await house.worker(name) for name in ("w0", "w1")]
    for agent in agents:
        agent.refuse["sql/v1"] = code
    await house.register()
    await house.settle()
    assert (await house.adapter())["state"] == "failed"
    for agent in agents:
        agent.refuse.clear()
    await mend(house)
    item = await house.adapter()
    assert (item["state"], item["error"]) == ("registered", None)
    await house.settle()
    assert (await house.adapter())["rank"] == 8


async def test_what_was_refused_as_it_was_registered_before_is_not_held_against_how_it_is_now(house):
    agent = await house.worker()
    agent.refuse["sql/v1"] = "base_model_mismatch"
    await house.register()
    await house.beat()
    house.reconciler.run_pass()
    await house.register(base_model="tiny-qwen")
    await house.reconciler.wait_for_actions()
    agent.refuse.clear()
    assert (await house.adapter())["error"] is None
    await house.settle()
    assert (await house.adapter())["rank"] == 8


async def test_a_digest_stated_during_an_inspection_is_what_the_next_one_is_held_to(house):
    agent = await house.worker()
    inspect, may_answer = agent.inspect_lora, asyncio.Event()

    async def held(body):
        agent.has_called.set()
        await may_answer.wait()
        return await inspect(body)

    agent.inspect_lora = held
    await house.register()
    await house.beat()
    house.reconciler.run_pass()
    await agent.has_called.wait()
    await house.register(digest="0" * 64)
    may_answer.set()
    await house.reconciler.wait_for_actions()
    await house.settle()
    item = await house.adapter()
    assert (item["digest"], item["error"][:15]) == ("0" * 64, "digest_mismatch")


@pytest.mark.parametrize(
    "code",
    ["source_not_found", "source_unauthorized", "source_address_forbidden", "source_extra_missing", "source_unsafe"],
)
async def test_a_source_is_looked_for_on_a_few_workers_and_not_on_every_one(house, code):
    agents = [await house.worker(f"w{i}") for i in range(6)]
    for agent in agents:
        agent.refuse["sql/v1"] = code
    await house.register()
    await house.settle()
    assert (await house.adapter())["state"] == "failed"
    assert sum(len(agent.calls) for agent in agents) == 3


async def test_a_workers_trouble_is_kept_for_a_while_and_tried_elsewhere(house, clock):
    agents = [await house.worker(f"w{i}") for i in range(2)]
    await house.register()
    await house.settle()
    await house.ensure()
    for agent in agents:
        agent.refuse["sql/v1"] = "engine_unreachable"
    await house.settle()
    assert "engine_unreachable" in (await house.adapter())["error"]
    assert [len([v for v, _ in a.operations() if v == "load_lora"]) for a in agents] == [1, 1]
    for agent in agents:
        agent.refuse.clear()
    assert await house.settle() == []
    clock.now += house.store.rules.failure_expiry_s + 1
    await house.ensure()
    await house.settle()
    assert (await house.adapter())["state"] == "ready"


@pytest.mark.parametrize(("code", "after_s"), [("engine_down", 1.5), ("not_ready", 1.5), ("source_failed", 61.0)])
async def test_a_worker_that_is_starting_again_is_asked_again_at_once_and_another_failure_counts_longer(
    house, clock, code, after_s
):
    agent = await house.worker()
    await house.register()
    await house.settle()
    agent.refuse["sql/v1"] = code
    await house.ensure()
    await house.settle()
    agent.refuse.clear()
    clock.now += after_s - 1.0
    await house.settle()
    assert (await house.adapter())["state"] != "ready"
    clock.now += 1.0
    await house.ensure()
    await house.settle()
    assert (await house.adapter())["state"] == "ready"


async def test_an_adapter_of_unknown_base_model_is_tried_on_each_base_model_before_it_is_refused(house):
    agents = {name: await house.worker(name, base_model=f"base-{name}") for name in ("w0", "w1")}
    for agent in agents.values():
        agent.refuse["sql/v1"] = "base_model_mismatch"
    await house.register()
    await house.settle()
    assert all(agent.operations() == [("inspect_lora", "sql/v1")] for agent in agents.values())
    assert (await house.adapter())["state"] == "failed"


async def test_bytes_that_differ_from_the_registered_digest_are_a_failure(house):
    await house.worker()
    await house.register(digest="0" * 64)
    await house.settle()
    item = await house.adapter()
    assert item["state"] == "failed"
    assert "digest_mismatch" in item["error"]
    assert item["digest"] == "0" * 64


async def test_whichever_call_fails_the_next_passes_mend_it(open_house, clock, tmp_path):
    calls = ("inspect a", "load a", "inspect b", "load b into the reserve", "unload a", "unload b")
    for nth in range(1, len(calls) + 1):
        house = open_house(tmp_path / f"{nth}.db")
        agent = await house.worker(slots=2)
        agent.fail_calls = {nth}
        await house.http.patch("/v1/policy", json={"min_residency_s": 0, "reserve_slots": 1})
        for lora_id in ("a/v1", "b/v1"):
            await house.register(lora_id)
            for _ in range(4):
                await house.settle()
                clock.now += house.store.rules.failure_expiry_s + 1
                await house.ensure(lora_id)
            await house.settle()
        assert list(agent.loaded) == ["b/v1"], f"call {nth}"
        await house.http.delete("/v1/adapters/b/v1")
        for _ in range(3):
            await house.settle()
            clock.now += house.store.rules.failure_expiry_s + 1
        assert agent.loaded == {}, f"call {nth}"
        assert "b/v1" not in house.store.adapters
        assert len(agent.calls) == len(calls) + 1
        house.agents.clear()


async def _story(house, clock):
    """Loads, a named victim, a move off a worker that is drained, a deletion; each step until it holds."""

    async def mended(true, tell=None):
        for _ in range(8):
            if tell is not None:
                await tell()
            await house.settle()
            if await true():
                return
            clock.now += house.store.rules.failure_expiry_s * 2 + 1
            await house.beat()
        raise AssertionError("never mended")

    def is_ready(lora_id):
        async def check():
            return (await house.adapter(lora_id))["state"] == "ready"

        return check

    await house.http.patch("/v1/policy", json={"min_residency_s": 0, "reserve_slots": 1})
    for lora_id in ("a/v1", "b/v1", "c/v1"):
        await house.register(lora_id)
        await mended(is_ready(lora_id), lambda lora_id=lora_id: house.ensure(lora_id))
    await house.register("pinned/v1", policy={"loading": "eager", "pinned": True})
    await mended(is_ready("pinned/v1"))
    (home,) = (await house.adapter("pinned/v1"))["workers"]
    await house.http.post(f"/v1/workers/{home}/drain", json={"deadline_s": 80_000})
    (other,) = {"w0", "w1"} - {home}

    async def has_moved():
        clock.now += 1
        await house.beat()
        return (await house.adapter("pinned/v1"))["workers"] == [other] and house.agents[home].drained

    await mended(has_moved)
    await house.http.delete("/v1/adapters/pinned/v1")

    async def is_gone():
        clock.now += 1
        return (await house.http.get("/v1/adapters/pinned/v1")).status_code == 404

    await mended(is_gone)
    return {name: sorted(agent.loaded) for name, agent in house.agents.items()}


@pytest.mark.slow
async def test_whichever_call_of_a_whole_story_fails_the_next_passes_mend_it(open_house, clock, tmp_path):
    counts, nth = [], 0
    agents = [FakeAgent(name, slots=2) for name in ("w0", "w1")]
    while nth == 0 or nth <= counts[0]:
        house, made = open_house(tmp_path / f"{nth}.db"), []
        for agent in agents:
            agent.start_anew()
            agent.made, agent.fail_made = made, nth
            await house.join(agent)
        held = await _story(house, clock)
        assert "pinned/v1" not in [lora_id for loaded in held.values() for lora_id in loaded], f"call {nth}"
        assert all(len(agent.loaded) <= agent.slots for agent in house.agents.values()), f"call {nth}"
        verbs = [verb for verb, _ in made]
        assert {"inspect_lora", "load_lora", "unload_lora", "drain"} <= set(verbs), f"call {nth}"
        counts.append(len(verbs))
        nth += 1 if THOROUGH else 3
        house.agents.clear()
    assert len(counts) > (10 if THOROUGH else 4)


async def test_a_victim_is_drained_before_it_makes_room(house, clock):
    agent = await house.worker(slots=1)
    await house.http.patch("/v1/policy", json={"min_residency_s": 5})
    await ready(house, "a/v1", source="a")
    name = engine_name("a/v1", digest_of("a"))
    clock.now += 10
    revision = (await house.catalog())["revision"]
    use = {"worker_id": "w0", "engine_name": name, "requests": 1, "in_flight": 0}
    await house.usage(revision, use)
    await house.register("b/v1", source="b")
    await house.ensure("b/v1")
    await house.settle()
    # The router has not seen the catalog that forbids new requests: nothing may be unloaded yet.
    assert list(agent.loaded) == ["a/v1"]
    catalog = await house.catalog()
    assert [(d["worker_id"], d["lora_id"]) for d in catalog["draining"]] == [("w0", "a/v1")]
    await house.usage(catalog["revision"], use, seq=2)
    await house.settle()
    assert list(agent.loaded) == ["b/v1"]
    assert [body.get("evict") for verb, body in agent.calls if verb == "load_lora"] == [None, name]
    assert (await house.catalog())["draining"] == []


async def test_a_load_takes_the_reserve_at_once_and_its_victim_goes_when_it_has_drained(house, clock):
    agent = await house.worker(slots=2)
    await house.http.patch("/v1/policy", json={"reserve_slots": 1})
    await ready(house, "a/v1", source="a")
    clock.now += 1000
    name = engine_name("a/v1", digest_of("a"))
    use = {"worker_id": "w0", "engine_name": name, "requests": 1, "in_flight": 0}
    await house.usage((await house.catalog())["revision"], use)
    await house.register("b/v1", source="b")
    await house.ensure("b/v1")
    await house.settle()
    assert set(agent.loaded) == {"a/v1", "b/v1"}
    catalog = await house.catalog()
    assert [d["lora_id"] for d in catalog["draining"]] == ["a/v1"]
    # A request that slipped in before the router knew is still given its time.
    await house.usage(catalog["revision"], use | {"in_flight": 1}, seq=2)
    await house.settle()
    assert set(agent.loaded) == {"a/v1", "b/v1"}
    await house.usage(catalog["revision"], use, seq=3)
    await house.settle()
    assert list(agent.loaded) == ["b/v1"]
    assert (await house.catalog())["draining"] == []


async def test_a_victim_that_is_asked_for_before_it_went_stays(house, clock):
    agent = await house.worker(slots=2)
    await ready(house, "a/v1", source="a")
    clock.now += 1000
    use = {"worker_id": "w0", "engine_name": engine_name("a/v1", digest_of("a")), "requests": 1, "in_flight": 0}
    await house.usage(0, use)
    await house.register("b/v1", source="b")
    await house.ensure("b/v1")
    await house.settle()
    await house.ensure("a/v1")
    await house.settle()
    assert (await house.ensure("a/v1")).json()["ready"] == ["w0"]
    assert set(agent.loaded) == {"a/v1", "b/v1"}
    assert await house.turn() == []


async def test_a_failed_attempt_does_not_keep_a_worker_from_trying_again(house, clock):
    agent = await house.worker()
    await house.register()
    await house.settle()
    agent.put("sql/v1", SQL)["state"] = "failed"
    agent.slots += 1
    await house.ensure()
    await house.settle()
    assert agent.loaded["sql/v1"]["state"] == "ready"


async def test_deleting_waits_for_what_is_in_flight_and_then_unloads(house):
    agent = await house.worker()
    await ready(house)
    use = {"worker_id": "w0", "engine_name": SQL_ENGINE, "requests": 1, "in_flight": 1}
    await house.usage((await house.catalog())["revision"], use)
    assert (await house.http.delete("/v1/adapters/sql/v1")).status_code == 202
    await house.settle()
    catalog = await house.catalog()
    assert catalog["adapters"][0]["state"] == "deleting"
    assert [(d["worker_id"], d["lora_id"]) for d in catalog["draining"]] == [("w0", "sql/v1")]

    await house.usage(catalog["revision"], use, seq=2)
    await house.settle()
    assert "sql/v1" in agent.loaded
    await house.usage(catalog["revision"], use | {"in_flight": 0}, seq=3)
    await house.settle()
    assert agent.loaded == {}
    assert (await house.http.get("/v1/adapters/sql/v1")).status_code == 404
    assert (await house.catalog())["adapters"] == []


async def test_an_unload_that_is_under_way_is_not_started_again_however_many_actions_a_worker_may_have(house, clock):
    agent = await house.worker()
    await ready(house)
    await house.http.patch("/v1/policy", json={"loads_per_worker": 3})
    agent.hold_unloads = asyncio.Event()
    await house.http.delete("/v1/adapters/sql/v1")
    clock.now += house.store.rules.drain_deadline_s + 1
    agent.has_called.clear()
    started = []
    for _ in range(4):
        await house.beat()
        started += house.reconciler.run_pass()
        await asyncio.wait_for(agent.has_called.wait(), patience(5))
    assert [action.operation for action in started] == ["unload"]
    agent.hold_unloads.set()
    await house.reconciler.wait_for_actions()
    await house.settle()
    assert [verb for verb, _ in agent.operations() if verb == "unload_lora"] == ["unload_lora"]


async def test_an_adapter_that_could_not_be_loaded_somewhere_can_be_deleted(house):
    agent = await house.worker()
    await house.register()
    await house.settle()
    digest = (await house.adapter())["digest"]
    # Agents tell of a load that failed until they end, or another one of it succeeds.
    failed = {"lora_id": "sql/v1", "digest": digest, "engine_name": "", "state": "failed", "location": "disk"}
    agent.loading["sql/v1"] = failed | {"error": "the engine refuses it"}
    await house.turn()
    assert (await house.http.delete("/v1/adapters/sql/v1")).status_code == 204
    assert (await house.http.get("/v1/adapters/sql/v1")).status_code == 404


async def test_a_drain_ends_at_its_deadline_whatever_routers_say(house, clock):
    agent = await house.worker()
    await ready(house)
    use = {"worker_id": "w0", "engine_name": SQL_ENGINE, "requests": 1, "in_flight": 1}
    await house.usage(10**15, use)
    await house.http.delete("/v1/adapters/sql/v1")
    for seq in range(2, 6):
        clock.now += house.store.rules.drain_deadline_s / 4 - 1
        await house.usage(10**15, use, seq=seq)
        await house.settle()
    assert "sql/v1" in agent.loaded
    clock.now += 5
    await house.usage(10**15, use, seq=9)
    await house.settle()
    assert agent.loaded == {}


async def test_without_a_live_router_the_engines_own_count_decides(house, clock):
    agent = await house.worker()
    await ready(house)
    agent.running = 1
    await house.beat()
    await house.http.delete("/v1/adapters/sql/v1")
    await house.settle()
    assert "sql/v1" in agent.loaded
    agent.running = 0
    clock.now += 1
    await house.settle()
    assert agent.loaded == {}


async def test_a_deletion_survives_a_restart(open_house):
    house = open_house()
    agent = await house.worker()
    await ready(house)
    agent.running = 1
    await house.beat()
    await house.http.delete("/v1/adapters/sql/v1")
    await house.settle()
    house.store.close()

    again = open_house()
    await again.join(agent)
    await again.settle()
    assert (await again.adapter())["state"] == "deleting"
    agent.running = 0
    again.clock.now += 1
    await again.settle()
    assert agent.loaded == {}
    assert "sql/v1" not in again.store.adapters


async def test_a_worker_that_was_away_gives_up_what_was_deleted_meanwhile(house, clock):
    agent = await house.worker()
    await ready(house)
    copy = agent.loaded["sql/v1"]
    agent.loaded.clear()
    await house.http.delete("/v1/adapters/sql/v1")
    await house.settle()
    assert "sql/v1" not in house.store.adapters
    agent.loaded["sql/v1"] = copy
    await house.turn()
    clock.now += 1
    await house.settle()
    assert agent.loaded == {}


async def test_a_restart_keeps_everything_and_moves_nothing(open_house):
    house = open_house()
    agent = await house.worker()
    await ready(house, policy={"pinned": True, "priority": 3}, tenants=["acme"])
    await house.http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "sql/v1"}]})
    await house.http.patch("/v1/policy", json={"loads_per_worker": 2})
    before, revision = await house.adapter(), (await house.catalog())["revision"]
    calls = len(agent.calls)
    house.store.close()

    again = open_house()
    await again.join(agent)
    assert await again.settle() == []
    assert await again.adapter() == before
    assert (await again.http.get("/v1/aliases/sql")).json()["targets"][0]["lora_id"] == "sql/v1"
    assert (await again.http.get("/v1/policy")).json()["loads_per_worker"] == 2
    assert (await again.catalog())["revision"] > revision
    assert len(agent.calls) == calls


async def test_nothing_is_loaded_before_the_fleet_has_had_time_to_speak(tmp_path, open_house, clock):
    house = open_house()
    house.reconciler.settings = house.settings.model_copy(update={"settle_s": 5.0})
    agent = await house.worker()
    await house.register(policy={"loading": "eager"})
    assert await house.turn() == []
    assert (await house.http.get("/ready")).status_code == 503
    clock.now += 5
    await house.settle()
    assert (await house.http.get("/ready")).status_code == 200
    assert list(agent.loaded) == ["sql/v1"]


@pytest.mark.parametrize("refusal", [None, "adapter_refused"])
async def test_a_store_that_another_process_writes_refuses_for_a_while_and_no_action_breaks(
    open_house, tmp_path, refusal
):
    house = open_house()
    agents = [await house.worker(name) for name in (("w0", "w1") if refusal else ("w0",))]
    await house.register()
    await house.settle()
    if refusal:
        for agent in agents:
            agent.refuse["sql/v1"] = refusal
        await house.ensure()
        await house.turn()  # the first of two; the second would quarantine it
    may_load = asyncio.Event()
    for agent in agents:
        agent.hold_loads = may_load
    await house.ensure()
    unhandled = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))
    house.store._backend._db.execute("PRAGMA busy_timeout = 0")
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        house.reconciler.run_pass()
        other.execute("BEGIN IMMEDIATE")
        refused = await house.http.post("/v1/adapters", json={"lora_id": "late/v1", "source": "file:///late"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unreachable")
        assert int(refused.headers["retry-after"]) > 0
        may_load.set()
        await house.reconciler.wait_for_actions()
    gc.collect()
    assert unhandled == []
    assert (await house.adapter("late/v1"))["error"]["code"] == "adapter_not_found"
    assert house.reconciler.queries.loading_workers("sql/v1") == []
    await house.turn()
    assert (await house.ensure()).json()["ready"] == ([] if refusal else ["w0"])


@pytest.mark.parametrize("operation", ["inspect", "load"])
async def test_what_a_term_began_in_its_last_moment_is_begun_again_in_the_next(house, operation):
    agent = await house.worker()
    await house.register()
    if operation == "load":
        await house.settle()
        await house.ensure()
    await house.beat()
    assert [action.operation for action in house.reconciler.run_pass()] == [operation]
    house.reconciler.end_term()  # as of a leader that wakes after its lease is over: a pass was due, too
    await house.reconciler.wait_for_actions()
    calls = len(agent.calls)
    house.reconciler.begin_term()
    await house.settle()
    assert agent.operations()[calls:] == [(f"{operation}_lora", "sql/v1")]


async def test_one_slow_load_delays_no_other_worker(house):
    slow, fast = await house.worker("w0"), await house.worker("w1")
    slow.hold_loads = asyncio.Event()
    await house.register("a/v1", source="a", policy={"loading": "eager", "min_replicas": 2})
    await house.turn()
    await house.beat()
    house.reconciler.run_pass()
    while house.reconciler.queries.loading_workers("a/v1") != ["w0"]:
        assert await house.reconciler.catalog.changed.wait(5)
    assert list(fast.loaded) == ["a/v1"]
    assert house.reconciler.run_pass() == []
    assert (await house.ensure("a/v1", replicas=2)).json()["loading"] == ["w0"]
    slow.hold_loads.set()
    await house.reconciler.wait_for_actions()
    assert await house.settle() == []
    assert (await house.adapter("a/v1"))["replicas"] == {"desired": 2, "ready": 2}


async def test_a_worker_gets_one_load_at_a_time_and_the_fleet_no_more_than_its_budget(house):
    for name in ("w0", "w1", "w2"):
        await house.worker(name, slots=8)
    await house.http.patch("/v1/policy", json={"loads_fleet_wide": 2})
    for number in range(6):
        await house.register(f"a{number}", policy={"loading": "eager", "min_replicas": 3})
    inspected = await house.turn()
    assert {action.operation for action in inspected} == {"inspect"}
    await house.beat()
    actions = house.reconciler.run_pass()
    assert len(actions) == 2
    assert len({action.worker_id for action in actions}) == 2
    await house.reconciler.wait_for_actions()
    await house.settle()
    assert all(len(agent.loaded) == 6 for agent in house.agents.values())


async def test_a_drained_worker_hands_its_adapters_on_and_is_then_told(house):
    for name in ("w0", "w1"):
        await house.worker(name)
    await ready(house)
    (home,) = (await house.adapter())["workers"]
    answer = await house.http.post(f"/v1/workers/{home}/drain", json={"deadline_s": 60})
    assert answer.json()["state"] == "draining"
    house.clock.now += 1
    await house.settle()
    house.clock.now += 1
    await house.settle()
    other = {"w0": "w1", "w1": "w0"}[home]
    assert (await house.adapter())["workers"] == [other]
    assert house.agents[home].loaded == {}
    assert house.agents[home].drained
    # Make before break: the new copy was there before the old one went.
    assert ("load_lora", "sql/v1") in house.agents[other].operations()


async def test_routers_are_told_of_a_drain_when_what_the_worker_has_is_elsewhere_or_its_time_is_over(house, clock):
    agent = await house.worker()
    await ready(house)

    async def told():
        return {worker["id"]: worker["state"] for worker in (await house.catalog())["workers"]}

    answer = await house.http.post("/v1/workers/w0/drain", json={"deadline_s": 60})
    assert answer.json()["state"] == "draining"
    await house.settle()
    # Nobody else has it: until then its requests are answered where it is.
    assert (await told(), agent.drained) == ({"w0": "cordoned"}, False)
    await house.worker("w1")
    clock.now += 1
    await house.settle()
    clock.now += 1
    await house.settle()
    assert ((await told())["w0"], agent.drained) == ("draining", True)

    await house.http.post("/v1/workers/w1/drain", json={"deadline_s": 60})
    await house.settle()
    assert (await told())["w1"] == "cordoned"
    clock.now += 61
    await house.settle()
    assert (await told())["w1"] == "draining"


async def test_a_drained_worker_serves_again_once_it_is_uncordoned(house):
    agent = await house.worker()
    await house.http.post("/v1/workers/w0/drain", json={"deadline_s": 60})
    await house.settle()
    assert agent.drained
    await house.http.post("/v1/workers/w0/uncordon")
    await house.settle()
    assert not agent.drained
    await ready(house)
    assert [call for call in agent.calls if call[0] == "undrain"] == [("undrain", {"wire": 1})]


async def test_who_does_not_lead_takes_for_lost_what_went_with_an_engine_and_not_what_the_leader_unloads(house):
    await house.worker()
    await ready(house)
    report = house.reconciler.reports.workers["w0"].report
    empty = report.model_copy(update={"lora": report.lora.model_copy(update={"loaded_loras": ()})})
    await house.whole.leadership.release()
    with capture_logs() as told:
        house.reconciler.monitor.record_heartbeat(empty)
        assert told == []
        house.reconciler.monitor.record_heartbeat(report)
        house.reconciler.monitor.record_heartbeat(empty.model_copy(update={"engine_boot_id": "another"}))
    assert [(line["event"], line["lora_id"]) for line in told] == [("adapter lost its place", "sql/v1")]


async def test_a_worker_in_which_a_load_hangs_is_given_nothing_new(house):
    agent = await house.worker()
    report = house.reconciler.reports.workers["w0"].report
    house.reconciler.monitor.record_heartbeat(report.model_copy(update={"is_suspect": True}))
    assert house.reconciler.queries.observe().workers["w0"].state == "cordoned"
    house.reconciler.monitor.record_heartbeat(report)
    assert house.reconciler.queries.observe().workers["w0"].state == "ready"
    assert agent.calls == []


async def test_a_cordoned_worker_keeps_what_it_has_and_gets_nothing_new(house):
    agent = await house.worker()
    await ready(house)
    await house.http.post("/v1/workers/w0/cordon")
    await house.register("b/v1")
    await house.ensure("b/v1")
    await house.settle()
    assert list(agent.loaded) == ["sql/v1"]
    await house.http.post("/v1/workers/w0/uncordon")
    await house.ensure("b/v1")
    await house.settle()
    assert set(agent.loaded) == {"sql/v1", "b/v1"}


async def test_ensure_waits_until_the_adapter_is_there(open_house):
    house = open_house(pass_interval_s=30)
    await house.worker()
    loop = asyncio.create_task(house.reconciler.run())
    await house.register()
    answer = (await asyncio.wait_for(house.ensure(wait_s=20), patience(10))).json()
    assert answer["ready"] == ["w0"]
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def test_the_loop_survives_a_pass_that_raises(house, monkeypatch):
    passes = []

    def worst():
        passes.append(1)
        if len(passes) == 1:
            raise RuntimeError("the worst iteration")
        loop.cancel()
        return []

    house.reconciler.run_pass = worst
    loop = asyncio.create_task(house.reconciler.run())
    await asyncio.wait([loop], timeout=patience(5))
    assert len(passes) == 2


async def test_usage_that_repeats_or_comes_late_changes_nothing(house):
    await house.worker()
    use = {"worker_id": "w0", "engine_name": SQL_ENGINE, "requests": 6, "in_flight": 0}
    now = house.clock()
    assert (await house.usage(1, use, seq=1))["accepted"]
    assert house.reconciler.demand.request_rate("sql/v1", now) == 0.0  # history before we knew this router
    assert (await house.usage(1, use | {"requests": 12}, seq=2))["accepted"]
    rate = house.reconciler.demand.request_rate("sql/v1", now)
    assert rate > 0.1
    assert not (await house.usage(1, use | {"requests": 12}, seq=2))["accepted"]
    assert not (await house.usage(1, use | {"requests": 9}, seq=1))["accepted"]
    assert (await house.usage(1, use | {"requests": 6}, boot_id="b1", seq=1))["accepted"]
    assert not (await house.usage(1, use | {"requests": 99}, boot_id="b0", seq=9))["accepted"]
    assert house.reconciler.demand.request_rate("sql/v1", now) == pytest.approx(2 * rate)


async def test_an_adapter_in_use_is_not_a_victim(house, clock):
    agent = await house.worker(slots=1)
    await ready(house, "a/v1", source="a")
    clock.now += 1000
    name = engine_name("a/v1", digest_of("a"))
    await house.usage(10**15, {"worker_id": "w0", "engine_name": name, "requests": 1, "in_flight": 1})
    await house.register("b/v1", source="b")
    await house.ensure("b/v1")
    await house.settle()
    assert list(agent.loaded) == ["a/v1"]
    plan = (await house.http.post("/v1/placements/plan")).json()
    assert (plan["actions"], plan["unplaced"]) == ([], ["b/v1"])


async def test_a_plan_says_what_the_next_pass_does_and_does_nothing(house):
    agent = await house.worker()
    await house.register(policy={"loading": "eager"})
    await house.settle()
    agent.loaded.clear()
    agent.engine_boot_id = "e2"
    await house.beat()
    calls = len(agent.calls)
    plan = (await house.http.post("/v1/placements/plan")).json()["actions"]
    assert [(step["operation"], step["lora_id"], step["worker_id"]) for step in plan] == [("load", "sql/v1", "w0")]
    assert "eager" in plan[0]["reason"]
    assert len(agent.calls) == calls
    assert (await house.http.post("/v1/rebalance")).json()["actions"] == plan
    await house.reconciler.wait_for_actions()
    assert list(agent.loaded) == ["sql/v1"]


async def test_a_weighted_fleet_shares_its_slots_by_weight(house):
    for number in range(4):
        await house.worker(f"w{number}", slots=2)
    await house.http.patch("/v1/policy", json={"loading": "weighted", "reserve_slots": 0})
    await house.register("a", policy={"weight": 3, "max_replicas": 4})
    await house.register("b", policy={"weight": 1})
    await house.register("c", policy={"weight": 1})
    await house.settle()
    counts = {name: (await house.adapter(name))["replicas"]["ready"] for name in "abc"}
    assert counts == {"a": 4, "b": 2, "c": 2}


async def test_two_loads_on_one_worker_at_a_time_take_two_victims(house):
    agent = await house.worker(slots=2)
    await house.http.patch("/v1/policy", json={"loads_per_worker": 2, "min_residency_s": 0, "drain_deadline_s": 0})
    for name in ("a", "b", "c", "d"):
        await house.register(name)
    for name in ("a", "b"):
        await house.ensure(name)
        await house.settle()
    agent.hold_loads = asyncio.Event()
    for name in ("c", "d"):
        await house.ensure(name)
        for _ in range(2):  # one pass has the victim drain, the next one names it
            await house.beat()
            house.reconciler.run_pass()
    agent.hold_loads.set()
    await house.reconciler.wait_for_actions()
    assert sorted(body["evict"] for verb, body in agent.calls if verb == "load_lora" and body.get("evict")) == [
        engine_name("a", digest_of("file:///a")),
        engine_name("b", digest_of("file:///b")),
    ]
    await house.settle()
    assert sorted(agent.loaded) == ["c", "d"]
