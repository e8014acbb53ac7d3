"""Adapters that another client loads into the engine are found, read, kept and unloaded on request."""

import json
import os
import shutil
import signal

import pytest

from lorafleet.local.tiny_model import make_adapter
from tests.patience import until
from tests.serving import client_of
from tests.workers.changed_adapters import adapter_of_nan
from tests.workers.running import SIM, RunningWorker, metadata_of, post
from workers.inventory.installed_adapters import file_name
from workers.wire import AdapterFiles, WorkerAdapter


async def engine_url(client) -> str:
    return (await metadata_of(client)).transport.engine_url


async def load_behind_our_back(client, name, path):
    async with client_of(await engine_url(client)) as engine:
        answer = await engine.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
        assert answer.is_success, answer.text


async def found(client, name, is_done) -> WorkerAdapter:
    """The entry of an adapter in /metadata, once it is as it should be."""
    entries = []

    async def is_there():
        metadata = await metadata_of(client)
        entries[:] = [lora for lora in metadata.lora.loaded_loras if lora.engine_name == name]
        return bool(entries) and is_done(entries[0])

    await until(is_there, what=f"{name} is reported")
    return entries[0]


async def test_an_adapter_that_a_script_loaded_is_reported_with_the_digest_of_its_files_and_kept(
    worker, agent_adapters, tmp_path
):
    folder = make_adapter(tmp_path / "scripts", "mine")
    async with worker.together() as client:
        refused = await post(client, "load_lora", lora_id="mine", source=folder.as_uri())
        assert refused.status_code == 403, "its folder is outside of what requests may name"
        await load_behind_our_back(client, "mine", folder)
        lora = await found(client, "mine", lambda lora: lora.files_digest)
        assert (lora.digest, lora.source) == ("", folder.as_uri())
        assert (lora.rank, lora.base_model, lora.error) == (8, "tiny-qwen", None)

        shutil.rmtree(folder)  # its bytes are in the cache by now
        files = AdapterFiles.model_validate((await client.get(f"/v1/files/{lora.files_digest}")).json())
        assert {file.name for file in files.files} == {"adapter_config.json", "adapter_model.safetensors"}

        answer = await post(client, "unload_lora", lora_id="mine", engine_name="mine")
        assert [lora for lora in answer.json()["loaded_loras"] if lora["state"] == "ready"] == []
        async with client_of(await engine_url(client)) as engine:
            assert [item["id"] for item in (await engine.get("/v1/models")).json()["data"]] == ["tiny-qwen"]


def record_of(folder):
    return sorted(path.name for path in folder.glob("*.json"))


@pytest.mark.fleet
async def test_a_load_by_vllms_own_call_is_remembered_over_restarts_until_its_unload(worker, tmp_path, monkeypatch):
    record = tmp_path / "record"
    monkeypatch.setenv("VLLM_LORA_ADAPTER_CACHE", str(record))
    folder = make_adapter(tmp_path / "scripts", "mine")
    async with worker.running() as client:
        own = (await post(client, "load_lora", lora_id="sql-expert/v1")).json()["engine_name"]
        await load_behind_our_back(client, "team/mine", folder)
        digest = (await found(client, "team/mine", lambda lora: lora.files_digest)).files_digest
        files = [file_name(own), "team%2Fmine.json"]
        assert record_of(record) == files
        saved = json.loads((record / "team%2Fmine.json").read_text())
        assert (saved["lora_name"], saved["lora_path"]) == ("team/mine", str(folder))

        before = await metadata_of(client)
        os.kill(worker.engine_pid, signal.SIGKILL)
        await worker.ready_again(client, before)
        assert (await found(client, "team/mine", lambda lora: lora.files_digest)).path == str(folder)
        worker.process.kill()  # the agent, and its engine ends with it
        await worker.process.wait()
    assert record_of(record) == files
    async with worker.running() as client:
        assert (await found(client, "team/mine", lambda lora: lora.files_digest)).files_digest == digest
        await found(client, own, lambda lora: lora.state == "ready")
        async with client_of(await engine_url(client)) as engine:
            (await engine.post("/v1/unload_lora_adapter", json={"lora_name": "team/mine"})).raise_for_status()
        await until(lambda: record_of(record) == files[:1], what="its file is gone")


async def test_an_adapter_of_another_client_that_does_not_load_again_ends_no_start(worker, tmp_path):
    (worker.state_dir / "adapters").mkdir(parents=True)
    for name in ("gone", "kept"):
        folder = make_adapter(tmp_path / "scripts", name)
        text = json.dumps({"lora_name": name, "lora_path": str(folder)})
        (worker.state_dir / "adapters" / f"{name}.json").write_text(text)
    shutil.rmtree(tmp_path / "scripts" / "gone")
    async with worker.together() as client:
        await found(client, "kept", lambda lora: lora.files_digest)
        names = {lora.engine_name for lora in (await metadata_of(client)).lora.loaded_loras}
    assert (names, record_of(worker.state_dir / "adapters")) == ({"kept"}, ["kept.json"])


async def test_two_agents_share_no_record(agent_model, agent_adapters, tmp_path):
    workers = [RunningWorker(agent_model, agent_adapters, tmp_path / name, *SIM) for name in ("one", "two")]
    shared = ("--record-dir", str(tmp_path / "record"))
    async with workers[0].together(*shared):
        with pytest.raises(OSError, match="another agent uses it; give this one its own record_dir"):
            async with workers[1].together(*shared):
                pass


async def test_an_adapter_whose_files_this_worker_would_refuse_is_reported_with_the_reason(worker, tmp_path):
    folder = make_adapter(tmp_path, "mine")
    async with worker.together() as client:
        await load_behind_our_back(client, "mine", folder)
        await found(client, "mine", lambda lora: lora.files_digest)
        linked = make_adapter(tmp_path, "linked")
        weights, secret = linked / "adapter_model.safetensors", tmp_path / "secret.safetensors"
        weights.rename(secret)
        weights.symlink_to(secret)
        await load_behind_our_back(client, "linked", linked)
        lora = await found(client, "linked", lambda lora: lora.error)
        assert lora.files_digest == ""
        assert lora.error.startswith("source_forbidden"), "a link may not lead out of the folder"


async def test_an_adapter_of_a_script_that_spoils_the_answers_of_others_is_unloaded(worker, tmp_path):
    spoilt = adapter_of_nan(make_adapter(tmp_path / "scripts", "mine"), tmp_path / "nan")
    async with worker.together() as client:
        await load_behind_our_back(client, "mine", spoilt)
        async with client_of(await engine_url(client)) as engine:

            async def is_unloaded():
                return [item["id"] for item in (await engine.get("/v1/models")).json()["data"]] == ["tiny-qwen"]

            await until(is_unloaded, what="the agent unloads it")


async def test_a_file_of_a_digest_is_served_in_ranges_with_the_digest_as_its_etag(worker):
    async with worker.together() as client:
        digest = (await post(client, "load_lora", lora_id="sql-expert/v1")).json()["digest"]
        path = f"/v1/files/{digest}/adapter_model.safetensors"
        whole = await client.get(path)
        assert (whole.status_code, whole.headers["etag"]) == (200, f'"{digest}"')
        rest = await client.get(path, headers={"range": "bytes=100-", "if-range": f'"{digest}"'})
        assert (rest.status_code, rest.content) == (206, whole.content[100:])
        gone = await client.get(f"/v1/files/{'0' * 64}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "files_not_found")
        other = await client.get(f"/v1/files/{digest}/..%2f..%2fetc%2fpasswd")
        assert other.status_code == 404
