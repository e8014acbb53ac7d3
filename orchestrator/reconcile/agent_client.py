"""The client of the workers' agents: one method per call. Failures become our errors by the agent's error code."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from lorafleet.engine.worker_proofs import AgentProofs, AgentUnproved
from lorafleet.keys.own_key import OwnKey
from lorafleet.service.http.known_fields import WIRE_HEADERS, type_adapter
from lorafleet.service.network.tls import Tls, worker_name
from lorafleet.service.network.transport import DirectTransport, why_no_answer
from orchestrator.agentless.transport import SCHEME
from orchestrator.core.errors import InvalidAdapter, LeaseLost, WorkerFailed
from orchestrator.core.failures import FINAL_CODES
from orchestrator.reconcile.agent_view import AsOf
from workers.wire import (
    REPORT_HEADER,
    AvailableLoras,
    BeginFileRequest,
    CheckRequest,
    ClaimRequest,
    DrainRequest,
    InspectRequest,
    LoadRequest,
    LogTail,
    MarkFilesRequest,
    Metadata,
    UndrainRequest,
    UnfinishedUploads,
    UnloadRequest,
    UploadState,
    WorkerAdapter,
)

M = TypeVar("M")

_NUMBER_DIGITS = 15
_MOST_PROOF_BYTES = 16_384
_MOST_CONFIGURED = 100_000


class AgentAdapterAnswer(NamedTuple):
    """An agent's answer about one adapter, and its place among the agent's reports."""

    adapter: WorkerAdapter
    as_of: AsOf


class AgentClient:
    """Calls agents. Every action carries our epoch, and may be repeated: agents answer what is done already alike.

    An address is called with our key only once it has proved to be a worker's. Actions whose result is recorded return
    it with `AsOf`, the place of the answer among the agent's reports.
    """

    def __init__(
        self, client: httpx.AsyncClient, *, agent_key: OwnKey, proofs: AgentProofs, epoch: Callable[[], Awaitable[int]]
    ) -> None:
        """
        agent_key  our key for agents, which opens nothing else
        epoch      returns our epoch; it is awaited before each action and raises LeaseLost when we may not act
        """
        self._client = client
        self._epoch = epoch
        self._agent_key = agent_key
        self.proofs = proofs

    async def key_headers(self, agent_url: str) -> dict[str, str]:
        """The header with our key for this agent, once its address is proved. Raises WorkerFailed `worker_unproved`."""
        if agent_url.startswith(SCHEME):
            return {}
        try:
            await self.proofs.prove(agent_url)
        except AgentUnproved as exc:
            code = "worker_unproved" if exc.is_answered else "worker_unreachable"
            raise WorkerFailed(str(exc), code=code) from exc
        return self._agent_key.headers

    async def metadata(self, agent_url: str, *, timeout_s: float) -> Metadata:
        """Read the agent's report. Raises WorkerFailed, InvalidAdapter, LeaseLost."""
        return _parsed_answer(Metadata, await self._send_request("GET", agent_url, "/metadata", timeout_s=timeout_s))

    async def configured_adapters(self, agent_url: str, *, timeout_s: float) -> tuple[WorkerAdapter, ...]:
        """Read which adapters the worker's settings name. Raises WorkerFailed, InvalidAdapter, LeaseLost."""
        found: list[WorkerAdapter] = []
        cursor: str | None = ""
        while cursor is not None and len(found) < _MOST_CONFIGURED:
            path = f"/v1/metadata/loras?configured=true&limit=1000&cursor={quote(cursor, safe='')}"
            page = _parsed_answer(AvailableLoras, await self._send_request("GET", agent_url, path, timeout_s=timeout_s))
            found += page.data
            cursor = page.next
        return tuple(found)

    async def log_tail(self, agent_url: str, lines: int, *, timeout_s: float) -> LogTail:
        """Read the last lines of the agent's log. Raises WorkerFailed, InvalidAdapter, LeaseLost."""
        answer = await self._send_request("GET", agent_url, f"/v1/log?lines={lines}", timeout_s=timeout_s)
        return _parsed_answer(LogTail, answer)

    async def claim(self, agent_url: str, *, timeout_s: float) -> Metadata:
        """Make the agent refuse every older epoch; returns its report. Raises WorkerFailed, LeaseLost."""
        return _parsed_answer(
            Metadata, await self._post_action(agent_url, "claim", ClaimRequest(), timeout_s=timeout_s)
        )

    async def inspect(self, agent_url: str, ask: InspectRequest, *, timeout_s: float) -> AgentAdapterAnswer:
        """Fetch and verify the adapter. Raises InvalidAdapter about source or bytes, else WorkerFailed or LeaseLost."""
        answer = await self._post_action(agent_url, "inspect_lora", ask, timeout_s=timeout_s)
        return AgentAdapterAnswer(_parsed_answer(WorkerAdapter, answer), _answer_as_of(answer))

    async def check_source(self, agent_url: str, source: str, *, timeout_s: float) -> None:
        """Ask whether the worker's settings allow the source.

        Raises InvalidAdapter if they do not, else WorkerFailed or LeaseLost.
        """
        await self._send_request(
            "GET", agent_url, f"/v1/admin/source?source={quote(source, safe='')}", timeout_s=timeout_s
        )

    async def load(self, agent_url: str, ask: LoadRequest, *, timeout_s: float) -> AgentAdapterAnswer:
        """Load the adapter. Raises InvalidAdapter about source or bytes, else WorkerFailed or LeaseLost."""
        answer = await self._post_action(agent_url, "load_lora", ask, timeout_s=timeout_s)
        return AgentAdapterAnswer(_parsed_answer(WorkerAdapter, answer), _answer_as_of(answer))

    async def check(self, agent_url: str, ask: CheckRequest, *, timeout_s: float) -> AgentAdapterAnswer:
        """Compare the loaded adapter with its acceptance file. Raises InvalidAdapter, WorkerFailed, LeaseLost."""
        answer = await self._post_action(agent_url, "check_lora", ask, timeout_s=timeout_s)
        return AgentAdapterAnswer(_parsed_answer(WorkerAdapter, answer), _answer_as_of(answer))

    async def mark_files(self, agent_url: str, ask: MarkFilesRequest, *, timeout_s: float) -> AsOf:
        """Have the agent keep files, or let it delete them again. Raises InvalidAdapter, WorkerFailed, LeaseLost."""
        return _answer_as_of(await self._post_action(agent_url, "mark_files", ask, timeout_s=timeout_s))

    async def unload(self, agent_url: str, ask: UnloadRequest, *, timeout_s: float) -> AsOf:
        """Unload the adapter, also where it is not loaded. Raises WorkerFailed, InvalidAdapter, LeaseLost."""
        return _answer_as_of(await self._post_action(agent_url, "unload_lora", ask, timeout_s=timeout_s))

    async def drain(self, agent_url: str, ask: DrainRequest, *, timeout_s: float) -> None:
        """Make the agent drain its worker, and wait until it has drained.

        Raises WorkerFailed, InvalidAdapter, LeaseLost.
        """
        await self._post_action(agent_url, "drain", ask, timeout_s=timeout_s)

    async def undrain(self, agent_url: str, *, timeout_s: float) -> Metadata:
        """Make the agent of a drained worker take requests again; returns its report.

        Raises WorkerFailed, also from an older agent without this call, InvalidAdapter, LeaseLost.
        """
        return _parsed_answer(
            Metadata, await self._post_action(agent_url, "undrain", UndrainRequest(), timeout_s=timeout_s)
        )

    async def engine_models(self, engine_url: str, *, timeout_s: float) -> frozenset[str] | None:
        """Ask the engine for its model names; None if it is up without a list. Raises WorkerFailed if it is not up."""
        await self._send_request("GET", engine_url, "/health", timeout_s=timeout_s, headers={})
        try:
            answer = await self._send_request("GET", engine_url, "/v1/models", timeout_s=timeout_s, headers={})
            return frozenset(str(item["id"]) for item in answer.json()["data"])
        except (WorkerFailed, InvalidAdapter, ValueError, KeyError, TypeError):
            return None

    async def upload_state(self, agent_url: str, upload_id: str, *, timeout_s: float) -> UploadState:
        """What has come of an upload. Raises WorkerFailed (`upload_unknown`: nothing), InvalidAdapter, LeaseLost."""
        return _parsed_answer(
            UploadState, await self._send_request("GET", agent_url, f"/v1/uploads/{upload_id}", timeout_s=timeout_s)
        )

    async def unfinished_uploads(self, agent_url: str, *, timeout_s: float) -> tuple[UploadState, ...]:
        """The uploads on a worker that are not installed yet. Raises WorkerFailed, InvalidAdapter, LeaseLost."""
        answer = await self._send_request("GET", agent_url, "/v1/uploads", timeout_s=timeout_s)
        return _parsed_answer(UnfinishedUploads, answer).data

    async def begin_file(
        self, agent_url: str, upload_id: str, name: str, ask: BeginFileRequest, *, timeout_s: float
    ) -> None:
        """Begin a file of an upload. Raises WorkerFailed (`disk_full`: no room for it), InvalidAdapter, LeaseLost."""
        await self._post_action(agent_url, f"/v1/uploads/{upload_id}/{name}", ask, timeout_s=timeout_s)

    async def send_file(
        self,
        agent_url: str,
        upload_id: str,
        name: str,
        start: int,
        chunks: AsyncIterator[bytes],
        *,
        length: int | None,
        timeout_s: float,
    ) -> UploadState:
        """Pass bytes of a file on as they come. Raises as `upload_state`, and what `chunks` raises.

        length     how many bytes they are; None: not known
        timeout_s  without progress at the agent
        """
        headers = {"content-type": "application/octet-stream"} | await self._action_headers(agent_url)
        if length is not None:
            headers["content-length"] = str(length)
        path = f"/v1/uploads/{upload_id}/{name}?start={start}"
        answer = await self._request("PUT", agent_url, path, headers, timeout_s=timeout_s, content=chunks)
        return _parsed_answer(UploadState, answer)

    async def install_upload(
        self, agent_url: str, upload_id: str, ask: InspectRequest, *, timeout_s: float
    ) -> AgentAdapterAnswer:
        """Have an upload verified and installed. Raises InvalidAdapter about its bytes, WorkerFailed, LeaseLost."""
        answer = await self._post_action(agent_url, f"/v1/uploads/{upload_id}", ask, timeout_s=timeout_s)
        return AgentAdapterAnswer(_parsed_answer(WorkerAdapter, answer), _answer_as_of(answer))

    async def drop_upload(self, agent_url: str, upload_id: str, *, timeout_s: float) -> None:
        """Have what has come of an upload deleted. Raises WorkerFailed, InvalidAdapter, LeaseLost."""
        headers = await self._action_headers(agent_url)
        await self._request("DELETE", agent_url, f"/v1/uploads/{upload_id}", headers, timeout_s=timeout_s)

    async def _action_headers(self, agent_url: str) -> dict[str, str]:
        """The headers of an action: our epoch and our key. Raises LeaseLost when we may not act, WorkerFailed."""
        key = await self.key_headers(agent_url)
        return {"x-lorafleet-epoch": str(await self._epoch())} | key

    async def _post_action(
        self,
        agent_url: str,
        verb_or_path: str,
        ask: BaseModel,
        *,
        timeout_s: float,
    ) -> httpx.Response:
        """POST an action with our epoch. Raises WorkerFailed, InvalidAdapter, LeaseLost."""
        headers = await self._action_headers(agent_url)
        body = ask.model_dump(mode="json", exclude_none=True)
        path = verb_or_path if verb_or_path.startswith("/") else f"/v1/admin/{verb_or_path}"
        return await self._send_request("POST", agent_url, path, timeout_s=timeout_s, body=body, headers=headers)

    async def _send_request(
        self,
        method: str,
        base_url: str,
        path: str,
        *,
        timeout_s: float,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Send one request, by default with our key. Raises WorkerFailed, InvalidAdapter, LeaseLost."""
        headers = await self.key_headers(base_url) if headers is None else headers
        return await self._request(method, base_url, path, headers, timeout_s=timeout_s, json=body)

    async def _request(
        self,
        method: str,
        agent_url: str,
        path: str,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        **body: Any,
    ) -> httpx.Response:
        """Send one request with a body as httpx takes it. Raises WorkerFailed, InvalidAdapter, LeaseLost."""
        url = agent_url.rstrip("/") + path
        try:
            answer = await self._client.request(
                method, url, headers={**WIRE_HEADERS, **headers}, timeout=timeout_s, **body
            )
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            self.proofs.forget(agent_url)  # by the next call another may have the address
            raise WorkerFailed(f"{method} {url}: {why_no_answer(exc)}", code="worker_unreachable") from exc
        if answer.is_success:
            return answer
        raise _error_of_response(method, url, answer)


async def meet_worker(tls: Tls, timeout_s: float, agent_url: str, worker_id: str) -> None:
    """Check that the certificate at an address is this worker's own. Raises AgentUnproved.

    On a connection of its own: those of the pool were opened to any worker.
    """
    name = worker_name(worker_id)
    try:
        async with httpx.AsyncClient(transport=DirectTransport(tls=tls), trust_env=False, timeout=timeout_s) as client:
            await client.get(f"{agent_url}/health", extensions={"sni_hostname": name})
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise AgentUnproved(f"no proof that {agent_url} is worker {worker_id}: {exc}", is_answered=False) from exc


async def ask_for_proof(client: httpx.AsyncClient, timeout_s: float, agent_url: str, path: str, body: bytes) -> bytes:
    """Post a request for a proof, which carries no key; the answer's body. Raises AgentUnproved."""
    url = agent_url + path
    advice = "the orchestrator must reach the agent at its --advertise-url"
    headers = {"content-type": "application/json", **WIRE_HEADERS}
    found = bytearray()
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream("POST", url, content=body, headers=headers, timeout=timeout_s) as answer,
        ):
            async for chunk in answer.aiter_bytes():
                found += chunk
                if len(found) > _MOST_PROOF_BYTES:
                    raise AgentUnproved(f"{url} answers more than a proof", is_answered=True)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as exc:
        raise AgentUnproved(f"POST {url}: {why_no_answer(exc)}; {advice}", is_answered=False) from exc
    if not answer.is_success:
        whole = httpx.Response(answer.status_code, content=bytes(found))
        error = _error_of_response("POST", url, whole)
        raise AgentUnproved(f"{agent_url} does not prove that it is a worker: {error}; {advice}", is_answered=True)
    return bytes(found)


