"""The routes beside inference: models, explain, decisions, health and metrics."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, get_args

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import generate_latest

from lorafleet.http_server.listener import HttpListener
from lorafleet.identity import lora_id_of
from lorafleet.keys.auth import AuthFirstRoute, metrics_dependencies, requires
from lorafleet.keys.roles import Caller
from lorafleet.service.http import HttpError
from lorafleet.service.http.openapi import Json
from lorafleet.telemetry.request_log import request_id
from orchestrator.model.catalog import CatalogAdapter
from router.api.explain import decision_answer, dispatched_answer, replay_answer, tenants_answer, undecided_answer
from router.api.openapi import openapi_paths
from router.core.errors import ModelNotFound, NoReplica
from router.core.fleet import ReplicaState, RouterFleet
from router.core.resolve import usable_adapters, whole_name
from router.core.sessions.session import NO_SESSION, Session
from router.kv.tree import kv_tree_of
from router.processes.aggregate import Answer, WorkerProcesses
from router.protocols.routes import likely_route
from router.protocols.sessions import SessionReader
from router.request.cache_cost import MOST_EXPLAINED_SALTS, tokens_in_other_caches
from router.request.parsed_request import parse_request
from router.request.record import DispatchedRequest
from router.request.services import Services
from router.request.stages import hash_prompt, resolve_target, tokenize
from router.wire import DecisionList, KvTree, ReplayBody, RouteAnswer

_DECISIONS = "decisions"
# A thousand decisions take a process of a large fleet three seconds.
_DECISIONS_WITHIN_S = 10.0


class _DecisionFilter(msgspec.Struct, frozen=True):
    """Which decisions to list; sent to the other processes, too."""

    adapter: str | None
    worker: str | None
    request: str | None
    limit: int
    tenant: str | None = None


_Items = list[tuple[float, msgspec.Raw]]
_decode_wanted = msgspec.json.Decoder(_DecisionFilter).decode
_decode_items = msgspec.json.Decoder(_Items).decode


def process_handlers(services: Services) -> Mapping[str, Answer]:
    """Handlers of the other processes' requests, by name."""

    async def decisions(question: bytes) -> bytes:
        """This process's decisions, for another process that asks."""
        return msgspec.json.encode(await _newest_decisions(services, _decode_wanted(question)))

    return {_DECISIONS: decisions}


async def own_decisions(
    services: Services,
    *,
    adapter: str | None,
    worker: str | None,
    request: str | None,
    limit: int,
    tenant: str | None,
) -> _Items:
    """(time, item as JSON) of this process's decisions, the newest first; `tenant`: that tenant's alone."""
    return await _newest_decisions(services, _DecisionFilter(adapter, worker, request, limit, tenant))


async def _newest_decisions(services: Services, wanted: _DecisionFilter) -> _Items:
    """(time, item as JSON) of this process's decisions, the newest first."""
    found = [
        record
        for record in reversed(services.decisions)
        if wanted.tenant in (None, record.tenant) and _is_about(record, wanted.adapter, wanted.worker, wanted.request)
    ]
    items: _Items = []
    for record in found[: wanted.limit]:
        answer = _shown_to(services, wanted.tenant, dispatched_answer(record, services.accuracy.state))
        items.append((record.at, msgspec.Raw(answer.model_dump_json().encode())))
        # A few milliseconds each with 64 replicas: relayed streams get their turn in between.
        await asyncio.sleep(0)
    return items


