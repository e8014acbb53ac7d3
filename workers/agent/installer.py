"""resolve -> fetch -> verify -> install: from a lora_id to verified files in the cache folder."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from lorafleet.engine.acceptance import FILE_NAME as ACCEPTANCE_NAME
from lorafleet.engine.acceptance import AcceptanceError, parse_acceptance
from lorafleet.identity import engine_name, fleet_digest, fleet_source
from orchestrator.model.cards import card_fields
from orchestrator.model.names import checked_lora_id
from workers.agent.current_engine import CurrentEngine
from workers.agent.file_fetcher import FileFetcher, is_about_source, no_way_error
from workers.core.errors import AgentRequestError, SourceError, WrongBytes
from workers.core.fetch_ways import FetchWay, fetch_ways
from workers.core.references import scheme
from workers.inventory.context import AgentContext
from workers.inventory.inventory import Inventory
from workers.sources.base import PLUGIN_SCHEME, FetchProgress, Source, Transfer
from workers.storage.cache import is_intact
from workers.storage.credentials import Credentials
from workers.verification.manifest import RULES_VERSION, AdapterDescription, Manifest, check_rank, is_same_base
from workers.wire import CheckRequest, InspectRequest, LoadRequest, WorkerAdapter

log = structlog.get_logger()


class Installer:
    """Installs adapters. Callers hold the lock of the lora_id."""

    def __init__(self, context: AgentContext, *, inventory: Inventory, engine: CurrentEngine) -> None:
        self._cache = context.cache
        self._local_adapters = context.local_adapters
        self._inventory = inventory
        self._installed = inventory.installed
        self._metrics = context.metrics
        self._credentials = Credentials(context.settings.secrets_dir)
        self._engine = engine
        self._has_fleet = context.fleet is not None
        self._files = FileFetcher(context, inventory, digests_in_use=self.digests_in_use)

    def describe(self, folder: Path) -> AdapterDescription | None:
        """What the engine's table says of an installed adapter; None if it cannot be read. Blocking."""
        return self._cache.describe(folder)

    async def with_acceptance(self, adapter: WorkerAdapter, request: LoadRequest | CheckRequest) -> WorkerAdapter:
        """The installed adapter, with the acceptance file that a request sends or names beside its files.

        One that it names comes from other workers, if they have it. Raises AgentRequestError for an invalid one.
        """
        content = request.content.encode() if isinstance(request, CheckRequest) else b""
        if content:
            try:
                parse_acceptance(content)
            except AcceptanceError as exc:
                message = f"{exc}; see docs/acceptance.md"
                raise AgentRequestError("acceptance_invalid", message, param="content") from exc
        elif request.acceptance_file not in {"", await self._cache.acceptance_digest(adapter.digest)}:
            content = await self._files.acceptance_from(request.neighbours, adapter.digest, request.acceptance_file)
        if content:
            await self._cache.store_acceptance(adapter.digest, content)
        return replace(adapter, acceptance_file=await self._cache.acceptance_digest(adapter.digest))

    async def digests_in_use(self) -> frozenset[str]:
        """Digests whose files must stay: wanted by this worker, or in the engine's list, which it asks.

        Raises EngineError.
        """
        return self._inventory.wanted_digests() | await self._engine.digests_in_use()

    async def keep(self, digest: str, neighbours: Sequence[str]) -> None:
        """Keep the files of a digest on this disk. See `FileFetcher.keep`."""
        await self._files.keep(digest, neighbours)

    async def install(self, request: LoadRequest) -> WorkerAdapter:
        """Return the requested adapter with verified files on this disk, fetched if needed. Raises WorkerError.

        Counts whether the files were on this disk. Raises `no_free_slot` before a fetch that would be useless.
        """
        self._check_base_model(request.base_model)
        slots = self._inventory.slots
        installed = await self._known_adapter(request)
        if installed is not None and (
            slots.has(installed.engine_name) or await self._cache.has_intact(installed.digest)
        ):
            if not slots.has(installed.engine_name):
                check_rank(installed.rank, self._cache.rules)  # an inspection accepts any rank
                installed = await self.verify_again(installed)
            self._metrics.cache.labels("hit").inc()
            return installed
        is_held = any(slots.has(adapter.engine_name) for adapter in self._installed.versions(request.lora_id))
        if not is_held and not request.only_files and not self._inventory.has_room(request.evict):
            # Fail before a useless fetch. A loaded version may be the requested one, so it is fetched and compared.
            raise self._inventory.no_free_slot_error()
        self._metrics.cache.labels("miss").inc()
        source = await self._resolve_source(request)
        self._inventory.show_progress(request.lora_id, request.digest or "", "downloading")
        secret = request.secret or ""
        return await self._fetch_and_install(
            request.lora_id,
            source,
            request.digest,
            secret=secret,
            base_model=request.base_model,
            from_fleet=request.from_fleet,
            neighbours=request.neighbours,
        )

    async def inspect(
        self, request: InspectRequest, *, reader: Source | None = None, digest: str | None = None
    ) -> WorkerAdapter:
        """Fetch, verify and install an adapter from its source, even if it is installed already.

        Any rank is accepted: the caller gets it in the answer and chooses a worker for it. Raises WorkerError.

        reader  fetches it; default: the source of its scheme
        digest  nothing is installed unless the bytes have it; None: any
        """
        self._check_base_model(request.base_model)
        return await self._fetch_and_install(
            request.lora_id,
            request.source,
            digest or fleet_digest(request.source),
            secret=request.secret or "",
            base_model=request.base_model,
            allow_any_rank=True,
            reader=reader,
            neighbours=request.neighbours,
        )

    async def reinstall_if_missing(self, adapter: WorkerAdapter) -> Path:
        """Fetch an adapter's files again if they are missing or damaged; returns their folder. Raises WorkerError."""
        if not await self._cache.has_intact(adapter.digest):
            pinned = adapter.pinned_source or adapter.source
            base_model = adapter.base_model if self._is_our_base(adapter.base_model) else None
            await self._fetch_and_install(
                adapter.lora_id,
                adapter.source,
                adapter.digest,
                pinned=pinned,
                secret=adapter.secret,
                base_model=base_model,
                from_fleet=True,
            )
        else:
            await self.verify_again(adapter)
        return self._cache.path(adapter.digest)

    async def verify_again(self, adapter: WorkerAdapter) -> WorkerAdapter:
        """The adapter, whose files keep the newest rules; reads them if only older rules were asked.

        Raises SourceError with the rule that it breaks, OSError.
        """
        if adapter.rules >= RULES_VERSION:
            return adapter
        # Its base model's name was compared, or named by its caller, when it was installed.
        await self._cache.verify(Path(adapter.path), trust_base_model=True, allow_any_rank=True)
        return self._installed.store(replace(self._installed.get(adapter.engine_name) or adapter, rules=RULES_VERSION))

    async def _fetch_and_install(
        self,
        lora_id: str,
        source: str,
        digest: str | None,
        *,
        pinned: str = "",
        secret: str,
        base_model: str | None,
        allow_any_rank: bool = False,
        from_fleet: bool = False,
        neighbours: Sequence[str] = (),
        reader: Source | None = None,
    ) -> WorkerAdapter:
        """Fetch, verify and install, by the first of `fetch_ways` that has the files; without room, make some once.

        base_model  the adapter's base model by the caller; None: by its own config
        from_fleet  the files of the digest may come from this disk or the fleet's other workers
        neighbours  URLs of agents that have them
        raises      SourceError: that of the source, where it was asked
        """
        fetch = partial(
            self._fetch_and_install_once,
            lora_id,
            source,
            digest,
            pinned or source,
            secret,
            base_model,
            allow_any_rank=allow_any_rank,
            reader=reader,
        )
        ways = fetch_ways(
            scheme(source) if reader is None else "file",
            has_digest=digest is not None,
            has_neighbours=bool(neighbours),
            may_use_digest=from_fleet,
            has_fleet=self._has_fleet,
        )
        failed: dict[FetchWay, SourceError] = {}
        for way in ways:
            try:
                adapter = await self._fetch_by(way, fetch, lora_id, digest or "", neighbours)
            except SourceError as exc:
                failed[way] = exc
                if not is_about_source(exc):
                    raise
            else:
                self._log_detour(lora_id, way, failed)
                return adapter
        error = failed.get("source") or next(reversed(failed.values()), None) or no_way_error(source)
        raise error

    async def _fetch_by(
        self,
        way: FetchWay,
        fetch: Callable[..., Coroutine[Any, Any, WorkerAdapter]],
        lora_id: str,
        digest: str,
        neighbours: Sequence[str],
    ) -> WorkerAdapter:
        """Install by one way; on a full disk delete unfinished downloads and half of the idle adapters, and try again.

        Raises SourceError.
        """
        if way == "disk" and not await self._cache.has_intact(digest):
            raise SourceError("source_not_found", f"digest {digest}: not on this worker's disk")
        if way == "neighbours":
            fetch_once = partial(self._files.from_neighbours, fetch, lora_id, digest, neighbours)
        else:
            fetch_once = partial(fetch, way=way)
        try:
            return await fetch_once()
        except SourceError as exc:
            if exc.code != "disk_full" or not isinstance(exc.__cause__, OSError):
                raise
            has_deleted = await self._cache.delete_unfinished()
            deleted = await self._cache.delete_half_of_idle(await self.digests_in_use())
            if not deleted and not has_deleted:
                raise
            self._inventory.forget_deleted(deleted)
        return await fetch_once()

    @staticmethod
    def _log_detour(lora_id: str, way: FetchWay, failed: Mapping[FetchWay, SourceError]) -> None:
        """Log that the files came by another way than the first that should have had them."""
        if "source" in failed:
            log.warning(
                "installed from another worker, as the source failed", lora_id=lora_id, error=str(failed["source"])
            )
        elif "neighbours" in failed:
            error = str(failed["neighbours"])
            log.warning("fetched without the workers that have it", lora_id=lora_id, by=way, error=error)

    async def _fetch_and_install_once(
        self,
        lora_id: str,
        source: str,
        digest: str | None,
        pinned: str,
        secret: str,
        base_model: str | None,
        *,
        allow_any_rank: bool,
        reader: Source | None = None,
        way: FetchWay = "source",
    ) -> WorkerAdapter:
        """Fetch, verify and install an adapter, record and publish it. May delete idle adapters. Raises WorkerError."""
        loop = asyncio.get_running_loop()

        def report_progress(progress: FetchProgress) -> None:
            """Publish progress in the event loop; called in the thread of the fetch."""
            loop.call_soon_threadsafe(self._inventory.report_download, lora_id, progress)

        transfer = Transfer(on_progress=report_progress)
        place = pinned if way == "source" else fleet_source(digest or "")
        if way == "source" and secret:
            transfer.credential = await self._credentials.read(secret, pinned)
        async with self._files.files_of(place, transfer, reader, way, digest) as folder:
            with self._metrics.timed("verify"):
                verified = await self._verified(folder, digest, base_model, transfer, allow_any_rank, way)
                # The adapter fits this worker's base model, so it gets that name, not the trainer's path.
                manifest = replace(
                    verified,
                    base_model=self._engine.model_card().base_model or base_model or verified.base_model,
                    files_note="; ".join(
                        filter(
                            None,
                            (*transfer.notes, *await self._cache.notes_on_texts(transfer.texts), verified.files_note),
                        )
                    ),
                )
                if way != "disk":
                    self._metrics.fetched_bytes.inc(manifest.size_bytes)
                _check_digest(lora_id, manifest.digest, digest)
            with self._metrics.timed("install"):
                path = folder
                if way != "disk":
                    self._inventory.forget_deleted(
                        await self._cache.make_room(manifest.digest, manifest.size_bytes, self.digests_in_use)
                    )
                    path = await self._cache.install(folder, manifest.digest)
                if ACCEPTANCE_NAME in transfer.texts:
                    await self._cache.store_acceptance(manifest.digest, transfer.texts[ACCEPTANCE_NAME])
                manifest = replace(manifest, acceptance_file=await self._cache.acceptance_digest(manifest.digest))
        adapter = _installed_adapter(lora_id, source, pinned if way != "source" else transfer.pinned, manifest, path)
        return self._inventory.store_installed(replace(adapter, secret=secret))

    async def _verified(
        self,
        folder: Path,
        digest: str | None,
        base_model: str | None,
        transfer: Transfer,
        allow_any_rank: bool,
        way: FetchWay,
    ) -> Manifest:
        """The manifest of the files in a folder. Raises SourceError; WrongBytes if another worker sent other bytes."""
        try:
            manifest = await self._cache.verify(
                folder, trust_base_model=base_model is not None, allow_any_rank=allow_any_rank
            )
        except SourceError as exc:
            # What a rule refuses may be right bytes that this worker cannot use: only their digest tells.
            if way in {"neighbours", "fleet"} and not await asyncio.to_thread(is_intact, folder, digest or ""):
                raise WrongBytes(f"digest {digest}: other workers sent other bytes: {exc}", transfer.served_by) from exc
            raise
        if way in {"neighbours", "fleet"} and manifest.digest != digest:
            raise WrongBytes(f"digest {digest}: other workers sent bytes of {manifest.digest}", transfer.served_by)
        return manifest

    async def _known_adapter(self, request: LoadRequest) -> WorkerAdapter | None:
        """The installed adapter that satisfies a request without a fetch: same digest, and no other source named.

        A request may also name the folder where it is installed, as the list of adapters has it.
        None: it must be fetched. A request with neither gets the newest version, unless lora_path has the adapter. The
        digest alone is not a permission: this lora_id's own source was verified here before. Raises SourceError if
        lora_path hangs.
        """
        requested_source = request.source or request.lora_path
        for adapter in reversed(self._installed.versions(request.lora_id)):
            places = {None, adapter.source, adapter.pinned_source}
            if request.digest is not None and adapter.digest == request.digest and requested_source in places:
                return adapter
            if requested_source == adapter.path and request.digest in {None, adapter.digest}:
                return adapter
        if request.digest is not None or requested_source is not None:
            return None
        if await self._local_adapters.path(request.lora_id) is not None:
            return None
        return next(iter(reversed(self._installed.versions(request.lora_id))), None)

    async def _resolve_source(self, request: LoadRequest) -> str:
        """The reference to fetch: the request's, an installed version's, the folder in lora_path, or the plugin's.

        raises  AgentRequestError `adapter_unknown` if there is none, SourceError if lora_path hangs
        """
        if requested_source := request.source or request.lora_path:
            return requested_source
        for adapter in reversed(self._installed.versions(request.lora_id)):
            if request.digest == adapter.digest:
                return adapter.source
        path = await self._local_adapters.path(request.lora_id)
        if path is None and self._cache.has_source(PLUGIN_SCHEME):
            return f"{PLUGIN_SCHEME}://{request.lora_id}"
        if path is None:
            place = self._local_adapters.folder or "lora_path (not set)"
            raise AgentRequestError(
                "adapter_unknown", f"adapter {request.lora_id!r}: not in {place}; give `source` or put it there"
            )
        return str(path)

    def _check_base_model(self, base_model: str | None) -> None:
        """Raises SourceError `base_model_mismatch` if the request names a base model that is not this worker's."""
        if base_model is not None and not self._is_our_base(base_model):
            names = ", ".join(sorted(self._cache.rules.base_names))
            raise SourceError("base_model_mismatch", f"base_model {base_model!r}: this worker serves {names}")

    def _is_our_base(self, base_model: str) -> bool:
        """Whether a base model's name is that of this worker's base model, by `base_model_check`."""
        rules = self._cache.rules
        return is_same_base(base_model, rules.base_names, rules.base_check)


def check_lora_id(lora_id: str) -> None:
    """Raises AgentRequestError `invalid_lora_id` for a lora_id that is not allowed."""
    try:
        checked_lora_id(lora_id)
    except ValueError as exc:
        raise AgentRequestError("invalid_lora_id", str(exc), param="lora_id") from exc


def _installed_adapter(lora_id: str, source: str, pinned: str, manifest: Manifest, path: Path) -> WorkerAdapter:
    """The entry of an adapter that was just installed, not loaded yet."""
    return WorkerAdapter(
        **card_fields(replace(manifest, source=source)),
        lora_id=lora_id,
        engine_name=engine_name(lora_id, manifest.digest),
        path=str(path),
        pinned_source=pinned,
        rules=RULES_VERSION,
    )


def _check_digest(lora_id: str, digest: str, expected: str | None) -> None:
    """Raises SourceError `digest_mismatch` if a digest was requested and the files have another one."""
    if expected is not None and digest != expected:
        message = f"adapter {lora_id!r}: its source has digest {digest}, requested was {expected}"
        raise SourceError("digest_mismatch", f"{message}; new bytes need a new lora_id")
