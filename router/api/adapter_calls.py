"""The engines' own calls that load and unload adapters, for the whole fleet: trainers need only another base URL.

A load publishes the files as the next version of its name, at the orchestrator and with the caller's own key. The
answers are those of vLLM 0.32 (entrypoints/serve/lora/api_router.py) and, on `/load_lora_adapter`, also have the
fields of SGLang 0.5.23. A load is never answered 404 or 503: trainers take the first for a missing route (TRL), and
give up at the second (prime-rl).
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from lorafleet.keys.auth import AuthFirstRoute, requires
from lorafleet.service.decoding import DECODE_ERRORS
from orchestrator.model.names import checked_published_name
from router.api.control_calls import ControlCalls, ControlUnavailable, decode_error
from router.protocols.bodies import bad_json_error
from router.request.services import Services

VLLM_LOAD = "/v1/load_lora_adapter"
"""vLLM 0.32 refuses a name that is loaded, unless `load_inplace` is true. SkyRL's and prime-rl's routes replace it."""
VLLM_LOADS = (VLLM_LOAD, "/skyrl/v1/load_lora_adapter")
SGLANG_LOAD = "/load_lora_adapter"
SGLANG_UNLOAD = "/unload_lora_adapter"
UNLOADS = ("/v1/unload_lora_adapter", SGLANG_UNLOAD)

_MOST_BODY_BYTES = 64 * 1024
_CONFLICT = "version_conflict"
_HUB_ID_CODE = "source_is_repository"
"""An agent's code for a path that is not absolute, and the id of a repository on the hub, as vLLM takes them, too."""
# The statuses that say that the request itself is wrong. All others are answered as 500.
_OWN_STATUSES = frozenset({400, 401, 403})
# Of these a 409 or 422 speaks: the name is taken, the bytes are refused. vLLM answers 400 for both.
_CALLER_STATUSES = frozenset({409, 413, 422})


class LoadCall(msgspec.Struct, frozen=True):
    """The body of a load. Other fields of the engines (`pinned`, `is_3d_lora_weight`) change nothing here.

    load_inplace  whether the name may have a version already, which this one follows; None: as the route's engine does
    """

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool | None = None
    base_model_name: str | None = None


class UnloadCall(msgspec.Struct, frozen=True):
    """The body of an unload."""

    lora_name: str = ""


class _CatalogRevision(msgspec.Struct, frozen=True):
    """The catalog revision that has a new version."""

    revision: int = 0


class _PublishAnswer(msgspec.Struct, frozen=True):
    """The part of a publish's answer that this router needs."""

    status: _CatalogRevision = _CatalogRevision()


class _Refusal(Exception):
    """Why a load or unload was refused, as it is answered. `kind`: the error's type, in vLLM's words."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message


class _Success(NamedTuple):
    """The message of a success, as vLLM writes it; and SGLang's `loaded_adapters`."""

    message: str
    loaded: Mapping[str, str]


def adapter_call_routes(services: Services, control: httpx.AsyncClient) -> APIRouter:
    """The routes that load and unload adapters as the engines' own do. They need scope `register`."""
    checks = [Depends(requires(services.keys, "register"))]
    api = APIRouter(route_class=AuthFirstRoute, tags=["adapter calls"], dependencies=checks)
    publisher = _FleetPublisher(services, control)

    async def load(request: Request) -> Response:
        """Publish the files at `lora_path` as the next version of `lora_name`; answers when all workers have it."""
        return await _call_answer(request, publisher.load)

    async def unload(request: Request) -> Response:
        """Forget the name and unload its versions; what runs on them finishes. 404 if there is no such name."""
        return await _call_answer(request, publisher.unload)

    for path in (*VLLM_LOADS, SGLANG_LOAD):
        api.post(path, response_class=PlainTextResponse)(load)
    for path in UNLOADS:
        api.post(path, response_class=PlainTextResponse)(unload)
    return api


async def _call_answer(request: Request, call: Callable[[Request], Awaitable[_Success]]) -> Response:
    """The answer of the call: vLLM's, and below no `/v1` with SGLang's fields."""
    is_sglang = request.url.path in (SGLANG_LOAD, SGLANG_UNLOAD)
    try:
        done = await call(request)
    except _Refusal as exc:
        error = {"message": exc.message, "type": exc.kind, "param": None, "code": exc.status}
        more = {"success": False, "error_message": exc.message} if is_sglang else {}
        return JSONResponse({"error": error, **more}, exc.status)
    if is_sglang:
        return JSONResponse({"success": True, "error_message": None, "loaded_adapters": done.loaded})
    return PlainTextResponse(done.message)


