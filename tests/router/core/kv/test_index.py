"""The index against the simplest thing that could be right, on a small forest of shared prefixes."""

from collections import Counter
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from lorafleet.identity import TIERS, block_hashes, root_hash
from router.core.kv.index import KvIndex
from tests.properties import examples

ROOT = root_hash("m")
# Blocks of one token, so that a prompt is its own list of blocks; every prompt shares a prefix with another.
# Some are long enough to be kept as runs, and branch inside them.
STEM = tuple(range(1, 13))
PROMPTS = [
    STEM,
    (*STEM[:9], 21, 22, 23, 24, 25, 26),
    (*STEM[:5], 31, 32),
    (1, 41, 42, 43, 44, 45),
    (51, 52),
    (51, 53, 54),
]
FOREST = [block_hashes(p, block_size=1, root=ROOT) for p in PROMPTS]
WORKERS = ["w0", "w1", "w2"]
# In some runs these come before the three and after them, so that masks are wider than a machine word.
CROWD = [f"c{n}" for n in range(70)]

prompts, workers, tiers = st.sampled_from(FOREST), st.sampled_from(WORKERS), st.sampled_from(TIERS)
# Any part of a prompt, not only its head or tail; with the same block twice now and then.
starts, lengths, times = st.integers(0, 9), st.integers(0, 15), st.sampled_from([1, 1, 1, 2])
parts = st.builds(lambda prompt, a, n, times: prompt[a : a + n] * times, prompts, starts, lengths, times)
# What no chain looks like: one block in the place of another, or any blocks in any order.
some_block = st.sampled_from(sorted(set().union(*FOREST)))
spoiled = st.builds(lambda prompt, at, block: [*prompt[:at], block, *prompt[at + 1 :]], prompts, starts, some_block)
heads = st.builds(lambda prompt, n: prompt[:n], prompts, lengths)
parts |= spoiled | st.lists(some_block, max_size=8)


class IndexModel:
    """Sets and counts: what one worker has at each tier, and what is held for it."""

    def __init__(self):
        self.has = {tier: set() for tier in TIERS}
        self.held = Counter()

    def device(self):
        return self.has["device"] | {block for block, n in self.held.items() if n}


