"""The KV feed of one worker: from its agent's ledger while that answers, else from its engine's own events."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec
import structlog
import zmq

from lorafleet.identity import KV_HASHING, TIERS, BlockHash, Tier
from lorafleet.kv.ledger import MAX_KEPT_RATIO, TRAITS, BlockLedger
from lorafleet.kv.subscribe import RankEndpoint, RankSubscriber, SubscriberHub
from lorafleet.kv.turns import LoopTurns
from lorafleet.service.loops import backoff_s, forever
from router.core.kv.index import IndexDraft, KvIndex, WorkerId
from router.core.kv.prediction_accuracy import PredictionAccuracy
from router.http.engine_pool import EnginePool
from router.http.fetch import FetchRefused, fetch, stream
from router.telemetry.metrics import RouterMetrics
from workers.wire import KvFrame, KvRank, KvSnapshot, unpack_hashes

log = structlog.get_logger()

# Agents send a keep-alive every second.
_SILENCE_S = 5.0
_RESUME_S = 0.05
# A million blocks are 8 MB.
_SNAPSHOT_S, _MOST_SNAPSHOT_BYTES = 30.0, 1 << 30
_MOST_FRAME_BYTES = 64 << 20
# Bytes of a snapshot, or of a change, put into the index in one step: 200 blocks, about a tenth of a millisecond.
_STEP_BYTES = 200 * 8
# A request that asked for repeated stores may be in flight for this long after predictions agree again.
_REPEATS_LINGER_S = 60.0
_RETAKE_S = 10.0
# Seconds after which an engine's sockets that could not be opened are tried again: a router may be out of descriptors.
_SOCKETS_AGAIN_S = 30.0
# A snapshot that was void within 10 s was in vain. From the second such one in a row on the next one waits, longer each
# time: a snapshot is megabytes.
_VOID_WITHIN_S, _FIRST_PAUSE_S, _MOST_PAUSE_S = 10.0, 2.0, 60.0


@dataclass(frozen=True, slots=True)
class KvSource:
    """The source of a worker's KV events. Another boot of its engine is another source.

    events, replay  one ZMQ endpoint a data-parallel rank
    ledger          hashing version of the agent's ledger; 0: it has none
    total_blocks    that the engine's KV cache has, each rank's; 0: not known
    """

    worker: WorkerId
    base_model: str
    block_size: int
    events: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()
    topic: str = ""
    dialect: str = "vllm"
    engine_boot_id: str = ""
    agent_url: str = ""
    ledger: int = 0
    total_blocks: int = 0


class FeedContext(Protocol):
    """Everything that all feeds share (implemented by KvFeeds)."""

    metrics: RouterMetrics
    accuracy: PredictionAccuracy
    pool: EnginePool | None
    turns: LoopTurns
    fall_back_after_s: float

    @property
    def agent_key(self) -> Callable[[str], Awaitable[str]]:
        """The key for the agent at a URL. Raises FetchRefused."""

    def hub(self) -> SubscriberHub:
        """The engines' sockets; opened at the first call."""

    def rebuild_rank_names(self) -> None:
        """Rebuild the names of workers with several ranks; called when a worker has another number of ranks."""


def member_name(worker: WorkerId, rank: int, ranks: int) -> WorkerId:
    """The name of one rank in the index: `worker#rank`, or the worker's id where it has only one."""
    return WorkerId(f"{worker}#{rank}") if ranks > 1 else worker


