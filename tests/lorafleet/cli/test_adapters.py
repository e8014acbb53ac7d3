"""`lorafleet adapters add` and `set`: adapters are registered and changed by the command line."""

import re
from pathlib import Path

import pytest

from tests.lorafleet.cli.conftest import Run
from tests.patience import wait_until


@pytest.mark.slow
def test_an_adapter_is_added_listed_shown_and_removed(ask: Run, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("")
    ask("adapters", "add", "sql/v1", str(tmp_path), "--base-model", "tiny", "--tenant", "acme", "--loading", "eager")
    row = next(line for line in ask("adapters", "list").out.splitlines() if line.startswith("sql/v1"))
    assert "acme" in row
    shown = ask("adapters", "show", "sql/v1").out
    assert str(tmp_path) in shown
    assert "loading=eager" in shown
    assert "adapters show sql/v1" in ask("adapters", "retry", "sql/v1").out
    ask("adapters", "rm", "sql/v1")
    wait_until(lambda: "sql/v1" not in ask("adapters", "list").out)


def test_adding_an_adapter_again_works_unless_its_source_differs(ask: Run, run: Run, orchestrator: str) -> None:
    ask("adapters", "add", "again/v1", "file:///a", "--base-model", "tiny")
    ask("adapters", "add", "again/v1", "file:///a", "--base-model", "tiny")
    result = run("--orchestrator-url", orchestrator, "adapters", "add", "again/v1", "file:///b")
    assert result.status == 1
    assert "new version" in result.err
    assert len(result.err.splitlines()) == 1
    result = run("--orchestrator-url", orchestrator, "adapters", "add", "again/v1", "file:///a", "--tenant", "acme")
    assert "PATCH /v1/adapters/again/v1 changes those (lorafleet adapters set LORA_ID)" in result.err


def test_only_named_fields_of_an_adapter_change(ask: Run) -> None:
    ask("adapters", "add", "set/v1", "file:///a", "--base-model", "tiny", "--min-replicas", "1", "--tenant", "acme")
    result = ask("adapters", "set", "set/v1", "priority=5", "pinned=true", "min-replicas=null").out
    assert re.search(r"priority +5\n", result)
    shown = ask("adapters", "show", "set/v1").out
    assert "loading=-, min_replicas=-, max_replicas=-, pinned=True, priority=5" in shown
    assert re.search(r"tenants +acme\n", shown)
    ask("adapters", "set", "set/v1", "--tenant", "globex", "--tenant", "acme")
    assert re.search(r"tenants +acme, globex\n", ask("adapters", "show", "set/v1").out)
    ask("adapters", "set", "set/v1", "--everyone")
    shown = ask("adapters", "show", "set/v1").out
    assert re.search(r"tenants +-\n", shown)
    assert "pinned=True, priority=5" in shown


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ([], 2, "nothing to change: name NAME=VALUE, --tenant or --everyone"),
        (["--tenant", "acme", "--everyone"], 2, "name one: --tenant, or --everyone"),
        (["priority"], 2, "`lorafleet adapters show LORA_ID` has the names"),
        (["lodaing=eager"], 1, "policy.lodaing: there is no such field; known: loading, min_replicas"),
        (["loading=soon"], 1, "policy.loading: Input should be 'lazy', 'eager', 'weighted' or 'everywhere'"),
        (["min_replicas=2", "max_replicas=1"], 1, "min_replicas 2 is above max_replicas 1"),
    ],
)
def test_a_wrong_change_of_an_adapter_is_one_line_and_changes_nothing(
    ask: Run, run: Run, orchestrator: str, words: list[str], status: int, says: str
) -> None:
    ask("adapters", "add", "unset/v1", "file:///a", "--base-model", "tiny")
    before = ask("adapters", "show", "unset/v1").out
    result = run("--orchestrator-url", orchestrator, "adapters", "set", "unset/v1", *words)
    assert result.status == status
    assert says in result.err
    assert len(result.err.splitlines()) == 1
    assert ask("adapters", "show", "unset/v1").out == before


@pytest.mark.parametrize(
    "words",
    [
        ["adapters", "add", "x/v1", "file:///a", "--tenant", ""],
        ["adapters", "set", "x/v1", "--tenant", "acme", "--tenant", " "],
        ["adapters", "push", ".", "x/v1", "--tenant", ""],
        ["orphans", "adopt", "--tenant", ""],
        ["orphans", "adopt", "--tenant", "acme", "--everyone"],
    ],
)
def test_a_tenant_without_a_name_or_beside_everyone_is_refused(run: Run, words: list[str]) -> None:
    result = run("--orchestrator-url", "http://127.0.0.1:1", *words)
    assert result.status == 2
    assert "--tenant" in result.err
    assert len(result.err.splitlines()) == 1


def test_an_adapter_changes_only_if_its_etag_matches(ask: Run, run: Run, orchestrator: str) -> None:
    ask("adapters", "add", "seen/v1", "file:///a", "--base-model", "tiny")
    tag = next(line.split()[1] for line in ask("adapters", "show", "seen/v1").out.splitlines() if "etag" in line)
    ask("adapters", "set", "seen/v1", "priority=1", "--if-match", tag)
    result = run("--orchestrator-url", orchestrator, "adapters", "set", "seen/v1", "priority=2", "--if-match", tag)
    assert result.status == 1
    assert "read it again" in result.err


def test_a_relative_folder_is_registered_by_its_whole_path(
    ask: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ask("adapters", "add", "here/v1", "./here")
    assert f"{tmp_path}/here" in ask("adapters", "show", "here/v1").out


def test_a_folder_of_another_machine_is_registered_with_a_note(run: Run, orchestrator: str, tmp_path: Path) -> None:
    result = run("--orchestrator-url", orchestrator, "adapters", "add", "elsewhere/v1", str(tmp_path / "nothing"))
    assert result.status == 0
    assert f"this machine has no folder {tmp_path / 'nothing'}" in result.err
