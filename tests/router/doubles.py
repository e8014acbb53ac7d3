"""Small hand-written servers around a real router: engines that do as told, and one that plays
orchestrator and agents."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lorafleet.engine.worker_proofs import ProvedAgent, proof_of
from lorafleet.identity import CacheScope, engine_name
from lorafleet.keys.key_files import hash_key, key_id_of
from orchestrator.model.catalog import Catalog, CatalogAdapter, CatalogWorker
from orchestrator.model.changes import reader_of
from orchestrator.model.usage import LimitShares, RequestCounts, UsageAnswer, UsageReport
from router.app import build
from router.config import RouterSettings
from router.request.services import Services
from router.request.usage_report import usage_report
from tests.patience import patience
from tests.serving import client_of, serving
from workers.wire import (
    WORKER_PROOF_PATH,
    Load,
    LoraInfo,
    Metadata,
    ModelCard,
    ProofRequest,
    RuntimeConfig,
    Transport,
    WorkerAdapter,
)

DIGEST = "ab" * 32
BASE = "tiny-qwen"
# Of an engine that has died: its agent has heard nothing of it since.
UNHEARD = Load(read_age_s=3600.0)
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}


def chunk(model: str, text: str) -> bytes:
    choices = [{"index": 0, "delta": {"content": text}}]
    return (
        b"data: "
        + json.dumps({"id": "1", "model": model, "choices": choices}, separators=(",", ":")).encode()
        + b"\n\n"
    )


async def echo(engine: "EngineDouble", body: dict) -> Response:
    """The ordinary engine: answers with the model it was asked for, streamed or whole."""
    model = body["model"]
    if not body.get("stream"):
        return JSONResponse({"id": "1", "model": model, "choices": [{"message": {"content": "hi"}}]})

    async def pieces():
        yield chunk(model, "one")
        await engine.go_on.wait()
        yield chunk(model, "two")
        yield b"data: [DONE]\n\n"

    return StreamingResponse(pieces(), media_type="text/event-stream")


@dataclass
class EngineDouble:
    """One engine; `answer` decides what a completion gets."""

    name: str
    answer: Callable = echo
    bodies: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    healthy: bool = True
    died: bool = False
    ids: list[int] | None = None  # what /tokenize answers; None: it refuses
    ids_of: Callable[[dict], list[int]] | None = None  # the same, for each body

    def __post_init__(self):
        self.go_on.set()

    @property
    def app(self):
        async def complete(request: Request):
            body = await request.json()
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            return await self.answer(self, body)

        async def tokenize(request: Request):
            if self.ids_of is not None:
                return JSONResponse({"tokens": self.ids_of(await request.json())})
            if self.ids is None:
                return JSONResponse({"error": {"message": "no"}}, 400)
            return JSONResponse({"tokens": self.ids, "count": len(self.ids)})

        return Starlette(
            routes=[
                Route("/v1/chat/completions", complete, methods=["POST"]),
                Route("/v1/completions", complete, methods=["POST"]),
                Route("/v1/messages", complete, methods=["POST"]),
                Route("/tokenize", tokenize, methods=["POST"]),
                Route("/health", lambda r: Response(status_code=200 if self.healthy else 503)),
            ]
        )


@dataclass
class AgentDouble:
    """Orchestrator and agents: serves what the tests put in, and wakes the router at each `tell`."""

    adapters: list[CatalogAdapter] = field(default_factory=list)
    residents: dict[str, list[str]] = field(default_factory=dict)
    workers: dict[str, str] = field(default_factory=dict)
    ensured: list[str] = field(default_factory=list)
    asked_for: list[list[str]] = field(default_factory=list)  # tenants, of each that was ensured
    ensure: Callable | None = None
    usage: list[dict] = field(default_factory=list)
    down: bool = False
    silent: bool = False  # the agents
    agents: str = "agents"  # below which path they answer
    unanswered: int = 0
    catalogs: int = 0  # that were asked for
    catalog_turn: asyncio.Event | None = None  # catalogs are not answered before it is set
    boot_id: str = "first"
    files: dict[str, str] = field(default_factory=dict)  # of the model
    files_status: int = 200
    files_asked: int = 0
    files_due: asyncio.Event | None = None  # the model's files wait for it
    model_path: str = ""
    starting: frozenset = frozenset()
    suspects: frozenset = frozenset()
    draining: tuple = ()
    drained: dict[str, str] = field(default_factory=dict)  # worker -> boot id of the agent that the catalog says drains
    kept_out: dict[str, tuple[str, ...]] = field(default_factory=dict)  # worker -> lora_ids, by the catalog
    aliases: tuple = ()
    cache: CacheScope = "tenant"  # of the policy
    named: frozenset | None = None  # the workers in the catalog; None: all
    loads: list[dict] = field(default_factory=list)
    is_full: bool = False  # every agent
    full: set[str] = field(default_factory=set)  # these agents
    load_refusals: dict[str, tuple[int, str, str]] = field(default_factory=dict)  # worker -> status, code, message
    loads_at: list[str] = field(default_factory=list)  # which agent each load was asked of
    figures: Load = field(default_factory=Load)  # of every engine
    list_age_s: float | None = None  # of every engine's list
    max_loras: int = 2
    salted: frozenset = frozenset()  # workers whose KV connector keeps adapters apart by salts alone
    refusals: dict[str, str] = field(default_factory=dict)  # of workers that take no adapters
    max_lora_ranks: dict[str, int] = field(default_factory=dict)
    block_sizes: dict[str, int] = field(default_factory=dict)
    max_model_lens: dict[str, int] = field(default_factory=dict)
    uncached: frozenset = frozenset()  # workers whose engine keeps no block for a later prompt
    revision: int = 1
    worker_key: str = "a-worker"  # by which agents prove their addresses
    url: str = ""
    _told: asyncio.Event = field(default_factory=asyncio.Event)

    def add_adapter(self, lora_id, *, on=(), **more):
        adapter = {"digest": DIGEST, "base_model": BASE, "source": "file:///x"} | more
        self.adapters.append(CatalogAdapter(lora_id=lora_id, **adapter))
        for worker in on:
            self.residents.setdefault(worker, []).append(lora_id)

    def tell(self):
        self.revision += 1
        told, self._told = self._told, asyncio.Event()
        told.set()

    def metadata(self, worker: str) -> Metadata:
        held = tuple(
            WorkerAdapter(
                lora_id=lora_id,
                digest=DIGEST,
                engine_name=engine_name(lora_id, DIGEST),
                state="ready",
                location="device",
            )
            for lora_id in self.residents.get(worker, [])
        )
        is_up = worker not in self.starting
        shape = RuntimeConfig(
            block_size=self.block_sizes.get(worker, 16) if is_up else 0,
            total_kv_blocks=10_000,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            max_model_len=self.max_model_lens.get(worker, 2048),
            caches_prefixes=worker not in self.uncached,
        )
        return Metadata(
            instance_id=worker,
            state="ready" if is_up else "starting",
            is_suspect=worker in self.suspects,
            agent_url=f"{self.url}/{self.agents}/{worker}",
            model=ModelCard(name=BASE, base_model=BASE, path=self.model_path, runtime_config=shape),
            transport=Transport(engine_url=self.workers[worker]),
            lora=LoraInfo(
                enabled=worker not in self.refusals,
                refusal=self.refusals.get(worker, ""),
                is_salted=worker in self.salted,
                max_loras=self.max_loras,
                max_cpu_loras=4,
                max_lora_rank=self.max_lora_ranks.get(worker, 0),
                loaded_loras=held,
                list_age_s=self.list_age_s,
            ),
            load=self.figures,
            agent_boot_id="a",
            engine_boot_id=self.boot_id,
        )

    @property
    def app(self):  # noqa: C901  (one small handler a route)
        def guarded(handler):
            async def handle(request: Request):
                return Response(status_code=503) if self.down else await handler(request)

            return handle

        async def catalog(_request):
            self.catalogs += 1
            if self.catalog_turn is not None:
                await self.catalog_turn.wait()
            workers = tuple(
                CatalogWorker(
                    id=w,
                    agent_url=f"{self.url}/{self.agents}/{w}",
                    state="draining" if w in self.drained else "ready",
                    agent_boot_id=self.drained.get(w, "a"),
                    kept_out=self.kept_out.get(w, ()),
                )
                for w in self.workers
                if self.named is None or w in self.named
            )
            catalog = Catalog(
                revision=self.revision,
                adapters=tuple(self.adapters),
                aliases=self.aliases,
                workers=workers,
                draining=self.draining,
                cache=self.cache,
            )
            return Response(reader_of(Catalog).dump_json(catalog), media_type="application/json")

        async def events(_request):
            async def messages():
                while True:
                    told = self._told
                    yield b": here\n\n"
                    await told.wait()
                    yield b"data: {}\n\n"

            return StreamingResponse(messages(), media_type="text/event-stream")

        async def ensure(request: Request):
            try:
                self.asked_for.append((await request.json())["tenants"])
            except (ValueError, KeyError, TypeError):  # of a client's own call, which a router passes on as it is
                error = {
                    "message": "no tenants",
                    "type": "invalid_request_error",
                    "param": None,
                    "code": "invalid_request",
                }
                return JSONResponse({"error": error}, 400)
            self.ensured.append(request.path_params["lora_id"])
            return await self.ensure(self, request.path_params["lora_id"])

        async def usage(request: Request):
            self.usage.append(await request.json())
            answer = UsageAnswer(accepted=True, revision=self.revision, limits=LimitShares(idle_share=1.0))
            return Response(msgspec.json.encode(answer), media_type="application/json")

        async def metadata(request: Request):
            if self.silent or request.path_params["agents"] != self.agents:
                self.unanswered += 1
                return Response(status_code=503)
            return Response(self.metadata(request.path_params["w"]).model_dump_json(), media_type="application/json")

        async def prove(request: Request):
            key_hash = hash_key(self.worker_key)
            agent = ProvedAgent(request.path_params["w"], "a", key_id_of(key_hash))
            proof = proof_of(key_hash, ProofRequest.model_validate(await request.json()), agent)
            return JSONResponse({**asdict(agent), "proof": proof})

        async def load(request: Request):
            wanted = await request.json()
            self.loads.append(wanted)
            self.loads_at.append(request.path_params["w"])
            if self.is_full or request.path_params["w"] in self.full:
                said = {"message": "all slots are taken (theirs/secret)", "code": "no_free_slot"}
                return JSONResponse({"error": said}, 409)
            if (refusal := self.load_refusals.get(request.path_params["w"])) is not None:
                status, code, message = refusal
                return JSONResponse({"error": {"message": message, "code": code}}, status)
            self.residents.setdefault(request.path_params["w"], []).append(wanted["lora_id"])
            return JSONResponse({})

        async def model_files(_request):
            self.files_asked += 1
            if self.files_due is not None:
                await self.files_due.wait()
            return JSONResponse({"base_model": BASE, "files": self.files}, self.files_status)

        return Starlette(
            routes=[
                Route("/v1/catalog", guarded(catalog)),
                Route("/v1/events", guarded(events)),
                Route("/v1/usage", guarded(usage), methods=["POST"]),
                Route("/v1/adapters/{lora_id:path}/ensure", guarded(ensure), methods=["POST"]),
                Route("/{agents}/{w}/metadata", metadata),
                Route(f"/{{agents}}/{{w}}{WORKER_PROOF_PATH}", prove, methods=["POST"]),
                Route("/{agents}/{w}/v1/events", events),
                Route("/{agents}/{w}/v1/model/files", model_files),
                Route("/{agents}/{w}/v1/admin/load_lora", load, methods=["POST"]),
            ]
        )


def sample_value(text: str, name: str, **labels: str) -> float | None:
    """A sample's value in Prometheus' text, by its name and all of its labels."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return next((s.value for s in samples if s.name == name and s.labels == labels), None)


