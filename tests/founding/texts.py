"""Pieces of code that a reader of the founding texts would run, and our own examples of the same calls.

The texts are read from the folder that `FOUNDING_TEXTS` names; nothing of them is in this repository.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

Origin = Literal["ours", "texts"]
EXAMPLES = Path(__file__).parent / "examples"
VARIABLE = "FOUNDING_TEXTS"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of code: our example's file, and where a text has its own.

    text   number of the text
    phrase what only that block of the text has
    """

    file: str
    text: str
    phrase: str


PIECES: Mapping[str, Piece] = {
    "metadata": Piece("metadata.py", "000", "# Enhanced metadata structure"),
    "phase A": Piece("phase_a.py", "000", "Total available"),
    "worker's file": Piece("worker.yaml", "000", "config/lora_worker.yaml"),
    "worker's pod": Piece("worker_pod.yaml", "000", "deploy/lora-worker.yaml"),
    "orchestrator's file": Piece("orchestrator.yaml", "000", "config/lora_orchestrator.yaml"),
    "orchestrator's pod": Piece("orchestrator_pod.yaml", "000", "deploy/lora-orchestrator.yaml"),
    "engine manager": Piece("engine_manager.py", "000", "class DynamicLoRAManager"),
    "fleet manager": Piece("fleet_manager.py", "000", "class LoRAOrchestrator"),
    "proposal": Piece("proposal.txt", "001", "class LoraDownloaderBase"),
    "plugins": Piece("plugins.sh", "001", "--lora-downloader-plugin"),
    "vLLM": Piece("engine.sh", "001", "vllm serve"),
    "sgl-jax": Piece("sgl_jax.sh", "003", "sgl_jax.launch_server"),
    "sgl-jax, request": Piece("sgl_jax_request.txt", "003", "POST /generate"),
    "sgl-jax, one": Piece("sgl_jax_one.py", "003", '["text"])'),
    "sgl-jax, batch": Piece("sgl_jax_batch.py", "003", "Use base model"),
    "sgl-jax, chat": Piece("sgl_jax_chat.py", "003", "extra_body"),
}


@cache
def _blocks(text: str) -> tuple[str, ...]:
    """The code blocks of a text."""
    (path,) = Path(os.environ[VARIABLE]).glob(f"{text}_*")
    return tuple(re.findall(r"```\w*\n(.*?)```", path.read_text(), re.DOTALL))


def piece(name: str, origin: Origin) -> str:
    """A piece of code. Skips the test where it is a text's and no folder is named."""
    found = PIECES[name]
    if origin == "ours":
        return (EXAMPLES / found.file).read_text()
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} names no folder of the founding texts")
    (block,) = [block for block in _blocks(found.text) if found.phrase in block]
    return block


def moved(code: str, places: Mapping[str, str]) -> str:
    """Code with hosts, folders, names of models or import paths replaced; each must be there."""
    for ours, theirs in places.items():
        assert ours in code, ours
        code = code.replace(ours, theirs)
    return code


def command_lines(code: str) -> list[str]:
    """The commands of a shell's code: comments are left out, and continued lines are one."""
    lines = (line.strip() for line in code.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]
