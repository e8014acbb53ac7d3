"""The tree of prompts: every block of every prompt is in it once, with the holders that the index has of it."""

from collections import Counter
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from router.core.kv.index import KvIndex
from router.core.kv.tree import PrefixTree, SentPrompt, SentPrompts, TreeNode, hold_tree

WORKERS = ("w0", "w1", "w2")


def chain_of(words: list[int]) -> tuple[int, ...]:
    """Hashes of a prompt, each of which names its whole prefix."""
    hashes, parent = [], 0
    for word in words:
        parent = hash((parent, word)) & (1 << 62) | 1 << 61 | hash((word, parent)) & ((1 << 61) - 1)
        hashes.append(parent)
    return tuple(hashes)


CHAINS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12).map(chain_of), min_size=1, max_size=10)


def nodes_below(node: TreeNode) -> Iterator[TreeNode]:
    for child in node.children:
        yield child
        yield from nodes_below(child)


def tree_of(chains, index, *, most_nodes=10_000, most_depth=10_000) -> PrefixTree:
    tree = PrefixTree()
    for chain in chains:
        tree.add(chain)
    for _ in hold_tree(tree, index, most_nodes=most_nodes, most_depth=most_depth):
        pass
    return tree


@st.composite
def filled_index(draw, chains) -> tuple[KvIndex, dict]:
    index, held = KvIndex(16), {}
    for chain in chains:
        for worker in draw(st.frozensets(st.sampled_from(WORKERS))):
            kind = draw(st.sampled_from(["device", "host", "pending", "estimated"]))
            if kind in ("pending", "estimated"):
                (index.add_pending if kind == "pending" else index.add_estimated)(worker, chain)
                blocks = chain
            else:
                blocks = tuple(sorted(draw(st.frozensets(st.sampled_from(chain))), key=chain.index))
                index.add(worker, blocks, kind)
            for block in blocks:
                held.setdefault((block, kind == "host"), set()).add(worker)
    return index, held


@given(st.data())
def test_each_block_of_each_prompt_is_once_in_the_tree_behind_its_prefix_with_its_holders(data):
    chains = data.draw(CHAINS)
    index, held = data.draw(filled_index(chains))
    tree = tree_of(chains, index)
    found = Counter(block for node in nodes_below(tree.root) for block in node.chain[node.start : node.end])
    assert found == Counter({block: 1 for chain in chains for block in chain})
    assert tree.root.prompts == len(chains)
    for node in nodes_below(tree.root):
        blocks = node.chain[node.start : node.end]
        assert node.prompts == sum(set(blocks) <= set(chain) for chain in chains)
        for block in blocks:
            device = held.get((block, False), set())
            assert set(node.holders.device) == device
            assert set(node.holders.lower) == held.get((block, True), set()) - device
        for child in node.children:
            assert child.start == node.end
            assert child.chain[: child.start] == node.chain[: node.end]


@given(st.data())
def test_two_nodes_in_a_row_part_prompts_or_differ_in_holders(data):
    chains = data.draw(CHAINS)
    index, _ = data.draw(filled_index(chains))
    for node in nodes_below(tree_of(chains, index).root):
        if len(node.children) == 1:
            (child,) = node.children
            assert child.holders != node.holders or child.prompts < node.prompts


@given(st.data(), st.integers(1, 6), st.integers(1, 4))
def test_a_tree_has_at_most_so_many_nodes_and_levels_and_says_what_it_left_out(data, most_nodes, most_depth):
    chains = data.draw(CHAINS)
    index, _ = data.draw(filled_index(chains))
    whole, cut = tree_of(chains, index), tree_of(chains, index, most_nodes=most_nodes, most_depth=most_depth)

    def depth(node: TreeNode) -> int:
        return 1 + max(map(depth, node.children), default=0)

    nodes = list(nodes_below(cut.root))
    assert len(nodes) <= most_nodes
    assert depth(cut.root) - 1 <= most_depth
    is_whole = len(nodes) == len(list(nodes_below(whole.root)))
    assert is_whole == (not any(node.left_out for node in (cut.root, *nodes)))


def test_a_step_looks_up_a_few_hundred_blocks_however_long_a_prompt_is():
    chain = tuple(range(1 << 40, (1 << 40) + 8192))
    index = KvIndex(16)
    index.add("w0", chain, is_chain=True)
    tree = PrefixTree()
    tree.add(chain)
    assert sum(1 for _ in hold_tree(tree, index, most_nodes=10, most_depth=10)) == 16
    (node,) = tree.root.children
    assert (node.blocks, node.holders.device) == (8192, ("w0",))


def test_the_newest_prompts_are_kept_and_their_blocks_stay_within_the_limit():
    sent = SentPrompts(most_blocks=10)
    for number in range(5):
        sent.add(SentPrompt("base", "", 16, (number,) * 4))
    assert [prompt.hashes[0] for prompt in sent] == [3, 4]
    sent.add(SentPrompt("base", "", 16, (9,) * 11))
    assert not sent
