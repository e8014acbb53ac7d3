"""The chart below another one, its values from several files, and values that are empty."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.chart_schema import DEFAULTS
from tests.helm.rendering import CHART, NAMESPACE, RELEASE, Manifest, helm_template, steady
from tests.kube.binaries import helm, run

pytestmark = pytest.mark.fleet

POOL = {"model": "org/m"}
FLEET = {"pools": {"p": POOL}}


def rendered_files(folder: Path, *values: Any) -> str:
    """What helm makes of these files of values, each over the one before."""
    words = []
    for number, given in enumerate(values):
        path = folder / f"values-{number}.yaml"
        path.write_text(given if isinstance(given, str) else yaml.safe_dump(given))
        words += ["--values", str(path)]
    worked, output = helm_template(*words)
    assert worked, output
    return steady(output)


def objects(text: str) -> dict[str, Manifest]:
    found = [item for item in yaml.load_all(text, yaml.CSafeLoader) if item]
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in found}


@pytest.fixture
def umbrella(tmp_path) -> Path:
    """A chart that has this one among its dependencies, on a condition and a tag."""
    folder = tmp_path / "platform"
    (folder / "charts").mkdir(parents=True)
    shutil.copytree(CHART, folder / "charts" / "lorafleet")
    dependency = {"name": "lorafleet", "version": "0.1.0", "condition": "lorafleet.enabled", "tags": ["llm"]}
    chart = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(chart))
    return folder


def installed_below(umbrella: Path, values: Manifest) -> str:
    path = umbrella / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    done = run(helm(), "template", RELEASE, str(umbrella), "--namespace", NAMESPACE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_below_another_chart_it_takes_the_condition_the_tags_and_what_is_global(umbrella):
    own = {"auth": {"existingSecret": "keys"}, "imagePullSecrets": [{"name": "own"}], **FLEET}
    shared = {"imageRegistry": "mirror.example.com", "imagePullSecrets": ["own", "mirror"], "other": 1}
    found = objects(installed_below(umbrella, {"lorafleet": {"enabled": True, **own}, "global": shared, "tags": {}}))
    spec = found["StatefulSet/fleet-lorafleet-p"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == "mirror.example.com/lorafleet-agent:0.1.0"
    assert spec["imagePullSecrets"] == [{"name": "own"}, {"name": "mirror"}]
    assert installed_below(umbrella, {"lorafleet": {"enabled": False, **own}}).strip() == ""
    assert installed_below(umbrella, {"lorafleet": own, "tags": {"llm": False}}).strip() == ""


def test_an_image_or_volume_with_a_registry_or_class_of_its_own_keeps_it(tmp_path):
    cache = {"size": "1Gi", "persistent": {"enabled": True}}
    named = {"size": "1Gi", "persistent": {"enabled": True, "storageClassName": "slow"}}
    values = {
        "global": {"imageRegistry": "mirror", "storageClass": "fast"},
        "image": {"registry": "own"},
        "pools": {"p": POOL | {"cache": cache}, "q": POOL | {"cache": named, "image": {"registry": "pool"}}},
    }
    found = objects(rendered_files(tmp_path, values))
    images = [
        found[name]["spec"]["template"]["spec"]["containers"][0]["image"].split("/")[0]
        for name in ("Deployment/fleet-lorafleet-router", *(f"StatefulSet/fleet-lorafleet-{pool}" for pool in "pq"))
    ]
    assert images == ["own", "mirror", "pool"]
    classes = [
        found[f"StatefulSet/fleet-lorafleet-{pool}"]["spec"]["volumeClaimTemplates"][0]["spec"]["storageClassName"]
        for pool in "pq"
    ]
    assert classes == ["fast", "slow"]


def test_nothing_is_installed_of_a_chart_that_is_not_enabled(tmp_path):
    assert rendered_files(tmp_path, {"enabled": False} | FLEET).strip() == ""


def test_another_name_is_in_the_objects_names_and_in_what_selects_them(tmp_path):
    found = objects(rendered_files(tmp_path, {"nameOverride": "llm"} | FLEET))
    worker = found["StatefulSet/fleet-llm-p"]
    assert worker["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] == "llm"
    assert found["Service/fleet-llm-router"]["spec"]["selector"]["app.kubernetes.io/name"] == "llm"
    assert not any("lorafleet" in name for name in found)


def test_pools_by_name_add_up_over_files_of_values_and_one_may_be_taken_out(tmp_path):
    first = {"pools": {"a": POOL, "b": POOL | {"replicas": 2}}}
    found = objects(rendered_files(tmp_path, first, {"pools": {"b": {"replicas": 5}, "c": POOL, "a": None}}))
    sets = {name: item["spec"]["replicas"] for name, item in found.items() if name.startswith("StatefulSet/")}
    assert sets == {"StatefulSet/fleet-lorafleet-b": 5, "StatefulSet/fleet-lorafleet-c": 1}


def test_a_list_of_pools_gives_what_pools_by_name_give(tmp_path):
    pools = {"a": POOL | {"maxLoras": 2}, "b": POOL}
    listed = {"pools": [{"name": name} | pool for name, pool in pools.items()]}
    assert rendered_files(tmp_path, listed) == rendered_files(tmp_path, {"pools": pools})


def test_secrets_of_registries_have_either_form(tmp_path):
    found = objects(rendered_files(tmp_path, {"imagePullSecrets": ["a", {"name": "b"}]}))
    spec = found["Deployment/fleet-lorafleet-router"]["spec"]["template"]["spec"]
    assert spec["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def test_ids_that_the_cluster_gives_are_left_out(tmp_path):
    ids = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))
    found = objects(rendered_files(tmp_path, {"security": ids}))
    context = found["Deployment/fleet-lorafleet-router"]["spec"]["template"]["spec"]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert not context.keys() & ids.keys()


def null_at(path: tuple[str, ...], values: Manifest) -> Manifest:
    """The values with null at the path."""
    head, *rest = path
    return values | {head: null_at(tuple(rest), values.get(head, {})) if rest else None}


def without(path: tuple[str, ...], values: Manifest) -> Manifest:
    head, *rest = path
    below = {head: without(tuple(rest), values[head])} if rest and head in values else {}
    return {key: value for key, value in values.items() if key != head} | below


DEFAULT_PATHS = [tuple(entry["path"]) for entry in json.loads(DEFAULTS.read_text())]
# What differs from the defaults, so that a null of it shows.
GIVEN = FLEET | {"auth": {"drawWithoutCluster": True}, "monitoring": {"needKey": False}, "router": {"replicas": 3}}


def test_a_value_or_section_that_is_null_is_as_one_that_is_left_out(tmp_path):
    """Every key of the first and second level; the answer may be a refusal in words, never a template's trace."""
    made: dict[str, tuple[str, str]] = {}

    def answer(values: Manifest) -> tuple[str, str]:
        text = yaml.safe_dump(values)
        if text not in made:
            path = tmp_path / f"{hashlib.sha256(text.encode()).hexdigest()}.yaml"
            path.write_text(text)
            done = run(helm(), "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", str(path))
            made[text] = (steady(done.stdout), done.stderr)
        return made[text]

    for path in sorted({path[:depth] for path in DEFAULT_PATHS for depth in (1, 2)}):
        found = answer(null_at(path, GIVEN))
        assert found == answer(without(path, GIVEN)), path
        assert found[0] or "auth.existingSecret is empty" in found[1], path


def test_every_default_may_be_null_at_once(tmp_path):
    values: Manifest = {}
    for path in DEFAULT_PATHS:
        if path not in {("pools",), ("auth", "drawWithoutCluster")}:
            values = null_at(path, values)
    assert rendered_files(tmp_path, values, FLEET) == rendered_files(tmp_path, FLEET)


def test_sections_whose_lines_are_all_comments_have_their_defaults(tmp_path):
    text = "router:\n  # replicas: 3\norchestrator:\nmonitoring:\n  alerts:\n  # enabled: true\npoolDefaults:\n"
    assert rendered_files(tmp_path, text, FLEET) == rendered_files(tmp_path, FLEET)
