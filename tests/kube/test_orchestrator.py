"""An orchestrator on Kubernetes as its users see it: kubectl on one side, REST and a worker on the other."""

import asyncio
import json

import pytest

from orchestrator.configmaps.objects import adapter_object_name
from tests.kube.stores import until
from tests.orchestrator.doubles import FakeAgent
from tests.orchestrator.test_processes import Process, beating  # noqa: F401  (the second is a fixture)

ADAPTER = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: sql-expert-v1
  labels:
    lorafleet.io/fleet: lorafleet
    lorafleet.io/kind: adapter
data:
  adapter.yaml: |
    lora_id: sql-expert/v1
    source: hf://acme/sql-expert
    policy:
      loading: eager
"""
ALIAS = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: sql-expert
  labels:
    lorafleet.io/fleet: lorafleet
    lorafleet.io/kind: alias
data:
  alias.yaml: |
    name: sql-expert
    targets:
      - lora_id: sql-expert/v1
"""


@pytest.fixture
async def worker(beating):  # noqa: F811
    agent = FakeAgent("w0", slots=8)
    await beating.add(agent)
    return agent


async def test_kubectl_apply_has_an_adapter_served_and_kubectl_delete_has_it_leave(tmp_path, kube, beating, worker):  # noqa: F811
    async def kubectl(*words, stdin=None):
        return await asyncio.to_thread(kube.kubectl, *words, stdin=stdin)

    process = Process(tmp_path, "one", lease="kubernetes", backend="configmaps", kubeconfig=kube.kubeconfig)
    await process.start()
    beating.url = process.url
    await kubectl("apply", "-f", "-", stdin=f"{ALIAS}---\n{ADAPTER}")
    await until(lambda: "sql-expert/v1" in worker.loaded)

    async def alias():
        return (await process.http.get("/v1/aliases/sql-expert")).status_code == 200

    await until(alias)
    answer = await process.http.post("/v1/adapters", json={"lora_id": "legal/v2", "source": "s3://b/legal"})
    assert answer.status_code == 201
    listed = json.loads(await kubectl("get", "configmaps", "-l", "lorafleet.io/kind=adapter", "-o", "json"))
    texts = {it["metadata"]["name"]: it["data"]["adapter.yaml"] for it in listed["items"]}
    assert texts.keys() == {"sql-expert-v1", adapter_object_name("legal/v2")}
    assert texts[adapter_object_name("legal/v2")] == "lora_id: legal/v2\nsource: s3://b/legal\n"

    await kubectl("apply", "-f", "-", stdin=ADAPTER.replace("hf://acme/sql-expert", "hf://acme/other"))

    async def told():
        return "cannot change to 'hf://acme/other'" in await kubectl("get", "events", "-o", "json")

    await until(told, within_s=20)
    assert "sql-expert/v1" in worker.loaded
    await kubectl("delete", "configmap", "sql-expert", "sql-expert-v1")
    await until(lambda: "sql-expert/v1" not in worker.loaded)

    async def gone():
        return (await process.http.get("/v1/adapters/sql-expert/v1")).status_code == 404

    await until(gone)
    backup = await process.http.get("/v1/backup")
    assert 'filename="lorafleet-backup.json"' in backup.headers["content-disposition"]
    await process.http.delete("/v1/adapters/legal/v2")
    await kubectl("apply", "--validate=false", "-f", "-", stdin=backup.text)  # our API server has no schema of a List

    async def is_back():
        return (await process.http.get("/v1/adapters/legal/v2")).status_code == 200

    await until(is_back)
    await process.stop()
