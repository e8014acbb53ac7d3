"""The API server that the suites here run against: ours, or a real one.

With KUBECONFIG=FILE the suites run against that cluster, in namespaces of their own that go afterwards (the first lines
of the run name it); a kube-apiserver with etcd and nothing else is enough, admin rights on it are needed. So tests
arrange and look through the API (`lorafleet.kube`, `tests.kube.api`, kubectl), not in `server.objects`; what needs a
fault or the log of requests goes through `kube.faults` and `kube.ours`, which skip there. Whether a suite keeps to that
shows against our own server in another process: `python -m tests.kube.server --no-loopback --kubeconfig FILE`.
"""

import os
import socket
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from lorafleet.kube.client import connect
from tests.kube.binaries import kubectl, run
from tests.kube.faults import ServerFaults
from tests.kube.server import KubeServer
from tests.kube.stores import ManifestApplier, StoreInstance, StoreInstances

_REAL = os.environ.get("KUBECONFIG", "")


@dataclass(frozen=True, slots=True)
class KubeCluster:
    """Where to connect, and the namespace that tests may use.

    kubeconfig  its context's namespace is `namespace`
    host        an address that this machine's processes can listen on and that endpoints may have
    server      ours, or None on a real cluster
    """

    kubeconfig: Path
    namespace: str
    host: str
    server: KubeServer | None

    @property
    def faults(self) -> ServerFaults:
        return self.ours.faults

    @property
    def ours(self) -> KubeServer:
        """The test server, for faults, request log and tokens. Skips the test on a real cluster."""
        if self.server is None:
            pytest.skip("needs the tests' own API server: faults and its log of requests cannot be had of a real one")
        return self.server

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """kubectl's output. Blocks: with the test server, which runs in the test's loop, await it in a thread."""
        done = run(kubectl(), *words, stdin=stdin, environment={"KUBECONFIG": str(self.kubeconfig)})
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
async def kube(tmp_path: Path) -> AsyncIterator[KubeCluster]:
    """A cluster with an empty namespace."""
    namespace = f"lorafleet-test-{uuid.uuid4().hex[:8]}"
    path = tmp_path / "kubeconfig"
    if _REAL:
        cluster = KubeCluster(_with_namespace(Path(_REAL), path, namespace), namespace, _own_address(Path(_REAL)), None)
        cluster.kubectl("create", "namespace", namespace)
        yield cluster
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")
        return
    async with KubeServer() as server:
        server.objects.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        yield KubeCluster(server.kubeconfig(path, namespace=namespace), namespace, "127.0.0.1", server)


def _with_namespace(real: Path, path: Path, namespace: str) -> Path:
    done = run(kubectl(), "config", "view", "--raw", "--minify", "--flatten", environment={"KUBECONFIG": str(real)})
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load(done.stdout)
    config["contexts"][0]["context"]["namespace"] = namespace
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    return path


def _own_address(real: Path) -> str:
    """This machine's address as seen from the cluster: a real server refuses endpoints on loopback."""
    config = yaml.safe_load(real.read_text())
    server = str(urlsplit(config["clusters"][0]["cluster"]["server"]).hostname)
    # The second is an address for documentation, behind the default route: where the server itself is on loopback.
    found = [_address_towards(host) for host in (server, "203.0.113.1")]
    return next((address for address in found if not address.startswith("127.")), "127.0.0.1")


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 443))  # sends nothing: only asks for the way there
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@pytest.fixture
async def manifests(kube: KubeCluster) -> AsyncIterator[ManifestApplier]:
    """Applies ConfigMaps in the cluster."""
    api = await connect(kube.kubeconfig, environ={})
    yield ManifestApplier(api, kube.namespace)
    await api.close()


@pytest.fixture
async def instances(kube: KubeCluster) -> AsyncIterator[StoreInstances]:
    """Opens orchestrators' stores in the cluster."""
    them = StoreInstances(kube)
    yield them
    await them.close_all()


@pytest.fixture
async def instance(instances: StoreInstances) -> StoreInstance:
    """A store instance that leads."""
    return await instances.lead()
