"""Values of an earlier chart, as `helm upgrade --reuse-values` brings them: they render as the same values do now.

Helm then takes the stored defaults of the earlier chart in place of those of the new one.
source  helm 4 pkg/action/upgrade.go reuseValues
"""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.helm.rendering import CHART, Manifest
from tests.kube.binaries import helm, run

FORMER = Path(__file__).parent / "former_values.yaml"
OWN: Manifest = {
    "auth": {"existingSecret": "keys"},  # tokens of our own are other ones at each render
    "pools": [{"name": "a", "model": "org/m", "autoscaling": {"enabled": True}}],
    "monitoring": {"prometheusUrl": "http://prometheus:9090", "alerts": {"enabled": True}},
}
ACCOUNT = {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"}}


def rendered(chart: Path, folder: Path, values: Manifest) -> str:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(values))
    done = run(helm(), "template", "fleet", str(chart), "--values", str(path))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def former_chart(tmp_path: Path) -> Path:
    """The chart with the defaults of the earlier one."""
    chart = Path(shutil.copytree(CHART, tmp_path / "lorafleet"))
    shutil.copy(FORMER, chart / "values.yaml")
    return chart


def test_stored_values_of_an_earlier_chart_render_as_new_ones_do(former_chart, tmp_path):
    assert rendered(former_chart, tmp_path, OWN) == rendered(CHART, tmp_path, OWN)


def test_an_account_by_its_former_name_is_the_workers(former_chart, tmp_path):
    stored = rendered(former_chart, tmp_path, OWN | {"workerServiceAccount": ACCOUNT})
    assert stored == rendered(CHART, tmp_path, OWN | {"poolDefaults": {"serviceAccount": ACCOUNT}})
