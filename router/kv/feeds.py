"""What every replica has cached, followed: from its agent's ledger where there is one, else from the engine itself.

An agent's ledger is exact however late we come: one snapshot, then changes. Without it (an older agent, or one that
cannot be reached) the engine's own sockets are followed with a ledger of ours, which knows what the engine still has in
its buffer and what comes from then on. Both end in the index, and `PredictionAccuracy` keeps how accurate it is.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from lorafleet.engine.agentless import process_boot_id
from lorafleet.identity import BlockHash
from lorafleet.kv.ledger import TRAITS
from lorafleet.kv.subscribe import SubscriberHub
from lorafleet.kv.turns import LoopTurns
from lorafleet.service.loops import forever
from router.core.fleet import Replica
from router.core.kv.estimate import CacheEstimate, PredictedCache
from router.core.kv.index import KvIndex, WorkerId
from router.core.kv.prediction_accuracy import PredictionAccuracy
from router.core.schedule.request import PrefixMatch
from router.http.engine_pool import EnginePool
from router.kv.feed import KvSource, WorkerFeed, member_name
from router.telemetry.metrics import RouterMetrics
from workers.wire import Metadata

_MAINTAIN_S = 1.0
_NO_RANK = 1 << 30
_UNKNOWN_BLOCKS = 100_000
_MOST_LOADED = 1000
"""Names of a worker's adapters, loaded and unloaded, whose last load is remembered."""


async def no_key(_url: str) -> str:
    """No key: for agents without key files."""
    return ""


@dataclass(frozen=True, slots=True)
class _EventlessWorker:
    """A worker whose engine publishes no KV events."""

    engine_boot_id: str
    by: CacheEstimate
    most_blocks: int


