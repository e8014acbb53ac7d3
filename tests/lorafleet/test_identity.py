from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from lorafleet.identity import block_hashes, root_hash

tokens_of = st.lists(st.integers(0, 2**32 - 1), max_size=100)


@given(tokens_of, st.integers(1, 33))
def test_there_is_one_hash_for_each_full_block_and_none_for_the_tail(tokens, block_size):
    assert len(block_hashes(tokens, block_size=block_size, root=root_hash("m"))) == len(tokens) // block_size


@given(tokens_of, tokens_of, st.integers(1, 8))
def test_prompts_share_hashes_exactly_as_far_as_they_share_blocks(left, right, block_size):
    root = root_hash("m")
    ours, theirs = (block_hashes(t, block_size=block_size, root=root) for t in (left, right))
    for depth, (a, b) in enumerate(zip(ours, theirs, strict=False), start=1):
        assert (a == b) == (left[: depth * block_size] == right[: depth * block_size])


@given(tokens_of, st.integers(1, 8), st.integers(0, 12))
def test_a_chain_continues_from_any_of_its_blocks(tokens, block_size, cut):
    whole = block_hashes(tokens, block_size=block_size, root=root_hash("m"))
    cut = min(cut, len(whole))
    start = whole[cut - 1] if cut else root_hash("m")
    assert whole[cut:] == block_hashes(tokens[cut * block_size :], block_size=block_size, root=start)


def test_the_root_separates_base_model_adapter_and_salt():
    roots = [
        root_hash("m"),
        root_hash("m", "a"),
        root_hash("ma"),
        root_hash("m", "", "a"),
        root_hash("", "m", "a"),
        root_hash("m", "a", "a"),
        root_hash("m", "aa"),
    ]
    assert len(set(roots)) == len(roots)


def test_a_hash_is_xxh3_of_the_little_endian_ids_seeded_by_its_parent():
    root = root_hash("m")
    data = (7).to_bytes(4, "little") + (9).to_bytes(4, "little")
    assert block_hashes([7, 9], block_size=2, root=root) == [xxh3_64_intdigest(data, root)]


extras_of = st.dictionaries(st.integers(0, 5), st.binary(max_size=6), max_size=3)


@given(extras_of, extras_of)
def test_prompts_share_hashes_exactly_up_to_the_first_block_with_other_extra_keys(left, right):
    ours, theirs = (block_hashes(range(12), block_size=2, root=root_hash("m"), extra=e) for e in (left, right))
    for depth in range(6):
        same = all(left.get(n) == right.get(n) for n in range(depth + 1))
        assert (ours[depth] == theirs[depth]) == same


def test_extra_keys_follow_the_ids_with_their_length_before_them():
    root = root_hash("m")
    data = (7).to_bytes(4, "little") + (2).to_bytes(4, "big") + b"mm"
    assert block_hashes([7], block_size=1, root=root, extra={0: b"mm"}) == [xxh3_64_intdigest(data, root)]


@given(tokens_of)
def test_any_sequence_of_ids_hashes_alike_and_is_not_changed(tokens):
    packed = array("I", tokens)
    forms = [tokens, tuple(tokens), packed, array("Q", tokens)]
    assert len({tuple(block_hashes(form, block_size=4, root=root_hash("m"))) for form in forms}) == 1
    assert packed.tolist() == tokens


@pytest.mark.parametrize(("token", "error"), [(-1, OverflowError), (2**32, OverflowError), ("7", TypeError)])
def test_an_invalid_token_id_is_refused(token, error):
    with pytest.raises(error):
        block_hashes([token], block_size=1, root=root_hash("m"))
