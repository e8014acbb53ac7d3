"""What a base model has that an adapter can change: its modules and their shapes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.core.tensors import Shape

# Other spellings of the same module, in base models with more than text: trainers, checkpoints and engines differ.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:model|language_model|text_model)\.")

# Architectures whose embed_tokens and lm_head vLLM lets an adapter change, elsewhere it refuses such an adapter.
# source   vLLM 0.32 model_executor/models: those of registry.py whose class has `embedding_modules`
_TAKES_EMBEDDINGS = frozenset((
    "Apertus", "Cohere2", "Cohere", "DeciLM", "Ernie4_5", "Exaone4", "Exaone", "ExaoneMoE", "ExaoneMoe",
    "FalconH1", "Granite", "GraniteMoe", "GraniteMoeHybrid", "GraniteMoeSWA", "GraniteMoeShared",
    "GraniteSWA", "HyperCLOVAX", "IQuestCoder", "InternLM3", "Jamba", "K2Horizon", "LLaMA", "Lfm2", "Lfm2Moe",
    "Llama4", "Llama", "MiniCPM3", "MiniCPM", "Mixtral", "Nemotron", "NemotronH", "NemotronHPuzzle",
    "Param2MoE", "Phi3", "PhiMoE", "Qwen3", "Qwen3Moe", "Qwen3_5", "Qwen3_5Moe", "Solar", "TeleChat2",
    "TeleChat3", "TeleFLM",
))  # fmt: skip
# model_type of those whose layers are Llama's: separate q, k, v, o, gate, up and down.
_LLAMA_LIKE = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "olmo2", "smollm3")
)

# Keys of a config that only models of several parts have, and those that only mixtures of experts have.
_PARTS = ("text_config", "vision_config", "audio_config", "thinker_config")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model that adapters are held against.

    shapes             module -> [out, in] of its weights, as its own checkpoint names them
    takes_embeddings   whether the engine takes adapters on `embed_tokens` and `lm_head`
    has_other_names    whether its modules go by other names too, as those of models with a vision part do
    has_experts        whether it is a mixture; checkpoints store experts in many ways, so `shapes` may lack them
    """

    shapes: Mapping[str, Shape]
    takes_embeddings: bool = True
    has_other_names: bool = False
    has_experts: bool = False

    def named(self) -> "ModuleShapes":
        """For looking up many modules."""
        if not self.has_other_names:
            return ModuleShapes(self.shapes, {})
        return ModuleShapes(self.shapes, {_plain(module): shape for module, shape in self.shapes.items()})


@dataclass(frozen=True, slots=True)
class ModuleShapes:
    """Modules by name, and by name without the wrappers around it."""

    exact: Mapping[str, Shape]
    plain: Mapping[str, Shape]

    def find(self, module: str) -> Shape | None:
        """[out, in] of a module, None where the base model has none of this name."""
        return self.exact.get(module) or (self.plain.get(_plain(module)) if self.plain else None)


def base_model(config: Mapping[str, Any], weights: Mapping[str, Shape]) -> BaseModel | None:
    """From the base model's `config.json` and the shapes of its checkpoint's weights; None where neither tells.

    Quantized weights are packed and their shapes say nothing: there, and where the files are not at hand, the config
    of Llama-like models does. A model with tied embeddings has no `lm_head` of its own.
    """
    shapes = dict(_shapes_of(config))
    if not config.get("quantization_config"):
        shapes |= {module: shape for module, shape in weights.items() if len(shape) == 2}
    if not shapes:
        return None
    if "lm_head" not in shapes:
        embeddings = [shape for module, shape in shapes.items() if module.endswith("embed_tokens")]
        shapes |= dict(zip(["lm_head"], embeddings, strict=False))
    architectures = config.get("architectures") or []
    takes_embeddings = not architectures or any(
        str(name).removesuffix("ForCausalLM") in _TAKES_EMBEDDINGS for name in architectures
    )
    return BaseModel(
        shapes,
        takes_embeddings,
        has_other_names=any(name in config for name in _PARTS),
        has_experts=any(".experts" in module for module in weights) or _has_experts(config),
    )


def _has_experts(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config")
    return any(name in part for part in (config, text) if isinstance(part, Mapping) for name in _EXPERTS)


def _plain(module: str) -> str:
    return _WRAPPERS.sub("", module)


def _shapes_of(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Of a Llama-like model, or of Phi-3 (which packs q, k, v and gate, up); empty for others."""
    try:
        kind, hidden, middle = config["model_type"], int(config["hidden_size"]), int(config["intermediate_size"])
        heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        key_heads = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or hidden // heads)
        vocabulary = int(config["vocab_size"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return {}
    queries, keys = heads * head, key_heads * head
    layer = {"self_attn.o_proj": (hidden, queries), "mlp.down_proj": (hidden, middle)}
    if kind in _LLAMA_LIKE:
        layer |= {"self_attn.q_proj": (queries, hidden)}
        layer |= {f"self_attn.{name}": (keys, hidden) for name in ("k_proj", "v_proj")}
        layer |= {f"mlp.{name}": (middle, hidden) for name in ("gate_proj", "up_proj")}
    elif kind == "phi3":
        layer |= {"self_attn.qkv_proj": (queries + 2 * keys, hidden), "mlp.gate_up_proj": (2 * middle, hidden)}
    else:
        return {}
    shapes: dict[str, Shape] = {
        f"model.layers.{index}.{module}": shape for index in range(layers) for module, shape in layer.items()
    }
    return shapes | {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)}
