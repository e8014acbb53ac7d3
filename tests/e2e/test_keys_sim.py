"""A fleet with a key file: no service answers without a key, beyond its scope, or about other tenants."""

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from lorafleet.keys.key_edits import add_key
from tests.e2e.fleets import SIM_FLAGS, RunningFleet, chat, running, until
from tests.e2e.scenarios import SQL, cli, fresh_prompt, text
from tests.patience import patience
from workers.wire import WORKER_PROOF_PATH

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
        "trainer": add_key(path, "acme", ["infer", "register"]),
        "pipeline": add_key(path, None, ["register"]),
        "agents": add_key(path, None, ["worker", "drain"]),
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


class _FakeWorker:
    """A worker of a trainer's own: listens on loopback, keeps all that it receives, and answers what routers ask.

    A request for a proof is passed on to a real agent, as the best that a liar can do.
    """

    def __init__(self, report: dict[str, Any]) -> None:
        self.seen: list[tuple[str, str | None, str]] = []
        self.real = report["agent_url"]
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                fake.seen.append((self.path, self.headers.get("authorization"), body.decode()))
                said = json.dumps(fake.report).encode()
                if self.path == WORKER_PROOF_PATH:
                    said = httpx.post(f"{fake.real}{self.path}", content=body, timeout=patience(10)).content
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            do_GET = do_POST = answer  # noqa: N815  (the names that the library calls)

            def log_message(self, *_args: object) -> None:
                """Say nothing on standard error."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        own = {"instance_id": "evil", "agent_url": self.url, "agent_boot_id": "evil", "engine_boot_id": "evil"}
        self.report = report | own | {"transport": report["transport"] | {"engine_url": self.url}}

    def heartbeat(self, fleet: RunningFleet, **changed: str) -> tuple[int, str]:
        """Send a heartbeat with the fleet's headers; the status and code of its answer."""
        body = {"metadata": self.report | changed, "files": {"disk_id": "evil", "since": 0, "upto": 0}}
        answer = fleet.http("POST", f"{fleet.orchestrator}/v1/workers/register", json=body)
        return answer.status_code, answer.json().get("error", {}).get("code", "")


@pytest.fixture
def fake_worker(guarded: tuple[RunningFleet, dict[str, str]]) -> Iterator[_FakeWorker]:
    """A fake worker that reports as the real one does, but with its own name, start and addresses."""
    fleet, _ = guarded
    fake = _FakeWorker(next(iter(fleet.workers().values())))
    thread = threading.Thread(target=fake.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield fake
    finally:
        fake.server.shutdown()
        thread.join()
        fake.server.server_close()


def test_a_publishers_own_worker_gets_no_key_and_no_prompt(
    guarded: tuple[RunningFleet, dict[str, str]], fake_worker: _FakeWorker
) -> None:
    fleet, keys = guarded
    for key in ("trainer", "pipeline"):
        publisher = _as(fleet, keys[key])
        for number in range(10):
            assert fake_worker.heartbeat(publisher) == (403, "scope_missing")
            asked = _as(fleet, keys["acme"]).ask(prompt=f"{key} {number}: {fresh_prompt()}", max_tokens=1)
            assert asked.status_code == 200, asked.text
    assert fake_worker.seen == []
    assert fake_worker.url not in json.dumps(fleet.get(f"{fleet.orchestrator}/v1/catalog"))


def test_an_address_that_does_not_prove_itself_gets_no_key_and_no_prompt_even_with_a_workers_key(
    guarded: tuple[RunningFleet, dict[str, str]], fake_worker: _FakeWorker
) -> None:
    fleet, keys = guarded
    holder, real = _as(fleet, keys["agents"]), next(iter(fleet.workers().values()))
    until(lambda: fake_worker.heartbeat(holder)[0] == 409, within_s=10, what="the services read the key file")
    for number in range(10):
        assert fake_worker.heartbeat(holder) == (409, "worker_unproved")
        # As the real worker, at its address and at ours.
        others = {"instance_id": real["instance_id"], "agent_boot_id": real["agent_boot_id"]}
        assert fake_worker.heartbeat(holder, **others)[0] == 409
        assert fake_worker.heartbeat(holder, **others, agent_url=real["agent_url"]) == (409, "worker_unproved")
        asked = _as(fleet, keys["acme"]).ask(prompt=f"proof {number}: {fresh_prompt()}", max_tokens=1)
        assert asked.status_code == 200, asked.text
    assert {(path, key) for path, key, _ in fake_worker.seen} == {(WORKER_PROOF_PATH, None)}
    assert fake_worker.url not in json.dumps(fleet.get(f"{fleet.orchestrator}/v1/catalog"))
    assert list(fleet.workers()) == [real["instance_id"]]


def _models(fleet: RunningFleet) -> set[str]:
    return {item["id"] for item in fleet.get(f"{fleet.router}/v1/models")["data"]}


def _as(fleet: RunningFleet, key: str) -> RunningFleet:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return RunningFleet(
        fleet.process, fleet.tag, fleet.state_dir, fleet.errors, fleet.router, fleet.orchestrator, headers=headers
    )
