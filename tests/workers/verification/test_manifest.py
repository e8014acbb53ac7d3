"""Checks of an adapter's config and tensor headers, and its digest."""

import hashlib
import json
import time
from dataclasses import replace

import pytest
import regex
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.local.tiny_model import make_model
from orchestrator.core.failures import CONTENT_CODES
from tests.patience import patience
from workers.core.errors import SourceError
from workers.verification.base_check import is_same_base
from workers.verification.base_model import BaseModel, base_model
from workers.verification.manifest import AdapterRules, FileEntry, check_adapter, digest
from workers.verification.patterns import MatchTime
from workers.verification.peft import parse_config
from workers.verification.tensors import MAX_HEADER_BYTES, TensorHeader, header_bytes, parse_header
from workers.verification.verify import read_base_model, read_tensors

CONFIG = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "k_proj", "lm_head", "embed_tokens"],
    "base_model_name_or_path": "org/Base-7B",
}
MODULE = "model.layers.0.self_attn.q_proj"
BASE = BaseModel(
    {
        **{f"model.layers.{n}.self_attn.q_proj": (32, 64) for n in range(2)},
        **{f"model.layers.{n}.self_attn.k_proj": (16, 64) for n in range(2)},
        "model.embed_tokens": (100, 64),
        "lm_head": (100, 64),
    }
)
RULES = AdapterRules(max_rank=16, base_names=frozenset({"base-7b"}), base=BASE)


def tensors(rank=8, out=32, into=64, module=MODULE, dtype="BF16"):
    prefix = f"base_model.model.{module}"
    return {
        f"{prefix}.lora_A.weight": TensorHeader(dtype, (rank, into)),
        f"{prefix}.lora_B.weight": TensorHeader(dtype, (out, rank)),
    }


def describe(config=(), shapes=None, rules=RULES):
    return check_adapter(json.dumps(CONFIG | dict(config)).encode(), tensors() if shapes is None else shapes, rules)


def refusal(*args, **named):
    with pytest.raises(SourceError) as refused:
        describe(*args, **named)
    return refused.value.code, str(refused.value)


def file_entry(path: str, content: bytes) -> FileEntry:
    return FileEntry(path, len(content), hashlib.sha256(content).hexdigest())


# --- digest -------------------------------------------------------------------------------------------------------


def test_documented_example_has_the_documented_digest():
    files = [file_entry("adapter_model.safetensors", b""), file_entry("adapter_config.json", b"{}")]
    assert digest(files) == "2ee415dc86b41cb4ebf3b6f39ba9ea4c853fb11a59eb8eb6dc5dc2832de9815e"
    hashed = json.dumps([[e.path, e.size_bytes, e.sha256] for e in reversed(files)], separators=(",", ":"))
    assert digest(files) == hashlib.sha256(hashed.encode()).hexdigest()


ENTRIES = st.lists(
    st.builds(FileEntry, st.text(min_size=1, max_size=6), st.integers(0, 9), st.sampled_from(["a" * 64, "b" * 64])),
    unique_by=lambda e: e.path,
    max_size=4,
)


@pytest.mark.slow
@given(ENTRIES, ENTRIES)
def test_only_equal_files_have_equal_digests(one, other):
    assert (digest(one) == digest(other)) == (set(one) == set(other))


@given(ENTRIES.flatmap(lambda entries: st.tuples(st.just(entries), st.permutations(entries))))
def test_digest_does_not_depend_on_file_order(pair):
    assert digest(pair[0]) == digest(pair[1])


# --- config -------------------------------------------------------------------------------------------------------


def test_plain_adapter_is_accepted_and_described():
    found = describe()
    assert (found.rank, found.base_model, found.modules) == (8, "org/Base-7B", 1)
    assert (found.alpha, found.target_modules, found.dtype) == (CONFIG["lora_alpha"], ("q_proj",), "BF16")


def test_card_has_the_modules_of_the_tensors_and_every_dtype():
    both = tensors() | tensors(module="model.layers.1.self_attn.k_proj", out=16, dtype="F32")
    found = describe(shapes=both)
    assert (found.target_modules, found.dtype) == (("k_proj", "q_proj"), "BF16,F32")


