"""read -> resolve -> tokenize -> hash -> match -> decide, one function a stage, and what they hand on."""

import asyncio
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import aiohttp
import msgspec
from starlette.types import Message, Receive

from lorafleet.auth import Caller, Keys
from lorafleet.kv.blocks import BlockHash, block_hashes, root_hash
from router.cold import ColdStarts
from router.config import RouterSettings
from router.core.credit import Credit
from router.core.errors import BadBody, BodyTooLarge, CatalogUnavailable
from router.core.fleet import Excluded, Replica
from router.core.index import WorkerId
from router.core.load import InFlight, LoadBook
from router.core.policy import Ask, Costs, Decision, decide
from router.core.resolve import Target, resolve
from router.discovery import Discovery
from router.dress import Body, refuse_steering
from router.kv_events import Feeds
from router.metrics import Metrics
from router.tokens import FIELDS, NO_TOKENS, Tokenizers, Tokens
from router.usage import Usage

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# A just-routed prompt counts as stored until its first token, plus this: then the engine's events tell.
_SPECULATE_S = 2.0
_KEPT_DECISIONS = 1000
# What a decision reads of a body; the rest is sent on without being parsed.
_DECODED_FIELDS = FIELDS | {"model", "lora_id", "stream", "cache_salt", "vllm_xargs"}

_decode_body = msgspec.json.Decoder(Body).decode
_decode_any = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Question:
    """A request as read: the raw fields to send on, and those that were decoded to decide on."""

    request_id: str
    fields: Body
    decoded: Mapping[str, Any]
    streamed: bool
    read_at: float


@dataclass(frozen=True, slots=True)
class Routed:
    """A decision with what it was made from, and when (wall clock)."""

    request_id: str
    at: float
    target: Target
    ask: Ask
    tokens: Tokens
    hashes: tuple[BlockHash, ...]
    decision: Decision

    @property
    def engine_model(self) -> str:
        """What the engine calls the thing to run."""
        return self.ask.engine_name or self.target.base_model


@dataclass(slots=True)
class Parts:
    """What the stages work with; built once by app.py."""

    config: RouterSettings
    keys: Keys
    discovery: Discovery
    tokenizers: Tokenizers
    feeds: Feeds
    load: LoadBook
    cold: ColdStarts
    usage: Usage
    metrics: Metrics
    session: aiohttp.ClientSession
    rng: Random
    costs: Costs = field(default_factory=Costs)
    credit: Credit = field(default_factory=Credit)
    clock: Callable[[], float] = time.monotonic
    decisions: deque[Routed] = field(default_factory=lambda: deque(maxlen=_KEPT_DECISIONS))
    stopping: bool = False


async def read(parts: Parts, request_id: str, headers: Mapping[str, str], receive: Receive) -> Question:
    """The request's body, bounded and parsed no deeper than a decision needs."""
    raw = await _whole_body(receive, headers, parts.config.max_body_bytes)
    read_at = parts.clock()
    try:
        fields = _decode_body(raw)
        decoded = {name: _decode_any(value) for name, value in fields.items() if name in _DECODED_FIELDS}
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadBody(f"the body is not a JSON object: {exc}") from exc
    except RecursionError as exc:
        raise BadBody("the body is nested too deeply; a request needs a dozen levels") from exc
    refuse_steering(fields, decoded.get("vllm_xargs"))
    return Question(request_id, fields, decoded, decoded.get("stream") is True, read_at)


def resolve_target(parts: Parts, caller: Caller, question: Question) -> Target:
    """resolve and authorise: what the caller may not use does not exist for it."""
    if not parts.discovery.has_catalog:
        raise CatalogUnavailable("this router has not heard from the orchestrator yet", retry_after_s=2.0)
    return resolve(
        parts.discovery.fleet,
        model=question.decoded.get("model"),
        lora_id=question.decoded.get("lora_id"),
        visible=lambda adapter: caller.may_use(adapter.tenants),
        rng=parts.rng,
    )


async def tokenize(parts: Parts, target: Target, question: Question) -> Tokens:
    """The prompt's token ids, or none: a prompt that only its engine can tokenize is routed without a KV term."""
    replica = parts.discovery.fleet.base_models.get(target.base_model)
    if replica is None:
        return NO_TOKENS
    began_at = parts.clock()
    tokens = await parts.tokenizers.ids(question.decoded, base_model=target.base_model, engine_url=replica.engine_url)
    parts.metrics.tokenize.labels(tokens.source).observe(parts.clock() - began_at)
    return tokens


async def warm(parts: Parts, target: Target, excluded: Excluded) -> Target:
    """The target with an adapter that some replica holds; waits for a cold one, and for one whose holders died."""
    if target.adapter is None:
        if excluded:
            await _until_back(parts, target.base_model, excluded)
        return target
    adapter = await parts.cold.until_resident(target.adapter.lora_id, excluded)
    return Target(adapter.base_model or target.base_model, adapter, target.asked)


async def _until_back(parts: Parts, base_model: str, excluded: Excluded) -> None:
    """Wait for a replica that has not failed this request, or for one that did to have started again."""

    def is_back() -> bool:
        replicas = parts.discovery.fleet.of(base_model)
        return any(r.state == "ready" and r.incarnation not in excluded for r in replicas)

    await parts.discovery.changes.until(is_back, timeout_s=parts.config.failover_wait_s)


