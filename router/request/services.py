"""The services that every stage works with, and the record that is kept of each decision; built once by app.py."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf

import msgspec

from lorafleet.keys.auth import ApiKeys
from lorafleet.service.loops import DelayedCalls
from lorafleet.telemetry.request_log import RequestLog
from router.config import RouterSettings
from router.core.failover.poison import PoisonRequests
from router.core.fleet import Incarnation
from router.core.kv.cache_disclosure import CacheDisclosure
from router.core.kv.prediction_accuracy import PredictionAccuracy, TrustState
from router.core.queue.quota import Quotas
from router.core.schedule.policy import Decision
from router.core.scheduler import Scheduler
from router.fleet.background import Background
from router.fleet.discovery import Discovery
from router.fleet.usage_report import UsageCounts
from router.http.engine_pool import EnginePool
from router.kv.feeds import KvFeeds
from router.request.cold_starts import ColdStarts
from router.request.pauses import PauseGate
from router.request.queue import RequestQueue
from router.telemetry.metrics import RouterMetrics
from router.telemetry.tracing import Tracer
from router.tokenizing.prompt_cache import BlockHashCache
from router.tokenizing.tokenizers import Tokenizers
from router.tokenizing.tokens import Source

# Kept decisions, and seconds between two of them under load: they reach back ten seconds or more. All others are freed
# while they are in the processor's caches: 3 to 5 us less a request at 64 replicas.
_KEPT_DECISIONS, _KEPT_EVERY_S = 1000, 0.01
_KEPT_S = _KEPT_DECISIONS * _KEPT_EVERY_S
# A routed prompt counts as cached until its first token, and for so long afterwards: then the engine's events say so.
_SPECULATE_S = 2.0


class RequestRecord(msgspec.Struct):
    """One decision, and its result. Without the prompt's hashes: a thousand long ones add up.

    at             wall clock
    waited_s       in the router's queue, for what `queued_for` says; empty: it was sent at once
    first_data_s   from dispatch to first token or whole answer; None: there is none yet
    cached_tokens  in the engine's usage; None: it reported none
    tenant         of the caller; empty: none
    """

    request_id: str
    at: float
    tokens_from: Source
    decision: Decision
    trust: TrustState
    waited_s: float = 0.0
    queued_for: str = ""
    first_data_s: float | None = None
    cached_tokens: int | None = None
    tenant: str = ""


class Decisions(deque[RequestRecord]):
    """The newest decisions; under load a sample of them."""

    __slots__ = ("_full_at",)

    def __init__(self) -> None:
        super().__init__(maxlen=_KEPT_DECISIONS)
        self._full_at = -inf

    def add(self, record: RequestRecord, now: float) -> None:
        """Keep this record, unless so many came lately that the kept ones would reach back less than ten seconds."""
        full_at = max(self._full_at, now)
        if full_at - now < _KEPT_S:
            self._full_at = full_at + _KEPT_EVERY_S
            self.append(record)


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
    usage: UsageCounts
    metrics: RouterMetrics
    pool: EnginePool
    background: Background
    poison_requests: PoisonRequests
    poison_adapters: PoisonRequests
    pauses: PauseGate
    quotas: Quotas = field(default_factory=Quotas)
    requests: RequestLog = field(default_factory=lambda: RequestLog("router"))
    tracer: Tracer | None = None
    cache_disclosure: CacheDisclosure = field(default_factory=CacheDisclosure)
    chain_cache: BlockHashCache = field(default_factory=BlockHashCache)
    clock: Callable[[], float] = time.monotonic
    decisions: Decisions = field(default_factory=Decisions)
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
