"""`lorafleet apply` against a real orchestrator without workers, with the example of the documentation."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lorafleet.cli.changes.apply import line_of
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from tests.logs import no_logs
from tests.lorafleet.cli.conftest import CliResult, Run
from tests.serving import serving_in_thread

EXAMPLE = (Path(__file__).parents[4] / "docs" / "cli.md").read_text().partition("```yaml\n# fleet.yaml")[2]
EXAMPLE = "# fleet.yaml" + EXAMPLE.partition("```")[0]
Apply = Callable[..., CliResult]
Names = Callable[[str], set[str]]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an orchestrator without workers."""
    store = tmp_path_factory.mktemp("apply") / "store.db"
    with no_logs(), serving_in_thread(lambda: build(OrchestratorSettings(store=store)).app) as url:
        yield url


@pytest.fixture
def apply(run: Run, fleet: str, tmp_path: Path) -> Apply:
    """Write a file and apply it."""

    def apply_it(text: str | dict[str, Any], *flags: str) -> CliResult:
        file = tmp_path / "fleet.yaml"
        file.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
        return run("--orchestrator-url", fleet, "apply", "-f", str(file), *flags)

    return apply_it


@pytest.fixture
def names(run: Run, fleet: str) -> Names:
    """The names in a list of the fleet."""

    def names_of(group: str) -> set[str]:
        return set(run("--orchestrator-url", fleet, group, "list", "-o", "name").out.split())

    return names_of


def adapter(lora_id: str, **more: Any) -> dict[str, Any]:
    return {"lora_id": lora_id, "source": f"file:///srv/{lora_id}", "base_model": "tiny"} | more


def test_the_documented_example_is_shown_then_applied_and_a_second_run_changes_nothing(
    apply: Apply, run: Run, fleet: str, tmp_path: Path, names: Names
) -> None:
    shown = apply(EXAMPLE, "--dry-run")
    assert shown.status == 0, shown.err
    assert [line.split()[2] for line in shown.out.splitlines()[1:4]] == ["sql-expert/v1", "sql-expert/v2", "sql-expert"]
    assert "sql-expert/v1" not in names("adapters"), "a dry run changes nothing"
    done = apply(EXAMPLE)
    assert (done.status, "3 changes made" in done.out) == (0, True), done.err
    item = json.loads(run("--orchestrator-url", fleet, "adapters", "show", "sql-expert/v1", "--json").out)
    assert item["spec"]["source"] == str(tmp_path / "adapters/sql-expert/v1")
    assert (item["spec"]["policy"]["min_replicas"], item["spec"]["tenants"]) == (2, ["acme"])
    assert "sql-expert" in names("aliases")
    again = apply(EXAMPLE)
    assert (again.status, "nothing to do" in again.out) == (0, True), again.out


def test_a_field_that_is_left_out_stays_and_one_that_differs_changes(apply: Apply, run: Run, fleet: str) -> None:
    apply({"adapters": [adapter("keep/v1", policy={"priority": 3, "pinned": True}, tenants=["acme"])]})
    changed = apply({"adapters": [adapter("keep/v1", policy={"priority": 4})]})
    assert "priority=3" in changed.out
    assert "1 changes made" in changed.out
    item = json.loads(run("--orchestrator-url", fleet, "adapters", "show", "keep/v1", "--json").out)
    assert (item["spec"]["policy"]["priority"], item["spec"]["policy"]["pinned"], item["spec"]["tenants"]) == (
        4,
        True,
        ["acme"],
    )


def test_json_with_tabs_is_taken_and_its_fault_named(apply: Apply, names: Names) -> None:
    file = {"adapters": [adapter("tabs/v1")]}
    result = apply(json.dumps(file, indent="\t"))
    assert result.status == 0, result.err
    assert "tabs/v1" in names("adapters")
    file["adapters"][0]["policy"] = {"lodaing": "eager"}
    wrong = apply(json.dumps(file, indent="\t"))
    assert (wrong.status, "fleet.yaml: adapters.0.policy.lodaing: there is no such field" in wrong.err) == (2, True), (
        wrong
    )


