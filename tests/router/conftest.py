"""What holds for every test of the router."""

import pytest

from router.request import engine_attempt
from tests.patience import patience


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """An idle connection that an engine closed counts as closed at once also where the machine is slow."""
    monkeypatch.setattr(engine_attempt, "STALE_WITHIN_S", patience(1))
