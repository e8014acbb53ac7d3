"""The CLI against a real orchestrator without workers; what needs a fleet is in tests/e2e."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from lorafleet import cli
from lorafleet.auth import Keys, hash_key


@dataclass(frozen=True, slots=True)
class Said:
    status: int
    out: str
    err: str


Run = Callable[..., Said]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`lorafleet ARGS`, in this process."""

    def run_it(*args: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["lorafleet", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return Said(int(end.value.code or 0), captured.out, captured.err)

    return run_it


@pytest.fixture(scope="module")
def orchestrator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("orchestrator")
    port_file = folder / "port"
    command = [sys.executable, "-m", "orchestrator", "--port", "0", "--port-file", str(port_file)]
    process = subprocess.Popen([*command, "--store", str(folder / "store.db")], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not port_file.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port_file.read_text()}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
def ask(run: Run, orchestrator: str) -> Run:
    """`lorafleet ARGS` to that orchestrator; must succeed."""

    def ask_it(*args: str) -> Said:
        said = run("--orchestrator-url", orchestrator, *args)
        assert said.status == 0, said.err
        return said

    return ask_it


def test_an_adapter_is_added_listed_shown_and_removed(ask: Run, tmp_path: Path) -> None:
    ask("adapters", "add", "sql/v1", str(tmp_path), "--base-model", "tiny", "--tenant", "acme", "--loading", "eager")
    row = next(line for line in ask("adapters", "list").out.splitlines() if line.startswith("sql/v1"))
    assert "acme" in row
    shown = ask("adapters", "show", "sql/v1").out
    assert str(tmp_path) in shown
    assert "loading=eager" in shown
    ask("adapters", "rm", "sql/v1")
    deadline = time.monotonic() + 10
    while "sql/v1" in ask("adapters", "list").out:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_adding_the_same_adapter_again_is_fine_and_another_source_is_refused(
    ask: Run, run: Run, orchestrator: str
) -> None:
    ask("adapters", "add", "again/v1", "file:///a", "--base-model", "tiny")
    ask("adapters", "add", "again/v1", "file:///a", "--base-model", "tiny")
    said = run("--orchestrator-url", orchestrator, "adapters", "add", "again/v1", "file:///b")
    assert said.status == 1
    assert "new version" in said.err
    assert len(said.err.splitlines()) == 1


def test_a_relative_folder_is_registered_by_its_whole_path(
    ask: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ask("adapters", "add", "here/v1", "./here")
    assert f"{tmp_path}/here" in ask("adapters", "show", "here/v1").out


def test_an_alias_is_set_listed_and_removed(ask: Run) -> None:
    for version in ("v1", "v2"):
        ask("adapters", "add", f"law/{version}", f"file:///{version}")
    ask("aliases", "set", "law", "law/v1=9", "law/v2")
    assert "law/v1 (9), law/v2 (1)" in ask("aliases", "list").out
    ask("aliases", "rm", "law")
    assert "law/v1" not in ask("aliases", "list").out


def test_the_policy_is_shown_and_changed(ask: Run) -> None:
    assert "lazy" in ask("policy", "show").out
    assert "eager" in ask("policy", "set", "loading=eager", "reserve_slots=0").out
    assert "eager" in ask("policy", "show").out
    ask("policy", "set", "loading=lazy")


def test_a_wrong_policy_name_is_one_line_that_names_it(run: Run, orchestrator: str) -> None:
    said = run("--orchestrator-url", orchestrator, "policy", "set", "lodaing=eager")
    assert said.status == 1
    assert "lodaing" in said.err
    assert len(said.err.splitlines()) == 1


def test_an_empty_fleet_has_headings_and_no_rows(ask: Run) -> None:
    for command in (["workers", "list"], ["placements"]):
        assert len(ask(*command).out.splitlines()) == 1
    assert "0 of 0 workers ready" in ask("top").out


def test_an_unknown_worker_is_one_line(run: Run, orchestrator: str) -> None:
    said = run("--orchestrator-url", orchestrator, "workers", "cordon", "w9")
    assert said.status == 1
    assert "w9" in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("args", [["adapters", "list"], ["explain", "hello"], ["top"]])
def test_a_server_that_is_away_is_one_line_that_names_the_flag(run: Run, args: list[str]) -> None:
    away = "http://127.0.0.1:9"
    said = run("--orchestrator-url", away, "--router-url", away, *args)
    assert said.status == 1
    assert "-url" in said.err
    assert len(said.err.splitlines()) == 1


def test_the_address_comes_from_the_environment(run: Run, orchestrator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAFLEET_URL_ORCHESTRATOR", orchestrator)
    assert run("workers", "list").status == 0


@pytest.mark.parametrize(
    "args", [["aliases", "set", "a", "b=heavy"], ["policy", "set", "loading"], ["up", "--engine", "tgi"], ["nonsense"]]
)
def test_a_wrong_word_has_status_2(run: Run, args: list[str]) -> None:
    assert run(*args).status == 2


def test_a_new_key_is_printed_once_and_the_file_holds_only_its_hash(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys" / "keys.yaml"
    first = run("keys", "new", "--tenant", "acme", "--scopes", "infer", "--file", str(path)).out.strip()
    second = run("keys", "new", "--scopes", "infer, admin", "--file", str(path)).out.strip()
    text = path.read_text()
    assert first not in text
    assert [entry["sha256"] for entry in yaml.safe_load(text)["keys"]] == [hash_key(first), hash_key(second)]
    keys = Keys([path])
    assert keys.caller(f"Bearer {first}").tenant == "acme"
    assert not keys.caller(f"Bearer {first}").may("admin")
    assert keys.caller(f"Bearer {second}").may("admin")
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_that_is_no_key_file_is_left_alone(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "notes.yaml"
    path.write_text("shopping: [milk]\n")
    said = run("keys", "new", "--file", str(path))
    assert said.status == 1
    assert path.read_text() == "shopping: [milk]\n"
    assert run("keys", "new", "--scopes", "root", "--file", str(tmp_path / "k")).status == 2
    assert not (tmp_path / "k").exists()


def test_help_imports_nothing_heavy() -> None:
    heavy = "httpx fastapi numpy uvicorn aiohttp tokenizers rich.table"
    code = f"import sys, lorafleet.cli; print([m for m in '{heavy}'.split() if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_every_command_explains_itself(run: Run) -> None:
    for words in (
        "up", "explain", "top", "placements", "adapters add", "adapters show", "aliases set", "workers drain",
        "policy set", "keys new",
    ):  # fmt: skip
        said = run(*words.split(), "--help")
        assert said.status == 0
        assert len(said.out) > 100
