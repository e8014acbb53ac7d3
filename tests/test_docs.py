"""The docs say what the code has: every setting, route, metric and error code."""

import re
from pathlib import Path

import pytest

from docs.generate import document
from orchestrator.core import errors as orchestrator_errors
from orchestrator.metrics import Metrics as OrchestratorMetrics
from router.core.errors import RouterError
from router.metrics import Metrics as RouterMetrics
from workers.core.errors import WorkerError
from workers.metrics import Metrics as WorkersMetrics

DOCS = Path(__file__).parent.parent / "docs"
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


@pytest.mark.parametrize("metrics", [RouterMetrics, OrchestratorMetrics, WorkersMetrics])
def test_every_metric_is_in_the_operations_guide(metrics):
    text = (DOCS / "metrics.md").read_text()
    names = {family.name for family in metrics().registry.collect()}
    assert sorted(name for name in names if name not in text) == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_every_link_between_pages_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
