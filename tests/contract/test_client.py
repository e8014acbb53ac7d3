"""The contract of every engine client: one suite for all kinds of engines."""

import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq.asyncio

from lorafleet.identity import Tier, block_hashes, root_hash
from lorafleet.kv.events import KvEventDecoder
from lorafleet.kv.ledger import TRAITS, BlockLedger
from router.request.engine_body import NO_OPTIONS, dialect_of
from tests.contract.conftest import FRESH
from tests.engines import Kind, RunningEngine
from tests.patience import within
from tests.workers.broken import BrokenAdapter, pairs
from workers.core.errors import EngineError
from workers.engines.base import EngineClient
from workers.engines.kinds import engine_client

BASE, BLOCK = "tiny-qwen", 32
KINDS = ["sim", "sglang", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module", params=KINDS)
def running(request: pytest.FixtureRequest, engine_of: Callable[[Kind], RunningEngine]) -> RunningEngine:
    return engine_of(request.param)


class CachedHashes(set[int]):
    """Our hashes of the device blocks in the engine's events."""

    def add(self, tier: Tier, hashes: Any) -> None:  # type: ignore[override]
        assert tier == "device"
        self.update(hashes)

    def drop(self, tier: Tier, hashes: Any) -> None:
        self.difference_update(hashes)


@dataclass
class ClientUnderTest:
    """An engine, its client, and a ledger fed by its events."""

    kind: str
    engine: EngineClient
    http: httpx.AsyncClient
    sub: zmq.asyncio.Socket
    adapters: dict[str, Path]
    cached: CachedHashes = field(default_factory=CachedHashes)

    def __post_init__(self) -> None:
        self.dialect = dialect_of(self.engine.traits.dialect, engine_name="")
        self.traits = TRAITS[self.engine.traits.dialect]
        self.ledger = BlockLedger(BASE, BLOCK, self.cached, self.traits)
        self._decode = KvEventDecoder().decode

    def tokens(self, blocks: int) -> list[int]:
        """Token ids of whole blocks and one more token, unused by other tests."""
        first = next(FRESH)
        return [300 + first % 1000, 400 + first % 60, *range(500, 500 + blocks * BLOCK - 1)]

    def hashes(self, tokens: list[int], name: str = "", salt: str = "") -> set[int]:
        return set(block_hashes(tokens, block_size=BLOCK, root=root_hash(BASE, name, salt)))

    async def ask(self, prompt: Any, adapter: str = "", **more: Any) -> httpx.Response:
        """POST the request as a router sends it."""
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | more
        fields = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in body.items()}
        dressed = self.dialect.body(fields, self.dialect.model(BASE, adapter), NO_OPTIONS)
        return await self.http.post("/v1/completions", content=dressed, headers={"content-type": "application/json"})

    async def text(self, prompt: Any, adapter: str = "", **more: Any) -> str:
        answer = await self.ask(prompt, adapter, **more)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def until_cached(self, wanted: set[int]) -> None:
        async with within(10):
            while not wanted <= self.cached:
                self.ledger.apply(self._decode((await self.sub.recv_multipart())[2]))

    async def settle(self) -> None:
        """Wait for the events of all requests so far."""
        marker = self.tokens(1)
        await self.text(marker)
        await self.until_cached(self.hashes(marker))


@pytest.fixture
async def bench(running: RunningEngine, adapters: dict[str, Path]) -> AsyncIterator[ClientUnderTest]:
    engine = engine_client(running.kind, running.url)
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    sub.set_hwm(0)
    sub.connect(running.kv_endpoint)
    sub.subscribe(b"")
    try:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
            bench = ClientUnderTest(running.kind, engine, http, sub, adapters)
            await _wait_for_subscription(bench)
            yield bench
            for name in await engine.list_adapters():
                await engine.unload(name, timeout_s=30)
    finally:
        await engine.aclose()
        sub.close(linger=0)
        context.term()


async def _wait_for_subscription(bench: ClientUnderTest) -> None:
    """Wait until the subscription takes effect."""
    while True:
        await bench.text(bench.tokens(1))
        if await bench.sub.poll(50):
            break


# --- adapters


async def test_loaded_adapter_is_listed_with_its_path_and_a_second_load_is_fine(bench: ClientUnderTest) -> None:
    for _ in range(2):
        await bench.engine.load("sql/v1@1", bench.adapters["sql"], timeout_s=30)
        assert await bench.engine.list_adapters() == {"sql/v1@1": str(bench.adapters["sql"])}


