"""Makes each part of the router from the settings; app.py says in which order."""

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import httpx
import structlog

from lorafleet.engine.agentless import has_start_time
from lorafleet.http_server.intake import ClientLimits, RequestIntake
from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.own_key import OwnKey
from lorafleet.kube.access import ACCOUNT, find_access_source
from lorafleet.kube.client import open_client
from lorafleet.kube.discovery import SliceWatch
from lorafleet.kube.errors import KubeConfigError, KubeError
from lorafleet.service.http.known_fields import WIRE_HEADERS
from lorafleet.service.tasks import BackgroundTasks
from lorafleet.telemetry.repeats import RepeatLimiter
from orchestrator.model.usage import LimitShares
from router.config import RouterSettings
from router.core.failover.circuit_breaker import BreakerRules, CircuitBreaker, CircuitState
from router.core.failover.retry_budget import RetryBudget
from router.core.fleet import Incarnation, Replica
from router.core.kv.index import WorkerId
from router.core.kv.prediction_accuracy import PredictionAccuracy
from router.core.queue.admission import QueueLimits, QueueUsage
from router.core.queue.quota import Quotas
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.load import LoadBook
from router.core.schedule.policies import POLICIES
from router.core.scheduler import Scheduler, ShadowComparison
from router.fleet.background import Background
from router.fleet.discovery import Discovery, FleetAccess
from router.fleet.health_probe import Finding, HealthProbes
from router.fleet.report_reader import is_same_but_load
from router.http.call_keys import CallKeys
from router.http.engine_connection import EngineLost
from router.http.engine_pool import EnginePool
from router.http.fetch import FetchedStream, fetch, stream
from router.http.pool_transport import PoolTransport
from router.kv.feeds import KvFeeds
from router.processes.shared_quotas import SharedQuotas
from router.processes.supervisor import ProcessMember
from router.request.cold_starts import ColdStarts, ScaleFromZero
from router.request.engine_body import dialect_of
from router.request.pauses import PauseGate
from router.request.queue import RequestQueue
from router.request.services import Services
from router.request.stages import match
from router.telemetry.metrics import RouterMetrics
from router.tokenizing.tokenizers import Tokenizers
from workers.wire import Metadata

if TYPE_CHECKING:
    from router.gateway.server import PickerServer

log = structlog.get_logger()

# Agents and orchestrators send keep-alives more often.
_LISTEN_IDLE_S = 60.0


@dataclass(slots=True, kw_only=True)
class WorkerListener:
    """Passes the workers' reports on to the services that use them (a discovery.Listener).

    learning  tasks that fetch tokenizers; a router that stops ends them
    followed  each worker's report that the feeds have got last
    lines     limits the log lines about tokenizers that could not be fetched
    """

    feeds: KvFeeds
    load: LoadBook
    accuracy: PredictionAccuracy
    breaker: CircuitBreaker
    tokenizers: Tokenizers
    metrics: RouterMetrics
    learning: BackgroundTasks
    followed: dict[WorkerId, Metadata] = field(default_factory=dict)
    lines: RepeatLimiter = field(default_factory=RepeatLimiter)

    def on_report(self, replica: Replica, metadata: Metadata) -> None:
        """Apply a report to load, metrics and feeds; a task fetches the tokenizer of a ready, unprobed engine."""
        self.load.apply_report(replica)
        self.metrics.prefill_rate.labels(replica.id).set(replica.report.prefill_tokens_per_s)
        self.metrics.decode_rate.labels(replica.id).set(replica.report.decode_tokens_per_s)
        before = self.followed.get(replica.id)
        if before is None or not is_same_but_load(before, metadata):
            self.followed[replica.id] = metadata
            self.feeds.update_worker(replica.id, replica.base_model, replica.block_size, metadata)
        if replica.state == "ready" and not self.tokenizers.has_probed(
            replica.base_model, _restartable_incarnation(replica)
        ):
            self.learning.spawn(self._fetch_tokenizer(replica))

    def on_agent_silent(self, worker: WorkerId) -> None:
        """Forget the load that a worker reported last: it is outdated."""
        self.load.forget_report(worker)

    def on_gone(self, worker: WorkerId) -> None:
        """Forget all that is known of a worker, its metrics included."""
        self.followed.pop(worker, None)
        self.feeds.forget(worker)
        self.load.forget(worker)
        self.accuracy.forget(worker)
        self.breaker.forget(worker)
        self.tokenizers.forget(worker)
        self.metrics.forget_worker(worker)

    async def _fetch_tokenizer(self, replica: Replica) -> None:
        """Fetch the tokenizer of this replica's base model, or log why not: the next report tries again."""
        try:
            await self.tokenizers.load_or_probe(
                replica.base_model,
                agent_url=replica.agent_url,
                engine_url=replica.engine_url if dialect_of(replica.dialect, "").has_tokenize else "",
                incarnation=_restartable_incarnation(replica),
            )
        except (httpx.HTTPError, ValueError) as exc:
            # The next report comes in a second, and tries again.
            if failures := self.lines.count(replica.base_model):
                log.warning(
                    "tokenizer not fetched yet",
                    base_model=replica.base_model,
                    worker=replica.id,
                    error=repr(exc),
                    failures=failures,
                )


