"""What stands before the routes of every service's ASGI app."""

from fastapi import FastAPI

from lorafleet.auth import Keys, host_check
from lorafleet.front.cross_site import CheckSite, SiteCheck, site_check
from lorafleet.front.lenient import Lenient
from lorafleet.http import CheckHost


def guard(app: FastAPI, keys: Keys, *, allow_open: bool, may_ask: SiteCheck | None = None) -> None:
    """Add what looks at each request first: outside of all that has been added before.

    allow_open  something else guards a server that has no keys
    may_ask     of a service that pages of other origins may use; None: they may change nothing
    """
    app.add_middleware(Lenient)
    app.add_middleware(CheckSite, check=may_ask or site_check())
    app.add_middleware(CheckHost, check=host_check(keys, allow_open=allow_open))
