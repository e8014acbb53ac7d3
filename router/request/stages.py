"""resolve, authorise, tokenize, hash, match and decide: the stages between a parsed request and its engine.

One function a stage. `RequestRun` (run.py) calls them in order.
"""

from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from lorafleet.http_server.batches import leave_batch
from lorafleet.identity import BlockHash, adapter_salt, block_hashes, root_hash
from lorafleet.keys.roles import Caller
from lorafleet.kv.pictures import picture_blocks
from orchestrator.model.catalog import CatalogAdapter
from router.core.errors import ModelNotFound
from router.core.fleet import Excluded, Incarnation, Roster, RouterFleet
from router.core.kv.index import WorkerId
from router.core.queue.queued_request import QueuedRequest
from router.core.resolve import RequestTarget, resolve, whole_name
from router.core.schedule.request import NOTHING, HashChains, HashedRequest, PrefixMatch, RoutingRequest
from router.core.schedule.snapshot import length_rejection
from router.core.scheduler import first_blocks
from router.kv.feeds import KvFeeds
from router.protocols.stored_responses import adapter_gone_error, worker_gone_error, worker_of_response
from router.request.cache_salt import cache_salt_of, is_own_salt, owner_name, refuse_media_names
from router.request.dispatched import begin_dispatched, end_dispatched
from router.request.parsed_request import ParsedRequest, reads_prefix_cache
from router.request.record import DispatchedRequest
from router.request.services import Services
from router.tokenizing.approximate import approximate_prompt, approximate_root
from router.tokenizing.tokens import NO_TOKENS, Tokens

# Each step of an adapter's priority doubles its share of its tenant's time, up to this many steps.
_MAX_PRIORITY = 3
# The fields that bound the answer's length, in chats, completions, messages and responses.
_ANSWER_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

_decode_number = msgspec.json.Decoder(int).decode


def resolve_target(services: Services, caller: Caller, request: ParsedRequest) -> RequestTarget:
    """resolve and authorise: the base model and adapter that the request names.

    An adapter that the caller may not use is unknown to it: ModelNotFound, as for a name that does not exist.
    Raises CatalogUnavailable before a catalog was read, and NoReplica while no worker has reported.
    """
    if not services.discovery.has_catalog:
        raise services.discovery.catalog_unavailable()
    model, lora_id = request.decoded.get("model"), request.lora_id
    asked = lora_id if model is None else model
    if caller.namespace:
        model, lora_id = whole_names(services.discovery.fleet, caller, model, lora_id)
    try:
        target = resolve(
            services.discovery.fleet,
            model=model,
            lora_id=lora_id,
            field=request.adapter_field,
            visible=lambda adapter: caller.may_use(adapter.tenants),
            rng=services.scheduler.rng,
            session=request.session.name,
        )
    except ModelNotFound:
        services.discovery.check_any_report()
        raise
    if caller.namespace and isinstance(asked, str) and asked:
        target = msgspec.structs.replace(target, asked=asked)  # an answer has the name that the client wrote
    # Routes that run no adapter (`/tokenize`) take its name: they are the base model's, and nothing is loaded.
    return target if request.route.adapter == "runs" else RequestTarget(target.base_model, None, target.asked)


def whole_names(fleet: RouterFleet, caller: Caller, model: object, lora_id: object) -> tuple[object, object]:
    """`model` and `lora_id` as whole names. Of a request with a `lora_id`, `model` shadows no base model."""

    def whole(name: object, *, may_shadow_base: bool) -> object:
        """The whole name; anything but a text, and an empty one, stays as it is."""
        if not isinstance(name, str) or not name:
            return name
        return whole_name(fleet, caller.namespace, name, may_shadow_base=may_shadow_base)

    may_shadow = caller.may_shadow_base and not lora_id
    return whole(model, may_shadow_base=may_shadow), whole(lora_id, may_shadow_base=False)


def keeper_of_previous(
    services: Services, caller: Caller, request: ParsedRequest, target: RequestTarget
) -> Incarnation | None:
    """The engine that keeps the earlier response, read from `previous_response_id`; None: the request names none.

    raises  ResponseNotFound: no router made the id, it is another tenant's, or its worker or adapter is gone
    """
    previous = request.decoded.get("previous_response_id")
    if not isinstance(previous, str):
        return None  # none, or one that its engine refuses
    worker = worker_of_response(previous, tenant=caller.tenant, param="previous_response_id")
    for replica in services.discovery.fleet.roster(target.base_model).replicas:
        if replica.id == worker:
            adapter = target.adapter
            if adapter is not None and adapter.engine_name and adapter.engine_name not in replica.residents:
                # Nothing loads the adapter there for this request, so that sending it again would not help.
                raise adapter_gone_error(previous, worker, adapter.lora_id, param="previous_response_id")
            return replica.incarnation
    raise worker_gone_error(previous, worker, param="previous_response_id")


