"""What the router serves beyond OpenAI's own shapes."""

from pydantic import BaseModel, ConfigDict

WIRE = 1


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ScoreItem(_Wire):
    """One replica's terms in seconds. `winner` is where the request goes."""

    worker_id: str
    winner: bool
    depth_blocks: int
    cached_tokens: int
    prefill_s: float
    adapter_s: float
    queue_s: float
    harm_s: float
    cost_s: float


class RejectedItem(_Wire):
    worker_id: str
    reason: str


class RouteAnswer(_Wire):
    """`POST /v1/route`, and an item of `GET /v1/decisions`."""

    request_id: str
    at: str
    base_model: str
    adapter: str
    worker_id: str | None
    prompt_tokens: int
    cached_tokens: int
    tokens_from: str
    kappa: float
    rho: float
    scores: tuple[ScoreItem, ...]
    rejected: tuple[RejectedItem, ...]
    note: str | None = None
    wire: int = WIRE


class DecisionList(_Wire):
    data: tuple[RouteAnswer, ...]
    next: str | None = None
