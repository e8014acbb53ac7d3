"""The last release in one fleet with today's services: upgraded and rolled back under requests, service by service."""

import contextlib
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from lorafleet.local.tiny_model import make_adapters, make_model
from tests.patience import patience, wait_until
from tests.service_process import ServiceProcess
from tests.wire.record import PROMPT, PYTHON, SLOTS, SQL

pytestmark = [pytest.mark.thorough, pytest.mark.fleet, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
RELEASE_TAGS = "v*"


def last_release() -> str | None:
    """The newest release tag that is no tag of this very commit; None without one, or without git."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        here = git("tag", "--points-at", "HEAD", "--list", RELEASE_TAGS).split()
        merged = git("tag", "--merged", "HEAD", "--list", RELEASE_TAGS, "--sort=-version:refname").split()
        return next((tag for tag in merged if tag not in here), None)
    return None


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkout of the last release, in whose folder its services are started."""
    tag = last_release()
    if tag is None:
        pytest.skip(f"no release was tagged before this commit (git tags {RELEASE_TAGS})")
    folder = tmp_path_factory.mktemp("older") / tag.replace("/", "-")
    git("worktree", "add", "--detach", str(folder), tag)
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


@dataclass(slots=True)
class MixedFleet:
    """Two workers, one orchestrator, two routers, of which at most one is being exchanged."""

    shelf: Path
    agents: list[ServiceProcess]
    orchestrator: ServiceProcess
    routers: list[ServiceProcess]
    stopped: threading.Event = field(default_factory=threading.Event)
    exchanged: str = ""
    answered: int = 0
    failed: list[str] = field(default_factory=list)

    def exchange(self, service: ServiceProcess, version: Path) -> None:
        """Restart a service from the other version, and wait for further answers."""
        self.exchanged = service.url
        service.stop()
        service.start(version)
        self.exchanged = ""
        before = self.answered
        wait_until(lambda: self.answered > before + 4, within_s=30, what=f"answers with {service.module} of {version}")
        self.assert_whole(f"{service.module} of {version.name}")

    def upgrade(self, version: Path) -> None:
        """Give every service another version in the documented order, agents first."""
        for service in (*self.agents, self.orchestrator, *self.routers):
            self.exchange(service, version)

    def assert_whole(self, what: str) -> None:
        """No request failed, every worker is ready, and a new adapter's life works from end to end."""
        assert not self.failed, f"{what}: {self.failed[:5]}"

        def are_ready() -> bool:
            states = [worker["state"] for worker in self.call("GET", "/v1/workers")["data"]]
            return states == ["ready"] * len(self.agents)

        wait_until(are_ready, within_s=30, what=f"{what}: both workers are ready")
        name = "extra/v1"
        self.register(name, PYTHON)
        answer = httpx.post(
            f"{self.routers[0].url}/v1/completions", json=asked(name), timeout=patience(20), trust_env=False
        )
        assert answer.status_code == 200, f"{what}: {answer.text}"
        self.call("DELETE", f"/v1/adapters/{name}")

        def is_deleted() -> bool:
            url = f"{self.orchestrator.url}/v1/adapters/{name}"
            return httpx.get(url, trust_env=False, timeout=patience(10)).status_code == 404

        wait_until(is_deleted, within_s=30, what=f"{what}: the adapter is unloaded")

    def register(self, lora_id: str, folder: str) -> None:
        """Register one of the demo adapters under this name."""
        self.call("POST", "/v1/adapters", json={"lora_id": lora_id, "source": f"file://{self.shelf}/{folder}"})

    def call(self, method: str, path: str, **more):
        """A call to the orchestrator; fails unless it succeeds."""
        answer = httpx.request(method, f"{self.orchestrator.url}{path}", timeout=patience(10), trust_env=False, **more)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def ask_until_stopped(self) -> None:
        """One user, who asks each router in turn, but none that is being exchanged."""
        with httpx.Client(timeout=patience(20), trust_env=False) as client:
            while not self.stopped.wait(0.02):
                for router in self.routers:
                    if router.url == self.exchanged:
                        continue
                    for name in (SQL, "tiny-qwen"):
                        self._ask(client, router, name)

    def _ask(self, client: httpx.Client, router: ServiceProcess, name: str) -> None:
        try:
            answer = client.post(f"{router.url}/v1/completions", json=asked(name))
        except httpx.TransportError as exc:
            if router.url != self.exchanged:
                self.failed.append(repr(exc))
            return
        self.answered += answer.is_success
        if not answer.is_success:
            self.failed.append(f"{router.url} {name}: {answer.status_code} {answer.text}")


def asked(name: str) -> dict[str, object]:
    return {"model": name, "prompt": PROMPT, "max_tokens": 4}


@pytest.fixture
def fleet(older: Path, tmp_path: Path) -> Iterator[MixedFleet]:
    """A fleet of the last release, under requests."""
    model, shelf = make_model(tmp_path / "model"), tmp_path / "adapters"
    make_adapters(shelf)
    orchestrator = ServiceProcess("orchestrator", tmp_path / "o", ("--store", str(tmp_path / "store.db")))
    services = [orchestrator]
    try:
        orchestrator.start(older)
        agents = []
        for name in ("w0", "w1"):
            folder = tmp_path / name
            flags = (
                "--engine", "sim", "--model", str(model), "--served-model-name", "tiny-qwen", *SLOTS,
                "--instance-id", name, "--lora-path", str(shelf), "--state-dir", str(folder / "state"),
                "--cache-dir", str(folder / "cache"), "--engine-port", "0", "--orchestrator-url", orchestrator.url,
            )  # fmt: skip
            agents.append(ServiceProcess("workers", folder, flags))
        services += agents
        for agent in agents:
            agent.start(older)
        routers = [
            ServiceProcess("router", tmp_path / name, ("--orchestrator-url", orchestrator.url, "--drain-s", "0"))
            for name in ("r0", "r1")
        ]
        services += routers
        for router in routers:
            router.start(older)
        fleet = MixedFleet(shelf, agents, orchestrator, routers)
        fleet.register(SQL, SQL)
        user = threading.Thread(target=fleet.ask_until_stopped)
        user.start()
        try:
            yield fleet
        finally:
            fleet.stopped.set()
            user.join()
    finally:
        for service in reversed(services):
            service.stop()


@pytest.mark.timeout(900)
def test_upgrade_and_rollback_fail_no_request(fleet: MixedFleet, older: Path) -> None:
    fleet.assert_whole("the last release")
    fleet.upgrade(ROOT)
    fleet.upgrade(older)
