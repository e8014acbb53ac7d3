"""Downloader plugins and entry-point sources, through the whole agent."""

import asyncio
import importlib
import json
import re
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lorafleet.service.settings import SettingsError
from tests.workers.plugins import AsyncCopyingDownloader, CopyingDownloader, JournalingDownloader
from tests.workers.running import code, loaded, post, sse
from tests.workers.source_servers import SECRET, SourceServer, StubHub
from workers.core.errors import AgentRequestError, SourceError
from workers.plugin import (
    CacheLocation,
    HuggingFaceDownloader,
    LoraDownloaderBase,
    LoraModel,
    LoraStatus,
)
from workers.sources.base import Limits, Transfer
from workers.sources.hub import HubSource
from workers.sources.plugins import (
    DEFAULT_DOWNLOADER,
    PluginSource,
    create_downloader,
    entry_point_sources,
    event_forwarder,
)
from workers.wire import AgentEvent

ROOT = Path(__file__).parents[3]
HUB = HubSource(Limits(max_bytes=1 << 20))
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}


@pytest.fixture
def downloads(tmp_path):
    for name, data in FILES.items():
        (tmp_path / "downloads/sql/v1").mkdir(parents=True, exist_ok=True)
        (tmp_path / "downloads/sql/v1" / name).write_bytes(data)
    (tmp_path / "into").mkdir()
    return tmp_path / "downloads"


@pytest.fixture(params=[CopyingDownloader, AsyncCopyingDownloader])
def downloader(request, downloads, monkeypatch):
    monkeypatch.setattr(request.param, "root", downloads)
    return request.param()


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def fetch_wholly(source, ref, into):
    """A fetch and the end of its transfer."""
    transfer = Transfer()
    await source.fetch(ref, into, transfer)
    await transfer.finish()


async def test_plugins_download_is_copied_and_then_deleted_by_the_plugin(downloader, tmp_path):
    transfer = Transfer()
    await PluginSource(downloader, Limits(max_bytes=1 << 20)).fetch("plugin://sql/v1", tmp_path / "into", transfer)
    assert files_in(tmp_path / "into") == FILES
    assert (list(downloader.downloads), transfer.pinned) == (["sql/v1"], "plugin://sql/v1")
    await transfer.finish()  # as the agent does when it has verified the copy
    assert downloader.downloads == {}


async def test_plugins_failure_is_reported_by_class_and_its_folder_deleted(downloader, tmp_path):
    source = PluginSource(downloader, Limits(max_bytes=1 << 20))
    for name, expected in {"nosuch": "source_not_found", "secret": "source_failed"}.items():
        with pytest.raises(SourceError) as caught:
            await source.fetch(f"plugin://{name}", tmp_path / "into", Transfer())
        assert (caught.value.code, SECRET in str(caught.value)) == (expected, False)
    assert downloader.downloads == {}


async def test_one_name_is_fetched_once_at_a_time(downloader, tmp_path):
    source = PluginSource(downloader, Limits(max_bytes=1 << 20))
    folders = [tmp_path / f"into/{number}" for number in range(3)]
    for folder in folders:
        folder.mkdir()
    await asyncio.gather(*(fetch_wholly(source, "plugin://sql/v1", folder) for folder in folders))
    assert [files_in(folder) for folder in folders] == [FILES] * 3


async def test_download_without_a_folder_is_refused_by_what_it_lacks(tmp_path):
    class Forgetful(LoraDownloaderBase):
        def download_lora_to_disk(self, name):
            return {"model": LoraModel(name), "number": LoraModel(name, local_path=7)}.get(name)

        def delete_lora_from_disk(self, name):
            return None

    source = PluginSource(Forgetful(), Limits(max_bytes=1 << 20))
    lacks = {"model": "without a local_path", "number": "whose local_path is 7", "none": "NoneType"}
    for name, found in lacks.items():
        with pytest.raises(SourceError, match=found):
            await source.fetch(f"plugin://{name}", tmp_path, Transfer())


