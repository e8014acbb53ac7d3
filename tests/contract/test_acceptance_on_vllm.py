"""Real vLLM on the CPU computes a trainer's log-probabilities, and other ones of a sabotaged adapter."""

import copy
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lorafleet.client.certify import certify_peft
from lorafleet.engine.acceptance import AcceptanceFile, compare_logprobs, read_acceptance
from orchestrator.model.acceptance import AdapterAcceptance
from tests.contract.numerics import make_prompt
from tests.engines import RunningEngine, start_engine
from tests.patience import patience
from workers.engines.vllm import VllmClient

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

BASE = "tiny-qwen"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SEEDS = (1, 2, 3)
MADE: Mapping[str, Mapping[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 4, "lora_alpha": 4, "target_modules": ALL},
    "rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": ALL},
    "patterns": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 4, "down_proj": 16},
        "alpha_pattern": {"q_proj": 32},
    },
}
Tensors = Mapping[str, torch.Tensor]


def make_adapter(base: torch.nn.Module, into: Path, seed: int, **lora: Any) -> Path:
    """An adapter by PEFT with drawn weights, small enough to leave the model in its senses, and its acceptance file."""
    torch.manual_seed(seed)
    config = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **lora)
    model = get_peft_model(copy.deepcopy(base), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.2)
    model.save_pretrained(into)
    path = into / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": BASE}))
    certify_peft(model, into, [make_prompt(100 * seed + each, 64) for each in range(3)])
    return into


def changed(source: Path, into: Path, tensors: Callable[[Tensors], Tensors] = dict, **config: Any) -> Path:
    """A copy of an adapter with other tensors or another config, and the same acceptance file."""
    folder = Path(shutil.copytree(source, into))
    save_file(
        {name: each.contiguous() for name, each in tensors(load_file(folder / WEIGHTS)).items()}, folder / WEIGHTS
    )
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def without(part: str) -> Callable[[Tensors], Tensors]:
    """The tensors with zeros in place of those whose name has a part."""
    return lambda tensors: {name: each * (part not in name) for name, each in tensors.items()}


def rounded(bits: int) -> Callable[[Tensors], Tensors]:
    """The tensors with so many bits a number."""

    def round_each(tensors: Tensors) -> Tensors:
        steps = {name: each.abs().max() / (2 ** (bits - 1) - 1) for name, each in tensors.items()}
        return {name: (each / steps[name]).round() * steps[name] for name, each in tensors.items()}

    return round_each


@pytest.fixture(scope="module")
def base(model_dir: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def adapters(base: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name with a seed -> folder."""
    root = tmp_path_factory.mktemp("certified")
    return {
        f"{name}{seed}": make_adapter(base, root / f"{name}{seed}", seed, **lora)
        for name, lora in MADE.items()
        for seed in SEEDS
    }


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[RunningEngine]:
    started = start_engine("vllm", model_dir, flags=("--dtype", "float32"))
    yield started
    started.stop()


@pytest.fixture
async def client(engine: RunningEngine) -> AsyncIterator[VllmClient]:
    made = VllmClient(engine.url)
    yield made
    await made.aclose()


async def compared(client: VllmClient, folder: Path, *, file: AcceptanceFile | None = None) -> AdapterAcceptance:
    """What the engine's answers with an adapter are, by its acceptance file or another one."""
    file = file or read_acceptance(folder)
    assert file is not None
    prompts = [each.prompt for each in file.prompts]
    await client.load("asked", folder, timeout_s=patience(60))
    try:
        served = await client.prompt_logprobs("asked", prompts, base_model=BASE)
        alone = await client.prompt_logprobs(None, prompts, base_model=BASE)
    finally:
        await client.unload("asked", timeout_s=patience(60))
    assert served is not None
    assert alone is not None
    return compare_logprobs(file, served, alone)


async def test_what_peft_has_trained_is_equal(client, adapters):
    found = {name: await compared(client, folder) for name, folder in adapters.items()}
    assert {name: each for name, each in found.items() if each.result != "equal"} == {}
    assert max(each.distance for each in found.values()) < 1e-4


SABOTAGES: Mapping[str, tuple[str, Callable[[Tensors], Tensors], Mapping[str, Any], set[str]]] = {
    "alpha halved": ("plain", dict, {"lora_alpha": 8}, {"scaled", "part"}),
    "alpha doubled": ("plain", dict, {"lora_alpha": 32}, {"scaled", "part"}),
    "one layer of B dropped": ("all", without(".layers.1.self_attn.q_proj.lora_B"), {}, {"part"}),
    "one layer of A dropped": ("all", without(".layers.2.mlp.down_proj.lora_A"), {}, {"part"}),
    "scale of rsLoRA taken as plain": ("rslora", dict, {"use_rslora": False}, {"scaled", "part", "other"}),
    "one target module ignored": ("plain", without(".v_proj.lora_B"), {}, {"part", "scaled", "other", "base"}),
    "weights with 4 bits": ("all", rounded(4), {}, {"part", "scaled"}),
    "the base served": ("plain", without("lora_B"), {}, {"base"}),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SABOTAGES)
async def test_sabotaged_adapter_differs_and_is_named(client, adapters, tmp_path, name, seed):
    of, tensors, config, likeness = SABOTAGES[name]
    found = await compared(client, changed(adapters[f"{of}{seed}"], tmp_path / "sabotaged", tensors, **config))
    assert found.result == "differs", found
    assert found.looks_like in likeness, found


@pytest.mark.parametrize("seed", SEEDS)
async def test_another_adapter_under_the_name_differs(client, adapters, seed):
    file = read_acceptance(adapters[f"plain{seed}"])
    swapped = await compared(client, adapters[f"all{seed}"], file=file)
    assert (swapped.result, swapped.looks_like) == ("differs", "other")
    older = await compared(client, adapters[f"plain{seed % 3 + 1}"], file=file)
    assert older.result == "differs"


@pytest.mark.parametrize("seed", SEEDS)
async def test_other_base_model_at_the_trainer_is_told(client, base, adapters, tmp_path, seed):
    other = copy.deepcopy(base)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
    folder = make_adapter(other, tmp_path / "other", seed, **MADE["plain"])
    found = await compared(client, folder)
    assert (found.result, found.looks_like) == ("differs", "other_base")
