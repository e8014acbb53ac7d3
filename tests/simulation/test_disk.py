"""What a simulated disk keeps over a power loss, by random choice of what was not kept."""

import errno
import os
import sqlite3
from random import Random

import pytest

from tests.simulation.disk import Disk, limit_databases

TRIES = 30


def flush(disk, path):
    descriptor = os.open(path, os.O_RDONLY)
    disk.fsync(descriptor)
    os.close(descriptor)


def lose_power(disk, seed, databases=()):
    with disk.losing_power(list(databases), Random(seed)):
        for database in databases:
            database.close()


def outcomes(tmp_path, prepare, read):
    """What is found after a power loss, over many seeds."""
    found = set()
    for seed in range(TRIES):
        folder = tmp_path / str(seed)
        folder.mkdir(parents=True)
        disk = Disk(folder)
        databases = prepare(disk, folder) or ()
        lose_power(disk, seed, databases)
        found.add(read(folder))
    return found


def read_or_none(name):
    return lambda folder: (folder / name).read_bytes() if (folder / name).exists() else None


def test_flushed_file_outlives_a_power_loss_and_a_second_one(tmp_path):
    def prepare(disk, folder):
        (folder / "a").write_bytes(b"whole")
        flush(disk, folder / "a")
        lose_power(disk, 0)

    assert outcomes(tmp_path, prepare, read_or_none("a")) == {b"whole"}


def test_file_that_was_never_flushed_is_whole_cut_off_empty_or_gone(tmp_path):
    found = outcomes(tmp_path, lambda _disk, folder: (folder / "a").write_bytes(b"ab") and None, read_or_none("a"))
    assert {None, b"", b"ab"} <= found <= {None, b"", b"a", b"ab"}


def test_line_that_was_added_after_the_flush_may_be_lost_and_those_before_it_not(tmp_path):
    def prepare(disk, folder):
        with (folder / "a").open("wb") as file:
            file.write(b"1\n")
            file.flush()
            disk.fsync(file.fileno())
            file.write(b"2\n")

    found = outcomes(tmp_path, prepare, read_or_none("a"))
    assert {b"1\n", b"1\n2\n"} <= found <= {b"1\n", b"1\n2", b"1\n2\n"}


@pytest.mark.parametrize("is_flushed", [True, False])
def test_file_that_replaced_another_is_certain_only_with_its_folder_flushed(tmp_path, is_flushed):
    def prepare(disk, folder):
        (folder / "a").write_bytes(b"old")
        flush(disk, folder / "a")
        (folder / "new").write_bytes(b"new")
        flush(disk, folder / "new")
        (folder / "new").replace(folder / "a")
        if is_flushed:
            flush(disk, folder)

    assert outcomes(tmp_path, prepare, read_or_none("a")) == ({b"new"} if is_flushed else {b"old", b"new"})


def test_deleted_file_may_be_back_until_the_journal_is_written(tmp_path):
    def prepare(disk, folder):
        (folder / "a").write_bytes(b"old")
        flush(disk, folder / "a")
        (folder / "a").unlink()
        if is_written:
            disk.commit_journal()

    is_written = False
    assert outcomes(tmp_path / "early", prepare, read_or_none("a")) == {b"old", None}
    is_written = True
    assert outcomes(tmp_path / "late", prepare, read_or_none("a")) == {None}


@pytest.mark.parametrize(("synchronous", "rows"), [("FULL", {2}), ("NORMAL", {1, 2})])
def test_commit_of_a_database_is_certain_only_where_each_is_flushed(tmp_path, synchronous, rows):
    def prepare(_disk, folder):
        database = sqlite3.connect(folder / "store.db")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {synchronous}")
        for number in range(2):
            database.execute("CREATE TABLE IF NOT EXISTS t (a)")
            database.execute("INSERT INTO t VALUES (1)")
            database.commit()
            if number == 0:
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return [database]

    def read(folder):
        database = sqlite3.connect(folder / "store.db")
        (count,) = database.execute("SELECT count(*) FROM t").fetchone()
        database.close()
        return count

    assert outcomes(tmp_path, prepare, read) == rows


def test_full_disk_takes_no_flush_and_no_growing_database(tmp_path):
    disk = Disk(tmp_path)
    (tmp_path / "a").write_bytes(b"1")
    database = sqlite3.connect(tmp_path / "store.db")
    disk.is_full = True
    limit_databases([database], is_full=True)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        flush(disk, tmp_path / "a")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        database.execute("CREATE TABLE t (a)")
    limit_databases([database], is_full=False)
    database.execute("CREATE TABLE t (a)")
    database.close()
