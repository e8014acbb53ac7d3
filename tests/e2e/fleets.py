"""`lorafleet up` as a process, and what a person could find out about the fleet it runs."""

import contextlib
import ctypes
import functools
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lorafleet.local import tiny_model
from tests.patience import patience, wait_until

SIM_FLAGS = ("--engine", "sim", "--workers")
"""Flags of `lorafleet up` before the number of workers."""
READY = re.compile(r"^ready router=(https?://127\.0\.0\.1:\d+) orchestrator=(https?://127\.0\.0\.1:\d+)$")


@dataclass(slots=True)
class RunningFleet:
    """A running `lorafleet up`."""

    process: "subprocess.Popen[str]"
    tag: str
    state_dir: Path
    errors: Path
    router: str = ""
    orchestrator: str = ""
    ready_in_s: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)

    def get(self, url: str, **query: Any) -> Any:
        return self.http("GET", url, params=query).json()

    def http(self, method: str, url: str, **more: Any) -> httpx.Response:
        # verify=False: everything is http, and reading the certificates takes longer than most answers here.
        return httpx.request(
            method, url, headers=self.headers, timeout=patience(40), trust_env=False, verify=False, **more
        )

    def ask(self, **body: Any) -> httpx.Response:
        """A chat completion through the router at temperature 0; 16 tokens by default."""
        return self.http("POST", f"{self.router}/v1/chat/completions", json=chat(**body))

    def lines_of(self, answer: httpx.Response) -> Any:
        """What the router kept of this answer's request: its choice of a worker, waits and attempts."""
        return self.get(f"{self.router}/v1/requests/{answer.headers['x-request-id']}")

    def workers(self) -> dict[str, Any]:
        """Worker id -> the agent's /metadata."""
        items = self.get(f"{self.orchestrator}/v1/workers")["data"]
        return {item["id"]: self.get(f"{item['agent_url']}/metadata") for item in items}

    def is_whole(self) -> bool:
        """Whether every worker that `up` started is ready, by its agent, by the orchestrator and by the router.

        A step that kills or counts begins with it: the step before may have left a worker that is still starting.
        """
        count = len(self.pids("-m", "workers"))
        listed = self.get(f"{self.orchestrator}/v1/workers")["data"]
        shown = self.http("GET", f"{self.router}/metrics").text
        return (
            count > 0
            and [item["state"] for item in listed] == ["ready"] * count
            and all(metadata["state"] == "ready" and metadata["engine_boot_id"] for metadata in self.workers().values())
            and f'lorafleet_router_replicas{{state="ready"}} {count}.0' in shown.splitlines()
        )

    def held_by(self, lora_id: str) -> list[str]:
        """Workers whose agent reports the adapter as ready."""
        return [
            worker
            for worker, metadata in self.workers().items()
            if any(lora["lora_id"] == lora_id and lora["state"] == "ready" for lora in metadata["lora"]["loaded_loras"])
        ]

    def processes(self) -> dict[int, str]:
        """Everything that `up` started, however deep, itself included: process id -> command line."""
        return processes(self.tag)

    def pids(self, *words: str) -> list[int]:
        """Processes with these words in their command line, next to each other."""
        wanted = "\0".join(["", *words, ""])
        return [pid for pid, line in self.processes().items() if wanted in line]

    def kill(self, *words: str) -> list[int]:
        """Kill processes with SIGKILL; returns their ids."""
        found = self.pids(*words)
        assert found, words
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return found

    def stop(self, how: signal.Signals = signal.SIGTERM, *, within_s: float = 90.0) -> int:
        """Signal it and wait; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(patience(within_s))

    def progress(self) -> str:
        """The fleet's progress lines on standard error."""
        return self.errors.read_text()


