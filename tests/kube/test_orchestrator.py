"""An orchestrator on Kubernetes as its users see it: kubectl on one side, REST and a worker on the other."""

import asyncio
import json

import httpx
import pytest

from lorafleet.kube.client import connect
from orchestrator.app import build
from orchestrator.config import OrchestratorSettings
from orchestrator.configmaps.objects import adapter_object_name
from tests.kube.stores import give_back_lease
from tests.orchestrator.doubles import FakeAgent
from tests.orchestrator.test_processes import OrchestratorProcess, beating  # noqa: F401  (the second is a fixture)
from tests.patience import patience, until
from tests.serving import serving

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
async def client(kube):
    """The API server, with a Lease that may be taken at once. Whoever is built with it closes it."""
    client = await connect(kube.kubeconfig, environ={})
    await give_back_lease(client)
    yield client
    await client.close()


@pytest.fixture
async def worker(beating):  # noqa: F811
    agent = FakeAgent("w0", slots=8)
    await beating.add(agent)
    return agent


@pytest.mark.fleet
async def test_kubectl_apply_serves_an_adapter_and_kubectl_delete_removes_it(
    tmp_path,
    kube,
    client,
    beating,  # noqa: F811
    worker,
):
    async def kubectl(*words, stdin=None):
        return await asyncio.to_thread(kube.kubectl, *words, stdin=stdin)

    process = OrchestratorProcess(tmp_path, "one", lease="kubernetes", backend="configmaps", kubeconfig=kube.kubeconfig)
    await process.start()
    beating.url = process.url
    await kubectl("apply", "-f", "-", stdin=f"{ALIAS}---\n{ADAPTER}")
    await until(lambda: "sql-expert/v1" in worker.loaded)

    async def is_there():
        return (await process.http.get("/v1/aliases/sql-expert")).status_code == 200

    await until(is_there)
    answer = await process.http.post("/v1/adapters", json={"lora_id": "legal/v2", "source": "s3://b/legal"})
    assert answer.status_code == 201
    listed = json.loads(await kubectl("get", "configmaps", "-l", "lorafleet.io/kind=adapter", "-o", "json"))
    texts = {it["metadata"]["name"]: it["data"]["adapter.yaml"] for it in listed["items"]}
    assert texts.keys() == {"sql-expert-v1", adapter_object_name("legal/v2")}
    assert texts[adapter_object_name("legal/v2")] == "lora_id: legal/v2\nsource: s3://b/legal\n"

    await kubectl("apply", "-f", "-", stdin=ADAPTER.replace("hf://acme/sql-expert", "hf://acme/other"))

    async def told():
        found = await client.get(f"/api/v1/namespaces/{kube.namespace}/events")
        return any("cannot change to 'hf://acme/other'" in event["message"] for event in found["items"])

    await until(told, within_s=20)
    assert "sql-expert/v1" in worker.loaded

    # The alias goes to another version, which is placed first; its text is what was asked for, and stays as it is.
    second = ADAPTER.replace("sql-expert-v1", "sql-expert-v2").replace("sql-expert/v1", "sql-expert/v2")
    shifted = ALIAS.replace("sql-expert/v1", "sql-expert/v2 # the new one")
    await kubectl("apply", "-f", "-", stdin=f"{shifted}---\n{second}")

    async def has_shifted():
        answer = (await process.http.get("/v1/aliases/sql-expert")).json()
        return [target["lora_id"] for target in answer["status"]["targets"]] == ["sql-expert/v2"]

    await until(has_shifted)
    assert "sql-expert/v2" in worker.loaded
    alias = json.loads(await kubectl("get", "configmap", "sql-expert", "-o", "json"))
    assert "# the new one" in alias["data"]["alias.yaml"]
    assert alias["metadata"]["annotations"]["lorafleet.io/status"] == "accepted"
    await kubectl("delete", "configmap", "sql-expert", "sql-expert-v1", "sql-expert-v2")
    await until(lambda: "sql-expert/v1" not in worker.loaded)

    async def gone():
        return (await process.http.get("/v1/adapters/sql-expert/v1")).status_code == 404

    await until(gone)
    backup = await process.http.get("/v1/backup")
    assert 'filename="lorafleet-backup.json"' in backup.headers["content-disposition"]
    await process.http.delete("/v1/adapters/legal/v2")
    await kubectl("apply", "-f", "-", stdin=backup.text)

    async def is_back():
        return (await process.http.get("/v1/adapters/legal/v2")).status_code == 200

    await until(is_back)
    await process.stop()


