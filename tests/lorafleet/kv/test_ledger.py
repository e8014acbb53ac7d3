"""The ledger against the simplest thing that could be right, on a small forest of shared prefixes."""

import sys
from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lorafleet.identity import TIERS, block_hashes, root_hash
from lorafleet.kv.events import BlocksCleared, BlocksRemoved, BlocksStored, KvEventBatch
from lorafleet.kv.extra_keys import extra_hash_inputs, media_key
from lorafleet.kv.ledger import TRAITS, BlockLedger
from tests.properties import examples

ROOT = root_hash("m")
# Blocks of one token, so that a prompt is its own list of blocks; every prompt shares a prefix with another.
PROMPTS = [(1, 2, 3), (1, 2, 4), (5,)]
OURS = {p[: i + 1]: block for p in PROMPTS for i, block in enumerate(block_hashes(p, block_size=1, root=ROOT))}
MEDIA = {"GPU": "device", "CPU": "host", "cpu": "host", "CPU_PINNED": "host", "STORAGE": "storage"}


class StrictSink:
    """A sink that fails if a block is added twice or dropped while missing."""

    def __init__(self):
        self.tiers = {tier: set() for tier in TIERS}

    def add(self, tier, hashes):
        assert len(set(hashes)) == len(hashes) > 0
        assert self.tiers[tier].isdisjoint(hashes)
        self.tiers[tier].update(hashes)

    def drop(self, tier, hashes):
        assert len(set(hashes)) == len(hashes) > 0
        assert self.tiers[tier].issuperset(hashes)
        self.tiers[tier].difference_update(hashes)

    def clear(self):
        self.tiers = {tier: set() for tier in TIERS}


def stored(names, tokens, parent=None, **more):
    return BlocksStored(names, parent, tokens, **{"block_size": 1, "medium": "GPU", **more})


def apply(ledger, *events):
    ledger.apply(KvEventBatch(1.0, list(events)))


def name(variant, prefix):
    """The engine's opaque name of the block that ends this prefix; two variants are one block of ours."""
    return hash((variant, prefix)) & (1 << 60) - 1


variants, prompts = st.sampled_from("ab"), st.sampled_from(PROMPTS)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.sink = StrictSink()
        self.ledger = BlockLedger("m", 1, self.sink)
        self.copies = {medium: Counter() for medium in ("GPU", "CPU", "CPU_PINNED", "STORAGE")}
        self.prefix = {name(v, prefix): prefix for v in "ab" for prefix in OURS}
        self.accepted = 0
        self.rejected = Counter()
        self.repeats = False

    def knows(self, engine_hash):
        return any(counts[engine_hash] for counts in self.copies.values())

    def put(self, medium, names):
        for each in names:
            self.copies[medium][each] = 1 if self.repeats else self.copies[medium][each] + 1

    @rule(variant=variants, prompt=prompts, start=st.sampled_from([0, 0, 0, 1, 2]), length=st.integers(1, 3))
    def store(self, variant, prompt, start, length):
        names = [name(variant, prompt[: i + 1]) for i in range(len(prompt))][start : start + length]
        parent = name(variant, prompt[:start]) if start else None
        apply(self.ledger, stored(names, list(prompt[start : start + length]), parent))
        if not names:
            self.rejected["shape"] += 1
        elif parent is not None and not self.knows(parent):
            self.rejected["unknown_parent"] += 1
        elif parent is not None or len(names) == 1 or not all(self.copies["GPU"][each] for each in names):
            self.put("GPU", names)

    @rule(variant=variants, prompt=prompts, depth=st.integers(1, 3), medium=st.sampled_from(["CPU", "cpu", "STORAGE"]))
    def copy_below(self, variant, prompt, depth, medium):
        names = [name(variant, prompt[: i + 1]) for i in range(len(prompt))][:depth]
        apply(self.ledger, stored(names, [], block_size=0, medium=medium))
        known = [each for each in names if self.knows(each)]
        self.put(medium.upper(), known)
        self.rejected["unknown_block"] += len(known) < len(names)

    # Mostly from the device, and several at once: that is where copies are.
    @rule(
        taken=st.lists(
            st.tuples(variants, prompts, st.integers(1, 3), st.sampled_from(["GPU"] * 4 + ["CPU", "cpu", "STORAGE"])),
            min_size=1,
            max_size=6,
        )
    )
    def remove_any_blocks(self, taken):
        events = []
        for variant, prompt, depth, medium in taken:
            each = name(variant, prompt[:depth])
            events.append(BlocksRemoved([each], medium))
            if self.copies[medium.upper()][each]:
                self.copies[medium.upper()][each] -= 1
            else:
                self.rejected["unknown_block"] += 1
        apply(self.ledger, *events)

    @rule(often=st.integers(0, 4))
    def clear(self, often):
        if often:
            return
        apply(self.ledger, BlocksCleared())
        for counts in self.copies.values():
            counts.clear()

    @rule(expected=st.booleans())
    def expect_repeats(self, expected):
        self.ledger.expect_repeats(expected)
        self.repeats = expected
        if expected:
            for counts in self.copies.values():
                for each in counts:
                    counts[each] = min(1, counts[each])

    @invariant()
    def same_blocks_as_the_model(self):
        for tier in TIERS:
            held = {
                OURS[self.prefix[each]]
                for medium, counts in self.copies.items()
                if MEDIA[medium] == tier
                for each, count in counts.items()
                if count
            }
            assert self.sink.tiers[tier] == held
            assert set(self.ledger.blocks(tier)) == held

    @invariant()
    def same_reasons_as_the_model(self):
        assert self.ledger.rejected == +self.rejected


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=examples(200), stateful_step_count=40)


