"""`lorafleet explain`, `decisions`, `request` and `requests`, on a fleet of two sim engines."""

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from tests.e2e.fleets import running
from tests.lorafleet.cli.answers import answering, row_of
from tests.lorafleet.cli.conftest import CliResult, Run
from tests.patience import patience

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
    assert again | {"note": None} == one | {
        "engine_cached_tokens": None,
        "waited_s": 0.0,
        "first_data_s": None,
        "next_turn_s": None,
    }


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
