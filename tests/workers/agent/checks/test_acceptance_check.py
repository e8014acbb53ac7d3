"""An engine's answers are compared with an adapter's acceptance file, whatever way the adapter came by."""

import asyncio
import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest

from lorafleet.engine.acceptance import FILE_NAME
from lorafleet.engine.canary import EngineSilent
from lorafleet.local.tiny_model import CHAT_TEMPLATE
from lorafleet.sim.text import prompt_logprobs
from tests.certified import certify, sim_digest
from tests.patience import until
from tests.serving import client_of
from tests.workers.running import SIM, RunningWorker, code, metadata_of, post
from workers.agent.checks.acceptance_check import AcceptanceCheck
from workers.agent.current_engine import CurrentEngine
from workers.config import WorkerSettings
from workers.core.errors import EngineError
from workers.engines.vllm import VllmClient
from workers.metrics import WorkerMetrics
from workers.wire import WorkerAdapter

ADAPTER = "sql-expert/v1"
UPLOAD = "a" * 24


@pytest.fixture
def adapters(agent_adapters: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(agent_adapters, tmp_path / "adapters"))


@pytest.fixture
def worker(agent_model: Path, adapters: Path, tmp_path: Path) -> RunningWorker:
    return RunningWorker(agent_model, adapters, tmp_path / "worker", *SIM)


async def compared(client, lora_id: str = ADAPTER) -> WorkerAdapter:
    """The loaded adapter, once it was compared."""

    async def find() -> WorkerAdapter | None:
        loaded = (await metadata_of(client)).lora.loaded_loras
        return next((each for each in loaded if each.lora_id == lora_id and each.acceptance), None)

    return await until(find, what="the adapter is compared")


@pytest.mark.fleet
async def test_loaded_adapter_is_compared_in_the_background_and_after_each_start(worker, adapters):
    digest = certify(adapters / ADAPTER)
    for _ in range(2):
        async with worker.inside() as client:
            if not (await metadata_of(client)).lora.loaded_loras:
                answer = (await post(client, "load_lora", lora_id=ADAPTER)).raise_for_status().json()
                assert answer["acceptance_file"] == digest
            found = (await compared(client)).acceptance
            assert (found.result, found.file) == ("equal", digest)
            page = (await client.get("/metrics")).text
            assert 'lorafleet_workers_acceptance_checks_total{result="equal"} 1.0' in page


@pytest.mark.fleet
async def test_other_numbers_are_an_incident_and_the_adapter_stays_unless_the_policy_requires_equal_ones(
    worker, adapters
):
    certify(adapters / ADAPTER, of=adapters / "legal/v2")
    async with worker.inside() as client:
        (await post(client, "load_lora", lora_id=ADAPTER)).raise_for_status()
        found = (await compared(client)).acceptance
        assert (found.result, found.looks_like) == ("differs", "other")
        assert "it looks like another adapter" in found.why
        refused = await post(client, "check_lora", lora_id=ADAPTER, acceptance="require")
        assert (refused.status_code, code(refused)) == (422, "not_accepted")
        (failed,) = (await metadata_of(client)).lora.loaded_loras
        assert (failed.state, "acceptance: require" in failed.error) == ("failed", True)
        refused = await post(client, "load_lora", lora_id=ADAPTER, acceptance="require")
        assert (refused.status_code, code(refused)) == (422, "not_accepted")


@pytest.mark.fleet
async def test_required_file_must_be_there_and_be_valid(worker, adapters):
    async with worker.inside() as client:
        refused = await post(client, "load_lora", lora_id=ADAPTER, acceptance="require")
        assert "unknown: it has no acceptance.jsonl" in refused.json()["error"]["message"]
        (adapters / ADAPTER / FILE_NAME).write_text("{}\n")
        refused = await post(client, "load_lora", lora_id=ADAPTER, acceptance="require")
        assert "acceptance.jsonl has 1 lines; expected 2 to 4" in refused.json()["error"]["message"]
        certify(adapters / ADAPTER)
        answer = (await post(client, "load_lora", lora_id=ADAPTER, acceptance="require")).raise_for_status().json()
        assert answer["acceptance"]["result"] == "equal"


@pytest.mark.fleet
async def test_file_travels_with_an_upload_and_to_other_workers_and_changes_no_digest(worker, adapters):
    async with worker.inside() as client:
        before = (await post(client, "inspect_lora", lora_id=ADAPTER, source=str(adapters / ADAPTER))).json()
        digest = certify(adapters / ADAPTER)
        after = (await post(client, "inspect_lora", lora_id=ADAPTER, source=str(adapters / ADAPTER))).json()
        assert (before["acceptance_file"], after["acceptance_file"]) == ("", digest)
        assert before["digest"] == after["digest"]
        assert not after["files_note"]
        listed = (await client.get(f"/v1/files/{after['digest']}")).json()["files"]
        assert FILE_NAME in {each["name"] for each in listed}
        sent = await client.get(f"/v1/files/{after['digest']}/{FILE_NAME}")
        assert sent.content == (adapters / ADAPTER / FILE_NAME).read_bytes()
        for name in ("adapter_config.json", "adapter_model.safetensors", FILE_NAME):
            content = (adapters / ADAPTER / name).read_bytes()
            await client.post(f"/v1/uploads/{UPLOAD}/{name}", json={"total_bytes": len(content)})
            (await client.put(f"/v1/uploads/{UPLOAD}/{name}", content=content)).raise_for_status()
        installed = (await client.post(f"/v1/uploads/{UPLOAD}", json={"lora_id": "sent", "source": "fleet:"})).json()
        assert installed["acceptance_file"] == digest, json.dumps(installed)


