"""KV cache events as vLLM 0.32 publishes them (vllm/distributed/kv_events.py).

Events are msgpack maps with a `type`. A ZMQ PUB socket sends numbered batches, a ROUTER socket repeats them. The
publisher runs in a thread, so that a slow reader of a replay does not stall the engine. Messages are lost as in vLLM:
both sockets drop them at a full queue.
"""

import queue
import threading
from typing import Any

import msgspec
import zmq

from lorafleet.service.numbered_log import NumberedLog
from lorafleet.sim.settings import EventsConfig

BlockHash = int | bytes
"""A block's hash in an event: the low 64 bits of vLLM's hash, or all 32 bytes."""

MEDIUM = "GPU"
"""vLLM also uses GPU on the CPU."""


class KVEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """One change of the cache."""


class BlockStored(KVEvent):
    """`block_hashes` are now cached; `token_ids` has their tokens in order, `block_size` each."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(KVEvent):
    """One copy of each of `block_hashes` was evicted."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVEvent):
    """The whole cache was cleared."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one engine step. `ts` is Unix time."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
POLL_S = 0.1  # vLLM's: a replay waits at most this long


class KVEventPublisher:
    """Publishes batches in order from sequence number 0. Binds wildcard, ipc and inproc endpoints, else connects."""

    def __init__(self, config: EventsConfig) -> None:
        """Open the sockets and start the publisher's thread."""
        self.config = config
        self._queue: queue.Queue[EventBatch | None] = queue.Queue(config.max_queue_size)
        self._sent = NumberedLog[tuple[bytes, bytes]](config.buffer_steps, last=-1)  # sequence number, batch
        self._context: zmq.Context[Any] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        if _is_bound(config.endpoint):
            self._pub.bind(config.endpoint)
        else:
            self._pub.connect(config.endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.bind(config.replay_endpoint)
        self._thread = threading.Thread(target=self._publish_queued, name="zmq-publisher", daemon=True)
        self._thread.start()

    def publish(self, batch: EventBatch) -> None:
        """Queue `batch` for the publisher's thread; blocks while the queue is full."""
        self._queue.put(batch)

    def close(self) -> None:
        """Send the queued batches, end the thread and close the sockets. Blocking."""
        self._queue.put(None)
        self._thread.join()
        self._pub.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)
        self._context.term()

    def _publish_queued(self) -> None:
        """Answer replays and publish queued batches until `close`. Each batch is numbered, and kept for replays."""
        encoder = msgspec.msgpack.Encoder()
        topic = self.config.topic.encode()
        while True:
            if self._replay is not None and self._replay.poll(0):
                self._answer_replay(self._replay, topic)
            try:
                batch = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if batch is None:
                return
            payload = encoder.encode(batch)
            seq = self._sent.next_number.to_bytes(8, "big")
            self._pub.send_multipart((topic, seq, payload))
            self._sent.add((seq, payload))

    def _answer_replay(self, replay: "zmq.Socket[bytes]", topic: bytes) -> None:
        """Receive a replay request and send all buffered batches from its sequence number on.

        A malformed request gets no answer.
        """
        frames = replay.recv_multipart()
        if len(frames) != 3:  # expected [client, b"", first sequence number]; vLLM does not answer otherwise
            return
        client, _, first_bytes = frames
        for seq, payload in self._sent.after(int.from_bytes(first_bytes, "big") - 1):
            replay.send_multipart((client, b"", topic, seq, payload))
        replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _is_bound(endpoint: str) -> bool:
    """Whether the publisher binds the endpoint; else it connects to it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
