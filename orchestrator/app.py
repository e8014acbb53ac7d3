"""Builds the orchestrator from its parts; the only place that does."""

import asyncio
import contextlib
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import structlog
from fastapi import FastAPI

from lorafleet.engine.agentless import engines_by_id
from lorafleet.engine.settings import agent_key_of
from lorafleet.engine.worker_proofs import AgentProofs
from lorafleet.http_server.guard import guard
from lorafleet.http_server.serve import bind, serve
from lorafleet.keys.auth import ApiKeys, check_route_scopes, refuse_open_server, route_of
from lorafleet.keys.metrics import TokenCollector
from lorafleet.keys.own_key import OwnKey
from lorafleet.keys.runs import path_behind_run
from lorafleet.kube.client import KubeClient, connect
from lorafleet.kube.discovery import SliceWatch
from lorafleet.service.http import JsonBodyMiddleware, add_routes, install_error_handlers
from lorafleet.service.http.openapi import change_document, documented_app
from lorafleet.service.loops import forever
from lorafleet.service.network.tls import Tls, role_name
from lorafleet.service.network.transport import DirectTransport
from lorafleet.service.network.urls import bracketed
from lorafleet.telemetry.request_log import RequestLog
from orchestrator.agentless.engine import AgentlessLoadRules, AgentlessWorker
from orchestrator.agentless.transport import SCHEME, AgentlessTransport
from orchestrator.api import build_router
from orchestrator.api.examples import add_examples
from orchestrator.api.tenancy import errors_shown
from orchestrator.api.uploads import UPLOADS_PATH
from orchestrator.api.views import WireViews
from orchestrator.config import OrchestratorSettings
from orchestrator.configmaps.backend import ConfigMapBackend
from orchestrator.configmaps.edits import ObjectEdits
from orchestrator.configmaps.events import KubeEvents
from orchestrator.configmaps.failure_statuses import FailureStatuses
from orchestrator.core.demand import DemandBook
from orchestrator.core.errors import OrchestratorError, StoreError
from orchestrator.intent.record_file import RecordFile
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.intent.uploads import AdapterUploads
from orchestrator.leadership.file_lease import FileLease, Lease, lease_path
from orchestrator.leadership.forward import LeaderForwarding, OwnCalls
from orchestrator.leadership.kube_lease import KubeLease
from orchestrator.leadership.leadership import Leadership, TermHandler
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.reconcile.agent_client import AgentClient, ask_for_proof, meet_worker
from orchestrator.reconcile.catalog import CatalogBook
from orchestrator.reconcile.context import PassContext
from orchestrator.reconcile.file_copies import FileRelay
from orchestrator.reconcile.pool_starter import PoolStarter
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.reconcile.residency import ResidencyMeter
from orchestrator.reconcile.worker_finders import KubeWorkerFinder, StandbyFollower
from orchestrator.reconcile.worker_reports import WorkerReports
from orchestrator.store.backend import StoreBackend
from orchestrator.store.ledger import Ledger
from orchestrator.store.sqlite import SqliteBackend
from orchestrator.store.store import IntentStore
from orchestrator.store.upload_store import upload_store
from orchestrator.traffic.book import Reading, TrafficBook, fleet_readings
from orchestrator.traffic.file import TrafficFile
from orchestrator.traffic.questions import RouterMailbox

if TYPE_CHECKING:
    from orchestrator.postgres.store import PostgresStore

log = structlog.get_logger()

# JSON values in a body. Parsing so many blocks the event loop for a tenth of a second.
_MOST_VALUES = 200_000
# A router's report of a hundred thousand (worker, adapter), 25 values each.
# A router's thousand decisions over 64 replicas, 16 values each.
_LARGER_BODIES = {
    "/v1/usage": 3_000_000,
    "/v1/import": 1_000_000,
    "/v1/apply": 1_000_000,
    "/v1/routers/answers": 1_500_000,
}
# Part of `lease_renew_s` for which calls under way delay the release of the lease. Most take milliseconds.
_OWN_CALLS_SHARE = 0.25
_FIRST_LIST_S = 2.0  # a single orchestrator leads from its first response; an absent API server blocks no start


