"""Subscribe to each engine's KV events and feed the index; bridge holes from the engine's replay socket.

source  vLLM 0.32 distributed/kv_events.py: frames [topic, seq, msgpack [ts, events, rank]]; maps since June 2026,
        positional arrays before. Replay: DEALER [b"", seq] -> [b"", topic, seq, payload]* then seq = ff * 8.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
import zmq
import zmq.asyncio

from lorafleet.kv.blocks import root_hash
from lorafleet.loops import forever
from router.core.index import KvIndex, WorkerId
from router.metrics import Metrics

log = structlog.get_logger()

_END = b"\xff" * 8
_REPLAY_SILENCE_S = 2.0
_REPLAY_TRIES = 3
# Messages taken in one go before other tasks get a turn.
_BATCH = 64
_DEVICE = (None, "GPU", "gpu")
_POSITIONS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a worker's events come from. A new engine boot has a new topic and therefore is a new source."""

    worker: WorkerId
    base_model: str
    block_size: int
    events: str
    replay: str
    topic: str


def apply_event(index: KvIndex, source: Source, event: Any) -> tuple[str, str | None]:
    """Apply one decoded event; returns (its type, why it was not accepted or None). Never guesses."""
    kind, fields = _named(event)
    if kind == "AllBlocksCleared":
        index.forget(source.worker)
        return kind, None
    if kind not in _POSITIONS:
        return "unknown", "unknown_type"
    if fields.get("group_idx") not in (None, 0):
        return kind, "group"
    if fields.get("medium") not in _DEVICE:
        return kind, "medium"
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(isinstance(name, int | bytes) for name in hashes):
        return kind, "shape"
    if kind == "BlockRemoved":
        return kind, "unknown_block" if index.remove(source.worker, hashes) else None
    return kind, _store(index, source, hashes, fields)


def _store(index: KvIndex, source: Source, hashes: list[Any], fields: Mapping[str, Any]) -> str | None:
    if fields.get("block_size") != source.block_size:
        return "block_size"
    lora_name = fields.get("lora_name") or ""
    if not isinstance(lora_name, str):
        return "shape"
    salt = cache_salt(fields.get("extra_keys"), lora_name)
    if salt is None:
        return "extra_keys"
    parent = fields.get("parent_block_hash")
    root = root_hash(source.base_model, lora_name, salt)
    try:
        return index.store(source.worker, hashes, fields.get("token_ids") or (), parent=parent, root=root)
    except (TypeError, OverflowError):
        return "shape"


def cache_salt(extra_keys: Any, lora_name: str) -> str | None:
    """The cache salt among a store's extra keys ("" without one), or None when there is a key we do not index.

    source  vLLM 0.32 generate_block_hash_extra_keys: per block nil or [lora name][media...][salt, block 0 only]
    """
    if extra_keys is None:
        return ""
    if not isinstance(extra_keys, list):
        return None
    salt = ""
    for number, keys in enumerate(extra_keys):
        if keys is not None and not isinstance(keys, list):
            return None
        rest = list(keys or ())
        if lora_name and rest[:1] == [lora_name]:
            del rest[0]
        if rest and (number > 0 or len(rest) > 1 or not isinstance(rest[0], str)):
            return None
        salt = rest[0] if rest else salt
    return salt


