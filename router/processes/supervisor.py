"""Several router processes on one port, and the parent that starts, watches and stops them.

Every process listens on its own socket with SO_REUSEPORT, and the kernel distributes new connections by hash. A shared
listening socket would give most connections to the process that wakes first. A process that dies loses the connections
queued on its own socket; new ones go to the others at once.

The parent serves no requests. It keeps the port bound, without listening, so that no other program can take it. It also
holds one end of a socket pair to each process; the other end tells the process when its parent has died.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
import msgspec
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorafleet.http_server import serve
from lorafleet.service.loops import backoff_s
from lorafleet.service.network.sockets import socket_folder
from lorafleet.service.network.urls import bracketed
from lorafleet.service.process import stop_signals
from router.processes.shared_quotas import shared_memory

log = structlog.get_logger()

# Not LORAFLEET_ROUTER_...: those are settings, and an unknown one is refused.
ENVIRONMENT = "LORAFLEET_PROCESS"
_BACKLOG = 2048
_SERVING = b"s"
# A process that ran this long before it died is restarted after the shortest pause.
_STEADY_S = 60.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 30.0
# Time until SIGKILL: after a second signal, and beyond the longest orderly stop.
_FORCED_S = 2.0
_STOP_MARGIN_S = 10.0
# A replacement process listens once it can route, or after this time.
_JOIN_TIMEOUT_S = 10.0
# The slot's number and `.sock`.
_SOCKET_NAME_BYTES = 10
# Processes whose parent was killed keep the port until they have drained.
_ORPHANS_S = 2.0
_PORT_PAUSE_S = 0.1
# Such processes start to drain a tenth of a second after the parent's end. One that has not by now will not.
_ORPHANS_REACT_S = 1.0


class ProcessMember(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process's place among those of its parent, passed in an environment variable.

    folder      private to the processes of this parent, removed with it
    lifeline    file descriptor of the process's end of the socket pair
    accounts    file descriptor of the shared quotas' memory; see router/processes/shared_quotas.py
    takes_over  other processes serve already: listen only when synced
    stop_s      longest time of an orderly stop
    """

    slot: int
    processes: int
    host: str
    port: int
    folder: str
    lifeline: int
    accounts: int
    takes_over: bool
    stop_s: float

    def bind(self) -> socket.socket:
        """Bind this process's own socket to the shared port; it does not listen until `JoiningApp` has started."""
        return serve.bind_only(self.host, self.port, shared=True)

    @property
    def quota_group(self) -> str:
        """The name of the processes that share these quotas, unlike that of any others."""
        return f"{socket.gethostname()}:{self.folder}"

    def router_id(self, configured_id: str) -> str:
        """A router id for this process alone, made from the configured id, or from host name and pid without one."""
        return f"{configured_id or socket.gethostname()}-{self.slot if configured_id else os.getpid()}"


def read_membership() -> ProcessMember | None:
    """This process's membership, taken from the environment; None without a parent of ours.

    Starts a thread that ends this process when its parent has died.
    """
    environment = os.environ.pop(ENVIRONMENT, None)
    if environment is None:
        return None
    membership = msgspec.json.decode(environment, type=ProcessMember)
    lifeline = socket.socket(fileno=membership.lifeline)
    lifeline.set_inheritable(False)
    os.set_inheritable(membership.accounts, False)
    threading.Thread(target=_stop_when_orphaned, args=(lifeline, membership), daemon=True, name="lifeline").start()
    return membership


