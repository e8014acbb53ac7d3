"""Each program's recorded conversation, sent to a fleet through its router: one suite for sim and for vLLM.

A subclass in a test file has the fixture `fleet`, whose adapter is ADAPTER, and says which routes its engines lack.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients import recording
from tests.clients.recording import RecordedCall
from tests.e2e.fleets import RunningFleet
from tests.patience import patience

ADAPTER = "sql-expert/v1"
# More tokens than a test needs, and than a tiny model's context has.
_MOST_TOKENS = 8
_LENGTHS = ("max_tokens", "max_output_tokens", "max_completion_tokens")
RECORDED = sorted(recording.FOLDER.glob("*.json"))


def small(body: Any, path: str) -> Any:
    """The body with a short answer, at temperature 0."""
    if not isinstance(body, dict) or path in ("/tokenize", "/detokenize", "/v1/embeddings"):
        return body
    short = {name: min(body[name], _MOST_TOKENS) for name in _LENGTHS if name in body}
    if not short:
        short = {"max_output_tokens" if path.endswith("/responses") else "max_tokens": _MOST_TOKENS}
    if "thinking" in body:  # its budget is above so few tokens
        short["thinking"] = {"type": "disabled"}
    return body | short


def events_of(answer: httpx.Response) -> list[Any]:
    """The events of a stream, with `[DONE]` as text."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def check_shape(call: RecordedCall, answer: httpx.Response) -> None:
    """The answer is whole, and of the form that clients of the route read."""
    is_stream = bool(call.body and call.body.get("stream"))
    found = events_of(answer) if is_stream else [answer.json()]
    last = found[-1]
    if call.path.endswith("/messages"):
        assert last["type"] == ("message_stop" if is_stream else "message")
    elif call.path.endswith("/responses"):
        assert (last["response"] if is_stream else last)["status"] in ("completed", "incomplete")
    elif is_stream:
        assert last == "[DONE]"
        assert any(event["choices"][0].get("finish_reason") for event in found[:-1] if event["choices"])
    elif call.path.endswith("/completions"):
        assert all(choice["finish_reason"] for choice in last["choices"])


def cached_tokens(call: RecordedCall, answer: httpx.Response) -> int | None:
    """What the engine says that it had cached; None: it does not say."""
    is_stream = bool(call.body and call.body.get("stream"))
    for event in events_of(answer) if is_stream else [answer.json()]:
        if not isinstance(event, dict):
            continue
        usage = (
            event.get("usage") or event.get("response", {}).get("usage") or event.get("message", {}).get("usage") or {}
        )
        for details in (usage.get("prompt_tokens_details"), usage.get("input_tokens_details")):
            if details and details.get("cached_tokens") is not None:
                return int(details["cached_tokens"])
        if usage.get("cache_read_input_tokens") is not None:
            return int(usage["cache_read_input_tokens"])
    return None


class ClientSuite:
    """Each test is one program."""

    lacking: frozenset[str] = frozenset()
    """Ends of paths that the fleet's engines do not serve."""
    echoes_logprobs = True
    """Whether the fleet's engines give the log-probabilities of a prompt, as lm-eval asks for them by `echo`."""

    @pytest.fixture
    def http(self, fleet: RunningFleet) -> Iterator[httpx.Client]:
        with httpx.Client(base_url=fleet.router, timeout=patience(60), trust_env=False, verify=False) as client:
            yield client

    @pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
    def test_a_programs_requests_are_answered_and_predicted(self, http: httpx.Client, path: Path) -> None:
        _, calls = recording.read(path)
        assert calls
        for call in (each.with_model(ADAPTER) for each in calls):
            where = f"{call.method} {call.path}"
            headers = {
                name: value for name, value in call.headers.items() if name not in ("authorization", "x-api-key")
            }
            ask = {"headers": headers, "json": small(call.body, call.path)} if call.body else {"headers": headers}
            if call.method in ("GET", "HEAD"):
                answer = http.request(call.method, call.path, headers=headers)
                assert answer.status_code == (404 if call.path == "/" else 200), (where, answer.text)
                continue
            first = http.request(call.method, call.path, **ask)
            refused = 404 if call.path.endswith(tuple(self.lacking)) else 0
            if not self.echoes_logprobs and call.body and call.body.get("echo"):
                refused = 400
            if refused:
                # Read, resolved and sent to an engine, which does not serve it.
                found = first.status_code, bool(first.headers.get("x-lorafleet-worker"))
                assert found == (refused, True), (where, first.text)
                continue
            assert first.status_code == 200, (where, first.text)
            check_shape(call, first)
            if call.path in ("/tokenize", "/detokenize"):
                continue
            assert first.headers["x-lorafleet-adapter"].startswith(f"{ADAPTER}@"), where
            again = http.request(call.method, call.path, **ask)
            assert again.status_code == 200, (where, again.text)
            said = cached_tokens(call, again)
            if said is not None:
                assert int(again.headers["x-lorafleet-cached-tokens"]) == said, where
