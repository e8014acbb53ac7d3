"""Engines without an agent, as workers: what an agent would answer is answered here, from the engine's own HTTP.

A transport, so that whoever calls agents calls these too, under URLs of their own: `plain://workers/<id>`. Nobody
reads an adapter's bytes for us there. So nothing is fetched, what is loaded is a folder on the engine's own disk under
a digest that its registration states, and no epoch fences an engine: a leader that was replaced is stopped by its
lease alone.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpx
import structlog
from pydantic import BaseModel

from lorafleet.http import envelope
from lorafleet.loops import forever
from lorafleet.plain import PlainEngine
from workers.wire import (
    AvailableLora,
    ClaimRequest,
    DrainAnswer,
    DrainRequest,
    InspectRequest,
    LoadedLora,
    LoadedLoras,
    LoadRequest,
    LoraCapacity,
    Metadata,
    UndrainRequest,
    UnloadRequest,
    engine_name,
)

log = structlog.get_logger()

SCHEME = "plain://"
_ADDRESS = f"{SCHEME}workers/"
# Any that vLLM takes: its own limit is not told, and it refuses what is above.
_MOST_RANK = 512
_ENGINE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainWorker:
    """An engine without an agent, as somebody names it."""

    id: str
    engine_url: str
    pool: str = ""
    zone: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What may be loaded into engines without an agent: so many adapters each, from below these folders of theirs."""

    slots: int = 0
    roots: tuple[PurePosixPath, ...] = ()


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class _Hand:
    """One engine's part of the agent's interface."""

    def __init__(
        self,
        worker: PlainWorker,
        client: httpx.AsyncClient,
        allowed: Allowed,
        *,
        digest_of: Callable[[str], str | None],
        clock: Callable[[], float],
    ) -> None:
        self.worker = worker
        self._client = client
        self._allowed = allowed
        self._digest_of = digest_of
        self._engine = PlainEngine(
            worker.id, worker.engine_url, self._get, zone=worker.zone, node=worker.node, clock=clock
        )
        self._lock = asyncio.Lock()
        self._epoch = 0
        self._is_draining = False
        self._takes: tuple[str, bool] = ("", False)

    async def metadata(self) -> Metadata:
        """Raises OSError, ValueError."""
        said = await self._engine.report()
        loaded = tuple(lora.model_copy(update={"digest": self._digest(lora)}) for lora in said.lora.loaded_loras)
        is_allowed = bool(self._allowed.slots and self._allowed.roots)
        takes_loads = is_allowed and await self._takes_loads(said.engine_boot_id)
        slots = max(self._allowed.slots, len(loaded)) if takes_loads else 0
        lora = said.lora.model_copy(
            update={
                "enabled": takes_loads,
                "max_cpu_loras": slots,
                "max_lora_rank": _MOST_RANK if takes_loads else 0,
                "loaded_loras": loaded,
                "capacity": LoraCapacity(
                    loaded_count=len(loaded), available_slots=max(0, slots - len(loaded)), host_slots=slots
                ),
            }
        )
        state = {"state": "draining"} if self._is_draining else {}
        address = {"agent_url": plain_url(self.worker.id), "pool": self.worker.pool, "epoch": self._epoch}
        return said.model_copy(update={"lora": lora} | state | address)

    async def claim(self, _ask: ClaimRequest, epoch: int) -> Metadata:
        self._epoch = max(self._epoch, epoch)
        return await self.metadata()

    async def inspect_lora(self, ask: InspectRequest, _epoch: int) -> AvailableLora:
        path = self._path(ask.source)
        if ask.digest is None:
            message = (
                f"worker {self.worker.id} has no agent, so nobody can read {ask.source} there: register {ask.lora_id}"
                " with its digest, or let a worker that has an agent inspect it"
            )
            raise _Refused(422, "source_unsupported", message)
        base_model = ask.base_model or (await self.metadata()).model.base_model
        return AvailableLora(lora_id=ask.lora_id, path=path, base_model=base_model, rank=0, digest=ask.digest)

    async def load_lora(self, ask: LoadRequest, _epoch: int) -> LoadedLora:
        path = self._path(ask.source or "")
        if ask.digest is None:
            raise _Refused(422, "source_unsupported", f"{ask.lora_id}: nobody knows its digest yet")
        name = engine_name(ask.lora_id, ask.digest)
        async with self._lock:
            held = {lora.engine_name: lora for lora in (await self.metadata()).lora.loaded_loras}
            if name not in held:
                if ask.evict is not None and len(held) >= self._allowed.slots:
                    await self._unload(ask.evict)
                refusal = await self._refusal(
                    "load_lora_adapter", {"lora_name": name, "lora_path": path}, what=f"load {name}"
                )
                held = {lora.engine_name: lora for lora in (await self.metadata()).lora.loaded_loras}
                if name not in held:  # by its own list: vLLM refuses also what somebody has just loaded
                    no = f"load {name}: the engine said yes, but does not list it"
                    raise refusal or _Refused(422, "adapter_refused", no)
        return held[name]

    async def unload_lora(self, ask: UnloadRequest, _epoch: int) -> LoadedLoras:
        async with self._lock:
            found = [
                lora.engine_name
                for lora in (await self.metadata()).lora.loaded_loras
                if lora.lora_id == ask.lora_id and ask.digest in {None, lora.digest}
            ]
            for name in found:
                await self._unload(name)
        if not found:
            raise _Refused(404, "not_loaded", f"adapter {ask.lora_id!r} is not loaded on {self.worker.id}")
        return LoadedLoras(data=(await self.metadata()).lora.loaded_loras)

    async def drain(self, _ask: DrainRequest, _epoch: int) -> DrainAnswer:
        """Routers send it nothing new; it does not hear of it itself."""
        self._is_draining = True
        load = (await self.metadata()).load
        return DrainAnswer(is_drained=not load.running + load.waiting, running=load.running, waiting=load.waiting)

    async def undrain(self, _ask: UndrainRequest, _epoch: int) -> Metadata:
        self._is_draining = False
        return await self.metadata()

    def _digest(self, lora: LoadedLora) -> str:
        """The registered one, where the engine's name says that it is; else what the name has of one."""
        known, told = self._digest_of(lora.lora_id), lora.engine_name.removeprefix(lora.lora_id).removeprefix("@")
        return known if known is not None and told and known.startswith(told) else told

    def _path(self, source: str) -> str:
        """The folder on the engine's own disk that a source names; raises _Refused for any other source."""
        parts = urlsplit(source)
        path = PurePosixPath(unquote(parts.path))
        is_local = parts.scheme == "file" and not parts.netloc and path.is_absolute() and ".." not in path.parts
        if not is_local or not any(path.is_relative_to(root) for root in self._allowed.roots):
            below = ", ".join(f"file://{root}" for root in self._allowed.roots) or "nothing: engine_roots names none"
            message = f"{source!r}: worker {self.worker.id} has no agent, fetches nothing, and loads from below {below}"
            raise _Refused(422, "source_unsupported", message)
        return str(path)

    async def _takes_loads(self, boot_id: str) -> bool:
        """Whether VLLM_ALLOW_RUNTIME_LORA_UPDATING is set there: without it there is no such route, for any method."""
        if self._takes[0] != boot_id:
            answer = await self._client.get(f"{self.worker.engine_url}/v1/load_lora_adapter")
            self._takes = boot_id, answer.status_code == httpx.codes.METHOD_NOT_ALLOWED
            if not self._takes[1]:
                why = "no route to load adapters: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                log.warning("engine takes no adapters", worker_id=self.worker.id, status=answer.status_code, reason=why)
        return self._takes[1]

    async def _unload(self, name: str) -> None:
        refusal = await self._refusal("unload_lora_adapter", {"lora_name": name}, what=f"unload {name}")
        if refusal is not None and refusal.code != "source_not_found":  # gone already
            raise refusal

    async def _refusal(self, route: str, body: Mapping[str, str], *, what: str) -> _Refused | None:
        answer = await self._client.post(f"{self.worker.engine_url}/v1/{route}", json=body, timeout=_ENGINE_S)
        if answer.is_success:
            return None
        message = f"{what}: the engine answered {answer.status_code}: {answer.text[:500]}"
        # Only these speak of the adapter (vLLM 0.32, seen running); whatever else it is, it may pass.
        codes = {400: "adapter_refused", 404: "source_not_found", 500: "adapter_refused"}
        return _Refused(422, codes.get(answer.status_code, "engine_unreachable"), message)

    async def _get(self, path: str) -> bytes:
        try:
            answer = await self._client.get(self.worker.engine_url + path)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise ConnectionError(f"{self.worker.engine_url}{path}: {exc!r}") from exc
        if answer.status_code != httpx.codes.OK:
            raise ConnectionError(f"GET {self.worker.engine_url}{path}: {answer.status_code}")
        return answer.content


