"""The cache folder: leases, deletion, and several agents sharing it."""

import asyncio
import contextlib
import errno
import hashlib
import os
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from lorafleet.local.tiny_model import make_adapter
from tests.calls import count_calls
from tests.patience import patience, until, within
from tests.workers.contexts import agent_context
from tests.workers.contexts import installer_of as plain_installer
from tests.workers.running import SIM, RunningWorker, code, loaded, post
from workers.agent.installer import Installer
from workers.config import WorkerSettings
from workers.core.errors import EngineError, SourceError
from workers.core.eviction import CachedAdapter, adapters_to_delete
from workers.factories import cache_folder_of
from workers.inventory.event_log import AgentEventLog
from workers.inventory.installed_adapters import InstalledAdapters
from workers.inventory.inventory import Inventory, timestamp
from workers.metrics import WorkerMetrics
from workers.sources.base import Limits
from workers.sources.local import LocalSource
from workers.storage.cache import AdapterCache
from workers.storage.cache_folder import CacheFolder
from workers.storage.uploads import Uploads
from workers.verification.manifest import AdapterRules, Manifest
from workers.wire import BeginFileRequest, InspectRequest, WorkerAdapter

NOBODY: frozenset[str] = frozenset()


def named(name: str) -> str:
    """A digest for each name."""
    return hashlib.sha256(name.encode()).hexdigest()


def disk(folder, agent_id="a", **more) -> CacheFolder:
    return CacheFolder(folder, agent_id=agent_id, **{"grace_s": 10.0, "lease_s": 100.0, **more})


def install(on: CacheFolder, digest: str, *, size: int = 100, idle_s: float = 1000.0) -> None:
    """Create an installed adapter, last used `idle_s` ago."""
    path = on.path(digest)
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(bytes(size))
    set_age(path, idle_s)


def set_age(path, seconds: float) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def installed_digests(on: CacheFolder) -> set[str]:
    return {folder.digest for folder in on.adapters(NOBODY)}


def test_least_recently_used_idle_adapters_are_deleted_first():
    folders = [
        CachedAdapter(named("held"), 100, 0.0, is_in_use=True),
        CachedAdapter(named("old"), 100, 1.0, is_in_use=False),
        CachedAdapter(named("older"), 100, 0.5, is_in_use=False),
        CachedAdapter(named("fresh"), 100, 95.0, is_in_use=False),
    ]
    assert [folder.digest for folder in adapters_to_delete(folders, excess_bytes=150, now=100, grace_s=10)[0]] == [
        named("older"),
        named("old"),
    ]
    assert [folder.digest for folder in adapters_to_delete(folders, excess_bytes=1, now=100, grace_s=10)[0]] == [
        named("older")
    ]
    assert adapters_to_delete(folders, excess_bytes=0, now=100, grace_s=10) == ([], 0)
    assert adapters_to_delete(folders, excess_bytes=350, now=100, grace_s=10)[1] == 150


def test_unwanted_adapters_are_deleted_to_make_room(tmp_path):
    mine = disk(tmp_path, max_bytes=250)
    for digest, idle_s in ((named("wanted"), 3000), (named("old"), 2000), (named("newer"), 1000)):
        install(mine, digest, idle_s=idle_s)
    gone, missing = mine.make_room(100, frozenset({named("wanted")}))
    assert (gone, missing) == ([named("old"), named("newer")], 0)
    assert installed_digests(mine) == {named("wanted")}
    assert not list(tmp_path.glob(".gone-*"))


def test_adapters_of_gigabytes_count_with_all_their_bytes_and_make_room_for_each_other(tmp_path):
    gib = 1 << 30
    on = disk(tmp_path / "cache", max_bytes=20 * gib)
    for digest, size, idle_s in (
        (named("first"), 6 * gib, 3000.0),
        (named("second"), 7 * gib, 2000.0),
        (named("third"), 5 * gib, 1000.0),
    ):
        install(on, digest, size=0)
        os.truncate(on.path(digest) / "adapter_model.safetensors", size)  # holes: no disk has so many bytes for a test
        set_age(on.path(digest), idle_s)
    assert on.usage() == (18 * gib, 3)
    assert on.has_room(2 * gib)
    assert not on.has_room(2 * gib + 1)
    assert on.make_room(6 * gib, NOBODY) == ([named("first")], 0)
    assert on.usage() == (12 * gib, 2)
    assert on.make_room(21 * gib, NOBODY) == ([], gib)
    lora = WorkerAdapter(
        lora_id="experts",
        path="/x",
        base_model="moe",
        rank=16,
        digest="d",
        size_bytes=on.adapters(NOBODY)[0].size_bytes,
    )
    message = TypeAdapter(WorkerAdapter)
    assert message.validate_json(message.dump_json(lora)) == lora


