"""The parts of `lorafleet up` that need no fleet; whole fleets are in tests/e2e."""

import asyncio
import importlib.util
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lorafleet.local import commands, notices
from lorafleet.local import fleet as local_fleet
from lorafleet.local.fleet import LocalFleet, model_name
from lorafleet.local.notices import earlier_adapter_notices, held_back_notice, starting_status
from lorafleet.local.options import FleetOptions
from lorafleet.local.processes import ChildProcess, ProcessGuard, clean_environment, kill_marked, marked_processes
from lorafleet.local.progress import StartProgress
from lorafleet.local.up import require_startable, run_fleet
from lorafleet.service.failure import CommandFailed
from tests.patience import until, wait_until
from tests.workers.running import is_running

SLEEPER = "import time; time.sleep(600)"


def options(tmp_path: Path, **changes: object) -> FleetOptions:
    base = {
        "engine": "sim", "workers": 1, "model": None, "adapters": None, "max_loras": 2, "router_port": 0,
        "orchestrator_port": 0, "state_dir": tmp_path / "state",
    }  # fmt: skip
    return FleetOptions(**(base | changes))


@pytest.mark.parametrize("flag", ["--router-port", "--orchestrator-port"])
def test_a_port_in_use_gives_one_line_that_names_the_flag(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CommandFailed) as failure:
            run_fleet(options(tmp_path, **{flag.removeprefix("--").replace("-", "_"): port}))
    assert flag in str(failure.value)
    assert str(port) in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": Path("/nowhere")}, "--model"),
        ({"adapters": Path("/nowhere")}, "--adapters"),
        ({"key_file": Path("/nowhere")}, "--key-file"),
        ({"router_port": 18431, "orchestrator_port": 18431}, "--router-port"),
        ({"state_dir": Path("/proc/nothing")}, "--state-dir"),
    ],
)
def test_a_wrong_flag_is_refused_by_name_before_anything_starts(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(CommandFailed, match=named) as failure:
        run_fleet(options(tmp_path, **changes))
    assert failure.value.status == 2


def test_a_hub_name_as_model_gives_the_download_command(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"`hf download Qwen/Qwen2.5-0.5B-Instruct` fetches"):
        require_startable(options(tmp_path, model=Path("Qwen/Qwen2.5-0.5B-Instruct")))
    with pytest.raises(CommandFailed, match=r"give the folder of a Hugging Face model$"):
        require_startable(options(tmp_path, model=tmp_path))


def test_a_missing_vllm_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else find(name, *a))
    with pytest.raises(CommandFailed, match="make install"):
        run_fleet(options(tmp_path, engine="vllm"))


def test_adapters_of_earlier_runs_are_reported() -> None:
    known = {"now/v1": "tiny", "old/v1": "tiny", "new/v1": None, **{f"o{number}": "other" for number in range(7)}}
    same, foreign = earlier_adapter_notices(known, ["now/v1"], "tiny")
    assert same.endswith(": new/v1, old/v1")
    assert "7 from earlier runs are for base model other" in foreign
    assert "o0, o1, o2, o3, o4, ...;" in foreign
    assert earlier_adapter_notices({"now/v1": "tiny"}, ["now/v1"], "tiny") == []


def test_a_cordoned_worker_is_reported_with_the_uncordon_command() -> None:
    command = "lorafleet --orchestrator-url http://127.0.0.1:9 --token KEY"
    for state, said in (("cordoned", "it gets no adapters"), ("draining", "it takes no requests")):
        line = held_back_notice("w3", state, command)
        assert line.endswith(f"to undo that: {command} workers uncordon w3")
        assert said in line


def test_a_starting_worker_shows_its_reason() -> None:
    assert starting_status("vllm", "starting") == "starting vllm"
    assert starting_status("vllm", "starting: not registered yet") == "starting vllm (not registered yet)"
    assert starting_status("vllm", "lost\nmore") == "starting vllm (lost)"