def with_sql(*on) -> AgentDouble:
    """A control plane that knows `sql/v1`, ready on these workers."""
    control = AgentDouble()
    control.add_adapter("sql/v1", on=on)
    return control


def error_of(answer: httpx.Response):
    return answer.status_code, answer.json()["error"]["code"]


def with_worker_key(settings):
    """The settings; with key files also one that has the key by which an AgentDouble proves its agents' addresses."""
    if not settings.get("key_files"):
        return settings
    workers = settings["key_files"][0].with_name("worker-keys.yaml")
    workers.write_text(f"keys: [{{sha256: {hash_key('a-worker')}, scopes: [worker]}}]")
    return settings | {"key_files": (*settings["key_files"], workers)}


def counted(control: AgentDouble, parts: Services) -> dict[str, RequestCounts]:
    """Adapter, or base model -> counts of all requests that have ended, whether or not they were reported."""
    reports = [TypeAdapter(UsageReport).validate_python(body) for body in control.usage]
    reports.append(usage_report(parts, parts.clock()))
    found: dict[str, RequestCounts] = {}
    for batch in {batch.number: batch for report in reports for batch in report.batches}.values():
        for row in batch.rows:
            found.setdefault(row.adapter or row.base_model, RequestCounts()).add(row.counts)
    return found


