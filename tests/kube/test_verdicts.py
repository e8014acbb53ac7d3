"""What becomes of an adapter after its object was taken in, as the object says it."""

from dataclasses import replace

from orchestrator.configmaps.events import KubeEvents
from orchestrator.configmaps.verdicts import FailureStatuses
from tests.patience import until

SQL = {"lora_id": "sql/v1", "source": "hf://acme/sql"}
WHY = "source_not_found: hf://acme/sql: no such repository"


class StatusBench:
    """A seat's verdicts, with what failed as the test says."""

    def __init__(self, seat):
        self.failed = {}
        self.notices = KubeEvents(seat.kube, namespace=seat.kube.namespace, reporter="test")
        self.warned = []
        self.notices.warn = lambda _about, reason, message: self.warned.append((reason, message))
        self.verdicts = FailureStatuses(
            seat.backend,
            self.notices,
            adapters=lambda: seat.store.adapters,
            failed=lambda: self.failed,
            is_ready=lambda _lora_id: False,
        )
        self.turn = self.verdicts.turn


async def test_a_failure_is_told_once_and_stands_until_the_adapter_can_be_used(seats, people):
    seat = await seats.lead()
    judged = StatusBench(seat)
    await people.apply("my-sql", SQL)
    await people.said("my-sql", "accepted")
    judged.failed = {"sql/v1": WHY, "nobody/v1": WHY}
    for _ in range(3):
        judged.turn()
    assert judged.warned == [("SourceNotFound", f"sql/v1 failed its checks: {WHY}")]
    await people.said("my-sql", f"failed: {WHY}")
    judged.failed = {}  # tried again, and not yet over
    judged.turn()
    await seats.close(seat)

    after = await seats.lead()
    judged = StatusBench(after)
    judged.turn()
    await after.store.saved()
    assert await people.status("my-sql") == f"failed: {WHY}"
    known = after.store.adapters["sql/v1"]
    after.store.put_adapter(replace(known, digest="d" * 64, rank=8, base_model="tiny", size_bytes=7))
    judged.turn()

    async def is_verified():
        return await people.status("my-sql") == "accepted, and verified"

    await until(is_verified)
    assert judged.warned == []


async def test_an_edit_that_is_refused_is_said_before_a_failure(seats, people):
    seat = await seats.lead()
    judged = StatusBench(seat)
    await people.apply("my-sql", SQL)
    await people.said("my-sql", "accepted")
    await people.apply("my-sql", SQL | {"source": "hf://acme/other"})
    await people.said("my-sql", "refused: ")
    judged.failed = {"sql/v1": WHY}
    judged.turn()
    assert judged.warned == []
    assert (await people.status("my-sql")).startswith("refused: ")
