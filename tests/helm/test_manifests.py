"""Every render is what an API server takes, and its parts speak of one another by the right names."""

import functools
import re

import jsonschema
import kubernetes_validate
import pytest

from tests.helm.kinds import KINDS
from tests.helm.rendering import (
    CHART,
    NAMESPACE,
    VALUES,
    containers,
    manifests,
    of_kind,
    pod_templates,
    rendered,
    secret,
)
from tests.kube.binaries import helm, kubectl, run

# It reads all definitions of a version, 1 MB, for each object.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
# Objects that values name and the render does not make.
BROUGHT = {
    "everything": {
        "Secret": {
            "registry",
            "more-keys",
            "hub",
            "object-store",
            "netrc",
            "llm-tls",
            "acme-hub",
            "old-engines",
            "eu-fleet",
        },
        "PersistentVolumeClaim": {"models", "adapters", "shared-cache"},
    },
    "ipv6-hpa": {"Secret": {"my-tokens"}},
    "attached": {"Secret": {"old-engines"}},
    "postgresql": {"Secret": {"fleet-db"}},
    "numbers": {
        "Secret": {"1", "registry.example.com", "2", "3", "tenants.eu", "4", "9", "11"},
        "PersistentVolumeClaim": {"14", "15"},
    },
}

cases = pytest.mark.parametrize("case", VALUES)


def walk(item, path=""):
    """Every (path, key, value) within."""
    if isinstance(item, dict):
        for key, value in item.items():
            yield path, key, value
            yield from walk(value, f"{path}.{key}")
    elif isinstance(item, list):
        for index, value in enumerate(item):
            yield from walk(value, f"{path}[{index}]")


def selects(selector: dict, labels: dict) -> bool:
    return bool(selector) and selector.items() <= labels.items()


@pytest.mark.parametrize("values", [[], ["values-cpu.yaml"], ["values-sim.yaml"]], ids=str)
def test_helm_has_nothing_to_say_about_the_chart(values):
    done = run(helm(), "lint", "--strict", str(CHART), *(w for name in values for w in ("--values", str(CHART / name))))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


# The newest takes every render, the oldest that Chart.yaml names those with every kind.
@pytest.mark.parametrize(
    ("case", "version"), [*((case, "1.37.0") for case in VALUES), ("everything", "1.29.0"), ("ipv6-hpa", "1.29.0")]
)
def test_a_kube_apiserver_of_either_end_takes_it(case, version):
    """Strict: what a kind does not have is an error, and a kind that is not known has to have a schema here."""
    problems = []
    for item in manifests(case):
        if schema := KINDS.get(item["kind"]):
            problems += [
                f"{item['kind']}: {error.message}"
                for error in jsonschema.Draft202012Validator(schema).iter_errors(item)
            ]
            continue
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as exc:
            problems.append(f"{item['kind']} {item['metadata']['name']}: {exc.message}")
    assert problems == []


@cases
def test_names_labels_and_quantities_are_what_kubernetes_takes(case):
    wrong = []
    for item in manifests(case):
        kind, name = item["kind"], item["metadata"]["name"]
        longest = 63 if kind in {"Service", "Pod"} else 52 if kind == "StatefulSet" else 253
        if not NAME.fullmatch(name) or len(name) > longest:
            wrong.append(f"{kind} {name}: name")
        for path, key, value in walk(item):
            if key in {"labels", "matchLabels"} and kind != "PrometheusRule":
                wrong += [f"{kind} {name}{path}: {k}={v}" for k, v in value.items()
                          if not LABEL_KEY.fullmatch(k) or not LABEL_VALUE.fullmatch(v)]  # fmt: skip
            if key in {"limits", "requests"}:
                wrong += [f"{kind} {name}{path}: {k}={v}" for k, v in value.items() if not QUANTITY.fullmatch(str(v))]
            if key in {"sizeLimit", "storage"} and not QUANTITY.fullmatch(str(value)):
                wrong.append(f"{kind} {name}{path}: {key}={value}")
    assert wrong == []


@cases
def test_kustomize_takes_it_as_flux_asks_it_to(case, tmp_path):
    """It refuses a key that is in a map twice, which helm and kubectl overlook."""
    (tmp_path / "chart.yaml").write_text(rendered(case))
    (tmp_path / "kustomization.yaml").write_text("resources: [chart.yaml]")
    done = run(kubectl(), "kustomize", str(tmp_path))
    assert done.returncode == 0, done.stderr


