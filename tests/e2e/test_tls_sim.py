"""A fleet whose processes have certificates everywhere: a router, an orchestrator, two agents, two engines."""

import ssl
from pathlib import Path

import httpx
import pytest

from tests.e2e.fleets import SIM_FLAGS, RunningFleet, chat, running
from tests.e2e.scenarios import SQL, cli, fresh_prompt
from tests.patience import patience

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory):
    with running(tmp_path_factory.mktemp("tls") / "state", *SIM_FLAGS, "2", "--tls") as fleet:
        yield fleet


def client_of(fleet: RunningFleet, service: str = "") -> httpx.Client:
    """A client that trusts the fleet's authority; with the certificate of a service, where one is named."""
    folder: Path = fleet.state_dir / "tls"
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    if service:
        context.load_cert_chain(folder / f"{service}.pem", folder / f"{service}.key")
    return httpx.Client(verify=context, trust_env=False, timeout=patience(30))


def workers_of(fleet: RunningFleet) -> dict[str, dict[str, str]]:
    with client_of(fleet) as client:
        return {item["id"]: item for item in client.get(f"{fleet.orchestrator}/v1/workers").json()["data"]}


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_every_address_is_https_and_a_chat_reaches_its_adapter(fleet: RunningFleet) -> None:
    for worker in workers_of(fleet).values():
        assert worker["agent_url"].startswith("https://127.0.0.1:")
    with client_of(fleet) as client:
        body = chat(prompt=fresh_prompt(), model=SQL)
        answer = client.post(f"{fleet.router}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-lorafleet-adapter"].startswith(SQL)


def test_plain_http_gets_an_answer_that_says_https(fleet: RunningFleet) -> None:
    answer = httpx.get(fleet.router.replace("https:", "http:"), trust_env=False, timeout=patience(30))
    assert code_of(answer) == (400, "tls_required")


def test_a_client_that_does_not_know_the_authority_refuses_the_router(fleet: RunningFleet) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(fleet.router, trust_env=False, timeout=patience(30))


def test_an_agent_reports_for_its_own_worker_alone(fleet: RunningFleet) -> None:
    register = f"{fleet.orchestrator}/v1/workers/register"
    url = workers_of(fleet)["w0"]["agent_url"]
    with client_of(fleet) as nobody, client_of(fleet, "w0") as w0, client_of(fleet, "w1") as w1:
        files = {"disk_id": "x", "since": 0, "upto": 0}
        report = {"metadata": nobody.get(f"{url}/metadata").json(), "files": files}
        assert report["metadata"]["instance_id"] == "w0"
        assert code_of(nobody.post(register, json=report)) == (403, "certificate_needed")
        refused = w1.post(register, json=report)
        assert code_of(refused) == (403, "certificate_of_other_worker")
        assert "w1.worker.lorafleet.internal" in refused.json()["error"]["message"]
        assert w0.post(register, json=report).status_code == 200
        # Nor may it name another worker's address as its own.
        report["metadata"]["instance_id"] = "w1"
        unproved = w1.post(register, json=report)
        assert code_of(unproved) == (409, "worker_unproved")
        assert "does not name w1.worker.lorafleet.internal" in unproved.json()["error"]["message"]


def test_calls_at_an_agent_need_the_certificate_of_the_role_that_makes_them(fleet: RunningFleet) -> None:
    snapshot = f"{workers_of(fleet)['w0']['agent_url']}/v1/kv/snapshot"
    with client_of(fleet) as nobody, client_of(fleet, "w1") as worker, client_of(fleet, "router") as router:
        assert code_of(nobody.get(snapshot)) == (403, "certificate_needed")
        assert code_of(worker.get(snapshot)) == (403, "certificate_needed")
        assert router.get(snapshot).status_code == 200


def test_an_engine_answers_services_of_the_fleet_alone(fleet: RunningFleet) -> None:
    with client_of(fleet) as nobody, client_of(fleet, "router") as router:
        engine = nobody.get(f"{workers_of(fleet)['w0']['agent_url']}/metadata").json()["transport"]["engine_url"]
        assert engine.startswith("https://")
        assert router.get(f"{engine}/health").status_code == 200
        with pytest.raises(httpx.TransportError):
            nobody.get(f"{engine}/health")


def test_the_command_line_reaches_it_by_its_authority(fleet: RunningFleet) -> None:
    ca = str(fleet.state_dir / "tls" / "ca.pem")
    listed = cli(fleet, "--tls-ca", ca, "workers", "list")
    assert listed.returncode == 0, listed.stderr
    assert "w1" in listed.stdout
    refused = cli(fleet, "workers", "list")
    assert refused.returncode != 0
    assert "certificate" in refused.stderr.lower()
