"""`python -m orchestrator` as a process: how it ends."""

import asyncio
import json
import os
import signal
import sys

import httpx
import pytest

from tests.orchestrator.api.answers import SPEC, next_event
from tests.patience import patience


@pytest.fixture
async def start(tmp_path):
    """Starts `python -m orchestrator` on one store; yields the process and its first log line."""
    processes = []

    async def begun(*flags):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "orchestrator", "--port", "0", "--store", str(tmp_path / "s.db")),
            *("--port-file", str(tmp_path / "port"), *flags),
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONWARNINGS": "default"},
        )
        processes.append(process)
        line = await asyncio.wait_for(process.stderr.readline(), patience(30))
        return process, line.decode()

    yield begun
    for process in processes:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.fleet
async def test_sigterm_ends_the_process_despite_waiting_and_following_clients(start):
    process, line = await start("--settle-s", "0")
    url = f"http://127.0.0.1:{json.loads(line)['port']}"
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        await client.post("/v1/adapters", json=SPEC)
        waiting = asyncio.create_task(client.post("/v1/adapters/sql/v1/ensure", json={"wait_s": 600}))
        async with client.stream("GET", "/v1/events") as follower:
            lines = follower.aiter_lines()
            assert (await anext(lines)).startswith(":")
            process.send_signal(signal.SIGTERM)
            assert (await asyncio.wait_for(waiting, patience(10))).json()["ready"] == []
            assert await next_event(lines) is None
    await asyncio.wait_for(process.wait(), patience(10))
    assert b"Traceback" not in await process.stderr.read()
    again, line = await start()
    assert json.loads(line)["adapters"] == 1
    again.terminate()
    await again.wait()


@pytest.mark.fleet
async def test_a_store_that_cannot_be_used_ends_the_process_with_one_line(start, tmp_path):
    (tmp_path / "s.db").write_text("not a database " * 500)
    process, line = await start()
    rest = await process.stderr.read()
    assert await process.wait() == 2
    assert "python -m orchestrator: store" in line
    assert rest == b""
