"""The ledger of this engine's KV blocks, served to any number of routers: one snapshot, then a stream of changes.

The agent listens beside the engine from before the first request, so it misses no event. A router that starts late or
falls behind is exact again after one snapshot. Block hashes leave this host, tokens do not.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import msgspec
import structlog

from lorafleet.identity import TIERS, BlockHash, Tier
from lorafleet.kv.ledger import MAX_KEPT_RATIO, TRAITS, BlockLedger
from lorafleet.kv.subscribe import RankEndpoint, RankSubscriber, SubscriberHub
from lorafleet.service.numbered_log import NumberedLog
from workers.core.errors import AgentRequestError, EngineError
from workers.metrics import WorkerMetrics
from workers.wire import KvChange, KvFrame, KvRank, KvSnapshot, Transport, pack_hashes

log = structlog.get_logger()

# Changes are collected this long: one frame per engine step would cost routers more than it is worth.
_COALESCE_S = 0.02
_HEARTBEAT_S = 1.0
# Frames kept for routers that are behind, about half a million changed blocks; beyond it they need a snapshot.
_RING_BYTES = 4 << 20
# Most bytes of frames sent in one write, so that a slow reader does not fill our memory.
_MOST_SENT_BYTES = 1 << 20


class KvLedgers:
    """The ledgers of one engine boot, one per data-parallel rank, and the frames with their changes."""

    def __init__(
        self,
        *,
        transport: Transport,
        base_model: str,
        block_size: int,
        engine_boot_id: str,
        metrics: WorkerMetrics,
        total_blocks: int = 0,
        ring_bytes: int = _RING_BYTES,
        tail_poll_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.epoch = f"{engine_boot_id}.{uuid.uuid4().hex[:8]}"
        self.base_model = base_model
        self.block_size = block_size
        self.total_blocks = total_blocks
        self.is_whole = True
        self.is_open = False
        self._metrics = metrics
        self._clock = clock
        self._encode = msgspec.msgpack.Encoder().encode
        self._is_closed = False
        self._frames = NumberedLog[bytes]()
        self._most_bytes = ring_bytes
        self.kept_bytes = 0
        """Size of the frames kept for readers that are behind."""
        self._flush_at: asyncio.TimerHandle | None = None
        self._newest_at = clock()
        self._sent_whole = True
        self.hub = SubscriberHub(tail_poll_s=tail_poll_s)
        replays = transport.kv_replay or ("",) * len(transport.kv_events)
        self.ranks = [_RankLedger(self, rank, transport.dialect) for rank in range(len(transport.kv_events))]
        self._followers: list[RankSubscriber] = [
            self.hub.follow(RankEndpoint(events, replay, transport.kv_topic), rank)
            for rank, events, replay in zip(self.ranks, transport.kv_events, replays, strict=True)
        ]

    @property
    def seq(self) -> int:
        """Number of the newest frame."""
        return self._frames.last

    async def close(self) -> None:
        """End every stream, drop pending changes and close the sockets to the engine."""
        self.end_streams()
        if self._flush_at is not None:
            self._flush_at.cancel()
        await self.hub.close()

    def end_streams(self) -> None:
        """End the streams to routers, for good: later readers get none, and snapshots are refused."""
        self._is_closed = True
        self._frames.changed.notify()

    def forget_adapter(self, engine_name: str) -> None:
        """Drop the blocks of an adapter that was just loaded, and schedule a frame.

        For engines whose loads start with an empty cache.
        """
        for rank in self.ranks:
            rank.ledger.forget_adapter(engine_name)
            rank.on_drained()

    async def snapshot(self) -> bytes:
        """All blocks as an encoded KvSnapshot; waits up to 5 s until past KV events have been read.

        Adds a frame with the pending changes first, so that the snapshot is as of the newest frame.
        raises  EngineError `not_ready` if the events are still being read
        """
        await self._frames.changed.until(lambda: self.is_open or self._is_closed, timeout_s=5.0)
        if not self.is_open or self._is_closed:
            raise EngineError("not_ready", "the engine's KV events are still being read; try again", retry_after_s=1)
        self.flush()
        ranks = tuple(
            KvRank(rank.number, **{tier: pack_hashes(rank.ledger.blocks(tier)) for tier in TIERS})
            for rank in self.ranks
        )
        snapshot = KvSnapshot(self.epoch, self.seq, self.base_model, self.block_size, ranks, self.is_whole)
        self._metrics.kv_snapshots.inc()
        return self._encode(snapshot)

    def checked_position(self, epoch: str, since: int) -> int:
        """`since`, if the stream can continue after that frame; else raises AgentRequestError `events_gone`."""
        if epoch != self.epoch or not self._frames.has_all_after(since):
            raise AgentRequestError(
                "events_gone",
                f"no KV changes after {since} of epoch {epoch[:100]!r} here (epoch {self.epoch!r} has"
                f" {self._frames.oldest} to {self.seq}); read /v1/kv/snapshot, then go on from there",
                param="since",
            )
        return since

    async def stream(self, since: int) -> AsyncIterator[bytes]:
        """Encoded frames after frame `since`, until `end_streams` or until the reader falls behind the ring.

        Sends a heartbeat frame after a second without changes. Counts readers, and those dropped.
        """
        self._metrics.kv_readers.inc()
        try:
            while not self._is_closed:
                if since < self._frames.oldest:
                    self._metrics.kv_readers_dropped.inc()
                    return
                piece: list[bytes] = []
                size = 0
                for frame in self._frames.after(since):
                    if piece and size + len(frame) > _MOST_SENT_BYTES:
                        break
                    piece.append(frame)
                    size += len(frame)
                since += len(piece)
                # A new stream begins with a heartbeat, so the reader knows at once that the stream works.
                yield b"".join(piece) or self._frame_bytes(KvFrame(self.seq, self._clock(), is_whole=self.is_whole))
                await self._frames.changed.until(partial(self._has_ended_or_newer, since), timeout_s=_HEARTBEAT_S)
        finally:
            self._metrics.kv_readers.dec()

    def flush(self) -> None:
        """Append a frame with the pending changes to the ring and wake the streams; no-op without changes.

        Cancels the flush timer. Drops the oldest frames of a full ring, never the newest.
        """
        if self._flush_at is not None:
            self._flush_at.cancel()
            self._flush_at = None
        changes = tuple(change for rank in self.ranks for change in rank.take_changes())
        cleared = tuple(rank.number for rank in self.ranks if rank.take_cleared())
        if not changes and not cleared and self._sent_whole == self.is_whole:
            return
        self._sent_whole = self.is_whole
        seq = self._frames.next_number
        frame = self._frame_bytes(KvFrame(seq, self._newest_at, cleared, changes, self.is_whole))
        self.kept_bytes += len(frame)
        self._frames.add(frame)
        # The newest frame always stays: readers that are up to date need it.
        while self.kept_bytes > self._most_bytes and len(self._frames) > 1:
            self.kept_bytes -= len(self._frames.drop_oldest())

    def schedule_frame(self) -> None:
        """Call `flush` in `_COALESCE_S`, unless a call is scheduled already."""
        if self._flush_at is None:
            self._flush_at = asyncio.get_running_loop().call_later(_COALESCE_S, self.flush)

    def note_event_time(self, at: float) -> None:
        """Record the engine's time of the newest event, for the next frame."""
        self._newest_at = at

    def update_open(self) -> None:
        """Allow snapshots once the past events of every rank have been read; wakes waiting readers."""
        self.is_open = all(rank.is_open for rank in self.ranks)
        self._frames.changed.notify()

    def mark_incomplete(self) -> None:
        """Record that events are missing. Routers may now ask the engine to repeat events, which are no new copies."""
        self.is_whole = False
        for rank in self.ranks:
            rank.ledger.expect_repeats(True)
        self.schedule_frame()

    def update_gauges(self) -> None:
        """Set the KV ledgers' gauges and add to their counters."""
        self._metrics.kv_blocks.set(sum(len(rank.ledger) for rank in self.ranks))
        self._metrics.kv_bytes.set(sum(rank.ledger.size_bytes() for rank in self.ranks))
        self._metrics.kv_whole.set(self.is_whole)
        for rank in self.ranks:
            rank.add_counts(self._metrics)

    def _frame_bytes(self, frame: KvFrame) -> bytes:
        """The encoded frame after its length."""
        data = self._encode(frame)
        return len(data).to_bytes(4, "big") + data

    def _has_ended_or_newer(self, since: int) -> bool:
        """Whether a stream at this frame must wake: there is a newer frame, or the streams have ended."""
        return self._is_closed or self.seq > since


