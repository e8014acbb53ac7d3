"""The texts' own code runs: taken from the texts, with hosts, folders, model names and import paths replaced alone.

Each test runs our own example of the same calls, and the text's code where `FOUNDING_TEXTS` names the texts' folder.
"""

import ast
import asyncio
import dataclasses
import enum
import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from lorafleet.local.tiny_model import make_adapter, make_model
from lorafleet.service.settings import SettingsError, load
from orchestrator.config import OrchestratorSettings
from orchestrator.model.policy import PlacementPolicy
from tests.founding.conftest import LEGAL, PYTHON, SQL
from tests.founding.texts import Origin, command_lines, moved, piece
from tests.patience import patience
from tests.workers.routed import RoutedWorker, behind_a_router
from tests.workers.running import RunningWorker
from workers import plugin
from workers.agent.lora_manager import DynamoLoraManager
from workers.config import WorkerSettings

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(300)]

CODER, LLAMA = "Qwen/Qwen2.5-Coder-7B", "meta-llama/Llama-3-8B"
ROOT = Path(__file__).parents[2]
SHARED, MODELS = "/shared/loras", "/models/lora"
TRANSLATION, SUMMARIZATION = "translation", "summarization"
SHORT_NAMES = {"translation": TRANSLATION, "summary": SUMMARIZATION}
ORIGINS = pytest.mark.parametrize("origin", ["ours", "texts"])
ENGINES = pytest.mark.parametrize(
    "engine",
    ["sim", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.thorough, pytest.mark.timeout(900)])],
)
SMALL = ("--max-model-len", "2048", "--max-num-seqs", "4", "--max-num-batched-tokens", "2048")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("texts-model"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared") / "loras"
    for lora_id, rank in ((SQL, 8), (PYTHON, 16), (LEGAL, 8)):
        make_adapter(folder, lora_id, rank=rank, base_model=CODER)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "lora"
    for lora_id in (TRANSLATION, SUMMARIZATION):
        make_adapter(folder, lora_id, base_model=LLAMA)
    return folder


def worker_in(folder: Path, *flags: str) -> RunningWorker:
    """A worker with these flags and folders of its own, and without a model, adapters or a name of its own."""
    worker = RunningWorker(folder, folder, folder)
    at = worker.flags.index("--state-dir")
    worker.flags = (*worker.flags[at:], *flags)
    return worker


def hosts(fleet: RoutedWorker) -> Mapping[str, str]:
    """Hosts and ports of the texts -> ours."""
    return {"http://worker:8000": str(fleet.agent.base_url), "http://router:8000": str(fleet.router.base_url)}


async def answers_by_adapter(fleet: RoutedWorker) -> dict[str, float]:
    """How many answers each adapter has given, as the router counts them; the base model's are not among them."""
    page = (await fleet.router.get("/metrics")).text
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    counts = [sample for sample in samples if sample.name == "lora_routing_decisions_total"]
    return {sample.labels["lora_id"]: sample.value for sample in counts if sample.labels["outcome"] == "success"}


async def adapters_that_answered(fleet: RoutedWorker) -> list[str]:
    """The adapters of the router's requests, the oldest first; `base`: the base model."""
    lines = (await fleet.router.get("/v1/requests")).json()["data"]
    return [line["adapter"].partition("@")[0] for line in reversed(lines)]


async def run_python(code: str) -> str:
    """What a program of its own prints; fails where it ends with an error."""
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(program.communicate(), patience(90))
    finally:
        if program.returncode is None:
            program.kill()
    assert program.returncode == 0, output.decode()
    return output.decode()


def written(code: str, folder: Path) -> str:
    """A file with this code, by its path."""
    path = folder / "settings.yaml"
    path.write_text(code)
    return str(path)


@ORIGINS
@ENGINES
async def test_phase_a_is_served_from_its_own_file_and_passes_its_own_test(
    engine: str, origin: Origin, model: Path, shared: Path, tmp_path: Path
) -> None:
    places = {f'"{CODER}"': f'"{model}"', SHARED: str(shared)}
    config = written(moved(piece("worker's file", origin), places), tmp_path)
    worker = worker_in(tmp_path, "--config", config, "--engine", engine, "--served-model-name", CODER, *SMALL)
    words = ("--", *shlex.split(vllm_command(origin, model))) if engine == "vllm" else ()
    async with behind_a_router(worker, tmp_path, *words, base_model=CODER, within_s=120) as fleet:
        output = await run_python(moved(piece("phase A", origin), hosts(fleet)))
        answers = [ast.literal_eval(line) for line in output.splitlines() if line.startswith("{")]
        assert len(answers) == 2
        assert all(answer["choices"][0]["message"]["content"] for answer in answers), output
        assert await adapters_that_answered(fleet) == [SQL, "base"]
        metadata = (await fleet.agent.get("/metadata")).json()
        assert {item["lora_id"] for item in metadata["lora"]["loaded_loras"]} == {SQL, PYTHON}
        assert metadata["component"] == "worker"
        assert metadata["lora"]["max_lora_rank"] == 64
        assert missing_names(designed_metadata(origin), metadata) == []
        numbers = [item["lora_int_id"] for item in metadata["lora"]["loaded_loras"]]
        assert sorted(numbers) == [1, 2]
        engine_url = metadata["transport"]["engine_url"]
        await run_python(
            piece("engine manager", origin)
            + f"""
import asyncio

async def main():
    manager = DynamicLoRAManager({engine_url!r}, max_loras=2)  # the text's deadlocks where it has to make room
    assert await manager.load_lora("first", {str(shared / SQL)!r})
    assert await manager.load_lora("second", {str(shared / LEGAL)!r})
    assert await manager.unload_lora("first")
    assert set(manager.get_loaded_loras()) == {{"second"}}
    assert await manager.unload_lora("second")

asyncio.run(main())
"""
        )


def designed_metadata(origin: Origin) -> dict[str, Any]:
    """The design's example of a worker's metadata."""
    names: dict[str, Any] = {"true": True}
    exec(piece("metadata", origin), names)
    designed: dict[str, Any] = names["metadata"]
    return designed


def missing_names(designed: Any, found: Any, where: str = "metadata") -> list[str]:
    """The designed names that are not found, at any depth. Of a list of items the first stands for all."""
    if isinstance(designed, list) and designed:
        return [] if not isinstance(found, list) else missing_names(designed[0], found[0], f"{where}[]")
    if not isinstance(designed, dict):
        return []
    absent = [f"{where}.{name}" for name in designed if name not in found]
    inner = (missing_names(each, found[name], f"{where}.{name}") for name, each in designed.items() if name in found)
    return [*absent, *(name for names in inner for name in names)]


def vllm_command(origin: Origin, model: Path) -> str:
    """The proposal's launch line of vLLM, with our folder of a base model.

    `vllm serve` runs this module; the command itself does not start in a build for the CPU, which has another name.
    """
    (line,) = command_lines(piece("vLLM", origin))
    return moved(
        line, {"vllm serve model": f"{sys.executable} -P -m vllm.entrypoints.openai.api_server --model {model}"}
    )


@ORIGINS
async def test_designed_fleet_manager_has_our_worker_load_an_adapter_from_its_list(
    origin: Origin, model: Path, shared: Path, tmp_path: Path
) -> None:
    worker = worker_in(
        tmp_path, "--engine", "sim", "--model", str(model), "--served-model-name", CODER, "--lora-path", str(shared)
    )
    async with worker.inside(*SMALL) as agent:
        loads = await run_python(
            "import aiohttp\n"
            + piece("fleet manager", origin)
            + f"""
class Worker:
    instance_id, address = "w0", {str(agent.base_url)!r}

    async def metadata(self):
        async with aiohttp.ClientSession() as session, session.get(self.address + "/metadata") as answer:
            return await answer.json()

class Discovery:
    def list_instances(self, namespace, component):
        return [Worker()]

async def main():
    manager = LoRAOrchestrator(Discovery())
    for _ in range(2):
        await manager._sync_worker_states()
        manager.lora_placements = {{}}
        print(await manager.request_lora({PYTHON!r}), await manager.request_lora("nobody/v1"))

import asyncio
asyncio.run(main())
"""
        )
        assert loads.splitlines() == ["['w0'] []"] * 2
        item = (await agent.get(f"/v1/metadata/loras/{PYTHON}")).json()
        assert (item["loaded"], item["state"]) == (True, "ready")


def environment_in(manifests: str) -> dict[str, str]:
    """The variables of the containers of these manifests."""
    found: dict[str, str] = {}
    for manifest in yaml.safe_load_all(manifests):
        template = manifest["spec"].get("template", manifest)
        for container in template.get("spec", {}).get("containers", ()):
            found |= {entry["name"]: entry["value"] for entry in container.get("env", ())}
    return found


@ORIGINS
def test_variables_of_the_workers_pod_are_its_settings(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    told = environment_in(piece("worker's pod", origin))
    assert len(told) == 5
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    found = load(WorkerSettings, ["--model", "m"], prog="agent")
    assert (found.lora_path, found.max_loras, found.max_lora_rank) == (Path(SHARED), 4, 64)
    assert found.preload_loras == (SQL, PYTHON)


@ORIGINS
def test_variables_of_the_orchestrators_pod_are_refused_by_name_or_its_settings(
    origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = environment_in(piece("orchestrator's pod", origin))
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as refused:
        load(OrchestratorSettings, [], prog="orchestrator")
    assert set(re.findall(r"\b([A-Z_]+): ", str(refused.value))) == {*told} - {"REBALANCE_INTERVAL_SEC"}
    for name in ("DYNAMO_NAMESPACE", "DYNAMO_COMPONENT", "LORA_POLICY"):
        monkeypatch.delenv(name)
    found = load(OrchestratorSettings, [], prog="orchestrator")
    assert found.pass_interval_s == float(told["REBALANCE_INTERVAL_SEC"])


@ORIGINS
def test_keys_of_the_orchestrators_file_are_refused_by_name_or_settings(origin: Origin, tmp_path: Path) -> None:
    code = piece("orchestrator's file", origin)
    config = written(code, tmp_path)
    found = load(WorkerSettings, ["--config", config, "--model", "m"], prog="agent")
    asked = yaml.safe_load(code)
    assert (found.engine_url, found.max_loras) == (asked["worker"]["vllm_server_url"], asked["worker"]["max_loras"])
    with pytest.raises(SettingsError) as refused:
        load(OrchestratorSettings, ["--config", config], prog="orchestrator")
    told = {name: advice for name, _, advice in (each.partition(": ") for each in str(refused.value).split("; "))}
    told["policy"] = told.pop(next(name for name in told if name.startswith("--config")))
    mine = asked["lora_orchestrator"]
    assert told.keys() <= mine.keys()
    for name in re.findall(r"policy set ([a-z_]+)=", str(refused.value)):
        assert name in PlacementPolicy.__dataclass_fields__
    rest = {name: value for name, value in mine.items() if name not in told}
    assert {"rebalance_interval_sec", "enable_auto_scaling"} <= rest.keys()
    kept = load(OrchestratorSettings, ["--config", written(json.dumps(rest), tmp_path)], prog="orchestrator")
    assert kept.pass_interval_s == mine["rebalance_interval_sec"]


def classes_in(code: str) -> ModuleType:
    """The proposal's classes, made from its code: a sketch, whose slips of the pen are mended and nothing else."""
    mended = re.sub(r"^(class \w+(?:\(.*?\))?):?$", r"\1:", code.replace("intEnum", "IntEnum"), flags=re.MULTILINE)
    imports = "import abc", "from datetime import datetime", "from enum import Enum, IntEnum", "from typing import List"
    head = "\n".join(("from __future__ import annotations", *imports, ""))
    made = ModuleType("proposal")
    sys.modules["proposal"] = made  # dataclasses looks it up
    exec(compile(head + mended, "proposal", "exec"), made.__dict__)
    return made


@ORIGINS
def test_our_classes_are_those_of_the_proposal(origin: Origin) -> None:
    proposal = classes_in(piece("proposal", origin))
    ours = {**plugin.__dict__, "DynamoLoraManager": DynamoLoraManager}
    theirs = {name: each for name, each in vars(proposal).items() if getattr(each, "__module__", "") == "proposal"}
    assert len(theirs) == 9
    for name, each in theirs.items():
        mine = ours[name]
        if issubclass(each, enum.Enum):
            assert {member.name: member.value for member in each} == {
                member.name: mine[member.name].value for member in each
            }
            assert issubclass(mine, int) == issubclass(each, int)
        elif dataclasses.is_dataclass(each):
            fields = [field.name for field in dataclasses.fields(each)]
            assert [field.name for field in dataclasses.fields(mine)][: len(fields)] == fields
        else:
            assert [base.__name__ for base in each.__mro__[1:-2]] == [base.__name__ for base in mine.__mro__[1:-2]]
            for method in getattr(each, "__abstractmethods__", ()):
                assert list(inspect.signature(getattr(mine, method)).parameters) == [
                    "self",
                    *own_parameters(each, method),
                ]
    made = ours["LoraModel"]("a", ours["LoraStatus"].DOWNLOADED, ours["CacheLocation"].DISK, "/a")
    made.status = ours["LoraStatus"].LOADED
    event = ours["LoraEvent"](ours["LoraEventType"].LOADED_TO_DEVICE, made, datetime.now(UTC), "w0")
    assert (event.lora_model.status, event.event_type, event.instance_id) == (2, 3, "w0")


def own_parameters(cls: type, method: str) -> list[str]:
    """The parameters of a method, without `self`."""
    return list(inspect.signature(getattr(cls, method)).parameters)[1:]


CUSTOM = """
import shutil
from pathlib import Path

from workers.plugin import CacheLocation, LoraDownloaderBase, LoraModel, LoraStatus

UPSTREAM, DISK = Path({upstream!r}), Path({disk!r})


class CustomDownloader(LoraDownloaderBase):
    def download_lora_to_disk(self, name: str) -> LoraModel:
        shutil.copytree(UPSTREAM / name, DISK / name)
        return LoraModel(name, LoraStatus.DOWNLOADED, CacheLocation.DISK, str(DISK / name))

    def delete_lora_from_disk(self, name: str) -> LoraModel:
        shutil.rmtree(DISK / name)
        return LoraModel(name, LoraStatus.DOWNLOADED, CacheLocation.REMOTE, "")
"""


@ORIGINS
async def test_downloader_of_ones_own_is_named_and_written_as_proposed(
    origin: Origin, model: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, custom = [shlex.split(line)[3:] for line in command_lines(piece("plugins", origin))]
    assert load(WorkerSettings, ["--model", "m", *default], prog="agent").lora_downloader_plugin.endswith(
        f".{plugin.HuggingFaceDownloader.__name__}"
    )
    package = tmp_path / "packages" / "my-org" / "lora"
    package.mkdir(parents=True)
    disk = tmp_path / "disk"
    (package / "downloader.py").write_text(CUSTOM.format(upstream=str(shared), disk=str(disk)))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    flags = ("--engine", "sim", "--model", str(model), "--served-model-name", CODER)
    async with worker_in(tmp_path, *flags, *SMALL).inside(*custom) as agent:
        body = {"lora_id": SQL, "source": f"plugin://{SQL}"}
        answer = await agent.post("/v1/admin/load_lora", json=body)
        assert answer.status_code == 200, answer.text
        assert (await agent.get(f"/v1/metadata/loras/{SQL}")).json()["loaded"]
    assert not (disk / SQL).exists()


@ORIGINS
async def test_sgl_jax_is_launched_and_asked_as_designed(
    origin: Origin, model: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests" / "stubs")]))
    (line,) = command_lines(piece("sgl-jax", origin))
    words = shlex.split(moved(line, {f"--model-path {LLAMA}": f"--model-path {model}", MODELS: str(models)}))
    assert words[0] == "python"
    flags = ("--engine", "sgl-jax", "--model", str(model), "--served-model-name", LLAMA, *SMALL)
    worker = worker_in(tmp_path, *flags, "--max-lora-rank", "16")
    command = ("--", sys.executable, "-P", *words[1:])
    async with behind_a_router(worker, tmp_path, *command, base_model=LLAMA, within_s=60) as fleet:
        info = (await fleet.agent.get("/metadata")).json()
        assert {item["lora_id"] for item in info["lora"]["loaded_loras"]} == {TRANSLATION, SUMMARIZATION}
        assert info["lora"]["max_loras"] == int(words[words.index("--max-loras-per-batch") + 1]) - 1
        host = {"http://127.0.0.1:30000": str(fleet.router.base_url).rstrip("/"), MODELS: str(models)}
        one, batch, chat = (moved(piece(f"sgl-jax, {kind}", origin), host) for kind in ("one", "batch", "chat"))
        output = await run_python(f"{one}\n{batch}\nprint([item['text'] for item in response.json()])")
        first, *_, texts = output.splitlines()
        assert first
        assert len(set(ast.literal_eval(texts))) == 3
        assert await answers_by_adapter(fleet) == {TRANSLATION: 2, SUMMARIZATION: 1}
        places = {f"/path/to/{name}_lora": f"{models}/{lora_id}" for name, lora_id in SHORT_NAMES.items()}
        call, _, body = moved(piece("sgl-jax, request", origin), places).partition("\n")
        method, path = call.split()
        answer = await fleet.router.request(method, path, json=json.loads(body))
        assert [bool(item["text"]) for item in answer.json()] == [True, True]
        assert (await run_python(chat)).strip()
        assert sum((await answers_by_adapter(fleet)).values()) == 6
        refused = await fleet.router.post("/generate", json={"text": "a", "lora_path": f"{models}/nobody"})
        assert refused.status_code == 404
