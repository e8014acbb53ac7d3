"""Pools that may have no worker: who is told of them, who may scale them, and what KEDA goes by."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from lorafleet.engine.settings import PoolFromZero
from tests.helm.kinds import KINDS
from tests.helm.rendering import Manifest, containers, helm_template

POOLS = {
    "a": {"model": "org/m-7b", "autoscaling": {"enabled": True, "minReplicas": 0, "fromZero": {"startSeconds": 85}}},
    "b": {
        "model": "org/m-7b",
        "kind": "Deployment",
        "baseModel": "m",
        "autoscaling": {"enabled": True, "type": "external", "minReplicas": 0},
    },
    "c": {"model": "org/n", "autoscaling": {"enabled": True}},
    "d": {"model": "org/n", "autoscaling": {"enabled": False, "minReplicas": 0}},
}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Manifest]:
    return rendered(tmp_path_factory.mktemp("values") / "values.yaml", POOLS)


def rendered(path: Path, pools: dict[str, Manifest]) -> dict[tuple[str, str], Manifest]:
    values = {"monitoring": {"prometheusUrl": "http://prometheus:9090"}, "pools": pools}
    path.write_text(yaml.safe_dump(values))
    is_well, text = helm_template("--values", str(path))
    assert is_well, text
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text) if each}


def told(objects: dict[tuple[str, str], Manifest], service: str) -> dict[str, PoolFromZero]:
    (container,) = containers(objects["Deployment", f"fleet-lorafleet-{service}"]["spec"]["template"]["spec"])
    env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    given = json.loads(env[f"LORAFLEET_{service.upper()}_SCALE_FROM_ZERO"])
    return {name: PoolFromZero.model_validate(pool) for name, pool in given.items()}


def test_routers_and_orchestrators_know_the_pools_that_may_be_at_zero(objects):
    wanted = {
        "a": PoolFromZero(base_model="m-7b", start_s=85, workload="statefulsets/fleet-lorafleet-a"),
        "b": PoolFromZero(base_model="m", start_s=120, workload="deployments/fleet-lorafleet-b"),
    }
    assert told(objects, "router") == told(objects, "orchestrator") == wanted


def test_the_orchestrator_may_change_the_number_of_these_pools_and_nothing_else(objects):
    assert objects["Role", "fleet-lorafleet-orchestrator-scale"]["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": [f"{resource}/scale"],
            "resourceNames": [f"fleet-lorafleet-{pool}"],
            "verbs": ["get", "patch"],
        }
        for resource, pool in (("deployments", "b"), ("statefulsets", "a"))
    ]


def test_a_pool_that_only_an_autoscaler_starts_needs_no_role(tmp_path):
    scaling = {"enabled": True, "minReplicas": 0, "fromZero": {"byOrchestrator": False}}
    objects = rendered(tmp_path / "values.yaml", {"a": {"model": "org/m", "autoscaling": scaling}})
    assert ("Role", "fleet-lorafleet-orchestrator-scale") not in objects
    assert told(objects, "orchestrator")["a"].workload == ""


def test_keda_starts_a_pool_for_held_requests_and_ends_it_when_it_is_idle(objects):
    jsonschema.validate(
        objects["ScaledObject", "fleet-lorafleet-a"], KINDS["ScaledObject"], jsonschema.Draft202012Validator
    )
    spec = objects["ScaledObject", "fleet-lorafleet-a"]["spec"]
    assert spec["minReplicaCount"] == 0
    activates = {trigger["name"]: trigger["metadata"]["activationThreshold"] for trigger in spec["triggers"]}
    never = "1000000000"  # slots are wanted as long as an adapter has one: that keeps no pool alive
    assert activates == {"queue-wait": never, "slots-wanted": never, "held": "0", "in-use": "0"}
    queries = {trigger["name"]: trigger["metadata"]["query"] for trigger in spec["triggers"]}
    assert queries["held"].startswith("max(lorafleet_pool_held_requests{")
    assert queries["in-use"].endswith('pool="a"}) < bool 900')
    usual = objects["ScaledObject", "fleet-lorafleet-c"]["spec"]
    assert [trigger["name"] for trigger in usual["triggers"]] == ["queue-wait", "slots-wanted"]
    assert "pollingInterval" not in usual
