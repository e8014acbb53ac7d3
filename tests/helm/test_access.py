"""Least of everything: what pods may do on their node, at the API server, and to one another."""

import json

import pytest
import yaml

from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.key_files import hash_key, read_key_files
from tests.helm.rendering import (
    NAMESPACE,
    VALUES,
    containers,
    helm_template,
    manifests,
    of_kind,
    one,
    pod_templates,
    secret,
)
from tests.helm.test_settings import mounted

cases = pytest.mark.parametrize("case", VALUES)

# What routers and orchestrators ask of the API server (lorafleet/kube, leadership/kube_lease.py, configmaps).
LEASES, CONFIGMAPS, EVENTS, SLICES = (
    ("coordination.k8s.io", "leases"), ("", "configmaps"), ("", "events"), ("discovery.k8s.io", "endpointslices"),
)  # fmt: skip
STORE = {
    (*LEASES, "create", ""),
    (*LEASES, "get", "fleet-lorafleet"),
    (*LEASES, "update", "fleet-lorafleet"),
    *((*CONFIGMAPS, verb, "") for verb in ("get", "list", "watch", "create", "update", "delete")),
    *((*EVENTS, verb, "") for verb in ("create", "patch")),
}
DISCOVERY = {(*SLICES, "list", ""), (*SLICES, "watch", "")}


@cases
def test_every_pod_passes_the_restricted_pod_security_standard(case):
    """source: kubernetes.io/docs/concepts/security/pod-security-standards, restricted; and read-only roots besides."""
    volumes = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    for pod, template in pod_templates(case):
        spec = template["spec"]
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, pod
        assert context["runAsUser"] > 0, pod
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, pod
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), pod
        for container in containers(spec):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, pod
            assert own["readOnlyRootFilesystem"] is True, pod
            assert own["capabilities"] == {"drop": ["ALL"]}, pod
            assert not own.keys() & {"privileged", "procMount", "runAsUser", "seccompProfile"}, pod
            assert all("hostPort" not in port for port in container.get("ports", ())), pod
        for volume in spec.get("volumes", ()):
            assert volume.keys() - {"name"} <= volumes, (pod, volume)


@cases
def test_no_pod_gets_variables_of_services_which_our_settings_would_refuse(case):
    """A Service named lorafleet-router would put LORAFLEET_ROUTER_PORT=tcp://... into every pod beside it."""
    for pod, template in pod_templates(case):
        assert template["spec"]["enableServiceLinks"] is False, pod


