"""Adapters whose bytes clients have sent: installed as those of any other source."""

from dataclasses import replace

from lorafleet.identity import engine_name, fleet_source
from workers.agent.loader import Loader
from workers.core.errors import SourceError
from workers.inventory.context import AgentContext
from workers.inventory.inventory_report import InventoryReport
from workers.wire import InspectRequest, WorkerAdapter

# Refusals after which the same bytes may still be installed: there is room later, or the request named the base model.
_WORTH_KEEPING = frozenset({"disk_full", "source_failed", "base_model_mismatch"})


class UploadedAdapters:
    """Installs uploads."""

    def __init__(self, context: AgentContext, *, loader: Loader, report: InventoryReport) -> None:
        self._uploads = context.uploads
        self._installed = context.installed
        self._cache = context.cache
        self._loader = loader
        self._report = report

    async def install(self, upload_id: str, request: InspectRequest) -> WorkerAdapter:
        """Unpack, verify and install an upload, with the fleet itself as its source. A second call finds it installed.

        Deletes an upload whose bytes are refused. Raises WorkerError.
        """
        state = await self._uploads.state(upload_id)
        if state.digest and request.digest in {None, state.digest}:
            # An earlier call has installed it, and its answer was lost.
            before = self._installed.get(engine_name(request.lora_id, state.digest))
            if before is not None and await self._cache.has_intact(state.digest):
                return self._report.adapter_on_disk(before)
        try:
            found = await self._loader.inspect(request, reader=self._uploads.source(upload_id), digest=request.digest)
        except SourceError as exc:
            if exc.code not in _WORTH_KEEPING:
                await self._uploads.drop(upload_id)
            raise
        source = fleet_source(found.digest)
        adapter = self._installed.get(engine_name(found.lora_id, found.digest))
        assert adapter is not None, "what was just installed is recorded"
        adapter = self._installed.store(replace(adapter, source=source, pinned_source=source))
        await self._uploads.finish(upload_id, found.digest)
        return self._report.adapter_on_disk(adapter)