def _named(event: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(event, dict):
        return str(event.get("type")), event
    if isinstance(event, list) and event:
        kind = str(event[0])
        return kind, dict(zip(_POSITIONS.get(kind, ()), event[1:], strict=False))
    return "malformed", {}


class Feed:
    """One worker's events, in order, from the oldest that the engine still has to the newest."""

    def __init__(
        self, source: Source, index: KvIndex, context: zmq.asyncio.Context, metrics: Metrics, *, tail_poll_s: float
    ) -> None:
        self.source = source
        self._index = index
        self._context = context
        self._metrics = metrics
        self._tail_poll_s = tail_poll_s
        self._decode = msgspec.msgpack.Decoder().decode
        self._last = -1

    async def run(self) -> None:
        """Follow until cancelled; a session that breaks starts again from what was last applied."""

        async def session() -> None:
            with self._context.socket(zmq.SUB) as live:
                # Unbounded: a dropped message would be a hole; the engine's own buffer bounds what can pile up.
                live.setsockopt(zmq.RCVHWM, 0)
                live.setsockopt(zmq.LINGER, 0)
                live.subscribe(self.source.topic.encode())
                live.connect(self.source.events)
                await self._replay()
                await self._follow(live)

        await forever(
            session, name="kv_events", every_s=1.0, on_failure=self._metrics.loop_failures.labels("kv_events").inc
        )

    async def _follow(self, live: zmq.asyncio.Socket) -> None:
        while True:
            if not await live.poll(int(self._tail_poll_s * 1000)):
                # Loss at the tail shows only with the next message; do not wait for that one.
                await self._replay()
                continue
            for _ in range(_BATCH):
                try:
                    frames = await live.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                await self._take(frames)
            self._metrics.kv_blocks.labels(self.source.worker).set(self._index.workers().get(self.source.worker, 0))
            await asyncio.sleep(0)

    async def _take(self, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._metrics.kv_rejected.labels(self.source.worker, "frames").inc()
            return
        seq = int.from_bytes(frames[1], "big")
        if seq > self._last + 1:
            await self._replay(until=seq)
            if seq > self._last + 1:
                self._skip_to(seq)
        if seq == self._last + 1:
            self._apply(seq, frames[2])

    async def _replay(self, until: int | None = None) -> None:
        """Apply what the engine's buffer has after the last applied batch, up to `until` when given."""
        for _ in range(_REPLAY_TRIES):
            start = self._last + 1
            finished = await self._replay_from(start)
            if until is not None and self._last + 1 >= until:
                self._metrics.kv_gaps.labels(self.source.worker, "replayed").inc()
                return
            if finished or self._last + 1 == start:
                return

    async def _replay_from(self, start: int) -> bool:
        """One request to the replay socket; whether it was answered to its end without a hole.

        The engine drops silently for a slow reader (vLLM 0.32, seen running), so order is checked here.
        """
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.RCVHWM, 0)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self.source.replay)
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            while await dealer.poll(int(_REPLAY_SILENCE_S * 1000)):
                frames = await dealer.recv_multipart()
                if len(frames) != 4 or frames[2] == _END:
                    return True
                if frames[1] != self.source.topic.encode():
                    continue
                seq = int.from_bytes(frames[2], "big")
                if seq > self._last + 1:
                    if seq > start and self._last + 1 > start:
                        return False
                    self._skip_to(seq)
                if seq == self._last + 1:
                    self._apply(seq, frames[3])
            return False

    def _skip_to(self, seq: int) -> None:
        """Nothing can bridge this hole: keep what is known, say so, and go on after it."""
        self._metrics.kv_gaps.labels(self.source.worker, "lost").inc()
        self._metrics.kv_degraded.labels(self.source.worker).set(1)
        log.warning("KV events lost", worker=self.source.worker, first=self._last + 1, last=seq - 1)
        self._last = seq - 1

    def _apply(self, seq: int, payload: bytes) -> None:
        self._last = seq
        try:
            batch = self._decode(payload)
            events = list(batch[1])
        except (msgspec.DecodeError, IndexError, TypeError, KeyError, ValueError):
            self._metrics.kv_rejected.labels(self.source.worker, "undecodable").inc()
            return
        for event in events:
            kind, rejected = apply_event(self._index, self.source, event)
            if rejected is None:
                self._metrics.kv_events.labels(self.source.worker, kind).inc()
            else:
                self._metrics.kv_rejected.labels(self.source.worker, rejected).inc()


@dataclass(slots=True)
class Feeds:
    """A feed for each worker that has one, and an index for each (base model, block size)."""

    metrics: Metrics
    tail_poll_s: float
    context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)
    indexes: dict[tuple[str, int], KvIndex] = field(default_factory=dict)
    _running: dict[WorkerId, tuple[Source, asyncio.Task[None]]] = field(default_factory=dict)

    def index(self, base_model: str, block_size: int) -> KvIndex:
        """The index of this base model at this block size; empty when nothing is known."""
        return self.indexes.setdefault((base_model, block_size), KvIndex(block_size))

    def follow(self, source: Source) -> None:
        """Feed the index from this source, instead of the worker's former one."""
        running = self._running.get(source.worker)
        if running is not None and running[0] == source:
            return
        self.forget(source.worker)
        feed = Feed(
            source,
            self.index(source.base_model, source.block_size),
            self.context,
            self.metrics,
            tail_poll_s=self.tail_poll_s,
        )
        self.metrics.kv_degraded.labels(source.worker).set(0)
        self._running[source.worker] = (source, asyncio.create_task(feed.run()))

    def forget(self, worker: WorkerId) -> None:
        """Stop a worker's feed and drop its blocks."""
        # Every index: one without a feed holds the blocks of prompts just sent, too.
        for index in self.indexes.values():
            index.forget(worker)
        running = self._running.pop(worker, None)
        if running is not None:
            running[1].cancel()
            self.metrics.forget_worker(worker)

    async def close(self, *, gather: Callable[..., Any] = asyncio.gather) -> None:
        """Stop every feed and free the sockets."""
        tasks = [task for _, task in self._running.values()]
        for worker in list(self._running):
            self.forget(worker)
        await gather(*tasks, return_exceptions=True)
        self.context.destroy(linger=0)
