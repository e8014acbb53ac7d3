"""Builds the router and joins its services."""

import asyncio
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import httpx
import structlog
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from lorafleet.engine.agentless import engines_by_id, has_start_time
from lorafleet.http_server import serve
from lorafleet.http_server.cross_site import site_check
from lorafleet.http_server.guard import guard
from lorafleet.http_server.limits import ClientLimits
from lorafleet.http_server.listener import HttpListener
from lorafleet.http_server.outbox import Outbox
from lorafleet.kube.access import ACCOUNT, find_access_source
from lorafleet.kube.client import open_client
from lorafleet.kube.discovery import SliceWatch
from lorafleet.kube.errors import KubeConfigError, KubeError
from lorafleet.service import logs
from lorafleet.service.auth import ApiKeys, KeyFileError, refuse_open_server
from lorafleet.service.files import make_folder
from lorafleet.service.http import add_routes, install_error_handlers
from lorafleet.service.loops import forever
from lorafleet.service.own_key import OwnKey
from lorafleet.service.settings import load_or_exit
from lorafleet.service.transport import DirectTransport
from router.api.control import answers, control_routes, describe_inference, exposed, health_routes
from router.config import RouterSettings
from router.core.errors import RouterError
from router.core.failover.circuit_breaker import BreakerRules, CircuitBreaker, CircuitState
from router.core.failover.poison import PoisonRequests
from router.core.failover.retry_budget import RetryBudget
from router.core.fleet import Incarnation, Replica
from router.core.kv.index import WorkerId
from router.core.kv.prediction_accuracy import PredictionAccuracy
from router.core.queue.quota import Quotas
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.load import LoadBook
from router.core.schedule.policies import POLICIES
from router.core.scheduler import Scheduler, ShadowComparison
from router.fleet.discovery import Discovery
from router.fleet.health_probe import Finding, HealthProbes
from router.fleet.usage_report import UsageCounts, send_usage
from router.http.engine_pool import EnginePool
from router.http.error_shapes import error_body
from router.http.fetch import fetch, stream
from router.kv.feeds import KvFeeds
from router.processes import supervisor
from router.processes.aggregate import WorkerProcesses
from router.processes.shared_quotas import SharedQuotas
from router.processes.supervisor import ProcessMember
from router.protocols.cors import cors_header_lines, cors_middleware_options
from router.request.background import Background
from router.request.cold_starts import ColdStarts
from router.request.engine_attempt import EngineAttempt
from router.request.handler import InferenceHandler
from router.request.queue import RequestQueue
from router.request.services import Services
from router.request.stages import match
from router.telemetry.metrics import RouterMetrics
from router.telemetry.tracing import TracingUnavailable, make_tracer
from router.tokenizing.tokenizers import Tokenizers
from workers.wire import Metadata

log = structlog.get_logger()

USAGE_EVERY_S = 1.0
_WATCH_EVERY_S = 1.0
# Agents and orchestrators send a sign of life more often.
_LISTEN_IDLE_S = 60.0
# Within this a thread that tokenizes gives Python's lock to the event loop; the default is 5 ms.
_SWITCH_EVERY_S = 0.001
# Objects made and not freed since the last look for cycles: of requests in flight and kept decisions, mostly.
_COLLECT_EVERY = 50_000
# What workers that went have left in an index is cleaned up in steps of a millisecond or two.
_SWEEP_EVERY_S = 0.1
_SWEEP_BLOCKS = 5_000


@dataclass(slots=True, kw_only=True)
class _WorkerListener:
    """Hears of every worker and tells the services that care."""

    feeds: KvFeeds
    load: LoadBook
    trust: PredictionAccuracy
    breaker: CircuitBreaker
    usage: UsageCounts
    tokenizers: Tokenizers
    metrics: RouterMetrics
    learning: set[asyncio.Task[None]] = field(default_factory=set)

    def on_report(self, replica: Replica, metadata: Metadata) -> None:
        self.load.apply_report(replica)
        self.metrics.prefill_rate.labels(replica.id).set(replica.report.prefill_tokens_per_s)
        self.metrics.decode_rate.labels(replica.id).set(replica.report.decode_tokens_per_s)
        self.feeds.update_worker(replica.id, replica.base_model, replica.block_size, metadata)
        if replica.state == "ready" and not self.tokenizers.has_probed(replica.base_model, _as_told(replica)):
            task = asyncio.create_task(self._learn(replica))
            self.learning.add(task)
            task.add_done_callback(self.learning.discard)

    def on_agent_silent(self, worker: WorkerId) -> None:
        self.load.forget_report(worker)

    def on_gone(self, worker: WorkerId) -> None:
        self.feeds.forget(worker)
        self.load.forget(worker)
        self.trust.forget(worker)
        self.breaker.forget(worker)
        self.usage.forget(worker)
        self.tokenizers.forget(worker)
        self.metrics.forget_worker(worker)

    async def _learn(self, replica: Replica) -> None:
        try:
            await self.tokenizers.learn(
                replica.base_model,
                agent_url=replica.agent_url,
                engine_url=replica.engine_url,
                incarnation=_as_told(replica),
            )
        except (httpx.HTTPError, ValueError) as exc:
            # Heard again in a second, and tried again then.
            log.warning("tokenizer not fetched yet", base_model=replica.base_model, error=repr(exc))


