"""read -> resolve -> tokenize -> hash -> match -> decide, one function a stage, and what they hand on."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from random import getrandbits
from typing import Any

import msgspec
from xxhash import xxh3_128, xxh3_128_hexdigest

from lorafleet.http_server.batches import leave_batch
from lorafleet.identity import BlockHash, adapter_salt, root_hash
from lorafleet.service.auth import Caller
from router.core.errors import BadBody, ModelNotFound
from router.core.fleet import Excluded, Incarnation, Roster, RoutableAdapter
from router.core.kv.index import WorkerId
from router.core.queue.fair_queue import HashChains, HashedRequest, PrefixMatch, QueuedRequest
from router.core.resolve import RequestTarget, resolve
from router.core.schedule.decision import NOTHING, RoutingRequest, too_short
from router.core.scheduler import first_blocks
from router.kv.feeds import KvFeeds
from router.protocols.bodies import BOM, DECODE_ERRORS, bad_json_error, check_items
from router.protocols.routes import Route, sequence_count
from router.request.dispatched import DispatchedRequest
from router.request.engine_body import Body, asks_for_usage, refuse_steering
from router.request.services import Services
from router.tokenizing.approximate import approximate_prompt, approximate_root
from router.tokenizing.tokenizers import NO_TOKENS, Source, Tokens

# How long its client will wait for the whole answer, in seconds.
TIMEOUT_HEADER = "x-lorafleet-timeout-s"

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# A longer name of a session is kept by its hash: a thousand decisions remember theirs.
_LONGEST_SESSION = 200
# Each step of an adapter's priority doubles its share of its tenant's time, up to so many.
_MOST_PRIORITY = 3

# How long the answer may get, by chats, completions and messages, and by responses.
_ANSWER_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

_decode_body = msgspec.json.Decoder(Body).decode
_decode_any = msgspec.json.Decoder().decode
_decode_number = msgspec.json.Decoder(int).decode


class ParsedRequest(msgspec.Struct, frozen=True):
    """A request as read: the raw fields to send on, and those that were decoded to decide on.

    target       path and query to ask the engine for
    hides_usage  we ask the engine for the usage of a stream; the client did not, and does not see it
    sequences    that an engine makes of it, see `sequence_count`
    size_bytes   of its body: what it holds while it waits
    deadline_at  when nobody wants its answer any more, by Parts.clock
    forwarded    header lines for the engine: where its trace belongs
    """

    request_id: str
    route: Route
    target: bytes
    fields: Body
    decoded: Mapping[str, Any]
    streamed: bool
    hides_usage: bool
    read_at: float
    sequences: int = 1
    size_bytes: int = 0
    session: str = ""
    priority: float = 0.0
    deadline_at: float | None = None
    forwarded: bytes = b""


def read(
    services: Services,
    request_id: str,
    route: Route,
    raw: bytes,
    *,
    target: bytes = b"",
    session: str | None = None,
    timeout: str | None = None,
    forwarded: bytes = b"",
) -> ParsedRequest:
    """The request, its body parsed no deeper than a decision needs.

    target   path and query; empty: the route's own
    session  whose it is, by a header; without one the body's `user`
    timeout  how long its client will wait, in seconds, as a header had it
    raises   BadBody
    """
    read_at = services.clock()
    fields: Body = {}
    decoded: dict[str, Any] = {}
    if route.has_body:
        check_items(raw, services.config.max_body_items)
        try:
            fields = _decode_body(raw.removeprefix(BOM))
            decoded = {name: _decode_any(fields[name]) for name in route.fields.intersection(fields)}
        except DECODE_ERRORS as exc:
            raise bad_json_error(raw, exc) from exc
        refuse_steering(fields, decoded.get("vllm_xargs"))
    sequences = 1
    if route.lists or "n" in decoded:
        sequences = sequence_count(route, decoded)
        if route.generates and sequences > services.config.max_sequences:
            raise BadBody(
                f"this asks for {sequences} answers at once (n, for each of its prompts), and at most"
                f" {services.config.max_sequences} may be asked for: send several requests",
                param="n" if "n" in decoded else route.lists[0],
            )
        if decoded.get("use_beam_search"):
            sequences = 1  # vLLM 0.32 runs a request for each token of each beam, and counts none of them
    streamed = route.streams and decoded.get("stream") is True
    user, priority = decoded.get("user"), decoded.get("priority")
    return ParsedRequest(
        request_id,
        route,
        target or route.path.encode(),
        fields,
        decoded,
        streamed,
        # Predictions are held against the engine's own word, and a stream has that only where somebody asks.
        streamed and route.hides_usage and not asks_for_usage(decoded.get("stream_options")),
        read_at,
        sequences,
        len(raw),
        _session(session or (user if isinstance(user, str) else "")),
        priority if isinstance(priority, int | float) else 0.0,
        None if timeout is None else read_at + _timeout_s(timeout),
        forwarded,
    )


def digest_of(question: ParsedRequest) -> int:
    """The same for a request that is sent again, under another id or not."""
    found = xxh3_128(question.route.path.encode())
    for name, raw in question.fields.items():
        if name != "request_id":
            found.update(name.encode())
            found.update(raw)
    return found.intdigest()


def _timeout_s(named: str) -> float:
    try:
        timeout_s = float(named)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s < inf:
        raise BadBody(f"{TIMEOUT_HEADER} must be seconds above 0, such as 30 or 2.5; found {named!r}")
    return timeout_s


def resolve_target(services: Services, caller: Caller, question: ParsedRequest) -> RequestTarget:
    """resolve and authorise: what the caller may not use does not exist for it."""
    if not services.discovery.has_catalog:
        raise services.discovery.catalog_unavailable()
    try:
        target = resolve(
            services.discovery.fleet,
            model=question.decoded.get("model"),
            lora_id=question.decoded.get("lora_id"),
            visible=lambda adapter: caller.may_use(adapter.tenants),
            rng=services.scheduler.rng,
            session=question.session,
        )
    except ModelNotFound:
        services.discovery.check_any_report()
        raise
    # Where an adapter is but a name, its base model does the same, and nothing need be loaded.
    return target if question.route.adapter == "runs" else RequestTarget(target.base_model, None, target.asked)


async def tokenize(services: Services, target: RequestTarget, question: ParsedRequest) -> Tokens:
    """The prompt's token ids, or an approximation of a prompt that only its engine can tokenize."""
    kind = question.route.prompt
    began_at = services.clock()
    replica = services.discovery.fleet.base_models.get(target.base_model) if kind != "none" else None
    if replica is None:
        return _tokens(services, question, NO_TOKENS, began_at)
    found = services.tokenizers.tokenize(
        question.decoded,
        base_model=target.base_model,
        engine_url=replica.engine_url,
        kind=kind,
        max_model_len=services.discovery.fleet.roster(target.base_model).max_model_len,
    )
    if not isinstance(found, Tokens):
        await leave_batch()
        found = await found()
    return _tokens(services, question, found, began_at)


