"""An orchestrator whose passes run on request, in front of served agents."""

import math
from contextlib import AsyncExitStack, suppress

import httpx
import pytest

from lorafleet.service.http.known_fields import WIRE_HEADERS
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from orchestrator.core.errors import OrchestratorUnavailable, StoreError
from tests.orchestrator.doubles import FakeAgent
from tests.orchestrator.reports import CountingRouter
from tests.serving import serving


class ManualClock:
    """Monotonic time that a test moves by hand."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class OrchestratorUnderTest:
    """The orchestrator's REST API, its reconciler, and its agents. No loop runs: `turn` is one pass."""

    def __init__(self, path, clock, **settings):
        self.clock = clock
        self.settings = OrchestratorSettings(store=path, settle_s=0, **settings)
        self.built = build(self.settings, clock=clock, wall=lambda: 1_800_000_000.0 + clock.now)
        self.reconciler = self.built.reconciler
        self.reconciler.reload_intent()
        self.built.leadership.lead_until(math.inf)
        self.store = self.built.store
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.built.app), base_url="http://orchestrator")
        self.agents = {}
        self.routers = {}
        self.stack = AsyncExitStack()

    async def worker(self, worker_id="w0", **shape):
        agent = FakeAgent(worker_id, **shape)
        await self.join(agent)
        return agent

    async def join(self, agent):
        if not agent.url:
            agent.url = await self.stack.enter_async_context(serving(agent.app))
        agent.key = agent.key or self.http.headers.get("authorization", "").removeprefix("Bearer ")
        self.agents[agent.worker_id] = agent
        await self.beat()

    async def beat(self):
        for agent in self.agents.values():
            answer = await self.http.post("/v1/workers/register", json=agent.heartbeat())
            assert answer.status_code == 200, answer.text

    async def turn(self):
        """Run heartbeats, a pass, and all its actions to their end; returns the actions."""
        await self.beat()
        actions = self.reconciler.run_pass()
        await self.reconciler.wait_for_actions()
        return actions

    async def settle(self, turns=30):
        """Run passes until one has no action; returns all actions."""
        done = []
        for _ in range(turns):
            actions = await self.turn()
            if not actions:
                return done
            done += actions
        raise AssertionError(f"still acting after {turns} passes: {actions}")

    async def register(self, lora_id="sql/v1", **spec):
        answer = await self.http.post("/v1/adapters", json={"lora_id": lora_id, "source": f"file:///{lora_id}"} | spec)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    async def ensure(self, lora_id="sql/v1", **ask):
        """As a router calls it."""
        return await self.http.post(f"/v1/adapters/{lora_id}/ensure", json=ask, headers=WIRE_HEADERS)

    async def adapter(self, lora_id="sql/v1"):
        return (await self.http.get(f"/v1/adapters/{lora_id}")).json()

    async def catalog(self):
        return (await self.http.get("/v1/catalog")).json()

    async def usage(self, revision_seen, *uses, router_id="r0", boot_id="b0", seq=1, **more):
        """Report a router's cumulative counts, see `CountingRouter.body`; the answer."""
        router = self.routers.setdefault((router_id, boot_id), CountingRouter(router_id, boot_id))
        body = router.body(revision_seen, uses, seq, **more)
        return (await self.http.post("/v1/usage", json=body)).raise_for_status().json()

    def check_catalog_is_whole(self):
        """The catalog, kept up to date by changes, lacks nothing that a look at every adapter finds."""
        if not self.store.is_read or self.store.trouble:
            return
        with suppress(StoreError, OrchestratorUnavailable):
            self.reconciler.queries.refresh_catalog()
            kept = dict(self.reconciler.catalog._adapters)
            self.store.changed_adapters.update(self.store.adapters, kept)
            self.reconciler.queries.refresh_catalog()
            assert self.reconciler.catalog._adapters == kept

    async def close(self):
        await self.http.aclose()
        await self.reconciler.stop()
        self.check_catalog_is_whole()
        await self.built.leadership.release()
        await self.built.client.aclose()
        self.built.book.close()
        self.store.close()
        await self.stack.aclose()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
async def open_service(tmp_path, clock):
    """Opens orchestrators on one store file and closes all at the end."""
    opened = []

    def make(path=tmp_path / "store.db", **settings):
        opened.append(OrchestratorUnderTest(path, clock, **settings))
        return opened[-1]

    yield make
    for service in opened:
        await service.close()


@pytest.fixture
async def service(open_service):
    return open_service()
