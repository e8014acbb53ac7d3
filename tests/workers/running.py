"""A real agent process around a real engine process, on loopback."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from tests.patience import patience, until, within

SIM = (
    "--engine",
    "sim",
    "--max-loras",
    "2",
    "--max-cpu-loras",
    "3",
    "--max-lora-rank",
    "16",
    "--max-model-len",
    "2048",
)


class RunningWorker:
    """An agent process. Its folders outlive it, so that another one can be started on them."""

    def __init__(self, model: Path, adapters: Path, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.state_dir, self.cache_dir = folder / "state", folder / "cache"
        self.flags = (
            "--model", str(model), "--served-model-name", "tiny-qwen", "--lora-path", str(adapters),
            "--state-dir", str(self.state_dir), "--cache-dir", str(self.cache_dir), "--port", "0", "--engine-port", "0",
            "--scan-s", "0.2", "--scrape-s", "0.1", *flags,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def running(
        self, *more: str, until_ready: bool = True, stderr: int | None = None
    ) -> AsyncIterator[httpx.AsyncClient]:
        """A client of the started agent; afterwards the agent is stopped if the test has not done it.

        stderr  a descriptor, in place of `agent.log`
        """
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        log = self.folder / "agent.log"
        with log.open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "workers", *self.flags, "--port-file", str(port_file), *more,
                stdout=out, stderr=out if stderr is None else stderr,
                env={**os.environ, "TMPDIR": tempfile.gettempdir()},
            )  # fmt: skip
        try:
            await until(lambda: port_file.exists() or self._ended(log))
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_file.read_text()}", timeout=30) as client:
                if until_ready:
                    await self.ready(client)
                yield client
        finally:
            if self.process.returncode is None:
                self.process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(self.process.wait(), patience(30))

    async def ready(self, client: httpx.AsyncClient, *, within_s: float = 30) -> None:
        async with within(within_s):
            while not (await client.get("/ready")).is_success:
                await asyncio.sleep(0.02)

    @property
    def engine_pid(self) -> int:
        return int((self.state_dir / "engine.pid").read_text())

    def _ended(self, log: Path) -> bool:
        if self.process.returncode is not None:
            raise AssertionError(f"the agent ended with {self.process.returncode}:\n{log.read_text()[-3000:]}")
        return False


def state_of(pid: int) -> str:
    """As ps has it: R, S, T (stopped), Z and so on. Raises OSError where there is no such process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_running(pid: int) -> bool:
    try:
        return state_of(pid) != "Z"
    except OSError:
        return False


def group_of(pid: int) -> set[int]:
    """Running processes of the group that this process is in."""
    group = os.getpgid(pid)
    return {int(path.name) for path in Path("/proc").glob("[0-9]*") if _group(path) == group}


def _group(path: Path) -> int | None:
    try:
        fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[2])


async def post(client: httpx.AsyncClient, call: str, *, epoch: int | None = None, **body) -> httpx.Response:
    headers = {} if epoch is None else {"x-lorafleet-epoch": str(epoch)}
    return await client.post(f"/v1/admin/{call}", json=body, headers=headers)


def code(answer: httpx.Response) -> str:
    return answer.json()["error"]["code"]


async def loaded(client: httpx.AsyncClient) -> set[str]:
    items = (await client.get("/v1/admin/loras")).json()["data"]
    return {item["lora_id"] for item in items if item["state"] == "ready"}


async def sse(lines: AsyncIterator[str]) -> tuple[str, dict]:
    """The next event's id and data."""
    event_id = ""
    async for line in lines:
        if line.startswith("id: "):
            event_id = line[4:]
        if line.startswith("data: "):
            return event_id, json.loads(line[6:])
    raise AssertionError("the stream ended")