def ledger(**more):
    sink = StrictSink()
    return BlockLedger(**{"base_model": "m", "block_size": 2, "sink": sink, **more}), sink


def chain(tokens, adapter="", salt="", **more):
    return block_hashes(tokens, block_size=2, root=root_hash("m", adapter, salt), **more)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored([1, 2], [1, 2], block_size=2), "shape"),
        (stored([1, 1], [1, 2, 1, 2], block_size=2), "shape"),
        (stored([], [], block_size=2), "shape"),
        (stored([1], [1, -1], block_size=2), "shape"),
        (stored([2], [1, 2], 77, block_size=2), "unknown_parent"),
        (stored([1], [1, 2, 3, 4], block_size=4), "block_size"),
        (stored([1], [1], block_size=1), "block_size"),
        (stored([1], [1, 2], block_size=2, lora_id=1), "adapter"),
        (stored([1], [1, 2], block_size=2, medium="TAPE"), "medium"),
        (stored([1], [], block_size=0, medium="CPU"), "unknown_block"),
        (stored([], [], block_size=0, medium="CPU"), "shape"),
        (stored([1], [1, 2], block_size=2, group_idx=1), "group"),
        (stored([1], [1, 2], block_size=2, kv_cache_spec_kind="sliding_window"), "attention"),
        (stored([1], [1, 2], block_size=2, kv_cache_spec_kind="mamba"), "attention"),
        (stored([1], [1, 2], block_size=2, kv_cache_spec_kind="unknown"), "attention"),
        (stored([1], [1, 2], block_size=2, extra_keys=[[b"embeds"]]), "extra_keys"),
        (stored([1], [1, 2], block_size=2, extra_keys=[None, None]), "extra_keys"),
        (stored([1], [1, 2], block_size=2, lora_name="sql@1", extra_keys=[["other@1"]]), "extra_keys"),
        (BlocksRemoved([1], "GPU"), "unknown_block"),
        (BlocksRemoved([1], "TAPE"), "medium"),
        (BlocksRemoved([1], "GPU", 1), "group"),
    ],
)
def test_an_inexact_event_is_rejected_with_a_reason(event, reason):
    book, sink = ledger()
    apply(book, event)
    assert book.rejected == {reason: 1}
    assert not book.accepted
    assert not any(sink.tiers.values())


WHOLE = {"kv_cache_spec_kind": "full_attention", "group_idx": 1}
STATES = {"kv_cache_spec_kind": "mamba", "group_idx": 0}
# With blocks of two tokens a hit needs two blocks in a row.
WINDOW = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5, "group_idx": 0}
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]
BLOCKS = [1, 2, 3, 4]


