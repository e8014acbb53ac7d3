"""Runs a small benchmark from the command line and reads its rows."""

import json
import subprocess
import sys
from pathlib import Path

from tests.patience import patience

KEYS = (
    *("what", "value", "unit", "reach", "ok", "baseline", "baseline_value"),
    *("reach_ratio", "ratio", "row", "contender"),
)


def rows_of(name: str, folder: Path, *flags: str, within_s: float = 60) -> list[dict]:
    """The rows of `python -m benchmarks.<name> --quick`, which must end well."""
    out = folder / "rows.json"
    command = [sys.executable, "-P", "-m", f"benchmarks.{name}", "--quick", "--json", str(out), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patience(within_s), check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(out.read_text())
    assert all(row.keys() >= set(KEYS) for row in rows)
    return rows