async def test_unloaded_adapter_is_not_listed_and_a_second_unload_is_fine(bench: ClientUnderTest) -> None:
    await bench.engine.load("sql/v1@1", bench.adapters["sql"], timeout_s=30)
    for _ in range(2):
        await bench.engine.unload("sql/v1@1", timeout_s=30)
        assert await bench.engine.list_adapters() == {}
    await bench.engine.load("sql/v1@1", bench.adapters["sql"], timeout_s=30)
    assert "sql/v1@1" in await bench.engine.list_adapters()


async def test_loading_other_files_under_a_loaded_name_is_refused(bench: ClientUnderTest) -> None:
    await bench.engine.load("sql/v1@1", bench.adapters["sql"], timeout_s=30)
    with pytest.raises(EngineError, match="already") as refused:
        await bench.engine.load("sql/v1@1", bench.adapters["legal"], timeout_s=30)
    assert refused.value.code == "adapter_refused"


@pytest.mark.parametrize(
    ("fault", "message"), [("rank", "rank"), ("dora", "DoRA"), ("noconfig", "adapter_config|No adapter found")]
)
async def test_bad_adapter_is_refused_with_the_engines_reason(
    bench: ClientUnderTest, bad_adapters: dict[str, Path], fault: str, message: str
) -> None:
    with pytest.raises(EngineError, match=message) as refused:
        await bench.engine.load("bad@1", bad_adapters[fault], timeout_s=30)
    assert refused.value.code == "adapter_refused"
    assert await bench.engine.list_adapters() == {}


async def test_each_adapter_answers_with_its_own_text_and_name(bench: ClientUnderTest) -> None:
    await bench.engine.load("sql/v1@1", bench.adapters["sql"], timeout_s=30)
    await bench.engine.load("legal/v2@2", bench.adapters["legal"], timeout_s=30)
    prompt = bench.tokens(1)
    message = {name: await bench.text(prompt, name, max_tokens=8) for name in ("", "sql/v1@1", "legal/v2@2")}
    assert len(set(message.values())) == 3
    for name in message:
        assert (await bench.ask(prompt, name)).json()["model"] == bench.dialect.model(BASE, name)


async def test_request_for_an_unloaded_adapter_is_an_error(
    bench: ClientUnderTest,
) -> None:
    assert (await bench.ask("x", "never/v1@1")).status_code in (400, 404)


# --- engine state


async def test_client_reads_the_engines_shape(bench: ClientUnderTest) -> None:
    shape = await bench.engine.read_shape()
    assert (shape.runtime.block_size, shape.runtime.max_model_len, shape.model_name) == (BLOCK, 2048, BASE)
    assert shape.runtime.total_kv_blocks == 256


async def test_metrics_count_computed_and_cached_tokens(bench: ClientUnderTest) -> None:
    prompt = bench.tokens(3)
    before = await bench.engine.scrape()
    await bench.text(prompt, max_tokens=5)
    once = await bench.engine.scrape()
    assert once.computed_tokens - before.computed_tokens == len(prompt)
    assert (once.ended - before.ended, once.ended_output_tokens - before.ended_output_tokens) == (1, 5)
    assert once.steps > before.steps
    assert once.ended_seconds > before.ended_seconds
    await bench.text(prompt, max_tokens=1)
    again = await bench.engine.scrape()
    assert again.computed_tokens - once.computed_tokens == len(prompt) - 3 * BLOCK
    assert (again.running, again.waiting) == (0, 0)


async def test_request_counts_as_running_from_first_token_until_client_disconnects(
    bench: ClientUnderTest,
) -> None:
    body = {"model": BASE, "prompt": bench.tokens(1), "max_tokens": 1500, "ignore_eos": True, "stream": True}
    for _ in range(5):  # if this process stalls for a second, it misses the whole answer
        async with bench.http.stream("POST", "/v1/completions", json=body) as answer:
            assert (await anext(answer.aiter_lines())).startswith("data: {")
            scrape = await bench.engine.scrape()
        if scrape.running:
            break
    assert (scrape.running, scrape.waiting) == (1, 0)
    async with within(10):
        while (await bench.engine.scrape()).running:
            pass