@pytest.mark.parametrize("is_first", [True, False])
def test_the_group_that_keeps_whole_prefixes_is_indexed_as_far_as_the_others_can_go_on(is_first):
    """As Granite 4's (states) and Gemma 3's: the first group is of another kind, and has events before or behind."""
    book, sink = ledger()
    events = stored([3], TOKENS[:6], block_size=2, **STATES), stored(BLOCKS[:3], TOKENS[:6], block_size=2, **WHOLE)
    apply(book, *(events if is_first else reversed(events)))
    assert sink.tiers["device"] == set(chain(TOKENS[:6]))
    # An answer: no state is kept within it.
    apply(book, stored([4], TOKENS[6:], 3, block_size=2, **WHOLE), stored([], TOKENS[6:], 3, block_size=2, **STATES))
    assert sink.tiers["device"] == set(book.blocks("device")) == set(chain(TOKENS[:6]))
    apply(book, stored([4], TOKENS[6:], 3, block_size=2, **STATES))
    assert sink.tiers["device"] == set(chain(TOKENS))
    apply(book, BlocksRemoved([4], "GPU", 0), BlocksRemoved([2], "GPU", 1))
    assert sink.tiers["device"] == {chain(TOKENS)[2]}
    apply(book, BlocksRemoved([3], "GPU", 0))
    assert not sink.tiers["device"]
    assert not book.rejected


def test_groups_may_be_told_in_several_batches():
    book, sink = ledger()
    apply(book, stored([9], [9, 9], block_size=2, **STATES))
    apply(book, stored([1, 2], TOKENS[:4], block_size=2, **WHOLE), stored([1], TOKENS[:2], block_size=2, **STATES))
    assert sink.tiers["device"] == set(chain(TOKENS)[:1])


def test_a_window_needs_its_blocks_in_a_row():
    book, sink = ledger()
    apply(book, stored([2, 3], TOKENS, block_size=2, **WINDOW), stored(BLOCKS, TOKENS, block_size=2, **WHOLE))
    assert sink.tiers["device"] == set(chain(TOKENS)[:3])
    apply(book, BlocksRemoved([2], "GPU", 0))
    assert not sink.tiers["device"]
    # Where the prompt begins, no more is needed than there is.
    apply(book, stored([1], TOKENS[:2], block_size=2, **WINDOW))
    assert sink.tiers["device"] == set(chain(TOKENS)[:1])


def test_a_second_group_that_keeps_whole_prefixes_is_rejected():
    book, sink = ledger()
    apply(
        book, stored([1], [1, 2], block_size=2, **WHOLE), stored([1], [1, 2], block_size=2, **WHOLE | {"group_idx": 2})
    )
    apply(book, BlocksRemoved([1], "GPU", 2))
    assert sink.tiers["device"] == set(chain([1, 2]))
    assert book.rejected == {"group": 2}


def test_a_report_of_reused_blocks_tells_of_a_window_at_its_end_only():
    """vLLM reports all blocks of the prompt for each group, also those that a window has left."""
    book, sink = ledger()
    apply(book, stored([4], TOKENS, block_size=2, **STATES), stored(BLOCKS, TOKENS, block_size=2, **WHOLE))
    apply(book, stored(BLOCKS[:3], TOKENS[:6], block_size=2, **STATES))
    apply(book, stored(BLOCKS[:3], TOKENS[:6], block_size=2, **WHOLE))
    apply(book, BlocksRemoved([4], "GPU", 0))
    assert sink.tiers["device"] == set(chain(TOKENS)[:3])
    apply(book, BlocksRemoved([3], "GPU", 0))
    assert not sink.tiers["device"]


def test_a_window_that_is_kept_all_along_a_new_prompt_is_no_report():
    book, sink = ledger()
    apply(book, stored(BLOCKS, TOKENS, block_size=2, **WHOLE), stored(BLOCKS, TOKENS, block_size=2, **STATES))
    apply(book, BlocksRemoved([4], "GPU", 0), BlocksRemoved([3], "GPU", 0))
    assert sink.tiers["device"] == set(chain(TOKENS)[:2])


KINDS = ["full_attention", "mla_attention", "sliding_window", "mamba", "unknown", None]


