"""Requests of the last release, sent to today's services: accepted, and answered with every field of then."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorafleet.local.tiny_model import make_adapters, make_model
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from tests.patience import patience, until
from tests.serving import client_of, serving
from tests.wire.record import AGENT, BASE, ENGINE, FOLDER, PROMPT, QUOTED_SHELF, SHELF, SLOTS, WORKER, quoted
from tests.wire.replay import WireReplay
from tests.wire.session import AnswerCheck, Exchange, field_paths, filled, load_session
from tests.wire.wire_types import load_snapshot
from tests.workers.running import RunningWorker, sim_inside
from workers.config import AgentTimers

ADVICE = (
    "A service of the last release sends this, or needs that field, and both releases run together during an upgrade."
    " Keep the old form beside the new one for a release, see tests/wire/agreed.py."
)


@dataclass(slots=True)
class TodaysAgent:
    """An agent of today on a sim engine, and the texts that stand for it in recorded sessions."""

    client: httpx.AsyncClient
    engine: str
    texts: dict[str, str]

    async def complete(self, *_: object) -> None:
        """One request at its engine, whose blocks are then in the KV ledger."""
        body = {"model": BASE, "prompt": [number + len(self.texts) for number in PROMPT], "max_tokens": 1}
        async with client_of(self.engine) as client:
            (await client.post("/v1/completions", json=body)).raise_for_status()

    async def has_found_its_adapters(self) -> bool:
        return (await self.client.get("/metadata")).json()["lora"]["available_count"] > 0


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[TodaysAgent]:
    model, shelf = make_model(tmp_path / "model"), tmp_path / "adapters"
    make_adapters(shelf)
    worker = RunningWorker(model, shelf, tmp_path, "--engine", "sim", *SLOTS, "--instance-id", WORKER)
    timers = AgentTimers(quiet_s=0.1)
    async with (
        sim_inside(model, *SLOTS) as engine,
        worker.inside("--engine-url", engine, timers=timers) as client,
    ):
        url = str(client.base_url).rstrip("/")
        texts = {AGENT: url, ENGINE: engine, SHELF: str(shelf), QUOTED_SHELF: quoted(shelf), FOLDER: str(tmp_path)}
        found = TodaysAgent(client, engine, texts)
        await until(found.has_found_its_adapters, what="the agent has scanned its folder of adapters")
        yield found


def assert_none(problems: list[str]) -> None:
    assert not problems, "\n".join([*problems, ADVICE])


async def test_an_agent_serves_orchestrators_and_routers_of_the_last_release(agent: TodaysAgent) -> None:
    check = AnswerCheck(load_snapshot())
    await agent.complete()

    async def is_ready(_: Exchange) -> None:
        """Calls that change the agent answer when they are done, so nothing is to be waited for."""

    replay = WireReplay(agent.client, check, agent.texts, before=is_ready)
    await replay.run(load_session("orchestrator-to-agent", "router-to-agent"), at_end=agent.complete)
    assert_none(check.problems)


async def test_an_orchestrator_serves_agents_and_routers_of_the_last_release(
    agent: TodaysAgent, tmp_path: Path
) -> None:
    check = AnswerCheck(load_snapshot())
    service = build_orchestrator(OrchestratorSettings(store=tmp_path / "store.db", settle_s=0, pass_interval_s=0.2))
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(service.app))
        stack.callback(service.stop)
        client = await stack.enter_async_context(client_of(url, timeout=patience(20)))
        await until(lambda: service.leadership.is_leading, what="the orchestrator leads")
        operator = RecordedIntent(client, agent.texts)
        replay = WireReplay(client, check, agent.texts, before=operator.bring_about)
        await replay.run(load_session("agent-to-orchestrator", "router-to-orchestrator"))
        await asyncio.gather(*operator.asking)
    assert_none(check.problems)


@dataclass(slots=True)
class RecordedIntent:
    """An operator who wants what the recorded catalogs show, and asks what the recorded questions ask."""

    client: httpx.AsyncClient
    texts: dict[str, str]
    asking: list[asyncio.Task[None]] = field(default_factory=list)

    async def bring_about(self, exchange: Exchange) -> None:
        """Register, name and delete as the recorded catalog has it, and wait until the catalog shows all of it.

        For recorded questions it begins to ask for decisions, until a router has answered.
        """
        if exchange.route.answers == "RouterQuestions" and exchange.answer["data"]:
            self.asking.append(asyncio.create_task(self._ask_for_decisions()))
        if exchange.route.answers != "Catalog":
            return
        aliases = {alias["name"]: alias["targets"] for alias in exchange.answer["aliases"]}
        for alias in (await self.client.get("/v1/aliases")).json()["data"]:
            if alias["name"] not in aliases:
                (await self.client.delete(f"/v1/aliases/{alias['name']}")).raise_for_status()
        for adapter in exchange.answer["adapters"]:
            await self._bring_about_adapter(adapter)
        for name, targets in aliases.items():
            (await self.client.put(f"/v1/aliases/{name}", json={"targets": targets, "place_s": 0})).raise_for_status()

        async def shows_all() -> bool:
            return field_paths(exchange.answer) <= field_paths((await self.client.get("/v1/catalog")).json())

        # Where it never does, the comparison that follows says what is missing.
        with contextlib.suppress(TimeoutError):
            await until(shows_all, within_s=5)

    async def _ask_for_decisions(self) -> None:
        async def has_answer() -> bool:
            return (await self.client.get("/v1/decisions?limit=1")).status_code == 200

        await until(has_answer, what="a router answers the operator's question")

    async def _bring_about_adapter(self, adapter: Mapping[str, Any]) -> None:
        """Register the adapter where it is unknown, or delete it where the recorded one was being deleted."""
        path = f"/v1/adapters/{adapter['lora_id']}"
        if adapter["is_deleting"]:
            (await self.client.delete(path)).raise_for_status()
        elif (await self.client.get(path)).status_code == 404:
            spec = {name: filled(adapter[name], self.texts) for name in ("lora_id", "source", "base_model")}
            (await self.client.post("/v1/adapters", json=spec)).raise_for_status()
