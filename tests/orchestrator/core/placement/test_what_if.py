"""What-if plans: the decisions of coming passes, with their cost."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from orchestrator.core.placement.what_if import Hypothesis, PlacementInputs, what_if
from orchestrator.leadership.file_lease import FileLease
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import (
    DemandSnapshot,
    Intent,
    LoadFigures,
    ObservedFleet,
    ObservedWorker,
    ReportedAdapter,
    WantedReplicas,
)
from tests.patience import until
from tests.registered import changed, registered

NOW = 10_000.0
RULES = PlacementPolicy(reserve_slots=0)


def adapter(name, **changes):
    known = {"base_model": "qwen", "digest": f"digest-{name}", "rank": 8, "size_bytes": 1000}
    return changed(registered(name, source="s", **known), **changes)


def worker(name, *names, slots=4, **changes):
    held = {n: ReportedAdapter(lora_id=n, digest=f"digest-{n}", engine_name=f"{n}@", state="ready") for n in names}
    base = ObservedWorker(id=name, state="ready", base_model="qwen", slots=slots, max_lora_rank=64, node=name)
    return replace(base, adapters=held, **changes)


def scene(workers, adapters, *, rates=None, work=None, policy=RULES):
    return PlacementInputs(
        intent=Intent(adapters={a.lora_id: a for a in adapters}),
        observed=ObservedFleet(workers={w.id: w for w in workers}),
        demand=DemandSnapshot(rates=rates or {}, work=work or {}),
        policy=policy,
        now=NOW,
    )


def asked(where, passes=50, load_s=2.0, **hypothesis):
    observed = replace(where.observed, load_figures=LoadFigures(seconds=load_s, size_bytes=1000))
    return what_if(replace(where, observed=observed), Hypothesis(**hypothesis), passes=passes)


def loads(outcome):
    return [(s.action.lora_id, s.action.worker_id) for s in outcome.steps if s.action.operation == "load"]


def test_an_empty_hypothesis_on_a_settled_fleet_moves_nothing():
    outcome = asked(scene([worker("w0", "a"), worker("w1")], [adapter("a")], rates={"a": 1.0}, work={"a": 0.1}))
    assert (outcome.steps, outcome.is_settled, outcome.seconds) == ((), True, 0.0)


def test_ten_times_the_demand_plans_more_replicas_with_cost():
    workers = [worker("w0", "a"), *(worker(f"w{n}") for n in range(1, 4))]
    outcome = asked(scene(workers, [adapter("a")], rates={"a": 1.0}, work={"a": 0.2}), factors={"a": 10.0})
    assert outcome.after["a"] > outcome.before.get("a", 0)
    assert len(loads(outcome)) >= outcome.after["a"] - 1
    assert {step.size_bytes for step in outcome.steps if step.action.operation == "load"} == {1000}
    assert outcome.seconds >= 2.0
    assert all(step.action.reason for step in outcome.steps)
    assert outcome.is_settled


def test_assumed_request_rates_use_the_adapters_mean_work():
    workers = [worker("w0", "a"), *(worker(f"w{n}") for n in range(1, 4))]
    where = scene(workers, [adapter("a")], rates={"a": 1.0}, work={"a": 0.2})
    assert loads(asked(where, rates={"a": 10.0})) == loads(asked(where, factors={"a": 10.0})) != []


def test_assumed_demand_loads_an_unplaced_adapter():
    outcome = asked(scene([worker("w0", "b"), worker("w1")], [adapter("a"), adapter("b")]), rates={"a": 1.0})
    assert [name for name, _ in loads(outcome)] == ["a"]
    assert loads(asked(scene([worker("w0", "b")], [adapter("a"), adapter("b")]), rates={"a": 0.0})) == []


def test_assumed_requests_wait_behind_real_ones():
    where = scene([worker("w0", slots=1)], [adapter("a"), adapter("b")])
    waiting = replace(where, demand=DemandSnapshot(wants={"b": WantedReplicas(replicas=1, since=NOW - 30.0)}))
    assert loads(asked(waiting, rates={"a": 9.0}))[0] == ("b", "w0")


def test_tenants_take_turns_in_plans_too():
    where = scene([worker("w0")], [adapter(name) for name in ("a0", "a1", "a2", "b")])
    since, acme, bolt = NOW - 1, frozenset({"acme"}), frozenset({"bolt"})
    wants = {f"a{number}": WantedReplicas(replicas=1, since=since, tenants=acme) for number in range(3)}
    wants["b"] = WantedReplicas(replicas=1, since=since, tenants=bolt)
    foretold = asked(replace(where, demand=DemandSnapshot(wants=wants, rates=dict.fromkeys(("a0", "a1", "a2"), 1.0))))
    assert [name for name, _ in loads(foretold)] == ["a0", "b", "a1", "a2"]


def test_adapters_of_a_lost_worker_are_loaded_elsewhere():
    workers = [worker("w0", "a", "b"), worker("w1", "c"), worker("w2")]
    outcome = asked(scene(workers, [adapter("a"), adapter("b"), adapter("c")]), workers_gone=("w0",))
    assert {name for name, _ in loads(outcome)} == {"a", "b"}
    assert {where for _, where in loads(outcome)} <= {"w1", "w2"}
    assert outcome.is_settled


def test_additional_workers_take_unplaced_adapters():
    adapters = [adapter(name, loading="eager") for name in "abcd"]
    where = scene([worker("w0", "a", "b", slots=2)], adapters)
    tight = asked(where)
    assert (loads(tight), set(tight.unplaced)) == ([], {"c", "d"})
    wide = asked(where, workers_more=(("w0", 1),))
    assert sorted(loads(wide)) == [("c", "w0+1"), ("d", "w0+1")]
    assert wide.unplaced == {}


def test_a_plan_uses_the_assumed_policy():
    where = scene([worker("w0"), worker("w1")], [adapter("a")])
    assert loads(asked(where)) == []
    assert len(loads(asked(where, policy=replace(RULES, loading="eager", min_replicas=2)))) == 2
    assert len(loads(asked(where, adapters={"a": adapter("a", min_replicas=1)}))) == 1


def test_an_unknown_adapter_gets_median_rank_and_size():
    new = registered("new", source="s", loading="eager")
    known = [adapter("a", size_bytes=500), adapter("b", size_bytes=500), adapter("c", size_bytes=9)]
    outcome = asked(scene([worker("w0")], known), adapters={"new": new})
    assert [(s.action.lora_id, s.size_bytes) for s in outcome.steps] == [("new", 500)]


def test_a_drained_worker_is_emptied_and_told_to_leave_once():
    workers = [worker("w0", "a", "b", state="draining"), worker("w1")]
    outcome = asked(scene(workers, [adapter("a"), adapter("b")]))
    operations = [(s.action.operation, s.action.lora_id, s.action.worker_id) for s in outcome.steps]
    assert [o for o in operations if o[0] == "load"] == [("load", "a", "w1"), ("load", "b", "w1")]
    assert [o for o in operations if o[0] == "unload"] == [("unload", "a", "w0"), ("unload", "b", "w0")]
    assert operations.count(("drain", "", "w0")) == 1
    assert outcome.is_settled


def test_too_few_passes_are_reported_as_not_settled():
    workers = [worker("w0", *"abcd", slots=4, state="draining"), worker("w1")]
    outcome = asked(scene(workers, [adapter(n) for n in "abcd"]), passes=1)
    assert not outcome.is_settled


# --- over REST ---------------------------------------------------------------------------------------------------


async def plan(service, body=None):
    answer = await service.http.post("/v1/placements/plan", json=body)
    return answer.status_code, answer.json()


async def test_a_plan_shows_actions_reasons_targets_and_cost(service):
    agents = [await service.worker(f"w{n}") for n in range(3)]
    await service.register()
    await service.ensure()
    await service.settle()
    holder = next(agent for agent in agents if agent.loaded)
    calls = [len(agent.calls) for agent in agents]
    status, answer = await plan(
        service,
        {
            "workers_gone": [holder.worker_id],
            "adapters": [{"lora_id": "new/v1", "source": "file:///n", "policy": {"loading": "eager"}, "size_bytes": 7}],
        },
    )
    assert status == 200, answer
    assert sorted(a["lora_id"] for a in answer["actions"]) == ["new/v1", "sql/v1"]
    assert all(a["reason"] and a["seconds"] is not None for a in answer["actions"])
    assert answer["cost"]["loads"] == 2
    assert answer["cost"]["bytes"] == 1000 + 7
    assert answer["targets"]["new/v1"] == {"before": 0, "after": 1}
    assert answer["is_settled"]
    assert (await service.http.get("/v1/adapters/new/v1")).status_code == 404
    assert [len(agent.calls) for agent in agents] == calls
    assert await service.turn() == []


async def test_a_plan_with_another_policy_leaves_the_policy_unchanged(service):
    for number in range(3):
        await service.worker(f"w{number}")
    await service.register()
    await service.settle()
    tag = (await service.http.get("/v1/policy")).headers["etag"]
    _, answer = await plan(service, {"policy": {"loading": "eager", "min_replicas": 3}})
    assert answer["cost"]["loads"] == 3
    _, answer = await plan(service, {"adapter_policies": {"sql/v1": {"min_replicas": 2}}})
    assert answer["cost"]["loads"] == 2
    assert (await service.http.get("/v1/policy")).headers["etag"] == tag
    assert (await plan(service))[1]["actions"] == []


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"workers_gone": ["w9"]}, 404, "w9"),
        ({"workers_more": [{"like": "w9"}]}, 404, "w9"),
        ({"demand": {"nobody": {"factor": 2}}}, 404, "nobody"),
        ({"demand": {"sql/v1": {}}}, 400, "factor"),
        ({"demand": {"sql/v1": {"factor": -1}}}, 400, "-1"),
        ({"policy": {"loading": "eagre"}}, 400, "'eager'"),
        ({"polcy": {}}, 400, "polcy"),
        ({"passes": 0}, 400, "passes"),
    ],
)
async def test_a_hypothesis_about_unknown_names_is_refused(service, body, status, says):
    await service.worker()
    await service.register()
    found, answer = await plan(service, body)
    assert found == status
    assert says in answer["error"]["message"]


@pytest.mark.slow
async def test_many_plans_do_not_delay_lease_renewal(service, tmp_path):
    await service.worker()
    with service.store.together():
        for number in range(300):
            known = {"loading": "eager", "min_replicas": 4, "base_model": "tiny-qwen", "rank": 8}
            service.store.put_adapter(registered(f"a{number}", source="s", digest=f"{number:064}", **known))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    lease = FileLease(tmp_path / "lease", holder="x")
    ask = {"workers_more": [{"count": 30}], "passes": 20}
    plans = [asyncio.create_task(service.http.post("/v1/placements/plan", json=ask)) for _ in range(3)]
    await until(lambda: any(thread.name.startswith("ThreadPool") for thread in threading.enumerate()))
    assert await lease.read() is None
    assert not any(plan.done() for plan in plans)
    assert {answer.status_code for answer in await asyncio.gather(*plans)} == {200}
    lease.close()


async def test_too_many_assumed_workers_are_refused(service):
    await service.worker()
    answer = await service.http.post("/v1/placements/plan", json={"workers_more": [{"count": 1000}] * 3})
    assert answer.status_code == 400
    assert "3000 more workers are assumed, at most 2000" in answer.json()["error"]["message"]
