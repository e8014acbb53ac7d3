"""The agent's REST routes, with a sim engine."""

import asyncio
import contextlib
import json
import os
import signal
import socket

import httpx
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from lorafleet.identity import engine_name
from lorafleet.keys.key_files import hash_key
from lorafleet.keys.roles import SCOPES
from lorafleet.local.tiny_model import make_adapter
from orchestrator.model.agents import Heartbeat
from tests.patience import patience, until, within
from tests.serving import client_of, serving
from tests.workers.running import code, group_of, is_running, loaded, metadata_of, post, sse
from workers.config import AgentTimers
from workers.wire import AvailableLoras, Metadata

MODULES = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]

JSON = {"content-type": "application/json"}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}


async def chat(engine_url: str, model: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=patience(10)) as client:
        return await client.post(f"{engine_url}/v1/chat/completions", json={**CHAT, "model": model})


async def test_loaded_adapter_answers_and_unloaded_adapter_does_not(worker):
    async with worker.together() as client:
        answer = await post(client, "load_lora", lora_id="sql-expert/v1")
        item = answer.json()
        assert answer.status_code == 200
        assert item["engine_name"] == engine_name("sql-expert/v1", item["digest"])
        assert item["path"] == str((worker.cache_dir / item["digest"]).resolve())
        engine = (await metadata_of(client)).transport.engine_url
        assert (await chat(engine, item["engine_name"])).status_code == 200
        again = await post(client, "load_lora", lora_id="sql-expert/v1", digest=item["digest"])
        assert again.json()["loaded_at"] == item["loaded_at"]
        assert (await post(client, "unload_lora", lora_id="sql-expert/v1")).status_code == 200
        assert (await chat(engine, item["engine_name"])).status_code == 404
        again = await post(client, "unload_lora", lora_id="sql-expert/v1")
        assert (again.status_code, again.json()["message"]) == (200, "sql-expert/v1 is not loaded")
        assert (await metadata_of(client)).lora.capacity.ghosts == 1


async def test_loads_and_unloads_answer_in_words_and_the_list_has_the_engines_slots(worker):
    async with worker.together() as client:
        empty = (await client.get("/v1/admin/loras")).json()
        assert (empty["loaded_loras"], empty["capacity"]["loaded_count"]) == ([], 0)
        answer = (await post(client, "load_lora", lora_id="sql-expert/v1")).json()
        name = answer["engine_name"]
        assert (answer["status"], answer["lora_id"], name in answer["message"]) == ("success", "sql-expert/v1", True)
        listed = (await client.get("/v1/admin/loras")).json()
        assert [lora["engine_name"] for lora in listed["loaded_loras"]] == [name]
        lora = (await metadata_of(client)).lora
        changing = {"disk_room_bytes"}  # others write to the disk, too
        assert listed["capacity"].items() >= lora.capacity.model_dump(exclude=changing).items()
        assert listed["capacity"]["max_loras"] == lora.max_loras > 0
        assert listed["capacity"]["available_slots"] == empty["capacity"]["available_slots"] - 1
        gone = (await post(client, "unload_lora", lora_id="sql-expert/v1")).json()
        assert (gone["status"], gone["lora_id"], name in gone["message"]) == ("success", "sql-expert/v1", True)
        assert gone["loaded_loras"] == []
        assert gone["capacity"]["loaded_count"] == 0


async def test_the_path_in_the_list_loads_its_own_adapter_and_no_other(worker):
    async with worker.together() as client:
        path = (await post(client, "load_lora", lora_id="legal/v2")).json()["path"]
        for _ in range(2):
            assert (await post(client, "load_lora", lora_id="legal/v2", lora_path=path)).status_code == 200
            assert (await post(client, "unload_lora", lora_id="legal/v2")).status_code == 200
        assert code(await post(client, "load_lora", lora_id="stolen/v2", lora_path=path)) == "source_forbidden"


