"""Routes that are open without a key: probes, metrics, and the console.

The console's files come with the package; it reads over REST with the reader's own key or token.
"""

import gzip
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from fastapi import APIRouter, Header
from fastapi.params import Depends
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from pydantic import ConfigDict
from pydantic.config import JsonDict

from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.issuers import ConsoleLogin
from lorafleet.keys.signing_keys import Endpoints
from orchestrator.core.errors import NotFound, OrchestratorUnavailable, StoreError
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.model.health import Status
from orchestrator.reconcile.reconciler import Reconciler

FOLDER = Path(__file__).with_name("console")
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
# uPlot and Preact set styles through the DOM's own objects, which needs no permission.
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # A browser asks each time whether its copy is still the newest: an upgrade shows at once.
    "cache-control": "no-cache",
}


_LOGIN: JsonDict = {
    "issuer": "https://login.example.com/realms/ml",
    "client": {"client_id": "lorafleet", "scope": "openid profile", "token": "access_token"},
    "endpoints": {
        "authorization": "https://login.example.com/realms/ml/protocol/openid-connect/auth",
        "token": "https://login.example.com/realms/ml/protocol/openid-connect/token",
        "end_session": "https://login.example.com/realms/ml/protocol/openid-connect/logout",
    },
}


def page_policy(logins: Sequence["LoginItem"] = ()) -> str:
    """The page's Content-Security-Policy: calls go to this server, and to the token endpoints of these logins."""
    endpoints = map(urlsplit, sorted({login.endpoints.token for login in logins}))
    connect = " ".join([_POLICY["connect-src"], *(f"{url.scheme}://{url.netloc}" for url in endpoints)])
    return "; ".join(f"{name} {sources}" for name, sources in (_POLICY | {"connect-src": connect}).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginItem:
    """An issuer at which the console's readers log in: as which client, and where."""

    issuer: str
    client: ConsoleLogin
    endpoints: Endpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginList:
    """The issuers of the key files that have a `console`, and whose discovery documents have been read."""

    __pydantic_config__: ClassVar[ConfigDict] = {"json_schema_extra": {"examples": [{"data": [_LOGIN]}]}}

    data: tuple[LoginItem, ...]


def console_logins(keys: ApiKeys) -> tuple[LoginItem, ...]:
    """Where the console's readers may log in now."""
    return tuple(
        LoginItem(issuer=issuer.issuer, client=issuer.console, endpoints=endpoints)
        for issuer in keys.issuers.values()
        if issuer.console is not None and (endpoints := keys.signing_keys.endpoints(issuer)).token
    )


@dataclass(frozen=True, slots=True)
class ConsoleAsset:
    """A file of the console, and the same packed."""

    media_type: str
    body: bytes
    packed: bytes
    etag: str


def read_assets() -> dict[str, ConsoleAsset]:
    """Path below `console/` -> file, of everything that a browser loads."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            found[path.relative_to(FOLDER).as_posix()] = ConsoleAsset(
                _TYPES[path.suffix], body, gzip.compress(body, mtime=0), etag
            )
    return found


def ui_routes(keys: ApiKeys) -> APIRouter:
    """The console's routes, open to all: the page has no secrets, and asks for a key."""
    api = APIRouter(tags=["health"])
    page, assets = (FOLDER / "index.html").read_text(encoding="utf-8"), read_assets()

    @api.get("/ui/assets/{path:path}", response_class=Response, include_in_schema=False)
    async def asset(
        path: str,
        if_none_match: Annotated[str | None, Header()] = None,
        accept_encoding: Annotated[str, Header()] = "",
    ) -> Response:
        """A script, a style or a picture of the console."""
        found = assets.get(path)
        if found is None:
            raise NotFound(f"the console has no file {path[:100]!r}", code="not_found")
        headers = _HEADERS | {"content-security-policy": page_policy(), "etag": found.etag, "vary": "accept-encoding"}
        if if_none_match == found.etag:
            return Response(status_code=304, headers=headers)
        if "gzip" in accept_encoding:
            return Response(found.packed, media_type=found.media_type, headers=headers | {"content-encoding": "gzip"})
        return Response(found.body, media_type=found.media_type, headers=headers)

    @api.get("/ui", response_class=HTMLResponse)
    @api.get("/ui/{view:path}", response_class=HTMLResponse, include_in_schema=False)
    async def ui(view: str = "") -> HTMLResponse:  # noqa: ARG001  (the page reads its own address)
        """The console; every view has an address of its own below `/ui`."""
        return HTMLResponse(page, headers=_HEADERS | {"content-security-policy": page_policy(console_logins(keys))})

    @api.get("/v1/login")
    async def login() -> LoginList:
        """The issuers at which people log in to the console, with their public clients; open without a key."""
        return LoginList(data=console_logins(keys))

    return api


def health_routes(
    reconciler: Reconciler, metrics: OrchestratorMetrics, is_stopping: Callable[[], bool], guarded: Sequence[Depends]
) -> APIRouter:
    """The routes, open without a key; `guarded`: dependencies of `/metrics`."""
    api = APIRouter(tags=["health"])

    def status(word: str) -> Status:
        """The orchestrator's epoch, revision and leader, under this status word."""
        return Status(
            status=word,
            epoch=reconciler.store.epoch,
            revision=reconciler.catalog.revision,
            is_leading=reconciler.leadership.is_leading,
            leader=reconciler.leadership.leader_url,
        )

    @api.get("/health")
    async def health() -> Status:
        """Alive."""
        return status("ok")

    @api.get("/ready")
    async def ready() -> Status:
        """Ready: the store takes changes, and workers have had time to report. 503 before that, and while stopping."""
        if is_stopping():
            raise OrchestratorUnavailable("stopping", code="stopping")
        if not reconciler.store.is_read:
            raise OrchestratorUnavailable("started, the store has not been read yet", code="starting")
        if reconciler.store.trouble:
            raise StoreError(reconciler.store.trouble)
        if not reconciler.is_settled:
            raise OrchestratorUnavailable(
                "started, waiting for workers to report before anything is decided", code="starting"
            )
        return status("ready")

    @api.get("/metrics", response_class=PlainTextResponse, dependencies=guarded)
    async def prometheus() -> Response:
        """Prometheus text."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return api
