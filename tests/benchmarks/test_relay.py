"""The relay benchmark runs and reports; its times are for people to read, never for tests."""

import json
import subprocess
import sys


def test_a_quick_relay_benchmark_ends_and_writes_a_row_of_every_group(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.relay", "--quick", "--json", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(out.read_text())
    assert all({"what", "value", "unit", "reach", "ok", "baseline", "baseline_value"} <= row.keys() for row in rows)
    held = [row["what"] for row in rows if row["reach"] is not None]
    for said in (
        "short chat, ~1 KB",
        "relay alone",
        "32 KB prompt, prefix seen",
        "32 KB prompt, new",
        "tokenization",
        "event-loop lag",
        "chunk, burst",
        "chunk, paced",
        "p50",
        "p99",
        "first chunk",
        "open streams",
        "memory, idle",
        "memory, loaded",
        "64 replicas",
        "10,000 adapters",
    ):
        assert any(said in what for what in held), said
    unanswered = next(row for row in rows if "not answered in whole" in row["what"])
    assert unanswered["value"] == 0
