"""The worker's adapters as a downloader plugin sees them."""

from collections.abc import Mapping, Sequence

from workers.agent.agent import WorkerAgent
from workers.inventory.event_log import PLUGIN
from workers.plugin import CacheLocation, LoraManager, LoraModel, LoraStatus
from workers.wire import AdapterState, LoadRequest, UnloadRequest, WorkerAdapter

_STATUS: Mapping[AdapterState, LoraStatus] = {
    "remote": LoraStatus.REMOTE,
    "downloading": LoraStatus.DOWNLOADING,
    "on_disk": LoraStatus.DOWNLOADED,
    "loading": LoraStatus.LOADING,
    "ready": LoraStatus.READY_FOR_USE,
    "draining": LoraStatus.LOADED,
    "failed": LoraStatus.FAILED,
}


class DynamoLoraManager(LoraManager):
    """The `LoraManager` of one agent: the operations behind `/v1/admin/load_lora` and `/v1/admin/unload_lora`."""

    def __init__(self, agent: WorkerAgent) -> None:
        self._agent = agent

    def lora_models(self) -> Sequence[LoraModel]:
        """The adapters of `GET /v1/metadata/loras`, sorted by name."""
        return [_lora_model(item) for item in self._agent.report.catalog()]

    async def load_lora(self, name: str) -> LoraModel:
        """Load an adapter into a free slot, fetched first if needed. Raises WorkerError."""
        return _lora_model(await self._agent.load(LoadRequest(lora_id=name), PLUGIN))

    async def unload_lora(self, name: str) -> LoraModel:
        """Unload all versions of an adapter; its files stay on disk.

        raises  WorkerError: `epoch_required` where an orchestrator decides, and those of an unload
        """
        self._agent.check_epoch(None, is_destructive=True)
        await self._agent.unload(UnloadRequest(lora_id=name), PLUGIN)
        remote = LoraModel(name, LoraStatus.REMOTE, CacheLocation.REMOTE)
        return next((model for model in self.lora_models() if model.name == name), remote)


def _lora_model(item: WorkerAdapter) -> LoraModel:
    """An adapter of the wire as a `LoraModel`."""
    return LoraModel(
        item.lora_id,
        _STATUS[item.state],
        CacheLocation(item.location),
        item.path,
        base_model=item.base_model,
        size_bytes=item.size_bytes,
        digest=item.digest,
    )
