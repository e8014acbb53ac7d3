"""The example's trainer goes on while processes of its fleet are killed, and no answer is of another version."""

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleets import RunningFleet, running, until
from tests.e2e.kills import KINDS, has_successor, sizes, victims
from tests.e2e.trainers import example_trainer

pytestmark = [pytest.mark.fleet, pytest.mark.slow]

SEED = 5
KILL_EVERY = 3
QUIET_AT_THE_END = 5
"""Steps without a kill: the trainer's last question is whether the cache holds at all."""
# Within so many seconds of a step the next process dies: while the adapter is published, or while it is sampled.
MOMENTS_S = 1.5


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, runs: Path) -> Iterator[RunningFleet]:
    environment = {"LORAFLEET_WORKERS_LORA_ROOTS": json.dumps([str(runs)])}
    folder = tmp_path_factory.mktemp("trainer") / "state"
    with running(folder, "--engine", "sim", "--workers", "2", environment=environment) as fleet:
        yield fleet


@pytest.mark.parametrize(
    "steps",
    [pytest.param(20), pytest.param(1000, marks=[pytest.mark.thorough, pytest.mark.timeout(7200)])],
)
def test_no_answer_is_of_another_version_while_processes_are_killed(
    fleet: RunningFleet, runs: Path, steps: int
) -> None:
    rng, kinds = random.Random(SEED), [*KINDS]
    until(fleet.is_whole, within_s=60, what="every worker is ready")
    whole = sizes(victims(fleet))
    name = f"policy-{steps}"
    with example_trainer(fleet, fleet.state_dir / "tiny-qwen", runs, "--sim", steps=steps, name=name) as trainer:
        for step in trainer.steps():
            if step % KILL_EVERY or step > steps - QUIET_AT_THE_END:
                continue
            kind = kinds.pop(0) if kinds else rng.choice(KINDS)
            victim = rng.choice(sorted(victims(fleet)[kind]))
            timer = threading.Timer(rng.uniform(0, MOMENTS_S), os.kill, (victim, signal.SIGKILL))
            timer.start()
            timer.join()
            until(
                lambda victim=victim: has_successor(fleet, victim, whole),
                within_s=60,
                what=f"after step {step}: a successor of the killed {kind} {victim} is ready",
            )
        assert not kinds, "each kind was killed"
        assert trainer.status() == 0, trainer.output()
    assert f"{steps} steps: 0 answers of another version, 0 cache hits across versions" in trainer.output()
    published = fleet.get(f"{fleet.orchestrator}/v1/published/{name}")["status"]
    until(lambda: len(fleet.held_by(published["lora_id"])) == 2, within_s=30, what="both workers have the last version")
    assert fleet.ask(model=name).headers["x-lorafleet-adapter"].startswith(f"{published['lora_id']}@")
