"""A decision in words, on a narrow terminal."""

import io

from rich.console import Console

from lorafleet.cli.decisions import explanations


def test_a_decision_fits_a_narrow_terminal_and_names_rejected_replicas() -> None:
    score = {"trust": "exact", "depth_blocks": 3, "cached_tokens": 48, "queue_s": 1.2345, "cost_s": 123.4567}
    answer = {
        "scores": [
            {"worker_id": "w0", "winner": False, "passed_over": True, **score},
            {"worker_id": "w1", "winner": True, "passed_over": False, **score},
        ],
        "rejected": [{"worker_id": f"w{n}", "reason": "draining"} for n in (3, 2)],
    }
    narrow = Console(width=20, force_terminal=True, color_system=None, file=io.StringIO())
    narrow.print(explanations.decision(answer), crop=False)
    text = narrow.file.getvalue()
    assert text.count("123.4567") == text.count("1.2345") == 2
    assert text.index("->") < text.index("x ")
    assert explanations.not_considered_lines(answer) == [
        "not considered: passed over (x), its adapter slots are all in use: w0",
        "not considered: draining: w2, w3",
    ]
