"""The chart in a cluster: pods come, go, move and die, and no request fails.

Real are helm and kubectl, the manifests with their Roles, tokens, probes and hooks, and our processes; the API server
and what makes processes of pods are the tests' own (`tests/kube`).
"""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import pytest_asyncio
import yaml

from tests.e2e.kubernetes import ADAPTERS, CHART, NAME, NAMESPACE, InstalledRelease, installed
from tests.kube import workloads
from tests.patience import patience, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.fleet]
POOL = f"statefulset/{NAME}-lorafleet-sim"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="k", dir="/tmp") as name:  # short: sockets lie in it
        yield Path(name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def release(folder: Path) -> AsyncIterator[InstalledRelease]:
    async with installed(folder, {}) as release:
        yield release


def leader(release: InstalledRelease) -> str | None:
    """The pod whose orchestrator holds the Lease, by the address in it. None between two leaders."""
    lease = release.server.objects.get("leases", NAMESPACE, f"{NAME}-lorafleet")
    assert lease is not None
    said = str(lease["metadata"]["annotations"])
    return next((pod.name for pod in release.cluster.pods.values() if f"//{pod.address}:" in said), None)


async def until_led(release: InstalledRelease, *, besides: str | None = None) -> str:
    """The pod that leads, once one does."""

    def is_led() -> bool:
        return leader(release) not in (None, besides)

    await release.cluster.until(is_led, within_s=20, what=f"an orchestrator leads besides {besides}")
    found = leader(release)
    assert found is not None
    return found


def is_renewed(release: InstalledRelease, since: int) -> bool:
    """Whether the Lease was written among the requests from this one on."""
    return any(asked.verb == "update" and "/leases/" in asked.path for asked in release.server.requests[since:])


async def test_the_charts_own_test_gets_a_completion(release: InstalledRelease) -> None:
    assert "Phase:          Succeeded" in await release.helm("test", NAME)


async def test_an_upgrade_of_everything_fails_no_request_and_keeps_tokens_and_adapters(
    release: InstalledRelease,
) -> None:
    before = {pod["metadata"]["uid"] for pod in release.cluster.pods_of(instance=NAME)}
    token = release.token("admin")
    async with release.under_requests():
        await release.upgrade("--set", "image.tag=next")
    assert not before & {pod["metadata"]["uid"] for pod in release.cluster.pods_of(instance=NAME)}
    assert release.token("admin") == token
    assert await release.adapters() == set(ADAPTERS)


async def test_a_pool_that_grows_fails_no_request_and_the_new_worker_takes_part(release: InstalledRelease) -> None:
    newest = f"{NAME}-lorafleet-sim-2"
    async with release.under_requests() as sent:
        await release.kubectl("scale", POOL, "--replicas=3")
        await release.cluster.settled()
        await release.orchestrator(
            "POST", f"/v1/adapters/{ADAPTERS[0]}/ensure", {"replicas": 3, "wait_s": patience(20)}
        )

        async def takes_part() -> int:
            await release.burst(ADAPTERS[0], sent, requests=24)
            return sent.workers[newest]

        await until(takes_part)
    assert set((await release.workers()).values()) == {"ready"}


async def test_a_pool_that_something_else_scales_keeps_its_workers_in_upgrade_rollback_and_a_failed_upgrade(
    release: InstalledRelease,
) -> None:
    """kubectl has set the number in the test before, so it owns the field that the release gives up."""

    def workers() -> set[str]:
        return {pod["metadata"]["uid"] for pod in release.cluster.pods_of(component="worker")}

    def is_changed() -> bool:
        return release.server.objects.get("configmaps", NAMESPACE, f"{NAME}-lorafleet-dashboard") is not None

    changed = ("--set", "monitoring.dashboard.enabled=true")  # which replaces no pod by itself
    await release.upgrade("--set-json", 'poolDefaults.autoscaling={"enabled": true, "type": "external"}')
    async with release.under_requests():
        await release.kubectl("scale", POOL, "--replicas=4")
        await release.cluster.settled()
        there = workers()
        assert len(there) == 4
        await release.upgrade(*changed)
        assert is_changed()
        assert workers() == there
        await release.helm("rollback", NAME)
        await release.cluster.settled()
        assert workers() == there
        assert not is_changed()
        wrong = '[{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a b"}}]'
        words = ("--reuse-values", "--rollback-on-failure", "--wait=legacy", "--set-json", f"extraObjects={wrong}")
        # The release is rolled back; then helm looks for ReplicaSets, of which this server has none.
        with pytest.raises(AssertionError, match="rolling back"):
            await release.helm("upgrade", NAME, str(CHART), *words, *changed)
        await release.cluster.settled()
        assert workers() == there
        assert not is_changed()
    await release.kubectl("scale", POOL, "--replicas=3")
    await release.cluster.settled()


async def test_a_node_that_is_drained_fails_no_request(release: InstalledRelease) -> None:
    assert on_node(release, "node-b")
    async with release.under_requests():
        await release.kubectl("drain", "node-b", "--delete-emptydir-data", f"--timeout={patience(50):.0f}s")
        await release.cluster.settled()
        assert on_node(release, "node-b") == []
    await release.kubectl("uncordon", "node-b")


async def test_a_leader_that_is_killed_is_followed_by_another_and_no_request_fails(
    release: InstalledRelease, folder: Path
) -> None:
    killed = await until_led(release)
    async with release.under_requests():
        child = release.cluster.pods[killed].children["orchestrator"]
        assert child.process is not None
        os.kill(child.process.pid, signal.SIGKILL)
        await until_led(release, besides=killed)
        source = folder / "model" / "adapters" / ADAPTERS[0]
        await release.orchestrator("POST", "/v1/adapters", {"lora_id": "late/v1", "source": str(source)})
        await release.cluster.settled()
    await release.until_listed("late/v1")
    async with release.under_requests(models=("late/v1",)) as sent:
        await until(lambda: sent.answered >= 6 or sent.failed)


async def test_an_adapter_comes_by_kubectl_apply_and_goes_by_kubectl_delete(
    release: InstalledRelease, folder: Path
) -> None:
    labels = {"lorafleet.io/kind": "adapter", "lorafleet.io/fleet": f"{NAME}-lorafleet"}
    said = {"lora_id": "by-hand/v1", "source": str(folder / "model" / "adapters" / ADAPTERS[1])}
    meta = {"name": "by-hand", "labels": labels}
    written = {"adapter.yaml": yaml.safe_dump(said)}
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": written})
    await release.kubectl("apply", "-f", "-", stdin=text)
    await release.until_listed("by-hand/v1")
    async with release.under_requests(models=("by-hand/v1",)) as sent:
        await until(lambda: sent.answered >= 6 or sent.failed)
    await release.kubectl("delete", "-f", "-", stdin=text)

    async def is_gone() -> bool:
        return "by-hand/v1" not in await release.adapters()

    await until(is_gone)


async def test_an_api_server_that_is_away_and_comes_back_without_history_fails_no_request(
    release: InstalledRelease,
) -> None:
    """For longer than the Lease lasts: there is no leader meanwhile, and routers keep the last known fleet."""

    async def leads_nobody() -> bool:
        return not await release.leading()

    held = await release.placements()
    async with release.under_requests():
        await release.server.faults.go_down()
        await until(leads_nobody, what="no orchestrator leads")
        await release.server.faults.come_back()
        began = len(release.server.requests)
        await release.cluster.until(lambda: is_renewed(release, began), within_s=15, what="somebody leads again")
        assert await release.placements() >= held
    assert set((await release.workers()).values()) == {"ready"}


async def test_the_roles_of_the_chart_are_enough(release: InstalledRelease) -> None:
    assert release.server.forbidden == []


async def test_pods_end_by_themselves_with_everything_that_they_started(release: InstalledRelease) -> None:
    assert release.cluster.left == []


async def test_no_pod_wrote_where_a_container_cannot(release: InstalledRelease) -> None:
    written = [path for pod in release.cluster.pods.values() for path in pod.working_folder.iterdir()]
    assert written == []


def on_node(release: InstalledRelease, node: str) -> list[str]:
    pods = release.cluster.pods_of(instance=NAME)
    return [pod["metadata"]["name"] for pod in pods if pod["spec"]["nodeName"] == node and not workloads.is_going(pod)]
