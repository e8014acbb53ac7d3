"""The agent's own engine: its command, port and output."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.engines import start_engine
from tests.patience import patience, until
from tests.serving import client_of
from tests.workers.running import RunningWorker, code, group_of, is_running, metadata_of, post, until_state


@pytest.mark.fleet
async def test_own_engine_command_gets_the_flags_that_it_lacks(worker):
    own = ("--", sys.executable, "-P", "-m", "lorafleet.sim", "--block-size", "64")
    async with worker.running(*own) as client:
        assert (await post(client, "load_lora", lora_id="sql-expert/v1")).status_code == 200
        assert (await metadata_of(client)).model.runtime_config.block_size == 64
    message = (worker.folder / "agent.log").read_text()
    assert "added to the engine's command" in message
    assert "--enable-lora --max-loras 2" in message


@pytest.mark.fleet
async def test_stopping_agent_kills_a_starting_engine_that_ignores_sigterm(worker):
    deaf = f'trap "" TERM; echo starting; sleep 60; exec {sys.executable} -m lorafleet.sim "$@"'
    long = ("--engine-shutdown-s", "50")
    async with worker.running(*long, "--", "sh", "-c", deaf, "sim", until_ready=False):  # it takes 30 s to end
        await until(lambda: "starting" in _text_or_empty(worker.state_dir / "engine.log"))
        await until(lambda: _text_or_empty(worker.state_dir / "engine.pid"))  # the guard writes it beside the engine
        group = group_of(worker.engine_pid)
    assert not any(map(is_running, group))
    assert worker.process.returncode == 0


def _text_or_empty(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.fleet
async def test_engine_does_not_start_on_a_port_of_another_process(worker, agent_model):
    stranger = start_engine("sim", agent_model)
    try:
        port = stranger.url.rsplit(":", 1)[1]
        # The engine starts slowly, as vLLM does: an earlier answer on the port is another process's.
        slow = f'sleep 30; exec {sys.executable} -m lorafleet.sim "$@"'
        flags = ("--engine-port", port, "--", "sh", "-c", slow, "sim")
        async with worker.inside(*flags, until_ready=False) as client:
            metadata = await until_state(client, "engine_down")
            assert f"port {port}" in metadata.state_reason
    finally:
        stranger.stop()


@pytest.mark.fleet
async def test_base_model_that_the_engine_takes_no_adapters_for_is_named_in_the_first_line(worker):
    """vLLM 0.32 says so within a traceback, and goes on for more lines than an agent shows."""
    script = 'echo "(EngineCore pid=1) ERROR ValueError: GPT2LMHeadModel does not support LoRA yet."; seq 100; exit 1'
    async with worker.inside("--", "sh", "-c", script, until_ready=False) as client:
        reason = (await until_state(client, "engine_down")).state_reason
        assert "it takes no adapters for a GPT2LMHeadModel" in reason.splitlines()[0]
        assert "GPT2LMHeadModel" in (await client.get("/ready")).json()["error"]["message"]
        refused = await post(client, "load_lora", lora_id="sql-expert/v1")
        assert (refused.status_code, code(refused)) == (503, "not_ready")


@pytest.mark.vllm
@pytest.mark.thorough
async def test_vllms_own_words_for_a_base_model_without_adapters_are_recognised(agent_model, tmp_path):
    """GPT-2 has no adapters in vLLM 0.32. The tokenizer is the tiny model's."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = Path(shutil.copytree(agent_model, tmp_path / "gpt2"))
    (folder / "model.safetensors").unlink()
    GPT2LMHeadModel(GPT2Config(vocab_size=4096, n_embd=64, n_layer=1, n_head=2)).save_pretrained(folder)
    (tmp_path / "none").mkdir()
    worker = RunningWorker(folder, tmp_path / "none", tmp_path, "--engine", "vllm", "--device-profile", "cpu")
    async with worker.inside("--max-model-len", "512", until_ready=False) as client:
        metadata = await until_state(client, "engine_down", within_s=120)
        assert "it takes no adapters for a GPT2LMHeadModel" in metadata.state_reason.splitlines()[0]


@pytest.mark.fleet
async def test_picked_port_stays_reserved_for_the_engine_over_restarts(worker):
    go = worker.folder / "go"
    slow = f'echo "with $@"; until [ -e {go} ]; do sleep 0.02; done; exec {sys.executable} -m lorafleet.sim "$@"'
    async with worker.inside("--", "sh", "-c", slow, "sim", until_ready=False) as client:
        await until(lambda: _started_ports(_text_or_empty(worker.state_dir / "engine.log")))
        port = _started_ports(_text_or_empty(worker.state_dir / "engine.log"))[0]
        with pytest.raises(OSError, match="in use"):
            _bind_exclusively(port)
        go.touch()
        await worker.ready(client)
        assert (await metadata_of(client)).transport.engine_url.endswith(f":{port}")
        go.unlink()
        os.kill(worker.engine_pid, signal.SIGKILL)
        await until(lambda: len(_started_ports(_text_or_empty(worker.state_dir / "engine.log"))) == 2)
        with pytest.raises(OSError, match="in use"):
            _bind_exclusively(port)
        assert _started_ports(_text_or_empty(worker.state_dir / "engine.log")) == [port, port]
        go.touch()
        await worker.ready(client)


def _started_ports(text: str) -> list[int]:
    return [int(port) for port in re.findall(r"^with .*--port (\d+)", text, re.MULTILINE)]


def _bind_exclusively(port: int) -> None:
    """Bind a port exclusively. Raises OSError if it is taken."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))


@pytest.mark.fleet
async def test_unread_stderr_blocks_neither_agent_nor_engine(worker):
    talkative = f'yes "a line of the engine" | head -40000; exec {sys.executable} -m lorafleet.sim "$@"'
    reader, writer = os.pipe()
    try:
        async with worker.running("--", "sh", "-c", talkative, "sim", stderr=writer) as client:
            os.close(writer)
            kept = (worker.state_dir / "engine.log").read_text().count("a line of the engine\n")
            message = asyncio.create_task(asyncio.to_thread(_read_whole, reader))
            assert (await post(client, "load_lora", lora_id="sql-expert/v1")).status_code == 200
        lines = (await message).splitlines()
    finally:
        os.close(reader)
    dropped = [json.loads(line) for line in lines if b"of the engine's output were dropped" in line]
    assert kept == 40_000
    assert dropped
    assert lines.count(b"a line of the engine") + sum(line["lines"] for line in dropped) >= kept
    assert any(b'"event": "ready"' in line for line in lines)  # the agent's own lines are not dropped


def _read_whole(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


@pytest.mark.fleet
async def test_agent_without_a_stderr_starts_its_engine(worker):
    log = worker.folder / "agent.log"
    closed = ("sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-P", "-m", "workers", *worker.flags)
    port_file = worker.folder / "port"
    with log.open("ab") as out:
        agent = await asyncio.create_subprocess_exec(*closed, "--port-file", str(port_file), stdout=out)
    try:
        await until(port_file.exists)
        async with client_of(f"http://127.0.0.1:{port_file.read_text()}") as client:
            await worker.ready(client)
    finally:
        agent.terminate()
        await asyncio.wait_for(agent.wait(), patience(30))
