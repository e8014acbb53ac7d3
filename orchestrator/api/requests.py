"""Routes about requests of clients, which routers answer: what became of them, and one prompt to several models."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query

from lorafleet.keys.auth import ApiKeys, requires
from lorafleet.keys.roles import Caller
from orchestrator.api.decisions import ask_all, listening
from orchestrator.core.errors import NotFound
from orchestrator.model.questions import Ask, AskedAnswer, AskedAnswers, RelayedRequests, RequestQuery, RoutedAsk
from orchestrator.traffic.questions import RouterMailbox

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
                model=model, prompt=asked.prompt, max_tokens=asked.max_tokens, key_id=caller.key_id
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
