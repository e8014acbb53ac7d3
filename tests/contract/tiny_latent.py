"""A dense toy of DeepSeek-V2 with random weights, of the one size that vLLM's CPU kernel of latent attention takes."""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lorafleet.local.tiny_model import make_model

LAYERS, HIDDEN, MIDDLE, HEADS, VOCABULARY = 2, 64, 96, 2, 4096
NOPE, ROPE, VALUE, LATENT = 32, 64, 32, 512
RANK = 8
# Module in a layer -> [out, in].
SHAPES: Mapping[str, tuple[int, int]] = {
    "self_attn.q_proj": (HEADS * (NOPE + ROPE), HIDDEN),
    "self_attn.kv_a_proj_with_mqa": (LATENT + ROPE, HIDDEN),
    "self_attn.kv_b_proj": (HEADS * (NOPE + VALUE), LATENT),
    "self_attn.o_proj": (HIDDEN, HEADS * VALUE),
    "mlp.gate_proj": (MIDDLE, HIDDEN),
    "mlp.up_proj": (MIDDLE, HIDDEN),
    "mlp.down_proj": (HIDDEN, MIDDLE),
}
CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN, "intermediate_size": MIDDLE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "max_position_embeddings": 2048, "first_k_dense_replace": LAYERS,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "topk_method": "greedy", "kv_lora_rank": LATENT, "q_lora_rank": None,
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


def make_latent_model(folder: Path) -> Path:
    """Write the base model, with the tokenizer of the tiny model."""
    tokens = make_model(folder / "tokens")
    base = folder / "latent-toy"
    base.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokens / name, base / name)
    rng = np.random.default_rng(1)
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
    shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in SHAPES.items()}
    weights = {
        f"{name}.weight": (rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    norms = {"model.norm": HIDDEN}
    for layer in range(LAYERS):
        norms |= {f"model.layers.{layer}.{name}_layernorm": HIDDEN for name in ("input", "post_attention")}
        norms[f"model.layers.{layer}.self_attn.kv_a_layernorm"] = LATENT
    weights |= {f"{name}.weight": np.ones(size, np.float32) for name, size in norms.items()}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    (base / "config.json").write_text(json.dumps(CONFIG))
    return base


def make_latent_adapter(folder: Path, modules: Collection[str] = SHAPES.keys()) -> Path:
    """Write an adapter on these modules of each layer; the same module has the same weights in every adapter."""
    tensors = {}
    for layer in range(LAYERS):
        for number, (name, (out, into)) in enumerate(SHAPES.items()):
            rng = np.random.default_rng([layer, number])
            pair = {"A": rng.standard_normal((RANK, into)) / into**0.5, "B": rng.standard_normal((out, RANK)) / RANK}
            if name in modules:
                module = f"base_model.model.model.layers.{layer}.{name}"
                tensors |= {f"{module}.lora_{half}.weight": each.astype(np.float32) for half, each in pair.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.rpartition(".")[2] for name in modules})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    config["base_model_name_or_path"] = "acme/latent-toy"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
