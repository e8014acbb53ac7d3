"""One worker's cached blocks, followed: its agent's ledger while that answers, else its engine's own events."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec
import structlog
import zmq

from lorafleet.identity import KV_HASHING, TIERS, BlockHash, Tier
from lorafleet.kv.ledger import MAX_KEPT_RATIO, TRAITS, BlockLedger
from lorafleet.kv.subscribe import RankEndpoint, RankSubscriber, SubscriberHub
from lorafleet.service.loops import backoff_s, forever
from lorafleet.service.own_key import OwnKey
from router.core.kv.index import IndexDraft, KvIndex, WorkerId
from router.core.kv.prediction_accuracy import PredictionAccuracy
from router.http.engine_pool import EnginePool
from router.http.fetch import FetchRefused, fetch, stream
from router.telemetry.metrics import RouterMetrics
from workers.wire import KvFrame, KvRank, KvSnapshot, unpack_hashes

log = structlog.get_logger()

# Agents send a sign of life every second.
_SILENCE_S = 5.0
_RESUME_S = 0.05
# A million blocks are 8 MB.
_SNAPSHOT_S, _MOST_SNAPSHOT_BYTES = 30.0, 1 << 30
_MOST_FRAME_BYTES = 64 << 20
# Of a snapshot put into the index before requests get a turn: 2,000 blocks, about a millisecond.
_TURN_BYTES = 2000 * 8
# A request that asked for repetitions may be on its way for this long after predictions agree again.
_REPEATS_LINGER_S = 60.0
_RETAKE_S = 10.0
# A snapshot that was no good for so long was in vain. After the second such one in a row the next waits, and longer
# each time: it is megabytes, and nothing says that it will be better.
_IN_VAIN_S, _FIRST_PAUSE_S, _MOST_PAUSE_S = 10.0, 2.0, 60.0


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where what a worker has cached is told. Another engine boot is another source.

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
    """What the feeds of all workers have in common."""

    metrics: RouterMetrics
    trust: PredictionAccuracy
    own: OwnKey
    pool: EnginePool | None
    fall_back_after_s: float

    def hub(self) -> SubscriberHub:
        """The engines' sockets."""

    def ranks_changed(self) -> None:
        """A worker turned out to have more or fewer ranks than it said."""


def member_name(worker: WorkerId, rank: int, ranks: int) -> WorkerId:
    """The index's name of one rank: `worker#rank`, and the worker itself where it has only one."""
    return WorkerId(f"{worker}#{rank}") if ranks > 1 else worker