def _tokens(services: Services, question: ParsedRequest, found: Tokens, began_at: float) -> Tokens:
    """What was found, or in the place of no ids an approximation of the prompt."""
    route = question.route
    if found.ids is None and route.computes and services.config.tokenizer != "off":
        made = approximate_prompt(question.fields, question.decoded, question.size_bytes)
        if made is not None:
            found = Tokens(None, "approximate", approximation=made)
    if found is not NO_TOKENS or route.prompt != "none":
        services.metrics.tokenize.labels(found.source).observe(services.clock() - began_at)
    return found


async def warm(
    services: Services,
    caller: Caller,
    target: RequestTarget,
    question: ParsedRequest,
    excluded: Callable[[], Excluded],
    *,
    tokens: Tokens | None = None,
    is_displaced: bool = False,
) -> RequestTarget:
    """The target with an adapter that some replica holds; waits for a cold one, and for one whose holders died.

    excluded      what failed this request, as things stand
    tokens        of its prompt, where they are known: what does not take so many is not waited for
    is_displaced  every replica went while it waited for room: the base model's is waited for, too
    """

    def unfit() -> Excluded:
        return excluded() | _too_short(services, target, question, tokens)

    if target.adapter is None:
        if is_displaced or excluded():
            await leave_batch()
            await _until_back(services, target.base_model, unfit)
        return target
    adapter = services.cold_starts.resident(target.adapter.lora_id, unfit())
    if adapter is not None:
        return _held(target, adapter)
    await leave_batch()
    adapter = await services.cold_starts.until_resident(
        target.adapter.lora_id,
        unfit,
        tenant=caller.tenant or "",
        size_bytes=question.size_bytes,
        deadline_at=question.deadline_at,
        is_displaced=is_displaced,
    )
    return _held(target, adapter)


def _held(target: RequestTarget, adapter: RoutableAdapter) -> RequestTarget:
    if adapter is target.adapter:
        return target
    return RequestTarget(adapter.base_model or target.base_model, adapter, target.asked)


def _too_short(services: Services, target: RequestTarget, question: ParsedRequest, tokens: Tokens | None) -> Excluded:
    """What takes less than this request may come to, where something else takes it."""
    roster, adapter = services.discovery.fleet.roster(target.base_model), target.adapter
    if tokens is None or tokens.ids is None or not roster.is_uneven:
        return frozenset()
    engine_name = (adapter.engine_name or "") if adapter is not None else ""
    ask = RoutingRequest(target.base_model, engine_name, 0, total_tokens=_total(question, len(tokens.ids), roster))
    return frozenset([r.incarnation for i, r in enumerate(roster.replicas) if too_short(roster, i, ask)])


