"""Certificates in the chart: what is asked of cert-manager, and who mounts, checks and speaks what."""

import pytest

from lorafleet.service.network.tls import PeerNames, role_name
from tests.helm.rendering import helm_template, of_kind, one, pod_templates, rendered

FILES = {"TLS_CERT": "tls.crt", "TLS_KEY": "tls.key", "TLS_CA": "ca.crt"}
SECRETS = {
    "Deployment/fleet-lorafleet-router": "fleet-lorafleet-tls-router",
    "Deployment/fleet-lorafleet-orchestrator": "fleet-lorafleet-tls-orchestrator",
    "StatefulSet/fleet-lorafleet-sim": "workers-own",
    "StatefulSet/fleet-lorafleet-sgl": "workers-own",
}


def services() -> dict[str, dict]:
    return {name: template["spec"] for name, template in pod_templates("tls") if name in SECRETS}


def environment(spec: dict) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in spec["containers"][0]["env"]}


@pytest.mark.parametrize("role", ["router", "orchestrator", "worker"])
def test_a_certificate_has_the_names_by_which_the_services_know_the_role(role):
    spec = one("tls", "Certificate", f"fleet-lorafleet-tls-{role}")["spec"]
    assert PeerNames(frozenset(spec["dnsNames"])).has_role(role)
    assert PeerNames(frozenset(spec["dnsNames"])).is_worker("fleet-lorafleet-sim-x") == (role == "worker")
    assert spec["issuerRef"] == {"name": "fleet-ca", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    if role != "worker":  # what other services, and clients, dial
        assert {f"fleet-lorafleet-{role}", f"fleet-lorafleet-{role}.ml.svc"} <= set(spec["dnsNames"])
    assert ("llm.example.com" in spec["dnsNames"]) == (role == "router")


def test_each_service_mounts_its_own_secret_whole_and_names_the_files_in_it():
    assert services().keys() == SECRETS.keys()
    for name, spec in services().items():
        (volume,) = (item for item in spec["volumes"] if item["name"] == "tls")
        assert volume["secret"] == {"secretName": SECRETS[name], "defaultMode": 0o440}
        (mount,) = (item for item in spec["containers"][0]["volumeMounts"] if item["name"] == "tls")
        assert "subPath" not in mount  # its files would never change
        given = environment(spec)
        for setting, file in FILES.items():
            (found,) = (value for key, value in given.items() if key.endswith(f"_{setting}"))
            assert found == f"{mount['mountPath']}/{file}"


def test_every_probe_and_every_address_is_https_but_that_of_an_engine_without_certificate():
    for name, spec in services().items():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert spec["containers"][0][probe]["httpGet"]["scheme"] == "HTTPS"
        plain = {key for key, value in environment(spec).items() if value.startswith("http://")}
        assert plain == ({"LORAFLEET_WORKERS_ENGINE_ADVERTISE_URL"} if name.endswith("-sgl") else set())


def test_the_ports_of_each_service_say_what_they_speak():
    found = {
        (item["metadata"]["name"], port["name"]): port["appProtocol"]
        for item in of_kind("tls", "Service") for port in item["spec"]["ports"]
    }  # fmt: skip
    assert found.pop(("fleet-lorafleet-sgl", "engine")) == "http"
    assert set(found.values()) == {"https"}


def test_a_monitor_checks_the_role_of_what_it_scrapes():
    monitors = of_kind("tls", "ServiceMonitor", "PodMonitor")
    assert len(monitors) == 3
    for item in monitors:
        (endpoint,) = item["spec"].get("endpoints") or item["spec"]["podMetricsEndpoints"]
        role = item["metadata"]["name"].rpartition("-")[2]
        assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == ("https", role_name(role))


def test_the_helm_test_trusts_the_routers_authority():
    (pod,) = of_kind("tls", "Pod")
    given = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
    assert given["ROUTER_URL"].startswith("https://fleet-lorafleet-router:")
    assert given["ROUTER_CA"] == "/etc/lorafleet/tls/ca.crt"


def test_without_tls_nothing_of_it_is_in_the_manifests():
    for case in ("defaults", "cpu", "everything"):
        assert "/etc/lorafleet/tls" not in rendered(case)
        assert "lorafleet.internal" not in rendered(case)


def test_own_secrets_need_no_issuer():
    worked, output = helm_template("--set", "tls.enabled=true")
    assert worked, output
    assert "kind: Certificate" not in output
    assert 'secretName: "fleet-lorafleet-tls-router"' in output