@pytest.mark.fleet
async def test_new_file_for_a_loaded_adapter_is_compared_and_loads_nothing_again(worker, adapters, tmp_path):
    certify(adapters / ADAPTER, of=adapters / "legal/v2")
    async with worker.inside() as client:
        loaded = (await post(client, "load_lora", lora_id=ADAPTER)).raise_for_status().json()
        assert (await compared(client)).acceptance.result == "differs"
        other = Path(shutil.copytree(adapters / ADAPTER, tmp_path / "other"))
        digest = certify(other)
        invalid = await post(client, "check_lora", lora_id=ADAPTER, content="{}")
        assert (invalid.status_code, code(invalid)) == (400, "acceptance_invalid")
        sent = (other / FILE_NAME).read_text()
        found = (await post(client, "check_lora", lora_id=ADAPTER, content=sent)).raise_for_status().json()
        assert (found["acceptance"]["result"], found["acceptance_file"]) == ("equal", digest)
        assert found["loaded_at"] == loaded["loaded_at"]
        assert (await compared(client)).acceptance.file == digest


@pytest.mark.fleet
async def test_other_chat_template_in_training_is_said_beside_the_result(worker, adapters):
    certify(adapters / ADAPTER, template="{{ other }}")
    certify(adapters / "legal/v2", template=CHAT_TEMPLATE)
    async with worker.inside() as client:
        for lora_id, is_said in ((ADAPTER, True), ("legal/v2", False)):
            found = (await post(client, "load_lora", lora_id=lora_id, acceptance="require")).raise_for_status().json()
            assert found["acceptance"]["result"] == "equal"
            assert ("chat template in training is not the engine's" in found["acceptance"]["why"]) is is_said


@pytest.mark.fleet
async def test_file_sent_for_an_adapter_on_disk_is_kept_for_its_next_load(worker, adapters, tmp_path):
    async with worker.inside() as client:
        refused = await post(client, "load_lora", lora_id=ADAPTER, acceptance="require")
        assert code(refused) == "not_accepted"
        digest = certify(adapters / ADAPTER)
        sent = (adapters / ADAPTER / FILE_NAME).read_text()
        kept = (await post(client, "check_lora", lora_id=ADAPTER, content=sent)).raise_for_status().json()
        assert (kept["state"], kept["acceptance"], kept["acceptance_file"]) == ("on_disk", None, digest)
        answer = (await post(client, "load_lora", lora_id=ADAPTER, acceptance="require")).raise_for_status().json()
        assert (answer["acceptance"]["result"], answer["acceptance"]["file"]) == ("equal", digest)


@pytest.mark.fleet
async def test_file_of_another_step_is_named_behind_the_result(worker, adapters):
    certify(adapters / "legal/v2")
    shutil.copy(adapters / "legal/v2" / FILE_NAME, adapters / ADAPTER)
    async with worker.inside() as client:
        for lora_id, result in ((ADAPTER, "differs"), ("legal/v2", "equal")):
            (await post(client, "load_lora", lora_id=lora_id)).raise_for_status()
            found = await compared(client, lora_id)
            assert found.acceptance.result == result
            assert ("the file was made of other weights" in found.acceptance.why) is (lora_id == ADAPTER)


@pytest.mark.fleet
async def test_adapter_without_a_copy_in_the_engine_cannot_be_checked(worker):
    async with worker.inside() as client:
        refused = await post(client, "check_lora", lora_id=ADAPTER)
        assert (refused.status_code, code(refused)) == (404, "adapter_unknown")


@dataclass
class AskedEngine:
    """The sim's log-probabilities, and who was asked. `wrong`: answers with an adapter that are another's."""

    digests: dict[str, bytes]
    wrong: int = 0
    answers: Literal["numbers", "none", "silence"] = "numbers"
    asked: list[str | None] = field(default_factory=list)

    async def prompt_logprobs(self, adapter, prompts, *, base_model):
        self.asked.append(adapter)
        if self.answers == "silence":
            raise EngineSilent("the engine did not answer")
        if self.answers == "none":
            return None
        digest = b"" if adapter is None else self.digests[adapter]
        if adapter is not None and self.wrong:
            self.wrong -= 1
            digest = b"another adapter"
        return [prompt_logprobs(digest, prompt) for prompt in prompts]


