"""What an API server refuses in an object that is no pod."""

from typing import Any

import pytest

from lorafleet.local.manifests.origins import origin, shown
from lorafleet.local.manifests.rules import object_problems


def made(kind: str, spec: dict[str, Any], *, name: str = "a", **metadata: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, **metadata}, "spec": spec}


def workload(labels: dict[str, str], **spec: Any) -> dict[str, Any]:
    template = {"metadata": {"labels": labels}, "spec": {"containers": []}}
    return made("Deployment", {"selector": {"matchLabels": {"a": "b"}}, "template": template, **spec})


PATHS = [{"path": "/", "pathType": "Prefix"}]


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (made("ConfigMap", {}, name="A"), "metadata.name: A"),
        (made("Service", {}, name="a.b"), "metadata.name: a.b"),
        (made("ConfigMap", {}, labels={"a": "b c"}), "metadata.labels.a: b c"),
        (made("ConfigMap", {}, annotations={"a b": ""}), "metadata.annotations.a b: a b"),
        (workload({"a": "c"}), "spec.template.metadata.labels.a: c"),
        (workload({"a": "b"}, strategy={"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}), "with type Recreate"),
        (workload({"a": "b"}, strategy={"rollingUpdate": {"maxSurge": "a lot"}}), "maxSurge: a lot"),
        (
            made("PodDisruptionBudget", {"minAvailable": 1, "maxUnavailable": 1}),
            "spec: minAvailable and maxUnavailable",
        ),
        (made("PodDisruptionBudget", {"minAvailable": "101%"}), "spec.minAvailable: 101%"),
        (made("Ingress", {"rules": [{"host": "a_b"}]}), "spec.rules[0].host: a_b"),
        (made("Ingress", {"rules": [{"http": {"paths": [{"path": "x", "pathType": "Exact"}]}}]}), "paths[0].path: x"),
        (made("Ingress", {"tls": [{"hosts": ["a:80"]}]}), "spec.tls[0].hosts[0]: a:80"),
        (made("Service", {"type": "Balancer"}), "spec.type: Balancer"),
        (made("Service", {"ipFamilyPolicy": "Both"}), "spec.ipFamilyPolicy: Both"),
        (made("Service", {"ports": [{"port": 1}, {"port": 2}]}), "spec.ports: [None, None]"),
        (made("Service", {"ports": [{"port": 1, "nodePort": 30000}]}), "nodePort: 30000 with type ClusterIP"),
        (made("NetworkPolicy", {"ingress": [{"from": [{}]}]}), "from[0]: an empty peer"),
        (made("NetworkPolicy", {"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.1"}}]}]}), "cidr: 10.0.0.1"),
        (made("HorizontalPodAutoscaler", {"minReplicas": 3, "maxReplicas": 2}), "spec.minReplicas: 3"),
        (made("HorizontalPodAutoscaler", {"behavior": {"scaleUp": {"selectPolicy": "Most"}}}), "selectPolicy: Most"),
        (made("PersistentVolumeClaim", {"resources": {"requests": {"storage": "1 T"}}}), "requests.storage: 1 T"),
        (made("PersistentVolumeClaim", {"accessModes": ["RWX"], "resources": {"requests": {"storage": 1}}}), "RWX"),
    ],
)
def test_one_wrong_field_is_one_problem(item, problem):
    (found,) = object_problems(item)
    assert problem in f"{shown(found.path)}: {found.found}"


@pytest.mark.parametrize(
    "item",
    [
        made("Ingress", {"rules": [{"host": "*.example.com", "http": {"paths": PATHS}}], "tls": [{"hosts": ["a.b"]}]}),
        made("Service", {"type": "NodePort", "ports": [{"port": 1, "nodePort": 30000}]}),
        made("NetworkPolicy", {"ingress": [{"from": [{"ipBlock": {"cidr": "fd00::/8"}}, {"podSelector": {}}]}]}),
        made("HorizontalPodAutoscaler", {"maxReplicas": 2}),
        made("PodDisruptionBudget", {"maxUnavailable": "100%"}),
        made("ScaledObject", {"anything": {"goes": [1]}}),
        workload({"a": "b", "more": "c"}, strategy={"rollingUpdate": {"maxSurge": "200%", "maxUnavailable": 0}}),
    ],
    ids=lambda item: item["kind"],
)
def test_what_is_good_has_no_problem(item):
    assert list(object_problems(item)) == []


def test_a_field_that_no_value_has_is_named_by_its_object():
    item = made("Service", {"type": "x"}, labels={"app.kubernetes.io/component": "router"})
    assert origin(item, ("spec", "type"), {}) == "Service a, spec.type"
    assert origin(item, ("spec", "type"), {"router": {"service": {"type": "x"}}}) == "router.service.type"


@pytest.mark.parametrize("pools", [{"p": {"maxUnavailable": 9}}, [{"name": "p", "maxUnavailable": 9}]])
def test_a_pools_value_comes_before_that_of_the_defaults_in_both_forms_of_pools(pools):
    labels = {"app.kubernetes.io/component": "worker", "lorafleet.io/pool": "p"}
    item, path = made("PodDisruptionBudget", {}, labels=labels), ("spec", "maxUnavailable")
    defaults = {"poolDefaults": {"maxUnavailable": 9}}
    assert origin(item, path, {"pools": pools, **defaults}).replace("[p]", ".p") == "pools.p.maxUnavailable"
    assert origin(item, path, defaults) == "poolDefaults.maxUnavailable"
