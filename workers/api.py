"""The agent's REST routes."""

from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.params import Depends as Depended
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from lorafleet.engine.worker_proofs import ProvedAgent, proof_of
from lorafleet.keys.auth import ApiKeys, metrics_dependencies, requires
from lorafleet.keys.key_files import hash_key, key_id_of
from lorafleet.keys.own_key import OwnKey
from lorafleet.keys.roles import Caller, check_scope
from lorafleet.service.http import EventStream, add_routes
from lorafleet.service.network.urls import bracketed
from lorafleet.tokenizer.chat import read_files
from workers.agent.agent import WorkerAgent
from workers.core.errors import AgentRequestError, EngineError
from workers.epochs import Epoch
from workers.file_routes import file_routes
from workers.inventory.event_log import requester
from workers.verification.verify import model_folder
from workers.wire import (
    WORKER_PROOF_PATH,
    AvailableLoras,
    BeginFileRequest,
    CheckRequest,
    ClaimRequest,
    DrainAnswer,
    DrainRequest,
    InspectRequest,
    ListedAdapter,
    LoadAnswer,
    LoadedLoras,
    LoadRequest,
    LogTail,
    Metadata,
    ModelFiles,
    ProofAnswer,
    ProofRequest,
    UndrainRequest,
    UnfinishedUploads,
    UnloadAnswer,
    UnloadRequest,
    UploadState,
    WorkerAdapter,
)

_MSGPACK = "application/vnd.msgpack"
_MOST_LISTED = 10_000
UploadId = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{24}$")]
UPLOADS_PATH = "/v1/uploads/"
MOST_UPLOAD_BYTES = 1 << 60  # of a body; the routes know the limits


def build_router(
    agent: WorkerAgent,
    keys: ApiKeys,
    own_key: OwnKey,
    *,
    metrics_need_key: bool = False,
    log_lines: Callable[[int], list[str]] = lambda _most: [],
) -> APIRouter:
    """All routes. State needs scope `view` or `agent-load`, loads `agent-load`, drains `drain`, others `agent`.

    Health and the proof of this address need no key. `own_key` is this agent's, which proves its address;
    `metrics_need_key` says whether /metrics needs a key; `log_lines` returns the last lines of this process's log.
    """
    api = APIRouter()
    probed = _probe_routes(agent, metrics_dependencies(keys, need_key=metrics_need_key))
    add_routes(
        api,
        _state_routes(agent, keys),
        _log_routes(keys, log_lines),
        kv_routes(agent, keys),
        _admin_routes(agent, keys),
        file_routes(agent, keys),
        _upload_routes(agent, keys),
        _proof_routes(agent, own_key),
        probed,
    )
    return api


def _log_routes(keys: ApiKeys, log_lines: Callable[[int], list[str]]) -> APIRouter:
    """The route that reads the last lines of the log; they may name adapters of every tenant."""
    api = APIRouter()

    @api.get("/v1/log", dependencies=[Depends(requires(keys, "agent", "operate"))])
    async def log(lines: Annotated[int, Query(ge=1, le=500)] = 200) -> LogTail:
        """The last lines of the agent's log, with the reason of an engine's end and the last of its output."""
        return LogTail(lines=tuple(log_lines(lines)))

    return api


