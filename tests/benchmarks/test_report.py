"""Goals by figure and by ratio, the table that joins runs, and a run of rows that fails or is interrupted."""

import json
import os
import signal
import subprocess
import sys

import pytest

from benchmarks.report import ReportRow, by_contender, joined, put_into
from benchmarks.row_runner import RowFailed, RowRunner

PEER = "sglang-router"


@pytest.mark.parametrize(
    ("row", "ok"),
    [
        (ReportRow("memory", 80, "MB", 90), True),
        (ReportRow("memory", 91, "MB", 90), False),
        (ReportRow("events", 80, "events/s", 90), False),
        (ReportRow("chat", 180, "us", None, PEER, 130, 1.5), True),
        (ReportRow("chat", 200, "us", None, PEER, 130, 1.5), False),
        (ReportRow("events", 200, "events/s", None, PEER, 130, 1.5), True),
        (ReportRow("chat", 200, "us", None, PEER, 130), None),
        (ReportRow("chat", 200, "us", None, PEER, None, 1.5), None),
    ],
)
def test_a_goal_is_a_figure_or_a_multiple_of_what_was_measured_beside_it(row, ok):
    assert row.ok is ok


def test_a_goal_against_a_peer_that_is_not_installed_is_neither_reached_nor_missed():
    row = ReportRow("chat", 200, "us", None, PEER, None, 1.5)
    assert row.cells() == ("chat", "200 us", f"{PEER}: -", "-", "<= 1.5x", "-")
    assert ReportRow("chat", 180, "us", None, PEER, 130, 1.5).cells()[3:] == ("1.38x", "<= 1.5x", "yes")
    assert ReportRow("chat", 80, "us").cells() == ("chat", "80 us", "", "", "", "")


def test_runs_are_joined_by_the_median_of_each_name_and_a_missing_row_is_a_dash():
    def rows(value):
        return [ReportRow("chat", value, "us", None, PEER, 100.0, 1.5).as_json()]

    table = joined({"before": [rows(200), rows(220), rows(900)], "after": [rows(110), [], rows(110)]})
    assert table.splitlines()[2] == f"| chat | 220 us | 110 us | 0.50x | {PEER}: 100 | 1.10x | <= 1.5x | yes |"
    lacking = joined({"before": [[]], "after": [rows(110)]})
    assert lacking.splitlines()[2].startswith("| chat | - | 110 us | - |")


def test_one_run_is_a_table_with_a_column_for_each_contender():
    rows = [
        ReportRow("chat", 180, "us", None, PEER, 130, 1.5),
        ReportRow("chat", 130, "us", contender=PEER),
        ReportRow("chat", 40, "us", contender="nginx"),
        ReportRow("a kilobyte", 9, "us", None, "32 KB, us", 3, 2.0),
    ]
    assert by_contender([row.as_json() for row in rows]).splitlines() == [
        f"| what | ours | {PEER} | nginx | ratio | goal | reached |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| chat, us | 180 | 130 | 40 | 1.38x | <= 1.5x | yes |",
        "| a kilobyte, us | 9 |  |  | 3.00x of 3 (32 KB, us) | <= 2x | NO |",
    ]


def test_a_table_takes_the_place_of_its_name_in_a_page_and_no_other():
    page = "a\n<!-- figures: relay -->\nold\n<!-- end of figures -->\nb\n<!-- figures: x -->\n<!-- end of figures -->\n"
    new = put_into(page, "relay", "| new |")
    assert new == page.replace("old", "| new |")
    with pytest.raises(ValueError, match="decision"):
        put_into(page, "decision", "| new |")


def test_the_command_joins_files_and_refuses_what_is_no_name_and_file(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([ReportRow("chat", 200, "us").as_json()]))
    command = [sys.executable, "-P", "-m", "benchmarks.report"]
    ended = subprocess.run([*command, f"now={file}"], capture_output=True, text=True, check=True)
    assert "| chat | 200 us |" in ended.stdout
    refused = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "NAME=FILE" in refused.stderr


def test_a_row_that_fails_costs_neither_the_rows_before_it_nor_those_after_it(tmp_path, capsys):
    out = tmp_path / "rows.json"
    runner = RowRunner(["one", "two", "three"], dict.fromkeys(("one", "two", "three"), 5.0), out)
    with runner.measuring("one") as rows:
        rows.append(ReportRow("first", 1, "us"))
    with runner.measuring("two") as rows:
        rows.append(ReportRow("second", 2, "us"))
        raise RowFailed("no peer answered")
    with runner.measuring("three") as rows:
        rows.append(ReportRow("third", 3, "us"))
        raise ZeroDivisionError
    assert [(row["row"], row["what"]) for row in json.loads(out.read_text())] == [
        ("one", "first"),
        ("two", "second"),
        ("three", "third"),
    ]
    assert runner.status == 1
    said = capsys.readouterr().err
    assert "[1/3] one: about 5 s, 15 s to the end" in said
    assert "two failed: no peer answered" in said


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_has_and_names_what_it_lacks(tmp_path, capsys, sent):
    runner = RowRunner(["one", "two"], {"one": 5.0, "two": 5.0}, tmp_path / "rows.json")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with runner.interruptible():
            with runner.measuring("one") as rows:
                rows.append(ReportRow("first", 1, "us"))
                os.kill(os.getpid(), sent)
                signal.pause()
            pytest.fail("the run went on")
    finally:
        signal.signal(signal.SIGINT, before)
    assert [row.what for row in runner.rows] == ["first"]
    assert runner.status == 130
    assert "not measured in whole: one, two" in capsys.readouterr().err
