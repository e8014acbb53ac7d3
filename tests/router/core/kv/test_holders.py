"""Holders of single blocks against a dict from block to mask, while walks turn plain blocks into runs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.kv.holders import BlockHolders
from tests.properties import examples
from tests.router.core.kv.test_chains import BITS, CHAINS, masks_of

parts = st.builds(lambda chain, a, n: chain[a : a + n], st.sampled_from(CHAINS), st.integers(0, 9), st.integers(1, 15))
parts = parts.filter(bool)
steps = st.tuples(st.sampled_from(["set", "chain", "clear", "walk"]), st.sampled_from(BITS), parts)


@settings(max_examples=examples(300))
@given(st.lists(steps, max_size=20))
def test_every_block_has_the_mask_that_was_set(done):
    holders, masks = BlockHolders(lambda mask: mask), {}
    for verb, bit, part in done:
        had = sum(1 for block in part if masks.get(block, 0) & bit)
        if verb == "walk":
            holders.walk(part)
        elif verb == "clear":
            assert holders.clear(part, bit) == len(part) - had
            masks |= {block: masks.get(block, 0) & ~bit for block in part}
        else:
            assert holders.set(part, bit, is_chain=verb == "chain") == had
            masks |= {block: masks.get(block, 0) | bit for block in part}
        for chain in CHAINS:
            expected = [masks.get(block, 0) for block in chain]
            assert holders.masks(chain) == [holders.mask(block) for block in chain] == expected
            until = expected.index(0) if 0 in expected else len(expected)
            assert masks_of(BlockHolders.walk(holders, chain)) == expected[:until]
    assert len(holders) == sum(1 for mask in masks.values() if mask)


def test_a_walk_over_plain_blocks_makes_them_a_run():
    holders = BlockHolders(lambda mask: mask)
    for block in CHAINS[0]:
        holders.set((block,), 1)
    assert holders.runs == []
    holders.walk(CHAINS[0])
    assert holders.runs == [CHAINS[0]]


def test_a_sweep_removes_blocks_without_kept_holders():
    holders = BlockHolders(lambda mask: mask)
    holders.set(CHAINS[0], 1, is_chain=True)
    holders.set(CHAINS[4], 2)
    for _ in holders.sweep(kept=2):
        ...
    assert holders.masks(CHAINS[0]) == [0] * len(CHAINS[0])
    assert (holders.masks(CHAINS[4]), len(holders)) == ([2, 2], 2)
