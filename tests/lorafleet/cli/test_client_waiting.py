"""A command that waits for something long outlives a change of the leader."""

import io
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from lorafleet.cli.changes import record
from lorafleet.cli.client import NoAnswer, RestClient, RestError, read_patiently
from tests.lorafleet.cli.conftest import Run

_PROGRESS = {
    "to": [{"lora_id": "sql/v2"}], "state": "running", "paused": False, "step": 0, "steps": [{}], "weight": 0.1,
    "lacks": {}, "reason": "",
}  # fmt: skip
ROLLOUT = {"name": "sql", "spec": {"to": "sql/v2"}, "status": _PROGRESS}
DRAIN = {"phase": "moving", "moves": 1, "moved": 0, "left": ["a"], "left_bytes": 0, "requests": 0, "stuck": {},
         "expected_s": 1.0, "deadline_in_s": None}  # fmt: skip
_NOT_LEADER = httpx.Response(503, json={"error": {"message": "another one leads", "code": "not_leader"}})
_UNHEARD = httpx.Response(404, json={"error": {"message": "w0 has not registered", "code": "worker_not_found"}})
_FORBIDDEN = httpx.Response(403, json={"error": {"message": "this key may not", "code": "scope_missing"}})


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The server's answers in turn; an exception is a connection that breaks. Nobody waits between them."""

    def set_up(*answers: Any) -> None:
        left = iter(answers)

        def request(_self: httpx.Client, method: str, url: str, **_: object) -> httpx.Response:
            found = next(left)
            if isinstance(found, Exception):
                raise found
            response = found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)
            response.request = httpx.Request(method, f"http://orchestrator{url}")
            return response

        monkeypatch.setattr(httpx.Client, "request", request)

    monkeypatch.setattr(time, "sleep", lambda _s: None)
    return set_up


def test_a_rollout_is_waited_for_through_a_change_of_the_leader(run: Run, answer: Callable[..., None]) -> None:
    answer(ROLLOUT, httpx.ConnectError("refused"), _NOT_LEADER, ROLLOUT | {"status": _PROGRESS | {"state": "done"}})
    result = run("rollout", "start", "sql", "sql/v2", "--wait")
    assert (result.status, result.err) == (0, "")
    assert "sql/v2: done" in result.out


def test_a_drain_is_waited_for_through_a_change_of_the_leader(run: Run, answer: Callable[..., None]) -> None:
    worker = {"id": "w0", "state": "draining", "drain": DRAIN}
    done = worker | {"drain": DRAIN | {"phase": "drained", "left": [], "moved": 1}}
    answer(worker, httpx.ReadTimeout("timed out"), _NOT_LEADER, _UNHEARD, done)
    result = run("workers", "drain", "w0", "--wait")
    assert (result.status, result.err) == (0, "")


def test_files_are_waited_for_through_a_change_of_the_leader(
    answer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    answer(_NOT_LEADER, {"data": [{"lora_id": "a", "status": {"card": {"rank": 8}, "error": ""}}], "next": None})
    with RestClient("http://orchestrator") as api:
        record._wait_for_files(api, ["a"], 60.0)


@pytest.mark.parametrize(("error", "kind"), [(httpx.ConnectError("refused"), NoAnswer), (_NOT_LEADER, RestError)])
def test_a_server_that_stays_away_is_an_error_after_a_minute(
    answer: Callable[..., None], monkeypatch: pytest.MonkeyPatch, error: Any, kind: type[Exception]
) -> None:
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    answer(*[error] * 6)
    with RestClient("http://orchestrator") as api, pytest.raises(kind):
        read_patiently(lambda: api.call("GET", "/v1/workers/w0"))


def test_a_refusal_is_an_error_at_once(answer: Callable[..., None]) -> None:
    for refused, why in ((_FORBIDDEN, "this key may not"), (_UNHEARD, "has not registered")):
        answer(refused)
        with RestClient("http://orchestrator") as api, pytest.raises(RestError, match=why):
            read_patiently(lambda: api.call("GET", "/v1/workers/w0"))


def test_a_change_without_an_answer_may_still_happen_and_a_read_may_not(answer: Callable[..., None]) -> None:
    answer(httpx.ReadTimeout("timed out"), httpx.ReadTimeout("timed out"))
    with RestClient("http://orchestrator", timeout_s=30) as api:
        with pytest.raises(NoAnswer, match="no answer within 30 s; what it was asked for may still happen"):
            api.call("POST", "/v1/import", {})
        with pytest.raises(NoAnswer, match=r"no answer within 30 s$"):
            api.call("GET", "/v1/export")


def test_a_read_without_an_answer_says_where_to_look(run: Run, answer: Callable[..., None]) -> None:
    answer(httpx.ReadTimeout("timed out"))
    result = run("adapters", "list")
    assert result.status == 1
    assert "no answer within 30 s; is the fleet up? (lorafleet --orchestrator-url names another address)" in result.err
