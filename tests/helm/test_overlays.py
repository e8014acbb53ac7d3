"""Overlays change the chart's objects as strategic merge patches do, on every workload alike."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helm.rendering import CHART, NAMESPACE, RELEASE, Manifest, helm_template
from tests.kube.binaries import helm, run
from tests.kube.patches import strategic

POOL = {"name": "p", "model": "org/m"}
# The part of values with overlays, the object that they change, and its own container.
PARTS = {
    "router": ("Deployment/fleet-lorafleet-router", "router"),
    "orchestrator": ("Deployment/fleet-lorafleet-orchestrator", "orchestrator"),
    "pool": ("StatefulSet/fleet-lorafleet-p", "worker"),
    "poolDefaults": ("StatefulSet/fleet-lorafleet-p", "worker"),
    "tests": ("Pod/fleet-lorafleet-test", "completion"),
}
parts = pytest.mark.parametrize("part", PARTS)


def values_with(part: str, overlays: Manifest, **more: object) -> Manifest:
    """Values of a fleet with one pool, and these overlays and values in one part of them."""
    own = {"overlays": overlays, **more}
    if part == "pool":
        return {"pools": [POOL | own]}
    return {"pools": [POOL], part: own}


def made(tmp_path, values: Manifest) -> dict[str, Manifest]:
    """kind/name -> what helm makes of the values."""
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    worked, output = helm_template("--values", str(path))
    assert worked, output
    found = [item for item in yaml.load_all(output, yaml.CSafeLoader) if item]
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in found}


def pod_of(item: Manifest) -> Manifest:
    return item if item["kind"] == "Pod" else item["spec"]["template"]


def container_of(item: Manifest, name: str) -> Manifest:
    (found,) = (each for each in pod_of(item)["spec"]["containers"] if each["name"] == name)
    return found


# What platform teams set in pods; `own` is the container of the chart.
POD_CHANGES = {
    "a sidecar": lambda own: {"spec": {"containers": [{"name": "mesh", "image": "mesh:1"}]}},
    "a sidecar that starts first": lambda own: {
        "spec": {"initContainers": [{"name": "proxy", "image": "proxy:1", "restartPolicy": "Always"}]}
    },
    "an init container": lambda own: {"spec": {"initContainers": [{"name": "wait", "image": "busybox:1"}]}},
    "a volume and its mount": lambda own: {
        "spec": {
            "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "containers": [{"name": own, "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}]}],
        }
    },
    "envFrom": lambda own: {"spec": {"containers": [{"name": own, "envFrom": [{"secretRef": {"name": "proxy"}}]}]}},
    "a variable": lambda own: {"spec": {"containers": [{"name": own, "env": [{"name": "HTTPS_PROXY", "value": "p"}]}]}},
    "labels and annotations": lambda own: {"metadata": {"labels": {"mesh": "on"}, "annotations": {"a/b": "c"}}},
    "a scheduler": lambda own: {"spec": {"schedulerName": "kueue"}},
    "a probe": lambda own: {
        "spec": {"containers": [{"name": own, "livenessProbe": {"failureThreshold": 9, "httpGet": {"path": "/live"}}}]}
    },
    "another kind of probe": lambda own: {
        "spec": {"containers": [{"name": own, "readinessProbe": {"httpGet": None, "tcpSocket": {"port": 1}}}]}
    },
    "no probe": lambda own: {"spec": {"containers": [{"name": own, "livenessProbe": None}]}},
    "security contexts": lambda own: {
        "spec": {
            "securityContext": {"runAsUser": 1000660000, "fsGroup": None, "seLinuxOptions": {"level": "s0"}},
            "containers": [{"name": own, "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}}],
        }
    },
    "DRA claims": lambda own: {
        "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}],
            "containers": [{"name": own, "resources": {"claims": [{"name": "gpu"}]}}],
        }
    },
    "host aliases": lambda own: {"spec": {"hostAliases": [{"ip": "10.1.1.1", "hostnames": ["s3.example"]}]}},
    "a port": lambda own: {"spec": {"containers": [{"name": own, "ports": [{"containerPort": 15020}]}]}},
    "dnsConfig": lambda own: {"spec": {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.10"]}}},
    "one spread in place of the chart's": lambda own: {
        "spec": {
            "topologySpreadConstraints": [
                {"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
            ]
        }
    },
    "a volume of the chart's that is larger": lambda own: {
        "spec": {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "8Gi"}}]}
    },
    "a volume of another source": lambda own: {
        "spec": {"volumes": [{"name": "tmp", "emptyDir": None, "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}]}
    },
    "a mount that is gone": lambda own: {
        "spec": {"containers": [{"name": own, "volumeMounts": [{"mountPath": "/tmp", "$patch": "delete"}]}]}
    },
    "a lifecycle": lambda own: {
        "spec": {"containers": [{"name": own, "lifecycle": {"preStop": {"exec": {"command": ["sleep", "9"]}}}}]}
    },
}  # fmt: skip


@parts
def test_what_platform_teams_change_in_pods_is_changed_as_kubectl_patch_changes_it(part, tmp_path):
    """The API server's rule on our own render is what the overlay has to give."""
    name, own = PARTS[part]
    overlay: Manifest = {}
    for change in POD_CHANGES.values():
        if not _removes(change(own)):
            overlay = strategic(overlay, change(own))
    before, after = made(tmp_path, values_with(part, {})), made(tmp_path, values_with(part, {"pod": overlay}))
    assert pod_of(after[name]) == strategic(pod_of(before[name]), overlay)
    others = before.keys() - {name}
    assert {key: after[key] for key in others if "Secret" not in key} == {
        key: before[key] for key in others if "Secret" not in key
    }


