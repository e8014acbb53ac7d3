import tracemalloc
from itertools import product, takewhile
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lorafleet.identity import BlockHash, block_hashes, root_hash
from router.core.kv.estimate import CacheEstimate, PredictedCache
from router.core.kv.index import KvIndex, WorkerId
from tests.properties import examples

W, OTHER, WITH_EVENTS, BUSY = map(WorkerId, ("w0", "w1", "w2", "w3"))
TTL_S, CAP = 10.0, 6


def prompt(*tokens):
    return block_hashes(tokens, block_size=1, root=root_hash("m"))


LONG = prompt(1, 2, 3, 4)


def estimate():
    index = KvIndex(1)
    return index, CacheEstimate(index, TTL_S)


def serve(guesses, hashes, at, worker=W, took_s=0.0, most_blocks=CAP):
    return guesses.record_served(worker, hashes, began_at=at - took_s, now=at, most_blocks=most_blocks)


def test_served_prompt_counts_as_cached_until_it_expires():
    index, guesses = estimate()
    serve(guesses, LONG, 0.0)
    assert index.match(prompt(1, 2, 3, 9)) == {W: 3}
    guesses.expire(TTL_S - 0.1)
    assert index.match(LONG) == {W: 4}
    guesses.expire(TTL_S)
    assert (index.match(LONG), len(index)) == ({}, 0)


def test_use_keeps_a_prefix_and_what_was_unused_longest_makes_room():
    index, guesses = estimate()
    serve(guesses, LONG, 0.0)
    serve(guesses, prompt(1, 2, 7), 6.0)
    serve(guesses, prompt(8, 9), 7.0)
    assert index.match(LONG) == {W: 3}  # seven blocks, one too many: the oldest prompt's end went
    guesses.expire(TTL_S)
    assert index.match(LONG) == {W: 2}


def test_of_a_prompt_larger_than_the_cache_the_beginning_is_kept():
    index, guesses = estimate()
    serve(guesses, LONG, 0.0, most_blocks=3)
    assert index.match(LONG) == {W: 3}


def test_missing_prompt_drops_all_older_blocks_of_the_estimate():
    index, guesses = estimate()
    serve(guesses, prompt(5, 6), 0.0)
    serve(guesses, LONG, 1.0)
    serve(guesses, prompt(7), 2.0)
    guesses.correct_estimate(serve(guesses, LONG, 4.0), cached_blocks=0)
    assert index.match(prompt(5, 6)) == {}
    assert index.match(prompt(7)) == {W: 1}
    assert index.match(LONG) == {W: 4}  # it has just been computed
    guesses.expire(7.0)  # what it kept for less than 3 s once is not thought to stay for 10
    assert len(index) == 0


def test_better_hit_than_predicted_lengthens_the_age_up_to_the_maximum():
    index, guesses = estimate()
    serve(guesses, LONG, 0.0)
    guesses.correct_estimate(serve(guesses, LONG, 2.0), cached_blocks=0)
    for _ in range(4):
        guesses.correct_estimate(PredictedCache(W, 3.0, ()), cached_blocks=4)
    serve(guesses, LONG, 4.0)
    guesses.expire(4.0 + TTL_S - 0.1)
    assert index.match(LONG) == {W: 4}
    guesses.expire(4.0 + TTL_S)
    assert len(index) == 0


@pytest.mark.parametrize("cached_blocks", [3, 4])
def test_the_last_block_that_an_engine_computes_always_is_no_news(cached_blocks):
    index, guesses = estimate()
    serve(guesses, prompt(5, 6), 0.0)
    serve(guesses, LONG, 0.0)
    guesses.correct_estimate(serve(guesses, LONG, 9.0), cached_blocks=cached_blocks)
    assert index.match(prompt(5, 6)) == {W: 2}


def test_what_was_stored_after_a_prompt_was_sent_proves_nothing_about_it():
    index, guesses = estimate()
    serve(guesses, prompt(5, 6), 0.0)
    serve(guesses, LONG, 2.0)  # a twin, sent and served while the one below was waiting
    guesses.correct_estimate(serve(guesses, LONG, 3.0, took_s=2.0), cached_blocks=0)
    assert index.match(prompt(5, 6)) == {W: 2}