@pytest.mark.fleet
async def test_metadata_has_the_engines_shape_and_the_adapters_in_lora_path(worker):
    async with worker.inside("--block-size", "64", "--num-gpu-blocks-override", "100") as client:
        metadata = await metadata_of(client)
        shape = metadata.model.runtime_config
        assert (shape.block_size, shape.total_kv_blocks, shape.max_model_len) == (64, 100, 2048)
        assert metadata.transport.kv_topic == f"kv@{metadata.engine_boot_id}"
        found = AvailableLoras.model_validate((await client.get("/v1/metadata/loras")).json())
        assert [item.lora_id for item in found.data] == ["extra/v1", "legal/v2", "python-expert/v1", "sql-expert/v1"]
        one = (await client.get("/v1/metadata/loras/python-expert/v1")).json()
        assert (one["rank"], one["state"], one["loaded"], one["lora_int_id"]) == (16, "on_disk", False, None)
        listed = (await client.get("/v1/metadata/loras")).json()
        assert [item["lora_id"] for item in listed["available_loras"]] == [item["lora_id"] for item in listed["data"]]
        assert (listed["loaded_loras"], listed["capacity"]["loaded_count"]) == ([], 0)
        await post(client, "load_lora", lora_id="python-expert/v1")
        loaded_one = (await client.get("/v1/metadata/loras/python-expert/v1")).json()
        assert (loaded_one["loaded"], loaded_one["lora_int_id"], loaded_one["metadata"]) == (True, 1, {})
        assert (one["alpha"], one["target_modules"], one["dtype"]) == (32.0, MODULES, "BF16")
        assert (await client.get("/metadata")).json()["mdc"] == {
            "display_name": "tiny-qwen",
            "context_length": 2048,
            "kv_cache_block_size": 64,
            "max_rank": 16,
            "module_names": MODULES,
        }
        assert code(await client.get("/v1/metadata/loras/nobody/v1")) == "adapter_unknown"
        files = (await client.get("/v1/model/files")).json()
        assert "tokenizer.json" in files["files"]


@pytest.mark.fleet
async def test_killed_engine_restarts_with_its_adapters(worker):
    async with worker.inside("--preload-loras", "legal/v2") as client:
        item = (await post(client, "load_lora", lora_id="sql-expert/v1")).json()
        before = await metadata_of(client)
        os.kill(worker.engine_pid, signal.SIGKILL)
        await worker.ready_again(client, before)
        after = await metadata_of(client)
        assert after.agent_boot_id == before.agent_boot_id
        assert await loaded(client) == {"sql-expert/v1", "legal/v2"}
        assert (await chat(after.transport.engine_url, item["engine_name"])).status_code == 200


@pytest.mark.fleet
async def test_restarted_agent_restores_loaded_adapters_only(worker):
    async with worker.inside() as client:
        for lora_id in ("sql-expert/v1", "legal/v2"):
            await post(client, "load_lora", lora_id=lora_id)
        await post(client, "unload_lora", lora_id="legal/v2")
    async with worker.inside() as client:
        assert await loaded(client) == {"sql-expert/v1"}


@pytest.mark.fleet
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
async def test_no_process_of_a_stopped_agent_is_left(worker, sent):
    async with worker.running() as client:
        await post(client, "load_lora", lora_id="sql-expert/v1")
        engine = worker.engine_pid
        group = group_of(engine)
        assert len(group) >= 2
        async with client.stream("GET", "/v1/events") as stream:
            lines = stream.aiter_lines()
            await anext(lines)  # an open stream does not delay the agent's stop
            worker.process.send_signal(sent)
            if sent == signal.SIGTERM:
                async with within(20):
                    assert (await sse(lines))[1]["type"] == "DRAINING"
            await asyncio.wait_for(worker.process.wait(), patience(20))
        await until(lambda: not any(is_running(pid) for pid in group))


async def test_full_engine_refuses_loads_without_a_victim_and_names_no_adapter(worker):
    async with worker.together() as client:
        for lora_id in ("sql-expert/v1", "legal/v2", "python-expert/v1"):
            assert (await post(client, "load_lora", lora_id=lora_id)).status_code == 200
        refused = await post(client, "load_lora", lora_id="extra/v1")
        assert (refused.status_code, code(refused)) == (409, "no_free_slot")
        assert "legal/v2" not in refused.text, "a router tells it to whoever asked for extra/v1"
        assert code(await post(client, "load_lora", lora_id="extra/v1", evict="nobody/v1")) == "no_free_slot"
        assert (await post(client, "load_lora", lora_id="extra/v1", evict="legal/v2")).status_code == 200
        assert await loaded(client) == {"sql-expert/v1", "python-expert/v1", "extra/v1"}


