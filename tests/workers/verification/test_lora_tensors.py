"""Tensors by their meaning: pairs, heads and copies, and what is no part of a LoRA."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.core.errors import SourceError
from workers.verification.lora_tensors import PREFIX, LoraPair, adapter_tensors, plain_name
from workers.verification.tensors import TensorHeader

sizes = st.integers(1, 9)


def header(*shape, dtype="F32"):
    return TensorHeader(dtype, shape)


def pair(module="q_proj", *, rank=4, a="lora_A.weight", b="lora_B.weight"):
    return {f"{PREFIX}{module}.{a}": header(rank, 8), f"{PREFIX}{module}.{b}": header(16, rank)}


@given(st.integers(0, 3))
def test_the_prefix_may_be_there_more_than_once(times):
    assert plain_name(PREFIX * times + "layers.0.q_proj.lora_A.weight") == "layers.0.q_proj.lora_A.weight"


@given(sizes, sizes, sizes)
def test_two_halves_of_a_module_are_a_pair_with_the_shape_of_its_weight(rank, inner, outer):
    tensors = {f"{PREFIX}q_proj.lora_A.weight": header(rank, inner), "q_proj.lora_B.weight": header(outer, rank)}
    found = adapter_tensors(tensors).pairs["q_proj"]
    assert (found.rank, found.base_shape) == (rank, (outer, inner))


def test_the_shape_of_an_embedding_is_by_vocabulary():
    found = adapter_tensors(pair("embed_tokens", a="lora_embedding_A", b="lora_embedding_B")).pairs["embed_tokens"]
    assert found == LoraPair((4, 8), (16, 4), is_embedding=True)
    assert found.base_shape == (8, 16)


def test_copies_of_embeddings_are_no_pairs():
    copy = f"{PREFIX}lm_head.base_layer.weight"
    found = adapter_tensors(pair() | {copy: header(10, 8)})
    assert (found.copies, set(found.pairs)) == ({copy: "lm_head"}, {"q_proj"})


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        ({}, "weights_empty"),
        ({"q_proj.lora_A.weight": header(4, 8)}, "tensor_unpaired"),
        (pair() | {f"{PREFIX}q_proj.lora_B.weight": header(16, 5)}, "rank_mismatch"),
        (pair() | {f"{PREFIX}q_proj.lora_B.weight": header(16, 0)}, "shape_mismatch"),
        (pair() | {f"{PREFIX}q_proj.lora_B.weight": header(16, 4, dtype="I8")}, "dtype_unsupported"),
        (pair() | {"q_proj.weight": header(16, 8)}, "tensor_unexpected"),
        (pair("embed_tokens"), "tensor_unexpected"),
        (pair(a="lora_embedding_A", b="lora_embedding_B"), "tensor_unexpected"),
    ],
)
def test_tensors_that_are_no_lora_are_refused_by_their_fault(tensors, code):
    with pytest.raises(SourceError) as refused:
        adapter_tensors(tensors)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("q_proj.lora_A.default.weight", "with the adapter's name in it"),
        ("q_proj.lora_a", "an MLX adapter"),
        ("q_proj.lora_down.weight", "kohya's names"),
        ("q_proj.lora_magnitude_vector.weight", "DoRA"),
        ("q_proj.modules_to_save.weight", "leave it out of modules_to_save"),
    ],
)
def test_names_of_other_tools_are_refused_with_what_to_do(name, hint):
    with pytest.raises(SourceError, match=hint):
        adapter_tensors(pair() | {name: header(4, 8)})
