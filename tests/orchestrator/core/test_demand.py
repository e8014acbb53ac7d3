"""Demand: what routers report becomes rates, whatever is lost, repeated or late."""

import pickle
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.demand import ABANDONED_AFTER_S, ENSURE_REPEAT_S, DemandBook
from orchestrator.model.snapshot import WantedReplicas
from orchestrator.model.usage import RequestCounts
from tests.orchestrator.reports import CountingRouter, loaded_name
from tests.properties import examples


def heard(book, *seconds, rate=3, first=0, router=None):
    """One report at each of these seconds, of `request_rate` requests a second since the boot; the router."""
    router = router or CountingRouter()
    for second in seconds:
        count = rate * (second - first)
        router.count(sent=count, work_s=count / 10, prompt_tokens=count * 7)
        assert book.record_report(router.report(seq=second), float(second)) is not None
    return router


def test_constant_traffic_is_measured_after_a_quarter_of_a_window():
    book = DemandBook()
    router = heard(book, *range(1, 20))
    assert book.request_rate("a", 19.0) == pytest.approx(3, rel=0.1)
    heard(book, *range(20, 400), router=router)
    assert book.request_rate("a", 399.0) == pytest.approx(3, rel=0.02)
    assert book.snapshot(399.0).work["a"] == pytest.approx(0.3, rel=0.02)
    totals = book.totals("a")
    assert (totals.sent, totals.prompt_tokens) == (3 * 398, 7 * 3 * 398)


def test_backlog_counts_queued_requests_at_the_adapters_mean_work():
    book = DemandBook()
    router = heard(book, *range(1, 100))
    router.count(sent=300, work_s=30.0)
    book.record_report(router.report(seq=100, waiting={"a": 5}), 100.0)
    other = CountingRouter("r1", "b1")
    book.record_report(other.report(waiting={"a": 2, "new": 1}), 100.0)
    assert book.snapshot(100.0).backlog == {"a": pytest.approx(0.7), "new": pytest.approx(0.1)}
    # It is a state, not a count; and a router's word that has expired is none.
    router.count(sent=303, work_s=30.3)
    book.record_report(router.report(seq=101), 101.0)
    assert book.snapshot(101.0).backlog["a"] == pytest.approx(0.2)
    assert book.snapshot(120.0).backlog == {}


def test_a_rate_fades_by_its_window():
    book = DemandBook(window_s=10)
    heard(book, *range(1, 200))
    assert book.request_rate("a", 209.0) == pytest.approx(book.request_rate("a", 199.0) / 2.71828, rel=0.001)


def test_totals_from_before_our_start_are_no_rate():
    book, router = DemandBook(), CountingRouter()
    router.count(sent=1_000_000)
    book.record_report(router.report(seq=1000), 5.0)
    assert book.request_rate("a", 5.0) == 0
    assert book.totals("a") == RequestCounts()
    router.count(sent=1_000_003)
    book.record_report(router.report(), 6.0)
    assert book.totals("a").sent == 3


def test_a_router_cut_off_for_minutes_does_not_return_as_a_burst():
    steady, gap = DemandBook(), DemandBook()
    heard(steady, *range(1, 601))
    heard(gap, *range(1, 301), 600)
    assert gap.request_rate("a", 600.0) == pytest.approx(steady.request_rate("a", 600.0), rel=0.02)
    assert gap.totals("a").sent == steady.totals("a").sent


def test_a_restarted_router_loses_nothing_and_doubles_nothing():
    book = DemandBook()
    old = heard(book, *range(1, 301))
    before = book.totals("a").sent
    heard(book, *range(302, 400), first=300, router=CountingRouter(boot_id="b1"))
    assert book.totals("a").sent - before == 3 * 99
    assert book.request_rate("a", 399.0) == pytest.approx(3, rel=0.03)
    old.count(sent=10_000)
    assert book.record_report(old.report(seq=301), 401.0) is None  # the old process's last words, late
    assert book.totals("a").sent - before == 3 * 99


def test_an_adapter_omitted_by_a_report_is_not_counted_twice_later():
    book, router = DemandBook(), CountingRouter()
    book.record_report(router.report(), 1.0)
    router.count(sent=49)
    book.record_report(router.report(in_flight={"w0": {loaded_name("a"): 1}}), 2.0)
    router.count(sent=50)
    book.record_report(router.report(), 3.0)
    assert book.snapshot(3.0).in_use == frozenset()
    router.count(sent=51)
    book.record_report(router.report(), 4.0)
    assert book.totals("a").sent == 51