def test_rank_is_the_largest_of_all_modules():
    wide = {**tensors(), **tensors(rank=16, module="model.layers.1.self_attn.q_proj")}
    assert describe({"rank_pattern": {"layers.1.self_attn.q_proj": 16}}, wide).rank == 16
    assert describe({"rank_pattern": {r"layers\.[1-9].*": 16}}, wide).rank == 16
    assert refusal({}, wide)[0] == "rank_mismatch"


def test_first_matching_rank_pattern_wins():
    assert describe({"rank_pattern": {"q_proj": 8, "layers.0.self_attn.q_proj": 4}}).rank == 8
    assert refusal({"rank_pattern": {"self_attn.q_proj": 4, "q_proj": 8}})[0] == "rank_mismatch"


def test_unused_rank_in_the_config_counts():
    assert refusal({"rank_pattern": {"v_proj": 32}})[0] == "rank_too_big"


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q_proj|k_proj)", r"(?:.*?(?:a|b).*?)+?(?:q|k).*", ["q_proj"]])
def test_targets_may_be_a_list_an_expression_or_all_linear(targets):
    assert describe({"target_modules": targets}).modules == 1


LONG = f"model.layers.0.self_attn.{'a' * 60}_proj"
SLOW = r".*\.(?:a|aa|\w\w)+\d"


def test_slow_target_expression_is_given_up_and_the_base_model_decides():
    rules = replace(RULES, base=replace(BASE, shapes={LONG: (32, 64)}))
    began = time.process_time()
    assert describe({"target_modules": SLOW}, tensors(module=LONG), rules).modules == 1
    assert time.process_time() - began < patience(10)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_slow_pattern_is_refused_as_it_would_block_the_engine(field):
    began = time.process_time()
    code, message = refusal(
        {field: {SLOW: 8}, "target_modules": "all-linear"}, tensors(module=LONG), replace(RULES, base=None)
    )
    assert (code, "takes too long" in message) == ("adapter_config_invalid", True)
    assert time.process_time() - began < patience(10)
    assert describe({field: {SLOW: 8}}).modules == 1, "on its own modules it is quick"


@pytest.mark.parametrize(
    "key",
    [
        r"layers\.(?:[0-9]|1[0-9])\.(?:self_attn|mlp)\.(?:q|k|v)_proj",
        r".*\.\d{1,2}\.self_attn.*",
        r"(a|b)(c|d)(e|f)|q_proj",
    ],
)
def test_patterns_may_have_braces_and_several_groups(key):
    assert describe({"rank_pattern": {key: 8}, "r": 4}).rank == 8


@pytest.mark.parametrize("targets", [r".*\.k_proj", ["k_proj"], ["proj"], ["layers.1.self_attn.q_proj"]])
def test_tensors_of_an_untargeted_module_are_refused(targets):
    assert refusal({"target_modules": targets})[0] == "module_untargeted"


NAMES = st.lists(st.sampled_from(["q_proj", "self_attn", "layers", "0", "1", "a.b"]), min_size=1, max_size=4).map(
    ".".join
)


