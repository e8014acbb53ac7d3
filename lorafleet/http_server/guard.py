"""Middleware around the routes of every service: checks of Host, site, HEAD and slashes, and headers of pages."""

from fastapi import FastAPI

from lorafleet.http_server.cross_site import CheckSite, SiteCheck, site_check
from lorafleet.http_server.html_headers import HtmlHeaders
from lorafleet.http_server.lenient import Lenient, ends_in_a_name
from lorafleet.http_server.track import track_requests
from lorafleet.keys.auth import ApiKeys, host_check
from lorafleet.service.http import HostCheckMiddleware
from lorafleet.service.runs import RunPaths
from lorafleet.telemetry.request_log import RequestLog


def guard(
    app: FastAPI,
    keys: ApiKeys,
    *,
    allow_open: bool,
    may_ask: SiteCheck | None = None,
    requests: RequestLog,
    has_runs: bool = False,
) -> None:
    """Add the checks as the outermost middleware: they run before all middleware that the app has so far.

    allow_open  accept any Host on a server without keys, because something else guards the server
    may_ask     decides which cross-site requests pass; None: those that change nothing
    requests    logs what the app answers; the app's answers have `x-request-id`
    has_runs    take every path below `/runs/NAME`, too
    """
    app.add_middleware(HtmlHeaders)
    app.add_middleware(Lenient, is_kept=lambda path: ends_in_a_name(app.routes, path))
    if has_runs:
        app.add_middleware(RunPaths)
    app.add_middleware(CheckSite, check=may_ask or site_check())
    app.add_middleware(HostCheckMiddleware, check=host_check(keys, allow_open=allow_open))
    track_requests(app, requests)
