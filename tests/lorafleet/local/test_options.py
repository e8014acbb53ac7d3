"""What flags, arguments for engines, environment and files of `lorafleet up` add up to."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lorafleet.local import commands
from lorafleet.local.notices import startup_notices
from lorafleet.local.options import FleetOptions, device_groups, fleet_options, lora_roots, unknown_variables
from lorafleet.service.failure import CommandFailed
from lorafleet.service.settings import SettingsError, load
from workers.config import WorkerSettings
from workers.engines.command import settings_from_command

GPU = {"LORAFLEET_WORKERS_DEVICE_PROFILE": "gpu"}  # the tests' vLLM is built for the CPU
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def ask(*words: str, environment: dict[str, str] | None = None, **changes: Any) -> FleetOptions:
    base = {
        "engine": None, "workers": None, "model": None, "adapters": None, "max_loras": None, "router_port": None,
        "orchestrator_port": None, "state_dir": Path("/state"), "key_file": None, "configs": {}, "devices": None,
        "demo": False, "once": False,
    }  # fmt: skip
    return fleet_options(**{**base, "engine_arguments": words, "environment": environment or {}} | changes)


def settings_of(
    options: FleetOptions, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str] | None = None, rank: int = 16
) -> WorkerSettings:
    """The settings of the first agent of this fleet, as the agent itself reads them."""
    is_tiny = options.model is None
    base = commands.LocalBaseModel(name="tiny-qwen", folder=Path("/state/tiny-qwen"), is_tiny=is_tiny)
    command = commands.agent_command(
        commands.common_flags(0, Path("/state/run/w0.port"), [], options.options_of("workers")),
        name="w0",
        engine=options.engine,
        base=base,
        max_loras=options.max_loras,
        max_lora_rank=options.max_lora_rank,
        needed_rank=rank,
        orchestrator_url="http://127.0.0.1:8080",
        folder=Path("/state"),
        sockets=Path("/tmp/lf"),
        grace_s=10.0,
        given=options.worker_settings(),
    )
    lists = commands.engine_environment(options, lora_roots(options, Path("/shelf")), is_tiny=is_tiny)
    for name, value in {**(environment or {}), **lists}.items():
        monkeypatch.setenv(name, value)
    return settings_from_command(load(WorkerSettings, command[4:], prog="workers"), (), {})


def test_each_worker_has_a_folder_of_its_own_in_vllms_folder_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"VLLM_LORA_ADAPTER_CACHE": "/adapters"}
    assert settings_of(ask(environment=environment), monkeypatch, environment).record_dir == Path("/adapters/w0")


def last(words: Sequence[str], flag: str) -> str:
    return words[len(words) - 1 - words[::-1].index(flag) + 1]


def test_engine_arguments_reach_each_engine_whole_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*TOOLS, "--hf-overrides", '{"a": 1, "b": [2, 3]}', "--seed=7", "--allowed-origins", '["*"]')
    assert settings_of(ask(*words), monkeypatch).engine_args == ("--dtype", "float32", *words)


def test_without_engine_arguments_agents_have_the_defaults_of_up(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ask()
    found = settings_of(options, monkeypatch, rank=32)
    assert (options.engine, options.workers, options.router_port, options.orchestrator_port) == ("vllm", 2, 8000, 8080)
    assert (found.max_loras, found.max_cpu_loras, found.max_lora_rank, found.max_model_len) == (2, 4, 32, 4096)
    assert (found.engine_output, found.log_format, found.lora_roots) == (False, "console", (Path("/shelf"),))


def test_engine_arguments_set_the_agents_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--max_loras", "8", "--max-lora-rank=64", "--served-model-name", "mine", "--max-model-len", "1024")
    found = settings_of(ask(*words, "--dtype", "bfloat16"), monkeypatch)
    assert (found.max_loras, found.max_cpu_loras, found.max_lora_rank, found.model_name) == (8, 16, 64, "mine")
    assert found.max_model_len is None  # from the engine arguments
    assert last(found.engine_args, "--dtype") == "bfloat16"
    assert "float32" not in found.engine_args


def test_arguments_in_the_engines_own_config_file_count_as_engine_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "max-loras: 8\nmax-lora-rank: 64\nserved-model-name: [mine]\nmax-model-len: 1024\nport: 9\ndtype: half"
    )
    words = ("--config", str(file), "--max-loras", "4")
    found = settings_of(ask(*words), monkeypatch)
    assert (found.max_loras, found.max_lora_rank, found.model_name, found.max_model_len) == (4, 64, "mine", None)
    assert found.engine_args == words  # the engine reads its file itself
    file.write_text("tensor-parallel-size: 2")
    assert ask(*words, gpus=["0", "1", "2", "3"], environment=GPU).devices == ("0,1", "2,3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("api-key: secret", "--api-key"),
        ("enable-lora: false", "--no-enable-lora"),
        ("model: Qwen/Qwen3-8B", "--config names a model"),
        ("max-loras: 8", "--max-loras is 2, but 8"),
        ("[1]", "expected a mapping"),
        ("a: [", "vllm.yaml: "),
    ],
)
def test_what_an_engines_config_file_may_not_have_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(text)
    with pytest.raises(CommandFailed, match=message):
        ask("--config", str(file), max_loras=2)


def test_a_config_flag_without_its_file_is_refused() -> None:
    with pytest.raises(CommandFailed, match="--config names no file"):
        ask("--seed", "1", "--config")


def test_environment_and_file_override_the_defaults_of_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text(f"max-lora-rank: 128\nlora_roots: [{tmp_path}]\nmax_loras: 3\nengine_args: [--seed, '1']\n")
    environment = {"LORAFLEET_WORKERS_MAX_LORAS": "5", "LORAFLEET_WORKERS_ENGINE_OUTPUT": "true"}
    options = ask("--dtype", "auto", environment=environment, configs={"workers": file})
    found = settings_of(options, monkeypatch, environment)
    assert (found.max_loras, found.max_cpu_loras, found.max_lora_rank) == (5, 10, 128)
    assert (found.engine_output, found.lora_roots) == (True, (Path("/shelf"), tmp_path))
    assert found.engine_args == ("--seed", "1", "--dtype", "auto")
    by_flag = ask(environment=environment, configs={"workers": file}, max_loras=7)
    assert settings_of(by_flag, monkeypatch, environment).max_loras == 7
    by_flag = ask(environment=environment, configs={"workers": file}, max_lora_rank=64)
    assert settings_of(by_flag, monkeypatch, environment).max_lora_rank == 64


def test_a_folder_with_a_comma_in_its_name_is_one_root(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"LORAFLEET_WORKERS_LORA_ROOTS": '["/a,b"]'}
    assert settings_of(ask(environment=environment), monkeypatch).lora_roots == (Path("/shelf"), Path("/a,b"))


def test_the_environment_can_name_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("port: 8123\nmax_wait_s: 5\n")
    options = ask(environment={"LORAFLEET_ROUTER_CONFIG": str(file)})
    assert (options.router_port, options.options_of("router").config) == (8123, file)
    words = commands.router_command(
        commands.common_flags(0, Path("/p"), [], options.options_of("router")), "http://o", Path("/s"), 10, {}
    )
    assert last(words, "--config") == str(file)


def test_flags_of_up_may_be_given_as_settings() -> None:
    options = ask(
        environment={
            "LORAFLEET_WORKERS_ENGINE": "sim",
            "LORAFLEET_WORKERS_MODEL": "/models/m",
            "LORAFLEET_ROUTER_PORT": "0",
            "LORAFLEET_ORCHESTRATOR_PORT": "9000",
        }
    )
    assert (options.engine, options.model) == ("sim", Path("/models/m"))
    assert (options.router_port, options.orchestrator_port) == (0, 9000)


def test_given_settings_override_the_routers_defaults() -> None:
    words = commands.router_command([], "http://o", Path("/s"), 10.0, {"grace_s": "60"})
    assert "--grace-s" not in words
    assert last(words, "--drain-s") == "0"


@pytest.mark.parametrize(
    ("service", "environment", "own_s"),
    [
        ("router", {}, 0 + 10),
        ("router", {"LORAFLEET_ROUTER_DRAIN_S": "5", "LORAFLEET_ROUTER_GRACE_S": "60"}, 5 + 60),
        ("orchestrator", {}, 10),
        ("orchestrator", {"LORAFLEET_ORCHESTRATOR_STOP_GRACE_S": "1"}, 1),
        ("workers", {}, 10 + 5 + 10),
        (
            "workers",
            {"LORAFLEET_WORKERS_STOP_GRACE_S": "30", "LORAFLEET_WORKERS_ENGINE_SHUTDOWN_S": "60"},
            30 + 60 + 10,
        ),
    ],
)
def test_a_service_is_killed_well_after_the_time_that_its_own_settings_give_to_its_stop(
    service: str, environment: dict[str, str], own_s: float
) -> None:
    given = ask(environment=environment).options_of(service)
    assert commands.stop_timeout_s(service, given, 10.0) >= own_s + 10


def test_orchestrator_and_agents_have_the_fleets_time_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of(ask(), monkeypatch).stop_grace_s == 10
    words = commands.orchestrator_command([], Path("/s"), None, 10.0, {})
    assert last(words, "--stop-grace-s") == "10.0"
    assert "--stop-grace-s" not in commands.orchestrator_command([], Path("/s"), None, 10.0, {"stop_grace_s": "60"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--port", "9000"), "--port cannot be given.*free port"),
        (("--host=0.0.0.0",), "--host cannot be given.*loopback"),
        (("--model", "m"), "--model cannot be given.*give --model of `lorafleet up`"),
        (("--api-key", "x"), "--api-key.*leave it out"),
        (("--kv_events_config.topic=x",), "--kv-events-config.*leave it out"),
        (("--seed 1",), "give engine arguments one by one: '--seed', '1'"),
        (("./adapters",), "'./adapters': `lorafleet up` has no such argument.*behind `--`"),
        (("--max-loras", "8"), "--max-loras is 4, but 8 in the engine arguments: give only one"),
        (("--max-lora-rank=8",), "--max-lora-rank is 32, but 8 in the engine arguments: give only one"),
    ],
)
def test_a_forbidden_engine_argument_is_refused_with_the_reason(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(CommandFailed, match=message) as failure:
        ask(*words, max_loras=4, max_lora_rank=32)
    assert failure.value.status == 2
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LORAFLEET_WORKERS_INSTANCE_ID": "a"}, "LORAFLEET_WORKERS_INSTANCE_ID cannot be set.*w0, w1"),
        ({"LORAFLEET_ROUTER_HOST": "0.0.0.0"}, "LORAFLEET_ROUTER_HOST cannot be set.*loopback"),
        ({"LORAFLEET_ORCHESTRATOR_KEY_FILES": "k"}, "give --key-file"),
        ({"LORAFLEET_ROUTER_PORT": "eight"}, "port 'eight' of the router"),
        ({"LORAFLEET_WORKERS_ENGINE": "vlm"}, "engine 'vlm'.*did you mean vllm"),
        ({"LORAFLEET_WORKERS_ENGINE_ARGS": "--seed 1"}, "it must be a JSON list"),
        ({"LORAFLEET_WORKERS_ENGINE_ARGS": '["--seed", 1]'}, "must be a list of strings"),
        ({"LORAFLEET_WORKERS_ENGINE_ARGS": '["--port", "1"]'}, "--port cannot be given"),
        ({"LORAFLEET_ROUTER_CONFIG": "/nowhere.yaml"}, "/nowhere.yaml"),
        ({"VLLM_API_KEY": "secret"}, "VLLM_API_KEY.*unset it"),
    ],
)
def test_a_setting_that_up_chooses_itself_is_refused_by_name(environment: dict[str, str], message: str) -> None:
    with pytest.raises(CommandFailed, match=message) as failure:
        ask(environment=environment)
    assert failure.value.status == 2
    assert "secret" not in str(failure.value)


@pytest.mark.parametrize("text", [None, "[]", "7", "0", "["])
def test_a_settings_file_that_is_none_is_refused_by_the_flag_or_variable_that_names_it(
    tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "settings.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(CommandFailed, match=r"^--router-config .*settings\.yaml: "):
        ask(configs={"router": file})
    with pytest.raises(CommandFailed, match=r"^LORAFLEET_WORKERS_CONFIG .*settings\.yaml: "):
        ask(environment={"LORAFLEET_WORKERS_CONFIG": str(file)})


def test_a_fixed_setting_in_a_file_is_refused_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "o.yaml"
    file.write_text("store: /var/lib/fleet.db\n")
    with pytest.raises(CommandFailed, match=f"store in {file} cannot be set.*--state-dir"):
        ask(configs={"orchestrator": file})


@pytest.mark.parametrize(
    ("devices", "workers", "groups"),
    [
        ("0,1,2,3", None, ("0", "1", "2", "3")),
        ("0,1,2,3", 2, ("0,1", "2,3")),
        (" GPU-aa , MIG-bb", 1, ("GPU-aa,MIG-bb",)),
        (None, None, ()),
    ],
)
def test_devices_are_divided_evenly_in_order(devices: str | None, workers: int | None, groups: tuple[str, ...]) -> None:
    options = ask(devices=devices, workers=workers)
    assert options.devices == groups
    assert options.workers == (workers or len(groups) or 2)


@pytest.mark.parametrize(
    ("devices", "workers", "message"),
    [
        ("0,1,2", 2, "names 3 devices for 2 workers"),
        ("0,,1", None, "commas"),
        ("0,0", None, "0 is named twice"),
        ("", 1, "give names"),
    ],
)
def test_devices_that_cannot_be_divided_evenly_are_refused(devices: str, workers: int | None, message: str) -> None:
    with pytest.raises(CommandFailed, match=message):
        ask(devices=devices, workers=workers)


def test_device_groups_have_every_device_once() -> None:
    assert device_groups([str(number) for number in range(12)], 3) == ("0,1,2,3", "4,5,6,7", "8,9,10,11")
    with pytest.raises(SettingsError):
        device_groups(["0"], 2)


@pytest.mark.parametrize(
    ("gpus", "workers", "words", "number", "groups"),
    [
        ("0,1,2,3", None, "", 2, ("0", "1")),
        ("0,1,2,3", 4, "", 4, ("0", "1", "2", "3")),
        ("0,1,2,3", None, "--tensor-parallel-size 2", 2, ("0,1", "2,3")),
        ("0,1,2", None, "-tp=2", 1, ("0,1",)),
        ("5", None, "", 1, ("5",)),
        ("0,1", 3, "", 3, ()),  # all have both
        ("0,1", None, "-tp 4", 1, ()),  # vLLM refuses
        ("", None, "", 2, ()),
    ],
)
def test_each_worker_gets_gpus_of_its_own_where_there_are_enough(
    gpus: str, workers: int | None, words: str, number: int, groups: tuple[str, ...]
) -> None:
    options = ask(*words.split(), workers=workers, gpus=gpus.split(",") if gpus else (), environment=GPU)
    assert (options.workers, options.devices) == (number, groups)


def test_engines_without_gpu_get_none_and_named_devices_come_first() -> None:
    assert ask(gpus=["0"], engine="sim").devices == ()
    on_cpu = ask(gpus=["0"], environment={"LORAFLEET_WORKERS_DEVICE_PROFILE": "cpu"})
    assert (on_cpu.workers, on_cpu.devices) == (2, ())
    named = ask("-tp", "2", gpus=["0", "1"], devices="4,5,6,7", environment=GPU)
    assert (named.workers, named.devices) == (2, ("4,5", "6,7"))


def test_a_notice_says_which_gpus_the_workers_have() -> None:
    def notices(**changes: Any) -> list[str]:
        return [line for line in startup_notices(ask(environment=GPU, **changes), {}) if "GPU" in line]

    (own,) = notices(gpus=["0", "1"])
    assert "w0: 0, w1: 1" in own
    (shared,) = notices(gpus=["0"], workers=2)
    assert shared.startswith("all 2 workers start on the same GPUs (0)")
    assert notices(gpus=["0", "1"], devices="0,1") == notices() == []


def test_settings_besides_flags_are_printed(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("{}")
    environment = {"LORAFLEET_WORKERS_SCRAPE_S": "2", "LORAFLEET_WORKER_DTYPE": "x", "LORAFLEET_TOKEN": "secret"}
    lines = startup_notices(ask(engine="sim", environment=environment, configs={"router": file}), environment)
    assert lines[0] == "settings from the environment: LORAFLEET_WORKERS_SCRAPE_S"
    assert lines[1] == f"settings file of the router: {file}"
    assert lines[2].startswith("no service reads LORAFLEET_WORKER_DTYPE; settings begin with")
    assert unknown_variables({"LORAFLEET_URL_ROUTER": "x"}) == []
    assert json.dumps(lines).count("secret") == 0