def test_standard_input_is_read(run: Run, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"adapters": [adapter("stdin/v1")]})))
    assert run("--orchestrator-url", fleet, "apply", "-f", "-").status == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("adapters:\n  - lora_id: a/v1\n    source: file:///a\n    polcy: {}\n", ":4: adapters.0.polcy: there is no"),
        ("adapters:\n- lora_id: a/v1\n  source: s\n  policy:\n    lodaing: x\n", ":5: adapters.0.policy.lodaing"),
        ("policy:\n  loading: soon\n", ":2: policy.loading: Input should be"),
        ("aliases:\n  - name: x\n", ":2: aliases.0.targets: Field required"),
        ("adapters:\n- {lora_id: a/v1, source: s}\n- {lora_id: '', source: s}\n", ":3: adapters.1.lora_id"),
        ("adpaters: []\n", ":1: adpaters: there is no such field"),
        ("adapters: [\n", "line 2"),
        ("- a\n", "found a list"),
        ("policy: {loading: 2026-01-01}\n", "put dates and other text in quotes"),
        ("", "found nothing"),
        ("{}", "nothing to apply"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_files_line_and_field(
    apply: Apply, text: str, says: str, names: Names
) -> None:
    before = names("adapters")
    result = apply(text)
    assert result.status == 2, result.out
    assert says in result.err
    assert "fleet.yaml" in result.err or "cannot be sent" in result.err
    assert len(result.err.splitlines()) == 1
    assert names("adapters") == before


def test_a_name_that_is_written_twice_is_refused(apply: Apply) -> None:
    result = apply({"adapters": [adapter("twice/v1"), adapter("twice/v1")]})
    assert (result.status, "twice/v1" in result.err) == (2, True), result.err


def test_a_section_that_is_written_twice_deletes_nothing(apply: Apply, names: Names) -> None:
    apply({"adapters": [adapter("section/v1")]})
    before = names("adapters")
    again = yaml.safe_dump({"adapters": [adapter("section/v1")]}) + "adapters: []\n"
    result = apply(again, "--prune", "--yes")
    assert (result.status, "found the key 'adapters' twice" in result.err) == (2, True), result
    assert names("adapters") == before


def test_another_source_under_a_known_name_is_blocked_and_the_rest_is_done(apply: Apply, names: Names) -> None:
    apply({"adapters": [adapter("bytes/v1")]})
    file = {"adapters": [adapter("bytes/v1", source="file:///other"), adapter("bytes/v2")]}
    result = apply(file)
    assert result.status == 1
    assert "bytes/v1: its source is file:///srv/bytes/v1 here and file:///other in the file" in result.err
    assert "bytes/v2" in names("adapters")


def test_settings_of_a_name_that_nobody_has_published_are_blocked(apply: Apply) -> None:
    result = apply({"published": [{"name": "team/none", "keep_versions": 3}]})
    assert (result.status, "nothing is published under it" in result.err) == (1, True), result.err


def test_prune_asks_first_and_deletes_what_the_files_sections_do_not_have(apply: Apply, names: Names) -> None:
    apply({
        "adapters": [adapter("pruned/v1"), adapter("pruned/v2")],
        "aliases": [{"name": "pruned", "targets": [{"lora_id": "pruned/v1"}]}],
    })  # fmt: skip
    # Aliases of other tests would hold their adapters.
    file = {"adapters": [adapter("pruned/v1")]}
    assert "nothing to do" in apply(file).out, "without --prune nothing is deleted"
    asked = apply(file, "--prune")
    assert (asked.status, "--yes" in asked.err) == (2, True)
    assert "pruned/v2" in names("adapters")
    apply(file, "--prune", "--yes")
    assert names("aliases") >= {"pruned"}, "a section that the file lacks is kept"
    assert "pruned/v1" in names("adapters")
    shown = apply(file, "--prune", "--dry-run", "--json")
    assert "pruned/v2" not in [change["name"] for change in json.loads(shown.out)["changes"]]


def test_the_line_of_a_missing_field_is_that_of_its_parent() -> None:
    root = yaml.compose("a:\n  - b: 1\n    c:\n      d: 2\n", Loader=yaml.SafeLoader)
    found = [line_of(root, path.split(".")) for path in ("a", "a.0.b", "a.0.c.d", "a.0.c.x", "a.0.x", "z")]
    assert found == [1, 2, 4, 3, 2, 1]
