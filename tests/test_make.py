"""`make install`, with a Python and a pip that do nothing."""

import subprocess
from pathlib import Path

from tests.patience import patience

ROOT = Path(__file__).parents[1]

# Debian's and Ubuntu's, where python3-venv is a package of its own: without it half an environment is left.
PYTHON = """#!/bin/sh
test "$1" = -c && exit
mkdir -p "$3/bin"
ln -sf /bin/true "$3/bin/python"
test -e "{package}" && ln -s /bin/true "$3/bin/pip"
"""


def test_an_environment_that_was_left_without_pip_is_made_whole_the_next_time(tmp_path):
    package, python, venv = tmp_path / "python3-venv", tmp_path / "python3", tmp_path / "venv"
    python.write_text(PYTHON.format(package=package))
    python.chmod(0o755)
    install = ["make", "-C", str(ROOT), f"PYTHON={python}", f"VENV={venv}", "install"]
    assert subprocess.run(install, capture_output=True, timeout=patience(60), check=False).returncode != 0
    assert (venv / "bin" / "python").exists()
    package.touch()
    done = subprocess.run(install, capture_output=True, text=True, timeout=patience(60), check=False)
    assert (done.returncode, (venv / "installed").exists()) == (0, True), done.stderr
