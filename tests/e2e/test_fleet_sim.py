"""A fleet of sim workers does what every fleet must do; and `lorafleet up` keeps its promises about processes."""

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from lorafleet.cli.keys import add_key
from lorafleet.local import tiny_model
from tests.e2e.fleets import RunningFleet, chat, is_free, kill, read_line, running, start, until, wait_ready
from tests.e2e.scenarios import COLD, SQL, FleetSuite, cli, fresh_prompt, text
from tests.patience import patience
from tests.properties import THOROUGH, sample

pytestmark = pytest.mark.fleet

WORKERS = 8 if THOROUGH else 3
FLAGS = ("--engine", "sim", "--workers")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder: Path = tmp_path_factory.mktemp("sim")
    tiny_model.make_adapters(folder / "adapters")
    tiny_model.make_adapter(folder / "adapters", COLD)
    with running(folder / "state", *FLAGS, str(WORKERS), "--adapters", str(folder / "adapters")) as fleet:
        yield fleet


class TestSimWorkers(FleetSuite):
    def test_every_worker_takes_part(self, fleet: RunningFleet) -> None:
        asked = {fleet.ask(prompt=fresh_prompt(), max_tokens=1).headers["x-lorafleet-worker"] for _ in range(60)}
        assert len(asked) > WORKERS // 2


def test_a_stopped_fleet_resumes_from_its_folder(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with running(state, *FLAGS, "2") as fleet:
        assert cli(fleet, "aliases", "set", "sql", SQL).returncode == 0
        first = text(fleet.ask(model="sql", prompt="the same question"))
        digest = fleet.get(f"{fleet.orchestrator}/v1/adapters/{SQL}")["digest"]
        ended_by(fleet, signal.SIGINT)
    with running(state, *FLAGS, "2") as fleet:
        assert text(fleet.ask(model="sql", prompt="the same question")) == first
        assert fleet.get(f"{fleet.orchestrator}/v1/adapters/{SQL}")["digest"] == digest
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
    with running(state, *FLAGS, "1", "--adapters", str(empty)) as fleet:
        assert f"{empty} has no adapters" in fleet.progress()
        assert cli(fleet, "workers", "drain", "w0").returncode == 0
        workers = f"{fleet.orchestrator}/v1/workers"
        until(lambda: fleet.get(workers)["data"][0]["state"] == "draining", within_s=10, what="it drains")
    with running(state, *FLAGS, "1", "--demo", "--open", environment={"BROWSER": "true"}) as fleet:
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
    with running(tmp_path / "state", *FLAGS, "1") as fleet:
        for word in ("router", "orchestrator", "workers"):
            fleet.kill("-m", word)
        assert fleet.stop() == 0


def test_a_killed_up_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path / "state", *FLAGS, "1") as fleet:
        fleet.process.kill()
        fleet.process.wait(patience(10))
        until(lambda: fleet.processes() == {}, within_s=10, what="everything is gone")


@pytest.mark.parametrize("word", sample(["w0: starting", "router: starting", "orchestrator: starting"], 1))
def test_a_stop_in_the_middle_of_the_start_leaves_nothing(tmp_path: Path, word: str) -> None:
    fleet = start(tmp_path / "state", *FLAGS, "2")
    try:
        until(lambda: word in fleet.progress(), within_s=30, what=word)
        assert fleet.stop() == 130
    finally:
        left = kill(fleet)
    assert not left


