"""open: the HTTP message that an engine gets: its address, headers and body."""

from array import array
from functools import lru_cache
from secrets import token_hex

import msgspec

from router.core.errors import NoReplica
from router.core.fleet import Replica
from router.http.engine_connection import Origin
from router.protocols.chat_completion import completion_of_chat
from router.protocols.routes import COMPLETIONS, ROUTES, Route
from router.protocols.sglang_logprobs import check_for_completions
from router.protocols.stored_responses import tagged_response_id
from router.request.cache_salt import is_own_salt, salt_for
from router.request.engine_body import EngineOptions, dialect_of, may_send_ids, require_salt, sglang_native_body
from router.request.parsed_request import ParsedRequest
from router.request.record import DispatchedRequest
from router.request.services import Services
from router.tokenizing.tokens import Tokens

# An item of `/generate` at an SGLang: its own call, which alone gives token ids and log-probabilities there.
SGLANG_ITEM = Route(path="/generate", summary="A text continued", generates=True, streams=True, usage="sglang")
COMPLETION = ROUTES["POST", COMPLETIONS]
# Shorter prompts are sent as text: the engine tokenizes them in less time than we write their ids.
_MIN_SENT_IDS = 256


class EngineMessage(msgspec.Struct, frozen=True):
    """The HTTP message that an engine gets, and what it says.

    data          all bytes: head and body
    engine_model  the model's name in the body
    engine_name   the adapter's name, as replicas report it; "": no adapter
    response_id   the id that the engine gives a response which it keeps; "": it chooses one
    """

    route: Route
    origin: Origin
    data: bytes
    engine_model: str
    engine_name: str
    replica: str
    streamed: bool
    response_id: str = ""


class EngineEndpoint(msgspec.Struct, frozen=True):
    """One engine's address, and the part of a request's head that is the same for all requests to it.

    after_path  that part: everything from behind the path to the headers of one request
    """

    origin: Origin
    after_path: bytes

    def request(self, request: ParsedRequest, body: bytes, rank: int | None = None) -> bytes:
        """The bytes of one HTTP request. `rank`: of a data-parallel engine, the rank that should run it."""
        rank_header = b"" if rank is None else b"x-data-parallel-rank: %d\r\n" % rank
        return b"%b %b%b%bx-request-id: %b\r\ncontent-length: %d\r\n%b%b\r\n%b" % (
            request.route.method.encode(),
            self.origin.prefix,
            request.target,
            self.after_path,
            request.request_id.encode(),
            len(body),
            rank_header,
            request.forwarded,
            body,
        )


def endpoint_of(replica: Replica, engine_key: str) -> EngineEndpoint:
    """The endpoint of a replica's engine. An engine beside an agent of ours gets no key."""
    return _cached_endpoint(replica.engine_url, "" if replica.agent_url else engine_key)


@lru_cache(maxsize=4096)
def _cached_endpoint(engine_url: str, key: str) -> EngineEndpoint:
    """The endpoint of an engine's URL; with a key (empty: none), its head has that. Cached."""
    origin = Origin.parse(engine_url)
    after = b" HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\naccept-encoding: identity\r\n%b"
    return EngineEndpoint(
        origin, after % (origin.host_header, f"authorization: Bearer {key}\r\n".encode() if key else b"")
    )


