"""A corpus of adapters for the tiny model: broken ones with their error codes, and good ones.

It also says what real vLLM does with each; tests/contract/test_broken.py checks that.
"""

import json
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lorafleet.local.tiny_model import FEED_FORWARD, HIDDEN, LAYERS, MODEL_NAME, VOCABULARY
from workers.verification.tensors import MAX_HEADER_BYTES

MAX_RANK = 16
KEYS = HIDDEN // 2  # outputs of k_proj and v_proj: two of four heads
PREFIX = "base_model.model."
OUT_IN = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
    "mlp.down_proj": (HIDDEN, FEED_FORWARD),
}
WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "F8_E4M3": 1}

Tensors = dict[str, tuple[str, tuple[int, ...]]]
Files = dict[str, bytes]


@dataclass(frozen=True)
class BrokenAdapter:
    """One adapter. `code` None: it is accepted. `why`: why we refuse an adapter that vLLM accepts."""

    name: str
    code: str | None
    config: Mapping[str, Any] = field(default_factory=dict)
    leave_out: str = ""
    tensors: Callable[[Tensors], Tensors] = lambda tensors: tensors
    files: Callable[[Files], Files] = lambda files: files
    vllm: Literal["takes", "refuses", "not asked"] = "refuses"
    why: str = ""

    def write(self, root: Path) -> Path:
        """Write the adapter below `root`; returns its folder."""
        message = {key: value for key, value in {**CONFIG, **self.config}.items() if key != self.leave_out}
        files = {
            "adapter_config.json": json.dumps(message).encode(),
            "adapter_model.safetensors": safetensors(self.tensors(pairs())),
        }
        folder = root / self.name
        folder.mkdir(parents=True)
        for name, content in self.files(files).items():
            (folder / name).write_bytes(content)
        return folder


CONFIG: Mapping[str, Any] = {
    "base_model_name_or_path": MODEL_NAME,
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 8,
    "lora_alpha": 16,
    "bias": "none",
    "target_modules": [module.partition(".")[2] for module in OUT_IN],
}


def pairs(
    rank: int = 8, layers: int = LAYERS, *, modules: Mapping[str, tuple[int, int]] = OUT_IN, dtype: str = "BF16"
) -> Tensors:
    """Zeros for every module of every layer."""
    found: Tensors = {}
    for layer in range(layers):
        for module, shape in modules.items():
            found |= pair(f"model.layers.{layer}.{module}", shape, rank=rank, dtype=dtype)
    return found


def pair(module: str, out_in: tuple[int, int], *, rank: int = 8, dtype: str = "BF16") -> Tensors:
    out, into = out_in
    return {
        f"{PREFIX}{module}.lora_A.weight": (dtype, (rank, into)),
        f"{PREFIX}{module}.lora_B.weight": (dtype, (out, rank)),
    }


def safetensors(tensors: Tensors, **changes: Any) -> bytes:
    """The file with these tensors, all zeros; `changes` override the header's first entry."""
    end = sum(_size(*tensor) for tensor in tensors.values())
    return safetensors_header(tensors, **changes) + bytes(end)


