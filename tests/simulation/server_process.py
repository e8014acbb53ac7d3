"""The process that runs simulated tests for one pytest process, and what the two send each other."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class SimulatedTest:
    """One test: its file, its function, and its arguments beside `simulation`."""

    file: Path
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TestEnd:
    """How a test ended. `failure`: empty, or its traceback. `log`: the last lines of every service."""

    __test__ = False

    failure: str
    log: str = ""


@dataclass(slots=True)
class SimulationServer:
    """The process that runs simulated tests. See `server.py`."""

    process: "subprocess.Popen[bytes]"
    calls: Connection

    @staticmethod
    def start() -> "SimulationServer":
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.simulation", "serve", str(theirs.fileno())],
                cwd=_ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(_ROOT)},
            )
        return SimulationServer(process, ours)

    def run(self, test: SimulatedTest) -> TestEnd:
        """Run a test in a process of its own."""
        self.calls.send(test)
        child: int = self.calls.recv()
        try:
            end: TestEnd = self.calls.recv()
        except BaseException:  # the test's time is over
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            self.calls.recv()
            raise
        return end

    def stop(self) -> None:
        self.calls.close()
        self.process.wait()
