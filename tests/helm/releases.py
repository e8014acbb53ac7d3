"""The chart in a cluster, by real helm and kubectl."""

import asyncio
import base64
import subprocess
from pathlib import Path

import yaml

from tests.helm.rendering import RELEASE
from tests.kube.binaries import helm, run
from tests.kube.conftest import KubeCluster


class HelmRelease:
    """The chart in a cluster's namespace, by the helm that users run."""

    def __init__(self, kube: KubeCluster, home: Path) -> None:
        self.program = helm
        self.kube = kube
        self._environment = {"KUBECONFIG": str(kube.kubeconfig)} | {
            f"HELM_{kind}_HOME": str(home / kind) for kind in ("CACHE", "CONFIG", "DATA")
        }

    async def tried(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """helm's output, of success and failure."""
        return await asyncio.to_thread(
            run, self.program(), *words, "--namespace", self.kube.namespace, environment=self._environment
        )

    async def helm(self, *words: str) -> "subprocess.CompletedProcess[str]":
        done = await self.tried(*words)
        assert done.returncode == 0, done.stderr
        return done

    async def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return await asyncio.to_thread(self.kube.kubectl, *words, stdin=stdin)

    async def secret(self, name: str) -> dict[str, str]:
        said = yaml.safe_load(await self.kubectl("get", "secret", f"{RELEASE}-lorafleet-{name}", "-o", "yaml"))
        return {key: base64.b64decode(value).decode() for key, value in said["data"].items()}

    async def hashes(self, service: str) -> set[str]:
        return {
            entry["sha256"] for entry in yaml.safe_load((await self.secret(f"keys-{service}"))["keys.yaml"])["keys"]
        }
