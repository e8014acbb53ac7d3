"""The corpus made anew and asked again: what real vLLM does with each adapter is what was recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adapters.recorded import FOLDER, CorpusFamily, read_family
from tests.patience import patience

FAMILIES = sorted(path.stem for path in FOLDER.glob("*.json"))
GROUPS = 5
# Measured: 4 s of CPU a family, and 25 s for the imports of a group.
WITHIN_S = 600


def run(module: str, folder: Path, families: list[str]) -> None:
    """Run a program of the corpus on these families; fails with the end of its output."""
    ended = subprocess.run(
        [sys.executable, "-P", "-m", f"tests.adapters.{module}", str(folder), *families],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=patience(WITHIN_S),
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-3000:]


@pytest.mark.vllm
@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(4 * WITHIN_S)
@pytest.mark.parametrize("group", range(GROUPS))
def test_vllm_does_with_each_adapter_what_was_recorded(group: int, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("vllm")
    families = FAMILIES[group::GROUPS]
    run("make", tmp_path, families)
    run("referee", tmp_path, families)
    different = []
    for name in families:
        found = json.loads((tmp_path / name / "verdicts.json").read_text())
        different += _differences(read_family(FOLDER / f"{name}.json"), found, tmp_path / name)
    assert not different, "\n".join(different)


def _differences(recorded: CorpusFamily, found: dict, folder: Path) -> list[str]:
    """Rows with another verdict than the recorded one, each with both."""
    if found["judged_by"] != recorded.judged_by:
        return [
            f"{recorded.name}: judged by {found['judged_by']}, recorded {recorded.judged_by}: {found['why_not_run']}"
        ]
    rows = {
        f"{row['trainer']}, {row['shape']}": row["folder"] for row in json.loads((folder / "rows.json").read_text())
    }
    lines = []
    for row in recorded.rows:
        now = found["rows"].get(rows.get(f"{row.trainer}, {row.shape}", ""))
        before = row.verdict and (row.verdict.loads, sorted(row.verdict.ignored))
        if before != (now and (now["loads"], sorted(now.get("ignored", ())))):
            lines.append(f"{row.name}: now {now}, recorded {row.verdict}")
        elif now and now["loads"] and (now["effect"] == "none") != (row.verdict.effect == "none"):
            lines.append(f"{row.name}: its effect is {now['effect']}, recorded {row.verdict.effect}")
    return lines