async def tokenize(services: Services, caller: Caller, target: RequestTarget, request: ParsedRequest) -> Tokens:
    """The prompt's token ids, or an approximation where only its engine can tokenize. May leave the batch, to wait."""
    kind = request.route.prompt
    began_at = services.clock()
    replica = services.discovery.fleet.base_models.get(target.base_model) if kind != "none" else None
    if replica is None:
        return _or_approximation(services, request, NO_TOKENS, began_at)
    found = services.tokenizers.tokenize(
        request.decoded,
        base_model=target.base_model,
        engine_url=replica.engine_url,
        kind=kind,
        max_model_len=services.discovery.fleet.roster(target.base_model).max_model_len,
        model_path=replica.model_path,
        owner=owner_name(caller, services.discovery.fleet.cache_of(target.adapter)),
    )
    if not isinstance(found, Tokens):
        await leave_batch()
        found = await found()
    return _or_approximation(services, request, found, began_at)


def _or_approximation(services: Services, request: ParsedRequest, found: Tokens, began_at: float) -> Tokens:
    """These tokens; where they have no ids, an approximation of the prompt. Adds the time to the tokenize metric."""
    route = request.route
    if found.ids is None and route.computes and services.config.tokenizer != "off":
        made = approximate_prompt(request.fields, request.decoded, request.size_bytes)
        if made is not None:
            found = Tokens(None, "approximate", approximation=made)
    if found is not NO_TOKENS or route.prompt != "none":
        services.metrics.tokenize.labels(found.source).observe(services.clock() - began_at)
    return found


def servable_now(
    services: Services, target: RequestTarget, request: ParsedRequest, tokens: Tokens, excluded: Excluded
) -> RequestTarget | None:
    """The target, with its adapter as the catalog has it now, where a replica may serve it; None: it must wait.

    excluded  the replicas that may not get this request now, see `exclusions`
    """
    fleet, adapter = services.discovery.fleet, target.adapter
    roster = fleet.roster(target.base_model)
    unfit = excluded | _too_short_on_uneven_roster(roster, target, request, tokens) if roster.is_uneven else excluded
    if adapter is None:
        # A base model that failed the request waits for its replica to come back, see `wait_for_adapter`.
        return target if not excluded and _has_able(roster, unfit) else None
    resident = fleet.resident_adapter(adapter.lora_id, unfit)
    if resident is adapter and not target.digest:
        return target
    # Other bytes than the request names are an error that `wait_for_adapter` raises.
    has_other_bytes = resident is not None and not (resident.digest or "").startswith(target.digest)
    return None if resident is None or has_other_bytes else target.with_adapter(resident)


async def wait_for_adapter(
    services: Services,
    caller: Caller,
    target: RequestTarget,
    request: ParsedRequest,
    tokens: Tokens,
    excluded: Callable[[], Excluded],
    *,
    is_displaced: bool = False,
) -> RequestTarget:
    """The target, once a replica that may serve it holds its adapter: waits for a cold start, or a starting replica.

    A request that must wait leaves its batch.

    tokens        of the prompt: a replica that takes fewer does not count
    excluded      the replicas that may not get this request now, see `exclusions`
    is_displaced  every replica went away while the request was queued
    raises        see `ColdStarts.until_resident` and `until_started`
    """
    if not (is_displaced and target.adapter is None):
        servable = servable_now(services, target, request, tokens, excluded())
        if servable is not None:
            return servable

    def unfit() -> Excluded:
        """The excluded replicas, and those too short for this request."""
        roster = services.discovery.fleet.roster(target.base_model)
        return excluded() | _too_short_on_uneven_roster(roster, target, request, tokens)

    await leave_batch()
    if target.adapter is None:
        was_admitted = is_displaced or bool(excluded())
        await services.cold_starts.until_started(
            target.base_model,
            unfit,
            tenant=caller.tenant or "",
            size_bytes=request.size_bytes,
            deadline_at=request.deadline_at,
            grace_s=services.config.failover_wait_s if was_admitted else 0.0,
        )
        return target
    adapter = await services.cold_starts.until_resident(
        target.adapter.lora_id,
        unfit,
        tenant=caller.tenant or "",
        size_bytes=request.size_bytes,
        deadline_at=request.deadline_at,
        is_displaced=is_displaced,
    )
    return target.with_adapter(adapter)


def _has_able(roster: Roster, unfit: Excluded) -> bool:
    """Whether some replica may serve the base model to this request."""
    able = roster.able("")
    return any(roster.replicas[i].incarnation not in unfit for i in able) if unfit else bool(able)