def test_plugin_receives_known_events_and_its_errors_are_logged():
    downloader = CopyingDownloader()
    listen = event_forwarder(downloader, lambda digest: Path("/cache") / digest)
    at = "2026-10-17T12:00:00.000Z"
    for number, kind in enumerate(("LOADED_TO_DEVICE", "ENGINE_UP", "DOWNLOADING"), 1):
        digest = "d" if kind == "LOADED_TO_DEVICE" else None
        listen(AgentEvent(id=number, type=kind, at=at, lora_id="sql/v1", digest=digest, done_bytes=7, instance_id="w0"))
    loaded_event, progress = downloader.events
    assert loaded_event.lora_model == LoraModel(
        name="sql/v1",
        status=LoraStatus.READY_FOR_USE,
        cache_location=CacheLocation.DEVICE,
        local_path="/cache/d",
        digest="d",
    )
    assert (progress.event_type.name, progress.lora_model.local_path, progress.done_bytes) == ("DOWNLOADING", "", 7)
    assert {event.instance_id for event in downloader.events} == {"w0"}
    assert {event.timestamp for event in downloader.events} == {datetime(2026, 10, 17, 12, tzinfo=UTC)}


async def test_default_downloader_fetches_a_hub_repository_at_its_commit(tmp_path, monkeypatch):
    hub = StubHub()
    commit = hub.push("acme/legal", "main", FILES)
    async with SourceServer(hub.respond).serving() as site:
        hub.url = site.url.replace("127.0.0.1", "localhost")
        folder = tmp_path / "downloads"
        folder.mkdir()
        source = HubSource(Limits(max_bytes=1 << 20), endpoint=site.url)
        downloader = create_downloader(DEFAULT_DOWNLOADER, hub=source, folder=folder)
        assert isinstance(downloader, HuggingFaceDownloader)
        model = await downloader.download_lora_to_disk("acme/legal")
        assert (files_in(Path(model.local_path)), model.pinned) == (FILES, f"acme/legal@{commit}")
        gone = await downloader.delete_lora_from_disk("acme/legal")
        assert (gone.cache_location, list(folder.iterdir())) == (CacheLocation.REMOTE, [])
        with pytest.raises(FileNotFoundError):
            await downloader.download_lora_to_disk("legal")
        # The branch moves; the pinned name has the old bytes.
        plugin, transfer = PluginSource(downloader, Limits(max_bytes=1 << 20)), Transfer()
        (tmp_path / "first").mkdir()
        await plugin.fetch("plugin://acme/legal", tmp_path / "first", transfer)
        await transfer.finish()
        assert transfer.pinned == f"plugin://{model.pinned}"
        hub.push("acme/legal", "main", {"adapter_config.json": b"{}"})
        (tmp_path / "into").mkdir()
        await plugin.fetch(transfer.pinned, tmp_path / "into", Transfer())
        assert files_in(tmp_path / "into") == FILES


async def test_worker_with_a_lora_path_asks_no_hub_for_a_name_that_it_lacks(worker):
    async with worker.together() as client:
        assert code(await post(client, "load_lora", lora_id="acme/legal")) == "adapter_unknown"


async def test_plugin_hears_of_its_download_when_it_is_verified_or_refused(
    worker, agent_adapters, tmp_path, monkeypatch
):
    registry = tmp_path / "registry"
    shutil.copytree(agent_adapters / "legal/v2", registry / "good")
    shutil.copytree(agent_adapters / "legal/v2", registry / "bad")
    (registry / "bad/adapter_model.safetensors").write_bytes(b"no weights")
    journal = []
    monkeypatch.setattr(JournalingDownloader, "root", registry)
    monkeypatch.setattr(JournalingDownloader, "journal", journal)
    monkeypatch.setattr(JournalingDownloader, "cache", worker.cache_dir)
    flags = ("--lora-downloader-plugin", "tests.workers.plugins.JournalingDownloader")
    async with worker.together(*flags) as client:
        bad = await post(client, "load_lora", lora_id="ours/bad", source="plugin://bad")
        good = await post(client, "load_lora", lora_id="ours/good", source="plugin://good")
    assert (code(bad), good.status_code) == ("weights_corrupt", 200)
    digest = good.json()["digest"]
    assert [entry for entry in journal if entry[0] != "DOWNLOADING"][:5] == [
        ("deleted", "bad", []),
        ("LOAD_FAILED", "ours/bad", []),
        ("deleted", "good", [digest]),  # installed already, so verified
        ("DOWNLOADED_TO_DISK", "ours/good", [digest]),
        ("LOADED_TO_DEVICE", "ours/good", [digest]),
    ]