def test_no_adapter_is_deleted_if_it_would_not_be_enough(tmp_path):
    mine = disk(tmp_path, max_bytes=250)
    install(mine, named("wanted"))
    install(mine, named("old"))
    assert mine.make_room(200, frozenset({named("wanted")})) == ([], 50)
    assert installed_digests(mine) == {named("wanted"), named("old")}


def test_other_folders_beside_the_adapters_are_neither_counted_nor_deleted(tmp_path):
    mine = disk(tmp_path, max_bytes=250)
    install(mine, named("old"))
    for name in ("my-base-model", "lost+found", "A" * 64):
        install(mine, name, idle_s=5000)
    assert mine.usage() == (100, 1)
    assert mine.make_room(200, NOBODY) == ([named("old")], 0)
    assert mine.delete_half_of_idle(NOBODY) == []
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"my-base-model", "lost+found", "A" * 64}


def test_leased_adapter_is_kept_until_its_lease_expires(tmp_path):
    mine, other = disk(tmp_path, "a", max_bytes=1), disk(tmp_path, "b")
    install(mine, named("shared"))
    assert other.claim(named("shared"))
    assert mine.make_room(0, NOBODY)[0] == []
    lease = mine.path(named("shared")) / ".users" / "b"
    for path in (lease, lease.parent):
        set_age(path, 99)
    assert mine.make_room(0, NOBODY)[0] == []
    for path in (lease, lease.parent):
        set_age(path, 2)
    assert mine.make_room(0, NOBODY)[0] == [named("shared")]


def test_leases_are_renewed_while_wanted_and_removed_after_the_grace(tmp_path):
    mine = disk(tmp_path)
    install(mine, named("kept"))
    install(mine, named("dropped"))
    assert mine.renew_leases({named("kept"), named("dropped"), named("lost")}) == [named("lost")]
    leases = {digest: mine.path(digest) / ".users" / "a" for digest in (named("kept"), named("dropped"))}
    for lease in leases.values():
        set_age(lease, 50)
    before = leases[named("kept")].stat().st_mtime
    assert mine.renew_leases({named("kept")}) == []
    assert leases[named("kept")].stat().st_mtime > before
    assert not leases[named("dropped")].exists()


def test_lease_of_an_attached_engine_outlives_its_agent(tmp_path):
    mine, attached = disk(tmp_path, "a", max_bytes=1), disk(tmp_path, "b", engine_outlives_s=10_000)
    install(mine, named("shared"))
    attached.claim(named("shared"))
    for path in (mine.path(named("shared")) / ".users" / "b", mine.path(named("shared")) / ".users"):
        set_age(path, 5000)
    assert mine.make_room(0, NOBODY)[0] == []
    assert attached.renew_leases(NOBODY) == []
    assert mine.adapters(NOBODY)[0].is_in_use is False


def test_adapter_served_by_a_silent_agents_engine_is_kept(tmp_path):
    served, requested = {named("kept")}, []

    def served_digests(engine_url: str) -> set[str]:
        requested.append(engine_url)
        return served

    mine, other = disk(tmp_path, "a", max_bytes=1, served_digests=served_digests), disk(tmp_path, "b")
    other.engine_url = "http://10.0.0.7:8100"
    for digest in (named("kept"), named("gone")):
        install(mine, digest)
        other.claim(digest)
        for path in (mine.path(digest) / ".users" / "b", mine.path(digest) / ".users"):
            set_age(path, 5000)
    assert mine.make_room(0, NOBODY)[0] == [named("gone")]
    assert requested == ["http://10.0.0.7:8100"] * 2
    assert mine.adapters(NOBODY)[0].is_in_use  # the lease was renewed on behalf of the engine without an agent


