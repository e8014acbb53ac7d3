"""What holds for every test."""

import os

from hypothesis import settings

# How long an example takes depends on who else uses the machine, and is no property of the code.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def pytest_report_header() -> str:
    """Which API server the suites on Kubernetes use: whoever has a KUBECONFIG should know before they begin."""
    real = os.environ.get("KUBECONFIG")
    return f"kubernetes: the cluster of KUBECONFIG={real}" if real else "kubernetes: the tests' own API server"
