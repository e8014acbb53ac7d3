"""Output that cannot be written."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lorafleet.cli.conftest import Run
from tests.patience import patience


@pytest.mark.parametrize("words", [["keys", "list"], ["keys", "list", "--json"], ["keys", "new"]], ids=" ".join)
def test_output_to_a_full_disk_is_one_line(run: Run, tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "keys.yaml"
    assert run("keys", "new", "--file", str(path)).status == 0
    command = [sys.executable, "-P", "-m", "lorafleet", *words, "--file", str(path)]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=patience(30)
        )
    assert ended.returncode == 1
    assert ended.stderr == ("lorafleet: the output cannot be written: [Errno 28] No space left on device; make room\n")
