"""`lorafleet up` keeps its promises about processes, files and arguments."""

import json
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.fleets import SIM_FLAGS, RunningFleet, chat, is_free, kill, read_line, running, start, until, wait_ready
from tests.e2e.scenarios import SQL, cli, fresh_prompt, text
from tests.patience import patience
from tests.properties import sample

pytestmark = pytest.mark.fleet


def test_a_stopped_fleet_resumes_from_its_folder(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with running(state, *SIM_FLAGS, "2") as fleet:
        assert cli(fleet, "aliases", "set", "sql", SQL).returncode == 0
        first = text(fleet.ask(model="sql", prompt="the same question"))
        digest = fleet.get(f"{fleet.orchestrator}/v1/adapters/{SQL}")["spec"]["digest"]
        ended_by(fleet, signal.SIGINT)
    with running(state, *SIM_FLAGS, "2") as fleet:
        assert text(fleet.ask(model="sql", prompt="the same question")) == first
        assert fleet.get(f"{fleet.orchestrator}/v1/adapters/{SQL}")["spec"]["digest"] == digest
        ended_by(fleet, signal.SIGTERM)


def ended_by(fleet: RunningFleet, how: signal.Signals) -> None:
    """Nothing is left of it."""
    assert len(fleet.processes()) > 6
    assert fleet.stop(how) == 0
    assert fleet.processes() == {}
    assert is_free(fleet.router)
    assert is_free(fleet.orchestrator)
    assert "nothing is left running" in fleet.progress()


def test_a_worker_drained_earlier_is_reported_and_can_be_uncordoned(tmp_path: Path) -> None:
    state, empty = tmp_path / "state", tmp_path / "empty"
    empty.mkdir()
    with running(state, *SIM_FLAGS, "1", "--adapters", str(empty)) as fleet:
        assert f"{empty} has no adapters" in fleet.progress()
        assert cli(fleet, "workers", "drain", "w0").returncode == 0
        workers = f"{fleet.orchestrator}/v1/workers"
        until(lambda: fleet.get(workers)["data"][0]["state"] == "draining", within_s=10, what="it drains")
    with running(state, *SIM_FLAGS, "1", "--demo", "--open", environment={"BROWSER": "true"}) as fleet:
        until(lambda: f"console: opened {fleet.orchestrator}/ui" in fleet.progress(), within_s=10, what="it is opened")
        until(lambda: "demo: skipped, because every worker" in fleet.progress(), within_s=10, what="all is said")
        (line,) = (line for line in fleet.progress().splitlines() if "drained since an earlier run" in line)
        assert "3 not verified, because" in fleet.progress()
        words = line.rpartition("to undo that: ")[2].split()
        assert words[:3] == ["lorafleet", "--orchestrator-url", fleet.orchestrator]
        assert cli(fleet, *words[3:]).returncode == 0
        until(lambda: fleet.ask(prompt=fresh_prompt(), lora_id=SQL).is_success, within_s=30, what="an answer")


@pytest.mark.thorough
def test_a_stop_works_with_dead_children(tmp_path: Path) -> None:
    with running(tmp_path / "state", *SIM_FLAGS, "1") as fleet:
        for word in ("router", "orchestrator", "workers"):
            fleet.kill("-m", word)
        assert fleet.stop() == 0


def test_a_killed_up_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path / "state", *SIM_FLAGS, "1") as fleet:
        fleet.process.kill()
        fleet.process.wait(patience(10))
        until(lambda: fleet.processes() == {}, within_s=10, what="everything is gone")


@pytest.mark.parametrize("word", sample(["w0: starting", "router: starting", "orchestrator: starting"], 1))
def test_a_stop_in_the_middle_of_the_start_leaves_nothing(tmp_path: Path, word: str) -> None:
    fleet = start(tmp_path / "state", *SIM_FLAGS, "2")
    try:
        until(lambda: word in fleet.progress(), within_s=30, what=word)
        assert fleet.stop() == 130
    finally:
        left = kill(fleet)
    assert not left


@pytest.mark.thorough
def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with running(tmp_path / "state", *SIM_FLAGS, "1") as fleet:
        # A request in flight, so that the first signal has something to wait for.
        body = chat(prompt=fresh_prompt(), stream=True, max_tokens=3500, ignore_eos=True)
        with httpx.stream("POST", f"{fleet.router}/v1/chat/completions", json=body, timeout=patience(20)) as answer:
            next(answer.iter_raw())
            fleet.process.send_signal(signal.SIGINT)
            until(lambda: "stopping" in fleet.progress(), within_s=10, what="it is stopping")
            fleet.process.send_signal(signal.SIGINT)
            assert fleet.process.wait(patience(10)) == 130  # 0 where it has ended all in order
        until(lambda: fleet.processes() == {}, within_s=5, what="everything is gone")


