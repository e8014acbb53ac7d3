"""A fleet with a key file: no service answers without a key, beyond its scope, or about other tenants."""

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from lorafleet.cli.keys import add_key
from tests.e2e.fleets import SIM_FLAGS, RunningFleet, chat, running, until
from tests.e2e.scenarios import SQL, cli, fresh_prompt, text
from tests.patience import patience

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningFleet, dict[str, str]]]:
    """A fleet with a key file, and its keys by name. sql-expert/v1 is acme's alone."""
    folder = tmp_path_factory.mktemp("guarded")
    path = folder / "keys.yaml"
    keys = {
        "acme": add_key(path, "acme", ["infer"]),
        "other": add_key(path, "other", ["infer"]),
        "admin": add_key(path, None, ["admin"]),
    }
    with running(folder / "state", *SIM_FLAGS, "1", "--key-file", str(path), token=keys["admin"]) as fleet:
        spec = {"tenants": ["acme"]}
        changed = fleet.http("PATCH", f"{fleet.orchestrator}/v1/adapters/{SQL}", json=spec)
        assert changed.status_code == 200, changed.text
        other = _as(fleet, keys["other"])
        until(lambda: SQL not in _models(other), within_s=10, what="the router knows whose it is")
        yield fleet, keys


def test_without_a_key_every_service_answers_401(guarded: tuple[RunningFleet, dict[str, str]]) -> None:
    nobody = _as(guarded[0], "")
    for url in (f"{nobody.router}/v1/models", f"{nobody.orchestrator}/v1/adapters"):
        answer = nobody.http("GET", url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    answer = _as(guarded[0], "lf-wrong").ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    said = cli(nobody, "adapters", "list")
    assert said.returncode == 1
    assert "LORAFLEET_TOKEN" in said.stderr


def test_no_service_reads_an_unauthorised_body(guarded: tuple[RunningFleet, dict[str, str]]) -> None:
    fleet, keys = guarded
    agent = fleet.http("GET", f"{fleet.orchestrator}/v1/workers").json()["data"][0]["agent_url"]
    for url in (
        f"{fleet.router}/v1/decisions/replay",
        f"{fleet.orchestrator}/v1/adapters:batch",
        f"{agent}/v1/admin/load_lora",
    ):
        assert _status_before_the_body(url, "lf-wrong") == 401, url
        assert _status_before_the_body(url, keys["acme"]) == 403, url


def _status_before_the_body(url: str, key: str) -> int:
    """The answer to a request's head without its body."""
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {key}\r\n"
    with socket.create_connection((str(parts.hostname), parts.port or 80), timeout=patience(10)) as client:
        client.sendall(f"{head}content-type: application/json\r\ncontent-length: 1000000\r\n\r\n".encode())
        return int(client.recv(64).split()[1])


def test_a_key_without_the_scope_is_refused(guarded: tuple[RunningFleet, dict[str, str]]) -> None:
    fleet, keys = guarded
    acme = _as(fleet, keys["acme"])
    spec = {"lora_id": "mine/v1", "source": "file:///mine"}
    assert acme.http("POST", f"{acme.orchestrator}/v1/adapters", json=spec).status_code == 403
    assert acme.http("POST", f"{acme.router}/v1/route", json=chat()).status_code == 403
    assert cli(fleet, "workers", "list", token=keys["admin"]).returncode == 0


def test_a_tenants_adapter_is_not_there_for_another(guarded: tuple[RunningFleet, dict[str, str]]) -> None:
    fleet, keys = guarded
    acme, other = _as(fleet, keys["acme"]), _as(fleet, keys["other"])
    assert text(acme.ask(prompt=fresh_prompt(), lora_id=SQL))
    assert SQL in _models(acme)
    assert SQL not in _models(other)
    refused = other.ask(prompt=fresh_prompt(), lora_id=SQL)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    # The same message as for an unknown name, so that other tenants learn nothing.
    absent = other.ask(prompt=fresh_prompt(), lora_id="sql-expert/v9")
    assert json.dumps(refused.json()).replace(SQL, "") == json.dumps(absent.json()).replace("sql-expert/v9", "")


def _models(fleet: RunningFleet) -> set[str]:
    return {item["id"] for item in fleet.get(f"{fleet.router}/v1/models")["data"]}


def _as(fleet: RunningFleet, key: str) -> RunningFleet:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return RunningFleet(
        fleet.process, fleet.tag, fleet.state_dir, fleet.errors, fleet.router, fleet.orchestrator, headers=headers
    )
