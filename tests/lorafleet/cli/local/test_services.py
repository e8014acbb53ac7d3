"""`lorafleet router|orchestrator|agent`, `lorafleet logs`, and what `show` and `add` say of workers and folders."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from lorafleet.cli.local.logs import line_time
from lorafleet.cli.local.services import SERVICES
from lorafleet.cli.main import options_first
from tests.lorafleet.cli.answers import answering
from tests.lorafleet.cli.conftest import Run
from tests.lorafleet.cli.test_output_flags import completed
from tests.patience import patience, wait_until

LORAFLEET = [
    sys.executable,
    "-P",
    "-c",
    "import sys; sys.argv[0] = 'lorafleet'; from lorafleet.cli.main import main; main()",
]


@pytest.mark.fleet
@pytest.mark.parametrize("service", ["router", "orchestrator"])
def test_a_service_runs_as_the_process_of_its_command_whatever_the_folder_holds(tmp_path: Path, service: str) -> None:
    for name in SERVICES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('another program')")
    port_file, folder = tmp_path / "port", tmp_path / "state"
    words = {
        "router": ["--orchestrator-url", "http://127.0.0.1:1", "--token", "its-own"],
        "orchestrator": ["--store", str(folder / "store.db")],
    }
    folder.mkdir()
    process = subprocess.Popen(
        [*LORAFLEET, service, "--port", "0", "--port-file", str(port_file), *words[service]],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: port_file.exists() or process.poll() is not None)
        assert process.poll() is None, process.communicate()[1].decode()
        answer = httpx.get(f"http://127.0.0.1:{port_file.read_text()}/health", timeout=patience(10))
        assert answer.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(patience(30)) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_password_on_the_command_line_is_refused_and_not_repeated() -> None:
    address = "postgresql://fleet:hush@127.0.0.1:1/fleet"
    for words in (["store", "copy", "a.db", address], ["orchestrator", "--store", address]):
        done = subprocess.run([*LORAFLEET, *words], capture_output=True, text=True, timeout=patience(60), check=False)
        assert done.returncode != 0
        assert "PGPASSFILE" in done.stderr
        assert "hush" not in done.stderr + done.stdout


def test_the_agents_command_gets_what_is_behind_two_dashes() -> None:
    words = ["agent", "--engine-port", "1", "--", "python", "-m", "engine", "--", "--token"]
    answer = subprocess.run(
        [sys.executable, "-P", "-c", _SHOW_EXEC, *words], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(answer.stdout)[1:] == ["-P", "-m", "workers", *words[1:]]


_SHOW_EXEC = """
import json, os, sys
os.execv = lambda _path, words: print(json.dumps(words))
from lorafleet.cli.main import main
main()
"""


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_global_options_behind_a_services_command_are_the_services(service: str) -> None:
    flags = {"--token", "--router-url"}
    assert options_first([service, "--token", "x"], flags, passing_on=SERVICES) == [service, "--token", "x"]
    assert options_first(["--token", "x", service, "--token", "y"], flags, passing_on=SERVICES) == [
        *("--token", "x"),
        *(service, "--token", "y"),
    ]
    assert options_first(["workers", "show", service, "--token", "x"], flags, passing_on=SERVICES) == [
        *("--token", "x"),
        *("workers", "show", service),
    ]


@pytest.mark.parametrize(
    ("service", "flag"), [("router", "--orchestrator-url"), ("orchestrator", "--store"), ("agent", "--model")]
)
def test_the_help_of_a_service_has_its_flags(run: Run, service: str, flag: str) -> None:
    result = run(service, "--help")
    assert result.status == 0
    assert f"  {flag} " in result.out


@pytest.mark.slow
def test_services_and_their_flags_are_completed() -> None:
    assert "orchestrator" in completed("lorafleet orch", "http://127.0.0.1:1")
    assert "--orchestrator-url" in completed("lorafleet router --orch", "http://127.0.0.1:1")


# -- logs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "workers" / "w0").mkdir(parents=True)
    (tmp_path / "logs" / "router.log").write_text(
        "2020-11-28T10:00:00.000000Z [info     ] first\n"
        "2020-11-28T10:00:02.000000Z [error    ] third\n"
        "Traceback of the third\n"
    )
    (tmp_path / "logs" / "w0.log").write_text('{"timestamp": "2020-11-28T10:00:01.5Z", "event": "second"}\n')
    (tmp_path / "workers" / "w0" / "engine.log").write_text("INFO engine's own\n")
    return tmp_path


def test_logs_are_shown_in_the_order_of_their_times(run: Run, state: Path) -> None:
    result = run("logs", "router", "w0", "--state-dir", str(state))
    assert result.status == 0
    ends = [line.rsplit(maxsplit=1)[-1].strip('"}') for line in result.out.splitlines()]
    assert ends == ["first", "second", "third", "third"]
    assert result.out.splitlines()[1].startswith("w0     | ")
    assert "Traceback" in result.out.splitlines()[3]


def test_one_services_log_has_no_names_and_the_last_lines_alone(run: Run, state: Path) -> None:
    result = run("logs", "router", "-n", "1", "--state-dir", str(state))
    assert result.out == "Traceback of the third\n"
    assert run("logs", "w0-engine", "--state-dir", str(state)).out == "INFO engine's own\n"


def test_logs_begin_at_a_time(run: Run, state: Path) -> None:
    shown = run("logs", "router", "--since", "2020-11-28T10:00:01", "--state-dir", str(state)).out
    assert [line.split()[-1] for line in shown.splitlines()] == ["third", "third"]
    assert run("logs", "--since", "1h", "--state-dir", str(state)).out == ""
    wrong = run("logs", "--since", "soon", "--state-dir", str(state))
    assert (wrong.status, "--since soon" in wrong.err) == (2, True)


def test_an_unknown_service_is_refused_with_those_that_there_are(run: Run, state: Path) -> None:
    result = run("logs", "w7", "--state-dir", str(state))
    assert (result.status, "no log of w7; there are: orchestrator" in result.err) == (2, False)
    assert "there are: router, w0, w0-engine" in result.err


def test_without_a_local_fleet_the_command_for_kubernetes_is_named(run: Run, tmp_path: Path) -> None:
    result = run("logs", "--state-dir", str(tmp_path))
    assert result.status == 1
    assert "kubectl logs -l app.kubernetes.io/component=router" in result.err
    assert len(result.err.splitlines()) == 1


def test_logs_are_followed_also_in_a_file_that_is_begun_anew(state: Path) -> None:
    command = [*LORAFLEET, "logs", "router", "--follow", "--state-dir", str(state)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    try:
        assert [process.stdout.readline() for _ in range(3)][-1] == "Traceback of the third\n"
        with (state / "logs" / "router.log").open("a") as log:
            log.write("half")
            log.flush()
            log.write(" a line\n")
        assert process.stdout.readline() == "half a line\n"
        (state / "logs" / "router.log").write_text("anew\n")
        assert process.stdout.readline() == "anew\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(patience(20)) == 130
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("line", "second"),
    [
        ("2020-11-28T10:00:07.123456Z [info] x", 7),
        ("\x1b[2m2020-11-28T10:00:08Z\x1b[0m [info] x", 8),
        ('{"timestamp": "2020-11-28T10:00:09Z", "event": "x"}', 9),
        ("Traceback (most recent call last):", None),
        ("2020-99-99T10:00:08Z x", None),
    ],
)
def test_the_time_of_a_line_is_that_at_its_beginning(line: str, second: int | None) -> None:
    found = line_time(line)
    assert (found and found.replace(microsecond=0)) == (
        None if second is None else datetime(2020, 11, 28, 10, 0, second, tzinfo=UTC)
    )


# -- one worker, one rollout, one folder -----------------------------------------------------------------------

WORKER = {"id": "w1", "state": "ready", "capacity": {"slots": 4}, "adapters": ["sql/v1"], "drain": None}


def test_one_worker_is_shown_for_people_and_for_programs(run: Run) -> None:
    with answering(WORKER) as url:
        shown = run("workers", "show", "w1", "--orchestrator-url", url)
    assert shown.status == 0
    assert ["adapters", "sql/v1"] in [line.split() for line in shown.out.splitlines()]
    with answering(WORKER) as url:
        assert json.loads(run("workers", "show", "w1", "-o", "json", "--orchestrator-url", url).out) == WORKER
    with answering(WORKER) as url:
        assert run("workers", "show", "w1", "-o", "name", "--orchestrator-url", url).out == "w1\n"


COUNTS = {"requests": 3, "errors": 0, "error_rate": 0.0, "mean_first_token_s": None}
ROLLOUT = {
    "name": "sql",
    "spec": {"to": "sql/v2", "steps": [{"weight": 0.5}]},
    "status": {
        "to": [{"lora_id": "sql/v2", "weight": 1.0}],
        "state": "running",
        "paused": False,
        "step": 0,
        "steps": [{"weight": 0.5}],
        "weight": 0.5,
        "reason": "",
        "lacks": {},
        "old": COUNTS,
        "new": COUNTS,
    },
}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "sql -> sql/v2: running"),
        (("-o", "json"), '"state": "running"'),
        (("--json",), '"state": "running"'),
        (("-o", "yaml"), "state: running\n"),
        (("-o", "name"), "sql\n"),
        (("-o", "wide"), "steps"),
    ],
)
def test_a_rollout_is_shown_for_people_and_for_programs(run: Run, flags: tuple[str, ...], says: str) -> None:
    with answering(ROLLOUT) as url:
        result = run("rollout", "show", "sql", *flags, "--orchestrator-url", url)
    assert result.status == 0
    assert says in result.out


def test_a_folder_without_an_adapter_is_refused_before_anything_is_sent(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    result = run("adapters", "add", "sql/v1", str(tmp_path), "--orchestrator-url", "http://127.0.0.1:1")
    assert result.status == 2
    assert "no adapter_config.json and no adapter_model.safetensors; the folder has notes.txt" in result.err
    assert f"file://{tmp_path}" in result.err
    below = tmp_path / "checkpoint-7"
    below.mkdir()
    (below / "adapter_config.json").write_text("{}")
    result = run("adapters", "add", "sql/v1", str(tmp_path), "--orchestrator-url", "http://127.0.0.1:1")
    assert f"did you mean {below}?" in result.err
    result = run("adapters", "add", "sql/v1", str(below), "--orchestrator-url", "http://127.0.0.1:1")
    assert "no adapter_model.safetensors; the folder has adapter_config.json" in result.err
    (below / "adapter_model.bin").write_text("")
    result = run("adapters", "add", "sql/v1", str(below), "--orchestrator-url", "http://127.0.0.1:1")
    assert "--orchestrator-url" in result.err, "workers judge weights of another form"
