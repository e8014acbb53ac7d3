"""What routers report for the console: counts of a few seconds of traffic, and how each router is now.

Re-exported by `wire`. Unknown fields are ignored, so that versions may differ.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

Count = Annotated[int, Field(ge=0, le=1 << 62)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
"""The bounds of counts and sums are above what any fleet reaches: a router that reports more has miscounted."""
Name = Annotated[str, Field(max_length=300)]
BucketCounts = Annotated[dict[Annotated[int, Field(ge=0, le=1000)], Count], Field(max_length=200)]
"""lorafleet.telemetry.histogram bucket -> count"""


class _TrafficModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TrafficRow(_TrafficModel):
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
    codes: Annotated[dict[Name, Count], Field(max_length=100)] = {}
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    predicted_tokens: Count = 0
    cached_tokens: Count = 0
    compared_tokens: Count = 0
    waited_s: Seconds = 0.0
    cold_starts: Count = 0
    cold_s: Seconds = 0.0
    first_token: BucketCounts = {}
    whole: BucketCounts = {}
    first_token_sum_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    decode_tokens: Count = 0


class TrafficBatch(_TrafficModel):
    """What a router counted in a few seconds. It is sent until it is accepted; `number` tells a repeated one.

    age_s  seconds since its middle, when the report was made
    """

    number: Count
    age_s: Seconds = 0.0
    rows: Annotated[tuple[TrafficRow, ...], FailFast()] = Field(default=(), max_length=20_000)


class RouterNow(_TrafficModel):
    """How a router is now.

    waiting, held  requests that wait for room at an engine, and for an adapter; by tenant, "" for none
    paused         requests that wait for the end of a pause, in the same way
    circuits       worker_id -> open or half_open; a closed one is left out
    """

    version: Name = ""
    policy: Name = ""
    in_flight: Count = 0
    waiting: Annotated[dict[Name, Count], Field(max_length=10_000)] = {}
    held: Annotated[dict[Name, Count], Field(max_length=10_000)] = {}
    paused: Annotated[dict[Name, Count], Field(max_length=10_000)] = {}
    circuits: Annotated[dict[Name, Literal["open", "half_open"]], Field(max_length=10_000)] = {}


# -- what the console reads ------------------------------------------------------------------------------------


class TrafficPoints(_TrafficModel):
    """A series over time, as columns of the same length; null where nothing was counted or read.

    at  beginning of each slice, in Unix seconds
    first_token_s, whole_s  "p50", "p95" and "p99" -> seconds, at most a fifth too high
    hit_predicted, hit_real share of prompt tokens that were predicted and reported as cached
    codes    "<status> <code>" -> answers a second
    gauges   quantity -> its mean: running, waiting, kv_usage, ...
    """

    at: tuple[int, ...]
    requests_per_s: tuple[float | None, ...]
    errors_per_s: tuple[float | None, ...]
    refusals_per_s: tuple[float | None, ...]
    prompt_tokens_per_s: tuple[float | None, ...]
    output_tokens_per_s: tuple[float | None, ...]
    waited_s: tuple[float | None, ...]
    cold_starts: tuple[int | None, ...]
    hit_predicted: tuple[float | None, ...]
    hit_real: tuple[float | None, ...]
    first_token_s: dict[str, tuple[float | None, ...]]
    whole_s: dict[str, tuple[float | None, ...]]
    codes: dict[str, tuple[float | None, ...]]
    gauges: dict[str, tuple[float | None, ...]]


class TrafficSeries(_TrafficModel):
    """`GET /v1/traffic`: one series. `step_s`: width of a slice; `total`: of the whole range."""

    kind: str
    name: str
    range_s: float
    step_s: int
    total: "TrafficTotal"
    points: TrafficPoints


class TrafficTotal(_TrafficModel):
    """Counts of one series over a range; null where nothing was measured. Fields as in TrafficRow and TrafficPoints.

    waited_s  mean wait in the routers' queues; `cold_s`: mean wait for a load, of `cold_starts` requests
    token_s   mean time of each token after the first, of streamed answers
    """

    name: str
    requests: int = 0
    requests_per_s: float = 0.0
    errors: int = 0
    refusals: int = 0
    codes: dict[str, int] = {}
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_predicted: float | None = None
    hit_real: float | None = None
    waited_s: float | None = None
    cold_starts: int = 0
    cold_s: float | None = None
    first_token_s: dict[str, float | None] = {}
    whole_s: dict[str, float | None] = {}
    token_s: float | None = None
    gauges: dict[str, float] = {}


class TrafficTotals(_TrafficModel):
    """`GET /v1/traffic/totals`: every series of a kind, the one with the most requests first."""

    kind: str
    range_s: float
    data: tuple[TrafficTotal, ...]


class ComparedTarget(_TrafficModel):
    """One target of an alias beside the others.

    share  of the alias's sessions; `total`: all requests of the target, by whichever name; null: the caller may not
           read them, because other tenants may use the target, too
    worse  why it is worse than the baseline, by a rollout's default limits; "": it is not, or too few requests to tell
    """

    lora_id: str
    weight: float
    share: float
    total: TrafficTotal | None = None
    worse: str = ""


class AliasComparison(_TrafficModel):
    """`GET /v1/aliases/{name}/comparison`: the targets of an alias side by side, as a rollout compares versions.

    baseline  the target with most of the sessions, to which the others are compared
    needed    requests, and first tokens, of either without which nothing is compared
    """

    name: str
    range_s: float
    baseline: str
    needed: int
    data: tuple[ComparedTarget, ...]


class TrafficShare(_TrafficModel):
    """One name's part of a series; fields as in TrafficTotal.

    name   a worker, "" for requests that reached none; an adapter, "" for the base model; a tenant, "" for none;
           "(others)": those that were too many to be kept apart
    share  of the series' requests
    """

    name: str
    requests: int
    share: float
    errors: int = 0
    cold_starts: int = 0
    output_tokens: int = 0
    hit_real: float | None = None
    first_token_s: dict[str, float | None] = {}


class TrafficShares(_TrafficModel):
    """`GET /v1/traffic/shares`: a series by worker, adapter or tenant, the one with the most requests first."""

    kind: str
    name: str
    by: str
    range_s: float
    data: tuple[TrafficShare, ...]


class RouterItem(_TrafficModel):
    """A router by its last report. `state`: live, silent (no report for 10 s), ended (it said so)."""

    id: str
    state: Literal["live", "silent", "ended"]
    age_s: float
    revision_seen: int
    now: RouterNow | None = None


class RouterList(_TrafficModel):
    data: tuple[RouterItem, ...]
    next: str | None = None


class FleetNow(_TrafficModel):
    """The fleet in one message of `GET /v1/live`.

    workers   worker state -> number
    waiting, held, paused  requests in all routers that wait for room, for an adapter, for the end of a pause; by tenant
    circuits  worker_id -> open or half_open, the worst of all routers
    slice_at  beginning of the newest whole slice: read `/v1/traffic` again when it changes
    """

    at: float
    revision: int
    epoch: int
    workers: dict[str, int]
    routers: int
    in_flight: int
    waiting: dict[str, int]
    held: dict[str, int]
    paused: dict[str, int] = {}
    circuits: dict[str, str]
    slice_at: int


# -- questions to routers --------------------------------------------------------------------------------------


class RouterQuestion(_TrafficModel):
    """A question of the console to a router, which reads its decisions from it alone.

    kind    decisions: the last ones; requests: the last that ended; route: where a request would go;
            replay: a record, decided again; ask: a prompt of the caller, to be answered
    tenant  of a caller that may see its tenant's requests alone; null: all of them
    """

    id: str
    kind: Literal["decisions", "requests", "route", "replay", "ask"]
    body: dict[str, Any] = {}
    tenant: str | None = None


class Ask(_TrafficModel):
    """`POST /v1/ask`: one prompt to several models, side by side. Each is a request of the caller's own key."""

    models: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=300)], ...], Field(min_length=1, max_length=4)
    ]
    prompt: Annotated[str, Field(min_length=1, max_length=16_000)]
    max_tokens: Annotated[int, Field(ge=1, le=512)] = 128


