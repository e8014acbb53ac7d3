"""Questions that the console asks routers through the orchestrator, and routers' answers.

A router keeps its decisions and its last requests itself; it fetches questions and posts answers.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from lorafleet.keys.roles import Caller
from orchestrator.model.documents import ServiceDocument
from orchestrator.model.usage import Name


class RouterQuestion(ServiceDocument):
    """A question of the console to a router, which reads its decisions from it alone.

    kind    decisions: the last ones; requests: the last that ended; route: where a request would go;
            replay: a record, decided again; ask: a prompt of the caller, to be answered
    tenant  of a caller that may see its tenant's requests alone; null: all of them
    """

    id: str
    kind: Literal["decisions", "requests", "route", "replay", "ask"]
    body: dict[str, Any] = Field(default_factory=dict)
    tenant: str | None = None


class Ask(ServiceDocument):
    """`POST /v1/ask`: one prompt to several models, side by side. Each is a request of the caller's own key."""

    models: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=300)], ...], Field(min_length=1, max_length=4)
    ]
    prompt: Annotated[str, Field(min_length=1, max_length=16_000)]
    max_tokens: Annotated[int, Field(ge=1, le=512)] = 128


class RoutedAsk(ServiceDocument):
    """One model's part of it, for a router.

    key_id  of the caller's key, which the router looks up itself; or of its token
    caller  of a token, which no service passes on: as the orchestrator's grants have it; null: the caller has a key
    """

    model: str
    prompt: str
    max_tokens: int
    key_id: str = ""
    caller: Caller | None = None


class AskedAnswer(ServiceDocument):
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


class AskedAnswers(ServiceDocument):
    """The answers to `POST /v1/ask`, in the order of `models`."""

    data: tuple[AskedAnswer, ...]


class RouterQuestions(ServiceDocument):
    """`GET /v1/routers/questions`: questions that wait for an answer of the router that asks."""

    data: tuple[RouterQuestion, ...] = ()


class RouterReply(ServiceDocument):
    """`POST /v1/routers/answers`: a router's answer; with a `status` from 400 on, `body` is an error."""

    router_id: Name
    id: Name
    status: Annotated[int, Field(ge=200, le=599)] = 200
    body: dict[str, Any] = Field(default_factory=dict)


class RelayedDecisions(ServiceDocument):
    """`GET /v1/decisions`: decisions of all routers, the newest first, as `GET /v1/decisions` of a router has them.

    missing  routers that did not answer in time
    """

    data: tuple[dict[str, Any], ...]
    next: str | None = None
    missing: tuple[str, ...] = ()


class RequestQuery(ServiceDocument):
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


class RelayedRequests(ServiceDocument):
    """`GET /v1/requests` and `/v1/requests/{request_id}`: requests of all routers, the newest first.

    Items are those of `GET /v1/requests` of a router, with the router's id, and for readers above tenants the key's
    note.

    missing  routers that did not answer in time
    """

    data: tuple[dict[str, Any], ...]
    next: str | None = None
    missing: tuple[str, ...] = ()


class RelayedDecision(ServiceDocument):
    """A decision as a router gives it; its fields are those of `POST /v1/route` there."""

    model_config = ConfigDict(frozen=True, extra="allow")

    worker_id: str | None = None
    policy: str | None = None
