"""What a running agent adds to its engine's own times, and what it takes while nothing happens."""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import httpx

from benchmarks.report import ReportRow
from lorafleet.engine.canary import BaseReadings, run_canary
from lorafleet.local.tiny_model import make_adapter, make_model
from workers.engines.kinds import engine_client

LOAD_REACH_MS = 20.0
RESTORE_REACH = 1.2
IDLE_REACH_PERCENT = 1.0
MEMORY_REACH_MB = 120.0
EVENT_REACH_MS = 50.0
CANARY_REACH_MS = 100.0
_SLOTS = 64
_START_S = 300.0


@dataclass(slots=True)
class _RunningAgent:
    """An agent that has started its engine."""

    process: asyncio.subprocess.Process
    agent: httpx.AsyncClient
    engine: httpx.AsyncClient
    state: Path


async def rows(folder: Path, *, quick: bool) -> list[ReportRow]:
    """Beside vLLM on the CPU where it is installed, else (and when quick) beside the sim."""
    engine = "sim" if quick or importlib.util.find_spec("vllm") is None else "vllm"
    count, rounds, idle_s = (8, 10, 3.0) if quick else (50, 40, 30.0)
    shelf = folder / "adapters"
    names = [f"bench-{number}/v1" for number in range(count)]
    for name in names:
        make_adapter(shelf, name)
    async with _agent(engine, make_model(folder / "model"), shelf, folder) as it:
        paths = {name: await _inspected(it, shelf, name) for name in names}
        ours_ms, own_ms = await _loads(it, names, paths, rounds)
        offered_ms, called_ms = await _first_requests(it, names[:rounds])
        stalled_ms, own_stall_ms = await _stalls(it, names, paths, max(4, rounds // 4))
        first_ms, next_ms = await _canaries(it, names[0], rounds)
        event_ms = await _events(it, names, rounds)
        restored_s, loaded_s = await _restores(it, names, paths)
        cpu_percent, rss_mb = await _idle(it, idle_s)
    beside = {"vllm": "vLLM on the CPU", "sim": "the sim"}[engine]
    return [
        ReportRow(
            f"a cached adapter loaded through the agent, beyond {beside}'s own call (medians of {rounds})",
            ours_ms - own_ms, "ms", LOAD_REACH_MS, "own call", own_ms,
        ),
        ReportRow(
            f"an adapter's load and its first request, loaded by that request (medians of {min(rounds, count)})",
            offered_ms, "ms", None, "by a call before it", called_ms,
        ),
        ReportRow(
            f"canary of an adapter at {beside}, of the first after a start and of the next (medians of {rounds})",
            next_ms, "ms", CANARY_REACH_MS, "first", first_ms,
        ),
        ReportRow(
            "longest pause of a stream beside a load through the agent", stalled_ms, "ms", None,
            "own call", own_stall_ms,
        ),
        ReportRow(
            f"{count} adapters loaded again after {beside} restarted, by the time of as many own calls",
            restored_s / loaded_s, "x", RESTORE_REACH, "own calls, s", loaded_s,
        ),
        ReportRow(f"an event of the agent heard over its stream (p95 of {2 * rounds})", event_ms, "ms", EVENT_REACH_MS),
        ReportRow(f"agent at rest beside {count} adapters: one core", cpu_percent, "%", IDLE_REACH_PERCENT),
        ReportRow("agent at rest: memory", rss_mb, "MB", MEMORY_REACH_MB),
    ]  # fmt: skip


@contextlib.asynccontextmanager
async def _agent(engine: str, model: Path, shelf: Path, folder: Path) -> AsyncIterator[_RunningAgent]:
    port_file, state = folder / "port", folder / "state"
    command = (
        sys.executable, "-P", "-m", "workers",
        "--engine", engine, "--model", str(model), "--served-model-name", "tiny-qwen",
        "--max-loras", "2", "--max-cpu-loras", str(_SLOTS), "--max-lora-rank", "16", "--max-model-len", "2048",
        "--max-num-seqs", "8", "--max-num-batched-tokens", "2048", "--num-gpu-blocks-override", "256",
        "--lora-roots", f'["{shelf}"]', "--cache-dir", str(folder / "cache"), "--state-dir", str(state), "--port", "0",
        "--engine-port", "0", "--port-file", str(port_file), "--scan-s", "5", "--engine-shutdown-s", "1",
        "--crash-loop-retry-s", "0.2", "--crash-loop-after", "1",
    )  # fmt: skip
    with (folder / "agent.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        await _until(lambda: asyncio.to_thread(port_file.exists))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_file.read_text()}", timeout=120) as agent:
            await _ready(agent)
            url = (await agent.get("/metadata")).json()["transport"]["engine_url"]
            async with httpx.AsyncClient(base_url=url, timeout=120) as own:
                yield _RunningAgent(process, agent, own, state)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def _loads(it: _RunningAgent, names: list[str], paths: dict[str, str], rounds: int) -> tuple[float, float]:
    """Milliseconds of a load through the agent, and of the engine's own call, taken in turn; medians."""
    ours: list[float] = []
    own: list[float] = []
    for number in range(rounds + 1):
        name = names[number % len(names)]
        ours.append(await _timed(it.agent, "/v1/admin/load_lora", {"lora_id": name}))
        await _post(it.agent, "/v1/admin/unload_lora", {"lora_id": name})
        own.append(await _timed(it.engine, "/v1/load_lora_adapter", {"lora_name": "own", "lora_path": paths[name]}))
        await _post(it.engine, "/v1/unload_lora_adapter", {"lora_name": "own"})
    return median(ours[1:]) * 1e3, median(own[1:]) * 1e3  # the first of all warms the engine up


async def _canaries(it: _RunningAgent, name: str, rounds: int) -> tuple[float, float]:
    """Milliseconds of a canary that asks the base model, too, and of one that need not; medians.

    Where the engine reports its modules, the agent runs none.
    """
    adapter = (await _post(it.agent, "/v1/admin/load_lora", {"lora_id": name})).json()["engine_name"]
    client = engine_client("vllm", str(it.engine.base_url))
    ask = partial(client.fingerprint, base_model="tiny-qwen")
    first: list[float] = []
    later: list[float] = []
    for _ in range(rounds):
        readings = BaseReadings()
        for durations in (first, later):
            began = time.perf_counter()
            result = await run_canary(ask, adapter, readings=readings, timeout_s=60)
            durations.append(time.perf_counter() - began)
            if result.outcome != "seen":
                raise RuntimeError(f"the canary of {adapter}: {result}")
    await client.aclose()
    await _post(it.agent, "/v1/admin/unload_lora", {"lora_id": name})
    return median(first) * 1e3, median(later) * 1e3


async def _stalls(it: _RunningAgent, names: list[str], paths: dict[str, str], rounds: int) -> tuple[float, float]:
    """Milliseconds of the longest pause between two tokens of a stream during a load: the agent's, and an own one."""
    ours: list[float] = []
    own: list[float] = []
    for name in names[:rounds]:
        load = {"lora_id": name}
        ours.append(await _longest_pause(it.engine, partial(_post, it.agent, "/v1/admin/load_lora", load)))
        await _post(it.agent, "/v1/admin/unload_lora", load)
        load = {"lora_name": "own", "lora_path": paths[name]}
        own.append(await _longest_pause(it.engine, partial(_post, it.engine, "/v1/load_lora_adapter", load)))
        await _post(it.engine, "/v1/unload_lora_adapter", {"lora_name": "own"})
    return median(ours) * 1e3, median(own) * 1e3


async def _longest_pause(engine: httpx.AsyncClient, load: Callable[[], Awaitable[object]]) -> float:
    """Of a stream of 64 tokens in whose middle something is loaded; seconds."""
    body = {"model": "tiny-qwen", "prompt": "a", "max_tokens": 64, "stream": True, "ignore_eos": True}
    heard: list[float] = []
    loading: asyncio.Task[object] | None = None
    async with engine.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            heard.append(time.perf_counter())
            if len(heard) == 8:
                loading = asyncio.ensure_future(load())
    if loading is not None:
        await loading
    return max(later - earlier for earlier, later in pairwise(heard))


async def _events(it: _RunningAgent, names: list[str], rounds: int) -> float:
    """Milliseconds from an event to whoever follows the stream: p95, as others have the machine at times."""
    delays: list[float] = []
    async with it.agent.stream("GET", "/v1/events") as stream:
        lines = stream.aiter_lines()
        await anext(lines)

        async def hear() -> None:
            async for line in lines:
                if line.startswith("data: "):
                    at = datetime.fromisoformat(json.loads(line[6:])["at"])
                    delays.append((time.time() - at.timestamp()) * 1e3)
                    if len(delays) == 2 * rounds:
                        return

        hearing = asyncio.create_task(hear())
        for number in range(rounds):
            name = names[number % len(names)]
            await _post(it.agent, "/v1/admin/load_lora", {"lora_id": name})
            await _post(it.agent, "/v1/admin/unload_lora", {"lora_id": name})
        await asyncio.wait_for(hearing, 10)
    return sorted(delays)[len(delays) * 95 // 100]


async def _restores(it: _RunningAgent, names: list[str], paths: dict[str, str]) -> tuple[float, float]:
    """Seconds until an engine that is up again has all its adapters, and of as many own calls on such an engine."""
    await _restarted(it)
    began = time.perf_counter()
    for number, name in enumerate(names):
        await _post(it.engine, "/v1/load_lora_adapter", {"lora_name": f"own-{number}", "lora_path": paths[name]})
    loaded_s = time.perf_counter() - began
    for number in range(len(names)):
        await _post(it.engine, "/v1/unload_lora_adapter", {"lora_name": f"own-{number}"})
    await _until(lambda: _has_no_strangers(it.agent))
    for name in names:
        await _post(it.agent, "/v1/admin/load_lora", {"lora_id": name})
    return await _restarted(it), loaded_s


async def _restarted(it: _RunningAgent) -> float:
    """Kill the engine; seconds from the first sign of health of the next one to a worker that is ready."""
    before = (await it.agent.get("/metadata")).json()["engine_boot_id"]
    async with it.agent.stream("GET", "/v1/events", timeout=_START_S) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        os.kill(int((it.state / "engine.pid").read_text()), signal.SIGKILL)
        await _until(lambda: _is_another(it.agent, before))
        await _until(lambda: _is_up(it.engine))
        began = time.time()
        async for line in lines:  # not asked again and again meanwhile: that would take the agent's time
            if line.startswith("data: ") and (event := json.loads(line[6:]))["type"] == "ENGINE_UP":
                return datetime.fromisoformat(event["at"]).timestamp() - began
    raise RuntimeError("the agent ended its stream")


async def _has_no_strangers(agent: httpx.AsyncClient) -> bool:
    """Whether the agent, which looks at the engine's list every few seconds, has seen that our own loads are gone."""
    return bool((await agent.get("/metadata")).json()["lora"]["capacity"]["loaded_count"] == 0)


async def _is_another(agent: httpx.AsyncClient, boot_id: str) -> bool:
    return bool((await agent.get("/metadata")).json()["engine_boot_id"] != boot_id)


async def _idle(it: _RunningAgent, seconds: float) -> tuple[float, float]:
    """Percent of one core and MB of the agent's process, its engine aside, followed by one reader of events."""
    async with it.agent.stream("GET", "/v1/events"):
        await asyncio.sleep(1.0)
        began, used = time.perf_counter(), _cpu_s(it.process.pid)
        await asyncio.sleep(seconds)
        percent = (_cpu_s(it.process.pid) - used) / (time.perf_counter() - began) * 100
    return percent, _resident_mb(it.process.pid)


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) * 1024 / 1e6


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _is_up(engine: httpx.AsyncClient) -> bool:
    try:
        return (await engine.get("/health", timeout=1.0)).is_success
    except httpx.HTTPError:
        return False


async def _is_ready(agent: httpx.AsyncClient) -> bool:
    return (await agent.get("/ready")).is_success


async def _ready(agent: httpx.AsyncClient) -> None:
    await _until(lambda: _is_ready(agent))


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_START_S):
        while not await holds():  # noqa: ASYNC110  (it is another process that it waits for)
            await asyncio.sleep(0.005)


async def _first_requests(it: _RunningAgent, names: list[str]) -> tuple[float, float]:
    """Milliseconds of a load and its adapter's first request, loaded by that request and by a call; medians.

    The engine has had the adapters before.
    """
    by_way: dict[bool, list[float]] = {True: [], False: []}
    for name in names:
        for is_awaited, times in by_way.items():
            began = time.perf_counter()
            body = {"lora_id": name, "is_awaited": is_awaited}
            adapter = (await _post(it.agent, "/v1/admin/load_lora", body)).json()
            ask = {"model": adapter["engine_name"], "prompt": "hello", "max_tokens": 1}
            await _post(it.engine, "/v1/completions", ask)
            times.append(time.perf_counter() - began)
            if is_awaited != (adapter["location"] == "disk"):
                raise RuntimeError(f"{name} is at {adapter['location']} after a load with is_awaited {is_awaited}")
            await _post(it.agent, "/v1/admin/unload_lora", {"lora_id": name})
    return median(by_way[True]) * 1e3, median(by_way[False]) * 1e3


async def _inspected(it: _RunningAgent, shelf: Path, name: str) -> str:
    answer = await _post(it.agent, "/v1/admin/inspect_lora", {"lora_id": name, "source": str(shelf / name)})
    return str(answer.json()["path"])


async def _timed(client: httpx.AsyncClient, path: str, body: Mapping[str, object]) -> float:
    began = time.perf_counter()
    await _post(client, path, body)
    return time.perf_counter() - began


async def _post(client: httpx.AsyncClient, path: str, body: Mapping[str, object]) -> httpx.Response:
    answer = await client.post(path, json=body)
    if not answer.is_success:
        raise RuntimeError(f"{path} {body}: HTTP {answer.status_code}: {answer.text[:500]}")
    return answer
