"""A client of the Kubernetes API server in raw JSON, with a deadline for each call."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import structlog

from lorafleet.kube.access import ACCOUNT, AccessSource, ApiServerAccess, find_access_source
from lorafleet.kube.errors import KubeConfigError, KubeError, KubeUnreachable, error_of_answer
from lorafleet.service.decoding import DECODE_ERRORS
from lorafleet.service.network.transport import DirectTransport, why_no_answer

log = structlog.get_logger()

Json = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"
FIELD_MANAGER = "lorafleet"
"""Our field manager, which conflicts of server-side apply name."""
_WRITES = frozenset({"POST", "PUT", "PATCH"})


async def connect(
    kubeconfig: Path | None = None, *, environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT
) -> "KubeClient":
    """A client for the configured cluster. Reads the credentials; makes no call yet.

    kubeconfig  None takes KUBECONFIG, else the pod's service account
    raises      KubeConfigError
    """
    source = find_access_source(kubeconfig, environ, account)
    return KubeClient(source, await source.read())


@asynccontextmanager
async def open_client(source: AccessSource) -> AsyncIterator["KubeClient"]:
    """A client for an access source, closed at the end; raises KubeConfigError."""
    kube = KubeClient(source, await source.read())
    try:
        yield kube
    finally:
        await kube.close()


class KubeClient:
    """A client of one API server. Every call may raise KubeError or its subclass for the status."""

    def __init__(self, source: AccessSource, access: ApiServerAccess) -> None:
        self._source = source
        self._access = access
        self._client = _new_http_client(access)
        self._renewing = asyncio.Lock()

    @property
    def namespace(self) -> str:
        """The namespace of this pod, or of the kubeconfig's context."""
        return self._access.namespace

    @property
    def url(self) -> str:
        """The API server's address."""
        return self._access.url

    async def get(self, path: str, *, timeout_s: float = 10.0, **params: str | int) -> Json:
        """GET `path` with `params` as its query; returns the answer's JSON object. Raises KubeError."""
        return await self._call("GET", path, timeout_s=timeout_s, params=params)

    async def post(self, path: str, body: Json, *, timeout_s: float = 10.0) -> Json:
        """POST `body`; returns the answer's JSON object. Raises KubeError."""
        return await self._call("POST", path, timeout_s=timeout_s, body=body)

    async def put(self, path: str, body: Json, *, timeout_s: float = 10.0) -> Json:
        """PUT `body`; returns the answer's JSON object. Raises KubeError."""
        return await self._call("PUT", path, timeout_s=timeout_s, body=body)

    async def patch(self, path: str, body: Any, *, content_type: str = MERGE_PATCH, timeout_s: float = 10.0) -> Json:
        """PATCH by `body`, a merge patch by default; returns the answer's JSON object. Raises KubeError."""
        return await self._call("PATCH", path, timeout_s=timeout_s, body=body, content_type=content_type)

    async def delete(self, path: str, body: Json | None = None, *, timeout_s: float = 10.0) -> Json:
        """DELETE; `body` has DeleteOptions, such as preconditions. Returns the answer's JSON object.

        Raises KubeError.
        """
        return await self._call("DELETE", path, timeout_s=timeout_s, body=body)

    @asynccontextmanager
    async def stream(
        self, path: str, *, head_timeout_s: float = 10.0, read_timeout_s: float, **params: str | int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """GET `path` and yield the lines of its endless answer; raises KubeError.

        It is a KubeUnreachable if no head comes within `head_timeout_s`, or no byte for `read_timeout_s`.
        """
        call = f"GET {self.url}{path}"
        try:
            async with asyncio.timeout(head_timeout_s):
                answer = await self._send("GET", path, params=params, read_s=read_timeout_s)
        except TimeoutError as exc:
            raise KubeUnreachable(f"{call}: no answer within {head_timeout_s:g} s") from exc
        try:
            if not answer.is_success:
                async with asyncio.timeout(head_timeout_s):
                    await answer.aread()
                raise _answer_error(call, answer)
            yield _stream_lines(answer)
        except httpx.HTTPError as exc:
            raise KubeUnreachable(f"{call}: {why_no_answer(exc)}") from exc
        finally:
            await answer.aclose()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        params: Mapping[str, str | int] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Json:
        """Make a call within a deadline and return its JSON object; raises KubeError."""
        call = f"{method} {self.url}{path}"
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._send(method, path, params=params, body=body, content_type=content_type)
                try:
                    content = await answer.aread()
                finally:
                    await answer.aclose()
        except TimeoutError as exc:
            raise KubeUnreachable(f"{call}: no answer within {timeout_s:g} s") from exc
        except httpx.HTTPError as exc:
            raise KubeUnreachable(f"{call}: {why_no_answer(exc)}") from exc
        if not answer.is_success:
            raise _answer_error(call, answer)
        try:
            source = msgspec.json.decode(content)
        except DECODE_ERRORS as exc:
            raise KubeUnreachable(f"{call}: answered with something other than JSON: {content[:200]!r}") from exc
        if not isinstance(source, dict):
            raise KubeUnreachable(f"{call}: answered with something other than an object: {content[:200]!r}")
        return source

    async def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | int] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        read_s: float | None = None,
    ) -> httpx.Response:
        """Send a request and return the answer with its body unread; raises KubeUnreachable.

        After a 401 the token is read again, and a changed one is tried at once. After a certificate error the authority
        is read again, for the next call.
        """
        content = None if body is None else msgspec.json.encode(body)
        own_params = {"fieldManager": FIELD_MANAGER} if method in _WRITES else {}
        for is_last in (False, True):
            client, token = self._client, self._token()
            request = client.build_request(
                method,
                self.url + path,
                params={**own_params, **(params or {})},
                content=content,
                headers=_request_headers(token, content_type if content is not None else None),
                # Without `read_s` only the caller's deadline for the whole call applies.
                timeout=httpx.Timeout(None, read=read_s),
                extensions={"sni_hostname": self._access.server_name} if self._access.server_name else None,
            )
            try:
                answer = await client.send(request, stream=True)
            except httpx.HTTPError as exc:
                if _is_certificate_error(exc):
                    await self._reload_trust()
                raise KubeUnreachable(f"{method} {self.url}{path}: {why_no_answer(exc)}") from exc
            if answer.status_code != httpx.codes.UNAUTHORIZED or is_last or not await self._renew_token(token):
                return answer
            await answer.aclose()
        raise AssertionError("the second answer is returned")

    def _token(self) -> str:
        """The source's current token, else the token of the last read."""
        return self._source.token() or self._access.token

    async def _renew_token(self, refused: str) -> bool:
        """Read the token again and keep it; false if it still is `refused`, or cannot be read (logged)."""
        async with self._renewing:
            if self._token() != refused:
                return True
            try:
                access = await self._source.read()
            except KubeConfigError as exc:
                log.warning("API server's credentials not read again", error=str(exc))
                return False
            if access.token == refused:
                return False
            log.info("API server's credentials renewed", url=access.url)
            self._access = replace(self._access, token=access.token)
            return True

    async def _reload_trust(self) -> None:
        """Read the credentials again and replace the HTTP client, as a cluster may replace its certificate authority.

        Closes the former client. A read error is logged, and then nothing changes.
        """
        async with self._renewing:
            try:
                access = await self._source.read()
            except KubeConfigError as exc:
                log.warning("API server's credentials not read again", error=str(exc))
                return
            old, self._access, self._client = self._client, access, _new_http_client(access)
            await old.aclose()


