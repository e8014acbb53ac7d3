"""What the console reads of routers and traffic: series, totals, shares, a comparison of versions, the fleet now."""

from typing import Literal

from pydantic import Field

from orchestrator.model.documents import ServiceDocument
from orchestrator.model.usage import RouterNow


class TrafficPoints(ServiceDocument):
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


class TrafficSeries(ServiceDocument):
    """`GET /v1/traffic`: one series. `step_s`: width of a slice; `total`: of the whole range."""

    kind: str
    name: str
    range_s: float
    step_s: int
    total: "TrafficTotal"
    points: TrafficPoints


class TrafficTotal(ServiceDocument):
    """Counts of one series over a range; null where nothing was measured. Fields as in RequestCounts and TrafficPoints.

    hit_lost  share of prompt tokens that only other callers' caches held, of a sample; null to a tenant's key
    share     of the requests of the series that it is a part of; null: it is a series of its own
    waited_s  mean wait in the routers' queues; `cold_s`: mean wait for a load, of `cold_starts` requests
    token_s   mean time of each token after the first, of streamed answers
    """

    name: str
    requests: int = 0
    share: float | None = None
    requests_per_s: float = 0.0
    errors: int = 0
    refusals: int = 0
    codes: dict[str, int] = Field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_predicted: float | None = None
    hit_real: float | None = None
    hit_lost: float | None = None
    waited_s: float | None = None
    cold_starts: int = 0
    cold_s: float | None = None
    first_token_s: dict[str, float | None] = Field(default_factory=dict)
    whole_s: dict[str, float | None] = Field(default_factory=dict)
    token_s: float | None = None
    gauges: dict[str, float] = Field(default_factory=dict)


class TrafficTotals(ServiceDocument):
    """`GET /v1/traffic/totals`: every series of a kind, the one with the most requests first."""

    kind: str
    range_s: float
    data: tuple[TrafficTotal, ...]


class ComparedTarget(ServiceDocument):
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


class AliasComparison(ServiceDocument):
    """`GET /v1/aliases/{name}/comparison`: the targets of an alias side by side, as a rollout compares versions.

    baseline  the target with most of the sessions, to which the others are compared
    needed    requests, and first tokens, of either without which nothing is compared
    """

    name: str
    range_s: float
    baseline: str
    needed: int
    data: tuple[ComparedTarget, ...]


class TrafficShares(ServiceDocument):
    """`GET /v1/traffic/shares`: a series by worker, adapter or tenant, the one with the most requests first.

    data  by name: a worker, "" for requests that reached none; an adapter, "" for the base model; a tenant, "" for
          none; "(others)": those that were too many to be kept apart. Requests, answers by code, cold starts, output
          tokens and cache hits are counted, by worker also first tokens; other figures are 0 or null
    """

    kind: str
    name: str
    by: str
    range_s: float
    data: tuple[TrafficTotal, ...]


class RouterItem(ServiceDocument):
    """A router by its last report. `state`: live, silent (no report for 10 s), ended (it said so)."""

    id: str
    state: Literal["live", "silent", "ended"]
    age_s: float
    revision_seen: int
    now: RouterNow | None = None


class RouterList(ServiceDocument):
    data: tuple[RouterItem, ...]
    next: str | None = None


class FleetNow(ServiceDocument):
    """The fleet in one message of `GET /v1/live`.

    workers   worker state -> number
    routers   live ones; `now`: all of them together, with the worst circuit of each worker
    slice_at  beginning of the newest whole slice: read `/v1/traffic` again when it changes
    """

    at: float
    revision: int
    epoch: int
    workers: dict[str, int]
    routers: int
    now: RouterNow
    slice_at: int