def _as_told(replica: Replica) -> Incarnation | None:
    """Its incarnation; None where another start of its engine would look the same."""
    return replica.incarnation if has_start_time(replica.engine_boot_id) else None


def build(config: RouterSettings, me: ProcessMember | None = None) -> tuple[FastAPI, Services]:
    """The router's app and its services; `app.state.http` makes the protocols that it must be served with, and
    `app.state.processes` is its way to the other processes.

    me      this process among several on one port
    raises  KeyFileError, TracingUnavailable, KubeConfigError; nothing runs before the app's lifespan begins
    """
    keys = ApiKeys(config.key_files)
    refuse_open_server(keys, config.host, allow_open=config.allow_open)
    metrics = RouterMetrics()
    load = LoadBook()
    trust = PredictionAccuracy()
    breaker = CircuitBreaker(
        _breaker_rules(config), lambda replica, state, why: _count_circuit(metrics, replica, state, why)
    )
    router_id = me.router_id(config.router_id) if me else config.router_id or f"{socket.gethostname()}-{os.getpid()}"
    own = OwnKey(config.token, config.token_file)
    control = httpx.AsyncClient(
        timeout=config.control_timeout_s,
        auth=own,
        transport=DirectTransport(limits=httpx.Limits(max_connections=None, max_keepalive_connections=256)),
        trust_env=False,
    )
    tokenizers = Tokenizers(
        control,
        mode=config.tokenizer,
        paths=config.tokenizer_paths,
        remote_timeout_s=config.tokenize_timeout_s,
        metrics=metrics,
    )
    agents = EnginePool(connect_s=config.control_timeout_s)
    feeds = KvFeeds(metrics, config.kv_tail_poll_s, trust, own, agents)
    usage = UsageCounts(router_id, load)
    outbox = Outbox()
    if config.state_dir is not None:
        make_folder(config.state_dir, "state_dir")
    joined = _WorkerListener(
        feeds=feeds,
        load=load,
        trust=trust,
        breaker=breaker,
        usage=usage,
        tokenizers=tokenizers,
        metrics=metrics,
    )
    discovery = _discovery(config, control, agents, own, joined, metrics)
    scheduler = _scheduler(config, discovery, feeds, load, breaker, metrics)
    looks = _looks(config, scheduler, agents, metrics)
    breaker.probe = looks.probe
    usage.waits_s = partial(_waits_s, scheduler)
    waiting = RequestQueue(
        scheduler,
        metrics,
        most_waiting=config.max_waiting_requests,
        most_wait_s=config.max_wait_s,
        clock=time.monotonic,
        most_waiting_bytes=config.max_waiting_bytes,
        tenant_share=_tenant_share(config, keys),
        holds=usage.holds,
    )
    cold = ColdStarts(
        partial(_fetch, agents, own),
        discovery,
        metrics,
        config.orchestrator_url.rstrip("/"),
        config.cold_start_timeout_s,
        config.max_held_requests,
        max_held_bytes=config.max_held_bytes,
        tenant_share=_tenant_share(config, keys),
        tenant_adapters=inf if keys.is_open else config.max_cold_adapters_per_tenant,
        holds=usage.holds,
        silent_after_s=config.catalog_poll_s + config.control_timeout_s,
    )
    traces = make_tracer(
        config.otlp_endpoint,
        ratio=config.trace_ratio,
        instance=router_id,
        on_outcome=lambda outcome, count: metrics.traces.labels(outcome).inc(count),
    )

    services = Services(
        config=config,
        keys=keys,
        discovery=discovery,
        tokenizers=tokenizers,
        feeds=feeds,
        scheduler=scheduler,
        queue=waiting,
        accuracy=trust,
        cold_starts=cold,
        usage=usage,
        metrics=metrics,
        pool=EnginePool(connect_s=config.connect_timeout_s, outbox=outbox),
        background=_background(config, keys, discovery, agents),
        poison_requests=PoisonRequests("this request was", enough=2, hold_s=config.deadly_hold_s),
        poison_adapters=PoisonRequests("requests for this adapter were", enough=3, hold_s=config.deadly_hold_s),
        quotas=Quotas(SharedQuotas(me.accounts, me.slot, me.processes) if me else None),
        tracer=traces,
    )
    inference = InferenceHandler(services)
    limits, origins = _front_limits(config, keys), cors_header_lines(config.allowed_origins)
    clients = HttpListener(inference.find_handler, limits, inference.caller_of, origins, outbox, error_body)
    own_metrics = partial(exposed, services, clients)
    processes = None
    if me is not None:
        processes = WorkerProcesses(Path(me.folder), me.slot, metrics=own_metrics, answers=answers(services))
    app = FastAPI(
        title="lorafleet router", lifespan=lambda _app: _running(services, control, agents, looks, clients, processes)
    )
    add_routes(app, control_routes(services, processes), health_routes(services, own_metrics, processes))
    install_error_handlers(app, RouterError)
    describe_inference(app)
    may_ask = site_check(config.allowed_origins, trusts_preflight=True)
    guard(app, keys, allow_open=config.allow_open, may_ask=may_ask)
    if config.allowed_origins:
        app.add_middleware(CORSMiddleware, **cors_middleware_options(config.allowed_origins))
    app.state.http = clients
    app.state.processes = processes
    return app, services


