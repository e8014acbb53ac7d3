"""Stored responses (`/v1/responses/{id}`): each is kept by one engine, whose worker its id names."""

from lorafleet.keys.roles import Caller
from router.core.errors import NoReplica, ReplicaUnreachable
from router.core.kv.index import WorkerId
from router.http.sse import AnswerRewriter, StoredAnswerRewriter
from router.protocols.routes import response_id_of
from router.protocols.stored_responses import worker_gone_error, worker_of_response
from router.request.engine_attempt import AttemptLimits, open_attempt
from router.request.engine_request import EngineMessage, endpoint_of
from router.request.parsed_request import TIMEOUT_NAME, parse_request, text_header
from router.request.response import ClientResponse, content_headers, within_deadline
from router.request.run import no_answer_in_time
from router.request.services import Services


async def serve_stored(services: Services, limits: AttemptLimits, caller: Caller, response: ClientResponse) -> None:
    """Get, cancel or stream a stored response: ask the engine that keeps it. Raises RouterError."""
    exchange, route = response.exchange, response.route
    response_id = response_id_of(exchange.path)
    worker = worker_of_response(response_id, tenant=caller.tenant, param="id")
    await services.discovery.wait_for_first_worker()
    replica = services.discovery.fleet.replicas.get(WorkerId(worker))
    if replica is None:
        raise worker_gone_error(response_id, worker, param="id")
    if not replica.engine_url:
        raise NoReplica(f"worker {worker!r}, which keeps this response, is starting", retry_after_s=1.0)
    target = exchange.path.encode() + (b"?" + exchange.query if exchange.query else b"")
    timeout = text_header(exchange.headers, TIMEOUT_NAME)
    request = parse_request(services, response.request_id, route, b"", target=target, timeout=timeout)
    endpoint = endpoint_of(replica, services.config.engine_key)
    outgoing = EngineMessage(route, endpoint.origin, endpoint.request(request, b""), "", "", worker, False)
    rewriter = StoredAnswerRewriter(replica.model_name, replica.base_model)
    await within_deadline(services, request, _relay_stored(services, limits, outgoing, response, rewriter))


async def _relay_stored(
    services: Services,
    limits: AttemptLimits,
    outgoing: EngineMessage,
    response: ClientResponse,
    rewriter: AnswerRewriter,
) -> None:
    """Relay the engine's answer, and report to `Background` what it shows of the response. Raises RouterError."""
    background, response_id = services.background, response_id_of(response.exchange.path)
    try:
        attempt = await open_attempt(services.pool, outgoing, limits)
    except ReplicaUnreachable as exc:
        raise no_answer_in_time(exc) if exc.reason == "no_answer_in_time" else NoReplica(str(exc)) from exc
    try:
        headers = content_headers(attempt) + f"x-lorafleet-worker: {outgoing.replica}\r\n"
        if attempt.streamed:
            response.send_head(attempt.status, headers)
            await attempt.relay(response.exchange, rewriter)
            response.finish_stream(attempt)
        else:
            response.send_whole(attempt.status, headers, rewriter.whole(attempt.first))
            background.end_if_over(response_id, attempt.first)
    finally:
        attempt.close()
        background.record_shown_tokens(response_id, attempt.events)
