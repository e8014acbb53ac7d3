"""Uploads: a client's bytes go to a worker, which verifies them; then they are kept, and the adapter is registered.

    receive -> install -> keep -> register

Nothing of an upload is in this process: any orchestrator goes on with one that another has begun, by asking the
workers. A broken upload stays on its worker for an hour.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from weakref import WeakValueDictionary

import httpx
import structlog

from lorafleet.identity import fleet_source, rendezvous_order
from orchestrator.agentless.transport import agent_url_of
from orchestrator.config import OrchestratorSettings
from orchestrator.core.copies import UPLOAD_FILES, SentBytes, UploadQuota, missing_files, upload_id
from orchestrator.core.errors import (
    InvalidAdapter,
    NotFound,
    OrchestratorError,
    OrchestratorRequestError,
    OrchestratorUnavailable,
    StateConflict,
    TooManyUploads,
    UploadTooLarge,
    WorkerFailed,
)
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.model.adapters import AdapterSpec
from orchestrator.model.snapshot import RegisteredAdapter
from orchestrator.reconcile.actor import with_manifest
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.store.upload_store import UploadStore
from workers.wire import (
    BeginFileRequest,
    InspectRequest,
    InstallUploadRequest,
    UnfinishedUpload,
    UploadState,
    WorkerAdapter,
)

log = structlog.get_logger()

_ASKED = 16
"""Workers that are asked whether they have an upload, in the order in which one was chosen for it; a guess."""
_STALL_S = 60.0
"""A worker that takes no byte for so long is given up, as a client that sends none."""
_QUOTA_RETRY_S = 5.0
_HOW_TO_RESUME = "GET /v1/uploads/{0} says how many bytes have come; send the rest with Content-Range"
_NO_BYTES = SentBytes(None, 0, None, is_resumed=True)
# The agent's errors about the request, which the client can mend.
_CLIENT_CODES = frozenset({"upload_offset", "upload_superseded", "upload_incomplete", "upload_file_unknown"})


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadAsk:
    """What a request sends, and of which adapter.

    owner    the caller: another caller's bytes for the same name are another upload
    tenant   whose quota the upload counts for
    file     one of UPLOAD_FILES
    digest   that the adapter must have; None: any
    tenants  that may use the adapter; None: all
    is_published  the bytes are a version of the published name `lora_id`
    """

    lora_id: str
    owner: str
    file: str
    sent: SentBytes
    base_model: str | None = None
    digest: str | None = None
    tenants: tuple[str, ...] | None = None
    is_published: bool = False
    tenant: str = ""

    @property
    def upload_id(self) -> str:
        """The id of the upload at agents."""
        return upload_id(self.owner, self.lora_id)

    @property
    def lora_id_at_agents(self) -> str:
        """The name under which agents install the bytes: a version's number is not known yet."""
        return f"upload/{self.upload_id}" if self.is_published else self.lora_id


@dataclass(frozen=True, slots=True)
class UploadWorker:
    """A ready worker that can be asked to take an upload, or to keep its files."""

    id: str
    agent_url: str
    base_model: str


@dataclass(frozen=True, slots=True)
class KeptUpload:
    """Verified bytes that survive the loss of any one worker, or are as safe as the fleet can keep them.

    source   where they are from now on
    kept_on  workers that keep them; empty with an upload store
    """

    found: WorkerAdapter
    source: str
    kept_on: tuple[str, ...]


