"""REST models of the router, beside those of the OpenAI API."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, model_validator

WIRE = 1


class _RouterModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ScoreItem(_RouterModel):
    """One replica's cost terms, in seconds.

    winner       the request goes there
    passed_over  all its adapter slots are in use, while another replica has a free one
    trust        accuracy of its predicted hits: exact, degraded or estimate
    acceptance   whether its answers with the adapter are the trainer's: equal, differs or unknown; "": not compared
    step_s       the engine's step under way, and decoding beside the prefill
    harm_s       decode interference
    crowd_s      cache pressure, and scarcity of adapter slots
    evict_s      expected seconds to compute again what this prompt pushes out of the cache
    """

    worker_id: str
    winner: bool
    passed_over: bool = False
    trust: str = "estimate"
    acceptance: str = ""
    depth_blocks: int
    cached_tokens: int
    prefill_s: float
    adapter_s: float
    slot_s: float = 0.0
    queue_s: float
    step_s: float = 0.0
    harm_s: float
    crowd_s: float = 0.0
    evict_s: float = 0.0
    decode_s: float = 0.0
    zone_s: float = 0.0
    cost_s: float


class RejectedItem(_RouterModel):
    worker_id: str
    reason: str


class RouteAnswer(_RouterModel):
    """`POST /v1/route`, and an item of `GET /v1/decisions`.

    cached_tokens         predicted hit; `engine_cached_tokens` is the engine's own figure, null where it gave none
    tokens_from           approximate: both token counts are estimates, four bytes a token
    other_caches_tokens   prompt tokens beyond the cached ones that other callers' caches hold; null to a tenant's key,
                          and of a request that was sent
    trust                 accuracy of the winner's prediction: exact, degraded or estimate
    waited_s              seconds in the queue
    first_token_s         predicted seconds from dispatch to the first token; null without a replica
    first_data_s          seconds from dispatch to the first data; null before
    next_turn_s           usual seconds to the next turn of its tenant's sessions with its adapter; null: no session
    record                the decision as data, for `POST /v1/decisions/replay`
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
    other_caches_tokens: int | None = None
    tokens_from: str
    trust: str | None = None
    waited_s: float = 0.0
    first_token_s: float | None = None
    first_data_s: float | None = None
    next_turn_s: float | None = None
    kappa: float
    rho: float
    scores: tuple[ScoreItem, ...]
    rejected: tuple[RejectedItem, ...]
    record: dict[str, Any] | None = None
    note: str | None = None
    wire: int = WIRE


class RecordedTrust(_RouterModel):
    """One worker's prediction accuracy, of an item's scores."""

    worker_id: str
    trust: str


class ReplayBody(_RouterModel):
    """`POST /v1/decisions/replay`: an item of `GET /v1/decisions`, or its record alone.

    policy  a policy to decide by instead of the recorded one

    The item's other fields are ignored; a field that items do not have is refused.
    """

    record: dict[str, Any]
    request_id: str = ""
    at: datetime | None = None
    tokens_from: Literal["given", "local", "remote", "approximate", "none"] = "none"
    scores: Annotated[tuple[RecordedTrust, ...], FailFast()] = ()
    policy: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _require_known_fields(cls, given: Any) -> Any:
        """The body, if it has the fields of an item and of a replay alone. Raises ValueError."""
        known = cls.model_fields.keys() | RouteAnswer.model_fields.keys()
        unknown = [name for name in given if name not in known] if isinstance(given, dict) else []
        if unknown:
            raise ValueError(
                f"{ascii(unknown[0])[1:-1][:80]}: there is no such field; known: {', '.join(sorted(known))}"
            )
        return given


class DecisionList(_RouterModel):
    """`GET /v1/decisions`.

    missing  slots of this router's processes that did not answer in time: their decisions are not in `data`
    """

    data: tuple[RouteAnswer, ...]
    next: str | None = None
    missing: tuple[int, ...] = ()


class KvTreeNode(_RouterModel):
    """Blocks in a row of one or more prompts, with equal holders.

    block      hash of the first block, as 16 hex digits
    depth      blocks before it, from the beginning of the prompt
    prompts    of the prompts that the tree is made of, how many go through it
    holders    workers that have these blocks on the device, the first 16 by name; `held_by`: how many have
    lower      workers that have them in host memory or storage alone, the first 16
    more       further branches that the answer leaves out
    """

    block: str
    depth: int
    blocks: int
    prompts: int
    held_by: int
    holders: tuple[str, ...]
    lower: tuple[str, ...] = ()
    more: int = 0
    children: "tuple[KvTreeNode, ...]" = ()


class KvTreeRoot(_RouterModel):
    """The prompts of an adapter (its engine name), or `base`, at one block size."""

    adapter: str
    block_size: int
    prompts: int
    more: int = 0
    children: tuple[KvTreeNode, ...] = ()


class KvTree(_RouterModel):
    """`GET /v1/kv/tree`: the prefix index of a base model as the tree that it is, below each adapter.

    stored_blocks  of the whole index, by block size: also of prompts that are not in the tree
    prompts        the newest prompts that this router process sent; their branches are the tree's edges
    nodes          in this answer
    """

    base_model: str
    stored_blocks: dict[int, int]
    prompts: int
    nodes: int
    roots: tuple[KvTreeRoot, ...]


class RequestList(_RouterModel):
    """`GET /v1/requests` and `/v1/requests/{request_id}`: items as docs/protocol.md has them, the newest first.

    missing  slots of this router's processes that did not answer in time: their requests are not in `data`
    """

    data: tuple[dict[str, Any], ...]
    next: str | None = None
    missing: tuple[int | str, ...] = ()
