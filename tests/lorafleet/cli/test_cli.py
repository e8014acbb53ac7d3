"""The CLI against a real orchestrator without workers, and what decisions need against a fleet of two sim engines."""

import errno
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import yaml
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lorafleet.cli import main as cli
from lorafleet.cli import tables
from lorafleet.cli.decisions import explanations
from lorafleet.cli.resources import HISTORY, WORKERS
from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.key_files import hash_key
from lorafleet.local import demo
from lorafleet.service.http import HttpError
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from orchestrator.store.store import IntentStore
from tests.e2e.fleets import running
from tests.logs import no_logs
from tests.lorafleet.cli.conftest import CliResult, Run
from tests.patience import patience, wait_until
from tests.serving import serving_in_thread


@pytest.fixture(scope="module")
def orchestrator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = tmp_path_factory.mktemp("orchestrator") / "store.db"
    with no_logs(), serving_in_thread(lambda: build(OrchestratorSettings(store=store)).app) as url:
        yield url


@pytest.fixture
def ask(run: Run, orchestrator: str) -> Run:
    """`lorafleet ARGS` to that orchestrator; must succeed."""

    def ask_it(*args: str) -> CliResult:
        result = run("--orchestrator-url", orchestrator, *args)
        assert result.status == 0, result.err
        return result

    return ask_it


@pytest.mark.slow
def test_an_adapter_is_added_listed_shown_and_removed(ask: Run, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("")
    ask("adapters", "add", "sql/v1", str(tmp_path), "--base-model", "tiny", "--tenant", "acme", "--loading", "eager")
    row = next(line for line in ask("adapters", "list").out.splitlines() if line.startswith("sql/v1"))
    assert "acme" in row
    shown = ask("adapters", "show", "sql/v1").out
    assert str(tmp_path) in shown
    assert "loading=eager" in shown
    assert "adapters show sql/v1" in ask("adapters", "retry", "sql/v1").out
    ask("adapters", "rm", "sql/v1")
    wait_until(lambda: "sql/v1" not in ask("adapters", "list").out)


def test_adding_an_adapter_again_works_unless_its_source_differs(ask: Run, run: Run, orchestrator: str) -> None:
    ask("adapters", "add", "again/v1", "file:///a", "--base-model", "tiny")
    ask("adapters", "add", "again/v1", "file:///a", "--base-model", "tiny")
    result = run("--orchestrator-url", orchestrator, "adapters", "add", "again/v1", "file:///b")
    assert result.status == 1
    assert "new version" in result.err
    assert len(result.err.splitlines()) == 1
    result = run("--orchestrator-url", orchestrator, "adapters", "add", "again/v1", "file:///a", "--tenant", "acme")
    assert "PATCH /v1/adapters/again/v1 changes those (lorafleet adapters set LORA_ID)" in result.err


def test_only_named_fields_of_an_adapter_change(ask: Run) -> None:
    ask("adapters", "add", "set/v1", "file:///a", "--base-model", "tiny", "--min-replicas", "1", "--tenant", "acme")
    result = ask("adapters", "set", "set/v1", "priority=5", "pinned=true", "min-replicas=null").out
    assert re.search(r"priority +5\n", result)
    shown = ask("adapters", "show", "set/v1").out
    assert "loading=-, min_replicas=-, max_replicas=-, pinned=True, priority=5" in shown
    assert re.search(r"tenants +acme\n", shown)
    ask("adapters", "set", "set/v1", "--tenant", "globex", "--tenant", "acme")
    assert re.search(r"tenants +acme, globex\n", ask("adapters", "show", "set/v1").out)
    ask("adapters", "set", "set/v1", "--everyone")
    shown = ask("adapters", "show", "set/v1").out
    assert re.search(r"tenants +-\n", shown)
    assert "pinned=True, priority=5" in shown


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ([], 2, "nothing to change: name NAME=VALUE, --tenant or --everyone"),
        (["--tenant", "acme", "--everyone"], 2, "name one: --tenant, or --everyone"),
        (["priority"], 2, "`lorafleet adapters show LORA_ID` has the names"),
        (["lodaing=eager"], 1, "policy.lodaing: there is no such field; known: loading, min_replicas"),
        (["loading=soon"], 1, "policy.loading: Input should be 'lazy', 'eager' or 'weighted'"),
        (["min_replicas=2", "max_replicas=1"], 1, "min_replicas 2 is above max_replicas 1"),
    ],
)
def test_a_wrong_change_of_an_adapter_is_one_line_and_changes_nothing(
    ask: Run, run: Run, orchestrator: str, words: list[str], status: int, says: str
) -> None:
    ask("adapters", "add", "unset/v1", "file:///a", "--base-model", "tiny")
    before = ask("adapters", "show", "unset/v1").out
    result = run("--orchestrator-url", orchestrator, "adapters", "set", "unset/v1", *words)
    assert result.status == status
    assert says in result.err
    assert len(result.err.splitlines()) == 1
    assert ask("adapters", "show", "unset/v1").out == before


