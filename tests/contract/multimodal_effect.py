"""A program: what real vLLM does with adapters of a multimodal base, by its plugin's reports and by the canary.

    python -P -m tests.contract.multimodal_effect FOLDER     prints one JSON object: adapter -> what was found

The base is Gemma 3 with random weights. Prompts are text, so no processor of pictures is needed. vLLM runs in this
process.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from lorafleet.engine.canary import BaseReadings, Fingerprint, run_canary
from lorafleet.engine.vllm_plugin.lora_reports import REPORTS_VARIABLE, ask_for_reports, loaded_modules, read_reports

HIDDEN, LAYERS, RANK = 64, 2, 8
TEXT_ALONE, LANGUAGE = "model", "model.language_model"
TOWER = "model.vision_tower.vision_model.encoder"
# name -> prefixes of its layers, as PEFT writes them: `model.` is how AutoModelForCausalLM names them
ADAPTERS = {"text-alone": (TEXT_ALONE,), "both-towers": (LANGUAGE, TOWER), "language": (LANGUAGE,)}


def stand_in_for_torchvision(folder: Path) -> None:
    """Put a torchvision that does nothing on the path: the real one clashes with the CPU build of torch.

    Image processors import it by name. No picture is processed.
    """
    content = (
        "from unittest.mock import MagicMock\n\n\ndef __getattr__(name):\n    if name.startswith('__'):\n"
        "        raise AttributeError(name)\n    return MagicMock(name=name)\n"
    )
    for package in (
        "",
        "io",
        "ops",
        "transforms",
        "transforms/functional",
        "transforms/v2",
        "transforms/v2/functional",
    ):
        where = folder / "torchvision" / package
        where.mkdir(parents=True, exist_ok=True)
        (where / "__init__.py").write_text(content)
    about = folder / "torchvision-0.28.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def make_base(folder: Path) -> Path:
    """Write the base model, without a tokenizer."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(1)
    text = {
        "vocab_size": 256, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
        "sliding_window": 128, "query_pre_attn_scalar": 32,
    }  # fmt: skip
    vision = {
        "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "image_size": 56, "patch_size": 14,
    }  # fmt: skip
    tokens = {"image_token_index": 250, "boi_token_index": 251, "eoi_token_index": 252}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    Gemma3ForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)
    # transformers 5 leaves out a part of the tower's names, by which published checkpoints go, and vLLM.
    weights = folder / "model.safetensors"
    tensors = load_file(weights).items()
    published = "vision_tower.vision_model."
    renamed = {name if published in name else name.replace("vision_tower.", published): each for name, each in tensors}
    save_file(renamed, weights, metadata={"format": "pt"})
    return folder


def make_adapter(folder: Path, prefixes: Sequence[str]) -> Path:
    """Write an adapter on q_proj of each layer below these prefixes."""
    rng = np.random.default_rng(1)
    tensors = {}
    for prefix in prefixes:
        for layer in range(LAYERS):
            module = f"base_model.model.{prefix}.layers.{layer}.self_attn.q_proj"
            for half, shape in (("A", (RANK, HIDDEN)), ("B", (HIDDEN, RANK))):
                tensors[f"{module}.lora_{half}.weight"] = rng.standard_normal(shape).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def main(folder: Path) -> int:
    """Ask vLLM about each adapter, and print what was found."""
    reports = folder / "reports"
    os.environ |= {
        REPORTS_VARIABLE: str(reports), "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    stand_in_for_torchvision(folder / "stand-in")
    base = make_base(folder / "base")
    from vllm import LLM, SamplingParams
    from vllm.config import ModelConfig
    from vllm.lora.request import LoRARequest
    from vllm.multimodal import MULTIMODAL_REGISTRY

    type(MULTIMODAL_REGISTRY).supports_multimodal_inputs = lambda _self, _config: False
    ModelConfig.supports_multimodal_inputs = property(lambda _self: False)
    engine = LLM(
        model=str(base), skip_tokenizer_init=True, enable_lora=True, max_loras=1, max_cpu_loras=4, max_lora_rank=RANK,
        enforce_eager=True, dtype="float32", max_model_len=128, max_num_seqs=2, max_num_batched_tokens=128,
        num_gpu_blocks_override=32, block_size=32,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=1, temperature=0, logprobs=5, detokenize=False)
    requests = {
        name: LoRARequest(name, number, str(make_adapter(folder / name, prefixes)))
        for number, (name, prefixes) in enumerate(ADAPTERS.items(), start=1)
    }

    async def ask(adapter: str | None, prompt: Sequence[int]) -> Fingerprint | None:
        """The log-probabilities of the next token."""
        lora = requests[adapter] if adapter else None
        (answer,) = engine.generate([{"prompt_token_ids": list(prompt)}], sampling, lora_request=lora, use_tqdm=False)
        return tuple(sorted((each.logprob for each in answer.outputs[0].logprobs[0].values()), reverse=True))

    found: dict[str, Any] = {}
    for name, request in requests.items():
        ask_for_reports(reports, name)
        engine.llm_engine.add_lora(request)
        loaded = loaded_modules(read_reports(reports, name))
        canary = asyncio.run(run_canary(ask, name, readings=BaseReadings(), timeout_s=300))
        found[name] = {
            "modules": loaded and loaded.modules,
            "ignored": loaded and loaded.ignored,
            "canary": canary.outcome,
            "requests": canary.requests,
        }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