async def test_named_victim_stays_if_a_slot_is_free(worker):
    async with worker.together("--preload-loras", "sql-expert/v1") as client:
        await post(client, "load_lora", lora_id="legal/v2", evict="sql-expert/v1")
        assert await loaded(client) == {"sql-expert/v1", "legal/v2"}


async def test_older_epoch_is_refused_even_after_a_restart(worker):
    async with worker.together() as client:
        assert (await post(client, "load_lora", epoch=7, lora_id="sql-expert/v1")).status_code == 200
        stale = await post(client, "unload_lora", epoch=6, lora_id="sql-expert/v1")
        assert (stale.status_code, code(stale)) == (409, "stale_epoch")
    async with worker.together() as client:
        assert (await metadata_of(client)).epoch == 7
        assert code(await post(client, "unload_lora", epoch=6, lora_id="sql-expert/v1")) == "stale_epoch"
        headers = {"x-lorafleet-epoch": "-1"}
        answer = await client.post("/v1/admin/unload_lora", json={"lora_id": "a"}, headers=headers)
        assert code(answer) == "invalid_epoch"


async def test_load_without_epoch_may_only_take_a_free_slot(worker):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        async with worker.together("--orchestrator-url", away) as client:
            assert (await post(client, "load_lora", lora_id="sql-expert/v1")).status_code == 200
            refused = await post(client, "unload_lora", lora_id="sql-expert/v1")
            assert code(refused) == "epoch_required"
            assert f"DELETE {away}/v1/workers/worker-0/adapters/LORA_ID" in refused.json()["error"]["message"]
            evicting = await post(client, "load_lora", lora_id="legal/v2", evict="sql-expert/v1")
            assert code(evicting) == "epoch_required"
            assert (await post(client, "unload_lora", epoch=1, lora_id="sql-expert/v1")).status_code == 200


@pytest.mark.slow
async def test_broken_adapters_are_refused_and_the_engine_keeps_serving(worker, tmp_path):
    root = tmp_path / "others"
    config = "adapter_config.json"

    def change(name: str, **values) -> str:
        folder = make_adapter(root, name)
        parsed = json.loads((folder / config).read_text()) | values
        (folder / config).write_text(json.dumps(parsed))
        return str(folder)

    cut = make_adapter(root, "cut")
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (root / "empty").mkdir()
    expected = {
        change("rank", r=16): "rank_mismatch",
        change("dora", use_dora=True): "dora_unsupported",
        change("untargeted", target_modules=[]): "adapter_config_invalid",
        change("stranger", base_model_name_or_path="org/other"): "base_model_mismatch",
        str(make_adapter(root, "big", rank=32)): "rank_too_big",
        str(cut): "weights_corrupt",
        str(root / "empty"): "source_not_found",
        str(root / "nothing"): "source_not_found",
        "relative/path/": "source_relative",
        "gopher://host/a": "source_unsupported",
        "file://host/a": "source_invalid",
    }
    async with worker.together("--lora-roots", str(root)) as client:
        for source, wanted in expected.items():
            answer = await post(client, "load_lora", lora_id="broken/v1", source=source)
            assert (code(answer), source) == (wanted, source)
        fine = str(make_adapter(root, "fine"))
        # The caller's base model overrides the config's.
        stranger = await post(
            client, "load_lora", lora_id="known/v1", source=str(root / "stranger"), base_model="tiny-qwen"
        )
        assert (stranger.status_code, stranger.json()["base_model"]) == (200, "tiny-qwen")
        # The trainer used the base model's hub name; the fleet has another one.
        hub = await post(
            client, "load_lora", lora_id="hub/v1", source=change("hub", base_model_name_or_path="Org/Tiny-Qwen")
        )
        assert (hub.status_code, hub.json()["base_model"]) == (200, "tiny-qwen")
        elsewhere = await post(client, "load_lora", lora_id="other/v1", source=fine, base_model="org/other")
        assert code(elsewhere) == "base_model_mismatch"
        wrong = await post(client, "load_lora", lora_id="fine/v1", source=fine, digest="0" * 64)
        assert code(wrong) == "digest_mismatch"
        failed = (await client.get("/v1/metadata/loras/fine/v1")).json()
        assert failed["state"] == "failed"
        assert (await post(client, "load_lora", lora_id="fine/v1", source=fine)).status_code == 200
        assert (await client.get("/v1/metadata/loras/fine/v1")).json()["state"] == "ready"
        assert code(await post(client, "load_lora", lora_id="../x", source=fine)) == "invalid_lora_id"
        page = (await client.get("/metrics")).text
        assert 'lorafleet_workers_load_failures_total{code="weights_corrupt"} 1.0' in page
        assert not list(worker.cache_dir.glob(".partial-*"))


