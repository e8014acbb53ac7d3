"""Builds the agent's app from its settings."""

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random

import structlog
from fastapi import FastAPI

from lorafleet.http_server.guard import guard
from lorafleet.http_server.serve import bind, serve
from lorafleet.keys.auth import ApiKeys, check_route_scopes, refuse_open_server, route_of
from lorafleet.keys.metrics import TokenCollector
from lorafleet.keys.own_key import OwnKey
from lorafleet.service.http import JsonBodyMiddleware, add_routes, install_error_handlers
from lorafleet.service.http.openapi import documented_app
from lorafleet.service.network.tls import Tls, role_name, worker_name
from lorafleet.telemetry import logs
from lorafleet.telemetry.request_log import RequestLog
from workers.agent.agent import WorkerAgent
from workers.agent.supervisor import Supervisor
from workers.api import MOST_UPLOAD_BYTES, UPLOADS_PATH, build_router
from workers.config import TIMERS, AgentTimers, WorkerSettings
from workers.core.errors import WorkerError
from workers.factories import agent_context, lock_folders
from workers.lifespan import running
from workers.report_header import ReportHeaderMiddleware

log = structlog.get_logger()

# JSON values in a request body: real ones have under a hundred; parsing this many takes 0.05 s.
_MOST_VALUES = 100_000


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
    tls: Tls | None = None,
    log_lines: Callable[[int], list[str]] = lambda _most: [],
) -> WorkerService:
    """Build the agent's service; the engine starts with the app.

    Creates the cache folder, the state folder and `record_dir`, and locks the last two. `own_command` is the engine's
    command, if the user gives one. `log_lines`: the last lines of this process's log. `tls`: for calls to others.

    raises  KeyFileError, OSError, CommandError, SettingsError
    """
    keys = ApiKeys(settings.key_files, needs_certificates=tls is not None and tls.is_mutual)
    own = OwnKey(settings.token, settings.token_file)
    refuse_open_server(keys, settings.host, allow_open=settings.allow_open)
    _require_model(settings)
    locks, rng = lock_folders(settings), Random()
    context = agent_context(settings, port=port, own_command=own_command, own=own, rng=rng, timers=timers, tls=tls)
    context.metrics.registry.register(TokenCollector(keys))
    context.metrics.observe_tls("workers", tls)
    agent = WorkerAgent(context)
    echo = logs.unlogged_output("lines of the engine's output").write_bytes if settings.engine_output else None
    supervisor = Supervisor(agent, own_command=own_command, echo=echo, rng=rng)
    app = documented_app(
        title="lorafleet worker",
        version=version("lorafleet"),
        description="The agent beside one engine: starts and watches it, and holds its adapters.",
        lifespan=lambda _app: running(agent, supervisor, own=own, rng=rng, locks=locks),
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


def _require_model(settings: WorkerSettings) -> None:
    """Raises OSError if `model` is a path that does not exist: the engine would crash on it again and again.

    A name that may be a hub repository (`org/name`) is not checked, nor is the model of an engine at `engine_url`.
    """
    model = settings.model
    if not settings.engine_url and model.startswith(("/", "./", "../", "~")) and not Path(model).exists():
        raise OSError(f"model {model}: there is no such folder; give that of a Hugging Face model")


async def main(
    settings: WorkerSettings,
    own_command: Sequence[str] = (),
    *,
    log_lines: Callable[[int], list[str]] = lambda _most: [],
) -> None:
    """Serve the agent until SIGTERM. Raises KeyFileError, OSError, CommandError, SettingsError if it cannot start."""
    names = role_name("worker"), worker_name(settings.instance_id)
    urls = settings.orchestrator_urls
    tls = Tls.of_service(settings.tls_files, *names, clients=ssl.CERT_OPTIONAL, orchestrator_urls=urls)
    sock = bind(settings.host, settings.port)
    port = sock.getsockname()[1]
    worker = build(settings, port=port, own_command=own_command, tls=tls, log_lines=log_lines)
    log.info("serving", host=settings.host, port=port, instance_id=settings.instance_id)
    await serve(
        worker.app,
        sock,
        port_file=settings.port_file,
        grace_s=settings.stop_grace_s,
        on_stop=worker.stop,
        requests=worker.requests,
        upload_bytes=worker.upload_bytes,
        tls=tls,
    )
