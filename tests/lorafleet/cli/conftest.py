"""`lorafleet ARGS` in the process of the test, and an orchestrator to ask."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from lorafleet.cli import main as cli
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from tests.logs import no_logs
from tests.serving import serving_in_thread


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


@pytest.fixture(scope="module")
def orchestrator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = tmp_path_factory.mktemp("orchestrator") / "store.db"
    with no_logs(), serving_in_thread(lambda: build(OrchestratorSettings(store=store)).app) as url:
        yield url


@pytest.fixture
def ask(run: Run, orchestrator: str) -> Run:
    """`lorafleet ARGS` to that orchestrator; must succeed."""

    def ask_it(*args: str) -> CliResult:
        result = run("--orchestrator-url", orchestrator, *args)
        assert result.status == 0, result.err
        return result

    return ask_it
