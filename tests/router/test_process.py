"""What a router's process is made of."""

import json
import subprocess
import sys

import pytest

_LOADED = """
import runpy, sys
try:
    runpy.run_module("router", run_name="__main__", alter_sys=True)
except SystemExit:  # --help
    print(*(name for name, module in sys.modules.items() if module is not None), file=sys.stderr)
"""


def test_nothing_is_loaded_that_only_terminals_need() -> None:
    command = [sys.executable, "-c", _LOADED, "--help"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr.split()
    assert "router.app" in loaded
    assert not {"pygments", "rich", "watchfiles"}.intersection(loaded)


_ENDS = """
import asyncio
from router import app
from router.discovery import Discovery

async def run(self):
    await asyncio.sleep(0.2)
    {end}

Discovery.run = run
app.main(["--port", "0", "--drain-s", "0", "--orchestrator-url", "http://127.0.0.1:1"])
"""


@pytest.mark.parametrize("end", ["raise LookupError('nobody caught this')", "return"])
def test_a_router_that_has_lost_what_runs_beside_its_requests_says_so_and_ends_with_1(end) -> None:
    command = [sys.executable, "-c", _ENDS.format(end=end)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.returncode == 1
    said = [json.loads(line) for line in done.stderr.splitlines()]
    last = next(line for line in said if line["level"] == "critical")
    assert "run" in last["task"]
    assert ("nobody caught this" in done.stderr) == end.startswith("raise")
