"""Who is measured: started on the router's core, in front of the same stub engines."""

import contextlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

from benchmarks.relay.machine import pinned
from benchmarks.relay.prompts import BASE
from benchmarks.relay.wiring import free_port
from benchmarks.row_runner import RowFailed
from benchmarks.scenes import lora_id
from lorafleet.service.network.tls import TlsFiles, client_context

ADAPTERS = tuple(map(lora_id, range(10)))
Kind = Literal["direct", "ours", "by cache", "blind"]
_START_S = 60.0

PEER_PACKAGES = ("vllm-router==0.1.17", "sglang-router==0.3.2", "smg==1.13.0")
HOW_TO_ADD = f"""\
Peers are measured beside us where they are installed (none is needed; goals against a missing one are "-"):
  nginx         apt-get install nginx-light
  the others    python -m venv DIR && DIR/bin/pip install {" ".join(PEER_PACKAGES)}
                and then --peers DIR"""


def before_name(name: str) -> str:
    """The name of a router of the version before."""
    return f"{name}, before"


@dataclass(frozen=True, slots=True)
class Stage:
    """The scene of a run, which all contenders share: engines, control plane, processor core, folders.

    router_core  the routers' core; None: any
    peers     the virtual environment that has them
    before    a checkout of another version of ours, measured beside this one
    profiles  where ours leave theirs
    tls       the certificate that ours and nginx speak TLS with towards clients; the engines stay plain
    """

    scratch: Path
    environment: dict[str, str]
    router_core: int | None
    engines: tuple[int, ...]
    control: int
    peers: Path | None = None
    before: Path | None = None
    profiles: Path | None = None
    tls: TlsFiles | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of our router for the certificate."""
        return () if self.tls is None else ("--tls-cert", str(self.tls.cert), "--tls-key", str(self.tls.key))


@dataclass(frozen=True, slots=True)
class Running:
    """A contender that answers.

    models   what it is asked for, in turn
    grace_s  what it gets to end by itself
    tls      how clients connect; None: plainly
    """

    name: str
    kind: Kind
    port: int
    models: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None
    grace_s: float = 0.5
    tls: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

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


class NotStarted(RowFailed):
    """A contender did not begin to answer; the message has the end of its log."""


# --- ours -------------------------------------------------------------------------------------------------------------

EXACT = "lorafleet"
BEFORE = "lorafleet, before"
"""The name of `EXACT` in the version before; see `before_name`."""
RELAY = "lorafleet, relay alone"
SGLANG = "sglang-router cache_aware"
NGINX = "nginx"
_RELAY_FLAGS = ("--policy", "round_robin", "--tokenizer", "off")
VLLM = "vllm-router cache_aware"
VLLM_BLIND = "vllm-router round_robin"
SMG = "smg cache_aware"


def _ours(me: Contender, stage: Stage) -> Running:
    """Exact KV and LoRA routing, tokenization included, and an adapter in every request."""
    return start_router(stage, me.name, ADAPTERS)


def _relay(me: Contender, stage: Stage) -> Running:
    return start_router(stage, me.name, (BASE,), *_RELAY_FLAGS)


def start_router(stage: Stage, name: str, models: tuple[str, ...], *flags: str, is_before: bool = False) -> Running:
    """`python -m router`, as anybody would start it; of the checkout `stage.before` where that is asked for."""
    port_file = stage.scratch / f"{re.sub(r'[^a-z0-9]+', '-', name)}.port"
    port_file.unlink(missing_ok=True)
    profiled = ["-m", "cProfile", "-o", str(stage.profiles / f"{port_file.stem}.prof")] if stage.profiles else []
    command = [sys.executable, "-P", *profiled, "-m", "router", "--port", "0", "--port-file", str(port_file)]
    command += ["--orchestrator-url", f"http://127.0.0.1:{stage.control}", "--log-level", "warning", *flags]
    command += stage.flags
    process = _popen(stage, name, command, {"PYTHONPATH": str(stage.before)} if is_before else {})
    _wait(port_file.exists, process, stage, name)
    port = int(port_file.read_text())
    tls = client_tls(stage)
    _wait(lambda: _get(port, "/ready", tls=tls) == 200, process, stage, name)
    # A profile is written at an orderly end.
    return Running(name, "ours", port, models, process, grace_s=15.0 if stage.profiles else 0.5, tls=tls)


def client_tls(stage: Stage) -> ssl.SSLContext | None:
    """The TLS context of the benchmark's clients. No session is resumed: each connection is a full handshake."""
    return None if stage.tls is None or stage.tls.ca is None else client_context(stage.tls.ca)


# --- peers ------------------------------------------------------------------------------------------------------------

