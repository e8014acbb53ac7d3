"""`/ui`: one static page that shows the fleet; it reads over REST with the reader's own key."""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

PAGE = Path(__file__).with_name("ui.html").read_text(encoding="utf-8")


def ui_routes() -> APIRouter:
    """The route of the status page, open to all; its headers allow only the page's own scripts."""
    api = APIRouter(tags=["health"])
    headers = {
        "content-security-policy": content_security_policy(PAGE),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    @api.get("/ui", response_class=HTMLResponse)
    async def ui() -> HTMLResponse:
        """The fleet in a browser: placements, states, demand, events."""
        return HTMLResponse(PAGE, headers=headers)

    return api


def content_security_policy(page: str) -> str:
    """Content-Security-Policy: this page's own script and style and no others, and calls to this server only."""
    sources = {
        kind: f"'sha256-{base64.b64encode(hashlib.sha256(_element_content(page, tag).encode()).digest()).decode()}'"
        for kind, tag in (("script-src", "script"), ("style-src", "style"))
    }
    parts = [f"{kind} {source}" for kind, source in sources.items()]
    return "; ".join(["default-src 'none'", *parts, "connect-src 'self'", "base-uri 'none'", "form-action 'none'"])


def _element_content(page: str, tag: str) -> str:
    """The content of the page's only element with this tag."""
    found = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    assert len(found) == 1, f"the page has {len(found)} <{tag}>"
    return str(found[0])
