"""A real agent with a real engine process on loopback: in its own process, or inside the test's."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import httpx
from starlette.types import ASGIApp

from lorafleet.engine.vllm_plugin.lora_reports import REPORTS_VARIABLE
from lorafleet.http_server.listener import listener_for_app
from lorafleet.http_server.serve import DEFAULT_LIMITS, bind
from lorafleet.service.settings import load
from lorafleet.sim.__main__ import handlers_of
from lorafleet.sim.app import make_app
from lorafleet.sim.engine import SimEngine
from lorafleet.sim.events import KVEventPublisher
from lorafleet.sim.metrics import SimMetrics
from lorafleet.sim.settings import parse_settings
from tests.patience import patience, until, within
from tests.serving import serving
from workers.app import build
from workers.config import TIMERS, AgentTimers, WorkerSettings
from workers.engines.command import settings_from_command
from workers.wire import Metadata

_SLOTS = ("--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16", "--max-model-len", "2048")
_RUNTIME_LOADS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
SIM = ("--engine", "sim", *_SLOTS)


class RunningWorker:
    """An agent's folders and flags; agents can be started on them one after the other."""

    def __init__(self, model: Path, adapters: Path, folder: Path, *flags: str) -> None:
        self.folder, self.model = folder, model
        self.state_dir, self.cache_dir = folder / "state", folder / "cache"
        self.flags = (
            "--model", str(model), "--served-model-name", "tiny-qwen", "--lora-path", str(adapters),
            "--state-dir", str(self.state_dir), "--cache-dir", str(self.cache_dir), "--port", "0", "--engine-port", "0",
            "--scan-s", "0.2", "--scrape-s", "0.1",
            "--probe-modules", "off",  # a probe counts as a load where a test counts loads
            *flags,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def inside(
        self,
        *more: str,
        until_ready: bool = True,
        timers: AgentTimers = TIMERS,
        through: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    ) -> AsyncIterator[httpx.AsyncClient]:
        """A client of an agent in the test's process, for tests that neither signal the agent nor read its log.

        It starts in a third of an agent process's time. Its loop is asyncio's, not uvloop.

        through  wraps the app that is served
        """
        words = (*self.flags, "--no-engine-output", *more)
        cut = words.index("--") if "--" in words else len(words)
        settings, own_command = load(WorkerSettings, words[:cut], prog="agent"), words[cut + 1 :]
        sock = bind("127.0.0.1", 0)
        try:
            agreed = settings_from_command(settings, own_command, os.environ)
            worker = build(agreed, port=sock.getsockname()[1], own_command=own_command, timers=timers)
        except BaseException:
            sock.close()
            raise
        async with (
            serving(
                through(worker.app), http=listener_for_app(DEFAULT_LIMITS, upload_bytes=worker.upload_bytes), sock=sock
            ) as url,
            httpx.AsyncClient(base_url=url, timeout=patience(30)) as client,
        ):
            try:
                if until_ready:
                    await self.ready(client)
                yield client
            finally:
                worker.stop()

    @contextlib.asynccontextmanager
    async def together(
        self,
        *more: str,
        engine: Sequence[str] = (),
        until_ready: bool = True,
        timers: AgentTimers = TIMERS,
        has_reports: bool = False,
    ) -> AsyncIterator[httpx.AsyncClient]:
        """A client of an agent attached to a sim, both in the test's process: the fastest variant.

        For tests that neither signal nor restart agent or engine.

        engine       further flags of the sim
        has_reports  it reports to the agent, and takes its offers
        """
        reports = {REPORTS_VARIABLE: str(self.state_dir / "lora-reports")} if has_reports else {}
        async with (
            sim_inside(self.model, *_SLOTS, *engine, environment={_RUNTIME_LOADS: "1", **reports}) as url,
            self.inside("--engine-url", url, *more, until_ready=until_ready, timers=timers) as client,
        ):
            yield client

    @contextlib.asynccontextmanager
    async def running(
        self, *more: str, until_ready: bool = True, stderr: int | None = None
    ) -> AsyncIterator[httpx.AsyncClient]:
        """A client of an agent process, which is stopped afterwards unless the test has stopped it.

        stderr  a file descriptor instead of `agent.log`
        """
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        log = self.folder / "agent.log"
        with log.open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "workers", *self.flags, "--port-file", str(port_file), *more,
                stdout=out, stderr=out if stderr is None else stderr,
                env={**os.environ, "TMPDIR": tempfile.gettempdir()},
            )  # fmt: skip
        try:
            await until(lambda: port_file.exists() or self._ended(log))
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port_file.read_text()}", timeout=patience(30)
            ) as client:
                if until_ready:
                    await self.ready(client)
                yield client
        finally:
            if self.process.returncode is None:
                self.process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(self.process.wait(), patience(30))

    async def ready(self, client: httpx.AsyncClient, *, within_s: float = 30) -> None:
        async def is_ready() -> bool:
            return (await client.get("/ready")).is_success

        await until(is_ready, within_s=within_s, what="the agent is ready")

    async def ready_again(self, client: httpx.AsyncClient, before: Metadata) -> None:
        """Wait until an engine that came after the one in `before` is ready.

        For some milliseconds after its engine's end an agent is ready still.
        """

        async def is_another_ready() -> bool:
            boot_id = (await metadata_of(client)).engine_boot_id
            return boot_id not in {before.engine_boot_id, ""} and (await client.get("/ready")).is_success

        await until(is_another_ready, within_s=30, what="the agent is ready with its next engine")

    @property
    def engine_pid(self) -> int:
        return int((self.state_dir / "engine.pid").read_text())

    def _ended(self, log: Path) -> bool:
        if self.process.returncode is not None:
            raise AssertionError(f"the agent ended with {self.process.returncode}:\n{log.read_text()[-3000:]}")
        return False