_NGINX = """
daemon off; master_process off; worker_processes 1; pid {scratch}/nginx.pid; error_log {scratch}/nginx.err;
events {{ worker_connections 16384; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 1000000000;
  client_body_temp_path {scratch}/nginx-body; proxy_temp_path {scratch}/nginx-proxy;
  fastcgi_temp_path {scratch}/nginx-f; uwsgi_temp_path {scratch}/nginx-u; scgi_temp_path {scratch}/nginx-s;
  upstream engines {{ {engines} keepalive 4096; keepalive_requests 1000000000; }}
  server {{ listen 127.0.0.1:{port} {ssl} backlog=4096; {certificate}
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
    certificate = ""
    if stage.tls is not None:
        certificate = f"ssl_certificate {stage.tls.cert}; ssl_certificate_key {stage.tls.key};"
        certificate += " ssl_protocols TLSv1.2 TLSv1.3;"
    ssl_flag = "" if stage.tls is None else "ssl"
    text = _NGINX.format(scratch=stage.scratch, engines=engines, port=port, ssl=ssl_flag, certificate=certificate)
    config.write_text(text)
    tls = client_tls(stage)
    return _peer(me, stage, port, [path, "-c", str(config), "-e", str(stage.scratch / "nginx.err")], tls=tls)


def _package(name: str) -> Callable[[Path | None], str | None]:
    def found(peers: Path | None) -> str | None:
        if peers is None:
            return None
        path = [str(folder) for folder in peers.glob("lib/python*/site-packages")]
        return next((d.version for d in distributions(name=name, path=path)), None)

    return found


def _wheel(module: str, *arguments: str) -> Callable[[Contender, Stage], Running]:
    """A router that comes as a Python package and takes the arguments that sglang-router and its descendants share."""

    def start(me: Contender, stage: Stage) -> Running:
        assert stage.peers is not None
        port = free_port()
        urls = [f"http://127.0.0.1:{engine}" for engine in stage.engines]
        command = [
            str(stage.peers / "bin" / "python"),
            "-P",
            "-m",
            module,
            *arguments,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        # Each would take the same fixed port for its metrics.
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        return _peer(me, stage, port, [*command, "--worker-urls", *urls])

    return start


def _peer(
    me: Contender, stage: Stage, port: int, command: Sequence[str], *, tls: ssl.SSLContext | None = None
) -> Running:
    process = _popen(stage, me.name, command, {"PYTHONPATH": ""})
    _wait(lambda: _chat(port, tls) == 200, process, stage, me.name)
    return Running(me.name, me.kind, port, (BASE,), process, tls=tls)


def _direct(me: Contender, stage: Stage) -> Running:
    return Running(me.name, me.kind, stage.engines[0], (BASE,))


_LEVEL = ("--log-level", "error")
CONTENDERS = (
    Contender("direct", "direct", lambda _: "the stub engine", _direct),
    Contender(EXACT, "ours", lambda _: "here", _ours),
    Contender(RELAY, "ours", lambda _: "here", _relay),
    Contender(NGINX, "blind", _nginx_version, _nginx),
    Contender(
        SGLANG,
        "by cache",
        _package("sglang-router"),
        _wheel("sglang_router.launch_router", "--policy", "cache_aware", *_LEVEL),
    ),
    Contender(
        VLLM,
        "by cache",
        _package("vllm-router"),
        _wheel("vllm_router.launch_router", "--policy", "cache_aware", *_LEVEL),
    ),
    Contender(
        VLLM_BLIND,
        "blind",
        _package("vllm-router"),
        _wheel("vllm_router.launch_router", "--policy", "round_robin", *_LEVEL),
    ),
    Contender(SMG, "by cache", _package("smg"), _wheel("smg", "launch", "--policy", "cache_aware", *_LEVEL)),
)


def before(contender: Contender) -> Contender:
    """The same of another version of ours: that of the checkout `stage.before`."""

    def start(me: Contender, stage: Stage) -> Running:
        if contender.name == EXACT:
            return start_router(stage, me.name, ADAPTERS, is_before=True)
        return start_router(stage, me.name, (BASE,), *_RELAY_FLAGS, is_before=True)

    return Contender(before_name(contender.name), "ours", lambda _: "there", start)


# sglang-router can let requests wait, too: so many at its engines at once, the others in its queue.
def queueing_peer(in_flight: int) -> Contender:
    """sglang-router with at most so many requests at its engines."""
    flags = f"--policy cache_aware --max-concurrent-requests {in_flight} --queue-size 1000 --log-level error".split()
    flags += ["--rate-limit-tokens-per-second", "1000000"]
    return Contender(SGLANG, "by cache", _package("sglang-router"), _wheel("sglang_router.launch_router", *flags))


# --- processes --------------------------------------------------------------------------------------------------------


def _popen(stage: Stage, name: str, command: Sequence[str], more: dict[str, str]) -> subprocess.Popen[bytes]:
    with pinned(stage.router_core), _log(stage, name).open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=stage.environment | more)


def _log(stage: Stage, name: str) -> Path:
    return stage.scratch / f"{re.sub(r'[^a-z0-9_]+', '-', name)}.log"


def warnings_logged(stage: Stage, name: str) -> int:
    """Lines that a router of ours has logged; its level is warning."""
    return _log(stage, name).read_text(errors="replace").count("\n")


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


def _get(port: int, path: str, body: bytes | None = None, *, tls: ssl.SSLContext | None = None) -> int | None:
    """The status; None when nobody answers."""
    request = urllib.request.Request(f"{'https' if tls else 'http'}://127.0.0.1:{port}{path}", data=body)
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=5, context=tls) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as exc:
        return exc.code
    except OSError:
        return None


def _chat(port: int, tls: ssl.SSLContext | None = None) -> int | None:
    body = b'{"model":"%s","messages":[{"role":"user","content":"hi"}],"max_tokens":1}' % BASE.encode()
    return _get(port, "/v1/chat/completions", body, tls=tls)


def environment(clean: dict[str, str]) -> dict[str, str]:
    """For children: without proxies, which the loopback needs none of."""
    return {name: value for name, value in clean.items() if not name.lower().endswith("_proxy")} | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]).rstrip(":")
    }
