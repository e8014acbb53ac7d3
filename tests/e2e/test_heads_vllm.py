"""Classifiers, a cross-encoder and an embedding model on real vLLM, with adapters as PEFT saves them.

Each answer is compared with what transformers and PEFT compute for the same weights, through orchestrator, agent and
router, while the engine holds a few of the adapters at a time.
"""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.tiny_heads import CLASSES, QUERY, TEXTS
from tests.e2e.fleets import RunningFleet, running
from tests.patience import patience

pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.timeout(1800)]

HELD, AT_ONCE, TOLERANCE = 16, 8, 1e-4


@dataclass(frozen=True)
class Heads:
    """A fleet of one vLLM that pools, and the numbers of each adapter for each text; "" is the base model."""

    fleet: RunningFleet
    expected: dict[str, list[list[float]]]

    async def ask(self, client: httpx.AsyncClient, path: str, adapter: str, body: dict[str, Any]) -> httpx.Response:
        answer = await client.post(path, json={"model": adapter or "tiny-qwen", **body})
        assert answer.status_code == 200, f"{adapter}: {answer.text}"
        assert answer.headers["x-lorafleet-adapter"].partition("@")[0] == (adapter or "base")
        return answer


@contextlib.contextmanager
def heads(kind: str, folder: Path, count: int) -> Iterator[Heads]:
    command = [sys.executable, "-P", "-m", "tests.contract.tiny_heads", kind, str(folder), str(count)]
    subprocess.run(command, check=True, timeout=patience(600), stdout=subprocess.DEVNULL)
    expected = json.loads((folder / "expected.json").read_text())
    flags = ["--engine", "vllm", "--workers", "1", "--model", str(folder / "tiny-qwen")]
    flags += ["--adapters", str(folder / "adapters")]
    engine = ["--", "--runner", "pooling", "--max-loras", "4", "--max-cpu-loras", str(HELD), "--dtype", "float32"]
    with running(folder / "state", *flags, *engine, within_s=600) as fleet:
        # Else an adapter stays for as long as a fleet with room would keep it.
        policy = {"min_residency_s": 0.1, "reserve_slots": 0}
        assert fleet.http("PATCH", f"{fleet.orchestrator}/v1/policy", json=policy).status_code == 200
        yield Heads(fleet, expected)


def is_close(found: list[float], expected: list[float]) -> bool:
    return len(found) == len(expected) and all(
        abs(one - other) < TOLERANCE for one, other in zip(found, expected, strict=True)
    )


async def test_two_hundred_classifiers_give_the_labels_that_peft_computes(tmp_path: Path) -> None:
    with heads("classify", tmp_path, 200) as made:
        names = list(made.expected)
        asked = [*names, *random.Random(4).sample(names, 60)]
        free = asyncio.Semaphore(AT_ONCE)
        async with httpx.AsyncClient(base_url=made.fleet.router, timeout=patience(180)) as client:

            async def ask(name: str) -> None:
                async with free:
                    answer = await made.ask(client, "/classify", name, {"input": list(TEXTS)})
                for row, shares in zip(answer.json()["data"], made.expected[name], strict=True):
                    assert row["num_classes"] == CLASSES
                    assert is_close(row["probs"], shares), (name, row["probs"], shares)
                    assert row["label"] == f"LABEL_{shares.index(max(shares))}"

            await asyncio.gather(*map(ask, asked))
            # One long text: what is predicted for its second turn is what the engine keeps of it, by adapter.
            long, cached = {"input": "Classify this order by its words. " * 30}, {}
            for name in (names[1], names[1], names[2]):
                answer = await made.ask(client, "/classify", name, long)
                cached.setdefault(name, []).append(int(answer.headers["x-lorafleet-cached-tokens"]))
            assert cached[names[1]][0] == cached[names[2]][0] == 0
            assert cached[names[1]][1] > 100
        (worker,) = made.fleet.workers().values()
        assert worker["lora"]["capacity"]["loaded_count"] <= HELD


async def test_a_cross_encoders_adapters_score_and_rank_as_peft_computes(tmp_path: Path) -> None:
    with heads("score", tmp_path, 6) as made:
        async with httpx.AsyncClient(base_url=made.fleet.router, timeout=patience(180)) as client:
            for name, scores in made.expected.items():
                for path in ("/score", "/v1/score"):
                    body = {"text_1": QUERY, "text_2": list(TEXTS)}
                    found = (await made.ask(client, path, name, body)).json()["data"]
                    assert is_close([row["score"] for row in found], [score for [score] in scores]), name
                for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
                    body = {"query": QUERY, "documents": list(TEXTS)}
                    ranked = (await made.ask(client, path, name, body)).json()["results"]
                    order = sorted(range(len(TEXTS)), key=lambda index, scores=scores: -scores[index][0])
                    assert [row["index"] for row in ranked] == order, name


async def test_embedding_adapters_give_the_vectors_that_peft_computes(tmp_path: Path) -> None:
    with heads("embed", tmp_path, 6) as made:
        async with httpx.AsyncClient(base_url=made.fleet.router, timeout=patience(180)) as client:
            for name, vectors in made.expected.items():
                answer = await made.ask(client, "/v1/embeddings", name, {"input": list(TEXTS)})
                for row, vector in zip(answer.json()["data"], vectors, strict=True):
                    assert is_close(row["embedding"], vector), name
                pooled = await made.ask(client, "/pooling", name, {"input": TEXTS[0]})
                assert is_close(pooled.json()["data"][0]["data"], vectors[0]), name
