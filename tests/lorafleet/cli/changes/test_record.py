"""`lorafleet export`, `import` and `sync` between two real orchestrators without workers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet.keys.key_edits import add_key
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from tests.logs import no_logs
from tests.lorafleet.cli.conftest import Run
from tests.serving import serving_in_thread

DIGEST = "3f9a1c2b77aa" + "0" * 52


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """URLs of a fleet with keys and of an open one that may fetch from it, and the file of a key for the first."""
    folder = tmp_path_factory.mktemp("two")
    keys = folder / "keys.yaml"
    for scope in ("admin", "export"):
        (folder / f"{scope}.key").write_text(add_key(keys, None, [scope]))
    first = OrchestratorSettings(store=folder / "there.db", key_files=(keys,))
    with no_logs(), serving_in_thread(lambda: build(first).app) as there:
        second = OrchestratorSettings(store=folder / "here.db", peer_fleets=(there,))
        with serving_in_thread(lambda: build(second).app) as here:
            yield there, here, folder


def test_a_record_goes_from_fleet_to_file_and_by_sync_to_another_fleet(
    run: Run, fleets: tuple[str, str, Path], tmp_path: Path
) -> None:
    there, here, folder = fleets
    admin = (folder / "admin.key").read_text()
    source = ("--orchestrator-url", there, "--token", admin)
    assert run(*source, "adapters", "add", "sql/v1", "file:///srv/sql", "--base-model", "tiny").status == 0
    assert run(*source, "aliases", "set", "sql", "sql/v1").status == 0

    file = tmp_path / "fleet.json"
    assert "1 adapters, 1 names" in run(*source, "export", str(file)).out
    record = json.loads(file.read_text())
    record["adapters"][0]["digest"] = DIGEST
    file.write_text(json.dumps(record))
    assert run(*source, "import", str(file), "--yes").status == 0, "as if a worker had inspected it"

    target = ("--orchestrator-url", here)
    sync = (*target, "sync", "--from", there, "--from-token-file", str(folder / "export.key"), "--wait", "0")
    shown = run(*sync, "--dry-run")
    assert shown.status == 0, shown.err
    assert all(word in shown.out for word in ("sql/v1", DIGEST[:12], f"fleet+{there}")), shown.out
    asked = run(*sync)
    assert (asked.status, "--yes" in asked.err) == (2, True)
    done = run(*sync, "--yes")
    assert (done.status, "2 changes made" in done.out) == (0, True), done.err
    again = run(*sync, "--yes")
    assert (again.status, "nothing to do" in again.out) == (0, True)
    assert "nothing to do" in run(*target, "import", str(file)).out, "the digest says that they are the same"


def test_a_key_for_the_other_fleet_is_named_by_its_own_option(run: Run, fleets: tuple[str, str, Path]) -> None:
    there, here, _ = fleets
    target = ("--orchestrator-url", here, "sync", "--from", there)
    for token in ("no key\nat all", "unknown"):
        refused = run(*target, "--from-token", token)
        assert refused.status != 0
        assert "--from-token KEY, or LORAFLEET_FROM_TOKEN" in refused.err, refused.err


def test_what_is_blocked_is_named_and_the_status_is_1(run: Run, fleets: tuple[str, str, Path], tmp_path: Path) -> None:
    target = ("--orchestrator-url", fleets[1])
    assert run(*target, "adapters", "add", "mine/v1", "file:///srv/mine", "--base-model", "tiny").status == 0
    file = tmp_path / "record.yaml"
    file.write_text("adapters: [{lora_id: mine/v1, source: 'file:///srv/mine', base_model: other}]\n")
    shown = run(*target, "import", str(file), "--dry-run")
    assert (shown.status, "blocked" in shown.out) == (0, True)
    blocked = run(*target, "import", str(file), "--yes")
    assert (blocked.status, "mine/v1: base_model is tiny here and other there" in blocked.err) == (1, True), blocked.err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("import", "missing.json"), "expected a file that `lorafleet export` wrote"),
        (("sync", "--from", "http://127.0.0.1:1"), "--from names another address"),
        (("import", "{file}", "--only", "everything"), "there are adapters, aliases, policy"),
        (("import", "{file}", "--prune", "--yes"), "would delete all of this fleet's"),
    ],
)
def test_what_is_wrong_is_one_line(
    run: Run, fleets: tuple[str, str, Path], tmp_path: Path, words: tuple[str, ...], part: str
) -> None:
    file = tmp_path / "empty.json"
    file.write_text("{}")
    failed = run("--orchestrator-url", fleets[1], *(word.format(file=file) for word in words))
    assert failed.status > 0
    assert part in failed.err
    assert len(failed.err.splitlines()) == 1


def test_a_key_without_the_scope_may_not_read_the_record(run: Run, fleets: tuple[str, str, Path]) -> None:
    failed = run("--orchestrator-url", fleets[1], "sync", "--from", fleets[0], "--from-token", "lf-nobody", "--dry-run")
    assert (failed.status, "not known" in failed.err) == (1, True)
