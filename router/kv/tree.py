"""The prefix index of a base model, shown as the radix tree that it is: `GET /v1/kv/tree`."""

import asyncio
from collections.abc import Iterable, Iterator

from lorafleet.identity import lora_id_of
from router.core.kv.tree import PrefixTree, SentPrompt, TreeNode, hold_tree
from router.kv.feeds import KvFeeds
from router.wire import KvTree, KvTreeNode, KvTreeRoot

_HOLDERS_SHOWN = 16
_PROMPTS_A_STEP = 16
"""Prompts that are added between two turns of the event loop."""


async def kv_tree_of(
    feeds: KvFeeds, sent: Iterable[SentPrompt], base_model: str, *, adapter: str, limit: int, depth: int
) -> KvTree:
    """The tree of a base model; other requests get their turn between its steps.

    sent     the prompts whose branches are its edges
    adapter  a lora_id, an engine name, or `base`; "" for all
    limit    nodes; the roots with most prompts come first
    """
    prompts = [
        prompt
        for prompt in sent
        if prompt.base_model == base_model and adapter in {"", _adapter_of(prompt), lora_id_of(_adapter_of(prompt))}
    ]
    trees: dict[tuple[str, int], PrefixTree] = {}
    for number, prompt in enumerate(prompts, 1):
        trees.setdefault((_adapter_of(prompt), prompt.block_size), PrefixTree()).add(prompt.hashes)
        if number % _PROMPTS_A_STEP == 0:
            await asyncio.sleep(0)
    roots, left = [], limit
    for (name, block_size), tree in sorted(trees.items(), key=lambda item: (-item[1].root.prompts, item[0])):
        index = feeds.index(base_model, block_size)
        for _ in hold_tree(tree, index, most_nodes=left, most_depth=depth):
            await asyncio.sleep(0)
        root = tree.root
        children = tuple(map(_wire_node, root.children))
        roots.append(
            KvTreeRoot(adapter=name, block_size=block_size, prompts=root.prompts, more=root.left_out, children=children)
        )
        left -= sum(1 for _ in _below(root))
    return KvTree(
        base_model=base_model,
        stored_blocks={
            block_size: len(index) for (name, block_size), index in feeds.indexes.items() if name == base_model
        },
        prompts=len(prompts),
        nodes=limit - left,
        roots=tuple(roots),
    )


def _adapter_of(prompt: SentPrompt) -> str:
    """The root's name of a prompt: its adapter's engine name, or `base`."""
    return prompt.engine_name or "base"


def _below(node: TreeNode) -> Iterator[TreeNode]:
    """The nodes below a node."""
    for child in node.children:
        yield child
        yield from _below(child)


def _wire_node(node: TreeNode) -> KvTreeNode:
    """A node and all below it as wire models."""
    return KvTreeNode(
        block=f"{node.chain[node.start]:016x}",
        depth=node.start,
        blocks=node.blocks,
        prompts=node.prompts,
        held_by=len(node.holders.device),
        holders=node.holders.device[:_HOLDERS_SHOWN],
        lower=node.holders.lower[:_HOLDERS_SHOWN],
        more=node.left_out,
        children=tuple(map(_wire_node, node.children)),
    )