def _removes(change: Manifest) -> bool:
    return "null" in json.dumps(change) or "$patch" in json.dumps(change)


@pytest.mark.parametrize("what", [what for what, change in POD_CHANGES.items() if _removes(change("own"))])
def test_an_overlay_removes_what_it_says_is_null_or_deleted(what, tmp_path):
    overlay = POD_CHANGES[what]("router")
    name = PARTS["router"][0]
    before, after = made(tmp_path, {}), made(tmp_path, {"router": {"overlays": {"pod": overlay}}})
    assert pod_of(after[name]) == strategic(pod_of(before[name]), overlay)
    assert after[name] != before[name]


def test_items_of_a_list_keep_their_places_and_new_ones_come_last(tmp_path):
    env = [{"name": "LATE", "value": "$(POD_NAME)"}, {"name": "LORAFLEET_ROUTER_HOST", "value": "127.0.0.1"}]
    overlay = {"spec": {"containers": [{"name": "router", "env": env}]}}
    name = PARTS["router"][0]
    before, after = made(tmp_path, {}), made(tmp_path, {"router": {"overlays": {"pod": overlay}}})
    names = [entry["name"] for entry in container_of(before[name], "router")["env"]]
    found = container_of(after[name], "router")["env"]
    assert [entry["name"] for entry in found] == [*names, "LATE"]
    assert found[names.index("LORAFLEET_ROUTER_HOST")]["value"] == "127.0.0.1"


def test_a_pools_overlay_comes_after_that_of_all_pools(tmp_path):
    def sidecar(name: str, image: str) -> Manifest:
        return {"name": name, "image": image}

    values = {
        "poolDefaults": {"overlays": {"pod": {"spec": {"containers": [sidecar("a", "a:1"), sidecar("b", "b:1")]}}}},
        "pools": [
            POOL | {"overlays": {"pod": {"spec": {"containers": [sidecar("a", "a:2"), sidecar("c", "c:1")]}}}},
            POOL | {"name": "q"},
        ],
    }
    found = made(tmp_path, values)
    images = {
        name: [each["image"] for each in pod_of(found[f"StatefulSet/fleet-lorafleet-{name}"])["spec"]["containers"][1:]]
        for name in ("p", "q")
    }
    assert images == {"p": ["a:2", "b:1", "c:1"], "q": ["a:1", "b:1"]}


