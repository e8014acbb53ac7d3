"""The ledger beside the engines' own counters, while processes are killed and routers are cut off."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import httpx
import pytest

from tests.simulation.fleet import MODEL, until
from tests.simulation.programs import EngineFlags

ADAPTERS = ("a", "b", "c")
CLIENTS = 3
BETWEEN_REQUESTS_S, BETWEEN_FAULTS_S = 8.0, 60.0
TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
LOST_S = 5.0
"""The usage of a killed router that may be lost."""


class EngineMeters:
    """What all engines have computed since the watch began, those that were killed included."""

    def __init__(self, engines):
        self.sums = Counter()
        self._engines, self._watched = engines, {}

    async def watch(self):
        """Watch each engine process from its start."""
        while True:
            for name, engine in self._engines.items():
                if self._watched.get(name) is not engine:
                    self._watched[name] = engine
                    engine.metrics.count_step = self._with_sums(engine.metrics.count_step)
            await asyncio.sleep(0.05)

    def _with_sums(self, count_step):
        def count(step, jobs):
            first = [job for job in jobs if job.produced == 1]
            self.sums["busy_s"] += step.duration_s
            self.sums["completion_tokens"] += len(jobs)
            self.sums["prompt_tokens"] += sum(job.prompt_tokens for job in first)
            self.sums["cached_tokens"] += sum(job.cached_tokens for job in first)
            count_step(step, jobs)

        return count


@dataclass
class Sent:
    """A request: when it ended, at which router, and how. `status` 0: its connection broke; 499: its client left."""

    ended_at: float
    router: int
    status: int
    prompt_tokens: int
    most_tokens: int
    is_streamed: bool


async def ask_until(fleet, ends_at, seed, sent):
    """A client that asks now and then; some leave before their answer has ended."""
    chance, time = random.Random(seed), asyncio.get_running_loop().time
    while time() < ends_at:
        await asyncio.sleep(chance.expovariate(1 / BETWEEN_REQUESTS_S))
        router, most_tokens = chance.randrange(len(fleet.routers)), chance.randint(2, 40)
        is_streamed = chance.random() < 0.4
        prompt = [100 + chance.randrange(3)] * 16 * chance.randint(0, 20)
        prompt += chance.sample(range(200, 2000), chance.randint(5, 300))
        asked = fleet.ask(
            chance.choice((MODEL, *ADAPTERS)),
            router=router,
            headers=fleet.as_(chance.choice(("acme", "globex"))),
            prompt=prompt,
            max_tokens=most_tokens,
            ignore_eos=True,
            stream=is_streamed,
        )
        leaves_after_s = chance.random() * 3 if chance.random() < 0.03 else None
        try:
            async with asyncio.timeout(leaves_after_s):
                status = (await asked).status_code
        except TimeoutError:
            status = 499
        except httpx.TransportError:
            status = 0
        sent.append(Sent(time(), router, status, len(prompt), most_tokens, is_streamed))


async def fail_until(fleet, ends_at, seed, network):
    """Faults at random moments; the kills of routers as (time, router)."""
    chance, time, kills = random.Random(seed), asyncio.get_running_loop().time, []
    while time() < ends_at:
        await asyncio.sleep(chance.expovariate(1 / BETWEEN_FAULTS_S))
        away_s, router = chance.random() * 10, chance.randrange(len(fleet.routers))
        match chance.choice(("router", "router", "orchestrator", "orchestrator", "engine", "partition")):
            case "router":
                killed = fleet.processes.nodes[f"router{router}"]
                fleet.kill(f"router{router}", away_s=away_s, in_callbacks=chance.randint(1, 500))
                await until(lambda killed=killed: not killed.is_alive, every_s=0.01, what="it is dead")
                kills.append((time(), router))
            case "orchestrator":
                fleet.kill(f"orch{chance.randrange(2)}", away_s=away_s, in_callbacks=chance.randint(1, 500))
            case "engine":
                fleet.kill(f"engine{chance.randrange(3)}", away_s=away_s, in_callbacks=chance.randint(1, 500))
            case "partition":
                one, other = (fleet.processes.nodes[name].host for name in (f"router{router}", "orch0"))
                network.partition(one, other)
                await asyncio.sleep(away_s)
                network.heal(one, other)
    return kills


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("seed", "minutes"), [(1, 4), *(pytest.param(seed, 12, marks=pytest.mark.thorough) for seed in (2, 3))]
)
async def test_the_ledger_agrees_with_the_engines_whatever_is_killed(simulation, seed, minutes):
    flags = EngineFlags(decode_tokens_per_s=20.0, more=("--sim-prefill-tokens-per-s", "1000"))
    fleet = await simulation.fleet(workers=3, routers=3, orchestrators=2, tenants=("acme", "globex"), engine=flags)
    for number, name in enumerate(ADAPTERS):
        await fleet.register(name, simulation.adapter(name, seed=number))
    meters, sent, loop = EngineMeters(fleet.processes.services.engines), [], asyncio.get_running_loop()
    watching = asyncio.create_task(meters.watch())
    ends_at = loop.time() + 60 * minutes
    kills, *_ = await asyncio.gather(
        fail_until(fleet, ends_at, seed, loop.network),
        *(ask_until(fleet, ends_at, (seed << 8) + number, sent) for number in range(CLIENTS)),
    )
    await until(fleet.is_whole, what="the fleet is whole")
    await asyncio.sleep(LOST_S)  # routers report each second, and again what was not accepted
    watching.cancel()
    asked = {"since": "1970-01-01T00:00:00Z", "until": "2100-01-01T00:00:00Z"}
    (item,) = (await fleet.http.get("/v1/usage", params=asked)).raise_for_status().json()["data"]
    usage = item["usage"]

    # Nothing is counted twice, and no more is lost than the last seconds of killed routers.
    may_be_lost = [
        each
        for each in sent
        if any(each.router == router and at - LOST_S <= each.ended_at <= at + 1 for at, router in kills)
    ]
    ended = [each for each in sent if each.status]
    assert len([each for each in ended if each not in may_be_lost]) <= usage["requests"] <= len(ended)

    # How far an answer had come whose client left is known where it was streamed.
    cut_short = [*may_be_lost, *(each for each in sent if each.status == 499 and not each.is_streamed)]
    lost = Counter(prompt_tokens=sum(each.prompt_tokens for each in may_be_lost))
    lost["cached_tokens"] = lost["prompt_tokens"]
    lost["completion_tokens"] = sum(each.most_tokens for each in cut_short)
    usage["busy_s"] = usage["prefill_s"] + usage["decode_s"]
    for name in TOKENS:
        counted = meters.sums[name]
        assert 0.99 * counted - lost[name] <= usage[name] <= 1.01 * counted, name
    assert usage["busy_s"] == pytest.approx(meters.sums["busy_s"], rel=0.05)
