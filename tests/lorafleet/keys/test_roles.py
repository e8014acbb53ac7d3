"""docs/protocol.md names every route of the three services with the scopes that it takes, and no others."""

import re
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from lorafleet.keys.auth import KeyCheck
from lorafleet.keys.roles import SCOPES
from tests.lorafleet.http_server.test_cross_site import agent, orchestrator
from tests.lorafleet.keys.test_auth_scopes_first import router, scope_checks

PAGE = Path(__file__).parents[3] / "docs/protocol.md"
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE"})
ANY_KEY, OPEN = "any key", ""


def documented(section: str) -> dict[tuple[str, str], set[str]]:
    """(method, path) -> the scope cells of the section's rows that name it."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    found: dict[tuple[str, str], set[str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if not line.startswith("| `") or len(cells) < 3 or not any(verb in cells[0] for verb in _METHODS):
            continue
        methods, pending = [], True
        for words in re.findall(r"`([^`]+)`", cells[0]):
            *verbs, last = words.split()
            verbs += [last] if last in _METHODS else []
            methods, pending = ([*methods, *verbs] if pending else verbs) if verbs else methods, last in _METHODS
            for method in () if last in _METHODS else methods:
                found.setdefault((method, plain(last.partition("?")[0])), set()).add(cells[1].strip("|").strip())
    return found


def plain(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


def cell_of(route: APIRoute) -> set[str]:
    """The scope cell of a route, as a set of words, for any order of the scopes."""
    checks = scope_checks(route)
    assert len({(check.scopes, check.is_for_fleet) for check in checks}) <= 1, route.path
    if not checks:
        return {OPEN}
    if isinstance(checks[0], KeyCheck):
        return {ANY_KEY}
    return {*checks[0].scopes, *(["no tenant"] if checks[0].is_for_fleet else [])}


def words_of(cell: str) -> set[str]:
    if cell in {ANY_KEY, OPEN}:
        return {cell}
    return {*re.findall(r"`([^`]+)`", cell), *(["no tenant"] if "no tenant" in cell else [])}


@pytest.mark.parametrize(("service", "section"), [(orchestrator, "Orchestrator"), (agent, "Agent"), (router, "Router")])
async def test_every_route_has_its_scopes_in_the_protocols_table(service, section, tmp_path):
    table = documented(section)
    async with service(tmp_path) as app:
        routes = [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    shown = {(method, plain(route.path)): cell_of(route) for route in routes for method in route.methods & _METHODS}
    assert len(shown) > 5
    for call, cell in shown.items():
        if cell == {OPEN} or call[1] == "/metrics":
            continue  # /metrics has a key by a setting
        assert call in table, f"{call}: no row in the table of {section}"
        assert [words_of(each) for each in table[call]] == [cell], call
    documented_scopes = set().union(*(words_of(cell) for cells in table.values() for cell in cells))
    assert documented_scopes <= {*SCOPES, "no tenant", ANY_KEY, OPEN}
