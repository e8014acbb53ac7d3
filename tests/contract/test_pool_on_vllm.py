"""Real vLLM says what it runs adapters with and where it found them, and loads what is offered to it."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from lorafleet.engine.vllm_plugin.catalog_offers import URL_VARIABLE
from lorafleet.engine.vllm_plugin.lora_reports import REPORTS_VARIABLE
from lorafleet.identity import FileEntry, files_digest
from lorafleet.local.tiny_model import make_adapter, make_model
from tests.engines import RunningEngine, start_engine
from tests.patience import patience, until
from tests.workers.running import RunningWorker, metadata_of, post

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

RANKS = {"a": 4, "b": 8, "c": 16}


@dataclass(frozen=True)
class SmallPool:
    """A vLLM with one device slot of rank 16, and room for two adapters in host memory."""

    engine: RunningEngine
    model: Path
    adapters: Path
    reports: Path
    catalog: dict[str, dict[str, str]]
    """Offers of an orchestrator, by engine name."""


class Offers(BaseHTTPRequestHandler):
    """The orchestrator's route of offers."""

    catalog: ClassVar[dict[str, dict[str, str]]] = {}

    def do_GET(self) -> None:
        """Answer the offer of the asked name, or 404."""
        (name,) = parse_qs(urlsplit(self.path).query)["engine_name"]
        body = json.dumps(self.catalog.get(name, {})).encode()
        self.send_response(200 if name in self.catalog else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> Iterator[SmallPool]:
    folder = tmp_path_factory.mktemp("pool")
    for name, rank in RANKS.items():
        make_adapter(folder / "adapters", name, rank=rank)
    reports = folder / "reports"
    reports.mkdir()
    model = make_model(folder / "model")
    flags = ("--max-loras", "1", "--max-cpu-loras", "2")
    with ThreadingHTTPServer(("127.0.0.1", 0), Offers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1/workers/e0/offers"
        environment = {REPORTS_VARIABLE: str(reports), URL_VARIABLE: url}
        engine = start_engine("vllm", model, flags=flags, environment=environment)
        yield SmallPool(engine, model, folder / "adapters", reports, Offers.catalog)
        engine.stop()
        server.shutdown()


@asynccontextmanager
async def agent_of(pool: SmallPool, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an agent beside the engine, which reads what its processes write."""
    worker = RunningWorker(pool.model, pool.adapters, folder, "--engine-url", pool.engine.url)
    worker.state_dir.mkdir(parents=True)
    (worker.state_dir / "lora-reports").symlink_to(pool.reports)
    async with worker.inside() as client:
        yield client


async def test_vllm_loads_an_offered_adapter_with_its_first_request_and_no_other(pool, tmp_path):
    async with agent_of(pool, tmp_path) as client, httpx.AsyncClient(timeout=patience(60)) as engine:

        async def ask(name: str) -> tuple[int, str]:
            body = {"model": name, "prompt": "hello", "max_tokens": 4, "temperature": 0}
            answer = await engine.post(f"{pool.engine.url}/v1/completions", json=body)
            return answer.status_code, answer.json()["choices"][0]["text"] if answer.is_success else ""

        async def load() -> dict:
            answer = await post(client, "load_lora", lora_id="a", is_awaited=True)
            return answer.raise_for_status().json()

        first = await load()
        name, own = first["engine_name"], await ask(first["engine_name"])
        assert (first["location"], own[0], (await ask("tiny-qwen"))[1] != own[1]) == ("device", 200, True)
        (await post(client, "unload_lora", lora_id="a")).raise_for_status()
        assert (await ask(name))[0] == 404
        assert (await load())["location"] == "disk"
        assert (await ask("a"))[0] == (await ask(f"{name}0"))[0] == (await ask("../a"))[0] == 404
        assert await asyncio.gather(*(ask(name) for _ in range(4))) == [own] * 4

        async def is_taken() -> bool:
            (lora,) = (await metadata_of(client)).lora.loaded_loras
            return (lora.location, lora.effect) == ("device", "applied") and lora.lora_int_id != first["lora_int_id"]

        await until(is_taken, what="the agent has read the report of the load")
        (await post(client, "unload_lora", lora_id="a")).raise_for_status()
        assert (await ask(name))[0] == 404


async def test_vllm_without_an_agent_loads_what_the_catalog_offers_by_its_bytes(pool):
    folder = pool.adapters / "b"
    files = [folder / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    digest = files_digest(
        FileEntry(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files
    )
    pool.catalog["b@1"] = {"engine_name": "b@1", "path": str(folder), "digest": digest}
    pool.catalog["c@1"] = {"engine_name": "c@1", "path": str(pool.adapters / "c"), "digest": digest}
    async with httpx.AsyncClient(base_url=pool.engine.url, timeout=patience(60)) as engine:

        async def load(name: str) -> int:
            return (await engine.post("/tokenize", json={"model": name, "prompt": "."})).status_code

        assert [await load(name) for name in ("b@1", "c@1", "d@1")] == [200, 404, 404]
        ask = {"model": "b@1", "prompt": "hello", "max_tokens": 1}
        assert (await engine.post("/v1/completions", json=ask)).status_code == 200
        pool.catalog.clear()
        (await engine.post("/v1/unload_lora_adapter", json={"lora_name": "b@1"})).raise_for_status()
        assert await load("b@1") == 404


async def test_vllm_shows_its_kernels_its_slots_and_its_misses(pool, tmp_path):
    async with agent_of(pool, tmp_path) as client:
        loaded = {name: (await post(client, "load_lora", lora_id=name)).raise_for_status().json() for name in RANKS}
        assert (await metadata_of(client)).lora.punica == "PunicaWrapperCPU"
        memories = [loaded[name]["memory"] for name in RANKS]
        assert {memory["by"] for memory in memories} == {"engine"}
        # A slot is padded to rank 16, whatever is in it; the copy in host memory is not.
        assert len({memory["slot_bytes"] for memory in memories}) == 1
        assert memories[2]["host_bytes"] == 2 * memories[1]["host_bytes"] == 4 * memories[0]["host_bytes"]
        # c is in the slot, b in host memory, a was dropped.
        before = await misses(client)
        async with httpx.AsyncClient(timeout=patience(60)) as engine:
            for name in ("c", "b", "a"):
                body = {"model": loaded[name]["engine_name"], "prompt": "hello", "max_tokens": 2}
                (await engine.post(f"{pool.engine.url}/v1/completions", json=body)).raise_for_status()

        async def are_counted() -> bool:
            now = await misses(client)
            return (now[0] - before[0], now[1] - before[1]) == (1.0, 1.0)

        await until(are_counted, what="b was found in host memory, and a on disk")


async def misses(client: httpx.AsyncClient) -> tuple[float, float]:
    """Requests whose adapter was in host memory, and on disk, by the engine's count."""
    page = (await client.get("/metrics")).text.splitlines()
    name = "lorafleet_workers_pool_requests_total"
    lines = [f'{name}{{by="engine",found="{found}"}} ' for found in ("host", "disk")]
    host, disk = (sum(float(line.split()[-1]) for line in page if line.startswith(start)) for start in lines)
    return host, disk
