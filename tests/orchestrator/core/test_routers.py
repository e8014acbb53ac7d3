"""Routers by their last reports."""

from orchestrator.core.routers import RouterBook
from tests.orchestrator.reports import CountingRouter


def test_router_queue_reports_expire_and_the_longest_counts():
    book, first, second = RouterBook(), CountingRouter("r0"), CountingRouter("r1")
    book.record(first.report(waits_s={"w0": 2.0}, in_flight={"w0": {"a": 1, "b": 2}}), 0.0)
    told = {"waits_s": {"w0": 5.0, "w1": 1.0}, "in_flight": {"w0": {"a": 4}, "w1": {"a": 1}}}
    book.record(second.report(**told), 4.0)
    assert (book.wait_s("w0", 4.0), book.wait_s("w1", 4.0)) == (5.0, 1.0)
    assert (book.in_flight_at("w0", 4.0), book.in_flight_at("w1", 4.0), book.in_flight_at("w2", 4.0)) == (7, 1, 0)
    book.record(second.report(), 5.0)
    assert (book.wait_s("w0", 5.0), book.in_flight_at("w0", 5.0)) == (2.0, 3)
    assert (book.wait_s("w0", 10.5), book.in_flight_at("w0", 10.5)) == (0.0, 0)


def test_a_boot_of_before_changes_nothing_however_late_it_speaks():
    book, old, new = RouterBook(), CountingRouter("r0", "b0"), CountingRouter("r0", "b1")
    for router in (old, new):
        router.count(sent=1)
        assert len(book.record(router.report(), 1.0).batches) == 1
    old.count(sent=5)
    assert book.record(old.report(), 2.0) is None
    assert book.by_id["r0"].report.boot_id == "b1"


def test_routers_are_bounded_and_forgotten_after_an_hour():
    book = RouterBook()
    for number in range(1_100):
        book.record(CountingRouter(f"r{number}").report(), float(number))
    assert (len(book.by_id), "r99" in book.by_id, "r1099" in book.by_id) == (1000, False, True)
    book.drop_old(3_700.0)
    assert "r100" not in book.by_id
    assert "r101" in book.by_id
