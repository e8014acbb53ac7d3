"""The chart, installed by helm into a played cluster, and requests that never stop."""

import asyncio
import base64
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml

from lorafleet.local import tiny_model
from tests.e2e.scenarios import fresh_prompt
from tests.kube.binaries import helm, kubectl, run
from tests.kube.controller import WorkloadController
from tests.kube.server import KubeServer
from tests.patience import patience, until, within

CHART = Path(__file__).parents[2] / "helm" / "lorafleet"
NAME, NAMESPACE, BASE = "demo", "default", "tiny-qwen"
ADAPTERS = ("sql-expert/v1", "python-expert/v1", "legal/v2")
NODES = {"node-a": "zone-1", "node-b": "zone-2", "node-c": "zone-3"}
_CLIENTS = 3
_PAUSE_S = 0.1  # each, between requests: a stream, but not one that takes the processor from pods that start


@dataclass(slots=True)
class SentRequests:
    """What became of the requests. `workers`: how many each has answered."""

    answered: int = 0
    workers: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)


class InstalledRelease:
    """A running release. Make it with `installed`."""

    def __init__(self, server: KubeServer, cluster: WorkloadController, folder: Path) -> None:
        self.server, self.cluster = server, cluster
        self._folder = folder
        server.tokens["operator"] = "admin"
        self._kubeconfig = server.kubeconfig(folder / "operator", token="operator", namespace=NAMESPACE)

    async def helm(self, *words: str) -> str:
        return await self._run(helm(), *words)

    async def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return await self._run(kubectl(), *words, stdin=stdin)

    async def upgrade(self, *words: str) -> None:
        """Upgrade to other values and wait until every pod has them."""
        await self.helm("upgrade", NAME, str(CHART), "--reuse-values", *words)
        await self.cluster.settled(within_s=120)

    def token(self, role: str) -> str:
        found = self.server.objects.get("secrets", NAMESPACE, f"{NAME}-lorafleet-tokens")
        assert found is not None
        return base64.b64decode(found["data"][f"{role}.1"]).decode()

    async def orchestrator(self, method: str, path: str, body: Any = None) -> Any:
        """A call through the Service as operator; answers with Retry-After are tried again."""
        headers = {"authorization": f"Bearer {self.token('admin')}"}
        url = f"{self.cluster.url(f'{NAME}-lorafleet-orchestrator')}{path}"
        async with (
            httpx.AsyncClient(headers=headers, timeout=patience(30), trust_env=False, verify=False) as client,
            within(40),
        ):
            while "retry-after" in (answer := await client.request(method, url, json=body)).headers:
                await asyncio.sleep(0.2)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    async def workers(self) -> dict[str, str]:
        """Worker -> state by the orchestrator."""
        return {item["id"]: item["state"] for item in (await self.orchestrator("GET", "/v1/workers"))["data"]}

    async def adapters(self) -> set[str]:
        return {item["lora_id"] for item in (await self.orchestrator("GET", "/v1/adapters"))["data"]}

    async def placements(self) -> set[tuple[str, str]]:
        """Adapter and worker, where it is ready."""
        listed = (await self.orchestrator("GET", "/v1/placements"))["data"]
        return {(item["lora_id"], item["worker_id"]) for item in listed if item["state"] == "ready"}

    async def until_listed(self, lora_id: str, *, within_s: float = 10.0) -> None:
        """Until every router knows the adapter."""
        routers = [pod["status"]["podIP"] for pod in self.cluster.pods_of(component="router")]
        async with self._client() as client:

            async def knows(address: str) -> bool:
                return (await client.get(f"http://{address}:8000/v1/models/{lora_id}")).is_success

            for address in routers:
                await until(partial(knows, address), within_s=within_s, what=f"{address} knows {lora_id}")

    async def leading(self) -> list[str]:
        """Addresses of the orchestrators that report to be leader."""
        addresses = [pod["status"]["podIP"] for pod in self.cluster.pods_of(component="orchestrator")]
        async with self._client() as client:
            found = [(await client.get(f"http://{address}:8080/health")).json() for address in addresses]
        return [address for address, said in zip(addresses, found, strict=True) if said["is_leading"]]

    @contextlib.asynccontextmanager
    async def under_requests(self, *, models: tuple[str, ...] = (BASE, *ADAPTERS)) -> AsyncIterator[SentRequests]:
        """A few clients that send one request after another; none may fail.

        Errors have the logs of all pods, deleted ones included: of a failed request, and of the caller.
        """
        sent = SentRequests()
        stopping = asyncio.Event()
        asking = [asyncio.create_task(self._ask_until(stopping, models, sent)) for _ in range(_CLIENTS)]
        try:
            yield sent
        except Exception as exc:
            exc.add_note(self.cluster.logs())
            raise
        finally:
            stopping.set()
            await asyncio.gather(*asking)
        said = f"{len(sent.failed)} of {sent.answered + len(sent.failed)}: {sent.failed[:5]}"
        assert not sent.failed, f"{said}\n{self.cluster.logs()}"
        assert sent.answered >= _CLIENTS

    async def burst(self, model: str, sent: SentRequests, *, requests: int) -> None:
        """Many requests at once, so that one worker alone is a poor choice."""
        message = {"role": "user", "content": "a burst"}
        body = {"model": model, "max_tokens": 64, "stream": False, "messages": [message]}
        async with self._client() as client:
            await asyncio.gather(*(_asked(client, self._chat, body, sent) for _ in range(requests)))

    @property
    def _chat(self) -> str:
        return f"{self.cluster.url(f'{NAME}-lorafleet-router')}/v1/chat/completions"

    def _client(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.token('test')}"}
        return httpx.AsyncClient(headers=headers, timeout=patience(30), trust_env=False, verify=False)

    async def _ask_until(self, stopping: asyncio.Event, models: tuple[str, ...], sent: SentRequests) -> None:
        async with self._client() as client:
            for number, model in enumerate(itertools.cycle(models)):
                if stopping.is_set():
                    return
                body = {"model": model, "max_tokens": 8, "stream": bool(number % 2)}
                message = {"role": "user", "content": fresh_prompt()}
                await asyncio.sleep(_PAUSE_S)
                try:
                    await _asked(client, self._chat, body | {"messages": [message]}, sent)
                except (httpx.HTTPError, ValueError) as exc:
                    sent.failed.append(f"{model}: {exc!r}")

    async def _run(self, program: Path, *words: str, stdin: str | None = None) -> str:
        home = {f"HELM_{kind}_HOME": str(self._folder / f"helm-{kind}") for kind in ("CACHE", "CONFIG", "DATA")}
        environment = {"KUBECONFIG": str(self._kubeconfig), "HOME": str(self._folder)} | home
        done = await asyncio.to_thread(run, program, *words, stdin=stdin, environment=environment)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout


