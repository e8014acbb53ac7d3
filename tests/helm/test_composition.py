"""Values that compose: intent, accounts, routes, monitoring and devices beside the pools."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.api.usage import read_prices
from orchestrator.configmaps.objects import parse_declared
from orchestrator.model.policy import PlacementPolicy
from tests.helm.rendering import CHART, Manifest, helm_template

pytestmark = pytest.mark.fleet

POOL = {"model": "org/m"}
DATABASE = {"type": "postgresql", "postgresql": {"secretName": "s"}}


def made(folder: Path, values: Manifest) -> dict[str, Any]:
    """The objects of these values by kind and name."""
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    worked, output = helm_template("--values", str(path))
    assert worked, output
    items = (item for item in yaml.load_all(output, yaml.CSafeLoader) if item)
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in items}


def pod_of(found: dict[str, Any], pool: str) -> Manifest:
    """The spec of a pool's pods."""
    spec: Manifest = found[f"StatefulSet/fleet-lorafleet-{pool}"]["spec"]["template"]["spec"]
    return spec


def refusal(folder: Path, values: Manifest) -> str:
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    worked, output = helm_template("--values", str(path))
    assert not worked
    return output


def test_aliases_and_the_policy_are_intent_that_the_orchestrator_reads(tmp_path):
    targets = [{"lora_id": "sql/v1", "weight": 9}, {"lora_id": "sql/v2"}]
    policy = {"min_replicas": 2, "max_replicas": 4, "acceptance": "require"}
    found = made(tmp_path, {"aliases": {"sql": {"targets": targets}, "gone": None}, "policy": policy})
    read = {}
    for item in found.values():
        labels = item["metadata"]["labels"]
        if kind := labels.get("lorafleet.io/kind"):
            assert labels["lorafleet.io/fleet"] == "fleet-lorafleet"
            read[kind] = parse_declared(item, kind)
    assert read.keys() == {"alias", "policy"}
    assert (read["alias"].name, [target.lora_id for target in read["alias"].targets]) == ("sql", ["sql/v1", "sql/v2"])
    assert read["policy"] == PlacementPolicy(**policy)
    # The orchestrator calls its own so: two policies would be one too many.
    assert "ConfigMap/fleet-lorafleet-policy" in found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"aliases": {"sql": {"target": []}}}, "additional properties 'target' not allowed"),
        ({"aliases": {"sql": {"targets": []}}}, "'/aliases/sql/targets': minItems: got 0, want 1"),
        ({"policy": {"min_replica": 1}}, "'/policy': additional properties 'min_replica' not allowed"),
        (
            {"orchestrator": {"store": DATABASE}, "policy": {"min_replicas": 1}},
            "policy: they are ConfigMaps, which an orchestrator with orchestrator.store.type postgresql does not read",
        ),
        ({"monitoring": {"alerts": {"disabled": ["Saturated"]}}}, "'/monitoring/alerts/disabled/0'"),
        ({"monitoring": {"monitors": {"endpoint": {"port": "x"}}}}, "'/monitoring/monitors/endpoint/port'"),
        ({"orchestrator": {"ingress": {"enabled": True}}}, "'/orchestrator/ingress/hosts': minItems: got 0, want 1"),
        (
            {"pools": {"p": POOL | {"engineArgs": ["-tp=4"], "resources": {"limits": {"nvidia.com/gpu": 2}}}}},
            "pool p: resources.limits has 2 of nvidia.com/gpu, and engineArgs ask for 4",
        ),
    ],
)
def test_wrong_values_are_named(tmp_path, values, message):
    assert message in refusal(tmp_path, values)


PRICES = {"currency": "EUR", "base_models": {"m": {"per_engine_second": 0.004}}}


@pytest.mark.parametrize(
    ("prices", "source", "key"),
    [
        ({"list": PRICES}, "fleet-lorafleet-prices", "prices.yaml"),
        ({"configMap": {"name": "ours", "key": "euro"}}, "ours", "euro"),
    ],
)
def test_an_orchestrator_has_the_price_file_of_a_list_or_of_a_configmap(tmp_path, prices, source, key):
    found = made(tmp_path, {"orchestrator": {"store": DATABASE, "prices": prices}})
    spec = found["Deployment/fleet-lorafleet-orchestrator"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (file,) = [each["value"] for each in container["env"] if each["name"] == "LORAFLEET_ORCHESTRATOR_PRICE_FILE"]
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "prices"]
    (volume,) = [each["configMap"] for each in spec["volumes"] if each["name"] == "prices"]
    assert volume == {"name": source, "items": [{"key": key, "path": Path(file).name}]}
    assert mount == {"name": "prices", "mountPath": str(Path(file).parent), "readOnly": True}
    if "list" in prices:
        price_file = tmp_path / "prices.yaml"
        price_file.write_text(found[f"ConfigMap/{source}"]["data"][key])
        assert read_prices(price_file).of("m").per_engine_second == 0.004
    else:
        assert f"ConfigMap/{source}" not in found


