"""The history in ConfigMaps: entries that come often do not push out what people changed."""

import pytest

from orchestrator.configmaps.journal import HistoryJournal
from orchestrator.model.history import HistoryEntry


@pytest.mark.parametrize("kind", ["load", "unload", "name_published", "engine_died"])
def test_ten_thousand_entries_of_a_frequent_kind_leave_a_change_of_an_alias_in_the_history(kind: str) -> None:
    journal = HistoryJournal("fleet")
    journal.add([HistoryEntry(kind="alias_set", subject="sql", actor="operator", at=1.0)])
    often = HistoryEntry(kind=kind, subject="policy", actor="tenant rl", at=2.0, body={"digest": "0" * 64})
    journal.add(often for _ in range(10_000))
    (entry,) = journal.find_entries(kinds=("alias_set",), subject=None, before=None, limit=10)
    assert (entry.subject, entry.id) == ("sql", 1)


def test_entries_are_read_again_whatever_is_in_their_texts_and_whatever_became_of_others() -> None:
    journal = HistoryJournal("fleet")
    texts = ["plain", "a\u2028b\x85c\u2029d", "e\r\nf\x0b\x0c\x1eg"]
    journal.add(HistoryEntry(kind="alias_set", subject="sql", actor=text, at=1.0) for text in texts)
    (name,) = [name for name in journal.names() if name == journal.name("changes", 0)]
    found = journal.part_object("changes-0", None)
    (key,) = found["data"]
    found["data"][key] = found["data"][key].replace('"plain"', "spoiled")

    again = HistoryJournal("fleet")
    again.load({name: found})
    entries = again.find_entries(kinds=(), subject=None, before=None, limit=10)
    assert [entry.actor for entry in entries] == texts[:0:-1]
    again.add([HistoryEntry(kind="alias_set", subject="sql", actor="next", at=2.0)])
    assert again.find_entries(kinds=(), subject=None, before=None, limit=1)[0].id == 4
