"""Orchestrators killed, paused past their lease, and side by side on one store."""

import asyncio
import random
from collections import Counter
from contextlib import suppress

import httpx
import pytest

from tests.orchestrator.doubles import FakeAgent
from tests.simulation.fleet import URL, is_ready, until


class HeartbeatSenders:
    """Served agents that send heartbeats to the orchestrators, whichever takes them."""

    def __init__(self, simulation, fleet, *agents):
        for number, agent in enumerate(agents):
            agent.url = simulation.serve(agent.worker_id, f"10.0.1.{number + 1}", agent.app)
        self.tasks = [asyncio.create_task(self._beat(fleet, agent)) for agent in agents]

    async def _beat(self, fleet, agent):
        async with fleet.client_of(URL) as client:
            while True:
                with suppress(httpx.HTTPError):
                    await client.post("/v1/workers/register", json=agent.heartbeat(), timeout=1)
                await asyncio.sleep(1.0)


async def says(client, name):
    return (await client.get("/health")).json()[name]


def orchestrators_of(fleet, count):
    """Clients of each orchestrator by its own address."""
    return [fleet.client_of(f"http://10.0.0.1:{8080 + number}") for number in range(count)]


@pytest.mark.parametrize(("loads", "kills"), [(60, 3)])
async def test_kills_at_random_moments_lose_nothing_and_load_nothing_twice(simulation, loads, kills):
    fleet = await simulation.fleet(workers=0, routers=0, has_keys=False)
    agents = [FakeAgent(f"w{number}", slots=64) for number in range(4)]
    for agent in agents:
        agent.load_s = 0.3
    HeartbeatSenders(simulation, fleet, *agents)
    names = [f"adapter-{number}/v1" for number in range(loads)]
    moments = sorted(random.Random(5).sample(range(5, loads - 5), kills))

    def loaded():
        return [body["lora_id"] for agent in agents for verb, body in agent.calls if verb == "load_lora"]

    specs = [{"lora_id": name, "source": f"file:///{name}", "policy": {"loading": "eager"}} for name in names]
    await fleet.set_policy(loads_per_worker=4)
    (await fleet.http.post("/v1/adapters:batch", json={"adapters": specs})).raise_for_status()
    for moment in moments:
        await until(lambda moment=moment: len(loaded()) >= moment, every_s=0.01, what=f"{moment} loads")
        fleet.kill("orch0", away_s=1.0, in_callbacks=20)
        await until(lambda: not fleet.processes.nodes["orch0"].is_alive, what="it is dead")
        await until(lambda: is_ready(fleet.http), what="it is there again")
    await until(lambda: sum(len(agent.loaded) for agent in agents) == len(names), what="all are loaded")
    assert Counter(loaded()) == Counter(names)
    assert not any(verb == "unload_lora" for agent in agents for verb, _ in agent.calls)

    async def are_ready():
        listed = (await fleet.http.get("/v1/adapters", params={"limit": 1000})).json()["data"]
        return {item["lora_id"]: item["status"]["state"] for item in listed} == dict.fromkeys(names, "ready")

    await until(are_ready, what="all are shown as ready")


async def test_a_paused_leader_is_replaced_and_refused_when_it_wakes(simulation):
    fleet = await simulation.fleet(workers=0, routers=0, orchestrators=2, has_keys=False)
    agent = FakeAgent("w0", slots=8)
    HeartbeatSenders(simulation, fleet, agent)
    clients = orchestrators_of(fleet, 2)
    await until(lambda: says(clients[0], "leader"), what="a leader")
    leads = [await says(client, "is_leading") for client in clients]
    assert sorted(leads) == [False, True]
    first = leads.index(True)
    one, two = clients[first], clients[1 - first]

    async def loaded_by(client, lora_id):
        await client.post("/v1/adapters", json={"lora_id": lora_id, "source": lora_id})
        answer = await client.post(f"/v1/adapters/{lora_id}/ensure", json={"wait_s": 60})
        return answer.json()["ready"] == ["w0"]

    await until(lambda: says(two, "leader"), what="the other one knows the leader")
    assert await loaded_by(two, "a/v1")  # which hands everything on
    assert (await two.get("/v1/adapters/a/v1")).json()["status"]["state"] == "ready"
    epoch = agent.epochs[-1]

    fleet.pause(f"orch{first}", for_s=60)
    await until(lambda: says(two, "is_leading"), what="the other one leads")
    assert await loaded_by(two, "b/v1")
    assert agent.epochs[-1] == agent.epoch > epoch
    await until(lambda: not fleet.processes.nodes[f"orch{first}"].is_paused, what="it wakes")

    async def has_heard():
        return await says(one, "leader") == str(two.base_url).rstrip("/") and not await says(one, "is_leading")

    await until(has_heard, what="it has heard of the other one")
    headers = {"x-lorafleet-epoch": str(epoch)}
    async with fleet.client_of(agent.url) as late:
        answer = await late.post("/v1/admin/unload_lora", json={"lora_id": "a/v1"}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stale_epoch")
    assert await loaded_by(one, "c/v1")  # by way of the other
    assert [verb for verb, _ in agent.calls].count("load_lora") == 3
    assert set(agent.epochs) == {epoch, agent.epoch}

    # With nobody left to lead for a moment, what is stored can still be read.
    fleet.kill(f"orch{first}", away_s=None)
    fleet.pause(f"orch{1 - first}", for_s=600)
    fleet.add_orchestrator()
    third = fleet.client_of("http://10.0.0.1:8082")

    async def is_known():
        return (await third.get("/v1/adapters/c/v1")).json().get("lora_id") == "c/v1"

    await until(is_known, what="what is stored can be read")
    await until(lambda: says(third, "is_leading"), what="the third one leads")
    assert await is_known()


async def test_the_only_orchestrator_paused_past_its_lease_goes_on_in_the_same_term(simulation):
    fleet = await simulation.fleet(workers=0, routers=0, has_keys=False)
    agent = FakeAgent("w0", slots=64)
    HeartbeatSenders(simulation, fleet, agent)
    epoch = await says(fleet.http, "epoch")
    for number, paused_s in enumerate((7.5, 60.0, 900.0)):
        fleet.pause("orch0", for_s=paused_s)
        body = {"lora_id": f"a{number}/v1", "source": f"a{number}"}
        calls = [fleet.http.post("/v1/adapters", json=body), fleet.http.get("/v1/catalog")]
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [201, 200]
        assert await fleet.ensure(f"a{number}/v1") == ["w0"]
        assert await says(fleet.http, "epoch") == epoch
    assert set(agent.epochs) == {epoch}