def start(
    state_dir: Path,
    *flags: str,
    token: str = "",
    environment: dict[str, str] | None = None,
    is_empty: bool = False,
    cwd: Path | None = None,
) -> RunningFleet:
    """Start it; use `wait_ready` next. `is_empty`: it makes its model and adapters itself, rather than find copies."""
    if not (is_empty or state_dir.exists()):
        shutil.copytree(_made().name, state_dir)
        state_dir.chmod(0o700)
    tag = f"LORA_E2E_TAG={uuid.uuid4().hex}"
    name, _, value = tag.partition("=")
    errors = state_dir.with_name(f"{state_dir.name}.{value[:8]}.err")
    command = [sys.executable, "-P", "-m", "lorafleet", "up", "--state-dir", str(state_dir)]
    ports = [w for flag in ("--router-port", "--orchestrator-port") if flag not in flags for w in (flag, "0")]
    with errors.open("w") as err:
        process = subprocess.Popen(
            [*command, *ports, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
            cwd=cwd,
            text=True,
            env={**os.environ, name: value, **(environment or {})},
            process_group=0,
            preexec_fn=_stop_with_tests,  # noqa: PLW1509  (one system call, and nothing here holds a lock)
        )
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return RunningFleet(process, tag, state_dir, errors, headers=headers)


@functools.cache
def _made() -> "tempfile.TemporaryDirectory[str]":
    """A state folder with the tiny model and its adapters in it, as `up` creates them."""
    folder = tempfile.TemporaryDirectory(prefix="e2e-")
    tiny_model.make_model(Path(folder.name) / tiny_model.MODEL_NAME)
    tiny_model.make_adapters(Path(folder.name) / "adapters")
    return folder


def _stop_with_tests() -> None:
    """Send SIGTERM to `up` when the test run is killed, so that it does not run on."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def wait_ready(fleet: RunningFleet, *, within_s: float) -> RunningFleet:
    """Read its output up to the ready line, which must be the first line there."""
    began = time.monotonic()
    line = read_line(fleet, within_s=within_s)
    found = READY.match(line)
    assert found, f"not a ready line: {line!r}; its progress:\n{fleet.progress()}"
    fleet.router, fleet.orchestrator = found.groups()
    fleet.ready_in_s = time.monotonic() - began
    return fleet


def read_line(fleet: RunningFleet, *, within_s: float) -> str:
    """One line of its standard output, without the end of line; empty when it has ended."""
    assert fleet.process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(fleet.process.stdout, selectors.EVENT_READ)
        assert selector.select(patience(within_s)), f"nothing within {within_s} s; its progress:\n{fleet.progress()}"
    return fleet.process.stdout.readline().rstrip("\n")


@contextlib.contextmanager
def running(
    state_dir: Path, *flags: str, token: str = "", within_s: float = 60.0, environment: dict[str, str] | None = None
) -> Iterator[RunningFleet]:
    """A fleet that is ready, and is stopped with nothing left when the block ends."""
    fleet = start(state_dir, *flags, token=token, environment=environment)
    try:
        yield wait_ready(fleet, within_s=within_s)
    finally:
        try:
            fleet.stop()
        finally:
            left = kill(fleet)
    assert not left, f"left running: {left}"


def kill(fleet: RunningFleet) -> dict[int, str]:
    """Kill the processes that still run; returns their commands."""
    left = fleet.processes()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    fleet.process.wait(patience(10))
    if fleet.process.stdout is not None:
        fleet.process.stdout.close()
    return left


def processes(tag: str) -> dict[int, str]:
    """Living processes with this tag in their environment: process id -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if tag.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
    return found


def chat(**body: Any) -> dict[str, Any]:
    """The body of a chat completion; `prompt` is a user's message."""
    prompt = body.pop("prompt", "hello")
    base = {"model": "tiny-qwen", "temperature": 0, "max_tokens": 16}
    return base | {"messages": [{"role": "user", "content": prompt}]} | body


def until(true: Callable[[], object], *, within_s: float, what: str) -> None:
    """Wait until the condition is true; HTTP errors count as false."""

    def is_true() -> bool:
        with contextlib.suppress(httpx.HTTPError, KeyError):
            return bool(true())
        return False

    wait_until(is_true, within_s=within_s, what=what)


def is_free(url: str) -> bool:
    """Whether no process listens on the port."""
    port = int(url.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