def test_a_stop_cuts_a_long_answer_off_with_an_error_event_and_kills_no_service(tmp_path: Path) -> None:
    with running(tmp_path / "state", *SIM_FLAGS, "1") as fleet:
        body = chat(prompt=fresh_prompt(), stream=True, max_tokens=3500, ignore_eos=True)
        with httpx.stream("POST", f"{fleet.router}/v1/chat/completions", json=body, timeout=patience(30)) as answer:
            lines = answer.iter_lines()
            next(lines)
            fleet.process.send_signal(signal.SIGTERM)
            (error,) = (line for line in lines if line.startswith('data: {"error"'))
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "stopping"
        assert fleet.process.wait(patience(60)) == 0
        assert "was killed" not in fleet.progress()


def test_the_demo_works_beside_packages_named_like_ours_and_leaves_nothing(tmp_path: Path) -> None:
    for name in ("router", "orchestrator", "workers", "lorafleet"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "__init__.py").write_text("raise ImportError('the package of a user')")
    flags = (*SIM_FLAGS, "2", "--demo", "--once")
    fleet = wait_ready(start(tmp_path / "state", *flags, is_empty=True, cwd=tmp_path / "mine"), within_s=60)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert fleet.process.stdout is not None
    said = fleet.process.stdout.read()
    assert fleet.process.wait(patience(60)) == 0
    assert kill(fleet) == {}
    rows = [line.split("│")[1:-1] for line in said.splitlines() if line.startswith("│")]
    assert len(rows) == 4
    adapters, workers, prompts, cached = zip(*([cell.strip() for cell in row[:4]] for row in rows), strict=True)
    assert [name.partition("@")[0] for name in adapters] == ["base", SQL, "python-expert/v1", "base"]
    assert workers[0] == workers[3]
    assert [int(tokens) > 0 for tokens in cached] == [False, False, False, True]
    assert int(prompts[0]) > 3 * 32
    assert said.count("curl ") == 3


def test_a_child_that_cannot_start_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    fleet = start(tmp_path / "state", *SIM_FLAGS, "1", "--model", str(model))
    try:
        assert read_line(fleet, within_s=30) == ""
        assert fleet.process.wait(patience(60)) == 1
        assert "w0" in fleet.progress()
        assert str(tmp_path / "state" / "logs" / "w0.log") in fleet.progress()
        assert str(tmp_path / "state" / "workers" / "w0" / "engine.log") in fleet.progress()
    finally:
        left = kill(fleet)
    assert not left


def test_arguments_settings_and_devices_reach_every_engine_of_the_fleet(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("first_sync_wait_s: 5\n")
    flags = ("--devices", "7,8", "--router-config", str(file), "--engine-arg=--sim-seed", "--engine-arg=5")
    words = ("--", "--max-loras", "3", "--served-model-name", "mine", "--enable-auto-tool-choice")
    environment = {"LORAFLEET_WORKERS_MAX_LORA_RANK": "64"}
    with running(tmp_path / "state", *SIM_FLAGS[:2], *flags, *words, environment=environment) as fleet:
        engines = fleet.pids("-m", "lorafleet.sim")
        visible = [(Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0") for pid in engines]
        assert {name for names in visible for name in names if name.startswith(b"CUDA_")} == {
            b"CUDA_VISIBLE_DEVICES=7",
            b"CUDA_VISIBLE_DEVICES=8",
        }
        for metadata in fleet.workers().values():
            lora = metadata["lora"]
            assert (lora["max_loras"], lora["max_cpu_loras"], lora["max_lora_rank"]) == (3, 6, 64)
        assert fleet.ask(prompt=fresh_prompt(), model="mine").is_success
        assert "settings from the environment: LORAFLEET_WORKERS_MAX_LORA_RANK" in fleet.progress()
        assert f"settings file of the router: {file}" in fleet.progress()


def test_an_engine_that_refuses_its_arguments_ends_the_start(tmp_path: Path) -> None:
    fleet = start(tmp_path / "state", *SIM_FLAGS, "1", "--", "--no-such-flag")
    try:
        assert fleet.process.wait(patience(60)) == 1
        assert "The engine's last error: error: unrecognized arguments: --no-such-flag\n" in fleet.progress()
    finally:
        left = kill(fleet)
    assert not left
