"""`lorafleet kv tree`: the lines of a tree, and what the command shows of two sim engines."""

import httpx
import pytest

from lorafleet.cli.decisions.kv_tree import tree_lines
from tests.e2e.fleets import running
from tests.lorafleet.cli.conftest import Run
from tests.patience import patience

QUESTION = "Which customers paid late? " * 40


def node(**changes):
    usual = {"block": "0" * 16, "depth": 0, "blocks": 1, "prompts": 1, "held_by": 1, "holders": ["w0"], "lower": []}
    return usual | {"children": [], "more": 0} | changes


def test_a_tree_is_drawn_with_its_branches_holders_and_what_is_left_out():
    answer = {
        "base_model": "m",
        "prompts": 3,
        "stored_blocks": {"16": 40},
        "roots": [
            {
                "adapter": "base",
                "block_size": 16,
                "prompts": 3,
                "more": 1,
                "children": [
                    node(
                        blocks=12,
                        prompts=2,
                        held_by=20,
                        children=[node(depth=12, held_by=0, holders=[], lower=["w1"]), node(depth=12, more=2)],
                    )
                ],
            }
        ],
    }
    assert "\n".join(tree_lines(answer)).splitlines() == [
        "m: 3 prompts; blocks in the index: 40 of 16 tokens",
        "base (3 prompts, blocks of 16 tokens)",
        "├─ 12 blocks from 0: on w0 and 19 more (2 prompts)",
        "│  ├─ 1 block from 12: on no device, below the device on w1 (1 prompt)",
        "│  └─ 1 block from 12: on w0 (1 prompt)",
        "│     └─ … 2 more",
        "└─ … 1 more",
    ]


@pytest.mark.fleet
def test_what_was_asked_of_two_engines_is_a_tree_with_adapters_as_roots(run: Run, tmp_path_factory):
    with running(tmp_path_factory.mktemp("fleet") / "state", "--engine", "sim", "--workers", "2") as fleet:
        for model, end in (("tiny-qwen", "?"), ("tiny-qwen", "!"), ("sql-expert/v1", "?")):
            answer = httpx.post(
                f"{fleet.router}/v1/completions",
                json={"model": model, "prompt": QUESTION + end * 200, "max_tokens": 2},
                timeout=patience(60),
                trust_env=False,
            )
            assert answer.status_code == 200, answer.text
        result = run("--router-url", fleet.router, "kv", "tree")
    assert result.status == 0, result.err
    lines = result.out.splitlines()
    roots = [line for line in lines if line.endswith("tokens)")]
    assert [root.partition("@")[0].partition(" ")[0] for root in roots] == ["base", "sql-expert/v1"]
    shared, *branches = [line.strip("│├└─ ") for line in lines[2 : lines.index(roots[1])]]
    assert shared.endswith("(2 prompts)")
    assert len(branches) >= 2
    assert all("(1 prompt)" in branch for branch in branches)
