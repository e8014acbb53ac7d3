"""An adapter with NaN never reaches an engine through its agent, and other callers' answers stay as they were."""

import pytest

from lorafleet.local.tiny_model import make_adapter
from tests.contract.conftest import EngineUnderTest
from tests.workers.changed_adapters import adapter_of_large_values, adapter_of_nan
from tests.workers.running import RunningWorker, code, post

pytestmark = pytest.mark.fleet


async def test_an_adapter_with_nan_is_refused_and_the_next_answers_of_others_are_right(
    bench: EngineUnderTest, model_dir, tmp_path
):
    """On vLLM 0.32 each answer after one of such an adapter is wrong, with status 200."""
    good = make_adapter(tmp_path / "good", "fine")
    diverged = [adapter_of_nan(good, tmp_path / "nan"), adapter_of_large_values(good, tmp_path / "large")]
    prompts = [bench.tokens(1, extra=8) for _ in range(4)]
    expected = [bench.complete(prompt, max_tokens=8)["choices"][0]["text"] for prompt in prompts]
    flags = ("--engine-url", bench.engine.url, "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "16")
    worker = RunningWorker(model_dir, tmp_path / "good", tmp_path, *flags, "--lora-roots", f'["{tmp_path}"]')
    async with worker.running() as client:
        for folder in diverged:
            answer = await post(client, "load_lora", lora_id=folder.name, source=str(folder))
            for prompt, text in zip(prompts, expected, strict=True):
                if answer.is_success:  # what others got before such adapters were refused
                    asked = {"model": answer.json()["engine_name"], "prompt": bench.tokens(1), "max_tokens": 8}
                    bench.client.post("/v1/completions", json=asked)
                assert bench.complete(prompt, max_tokens=8)["choices"][0]["text"] == text
            assert (answer.status_code, code(answer)) == (422, "weights_not_finite")
