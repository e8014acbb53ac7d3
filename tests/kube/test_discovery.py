"""A router that finds its workers in EndpointSlices, through faults of the API server."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lorafleet.http_server.serve import bind
from lorafleet.kube.watch import WatchTimes
from lorafleet.local.tiny_model import make_model
from router.app import build
from router.config import RouterSettings
from tests.engines import start_engine
from tests.kube.conftest import KubeCluster
from tests.kube.places import SELECTOR, drop_slice, put_slice, slice_of
from tests.kube.status import ApiError
from tests.patience import patience, until, within
from tests.router.doubles import CHAT, AgentDouble, EngineDouble, with_sql
from tests.serving import serving

# As in production, and quicker where it is about waiting.
QUICK = WatchTimes(watch_s=(1.0, 1.5), silent_s=0.3, pause_s=(0.02, 0.2), steady_s=0.3, call_s=0.3)
# No watch ends by itself, and none falls silent, on however slow a machine.
STEADY = WatchTimes(watch_s=(600.0, 900.0), silent_s=300.0, pause_s=(0.02, 0.2), steady_s=0.3, call_s=30.0)

# The router's own settings, but for a rarer poll.
AGENT_WAITS = {"metadata_poll_s": 5.0, "control_timeout_s": 5.0, "unreachable_after_s": 10.0, "connect_timeout_s": 2.0}


@dataclass
class DiscoveredFleet:
    """A router, its workers, and the API server that names them."""

    kube: KubeCluster
    control: AgentDouble
    agents: dict[str, str] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    client: httpx.AsyncClient | None = None
    parts: object = None
    now: float = 0.0  # added to the clock of discovery
    refused: Counter[str] = field(default_factory=Counter)  # worker -> how often nobody answered for its agent

    async def name(self, worker: str, *, pod: str = "", **how) -> None:
        """Have the API server name it, as it is now."""
        how = {"agent": self.agents[worker], "engine": self.control.workers[worker]} | how
        await put_slice(self.kube, slice_of(pod or worker, **{"namespace": self.kube.namespace, **how}))

    async def unname(self, worker: str) -> None:
        await drop_slice(self.kube, slice_of(worker, agent="http://x:1", namespace=self.kube.namespace))

    @property
    def discovery(self):
        return self.parts.discovery

    @property
    def named(self):
        """By slices, as the router knows them."""
        return self.discovery.slices.workers

    def states(self):
        return {str(id_): replica.state for id_, replica in self.discovery.fleet.replicas.items()}

    def ending(self):
        """Workers whose pods are being ended."""
        return {str(id_) for id_, replica in self.discovery.fleet.replicas.items() if replica.is_ending}

    async def until(self, predicate, within_s=5.0):
        assert await self.discovery.changes.until(predicate, timeout_s=patience(within_s)), self.states()

    async def worker_of(self, body=CHAT):
        answer = await self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-lorafleet-worker"]


def agent_app(control: AgentDouble, worker: str, answers: dict[str, str], refused: Counter[str]) -> Starlette:
    """One worker's agent at an address of its own, as a pod has it; `answers` says who is there instead, if anybody."""

    async def metadata(request: Request):
        name = answers.get(worker, worker)
        if not name:
            refused[worker] += 1
            return Response(status_code=503)
        said = control.metadata(name).model_copy(update={"agent_url": str(request.base_url).rstrip("/")})
        return Response(said.model_dump_json(), media_type="application/json")

    async def files(_request):
        return Response('{"base_model": "tiny-qwen", "files": {}}', media_type="application/json")

    return Starlette(routes=[Route("/metadata", metadata), Route("/v1/model/files", files)])


