"""The engine's processes say which modules of an adapter they have; a module is ignored if none of them has it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.engine.vllm_plugin.lora_reports import (
    LoadedModules,
    LoraReport,
    ask_for_reports,
    forget_all_reports,
    forget_reports,
    loaded_modules,
    read_reports,
    write_report,
)

NAME = "sql/../v1 \x00@3f9a1c2b77aa"


def test_a_report_is_written_only_where_it_was_asked_for(tmp_path):
    report = LoraReport(0, 1, 8, ("model.layers.0.mlp.up_proj",))
    write_report(tmp_path, NAME, report)
    assert list(tmp_path.iterdir()) == []
    ask_for_reports(tmp_path / "reports", NAME)
    write_report(tmp_path / "reports", NAME, report)
    assert read_reports(tmp_path / "reports", NAME) == [report]
    ask_for_reports(tmp_path / "reports", NAME)
    assert read_reports(tmp_path / "reports", NAME) == []
    write_report(tmp_path / "reports", NAME, report)
    forget_reports(tmp_path / "reports", NAME)
    write_report(tmp_path / "reports", NAME, report)
    assert (read_reports(tmp_path / "reports", NAME), list((tmp_path / "reports").iterdir())) == ([], [])
    ask_for_reports(tmp_path / "reports", NAME)
    forget_all_reports(tmp_path / "reports")
    assert list((tmp_path / "reports").iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rank": 0}', '{"rank": "x", "world_size": 1, "ignored": []}'])
def test_a_file_that_is_no_report_is_left_out(tmp_path, content):
    ask_for_reports(tmp_path, NAME)
    write_report(tmp_path, NAME, LoraReport(0, 1, 8, ()))
    (folder,) = tmp_path.iterdir()
    (folder / "1.json").write_text(content)
    assert read_reports(tmp_path, NAME) == [LoraReport(0, 1, 8, ())]


@given(
    taken=st.lists(st.frozensets(st.sampled_from("abcdef")), min_size=1, max_size=4),
    copies=st.integers(1, 2),
)
def test_a_module_is_ignored_if_no_process_took_it(taken, copies):
    world = len(taken)
    reports = [
        LoraReport(rank, world, 6, tuple(sorted(frozenset("abcdef") - mine)))
        for rank, mine in list(enumerate(taken)) * copies
    ]
    assert loaded_modules(reports) == LoadedModules(6, tuple(sorted(frozenset("abcdef").difference(*taken))))
    # Without the report of one stage of a pipeline, its modules would look ignored.
    assert loaded_modules([report for report in reports if report.rank != world - 1]) is None


def test_a_module_is_not_called_if_it_runs_in_no_process_and_known_once_all_have_seen():
    stage, other = LoraReport(0, 2, 2, ("b",), uncalled=("a",), calls_seen="yes"), LoraReport(1, 2, 2, ("a",))
    found = loaded_modules([stage, replace(other, calls_seen="yes")])
    assert (found.ignored, found.uncalled, found.calls_seen) == ((), ("a",), "yes")
    assert loaded_modules([stage, replace(other, calls_seen="not yet")]).calls_seen == "not yet"
    assert loaded_modules([stage, other]).calls_seen == "no"


def test_no_report_says_nothing():
    assert loaded_modules([]) is None
