"""The docs say what the code has: every setting, route, metric and error code."""

import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer

from docs.generate import document
from docs.site import api_page, page_of
from lorafleet.cli.main import app as command_line
from lorafleet.kv.connectors import CONNECTORS
from lorafleet.local.options import fleet_options
from orchestrator.core import errors as orchestrator_errors
from orchestrator.metrics import OrchestratorMetrics
from router.app import build
from router.config import RouterSettings
from router.core.errors import RouterError
from router.items.item_batch import MAX_ITEMS, MAX_RUNNING_ITEMS
from router.protocols.sglang_generate import MAX_PROMPTS
from router.telemetry.metrics import RouterMetrics
from router.wire import RouteAnswer, ScoreItem
from tests.patience import patience
from workers.core.errors import WorkerError
from workers.metrics import WorkerMetrics

DOCS = Path(__file__).parent.parent / "docs"
SERVICES = ("router", "orchestrator", "worker")
PROTOCOL = (DOCS / "protocol.md").read_text()


def subclasses(cls):
    return [cls, *(found for below in cls.__subclasses__() for found in subclasses(below))]


def test_configuration_is_what_the_settings_say():
    assert (DOCS / "configuration.md").read_text() == document(), "run: python docs/generate.py"


def test_every_error_code_is_in_the_protocol():
    codes = {cls.code for cls in subclasses(RouterError)[1:]} - {"invalid_request", "unavailable"}
    codes |= {code for cls in subclasses(WorkerError) for code in cls.codes}
    codes |= set(re.findall(r'code="([a-z_]+)"', Path(orchestrator_errors.__file__).read_text()))
    assert sorted(code for code in codes if f"`{code}`" not in PROTOCOL) == []


@pytest.mark.parametrize("metrics", [RouterMetrics, OrchestratorMetrics, WorkerMetrics])
def test_every_metric_is_in_the_operations_guide(metrics):
    text = (DOCS / "metrics.md").read_text()
    names = {family.name for family in metrics().registry.collect()}
    assert sorted(name for name in names if name not in text) == []


def test_every_kv_connector_is_in_the_page_about_engines():
    lines = set((DOCS / "engines.md").read_text().splitlines())
    rows = {f"| `{name}` | {row.separation} | {row.key} |" for name, row in CONNECTORS.items()}
    assert rows - lines == set()


async def test_every_route_of_the_router_is_in_the_protocol():
    app, parts = build(RouterSettings())
    parts.tokenizers.close()
    paths = {path.replace("{model}", "{id}") for path in app.openapi()["paths"]}
    assert sorted(path for path in paths if path.removeprefix("/v1") not in PROTOCOL) == []


def test_every_field_of_a_decision_is_in_the_protocol():
    fields = {*RouteAnswer.model_fields, *ScoreItem.model_fields} - {"wire"}
    assert sorted(name for name in fields if f"`{name}`" not in PROTOCOL) == []


def test_every_command_and_its_flags_are_in_the_page_about_the_command_line():
    text = (DOCS / "cli.md").read_text()
    commands = typer.main.get_command(command_line).commands
    assert sorted(name for name in commands if f"`{name} " not in text and f"`{name}`" not in text) == []
    for name in ("up", "explain", "decisions"):
        flags = {flag for option in commands[name].params for flag in option.opts if flag.startswith("--")}
        assert sorted(flag for flag in flags if flag not in text) == []


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", DOCS / "quickstart.md", DOCS / "tour.md"], ids=str)
def test_every_line_that_starts_a_fleet_is_one_that_the_command_takes(page):
    up = typer.main.get_command(command_line).commands["up"]
    text = page.read_text().replace("\\\n", " ")
    lines = re.findall(r"^(?:LORAFLEET_\S+ )*lorafleet up (.+?)(?: &)?$", text, re.MULTILINE) + re.findall(
        r"`lorafleet up (-[^`]+ [^`]+)`", text
    )
    assert lines
    for line in lines:
        told = up.make_context("up", shlex.split(line, comments=True)).params
        words = [*(told["engine_arg"] or ()), *(told["engine_arguments"] or ())]
        fleet_options(
            **{name: told[name] for name in ("workers", "model", "adapters", "max_loras", "devices", "demo", "once")},
            engine=told["engine"] and told["engine"].value,
            **dict.fromkeys(("router_port", "orchestrator_port", "key_file")),
            state_dir=Path("/state"),
            configs={},
            engine_arguments=words,
            environment={},
        )


