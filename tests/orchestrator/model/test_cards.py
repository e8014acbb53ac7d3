"""The model card of an adapter, which every object with its fields has."""

from dataclasses import fields

import pytest

from orchestrator.model.cards import AdapterCard, card_fields, large_change, large_growth
from workers.wire import WorkerAdapter


def test_a_card_of_a_workers_adapter_has_the_cards_fields_alone_and_their_values():
    adapter = WorkerAdapter(lora_id="a/v1", digest="d" * 64, rank=8, files_note="not served: x.bin", path="/a")
    assert adapter.card == AdapterCard(digest="d" * 64, rank=8, files_note="not served: x.bin")
    assert card_fields(adapter).keys() == {each.name for each in fields(AdapterCard)}


def change(size: float) -> AdapterCard:
    return AdapterCard(weight_change=size, weight_change_in="layers.0.q_proj")


def test_change_beyond_a_hundred_times_ordinary_weights_is_large_and_named_with_its_module():
    assert large_change(AdapterCard()) == large_change(change(100.0)) == ""
    assert large_change(change(181.0)).startswith("its change of layers.0.q_proj is about 181 times as large")


@pytest.mark.parametrize(
    ("former", "now", "is_large"),
    [
        (0.5, 5.0, False),
        (0.5, 5.1, True),
        (0.001, 0.9, False),  # a run begins with a change of 0
        (0.001, 1.0, True),
        (0.0, 50.0, False),  # not measured, or the first one
        (5.0, 0.5, False),
    ],
)
def test_change_beyond_ten_times_the_former_version_is_large_unless_it_is_below_ordinary_weights(former, now, is_large):
    assert bool(large_growth(change(now), change(former))) == is_large
