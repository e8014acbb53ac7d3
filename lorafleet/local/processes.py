"""Child processes of a local fleet, which never outlive it, and the guard that kills what is left.

Linux only. A child dies with its parent (prctl). Processes that a child starts are found by a mark in their
environment (`/proc/<pid>/environ`), whatever sessions and groups they create.
"""

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MARK = "LORAFLEET_FLEET_MARK"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True, kw_only=True)
class ChildProcess:
    """One process of the fleet with its log file. `command` is called for every start."""

    name: str
    command: Callable[[], Sequence[str]]
    environment: Mapping[str, str]
    log_path: Path
    process: asyncio.subprocess.Process | None = None
    starts: int = 0
    started_at: float = field(default=0.0)

    async def start(self) -> None:
        """Start the process, count the start, and append its output to its log.

        Call on the main thread: the child dies with it.
        """
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.environment),
                process_group=0,  # Ctrl-C reaches only the parent, which stops its children in order
                preexec_fn=_die_with_parent,
            )
        self.starts += 1
        self.started_at = time.monotonic()

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self.process is not None and self.process.returncode is None

    async def stop(self, grace_s: float) -> bool:
        """Send SIGTERM, and SIGKILL to its group after `grace_s`; whether it ended by SIGTERM alone."""
        if self.process is None or self.process.returncode is not None:
            return True
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), grace_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
            return False
        return True

    def tail(self) -> str:
        """The last lines of its log."""
        return tail_of(self.log_path)


def tail_of(log_path: Path, lines: int = 12) -> str:
    """The last lines of a log, indented; an unreadable log counts as empty."""
    last = [line[:300] for line in lines_of(log_path)[-lines:]] or ["(its log is empty)"]
    return "\n".join(f"    {line}" for line in last)


def lines_of(log_path: Path) -> list[str]:
    """The lines of a log; an unreadable log counts as empty."""
    try:
        return log_path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _die_with_parent() -> None:
    """In a new child: have the kernel send it SIGKILL when its parent ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def clean_environment(mark: str, settings_of: str = "") -> dict[str, str]:
    """This environment with the fleet's mark, and without settings of other services than `settings_of`."""
    own_prefix = f"LORAFLEET_{settings_of.upper()}_" if settings_of else "LORAFLEET_ none"
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(own_prefix) or not name.startswith("LORAFLEET_")
    }
    # vLLM renames its processes through setproctitle, which would overwrite the environment that holds the mark.
    return environment | {MARK: mark, "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1"}


def marked_processes(mark: str) -> list[int]:
    """Ids of processes whose environment has this mark, without this process and zombies."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        # It ended meanwhile, or belongs to another user.
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def kill_marked(mark: str, *, within_s: float = 5.0) -> list[int]:
    """SIGKILL all marked processes until none is left, for at most `within_s`; the ids found first."""
    first = marked_processes(mark)
    left, deadline = first, time.monotonic() + within_s
    while left and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        left = marked_processes(mark)
    return first


class ProcessGuard:
    """A small process: when this one ends, it kills every process with `mark` and removes the folder `scratch`."""

    def __init__(self, mark: str, scratch: Path) -> None:
        """Start the guard process."""
        # The pipe closes when this process dies, also by SIGKILL. Its own session keeps signals to our group away.
        self._process = subprocess.Popen(  # noqa: S603  (our own module)
            [sys.executable, "-I", "-S", str(Path(__file__).resolve()), mark, str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def release(self) -> None:
        """Let the guard kill the marked processes and remove the scratch folder now, and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def run_guard(mark: str, scratch: Path) -> None:
    """The guard's main: wait for the end of standard input, kill marked processes, remove the scratch folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_marked(mark)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    run_guard(sys.argv[1], Path(sys.argv[2]))