@given(NAMES, st.lists(NAMES, max_size=4))
def test_names_in_patterns_match_as_in_the_engine(name, keys):
    config = parse_config(json.dumps(CONFIG | {"rank_pattern": dict.fromkeys(keys, 9)}).encode())
    expected = 9 if any(regex.match(rf"(.*\.)?({key})$", name) for key in keys) else 8
    assert config.rank_of(name, MatchTime(time.thread_time)) == expected


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"r": 0}, "adapter_config_invalid"),
        ({"r": True}, "adapter_config_invalid"),
        ({"r": "8"}, "adapter_config_invalid"),
        ({"lora_alpha": 0}, "adapter_config_invalid"),
        ({"lora_alpha": float("nan")}, "adapter_config_invalid"),
        ({"lora_alpha": float("inf")}, "adapter_config_invalid"),  # as JSON's 1e400 is read
        ({"alpha_pattern": {"q_proj": float("nan")}}, "adapter_config_invalid"),
        ({"lora_alpha": "16"}, "adapter_config_invalid"),
        ({"use_rslora": "yes"}, "adapter_config_invalid"),
        ({"target_modules": []}, "adapter_config_invalid"),
        ({"target_modules": [3]}, "adapter_config_invalid"),
        ({"target_modules": "("}, "adapter_config_invalid"),
        ({"rank_pattern": {"q_proj": "8"}}, "adapter_config_invalid"),
        ({"rank_pattern": 3}, "adapter_config_invalid"),
        ({"rank_pattern": {"a)(": 8}}, "adapter_config_invalid"),
        ({"alpha_pattern": {"q_proj": None}}, "adapter_config_invalid"),
        ({"base_model_name_or_path": ["org"]}, "adapter_config_invalid"),
        ({"base_model_name_or_path": "org/\ud800"}, "adapter_config_invalid"),
        ({"peft_type": "IA3"}, "peft_type_unsupported"),
        ({"use_dora": True}, "dora_unsupported"),
        ({"bias": "all"}, "bias_unsupported"),
        ({"lora_bias": True}, "bias_unsupported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save_unsupported"),
        ({"modules_to_save": "score"}, "modules_to_save_unsupported"),
        ({"init_lora_weights": "pissa"}, "peft_feature_unsupported"),
        ({"layer_replication": [[0, 1]]}, "peft_feature_unsupported"),
        ({"trainable_token_indices": [3]}, "peft_feature_unsupported"),
        ({"base_model_name_or_path": "org/other"}, "base_model_mismatch"),
        ({"r": 32}, "rank_too_big"),
        ({"r": 4}, "rank_mismatch"),
    ],
)
def test_config_that_engines_refuse_or_misread_is_refused(config, code):
    assert refusal(config)[0] == code


@pytest.mark.parametrize("missing", ["r", "lora_alpha", "target_modules"])
def test_missing_config_field_is_named(missing):
    raw = json.dumps({key: value for key, value in CONFIG.items() if key != missing}).encode()
    with pytest.raises(SourceError, match=f"{missing} is missing"):
        check_adapter(raw, tensors(), RULES)


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True},
        {"peft_type": None},
        {"r": 8.0},
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
        {"target_modules": None, "target_parameters": ["mlp.experts.gate_up_proj"]},
        {"modules_to_save": ["classifier", "score"]},
        {"lora_alpha": 0.5},
        {"alpha_pattern": {r".*\.k_proj": 32}},
        {"rank_pattern": None, "alpha_pattern": {}},
        {"modules_to_save": []},
        {"init_lora_weights": "gaussian"},
        {"unknown_field_of_a_newer_peft": {"a": 1}},
    ],
)
def test_variant_that_engines_serve_correctly_is_accepted(config):
    assert describe(config).modules == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*CONFIG, "rank_pattern", "bias", "shape", "x"]), inner)
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_config_gives_a_description_or_a_source_error(value):
    with pytest.raises(SourceError):
        check_adapter(json.dumps(value).encode(), {}, RULES)


# --- tensors against config and base model ------------------------------------------------------------------------

A, B = (f"{MODULE}.lora_{half}.weight" for half in "AB")


@pytest.mark.parametrize(
    ("shapes", "code"),
    [
        ({}, "weights_empty"),
        ({"model.embed.weight": TensorHeader("F32", (3, 4))}, "tensor_unexpected"),
        ({**tensors(), "base_model.model.lm_head.weight": TensorHeader("F32", (100, 64))}, "tensor_unexpected"),
        ({f"{MODULE}.lora_A.default.weight": TensorHeader("F32", (8, 64))}, "tensor_unexpected"),
        ({f"{MODULE}.lora_embedding_A": TensorHeader("F32", (8, 64))}, "tensor_unexpected"),
        (tensors(module="model.embed_tokens", out=100), "tensor_unexpected"),
        (tensors(dtype="I8"), "dtype_unsupported"),
        ({A: TensorHeader("F32", (8, 64))}, "tensor_unpaired"),
        ({A: TensorHeader("F32", (8, 64)), B: TensorHeader("F32", (32, 4))}, "rank_mismatch"),
        ({A: TensorHeader("F32", (8,)), B: TensorHeader("F32", (32, 8))}, "shape_mismatch"),
        ({A: TensorHeader("F32", (0, 64)), B: TensorHeader("F32", (32, 0))}, "shape_mismatch"),
        (tensors(into=65), "shape_mismatch"),
        (tensors(out=33), "shape_mismatch"),
        (tensors(module="layers.0.self_attn.q_proj"), "modules_unmatched"),
        ({**tensors(), **tensors(module="model.layers.9.self_attn.q_proj")}, "module_unknown"),
        (
            {
                **tensors(),
                "base_model.model.model.embed_tokens.base_layer.weight": TensorHeader("F32", (101, 64)),
            },
            "shape_mismatch",
        ),
    ],
)
def test_unfitting_tensors_are_refused(shapes, code):
    assert refusal({}, shapes)[0] == code


