"""The programs of simulated processes: our services as their own `build` makes them, and the sim engine."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from lorafleet.engine.vllm_plugin.lora_reports import REPORTS_VARIABLE
from lorafleet.http_server.listener import listener_for_app
from lorafleet.http_server.serve import DEFAULT_LIMITS, uvicorn_config
from lorafleet.kube.client import connect
from lorafleet.service.settings import load
from lorafleet.sim.__main__ import handlers_of
from lorafleet.sim.app import make_app
from lorafleet.sim.engine import SimEngine
from lorafleet.sim.metrics import SimMetrics
from lorafleet.sim.settings import parse_settings
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from router.app import build as build_router
from router.config import RouterSettings
from tests.simulation.api_server import SimulatedApiServer
from tests.simulation.nodes import Main, Node
from tests.simulation.zmq_sockets import EventBus, SimulatedPublisher
from workers.app import build as build_agent
from workers.config import WorkerSettings

ENGINE_PORT, AGENT_PORT, ORCHESTRATOR_PORT, ROUTER_PORT = 8100, 8090, 8080, 8000
_STOP_S = 10.0
_LATE_S = 5.0
"""What an engine that is late adds to each answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Folders of a run: the model, the adapters that workers may read, the files of each process, and the keys."""

    model: Path
    shelf: Path
    state: Path
    key_file: Path | None
    """None: a fleet without keys."""
    keys: Mapping[str, str]
    """By scope, and by tenant."""

    @property
    def key_files(self) -> tuple[Path, ...]:
        return () if self.key_file is None else (self.key_file,)

    def of(self, host: str) -> Path:
        """The folder of a machine's files, which outlive its processes."""
        folder = self.state / host
        folder.mkdir(exist_ok=True)
        return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """A sim engine's size and speed."""

    max_loras: int = 2
    max_cpu_loras: int = 3
    blocks: int = 2000
    load_s: float = 0.3
    decode_tokens_per_s: float = 200.0
    more: tuple[str, ...] = ()
    """Further flags, which win."""

    def words(self) -> Sequence[str]:
        return (
            "--max-loras", str(self.max_loras), "--max-cpu-loras", str(self.max_cpu_loras),
            "--num-gpu-blocks-override", str(self.blocks), "--sim-load-s", str(self.load_s),
            "--sim-decode-tokens-per-s", str(self.decode_tokens_per_s),
            "--max-lora-rank", "16", "--max-model-len", "2048", *self.more,
        )  # fmt: skip


class EngineTrouble:
    """What an engine does with calls instead of answering them: it `hangs`, `refuses`, or `is late`.

    path  begins the paths of the calls that are meant
    """

    def __init__(self, how: str, path: str) -> None:
        self._how, self._path = how, path
        self._has_ended = asyncio.Event()

    def end(self) -> None:
        self._has_ended.set()

    async def strike(self, path: str) -> bool:
        """Wait as long as a call to this path has to; whether it is refused then."""
        if self._has_ended.is_set() or not path.startswith(self._path):
            return False
        if self._how != "refuses":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LATE_S if self._how == "is late" else None):
                    await self._has_ended.wait()
        return self._how == "refuses"


@dataclass(slots=True)
class RunningServices:
    """The running services by name, for checks that look inside."""

    orchestrators: dict[str, Any] = field(default_factory=dict)
    routers: dict[str, Any] = field(default_factory=dict)
    agents: dict[str, Any] = field(default_factory=dict)
    engines: dict[str, SimEngine] = field(default_factory=dict)
    troubles: dict[str, EngineTrouble] = field(default_factory=dict)
    """Engines that have some."""


@contextlib.asynccontextmanager
async def serving(app: Any, node: Node, port: int, http: Any = None) -> AsyncIterator[None]:
    """Serve an app at the node's address during the block; then end its connections, and the app."""
    config = uvicorn.Config(app, http="httptools", ws="none", log_config=None, access_log=False)
    if http is not None:
        config = uvicorn_config(app, grace_s=_STOP_S, http=http)
    config.load()
    lifespan = config.lifespan_class(config)
    await lifespan.startup()
    if lifespan.should_exit:
        raise RuntimeError(f"{node.name} did not start; see its log")
    state = ServerState()

    def protocol() -> Any:
        return config.http_protocol_class(  # type: ignore[operator]
            config=config, server_state=state, app_state=lifespan.state, _loop=asyncio.get_running_loop()
        )

    server = await asyncio.get_running_loop().create_server(protocol, node.host, port)
    try:
        yield
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                while state.connections or state.tasks:
                    await asyncio.sleep(0.05)
        for task in state.tasks:
            task.cancel()
        await lifespan.shutdown()


