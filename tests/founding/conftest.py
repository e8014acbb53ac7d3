"""One fleet for the whole folder, with keys, and the names that the founding documents use."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lorafleet.keys.key_edits import add_key
from lorafleet.local import tiny_model
from tests.e2e.fleets import RunningFleet, running, until
from tests.patience import patience

SQL, PYTHON, LEGAL, ACME = "sql-expert/v1", "python-expert/v1", "legal/v2", "acme/contracts/v3"


@dataclass(frozen=True, slots=True)
class FoundingFleet:
    """Two sim workers behind a router and an orchestrator; keys by name: admin, acme, other."""

    fleet: RunningFleet
    keys: dict[str, str]
    worker: str
    """URL of the first worker's agent."""

    @property
    def router(self) -> str:
        """The router's URL."""
        return self.fleet.router

    @property
    def orchestrator(self) -> str:
        """The orchestrator's URL."""
        return self.fleet.orchestrator

    def send(self, method: str, url: str, *, key: str = "admin", **more: Any) -> httpx.Response:
        """Send a request with a key of the fleet; `key` "": without one."""
        headers = {"authorization": f"Bearer {self.keys[key]}"} if key else {}
        return httpx.request(method, url, headers=headers, timeout=patience(40), trust_env=False, verify=False, **more)

    def get(self, url: str, *, key: str = "admin", **query: Any) -> Any:
        """The answer's JSON; fails for an error."""
        answer = self.send("GET", url, key=key, params=query)
        assert answer.is_success, answer.text
        return answer.json()

    def post(self, url: str, body: dict[str, Any], *, key: str = "admin") -> httpx.Response:
        """A POST of a JSON body."""
        return self.send("POST", url, key=key, json=body)

    def chat(self, *, key: str = "admin", **body: Any) -> httpx.Response:
        """A chat completion of four tokens at temperature 0."""
        base = {"model": "tiny-qwen", "temperature": 0, "max_tokens": 4}
        messages = [{"role": "user", "content": body.pop("prompt", "Write SQL for the ten best customers.")}]
        return self.post(f"{self.router}/v1/chat/completions", base | {"messages": messages} | body, key=key)

    def code(self, answer: httpx.Response) -> str:
        """The error code of an answer in OpenAI's envelope."""
        code: str = answer.json()["error"]["code"]
        return code

    def series(self, service: str) -> dict[str, list[dict[str, str]]]:
        """The labels of each sample on a service's metrics page, by the sample's name; `service` is its URL."""
        found: dict[str, list[dict[str, str]]] = {}
        for family in text_string_to_metric_families(self.send("GET", f"{service}/metrics").text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(dict(sample.labels))
        return found

    def ensure(self, lora_id: str, replicas: int = 1) -> list[str]:
        """Have an adapter loaded; the workers that have it."""
        answer = self.post(f"{self.orchestrator}/v1/adapters/{lora_id}/ensure", {"replicas": replicas, "wait_s": 60})
        assert answer.json()["state"] == "ready", answer.text
        ready: list[str] = answer.json()["ready"]
        return ready

    def log_lines(self, process: str) -> list[dict[str, Any]]:
        """The log of one process of the fleet, such as `w0`."""
        lines = (self.fleet.state_dir / "logs" / f"{process}.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture(scope="package")  # it ends with the last of its tests, not with the run
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FoundingFleet]:
    folder: Path = tmp_path_factory.mktemp("founding")
    tiny_model.make_adapters(folder / "adapters")
    tiny_model.make_adapter(folder / "adapters", ACME)
    path = folder / "keys.yaml"
    keys = {
        "acme": add_key(path, "acme", ["infer"]),
        "other": add_key(path, "other", ["infer"]),
        "admin": add_key(path, None, ["admin"]),
    }
    environment = {f"LORAFLEET_{service}_LOG_FORMAT": "json" for service in ("ROUTER", "ORCHESTRATOR", "WORKERS")}
    adapters = ("--adapters", str(folder / "adapters"), "--max-loras", "8")
    environment["LORAFLEET_WORKERS_ACCESS_LOG"] = "all"
    flags = ("--engine", "sim", "--workers", "2", *adapters, "--key-file", str(path))
    with running(folder / "state", *flags, token=keys["admin"], environment=environment) as started:
        changed = started.http("PATCH", f"{started.orchestrator}/v1/adapters/{ACME}", json={"tenants": ["acme"]})
        assert changed.status_code == 200, changed.text
        workers = started.get(f"{started.orchestrator}/v1/workers")["data"]
        fleet = FoundingFleet(started, keys, next(item["agent_url"] for item in workers if item["id"] == "w0"))
        until(lambda: ACME not in models(fleet, key="other"), within_s=20, what="the router knows whose it is")
        yield fleet


def models(fleet: FoundingFleet, *, key: str = "admin") -> dict[str, Any]:
    """The router's models, by id."""
    return {item["id"]: item for item in fleet.get(f"{fleet.router}/v1/models", key=key)["data"]}
