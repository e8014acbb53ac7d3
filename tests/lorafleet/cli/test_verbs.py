"""What is the same for every resource: lists without rows, unknown names, and names that no URL may hold."""

import pytest

from tests.lorafleet.cli.conftest import Run


def test_an_unknown_adapter_gives_one_line_with_the_command_to_add_it(run: Run, orchestrator: str) -> None:
    result = run("--orchestrator-url", orchestrator, "adapters", "show", "nope")
    assert result.status == 1
    assert result.err.endswith("(lorafleet adapters add LORA_ID SOURCE)\n")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["aliases", "set", "sql", "sql/v1=nan"], "cannot be sent as JSON"),
        (["aliases", "set", "sql", "sql/\udcff"], "cannot be sent as JSON"),
        (["policy", "set", "loading=2026-01-01"], "put dates and other text in quotes"),
        (["adapters", "show", "sql/\udcff"], "'sql/\\udcff' is not UTF-8"),
        (["adapters", "rm", "../aliases/sql"], "../aliases/sql: no name has a '.' or '..'"),
        (["adapters", "show", ""], "expected a name, found an empty one"),
        (["published", "show", ""], "expected a name, found an empty one"),
        (["workers", "drain", ""], "expected a name, found an empty one"),
        (["workers", "cordon", ".."], "..: no name has a '.' or '..'"),
        (["rollout", "show", "x/../y"], "x/../y: no name has a '.' or '..'"),
    ],
)
def test_an_invalid_name_or_number_gives_one_line_and_is_not_sent(
    run: Run, orchestrator: str, args: list[str], says: str
) -> None:
    result = run("--orchestrator-url", orchestrator, *args)
    assert result.status == 2
    assert says in result.err
    assert len(result.err.splitlines()) == 1


def test_control_characters_in_names_are_escaped(ask: Run, run: Run, orchestrator: str) -> None:
    result = ask(
        "adapters", "add", "esc/v1", "file:///\x1b[31mred", "--tenant", "a\x1b]0;title\x07", "--tenant", "b\nc\u202ed"
    )
    shown = [
        result,
        ask("adapters", "list"),
        ask("adapters", "show", "esc/v1"),
        ask("history", "--kind", "adapter_registered"),
    ]
    wrong = run("--orchestrator-url", orchestrator, "adapters", "add", "esc/v1", "file:///\x1b[32mgreen")
    for text in [*(it.out for it in shown), wrong.err]:
        assert all(line.isprintable() for line in text.splitlines())
    assert r"\x1b[31mred" in shown[2].out
    assert r"a\x1b]0;title\x07, b\nc\u202ed" in shown[1].out
    assert wrong.status == 1
    ask("adapters", "rm", "esc/v1")


def test_an_empty_fleet_has_headings_and_no_rows(ask: Run) -> None:
    for command in (["workers", "list"], ["placements"]):
        assert len(ask(*command).out.splitlines()) == 1
    assert "0 of 0 workers ready" in ask("top").out


def test_an_unknown_worker_is_one_line(run: Run, orchestrator: str) -> None:
    result = run("--orchestrator-url", orchestrator, "workers", "cordon", "w9")
    assert result.status == 1
    assert "w9" in result.err
    assert len(result.err.splitlines()) == 1


def test_without_workers_there_are_no_orphans(ask: Run, run: Run, orchestrator: str) -> None:
    assert len(ask("orphans", "list").out.splitlines()) == 1
    assert ask("orphans", "adopt").out == "0 adopted\n"
    result = run("--orchestrator-url", orchestrator, "orphans", "adopt", "nobody/v1")
    assert result.status == 1
    assert "GET /v1/orphans" in result.out
