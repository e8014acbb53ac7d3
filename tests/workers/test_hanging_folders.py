"""Folders on a file system that hangs, such as a network file system whose server is gone."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_adapter
from tests.patience import patience, until, within
from workers.core.errors import SourceError
from workers.sources.base import Transfer
from workers.sources.file_system import FileSystemCalls
from workers.sources.local import LocalSource


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, threading.Event]]:
    """Folder -> what its file system waits for before it answers."""
    answers: dict[str, threading.Event] = {}
    realpath = os.path.realpath

    def slow_realpath(path: str | os.PathLike[str], **options: bool) -> str:
        for folder, answer in answers.items():
            if Path(path).is_relative_to(folder):
                answer.wait()
        return realpath(path, **options)

    monkeypatch.setattr("workers.sources.local.os.path.realpath", slow_realpath)
    yield answers
    for answer in answers.values():
        answer.set()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two roots, with an adapter `a` in each."""
    for name in ("gone", "well"):
        make_adapter(tmp_path / name, "a")
    return tmp_path / "gone", tmp_path / "well"


async def fetched(source: LocalSource, folder: Path, into: Path) -> set[str]:
    """The names of the files that a fetch brings."""
    into.mkdir()  # noqa: ASYNC240  (a test's own folder)
    async with within(30):
        await source.fetch(str(folder), into, Transfer())
    return set(os.listdir(into))  # noqa: PTH208


async def have_ended() -> bool:
    """Whether no read is left in any thread."""
    return all(thread.name != "source" for thread in threading.enumerate())


async def test_a_hanging_file_system_ends_its_own_fetches_alone(tmp_path, folders, hangs):
    gone, well = folders
    calls = FileSystemCalls(timeout_s=0.05)
    source = LocalSource(folders, max_bytes=1 << 30, calls=calls)
    answer = hangs[str(gone)] = threading.Event()
    for number in range(4):
        with pytest.raises(SourceError, match=r"has not answered for 0\.05 s") as failed:
            await fetched(source, gone / "a", tmp_path / f"gone-{number}")
        assert (failed.value.code, failed.value.retry_after_s) == ("source_failed", 30)
    for ended in (source.check(str(gone / "a")), fetched(source, gone / "a", tmp_path / "refused")):
        with pytest.raises(SourceError, match=f"{gone}: 4 reads there still wait"):
            await ended
    calls._timeout_s = patience(30)
    assert "adapter_config.json" in await fetched(source, well / "a", tmp_path / "well-files")

    answer.set()

    async def answers() -> bool:
        with contextlib.suppress(SourceError):
            await source.check(str(gone / "a"))
            return True
        return False

    await until(answers, what="the reads that hung have ended")
    assert "adapter_config.json" in await fetched(source, gone / "a", tmp_path / "back")


async def test_a_read_that_hung_writes_nothing_when_it_goes_on(tmp_path, folders, hangs):
    source = LocalSource(folders, max_bytes=1 << 30, calls=FileSystemCalls(timeout_s=0.05))
    answer = hangs[str(folders[0])] = threading.Event()
    into = tmp_path / "into"
    with pytest.raises(SourceError):
        await fetched(source, folders[0] / "a", into)
    into.rmdir()  # as the cache does after a failure
    answer.set()
    await until(have_ended, what="the read has ended")
    assert not into.exists()


async def test_a_call_that_gets_further_is_not_given_up():
    goes_on, reached = threading.Event(), count()

    def progress() -> int:
        number = next(reached)
        if number == 5:
            goes_on.set()
        return number

    calls = FileSystemCalls(timeout_s=0.01)
    async with within(30):
        assert await calls.run(goes_on.wait, place="/a", progress=progress)


async def test_a_cancelled_call_waits_for_its_thread():
    ends, began = threading.Event(), threading.Event()
    order = []

    def work() -> None:
        began.set()
        ends.wait()
        order.append("thread")

    call = asyncio.create_task(FileSystemCalls(timeout_s=30).run(work, place="/a", cancel=ends.set))
    await asyncio.to_thread(began.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert order == ["thread"]
