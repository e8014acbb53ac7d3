"""Builds the agent's app from its settings."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random

import httpx
import structlog
from fastapi import FastAPI

from lorafleet.http_server.guard import guard
from lorafleet.http_server.serve import bind, serve
from lorafleet.keys.auth import ApiKeys, check_route_scopes, refuse_open_server, route_of
from lorafleet.keys.own_key import OwnKey
from lorafleet.kv.connectors import ConnectorVerdict
from lorafleet.service.files import make_folder, write_atomically
from lorafleet.service.http import JsonBodyMiddleware, add_routes, install_error_handlers
from lorafleet.service.http.openapi import documented_app
from lorafleet.service.loops import forever
from lorafleet.service.network.transport import DirectTransport
from lorafleet.telemetry import logs
from lorafleet.telemetry.request_log import RequestLog
from workers.agent.agent import WorkerAgent
from workers.agent.event_log import AgentEventLog
from workers.agent.heartbeat import HeartbeatSender
from workers.agent.installed_adapters import InstalledAdapters
from workers.agent.inventory import timestamp
from workers.agent.lora_manager import AgentLoraManager
from workers.agent.supervisor import Supervisor
from workers.api import MOST_UPLOAD_BYTES, UPLOADS_PATH, build_router
from workers.config import TIMERS, AgentTimers, WorkerSettings
from workers.core.addresses import parse_networks
from workers.core.errors import WorkerError
from workers.core.references import OWN_FLEET
from workers.core.retry import RetryPolicy
from workers.engines.command import words_in_effect
from workers.engines.kinds import engine_traits
from workers.engines.kv_connector import connector_from_command
from workers.engines.vllm_tables import vllm_facts
from workers.metrics import WorkerMetrics
from workers.plugin import LoraDownloaderBase
from workers.report_header import ReportHeaderMiddleware
from workers.sources.base import PLUGIN_SCHEME, Limits, Source
from workers.sources.file_system import FileSystemCalls
from workers.sources.fleet import FLEET_SCHEMES, FleetAgents, FleetSource
from workers.sources.guard import GuardedTransport
from workers.sources.hub import HubSource
from workers.sources.local import LocalSource
from workers.sources.objects import ObjectSource
from workers.sources.plugins import (
    DEFAULT_DOWNLOADER,
    PluginSource,
    create_downloader,
    entry_point_sources,
    event_forwarder,
    start_downloader,
)
from workers.sources.web import WebSource
from workers.storage.cache import AdapterCache
from workers.storage.cache_folder import CacheFolder
from workers.storage.local_adapters import LocalAdapters
from workers.storage.uploads import Uploads
from workers.verification.base_model import NO_ENGINE, EngineFacts
from workers.verification.manifest import AdapterRules
from workers.verification.verify import base_model_or_none

log = structlog.get_logger()

# JSON values in a request body: real ones have under a hundred; parsing this many takes 0.05 s.
_MOST_VALUES = 100_000
_ATTACHED_ENGINE_LEASE_S = 7 * 86400.0
_LIST_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class WorkerService:
    """The agent's app, and the agent behind it."""

    app: FastAPI
    agent: WorkerAgent
    requests: RequestLog

    def upload_bytes(self, method: str, path: str) -> int:
        """Most bytes of a body, for the routes that take an adapter's files; else 0."""
        is_upload = method == "PUT" and path.startswith(UPLOADS_PATH)
        return MOST_UPLOAD_BYTES if is_upload else 0

    def stop(self) -> None:
        """Start the agent's stop: report "draining", cancel loads and end the streams, so that the server can stop."""
        self.agent.stop()


