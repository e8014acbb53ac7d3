"""Real vLLM wraps `kv_b_proj` of latent attention and never runs the wrapper: the agent says so before it serves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.contract.tiny_latent import LAYERS, SHAPES, make_latent_adapter, make_latent_model
from tests.patience import until
from tests.workers.running import RunningWorker, code, metadata_of, post

pytestmark = [pytest.mark.vllm, pytest.mark.fleet]

LATENT = "self_attn.kv_b_proj"
PROJECTIONS = [f"model.layers.{layer}.{LATENT}" for layer in range(LAYERS)]


@dataclass(frozen=True)
class LatentWorker:
    """An agent that has started vLLM with the toy of DeepSeek-V2."""

    client: httpx.AsyncClient

    async def logprobs(self, model: str) -> dict[str, float]:
        """The log-probabilities of the next token."""
        url = (await metadata_of(self.client)).transport.engine_url
        body = {"model": model, "prompt": list(range(300, 312)), "max_tokens": 1, "temperature": 0, "logprobs": 5}
        answer = (await self.client.post(f"{url}/v1/completions", json=body)).raise_for_status().json()
        return answer["choices"][0]["logprobs"]["top_logprobs"][0]  # type: ignore[no-any-return]


@asynccontextmanager
async def latent_worker(folder: Path, *flags: str) -> AsyncIterator[LatentWorker]:
    """A worker of the toy, which lists the adapters `whole`, `others` and `alone`."""
    model, adapters = make_latent_model(folder / "model"), folder / "adapters"
    make_latent_adapter(adapters / "whole")
    make_latent_adapter(adapters / "others", SHAPES.keys() - {LATENT})
    make_latent_adapter(adapters / "alone", {LATENT})
    sizes = ("--max-loras", "1", "--max-cpu-loras", "8", "--max-lora-rank", "8", "--max-model-len", "512")
    # Where the CPU has AMX vLLM would choose a kernel that takes other blocks.
    kernel = ("--block-size", "16", "--engine-args", '["--attention-backend", "CPU_MLA"]')
    worker = RunningWorker(
        model, adapters, folder, "--base-model", "acme/latent-toy", *sizes, *kernel, "--num-gpu-blocks-override", "64",
        *flags,
    )  # fmt: skip
    async with worker.inside(until_ready=False) as client:
        await worker.ready(client, within_s=300)
        yield LatentWorker(client)


@pytest.mark.timeout(900)
async def test_kv_b_proj_alone_is_refused_and_in_a_whole_adapter_listed_as_ignored(tmp_path):
    async with latent_worker(tmp_path) as worker:
        refused = await post(worker.client, "load_lora", lora_id="alone")
        assert (refused.status_code, code(refused)) == (422, "modules_unmatched")
        assert "runs this layer past what adapters change" in refused.json()["error"]["message"]
        found = {}
        for lora_id, ignored in (("whole", LAYERS), ("others", 0)):
            answer = (await post(worker.client, "load_lora", lora_id=lora_id)).raise_for_status().json()
            assert (answer["effect"], (answer["ignored_modules"] or {}).get("count", 0)) == ("applied", ignored)
            found[lora_id] = await worker.logprobs(answer["engine_name"])
            if ignored:
                assert answer["ignored_modules"]["names"] == PROJECTIONS
                assert "runs this layer past what adapters change" in answer["note"]
        assert found["whole"] == found["others"], "its other modules work, and the projection does nothing"
        assert found["whole"] != await worker.logprobs("tiny-qwen")


@pytest.mark.timeout(900)
@pytest.mark.thorough
async def test_the_engine_itself_says_what_never_runs_where_no_table_does(tmp_path):
    """Without the base model's files to compare with, the plugin's hooks alone see it."""
    async with latent_worker(tmp_path, "--no-check-shapes") as worker:
        refused = await post(worker.client, "load_lora", lora_id="alone")
        assert (refused.status_code, code(refused)) == (422, "adapter_no_effect")
        message = refused.json()["error"]["message"]
        assert f"the engine uses 0 of its {LAYERS} modules" in message
        assert PROJECTIONS[0] in message
        whole = (await post(worker.client, "load_lora", lora_id="whole")).raise_for_status().json()
        assert whole["ignored_modules"] == {"count": LAYERS, "names": PROJECTIONS}
        page = (await worker.client.get("/metrics")).text
        (count,) = (line for line in page.splitlines() if line.startswith("lorafleet_workers_canary_seconds_count"))
        assert float(count.rpartition(" ")[2]) == 1, "the first adapter alone takes requests"


@pytest.mark.timeout(900)
@pytest.mark.thorough
async def test_what_probes_measure_is_what_the_table_says_and_shows_a_class_without_one(tmp_path):
    """A compiled engine has no hooks; the probes compare answers, so they hold there as well."""
    async with latent_worker(tmp_path, "--probe-modules", "always", "--scan-s", "0.2") as worker:

        async def is_measured() -> bool:
            table = (await metadata_of(worker.client)).lora.measured
            return table is not None and not table.pending

        await until(is_measured, within_s=120, what="all kinds are measured")
        table = (await metadata_of(worker.client)).lora.measured
        outcomes = {kind: outcome for kind, outcome in table.outcomes.items() if ".layers." in kind}
        assert outcomes == {f"model.layers.#.{name}": "no effect" if name == LATENT else "works" for name in SHAPES}
        refused = await post(worker.client, "load_lora", lora_id="alone")
        assert code(refused) == "modules_unmatched"