@pytest.mark.parametrize("lease", ["", "{", "[]", '{"engine": "http://127.0.0.1:1", "host": "elsewhere"}'])
def test_adapter_of_an_unreachable_engine_is_deleted(tmp_path, lease):
    mine = disk(tmp_path, max_bytes=1, served_digests=lambda _: {named("old")})
    install(mine, named("old"))
    (mine.path(named("old")) / ".users").mkdir()
    (mine.path(named("old")) / ".users" / "b").write_text(lease)
    for path in (mine.path(named("old")) / ".users" / "b", mine.path(named("old")) / ".users"):
        set_age(path, 5000)
    assert mine.make_room(0, NOBODY)[0] == [named("old")]


async def test_nothing_is_deleted_while_the_engine_lists_it_or_is_unreachable(tmp_path):
    mine = disk(tmp_path, max_bytes=100)
    cache = AdapterCache(mine, sources={}, rules=AdapterRules(64, frozenset(), "off"), fetch_deadline_s=10)
    for digest in (named("listed"), named("idle")):
        install(mine, digest)

    async def silent() -> frozenset[str]:
        raise EngineError("engine_timeout", "no answer")

    async def lists() -> frozenset[str]:
        return frozenset({named("listed")})

    await cache.maintain_folder(NOBODY, NOBODY, silent)
    assert installed_digests(mine) == {named("listed"), named("idle")}
    await cache.maintain_folder(NOBODY, NOBODY, lists)
    assert installed_digests(mine) == {named("listed")}


async def test_only_adapters_in_use_count_as_held_bytes(tmp_path):
    cache = AdapterCache(
        disk(tmp_path, max_bytes=200), sources={}, rules=AdapterRules(64, frozenset(), "off"), fetch_deadline_s=10
    )
    for digest in (named("wanted"), named("idle")):
        install(cache.folder, digest)

    async def lists() -> frozenset[str]:
        return NOBODY

    await cache.maintain_folder(frozenset({named("wanted")}), NOBODY, lists)
    assert (cache.used_bytes, cache.held_bytes, cache.adapters) == (200, 100, 2)
    await cache.maintain_folder(NOBODY, NOBODY, lists)
    assert (cache.used_bytes, cache.held_bytes, cache.adapters) == (200, 0, 2)


def test_agent_gets_a_unique_id_after_a_first_start_with_full_disk(tmp_path):
    settings = WorkerSettings(model="m", state_dir=tmp_path, cache_dir=tmp_path / "cache")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            cache_folder_of(settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    cache_folder_of(settings)
    assert len((tmp_path / "agent_id").read_text()) == 12


def test_usage_of_thousands_of_adapters_is_computed_without_reading_each(tmp_path):
    crowded = disk(tmp_path, max_bytes=1 << 30)
    for number in range(2000):
        install(crowded, named(str(number)))
    first, again = count_calls(crowded.usage), count_calls(crowded.usage)
    assert again < first / 3
    install(crowded, named("another"))
    shutil.rmtree(crowded.path(named("0")))
    assert crowded.usage() == (200_000, 2000)


def test_thousands_of_deleted_adapters_are_forgotten_by_some_calls_for_each(tmp_path):
    holds = inventory(tmp_path)
    digests = [f"{number:064x}" for number in range(5000)]
    for digest in digests:
        holds.installed.update_in_memory(
            WorkerAdapter(
                lora_id=digest,
                digest=digest,
                engine_name=digest,
                path="",
                source="",
                base_model="",
                rank=8,
                size_bytes=1,
            )
        )
    assert count_calls(lambda: holds.forget_deleted(digests)) < 100 * len(digests)
    assert holds.installed.all() == ()


def inventory(folder) -> Inventory:
    settings = WorkerSettings(model="m")
    return Inventory(
        settings=settings,
        installed=InstalledAdapters(folder),
        events=AgentEventLog(boot_id="b", size=1000, now=timestamp),
        metrics=WorkerMetrics(),
    )


def test_claim_during_a_deletion_either_prevents_it_or_fails(tmp_path):
    mine, other = disk(tmp_path, "a", max_bytes=1), disk(tmp_path, "b")
    for turn in range(30):
        digest = named(str(turn))
        install(mine, digest)
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(2))
            claimed, freed = pool.submit(other.claim, digest), pool.submit(mine.make_room, 0, NOBODY)
            assert claimed.result() == (digest not in freed.result()[0]) == mine.path(digest).exists()


