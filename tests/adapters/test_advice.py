"""What an error message of the verification advises is accepted by the verification itself."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.test_corpus import FAMILIES, family, rules_of
from workers.core.errors import SourceError
from workers.verification.base_model import BaseModel
from workers.verification.manifest import AdapterRules, check_adapter
from workers.verification.peft import EMBEDDINGS
from workers.verification.tensors import Shape, TensorHeader

RANK = 8
PREFIX = "base_model.model."
Tensors = dict[str, TensorHeader]


def pair(module: str, shape: Shape, rank: int = RANK) -> Tensors:
    """An adapter's tensors for a module of this [out, in]."""
    if module.endswith("embed_tokens"):
        return {
            f"{PREFIX}{module}.lora_embedding_A": TensorHeader("F32", (rank, shape[0])),
            f"{PREFIX}{module}.lora_embedding_B": TensorHeader("F32", (shape[1], rank)),
        }
    return {
        f"{PREFIX}{module}.lora_A.weight": TensorHeader("F32", (rank, shape[1])),
        f"{PREFIX}{module}.lora_B.weight": TensorHeader("F32", (shape[0], rank)),
    }


def refusal(tensors: Mapping[str, TensorHeader], rules: AdapterRules, **config: Any) -> str:
    """The message with which an adapter is refused; "" if it is accepted without an ignored module."""
    raw = {"r": RANK, "lora_alpha": 16, "target_modules": "all-linear"} | config
    try:
        described = check_adapter(json.dumps(raw).encode(), tensors, rules)
    except SourceError as exc:
        return str(exc)
    return f"ignored: {described.verdict.ignored}" if described.verdict.ignored else ""


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_to_be_trained_by_target_modules_exactly_where_that_is_accepted(name: str, tmp_path: Path):
    rules = rules_of(family(name), tmp_path / name)
    assert rules.base is not None
    modules = {module.rpartition(".")[2]: (module, shape) for module, shape in rules.base.shapes.items()}
    found = {last: modules[last] for last in EMBEDDINGS if last in modules}
    linear = next(
        tensors
        for module, shape in rules.base.shapes.items()
        if module.endswith(("_proj", ".dense", ".out_proj", ".qkv", ".query"))
        if not refusal(tensors := pair(module, shape), rules)
    )
    by_config = refusal(linear, rules, modules_to_save=list(EMBEDDINGS))
    whole = {f"{PREFIX}model.embed_tokens.modules_to_save.weight": TensorHeader("F32", (8, 8))}
    by_tensor = refusal(linear | whole, rules)
    for last, (module, shape) in found.items():
        is_accepted = not refusal(linear | pair(module, shape), rules)
        for message in (by_config, by_tensor):
            if "if the engine takes" in message:
                assert rules.base.unknown_class
                continue
            advised = message.partition("leave ")[0].partition("by target_modules")
            assert bool(advised[1] and last in advised[0].rpartition("train ")[2]) == is_accepted, (last, message)


def test_without_a_base_model_the_advice_has_its_condition():
    rules = AdapterRules(None, frozenset(), "off")
    linear = pair("model.layers.0.self_attn.q_proj", (8, 8))
    message = refusal(linear, rules, modules_to_save=["lm_head"])
    assert "if the engine takes adapters on them (docs/engines.md), else not at all" in message


Q, V, NORM = (f"model.layers.0.self_attn.{name}" for name in ("q_proj", "v_proj", "q_norm"))
SHAPES = {Q: (32, 64), V: (16, 64), "model.layers.0.self_attn.k_proj": (16, 64), "lm_head": (100, 64)}
RULES = AdapterRules(max_rank=16, base_names=frozenset({"base"}), base=BaseModel(SHAPES, takes_embeddings=False))
GOOD = pair(Q, SHAPES[Q])
Case = tuple[Tensors, dict[str, Any], str, Tensors, dict[str, Any]]

FOLLOWED: Mapping[str, Case] = {
    "dora": (
        GOOD | {f"{PREFIX}{Q}.lora_magnitude_vector": TensorHeader("F32", (32,))}, {}, "train without it", GOOD, {},
    ),
    "use_dora": (GOOD, {"use_dora": True}, "train without DoRA", GOOD, {}),
    "bias": (GOOD, {"bias": "all"}, "accepted is 'none'", GOOD, {"bias": "none"}),
    "initialisation": (
        GOOD, {"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion",
        pair(Q, SHAPES[Q], 16), {"r": 16, "init_lora_weights": True},  # PEFT doubles the rank
    ),
    "saved norm": (GOOD, {"modules_to_save": ["norm"]}, "leave it out of modules_to_save", GOOD, {}),
    "norm's tensor": (
        GOOD | {f"{PREFIX}{NORM}.weight": TensorHeader("F32", (8,))}, {}, "leave it out of modules_to_save", GOOD, {},
    ),
    "named": (
        {name.replace(".weight", ".default.weight"): each for name, each in GOOD.items()}, {},
        "save it with PEFT's save_pretrained", GOOD, {},
    ),
    "half": (
        {name: each for name, each in GOOD.items() if "lora_A" in name}, {}, "accepted are both lora_A and lora_B",
        GOOD, {},
    ),
    "rank": (GOOD, {"r": 4}, "through r or rank_pattern", GOOD, {"r": 4, "rank_pattern": {"q_proj": 8}}),
    "untargeted": (
        GOOD, {"target_modules": ["v_proj"]}, "tensors of targeted modules", GOOD, {"target_modules": ["q_proj"]},
    ),
    "packed": (
        pair("model.layers.0.self_attn.qkv_proj", (64, 64)) | GOOD, {}, "q_proj, k_proj, v_proj, one pair each",
        {name: each for module in SHAPES if "_proj" in module for name, each in pair(module, SHAPES[module]).items()},
        {},
    ),
    "lm_head": (GOOD | pair("lm_head", SHAPES["lm_head"]), {}, "accepted are its linear layers", GOOD, {}),
    "base": (
        GOOD, {"base_model_name_or_path": "org/other"}, "this worker serves base; accepted are those",
        GOOD, {"base_model_name_or_path": "base"},
    ),
    "alpha": (GOOD, {"lora_alpha": float("inf")}, "a finite number other than 0", GOOD, {"lora_alpha": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLLOWED.values(), ids=FOLLOWED)
def test_an_adapter_that_follows_the_advice_is_accepted(case: Case):
    tensors, config, advice, followed, followed_config = case
    assert advice in refusal(tensors, RULES, **config)
    assert refusal(followed, RULES, **followed_config) == ""
