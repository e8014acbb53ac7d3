"""Requests that a web page of another origin makes a browser send: they may change nothing here.

A page may post to any address that the browser reaches, without a preflight and without a key. The answer is kept from
the page, but by then the worker is drained. Browsers name the origin of such a request.

source  https://www.w3.org/TR/fetch-metadata, https://fetch.spec.whatwg.org; Go 1.25 net/http CrossOriginProtection
        has the same rule
"""

from collections.abc import Callable, Collection, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from lorafleet.keys.auth import KEY_HEADERS
from lorafleet.service.http import HttpError, error_response

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_SITES = frozenset({b"same-origin", b"none"})  # none: typed or bookmarked by the user
_KEYS = frozenset(name.encode() for name in KEY_HEADERS)
_ANY = "*"

# (method, headers with names in lower case) -> None; raises HttpError 403 `cross_site`.
SiteCheck = Callable[[str, Mapping[bytes, bytes]], None]


def site_check(allowed: Collection[str] = (), *, trusts_preflight: bool = False) -> SiteCheck:
    """The check of a service. `allowed`: origins whose pages may do what any client may; `*` is all.

    trusts_preflight  let requests pass that a browser sends only after a preflight: those with a key, and those with
                      JSON that name an origin alone (some programs that are no page name one, too)
    """
    if _ANY in allowed:
        return lambda _method, _headers: None
    known = frozenset(origin.encode() for origin in allowed)

    def check(method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise HttpError where a page of another origin sent this request, and it may change something."""
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if method in _SAFE or site in _OWN_SITES or (site is None and origin is None) or origin in known:
            return
        if trusts_preflight and (not _KEYS.isdisjoint(headers) or (site is None and _is_json(headers))):
            return
        if site is None and origin is not None and _origin_host(origin) == headers.get(b"host", b"").lower():
            return
        raise HttpError(403, "cross_site", _refusal_message(origin or b"another site", trusts_preflight))

    return check


def _is_json(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the content-type is JSON."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"


def _origin_host(origin: bytes) -> bytes:
    """Host and port of an origin, in lower case; empty: it has none."""
    return origin.partition(b"://")[2].lower()


def _refusal_message(origin: bytes, may_be_allowed: bool) -> str:
    """The error message for this origin. `may_be_allowed`: a setting of this service could let its pages pass."""
    shown = ascii(origin[:100].decode("latin-1"))[1:-1]
    advice = "name it in --allowed-origins if it may" if may_be_allowed else "send this from a program instead"
    return (
        f"a page of {shown} sent this, and pages of other origins may change nothing here: {advice}; a proxy in"
        " front must pass the Host header on"
    )


class CheckSite:
    """ASGI middleware: run `check` on each request before the app; where it raises, answer with that error instead."""

    def __init__(self, app: ASGIApp, *, check: SiteCheck) -> None:
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request from another site with the error of the check; pass all others to the app."""
        if scope["type"] == "http":
            try:
                self._check(scope["method"], dict(scope["headers"]))
            except HttpError as exc:
                await error_response(exc)(scope, receive, send)
                return
        await self._app(scope, receive, send)
