"""The modules of a base model that adapters can change, and their shapes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.core.tensors import Shape

# Prefixes of module names in multimodal base models, which trainers, checkpoints and engines spell differently.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:model|language_model|text_model)\.")

# Architectures for which vLLM accepts adapters on embed_tokens and lm_head; for all others it refuses them.
# source   vLLM 0.32 model_executor/models: those of registry.py whose class has `embedding_modules`
_TAKES_EMBEDDINGS = frozenset((
    "Apertus", "Cohere2", "Cohere", "DeciLM", "Ernie4_5", "Exaone4", "Exaone", "ExaoneMoE", "ExaoneMoe",
    "FalconH1", "Granite", "GraniteMoe", "GraniteMoeHybrid", "GraniteMoeSWA", "GraniteMoeShared",
    "GraniteSWA", "HyperCLOVAX", "IQuestCoder", "InternLM3", "Jamba", "K2Horizon", "LLaMA", "Lfm2", "Lfm2Moe",
    "Llama4", "Llama", "MiniCPM3", "MiniCPM", "Mixtral", "Nemotron", "NemotronH", "NemotronHPuzzle",
    "Param2MoE", "Phi3", "PhiMoE", "Qwen3", "Qwen3Moe", "Qwen3_5", "Qwen3_5Moe", "Solar", "TeleChat2",
    "TeleChat3", "TeleFLM",
))  # fmt: skip
# model_type of models with Llama's layers: separate q, k, v, o, gate, up and down.
_LLAMA_LIKE = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "olmo2", "smollm3")
)

# Config keys that only multimodal models have, and those that only mixtures of experts have.
_PART_KEYS = ("text_config", "vision_config", "audio_config", "thinker_config")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model with which adapters are compared.

    shapes             module -> [out, in] of its weights, by the names of its checkpoint
    takes_embeddings   the engine accepts adapters on `embed_tokens` and `lm_head`
    has_other_names    its modules have other names in other files, as in models with a vision part
    has_experts        it is a mixture of experts; `shapes` may lack them, as checkpoints store them in many ways
    """

    shapes: Mapping[str, Shape]
    takes_embeddings: bool = True
    has_other_names: bool = False
    has_experts: bool = False

    def module_shapes(self) -> "ModuleShapes":
        """An index of the modules' shapes, to look up many of them by name."""
        if not self.has_other_names:
            return ModuleShapes(self.shapes, {})
        return ModuleShapes(self.shapes, {_without_wrappers(module): shape for module, shape in self.shapes.items()})


@dataclass(frozen=True, slots=True)
class ModuleShapes:
    """Module shapes by full name, and by name without prefixes such as `language_model.`."""

    by_name: Mapping[str, Shape]
    by_plain_name: Mapping[str, Shape]

    def find(self, module: str) -> Shape | None:
        """[out, in] of a module; None if the base model has no such module."""
        return self.by_name.get(module) or (
            self.by_plain_name.get(_without_wrappers(module)) if self.by_plain_name else None
        )


def base_model(config: Mapping[str, Any], weights: Mapping[str, Shape]) -> BaseModel | None:
    """The base model by its `config.json` and the weight shapes of its checkpoint; None if neither gives shapes.

    Quantized or missing weights give no shapes: for Llama-like models the config gives them. A model with tied
    embeddings gets an `lm_head` with the shape of its embeddings.
    """
    shapes = dict(_shapes_from_config(config))
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
        has_other_names=any(name in config for name in _PART_KEYS),
        has_experts=any(".experts" in module for module in weights) or _has_experts(config),
    )


def _has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the config, or its text part, is of a mixture of experts."""
    text = config.get("text_config")
    return any(name in part for part in (config, text) if isinstance(part, Mapping) for name in _EXPERT_KEYS)


def _without_wrappers(module: str) -> str:
    """The module's name without prefixes such as `language_model.`."""
    return _WRAPPERS.sub("", module)


def _shapes_from_config(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes of a Llama-like model, or of Phi-3 (which packs q, k, v and gate, up); empty for other models."""
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