def odd_event(rng, kinds):
    """A store or a removal of few blocks, whose fields need not fit one another."""
    group = rng.choice([None, 0, 1, 2, -1])
    if rng.random() < 0.3:
        names = [rng.randint(0, 1) * 100 + rng.randint(1, 5) for _ in range(rng.randint(0, 2))]
        return BlocksRemoved(names, rng.choice(["GPU", "CPU"]), group)
    prompt, start, count = rng.randint(0, 1), rng.randint(0, 2), rng.randint(0, 4)
    names = [prompt * 100 + at for at in range(start + 1, start + count + 1)]
    at = rng.randrange(len(kinds))
    return stored(
        names if rng.random() < 0.6 else rng.sample(names, rng.randint(0, count)),
        [prompt] * (2 * count),
        prompt * 100 + start if start else None,
        block_size=rng.choice([2, 2, 2, 2, 4]),
        medium=rng.choice(["GPU", "GPU", "GPU", "CPU", None]),
        group_idx=at if rng.random() < 0.8 else group,
        kv_cache_spec_kind=kinds[at],
        kv_cache_spec_sliding_window=rng.choice([None, 0, 1, 5, -3, 10**9]),
    )


def test_events_whose_fields_do_not_fit_one_another_break_neither_ledger_nor_sink():
    for seed in range(examples(3000)):
        rng = Random(seed)
        book, sink = ledger(most_blocks=rng.choice([0, 8]))
        kinds = rng.sample(KINDS, rng.randint(1, 3))
        for _ in range(30):
            apply(book, *(odd_event(rng, kinds) for _ in range(rng.randint(1, 5))))
            assert all(set(book.blocks(tier)) == sink.tiers[tier] for tier in TIERS)


def test_a_cleared_cache_has_no_resume_points():
    book, sink = ledger()
    apply(book, stored([2], TOKENS[:4], block_size=2, **STATES), stored([1, 2], TOKENS[:4], block_size=2, **WHOLE))
    size = book.size_bytes()
    book.clear()
    assert book.size_bytes() < size
    apply(book, stored([1, 2], TOKENS[:4], block_size=2, **WHOLE))
    assert not sink.tiers["device"]


@pytest.mark.parametrize("kind", ["sliding_window", "mamba", "a_new_one"])
def test_a_model_whose_layers_all_keep_less_than_prefixes_is_not_indexed(kind):
    book, sink = ledger()
    apply(book, stored([1], [1, 2], block_size=2, kv_cache_spec_kind=kind, group_idx=0))
    assert book.rejected == {"attention": 1}
    assert not sink.tiers["device"]


def test_the_group_with_blocks_of_the_engines_size_is_indexed():
    book, sink = ledger()
    indexer = {"kv_cache_spec_kind": "mla_attention", "group_idx": 0}
    apply(book, stored([7], [1, 2, 3, 4], block_size=4, **indexer))
    apply(book, stored([1], [1, 2], block_size=2, **indexer | {"group_idx": 1}))
    assert sink.tiers["device"] == set(chain([1, 2]))
    assert book.rejected == {"block_size": 1}


def test_layers_with_a_window_that_keep_all_blocks_are_indexed():
    """vLLM without its hybrid cache manager: on the CPU, and with some KV connectors."""
    book, sink = ledger()
    kept = {"kv_cache_spec_kind": "full_attention", "kv_cache_spec_sliding_window": 4096, "group_idx": 0}
    apply(book, stored([1], [1, 2], block_size=2, **kept))
    assert sink.tiers["device"] == set(chain([1, 2]))


def test_events_without_a_group_are_of_the_indexed_one():
    """As those of KV connectors beside the engine's own, and of engines with one group."""
    book, sink = ledger()
    apply(book, stored([1], [1, 2], block_size=2, kv_cache_spec_kind="full_attention", group_idx=1))
    apply(book, stored([1], [], block_size=0, medium="CPU"))
    assert sink.tiers["host"] == set(chain([1, 2]))
    apply(book, BlocksRemoved([1], "CPU"), BlocksRemoved([1], "GPU"))
    assert not sink.tiers["device"]
    assert not book.rejected


def test_an_event_that_contradicts_known_blocks_is_rejected():
    book, sink = ledger()
    apply(book, stored([1], [1, 2], block_size=2), stored([1], [3, 4], block_size=2))
    assert book.rejected == {"conflict": 1}
    assert sink.tiers["device"] == set(chain([1, 2]))


