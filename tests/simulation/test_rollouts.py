"""A new version under traffic, through a whole fleet: a sound one arrives unnoticed, a bad one goes back by itself."""

import asyncio
import json
from dataclasses import dataclass, field
from itertools import count, pairwise

import pytest

from tests.simulation.fleet import SimulationFleet, adapter_of, until

V1, SOUND, SLOW, FAILING = "svc/v1", "svc/sound", "svc/slow", "svc/failing"
FAULTS = {SLOW: {"delay_s": 0.2}, FAILING: {"failing": 0.5}}
STEPS = [{"weight": 0.4, "for_s": 30}, {"weight": 0.8, "for_s": 30}]
EVERY_S = 4.0


async def fleet_of(simulation):
    """Two workers, and each version with its fault."""
    fleet = await simulation.fleet(workers=2)
    for lora_id in (V1, SOUND, SLOW, FAILING):
        folder = simulation.adapter(lora_id)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"sim": FAULTS.get(lora_id, {})}))
        await fleet.register(lora_id, folder)
    return fleet


@dataclass(slots=True)
class AliasTraffic:
    """Users who ask an alias again and again, streamed. `served`: user -> which adapter, in order."""

    fleet: SimulationFleet
    alias: str
    served: dict[str, list[str]] = field(default_factory=lambda: {f"user-{number}": [] for number in range(12)})
    failed: list[str] = field(default_factory=list)
    _numbers: count = field(default_factory=lambda: count(1))

    async def ask_on(self, user: str) -> None:
        while True:
            await self.ask(user)
            await asyncio.sleep(EVERY_S)

    async def ask(self, user: str) -> None:
        message = {"role": "user", "content": f"{next(self._numbers)} is what they ask this time"}
        answer = await self.fleet.ask(self.alias, messages=[message], stream=True, user=user)
        whole = answer.content
        if answer.status_code != 200 or not whole.endswith(b"data: [DONE]\n\n") or b'"error"' in whole:
            self.failed.append(f"{answer.status_code} {whole[:200]!r}")
        else:
            self.served[user].append(adapter_of(answer))


async def rolled_out(fleet: SimulationFleet, alias: str, to: str, **limits: float) -> tuple[dict, AliasTraffic]:
    """The rollout's state at its end, and the traffic that went on before, while and after it ran."""
    path = f"/v1/aliases/{alias}"
    assert (await fleet.http.put(path, json={"targets": [{"lora_id": V1}]})).status_code == 201
    going = AliasTraffic(fleet, alias)
    users = [asyncio.create_task(going.ask_on(user)) for user in going.served]
    await until(lambda: all(going.served.values()), what="everybody was served")
    body = {"to": to, "steps": STEPS, "min_requests": 20, "place_s": 10, **limits}
    assert (await fleet.http.post(f"{path}/rollout", json=body)).status_code == 201

    async def status() -> dict:
        return (await fleet.http.get(f"{path}/rollout")).json()["status"]

    async def has_ended() -> bool:
        return (await status())["state"] in {"done", "rolled_back", "failed"}

    await until(has_ended, what="the rollout ends")
    (last,) = [target["lora_id"] for target in (await fleet.http.get(path)).json()["status"]["targets"]]
    assert await fleet.answered_by(alias) == last
    before = {user: len(found) for user, found in going.served.items()}
    served_again = lambda: all(len(found) > before[user] + 1 for user, found in going.served.items())  # noqa: E731
    await until(served_again, what="everybody was served after it")
    for user in users:
        user.cancel()
    return await status(), going


async def test_a_sound_version_arrives_without_one_failed_request_and_no_user_goes_back_and_forth(simulation):
    fleet = await fleet_of(simulation)
    item, going = await rolled_out(fleet, "sound", SOUND, max_first_token_ratio=20)  # of few milliseconds
    assert (item["state"], going.failed) == ("done", [])
    for found in going.served.values():
        moves = [now for before, now in pairwise(found) if before != now]
        assert (found[0], moves) == (V1, [SOUND])
    shifts = [
        [target[0] for target in entry["body"]["targets"]]
        for entry in (await fleet.http.get("/v1/aliases/sound/history")).json()["data"]
        if entry["kind"] == "alias_set"
    ]
    assert shifts == [[SOUND], [V1, SOUND], [V1, SOUND], [V1]]


@pytest.mark.parametrize(("bad", "why"), [(SLOW, "first token"), (FAILING, "error rate")])
async def test_a_bad_version_goes_back_by_itself(simulation, bad, why):
    item, going = await rolled_out(await fleet_of(simulation), f"to-{bad.partition('/')[2]}", bad)
    assert (item["state"], item["weight"]) == ("rolled_back", 0.0), item
    assert why in item["reason"]
    assert {found[-1] for found in going.served.values()} == {V1}
    assert all(bad in said for said in going.failed)
    assert bool(going.failed) == (bad == FAILING)
