"""Builds the router and joins its parts."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import httpx
import structlog
from fastapi import FastAPI

from lorafleet import logs, serve
from lorafleet.auth import KeyFileError, Keys, refuse_open_server
from lorafleet.http import install_error_handlers
from lorafleet.loops import forever
from lorafleet.settings import load_or_exit
from router.api import control_routes, health_routes
from router.cold import ColdStarts
from router.config import RouterSettings
from router.core.cost import Costs
from router.core.errors import RouterError
from router.core.fleet import Replica
from router.core.index import WorkerId
from router.core.load import LoadBook
from router.core.mind import Mind, Shadowed
from router.core.policies import POLICIES
from router.core.trust import Trust
from router.discovery import Discovery
from router.inference import Inference
from router.kv_events import Feeds
from router.metrics import Metrics
from router.parts import Parts
from router.relay.front import FrontLimits, front
from router.relay.upstream import Pool
from router.stages import match
from router.tokens import Tokenizers
from router.usage import Usage, send_usage
from router.waiting import WaitingRoom
from workers.wire import Metadata

log = structlog.get_logger()

_USAGE_EVERY_S = 1.0
# What workers that went have left in an index is cleaned up in steps of a millisecond or two.
_SWEEP_EVERY_S = 0.1
_SWEEP_BLOCKS = 5_000


class _Joined:
    """Hears of every worker and tells the parts that care."""

    def __init__(
        self, feeds: Feeds, load: LoadBook, trust: Trust, usage: Usage, tokenizers: Tokenizers, metrics: Metrics
    ) -> None:
        self._feeds = feeds
        self._load = load
        self._trust = trust
        self._metrics = metrics
        self._usage = usage
        self._tokenizers = tokenizers
        self._learning: set[asyncio.Task[None]] = set()

    def heard(self, replica: Replica, metadata: Metadata) -> None:
        self._load.reported(replica)
        self._metrics.prefill_rate.labels(replica.id).set(replica.report.prefill_tokens_per_s)
        self._metrics.decode_rate.labels(replica.id).set(replica.report.decode_tokens_per_s)
        self._feeds.hear(replica.id, replica.base_model, replica.block_size, metadata)
        if replica.state == "ready" and not self._tokenizers.knows(replica.base_model):
            task = asyncio.create_task(self._learn(replica))
            self._learning.add(task)
            task.add_done_callback(self._learning.discard)

    def gone(self, worker: WorkerId) -> None:
        self._feeds.forget(worker)
        self._load.forget(worker)
        self._trust.forget(worker)
        self._usage.forget(worker)
        self._metrics.forget_worker(worker)

    async def _learn(self, replica: Replica) -> None:
        try:
            await self._tokenizers.learn(replica.base_model, agent_url=replica.agent_url, engine_url=replica.engine_url)
        except (httpx.HTTPError, ValueError) as exc:
            # Heard again in a second, and tried again then.
            log.warning("tokenizer not fetched yet", base_model=replica.base_model, error=repr(exc))


def build(config: RouterSettings) -> tuple[FastAPI, Parts]:
    """The router's app and its parts; raises KeyFileError. Nothing runs before the app's lifespan begins."""
    keys = Keys(config.key_files)
    refuse_open_server(keys, config.host, allow_open=config.allow_open)
    metrics = Metrics()
    load = LoadBook()
    trust = Trust()
    orchestrator_url = config.orchestrator_url.rstrip("/")
    control = httpx.AsyncClient(
        timeout=config.control_timeout_s,
        headers={"authorization": f"Bearer {config.token}"} if config.token else {},
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        trust_env=False,
    )
    tokenizers = Tokenizers(
        control,
        mode=config.tokenizer,
        paths=config.tokenizer_paths,
        remote_timeout_s=config.tokenize_timeout_s,
        metrics=metrics,
    )
    feeds = Feeds(metrics, config.kv_tail_poll_s, trust, config.token)
    usage = Usage(config.router_id or f"{socket.gethostname()}-{os.getpid()}", load)
    if config.state_dir is not None:
        config.state_dir.mkdir(parents=True, exist_ok=True)
    discovery = Discovery(
        control,
        orchestrator_url=orchestrator_url,
        listener=_Joined(feeds, load, trust, usage, tokenizers, metrics),
        state_file=config.state_dir / "catalog.json" if config.state_dir else None,
        catalog_poll_s=config.catalog_poll_s,
        metadata_poll_s=config.metadata_poll_s,
        unreachable_after_s=config.unreachable_after_s,
        clock=time.monotonic,
        on_failure=lambda loop: metrics.loop_failures.labels(loop).inc(),
    )
    mind = Mind(
        roster=lambda base_model: discovery.fleet.roster(base_model),  # noqa: PLW0108  (`fleet` is swapped)
        match=lambda prompt: match(feeds, prompt),
        policy=POLICIES[config.policy](),
        shadows=[POLICIES[name]() for name in config.shadow_policies],
        shadowed=lambda shadow: _count_shadow(metrics, shadow),
        shadow_failed=lambda name, exc: _count_shadow_failure(metrics, name, exc),
        costs=Costs(**config.costs),
        late_binding_s=config.late_binding_s,
        load=load,
    )
    waiting = WaitingRoom(
        mind,
        metrics,
        most_waiting=config.max_waiting_requests,
        most_wait_s=config.max_wait_s,
        clock=time.monotonic,
    )
    cold = ColdStarts(
        control, discovery, metrics, orchestrator_url, config.cold_start_timeout_s, config.max_held_requests
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with control, aiohttp.ClientSession(auto_decompress=False, trust_env=False) as session:
            feeds.session = session
            running = [
                asyncio.create_task(discovery.run()),
                asyncio.create_task(waiting.run()),
                asyncio.create_task(_sweep(feeds, metrics)),
                asyncio.create_task(_report_usage(control, orchestrator_url, usage, discovery, metrics)),
            ]
            try:
                yield
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                await feeds.close()
                await parts.pool.close()
                tokenizers.close()

    app = FastAPI(title="lorafleet router", lifespan=lifespan)
    parts = Parts(
        config=config,
        keys=keys,
        discovery=discovery,
        tokenizers=tokenizers,
        feeds=feeds,
        mind=mind,
        waiting=waiting,
        trust=trust,
        cold=cold,
        usage=usage,
        metrics=metrics,
        pool=Pool(connect_s=config.connect_timeout_s),
    )
    app.include_router(control_routes(parts))
    app.include_router(health_routes(parts))
    install_error_handlers(app, RouterError)
    app.state.http = front(Inference(parts).route, FrontLimits(body_bytes=config.max_body_bytes))
    return app, parts


def _count_shadow(metrics: Metrics, shadow: Shadowed) -> None:
    metrics.shadow_decisions.labels(shadow.policy, "yes" if shadow.agrees else "no").inc()
    metrics.shadow_cost.labels(shadow.policy).inc(shadow.cost_s)


async def _sweep(feeds: Feeds, metrics: Metrics) -> None:
    async def step() -> None:
        for index in feeds.indexes.values():
            index.sweep(_SWEEP_BLOCKS)

    await forever(step, name="sweep", every_s=_SWEEP_EVERY_S, on_failure=metrics.loop_failures.labels("sweep").inc)


def _count_shadow_failure(metrics: Metrics, name: str, exc: Exception) -> None:
    metrics.shadow_decisions.labels(name, "failed").inc()
    log.warning("shadow policy failed", policy=name, error=repr(exc))


async def _report_usage(
    client: httpx.AsyncClient, url: str, usage: Usage, discovery: Discovery, metrics: Metrics
) -> None:
    async def step() -> None:
        await send_usage(client, url, usage, lambda: discovery.fleet.revision, time.monotonic)

    await forever(step, name="usage", every_s=_USAGE_EVERY_S, on_failure=metrics.loop_failures.labels("usage").inc)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM: then not ready, finish what is in flight, and return."""
    config = load_or_exit(RouterSettings, sys.argv[1:] if argv is None else argv, prog="python -m router")
    logs.configure("router", log_format=config.log_format, level=config.log_level)
    try:
        app, parts = build(config)
        sock = serve.bind(config.host, config.port)
    except (KeyFileError, OSError) as exc:
        sys.exit(f"python -m router: {exc}")

    def stopping() -> None:
        parts.stopping = True

    log.info("serving", host=config.host, port=sock.getsockname()[1], orchestrator=config.orchestrator_url)
    serve.run(
        lambda: serve.serve(
            app,
            sock,
            http=app.state.http,
            port_file=config.port_file,
            grace_s=config.grace_s,
            on_stop=stopping,
        )
    )
