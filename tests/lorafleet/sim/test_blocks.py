"""The sim's block pool compared with a simple model, and its events with vLLM's bytes."""

from collections import Counter
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorafleet.sim.blocks import BlockChain, BlockPool, ChainRoot
from lorafleet.sim.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from tests.properties import examples

BLOCK = 4
POOL = 12  # usable blocks

# A small forest of prompts with shared prefixes, so that hits, copies and evictions all occur.
FOREST = [[1] * 4 + [branch] * 4 + [leaf] * 4 for branch in (2, 3) for leaf in (4, 5)] + [[1] * 9, [7] * 8]
ROOTS = [ChainRoot(), ChainRoot(1, "a", "/a"), ChainRoot(2, "a", "/b"), ChainRoot(cache_salt="s")]

# The three kinds of event as vLLM 0.32 sends them.
GOLDEN = bytes.fromhex(
    "93cb3ff80000000000009388a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739101b1706172656e745f626c6f636b"
    "5f68617368c0a9746f6b656e5f6964739101aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e"
    "616d65c083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739101a66d656469756da347505581a474797065b041"
    "6c6c426c6f636b73436c656172656400"
)


def test_events_are_encoded_like_vllms() -> None:
    events = [
        BlockStored([1], None, [1], 32, None, "GPU", None),
        BlockRemoved([1], "GPU"),
        AllBlocksCleared(),
    ]
    assert msgspec.msgpack.encode(EventBatch(1.5, events, 0)) == GOLDEN


def test_block_hashes_are_64_bit_numbers_or_32_bytes() -> None:
    for int_hashes in (True, False):
        pool = BlockPool(4, BLOCK, int_hashes=int_hashes)
        pool.store(BlockChain([1] * 4, ChainRoot(), BLOCK), pool.allocate(1), 0, 1)
        [event] = pool.take_events()
        assert isinstance(event, BlockStored)
        [name] = event.block_hashes
        assert isinstance(name, int) == int_hashes
        assert name < 2**64 if isinstance(name, int) else len(name) == 32


def test_prefix_hashes_depend_on_the_root_but_not_on_later_tokens() -> None:
    one, other = BlockChain([1] * 8, ChainRoot(), BLOCK), BlockChain([1] * 4 + [2] * 4, ChainRoot(), BLOCK)
    assert one.update_hashes()[0] == other.update_hashes()[0]
    assert one.update_hashes()[1] != other.update_hashes()[1]
    assert len({BlockChain([1] * 4, root, BLOCK).update_hashes()[0] for root in ROOTS}) == len(ROOTS)


class PoolAgainstList(RuleBasedStateMachine):
    """Random requests on the pool; a list of (content, age) is the model of its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(POOL + 1, BLOCK)
        self.live: list[tuple[BlockChain, list[int]]] = []
        self.order: list[int] = list(range(1, POOL + 1))  # free blocks, in order of their next use
        self.content: dict[int, tuple[Any, ...]] = {}  # block -> content: (root, all tokens up to its end)
        self.announced: Counter[Any] = Counter()  # the view of a listener
        self.names: dict[Any, tuple[Any, ...]] = {}

    def hits(self, tokens: list[int], root: ChainRoot) -> list[int]:
        found = []
        for end in range(BLOCK, len(tokens), BLOCK):
            key = self.key(root, tokens, end)
            holders = [block for block, held in self.content.items() if held == key]
            if not holders:
                break
            found.append(holders[0])
        return found

    @staticmethod
    def key(root: ChainRoot, tokens: list[int], end: int) -> tuple[Any, ...]:
        return (root.lora_name, root.lora_path, root.cache_salt, tuple(tokens[:end]))

    @rule(tokens=st.sampled_from(FOREST), root=st.sampled_from(ROOTS))
    def come(self, tokens: list[int], root: ChainRoot) -> None:
        chain = BlockChain(list(tokens), root, BLOCK)
        hits = self.pool.cached_prefix(chain)
        expected = self.hits(tokens, root)
        assert len(hits) == len(expected)
        assert [self.content[hit] for hit in hits] == [self.content[block] for block in expected]
        missing = -(-len(tokens) // BLOCK) - len(hits)
        fits = missing + sum(hit in self.order for hit in hits) <= len(self.order)
        assert self.pool.has_room_for(hits, missing) == fits
        if not fits:
            return
        self.pool.add_references(hits)
        self.order = [block for block in self.order if block not in hits]
        taken, self.order = self.order[:missing], self.order[missing:]
        for block in taken:
            self.content.pop(block, None)
        assert self.pool.allocate(missing) == taken
        table = hits + taken
        full = len(tokens) // BLOCK
        self.pool.store(chain, table, len(hits), full)
        for place in range(len(hits), full):
            self.content[table[place]] = self.key(root, tokens, (place + 1) * BLOCK)
        self.live.append((chain, table))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        _, table = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.release(table)
        held = {block for _, others in self.live for block in others}
        freed = [block for block in table if block not in held]
        self.order = [block for block in reversed(freed) if block not in self.content] + self.order
        self.order += [block for block in reversed(freed) if block in self.content]

    @rule()
    def clear(self) -> None:
        assert self.pool.clear() == (not self.live)
        if not self.live:
            self.content.clear()

    @invariant()
    def free_blocks_are_used_in_the_models_order(self) -> None:
        assert list(self.pool.free) == self.order
        assert abs(self.pool.usage - (1 - len(self.order) / POOL)) < 1e-9

    @invariant()
    def a_listener_who_counts_copies_knows_exactly_what_is_cached(self) -> None:
        for event in self.pool.take_events():
            if isinstance(event, AllBlocksCleared):
                self.announced.clear()
            elif isinstance(event, BlockRemoved):
                self.announced.subtract(event.block_hashes)
            elif isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * BLOCK
                assert event.parent_block_hash is None or self.announced[event.parent_block_hash] > 0
                self.announced.update(event.block_hashes)
        expected: Counter[Any] = Counter()
        for root_key in self.content.values():
            name, path, salt, tokens = root_key
            digest = BlockChain(list(tokens), ChainRoot(None, name, path, salt), BLOCK).update_hashes()[-1]
            expected[int.from_bytes(digest[-8:], "big")] += 1
        assert +self.announced == expected


TestBlockPoolAgainstAModel = PoolAgainstList.TestCase
TestBlockPoolAgainstAModel.settings = settings(max_examples=examples(60), stateful_step_count=40)
