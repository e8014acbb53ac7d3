"""Fixtures of the contract tests: one server per engine, its KV events, good and bad adapters."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from lorafleet.local.tiny_model import make_adapters, make_model
from tests.contract.surface import GENERATE_FLAGS, STORE, TELL_FLAGS
from tests.engines import Kind, RunningEngine, start_engine
from tests.patience import patience

EVENT_WITHIN_MS = int(patience(10) * 1000)
# Numbers the prompts of an engine's tests, so that they share no blocks.
FRESH = count(1)


@pytest.fixture(scope="package")  # it ends with the last of its tests, not with the run
def engine_of(model_dir: Path) -> Iterator[Callable[[Kind], RunningEngine]]:
    """Starts an engine of a kind at its first use and returns the same one from then on; stops all at the end."""
    started: dict[Kind, RunningEngine] = {}

    def engine(kind: Kind) -> RunningEngine:
        if kind not in started or started[kind].process.poll() is not None:
            # float32, so that log-probabilities can be compared with a reference
            flags = (*GENERATE_FLAGS, "--dtype", "float32")
            own: dict[Kind, dict[str, Any]] = {
                "vllm": {"flags": flags, "environment": STORE},
                "sim": {"flags": TELL_FLAGS},
            }
            started[kind] = start_engine(kind, model_dir, **own.get(kind, {}))
        return started[kind]

    yield engine
    ended = {kind: engine.stop() for kind, engine in started.items()}
    ended.pop("sglang", None)  # SIGTERM kills it
    assert not any(ended.values()), ended


def unload_all(client: httpx.Client) -> None:
    """Unload all adapters of an engine before the next test module."""
    for card in client.get("/v1/models").json()["data"]:
        if card.get("parent"):
            client.post("/v1/unload_lora_adapter", json={"lora_name": card["id"]}).raise_for_status()


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
    """Folders of adapters with one fault each."""
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
class KVEventSubscriber:
    """A subscriber to an engine's KV events, with the expected sequence number of the next batch."""

    sub: "zmq.Socket[bytes]"
    heard: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    next_seq: int | None = None

    def next_batch(self) -> list[dict[str, Any]]:
        """The events of the next batch; fails if none comes or its frames differ from vLLM's."""
        assert self.sub.poll(EVENT_WITHIN_MS), "no KV events came"
        topic, seq_bytes, payload = self.sub.recv_multipart()
        seq = int.from_bytes(seq_bytes, "big")
        expected = seq if self.next_seq is None else self.next_seq
        assert (topic, len(seq_bytes), seq) == (b"kv", 8, expected)
        self.next_seq = seq + 1
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(ts, float)
        assert rank == 0
        self.heard += [(seq, event) for event in events]
        return events  # type: ignore[no-any-return]

    def stored(self) -> list[dict[str, Any]]:
        """The BlockStored events of the next batch that has any; removals are skipped.

        Earlier tests may have filled the pool, so that blocks are removed first.
        """
        while True:
            if stores := [event for event in self.next_batch() if event["type"] == "BlockStored"]:
                return stores

    def until(self, last_tokens: list[int]) -> list[dict[str, Any]]:
        """All events up to the store that ends with `last_tokens`."""
        events: list[dict[str, Any]] = []
        while not any(event.get("token_ids", [])[-len(last_tokens) :] == last_tokens for event in events):
            events += self.next_batch()
        return events


@dataclass(slots=True)
class EngineUnderTest:
    """An engine under test with its client, events and adapters."""

    engine: RunningEngine
    client: httpx.Client
    wire: KVEventSubscriber
    adapters: dict[str, Path]

    def tokens(self, blocks: int, extra: int = 0) -> list[int]:
        """`blocks` x 32 + `extra` token ids that no test has used before."""
        first = next(FRESH)
        return [300 + first % 1000, 400 + first % 60, *range(500, 500 + blocks * 32 + extra - 2)]

    def complete(self, prompt: Any, **more: Any) -> dict[str, Any]:
        """A completion of one token (unless `more` says otherwise) that must succeed."""
        body = {"model": self.engine.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        answer = self.client.post("/v1/completions", json=body | more)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Skip all events so far, which are of other tests' requests."""
        marker = self.tokens(1)
        self.complete(marker)
        self.wire.until(marker)

    def load(self, name: str, path: Path) -> None:
        """Load an adapter; fails if it is refused."""
        answer = self.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
        assert answer.status_code == 200, answer.text

    def unload(self, name: str) -> None:
        """Unload an adapter; fails if it is not loaded."""
        answer = self.client.post("/v1/unload_lora_adapter", json={"lora_name": name})
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module", params=["sim", pytest.param("vllm", marks=pytest.mark.vllm)])
def bench(
    request: pytest.FixtureRequest, engine_of: Callable[[Kind], RunningEngine], adapters: dict[str, Path]
) -> Iterator[EngineUnderTest]:
    """An engine without adapters, its client, and its KV events from now on."""
    engine = engine_of(request.param)
    context: zmq.Context[Any] = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.set_hwm(0)
    sub.connect(engine.kv_endpoint)
    sub.subscribe(b"")
    try:
        with httpx.Client(base_url=engine.url, timeout=120) as client:
            bench = EngineUnderTest(engine, client, KVEventSubscriber(sub), adapters)
            unload_all(client)
            _wait_for_subscription(bench)
            yield bench
            if engine.process.poll() is None:
                unload_all(client)
    finally:
        sub.close(linger=0)
        context.term()


def _wait_for_subscription(bench: EngineUnderTest) -> None:
    """Wait until the subscription takes effect."""
    for _ in range(200):
        bench.complete(bench.tokens(1))
        if bench.wire.sub.poll(50):
            bench.settle()
            return
    raise AssertionError("no KV events came")