def _scheduler(
    config: RouterSettings,
    discovery: Discovery,
    feeds: KvFeeds,
    load: LoadBook,
    breaker: CircuitBreaker,
    metrics: RouterMetrics,
) -> Scheduler:
    return Scheduler(
        roster=lambda base_model: discovery.fleet.roster(base_model),  # noqa: PLW0108  (`fleet` is swapped)
        match=partial(match, feeds),
        policy=POLICIES[config.policy](),
        shadows=[POLICIES[name]() for name in config.shadow_policies],
        on_shadow=lambda shadow: _count_shadow(metrics, shadow),
        on_shadow_failure=lambda name, exc: _count_shadow_failure(metrics, name, exc),
        costs=CostSettings(**config.costs),
        late_binding_s=config.late_binding_s,
        most_in_flight_tokens=config.max_in_flight_tokens,
        breaker=breaker,
        budget=lambda: RetryBudget(share=config.retry_share, floor_per_s=config.retry_floor_per_s),
        load=load,
    )


@asynccontextmanager
async def _running(
    services: Services,
    control: httpx.AsyncClient,
    agents: EnginePool,
    looks: HealthProbes,
    clients: HttpListener,
    processes: WorkerProcesses | None,
) -> AsyncIterator[None]:
    """Everything that runs beside the requests, from the app's start to its end."""
    discovery, metrics = services.discovery, services.metrics
    async with control:
        running = [
            asyncio.create_task(discovery.run()),
            asyncio.create_task(services.queue.run()),
            asyncio.create_task(_sweep(services.feeds, metrics)),
            asyncio.create_task(_watch(services, discovery, metrics)),
        ]
        if url := services.config.orchestrator_url.rstrip("/"):
            running.append(asyncio.create_task(_report_usage(control, url, services.usage, discovery, metrics)))
        for task in running:
            task.add_done_callback(lambda task: _ended(services, task))
        if processes is not None:
            await processes.start()
        _rest_the_collector()
        sys.setswitchinterval(_SWITCH_EVERY_S)
        try:
            yield
        finally:
            clients.stop()
            await services.background.close()
            await looks.close()
            if processes is not None:
                await processes.close()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await services.feeds.close()
            await services.pool.close()
            await agents.close()
            services.tokenizers.close()
            if services.tracer is not None:
                await services.tracer.close()


def _ended(services: Services, task: asyncio.Task[None]) -> None:
    """Nothing that runs beside the requests ends before the app does. What is left without it would serve on with
    yesterday's fleet: whoever started us had better start us anew."""
    if task.cancelled():
        return
    services.has_failed = True
    log.critical("a background task ended; the router stops", task=repr(task.get_coro()), exc_info=task.exception())
    os.kill(os.getpid(), signal.SIGTERM)