@contextlib.asynccontextmanager
async def installed(folder: Path, values: dict[str, Any]) -> AsyncIterator[InstalledRelease]:
    """The chart with these values on top of a small fleet's, every pod of it ready. `folder`: a short path."""
    model = await asyncio.to_thread(_made_model, folder / "model")
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(small_fleet(model) | values))
    async with KubeServer(tls=True) as server, WorkloadController(server, NAMESPACE, folder, nodes=NODES) as cluster:
        release = InstalledRelease(server, cluster, folder)
        await release.helm("install", NAME, str(CHART), "--namespace", NAMESPACE, "--values", str(path))
        await cluster.settled(within_s=120)
        yield release


def small_fleet(model: Path) -> dict[str, Any]:
    """Two routers, two orchestrators, two sim workers; what takes long in a cluster is short.

    The Lease lasts for longer than this process, which is the API server, is ever without a processor. Routers drain
    until its proxies know that they end.
    """
    lease_s = round(patience(3))
    pool = {
        "name": "sim",
        "engine": "sim",
        "replicas": 2,
        "model": f"/models/{BASE}",
        "modelVolume": {"hostPath": {"path": str(model)}},
        "settings": {"lora_roots": [str(model / "adapters")]},
        "maxLoras": 2,
        "maxCpuLoras": 6,
        "maxLoraRank": 16,
        "drainSeconds": 10,
        "startDeadlineSeconds": 60,
    }
    return {
        "router": {"replicas": 2, "drainSeconds": round(patience(1)), "graceSeconds": round(patience(10))},
        "orchestrator": {
            "lease": {"durationSeconds": lease_s, "renewSeconds": lease_s // 4, "marginSeconds": lease_s // 4}
        },
        "pools": [pool],
        "adapters": [{"lora_id": name, "source": str(model / "adapters" / name)} for name in ADAPTERS],
    }


async def _asked(client: httpx.AsyncClient, url: str, body: dict[str, Any], sent: SentRequests) -> None:
    """Counts it as answered when it is answered as it should be. Raises httpx.HTTPError and ValueError."""
    async with client.stream("POST", url, json=body) as answer:
        content = (await answer.aread()).decode()
    if answer.status_code != 200:
        raise ValueError(f"{answer.status_code} {content}")
    if body["stream"]:
        if not content.endswith("data: [DONE]\n\n") or '"error"' in content:
            raise ValueError(f"a stream that ends as {content[-300:]!r}")
    elif not json.loads(content)["choices"][0]["message"]["content"]:
        raise ValueError(f"an answer without text: {content}")
    sent.answered += 1
    sent.workers[answer.headers["x-lorafleet-worker"]] += 1


def _made_model(folder: Path) -> Path:
    folder.mkdir()
    tiny_model.make_model(folder / BASE)
    tiny_model.make_adapters(folder / "adapters")
    return folder
