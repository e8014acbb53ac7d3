"""Answers questions of the console, which come by way of the orchestrator: this router fetches them and posts answers.

Without it a reader would need to reach each router, with a key of its own.
"""

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec
import structlog
from pydantic import ValidationError

from lorafleet.keys.roles import Caller
from lorafleet.service.http import HttpError, envelope
from lorafleet.service.loops import forever
from lorafleet.service.tasks import BackgroundTasks
from orchestrator.model.questions import RoutedAsk, RouterQuestion, RouterQuestions, RouterReply
from router.api.asks import answer_ask
from router.api.control import explain_request, own_decisions
from router.api.explain import replay_answer
from router.api.requests import RequestFilter, own_requests
from router.core.errors import BadBody, RouterError
from router.request.services import Services
from router.wire import ReplayBody

log = structlog.get_logger()

_WAIT_S = 20.0
_MARGIN_S = 5.0
# Between two calls: one that is answered at once must not be repeated in a hurry.
_PAUSE_S = 0.05
# An orchestrator of an older version has no questions: it is asked again when it may have been upgraded.
_OLD_PAUSE_S = 60.0
_MOST_LISTED = 1000
# Prompts of the console that this router answers at a time.
_MOST_ASKS = 4


async def answer_questions(client: httpx.AsyncClient, url: str, router_id: str, services: Services) -> None:
    """Fetch questions and answer them, until cancelled. A call waits at the orchestrator until there is one."""

    async def step() -> None:
        """One call for questions, and their answers."""
        answer = await client.get(
            f"{url}/v1/routers/questions",
            params={"router_id": router_id, "wait_s": _WAIT_S},
            timeout=httpx.Timeout(_WAIT_S + _MARGIN_S),
        )
        if answer.status_code in {403, 404}:
            raise _NoQuestionsHere(answer.status_code)
        answer.raise_for_status()
        for question in RouterQuestions.model_validate_json(answer.content).data:
            if question.kind == "ask":
                asks.spawn(post_ask(question))  # it takes as long as an answer: other questions do not wait for it
            else:
                await post(await reply_to(services, router_id, question))

    async def post(reply: RouterReply) -> None:
        """Post an answer. Raises httpx.HTTPError."""
        sent = await client.post(
            f"{url}/v1/routers/answers",
            content=reply.model_dump_json(),
            headers={"content-type": "application/json"},
        )
        sent.raise_for_status()

    async def post_ask(question: RouterQuestion) -> None:
        """Answer a prompt when one of the few places for them is free, and post the answer. Never raises."""
        try:
            async with places:
                await post(await reply_to(services, router_id, question))
        except httpx.HTTPError as exc:
            log.warning("the answer to a prompt of the console was not posted", error=repr(exc))

    asks, places = BackgroundTasks(), asyncio.Semaphore(_MOST_ASKS)
    try:
        await forever(step, name="questions", every_s=_PAUSE_S, most_backoff_s=_OLD_PAUSE_S)
    finally:
        await asks.cancel_and_wait()


class _NoQuestionsHere(httpx.HTTPError):
    """The orchestrator is older than this call (404), or the key may not make it (403)."""

    def __init__(self, status: int) -> None:
        why = "this router's key may not ask for them" if status == 403 else "it is older than this router: update it"
        super().__init__(f"the orchestrator has no questions for routers: {why}")
        self.status = status


async def reply_to(services: Services, router_id: str, question: RouterQuestion) -> RouterReply:
    """The answer to one question, or what is wrong with it. Never raises."""
    status = 200
    try:
        body = await _answer_body(services, question)
    except (RouterError, HttpError) as exc:
        status, body = exc.status, dict(envelope(exc.status, exc.code, str(exc), exc.param))
    except Exception as exc:
        log.exception("a question of the console was not answered", kind=question.kind)
        status, body = 500, dict(envelope(500, "internal_error", f"{type(exc).__name__}; see the router's log", None))
    return RouterReply(router_id=router_id, id=question.id, status=status, body=body)


async def _answer_body(services: Services, question: RouterQuestion) -> dict[str, Any]:
    """The answer's body. Raises RouterError, HttpError."""
    if question.kind == "decisions":
        return await _last_decisions(services, question.body, question.tenant)
    if question.kind == "ask":
        return (await answer_ask(services, RoutedAsk.model_validate(question.body))).model_dump(mode="json")
    if question.kind == "requests":
        requests = RequestFilter.model_validate({**question.body, "only_tenant": question.tenant})
        items = await own_requests(services, requests)
        return {"data": [msgspec.json.decode(raw) for _, raw in items]}
    if question.kind == "replay":
        try:
            wanted = ReplayBody.model_validate(question.body)
        except ValidationError as exc:
            raise BadBody(f"this is no body of a replay: {exc.errors()[0]['msg']}", param="record") from exc
        return replay_answer(wanted).model_dump(mode="json")
    scopes = frozenset({"view"} if question.tenant is not None else {"view", "load", "operate"})
    reader = Caller(tenant=question.tenant, scopes=scopes)
    body = msgspec.json.encode(question.body)
    answer = await explain_request(services, reader, body, id_=f"explain-{secrets.token_hex(6)}")
    return answer.model_dump(mode="json")


async def _last_decisions(services: Services, body: Mapping[str, Any], tenant: str | None) -> dict[str, Any]:
    """The last decisions; the record, which is large, only of one request that is asked for."""

    def text(name: str) -> str | None:
        """A filter's text; None without one."""
        found = body.get(name)
        return found if isinstance(found, str) and found else None

    limit = body.get("limit")
    items = await own_decisions(
        services,
        adapter=text("adapter"),
        worker=text("worker"),
        request=text("request"),
        limit=min(_MOST_LISTED, limit) if isinstance(limit, int) and limit > 0 else 100,
        tenant=tenant,
    )
    data = [msgspec.json.decode(raw) for _, raw in items]
    if text("request") is None:
        for item in data:
            item.pop("record", None)
    return {"data": data}