def test_a_base_model_has_its_folders_name_and_that_of_its_repository_in_a_hubs_cache(tmp_path: Path) -> None:
    snapshot = (
        tmp_path / "hub" / "models--Qwen--Qwen2.5-0.5B-Instruct" / "snapshots" / "7ae557604adf67be50417f59c2c2f167"
    )
    snapshot.mkdir(parents=True)
    (tmp_path / "qwen").symlink_to(snapshot)
    assert model_name(snapshot) == "Qwen2.5-0.5B-Instruct"
    assert model_name(tmp_path / "qwen") == "qwen"
    assert model_name(tmp_path / "hub" / ".." / "qwen") == "qwen"


@pytest.mark.parametrize(
    ("configs", "fits"),
    [
        ([], 16),
        ([{"r": 8}], 16),
        ([{"r": 8}, {"r": 17}], 32),
        ([{"r": 64}, {"r": 8}], 64),
        ([{"r": 1000}], 512),
        ([{"r": 8, "rank_pattern": {"q_proj": 128}}, {"r": 32}], 128),
        ([{"r": 8, "rank_pattern": {r"layers\.\d{1,2}\.(self_attn|mlp)\.(q|up)_proj": 32}}], 32),
        ([{"r": 64, "use_dora": True}, {"r": 8}], 16),  # no agent takes it
        ([{"r": "many"}, {"r": 20}], 32),
    ],
)
def test_the_engine_is_padded_to_the_largest_rank_that_an_agent_takes(
    tmp_path: Path, configs: list[dict[str, object]], fits: int
) -> None:
    folders = []
    for index, config in enumerate(configs):
        folders.append(tmp_path / str(index))
        folders[-1].mkdir()
        whole = {"peft_type": "LORA", "lora_alpha": 16, "target_modules": ["q_proj"]} | config
        (folders[-1] / "adapter_config.json").write_text(json.dumps(whole))
    assert commands.rank_for([*folders, tmp_path / "missing"]) == fits


def test_the_lines_to_try_are_commands_with_json_bodies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    notices.print_ready("http://r", "http://o", tmp_path, "tiny", ["sql/v1"], has_keys=True)
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "ready router=http://r orchestrator=http://o"
    curls = [line.strip() for line in out.splitlines() if line.strip().startswith("curl")]
    bodies = [json.loads(line.partition("-d '")[2].removesuffix("'")) for line in curls]
    assert [body["model"] for body in bodies] == ["tiny", "sql/v1", "sql/v1"]
    assert all("Bearer $KEY" in line for line in curls)
    assert "http://r/metrics" in out
    assert "with a key of scope metrics" in out


def test_with_certificates_the_command_line_gets_their_authority_and_both_addresses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    notices.print_ready("https://r", "https://o", tmp_path, "tiny", [], has_keys=False, ca=tmp_path / "ca.pem")
    out = capsys.readouterr().out
    names = f"LORAFLEET_TLS_CA={tmp_path}/ca.pem LORAFLEET_URL_ROUTER=https://r LORAFLEET_URL_ORCHESTRATOR=https://o"
    assert f"  export {names}\n" in out
    assert out.count(f"--cacert {tmp_path}/ca.pem") == 2


def test_without_adapters_no_command_is_repeated() -> None:
    lines = notices.curl_lines("http://r", "tiny", [], has_keys=False)
    assert len(lines) == len(set(lines)) == 2


def test_a_child_gets_its_own_services_settings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LORAFLEET_ROUTER_PORT", "LORAFLEET_WORKERS_SEED", "LORAFLEET_TOKEN"):
        monkeypatch.setenv(name, "1")

    def ours(of: str) -> set[str]:
        return {name for name in clean_environment("mark", of) if name.startswith("LORAFLEET_")}

    assert ours("workers") == {"LORAFLEET_FLEET_MARK", "LORAFLEET_WORKERS_SEED"}
    assert ours("router") == {"LORAFLEET_FLEET_MARK", "LORAFLEET_ROUTER_PORT"}
    assert ours("") == {"LORAFLEET_FLEET_MARK"}


