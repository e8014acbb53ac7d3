"""The data on vLLM's model classes is what the installed vLLM says of itself."""

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "vllm_classes.py"
SOME = [
    "Gemma3ForConditionalGeneration", "GptOssForCausalLM", "MixtralForCausalLM", "Olmo2ForCausalLM",
    "Qwen2VLForConditionalGeneration",
]  # fmt: skip


def table_of_installed_vllm(folder: Path, *architectures: str) -> str:
    target = folder / "table.json"
    command = [sys.executable, "-P", str(SCRIPT), str(target), *architectures]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return target.read_text()


def committed(version: str) -> str:
    return files("workers.engines.vllm_tables").joinpath(f"vllm-{version}.json").read_text()


@pytest.mark.vllm
def test_some_classes_of_the_table_are_those_of_the_installed_vllm(tmp_path):
    found = json.loads(table_of_installed_vllm(tmp_path, *SOME))
    expected = json.loads(committed(found["version"]))
    for architecture in SOME:
        name = expected["architectures"][architecture]
        assert found["classes"][found["architectures"][architecture]] == expected["classes"][name]


@pytest.mark.vllm
@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_the_table_is_that_of_the_installed_vllm(tmp_path):
    found = table_of_installed_vllm(tmp_path)
    assert found == committed(json.loads(found)["version"])
