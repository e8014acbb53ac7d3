"""What an adapter is, told from headers; and the digest that names it."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.core.errors import SourceError
from workers.core.manifest import FileEntry, Rules, digest, inspect, is_same_base, parse_header

CONFIG = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "org/Base-7B"}
MODULE = "model.layers.0.self_attn.q_proj"
BASE = {MODULE: (32, 64)}
RULES = Rules(max_rank=16, base_names=frozenset({"base-7b"}), base_shapes=BASE)


def tensors(rank=8, out=32, into=64, module=MODULE):
    prefix = f"base_model.model.{module}"
    return {f"{prefix}.lora_A.weight": (rank, into), f"{prefix}.lora_B.weight": (out, rank)}


def look(config=(), shapes=None, rules=RULES):
    raw = json.dumps(CONFIG | dict(config)).encode()
    return inspect(raw, tensors() if shapes is None else shapes, [FileEntry("adapter_config.json", 3, "0" * 64)], rules)


def entry(path: str, content: bytes) -> FileEntry:
    return FileEntry(path, len(content), hashlib.sha256(content).hexdigest())


def test_the_digest_of_the_documented_example_is_the_documented_one():
    files = [entry("adapter_model.safetensors", b""), entry("adapter_config.json", b"{}")]
    assert digest(files) == "2ee415dc86b41cb4ebf3b6f39ba9ea4c853fb11a59eb8eb6dc5dc2832de9815e"
    hashed = json.dumps([[e.path, e.size_bytes, e.sha256] for e in reversed(files)], separators=(",", ":"))
    assert digest(files) == hashlib.sha256(hashed.encode()).hexdigest()


ENTRIES = st.lists(
    st.builds(FileEntry, st.text(min_size=1, max_size=6), st.integers(0, 9), st.sampled_from(["a" * 64, "b" * 64])),
    unique_by=lambda e: e.path,
    max_size=4,
)


@given(ENTRIES, ENTRIES)
def test_two_sets_of_files_share_a_digest_only_if_they_are_equal(one, other):
    assert (digest(one) == digest(other)) == (set(one) == set(other))


@given(ENTRIES.flatmap(lambda entries: st.tuples(st.just(entries), st.permutations(entries))))
def test_the_order_of_the_files_changes_nothing(pair):
    assert digest(pair[0]) == digest(pair[1])


def test_a_plain_adapter_is_described():
    found = look()
    assert (found.rank, found.base_model, found.modules, found.size_bytes) == (8, "org/Base-7B", 1, 3)


def test_the_rank_is_the_largest_that_any_module_has():
    wide = {**tensors(), **tensors(rank=16, module="model.layers.1.self_attn.q_proj")}
    rules = Rules(max_rank=16, base_names=frozenset(), base_check="off")
    assert look({"rank_pattern": {"layers.1.self_attn.q_proj": 16}}, wide, rules).rank == 16
    assert look({"rank_pattern": {r"layers\.[1-9].*": 16}}, wide, rules).rank == 16
    with pytest.raises(SourceError, match="rank 16"):
        look({}, wide, rules)


@pytest.mark.parametrize(
    ("config", "shapes", "code"),
    [
        ({"r": 16}, None, "adapter_invalid"),
        ({"r": 0}, None, "adapter_invalid"),
        ({"r": True}, None, "adapter_invalid"),
        ({"r": "8"}, None, "adapter_invalid"),
        ({"peft_type": "IA3"}, None, "adapter_invalid"),
        ({"use_dora": True}, None, "adapter_invalid"),
        ({"modules_to_save": ["lm_head"]}, None, "adapter_invalid"),
        ({"target_modules": []}, None, "adapter_invalid"),
        ({"target_modules": ["k_proj"]}, None, "adapter_invalid"),
        ({"target_modules": ["proj"]}, None, "adapter_invalid"),
        ({"rank_pattern": {"q_proj": "8"}}, None, "adapter_invalid"),
        ({"rank_pattern": 3}, None, "adapter_invalid"),
        ({"base_model_name_or_path": "org/other"}, None, "base_model_mismatch"),
        ({"r": 32}, tensors(rank=32), "rank_too_big"),
        ({}, {}, "adapter_invalid"),
        ({}, {"model.embed.weight": (3, 4)}, "adapter_invalid"),
        ({}, {f"{MODULE}.lora_A.weight": (8, 64)}, "adapter_invalid"),
        ({}, {f"{MODULE}.lora_A.weight": (8, 64), f"{MODULE}.lora_B.weight": (32, 4)}, "adapter_invalid"),
        ({}, {f"{MODULE}.lora_A.weight": (8,), f"{MODULE}.lora_B.weight": (32, 8)}, "adapter_invalid"),
        ({}, tensors(into=65), "adapter_invalid"),
        ({}, tensors(out=33), "adapter_invalid"),
        ({}, tensors(module="model.layers.9.self_attn.q_proj"), "adapter_invalid"),
    ],
)
def test_what_an_engine_would_take_wrongly_or_choke_on_is_refused(config, shapes, code):
    with pytest.raises(SourceError) as refused:
        look(config, shapes)
    assert refused.value.code == code


@given(st.binary(max_size=40).filter(lambda raw: raw.strip() != b"{}"))
def test_no_header_of_garbage_is_taken_for_one(raw):
    with pytest.raises(SourceError, match="not a safetensors header"):
        parse_header(raw, "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["r", "peft_type", "target_modules", "rank_pattern", "shape", "x"]), inner)
    ),
    max_leaves=8,
)


@given(JSON)
def test_no_config_makes_anything_but_a_manifest_or_a_refusal(value):
    with pytest.raises(SourceError):
        inspect(json.dumps(value).encode(), {}, [], RULES)


@pytest.mark.parametrize(
    ("declared", "check", "same"),
    [
        ("org/Base-7B", "name", True),
        ("/models/base-7b/", "name", True),
        ("org/Base-7B-Instruct", "name", False),
        ("org/Base-7B", "exact", False),
        ("base-7b", "exact", True),
        ("anything", "off", True),
        ("", "exact", True),
    ],
)
def test_base_models_are_compared_as_the_setting_says(declared, check, same):
    assert is_same_base(declared, {"base-7b"}, check) is same