class _FleetPublisher:
    """Calls the orchestrator's routes of published names."""

    def __init__(self, services: Services, control: httpx.AsyncClient) -> None:
        self._services = services
        self._calls = ControlCalls(services, control)

    async def load(self, request: Request) -> _Success:
        """Publish the files under the name. Raises _Refusal."""
        wanted: LoadCall = await _parsed_body(request, LoadCall)
        if not wanted.lora_name or not wanted.lora_path:
            raise _Refusal(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        _require_name(wanted.lora_name)
        within_s = self._services.config.publish_timeout_s
        deadline = self._services.clock() + within_s
        spec: dict[str, Any] = {"source": wanted.lora_path}
        may_follow = request.url.path != VLLM_LOAD if wanted.load_inplace is None else wanted.load_inplace
        if not may_follow:
            spec["expected_version"] = 0
        if wanted.base_model_name in self._services.discovery.fleet.base_models:
            spec["base_model"] = wanted.base_model_name

        def body() -> dict[str, Any]:
            """The spec, with the time that is left."""
            left_s = deadline - self._services.clock()
            return spec | {"timeout_s": max(0.1, left_s)}

        answer = await self._call("POST", wanted.lora_name, request, deadline, body)
        if decode_error(answer).code == _HUB_ID_CODE:
            spec["source"] = f"hf://{wanted.lora_path}"
            answer = await self._call("POST", wanted.lora_name, request, deadline, body)
        if decode_error(answer).code == _CONFLICT:
            raise _Refusal(400, "InvalidUserInput", _already_loaded(wanted.lora_name))
        if not answer.is_success:
            raise _refusal_for_error(answer)
        await self._require_here(wanted.lora_name, answer, deadline)
        message = f"Success: LoRA adapter '{wanted.lora_name}' added successfully."
        return _Success(message, {wanted.lora_name: wanted.lora_path})

    async def _require_here(self, name: str, answer: httpx.Response, deadline: float) -> None:
        """Wait until this router goes by the catalog that the orchestrator's answer speaks of. Raises _Refusal.

        The orchestrator does not wait for a router that it holds for cut off, and this one may be.
        """
        discovery = self._services.discovery
        revision = msgspec.json.decode(answer.content, type=_PublishAnswer).status.revision
        left_s = deadline - self._services.clock()
        if not await discovery.changes.until(lambda: discovery.fleet.revision >= revision, timeout_s=left_s):
            message = (
                f"'{name}' is published, but this router has not read that from the orchestrator in time: requests to"
                " this router may still get the version before; see its log, or send the load again"
            )
            raise _Refusal(500, "InternalServerError", message)

    async def unload(self, request: Request) -> _Success:
        """Delete the published name. Raises _Refusal, with status 404 for a name that does not exist."""
        name = (await _parsed_body(request, UnloadCall)).lora_name
        if not name:
            raise _Refusal(400, "InvalidUserInput", "'lora_name' needs to be provided to unload a LoRA adapter.")
        _require_name(name)
        deadline = self._services.clock() + self._services.config.publish_timeout_s
        answer = await self._call("DELETE", name, request, deadline, None)
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise _Refusal(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        if not answer.is_success:
            raise _refusal_for_error(answer)
        return _Success(f"Success: LoRA adapter '{name}' removed successfully.", {})

    async def _call(
        self,
        method: str,
        name: str,
        request: Request,
        deadline: float,
        body: Callable[[], Mapping[str, Any]] | None,
    ) -> httpx.Response:
        """The orchestrator's answer. Raises _Refusal."""
        if not self._calls.url:
            raise _Refusal(
                500,
                "InternalServerError",
                "this router follows engines without an orchestrator, and only an orchestrator loads adapters on all of"
                " them: start `python -m orchestrator` and an agent beside each engine, and give --orchestrator-url",
            )
        try:
            path = f"/v1/published/{quote(name)}"
            return await self._calls.send(request, method, path, deadline=deadline, body=body)
        except ControlUnavailable as exc:
            message = f"the orchestrator could not do it in time: {exc}; look whether it is up, then send this again"
            raise _Refusal(500, "InternalServerError", message) from exc


def _require_name(lora_name: str) -> None:
    """Raise _Refusal for a name that no published name can have, such as `x/`, which is not `x`."""
    try:
        checked_published_name(lora_name)
    except ValueError as exc:
        raise _Refusal(400, "InvalidUserInput", f"lora_name: {exc}") from exc


async def _parsed_body(request: Request, kind: type[Any]) -> Any:
    """The request's body as this kind. Raises _Refusal."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MOST_BODY_BYTES:
            raise _Refusal(400, "InvalidUserInput", f"the body has over {_MOST_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(bytes(content), type=kind)
    except msgspec.ValidationError as exc:
        raise _Refusal(400, "InvalidUserInput", f"not a body of this call: {exc}") from exc
    except DECODE_ERRORS as exc:
        raise _Refusal(400, "InvalidUserInput", str(bad_json_error(bytes(content), exc))) from exc


def _already_loaded(name: str) -> str:
    """The message for a load of a new name that exists, with other bytes: vLLM's, and how to keep two runs apart."""
    return (
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set"
        " 'load_inplace' to True. If it is another run's, give each run a base URL of its own: this one's with"
        f" /runs/NAME before the path [{_CONFLICT}]"
    )


def _refusal_for_error(answer: httpx.Response) -> _Refusal:
    """The refusal for the orchestrator's error: 400 for what the caller can mend, else 500; never 404 or 503."""
    code, message = decode_error(answer)
    text = f"{message} [{code}]" if code else message
    if answer.status_code in _OWN_STATUSES:
        return _Refusal(answer.status_code, "InvalidUserInput", text)
    if answer.status_code in _CALLER_STATUSES:
        return _Refusal(400, "InvalidUserInput", text)
    return _Refusal(500, "InternalServerError", text)
