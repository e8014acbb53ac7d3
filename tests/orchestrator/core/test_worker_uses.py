"""Uses of adapters are told to each worker once, whatever answers are lost."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import worker_uses
from orchestrator.core.worker_uses import WorkerUses
from orchestrator.model.usage import CountBatch, CountedRow, RequestCounts
from tests.properties import examples


def batch(*rows: tuple[str, str, int]) -> CountBatch:
    """Requests sent, each as worker, adapter and number."""
    return CountBatch(
        number=0,
        rows=tuple(CountedRow(worker=who, adapter=what, counts=RequestCounts(sent=count)) for who, what, count in rows),
    )


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.sampled_from(["a/v1", "b/v1"]), st.integers(1, 5), st.booleans()), max_size=20))
def test_a_worker_has_every_request_once_whichever_answers_are_lost(steps: list[tuple[str, int, bool]]) -> None:
    uses, seen, counted, sent = WorkerUses(), 0, Counter[str](), Counter[str]()
    uses.untold("w0", 0)
    for adapter, count, is_lost in [*steps, ("a/v1", 1, False)]:
        uses.add([batch(("w0", adapter, count), ("w1", adapter, 50))])
        sent[adapter] += count
        number, told = uses.untold("w0", seen)
        if not is_lost and number != seen:
            counted.update(told)
            seen = number
    assert counted == sent
    assert uses.untold("w0", seen) == (seen, {})


def test_requests_of_the_base_model_and_of_unknown_workers_are_told_to_nobody() -> None:
    uses = WorkerUses()
    uses.untold("w0", 0)
    uses.add([batch(("w0", "", 3), ("w9", "a/v1", 3), ("", "a/v1", 3))])
    assert uses.untold("w0", 0) == (0, {})
    assert uses.untold("w9", 0) == (0, {})


def test_workers_and_adapters_that_are_remembered_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(worker_uses, "MOST_WORKERS", 2)
    monkeypatch.setattr(worker_uses, "MOST_ADAPTERS", 2)
    uses = WorkerUses()
    for worker_id in ("w0", "w1", "w2"):
        uses.untold(worker_id, 0)
    uses.add([batch(*((worker_id, adapter, 1) for worker_id in ("w0", "w1") for adapter in ("a", "b", "c")))])
    assert uses.untold("w1", 0) == (1, {"a": 1, "b": 1})
    assert uses.untold("w0", 0) == (0, {})
