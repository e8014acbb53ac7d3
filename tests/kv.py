"""Test doubles: an engine's KV event sockets, which can lose messages, and an agent's ledger over HTTP."""

import asyncio
import contextlib
import uuid

import msgspec
import zmq
import zmq.asyncio
from fastapi import FastAPI

from lorafleet.identity import block_hashes, root_hash
from lorafleet.keys.auth import ApiKeys
from lorafleet.service.http import install_error_handlers
from tests.serving import serving
from workers.agent.kv_ledger import KvLedgers
from workers.api import kv_routes
from workers.core.errors import EngineError, WorkerError
from workers.metrics import WorkerMetrics
from workers.wire import Transport


def stored(hashes, tokens, parent=None, **more):
    fields = {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None} | more
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, **fields}


def removed(*hashes, medium="GPU"):
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


def chain(n, start=0):
    """Events that store blocks `start` to `n` of one growing prompt, one a batch."""
    return [stored([i + 1], [2 * i, 2 * i + 1], i or None) for i in range(start, n)]


def ours(tokens, *, name="", salt=""):
    return block_hashes(tokens, block_size=2, root=root_hash("m", name, salt))


class KvEngine:
    """One rank's two KV event sockets, as in vLLM."""

    def __init__(self, topic="kv@boot"):
        self.topic = topic.encode()
        # Abstract (`@`): no file is left, and pytest's folders are too long for a socket's path.
        self.events, self.replay = (f"ipc://@{uuid.uuid4().hex}" for _ in range(2))
        self.batches: list[bytes] = []
        self.kept_from = 0
        self.skip: set[int] = set()
        self.replays = 0
        self.has_topic_in_replay = True

    @contextlib.asynccontextmanager
    async def running(self):
        context = zmq.asyncio.Context()
        self.pub, self.router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        for socket, endpoint in ((self.pub, self.events), (self.router, self.replay)):
            socket.set_hwm(0)
            socket.bind(endpoint)
        answering = asyncio.create_task(self._answer())
        try:
            yield self
        finally:
            answering.cancel()
            context.destroy(linger=0)

    async def publish(self, *events, lost=False, ts=0.0):
        await self.send(msgspec.msgpack.encode([ts, list(events), None]), lost=lost)

    async def send(self, payload, *, lost=False):
        self.batches.append(payload)
        if not lost:
            await self.pub.send_multipart([self.topic, (len(self.batches) - 1).to_bytes(8, "big"), payload])

    async def _answer(self):
        while True:
            client, _, start = await self.router.recv_multipart()
            self.replays += 1
            for seq in range(max(self.kept_from, int.from_bytes(start, "big")), len(self.batches)):
                if seq not in self.skip:
                    await self._replayed(client, self.topic, seq.to_bytes(8, "big"), self.batches[seq])
            self.skip.clear()
            await self._replayed(client, b"", b"\xff" * 8, b"")

    async def _replayed(self, client, topic, seq, payload):
        head = [client, b"", topic] if self.has_topic_in_replay else [client, b""]
        await self.router.send_multipart([*head, seq, payload])


class KvAgent:
    """The part of an agent that serves its engine's ledger."""

    def __init__(self, *engines, boot="boot", dialect="vllm", **more):
        self.engines = engines
        self.boot = boot
        self.dialect = dialect
        self.more = more
        self.metrics = WorkerMetrics()
        self.ledgers: KvLedgers | None = None

    def kv_ledgers(self):
        if self.ledgers is None:
            raise EngineError("not_ready", "no KV ledger", retry_after_s=1)
        return self.ledgers

    @property
    def transport(self):
        return Transport(
            engine_url="",
            dialect=self.dialect,
            kv_events=tuple(engine.events for engine in self.engines),
            kv_replay=tuple(engine.replay for engine in self.engines),
            kv_topic=self.engines[0].topic.decode(),
        )

    @contextlib.asynccontextmanager
    async def running(self, *, port=0, send_buffer_bytes=None):
        """Its URL. Stopped and run again it is an agent that restarted: another ledger, of the same engine boot."""
        self.ledgers = KvLedgers(
            transport=self.transport,
            base_model="m",
            block_size=2,
            engine_boot_id=self.boot,
            metrics=self.metrics,
            **self.more,
        )
        app = FastAPI()
        app.include_router(kv_routes(self, ApiKeys([])))
        install_error_handlers(app, WorkerError)
        try:
            async with serving(app, port=port, send_buffer_bytes=send_buffer_bytes) as url:
                try:
                    yield url
                finally:
                    self.ledgers.end_streams()
        finally:
            ledgers, self.ledgers = self.ledgers, None
            await ledgers.close()
