"""Answers as the client's results."""

import pytest

from lorafleet.client.results import Published, Pushed


def test_a_registration_is_new_by_its_status():
    item = {"lora_id": "sql/v1", "spec": {"digest": "ab"}, "kept_on": ["w0", "w1"]}
    assert Pushed.read(201, item) == Pushed("sql/v1", "ab", is_new=True, kept_on=("w0", "w1"), note="")
    assert not Pushed.read(200, item | {"note_on_copies": "one copy"}).is_new


def test_a_published_name_is_read_from_its_status():
    status = {"lora_id": "sql/v2", "digest": "ab", "version": 2, "is_new": True, "workers": ["w0"]}
    found = Published.read({"name": "sql", "status": status})
    assert found == Published("sql", "sql/v2", "ab", version=2, is_new=True, workers=("w0",))


@pytest.mark.parametrize("item", [{}, {"name": "sql"}, {"name": "sql", "status": {}}, {"name": "sql", "status": None}])
def test_an_answer_of_another_server_is_an_error_that_callers_know(item):
    for read in (lambda: Published.read(item), lambda: Pushed.read(201, item)):
        with pytest.raises((KeyError, TypeError)):
            read()