@contextlib.asynccontextmanager
async def many_agents(control: AgentDouble, names: list[str]) -> AsyncIterator[list[str]]:
    """Their URLs: one server that listens on a port for each, and is whoever is asked there."""
    socks = [bind("127.0.0.1", 0) for _ in names]
    urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in socks]
    by_url = dict(zip(urls, names, strict=True))

    async def metadata(request: Request):
        url = str(request.base_url).rstrip("/")
        said = control.metadata(by_url[url]).model_copy(update={"agent_url": url})
        return Response(said.model_dump_json(), media_type="application/json")

    server = uvicorn.Server(uvicorn.Config(Starlette(routes=[Route("/metadata", metadata)]), log_config=None))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(socks)
    yield urls
    for listener in server.servers:
        listener.close()
    for connection in list(server.server_state.connections):
        connection.shutdown()
    for sock in socks:
        sock.close()


@contextlib.asynccontextmanager
async def running(
    kube: KubeCluster, *engines, control=None, named=(), times: WatchTimes = QUICK, **settings
) -> AsyncIterator[DiscoveredFleet]:
    """`named`: the workers that the catalog names; all others are known to the API server alone."""
    control = control or AgentDouble()
    control.named = frozenset(named)
    async with contextlib.AsyncExitStack() as stack:
        it = DiscoveredFleet(kube, control)
        for engine in engines:
            control.workers[engine.name] = await stack.enter_async_context(serving(engine.app, host=kube.host))
            agent = agent_app(control, engine.name, it.answers, it.refused)
            it.agents[engine.name] = await stack.enter_async_context(serving(agent, host=kube.host))
        control.url = await stack.enter_async_context(serving(control.app))
        config = RouterSettings(
            **{
                "orchestrator_url": control.url,
                "kube_selector": SELECTOR,
                "kubeconfig": kube.kubeconfig,
                "metadata_poll_s": 0.1,
                "catalog_poll_s": 0.1,
                "tokenizer": "remote",
                "failover_wait_s": 1.0,
                **settings,
            }
        )
        app, it.parts = build(config)
        it.discovery.slices.times = times
        it.discovery.clock = lambda: time.monotonic() + it.now
        url = await stack.enter_async_context(serving(app, http=app.state.http))
        it.client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=patience(10)))
        yield it


async def test_a_worker_that_only_slices_list_is_followed(kube):
    async with running(kube, EngineDouble("w0"), control=with_sql("w0")) as fleet:
        await fleet.until(fleet.discovery.is_synced)
        assert fleet.discovery.fleet.replicas == {}
        await fleet.name("w0", zone="eu-1a", node="n7")
        await fleet.until(lambda: fleet.states() == {"w0": "ready"})
        assert await fleet.worker_of() == "w0"
        assert await fleet.worker_of(CHAT | {"model": "sql/v1"}) == "w0"
        (follow,) = fleet.discovery.followed.values()
        assert (follow.metadata.zone, follow.metadata.node) == ("eu-1a", "n7"), "where the agent knows none"


async def test_a_worker_in_catalog_and_slices_is_one_replica(kube):
    async with running(kube, EngineDouble("w0"), EngineDouble("w1"), named=["w0", "w1"]) as fleet:
        await fleet.name("w0")
        await fleet.name("w1")
        await fleet.until(lambda: fleet.states() == {"w0": "ready", "w1": "ready"})
        before = dict(fleet.discovery.followed)
        await fleet.name("w0", zone="b")
        await fleet.until(lambda: getattr(fleet.named.get("w0"), "zone", "") == "b")
        assert dict(fleet.discovery.followed) == before


@pytest.mark.parametrize("named", [(), ("w0",)])
async def test_a_terminating_endpoint_gets_no_new_requests_and_finishes_its_own(kube, named):
    slow, other = EngineDouble("w0"), EngineDouble("w1")
    async with running(kube, slow, other, named=named) as fleet:
        await fleet.name("w0")
        await fleet.until(lambda: fleet.states() == {"w0": "ready"})
        slow.go_on.clear()
        async with fleet.client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            pieces = answer.aiter_raw()
            await anext(pieces)
            await fleet.name("w1")
            await fleet.until(lambda: fleet.states().get("w1") == "ready")
            await fleet.name("w0", terminating=True)
            await fleet.until(lambda: fleet.states() == {"w0": "draining", "w1": "ready"})
            assert {await fleet.worker_of() for _ in range(10)} == {"w1"}
            await fleet.unname("w0")
            await fleet.until(lambda: "w0" not in fleet.named)
            assert fleet.states()["w0"] == "draining", "a pod that ends does not come back by being forgotten"
            slow.go_on.set()
            rest = b"".join([piece async for piece in pieces])
            assert b"[DONE]" in rest


