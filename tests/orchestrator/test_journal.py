"""The history in ConfigMaps: entries that come often do not push out what people changed."""

import pytest

from orchestrator.configmaps.journal import HistoryJournal
from orchestrator.store.backend import HistoryEntry


@pytest.mark.parametrize("kind", ["load", "unload", "name_published", "engine_died"])
def test_ten_thousand_entries_of_a_frequent_kind_leave_a_change_of_an_alias_in_the_history(kind: str) -> None:
    journal = HistoryJournal("fleet")
    journal.add([HistoryEntry(kind="alias_set", subject="sql", actor="operator", at=1.0)])
    often = HistoryEntry(kind=kind, subject="policy", actor="tenant rl", at=2.0, body={"digest": "0" * 64})
    journal.add(often for _ in range(10_000))
    (entry,) = journal.find_entries(kinds=("alias_set",), subject=None, before=None, limit=10)
    assert (entry.subject, entry.id) == ("sql", 1)