async def wait_for_inspection(services: Services, caller: Caller, lora_id: str, request: ParsedRequest) -> None:
    """Wait until an adapter whose base model is not known yet is inspected and loaded; see `until_resident`."""
    await services.cold_starts.until_resident(
        lora_id, tenant=caller.tenant or "", size_bytes=request.size_bytes, deadline_at=request.deadline_at
    )


def _too_short_on_uneven_roster(
    roster: Roster, target: RequestTarget, request: ParsedRequest, tokens: Tokens
) -> Excluded:
    """Replicas whose `max_model_len` is too short for this request, where a longer one exists."""
    adapter = target.adapter
    if tokens.ids is None or not roster.is_uneven:
        return frozenset()
    engine_name = (adapter.engine_name or "") if adapter is not None else ""
    ask = RoutingRequest(
        target.base_model, engine_name, 0, total_tokens=_total_tokens(request, len(tokens.ids), roster)
    )
    return frozenset([r.incarnation for i, r in enumerate(roster.replicas) if length_rejection(roster, i, ask)])


def hash_prompt(
    services: Services,
    caller: Caller,
    target: RequestTarget,
    request: ParsedRequest,
    tokens: Tokens,
    excluded: Excluded = frozenset(),
) -> HashedRequest:
    """hash: the routing request, with block hashes of the prompt for every block size in the fleet.

    excluded  replicas that may not get the request
    raises    BadBody, see `cache_salt_of` and `refuse_media_names`
    """
    adapter, approximated = target.adapter, tokens.approximation
    roster = services.discovery.fleet.roster(target.base_model)
    engine_name = (adapter.engine_name or "") if adapter is not None else ""
    chains: HashChains = NOTHING
    salted: HashChains = NOTHING
    conversation = 0
    cache = services.discovery.fleet.cache_of(adapter)
    salt = cache_salt_of(request.route, caller, cache, request.decoded.get("cache_salt"))
    if is_own_salt(salt):
        refuse_media_names(request.decoded)
    if tokens is not NO_TOKENS and reads_prefix_cache(request):
        root = root_hash(target.base_model, engine_name, salt)
        if approximated is not None:
            root = approximate_root(root)
            conversation = approximated.conversation_hash(root)
            chains = {block_size: approximated.block_hashes(block_size, root) for block_size in roster.block_sizes}
        elif tokens.ids is not None:
            chains = _hash_chains(services, tokens, root, roster.block_sizes)
            if roster.salted and (engine_name or salt):
                root = root_hash(target.base_model, engine_name, adapter_salt(engine_name, salt))
                salted = _hash_chains(services, tokens, root, roster.salted_block_sizes)
    prompt_tokens = prefill_tokens(roster, request, tokens)
    total_tokens = _total_tokens(request, len(tokens.ids), roster) if tokens.ids is not None and roster.is_uneven else 0
    ask = RoutingRequest(
        target.base_model,
        engine_name,
        prompt_tokens,
        excluded,
        request.session.name,
        conversation or first_blocks(chains),
        target.only,
        request.sequences,
        total_tokens,
        approximated is not None,
    )
    return HashedRequest(ask, chains, salted, roster.salted if salted else frozenset(), salt, request.session)


def _hash_chains(services: Services, tokens: Tokens, root: BlockHash, block_sizes: Iterable[int]) -> HashChains:
    """Block size -> chain of block hashes of these token ids, from the cache where it has them."""
    assert tokens.ids is not None
    if tokens.pictures:
        extra, ids = partial(picture_blocks, tokens.pictures), tokens.ids
        return {size: block_hashes(ids, block_size=size, root=root, extra=extra(size)) for size in block_sizes}
    return {
        block_size: services.chain_cache.chain(
            tokens.ids, block_size=block_size, root=root, seen=tokens.seen, kept=tokens.kept
        )
        for block_size in block_sizes
    }


def _total_tokens(request: ParsedRequest, prompt_tokens: int, roster: Roster) -> int:
    """Tokens that a request may come to: its prompt and the answer that it asks for, or one token.

    At most what the longest replica takes: such a replica cuts the answer, or says that the prompt is too long.
    """
    wanted = [_integer_or_zero(request.fields.get(name)) for name in _ANSWER_TOKENS]
    sampled = request.decoded.get("max_tokens")  # of `/inference/v1/generate`; elsewhere this is not decoded
    wanted.append(sampled if isinstance(sampled, int) else 0)
    return min(prompt_tokens + max(1, next(filter(None, wanted), 1)), roster.max_model_len)


def _integer_or_zero(raw: msgspec.Raw | None) -> int:
    """The integer in this field; 0 where it is missing or no integer."""
    try:
        return 0 if raw is None else _decode_number(raw)
    except ValueError:
        return 0  # for the engine to refuse


