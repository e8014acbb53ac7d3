"""A base model of a 7B model's shape without weights, which vLLM fills by itself, and adapters of that shape."""

import json
from pathlib import Path

from lorafleet.local.tiny_model import make_adapter, make_model

# Qwen2.5-7B's config.json.
LARGE_SHAPE = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
}


def make_large_model(into: Path) -> Path:
    """The tiny model's tokenizer with a config of a 7B model; for `--load-format dummy`."""
    make_model(into)
    (into / "model.safetensors").unlink()
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | LARGE_SHAPE))
    return into


def make_adapter_for(model: Path, into: Path, name: str, *, rank: int) -> Path:
    """An adapter on every linear module of a model of either shape, in bfloat16; returns its folder."""
    folder = make_adapter(into, name, rank=rank)
    config = json.loads((model / "config.json").read_text())
    if config["hidden_size"] == LARGE_SHAPE["hidden_size"]:
        _write_large_weights(folder, rank)
    return folder


def _write_large_weights(folder: Path, rank: int) -> None:
    """Replace an adapter's weights by small random ones for `LARGE_SHAPE`."""
    import torch
    from safetensors.torch import save_file

    hidden, inner = LARGE_SHAPE["hidden_size"], LARGE_SHAPE["intermediate_size"]
    heads = hidden // LARGE_SHAPE["num_attention_heads"] * LARGE_SHAPE["num_key_value_heads"]
    attention = {"q_proj": (hidden, hidden), "k_proj": (heads, hidden), "v_proj": (heads, hidden)}
    modules = {f"self_attn.{name}": shape for name, shape in {**attention, "o_proj": (hidden, hidden)}.items()}
    modules |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    tensors = {}
    for layer in range(LARGE_SHAPE["num_hidden_layers"]):
        for module, (out, into) in modules.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, into, dtype=torch.bfloat16) * 0.01
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, rank, dtype=torch.bfloat16) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