@pytest.fixture
def check(agent_model, tmp_path) -> tuple[AcceptanceCheck, CurrentEngine]:
    settings, metrics = WorkerSettings(model=str(agent_model), state_dir=tmp_path), WorkerMetrics("w0")
    engine = CurrentEngine(settings, metrics)
    parts = {"settings": settings, "metrics": metrics, "dtype": "float32", "templates": tuple}
    return AcceptanceCheck(engine=engine, **parts), engine


def on_disk(folder: Path) -> WorkerAdapter:
    return WorkerAdapter(lora_id=folder.parent.name, engine_name=folder.parent.name, digest="0" * 64, path=str(folder))


async def test_a_load_costs_one_request_and_a_start_of_the_engine_one_more_for_each_file(check, adapters):
    (acceptance, engine), folder = check, adapters / ADAPTER
    certify(folder)
    adapter = on_disk(folder)
    client = AskedEngine({adapter.engine_name: sim_digest(folder)})
    for boot_id, expected in (
        ("1", [None, adapter.engine_name]),
        ("1", [adapter.engine_name]),
        ("2", [None, adapter.engine_name]),
    ):
        engine.boot_id = boot_id
        client.asked.clear()
        found = (await acceptance.check(client, adapter)).acceptance
        assert (found.result, client.asked) == ("equal", expected)


@pytest.mark.parametrize(("wrong", "result"), [(1, "equal"), (2, "differs")])
async def test_answers_that_differ_are_asked_for_once_more_before_they_count(check, adapters, wrong, result):
    (acceptance, _), folder = check, adapters / ADAPTER
    certify(folder)
    adapter = on_disk(folder)
    client = AskedEngine({adapter.engine_name: sim_digest(folder)}, wrong)
    assert (await acceptance.check(client, adapter)).acceptance.result == result
    assert client.asked == [None, adapter.engine_name, adapter.engine_name]


@pytest.mark.parametrize(("answers", "expected"), [("silence", "acceptance_unknown"), ("none", "not_accepted")])
async def test_only_an_engine_that_may_answer_later_is_worth_another_try(check, adapters, answers, expected):
    (acceptance, _), folder = check, adapters / ADAPTER
    file = certify(folder)
    adapter = replace(on_disk(folder), acceptance_file=file)
    client = AskedEngine({adapter.engine_name: sim_digest(folder)}, answers=answers)
    with pytest.raises(EngineError) as refused:
        await acceptance.require_equal(client, adapter)
    assert refused.value.code == expected
    assert (await acceptance.check(client, adapter)).acceptance_file == file


@pytest.mark.fleet
async def test_adapter_that_was_equal_stays_where_a_busy_engine_does_not_answer_a_check(worker, adapters, monkeypatch):
    certify(adapters / ADAPTER)

    async def silent(*_args, **_more):
        raise EngineSilent("the engine did not answer")

    async with worker.together() as client:
        (await post(client, "load_lora", lora_id=ADAPTER, acceptance="require")).raise_for_status()
        with monkeypatch.context() as busy:
            busy.setattr(VllmClient, "prompt_logprobs", silent)
            refused = await post(client, "check_lora", lora_id=ADAPTER, acceptance="require")
            assert (refused.status_code, code(refused)) == (503, "acceptance_unknown")
        (held,) = (await metadata_of(client)).lora.loaded_loras
        assert (held.state, held.acceptance.result) == ("ready", "equal")


@pytest.mark.fleet
async def test_no_adapter_is_compared_in_the_background_while_a_request_waits(worker, adapters, monkeypatch):
    certify(adapters / ADAPTER)
    looked, has_waiting, are_waiting = [], AcceptanceCheck.has_waiting, asyncio.Event()

    async def counted(self, client):
        await are_waiting.wait()
        looked.append(await has_waiting(self, client))
        return looked[-1]

    monkeypatch.setattr(AcceptanceCheck, "has_waiting", counted)
    async with worker.together(engine=("--max-num-seqs", "1", "--sim-decode-tokens-per-s", "20")) as client:
        engine = (await metadata_of(client)).transport.engine_url
        async with client_of(engine) as direct:
            (await post(client, "load_lora", lora_id=ADAPTER)).raise_for_status()
            body = {"model": "tiny-qwen", "prompt": "long", "max_tokens": 1500, "ignore_eos": True}
            waiting = [asyncio.create_task(direct.post("/v1/completions", json=body)) for _ in range(2)]

            async def has_queue() -> bool:
                page = (await direct.get("/metrics")).text
                return any(
                    line.startswith("vllm:num_requests_waiting{") and float(line.split()[-1])
                    for line in page.splitlines()
                )

            await until(has_queue, what="one of them waits")
            are_waiting.set()
            await until(lambda: looked.count(True) > 2, what="scans find a request that waits")
            (loaded,) = (await metadata_of(client)).lora.loaded_loras
            assert loaded.acceptance is None
            for task in waiting:
                task.cancel()
        assert (await compared(client)).acceptance.result == "equal"