@dataclass(slots=True)
class KvFeeds:
    """The KV feeds of all workers, and an index for each (base model, block size).

    approximate        indexes for prompts that were not tokenized, estimated from what this router sent. Their hashes
                       are of another kind than those in `indexes`
    pool               connections to agents, for their ledgers; None: engines are followed themselves
    agent_key          the key for an agent at a URL; raises FetchRefused for one that does not prove its address
    turns              turns of the event loop that all feeds share, so that requests come between
    fall_back_after_s  seconds without an answer of an agent, after which its engine is followed itself
    running            the feed of each worker that has one
    """

    metrics: RouterMetrics
    tail_poll_s: float
    accuracy: PredictionAccuracy = field(default_factory=PredictionAccuracy)
    agent_key: Callable[[str], Awaitable[str]] = no_key
    pool: EnginePool | None = None
    turns: LoopTurns = field(default_factory=LoopTurns)
    fall_back_after_s: float = 3.0
    indexes: dict[tuple[str, int], KvIndex] = field(default_factory=dict)
    approximate: dict[tuple[str, int], KvIndex] = field(default_factory=dict)
    running: dict[WorkerId, WorkerFeed] = field(default_factory=dict)
    _estimates: dict[tuple[str, int], CacheEstimate] = field(default_factory=dict)
    _estimated: dict[WorkerId, _EventlessWorker] = field(default_factory=dict)
    _sent: dict[tuple[str, int], CacheEstimate] = field(default_factory=dict)
    _most_blocks: dict[WorkerId, int] = field(default_factory=dict)
    _loaded: dict[WorkerId, dict[str, str | None]] = field(default_factory=dict)
    _rank_of: dict[WorkerId, tuple[WorkerId, int]] = field(default_factory=dict)
    _hub: SubscriberHub | None = None
    _maintenance: asyncio.Task[None] | None = None
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def followed_workers(self) -> frozenset[WorkerId]:
        """The workers with a feed of KV events."""
        return frozenset(self.running)

    def index(self, base_model: str, block_size: int, *, is_approximate: bool = False) -> KvIndex:
        """The index of this base model at this block size; a new one is added where there is none."""
        indexes = self.approximate if is_approximate else self.indexes
        found = indexes.get((base_model, block_size))
        if found is None:
            found = indexes[base_model, block_size] = KvIndex(block_size)
        return found

    def match(self, base_model: str, block_size: int, hashes: Sequence[BlockHash]) -> PrefixMatch:
        """The prefix match of these blocks; of a worker with several ranks, its best one's."""
        index = self.index(base_model, block_size)
        depths = index.match(hashes)
        lower = index.lower_tiers(hashes, depths)
        return self._best_ranks(depths, lower) if self._rank_of else PrefixMatch(depths, lower, {})

    def match_approximate(
        self, base_model: str, block_size: int, hashes: Sequence[BlockHash], conversation: int
    ) -> PrefixMatch:
        """The prefix match of an approximate prompt.

        Of a worker with several ranks one is always named, so that it is known where the prompt went: the rank with the
        longest prefix, else the conversation's own.
        """
        depths = self.index(base_model, block_size, is_approximate=True).match(hashes)
        if not self._rank_of:
            return PrefixMatch(depths)
        found = self._best_ranks(depths, {})
        homes = {name: conversation % len(feed.members) for name, feed in self.running.items() if len(feed.members) > 1}
        return PrefixMatch(found.depths, {}, {**homes, **found.ranks})

    def member_name(self, worker: WorkerId, rank: int | None) -> WorkerId:
        """The index's name for a rank of a worker, under which blocks of a request just sent are pending."""
        feed = self.running.get(worker)
        return member_name(worker, rank, len(feed.members)) if feed is not None and rank is not None else worker

    def update_worker(self, worker: WorkerId, base_model: str, block_size: int, metadata: Metadata) -> None:
        """Follow a worker as its report describes it; no effect while its engine starts or its block size is unknown.

        A worker whose engine keeps no block for a later prompt is forgotten: nothing is ever cached there.
        Without KV events and without a ledger its blocks are estimated. Otherwise the blocks of adapters that were
        loaded again are dropped if it has no agent, or if its engine forgets KV at a load.
        """
        transport = metadata.transport
        if not metadata.model.runtime_config.caches_prefixes:
            self.forget(worker)
            return
        if not block_size or not metadata.engine_boot_id:
            return
        if not transport.kv_events and not transport.kv_ledger:
            self._follow_estimate(worker, base_model, block_size, metadata)
            self._most_blocks[worker] = _most_blocks(metadata)
            return
        # Another path under a name is no other source: the same events would be read from the start again.
        is_plain = not metadata.agent_url
        boot_id = process_boot_id(metadata.engine_boot_id) if is_plain else metadata.engine_boot_id
        self.follow(
            KvSource(
                worker=worker,
                base_model=base_model,
                block_size=block_size,
                events=transport.kv_events,
                replay=transport.kv_replay,
                topic=transport.kv_topic,
                dialect=transport.dialect,
                engine_boot_id=boot_id,
                agent_url=metadata.agent_url.rstrip("/"),
                ledger=transport.kv_ledger,
                total_blocks=metadata.model.runtime_config.total_kv_blocks,
            )
        )
        self._most_blocks[worker] = _most_blocks(metadata)
        if is_plain or TRAITS.get(transport.dialect, TRAITS["vllm"]).forgets_on_load:
            self._forget_reloaded(worker, metadata)

    def follow(self, source: KvSource) -> None:
        """Start a feed from this source; the worker's former, different one is forgotten with its blocks.

        Its gauge says not degraded, and maintenance starts if it does not run. Does nothing if this source is followed
        already.
        """
        running = self.running.get(source.worker)
        if running is not None and running.source == source:
            return
        self.forget(source.worker)
        self.metrics.kv_degraded.labels(source.worker).set(0)
        feed = WorkerFeed(self, source, self.index(source.base_model, source.block_size))
        self.running[source.worker] = feed
        self._start_maintenance()
        feed.start()
        self.rebuild_rank_names()

    def record_served(
        self, worker: WorkerId, hashes: Sequence[BlockHash], *, began_at: float, now: float
    ) -> PredictedCache | None:
        """Record a prompt's first token: at a worker without KV events its blocks count as cached from now on.

        Returns the predicted hit; None for other workers.
        """
        estimated = self._estimated.get(worker)
        if estimated is None or not hashes:
            return None
        return estimated.by.record_served(worker, hashes, began_at=began_at, now=now, most_blocks=estimated.most_blocks)

    def record_served_approximate(
        self, replica: Replica, name: WorkerId, hashes: Sequence[BlockHash], *, began_at: float, now: float
    ) -> None:
        """Record the first token of an approximate prompt: its blocks count as cached at the replica from now on.

        Does nothing for a worker that is gone.
        name  the rank's name, see `member_name`
        """
        most_blocks = self._most_blocks.get(replica.id)
        if most_blocks is None or not hashes:
            return  # the worker is gone
        names = replica.base_model, replica.block_size
        sent = self._sent.get(names)
        if sent is None:
            sent = self._sent[names] = CacheEstimate(self.index(*names, is_approximate=True))
            self._start_maintenance()
        sent.record_served(name, hashes, began_at=began_at, now=now, most_blocks=most_blocks)

    def correct_estimate(self, guess: PredictedCache, cached_blocks: int) -> None:
        """Correct the estimate of a worker without KV events by an answer's `cached_tokens`.

        Ignored for any other worker.
        """
        estimated = self._estimated.get(guess.worker)
        if estimated is not None:
            estimated.by.correct_estimate(guess, cached_blocks)

    def may_repeat(self, worker: WorkerId) -> bool:
        """Whether requests to a worker may carry `kv_cache_report_mode: full`, so that the engine repeats store events.

        Not with an agent's whole ledger, which would count repeated stores as copies: its snapshot is taken again
        instead.
        """
        feed = self.running.get(worker)
        return feed is not None and feed.may_repeat

    def forget(self, worker: WorkerId) -> None:
        """Stop a worker's feed, and drop its blocks, estimates and metrics."""
        feed = self.running.pop(worker, None)
        names = {worker, *(feed.members if feed else ())}
        # In every index: those without a feed have pending blocks, too.
        for index in (*self.indexes.values(), *self.approximate.values()):
            for name in names:
                index.forget(name)
        for sent in self._sent.values():
            for name in names:
                sent.forget(name)
        self._most_blocks.pop(worker, None)
        estimated = self._estimated.pop(worker, None)
        if estimated is not None:
            estimated.by.forget(worker)
        self._loaded.pop(worker, None)
        if feed is not None:
            ending = feed.stop()
            if ending is not None:
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
            self.metrics.forget_worker(worker)
            self.rebuild_rank_names()

    async def close(self) -> None:
        """Forget every worker, stop all tasks and free the sockets."""
        for worker in list(self.running):
            self.forget(worker)
        ending = [*self._ending, *([self._maintenance] if self._maintenance else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._maintenance = None
        if self._hub is not None:
            await self._hub.close()
            self._hub = None

    def hub(self) -> SubscriberHub:
        """The engines' sockets; made at the first call and kept."""
        if self._hub is None:
            self._hub = SubscriberHub(tail_poll_s=self.tail_poll_s, turns=self.turns)
        return self._hub

    def rebuild_rank_names(self) -> None:
        """Rebuild the table from a rank's name to its worker and rank, for workers with several ranks."""
        self._rank_of = {
            name: (worker, rank)
            for worker, feed in self.running.items()
            if len(feed.members) > 1
            for rank, name in enumerate(feed.members)
        }

    def maintain(self) -> None:
        """Update the metrics, expire estimates, and let each feed act on its accuracy; called once a second."""
        for feed in self.running.values():
            feed.maintain()
        for estimate in (*self._estimates.values(), *self._sent.values()):
            estimate.expire(time.monotonic())
        kinds = [feed.kind for feed in self.running.values()] + ["estimate"] * len(self._estimated)
        for kind in ("ledger", "engine", "estimate", "none"):
            self.metrics.kv_feeds.labels(kind).set(kinds.count(kind))
        for what, indexes, estimates in (
            ("index", self.indexes, self._estimates),
            ("approximate", self.approximate, self._sent),
        ):
            size_bytes = sum([index.size_bytes() for index in indexes.values()])
            size_bytes += sum([estimate.size_bytes() for estimate in estimates.values()])
            self.metrics.kv_bytes.labels(what).set(size_bytes)
        self.metrics.kv_bytes.labels("ledgers").set(sum(feed.size_bytes() for feed in self.running.values()))
        self.metrics.kv_sockets_waiting.set(self._hub.waiting if self._hub is not None else 0)

    async def _maintain(self) -> None:
        """Call `maintain` once a second until cancelled."""

        async def step() -> None:
            """Call `maintain` once."""
            self.maintain()

        await forever(
            step, name="kv_feeds", every_s=_MAINTAIN_S, on_failure=self.metrics.loop_failures.labels("kv_feeds").inc
        )

    def _follow_estimate(self, worker: WorkerId, base_model: str, block_size: int, metadata: Metadata) -> None:
        """Estimate a worker's blocks from now on, and reset its accuracy. Another engine boot drops the old blocks."""
        known = self._estimated.get(worker)
        if known is not None and known.engine_boot_id == metadata.engine_boot_id:
            return
        self.forget(worker)
        by = self._estimates.setdefault((base_model, block_size), CacheEstimate(self.index(base_model, block_size)))
        self._estimated[worker] = _EventlessWorker(metadata.engine_boot_id, by, _most_blocks(metadata))
        self.accuracy.record_feed_start(worker, "estimate")
        self._start_maintenance()

    def _start_maintenance(self) -> None:
        """Start the task that calls `maintain`, unless it runs."""
        if self._maintenance is None:
            self._maintenance = asyncio.create_task(self._maintain())

    def _forget_reloaded(self, worker: WorkerId, metadata: Metadata) -> None:
        """Drop the blocks of adapters that were loaded again, perhaps with other weights."""
        # For an engine without an agent only the path is known.
        now = {lora.engine_name: lora.loaded_at or lora.path for lora in metadata.lora.loaded_loras}
        # With adapters that are not loaded now: they may come back, and their blocks are still stored.
        known = self._loaded.setdefault(worker, {})
        for name, loaded in now.items():
            if known.pop(name, loaded) != loaded:
                self.running[worker].forget_adapter(name)
            known[name] = loaded
        # A trainer's versions have a name each. Those without one here have no blocks either, so nothing can be wrong.
        for name in list(islice(known, max(0, len(known) - max(len(now), _MOST_LOADED)))):
            del known[name]
            self.running[worker].forget_adapter(name)

    def _best_ranks(self, depths: Mapping[WorkerId, int], lower: Mapping[WorkerId, tuple[int, int]]) -> PrefixMatch:
        """The prefix match by worker: its rank with the longest prefix, which is named where it matters."""
        rows: dict[WorkerId, list[tuple[int, int, WorkerId]]] = {}
        for name in depths.keys() | lower.keys():
            # Blocks that are pending without a rank count, and name none.
            worker, rank = self._rank_of.get(name, (name, _NO_RANK))
            blocks = depths.get(name, 0) + sum(lower.get(name, (0, 0)))
            rows.setdefault(worker, []).append((blocks, -rank, name))
        best = {worker: max(found) for worker, found in rows.items()}
        return PrefixMatch(
            {worker: depths[name] for worker, (_, _, name) in best.items() if name in depths},
            {worker: lower[name] for worker, (_, _, name) in best.items() if name in lower},
            {
                worker: -row[1]
                for worker, row in best.items()
                if row[1] != -_NO_RANK and self._is_better(worker, rows[worker])
            },
        )

    def _is_better(self, worker: WorkerId, rows: Sequence[tuple[int, int, WorkerId]]) -> bool:
        """Whether the rank matters: where all have the same prefix, the engine balances them itself."""
        feed = self.running.get(worker)
        ranks = len(feed.members) if feed is not None else 1
        return ranks > 1 and (len(rows) < ranks or len({blocks for blocks, _, _ in rows}) > 1)


def _most_blocks(metadata: Metadata) -> int:
    """Size of the engine's KV cache in blocks; a large one where it is not known."""
    return metadata.model.runtime_config.total_kv_blocks or _UNKNOWN_BLOCKS
