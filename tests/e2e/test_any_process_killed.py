"""Any one process of a fleet is killed at any moment, under requests and changes: nothing is lost.

No adapter, no policy, no alias, and no request that had not begun to answer, but those inside a killed router.
"""

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.fleets import RunningFleet, running, until
from tests.e2e.kills import KINDS, has_successor, sizes, victims
from tests.e2e.scenarios import PYTHON, SQL, fresh_prompt
from tests.properties import THOROUGH

pytestmark = [pytest.mark.fleet, pytest.mark.slow]

LEGAL = "legal/v2"
MODELS = ("tiny-qwen", SQL, PYTHON, LEGAL)
SEED = 11
ROUNDS = 24 if THOROUGH else len(KINDS)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder: Path = tmp_path_factory.mktemp("killed")
    with running(folder / "state", "--engine", "sim", "--workers", "2") as fleet:
        yield fleet


@dataclass(slots=True)
class Askers:
    """One user for each model, who asks again and again.

    answered  answers so far
    failed    answers that were no success
    cut       connections that broke after the request was sent
    """

    fleet: RunningFleet
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        users = [threading.Thread(target=self._ask_on, args=(name,)) for name in MODELS]
        for user in users:
            user.start()
        try:
            yield
        finally:
            self._stopping.set()
            for user in users:
                user.join()

    def _ask_on(self, name: str) -> None:
        while not self._stopping.is_set():
            try:
                answer = self.fleet.ask(model=name, prompt=fresh_prompt(), max_tokens=8)
            except httpx.ConnectError:
                self._stopping.wait(0.02)  # no router listens: nothing was sent
            except httpx.TransportError as exc:
                self.cut.append(f"{name}: {exc!r}")
            else:
                self.answered += 1
                if not answer.is_success:
                    self.failed.append(f"{name}: {answer.status_code} {answer.text}")


def intent(fleet: RunningFleet) -> dict[str, Any]:
    """All that people have set."""
    url = fleet.orchestrator
    adapters = fleet.get(f"{url}/v1/adapters")["data"]
    aliases = fleet.get(f"{url}/v1/aliases")["data"]
    return {
        "policy": fleet.get(f"{url}/v1/policy"),
        "adapters": {
            one["lora_id"]: (one["spec"]["digest"], one["spec"]["source"], one["spec"]["policy"]) for one in adapters
        },
        "aliases": {one["name"]: one["status"]["targets"] for one in aliases},
    }


def serves_all(fleet: RunningFleet, names: tuple[str, ...]) -> bool:
    return all(fleet.ask(model=name, prompt=fresh_prompt(), max_tokens=2).is_success for name in names)


def test_any_process_killed_at_any_moment_loses_nothing(fleet: RunningFleet) -> None:
    rng = random.Random(SEED)
    kinds = [*KINDS, *rng.choices(KINDS, k=ROUNDS - len(KINDS))]
    until(lambda: serves_all(fleet, MODELS), within_s=60, what="every adapter is served")
    until(fleet.is_whole, within_s=60, what="every worker is ready")
    whole = sizes(victims(fleet))
    assert whole == dict(zip(KINDS, (1, 1, 2, 2, 2), strict=True))
    users = Askers(fleet)
    with users.asking():
        for number, kind in enumerate(kinds):
            # Changes that are acknowledged just before the kill.
            targets = [{"lora_id": rng.choice(MODELS[1:]), "weight": 1.0}]
            body = {"targets": targets, "place_s": 0}
            name = f"alias-{number}"
            assert fleet.http("PUT", f"{fleet.orchestrator}/v1/aliases/{name}", json=body).is_success
            change = {"min_residency_s": 0.5 + number}
            assert fleet.http("PATCH", f"{fleet.orchestrator}/v1/policy", json=change).is_success
            set_by_people = intent(fleet)
            before = users.answered + rng.randrange(12)
            until(lambda before=before: users.answered > before, within_s=60, what="answers")
            victim = rng.choice(sorted(victims(fleet)[kind]))
            what = f"round {number}: {kind} {victim} killed"
            os.kill(victim, signal.SIGKILL)
            until(
                lambda victim=victim: has_successor(fleet, victim, whole),
                within_s=60,
                what=f"{what}; its successor is ready",
            )
            until(
                lambda wanted=set_by_people: intent(fleet) == wanted,
                within_s=30,
                what=f"{what}; all that was set is there",
            )
            until(lambda name=name: serves_all(fleet, (*MODELS, name)), within_s=60, what=f"{what}; all are served")
            assert users.failed == [], what
            if kind != "router":
                assert users.cut == [], what
            users.cut.clear()
