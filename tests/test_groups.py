"""Which tests run in one process, so that they share an engine or a fleet."""

import pytest

from tests.conftest import group_of


@pytest.mark.parametrize(
    ("test", "group"),
    [
        ("tests/founding/test_fleet.py::test_usage_is_counted_by_adapter", "founding"),
        ("tests/founding/test_workers.py::test_unload_is_the_orchestrators_alone", "founding"),
        ("tests/contract/test_client.py::test_evicted_blocks_are_reported[vllm]", "vllm"),
        ("tests/contract/test_surface.py::test_every_route_names_an_unknown_model", "vllm"),
        ("tests/lorafleet/tokenizer/test_chat.py::test_ids_of_a_chat", "vllm"),
        ("tests/contract/test_client.py::test_evicted_blocks_are_reported[sim]", "tests/contract/test_client.py"),
        ("tests/router/core/kv/test_index.py::test_x[a@founding]", "tests/router/core/kv/test_index.py"),
    ],
)
def test_tests_that_share_an_engine_or_a_fleet_are_one_group(test: str, group: str) -> None:
    assert group_of(test) == group