def build(
    settings: WorkerSettings,
    *,
    port: int,
    own_command: Sequence[str] = (),
    timers: AgentTimers = TIMERS,
    log_lines: Callable[[int], list[str]] = lambda _most: [],
) -> WorkerService:
    """Build the agent's service; the engine starts with the app.

    Creates the cache folder and the state folder, and locks the state folder. `own_command` is the engine's command, if
    the user gives one. `log_lines`: the last lines of this process's log.

    raises  KeyFileError, OSError, CommandError, SettingsError
    """
    keys, own = ApiKeys(settings.key_files), OwnKey(settings.token, settings.token_file)
    refuse_open_server(keys, settings.host, allow_open=settings.allow_open)
    _require_model(settings)
    connector, facts = _connector_of(settings, own_command), _facts_of(settings, own_command)
    state_lock = lock_state_folder(settings.state)
    rng, metrics, boot_id = Random(), WorkerMetrics(settings.instance_id), uuid.uuid4().hex
    rules, calls = rules_of(settings, facts), FileSystemCalls(timeout_s=settings.source_timeout_s)
    cache_folder, sources = cache_folder_of(settings), sources_of(settings, rng, calls)
    fleet = _fleet_of(settings, port, own, rng)
    sources |= dict.fromkeys((*FLEET_SCHEMES, OWN_FLEET), fleet)
    downloader = _downloader_of(settings, sources["hf"], cache_folder.folder)
    if downloader is not None:
        sources[PLUGIN_SCHEME] = PluginSource(downloader, limits_of(settings, rng))
    cache = AdapterCache(
        cache_folder,
        sources=sources,
        rules=rules,
        fetch_deadline_s=settings.fetch_deadline_s,
        source_prefixes=settings.source_prefixes,
        parallel_fetches=settings.parallel_fetches,
    )
    agent = WorkerAgent(
        settings=settings,
        cache=cache,
        local_adapters=LocalAdapters(settings.lora_path.resolve() if settings.lora_path else None, rules, calls=calls),
        installed=InstalledAdapters(settings.state),
        events=AgentEventLog(
            boot_id=boot_id,
            instance_id=settings.instance_id,
            size=settings.event_buffer,
            now=timestamp,
            on_event=event_forwarder(downloader, cache_folder.path) if downloader else lambda _: None,
        ),
        metrics=metrics,
        boot_id=boot_id,
        agent_url=_agent_url(settings, port),
        connector=connector,
        facts=facts,
        timers=timers,
        fleet=fleet if settings.orchestrator_urls else None,
        uploads=Uploads(cache_folder, limits_of(settings, rng)),
    )
    echo = logs.unlogged_output("lines of the engine's output").write_bytes if settings.engine_output else None
    supervisor = Supervisor(settings, agent, own_command=own_command, echo=echo, rng=rng)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        """Remove leftovers, then run the supervisor, background loops and heartbeats while the app serves.

        At the end: send a last heartbeat, save unwritten state and counts, stop the engine and free the state folder.
        """
        await asyncio.to_thread(cache.folder.remove_leftovers)
        await cache.list_held()
        await cache.update_free_bytes()
        if downloader is not None:
            start_downloader(downloader, AgentLoraManager(agent))
        async with httpx.AsyncClient(transport=DirectTransport(), trust_env=False) as client:
            tasks = [
                asyncio.create_task(supervisor.run()),
                asyncio.create_task(_repeat("scrape", agent.engine.scrape, settings.scrape_s, metrics)),
                asyncio.create_task(_repeat("tidy", agent.sweep, settings.tidy_s, metrics)),
                asyncio.create_task(_repeat("look", agent.reconcile, settings.scan_s, metrics)),
                asyncio.create_task(_repeat("foreign", agent.read_foreign_files, settings.scan_s, metrics)),
            ]
            heartbeats = (
                HeartbeatSender(agent, client, own=own, rng=rng, agents=fleet.agents)
                if settings.orchestrator_url
                else None
            )
            beating = asyncio.create_task(heartbeats.run()) if heartbeats is not None else None
            try:
                yield
            finally:
                if heartbeats is not None and beating is not None:
                    beating.cancel()
                    await asyncio.gather(beating, return_exceptions=True)
                    await heartbeats.send_last()  # before the engine stops
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                agent.installed.retry_writes()
                agent.usage.save()
                await agent.engine.close_ledgers()
                await supervisor.stop()
                os.close(state_lock)  # last: another agent may now use the state folder

    app = documented_app(
        title="lorafleet worker",
        version=version("lorafleet"),
        description="The agent beside one engine: starts and watches it, and holds its adapters.",
        lifespan=lifespan,
    )
    requests = RequestLog("worker", settings.access_log)
    add_routes(app, build_router(agent, keys, own, log_lines=log_lines, metrics_need_key=settings.metrics_need_key))
    install_error_handlers(app, WorkerError)
    _add_middleware(app, agent)
    guard(app, keys, allow_open=settings.allow_open, requests=requests)
    return WorkerService(app, agent, requests)


