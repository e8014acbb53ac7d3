"""Caches of token ids and block hashes: bounded, and never another answer than a fresh one."""

import asyncio
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.identity import block_hashes, root_hash
from router.tokenizing.prompt_cache import BlockHashCache, PieceTokenCache
from router.tokenizing.tokenizers import Tokenizers
from tests.properties import examples
from tests.router.tokenizing.tokenizing_worker import BASE, RULES
from tests.serving import client_of

SAID = st.lists(st.sampled_from([RULES, "<|im_end|>", "<|im_", "e", "\u0301", "  ", "\n\n", "東京"]), max_size=5).map(
    "".join
)


@settings(max_examples=examples(60))
@given(bodies=st.lists(st.lists(SAID, min_size=1, max_size=4), min_size=2, max_size=6))
def test_cached_ids_are_those_of_tokenizing_from_scratch(chat, bodies):
    tokenizers = Tokenizers(client_of(), cache_bytes=40_000)
    tokenizers.adopt(BASE, chat)

    async def check() -> None:
        for turns in bodies:
            body = {"messages": [{"role": "user", "content": text} for text in turns]}
            got = await tokenizers.ids(body, base_model=BASE, engine_url="")
            assert got.ids == array("I", chat.chat_ids(body))

    try:
        asyncio.run(check())
    finally:
        tokenizers.close()


@settings(max_examples=examples(100))
@given(asked=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12)), max_size=60))
def test_the_cache_stays_within_its_bytes_and_answers_only_what_was_put(asked):
    cache, put = PieceTokenCache(4_000), {}
    for base_model, number in asked:
        piece = f"{number} " * (5 * number + 1)
        ids = array("I", [number] * (10 * number))
        held = cache.get(base_model, piece)
        assert held is None or held == put[base_model, piece]
        cache.put(base_model, piece, ids)
        put[base_model, piece] = ids
        assert 0 <= cache.size_bytes <= 4_000
    held = [(key, cache.get(*key)) for key in put]
    assert sum(ids is not None for _, ids in held) == len(cache)
    if not cache:
        assert cache.size_bytes == 0


def test_the_least_recently_used_piece_is_evicted_first():
    cache = PieceTokenCache(2_000)
    for number in (*range(4), *range(4)):
        cache.put(BASE, str(number), array("I", range(20)))
    assert cache.get(BASE, "0") is not None
    for number in (*range(4, 7), *range(4, 7)):
        cache.put(BASE, str(number), array("I", range(20)))
    assert cache.get(BASE, "0") is not None
    assert cache.get(BASE, "1") is None


@pytest.mark.parametrize(("chars", "times"), [(100, 2), (10_000, 1)])
def test_short_pieces_are_cached_the_second_time_and_long_ones_at_once(chars, times):
    cache = PieceTokenCache(1_000_000)
    for number in range(1, times + 1):
        assert cache.get(BASE, "a" * chars) is None
        cache.put(BASE, "a" * chars, array("I", range(20)))
        cache.put(BASE, f"{number} alone", array("I", range(20)))
    assert cache.get(BASE, "a" * chars) is not None
    assert len(cache) == 1


ROOT = root_hash(BASE)


@settings(max_examples=examples(100))
@given(
    asked=st.lists(
        st.tuples(st.sampled_from([1, 2]), st.integers(0, 3), *[st.integers(0, 400)] * 3), min_size=1, max_size=30
    )
)
def test_cached_block_hashes_equal_fresh_ones(asked):
    chains = BlockHashCache(500)
    for block_size, branch, length, *marks in asked:
        ids = array("I", [*range(min(length, 150)), *range(1000 * branch, 1000 * branch + max(0, length - 150))])
        seen, kept = sorted(min(mark, length) for mark in marks)
        chain = chains.chain(ids, block_size=block_size, root=ROOT, seen=seen, kept=kept)
        assert list(chain) == block_hashes(ids, block_size=block_size, root=ROOT)
        assert chains.blocks == sum(map(len, chains.entries.values())) <= 500


def test_the_beginning_of_a_long_conversation_is_hashed_once():
    chains = BlockHashCache()
    first = chains.chain(array("I", range(3000)), block_size=16, root=ROOT, kept=2000)
    longer = chains.chain(array("I", [*range(2000), *range(5)]), block_size=16, root=ROOT, seen=2000, kept=2000)
    other = chains.chain(array("I", range(3000)), block_size=16, root=root_hash(BASE, "another"), seen=2000)
    assert [a is b for a, b in zip(longer, first, strict=False)] == [True] * 125
    assert not set(other) & set(first)


def test_a_shared_prefix_is_hashed_at_most_twice():
    chains = BlockHashCache()
    first, second, third = (
        chains.chain(array("I", [*range(2000), *[n] * 500]), block_size=16, root=ROOT, seen=min(n, 1) * 2000, kept=2500)
        for n in range(3)
    )
    assert first[:125] == second[:125] == third[:125]
    assert [a is b for a, b in zip(second[:125], third[:125], strict=True)] == [True] * 125
    assert len({*first, *second, *third}) == 125 + 3 * 31
