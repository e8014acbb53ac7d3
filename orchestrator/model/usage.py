"""Routers' counts of what they served."""

from typing import Annotated

from pydantic import FailFast, Field, field_validator

from orchestrator.model.names import WIRE, ServiceDocument
from orchestrator.model.traffic import Count, RouterNow, Seconds, TrafficBatch

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
