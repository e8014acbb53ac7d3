"""The values that docs/gateway.md shows give a router with a port for gateways, and the gateway's objects beside it."""

import re

import yaml

from tests.helm.rendering import RELEASE
from tests.helm.test_overlays import POOL, made
from tests.test_docs import DOCS

ROUTER = f"{RELEASE}-lorafleet-router"


def shown_values():
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / "gateway.md").read_text(), re.DOTALL)
    (found,) = (block for block in blocks if "InferencePool" in block)
    return yaml.safe_load(found)


def test_values_that_the_page_shows_open_the_port_and_name_what_the_chart_makes(tmp_path):
    found = made(tmp_path, {"pools": [POOL], "networkPolicy": {"enabled": True}, **shown_values()})
    pool, route = found["InferencePool/fleet"]["spec"], found["HTTPRoute/fleet"]["spec"]
    service = {port["name"]: port for port in found[f"Service/{ROUTER}"]["spec"]["ports"]}
    picker = pool["endpointPickerRef"]
    assert (picker["name"], picker["port"]["number"]) == (ROUTER, service["ext-proc"]["port"])
    container = found[f"Deployment/{ROUTER}"]["spec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8000, "ext-proc": service["ext-proc"]["port"]}
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert env["LORAFLEET_ROUTER_EXT_PROC"] == "9002"
    open_ports = [each["port"] for each in found[f"NetworkPolicy/{ROUTER}"]["spec"]["ingress"][0]["ports"]]
    assert open_ports == [8000, 9002]
    worker = found["StatefulSet/fleet-lorafleet-p"]["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= worker["metadata"]["labels"].items()
    engine_ports = {port["containerPort"] for each in worker["spec"]["containers"] for port in each.get("ports", ())}
    assert pool["targetPorts"][0]["number"] in engine_ports
    named = {ref["name"] for rule in route["rules"] for ref in rule["backendRefs"]}
    assert named == {ROUTER, "fleet"}


def test_without_the_setting_there_is_no_such_port(tmp_path):
    found = made(tmp_path, {"pools": [POOL], "networkPolicy": {"enabled": True}})
    assert [port["name"] for port in found[f"Service/{ROUTER}"]["spec"]["ports"]] == ["http"]
    assert len(found[f"NetworkPolicy/{ROUTER}"]["spec"]["ingress"][0]["ports"]) == 1
