"""What a router's process is made of."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import patience, wait_until

pytestmark = pytest.mark.fleet

_LOADED = """
import gc, runpy, sys
try:
    runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
except SystemExit:  # --help
    assert gc.isenabled()
    print(*sys.modules, file=sys.stderr)
    import rich  # as a plugin may
"""


@pytest.mark.parametrize("service", ["router", "orchestrator", "workers"])
def test_no_service_loads_what_only_terminals_need(service: str) -> None:
    command = [sys.executable, "-c", _LOADED, service, "--help"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=patience(60)).stderr.split()
    assert f"{service}.app" in loaded
    assert not {"email_validator", "pygments", "rich", "watchfiles"}.intersection(loaded)


_ENDS = """
import asyncio
from router import app
from router.fleet.discovery import Discovery

async def run(self):
    await asyncio.sleep(0)
    {end}

Discovery.run = run
app.main(["--port", "0", "--drain-s", "0", "--orchestrator-url", "http://127.0.0.1:1"])
"""


@pytest.mark.parametrize("end", ["raise LookupError('nobody caught this')", "return"])
def test_a_router_that_has_lost_what_runs_beside_its_requests_says_so_and_ends_with_1(end) -> None:
    command = [sys.executable, "-c", _ENDS.format(end=end)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=patience(60))
    assert done.returncode == 1
    said = [json.loads(line) for line in done.stderr.splitlines()]
    last = next(line for line in said if line["level"] == "critical")
    assert "run" in last["task"]
    assert ("nobody caught this" in done.stderr) == end.startswith("raise")


_HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
_COMPLETION = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
)


def test_what_comes_while_a_router_stands_still_is_not_late(tmp_path) -> None:
    """As in a container that is frozen: its loop's timers run before it reads."""
    port_file = tmp_path / "port"
    limit_s = patience(0.4)
    limits = (f"--{what}-s={limit_s}" for what in ("head-timeout", "body-timeout", "keep-alive"))
    flags = (*limits, "--drain-s", "0", "--first-sync-wait-s", "0")
    command = [sys.executable, "-P", "-m", "router", "--port", "0", "--port-file", str(port_file), *flags]
    with subprocess.Popen([*command, "--orchestrator-url", "http://127.0.0.1:1"], stderr=subprocess.DEVNULL) as router:
        try:
            wait_until(port_file.exists)
            address = ("127.0.0.1", int(port_file.read_text()))
            with (
                socket.create_connection(address, patience(20)) as idle,
                socket.create_connection(address, patience(20)) as in_head,
                socket.create_connection(address, patience(20)) as in_body,
            ):
                idle.sendall(_HEALTH)
                assert _status(idle) == 200
                in_head.sendall(_HEALTH[:9])
                in_body.sendall(_COMPLETION[:-1])
                time.sleep(limit_s / 6)  # it may read what has come, and need not have
                router.send_signal(signal.SIGSTOP)
                wait_until(lambda: _stands_still(router.pid))
                idle.sendall(_HEALTH)
                in_head.sendall(_HEALTH[9:])
                in_body.sendall(_COMPLETION[-1:])
                time.sleep(1.5 * limit_s)  # the limits pass while it stands still
                router.send_signal(signal.SIGCONT)
                assert [_status(each) for each in (idle, in_head, in_body)] == [200, 200, 503]  # no catalog: not 408
                assert idle.recv(1) == b""  # what is idle is closed as ever
        finally:
            router.kill()


def _stands_still(pid: int) -> bool:
    """Whether every thread of the process is stopped (T), as proc(5) says."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}


def _status(client: socket.socket) -> int:
    """Of the next answer, which is read whole."""
    said = b""
    while b"\r\n\r\n" not in said:
        said += client.recv(4096) or b"closed \r\n\r\n"
    head, _, body = said.partition(b"\r\n\r\n")
    size = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    while len(body) < size:
        body += client.recv(4096)
    return int(head.split()[1])


def test_a_request_that_waits_in_a_router_that_is_told_to_stop_gets_its_503_and_its_line(tmp_path) -> None:
    port_file, waits = tmp_path / "port", "--first-sync-wait-s=600"
    flags = ("--drain-s=0", "--grace-s=0", "--access-log=all", "--orchestrator-url=http://127.0.0.1:1", waits)
    command = [sys.executable, "-P", "-m", "router", "--port=0", f"--port-file={port_file}", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as router:
        try:
            wait_until(port_file.exists)
            with socket.create_connection(("127.0.0.1", int(port_file.read_text())), timeout=patience(20)) as client:
                client.sendall(_COMPLETION.replace(b"Host: a", b"Host: a\r\nX-Request-Id: night"))
                with socket.create_connection(client.getpeername(), timeout=patience(20)) as other:
                    other.sendall(_HEALTH)
                    assert _status(other) == 200  # so the router has read the request before
                router.send_signal(signal.SIGTERM)
                answer = b"".join(iter(lambda: client.recv(65536), b""))
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nx-request-id: night\r\n" in answer
            _, said = router.communicate(timeout=patience(20))
        finally:
            router.kill()
    lines = [line for line in map(json.loads, said.splitlines()) if line.get("request_id") == "night"]
    assert {(line["event"], line["code"]) for line in lines} == {
        ("request failed", "stopping"),
        ("request", "stopping"),
    }
    assert len(lines) == 2
