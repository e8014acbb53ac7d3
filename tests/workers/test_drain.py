"""`python -m workers.drain`, the preStop hook."""

import asyncio
import os
import sys

import httpx
import pytest

from lorafleet.keys.key_files import hash_key
from tests.patience import patience
from workers.config import AgentTimers

pytestmark = pytest.mark.fleet


async def drain(client: httpx.AsyncClient, **environment: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "workers.drain", "--deadline-s", "5",
        env={**os.environ, "LORAFLEET_WORKERS_PORT": str(client.base_url.port), **environment},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, message = await asyncio.wait_for(process.communicate(), patience(20))
    return process.returncode, message.decode()


async def test_prestop_hook_drains_the_agent_with_the_agents_own_key(worker, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{sha256: {hash_key('own')}, scopes: [drain]}}]")
    async with worker.together("--key-files", str(keys), timers=AgentTimers(quiet_s=0.1)) as client:
        assert await drain(client) == (0, "not drained: HTTP Error 401: Unauthorized\n")
        assert (await client.get("/ready")).is_success
        assert "own" not in (await drain(client, LORAFLEET_WORKERS_TOKEN="own\nother"))[1]
        assert "missing" in (await drain(client, LORAFLEET_WORKERS_TOKEN_FILE=str(tmp_path / "missing")))[1]
        (tmp_path / "token").write_text("own\n")
        mounted = {"LORAFLEET_WORKERS_TOKEN_FILE": str(tmp_path / "token")}
        assert await drain(client, LORAFLEET_WORKERS_TOKEN="before", **mounted) == (0, "drained\n")
        assert not (await client.get("/ready")).is_success
        assert await drain(client, LORAFLEET_WORKERS_TOKEN="own\n") == (0, "drained\n")
        assert not (await client.get("/ready")).is_success
    assert (await drain(client))[0] == 0