def test_packed_module_mismatch_is_refused_with_a_hint():
    packed = {**tensors(), **tensors(module="model.layers.0.self_attn.qkv_proj", out=64)}
    code, message = refusal({"target_modules": "all-linear"}, packed)
    assert (code, "q_proj, k_proj, v_proj, one pair each" in message) == ("module_unknown", True)
    rules = AdapterRules(
        16, frozenset(), "off", BaseModel({"layers.0.qkv_proj": (64, 64), "layers.0.q_norm": (32, 64)})
    )
    parts = {**tensors(module="layers.0.q_norm"), **tensors(module="layers.0.k_proj")}
    code, message = refusal({"target_modules": "all-linear"}, parts, rules)
    assert (code, "accepted is qkv_proj" in message) == ("module_unknown", True)


def test_embeddings_are_accepted_if_engine_and_vocabulary_allow_them():
    embed = "base_model.model.model.embed_tokens.lora_embedding_"
    both = {
        **tensors(module="lm_head", out=100),
        f"{embed}A": TensorHeader("F32", (8, 100)),
        f"{embed}B": TensorHeader("F32", (64, 8)),
        "base_model.model.model.embed_tokens.base_layer.weight": TensorHeader("F32", (100, 64)),
    }
    assert describe({}, both).modules == 2
    assert refusal({}, both | {f"{embed}A": TensorHeader("F32", (8, 101))})[0] == "shape_mismatch"
    elsewhere = AdapterRules(16, frozenset(), "off", BaseModel(BASE.shapes, takes_embeddings=False))
    assert refusal({}, both, elsewhere)[0] == "module_unsupported"


def test_experts_of_a_mixture_are_not_checked():
    experts = tensors() | tensors(module="model.layers.0.mlp.experts.3.up_proj")
    assert refusal({"target_modules": "all-linear"}, experts)[0] == "module_unknown"
    mixture = base_model({"num_experts": 8}, {MODULE: (32, 64)})
    assert (
        describe({"target_modules": "all-linear"}, experts, AdapterRules(16, frozenset(), "off", mixture)).modules == 2
    )


def test_unknown_base_model_limits_the_checks_to_the_adapter():
    rules = AdapterRules(16, frozenset(), "off")
    assert describe({"base_model_name_or_path": "any"}, tensors(into=65), rules).modules == 1
    assert refusal({}, {A: TensorHeader("F32", (8, 64)), B: TensorHeader("F32", (32, 4))}, rules)[0] == "rank_mismatch"


def test_every_refusal_says_what_is_accepted():
    for config in ({"r": 0}, {"use_dora": True}, {"bias": "all"}, {"r": 32}, {"r": 4}, {"peft_type": "IA3"}):
        assert "accepted" in refusal(config)[1]


def test_orchestrator_never_retries_refused_adapters():
    refused = {code for code, status in SourceError.codes.items() if status == 422}
    assert refused - {"rank_too_big", "source_unsafe"} <= CONTENT_CODES


# --- base models --------------------------------------------------------------------------------------------------