def test_adapter_leased_after_the_scan_is_not_deleted(tmp_path):
    mine, other = disk(tmp_path, "a"), disk(tmp_path, "b")
    install(mine, named("old"))
    seen = mine.adapters(NOBODY)
    other.claim(named("old"))
    assert mine.delete_until_freed(seen, 1, NOBODY) == ([], 100)
    assert installed_digests(mine) == {named("old")}
    assert not list(tmp_path.glob(".gone-*"))


def test_leftovers_are_removed_but_other_agents_growing_downloads_stay(tmp_path):
    mine, other = disk(tmp_path, "a"), disk(tmp_path, "b")
    for each in (mine, other):
        with each.download_folder() as path:
            (path / "adapter_model.safetensors").write_bytes(b"half")
    with other.download_folder() as stuck:
        set_age(stuck, 4000)
    (tmp_path / ".gone-a-1" / named("digest")).mkdir(parents=True)
    mine.remove_leftovers()
    assert [path.name.split("-")[1] for path in tmp_path.glob(".partial-*")] == ["b"]
    assert not list(tmp_path.glob(".gone-*"))


def test_resumable_download_is_kept_for_an_hour_or_until_disk_full(tmp_path):
    mine = disk(tmp_path)
    with (
        mine.download_folder("https://one") as one,
        mine.download_folder("https://two") as two,
        mine.download_folder("https://one") as second,
    ):
        assert len({one, two, second}) == 3  # two agents never use one download folder
        mine.remove_leftovers(is_full=True)
        assert one.exists()
        assert second.exists()
    mine.remove_leftovers()
    assert not second.exists()
    with disk(tmp_path).download_folder("https://one") as found:  # another start of the same agent
        assert found == one
    set_age(two, 4000)
    mine.remove_leftovers()
    assert (one.exists(), two.exists()) == (True, False)
    mine.remove_leftovers(is_full=True)
    assert not one.exists()


def test_replaced_damaged_folder_keeps_its_leases(tmp_path):
    mine, other = disk(tmp_path, "a"), disk(tmp_path, "b")
    install(mine, named("digest"), size=1)
    other.claim(named("digest"))
    with mine.download_folder() as whole:
        (whole / "adapter_model.safetensors").write_bytes(b"whole")
        mine.replace_adapter(named("digest"), whole)
    assert (mine.path(named("digest")) / "adapter_model.safetensors").read_bytes() == b"whole"
    assert {path.name for path in (mine.path(named("digest")) / ".users").iterdir()} == {"a", "b"}


def test_adapter_is_usable_where_no_lease_can_be_written(tmp_path):
    mine = disk(tmp_path)
    install(mine, named("here"))
    (mine.path(named("here")) / ".users").write_text("")  # no folder: the lease cannot be written, as on a full disk
    assert mine.claim(named("here"))
    assert not mine.claim(named("elsewhere"))


async def test_adapter_installed_meanwhile_by_another_agent_needs_no_room(tmp_path):
    mine = disk(tmp_path, max_bytes=150)
    cache = AdapterCache(mine, sources={}, rules=AdapterRules(64, frozenset(), "off"), fetch_deadline_s=10)
    manifest = Manifest(digest=named("new"), rank=8, base_model="", size_bytes=100, modules=1)
    install(mine, named("held"))

    async def in_use(*arriving: str) -> frozenset[str]:
        for digest in arriving:
            install(mine, digest)
        return frozenset({named("held")})

    with pytest.raises(SourceError, match="50 bytes too few"):
        await cache.make_room(manifest.digest, manifest.size_bytes, in_use)
    assert await cache.make_room(manifest.digest, manifest.size_bytes, lambda: in_use(named("new"))) == []


