"""`/v1/requests`: what became of each request, the refused ones included, from its line and its decisions.

Nothing is made while a request runs: its line is kept when it is over, and becomes an item when somebody asks.
"""

from dataclasses import fields
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from lorafleet.identity import lora_id_of
from lorafleet.keys.auth import AuthFirstRoute, requires
from lorafleet.keys.roles import Caller
from lorafleet.service.http import HttpError
from lorafleet.service.times import unix_text
from lorafleet.telemetry.request_log import KeptLine, RequestLine
from orchestrator.model.limits import AccountLimits
from orchestrator.model.questions import RequestQuery
from router.api.control import has_adapter_alone, own_decisions
from router.api.control_calls import ControlCalls, ControlUnavailable, decode_error
from router.api.explain import score_item
from router.core.errors import without_addresses
from router.core.queue.quota import TENANT_LIMIT
from router.core.schedule.cost import ReplicaScore
from router.processes.aggregate import WorkerProcesses
from router.request.parsed_request import TIMEOUT_HEADER
from router.request.services import Services
from router.wire import RequestList

REQUESTS = "requests"
_WITHIN_S = 10.0
# Decisions of one request: one for each attempt, and for each item of a batch.
_MOST_DECISIONS = 20
# Fields of a line that an item has as `stages`.
_PARTS = frozenset({"read_s", "paused_s", "held_s", "queued_s", "failed_s", "waited_s"})
# What is shorter is left out.
_LEAST_S = 1e-6
_LIMITS = frozenset(field.name for field in fields(AccountLimits))


class RequestFilter(RequestQuery):
    """Which requests to list; sent to the other processes, too.

    request      the id of one request, whose decisions are listed with it
    only_tenant  the tenant of a reader who sees no other's requests
    """

    request: str | None = None
    only_tenant: str | None = None

    def passes(self, line: RequestLine) -> bool:
        """Whether this is one of the requests."""
        return (
            self.request in (None, line.request_id)
            and self.only_tenant in (None, line.tenant)
            and self.tenant in (None, line.tenant)
            and self.key in (None, line.key)
            and self.worker in (None, line.worker)
            and self.adapter in (None, line.adapter, lora_id_of(line.adapter), line.asked)
            and (self.status is None or _has_status(line, self.status))
        )


_Items = list[tuple[float, msgspec.Raw]]
_decode_items = msgspec.json.Decoder(_Items).decode


async def answer_process(services: Services, question: bytes) -> bytes:
    """This process's requests, for another process that asks."""
    return msgspec.json.encode(await own_requests(services, RequestFilter.model_validate_json(question)))


async def own_requests(services: Services, wanted: RequestFilter) -> _Items:
    """(time, item as JSON) of this process's requests, the newest first; of one request with its decisions."""
    found: list[KeptLine] = []
    for kept in services.requests.kept:
        if wanted.passes(kept.line):
            found.append(kept)
            if len(found) >= wanted.limit:
                break
    decisions = await _kept_decisions(services, wanted) if wanted.request is not None else []
    items: _Items = []
    for kept in found:
        item = _request_item(services, kept, wanted.only_tenant)
        if wanted.request is not None:
            item["decisions"] = [decision for _, decision in decisions]
        items.append((kept.line.at, msgspec.Raw(msgspec.json.encode(item))))
    return items if items or wanted.request is None else _unfinished_items(decisions, wanted.request)


def request_routes(
    services: Services, control: httpx.AsyncClient, processes: WorkerProcesses | None = None
) -> APIRouter:
    """The routes of all processes on this port; one request is looked for at the other routers, too."""
    api = APIRouter(route_class=AuthFirstRoute, tags=["requests"])
    views = Annotated[Caller, Depends(requires(services.keys, "view"))]
    calls = ControlCalls(services, control)

    async def of_all_processes(wanted: RequestFilter) -> tuple[list[msgspec.Raw], list[int]]:
        """The items of this router, the newest first, and the slots of processes that did not answer."""
        items, missing = await own_requests(services, wanted), []
        if processes is not None:
            found = await processes.ask(REQUESTS, wanted.model_dump_json().encode(), within_s=_WITHIN_S)
            for slot, theirs in found.items():
                if theirs is None:
                    missing.append(slot)
                else:
                    items += _decode_items(theirs)
            items.sort(key=lambda item: item[0], reverse=True)
        return [item for _, item in items[: wanted.limit]], sorted(missing)

    @api.get("/v1/requests", response_model=RequestList)
    async def requests(caller: views, query: Annotated[RequestQuery, Query()]) -> Any:
        """The last requests of this router that are over, the newest first. A tenant's key lists its tenant's."""
        wanted = RequestFilter(**query.model_dump(), only_tenant=caller.only_tenant)
        items, missing = await of_all_processes(wanted)
        return _json_response({"data": items, "next": None, "missing": missing})

    @api.get("/v1/requests/{request_id}", response_model=RequestList)
    async def request_story(request_id: str, request: Request, caller: views) -> Any:
        """What became of a request, by its `x-request-id`: each with that id, the newest first, from whichever router.

        404 `request_not_found` where no router keeps it.
        """
        wanted = RequestFilter(request=request_id, only_tenant=caller.only_tenant)
        items, missing = await of_all_processes(wanted)
        if items or not calls.url:
            if not items:
                raise not_found(request_id)
            return _json_response({"data": items, "next": None, "missing": missing})
        try:
            path = f"/v1/requests/{quote(request_id, safe='')}"
            deadline = services.clock() + _WITHIN_S
            answer = await calls.send(request, "GET", path, deadline=deadline)
        except ControlUnavailable as exc:
            message = f"this router does not have request {request_id!r}, and cannot ask the others: {exc}"
            raise HttpError(503, "orchestrator_unreachable", message, retry_after_s=2.0) from exc
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise not_found(request_id)
        if not answer.is_success:
            message = f"this router does not have request {request_id!r}, and may not ask the others:"
            message += f" {decode_error(answer).message}"
            raise HttpError(503, "orchestrator_unreachable", message, retry_after_s=2.0)
        return Response(answer.content, media_type="application/json")

    return api


