"""Who is measured: started on the router's core, in front of the same stub engines."""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Literal

from benchmarks.relay.machine import pinned
from benchmarks.relay.prompts import BASE
from benchmarks.relay.wiring import free_port
from benchmarks.scenes import lora_id

Kind = Literal["direct", "ours", "by cache", "blind"]
_START_S = 60.0

HOW_TO_ADD = """\
Peers are measured beside us where they are installed (none is needed):
  nginx            apt-get install nginx-light
  vllm-router, sglang-router, smg   pip install --no-deps --target DIR vllm-router sglang-router smg orjson setproctitle
                   and then --peers DIR"""


@dataclass(frozen=True, slots=True)
class Stage:
    """What all contenders of a run share. peers: a folder with their packages; profiles: where ours leave theirs."""

    scratch: Path
    environment: dict[str, str]
    router_core: int
    engines: tuple[int, ...]
    control: int
    peers: Path | None = None
    profiles: Path | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """A contender that answers. models: what it is asked for, in turn; grace_s: what it gets to end by itself."""

    name: str
    kind: Kind
    port: int
    models: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None
    grace_s: float = 0.5

    @property
    def pid(self) -> int:
        assert self.process is not None, "engines asked directly have no router"
        return self.process.pid

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.grace_s)
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True, slots=True)
class Contender:
    """One that can be started. found: its version, or None where it is not installed."""

    name: str
    kind: Kind
    found: Callable[[Path | None], str | None]
    start: Callable[["Contender", Stage], Running]


class NotStarted(Exception):
    """A contender did not begin to answer; the message has the end of its log."""


# --- ours -------------------------------------------------------------------------------------------------------------

EXACT = "lorafleet"
RELAY = "lorafleet, relay alone"


def _ours(me: Contender, stage: Stage) -> Running:
    """Exact KV and LoRA routing, tokenization included, and an adapter in every request."""
    return start_router(stage, me.name, tuple(map(lora_id, range(10))))


def _relay(me: Contender, stage: Stage) -> Running:
    return start_router(stage, me.name, (BASE,), "--policy", "round_robin", "--tokenizer", "off")


def start_router(stage: Stage, name: str, models: tuple[str, ...], *flags: str) -> Running:
    """`python -m router`, as anybody would start it."""
    port_file = stage.scratch / f"{re.sub(r'[^a-z0-9]+', '-', name)}.port"
    port_file.unlink(missing_ok=True)
    profiled = ["-m", "cProfile", "-o", str(stage.profiles / f"{port_file.stem}.prof")] if stage.profiles else []
    command = [sys.executable, *profiled, "-P", "-m", "router", "--port", "0", "--port-file", str(port_file)]
    command += ["--orchestrator-url", f"http://127.0.0.1:{stage.control}", "--log-level", "warning", *flags]
    process = _popen(stage, name, command, {})
    _wait(port_file.exists, process, stage, name)
    port = int(port_file.read_text())
    _wait(lambda: _get(port, "/ready") == 200, process, stage, name)
    # A profile is written at an orderly end.
    return Running(name, "ours", port, models, process, grace_s=15.0 if stage.profiles else 0.5)


# --- peers ------------------------------------------------------------------------------------------------------------

_NGINX = """
daemon off; master_process off; worker_processes 1; pid {scratch}/nginx.pid; error_log {scratch}/nginx.err;
events {{ worker_connections 16384; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 1000000000;
  client_body_temp_path {scratch}/nginx-body; proxy_temp_path {scratch}/nginx-proxy;
  fastcgi_temp_path {scratch}/nginx-f; uwsgi_temp_path {scratch}/nginx-u; scgi_temp_path {scratch}/nginx-s;
  upstream engines {{ {engines} keepalive 4096; keepalive_requests 1000000000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }} }}
}}
"""


def _nginx_version(_peers: Path | None) -> str | None:
    path = shutil.which("nginx")
    if path is None:
        return None
    told = subprocess.run([path, "-v"], capture_output=True, text=True, check=False)
    return told.stderr.strip().rpartition("/")[2]


def _nginx(me: Contender, stage: Stage) -> Running:
    port, path = free_port(), shutil.which("nginx")
    assert path is not None
    engines = " ".join(f"server 127.0.0.1:{engine};" for engine in stage.engines)
    config = stage.scratch / "nginx.conf"
    config.write_text(_NGINX.format(scratch=stage.scratch, engines=engines, port=port))
    return _peer(me, stage, port, [path, "-c", str(config), "-e", str(stage.scratch / "nginx.err")])


