"""Several router processes on one port: a parent that starts, watches and stops them, and what each of them is told.

Every process listens on a socket of its own with SO_REUSEPORT, and the kernel deals new connections out by their hash.
With one listening socket for all, whoever wakes first takes what has come: of 64 connections at once one of two
processes took all 64, or 61, or 36; with a socket each 35 to 39 (uvloop 0.23, Linux 6.18, ten rounds). A process that
dies takes with it what its own socket had queued, the moment's connections; new ones go to the others at once.

The parent serves nothing and is no part of a request. It holds the port bound, without listening, so that nobody else
can have it, and one end of a socket pair to each process: the other end tells a process that its parent is gone.
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
from lorafleet.service import signals
from lorafleet.service.loops import backoff_s
from lorafleet.service.sockets import socket_folder
from router.processes.shared_quotas import shared_memory

log = structlog.get_logger()

# Not LORAFLEET_ROUTER_...: those are settings, and an unknown one is refused.
ENVIRONMENT = "LORAFLEET_PROCESS"
_BACKLOG = 2048
_SERVING = b"s"
# A process that ran for so long before it died begins again with the shortest pause.
_STEADY_S = 60.0
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.2, 30.0
# After the second signal, and beyond what an orderly stop may take: then SIGKILL.
_FORCED_S = 2.0
_MARGIN_S = 10.0
# One that takes another's place listens only when it can route; after so long it listens all the same.
_JOIN_WITHIN_S = 10.0
# Its slot's number and `.sock`.
_SOCKET_NAME_BYTES = 10
# Processes whose parent was killed close their port when they have drained; until then nobody else can have it.
_ORPHANS_S = 2.0
_PORT_PAUSE_S = 0.1
# They begin to a tenth of a second after their parent's end. Who does not in this time serves on.
_TOLD_S = 1.0


class ProcessMember(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of several is told by its parent.

    folder       private, shared by all processes of this parent, removed with it
    lifeline     file descriptor of our end of the socket pair
    accounts     file descriptor of the memory that keys' accounts are shared in; see router/processes/shared_quotas.py
    takes_over   others serve already: listen only when synced
    stop_s       how long an orderly stop may take at most
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
        """A socket of our own on the shared port; bound, and not listening before `JoiningApp` lets it."""
        return serve.claim(self.host, self.port, shared=True)

    def router_id(self, configured: str) -> str:
        """A name that no other process has: what is configured names all of them."""
        return f"{configured or socket.gethostname()}-{self.slot if configured else os.getpid()}"


def member() -> ProcessMember | None:
    """What our parent told us, or None for a process on its own. Ends this process when the parent is gone."""
    told = os.environ.pop(ENVIRONMENT, None)
    if told is None:
        return None
    me = msgspec.json.decode(told, type=ProcessMember)
    line = socket.socket(fileno=me.lifeline)
    line.set_inheritable(False)
    os.set_inheritable(me.accounts, False)
    threading.Thread(target=_until_orphaned, args=(line, me), daemon=True, name="lifeline").start()
    return me


def _until_orphaned(line: socket.socket, me: ProcessMember) -> None:
    with contextlib.suppress(OSError):
        while line.recv(1):
            pass
    # As if the parent had told us to stop; but nobody is left to insist.
    shutil.rmtree(me.folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(me.stop_s)
    os._exit(1)


class JoiningApp:
    """An app that listens when it has started, and when it takes another's place not before it can route.

    Until then the kernel gives every connection to the processes that do.
    """

    def __init__(
        self,
        app: ASGIApp,
        me: ProcessMember,
        sock: socket.socket,
        *,
        synced: Callable[[float], Awaitable[object]],
        within_s: float = _JOIN_WITHIN_S,
    ) -> None:
        """`synced` returns once the app can route, or after so many seconds as it is given: `within_s`."""
        self._app = app
        self._me = me
        self._sock = sock
        self._synced = synced
        self._within_s = within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app itself; only what it says of its start is held back."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, lambda message: self._started(message, send))
        else:
            await self._app(scope, receive, send)

    async def _started(self, message: Message, send: Send) -> None:
        if message["type"] == "lifespan.startup.complete":
            if self._me.takes_over:
                await self._synced(self._within_s)
            self._sock.listen(_BACKLOG)
            with contextlib.suppress(OSError):  # no parent left to hear it: the lifeline ends us
                os.write(self._me.lifeline, _SERVING)
        await send(message)


def command_of(argv: Sequence[str]) -> list[str]:
    """This router again, with the same flags; what the environment and a file say reaches it as it reached us."""
    return [sys.executable, "-P", "-m", "router", *argv]


def run(
    command: Sequence[str],
    processes: int,
    *,
    host: str,
    port: int,
    port_file: Path | None,
    drain_s: float,
    stop_s: float,
    forced_s: float = _FORCED_S,
) -> int:
    """Keep so many processes of `command` on one port until SIGTERM, SIGHUP or SIGINT; the status to exit with.

    command   one router, as on a command line; its port and port file are ours to see to
    drain_s   how long processes serve on when they are told to stop, those of a killed parent before us, too
    stop_s    how long one process takes to stop in order, at most: draining and grace
    forced_s  how long processes have after a second signal before they are killed
    returns   0 after an orderly stop; 1 when a process had to be killed or the port file could not be written; a
              process's own status when none could start
    raises    OSError when the port is taken: at once where somebody serves on there, else after `drain_s` and a little
    """
    claim = _claimed(host, port, within_s=drain_s + _ORPHANS_S)
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
            stop_s=stop_s + _MARGIN_S,
            forced_s=forced_s,
            port_file=port_file,
        )
        return asyncio.run(parent.run())
    finally:
        os.close(accounts)
        shutil.rmtree(folder, ignore_errors=True)
        claim.close()


def _claimed(host: str, port: int, *, within_s: float) -> socket.socket:
    """A socket that has this port alone: a second parent is refused, and would be let in if both asked to share."""
    now = time.monotonic()
    until, serves_on_until = now + within_s, now + _TOLD_S
    has_said = False
    while True:
        try:
            return serve.claim(host, port)
        except serve.PortInUse:
            now = time.monotonic()
            if _may_come_free(host, port):
                serves_on_until = now + _TOLD_S
                if not has_said:
                    log.warning(
                        "the port is taken; processes that a killed parent left drain first", port=port, wait_s=within_s
                    )
                has_said = True
            if now > min(until, serves_on_until):
                raise
        time.sleep(_PORT_PAUSE_S)


def _may_come_free(host: str, port: int) -> bool:
    """Whether those who have the port may be the processes of a parent that was killed: they share it, and stop."""
    try:
        serve.claim(host, port, shared=True).close()
        at = f"[{host}]" if ":" in host else host
        answer = httpx.get(f"http://{at}:{port}/ready", timeout=_TOLD_S, trust_env=False)
    except serve.PortInUse:
        return False
    except (OSError, httpx.HTTPError):
        return True
    return answer.status_code == 503 and b'"stopping"' in answer.content


class _Supervisor:
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
        self._chance = random.Random()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for sig in signals.stopping():
            loop.add_signal_handler(sig, self._told, sig)
        log.info("serving", host=self._host, port=self._port, processes=self._processes)
        await asyncio.gather(*(self._keep(slot) for slot in range(self._processes)))
        if self._has_given_up:
            return max(1, *self._never_started.values())
        return 1 if self._has_failed else 0

    def _told(self, sig: int) -> None:
        if self._stopping.is_set():
            self._forced.set()
        self._stopping.set()
        # The same signal: SIGINT is a person at a terminal, who need not wait for load balancers to hear of it. Each
        # process has a group of its own, so Ctrl-C reaches it through us alone, and once.
        for process in self._running.values():
            _signal(process, sig)

    def _none_can_start(self) -> bool:
        return not self._has_served and len(self._never_started) == self._processes

    async def _keep(self, slot: int) -> None:
        """One process in this slot, and another after it, until all stop."""
        failures = 0
        while not self._stopping.is_set():
            began_at = time.monotonic()
            try:
                process, line = await self._start(slot)
            except OSError as exc:  # the machine is out of memory or processes; the others serve on
                failures += 1
                pause_s = backoff_s(failures, _FIRST_PAUSE_S, _MOST_PAUSE_S, self._chance)
                log.warning("process cannot be started", slot=slot, error=repr(exc), again_in_s=round(pause_s, 3))
                await _either(self._stopping, pause_s)
                continue
            try:
                status = await self._until_ended(process, line)
            finally:
                line.close()
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
                    self._told(signal.SIGTERM)  # some may be at it once more, and could by now
                    return
            pause_s = backoff_s(failures, _FIRST_PAUSE_S, _MOST_PAUSE_S, self._chance)
            log.warning(
                "process ended; another takes its place",
                slot=slot,
                pid=process.pid,
                status=status,
                lasted_s=round(lasted_s, 3),
                pause_s=round(pause_s, 3),
            )
            await _either(self._stopping, pause_s)

    async def _start(self, slot: int) -> tuple[asyncio.subprocess.Process, socket.socket]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        told = ProcessMember(
            slot=slot,
            processes=self._processes,
            host=self._host,
            port=self._port,
            folder=str(self._folder),
            lifeline=theirs.fileno(),
            accounts=self._accounts,
            takes_over=self._has_served,
            stop_s=self._stop_s,
        )
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    env={**os.environ, ENVIRONMENT: msgspec.json.encode(told).decode()},
                    pass_fds=[theirs.fileno(), self._accounts],
                    process_group=0,
                )
        except BaseException:
            ours.close()
            raise
        self._running[slot] = process
        if self._stopping.is_set():  # told between its start and its entry in our book
            _signal(process, signal.SIGTERM)
        return process, ours

    async def _until_ended(self, process: asyncio.subprocess.Process, line: socket.socket) -> int:
        listening = asyncio.create_task(self._hear(line))
        stopping = asyncio.create_task(self._see_it_stop(process))
        try:
            return await process.wait()
        finally:
            for task in (listening, stopping):
                task.cancel()
            await asyncio.gather(listening, stopping, return_exceptions=True)

    async def _hear(self, line: socket.socket) -> None:
        # A process that died before it read what we hold of the pair resets it.
        with contextlib.suppress(ConnectionError):
            if await asyncio.get_running_loop().sock_recv(line, 1) == _SERVING and not self._has_served:
                self._has_served = True
                self._tell_port()

    async def _see_it_stop(self, process: asyncio.subprocess.Process) -> None:
        await self._stopping.wait()
        if await _either(self._forced, self._stop_s):
            await asyncio.sleep(self._forced_s)
        log.warning("process did not stop and is killed", pid=process.pid)
        self._has_failed = True
        _signal(process, signal.SIGKILL)

    def _tell_port(self) -> None:
        if self._port_file is None:
            return
        try:
            serve.tell_port(self._port_file, self._port)
        except OSError as exc:  # whoever started us would wait for it for ever
            log.error("port file not written; all stop", error=str(exc))  # noqa: TRY400  (it says all there is)
            self._has_failed = True
            self._told(signal.SIGTERM)


def _signal(process: asyncio.subprocess.Process, sig: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(sig)


async def _either(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event came within this time."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
