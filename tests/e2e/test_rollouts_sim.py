"""A new version under traffic, through a whole fleet: a sound one arrives unnoticed, a bad one goes back by itself."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from lorafleet.local import tiny_model
from tests.e2e.fleets import RunningFleet, chat, running, until
from tests.e2e.scenarios import fresh_prompt
from tests.patience import patience

pytestmark = pytest.mark.fleet

V1, SOUND, SLOW, FAILING = "svc/v1", "svc/sound", "svc/slow", "svc/failing"
FAULTS = {SLOW: {"delay_s": patience(0.2)}, FAILING: {"failing": 0.5}}
STEPS = [{"weight": 0.4, "for_s": 0.5}, {"weight": 0.8, "for_s": 0.5}]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder: Path = tmp_path_factory.mktemp("rollouts")
    for lora_id in (V1, SOUND, SLOW, FAILING):
        config = tiny_model.make_adapter(folder / "adapters", lora_id) / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"sim": FAULTS.get(lora_id, {})}))
    flags = ("--engine", "sim", "--workers", "2", "--adapters", str(folder / "adapters"))
    with running(folder / "state", *flags) as fleet:
        yield fleet


@dataclass(slots=True)
class AliasTraffic:
    """Users who ask an alias again and again, streamed. `served`: user -> which adapter, in order."""

    fleet: RunningFleet
    alias: str
    served: dict[str, list[str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def ask_on(self, users: list[str]) -> None:
        with httpx.Client(trust_env=False, verify=False, timeout=patience(30)) as client:
            while not self.stopping.is_set():
                for user in users:
                    self.ask(client, user)

    def ask(self, client: httpx.Client, user: str) -> None:
        body = chat(model=self.alias, prompt=fresh_prompt(), stream=True, user=user, max_tokens=4)
        with client.stream("POST", f"{self.fleet.router}/v1/chat/completions", json=body) as answer:
            whole = answer.read()
        if answer.status_code != 200 or not whole.endswith(b"data: [DONE]\n\n") or b'"error"' in whole:
            self.failed.append(f"{answer.status_code} {whole[:200]!r}")
        else:
            self.served[user].append(answer.headers["x-lorafleet-adapter"].partition("@")[0])


@contextmanager
def traffic(fleet: RunningFleet, alias: str) -> Iterator[AliasTraffic]:
    going = AliasTraffic(fleet, alias, {f"user-{number}": [] for number in range(12)})
    users = list(going.served)
    threads = [threading.Thread(target=going.ask_on, args=(users[part::4],)) for part in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield going
    finally:
        going.stopping.set()
        for thread in threads:
            thread.join()


def rolled_out(fleet: RunningFleet, alias: str, to: str, **limits: float) -> tuple[dict, AliasTraffic]:
    """The rollout's state at its end, and the traffic that went on before, while and after it ran."""
    url = f"{fleet.orchestrator}/v1/aliases/{alias}"
    assert fleet.http("PUT", url, json={"targets": [{"lora_id": V1}]}).status_code == 201
    until(lambda: fleet.ask(model=alias).status_code == 200, within_s=10, what="the router knows the alias")
    with traffic(fleet, alias) as going:
        until(lambda: all(going.served.values()), within_s=10, what="everybody was served")
        body = {"to": to, "steps": STEPS, "min_requests": 20, "place_s": 10} | limits
        assert fleet.http("POST", f"{url}/rollout", json=body).status_code == 201
        ends = ("done", "rolled_back", "failed")
        until(lambda: fleet.get(f"{url}/rollout")["status"]["state"] in ends, within_s=30, what="the rollout ends")
        (last,) = [target["lora_id"] for target in fleet.get(url)["status"]["targets"]]
        until(lambda: fleet.ask(model=alias).headers["x-lorafleet-adapter"].startswith(last), within_s=10, what=last)
        before = {user: len(found) for user, found in going.served.items()}
        until(
            lambda: all(len(found) > before[user] + 1 for user, found in going.served.items()),
            within_s=10,
            what="everybody was served after it",
        )
    return fleet.get(f"{url}/rollout")["status"], going


def test_a_sound_version_arrives_without_one_failed_request_and_no_user_goes_back_and_forth(
    fleet: RunningFleet,
) -> None:
    item, going = rolled_out(fleet, "sound", SOUND, max_first_token_ratio=20)  # of a busy machine's milliseconds
    assert (item["state"], going.failed) == ("done", [])
    for found in going.served.values():
        moves = [now for before, now in pairwise(found) if before != now]
        assert (found[0], moves) == (V1, [SOUND])
    shifts = [
        [target[0] for target in entry["body"]["targets"]]
        for entry in fleet.get(f"{fleet.orchestrator}/v1/aliases/sound/history")["data"]
        if entry["kind"] == "alias_set"
    ]
    assert shifts == [[SOUND], [V1, SOUND], [V1, SOUND], [V1]]


@pytest.mark.parametrize(("bad", "why"), [(SLOW, "first token"), (FAILING, "error rate")])
def test_a_bad_version_goes_back_by_itself(fleet: RunningFleet, bad: str, why: str) -> None:
    item, going = rolled_out(fleet, f"to-{bad.partition('/')[2]}", bad)
    assert (item["state"], item["weight"]) == ("rolled_back", 0.0), item
    assert why in item["reason"]
    assert {found[-1] for found in going.served.values()} == {V1}
    assert all(bad in said for said in going.failed)
    assert bool(going.failed) == (bad == FAILING)