async def test_paths_outside_of_the_allowed_folders_are_refused(worker, agent_adapters, tmp_path):
    secret = make_adapter(tmp_path / "secret", "a")
    root = tmp_path / "allowed"
    (root / "linked").mkdir(parents=True)
    (root / "folder-link").symlink_to(secret)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "linked" / name).symlink_to(secret / name)
    escapes = [str(secret), f"{root}/../secret/a", str(root / "folder-link"), str(root / "linked"), f"file://{secret}"]
    async with worker.together("--lora-roots", str(root)) as client:
        for source in escapes:
            answer = await post(client, "inspect_lora", lora_id="a/v1", source=source)
            assert (code(answer), source) == ("source_forbidden", source)
        assert code(await client.get("/v1/admin/source", params={"source": str(secret)})) == "source_forbidden"
        assert code(await client.get("/v1/admin/source", params={"source": "folder"})) == "source_relative"
        assert (await client.get("/v1/admin/source", params={"source": f"{root}/later"})).status_code == 204
        # Links below the roots are allowed: hub caches use them.
        (root / "within").symlink_to(agent_adapters / "legal" / "v2")
        within = await post(client, "inspect_lora", lora_id="a/v1", source=str(root / "within"))
        assert within.status_code == 200


async def test_invalid_path_is_400_and_later_requests_work(worker):
    half = "\ud800"  # half of a surrogate pair: valid in JSON, but not in UTF-8
    strange = [{"digest": half}, {"evict": half}, {"secret": half}, {"source": f"/{half}"}, {"lora_path": f"/{half}"}]
    async with worker.together() as client:
        for wrong in strange:
            body = json.dumps({"lora_id": "sql-expert/v1", **wrong})
            refused = await client.post("/v1/admin/load_lora", content=body, headers=JSON)
            assert (code(refused), wrong) == ("invalid_request", wrong)
        for call in ("load_lora", "inspect_lora"):
            for source in ("/a\0b", "file:///a%00b"):
                refused = await post(client, call, lora_id="sql-expert/v1", source=source)
                assert (code(refused), source) == ("source_invalid", source)
        assert (await client.get("/metadata")).status_code == 200


async def test_inspection_installs_without_loading(worker, agent_adapters):
    async with worker.together() as client:
        answer = await post(
            client, "inspect_lora", lora_id="sql-expert/v1", source=str(agent_adapters / "sql-expert/v1")
        )
        assert answer.json()["rank"] == 8
        assert await loaded(client) == set()
        # From now on the digest is enough: this lora_id's own source was verified.
        loading = await post(client, "load_lora", lora_id="sql-expert/v1", digest=answer.json()["digest"])
        assert loading.status_code == 200
        other = await post(client, "load_lora", lora_id="other/v1", digest=answer.json()["digest"])
        assert code(other) == "adapter_unknown"


async def test_adapter_with_too_large_rank_is_inspected_but_not_loaded(worker, tmp_path):
    source = str(make_adapter(tmp_path, "big", rank=32))
    async with worker.together("--lora-roots", str(tmp_path)) as client:
        found = (await post(client, "inspect_lora", lora_id="big/v1", source=source)).json()
        assert found["rank"] == 32
        for named in ({"source": source}, {"digest": found["digest"]}):
            answer = await post(client, "load_lora", lora_id="big/v1", **named)
            assert (answer.status_code, code(answer)) == (422, "rank_too_big")
        assert await loaded(client) == set()


