"""The engine's process: start, output, stop."""

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

from lorafleet.engine.errors import error_in
from lorafleet.service.files import private_opener
from lorafleet.service.network.sockets import bind_socket
from workers.engines.launch import LaunchCommand

log = structlog.get_logger()

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_LINES = 40
_LOG_BYTES = 32 << 20
_ERROR_LINES = 500  # an error that so many lines follow has not ended the engine; tracebacks of all processes are fewer

_SECRET_NAME = re.compile(r"(?:key|token|password|secret)$", re.IGNORECASE)
_GIVEN_SECRET = re.compile(r"(\w*(?:key|token|password|secret))=(?:'[^']*'|\"[^\"]*\"|\S+)", re.IGNORECASE)

# vLLM 0.32 v1/worker/lora_model_runner_mixin.py: the base model's class, in a line of a traceback.
_WITHOUT_LORA = re.compile(rb"ValueError: (\w{1,100}) does not support LoRA yet")

# vLLM 0.32 lora/punica_wrapper/punica_selector.py: the class of its LoRA kernels' wrapper.
_PUNICA = re.compile(rb"Using (PunicaWrapper\w{1,100})\.")

Echo: TypeAlias = Callable[[bytes], None]
"""Receives each line of an engine's output; must neither raise nor block."""


class EngineProcess:
    """One run of an engine under its guard process, in a process group of its own.

    punica             class of vLLM's wrapper of LoRA kernels, once the engine has named it; else ""
    unsupported_model  the base model's class, if the engine said that it takes no adapters for it; else ""
    """

    def __init__(
        self, process: asyncio.subprocess.Process, *, log_file: Path, pid_file: Path, echo: Echo | None
    ) -> None:
        self._process = process
        self._echo = echo
        self._pid_file = pid_file
        self.punica = self.unsupported_model = ""
        self._error, self._lines_since_error = "", 0
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._reader = asyncio.create_task(self._copy_output(log_file))
        # One waiter: asyncio keeps every call of wait() until the exit, even after a timeout.
        self._exit = asyncio.create_task(process.wait())

    @classmethod
    async def start(cls, launch: LaunchCommand, *, state_dir: Path, echo: Echo | None = None) -> "EngineProcess":
        """Start the engine under its guard, and log the command; its output goes to `engine.log` and `echo`.

        Removes an older pid file.
        raises  OSError if the command cannot be run
        """
        pid_file = state_dir / "engine.pid"
        _remove_file(pid_file)
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
            env={**launch.environment, **_inherited_environment()},
            start_new_session=True,
            limit=1 << 20,
        )
        log.info("engine started", pid=process.pid, command=" ".join(without_secrets(launch.command)))
        return cls(process, log_file=state_dir / "engine.log", pid_file=pid_file, echo=echo)

    @property
    def tail(self) -> str:
        """The last lines of the engine's output, at most 40."""
        return "\n".join(self._tail)

    @property
    def error(self) -> str:
        """The last error in the engine's recent output, without secrets; "" without one."""
        return " ".join(without_secrets(self._error.split())) if self._lines_since_error < _ERROR_LINES else ""

    @property
    def has_exited(self) -> bool:
        """Whether the engine's process has ended."""
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Wait for the exit of the guard, kill the rest of the process group and return the exit status."""
        code = await asyncio.shield(self._exit)
        self.kill()
        return code

    async def stop(self, *, within_s: float) -> None:
        """Send SIGTERM, wait at most `within_s` for the exit, then kill the process group and read its last output.

        A late exit is logged. An engine that has exited is only cleared up.
        """
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
        """Kill the process group, wait for its end, read its output for at most 2 s more, and delete the PID file."""
        self.kill()
        await self._process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.shield(self._reader)
        self._reader.cancel()
        _remove_file(self._pid_file)

    def kill(self) -> None:
        """Send SIGKILL to the whole process group; does not wait for its end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _copy_output(self, log_file: Path) -> None:
        """Copy the engine's output to the log, the tail and `echo` until it closes; a line over 1 MiB is dropped."""
        assert self._process.stdout is not None
        with _EngineLog(log_file) as file:
            while True:
                try:
                    line = await self._process.stdout.readline()
                except ValueError:
                    continue  # a line of more than 1 MiB is dropped
                if not line:
                    return
                file.write(line)
                text = line.decode(errors="replace").rstrip()
                self._tail.append(text[:500])
                self._lines_since_error += 1
                if error := error_in(text):
                    self._error, self._lines_since_error = error, 0
                if named := _PUNICA.search(line):
                    self.punica = named[1].decode()
                if found := _WITHOUT_LORA.search(line):
                    self.unsupported_model = found[1].decode()
                if self._echo is not None:
                    self._echo(line)


class _EngineLog:
    """The engine's log file and its predecessor, each at most `_LOG_BYTES`.

    Lines that the disk does not take are dropped: an unread pipe would block the engine.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._is_failing = False

    def __enter__(self) -> "_EngineLog":
        return self

    def __exit__(self, *_: object) -> None:
        """Close the log file."""
        if self._file is not None:
            self._file.close()

    def write(self, line: bytes) -> None:
        """Append a line, in a new file if the current one is full; an error is logged once and not raised."""
        try:
            if self._file is None or self._file.tell() > _LOG_BYTES:
                self._open_file()
            assert self._file is not None
            self._file.write(line)
        except OSError as exc:
            if not self._is_failing:
                log.warning("engine output not written", path=str(self._path), error=str(exc))
            self._is_failing = True
        else:
            self._is_failing = False

    def _open_file(self) -> None:
        """Open the log file for appending; a full one is first renamed to `engine.log.1`."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._path.exists() and self._path.stat().st_size > _LOG_BYTES:
            self._path.replace(self._path.with_suffix(".log.1"))
        self._file = open(self._path, "ab", buffering=0, opener=private_opener)  # noqa: SIM115


def _remove_file(pid_file: Path) -> None:
    """Delete the PID file if it exists; an error of the disk is ignored."""
    with contextlib.suppress(OSError):  # the engine may start on a read-only disk, too
        pid_file.unlink(missing_ok=True)


def _inherited_environment() -> dict[str, str]:
    """The agent's environment without its own settings, which include its key."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LORAFLEET_")}


def without_secrets(command: Sequence[str]) -> list[str]:
    """The command for logs: values of words and flags that look like keys, tokens or passwords are replaced."""
    shown, is_secret = [], False
    for word in command:
        shown.append("***" if is_secret else _GIVEN_SECRET.sub(r"\1=***", word))
        is_secret = word.startswith("-") and _SECRET_NAME.search(word) is not None
    return shown


def is_port_taken(host: str, port: int) -> bool:
    """Bind the port for a moment to see whether another process has it. vLLM 0.32 would share it (SO_REUSEPORT)."""
    try:
        bind_socket(host, port).close()
    except OSError as exc:
        return exc.errno == errno.EADDRINUSE
    return False


def is_listening(host: str, port: int) -> bool:
    """Connect to a local port; whether that succeeds within 0.1 s. Blocking."""
    try:
        with socket.create_connection((host, port), timeout=0.1):
            return True
    except OSError:
        return False
