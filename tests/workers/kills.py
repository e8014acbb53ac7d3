"""kill -9 of agent and engine at random moments: state folder, disk and engine must agree afterwards.

    python -m tests.workers.kills --engine sim --operations 1000 --seed 1
    python -m tests.workers.kills --engine vllm --operations 100 --seed 1 [--attached]

Rounds of concurrent operations (loads, evicting loads, unloads, inspections; half of the adapters come slowly over
https), with one kill per round at a random moment. Meanwhile an observer requests every adapter that the engine lists:
a wrong answer, or a listed folder whose files do not match its digest, is a violation. After each round state folder,
disk, agent and engine must agree again.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import httpx

from lorafleet.local.tiny_model import make_adapter, make_model
from tests.engines import Kind, RunningEngine, start_engine
from tests.patience import patience, within
from tests.workers.running import SIM, RunningWorker, code, post
from tests.workers.source_servers import FaultyConnection, SourceServer, certificate, files_of
from workers.storage.cache import is_intact
from workers.storage.cache_folder import is_resumable_download

LOCAL = ("alpha/v1", "beta/v1", "gamma/v1")
REMOTE = ("delta/v1", "epsilon/v1", "zeta/v1")
SLOTS = 3
ENGINE_FLAGS = ("--max-cpu-loras", str(SLOTS))
ASK = {"prompt": "select the answer from", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
CODES = {
    "cancelled", "disk_full", "done", "engine_down", "engine_timeout", "engine_unreachable", "no_free_slot",
    "not_ready", "source_failed",
}  # fmt: skip


class SlowConnection(FaultyConnection):
    """A connection that pauses every 64 KiB, so that a kill can hit a download."""

    pause_s = 0.02

    async def _down(self, reader, writer) -> None:
        while data := await reader.read(65536):
            self.carried += len(data)
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(self.pause_s)


@dataclass
class KillFindings:
    """The findings of a trial. `violations` must stay empty; `agreed_s`: seconds from kill to agreement, per round."""

    operations: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    violations: list[str] = field(default_factory=list)
    agreed_s: list[float] = field(default_factory=list)
    slowest: str = ""

    def __str__(self) -> str:
        agreed_s = self.agreed_s or [0.0]
        return (
            f"{self.operations} operations {dict(self.outcomes)}, kills {dict(self.kills)}, {self.answers} answers"
            f" looked at, agreed again after {median(agreed_s):.2f} s (most {max(agreed_s):.2f}),"
            f" the slowest waited for {self.slowest or 'nothing'},"
            f" {len(self.violations)} violations {self.violations[:5]}"
        )


class KillTrial:
    """One worker that is killed repeatedly. `engine`: of an attached agent; None: the agent starts its own.

    truth  lora_id -> a clean engine's answer to ASK
    """

    def __init__(
        self, worker: RunningWorker, *, rng: Random, sources: Mapping[str, str], truth: Mapping[str, str],
        engine: RunningEngine | None, agree_within_s: float, may_kill_engine: bool = True,
    ) -> None:  # fmt: skip
        self.worker, self.rng, self.sources, self.truth, self.engine = worker, rng, sources, truth, engine
        self.findings = KillFindings()
        self._agree_within_s = agree_within_s
        self._targets = ("agent", "engine") if may_kill_engine else ("agent",)
        self._life = contextlib.AsyncExitStack()
        self._is_alive = asyncio.Event()

    async def run(self, operations: int, *, per_round: int, least_done: int = 0) -> KillFindings:
        """Run rounds of operations with a kill each, until there were enough; `least_done` of them must succeed.

        On a slow machine most operations meet an engine that is starting. Then there are more rounds, at most three
        times as many.
        """
        await self._start()
        try:
            await self._wait_for_agreement()
            while self.findings.operations < operations or (
                self.findings.outcomes["done"] < least_done and self.findings.operations < 3 * operations
            ):
                await self._round(per_round)
        finally:
            await self._life.aclose()
        return self.findings

    async def _start(self) -> None:
        self.client = await self._life.enter_async_context(self.worker.running(until_ready=False))
        self._is_alive.set()

    async def _round(self, operations: int) -> None:
        span_s = 1.0 + operations * 0.02
        plan = [(self.rng.uniform(0, span_s), *self._draw_operation()) for _ in range(operations)]
        target, after_s = self.rng.choice(self._targets), self.rng.uniform(0.05, span_s)
        calls = asyncio.gather(*(self._run_operation(*each) for each in plan))
        observing = asyncio.create_task(self._check_served_adapters())
        try:
            await asyncio.sleep(after_s)
            began = time.monotonic()
            await self._kill(target)
            await calls
            waited_for = await self._wait_for_agreement()
        finally:
            observing.cancel()
            await asyncio.gather(observing, return_exceptions=True)
        self.findings.agreed_s.append(time.monotonic() - began)
        if self.findings.agreed_s[-1] == max(self.findings.agreed_s):
            self.findings.slowest = waited_for
        self.findings.operations += operations
        self.findings.kills[target] += 1

    def _draw_operation(self) -> tuple[str, str, str]:
        call = self.rng.choice(("load", "load", "evict", "evict", "unload", "inspect"))
        lora_id, victim = self.rng.sample(sorted(self.sources), 2)
        return call, lora_id, victim

    async def _run_operation(self, after_s: float, call: str, lora_id: str, victim: str) -> None:
        await asyncio.sleep(after_s)
        source = {"source": self.sources[lora_id]}
        await self._is_alive.wait()
        outcome = "cut off"
        with contextlib.suppress(httpx.HTTPError, RuntimeError):  # the agent was killed, and its client is closed
            if call == "unload":
                answer = await post(self.client, "unload_lora", lora_id=lora_id)
            elif call == "inspect":
                answer = await post(self.client, "inspect_lora", lora_id=lora_id, **source)
            else:
                more = {"evict": victim} if call == "evict" else {}
                answer = await post(self.client, "load_lora", lora_id=lora_id, **source, **more)
            outcome = "done" if answer.is_success else code(answer)
            if outcome not in CODES:
                self.findings.violations.append(f"{call} {lora_id}: {answer.text[:300]}")
        self.findings.outcomes[outcome] += 1

    async def _kill(self, target: str) -> None:
        if target == "agent":
            self._is_alive.clear()
            self.worker.process.kill()
            await self.worker.process.wait()
            await self._life.aclose()
            await self._start()
        elif self.engine is not None:
            os.killpg(self.engine.process.pid, signal.SIGKILL)
            port = int(self.engine.url.rsplit(":", 1)[1])
            self.engine.stop()
            model = Path(self.worker.flags[1])
            self.engine = await asyncio.to_thread(start_engine, self.engine.kind, model, flags=ENGINE_FLAGS, port=port)
        else:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # the engine is starting
                os.kill(self.worker.engine_pid, signal.SIGKILL)

    # --- checks --------------------------------------------------------------------------------------------------

    async def _check_served_adapters(self) -> None:
        """Check the adapters that the engine lists, repeatedly."""
        while True:
            with contextlib.suppress(httpx.HTTPError, RuntimeError, KeyError, ValueError):
                url = await self._engine_url()
                async with httpx.AsyncClient(timeout=patience(10)) as direct:
                    for name, folder in (await listed_adapters(direct, url)).items():
                        await self._check_served_adapter(direct, url, name, folder)
            await asyncio.sleep(0.02)

    async def _check_served_adapter(self, direct: httpx.AsyncClient, url: str, name: str, folder: Path) -> None:
        lora_id, _, digest12 = name.partition("@")
        if not folder.name.startswith(digest12) or not is_intact(folder, folder.name):
            self.findings.violations.append(f"{name} is served from {folder}, whose bytes are others")
        answer = await direct.post(f"{url}/v1/completions", json={**ASK, "model": name})
        if answer.status_code == 404:
            return  # unloaded meanwhile
        message = answer.json()["choices"][0]["text"]
        self.findings.answers += 1
        if message != self.truth[lora_id]:
            self.findings.violations.append(f"{name} said {message!r}, a clean engine says {self.truth[lora_id]!r}")

    async def _engine_url(self) -> str:
        if self.engine is not None:
            return self.engine.url
        return str((await self.client.get("/metadata")).json()["transport"]["engine_url"])

    async def _wait_for_agreement(self) -> str:
        """Wait until all agree; returns the last difference, or raises AssertionError with it after the deadline."""
        differing, last = ["nobody answered"], ""
        try:
            async with within(self._agree_within_s):
                while differing:
                    last = str(differing)[:500]
                    await asyncio.sleep(0.05)
                    with contextlib.suppress(httpx.HTTPError, OSError, ValueError):
                        differing = await self._differences()
        except TimeoutError:
            log = (self.worker.folder / "agent.log").read_text()[-3000:]
            raise AssertionError(f"no agreement within {self._agree_within_s} s: {differing}\n{log}") from None
        return last

    async def _differences(self) -> list[str]:
        if not (await self.client.get("/ready")).is_success:
            return ["not ready"]
        metadata = (await self.client.get("/metadata")).json()
        async with httpx.AsyncClient(timeout=patience(10)) as direct:
            names = set(await listed_adapters(direct, await self._engine_url()))
        wanted, unwanted = (
            [json.loads(path.read_text()) for path in (self.worker.state_dir / folder).glob("*.json")]
            for folder in ("adapters", "on_disk")
        )
        items = metadata["lora"]["loaded_loras"]
        views = {
            "engine": names,
            "agent": {item["engine_name"] for item in items if item["state"] == "ready"},
            "record": {record["engine_name"] for record in wanted},
        }
        found = [] if len({frozenset(view) for view in views.values()}) == 1 else [str(views)]
        found += [f"in progress: {item}" for item in items if item["state"] in {"loading", "downloading"}]
        for record in (*wanted, *unwanted):
            if not is_intact(Path(record["path"]), record["digest"]):
                found.append(f"{record['engine_name']}: a record without its files")
        for path in self.worker.cache_dir.iterdir():
            if path.name.startswith((".partial-", ".gone-")):
                found += [] if is_resumable_download(path) else [f"{path.name} is left over"]
            elif not path.name.startswith(".") and not is_intact(path, path.name):
                found.append(f"{path.name}: other bytes than its digest's")
        return found


async def listed_adapters(client: httpx.AsyncClient, engine_url: str) -> dict[str, Path]:
    """engine name -> folder of all adapters that the engine lists."""
    models = (await client.get(f"{engine_url}/v1/models")).json()["data"]
    return {item["id"]: Path(item["root"]) for item in models if item.get("parent")}


def expected_answers(url: str, folders: Mapping[str, Path]) -> dict[str, str]:
    """The answers to ASK with each adapter alone in the engine."""
    message = {}
    with httpx.Client(base_url=url, timeout=patience(40)) as client:
        for lora_id, folder in folders.items():
            name = f"clean-{lora_id}"
            loading = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})
            assert loading.is_success, loading.text
            message[lora_id] = client.post("/v1/completions", json={**ASK, "model": name}).json()["choices"][0]["text"]
            client.post("/v1/unload_lora_adapter", json={"lora_name": name})
    assert len(set(message.values())) == len(message), "two adapters answer alike, so nobody could tell them apart"
    return message


@contextlib.asynccontextmanager
async def https_sources(
    folders: Mapping[str, Path], where: Path, connection: FaultyConnection
) -> AsyncIterator[dict[str, str]]:
    """https:// sources of these adapters behind a faulty connection, whose certificate new agents trust."""
    files = {
        f"{lora_id}/{path.name}": path.read_bytes() for lora_id, folder in folders.items() for path in folder.iterdir()
    }
    server, _ = certificate(where)
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = str(where / "site.pem")
    try:
        async with SourceServer(files_of(files)).serving(server) as site, connection.to(site.url) as url:
            yield {lora_id: f"{url}/{lora_id}" for lora_id in folders}
    finally:
        os.environ.pop("SSL_CERT_FILE")
        if before is not None:
            os.environ["SSL_CERT_FILE"] = before


