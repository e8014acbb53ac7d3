"""Adapters with pickled weights: refused, or converted in a separate process if `allow_pickle` is set."""

import asyncio
import os
import pickle
import resource
import signal
from pathlib import Path

import pytest

from lorafleet.local.tiny_model import make_adapter
from tests.patience import until
from workers.core.errors import SourceError
from workers.sources.local import LocalSource
from workers.storage.cache import AdapterCache
from workers.storage.cache_folder import CacheFolder
from workers.storage.pickled import convert_pickles
from workers.verification.manifest import AdapterRules
from workers.verification.verify import read_manifest

pytestmark = pytest.mark.fleet  # each conversion is a process that takes seconds to start

BIN, PROPER = "adapter_model.bin", "adapter_model.safetensors"


def cache(tmp_path, *, allow_pickle: bool) -> AdapterCache:
    source = LocalSource([tmp_path], max_bytes=1 << 30, allow_pickle=allow_pickle)
    rules = AdapterRules(64, frozenset(), "off", allow_pickle=allow_pickle)
    disk = CacheFolder(tmp_path / "cache", agent_id="a", grace_s=10, lease_s=10)
    return AdapterCache(disk, sources={"file": source}, rules=rules, fetch_deadline_s=60)


async def refusal(cache: AdapterCache, folder) -> SourceError:
    with pytest.raises(SourceError) as refused:
        async with cache.fetch(str(folder)) as fetched:
            await cache.verify(fetched)
    assert not list(cache.folder.folder.glob(".partial-*"))
    return refused.value


async def test_pickled_weights_become_safetensors_with_the_same_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    folder = make_adapter(tmp_path, "a/v1")
    tensors = load_file(folder / PROPER)
    (folder / PROPER).unlink()
    torch.save(tensors, folder / BIN)
    it = cache(tmp_path, allow_pickle=True)
    async with it.fetch(str(folder)) as fetched:
        assert sorted(path.name for path in fetched.iterdir()) == ["adapter_config.json", PROPER]
        installed = await it.install(fetched, (await it.verify(fetched)).digest)
    found = load_file(installed / PROPER)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert read_manifest(installed, it.rules).digest == installed.name


async def test_pointers_and_web_pages_under_a_pickles_name_are_refused_by_what_they_are(tmp_path):
    for content, words in ((b"version https://git-lfs.github.com/spec/v1", "Git LFS"), (b"<html>", "web page")):
        (tmp_path / BIN).write_bytes(content)
        with pytest.raises(SourceError, match=words) as refused:
            await convert_pickles(tmp_path)
        assert refused.value.code == "weights_corrupt"


@pytest.mark.parametrize("is_old", [False, True])
async def test_tensors_that_share_memory_and_torchs_old_format_are_converted(tmp_path, is_old):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    folder = make_adapter(tmp_path, "a/v1")
    tensors = load_file(folder / PROPER)
    (folder / PROPER).unlink()
    first, *_ = tensors
    whole = torch.cat([tensors[first], tensors[first]])
    tensors[first] = whole[: len(whole) // 2].t().contiguous().t()  # neither contiguous nor alone in its memory
    shared = {name: tensors[first] if tensor.equal(tensors[first]) else tensor for name, tensor in tensors.items()}
    torch.save(shared | {first: tensors[first]}, folder / BIN, _use_new_zipfile_serialization=not is_old)
    async with cache(tmp_path, allow_pickle=True).fetch(str(folder)) as fetched:
        found = load_file(fetched / PROPER)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


async def test_pickle_with_a_call_is_refused_without_the_call(tmp_path):
    pytest.importorskip("torch")
    folder = make_adapter(tmp_path, "a/v1")
    (folder / PROPER).unlink()
    (folder / BIN).write_bytes(pickle.dumps(PickledCall(str(tmp_path / "called"))))
    refused = await refusal(cache(tmp_path, allow_pickle=True), folder)
    assert (refused.code, "weights_only" in str(refused)) == ("adapter_pickled", True)
    assert not (tmp_path / "called").exists()


class PickledCall:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self):
        import os

        return os.mkdir, (self.folder,)


async def test_conversion_killed_by_disk_or_memory_does_not_blame_the_adapter(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.zeros(1000)}, tmp_path / BIN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            await convert_pickles(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    converting = asyncio.create_task(convert_pickles(tmp_path))
    await until(children)
    for child in children():
        os.kill(child, signal.SIGKILL)
    with pytest.raises(SourceError, match="signal 9") as refused:
        await converting
    assert refused.value.code == "source_failed"
    assert (tmp_path / BIN).exists()


def children() -> list[int]:
    """This process's children that convert pickles."""
    found = [each for path in Path("/proc/self/task").glob("*/children") for each in path.read_text().split()]
    return [int(each) for each in found if b"unpickle.py" in Path(f"/proc/{each}/cmdline").read_bytes()]


@pytest.mark.parametrize("allow_pickle", [True, False])
async def test_pickle_is_fetched_only_if_allowed_and_without_safetensors(tmp_path, allow_pickle):
    if allow_pickle:
        pytest.importorskip("torch")  # the reader of the remaining one
    folder = make_adapter(tmp_path, "a/v1")
    (folder / BIN).write_bytes(b"anything")
    it = cache(tmp_path, allow_pickle=allow_pickle)
    async with it.fetch(str(folder)) as fetched:
        assert not (fetched / BIN).exists()
    (folder / PROPER).unlink()
    refused = await refusal(it, folder)
    assert (refused.code, "allow_pickle" in str(refused)) == ("adapter_pickled", not allow_pickle)
