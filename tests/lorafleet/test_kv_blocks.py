from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from lorafleet.kv.blocks import block_hashes, root_hash

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
