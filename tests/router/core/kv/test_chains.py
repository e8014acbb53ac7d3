"""Holders of chains against a set of blocks for each holder, on a small forest of shared prefixes."""

from functools import reduce
from operator import or_

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.kv.chains import ChainHolders, common_length, joined_walks
from tests.properties import examples
from tests.router.core.kv.test_index import FOREST

CHAINS = [tuple(chain) for chain in FOREST]
BITS = (1, 2, 4)
chains = st.builds(lambda chain, n: chain[:n], st.sampled_from(CHAINS), st.integers(1, 15))


def masks_of(walk):
    """The mask of each block of a walk."""
    ends = [0, *(end for end, _ in walk)]
    return [mask for (end, mask), start in zip(walk, ends, strict=False) for _ in range(end - start)]


def expected_masks(held, chain):
    """The mask of each block up to the first without a holder, from each holder's set of blocks."""
    masks = [reduce(or_, (bit for bit in BITS if block in held[bit]), 0) for block in chain]
    return masks[: masks.index(0)] if 0 in masks else masks


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.sampled_from(BITS), chains)))
def test_a_walk_finds_the_holders_of_every_block(added):
    holders, held = ChainHolders(lambda mask: mask), {bit: set() for bit in BITS}
    for bit, chain in added:
        assert holders.add(chain, bit) == len(set(chain) - held[bit])
        held[bit].update(chain)
        assert len(holders) == len(set().union(*held.values()))
    for chain in CHAINS:
        assert masks_of(holders.walk(chain)) == expected_masks(held, chain)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.sampled_from(BITS), chains), max_size=8), st.randoms(use_true_random=False))
def test_a_chain_is_held_until_its_last_release(holds, rng):
    holders = ChainHolders(lambda mask: mask)
    for bit, chain in holds:
        holders.hold(chain, bit)
    left = list(holds)
    while left:
        bit, chain = left.pop(rng.randrange(len(left)))
        holders.release(chain, bit)
        held = {bit: {block for b, chain in left if b == bit for block in chain} for bit in BITS}
        for chain in CHAINS:
            assert masks_of(holders.walk(chain)) == expected_masks(held, chain)
    assert (len(holders), holders.segments) == (0, [])


def test_a_sweep_leaves_the_bits_that_are_kept():
    holders = ChainHolders(lambda mask: mask)
    for bit, chain in zip(BITS, CHAINS, strict=False):
        holders.add(chain, bit)
    for _ in holders.sweep(kept=1):
        ...
    assert masks_of(holders.walk(CHAINS[0])) == [1] * len(CHAINS[0])
    assert len(holders) == len(CHAINS[0])


@given(st.sampled_from(CHAINS), st.sampled_from(CHAINS))
def test_the_common_length_of_two_chains_is_where_they_part(ours, theirs):
    if ours[0] == theirs[0]:
        parted = [a != b for a, b in zip(ours, theirs, strict=False)]
        length = parted.index(True) if any(parted) else len(parted)
        assert common_length(ours, 0, theirs, 0) == length


walks = st.lists(st.tuples(st.integers(1, 4), st.sampled_from(BITS)), max_size=5).map(
    lambda steps: [(sum(n for n, _ in steps[: i + 1]), mask) for i, (_, mask) in enumerate(steps)]
)


@given(walks, walks)
def test_joined_walks_have_the_holders_of_both_at_each_block(ours, theirs):
    one, other = masks_of(ours), masks_of(theirs)
    longest = max(len(one), len(other))
    padded = [walk + [0] * (longest - len(walk)) for walk in (one, other)]
    assert masks_of(joined_walks(ours, theirs)) == [a | b for a, b in zip(*padded, strict=True)]
