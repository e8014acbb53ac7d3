"""The chart's pool at zero: real helm, Roles, processes and requests; its first worker is started for them."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.kubernetes import NAME, NAMESPACE, installed, small_fleet
from tests.patience import until

pytestmark = [pytest.mark.asyncio, pytest.mark.fleet]
POOL = f"{NAME}-lorafleet-sim"


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="z", dir="/tmp") as name:  # short: sockets lie in it
        yield Path(name)


async def test_no_request_fails_while_a_pool_goes_to_zero_and_comes_back_for_them(folder: Path) -> None:
    (pool,) = small_fleet(folder / "model")["pools"]
    pool["autoscaling"] = {"enabled": True, "type": "external", "minReplicas": 0, "fromZero": {"startSeconds": 5}}
    async with installed(folder, {"pools": [pool]}) as release:
        server, cluster = release.server, release.cluster

        def replicas() -> int:
            found = server.objects.get("statefulsets", NAMESPACE, POOL)
            assert found is not None
            return int(found["spec"]["replicas"])

        await release.kubectl("scale", f"statefulset/{POOL}", "--replicas=0")
        await cluster.settled()
        assert cluster.pods_of(component="worker") == []
        async with release.under_requests() as sent:
            await until(lambda: sent.answered >= 8 or sent.failed, within_s=60)
            assert (replicas(), sent.failed) == (1, [])
            # The autoscaler's way down, in the middle of requests: they are held, and the pool comes back.
            await release.kubectl("scale", f"statefulset/{POOL}", "--replicas=0")
            before = sent.answered
            await cluster.until(lambda: replicas() == 1, within_s=60, what="the pool is started again")
            await until(lambda: sent.answered >= before + 12 or sent.failed, within_s=60)
        assert server.forbidden == []
        await release.kubectl("scale", f"statefulset/{POOL}", "--replicas=3")
        async with release.under_requests():
            await cluster.settled()
        assert replicas() == 3