def _rest_the_collector() -> None:
    """Garbage in cycles is rare here, and what lives long (index, tokenizers) need not be searched for it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY, 20, 50)


def _tenant_share(config: RouterSettings, keys: ApiKeys) -> float:
    return 1.0 if keys.is_open else config.tenant_share  # without keys everybody is one tenant


def _background(config: RouterSettings, keys: ApiKeys, discovery: Discovery, agents: EnginePool) -> Background:
    async def ask(replica: Replica, response_id: str) -> bytes:
        # Not on the connections of requests: an engine that answers this may compute nothing, and is to be found out.
        return await fetch(
            agents,
            replica.engine_url,
            f"/v1/responses/{response_id}",
            token="" if replica.agent_url else config.engine_key,
            timeout_s=config.control_timeout_s,
        )

    return Background(
        ask,
        lambda worker: discovery.fleet.replicas.get(worker),  # noqa: PLW0108  (`fleet` is swapped)
        most=config.max_background_responses,
        tenant_share=_tenant_share(config, keys),
        timeout_s=config.background_timeout_s,
    )


def _looks(config: RouterSettings, scheduler: Scheduler, agents: EnginePool, metrics: RouterMetrics) -> HealthProbes:
    async def ask(replica: Replica, path: str, body: bytes) -> bytes:
        return await fetch(
            agents,
            replica.engine_url,
            path,
            token="" if replica.agent_url else config.engine_key,
            body=body,
            timeout_s=config.control_timeout_s,
        )

    def on_finding(replica: Replica, finding: Finding) -> None:
        metrics.circuit_looks.labels(finding).inc()
        if finding != "unknown":
            scheduler.record_probe(replica, time.monotonic(), is_well=finding == "well")

    return HealthProbes(ask, on_finding)


async def _fetch(agents: EnginePool, own: OwnKey, url: str, path: str, **more: Any) -> bytes:
    """Ask an agent with our own key, as it is now."""
    return await fetch(agents, url, path, token=own.key, **more)


def _discovery(
    config: RouterSettings,
    control: httpx.AsyncClient,
    agents: EnginePool,
    own: OwnKey,
    listener: _WorkerListener,
    metrics: RouterMetrics,
) -> Discovery:
    slices = None
    if config.kube_selector:
        slices = SliceWatch(
            partial(open_client, find_access_source(config.kubeconfig, os.environ, ACCOUNT)),
            selector=config.kube_selector,
            namespaces=config.kube_namespaces,
            on_failure=partial(_count_slices_failure, metrics),
        )
    return Discovery(
        control,
        partial(_fetch, agents, own, timeout_s=config.control_timeout_s),
        get_from_engine=partial(fetch, agents, timeout_s=config.control_timeout_s),
        open_stream=lambda url, path: stream(agents, url, path, token=own.key, idle_s=_LISTEN_IDLE_S),
        engine_key=config.engine_key,
        engine_salt=config.engine_salt,
        orchestrator_url=config.orchestrator_url.rstrip("/"),
        engines=engines_by_id(config.engines),
        slices=slices,
        zone=config.zone,
        listener=listener,
        state_file=config.state_dir / "catalog.json" if config.state_dir else None,
        catalog_poll_s=config.catalog_poll_s,
        metadata_poll_s=config.metadata_poll_s,
        unreachable_after_s=config.unreachable_after_s,
        first_sync_wait_s=config.first_sync_wait_s,
        clock=time.monotonic,
        on_failure=lambda loop: metrics.loop_failures.labels(loop).inc(),
    )


def _waits_s(scheduler: Scheduler) -> dict[WorkerId, float]:
    """Seconds until what waits here for each worker has gone there, as fast as its line moves."""
    waiting = scheduler.queue
    return {worker: work_s / waiting.rates.rate(worker) for worker, work_s in waiting.backlog.items()}


def _front_limits(config: RouterSettings, keys: ApiKeys) -> ClientLimits:
    of_tenant = int(config.max_bodies_bytes * config.tenant_share)
    return ClientLimits(
        head_bytes=config.max_head_bytes,
        body_bytes=config.max_body_bytes,
        held_bytes=config.max_bodies_bytes,
        tenant_bytes=None if keys.is_open else max(of_tenant, config.max_body_bytes),
        head_s=config.head_timeout_s,
        body_s=config.body_timeout_s,
        send_stall_s=config.send_timeout_s,
        idle_s=config.keep_alive_s,
    )


def _breaker_rules(config: RouterSettings) -> BreakerRules:
    return BreakerRules(
        failures=config.breaker_failures,
        eject_share=config.breaker_eject_share,
        open_s=config.breaker_open_s,
        most_open_s=max(config.breaker_open_s, config.breaker_max_open_s),
        silent_s=config.breaker_silent_s,
        trial_s=config.trial_timeout_s,
    )


def _count_circuit(metrics: RouterMetrics, replica: Replica, state: CircuitState, why: str) -> None:
    metrics.circuit_open.labels(replica.id).set(state == "open")
    if state == "open":
        metrics.circuit_openings.labels(replica.id, why).inc()
    log.warning("circuit changed", worker=replica.id, state=state, why=why)


def _count_shadow(metrics: RouterMetrics, shadow: ShadowComparison) -> None:
    metrics.shadow_decisions.labels(shadow.policy, "yes" if shadow.agrees else "no").inc()
    metrics.shadow_cost.labels(shadow.policy).inc(shadow.cost_s)


async def _sweep(feeds: KvFeeds, metrics: RouterMetrics) -> None:
    async def step() -> None:
        for index in (*feeds.indexes.values(), *feeds.approximate.values()):
            index.sweep(_SWEEP_BLOCKS)

    await forever(step, name="sweep", every_s=_SWEEP_EVERY_S, on_failure=metrics.loop_failures.labels("sweep").inc)


async def _watch(services: Services, discovery: Discovery, metrics: RouterMetrics) -> None:
    scheduler, pool = services.scheduler, services.pool

    async def step() -> None:
        replicas = list(discovery.fleet.replicas.values())
        heard_at = pool.heard_at()  # by the loop's clock, which is time.monotonic
        for replica in replicas:
            scheduler.load.record_data(replica.id, heard_at.get(replica.engine_url, -inf))
        now = time.monotonic()
        scheduler.check_engines(replicas, now)
        services.poison_requests.forget(now)
        services.poison_adapters.forget(now)
        for replica in replicas:
            if replica.is_suspect:
                _leave(replica, scheduler, pool, now)

    await forever(step, name="watch", every_s=_WATCH_EVERY_S, on_failure=metrics.loop_failures.labels("watch").inc)


def _leave(hung: Replica, scheduler: Scheduler, pool: EnginePool, now: float) -> None:
    """What waits at an engine that hangs goes elsewhere, where somebody may serve it; else it may come back yet."""
    others = [
        replica
        for replica in scheduler.healthy_replicas(hung.base_model, now)
        if replica.max_model_len >= hung.max_model_len
    ]
    if others:
        served = {name for replica in others for name in replica.residents if name not in replica.draining}
        pool.give_up(hung.engine_url, lambda sink: isinstance(sink, EngineAttempt) and sink.can_move(served))


def _count_slices_failure(metrics: RouterMetrics, exc: Exception) -> None:
    if not isinstance(exc, KubeError | KubeConfigError):  # what the API server says or does not say shows as age
        metrics.loop_failures.labels("slices").inc()


def _count_shadow_failure(metrics: RouterMetrics, name: str, exc: Exception) -> None:
    metrics.shadow_decisions.labels(name, "failed").inc()
    log.warning("shadow policy failed", policy=name, error=repr(exc))


async def _report_usage(
    client: httpx.AsyncClient, url: str, usage: UsageCounts, discovery: Discovery, metrics: RouterMetrics
) -> None:
    async def step() -> None:
        await send_usage(client, url, usage, lambda: discovery.fleet.revision, time.monotonic)

    await forever(
        step,
        name="usage",
        every_s=USAGE_EVERY_S,
        poke=discovery.drains_begun,
        on_failure=metrics.loop_failures.labels("usage").inc,
    )


def _cannot_start(exc: Exception) -> SystemExit:
    print(f"python -m router: {exc}", file=sys.stderr)  # noqa: T201  (the last word of a process that could not start)
    return SystemExit(2)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM: then not ready, finish what is in flight, and return.

    Status 2 when it cannot start, 1 when it was a background task's end that stopped us.
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
                    port_file=config.port_file,
                    drain_s=config.drain_s,
                    stop_s=config.drain_s + config.grace_s,
                )
            )
        app, services = build(config, me)
        sock = me.bind() if me else serve.bind(config.host, config.port)
    except (KeyFileError, TracingUnavailable, KubeConfigError, OSError) as exc:
        raise _cannot_start(exc) from exc

    def stopping() -> None:
        services.stopping = True
        app.state.http.is_draining = True

    async def synced(within_s: float) -> None:
        await services.discovery.changes.until(services.discovery.is_synced, timeout_s=within_s)

    if me is None:
        log.info("serving", host=config.host, port=sock.getsockname()[1], orchestrator=config.orchestrator_url)
    try:
        serve.run(
            lambda: serve.serve(
                supervisor.JoiningApp(app, me, sock, wait_until_synced=synced) if me else app,
                sock,
                http=app.state.http,
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
