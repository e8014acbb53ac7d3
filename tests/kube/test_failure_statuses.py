"""Failures of adapters in their objects' status and Events."""

from orchestrator.configmaps.events import KubeEvents
from orchestrator.configmaps.failure_statuses import FailureStatuses
from tests.patience import until
from tests.registered import changed

SQL = {"lora_id": "sql/v1", "source": "hf://acme/sql"}
WHY = "source_not_found: hf://acme/sql: no such repository"


class StatusBench:
    """A seat's verdicts, with what failed as the test says."""

    def __init__(self, instance):
        self.failed = {}
        self.events = KubeEvents(instance.kube, namespace=instance.kube.namespace, reporter="test")
        self.warned = []
        self.events.warn = lambda _about, reason, message: self.warned.append((reason, message))
        self.statuses = FailureStatuses(
            instance.backend,
            self.events,
            adapters=lambda: instance.store.adapters,
            failed=lambda: self.failed,
            is_ready=lambda _lora_id: False,
        )
        self.update = self.statuses.update


async def test_a_failure_is_shown_once_and_until_the_adapter_is_usable(instances, manifests):
    instance = await instances.lead()
    judged = StatusBench(instance)
    await manifests.apply("my-sql", SQL)
    await manifests.said("my-sql", "accepted")
    judged.failed = {"sql/v1": WHY, "nobody/v1": WHY}
    for _ in range(3):
        judged.update()
    assert judged.warned == [("SourceNotFound", f"sql/v1 failed its checks: {WHY}")]
    await manifests.said("my-sql", f"failed: {WHY}")
    judged.failed = {}  # tried again, and not yet over
    judged.update()
    await instances.close(instance)

    after = await instances.lead()
    judged = StatusBench(after)
    judged.update()
    await after.store.wait_durable()
    assert await manifests.status("my-sql") == f"failed: {WHY}"
    known = after.store.adapters["sql/v1"]
    after.store.put_adapter(changed(known, digest="d" * 64, rank=8, base_model="tiny", size_bytes=7))
    judged.update()

    async def is_verified():
        return await manifests.status("my-sql") == "accepted, and verified"

    await until(is_verified)
    assert judged.warned == []


async def test_a_refused_edit_is_shown_before_a_failure(instances, manifests):
    instance = await instances.lead()
    judged = StatusBench(instance)
    await manifests.apply("my-sql", SQL)
    await manifests.said("my-sql", "accepted")
    await manifests.apply("my-sql", SQL | {"source": "hf://acme/other"})
    await manifests.said("my-sql", "refused: ")
    judged.failed = {"sql/v1": WHY}
    judged.update()
    assert judged.warned == []
    assert (await manifests.status("my-sql")).startswith("refused: ")