def _add_middleware(app: FastAPI, agent: WorkerAgent) -> None:
    """Read JSON bodies whole and check them; say in answers to the orchestrator as of which report they are."""
    app.add_middleware(ReportHeaderMiddleware, as_of=agent.as_of)
    app.add_middleware(
        JsonBodyMiddleware,
        may_send=partial(check_route_scopes, app),
        most_values=_MOST_VALUES,
        route_of=partial(route_of, app),
    )


def _connector_of(settings: WorkerSettings, own_command: Sequence[str]) -> ConnectorVerdict | None:
    """The KV connector that the engine's command names; None if it names none. Raises CommandError."""
    if settings.engine_url or settings.engine in {"sglang", "sgl-jax"}:
        return None
    return connector_from_command(words_in_effect(settings, own_command))


def _facts_of(settings: WorkerSettings, own_command: Sequence[str]) -> EngineFacts:
    """Facts about vLLM read from its command, before it runs and reports its version; none for other engines.

    Raises CommandError for a `--config` file that cannot be read.
    """
    is_vllm = engine_traits(settings.engine).dialect == "vllm"
    return vllm_facts(words_in_effect(settings, own_command)) if is_vllm else NO_ENGINE


def _require_model(settings: WorkerSettings) -> None:
    """Raises OSError if `model` is a path that does not exist: the engine would crash on it again and again.

    A name that may be a hub repository (`org/name`) is not checked, nor is the model of an engine at `engine_url`.
    """
    model = settings.model
    if not settings.engine_url and model.startswith(("/", "./", "../", "~")) and not Path(model).exists():
        raise OSError(f"model {model}: there is no such folder; give that of a Hugging Face model")


def lock_state_folder(state: Path) -> int:
    """Create the state folder and lock it for this process; raises OSError if another agent uses it.

    returns  the lock's file descriptor; closing it, or the end of the process, releases the lock

    Two agents with one state folder would overwrite each other's files and share their engines' sockets.
    """
    make_folder(state, "state_dir", is_private=True)
    handle = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(handle)
        message = f"state_dir {state}: another agent uses it; give this one its own instance_id or state_dir"
        raise OSError(message) from exc
    return handle


def cache_folder_of(settings: WorkerSettings) -> CacheFolder:
    """Create and open the cache folder, under this agent's unique name, which a file keeps over restarts.

    Raises OSError.
    """
    file = settings.state / "agent_id"
    if not file.exists():
        write_atomically(file, uuid.uuid4().hex[:12].encode())  # atomic: a truncated name might not be unique
    make_folder(settings.cache_dir, "cache_dir")
    return CacheFolder(
        settings.cache_dir,
        agent_id=f"{settings.instance_id}.{file.read_text()}",
        max_bytes=settings.max_disk_bytes or shutil.disk_usage(settings.cache_dir).total // 2,
        grace_s=settings.cache_grace_s,
        lease_s=settings.cache_lease_s,
        # An attached engine may run, and read its adapters, long after this agent has stopped.
        engine_outlives_s=_ATTACHED_ENGINE_LEASE_S if settings.engine_url else 0.0,
        served_digests=_served_digests,
    )


def _served_digests(engine_url: str) -> frozenset[str]:
    """Ask the engine at a URL for the digests that it lists; empty if it does not answer. Blocking."""
    try:
        models = httpx.get(f"{engine_url}/v1/models", timeout=_LIST_TIMEOUT_S, trust_env=False).json()["data"]
        return frozenset(Path(str(item.get("root"))).name for item in models if item.get("parent"))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError):
        return frozenset()


def _agent_url(settings: WorkerSettings, port: int) -> str:
    """The agent's URL for others."""
    return settings.advertise_url.rstrip("/") or _url(settings.host, port)


def _fleet_of(settings: WorkerSettings, port: int, own: OwnKey, rng: Random) -> FleetSource:
    """The source of files by digest from the fleet's other workers, at another URL than this agent's own."""
    limits, agents = limits_of(settings, rng), FleetAgents(_agent_url(settings, port))
    return FleetSource(limits, orchestrator_urls=settings.orchestrator_urls, own_key=own, agents=agents)


