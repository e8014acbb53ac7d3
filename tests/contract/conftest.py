"""One server of each engine for the whole session, its KV events, and adapters that no engine should take."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from lorafleet.tiny import make_adapters, make_model
from tests.engines import RunningEngine, start_engine

EVENT_WITHIN_MS = 10_000


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base model."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Good adapters by a short name: sql, python, legal."""
    made = make_adapters(tmp_path_factory.mktemp("adapters"))
    return {path.parent.name.partition("-")[0]: path for path in made}


@pytest.fixture(scope="session")
def bad_adapters(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that each have one fault."""
    root = tmp_path_factory.mktemp("bad")

    def copy(name: str) -> Path:
        return Path(shutil.copytree(adapters["sql"], root / name))

    def config(name: str, **changes: Any) -> None:
        path = copy(name) / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    config("rank", r=32)
    config("dora", use_dora=True)
    config("bias", bias="all")
    (copy("noconfig") / "adapter_config.json").unlink()
    (copy("badjson") / "adapter_config.json").write_text("{nope")
    (copy("noweights") / "adapter_model.safetensors").unlink()
    (copy("corrupt") / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    weights = copy("short") / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    weights = copy("modules") / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b".q_proj.", b".z_proj."))
    return {path.name: path for path in root.iterdir()}


@dataclass(slots=True)
class Wire:
    """A subscriber to an engine's KV events, and the sequence numbers it expects."""

    sub: "zmq.Socket[bytes]"
    heard: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    next_seq: int = 0

    def batch(self) -> list[dict[str, Any]]:
        """The events of the next batch; fails when none comes, or when the frames are not vLLM's."""
        assert self.sub.poll(EVENT_WITHIN_MS), "no KV events came"
        topic, seq_bytes, payload = self.sub.recv_multipart()
        seq = int.from_bytes(seq_bytes, "big")
        assert (topic, len(seq_bytes), seq) == (b"kv", 8, self.next_seq)
        self.next_seq += 1
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(ts, float)
        assert rank == 0
        self.heard += [(seq, event) for event in events]
        return events  # type: ignore[no-any-return]

    def until(self, last_tokens: list[int]) -> list[dict[str, Any]]:
        """All events up to the store that ends with `last_tokens`."""
        events: list[dict[str, Any]] = []
        while not any(event.get("token_ids", [])[-len(last_tokens) :] == last_tokens for event in events):
            events += self.batch()
        return events


@dataclass(slots=True)
class Bench:
    """What a test needs of an engine under test."""

    engine: RunningEngine
    client: httpx.Client
    wire: Wire
    adapters: dict[str, Path]
    fresh: "count[int]" = field(default_factory=lambda: count(1))

    def tokens(self, blocks: int, extra: int = 0) -> list[int]:
        """`blocks` x 32 + `extra` token ids that no test has used before."""
        first = next(self.fresh)
        return [300 + first, 400 + first % 60, *range(500, 500 + blocks * 32 + extra - 2)]

    def complete(self, prompt: Any, **more: Any) -> dict[str, Any]:
        """A completion of one token (unless `more` says otherwise) that must succeed."""
        body = {"model": self.engine.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        answer = self.client.post("/v1/completions", json=body | more)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Skip every event sent so far: those of requests that other tests made."""
        marker = self.tokens(1)
        self.complete(marker)
        self.wire.until(marker)

    def load(self, name: str, path: Path) -> None:
        """Load an adapter that must be taken."""
        answer = self.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
        assert answer.status_code == 200, answer.text

    def unload(self, name: str) -> None:
        """Unload an adapter that must be there."""
        answer = self.client.post("/v1/unload_lora_adapter", json={"lora_name": name})
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="session", params=["sim", pytest.param("vllm", marks=pytest.mark.vllm)])
def bench(request: pytest.FixtureRequest, model_dir: Path, adapters: dict[str, Path]) -> Iterator[Bench]:
    """One engine for all tests of the session."""
    engine = start_engine(request.param, model_dir)
    context: zmq.Context[Any] = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.set_hwm(0)
    sub.connect(engine.kv_endpoint)
    sub.subscribe(b"")
    try:
        with httpx.Client(base_url=engine.url, timeout=120) as client:
            yield Bench(engine, client, Wire(sub), adapters)
    finally:
        sub.close(linger=0)
        context.term()
        status = engine.stop()
    assert status == 0