async def test_cached_files_are_read_only_and_damaged_ones_are_replaced(worker):
    async with worker.together() as client:
        item = (await post(client, "load_lora", lora_id="sql-expert/v1")).json()
        await post(client, "unload_lora", lora_id="sql-expert/v1")
    weights = worker.cache_dir / item["digest"] / "adapter_model.safetensors"
    assert weights.stat().st_mode & 0o222 == 0
    whole = weights.read_bytes()
    weights.chmod(0o644)
    weights.write_bytes(b"damaged")
    async with worker.together() as client:
        again = await post(client, "load_lora", lora_id="sql-expert/v1", digest=item["digest"])
        assert again.status_code == 200
    assert weights.read_bytes() == whole


async def test_event_stream_resumes_after_an_id_of_this_boot_only(worker):
    async with worker.together("--keep-alive-s", "0.1") as client:
        async with client.stream("GET", "/v1/events") as stream:
            lines = stream.aiter_lines()
            assert await anext(lines) == ": connected"
            await post(client, "load_lora", lora_id="sql-expert/v1")
            seen = [await sse(lines) for _ in range(2)]
            assert [event["type"] for _, event in seen] == ["DOWNLOADED_TO_DISK", "LOADED_TO_DEVICE"]
            while await anext(lines) != ": keep-alive":
                pass
        await post(client, "unload_lora", lora_id="sql-expert/v1")
        headers = {"last-event-id": seen[0][0]}
        async with client.stream("GET", "/v1/events", headers=headers) as stream:
            lines = stream.aiter_lines()
            types = [(await sse(lines))[1]["type"] for _ in range(2)]
            assert types == ["LOADED_TO_DEVICE", "UNLOADED_FROM_DEVICE"]
        gone = await client.get("/v1/events", headers={"last-event-id": "other-boot:1"})
        assert (gone.status_code, code(gone)) == (410, "events_gone")


async def test_drained_worker_refuses_loads_until_undrained(worker):
    async with worker.together(timers=AgentTimers(quiet_s=0.1)) as client:
        answer = await post(client, "drain", deadline_s=patience(5))
        assert answer.json()["is_drained"] is True
        assert (await metadata_of(client)).state == "draining"
        assert (await client.get("/ready")).status_code == 503
        assert code(await post(client, "load_lora", lora_id="sql-expert/v1")) == "draining"
        assert (await post(client, "undrain")).json()["state"] == "ready"
        assert (await client.get("/ready")).is_success
        assert (await post(client, "load_lora", lora_id="sql-expert/v1")).status_code == 200


async def test_drain_is_an_order_until_the_pod_itself_drains(worker):
    async with worker.together(timers=AgentTimers(quiet_s=0.1)) as client:
        await post(client, "drain", epoch=1, deadline_s=patience(5))
        assert (await metadata_of(client)).is_drain_ordered
        await post(client, "drain", deadline_s=patience(5))
        assert not (await metadata_of(client)).is_drain_ordered
        await post(client, "drain", epoch=1, deadline_s=patience(5))
        assert not (await metadata_of(client)).is_drain_ordered
        assert (await post(client, "undrain", epoch=1)).json()["state"] == "ready"
        assert not (await metadata_of(client)).is_drain_ordered