@dataclass(slots=True)
class OrchestratorService:
    """The app and the parts that tests and `main` need."""

    app: FastAPI
    requests: RequestLog
    reconciler: Reconciler
    store: IntentStore
    ledger: Ledger
    leadership: Leadership
    client: httpx.AsyncClient
    agentless: AgentlessTransport
    book: TrafficBook
    postgres: "PostgresStore | None" = None
    mailbox: RouterMailbox = field(default_factory=RouterMailbox)
    own_calls: OwnCalls = field(default_factory=OwnCalls)
    is_stopping: bool = False
    handing_over: "asyncio.Task[None] | None" = None

    def upload_bytes(self, method: str, path: str) -> int:
        """Most bytes of a body, for the route that takes an adapter's files; else 0."""
        is_upload = method == "PUT" and path_behind_run(path).startswith(UPLOADS_PATH)
        return self.reconciler.settings.max_upload_bytes if is_upload else 0

    def stop(self) -> None:
        """End streams and waiting calls, so that the server can stop, and start to hand the leadership over.

        Call it in the event loop.
        """
        self.is_stopping = True
        self.reconciler.catalog.changed.notify()
        self.mailbox.close()
        if self.handing_over is None:
            self.handing_over = asyncio.get_running_loop().create_task(self.hand_over())

    async def hand_over(self) -> None:
        """Let the calls that run end, write what is pending, and release the lease.

        This is done before the server's connections end, which may take `stop_grace_s`. Calls that begin meanwhile go
        to the next leader.
        """
        await self.own_calls.wait_for_end(self.reconciler.settings.lease_renew_s * _OWN_CALLS_SHARE)
        await self.ledger.close()
        await self.store.write_remaining()
        await self.leadership.step_down()


