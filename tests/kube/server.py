"""A Kubernetes API server for tests: faithful where we rely on one, with faults on demand.

    async with KubeServer() as server:
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig")
        ...
        server.faults.drop_watches()

`python -m tests.kube.server --port 8001 --kubeconfig FILE` runs it by itself. What it does not do: run anything (see
`controller.py`), OpenAPI schemas, defaulting of more than `replicas`.
"""

import argparse
import asyncio
import contextlib
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from aiohttp import web

from lorafleet.service.network.sockets import bind_socket
from tests.kube import certificates
from tests.kube.faults import ServerFaults
from tests.kube.handlers import ApiServerRequest, RequestHandlers
from tests.kube.kinds import BY_KIND, BY_PLURAL
from tests.kube.registry import ObjectRegistry
from tests.kube.rules import AccessRules
from tests.kube.store import Object, VersionedObjects

_HOST = "127.0.0.1"


class DirectObjects:
    """Direct access to the server's objects, for a test's arrangements. `resource`: the plural, as in paths."""

    def __init__(self, registry: ObjectRegistry) -> None:
        self._registry = registry

    def get(self, resource: str, namespace: str, name: str) -> Object | None:
        return self._registry.store.get(BY_PLURAL[resource], namespace, name)

    def list(self, resource: str, namespace: str = "") -> list[Object]:
        """Objects of one namespace or of all; not to be changed in place."""
        return self._registry.store.find(BY_PLURAL[resource], namespace)

    def put(self, obj: Object) -> Object:
        """Create or replace an object, with the same checks as a request."""
        resource = BY_KIND[obj["apiVersion"], obj["kind"]]
        namespace = obj["metadata"].get("namespace", "default") if resource.namespaced else ""
        name = obj["metadata"]["name"]
        if self._registry.store.get(resource, namespace, name) is None:
            return self._registry.create(resource, namespace, obj)
        meta = {key: value for key, value in obj["metadata"].items() if key not in ("resourceVersion", "uid")}
        old = self._registry.get(resource, namespace, name)["metadata"]["resourceVersion"]
        stored, _ = self._registry.replace(
            resource, namespace, name, obj | {"metadata": meta | {"resourceVersion": old}}
        )
        return stored

    def delete(self, resource: str, namespace: str, name: str) -> None:
        """Delete at once, without grace period and finalizers."""
        row = BY_PLURAL[resource]
        self._registry.store.remove(row, self._registry.get(row, namespace, name))


class KubeServer:
    """Serves on loopback while its block is entered.

    port            0: a free one, kept through `faults.go_down()` and `come_back()`
    tls             https with a certificate of its own; `service_account` writes the CA's
    allow_loopback  endpoints in 127.0.0.0/8, which real servers refuse, since pods are processes here
    bookmark_s      between a watch's bookmarks

    `requests` has all that were made, `forbidden` what was answered 401 and 403 and to whom.
    """

    def __init__(
        self, *, port: int = 0, tls: bool = False, allow_loopback: bool = True, bookmark_s: float = 60.0
    ) -> None:
        self.requests: list[ApiServerRequest] = []
        self.forbidden: list[str] = []
        self.registry = ObjectRegistry(VersionedObjects(), allow_loopback=allow_loopback)
        self.objects = DirectObjects(self.registry)
        self.rules = AccessRules(self.registry.store)
        self.tokens = self.rules.tokens
        self.faults = ServerFaults(self.registry.store, self._stop_listening, self._listen)
        self._handlers = RequestHandlers(
            self.registry, self.rules, self.faults, self.requests, self.forbidden, bookmark_s
        )
        self._port = port
        self._certificate = certificates.made_for(_HOST) if tls else None
        self._site: web.SockSite | None = None
        self._runner: web.AppRunner | None = None
        self._placeholder: socket.socket | None = None
        for name in ("default", "kube-system"):
            self.objects.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    async def __aenter__(self) -> Self:
        # Bound and never listening: while the server is down nobody else is given its port.
        self._placeholder = bind_socket(_HOST, self._port)
        self._port = self._placeholder.getsockname()[1]
        await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.faults.thaw()
        self.faults.give_answers()
        await self._stop_listening()
        assert self._placeholder is not None
        self._placeholder.close()

    @property
    def url(self) -> str:
        return f"{'https' if self._certificate else 'http'}://{_HOST}:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    def kubeconfig(self, path: Path, *, token: str = "", namespace: str = "default") -> Path:
        """Write a kubeconfig of this server; returns its path."""
        cluster: dict[str, Any] = {"server": self.url}
        if self._certificate:
            cluster["certificate-authority-data"] = self._certificate.ca_base64
        context = {"cluster": "test", "user": "test", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token} if token else {}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def service_account(self, folder: Path, *, token: str, namespace: str = "default") -> dict[str, str]:
        """Write a pod's service account files to `folder`; returns its environment. Needs `tls`."""
        assert self._certificate is not None, "in a cluster everybody speaks https: KubeServer(tls=True)"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "token").write_text(token)
        (folder / "namespace").write_text(namespace)
        (folder / "ca.crt").write_text(self._certificate.ca_pem)
        return {"KUBERNETES_SERVICE_HOST": _HOST, "KUBERNETES_SERVICE_PORT": str(self._port)}

    def grant(self, user: str, namespace: str, rules: Sequence[dict[str, Any]]) -> None:
        """Grant a user these verbs, by a Role and a RoleBinding. Users come from `tokens`."""
        name = user.replace(":", ".")
        api = "rbac.authorization.k8s.io"
        meta = {"name": name, "namespace": namespace}
        head = {"apiVersion": f"{api}/v1", "metadata": meta}
        self.objects.put(head | {"kind": "Role", "rules": list(rules)})
        subject = {"kind": "User", "name": user, "apiGroup": api}
        ref = {"kind": "Role", "name": name, "apiGroup": api}
        self.objects.put(head | {"kind": "RoleBinding", "subjects": [subject], "roleRef": ref, "metadata": dict(meta)})

    def count(self, verb: str = "", path: str = "", *, since: float = 0.0) -> int:
        """Received requests of this verb (list, watch, get, create, update, patch, delete) with this in their path."""
        return sum(verb in ("", asked.verb) and path in asked.path and asked.time >= since for asked in self.requests)

    def app(self) -> web.Application:
        """The server's handlers, to be served at another place than its own port."""
        return self._handlers.app()

    async def _listen(self) -> None:
        # Cancelled handlers, so that a watch ends with its connection and not with the next thing it has to say.
        self._runner = web.AppRunner(self.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        context = self._certificate.context() if self._certificate else None
        self._site = web.SockSite(self._runner, bind_socket(_HOST, self._port), ssl_context=context)
        await self._site.start()

    async def _stop_listening(self) -> None:
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        assert runner.server is not None
        for connection in list(runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()


async def _main(port: int, kubeconfig: Path | None, *, allow_loopback: bool) -> None:
    async with KubeServer(port=port, allow_loopback=allow_loopback) as server:
        if kubeconfig is not None:
            server.kubeconfig(kubeconfig)
        sys.stdout.write(f"ready {server.url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A Kubernetes API server for tests; it keeps everything in memory.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--kubeconfig", type=Path, help="write one that names this server")
    parser.add_argument("--no-loopback", action="store_true", help="refuse endpoints in 127.0.0.0/8, as real ones do")
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(given.port, given.kubeconfig, allow_loopback=not given.no_loopback))