def test_blocks_of_adapters_salts_and_images_are_distinct():
    book, sink = ledger()
    tokens = [1, 2, 3, 4]
    image = media_key([("cat.png", -1)])
    seen = [
        (stored([1, 2], tokens, block_size=2), chain(tokens)),
        (stored([3, 4], tokens, block_size=2, extra_keys=[["pepper"], None]), chain(tokens, salt="pepper")),
        (
            stored([5, 6], tokens, block_size=2, lora_name="sql@1", extra_keys=[["sql@1"], ["sql@1"]]),
            chain(tokens, "sql@1"),
        ),
        (
            stored([7, 8], tokens, block_size=2, lora_name="a@1", extra_keys=[["a@1", "salt"], ["a@1"]]),
            chain(tokens, "a@1", "salt"),
        ),
        (
            stored([9, 10], tokens, block_size=2, extra_keys=[None, [["cat.png", -1]]]),
            chain(tokens, extra={1: image}),
        ),
        (
            stored([11, 12], tokens, block_size=2, extra_keys=[[["cat.png", -1], "salt"], None]),
            chain(tokens, salt="salt", extra={0: image}),
        ),
    ]
    expected = set()
    for event, ours in seen:
        assert expected.isdisjoint(ours[1:])
        apply(book, event)
        expected.update(ours)
        assert sink.tiers["device"] == expected
    assert not book.rejected


@pytest.mark.parametrize(
    ("keys", "adapter", "is_start", "expected"),
    [
        ([None, None], "", True, ("", None)),
        ([["salt"], None], "", True, ("salt", None)),
        ([["salt"], None], "", False, None),
        ([["sql@1", "salt"], ["sql@1"]], "sql@1", True, ("salt", None)),
        ([["sql@1"]], "", True, ("sql@1", None)),
        ([["salt"], ["salt"]], "", True, None),
        ([["other@1", "salt"]], "sql@1", True, None),
        ([None], "sql@1", True, None),
        ([[["image", 3]]], "", False, ("", {0: media_key([("image", 3)])})),
        ([[["image"]]], "", False, None),
        ([[["image", "3"]]], "", False, None),
        ([["salt", b"embeds"]], "", True, None),
    ],
)
def test_extra_keys_of_a_block_are_distinguished(keys, adapter, is_start, expected):
    assert extra_hash_inputs(keys, adapter, is_start=is_start) == expected


def test_different_lists_of_images_give_different_bytes():
    lists = [[("a", 1)], [("a", 2)], [("b", 1)], [("a", 1), ("b", 1)], [("b", 1), ("a", 1)], [("", 1)], []]
    assert len({media_key(items) for items in lists}) == len(lists)


def test_bytes_and_integers_of_one_hash_are_the_same_block():
    book, sink = ledger()
    digest = bytes(range(32))
    apply(book, stored([digest], [1, 2], block_size=2), BlocksRemoved([int.from_bytes(digest[-8:], "big")], "GPU"))
    assert not book.rejected
    assert not sink.tiers["device"]


def test_a_block_is_dropped_with_its_last_copy():
    book, sink = ledger()
    store = stored([1], [1, 2], block_size=2)
    apply(book, store, store, store, BlocksRemoved([1], "GPU"), BlocksRemoved([1], "GPU"))
    assert sink.tiers["device"] == set(chain([1, 2]))
    apply(book, BlocksRemoved([1], "GPU"))
    assert not sink.tiers["device"]


def test_two_engine_hashes_of_one_block_are_counted():
    book, sink = ledger()
    apply(book, stored([1], [1, 2], block_size=2), stored([2], [1, 2], block_size=2), stored([3], [1, 2], block_size=2))
    apply(book, BlocksRemoved([1], "GPU"), BlocksRemoved([2], "GPU"))
    assert sink.tiers["device"] == set(chain([1, 2]))
    apply(book, BlocksRemoved([3], "GPU"))
    assert not sink.tiers["device"]


def test_a_repeated_whole_prompt_counts_as_a_reuse_report():
    book, sink = ledger()
    apply(book, stored([1, 2], [1, 2, 3, 4], block_size=2))
    for _ in range(3):
        apply(book, stored([1, 2], [1, 2, 3, 4], block_size=2))
    # An engine computes the last block of a prompt again, and the first where there is no other: those are copies.
    apply(book, stored([2], [3, 4], 1, block_size=2), stored([1], [1, 2], block_size=2))
    apply(book, BlocksRemoved([2], "GPU"), BlocksRemoved([1], "GPU"))
    assert sink.tiers["device"] == set(chain([1, 2, 3, 4]))
    apply(book, BlocksRemoved([2], "GPU"), BlocksRemoved([1], "GPU"))
    assert not sink.tiers["device"]
    assert not book.rejected