@cases
def test_no_object_is_there_twice_and_each_carries_the_releases_labels(case):
    items = [
        (item["kind"], item["metadata"].get("namespace", NAMESPACE), item["metadata"]["name"])
        for item in manifests(case)
    ]
    assert len(items) == len(set(items))
    for item in manifests(case):
        labels = item["metadata"]["labels"]
        assert {"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component"} <= labels.keys()


@cases
def test_ports_are_ports_and_their_names_lead_to_a_container(case):
    named: dict[str, set[str]] = {}
    for pod, template in pod_templates(case):
        for container in template["spec"]["containers"]:
            names = {port["name"] for port in container.get("ports", ())}
            named[pod] = named.get(pod, set()) | names
            assert all(len(name) <= 15 and re.search("[a-z]", name) for name in names)
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe in container:
                    assert container[probe]["httpGet"]["port"] in names, (pod, probe)
    for item in manifests(case):
        for path, key, value in walk(item):
            if key in {"port", "containerPort", "number"} and isinstance(value, int):
                assert 1 <= value <= 65535, (item["metadata"]["name"], path, value)
    for service in of_kind(case, "Service"):
        pods = [
            pod
            for pod, template in pod_templates(case)
            if selects(service["spec"]["selector"], template["metadata"]["labels"])
        ]
        assert pods, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert all(port["targetPort"] in named[pod] for pod in pods), (service["metadata"]["name"], port)


@cases
def test_selectors_select_the_pods_they_are_for_and_no_others(case):
    templates = dict(pod_templates(case))
    for item in of_kind(case, "Deployment", "StatefulSet"):
        selector, own = item["spec"]["selector"]["matchLabels"], f"{item['kind']}/{item['metadata']['name']}"
        assert [pod for pod, t in templates.items() if selects(selector, t["metadata"]["labels"])] == [own]
    for item in of_kind(case, "PodDisruptionBudget"):
        selector = item["spec"]["selector"]["matchLabels"]
        found = [pod for pod, t in templates.items() if selects(selector, t["metadata"]["labels"])]
        assert [pod.split("/")[1] for pod in found] == [item["metadata"]["name"]]
    for item in of_kind(case, "StatefulSet"):
        assert item["spec"]["serviceName"] in {service["metadata"]["name"] for service in of_kind(case, "Service")}


@cases
def test_monitors_find_services_and_pods_with_the_port_that_they_name(case):
    for item in of_kind(case, "ServiceMonitor"):
        selector = item["spec"]["selector"]["matchLabels"]
        found = [s for s in of_kind(case, "Service") if selects(selector, s["metadata"]["labels"])]
        assert len(found) == 1, item["metadata"]["name"]
        assert item["spec"]["endpoints"][0]["port"] in {port["name"] for port in found[0]["spec"]["ports"]}
    for item in of_kind(case, "PodMonitor"):
        selector = item["spec"]["selector"]["matchLabels"]
        found = [t for _, t in pod_templates(case) if selects(selector, t["metadata"]["labels"])]
        assert found or case == "found"  # its agents, if any, are in pods of somebody else's
        for template in found:
            ports = {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}
            assert item["spec"]["podMetricsEndpoints"][0]["port"] in ports


@cases
def test_whatever_is_scaled_exists_and_does_not_say_itself_how_many_it_is(case):
    for item in of_kind(case, "HorizontalPodAutoscaler", "ScaledObject"):
        target = item["spec"]["scaleTargetRef"]
        found = [w for w in of_kind(case, target["kind"]) if w["metadata"]["name"] == target["name"]]
        assert len(found) == 1, target
        assert "replicas" not in found[0]["spec"]


