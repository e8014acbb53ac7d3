"""The modules of a base model that adapters can change, and their shapes."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from workers.verification.engine_modules import EngineModules, engine_modules
from workers.verification.model_classes import SCORE, ModelTable, is_classifier, is_pooling, with_score, without_towers
from workers.verification.tensors import Shape
from workers.wire import NOTHING_MEASURED, MeasuredModules

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

# model_type of further models whose attention has Llama's four layers; their other layers differ, or are experts.
_LLAMA_ATTENTION = frozenset((
    "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text",
    "qwen3_vl_moe_text", "phimoe", "minimax_m2",
))  # fmt: skip
# Parts of names of towers, whose layers have other sizes than the language model's.
_TOWERS = ("vision", "visual", "audio", "image", "speech")

# Config keys that only multimodal models have, and those of mixtures of experts.
_PART_KEYS = ("text_config", "vision_config", "audio_config", "thinker_config", "llm_config", "language_config")
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model with which adapters are compared.

    shapes             module -> [out, in] of its weights, by the names of its checkpoint
    takes_embeddings   the engine accepts adapters on `embed_tokens` and `lm_head`; used without `engine`
    has_other_names    its modules have other names in other files, as in models with a vision part
    has_experts        it is a mixture of experts; `shapes` may lack them, as checkpoints store them in many ways
    engine             its modules in the engine; None if its model class is not in the table of the engine's version
    expert_shapes      stacked experts' module (`experts.base_layer`, `experts`) -> [out, in] of one expert
    quantization       how its weights are packed, so that they have no shapes of their own; ""
    unknown_class      its architecture, if there is a table and it is not in it
    takes_heads        the engine takes a classification head from an adapter (`modules_to_save`)
    measured           what this very engine was seen to do with adapters on its kinds of modules
    """

    shapes: Mapping[str, Shape]
    takes_embeddings: bool = True
    has_other_names: bool = False
    has_experts: bool = False
    engine: EngineModules | None = None
    expert_shapes: Mapping[str, Shape] = field(default_factory=dict)
    quantization: str = ""
    unknown_class: str = ""
    takes_heads: bool = True
    measured: MeasuredModules = NOTHING_MEASURED

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


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of the engine that serves the base model.

    table         the model classes of its version; None: its version has no table, or it is no vLLM
    with_towers   it takes adapters on the towers of multimodal models
    is_pooling    it serves embeddings, scores or classes; None: as the architecture says
    tokenizer     model or folder whose tokenizer it has; "": its base model's
    dtype         in which it computes, such as float32; "": not known
    absent        those of MEDIA of which it is told to take none
    """

    table: ModelTable | None = None
    with_towers: bool = False
    is_pooling: bool | None = None
    tokenizer: str = ""
    dtype: str = ""
    absent: frozenset[str] = frozenset()


MEDIA: Final = frozenset(("image", "video", "audio"))
"""Kinds of media that multimodal models take beside text."""
NO_ENGINE = EngineFacts()


def base_model(
    config: Mapping[str, Any],
    weights: Mapping[str, Shape],
    *,
    packed: Collection[str] = (),
    facts: EngineFacts = NO_ENGINE,
) -> BaseModel | None:
    """The base model by its `config.json` and the weight shapes of its checkpoint.

    Quantized or missing weights give no shapes: for Llama-like models the config gives them. A model with tied
    embeddings gets an `lm_head` with the shape of its embeddings.

    weights  module -> shape of its weight
    packed   modules whose weights are packed by a quantization
    returns  None if there are neither shapes nor a model class of the engine
    """
    quantization = _quantization_method(config)
    packed_names = frozenset(packed)
    shapes = dict(_shapes_from_config(config))
    if not quantization or packed_names:
        # Packed weights are told apart where they were read; without them all are doubtful.
        shapes |= {name: shape for name, shape in weights.items() if len(shape) == 2 and name not in packed_names}
    sizes = _layer_sizes(_text_part(config))
    shapes |= {
        name: sizes[layer] for name in packed_names if (layer := _in_layer(name)) in sizes and not is_in_tower(name)
    }
    names = [str(name) for name in config.get("architectures") or []]
    found = facts.table.find(names) if facts.table else None
    if found and not found.is_pooling and SCORE in weights and is_classifier(names):
        found = with_score(found)
    if found and found.language and _media_taken(config) <= facts.absent:
        found = without_towers(found)
    if not shapes and found is None:
        return None
    if "lm_head" not in shapes:
        embeddings = [shape for module, shape in shapes.items() if module.endswith("embed_tokens")]
        shapes |= dict(zip(["lm_head"], embeddings, strict=False))
    text = _text_part(config)
    layers, dense = _first_count(text, _LAYER_KEYS), _first_count(text, ("first_k_dense_replace",))
    # DeepSeek's configs name experts also where every layer is dense.
    experts = None if layers and dense and dense >= layers else _first_count(text, _EXPERT_KEYS)
    engine = None
    if facts.table and found:
        engine = engine_modules(
            found,
            {**dict.fromkeys(weights), **dict.fromkeys(packed_names), **shapes},
            layers=_first_count(text, _LAYER_KEYS),
            experts=experts,
            text_names=facts.table.text_names,
            with_towers=facts.with_towers,
            is_pooling=is_pooling(names) if facts.is_pooling is None else facts.is_pooling,
        )
    return BaseModel(
        shapes,
        takes_embeddings=not names or any(name.removesuffix("ForCausalLM") in _TAKES_EMBEDDINGS for name in names),
        has_other_names=any(name in config for name in _PART_KEYS),
        has_experts=any(".experts" in module for module in weights) or experts is not None,
        engine=engine,
        expert_shapes=_expert_shapes(text) if found and found.has_3d_experts else {},
        quantization=quantization,
        unknown_class=", ".join(names) if facts.table and found is None else "",
        takes_heads=_takes_heads(names, facts),
    )


def _media_taken(config: Mapping[str, Any]) -> frozenset[str]:
    """The kinds of media that a multimodal model takes, by the tokens and parts in its config; at least pictures."""
    return frozenset(kind for kind in MEDIA if kind == "image" or any(str(key).startswith(kind) for key in config))


def _takes_heads(architectures: Sequence[str], facts: EngineFacts) -> bool:
    """Whether the engine takes a classification head from an adapter. Without a table the engine decides.

    source  vLLM 0.32 lora/model_manager.py supported_modules_to_save: what scores as cross-encoders do, which are all
            sequence classifiers; 0.33: token classifiers, too
    """
    if facts.table is None:
        return True
    if any(name.endswith("ForTokenClassification") for name in architectures):
        return facts.table.all_heads
    return is_classifier(architectures) or bool(facts.is_pooling)


def _quantization_method(config: Mapping[str, Any]) -> str:
    """How a config says that the weights are packed; "" if they are not."""
    found = config.get("quantization_config") or _text_part(config).get("quantization_config")
    if not found:
        return ""
    return str(found.get("quant_method") or "quantized") if isinstance(found, Mapping) else "quantized"


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a multimodal model's config that is about its language model; else the config."""
    for name in _TEXT_KEYS:
        if isinstance(part := config.get(name), Mapping):
            return _text_part(part)
    return config


