"""The values in helm/lorafleet/examples: each renders, is what an API server takes, and is installed."""

import functools
import shutil
from pathlib import Path

import pytest
import yaml

from lorafleet.local.manifests.check import ChartRelease, checked
from tests.helm.rendering import CHART, NAMESPACE, RELEASE, Manifest, containers, helm_template
from tests.kube.binaries import helm, run

pytestmark = pytest.mark.fleet

EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
UMBRELLA = CHART / "examples" / "argocd"
each = pytest.mark.parametrize("name", EXAMPLES)


def parsed(text: str) -> dict[str, Manifest]:
    items = (item for item in yaml.load_all(text, yaml.CSafeLoader) if item)
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in items}


@functools.cache
def rendered(name: str) -> dict[str, Manifest]:
    worked, output = helm_template("--values", str(EXAMPLES[name]))
    assert worked, output
    return parsed(output)


def pods(name: str) -> list[Manifest]:
    """The specs of all pods of an example."""
    specs = [item["spec"] for item in rendered(name).values() if "spec" in item]
    return [spec.get("template", {"spec": spec})["spec"] for spec in specs if {"template", "containers"} & spec.keys()]


@each
def test_an_api_server_takes_each_example(name):
    release = ChartRelease(
        chart=CHART, name=RELEASE, namespace=NAMESPACE, values=(EXAMPLES[name],), kubernetes="1.37.0"
    )
    assert checked(release, helm=str(helm())).problems == ()


@each
async def test_each_example_is_installed_and_upgraded(release, name):
    await release.helm("install", RELEASE, str(CHART), "--values", str(EXAMPLES[name]))
    await release.helm("upgrade", RELEASE, str(CHART), "--values", str(EXAMPLES[name]))
    await release.helm("uninstall", RELEASE)


def test_on_openshift_the_cluster_gives_the_ids_and_its_proxies_reach_router_and_console():
    for spec in pods("openshift"):
        assert not spec["securityContext"].keys() & {"runAsUser", "runAsGroup", "fsGroup"}
        assert spec["securityContext"]["runAsNonRoot"] is True
    found = rendered("openshift")
    for part in ("router", "orchestrator"):
        assert found[f"Ingress/fleet-lorafleet-{part}"]["spec"]["ingressClassName"] == "openshift-default"
        peers = found[f"NetworkPolicy/fleet-lorafleet-{part}"]["spec"]["ingress"][0]["from"]
        labels = {"matchLabels": {"network.openshift.io/policy-group": "ingress"}}
        assert {"namespaceSelector": labels} in peers


def test_by_dynamic_allocation_each_worker_has_a_claim_and_no_device_plugins_resource():
    worker = rendered("dra")["StatefulSet/fleet-lorafleet-h100"]["spec"]["template"]["spec"]
    (claim,) = worker["resourceClaims"]
    assert f"ResourceClaimTemplate/{claim['resourceClaimTemplateName']}" in rendered("dra")
    resources = worker["containers"][0]["resources"]
    assert resources["claims"] == [{"name": claim["name"]}]
    assert "nvidia.com/gpu" not in resources["limits"]


def test_without_a_network_all_images_are_the_mirrors_and_nothing_asks_a_hub():
    for spec in pods("air-gap"):
        assert spec["imagePullSecrets"] == [{"name": "mirror"}]
        for container in containers(spec):
            assert container["image"].startswith("mirror.example.com/ml/")
            if container["name"] in {"router", "orchestrator", "worker"}:
                assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]


def test_under_a_quota_on_limits_every_container_has_them():
    counted = {"cpu", "memory", "ephemeral-storage"}
    names = set()
    for spec in pods("quota"):
        for container in containers(spec):
            names.add(container["name"])
            assert container["resources"]["requests"].keys() >= counted
            assert container["resources"]["limits"].keys() >= counted
    assert names == {"router", "orchestrator", "worker", "demo-model", "completion"}


def test_the_umbrella_chart_is_built_and_rendered_as_argo_cd_does(tmp_path):
    """Without a cluster, so with tokens from a Secret; a sync changes no number that an autoscaler sets."""
    shutil.copytree(CHART, tmp_path / "lorafleet")
    umbrella = tmp_path / "lorafleet" / "examples" / "argocd"
    homes = {f"HELM_{kind}_HOME": str(tmp_path / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    done = run(helm(), "dependency", "build", str(umbrella), environment=homes)
    assert done.returncode == 0, done.stderr
    application = yaml.safe_load((UMBRELLA / "application.yaml").read_text())["spec"]
    name, namespace = application["source"]["helm"]["releaseName"], application["destination"]["namespace"]
    done = run(helm(), "template", name, str(umbrella), "--namespace", namespace, environment=homes)
    assert done.returncode == 0, done.stderr
    found = parsed(done.stdout)
    assert "replicas" not in found["Deployment/fleet-router"]["spec"]
    assert found["StatefulSet/fleet-l40s"]["spec"]["replicas"] == 4
    image = found["StatefulSet/fleet-l40s"]["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == "registry.example.com/ml/lorafleet-agent:0.1.0"
    assert not any(item["kind"] == "Secret" and "tokens" in key for key, item in found.items())
    assert "ServerSideApply=true" in application["syncPolicy"]["syncOptions"]


def test_every_example_is_named_in_the_guide():
    guide = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    assert [name for name in (*EXAMPLES, "argocd") if f"examples/{name}" not in guide] == []