class FullDiskSource:
    """A source that fails with a full disk while an idle adapter exists."""

    def __init__(self, source: LocalSource, idle: Path) -> None:
        self.source, self.idle = source, idle
        self.tries = 0

    async def fetch(self, ref, into, transfer) -> None:
        self.tries += 1
        if self.idle.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        await self.source.fetch(ref, into, transfer)


async def test_fetch_on_a_full_disk_deletes_unfinished_downloads_but_nothing_that_clients_sent(tmp_path):
    mine = disk(tmp_path / "cache")
    with mine.download_folder("https://unfinished") as unfinished:
        (unfinished / "adapter_model.safetensors").write_bytes(b"half")
    uploads = Uploads(mine, Limits(max_bytes=1 << 20))
    await uploads.begin("a" * 24, "archive", BeginFileRequest(total_bytes=10))
    installer, source = installer_of(mine, tmp_path, unfinished)
    ask = InspectRequest(lora_id="a/v1", source=str(make_adapter(tmp_path / "from", "a/v1")))
    assert (await installer.inspect(ask)).lora_id == "a/v1"
    assert source.tries == 2
    assert (await uploads.state("a" * 24)).files[0].total_bytes == 10


@pytest.mark.parametrize("idle_s", [1000, 0])
async def test_fetch_on_a_full_disk_deletes_idle_adapters_and_retries_once(tmp_path, idle_s):
    mine = disk(tmp_path / "cache")
    install(mine, named("idle"), idle_s=idle_s)
    installer, source = installer_of(mine, tmp_path, mine.path(named("idle")))
    ask = InspectRequest(lora_id="a/v1", source=str(make_adapter(tmp_path / "from", "a/v1")))
    if idle_s:
        assert (await installer.inspect(ask)).lora_id == "a/v1"
        assert source.tries == 2
    else:
        with pytest.raises(SourceError, match=r"no space left in .*: \d+ bytes are free, 100 are taken"):
            await installer.inspect(ask)
        assert source.tries == 1
    assert not list((tmp_path / "cache").glob(".partial-*"))


def installer_of(mine: CacheFolder, tmp_path: Path, filling: Path) -> tuple[Installer, FullDiskSource]:
    """An installer whose disk is full while a folder exists, and its source."""
    source = FullDiskSource(LocalSource([tmp_path], max_bytes=1 << 30), filling)
    rules = AdapterRules(64, frozenset(), "off")
    cache = AdapterCache(mine, sources={"file": source}, rules=rules, fetch_deadline_s=10)
    installer = plain_installer(agent_context(cache, tmp_path / "state"))
    return installer, source


class GatedSource:
    """A source whose fetches wait for the test's gate."""

    def __init__(self) -> None:
        self.under_way = 0
        self.gate = asyncio.Event()

    async def fetch(self, ref, into, transfer) -> None:
        self.under_way += 1
        await self.gate.wait()


async def test_fetches_at_a_time_are_limited(tmp_path):
    source, rules = GatedSource(), AdapterRules(64, frozenset(), "off")
    cache = AdapterCache(
        disk(tmp_path), sources={"file": source}, rules=rules, fetch_deadline_s=0.2, parallel_fetches=2
    )

    async def fetch(number: int) -> None:
        async with cache.fetch(f"/a{number}"):
            pass

    tasks = [asyncio.create_task(fetch(number)) for number in range(3)]
    async with within(5):
        while source.under_way < 2:
            await asyncio.sleep(0)
    done, waiting = await asyncio.wait(tasks, timeout=0.1)
    assert (source.under_way, len(done), len(waiting)) == (2, 0, 3)
    tasks[0].cancel()  # the third one gets the slot, and its deadline begins now
    async with within(5):
        while source.under_way < 3:
            await asyncio.sleep(0)
    source.gate.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError)
    assert ended[2] is None


# --- real agents ----------------------------------------------------------------------------------------------------


def cached_digests(cache) -> set[str]:
    return {path.name for path in cache.iterdir() if not path.name.startswith(".")}


