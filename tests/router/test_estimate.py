import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lorafleet.identity import block_hashes, root_hash
from router.core.kv.estimate import CacheEstimate, PredictedCache
from router.core.kv.index import KvIndex, WorkerId
from tests.properties import examples

W, OTHER = WorkerId("w0"), WorkerId("w1")
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
    assert (len(index), len(guesses)) == (0, 0)


FOREST = [
    prompt(*tokens) for tokens in ((1,), (1, 2), (1, 2, 3, 4), (1, 2, 5), (6, 7), (6, 8, 9), tuple(range(20, 29)))
]


class LikeTheSimplestList(RuleBasedStateMachine):
    """Against a list of (block, last use) per worker, searched from end to end."""

    def __init__(self):
        super().__init__()
        self.index = KvIndex(1)
        self.guesses = CacheEstimate(self.index, TTL_S)
        self.now = 0.0
        self.model = {}
        self.ttl_s = {}

    @rule(worker=st.sampled_from([W, OTHER]), hashes=st.sampled_from(FOREST), took_s=st.sampled_from([0, 1, 4]))
    def serve(self, worker, hashes, took_s):
        held = dict(self.model.get(worker, []))
        self.guess = self.guesses.record_served(
            worker, hashes, began_at=self.now - took_s, now=self.now, most_blocks=CAP
        )
        first = [held.get(block) for block in hashes]
        known = next((i for i, at in enumerate(first) if at is None or at > self.now - took_s), len(first))
        assert self.guess.last_used == tuple(first[:known])
        kept = hashes[:CAP]
        ttl_s = self.ttl_s.setdefault(worker, TTL_S)
        rest = [(block, at) for block, at in self.model.get(worker, []) if block not in kept and at > self.now - ttl_s]
        self.model[worker] = (rest + [(block, self.now) for block in reversed(kept)])[-CAP:]

    @rule(cached_blocks=st.integers(0, 9))
    def compare(self, cached_blocks):
        guess = getattr(self, "guess", None)
        if guess is None or guess.worker not in self.model:
            return
        self.guesses.correct_estimate(guess, cached_blocks)
        ttl_s, known = self.ttl_s[guess.worker], len(guess.last_used)
        if cached_blocks > known:
            self.ttl_s[guess.worker] = min(TTL_S, ttl_s * 2)
        elif cached_blocks < known - 1:
            gone = guess.last_used[cached_blocks]
            self.ttl_s[guess.worker] = max(0.01, min(ttl_s, guess.began_at - gone))
            self.model[guess.worker] = [(block, at) for block, at in self.model[guess.worker] if at > gone]

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, TTL_S]))
    def wait(self, seconds):
        self.now += seconds
        self.guesses.expire(self.now)
        for worker, held in self.model.items():
            self.model[worker] = [(block, at) for block, at in held if at > self.now - self.ttl_s[worker]]
        if seconds == TTL_S:
            assert len(self.index) == 0

    @rule(worker=st.sampled_from([W, OTHER]))
    def forget(self, worker):
        self.guesses.forget(worker)
        self.model.pop(worker, None)
        self.ttl_s.pop(worker, None)
        assert self.index.blocks(worker, "device") == 0

    @invariant()
    def never_more_than_the_cap_and_the_same_answers(self):
        for worker in (W, OTHER):
            assert self.index.blocks(worker, "device") == len(self.model.get(worker, [])) <= CAP
        for hashes in FOREST:
            depths = {}
            for worker, held in self.model.items():
                blocks = dict(held)
                depth = next((i for i, block in enumerate(hashes) if block not in blocks), len(hashes))
                if depth:
                    depths[worker] = depth
            assert self.index.match(hashes) == depths


TestLikeTheSimplestList = LikeTheSimplestList.TestCase
TestLikeTheSimplestList.settings = settings(max_examples=examples(60), stateful_step_count=40)
