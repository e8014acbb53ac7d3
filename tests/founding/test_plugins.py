"""What the texts ask of a downloader that a worker's operator brings, and of the types that it is given."""

from datetime import UTC, datetime
from pathlib import Path

from workers.plugin import (
    CacheLocation,
    LoraDownloaderBase,
    LoraEvent,
    LoraEventType,
    LoraModel,
)
from workers.sources.plugins import event_forwarder
from workers.wire import AgentEvent


class ListeningDownloader(LoraDownloaderBase):
    """The proposal's two methods, and the events that it has received."""

    def __init__(self) -> None:
        self.events: list[LoraEvent] = []

    def download_lora_to_disk(self, name: str) -> LoraModel:
        return LoraModel(name, local_path=f"/loras/{name}")

    def delete_lora_from_disk(self, name: str) -> LoraModel:
        return LoraModel(name, cache_location=CacheLocation.REMOTE)

    def on_event(self, event: LoraEvent) -> None:
        self.events.append(event)


def test_a_plugin_receives_the_four_designed_events() -> None:
    plugin = ListeningDownloader()
    listen = event_forwarder(plugin, lambda digest: Path("/cache") / digest)
    kinds = ("DOWNLOADED_TO_DISK", "DELETED_FROM_DISK", "LOADED_TO_DEVICE", "UNLOADED_FROM_DEVICE")
    for number, kind in enumerate(kinds, 1):
        listen(AgentEvent(id=number, type=kind, at="2026-10-17T12:00:00.000Z", lora_id="sql/v1", instance_id="w0"))
    assert [event.event_type for event in plugin.events] == [LoraEventType[kind] for kind in kinds]
    assert {event.lora_model.name for event in plugin.events} == {"sql/v1"}
    assert {event.timestamp for event in plugin.events} == {datetime(2026, 10, 17, 12, tzinfo=UTC)}
    assert {event.instance_id for event in plugin.events} == {"w0"}
