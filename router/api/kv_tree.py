"""`GET /v1/kv/tree`: the prefix index of a base model, shown as the radix tree that it is. For operators."""

import asyncio
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from lorafleet.identity import lora_id_of
from lorafleet.keys.auth import AuthFirstRoute, requires
from router.api.control import known_fleet
from router.core.errors import ModelNotFound
from router.core.kv.tree import PrefixTree, SentPrompt, TreeNode, hold_tree
from router.request.services import Services
from router.wire import KvTree, KvTreeNode, KvTreeRoot

_HOLDERS_SHOWN = 16
_PROMPTS_A_STEP = 16
"""Prompts that are added between two turns of the event loop."""


def kv_tree_routes(services: Services) -> APIRouter:
    """The route of the tree."""
    api = APIRouter(route_class=AuthFirstRoute)

    @api.get("/v1/kv/tree", dependencies=[Depends(requires(services.keys, "view", is_for_fleet=True))])
    async def kv_tree(
        model: Annotated[str, Query(description="base model; default: the only one")] = "",
        adapter: Annotated[str, Query(description="lora_id, engine name, or `base`; default: all")] = "",
        limit: Annotated[int, Query(ge=1, le=1000, description="nodes in the answer")] = 200,
        depth: Annotated[int, Query(ge=1, le=64, description="levels below a root")] = 16,
    ) -> KvTree:
        """The prompts that this process sent lately, as a tree, with who holds each part of them now."""
        fleet = await known_fleet(services)
        base_models = [name for name, replica in fleet.base_models.items() if replica]
        base_model = model or (base_models[0] if len(base_models) == 1 else "")
        if base_model not in fleet.base_models:
            named = f"{model!r} is no base model here" if model else "there are several base models"
            raise ModelNotFound(f"{named}; `model` is one of: {', '.join(sorted(base_models))}", param="model")
        return await kv_tree_of(services, base_model, adapter=adapter, limit=limit, depth=depth)

    return api


async def kv_tree_of(services: Services, base_model: str, *, adapter: str, limit: int, depth: int) -> KvTree:
    """The tree of a base model; other requests get their turn between its steps.

    adapter  a lora_id, an engine name, or `base`; "" for all
    limit    nodes; the roots with most prompts come first
    """
    prompts = [
        prompt
        for prompt in services.sent_prompts
        if prompt.base_model == base_model and adapter in {"", _adapter_of(prompt), lora_id_of(_adapter_of(prompt))}
    ]
    trees: dict[tuple[str, int], PrefixTree] = {}
    for number, prompt in enumerate(prompts, 1):
        trees.setdefault((_adapter_of(prompt), prompt.block_size), PrefixTree()).add(prompt.hashes)
        if number % _PROMPTS_A_STEP == 0:
            await asyncio.sleep(0)
    roots, left = [], limit
    for (name, block_size), tree in sorted(trees.items(), key=lambda item: (-item[1].root.prompts, item[0])):
        index = services.feeds.index(base_model, block_size)
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
            block_size: len(index) for (name, block_size), index in services.feeds.indexes.items() if name == base_model
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