class PlainWorkers(httpx.AsyncBaseTransport):
    """All engines without an agent. `named` says which there are now; `key` is what they want to be shown."""

    def __init__(
        self,
        named: Callable[[], Sequence[PlainWorker]],
        allowed: Allowed,
        *,
        digest_of: Callable[[str], str | None],
        key: str = "",
        timeout_s: float,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._named = named
        self._allowed = allowed
        self._digest_of = digest_of
        self._every_s = every_s
        self._clock = clock
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(timeout=timeout_s, headers=headers, trust_env=False)
        self._hands: dict[str, _Hand] = {}

    async def run(self, hear: Callable[[Metadata], object]) -> None:
        """Speak for them as their agents' heartbeats would, until cancelled."""
        await forever(partial(self.beat, hear), name="plain", every_s=self._every_s)

    async def beat(self, hear: Callable[[Metadata], object]) -> None:
        """One report of each that answers."""
        named = {worker.id: worker for worker in self._named()}
        # One that is not named any more is known for as long as it answers: absence is no reason to let it go.
        for worker in named.values():
            hand = self._hands.get(worker.id)
            if hand is None or hand.worker != worker:
                self._hands[worker.id] = _Hand(
                    worker, self._client, self._allowed, digest_of=self._digest_of, clock=self._clock
                )
        answers = await asyncio.gather(*(self._report(hand) for hand in self._hands.values()))
        for id_, report in zip(tuple(self._hands), answers, strict=True):
            if report is not None:
                hear(report)
            elif id_ not in named:
                del self._hands[id_]

    async def _report(self, hand: _Hand) -> Metadata | None:
        try:
            return await hand.metadata()
        except (OSError, httpx.HTTPError, ValueError) as exc:
            log.debug("engine not heard", worker_id=hand.worker.id, error=str(exc))
            return None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """What an agent would answer. Raises httpx.ConnectError where its engine does not."""
        hand = self._hands.get(request.url.path.split("/")[1])
        verb = request.url.path.rpartition("/")[2]
        call = _CALLS.get(verb)
        if hand is None or (call is None and verb != "metadata"):
            return _json(404, envelope(404, "not_found", f"{request.url}: no engine without an agent has that"))
        try:
            if call is None:
                return _told(await hand.metadata())
            kind, act = call
            epoch = int(request.headers.get("x-lorafleet-epoch", "0"))
            return _told(await act(hand, kind.model_validate_json(await request.aread()), epoch))
        except _Refused as exc:
            return _json(exc.status, envelope(exc.status, exc.code, str(exc)))
        except httpx.TimeoutException as exc:
            return _json(504, envelope(504, "engine_timeout", repr(exc)))
        except (OSError, httpx.HTTPError, ValueError) as exc:
            raise httpx.ConnectError(str(exc), request=request) from exc

    async def aclose(self) -> None:
        await self._client.aclose()


_CALLS: Mapping[str, tuple[type[BaseModel], Callable[[_Hand, Any, int], Awaitable[BaseModel]]]] = {
    "claim": (ClaimRequest, _Hand.claim),
    "inspect_lora": (InspectRequest, _Hand.inspect_lora),
    "load_lora": (LoadRequest, _Hand.load_lora),
    "unload_lora": (UnloadRequest, _Hand.unload_lora),
    "drain": (DrainRequest, _Hand.drain),
    "undrain": (UndrainRequest, _Hand.undrain),
}


def plain_url(worker_id: str) -> str:
    """Where we find a worker that has no agent; nobody else does."""
    return _ADDRESS + quote(worker_id, safe="")


def agent_url_of(report: Metadata) -> str:
    """A worker's agent's URL as others may know it: none where it has none."""
    return "" if report.agent_url.startswith(SCHEME) else report.agent_url


def _told(answer: BaseModel) -> httpx.Response:
    return httpx.Response(200, content=answer.model_dump_json(), headers={"content-type": "application/json"})


def _json(status: int, body: Mapping[str, Any]) -> httpx.Response:
    return httpx.Response(status, json=body)
