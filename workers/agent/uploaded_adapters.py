"""Adapters whose bytes clients have sent: installed as those of any other source."""

from dataclasses import replace

from lorafleet.identity import engine_name, fleet_source
from workers.agent.inventory import Inventory
from workers.agent.inventory_report import InventoryReport
from workers.agent.loader import Loader
from workers.core.errors import SourceError
from workers.storage.cache import AdapterCache
from workers.storage.uploads import Uploads
from workers.wire import InspectRequest, WorkerAdapter

# Refusals after which the same bytes may still be installed: there is room later, or the request named the base model.
_WORTH_KEEPING = frozenset({"disk_full", "source_failed", "base_model_mismatch"})


class UploadedAdapters:
    """Installs uploads."""

    def __init__(
        self,
        uploads: Uploads,
        *,
        loader: Loader,
        inventory: Inventory,
        report: InventoryReport,
        cache: AdapterCache,
    ) -> None:
        self._uploads = uploads
        self._report = report
        self._loader = loader
        self._inventory = inventory
        self._cache = cache

    async def install(self, upload_id: str, request: InspectRequest) -> WorkerAdapter:
        """Unpack, verify and install an upload, with the fleet itself as its source. A second call finds it installed.

        Deletes an upload whose bytes are refused. Raises WorkerError.
        """
        state = await self._uploads.state(upload_id)
        if state.digest and request.digest in {None, state.digest}:
            # An earlier call has installed it, and its answer was lost.
            before = self._inventory.installed.get(engine_name(request.lora_id, state.digest))
            if before is not None and await self._cache.has_intact(state.digest):
                return self._report.adapter_on_disk(before)
        try:
            found = await self._loader.inspect(request, reader=self._uploads.source(upload_id), digest=request.digest)
        except SourceError as exc:
            if exc.code not in _WORTH_KEEPING:
                await self._uploads.drop(upload_id)
            raise
        installed, source = self._inventory.installed, fleet_source(found.digest)
        adapter = installed.get(engine_name(found.lora_id, found.digest))
        assert adapter is not None, "what was just installed is recorded"
        adapter = installed.store(replace(adapter, source=source, pinned_source=source))
        await self._uploads.finish(upload_id, found.digest)
        return self._report.adapter_on_disk(adapter)