def _error_of_response(method: str, url: str, answer: httpx.Response) -> WorkerFailed | InvalidAdapter | LeaseLost:
    """The error for an agent's response, by its error code."""
    code, message = "worker_failed", f"{method} {url}: HTTP {answer.status_code}"
    try:
        error = from_json(answer.content)["error"]  # stricter than `json`: what it accepts can be encoded again
        code, message = str(error["code"] or code), str(error["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{message}: {answer.text[:200]!r}"
    if code == "stale_epoch":
        return LeaseLost(message)
    if code in FINAL_CODES:
        return InvalidAdapter(message, code=code)
    return WorkerFailed(message, code=code)


def _answer_as_of(answer: httpx.Response) -> AsOf:
    """The place of an answer among the agent's reports. An older agent, or another's header, gives none."""
    boot_id, _, number = answer.headers.get(REPORT_HEADER, "").rpartition("/")
    is_number = number.isascii() and number.isdigit() and len(number) <= _NUMBER_DIGITS
    return AsOf(boot_id, int(number)) if boot_id and is_number else AsOf()


def _parsed_answer(cls: type[M], answer: httpx.Response) -> M:
    """The response as this model. Raises WorkerFailed."""
    kind: Any = cls
    try:
        message: M = type_adapter(kind).validate_json(answer.content)
    except ValidationError as exc:
        raise WorkerFailed(f"{answer.request.url}: not a {cls.__name__}: {exc}", code="worker_speaks_nonsense") from exc
    return message