@pytest.mark.parametrize("part", ["router", "orchestrator", "pool"])
def test_workload_service_and_budget_have_overlays_of_their_own(part, tmp_path):
    annotations = {"leaderworkerset.sigs.k8s.io/size": "2"}
    overlays = {
        "workload": {"metadata": {"annotations": annotations}, "spec": {"minReadySeconds": 5}},
        "service": {"spec": {"ipFamilyPolicy": "PreferDualStack", "trafficDistribution": "PreferClose"}},
        "disruptionBudget": {"spec": {"maxUnavailable": None, "minAvailable": "80%"}},
    }  # fmt: skip
    found = made(tmp_path, values_with(part, overlays))
    name = PARTS[part][0]
    assert found[name]["metadata"]["annotations"]["leaderworkerset.sigs.k8s.io/size"] == "2"
    assert "lorafleet.io/replicas" in found[name]["metadata"]["annotations"]
    assert found[name]["spec"]["minReadySeconds"] == 5
    service = found[f"Service/{name.partition('/')[2]}"]
    assert service["spec"]["ipFamilyPolicy"] == "PreferDualStack"
    assert service["spec"]["ports"]
    budget = found[f"PodDisruptionBudget/{name.partition('/')[2]}"]["spec"]
    assert (budget["minAvailable"], "maxUnavailable" in budget) == ("80%", False)


def test_a_port_of_a_service_is_changed_by_its_number(tmp_path):
    overlays = {"service": {"spec": {"ports": [{"port": 8000, "nodePort": 30080}, {"name": "extra", "port": 9}]}}}
    ports = made(tmp_path, {"router": {"overlays": overlays}})["Service/fleet-lorafleet-router"]["spec"]["ports"]
    assert ports[0] == {"name": "http", "port": 8000, "targetPort": "http", "appProtocol": "http", "nodePort": 30080}
    assert ports[1] == {"name": "extra", "port": 9}


def test_a_routes_timeouts_may_be_left_out_and_its_rules_changed_by_position(tmp_path):
    route = {"enabled": True, "parentRefs": [{"name": "gateway"}]}
    overlays = {
        "httpRoute": {"spec": {"rules": {"0": {"timeouts": None, "filters": [{"type": "RequestMirror"}]}}}},
        "ingress": {"spec": {"rules": {"0": {"http": {"paths": {"0": {"pathType": "Exact"}}}}}}},
    }
    ingress = {"enabled": True, "hosts": ["llm.example.com"]}
    found = made(tmp_path, {"router": {"httpRoute": route, "ingress": ingress, "overlays": overlays}})
    (rule,) = found["HTTPRoute/fleet-lorafleet-router"]["spec"]["rules"]
    assert "timeouts" not in rule
    assert rule["filters"] == [{"type": "RequestMirror"}]
    assert rule["backendRefs"] == [{"name": "fleet-lorafleet-router", "port": 8000}]
    (rule,) = found["Ingress/fleet-lorafleet-router"]["spec"]["rules"]
    assert rule["http"]["paths"][0]["pathType"] == "Exact"
    assert rule["http"]["paths"][0]["path"] == "/"


def test_an_autoscaler_takes_behaviour_polling_fallback_and_further_triggers(tmp_path):
    cron = {
        "type": "cron",
        "name": "office",
        "metadata": {"timezone": "UTC", "start": "0 8 * * *", "end": "0 18 * * *"},
    }
    keda = {"enabled": True, "type": "keda"}
    overlays = {
        "autoscaler": {
            "spec": {
                "pollingInterval": 15,
                "fallback": {"failureThreshold": 3, "replicas": 4},
                "triggers": [cron, {"name": "queue-wait", "metadata": {"threshold": "5"}}],
                "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {"selectPolicy": "Min"}}}},
            }
        }
    }
    values = {
        "pools": [POOL | {"autoscaling": keda, "overlays": overlays}],
        "monitoring": {"prometheusUrl": "http://prometheus:9090"},
    }
    spec = made(tmp_path, values)["ScaledObject/fleet-lorafleet-p"]["spec"]
    assert (spec["pollingInterval"], spec["fallback"]["replicas"]) == (15, 4)
    assert [trigger["name"] for trigger in spec["triggers"]] == ["queue-wait", "slots-wanted", "office"]
    assert spec["triggers"][0]["metadata"]["threshold"] == "5"
    assert "max(lorafleet_pool_queue_wait_seconds" in spec["triggers"][0]["metadata"]["query"]
    behaviour = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert (behaviour["selectPolicy"], behaviour["stabilizationWindowSeconds"]) == ("Min", 900)