class _IndexSink:
    """A ledger's changes, written into the index under one member (a Sink)."""

    def __init__(self, index: KvIndex, name: WorkerId) -> None:
        self.index = index
        self.name = name
        self.added = 0
        self.dropped = 0

    def add(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        self.index.add(self.name, hashes, tier)
        self.added += len(hashes)

    def drop(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        self.index.drop(self.name, hashes, tier)
        self.dropped += len(hashes)

    def clear(self) -> None:
        self.index.replace(self.name, {})

    def adopt(self, draft: IndexDraft) -> None:
        self.index.adopt(self.name, draft)
        self.added += sum(draft.blocks.values())


class _EngineRankFeed:
    """One rank of an engine whose sockets we follow ourselves: hears its batches (a Listener), keeps its ledger."""

    def __init__(self, feed: "WorkerFeed", rank: int) -> None:
        source = feed.source
        self.is_open = False
        self._feed = feed
        self._into = feed.into(rank)
        self._at = 0.0
        traits = TRAITS.get(source.dialect, TRAITS["vllm"])
        if not source.agent_url:
            # Whose name may get other weights: with an agent it carries their digest.
            traits = replace(traits, forgets_on_load=True)
        most_blocks = MAX_KEPT_RATIO * source.total_blocks
        self.ledger = BlockLedger(source.base_model, source.block_size, self._into, traits, most_blocks=most_blocks)

    def on_batch(self, payload: bytes) -> None:
        if not self.is_open:
            # Only now: until the engine says something, what was known of it before is the best there is.
            self.is_open = True
            self._into.clear()
        at, missed = self.ledger.read(payload)
        if missed:
            self._doubt()
        self._at = at or self._at

    def on_drained(self) -> None:
        if self._at:
            self._feed.lag_s = time.time() - self._at

    def on_opened(self) -> None:
        self._feed.engine_opened()

    def on_bridged(self) -> None:
        self._feed.metrics.kv_gaps.labels(self._feed.source.worker, "replayed").inc()

    def on_lost(self, first: int, last: int) -> None:  # noqa: ARG002  (the follower logs them)
        self._feed.metrics.kv_gaps.labels(self._feed.source.worker, "lost").inc()
        self._doubt()

    def on_malformed(self) -> None:
        self.ledger.rejected["frames"] += 1

    def _doubt(self) -> None:
        self.ledger.expect_repeats(True)
        self._feed.lost()

    def count(self) -> None:
        """Add to the counters what the ledger counted since the last call."""
        worker, metrics = self._feed.source.worker, self._feed.metrics
        for labels, counts in zip((metrics.kv_events, metrics.kv_rejected), self.ledger.take_counts(), strict=True):
            for name, count in counts.items():
                labels.labels(worker, name).inc(count)


class WorkerFeed:
    """One worker, followed by whichever way works."""

    def __init__(self, feeds: FeedContext, source: KvSource, index: KvIndex) -> None:
        self.source = source
        self.metrics = feeds.metrics
        self.lag_s = 0.0
        self.intos: dict[WorkerId, _IndexSink] = {}
        self._feeds = feeds
        self._index = index
        self._ranks = max(1, len(source.events))
        self._engine: list[_EngineRankFeed] = []
        self._followers: list[RankSubscriber] = []
        self._task: asyncio.Task[None] | None = None
        self._clock = asyncio.get_running_loop().time
        self._heard_at = self._clock()
        self._epoch = ""
        self._seq = 0
        self._is_whole = True
        self._asked_at = self._taken_at = 0.0
        self._in_vain = 0
        self._is_lost = False
        self._repeats_until = 0.0

    @property
    def kind(self) -> str:
        """ledger, engine, or none while neither has answered."""
        return "engine" if self._followers else "ledger" if self._epoch else "none"

    @property
    def members(self) -> list[WorkerId]:
        return [member_name(self.source.worker, rank, self._ranks) for rank in range(self._ranks)]

    @property
    def may_repeat(self) -> bool:
        """Whether the ledger that is followed would know repeated stores from copies; see Ledger.expect_repeats."""
        return bool(self._followers) or not self._is_whole

    def size_bytes(self) -> int:
        return sum(rank.ledger.size_bytes() for rank in self._engine)

    def into(self, rank: int) -> _IndexSink:
        name = member_name(self.source.worker, rank, self._ranks)
        return self.intos.setdefault(name, _IndexSink(self._index, name))

    def start(self) -> None:
        if self.source.ledger == KV_HASHING and self.source.agent_url and self._feeds.pool is not None:
            self._task = asyncio.create_task(self._follow_ledger())
        else:
            self._follow_engine()

    def stop(self) -> asyncio.Task[None] | None:
        """End it; returns what is still ending."""
        self._leave_engine()
        if self._task is not None:
            self._task.cancel()
        return self._task

    def lost(self) -> None:
        """Something is missing now that nothing brings back. What is known is kept."""
        self._is_lost = True
        self._feeds.trust.record_lost_events(self.source.worker)
        self.metrics.kv_degraded.labels(self.source.worker).set(1)

    def forget_adapter(self, engine_name: str) -> None:
        for rank in self._engine:
            rank.ledger.forget_adapter(engine_name)

    def keep(self) -> None:
        """Once a second: figures, and what follows from the state of trust."""
        worker, now = self.source.worker, self._clock()
        for rank in self._engine:
            rank.count()
        for into in self.intos.values():
            self.metrics.kv_changed_blocks.labels(worker, "added").inc(into.added)
            self.metrics.kv_changed_blocks.labels(worker, "dropped").inc(into.dropped)
            into.added = into.dropped = 0
        self.metrics.kv_lag.labels(worker).set(max(0.0, self.lag_s))
        blocks = sum([self._index.blocks(name, tier) for name in self.members for tier in TIERS])
        self.metrics.kv_blocks.labels(worker).set(blocks)
        is_degraded = self._feeds.trust.state(worker) == "degraded"
        self.metrics.kv_degraded.labels(worker).set(is_degraded)
        if is_degraded:
            if not self._repeats_until:
                self._expect_repeats(True)
            self._repeats_until = now + _REPEATS_LINGER_S
            if self.kind == "ledger" and self._is_whole and now - self._taken_at > _RETAKE_S:
                log.info("KV snapshot is taken again: predictions and answers differ", worker=worker)
                self._retake()
        elif self._repeats_until and now > self._repeats_until:
            self._repeats_until = 0.0
            self._expect_repeats(False)

    # --- the engine's own sockets --------------------------------------------------------------------------------

    def _follow_engine(self) -> None:
        source = self.source
        replays = source.replay if len(source.replay) == len(source.events) else ("",) * len(source.events)
        hub = self._feeds.hub()
        try:
            for rank, (events, replay) in enumerate(zip(source.events, replays, strict=True)):
                listener = _EngineRankFeed(self, rank)
                # Beside an agent's ledger that fell silent something may be missing, and is asked for.
                listener.ledger.expect_repeats(bool(self._repeats_until) or self._task is not None)
                self._followers.append(hub.follow(RankEndpoint(events, replay, source.topic), listener))
                self._engine.append(listener)
        except zmq.ZMQError as exc:
            log.warning("KV events cannot be followed", worker=source.worker, endpoints=source.events, error=str(exc))
            self._leave_engine()

    def engine_opened(self) -> None:
        if self._task is None:
            self._feeds.trust.record_feed_start(self.source.worker, "exact")
            # What of its past the engine had forgotten was noticed before.
            if self._is_lost:
                self.lost()

    def _leave_engine(self) -> None:
        followers, self._followers = self._followers, []
        for follower in followers:
            self._feeds.hub().forget(follower)
        self._engine = []

    def _expect_repeats(self, expected: bool) -> None:
        for rank in self._engine:
            rank.ledger.expect_repeats(expected)

    # --- the agent's ledger --------------------------------------------------------------------------------------

    async def _follow_ledger(self) -> None:
        async def step() -> None:
            try:
                await self._follow_once()
            except Exception as exc:
                if not isinstance(exc, OSError):
                    # A frame that cannot be read, or could be in part: it will be no better the next time.
                    self._retake()
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
        """A snapshot if we have none, and the stream that follows it, until it ends or breaks."""
        if not self._epoch:
            await asyncio.sleep(self._pause_s())
            await self._take_snapshot()
        pool, url = self._pool, self.source.agent_url
        path = f"/v1/kv/stream?{urlencode({'epoch': self._epoch, 'since': self._seq})}"
        async with stream(pool, url, path, token=self._feeds.own.key, idle_s=_SILENCE_S) as told:
            if told.status == 410:
                self._retake()
                return
            if told.status != 200:
                raise FetchRefused(f"GET {url}{path}: {told.status}")
            waiting = bytearray()
            async for data in told:
                waiting += data
                self._heard_at = self._clock()
                if not self._take_frames(waiting):
                    return

    def _take_frames(self, waiting: bytearray) -> bool:
        """Apply the whole frames at the front of `waiting`; false when one is not the next one."""
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
            if not self._take_frame(frame):
                return False
        del waiting[:start]
        return True

    def _take_frame(self, frame: KvFrame) -> bool:
        self.lag_s = time.time() - frame.at
        if frame.seq == self._seq + 1:
            self._seq = frame.seq
            for rank in frame.cleared:
                self.into(rank).clear()
            for change in frame.changes:
                into = self.into(change.rank)
                if change.dropped:
                    into.drop(change.tier, _hashes(change.dropped))
                if change.added:
                    into.add(change.tier, _hashes(change.added))
        elif frame.seq != self._seq:
            self._retake()
            return False
        if self._is_whole and not frame.is_whole:
            self._is_whole = False
            self.metrics.kv_gaps.labels(self.source.worker, "lost").inc()
            self.lost()
        # Doubts about what we hold: the stream is left, and a snapshot taken.
        return bool(self._epoch)

    async def _take_snapshot(self) -> None:
        source = self.source
        self._asked_at = self._clock()
        taken = _SNAPSHOT.decode(
            await fetch(
                self._pool,
                source.agent_url,
                "/v1/kv/snapshot",
                token=self._feeds.own.key,
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
            self._ranks, self.intos = len(taken.ranks), {}
            self._feeds.ranks_changed()
        drafts: list[tuple[int, IndexDraft]] = []
        try:
            for rank in taken.ranks:
                drafts.append((rank.rank, self._index.new_draft()))
                await self._fill(drafts[-1][1], rank)
        except BaseException:
            for _, draft in drafts:
                self._index.discard(draft)
            raise
        # Only now: until all of it is there, what was known before is the best there is.
        for number, draft in drafts:
            self.into(number).adopt(draft)
        self._epoch, self._seq, self._is_whole = taken.epoch, taken.seq, taken.is_whole
        self._heard_at = self._taken_at = self._clock()
        self._is_lost = False
        self.metrics.kv_snapshots.labels(source.worker).inc()
        self.metrics.kv_degraded.labels(source.worker).set(0)
        self._feeds.trust.record_feed_start(source.worker, "exact")
        if not taken.is_whole:
            self.lost()

    async def _fill(self, draft: IndexDraft, rank: KvRank) -> None:
        for tier in TIERS:
            packed = getattr(rank, tier)
            # Unpacked they take seven times as much, and a router that starts takes all workers' at once.
            for start in range(0, len(packed), _TURN_BYTES):
                self._index.add_to(draft, _hashes(packed[start : start + _TURN_BYTES]), tier)
                await asyncio.sleep(0)

    def _retake(self) -> None:
        """Begin again with a snapshot, as soon as the stream has been left; one in vain after the other, later."""
        self._epoch = ""
        self._in_vain = self._in_vain + 1 if self._clock() - self._asked_at < _IN_VAIN_S else 0

    def _pause_s(self) -> float:
        return backoff_s(self._in_vain - 1, _FIRST_PAUSE_S, _MOST_PAUSE_S) if self._in_vain > 1 else 0.0

    def _fall_back_if_silent(self) -> None:
        if self._followers or not self.source.events or self._clock() - self._heard_at < self._feeds.fall_back_after_s:
            return
        log.warning("the agent's KV ledger does not answer; the engine is followed itself", worker=self.source.worker)
        self._epoch = ""
        self._follow_engine()
        self._feeds.trust.record_feed_start(self.source.worker, "exact")
        # Whatever the engine still tells of its past, what changed meanwhile may be missing.
        self.lost()

    @property
    def _pool(self) -> EnginePool:
        assert self._feeds.pool is not None
        return self._feeds.pool


_FRAME = msgspec.msgpack.Decoder(KvFrame)
_SNAPSHOT = msgspec.msgpack.Decoder(KvSnapshot)


def _hashes(packed: bytes) -> list[BlockHash]:
    hashes: list[Any] = unpack_hashes(packed)
    return hashes
