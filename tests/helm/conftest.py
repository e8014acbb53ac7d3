"""The API server of the tests in tests/kube, or a real one."""

from pathlib import Path

import pytest

from tests.helm.releases import Release
from tests.kube.conftest import Cluster, kube, people, seat, seats

__all__ = ["kube", "people", "seat", "seats"]


@pytest.fixture
def release(kube: Cluster, tmp_path: Path) -> Release:
    return Release(kube, tmp_path)