@pytest.mark.fleet
async def test_heartbeats_report_changes_at_once_and_survive_an_orchestrators_restart(worker):
    beats: asyncio.Queue[Heartbeat] = asyncio.Queue()
    app = FastAPI()

    @app.post("/v1/workers/register")
    async def register(beat: Heartbeat) -> dict[str, float]:
        beats.put_nowait(beat)
        return {"epoch": 3, "revision": 1, "interval_s": 1.0}

    async def beat_with(names: set[str]) -> None:
        async with within(10):
            while {item.lora_id for item in (await beats.get()).metadata.lora.loaded_loras} != names:
                pass

    async with serving(app) as url:
        port = int(url.rsplit(":", 1)[1])
        urls = f"http://127.0.0.1:9, {url}/"  # the first does not listen: the second gets the heartbeat at once
        async with worker.running("--orchestrator-url", urls, "--heartbeat-s", "60") as client:
            await post(client, "claim", epoch=3)
            # A caller's own load: the orchestrator knows what its own calls change by their answers.
            await post(client, "load_lora", lora_id="sql-expert/v1")
            await beat_with({"sql-expert/v1"})
            worker.process.send_signal(signal.SIGTERM)
            async with within(10):  # though the next heartbeat is due in a minute
                while (await beats.get()).metadata.state != "draining":
                    pass
    async with worker.inside("--orchestrator-url", url, "--heartbeat-s", "0.2") as client:
        assert (await client.get("/metrics")).is_success
        async with serving(app, port=port):
            await beat_with({"sql-expert/v1"})
            assert code(await post(client, "unload_lora", epoch=2, lora_id="sql-expert/v1")) == "stale_epoch"


@pytest.mark.fleet
async def test_heartbeat_says_draining_before_the_engine_stops(worker):
    engine_answered: asyncio.Queue[int] = asyncio.Queue()
    app = FastAPI()

    @app.post("/v1/workers/register")
    async def register(beat: Heartbeat) -> dict[str, float]:
        if beat.metadata.state == "draining":  # the agent waits for this answer before it stops the engine
            async with client_of() as client:
                answer = await client.get(f"{beat.metadata.transport.engine_url}/health", timeout=patience(5))
            engine_answered.put_nowait(answer.status_code)
        return {"epoch": 1, "revision": 1, "interval_s": 1.0}

    async with serving(app) as url, worker.running("--orchestrator-url", url, "--heartbeat-s", "60"):
        worker.process.send_signal(signal.SIGTERM)
        async with within(20):
            assert await engine_answered.get() == 200
            await worker.process.wait()


@pytest.mark.fleet
async def test_last_heartbeat_goes_to_the_next_orchestrator_where_one_is_away(worker):
    states: asyncio.Queue[str] = asyncio.Queue()
    apps = [FastAPI(), FastAPI()]
    for app in apps:

        @app.post("/v1/workers/register")
        async def register(beat: Heartbeat) -> dict[str, float]:
            states.put_nowait(beat.metadata.state)
            return {"epoch": 1, "revision": 1, "interval_s": 1.0}

    async with serving(apps[1]) as second:
        async with contextlib.AsyncExitStack() as stack, serving(apps[0]) as first:
            flags = ("--orchestrator-url", f"{first},{second}", "--heartbeat-s", "60")
            await stack.enter_async_context(worker.running(*flags))
            # The first, which has had every heartbeat, is away now: the agent is stopped as the stack ends.
        async with within(20):
            while await states.get() != "draining":
                pass


async def test_heartbeat_with_an_endless_answer_times_out(worker):
    beats = []
    app = FastAPI()

    async def trickle():
        while True:
            yield b" "
            await asyncio.sleep(0.05)

    @app.post("/v1/workers/register")
    async def register(heartbeat: Heartbeat):
        beats.append(heartbeat)
        return StreamingResponse(trickle()) if len(beats) == 1 else {"epoch": 3, "revision": 1, "interval_s": 1.0}

    timers = AgentTimers(heartbeat_answer_s=0.2)
    async with serving(app) as orchestrator, worker.together("--orchestrator-url", orchestrator, timers=timers):
        await until(lambda: len(beats) > 1)


@pytest.mark.fleet
async def test_failed_engine_start_is_reported_with_its_output_and_retried(worker):
    flags = ("--engine-args=--no-such-flag", "--crash-loop-after", "2")
    async with worker.inside(*flags, until_ready=False) as client:

        async def in_a_loop() -> Metadata | None:
            metadata = await metadata_of(client)
            return metadata if "crash loop" in metadata.state_reason else None

        metadata = await until(in_a_loop)
        assert metadata.state == "engine_down"
        assert "its last error: error: unrecognized arguments: --no-such-flag\n" in metadata.state_reason
        assert (await client.get("/health")).is_success
        assert code(await post(client, "load_lora", lora_id="sql-expert/v1")) == "not_ready"


