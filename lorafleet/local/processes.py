"""Child processes that never outlive us: started, watched, restarted, stopped, and swept up with all they started.

Linux only: a child dies with its parent (prctl), and what a child started is found again by a mark in its environment
(`/proc/<pid>/environ`), whatever sessions and groups it made for itself.
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
    """One process of the fleet, by name, with its log file. `command` is asked anew for every start."""

    name: str
    command: Callable[[], Sequence[str]]
    environment: Mapping[str, str]
    log_path: Path
    process: asyncio.subprocess.Process | None = None
    starts: int = 0
    started_at: float = field(default=0.0)

    async def start(self) -> None:
        """Start it, its output appended to its log. Call on the main thread: the child dies when that thread does."""
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.environment),
                process_group=0,  # Ctrl-C on the terminal reaches only us: the order of the stop is ours to keep
                preexec_fn=_die_with_parent,
            )
        self.starts += 1
        self.started_at = time.monotonic()

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, and SIGKILL to its group when that takes longer than `grace_s`; whether it went by itself."""
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
        """The last lines of its log, for a message about it."""
        return tail_of(self.log_path)


def tail_of(log_path: Path, lines: int = 12) -> str:
    """The last lines of a log, indented."""
    try:
        text = log_path.read_text(errors="replace")
    except OSError:
        text = ""
    last = [line[:300] for line in text.splitlines()[-lines:]] or ["(its log is empty)"]
    return "\n".join(f"    {line}" for line in last)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def clean_environment(mark: str, settings_of: str = "") -> dict[str, str]:
    """Our environment with the fleet's mark, and of our settings those of one service, the child's, by its name."""
    ours = f"LORAFLEET_{settings_of.upper()}_" if settings_of else "LORAFLEET_ none"
    kept = {
        name: value for name, value in os.environ.items() if name.startswith(ours) or not name.startswith("LORAFLEET_")
    }
    # vLLM names its processes through setproctitle, which would write over the environment that the mark is read from.
    return kept | {MARK: mark, "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1"}


def marked(mark: str) -> list[int]:
    """Process ids (not ours, no zombies) whose environment has this mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        # Gone meanwhile, or not ours to read.
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def kill_marked(mark: str, *, within_s: float = 5.0) -> list[int]:
    """SIGKILL everything marked until nothing is left; who was found at first. Blocks for at most `within_s`."""
    first = marked(mark)
    left, deadline = first, time.monotonic() + within_s
    while left and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        left = marked(mark)
    return first


class ProcessGuard:
    """A small process that waits for our end, however it comes, and then sweeps up. `mark` names what it kills."""

    def __init__(self, mark: str, scratch: Path) -> None:
        # The pipe's end closes when we die, also by SIGKILL. A session of its own: no signal to our group reaches it.
        self._process = subprocess.Popen(  # noqa: S603  (our own module)
            [sys.executable, "-I", "-S", str(Path(__file__).resolve()), mark, str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def release(self) -> None:
        """Let it do its sweep now and end; returns when it has."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def guard(mark: str, scratch: Path) -> None:
    """What the guard runs: wait for the end of standard input, kill what is marked, remove the scratch folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_marked(mark)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    guard(sys.argv[1], Path(sys.argv[2]))
