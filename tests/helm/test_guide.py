"""Commands and manifests of docs/kubernetes.md work."""

import base64
import os
import re
import subprocess

import kubernetes_validate
import pytest
import yaml

from docs.chart_schema import SERVICES
from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.key_files import hash_key
from lorafleet.service.settings import load
from orchestrator.configmaps.objects import parse_declared
from tests.helm.rendering import helm_template, manifests, of_kind
from tests.helm.test_monitoring import known
from tests.helm.test_settings import environment
from tests.kube.binaries import kubectl, run
from tests.patience import patience
from tests.test_docs import DOCS

GUIDE = (DOCS / "kubernetes.md").read_text()

ENGINE = {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "ports": [{"name": "http", "containerPort": 8000}]}
# A user's Deployment before the agent is added.
VLLM = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "vllm"},
    "spec": {
        "selector": {"matchLabels": {"app": "vllm"}},
        "template": {
            "metadata": {"labels": {"app": "vllm"}},
            "spec": {"containers": [ENGINE]},
        },
    },
}


def block(language: str, having: str) -> str:
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL) if having in text]
    assert len(found) == 1, f"{len(found)} blocks have {having!r}"
    return found[0]


@pytest.mark.parametrize("having", ["nvidia.com/gpu.product", "orchestrator: {enabled: false}", "schedulerName: kueue"])
def test_values_that_it_shows_are_values_of_the_chart(tmp_path, having):
    path = tmp_path / "values.yaml"
    path.write_text(block("yaml", having))
    worked, said = helm_template("--values", str(path))
    assert worked, said


def test_its_adapter_is_one_and_belongs_to_the_release_that_it_installs():
    shown = yaml.safe_load(block("yaml", "name: sql-expert-v1"))
    made = [item for item in of_kind("everything", "ConfigMap") if "adapter.yaml" in item["data"]]
    names = [parse_declared(item, "adapter").lora_id for item in (shown, *made)]
    assert names == ["sql-expert/v1", "sql-expert/v1", "legal/v2"]
    for item in (shown, *made):
        assert item["metadata"]["labels"]["lorafleet.io/kind"] == "adapter"
        assert item["metadata"]["labels"]["lorafleet.io/fleet"] == "fleet-lorafleet"


def test_its_script_makes_a_secret_with_the_keys_that_the_chart_reads_and_the_rights_that_it_gives(tmp_path):
    script = f'kubectl() {{ "{kubectl()}" "$@" --dry-run=client -o yaml; }}\n' + block("sh", "token() {")
    done = subprocess.run(
        ["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=patience(30),
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = {key: base64.b64decode(value).decode() for key, value in yaml.safe_load(done.stdout)["data"].items()}
    read = re.findall(
        r"key: ([a-z.-]+)\n", str(yaml.safe_dump([m for m in manifests("ipv6-hpa") if m["kind"] != "Secret"]))
    )
    assert set(read) - {"app"} <= made.keys()

    def scopes(service: str) -> dict[str, set[str]]:
        path = tmp_path / f"{service}.yaml"
        path.write_text(made[f"{service}-keys.yaml"])
        hashes, keys = {entry["sha256"] for entry in yaml.safe_load(path.read_text())["keys"]}, ApiKeys([path])
        roles = ("admin", "orchestrator", "orchestrator-agents", "router", "router-agents", "test", "worker")
        return {
            role: set(keys.caller(f"Bearer {made[role]}").scopes) for role in roles if hash_key(made[role]) in hashes
        }

    assert scopes("router") == {"admin": {"admin"}, "test": {"infer"}, "worker": {"worker"}}
    assert scopes("orchestrator") == {
        "admin": {"admin"},
        "orchestrator": {"load"},
        "router": {"load"},
        "worker": {"worker"},
    }
    assert scopes("worker") == {
        "orchestrator-agents": {"agent"},
        "router-agents": {"agent-load"},
        "worker": {"drain", "worker"},
    }


def test_its_patch_makes_a_worker_of_an_engines_pod(tmp_path, monkeypatch):
    for name, text in (("vllm.yaml", yaml.safe_dump(VLLM)), ("agent.yaml", block("yaml", "# agent.yaml"))):
        (tmp_path / name).write_text(text)
    words = ("patch", "--local", "-f", "vllm.yaml", "--patch-file", "agent.yaml", "-o", "yaml")
    done = run(kubectl(), *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    patched = yaml.safe_load(done.stdout)
    kubernetes_validate.validate(patched, "1.37.0", strict=True)
    spec = patched["spec"]["template"]["spec"]
    agent, engine = sorted(spec["containers"], key=lambda container: container["name"])
    assert engine["image"] == "vllm/vllm-openai:v0.32.0"
    seen = environment(agent)
    for name, value in seen.items():
        monkeypatch.setenv(name, value)
    settings = load(SERVICES["workers"], agent["command"][4:], prog="workers")
    paths = [mount["mountPath"] for mount in engine["volumeMounts"]]
    assert any(str(settings.cache_dir).startswith(path) for path in paths), "the engine reads what the agent fetched"
    assert spec["enableServiceLinks"] is False
    assert engine["lifecycle"]["preStop"]["sleep"]["seconds"] < spec["terminationGracePeriodSeconds"]

    service = yaml.safe_load(block("yaml", "name: vllm-workers"))
    kubernetes_validate.validate(service, "1.37.0", strict=True)
    labels = patched["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == {"agent": settings.port, "engine": 8000}
    assert service["metadata"]["labels"].items() >= {
        "app.kubernetes.io/instance": "fleet", "app.kubernetes.io/component": "worker",
    }.items()  # fmt: skip


def test_metrics_that_it_names_exist():
    named = set(re.findall(r"\b(lora(?:fleet)?_[a-z_]+[a-z])\b", GUIDE)) - {
        "lora_id",
        "lora_path",
        "lorafleet_pool_slots_wanted_share",
    }
    assert sorted(named - known().keys()) == []
