"""One agentless engine: reports, loads from the engine's disk, and unloads, over the engine's HTTP API."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import httpx
import structlog

from lorafleet.engine.agentless import AgentlessEngine, StatusRefused
from lorafleet.engine.canary import CanaryMode
from lorafleet.engine.errors import is_engine_stopping
from lorafleet.identity import engine_name
from lorafleet.kv.connectors import EngineSalt
from lorafleet.service.network.transport import why_no_answer
from orchestrator.agentless.canary import AgentlessCanary
from workers.wire import (
    ClaimRequest,
    DrainAnswer,
    DrainRequest,
    InspectRequest,
    LoadRequest,
    LoraCapacity,
    Metadata,
    UndrainRequest,
    UnloadAnswer,
    UnloadRequest,
    WorkerAdapter,
)

log = structlog.get_logger()

# The highest rank that vLLM takes. An engine does not report its own limit, and refuses higher ranks.
_MOST_RANK = 512
_ENGINE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentlessWorker:
    """An agentless engine, as settings or EndpointSlices list it."""

    id: str
    engine_url: str
    pool: str = ""
    zone: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentlessLoadRules:
    """What may be loaded into agentless engines.

    slots  adapters for each engine
    roots  folders on the engine's disk that adapters may be in
    by_offer  their plugin loads what the catalog offers: a load is a request that names the adapter
    salt   how their KV connectors salt adapters, see docs/engines.md
    canary, canary_timeout_s  what to do with adapters that do not change their answers, and how long to look
    """

    slots: int = 0
    roots: tuple[PurePosixPath, ...] = ()
    by_offer: bool = False
    salt: EngineSalt = "auto"
    canary: CanaryMode = "refuse"
    canary_timeout_s: float = 2.0


def allowed_path(source: str, roots: Iterable[PurePosixPath]) -> str | None:
    """The folder on an engine's own disk that a source names, if it is below one of the roots; else None."""
    parts = urlsplit(source)
    path = PurePosixPath(unquote(parts.path))
    is_local = parts.scheme == "file" and not parts.netloc and path.is_absolute() and ".." not in path.parts
    return str(path) if is_local and any(path.is_relative_to(root) for root in roots) else None