def prefill_tokens(roster: Roster, request: ParsedRequest, tokens: Tokens) -> int:
    """Tokens that an engine prefills for this request, at most `max_model_len`: longer prompts are refused at once.

    Without token ids: four bytes a token, near enough to compare the replicas' queues.
    """
    if not request.route.computes:
        return 0
    ids, most = tokens.ids, roster.max_model_len
    if ids is not None:
        found = len(ids)
    else:
        found = tokens.approximation.tokens if tokens.approximation is not None else request.size_bytes // 4
        # A batch is several prompts, each as long as `max_model_len`.
        if request.route.prompt in ("none", "input", "token_ids"):
            return found
        batch = request.decoded.get("prompt")
        if isinstance(batch, list):
            most *= max(1, len(batch))
    return most if 0 < most < found else found


def match(feeds: KvFeeds, prompt: HashedRequest) -> PrefixMatch:
    """match: contiguous cached blocks of each replica, by that replica's block size and, where it has one, salt."""
    ask, salted_at = prompt.request, prompt.salted_workers
    of = partial(feeds.match_approximate, conversation=ask.first_blocks) if ask.is_approximate else feeds.match
    if len(prompt.chains) == 1 and not prompt.salted_chains:
        ((block_size, chain),) = prompt.chains.items()
        return of(ask.base_model, block_size, chain)
    found = [of(ask.base_model, block_size, chain) for block_size, chain in prompt.chains.items()]
    if prompt.salted_chains:
        # Blocks of unsalted prompts at a salted worker came from elsewhere, and no request finds them.
        found = [_match_of_workers(matched, lambda worker: worker not in salted_at) for matched in found]
        salted = [feeds.match(ask.base_model, block_size, chain) for block_size, chain in prompt.salted_chains.items()]
        found += [_match_of_workers(matched, salted_at.__contains__) for matched in salted]
    whole = PrefixMatch()
    for matched in found:
        whole = PrefixMatch(
            {**whole.depths, **matched.depths}, {**whole.lower, **matched.lower}, {**whole.ranks, **matched.ranks}
        )
    return whole


def _match_of_workers(matched: PrefixMatch, is_one: Callable[[WorkerId], bool]) -> PrefixMatch:
    """The part of a match that is about the workers for which `is_one` is true."""
    return PrefixMatch(
        {worker: blocks for worker, blocks in matched.depths.items() if is_one(worker)},
        {worker: blocks for worker, blocks in matched.lower.items() if is_one(worker)},
        {worker: rank for worker, rank in matched.ranks.items() if is_one(worker)},
    )


async def dispatch(  # noqa: PLR0917  (for each request, and names take time)
    services: Services,
    caller: Caller,
    target: RequestTarget,
    request: ParsedRequest,
    prompt: HashedRequest,
    tokens: Tokens,
    began_at: float,
    *,
    is_again: bool = False,
) -> DispatchedRequest:
    """match and decide: the request, counted at its replica, as soon as that has room.

    A request that computes nothing is never queued.

    began_at  by Services.clock: now
    is_again  an attempt failed before: the request has waited its turn, and is not queued again
    raises    NoReplica, Saturated and Displaced, see RequestQueue; BudgetExhausted
    """
    tenant, adapter = caller.tenant or "", target.adapter
    begin = partial(
        begin_dispatched, services, request.request_id, tenant, target, prompt, tokens, began_at, request.streamed
    )
    if is_again or not request.route.computes:
        return begin(services.scheduler.decide(prompt, began_at))
    ticket = QueuedRequest(
        hashed=prompt,
        tenant=tenant,
        adapter=adapter.lora_id if adapter else "",
        weight=fair_weight(adapter),
        priority=request.priority,
        size_bytes=request.size_bytes,
        deadline_at=request.deadline_at,
    )
    limited = caller.limited
    if limited:  # it may have waited for its adapter, or for a pause
        services.budgets.check_again(limited, services.clock())
    decision = services.queue.decide_or_enqueue(ticket)
    if decision is not None:
        return begin(decision)
    dispatched: DispatchedRequest = await services.queue.wait(
        ticket,
        begin,
        partial(end_dispatched, services),
        lambda: services.budgets.check_again(limited, services.clock()),
    )
    what = "an adapter slot" if ticket.wants_slot else "room"
    dispatched.queued_for = f"{what} at worker {dispatched.replica.id}"
    return dispatched


def fair_weight(adapter: CatalogAdapter | None) -> float:
    """The adapter's share of its tenant's time: 1.0 at priority 0, doubled by each step."""
    return 1.0 if adapter is None else 2.0 ** max(-_MAX_PRIORITY, min(_MAX_PRIORITY, adapter.priority))