def test_what_comes_after_forget_leaves_nothing_behind():
    index, guesses = estimate()
    guess = serve(guesses, LONG, 0.0)
    guesses.forget(W)
    guesses.forget(W)
    guesses.correct_estimate(guess, cached_blocks=0)
    guesses.expire(1.0)
    assert index.match(LONG) == {}
    while index.sweep(100):
        pass
    assert (len(index), len(guesses)) == (0, 0)


def test_prompts_cost_memory_for_their_blocks_and_not_for_every_turn():
    index, guesses = estimate()
    for end in range(1, 100):
        serve(guesses, prompt(*range(end)), 0.0, most_blocks=1000)
    one_prompt = index.size_bytes() + guesses.size_bytes()
    other, others = estimate()
    serve(others, prompt(*range(99)), 0.0, most_blocks=1000)
    assert one_prompt < 1.1 * (other.size_bytes() + others.size_bytes())


def test_prompt_that_parts_from_another_while_a_worker_is_swept_keeps_nothing_of_that_worker():
    index, newcomer = KvIndex(1), WorkerId("w9")
    first, second = prompt(1, 2, 3, 4), prompt(5, 6, 7, 8)
    for worker in (W, OTHER):
        for blocks in (first, second):
            index.add_estimated(worker, tuple(blocks))
    index.forget(W)
    assert index.sweep(1)
    for head in (first, second):
        index.add_estimated(OTHER, (*head[:2], BlockHash(99)))
    while index.sweep(1):
        pass
    for blocks in (first, second):
        index.add_estimated(newcomer, tuple(blocks[:2]))  # it has the mask bit of the worker that is gone
        assert index.match(blocks) == {OTHER: 4, newcomer: 2}


class CountedBlock(int):
    """A block hash that counts how often it is looked up or compared."""

    touched = 0

    def __hash__(self):
        CountedBlock.touched += 1
        return int.__hash__(self)

    def __eq__(self, other):
        CountedBlock.touched += 1
        return int.__eq__(self, other)


def test_prompt_of_8192_blocks_is_matched_and_recorded_by_touching_a_hundred_of_them():
    index, guesses = estimate()
    whole = tuple(map(CountedBlock, range(8192)))
    forks = [(*whole[:at], *map(CountedBlock, range(at + 10_000, 18_192))) for at in (1, 4000, 8191)]
    for now, blocks in enumerate((whole, whole, *forks, *forks, whole)):
        CountedBlock.touched = 0
        index.match(blocks)
        pending = index.add_pending(W, blocks)
        serve(guesses, blocks, now / 10, most_blocks=30_000)
        index.remove_pending(pending)
        assert CountedBlock.touched < 100
        assert index.match(blocks) == {W: 8192}
    CountedBlock.touched = 0
    guesses.expire(100.0)
    assert CountedBlock.touched < 100
    assert len(index) == 0


def test_estimated_memory_is_near_what_is_allocated():
    rng = Random(1)
    prompts = [tuple(rng.getrandbits(64) for _ in range(512)) for _ in range(50)]
    index, guesses = estimate()
    tracemalloc.start()
    for now, blocks in enumerate(prompts):
        for worker in (W, OTHER):
            own = tuple(BlockHash(block + 1 - 1) for block in blocks)
            serve(guesses, own, float(now), worker=worker, most_blocks=10**6)
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 < (index.size_bytes() + guesses.size_bytes()) / allocated < 2.0


def test_blocks_that_come_in_no_chain_raise_nothing_and_are_gone_in_the_end():
    rng = Random(1)
    index, guesses = estimate()
    for now in range(2000):
        blocks = [BlockHash(rng.randrange(12)) for _ in range(rng.randrange(9))]
        guess = serve(guesses, blocks, float(now), worker=rng.choice([W, OTHER]))
        guesses.correct_estimate(guess, rng.randrange(9))
        assert all(depth <= len(blocks) for depth in index.match(blocks).values())
    guesses.expire(3000.0)
    guesses.forget(W)
    guesses.forget(OTHER)
    while index.sweep(100):
        pass
    assert len(index) == 0