class AgentlessRefusal(Exception):
    """An error response in the agent's form."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class AgentlessEngineDriver:
    """The agent's interface for one engine: a method per route, with the route's name."""

    def __init__(
        self,
        worker: AgentlessWorker,
        address: str,
        client: httpx.AsyncClient,
        allowed: AgentlessLoadRules,
        *,
        digest_of: Callable[[str], str | None],
        clock: Callable[[], float],
        numbers: Iterator[int],
    ) -> None:
        """`numbers`: of reports, ascending."""
        self._numbers = numbers
        self.worker = worker
        self._address = address
        self._client = client
        self._allowed = allowed
        self._digest_of = digest_of
        self._engine = AgentlessEngine(
            worker.id,
            worker.engine_url,
            self._get,
            zone=worker.zone,
            node=worker.node,
            salt=allowed.salt,
            clock=clock,
        )
        self._canary = AgentlessCanary(
            worker.engine_url, client, mode=allowed.canary, timeout_s=allowed.canary_timeout_s
        )
        self._lock = asyncio.Lock()
        self._epoch = 0
        self._is_draining = False
        self._takes: tuple[str, bool] = ("", False)
        self._logged_refusal = ""

    async def metadata(self) -> Metadata:
        """The engine's report, with digests, slots and drain state. Raises OSError, ValueError, httpx.HTTPError.

        Asks the engine; logs a new refusal of adapters. What it holds may change while it is asked, so the report has
        the number of when the asking began.
        """
        number = next(self._numbers)
        report = await self._engine.report()
        loaded = tuple(self._with_digest_and_effect(lora, report.engine_boot_id) for lora in report.lora.loaded_loras)
        is_allowed = bool(self._allowed.slots and self._allowed.roots)
        self._log_refusal(report.lora.refusal)
        takes_loads = is_allowed and not report.lora.refusal and await self._takes_loads(report.engine_boot_id)
        slots = max(self._allowed.slots, len(loaded)) if takes_loads else 0
        lora = report.lora.model_copy(
            update={
                "enabled": takes_loads,
                "max_cpu_loras": slots,
                # Also for an engine that takes no adapters: it is asked, and its refusal is then the reason shown.
                "max_lora_rank": _MOST_RANK if takes_loads or (is_allowed and report.lora.refusal) else 0,
                "loaded_loras": loaded,
                "capacity": LoraCapacity(
                    max_loras=report.lora.max_loras,
                    loaded_count=len(loaded),
                    available_slots=max(0, slots - len(loaded)),
                    host_slots=slots,
                ),
            }
        )
        state = {"state": "draining"} if self._is_draining else {}
        address = {"agent_url": self._address, "pool": self.worker.pool, "epoch": self._epoch}
        return report.model_copy(update={"lora": lora, "report_number": number} | state | address)

    async def claim(self, _ask: ClaimRequest, epoch: int) -> Metadata:
        """Raise our epoch to the leader's and return the report. The engine itself knows no epochs."""
        self._epoch = max(self._epoch, epoch)
        return await self.metadata()

    async def inspect_lora(self, ask: InspectRequest, _epoch: int) -> WorkerAdapter:
        """The adapter as registered: its bytes cannot be read. Raises AgentlessRefusal without a registered digest."""
        path = self._allowed_path(ask.source)
        if ask.digest is None:
            message = (
                f"worker {self.worker.id} has no agent, so {ask.source} cannot be read there: register {ask.lora_id}"
                " with its digest, or let a worker that has an agent inspect it"
            )
            raise AgentlessRefusal(422, "source_unsupported", message)
        base_model = ask.base_model or (await self.metadata()).model.base_model
        return WorkerAdapter(lora_id=ask.lora_id, path=path, base_model=base_model, rank=0, digest=ask.digest)

    async def load_lora(self, ask: LoadRequest, _epoch: int) -> WorkerAdapter:
        """Load the adapter from the engine's disk, and evict `ask.evict` first if the engine is full.

        Loads and unloads of an engine run one at a time; the engine's list decides on success. Raises AgentlessRefusal.
        """
        path = self._allowed_path(ask.source or "")
        if ask.digest is None:
            raise AgentlessRefusal(422, "source_unsupported", f"{ask.lora_id}: its digest is not known yet")
        if ask.acceptance == "require":
            why = f"worker {self.worker.id} has no agent that compares it with its acceptance file"
            message = (
                f"{ask.lora_id}: {why}, and its policy requires that (acceptance: require); see docs/acceptance.md"
            )
            raise AgentlessRefusal(503, "acceptance_unknown", message)
        name = engine_name(ask.lora_id, ask.digest)
        async with self._lock:
            lora = (await self.metadata()).lora
            if lora.refusal:
                raise AgentlessRefusal(
                    409, "adapters_refused", f"worker {self.worker.id} takes no adapters: {lora.refusal}"
                )
            held = {lora.engine_name: lora for lora in lora.loaded_loras}
            if name not in held:
                if ask.evict is not None and len(held) >= self._allowed.slots:
                    await self._unload(ask.evict)
                refusal = await self._load(name, path)
                report = await self.metadata()
                held = {lora.engine_name: lora for lora in report.lora.loaded_loras}
                if name not in held:  # decided by its list: vLLM also refuses an adapter that has just been loaded
                    no = f"load {name}: the engine report yes, but does not list it"
                    raise refusal or AgentlessRefusal(422, "adapter_refused", no)
                return await self._with_shown_effect(held[name], path, report)
        return held[name]

    async def _load(self, name: str, path: str) -> AgentlessRefusal | None:
        """Have the engine load an adapter; returns its error. Raises httpx.HTTPError.

        An engine with our plugin reads the bytes first, and asks us about the name. No token is computed for that.
        """
        if self._allowed.by_offer:
            return await self._post_to_engine("tokenize", {"model": name, "prompt": "."}, operation=f"load {name}")
        body = {"lora_name": name, "lora_path": path}
        return await self._post_to_engine("v1/load_lora_adapter", body, operation=f"load {name}")

    async def _with_shown_effect(self, lora: WorkerAdapter, path: str, report: Metadata) -> WorkerAdapter:
        """An adapter that was just loaded, with its effect by the engine's answers.

        Unloads it again and raises AgentlessRefusal `adapter_no_effect` if it has none.
        """
        name, boot_id = lora.engine_name, report.engine_boot_id
        shown = await self._canary.check(name, path, base_model=report.model.name, boot_id=boot_id)
        if shown.refusal:
            await self._unload(name)
            message = f"load {name}: {shown.refusal}; see `engine_canary` in docs/agentless.md"
            raise AgentlessRefusal(422, "adapter_no_effect", message)
        return replace(lora, effect=shown.effect, note=shown.note)

    async def unload_lora(self, ask: UnloadRequest, _epoch: int) -> UnloadAnswer:
        """Unload the adapter in all versions that match the request; there may be none. Raises AgentlessRefusal."""
        async with self._lock:
            found = [
                lora.engine_name
                for lora in (await self.metadata()).lora.loaded_loras
                if lora.lora_id == ask.lora_id and ask.digest in {None, lora.digest}
            ]
            for name in found:
                await self._unload(name)
        lora = (await self.metadata()).lora
        return UnloadAnswer(lora_id=ask.lora_id, loaded_loras=lora.loaded_loras, capacity=lora.capacity)

    async def drain(self, _ask: DrainRequest, _epoch: int) -> DrainAnswer:
        """Report the engine as draining, so that routers send it nothing new. The engine itself does not drain.

        Raises as `metadata`.
        """
        self._is_draining = True
        load = (await self.metadata()).load
        return DrainAnswer(is_drained=not load.running + load.waiting, running=load.running, waiting=load.waiting)

    async def undrain(self, _ask: UndrainRequest, _epoch: int) -> Metadata:
        """End draining, so that the engine is reported as ready again; returns its new report. Raises as `metadata`."""
        self._is_draining = False
        return await self.metadata()

    def _with_digest_and_effect(self, lora: WorkerAdapter, boot_id: str) -> WorkerAdapter:
        """An adapter in the report with its digest, and what the canary found of it."""
        shown = self._canary.effect_of(lora.engine_name, boot_id)
        return replace(lora, digest=self._known_digest(lora), effect=shown.effect, note=shown.note)

    def _log_refusal(self, refusal: str) -> None:
        """Log a refusal of adapters when it is new, and remember it. An empty one is only remembered."""
        if refusal and refusal != self._logged_refusal:
            log.warning("engine takes no adapters", worker_id=self.worker.id, reason=refusal)
        self._logged_refusal = refusal

    def _known_digest(self, lora: WorkerAdapter) -> str:
        """The registered digest if the engine name matches it; else the digest prefix in the engine name."""
        known, prefix = self._digest_of(lora.lora_id), lora.engine_name.removeprefix(lora.lora_id).removeprefix("@")
        return known if known is not None and prefix and known.startswith(prefix) else prefix

    def _allowed_path(self, source: str) -> str:
        """The folder on the engine's own disk that a source names; raises AgentlessRefusal for any other source."""
        path = allowed_path(source, self._allowed.roots)
        if path is None:
            below = ", ".join(f"file://{root}" for root in self._allowed.roots) or "nothing: engine_roots names none"
            message = f"{source!r}: worker {self.worker.id} has no agent, fetches nothing, and loads from below {below}"
            raise AgentlessRefusal(422, "source_unsupported", message)
        return path

    async def _takes_loads(self, boot_id: str) -> bool:
        """Whether the engine has the load route (VLLM_ALLOW_RUNTIME_LORA_UPDATING); asked once per engine start.

        Logs a warning if not.
        """
        if self._takes[0] != boot_id:
            answer = await self._client.get(f"{self.worker.engine_url}/v1/load_lora_adapter")
            self._takes = boot_id, answer.status_code == httpx.codes.METHOD_NOT_ALLOWED
            if not self._takes[1]:
                why = "no route to load adapters: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                log.warning("engine takes no adapters", worker_id=self.worker.id, status=answer.status_code, reason=why)
        return self._takes[1]

    async def _unload(self, name: str) -> None:
        """Unload one engine name; success if it is not loaded. Raises AgentlessRefusal, httpx.HTTPError."""
        self._canary.forget(name)
        refusal = await self._post_to_engine("v1/unload_lora_adapter", {"lora_name": name}, operation=f"unload {name}")
        if refusal is not None and refusal.code != "source_not_found":  # unloaded already
            raise AgentlessRefusal(503, "engine_failed", str(refusal))

    async def _post_to_engine(self, route: str, body: Mapping[str, str], *, operation: str) -> AgentlessRefusal | None:
        """POST to the engine; returns its error as the agent would report it, None on success."""
        answer = await self._client.post(f"{self.worker.engine_url}/{route}", json=body, timeout=_ENGINE_S)
        if answer.is_success:
            return None
        message = f"{operation}: the engine answered {answer.status_code}: {answer.text[:500]}"
        # Only these statuses are about the adapter (vLLM 0.32, as observed); all others may pass.
        codes = {400: "adapter_refused", 404: "source_not_found", 500: "adapter_refused"}
        code = (
            "engine_failed" if is_engine_stopping(answer.text) else codes.get(answer.status_code, "engine_unreachable")
        )
        return AgentlessRefusal(422, code, message)

    async def _get(self, path: str) -> bytes:
        """GET from the engine; returns the body. Raises StatusRefused, and ConnectionError for no answer."""
        try:
            answer = await self._client.get(self.worker.engine_url + path)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise ConnectionError(f"{self.worker.engine_url}{path}: {why_no_answer(exc)}") from exc
        if answer.status_code != httpx.codes.OK:
            raise StatusRefused(f"GET {self.worker.engine_url}{path}: {answer.status_code}", answer.status_code)
        return answer.content
