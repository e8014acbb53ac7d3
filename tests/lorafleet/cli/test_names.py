"""`lorafleet aliases` and `rollout`: where a name points, and how it moves."""

from pathlib import Path

from tests.lorafleet.cli.answers import answering, row_of
from tests.lorafleet.cli.conftest import Run


def test_an_alias_is_set_listed_and_removed(ask: Run) -> None:
    for version in ("v1", "v2"):
        ask("adapters", "add", f"law/{version}", f"file:///{version}")
    ask("aliases", "set", "law", "law/v1=9", "law/v2")
    assert "law/v1 (9), law/v2 (1)" in ask("aliases", "list").out
    ask("aliases", "rm", "law")
    assert "law/v1" not in ask("aliases", "list").out


def test_targets_of_an_alias_are_compared_side_by_side(run: Run) -> None:
    figures = {"requests": 100, "errors": 1, "refusals": 0, "first_token_s": {"p50": 0.1, "p95": 0.2}, "whole_s": {}}
    figures |= {"token_s": 0.01, "output_tokens": 900, "hit_real": 0.5, "cold_starts": 0, "waited_s": 0.0}
    rows = [
        {"lora_id": "sql/v1", "share": 0.9, "total": figures, "worse": ""},
        {"lora_id": "sql/v2", "share": 0.1, "total": None, "worse": "first token after 0.4 s on average"},
    ]
    with answering({"data": rows}) as url:
        result = run("--orchestrator-url", url, "aliases", "compare", "sql")
        assert run("--orchestrator-url", url, "aliases", "compare", "sql", "-o", "wide").status == 0
    assert row_of(result, "sql/v1")[:4] == ["sql/v1", "0.9000", "100", "1"]
    assert "first token after 0.4 s on average" in result.out


def test_a_rollout_is_started_shown_paused_and_aborted(ask: Run, run: Run, orchestrator: str, tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        ask("adapters", "add", f"moving/{version}", str(tmp_path / version))
    ask("aliases", "set", "moving", "moving/v1")
    result = ask("rollout", "start", "moving", "moving/v2", "--step", "0.25:600", "--step", "0.5").out
    assert result.startswith("moving -> moving/v2: ")
    assert "step 1 of 3" in result
    result = ask("rollout", "show", "moving").out
    assert "new: 0 requests ended, 0 errors" in result
    assert "paused" in ask("rollout", "pause", "moving").out
    assert "paused" not in ask("rollout", "resume", "moving").out
    assert "aborted" in ask("rollout", "abort", "moving").out
    again = run("--orchestrator-url", orchestrator, "rollout", "abort", "moving")
    assert again.status == 1
    assert "is over: aborted" in again.err
    wrong = run("--orchestrator-url", orchestrator, "rollout", "start", "moving", "moving/v2", "--step", "half")
    assert wrong.status == 2
    assert "0.1:600" in wrong.err