def test_the_limits_of_calls_with_many_prompts_are_those_of_the_code():
    shown = f"| {MAX_PROMPTS:,}; {MAX_ITEMS:,}; {MAX_RUNNING_ITEMS} |"
    assert shown in (DOCS / "operations.md").read_text()


def test_every_page_is_in_the_navigation_of_the_site():
    pages = {page.name for page in DOCS.glob("*.md")} | {f"api-{service}.md" for service in SERVICES}
    assert pages <= set(re.findall(r'"([\w-]+\.md)"', (DOCS / "zensical.toml").read_text()))


def test_links_of_a_page_lead_to_pages_of_the_site_and_links_to_other_files_become_their_paths():
    text = "[a](operations.md#top) [b](../README.md) [c](../docker/Dockerfile) [d](https://e.org/) [e](#here)"
    shown = "[a](operations.md#top) [b](index.md) c (`docker/Dockerfile`) [d](https://e.org/) [e](#here)"
    text, shown = f"{text} ![f](radix.svg)", f"{shown} ![f](radix.svg)"
    assert page_of(DOCS / "quickstart.md", text) == shown


def test_a_route_of_an_openapi_document_is_shown_with_parameters_body_and_answers():
    fleet_options = {"$ref": "#/components/schemas/Wish"}
    operation = {
        "summary": "Makes <one>.",
        "parameters": [{"name": "dry", "in": "query", "schema": {"type": "boolean"}, "description": "a | b"}],
        "requestBody": {"content": {"application/json": {"schema": fleet_options, "example": {"n": 1}}}},
        "responses": {"200": {"description": "Made", "content": {"application/json": {"schema": fleet_options}}}},
    }
    wish = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    page = api_page("router", {"paths": {"/v1/x": {"post": operation}}, "components": {"schemas": {"Wish": wish}}})
    for line in (
        "## `POST /v1/x`", "Makes \\<one>.", "| `dry` | query | boolean | a \\| b |",
        "Body (`application/json`): [Wish](#wish)", '  "n": 1', "- **200**: Made [Wish](#wish)",
        "| `n` (required) | integer |  |",
    ):  # fmt: skip
        assert line in page.splitlines(), line


@pytest.mark.slow
def test_the_site_builds_and_no_link_or_heading_is_missing(tmp_path):
    """Every page, and every REST route of the three services; strict mode ends at the first broken link."""
    command = [sys.executable, "-P", "-m", "docs.site", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience(120))
    assert done.returncode == 0, done.stdout + done.stderr
    pictures = {file.name for file in DOCS.glob("*.svg")}
    assert pictures == {file.name for file in (tmp_path / "site").glob("*.svg")}
    assert '<img alt="Three prompts' in (tmp_path / "site" / "architecture.html").read_text()
    shown = json.loads((tmp_path / "site" / "search.json").read_text())["items"]
    titles = {item["title"] for item in shown if item["location"].startswith("api-router")}
    assert any("POST /v1/chat/completions" in title for title in titles)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_every_link_between_pages_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_program_that_makes_a_digest_makes_the_agents_own(tmp_path):
    """Without an agent the page's few lines are all that a user has."""
    program = re.search(r"```python\n(.*?)```", (DOCS / "agentless.md").read_text(), re.DOTALL)[1]
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "README.md").write_text("not part of it")
    made = subprocess.run([sys.executable, "-c", textwrap.dedent(program), tmp_path], capture_output=True, check=True)
    assert made.stdout.decode().strip() in PROTOCOL
