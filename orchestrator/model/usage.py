"""Routers' reports: what they counted of requests that ended, and how each router is now.

A request is counted once, when it has ended, in the row of its adapter, worker and key. Demand, rollouts and the
console all read these counts. Core reads them, too: this module needs the standard library alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Protocol, Self, TypeVar

from annotated_types import Ge, Le, MaxLen

_DOCUMENT: Final = {"extra": "ignore", "use_attribute_docstrings": True}
_MOST_CODES: Final = 50


class _FirstFault:
    """Marks a list or dict of which only the first fault is reported: listing a million would take seconds."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """The schema of the type, as pydantic's `FailFast` has it."""
        return {**handler(source), "fail_fast": True}


Count = Annotated[int, Ge(0), Le(1 << 62)]
Seconds = Annotated[float, Ge(0), Le(1e12)]
"""The bounds of counts and sums are above what any fleet reaches: a router that reports more has miscounted."""
Name = Annotated[str, MaxLen(300)]
BucketCounts = Annotated[dict[Annotated[int, Ge(0), Le(1000)], Count], MaxLen(200)]
"""lorafleet.telemetry.histogram bucket -> count"""
CircuitState = Literal["open", "half_open"]
NamedCounts = Annotated[dict[Name, Count], MaxLen(10_000)]


class Addable(Protocol):
    """What adds up."""

    def add(self, other: Self, /) -> None:
        """Add another one to this one."""


A = TypeVar("A", bound=Addable)


def sum_into(whole: A, parts: Iterable[A]) -> A:
    """`whole`, mostly a new one, with all of these added; the parts stay as they are."""
    for part in parts:
        whole.add(part)
    return whole