def test_batches_numbered_anew_after_a_boot_count():
    book = DemandBook()
    for boot, counts in (("b0", (0, 50)), ("b1", (4,))):
        router = CountingRouter(boot_id=boot)
        for count in counts:
            router.count(sent=count)
            book.record_report(router.report(), float(router.seq))
    assert book.totals("a").sent == 54


def test_queued_and_refused_requests_count_for_an_unplaced_adapter():
    book, router = DemandBook(), CountingRouter()
    book.record_report(router.report(), 1.0)
    router.count(worker_id="", requests=3, waited_s=4.5)
    book.record_report(router.report(waiting={"a": 1}), 2.0)
    assert book.totals("a") == RequestCounts(requests=3, waited_s=4.5)
    assert book.snapshot(2.0).last_asked_at == {"a": 2.0}


def test_a_running_request_counts_when_it_is_sent_and_not_again_when_it_ends():
    """Also one whose attempt is taken back from an engine, and sent anew."""
    book, router = DemandBook(window_s=1e9), CountingRouter()
    rate = []
    for sent, running in ((0, 0), (0, 2), (1, 1), (1, 0), (1, 1), (2, 0)):
        router.count(sent=sent)
        in_flight = {"w0": {loaded_name("a"): running, "base": 9}} if running else {}
        book.record_report(router.report(in_flight=in_flight), float(router.seq))
        rate.append(book.snapshot(float(router.seq)).habits.get("a", 0.0) * 15e9)
    assert rate == pytest.approx([0, 2, 2, 1, 2, 2], abs=1e-3)
    assert book.totals("a").sent == 2


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_lost_repeated_and_late_reports_change_no_total_and_hardly_a_rate(seed, routers):
    rng = Random(seed)
    clean, rough = DemandBook(), DemandBook()
    late = []
    safe, lossy = ([CountingRouter(f"r{n}") for n in range(routers)] for _ in range(2))
    count = [0] * routers
    for second in range(1, 241):
        for number in range(routers):
            count[number] += rng.randrange(5)
            for router in (safe[number], lossy[number]):
                router.count(sent=count[number], engine_errors=count[number] // 2)
            clean.record_report(safe[number].report(), float(second))
            arrives = second in (1, 240) or rng.random() < 0.7
            # The answer to one that arrives may be lost, too: then its batches come again.
            report = lossy[number].report(is_lost=not arrives or (second < 240 and rng.random() < 0.2))
            if arrives:
                rough.record_report(report, float(second))
                late.append(report)
            if late and rng.random() < 0.3:
                rough.record_report(rng.choice(late), float(second))
    assert rough.totals("a") == clean.totals("a")
    assert rough.request_rate("a", 240.0) == pytest.approx(clean.request_rate("a", 240.0), rel=0.1)


def test_a_waiting_request_turns_a_repair_into_a_request():
    book = DemandBook()
    book.add_want("a", WantedReplicas(replicas=1, may_evict=False, is_repair=True), until=60.0)
    assert book.add_want("a", WantedReplicas(replicas=1), until=60.0)
    assert book.open_wants(0.0)["a"] == WantedReplicas(replicas=1)
    assert not book.add_want("a", replace(WantedReplicas(replicas=1), is_repair=True), until=60.0)


def test_repeated_asking_keeps_the_turn_and_a_repair_gives_none():
    book = DemandBook()
    book.add_want("a", WantedReplicas(replicas=1, is_repair=True, since=10.0), until=70.0)
    assert book.add_want("a", WantedReplicas(replicas=1, since=20.0), until=80.0)
    assert not book.add_want("a", WantedReplicas(replicas=1, since=30.0), until=90.0)
    assert not book.add_want("a", WantedReplicas(replicas=1, is_repair=True, since=40.0), until=100.0)
    assert book.open_wants(40.0)["a"].since == 20.0
    book.drop_want("a")
    book.add_want("a", WantedReplicas(replicas=1, since=50.0), until=110.0)
    assert book.open_wants(50.0)["a"].since == 50.0


def test_waiting_tenants_are_kept_and_each_started_load_is_their_turn():
    book = DemandBook()
    book.add_want("a", WantedReplicas(replicas=1, since=10.0, tenants=frozenset({"acme"})), until=70.0)
    assert book.add_want("a", WantedReplicas(replicas=1, since=11.0, tenants=frozenset({"", "bolt"})), until=71.0)
    assert not book.add_want("a", WantedReplicas(replicas=1, since=12.0, tenants=frozenset({"acme"})), until=72.0)
    assert book.open_wants(12.0)["a"].tenants == {"", "acme", "bolt"}
    book.record_load_started("a", 13.0)
    book.record_load_started("never asked for", 14.0)
    book.drop_want("a")
    book.add_want("b", WantedReplicas(replicas=1, since=15.0, tenants=frozenset({"bolt"})), until=75.0)
    book.record_load_started("b", 16.0)
    assert book.snapshot(17.0).last_load_at == {"": 13.0, "acme": 13.0, "bolt": 16.0}
    assert book.snapshot(13.0 + 3600.0).last_load_at == {"bolt": 16.0}


def test_a_want_that_is_not_repeated_counts_as_abandoned():
    book = DemandBook()
    book.add_want("a", WantedReplicas(replicas=1, since=10.0), until=70.0)
    book.add_want("a", WantedReplicas(replicas=1, since=12.0), until=72.0)
    assert book.open_wants(12.0 + ABANDONED_AFTER_S)["a"] == WantedReplicas(replicas=1, since=10.0)
    (left,) = book.snapshot(12.1 + ABANDONED_AFTER_S).wants.values()
    assert (left.is_abandoned, left.is_waited_for) == (True, False)
    assert not book.add_want("a", WantedReplicas(replicas=1, since=30.0), until=90.0)
    assert book.open_wants(30.0)["a"] == WantedReplicas(replicas=1, since=10.0)
    book.mark_abandoned("a")
    assert book.open_wants(30.0)["a"].is_abandoned
    book.add_want("a", WantedReplicas(replicas=1, since=31.0), until=91.0)
    assert not book.open_wants(31.0)["a"].is_abandoned
    book.mark_abandoned("never asked for")
    assert book.open_wants(31.0).keys() == {"a"}
    assert ABANDONED_AFTER_S > 2 * ENSURE_REPEAT_S


def figures(book, now):
    """Of every adapter: rates, work, habits and surges, summed."""
    seen = book.snapshot(now)
    return [sum(part.values()) for part in (seen.rates, seen.work, seen.habits, seen.surges)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 9)), max_size=20))
