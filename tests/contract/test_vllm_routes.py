"""Every route of the installed vLLM is in docs/routes.md, and a router does with it what the page says."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from router.api.not_offered import why_not_offered
from router.app import build
from router.config import RouterSettings
from router.protocols.routes import find_route
from tests.patience import patience

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"\| `(GET|POST|DELETE) (\S+)` \| (passed on|answered|not offered) \|")


def rows() -> list[tuple[str, str, str]]:
    """(method, path, what a router does) of each row of the page."""
    return _ROW.findall((ROOT / "docs" / "routes.md").read_text())


@pytest.fixture(scope="module")
def own() -> Iterator[set[tuple[str, str]]]:
    """(method, path) of each route that the router's app has."""
    app, services = build(RouterSettings())
    yield {(method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods}
    services.tokenizers.close()


@pytest.mark.parametrize(("method", "path", "what"), rows())
def test_a_router_does_what_the_page_says(own, method, path, what):
    shown = path.replace("{response_id}", "{id}")
    is_passed_on, is_own = find_route(method, shown) is not None, (method, path) in own
    found = "passed on" if is_passed_on else "answered" if is_own else "not offered"
    assert found == what
    assert (why_not_offered(path) is not None) == (what == "not offered")
    if what == "not offered":
        assert why_not_offered(f"/any/prefix{path}") == why_not_offered(path)


@pytest.mark.vllm
def test_the_page_has_each_route_of_the_installed_vllm_once_and_no_other():
    command = [sys.executable, "-P", str(ROOT / "tests" / "tools" / "vllm_routes.py")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=patience(120), check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    assert sorted(f"{method} {path}" for method, path, _ in rows()) == json.loads(found.stdout.splitlines()[-1])
