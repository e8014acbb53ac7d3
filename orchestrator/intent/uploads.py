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
from typing import Literal, get_args
from weakref import WeakValueDictionary

import httpx
import structlog
from pydantic import BaseModel, Field

from lorafleet.identity import fleet_source, rendezvous_order
from orchestrator.agentless.transport import agent_url_of
from orchestrator.config import OrchestratorSettings
from orchestrator.core.copies import UPLOAD_FILES, SentBytes, UploadQuota, files_still_to_send, upload_id
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
from orchestrator.intent.registry import AdapterRegistry, Registration
from orchestrator.model.adapters import AdapterSpec, RegisteredAdapter
from orchestrator.reconcile.actor import require_usual_weights, with_manifest
from orchestrator.reconcile.agent_client import AgentClient
from orchestrator.reconcile.file_copies import FileRelay
from orchestrator.reconcile.reconciler import Reconciler
from orchestrator.store.upload_store import UploadStore
from workers.wire import (
    BeginFileRequest,
    InspectRequest,
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
# The agent's errors about the request, which the client can mend.
_CLIENT_CODES = frozenset({"upload_offset", "upload_superseded", "upload_incomplete", "upload_file_unknown"})

UploadFile = Literal["archive", "adapter_config.json", "adapter_model.safetensors", "acceptance.jsonl"]
assert get_args(UploadFile) == UPLOAD_FILES


class UploadQuery(BaseModel):
    """What an upload is, and what becomes of it."""

    file: UploadFile = Field(default="archive", description="what the body is: an archive, or one of the two files")
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$", description="that the adapter must have")
    base_model: str | None = Field(default=None, description="its name in the fleet; default: by its config")
    tenant: tuple[str, ...] | None = Field(
        default=None, description="tenants that may use it; default: the key's own, else all"
    )
    publish: bool = Field(default=False, description="publish the bytes as the next version of a published name")
    expected_version: int | None = Field(default=None, ge=0, description="as of a publish; with `publish` alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadAsk:
    """A request that sends bytes of an adapter.

    owner    the caller: another caller's bytes for the same name are another upload
    tenant   whose quota the upload counts for
    tenants  that may use the adapter; None: all
    """

    lora_id: str
    owner: str
    tenant: str
    wanted: UploadQuery
    sent: SentBytes
    tenants: tuple[str, ...] | None = None

    @property
    def upload_id(self) -> str:
        """The id of the upload at agents."""
        return upload_id(self.owner, self.lora_id)

    def inspection(self, source: str = "upload") -> InspectRequest:
        """The request to verify its bytes, which this upload has, or that source.

        A version's number is not known yet, so that agents install it under the upload's name.
        """
        lora_id = f"upload/{self.upload_id}" if self.wanted.publish else self.lora_id
        return InspectRequest(
            lora_id=lora_id, source=source, base_model=self.wanted.base_model, digest=self.wanted.digest
        )


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
    """Passes uploads on to workers and registers what they have verified.

    relay  reads files by digest
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        reconciler: Reconciler,
        store: UploadStore | None,
        *,
        agents: AgentClient,
        relay: FileRelay,
        settings: OrchestratorSettings,
    ) -> None:
        """`store`: where bytes are kept; None: on workers."""
        self._registry = registry
        self._reconciler = reconciler
        self._store = store
        self._agents = agents
        self.relay = relay
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
        holders = await self._holders(ask.upload_id, ask.wanted.base_model)
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
                ask.wanted.file,
                ask.sent.start or 0,
                _bounded_chunks(chunks, most),
                length=ask.sent.length,
                timeout_s=_STALL_S,
            )
        except (WorkerFailed, InvalidAdapter) as exc:
            raise _upload_error(exc, ask, worker.id) from exc

    async def state(self, owner: str, lora_id: str) -> UploadState:
        """What has come of the caller's unfinished upload of the adapter. Raises NotFound `upload_unknown`."""
        holders = await self._holders(upload_id(owner, lora_id))
        if not holders:
            raise NotFound(f"no upload of {lora_id!r} is unfinished; PUT /v1/adapters/{lora_id}", code="upload_unknown")
        return holders[0][1]

    def registered_already(self, ask: UploadAsk) -> RegisteredAdapter | None:
        """The registered adapter if it has the very digest that the request names; None if bytes are needed.

        Raises StateConflict where the name is taken, or the adapter has another digest or is being deleted.
        """
        digest = ask.wanted.digest
        known = self._registry.uploadable(ask.lora_id, digest)
        return known if known is not None and digest is not None and known.digest == digest else None

    async def _check_quota(self, ask: UploadAsk) -> None:
        """Raises TooManyUploads if the tenant has as much unfinished as one may. A silent worker's do not count."""

        async def unfinished(worker: UploadWorker) -> tuple[UploadState, ...]:
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
                if file.name == ask.wanted.file and ask.sent.total in (None, file.total_bytes):
                    return worker, state
        known = [file for _, state in holders for file in state.files if file.name == ask.wanted.file]
        have = f"what has come is of a file of {known[0].total_bytes} bytes" if known else "nothing of it has come"
        message = f"upload of {ask.lora_id!r} cannot go on: {have}; send it from the first byte, without Content-Range"
        raise StateConflict(message, code="upload_unknown", param="Content-Range")

    async def _holders(self, upload: str, base_model: str | None = None) -> list[tuple[UploadWorker, UploadState]]:
        """The workers that have some of the upload, and what; those with the most bytes first."""
        workers = self._able_workers(upload, base_model)[:_ASKED]

        async def probe(worker: UploadWorker) -> UploadState | None:
            """What the worker has; None if it has nothing or does not answer."""
            timeout_s = self._settings.probe_timeout_s
            try:
                return await self._agents.upload_state(worker.agent_url, upload, timeout_s=timeout_s)
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
        able = self._able_workers(ask.upload_id, ask.wanted.base_model)
        workers = sorted(able, key=lambda worker: worker.id not in first)
        refused: WorkerFailed | None = None
        announced = BeginFileRequest(total_bytes=ask.sent.total, lora_id=ask.lora_id, tenant=ask.tenant)
        file, timeout_s = ask.wanted.file, self._settings.probe_timeout_s
        for worker in workers[:_ASKED]:
            try:
                await self._agents.begin_file(worker.agent_url, ask.upload_id, file, announced, timeout_s=timeout_s)
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
        base = f" of base model {ask.wanted.base_model}" if ask.wanted.base_model else ""
        message = f"an upload is verified by a worker with an agent, and no such worker{base} is ready"
        raise OrchestratorUnavailable(message, retry_after_s=5)

    def _able_workers(self, upload: str, base_model: str | None) -> list[UploadWorker]:
        """Workers with the adapter's base model (None: any), in the order in which an upload tries them."""
        able = [worker for worker in self._ready_workers() if base_model in (None, worker.base_model)]
        return rendezvous_order(upload, able)

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
        holders = await self._holders(ask.upload_id, ask.wanted.base_model)
        holder = next((worker for worker, held in holders if not missing_of(held)), None)
        if holder is None:
            raise _upload_interrupted(ask, "the worker that has it does not answer")
        try:
            found, at = await self._agents.install_upload(
                holder.agent_url, ask.upload_id, ask.inspection(), timeout_s=self._settings.inspect_timeout_s
            )
            store = self._reconciler.store
            known = store.adapters.get(ask.lora_id)
            own = None if known is None else known.policy.large_weights
            require_usual_weights(found.card, own or store.rules.large_weights)
        except (WorkerFailed, InvalidAdapter) as exc:
            raise _upload_error(exc, ask, holder.id) from exc
        self._reconciler.files.note(holder.id, found.digest, at)
        if self._store is not None and not ask.wanted.publish:
            yield KeptUpload(found, await self._write_to_store(self._store, ask, found, holder), ())
            return
        with self._reconciler.copies.arriving(found.digest):
            kept_on = await self._keep_on_workers(ask, found, holder)
            yield KeptUpload(found, fleet_source(found.digest), kept_on)

    async def register(self, ask: UploadAsk, kept: KeptUpload, actor: str) -> Registration:
        """Register the adapter with its digest, and forget the upload; returns it, and whether it is new.

        Raises StateConflict where other bytes were registered meanwhile, NotFound if another call deletes the adapter.
        """
        known = self._registry.uploadable(ask.lora_id, kept.found.digest)
        if known is not None and known.digest is not None:
            await self.forget(ask.upload_id, ask.wanted.base_model)
            return Registration(known, is_new=False)
        source = kept.source if known is None else known.source
        spec = AdapterSpec(
            lora_id=ask.lora_id,
            source=source,
            base_model=ask.wanted.base_model or kept.found.base_model or None,
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
        await self.forget(ask.upload_id, ask.wanted.base_model)
        return Registration(self._registry.adapter(ask.lora_id), is_new)

    def note_on_copies(self, kept: KeptUpload) -> str:
        """What the client should know of where its bytes are; "" if they are as safe as was asked."""
        wanted = self._settings.fleet_copies
        if self._store is not None or len(kept.kept_on) >= wanted:
            return ""
        count = f"{len(kept.kept_on)} worker{'s' if len(kept.kept_on) > 1 else ''}"
        return f"kept on {count} alone, because the fleet's workers have no other disks; fleet_copies is {wanted}"

    async def forget(self, upload: str, base_model: str | None = None) -> None:
        """Delete what has come of an upload, on every worker that may have some.

        A worker that does not answer forgets it by itself.
        """
        workers = self._able_workers(upload, base_model)[:_ASKED]
        await asyncio.gather(*(self._drop(worker, upload) for worker in workers))

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
                await self._copy_to_store(store, found.digest)
            again = ask.inspection(source)
            there, _ = await self._agents.inspect(holder.agent_url, again, timeout_s=self._settings.inspect_timeout_s)
        except (WorkerFailed, InvalidAdapter, NotFound, httpx.HTTPError, TimeoutError) as exc:
            message = f"worker {holder.id} cannot read the upload store's {source}: {exc!s}; see upload_store"
            raise OrchestratorUnavailable(message, code="upload_store_failed", retry_after_s=5) from exc
        if there.digest != found.digest:
            message = (
                f"the upload store's {source} has digest {there.digest}, written was {found.digest}: workers must read"
                " the very store that the orchestrator writes (upload_store)"
            )
            raise OrchestratorUnavailable(message, code="upload_store_failed", retry_after_s=5)
        return source

    async def _copy_to_store(self, store: UploadStore, digest: str) -> None:
        """Write the files of a digest into the store, from a worker that has them.

        Raises NotFound, OrchestratorUnavailable, WorkerFailed, httpx.HTTPError.
        """
        for name in await self.relay.file_names(digest):
            async with self.relay.reading(digest, name) as chunks:
                await store.write(digest, name, chunks)


def missing_of(state: UploadState) -> tuple[str, ...]:
    """The files of an upload that have not come whole, in the order to send them."""
    return files_still_to_send({file.name: (file.received_bytes, file.total_bytes) for file in state.files})


async def _bounded_chunks(chunks: AsyncIterator[bytes], most_bytes: int) -> AsyncIterator[bytes]:
    """The chunks, as long as they are within the bound. Raises UploadTooLarge."""
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > most_bytes:
            message = f"the upload has more than {most_bytes} bytes, which are allowed; see max_upload_bytes"
            raise UploadTooLarge(message)
        if chunk:
            yield chunk


def _upload_interrupted(ask: UploadAsk, why: str) -> OrchestratorUnavailable:
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
    return _upload_interrupted(ask, str(exc))