def control_routes(services: Services, processes: WorkerProcesses | None = None) -> APIRouter:
    """Routes for models, explain and decisions; with `processes`, of all processes on this port."""
    api = APIRouter(route_class=AuthFirstRoute)
    infers = Annotated[Caller, Depends(requires(services.keys, "infer"))]
    views = Annotated[Caller, Depends(requires(services.keys, "view"))]

    @api.get("/v1/models")
    async def models(caller: infers) -> Response:
        """Base models, adapters and aliases that the caller may use; 503 before a first catalog."""
        cards = list(_model_cards(await known_fleet(services), caller).values())
        # Python's own encoder takes twice as long for ten thousand cards as making them.
        whole = msgspec.json.encode({"object": "list", "data": cards})
        return Response(whole, media_type="application/json")

    @api.get("/v1/models/{model:path}")
    async def model(model: str, caller: infers) -> JSONResponse:
        """One model card; 404 `model_not_found` for a model that the caller may not use."""
        return JSONResponse(await model_card(services, caller, model))

    @api.post("/v1/route", response_model=RouteAnswer)
    async def explain(request: Request, caller: views) -> Any:
        """Where this completion would go, and why. Sends nothing and loads nothing."""
        headers = request.headers
        return await explain_request(
            services,
            caller,
            await request.body(),
            id_=request_id(headers.get("x-request-id")),
            session=SessionReader(services.config.session_header).read(dict(headers.raw)),
        )

    @api.get("/v1/decisions", response_model=DecisionList)
    async def decisions(
        caller: views,
        adapter: str | None = None,
        worker: str | None = None,
        request: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Any:
        """The newest decisions first. `adapter` is a lora_id, an engine name, or `base`; `request` a request's id."""
        wanted = _DecisionFilter(adapter, worker, request, limit, caller.only_tenant)
        items = await _newest_decisions(services, wanted)
        missing = []
        if processes is not None:
            found = await processes.ask(_DECISIONS, msgspec.json.encode(wanted), within_s=_DECISIONS_WITHIN_S)
            for slot, theirs in found.items():
                if theirs is None:
                    missing.append(slot)
                else:
                    items += _decode_items(theirs)
            items.sort(key=lambda item: item[0], reverse=True)
        whole = msgspec.json.encode(
            {"data": [item for _, item in items[:limit]], "next": None, "missing": sorted(missing)}
        )
        return Response(whole, media_type="application/json")

    @api.get("/v1/kv/tree", dependencies=[Depends(requires(services.keys, "view", is_for_fleet=True))])
    async def kv_tree(
        model: Annotated[str, Query(description="base model; default: the only one")] = "",
        adapter: Annotated[str, Query(description="lora_id, engine name, or `base`; default: all")] = "",
        limit: Annotated[int, Query(ge=1, le=1000, description="nodes in the answer")] = 200,
        depth: Annotated[int, Query(ge=1, le=64, description="levels below a root")] = 16,
    ) -> KvTree:
        """The prompts that this process sent lately, as a tree, with who holds each part of them now."""
        base_model, sent = await _named_base_model(services, model), tuple(services.sent_prompts)
        return await kv_tree_of(services.feeds, sent, base_model, adapter=adapter, limit=limit, depth=depth)

    @api.post(
        "/v1/decisions/replay", dependencies=[Depends(requires(services.keys, "view"))], response_model=RouteAnswer
    )
    async def replay(body: ReplayBody) -> Any:
        """A recorded decision, made again, by another `policy` if given. Sends nothing."""
        return replay_answer(body)

    return api


async def explain_request(
    services: Services, caller: Caller, body: bytes, *, id_: str, session: Session = NO_SESSION
) -> RouteAnswer:
    """Where a completion with this body would go, as the caller may see it. Sends nothing. Raises RouterError."""
    question = parse_request(services, id_, likely_route(body), body, session=session, tenant=caller.tenant or "")
    await known_fleet(services)
    target = resolve_target(services, _caller_as_reader(caller), question)
    tokens = await tokenize(services, caller, target, question)
    prompt = hash_prompt(services, caller, target, question, tokens)
    try:
        decision = services.scheduler.decide(prompt, services.clock())
    except NoReplica as exc:
        adapter = target.adapter.lora_id if target.adapter else "base"
        note = f"{exc}; a request would wait for a load" if target.adapter else str(exc)
        undecided = undecided_answer(
            prompt.request,
            request_id=question.request_id,
            at=time.time(),
            adapter=adapter,
            tokens_from=tokens.source,
            roster=services.discovery.fleet.roster(target.base_model),
            note=note,
        )
        return _shown_to(services, caller.only_tenant, undecided)
    trust = services.accuracy.state(decision.replica.id)
    notes = [] if services.scheduler.has_room(decision) else ["a request would wait in the router for room there"]
    if distrusted := services.tokenizers.note(target.base_model):
        notes.append(distrusted)
    if tried := _half_open(services, target.base_model):
        notes.append(f"half-open, so that one request at a time tries: {', '.join(tried)}")
    answer = decision_answer(
        decision,
        services.accuracy.state,
        request_id=question.request_id,
        at=time.time(),
        tokens_from=tokens.source,
        winner_trust=trust,
        session=services.scheduler.session_of(prompt, decision),
        note="; ".join(notes) or None,
    )
    if caller.only_tenant is None:
        others = tokens_in_other_caches(services, prompt, tokens, most=MOST_EXPLAINED_SALTS)
        answer = answer.model_copy(update={"other_caches_tokens": others})
    return _shown_to(services, caller.only_tenant, answer)


def metrics_text(services: Services, clients: HttpListener) -> bytes:
    """Set the gauges to their values now, and return this process's metrics in the Prometheus text format."""
    metrics, room = services.metrics, services.scheduler.queue.usage
    if services.config.orchestrator_url:
        age_s = services.discovery.catalog_age_s()
        metrics.catalog_age.set(float("inf") if age_s is None else age_s)
    if services.config.kube_selector:
        age_s = services.discovery.slices_age_s()
        metrics.slices_age.set(float("inf") if age_s is None else age_s)
    metrics.catalog_revision.set(services.discovery.fleet.revision)
    for worker, share in services.accuracy.error_shares():
        if worker in services.discovery.fleet.replicas:
            metrics.kv_error.labels(worker).set(share)
    metrics.in_flight.set(services.scheduler.load.total_in_flight)
    metrics.token_cache_bytes.set(services.tokenizers.cache_bytes)
    metrics.pauses.set(services.pauses.count)
    metrics.paused.set(len(services.pauses.held))
    metrics.waiting_bytes.set(room.size_bytes)
    metrics.held_bytes.set(services.cold_starts.held_bytes)
    for base_model in services.cold_starts.from_zero.start_s:
        metrics.held_from_zero.labels(base_model).set(services.cold_starts.held_at_zero(base_model))
    metrics.connections.set(len(clients.connections))
    metrics.engine_connections.set(services.pool.connections)
    metrics.circuit_ignored.labels().set(services.scheduler.breaker.ignored_circuits)
    metrics.retries_refused.labels().set(services.scheduler.retries_refused)
    for code, count in clients.intake.refusals.items():
        metrics.refused.labels(code).set(count)
    states = Counter(replica.state for replica in services.discovery.fleet.replicas.values())
    for state in get_args(ReplicaState):
        metrics.replicas.labels(state).set(states[state])
    return generate_latest(metrics.registry)


def health_routes(
    services: Services, own_metrics: Callable[[], bytes], processes: WorkerProcesses | None = None
) -> APIRouter:
    """Routes for probes and Prometheus; open to all, except for metrics that need a key.

    own_metrics  returns this process's metrics; with `processes`, those of all processes are shown
    """
    api = APIRouter()
    guarded = metrics_dependencies(services.keys, need_key=services.config.metrics_need_key)

    @api.get("/health")
    async def health() -> dict[str, str]:
        """The process runs."""
        return {"status": "ok"}

    @api.get("/ready")
    async def ready() -> dict[str, str]:
        """200 once discovery and catalog are synced, also with an empty fleet.

        Else, and while stopping, 503 with Retry-After.
        """
        if services.stopping:
            raise HttpError(503, "stopping", "this router is stopping", retry_after_s=1.0)
        if not services.discovery.is_synced():
            message = f"waiting for {services.discovery.missing_for_sync()}"
            raise HttpError(503, "not_synced", message, retry_after_s=1.0)
        return {"status": "ready"}

    @api.get("/metrics", dependencies=guarded)
    async def metrics() -> Response:
        """The metrics in Prometheus's text format, summed over all processes on this port."""
        if processes is not None:
            text = await processes.metrics()
        else:
            services.metrics.adapters.settle()
            text = own_metrics()
        return Response(text, media_type="text/plain; version=0.0.4")

    return api


def describe_inference(document: Json) -> None:
    """Add the inference routes, which the listener serves itself, to the app's OpenAPI document."""
    inference, own = openapi_paths(), document["paths"]
    document["paths"] = {path: inference.get(path, {}) | own.get(path, {}) for path in inference | own}


async def known_fleet(services: Services) -> RouterFleet:
    """The fleet, once a worker is known or the wait for one is over. Raises CatalogUnavailable."""
    await services.discovery.wait_for_first_worker()
    if not services.discovery.has_catalog:
        raise services.discovery.catalog_unavailable()
    return services.discovery.fleet


async def _named_base_model(services: Services, model: str) -> str:
    """The base model of this name; of "" the only one that has workers. Raises ModelNotFound."""
    fleet = await known_fleet(services)
    served = [name for name, replica in fleet.base_models.items() if replica]
    if not model and len(served) == 1:
        return served[0]
    if model not in fleet.base_models:
        why = f"{model!r} is no base model here" if model else f"there are {len(served)} base models"
        raise ModelNotFound(f"{why}; `model` is one of: {', '.join(sorted(served)) or 'none yet'}", param="model")
    return model


def _caller_as_reader(caller: Caller) -> Caller:
    """The caller with the sight of all tenants' adapters, if it may read the whole fleet."""
    return replace(caller, scopes=caller.scopes | {"load"}) if caller.may_for_fleet("view") else caller


def _shown_to(services: Services, tenant: str | None, answer: RouteAnswer) -> RouteAnswer:
    """The answer as a caller of this tenant may see it; None: a caller above tenants."""
    if tenant is None:
        return answer
    return tenants_answer(answer, has_adapter_alone=has_adapter_alone(services, tenant, answer.adapter))


def has_adapter_alone(services: Services, tenant: str, engine_name: str) -> bool:
    """Whether the adapter is this tenant's alone, so that what is cached of it discloses no other's prompts."""
    adapter = services.discovery.fleet.adapters.get(lora_id_of(engine_name))
    return adapter is not None and adapter.tenants is not None and set(adapter.tenants) == {tenant}


def _half_open(services: Services, base_model: str) -> list[str]:
    """Workers with a half-open circuit, which get one trial request at a time."""
    now, replicas = services.clock(), services.discovery.fleet.roster(base_model).replicas
    return [replica.id for replica in replicas if services.scheduler.breaker.state(replica, now) == "half_open"]


def _is_about(record: DispatchedRequest, adapter: str | None, worker: str | None, request: str | None) -> bool:
    """Whether a record passes these filters; None passes all. `adapter`: a lora_id, an engine name, or `base`."""
    name = record.decision.request.engine_name or "base"
    return (
        worker in (None, record.decision.replica.id)
        and adapter in (None, name, lora_id_of(name))
        and request in (None, record.request_id)
    )


async def model_card(services: Services, caller: Caller, model: str) -> dict[str, Any]:
    """One model's card; reads the catalog again for an unknown model. Raises ModelNotFound.

    Raises NoReplica instead while no worker has reported.
    """
    card = _model_cards(await known_fleet(services), caller).get(model)
    if card is None and await services.discovery.refresh_catalog():
        card = _model_cards(services.discovery.fleet, caller).get(model)
    if card is None:
        services.discovery.check_any_report()
        raise ModelNotFound(f"The model {model!r} does not exist; GET /v1/models lists what is", param="model")
    return card


def _model_cards(fleet: RouterFleet, caller: Caller) -> dict[str, dict[str, Any]]:
    """Model cards by name: the base models that are offered, and the adapters and aliases that the caller may use."""

    def may_use(adapter: CatalogAdapter) -> bool:
        """Whether the caller may use this adapter."""
        return caller.may_use(adapter.tenants)

    # The longest of the replicas: a request goes where it fits.
    contexts = {name: {"max_model_len": fleet.roster(name).max_model_len or None} for name in fleet.base_models}

    def card(id_: str, root: str, parent: str | None) -> dict[str, Any]:
        """One model's card."""
        return {
            "id": id_,
            "object": "model",
            "created": 0,
            "owned_by": "lorafleet",
            "root": root,
            "parent": parent,
        } | contexts.get(parent or id_, {})

    mine = usable_adapters(fleet, may_use)
    cards = {name: card(name, name, None) for name in fleet.base_models if name in fleet.offered}
    cards |= {
        lora_id: card(lora_id, adapter.engine_name or lora_id, adapter.base_model) for lora_id, adapter in mine.items()
    }
    for name, alias in fleet.aliases.items():
        targets = [mine[target.lora_id] for target in alias.targets if target.lora_id in mine]
        if targets:
            cards[name] = card(name, targets[0].lora_id, targets[0].base_model)
    return _in_namespace(fleet, caller, cards) if caller.namespace else cards


def _in_namespace(fleet: RouterFleet, caller: Caller, cards: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The cards by the names that the caller's requests use: those of its namespace in place of others of that name.

    What it published under a base model's name has the base model's place in the order.
    """
    found = dict(cards)
    for name, card in cards.items():
        short = caller.short_name(name)
        if short != name and whole_name(fleet, caller.namespace, short, may_shadow_base=caller.may_shadow_base) == name:
            del found[name]
            found[short] = card | {"id": short}
    return found
