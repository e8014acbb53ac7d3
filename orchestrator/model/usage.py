"""Routers' counts of what they served."""

from typing import Annotated, Literal

from pydantic import FailFast, Field, field_validator

from orchestrator.model.documents import WIRE, ServiceDocument

Count = Annotated[int, Field(ge=0, le=1 << 62)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
"""The bounds of counts and sums are above what any fleet reaches: a router that reports more has miscounted."""
Name = Annotated[str, Field(max_length=300)]
BucketCounts = Annotated[dict[Annotated[int, Field(ge=0, le=1000)], Count], Field(max_length=200)]
"""lorafleet.telemetry.histogram bucket -> count"""
_MOST_WORKERS = 10_000
"""Workers in one report: more than any fleet has."""


class AdapterUse(ServiceDocument):
    """A router's cumulative counts of one engine name on one worker, since its boot.

    output_tokens   of responses whose engine reported its usage
    work_s          seconds of engine work: prefill, and each response's share of its decode steps
    errors          requests that failed in the engine: a 5xx, a broken stream, an engine that died or never answered
    first_tokens    streamed responses that began; `first_token_s`: the sum of the times from dispatch to first token
    """

    worker_id: str
    engine_name: str
    requests: Count = 0
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    work_s: Seconds = 0.0
    errors: Count = 0
    first_tokens: Count = 0
    first_token_s: Seconds = 0.0
    in_flight: Count = 0
    last_dispatch_age_s: float | None = None


class AdapterHold(ServiceDocument):
    """A router's counts of one adapter's queued requests, since its boot.

    held, hold_s   requests whose wait for a load or for room is over, served or not, and the sum of their waits
    sheds          requests refused for lack of room, or of time to wait for it
    waiting        requests that wait now for room on workers that have the adapter; not cumulative
    """

    lora_id: str
    held: Count = 0
    hold_s: Seconds = 0.0
    sheds: Count = 0
    waiting: Count = 0


class TrafficRow(ServiceDocument):
    """Requests that ended: those of one adapter, worker and key together.

    adapter    lora_id; "" for requests of the base model, and for those refused before their model was known
    worker     the last one that had the request; "" for none
    key        the key's id; "" where no key is needed
    codes      answers that failed, as "<status> <code>" -> count; what clients broke off is "499"
    predicted_tokens, cached_tokens  of `compared_tokens` prompt tokens: predicted and reported as cached
    waited_s   in the router's queue; `cold_starts` requests waited `cold_s` for their adapter to load
    first_token, whole  streamed answers by the time to their first token, and all answers by their duration
    first_token_sum_s  of the times in `first_token`
    decode_s   of streamed answers, from their first token to their last, of `decode_tokens` further tokens
    """

    adapter: Name = ""
    base_model: Name = ""
    worker: Name = ""
    tenant: Name = ""
    key: Name = ""
    requests: Count = 0
    codes: Annotated[dict[Name, Count], Field(max_length=100)] = Field(default_factory=dict)
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    predicted_tokens: Count = 0
    cached_tokens: Count = 0
    compared_tokens: Count = 0
    waited_s: Seconds = 0.0
    cold_starts: Count = 0
    cold_s: Seconds = 0.0
    first_token: BucketCounts = Field(default_factory=dict)
    whole: BucketCounts = Field(default_factory=dict)
    first_token_sum_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    decode_tokens: Count = 0


class TrafficBatch(ServiceDocument):
    """What a router counted in a few seconds. It is sent until it is accepted; `number` tells a repeated one.

    age_s  seconds since its middle, when the report was made
    """

    number: Count
    age_s: Seconds = 0.0
    rows: Annotated[tuple[TrafficRow, ...], FailFast()] = Field(default=(), max_length=20_000)


class RouterNow(ServiceDocument):
    """How a router is now.

    waiting, held  requests that wait for room at an engine, and for an adapter; by tenant, "" for none
    paused         requests that wait for the end of a pause, in the same way
    circuits       worker_id -> open or half_open; a closed one is left out
    """

    version: Name = ""
    policy: Name = ""
    in_flight: Count = 0
    waiting: Annotated[dict[Name, Count], Field(max_length=10_000)] = Field(default_factory=dict)
    held: Annotated[dict[Name, Count], Field(max_length=10_000)] = Field(default_factory=dict)
    paused: Annotated[dict[Name, Count], Field(max_length=10_000)] = Field(default_factory=dict)
    circuits: Annotated[dict[Name, Literal["open", "half_open"]], Field(max_length=10_000)] = Field(
        default_factory=dict
    )


class UsageReport(ServiceDocument):
    """`POST /v1/usage`: a router's cumulative counts; `seq` tells repeated and late reports.

    waits_s  worker_id -> seconds until the requests queued in the router for it have been sent, where not 0
    is_last  the router stops, and has no requests any more
    traffic  counts for the console that no earlier report has brought; each is sent until a report is accepted
    now      how the router is now; null from a router that is older than this field
    running_in_pause  key of a pause that the router holds -> its requests at engines; null from older versions
    """

    router_id: str
    boot_id: str
    seq: int
    revision_seen: int
    # FailFast: listing a million faults would take seconds.
    uses: Annotated[tuple[AdapterUse, ...], FailFast()] = ()
    holds: Annotated[tuple[AdapterHold, ...], FailFast()] = ()
    waits_s: dict[str, Seconds] = Field(default_factory=dict)
    is_last: bool = False
    traffic: Annotated[tuple[TrafficBatch, ...], FailFast()] = Field(default=(), max_length=100)
    now: RouterNow | None = None
    running_in_pause: dict[str, Count] | None = None
    wire: int = WIRE

    @field_validator("waits_s", mode="before")
    @classmethod
    def _has_few_workers(cls, waits_s: object) -> object:
        """Raises ValueError for waits of more workers than a fleet may have."""
        if isinstance(waits_s, dict) and len(waits_s) > _MOST_WORKERS:
            raise ValueError(f"names {len(waits_s)} workers, and at most {_MOST_WORKERS} are taken")
        return waits_s


class UsageAnswer(ServiceDocument):
    """The answer to a report. `accepted`: false for a repeated or late report."""

    accepted: bool
    revision: int
    wire: int = WIRE
