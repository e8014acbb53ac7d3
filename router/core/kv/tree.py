"""The index as the radix tree that it is: prompts give the edges, the index the holders.

A chained block hash names its whole prefix, so the index stores no edges (`index.py`). Whoever wants to see the tree
gets them from prompts that were sent: where two prompts' hashes part, the tree branches. Runs of blocks without a
branch and with equal holders are one node.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import groupby

from lorafleet.identity import BlockHash
from router.core.kv.chains import Blocks, common_length
from router.core.kv.index import NOBODY, Holders, KvIndex

# Kept prompts, and blocks of all of them: 11 MB at most, where nothing else keeps their hashes.
_MOST_PROMPTS, _MOST_BLOCKS = 1000, 200_000
_BLOCKS_A_STEP = 512
"""Blocks whose holders are looked up between two turns of the event loop: 0.1 ms among a million."""


@dataclass(frozen=True, slots=True)
class SentPrompt:
    """The block hashes of a prompt that was sent. `engine_name`: of its adapter; "" for the base model."""

    base_model: str
    engine_name: str
    block_size: int
    hashes: Blocks


class SentPrompts(deque[SentPrompt]):
    """The newest prompts, so many that their blocks together stay within a limit."""

    def __init__(self, *, most_blocks: int = _MOST_BLOCKS) -> None:
        super().__init__()
        self._most_blocks, self._blocks = most_blocks, 0

    def add(self, prompt: SentPrompt) -> None:
        """Keep this prompt, in place of the oldest ones."""
        self.append(prompt)
        self._blocks += len(prompt.hashes)
        while self._blocks > self._most_blocks or len(self) > _MOST_PROMPTS:
            self._blocks -= len(self.popleft().hashes)


@dataclass(slots=True, eq=False)
class TreeNode:
    """Blocks `start` to `end` of a prompt, and the nodes that follow them. `prompts`: how many go through it."""

    chain: Blocks
    start: int
    end: int
    prompts: int = 0
    holders: Holders = NOBODY
    children: "list[TreeNode]" = field(default_factory=list)
    left_out: int = 0
    """Branches that were not followed."""

    @property
    def blocks(self) -> int:
        """How many blocks it is."""
        return self.end - self.start


class PrefixTree:
    """The tree below one root: the prompts of one adapter, or of the base model alone."""

    def __init__(self) -> None:
        self.root = TreeNode((), 0, 0)
        self._branches: dict[BlockHash, TreeNode] = {}

    def add(self, chain: Blocks) -> None:
        """Add a prompt; a node is split where the prompt parts from it. Costs a few steps for each node on its way."""
        node, at = self.root, 0
        node.prompts += 1
        while at < len(chain):
            # A hash names its whole prefix, so one table finds the branches of all nodes.
            child = self._branches.get(chain[at])
            if child is None:
                child = self._branches[chain[at]] = TreeNode(chain, at, len(chain))
                node.children.append(child)
            shared = min(child.blocks, common_length(child.chain, child.start, chain, at))
            if shared < child.blocks:
                self._split(child, child.start + shared)
            child.prompts += 1
            node, at = child, child.end

    def _split(self, node: TreeNode, at: int) -> None:
        """Split a node before block `at`; what followed it follows its second part."""
        rest = TreeNode(node.chain, at, node.end, node.prompts, children=node.children)
        self._branches[node.chain[at]] = rest
        node.end, node.children = at, [rest]


def hold_tree(tree: PrefixTree, index: KvIndex, *, most_nodes: int, most_depth: int) -> Generator[None, None, None]:
    """Look up the holders of a tree, and split its nodes where holders differ; a step is a few hundred blocks.

    The branches that most prompts take come first. What is beyond the limits is left out and counted (`left_out`).

    most_nodes  below the root
    most_depth  levels below the root; a split of a node is no new level of the prompts, and counts as one
    """
    waiting, nodes = deque([(tree.root, 0)]), 0
    while waiting:
        node, depth = waiting.popleft()
        branches = sorted(node.children, key=lambda child: -child.prompts)
        node.children = []
        for branch in branches:
            if nodes >= most_nodes or depth >= most_depth:
                node.left_out += 1
                continue
            pieces = yield from _pieces(branch, index)
            pieces = pieces[: min(most_nodes - nodes, most_depth - depth)]
            pieces[-1].children = branch.children if pieces[-1].end == branch.end else []
            pieces[-1].left_out = int(pieces[-1].end < branch.end)
            for above, below in zip((node, *pieces), pieces, strict=False):
                above.children.append(below)
            nodes += len(pieces)
            waiting.append((pieces[-1], depth + len(pieces)))


def _pieces(node: TreeNode, index: KvIndex) -> Generator[None, None, list[TreeNode]]:
    """A node as nodes of equal holders, in order; a step is a few hundred blocks."""
    found: list[tuple[Holders, int]] = []
    for start in range(node.start, node.end, _BLOCKS_A_STEP):
        found += index.holders(node.chain, start, min(node.end, start + _BLOCKS_A_STEP))
        yield
    pieces: list[TreeNode] = []
    at = node.start
    for holders, run in groupby(found, key=lambda piece: piece[0]):
        blocks = sum(count for _, count in run)
        pieces.append(TreeNode(node.chain, at, at + blocks, node.prompts, holders))
        at += blocks
    return pieces