def test_an_account_may_have_secrets_and_labels(tmp_path):
    overlays = {"serviceAccount": {"imagePullSecrets": [{"name": "r"}], "metadata": {"annotations": {"a": "b"}}}}
    for part, name in (("router", "router"), ("orchestrator", "orchestrator"), ("poolDefaults", "worker")):
        found = made(tmp_path, values_with(part, overlays))[f"ServiceAccount/fleet-lorafleet-{name}"]
        assert found["imagePullSecrets"] == [{"name": "r"}]
        assert found["metadata"]["annotations"] == {"a": "b"}


def test_extra_objects_are_part_of_the_release_and_a_text_may_name_it(tmp_path):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": {"pods": "9"}}}
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-extra\n"
    found = made(tmp_path, {"extraObjects": [quota, text]})
    assert found["ResourceQuota/q"] == quota
    assert found[f"ConfigMap/{RELEASE}-extra"]["metadata"] == {"name": f"{RELEASE}-extra"}
    assert NAMESPACE not in str(found["ResourceQuota/q"])


_NAMES = st.sampled_from("abc")
_SCALARS = st.none() | st.integers(-5, 5) | st.sampled_from(["x", "1", "on", ""]) | st.booleans()
_FIELDS = {"value": _SCALARS, "more": st.dictionaries(_NAMES, _SCALARS)}
_LISTS = {
    "env": st.lists(
        st.fixed_dictionaries({"name": _NAMES}, optional=_FIELDS), max_size=3, unique_by=lambda entry: entry["name"]
    ),
    "command": st.lists(_NAMES, max_size=2),
}  # fmt: skip
_MAPS = st.recursive(
    st.dictionaries(_NAMES, _SCALARS, max_size=3),
    lambda below: st.fixed_dictionaries({}, optional={"a": below, "b": _SCALARS, "c": below | _SCALARS} | _LISTS),
    max_leaves=8,
)
_PATCHED = '{{ range .Values.pairs }}{{ include "lorafleet.patch" (dict "into" .into "from" .from) }}{{ end }}'


@pytest.fixture(scope="module")
def patching_chart(tmp_path_factory) -> Path:
    """A chart of the rule alone, which patches pairs of objects."""
    folder = tmp_path_factory.mktemp("patching")
    (folder / "templates").mkdir()
    (folder / "Chart.yaml").write_text("{apiVersion: v2, name: patching, version: 0.0.1}")
    (folder / "templates" / "_overlays.tpl").write_text((CHART / "templates" / "_overlays.tpl").read_text())
    (folder / "templates" / "patched.yaml").write_text(f"{_PATCHED}\npairs: {{{{ toJson .Values.pairs }}}}\n")
    return folder


# Each example starts a program, so it has many pairs.
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(_MAPS, _MAPS), min_size=10, max_size=30))
def test_any_overlay_gives_what_a_strategic_merge_patch_gives(patching_chart, pairs):
    bases = [_without_nulls(base) for base, _ in pairs]
    values = {"pairs": [{"into": base, "from": overlay} for base, (_, overlay) in zip(bases, pairs, strict=True)]}
    path = patching_chart / "given.yaml"
    path.write_text(yaml.safe_dump(values))
    done = run(helm(), "template", str(patching_chart), "--values", str(path))
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)["pairs"]
    assert [pair["into"] for pair in found] == [
        strategic(base, overlay) for base, (_, overlay) in zip(bases, pairs, strict=True)
    ]


def _without_nulls(node: Manifest) -> Manifest:
    found = {key: _without_nulls(value) if isinstance(value, dict) else value for key, value in node.items()}
    return {key: value for key, value in found.items() if value is not None}
