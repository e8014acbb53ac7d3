"""The adapters of the corpus: what each trainer and option writes, and for which families a row exists."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.adapters.making import (
    CONFIG,
    REFERENCE,
    WEIGHTS,
    Workshop,
    change_config,
    change_tensors,
    rename_tensors,
)

PREFIX = "base_model.model."
# Families on which the shapes of trainers are tried, which do not depend on the model.
DENSE = ("llama", "qwen2")
# Families that vLLM serves by transformers' own code.
BY_TRANSFORMERS = ("olmo2", "smollm3", "gpt_neox", "starcoder2", "phi", "gpt_bigcode")
# Families with latent attention (MLA).
LATENT = ("deepseek_v2", "deepseek_v2_dense")
# In transformers 4.4x and 4.5x these classes had their language model outside of `model`.
OUTER_LANGUAGE_MODEL = ("gemma3", "llava", "llava_next", "paligemma", "mistral3", "internvl")
OUTER_MODEL = ("qwen2_vl", "qwen2_5_vl")
# What configs of PEFT 0.4 had.
_OLD_KEYS = (
    "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "r", "revision",
    "target_modules", "task_type",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """One way to write an adapter. `make` writes it into a folder; `families` empty: for all of `kinds`."""

    trainer: str
    name: str
    make: Callable[[Workshop, Path], object]
    families: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("text", "experts", "multimodal")

    def is_for(self, workshop: Workshop) -> bool:
        """Whether there is a row of this shape for a family."""
        family = workshop.family
        return family.name in self.families if self.families else family.kind in self.kinds


def shapes_of(workshop: Workshop) -> list[AdapterShape]:
    """The shapes with a row for this family."""
    return [shape for shape in SHAPES if shape.is_for(workshop)]


# --- helpers ------------------------------------------------------------------------------------------------------


def _attention(shop: Workshop, into: Path, **lora: object) -> Path:
    return shop.adapter(into, target_modules=shop.attention(), **lora)


def _language_only(shop: Workshop, into: Path) -> Path:
    names = "|".join(sorted({name.rpartition(".")[2] for name in shop.language()}))
    towers = "(?!.*(?:vision|visual|audio|image|multi_modal|connector|projector|aligner))"
    return shop.adapter(into, target_modules=rf"^{towers}.*\.(?:{names})$")


def _text_names(name: str) -> str:
    """As AutoModelForCausalLM names the language model."""
    return re.sub(r"model\.(?:language_model|text_model)\.", "model.", name)


def _outer_names(name: str) -> str:
    """As transformers 4 named the language model of LLaVA and others."""
    return re.sub(r"(?<=base_model\.model\.)model\.language_model\.", "language_model.model.", name)


def _named(name: str) -> Callable[[Workshop, Path], object]:
    """An adapter whose config names its base model so."""
    return lambda shop, into: change_config(_attention(shop, into), base_model_name_or_path=name)


def _with_config(remove: tuple[str, ...] = (), **changes: object) -> Callable[[Workshop, Path], object]:
    return lambda shop, into: change_config(_attention(shop, into), remove, **changes)


def _with_lora(**lora: object) -> Callable[[Workshop, Path], object]:
    return lambda shop, into: _attention(shop, into, **lora)


def _renamed(rename: Callable[[str], str]) -> Callable[[Workshop, Path], object]:
    return lambda shop, into: rename_tensors(_attention(shop, into), rename)


def _old_config(shop: Workshop, into: Path) -> None:
    folder = _attention(shop, into)
    keys = json.loads((folder / CONFIG).read_text())
    change_config(folder, tuple(key for key in keys if key not in _OLD_KEYS))


def _zeros(shop: Workshop, into: Path) -> Path:
    folder = _attention(shop, into)
    base = {key: torch.zeros_like(value) for key, value in load_file(folder / WEIGHTS).items()}
    save_file(base, folder / WEIGHTS, {"format": "pt"})
    (folder / REFERENCE).write_text("null")
    return folder


def _pickled(shop: Workshop, into: Path) -> None:
    folder = _attention(shop, into)
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def _sharded(shop: Workshop, into: Path) -> None:
    folder = _attention(shop, into)
    tensors = list(load_file(folder / WEIGHTS).items())
    names = [f"adapter_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for number, name in enumerate(names):
        save_file(dict(tensors[number::2]), folder / name, {"format": "pt"})
    index = {"weight_map": {key: names[place % 2] for place, (key, _) in enumerate(tensors)}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    (folder / WEIGHTS).unlink()


def _with_merged_model(shop: Workshop, into: Path) -> None:
    folder = _attention(shop, into)
    shop.model.save_pretrained(folder)
    (folder / "config.json").unlink()
    (folder / "generation_config.json").unlink(missing_ok=True)


def _trainer_folder(shop: Workshop, into: Path) -> None:
    for step in (100, 200):
        _attention(shop, into / f"checkpoint-{step}")
    (into / "trainer_state.json").write_text("{}")


def _last_checkpoint(shop: Workshop, into: Path) -> None:
    folder = _attention(shop, into)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        (folder / name).write_bytes(b"not read by anyone")
    (folder / "trainer_state.json").write_text("{}")


def _mlx(shop: Workshop, into: Path) -> None:
    folder = _attention(shop, into)

    def mlx_name(name: str) -> str:
        name = name.removeprefix(PREFIX).removesuffix(".weight")
        return name.replace("lora_A", "lora_a").replace("lora_B", "lora_b")

    tensors = {mlx_name(name): tensor.T.contiguous() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / "adapters.safetensors", {"format": "mlx"})
    (folder / WEIGHTS).unlink()
    parameters = {"rank": 8, "dropout": 0.0, "scale": 4.0, "keys": [f"self_attn.{name}" for name in shop.attention()]}
    config = {"model": shop.base_name, "fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / CONFIG).write_text(json.dumps(config))


def _full_fine_tune(shop: Workshop, into: Path) -> None:
    shop.model.save_pretrained(into)
    (into / REFERENCE).write_text("null")


def _text_only(shop: Workshop, into: Path) -> None:
    rename_tensors(_language_only(shop, into), _text_names)


def _outer_language_model(shop: Workshop, into: Path) -> None:
    rename_tensors(_language_only(shop, into), _outer_names)


def _auto_model(shop: Workshop, into: Path) -> None:
    root = re.compile(rf"^{re.escape(PREFIX)}(?:model|gpt_neox|transformer)\.")
    rename_tensors(_attention(shop, into), lambda name: root.sub(PREFIX, name))


def _experts_by_parameters(shop: Workshop, into: Path) -> None:
    shop.adapter(into, rank=4, target_modules=[], target_parameters=shop.expert_parameters())


def _attention_and_experts(shop: Workshop, into: Path) -> None:
    shop.adapter(into, rank=4, target_modules=shop.attention(), target_parameters=shop.expert_parameters())


def _experts_one_by_one(shop: Workshop, into: Path) -> None:
    """As PEFT named experts on transformers 4: a pair for each expert."""
    folder = shop.adapter(into, rank=4, target_modules=[], target_parameters=shop.expert_parameters())
    shapes = {
        name: parameter.shape
        for name, parameter in shop.model.named_parameters()
        if ".experts." in name and parameter.dim() == 3
    }
    parts = ("w1", "w3", "w2") if shop.family.name in ("mixtral", "phimoe") else ("gate_proj", "up_proj", "down_proj")
    tensors = {}
    for name, (experts, out, inner) in shapes.items():
        module, _, last = name.rpartition(".")
        module = module.replace(".mlp.", ".block_sparse_moe.") if parts[0] == "w1" else module
        fused = last.startswith("gate_up")
        for expert in range(experts):
            for part in parts[:2] if fused else parts[2:]:
                size = out // 2 if fused else out
                tensors[f"{PREFIX}{module}.{expert}.{part}.lora_A.weight"] = torch.randn(4, inner) / 8
                tensors[f"{PREFIX}{module}.{expert}.{part}.lora_B.weight"] = torch.randn(size, 4) / 8
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    change_config(folder, ("target_parameters",), target_modules=list(parts))
    (folder / REFERENCE).write_text("null")


def _layers(shop: Workshop, into: Path) -> None:
    _attention(shop, into, layers_to_transform=[1], layers_pattern="layers")


def _more_layers(shop: Workshop, into: Path) -> None:
    def add(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        added = {re.sub(r"\b(layers|h)\.1\.", r"\1.7.", name): each.clone() for name, each in tensors.items()}
        return {**tensors, **added}

    change_tensors(_attention(shop, into), add)


def _wrong_width(shop: Workshop, into: Path) -> None:
    change_tensors(
        _attention(shop, into),
        lambda tensors: {
            name: each[:, :32] if name.endswith("lora_A.weight") else each for name, each in tensors.items()
        },
    )


def _only_b_missing(shop: Workshop, into: Path) -> None:
    def drop(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        lost = next(name for name in tensors if name.endswith("lora_B.weight"))
        return {name: each for name, each in tensors.items() if name != lost}

    change_tensors(_attention(shop, into), drop)


_UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\."
    r"(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))"
)
_SWIFT = r"^(model)(?!.*(lm_head|output|emb|wte|shared)).*\.(k_proj|q_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)$"
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

SHAPES: tuple[AdapterShape, ...] = (
    AdapterShape("PEFT", "attention", _attention, kinds=("text", "experts", "multimodal", "pooling")),
    AdapterShape("PEFT", "all-linear", lambda shop, into: shop.adapter(into, target_modules="all-linear")),
    AdapterShape("PEFT", "latent projection alone", lambda shop, into: shop.adapter(into, target_modules=["kv_b_proj"]),
                 families=LATENT),
    # --- multimodal
    AdapterShape("ms-swift", "language part alone", _language_only, kinds=("multimodal",)),
    AdapterShape("TRL", "text model's names", _text_only, kinds=("multimodal",)),
    AdapterShape("PEFT 0.14", "names of transformers 4", _outer_language_model, families=OUTER_LANGUAGE_MODEL),
    AdapterShape("PEFT 0.14", "names of transformers 4", _text_only, families=OUTER_MODEL),
    AdapterShape(
        "LLaMA-Factory", "head too", lambda shop, into: shop.adapter(
            into, target_modules=r".*lm_head$|.*layers\.\d\.self_attn\.q_proj$"),
        families=("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "mistral3", "qwen3_5"),
    ),
    # --- experts
    AdapterShape("PEFT", "experts alone", _experts_by_parameters, kinds=("experts",)),
    AdapterShape("PEFT", "attention and experts", _attention_and_experts,
                 families=("mixtral", "qwen3_moe", "gpt_oss", "qwen3_vl_moe", "qwen3_5_moe", "qwen2_moe", "olmoe")),
    AdapterShape("PEFT 0.14", "expert by expert", _experts_one_by_one,
                 families=(
        "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "glm4_moe", "qwen3_vl_moe", "qwen3_5_moe")),
    # --- trainers, on models with Llama's layers
    AdapterShape("PEFT 0.4", "old config", _old_config, families=DENSE),
    AdapterShape("Unsloth", "expression and 4-bit base", lambda shop, into: change_config(
        shop.adapter(into, target_modules=_UNSLOTH), base_model_name_or_path=f"unsloth/{shop.family.name}-toy-bnb-4bit",
    ), families=DENSE),
    AdapterShape("ms-swift", "expression", lambda shop, into: change_config(
        shop.adapter(into, target_modules=_SWIFT), modules_to_save=[], lora_dtype=None, lorap_lr_ratio=None,
    ), families=DENSE),
    AdapterShape("Axolotl", "all projections", lambda shop, into: shop.adapter(into, target_modules=_PROJECTIONS),
                 families=DENSE),
    AdapterShape("Axolotl", "whole embeddings", _with_lora(modules_to_save=["embed_tokens", "lm_head"]),
                 families=DENSE),
    AdapterShape("LLaMA-Factory", "checkpoint folder", _last_checkpoint, families=DENSE),
    AdapterShape("TRL", "output folder with checkpoints", _trainer_folder, families=("llama",)),
    AdapterShape("TRL", "merged model beside it", _with_merged_model, families=("llama",)),
    AdapterShape("MLX", "adapters.safetensors", _mlx, families=("llama",)),
    AdapterShape("transformers", "full fine-tune", _full_fine_tune, families=("llama",)),
    AdapterShape("PEFT", "pickled", _pickled, families=("llama",)),
    AdapterShape("PEFT", "in parts", _sharded, families=("llama",)),
    AdapterShape("PEFT", "rsLoRA", _with_lora(use_rslora=True), families=DENSE),
    AdapterShape("PEFT", "DoRA", _with_lora(use_dora=True), families=DENSE),
    AdapterShape("PEFT", "bias lora_only", _with_lora(bias="lora_only"), families=("qwen2",)),
    AdapterShape("PEFT", "lora_bias", _with_lora(lora_bias=True), families=("llama",)),
    AdapterShape("PEFT", "rank_pattern", _with_lora(rank_pattern={"v_proj": 16}, alpha_pattern={"v_proj": 64}),
                 families=DENSE),
    AdapterShape("PEFT", "rank_pattern with groups", _with_lora(
        rank_pattern={
            r"^model\.layers\.(0|1)\.(self_attn|mlp)\.(q|k)_proj": 16, r"layers\.\d{1,2}\.self_attn\.v_proj": 4},
    ), families=DENSE),
    AdapterShape("PEFT", "one layer", _layers, families=DENSE),
    AdapterShape("PEFT", "embeddings and head", lambda shop, into: shop.adapter(
        into, target_modules=["embed_tokens", "lm_head", "q_proj"]), families=("llama", "qwen3", "mistral")),
    AdapterShape("PEFT", "embeddings on a model that takes none", lambda shop, into: shop.adapter(
        into, target_modules=["lm_head", "q_proj"]), families=("qwen2", "gemma2")),
    AdapterShape("PEFT", "tied embeddings", lambda shop, into: shop.adapter(
        into, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True),
                 families=("llama_tied", "starcoder2")),
    AdapterShape("PEFT", "head of tied embeddings", lambda shop, into: shop.adapter(
        into, target_modules=["lm_head", "q_proj"], ensure_weight_tying=True), families=("llama_tied",)),
    AdapterShape("PEFT", "embeddings alone", lambda shop, into: shop.adapter(
        into, target_modules=["embed_tokens", "q_proj"]), families=("olmo2", "smollm3", "starcoder2", "phi")),
    AdapterShape("PEFT", "head alone", lambda shop, into: shop.adapter(
        into, target_modules=["lm_head", "q_proj"]), families=("olmo2", "smollm3", "phi")),
    AdapterShape("PEFT", "LoRA on the head", lambda shop, into: shop.adapter(
        into, target_modules=["q_proj", "score"], task_type="FEATURE_EXTRACTION"), families=("qwen3_classifier",)),
    AdapterShape("PEFT", "new tokens", _with_lora(trainable_token_indices=[5, 6]), families=("llama",)),
    AdapterShape("sentence-transformers", "AutoModel's names", _auto_model, families=(*DENSE, *BY_TRANSFORMERS)),
    AdapterShape("custom loop", "doubled prefix", _renamed(lambda name: PREFIX + name),
                 families=(*DENSE, *BY_TRANSFORMERS)),
    AdapterShape("custom loop", "no prefix", _renamed(lambda name: name.removeprefix(PREFIX)), families=("llama",)),
    AdapterShape("custom loop", "adapter's name in tensors", _renamed(
        lambda name: name.replace(".weight", ".default.weight")), families=("llama",)),
    AdapterShape("custom loop", "compiled model's names", _renamed(
        lambda name: name.replace(PREFIX, PREFIX + "_orig_mod.")), families=("llama",)),
    AdapterShape("custom loop", "null peft_type", _with_config(peft_type=None), families=("llama",)),
    AdapterShape("custom loop", "rank as float", _with_config(r=8.0), families=("llama",)),
    AdapterShape("custom loop", "modules_to_save empty", _with_config(modules_to_save=[]), families=("llama",)),
    AdapterShape("custom loop", "half precision", lambda shop, into: change_tensors(
        _attention(shop, into), lambda tensors: {name: each.half() for name, each in tensors.items()}),
                 families=("llama",)),
    AdapterShape("custom loop", "all zeros", _zeros, families=("llama",)),
    AdapterShape("custom loop", "more layers", _more_layers, families=(*DENSE, *BY_TRANSFORMERS)),
    AdapterShape("custom loop", "other width", _wrong_width, families=("llama",)),
    AdapterShape("custom loop", "lora_B missing", _only_b_missing, families=("llama",)),
    AdapterShape("Axolotl", "local path of the base", _named(r"D:\models\llama-toy"), families=("llama",)),
    AdapterShape("TRL", "snapshot path of the base", _named(
        "/root/.cache/huggingface/hub/models--acme--llama-toy/snapshots/0e9e39f249a16976918f6564b8830bc894c89659"),
                 families=("llama",)),
    AdapterShape("Kaggle", "path of the base", _named("/kaggle/input/llama-toy/transformers/llama-toy/1"),
                 families=("llama",)),
    AdapterShape("Unsloth", "quantized sibling", _named("acme/llama-toy-AWQ"), families=("llama",)),
    AdapterShape("LLaMA-Factory", "trailing blank", _named("acme/llama-toy "), families=("llama",)),
)  # fmt: skip