def test_without_a_terminal_steps_are_timed_lines() -> None:
    out = io.StringIO()
    with StartProgress(out) as steps:
        steps.begin("w0", "starting")
        steps.update("w0", "starting")
        steps.finish("w0", "ready")
    lines = out.getvalue().splitlines()
    assert [line.partition("] ")[2] for line in lines] == ["w0: starting", "w0: ready"]
    assert all(line.startswith("[") and line[7:11] == " s] " for line in lines)


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEPER}"
    child = ChildProcess(
        name="stubborn",
        command=lambda: [sys.executable, "-c", code],
        environment=dict(os.environ),
        log_path=tmp_path / "log",
    )
    await child.start()
    await until(lambda: "up" in child.tail())
    assert await child.stop(0.1) is False
    assert not child.is_running
    assert await child.stop(0.1) is True


@pytest.mark.parametrize("is_ready", [True, False])
async def test_a_child_that_cannot_be_started_again_does_not_end_a_ready_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ready: bool
) -> None:
    monkeypatch.setattr(local_fleet, "_LONGEST_BACKOFF_S", 0.0)
    fleet = LocalFleet(options(tmp_path, state_dir=tmp_path))
    fleet.is_ready = is_ready
    logs, said, command = tmp_path / "logs", list[str](), [sys.executable, "-c", ""]
    logs.mkdir()

    def say(line: str) -> None:
        said.append(line)
        if "cannot be started" in line:
            logs.mkdir()  # whoever removed it puts it back

    child = ChildProcess(
        name="router", command=lambda: command, environment=dict(os.environ), log_path=logs / "router.log"
    )
    try:
        await child.start()
        shutil.rmtree(logs)
        command[-1] = SLEEPER
        monkeypatch.setattr(fleet.steps, "say", say)
        keeper = asyncio.create_task(fleet._keep_running(child))
        await until(lambda: child.starts == 2 or keeper.done())
        assert child.is_running == is_ready
        assert [line for line in said if "router: cannot be started" in line] == said[1:]
        keeper.cancel()
        with pytest.raises(asyncio.CancelledError if is_ready else FileNotFoundError):
            await keeper
    finally:
        await child.stop(0)
        await fleet.stop()


def test_marked_processes_are_killed_in_every_session() -> None:
    mark = os.urandom(8).hex()
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], env=clean_environment(mark), start_new_session=True
    )  # a session of its own, as an engine's helpers may have
    wait_until(lambda: marked_processes(mark) == [process.pid])
    assert kill_marked(mark, within_s=0.2) == [process.pid]
    assert process.wait(5) == -signal.SIGKILL
    assert marked_processes(mark) == []


def test_the_guard_cleans_up_after_a_killed_parent(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    mark = os.urandom(8).hex()
    code = (
        "import subprocess, sys, time; from pathlib import Path\n"
        "from lorafleet.local.processes import ProcessGuard, clean_environment\n"
        f"guard = ProcessGuard({mark!r}, Path({str(scratch)!r}))\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], env=clean_environment({mark!r}))\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        assert is_running(grandchild)
        parent.kill()
    wait_until(lambda: not is_running(grandchild) and not scratch.exists())


def test_a_released_guard_cleans_up_and_ends(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    guard = ProcessGuard(os.urandom(8).hex(), scratch)
    guard.release()
    assert not scratch.exists()


@pytest.mark.parametrize(
    ("changes", "missing", "says"),
    [
        ({"engine": "vllm"}, "vllm", "make install"),
        ({}, "numpy", r"lorafleet\[demo\]"),
        ({}, "safetensors", r"lorafleet\[demo\]"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_what_installs_it(tmp_path, changes, missing, says):
    with pytest.raises(CommandFailed, match=says):
        require_startable(options(tmp_path, **changes), has=lambda module: module != missing)
    require_startable(options(tmp_path), has=lambda module: module in ("numpy", "safetensors"))
