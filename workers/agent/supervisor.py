"""Starts the engine, waits for its health, watches it and restarts it; or watches an engine that it did not start.

Every exit counts as a failure, because vLLM 0.32 exits with status 0 when it crashes.
"""

import asyncio
import contextlib
import os
import signal
import socket
import uuid
from collections.abc import Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any

import structlog

from lorafleet.engine.arguments import value_of
from lorafleet.engine.devices import is_on_cpu
from lorafleet.engine.vllm_plugin.engine_reports import EngineProcessReport, forget_engine_reports
from lorafleet.service.network.sockets import bind_socket
from workers.agent.agent import WorkerAgent
from workers.core.errors import EngineError, WorkerError
from workers.core.restarts import RestartBackoff
from workers.engines.base import EngineClient
from workers.engines.kinds import engine_client, engine_traits
from workers.engines.launch import kv_events_config, launch_command
from workers.engines.process import Echo, EngineProcess, is_listening, is_port_taken
from workers.wire import AgentIncidentKind, Transport

log = structlog.get_logger()

_POLL_S = 0.03
_PROBE_S = 0.01
_STOP_SPARE_S = 10.0  # between the end of the engine's own drain and SIGKILL
_STARTING_STOP_S = 3.0  # the same for an engine that is starting: vLLM 0.32 ignores SIGTERM then
_LAST_ERROR = "\nits last error: "