def _downloader_of(settings: WorkerSettings, hub: Source, folder: Path) -> LoraDownloaderBase | None:
    """The downloader plugin: the one that is set, else the hub's where `lora_path` is not set. Raises SettingsError.

    A worker with a `lora_path` does not look on a hub for a name that it lacks: anyone may own that name there.
    """
    plugin = settings.lora_downloader_plugin or (DEFAULT_DOWNLOADER if settings.lora_path is None else "")
    return create_downloader(plugin, hub=hub, folder=folder) if plugin else None


def limits_of(settings: WorkerSettings, rng: Random) -> Limits:
    """The limits of this worker's sources."""
    return Limits(
        max_bytes=settings.max_adapter_bytes,
        timeout_s=settings.source_timeout_s,
        parts=settings.source_parts,
        allow_pickle=settings.allow_pickle,
        retry=RetryPolicy(attempts=settings.source_attempts),
        rng=rng,
    )


def sources_of(settings: WorkerSettings, rng: Random, calls: FileSystemCalls) -> dict[str, Source]:
    """Create the sources by scheme: built in, and from installed packages. Raises SettingsError."""
    limits = limits_of(settings, rng)
    roots = [*settings.lora_roots, *([settings.lora_path] if settings.lora_path else [])]
    allowed = parse_networks(settings.source_networks)
    hub = HubSource(limits, token_file=settings.hf_token_file)
    may_ask_hub = not settings.source_prefixes or any(each.startswith("hf://") for each in settings.source_prefixes)
    sources: dict[str, Source] = {
        "file": LocalSource(
            roots,
            max_bytes=settings.max_adapter_bytes,
            allow_pickle=settings.allow_pickle,
            calls=calls,
            hub=hub if may_ask_hub else None,
        ),
        "https": WebSource(
            limits,
            transport=lambda: GuardedTransport(httpx.create_ssl_context(), allowed=allowed),
            netrc=settings.source_netrc,
        ),
        "hf": hub,
        **{scheme: ObjectSource(scheme, limits) for scheme in ("s3", "gs", "az")},
    }
    return sources | entry_point_sources(limits, frozenset({*sources, PLUGIN_SCHEME}))


def rules_of(settings: WorkerSettings, facts: EngineFacts = NO_ENGINE) -> AdapterRules:
    """The rules that adapters of this worker must keep; reads the base model if its folder is here."""
    folder, names = Path(settings.model), {settings.base_name, settings.model_name, settings.model} - {""}
    has_folder = settings.check_shapes and settings.model and folder.is_dir()
    return AdapterRules(
        max_rank=settings.max_lora_rank,
        base_names=frozenset(names),
        base_check=settings.base_model_check if names else "off",
        base=base_model_or_none(folder, facts) if has_folder else None,
        max_bytes=settings.max_adapter_bytes,
        allow_pickle=settings.allow_pickle,
    )


async def main(
    settings: WorkerSettings,
    own_command: Sequence[str] = (),
    *,
    log_lines: Callable[[int], list[str]] = lambda _most: [],
) -> None:
    """Serve the agent until SIGTERM. Raises KeyFileError, OSError, CommandError, SettingsError if it cannot start."""
    sock = bind(settings.host, settings.port)
    port = sock.getsockname()[1]
    worker = build(settings, port=port, own_command=own_command, log_lines=log_lines)
    log.info("serving", host=settings.host, port=port, instance_id=settings.instance_id)
    await serve(
        worker.app,
        sock,
        port_file=settings.port_file,
        grace_s=settings.stop_grace_s,
        on_stop=worker.stop,
        requests=worker.requests,
        upload_bytes=worker.upload_bytes,
    )


async def _repeat(name: str, step: Callable[[], Awaitable[object]], every_s: float, metrics: WorkerMetrics) -> None:
    """Run a background step every `every_s` seconds until cancelled; its errors are logged and do not end the loop."""

    async def step_once() -> None:
        """Run the step; a WorkerError is logged at debug level."""
        try:
            await step()
        except WorkerError as exc:
            # The engine is down: the supervisor logs that once.
            log.debug("loop step failed", loop=name, error=str(exc))

    await forever(step_once, name=name, every_s=every_s, on_failure=metrics.loop_failures.labels(name).inc)


def _url(host: str, port: int) -> str:
    """The agent's URL at a host and port; for a wildcard address that of the loopback interface."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
