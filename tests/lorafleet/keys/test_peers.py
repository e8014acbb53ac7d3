"""What a certificate's names let a service do, beside keys and in their place."""

import pytest
from fastapi import Depends, FastAPI, Request
from starlette.testclient import TestClient

from lorafleet.keys.auth import ApiKeys, requires
from lorafleet.keys.key_edits import add_key
from lorafleet.keys.peers import PEER_HEADER, check_own_worker
from lorafleet.service.http import HttpError, install_error_handlers
from lorafleet.service.network.tls import PEER, PeerNames, role_name, worker_name

ORCHESTRATOR = PeerNames(frozenset({role_name("orchestrator")}))
ROUTER = PeerNames(frozenset({role_name("router")}))
W0 = PeerNames(frozenset({role_name("worker"), worker_name("w0")}))
STRANGER = PeerNames(frozenset({"client.example"}))


def code_of(answer):
    return answer.status_code, answer.json()["error"]["code"] if answer.is_error else ""


@pytest.fixture
def ask(tmp_path):
    """Ask an open or keyed service that needs certificates, as a peer."""
    file = tmp_path / "keys.yaml"
    keys = {scope: add_key(file, None, [scope]) for scope in ("worker", "agent-load", "admin")}

    def ask(scope, peer=None, *, key="", forwarded=None, is_keyed=True):
        checked = ApiKeys([file] if is_keyed else [], needs_certificates=True)
        app = FastAPI()
        install_error_handlers(app, HttpError)

        @app.get("/x", dependencies=[Depends(requires(checked, *scope.split()))])
        async def x(request: Request) -> str:
            return request.state.caller.name

        async def with_peer(scope_, receive, send):
            if scope_["type"] == "http" and peer is not None:
                scope_["state"] = {**scope_.get("state", {}), PEER: peer}
            await app(scope_, receive, send)

        headers = {"authorization": f"Bearer {keys[key]}"} if key else {}
        headers |= {} if forwarded is None else {PEER_HEADER: forwarded}
        return TestClient(with_peer).get("/x", headers=headers)

    return ask


@pytest.mark.parametrize(
    ("scope", "peer"),
    [("worker", W0), ("drain agent", W0), ("agent-load", ROUTER), ("load", ROUTER), ("agent", ORCHESTRATOR)],
)
def test_a_services_certificate_is_its_key(ask, scope, peer):
    assert ask(scope, peer).status_code == 200


@pytest.mark.parametrize(
    ("scope", "peer"),
    [("worker", ROUTER), ("agent-load", W0), ("agent", ROUTER), ("load", W0), ("operate", ORCHESTRATOR)],
)
def test_a_certificate_does_what_its_role_does_and_no_more(ask, scope, peer):
    assert code_of(ask(scope, peer)) == (403, "scope_missing")


@pytest.mark.parametrize("key", ["worker", "admin"])
@pytest.mark.parametrize("peer", [None, STRANGER, ROUTER])
def test_a_key_alone_makes_nobody_a_worker(ask, key, peer):
    refused = ask("worker", peer, key=key)
    assert code_of(refused) == (403, "certificate_needed")
    assert role_name("worker") in refused.json()["error"]["message"]


def test_an_open_service_needs_the_certificate_too(ask):
    assert code_of(ask("worker", is_keyed=False)) == (403, "certificate_needed")
    assert ask("worker", W0, is_keyed=False).status_code == 200
    assert ask("view", is_keyed=False).status_code == 200


def test_a_persons_key_needs_no_certificate(ask):
    assert ask("operate agent", key="admin").status_code == 200
    assert ask("view", key="admin").status_code == 200


def test_a_certificate_of_nobody_we_know_is_no_key(ask):
    assert code_of(ask("view", STRANGER)) == (401, "invalid_api_key")


def test_an_orchestrator_forwards_the_names_of_the_client_and_lends_none_of_its_own(ask):
    assert ask("worker", ORCHESTRATOR, forwarded=",".join(W0.names)).status_code == 200
    assert code_of(ask("view", ORCHESTRATOR, forwarded="")) == (401, "invalid_api_key")


def test_nobody_else_forwards_names(ask):
    for peer in (None, ROUTER, STRANGER):
        assert ask("worker", peer, forwarded=",".join(W0.names)).is_error


def test_a_worker_is_refused_in_the_name_of_another():
    check_own_worker("w0", W0)
    check_own_worker("w7", PeerNames(frozenset({worker_name("*")})))
    for peer in (W0, ROUTER, None):
        with pytest.raises(HttpError) as refused:
            check_own_worker("w1", peer)
        assert refused.value.code == "certificate_of_other_worker"