class _IndexSink:
    """Writes a ledger's changes into the index under one member's name (a BlockSink)."""

    def __init__(self, index: KvIndex, name: WorkerId) -> None:
        self.index = index
        self.name = name
        self.added = 0
        self.dropped = 0

    def add(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Store blocks in the index at a tier, and count them."""
        self.index.add(self.name, hashes, tier)
        self.added += len(hashes)

    def drop(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Drop blocks from the index at a tier, and count them."""
        self.index.drop(self.name, hashes, tier)
        self.dropped += len(hashes)

    def clear(self) -> None:
        """Drop all stored blocks of this member from the index."""
        self.index.replace(self.name, {})

    def adopt(self, draft: IndexDraft) -> None:
        """Replace the member's blocks in the index by those of a draft, and count them."""
        self.index.adopt(self.name, draft)
        self.added += sum(draft.blocks.values())


class _EngineRankFeed:
    """One rank of an engine whose sockets we follow: receives its batches (a RankListener), keeps its ledger."""

    def __init__(self, feed: "WorkerFeed", rank: int) -> None:
        """Without an agent, a load is taken to make the engine forget the adapter's blocks."""
        source = feed.source
        self.is_open = False
        self._feed = feed
        self._sink = feed.sink(rank)
        self._at = 0.0
        traits = TRAITS.get(source.dialect, TRAITS["vllm"])
        if not source.agent_url:
            # Its adapter names may get other weights: only with an agent do they carry a digest.
            traits = replace(traits, forgets_on_load=True)
        most_blocks = MAX_KEPT_RATIO * source.total_blocks
        self.ledger = BlockLedger(source.base_model, source.block_size, self._sink, traits, most_blocks=most_blocks)

    def on_batch(self, payload: bytes) -> None:
        """Apply a batch to the ledger and the index; the first one clears the old blocks. May record a loss."""
        if not self.is_open:
            # Not before the first batch: until then the old blocks are the best information.
            self.is_open = True
            self._sink.clear()
        at, missed = self.ledger.read(payload)
        if missed:
            self._record_loss()
        self._at = at or self._at

    def on_drained(self) -> None:
        """Update the feed's lag from the newest batch, after several were delivered."""
        if self._at:
            self._feed.lag_s = time.time() - self._at

    def on_opened(self) -> None:
        """Report to the feed that the buffered batches were delivered."""
        self._feed.on_engine_opened()

    def on_bridged(self) -> None:
        """Count a gap that the replay has filled."""
        self._feed.metrics.kv_gaps.labels(self._feed.source.worker, "replayed").inc()

    def on_lost(self, first: int, last: int) -> None:  # noqa: ARG002  (the follower logs them)
        """Count a gap that stays, and mark the feed as degraded."""
        self._feed.metrics.kv_gaps.labels(self._feed.source.worker, "lost").inc()
        self._record_loss()

    def on_restarted(self) -> None:
        """Drop all blocks: the engine's cache is empty."""
        self.ledger.clear()

    def on_malformed(self) -> None:
        """Count a message of another form."""
        self.ledger.rejected["frames"] += 1

    def _record_loss(self) -> None:
        """Mark the feed as degraded, and let the ledger expect repeated stores."""
        self.ledger.expect_repeats(True)
        self._feed.record_lost_events()

    def export_counts(self) -> None:
        """Add to the metrics what the ledger has counted since the previous call."""
        worker, metrics = self._feed.source.worker, self._feed.metrics
        for labels, counts in zip((metrics.kv_events, metrics.kv_rejected), self.ledger.take_counts(), strict=True):
            for name, count in counts.items():
                labels.labels(worker, name).inc(count)


class WorkerFeed:
    """The KV feed of one worker, from its agent's ledger or from its engine.

    subscribers  one for each rank of the engine that is followed; none while the agent's ledger is
    last_seq     the number of the last frame applied from the ledger
    snapshot_at  when the last snapshot was put into the index, by the event loop's clock
    """

    def __init__(self, feeds: FeedContext, source: KvSource, index: KvIndex) -> None:
        self.source = source
        self.metrics = feeds.metrics
        self.lag_s = 0.0
        self.sinks: dict[WorkerId, _IndexSink] = {}
        self._feeds = feeds
        self._index = index
        self._ranks = max(1, len(source.events))
        self._engine: list[_EngineRankFeed] = []
        self.subscribers: list[RankSubscriber] = []
        self._task: asyncio.Task[None] | None = None
        self._clock = asyncio.get_running_loop().time
        self._heard_at = self._clock()
        self._epoch = ""
        self.last_seq = 0
        self._is_whole = True
        self._asked_at = self.snapshot_at = 0.0
        self._failed_snapshots = 0
        self._has_lost_events = False
        self._repeats_until = 0.0
        self._sockets_again_at = inf

    @property
    def kind(self) -> str:
        """The feed in use: ledger, engine, or none while neither has answered."""
        return "engine" if self.subscribers else "ledger" if self._epoch else "none"

    @property
    def members(self) -> list[WorkerId]:
        """The worker's names in the index, one a rank."""
        return [member_name(self.source.worker, rank, self._ranks) for rank in range(self._ranks)]

    @property
    def may_repeat(self) -> bool:
        """Whether requests may make the engine repeat store events: the ledger in use can tell them from copies.

        See BlockLedger.expect_repeats.
        """
        return bool(self.subscribers) or not self._is_whole

    def size_bytes(self) -> int:
        """Estimated memory of our own ledgers of this worker, in bytes."""
        return sum(rank.ledger.size_bytes() for rank in self._engine)

    def sink(self, rank: int) -> _IndexSink:
        """The sink that writes a rank's blocks into the index; made at the first call."""
        name = member_name(self.source.worker, rank, self._ranks)
        return self.sinks.setdefault(name, _IndexSink(self._index, name))

    def start(self) -> None:
        """Start to follow the agent's ledger, or the engine where there is none that we can read."""
        if self.source.ledger == KV_HASHING and self.source.agent_url and self._feeds.pool is not None:
            self._task = asyncio.create_task(self._follow_ledger())
        else:
            self._follow_engine()

    def stop(self) -> asyncio.Task[None] | None:
        """Close the sockets and cancel the task; returns the task while it is ending, or None."""
        self._leave_engine()
        if self._task is not None:
            self._task.cancel()
        return self._task

    def record_lost_events(self) -> None:
        """Mark the feed as degraded: events are lost for good. Known blocks are kept."""
        self._has_lost_events = True
        self._feeds.accuracy.record_lost_events(self.source.worker)
        self.metrics.kv_degraded.labels(self.source.worker).set(1)

    def forget_adapter(self, engine_name: str) -> None:
        """Drop an adapter's blocks from our own ledgers and the index."""
        for rank in self._engine:
            rank.ledger.forget_adapter(engine_name)

    def maintain(self) -> None:
        """Update the metrics, and act on the prediction accuracy; called once a second.

        While it is degraded, repeated stores are expected, and a snapshot is dropped, so that it is taken again.
        Sockets that could not be opened are tried again.
        """
        worker, now = self.source.worker, self._clock()
        if now >= self._sockets_again_at:
            self._follow_engine()
        for rank in self._engine:
            rank.export_counts()
        for sink in self.sinks.values():
            if not sink.added and not sink.dropped:
                continue
            self.metrics.kv_changed_blocks.labels(worker, "added").inc(sink.added)
            self.metrics.kv_changed_blocks.labels(worker, "dropped").inc(sink.dropped)
            sink.added = sink.dropped = 0
        self.metrics.kv_lag.labels(worker).set(max(0.0, self.lag_s))
        blocks = sum([self._index.blocks(name, tier) for name in self.members for tier in TIERS])
        self.metrics.kv_blocks.labels(worker).set(blocks)
        is_degraded = self._feeds.accuracy.state(worker) == "degraded"
        self.metrics.kv_degraded.labels(worker).set(is_degraded)
        if is_degraded:
            if not self._repeats_until:
                self._expect_repeats(True)
            self._repeats_until = now + _REPEATS_LINGER_S
            if self.kind == "ledger" and self._is_whole and now - self.snapshot_at > _RETAKE_S:
                log.info("KV snapshot is taken again: predictions and answers differ", worker=worker)
                self._drop_snapshot()
        elif self._repeats_until and now > self._repeats_until:
            self._repeats_until = 0.0
            self._expect_repeats(False)

    # --- the engine's own sockets --------------------------------------------------------------------------------

    def _follow_engine(self) -> None:
        """Subscribe to the engine's sockets, one a rank.

        A failure is logged, and none is followed until the next try.
        """
        source = self.source
        self._sockets_again_at = inf
        replays = source.replay if len(source.replay) == len(source.events) else ("",) * len(source.events)
        hub = self._feeds.hub()
        try:
            for rank, (events, replay) in enumerate(zip(source.events, replays, strict=True)):
                listener = _EngineRankFeed(self, rank)
                # Where an agent's ledger fell silent, events may be missing: ask for repeated stores.
                listener.ledger.expect_repeats(bool(self._repeats_until) or self._task is not None)
                self.subscribers.append(hub.follow(RankEndpoint(events, replay, source.topic), listener))
                self._engine.append(listener)
        except zmq.ZMQError as exc:
            log.warning("KV events cannot be followed", worker=source.worker, endpoints=source.events, error=str(exc))
            self._leave_engine()
            if self._task is None:  # else the agent's next failure tries again
                self._sockets_again_at = self._clock() + _SOCKETS_AGAIN_S

    def on_engine_opened(self) -> None:
        """Reset the worker's prediction accuracy: exact, or degraded after a loss. Without effect after a ledger."""
        if self._task is None:
            self._feeds.accuracy.record_feed_start(self.source.worker, "exact")
            # Events that the engine no longer had were noticed before.
            if self._has_lost_events:
                self.record_lost_events()

    def _leave_engine(self) -> None:
        """Close the engine's sockets and drop our ledgers of it; the index keeps its blocks."""
        subscribers, self.subscribers = self.subscribers, []
        for subscriber in subscribers:
            self._feeds.hub().forget(subscriber)
        self._engine = []

    def _expect_repeats(self, expected: bool) -> None:
        """Let our ledgers expect repeated stores, or no longer."""
        for rank in self._engine:
            rank.ledger.expect_repeats(expected)

    # --- the agent's ledger --------------------------------------------------------------------------------------

    async def _follow_ledger(self) -> None:
        """Follow the agent's ledger until cancelled.

        After failures, which are logged and counted, fall back to the engine.
        """

        async def step() -> None:
            """Follow the ledger once; a failure may drop the snapshot or start following the engine."""
            try:
                await self._follow_once()
            except Exception as exc:
                if not isinstance(exc, OSError):
                    # A malformed frame would be as malformed the next time.
                    self._drop_snapshot()
                self._fall_back_if_silent()
                raise

        await forever(
            step,
            name="kv_ledger",
            every_s=_RESUME_S,
            most_backoff_s=2.0,
            on_failure=self.metrics.loop_failures.labels("kv_ledger").inc,
        )

    async def _follow_once(self) -> None:
        """Take a snapshot if there is none, and apply its stream until that ends. A 410 drops the snapshot.

        Raises FetchRefused for any other status but 200, and ValueError for a malformed frame.
        """
        if not self._epoch:
            await asyncio.sleep(self._snapshot_pause_s())
            await self._take_snapshot()
        pool, url = self._pool, self.source.agent_url
        key = await self._feeds.agent_key(url)
        path = f"/v1/kv/stream?{urlencode({'epoch': self._epoch, 'since': self.last_seq})}"
        async with stream(pool, url, path, token=key, idle_s=_SILENCE_S) as answer:
            if answer.status == 410:
                self._drop_snapshot()
                return
            if answer.status != 200:
                raise FetchRefused(f"GET {url}{path}: {answer.status}")
            waiting = bytearray()
            async for data in answer:
                waiting += data
                self._heard_at = self._clock()
                # Unread bytes pile up meanwhile: above a mebibyte the connection is not read, and the agent drops us.
                await self._feeds.turns.run(self._apply_frames(waiting))
                if not self._epoch:
                    return

    def _apply_frames(self, waiting: bytearray) -> Iterator[None]:
        """Apply the whole frames at the front of `waiting`, step by step, and remove them.

        Ends early where a new snapshot is due. Raises ValueError for a frame that is too long.
        """
        start = 0
        while len(waiting) - start >= 4:
            size = int.from_bytes(waiting[start : start + 4], "big")
            if size > _MOST_FRAME_BYTES:
                raise ValueError(
                    f"{self.source.agent_url}: a frame of {size} bytes; at most {_MOST_FRAME_BYTES} are sent"
                )
            if len(waiting) - start - 4 < size:
                break
            frame = _FRAME.decode(waiting[start + 4 : start + 4 + size])
            start += 4 + size
            yield from self._apply_frame(frame)
            if not self._epoch:
                return  # a new snapshot is due
        del waiting[:start]

    def _apply_frame(self, frame: KvFrame) -> Iterator[None]:
        """Apply one frame's changes to the index, step by step, and measure its lag. May mark the feed as degraded.

        After a gap in the sequence, drops the snapshot.
        """
        self.lag_s = time.time() - frame.at
        if frame.seq == self.last_seq + 1:
            self.last_seq = frame.seq
            for rank in frame.cleared:
                self.sink(rank).clear()
            for change in frame.changes:
                sink = self.sink(change.rank)
                for hashes in _unpack_in_steps(change.dropped):
                    sink.drop(change.tier, hashes)
                    yield
                for hashes in _unpack_in_steps(change.added):
                    sink.add(change.tier, hashes)
                    yield
        elif frame.seq != self.last_seq:
            self._drop_snapshot()
            return
        if self._is_whole and not frame.is_whole:
            self._is_whole = False
            self.metrics.kv_gaps.labels(self.source.worker, "lost").inc()
            self.record_lost_events()

    async def _take_snapshot(self) -> None:
        """Fetch the ledger's snapshot and replace the worker's blocks by it; ends following the engine.

        Resets the prediction accuracy to exact, or degraded if the ledger is not whole. Other ranks than before are
        forgotten first. Raises ValueError for a ledger of another kind, and what the fetch raises.
        """
        source = self.source
        self._asked_at = self._clock()
        taken = _SNAPSHOT.decode(
            await fetch(
                self._pool,
                source.agent_url,
                "/v1/kv/snapshot",
                token=await self._feeds.agent_key(source.agent_url),
                timeout_s=_SNAPSHOT_S,
                max_bytes=_MOST_SNAPSHOT_BYTES,
            )
        )
        theirs, ours = (
            (taken.hashing, taken.base_model, taken.block_size),
            (KV_HASHING, source.base_model, source.block_size),
        )
        if theirs != ours:
            raise ValueError(
                f"{source.agent_url}: its KV ledger is of (hashing, base model, block size) {theirs}, not {ours}"
            )
        self._leave_engine()
        if len(taken.ranks) != self._ranks:
            for name in self.members:
                self._index.forget(name)
            self._ranks, self.sinks = len(taken.ranks), {}
            self._feeds.rebuild_rank_names()
        drafts: list[tuple[int, IndexDraft]] = []
        try:
            for rank in taken.ranks:
                drafts.append((rank.rank, self._index.new_draft()))
                await self._feeds.turns.run(self._add_snapshot(drafts[-1][1], rank))
        except BaseException:
            for _, draft in drafts:
                self._index.discard(draft)
            raise
        # Not before all of it is there: until then the old blocks are the best information.
        for number, draft in drafts:
            self.sink(number).adopt(draft)
        self._epoch, self.last_seq, self._is_whole = taken.epoch, taken.seq, taken.is_whole
        self._heard_at = self.snapshot_at = self._clock()
        self._has_lost_events = False
        self.metrics.kv_snapshots.labels(source.worker).inc()
        self.metrics.kv_degraded.labels(source.worker).set(0)
        self._feeds.accuracy.record_feed_start(source.worker, "exact")
        if not taken.is_whole:
            self.record_lost_events()

    def _add_snapshot(self, draft: IndexDraft, rank: KvRank) -> Iterator[None]:
        """Add a rank's snapshot, already in memory, to a draft, step by step."""
        for tier in TIERS:
            # Unpacked they take seven times the memory, and a starting router takes all workers' snapshots at once.
            for hashes in _unpack_in_steps(getattr(rank, tier)):
                self._index.add_to(draft, hashes, tier)
                yield

    def _drop_snapshot(self) -> None:
        """Mark the snapshot as void, so that a new one is taken; the index keeps its blocks until then."""
        self._epoch = ""
        self._failed_snapshots = self._failed_snapshots + 1 if self._clock() - self._asked_at < _VOID_WITHIN_S else 0

    def _snapshot_pause_s(self) -> float:
        """Seconds to wait before the next snapshot: 0.0 at first, longer after each one that was soon void."""
        return (
            backoff_s(self._failed_snapshots - 1, _FIRST_PAUSE_S, _MOST_PAUSE_S) if self._failed_snapshots > 1 else 0.0
        )

    def _fall_back_if_silent(self) -> None:
        """If the agent's ledger is silent for too long, drop its epoch and follow the engine itself, as degraded."""
        if self.subscribers or not self.source.events or self._clock() - self._heard_at < self._feeds.fall_back_after_s:
            return
        log.warning("the agent's KV ledger does not answer; the engine is followed itself", worker=self.source.worker)
        self._epoch = ""
        self._follow_engine()
        self._feeds.accuracy.record_feed_start(self.source.worker, "exact")
        # Whatever the engine replays, changes in between may be missing.
        self.record_lost_events()

    @property
    def _pool(self) -> EnginePool:
        """The connections to agents, of which there must be some."""
        assert self._feeds.pool is not None
        return self._feeds.pool


_FRAME = msgspec.msgpack.Decoder(KvFrame)
_SNAPSHOT = msgspec.msgpack.Decoder(KvSnapshot)


def _unpack_in_steps(packed: bytes) -> Iterator[list[BlockHash]]:
    """The block hashes of packed bytes, in pieces of one step each."""
    for start in range(0, len(packed), _STEP_BYTES):
        hashes: list[Any] = unpack_hashes(packed[start : start + _STEP_BYTES])
        yield hashes
