"""What the router serves beyond OpenAI's own shapes."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast

WIRE = 1


class _RouterModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ScoreItem(_RouterModel):
    """One replica's terms in seconds. `winner` is where the request goes; one that was `passed_over` has all its
    adapter slots in use, while another has not.
    """

    worker_id: str
    winner: bool
    passed_over: bool = False
    trust: str = "estimate"
    depth_blocks: int
    cached_tokens: int
    prefill_s: float
    adapter_s: float
    slot_s: float = 0.0
    queue_s: float
    harm_s: float
    crowd_s: float = 0.0
    decode_s: float = 0.0
    zone_s: float = 0.0
    cost_s: float


class RejectedItem(_RouterModel):
    worker_id: str
    reason: str


class RouteAnswer(_RouterModel):
    """`POST /v1/route`, and an item of `GET /v1/decisions`.

    cached_tokens         predicted; `engine_cached_tokens` is the engine's own word, null where it has told none
    tokens_from           approximate: both counts of the prompt are estimates, four bytes a token
    trust                 exact, degraded or estimate: how far the winner's prediction was to be believed
    waited_s, first_data_s   for room in the router; from dispatch to the first data, null while there is none
    record                the decision as data: `router.core.schedule.record.replayed` makes it again
    """

    request_id: str
    at: str
    base_model: str
    adapter: str
    policy: str = ""
    worker_id: str | None
    prompt_tokens: int
    cached_tokens: int
    engine_cached_tokens: int | None = None
    tokens_from: str
    trust: str | None = None
    waited_s: float = 0.0
    first_data_s: float | None = None
    kappa: float
    rho: float
    scores: tuple[ScoreItem, ...]
    rejected: tuple[RejectedItem, ...]
    record: dict[str, Any] | None = None
    note: str | None = None
    wire: int = WIRE


class RecordedTrust(_RouterModel):
    """Of an item's scores: how far a worker's predictions were to be believed."""

    worker_id: str
    trust: str


class ReplayBody(_RouterModel):
    """`POST /v1/decisions/replay`: an item of `GET /v1/decisions` as it is, or no more of it than its record.

    policy  another rule than the recorded one: what it would have chosen
    """

    record: dict[str, Any]
    request_id: str = ""
    at: datetime | None = None
    tokens_from: Literal["given", "local", "remote", "approximate", "none"] = "none"
    scores: Annotated[tuple[RecordedTrust, ...], FailFast()] = ()
    policy: str | None = None


class DecisionList(_RouterModel):
    """`GET /v1/decisions`.

    missing  processes of this router, by their slot, that did not answer in time: theirs are not among the data
    """

    data: tuple[RouteAnswer, ...]
    next: str | None = None
    missing: tuple[int, ...] = ()
