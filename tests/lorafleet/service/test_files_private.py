"""Files of a service's state are for its own user alone, also those of an earlier version."""

import sqlite3
import stat
from contextlib import closing

import pytest

from lorafleet.service.files import make_folder, make_private_file, make_private_folder, private_opener


def mode_of(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_database_and_what_sqlite_keeps_beside_it_are_for_their_user_alone(tmp_path):
    path = tmp_path / "store.db"
    make_private_file(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE kept (x)")
        made = sorted(tmp_path.iterdir())
        assert [file.name for file in made] == ["store.db", "store.db-shm", "store.db-wal"]
        assert {mode_of(file) for file in made} == {0o600}


def test_a_database_that_others_may_read_becomes_its_users_alone_and_keeps_its_rows(tmp_path):
    path = tmp_path / "store.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE kept AS SELECT 1 AS x")
        for file in tmp_path.iterdir():
            file.chmod(0o644)
        make_private_file(path)
        assert {mode_of(file) for file in tmp_path.iterdir()} == {0o600}
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT x FROM kept").fetchall() == [(1,)]


def test_a_state_folder_and_its_files_become_their_users_alone(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    (folder / "catalog.json").write_text("{}")
    (folder / "catalog.json").chmod(0o644)
    make_folder(folder, "state_dir", is_private=True)
    assert (mode_of(folder), mode_of(folder / "catalog.json")) == (0o700, 0o600)
    make_folder(tmp_path / "new" / "state", "state_dir", is_private=True)
    assert mode_of(tmp_path / "new" / "state") == 0o700


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_narrower_mode_stays(tmp_path, mode):
    path = tmp_path / "kept"
    path.touch()
    path.chmod(mode)
    make_private_file(path)
    assert mode_of(path) == mode


def test_a_folder_that_everybody_shares_keeps_its_mode(tmp_path):
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    make_private_folder(shared)
    assert mode_of(shared) == 0o1777


def test_a_file_that_a_private_opener_makes_is_its_users_alone(tmp_path):
    with open(tmp_path / "log", "ab", opener=private_opener) as file:
        file.write(b"x")
    assert mode_of(tmp_path / "log") == 0o600
