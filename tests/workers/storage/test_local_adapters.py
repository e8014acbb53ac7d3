"""Folders on a file system that hangs, such as a network file system whose server is gone."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lorafleet.local.tiny_model import make_adapter
from tests.patience import patience, until, within
from tests.workers.running import code, loaded, post
from workers.core.errors import SourceError
from workers.sources.base import Transfer
from workers.sources.file_system import FileSystemCalls
from workers.sources.local import LocalSource
from workers.storage.local_adapters import LocalAdapters
from workers.verification.manifest import AdapterRules


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, threading.Event]]:
    """Folder -> what its file system waits for before it answers."""
    answers: dict[str, threading.Event] = {}

    def hanging(call: Callable[..., Any]) -> Callable[..., Any]:
        def answer_at_last(path: Any = ".", *args: Any, **options: Any) -> Any:
            if not isinstance(path, int):
                for folder, answer in answers.items():
                    if Path(os.fsdecode(path)).is_relative_to(folder):
                        assert threading.current_thread() is not threading.main_thread(), "its event loop would hang"
                        answer.wait()
            return call(path, *args, **options)

        return answer_at_last

    for place, name in ((os, "stat"), (os, "scandir"), (os.path, "realpath")):
        monkeypatch.setattr(place, name, hanging(getattr(place, name)))
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
        with pytest.raises(SourceError, match=rf"{gone}: 4 read\(s\) there still wait"):
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


async def test_a_scan_of_a_hanging_lora_path_keeps_the_last_result(tmp_path, hangs):
    make_adapter(tmp_path, "a")
    adapters = LocalAdapters(
        tmp_path, AdapterRules(64, frozenset(), "off"), calls=FileSystemCalls(timeout_s=patience(1))
    )
    assert await adapters.scan()
    make_adapter(tmp_path, "b")
    adapters._calls._timeout_s = 0.05
    answer = hangs[str(tmp_path)] = threading.Event()
    for _ in range(2):
        assert not await adapters.scan()
        assert {each.lora_id for each in adapters.adapters} == {"a"}
    assert sum(thread.name == "source" for thread in threading.enumerate()) == 1, "the second was refused"
    answer.set()
    await until(adapters.scan, what="the folder is scanned again")
    assert {each.lora_id for each in adapters.adapters} == {"a", "b"}


@pytest.mark.parametrize(
    ("text", "found"), [('{"team": "sales", "stars": [1]}', {"team": "sales", "stars": [1]}), ("[1]", {}), ("{", {})]
)
async def test_metadata_json_beside_an_adapter_is_read_and_changes_nothing_else(tmp_path, text, found):
    path = make_adapter(tmp_path, "a") / "metadata.json"
    adapters = LocalAdapters(tmp_path, AdapterRules(64, frozenset(), "off"))
    await adapters.scan()
    before = adapters.find("a")
    path.write_text(text)
    await adapters.scan()
    after = adapters.find("a")
    assert before is not None
    assert after is not None
    assert (before.metadata, after.metadata) == ({}, found)
    assert (after.error, after.manifest) == (None, before.manifest)


async def test_a_scan_that_reads_a_large_adapter_is_not_given_up(tmp_path, monkeypatch):
    """Each read takes a third of the time after which a read is given up."""
    make_adapter(tmp_path, "a", rank=8)
    monkeypatch.setattr("workers.verification.verify._READ_BYTES", 1024)
    calls, reads = FileSystemCalls(timeout_s=patience(0.1)), []
    adapters = LocalAdapters(tmp_path, AdapterRules(64, frozenset(), "off"), calls=calls)
    advance, slow = adapters._advance, threading.Event()

    def slowly(amount: int) -> None:
        if len(reads) < 10:
            slow.wait(patience(0.1) / 3)
        reads.append(amount)
        advance(amount)

    monkeypatch.setattr(adapters, "_advance", slowly)
    assert await adapters.scan()
    assert len(reads) > 10


async def test_an_agent_with_a_hanging_lora_path_serves_what_it_has(worker, agent_adapters, tmp_path, hangs):
    elsewhere = make_adapter(tmp_path / "elsewhere", "own/v1")
    flags = ("--lora-roots", f'["{tmp_path / "elsewhere"}"]', "--scan-s", "0.1", "--source-timeout-s", "0.3")
    async with worker.together(*flags) as client:
        answer = hangs[str(agent_adapters)] = threading.Event()
        named = asyncio.create_task(post(client, "load_lora", lora_id="legal/v2"))
        while not named.done():
            assert (await client.get("/ready")).is_success
        assert (named.result().status_code, code(named.result())) == (502, "source_failed")
        assert "the file system has not answered" in named.result().text
        (await post(client, "load_lora", lora_id="own/v1", source=str(elsewhere))).raise_for_status()
        assert await loaded(client) == {"own/v1"}

        answer.set()

        async def loads() -> bool:
            return (await post(client, "load_lora", lora_id="legal/v2")).is_success

        await until(loads, what="an adapter of lora_path is loaded")
