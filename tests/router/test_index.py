"""The index against the simplest thing that could be right, on a small forest of shared prefixes."""

from collections import Counter
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from lorafleet.kv.blocks import block_hashes, root_hash
from router.core.index import KvIndex

ROOT = root_hash("m")
# Blocks of one token, so that a prompt is its own list of blocks; every prompt shares a prefix with another.
PROMPTS = [(1, 2, 3, 4), (1, 2, 3, 5, 6), (1, 2, 7), (1, 8, 9, 10), (11, 12), (11, 13, 14)]
FOREST = [block_hashes(p, block_size=1, root=ROOT) for p in PROMPTS]
WORKERS = ["w0", "w1", "w2"]
prompts, workers = st.sampled_from(PROMPTS), st.sampled_from(WORKERS)


def engine_hash(prefix):
    """Another engine's opaque name for the block that ends this prefix."""
    return hash(("engine", prefix))


class IndexMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.index = KvIndex(1)
        self.copies = {w: Counter() for w in WORKERS}  # engine hash -> copies
        self.holds = {w: Counter() for w in WORKERS}  # our hash -> holds
        self.ours = {engine_hash(p[: i + 1]): FOREST[n][i] for n, p in enumerate(PROMPTS) for i in range(len(p))}

    held = Bundle("held")

    @rule(worker=workers, prompt=prompts, start=st.integers(0, 4), length=st.integers(1, 5))
    def store(self, worker, prompt, start, length):
        names = [engine_hash(prompt[: i + 1]) for i in range(len(prompt))][start : start + length]
        tokens = prompt[start : start + length]
        parent = engine_hash(prompt[:start]) if start else None
        refused = self.index.store(worker, names, tokens, parent=parent, root=ROOT)
        if not names:
            assert refused == "shape"
        elif parent is not None and not self.copies[worker][parent]:
            assert refused == "unknown_parent"
        else:
            assert refused is None
            self.copies[worker].update(names)

    @rule(worker=workers, prompt=prompts, depth=st.integers(1, 5))
    def remove_any_block(self, worker, prompt, depth):
        name = engine_hash(prompt[:depth])
        known = self.copies[worker][name] > 0
        assert self.index.remove(worker, [name]) == (0 if known else 1)
        if known:
            self.copies[worker][name] -= 1

    @rule(worker=workers)
    def forget(self, worker):
        self.index.forget(worker)
        self.copies[worker].clear()
        self.holds[worker] = Counter()  # a new object: holds taken before belong to the old one

    @rule(target=held, worker=workers, prompt=st.sampled_from(FOREST), depth=st.integers(0, 5))
    def hold(self, worker, prompt, depth):
        self.holds[worker].update(prompt[:depth])
        return self.index.hold(worker, prompt[:depth]), self.holds[worker]

    @rule(hold=consumes(held))
    def release(self, hold):
        taken, generation = hold
        self.index.release(taken)
        if generation is self.holds[taken.worker]:
            generation.subtract(taken.hashes)

    def blocks(self, worker):
        stored = {self.ours[name] for name, n in self.copies[worker].items() if n > 0}
        return stored | {block for block, n in self.holds[worker].items() if n > 0}

    @invariant()
    def same_answer_as_the_model(self):
        for hashes in FOREST:
            depths = {w: len(list(takewhile(self.blocks(w).__contains__, hashes))) for w in WORKERS}
            assert self.index.match(hashes) == {w: d for w, d in depths.items() if d}

    @invariant()
    def nothing_leaks(self):
        assert len(self.index) == len(set().union(*(self.blocks(w) for w in WORKERS)))
        assert sum(self.index.workers().values()) == sum(n > 0 for w in WORKERS for n in self.copies[w].values())


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("tokens", [(), (1,), (1, 2, 3)])
def test_a_store_whose_tokens_do_not_fill_its_blocks_is_refused(tokens):
    index = KvIndex(1)
    assert index.store("w0", ["a", "b"], tokens, parent=None, root=ROOT) == "shape"
    assert len(index) == 0


def test_a_hold_from_before_a_forget_takes_nothing_from_what_came_after():
    index = KvIndex(1)
    old = index.hold("w0", FOREST[0])
    index.forget("w0")
    index.hold("w0", FOREST[0])
    index.release(old)
    assert index.match(FOREST[0]) == {"w0": 4}


def test_the_same_tokens_under_another_root_match_nothing():
    index = KvIndex(1)
    index.store("w0", [1, 2], [5, 6], parent=None, root=root_hash("m", "sql@1"))
    assert index.match(block_hashes([5, 6], block_size=1, root=root_hash("m", "sql@1"))) == {"w0": 2}
    for other in (root_hash("m"), root_hash("m", "sql@2"), root_hash("m", "sql@1", "salt")):
        assert index.match(block_hashes([5, 6], block_size=1, root=other)) == {}