# Every prompt of two tokens, so that prompts part everywhere; some long, so that segments are cut inside.
prompts = st.builds(
    lambda head, tail: prompt(*head, *tail),
    st.lists(st.integers(0, 1), max_size=7),
    st.integers(1, 9).map(lambda n: range(10, 10 + n)),
)
FOREST = [prompt(*head, *range(10, 19)) for n in range(4) for head in product((0, 1), repeat=n)]


class LikeTheSimplestList(RuleBasedStateMachine):
    """Against a list of (block, last use) per worker, searched from end to end.

    A third worker has KV events and a fourth one only what was just sent to it: they share every prompt of the index.
    """

    def __init__(self):
        super().__init__()
        self.index = KvIndex(1)
        self.guesses = CacheEstimate(self.index, TTL_S)
        self.now = 0.0
        self.index.add(WITH_EVENTS, FOREST[1][:5])
        self.index.add_pending(BUSY, FOREST[2])
        self.model = {}
        self.ttl_s = {}

    @initialize(cap=st.sampled_from([CAP, 30]))
    def start(self, cap):
        self.cap = cap

    @rule(worker=st.sampled_from([W, OTHER]), hashes=prompts, took_s=st.sampled_from([0, 1, 4]))
    def serve(self, worker, hashes, took_s):
        held = dict(self.model.get(worker, []))
        self.guess = self.guesses.record_served(
            worker, hashes, began_at=self.now - took_s, now=self.now, most_blocks=self.cap
        )
        first = [held.get(block) for block in hashes]
        known = next((i for i, at in enumerate(first) if at is None or at > self.now - took_s), len(first))
        stretches = zip((0, *(end for end, _ in self.guess.last_used)), self.guess.last_used, strict=False)
        assert [at for start, (end, at) in stretches for _ in range(start, end)] == first[:known]
        self.first = first[:known]
        kept = hashes[: self.cap]
        ttl_s = self.ttl_s.setdefault(worker, TTL_S)
        rest = [(block, at) for block, at in self.model.get(worker, []) if block not in kept and at > self.now - ttl_s]
        self.model[worker] = (rest + [(block, self.now) for block in reversed(kept)])[-self.cap :]

    @rule(cached_blocks=st.integers(0, 9))
    def compare(self, cached_blocks):
        guess = getattr(self, "guess", None)
        if guess is None or guess.worker not in self.model:
            return
        self.guesses.correct_estimate(guess, cached_blocks)
        ttl_s, known = self.ttl_s[guess.worker], len(self.first)
        assert guess.blocks == known
        if cached_blocks > known:
            self.ttl_s[guess.worker] = min(TTL_S, ttl_s * 2)
        elif cached_blocks < known - 1:
            gone = self.first[cached_blocks]
            self.ttl_s[guess.worker] = max(0.01, min(ttl_s, guess.began_at - gone))
            self.model[guess.worker] = [(block, at) for block, at in self.model[guess.worker] if at > gone]

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, TTL_S]))
    def wait(self, seconds):
        self.now += seconds
        self.guesses.expire(self.now)
        for worker, held in self.model.items():
            self.model[worker] = [(block, at) for block, at in held if at > self.now - self.ttl_s[worker]]

    @rule(worker=st.sampled_from([W, OTHER]))
    def forget(self, worker):
        self.guesses.forget(worker)
        self.model.pop(worker, None)
        self.ttl_s.pop(worker, None)
        self.index.sweep(3)
        assert self.index.blocks(worker, "device") == 0

    @invariant()
    def never_more_than_the_cap_and_the_same_answers(self):
        for worker in (W, OTHER):
            assert self.index.blocks(worker, "device") == len(self.model.get(worker, [])) <= self.cap
        for hashes in FOREST:
            depths = {WITH_EVENTS: shared(hashes, FOREST[1][:5]), BUSY: shared(hashes, FOREST[2])}
            depths = {worker: depth for worker, depth in depths.items() if depth}
            for worker, held in self.model.items():
                blocks = dict(held)
                depth = next((i for i, block in enumerate(hashes) if block not in blocks), len(hashes))
                if depth:
                    depths[worker] = depth
            assert self.index.match(hashes) == depths


def shared(hashes, others):
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(hashes, others, strict=False))))


TestLikeTheSimplestList = LikeTheSimplestList.TestCase
TestLikeTheSimplestList.settings = settings(max_examples=examples(60), stateful_step_count=40)
