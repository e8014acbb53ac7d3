import asyncio
import signal
import sys

import httpx
import pytest


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("house", ["router", "orchestrator"])
async def test_a_house_that_is_told_to_stop_ends_with_0(tmp_path, house, how):
    port_file = tmp_path / "port"
    more = ["--store", str(tmp_path / "db")] if house == "orchestrator" else []
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        house,
        "--port",
        "0",
        "--port-file",
        str(port_file),
        *more,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(30):
            while not port_file.exists():
                await asyncio.sleep(0.02)
            async with httpx.AsyncClient(trust_env=False) as client:
                assert (await client.get(f"http://127.0.0.1:{port_file.read_text()}/health")).status_code == 200
            process.send_signal(how)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_taken_port_is_one_line_that_names_it(tmp_path):
    async with await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0) as taken:
        port = taken.sockets[0].getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", "--port", str(port), stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
    assert process.returncode != 0
    assert said.decode().splitlines()[-1].startswith("python -m router:")
    assert len(said.decode().splitlines()) == 1
