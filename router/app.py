"""Builds the router, in order, and runs it."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import structlog
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute

from lorafleet.engine.settings import agent_key_of
from lorafleet.http_server import serve
from lorafleet.http_server.cross_site import site_check
from lorafleet.http_server.descriptors import DescriptorRoom
from lorafleet.http_server.guard import guard
from lorafleet.http_server.intake import RequestIntake
from lorafleet.http_server.listener import HttpListener
from lorafleet.http_server.outbox import Outbox
from lorafleet.keys.auth import ApiKeys, refuse_open_server
from lorafleet.keys.key_files import KeyFileError
from lorafleet.keys.metrics import TokenCollector
from lorafleet.keys.own_key import OwnKey
from lorafleet.keys.whoami import whoami_routes
from lorafleet.kube.errors import KubeConfigError
from lorafleet.service.files import make_folder
from lorafleet.service.http import add_routes, install_error_handlers
from lorafleet.service.http.openapi import change_document, documented_app
from lorafleet.service.network.tls import Tls, role_name
from lorafleet.service.settings import load_or_exit
from lorafleet.service.tasks import BackgroundTasks
from lorafleet.telemetry import logs
from lorafleet.telemetry.request_log import RequestLog
from router.api.adapter_calls import adapter_call_routes
from router.api.control import control_routes, describe_inference, health_routes, metrics_text, process_handlers
from router.api.engine_calls import engine_call_routes
from router.api.forward import forward_routes, upload_bytes
from router.api.inference import InferenceHandler
from router.api.not_offered import unknown_path
from router.api.openapi import openapi_paths
from router.api.pauses import pause_routes
from router.api.requests import REQUESTS, answer_process, request_routes
from router.config import RouterSettings
from router.core.errors import RouterError
from router.core.failover.poison import PoisonRequests
from router.core.kv.prediction_accuracy import PredictionAccuracy
from router.core.schedule.load import LoadBook
from router.factories import (
    PickerUnavailable,
    WorkerListener,
    client_limits,
    make_background,
    make_circuit_breaker,
    make_cold_starts,
    make_control_client,
    make_fleet_access,
    make_health_probes,
    make_pause_gate,
    make_picker,
    make_quotas,
    make_request_queue,
    make_scheduler,
    make_tokenizers,
)
from router.fleet.discovery import Discovery
from router.fleet.traffic import TrafficLog
from router.http.call_keys import make_call_keys
from router.http.engine_pool import EnginePool
from router.http.error_shapes import error_body, shape_of, shaped
from router.kv.feeds import KvFeeds
from router.lifespan import run_services
from router.processes import supervisor
from router.processes.aggregate import WorkerProcesses
from router.processes.supervisor import ProcessMember
from router.protocols.cors import cors_header_lines, cors_middleware_options
from router.request.services import Services
from router.telemetry.metrics import RouterMetrics
from router.telemetry.tracing import TracingUnavailable, make_tracer

log = structlog.get_logger()


def build(config: RouterSettings, me: ProcessMember | None = None) -> tuple[FastAPI, Services]:
    """Build the router's app and its services: read keys, make `state_dir`, run nothing before the app's lifespan.

    `app.state.http` is the listener that must serve it, `app.state.tls` its certificate, `app.state.processes` its way
    to the other processes, `app.state.picker` its server for gateways.

    me      this process, among several on one port
    raises  KeyFileError, TracingUnavailable, PickerUnavailable, KubeConfigError
    """
    router_id = me.router_id(config.router_id) if me else config.router_id or f"{socket.gethostname()}-{os.getpid()}"
    keys = ApiKeys(config.key_files)
    refuse_open_server(keys, config.host, allow_open=config.allow_open)
    if config.state_dir is not None:
        make_folder(config.state_dir, "state_dir", is_private=True)
    metrics = RouterMetrics(metrics_adapters=config.metrics_adapters)
    metrics.registry.register(TokenCollector(keys))
    own_key = OwnKey(config.token, config.token_file)
    urls = [config.orchestrator_url] if config.orchestrator_url else []
    tls = Tls.of_service(config.tls_files, role_name("router"), orchestrator_urls=urls)
    metrics.observe_tls("router", tls)
    # To the orchestrator and agents; `agents` is for calls that streams and snapshots make.
    agents = EnginePool(connect_s=config.control_timeout_s, tls=tls)
    control = make_control_client(config, own_key, agents)
    call_keys = make_call_keys(
        keys=keys,
        own=own_key,
        agents=agent_key_of(config),
        orchestrator_url=config.orchestrator_url,
        pool=agents,
        timeout_s=config.control_timeout_s,
        clock=time.monotonic,
        is_mutual=tls is not None and tls.is_mutual,
    )
    outbox = Outbox()
    # What the router knows.
    load = LoadBook()
    accuracy = PredictionAccuracy()
    breaker = make_circuit_breaker(config, metrics)
    tokenizers = make_tokenizers(config, control, call_keys, metrics)
    feeds = KvFeeds(metrics, config.kv_tail_poll_s, accuracy, call_keys.key_for, agents)
    learning = BackgroundTasks()
    listener = WorkerListener(
        feeds=feeds,
        load=load,
        accuracy=accuracy,
        breaker=breaker,
        tokenizers=tokenizers,
        metrics=metrics,
        learning=learning,
    )
    confirmation_due = asyncio.Event()
    pauses = make_pause_gate(config, keys, on_settled=confirmation_due.set)
    discovery = Discovery(
        config,
        make_fleet_access(config, control, agents, call_keys, metrics),
        listener,
        router_id=router_id,
        adopt_pauses=pauses.adopt,
        confirmation_due=confirmation_due,
        clock=time.monotonic,
        on_failure=lambda loop: metrics.loop_failures.labels(loop).inc(),
    )
    # What the router decides.
    scheduler = make_scheduler(config, discovery, feeds, load, breaker, metrics)
    probes = make_health_probes(config, scheduler, agents, metrics)
    breaker.probe = probes.probe
    # What serves the requests.
    services = Services(
        config=config,
        keys=keys,
        discovery=discovery,
        tokenizers=tokenizers,
        feeds=feeds,
        scheduler=scheduler,
        queue=make_request_queue(config, keys, scheduler, metrics),
        accuracy=accuracy,
        cold_starts=make_cold_starts(config, keys, agents, call_keys, discovery, metrics),
        usage=TrafficLog(router_id),
        metrics=metrics,
        pool=EnginePool(connect_s=config.connect_timeout_s, max_spare=config.spare_connections, tls=tls, outbox=outbox),
        background=make_background(config, keys, discovery, agents),
        poison_requests=PoisonRequests("this request was", enough=2, hold_s=config.deadly_hold_s),
        poison_adapters=PoisonRequests("requests for this adapter were", enough=3, hold_s=config.deadly_hold_s),
        pauses=pauses,
        quotas=make_quotas(config, me, router_id),
        requests=RequestLog("router", config.access_log, most_kept=config.kept_requests),
        tracer=make_tracer(
            config.otlp_endpoint,
            ratio=config.trace_ratio,
            instance=router_id,
            on_outcome=lambda outcome, count: metrics.traces.labels(outcome).inc(count),
        ),
    )
    # What listens.
    handler = InferenceHandler(services)
    limits, origins = client_limits(config, keys), cors_header_lines(config.allowed_origins)
    intake = RequestIntake(
        handler.find_handler,
        limits,
        handler.caller_of,
        origins,
        outbox,
        error_body,
        requests=services.requests,
        meter=handler,
        upload_bytes=upload_bytes,
    )
    # A request takes its client's connection and one to an engine.
    http = HttpListener(intake, DescriptorRoom(each=2, peers=lambda: services.pool.connections))
    picker = make_picker(config, services, intake, is_shared=me is not None)
    own_metrics = partial(metrics_text, services, http)
    processes = None
    if me is not None:
        processes = WorkerProcesses(
            Path(me.folder),
            me.slot,
            metrics=own_metrics,
            adapters=metrics.adapters,
            answers={**process_handlers(services), REQUESTS: partial(answer_process, services)},
        )
    app = documented_app(
        title="lorafleet router",
        version=version("lorafleet"),
        description="Sends each request to the worker where its adapter and its prompt are hot.",
        lifespan=lambda _app: run_services(
            services, control, agents, probes, learning, clients=http, processes=processes, picker=picker
        ),
    )
    add_routes(
        app,
        control_routes(services, processes),
        request_routes(services, control, processes),
        pause_routes(services, control),
        engine_call_routes(services),
        adapter_call_routes(services, control),
        forward_routes(keys, config.orchestrator_url.rstrip("/"), connect_timeout_s=config.control_timeout_s, tls=tls),
        whoami_routes(services.keys),
        health_routes(services, own_metrics, processes),
    )
    change_document(app, describe_inference)
    known = set(openapi_paths()) | {route.path for route in app.routes if isinstance(route, APIRoute)}
    install_error_handlers(
        app,
        RouterError,
        unknown_path=partial(unknown_path, known=known),
        shape=lambda path, status, body: shaped(body, status, shape_of(path)),
    )
    may_ask = site_check(config.allowed_origins, trusts_preflight=True)
    guard(app, keys, allow_open=config.allow_open, may_ask=may_ask, requests=services.requests, has_runs=True)
    if config.allowed_origins:
        app.add_middleware(CORSMiddleware, **cors_middleware_options(config.allowed_origins))
    app.state.http, app.state.picker, app.state.processes, app.state.tls = http, picker, processes, tls
    return app, services


def _cannot_start(exc: Exception) -> SystemExit:
    """Print why the router cannot start; the exit to raise, with status 2."""
    print(f"python -m router: {exc}", file=sys.stderr)  # noqa: T201  (the last word of a process that could not start)
    return SystemExit(2)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the router until SIGTERM: then be not ready, finish what is in flight, and return.

    With `processes` above 1, run and supervise that many routers on one port instead.

    Exits with status 2 when it cannot start, 1 when it was a background task's end that stopped us.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    config = load_or_exit(RouterSettings, args, prog="python -m router")
    logs.configure("router", log_format=config.log_format, level=config.log_level)
    me = supervisor.read_membership()
    try:
        if me is None and config.processes > 1:
            sys.exit(
                supervisor.run(
                    supervisor.command_of(args),
                    config.processes,
                    host=config.host,
                    port=config.port,
                    scheme=config.scheme,
                    port_file=config.port_file,
                    drain_s=config.drain_s,
                    stop_s=config.drain_s + config.grace_s,
                )
            )
        app, services = build(config, me)
        sock = me.bind() if me else serve.bind(config.host, config.port)
        if config.ext_proc is not None and me is None:
            serve.bind_only(config.host, config.ext_proc).close()  # a port that is taken is said before the start
    except (KeyFileError, TracingUnavailable, PickerUnavailable, KubeConfigError, OSError) as exc:
        raise _cannot_start(exc) from exc

    def stopping() -> None:
        """Be not ready any more, and have every response close its connection."""
        services.stopping = True
        app.state.http.intake.is_draining = True
        if app.state.picker is not None:
            app.state.picker.end_within(config.drain_s + config.grace_s)

    async def synced(within_s: float) -> None:
        """Wait until discovery and catalog are synced, at most for `within_s`."""
        await services.discovery.changes.until(services.discovery.is_synced, timeout_s=within_s)

    if me is None:
        log.info("serving", host=config.host, port=sock.getsockname()[1], orchestrator=config.orchestrator_url)
    try:
        serve.run(
            lambda: serve.serve(
                supervisor.JoiningApp(app, me, sock, wait_until_synced=synced) if me else app,
                sock,
                http=app.state.http,
                tls=app.state.tls,
                port_file=None if me else config.port_file,
                drain_s=config.drain_s,
                grace_s=config.grace_s,
                on_stop=stopping,
            )
        )
    except serve.PortFileError as exc:
        raise _cannot_start(exc) from exc
    if services.has_failed:
        sys.exit(1)
