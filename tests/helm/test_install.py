"""Real helm and kubectl against an API server: parts that rendering alone cannot test."""

import json
from pathlib import Path

import pytest

from lorafleet.keys.key_files import hash_key
from tests.helm.kinds import KINDS
from tests.helm.releases import HelmRelease
from tests.helm.rendering import CHART, DRAWN, RELEASE, VALUES, manifests
from tests.kube.binaries import helm, run
from tests.kube.conftest import KubeCluster
from tests.kube.server import KubeServer
from tests.kube.stores import FLEET
from tests.patience import until

pytestmark = pytest.mark.fleet

GUIDE = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
CPU = ("--values", str(CHART / "values-cpu.yaml"))


async def test_tokens_are_drawn_once_kept_by_upgrades_and_replaced_a_generation_at_a_time(release):
    await release.helm("install", RELEASE, str(CHART), *CPU)
    first = await release.secret("tokens")
    assert {len(token) for token in first.values()} == {46}

    await release.helm("upgrade", RELEASE, str(CHART), *CPU, "--set", "router.replicas=3")
    assert await release.secret("tokens") == first

    await release.helm("upgrade", RELEASE, str(CHART), *CPU, "--set", "auth.accept={1,2}")
    both = await release.secret("tokens")
    assert both.items() > first.items()
    assert {hash_key(both["router-agents.1"]), hash_key(both["router-agents.2"])} < await release.hashes("worker")

    await release.helm("upgrade", RELEASE, str(CHART), *CPU, "--set", "auth.accept={2}", "--set", "auth.use=2")
    second = await release.secret("tokens")
    assert second == {name: token for name, token in both.items() if name.endswith(".2")}
    assert hash_key(first["router-agents.1"]) not in await release.hashes("worker")


async def test_the_notes_give_the_operators_key_and_uninstall_leaves_nothing(release):
    notes = (await release.helm("install", RELEASE, str(CHART), *CPU)).stdout
    template = notes.split("-o go-template='")[1].split("'")[0]
    key = await release.kubectl("get", "secret", "fleet-lorafleet-tokens", "-o", f"go-template={template}")
    assert key == (await release.secret("tokens"))["admin.1"]
    await release.helm("uninstall", RELEASE)
    kinds = "deployments,statefulsets,services,secrets,configmaps,serviceaccounts,roles,rolebindings,networkpolicies"
    left = await release.kubectl("get", kinds, "-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")
    assert left == ""


async def test_what_uninstall_leaves_goes_by_the_commands_of_the_guide(release, instance, instances):
    """The orchestrators' objects, written while they led, which belong to no release."""
    await release.helm("install", RELEASE, str(CHART), *CPU, "--set", f"fullnameOverride={FLEET}")
    await until(lambda: "sql-expert/v1" in instance.store.adapters)
    await instance.store.wait_durable()
    await instances.close(instance)
    await release.helm("uninstall", RELEASE)
    selected = ("configmaps", "-l", f"lorafleet.io/fleet={FLEET}")
    assert await release.kubectl("get", *selected, "-o", "name")
    await release.kubectl("delete", *selected)
    assert await release.kubectl("get", *selected, "-o", "name") == ""
    assert "kubectl -n ml delete configmap -l lorafleet.io/fleet=fleet-lorafleet" in GUIDE


@pytest.mark.parametrize("case", VALUES)
def test_the_notes_say_what_comes_next(case):
    values = [word for path in VALUES[case] for word in ("--values", str(path))]
    done = run(helm(), "install", RELEASE, str(CHART), "--namespace", "ml", "--dry-run=client", *DRAWN, *values)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.split("NOTES:\n")[1]
    assert ("There are no workers yet" in notes) == (case == "defaults")
    assert ("Services with the labels app=vllm:" in notes) == (case == "found")
    assert ("every pod of this cluster reaches the engines" in notes) == (case == "ipv6-hpa")
    assert "port-forward" in notes
    assert "<no value>" not in notes


def test_the_notes_name_the_ways_from_outside_and_a_policy_that_is_in_the_way(tmp_path):
    path = tmp_path / "values.yaml"
    ingress = {"enabled": True, "hosts": ["llm.example.com"], "tls": [{"hosts": ["llm.example.com"]}]}
    route = {"enabled": True, "parentRefs": [{"name": "gw"}], "hostnames": ["console.example.com"]}
    path.write_text(json.dumps({"router": {"ingress": ingress}, "orchestrator": {"httpRoute": route}}))
    done = run(helm(), "install", RELEASE, str(CHART), "--dry-run=client", *DRAWN, "--values", str(path))
    notes = done.stdout.split("NOTES:\n")[1]
    assert "the router, once its DNS name leads to the proxy:\n  https://llm.example.com/\n" in notes
    assert "the console (/ui), once its DNS name leads to the proxy:\n  console.example.com/, by the gateway\n" in notes
    assert "networkPolicy.orchestratorFrom is empty" in notes


async def test_kubectl_takes_every_render(release):
    """Custom kinds are unknown to this server, and have a schema in kinds.py."""
    items = [item for case in VALUES for item in manifests(case) if item["kind"] not in KINDS]
    namespaced = [{**item, "metadata": {**item["metadata"], "namespace": release.kube.namespace}} for item in items]
    texts = "".join(f"---\n{json.dumps(item)}\n" for item in namespaced)
    said = await release.kubectl("apply", "--dry-run=client", "-f", "-", stdin=texts)
    assert len(said.splitlines()) == len(items)
    assert all(line.endswith("created (dry run)") for line in said.splitlines())


@pytest.mark.parametrize("words", [["template", RELEASE], ["install", RELEASE, "--dry-run=client"]], ids=" ".join)
def test_tokens_are_drawn_where_no_cluster_is_seen_only_if_that_is_asked_for(words):
    done = run(helm(), *words, str(CHART), *CPU)
    assert done.returncode != 0
    assert "auth.existingSecret is empty, and no cluster is seen" in done.stderr
    assert "--set auth.drawWithoutCluster=true" in done.stderr
    for given in ("auth.drawWithoutCluster=true", "auth.existingSecret=fleet-auth"):
        done = run(helm(), *words, str(CHART), *CPU, "--set", given)
        assert done.returncode == 0, done.stderr


async def test_a_namespace_that_helm_is_about_to_make_is_seen_to_be_in_a_cluster(release, kube):
    words = ("--namespace", f"{kube.namespace}-new", "--create-namespace")
    await release.helm("install", RELEASE, str(CHART), *CPU, *words, "--dry-run=server")


async def test_whoever_may_do_all_in_one_namespace_and_nothing_else_can_install(tmp_path):
    user = "system:serviceaccount:ci:deployer"
    async with KubeServer(tls=True) as server:  # over plain http no client shows its token
        server.tokens["t"] = user
        for name, kind, meta in (("ml", "Namespace", {}), ("default", "ServiceAccount", {"namespace": "ml"})):
            server.objects.put({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, **meta}})
        server.grant(user, "ml", [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}])
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", token="t", namespace="ml")
        await HelmRelease(KubeCluster(kubeconfig, "ml", "127.0.0.1", server), tmp_path).helm(
            "install", RELEASE, str(CHART), *CPU
        )
        assert server.forbidden == []