def _restartable_incarnation(replica: Replica) -> Incarnation:
    """The replica's incarnation; without a boot id where a restart of its engine would not change that."""
    return replica.incarnation if has_start_time(replica.engine_boot_id) else (replica.id, "")


def make_scheduler(
    config: RouterSettings,
    discovery: Discovery,
    feeds: KvFeeds,
    load: LoadBook,
    breaker: CircuitBreaker,
    metrics: RouterMetrics,
) -> Scheduler:
    """A Scheduler with the configured policy, shadow policies, costs, circuits and retry budget."""
    return Scheduler(
        roster=lambda base_model: discovery.fleet.roster(base_model),  # noqa: PLW0108  (`fleet` is swapped)
        match=partial(match, feeds),
        policy=POLICIES[config.policy](),
        shadows=[POLICIES[name]() for name in config.shadow_policies],
        on_shadow=lambda shadow: _record_shadow(metrics, shadow),
        on_shadow_failure=lambda name, exc: _record_shadow_failure(metrics, name, exc),
        costs=CostSettings(**config.costs),
        late_binding_s=config.late_binding_s,
        most_in_flight_tokens=config.max_in_flight_tokens,
        fairness=config.fairness,
        breaker=breaker,
        budget=lambda: RetryBudget(share=config.retry_share, floor_per_s=config.retry_floor_per_s),
        load=load,
    )


def tenant_share(config: RouterSettings, keys: ApiKeys) -> float:
    """Share of a queue that one tenant may take."""
    return 1.0 if keys.is_open else config.tenant_share  # without keys there is one tenant


def make_quotas(config: RouterSettings, me: ProcessMember | None, router_id: str) -> Quotas:
    """The accounts of limited keys: with an orchestrator of a first share of each limit, else of all of it."""
    shares = LimitShares() if config.orchestrator_url else LimitShares(idle_share=1.0)
    if me is None:
        return Quotas(shares=shares, group=router_id)
    return Quotas(SharedQuotas(me.accounts, me.slot, me.processes), shares=shares, group=me.quota_group)


def make_background(config: RouterSettings, keys: ApiKeys, discovery: Discovery, agents: EnginePool) -> Background:
    """The follower of background responses, bounded by the settings."""

    async def ask(replica: Replica, response_id: str) -> bytes:
        """Get a response by its id from the replica's engine. Raises EngineLost and FetchRefused."""
        # Not on the connections of requests: an engine that answers this may still be unable to compute.
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
        tenant_share=tenant_share(config, keys),
        timeout_s=config.background_timeout_s,
    )


def make_health_probes(
    config: RouterSettings, scheduler: Scheduler, agents: EnginePool, metrics: RouterMetrics
) -> HealthProbes:
    """The probes that a doubtful circuit asks for; results go back to the scheduler."""

    async def ask(replica: Replica, path: str, body: bytes) -> bytes:
        """Post this body to the replica's engine; the answer's body. Raises EngineLost and FetchRefused."""
        return await fetch(
            agents,
            replica.engine_url,
            path,
            token="" if replica.agent_url else config.engine_key,
            body=body,
            timeout_s=config.control_timeout_s,
        )

    def on_finding(replica: Replica, finding: Finding) -> None:
        """Count a probe's finding, and report it to the scheduler, unless it is unknown."""
        metrics.circuit_looks.labels(finding).inc()
        if finding != "unknown":
            scheduler.record_probe(replica, time.monotonic(), is_well=finding == "well")

    return HealthProbes(ask, on_finding)


