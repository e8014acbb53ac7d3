"""The engine's command line, made from the settings."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from lorafleet.engine.metrics_page import parse_metrics
from lorafleet.service.http import envelope
from workers.config import WorkerSettings
from workers.core.errors import AgentRequestError, EngineError, SourceError, WorkerError
from workers.engines.launch import launch_command
from workers.engines.process import without_secrets

COMMON = {"model": "/models/m", "served_model_name": "m"}


def settings(**more) -> WorkerSettings:
    return WorkerSettings(**COMMON | more)


def flag(command, name: str) -> str:
    return command[command.index(name) + 1]


def test_vllm_keeps_its_defaults_on_a_gpu():
    start = launch_command(settings(device_profile="gpu"), port=8100, topic="kv@b")
    assert "--enforce-eager" not in start.command
    assert "--block-size" not in start.command
    assert not any(name.startswith(("VLLM_CPU", "OMP")) for name in start.environment)
    assert start.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_vllm_gets_cpu_flags_on_a_cpu():
    start = launch_command(settings(device_profile="cpu"), port=8100, topic="kv@b")
    assert flag(start.command, "--block-size") == "32"
    assert "--enforce-eager" in start.command
    assert start.environment["OMP_NUM_THREADS"] == "1"


def test_kv_events_use_ipc_sockets_and_the_boots_topic():
    events = json.loads(flag(launch_command(settings(), port=1, topic="kv@b").command, "--kv-events-config"))
    assert events["topic"] == "kv@b"
    assert events["endpoint"].startswith("ipc:///")
    assert events["endpoint"] != events["replay_endpoint"]


def test_own_command_keeps_its_flags_and_gets_the_others():
    own = ("vllm", "serve", "/other", "--max-loras=7", "--port", "9")
    command = launch_command(settings(), port=9, topic="t", own_command=own).command
    assert command[:6] == own
    assert "--model" not in command
    assert "--max-loras" not in command
    assert flag(command, "--max-cpu-loras") == "16"


def test_sglang_gets_the_flags_that_an_agent_needs():
    start = launch_command(settings(engine="sglang", max_loras=4, num_gpu_blocks_override=100), port=7, topic="kv@b")
    command = start.command
    assert command[1:4] == ("-P", "-m", "sglang.launch_server")
    assert {"--enable-lora", "--enable-metrics", "--enable-cache-report"} <= set(command)
    assert flag(command, "--max-loras-per-batch") == "5"  # the base model is one of them
    assert flag(command, "--max-loaded-loras") == "16"
    assert (flag(command, "--page-size"), flag(command, "--max-total-tokens")) == ("16", "1600")
    assert flag(command, "--lora-target-modules") == "all"
    events = json.loads(flag(command, "--kv-events-config"))
    assert events.keys() == {"publisher", "endpoint", "replay_endpoint", "topic"}
    assert not any(name.startswith("VLLM") for name in start.environment)


def test_sglang_on_a_cpu_gets_neither_gpu_timer_nor_triton(monkeypatch):
    on_gpu = launch_command(settings(engine="sglang"), port=7, topic="t")
    assert on_gpu.environment["SGLANG_ENABLE_METRICS_DEVICE_TIMER"] == "1"
    assert "--lora-backend" not in on_gpu.command
    by_profile = launch_command(settings(engine="sglang", device_profile="cpu"), port=7, topic="t")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    for start in (by_profile, launch_command(settings(engine="sglang"), port=7, topic="t")):
        assert start.environment["SGLANG_USE_CPU_ENGINE"] == "1"
        assert "SGLANG_ENABLE_METRICS_DEVICE_TIMER" not in start.environment
        assert flag(start.command, "--lora-backend") == "torch_native"


def test_sgl_jax_gets_its_adapters_and_no_kv_events():
    given = settings(engine="sgl-jax", max_loras=3, max_lora_rank=32, device_profile="cpu")
    adapters = {"sql/v1@1": Path("/cache/1"), "law/v2@2": Path("/cache/2")}
    command = launch_command(given, port=9, topic="t", adapters=adapters).command
    assert command[1:4] == ("-P", "-m", "sgl_jax.launch_server")
    at = command.index("--lora-paths")
    assert command[at + 1 : at + 3] == ("sql/v1@1=/cache/1", "law/v2@2=/cache/2")
    assert (flag(command, "--max-loras-per-batch"), flag(command, "--max-lora-rank")) == ("4", "32")
    assert (flag(command, "--device"), flag(command, "--page-size")) == ("cpu", "16")
    assert flag(command, "--attention-backend") == "native"
    assert "--kv-events-config" not in command
    assert not [each for each in launch_command(given, port=9, topic="t").command if "lora" in each]


def test_own_sglang_command_may_use_either_model_flag():
    own = ("python", "-m", "sglang.launch_server", "--model", "/other", "--page-size=64")
    command = launch_command(settings(engine="sglang"), port=9, topic="t", own_command=own).command
    assert command[:6] == own
    assert "--model-path" not in command
    assert "--page-size" not in command


@pytest.mark.parametrize(("kind", "when"), [("llama.cpp", "at its start"), ("tensorrt-llm", "with a request")])
def test_engine_without_runtime_loading_is_refused_with_the_reason(kind, when):
    with pytest.raises(ValidationError, match=f"{kind} takes adapters {when} alone.*docs/engines.md"):
        settings(engine=kind)


def test_too_long_socket_path_is_refused_with_its_length():
    with pytest.raises(ValidationError, match="at most 107"):
        settings(ipc_dir=Path("/tmp") / ("x" * 90))


def test_two_workers_on_one_machine_have_different_sockets():
    one, other = (settings(state_dir=Path("/s") / name).socket_path("events") for name in "ab")
    assert one != other


def test_engine_arguments_must_be_single_words():
    given = ("--seed", "1", "--chat-template=a b.jinja", "--override", '{"a": 1}', "a text")
    assert settings(engine_args=given).engine_args == given
    with pytest.raises(ValidationError, match=r"give each word as its own argument: '--seed', '1'; found '--seed 1'"):
        settings(engine_args=("--seed 1",))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_loras": 4, "max_cpu_loras": 2},
        {"model": ""},
        {"max_lora_rank": 12},
        {"engine": "sgl-jax", "max_loras": 1, "preload_loras": ("a", "b")},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        settings(**wrong)


def test_every_error_has_a_status_and_an_envelope():
    for cls in (AgentRequestError, SourceError, EngineError):
        assert issubclass(cls, WorkerError)
        for code, status in cls.codes.items():
            error = cls(code, "why")
            assert 400 <= error.status < 600
            assert envelope(status, code, str(error))["error"]["code"] == code


def test_metrics_are_summed_over_ranks():
    page = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
vllm:cache_config_info{block_size="32",num_gpu_blocks="256",engine="0"} 1.0
vllm:request_prefill_kv_computed_tokens_bucket{le="1.0",engine="0"} 9.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0"} 100.0
vllm:request_prefill_time_seconds_sum{engine="0"} 2.0
vllm:request_generation_tokens_sum{engine="0"} 50.0
vllm:request_generation_tokens_count{engine="0"} 10.0
vllm:prompt_tokens_total{engine="0"} 90.0
vllm:prompt_tokens_cached_total{engine="0"} 30.0
vllm:prompt_tokens_cached_by_source_total{engine="0",source="local_cache_hit"} 30.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 3.0
vllm:iteration_tokens_total_count{engine="0"} 7.0
vllm:inter_token_latency_seconds_count{engine="0"} 40.0
vllm:inter_token_latency_seconds_sum{engine="0"} 0.8
process_start_time_seconds 1.7e+09
"""
    found = parse_metrics(page)
    assert (found.running, found.waiting, found.waiting_for_slot) == (4, 2, 1)
    assert found.kv_usage == pytest.approx(0.3)
    assert (found.ended_prefill_tokens, found.ended_prefill_seconds) == (100.0, 2.0)
    assert (found.ended, found.ended_output_tokens, found.ended_seconds) == (10.0, 50.0, 0.0)
    assert (found.computed_tokens, found.steps) == (60.0, 7.0)
    assert (found.token_gaps, found.gap_seconds) == (40.0, 0.8)
    assert (found.block_size, found.total_kv_blocks, found.started_at) == (32, 256, 1.7e9)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("vllm serve --hf-token t0p --port 1", "vllm serve --hf-token *** --port 1"),
        ("vllm serve --hf-token=t0p", "vllm serve --hf-token=***"),
        ("env HF_TOKEN=t0p AWS_SECRET_ACCESS_KEY=t0p A=b vllm", "env HF_TOKEN=*** AWS_SECRET_ACCESS_KEY=*** A=b vllm"),
    ],
)
def test_command_is_logged_without_secrets(command, shown):
    assert " ".join(without_secrets(command.split())) == shown


def test_shell_command_is_logged_without_secrets():
    message = without_secrets(["sh", "-c", "export HF_TOKEN='t 0 p'; API_KEY=t0p exec vllm \"$@\""])
    assert message[2] == 'export HF_TOKEN=***; API_KEY=*** exec vllm "$@"'
