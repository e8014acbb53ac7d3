"""What an API server refuses in a pod."""

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.local.manifests.origins import shown
from lorafleet.local.manifests.pods import pod_problems

GOOD: dict[str, Any] = {
    "spec": {
        "nodeSelector": {"kubernetes.io/arch": "arm64"},
        "tolerations": [
            {"operator": "Exists"},
            {"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": 9},
        ],
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule"}],
        "volumes": [{"name": "v", "secret": {"secretName": "s", "items": [{"key": "a.b", "path": "p"}]}}],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}],
        "containers": [
            {
                "name": "c",
                "env": [
                    {"name": "A", "value": ""},
                    {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                ],
                "envFrom": [{"configMapRef": {"name": "m"}}],
                "volumeMounts": [{"name": "v", "mountPath": "/v"}, {"name": "data", "mountPath": "/data"}],
                "ports": [{"name": "http", "containerPort": 80}],
                "resources": {
                    "requests": {"cpu": 1, "memory": "1Gi", "nvidia.com/gpu": 1},
                    "limits": {"memory": "1Gi", "nvidia.com/gpu": "1"},
                    "claims": [{"name": "gpu"}],
                },
                "livenessProbe": {"tcpSocket": {"port": 80}, "successThreshold": 1},
            }
        ],
    }
}


def refused(*path: str | int, value: Any) -> list[str]:
    """Problems of the good pod with one field set, as `path: found`."""
    pod = deepcopy(GOOD)
    node: Any = pod
    for step in path[:-1]:
        node = node[step]
    if isinstance(node, list) and path[-1] == len(node):
        node.append(value)
    else:
        node[path[-1]] = value
    return [f"{shown(found.path)}: {found.found}" for found in pod_problems(pod, claimed=("data",))]


def test_a_pod_with_a_bit_of_everything_is_taken():
    assert list(pod_problems(GOOD, claimed=("data",))) == []


CONTAINER = ("spec", "containers", 0)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ((*CONTAINER, "resources", "limits"), {"memory": "1Gi"}, "requests.nvidia.com/gpu: 1 without a limit"),
        (
            (*CONTAINER, "resources", "limits", "nvidia.com/gpu"),
            2,
            "requests.nvidia.com/gpu: 1, and limits.nvidia.com/gpu 2",
        ),
        ((*CONTAINER, "resources", "limits", "cpu"), "100 m", "limits.cpu: 100 m"),
        ((*CONTAINER, "volumeMounts", 2), {"name": "v", "mountPath": "/v"}, "volumeMounts: 2 items with mountPath /v"),
        ((*CONTAINER, "volumeMounts", 0, "subPath"), "../x", "subPath: ../x"),
        ((*CONTAINER, "ports", 1), {"name": "http", "containerPort": 81}, "ports: 2 items with name http"),
        ((*CONTAINER, "ports", 0, "name"), "a-very-long-name-of-a-port", "name: a-very-long-name-of-a-port"),
        ((*CONTAINER, "ports", 0, "containerPort"), 70000, "containerPort: 70000"),
        ((*CONTAINER, "livenessProbe", "successThreshold"), 2, "livenessProbe.successThreshold: 2"),
        ((*CONTAINER, "livenessProbe", "exec"), {"command": ["x"]}, "livenessProbe: exec and tcpSocket"),
        ((*CONTAINER, "livenessProbe", "periodSeconds"), -1, "livenessProbe.periodSeconds: -1"),
        ((*CONTAINER, "imagePullPolicy"), "Sometimes", "imagePullPolicy: Sometimes"),
        (("spec", "containers", 1), {"name": "c"}, "spec.containers: 2 items with name c"),
        (("spec", "volumes", 1), {"name": "x"}, "spec.volumes[1]: no source"),
        (("spec", "volumes", 1), {"name": "X", "emptyDir": {}}, "spec.volumes[1].name: X"),
        (("spec", "volumes", 1), {"name": "x", "emptyDir": {"sizeLimit": "1 G"}}, "emptyDir.sizeLimit: 1 G"),
        (("spec", "volumes", 0, "secret", "items", 0, "key"), "a/b", "items[0].key: a/b"),
        (("spec", "resourceClaims", 0, "resourceClaimName"), "c", "resourceClaimName and resourceClaimTemplateName"),
        (("spec", "tolerations", 0, "effect"), "Never", "tolerations[0].effect: Never"),
        (("spec", "tolerations", 0), {"value": "x"}, "tolerations[0]: no key"),
        (
            ("spec", "tolerations", 1, "effect"),
            "NoSchedule",
            "tolerations[1]: tolerationSeconds with effect NoSchedule",
        ),
        (("spec", "topologySpreadConstraints", 0, "maxSkew"), 0, "maxSkew: 0"),
        (
            ("spec", "topologySpreadConstraints", 0),
            {"whenUnsatisfiable": "ScheduleAnyway", "minDomains": 2},
            "minDomains: 2",
        ),
        (("spec", "runtimeClassName"), "nvidia_gpu", "spec.runtimeClassName: nvidia_gpu"),
        (("spec", "dnsPolicy"), "Host", "spec.dnsPolicy: Host"),
    ],
)
def test_one_wrong_field_is_one_problem(path, value, problem):
    (found,) = refused(*path, value=value)
    assert problem in found


@given(request=st.integers(0, 10**9), limit=st.integers(0, 10**9))
def test_a_request_may_be_as_large_as_the_limit_and_not_larger(request, limit):
    resources = {"requests": {"memory": f"{request}k"}, "limits": {"memory": limit * 1000}}
    assert bool(refused(*CONTAINER, "resources", value=resources)) == (request > limit)
