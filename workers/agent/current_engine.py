"""The engine in use: who it is, what it says of itself, and its ledger. Nothing here outlives that engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path

import structlog
from zmq import ZMQError

from lorafleet.engine.agentless import EngineLoad
from lorafleet.engine.rates import EngineRates
from lorafleet.identity import KV_HASHING
from workers.agent.kv_ledger import KvLedgers
from workers.config import WorkerSettings
from workers.core.errors import EngineError
from workers.engines.base import EngineClient, EngineShape
from workers.metrics import WorkerMetrics
from workers.wire import Load, ModelCard, RuntimeConfig, Transport

log = structlog.get_logger()

_IN_FLIGHT_VALID_S = 10.0  # what the orchestrator said of our requests is of no use later


class CurrentEngine:
    """One engine at a time. `lock` is held by whoever changes what it holds: each load stalls it for everybody.

    `shared_lock` is the same lock, held together by all who ask for it so.

    suspicion   why no load may begin: the engine hangs, in the last one or else; empty while the engine is trusted
    patience_s  how long it may go on doing so
    """

    def __init__(
        self, settings: WorkerSettings, metrics: WorkerMetrics, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lock = asyncio.Lock()
        self.client: EngineClient | None = None
        self.boot_id = ""
        self.transport = Transport(engine_url="")
        self.suspicion = ""
        self.patience_s = 0.0
        self._in_flight = (0, -inf)
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._kv: KvLedgers | None = None
        self._shape = EngineShape()
        self._boot_mark = ""
        self._load = EngineLoad()
        self._suspect_since = -inf
        self._busy_since: float | None = None
        self._down_reason = ""
        self._sharers_lock = asyncio.Lock()
        self._sharers = 0

    @asynccontextmanager
    async def shared_lock(self) -> AsyncIterator[None]:
        """`lock`, together with others who take it so: the first waits for it, the last gives it back."""
        async with self._sharers_lock:
            if not self._sharers:
                await self.lock.acquire()
            self._sharers += 1
        try:
            yield
        finally:
            self._sharers -= 1
            if not self._sharers:
                self.lock.release()

    async def attach(self, client: EngineClient, *, boot_id: str, transport: Transport) -> None:
        """Take a healthy engine into use. Raises EngineError."""
        self._shape = await client.shape()
        self._boot_mark = self._shape.mark or await client.boot_mark()
        self._load.rates = EngineRates()
        self.client, self.boot_id = client, boot_id
        self.transport = await self._start_ledgers(transport)

    async def is_same_start(self) -> bool:
        """Whether the engine that answers is still the one taken into use. Raises EngineError."""
        return self.client is not None and await self.client.boot_mark() == self._boot_mark

    async def detach(self, reason: str) -> None:
        """The engine is gone, and what was known of it."""
        self.client, self.boot_id, self._down_reason = None, "", reason
        self.clear_suspicion()
        await self.close_ledgers()
        self._load.forget_reading()
        self._metrics.rates(EngineRates())

    def require_client(self) -> EngineClient:
        """The engine; raises EngineError `engine_down` while there is none."""
        if self.client is None:
            raise EngineError("engine_down", f"the engine is down: {self._down_reason}", retry_after_s=5)
        return self.client

    def mark_suspect(self, reason: str, *, patience_s: float) -> None:
        """It hangs, whatever its health route says."""
        if not self.suspicion:
            self._suspect_since = self._clock()
        self.suspicion, self.patience_s = reason, patience_s

    def clear_suspicion(self) -> None:
        self.suspicion = ""

    def set_requests_in_flight(self, in_flight: int) -> None:
        """So many requests routers have there now."""
        self._in_flight = in_flight, self._clock()

    @property
    def has_computed_since_suspect(self) -> bool:
        """Whether it has computed something since it is suspect."""
        return (self._load.moved_at or -inf) > self._suspect_since

    def stalled_s(self) -> float:
        """For how long it had had requests and computed nothing when it was last read; 0 while it has none, as far as
        it or routers know.
        """
        read_at, moved_at = self._load.read_at, self._load.moved_at
        if self._busy_since is None or read_at is None or moved_at is None:
            return 0.0
        return max(0.0, read_at - max(self._busy_since, moved_at))

    @property
    def has_stalled(self) -> bool:
        """Whether it has computed nothing for so long that it may hang: longer than a step may take."""
        return self.stalled_s() > self._settings.suspect_after_s + 2 * self.full_step_s()

    def _update_busy_since(self) -> None:
        """A request that began while nothing else ran shows in no counter of vLLM 0.32 before its first step is over:
        of those routers tell.
        """
        now = self._clock()
        in_flight, reported_at = self._in_flight
        has_work = self._load.has_work or (in_flight > 0 and now - reported_at < _IN_FLIGHT_VALID_S)
        # A load stalls all else there (vLLM 0.32), and has a deadline of its own.
        if not has_work or self.lock.locked():
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now

    async def is_healthy(self) -> bool:
        client = self.client
        return client is not None and await client.is_healthy(timeout_s=self._settings.health_timeout_s)

    async def digests_in_use(self) -> frozenset[str]:
        """Digests whose files the engine may read at any moment, by its own list. Raises EngineError."""
        client = self.client
        if client is None:
            return frozenset()
        return frozenset(Path(path).name for path in (await client.adapters()).values() if path)

    # --- its blocks ----------------------------------------------------------------------------------------------

    async def _start_ledgers(self, transport: Transport) -> Transport:
        """Begin the ledger of an engine that publishes KV events, and say so where routers look."""
        await self.close_ledgers()
        model_card = self.model_card()
        block_size = model_card.runtime_config.block_size
        if not transport.kv_events or not block_size:
            return transport
        try:
            self._kv = KvLedgers(
                transport=transport,
                base_model=model_card.base_model,
                block_size=block_size,
                engine_boot_id=self.boot_id,
                metrics=self._metrics,
                total_blocks=model_card.runtime_config.total_kv_blocks,
            )
        except (ZMQError, ValueError) as exc:
            # The engine serves well without; routers find the sockets in the metadata and may do better.
            log.warning("no KV ledger", endpoints=transport.kv_events, error=str(exc))
            return transport
        return transport.model_copy(update={"kv_ledger": KV_HASHING})

    def kv_ledgers(self) -> KvLedgers:
        """The ledger of the engine's blocks; raises EngineError `not_ready` while there is none."""
        if self._kv is None:
            message = "no KV ledger: the engine is not up, or publishes no KV events"
            raise EngineError("not_ready", message, retry_after_s=5)
        return self._kv

    def forget_adapter_blocks(self, engine_name: str) -> None:
        """The ledger's blocks of an adapter that was loaded anew."""
        if self._kv is not None:
            self._kv.forget_adapter(engine_name)

    def end_kv_streams(self) -> None:
        if self._kv is not None:
            self._kv.end_streams()

    async def close_ledgers(self) -> None:
        """Nothing of the engine's blocks is known any more."""
        ledgers, self._kv = self._kv, None
        self.transport = self.transport.model_copy(update={"kv_ledger": 0})
        if ledgers is not None:
            ledgers.update_gauges()
            self._metrics.no_ledger()
            await ledgers.close()

    # --- its counters --------------------------------------------------------------------------------------------

    async def scrape(self) -> None:
        """Read the engine's own counters. Raises EngineError."""
        if self.client is None:
            return
        self._update_busy_since()
        self._load.add(await self.client.scrape(), self._clock())
        self._metrics.rates(self._load.rates)

    def full_step_s(self) -> float:
        """How long a step full of prompts takes there; 0 while it is not known how fast they are read."""
        prefill_tokens_per_s = self._load.rates.prefill_tokens_per_s
        return self._settings.max_num_batched_tokens / prefill_tokens_per_s if prefill_tokens_per_s else 0.0

    def update_gauges(self) -> None:
        """Bring the ledger's gauges up to date."""
        if self._kv is not None:
            self._kv.update_gauges()

    def model_card(self) -> ModelCard:
        """The base model: by the engine's own name and shape where it says them, and by the fleet's name for it."""
        settings, shape = self._settings, self._shape
        name = shape.model_name or settings.model_name
        return ModelCard(
            name=name,
            base_model=settings.base_name or name,
            runtime_config=RuntimeConfig(
                block_size=shape.block_size or settings.block_size or 0,
                total_kv_blocks=shape.total_kv_blocks or settings.num_gpu_blocks_override or 0,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_model_len=shape.max_model_len or settings.max_model_len or 0,
            ),
        )

    def load_figures(self, *, load_seconds: float) -> Load:
        """The last reading, and what all of them taught."""
        return self._load.figures(self._clock(), load_seconds=load_seconds)