class _RankLedger:
    """One rank's ledger: receives the engine's event batches (a Listener) and its ledger's changes (a Sink)."""

    def __init__(self, ledgers: KvLedgers, number: int, dialect: str) -> None:
        self.number = number
        self.is_open = False
        self._ledgers = ledgers
        traits = TRAITS.get(dialect, TRAITS["vllm"])
        self.ledger = BlockLedger(
            ledgers.base_model, ledgers.block_size, self, traits, most_blocks=MAX_KEPT_RATIO * ledgers.total_blocks
        )
        # Blocks added (True) or dropped (False) since the last frame; a block that did both is not in it.
        self._pending: dict[Tier, dict[BlockHash, bool]] = {tier: {} for tier in TIERS}
        self._is_cleared = False

    # --- Listener: called with the engine's events ----------------------------------------------------------------

    def on_batch(self, payload: bytes) -> None:
        """Apply one batch of KV events to the ledger; unreadable events mark the ledgers as incomplete."""
        at, missed = self.ledger.read(payload)
        if missed:
            self._on_unreadable(missed)
        if at:
            self._ledgers.note_event_time(at)

    def on_drained(self) -> None:
        """Schedule a frame if there are changes; called once all received batches are applied."""
        if self._is_cleared or any(self._pending.values()):
            self._ledgers.schedule_frame()

    def on_opened(self) -> None:
        """Record that all past events of this rank have been read; after the last rank snapshots are allowed."""
        self.is_open = True
        self._ledgers.update_open()

    def on_bridged(self) -> None:
        """Set the time of the newest event to now: a replay has repeated the missed batches."""
        self._ledgers.note_event_time(time.time())

    def on_lost(self, first: int, last: int) -> None:
        """Log that the batches with these sequence numbers are lost, and mark the ledgers as incomplete."""
        log.warning("KV ledger incomplete: events lost", rank=self.number, first=first, last=last)
        self._ledgers.mark_incomplete()

    def on_restarted(self) -> None:
        """Drop all blocks: the engine's cache is empty."""
        self.ledger.clear()

    def _on_unreadable(self, description: str) -> None:
        """Log unreadable events and mark the ledgers as incomplete."""
        # Logged once: an engine with unreadable events sends one per step.
        if self._ledgers.is_whole:
            log.warning("KV ledger incomplete: unreadable events", rank=self.number, what=description)
        self._ledgers.mark_incomplete()

    def on_malformed(self) -> None:
        """Count a received message that is no batch as rejected; the ledgers stay complete."""
        self.ledger.rejected["frames"] += 1

    # --- Sink: called with the ledger's changes -------------------------------------------------------------------

    def add(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Note for the next frame that these blocks are cached now; cancels a drop that is not yet sent."""
        self._add_pending(tier, hashes, is_added=True)

    def drop(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Note for the next frame that these blocks are no longer cached; cancels an add that is not yet sent."""
        self._add_pending(tier, hashes, is_added=False)

    def clear(self) -> None:
        """Note that nothing is cached any longer, for the next frame."""
        self._pending = {tier: {} for tier in TIERS}
        self._is_cleared = True

    def take_changes(self) -> list[KvChange]:
        """Return and forget the changes since the last call."""
        changes = []
        for tier, pending in self._pending.items():
            if pending:
                added = pack_hashes(block for block, is_added in pending.items() if is_added)
                dropped = pack_hashes(block for block, is_added in pending.items() if not is_added)
                changes.append(KvChange(self.number, tier, added, dropped))
                self._pending[tier] = {}
        return changes

    def take_cleared(self) -> bool:
        """Return and forget whether the cache was cleared since the last call."""
        was_cleared, self._is_cleared = self._is_cleared, False
        return was_cleared

    def add_counts(self, metrics: WorkerMetrics) -> None:
        """Add the ledger's event counts since the last call to the metrics."""
        for labels, counts in zip((metrics.kv_events, metrics.kv_rejected), self.ledger.take_counts(), strict=True):
            for name, count in counts.items():
                labels.labels(name).inc(count)

    def _add_pending(self, tier: Tier, hashes: Sequence[BlockHash], *, is_added: bool) -> None:
        """Add changes of blocks to the next frame; an added and dropped block leaves it."""
        pending = self._pending[tier]
        if pending.keys().isdisjoint(hashes):
            pending.update(dict.fromkeys(hashes, is_added))
            return
        for block in hashes:
            # For one block the ledger reports add and drop alternately: two pending changes cancel out.
            if pending.pop(block, None) is None:
                pending[block] = is_added