@contextlib.asynccontextmanager
async def sim_inside(
    model: Path,
    *flags: str,
    environment: Mapping[str, str] = MappingProxyType({_RUNTIME_LOADS: "1"}),
    modules: Mapping[str, Path] = MappingProxyType({}),
) -> AsyncIterator[str]:
    """The URL of a sim in the test's process. `modules`: name -> folder of adapters that it has at its start."""
    words = ("--model", str(model), "--served-model-name", "tiny-qwen", "--enable-lora", *flags)
    # Abstract (`@`): no file is left, and pytest's folders are too long for a socket's path.
    endpoints = {name: f"ipc://@{uuid.uuid4().hex}" for name in ("endpoint", "replay_endpoint")}
    events = {"enable_kv_cache_events": True, "publisher": "zmq", **endpoints}
    settings = parse_settings(
        (*words, "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)),
        environment,
    )
    publisher = KVEventPublisher(settings.kv_events)
    engine = SimEngine(settings, publisher, SimMetrics(settings), on_death=lambda: None)
    try:
        async with serving(make_app(handlers_of(settings, engine), engine.run)) as url:
            for name, path in modules.items():
                await engine.load(name, str(path))
            yield url
    finally:
        await asyncio.to_thread(publisher.close)


def state_of(pid: int) -> str:
    """The process's state as in ps: R, S, T (stopped), Z, ... Raises OSError without such a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_running(pid: int) -> bool:
    try:
        return state_of(pid) != "Z"
    except OSError:
        return False


def group_of(pid: int) -> set[int]:
    """The running processes of this process's group."""
    group = os.getpgid(pid)
    return {int(path.name) for path in Path("/proc").glob("[0-9]*") if _group(path) == group}


def _group(path: Path) -> int | None:
    try:
        fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[2])


async def post(client: httpx.AsyncClient, call: str, *, epoch: int | None = None, **body) -> httpx.Response:
    headers = {} if epoch is None else {"x-lorafleet-epoch": str(epoch)}
    return await client.post(f"/v1/admin/{call}", json=body, headers=headers)


def code(answer: httpx.Response) -> str:
    return answer.json()["error"]["code"]


async def metadata_of(client: httpx.AsyncClient) -> Metadata:
    """The worker's metadata."""
    return Metadata.model_validate((await client.get("/metadata")).json())


async def until_state(client: httpx.AsyncClient, state: str, *, within_s: float = 20) -> Metadata:
    """Wait until the worker has this state; returns its metadata."""
    async with within(within_s):
        while (metadata := await metadata_of(client)).state != state:
            await asyncio.sleep(0.02)
    return metadata


async def loaded(client: httpx.AsyncClient) -> set[str]:
    items = (await client.get("/v1/admin/loras")).json()["loaded_loras"]
    return {item["lora_id"] for item in items if item["state"] == "ready"}


async def sse(lines: AsyncIterator[str]) -> tuple[str, dict]:
    """Id and data of the next event."""
    event_id = ""
    async for line in lines:
        if line.startswith("id: "):
            event_id = line[4:]
        if line.startswith("data: "):
            return event_id, json.loads(line[6:])
    raise AssertionError("the stream ended")