class Supervisor:
    """One engine, for as long as `run` runs."""

    def __init__(
        self,
        agent: WorkerAgent,
        *,
        own_command: Sequence[str] = (),
        echo: Echo | None = None,
        rng: Random,
    ) -> None:
        """Starts nothing; see `run`. `echo` receives each line of the engine's output."""
        settings = self._settings = agent.context.settings
        self._agent = agent
        self._own_command = tuple(own_command)
        self._echo = echo
        self._rng = rng
        self._clock = agent.context.clock
        self._port = _command_port((*own_command, *settings.engine_args)) or settings.engine_port
        self._reserved: socket.socket | None = None  # reserves the engine's port if no setting names one
        self._process: EngineProcess | None = None
        self._restarts = RestartBackoff(loop_after=settings.crash_loop_after, loop_retry_s=settings.crash_loop_retry_s)
        self._down_since: float | None = None
        self._agent.inventory.history.record_incident("agent_started")

    async def run(self) -> None:
        """Start, watch and restart the engine until cancelled, after which it keeps running: call `stop`.

        Each failure is handed to the agent; unexpected ones are logged.
        """
        while True:
            ready_at: float | None = None
            try:
                async with contextlib.AsyncExitStack() as stack:
                    client = await self._start_and_attach_engine(stack)
                    ready_at = self._clock()
                    self._record_start(ready_at)
                    reason = await self._watch(client)
                    self._agent.mark_down(reason)  # before the client is closed: nobody may read "ready" until then
            except (WorkerError, OSError) as exc:
                reason = str(exc)
            except Exception as exc:  # the top of a loop: it logs, counts and goes on
                log.exception("supervising failed")
                reason = repr(exc)
            try:
                await self._handle_failure(reason, up_s=0.0 if ready_at is None else self._clock() - ready_at)
            except Exception:
                log.exception("clearing up after the engine failed")  # without a supervisor the agent never recovers
                await asyncio.sleep(1.0)

    async def stop(self) -> None:
        """Drain and end the engine's processes, release its port and remove its sockets.

        A starting engine is not drained.
        """
        if self._process is not None:
            grace_s = (
                _STARTING_STOP_S
                if self._agent.engine.client is None
                else self._settings.engine_shutdown_s + _STOP_SPARE_S
            )
            await self._process.stop(within_s=grace_s)
        self._release_port()
        for kind in ("events", "replay"):
            self._settings.socket_path(kind).unlink(missing_ok=True)

    def _release_port(self) -> None:
        """Release a port that we picked, so that the next start picks another. A port from the settings stays."""
        if self._reserved is not None:
            self._reserved.close()
            self._reserved, self._port = None, 0

    async def _handle_failure(self, reason: str, *, up_s: float) -> None:
        """Log and count the failure, detach and end the engine, and wait before the restart.

        up_s  seconds for which the engine was ready
        """
        self._record_failure(reason, was_ready=up_s > 0)
        self._restarts = self._restarts.after_failure(up_s)
        delay_s = self._restarts.delay_s(self._rng)
        if self._restarts.is_loop:
            reason = f"crash loop ({self._restarts.failures} failures in a row, next try in {delay_s:.0f} s): {reason}"
        log.error("engine down", reason=reason, failures=self._restarts.failures, retry_s=round(delay_s, 2))
        self._agent.context.metrics.engine_restarts.inc()
        await self._agent.detach_engine(reason)
        if self._process is not None:
            await self._process.end()
            self._process = None
        await asyncio.sleep(delay_s)

    def _record_start(self, now: float) -> None:
        """Record as an incident that the engine is ready, again or for the first time, with its adapters."""
        adapters = len(self._agent.inventory.slots.registered)
        history = self._agent.inventory.history
        if self._down_since is None:
            history.record_incident("engine_started", adapters=adapters)
        else:
            down_s = round(now - self._down_since, 3)
            cause = f"{adapters} adapter{'' if adapters == 1 else 's'} back after {down_s:.1f} s"
            history.record_incident("engine_back", cause, seconds=down_s, adapters=adapters)
        self._down_since = None
        self._agent.inventory.mark_changed()

    def _record_failure(self, reason: str, *, was_ready: bool) -> None:
        """Record as an incident why the engine is down: it died, hangs, or did not start.

        An incident is shown by its first line, to operators alone: that has the engine's last error.
        """
        has_exited = self._process is not None and self._process.has_exited
        if self._down_since is None:
            self._down_since = self._clock()
        kind: AgentIncidentKind = "engine_died" if has_exited or self._process is None else "engine_hung"
        cause = reason.replace(_LAST_ERROR, ": ", 1)
        self._agent.inventory.history.record_incident(kind if was_ready else "engine_start_failed", cause)

    async def _start_and_attach_engine(self, client_stack: contextlib.AsyncExitStack) -> EngineClient:
        """Start the engine, wait until it is healthy and attach it to the agent.

        Raises EngineError with its last output, or if the port is taken. Port 0 picks a free one, which is kept. With
        `engine_url` the running engine is attached. `client_stack` closes the client at its end.
        """
        if self._settings.engine_url:
            return await self._attach_running_engine(client_stack)
        boot_id = uuid.uuid4().hex
        topic = f"kv@{boot_id}"
        host = self._settings.engine_host
        if self._port == 0:
            self._reserved = bind_socket(host, 0)
            self._port = self._reserved.getsockname()[1]
        if is_port_taken(host, self._port):
            # The other process would answer in the engine's place and receive its adapters.
            message = f"port {self._port} of {host} is taken by another process; see engine_port (0 picks a free one)"
            self._release_port()
            raise EngineError("engine_start_failed", message)
        _make_private_folder(self._settings.ipc_dir)
        traits = engine_traits(self._settings.engine)
        adapters = await self._agent.adapters_at_start() if traits.takes_adapters == "at its start" else {}
        start = launch_command(
            self._settings, port=self._port, topic=topic, own_command=self._own_command, adapters=adapters
        )
        await asyncio.to_thread(forget_engine_reports, self._settings.lora_reports)
        self._process = await EngineProcess.start(start, state_dir=self._settings.state, echo=self._echo)
        client = engine_client(self._settings.engine, self._engine_url(), self._agent.context.tls)
        client_stack.push_async_callback(client.aclose)
        await self._wait_until_healthy(client)
        transport = Transport(
            engine_url=self._settings.engine_advertise_url or client.url, dialect=traits.dialect, kv_topic=topic
        )
        if traits.publishes_kv_events:
            kv = kv_events_config(self._settings, topic)
            sockets = {"kv_events": (str(kv["endpoint"]),), "kv_replay": (str(kv["replay_endpoint"]),)}
            transport = transport.model_copy(update=sockets)
        # If the process dies while adapters are loaded, fail at once, not after a timeout.
        attaching = self._agent.attach_engine(
            client, engine_boot_id=boot_id, transport=transport, printed=self._printed_report(self._process.punica)
        )
        await self._run_unless_exited(attaching)
        return client

    def _printed_report(self, punica: str) -> EngineProcessReport | None:
        """What the engine's output says of its LoRA kernels; None if it says nothing."""
        is_cpu = is_on_cpu(self._settings.engine, self._settings.device_profile, os.environ)
        return EngineProcessReport(punica, "cpu" if is_cpu else "gpu", slot_bytes=0) if punica else None

    async def _attach_running_engine(self, stack: contextlib.AsyncExitStack) -> EngineClient:
        """Wait until the engine at `engine_url` is healthy and attach it to the agent. Raises EngineError.

        `stack` closes the client at its end.
        """
        client = engine_client(self._settings.engine, self._settings.engine_url.rstrip("/"), self._agent.context.tls)
        stack.push_async_callback(client.aclose)
        await self._wait_until_healthy(client)
        # We gave this engine no boot id, so the mark of its start serves as one.
        boot_id = await client.boot_mark()
        kv = await client.kv_event_endpoints()
        transport = Transport(
            engine_url=self._settings.engine_advertise_url or client.url,
            dialect=client.traits.dialect,
            kv_events=kv.events,
            kv_replay=kv.replay,
            kv_topic=kv.topic,
        )
        await self._agent.attach_engine(client, engine_boot_id=boot_id, transport=transport)
        return client

    async def _wait_until_healthy(self, client: EngineClient) -> None:
        """Poll the engine until it is healthy. Raises EngineError if it exits or the start deadline passes."""
        deadline = self._clock() + self._settings.start_deadline_s
        while True:
            # Probe the port first: a refused connection costs much less than an HTTP request.
            is_not_listening = self._process is not None and not is_listening(self._connect_host(), self._port)
            if not is_not_listening and await client.is_healthy(timeout_s=self._settings.health_timeout_s):
                return
            if self._process is not None and self._process.has_exited:
                raise EngineError("engine_start_failed", await self._exit_reason("the engine did not start"))
            if self._clock() > deadline:
                tail = self._process.tail if self._process is not None else ""
                message = f"engine {client.url}: not healthy within {self._settings.start_deadline_s:g} s\n{tail}"
                raise EngineError("engine_start_failed", message)
            await asyncio.sleep(_PROBE_S if is_not_listening else _POLL_S)

    async def _watch(self, client: EngineClient) -> str:
        """Watch the engine; returns why it must be restarted: it exited, hangs, or (attached) has restarted."""
        healthy_at = self._clock()
        while True:
            if await self._exited_within(self._agent.context.timers.watch_s):
                return await self._exit_reason("the engine exited")
            is_trusted = await self._agent.check_trust(client)
            # We cannot restart an attached engine: while its health route answers, it only stays suspect.
            if is_trusted or (self._process is None and await self._agent.engine.is_healthy()):
                healthy_at = self._clock()
                if self._process is None and await self._was_restarted(client):
                    return "the attached engine was restarted"
            elif self._clock() - healthy_at > self._patience_s():
                reason = self._agent.engine.suspicion or "the engine gave no sign of health"
                return f"{reason} ({self._clock() - healthy_at:.0f} s ago it was well)"

    async def _was_restarted(self, client: EngineClient) -> bool:
        """Ask an attached engine whether it has restarted; False if it does not answer."""
        with contextlib.suppress(EngineError):  # no answer is no restart
            return await client.boot_mark() != self._agent.engine.boot_id
        return False

    def _patience_s(self) -> float:
        """Seconds without health before a restart; short for an attached engine, which is only detached."""
        if self._process is None:
            return self._agent.context.timers.attached_s
        return self._agent.engine.patience_s if self._agent.engine.suspicion else self._settings.hang_after_s

    async def _exited_within(self, seconds: float) -> bool:
        """Wait so long or until the engine's process exits; returns whether it exited. Attached: always False."""
        if self._process is None:
            await asyncio.sleep(seconds)
            return False
        # Not wait_for: in Python 3.11 it forgets a cancellation that comes together with the exit.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()
        return self._process.has_exited

    async def _run_unless_exited(self, work: Coroutine[Any, Any, None]) -> None:
        """Await the coroutine; as soon as the engine's process exits, cancel it and raise EngineError."""
        assert self._process is not None
        process = self._process
        task = asyncio.create_task(work)
        exited = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({task, exited}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineError("engine_down", await self._exit_reason("the engine exited while loading adapters"))
            await task
        finally:
            for pending in (task, exited):
                pending.cancel()
            await asyncio.gather(task, exited, return_exceptions=True)

    async def _exit_reason(self, event: str) -> str:
        """Wait for the exit, kill what is left of the process group; returns the event, exit status and last output."""
        assert self._process is not None
        code = await self._process.wait()
        await self._process.end()
        cause = ""
        if model := self._process.unsupported_model:
            cause = (
                f": it takes no adapters for a {model}; give a base model that it does, or serve it without an agent"
            )
        # `/ready` is open to everybody and shows the first line only.
        error = f"{_LAST_ERROR}{self._process.error}" if self._process.error and not cause else ""
        return f"{event} ({status_text(code)}){cause}{error}\nits output ends:\n{self._process.tail}"

    def _connect_host(self) -> str:
        """The address under which the agent reaches the engine."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._settings.engine_host, self._settings.engine_host)  # noqa: S104

    def _engine_url(self) -> str:
        """The URL under which the agent reaches the engine that it started."""
        host = self._connect_host()
        scheme = self._settings.engine_scheme
        return f"{scheme}://[{host}]:{self._port}" if ":" in host else f"{scheme}://{host}:{self._port}"


def status_text(code: int) -> str:
    """A process's exit status in words: `status 1`, or the signal that killed it.

    The engine's guard exits with 128 more than the signal, as shells do.
    """
    number = -code if code < 0 else code - 128
    try:
        return f"killed by {signal.Signals(number).name}, status {code}"
    except ValueError:
        return f"status {code}"


def _make_private_folder(folder: Path) -> None:
    """Create the sockets' folder for this user only. Raises EngineError if another user owns it (possible in /tmp)."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.lstat().st_uid
    if owner not in {os.getuid(), 0}:
        raise EngineError("engine_start_failed", f"ipc_dir {folder} belongs to user {owner}; give one of your own")


def _command_port(command: Sequence[str]) -> int | None:
    """The `--port` of an engine command; None without one."""
    port = value_of(command, "--port") or ""
    return int(port) if port.isdigit() else None