async def fetch_as_router(agents: EnginePool, call_keys: CallKeys, url: str, path: str, **more: Any) -> bytes:
    """Fetch from an agent or the orchestrator with the key for it. Raises as `fetch`; FetchRefused without a proof."""
    key = await call_keys.key_for(url)
    try:
        return await fetch(agents, url, path, token=key, **more)
    except EngineLost:
        call_keys.proofs.forget(url)  # by the next call another may have the address
        raise


@contextlib.asynccontextmanager
async def _stream_as_router(
    agents: EnginePool, call_keys: CallKeys, url: str, path: str
) -> AsyncIterator[FetchedStream]:
    """Open a stream of an agent or the orchestrator with the key for it. Raises as `stream`, and FetchRefused."""
    key = await call_keys.key_for(url)
    async with stream(agents, url, path, token=key, idle_s=_LISTEN_IDLE_S) as answer:
        yield answer


def make_fleet_access(
    config: RouterSettings, control: httpx.AsyncClient, agents: EnginePool, call_keys: CallKeys, metrics: RouterMetrics
) -> FleetAccess:
    """The way to the orchestrator, agents, engines and Kubernetes. Raises KubeConfigError."""
    slices = None
    if config.kube_selector:
        slices = SliceWatch(
            partial(open_client, find_access_source(config.kubeconfig, os.environ, ACCOUNT)),
            selector=config.kube_selector,
            namespaces=config.kube_namespaces,
            on_failure=partial(_record_slices_failure, metrics),
        )
    return FleetAccess(
        control=control,
        get=partial(fetch_as_router, agents, call_keys, timeout_s=config.control_timeout_s),
        get_from_engine=partial(fetch, agents, timeout_s=config.control_timeout_s),
        open_stream=partial(_stream_as_router, agents, call_keys),
        slices=slices,
    )


def client_limits(config: RouterSettings, keys: ApiKeys) -> ClientLimits:
    """The listener's limits on clients, from the settings. Without API keys, tenants have no limit of their own."""
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
    """The circuit rules of the settings."""
    return BreakerRules(
        failures=config.breaker_failures,
        eject_share=config.breaker_eject_share,
        open_s=config.breaker_open_s,
        most_open_s=max(config.breaker_open_s, config.breaker_max_open_s),
        silent_s=config.breaker_silent_s,
        trial_s=config.trial_timeout_s,
    )


def _record_circuit(metrics: RouterMetrics, replica: Replica, state: CircuitState, why: str) -> None:
    """Set the metrics of a replica's circuit, and log its new state."""
    metrics.circuit_open.labels(replica.id).set(state == "open")
    if state == "open":
        metrics.circuit_openings.labels(replica.id, why).inc()
    log.warning("circuit changed", worker=replica.id, state=state, why=why)


def _record_shadow(metrics: RouterMetrics, shadow: ShadowComparison) -> None:
    """Count a shadow policy's decision, whether it agrees, and its cost."""
    metrics.shadow_decisions.labels(shadow.policy, "yes" if shadow.agrees else "no").inc()
    metrics.shadow_cost.labels(shadow.policy).inc(shadow.cost_s)


def _record_shadow_failure(metrics: RouterMetrics, name: str, exc: Exception) -> None:
    """Count and log a shadow policy that failed."""
    metrics.shadow_decisions.labels(name, "failed").inc()
    log.warning("shadow policy failed", policy=name, error=repr(exc))


def _record_slices_failure(metrics: RouterMetrics, exc: Exception) -> None:
    """Count a failure of the slice watch, unless it is the API server's."""
    if not isinstance(exc, KubeError | KubeConfigError):  # what the API server says or does not say shows as age
        metrics.loop_failures.labels("slices").inc()


