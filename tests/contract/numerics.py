"""Answers of an engine with their log-probabilities, and what transformers and PEFT compute for the same tokens."""

import json
import random
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import safetensors

from lorafleet.local.tiny_model import make_adapter

# Largest difference of a log-probability, both sides in float32. Measured over 240 answers and two tensor-parallel
# degrees: at most 1.2e-4. Another adapter's weights differ by 7 and more.
TOLERANCE = 1e-3
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# rank -> target modules: no two alike, and one with a part of vLLM's packed qkv_proj and gate_up_proj.
MODULES_OF_RANK: Mapping[int, Sequence[str]] = {8: ATTENTION, 16: MLP, 64: ("q_proj", "v_proj", "up_proj", "down_proj")}


def make_partial_adapter(into: Path, name: str, *, rank: int, modules: Collection[str]) -> Path:
    """An adapter of the tiny model on these modules only; returns its folder. Every name is another adapter."""
    folder = make_adapter(into, name, rank=rank)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    kept = [
        (key, entry) for key, entry in safetensors.deserialize(weights.read_bytes()) if key.split(".")[-3] in modules
    ]
    buffers = {key: bytes(entry["data"]) for key, entry in kept}
    header, end = {}, 0
    for key, entry in kept:
        begin, end = end, end + len(buffers[key])
        header[key] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    weights.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(buffers.values()))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": list(modules)}))
    return folder


def make_prompt(seed: int, tokens: int) -> list[int]:
    """Token ids of ordinary text, other ones for each seed."""
    return random.Random(seed).choices(range(300, 4000), k=tokens)


@dataclass(frozen=True, slots=True)
class AnsweredText:
    """A prompt with its answer: all token ids, and the log-probabilities of the last ones, as an engine says."""

    adapter: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


async def ask_logprobs(
    client: httpx.AsyncClient,
    model: str,
    prompt: Sequence[int],
    *,
    adapter: str,
    max_tokens: int = 12,
    with_prompt: bool = False,
) -> AnsweredText:
    """POST a completion; returns it with the log-probabilities of the answer, and `with_prompt` of the prompt, too."""
    body: dict[str, Any] = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 0, "return_token_ids": True}
    if with_prompt:
        body["prompt_logprobs"] = 0
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["prompt_token_ids"] == list(prompt)
    logprobs = list(choice["logprobs"]["token_logprobs"])
    if with_prompt:
        of_prompt = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        logprobs = [each[str(token)]["logprob"] for token, each in of_prompt] + logprobs
    return AnsweredText(adapter, (*prompt, *choice["token_ids"]), tuple(logprobs))


@dataclass(slots=True)
class RunningReference:
    """The running program `peft_reference` of a model."""

    process: "subprocess.Popen[str]"

    def differences(self, answers: Sequence[AnsweredText], adapters: Mapping[str, Path]) -> list[float]:
        """Per answer: the largest difference between the engine's log-probabilities and the reference's."""
        folders = {name: str(folder) for name, folder in adapters.items()}
        expected = self._ask({"adapters": folders, "texts": [[each.adapter, each.tokens] for each in answers]})
        return [
            max(abs(ours - theirs) for ours, theirs in zip(each.logprobs, known[-len(each.logprobs) :], strict=True))
            for each, known in zip(answers, expected, strict=True)
        ]

    def _ask(self, question: dict[str, Any]) -> list[list[float]]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the reference has ended; its error is above"
        return json.loads(line)  # type: ignore[no-any-return]


@contextmanager
def running_reference(model: Path) -> Iterator[RunningReference]:
    """The reference of a model; ends with the block. It needs torch, transformers and PEFT."""
    command = [sys.executable, "-P", "-m", "tests.contract.peft_reference", str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield RunningReference(process)
        finally:
            process.kill()
