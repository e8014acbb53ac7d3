"""`lorafleet chart check`: values that an API server would refuse are named before anything is installed."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lorafleet.cli.main import app
from tests.helm.rendering import VALUES
from tests.kube.binaries import helm

pytestmark = pytest.mark.fleet

UNFIT = {entry["what"]: entry for entry in yaml.safe_load((Path(__file__).parent / "unfit.yaml").read_text())}


def check(*paths: Path, words: tuple[str, ...] = ()):
    """The command's result, with these files of values."""
    given = [word for path in paths for word in ("-f", str(path))]
    return CliRunner().invoke(app, ["chart", "check", "--helm", str(helm()), *given, *words])


def written(folder: Path, values: object) -> Path:
    path = folder / "values.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


@pytest.mark.parametrize("what", UNFIT)
def test_what_the_chart_takes_and_an_api_server_refuses_is_named_by_its_value(tmp_path, what):
    path = written(tmp_path, UNFIT[what]["values"])
    done = check(path)
    assert done.exit_code == 1
    assert UNFIT[what]["says"] in done.output
    assert all(". Example: " in line for line in done.output.splitlines() if "; expected " in line)


@pytest.mark.parametrize("case", VALUES)
def test_values_that_are_good_are_taken_and_custom_kinds_are_named(case):
    done = check(*VALUES[case])
    assert done.exit_code == 0, done.output
    assert "objects are as Kubernetes 1.37.0 takes them" in done.output
    assert ("without a schema here: " in done.output) == (case in {"everything", "found", "tls"})


def test_an_older_version_of_kubernetes_has_other_fields(tmp_path):
    path = written(tmp_path, {"router": {"overlays": {"pod": {"spec": {"hostnameOverride": "a"}}}}})
    assert check(path).exit_code == 0
    done = check(path, words=("--kubernetes-version", "1.33.0"))
    assert "router.overlays.pod.spec.hostnameOverride: found an unknown field" in done.output


def test_what_the_chart_itself_refuses_is_said_by_it(tmp_path):
    done = check(written(tmp_path, {"routr": {}}))
    assert done.exit_code == 1
    assert "the chart refuses these values" in str(done.exception)
    assert "additional properties 'routr' not allowed" in str(done.exception)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "no YAML"), ("[1]", "expected values by their names"), (None, "name a file of values")],
)
def test_a_file_that_is_none_is_named(tmp_path, text, message):
    path = tmp_path / "values.yaml" if text is None else written(tmp_path, text)
    assert message in str(check(path).exception)


def test_without_helm_it_says_how_to_get_it():
    done = CliRunner().invoke(app, ["chart", "check", "--helm", "/nowhere/helm"])
    assert "install Helm" in str(done.exception)