async def test_a_new_pod_of_the_same_name_replaces_the_ended_one(kube):
    async with running(kube, EngineDouble("w0"), unreachable_after_s=0.3) as fleet:
        await fleet.name("w0")
        await fleet.until(lambda: fleet.states() == {"w0": "ready"})
        await fleet.name("w0", terminating=True)
        await fleet.until(lambda: fleet.ending() == {"w0"})
        async with serving(agent_app(fleet.control, "w0", {}, Counter()), host=kube.host) as moved:
            fleet.answers["w0"] = ""
            await fleet.name("w0", agent=moved)
            await fleet.until(lambda: fleet.states() == {"w0": "ready"} and not fleet.ending())


async def test_a_terminating_pod_serves_while_its_base_model_has_no_other(kube):
    async with running(kube, EngineDouble("w0"), EngineDouble("w1")) as fleet:
        await fleet.name("w0")
        await fleet.name("w1", terminating=True)
        await fleet.until(lambda: fleet.states() == {"w0": "ready", "w1": "draining"})
        await fleet.name("w0", terminating=True)
        await fleet.until(lambda: fleet.ending() == {"w0", "w1"})
        assert {await fleet.worker_of() for _ in range(10)} <= {"w0", "w1"}
        fleet.control.starting = frozenset({"w0"})
        await fleet.until(lambda: fleet.states() == {"w0": "starting", "w1": "ready"})
        assert await fleet.worker_of() == "w1"
        await fleet.name("w0")
        fleet.control.starting = frozenset()
        await fleet.until(lambda: fleet.states() == {"w0": "ready", "w1": "draining"})


async def test_the_former_agents_catalog_state_does_not_block_a_new_agent(kube):
    async with running(kube, EngineDouble("w0"), named=["w0"]) as fleet:
        await fleet.until(lambda: fleet.states() == {"w0": "ready"})
        fleet.control.drained = {"w0": "another"}
        fleet.control.tell()
        await fleet.until(lambda: fleet.discovery.followed["w0"].source.drained == "another")
        assert fleet.states() == {"w0": "ready"}
        for boot_id in ("a", ""):
            fleet.control.drained = {"w0": boot_id}
            fleet.control.tell()
            await fleet.until(lambda boot_id=boot_id: fleet.discovery.followed["w0"].source.drained == boot_id)
            assert fleet.states() == {"w0": "draining"}


@pytest.mark.parametrize("how", ["deleted", "its label went", "a list without it"])
async def test_a_worker_gone_from_slices_is_used_while_it_answers(kube, how):
    async with running(kube, EngineDouble("w0"), unreachable_after_s=0.2) as fleet:
        await fleet.name("w0")
        await fleet.until(lambda: fleet.states() == {"w0": "ready"})
        if how == "a list without it":
            await kube.faults.go_down()
        if how == "its label went":
            await fleet.name("w0", labels={})
        else:
            await fleet.unname("w0")
        if how == "a list without it":
            await kube.faults.come_back()
        await until(lambda: not fleet.named)
        heard = fleet.discovery.followed["w0"].heard_at
        await fleet.until(lambda: fleet.discovery.followed["w0"].heard_at > heard + 0.3)
        assert await fleet.worker_of() == "w0"
        fleet.answers["w0"] = ""
        # Three looks, 0.1 s apart: its agent is silent for longer than `unreachable_after_s`.
        await until(lambda: fleet.refused["w0"] >= 4)
        assert await fleet.worker_of() == "w0", "its engine answers: an agent's restart moves nothing"


