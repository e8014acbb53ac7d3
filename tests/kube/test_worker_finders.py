"""An orchestrator that finds its workers in EndpointSlices."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

import pytest

from lorafleet.engine.worker_proofs import AgentProofs
from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.own_key import OwnKey
from lorafleet.kube.access import KubeConfig
from lorafleet.kube.client import open_client
from lorafleet.kube.discovery import SliceWatch
from lorafleet.kube.watch import WatchTimes
from lorafleet.local.tiny_model import make_model
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.worker_finders import KubeWorkerFinder
from tests.engines import start_engine
from tests.kube.places import LABELS, SELECTOR, drop_slice, put_slice, slice_of
from tests.orchestrator.conftest import ManualClock, OrchestratorUnderTest
from tests.orchestrator.doubles import FakeAgent
from tests.patience import patience, until
from tests.serving import client_of, serving

QUICK = WatchTimes(watch_s=(1.0, 1.5), silent_s=0.3, pause_s=(0.02, 0.2), steady_s=0.3, call_s=0.3)


async def epoch_one():
    return 1


class SliceOrchestrator(OrchestratorUnderTest):
    """Its agents send no heartbeat unless they are made to: what is known of them was asked."""

    def __init__(self, path, kube, **settings):
        super().__init__(path, ManualClock(), **settings)
        self.kube = kube
        self.slices = SliceWatch(
            partial(open_client, KubeConfig(kube.kubeconfig)), selector=SELECTOR, namespaces=(), times=QUICK
        )
        self.pokes = asyncio.Event()
        self.client = client_of()
        proofs = AgentProofs(ApiKeys(()), None, 1.0, self.clock)
        self.agent_client = AgentClient(self.client, agent_key=OwnKey(), proofs=proofs, epoch=epoch_one)
        self.finder = KubeWorkerFinder(
            self.slices,
            reports=self.reconciler.reports,
            agents=self.agent_client,
            on_report=self.reconciler.monitor.record_heartbeat,
            request_pass=self.pokes.set,
            timeout_s=0.5,
            again_s=0.1,
        )

    async def beat(self):
        """Agents that are there are asked instead."""
        for worker_id, entry in self.reconciler.reports.workers.items():
            if worker_id in self.agents and entry.reach == "heard":
                self.reconciler.monitor.record_heartbeat(
                    await self.agent_client.metadata(entry.report.agent_url, timeout_s=5)
                )

    async def pod(self, worker_id, *, holds=(), **shape):
        """One that runs, holds these adapters, and is named."""
        agent = self.agents[worker_id] = FakeAgent(worker_id, **shape)
        for lora_id in holds:
            agent.put(lora_id, f"file:///{lora_id}")
        agent.url = await self.stack.enter_async_context(serving(agent.app, host=self.kube.host))
        await self.name(worker_id)
        return agent

    async def name(self, worker_id, **how):
        how = {"agent": self.agents[worker_id].url, "namespace": self.kube.namespace} | how
        await put_slice(self.kube, slice_of(worker_id, **how))

    async def until(self, predicate):
        await until(predicate)

    def states(self):
        return {name: worker.state for name, worker in self.reconciler.queries.observe().workers.items()}

    def holders(self):
        return {name: sorted(agent.loaded) for name, agent in self.agents.items()}


@pytest.fixture
async def service(kube, tmp_path) -> AsyncIterator[SliceOrchestrator]:
    found = SliceOrchestrator(tmp_path / "store.db", kube)
    loop = asyncio.create_task(found.finder.run())
    yield found
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await found.client.aclose()
    await found.close()


async def test_a_fresh_orchestrator_knows_the_fleet_before_any_heartbeat(service):
    for name, holds in (("w0", ()), ("w1", ("sql/v1",)), ("w2", ())):
        await service.pod(name, holds=holds)
    await service.until(lambda: len(service.states()) == 3)
    assert service.states() == {"w0": "ready", "w1": "ready", "w2": "ready"}
    assert service.reconciler.reports.workers["w1"].report.lora.loaded_loras[0].lora_id == "sql/v1"
    assert service.pokes.is_set() or service.reconciler.is_pass_due, "a pass is due"


async def test_a_pod_is_asked_until_its_agent_listens(service):
    agent = FakeAgent("w0")
    async with serving(agent.app, host=service.kube.host) as url:
        pass
    service.agents["w0"] = agent
    agent.url = url
    await service.name("w0", ready=False)
    await service.until(lambda: service.slices.workers)
    assert service.states() == {}
    async with serving(agent.app, host=service.kube.host, port=int(url.rpartition(":")[2])):
        await service.until(lambda: service.states() == {"w0": "ready"})


async def test_zone_and_node_come_from_slices_where_the_agent_reports_none(service):
    await service.pod("w0")
    await service.pod("w1", zone="own", node="mine")
    await service.name("w0", zone="a", node="n1")
    await service.name("w1", zone="a", node="n1")
    await service.until(lambda: len(service.states()) == 2)
    await service.until(lambda: service.reconciler.queries.observe().workers["w0"].node == "n1")
    await service.beat()
    workers = service.reconciler.queries.observe().workers
    assert {name: (worker.zone, worker.node) for name, worker in workers.items()} == {
        "w0": ("a", "n1"),
        "w1": ("own", "mine"),
    }
    item = (await service.http.get("/v1/workers/w0")).json()
    assert (item["zone"], item["node"], item["is_terminating"]) == ("a", "n1", False)


async def test_adapters_of_a_terminating_worker_are_placed_elsewhere_at_once(service):
    for number in range(3):
        await service.pod(f"w{number}")
    await service.until(lambda: len(service.states()) == 3)
    await service.register()
    await service.ensure()
    await service.settle()
    (holder,) = [name for name, held in service.holders().items() if held]
    empty = next(name for name, held in service.holders().items() if not held)
    await service.name(empty, terminating=True)
    await service.until(lambda: service.states()[empty] == "draining")
    service.pokes.clear()
    await service.name(holder, terminating=True)
    await asyncio.wait_for(service.pokes.wait(), patience(5))
    assert service.states()[holder] == "draining"
    assert (await service.adapter())["status"]["workers"] == [], "nobody sends requests there any more"
    for _ in range(8):  # time enough for a drain to end
        await service.turn()
        service.clock.now += 1.0
    assert sum(held == ["sql/v1"] for held in service.holders().values()) == 2, "a new copy, and the old one stays"
    assert "sql/v1" in service.agents[holder].loaded
    assert not service.agents[empty].loaded
    for name in (holder, empty):
        assert not {"unload_lora", "drain"} & {verb for verb, _ in service.agents[name].calls}
    catalog = {worker["id"]: worker["state"] for worker in (await service.catalog())["workers"]}
    assert catalog[holder] == "draining", "for routers that follow no slices"
    assert (await service.http.get(f"/v1/workers/{holder}")).json()["is_terminating"] is True
    await drop_slice(service.kube, slice_of(holder, agent="http://x:1", namespace=service.kube.namespace))
    await service.until(lambda: holder not in service.slices.workers)
    assert service.states()[holder] == "draining", "a pod that ends does not come back by being forgotten"


@pytest.mark.parametrize("how", ["deleted", "labels went", "listed empty after an outage"])
async def test_workers_gone_from_slices_keep_everything_while_they_answer(service, kube, how):
    for number in range(3):
        await service.pod(f"w{number}")
    await service.until(lambda: len(service.states()) == 3)
    for name in ("a/v1", "b/v1"):
        await service.register(name)
        await service.ensure(name)
    await service.settle()
    held = service.holders()
    calls = {name: len(agent.calls) for name, agent in service.agents.items()}
    if how == "listed empty after an outage":
        await kube.faults.go_down()
    for name in service.agents:
        if how == "labels went":
            await service.name(name, labels={})
        else:
            await drop_slice(kube, slice_of(name, agent="http://x:1", namespace=kube.namespace))
    if how == "listed empty after an outage":
        await kube.faults.come_back()
    await service.until(lambda: not service.slices.workers)
    assert await service.settle() == []
    assert service.states() == {"w0": "ready", "w1": "ready", "w2": "ready"}
    assert service.holders() == held
    assert {name: len(agent.calls) for name, agent in service.agents.items()} == calls


async def test_a_worker_gone_from_slices_that_does_not_answer_is_lost(service):
    async with contextlib.AsyncExitStack() as stack:
        for name in ("w0", "w1"):
            agent = service.agents[name] = FakeAgent(name)
            where = stack if name == "w0" else service.stack
            agent.url = await where.enter_async_context(serving(agent.app, host=service.kube.host))
            await service.name(name)
        await service.until(lambda: len(service.states()) == 2)
        agents = dict(service.agents)
        await service.register("a/v1", policy={"loading": "eager", "min_replicas": 2})
        await service.settle()
        assert service.holders() == {"w0": ["a/v1"], "w1": ["a/v1"]}
    del service.agents["w0"]
    await drop_slice(service.kube, slice_of("w0", agent="http://x:1", namespace=service.kube.namespace))
    await service.until(lambda: "w0" not in service.slices.workers)
    service.clock.now += service.settings.lost_after_s
    await service.turn()
    assert service.states() == {"w0": "lost", "w1": "ready"}
    assert sorted(agents["w1"].loaded) == ["a/v1"]


@contextlib.asynccontextmanager
async def ready(service):
    """The agent of worker w0, which has been heard; it ends with the block."""
    agent = service.agents["w0"] = FakeAgent("w0")
    async with serving(agent.app, host=service.kube.host) as agent.url:
        await service.name("w0")
        await service.until(lambda: service.states() == {"w0": "ready"})
        yield agent


async def test_a_restarted_pod_is_asked_at_its_new_address(service):
    async with ready(service):
        pass
    await service.name("w0", terminating=True)
    service.clock.now += service.settings.lost_after_s
    service.agents = {}
    await service.turn()
    assert service.states() == {"w0": "lost"}
    await service.pod("w0")
    await service.until(lambda: service.states() == {"w0": "ready"})


async def test_a_terminated_pod_is_dropped_as_soon_as_it_is_gone(service):
    async with ready(service) as agent:
        await service.name("w0", terminating=True)
        await service.until(lambda: service.states() == {"w0": "draining"})
    service.clock.now += service.settings.lost_after_s
    service.agents = {}
    await service.turn()
    assert service.states() == {"w0": "lost"}, "its pod is still there"
    await drop_slice(service.kube, slice_of("w0", agent=agent.url, namespace=service.kube.namespace))
    await service.until(lambda: not service.slices.workers)
    await service.turn()
    assert service.states() == {}
    assert service.reconciler.catalog.catalog_json()[1].count(b"w0") == 0


async def test_a_worker_named_differently_than_its_pod_has_the_pods_zone(service):
    agent = service.agents["w0"] = FakeAgent("w0")
    agent.url = await service.stack.enter_async_context(serving(agent.app, host=service.kube.host))
    await put_slice(service.kube, slice_of("some-pod", agent=agent.url, zone="a", namespace=service.kube.namespace))
    await service.until(lambda: service.states() == {"w0": "ready"})
    await service.until(lambda: service.reconciler.queries.observe().workers["w0"].zone == "a")
    terminating = slice_of("some-pod", agent=agent.url, terminating=True, namespace=service.kube.namespace)
    await put_slice(service.kube, terminating)
    await service.until(lambda: service.states() == {"w0": "draining"})


async def listed(browser):
    return (await browser.get("/v1/workers")).json()["data"]


async def test_a_kube_selector_makes_the_orchestrator_follow_slices_and_show_their_age(kube, tmp_path):
    async with open_client(KubeConfig(kube.kubeconfig)) as client:
        settings = OrchestratorSettings(
            store=tmp_path / "store.db", kube_selector=SELECTOR, kubeconfig=kube.kubeconfig, settle_s=0
        )
        agent = FakeAgent("w0")
        async with serving(agent.app, host=kube.host) as agent.url:
            await put_slice(kube, slice_of("w0", agent=agent.url, namespace=kube.namespace))
            built = build(settings, kube=client)
            async with serving(built.app) as url, client_of(url) as browser:
                await until(lambda: listed(browser))
                metrics = (await browser.get("/metrics")).text
    (line,) = [line for line in metrics.splitlines() if line.startswith("lorafleet_orchestrator_slices_age_seconds ")]
    assert float(line.split()[1]) < 30


@pytest.mark.fleet
async def test_an_agentless_engine_is_in_the_fleet_by_its_slice(kube, tmp_path):
    engine = await asyncio.to_thread(start_engine, "sim", make_model(tmp_path / "model"), host=kube.host)
    try:
        async with open_client(KubeConfig(kube.kubeconfig)) as client:
            settings = OrchestratorSettings(
                store=tmp_path / "store.db", kube_selector=SELECTOR, heartbeat_interval_s=0.1
            )
            labels = LABELS | {"lorafleet.io/pool": "old"}
            slice_ = slice_of("w0", engine=engine.url, namespace=kube.namespace, zone="a", labels=labels)
            await put_slice(kube, slice_)
            built = build(settings, kube=client)
            async with serving(built.app) as url, client_of(url) as browser:
                found = await until(lambda: listed(browser))
                (entry,) = built.reconciler.reports.workers.values()
        assert (found[0]["id"], found[0]["state"], found[0]["zone"]) == ("w0", "ready", "a")
        assert entry.report.pool == "old"
    finally:
        engine.stop()