@pytest.mark.parametrize(
    "words",
    [
        ["adapters", "add", "x/v1", "file:///a", "--tenant", ""],
        ["adapters", "set", "x/v1", "--tenant", "acme", "--tenant", " "],
        ["adapters", "push", ".", "x/v1", "--tenant", ""],
        ["orphans", "adopt", "--tenant", ""],
        ["orphans", "adopt", "--tenant", "acme", "--everyone"],
    ],
)
def test_a_tenant_without_a_name_or_beside_everyone_is_refused(run: Run, words: list[str]) -> None:
    result = run("--orchestrator-url", "http://127.0.0.1:1", *words)
    assert result.status == 2
    assert "--tenant" in result.err
    assert len(result.err.splitlines()) == 1


def test_a_push_of_other_bytes_than_the_digest_is_not_to_be_repeated(run: Run, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    where = ("--orchestrator-url", "http://127.0.0.1:1")
    for words in (("x/v1", "--digest", "0" * 64), ("x/\udcff",)):
        result = run(*where, "adapters", "push", str(tmp_path), *words)
        assert result.status == 1
        assert "repeat the command" not in result.err
        assert len(result.err.splitlines()) == 1


def test_an_adapter_changes_only_if_its_etag_matches(ask: Run, run: Run, orchestrator: str) -> None:
    ask("adapters", "add", "seen/v1", "file:///a", "--base-model", "tiny")
    tag = next(line.split()[1] for line in ask("adapters", "show", "seen/v1").out.splitlines() if "etag" in line)
    ask("adapters", "set", "seen/v1", "priority=1", "--if-match", tag)
    result = run("--orchestrator-url", orchestrator, "adapters", "set", "seen/v1", "priority=2", "--if-match", tag)
    assert result.status == 1
    assert "read it again" in result.err


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


@contextmanager
def _answering(status: int, body: str) -> Iterator[str]:
    """The URL of a server that gives this one answer to every request."""

    async def answer(_request: Request) -> Response:
        return Response(body, status, headers={"location": "/elsewhere"})

    routes = [Route("/{path:path}", answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])]
    with serving_in_thread(lambda: Starlette(routes=routes)) as url:
        yield url


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, "<html>"),
        (200, '{"foo": 1}'),
        (200, "[1]"),
        (200, '{"data": 1}'),
        (200, '{"data": [1]}'),
        (200, '{"data": [{"object": "model"}]}'),
        (200, "[" * 100_000),
        (200, ""),
        (404, '{"error": {"message": "Not Found", "code": "not_found"}}'),
        (307, ""),
    ],
    ids=["html", "no data", "list", "number", "numbers", "other objects", "nested", "empty", "404", "redirect"],
)
def test_another_server_gives_one_line_that_names_the_flag(run: Run, status: int, answer: str) -> None:
    with _answering(status, answer) as url:
        result = run("--orchestrator-url", url, "adapters", "list")
    assert result.status == 1
    assert "/v1/adapters" in result.err
    assert result.err.endswith("? (lorafleet --orchestrator-url names another address)\n")
    assert "is it the right server" in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["adapters", "show", "a/v1"],
        ["adapters", "set", "a/v1", "priority=1"],
        ["aliases", "list"],
        ["aliases", "set", "name", "a/v1"],
        ["workers", "list"],
        ["workers", "drain", "w"],
        ["placements"],
        ["policy", "show"],
        ["published", "list"],
        ["published", "show", "name"],
        ["pauses", "list"],
        ["pauses", "end", "--tenant", "acme"],
        ["orphans", "list"],
        ["plan"],
        ["history"],
        ["rollout", "show", "name"],
        ["rollout", "start", "name", "a/v1"],
        ["decisions"],
        ["explain", "--model", "tiny", "hello"],
        ["export"],
        ["sync", "--from", "URL"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("answer", ['{"data": [{"object": "model"}]}', ""], ids=["list", "empty"])
def test_no_command_fails_with_a_traceback_at_another_server(run: Run, words: list[str], answer: str) -> None:
    with _answering(200, answer) as url:
        result = run("--orchestrator-url", url, "--router-url", url, *(url if w == "URL" else w for w in words))
    assert result.status in {0, 1}
    assert result.status == 0 or result.err.splitlines()[-1].startswith(f"lorafleet: {url}")


def test_an_unknown_history_kind_is_refused_with_the_known_ones(ask: Run, run: Run, orchestrator: str) -> None:
    result = run("--orchestrator-url", orchestrator, "history", "--kind", "nope")
    assert result.status == 1
    assert "'nope'" in result.err
    for kind in re.findall(r"[a-z_]+", result.err.partition("known: ")[2]):
        ask("history", "--kind", kind)
    assert "policy_changed" in result.err


def test_a_relative_folder_is_registered_by_its_whole_path(
    ask: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ask("adapters", "add", "here/v1", "./here")
    assert f"{tmp_path}/here" in ask("adapters", "show", "here/v1").out


def test_a_folder_of_another_machine_is_registered_with_a_note(run: Run, orchestrator: str, tmp_path: Path) -> None:
    result = run("--orchestrator-url", orchestrator, "adapters", "add", "elsewhere/v1", str(tmp_path / "nothing"))
    assert result.status == 0
    assert f"this machine has no folder {tmp_path / 'nothing'}" in result.err


def test_an_alias_is_set_listed_and_removed(ask: Run) -> None:
    for version in ("v1", "v2"):
        ask("adapters", "add", f"law/{version}", f"file:///{version}")
    ask("aliases", "set", "law", "law/v1=9", "law/v2")
    assert "law/v1 (9), law/v2 (1)" in ask("aliases", "list").out
    ask("aliases", "rm", "law")
    assert "law/v1" not in ask("aliases", "list").out


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


def test_an_empty_fleet_has_headings_and_no_rows(ask: Run) -> None:
    for command in (["workers", "list"], ["placements"]):
        assert len(ask(*command).out.splitlines()) == 1
    assert "0 of 0 workers ready" in ask("top").out


def test_a_worker_whose_pod_ends_differs_from_a_drained_one(capsys: pytest.CaptureFixture[str]) -> None:
    worker = {"base_model": "tiny", "adapters": [], "capacity": {}, "agent_url": "", "engine_url": ""}
    w0 = worker | {"id": "w0", "state": "draining", "zone": "eu-1a", "node": "n7", "is_terminating": True}
    w1 = worker | {"id": "w1", "state": "draining", "zone": "eu-1b", "node": "n8"}
    tables.show(tables.listing(WORKERS.view, [w0, w1]))
    rows = [re.split(" {2,}", line)[:4] for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["worker", "state", "zone", "node"],
        ["w0", "draining, pod ends", "eu-1a", "n7"],
        ["w1", "draining", "eu-1b", "n8"],
    ]


READY_WORKERS = [
    {"id": f"w{number}", "state": "ready", "zone": "", "node": "", "base_model": "tiny-qwen", "capacity": {}}
    | {"adapters": ["python-expert/v1", "sql-expert/v1", "legal/v2"][: number + 1]}
    | {"agent_url": f"http://127.0.0.1:3750{number}", "engine_url": f"http://127.0.0.1:3349{number}"}
    for number in range(3)
]


def printed(table: Table, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of a table on a terminal of this width."""
    out = io.StringIO()
    terminal = Console(file=out, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(tables, "console", lambda: terminal)
    tables.show(table)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", range(40, 160, 7))
def test_no_name_url_or_time_is_broken_at_any_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = "\n".join(printed(tables.listing(WORKERS.view, READY_WORKERS), width, monkeypatch))
    for worker in READY_WORKERS:
        for word in (worker["agent_url"], worker["engine_url"], *worker["adapters"]):
            assert word in seen
    entry = {"at": "2026-11-21T09:50:26.974+00:00", "kind": "load", "subject": "s", "actor": "", "body": {"why": "x y"}}
    assert any(
        line.startswith("2026-11-21 09:50:26.974")
        for line in printed(tables.listing(HISTORY, [entry]), width, monkeypatch)
    )


def test_a_row_too_wide_for_the_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(tables.listing(WORKERS.view, READY_WORKERS), 80, monkeypatch)
    assert len(lines) == 4
    assert [line for line in lines if line.endswith(" ")] == []


def test_a_row_is_broken_between_words_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(tables.fields({"policy": "loading=lazy, min_replicas=0, weight=1"}), 30, monkeypatch)
    assert lines == ["field   value", "policy  loading=lazy,", "        min_replicas=0,", "        weight=1"]


def test_a_field_that_lists_objects_has_a_row_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    item = {"name": "policy", "versions": [{"lora_id": "policy/v2"}, {"lora_id": "policy/v1"}], "workers": []}
    lines = printed(tables.fields(item), 60, monkeypatch)
    assert [line.split() for line in lines[2:4]] == [["versions", "lora_id=policy/v2"], ["lora_id=policy/v1"]]


def test_what_is_written_and_what_is_seen_have_the_paths_that_programs_use(monkeypatch: pytest.MonkeyPatch) -> None:
    item = {"name": "sql", "spec": {"replicas": 2}, "status": {"replicas": 1, "pending": None}}
    lines = [line.split() for line in printed(tables.fields(item), 60, monkeypatch)[1:]]
    assert lines == [["name", "sql"], ["spec.replicas", "2"], ["status.replicas", "1"], ["status.pending", "-"]]


def test_zone_and_node_are_columns_only_where_a_worker_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(*workers: dict[str, object]) -> set[str]:
        return {"zone", "node"} & set(printed(tables.listing(WORKERS.view, workers), 200, monkeypatch)[0].split())

    assert names(*READY_WORKERS) == set()
    refusing = READY_WORKERS[0] | {"refusal": "its KV connector"}
    assert "takes no adapters" not in "".join(printed(tables.listing(WORKERS.view, READY_WORKERS), 200, monkeypatch))
    lines = printed(tables.listing(WORKERS.view, [refusing, READY_WORKERS[1]]), 200, monkeypatch)
    assert lines[0].endswith("takes no adapters")
    assert [line.endswith("its KV connector") for line in lines[1:]] == [True, False]
    assert names(READY_WORKERS[0], READY_WORKERS[1] | {"zone": "eu-1a"}) == {"zone"}


@pytest.mark.parametrize(("width", "text"), [(80, False), (100, True), (140, True)])
def test_the_demo_shows_texts_only_if_they_fit(width: int, text: bool) -> None:
    out = io.StringIO()
    words = "local After traffic filename Their Coffee " * 3
    rows = [demo.DemoRow("python-expert/v1@73baeb0f6a1d", f"w{n}", 221, 192, 192, 1505.0, words) for n in range(4)]
    demo.show_table(rows, Console(file=out, width=width, force_terminal=True, color_system=None))
    seen = out.getvalue()
    for cell in ("worker", "first token", "cached", "w3", "192", "1505 ms", "python-expert/v1@73baeb0f6a1d"):
        assert cell in seen
    assert ("local After" in seen) == text
    assert max(map(len, seen.splitlines())) <= width


def test_an_unknown_worker_is_one_line(run: Run, orchestrator: str) -> None:
    result = run("--orchestrator-url", orchestrator, "workers", "cordon", "w9")
    assert result.status == 1
    assert "w9" in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize("args", [["adapters", "list"], ["explain", "hello"], ["decisions"], ["top"]])
def test_an_unreachable_server_gives_one_line_that_names_the_flag(run: Run, args: list[str]) -> None:
    away = "http://127.0.0.1:9"
    result = run("--orchestrator-url", away, "--router-url", away, *args)
    assert result.status == 1
    assert "-url" in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("flag", "words"), [("--orchestrator-url", ["adapters", "list"]), ("--router-url", ["decisions"])]
)
def test_an_invalid_address_gives_one_line_that_names_the_flag(run: Run, flag: str, words: list[str]) -> None:
    result = run(flag, "localhost:8080", *words)
    assert result.status == 2
    assert result.err == f"lorafleet: {flag} 'localhost:8080': must be an address, such as http://127.0.0.1:8080\n"
    result = run(flag, "http://me:hidden@localhost:8080", *words)
    assert result.status == 2
    assert (
        result.err
        == f"lorafleet: {flag} 'http://***@localhost:8080': must be an address, such as http://127.0.0.1:8080\n"
    )


def test_the_address_comes_from_the_environment(run: Run, orchestrator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAFLEET_URL_ORCHESTRATOR", orchestrator)
    assert run("workers", "list").status == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ["aliases", "set", "a", "b=heavy"],
        ["policy", "set", "loading"],
        ["policy", "set", "loading=2026-13-45"],
        ["policy", "set", "loading=[1"],
        ["policy", "set", "loading=" + "[" * 3000],
        ["up", "--engine", "tgi"],
        ["explain"],
        ["explain", "hello", "--policy", "kv_lora"],
        ["nonsense"],
    ],
)
def test_an_unknown_argument_has_status_2(run: Run, args: list[str]) -> None:
    assert run(*args).status == 2


def test_a_new_key_is_printed_once_and_the_file_holds_only_its_hash(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys" / "keys.yaml"
    first = run("keys", "new", "--tenant", "acme", "--scopes", "infer", "--file", str(path)).out.strip()
    second = run("keys", "new", "--scopes", "infer, admin", "--file", str(path)).out.strip()
    text = path.read_text()
    assert first not in text
    assert [entry["sha256"] for entry in yaml.safe_load(text)["keys"]] == [hash_key(first), hash_key(second)]
    keys = ApiKeys([path])
    assert keys.caller(f"Bearer {first}").tenant == "acme"
    assert not keys.caller(f"Bearer {first}").may("admin")
    assert keys.caller(f"Bearer {second}").may("admin")
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_that_is_not_a_key_file_is_not_changed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "notes.yaml"
    path.write_text("shopping: [milk]\n")
    result = run("keys", "new", "--file", str(path))
    assert result.status == 1
    assert path.read_text() == "shopping: [milk]\n"
    assert run("keys", "new", "--scopes", "root", "--file", str(tmp_path / "k")).status == 2
    assert not (tmp_path / "k").exists()


@pytest.mark.parametrize(
    ("scopes", "instead"),
    [
        ("admin", "tenant-admin"),
        ("infer,admin", "tenant-admin"),
        ("view,operate", "tenant-admin"),
        ("infer,load", "infer"),
        ("drain", "tenant-admin"),
        ("metrics", "tenant-admin"),
    ],
)
def test_a_tenants_key_gets_no_fleet_wide_scope(run: Run, tmp_path: Path, scopes: str, instead: str) -> None:
    path = tmp_path / "keys.yaml"
    result = run("keys", "new", "--tenant", "acme", "--scopes", scopes, "--file", str(path))
    assert result.status == 2
    assert f"--tenant acme --scopes {instead}, for a key of the tenant" in result.err
    assert f"--scopes {scopes} without --tenant" in result.err
    assert not path.exists()
    for words in (("--tenant", "acme", "--scopes", instead), ("--scopes", scopes)):
        assert run("keys", "new", *words, "--file", str(path)).status == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", ["keys", "new", "--file", "FILE"]),
        (b"[" * 100_000, ["import", "FILE", "--yes"]),
        (b"[" * 100_000, ["explain", "--replay", "FILE"]),
        (b"", ["plan", "--more-workers", "²"]),
    ],
)
def test_a_file_or_number_that_is_none_is_one_line(run: Run, tmp_path: Path, content: bytes, words: list[str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    result = run("--router-url", "http://127.0.0.1:1", *(str(file) if word == "FILE" else word for word in words))
    assert result.status in {1, 2}
    assert len(result.err.splitlines()) == 1
    assert file.read_bytes() == content


@pytest.mark.parametrize("flag", ["--tenant", "--namespace", "--lora-ids"])
@pytest.mark.parametrize("empty", ["", " "])
def test_a_restriction_of_a_key_without_its_value_makes_no_key(run: Run, tmp_path: Path, flag: str, empty: str) -> None:
    path = tmp_path / "keys.yaml"
    result = run("keys", "new", "--scopes", "view,register", flag, empty, "--file", str(path))
    assert (result.status, result.out) == (2, "")
    assert f"{flag}: expected" in result.err
    assert len(result.err.splitlines()) == 1
    assert not path.exists()


def test_a_tenants_administrator_needs_a_tenant(run: Run, tmp_path: Path) -> None:
    result = run("keys", "new", "--scopes", "tenant-admin", "--file", str(tmp_path / "keys.yaml"))
    assert result.status == 2
    assert "needs a tenant" in result.err


def ids_of(run: Run, path: Path) -> list[str]:
    return [item["key_id"] for item in json.loads(run("keys", "list", "--json", "--file", str(path)).out)["data"]]


def test_keys_are_listed_without_key_or_hash_and_revoked_by_their_id(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("# ours\nkeys: []\n")
    words = ("--tenant", "acme", "--scopes", "infer,view", "--expires", "90d", "--note", "CI")
    first = run("keys", "new", *words, "--tokens-per-minute", "9000", "--file", str(path)).out.strip()
    second = run("keys", "new", "--scopes", "operate", "--file", str(path)).out.strip()
    listed = run("keys", "list", "--file", str(path)).out
    for shown in ("acme", "infer, view", "CI", "tokens_per_minute 9000", "all tenants", "operate", "never"):
        assert shown in listed
    for hidden in (first, second, hash_key(first), hash_key(second)):
        assert hidden not in listed
    assert run("keys", "revoke", "no", "--file", str(path)).status == 1
    gone = run("keys", "revoke", hash_key(first)[:6], "--file", str(path))
    assert hash_key(first)[:12] in gone.out
    assert ids_of(run, path) == [hash_key(second)[:12]]
    assert path.read_text().startswith("# ours\n")
    unknown = run("keys", "revoke", hash_key(first)[:12], "--file", str(path))
    assert unknown.status == 1
    assert hash_key(second)[:12] in unknown.err


def test_a_rotated_key_and_its_successor_are_both_valid_for_the_grace_time(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    words = ("--tenant", "acme", "--scopes", "tenant-admin", "--requests-per-minute", "60")
    old = run("keys", "new", *words, "--file", str(path)).out.strip()
    rotated = run("keys", "rotate", hash_key(old)[:12], "--grace", "1h", "--file", str(path))
    new, now = rotated.out.strip(), time.time()
    assert "the old key is valid until" in rotated.err
    at = now
    keys = ApiKeys([path], wall=lambda: at)
    before, after = keys.caller(f"Bearer {old}"), keys.caller(f"Bearer {new}")
    assert (before.tenant, before.scopes, before.limits) == (after.tenant, after.scopes, after.limits)
    assert after.expires_at is None
    at = now + 3601
    assert keys.caller(f"Bearer {new}")
    with pytest.raises(HttpError, match="expired") as refused:
        keys.caller(f"Bearer {old}")
    assert (refused.value.status, refused.value.code) == (401, "expired_api_key")


@pytest.mark.parametrize(
    "expires", ["90", "1y", "2020-01-01T00:00:00Z", "tomorrow", "99999999d", "1000000w", "9999-12-31T23:00:00-05:00"]
)
def test_an_expiry_that_is_none_or_past_is_refused(run: Run, tmp_path: Path, expires: str) -> None:
    result = run("keys", "new", "--expires", expires, "--file", str(tmp_path / "keys.yaml"))
    assert result.status == 2
    assert f"--expires {expires}" in result.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["history", "--since", "1000000w"], "--since 1000000w: must be at most 36500d"),
        (["history", "--until", "99999999h"], "--until 99999999h: expected a number"),
        (["keys", "rotate", "abcd", "--file", "k", "--grace", "1000000w"], "--grace 1000000w: must be at most 36500d"),
    ],
)
def test_a_duration_beyond_the_calendar_is_one_line(run: Run, words: list[str], says: str) -> None:
    result = run("--orchestrator-url", "http://127.0.0.1:1", *words)
    assert result.status == 2
    assert says in result.err
    assert len(result.err.splitlines()) == 1


PAGE = Path(cli.__file__).parents[2] / "docs" / "cli.md"
QUESTION = "Which customers paid late? " * 40


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router that has decided four requests: base, base again, an adapter, and the base once more."""
    with running(tmp_path_factory.mktemp("fleet") / "state", "--engine", "sim", "--workers", "2") as fleet:
        for number, model in enumerate(("tiny-qwen", "tiny-qwen", "sql-expert/v1", "tiny-qwen")):
            answer = httpx.post(
                f"{fleet.router}/v1/chat/completions",
                headers={"x-request-id": f"request-{number}"},
                json={"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2},
                timeout=patience(60),
                trust_env=False,
            )
            assert answer.status_code == 200, answer.text
        yield fleet.router


@pytest.fixture
def routed(run: Run, router: str) -> Run:
    """`lorafleet ARGS` to that router; must succeed."""

    def ask_it(*args: str) -> CliResult:
        result = run("--router-url", router, *args)
        assert result.status == 0, result.err
        return result

    return ask_it


def row_of(result: CliResult, word: str) -> list[str]:
    return next(line for line in result.out.splitlines() if word in line).split()


def draining(phase: str, moved: int, *left: str, state: str = "draining", **more: object) -> dict[str, object]:
    """A worker with a drain of three adapters, as the orchestrator answers it."""
    drain = {"phase": phase, "moves": 3, "moved": moved, "left": left, "left_bytes": 30_000_000, "expected_s": 12.4}
    drain |= {"deadline_in_s": 54.6, "stuck": {}, "requests": 2} | more
    return READY_WORKERS[0] | {"id": "w0", "state": state, "drain": drain if state == "draining" else None}


@contextmanager
def answering(*answers: dict[str, object]) -> Iterator[str]:
    """A server that gives these answers in turn, the last one for ever; yields its URL."""
    waiting = list(answers)

    class WorkerHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(waiting.pop(0) if len(waiting) > 1 else waiting[0]).encode()
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815  (the base's name)

    with HTTPServer(("127.0.0.1", 0), WorkerHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


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


@pytest.mark.fleet
def test_the_last_decisions_are_listed_newest_first_with_the_engines_own_count(routed: Run) -> None:
    result = routed("decisions")
    assert [line.split()[-1] for line in result.out.splitlines()[1:]] == [f"request-{n}" for n in (3, 2, 1, 0)]
    *_, predicted, engines, trust, _, _, _ = row_of(result, "request-1")
    assert predicted == engines != "0"
    assert trust == "exact"


def test_decisions_of_a_silent_router_process_are_reported_missing(run: Run) -> None:
    class PartialAnswerHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [], "next": None, "missing": [1, 3]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer(("127.0.0.1", 0), PartialAnswerHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        result = run("--router-url", url, "decisions")
        assert (result.status, "slot 1, 3 did not answer in time" in result.err) == (0, True)
        assert "a process of this router did not answer" in run("--router-url", url, "decisions", "request-1").err
        server.shutdown()


@pytest.mark.fleet
def test_decisions_are_found_by_adapter_and_by_number(routed: Run) -> None:
    assert len(routed("decisions", "--adapter", "sql-expert/v1").out.splitlines()) == 2
    assert len(routed("decisions", "--adapter", "base", "--limit", "2").out.splitlines()) == 3
    assert len(routed("decisions", "--worker", "w9").out.splitlines()) == 1


@pytest.mark.fleet
def test_one_decision_is_shown_in_full_by_its_request(routed: Run, run: Run, router: str) -> None:
    result = routed("decisions", "request-2")
    assert result.out.startswith("sql-expert/v1@")
    assert "by kv_lora" in result.out
    assert "the engine had 0 tokens cached" in result.out
    assert "adapter not resident" in result.out
    missing = run("--router-url", router, "decisions", "request-9")
    assert missing.status == 1
    assert "request-9" in missing.err


@pytest.mark.fleet
def test_one_request_says_what_became_of_it_and_where_its_seconds_went(routed: Run, run: Run, router: str) -> None:
    result = routed("request", "request-2")
    assert row_of(result, "answer")[1:] == ["200"]
    assert row_of(result, "asked")[-1] == "sql-expert/v1"
    assert "seconds: first data" in result.out
    assert "by kv_lora" in result.out
    whole = json.loads(routed("request", "request-2", "-o", "json").out)["data"][0]
    assert sum(whole["stages"].values()) == pytest.approx(whole["duration_s"], abs=1e-3)
    missing = run("--router-url", router, "request", "request-9")
    assert missing.status == 1
    assert "no router" in missing.err


_REFUSED = {
    "request_id": "one",
    "at": "2026-11-28T09:51:40.112Z",
    "status": 429,
    "code": "rate_limited",
    "worker": "",
    "limit": "concurrent_requests",
    "tenant": "acme",
    "key": "2c26b46b68ff",
    "adapter": "",
    "duration_s": 0.0004,
    "cause": "this API key has a limit",
    "next_step": "raise limits.concurrent_requests",
    "note": "batch jobs",
    "asked": "sql/v1",
    "attempts": 0,
    "stages": {"hold": 0.2, "queue": 0.1},
    "held_for": "its adapter",
    "queued_for": "room at worker w0",
    "first_data_s": None,
    "decisions": [],
}


def test_a_refused_request_is_shown_with_its_limit_key_and_causes(run: Run) -> None:
    with answering({"data": [_REFUSED], "missing": ["r1"]}) as url:
        story = run("--router-url", url, "request", "one")
        listed = run("--orchestrator-url", url, "requests", "--status", "failed")
    assert row_of(story, "limit ")[1:] == ["concurrent_requests"]
    assert row_of(story, "(batch jobs)")[1] == "2c26b46b68ff"
    assert row_of(story, "hold")[-4:] == ["0.2000", "for", "its", "adapter"]
    assert row_of(story, "queue")[-4:] == ["room", "at", "worker", "w0"]
    assert row_of(listed, "429")[2:6] == ["429", "rate_limited", "concurrent_requests", "acme"]
    assert "r1" in listed.err


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


@pytest.mark.fleet
def test_explain_shows_every_term_the_trust_and_the_cached_blocks_of_every_worker(routed: Run) -> None:
    result = routed("explain", QUESTION)
    assert "by kv_lora" in result.out.splitlines()[0]
    for heading in ("trust", "cached blocks", "prefill s", "adapter s", "slot s", "queue s", "harm s", "cost s"):
        assert heading in result.out.splitlines()[1]
    winner = row_of(result, "->")
    assert winner[2] == "exact"
    assert int(winner[3]) * 32 == int(winner[4]) > 0
    assert {"w0", "w1"} <= set(result.out.split())


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


@pytest.mark.fleet
def test_explain_says_what_a_request_for_a_cold_adapter_would_do(routed: Run) -> None:
    result = routed("explain", "hello", "--model", "legal/v2")
    assert "no worker" in result.out
    assert result.out.count("adapter not resident") >= 2
    assert "would wait for a load" in result.out


@pytest.mark.fleet
def test_replayed_decisions_equal_the_recorded_ones(
    routed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = routed("decisions", "--json").out
    file = tmp_path / "decisions.json"
    file.write_text(kept)
    assert "4 of 4 as before" in routed("explain", "--replay", str(file)).out
    monkeypatch.setattr(sys, "stdin", io.StringIO(kept))
    assert "4 of 4 as before" in routed("explain", "--replay", "-").out
    one = json.loads(kept)["data"][0]
    file.write_text(json.dumps(one))
    again = json.loads(routed("explain", "--replay", str(file), "--json").out)["data"][0]
    assert again | {"note": None} == one | {"engine_cached_tokens": None, "waited_s": 0.0, "first_data_s": None}


@pytest.mark.fleet
def test_a_bare_record_is_replayed_and_a_changed_one_differs(
    routed: Run, run: Run, router: str, tmp_path: Path
) -> None:
    one = json.loads(routed("decisions", "request-3", "--json").out)["data"][0]
    file = tmp_path / "record.json"
    file.write_text(json.dumps(one["record"]))
    assert f"base on {one['worker_id']} by kv_lora" in routed("explain", "--replay", str(file)).out
    for replica in one["record"]["replicas"]:
        replica["state"] = "draining" if replica["id"] == one["worker_id"] else "ready"
    file.write_text(json.dumps(one))
    result = run("--router-url", router, "explain", "--replay", str(file))
    assert result.status == 1
    assert "1 of 1 differ from the record" in result.err
    assert "draining" in result.out


@pytest.mark.fleet
def test_decisions_can_be_replayed_with_another_policy(routed: Run, run: Run, router: str, tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text(routed("decisions", "--limit", "1", "--json").out)
    assert "by least_loaded" in routed("explain", "--replay", str(file), "--policy", "least_loaded").out
    result = run("--router-url", router, "explain", "--replay", str(file), "--policy", "luck")
    assert result.status == 1
    assert "kv_lora, least_loaded, prefix_hash, round_robin, session" in result.err


@pytest.mark.fleet
@pytest.mark.parametrize(
    "text",
    ["[1", "[]x", "{}", "[7]", '{"record": 3}', '{"record": {"policy": []}}', '{"record": {"policy": "kv_lora"}}'],
)
def test_an_invalid_record_gives_one_line(run: Run, router: str, tmp_path: Path, text: str) -> None:
    file = tmp_path / "no.json"
    file.write_text(text)
    result = run("--router-url", router, "explain", "--replay", str(file))
    assert result.status == 1
    assert len(result.err.splitlines()) == 1


@pytest.mark.fleet
def test_a_record_with_a_missing_part_is_a_400_with_the_expected_form(routed: Run, router: str) -> None:
    one = json.loads(routed("decisions", "request-3", "--json").out)["data"][0]["record"]
    broken = [
        {name: value for name, value in one.items() if name != gone} for gone in ("policy", "ask", "replicas", "loads")
    ]
    broken += [one | {name: value} for name in one for value in (None, 7, "x", [1], {"x": 1}, [{"id": 7}])]
    with httpx.Client(base_url=router, trust_env=False) as client:
        statuses = set()
        for record in broken:
            answer = client.post("/v1/decisions/replay", json={"record": record})
            statuses.add(answer.status_code)
            if answer.status_code == 400:
                assert answer.json()["error"]["code"] in ("invalid_request_body", "invalid_request")
    assert statuses <= {200, 400}
    assert 400 in statuses


@pytest.mark.parametrize("words", [["keys", "list"], ["keys", "list", "--json"], ["keys", "new"]], ids=" ".join)
def test_output_to_a_full_disk_is_one_line(run: Run, tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "keys.yaml"
    assert run("keys", "new", "--file", str(path)).status == 0
    command = [sys.executable, "-P", "-m", "lorafleet", *words, "--file", str(path)]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=patience(30)
        )
    assert ended.returncode == 1
    assert ended.stderr == ("lorafleet: the output cannot be written: [Errno 28] No space left on device; make room\n")


def test_streams_that_the_caller_has_closed_are_as_good_as_unread_ones() -> None:
    """Progress and questions ask a stream whether it is a terminal. A closed one was an error without a message."""
    code = (
        "import os, sys, lorafleet.cli.main as cli\n"
        "cli.app = lambda: print(sys.stdin.isatty(), sys.stderr.isatty(), os.readlink('/proc/self/fd/2'))\n"
        "cli.main()\n"
    )
    command = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=patience(30))
    assert answer.stdout == f"False False {os.devnull}\n"


def test_help_imports_nothing_heavy() -> None:
    heavy = "httpx fastapi numpy uvicorn aiohttp tokenizers rich.table"
    code = f"import sys, lorafleet.cli.main; print([m for m in '{heavy}'.split() if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def commands(command: Any, *words: str) -> Iterator[list[str]]:
    """The words of every command that has none below it."""
    if below := getattr(command, "commands", None):
        for name, one in below.items():
            yield from commands(one, *words, name)
    else:
        yield [*words]


WORDS = list(commands(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_every_command_explains_itself_with_an_example(run: Run, words: list[str]) -> None:
    result = run(*words, "--help")
    assert result.status == 0
    assert f"lorafleet {' '.join(words)}" in result.out.partition("Example")[2]


def test_the_page_about_the_command_line_has_every_command() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for group, *rest in WORDS:
        mine = [row for row in rows if row.startswith(f"| `{group}")]
        assert any(re.search(rf"`([a-z]+ )?{word}\b", row) for word in rest or [group] for row in mine), (group, rest)


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


def test_a_policy_changes_only_if_its_etag_matches(ask: Run, run: Run, orchestrator: str) -> None:
    tag = next(line.split()[1] for line in ask("policy", "show").out.splitlines() if line.startswith("etag"))
    ask("policy", "set", "min_residency_s=61", "--if-match", tag)
    result = run("--orchestrator-url", orchestrator, "policy", "set", "min_residency_s=62", "--if-match", tag)
    assert result.status == 1
    assert "read it again" in result.err
    changed = ask("history", "--kind", "policy_changed", "--limit", "1").out
    assert ", 61.0" in changed


def test_an_orchestrator_starts_on_a_backup(ask: Run, run: Run, orchestrator: str, tmp_path: Path) -> None:
    ask("adapters", "add", "kept/v1", "file:///kept", "--base-model", "tiny")
    file = tmp_path / "backup.db"
    assert "bytes" in ask("backup", str(file)).out
    result = run("--orchestrator-url", orchestrator, "backup", str(file))
    assert result.status == 1
    assert "new file" in result.err
    store = IntentStore(file)
    assert "kept/v1" in store.adapters
    store.close()


def test_a_backup_on_a_full_disk_leaves_no_file(
    ask: Run, run: Run, orchestrator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "backup.db"

    def no_space(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        result = run("--orchestrator-url", orchestrator, "backup", str(file))
    assert (result.status, result.err) == (1, f"lorafleet: {file}: no space left in {tmp_path}: make room\n")
    assert list(tmp_path.iterdir()) == []
    assert "bytes" in ask("backup", str(file)).out


def test_without_workers_there_are_no_orphans(ask: Run, run: Run, orchestrator: str) -> None:
    assert len(ask("orphans", "list").out.splitlines()) == 1
    assert ask("orphans", "adopt").out == "0 adopted\n"
    result = run("--orchestrator-url", orchestrator, "orphans", "adopt", "nobody/v1")
    assert result.status == 1
    assert "GET /v1/orphans" in result.out
