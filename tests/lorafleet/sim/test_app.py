"""The sim as a process: start, refused flags, and end."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from lorafleet.local.tiny_model import make_adapters, make_model
from lorafleet.sim.settings import parse_settings
from tests.engines import RunningEngine, start_engine
from tests.patience import patience, wait_until


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[RunningEngine]:
    running = start_engine("sim", model_dir, flags=("--sim-response-tokens", "12", "--sim-decode-tokens-per-s", "500"))
    yield running
    running.stop()


def load(engine: RunningEngine, name: str, path: Path) -> None:
    answer = httpx.post(
        f"{engine.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}, timeout=patience(10)
    )
    assert answer.status_code == 200, answer.text


def complete(engine: RunningEngine, **body: object) -> httpx.Response:
    return httpx.post(f"{engine.url}/v1/completions", json={"prompt": "hello", **body}, timeout=patience(30))


@pytest.mark.fleet
def test_sim_starts_within_seconds_on_a_busy_machine(engine: RunningEngine) -> None:
    assert engine.started_in_s < patience(2)  # 0.3-0.5 s when idle


@pytest.mark.fleet
def test_answer_ends_at_its_natural_length_unless_eos_is_ignored(engine: RunningEngine) -> None:
    natural = complete(engine, max_tokens=50).json()
    assert (natural["choices"][0]["finish_reason"], natural["usage"]["completion_tokens"]) == ("stop", 12)
    longer = complete(engine, max_tokens=50, ignore_eos=True).json()
    assert (longer["choices"][0]["finish_reason"], longer["usage"]["completion_tokens"]) == ("length", 50)
    assert longer["choices"][0]["text"].startswith(natural["choices"][0]["text"])


@pytest.mark.fleet
def test_text_ends_before_the_stop_string(engine: RunningEngine) -> None:
    text = complete(engine, max_tokens=10).json()["choices"][0]["text"]
    word = text.split()[4]
    choice = complete(engine, max_tokens=10, stop=[word]).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)
    assert choice["text"] == text[: text.index(word)]


@pytest.mark.fleet
def test_text_depends_on_an_adapters_content_not_on_its_name(engine: RunningEngine, tmp_path: Path) -> None:
    first, second, _ = make_adapters(tmp_path)
    load(engine, "one", first)
    load(engine, "same", first)
    load(engine, "other", second)
    texts = [
        complete(engine, model=name).json()["choices"][0]["text"] for name in ("one", "same", "other", "tiny-qwen")
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    for name in ("one", "same", "other"):
        httpx.post(
            f"{engine.url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=patience(10)
        ).raise_for_status()


@pytest.mark.fleet
def test_many_concurrent_requests_are_all_answered(engine: RunningEngine) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda n: complete(engine, prompt=[n + 5] * 40, max_tokens=20), range(40)))
    assert {answer.status_code for answer in answers} == {200}


@pytest.mark.fleet
def test_client_that_disconnects_before_the_answer_ends_the_request(model_dir: Path) -> None:
    engine = start_engine("sim", model_dir, flags=("--sim-decode-tokens-per-s", "1"))
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{engine.url}/v1/completions", json={"prompt": "hello", "max_tokens": 1000}, timeout=0.3)
        aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny-qwen"} 1.0'
        wait_until(lambda: aborted in httpx.get(f"{engine.url}/metrics", timeout=patience(10)).text)
        running = 'vllm:num_requests_running{engine="0",model_name="tiny-qwen"} 0.0'
        assert running in httpx.get(f"{engine.url}/metrics", timeout=patience(10)).text
    finally:
        engine.stop()


@pytest.mark.fleet
def test_engine_with_deleted_adapter_files_dies_and_exits_with_0(model_dir: Path, tmp_path: Path) -> None:
    engine = start_engine("sim", model_dir, flags=("--max-loras", "1", "--max-cpu-loras", "1"))
    try:
        first, second, _ = make_adapters(tmp_path)
        load(engine, "gone", first)
        load(engine, "pushes-it-out", second)
        shutil.rmtree(first)
        body = {"prompt": "hello", "max_tokens": 1000, "stream": True}
        with httpx.stream("POST", f"{engine.url}/v1/completions", json=body) as innocent:
            lines = innocent.iter_lines()
            next(lines)
            answer = complete(engine, model="gone")
            *_, error, _, done, _ = lines
        fault = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        body = {"error": {"message": fault, "type": "InternalServerError", "param": None, "code": 500}}
        assert (error, done) == (f"data: {json.dumps(body)}", "data: [DONE]")
        assert (answer.status_code, answer.json()) == (500, body)
        assert engine.process.wait(patience(10)) == 0
    finally:
        engine.stop()


@pytest.mark.fleet
def test_sigterm_without_shutdown_timeout_ends_requests_at_once(model_dir: Path) -> None:
    flags = ("--shutdown-timeout", "0", "--sim-decode-tokens-per-s", "1")
    engine = start_engine("sim", model_dir, flags=flags)
    body = {"prompt": "hello", "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{engine.url}/v1/completions", json=body, timeout=patience(10)) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert engine.stop() == 0  # the request would take 15 minutes


@pytest.mark.fleet
def test_runtime_loading_is_off_unless_the_environment_allows_it(model_dir: Path) -> None:
    engine = start_engine("sim", model_dir, environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"})
    try:
        answer = httpx.post(
            f"{engine.url}/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"}, timeout=patience(10)
        )
        assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-lroas", "2"], "unrecognized arguments: --max-lroas 2"),
        (["--max-loras", "2", "--max-cpu-loras", "1"], "max_cpu_loras (1) must be >= max_loras (2)."),
        (["--max-lora-rank", "12"], "--max-lora-rank: invalid choice"),
        (["--num-gpu-blocks-override", "2", "--max-model-len", "64"], "give more blocks or a shorter length"),
        (["--kv-events-config", '{"topick": "x"}'], "topick"),
    ],
)
def test_unsupported_flag_is_refused_by_name(
    model_dir: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_settings(["--model", str(model_dir), *flags], {})
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.fleet
def test_missing_model_is_refused_by_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "lorafleet.sim", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"--model {tmp_path}: no tokenizer.json there" in done.stderr