@pytest.mark.fleet
async def test_worker_without_a_lora_path_loads_a_name_from_the_hub(worker, agent_adapters, monkeypatch):
    hub = StubHub()
    commit = hub.push("acme/legal", "main", files_in(agent_adapters / "legal/v2"))
    place = worker.flags.index("--lora-path")
    worker.flags = (*worker.flags[:place], *worker.flags[place + 2 :])
    async with SourceServer(hub.respond).serving() as site:
        hub.url = site.url.replace("127.0.0.1", "localhost")
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        async with worker.running() as client:
            answer = await post(client, "load_lora", lora_id="acme/legal")
            assert answer.status_code == 200, answer.text
            available = (await client.get("/metadata")).json()["lora"]["available_loras"]
            assert [item["pinned_source"] for item in available] == [f"plugin://acme/legal@{commit}"]
            assert code(await post(client, "load_lora", lora_id="legal")) == "source_not_found"


def example_plugin():
    """The example of the operations guide."""
    page = (ROOT / "docs/operations.md").read_text()
    return next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "LoraDownloaderBase" in block)


async def test_the_guides_example_plugin_loads_manages_and_journals_adapters(
    worker, agent_adapters, tmp_path, monkeypatch
):
    (tmp_path / "acme_loras.py").write_text(example_plugin())
    monkeypatch.syspath_prepend(tmp_path)
    acme = importlib.import_module("acme_loras")
    made = []

    def remember(self):
        made.append(self)

    monkeypatch.setattr(acme.Registry, "registry", agent_adapters)
    monkeypatch.setattr(acme.Registry, "journal", tmp_path / "journal.jsonl")
    monkeypatch.setattr(acme.Registry, "__init__", remember)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    flags = ("--lora-downloader-plugin", "acme_loras.Registry", "--instance-id", "w7")
    async with worker.together(*flags) as client:
        answer = await post(client, "load_lora", lora_id="ours/legal", source="plugin://legal/v2")
        assert answer.status_code == 200, answer.text
        manager = made[0].manager
        loaded_model = await manager.load_lora("sql-expert/v1")
        assert loaded_model.status is LoraStatus.READY_FOR_USE
        assert loaded_model.local_path == str(worker.cache_dir / loaded_model.digest)
        states = {model.name: model.status for model in manager.lora_models()}
        assert (states["ours/legal"], states["sql-expert/v1"]) == (LoraStatus.READY_FOR_USE, LoraStatus.READY_FOR_USE)
        unloaded_model = await manager.unload_lora("sql-expert/v1")
        assert (unloaded_model.status, unloaded_model.cache_location) == (LoraStatus.DOWNLOADED, CacheLocation.DISK)
        assert await loaded(client) == {"ours/legal"}
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    events = [(line["event"], line["lora"], line["instance_id"]) for line in lines if line["event"] != "DOWNLOADING"]
    assert events == [
        ("DOWNLOADED_TO_DISK", "ours/legal", "w7"),
        ("LOADED_TO_DEVICE", "ours/legal", "w7"),
        ("DOWNLOADED_TO_DISK", "sql-expert/v1", "w7"),
        ("LOADED_TO_DEVICE", "sql-expert/v1", "w7"),
        ("UNLOADED_FROM_DEVICE", "sql-expert/v1", "w7"),
    ]
    assert all(datetime.fromisoformat(line["timestamp"]).tzinfo for line in lines)
    assert list((tmp_path / "tmp").rglob("*.safetensors")) == []


async def test_plugin_may_load_but_not_unload_where_an_orchestrator_decides(worker, agent_adapters, monkeypatch):
    made = []

    def remember(self, manager):
        made.append(manager)

    monkeypatch.setattr(CopyingDownloader, "root", agent_adapters)
    monkeypatch.setattr(CopyingDownloader, "on_start", remember)
    plugin = ("--lora-downloader-plugin", "tests.workers.plugins.CopyingDownloader")
    async with worker.together(*plugin, "--orchestrator-url", "http://127.0.0.1:1", "--warm-deadline-s", "0"):
        assert (await made[0].load_lora("legal/v2")).status is LoraStatus.READY_FOR_USE
        with pytest.raises(AgentRequestError) as caught:
            await made[0].unload_lora("legal/v2")
        assert caught.value.code == "epoch_required"


