"""The agent's answers to unusual requests and drains."""

import asyncio
import contextlib
import json
import os
import random
import signal
from pathlib import Path

import httpx
import pytest

from lorafleet.engine.vllm_plugin.engine_reports import EngineProcessReport, write_engine_report
from lorafleet.local.tiny_model import make_adapter, make_model
from tests.patience import patience, until, within
from tests.properties import sample
from tests.workers.running import RunningWorker, code, loaded, metadata_of, post, sim_inside, until_state
from workers.config import AgentTimers

THREE = ("sql-expert/v1", "legal/v2", "python-expert/v1")


async def test_full_worker_accepts_a_load_of_a_loaded_adapter(worker):
    async with worker.together() as client:
        for lora_id in THREE:
            await post(client, "load_lora", lora_id=lora_id)
        again = await post(client, "load_lora", lora_id="legal/v2")
        assert (again.status_code, again.json().get("state")) == (200, "ready")


async def test_epoch_needs_admin_scope_and_a_valid_number(worker, tmp_path):
    from lorafleet.keys.key_files import hash_key

    keys = tmp_path / "keys.yaml"
    rows = [{"sha256": hash_key(scope), "tenant": None, "scopes": [scope]} for scope in ("load", "admin")]
    keys.write_text(json.dumps({"keys": rows}))
    async with worker.together("--key-files", str(keys)) as client:

        async def answer(key: str, epoch: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}", "x-lorafleet-epoch": epoch}
            return await client.post("/v1/admin/load_lora", json={"lora_id": "legal/v2"}, headers=headers)

        # Otherwise a router's key could lock out the real leader for good.
        assert (await answer("load", "9")).status_code == 403
        assert (await answer("admin", "9")).status_code == 200
        for too_big in ("9" * 30, "9" * 5000):
            assert code(await answer("admin", too_big)) == "invalid_epoch"


async def test_event_id_with_thousands_of_digits_is_gone(worker):
    async with worker.together() as client:
        gone = await client.get("/v1/events", headers={"last-event-id": "9" * 5000})
        assert (gone.status_code, code(gone)) == (410, "events_gone")


@pytest.mark.fleet
async def test_ready_route_shows_none_of_the_engines_output(worker):
    quiet = ("--no-engine-output",)
    async with worker.running("--engine-args=--hf-token=very-secret", *quiet, until_ready=False) as client:
        await until_state(client, "engine_down")
        message = (await client.get("/ready")).json()["error"]["message"]
        assert message == "engine_down: the engine did not start (status 2)"
        assert "very-secret" not in message
    log = (worker.folder / "agent.log").read_text().split("its output ends")[0]
    assert "unrecognized arguments: --hf-token=***" in log
    assert "very-secret" not in log


@pytest.mark.fleet
async def test_engine_does_not_inherit_the_agents_own_secrets(worker, monkeypatch):
    monkeypatch.setenv("LORAFLEET_WORKERS_TOKEN", "very-secret")
    async with worker.inside():
        environ = Path("/proc") / str(worker.engine_pid) / "environ"
        assert b"very-secret" not in await asyncio.to_thread(environ.read_bytes)


@pytest.mark.fleet
async def test_drain_waits_for_a_request_in_its_first_step(worker, tmp_path):
    """vLLM counts a request only after its first step: a drain must not miss it."""
    config = make_adapter(tmp_path / "late", "late/v1") / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sim": {"delay_s": 0.7}}))
    flags = ("--lora-path", str(tmp_path / "late"), "--preload-loras", "late/v1")
    slow = ("--engine-args=--sim-prefill-tokens-per-s=500", "--max-num-batched-tokens", "500")  # a step takes 1 s
    timers = AgentTimers(quiet_s=0.2)
    async with worker.inside(*flags, *slow, timers=timers) as client, httpx.AsyncClient(timeout=patience(10)) as direct:
        metadata = await metadata_of(client)
        url = f"{metadata.transport.engine_url}/v1/completions"
        await direct.post(url, json={"model": "tiny-qwen", "prompt": [7] * 600, "max_tokens": 1})
        async with within(10):
            while not (await metadata_of(client)).load.prefill_tokens_per_s:
                await asyncio.sleep(0.02)
        body = {"model": metadata.lora.loaded_loras[0].engine_name, "prompt": "a", "max_tokens": 20}
        requested = asyncio.create_task(direct.post(url, json=body))
        assert (await post(client, "drain", deadline_s=20)).json()["is_drained"] is True
        assert requested.done()
        assert (await requested).status_code == 200