class IndexMachine(RuleBasedStateMachine):
    held = Bundle("held")
    drafts = Bundle("drafts")

    def __init__(self):
        super().__init__()
        self.index, self.model, self.drafted = KvIndex(1), {}, []

    @initialize(crowded=st.booleans())
    def crowd(self, crowded):
        if crowded:
            for n, worker in enumerate(CROWD):
                self.add(worker, FOREST[n % len(FOREST)][: n % 4], "device", is_chain=True)

    def of(self, worker):
        return self.model.setdefault(worker, IndexModel())

    @rule(worker=workers, part=parts, tier=tiers, is_chain=st.booleans())
    def add(self, worker, part, tier, is_chain):
        has = self.of(worker).has[tier]
        assert self.index.add(worker, part, tier, is_chain=is_chain) == len(set(part) - has)
        has.update(part)

    @rule(worker=workers, part=parts, tier=tiers)
    def drop(self, worker, part, tier):
        has = self.model[worker].has[tier] if worker in self.model else set()
        assert self.index.drop(worker, part, tier) == len(set(part) - has)
        has.difference_update(part)

    @rule(worker=workers, held=st.dictionaries(tiers, parts))
    def replace(self, worker, held):
        self.index.replace(worker, held)
        self.of(worker).has = {tier: set(held.get(tier, ())) for tier in TIERS}

    @rule(target=drafts)
    def draft(self):
        self.drafted.append((self.index.new_draft(), IndexModel()))
        return self.drafted[-1]

    @rule(draft=drafts, part=parts, tier=tiers)
    def add_to(self, draft, part, tier):
        self.index.add_to(draft[0], part, tier)
        draft[1].has[tier].update(part)

    @rule(draft=consumes(drafts), worker=st.none() | workers)
    def adopt(self, draft, worker):
        self.drafted.remove(draft)
        if worker is None:
            self.index.discard(draft[0])
        else:
            self.index.adopt(worker, draft[0])
            self.of(worker).has = draft[1].has

    @rule(worker=workers | st.sampled_from(CROWD))
    def forget(self, worker):
        self.index.forget(worker)
        self.model.pop(worker, None)

    @rule(target=held, worker=workers, prompt=heads)
    def hold(self, worker, prompt):
        model = self.of(worker)
        model.held.update(prompt)
        return self.index.add_pending(worker, prompt), model, prompt

    @rule(
        target=held, worker=workers, prompt=prompts, part=parts, between=st.sampled_from(["", "add", "drop", "forget"])
    )
    def hold_what_was_matched(self, worker, prompt, part, between):
        asked = tuple(prompt)
        depths = {w: run(asked, m.device()) for w, m in self.model.items()}
        assert self.index.match(asked) == {w: d for w, d in depths.items() if d}
        if between == "forget":
            self.forget(worker)
        elif between:
            getattr(self, between)(worker, part, "device", **({"is_chain": True} if between == "add" else {}))
        taken = self.hold(worker, asked)
        depths = {w: run(asked, m.device()) for w, m in self.model.items()}
        assert self.index.match(asked) == {w: d for w, d in depths.items() if d}
        return taken

    @rule(hold=consumes(held), twice=st.booleans())
    def release(self, hold, twice):
        taken, model, part = hold
        for _ in range(1 + twice):
            self.index.remove_pending(taken)
        model.held.subtract(part)  # a forgotten worker's model is nobody's by now, so this tells nothing there

    @rule(budget=st.integers(0, 5))
    def sweep(self, budget):
        self.index.sweep(budget)

    @rule()
    def sweep_all(self):
        while self.index.sweep(3):
            pass
        known = [*self.model.values(), *(model for _, model in self.drafted)]
        kept = [set().union(*(m.has[t] for m in known)) for t in TIERS]
        held = set().union(*(+m.held for m in self.model.values()))
        assert len(self.index) == sum(map(len, kept)) + len(held)
        widest = len(CROWD) + len(WORKERS) + 40  # each of 40 steps may have retired a slot
        assert all(mask < 1 << widest for mask in self.index.masks)

    # Of prompts under way only the ends of segments are compared: a prompt is a chain.
    @precondition(lambda self: not any(+model.held for model in self.model.values()))
    @rule(asked=spoiled)
    def match_of_what_is_no_chain_is_the_models(self, asked):
        depths = {w: run(asked, m.device()) for w, m in self.model.items()}
        assert self.index.match(asked) == {w: d for w, d in depths.items() if d}

    @invariant()
    def match_is_the_models(self):
        for hashes in FOREST:
            depths = {w: run(hashes, m.device()) for w, m in self.model.items()}
            assert self.index.match(hashes) == {w: d for w, d in depths.items() if d}

    @invariant()
    def lower_tiers_are_the_models(self):
        for hashes in FOREST:
            depths = {w: run(hashes, m.device()) for w, m in self.model.items()}
            wanted = {}
            for worker, model in self.model.items():
                rest = hashes[depths[worker] :]
                rest = rest[: run(rest, model.has["host"] | model.has["storage"])]
                from_host = sum(block in model.has["host"] for block in rest)
                if rest:
                    wanted[worker] = (from_host, len(rest) - from_host)
            assert self.index.lower_tiers(hashes, depths) == wanted

    @invariant()
    def counts_are_the_models(self):
        assert self.index.block_counts() == {w: sum(map(len, m.has.values())) for w, m in self.model.items()}
        assert all(self.index.blocks(w, t) == len(m.has[t]) for w, m in self.model.items() for t in TIERS)


def run(hashes, having):
    return len(list(takewhile(having.__contains__, hashes)))


TestIndex = pytest.mark.slow(IndexMachine.TestCase)
TestIndex.settings = settings(max_examples=examples(120), stateful_step_count=40)


def test_a_hold_from_before_a_forget_takes_nothing_from_what_came_after():
    index = KvIndex(1)
    old = index.add_pending("w0", FOREST[0])
    index.forget("w0")
    index.add_pending("w0", FOREST[0])
    index.remove_pending(old)
    assert index.match(FOREST[0]) == {"w0": 12}


def test_a_prompt_that_is_matched_again_is_matched_as_things_are_now():
    index, prompt = KvIndex(1), tuple(FOREST[0])
    hold = index.add_pending("w0", prompt)
    assert index.match(prompt) == {"w0": 12}
    index.remove_pending(hold)
    assert index.match(prompt) == {}
    index.add("w1", prompt)
    assert index.match(prompt) == {"w1": 12}
    index.forget("w1")
    while index.sweep(100):
        pass
    # It has the other's slot.
    index.replace("w2", {})
    assert index.match(prompt) == {}


