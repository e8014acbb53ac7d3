"""Tables on terminals of any width."""

import pytest

from lorafleet.cli import tables
from lorafleet.cli.resources import HISTORY, WORKERS
from tests.lorafleet.cli.answers import READY_WORKERS, printed


@pytest.mark.parametrize("width", range(40, 160, 7))
def test_no_name_url_or_time_is_broken_at_any_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = "\n".join(printed(tables.listing(WORKERS.view, READY_WORKERS), width, monkeypatch))
    for worker in READY_WORKERS:
        for word in (worker["agent_url"], worker["engine_url"], *worker["adapters"]):
            assert word in seen
    entry = {"at": "2026-11-21T09:50:26.974+00:00", "kind": "load", "subject": "s", "actor": "", "body": {"why": "x y"}}
    assert any(
        line.startswith("2026-11-21 09:50:26.974")
        for line in printed(tables.listing(HISTORY, [entry]), width, monkeypatch)
    )


def test_a_row_too_wide_for_the_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(tables.listing(WORKERS.view, READY_WORKERS), 80, monkeypatch)
    assert len(lines) == 4
    assert [line for line in lines if line.endswith(" ")] == []


def test_a_row_is_broken_between_words_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(tables.fields({"policy": "loading=lazy, min_replicas=0, weight=1"}), 30, monkeypatch)
    assert lines == ["field   value", "policy  loading=lazy,", "        min_replicas=0,", "        weight=1"]


def test_a_field_that_lists_objects_has_a_row_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    item = {"name": "policy", "versions": [{"lora_id": "policy/v2"}, {"lora_id": "policy/v1"}], "workers": []}
    lines = printed(tables.fields(item), 60, monkeypatch)
    assert [line.split() for line in lines[2:4]] == [["versions", "lora_id=policy/v2"], ["lora_id=policy/v1"]]


def test_what_is_written_and_what_is_seen_have_the_paths_that_programs_use(monkeypatch: pytest.MonkeyPatch) -> None:
    item = {"name": "sql", "spec": {"replicas": 2}, "status": {"replicas": 1, "pending": None}}
    lines = [line.split() for line in printed(tables.fields(item), 60, monkeypatch)[1:]]
    assert lines == [["name", "sql"], ["spec.replicas", "2"], ["status.replicas", "1"], ["status.pending", "-"]]