def test_demand_follows_a_published_name_and_none_is_lost_or_made(publishes):
    """(the version that the name points at, seconds until then, requests a second meanwhile) of each publish."""
    named, unnamed = DemandBook(), DemandBook()
    counts, now, current, router = [0, 0, 0, 0], 1.0, "n/v0", CountingRouter()
    first = router.report()
    for book in (named, unnamed):
        book.record_report(first, now)
    named.follow_names({"n": current})
    for version, seconds, rate in publishes:
        now += seconds
        counts[int(current[-1])] += rate * seconds
        for i, count in enumerate(counts):
            router.count(f"n/v{i}", sent=count, work_s=count / 10)
        report = router.report()
        for book in (named, unnamed):
            book.record_report(report, now)
        current = f"n/v{version}"
        named.follow_names({"n": current})
        assert figures(named, now) == pytest.approx(figures(unnamed, now))
        hot = [lora_id for lora_id, per_s in named.snapshot(now).rates.items() if per_s > 1e-9]
        assert set(hot) <= {current}
        assert [named.totals(f"n/v{i}").sent for i in range(4)] == pytest.approx(counts), "who was asked"


def test_a_superseded_version_has_the_demand_of_those_who_still_ask_for_it():
    book = DemandBook()
    router = heard(book, *range(1, 100))
    book.follow_names({"n": "a"})
    book.follow_names({"n": "b"})
    assert (book.request_rate("a", 99.0), book.request_rate("b", 99.0)) == (0.0, pytest.approx(3, rel=0.1))
    heard(book, *range(100, 400), router=router)
    assert book.request_rate("a", 399.0) == pytest.approx(3, rel=0.05)
    assert book.request_rate("b", 399.0) < 0.05
    book.follow_names({})
    book.follow_names({"n": "b"})
    assert book.request_rate("a", 399.0) == pytest.approx(3, rel=0.05), "a name that is new hands nothing over"


def test_thousands_of_versions_leave_nothing_behind():
    book, size, router = DemandBook(), {}, CountingRouter()
    for version in range(4_000):
        now, lora_id = 5.0 * version, f"n/v{version}"
        router.total.clear()
        router.count(lora_id, sent=3, requests=4)
        recent = {f"n/v{v}": 5.0 for v in range(max(0, version - 5), version + 1)}
        book.record_report(router.report(asked_age_s=recent), now)
        book.add_want(lora_id, WantedReplicas(replicas=1, since=now), now + 60)
        book.follow_names({"n": lora_id})
        if version >= 5:
            book.forget_adapter(f"n/v{version - 5}")
        if version % 100 == 0:
            book.snapshot(now)
            size[version] = len(pickle.dumps(book))
    later = [bytes_ for version, bytes_ in size.items() if version > 2000]
    assert max(later) < 1.2 * max(bytes_ for version, bytes_ in size.items() if version <= 2000)
