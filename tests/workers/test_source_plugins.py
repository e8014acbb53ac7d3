"""Downloader plugins and entry-point sources, through the whole agent."""

import shutil
import time
from pathlib import Path

import pytest

from lorafleet.service.settings import SettingsError
from tests.workers.plugins import AsyncCopyingManager, CopyingManager
from tests.workers.running import code, loaded, post, sse
from tests.workers.source_servers import SECRET, SourceServer, StubHub
from workers.core.errors import SourceError
from workers.sources.base import Limits, Transfer
from workers.sources.plugins import PluginSource, create_manager, entry_point_sources, event_forwarder
from workers.wire import AgentEvent

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}


@pytest.fixture(params=[CopyingManager, AsyncCopyingManager])
def manager(request, tmp_path, monkeypatch):
    for name, data in FILES.items():
        (tmp_path / "downloads/sql/v1").mkdir(parents=True, exist_ok=True)
        (tmp_path / "downloads/sql/v1" / name).write_bytes(data)
    monkeypatch.setattr(request.param, "root", tmp_path / "downloads")
    (tmp_path / "into").mkdir()
    return request.param()


async def test_plugins_download_is_copied_and_then_deleted_by_the_plugin(manager, tmp_path):
    await PluginSource(manager, Limits(max_bytes=1 << 20)).fetch("plugin://sql/v1", tmp_path / "into", Transfer())
    assert {path.name: path.read_bytes() for path in (tmp_path / "into").iterdir()} == FILES
    assert manager.downloads == {}


async def test_plugins_failure_is_reported_by_class_and_its_folder_deleted(manager, tmp_path):
    source = PluginSource(manager, Limits(max_bytes=1 << 20))
    for name, expected in {"nosuch": "source_not_found", "secret": "source_failed"}.items():
        with pytest.raises(SourceError) as caught:
            await source.fetch(f"plugin://{name}", tmp_path / "into", Transfer())
        assert (caught.value.code, SECRET in str(caught.value)) == (expected, False)
    assert manager.downloads == {}


def test_plugin_receives_known_events_and_its_errors_are_logged():
    manager = CopyingManager()
    listen = event_forwarder(manager)
    for number, kind in enumerate(("LOADED_TO_DEVICE", "ENGINE_UP", "DOWNLOADING"), 1):
        listen(AgentEvent(id=number, type=kind, at="now", lora_id="sql/v1", digest="d", done_bytes=number))
    events = [(event.type, event.name, event.digest, event.done_bytes) for event in manager.events]
    assert events == [("LOADED_TO_DEVICE", "sql/v1", "d", 1), ("DOWNLOADING", "sql/v1", "d", 3)]


@pytest.mark.parametrize(
    "path", ["nosuch.module.Class", "Class", "tests.workers.plugins.NotAManager", "tests.workers.plugins.No"]
)
def test_unusable_plugin_stops_the_start_by_name(path):
    with pytest.raises(SettingsError, match=path):
        create_manager(path)


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
        monkeypatch.setenv("LORAFLEET_WORKERS_LORA_DOWNLOADER_PLUGIN", "tests.workers.plugins.CopyingManager")
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
            assert f"hf://acme/legal@{commit}" in {item["source"] for item in available}
            # The branch moves and the files are lost: the pinned commit is fetched again.
            hub.push("acme/legal", "main", {"adapter_config.json": b"{}"})
            path = answer.json()["path"]
            missing = await post(client, "load_lora", lora_id="nosuch/v1")
            assert code(missing) == "source_not_found"
        shutil.rmtree(path, ignore_errors=True)
        async with worker.running() as client:
            assert await loaded(client) == {"legal/hub"}
    assert SECRET not in (worker.folder / "agent.log").read_text()