async def test_answers_report_cached_tokens(bench: ClientUnderTest) -> None:
    prompt = bench.tokens(2)
    await bench.text(prompt)
    usage = (await bench.ask(prompt)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * BLOCK


async def test_engine_is_healthy_generates_and_keeps_its_boot_mark(bench: ClientUnderTest) -> None:
    assert await bench.engine.is_healthy(timeout_s=10)
    assert await bench.engine.can_generate(BASE, timeout_s=30)
    assert await bench.engine.boot_mark() == await bench.engine.boot_mark()


@pytest.mark.parametrize("running", KINDS[2:], indirect=True)  # the other engines have no separate core process
async def test_hanging_core_stays_healthy_but_its_counters_stop(bench: ClientUnderTest, running: RunningEngine) -> None:
    body = {"model": BASE, "prompt": bench.tokens(1), "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with bench.http.stream("POST", "/v1/completions", json=body) as answer:
        assert (await anext(answer.aiter_lines())).startswith("data: {")
        cores = _engine_core_pids(running.process.pid)
        assert cores
        try:
            for core in cores:
                os.kill(core, signal.SIGSTOP)
            assert not await bench.engine.can_generate(BASE, timeout_s=1)
            scrape = await bench.engine.scrape()
            assert await bench.engine.is_healthy(timeout_s=10)
            assert not await bench.engine.can_generate(BASE, timeout_s=1)
            assert await bench.engine.scrape() == scrape
        finally:
            for core in cores:
                os.kill(core, signal.SIGCONT)
    assert await bench.engine.can_generate(BASE, timeout_s=30)
    assert await bench.engine.scrape() != scrape


def _engine_core_pids(server: int) -> list[int]:
    """PIDs of a vLLM's engine cores: the descendants of its API server with vLLM's process name."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, _, rest = stat.read_text().partition(" (")
            name, _, fields = rest.rpartition(") ")
            parents[int(pid)] = name, int(fields.split()[1])

    def is_below(pid: int) -> bool:
        return pid == server or (pid in parents and is_below(parents[pid][1]))

    return [pid for pid, (name, _) in parents.items() if name.startswith("VLLM::") and is_below(pid)]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "sgl-jax"])
async def test_missing_engine_is_unreachable(kind: str) -> None:
    gone = engine_client(kind, "http://127.0.0.1:1")
    assert not await gone.is_healthy(timeout_s=1)
    for ask in (gone.list_adapters, gone.scrape, gone.read_shape, gone.boot_mark):
        with pytest.raises(EngineError) as refused:
            await ask()
        assert refused.value.code == "engine_unreachable"
    await gone.aclose()


# --- cache and events


async def test_kv_events_separate_blocks_by_adapter_and_salt(bench: ClientUnderTest) -> None:
    await bench.engine.load("sql/v1@1", bench.adapters["sql"], timeout_s=30)
    prompt = bench.tokens(2)
    roots = [{}, {"name": "sql/v1@1"}, {"salt": "tenant"}, {"name": "sql/v1@1", "salt": "tenant"}]
    for root in roots:
        more = {"cache_salt": root["salt"]} if "salt" in root else {}
        answer = await bench.ask(prompt, root.get("name", ""), **more)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, root
        await bench.until_cached(bench.hashes(prompt, **root))
        for other in roots[roots.index(root) + 1 :]:
            assert bench.cached.isdisjoint(bench.hashes(prompt, **other)), (root, other)
    assert not bench.ledger.rejected


async def test_ledger_agrees_with_the_engine_after_unload_and_load(bench: ClientUnderTest) -> None:
    prompt = bench.tokens(2)
    await bench.engine.load("sql/v1@1", bench.adapters["sql"], timeout_s=30)
    await bench.text(prompt, "sql/v1@1")
    await bench.until_cached(bench.hashes(prompt, "sql/v1@1"))
    await bench.engine.unload("sql/v1@1", timeout_s=30)
    await bench.engine.load("sql/v1@1", bench.adapters["sql"], timeout_s=30)
    if bench.traits.forgets_on_load:
        bench.ledger.forget_adapter("sql/v1@1")
    await bench.settle()
    believed = len(bench.hashes(prompt, "sql/v1@1") & bench.cached) * BLOCK
    answer = await bench.ask(prompt, "sql/v1@1")
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == believed
    assert (believed == 0) == bench.traits.forgets_on_load
    await bench.until_cached(bench.hashes(prompt, "sql/v1@1"))


async def test_evicted_blocks_are_reported(bench: ClientUnderTest) -> None:
    old = bench.tokens(2)
    await bench.text(old)
    await bench.until_cached(bench.hashes(old))
    for _ in range(5):  # 5 x 60 blocks into a pool of 256
        await bench.text(bench.tokens(60))
    await bench.settle()
    assert bench.cached.isdisjoint(bench.hashes(old))
    usage = (await bench.ask(old)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


# --- SGLang's peculiarities


only_sglang = pytest.mark.parametrize("running", ["sglang"], indirect=True)


@only_sglang
async def test_sglang_answers_a_bare_adapter_name_with_the_base_model(bench: ClientUnderTest) -> None:
    await bench.engine.load("sql/v1@1", bench.adapters["sql"], timeout_s=30)
    prompt = bench.tokens(1)
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "model": "sql/v1@1"}
    answer = await bench.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == await bench.text(prompt)


ATTENTION = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256)}
GATED = {"mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512)}


def adapter_on_modules(*leaves: str) -> dict[str, Any]:
    """An adapter with these modules only."""
    modules = {name: shape for name, shape in (ATTENTION | GATED).items() if name.split(".")[1] in leaves}
    return {"config": {"target_modules": list(leaves)}, "tensors": lambda _: pairs(modules=modules)}


@only_sglang
@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ({"config": {"use_rslora": True}, "tensors": adapter_on_modules("q_proj", "v_proj")["tensors"]}, "use_rslora"),
        (
            {"config": {"alpha_pattern": {"q_proj": 4}}, "tensors": adapter_on_modules("q_proj", "v_proj")["tensors"]},
            "alpha_pattern",
        ),
        (
            {
                "config": {"rank_pattern": {"down_proj": 4}},
                "tensors": lambda _: pairs(modules=GATED) | pairs(4, modules={"mlp.down_proj": (256, 512)}),
            },
            "rank 4, r is 8",
        ),
        (adapter_on_modules("q_proj"), "q_proj alone"),
        (adapter_on_modules("q_proj", "k_proj"), "k_proj, q_proj alone"),
        (adapter_on_modules("v_proj"), "v_proj alone"),
        (adapter_on_modules("k_proj", "v_proj"), "k_proj, v_proj alone"),
        (adapter_on_modules("up_proj"), "up_proj alone"),
    ],
)
async def test_adapter_that_sglang_serves_wrongly_is_refused(
    bench: ClientUnderTest, tmp_path: Path, flaw: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message) as refused:
        await bench.engine.load("flawed@1", BrokenAdapter("flawed", None, **flaw).write(tmp_path), timeout_s=30)
    assert refused.value.code == "adapter_refused"
    assert await bench.engine.list_adapters() == {}


@only_sglang
@pytest.mark.parametrize("leaves", [("q_proj", "v_proj"), ("gate_proj",), ("down_proj",)])
async def test_adapter_on_some_modules_loads_and_answers(
    bench: ClientUnderTest, tmp_path: Path, leaves: tuple[str, ...]
) -> None:
    await bench.engine.load(
        "part@1", BrokenAdapter("part", None, **adapter_on_modules(*leaves)).write(tmp_path), timeout_s=30
    )
    assert await bench.text(bench.tokens(1), "part@1")


@only_sglang
async def test_sglang_responses_route_ignores_the_named_adapter(bench: ClientUnderTest) -> None:
    await bench.engine.load("sql/v1@1", bench.adapters["sql"], timeout_s=30)

    async def message(path: str, model: str, body: dict[str, Any]) -> str:
        answer = await bench.http.post(path, json={"model": model, "temperature": 0} | body)
        assert answer.status_code == 200, answer.text
        content = answer.json()
        return str(content["output"][0]["content"][0]["text"] if "output" in content else content["choices"][0])

    response, chat = {"input": "hi", "max_output_tokens": 8}, {"messages": [{"role": "user", "content": "hi"}]}
    adapter = bench.dialect.model(BASE, "sql/v1@1")
    assert await message("/v1/responses", adapter, response) == await message("/v1/responses", BASE, response)
    path = "/v1/chat/completions"
    assert await message(path, adapter, chat | {"max_tokens": 8}) != await message(path, BASE, chat | {"max_tokens": 8})


@only_sglang
async def test_request_for_an_unloaded_adapter_makes_sglang_load_it_again(
    bench: ClientUnderTest, tmp_path: Path
) -> None:
    files = Path(shutil.copytree(bench.adapters["sql"], tmp_path / "sql"))
    await bench.engine.load("ghost/v1@1", files, timeout_s=30)
    await bench.engine.unload("ghost/v1@1", timeout_s=30)
    await bench.text("x", "ghost/v1@1")
    assert "ghost/v1@1" in await bench.engine.list_adapters()
    await bench.engine.unload("ghost/v1@1", timeout_s=30)
    shutil.rmtree(files)
    refused = await bench.ask("x", "ghost/v1@1")
    assert (refused.status_code, "Failed to implicitly load" in refused.text) == (400, True)