class AdapterUploads:
    """Passes uploads on to workers and registers what they have verified."""

    def __init__(
        self,
        registry: AdapterRegistry,
        reconciler: Reconciler,
        store: UploadStore | None,
        *,
        agents: AgentClient,
        settings: OrchestratorSettings,
    ) -> None:
        """`store`: where bytes are kept; None: on workers."""
        self._registry = registry
        self._reconciler = reconciler
        self._store = store
        self._agents = agents
        self._settings = settings
        self._quota = UploadQuota(settings.max_unfinished_uploads, settings.max_unfinished_upload_bytes)
        # Weak: a lock exists only while somebody holds it or waits for it.
        self._tenant_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # --- receive -------------------------------------------------------------------------------------------------

    async def receive(self, ask: UploadAsk, chunks: AsyncIterator[bytes]) -> UploadState:
        """Pass the bytes on to the worker that has the upload, or begins it; returns what has come of it.

        Raises OrchestratorRequestError, OrchestratorUnavailable, and what `chunks` raises.
        """
        most = self._settings.max_upload_bytes
        if (announced := max(ask.sent.total or 0, ask.sent.length or 0)) > most:
            message = f"the upload has {announced} bytes; at most {most} are allowed, see max_upload_bytes"
            raise UploadTooLarge(message)
        holders = await self._holders(ask)
        if ask.sent.is_resumed:
            worker, state = self._holder_of(ask, holders)
            if ask.sent.start is None:
                return state
        else:
            # One at a time: the next one counts what this one has announced.
            async with self._tenant_locks.setdefault(ask.tenant, asyncio.Lock()):
                await self._check_quota(ask)
                worker = await self._begin(ask, [worker for worker, _ in holders])
        try:
            return await self._agents.send_file(
                worker.agent_url,
                ask.upload_id,
                ask.file,
                ask.sent.start or 0,
                _bounded(chunks, most),
                length=ask.sent.length,
                timeout_s=_STALL_S,
            )
        except (WorkerFailed, InvalidAdapter) as exc:
            raise _upload_error(exc, ask, worker.id) from exc

    async def state(self, owner: str, lora_id: str) -> UploadState:
        """What has come of the caller's unfinished upload of the adapter. Raises NotFound `upload_unknown`."""
        ask = UploadAsk(lora_id=lora_id, owner=owner, file="", sent=_NO_BYTES)
        holders = await self._holders(ask)
        if not holders:
            raise NotFound(f"no upload of {lora_id!r} is unfinished; PUT /v1/adapters/{lora_id}", code="upload_unknown")
        return holders[0][1]

    async def drop(self, owner: str, lora_id: str) -> None:
        """Delete what has come of the caller's unfinished upload of the adapter, on every worker that has some."""
        await self.forget(UploadAsk(lora_id=lora_id, owner=owner, file="", sent=_NO_BYTES))

    def registered_already(self, ask: UploadAsk) -> RegisteredAdapter | None:
        """The registered adapter if it has the very digest that the request names; None if bytes are needed.

        Raises StateConflict where the name is taken, or the adapter has another digest or is being deleted.
        """
        known = self._registry.uploadable(ask.lora_id, ask.digest)
        return known if known is not None and ask.digest is not None and known.digest == ask.digest else None

    async def _check_quota(self, ask: UploadAsk) -> None:
        """Raises TooManyUploads if the tenant has as much unfinished as one may. A silent worker's do not count."""

        async def unfinished(worker: UploadWorker) -> tuple[UnfinishedUpload, ...]:
            """The worker's unfinished uploads."""
            try:
                return await self._agents.unfinished_uploads(worker.agent_url, timeout_s=self._settings.probe_timeout_s)
            except (WorkerFailed, InvalidAdapter):
                return ()

        lists = await asyncio.gather(*map(unfinished, self._ready_workers()))
        others = {
            upload.upload_id: (upload.lora_id, upload.size_bytes)
            for upload in chain.from_iterable(lists)
            if upload.tenant == ask.tenant and upload.upload_id != ask.upload_id
        }
        if problem := self._quota.problem(others, ask.sent.total or 0):
            raise TooManyUploads(f"upload of {ask.lora_id!r}: {problem}", retry_after_s=_QUOTA_RETRY_S)

    def _holder_of(
        self, ask: UploadAsk, holders: Sequence[tuple[UploadWorker, UploadState]]
    ) -> tuple[UploadWorker, UploadState]:
        """The worker that can go on with the file, and what it has. Raises StateConflict."""
        for worker, state in holders:
            for file in state.files:
                if file.name == ask.file and ask.sent.total in (None, file.total_bytes):
                    return worker, state
        known = [file for _, state in holders for file in state.files if file.name == ask.file]
        have = f"what has come is of a file of {known[0].total_bytes} bytes" if known else "nothing of it has come"
        message = f"upload of {ask.lora_id!r} cannot go on: {have}; send it from the first byte, without Content-Range"
        raise StateConflict(message, code="upload_unknown", param="Content-Range")

    async def _holders(self, ask: UploadAsk) -> list[tuple[UploadWorker, UploadState]]:
        """The workers that have some of the upload, and what; those with the most bytes first."""
        workers = self._able_workers(ask)[:_ASKED]

        async def probe(worker: UploadWorker) -> UploadState | None:
            """What the worker has; None if it has nothing or does not answer."""
            timeout_s = self._settings.probe_timeout_s
            try:
                return await self._agents.upload_state(worker.agent_url, ask.upload_id, timeout_s=timeout_s)
            except (WorkerFailed, InvalidAdapter):
                return None

        states = await asyncio.gather(*map(probe, workers))
        found = [(worker, state) for worker, state in zip(workers, states, strict=True) if state is not None]
        found.sort(key=lambda each: -sum(file.received_bytes for file in each[1].files))
        return found

    async def _begin(self, ask: UploadAsk, holders: Sequence[UploadWorker]) -> UploadWorker:
        """The worker that has room for the file and has begun it: one that has another file of it comes first.

        Raises OrchestratorUnavailable if none takes it, OrchestratorRequestError if it is too large for them.
        """
        first = {worker.id for worker in holders}
        workers = sorted(self._able_workers(ask), key=lambda worker: worker.id not in first)
        refused: WorkerFailed | None = None
        announced = BeginFileRequest(total_bytes=ask.sent.total, lora_id=ask.lora_id, tenant=ask.tenant)
        for worker in workers[:_ASKED]:
            try:
                await self._agents.begin_file(
                    worker.agent_url, ask.upload_id, ask.file, announced, timeout_s=self._settings.probe_timeout_s
                )
            except InvalidAdapter as exc:
                raise _upload_error(exc, ask, worker.id) from exc
            except WorkerFailed as exc:
                if exc.code in _CLIENT_CODES:
                    raise _upload_error(exc, ask, worker.id) from exc
                refused = exc
            else:
                return worker
        if refused is not None:
            message = f"no worker takes the upload of {ask.lora_id!r}: {refused}"
            raise OrchestratorUnavailable(message, code=refused.code, retry_after_s=5) from refused
        base = f" of base model {ask.base_model}" if ask.base_model else ""
        message = f"an upload is verified by a worker with an agent, and no such worker{base} is ready"
        raise OrchestratorUnavailable(message, retry_after_s=5)

    def _able_workers(self, ask: UploadAsk) -> list[UploadWorker]:
        """Workers with the adapter's base model, in the order in which uploads try them."""
        able = [worker for worker in self._ready_workers() if ask.base_model in (None, worker.base_model)]
        return rendezvous_order(ask.upload_id, able)

    def _ready_workers(self) -> list[UploadWorker]:
        """All ready workers with agents."""
        observed = self._reconciler.queries.observe().workers
        return [
            UploadWorker(worker_id, url, observed[worker_id].base_model)
            for worker_id, entry in self._reconciler.reports.workers.items()
            if (url := agent_url_of(entry.report)) and observed[worker_id].state == "ready"
        ]

    # --- install, keep, register ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def kept(self, ask: UploadAsk, state: UploadState) -> AsyncIterator[KeptUpload | None]:
        """Have a whole upload verified and its bytes kept; None while a file has not come whole.

        Register them within the block: until its end no copy is released. Versions of published names stay on workers
        also where there is an upload store. A repeated call finds what is done already.

        Raises OrchestratorRequestError for bytes that are refused, OrchestratorUnavailable while they cannot be kept.
        """
        if missing_of(state):
            yield None
            return
        holder = next((worker for worker, held in await self._holders(ask) if not missing_of(held)), None)
        if holder is None:
            raise _interrupted(ask, "the worker that has it does not answer")
        install = InstallUploadRequest(lora_id=ask.lora_id_at_agents, base_model=ask.base_model, digest=ask.digest)
        try:
            found = await self._agents.install_upload(
                holder.agent_url, ask.upload_id, install, timeout_s=self._settings.inspect_timeout_s
            )
        except (WorkerFailed, InvalidAdapter) as exc:
            raise _upload_error(exc, ask, holder.id) from exc
        if self._store is not None and not ask.is_published:
            yield KeptUpload(found, await self._write_to_store(self._store, ask, found, holder), ())
            return
        with self._reconciler.copies.arriving(found.digest):
            kept_on = await self._keep_on_workers(ask, found, holder)
            yield KeptUpload(found, fleet_source(found.digest), kept_on)

    async def register(self, ask: UploadAsk, kept: KeptUpload, actor: str) -> tuple[RegisteredAdapter, bool]:
        """Register the adapter with its digest, and forget the upload; returns it, and whether it is new.

        Raises StateConflict where other bytes were registered meanwhile, NotFound if another call deletes the adapter.
        """
        known = self._registry.uploadable(ask.lora_id, kept.found.digest)
        if known is not None and known.digest is not None:
            await self.forget(ask)
            return known, False
        source = kept.source if known is None else known.source
        spec = AdapterSpec(
            lora_id=ask.lora_id,
            source=source,
            base_model=ask.base_model or kept.found.base_model or None,
            digest=kept.found.digest,
            tenants=ask.tenants if known is None else known.tenants,
        )
        store = self._reconciler.store
        with store.together():
            adapter, is_new = self._registry.register(spec, actor)
            # Verified already: no worker needs to fetch it again to know it.
            verified = with_manifest(adapter, kept.found)
            store.put_adapter(replace(verified, pinned_source=None))
        await self._reconciler.publish_change(("adapters", ask.lora_id))
        await self.forget(ask)
        return self._registry.adapter(ask.lora_id), is_new

    def note_on_copies(self, kept: KeptUpload) -> str:
        """What the client should know of where its bytes are; "" if they are as safe as was asked."""
        wanted = self._settings.fleet_copies
        if self._store is not None or len(kept.kept_on) >= wanted:
            return ""
        count = f"{len(kept.kept_on)} worker{'s' if len(kept.kept_on) > 1 else ''}"
        return f"kept on {count} alone, because the fleet's workers have no other disks; fleet_copies is {wanted}"

    async def forget(self, ask: UploadAsk) -> None:
        """Delete what has come of an upload, on every worker that may have some.

        A worker that does not answer forgets it by itself.
        """
        workers = self._able_workers(ask)[:_ASKED]
        await asyncio.gather(*(self._drop(worker, ask.upload_id) for worker in workers))

    async def _drop(self, worker: UploadWorker, name: str) -> None:
        """Have a worker forget an upload; a failure is logged."""
        try:
            await self._agents.drop_upload(worker.agent_url, name, timeout_s=self._settings.probe_timeout_s)
        except (WorkerFailed, InvalidAdapter) as exc:
            log.info("upload not forgotten; its worker does so within an hour", worker_id=worker.id, error=str(exc))

    async def _keep_on_workers(self, ask: UploadAsk, found: WorkerAdapter, holder: UploadWorker) -> tuple[str, ...]:
        """Have `fleet_copies` workers keep the files, or all where there are fewer; returns their ids.

        Raises OrchestratorUnavailable if too few can.
        """
        others = [worker for worker in rendezvous_order(ask.upload_id, self._ready_workers()) if worker.id != holder.id]
        others.sort(key=lambda worker: worker.base_model != holder.base_model)
        disks = self._reconciler.files.disks
        disk_ids = {w.id: disks[w.id].disk_id if w.id in disks else w.id for w in (holder, *others)}
        wanted = min(self._settings.fleet_copies, len(set(disk_ids.values())))
        kept: dict[str, str] = {}  # disk -> worker
        refused: WorkerFailed | InvalidAdapter | None = None
        for worker in (holder, *others):
            if len(kept) == wanted or disk_ids[worker.id] in kept:
                continue
            neighbours = () if worker is holder else (holder.id,)
            timeout_s = self._settings.inspect_timeout_s
            try:
                await self._reconciler.copies.keep_on(worker.id, found.digest, neighbours, timeout_s=timeout_s)
            except (WorkerFailed, InvalidAdapter) as exc:
                refused = exc
            else:
                kept[disk_ids[worker.id]] = worker.id
        if len(kept) < wanted:
            message = (
                f"{len(kept)} of {wanted} workers keep the bytes of {ask.lora_id!r}, see fleet_copies: {refused};"
                " the upload stays: send it again, or `Content-Range: bytes */<size>` alone"
            )
            raise OrchestratorUnavailable(message, code="too_few_copies", retry_after_s=5)
        return tuple(kept.values())

    async def _write_to_store(
        self, store: UploadStore, ask: UploadAsk, found: WorkerAdapter, holder: UploadWorker
    ) -> str:
        """Write the files into the store, and have the worker read them there; returns the source.

        Raises OrchestratorUnavailable if the store takes no bytes, or the worker cannot read them.
        """
        source = store.source(found.digest)
        try:
            async with asyncio.timeout(self._settings.inspect_timeout_s):
                for name in await self._agents.file_names(
                    holder.agent_url, found.digest, timeout_s=self._settings.probe_timeout_s
                ):
                    async with self._agents.reading_file(
                        holder.agent_url, found.digest, name, timeout_s=_STALL_S
                    ) as chunks:
                        await store.write(found.digest, name, chunks)
            again = InspectRequest(lora_id=ask.lora_id_at_agents, source=source, base_model=ask.base_model)
            there, _ = await self._agents.inspect(holder.agent_url, again, timeout_s=self._settings.inspect_timeout_s)
        except (WorkerFailed, InvalidAdapter, httpx.HTTPError, TimeoutError) as exc:
            message = f"worker {holder.id} cannot read the upload store's {source}: {exc!s}; see upload_store"
            raise OrchestratorUnavailable(message, code="upload_store_failed", retry_after_s=5) from exc
        if there.digest != found.digest:
            message = (
                f"the upload store's {source} has digest {there.digest}, written was {found.digest}: workers must read"
                " the very store that the orchestrator writes (upload_store)"
            )
            raise OrchestratorUnavailable(message, code="upload_store_failed", retry_after_s=5)
        return source