def _first_count(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """The first of these fields that is a count of 1 or more; None without one."""
    return next((config[name] for name in names if type(config.get(name)) is int and config[name] > 0), None)


def _expert_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """[out, in] of one expert's matrices, by the names under which they are stacked; empty if not known."""
    hidden = _first_count(config, ("hidden_size",))
    middle = _first_count(config, ("moe_intermediate_size", "intermediate_size"))
    if hidden is None or middle is None:
        return {}
    return {".experts.base_layer": (2 * middle, hidden), ".experts": (hidden, middle)}


def _without_wrappers(module: str) -> str:
    """The module's name without prefixes such as `language_model.`."""
    return _WRAPPERS.sub("", module)


def _shapes_from_config(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes of a Llama-like model, or of Phi-3 (which packs q, k, v and gate, up); empty for other models."""
    kind, layers, vocabulary = config.get("model_type"), _first_count(config, _LAYER_KEYS), config.get("vocab_size")
    layer = _layer_sizes(config)
    if not layer or kind in _LLAMA_ATTENTION or layers is None or type(vocabulary) is not int:
        return {}
    shapes: dict[str, Shape] = {
        f"model.layers.{index}.{module}": shape for index in range(layers) for module, shape in layer.items()
    }
    embeddings = (vocabulary, config["hidden_size"])
    return shapes | {"model.embed_tokens": embeddings, "lm_head": embeddings}


def _layer_sizes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Module in a layer -> [out, in], by the sizes of a language model's config; empty if its layers are not known."""
    try:
        kind, hidden = config["model_type"], int(config["hidden_size"])
        heads = int(config["num_attention_heads"])
        key_heads = int(config.get("num_key_value_heads") or heads)
        head = int(config.get("head_dim") or hidden // heads)
        middle = int(config.get("intermediate_size") or 0)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return {}
    queries, keys = heads * head, key_heads * head
    output: dict[str, Shape] = {"self_attn.o_proj": (hidden, queries)}
    parts: dict[str, Shape] = {"self_attn.q_proj": (queries, hidden)}
    parts |= {f"self_attn.{name}": (keys, hidden) for name in ("k_proj", "v_proj")}
    if kind in _LLAMA_ATTENTION:
        return output | parts
    if not middle:
        return {}
    output |= {"mlp.down_proj": (hidden, middle)}
    if kind in _LLAMA_LIKE:
        return output | parts | {f"mlp.{name}": (middle, hidden) for name in ("gate_proj", "up_proj")}
    if kind == "phi3":
        return output | {"self_attn.qkv_proj": (queries + 2 * keys, hidden), "mlp.gate_up_proj": (2 * middle, hidden)}
    return {}


def _in_layer(module: str) -> str:
    """A module's name inside its layer, such as `self_attn.q_proj`; "" outside of layers."""
    return ".".join(module.rpartition(".layers.")[2].split(".")[1:])


def is_in_tower(module: str) -> bool:
    """Whether a module is of a vision or audio tower, by its name."""
    return any(tower in module for tower in _TOWERS)
