"""resolve -> fetch -> verify -> install: from a name to files on this disk, with every byte right."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from lorafleet.identity import engine_name
from orchestrator.wire import checked_lora_id
from workers.agent.inventory import Inventory
from workers.agent.records import InstalledAdapter
from workers.core.errors import AgentRequestError, SourceError
from workers.core.manifest import Manifest, check_rank, is_same_base
from workers.metrics import WorkerMetrics
from workers.sources.base import PLUGIN, FetchProgress, Transfer
from workers.storage.cache import AdapterCache
from workers.storage.credentials import Credentials
from workers.storage.local_adapters import LocalAdapters
from workers.wire import InspectRequest, LoadRequest


class Installer:
    """Brings adapters in. Callers hold the adapter's own lock."""

    def __init__(
        self,
        *,
        cache: AdapterCache,
        library: LocalAdapters,
        residency: Inventory,
        metrics: WorkerMetrics,
        credentials: Credentials,
        listed: Callable[[], Awaitable[frozenset[str]]],
        base_name: Callable[[], str],
    ) -> None:
        """
        listed     digests that the engine lists; raises EngineError when it cannot be asked
        base_name  this worker's base model by its name in the fleet; empty while it is not known
        """
        self._cache = cache
        self._library = library
        self._residency = residency
        self._records = residency.records
        self._metrics = metrics
        self._credentials = credentials
        self._listed = listed
        self._base_name = base_name

    async def in_use(self) -> frozenset[str]:
        """Digests whose files must stay: wanted here, or listed by the engine. Raises EngineError."""
        return self._residency.wanted() | await self._listed()

    async def installed(self, request: LoadRequest) -> InstalledAdapter:
        """The record of files that are on this disk with every byte right. Raises WorkerError."""
        self._check_base(request.base_model)
        slots = self._residency.slots
        known = self._known(request)
        if known is not None and (slots.has(known.engine_name) or await self._cache.has(known.digest)):
            if not slots.has(known.engine_name):
                check_rank(known.rank, self._cache.rules)  # which its inspection did not
            self._metrics.cache.labels("hit").inc()
            return known
        is_held = any(slots.has(record.engine_name) for record in self._records.of(request.lora_id))
        if not is_held and not self._residency.has_room(request.evict):
            # Before a fetch for nothing; what is held may be the very version asked for.
            raise self._residency.no_free_slot()
        self._metrics.cache.labels("miss").inc()
        source = self._resolve(request)
        self._residency.show(request.lora_id, request.digest or "", "downloading")
        secret = request.secret or ""
        return await self._fetched(
            request.lora_id, source, request.digest, secret=secret, base_model=request.base_model
        )

    async def inspected(self, request: InspectRequest) -> InstalledAdapter:
        """Fetched, verified and installed, whatever is known of it already; of any rank, which the caller is told and
        finds a worker for. Raises WorkerError.
        """
        self._check_base(request.base_model)
        return await self._fetched(
            request.lora_id,
            request.source,
            None,
            secret=request.secret or "",
            base_model=request.base_model,
            is_any_rank=True,
        )

    async def again(self, record: InstalledAdapter) -> Path:
        """Where the record's files are; fetched once more if they are gone or damaged. Raises SourceError."""
        if not await self._cache.has(record.digest):
            pinned = record.pinned_source or record.source
            said = record.base_model if self._is_ours(record.base_model) else None
            await self._fetched(
                record.lora_id, record.source, record.digest, pinned=pinned, secret=record.secret, base_model=said
            )
        return self._cache.path(record.digest)

    async def _fetched(
        self,
        lora_id: str,
        source: str,
        digest: str | None,
        *,
        pinned: str = "",
        secret: str,
        base_model: str | None,
        is_any_rank: bool = False,
    ) -> InstalledAdapter:
        """`base_model`: what the caller says that it is for, in place of what its own config says."""
        fetch = partial(
            self._fetched_once, lora_id, source, digest, pinned or source, secret, base_model, is_any_rank=is_any_rank
        )
        try:
            return await fetch()
        except SourceError as exc:
            if exc.code != "disk_full" or not isinstance(exc.__cause__, OSError):
                raise
            gone = await asyncio.to_thread(self._cache.disk.free_half, await self.in_use())
            if not gone:
                raise
            self._residency.deleted(gone)
        return await fetch()

    async def _fetched_once(
        self,
        lora_id: str,
        source: str,
        digest: str | None,
        pinned: str,
        secret: str,
        base_model: str | None,
        *,
        is_any_rank: bool,
    ) -> InstalledAdapter:
        loop = asyncio.get_running_loop()

        def tell(progress: FetchProgress) -> None:
            loop.call_soon_threadsafe(self._residency.downloading, lora_id, progress)

        transfer = Transfer(on_progress=tell)
        if secret:
            transfer.credential = await self._credentials.read(secret, pinned)
        with self._timed("fetch"):
            async with self._cache.fetch(pinned, transfer) as folder:
                with self._timed("verify"):
                    is_vouched_for = base_model is not None
                    found = await self._cache.verify(folder, is_vouched_for=is_vouched_for, is_any_rank=is_any_rank)
                    # What may run here is of this base model, by whatever name or path its trainer knew that.
                    manifest = replace(found, base_model=self._base_name() or base_model or found.base_model)
                    self._metrics.fetched_bytes.inc(manifest.size_bytes)
                    _check_digest(lora_id, manifest.digest, digest)
                with self._timed("install"):
                    self._residency.deleted(await self._cache.make_room(manifest, self.in_use))
                    path = await self._cache.install(folder, manifest.digest)
        record = _record(lora_id, source, transfer.pinned, manifest, path)
        return self._residency.remember(replace(record, secret=secret))

    def _known(self, request: LoadRequest) -> InstalledAdapter | None:
        """A record that answers this request without a look at its source: same digest, and no other source named.

        A digest alone grants nothing: the record exists because this lora_id's own source was verified here.
        """
        asked = request.source or request.lora_path
        for record in reversed(self._records.of(request.lora_id)):
            places = {None, record.source, record.pinned_source}
            if request.digest is not None and record.digest == request.digest and asked in places:
                return record
        if request.digest is None and asked is None and self._library.path(request.lora_id) is None:
            return next(iter(reversed(self._records.of(request.lora_id))), None)
        return None

    def _resolve(self, request: LoadRequest) -> str:
        if asked := request.source or request.lora_path:
            return asked
        for record in reversed(self._records.of(request.lora_id)):
            if request.digest == record.digest:
                return record.source
        path = self._library.path(request.lora_id)
        if path is None and self._cache.has_source(PLUGIN):
            return f"{PLUGIN}://{request.lora_id}"
        if path is None:
            where = self._library.folder or "lora_path (not set)"
            raise AgentRequestError(
                "adapter_unknown", f"adapter {request.lora_id!r}: not in {where}; give `source` or put it there"
            )
        return str(path)

    def _check_base(self, base_model: str | None) -> None:
        if base_model is not None and not self._is_ours(base_model):
            names = ", ".join(sorted(self._cache.rules.base_names))
            raise SourceError("base_model_mismatch", f"base_model {base_model!r}: this worker serves {names}")

    def _is_ours(self, base_model: str) -> bool:
        rules = self._cache.rules
        return is_same_base(base_model, rules.base_names, rules.base_check)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        with self._metrics.stage_seconds.labels(stage).time():
            yield


def check_id(lora_id: str) -> None:
    """Raises RequestError `invalid_lora_id`."""
    try:
        checked_lora_id(lora_id)
    except ValueError as exc:
        raise AgentRequestError("invalid_lora_id", str(exc), param="lora_id") from exc


def _record(lora_id: str, source: str, pinned: str, manifest: Manifest, path: Path) -> InstalledAdapter:
    return InstalledAdapter(
        lora_id=lora_id,
        digest=manifest.digest,
        engine_name=engine_name(lora_id, manifest.digest),
        path=str(path),
        source=source,
        pinned_source=pinned,
        base_model=manifest.base_model,
        rank=manifest.rank,
        size_bytes=manifest.size_bytes,
    )


def _check_digest(lora_id: str, found: str, expected: str | None) -> None:
    if expected is not None and found != expected:
        raise SourceError(
            "digest_mismatch",
            f"adapter {lora_id!r}: its source has digest {found}, asked for was {expected};"
            " new bytes need a new lora_id",
        )