@dataclass(slots=True, kw_only=True)
class RequestCounts:
    """Counts of requests that ended. Those of two times, routers, adapters or workers add up, in any order."""

    __pydantic_config__ = _DOCUMENT

    requests: Count = 0
    sent: Count = 0
    """requests that an engine had"""
    codes: Annotated[dict[Name, Count], MaxLen(100)] = field(default_factory=dict)
    """answers that failed, as "<status> <code>" -> count; what clients broke off is "499" """
    prompt_tokens: Count = 0
    prompt_cached_tokens: Count = 0
    """of `prompt_tokens`, those that engines found cached, compared or not"""
    output_tokens: Count = 0
    predicted_tokens: Count = 0
    """of `compared_tokens` prompt tokens, those that were predicted to be cached"""
    cached_tokens: Count = 0
    """of `compared_tokens` prompt tokens, those that engines found cached"""
    compared_tokens: Count = 0
    lost_tokens: Count = 0
    """of `sampled_tokens` prompt tokens of private caches, those that only other callers' caches held"""
    sampled_tokens: Count = 0
    waited_s: Seconds = 0
    """in the router's queue"""
    cold_starts: Count = 0
    """requests that waited for their adapter to load, `cold_s` in all"""
    cold_s: Seconds = 0
    first_token: BucketCounts = field(default_factory=dict)
    """streamed answers, by the time to their first token, `first_token_sum_s` in all"""
    first_token_sum_s: Seconds = 0
    whole: BucketCounts = field(default_factory=dict)
    """whole answers, by their duration"""
    decode_s: Seconds = 0
    """of streamed answers, from their first token to their last, of `decode_tokens` further tokens"""
    decode_tokens: Count = 0
    work_s: Seconds = 0
    """seconds of engine work: prefill, and each request's share of its engine's other time"""
    decode_work_s: Seconds = 0
    """of `work_s`, those beyond the prefill"""
    engine_errors: Count = 0
    """requests that an engine failed, also where another one answered: a 5xx, a broken stream, an engine that died"""
    engine_first_token_s: Seconds = 0
    """of the answers in `first_token`, the time from dispatch to first token, in all"""

    def add(self, other: "RequestCounts") -> None:
        """Add other counts to these."""
        self.requests += other.requests
        self.sent += other.sent
        self.prompt_tokens += other.prompt_tokens
        self.prompt_cached_tokens += other.prompt_cached_tokens
        self.output_tokens += other.output_tokens
        self.predicted_tokens += other.predicted_tokens
        self.cached_tokens += other.cached_tokens
        self.compared_tokens += other.compared_tokens
        self.lost_tokens += other.lost_tokens
        self.sampled_tokens += other.sampled_tokens
        self.waited_s += other.waited_s
        self.cold_starts += other.cold_starts
        self.cold_s += other.cold_s
        self.first_token_sum_s += other.first_token_sum_s
        self.decode_s += other.decode_s
        self.decode_tokens += other.decode_tokens
        self.work_s += other.work_s
        self.decode_work_s += other.decode_work_s
        self.engine_errors += other.engine_errors
        self.engine_first_token_s += other.engine_first_token_s
        for bucket, count in other.first_token.items():
            self.first_token[bucket] = self.first_token.get(bucket, 0) + count
        for bucket, count in other.whole.items():
            self.whole[bucket] = self.whole.get(bucket, 0) + count
        for code, count in other.codes.items():
            self.add_code(code, count)

    def add_code(self, code: str, count: int = 1) -> None:
        """Count failed answers of this code; of too many codes the further ones are `other`."""
        if code not in self.codes and len(self.codes) >= _MOST_CODES:
            code = "other"
        self.codes[code] = self.codes.get(code, 0) + count

    @property
    def errors(self) -> int:
        """Requests that failed: a 5xx, or an answer that broke off."""
        return sum(count for code, count in self.codes.items() if code.startswith(("5", "2")))

    @property
    def refusals(self) -> int:
        """Requests that were refused for what they were, or for a limit: a 4xx, without clients that left."""
        return sum(count for code, count in self.codes.items() if code.startswith("4") and not code.startswith("499"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRow:
    """Counts of the requests of one adapter's version, worker and key."""

    __pydantic_config__ = _DOCUMENT

    adapter: Name = ""
    """lora_id; "" for requests of the base model, and for those refused before their model was known"""
    version: Name = ""
    """first 12 digits of the digest of the adapter's bytes"""
    base_model: Name = ""
    worker: Name = ""
    """the last one that had the request; "" for none"""
    tenant: Name = ""
    key: Name = ""
    """the key's id; "" where no key is needed"""
    counts: RequestCounts = field(default_factory=RequestCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountBatch:
    """What a router counted in a second or so. It is sent until it is accepted, unchanged under the same number."""

    __pydantic_config__ = _DOCUMENT

    number: Count
    age_s: Seconds = 0
    """seconds since its middle, when the report was made"""
    rows: Annotated[tuple[CountedRow, ...], _FirstFault(), MaxLen(20_000)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterNow:
    """How a router is now."""

    __pydantic_config__ = _DOCUMENT

    version: Name = ""
    policy: Name = ""
    in_flight: Count = 0
    waiting: NamedCounts = field(default_factory=dict)
    """requests that wait for room at an engine; by tenant, "" for none"""
    held: NamedCounts = field(default_factory=dict)
    """requests that wait for an adapter, in the same way"""
    paused: NamedCounts = field(default_factory=dict)
    """requests that wait for the end of a pause, in the same way"""
    circuits: Annotated[dict[Name, CircuitState], MaxLen(10_000)] = field(default_factory=dict)
    """worker_id -> open or half_open; a closed one is left out"""


FIRST_SHARE: Final = 0.1
"""The share of every limit that a router has before the leader has answered its first report."""
HOT_SHARE: Final = 0.5
"""A limit is reported once so much of the router's share is in demand; before that, at most so much is."""
Share = Annotated[float, Ge(0), Le(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUse:
    """One limit at a router: how much of it is in demand there, and how much the router has. A limit is 1."""

    __pydantic_config__ = _DOCUMENT

    demand: Annotated[float, Ge(0), Le(1e9)]
    """what is used, and what would be if nothing were refused"""
    share: Share
    """the router's share; of requests at once, no less than run there"""
    unit: Share = 0.0
    """shares are multiples of this; one of the requests at once"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUses:
    """The limits of keys and tenants at a router, for the leader to share them out among all routers."""

    __pydantic_config__ = _DOCUMENT

    group: Name
    """routers of one group, the processes on one port, have their shares together"""
    idle_share: Share
    """the router's share of each limit that is not among `uses`"""
    uses: Annotated[dict[Name, LimitUse], _FirstFault(), MaxLen(10_000)] = field(default_factory=dict)
    """limit, as "<limit> <account>" -> its use; those in demand, and those of which the router has another share"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitShares:
    """A router's shares of the limits of keys and tenants, until the next answer."""

    __pydantic_config__ = _DOCUMENT

    idle_share: Share = FIRST_SHARE
    """of each limit that is not among `shares`"""
    shares: Annotated[dict[Name, Share], MaxLen(100_000)] = field(default_factory=dict)

    def of(self, limit: str) -> float:
        """The share of a limit."""
        return self.shares.get(limit, self.idle_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What an account has spent in a day or a month."""

    __pydantic_config__ = _DOCUMENT

    tokens: Count = 0
    """of prompts and answers"""
    engine_s: Seconds = 0.0
    """seconds of engine work, prefill and decode"""

    def plus(self, other: "Spent") -> "Spent":
        """Both together."""
        return Spent(tokens=self.tokens + other.tokens, engine_s=self.engine_s + other.engine_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountsSpent:
    """What accounts have spent in the present day or month, in UTC, as the ledger has it."""

    __pydantic_config__ = _DOCUMENT

    at: Seconds
    """Unix seconds by the orchestrator's clock: the day and the month in which it lies are meant"""
    accounts: Annotated[dict[Name, Spent], MaxLen(10_000)] = field(default_factory=dict)
    """"<period> <account>", as the router has asked -> what was spent; left out: nothing"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """`POST /v1/usage`: what a router counted since the last accepted report, and what it has now."""

    __pydantic_config__ = _DOCUMENT

    router_id: str
    boot_id: str
    seq: int
    """tells repeated and late reports"""
    revision_seen: int
    is_last: bool = False
    """the router stops, and has no requests any more"""
    batches: Annotated[tuple[CountBatch, ...], _FirstFault(), MaxLen(100)] = ()
    in_flight: Annotated[dict[str, dict[str, Count]], _FirstFault(), MaxLen(10_000)] = field(default_factory=dict)
    """worker_id -> engine name -> requests there, where there are any"""
    waiting: Annotated[dict[str, Count], _FirstFault()] = field(default_factory=dict)
    """lora_id -> requests that wait for room on workers that have the adapter"""
    held_from_zero: NamedCounts = field(default_factory=dict)
    """base model -> requests that wait for its first ready worker, of base models whose pools may be at zero"""
    asked_age_s: Annotated[dict[str, Seconds], _FirstFault()] = field(default_factory=dict)
    """lora_id -> seconds since a request for it was last counted; of a quarter of an hour"""
    waits_s: Annotated[dict[str, Seconds], _FirstFault(), MaxLen(10_000)] = field(default_factory=dict)
    """worker_id -> seconds until the requests queued in the router for it have been sent, where not 0"""
    running_in_pause: Annotated[dict[str, Count], _FirstFault()] = field(default_factory=dict)
    """key of a pause that the router holds -> its requests at engines"""
    now: RouterNow = field(default_factory=RouterNow)
    limits: LimitUses | None = None
    """null: the router takes no part in limits"""
    budgets: Annotated[tuple[Name, ...], _FirstFault(), MaxLen(10_000)] = ()
    """"<day|month> <account>" of budgets whose spending the router asks for"""
    wire: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageAnswer:
    """The answer to a report."""

    __pydantic_config__ = _DOCUMENT

    accepted: bool
    """false for a repeated or late report"""
    revision: int
    limits: LimitShares | None = None
    """null: the router keeps the shares that it has"""
    spent: AccountsSpent | None = None
    """null: the router has asked for no budget, or there is no ledger"""
    wire: int = 1