def build(
    settings: OrchestratorSettings,
    *,
    url: str = "",
    kube: KubeClient | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    tls: Tls | None = None,
) -> OrchestratorService:
    """Build the whole service; nothing runs until the app is served. Raises StoreError, KeyFileError, OSError,
    and OrchestratorUnavailable for a price file that cannot be used.

    url    where other orchestrators reach this one
    kube   the API server, where the settings want one; closed with the app
    tls    for calls to workers and other orchestrators
    """
    keys = ApiKeys(settings.key_files, needs_certificates=tls is not None and tls.is_mutual)
    refuse_open_server(keys, settings.host, allow_open=settings.allow_open)

    def take_back_refused() -> None:
        """Read the store again after it refused a write, and act on the intent without that write."""
        store.refresh()
        reconciler.on_intent_changed()

    configmaps = _configmap_backend(settings, kube, take_back_refused)
    postgres = _postgres_store(settings, take_back_refused)
    store, ledger = _stores(configmaps or (postgres and postgres.backend) or _sqlite_backend(settings), wall)
    agentless = _agentless_transport(settings, store, lambda: finder, clock, tls)
    client = httpx.AsyncClient(
        transport=DirectTransport(limits=httpx.Limits(max_connections=None, max_keepalive_connections=256), tls=tls),
        # Other fleets have other authorities.
        mounts={SCHEME: agentless, **{url: DirectTransport() for url in settings.peer_fleets if tls is not None}},
        trust_env=False,
    )
    reports, metrics = WorkerReports(clock=clock, wall=wall), _metrics(settings, tls)
    leadership = _build_leadership(settings, kube, postgres, url, lambda: reconciler, clock=clock, wall=wall)

    async def epoch_if_leading() -> int:
        await leadership.confirm_leading()
        return store.epoch

    agents = _agent_client(settings, keys, client, epoch_if_leading, clock, tls)
    reconciler = Reconciler(
        context := PassContext(
            settings=settings,
            store=store,
            reports=reports,
            demand=DemandBook(),
            catalog=CatalogBook(store, wall=wall, buffer=settings.event_buffer),
            agents=agents,
            metrics=metrics,
            leadership=leadership,
            clock=clock,
            wall=wall,
        )
    )

    standby = StandbyFollower(
        leadership=leadership,
        reconciler=reconciler,
        agents=agents,
        own_key=OwnKey(settings.token, settings.token_file),
        client=client,
        timeout_s=settings.probe_timeout_s,
    )

    registry = AdapterRegistry(
        store, reports, reconciler.names, forget_failures=reconciler.operations.failures.forget_adapter, wall=wall
    )
    backend_loops: list[Callable[[], Coroutine[Any, Any, object]]] = [
        *([] if postgres is None else [postgres.backend.run]),
        *([] if configmaps is None else _configmap_loops(configmaps, kube, settings, registry, reconciler)),
    ]

    book = _traffic_book(settings, reconciler, clock, wall)
    record = _record_file(settings, store, book, metrics)
    finder = _worker_finder(settings, kube, reports, agents, reconciler, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        loops: list[asyncio.Task[Any]] = [asyncio.create_task(work()) for work in backend_loops]
        if configmaps is not None:
            await configmaps.wait_until_listed(_FIRST_LIST_S)
        await leadership.start()
        follow = forever(standby.sync_workers, name="standby", every_s=settings.heartbeat_interval_s)
        works = (
            leadership.run(),
            reconciler.run(),
            follow,
            agentless.run(reconciler.monitor.record_heartbeat),
            book.run(lambda: leadership.is_leading),
            *([] if finder is None else [finder.run()]),
            *_pool_starters(context, kube),
            ResidencyMeter(reconciler, ledger, clock=clock, wall=wall).run(),
        )
        loops += [*map(asyncio.create_task, works), *_store_loops(reconciler, record)]
        try:
            yield
        finally:
            await (service.handing_over or service.hand_over())
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await reconciler.stop()
            await leadership.release()
            await client.aclose()
            book.close()
            store.close()
            if kube is not None:
                await kube.close()

    app = documented_app(
        title="lorafleet orchestrator",
        version=version("lorafleet"),
        description="Decides which adapter lives on which worker, and makes it so.",
        lifespan=lifespan,
    )
    service = OrchestratorService(
        app,
        RequestLog("orchestrator", settings.access_log),
        reconciler,
        store,
        ledger,
        leadership,
        client,
        agentless,
        book,
        postgres,
    )
    add_routes(
        app,
        build_router(
            keys=keys,
            registry=registry,
            reconciler=reconciler,
            agents=agents,
            book=book,
            ledger=ledger,
            mailbox=service.mailbox,
            uploads=AdapterUploads(
                registry,
                reconciler,
                upload_store(settings.upload_store),
                agents=agents,
                relay=_file_relay(settings, client, reconciler, agents),
                settings=settings,
            ),
            metrics=metrics,
            is_stopping=lambda: service.is_stopping,
            clock=clock,
            wall=wall,
            metrics_need_key=settings.metrics_need_key,
        ),
    )
    _add_checks(service, keys, metrics, clock)
    return service


def _add_checks(
    service: OrchestratorService, keys: ApiKeys, metrics: OrchestratorMetrics, clock: Callable[[], float]
) -> None:
    """Add error answers, examples, metrics of tokens, forwarding to the leader, and the checks before a route."""
    app, settings = service.app, service.reconciler.settings
    metrics.registry.register(TokenCollector(keys))
    install_error_handlers(app, OrchestratorError, shown=errors_shown(service.store))
    change_document(app, add_examples)
    app.add_middleware(
        LeaderForwarding,
        leadership=service.leadership,
        own_calls=service.own_calls,
        is_stopping=lambda: service.is_stopping,
        is_upload=lambda method, path: bool(service.upload_bytes(method, path)),
        client=service.client,
        metrics=metrics,
        refresh=service.store.refresh,
        connect_timeout_s=settings.forward_timeout_s,
        retry_after_s=settings.lease_renew_s,
        clock=clock,
    )
    # The outermost middleware, so that forwarded requests are checked too.
    app.add_middleware(
        JsonBodyMiddleware,
        may_send=partial(check_route_scopes, app),
        most_values=_MOST_VALUES,
        larger=_LARGER_BODIES,
        route_of=partial(route_of, app),
    )
    guard(app, keys, allow_open=settings.allow_open, requests=service.requests, has_runs=True)


def _metrics(settings: OrchestratorSettings, tls: Tls | None) -> OrchestratorMetrics:
    """The metrics, with those of the certificate where there is one."""
    metrics = OrchestratorMetrics(settings.metrics_adapters)
    metrics.observe_tls("orchestrator", tls)
    return metrics


def _agentless_transport(
    settings: OrchestratorSettings,
    store: IntentStore,
    finder: Callable[[], KubeWorkerFinder | None],
    clock: Callable[[], float],
    tls: Tls | None,
) -> AgentlessTransport:
    """The transport that answers for engines without an agent. `finder`: finds further ones, once it is built."""
    rules = AgentlessLoadRules(
        slots=settings.engine_slots,
        roots=settings.engine_roots,
        by_offer=settings.engine_offers,
        salt=settings.engine_salt,
        canary=settings.engine_canary,
        canary_timeout_s=settings.engine_canary_timeout_s,
    )
    return AgentlessTransport(
        lambda: _agentless_workers(settings, finder()),
        rules,
        digest_of=lambda lora_id: adapter.digest if (adapter := store.adapters.get(lora_id)) else None,
        key=settings.engine_key,
        timeout_s=settings.probe_timeout_s,
        every_s=settings.heartbeat_interval_s,
        clock=clock,
        tls=tls,
    )


def _agent_client(
    settings: OrchestratorSettings,
    keys: ApiKeys,
    client: httpx.AsyncClient,
    epoch: Callable[[], Awaitable[int]],
    clock: Callable[[], float],
    tls: Tls | None,
) -> AgentClient:
    """The client of the agents, with a key that opens agents alone, and the proofs of their addresses."""
    proofs = AgentProofs(
        keys=keys,
        ask=partial(ask_for_proof, client, settings.probe_timeout_s),
        valid_s=settings.probe_after_s,
        clock=clock,
        meet=partial(meet_worker, tls, settings.probe_timeout_s) if tls is not None and tls.is_mutual else None,
    )
    return AgentClient(client, agent_key=agent_key_of(settings), proofs=proofs, epoch=epoch)


def _file_relay(
    settings: OrchestratorSettings, client: httpx.AsyncClient, reconciler: Reconciler, agents: AgentClient
) -> FileRelay:
    """The relay of adapter files, with the keys for our agents and for other fleets."""
    return FileRelay(
        client,
        reconciler.reports,
        reconciler.files,
        agents=agents,
        peers=settings.peer_fleets,
        peer_key=OwnKey("", settings.peer_token_file),
        probe_timeout_s=settings.probe_timeout_s,
    )


def _traffic_book(
    settings: OrchestratorSettings,
    reconciler: Reconciler,
    clock: Callable[[], float],
    wall: Callable[[], float],
) -> TrafficBook:
    """The book of past traffic, with its file opened."""
    views = WireViews(reconciler, clock, wall)

    def readings() -> Iterator[Reading]:
        """The fleet's readings now."""
        routers = (router.report.now for router in reconciler.demand.routers.live(clock()))
        return fleet_readings(reconciler.reports.workers, routers, views.workers_by_state())

    file = TrafficFile(settings.traffic_path, most_bytes=settings.traffic_max_bytes)
    return TrafficBook(file, readings=readings, wall=wall)


def _record_file(
    settings: OrchestratorSettings, store: IntentStore, book: TrafficBook, metrics: OrchestratorMetrics
) -> RecordFile | None:
    """The readable record, if the settings want one. Also connects the gauge of all state files."""
    record = RecordFile(settings.record_path, store) if settings.record_path is not None else None
    troubles = {"store": lambda: store.trouble, "traffic": lambda: book.file.trouble}
    metrics.observe_state_files(troubles | ({} if record is None else {"record": lambda: record.trouble}))
    return record


def _store_loops(reconciler: Reconciler, record: RecordFile | None) -> "list[asyncio.Task[object]]":
    """The running loops that look after the store's file, and write the readable record while we lead."""
    store, leadership = reconciler.store, reconciler.leadership

    async def check_store() -> None:
        """Look at the store's file, and record what became of it."""
        reconciler.incidents.look_at_store(store.check())

    async def write_record() -> None:
        """Write the record if it has changed. Only the leader knows the newest."""
        if record is not None and leadership.is_leading:
            await record.write_if_changed()

    steps = {"store": check_store} | ({} if record is None else {"record": write_record})
    return [asyncio.create_task(forever(step, name=name, every_s=1.0)) for name, step in steps.items()]


def _agentless_workers(settings: OrchestratorSettings, finder: KubeWorkerFinder | None) -> list[AgentlessWorker]:
    """The agentless engines that settings and EndpointSlices list."""
    named = {id_: AgentlessWorker(id=id_, engine_url=url) for id_, url in engines_by_id(settings.engines).items()}
    for worker in finder.agentless_engines() if finder is not None else ():
        if worker.engine_url is not None:
            found = AgentlessWorker(
                id=worker.id, engine_url=worker.engine_url, pool=worker.pool, zone=worker.zone, node=worker.node
            )
            named.setdefault(worker.id, found)
    return list(named.values())


def _configmap_backend(
    settings: OrchestratorSettings, kube: KubeClient | None, on_undone: Callable[[], None]
) -> ConfigMapBackend | None:
    """The ConfigMap backend with the configured namespace and timeout; None for another backend."""
    if settings.backend == "store":
        return None
    assert kube is not None, "backend configmaps needs an API server"
    return ConfigMapBackend(
        kube,
        namespace=settings.kube_namespace or kube.namespace,
        fleet=settings.kube_name,
        on_undone=on_undone,
        give_up_s=settings.store_timeout_s,
    )


def _stores(backend: StoreBackend, wall: Callable[[], float]) -> tuple[IntentStore, Ledger]:
    """The intent and the ledger in one backend. Raises StoreError."""
    return IntentStore(backend, wall=wall), Ledger(backend, wall=wall)


def _sqlite_backend(settings: OrchestratorSettings) -> SqliteBackend:
    """The backend in the configured SQLite file. Raises StoreError."""
    return SqliteBackend(settings.store, usage_kept_days=settings.usage_kept_days)


def _postgres_store(settings: OrchestratorSettings, on_undone: Callable[[], None]) -> "PostgresStore | None":
    """The backend and the lease in the configured database; None for another store. Raises StoreError."""
    if not settings.has_database:
        return None
    try:
        from orchestrator.postgres.store import PostgresStore  # noqa: PLC0415  (psycopg is an extra, and 10 MB)
    except ImportError as exc:
        raise StoreError(f"a PostgreSQL store needs psycopg ({exc}); pip install 'lorafleet[postgresql]'") from exc
    return PostgresStore(
        str(settings.store),
        settings.store_file,
        on_undone=on_undone,
        give_up_s=settings.store_timeout_s,
        lease_call_s=settings.lease_duration_s / 3,
        usage_kept_days=settings.usage_kept_days,
    )


def _configmap_loops(
    configmaps: ConfigMapBackend,
    kube: KubeClient | None,
    settings: OrchestratorSettings,
    registry: AdapterRegistry,
    reconciler: Reconciler,
) -> list[Callable[[], Coroutine[Any, Any, object]]]:
    """The loops that keep ConfigMaps and intent in agreement."""
    assert kube is not None, "backend configmaps needs an API server"
    events = KubeEvents(kube, namespace=settings.kube_namespace or kube.namespace, reporter=socket.gethostname())
    edits = ObjectEdits(
        configmaps,
        reconciler.store,
        registry,
        events,
        is_leading=lambda: reconciler.leadership.is_leading,
        on_changed=reconciler.on_intent_changed,
    )

    statuses = FailureStatuses(
        configmaps,
        events,
        adapters=lambda: reconciler.store.adapters,
        failed=reconciler.queries.unusable_adapters,
        is_ready=lambda lora_id: bool(reconciler.queries.ready_workers(lora_id)),
    )

    async def show_failures() -> None:
        """Show in the objects' statuses which adapters fail; after each pass."""
        statuses.update()

    every_s, ended = settings.pass_interval_s, reconciler.pass_ended
    show = partial(forever, show_failures, name="statuses", every_s=every_s, poke=ended)
    return [configmaps.follow, events.run, edits.run, show]


def _worker_finder(
    settings: OrchestratorSettings,
    kube: KubeClient | None,
    reports: WorkerReports,
    agents: AgentClient,
    reconciler: Reconciler,
    metrics: OrchestratorMetrics,
) -> KubeWorkerFinder | None:
    """The finder of workers in EndpointSlices; None without a kube_selector."""
    if not settings.kube_selector:
        return None
    assert kube is not None, "kube_selector needs an API server"
    slices = SliceWatch(
        lambda: contextlib.nullcontext(kube), selector=settings.kube_selector, namespaces=settings.kube_namespaces
    )
    metrics.observe_slices(slices.age_s)
    return KubeWorkerFinder(
        slices,
        reports=reports,
        agents=agents,
        on_report=reconciler.monitor.record_heartbeat,
        request_pass=reconciler.request_pass,
        timeout_s=settings.probe_timeout_s,
        again_s=settings.probe_after_s,
    )


def _pool_starters(context: PassContext, kube: KubeClient | None) -> list[Coroutine[Any, Any, None]]:
    """The loop that scales pools from zero; none where the settings name no workload of one."""
    settings = context.settings
    if not any(pool.workload for pool in settings.scale_from_zero.values()):
        return []
    assert kube is not None, "scale_from_zero with a workload needs an API server"
    return [PoolStarter(context, kube, namespace=settings.kube_namespace or kube.namespace).run()]


def _build_leadership(
    settings: OrchestratorSettings,
    kube: KubeClient | None,
    postgres: "PostgresStore | None",
    url: str,
    handler: Callable[[], TermHandler],
    *,
    clock: Callable[[], float],
    wall: Callable[[], float],
) -> Leadership:
    """The leader election with the configured lease and times, under a new random holder name."""
    holder = secrets.token_hex(8) if postgres is None else postgres.holder
    if settings.lease == "kubernetes":
        holder = f"{socket.gethostname()}_{holder}"  # with the pod's name, for people who read the Lease
    return Leadership(
        _configured_lease(settings, kube, holder, wall) if postgres is None else postgres.lease,
        handler,
        holder=holder,
        url=settings.advertise_url or url,
        duration_s=settings.lease_duration_s,
        renew_s=settings.lease_renew_s,
        margin_s=settings.lease_margin_s,
        clock=clock,
    )


def _configured_lease(
    settings: OrchestratorSettings, kube: KubeClient | None, holder: str, wall: Callable[[], float]
) -> Lease:
    """The lease beside an SQLite file, or a Kubernetes Lease."""
    if settings.lease == "store":
        return FileLease(lease_path(Path(settings.store)), holder=holder)
    assert kube is not None, "lease kubernetes needs an API server"
    return KubeLease(
        kube,
        namespace=settings.kube_namespace or kube.namespace,
        name=settings.kube_name,
        timeout_s=settings.lease_duration_s / 3,
        wall=wall,
    )


async def main(settings: OrchestratorSettings) -> None:
    """Connect to the API server if the settings need it, and serve until SIGTERM.

    Raises StoreError, KeyFileError, KubeConfigError, OSError when it cannot start.
    """
    kube = await connect(settings.kubeconfig) if settings.needs_kube else None
    tls = Tls.of_service(settings.tls_files, role_name("orchestrator"), clients=ssl.CERT_OPTIONAL)
    sock = bind(settings.host, settings.port)
    port = sock.getsockname()[1]
    try:
        service = build(settings, url=f"{settings.scheme}://{bracketed(settings.host)}:{port}", kube=kube, tls=tls)
        if service.postgres is not None:
            await service.postgres.backend.open()
            service.store.reload()
    except BaseException:
        sock.close()
        raise
    log.info("serving", host=settings.host, port=port, epoch=service.store.epoch, adapters=len(service.store.adapters))
    await serve(
        service.app,
        sock,
        port_file=settings.port_file,
        grace_s=settings.stop_grace_s,
        on_stop=service.stop,
        requests=service.requests,
        upload_bytes=service.upload_bytes,
        tls=tls,
    )
