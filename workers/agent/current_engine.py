"""The engine in use: its client, identity, measured load and KV ledger. All of it ends with that engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path

import structlog
from zmq import ZMQError

from lorafleet.engine.agentless import EngineLoad
from lorafleet.engine.metrics_page import EngineMetrics
from lorafleet.engine.rates import EngineRates
from lorafleet.engine.vllm_plugin.engine_reports import EngineProcessReport, read_engine_reports
from lorafleet.identity import KV_HASHING
from workers.agent.kv_ledger import KvLedgers
from workers.config import WorkerSettings
from workers.core.errors import EngineError
from workers.engines.base import EngineClient, EngineShape
from workers.metrics import WorkerMetrics
from workers.wire import DrainAnswer, Load, ModelCard, RuntimeConfig, Transport

log = structlog.get_logger()

_IDLE_POLL_S = 0.2
_IN_FLIGHT_VALID_S = 10.0  # an older number of requests in flight is ignored


class CurrentEngine:
    """One engine at a time; `client` is None while there is none.

    version     as the engine says it; "" if it does not
    reports     of its processes, on what they run adapters with; empty if they do not say
    lock        held while adapters are loaded or unloaded: each load stalls the whole engine
    suspicion   why the engine is suspected to hang, so that no load may begin; "" while it is trusted
    patience_s  seconds a suspect engine gets before it is restarted
    """

    def __init__(
        self, settings: WorkerSettings, metrics: WorkerMetrics, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.lock = asyncio.Lock()
        self.client: EngineClient | None = None
        self.boot_id = self.version = ""
        self.reports: tuple[EngineProcessReport, ...] = ()
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
        """Hold `lock` together with other users of `shared_lock`: the first acquires it, the last releases it."""
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

    async def attach(
        self, client: EngineClient, *, boot_id: str, transport: Transport, printed: EngineProcessReport | None = None
    ) -> None:
        """Use this healthy engine: read its shape, reset the measured rates, start KV ledgers. Raises EngineError.

        printed  what its output says of its LoRA kernels, for an engine whose processes write no reports
        """
        asked_at = self._clock()
        self._shape = await client.read_shape()
        written = await asyncio.to_thread(read_engine_reports, self._settings.lora_reports)
        self.reports = written or (() if printed is None else (printed,))
        self._boot_mark = self._shape.boot_mark or await client.boot_mark()
        self._load.begin(asked_at)
        self.client, self.boot_id = client, boot_id
        self.transport = await self._start_ledgers(transport)

    async def is_same_start(self) -> bool:
        """Ask the engine whether it has not restarted since `attach`; False without an engine. Raises EngineError."""
        return self.client is not None and await self.client.boot_mark() == self._boot_mark

    async def detach(self, reason: str) -> None:
        """Forget the engine, its suspicion and load, set the rates' gauges to 0 and close the KV ledgers.

        Keeps the reason.
        """
        self.client, self.boot_id, self._down_reason = None, "", reason
        self.clear_suspicion()
        await self.close_ledgers()
        self._load.forget_reading()
        self._metrics.set_rates(EngineRates())

    def require_client(self) -> EngineClient:
        """The engine's client; raises EngineError `engine_down` while there is none."""
        if self.client is None:
            raise EngineError("engine_down", f"the engine is down: {self._down_reason}", retry_after_s=5)
        return self.client

    def mark_suspect(self, reason: str, *, patience_s: float) -> None:
        """Record that the engine seems to hang, and how long it gets before a restart. The first mark's time stays."""
        if not self.suspicion:
            self._suspect_since = self._clock()
        self.suspicion, self.patience_s = reason, patience_s

    def clear_suspicion(self) -> None:
        """Record that the engine is trusted again, so that loads may begin."""
        self.suspicion = ""

    def set_requests_in_flight(self, in_flight: int) -> None:
        """Record how many requests routers have at this engine now; counts for 10 s."""
        self._in_flight = in_flight, self._clock()

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no requests, by its own metrics and by the routers' last reports."""
        in_flight, reported_at = self._in_flight
        return not self._load.has_work and not (in_flight > 0 and self._clock() - reported_at < _IN_FLIGHT_VALID_S)

    @property
    def has_computed_since_suspect(self) -> bool:
        """Whether a counter of the engine has moved since it became suspect."""
        return (self._load.moved_at or -inf) > self._suspect_since

    def stalled_s(self) -> float:
        """Seconds in which the engine had requests and computed nothing, at the last metrics reading.

        0 while it has no requests, by its own metrics and by the routers' reports.
        """
        read_at, moved_at = self._load.read_at, self._load.moved_at
        if self._busy_since is None or read_at is None or moved_at is None:
            return 0.0
        return max(0.0, read_at - max(self._busy_since, moved_at))

    @property
    def has_stalled(self) -> bool:
        """Whether the engine has computed nothing for longer than a step may take, so that it may hang."""
        return self.stalled_s() > self._settings.suspect_after_s + 2 * self.full_step_s()

    def _update_busy_since(self) -> None:
        """Update since when the engine has had requests; never while it is idle or an adapter is being loaded.

        The routers' reports count, too: vLLM 0.32 shows a request that began alone in no counter before its first step
        is over.
        """
        # A load stalls all requests (vLLM 0.32), and has its deadline.
        if self.is_idle or self.lock.locked():
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = self._clock()

    async def is_healthy(self) -> bool:
        """Ask the engine for its health; False without an engine or an answer in time."""
        client = self.client
        return client is not None and await client.is_healthy(timeout_s=self._settings.health_timeout_s)

    async def digests_in_use(self) -> frozenset[str]:
        """Digests in the engine's own list of adapters; empty without an engine. Raises EngineError.

        The engine may read those files at any moment.
        """
        client = self.client
        if client is None:
            return frozenset()
        return frozenset(Path(path).name for path in (await client.list_adapters()).values() if path)

    # --- KV blocks -----------------------------------------------------------------------------------------------

    async def _start_ledgers(self, transport: Transport) -> Transport:
        """Replace the KV ledgers by new ones if the engine publishes KV events; returns the transport for routers.

        An error of the sockets is logged: the engine works without a ledger.
        """
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
            # The engine works without a ledger; routers find the event sockets in the metadata and may read them.
            log.warning("no KV ledger", endpoints=transport.kv_events, error=str(exc))
            return transport
        return transport.model_copy(update={"kv_ledger": KV_HASHING})

    def kv_ledgers(self) -> KvLedgers:
        """The ledgers of the engine's KV blocks; raises EngineError `not_ready` while there are none."""
        if self._kv is None:
            message = "no KV ledger: the engine is not up, or publishes no KV events"
            raise EngineError("not_ready", message, retry_after_s=5)
        return self._kv

    def forget_adapter_blocks(self, engine_name: str) -> None:
        """Drop the ledger's blocks of an adapter that was just loaded again; no-op without a ledger."""
        if self._kv is not None:
            self._kv.forget_adapter(engine_name)

    def end_kv_streams(self) -> None:
        """End the streams of the current KV ledgers to routers, for good, so that the server can stop."""
        if self._kv is not None:
            self._kv.end_streams()

    async def close_ledgers(self) -> None:
        """Close the KV ledgers with their streams and sockets, and set their gauges to 0; no-op without ledgers."""
        ledgers, self._kv = self._kv, None
        self.transport = self.transport.model_copy(update={"kv_ledger": 0})
        if ledgers is not None:
            ledgers.update_gauges()
            self._metrics.clear_ledger()
            await ledgers.close()

    # --- measured load -------------------------------------------------------------------------------------------

    async def scrape(self) -> None:
        """Read the engine's metrics and update its load, its measured rates and their gauges. Raises EngineError.

        Does nothing while no engine is attached.
        """
        if self.client is None:
            return
        self._update_busy_since()
        self._load.add(await self.client.scrape(), self._clock())
        self._metrics.set_rates(self._load.rates)

    async def wait_until_idle(self, *, deadline_s: float, quiet_s: float) -> DrainAnswer:
        """Wait until the engine has had no requests for `quiet_s`, or until the deadline. Refuses no requests.

        One reading is not enough: vLLM counts a request only after its first step (see AgentTimers).
        raises  EngineError `engine_timeout` if the engine's metrics cannot be read until the deadline
        """
        deadline = self._clock() + deadline_s
        quiet_since = self._clock()
        last_scrape: EngineMetrics | None = None
        while True:
            left_s = deadline - self._clock()
            client = self.client
            try:
                async with asyncio.timeout(max(1.0, left_s)):
                    scrape = await client.scrape() if client is not None else EngineMetrics()
            except (EngineError, TimeoutError) as exc:  # no metrics is not idle: try again until the deadline
                if self._clock() >= deadline:
                    message = "draining, but the engine's metrics cannot be read; try again"
                    raise EngineError("engine_timeout", message, retry_after_s=2) from exc
                await asyncio.sleep(_IDLE_POLL_S)
                quiet_since = self._clock()
                continue
            now = self._clock()
            left_s = deadline - now
            is_idle = scrape.running + scrape.waiting == 0 and scrape.ended == (last_scrape or scrape).ended
            if not is_idle:
                quiet_since = now
            last_scrape = scrape
            if now - quiet_since >= quiet_s or left_s <= 0:
                return DrainAnswer(is_drained=is_idle, running=scrape.running, waiting=scrape.waiting)
            await asyncio.sleep(min(_IDLE_POLL_S, left_s))

    def full_step_s(self) -> float:
        """Seconds of an engine step full of prefill tokens; 0 until the prefill rate is measured."""
        prefill_tokens_per_s = self._load.rates.prefill_tokens_per_s
        return self._settings.max_num_batched_tokens / prefill_tokens_per_s if prefill_tokens_per_s else 0.0

    def update_gauges(self) -> None:
        """Set the KV ledgers' gauges and add to their counters."""
        if self._kv is not None:
            self._kv.update_gauges()

    def model_card(self) -> ModelCard:
        """The base model's names, and the engine's shape: as the engine reports it, else as the settings say."""
        settings, shape, reported = self._settings, self._shape, self._shape.runtime
        name = shape.model_name or settings.model_name
        return ModelCard(
            name=name,
            base_model=settings.base_name or name,
            path=shape.model_path,
            runtime_config=RuntimeConfig(
                block_size=reported.block_size or settings.block_size or 0,
                total_kv_blocks=reported.total_kv_blocks or settings.num_gpu_blocks_override or 0,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_model_len=reported.max_model_len or settings.max_model_len or 0,
                caches_prefixes=reported.caches_prefixes,
            ),
        )

    def load_figures(self, *, load_seconds: float) -> Load:
        """The engine's load at the last reading, its measured rates, and the given load time, as /metadata has them."""
        return self._load.current(self._clock(), load_seconds=load_seconds)
