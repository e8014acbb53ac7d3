"""The line that the log has for each failed request, with who sent it, where it was and why; and the access log."""

import asyncio
import json

import pytest
from starlette.responses import JSONResponse, StreamingResponse
from structlog.testing import capture_logs

from lorafleet.identity import engine_name
from lorafleet.keys.key_files import hash_key
from lorafleet.telemetry.request_log import MOST_LINES
from tests.patience import patience
from tests.router.doubles import CHAT, DIGEST, EngineDouble, chunk, fleet, with_sql

SQL = CHAT | {"lora_id": "sql/v1"}
SQL_NAME = engine_name("sql/v1", DIGEST)


async def never(control, lora_id):
    await asyncio.Event().wait()


async def without_room(control, lora_id):
    found = {"lora_id": lora_id, "digest": None, "state": "registered", "ready": [], "loading": [], "expected_s": None}
    return JSONResponse({**found, "error": "no slot"})


async def refusing(engine, body):
    error = {"message": "your secret prompt is bad", "type": "BadRequestError", "code": 400}
    return JSONResponse({"error": error}, 400)


async def failing(engine, body):
    return JSONResponse({"error": {"message": "overloaded"}}, 503)


async def breaking(engine, body):
    async def pieces():
        yield chunk(body["model"], "one")
        raise RuntimeError("the engine dies")

    return StreamingResponse(pieces(), media_type="text/event-stream")


def failures(logs) -> list[dict]:
    return [line for line in logs if line["event"] in {"request failed", "stream broken"}]


def keyed(folder, **limits):
    path = folder / "keys.yaml"
    entry = {"sha256": hash_key("mine"), "tenant": "acme", "scopes": ["infer"], "limits": limits}
    path.write_text(json.dumps({"keys": [entry | ({} if limits else {"limits": None})]}))
    return {"key_files": (path,)}, {"authorization": "Bearer mine", "x-request-id": "night"}


CASES = {
    "adapter_loading": (SQL, never, None, {}, (503, SQL_NAME, "")),
    "no_capacity": (SQL, without_room, None, {}, (503, SQL_NAME, "")),
    "deadline_exceeded": (SQL, never, None, {"x-lorafleet-timeout-s": "0.05"}, (504, SQL_NAME, "")),
    "model_not_found": (CHAT | {"model": "nobody"}, None, None, {}, (404, "", "")),
    "invalid_request_body": (CHAT | {"extra_key": "x"}, None, None, {}, (400, "", "")),
    "no_replica": (CHAT, None, failing, {}, (503, "base", "w0")),
    "400": (CHAT, None, refusing, {}, (400, "base", "w0")),
}


@pytest.mark.parametrize("code", CASES)
async def test_a_failed_request_has_one_line_with_its_id_key_tenant_adapter_worker_and_cause(code, tmp_path):
    body, ensure, answer, headers, (status, adapter, worker) = CASES[code]
    control = with_sql()
    control.ensure = ensure
    settings, key = keyed(tmp_path)
    engine = EngineDouble("w0", answer) if answer else EngineDouble("w0")
    # Long enough for the orchestrator's answer, which the error after the wait repeats.
    waits = {"cold_start_timeout_s": patience(0.3), "failover_wait_s": 0.05, "tokenizer": "off"}
    async with fleet(engine, control=control, **waits, **settings) as (client, _, _):
        with capture_logs() as logs:
            got = await client.post("/v1/chat/completions", json=body, headers=key | headers)
    assert got.status_code == status
    (line,) = failures(logs)
    assert (line["request_id"], line["code"], line["status"]) == ("night", code, status)
    assert (line["key"], line["tenant"]) == (hash_key("mine")[:12], "acme")
    assert (line.get("adapter", ""), line.get("worker", "")) == (adapter, worker)
    assert line["cause"]
    assert "secret" not in line["cause"]
    assert 0 <= line["duration_s"] < patience(10)
    assert code in {"model_not_found", "invalid_request_body"} or "waited_s" in line
    assert line["log_level"] == ("warning" if status >= 500 else "info")


