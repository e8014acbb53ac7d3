"""A fleet in which every page of the console has something to show: tenants, limits, an alias, a rollout, a failure."""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from lorafleet.keys.key_files import hash_key
from tests.e2e import fleets
from tests.patience import patience, wait_until

OPERATOR, VIEWER, ACME, GLOBEX = "lf-operator", "lf-viewer", "lf-acme", "lf-globex"
FOREIGN = "scripts-adapter"
_OF_ACME = "{requests_per_minute: 6000, tokens_per_minute: 600000, tokens_per_month: 100000000}"
_OF_GLOBEX = "{requests_per_minute: 60}"
_KEYS = f"""keys:
- {{sha256: {hash_key(OPERATOR)}, scopes: [admin], note: Ann}}
- {{sha256: {hash_key(VIEWER)}, scopes: [view], note: on call}}
- {{sha256: {hash_key(ACME)}, tenant: acme, scopes: [infer, view], limits: {_OF_ACME}}}
- {{sha256: {hash_key(GLOBEX)}, tenant: globex, scopes: [infer], limits: {_OF_GLOBEX}, expires: 2031-01-31T00:00:00Z}}
"""
_TEXT = "select join customers orders invoices revenue month window rank over partition price total paid late"
_NAMES = ["sql-expert/v1"] * 4 + ["python-expert/v1"] * 2 + ["sql"] * 2 + ["tiny-qwen"] * 2 + ["legal/v2"]


@dataclass(slots=True)
class ConsoleScene:
    """A running fleet, and how to ask it as an operator."""

    fleet: fleets.RunningFleet
    orchestrator: str
    router: str

    def call(self, method: str, path: str, **more: object) -> httpx.Response:
        """A call to the orchestrator as the operator."""
        answer = self.fleet.http(method, self.orchestrator + path, **more)
        assert answer.status_code < 400, answer.text
        return answer

    def load_past_the_fleet(self, name: str, folder: Path) -> None:
        """Load an adapter as a script does, at one engine; returns once it is an orphan that can be adopted."""
        engine = self.call("GET", "/v1/workers/w1").json()["engine_url"]
        answer = httpx.post(
            f"{engine}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)}, timeout=patience(30)
        )
        assert answer.status_code == 200, answer.text
        wait_until(lambda: any(row["lora_id"] == name and not row["problem"] for row in self.orphans()))

    def orphans(self) -> list[dict[str, Any]]:
        """Adapters that are not registered."""
        found: list[dict[str, Any]] = self.call("GET", "/v1/orphans").json()["data"]
        return found

    async def traffic(self, for_s: float, *, rate: float = 12.0, seed: int = 7) -> None:
        """Requests of both tenants for so long, some of them refused."""
        rng, loop = random.Random(seed), asyncio.get_running_loop()
        topics = [" ".join(rng.choices(_TEXT.split(), k=60)) for _ in range(10)]
        async with httpx.AsyncClient(timeout=patience(60), trust_env=False) as client:
            running: set[asyncio.Task[None]] = set()
            ends_at = loop.time() + for_s
            while loop.time() < ends_at:
                task = loop.create_task(self._request(client, rng, topics))
                running.add(task)
                task.add_done_callback(running.discard)
                await asyncio.sleep(rng.expovariate(rate))
            await asyncio.gather(*running)

    async def _request(self, client: httpx.AsyncClient, rng: random.Random, topics: list[str]) -> None:
        """One chat, of any end."""
        key = GLOBEX if rng.random() < 0.2 else ACME
        body = {
            "model": "no/such" if rng.random() < 0.02 else rng.choice(_NAMES),
            "messages": [
                {"role": "system", "content": rng.choice(topics)},
                {"role": "user", "content": f"question {rng.random()}"},
            ],
            "max_tokens": rng.randint(8, 60),
            "stream": rng.random() < 0.8,
        }
        with contextlib.suppress(httpx.HTTPError):
            headers = {"authorization": f"Bearer {key}"}
            url = f"{self.router}/v1/chat/completions"
            async with client.stream("POST", url, json=body, headers=headers) as answer:
                async for _ in answer.aiter_bytes():
                    pass


@contextlib.contextmanager
def running_scene(folder: Path, *, workers: int = 3) -> Iterator[ConsoleScene]:
    """Start the fleet, and set the scene; stop it at the end."""
    keys = folder / "keys.yaml"
    keys.write_text(_KEYS)
    keys.chmod(0o600)
    flags = ("--engine", "sim", "--workers", str(workers), "--key-file", str(keys))
    with fleets.running(folder / "state", *flags, token=OPERATOR, within_s=patience(90)) as fleet:
        scene = ConsoleScene(fleet, fleet.orchestrator, fleet.router)
        _set(scene, folder)
        yield scene


def _set(scene: ConsoleScene, folder: Path) -> None:
    """A second version, an alias with a rollout to it, an adapter of a tenant, one that cannot be loaded, a published
    name with two versions, an adapter that a script has loaded, and a policy that was changed.
    """
    adapters = folder / "state" / "adapters"
    scene.call(
        "POST", "/v1/adapters", json={"lora_id": "sql-expert/v2", "source": f"file://{adapters}/python-expert/v1"}
    )
    scene.call(
        "POST",
        "/v1/adapters",
        json={"lora_id": "acme/forecast", "source": f"file://{adapters}/legal/v2", "tenants": ["acme"]},
    )
    broken = adapters / "broken" / "v1"
    broken.mkdir(parents=True, exist_ok=True)
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    scene.call("POST", "/v1/adapters", json={"lora_id": "broken/v1", "source": f"file://{broken}"})
    scene.call("PUT", "/v1/aliases/sql", json={"targets": [{"lora_id": "sql-expert/v1"}], "place_s": 0})
    wait_until(lambda: scene.call("GET", "/v1/adapters/broken/v1").json()["status"]["state"] == "failed")
    steps = [{"weight": 0.1, "for_s": 600}, {"weight": 0.5, "for_s": 600}, {"weight": 1, "for_s": 600}]
    scene.call("POST", "/v1/aliases/sql/rollout", json={"to": "sql-expert/v2", "steps": steps})
    scene.call("PATCH", "/v1/adapters/sql-expert/v1", json={"policy": {"min_replicas": 2}})
    for version in ("sql-expert/v1", "legal/v2"):
        scene.call("POST", "/v1/published/policy", json={"source": f"file://{adapters}/{version}", "replicas": 1})
    scene.call("PATCH", "/v1/policy", json={"max_staleness_s": 7200})
    scene.load_past_the_fleet(FOREIGN, adapters / "legal" / "v2")