def orchestrator(
    paths: Paths,
    services: RunningServices,
    *,
    port: int = ORCHESTRATOR_PORT,
    api_server: SimulatedApiServer | None = None,
    **settings: Any,
) -> Main:
    """An orchestrator on the store of its machine, or with its state and its lease at an API server."""
    at_api_server = {} if api_server is None else {"backend": "configmaps", "lease": "kubernetes"}

    async def main(node: Node) -> None:
        url = f"http://{node.host}:{port}"
        given = OrchestratorSettings(
            store=paths.of(node.host) / "store.db",
            host=node.host,
            port=port,
            key_files=paths.key_files,
            allow_open=not paths.key_files,
            token=paths.keys["load"],
            agent_token=paths.keys["agent"],
            **at_api_server,
            **settings,
        )
        kube = None if api_server is None else await api_server.client()
        if kube is None and given.needs_kube:
            kube = await connect(given.kubeconfig)
        built = build_orchestrator(given, url=url, kube=kube)
        services.orchestrators[node.name] = built
        listener = listener_for_app(DEFAULT_LIMITS, upload_bytes=built.upload_bytes)
        async with serving(built.app, node, port, listener):
            await node.stop.wait()
            built.stop()

    return main


def router(paths: Paths, services: RunningServices, *, orchestrator_url: str, **settings: Any) -> Main:
    """A router of the fleet."""

    async def main(node: Node) -> None:
        app, built = build_router(
            RouterSettings(
                host=node.host,
                port=ROUTER_PORT,
                router_id=node.name,
                orchestrator_url=orchestrator_url,
                token=paths.keys["load"],
                agent_token=paths.keys["agent-load"],
                key_files=paths.key_files,
                allow_open=not paths.key_files,
                state_dir=paths.of(node.host),
                **settings,
            )
        )
        services.routers[node.name] = built
        async with serving(app, node, ROUTER_PORT, app.state.http):
            await node.stop.wait()
            built.stopping = True
            app.state.http.intake.is_draining = True

    return main


def agent(paths: Paths, services: RunningServices, *, orchestrator_url: str, **settings: Any) -> Main:
    """An agent that is attached to the engine of its machine."""

    async def main(node: Node) -> None:
        folder = paths.of(node.host)
        url = f"http://{node.host}:{AGENT_PORT}"
        engine_url = f"http://{node.host}:{ENGINE_PORT}"
        words = (
            "--engine", "sim", "--model", str(paths.model), "--served-model-name", "tiny-qwen",
            "--lora-path", str(paths.shelf), "--state-dir", str(folder / "state"), "--cache-dir", str(folder / "cache"),
            "--host", node.host, "--port", str(AGENT_PORT), "--advertise-url", url, "--engine-url", engine_url,
            "--engine-advertise-url", engine_url, "--instance-id", node.name, "--orchestrator-url", orchestrator_url,
            "--no-engine-output", *(() if paths.key_files else ("--allow-open",)), *(
                word for file in paths.key_files for word in ("--key-files", str(file), "--token", paths.keys["worker"])
            ),
            *(word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))),
        )  # fmt: skip
        built = build_agent(load(WorkerSettings, words, prog="agent"), port=AGENT_PORT)
        services.agents[node.name] = built
        listener = listener_for_app(DEFAULT_LIMITS, upload_bytes=built.upload_bytes)
        async with serving(built.app, node, AGENT_PORT, listener):
            await node.stop.wait()
            built.stop()

    return main


def engine(
    paths: Paths, services: RunningServices, bus: EventBus, flags: EngineFlags, *, has_reports: bool = False
) -> Main:
    """A sim engine, with its KV events on the simulated bus.

    has_reports  whether it reports its loads to the agent of its machine, and takes offers from it
    """

    async def main(node: Node) -> None:
        events = {"enable_kv_cache_events": True, "publisher": "zmq"}
        events |= {kind: f"ipc://@{node.name}-{kind}" for kind in ("endpoint", "replay_endpoint")}
        reports = str(paths.of(node.host) / "state" / "lora-reports") if has_reports else ""
        settings = parse_settings(
            (
                "--model", str(paths.model), "--served-model-name", "tiny-qwen", "--enable-lora",
                "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events), *flags.words(),
            ),
            {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", REPORTS_VARIABLE: reports},
        )  # fmt: skip
        publisher: Any = SimulatedPublisher(settings.kv_events, bus)
        built = SimEngine(settings, publisher, SimMetrics(settings, started_at=time.time()), on_death=node.end_itself)
        services.engines[node.name] = built
        app = _with_troubles(make_app(handlers_of(settings, built), built.run), node.name, services)
        async with serving(app, node, ENGINE_PORT):
            await node.stop.wait()

    return main


def _with_troubles(app: Any, name: str, services: RunningServices) -> Any:
    """The engine's app, whose calls meet the trouble that the engine has at their time."""

    async def called(scope: Any, receive: Any, send: Any) -> None:
        trouble = services.troubles.get(name) if scope["type"] == "http" else None
        if trouble is not None and await trouble.strike(scope["path"]):
            body = b'{"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}}'
            await send(
                {"type": "http.response.start", "status": 500, "headers": [(b"content-type", b"application/json")]}
            )
            await send({"type": "http.response.body", "body": body})
        else:
            await app(scope, receive, send)

    return called
