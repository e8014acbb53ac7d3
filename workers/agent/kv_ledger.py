"""The ledger of this engine's KV blocks, served to any number of routers: one snapshot, then a stream of changes.

The agent sits on loopback beside the engine and is there before the first request, so it misses nothing; a router that
starts late, restarts or falls behind is exact again after one snapshot. Block hashes leave this machine, tokens do not.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import msgspec
import structlog

from lorafleet.identity import TIERS, BlockHash, Tier
from lorafleet.kv.ledger import KEPT_TIMES, TRAITS, BlockLedger
from lorafleet.kv.subscribe import RankEndpoint, RankSubscriber, SubscriberHub
from lorafleet.service.loops import ChangeSignal
from workers.core.errors import AgentRequestError, EngineError
from workers.metrics import WorkerMetrics
from workers.wire import KvChange, KvFrame, KvRank, KvSnapshot, Transport, pack_hashes

log = structlog.get_logger()

# Changes are gathered this long: a frame an engine step would cost every router more than it tells.
_COALESCE_S = 0.02
_HEARTBEAT_S = 1.0
# What a router may be behind before it has to take a snapshot: about half a million changed blocks.
_RING_BYTES = 4 << 20
# Frames sent in one piece; a reader that takes none for long finds its place gone, and nothing was kept for it.
_MOST_SENT_BYTES = 1 << 20


class KvLedgers:
    """The ledgers of one engine boot, one a data-parallel rank, and the frames that tell of their changes."""

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
        self.seq = 0
        self.is_open = False
        self._metrics = metrics
        self._clock = clock
        self._encode = msgspec.msgpack.Encoder().encode
        self._changes = ChangeSignal()
        self._is_closed = False
        self._ring: deque[bytes] = deque()
        self._ring_left = ring_bytes
        self._flush_at: asyncio.TimerHandle | None = None
        self._newest_at = clock()
        self._sent_whole = True
        self._hub = SubscriberHub(tail_poll_s=tail_poll_s)
        replays = transport.kv_replay or ("",) * len(transport.kv_events)
        self.ranks = [_RankLedger(self, rank, transport.dialect) for rank in range(len(transport.kv_events))]
        self._followers: list[RankSubscriber] = [
            self._hub.follow(RankEndpoint(events, replay, transport.kv_topic), rank)
            for rank, events, replay in zip(self.ranks, transport.kv_events, replays, strict=True)
        ]

    async def close(self) -> None:
        """End every stream and free the sockets."""
        self.end_streams()
        if self._flush_at is not None:
            self._flush_at.cancel()
        await self._hub.close()

    def end_streams(self) -> None:
        self._is_closed = True
        self._changes.notify()

    def forget_adapter(self, engine_name: str) -> None:
        """An adapter was loaded afresh; matters for engines whose loads start with an empty cache."""
        for rank in self.ranks:
            rank.ledger.forget_adapter(engine_name)
            rank.drained()

    async def snapshot(self) -> bytes:
        """A KvSnapshot. Until the engine's past has been read there is none; raises EngineError `not_ready`."""
        if not await self._changes.until(lambda: self.is_open or self._is_closed, timeout_s=5.0) or self._is_closed:
            raise EngineError("not_ready", "the engine's KV events are still being read; ask again", retry_after_s=1)
        self.flush()
        ranks = tuple(
            KvRank(rank.number, **{tier: pack_hashes(rank.ledger.blocks(tier)) for tier in TIERS})
            for rank in self.ranks
        )
        taken = KvSnapshot(self.epoch, self.seq, self.base_model, self.block_size, ranks, self.is_whole)
        self._metrics.kv_snapshots.inc()
        return self._encode(taken)

    def check(self, epoch: str, since: int) -> int:
        """`since`, if the stream can go on after that frame; raises RequestError `events_gone`."""
        if epoch != self.epoch or not self.seq - len(self._ring) <= since <= self.seq:
            raise AgentRequestError(
                "events_gone",
                f"no KV changes after {since} of epoch {epoch[:100]!r} here (epoch {self.epoch!r} has"
                f" {self.seq - len(self._ring)} to {self.seq}); read /v1/kv/snapshot, then go on from there",
                param="since",
            )
        return since

    async def stream(self, since: int) -> AsyncIterator[bytes]:
        """Frames after that one, for ever; a reader that fell behind the ring is cut off, and must start over."""
        self._metrics.kv_readers.inc()
        try:
            while not self._is_closed:
                kept = self.seq - len(self._ring)
                if since < kept:
                    self._metrics.kv_readers_dropped.inc()
                    return
                piece: list[bytes] = []
                size = 0
                for number in range(since - kept, len(self._ring)):
                    frame = self._ring[number]
                    if piece and size + len(frame) > _MOST_SENT_BYTES:
                        break
                    piece.append(frame)
                    size += len(frame)
                since += len(piece)
                # The heartbeat comes first on a new stream: the reader knows at once that it is followed.
                yield b"".join(piece) or self._frame_bytes(KvFrame(self.seq, self._clock(), is_whole=self.is_whole))
                await self._changes.until(partial(self._has_frames_after, since), timeout_s=_HEARTBEAT_S)
        finally:
            self._metrics.kv_readers.dec()

    def flush(self) -> None:
        """Put what changed since the last frame into the ring."""
        if self._flush_at is not None:
            self._flush_at.cancel()
            self._flush_at = None
        changes = tuple(change for rank in self.ranks for change in rank.take_changes())
        cleared = tuple(rank.number for rank in self.ranks if rank.take_cleared())
        if not changes and not cleared and self._sent_whole == self.is_whole:
            return
        self.seq += 1
        self._sent_whole = self.is_whole
        frame = self._frame_bytes(KvFrame(self.seq, self._newest_at, cleared, changes, self.is_whole))
        self._ring.append(frame)
        self._ring_left -= len(frame)
        # At least the newest stays: who has all before it needs it.
        while self._ring_left < 0 and len(self._ring) > 1:
            self._ring_left += len(self._ring.popleft())
        self._changes.notify()

    def changed(self) -> None:
        """Something is to be told within `_COALESCE_S`."""
        if self._flush_at is None:
            self._flush_at = asyncio.get_running_loop().call_later(_COALESCE_S, self.flush)

    def heard(self, at: float) -> None:
        """The engine's own time of the newest event."""
        self._newest_at = at

    def opened(self) -> None:
        self.is_open = all(rank.is_open for rank in self.ranks)
        self._changes.notify()

    def lost(self) -> None:
        """Something is missing now. Routers may ask for repetitions then, which must not count as copies."""
        self.is_whole = False
        for rank in self.ranks:
            rank.ledger.expect_repeats(True)
        self.changed()

    def update_gauges(self) -> None:
        """Bring the gauges up to date."""
        self._metrics.kv_blocks.set(sum(len(rank.ledger) for rank in self.ranks))
        self._metrics.kv_bytes.set(sum(rank.ledger.size_bytes() for rank in self.ranks))
        self._metrics.kv_whole.set(self.is_whole)
        for rank in self.ranks:
            rank.add_counts(self._metrics)

    def _frame_bytes(self, frame: KvFrame) -> bytes:
        data = self._encode(frame)
        return len(data).to_bytes(4, "big") + data

    def _has_frames_after(self, since: int) -> bool:
        return self._is_closed or self.seq > since


