"""`lorafleet workers drain` and `policy set`."""

from tests.lorafleet.cli.answers import READY_WORKERS, answering
from tests.lorafleet.cli.conftest import Run


def test_the_policy_is_shown_and_changed(ask: Run) -> None:
    assert "lazy" in ask("policy", "show").out
    assert "eager" in ask("policy", "set", "loading=eager", "reserve_slots=0").out
    assert "eager" in ask("policy", "show").out
    ask("policy", "set", "loading=lazy")


def test_an_unknown_policy_field_gives_one_line_with_its_name(run: Run, orchestrator: str) -> None:
    result = run("--orchestrator-url", orchestrator, "policy", "set", "lodaing=eager")
    assert result.status == 1
    assert "lodaing: there is no such field; known: loading, min_replicas" in result.err
    assert len(result.err.splitlines()) == 1
    planned = run("--orchestrator-url", orchestrator, "plan", "--policy", "lodaing=eager")
    assert "policy.lodaing: there is no such field; known: loading" in planned.err


def draining(phase: str, moved: int, *left: str, state: str = "draining", **more: object) -> dict[str, object]:
    """A worker with a drain of three adapters, as the orchestrator answers it."""
    drain = {"phase": phase, "moves": 3, "moved": moved, "left": left, "left_bytes": 30_000_000, "expected_s": 12.4}
    drain |= {"deadline_in_s": 54.6, "stuck": {}, "requests": 2} | more
    return READY_WORKERS[0] | {"id": "w0", "state": state, "drain": drain if state == "draining" else None}


def test_a_drain_shows_its_progress_and_its_deadline(run: Run) -> None:
    with answering(draining("moving", 1, "a", "b", stuck={"b": "rank"})) as url:
        result = run("--orchestrator-url", url, "workers", "drain", "w0")
        assert result.out == (
            "w0 is draining: 1 of 3 adapters moved, 30 MB left, about 12 s, at most 55 s, 1 fit nowhere now\n"
        )
        assert result.status == 0
    listing = {"data": [draining("moving", 1, "a", "b"), READY_WORKERS[1]], "next": None}
    with answering(listing) as url:
        assert "1 of 3 adapters moved" in run("--orchestrator-url", url, "workers", "list").out


def test_a_drain_that_is_waited_for_ends_when_the_worker_is_drained(run: Run) -> None:
    steps = [draining("moving", 2, "a"), draining("moving", 2, "a"), draining("finishing", 3), draining("drained", 3)]
    with answering(*steps) as url:
        result = run("--orchestrator-url", url, "workers", "drain", "w0", "--wait")
    assert [line.partition(": ")[2].partition(", ")[0] for line in result.out.splitlines()] == [
        "2 of 3 adapters moved",
        "3 of 3 adapters moved",
        "drained",
    ]
    assert result.status == 0
    with answering(draining("moving", 2, "a"), draining("drained", 2, "a")) as url:
        left = run("--orchestrator-url", url, "workers", "drain", "w0", "--wait")
    assert (left.status, "these adapters of w0 are ready nowhere else: a\n" in left.err) == (1, True)
    with answering(draining("moving", 2, "a"), draining("", 0, state="ready")) as url:
        back = run("--orchestrator-url", url, "workers", "drain", "w0", "--wait")
    assert (back.status, "w0 is ready: its drain was taken back" in back.err) == (1, True)


def test_an_unload_of_one_copy_says_what_it_is_and_can_be_waited_for(run: Run) -> None:
    there, gone = READY_WORKERS[1], READY_WORKERS[1] | {"adapters": ["legal/v2"], "kept_out": ["sql-expert/v1"]}
    with answering(there, gone) as url:
        result = run("--orchestrator-url", url, "workers", "unload", "w1", "sql-expert/v1", "--wait")
    assert result.out.splitlines() == [
        "sql-expert/v1 drains on w1, which keeps it out until `workers allow`",
        "sql-expert/v1 is not loaded on w1, which keeps it out until `workers allow`",
    ]
    with answering(gone) as url:
        assert "drains" not in run("--orchestrator-url", url, "workers", "unload", "w1", "sql-expert/v1").out
    with answering({"data": [gone], "next": None}) as url:
        assert "kept out" in run("--orchestrator-url", url, "workers", "list").out
    with answering(there) as url:
        allowed = run("--orchestrator-url", url, "workers", "allow", "w1", "sql-expert/v1")
    assert allowed.out == "sql-expert/v1 may be placed on w1 again\n"


def test_a_policy_changes_only_if_its_etag_matches(ask: Run, run: Run, orchestrator: str) -> None:
    tag = next(line.split()[1] for line in ask("policy", "show").out.splitlines() if line.startswith("etag"))
    ask("policy", "set", "min_residency_s=61", "--if-match", tag)
    result = run("--orchestrator-url", orchestrator, "policy", "set", "min_residency_s=62", "--if-match", tag)
    assert result.status == 1
    assert "read it again" in result.err
    changed = ask("history", "--kind", "policy_changed", "--limit", "1").out
    assert ", 61.0" in changed