def make_control_client(config: RouterSettings, own_key: OwnKey, agents: EnginePool) -> httpx.AsyncClient:
    """The HTTP client for calls to the orchestrator, over this pool. Calls to agents name their key."""
    return httpx.AsyncClient(
        timeout=config.control_timeout_s,
        auth=own_key,
        headers=WIRE_HEADERS,
        transport=PoolTransport(agents),
        trust_env=False,
    )


def make_circuit_breaker(config: RouterSettings, metrics: RouterMetrics) -> CircuitBreaker:
    """The circuit breaker, whose changes are counted and logged."""
    return CircuitBreaker(_breaker_rules(config), partial(_record_circuit, metrics))


def make_tokenizers(
    config: RouterSettings, control: httpx.AsyncClient, call_keys: CallKeys, metrics: RouterMetrics
) -> Tokenizers:
    """The tokenizers of all base models."""
    return Tokenizers(
        control,
        agent_headers=call_keys.headers_for,
        mode=config.tokenizer,
        paths=config.tokenizer_paths,
        remote_timeout_s=config.tokenize_timeout_s,
        metrics=metrics,
    )


def make_request_queue(
    config: RouterSettings, keys: ApiKeys, scheduler: Scheduler, metrics: RouterMetrics
) -> RequestQueue:
    """The queue of requests for which no engine has room."""
    return RequestQueue(
        scheduler,
        metrics,
        most_waiting=config.max_waiting_requests,
        most_wait_s=config.max_wait_s,
        clock=time.monotonic,
        most_waiting_bytes=config.max_waiting_bytes,
        tenant_share=tenant_share(config, keys),
    )


def make_pause_gate(config: RouterSettings, keys: ApiKeys, on_settled: Callable[[], object]) -> PauseGate:
    """The gate that holds paused requests, as many as may wait for engines; `on_settled` as in `PauseGate`."""
    limits = QueueLimits(config.max_waiting_requests, config.max_waiting_bytes, tenant_share(config, keys))
    return PauseGate(QueueUsage(limits), time.monotonic, on_settled)


def make_cold_starts(
    config: RouterSettings,
    keys: ApiKeys,
    agents: EnginePool,
    call_keys: CallKeys,
    discovery: Discovery,
    metrics: RouterMetrics,
) -> ColdStarts:
    """The queue of requests for cold adapters. Without API keys, a tenant may wait for any number of adapters."""
    start_s: dict[str, float] = {}
    for pool in config.scale_from_zero.values():
        start_s[pool.base_model] = max(pool.start_s, start_s.get(pool.base_model, 0.0))
    return ColdStarts(
        partial(fetch_as_router, agents, call_keys),
        discovery,
        metrics,
        config.orchestrator_url.rstrip("/"),
        config.cold_start_timeout_s,
        config.max_held_requests,
        max_held_bytes=config.max_held_bytes,
        tenant_share=tenant_share(config, keys),
        tenant_adapters=inf if keys.is_open else config.max_cold_adapters_per_tenant,
        silent_after_s=config.catalog_poll_s + config.control_timeout_s,
        gone_after_s=config.unreachable_after_s + config.failover_wait_s,
        from_zero=ScaleFromZero(start_s, config.scale_from_zero_wait_s, discovery.confirmation_due),
    )


class PickerUnavailable(Exception):
    """A port for gateways is configured but cannot be served; the message says what to do."""


def make_picker(
    config: RouterSettings, services: Services, intake: RequestIntake, *, is_shared: bool
) -> "PickerServer | None":
    """The server for gateways; None without a port for it.

    is_shared  other processes of this router listen on the port, too
    raises     PickerUnavailable
    """
    if config.ext_proc is None:
        return None
    try:
        from router.gateway.server import PickerServer  # noqa: PLC0415  (gRPC is an extra, and takes 0.1 s)
        from router.gateway.tls import credentials_of  # noqa: PLC0415
    except ImportError as exc:
        raise PickerUnavailable(
            f"ext_proc is {config.ext_proc}, but the package {exc.name} is missing: pip install 'lorafleet[gateway]',"
            " or unset it"
        ) from exc
    credentials = credentials_of(config.tls_files, is_self_signed=config.ext_proc_self_signed)
    return PickerServer(
        services, intake, host=config.host, port=config.ext_proc, is_shared=is_shared, credentials=credentials
    )
