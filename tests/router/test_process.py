"""What a router's process is made of."""

import subprocess
import sys

_LOADED = """
import runpy, sys
try:
    runpy.run_module("router", run_name="__main__", alter_sys=True)
except SystemExit:  # --help
    print(*(name for name, module in sys.modules.items() if module is not None), file=sys.stderr)
"""


def test_nothing_is_loaded_that_only_terminals_need() -> None:
    command = [sys.executable, "-c", _LOADED, "--help"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr.split()
    assert "router.app" in loaded
    assert not {"pygments", "rich", "watchfiles"}.intersection(loaded)