def _stop_when_orphaned(lifeline: socket.socket, membership: ProcessMember) -> None:
    """The lifeline thread: when the parent has died, remove the shared folder and stop this process."""
    with contextlib.suppress(OSError):
        while lifeline.recv(1):
            pass
    # As if the parent had sent SIGTERM, and SIGKILL after `stop_s`.
    shutil.rmtree(membership.folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(membership.stop_s)
    os._exit(1)


class JoiningApp:
    """An ASGI app whose socket listens once the app has started; a replacement also waits until it can route.

    Until then the kernel gives every connection to the other processes.
    """

    def __init__(
        self,
        app: ASGIApp,
        membership: ProcessMember,
        sock: socket.socket,
        *,
        wait_until_synced: Callable[[float], Awaitable[object]],
        within_s: float = _JOIN_TIMEOUT_S,
    ) -> None:
        """wait_until_synced  returns once the app can route, or after the seconds passed to it"""
        self._app = app
        self._membership = membership
        self._sock = sock
        self._wait_until_synced = wait_until_synced
        self._within_s = within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app; its startup message is held back until the socket listens."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, lambda message: self._send_startup(message, send))
        else:
            await self._app(scope, receive, send)

    async def _send_startup(self, message: Message, send: Send) -> None:
        """Start to listen before the startup message is passed on."""
        if message["type"] == "lifespan.startup.complete":
            if self._membership.takes_over:
                await self._wait_until_synced(self._within_s)
            self._sock.listen(_BACKLOG)
            with contextlib.suppress(OSError):  # the parent has died: the lifeline thread ends this process
                os.write(self._membership.lifeline, _SERVING)
        await send(message)


def command_of(argv: Sequence[str]) -> list[str]:
    """The command of one worker process: this router with the same flags. It inherits environment and settings file."""
    return [sys.executable, "-P", "-m", "router", *argv]


def run(
    command: Sequence[str],
    processes: int,
    *,
    host: str,
    port: int,
    scheme: str = "http",
    port_file: Path | None,
    drain_s: float,
    stop_s: float,
    forced_s: float = _FORCED_S,
) -> int:
    """Keep this many processes of `command` on one port until SIGTERM, SIGHUP or SIGINT; returns the exit status.

    command   one router's command line, without port and port file
    scheme    what the processes speak: http or https
    drain_s   how long a process keeps serving after a stop signal; also waited for processes of a killed parent
    stop_s    longest orderly stop of one process: draining and grace
    forced_s  time from a second signal to SIGKILL
    returns   0 after an orderly stop; 1 if a process had to be killed or the port file could not be written; a
              process's own status if none could start
    raises    OSError if the port is taken: at once if its owner keeps serving, else after `drain_s` and a little
    """
    claim = _claim_port(scheme, host, port, within_s=drain_s + _ORPHANS_S)
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    accounts = shared_memory(processes)
    folder = socket_folder("lorafleet-router-", name_bytes=_SOCKET_NAME_BYTES)
    try:
        parent = _Supervisor(
            command,
            processes,
            accounts,
            host=host,
            port=claim.getsockname()[1],
            folder=folder,
            stop_s=stop_s + _STOP_MARGIN_S,
            forced_s=forced_s,
            port_file=port_file,
        )
        return asyncio.run(parent.run())
    finally:
        os.close(accounts)
        shutil.rmtree(folder, ignore_errors=True)
        claim.close()


def _claim_port(scheme: str, host: str, port: int, *, within_s: float) -> socket.socket:
    """Bind a socket to this port alone, so that a second parent is refused. Waits for a killed parent's processes.

    Blocking; the wait is logged. Raises PortInUse after it.
    """
    now = time.monotonic()
    until, serves_on_until = now + within_s, now + _ORPHANS_REACT_S
    has_warned = False
    while True:
        try:
            return serve.bind_only(host, port)
        except serve.PortInUse:
            now = time.monotonic()
            if _is_draining_orphans(scheme, host, port):
                serves_on_until = now + _ORPHANS_REACT_S
                if not has_warned:
                    log.warning(
                        "the port is taken; processes that a killed parent left drain first", port=port, wait_s=within_s
                    )
                has_warned = True
            if now > min(until, serves_on_until):
                raise
        time.sleep(_PORT_PAUSE_S)


def _is_draining_orphans(scheme: str, host: str, port: int) -> bool:
    """Ask the port's owners; whether they may be processes of a killed parent: they share the port and are stopping."""
    try:
        serve.bind_only(host, port, shared=True).close()
        at = bracketed(host)
        # Whoever answers gets nothing of us, so nobody's certificate is checked.
        answer = httpx.get(f"{scheme}://{at}:{port}/ready", timeout=_ORPHANS_REACT_S, trust_env=False, verify=False)  # noqa: S501
    except serve.PortInUse:
        return False
    except (OSError, httpx.HTTPError):
        return True
    return answer.status_code == 503 and b'"stopping"' in answer.content


class _Supervisor:
    """The parent: starts its processes, restarts those that end, and stops all."""

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        accounts: int,
        *,
        host: str,
        port: int,
        folder: Path,
        stop_s: float,
        forced_s: float,
        port_file: Path | None,
    ) -> None:
        self._command = command
        self._processes = processes
        self._accounts = accounts
        self._host = host
        self._port = port
        self._folder = folder
        self._stop_s = stop_s
        self._forced_s = forced_s
        self._port_file = port_file
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._has_served = False
        self._never_started: dict[int, int] = {}
        self._has_given_up = False
        self._has_failed = False
        self._rng = random.Random()

    async def run(self) -> int:
        """Handle stop signals, and run all processes until they are stopped; returns the exit status.

        That is 0 after a clean stop, 1 if a process failed, or the status of processes that never started.
        """
        loop = asyncio.get_running_loop()
        for sig in stop_signals():
            loop.add_signal_handler(sig, self._on_stop_signal, sig)
        log.info("serving", host=self._host, port=self._port, processes=self._processes)
        await asyncio.gather(*(self._keep_slot_running(slot) for slot in range(self._processes)))
        if self._has_given_up:
            return max(1, *self._never_started.values())
        return 1 if self._has_failed else 0

    def _on_stop_signal(self, sig: int) -> None:
        """Begin to stop, and pass the signal to all processes; a second one forces the stop."""
        if self._stopping.is_set():
            self._forced.set()
        self._stopping.set()
        # The same signal: SIGINT comes from a person at a terminal, and skips the drain for load balancers. Each
        # process has its own process group, so that Ctrl-C reaches it once, through the parent.
        for process in self._running.values():
            _send_signal(process, sig)

    def _none_can_start(self) -> bool:
        """Whether every slot has failed, and no process ever listened."""
        return not self._has_served and len(self._never_started) == self._processes

    async def _keep_slot_running(self, slot: int) -> None:
        """Keep a process running in this slot until the parent stops: restart it after a pause that grows, and log it.

        If no process can start, stop all.
        """
        failures = 0
        while not self._stopping.is_set():
            began_at = time.monotonic()
            try:
                process, lifeline = await self._start_process(slot)
            except OSError as exc:  # the machine is out of memory or processes
                failures += 1
                pause_s = backoff_s(failures, _FIRST_PAUSE_S, _MAX_PAUSE_S, self._rng)
                log.warning("process cannot be started", slot=slot, error=repr(exc), again_in_s=round(pause_s, 3))
                await _is_set_within(self._stopping, pause_s)
                continue
            try:
                status = await self._wait_for_end(process, lifeline)
            finally:
                lifeline.close()
                del self._running[slot]
            if self._stopping.is_set():
                return
            lasted_s = time.monotonic() - began_at
            failures = 1 if lasted_s > _STEADY_S else failures + 1
            if not self._has_served:
                self._never_started[slot] = status
                if self._none_can_start():
                    log.error("no process can start", status=status)
                    self._has_given_up = True
                    self._on_stop_signal(signal.SIGTERM)  # other slots may be starting again
                    return
            pause_s = backoff_s(failures, _FIRST_PAUSE_S, _MAX_PAUSE_S, self._rng)
            log.warning(
                "process ended; another takes its place",
                slot=slot,
                pid=process.pid,
                status=status,
                lasted_s=round(lasted_s, 3),
                pause_s=round(pause_s, 3),
            )
            await _is_set_within(self._stopping, pause_s)

    async def _start_process(self, slot: int) -> tuple[asyncio.subprocess.Process, socket.socket]:
        """Start the process of a slot and add it to those running; returns it with our end of its lifeline.

        Raises OSError.
        """
        own_end, child_end = socket.socketpair()
        own_end.setblocking(False)
        membership = ProcessMember(
            slot=slot,
            processes=self._processes,
            host=self._host,
            port=self._port,
            folder=str(self._folder),
            lifeline=child_end.fileno(),
            accounts=self._accounts,
            takes_over=self._has_served,
            stop_s=self._stop_s,
        )
        try:
            with child_end:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    env={**os.environ, ENVIRONMENT: msgspec.json.encode(membership).decode()},
                    pass_fds=[child_end.fileno(), self._accounts],
                    process_group=0,
                )
        except BaseException:
            own_end.close()
            raise
        self._running[slot] = process
        if self._stopping.is_set():  # the signal came between the start and the entry in `_running`
            _send_signal(process, signal.SIGTERM)
        return process, own_end

    async def _wait_for_end(self, process: asyncio.subprocess.Process, lifeline: socket.socket) -> int:
        """Wait for a process's end, and kill it if it stops too slowly; returns its status."""
        listening = asyncio.create_task(self._wait_until_serving(lifeline))
        stopping = asyncio.create_task(self._kill_after_stop_deadline(process))
        try:
            return await process.wait()
        finally:
            for task in (listening, stopping):
                task.cancel()
            await asyncio.gather(listening, stopping, return_exceptions=True)

    async def _wait_until_serving(self, lifeline: socket.socket) -> None:
        """Wait until the process listens. The first one marks the service as begun and writes the port file."""
        # A process that died early resets the connection.
        with contextlib.suppress(ConnectionError):
            if await asyncio.get_running_loop().sock_recv(lifeline, 1) == _SERVING and not self._has_served:
                self._has_served = True
                self._write_port_file()

    async def _kill_after_stop_deadline(self, process: asyncio.subprocess.Process) -> None:
        """Wait for a stop signal and its deadline, then kill the process, and count the run as failed. Logged.

        The caller cancels this once the process has ended.
        """
        await self._stopping.wait()
        if await _is_set_within(self._forced, self._stop_s):
            await asyncio.sleep(self._forced_s)
        log.warning("process did not stop and is killed", pid=process.pid)
        self._has_failed = True
        _send_signal(process, signal.SIGKILL)

    def _write_port_file(self) -> None:
        """Write the port file, if one is set; a failure is logged and stops all processes."""
        if self._port_file is None:
            return
        try:
            serve.write_port_file(self._port_file, self._port)
        except OSError as exc:  # the program that started this one would wait for the file for ever
            log.error("port file not written; all stop", error=str(exc))  # noqa: TRY400  (the message is complete)
            self._has_failed = True
            self._on_stop_signal(signal.SIGTERM)


def _send_signal(process: asyncio.subprocess.Process, sig: int) -> None:
    """Send a signal to a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(sig)


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event, at most this long; whether it is set."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