@cases
def test_every_object_that_is_referred_to_is_made_or_was_named_in_values(case):
    made = {
        kind: {item["metadata"]["name"] for item in of_kind(case, kind)}
        for kind in ("Secret", "ConfigMap", "ServiceAccount", "PersistentVolumeClaim", "Service", "Role")
    }
    made["Secret"] |= {item["spec"]["secretName"] for item in of_kind(case, "Certificate")}
    have = {kind: names | BROUGHT.get(case, {}).get(kind, set()) for kind, names in made.items()}
    missing = []
    for item in manifests(case):
        for path, key, value in walk(item):
            wanted = {
                "serviceAccountName": ("ServiceAccount", value),
                "secretName": ("Secret", value),
                "claimName": ("PersistentVolumeClaim", value),
            }.get(key)
            if key in {"secretKeyRef", "secretRef"}:
                wanted = ("Secret", value["name"])
            if key in {"configMapKeyRef", "configMapRef", "configMap"}:
                wanted = ("ConfigMap", value["name"])
            if key == "roleRef":
                wanted = ("Role", value["name"])
            if key == "imagePullSecrets":
                missing += [f"Secret {entry['name']}" for entry in value if entry["name"] not in have["Secret"]]
            if wanted and wanted[1] not in have[wanted[0]]:
                missing.append(f"{item['metadata']['name']}{path}: {wanted}")
        if item["kind"] in {"Ingress", "HTTPRoute"}:
            missing += [f"Service {value}" for path, key, value in walk(item)
                        if key == "name" and "backend" in path and value not in {*have["Service"], "http"}]  # fmt: skip
    assert missing == []


@cases
def test_the_key_of_a_secret_that_a_pod_reads_is_in_it(case):
    names = [item["metadata"]["name"] for item in of_kind(case, "Secret")]
    keys = {name: secret(case, name).keys() for name in names}
    for pod, template in pod_templates(case):
        for container in containers(template["spec"]):
            for entry in container.get("env", ()):
                reference = entry.get("valueFrom", {}).get("secretKeyRef")
                if reference and reference["name"] in keys:
                    assert reference["key"] in keys[reference["name"]], (pod, entry["name"])


@cases
def test_every_mount_has_its_volume_and_every_volume_is_mounted(case):
    for item in manifests(case):
        spec = item.get("spec", {}).get("template", {}).get("spec")
        if spec is None:
            continue
        mounted = {mount["name"] for container in containers(spec) for mount in container.get("volumeMounts", ())}
        claims = {claim["metadata"]["name"] for claim in item["spec"].get("volumeClaimTemplates", ())}
        volumes = [volume["name"] for volume in spec["volumes"]]
        assert len(volumes) == len(set(volumes))
        assert mounted == {*volumes, *claims}, item["metadata"]["name"]
        for container in containers(spec):
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(paths) == len(set(paths))


def test_the_pod_of_helm_test_runs_where_routers_may_run():
    (pod,) = (found for found in of_kind("everything", "Pod") if found["metadata"]["name"].endswith("-test"))
    (router,) = (
        found for found in of_kind("everything", "Deployment") if found["metadata"]["name"].endswith("-router")
    )
    of_router = router["spec"]["template"]["spec"]
    for name in ("nodeSelector", "tolerations", "imagePullSecrets"):
        assert pod["spec"][name] == of_router[name]


def test_adapters_are_mounted_read_only_from_a_claim():
    specs = [
        item["spec"]["template"]["spec"]
        for item in of_kind("everything", "StatefulSet", "Deployment")
        if any(volume["name"] == "adapters" for volume in item["spec"]["template"]["spec"]["volumes"])
    ]
    assert specs
    for spec in specs:
        (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "adapters")
        assert volume["persistentVolumeClaim"]["claimName"] == "adapters"
        (mount,) = (each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "adapters")
        assert (mount["mountPath"], mount["readOnly"]) == ("/adapters", True)


def test_orchestrators_are_a_deployment_with_a_service_at_port_8080():
    (deployment,) = (
        found for found in of_kind("defaults", "Deployment") if found["metadata"]["name"].endswith("-orchestrator")
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {"name": "http", "containerPort": 8080} in container["ports"]
    (service,) = (
        found for found in of_kind("defaults", "Service") if found["metadata"]["name"].endswith("-orchestrator")
    )
    (port,) = (each for each in service["spec"]["ports"] if each["name"] == "http")
    assert (port["port"], port["targetPort"]) == (8080, "http")


def test_workers_are_ready_by_a_route_of_their_own():
    (worker,) = of_kind("sim", "StatefulSet")
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "agent"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
