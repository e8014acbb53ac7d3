"""The programs of the chart's tests are installed and genuine."""

import json

import pytest

from tests.kube.binaries import BinaryMissing, helm, helm_3, kubectl, run


@pytest.mark.slow
def test_helm_and_kubectl_run_and_say_their_versions() -> None:
    assert run(helm(), "version", "--short").stdout.startswith("v4.")
    said = json.loads(run(kubectl(), "version", "--client", "-o", "json").stdout)
    assert said["clientVersion"]["gitVersion"].startswith("v1.37.")


@pytest.mark.slow
def test_the_older_helm_is_a_helm_3() -> None:
    try:
        program = helm_3()
    except BinaryMissing as exc:
        pytest.skip(str(exc))
    assert run(program, "version", "--short").stdout.startswith("v3.")