class _RankLedger:
    """One rank: hears the engine's batches (a Listener), and keeps what its ledger changed (a Sink)."""

    def __init__(self, ledgers: KvLedgers, number: int, dialect: str) -> None:
        self.number = number
        self.is_open = False
        self._ledgers = ledgers
        traits = TRAITS.get(dialect, TRAITS["vllm"])
        self.ledger = BlockLedger(
            ledgers.base_model, ledgers.block_size, self, traits, most_blocks=KEPT_TIMES * ledgers.total_blocks
        )
        # Came (True) or went since the last frame; what did both is in neither.
        self._pending: dict[Tier, dict[BlockHash, bool]] = {tier: {} for tier in TIERS}
        self._is_cleared = False

    # --- what the engine says ------------------------------------------------------------------------------------

    def batch(self, payload: bytes) -> None:
        at, missed = self.ledger.read(payload)
        if missed:
            self._on_unreadable(missed)
        if at:
            self._ledgers.heard(at)

    def drained(self) -> None:
        if self._is_cleared or any(self._pending.values()):
            self._ledgers.changed()

    def opened(self) -> None:
        self.is_open = True
        self._ledgers.opened()

    def bridged(self) -> None:
        self._ledgers.heard(time.time())

    def lost(self, first: int, last: int) -> None:
        log.warning("the KV ledger is not whole any more", rank=self.number, first=first, last=last)
        self._ledgers.lost()

    def _on_unreadable(self, what: str) -> None:
        # Once is enough: an engine whose events we cannot read sends one a step.
        if self._ledgers.is_whole:
            log.warning("the KV ledger is not whole any more: unreadable", rank=self.number, what=what)
        self._ledgers.lost()

    def malformed(self) -> None:
        self.ledger.rejected["frames"] += 1

    # --- what that changes ---------------------------------------------------------------------------------------

    def add(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        self._add_pending(tier, hashes, came=True)

    def drop(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        self._add_pending(tier, hashes, came=False)

    def clear(self) -> None:
        self._pending = {tier: {} for tier in TIERS}
        self._is_cleared = True

    def take_changes(self) -> list[KvChange]:
        """What changed since the last call."""
        changes = []
        for tier, pending in self._pending.items():
            if pending:
                came = pack_hashes(block for block, is_there in pending.items() if is_there)
                went = pack_hashes(block for block, is_there in pending.items() if not is_there)
                changes.append(KvChange(self.number, tier, came, went))
                self._pending[tier] = {}
        return changes

    def take_cleared(self) -> bool:
        was, self._is_cleared = self._is_cleared, False
        return was

    def add_counts(self, metrics: WorkerMetrics) -> None:
        """Add to the counters what the ledger counted since the last call."""
        for labels, counts in zip((metrics.kv_events, metrics.kv_rejected), self.ledger.take_counts(), strict=True):
            for name, count in counts.items():
                labels.labels(name).inc(count)

    def _add_pending(self, tier: Tier, hashes: Sequence[BlockHash], *, came: bool) -> None:
        pending = self._pending[tier]
        if pending.keys().isdisjoint(hashes):
            pending.update(dict.fromkeys(hashes, came))
            return
        for block in hashes:
            # The ledger tells of each block by turns that it came and that it went: twice is nothing.
            if pending.pop(block, None) is None:
                pending[block] = came