def missing_of(state: UploadState) -> tuple[str, ...]:
    """The files of an upload that have not come whole, in the order to send them."""
    return missing_files({file.name: (file.received_bytes, file.total_bytes) for file in state.files})


async def _bounded(chunks: AsyncIterator[bytes], most_bytes: int) -> AsyncIterator[bytes]:
    """The chunks, as long as they are within the bound. Raises UploadTooLarge."""
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > most_bytes:
            message = f"the upload has more than {most_bytes} bytes, which are allowed; see max_upload_bytes"
            raise UploadTooLarge(message)
        if chunk:
            yield chunk


def _interrupted(ask: UploadAsk, why: str) -> OrchestratorUnavailable:
    """The error of an upload that its client can go on with."""
    message = f"the upload of {ask.lora_id!r} was interrupted: {why}; {_HOW_TO_RESUME.format(ask.lora_id)}"
    return OrchestratorUnavailable(message, code="upload_interrupted", retry_after_s=1)


def _upload_error(exc: WorkerFailed | InvalidAdapter, ask: UploadAsk, worker_id: str) -> OrchestratorError:
    """The error for the client, by the agent's."""
    if exc.code == "source_too_big":
        return UploadTooLarge(f"worker {worker_id}: {exc}")
    if isinstance(exc, InvalidAdapter):
        return OrchestratorRequestError(f"upload refused: {exc}", code=exc.code, param="body")
    if exc.code in _CLIENT_CODES:
        return StateConflict(f"{exc}; {_HOW_TO_RESUME.format(ask.lora_id)}", code=exc.code)
    if exc.code == "upload_unknown":
        message = f"the upload of {ask.lora_id!r} is gone from worker {worker_id}; send it from the first byte"
        return StateConflict(message, code="upload_unknown")
    if exc.code == "disk_full":
        return OrchestratorUnavailable(f"worker {worker_id}: {exc}", code="disk_full", retry_after_s=5)
    return _interrupted(ask, str(exc))


__all__ = ["UPLOAD_FILES", "AdapterUploads", "KeptUpload", "UploadAsk", "missing_of"]
