"""`lorafleet plan`: what the orchestrator would do."""

import json

from tests.lorafleet.cli.conftest import Run


def test_a_plan_reports_adapters_without_a_place_and_changes_nothing(ask: Run, run: Run, orchestrator: str) -> None:
    before = ask("policy", "show").out
    assert ask("plan", "--policy", "reserve_slots=0").out == "0 loads, 0 unloads; 0 bytes; about 0.0 s\n"
    assert ask("policy", "show").out == before
    assert json.loads(ask("plan", "--policy", "loading=eager", "--json").out)["is_settled"]
    for words, says in (
        (["--without-worker", "w9"], "w9"),
        (["--demand", "nobody=x10"], "nobody"),
        (["--demand", "nobody"], "LORA_ID=x10"),
        (["--more-workers", "two"], "N:WORKER"),
        (["--policy", "lodaing=eager"], "lodaing"),
    ):
        result = run("--orchestrator-url", orchestrator, "plan", *words)
        assert result.status in (1, 2)
        assert says in result.err.splitlines()[-1]
