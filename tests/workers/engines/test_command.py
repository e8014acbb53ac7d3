"""Settings from the engine's command, and conflicts between both."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.patience import patience
from tests.workers.running import SIM, RunningWorker
from workers.config import WorkerSettings
from workers.engines.command import CommandError, settings_from_command
from workers.engines.launch import launch_command
from workers.wire import Metadata

SERVE = ("vllm", "serve", "/models/m")


def settings(**more) -> WorkerSettings:
    return WorkerSettings(**{"model": "/models/m"} | more)


def test_settings_are_taken_from_the_engines_command():
    found = settings_from_command(
        settings(), (*SERVE, "--max-loras", "7", "--max-cpu-loras=9", "--served-model-name", "m"), {}
    )
    assert (found.max_loras, found.max_cpu_loras, found.model_name) == (7, 9, "m")
    assert found.model == "/models/m"
    assert settings_from_command(settings(engine_args=("--max-cpu-loras", "33")), (), {}).max_cpu_loras == 33


def test_the_file_of_the_engines_config_flag_counts_before_its_command(tmp_path):
    file = tmp_path / "vllm.yaml"
    file.write_text("max-loras: 7\nmax_cpu_loras: 20\nserved-model-name: m\ndata-parallel-size: 2\nlora-dtype:\n")
    found = settings_from_command(settings(), (*SERVE, "--config", str(file), "--max-cpu-loras", "9"), {})
    assert (found.max_loras, found.max_cpu_loras, found.model_name) == (7, 9, "m")
    assert found.engine_args == ("--api-server-count", "1")  # with ranks vLLM's default is another one
    file.write_text("enable-lora: false")
    with pytest.raises(CommandError, match="--no-enable-lora"):
        settings_from_command(settings(engine_args=("--config", str(file))), (), {})


def test_last_of_two_equal_flags_wins():
    given = settings(engine_args=("--max-cpu-loras", "12"))
    assert settings_from_command(given, (*SERVE, "--max-cpu-loras", "20"), {}).max_cpu_loras == 12


def test_settings_that_agree_stay_as_they_are():
    given = settings(max_cpu_loras=9)
    assert settings_from_command(given, (*SERVE, "--max-cpu-loras", "9"), {}) is given


@pytest.mark.parametrize(
    ("more", "words", "message"),
    [
        ({"max_cpu_loras": 8}, ("--max-cpu-loras", "9"), "max_cpu_loras is 8"),
        ({}, ("--max-cpu-loras", "2"), "at least max_loras 4"),
        ({}, ("--max-lora-rank", "12"), "max_lora_rank"),
        ({}, ("--kv-events-config", "{}"), "--kv-events-config"),
        ({}, ("--kv-events-config={}",), "--kv-events-config"),
        ({}, ("--kv_events_config={}",), "--kv-events-config"),
        ({}, ("--kv-events-config.publisher=null",), "--kv-events-config"),
        ({}, ("--no-enable-lora",), "--no-enable-lora"),
        ({}, ("--api_key", "secret"), "--api-key.*no key for the engine"),
        ({}, ("--uds", "/run/vllm"), "--uds.*host and port"),
        ({}, ("--ssl-keyfile=k.pem",), "--ssl-keyfile.*give the agent --tls-cert"),
        ({}, ("--ssl-certfile", "c.pem"), "--ssl-certfile.*give the agent --tls-cert"),
        ({}, ("--headless",), "--headless.*API server"),
        ({"max_loras": 4}, ("--max_loras", "8"), "--max-loras 8, the setting max_loras is 4"),
        ({}, ("--api-server-count", "2"), "--api-server-count 2"),
        ({}, ("--served-model-name", "a", "b", "--seed", "1"), "--served-model-name a b"),
        ({"engine_url": "http://127.0.0.1:1"}, (), "give only one of them"),
        ({"engine": "sgl-jax", "preload_loras": ("a",)}, ("--lora-paths", "b=/b"), "give only one"),
    ],
)
def test_command_that_contradicts_a_setting_is_refused_by_name(more, words, message):
    with pytest.raises(CommandError, match=message):
        settings_from_command(settings(**more), (*SERVE, *words), {})


def test_environment_that_forbids_loading_is_refused():
    with pytest.raises(CommandError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=0"):
        settings_from_command(settings(), (), {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"})


def test_key_for_the_engine_in_the_environment_is_refused():
    with pytest.raises(CommandError, match=r"VLLM_API_KEY in the environment.*unset it") as refused:
        settings_from_command(settings(), (), {"VLLM_API_KEY": "secret"})
    assert "secret" not in str(refused.value)
    for engine, key in (("vllm", ""), ("sim", "secret"), ("sglang", "secret")):
        assert settings_from_command(settings(engine=engine), (), {"VLLM_API_KEY": key}).engine == engine


def test_flags_with_underscores_equal_those_with_dashes():
    found = settings_from_command(
        settings(), (*SERVE, "--max_loras", "7", "--max_cpu_loras=9", "--served_model_name", "m"), {}
    )
    assert (found.max_loras, found.max_cpu_loras, found.model_name) == (7, 9, "m")


def test_data_parallel_engine_gets_one_api_server():
    assert settings_from_command(settings(), (*SERVE, "--data-parallel-size", "2"), {}).engine_args == (
        "--api-server-count",
        "1",
    )
    assert settings_from_command(settings(), (*SERVE, "-dp", "2", "--api-server-count", "1"), {}).engine_args == ()


@pytest.mark.fleet
async def test_agent_counts_the_slots_of_its_own_engine_command(agent_model, agent_adapters, tmp_path):
    worker = RunningWorker(agent_model, agent_adapters, tmp_path, "--engine", "sim")
    own = ("--", sys.executable, "-P", "-m", "lorafleet.sim", "--max-loras", "3", "--max-cpu-loras", "5")
    async with worker.inside(*own) as client:
        metadata = Metadata.model_validate((await client.get("/metadata")).json()).lora
        assert (metadata.max_loras, metadata.max_cpu_loras, metadata.capacity.available_slots) == (3, 5, 5)


@pytest.mark.fleet
async def test_contradicting_command_ends_the_start_with_one_line(agent_model, agent_adapters, tmp_path):
    worker = RunningWorker(agent_model, agent_adapters, tmp_path, *SIM, "--engine-args=--max-cpu-loras=9")
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "workers", *worker.flags, stderr=asyncio.subprocess.PIPE
    )
    _, message = await asyncio.wait_for(agent.communicate(), patience(20))
    assert agent.returncode == 2
    assert b"max_cpu_loras is 3" in message
    assert b"Traceback" not in message


@pytest.mark.parametrize(
    ("words", "lora_path", "preloads"),
    [
        (("/m/lora/a", "/m/lora/b/v1"), "/m/lora", ("a", "b/v1")),
        (("b/v1=/m/lora/b/v1", "/m/lora/a"), "/m/lora", ("b/v1", "a")),
        (("mine=/m/lora/a",), None, ()),
        (("/a/x", "/b/y"), None, ()),
        (("org/hub",), None, ()),
    ],
)
def test_sgl_jaxs_adapters_below_one_folder_become_preloads_that_the_agent_verifies(words, lora_path, preloads):
    command = ("python", "-m", "sgl_jax.launch_server", "--lora-paths", *words, "--max-loras-per-batch", "8")
    found = settings_from_command(settings(engine="sgl-jax"), command, {})
    assert (found.lora_path, found.preload_loras) == (lora_path and Path(lora_path), preloads)
    assert found.max_loras == 7
    started = launch_command(found, port=9, topic="t", own_command=command, adapters={"a@1": Path("/cache/1")}).command
    at = started.index("--lora-paths")
    assert started.count("--lora-paths") == 1
    assert started[at + 1] == ("a@1=/cache/1" if preloads else words[0])


def test_sgl_jaxs_adapters_outside_lora_path_keep_the_names_of_the_command():
    given = settings(engine="sgl-jax", lora_path="/other")
    assert settings_from_command(given, ("x", "--lora-paths", "/m/a"), {}).preload_loras == ()
    assert settings_from_command(given, ("x", "--lora-paths", "/other/a/v1"), {}).preload_loras == ("a/v1",)


def test_sglangs_batch_flag_counts_the_base_model():
    command = ("python", "-m", "sglang.launch_server", "--max-loras-per-batch", "8", "--max-loaded-loras=32")
    found = settings_from_command(settings(engine="sglang"), command, {})
    assert (found.max_loras, found.max_cpu_loras, found.engine_args) == (7, 32, ())
    with pytest.raises(CommandError, match="--max-loras-per-batch 7, the setting max_loras is 8"):
        settings_from_command(settings(engine="sglang", max_loras=8), command, {})