@pytest.mark.slow
async def test_drain_waits_while_uncounted_requests_keep_ending(worker):
    """A beam search in vLLM is one request per token, each finished within its step."""
    quiet_s = patience(0.2)
    async with (
        worker.together(timers=AgentTimers(quiet_s=quiet_s)) as client,
        httpx.AsyncClient(timeout=patience(10)) as direct,
    ):
        url = (await metadata_of(client)).transport.engine_url

        async def search() -> None:
            while True:
                await direct.post(f"{url}/v1/completions", json={"model": "tiny-qwen", "prompt": "a", "max_tokens": 1})

        searching = asyncio.create_task(search())
        assert (await post(client, "drain", deadline_s=2 * quiet_s)).json()["is_drained"] is False
        searching.cancel()
        assert (await post(client, "drain", deadline_s=20)).json()["is_drained"] is True


@pytest.mark.fleet
async def test_drain_of_a_hung_engine_fails_at_its_deadline(worker):
    async with worker.inside("--health-timeout-s", "0.3", "--hang-after-s", "60") as client:
        os.kill(worker.engine_pid, signal.SIGSTOP)
        try:
            answer = await post(client, "drain", deadline_s=0.5)
            assert (answer.status_code, code(answer)) == (504, "engine_timeout")
            assert (await metadata_of(client)).state == "draining"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.engine_pid, signal.SIGCONT)


@pytest.mark.fleet
@pytest.mark.parametrize("seed", sample([1, 2], 1))
async def test_state_folder_agent_and_engine_agree_after_many_calls_and_kills(worker, seed):
    rng = random.Random(seed)
    names = (*THREE, "extra/v1")

    async def caller(client) -> None:
        for _ in range(12):
            lora_id, victim = rng.sample(names, 2)
            call = rng.choice(("load", "load", "evict", "unload"))
            if call == "unload":
                answer = await post(client, "unload_lora", lora_id=lora_id)
            else:
                more = {"evict": victim} if call == "evict" else {}
                answer = await post(client, "load_lora", lora_id=lora_id, **more)
            assert answer.status_code in {200, 404, 409, 422, 503}, answer.text
            assert answer.is_success or code(answer) in {
                "no_free_slot", "engine_unreachable", "engine_down", "not_ready", "cancelled"
            }  # fmt: skip
            await asyncio.sleep(rng.uniform(0, 0.1))

    async with worker.inside("--engine-args=--sim-load-s=0.02") as client:
        callers = asyncio.gather(*(caller(client) for _ in range(6)))
        await asyncio.sleep(rng.uniform(0.1, 0.4))
        os.kill(worker.engine_pid, signal.SIGKILL)
        await callers
        await until((worker.state_dir / "engine.pid").exists)
        await worker.ready(client)
        metadata = await metadata_of(client)
        async with httpx.AsyncClient(timeout=patience(10)) as direct:
            models = (await direct.get(f"{metadata.transport.engine_url}/v1/models")).json()["data"]
        listed = {item["id"] for item in models if item.get("parent")}
        assert {item.engine_name for item in metadata.lora.loaded_loras if item.state == "ready"} == listed
        assert len(listed) <= 3
        records = [json.loads(path.read_text()) for path in (worker.state_dir / "adapters").glob("*.json")]
        assert {record["engine_name"] for record in records} == listed
        # The files of an adapter that the killed engine had lost may be read just now.
        await until(lambda: not list(worker.cache_dir.glob(".partial-*")), what="no download is in progress")


@pytest.mark.fleet
async def test_agent_killed_during_an_eviction_restores_victim_or_new_adapter(worker):
    slow = (f"--engine-args=--sim-load-s={patience(0.2)}",)
    async with worker.running(*slow) as client:
        for lora_id in THREE:
            await post(client, "load_lora", lora_id=lora_id)
        evicting = asyncio.create_task(post(client, "load_lora", lora_id="extra/v1", evict="legal/v2"))
        async with within(10):
            while "legal/v2" in await loaded(client):
                await asyncio.sleep(0.02)
        worker.process.kill()
        with contextlib.suppress(httpx.HTTPError):
            await evicting
    async with worker.inside(*slow) as client:
        assert len(await loaded(client)) == 3


@pytest.mark.parametrize(("device", "answered"), [("cpu", 409), ("cuda", 200)])
async def test_mixture_of_experts_on_the_cpu_takes_no_adapters_and_says_so_before_its_engine_dies(
    tmp_path, device, answered
):
    model = make_model(tmp_path / "model")
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_local_experts": 4}))
    adapters = tmp_path / "adapters"
    make_adapter(adapters, "sql/v1")
    worker = RunningWorker(model, adapters, tmp_path)
    write_engine_report(worker.state_dir / "lora-reports", EngineProcessReport("PunicaWrapperCPU", device, 0))
    slots = ("--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "16")
    async with sim_inside(model, *slots) as url, worker.inside("--engine-url", url) as client:
        answer = await post(client, "load_lora", lora_id="sql/v1")
        assert answer.status_code == answered, answer.text
        refusal = (await metadata_of(client)).lora.refusal
        if device == "cpu":
            assert code(answer) == "adapters_refused"
            assert "mixture of experts" in refusal
        else:
            assert refusal == ""
