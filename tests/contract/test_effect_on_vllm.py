"""Real vLLM ignores modules of an adapter without a word; its plugin says so, and its answers show it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lorafleet.engine.vllm_plugin.lora_reports import REPORTS_VARIABLE
from lorafleet.local.tiny_model import make_adapter, make_model
from tests.engines import RunningEngine, start_engine
from tests.patience import patience
from tests.workers.changed_adapters import adapter_of_zeros, adapter_with
from tests.workers.running import RunningWorker, code, metadata_of, post

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BASE = "tiny-qwen"


@dataclass(frozen=True)
class FilteredEngine:
    """A vLLM that takes the attention's modules alone, and adapters: its name is what it has of them."""

    engine: RunningEngine
    model: Path
    adapters: Path
    reports: Path

    def worker(self, folder: Path, *, has_reports: bool) -> RunningWorker:
        """A worker at this engine, with or without the reports of its plugin."""
        made = RunningWorker(
            self.model, self.adapters, folder, "--engine-url", self.engine.url, "--canary-timeout-s", "30"
        )
        if has_reports:
            made.state_dir.mkdir(parents=True)
            (made.state_dir / "lora-reports").symlink_to(self.reports)
        return made


@pytest.fixture(scope="module")
def filtered(tmp_path_factory) -> Iterator[FilteredEngine]:
    folder = tmp_path_factory.mktemp("filtered")
    whole = make_adapter(folder / "made", "whole")
    adapters = folder / "adapters"
    adapters.mkdir()
    shutil.copytree(whole, adapters / "partial")
    adapter_with(
        whole,
        adapters / "ignored",
        lambda name: ".mlp." in name or name.endswith(("gate_proj.", "up_proj.", "down_proj.")),
    )
    adapter_with(
        whole,
        adapters / "taken",
        lambda name: ".self_attn." in name or name.endswith(("q_proj.", "k_proj.", "v_proj.", "o_proj.")),
    )
    adapter_of_zeros(adapters / "ignored", adapters / "fresh")
    reports = folder / "reports"
    reports.mkdir()
    model = make_model(folder / "model")
    engine = start_engine(
        "vllm",
        model,
        flags=("--lora-target-modules", "qkv_proj", "o_proj"),
        environment={REPORTS_VARIABLE: str(reports)},
    )
    yield FilteredEngine(engine, model, adapters, reports)
    engine.stop()


@pytest.mark.parametrize("has_reports", [True, False], ids=["by its plugin's reports", "by its answers"])
async def test_adapter_that_vllm_ignores_is_refused(filtered, tmp_path, has_reports):
    async with filtered.worker(tmp_path, has_reports=has_reports).inside() as client:
        refused = await post(client, "load_lora", lora_id="ignored")
        assert (refused.status_code, code(refused)) == (422, "adapter_no_effect")
        words = "the engine has 0 of its 12 modules" if has_reports else "the base model's to the last bit"
        assert words in refused.json()["error"]["message"]
        url = (await metadata_of(client)).transport.engine_url
        assert "ignored" not in (await client.get(f"{url}/v1/models")).text


@pytest.mark.parametrize("has_reports", [True, False], ids=["by its plugin's reports", "by its answers"])
async def test_adapter_that_vllm_takes_in_part_or_as_a_whole_is_ready(filtered, tmp_path, has_reports):
    async with filtered.worker(tmp_path, has_reports=has_reports).inside() as client:
        for lora_id, ignored in (("partial", 12), ("taken", 0)):
            found = (await post(client, "load_lora", lora_id=lora_id)).raise_for_status().json()
            assert found["effect"] == ("applied" if has_reports else "seen")
            assert (found["ignored_modules"] or {}).get("count", 0) == (ignored if has_reports else 0)
        fresh = (await post(client, "load_lora", lora_id="fresh")).json()
        # Its modules are ignored, too. Only a report says so: its zeros are why no answer changes.
        assert code_of(fresh) == "adapter_no_effect" if has_reports else fresh["effect"] == "zero"
        for lora_id in ("partial", "taken", "fresh"):
            await post(client, "unload_lora", lora_id=lora_id)


def code_of(answer: dict) -> str:
    return answer["error"]["code"]


@pytest.fixture(scope="module")
def of_multimodal_base(tmp_path_factory) -> dict[str, dict]:
    """What real vLLM does with adapters of Gemma 3: name -> modules, ignored ones, the canary's outcome."""
    program = (sys.executable, "-P", "-m", "tests.contract.multimodal_effect", str(tmp_path_factory.mktemp("gemma3")))
    done = subprocess.run(program, capture_output=True, text=True, timeout=patience(200), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_adapter_of_the_text_model_alone_has_no_effect_on_a_multimodal_base(of_multimodal_base):
    found = of_multimodal_base["text-alone"]
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    assert (found["modules"], found["ignored"], found["canary"]) == (2, names, "none")


def test_tower_of_a_multimodal_base_is_ignored_beside_a_language_model_that_is_used(of_multimodal_base):
    found = of_multimodal_base["both-towers"]
    assert (found["modules"], len(found["ignored"]), found["canary"]) == (4, 2, "seen")
    assert all(".vision_tower." in name for name in found["ignored"])
    whole = of_multimodal_base["language"]
    assert (whole["modules"], whole["ignored"], whole["canary"]) == (2, [], "seen")