def test_prompt_of_many_runs_matches_to_the_block():
    index, prompt = KvIndex(1), list(range(1, 1001))
    index.add("w0", prompt, is_chain=True)
    index.add("w1", prompt[:700])
    for cut in (999, 700, 600, 513, 300, 256, 255, 1):
        index.drop("w0", prompt[cut : cut + 1])
        assert index.match(prompt) == {"w0": cut, "w1": 700}
        assert index.match(prompt[: cut + 1]) == {"w0": cut, "w1": min(cut + 1, 700)}
    assert index.add("w0", prompt) == 8
    assert index.match(prompt) == {"w0": 1000, "w1": 700}
    assert index.drop("w0", prompt) + index.drop("w1", prompt) == 300
    assert (len(index), index.match(prompt)) == (0, {})


def test_a_prompt_under_way_outlives_the_snapshot_of_its_worker():
    index = KvIndex(1)
    hold = index.add_pending("w0", FOREST[0])
    index.replace("w0", {"device": FOREST[4]})
    assert index.match(FOREST[0]) == {"w0": 12}
    index.remove_pending(hold)
    assert index.match(FOREST[0]) == {}
    assert index.match(FOREST[4]) == {"w0": 2}


def test_pending_prompts_survive_a_snapshot_and_end_one_by_one():
    index = KvIndex(1)
    holds = [index.add_pending("w0", FOREST[0]), index.add_pending("w0", FOREST[0])]
    index.replace("w0", {})
    index.remove_pending(holds[0])
    assert index.match(FOREST[0]) == {"w0": 12}
    index.remove_pending(holds[1])
    assert index.match(FOREST[0]) == {}


def test_stored_blocks_beyond_pending_ones_count_where_nobody_has_what_is_between():
    index = KvIndex(1)
    index.add("w0", [*FOREST[0][:3], *FOREST[0][6:]])
    index.add("w1", FOREST[0][8:])
    assert index.match(FOREST[0]) == {"w0": 3}
    index.add_pending("w0", FOREST[0][:7])
    index.add_pending("w1", FOREST[0][:9])
    assert index.match(FOREST[0]) == {"w0": 12, "w1": 12}


def test_only_chains_become_runs():
    index = KvIndex(1)
    index.add("w0", FOREST[0])
    assert not index.device_runs
    assert index.match(FOREST[0]) == {"w0": 12}
    assert index.device_runs == [tuple(FOREST[0])]


def test_single_blocks_become_a_run_when_a_prompt_walks_them():
    index = KvIndex(1)
    index.add("w0", [*reversed(FOREST[0]), *FOREST[4]])
    assert index.match(FOREST[0]) == {"w0": 12}
    assert index.device_runs == [tuple(FOREST[0])]
    assert index.drop("w0", FOREST[0][8:9]) == 0
    assert index.match(FOREST[0]) == {"w0": 8}
    assert index.match(FOREST[4]) == {"w0": 2}


def test_the_same_tokens_under_another_root_match_nothing():
    index = KvIndex(1)
    index.add("w0", block_hashes([5, 6], block_size=1, root=root_hash("m", "sql@1")))
    assert index.match(block_hashes([5, 6], block_size=1, root=root_hash("m", "sql@1"))) == {"w0": 2}
    for other in (root_hash("m"), root_hash("m", "sql@2"), root_hash("m", "sql@1", "salt")):
        assert index.match(block_hashes([5, 6], block_size=1, root=other)) == {}


def test_workers_that_come_and_go_leave_neither_blocks_nor_wider_masks():
    index = KvIndex(1)
    for n in range(1000):
        index.add(f"w{n}", FOREST[n % 6])
        index.add_pending(f"w{n}", FOREST[n % 6])
        index.forget(f"w{n}")
        while index.sweep(2):
            pass
    assert len(index) == 0
    index.add("last", FOREST[0])
    assert max(index.masks) == 1


@pytest.mark.parametrize("blocks", [10, 10_000])
def test_forgetting_a_worker_visits_none_of_its_blocks(blocks):
    index = KvIndex(1)
    index.add("w0", range(1, blocks + 1))
    index.forget("w0")
    assert len(index) == blocks
    assert index.match([1, 2]) == {}
    assert index.sweep(blocks)
    assert not index.sweep(1)
    assert len(index) == 0


def test_masks_that_nobody_uses_any_more_are_given_up():
    index = KvIndex(1)
    for n in range(1 << 14):
        for bit in range(14):
            (index.add if n >> bit & 1 else index.drop)(f"w{bit}", [7])
    assert len(index.masks) > 4096
    while index.sweep(100):
        pass
    assert len(index.masks) == 1
    assert index.size_bytes() < 4096
