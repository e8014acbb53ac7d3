"""The chart sets a pod's environment as the pod's service reads it."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml

from docs.chart_schema import DEFAULTS, GIVEN, SCHEMA, SERVICES, defaults_by_path, schema_with_settings
from lorafleet.service.settings import load
from tests.helm.rendering import VALUES, containers, helm_template, one, pod_templates
from tests.patience import patience

# Set by the kubelet.
FIELDS = {
    "metadata.name": "fleet-lorafleet-0",
    "metadata.namespace": "ml",
    "status.podIP": "10.1.2.3",
    "spec.nodeName": "node-1",
    "metadata.labels['topology.kubernetes.io/zone']": "zone-a",
}

cases = pytest.mark.parametrize("case", VALUES)


def environment(container: dict) -> dict[str, str]:
    """As the process sees it: references to earlier variables are put in, as Kubernetes does."""
    seen: dict[str, str] = {}
    listens_on = {entry.get("value") for entry in container.get("env", ())}
    fields = FIELDS | ({"status.podIP": "fd00::3"} if "::" in listens_on else {})
    for entry in container.get("env", ()):
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            value = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            value = "lf-token"
        else:
            value = re.sub(r"\$\((\w+)\)", lambda match: seen[match[1]], entry["value"])
        assert entry["name"] not in seen, f"{entry['name']} is there twice"
        seen[entry["name"]] = value
    return seen


def mounted(spec: dict, container: dict) -> dict[str, tuple[str, str]]:
    """path -> (Secret, key) of the files that the container has of Secrets, where the keys are listed."""
    sources = {volume["name"]: volume.get("secret", {}) for volume in spec["volumes"]}
    return {
        f"{mount['mountPath']}/{item['path']}": (sources[mount["name"]]["secretName"], item["key"])
        for mount in container["volumeMounts"]
        for item in sources.get(mount["name"], {}).get("items", ())
    }


def service_of(container: dict) -> str | None:
    command = container["command"]
    return command[3] if command[:3] == ["python3", "-P", "-m"] and command[3] in SERVICES else None


@cases
def test_every_variable_is_a_setting_of_its_service_and_all_of_them_together_are_valid(case, monkeypatch):
    for name in [name for name in os.environ if name.startswith("LORAFLEET_")]:
        monkeypatch.delenv(name)
    for pod, template in pod_templates(case):
        for container in template["spec"]["containers"]:
            service = service_of(container)
            if service is None:
                continue
            seen = environment(container)
            prefix = f"LORAFLEET_{service.upper()}_"
            assert all(name.startswith(prefix) for name in seen if name.startswith("LORAFLEET_")), pod
            with monkeypatch.context() as patched:
                for name, value in seen.items():
                    patched.setenv(name, value)
                settings = load(SERVICES[service], container["command"][4:], prog=service)
            assert settings.host in {"0.0.0.0", "::"}
            assert settings.key_files
            others = (getattr(settings, name, None) for name in ("agent_token_file", "peer_token_file"))
            files = [settings.token_file, *others]
            assert {str(file) for file in files if file} <= mounted(template["spec"], container).keys()
            assert settings.port in {port["containerPort"] for port in container["ports"]}


@pytest.mark.parametrize("case", ["attached", "found"])
def test_a_router_without_an_orchestrator_looks_for_none(case, monkeypatch):
    template = dict(pod_templates(case))["Deployment/fleet-lorafleet-router"]
    for name, value in environment(template["spec"]["containers"][0]).items():
        monkeypatch.setenv(name, value)
    assert load(SERVICES["router"], [], prog="router").orchestrator_url == ""


def test_numbers_are_not_rounded_and_lists_and_tables_arrive(monkeypatch):
    template = dict(pod_templates("everything"))["Deployment/fleet-lorafleet-router"]
    seen = environment(template["spec"]["containers"][0])
    assert seen["LORAFLEET_ROUTER_MAX_BODIES_BYTES"] == "2147483648"
    assert seen["LORAFLEET_ROUTER_COSTS"] == '{"kappa_min":2}'
    assert seen["LORAFLEET_ROUTER_SHADOW_POLICIES"] == '["least_loaded"]'
    assert seen["LORAFLEET_ROUTER_KUBE_NAMESPACES"] == '["ml","ml-batch"]'


def test_the_schema_knows_the_settings_of_the_code():
    assert SCHEMA.read_text() == schema_with_settings(), "run: python docs/generate.py"


def test_the_chart_has_the_defaults_of_values_yaml_beside_it():
    assert DEFAULTS.read_text() == defaults_by_path(), "run: python docs/generate.py"


@pytest.mark.parametrize("service", SERVICES)
def test_what_values_may_not_name_as_a_setting_the_chart_gives_itself_or_nobody_may(service):
    prefix = f"LORAFLEET_{service.upper()}_"
    given = set()
    for case in VALUES:
        for _, template in pod_templates(case):
            for container in containers(template["spec"]):
                given |= {entry["name"].removeprefix(prefix).lower() for entry in container.get("env", ())
                          if entry["name"].startswith(prefix)}  # fmt: skip
    nobodys = {
        "config",
        "port_file",
        "allow_open",
        "kubeconfig",
        "store",
        "record",
        "kube_namespace",
        "engine_url",
        "token",
        "agent_token",
    }
    known = SERVICES[service].model_fields.keys()
    assert sorted((GIVEN[service] & known) - given - nobodys) == []


@cases
def test_commands_are_modules_that_exist(case):
    for pod, template in pod_templates(case):
        for container in containers(template["spec"]):
            commands = [container["command"]]
            if hook := container.get("lifecycle", {}).get("preStop"):
                commands.append(hook["exec"]["command"])
            for command in commands:
                assert command[0] == "python3", pod
                assert command[1] == "-c" or (command[1:3] == ["-P", "-m"] and find_spec(command[3])), command


def test_the_hook_before_a_workers_stop_understands_its_flags():
    template = dict(pod_templates("cpu"))["StatefulSet/fleet-lorafleet-tiny"]
    command = template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    done = subprocess.run(
        [sys.executable, *command[1:]], env={**os.environ, "LORAFLEET_WORKERS_PORT": "9"},
        capture_output=True, text=True, check=False, timeout=patience(30),
    )  # fmt: skip
    assert done.returncode == 0
    assert "Connection refused" in done.stderr


@cases
def test_a_pod_is_given_longer_to_end_than_it_takes(case, monkeypatch):
    for pod, template in pod_templates(case):
        container = template["spec"]["containers"][0]
        service, seen = service_of(container), environment(container)
        grace_s = template["spec"].get("terminationGracePeriodSeconds", 30)
        if service == "router":
            takes_s = float(seen["LORAFLEET_ROUTER_DRAIN_S"]) + float(seen["LORAFLEET_ROUTER_GRACE_S"]) + 10
        elif service == "orchestrator":
            takes_s = float(seen["LORAFLEET_ORCHESTRATOR_STOP_GRACE_S"]) + 5
        elif service == "workers":
            hook = container["lifecycle"]["preStop"]["exec"]["command"]
            # workers/agent/supervisor.py gives the engine 10 s more before it kills it.
            takes_s = (
                float(hook[hook.index("--deadline-s") + 1])
                + float(seen["LORAFLEET_WORKERS_STOP_GRACE_S"])
                + float(seen["LORAFLEET_WORKERS_ENGINE_SHUTDOWN_S"])
                + 10
            )
        else:
            continue
        assert grace_s > takes_s, pod


def test_a_deployment_of_workers_has_not_failed_while_its_model_loads():
    deployment = one("everything", "Deployment", "fleet-lorafleet-h100-r128")
    seen = environment(deployment["spec"]["template"]["spec"]["containers"][0])
    assert deployment["spec"]["progressDeadlineSeconds"] > float(seen["LORAFLEET_WORKERS_START_DEADLINE_S"])


def test_adapters_may_fill_half_of_a_workers_volume(tmp_path):
    halves = {
        "100Gi": 50 << 30,
        "1.5Ti": 768 << 30,
        "1Gi": 1 << 29,
        "10G": 5 * 10**9,
        "2Pi": 1 << 50,
        107374182400: 50 << 30,
        "107374182400": 50 << 30,
    }
    pools = [{"name": f"p{n}", "model": "org/m", "cache": {"size": size}} for n, size in enumerate(halves)]
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({"pools": pools}))
    worked, said = helm_template("--values", str(path), "--show-only", "templates/worker/pools.yaml")
    assert worked, said
    made = [item for item in yaml.safe_load_all(said) if item["kind"] == "StatefulSet"]
    found = {item["metadata"]["name"]: environment(item["spec"]["template"]["spec"]["containers"][0]) for item in made}
    for number, (size, half) in enumerate(halves.items()):
        seen = found[f"fleet-lorafleet-p{number}"]
        assert seen["LORAFLEET_WORKERS_MAX_DISK_BYTES"] == str(half), size


@pytest.mark.parametrize(("case", "source"), [("defaults", "emptyDir"), ("numbers", "persistentVolumeClaim")])
def test_past_traffic_is_in_a_volume_that_outlives_the_container(case, source, monkeypatch):
    deployment = one(case, "Deployment", "fleet-lorafleet-orchestrator")["spec"]
    spec = deployment["template"]["spec"]
    (container,) = spec["containers"]
    for name, value in environment(container).items():
        monkeypatch.setenv(name, value)
    path = load(SERVICES["orchestrator"], [], prog="orchestrator").traffic_path
    (volume,) = [each["name"] for each in container["volumeMounts"] if each["mountPath"] == str(path.parent)]
    (found,) = [each for each in spec["volumes"] if each["name"] == volume]
    assert source in found
    # Two pods never have one file.
    assert (deployment["strategy"].get("type") == "Recreate") is (source == "persistentVolumeClaim")


def test_orchestrators_on_postgresql_have_the_address_from_its_secret_and_no_other_store(monkeypatch):
    deployment = one("postgresql", "Deployment", "fleet-lorafleet-orchestrator")["spec"]
    spec = deployment["template"]["spec"]
    (container,) = spec["containers"]
    for name, value in environment(container).items():
        monkeypatch.setenv(name, value)
    settings = load(SERVICES["orchestrator"], [], prog="orchestrator")
    assert (deployment["replicas"], settings.has_database, settings.lease) == (3, True, "store")
    assert settings.store_file.name == "uri"
    (volume,) = [
        each["name"] for each in container["volumeMounts"] if each["mountPath"] == str(settings.store_file.parent)
    ]
    (secret,) = [each["secret"] for each in spec["volumes"] if each["name"] == volume]
    assert secret["secretName"] == "fleet-db"


def test_a_place_for_past_traffic_that_values_name_is_the_one():
    worked, text = helm_template("--set", "orchestrator.settings.traffic=/tmp/t.db")
    assert worked
    assert text.count("LORAFLEET_ORCHESTRATOR_TRAFFIC\n") == 1
