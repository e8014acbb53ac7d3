"""The documented command of vLLM's own benchmark works with the vLLM that `make demo` installs."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.contract.conftest import unload_all
from tests.engines import Kind, RunningEngine
from tests.patience import patience

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
pytestmark = [pytest.mark.vllm, pytest.mark.thorough]


def benchmark_command(**given: str) -> list[str]:
    """The benchmark command in the page, with some flags' values replaced."""
    block = re.search(r"```sh\n([^`]*bench serve[^`]*)```", PAGE)
    assert block is not None
    words = shlex.split(block[1].replace("\\\n", " "))
    for flag, value in given.items():
        words[words.index(f"--{flag.replace('_', '-')}") + 1] = value
    return words


def test_all_requests_of_vllms_benchmark_succeed(
    engine_of: Callable[[Kind], RunningEngine], model_dir: Path, adapters: dict[str, Path]
) -> None:
    engine = engine_of("sim")  # the test is about the command: any engine will do
    program, *words = benchmark_command(
        base_url=engine.url, tokenizer=str(model_dir), num_prompts="6", request_rate="100", random_input_len="50"
    )
    with httpx.Client(base_url=engine.url, timeout=60) as client:
        for name in ("sql-expert/v1", "python-expert/v1", "legal/v2"):
            body = {"lora_name": name, "lora_path": str(adapters[name.partition("/")[0].partition("-")[0]])}
            client.post("/v1/load_lora_adapter", json=body).raise_for_status()
        command = Path(sys.executable).with_name(program)
        ran = subprocess.run(
            [command, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=patience(120),
        )
        unload_all(client)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert re.search(r"Successful requests: +6\b", ran.stdout), ran.stdout