async def test_an_unlisted_worker_that_does_not_answer_is_dropped(kube):
    engine = EngineDouble("w0")
    async with running(kube, engine, unreachable_after_s=0.2) as fleet:
        await fleet.name("w0")
        await fleet.until(lambda: fleet.states() == {"w0": "ready"})
        fleet.answers["w0"], engine.healthy = "", False
        await fleet.until(lambda: fleet.states() == {"w0": "unreachable"})
        await fleet.unname("w0")
        await fleet.until(lambda: fleet.states() == {})


async def test_an_unreachable_api_server_changes_nothing_and_is_asked_rarely(kube):
    async with running(kube, EngineDouble("w0"), EngineDouble("w1")) as fleet:
        await fleet.name("w0")
        await fleet.name("w1")
        await fleet.until(lambda: fleet.states() == {"w0": "ready", "w1": "ready"})
        follows = dict(fleet.discovery.followed)
        await kube.faults.go_down()
        for _ in range(10):
            await fleet.worker_of()
        assert dict(fleet.discovery.followed) == follows
        clock = asyncio.get_running_loop().time
        asked, began = len(kube.ours.requests), clock()
        kube.faults.refuse(503, retry_after_s=0)
        await kube.faults.come_back()
        await until(lambda: len(kube.ours.requests) >= asked + 8)
        # Pauses of 0.1 to 0.2 s; with production's times that is one look in 2.5 to 5 s.
        assert clock() - began >= 6 * 0.1
        kube.faults.refuse(None)
        await fleet.name("w1", terminating=True)
        await fleet.until(lambda: fleet.states() == {"w0": "ready", "w1": "draining"})
        assert (await fleet.client.get("/ready")).status_code == 200


@pytest.mark.slow
async def test_a_silent_watch_is_noticed_while_requests_go_on(kube):
    async with running(kube, EngineDouble("w0"), EngineDouble("w1")) as fleet:
        await fleet.name("w0")
        await fleet.name("w1")
        await fleet.until(lambda: fleet.states() == {"w0": "ready", "w1": "ready"})
        kube.faults.freeze()
        await fleet.name("w1", terminating=True)
        lists = kube.ours.count("list")
        async with within(10):
            while kube.ours.count("list") == lists:
                await fleet.worker_of()
        assert fleet.states() == {"w0": "ready", "w1": "ready"}, "as last known"
        kube.faults.thaw()
        await fleet.until(lambda: fleet.states() == {"w0": "ready", "w1": "draining"})


async def test_a_router_without_an_api_server_becomes_ready_by_the_catalog(kube):
    await kube.faults.go_down()
    async with running(kube, EngineDouble("w0"), named=["w0"]) as fleet:
        await fleet.until(lambda: fleet.states() == {"w0": "ready"})
        said = await fleet.client.get("/ready")
        assert said.status_code == 503
        assert said.json()["error"]["message"] == "waiting for the first list of EndpointSlices"
        assert await fleet.worker_of() == "w0", "whoever asks is served all the same"
        fleet.now += 10.0
        assert (await fleet.client.get("/ready")).status_code == 200
        await kube.faults.come_back()
        await fleet.until(lambda: fleet.discovery.slices.is_synced)
        assert (await fleet.client.get("/ready")).status_code == 200


async def test_a_forbidden_namespace_does_not_affect_the_others(kube, tmp_path):
    server = kube.ours
    for name in ("a", "b"):
        server.objects.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    server.tokens["t"] = "router"
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    server.grant("router", "a", [rule])
    path = server.kubeconfig(tmp_path / "of-the-router", token="t")
    async with running(
        kube, EngineDouble("w0"), EngineDouble("w1"), kubeconfig=path, kube_namespaces=("a", "b")
    ) as fleet:
        await fleet.name("w0", namespace="a")
        await fleet.name("w1", namespace="b")
        await fleet.until(lambda: fleet.states() == {"w0": "ready"})
        assert not fleet.discovery.slices.is_synced
        server.grant("router", "b", [rule])
        await fleet.until(lambda: fleet.states() == {"w0": "ready", "w1": "ready"})
        assert fleet.discovery.slices.is_synced


