"""The console's questions reach routers that nobody can reach: they fetch them at the orchestrator and post answers."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from starlette.responses import StreamingResponse

from lorafleet.keys.key_files import hash_key
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from orchestrator.model.questions import RouterQuestion, RouterReply
from orchestrator.traffic.questions import LISTENING_S, RouterMailbox
from router.api.questions import answer_questions, reply_to
from tests.patience import patience, until
from tests.router.doubles import CHAT, EngineDouble, chunk, fleet, with_sql
from tests.serving import client_of, serving

SQL = {**CHAT, "lora_id": "sql/v1"}


@pytest.fixture
async def relayed(tmp_path):
    """(client of an orchestrator, parts of a router that answers its questions, client of the router)."""
    orchestrator = build(OrchestratorSettings(store=tmp_path / "store.db", settle_s=0))
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(orchestrator.app))
        router, _, parts = await stack.enter_async_context(fleet(EngineDouble("w0"), control=with_sql("w0")))
        control = await stack.enter_async_context(client_of())
        answering = asyncio.create_task(answer_questions(control, url, "r0", parts))
        reader = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=patience(20)))
        await until(orchestrator.mailbox.listening)
        yield reader, parts, router
        orchestrator.stop()
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)


async def test_decisions_of_a_router_are_read_at_the_orchestrator(relayed):
    reader, _, router = relayed
    await router.post("/v1/chat/completions", json=SQL)
    await router.post("/v1/chat/completions", json=CHAT)
    listed = (await reader.get("/v1/decisions")).json()
    assert [item["worker_id"] for item in listed["data"]] == ["w0", "w0"]
    assert listed["missing"] == []
    assert all("record" not in item for item in listed["data"]), "records are large, and a list needs none"
    (only,) = (await reader.get("/v1/decisions", params={"adapter": "sql/v1"})).json()["data"]
    assert only["adapter"].startswith("sql/v1@")
    (whole,) = (await reader.get("/v1/decisions", params={"request": only["request_id"]})).json()["data"]
    body = {"record": whole["record"], "policy": "round_robin"}
    again = (await reader.post("/v1/decisions/replay", json=body)).json()
    assert (again["worker_id"], again["policy"]) == ("w0", "round_robin")


async def test_a_request_is_explained_and_sent_nowhere(relayed):
    reader, parts, _ = relayed
    answer = (await reader.post("/v1/route", json=SQL)).json()
    assert (answer["worker_id"], answer["scores"][0]["winner"]) == ("w0", True)
    assert not parts.decisions


async def test_what_is_wrong_with_a_question_is_said_as_the_router_says_it(relayed):
    reader, _, _ = relayed
    for path, body, status, code in (
        ("/v1/route", CHAT | {"model": "unknown"}, 404, "model_not_found"),
        ("/v1/decisions/replay", {"record": {}, "policy": "none"}, 400, "invalid_request_body"),
        ("/v1/decisions/replay", {}, 400, "invalid_request_body"),
    ):
        answer = await reader.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


async def test_without_a_router_the_answer_says_where_decisions_are(tmp_path):
    orchestrator = build(OrchestratorSettings(store=tmp_path / "store.db", settle_s=0))
    async with serving(orchestrator.app) as url, client_of(url) as reader:
        answer = await reader.get("/v1/decisions")
        orchestrator.stop()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_router")


async def test_an_unexpected_error_is_an_answer_too():
    without_services: Any = None
    reply = await reply_to(without_services, "r0", RouterQuestion(id="1", kind="decisions"))
    assert (reply.status, reply.body["error"]["code"]) == (500, "internal_error")


async def test_a_router_that_does_not_answer_is_waited_for_no_longer_than_allowed():
    mailbox = RouterMailbox()
    fetching = asyncio.create_task(mailbox.fetch("r0", patience(20)))
    await asyncio.sleep(0)
    assert await mailbox.ask("r0", "decisions", {}, tenant=None, within_s=0.01) is None
    (question,) = await fetching
    mailbox.answer(RouterReply(router_id="r0", id=question.id))  # too late: dropped
    assert mailbox.listening() == ["r0"]


async def test_questions_that_nobody_fetches_are_bounded_and_silent_routers_forgotten():
    now = 0.0
    mailbox = RouterMailbox(clock=lambda: now)
    assert await mailbox.fetch("r0", 0.0) == ()
    asking = [
        asyncio.create_task(mailbox.ask("r0", "decisions", {"n": n}, tenant=None, within_s=patience(20)))
        for n in range(150)
    ]
    await asyncio.sleep(0)
    questions = await mailbox.fetch("r0", 0.0)
    assert [question.body["n"] for question in questions] == list(range(50, 150))
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    now = LISTENING_S + 1
    assert mailbox.listening() == []


async def test_a_closed_mailbox_answers_at_once():
    mailbox = RouterMailbox()
    fetching = asyncio.create_task(mailbox.fetch("r0", 600.0))
    await asyncio.sleep(0)
    mailbox.close()
    assert await fetching == ()
    assert await mailbox.fetch("r0", 600.0) == ()


async def chatting(engine, body):
    async def pieces():
        yield chunk(body["model"], "SELECT ")
        yield chunk(body["model"], "1")
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        whole = {"id": "1", "model": body["model"], "choices": [], "usage": usage}
        yield b"data: " + json.dumps(whole).encode() + b"\n\ndata: [DONE]\n\n"

    return StreamingResponse(pieces(), media_type="text/event-stream")


@pytest.fixture
async def asked(tmp_path):
    """(reader of an orchestrator, engine, parts of the router), all with the same keys."""
    path = tmp_path / "keys.yaml"
    entries = [
        {"sha256": hash_key("acme"), "tenant": "acme", "scopes": ["infer"], "limits": {"requests_per_minute": 3}},
        {"sha256": hash_key("viewer"), "scopes": ["view"]},
        {"sha256": hash_key("router"), "scopes": ["load", "infer", "view"]},
    ]
    path.write_text(json.dumps({"keys": entries}))
    orchestrator = build(OrchestratorSettings(store=tmp_path / "store.db", settle_s=0, key_files=(path,)))
    engine, control = EngineDouble("w0", chatting), with_sql("w0")
    control.add_adapter("secret/v1", on=["w0"], tenants=("rival",))
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(orchestrator.app))
        settings = {"tokenizer": "off", "key_files": (path,)}
        _, _, parts = await stack.enter_async_context(fleet(engine, control=control, **settings))
        caller = await stack.enter_async_context(client_of())
        caller.headers["authorization"] = "Bearer router"
        answering = asyncio.create_task(answer_questions(caller, url, "r0", parts))
        reader = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=patience(20)))
        reader.headers["authorization"] = "Bearer acme"
        await until(orchestrator.mailbox.listening)
        yield reader, engine, parts
        orchestrator.stop()
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)


async def test_a_prompt_is_answered_by_each_model_as_a_request_of_the_persons_own_key(asked):
    reader, engine, parts = asked
    body = {"models": ["sql/v1", "tiny-qwen"], "prompt": "How many?", "max_tokens": 9}
    answer = await reader.post("/v1/ask", json=body)
    assert answer.status_code == 200, answer.text
    first, second = answer.json()["data"]
    assert [one["model"] for one in (first, second)] == body["models"]
    assert (first["text"], first["prompt_tokens"], first["output_tokens"]) == ("SELECT 1", 5, 2)
    assert 0 < first["first_token_s"] <= first["whole_s"]
    assert {sent["max_tokens"] for sent in engine.bodies} == {9}
    kept = {each.line.request_id: (each.line.tenant, each.line.key, each.line.status) for each in parts.requests.kept}
    assert {kept[one["request_id"]] for one in (first, second)} == {("acme", hash_key("acme")[:12], 200)}
    # The third request of the minute is the last one, and a model of another tenant is none.
    hidden, limited = (await reader.post("/v1/ask", json=body | {"models": ["secret/v1"] * 2})).json()["data"]
    assert {hidden["status"], limited["status"]} == {404, 429}
    assert "secret" not in "".join(one["text"] for one in (hidden, limited))


async def test_who_may_not_infer_may_not_ask_and_a_prompt_is_bounded(asked):
    reader, engine, _ = asked
    body = {"models": ["sql/v1"], "prompt": "How many?"}
    viewer = {"authorization": "Bearer viewer"}
    assert (await reader.post("/v1/ask", json=body, headers=viewer)).status_code == 403
    for wrong in ({"prompt": "x" * 16_001}, {"max_tokens": 513}, {"models": ["sql/v1"] * 5}, {"models": []}):
        assert (await reader.post("/v1/ask", json=body | wrong)).status_code == 400
    assert engine.bodies == []


async def test_a_router_that_does_not_know_the_key_asks_nothing_for_it(asked):
    _, engine, parts = asked
    question = RouterQuestion(
        id="1", kind="ask", body={"model": "sql/v1", "prompt": "x", "max_tokens": 1, "key_id": "0123456789ab"}
    )
    reply = await reply_to(parts, "r0", question)
    assert (reply.status, reply.body["error"]["code"]) == (403, "key_unknown")
    assert (
        await reply_to(parts, "r0", question.model_copy(update={"body": question.body | {"key_id": ""}}))
    ).status == 403
    assert engine.bodies == []
