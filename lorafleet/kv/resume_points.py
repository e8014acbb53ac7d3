"""The blocks that an engine can go on from, of a model with several KV groups.

The layers of one group keep all blocks of a prefix. Those of the others keep less: a sliding window keeps some blocks
before the end of each prompt and before places where prompts part, Mamba a state there. An engine continues a prompt
only from a resume point: a block at whose end every group has what it needs. So a block of the whole prefix is worth
something as far as a resume point stands on it or behind it, and no other is shown to routers.

source  vLLM 0.32 v1/core/single_type_kv_cache_manager.py reachable_block_mask, kv_cache_coordinator.py
"""

import sys
from collections.abc import Container, Iterable, Sequence
from typing import Protocol, TypeAlias

from lorafleet.identity import BlockHash, Tier

# Block -> whether it leads to a resume point, of blocks for which that changed.
_Changes: TypeAlias = dict[BlockHash, bool]
_SET_BYTES = 216  # of a small one in CPython 3.11, which each block has that others stand behind


class LedgerSink(Protocol):
    """Receives changes in order. A block is added only where it is missing, and dropped only where it is present."""

    def add(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Add blocks that were missing at this tier."""

    def drop(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Drop blocks of which this tier has no copy any longer."""

    def clear(self) -> None:
        """Drop all blocks at every tier."""


class ResumePoints:
    """A sink that hands on those blocks of the device that lead to a resume point. Other tiers pass unchanged.

    What a group keeps of a block is forgotten with the block of the whole prefix.
    """

    def __init__(self, sink: LedgerSink) -> None:
        self._sink = sink
        # KV group -> kept blocks in a row that it needs at the end of a hit.
        self._needs: dict[int, int] = {}
        # KV group -> kept block -> kept blocks in a row that end with it, at most as many as needed.
        self._runs: dict[int, dict[BlockHash, int]] = {}
        # Block of the whole prefix -> the block before it; None for a prompt's first. And the blocks behind each.
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._children: dict[BlockHash, set[BlockHash]] = {}
        self._points: set[BlockHash] = set()
        # Block -> how many of its children lead to a resume point; none is left out.
        self._ways: dict[BlockHash, int] = {}
        self._links: dict[BlockHash, BlockHash | None] = {}

    @property
    def groups(self) -> Container[int]:
        """The KV groups whose windows or states are followed."""
        return self._needs.keys()

    def blocks(self) -> Iterable[BlockHash]:
        """The blocks of the device that lead to a resume point, in any order."""
        return filter(self._leads, self._parents)

    def size_bytes(self) -> int:
        """Approximate memory in bytes; the hashes are the ledger's. Takes microseconds."""
        tables = (self._parents, self._children, self._points, self._ways, *self._runs.values())
        return sum(map(sys.getsizeof, tables)) + len(self._children) * _SET_BYTES

    def link(self, parent: BlockHash | None, hashes: Sequence[BlockHash]) -> None:
        """Say which block stands before each of these, which are added next: `parent` before the first, and so on."""
        self._links = dict(zip(hashes, (parent, *hashes), strict=False))

    # --- the blocks of the whole prefix ---------------------------------------------------------------------------

    def add(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Add blocks. Of the device those are handed on that have a resume point behind them."""
        if tier != "device":
            self._sink.add(tier, hashes)
            return
        changed: _Changes = {}
        for block in hashes:
            parent = self._parents[block] = self._links[block]
            if parent is not None:
                self._children.setdefault(parent, set()).add(block)
            if self._leads(block):  # by children that stayed
                _note_change(changed, block, leads=True)
                self._add_way(parent, changed)
        self._hand_on(changed)

    def drop(self, tier: Tier, hashes: Sequence[BlockHash]) -> None:
        """Drop blocks, and with those of the device what other groups kept of them."""
        if tier != "device":
            self._sink.drop(tier, hashes)
            return
        changed: _Changes = {}
        for block in hashes:
            did_lead = self._leads(block)
            parent = self._parents.pop(block)
            self._points.discard(block)
            if parent is not None:
                self._forget_child(parent, block)
            if did_lead:
                _note_change(changed, block, leads=False)
                self._drop_way(parent, changed)
            for group, runs in self._runs.items():
                if runs.pop(block, None) is not None:
                    self._update_runs(group, self._children.get(block, ()), changed)
        self._hand_on(changed)

    def clear(self) -> None:
        """Drop everything; the groups and their needs stay."""
        for runs in self._runs.values():
            runs.clear()
        self._parents.clear()
        self._children.clear()
        self._points.clear()
        self._ways.clear()
        self._links.clear()
        self._sink.clear()

    # --- what the other groups keep -------------------------------------------------------------------------------

    def keep(self, group: int, need: int, hashes: Iterable[BlockHash]) -> None:
        """Note that a group keeps these blocks; unknown ones are left out.

        need  kept blocks in a row that the group must have at the end of a hit, fewer where the prompt begins; of a
              group's first call, as the model's layers do not change
        """
        changed: _Changes = {}
        if group not in self._needs:
            self._needs[group], self._runs[group] = need, {}
            for point in list(self._points):
                self._judge(point, changed)
        runs = self._runs[group]
        for block in hashes:
            if block in self._parents:
                runs.setdefault(block, 0)
                self._update_runs(group, [block], changed)
        self._hand_on(changed)

    def lose(self, group: int, hashes: Iterable[BlockHash]) -> None:
        """Note that a group keeps these blocks no longer; unknown ones are left out."""
        runs = self._runs[group]
        changed: _Changes = {}
        for block in hashes:
            if runs.pop(block, None) is not None:
                self._judge(block, changed)
                self._update_runs(group, self._children.get(block, ()), changed)
        self._hand_on(changed)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _hand_on(self, changed: _Changes) -> None:
        """Tell the sink which blocks lead to a resume point only now, and which no longer."""
        if shown := [block for block, leads in changed.items() if leads]:
            self._sink.add("device", shown)
        if hidden := [block for block, leads in changed.items() if not leads]:
            self._sink.drop("device", hidden)

    def _update_runs(self, group: int, blocks: Iterable[BlockHash], changed: _Changes) -> None:
        """Count the runs at these blocks anew, and behind them as far as they change: `need` blocks at most.

        Notes in `changed` which blocks lead to a resume point only now, or no longer.
        """
        runs, need = self._runs[group], self._needs[group]
        waiting = list(blocks)
        while waiting:
            block = waiting.pop()
            if block not in runs:
                continue
            parent = self._parents[block]
            run = need if parent is None else min(need, runs.get(parent, 0) + 1)
            if run != runs[block]:
                runs[block] = run
                self._judge(block, changed)
                waiting += self._children.get(block, ())

    def _judge(self, block: BlockHash, changed: _Changes) -> None:
        """Make a block a resume point or none, by its runs; notes blocks that lead to one only now, or no longer."""
        is_point = all(self._runs[group].get(block, 0) >= need for group, need in self._needs.items())
        if is_point == (block in self._points):
            return
        if is_point:
            self._points.add(block)
        else:
            self._points.discard(block)
        if block not in self._ways:
            _note_change(changed, block, leads=is_point)
            (self._add_way if is_point else self._drop_way)(self._parents[block], changed)

    def _leads(self, block: BlockHash) -> bool:
        """Whether a block is a resume point, or has one behind it."""
        return block in self._points or block in self._ways

    def _add_way(self, block: BlockHash | None, changed: _Changes) -> None:
        """Count one more child that leads to a resume point; notes blocks that lead to one only now."""
        while block is not None:
            did_lead = self._leads(block)
            self._ways[block] = self._ways.get(block, 0) + 1
            if did_lead or block not in self._parents:
                return
            _note_change(changed, block, leads=True)
            block = self._parents[block]

    def _drop_way(self, block: BlockHash | None, changed: _Changes) -> None:
        """Count one child less that leads to a resume point; notes blocks that lead to none now."""
        while block is not None:
            self._ways[block] -= 1
            if self._ways[block]:
                return
            del self._ways[block]
            if block in self._points or block not in self._parents:
                return
            _note_change(changed, block, leads=False)
            block = self._parents[block]

    def _forget_child(self, parent: BlockHash, block: BlockHash) -> None:
        """Forget that a block stands behind another."""
        children = self._children[parent]
        children.remove(block)
        if not children:
            del self._children[parent]


def _note_change(changed: _Changes, block: BlockHash, *, leads: bool) -> None:
    """Note that a block leads to a resume point now, or no longer; forget what that takes back."""
    if changed.get(block, leads) == leads:
        changed[block] = leads
    else:
        del changed[block]
