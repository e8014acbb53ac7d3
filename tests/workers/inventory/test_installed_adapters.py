"""The agent's installed adapters and request counts, and the size of heartbeats."""

import asyncio
import json
import shutil
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.patience import until, within
from tests.serving import client_of
from tests.workers.running import RunningWorker, post
from workers.inventory.adapter_usage import AdapterUsage
from workers.inventory.installed_adapters import InstalledAdapters, file_name
from workers.wire import AvailableLoras, Metadata, WorkerAdapter


def record(number: int) -> WorkerAdapter:
    name = f"tenant-{number % 7}/adapter-{number:04}"
    digest = f"{number:064x}"
    return WorkerAdapter(
        lora_id=name,
        digest=digest,
        engine_name=f"{name}@{digest[:12]}",
        path=f"/var/cache/lorafleet/{digest}",
        source=f"s3://bucket/{name}",
        base_model="base",
        rank=16,
        size_bytes=1000,
        order=number,
    )


USES = {"tenant-1/adapter-0001": 5}


def test_state_files_that_were_deleted_are_written_again(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    records = InstalledAdapters(state)
    usage = AdapterUsage(state / "usage.json", records, now=lambda: "now")
    for number in range(3):
        records.store(record(number))
    records.raise_epoch(7)
    usage.count_uses(USES)
    usage.save()
    shutil.rmtree(state)
    state.mkdir()
    records.retry_writes()
    usage.save()
    again = InstalledAdapters(state)
    AdapterUsage(state / "usage.json", again, now=lambda: "now")
    assert {each.engine_name for each in again.all()} == {record(number).engine_name for number in range(3)}
    assert again.epoch == 7, "else a leader that was replaced would be obeyed"
    assert [each.request_count for each in again.all()] == [0, 5, 0]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_record_has_a_file_named_after_each_adapter_that_the_engine_should_have(tmp_path):
    records = InstalledAdapters(tmp_path / "state", tmp_path / "record")
    there = records.store(replace(record(1), is_wanted=True))
    records.store(record(2))
    mine = WorkerAdapter(lora_id="mine", digest="", engine_name="mine", path="/srv/mine", is_wanted=True)
    records.store_foreign(mine)
    records.store_foreign(replace(mine, engine_name="engines-own", is_wanted=False))
    assert names_in(tmp_path / "record") == ["mine.json", "tenant-1%2Fadapter-0001@000000000000.json"]
    saved = json.loads((tmp_path / "record/mine.json").read_text())
    assert (saved["lora_name"], saved["lora_path"]) == ("mine", "/srv/mine"), "the body of vLLM's own load"
    again = InstalledAdapters(tmp_path / "state", tmp_path / "record")
    assert {each.engine_name: each.is_wanted for each in again.all()} == {
        there.engine_name: True, record(2).engine_name: False,
    }  # fmt: skip
    assert list(again.foreign) == ["mine"]
    again.store(replace(there, is_wanted=False))
    again.forget_foreign("mine")
    assert names_in(tmp_path / "record") == []
    assert len(names_in(tmp_path / "state/on_disk")) == 2
    again.remove(there)
    assert len(InstalledAdapters(tmp_path / "state", tmp_path / "record").all()) == 1


def test_an_agent_killed_between_two_files_of_an_adapter_counts_the_records(tmp_path):
    records = InstalledAdapters(tmp_path)
    loaded = records.store(replace(record(1), is_wanted=True))
    (tmp_path / "on_disk" / file_name(loaded.engine_name)).write_bytes(
        (tmp_path / "adapters" / file_name(loaded.engine_name)).read_bytes()
    )
    again = InstalledAdapters(tmp_path)
    assert [each.is_wanted for each in again.all()] == [True]
    again.store(loaded)
    assert names_in(tmp_path / "on_disk") == []


def test_a_file_with_the_body_of_vllms_own_load_alone_is_read(tmp_path):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters/mine.json").write_text('{"lora_name": "mine", "lora_path": "/srv/mine"}')
    for number, text in enumerate(("[", "[]", "{}", '{"lora_name": 3, "lora_path": "x"}')):
        (tmp_path / f"adapters/damaged-{number}.json").write_text(text)
    (found,) = InstalledAdapters(tmp_path).foreign.values()
    assert (found.engine_name, found.path, found.digest, found.is_wanted) == ("mine", "/srv/mine", "", True)


def test_a_file_that_could_not_be_deleted_is_deleted_later(tmp_path):
    records = InstalledAdapters(tmp_path)
    loaded = records.store(replace(record(1), is_wanted=True))
    path = tmp_path / "adapters" / file_name(loaded.engine_name)
    path.unlink()
    path.mkdir()  # as a disk that fails: a folder cannot be unlinked
    records.store(record(1))
    path.rmdir()
    path.write_text("back")
    records.retry_writes()
    assert (names_in(tmp_path / "adapters"), len(names_in(tmp_path / "on_disk"))) == ([], 1)


@given(st.text(min_size=1, max_size=400), st.text(min_size=1, max_size=400))
def test_every_name_has_one_file_in_the_folder(first, second):
    name = file_name(first)
    assert "/" not in name
    assert name not in {".", ".."}
    assert len(name.encode()) <= 255 - len(".partial")
    assert (name == file_name(second)) == (first == second)
    assert file_name("../../etc/passwd") == "..%2F..%2Fetc%2Fpasswd.json"


def test_nothing_is_written_where_the_volume_of_the_state_folder_went_away(tmp_path):
    state = tmp_path / "volume" / "state"
    state.mkdir(parents=True)
    records = InstalledAdapters(state)
    records.store(record(1))
    records.raise_epoch(7)
    (tmp_path / "volume").rename(tmp_path / "away")
    (tmp_path / "volume").mkdir()
    with capture_logs() as said:
        records.retry_writes()
        records.retry_writes()
    assert list((tmp_path / "volume").iterdir()) == []
    assert [line["event"] for line in said] == ["state folder lost; bring it back, or restart the agent"]
    (tmp_path / "volume").rmdir()
    (tmp_path / "away").rename(tmp_path / "volume")
    (state / "epoch.json").unlink()
    records.retry_writes()
    assert InstalledAdapters(state).epoch == 7


def test_counts_of_a_crashed_agent_are_those_that_it_saved_last(tmp_path):
    def start() -> tuple[InstalledAdapters, AdapterUsage]:
        records = InstalledAdapters(tmp_path)
        return records, AdapterUsage(tmp_path / "usage.json", records, now=lambda: "now")

    records, usage = start()
    records.store(record(1))
    assert list(usage.count_uses(USES)) == [record(1).engine_name]
    usage.save()
    usage.count_uses(USES)
    records.store(records.all()[0])  # the count 10 is in the adapter's own file, and was not saved
    records, usage = start()
    assert records.all()[0].request_count == 5
    assert list(usage.count_uses(USES | {"unknown/v1": 7})) == [record(1).engine_name]
    assert (records.all()[0].request_count, records.all()[0].last_used) == (10, "now")


def test_counts_of_deleted_adapters_are_forgotten(tmp_path):
    records = InstalledAdapters(tmp_path)
    usage = AdapterUsage(tmp_path / "usage.json", records, now=lambda: "now")
    for number in range(300):  # a trainer's versions: a router reports each for a while, then it is deleted
        version = records.store(record(number))
        assert list(usage.count_uses({version.lora_id: 7})) == [version.engine_name]
        if number < 299:
            records.remove(version)
    usage.save()
    saved = json.loads((tmp_path / "usage.json").read_text())
    assert saved == {record(299).engine_name: [7, "now"]}


def test_damaged_counts_lose_only_the_counts(tmp_path):
    (tmp_path / "usage.json").write_text("[1")
    records = InstalledAdapters(tmp_path)
    records.store(record(1))
    usage = AdapterUsage(tmp_path / "usage.json", records, now=lambda: "now")
    assert list(usage.count_uses(USES)) == [record(1).engine_name]


async def test_heartbeat_stays_small_with_thousands_of_adapters_on_disk(worker):
    records = InstalledAdapters(worker.state_dir)
    for number in range(500):
        records.store(record(number))
        (worker.cache_dir / record(number).digest).mkdir(parents=True)
    async with worker.together("--cache-grace-s", "1") as client:
        page = (await client.get("/metadata")).content
        metadata = Metadata.model_validate_json(page).lora
        assert (len(metadata.available_loras), metadata.available_count) == (100, 504)
        assert metadata.available_loras[0].lora_id == record(499).lora_id
        assert len(page) < 60_000
        ids: list[str] = []
        cursor = ""
        while cursor is not None:
            answer = await client.get("/v1/metadata/loras", params={"limit": 200, "cursor": cursor})
            listed = AvailableLoras.model_validate_json(answer.content)
            ids += [item.lora_id for item in listed.data]
            cursor = listed.next
        assert ids == sorted({*ids})
        assert len(ids) == 504
        await post(client, "load_lora", lora_id="legal/v2")
        more = Metadata.model_validate_json((await client.get("/metadata")).content).lora
        assert more.available_digest == metadata.available_digest  # it was in the folder already
        shutil.rmtree(worker.cache_dir / record(5).digest)  # like another agent
        async with within(10):
            while (await client.get(f"/v1/metadata/loras/{record(5).lora_id}")).is_success:
                await asyncio.sleep(0.1)
        less = Metadata.model_validate_json((await client.get("/metadata")).content).lora
        assert (less.available_count, less.available_digest != metadata.available_digest) == (503, True)


@pytest.mark.fleet
async def test_report_with_a_list_after_an_unload_lacks_the_adapter(worker):
    async with worker.running() as client, client_of() as direct:
        loaded = (await post(client, "load_lora", lora_id="legal/v2")).json()["engine_name"]
        metadata = Metadata.model_validate_json((await client.get("/metadata")).content)
        unload = f"{metadata.transport.engine_url}/v1/unload_lora_adapter"
        (await direct.post(unload, json={"lora_name": loaded})).raise_for_status()
        unloaded_at = time.monotonic()

        async def is_younger() -> bool:
            nonlocal metadata
            asked_at = time.monotonic()
            metadata = Metadata.model_validate_json((await client.get("/metadata")).content)
            return asked_at - metadata.lora.list_age_s > unloaded_at

        await until(is_younger)
        assert loaded not in {lora.engine_name for lora in metadata.lora.loaded_loras if lora.state == "ready"}


@pytest.mark.fleet
async def test_new_bytes_in_lora_path_are_reported_while_old_ones_are_served(agent_model, agent_adapters, tmp_path):
    shutil.copytree(agent_adapters / "legal", tmp_path / "lora_path/legal")
    worker = RunningWorker(agent_model, tmp_path / "lora_path", tmp_path, "--engine", "sim", "--max-lora-rank", "16")
    async with worker.inside() as client:
        before = (await post(client, "load_lora", lora_id="legal/v2")).json()
        assert before["error"] is None
        config = tmp_path / "lora_path/legal/v2/adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "note": "trained once more"}))
        async with within(10):
            while (item := (await client.get("/v1/metadata/loras/legal/v2")).json())["error"] is None:
                await asyncio.sleep(0.05)
        assert item["error"].startswith("digest_mismatch: ")
        assert (item["state"], item["digest"]) == ("ready", before["digest"])
        new = (await post(client, "load_lora", lora_id="legal/v2")).json()
        assert (new["digest"] != before["digest"], new["error"]) == (True, None)