@cases
def test_only_routers_and_orchestrators_have_a_token_for_the_api_server(case):
    for account in of_kind(case, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    for pod, template in pod_templates(case):
        needs_one = template["metadata"]["labels"]["app.kubernetes.io/component"] in {"router", "orchestrator"}
        assert template["spec"]["automountServiceAccountToken"] is needs_one, pod


def granted(case: str, account: str) -> dict[str, set[tuple[str, str, str, str]]]:
    """namespace -> {(group, resource, verb, name)} of a service account."""
    found: dict[str, set[tuple[str, str, str, str]]] = {}
    for binding in of_kind(case, "RoleBinding"):
        if [s["name"] for s in binding["subjects"]] != [account]:
            continue
        assert all(s["namespace"] == NAMESPACE for s in binding["subjects"])
        namespace = binding["metadata"].get("namespace", NAMESPACE)
        role = next(
            role for role in of_kind(case, "Role")
            if role["metadata"]["name"] == binding["roleRef"]["name"]
            and role["metadata"].get("namespace", NAMESPACE) == namespace
        )  # fmt: skip
        found.setdefault(namespace, set()).update(
            (group, resource, verb, name)
            for rule in role["rules"] for group in rule["apiGroups"] for resource in rule["resources"]
            for verb in rule["verbs"] for name in rule.get("resourceNames", [""])
        )  # fmt: skip
    return found


def test_each_may_ask_the_api_server_for_what_it_needs_and_for_nothing_else():
    assert granted("everything", "fleet-lorafleet-router") == {NAMESPACE: DISCOVERY, "ml-batch": DISCOVERY}
    assert granted("everything", "fleet-lorafleet-orchestrator") == {
        NAMESPACE: STORE | DISCOVERY,
        "ml-batch": DISCOVERY,
    }
    assert granted("everything", "fleet-lorafleet-worker") == {}
    assert granted("postgresql", "fleet-lorafleet-orchestrator") == {NAMESPACE: DISCOVERY}


@cases
def test_nothing_belongs_to_the_cluster(case):
    assert not of_kind(case, "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "PriorityClass")


def admitted(case: str, name: str) -> set[tuple[str, int]]:
    """(peer, port) that a policy admits; a peer is a component, `any`, or labels."""
    found = set()
    for rule in one(case, "NetworkPolicy", name)["spec"]["ingress"]:
        for peer in rule.get("from", [{}]):
            labels = peer.get("podSelector", peer.get("namespaceSelector", {})).get("matchLabels", {})
            who = labels.get("app.kubernetes.io/component") or (yaml.safe_dump(labels).strip() if labels else "any")
            if "app.kubernetes.io/component" in labels:
                assert labels["app.kubernetes.io/instance"] == "fleet"
            found |= {(who, port["port"]) for port in rule["ports"]}
    return found


def test_engines_are_reached_by_routers_and_orchestrators_alone_and_agents_by_one_another_too():
    ours = {(who, port) for who in ("router", "orchestrator") for port in (8090, 8100)} | {("worker", 8090)}
    assert admitted("cpu", "fleet-lorafleet-worker") == ours
    metrics = {("kubernetes.io/metadata.name: monitoring", 8090)}
    assert admitted("everything", "fleet-lorafleet-worker") == ours | metrics
    legacy = {(who, port) for who in ("router", "orchestrator") for port in (8000, 5557, 5558)}
    assert admitted("everything", "fleet-lorafleet-engine-legacy") == legacy


def test_the_orchestrator_is_reached_by_the_fleet_and_whom_values_name():
    fleet = {("router", 8080), ("worker", 8080), ("orchestrator", 8080)}
    assert admitted("cpu", "fleet-lorafleet-orchestrator") == fleet
    named = {("app: ci", 8080), ("kubernetes.io/metadata.name: monitoring", 8080)}
    assert admitted("everything", "fleet-lorafleet-orchestrator") == fleet | named


def test_workers_of_followed_namespaces_reach_the_orchestrator_and_the_other_workers():
    """Without that they have no heartbeat: the policy drops it, and the worker is not managed."""
    for policy, port in (("orchestrator", 8080), ("worker", 8090)):
        namespaces = {
            peer.get("namespaceSelector", {}).get("matchLabels", {}).get("kubernetes.io/metadata.name", NAMESPACE)
            for rule in one("everything", "NetworkPolicy", f"fleet-lorafleet-{policy}")["spec"]["ingress"]
            for peer in rule["from"]
            if {"port": port} in rule["ports"]
            and peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component") == "worker"
        }
        assert namespaces == {NAMESPACE, "ml-batch"}, policy


def test_the_router_is_reached_by_everybody_or_whom_values_name_and_the_test_of_the_release():
    assert admitted("cpu", "fleet-lorafleet-router") == {("any", 8000)}
    assert admitted("everything", "fleet-lorafleet-router") == {
        ("test", 8000), ("kubernetes.io/metadata.name: apps", 8000), ("kubernetes.io/metadata.name: monitoring", 8000),
    }  # fmt: skip


@cases
def test_every_pod_of_ours_has_a_policy_where_policies_are_on(case):
    policies = [policy["spec"]["podSelector"]["matchLabels"] for policy in of_kind(case, "NetworkPolicy")]
    for pod, template in pod_templates(case):
        labels = template["metadata"]["labels"]
        if policies and labels["app.kubernetes.io/component"] != "test":
            assert any(selector.items() <= labels.items() for selector in policies), pod


@cases
def test_kv_events_have_no_port(case):
    """They carry prompt tokens; the agent reads them from a socket in its own pod."""
    text = str([item for item in manifests(case) if item["kind"] in {"Deployment", "StatefulSet", "Service"}])
    assert "5557" not in text
    assert "kv-events" not in text


def scopes(case: str, service: str, tmp_path) -> dict[str, frozenset[str]]:
    """role -> what its token may do at this service."""
    tokens = secret(case, "fleet-lorafleet-tokens")
    path = tmp_path / f"{service}.yaml"
    path.write_text(secret(case, f"fleet-lorafleet-keys-{service}")["keys.yaml"])
    known = {entry["sha256"] for entry in yaml.safe_load(path.read_text())["keys"]}
    keys = ApiKeys([path])
    return {role: keys.caller(f"Bearer {token}").scopes for role, token in tokens.items() if hash_key(token) in known}


def test_a_token_opens_the_services_that_its_holder_speaks_to_and_no_others(tmp_path):
    infer, load, worker, drain, metrics, admin = (
        frozenset({scope}) for scope in ("infer", "load", "worker", "drain", "metrics", "admin")
    )
    # Routers and orchestrators check agents' proofs of their addresses by the hash of the workers' key.
    assert scopes("cpu", "router", tmp_path) == {
        "admin.1": admin, "test.1": infer, "worker.1": worker, "metrics.1": metrics,
    }  # fmt: skip
    # Between orchestrators: a standby follows the leader's events.
    assert scopes("cpu", "orchestrator", tmp_path) == {
        "admin.1": admin, "orchestrator.1": load, "router.1": load, "worker.1": worker,
        "metrics.1": metrics,
    }  # fmt: skip
    assert scopes("cpu", "worker", tmp_path) == {
        "orchestrator-agents.1": frozenset({"agent"}), "router-agents.1": frozenset({"agent-load"}),
        "worker.1": drain | worker, "metrics.1": metrics,
    }  # fmt: skip
    for service in ("router", "orchestrator", "worker"):
        assert scopes("everything", service, tmp_path)["metrics.2"] == metrics


def test_while_tokens_rotate_both_generations_are_taken_and_the_new_one_is_used(tmp_path):
    assert scopes("everything", "worker", tmp_path).keys() == {
        f"{role}.{generation}"
        for role in ("metrics", "orchestrator-agents", "router-agents", "worker")
        for generation in (1, 2)
    }
    router = one("everything", "Deployment", "fleet-lorafleet-router")["spec"]["template"]["spec"]
    found = mounted(router, router["containers"][0])
    assert found["/etc/lorafleet/token/token"] == ("fleet-lorafleet-tokens", "router.2")
    assert found["/etc/lorafleet/token/agent-token"] == ("fleet-lorafleet-tokens", "router-agents.2")


def test_tenants_keys_reach_the_router_and_only_operators_the_orchestrator():
    def notes(service):
        text = secret("everything", f"fleet-lorafleet-keys-{service}")["keys.yaml"]
        return {entry.get("tenant") or entry.get("note") for entry in yaml.safe_load(text)["keys"]}

    assert {"acme", "ci"} <= notes("router")
    assert "ci" in notes("orchestrator")
    assert "acme" not in notes("orchestrator")
    assert not {"acme", "ci"} & notes("worker")


def test_keys_in_values_are_accepted_beside_a_secret_of_ones_own_too(tmp_path):
    keys = [
        {"sha256": hash_key("a"), "tenant": "acme", "scopes": ["infer"], "limits": {"tokens_per_minute": 100_000_000}},
        {"sha256": hash_key("b"), "tenant": "acme", "scopes": ["infer"]},
    ]
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"auth": {"existingSecret": "own", "keys": keys}}))
    worked, output = helm_template("--values", str(values))
    assert worked, output
    found = {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(output) if item}
    assert ("Secret", "fleet-lorafleet-tokens") not in found
    for service, accepted in (("router", {"a", "b"}), ("orchestrator", set())):
        spec = found["Deployment", f"fleet-lorafleet-{service}"]["spec"]["template"]["spec"]
        (files,) = (e["value"] for e in spec["containers"][0]["env"] if e["name"].endswith("_KEY_FILES"))
        (file,) = (path for path in json.loads(files) if path != "/etc/lorafleet/keys/keys.yaml")
        (mount,) = (m for m in spec["containers"][0]["volumeMounts"] if file == f"{m['mountPath']}/keys.yaml")
        (volume,) = (v for v in spec["volumes"] if v["name"] == mount["name"])
        kept = tmp_path / f"{service}.yaml"
        kept.write_text(found["Secret", volume["secret"]["secretName"]]["stringData"]["keys.yaml"])
        assert {key for key in ("a", "b") if hash_key(key) in read_key_files([kept])} == accepted