class RoutedAsk(_TrafficModel):
    """One model's part of it, for a router. `key_id`: of the caller's key, which the router looks up itself."""

    model: str
    prompt: str
    max_tokens: int
    key_id: str = ""


class AskedAnswer(_TrafficModel):
    """One model's answer. `first_token_s` and `whole_s`: from its arrival at the router; `error`: why there is none."""

    model: str
    status: int
    request_id: str = ""
    text: str = ""
    first_token_s: float | None = None
    whole_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""


class AskedAnswers(_TrafficModel):
    """The answers to `POST /v1/ask`, in the order of `models`."""

    data: tuple[AskedAnswer, ...]


class RouterQuestions(_TrafficModel):
    """`GET /v1/routers/questions`: questions that wait for an answer of the router that asks."""

    data: tuple[RouterQuestion, ...] = ()


class RouterReply(_TrafficModel):
    """`POST /v1/routers/answers`: a router's answer; with a `status` from 400 on, `body` is an error."""

    router_id: Name
    id: Name
    status: Annotated[int, Field(ge=200, le=599)] = 200
    body: dict[str, Any] = {}


class RelayedDecisions(_TrafficModel):
    """`GET /v1/decisions`: decisions of all routers, the newest first, as `GET /v1/decisions` of a router has them.

    missing  routers that did not answer in time
    """

    data: tuple[dict[str, Any], ...]
    next: str | None = None
    missing: tuple[str, ...] = ()


class RequestQuery(_TrafficModel):
    """The query of `GET /v1/requests`, of router and orchestrator: which requests to list. Null passes all.

    key      a key's id
    adapter  a lora_id, an engine name, `base`, or the name that clients ask for
    status   a status, `4xx` or `5xx`, or `failed`: every answer with an error
    """

    key: str | None = None
    tenant: str | None = None
    status: Annotated[str, Field(pattern=r"^([1-5]\d\d|[1-5]xx|failed)$")] | None = None
    adapter: str | None = None
    worker: str | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class RelayedRequests(_TrafficModel):
    """`GET /v1/requests` and `/v1/requests/{request_id}`: requests of all routers, the newest first.

    Items are those of `GET /v1/requests` of a router, with the router's id, and for readers above tenants the key's
    note.

    missing  routers that did not answer in time
    """

    data: tuple[dict[str, Any], ...]
    next: str | None = None
    missing: tuple[str, ...] = ()


class RelayedDecision(_TrafficModel):
    """A decision as a router gives it; its fields are those of `POST /v1/route` there."""

    model_config = ConfigDict(frozen=True, extra="allow")

    worker_id: str | None = None
    policy: str | None = None


class KeyItem(_TrafficModel):
    """A key of the key files; never the key or its hash. `note`: the file's comment, for readers above tenants."""

    key_id: str
    tenant: str | None
    scopes: tuple[str, ...]
    limits: dict[str, float]
    expires: str | None
    note: str = ""


class KeyList(_TrafficModel):
    data: tuple[KeyItem, ...]
    next: str | None = None


class WorkerLoad(_TrafficModel):
    """A worker's load and rates by its last report; a rate of 0 is not measured yet."""

    running: int
    waiting: int
    waiting_for_slot: int
    kv_usage: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    load_seconds: float
