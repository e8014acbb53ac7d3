"""Golden files: whole renders, so that a template's change shows as a change of its output."""

import re
from pathlib import Path

from tests.helm.rendering import rendered, steady

GOLDEN = {case: Path(__file__).parent / "golden" / f"{case}.yaml" for case in ("cpu", "everything")}
# Copies of files in the chart, which have tests of their own.
_LEFT_OUT = ("kind: PrometheusRule", "files/dashboard.json", "-dashboard\n", "helm.sh/hook")


def golden(case: str) -> str:
    """The golden file of a case."""
    documents = re.split(r"^---\n", steady(rendered(case)), flags=re.MULTILINE)
    kept = (text for text in documents if text.strip() and not any(mark in text for mark in _LEFT_OUT))
    return "".join(f"---\n{text}" for text in kept)
