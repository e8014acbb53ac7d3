"""The corpus of broken adapters on vLLM itself: we refuse what it refuses, and it accepts what we accept.

If we refuse an adapter that vLLM accepts, the corpus says so and why; this is checked, too.
"""

from pathlib import Path

import pytest

from tests.contract.conftest import EngineUnderTest
from tests.workers.broken import BROKEN, GOOD, BrokenAdapter


def verdict(bench: EngineUnderTest, case: BrokenAdapter, folder: Path) -> str:
    answer = bench.client.post("/v1/load_lora_adapter", json={"lora_name": case.name, "lora_path": str(folder)})
    if answer.status_code != 200:
        return "refuses"
    bench.unload(case.name)
    return "takes"


def test_vllm_accepts_or_refuses_each_corpus_adapter_as_documented(bench: EngineUnderTest, tmp_path: Path) -> None:
    if bench.engine.kind == "sim":
        pytest.skip("the sim opens no weights: agents verify them before any engine sees them")
    requested = [case for case in (*BROKEN, *GOOD) if case.vllm != "not asked"]
    found = {case.name: verdict(bench, case, case.write(tmp_path)) for case in requested}
    assert found == {case.name: case.vllm for case in requested}
    assert bench.client.get("/health").status_code == 200
    bench.load("after-all", bench.adapters["sql"])
    assert bench.complete("still there?", model="after-all")["choices"]
    bench.unload("after-all")