def _is_certificate_error(exc: httpx.HTTPError) -> bool:
    """Whether the error is a server certificate that is not trusted."""
    # httpcore 1.0 keeps only the message of the ssl module's error.
    return "CERTIFICATE_VERIFY_FAILED" in str(exc)


def _new_http_client(access: ApiServerAccess) -> httpx.AsyncClient:
    """A new HTTP client with the access's TLS context and proxy."""
    # Without the environment's proxies, which are for traffic out of the cluster.
    verify = access.tls if access.tls is not None else False  # False: plain http
    return httpx.AsyncClient(transport=DirectTransport(verify=verify, proxy=access.proxy), trust_env=False)


def _request_headers(token: str, content_type: str | None) -> dict[str, str]:
    """A request's headers: accept JSON, the bearer token, and the body's content type if there is a body."""
    headers = {"accept": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    if content_type is not None:
        headers["content-type"] = content_type
    return headers


def _answer_error(call: str, answer: httpx.Response) -> KubeError:
    """The error for an unsuccessful answer, with its JSON or text and its Retry-After in seconds."""
    try:
        body: Any = msgspec.json.decode(answer.content)
    except DECODE_ERRORS:
        body = answer.text
    try:
        retry_after_s = float(answer.headers["retry-after"])
    except (KeyError, ValueError):
        retry_after_s = None
    return error_of_answer(call, answer.status_code, body, retry_after_s=retry_after_s)


async def _stream_lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Non-empty lines of a stream; a last line without a line feed is dropped.

    A line may have a megabyte, so its pieces are joined once.
    """
    pieces: list[bytes] = []
    async for piece in answer.aiter_bytes():
        first, *others = piece.split(b"\n")
        pieces.append(first)
        for other in others:
            line = b"".join(pieces)
            pieces = [other]
            if line.strip():
                yield line