async def _until_back(services: Services, base_model: str, unfit: Callable[[], Excluded]) -> None:
    """Wait for a replica that may serve this request, or for one that failed it to have started again."""

    def is_back() -> bool:
        replicas, barred = services.discovery.fleet.roster(base_model).replicas, unfit()
        return any(r.state == "ready" and r.incarnation not in barred for r in replicas)

    await services.discovery.changes.until(is_back, timeout_s=services.config.failover_wait_s)


def asked(
    services: Services,
    target: RequestTarget,
    question: ParsedRequest,
    tokens: Tokens,
    excluded: Excluded = frozenset(),
    only: Incarnation | None = None,
) -> HashedRequest:
    """hash: what the choice of a replica depends on, with the prompt's blocks at every block size of its fleet."""
    adapter, approximated = target.adapter, tokens.approximation
    roster = services.discovery.fleet.roster(target.base_model)
    engine_name = (adapter.engine_name or "") if adapter is not None else ""
    chains: HashChains = NOTHING
    salted: HashChains = NOTHING
    conversation = 0
    if tokens is not NO_TOKENS and reads_cache(question):
        given = question.decoded.get("cache_salt")
        salt = given if isinstance(given, str) else ""
        root = root_hash(target.base_model, engine_name, salt)
        if approximated is not None:
            root = approximate_root(root)
            conversation = approximated.conversation(root)
            chains = {block_size: approximated.chain(block_size, root) for block_size in roster.block_sizes}
        elif tokens.ids is not None:
            chains = _chains(services, tokens, root, roster.block_sizes)
            if roster.salted and (engine_name or salt):
                root = root_hash(target.base_model, engine_name, adapter_salt(engine_name, salt))
                salted = _chains(services, tokens, root, roster.salted_block_sizes)
    prompt_tokens = sized(roster, question, tokens)
    total_tokens = _total(question, len(tokens.ids), roster) if tokens.ids is not None and roster.is_uneven else 0
    ask = RoutingRequest(
        target.base_model,
        engine_name,
        prompt_tokens,
        excluded,
        question.session,
        conversation or first_blocks(chains),
        only,
        question.sequences,
        total_tokens,
        approximated is not None,
    )
    return HashedRequest(ask, chains, salted, roster.salted) if salted else HashedRequest(ask, chains)


def _chains(services: Services, tokens: Tokens, root: BlockHash, block_sizes: Iterable[int]) -> HashChains:
    assert tokens.ids is not None
    return {
        block_size: services.chain_cache.chain(
            tokens.ids, block_size=block_size, root=root, seen=tokens.seen, kept=tokens.kept
        )
        for block_size in block_sizes
    }


def _total(question: ParsedRequest, prompt_tokens: int, roster: Roster) -> int:
    """Tokens that a request may come to: its prompt, and the answer that it asks for, or at least one token. What comes
    to more than any engine takes is for one that takes most: it says so, or cuts the answer.
    """
    wanted = (_number(question.fields.get(name)) for name in _ANSWER_TOKENS)
    return min(prompt_tokens + max(1, next(filter(None, wanted), 1)), roster.max_model_len)


def _number(raw: msgspec.Raw | None) -> int:
    try:
        return 0 if raw is None else _decode_number(raw)
    except ValueError:
        return 0  # for the engine to refuse


def reads_cache(question: ParsedRequest) -> bool:
    """Whether an engine looks for what it has cached: for the log probabilities of the prompt itself vLLM 0.32
    computes all of it (sampling_params.py skip_reading_prefix_cache).
    """
    decoded = question.decoded
    if decoded.get("prompt_logprobs") is not None:
        return False
    if not decoded.get("echo"):
        return True
    # Then it takes those of the answer for the prompt's, too: 0 of them, where a chat does not say, or says null.
    return question.route.prompt == "completion" and decoded.get("logprobs") is None


def is_one_of_many(question: ParsedRequest) -> bool:
    """Whether an engine prefills the prompt several times, and tells of one of them what it had cached."""
    return question.sequences > 1 or bool(question.decoded.get("use_beam_search"))


