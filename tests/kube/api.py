"""A bare Kubernetes client for tests: paths and JSON, without retries."""

import base64
import contextlib
import json
import ssl
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.patience import patience, within


@contextlib.asynccontextmanager
async def connected(kubeconfig: Path) -> AsyncIterator["KubeApi"]:
    """A client for the server and namespace of the kubeconfig's first context."""
    cluster, user, context = _named_in(kubeconfig)
    headers = {"authorization": f"Bearer {user['token']}"} if "token" in user else {}
    async with httpx.AsyncClient(
        base_url=cluster["server"], headers=headers, timeout=patience(30), trust_env=False, verify=_trust(cluster, user)
    ) as client:
        yield KubeApi(client, context.get("namespace", "default"))


class KubeApi:
    """Requests to the API server. `{namespace}` in a path becomes the connection's namespace."""

    def __init__(self, client: httpx.AsyncClient, namespace: str) -> None:
        self.client, self.namespace = client, namespace

    async def ask(self, method: str, path: str, body: Any = None, *, kind: str = "", **query: Any) -> tuple[int, Any]:
        """Status and body of one request; `kind`: content type of a patch."""
        headers = {"content-type": kind or "application/json"}
        url = path.format(namespace=self.namespace)
        content = None if body is None else json.dumps(body)
        answer = await self.client.request(method, url, content=content, headers=headers, params=query)
        return answer.status_code, answer.json()

    async def make(self, path: str, body: Any) -> Any:
        code, made = await self.ask("POST", path, body)
        assert code == 201, made
        return made

    @contextlib.asynccontextmanager
    async def watch(self, path: str, **query: Any) -> AsyncIterator["WatchEvents"]:
        url = path.format(namespace=self.namespace)
        async with self.client.stream("GET", url, params={"watch": 1, "timeoutSeconds": 30, **query}) as answer:
            assert answer.status_code == 200
            yield WatchEvents(answer)


class WatchEvents:
    """A watch's events, one per `next`; None when it has ended."""

    def __init__(self, answer: httpx.Response) -> None:
        self._lines = answer.aiter_lines()

    async def next(self, *, within_s: float = 40) -> Any:
        async with within(within_s):
            line = await anext(self._lines, "")
        return json.loads(line) if line else None

    async def said(self) -> tuple[str, str]:
        """Type and object name of the next event."""
        event = await self.next()
        return event["type"], event["object"]["metadata"].get("name", "")


def _named_in(kubeconfig: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    config = yaml.safe_load(kubeconfig.read_text())
    return config["clusters"][0]["cluster"], config["users"][0]["user"], config["contexts"][0]["context"]


def _trust(cluster: dict[str, Any], user: dict[str, Any]) -> ssl.SSLContext | bool:
    if cluster["server"].startswith("http://"):
        return False
    data = cluster.get("certificate-authority-data", "")
    context = ssl.create_default_context(cadata=base64.b64decode(data).decode() or None)
    if "client-certificate-data" in user:
        with tempfile.NamedTemporaryFile() as file:  # ssl reads keys from files alone
            file.write(b"\n".join(base64.b64decode(user[f"client-{part}-data"]) for part in ("certificate", "key")))
            file.flush()
            context.load_cert_chain(file.name)
    return context