@contextlib.asynccontextmanager
async def new_kill_trial(
    kind: Kind, folder: Path, *, seed: int, engine: RunningEngine | None = None, may_kill_engine: bool = True
) -> AsyncIterator[KillTrial]:
    """A trial in an empty folder. `engine`, to which the agent is attached, has no adapters and is not stopped."""
    model = make_model(folder / "model")
    adapters = {lora_id: make_adapter(folder / "adapters", lora_id) for lora_id in LOCAL}
    elsewhere = {lora_id: make_adapter(folder / "elsewhere", lora_id) for lora_id in REMOTE}
    if engine is not None:
        truth = expected_answers(engine.url, adapters | elsewhere)
        flags = ("--engine-url", engine.url, "--max-loras", "2", "--max-cpu-loras", str(SLOTS))
    else:
        clean = await asyncio.to_thread(start_engine, kind, model)
        truth = expected_answers(clean.url, adapters | elsewhere)
        clean.stop()
        own = ("--engine-args=--sim-load-s=0.03",) if kind == "sim" else ("--device-profile", "cpu")
        flags = (*SIM, "--engine", kind, *own, "--num-gpu-blocks-override", "256")
    # The kills must not count as a crash loop.
    restarts = ("--crash-loop-after", "1", "--crash-loop-retry-s", "0.3")
    flags = (*flags, *restarts, "--source-networks", "127.0.0.0/8", "--cache-grace-s", "1")
    async with https_sources(elsewhere, folder, SlowConnection()) as sources:
        sources |= {lora_id: str(path) for lora_id, path in adapters.items()}
        worker = RunningWorker(model, folder / "adapters", folder, *flags)
        within_s = 20.0 if kind == "sim" else 300.0
        yield KillTrial(
            worker, rng=Random(seed), sources=sources, truth=truth, engine=engine, agree_within_s=within_s,
            may_kill_engine=may_kill_engine,
        )  # fmt: skip


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--per-round", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attached", action="store_true", help="the agent is attached to an engine of somebody else's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        engine = None
        if args.attached:
            model = make_model(Path(folder) / "model")
            engine = await asyncio.to_thread(start_engine, args.engine, model, flags=ENGINE_FLAGS)
        async with new_kill_trial(args.engine, Path(folder), seed=args.seed, engine=engine) as it:
            try:
                found = await it.run(args.operations, per_round=args.per_round)
            finally:
                if it.engine is not None:
                    it.engine.stop()
                sys.stdout.write(f"{it.findings}\n")
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