async def test_a_worker_goes_by_its_agents_name_in_slices_and_catalog(kube):
    async with running(kube, EngineDouble("w0")) as fleet:
        await fleet.name("w0", pod="some-pod")
        await fleet.until(lambda: fleet.states() == {"w0": "ready"})
        fleet.control.named = None
        fleet.control.tell()
        await fleet.until(lambda: fleet.discovery.catalog_ids == {"w0"})
        assert fleet.states() == {"w0": "ready"}
        await fleet.name("w0", pod="some-pod", terminating=True)
        await fleet.until(lambda: fleet.ending() == {"w0"})
        await fleet.unname("some-pod")
        await fleet.until(lambda: not fleet.named)
        assert fleet.ending() == {"w0"}


async def test_an_address_reused_by_another_worker_does_not_answer_for_the_old(kube):
    w0 = EngineDouble("w0")
    async with running(kube, w0, EngineDouble("w1"), named=["w0", "w1"], unreachable_after_s=0.2) as fleet:
        await fleet.name("w0")
        await fleet.name("w1")
        await fleet.until(lambda: fleet.states() == {"w0": "ready", "w1": "ready"})
        w0.healthy, fleet.answers["w0"], fleet.control.silent = False, "w1", True
        await fleet.until(lambda: fleet.states() == {"w0": "unreachable", "w1": "ready"})
        await fleet.until(lambda: fleet.discovery.fleet.replicas["w1"].agent_url == fleet.agents["w1"])
        assert fleet.states() == {"w0": "unreachable", "w1": "ready"}


@pytest.mark.fleet
async def test_an_agentless_engine_is_served_at_its_slice_address(kube, tmp_path):
    engine = await asyncio.to_thread(start_engine, "sim", make_model(tmp_path / "model"), host=kube.host)
    try:
        async with running(kube, orchestrator_url="") as fleet:
            await put_slice(kube, slice_of("w0", engine=engine.url, namespace=kube.namespace, zone="a"))
            await fleet.until(lambda: fleet.states() == {"w0": "ready"})
            assert await fleet.worker_of(CHAT | {"max_tokens": 2}) == "w0"
            (follow,) = fleet.discovery.followed.values()
            assert follow.metadata.zone == "a"
    finally:
        engine.stop()


@pytest.mark.slow
async def test_three_hundred_flapping_endpoints_cost_little_and_fail_no_request(kube):
    """Nodes whose word comes and goes: slices are written, emptied, deleted and made again many times a second."""
    server, control, chance = kube.ours, AgentDouble(), random.Random(1)
    names = [f"w{number}" for number in range(300)]
    async with contextlib.AsyncExitStack() as stack:
        engine = EngineDouble("any")
        url = await stack.enter_async_context(serving(engine.app))
        control.workers = dict.fromkeys(names, url)
        agents = await stack.enter_async_context(many_agents(control, names))
        # One loop answers for all agents, so that their answers take long on a busy machine.
        waits = {name: patience(seconds) for name, seconds in AGENT_WAITS.items()}
        fleet = await stack.enter_async_context(running(kube, control=control, times=STEADY, **waits))
        fleet.agents = dict(zip(names, agents, strict=True))
        for name in names:
            await fleet.name(name)
        await fleet.until(lambda: len(fleet.states()) == 300, within_s=20)
        follows = dict(fleet.discovery.followed)
        asked = len(server.requests)
        for _ in range(30):
            for name in chance.sample(names, 40):
                if name in fleet.named and chance.random() < 0.3:
                    with contextlib.suppress(ApiError):
                        await fleet.unname(name)
                else:
                    await fleet.name(name, ready=chance.random() < 0.5)
            if chance.random() < 0.1:
                kube.faults.drop_watches()
            await fleet.worker_of()
        assert dict(fleet.discovery.followed) == follows, "whoever answers is followed on, by the same follower"
        # A watch and, after each cut, a list; what flaps is told by the watch and costs no request.
        assert len(server.requests) - asked <= 40
