"""Requests and answers about adapters: lists, batches, uploads, orphans, `ensure`."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import FailFast, Field

from orchestrator.model.acceptance import AdapterAcceptance
from orchestrator.model.adapters import AdapterSpec, Tenants
from orchestrator.model.cards import AdapterCard
from orchestrator.model.changes import WrittenAdapter
from orchestrator.model.documents import ServiceDocument, WrittenDocument
from orchestrator.model.names import WIRE
from orchestrator.model.orphans import OrphanItem
from workers.wire import IgnoredModules, ReceivedFile

AdapterState = Literal["registered", "inspecting", "loading", "ready", "failed", "deleting"]


class Replicas(ServiceDocument):
    """Replicas of an adapter: desired by the placement, and ready now."""

    desired: int
    ready: int


class FileCopiesItem(ServiceDocument):
    """How the files of an adapter are kept that are nowhere but in the fleet.

    state    kept: as many copies as wanted; copying: more are being made; short: too few workers can keep one;
             lost: on no disk; unknown: workers have not reported all of their files yet
    kept_by  workers that keep them; `held_by`: that have them at the moment
    reason   why there are too few, and what to do; "" where there are enough
    """

    wanted: int
    state: Literal["kept", "copying", "short", "lost", "unknown"]
    kept_by: tuple[str, ...] = ()
    held_by: tuple[str, ...] = ()
    reason: str = ""


class AdapterStatus(ServiceDocument):
    """What is observed of a registered adapter.

    card     its model card; null until a worker has inspected it. Its `effect` is the least proved of its copies
             (docs/protocol.md)
    copies   null for an adapter with a source outside the fleet
    workers  where it is ready
    kept_out_of  workers that it gets no copy on, because an operator had it unloaded there
    ignored_modules  modules of its file that an engine does not have: the worst of its copies; null without any
    published_as  published name that it is a version of; null for any other adapter
    note     what lies beside its files at the source and is not served; what to know of a copy that is ready, with the
             worker's name; "" without any
    acceptance  worker -> whether its answers are the trainer's, of copies that were compared (docs/acceptance.md)
    idle_s   seconds since it was asked for last; null without a `ttl_s` or a copy, and where nobody has asked yet
    """

    state: AdapterState
    card: AdapterCard | None = None
    replicas: Replicas
    workers: tuple[str, ...]
    kept_out_of: tuple[str, ...] = ()
    requests_per_s: float = 0.0
    idle_s: float | None = None
    error: str | None = None
    ignored_modules: IgnoredModules | None = None
    note: str = ""
    acceptance: Mapping[str, AdapterAcceptance] = {}
    published_as: str | None = None
    copies: FileCopiesItem | None = None


class AdapterItem(ServiceDocument):
    """One registered adapter. `spec`: as written, with the digest and base model that the first inspection found."""

    lora_id: str
    spec: AdapterSpec
    status: AdapterStatus


class UploadedAdapter(AdapterItem):
    """`PUT /v1/adapters/{lora_id}`: the adapter that the uploaded bytes are.

    kept_on         workers that keep its files; empty with an upload store, and where it was registered before
    note_on_copies  what to know of that: fewer workers than `fleet_copies`, say; "" if there is nothing
    """

    kept_on: tuple[str, ...] = ()
    note_on_copies: str = ""


class UploadProgress(ServiceDocument):
    """`GET /v1/uploads/{lora_id}`, and a PUT that has brought a part: what has come, and what is missing.

    missing         files that have not come whole, in the order to send them
    received_bytes  of the first of them: the next request sends the bytes from there on
    """

    lora_id: str
    files: tuple[ReceivedFile, ...]
    missing: tuple[str, ...]
    received_bytes: int


class AcceptanceQuestion(WrittenDocument):
    """`POST /v1/adapters/{lora_id}/check`. Nothing that is loaded is loaded again."""

    file: str | None = Field(
        default=None, max_length=1 << 17, description="an acceptance file that replaces the adapter's; null: it stays"
    )


class AcceptanceAnswer(ServiceDocument):
    """`POST /v1/adapters/{lora_id}/check`: what a comparison now has found.

    acceptance  worker -> result, of each worker that has the adapter ready
    errors      worker -> why it was not compared, or why it was unloaded
    """

    lora_id: str
    acceptance: Mapping[str, AdapterAcceptance] = {}
    errors: Mapping[str, str] = {}


class AdapterList(ServiceDocument):
    data: tuple[AdapterItem, ...]
    next: str | None = None


class AdapterBatch(WrittenDocument):
    """`POST /v1/adapters:batch`: each adapter is registered or refused on its own."""

    adapters: tuple[WrittenAdapter, ...] = Field(min_length=1, max_length=1000)


class BatchResult(ServiceDocument):
    """The result for one adapter: 201 registered, 200 registered already, 409 and others refused."""

    lora_id: str
    status: int
    code: str | None = None
    error: str | None = None


class BatchAnswer(ServiceDocument):
    data: tuple[BatchResult, ...]


class OrphanList(ServiceDocument):
    data: tuple[OrphanItem, ...]
    next: str | None = None


class AdoptRequest(WrittenDocument):
    """`POST /v1/orphans/adopt`. Orphans have lost their tenants with the store, so none may use them by default."""

    lora_ids: tuple[str, ...] | None = Field(
        default=None, max_length=10_000, description="orphans to adopt; null: all that can be adopted"
    )
    tenants: Tenants | None = Field(
        default=(), description="tenants that may use them, besides operators and servers without keys; null: everyone"
    )


class EnsureRequest(ServiceDocument):
    """`POST /v1/adapters/{lora_id}/ensure`. `tenants`: tenants of the waiting requests, "" for none."""

    replicas: int | None = Field(default=None, ge=1)
    wait_s: float = Field(default=0.0, ge=0, le=600)
    tenants: Annotated[tuple[str, ...], FailFast()] = Field(
        default=(), description="tenants of the waiting requests; default: the adapter's only tenant, if it has one"
    )
    wire: int = WIRE


class EnsureAnswer(ServiceDocument):
    """Where the adapter is ready, where it is loading, and in how many seconds it should be ready."""

    lora_id: str
    digest: str | None
    state: AdapterState
    ready: tuple[str, ...]
    loading: tuple[str, ...]
    expected_s: float | None
    error: str | None = None
    fits_nowhere: bool = Field(default=False, description="no worker could hold it, however empty; `error` says why")
    retry_in_s: float | None = Field(
        default=None, description="every worker that takes it failed to load it, as `error` says, until then"
    )
    progress: str | None = Field(default=None, description="how far the fetch of its files is, in words")
    wire: int = WIRE
