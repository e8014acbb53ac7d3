"""The API server of the tests in tests/kube, or a real one."""

from tests.kube.conftest import kube

__all__ = ["kube"]