def test_config_gives_the_same_shapes_as_the_weights(tmp_path):
    folder = make_model(tmp_path / "base")
    from_weights = read_base_model(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert read_base_model(folder) == from_weights
    assert from_weights.shapes["model.layers.3.self_attn.k_proj"] == (128, 256)
    assert not from_weights.takes_embeddings


def test_quantized_weights_give_no_shapes():
    config = {
        "model_type": "phi3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 100,
        "quantization_config": {"quant_method": "bitsandbytes"},
        "architectures": ["Phi3ForCausalLM"],
    }
    found = base_model(config, {"model.layers.0.self_attn.qkv_proj": (4096, 1)})
    assert found.shapes["model.layers.0.self_attn.qkv_proj"] == (128, 64)
    assert found.shapes["model.layers.0.mlp.gate_up_proj"] == (192, 64)
    assert found.takes_embeddings
    assert base_model({"quantization_config": {"a": 1}}, {"x": (1, 2)}) is None


def test_tied_head_has_the_shape_of_the_embeddings():
    assert base_model({}, {"model.embed_tokens": (100, 64)}).shapes["lm_head"] == (100, 64)


def test_modules_of_a_vision_model_are_found_by_each_name():
    base = base_model({"text_config": {}}, {"model.language_model.layers.0.q_proj": (4, 4)}).module_shapes()
    assert base.find("language_model.model.layers.0.q_proj") == base.find("model.layers.0.q_proj") == (4, 4)
    assert base.find("model.layers.1.q_proj") is None
    assert base_model({"vision_config": {}}, {"model.layers.0.q_proj": (4, 4)}).has_other_names
    assert base_model({}, {"model.layers.0.q_proj": (4, 4)}).module_shapes().find("layers.0.q_proj") is None


@pytest.mark.parametrize(
    ("declared", "check", "same"),
    [
        ("org/Base-7B", "name", True),
        ("/models/base-7b/", "name", True),
        ("org/Base-7B-Instruct", "name", False),
        ("unsloth/Base-7B-bnb-4bit", "name", True),
        ("unsloth/base-7b-unsloth-bnb-4bit", "name", True),
        ("org/Base-7B-AWQ", "name", True),
        ("org/Base-7B-GPTQ-Int4", "name", True),
        ("RedHat/Base-7B-FP8-dynamic", "name", True),
        ("RedHat/Base-7B-quantized.w4a16", "name", True),
        ("org/Base-7B-Instruct-AWQ", "name", False),
        ("org/Base-7B-v0.2", "name", False),
        ("C:\\models\\Base-7B\\", "name", True),
        ("D:/hf/Base-7B ", "name", True),
        ("/root/.cache/huggingface/hub/models--org--Base-7B/snapshots/" + "0a1b" * 10, "name", True),
        ("/root/.cache/huggingface/hub/models--org--Other/snapshots/" + "0a1b" * 10, "name", False),
        ("models--org--Base-7B", "name", True),
        ("/kaggle/input/base-7b/1", "name", True),
        ("/kaggle/input/base/transformers/base-7b/1/", "name", True),
        ("/kaggle/input/other/transformers/other-7b/1", "name", False),
        ("  ", "name", True),
        ("org/Base-7B", "exact", False),
        ("base-7b", "exact", True),
        ("org/Base-7B-hf", "name", True),
        ("mlx-community/Base-7B-4bit-DWQ", "name", True),
        ("OPEA/Base-7B-int4-sym-inc", "name", True),
        ("mobiuslabsgmbh/Base-7B_4bitgs64_hqq", "name", True),
        ("amd/Base-7B-FP8-KV", "name", True),
        ("org/Base-7B-6.5bpw-h8-exl2", "name", True),
        ("org/Base-7B-Q4_K_M-GGUF", "name", True),
        ("org/Base-7B-Chat-hf", "name", False),
        ("org/Base-14B-4bit-DWQ", "name", False),
        (".", "name", True),
        ("./", "name", True),
        ("..\\..", "name", True),
        ("./base-7b", "name", True),
        ("./other-7b", "name", False),
        (".", "exact", False),
        ("anything", "off", True),
        ("", "exact", True),
    ],
)
def test_base_models_are_compared_by_the_setting(declared, check, same):
    assert is_same_base(declared, {"base-7b"}, check) is same


@pytest.mark.parametrize(
    ("declared", "same"),
    [
        ("qwen/Qwen2___5-7B-Instruct", True),
        ("/mnt/workspace/.cache/modelscope/models/qwen/Qwen2___5-7B-Instruct", True),
        ("/kaggle/input/qwen2.5/transformers/7b-instruct/1", True),
        ("unsloth/qwen2.5-7b-instruct-unsloth-bnb-4bit", True),
        ("Qwen/Qwen2.5-7B", False),
        ("/kaggle/input/qwen2.5/transformers/14b-instruct/1", False),
    ],
)
def test_mirrors_of_a_base_model_are_the_same(declared, same):
    assert is_same_base(declared, {"Qwen/Qwen2.5-7B-Instruct"}, "name") is same


# --- headers ------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=40).filter(lambda raw: raw.strip() != b"{}"))
def test_garbage_header_is_refused(raw):
    with pytest.raises(SourceError, match="header"):
        parse_header(raw, 0, "x")


SIZES = st.sampled_from([0, 1, 2, 4, 8, 16, -1, 1.0, None, 1 << 70])
SPANS = st.sampled_from([[0, 8], [8, 16], [0, 16], [8, 8], [4, 12], [16, 8], [0], "0"])
DESCRIPTION = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "f32", 3]),
        "shape": st.lists(SIZES, max_size=3),
        "data_offsets": SPANS,
    }
)
GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS = st.dictionaries(
    st.sampled_from("ab"), st.just(GOOD) | st.just(GOOD | {"data_offsets": [8, 16]}) | DESCRIPTION
)


