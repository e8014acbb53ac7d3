"""The services that every stage works with; built once by app.py."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from lorafleet.keys.auth import ApiKeys
from lorafleet.service.loops import DelayedCalls
from lorafleet.telemetry.request_log import RequestLog
from router.config import RouterSettings
from router.core.failover.poison import PoisonRequests
from router.core.fleet import Incarnation
from router.core.kv.cache_disclosure import CacheDisclosure
from router.core.kv.prediction_accuracy import PredictionAccuracy
from router.core.kv.private_caches import PrivateCaches
from router.core.kv.tree import SentPrompts
from router.core.queue.budgets import Budgets
from router.core.queue.quota import Quotas
from router.core.scheduler import Scheduler
from router.fleet.background import Background
from router.fleet.discovery import Discovery
from router.fleet.traffic import TrafficLog
from router.http.engine_pool import EnginePool
from router.kv.feeds import KvFeeds
from router.request.cold_starts import ColdStarts
from router.request.pauses import PauseGate
from router.request.queue import RequestQueue
from router.request.record import Decisions
from router.telemetry.metrics import RouterMetrics
from router.telemetry.tracing import Tracer
from router.tokenizing.prompt_cache import BlockHashCache
from router.tokenizing.tokenizers import Tokenizers

# A routed prompt counts as cached until its first token, and for so long afterwards: then the engine's events say so.
_SPECULATE_S = 2.0


@dataclass(slots=True)
class Services:
    """The services that every stage works with.

    signatures    of each engine, the bytes that it signs its streams with
    speculations  pending blocks of answered prompts, which are removed after a while
    """

    config: RouterSettings
    keys: ApiKeys
    discovery: Discovery
    tokenizers: Tokenizers
    feeds: KvFeeds
    scheduler: Scheduler
    queue: RequestQueue
    accuracy: PredictionAccuracy
    cold_starts: ColdStarts
    usage: TrafficLog
    metrics: RouterMetrics
    pool: EnginePool
    background: Background
    poison_requests: PoisonRequests
    poison_adapters: PoisonRequests
    pauses: PauseGate
    quotas: Quotas = field(default_factory=Quotas)
    budgets: Budgets = field(default_factory=Budgets)
    requests: RequestLog = field(default_factory=lambda: RequestLog("router"))
    tracer: Tracer | None = None
    private_caches: PrivateCaches = field(default_factory=PrivateCaches)
    cache_disclosure: CacheDisclosure = field(default_factory=CacheDisclosure)
    chain_cache: BlockHashCache = field(default_factory=BlockHashCache)
    clock: Callable[[], float] = time.monotonic
    decisions: Decisions = field(default_factory=Decisions)
    sent_prompts: SentPrompts = field(default_factory=SentPrompts)
    signatures: dict[str, bytes] = field(default_factory=dict)
    speculations: DelayedCalls = field(default_factory=lambda: DelayedCalls(_SPECULATE_S))
    stopping: bool = False
    has_failed: bool = False
    suspect_locks: dict[Incarnation, asyncio.Lock] = field(default_factory=dict)
    suspects_at: Counter[Incarnation] = field(default_factory=Counter)

    @asynccontextmanager
    async def alone(self, incarnation: Incarnation) -> AsyncIterator[None]:
        """Hold an engine's turn, and wait for it first: each engine gets one request at a time that may be poison."""
        lock = self.suspect_locks.setdefault(incarnation, asyncio.Lock())
        self.suspects_at[incarnation] += 1
        try:
            async with lock:
                yield
        finally:
            self.suspects_at[incarnation] -= 1
            # Not before the last request has gone: a lock that another one waits for looks free for a moment.
            if not self.suspects_at[incarnation]:
                del self.suspects_at[incarnation], self.suspect_locks[incarnation]
