"""Real engine processes for tests: the sim and vLLM on the CPU, started with the same arguments, and two stubs.

With LORAFLEET_SGLANG_PYTHON, a Python with SGLang, real SGLang replaces its stub; likewise LORAFLEET_SGL_JAX_PYTHON.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lorafleet.service.network.sockets import bind_socket
from tests.patience import patience
from workers.engines.launch import CPU_ENVIRONMENT

Kind = Literal["sim", "vllm", "sglang", "sgl-jax"]

SGLANG_PYTHON = os.environ.get("LORAFLEET_SGLANG_PYTHON", "")
SGL_JAX_PYTHON = os.environ.get("LORAFLEET_SGL_JAX_PYTHON", "")
MODULES = {
    "sim": "lorafleet.sim",
    "vllm": "vllm.entrypoints.openai.api_server",
    "sglang": "sglang.launch_server" if SGLANG_PYTHON else "tests.sglang_stub",
    "sgl-jax": "sgl_jax.launch_server" if SGL_JAX_PYTHON else "tests.sgl_jax_stub",
}
# vLLM: 25-60 s alone on 2 cores, longer beside other work
START_WITHIN_S = {
    "sim": 20.0,
    "vllm": 120.0,
    "sglang": 600.0 if SGLANG_PYTHON else 20.0,
    "sgl-jax": 600.0 if SGL_JAX_PYTHON else 20.0,
}

# The smallest vLLM 0.32 on 2 cores; the sim ignores some of the flags.
FLAGS: Sequence[str] = (
    "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "16", "--enforce-eager",
    "--max-model-len", "2048", "--max-num-batched-tokens", "2048", "--max-num-seqs", "8", "--block-size", "32",
    "--num-gpu-blocks-override", "256", "--enable-prompt-tokens-details", "--shutdown-timeout", "20",
)  # fmt: skip
SGLANG_FLAGS: Sequence[str] = (
    "--enable-lora", "--max-loras-per-batch", "3", "--max-loaded-loras", "4", "--max-lora-rank", "16",
    "--lora-target-modules", "all", "--context-length", "2048", "--chunked-prefill-size", "2048",
    "--max-running-requests", "8", "--page-size", "32", "--max-total-tokens", "8192", "--enable-metrics",
    "--enable-cache-report",
)  # fmt: skip
SGL_JAX_FLAGS: Sequence[str] = (
    "--max-loras-per-batch", "3", "--max-lora-rank", "16", "--lora-target-modules", "all", "--context-length", "2048",
    "--chunked-prefill-size", "2048", "--max-running-requests", "8", "--page-size", "32", "--max-total-tokens", "8192",
    "--enable-cache-report",
)  # fmt: skip
if SGL_JAX_PYTHON:
    SGL_JAX_FLAGS = (
        *SGL_JAX_FLAGS, "--device", "cpu", "--dtype", "float32", "--attention-backend", "native",
        "--disable-overlap-schedule", "--skip-server-warmup", "--disable-precompile",
    )  # fmt: skip
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    SGLANG_FLAGS = (*SGLANG_FLAGS, "--lora-backend", "torch_native")
ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    **CPU_ENVIRONMENT,
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "SGLANG_STUB_HEALTH_S": "0.01",
    "SGLANG_STUB_TOKEN_S": "0.001",
}


@dataclass(slots=True)
class RunningEngine:
    """A running engine that answers /health; the caller stops it."""

    kind: Kind
    url: str
    model: str
    kv_endpoint: str
    replay_endpoint: str
    log: Path
    process: "subprocess.Popen[bytes]"
    started_in_s: float
    _folder: Path

    def stop(self, *, within_s: float = 60.0) -> int:
        """Send SIGTERM, wait, and kill the rest of the process group; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(patience(within_s))
        finally:
            end_group(self.process)
            shutil.rmtree(self._folder, ignore_errors=True)


def start_engine(
    kind: Kind,
    model_dir: Path,
    *,
    served_model_name: str = "tiny-qwen",
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> RunningEngine:
    """Start an engine, KV events on ipc sockets; returns once it answers.

    host, port   where it listens; port 0: a free one
    flags        come after `FLAGS`, so that they win
    raises       RuntimeError with the end of the engine's log if it exits or is not healthy in time
    """
    if not port:
        more = {"served_model_name": served_model_name, "flags": flags, "environment": environment, "host": host}
        with bind_socket(host, 0) as reserved:
            return start_engine(kind, model_dir, **more, port=reserved.getsockname()[1])
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir="/tmp"))  # short: an ipc path has at most 107 bytes
    kv_endpoint, replay_endpoint = f"ipc://{folder}/kv", f"ipc://{folder}/replay"
    events = {"publisher": "zmq", "endpoint": kv_endpoint, "replay_endpoint": replay_endpoint, "topic": "kv"}
    python, model_flag, own = sys.executable, "--model", FLAGS
    if kind == "sglang":
        python, model_flag, own = SGLANG_PYTHON or python, "--model-path", SGLANG_FLAGS
    elif kind == "sgl-jax":
        python, model_flag, own = SGL_JAX_PYTHON or python, "--model-path", SGL_JAX_FLAGS
    else:
        events["enable_kv_cache_events"] = True
    command = [python, "-P", "-m", MODULES[kind], model_flag, str(model_dir), "--served-model-name", served_model_name]
    publishing = [] if kind == "sgl-jax" else ["--kv-events-config", json.dumps(events)]
    command += ["--host", host, "--port", str(port), *own, *publishing, *flags]
    log = folder / "log"
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )
    url = f"http://{host}:{port}"
    try:
        _wait_until_healthy(url, process, log, began + patience(START_WITHIN_S[kind]))
    except BaseException:
        end_group(process)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    started_in_s = time.monotonic() - began
    return RunningEngine(kind, url, served_model_name, kv_endpoint, replay_endpoint, log, process, started_in_s, folder)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process group that `process` leads."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _wait_until_healthy(url: str, process: "subprocess.Popen[bytes]", log: Path, deadline: float) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            pass
        if process.poll() is not None:
            raise RuntimeError(f"the engine exited with {process.returncode}; its log ends:\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engine did not answer {url}/health in time; its log ends:\n{_tail(log)}")
        time.sleep(0.02)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]
