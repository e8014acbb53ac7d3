"""docs/log.md has every line at warning or above that a service writes, and no line that none writes."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Heading of docs/log.md -> package.
PACKAGES = {"Every service": "lorafleet", "Router": "router", "Orchestrator": "orchestrator", "Agent": "workers"}
# structlog writes `exception` at level error.
LEVELS = {"warning": "warning", "error": "error", "exception": "error", "critical": "critical"}
ROW = re.compile(r"^\| `([^`]+)` \| (\w+) \|", re.MULTILINE)


def calls_of(package):
    """The calls that write a line at warning or above: the file, the level and the argument that is its event."""
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("log"), attr=level), args=[event, *_]):
                    if level in LEVELS:
                        yield file, LEVELS[level], event
                # Writes the event that it is given.
                case ast.Call(func=ast.Attribute(attr="_warn"), args=[event, *_]):
                    yield file, "warning", event


def written_by(package):
    return {(event.value, level) for _, level, event in calls_of(package) if isinstance(event, ast.Constant)}


def documented():
    """Heading -> the (event, level) rows below it."""
    parts = re.split(r"^## (.+)$", (ROOT / "docs" / "log.md").read_text(), flags=re.MULTILINE)
    return {heading: ROW.findall(rows) for heading, rows in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize("heading", PACKAGES)
def test_the_page_has_every_line_of_a_service_and_no_other(heading):
    pages = documented()
    rows = dict(pages[heading])
    written = written_by(PACKAGES[heading])
    shared = set() if heading == "Every service" else set(dict(pages["Every service"]))
    assert set(rows) == {event for event, _ in written} - shared
    assert set(rows.items()) <= written


@pytest.mark.parametrize("package", PACKAGES.values())
def test_every_event_is_a_text_that_can_be_searched_for(package):
    others = {file.name for file, _, event in calls_of(package) if not isinstance(event, ast.Constant)}
    assert others <= {"cold_starts.py"}  # its `_warn`


def test_every_line_that_the_runbook_names_is_written():
    """In operations.md: the first column of a table of log lines, and code in a sentence or cell about the log."""
    text = (ROOT / "docs" / "operations.md").read_text()
    tables = re.findall(r"^\| log line \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    named = {line for table in tables for line in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)}
    named |= set(re.findall(r"(?:log's|log says|logs) `([a-zA-Z][^`{}=/]*[^`{}=/.])`", text))
    named |= set(re.findall(r"`([a-zA-Z][^`{}=/]* [^`{}=/]*)` in (?:the|its) log", text))
    every = {
        node.value
        for package in PACKAGES.values()
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert len(named) >= 8
    assert {line for line in named if line not in every} == set()
