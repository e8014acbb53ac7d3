"""`lorafleet ARGS` in the test's process."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from lorafleet.cli import main as cli


@dataclass(frozen=True, slots=True)
class CliResult:
    status: int
    out: str
    err: str


Run = Callable[..., CliResult]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`lorafleet ARGS`, in this process."""

    def run_it(*args: str) -> CliResult:
        monkeypatch.setattr(sys, "argv", ["lorafleet", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return CliResult(int(end.value.code or 0), captured.out, captured.err)

    return run_it