def test_a_pool_may_have_an_account_of_its_own_or_an_existing_one(tmp_path):
    pools = {
        "shared": POOL,
        "own": POOL | {"serviceAccount": {"annotations": {"role": "b"}}},
        "there": POOL | {"serviceAccount": {"name": "existing"}},
    }
    found = made(tmp_path, {"poolDefaults": {"serviceAccount": {"annotations": {"role": "a"}}}, "pools": pools})
    accounts = {
        pool: found[f"StatefulSet/fleet-lorafleet-{pool}"]["spec"]["template"]["spec"]["serviceAccountName"]
        for pool in pools
    }
    assert accounts == {"shared": "fleet-lorafleet-worker", "own": "fleet-lorafleet-own", "there": "existing"}
    made_accounts = {
        item["metadata"]["name"]: item["metadata"].get("annotations")
        for item in found.values()
        if item["kind"] == "ServiceAccount" and item["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"
    }
    assert made_accounts == {"fleet-lorafleet-worker": {"role": "a"}, "fleet-lorafleet-own": {"role": "b"}}
    found = made(tmp_path, {"poolDefaults": {"serviceAccount": {"name": "all"}}, "pools": {"p": POOL}})
    assert pod_of(found, "p")["serviceAccountName"] == "all"
    assert "ServiceAccount/fleet-lorafleet-worker" not in found


def test_the_console_has_an_ingress_and_a_route_of_its_own(tmp_path):
    ingress = {"enabled": True, "className": "nginx", "hosts": ["console.example.com"]}
    route = {"enabled": True, "parentRefs": [{"name": "gw"}], "hostnames": ["console.example.com"]}
    overlays = {"ingress": {"metadata": {"annotations": {"a": "b"}}}}
    found = made(tmp_path, {"orchestrator": {"ingress": ingress, "httpRoute": route, "overlays": overlays}})
    item = found["Ingress/fleet-lorafleet-orchestrator"]
    assert item["metadata"]["annotations"] == {"a": "b"}
    (rule,) = item["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert (rule["host"], backend) == (
        "console.example.com",
        {"name": "fleet-lorafleet-orchestrator", "port": {"name": "http"}},
    )
    (rule,) = found["HTTPRoute/fleet-lorafleet-orchestrator"]["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "fleet-lorafleet-orchestrator", "port": 8080}]
    assert "Ingress/fleet-lorafleet-router" not in found


def test_monitors_take_relabelings_and_a_timeout_and_an_alert_may_be_off(tmp_path):
    endpoint = {"scrapeTimeout": "10s", "metricRelabelings": [{"action": "drop", "regex": "x", "sourceLabels": ["a"]}]}
    monitoring = {
        "monitors": {"enabled": True, "endpoint": endpoint},
        "alerts": {"enabled": True, "disabled": ["LorafleetSaturated", "LorafleetNoReplica"]},
    }
    found = made(tmp_path, {"monitoring": monitoring})
    endpoints = [
        each
        for item in found.values()
        for field in ("endpoints", "podMetricsEndpoints")
        for each in item.get("spec", {}).get(field, ())
    ]
    assert len(endpoints) == 3
    assert all(each.items() >= endpoint.items() for each in endpoints)
    rules = found["PrometheusRule/fleet-lorafleet"]["spec"]["groups"][0]["rules"]
    known = {rule["alert"] for rule in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())}
    assert {rule["alert"] for rule in rules} == known - {"LorafleetSaturated", "LorafleetNoReplica"}


@pytest.mark.parametrize(
    ("pool", "limits"),
    [
        ({}, None),
        ({"engineArgs": ["--tensor-parallel-size=4"]}, {"nvidia.com/gpu": 4}),
        ({"engineArgs": ["--tensor-parallel-size=4", "--pipeline-parallel-size=2"]}, {"nvidia.com/gpu": 8}),
        (
            {"engineArgs": ["-tp=2"], "resources": {"limits": {"memory": "64Gi"}}},
            {"nvidia.com/gpu": 2, "memory": "64Gi"},
        ),
        ({"engineArgs": ["-tp=2"], "gpuResource": "amd.com/gpu"}, {"amd.com/gpu": 2}),
        ({"engineArgs": ["-tp=2"], "gpuResource": ""}, None),
        ({"engineArgs": ["-tp=2"], "device": "cpu"}, None),
        ({"engineArgs": ["-tp=2"], "resources": {"limits": {"nvidia.com/gpu": 2}}}, {"nvidia.com/gpu": 2}),
        (
            {"engineArgs": ["-tp=2"], "resources": {"limits": {"nvidia.com/mig-1g.5gb": 2}}},
            {"nvidia.com/mig-1g.5gb": 2},
        ),
        ({"engineArgs": ["-tp=2"], "resources": {"claims": [{"name": "gpu"}]}}, None),
    ],
)
def test_a_worker_has_as_many_devices_as_its_parallelism_needs(tmp_path, pool, limits):
    container = pod_of(made(tmp_path, {"pools": {"p": POOL | pool}}), "p")["containers"][0]
    assert container.get("resources", {}).get("limits") == limits


def test_the_containers_of_the_test_and_the_demo_have_the_resources_of_values(tmp_path):
    few = {"requests": {"cpu": "10m"}, "limits": {"cpu": "1", "memory": "300Mi"}}
    pool = {"demoModel": True, "engine": "sim", "demoModelResources": few}
    found = made(tmp_path, {"tests": {"resources": few}, "pools": {"p": pool}})
    merged = {"requests": {"cpu": "10m", "memory": "512Mi"}, "limits": few["limits"]}
    assert (
        found["StatefulSet/fleet-lorafleet-p"]["spec"]["template"]["spec"]["initContainers"][0]["resources"] == merged
    )
    assert found["Pod/fleet-lorafleet-test"]["spec"]["containers"][0]["resources"]["limits"] == few["limits"]
