"""The relay benchmark runs and reports; its times are for people to read, never for tests."""

import pytest

from tests.benchmarks.smoke import rows_of

pytestmark = pytest.mark.fleet


def test_the_quick_relay_benchmark_writes_the_rows_of_one_group(tmp_path):
    rows = rows_of("relay", tmp_path, "--rows", "new", "--contenders", "lorafleet")
    held = goals(rows)
    assert {row["row"] for row in rows} == {"new"}
    assert any("tokenization" in what for what in held)
    assert any("32 KB prompt, new" in what for what in held)


@pytest.mark.thorough
def test_the_quick_relay_benchmark_writes_a_row_of_every_group(tmp_path):
    rows = rows_of("relay", tmp_path, within_s=180)
    held = goals(rows)
    for said in (
        "short chat, ~1 KB",
        "relay alone",
        "32 KB prompt, prefix seen",
        "32 KB prompt, new",
        "tokenization",
        "33 KB prompt, English, seen before",
        "a kilobyte of 33 KB, new",
        "one curly quote",
        "engines without KV events",
        "wait for room",
        "event-loop lag",
        "chunk, burst",
        "chunk, paced",
        "connection, p50",
        "connection, p99",
        "kept connections",
        "new connections",
        "open streams",
        "memory, idle",
        "memory, loaded",
        "prompts of 33 KB, kept",
        "with nothing to do, 64 replicas",
        "short chat, 64 replicas",
        "10,000 adapters",
    ):
        assert any(said in what for what in held), said
    unanswered = next(row for row in rows if "not answered in whole" in row["what"])
    assert unanswered["value"] == 0


def goals(rows: list[dict]) -> list[str]:
    """What the rows with a goal measure."""
    return [row["what"] for row in rows if row["reach"] is not None or row["reach_ratio"] is not None]