def sized(roster: Roster, question: ParsedRequest, tokens: Tokens) -> int:
    """How many tokens an engine of these would prefill at most. What is longer than it takes it refuses at once.

    Where nobody could tokenize the prompt: four bytes a token, near enough to compare replicas by their queues. Behind
    as many as a book has everybody else would be refused.
    """
    if not question.route.computes:
        return 0
    ids, most = tokens.ids, roster.max_model_len
    if ids is not None:
        found = len(ids)
    else:
        found = tokens.approximation.tokens if tokens.approximation is not None else question.size_bytes // 4
        # A batch is several prompts, each as long as one may be.
        if question.route.prompt == "none":
            return found
        batch = question.decoded.get("prompt")
        if isinstance(batch, list):
            most *= max(1, len(batch))
    return most if 0 < most < found else found


def match(feeds: KvFeeds, prompt: HashedRequest) -> PrefixMatch:
    """Every replica's contiguous cached blocks, at its own block size, and salted where its prompts are."""
    ask, salted_at = prompt.request, prompt.salted_workers
    of = partial(feeds.match_approximate, conversation=ask.first_blocks) if ask.is_approximate else feeds.match
    if len(prompt.chains) == 1 and not prompt.salted_chains:
        ((block_size, chain),) = prompt.chains.items()
        return of(ask.base_model, block_size, chain)
    found = [of(ask.base_model, block_size, chain) for block_size, chain in prompt.chains.items()]
    if prompt.salted_chains:
        # What a salted worker has of unsalted prompts came from elsewhere, and no request finds it.
        found = [_of(matched, lambda worker: worker not in salted_at) for matched in found]
        salted = [feeds.match(ask.base_model, block_size, chain) for block_size, chain in prompt.salted_chains.items()]
        found += [_of(matched, salted_at.__contains__) for matched in salted]
    whole = PrefixMatch()
    for matched in found:
        whole = PrefixMatch(
            {**whole.depths, **matched.depths}, {**whole.lower, **matched.lower}, {**whole.ranks, **matched.ranks}
        )
    return whole


def _of(matched: PrefixMatch, is_one: Callable[[WorkerId], bool]) -> PrefixMatch:
    """The match of some of the workers."""
    return PrefixMatch(
        {worker: blocks for worker, blocks in matched.depths.items() if is_one(worker)},
        {worker: blocks for worker, blocks in matched.lower.items() if is_one(worker)},
        {worker: rank for worker, rank in matched.ranks.items() if is_one(worker)},
    )


async def dispatch(
    services: Services,
    caller: Caller,
    target: RequestTarget,
    question: ParsedRequest,
    prompt: HashedRequest,
    tokens_from: Source,
    *,
    is_again: bool = False,
) -> DispatchedRequest:
    """match and decide, when there is room: the request is then on its way.

    is_again  it was sent before, and failed there
    raises  NoReplica, Saturated and Displaced, see RequestQueue.admit
    """
    began_at = services.clock()
    begin = partial(
        DispatchedRequest, services, question.request_id, target, prompt, tokens_from, began_at, question.streamed
    )
    if is_again or not question.route.computes:
        # One that failed somewhere has waited its turn already: what failed it must not cost it another.
        return begin(services.scheduler.decide(prompt, began_at))
    adapter = target.adapter
    ticket = QueuedRequest(
        hashed=prompt,
        tenant=caller.tenant or "",
        adapter=adapter.lora_id if adapter else "",
        weight=_weight(adapter),
        priority=question.priority,
        size_bytes=question.size_bytes,
        deadline_at=question.deadline_at,
    )
    return await services.queue.admit(ticket, begin)


def answered(services: Services, caller: Caller, target: RequestTarget, decode_s: float) -> None:
    """An answer is over that took its engine so many seconds besides its prefill: its tenant has had them."""
    waiting, adapter = services.scheduler.queue, target.adapter
    if decode_s and waiting:
        waiting.charge_answer(caller.tenant or "", adapter.lora_id if adapter else "", _weight(adapter), decode_s)


def _weight(adapter: RoutableAdapter | None) -> float:
    return 1.0 if adapter is None else 2.0 ** max(-_MOST_PRIORITY, min(_MOST_PRIORITY, adapter.priority))


def _session(named: str) -> str:
    return named if len(named) <= _LONGEST_SESSION else xxh3_128_hexdigest(named.encode())


def shown_cached_tokens(services: Services, caller: Caller, flight: DispatchedRequest) -> int:
    """The predicted hit as far as this caller's tenant has earned it: a hit on a neighbour's prompt would betray it."""
    cached_tokens = flight.predicted_tokens
    if caller.tenant is None or flight.prompt.request.is_approximate:
        return cached_tokens
    own_blocks = services.cache_disclosure.disclosed_depth(caller.tenant, flight.hashes)
    services.cache_disclosure.record_prompt(caller.tenant, flight.hashes)
    return min(cached_tokens, own_blocks * flight.replica.block_size)


def request_id(given: str | None) -> str:
    """The client's own where it is a plain one, else a new one."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else f"{getrandbits(128):032x}"