@pytest.mark.thorough
def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with running(tmp_path / "state", *FLAGS, "1") as fleet:
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
    with running(tmp_path / "state", *FLAGS, "1") as fleet:
        body = chat(prompt=fresh_prompt(), stream=True, max_tokens=3500, ignore_eos=True)
        with httpx.stream("POST", f"{fleet.router}/v1/chat/completions", json=body, timeout=patience(30)) as answer:
            lines = answer.iter_lines()
            next(lines)
            fleet.process.send_signal(signal.SIGTERM)
            (error,) = (line for line in lines if line.startswith('data: {"error"'))
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "stopping"
        assert fleet.process.wait(patience(60)) == 0
        assert "was killed" not in fleet.progress()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound adapter, one without tensors, one that calls the base model as a hub does, and one of another."""
    folder = tmp_path_factory.mktemp("small") / "adapters"
    tiny_model.make_adapter(folder, "good/v1")
    (tiny_model.make_adapter(folder, "bad/v1") / "adapter_model.safetensors").write_bytes(b"no tensors at all")
    tiny_model.make_adapter(folder, "hub/v1", base_model="Org/Tiny-Qwen")
    tiny_model.make_adapter(folder, "other/v1", base_model="org/other")
    return folder


@pytest.fixture(scope="module")
def small(shelf: Path) -> Iterator[RunningFleet]:
    """One worker, and the shelf."""
    with running(shelf.parent / "state", *FLAGS, "1", "--adapters", str(shelf)) as fleet:
        yield fleet


@pytest.mark.parametrize("service", ["router", "orchestrator", "workers"])
def test_a_dead_child_is_restarted_and_reported(small: RunningFleet, service: str) -> None:
    before = small.kill("-m", service)
    name = "w0" if service == "workers" else service
    until(lambda: f"{name}: ended with SIGKILL" in small.progress(), within_s=10, what="it says so")
    until(lambda: small.pids("-m", service) not in ([], before), within_s=10, what="it is there again")
    until(lambda: small.ask(prompt=fresh_prompt(), lora_id="good/v1").is_success, within_s=30, what="an answer")


def test_two_fleets_cannot_share_a_folder_and_nobody_else_can_read_it(small: RunningFleet) -> None:
    second = start(small.state_dir, *FLAGS, "1")
    assert second.process.wait(patience(30)) == 1
    assert "--state-dir" in second.progress()
    assert len(second.progress().splitlines()) == 1
    kill(second)
    assert small.ask(prompt=fresh_prompt()).status_code == 200


def test_the_demo_works_beside_packages_named_like_ours_and_leaves_nothing(tmp_path: Path) -> None:
    for name in ("router", "orchestrator", "workers", "lorafleet"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "__init__.py").write_text("raise ImportError('the package of a user')")
    flags = (*FLAGS, "2", "--demo", "--once")
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


def test_a_folder_that_is_no_adapter_is_reported(small: RunningFleet) -> None:
    assert "adapter bad/v1: failed" in small.progress()
    assert text(small.ask(prompt=fresh_prompt(), lora_id="good/v1"))


def test_an_adapter_may_call_the_base_model_as_a_hub_does(small: RunningFleet) -> None:
    assert text(small.ask(prompt=fresh_prompt(), lora_id="hub/v1"))


def test_an_adapter_of_another_base_model_is_refused_until_somebody_vouches(small: RunningFleet, shelf: Path) -> None:
    assert "adapter other/v1: failed: base_model_mismatch" in small.progress()
    spec = {"lora_id": "other/v1", "source": str(shelf / "other/v1"), "base_model": "tiny-qwen"}
    assert small.http("POST", f"{small.orchestrator}/v1/adapters", json=spec).status_code == 200
    until(
        lambda: small.ask(prompt=fresh_prompt(), lora_id="other/v1").is_success,
        within_s=20,
        what="the adapter that somebody vouches for is served",
    )


def test_a_child_that_cannot_start_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    fleet = start(tmp_path / "state", *FLAGS, "1", "--model", str(model))
    try:
        assert read_line(fleet, within_s=30) == ""
        assert fleet.process.wait(patience(60)) == 1
        assert "w0" in fleet.progress()
        assert str(tmp_path / "state" / "logs" / "w0.log") in fleet.progress()
        assert str(tmp_path / "state" / "workers" / "w0" / "engine.log") in fleet.progress()
    finally:
        left = kill(fleet)
    assert not left


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningFleet, dict[str, str]]]:
    """A fleet with a key file, and its keys by name. sql-expert/v1 is acme's alone."""
    folder = tmp_path_factory.mktemp("guarded")
    path = folder / "keys.yaml"
    keys = {
        "acme": add_key(path, "acme", ["infer"]),
        "other": add_key(path, "other", ["infer"]),
        "admin": add_key(path, None, ["admin"]),
    }
    with running(folder / "state", *FLAGS, "1", "--key-file", str(path), token=keys["admin"]) as fleet:
        spec = {"tenants": ["acme"]}
        changed = fleet.http("PATCH", f"{fleet.orchestrator}/v1/adapters/{SQL}", json=spec)
        assert changed.status_code == 200, changed.text
        other = _as(fleet, keys["other"])
        until(lambda: SQL not in _models(other), within_s=10, what="the router knows whose it is")
        yield fleet, keys