def _package(name: str) -> Callable[[Path | None], str | None]:
    def found(peers: Path | None) -> str | None:
        if peers is not None:
            return next((d.version for d in distributions(name=name, path=[str(peers)])), None)
        try:
            return version(name) if importlib.util.find_spec(name.replace("-", "_")) else None
        except PackageNotFoundError:
            return None

    return found


def _wheel(module: str, *arguments: str) -> Callable[[Contender, Stage], Running]:
    """A router that comes as a Python package and takes the arguments that sglang-router and its descendants share."""

    def start(me: Contender, stage: Stage) -> Running:
        port = free_port()
        urls = [f"http://127.0.0.1:{engine}" for engine in stage.engines]
        command = [sys.executable, "-P", "-m", module, *arguments, "--host", "127.0.0.1", "--port", str(port)]
        # Each would take the same fixed port for its metrics.
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        return _peer(me, stage, port, [*command, "--worker-urls", *urls])

    return start


def _peer(me: Contender, stage: Stage, port: int, command: Sequence[str]) -> Running:
    process = _popen(stage, me.name, command, {"PYTHONPATH": str(stage.peers)} if stage.peers else {})
    _wait(lambda: _chat(port) == 200, process, stage, me.name)
    return Running(me.name, me.kind, port, (BASE,), process)


def _direct(me: Contender, stage: Stage) -> Running:
    return Running(me.name, me.kind, stage.engines[0], (BASE,))


_LEVEL = ("--log-level", "error")
CONTENDERS = (
    Contender("direct", "direct", lambda _: "the stub engine", _direct),
    Contender(EXACT, "ours", lambda _: "here", _ours),
    Contender(RELAY, "ours", lambda _: "here", _relay),
    Contender("nginx", "blind", _nginx_version, _nginx),
    Contender(
        "sglang-router cache_aware",
        "by cache",
        _package("sglang-router"),
        _wheel("sglang_router.launch_router", "--policy", "cache_aware", *_LEVEL),
    ),
    Contender(
        "vllm-router cache_aware",
        "by cache",
        _package("vllm-router"),
        _wheel("vllm_router.launch_router", "--policy", "cache_aware", *_LEVEL),
    ),
    Contender(
        "vllm-router round_robin",
        "blind",
        _package("vllm-router"),
        _wheel("vllm_router.launch_router", "--policy", "round_robin", *_LEVEL),
    ),
    Contender(
        "smg cache_aware", "by cache", _package("smg"), _wheel("smg", "launch", "--policy", "cache_aware", *_LEVEL)
    ),
)


# --- processes --------------------------------------------------------------------------------------------------------


def _popen(stage: Stage, name: str, command: Sequence[str], more: dict[str, str]) -> subprocess.Popen[bytes]:
    with pinned(stage.router_core), _log(stage, name).open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=stage.environment | more)


def _log(stage: Stage, name: str) -> Path:
    return stage.scratch / f"{re.sub(r'[^a-z0-9_]+', '-', name)}.log"


def _wait(is_there: Callable[[], bool], process: subprocess.Popen[bytes], stage: Stage, name: str) -> None:
    deadline = time.monotonic() + _START_S
    while not is_there():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            tail = _log(stage, name).read_text(errors="replace").strip()[-500:]
            what = (
                f"ended with {process.returncode}" if process.poll() is not None else f"no answer in {_START_S:.0f} s"
            )
            raise NotStarted(f"{name}: {what}; its log ends with\n{tail}")
        time.sleep(0.05)


def _get(port: int, path: str, body: bytes | None = None) -> int | None:
    """The status; None when nobody answers."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body)
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as exc:
        return exc.code
    except OSError:
        return None


def _chat(port: int) -> int | None:
    body = b'{"model":"%s","messages":[{"role":"user","content":"hi"}]}' % BASE.encode()
    return _get(port, "/v1/chat/completions", body)


def environment(clean: dict[str, str]) -> dict[str, str]:
    """For children: without proxies, which the loopback needs none of."""
    return {name: value for name, value in clean.items() if not name.lower().endswith("_proxy")} | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    }
