"""Wrong values are refused before the installation, with the value's name and the valid ones."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.helm.rendering import CHART, DRAWN, NAMESPACE, RELEASE, VALUES, helm_template, of_kind, one
from tests.kube.binaries import helm, run

pytestmark = pytest.mark.fleet

REFUSED = {entry["what"]: entry for entry in yaml.safe_load((Path(__file__).parent / "refused.yaml").read_text())}


def render(tmp_path, values) -> tuple[bool, str]:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return helm_template("--values", str(path))


def test_the_pool_that_the_refusals_vary_is_good(tmp_path):
    pool = {"name": "p", "model": "org/m"}
    worked, output = render(tmp_path, {"pools": [pool, {**pool, "name": "q", "maxLoras": 2, "maxCpuLoras": 2}]})
    assert worked, output


@pytest.mark.parametrize("what", REFUSED)
def test_refused(tmp_path, what):
    worked, output = render(tmp_path, REFUSED[what]["values"])
    assert not worked
    assert REFUSED[what]["says"] in output


def test_a_pool_takes_from_the_defaults_what_it_does_not_say_itself():
    workers = {
        item["metadata"]["name"]: item["spec"]["template"]["spec"]
        for item in of_kind("everything", "StatefulSet", "Deployment")
    }
    for name in ("h100-r16", "h100-r128", "sglang"):
        spec = workers[f"fleet-lorafleet-{name}"]
        assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
        assert [entry["key"] for entry in spec["tolerations"]] == ["nvidia.com/gpu"]
    ranks = {
        name: entry["value"]
        for name, spec in workers.items()
        for entry in spec["containers"][0]["env"]
        if entry["name"] == "LORAFLEET_WORKERS_MAX_LORA_RANK"
    }
    assert ranks == {
        "fleet-lorafleet-h100-r16": "16", "fleet-lorafleet-h100-r128": "128", "fleet-lorafleet-sglang": "64",
        "fleet-lorafleet-jax": "64",
    }  # fmt: skip


def test_a_pool_of_sgl_jax_starts_with_the_adapters_of_its_volume():
    spec = one("everything", "StatefulSet", "fleet-lorafleet-jax")["spec"]["template"]["spec"]["containers"][0]
    told = {entry["name"].removeprefix("LORAFLEET_WORKERS_"): entry.get("value") for entry in spec["env"]}
    assert (told["ENGINE"], told["LORA_PATH"]) == ("sgl-jax", "/adapters")
    assert json.loads(told["PRELOAD_LORAS"]) == ["sql-expert/v1", "legal/v2"]


def test_labels_of_ones_own_come_before_those_of_all_and_those_before_the_charts():
    worker = one("ipv6-hpa", "StatefulSet", "lora-gpu")
    assert worker["metadata"]["labels"]["app.kubernetes.io/part-of"] == "llm"
    assert worker["metadata"]["labels"]["team"] == "ml"
    assert worker["spec"]["template"]["metadata"]["labels"]["team"] == "gpu"
    assert one("found", "PodMonitor", "fleet-lorafleet-worker")["metadata"]["labels"]["team"] == "sre"


def test_images_are_named_by_registry_tag_or_digest():
    def image(case, kind, name):
        return one(case, kind, name)["spec"]["template"]["spec"]["containers"][0]["image"]

    assert image("cpu", "Deployment", "fleet-lorafleet-router") == "lorafleet:0.1.0"
    assert image("cpu", "StatefulSet", "fleet-lorafleet-tiny") == "lorafleet-agent-cpu:0.1.0"
    assert image("sim", "StatefulSet", "fleet-lorafleet-sim") == "lorafleet:0.1.0"
    ours = "registry.example.com/ml/lorafleet"
    assert image("everything", "Deployment", "fleet-lorafleet-router") == f"{ours}:0.1.0-rc1"
    assert image("everything", "StatefulSet", "fleet-lorafleet-h100-r16").startswith(
        "registry.example.com/ml/lorafleet-agent@sha256:0123"
    )
    assert image("everything", "StatefulSet", "fleet-lorafleet-sglang") == f"{ours}-agent-sglang:1"


@pytest.mark.parametrize(
    ("defaults", "own", "image"),
    [
        ({}, {}, "r/agent@sha256:" + "a" * 64),
        ({}, {"registry": "mirror"}, "mirror/agent@sha256:" + "a" * 64),
        ({}, {"tag": "2"}, "r/agent:2"),
        ({}, {"repository": "mine", "tag": "2"}, "r/mine:2"),
        ({}, {"tag": "2", "digest": "sha256:" + "c" * 64}, "r/agent@sha256:" + "c" * 64),
        ({"digest": "sha256:" + "b" * 64}, {}, "r/agent@sha256:" + "b" * 64),
        ({"digest": "sha256:" + "b" * 64}, {"tag": "2"}, "r/agent:2"),
        ({"tag": "1"}, {"digest": "sha256:" + "c" * 64}, "r/agent@sha256:" + "c" * 64),
    ],
)
def test_a_pools_own_tag_or_repository_is_run_though_others_have_a_digest(tmp_path, defaults, own, image):
    shared = {"registry": "r", "repository": "agent", "tag": "1", "digest": "sha256:" + "a" * 64}
    pool = {"name": "p", "model": "org/m", "image": own}
    worked, output = render(tmp_path, {"agentImage": shared, "poolDefaults": {"image": defaults}, "pools": [pool]})
    assert worked, output
    (worker,) = (item for item in yaml.safe_load_all(output) if item and item["kind"] == "StatefulSet")
    assert worker["spec"]["template"]["spec"]["containers"][0]["image"] == image


@pytest.mark.parametrize("name", ["team.fleet", "2026"])
def test_a_release_whose_name_no_service_can_have_is_refused(name):
    done = run(helm(), "template", name, str(CHART), *DRAWN)
    assert f'the release\'s name makes "{name}-lorafleet"' in done.stderr
    assert "give fullnameOverride" in done.stderr


def test_a_release_may_have_a_number_for_a_name():
    done = run(helm(), "template", "2026", str(CHART), *DRAWN, "--set", "fullnameOverride=fleet")
    assert done.returncode == 0, done.stderr
    for item in filter(None, yaml.safe_load_all(done.stdout)):
        assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == "2026"


def test_addresses_of_ipv6_pods_stand_in_brackets():
    worker = one("ipv6-hpa", "StatefulSet", "lora-gpu")["spec"]["template"]["spec"]["containers"][0]
    seen = {entry["name"]: entry.get("value") for entry in worker["env"]}
    assert seen["LORAFLEET_WORKERS_ADVERTISE_URL"] == "http://[$(POD_IP)]:8090"
    assert seen["LORAFLEET_WORKERS_HOST"] == "::"


def test_a_new_chart_restarts_no_engine_by_itself(tmp_path):
    """Only a changed image or setting restarts pods."""
    newer = tmp_path / "lorafleet"
    shutil.copytree(CHART, newer)
    text = (newer / "Chart.yaml").read_text()
    (newer / "Chart.yaml").write_text(re.sub(r"^version: .*$", "version: 9.9.9", text, flags=re.MULTILINE))
    words = (
        "--namespace",
        NAMESPACE,
        *DRAWN,
        *(word for path in VALUES["everything"] for word in ("--values", str(path))),
    )
    done = run(helm(), "template", RELEASE, str(newer), *words)
    assert done.returncode == 0, done.stderr
    assert "lorafleet-9.9.9" in done.stdout
    after = {
        (item["kind"], item["metadata"]["name"]): item["spec"]["template"]
        for item in yaml.safe_load_all(done.stdout) if item["kind"] in {"Deployment", "StatefulSet"}
    }  # fmt: skip
    assert after == {
        (item["kind"], item["metadata"]["name"]): item["spec"]["template"]
        for item in of_kind("everything", "Deployment", "StatefulSet")
    }


def leaves(item, path=()):
    """Every path of keys to a value that is not a table of keys."""
    if isinstance(item, dict) and item:
        for key, value in item.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def test_every_value_is_said_in_values_yaml_and_used_by_some_template():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def allowed(part, path=()):
        part = schema["definitions"][part["$ref"].rsplit("/", 1)[1]] if "$ref" in part else part
        for name, below in part.get("properties", {}).items():
            yield (*path, name)
            if name not in {
                "settings",
                "resources",
                "demoModelResources",
                "image",
                "global",
                "overlays",
                "policy",
                "list",
            }:
                yield from allowed(below, (*path, name))

    output = {path[:depth] for path in leaves(values) for depth in range(1, len(path) + 1)}
    former = {path for path in allowed(schema) if path[0] == "workerServiceAccount"}
    assert sorted(set(allowed(schema)) - output - former - {("global",)}) == []
    templates = "".join(path.read_text() for path in (CHART / "templates").rglob("*.*"))
    # Within tables that are put in as they are, and what an umbrella chart has for itself.
    whole = {"grafana_dashboard", "cpu", "memory", "tags", "runAsUser", "runAsGroup", "fsGroup"}
    assert sorted(path for path in leaves(values) if path[-1] not in whole and f".{path[-1]}" not in templates) == []