async def test_no_action_starts_before_its_change_is_durable(tmp_path, kube, client, beating, worker):  # noqa: F811
    settings = OrchestratorSettings(
        store=tmp_path / "s.db",
        lease="kubernetes",
        backend="configmaps",
        settle_s=0,
        lease_duration_s=patience(60),  # it lasts while the API server refuses everything
        lease_renew_s=0.2,
    )
    built = build(settings, kube=client)
    async with serving(built.app) as url, httpx.AsyncClient(base_url=url, timeout=patience(30)) as http:
        beating.url = url
        await until(lambda: built.leadership.is_leading and built.store.is_caught_up)
        await until(lambda: built.reconciler.reports.workers)
        server = kube.ours
        kube.faults.refuse(503, retry_after_s=0)
        before = server.count("", "/configmaps")
        body = {"lora_id": "sql/v1", "source": "file:///sql", "policy": {"loading": "eager"}}
        registering = asyncio.create_task(http.post("/v1/adapters", json=body))
        await until(lambda: server.count("", "/configmaps") >= before + 4)
        assert not registering.done()
        assert built.reconciler.queries.last_pass.desired.inspections
        assert worker.calls == []
        kube.faults.refuse(None)
        assert (await registering).status_code == 201
        await until(lambda: "sql/v1" in worker.loaded)


async def test_an_orchestrator_started_without_an_api_server_leads_once_it_is_back(tmp_path, kube, client):
    settings = OrchestratorSettings(
        store=tmp_path / "s.db",
        lease="kubernetes",
        backend="configmaps",
        settle_s=0,
        lease_duration_s=patience(1),
        lease_renew_s=0.2,
        lease_margin_s=0.2,
    )
    await kube.faults.go_down()
    built = build(settings, kube=client)
    async with serving(built.app) as url, httpx.AsyncClient(base_url=url, timeout=patience(30)) as http:

        async def refusal(path):
            answer = await http.get(path)
            return answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["message"]

        assert (await http.get("/health")).status_code == 200
        assert await refusal("/ready") == (503, "starting", "started, the store has not been read yet")
        assert (await refusal("/v1/adapters"))[:2] == (503, "starting")
        await kube.faults.come_back()
        await until(lambda: built.leadership.is_leading)
        assert (await http.get("/v1/adapters")).json()["data"] == []

        async def is_ready():
            return (await http.get("/ready")).status_code == 200

        await until(is_ready)


@pytest.mark.parametrize(
    ("code", "reason", "status"),
    [
        ("base_model_mismatch", "BaseModelMismatch", "failed: base_model_mismatch: "),
        ("rank_too_big", "RankTooBig", "failed: rank_too_big: rank 512 is above every worker's max_lora_rank"),
    ],
)
async def test_a_failed_adapter_is_shown_in_its_objects_status(
    tmp_path,
    kube,
    beating,  # noqa: F811
    manifests,
    code,
    reason,
    status,
):
    lease = {"lease_duration_s": 3, "lease_renew_s": 0.2}
    settings = OrchestratorSettings(
        store=tmp_path / "s.db", lease="kubernetes", backend="configmaps", settle_s=0, pass_interval_s=0.2, **lease
    )
    agent, source = FakeAgent("w0", slots=8), "file:///bad"
    if code == "rank_too_big":
        agent.ranks[source] = 512
    else:
        agent.refuse["bad/v1"] = code
    built = build(settings, kube=await connect(kube.kubeconfig, environ={}))
    async with (
        serving(built.app) as url,
        httpx.AsyncClient(base_url=url, timeout=patience(10)) as http,
    ):
        await until(lambda: built.leadership.is_leading and built.store.is_caught_up)
        beating.url = url
        await beating.add(agent)
        await manifests.apply("my-bad", {"lora_id": "bad/v1", "source": source, "policy": {"loading": "eager"}})
        await manifests.said("my-bad", status)
        event = await manifests.event("my-bad", reason)
        assert status.removeprefix("failed: ") in event["message"]
        built.reconciler.run_pass()
        assert len(await manifests.events("my-bad")) == 1
        agent.refuse.clear()
        if code != "rank_too_big":
            assert (await http.post("/v1/adapters/bad/v1/retry")).status_code == 200
            await manifests.said("my-bad", "accepted, and verified")
