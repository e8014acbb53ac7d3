"""The blocks that lead to a resume point, compared with their definition over random prompts, groups and evictions."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lorafleet.identity import BlockHash
from lorafleet.kv.resume_points import ResumePoints
from tests.properties import examples

NEEDS = {0: 1, 2: 2}  # KV group -> kept blocks in a row that it needs
# A tree of prompts: a block's name is the prompt up to its end.
PROMPTS = ["abcd", "abxy", "m"]
NAMES = sorted({prompt[: end + 1] for prompt in PROMPTS for end in range(len(prompt))})
HASHES = {name: BlockHash(number) for number, name in enumerate(NAMES, 1)}
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)


class Device:
    """The sink: a block is added only where it is missing, and dropped only where it is present."""

    def __init__(self) -> None:
        self.blocks: set[BlockHash] = set()

    def add(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        assert tier == "device"
        assert len(set(hashes)) == len(hashes)
        assert self.blocks.isdisjoint(hashes)
        self.blocks.update(hashes)

    def drop(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        assert tier == "device"
        assert len(set(hashes)) == len(hashes)
        assert self.blocks.issuperset(hashes)
        self.blocks.difference_update(hashes)

    def clear(self) -> None:
        self.blocks.clear()


class ResumePointsMachine(RuleBasedStateMachine):
    """Holds the blocks and what each group keeps of them, and asks the definition at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.device = Device()
        self.points = ResumePoints(self.device)
        self.held: set[str] = set()
        self.kept: dict[int, set[str]] = {group: set() for group in NEEDS}
        for group, need in NEEDS.items():
            self.points.keep(group, need, [])

    @rule(prompt=st.sampled_from(PROMPTS), begin=st.integers(0, 2), count=st.integers(1, 4))
    def add(self, prompt: str, begin: int, count: int) -> None:
        chain = [prompt[: end + 1] for end in range(len(prompt))][begin : begin + count]
        self.points.link(HASHES[prompt[:begin]] if begin else None, [HASHES[name] for name in chain])
        new = [name for name in chain if name not in self.held]
        self.points.add("device", [HASHES[name] for name in new])
        self.held.update(new)

    @rule(dropped=names)
    def drop(self, dropped: list[str]) -> None:
        there = [name for name in dropped if name in self.held]
        self.points.drop("device", [HASHES[name] for name in there])
        self.held.difference_update(there)
        for kept in self.kept.values():
            kept.difference_update(there)

    @rule(group=st.sampled_from(list(NEEDS)), kept=names)
    def keep(self, group: int, kept: list[str]) -> None:
        self.points.keep(group, NEEDS[group], [HASHES[name] for name in kept])
        self.kept[group].update(self.held.intersection(kept))

    @rule(prompt=st.sampled_from(PROMPTS), end=st.integers(1, 4))
    def serve(self, prompt: str, end: int) -> None:
        self.add(prompt, 0, len(prompt))
        for group, need in NEEDS.items():
            self.keep(group, [prompt[: at + 1] for at in range(max(0, end - need), min(end, len(prompt)))])

    @rule(group=st.sampled_from(list(NEEDS)), lost=names)
    def lose(self, group: int, lost: list[str]) -> None:
        self.points.lose(group, [HASHES[name] for name in lost])
        self.kept[group].difference_update(lost)

    @rule(often=st.integers(0, 9))
    def clear(self, often: int) -> None:
        if not often:
            self.points.clear()
            self.held.clear()
            for kept in self.kept.values():
                kept.clear()

    def _is_point(self, name: str) -> bool:
        return name in self.held and all(
            all(name[: len(name) - back] in self.kept[group] for back in range(min(need, len(name))))
            for group, need in NEEDS.items()
        )

    def _leads(self, name: str) -> bool:
        """By blocks that are all there."""
        return name in self.held and (
            self._is_point(name) or any(self._leads(child) for child in NAMES if child[:-1] == name)
        )

    @invariant()
    def shown_blocks_are_those_of_the_definition(self) -> None:
        expected = {HASHES[name] for name in NAMES if self._leads(name)}
        assert self.device.blocks == expected
        assert set(self.points.blocks()) == expected


TestResumePoints = ResumePointsMachine.TestCase
TestResumePoints.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)


def test_a_block_that_returns_leads_again_to_the_point_behind_it() -> None:
    machine = ResumePointsMachine()
    machine.serve("abcd", 4)
    machine.drop(["ab"])
    machine.shown_blocks_are_those_of_the_definition()
    machine.add("abcd", 1, 1)
    machine.shown_blocks_are_those_of_the_definition()
    assert machine.device.blocks == {HASHES[name] for name in ("a", "ab", "abc", "abcd")}


def test_a_group_that_is_told_of_later_takes_back_the_points_that_lack_it() -> None:
    device = Device()
    points = ResumePoints(device)
    chain = [HASHES[name] for name in ("a", "ab", "abc")]
    points.link(None, chain)
    points.add("device", chain)
    points.keep(0, 1, [chain[0], chain[2]])
    assert device.blocks == set(chain)
    points.keep(1, 1, [chain[0]])
    assert device.blocks == {chain[0]}
    points.keep(1, 9, [chain[2]])  # a group needs what it needed first
    assert device.blocks == set(chain)
