"""One engine process: started, listened to, stopped."""

import asyncio
import contextlib
import errno
import os
import re
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import TypeAlias

import structlog

from lorafleet.service.sockets import bound
from workers.engines.launch import LaunchCommand

log = structlog.get_logger()

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_LINES = 40
_LOG_BYTES = 32 << 20

_SECRET_NAME = re.compile(r"(?:key|token|password|secret)$", re.IGNORECASE)
_GIVEN_SECRET = re.compile(r"(\w*(?:key|token|password|secret))=(?:'[^']*'|\"[^\"]*\"|\S+)", re.IGNORECASE)

Echo: TypeAlias = Callable[[bytes], None]
"""Is given each line of an engine's output; neither raises nor waits."""


class EngineProcess:
    """An engine under its guard, in a process group of its own. Start it once; a restart is a new one."""

    def __init__(
        self, process: asyncio.subprocess.Process, *, log_file: Path, pid_file: Path, echo: Echo | None
    ) -> None:
        self._process = process
        self._echo = echo
        self._pid_file = pid_file
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._reader = asyncio.create_task(self._read(log_file))
        # Once, for all who ask: asyncio keeps each waiter until the exit, also of those who waited for a second only.
        self._exit = asyncio.create_task(process.wait())

    @classmethod
    async def start(cls, launch: LaunchCommand, *, state_dir: Path, echo: Echo | None = None) -> "EngineProcess":
        """Its output goes into `engine.log`, and on to `echo`. Raises OSError when the command cannot be run."""
        pid_file = state_dir / "engine.pid"
        _forget(pid_file)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(_GUARD),
            str(pid_file),
            *launch.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**launch.environment, **_inherited()},
            start_new_session=True,
            limit=1 << 20,
        )
        log.info("engine started", pid=process.pid, command=" ".join(without_secrets(launch.command)))
        return cls(process, log_file=state_dir / "engine.log", pid_file=pid_file, echo=echo)

    @property
    def tail(self) -> str:
        """The end of what the engine printed."""
        return "\n".join(self._tail)

    @property
    def has_exited(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Its exit status, once nothing of its group is left. vLLM exits 0 on a crash too."""
        code = await asyncio.shield(self._exit)
        self.kill()
        return code

    async def stop(self, *, within_s: float) -> None:
        """SIGTERM, time to finish its requests, then SIGKILL for the whole group."""
        if not self.has_exited:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            # Not wait_for: in Python 3.11 it forgets a cancellation that comes together with the exit.
            try:
                async with asyncio.timeout(within_s):
                    await self._process.wait()
            except TimeoutError:
                log.warning("engine did not stop in time, killed", within_s=within_s)
        await self.end()

    async def end(self) -> None:
        """Kill what is left and read its last words."""
        self.kill()
        await self._process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.shield(self._reader)
        self._reader.cancel()
        _forget(self._pid_file)

    def kill(self) -> None:
        """SIGKILL for every process of the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self, log_file: Path) -> None:
        assert self._process.stdout is not None
        with _EngineLog(log_file) as file:
            while True:
                try:
                    line = await self._process.stdout.readline()
                except ValueError:
                    continue  # a line of more than 1 MiB is not kept
                if not line:
                    return
                file.write(line)
                self._tail.append(line.decode(errors="replace").rstrip()[:500])
                if self._echo is not None:
                    self._echo(line)


class _EngineLog:
    """The engine's output on disk, at most twice `_LOG_BYTES`. A disk that cannot take it costs the lines alone:

    were they not read any more, the engine would stop at its next one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._is_failing = False

    def __enter__(self) -> "_EngineLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, line: bytes) -> None:
        try:
            if self._file is None or self._file.tell() > _LOG_BYTES:
                self._open()
            assert self._file is not None
            self._file.write(line)
        except OSError as exc:
            if not self._is_failing:
                log.warning("the engine's output is not kept", path=str(self._path), error=str(exc))
            self._is_failing = True
        else:
            self._is_failing = False

    def _open(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._path.exists() and self._path.stat().st_size > _LOG_BYTES:
            self._path.replace(self._path.with_suffix(".log.1"))
        self._file = self._path.open("ab", buffering=0)


def _forget(pid_file: Path) -> None:
    with contextlib.suppress(OSError):  # a disk that can only be read keeps no engine from its start
        pid_file.unlink(missing_ok=True)


def _inherited() -> dict[str, str]:
    """Our environment without our own settings: the engine has no business with the agent's key."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LORAFLEET_")}


def without_secrets(command: Sequence[str]) -> list[str]:
    """The command as it may stand in a log: also one that begins with `env` or a shell, which may be given a token."""
    shown, is_secret = [], False
    for word in command:
        shown.append("***" if is_secret else _GIVEN_SECRET.sub(r"\1=***", word))
        is_secret = word.startswith("-") and _SECRET_NAME.search(word) is not None
    return shown


def is_port_taken(host: str, port: int) -> bool:
    """Whether somebody listens there. vLLM 0.32 would share the port without a word: it sets SO_REUSEPORT."""
    try:
        bound(host, port).close()
    except OSError as exc:
        return exc.errno == errno.EADDRINUSE
    return False


def is_listening(host: str, port: int) -> bool:
    """Whether somebody takes connections there; for addresses of this machine, which answer at once."""
    try:
        with socket.create_connection((host, port), timeout=0.1):
            return True
    except OSError:
        return False
