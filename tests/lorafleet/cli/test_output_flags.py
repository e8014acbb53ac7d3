"""Flags that every command shares: the format of lists, global options, the version, and shell completion."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.cli import main as cli
from lorafleet.keys.key_edits import add_key
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from tests.logs import no_logs
from tests.lorafleet.cli.conftest import Run
from tests.serving import serving_in_thread


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an orchestrator without workers."""
    store = tmp_path_factory.mktemp("lists") / "store.db"
    with no_logs(), serving_in_thread(lambda: build(OrchestratorSettings(store=store)).app) as url:
        yield url


@pytest.fixture
def filled(run: Run, fleet: str) -> str:
    """That orchestrator with two adapters, an alias, and a history."""
    for name in ("sql/v1", "law/v1"):
        assert (
            run("--orchestrator-url", fleet, "adapters", "add", name, "file:///a", "--base-model", "tiny").status == 0
        )
    assert run("--orchestrator-url", fleet, "aliases", "set", "sql", "sql/v1").status == 0
    return fleet


def below(command: Any, *words: str) -> Iterator[tuple[list[str], Any]]:
    """Every command that has none below it, with its words."""
    if found := getattr(command, "commands", None):
        for name, one in found.items():
            yield from below(one, *words, name)
    else:
        yield [*words], command


COMMANDS = list(below(typer.main.get_command(cli.app)))
LISTS = [words for words, _ in COMMANDS if words[-1] in ("list", "placements", "history")]


def test_every_list_is_known_here() -> None:
    assert sorted(LISTS) == sorted([
        *([group, "list"] for group in ("adapters", "aliases", "keys", "orphans", "pauses", "published", "workers")),
        ["placements"],
        ["history"],
    ])  # fmt: skip


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_every_list_is_printed_for_people_and_for_programs(
    run: Run, filled: str, tmp_path: Path, words: list[str]
) -> None:
    add_key(tmp_path / "keys.yaml", "acme", ["infer"])
    file = ("--file", str(tmp_path / "keys.yaml")) if words[0] == "keys" else ()

    def out(*flags: str) -> str:
        result = run(*words, *file, *flags, "--orchestrator-url", filled)
        assert result.status == 0, result.err
        return result.out

    items = json.loads(out("-o", "json"))["data"]
    assert json.loads(out("--json"))["data"] == items
    assert yaml.safe_load(out("-o", "yaml"))["data"] == items
    assert len(out("-o", "name").splitlines()) == len(items)
    assert len(out().splitlines()) == len(items) + 1
    narrow, wide = out().splitlines()[0], out("-o", "wide").splitlines()[0]
    assert len(wide.split()) > len(narrow.split())


def test_names_are_one_a_line_and_nothing_else(run: Run, filled: str) -> None:
    result = run("adapters", "list", "-o", "name", "--orchestrator-url", filled)
    assert result.out == "law/v1\nsql/v1\n"


def test_two_formats_at_once_are_refused(run: Run, filled: str) -> None:
    result = run("adapters", "list", "--json", "-o", "yaml", "--orchestrator-url", filled)
    assert (result.status, "name one" in result.err) == (2, True)


def test_one_adapter_and_the_policy_are_printed_for_programs(run: Run, filled: str) -> None:
    shown = json.loads(run("adapters", "show", "sql/v1", "--json", "--orchestrator-url", filled).out)
    assert (shown["lora_id"], bool(shown["etag"])) == ("sql/v1", True)
    policy = yaml.safe_load(run("policy", "show", "-o", "yaml", "--orchestrator-url", filled).out)
    assert policy["loading"] == "lazy"


@pytest.mark.parametrize("place", range(4))
def test_global_options_are_taken_before_and_behind_the_command(run: Run, filled: str, place: int) -> None:
    words = ["aliases", "list", "--json"]
    words[place:place] = [f"--orchestrator-url={filled}", "--token", "any"]
    result = run(*words)
    assert result.status == 0, result.err
    assert json.loads(result.out)["data"][0]["name"] == "sql"


def test_a_global_option_without_its_value_is_named(run: Run) -> None:
    result = run("aliases", "list", "--token")
    assert result.status == 2
    assert "--token" in result.err
    assert "argument" in result.err


def test_a_wrong_global_option_is_refused_at_every_place(run: Run) -> None:
    for words in (["--tokn", "x", "aliases", "list"], ["aliases", "list", "--tokn", "x"]):
        result = run(*words)
        assert (result.status, "--tokn" in result.err) == (2, True)


def test_no_command_has_an_option_of_a_global_one() -> None:
    taken = {"--orchestrator-url", "--router-url", "--token", "--version"}
    for words, command in COMMANDS:
        assert not taken & {flag for option in command.params for flag in option.opts}, words


SEGMENTS = st.sampled_from(
    [["list"], ["-o", "name"], ["--json"], ["--token", "x"], ["--token", "--json"], ["--token=y"]]
)


@given(st.lists(SEGMENTS, max_size=8), st.sampled_from([[], ["--"], ["--", "--token", "z"]]))
def test_moving_options_to_the_front_keeps_every_word_and_the_order(segments: list[list[str]], end: list[str]) -> None:
    def is_global(segment: list[str]) -> bool:
        return segment[0].startswith("--token")

    ordered = sorted(segments, key=lambda segment: not is_global(segment))
    words = [word for segment in segments for word in segment] + end
    assert cli.options_first(words, {"--token"}) == [word for segment in ordered for word in segment] + end


def test_options_behind_two_dashes_are_the_engines() -> None:
    words = ["up", "--token", "a", "--", "--token", "b"]
    assert cli.options_first(words, {"--token"}) == ["--token", "a", "up", "--", "--token", "b"]


def test_the_version_is_that_of_the_package(run: Run) -> None:
    result = run("--version")
    assert result.status == 0
    assert result.out.split()[0] == "lorafleet"
    assert result.out.split()[1][0].isdigit()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(run: Run, shell: str) -> None:
    result = run("completion", shell)
    assert result.status == 0
    assert "_LORAFLEET_COMPLETE" in result.out


def completed(line: str, url: str) -> list[str]:
    """What bash is offered at the end of a line."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1), "_LORAFLEET_COMPLETE": "complete_bash"}
    answer = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            "import sys; sys.argv[0] = 'lorafleet'; from lorafleet.cli.main import main; main()",
        ],
        env=os.environ | words | {"LORAFLEET_URL_ORCHESTRATOR": url},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert answer.stderr == ""
    return answer.stdout.split()


@pytest.mark.slow
def test_commands_and_names_of_the_fleet_are_completed(filled: str) -> None:
    assert "adapters" in completed("lorafleet ada", filled)
    assert completed("lorafleet adapters show s", filled) == ["sql/v1"]
    assert completed("lorafleet aliases rm ", filled) == ["sql"]
    assert completed("lorafleet adapters show s", "http://127.0.0.1:1") == [], "no fleet, and no message"
    assert completed(f"lorafleet --orchestrator-url {filled} adapters show l", "http://127.0.0.1:1") == ["law/v1"]
