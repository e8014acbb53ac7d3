"""The programs that the chart's tests run are there and are the real ones."""

import json

from tests.kube.binaries import helm, kubectl, run


def test_helm_and_kubectl_run_and_say_their_versions() -> None:
    assert run(helm(), "version", "--short").stdout.startswith("v4.")
    said = json.loads(run(kubectl(), "version", "--client", "-o", "json").stdout)
    assert said["clientVersion"]["gitVersion"].startswith("v1.37.")