def safetensors_header(tensors: Tensors, **changes: Any) -> bytes:
    """The file without its tensor data."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + _size(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    if changes:
        header[next(iter(header))] |= changes
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    return WIDTH[dtype] * math.prod(shape)


# --- faults -------------------------------------------------------------------------------------------------------

W = "adapter_model.safetensors"
C = "adapter_config.json"
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


def add(module: str, out_in: tuple[int, int], **more: Any) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | pair(module, out_in, **more)


def rename(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


def without(*names: str) -> Callable[[Files], Files]:
    return lambda files: {name: content for name, content in files.items() if name not in names}


def weights(change: Callable[[bytes], bytes]) -> Callable[[Files], Files]:
    return lambda files: files | {W: change(files[W])}


def config_bytes(raw: bytes) -> Callable[[Files], Files]:
    return lambda files: files | {C: raw}


def header(**changes: Any) -> Callable[[Files], Files]:
    return lambda files: files | {W: safetensors(pairs(), **changes)}


EMBED: Tensors = {
    f"{PREFIX}model.embed_tokens.lora_embedding_A": ("BF16", (8, VOCABULARY)),
    f"{PREFIX}model.embed_tokens.lora_embedding_B": ("BF16", (HIDDEN, 8)),
}
FIRST = HIDDEN * 8 * 2  # bytes of the first tensor
POISON = "the next request of anybody at that engine is answered wrongly"
UNASKED = "the engine would match it against its modules, for hours: 24 times `a` take 4 s"
UNREAD = "vLLM does not read this field"
SILENT = "vLLM copies what overlaps or belongs to a module it has, drops the rest, and says nothing"

BROKEN = (
    # Files
    BrokenAdapter("no-config", "adapter_incomplete", files=without(C)),
    BrokenAdapter("no-weights", "adapter_incomplete", files=without(W)),
    BrokenAdapter("in-parts", "adapter_incomplete",
                  files=lambda f: {C: f[C], "adapter_model-00001-of-00002.safetensors": f[W]}),
    BrokenAdapter("pickled", "adapter_pickled", files=lambda f: {C: f[C], "adapter_model.bin": pickle.dumps({})}),
    # Config
    BrokenAdapter("config-no-json", "adapter_config_invalid", files=config_bytes(b"{nope")),
    BrokenAdapter("config-a-list", "adapter_config_invalid", files=config_bytes(b"[]")),
    BrokenAdapter("no-r", "adapter_config_invalid", leave_out="r"),
    BrokenAdapter("no-alpha", "adapter_config_invalid", leave_out="lora_alpha"),
    BrokenAdapter("no-targets", "adapter_config_invalid", leave_out="target_modules"),
    BrokenAdapter("r-zero", "adapter_config_invalid", {"r": 0}),
    BrokenAdapter("r-text", "adapter_config_invalid", {"r": "8"}),
    BrokenAdapter("alpha-text", "adapter_config_invalid", {"lora_alpha": "16"}),
    BrokenAdapter("alpha-zero", "adapter_config_invalid",
                  {"lora_alpha": 0}, vllm="takes", why="it would change nothing"),
    BrokenAdapter("targets-empty", "adapter_config_invalid", {"target_modules": []}, vllm="takes", why=UNREAD),
    BrokenAdapter("rank-pattern-text", "adapter_config_invalid", {"rank_pattern": {"q_proj": "8"}}),
    BrokenAdapter("pattern-endless", "adapter_config_invalid", {"alpha_pattern": {"(a|a)+z": 8}},
         tensors=rename("model.layers.0", "a" * 40), vllm="not asked", why=UNASKED),
    BrokenAdapter("ia3", "peft_type_unsupported", {"peft_type": "IA3"}, vllm="takes", why=UNREAD),
    BrokenAdapter("dora", "dora_unsupported", {"use_dora": True}),
    BrokenAdapter("bias", "bias_unsupported", {"bias": "all"}),
    BrokenAdapter("lora-bias", "bias_unsupported", {"lora_bias": True}),
    BrokenAdapter("whole-head", "modules_to_save_unsupported", {"modules_to_save": ["lm_head"]}),
    BrokenAdapter("pissa", "peft_feature_unsupported", {"init_lora_weights": "pissa"}),
    BrokenAdapter("replicated", "peft_feature_unsupported", {"layer_replication": [[0, 2], [1, 3]]}),
    BrokenAdapter("activated", "peft_feature_unsupported", {"alora_invocation_tokens": [1, 2]}),
    BrokenAdapter("own-tokens", "peft_feature_unsupported", {"trainable_token_indices": [5]}, vllm="takes", why=UNREAD),
    BrokenAdapter(
        "other-base",
        "base_model_mismatch",
        {"base_model_name_or_path": "org/other"},
        vllm="takes",
        why="vLLM does not compare base models",
    ),
    # Ranks
    BrokenAdapter("rank-32", "rank_too_big", {"r": 32}, tensors=lambda _: pairs(32)),
    BrokenAdapter("pattern-32", "rank_too_big", {"rank_pattern": {"v_proj": 32}}),
    BrokenAdapter("r-16-tensors-8", "rank_mismatch", {"r": 16}, vllm="takes", why="served with the wrong scale"),
    BrokenAdapter(
        "pattern-unkept",
        "rank_mismatch",
        {"rank_pattern": {"q_proj": 4}},
        vllm="takes",
        why="served with the wrong scale",
    ),
    BrokenAdapter("halves-of-two-ranks", "rank_mismatch",
                  tensors=lambda t: t | {f"{Q}.lora_B.weight": ("BF16", (HIDDEN, 4))},
         vllm="takes", why=SILENT),
    # Header of the weights
    BrokenAdapter("garbage", "weights_corrupt", files=weights(lambda _: b"\xff" * 100)),
    BrokenAdapter("nothing", "weights_corrupt", files=weights(lambda _: b"")),
    BrokenAdapter("cut-short", "weights_corrupt", files=weights(lambda raw: raw[:-64])),
    BrokenAdapter("padded", "weights_corrupt", files=weights(lambda raw: raw + bytes(64))),
    BrokenAdapter("header-too-large", "weights_corrupt",
         files=weights(lambda raw: (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + raw[8:])),
    BrokenAdapter("overlapping", "weights_corrupt", files=header(data_offsets=[FIRST, 2 * FIRST])),
    BrokenAdapter("dtype-unknown", "weights_corrupt", files=header(dtype="BF15")),
    BrokenAdapter("shape-of-other-size", "weights_corrupt", files=header(shape=[9, HIDDEN])),
    # Tensors
    BrokenAdapter("no-tensors", "weights_empty", tensors=lambda _: {}),
    BrokenAdapter("whole-weights", "tensor_unexpected",
                  tensors=lambda t: t | {f"{Q}.weight": ("BF16", (HIDDEN, HIDDEN))}),
    BrokenAdapter("named-adapter", "tensor_unexpected", tensors=rename(".weight", ".default.weight")),
    BrokenAdapter("half-a-pair", "tensor_unpaired",
         tensors=lambda t: {name: value for name, value in t.items() if name != f"{Q}.lora_B.weight"}),
    BrokenAdapter("integers", "dtype_unsupported", tensors=lambda _: pairs(dtype="I8"), vllm="takes",
         why="vLLM converts them, without the scale they need"),
    # Values
    *(
        BrokenAdapter(name, "weights_not_finite", tensors=lambda _, dtype=dtype: pairs(dtype=dtype), vllm="takes",
             files=weights(lambda raw, last=last: raw[:-len(last)] + last), why=POISON)
        for name, dtype, last in (
            ("nan", "BF16", b"\xc0\x7f"), ("negative-nan", "F32", b"\1\0\x80\xff"), ("infinite", "F16", b"\0\x7c"),
            ("nan-float64", "F64", bytes(6) + b"\xf8\x7f"), ("nan-float8", "F8_E4M3", b"\x7f"),
            ("beyond-float16", "F32", b"\0\xf0\x7f\x47"),
        )
    ),
    # Against the base model
    BrokenAdapter("no-such-module", "module_unknown", {"target_modules": [*CONFIG["target_modules"], "z_proj"]},
         tensors=add("model.layers.0.self_attn.z_proj", (HIDDEN, HIDDEN))),
    BrokenAdapter("packed", "module_unknown", {"target_modules": "all-linear"},
         tensors=add("model.layers.0.self_attn.qkv_proj", (HIDDEN + 2 * KEYS, HIDDEN))),
    BrokenAdapter("more-layers", "module_unknown",
                  tensors=lambda _: pairs(layers=LAYERS + 1), vllm="takes", why=SILENT),
    BrokenAdapter("no-matching-module", "modules_unmatched", tensors=rename("model.layers", "layers"), vllm="takes",
         why="vLLM answers with the base model"),
    BrokenAdapter("head", "module_unsupported", {"target_modules": ["lm_head"]},
         tensors=lambda _: pair("lm_head", (VOCABULARY, HIDDEN))),
    BrokenAdapter("embeddings", "module_unsupported", {"target_modules": ["embed_tokens"]}, tensors=lambda _: EMBED),
    BrokenAdapter("too-wide", "shape_mismatch", tensors=add("model.layers.0.self_attn.q_proj", (HIDDEN, HIDDEN + 64))),
    BrokenAdapter("too-narrow", "shape_mismatch", tensors=add("model.layers.0.self_attn.q_proj", (HIDDEN, HIDDEN - 64)),
         vllm="takes", why=SILENT),
    BrokenAdapter("keys-as-wide-as-queries", "shape_mismatch",
                  tensors=add("model.layers.0.self_attn.k_proj", (HIDDEN, HIDDEN))),
    BrokenAdapter("one-dimension", "shape_mismatch",
                  tensors=lambda t: t | {f"{Q}.lora_A.weight": ("BF16", (8 * HIDDEN,))}),
    BrokenAdapter("left-out-of-targets", "module_untargeted", {"target_modules": ["q_proj"]}, vllm="takes",
         why="PEFT would not apply them: the adapter was not trained to be used with them"),
)  # fmt: skip


def good(
    name: str, config: Mapping[str, Any] = {}, tensors: Callable[[Tensors], Tensors] = lambda t: t
) -> BrokenAdapter:
    return BrokenAdapter(name, None, config, tensors=tensors, vllm="takes")


GOOD = (
    good("plain"),
    good("rslora", {"use_rslora": True}),
    good("alpha-fraction", {"lora_alpha": 0.5}),
    good("rank-1", {"r": 1}, lambda _: pairs(1)),
    good("rank-16", {"r": 16}, lambda _: pairs(16)),
    good(
        "patterns",
        {"rank_pattern": {r"layers\.[01]\..*q_proj": 4, "gate_proj": 16}, "alpha_pattern": {"q_proj": 2}},
        lambda t: (
            t
            | pairs(4, 2, modules={"self_attn.q_proj": (HIDDEN, HIDDEN)})
            | pairs(16, modules={"mlp.gate_proj": (FEED_FORWARD, HIDDEN)})
        ),
    ),
    good("one-layer", {}, lambda _: pairs(layers=1)),
    good(
        "part-of-a-packed-module",
        {"target_modules": ["k_proj"]},
        lambda _: pair(Q[len(PREFIX) :].replace("q_", "k_"), (KEYS, HIDDEN)),
    ),
    good("targets-expression", {"target_modules": r".*\.(q_proj|k_proj|gate_proj|down_proj)"}),
    good("all-linear", {"target_modules": "all-linear"}),
    good("without-prefix", {}, rename(PREFIX, "")),
    good("float32", {}, lambda _: pairs(dtype="F32")),
    good("float16", {}, lambda _: pairs(dtype="F16")),
    good("float64", {}, lambda _: pairs(dtype="F64")),
    good("float8", {}, lambda _: pairs(dtype="F8_E4M3")),
    good("gaussian", {"init_lora_weights": "gaussian", "modules_to_save": [], "newer_field": {"a": 1}}),
    good(
        "copy-of-embeddings",
        {},
        lambda t: t | {f"{PREFIX}model.embed_tokens.base_layer.weight": ("BF16", (VOCABULARY, HIDDEN))},
    ),
)
