"""Routes that routers answer: decisions, where a request would go, what became of requests, and prompts."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query

from lorafleet.keys.auth import ApiKeys, requires
from lorafleet.keys.roles import Caller
from lorafleet.service.http import HttpError
from orchestrator.core.errors import NotFound, OrchestratorUnavailable
from orchestrator.model.questions import (
    Ask,
    AskedAnswer,
    AskedAnswers,
    RelayedDecision,
    RelayedDecisions,
    RelayedRequests,
    RequestQuery,
    RoutedAsk,
    RouterQuestions,
    RouterReply,
)
from orchestrator.traffic.questions import QuestionKind, RouterMailbox

_WITHIN_S = 10.0
_MOST_WAIT_S = 20.0
# Asked at once: more routers would send more than anybody reads.
_MOST_ASKED = 64
_CHAT = {"model": "sql-expert/v1", "messages": [{"role": "user", "content": "Which customers ordered twice?"}]}
_REPLAY = {"record": {"policy": "kv_lora"}, "policy": "least_loaded"}


def decision_routes(keys: ApiKeys, mailbox: RouterMailbox) -> APIRouter:
    """The routes for readers, and those by which routers fetch questions and answer them."""
    api = APIRouter(tags=["routers"])
    load, view = [Depends(requires(keys, "load"))], Depends(requires(keys, "view"))

    @api.get("/v1/routers/questions", dependencies=load)
    async def questions(
        router_id: Annotated[str, Query(max_length=300)],
        wait_s: Annotated[float, Query(ge=0, le=_MOST_WAIT_S)] = 0.0,
    ) -> RouterQuestions:
        """Questions for a router: at once where there are any, else after `wait_s` none."""
        return RouterQuestions(data=await mailbox.fetch(router_id, wait_s))

    @api.post("/v1/routers/answers", dependencies=load, status_code=204)
    async def answers(reply: RouterReply) -> None:
        """A router's answer to a question."""
        mailbox.answer(reply)

    @api.get("/v1/decisions")
    async def decisions(
        caller: Annotated[Caller, view],
        adapter: str | None = None,
        worker: str | None = None,
        request: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> RelayedDecisions:
        """The newest decisions of all routers. `record`, to repeat one, is there where `request` names a request."""
        body = {"adapter": adapter, "worker": worker, "request": request, "limit": limit}
        found, missing = await ask_all(mailbox, "decisions", body, caller)
        return RelayedDecisions(data=tuple(found[:limit]), missing=missing)

    @api.post("/v1/route")
    async def route(
        caller: Annotated[Caller, view], body: Annotated[dict[str, Any], Body(examples=[_CHAT])]
    ) -> RelayedDecision:
        """Where a request with this body would go, by the router that asked last. Sends nothing."""
        return RelayedDecision.model_validate(await _ask_any(mailbox, "route", body, caller))

    @api.post("/v1/decisions/replay")
    async def replay(
        caller: Annotated[Caller, view], body: Annotated[dict[str, Any], Body(examples=[_REPLAY])]
    ) -> RelayedDecision:
        """A recorded decision, made again by a router, by another `policy` if given. Sends nothing."""
        return RelayedDecision.model_validate(await _ask_any(mailbox, "replay", body, caller))

    return api


async def ask_all(
    mailbox: RouterMailbox, kind: QuestionKind, body: Mapping[str, Any], caller: Caller
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """(items of all routers with their router, the newest first; routers that did not answer).

    raises  OrchestratorUnavailable without any router
    """
    routers = listening(mailbox)[:_MOST_ASKED]
    replies = await asyncio.gather(*(_ask_router(mailbox, router, kind, body, caller) for router in routers))
    found, missing = [], []
    for router, reply in zip(routers, replies, strict=True):
        if reply is None:
            missing.append(router)
        elif reply.status < 400:
            found += [item | {"router": router} for item in reply.body["data"]]
    found.sort(key=lambda item: str(item.get("at", "")), reverse=True)
    return found, tuple(missing)


def listening(mailbox: RouterMailbox) -> list[str]:
    """Routers that answer. Raises OrchestratorUnavailable without any."""
    routers = mailbox.listening()
    if not routers:
        raise OrchestratorUnavailable(
            "no router asks this orchestrator for questions: decisions are kept in routers, of this version or newer,"
            " with `orchestrator_url`; they are asked a second after they start",
            code="no_router",
            retry_after_s=1.0,
        )
    return routers


async def _ask_router(
    mailbox: RouterMailbox, router: str, kind: QuestionKind, body: Mapping[str, Any], caller: Caller
) -> RouterReply | None:
    """One router's reply to a caller's question; None if it does not come."""
    return await mailbox.ask(router, kind, body, tenant=caller.only_tenant, within_s=_WITHIN_S)


async def _ask_any(
    mailbox: RouterMailbox, kind: QuestionKind, body: Mapping[str, Any], caller: Caller
) -> dict[str, Any]:
    """The answer of the first router that gives one. Raises HttpError as the router does, OrchestratorUnavailable."""
    for router in listening(mailbox)[:2]:
        reply = await _ask_router(mailbox, router, kind, body, caller)
        if reply is None:
            continue
        if reply.status >= 400:
            error = reply.body.get("error", {})
            raise HttpError(
                reply.status, str(error.get("code", "router_error")), str(error.get("message", "the router refused it"))
            )
        return reply.body
    raise OrchestratorUnavailable("no router has answered in time; ask again", code="no_router", retry_after_s=1.0)


_MOST_OF_ONE_ID = 20
# As long as a cold start and a short answer take.
_ASK_WITHIN_S = 90.0
_ASK = {"models": ["sql-expert/v1", "sql-expert/v2"], "prompt": "Which customers ordered twice?", "max_tokens": 64}


def request_routes(keys: ApiKeys, mailbox: RouterMailbox) -> APIRouter:
    """The routes; a tenant's key sees its tenant's requests alone."""
    api = APIRouter(tags=["routers"])
    view = Depends(requires(keys, "view"))

    async def found_requests(caller: Caller, body: Mapping[str, Any]) -> RelayedRequests:
        """Requests of all routers, with the notes of their keys."""
        found, missing = await ask_all(mailbox, "requests", body, caller)
        notes = {} if caller.only_tenant is not None else {one.key_id: one.note for one in keys.callers()}
        data = tuple(item | {"note": notes.get(item.get("key", ""), "")} for item in found[: body["limit"]])
        return RelayedRequests(data=data, missing=missing)

    @api.get("/v1/requests")
    async def requests(caller: Annotated[Caller, view], query: Annotated[RequestQuery, Query()]) -> RelayedRequests:
        """The last requests of all routers that are over, the newest first. A tenant's key lists its tenant's."""
        return await found_requests(caller, query.model_dump())

    @api.get("/v1/requests/{request_id}")
    async def request_story(request_id: str, caller: Annotated[Caller, view]) -> RelayedRequests:
        """What became of a request, by its `x-request-id`: each with that id, the newest first, of all routers.

        404 `request_not_found` where no router keeps it, or it is another tenant's.
        """
        found = await found_requests(caller, {"request": request_id, "limit": _MOST_OF_ONE_ID})
        if not found.data:
            silent = f"; these did not answer: {', '.join(found.missing)}" if found.missing else ""
            raise NotFound(
                f"no router has request {request_id!r}: it still waits, or its router has ended so many others since"
                f" (kept_requests), or it never came{silent}. The id is the answer's header x-request-id",
                code="request_not_found",
            )
        return found

    @api.post("/v1/ask")
    async def ask(
        caller: Annotated[Caller, Depends(requires(keys, "infer"))], asked: Annotated[Ask, Body(examples=[_ASK])]
    ) -> AskedAnswers:
        """One prompt to several models, side by side: each a request of the caller's own key, with its limits."""

        async def answer(model: str) -> AskedAnswer:
            """One model's answer, or why there is none."""
            routed = RoutedAsk(
                model=model,
                prompt=asked.prompt,
                max_tokens=asked.max_tokens,
                key_id=caller.key_id,
                caller=replace(caller, expires_at=None) if caller.issuer else None,
            ).model_dump()
            reply = await mailbox.ask(router, "ask", routed, tenant=caller.only_tenant, within_s=_ASK_WITHIN_S)
            if reply is None:
                message = f"router {router} has not answered within {_ASK_WITHIN_S:g} s"
                return AskedAnswer(model=model, status=504, error=message)
            if reply.status >= 400:
                return AskedAnswer(model=model, status=reply.status, error=str(reply.body["error"]["message"]))
            return AskedAnswer.model_validate(reply.body)

        router = listening(mailbox)[0]
        return AskedAnswers(data=tuple(await asyncio.gather(*map(answer, asked.models))))

    return api
