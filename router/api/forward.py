"""Calls about adapters that clients send to the router, so that they need one URL: passed on to the orchestrator.

They go with the caller's own key: the orchestrator checks scope, tenant and name. Bodies and answers pass as they come.
"""

from collections.abc import AsyncIterator
from typing import Annotated

import httpx
from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from lorafleet.keys.auth import KEY_HEADERS, ApiKeys, requires
from lorafleet.keys.runs import RUN, path_behind_run, path_in_run
from lorafleet.service.failure import CommandFailed
from lorafleet.service.http import HttpError
from lorafleet.service.http.openapi import UPLOAD_SCHEMA
from lorafleet.service.network.tls import Tls
from lorafleet.service.network.transport import DirectTransport
from lorafleet.service.network.urls import url_path
from lorafleet.telemetry.request_log import ID_HEADER

LoraIdPath = Annotated[str, Path(description="an adapter's lora_id, which may contain slashes")]
NamePath = Annotated[str, Path(description="a published name, which may contain slashes")]
UPLOADS_PATH = "/v1/adapters/"
MOST_UPLOAD_BYTES = 1 << 60  # the orchestrator knows the limit, and refuses more before it is sent
_UPLOAD = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": UPLOAD_SCHEMA}}}}
_WAIT_S = 330.0
"""Until the orchestrator answers, once it has the whole body: it verifies an upload, or loads a published version."""
_PASSED_ON = (
    *KEY_HEADERS,
    "accept",
    "content-length",
    "content-range",
    "content-type",
    "if-match",
    ID_HEADER.decode(),
)
_ANSWERED = ("content-type", "content-length", "etag", "retry-after", "upload-offset", "www-authenticate")


def forward_routes(
    keys: ApiKeys, orchestrator_url: str, *, connect_timeout_s: float, tls: Tls | None = None
) -> APIRouter:
    """The routes that are passed on; none without an orchestrator.

    tls  of this router, whose certificate these calls do not show: only the client's own key counts for them
    """
    api = APIRouter(tags=["adapters"])
    if not orchestrator_url:
        return api
    timeout = httpx.Timeout(_WAIT_S, connect=connect_timeout_s)
    own = None if tls is None else tls.without_certificate()

    async def forward_adapter(request: Request, lora_id: LoraIdPath) -> Response:  # noqa: ARG001  (documented)
        """Pass the request on, and its answer back."""
        return await _forward_to_orchestrator(request, orchestrator_url, timeout, own)

    async def forward_name(request: Request, name: NamePath) -> Response:  # noqa: ARG001
        """Pass the request on, and its answer back."""
        return await _forward_to_orchestrator(request, orchestrator_url, timeout, own)

    for verb in ("ensure", "check"):
        path, name = f"/v1/adapters/{{lora_id:path}}/{verb}", f"{verb}_at_orchestrator"
        api.add_api_route(path, forward_adapter, methods=["POST"], name=name, operation_id=verb)
    # Before its body is read, an upload needs a key that may upload.
    registrar = [Depends(requires(keys, "register"))]
    for path, forward in (
        ("/v1/adapters/{lora_id:path}", forward_adapter),
        ("/v1/uploads/{lora_id:path}", forward_adapter),
        ("/v1/published/{name:path}", forward_name),
    ):
        for method in ("GET", "DELETE", *(("PUT",) if path.startswith(UPLOADS_PATH) else ())):
            checks = registrar if method == "PUT" else []
            name = f"{method.lower()}_{path.split('/')[2]}_at_orchestrator"
            api.add_api_route(
                path,
                forward,
                methods=[method],
                dependencies=checks,
                name=name,
                operation_id=name,
                openapi_extra=_UPLOAD if method == "PUT" else None,
            )
    return api


def upload_bytes(method: str, path: str) -> int:
    """Most bytes of a body, for the route that takes an adapter's files; else 0."""
    return MOST_UPLOAD_BYTES if method == "PUT" and path_behind_run(path).startswith(UPLOADS_PATH) else 0


async def _forward_to_orchestrator(
    request: Request, orchestrator_url: str, limits: httpx.Timeout, tls: Tls | None
) -> Response:
    """The orchestrator's answer. Raises HttpError 503 `orchestrator_unreachable` if there is none, or another's."""
    try:
        path = url_path(request.scope["path"].removeprefix("/"))
        path = path_in_run(request.scope.get(RUN, ""), f"/{path}")
        target = orchestrator_url + path + (f"?{request.url.query}" if request.url.query else "")
    except CommandFailed as exc:
        raise HttpError(400, "invalid_request", str(exc)) from exc
    headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    has_body = request.method in ("PUT", "POST")
    client = httpx.AsyncClient(transport=DirectTransport(tls=tls), trust_env=False, timeout=limits)
    try:
        sent = client.build_request(
            request.method, target, headers=headers, content=request.stream() if has_body else None
        )
        answer = await client.send(sent, stream=True)
    except ClientDisconnect:
        await client.aclose()
        return Response(status_code=400)  # nobody reads it
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        await client.aclose()
        message = f"the orchestrator does not answer ({type(exc).__name__}): send it again; an upload goes on"
        raise HttpError(503, "orchestrator_unreachable", message, retry_after_s=2.0) from exc
    except BaseException:
        await client.aclose()
        raise

    if answer.is_error and "json" not in answer.headers.get("content-type", ""):
        await answer.aclose()
        await client.aclose()
        message = f"something else than an orchestrator answers HTTP {answer.status_code} there: see --orchestrator-url"
        raise HttpError(503, "orchestrator_unreachable", message, retry_after_s=2.0)

    async def body() -> AsyncIterator[bytes]:
        """The answer's bytes; closes the connection at their end."""
        try:
            async for chunk in answer.aiter_raw():
                yield chunk
        finally:
            await answer.aclose()
            await client.aclose()

    kept = {name: answer.headers[name] for name in _ANSWERED if name in answer.headers}
    return StreamingResponse(body(), status_code=answer.status_code, headers=kept)