@pytest.mark.slow
async def test_full_cache_deletes_the_oldest_and_refuses_what_cannot_fit(worker, tmp_path):
    size = sum(path.stat().st_size for path in make_adapter(tmp_path / "size", "x").iterdir())
    small = ("--max-disk-bytes", str(int(size * 2.5)), "--cache-grace-s", "1", "--lora-roots", str(tmp_path))
    sources = {name: str(make_adapter(tmp_path / "more", name)) for name in ("a/v1", "b/v1", "c/v1", "a-twin/v1")}
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        twin = tmp_path / "more/a-twin/v1" / name
        twin.write_bytes((tmp_path / "more/a/v1" / name).read_bytes())
    async with worker.together(*small) as client:
        first = (await post(client, "load_lora", lora_id="a/v1", source=sources["a/v1"])).json()
        twin = (await post(client, "load_lora", lora_id="a-twin/v1", source=sources["a-twin/v1"])).json()
        assert twin["path"] == first["path"]  # one adapter under two lora_ids
        second = (await post(client, "load_lora", lora_id="b/v1", source=sources["b/v1"])).json()
        refused = await post(client, "inspect_lora", lora_id="c/v1", source=sources["c/v1"])
        assert (refused.status_code, code(refused)) == (507, "disk_full")
        assert str(int(size * 2.5)) in refused.json()["error"]["message"]
        assert cached_digests(worker.cache_dir) == {first["digest"], second["digest"]}
        await post(client, "unload_lora", lora_id="b/v1")
        async with within(10):  # the grace
            while not (third := await post(client, "inspect_lora", lora_id="c/v1", source=sources["c/v1"])).is_success:
                assert code(third) == "disk_full"
                await asyncio.sleep(0.1)
        assert cached_digests(worker.cache_dir) == {first["digest"], third.json()["digest"]}
        assert code(await client.get("/v1/metadata/loras/b/v1")) == "adapter_unknown"
        assert await loaded(client) == {"a/v1", "a-twin/v1"}


@pytest.mark.fleet
async def test_three_agents_share_one_cache_folder_without_conflicts(agent_model, agent_adapters, tmp_path):
    shared = ("--cache-dir", str(tmp_path / "shared"), "--cache-grace-s", "1")
    size = sum(path.stat().st_size for path in (agent_adapters / "legal/v2").iterdir())
    limits = ((), (), ("--max-disk-bytes", str(int(size * 1.5))))
    workers = [
        RunningWorker(agent_model, agent_adapters, tmp_path / name, *SIM, *shared, *limit)
        for name, limit in zip("abc", limits, strict=True)
    ]
    async with contextlib.AsyncExitStack() as stack:
        for each in workers:
            each.folder.mkdir()
        one, two, tight = await asyncio.gather(
            *(stack.enter_async_context(each.running() if each is workers[1] else each.inside()) for each in workers)
        )
        # All fetch the same adapter at once: one folder, three leases, despite the same instance_id.
        answers = await asyncio.gather(*(post(each, "load_lora", lora_id="legal/v2") for each in (one, two, tight)))
        [path] = {answer.json()["path"] for answer in answers}
        legal = Path(path)
        users = legal / ".users"
        assert len(list(users.iterdir())) == 3
        assert not list((tmp_path / "shared").glob(".partial-*"))
        await post(tight, "unload_lora", lora_id="legal/v2")
        await until(lambda: len(list(users.iterdir())) == 2)
        refused = await post(tight, "load_lora", lora_id="sql-expert/v1")
        assert code(refused) == "disk_full"  # full of adapters that the others use
        workers[1].process.kill()
        await post(one, "unload_lora", lora_id="legal/v2")
        await until(lambda: len(list(users.iterdir())) == 1)
        assert code(await post(tight, "load_lora", lora_id="sql-expert/v1")) == "disk_full"
        [killed] = users.iterdir()
        set_age(killed, 1000)  # the lease of a silent agent expires
        set_age(users, 1000)
        assert (await post(tight, "load_lora", lora_id="sql-expert/v1")).status_code == 200
        assert not legal.exists()  # noqa: ASYNC240