def route(parts: Parts, target: Target, question: Question, tokens: Tokens, excluded: Excluded) -> Routed:
    """hash, match and decide; raises NoReplica."""
    began_at = parts.clock()
    ask = asked(target, question, tokens, excluded)
    replicas = parts.discovery.fleet.of(target.base_model)
    hashes, depths = _match(parts, ask, question, tokens, replicas)
    decision = decide(
        ask,
        replicas,
        depths,
        lambda replica: parts.load.own(replica.id, replica.report),
        rho=parts.load.utilisation(target.base_model, len(replicas), began_at),
        costs=parts.costs,
        rng=parts.rng,
        now=began_at,
    )
    parts.metrics.decide.observe(parts.clock() - began_at)
    mine = hashes.get(decision.replica.block_size, ())
    return Routed(question.request_id, time.time(), target, ask, tokens, mine, decision)


def asked(target: Target, question: Question, tokens: Tokens, excluded: Excluded = frozenset()) -> Ask:
    """What the choice of a replica depends on."""
    engine_name = (target.adapter.engine_name or "") if target.adapter else ""
    return Ask(target.base_model, engine_name, _prompt_tokens(question, tokens), excluded)


def _match(
    parts: Parts, ask: Ask, question: Question, tokens: Tokens, replicas: list[Replica]
) -> tuple[dict[int, tuple[BlockHash, ...]], dict[WorkerId, int]]:
    """Block hashes per block size in the fleet, and every replica's contiguous depth at its own block size."""
    hashes: dict[int, tuple[BlockHash, ...]] = {}
    depths: dict[WorkerId, int] = {}
    if tokens.ids is None:
        return hashes, depths
    salt = question.decoded.get("cache_salt")
    root = root_hash(ask.base_model, ask.engine_name, salt if isinstance(salt, str) else "")
    # 0: an engine that has not said yet, because it is still starting.
    for block_size in {replica.block_size for replica in replicas} - {0}:
        try:
            chain = block_hashes(tokens.ids, block_size=block_size, root=root)
        except (OverflowError, TypeError):
            continue  # ids given by the client that are no token ids: the engine will say so
        hashes[block_size] = tuple(chain)
        found = parts.feeds.index(ask.base_model, block_size).match(chain)
        depths |= {r.id: found[r.id] for r in replicas if r.block_size == block_size and r.id in found}
    return hashes, depths


def _prompt_tokens(question: Question, tokens: Tokens) -> int:
    if tokens.ids is not None:
        return len(tokens.ids)
    # Nobody could tokenize it: four bytes a token, near enough to compare replicas by their queues.
    return sum(len(question.fields[name]) for name in ("messages", "prompt", "input") if name in question.fields) // 4


async def _whole_body(receive: Receive, headers: Mapping[str, str], most_bytes: int) -> bytes:
    too_large = BodyTooLarge(f"the body is larger than {most_bytes} bytes; send less, or raise max_body_bytes")
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length) > most_bytes:
        raise too_large
    body = bytearray()
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise BadBody("the client left before its body was complete")
        body += message.get("body", b"")
        if len(body) > most_bytes:
            raise too_large
        if not message.get("more_body"):
            return bytes(body)


@dataclass(slots=True)
class Flight:
    """A request at a replica: its load, its speculative blocks and its use, each given back exactly once."""

    parts: Parts
    routed: Routed
    load: InFlight
    release: Callable[[], None]
    released: bool = False

    @classmethod
    def begin(cls, parts: Parts, routed: Routed) -> "Flight":
        replica, score = routed.decision.replica, routed.decision.score
        now = parts.clock()
        # A thousand long prompts would be a gigabyte; explaining a decision needs their lengths alone.
        parts.decisions.append(replace(routed, tokens=replace(routed.tokens, ids=None), hashes=()))
        index = parts.feeds.index(replica.base_model, replica.block_size)
        held = index.hold(replica.id, routed.hashes)
        flight = parts.load.begin(replica.id, routed.ask.engine_name, score.prefill_s, now)
        parts.load.admit(replica.base_model, score.prefill_s + score.adapter_s, now)
        parts.usage.dispatched(replica.id, routed.engine_model, len(routed.tokens.ids or ()), now)
        parts.metrics.in_flight.inc()
        parts.metrics.predicted_tokens.inc(score.cached_tokens)
        parts.metrics.prompt_tokens.inc(len(routed.tokens.ids or ()))
        return cls(parts, routed, flight, lambda: index.release(held))

    def first_token(self) -> None:
        """Prefill is over; the engine's own events take over from our guess in a moment."""
        self.parts.load.first_token(self.load)
        self._release_later()

    def end(self) -> None:
        """Over, however it ended; repeats change nothing."""
        if self.load.ended:
            return
        self.parts.load.end(self.load, self.parts.clock())
        self.parts.metrics.in_flight.dec()
        if not self.released:
            self.released = True
            self.release()

    def _release_later(self) -> None:
        if not self.released:
            self.released = True
            asyncio.get_running_loop().call_later(_SPECULATE_S, self.release)


def shown_cached_tokens(parts: Parts, caller: Caller, routed: Routed) -> int:
    """The predicted hit as far as this caller's tenant has earned it: a hit on a neighbour's prompt would betray it."""
    cached_tokens = routed.decision.score.cached_tokens
    if caller.tenant is None:
        return cached_tokens
    own_blocks = parts.credit.depth(caller.tenant, routed.hashes)
    parts.credit.sent(caller.tenant, routed.hashes)
    return min(cached_tokens, own_blocks * routed.decision.replica.block_size)


def request_id(headers: Mapping[str, str]) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