def _state_routes(agent: WorkerAgent, keys: ApiKeys) -> APIRouter:
    """Routes that change no adapter: metadata, adapters, event stream, tokenizer files."""
    api = APIRouter()
    view = [Depends(requires(keys, "view", "agent-load", is_for_fleet=True))]

    @api.get("/metadata", dependencies=view)
    async def metadata(available: bool = True) -> Metadata:
        """The worker's metadata: state, engine, adapters and load.

        Without `available` the adapters on its disk are left out: services that read it often do not need them.
        """
        return agent.metadata(with_available=available)

    @api.get("/v1/metadata/loras", dependencies=view)
    async def loras(
        limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = 1000, cursor: str = "", configured: bool = False
    ) -> AvailableLoras:
        """Adapters on disk or in the engine, or that failed to load: in pages, sorted by lora_id.

        With `configured` those that the operator's settings name, and nothing else.
        """
        found = agent.report.configured() if configured else agent.report.catalog()
        items = [item for item in found if item.lora_id > cursor]
        following = items[limit - 1].lora_id if len(items) > limit else None
        page = agent.report.listed(items[:limit])
        return AvailableLoras(
            data=page,
            available_loras=page,
            loaded_loras=agent.report.loaded(),
            capacity=agent.report.capacity(),
            next=following,
        )

    @api.get("/v1/metadata/loras/{lora_id:path}", dependencies=view)
    async def lora(lora_id: str) -> ListedAdapter:
        """One adapter on disk or in the engine, or that failed to load; `adapter_unknown` for any other."""
        found = agent.report.listed(item for item in agent.report.catalog() if item.lora_id == lora_id)
        if not found:
            raise AgentRequestError("adapter_unknown", f"adapter {lora_id!r} is not on this worker", param="lora_id")
        return found[0]

    @api.get("/v1/admin/loras", dependencies=view)
    async def loaded() -> LoadedLoras:
        """Loaded, loading and failed adapters, and the engine's slots."""
        return LoadedLoras(loaded_loras=agent.report.loaded(), capacity=agent.report.capacity())

    @api.get("/v1/events", dependencies=view)
    async def events(
        files: bool = True,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> EventStream:
        """The agent's events after Last-Event-ID as server-sent events; without that header the events from now on.

        Without `files` those that are about files on the disk alone are left out.
        """
        after = agent.context.events.position_after(last_event_id)
        keep_alive_s = agent.context.settings.keep_alive_s
        stream = agent.context.events.stream(after, keep_alive_s=keep_alive_s, with_files=files)
        return EventStream(stream)

    @api.get("/v1/model/files", dependencies=view)
    def model_files() -> ModelFiles:
        """Read the base model's tokenizer files from this disk; `model_files_unavailable` without them."""
        model = agent.context.settings.model
        try:
            folder = model_folder(model)
            files = read_files(folder) if folder is not None else {}
        except (OSError, ValueError) as exc:
            raise AgentRequestError("model_files_unavailable", f"model {model}: {exc}") from exc
        if not files:
            advice = "give `model` as a local folder, or this agent the HF_HOME of its engine"
            message = f"model {model or '(not set)'}: no tokenizer files on this disk; {advice}"
            raise AgentRequestError("model_files_unavailable", message)
        return ModelFiles(base_model=agent.engine.model_card().base_model, files=files)

    return api


def kv_routes(agent: WorkerAgent, keys: ApiKeys) -> APIRouter:
    """The KV ledger's routes for routers: a snapshot of the engine's cached blocks, and a stream of changes."""
    api = APIRouter(dependencies=[Depends(requires(keys, "agent-load"))])

    @api.get("/v1/kv/snapshot")
    async def kv_snapshot() -> Response:
        """A KvSnapshot as msgpack; 503 `not_ready` while past KV events are still being read."""
        return Response(await agent.kv_ledgers().snapshot(), media_type=_MSGPACK)

    @api.get("/v1/kv/stream")
    async def kv_stream(epoch: str, since: Annotated[int, Query(ge=0)]) -> StreamingResponse:
        """KvFrames after frame `since`, each preceded by its length; 410 `events_gone` if they are no longer kept."""
        ledgers = agent.kv_ledgers()
        stream = ledgers.stream(ledgers.checked_position(epoch, since))
        return StreamingResponse(stream, media_type=_MSGPACK, headers={"cache-control": "no-store"})

    return api


def _admin_routes(agent: WorkerAgent, keys: ApiKeys) -> APIRouter:
    """Routes that change the worker; scope `agent` except loads (`agent-load`) and drains (`drain`)."""
    api = APIRouter()
    load, drainer, leader = requires(keys, "agent-load"), requires(keys, "drain", "agent"), requires(keys, "agent")
    leading, operate = [Depends(leader)], [Depends(requires(keys, "operate", "agent"))]

    @api.post("/v1/admin/load_lora")
    async def load_lora(body: LoadRequest, caller: Annotated[Caller, Depends(load)], epoch: Epoch) -> LoadAnswer:
        """Fetch an adapter if needed and load it into the engine; an epoch or `evict` needs scope `agent`."""
        # An epoch needs `agent` too: it is stored, and lower epochs are refused from then on.
        if body.evict is not None or epoch is not None:
            check_scope(caller, "agent")
        agent.check_epoch(epoch, is_destructive=body.evict is not None)
        by = requester(caller.name, is_leader=epoch is not None)
        # A digest grants no access: only the leader, which knows what was verified, may have it stand for the source.
        # Nor may another name agents: this one sends them its key.
        own = {"from_fleet": False, "neighbours": (), "keeps_files": False}
        lora = await agent.load(body if epoch is not None else body.model_copy(update=own), by)
        return LoadAnswer.of(lora)

    @api.post("/v1/admin/unload_lora")
    async def unload_lora(
        body: UnloadRequest,
        caller: Annotated[Caller, Depends(leader)],
        epoch: Epoch,
    ) -> UnloadAnswer:
        """Unload an adapter; answers with the adapters that are still loaded, also where it was not loaded.

        A stale epoch is refused.
        """
        agent.check_epoch(epoch, is_destructive=True)
        names = await agent.unload(body, requester(caller.name, is_leader=epoch is not None))
        return UnloadAnswer(
            lora_id=body.lora_id,
            message=f"{body.lora_id} is unloaded: {', '.join(names)}" if names else f"{body.lora_id} is not loaded",
            loaded_loras=agent.report.loaded(),
            capacity=agent.report.capacity(),
        )

    @api.post("/v1/admin/check_lora")
    async def check_lora(body: CheckRequest, caller: Annotated[Caller, Depends(leader)], epoch: Epoch) -> WorkerAdapter:
        """Compare a loaded adapter's answers with its acceptance file; `require` unloads one that is not equal."""
        agent.check_epoch(epoch, is_destructive=body.acceptance == "require")
        own = {"neighbours": ()}
        asked = body if epoch is not None else body.model_copy(update=own)
        return await agent.check(asked, requester(caller.name, is_leader=epoch is not None))

    @api.post("/v1/admin/inspect_lora", dependencies=leading)
    async def inspect_lora(body: InspectRequest, epoch: Epoch) -> WorkerAdapter:
        """Fetch, verify and install an adapter without loading it into the engine. A stale epoch is refused."""
        agent.check_epoch(epoch, is_destructive=False)
        return await agent.inspect(body)

    @api.get("/v1/admin/source", dependencies=leading, status_code=204, response_class=Response)
    async def source(source: str) -> Response:
        """204 if this worker may fetch adapters from the source, else `source_forbidden`; fetches nothing."""
        await agent.check_source(source)
        return Response(status_code=204)

    @api.post("/v1/admin/claim", dependencies=leading)
    async def claim(_body: ClaimRequest, epoch: Epoch) -> Metadata:
        """A new leader's first command: store its epoch and refuse older ones from now on."""
        agent.check_epoch(epoch, is_destructive=True)
        return agent.metadata()

    @api.post("/v1/admin/undrain", dependencies=operate)
    async def undrain(_body: UndrainRequest, epoch: Epoch) -> Metadata:
        """End a drain: the worker takes loads and requests again at once. A stale epoch is refused."""
        agent.check_epoch(epoch, is_destructive=False)
        agent.undrain()
        return agent.metadata()

    @api.post("/v1/admin/drain")
    async def drain(
        body: DrainRequest,
        caller: Annotated[Caller, Depends(drainer)],
        epoch: Epoch,
    ) -> DrainAnswer:
        """Start a drain: refuse loads and wait until the engine is idle or the deadline passes. `undrain` ends it."""
        if epoch is not None:
            check_scope(caller, "agent")
        agent.check_epoch(epoch, is_destructive=False)
        return await agent.drain(body.deadline_s, is_ordered=epoch is not None)

    return api


def _upload_routes(agent: WorkerAgent, keys: ApiKeys) -> APIRouter:
    """Routes for the leader, which hands on what clients send; scope `agent`, and an epoch."""
    api = APIRouter(dependencies=[Depends(requires(keys, "agent"))])
    uploads = agent.context.uploads

    async def check_epoch(epoch: Epoch) -> None:
        """Raises AgentRequestError for a stale epoch."""
        agent.check_epoch(epoch, is_destructive=False)

    leading = [Depends(check_epoch)]

    @api.get("/v1/uploads")
    async def unfinished() -> UnfinishedUploads:
        """The uploads that are not installed yet; room is kept for the rest of each."""
        return UnfinishedUploads(data=await uploads.unfinished())

    @api.get("/v1/uploads/{upload_id}")
    async def state(upload_id: UploadId) -> UploadState:
        """What has come of an upload; 404 `upload_unknown` if nothing has."""
        return await uploads.state(upload_id)

    @api.post("/v1/uploads/{upload_id}/{name}", dependencies=leading)
    async def begin(upload_id: UploadId, name: str, body: BeginFileRequest) -> UploadState:
        """Begin a file of an upload; 507 `disk_full` without room for it, before a byte is sent."""
        return await uploads.begin(upload_id, name, body)

    @api.put("/v1/uploads/{upload_id}/{name}", dependencies=leading)
    async def receive(
        upload_id: UploadId, name: str, request: Request, start: Annotated[int, Query(ge=0)] = 0
    ) -> UploadState:
        """Append the body to a begun file, from byte `start` on. What came before a break of the connection stays."""
        try:
            return await uploads.receive(upload_id, name, start, request.stream())
        except ClientDisconnect as exc:
            message = f"the sender of {name} broke off; what has come is kept for an hour"
            raise AgentRequestError("upload_incomplete", message) from exc

    @api.post("/v1/uploads/{upload_id}", dependencies=leading)
    async def install(upload_id: UploadId, body: InspectRequest) -> WorkerAdapter:
        """Unpack, verify and install an upload. Bytes that are refused are deleted."""
        return await agent.install_upload(upload_id, body)

    @api.delete("/v1/uploads/{upload_id}", dependencies=leading, status_code=204, response_class=Response)
    async def drop(upload_id: UploadId) -> Response:
        """Delete what has come of an upload."""
        await uploads.drop(upload_id)
        return Response(status_code=204)

    return api


def _proof_routes(agent: WorkerAgent, own_key: OwnKey) -> APIRouter:
    """The route by which this agent proves its address, before anybody sends it a key."""
    api = APIRouter()

    @api.post(WORKER_PROOF_PATH)
    async def prove(body: ProofRequest, request: Request) -> ProofAnswer:
        """Prove that the worker's own key is here. Another address than this agent's is refused: it would be passed on.

        An address is this agent's if it is its `advertise_url`, or has the address and port of this very connection.
        """
        if not own_key.key:
            message = (
                "this agent has no key to prove its address with: `lorafleet keys new --scopes worker,drain --file"
                " KEYS` makes one for --token-file"
            )
            raise AgentRequestError("worker_key_missing", message)
        if body.url.rstrip("/") not in _own_urls(agent.context.agent_url, request):
            message = (
                f"{body.url[:200]} is not this agent's address, which is {agent.context.agent_url}: see --advertise-url"
            )
            raise AgentRequestError("address_not_mine", message, param="url")
        key_hash = hash_key(own_key.key)
        proved = ProvedAgent(agent.context.settings.instance_id, agent.context.boot_id, key_id_of(key_hash))
        return ProofAnswer(
            instance_id=proved.instance_id,
            agent_boot_id=proved.agent_boot_id,
            key_id=proved.key_id,
            proof=proof_of(key_hash, body, proved),
        )

    return api


def _own_urls(advertised: str, request: Request) -> frozenset[str]:
    """The URLs at which this agent answers: the one it advertises, and that of this connection's end here."""
    host, port = request.scope.get("server") or ("", None)
    here = f"{request.scope['scheme']}://{bracketed(host)}:{port}"
    return frozenset({advertised.rstrip("/"), here})


def _probe_routes(agent: WorkerAgent, guarded: Sequence[Depended]) -> APIRouter:
    """Routes for health, readiness and metrics; `guarded` has the dependencies that check the key for /metrics."""
    api = APIRouter()

    @api.get("/health")
    async def health() -> dict[str, str]:
        """200 while the agent runs, whatever the state of its engine."""
        return {"status": "ok"}

    @api.get("/ready")
    async def ready() -> dict[str, str]:
        """200 while the worker serves, else 503 with the reason."""
        if agent.state != "ready":
            # The first line only: the engine's output follows it, and this route needs no key.
            reason = f": {agent.state_reason.splitlines()[0]}" if agent.state_reason else ""
            raise EngineError("not_ready", f"{agent.state}{reason}", retry_after_s=5)
        return {"status": "ready"}

    @api.get("/metrics", dependencies=guarded)
    async def metrics() -> Response:
        """Update the gauges and return the agent's metrics for Prometheus."""
        agent.update_gauges()
        return Response(agent.context.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return api