async def test_a_broken_stream_has_one_line():
    async with fleet(EngineDouble("w0", breaking), tokenizer="off") as (client, _, _):
        with capture_logs() as logs:
            answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    (line,) = failures(logs)
    assert (line["event"], line["code"], line["worker"]) == ("stream broken", "stream_broken", "w0")
    assert line["request_id"] == answer.headers["x-request-id"]


async def test_a_stream_that_its_engine_ends_with_an_error_has_one_line_without_the_prompt():
    async def erring(engine, body):
        error = {"message": "your secret prompt is bad", "type": "InternalServerError", "code": 500}
        said = [
            chunk(body["model"], "one"),
            b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n",
        ]
        return StreamingResponse(iter(said), media_type="text/event-stream")

    async with fleet(EngineDouble("w0", erring), tokenizer="off") as (client, _, _):
        with capture_logs() as logs:
            answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    (line,) = failures(logs)
    assert (line["event"], line["log_level"]) == ("request failed", "warning")
    assert (line["code"], line["status"], line["worker"]) == ("engine_error", 200, "w0")
    assert line["cause"] == "the engine ended its stream with an error (InternalServerError)"
    assert line["request_id"] == answer.headers["x-request-id"]


async def test_many_refusals_of_a_key_have_few_lines_and_their_count(tmp_path):
    settings, key = keyed(tmp_path, requests_per_minute=1)
    async with fleet(EngineDouble("w0"), tokenizer="off", **settings) as (client, _, parts):
        with capture_logs() as logs:
            for _ in range(MOST_LINES + 6):
                await client.post("/v1/chat/completions", json=CHAT, headers=key)
            parts.requests.flush()
    assert [line["code"] for line in failures(logs)] == ["rate_limited"] * MOST_LINES
    (omitted,) = [line for line in logs if line["event"] == "failed requests were not logged"]
    assert (omitted["code"], omitted["count"]) == ("rate_limited", 5)


async def test_a_request_that_is_refused_before_it_is_read_has_a_line():
    async with fleet(EngineDouble("w0"), tokenizer="off", max_body_bytes=1000) as (client, _, _):
        with capture_logs() as logs:
            answer = await client.post("/v1/chat/completions", json=CHAT | {"x": "y" * 2000})
    (line,) = failures(logs)
    assert (line["code"], line["request_id"]) == ("body_too_large", answer.headers["x-request-id"])
    assert (line["method"], line["path"]) == ("POST", "/v1/chat/completions")


async def test_success_is_logged_in_the_access_log_alone(monkeypatch, tmp_path):
    written = []
    monkeypatch.setattr("lorafleet.telemetry.request_log.unlogged_output", lambda _kind: Written(written))
    settings, key = keyed(tmp_path)
    engine = EngineDouble("w0")
    async with fleet(engine, control=with_sql("w0"), tokenizer="off", access_log="all", **settings) as (client, _, _):
        with capture_logs() as logs:
            assert (await client.post("/v1/chat/completions", json=SQL, headers=key)).status_code == 200
            assert (await client.get("/v1/models", headers=key)).status_code == 200
    assert not failures(logs)
    inference, models = (json.loads(line) for line in written)
    assert (inference["adapter"], inference["worker"], inference["status"]) == (SQL_NAME, "w0", 200)
    assert (inference["attempts"], inference["tenant"], inference["client"]) == (1, "acme", "127.0.0.1")
    assert inference["first_data_s"] <= inference["duration_s"]
    assert (models["path"], models["tenant"], models["key"]) == ("/v1/models", "acme", hash_key("mine")[:12])


class Written:
    """A writer of lines that keeps them."""

    def __init__(self, lines):
        self.write_bytes = lines.append
