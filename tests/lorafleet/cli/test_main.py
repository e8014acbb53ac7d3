"""The `lorafleet` command: its arguments, its help, its page, and what it imports."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from lorafleet.cli import main as cli
from tests.lorafleet.cli.conftest import Run
from tests.patience import patience


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ["aliases", "set", "a", "b=heavy"],
        ["policy", "set", "loading"],
        ["policy", "set", "loading=2026-13-45"],
        ["policy", "set", "loading=[1"],
        ["policy", "set", "loading=" + "[" * 3000],
        ["up", "--engine", "tgi"],
        ["explain"],
        ["explain", "hello", "--policy", "kv_lora"],
        ["nonsense"],
    ],
)
def test_an_unknown_argument_has_status_2(run: Run, args: list[str]) -> None:
    assert run(*args).status == 2


PAGE = Path(cli.__file__).parents[2] / "docs" / "cli.md"


def test_streams_that_the_caller_has_closed_are_as_good_as_unread_ones() -> None:
    """Progress and questions ask a stream whether it is a terminal. A closed one was an error without a message."""
    code = (
        "import os, sys, lorafleet.cli.main as cli\n"
        "cli.app = lambda: print(sys.stdin.isatty(), sys.stderr.isatty(), os.readlink('/proc/self/fd/2'))\n"
        "cli.main()\n"
    )
    command = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=patience(30))
    assert answer.stdout == f"False False {os.devnull}\n"


def test_help_imports_nothing_heavy() -> None:
    heavy = "httpx fastapi numpy uvicorn aiohttp tokenizers rich.table"
    code = f"import sys, lorafleet.cli.main; print([m for m in '{heavy}'.split() if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def commands(command: Any, *words: str) -> Iterator[list[str]]:
    """The words of every command that has none below it."""
    if below := getattr(command, "commands", None):
        for name, one in below.items():
            yield from commands(one, *words, name)
    else:
        yield [*words]


WORDS = list(commands(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_every_command_explains_itself_with_an_example(run: Run, words: list[str]) -> None:
    result = run(*words, "--help")
    assert result.status == 0
    assert f"lorafleet {' '.join(words)}" in result.out.partition("Example")[2]


def test_the_page_about_the_command_line_has_every_command() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for group, *rest in WORDS:
        mine = [row for row in rows if row.startswith(f"| `{group}")]
        assert any(re.search(rf"`([a-z]+ )?{word}\b", row) for word in rest or [group] for row in mine), (group, rest)
