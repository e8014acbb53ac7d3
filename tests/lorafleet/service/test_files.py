"""A full disk gives one line that names the folder, and leaves no partial files."""

import errno
import os
from pathlib import Path

import pytest

from lorafleet.keys.key_edits import add_key
from lorafleet.local.fleet import LocalFleet
from lorafleet.service.failure import CommandFailed
from lorafleet.service.files import write_atomically, write_error_text
from tests.lorafleet.local.test_up import options


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte gets to the disk any more."""

    def no_space(*_args: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    monkeypatch.setattr(Path, "write_text", no_space)
    monkeypatch.setattr(Path, "write_bytes", no_space)


def test_a_file_is_replaced_whole_with_the_given_mode(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for content, mode in ((b"one", 0o600), (b"two", 0o640)):
        write_atomically(path, content, mode=mode)
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (content, mode)
    assert [it.name for it in tmp_path.iterdir()] == ["f"]


@pytest.mark.usefixtures("full")
def test_a_full_disk_leaves_the_old_file_and_no_partial_one(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.touch()
    with pytest.raises(OSError, match="No space") as refusal:
        write_atomically(path, b"new")
    assert write_error_text(refusal.value, tmp_path) == f"no space left in {tmp_path}: make room"
    assert (path.read_bytes(), [it.name for it in tmp_path.iterdir()]) == (b"", ["f"])


def test_an_unreadable_key_file_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    path = tmp_path / "k.yaml"
    path.symlink_to(tmp_path / ("x" * 300))  # for root, too, an error, as behind a folder that is not ours to search
    with pytest.raises(CommandFailed, match="File name too long"):
        add_key(path, None, ["infer"])
    assert path.is_symlink()


@pytest.mark.usefixtures("full")
def test_a_key_on_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=f"k.yaml: no space left in {tmp_path}: make room$"):
        add_key(tmp_path / "k.yaml", None, ["infer"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("full")
async def test_a_fleet_on_a_full_disk_gives_one_line_with_the_folder(tmp_path: Path) -> None:
    fleet = LocalFleet(options(tmp_path, state_dir=tmp_path))
    try:
        with pytest.raises(CommandFailed) as failure:
            await fleet.run_until_cancelled()
    finally:
        await fleet.stop()
    assert str(failure.value) == f"no space left in {tmp_path}: make room, or name another folder with --state-dir"
