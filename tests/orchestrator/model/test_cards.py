"""The model card of an adapter, which every object with its fields has."""

from dataclasses import fields

from orchestrator.model.cards import AdapterCard, card_fields
from workers.wire import WorkerAdapter


def test_a_card_of_a_workers_adapter_has_the_cards_fields_alone_and_their_values():
    adapter = WorkerAdapter(lora_id="a/v1", digest="d" * 64, rank=8, files_note="not served: x.bin", path="/a")
    assert adapter.card == AdapterCard(digest="d" * 64, rank=8, files_note="not served: x.bin")
    assert card_fields(adapter).keys() == {each.name for each in fields(AdapterCard)}
