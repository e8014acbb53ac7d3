"""One service of ours as a process of its own."""

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.patience import patience, wait_until

ROOT = Path(__file__).parents[1]


@dataclass(slots=True)
class ServiceProcess:
    """One service, of either version, that keeps its port and its folder when it changes versions."""

    module: str
    folder: Path
    flags: tuple[str, ...]
    port: int = 0
    process: "subprocess.Popen[bytes] | None" = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.log = self.folder / "log"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, version: Path = ROOT) -> None:
        """Start it from a checkout (default: this one), and wait until it is ready."""
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", self.module, "--port", str(self.port), "--port-file", str(port_file)]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, *self.flags],
                cwd=self.folder,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONPATH": str(version)},
            )
        wait_until(lambda: self._has_port(port_file), within_s=30, what=f"{self.module} listens; see {self.log}")
        self.port = int(port_file.read_text())
        wait_until(self._is_ready, within_s=30, what=f"{self.module} is ready; see {self.log}")

    def stop(self) -> None:
        """End it as Kubernetes does, and wait."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(patience(40))
            self.process = None

    def _has_port(self, port_file: Path) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"it ended:\n{self.log.read_text()[-3000:]}"
        return port_file.exists()

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready", trust_env=False, timeout=patience(10)).is_success
        return False
