"""Orchestrators as processes: killed, stopped, paused past their lease, and side by side on one database or cluster.

Those that share a file run in `tests/simulation/test_orchestrators.py`.
"""

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import sys
from collections import Counter
from typing import ClassVar

import httpx
import pytest

from lorafleet.kube.client import connect
from tests.kube.conftest import kube  # noqa: F401  (a fixture)
from tests.kube.stores import give_back_lease
from tests.orchestrator.doubles import FakeAgent
from tests.patience import patience, until
from tests.postgres import PASSWORD, own_postgres_server, postgres_server  # noqa: F401  (fixtures)
from tests.serving import client_of, serving
from tests.workers.running import state_of

pytestmark = pytest.mark.fleet
FLAGS = {
    "settle-s": patience(0.3),  # all agents have spoken by then, on a busy machine too
    "pass-interval-s": 0.2,
    "lease-duration-s": patience(0.7),  # a leader that a busy machine keeps from renewing in time is no fault of ours
    "lease-renew-s": 0.2,
    "lease-margin-s": 0.3,
    "log-level": "error",
}


def database_flags(folder, address):
    """Flags for an orchestrator on a database, whose address is in a file: it has a password."""
    file = folder / "store-address"
    file.write_text(address)
    return {"store-file": file}


class OrchestratorProcess:
    """`python -m orchestrator` on a store, with a client."""

    started: ClassVar[list["OrchestratorProcess"]] = []

    def __init__(self, folder, name, **flags):
        self._folder = folder
        self._flags = flags
        self._port_file = folder / f"{name}.port"
        self.url = ""
        self.http = None

    async def start(self):
        self._port_file.unlink(missing_ok=True)
        flags = {"port": 0, "store": self._folder / "store.db", "port-file": self._port_file} | FLAGS | self._flags
        if "store-file" in flags:
            del flags["store"]
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        with (self._folder / "stderr").open("ab") as errors:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "orchestrator", *words, stderr=errors
            )
        self.started.append(self)
        await until(self._port_file.exists)
        self.url = f"http://127.0.0.1:{self._port_file.read_text()}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=patience(20))
        await until(self.is_up)

    async def says(self, name):
        """One field of /health; None without a response."""
        with contextlib.suppress(httpx.HTTPError):
            return (await self.http.get("/health")).json()[name]

    async def is_up(self):
        return await self.says("status") == "ok"

    async def pause(self):
        """SIGSTOP outside of a transaction: a paused holder of SQLite's lock would block every other writer."""
        while True:
            os.kill(self.process.pid, signal.SIGSTOP)
            await until(lambda: state_of(self.process.pid) == "T")
            files = [self._folder / name for name in ("store.db", "store.db.lease")]
            if all(is_unlocked(file) for file in files if file.exists()):
                return
            os.kill(self.process.pid, signal.SIGCONT)
            await asyncio.sleep(0.01)

    async def stop(self, how=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.send_signal(how)
        await self.process.wait()
        await self.http.aclose()


def is_unlocked(path):
    """Whether the SQLite file can be written now."""
    with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as db:
        try:
            db.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            return False
        db.execute("ROLLBACK")
        return True


@pytest.fixture(autouse=True)
async def nothing_is_left():
    """Kill all orchestrators after a failed test, paused ones included."""
    yield
    for it in OrchestratorProcess.started:
        if it.process.returncode is None:
            it.process.kill()
            await it.process.wait()
        if it.http is not None:
            await it.http.aclose()
    OrchestratorProcess.started.clear()


@pytest.fixture
async def beating():
    """Served agents that send heartbeats to the orchestrator at `tell.url`."""

    class BeatingAgents:
        url = ""
        agents = ()

    tell, stack = BeatingAgents(), contextlib.AsyncExitStack()

    async def add(*agents):
        for agent in agents:
            agent.url = await stack.enter_async_context(serving(agent.app))
        tell.agents = (*tell.agents, *agents)

    async def beat():
        async with httpx.AsyncClient(timeout=1) as client:
            while True:
                await asyncio.gather(*(tell_of(agent, client) for agent in tell.agents))
                await asyncio.sleep(0.1)

    async def tell_of(agent, client):
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
            await client.post(f"{tell.url}/v1/workers/register", json=agent.heartbeat())

    tell.add = add
    loop = asyncio.create_task(beat())
    yield tell
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await stack.aclose()


@pytest.mark.thorough
@pytest.mark.parametrize(("loads", "kills"), [(200, 3)])
async def test_kills_at_random_moments_lose_nothing_and_load_nothing_twice(tmp_path, beating, loads, kills):
    agents = [FakeAgent(f"w{n}", slots=64) for n in range(4)]
    for agent in agents:
        agent.load_s = 0.01
    await beating.add(*agents)
    names = [f"adapter-{n}/v1" for n in range(loads)]
    moments = sorted(random.Random(5).sample(range(5, loads - 5), kills))

    def loaded():
        return [body["lora_id"] for agent in agents for verb, body in agent.calls if verb == "load_lora"]

    process = OrchestratorProcess(tmp_path, "only")
    await process.start()
    beating.url = process.url
    specs = [{"lora_id": name, "source": f"file:///{name}", "policy": {"loading": "eager"}} for name in names]
    await process.http.patch("/v1/policy", json={"loads_per_worker": 4})
    await process.http.post("/v1/adapters:batch", json={"adapters": specs})
    for moment in moments:
        await until(lambda moment=moment: len(loaded()) >= moment)
        await process.stop(signal.SIGKILL)
        await process.start()
        beating.url = process.url
    await until(lambda: sum(len(agent.loaded) for agent in agents) == len(names), within_s=30)
    assert Counter(loaded()) == Counter(names)
    assert not any(verb == "unload_lora" for agent in agents for verb, _ in agent.calls)

    async def are_ready():
        listed = (await process.http.get("/v1/adapters", params={"limit": 1000})).json()["data"]
        return {item["lora_id"]: item["status"]["state"] for item in listed} == dict.fromkeys(names, "ready")

    await until(are_ready)
    await process.stop()


@pytest.fixture(params=["postgresql", "kubernetes"])
async def shared(request, tmp_path, kube):  # noqa: F811
    """Flags for orchestrators that share lease and store."""
    if request.param == "postgresql":
        return database_flags(tmp_path, request.getfixturevalue("postgres_server").new_schema())
    client = await connect(kube.kubeconfig, environ={})
    await give_back_lease(client)
    await client.close()
    return {"lease": "kubernetes", "backend": "configmaps", "kubeconfig": kube.kubeconfig}


async def test_a_paused_leader_is_replaced_and_refused_when_it_wakes(tmp_path, beating, shared):
    agent = FakeAgent("w0", slots=8)
    await beating.add(agent)
    one, two = OrchestratorProcess(tmp_path, "one", **shared), OrchestratorProcess(tmp_path, "two", **shared)
    await one.start()
    await until(lambda: one.says("is_leading"))
    await two.start()
    assert (await one.says("is_leading"), await two.says("is_leading")) == (True, False)
    assert await two.says("leader") == one.url
    beating.url = two.url  # which hands everything on

    async def loaded_by(process, lora_id):
        await process.http.post("/v1/adapters", json={"lora_id": lora_id, "source": lora_id})
        answer = await process.http.post(f"/v1/adapters/{lora_id}/ensure", json={"wait_s": patience(8)})
        return answer.json()["ready"] == ["w0"]

    assert await loaded_by(two, "a/v1")
    assert (await two.http.get("/v1/adapters/a/v1")).json()["status"]["state"] == "ready"
    first = agent.epochs[-1]

    await one.pause()
    await until(lambda: two.says("is_leading"))
    assert await loaded_by(two, "b/v1")
    assert agent.epochs[-1] == agent.epoch > first

    os.kill(one.process.pid, signal.SIGCONT)

    async def has_heard():
        return await one.says("leader") == two.url and not await one.says("is_leading")

    await until(has_heard)
    headers = {"x-lorafleet-epoch": str(first)}
    async with client_of() as late:
        answer = await late.post(f"{agent.url}/v1/admin/unload_lora", json={"lora_id": "a/v1"}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "stale_epoch")
    assert await loaded_by(one, "c/v1")  # by way of the other
    assert [verb for verb, _ in agent.calls].count("load_lora") == 3
    assert set(agent.epochs) == {first, agent.epoch}

    beating.url = one.url
    await two.pause()
    await until(lambda: one.says("is_leading"))
    assert await loaded_by(one, "d/v1"), "who led before leads again"
    os.kill(two.process.pid, signal.SIGCONT)

    # With nobody left to lead for a moment, what is stored can still be read.
    await one.stop(signal.SIGKILL)
    await two.pause()
    third = OrchestratorProcess(tmp_path, "three", **shared)
    await third.start()

    async def is_known():
        return (await third.http.get("/v1/adapters/c/v1")).json().get("lora_id") == "c/v1"

    await until(is_known)
    await until(lambda: third.says("is_leading"))
    assert await is_known()
    await third.stop()
    await two.stop()


@pytest.mark.parametrize("pauses", [2, pytest.param(40, marks=pytest.mark.thorough)])
async def test_the_only_orchestrator_paused_past_its_lease_goes_on_in_the_same_term(tmp_path, beating, shared, pauses):
    agent = FakeAgent("w0", slots=64)
    await beating.add(agent)
    # Calls wait nearly as long for a late renewal, which at a busy API server may need a second try.
    lease_s = patience(0.8)
    flags = {"lease-duration-s": lease_s, "lease-renew-s": 0.1, "lease-margin-s": 0.1}
    only = OrchestratorProcess(tmp_path, "only", **shared, **flags)
    await only.start()
    beating.url = only.url
    await until(lambda: only.says("is_leading"))
    epoch = await only.says("epoch")
    for number in range(pauses):
        await only.pause()
        register = only.http.post("/v1/adapters", json={"lora_id": f"a{number}/v1", "source": f"a{number}"})
        calls = [asyncio.create_task(call) for call in (register, only.http.get("/v1/catalog"))]
        await asyncio.sleep(1.5 * lease_s)  # the time of the lease itself must pass
        os.kill(only.process.pid, signal.SIGCONT)
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [201, 200]
        loaded = await only.http.post(f"/v1/adapters/a{number}/v1/ensure", json={"wait_s": patience(8)})
        assert (loaded.status_code, loaded.json()["ready"]) == (200, ["w0"])
        assert await only.says("epoch") == epoch
    assert set(agent.epochs) == {epoch}
    await only.stop()


async def test_a_database_that_is_killed_or_hangs_and_a_killed_leader_lose_no_answered_change(
    tmp_path,
    own_postgres_server,  # noqa: F811
):
    """Two orchestrators, one of them killed, and the database killed, stopped past the lease, and started again."""
    server = own_postgres_server
    flags = database_flags(tmp_path, server.new_schema())
    one, two = OrchestratorProcess(tmp_path, "one", **flags), OrchestratorProcess(tmp_path, "two", **flags)
    await one.start()
    await until(lambda: one.says("is_leading"))
    await two.start()
    answered, epochs, is_over = [], {}, asyncio.Event()

    async def register():
        """Register adapters one after another at whichever orchestrator answers, and keep what was answered."""
        for number in range(10_000):
            for process in (one, two):
                with contextlib.suppress(httpx.HTTPError):
                    body = {"lora_id": f"a{number:04}/v1", "source": "x"}
                    answer = await process.http.post("/v1/adapters", json=body)
                    if answer.status_code == 201:
                        answered.append(body["lora_id"])
                        break
            if is_over.is_set():
                return

    async def watch():
        """Note which orchestrator leads in each epoch."""
        while not is_over.is_set():
            for process in (one, two):
                with contextlib.suppress(httpx.HTTPError):
                    health = (await process.http.get("/health")).json()
                    if health["is_leading"]:
                        epochs.setdefault(health["epoch"], set()).add(process.url)
            await asyncio.sleep(0.01)

    async def more_answers():
        count = len(answered)
        await until(lambda: len(answered) >= count + 5, within_s=20)

    works = [asyncio.create_task(register()), asyncio.create_task(watch())]
    await more_answers()
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    await more_answers()
    server.hang()
    await asyncio.sleep(1.5 * FLAGS["lease-duration-s"])  # the time of the lease itself must pass
    server.go_on()
    await more_answers()
    leader = one if await one.says("is_leading") else two
    leader.process.kill()
    await leader.process.wait()
    await more_answers()
    is_over.set()
    await asyncio.gather(*works)
    left = two if leader is one else one
    assert await left.says("is_leading")
    listed = (await left.http.get("/v1/adapters", params={"limit": 1000})).json()["data"]
    assert {item["lora_id"] for item in listed} >= set(answered)
    assert all(len(leaders) == 1 for leaders in epochs.values()), epochs
    await left.stop()
    assert PASSWORD not in (tmp_path / "stderr").read_text()


async def test_a_leader_that_is_stopped_hands_over_at_once_and_ends_its_calls_after(tmp_path, beating):
    agent, is_asked, go_on = FakeAgent("w0"), asyncio.Event(), asyncio.Event()
    inspect = agent.inspect_lora

    async def slow_inspect(body):
        is_asked.set()
        await go_on.wait()
        return await inspect(body)

    agent.inspect_lora = slow_inspect
    await beating.add(agent)
    # Neither the end of the lease nor that of the calls comes within this test.
    flags = {"lease-duration-s": 300, "lease-margin-s": 1, "stop-grace-s": 300}
    one, two = OrchestratorProcess(tmp_path, "one", **flags), OrchestratorProcess(tmp_path, "two", **flags)
    await one.start()
    await until(lambda: one.says("is_leading"))
    beating.url = one.url
    await two.start()
    await until(lambda: two.says("leader"))

    async def has_worker():
        return (await one.http.get("/v1/workers")).json()["data"]

    await until(has_worker)
    body = {"lora_id": "a/v1", "source": "a/v1"}
    dry_run = asyncio.create_task(one.http.post("/v1/adapters?dry_run=1", json=body, timeout=patience(60)))
    await asyncio.wait_for(is_asked.wait(), patience(20))
    one.process.send_signal(signal.SIGTERM)
    await until(lambda: two.says("is_leading"), within_s=10)
    assert one.process.returncode is None
    go_on.set()
    answer = await asyncio.wait_for(dry_run, patience(20))
    assert (answer.status_code, answer.json()["status"]["card"]["rank"]) == (200, 8)
    assert await asyncio.wait_for(one.process.wait(), patience(20)) == 0
    await two.stop()