def engine_message(
    services: Services, request: ParsedRequest, dispatched: DispatchedRequest, response_id: str = ""
) -> EngineMessage:
    """The request in the dialect of its replica's engine.

    response_id  the id that the engine gives its response, see `new_response_id`
    raises       ReplicaUnreachable, `unknown_dialect`: this engine cannot be given an adapter
                 NoReplica before the tokenizer was read that a chat as a completion needs
                 BadBody, see `dialect_of`, `require_salt` and `salt_for`
    """
    route, replica, routing = request.route, dispatched.replica, dispatched.decision.request
    dialect = dialect_of(replica.dialect, routing.engine_name, route.path)
    given, salt = request.decoded.get("cache_salt"), dispatched.cache_salt
    if is_own_salt(salt) and route.computes:
        require_salt(replica.dialect, dialect, SGLANG_ITEM.path if request.native is not None else route.path)
    if replica.is_salted:
        salt = salt_for(route, routing.engine_name, salt or given)
    model = dialect.model(replica.model_name, routing.engine_name)
    # The trust at the dispatch spares most requests the two calls; that of an approximate prompt says nothing.
    may_want_report = route.generates and dispatched.trust != "exact" and services.feeds.may_repeat(replica.id)
    options = EngineOptions(
        request.hides_usage,
        may_want_report and services.accuracy.state(replica.id) == "degraded",
        response_id,
        route.prompt,
        dispatched.prompt.ids if _sends_ids(services, request, dispatched) else None,
        "" if salt == given else salt,
        routing.engine_name,
    )
    endpoint = endpoint_of(replica, services.config.engine_key)
    native = request.native
    if native is not None:
        if replica.dialect == "sglang":
            route = SGLANG_ITEM
            request = msgspec.structs.replace(request, target=route.path.encode())
            body = sglang_native_body(native, request.fields["prompt"], routing.engine_name, salt, request.request_id)
            head = endpoint.request(request, body, dispatched.decision.rank)
            return EngineMessage(route, endpoint.origin, head, model, routing.engine_name, replica.id, request.streamed)
        check_for_completions(native, replica.dialect)
    if routing.engine_name and dialect.completes_chats and route.prompt == "chat":
        ids = _text_ids(dispatched.prompt)
        if ids is None and not services.tokenizers.knows(replica.base_model):
            message = f"no tokenizer of {replica.base_model!r} has been read yet, which a chat with this adapter needs"
            raise NoReplica(f"{message}; the worker's agent serves it from its `model`", retry_after_s=1.0)
        fields = completion_of_chat(request.fields, ids, replica.max_model_len)
        route = COMPLETION
        request = msgspec.structs.replace(request, target=route.path.encode(), fields=fields)
    body = dialect.body(request.fields, model, options)
    return EngineMessage(
        route,
        endpoint.origin,
        endpoint.request(request, body, dispatched.decision.rank),
        model,
        routing.engine_name,
        replica.id,
        request.streamed,
        response_id,
    )


def _text_ids(tokens: Tokens) -> "array[int] | None":
    """The token ids of a prompt of text alone; None for another one, and where they are not known."""
    return None if tokens.pictures else tokens.ids


def _sends_ids(services: Services, request: ParsedRequest, dispatched: DispatchedRequest) -> bool:
    """Whether the engine gets our token ids in place of the prompt's text."""
    route, tokens, setting = request.route, dispatched.prompt, services.config.send_prompt_ids
    prompt_tokens = dispatched.decision.request.prompt_tokens
    return (
        tokens.source == "local"
        and prompt_tokens > _MIN_SENT_IDS
        and setting != "off"
        and (route.prompt == "completion" or setting == "all")
        and may_send_ids(
            route.prompt,
            request.fields,
            prompt_tokens=prompt_tokens,
            max_model_len=dispatched.replica.max_model_len,
        )
        and services.tokenizers.agrees(dispatched.replica.incarnation, tokens)
    )


def new_response_id(request: ParsedRequest, replica: Replica, tenant: str | None) -> str:
    """A response id that names the worker which keeps the response; "": the client's `request_id` is no string."""
    given = request.decoded.get("request_id")
    if given is not None and not isinstance(given, str):
        return ""  # for the engine to refuse
    if given is not None and request.decoded.get("background"):
        # An engine keeps one of two responses with one id, and the end of one would be taken for the other's.
        given = f"{given}-{token_hex(8)}"
    return tagged_response_id(given, token_hex(16), tenant=tenant, worker=replica.id)
