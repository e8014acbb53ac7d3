"""Whole renders that are kept, so that a change of a template is seen as a change of what it makes."""

import re
from pathlib import Path

from tests.helm.rendering import rendered, steady

GOLDEN = {case: Path(__file__).parent / "golden" / f"{case}.yaml" for case in ("cpu", "everything")}
# Copies of files in the chart, which have tests of their own.
_LEFT_OUT = ("kind: PrometheusRule", "files/dashboard.json", "-dashboard\n", "helm.sh/hook")


def golden(case: str) -> str:
    """What is in the file of this case."""
    documents = re.split(r"^---\n", steady(rendered(case)), flags=re.MULTILINE)
    kept = (text for text in documents if text.strip() and not any(mark in text for mark in _LEFT_OUT))
    return "".join(f"---\n{text}" for text in kept)
