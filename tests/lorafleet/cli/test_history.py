"""`lorafleet history` and `backup`."""

import errno
import os
import re
from pathlib import Path

import pytest

from orchestrator.store.store import IntentStore
from tests.lorafleet.cli.conftest import Run


def test_an_unknown_history_kind_is_refused_with_the_known_ones(ask: Run, run: Run, orchestrator: str) -> None:
    result = run("--orchestrator-url", orchestrator, "history", "--kind", "nope")
    assert result.status == 1
    assert "'nope'" in result.err
    for kind in re.findall(r"[a-z_]+", result.err.partition("known: ")[2]):
        ask("history", "--kind", kind)
    assert "policy_changed" in result.err


def test_an_orchestrator_starts_on_a_backup(ask: Run, run: Run, orchestrator: str, tmp_path: Path) -> None:
    ask("adapters", "add", "kept/v1", "file:///kept", "--base-model", "tiny")
    file = tmp_path / "backup.db"
    assert "bytes" in ask("backup", str(file)).out
    result = run("--orchestrator-url", orchestrator, "backup", str(file))
    assert result.status == 1
    assert "new file" in result.err
    store = IntentStore(file)
    assert "kept/v1" in store.adapters
    store.close()


def test_a_backup_on_a_full_disk_leaves_no_file(
    ask: Run, run: Run, orchestrator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "backup.db"

    def no_space(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        result = run("--orchestrator-url", orchestrator, "backup", str(file))
    assert (result.status, result.err) == (1, f"lorafleet: {file}: no space left in {tmp_path}: make room\n")
    assert list(tmp_path.iterdir()) == []
    assert "bytes" in ask("backup", str(file)).out
