"""Eight workers need one adapter at the same moment: the bytes that its slow source sends, and the time until all load.

python -m benchmarks.fetch [--quick] [--json FILE]

An orchestrator and eight agents with sims on loopback; the source sends so many bytes a second to all together. In the
same run eight fetches from it at once, as workers without one another would make.
"""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI

from benchmarks.fetch.source import SlowDownloader
from benchmarks.report import ReportRow, arguments, show
from benchmarks.row_runner import RowFailed
from lorafleet.http_server.serve import bind
from lorafleet.local.tiny_model import make_adapter, make_model
from orchestrator.app import build as build_orchestrator
from orchestrator.config import OrchestratorSettings
from workers.app import build as build_worker
from workers.config import WorkerSettings

WORKERS = 8
WALL_REACH = 0.5
SERVED_REACH = 1.05
_LORA_ID = "far/v1"
_RANK = 256
_DEADLINE_S = 120.0


async def rows(folder: Path, *, quick: bool) -> list[ReportRow]:
    """The rows of one run."""
    shelf = folder / "shelf"
    size = sum(path.stat().st_size for path in make_adapter(shelf, _LORA_ID, rank=_RANK).iterdir())
    SlowDownloader.folder, SlowDownloader.bytes_per_s = shelf, size / (0.5 if quick else 4.0)
    async with _fleet(folder) as http:
        began = time.monotonic()
        fetches = (asyncio.to_thread(SlowDownloader().download_lora_to_disk, _LORA_ID) for _ in range(WORKERS))
        for model in await asyncio.gather(*fetches):
            shutil.rmtree(model.local_path)
        alone_s, SlowDownloader.served = time.monotonic() - began, 0
        began = time.monotonic()
        policy = {"loading": "eager", "min_replicas": WORKERS}
        spec = {"lora_id": _LORA_ID, "source": f"plugin://{_LORA_ID}", "policy": policy}
        (await http.post("/v1/adapters", json=spec)).raise_for_status()
        await _until(lambda: _is_everywhere(http), f"{_LORA_ID} is ready on {WORKERS} workers")
        ours_s = time.monotonic() - began
    return [
        ReportRow(
            what=f"bytes that the source sent, for {WORKERS} workers", value=SlowDownloader.served / size,
            unit="adapters", reach=SERVED_REACH,
        ),
        ReportRow(
            what=f"ready on {WORKERS} workers, inspection and loads included", value=ours_s, unit="s",
            baseline=f"{WORKERS} fetches at once from the source", baseline_value=alone_s, reach_ratio=WALL_REACH,
        ),
    ]  # fmt: skip


@contextlib.asynccontextmanager
async def _fleet(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the orchestrator of a fleet whose workers are all ready."""
    model = make_model(folder / "model")
    async with contextlib.AsyncExitStack() as stack:
        settings = OrchestratorSettings(
            store=folder / "store.db", settle_s=0.5, pass_interval_s=0.5, heartbeat_interval_s=0.5
        )
        url = await stack.enter_async_context(_serving(build_orchestrator(settings).app))
        for number in range(WORKERS):
            at = folder / f"w{number}"
            worker = WorkerSettings(
                instance_id=f"w{number}", engine="sim", engine_port=0, engine_output=False, model=str(model),
                served_model_name="tiny-qwen", max_lora_rank=_RANK, max_loras=2, max_cpu_loras=4,
                state_dir=at / "state", cache_dir=at / "cache", ipc_dir=folder / "ipc", orchestrator_url=url,
                warm_deadline_s=0, lora_downloader_plugin="benchmarks.fetch.source.SlowDownloader",
            )  # fmt: skip
            sock = bind("127.0.0.1", 0)
            built = build_worker(worker, port=sock.getsockname()[1])
            await stack.enter_async_context(_serving(built.app, sock))
            stack.callback(built.stop)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30.0))
        await _until(lambda: _are_ready(http), f"{WORKERS} workers are ready")
        yield http


async def _has_started(server: uvicorn.Server) -> bool:
    return server.started


async def _are_ready(http: httpx.AsyncClient) -> bool:
    items = (await http.get("/v1/workers")).json()["data"]
    return sum(item["state"] == "ready" for item in items) == WORKERS


async def _is_everywhere(http: httpx.AsyncClient) -> bool:
    status = (await http.get(f"/v1/adapters/{_LORA_ID}")).json()["status"]
    if status["error"]:
        raise RowFailed(f"{_LORA_ID}: {status['error']}")
    return bool(status["replicas"]["ready"] == WORKERS)


async def _until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Poll until this holds. Raises RowFailed."""
    deadline = time.monotonic() + _DEADLINE_S
    while not await holds():
        if time.monotonic() > deadline:
            raise RowFailed(f"{what}: not within {_DEADLINE_S:g} s")
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def _serving(app: FastAPI, sock: object = None) -> AsyncIterator[str]:
    """The app's URL while it serves."""
    listener = sock or bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, ws="none", log_config=None, timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve([listener]))  # type: ignore[list-item]
    await _until(lambda: _has_started(server), "a server has started")
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"  # type: ignore[attr-defined]
    finally:
        server.should_exit = True
        await task


def main() -> None:
    """Measure, print the table, and write it as JSON if asked."""
    args = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        found = asyncio.run(rows(Path(folder), quick=args.quick))
    show("Adapters from one another", found, args.json)


if __name__ == "__main__":
    main()