@given(HEADERS, st.sampled_from([0, 8, 16]), st.sampled_from([None, {"format": "pt"}, {"format": 3}]))
def test_headers_are_accepted_exactly_if_safetensors_accepts_them(header, data_bytes, notes):
    raw = json.dumps(header if notes is None else {"__metadata__": notes, **header}).encode()
    whole = len(raw).to_bytes(8, "little") + raw + bytes(data_bytes)
    try:
        theirs = {name: tuple(found["shape"]) for name, found in safetensors.deserialize(whole)}
    except safetensors.SafetensorError:
        theirs = None
    try:
        ours = {name: found.shape for name, found in parse_header(raw, data_bytes, "x").items()}
    except SourceError:
        ours = None
    assert ours == theirs


@pytest.mark.parametrize(
    "raw",
    [
        b' {"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[9],"shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F4","shape":[17],"data_offsets":[0,8]}}',
        b'{"a\\n":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"\xff":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    ],
)
def test_header_with_duplicate_keys_is_refused(raw):
    with pytest.raises(SourceError) as refused:
        parse_header(raw, 8, "x")
    assert refused.value.code == "weights_corrupt"
    assert str(refused.value).isprintable()


LARGE = (MAX_HEADER_BYTES + 1).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("start", "size"), [(b"", 0), (b"\x01", 1), (b"\xff" * 8, 1 << 40), (b"\x09" + bytes(7), 16), (LARGE, 1 << 40)]
)
def test_impossible_header_length_is_refused(start, size):
    with pytest.raises(SourceError) as refused:
        header_bytes(start, size, "x")
    assert refused.value.code == "weights_corrupt"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "web page"),
        (b"\n  <html></html>", "web page"),
        (b'{"error": "Repository not found"}', "JSON text"),
        (b"PK\x03\x04" + bytes(range(100)), "pickle of torch.save"),
        (b"GGUF\x03\x00\x00\x00" + bytes(50), "GGUF"),
    ],
)
def test_another_file_under_the_weights_name_is_refused_by_what_it_is(tmp_path, content, words):
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(SourceError, match=f"adapter_model.safetensors: it is .*{words}.*accepted is") as refused:
        read_tensors(tmp_path / "adapter_model.safetensors")
    assert refused.value.code == "weights_corrupt"
    if not content.startswith(b"{"):
        with pytest.raises(SourceError, match=f"adapter_config.json: it is .*{words}"):
            parse_config(content)


def test_many_embedding_copies_are_checked_within_a_second():
    names = {f"model.language_model.layers.{number}.self_attn.q_proj": (32, 64) for number in range(1000)}
    base = BaseModel(names, has_other_names=True)
    copies = {f"m{number}.embed_tokens.base_layer.weight": TensorHeader("F32", (1, 1)) for number in range(2000)}
    began = time.process_time()
    with pytest.raises(SourceError, match="holds no LoRA tensor"):
        check_adapter(json.dumps(CONFIG).encode(), copies, replace(RULES, base=base))
    assert time.process_time() - began < patience(0.5)


@pytest.mark.slow
def test_too_many_rank_patterns_are_refused():
    many = {f"layers.{number}.q_proj": 8 for number in range(20_000)}
    held = {}
    for number in range(1000):
        held |= tensors(module=f"model.layers.{number}.self_attn.q_proj")
    began = time.process_time()
    with pytest.raises(SourceError, match="rank_pattern has 20000 keys for 1000 modules"):
        check_adapter(json.dumps(CONFIG | {"rank_pattern": many}).encode(), held, replace(RULES, base=None))
    assert time.process_time() - began < patience(10)