@pytest.mark.parametrize(
    "path", ["nosuch.module.Class", "Class", "tests.workers.plugins.NotADownloader", "tests.workers.plugins.No"]
)
def test_unusable_plugin_stops_the_start_by_name(path):
    with pytest.raises(SettingsError, match=path):
        create_downloader(path, hub=HUB, folder=Path())


def test_plugin_in_a_folder_with_a_dash_is_imported_by_its_path(tmp_path, monkeypatch):
    source = "from tests.workers.plugins import CopyingDownloader as Dashed"
    (tmp_path / "my-org/loras").mkdir(parents=True)
    (tmp_path / "my-org/loras/dashed.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(create_downloader("my-org.loras.dashed.Dashed", hub=HUB, folder=Path()), CopyingDownloader)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("no-org.lora.Custom", "give the name by which Python imports the package, such as no_org.lora.Custom"),
        ("elsewhere.downloader.HuggingFaceDownloader", "give workers.plugin.HuggingFaceDownloader"),
        ("nosuch.module.Class", "expected package.module.Class"),
    ],
)
def test_plugin_that_cannot_be_imported_is_refused_with_what_to_give(path, advice):
    with pytest.raises(SettingsError, match=advice):
        create_downloader(path, hub=HUB, folder=Path())


def test_packages_entry_point_is_a_source_for_its_scheme(tmp_path, monkeypatch):
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lorafleet.sources]\nacme = acme_source:make\n")
    (tmp_path / "acme_source.py").write_text("def make(limits):\n    return ('acme', limits.max_bytes)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert entry_point_sources(Limits(max_bytes=7), frozenset({"s3"})) == {"acme": ("acme", 7)}
    with pytest.raises(SettingsError, match="taken"):
        entry_point_sources(Limits(max_bytes=7), frozenset({"acme"}))


@pytest.mark.fleet
async def test_agent_loads_from_a_hub_and_reports_the_commit(worker, agent_adapters, monkeypatch):
    hub = StubHub()
    folder = agent_adapters / "legal/v2"
    commit = hub.push("acme/legal", "main", {path.name: path.read_bytes() for path in folder.iterdir()})

    def slowly(ask):
        if ask.path.startswith("/signed") and "model" in ask.path:
            time.sleep(1.1)
        return hub.respond(ask)

    async with SourceServer(slowly).serving() as site:
        hub.url = site.url.replace("127.0.0.1", "localhost")
        monkeypatch.setenv("HF_ENDPOINT", site.url)
        monkeypatch.setenv("HF_TOKEN", SECRET)
        monkeypatch.setenv("LORAFLEET_WORKERS_LORA_DOWNLOADER_PLUGIN", "tests.workers.plugins.CopyingDownloader")
        monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
        async with worker.running() as client, client.stream("GET", "/v1/events") as stream:
            lines = stream.aiter_lines()
            answer = await post(client, "load_lora", lora_id="legal/hub", source="hf://acme/legal")
            assert answer.status_code == 200, answer.text
            seen = {}
            while "LOADED_TO_DEVICE" not in seen:
                _, event = await sse(lines)
                seen[event["type"]] = event
            assert seen["DOWNLOADING"]["total_bytes"] >= seen["DOWNLOADING"]["done_bytes"] > 0
            assert seen["DOWNLOADED_TO_DISK"]["source"] == f"hf://acme/legal@{commit}"
            available = (await client.get("/metadata")).json()["lora"]["available_loras"]
            assert f"hf://acme/legal@{commit}" in {item.get("pinned_source") for item in available}
            # The branch moves and the files are lost: the pinned commit is fetched again.
            hub.push("acme/legal", "main", {"adapter_config.json": b"{}"})
            path = answer.json()["path"]
            missing = await post(client, "load_lora", lora_id="nosuch/v1")
            assert code(missing) == "source_not_found"
        shutil.rmtree(path, ignore_errors=True)
        async with worker.running() as client:
            assert await loaded(client) == {"legal/hub"}
    assert SECRET not in (worker.folder / "agent.log").read_text()