def test_expected_repeats_add_no_copy_and_restore_lost_blocks():
    book, sink = ledger()
    store = stored([1, 2], [1, 2, 3, 4], block_size=2)
    apply(book, store, store)
    book.expect_repeats(True)
    apply(book, store, stored([5], [5, 6], block_size=2))
    apply(book, BlocksRemoved([1], "GPU"))
    assert sink.tiers["device"] == {*chain([1, 2, 3, 4])[1:], *chain([5, 6])}
    assert not book.rejected


def test_a_ledger_with_missed_removals_keeps_the_newest_blocks():
    book, sink = ledger(most_blocks=4)
    for each in range(4):
        apply(book, stored([each], [each, each], block_size=2))
    assert len(book) == 4
    apply(book, stored([4], [4, 4], block_size=2))
    assert sink.tiers["device"] == {chain([each, each])[0] for each in (1, 2, 3, 4)}
    assert book.rejected == {"overflow": 1}
    # Reported blocks are present; unreported ones are those with missed removals.
    book.expect_repeats(True)
    apply(book, stored([1], [1, 1], block_size=2), stored([5], [5, 5], block_size=2))
    assert sink.tiers["device"] == {chain([each, each])[0] for each in (1, 3, 4, 5)}
    assert set(book.blocks("device")) == sink.tiers["device"]


def test_a_block_on_the_host_alone_is_still_a_parent():
    book, sink = ledger()
    apply(
        book,
        stored([1], [1, 2], block_size=2),
        stored([1], [], block_size=0, medium="CPU"),
        BlocksRemoved([1], "GPU"),
        stored([2], [3, 4], 1, block_size=2),
    )
    assert not book.rejected
    assert (sink.tiers["device"], sink.tiers["host"]) == (set(chain([1, 2, 3, 4])[1:]), set(chain([1, 2])))


def test_a_salt_in_its_own_event_field_separates_blocks():
    book, sink = ledger(traits=TRAITS["sglang"])
    salted = stored([1], [1, 2], block_size=2, cache_salt="tenant")
    apply(book, salted, stored([2], [3, 4], 1, block_size=2, cache_salt="tenant"))
    assert sink.tiers["device"] == set(chain([1, 2, 3, 4], salt="tenant"))


def test_reloading_an_adapter_drops_its_blocks_only_with_forgets_on_load():
    for dialect, left in (("sglang", set(chain([5, 6]))), ("vllm", {*chain([1, 2], "sql@1"), *chain([5, 6])})):
        book, sink = ledger(traits=TRAITS[dialect])
        own = stored([1], [1, 2], block_size=2, lora_name="sql@1")
        apply(book, own, own, stored([2], [5, 6], block_size=2), stored([1], [], block_size=0, medium="DISK"))
        book.forget_adapter("sql@1")
        assert sink.tiers["device"] == left
        assert sink.tiers["storage"] == (set() if dialect == "sglang" else set(chain([1, 2], "sql@1")))
        apply(book, stored([7], [1, 2], block_size=2, lora_name="sql@1"))
        assert sink.tiers["device"] == left | set(chain([1, 2], "sql@1"))


def test_a_block_takes_about_150_bytes_and_frees_them():
    book, sink = ledger()
    names = [hash(("n", i)) & (1 << 64) - 1 for i in range(20_000)]
    events = [stored([each], [i, i], block_size=2) for i, each in enumerate(names)]
    apply(book, *events)
    per_block = book.size_bytes() / len(book)
    assert 100 < per_block < 160  # 140 here; 200 just after the tables have grown, which they do by doubling
    assert book.size_bytes() > sum(map(sys.getsizeof, names)) / 2
    empty = ledger()[0].size_bytes()
    apply(book, BlocksCleared())
    assert book.size_bytes() == empty
    apply(book, *events, *(BlocksRemoved([each], "GPU") for each in names))
    assert len(book) == 0
    assert not sink.tiers["device"]