def test_a_token_in_clear_is_in_one_secret_only():
    tokens = secret("cpu", "fleet-lorafleet-tokens").values()
    assert len(set(tokens)) == 8
    for item in manifests("cpu"):
        if item["metadata"]["name"] != "fleet-lorafleet-tokens":
            assert not any(token in str(item) for token in tokens), item["metadata"]["name"]


def test_issuers_in_values_reach_every_service_with_drawn_keys_and_beside_a_secret_of_ones_own(tmp_path):
    issuer = {
        "issuer": "https://login.example.com/realms/ml",
        "audiences": ["lorafleet"],
        "console": {"client_id": "lorafleet"},
        "grants": [
            {
                "claims": {"groups": "team-{team}", "ok": True},
                "tenant": "{team}",
                "scopes": ["infer"],
                "namespace": "{team}/x",
            }
        ],
    }
    values = tmp_path / "values.yaml"
    values.write_text(
        yaml.safe_dump(
            {"auth": {"existingSecret": "own", "issuers": [issuer]}, "pools": [{"name": "p", "model": "org/m"}]}
        )
    )
    worked, output = helm_template("--values", str(values))
    assert worked, output
    given = {item["metadata"]["name"]: item for item in yaml.safe_load_all(output) if item and item["kind"] == "Secret"}
    for service in ("router", "orchestrator", "worker"):
        name = f"fleet-lorafleet-keys-{service}"
        for number, text in enumerate(
            (secret("everything", name)["keys.yaml"], given[name]["stringData"]["keys.yaml"])
        ):
            path = tmp_path / f"{service}{number}.yaml"
            path.write_text(text)
            (found,) = ApiKeys([path]).issuers.values()
            assert found.console.client_id == "lorafleet"
            assert found.grants[-1].gives.tenant == "{team}"
    pods = [
        item["spec"]["template"]["spec"]
        for item in yaml.safe_load_all(output)
        if item and "template" in item.get("spec", {})
    ]
    files = [
        entry["value"]
        for pod in pods
        for entry in pod["containers"][0].get("env", ())
        if entry["name"].endswith("_KEY_FILES")
    ]
    assert len(files) >= 3
    assert all("/etc/lorafleet/keys-given/keys.yaml" in text for text in files)