def not_found(request_id: str) -> HttpError:
    """The error for a request that nobody keeps, or that is another tenant's."""
    return HttpError(
        404,
        "request_not_found",
        f"no router that answers has request {request_id!r}: it still waits, or its router has ended so many others"
        " since (kept_requests), or it never came. The id is the answer's header x-request-id",
    )


def next_step(line: RequestLine) -> str:
    """How to raise the limit that a request has reached; empty without one."""
    limit = line.limit
    if not limit:
        return ""
    name = limit.removeprefix(TENANT_LIMIT)
    if name in _LIMITS:
        of_key = f" of key {line.key}" if line.key else ""
        place = f"limits.{name}{of_key}" if name == limit else f"tenants.{line.tenant}.limits.{name}"
        return (
            f"raise {place} in the key file, which every service follows, or send less; a client should wait as long as"
            " retry-after says"
        )
    if limit == TIMEOUT_HEADER:
        return f"the client itself set this time in {TIMEOUT_HEADER}: it may wait longer"
    more = "; more workers help, too" if limit.startswith(("max_wait", "max_held", "tenant_share", "cold")) else ""
    return f"raise the router's setting {limit} (LORAFLEET_ROUTER_{limit.upper()}){more}"


def _json_response(content: Any) -> Response:
    """This content as an answer: the items are JSON already."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def _has_status(line: RequestLine, status: str) -> bool:
    """Whether the answer had this status, or one of its class; `failed`: any error."""
    if status == "failed":
        return line.status >= 400 or bool(line.code)
    return str(line.status)[0] == status[0] if status.endswith("xx") else str(line.status) == status


def _request_item(services: Services, kept: KeptLine, only_tenant: str | None) -> dict[str, Any]:
    """A request as its reader may see it: the line, the seconds of its stages, the winner's terms, the next step.

    only_tenant  the reader's; of an adapter that the tenant shares it sees no terms and no cached tokens
    """
    line, score = kept.line, kept.decided
    item: dict[str, Any] = {name: getattr(line, name) for name in line.__struct_fields__ if name not in _PARTS}
    item |= {
        "at": unix_text(line.at),
        "duration_s": round(line.duration_s, 6),
        "first_data_s": None if line.first_data_s is None else round(line.first_data_s, 6),
        "failures": [{"worker": worker, "reason": reason} for worker, reason in line.failures],
        "cause": without_addresses(line.cause),
        "next_step": next_step(line),
        "stages": stage_seconds(line),
        "terms": None,
    }
    if only_tenant is not None and not has_adapter_alone(services, only_tenant, line.adapter):
        item["cached_tokens"] = None
    elif isinstance(score, ReplicaScore):
        item["terms"] = score_item(score, is_winner=True).model_dump()
    return item


def stage_seconds(line: RequestLine) -> dict[str, float]:
    """The seconds of each stage that took any; together they are the request's duration.

    read         until its body was there and parsed
    prepare      resolve, authorise, tokenize, hash, match and decide
    pause, hold, queue, failed_attempts   the waits that `held_for` and `queued_for` explain, and lost attempts
    first_data   from dispatch to the first token, or to the whole answer
    relay        from there to the end
    no_data      at an engine that sent nothing
    whole        of a request without stages
    """
    waited_s = line.waited_s
    if waited_s is None:  # it was not begun, or it is a batch, whose items are not timed
        return {"whole": round(line.duration_s, 6)}
    waits_s = line.paused_s + line.held_s + line.queued_s + line.failed_s
    stages = {
        "read": line.read_s,
        "prepare": waited_s - waits_s,
        "pause": line.paused_s,
        "hold": line.held_s,
        "queue": line.queued_s,
        "failed_attempts": line.failed_s,
    }
    if line.first_data_s is not None:
        stages["first_data"] = line.first_data_s
        stages["relay"] = line.duration_s - line.read_s - waited_s - line.first_data_s
    else:
        stages["no_data"] = line.duration_s - line.read_s - waited_s
    return {name: round(seconds, 6) for name, seconds in stages.items() if seconds > _LEAST_S}


async def _kept_decisions(services: Services, wanted: RequestFilter) -> list[tuple[float, dict[str, Any]]]:
    """(time, decision) of the kept decisions of one request, the newest first, without their large records."""
    kept = await own_decisions(
        services,
        adapter=None,
        worker=None,
        request=wanted.request,
        limit=_MOST_DECISIONS,
        tenant=wanted.only_tenant,
    )
    return [(at, msgspec.json.decode(raw) | {"record": None}) for at, raw in kept]


def _unfinished_items(decisions: list[tuple[float, dict[str, Any]]], request_id: str) -> _Items:
    """The item of a request that was sent, and whose end is not kept: it runs, or many others have ended since."""
    if not decisions:
        return []
    at, last = decisions[0]
    item = {
        "request_id": request_id,
        "at": last["at"],
        "status": None,
        "stage": "open",
        "base_model": last["base_model"],
        "adapter": last["adapter"],
        "worker": last["worker_id"],
        "attempts": len(decisions),
        "first_data_s": last["first_data_s"],
        "stages": {"queue": last["waited_s"]},
        "next_step": "it runs, or its end is not kept any more",
        "decisions": [decision for _, decision in decisions],
    }
    return [(at, msgspec.Raw(msgspec.json.encode(item)))]
