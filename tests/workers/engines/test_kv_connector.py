"""The KV connector in an engine's command, in every spelling that vLLM accepts."""

import asyncio
import json
import sys

import pytest

from tests.patience import patience
from tests.workers.running import SIM, RunningWorker
from workers.config import WorkerSettings
from workers.engines.command import CommandError, words_in_effect
from workers.engines.kv_connector import connector_from_command

SERVE = ("vllm", "serve", "/models/m")
EXAMPLE = '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'
SAFE = '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}'


def separation(*words: str) -> str | None:
    found = connector_from_command(words_in_effect(WorkerSettings(model="/models/m"), (*SERVE, *words)))
    return None if found is None else found.separation


@pytest.mark.parametrize(
    "words",
    [
        ("--kv-transfer-config", EXAMPLE),
        ("--kv_transfer_config", EXAMPLE),
        (f"--kv-transfer-config={EXAMPLE}",),
        (f"--kv_transfer-config={EXAMPLE}",),
        ("--kv-transfer", EXAMPLE),
        ("--kv-t", EXAMPLE),
        ("--kv-transfer-config.kv_connector", "ExampleConnector", "--kv-transfer-config.kv_role", "kv_both"),
        ("--kv_transfer_config.kv_connector=ExampleConnector",),
        # The last one wins; single fields override JSON.
        ("--kv-transfer-config", SAFE, "--kv-transfer-config", EXAMPLE),
        ("--kv-transfer-config.kv_connector", "ExampleConnector", "--kv-transfer-config", SAFE),
        ("--kv-transfer-config", '{"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"a": 80m}}'),
    ],
)
def test_example_connector_is_refused_in_each_spelling(words):
    assert separation(*words) == "refused"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), None),
        (("--kv-events-config", "{}", "--kv-cache-dtype", "auto"), None),
        (("--kv-transfer-config", "None"), None),
        (("--kv-transfer-config", ""), None),
        (("--kv-transfer-config", SAFE), "safe"),
        (("--kv-transfer-config", EXAMPLE, "--kv-transfer-config", SAFE), "safe"),
        (("--kv-offloading-size", "4"), "safe"),
        (("--kv_offloading_size=4", "--kv-offloading-backend", "lmcache"), "salted"),
        (("--kv-offloading-backend", "lmcache"), None),
        # Offloading replaces the other connector.
        (("--kv-transfer-config", EXAMPLE, "--kv-offloading-size", "4"), "safe"),
        (
            ("--kv-transfer-config.kv_connector=MultiConnector",
             '--kv-transfer-config.kv_connector_extra_config.connectors=[{"kv_connector": "LMCacheMPConnector"}]'),
            "salted",
        ),
    ],
)  # fmt: skip
def test_other_arguments_give_their_connector(words, found):
    assert separation(*words) == found


@pytest.mark.parametrize(
    ("text", "words", "found"),
    [
        (f"kv-transfer-config: '{SAFE}'\nkv-transfer-config: '{EXAMPLE}'", (), "refused"),
        (f"kv-transfer-config: '{EXAMPLE}'", (), "refused"),
        ("kv_transfer_config:\n  kv_connector: ExampleConnector\n  kv_role: kv_both", (), "refused"),
        ("kv-transfer-config.kv_connector: ExampleConnector", (), "refused"),
        ("kv-offloading-size: 4\nkv-offloading-backend: lmcache\nenforce-eager: true", (), "salted"),
        (f"kv-transfer-config: '{EXAMPLE}'", ("--kv-transfer-config", SAFE), "safe"),
        ("port: 8000\nserved-model-name: [a, b]", (), None),
        ("", (), None),
    ],
)
def test_config_file_is_overridden_by_the_command_line(tmp_path, text, words, found):
    (tmp_path / "vllm.yaml").write_text(text)
    assert separation("--config", str(tmp_path / "vllm.yaml"), *words) == found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv-transfer-config", "{kv_connector"), "--kv-transfer-config '{kv_connector'"),
        (("--kv-transfer-config",), None),
        (("--kv-transfer-config", "[]"), "expected a JSON object"),
        (("--kv-transfer-config.a=1", "--kv-transfer-config.a.b=2"), "--kv-transfer-config.a.b"),
        (("--config", "/nowhere/vllm.yaml"), "--config /nowhere/vllm.yaml"),
    ],
)
def test_unparseable_argument_is_named(words, message):
    if message is None:
        assert separation(*words) is None  # vLLM reports the missing value itself
        return
    with pytest.raises(CommandError, match=message.replace("{", r"\{")):
        separation(*words)


def test_config_file_without_a_mapping_is_named(tmp_path):
    for text in ("- a", "a: ["):
        (tmp_path / "vllm.yaml").write_text(text)
        with pytest.raises(CommandError, match=f"--config {tmp_path}"):
            separation("--config", str(tmp_path / "vllm.yaml"))


@pytest.mark.fleet
async def test_unreadable_connector_ends_the_start_with_one_line(agent_model, agent_adapters, tmp_path):
    words = json.dumps(["--kv-transfer-config", "{kv_connector"])
    worker = RunningWorker(agent_model, agent_adapters, tmp_path, *SIM, "--engine-args", words)
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "workers", *worker.flags, stderr=asyncio.subprocess.PIPE
    )
    _, message = await asyncio.wait_for(agent.communicate(), patience(20))
    assert agent.returncode == 2
    assert b"--kv-transfer-config" in message
    assert b"Traceback" not in message
