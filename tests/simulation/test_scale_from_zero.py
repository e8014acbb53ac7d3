"""A pool at zero: requests are held at the routers, its first worker is started for them, and none is lost."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.simulation.fleet import MODEL, EngineFlags, SimulationFleet, until

WORKLOAD = "statefulsets/fleet-a"
ADAPTERS = ("sql/v1", "legal/v1", "python/v1")
LATE_S = 1.0


@dataclass
class PlayedPool:
    """An API server that has the scale of one workload, and starts its workers `start_s` after it was scaled.

    fleet    whose workers they are
    patches  bodies of the changes that came
    rival    number that another client sets just before the next change comes
    """

    start_s: float
    fleet: SimulationFleet | None = None
    replicas: int = 0
    version: int = 1
    patches: list[Any] = field(default_factory=list)
    rival: int | None = None

    def app(self) -> Starlette:
        path = f"/apis/apps/v1/namespaces/ml/{WORKLOAD}/scale"
        return Starlette(routes=[Route(path, self.answer, methods=["GET", "PATCH"])])

    async def answer(self, request: Request) -> JSONResponse:
        if request.method == "PATCH":
            change = json.loads(await request.body())
            if self.rival is not None:
                self.replicas, self.version, self.rival = self.rival, self.version + 1, None
            self.patches.append(change)
            if change["metadata"]["resourceVersion"] != str(self.version):
                return JSONResponse({"kind": "Status", "reason": "Conflict", "message": "changed"}, 409)
            self.replicas, self.version = change["spec"]["replicas"], self.version + 1
            assert self.fleet is not None
            self.fleet.processes.after(self.start_s, self.start_worker)
        spec = {"replicas": self.replicas} if self.replicas else {}  # as a real one leaves 0 out
        return JSONResponse({"kind": "Scale", "metadata": {"resourceVersion": str(self.version)}, "spec": spec})

    def start_worker(self) -> None:
        assert self.fleet is not None
        self.fleet.add_worker(EngineFlags(max_loras=4, max_cpu_loras=6, load_s=0.1), pool="a")


async def fleet_at_zero(simulation: Any, start_s: float, **router: Any) -> tuple[SimulationFleet, PlayedPool]:
    """A fleet without a worker, of which one pool can be started, with three registered adapters."""
    pool = PlayedPool(start_s)
    url = simulation.serve("kube", "10.0.9.1", pool.app(), port=8001)
    kubeconfig = simulation.folder / "kubeconfig"
    context = {"cluster": "c", "user": "u", "namespace": "ml"}
    config = {
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": context}],
        "current-context": "c",
    }
    kubeconfig.write_text(yaml.safe_dump(config))
    from_zero = {"a": {"base_model": MODEL, "start_s": start_s}}
    pool.fleet = fleet = await simulation.fleet(
        workers=0,
        routers=2,
        router={"scale_from_zero": from_zero, "tenant_share": 1, **router},
        scale_from_zero={"a": from_zero["a"] | {"workload": WORKLOAD}},
        kubeconfig=kubeconfig,
    )
    for name in ADAPTERS:
        await fleet.register(name, simulation.adapter(name), base_model=MODEL)
    return fleet, pool


async def ask(fleet: SimulationFleet, model: str, *, router: int = 0, **more: Any) -> httpx.Response:
    """One request, on a connection of its own."""
    body = {"model": model, "prompt": "a", "max_tokens": 1, **more}
    async with fleet.client_of(str(fleet.routers[router].base_url)) as client:
        return await client.post("/v1/completions", json=body)


async def held_s(fleet: SimulationFleet) -> list[float]:
    """Seconds for which the routers have held each request that they held."""
    rows = [row for router in fleet.routers for row in (await router.get("/v1/requests?limit=1000")).json()["data"]]
    return [row["stages"]["hold"] for row in rows if "hold" in row["stages"]]


@pytest.mark.parametrize("start_s", [4, 85])
async def test_a_thousand_held_requests_are_answered_when_the_first_worker_is_there(simulation, start_s):
    fleet, pool = await fleet_at_zero(simulation, start_s)
    models = [MODEL, *ADAPTERS[:2]]
    asking = [ask(fleet, models[number % 3], router=number % 2) for number in range(1000)]
    answers = await asyncio.gather(*asking)
    assert {answer.status_code for answer in answers} == {200}
    assert [patch["spec"] for patch in pool.patches] == [{"replicas": 1}]
    held = await held_s(fleet)
    assert len(held) == 1000
    assert max(held) <= start_s + LATE_S


async def test_requests_beyond_the_bounds_of_time_and_number_say_when_to_come_back(simulation):
    fleet, pool = await fleet_at_zero(simulation, 1000, scale_from_zero_wait_s=5, cold_start_timeout_s=2)
    pool.replicas = 1  # it starts, and takes long
    for model in (MODEL, "sql/v1"):
        answer = await ask(fleet, model)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica"), model
        assert answer.headers["retry-after"] == "1000"
        assert "within 5 s (its pool has no ready worker" in answer.json()["error"]["message"].replace(": its", " (its")
    assert pool.patches == []


async def test_no_more_requests_are_held_than_may_wait(simulation):
    fleet, _ = await fleet_at_zero(simulation, 4, max_held_requests=10)
    answers = await asyncio.gather(*(ask(fleet, MODEL) for _ in range(12)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert [(each.status_code, each.headers["retry-after"]) for each in refused] == [(429, "4")] * 2


@pytest.mark.parametrize("rival", [3, 0])
async def test_a_number_that_another_client_sets_meanwhile_stays(simulation, rival):
    fleet, pool = await fleet_at_zero(simulation, 4)
    pool.rival = rival
    asking = asyncio.create_task(ask(fleet, MODEL))
    await until(lambda: pool.patches, what="the pool is to be scaled")
    if rival:
        pool.start_worker()
    assert (await asking).status_code == 200
    assert pool.replicas == (rival or 1)


async def test_the_adapters_of_held_requests_are_loaded_before_those_that_were_hot(simulation):
    fleet, pool = await fleet_at_zero(simulation, 4, cold_start_timeout_s=2)
    names = [f"hot/v{number}" for number in range(5)]
    for name in names:
        await fleet.register(name, simulation.adapter(name), base_model=MODEL)
        assert (await ask(fleet, name)).status_code == 200
    pool.replicas = 0
    fleet.stop("w0", away_s=None)
    fleet.stop("engine0", away_s=None)
    await until(
        lambda: not fleet.processes.nodes["w0"].is_alive, what="the worker has ended, which no router knows yet"
    )
    assert (await ask(fleet, "sql/v1")).status_code == 200
    assert max(await held_s(fleet)) <= 4 + LATE_S


async def test_an_autoscaler_reads_what_is_held_and_how_long_a_pool_is_idle(simulation):
    fleet, pool = await fleet_at_zero(simulation, 4)
    pool.replicas = 1  # somebody else has just scaled it

    async def figures():
        lines = (await fleet.http.get("/metrics")).text.splitlines()
        return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if 'pool="a"' in line}

    before = await figures()
    assert before["lorafleet_pool_held_requests"] == 0
    assert before["lorafleet_pool_slots"] == before["lorafleet_pool_queue_wait_seconds"] == 0
    asking = [asyncio.create_task(ask(fleet, MODEL, router=number)) for number in range(2)]

    async def is_held():
        return (await figures())["lorafleet_pool_held_requests"] == 2

    await until(is_held, what="both requests are in the metric")
    assert await fleet.figure(1, "lorafleet_router_held_from_zero_requests") == 1
    pool.start_worker()
    assert {(await each).status_code for each in asking} == {200}
    await asyncio.sleep(60)
    idle = await figures()
    assert idle["lorafleet_pool_held_requests"] == 0
    assert 55 < idle["lorafleet_pool_idle_seconds"] < 70


async def test_requests_that_the_last_worker_fails_as_it_ends_are_held_for_the_next_one(simulation):
    fleet, pool = await fleet_at_zero(simulation, 4)
    assert (await ask(fleet, MODEL)).status_code == 200
    for name in ("w0", "engine0"):  # an autoscaler takes it away, and no router has heard of that
        fleet.kill(name, away_s=None)
    pool.replicas = 0
    answers = await asyncio.gather(
        *(ask(fleet, name, router=number) for name in (MODEL, "sql/v1") for number in (0, 1))
    )
    assert [answer.status_code for answer in answers] == [200] * 4
    assert pool.replicas == 1
