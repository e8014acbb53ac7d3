"""Benchmarks run and report; their times are for people to read, never for tests."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["agent", "decision", "rest"])
def test_a_quick_benchmark_ends_and_writes_its_rows(tmp_path, name):
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(out.read_text())
    assert rows
    assert all({"what", "value", "unit", "reach", "ok", "baseline", "baseline_value"} <= row.keys() for row in rows)
    assert all(row["value"] > 0 for row in rows)
