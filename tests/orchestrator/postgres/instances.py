"""Orchestrators' stores in a PostgreSQL database, without the rest of the orchestrator."""

import asyncio
import contextlib
import secrets
import time

from orchestrator.core.lease import LeaseCandidate
from orchestrator.postgres.backend import PostgresBackend
from orchestrator.postgres.database import DatabaseSession
from orchestrator.postgres.lease import PostgresLease
from orchestrator.store.store import IntentStore
from tests.patience import patience

_LEASE_S = 0.5


class SilentProxy:
    """Passes connections on to a server, until it is silent: it then takes bytes of both sides, and sends none."""

    def __init__(self, port):
        self._target = port
        self._after = None
        self._writers = set()
        self.is_silent = False

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.close_all()
        self._server.close()

    def is_silent_after(self, words):
        """Be silent once a client has sent a statement with these words."""
        self._after = words.encode()

    def close_all(self):
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader, writer):
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, other_writer}
        await asyncio.gather(self._pump(reader, other_writer, is_client=True), self._pump(other_reader, writer))
        self._writers -= {writer, other_writer}

    async def _pump(self, reader, writer, *, is_client=False):
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self.is_silent:
                    continue
                writer.write(data)
                await writer.drain()
                if is_client and self._after is not None and self._after in data:
                    self.is_silent, self._after = True, None
        if not self.is_silent:
            writer.close()


class DatabaseStoreInstance:
    """One orchestrator's store with its lease."""

    def __init__(self, address, *, wall, give_up_s, call_s):
        self.holder = secrets.token_hex(4)
        self.undone = 0
        self.session = DatabaseSession(lambda: address, call_s=call_s)
        self.backend = PostgresBackend(
            self.session, holder=self.holder, on_undone=self._take_back, give_up_s=give_up_s, follow_s=0.05
        )
        self.store = IntentStore(self.backend, wall=wall)
        self.lease = PostgresLease(DatabaseSession(lambda: address, call_s=call_s))
        self._loop = None

    def _take_back(self):
        self.undone += 1
        self.store.refresh()

    async def open(self):
        await self.backend.open()
        self._loop = asyncio.create_task(self.backend.run())
        return self

    async def take_lease(self):
        """Take the lease as a candidate does: after its duration, unless it was released."""
        candidate = LeaseCandidate(holder=self.holder, url="", duration_s=_LEASE_S, margin_s=0.0)
        while True:
            candidate.observe_record(await self.lease.read(), time.monotonic())
            wanted = candidate.next_record(time.monotonic(), is_holder_gone=False)
            if wanted is not None and await self.lease.write(wanted, candidate.last_seen):
                return
            await asyncio.sleep(0.02)

    async def lead(self):
        """Begin a term as the reconciler does."""
        await self.take_lease()
        await self.store.catch_up()
        self.store.reload()
        self.store.raise_epoch(self.store.epoch)
        await self.store.wait_durable()
        self.store.refresh()
        return self

    async def close(self):
        await self.store.write_remaining()
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        self.store.close()
        self.lease.close()


class DatabaseStoreInstances:
    """Opens store instances at one address and closes all at the end."""

    def __init__(self, address):
        self.address = address
        self._open = []

    async def open(self, *, wall=lambda: 1_800_000_000.0, give_up_s=None, call_s=None):
        instance = DatabaseStoreInstance(
            self.address, wall=wall, give_up_s=give_up_s or patience(5), call_s=call_s or patience(3)
        )
        self._open.append(instance)
        return await instance.open()

    async def lead(self, **options):
        return await (await self.open(**options)).lead()

    async def close(self, instance):
        self._open.remove(instance)
        await instance.close()

    async def close_all(self):
        for instance in list(self._open):
            with contextlib.suppress(Exception):
                await self.close(instance)
