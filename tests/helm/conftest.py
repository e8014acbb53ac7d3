"""The API server of the tests in tests/kube, or a real one."""

from pathlib import Path

import pytest

from tests.helm.releases import HelmRelease
from tests.kube.conftest import KubeCluster, instance, instances, kube, manifests

__all__ = ["instance", "instances", "kube", "manifests"]


@pytest.fixture
def release(kube: KubeCluster, tmp_path: Path) -> HelmRelease:
    return HelmRelease(kube, tmp_path)