@contextlib.asynccontextmanager
async def fleet(*engines: EngineDouble, control: AgentDouble | None = None, **settings) -> AsyncIterator:
    """(client of a real router, control, parts) in front of these engines, whose agents prove their addresses."""
    async with fleet_and_app(*engines, control=control, **settings) as (client, served, parts, _):
        yield client, served, parts


@contextlib.asynccontextmanager
async def fleet_and_app(*engines: EngineDouble, control: AgentDouble | None = None, **settings) -> AsyncIterator:
    """As `fleet`, and the router's app."""
    control = control or AgentDouble()
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            control.workers[engine.name] = await stack.enter_async_context(serving(engine.app))
        control.url = await stack.enter_async_context(serving(control.app))
        config = RouterSettings(
            **{
                "orchestrator_url": control.url,
                "metadata_poll_s": 0.2,
                "catalog_poll_s": 0.2,
                "tokenizer": "remote",
                "cold_start_timeout_s": patience(10),
                "tokenize_timeout_s": patience(5),
                "control_timeout_s": patience(5),
                "connect_timeout_s": patience(2),
                "failover_wait_s": patience(10),
                "first_sync_wait_s": 0.2,
                **with_worker_key(settings),
            }
        )
        app, parts = build(config)
        url = await stack.enter_async_context(serving(app, http=app.state.http))
        if not control.down:
            arrived = await parts.discovery.changes.until(
                lambda: len(parts.discovery.fleet.replicas) == len(engines), timeout_s=patience(5)
            )
            assert arrived or not engines
        client = await stack.enter_async_context(client_of(url))
        yield client, control, parts, app