async def test_answers_to_the_orchestrator_say_as_of_which_report_they_are(worker, tmp_path):
    keys = tmp_path / "keys.yaml"
    rows = [{"sha256": hash_key(scope), "scopes": [scope]} for scope in ("admin", "infer")]
    keys.write_text(json.dumps({"keys": rows}))
    async with worker.together("--key-files", str(keys)) as client:
        client.headers["authorization"] = "Bearer admin"

        async def call(verb: str, *, key: str = "admin", **body) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}", "x-lorafleet-epoch": "7"}
            return await client.post(f"/v1/admin/{verb}", json=body, headers=headers)

        async def place() -> str:
            metadata = await metadata_of(client)
            return f"{metadata.agent_boot_id}/{metadata.report_number}"

        before = await metadata_of(client)
        answer = await call("load_lora", lora_id="sql-expert/v1")
        after = await metadata_of(client)
        assert 0 < before.report_number < after.report_number
        assert answer.headers["x-lorafleet-report"] == f"{after.agent_boot_id}/{after.report_number}"
        for verb, status in (("unload_lora", 200), ("unload_lora", 200)):
            answer = await call(verb, lora_id="sql-expert/v1")
            assert (answer.status_code, answer.headers["x-lorafleet-report"]) == (status, await place())
        assert (await metadata_of(client)).report_number > after.report_number
        for verb in ("drain", "undrain"):
            answer = await call(verb)
            assert answer.headers["x-lorafleet-report"] == await place()
        assert answer.json()["report_number"] == (await metadata_of(client)).report_number
        # Others learn nothing by it.
        refused = await call("unload_lora", key="infer", lora_id="sql-expert/v1")
        assert (refused.status_code, refused.headers.get("x-lorafleet-report")) == (403, None)
        asked = await client.post("/v1/admin/load_lora", json={"lora_id": "legal/v2"})
        assert "x-lorafleet-report" not in asked.headers


async def test_routes_check_the_scopes_of_the_key_file(worker, tmp_path):
    keys = tmp_path / "keys.yaml"
    rows = [
        {"sha256": hash_key(scope), "scopes": [scope]} | ({"tenant": "acme"} if scope == "tenant-admin" else {})
        for scope in SCOPES
    ]
    keys.write_text(json.dumps({"keys": rows}))
    async with worker.together("--key-files", str(keys)) as client:
        assert code(await client.get("/metadata")) == "invalid_api_key"
        assert code(await client.get("/metrics")) == "invalid_api_key"
        assert {
            scope: (await client.get("/metrics", headers={"authorization": f"Bearer {scope}"})).status_code
            for scope in SCOPES
        } == dict.fromkeys(SCOPES, 403) | {"metrics": 200, "operate": 200, "admin": 200}

        async def status(key: str, call: str, epoch: str | None = None, **body) -> int:
            headers = {"authorization": f"Bearer {key}"} | ({"x-lorafleet-epoch": epoch} if epoch else {})
            return (await client.post(f"/v1/admin/{call}", json=body, headers=headers)).status_code

        for scope in ("infer", "register", "tenant-admin", "load", "worker"):
            assert (await client.get("/metadata", headers={"authorization": f"Bearer {scope}"})).status_code == 403
            assert await status(scope, "load_lora", lora_id="sql-expert/v1") == 403
        assert await status("agent-load", "load_lora", lora_id="sql-expert/v1") == 200
        assert await status("agent-load", "load_lora", lora_id="legal/v2", evict="sql-expert/v1") == 403
        assert await status("agent-load", "unload_lora", lora_id="sql-expert/v1") == 403
        assert await status("drain", "unload_lora", lora_id="sql-expert/v1") == 403
        assert await status("agent", "unload_lora", lora_id="sql-expert/v1") == 200
        assert await status("agent-load", "drain", deadline_s=1) == 403
        # An epoch is stored: a too high one would lock out the leader.
        assert await status("drain", "drain", epoch="99", deadline_s=1) == 403
        assert (await client.get("/ready")).is_success
        assert await status("drain", "drain", deadline_s=1) == 200
        assert await status("drain", "undrain") == 403