SMALL_DISK = """
import asyncio, sys
from pathlib import Path
from workers.storage.cache import AdapterCache
from workers.core.errors import EngineError, SourceError
from workers.verification.manifest import AdapterRules
from workers.storage.cache_folder import CacheFolder
from workers.sources.local import LocalSource

async def main(mount, adapters):
    disk = CacheFolder(Path(mount), agent_id="a", grace_s=1.0, lease_s=10.0)
    cache = AdapterCache(disk, sources={"file": LocalSource([Path(adapters)], max_bytes=1 << 30)},
                  rules=AdapterRules(64, frozenset(), "off"), fetch_deadline_s=10)
    for number in range(100):
        try:
            async with cache.fetch(f"{adapters}/a{number}") as folder:
                await cache.install(folder, (await cache.verify(folder)).digest)
        except SourceError as exc:
            print(exc.code, number, len(list(Path(mount).glob(".partial-*"))), exc)
            return

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
def test_really_full_disk_is_an_error_and_leaves_no_half_adapter(tmp_path):
    adapters = tmp_path / "adapters"
    size = 0
    for number in range(8):
        folder = make_adapter(adapters, f"a{number}")
        size = sum(path.stat().st_size for path in folder.iterdir())
    output = on_small_disk(tmp_path, f"size={size * 3}", SMALL_DISK, str(adapters))
    message = output.split(maxsplit=3)
    assert message[:3] == ["disk_full", "2", "0"], output
    assert " bytes are free" in message[3]


def on_small_disk(tmp_path: Path, options: str, script: str, *words: str) -> str:
    """The output of a Python script on a file system of its own, whose folder is its first argument."""
    mount = tmp_path / "small"
    mount.mkdir()
    shell = f'mount -t tmpfs -o {options} tmpfs {mount} || exit 77; exec "$@"'
    command = ["unshare", "-Urm", "sh", "-c", shell, "sh", sys.executable, "-c", script, str(mount), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience(60))
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode in {1, 77} and not done.stdout and "Traceback" not in done.stderr:
        pytest.skip(f"no file system of one's own here: {done.stderr.strip()}")
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


FILLED_DISK = """
import os, sys
from pathlib import Path
from workers.storage.cache_folder import CacheFolder

disk = CacheFolder(Path(sys.argv[1]), agent_id="a", max_bytes=1, grace_s=1.0, lease_s=10.0)
digest = "d" * 64
disk.path(digest).mkdir()
(disk.path(digest) / "adapter_model.safetensors").write_bytes(bytes(4096))
assert disk.claim(digest)
for path in (disk.path(digest) / ".users", disk.path(digest) / ".users/a"):
    os.utime(path, (1, 1))
try:
    for number in range(1000):
        (Path(sys.argv[1]) / f".others-{number}").touch()
except OSError:
    print(disk.make_room(0, frozenset()) == ([digest], 0), disk.path(digest).exists())
"""


@pytest.mark.slow
def test_adapters_are_deleted_on_a_disk_that_takes_no_new_file(tmp_path):
    assert on_small_disk(tmp_path, "nr_inodes=50", FILLED_DISK).split()[-2:] == ["True", "False"]


def test_a_kept_adapter_is_never_deleted_for_room_and_a_released_one_is(tmp_path):
    mine = disk(tmp_path, max_bytes=100)
    install(mine, named("kept"))
    assert mine.keep(named("kept"))
    set_age(mine.path(named("kept")), 1000.0)
    assert mine.make_room(100, NOBODY) == ([], 100)
    assert mine.delete_half_of_idle(NOBODY) == []
    mine.release(named("kept"), is_dropped=False)
    set_age(mine.path(named("kept")), 1000.0)
    assert mine.make_room(100, NOBODY)[0] == [named("kept")]
    assert not mine.keep(named("kept")), "it is gone"


def test_an_adapter_dropped_while_it_is_loaded_goes_with_its_copy_and_one_loaded_again_stays(tmp_path):
    mine = disk(tmp_path, grace_s=0.0)
    for name in (named("going"), named("back")):
        install(mine, name)
        mine.release(name, is_dropped=True)
    assert mine.renew_leases([named("going"), named("back")]) == []  # a sweep, while both copies still drain
    assert mine.claim(named("back"))
    assert mine.delete_dropped(frozenset({named("going")})) == []
    assert mine.delete_dropped(NOBODY) == [named("going")]
    assert mine.path(named("back")).is_dir()