def test_without_a_key_every_service_answers_401(guarded: tuple[RunningFleet, dict[str, str]]) -> None:
    nobody = _as(guarded[0], "")
    for url in (f"{nobody.router}/v1/models", f"{nobody.orchestrator}/v1/adapters"):
        answer = nobody.http("GET", url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    answer = _as(guarded[0], "lf-wrong").ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    said = cli(nobody, "adapters", "list")
    assert said.returncode == 1
    assert "LORAFLEET_TOKEN" in said.stderr


def test_no_service_reads_an_unauthorised_body(guarded: tuple[RunningFleet, dict[str, str]]) -> None:
    fleet, keys = guarded
    agent = fleet.http("GET", f"{fleet.orchestrator}/v1/workers").json()["data"][0]["agent_url"]
    for url in (
        f"{fleet.router}/v1/decisions/replay",
        f"{fleet.orchestrator}/v1/adapters:batch",
        f"{agent}/v1/admin/load_lora",
    ):
        assert _status_before_the_body(url, "lf-wrong") == 401, url
        assert _status_before_the_body(url, keys["acme"]) == 403, url


def _status_before_the_body(url: str, key: str) -> int:
    """The answer to a request's head without its body."""
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {key}\r\n"
    with socket.create_connection((str(parts.hostname), parts.port or 80), timeout=patience(10)) as client:
        client.sendall(f"{head}content-type: application/json\r\ncontent-length: 1000000\r\n\r\n".encode())
        return int(client.recv(64).split()[1])


def test_a_key_without_the_scope_is_refused(guarded: tuple[RunningFleet, dict[str, str]]) -> None:
    fleet, keys = guarded
    acme = _as(fleet, keys["acme"])
    spec = {"lora_id": "mine/v1", "source": "file:///mine"}
    assert acme.http("POST", f"{acme.orchestrator}/v1/adapters", json=spec).status_code == 403
    assert acme.http("POST", f"{acme.router}/v1/route", json=chat()).status_code == 403
    assert cli(fleet, "workers", "list", token=keys["admin"]).returncode == 0


def test_a_tenants_adapter_is_not_there_for_another(guarded: tuple[RunningFleet, dict[str, str]]) -> None:
    fleet, keys = guarded
    acme, other = _as(fleet, keys["acme"]), _as(fleet, keys["other"])
    assert text(acme.ask(prompt=fresh_prompt(), lora_id=SQL))
    assert SQL in _models(acme)
    assert SQL not in _models(other)
    refused = other.ask(prompt=fresh_prompt(), lora_id=SQL)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    # The same message as for an unknown name, so that other tenants learn nothing.
    absent = other.ask(prompt=fresh_prompt(), lora_id="sql-expert/v9")
    assert json.dumps(refused.json()).replace(SQL, "") == json.dumps(absent.json()).replace("sql-expert/v9", "")


def _models(fleet: RunningFleet) -> set[str]:
    return {item["id"] for item in fleet.get(f"{fleet.router}/v1/models")["data"]}


def _as(fleet: RunningFleet, key: str) -> RunningFleet:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return RunningFleet(
        fleet.process, fleet.tag, fleet.state_dir, fleet.errors, fleet.router, fleet.orchestrator, headers=headers
    )


def test_arguments_settings_and_devices_reach_every_engine_of_the_fleet(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("first_sync_wait_s: 5\n")
    flags = ("--devices", "7,8", "--router-config", str(file), "--engine-arg=--sim-seed", "--engine-arg=5")
    words = ("--", "--max-loras", "3", "--served-model-name", "mine", "--enable-auto-tool-choice")
    environment = {"LORAFLEET_WORKERS_MAX_LORA_RANK": "64"}
    with running(tmp_path / "state", *FLAGS[:2], *flags, *words, environment=environment) as fleet:
        engines = fleet.pids("-m", "workers.engines.sim")
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
    fleet = start(tmp_path / "state", *FLAGS, "1", "--", "--no-such-flag")
    try:
        assert fleet.process.wait(patience(60)) == 1
        assert "unrecognized arguments: --no-such-flag" in fleet.progress()
    finally:
        left = kill(fleet)
    assert not left
