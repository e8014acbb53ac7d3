"""Demand: what routers report becomes rates, whatever is lost, repeated or late."""

import pickle
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.demand import ABANDONED_AFTER_S, ENSURE_REPEAT_S, AdapterQueueing, AdapterUsage, DemandBook
from orchestrator.model.snapshot import TrafficFigures, WantedReplicas
from tests.properties import examples


def use(requests, lora_id="a", in_flight=0, **more):
    return AdapterUsage(
        lora_id=lora_id, worker_id="w0", engine_name=f"{lora_id}@1", requests=requests, in_flight=in_flight, **more
    )


def heard(book, *seconds, rate=3, boot="b0", first=0, router="r0"):
    """One report at each of these seconds, of `request_rate` requests a second since the boot."""
    for second in seconds:
        count = rate * (second - first)
        book.record_report(
            router, boot, second, 0, [use(count, work_s=count / 10, prompt_tokens=count * 7)], float(second)
        )


def test_constant_traffic_is_measured_after_a_quarter_of_a_window():
    book = DemandBook()
    heard(book, *range(1, 20))
    assert book.request_rate("a", 19.0) == pytest.approx(3, rel=0.1)
    heard(book, *range(20, 400))
    assert book.request_rate("a", 399.0) == pytest.approx(3, rel=0.02)
    flow = book.traffic_rates("a", 399.0)
    assert (flow.work_s, flow.prompt_tokens) == (pytest.approx(0.3, rel=0.02), pytest.approx(21, rel=0.02))
    assert book.snapshot(399.0).work["a"] == pytest.approx(0.3, rel=0.02)


def test_backlog_counts_queued_requests_at_the_adapters_mean_work():
    book = DemandBook()
    heard(book, *range(1, 100))
    book.record_report(
        "r0", "b0", 100, 0, [use(300, work_s=30.0)], 100.0, holds=[AdapterQueueing(lora_id="a", waiting=5)]
    )
    book.record_report(
        "r1",
        "b1",
        1,
        0,
        [],
        100.0,
        holds=[AdapterQueueing(lora_id="a", waiting=2), AdapterQueueing(lora_id="new", waiting=1)],
    )
    assert book.snapshot(100.0).backlog == {"a": pytest.approx(0.7), "new": pytest.approx(0.1)}
    # It is a state, not a count; and a router's word that has expired is none.
    book.record_report("r0", "b0", 101, 0, [use(303, work_s=30.3)], 101.0, holds=[AdapterQueueing(lora_id="a")])
    assert book.snapshot(101.0).backlog["a"] == pytest.approx(0.2)
    assert book.snapshot(120.0).backlog == {}


def test_a_rate_fades_by_its_window():
    book = DemandBook(window_s=10)
    heard(book, *range(1, 200))
    assert book.request_rate("a", 209.0) == pytest.approx(book.request_rate("a", 199.0) / 2.71828, rel=0.001)


def test_totals_from_before_our_start_are_no_rate():
    book = DemandBook()
    book.record_report("r0", "b0", 1000, 0, [use(1_000_000)], 5.0)
    assert book.request_rate("a", 5.0) == 0
    assert book.traffic_totals("a") == TrafficFigures()
    book.record_report("r0", "b0", 1001, 0, [use(1_000_003)], 6.0)
    assert book.traffic_totals("a").requests == 3


def test_a_router_cut_off_for_minutes_does_not_return_as_a_burst():
    steady, gap = DemandBook(), DemandBook()
    heard(steady, *range(1, 601))
    heard(gap, *range(1, 301), 600)
    assert gap.request_rate("a", 600.0) == pytest.approx(steady.request_rate("a", 600.0), rel=0.02)
    assert gap.traffic_totals("a").requests == steady.traffic_totals("a").requests


def test_a_restarted_router_loses_nothing_and_doubles_nothing():
    book = DemandBook()
    heard(book, *range(1, 301))
    before = book.traffic_totals("a").requests
    heard(book, *range(302, 400), boot="b1", first=300)
    assert book.traffic_totals("a").requests - before == 3 * 99
    assert book.request_rate("a", 399.0) == pytest.approx(3, rel=0.03)
    heard(book, 301)  # the old process's last words, late
    assert book.traffic_totals("a").requests - before == 3 * 99


def test_an_adapter_omitted_by_a_report_is_not_counted_twice_later():
    book = DemandBook()
    book.record_report("r0", "b0", 1, 0, [], 1.0)
    book.record_report("r0", "b0", 2, 0, [use(50, in_flight=1)], 2.0)
    book.record_report("r0", "b0", 3, 0, [], 3.0)
    assert book.snapshot(3.0).in_use == frozenset()
    book.record_report("r0", "b0", 4, 0, [use(51)], 4.0)
    assert book.traffic_totals("a").requests == 51


def test_a_falling_count_has_restarted_from_zero():
    book = DemandBook()
    for seq, count in enumerate((0, 50, 4)):
        book.record_report("r0", "b0", seq, 0, [use(count)], float(seq))
    assert book.traffic_totals("a").requests == 54


def test_queued_and_refused_requests_count_for_an_unplaced_adapter():
    book = DemandBook()
    book.record_report("r0", "b0", 1, 0, [], 1.0)
    book.record_report("r0", "b0", 2, 0, [], 2.0, holds=[AdapterQueueing(lora_id="a", held=3, hold_s=4.5, sheds=1)])
    assert book.traffic_totals("a") == TrafficFigures(held=3, hold_s=4.5, sheds=1)


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_lost_repeated_and_late_reports_change_no_total_and_hardly_a_rate(seed, routers):
    rng = Random(seed)
    clean, rough = DemandBook(), DemandBook()
    reports = []
    for router in range(routers):
        count = 0
        for second in range(1, 241):
            count += rng.randrange(5)
            reports.append((second, (f"r{router}", "b0", second, 0, [use(count, errors=count // 2)])))
    reports.sort(key=lambda report: report[0])
    late = []
    for second, report in reports:
        clean.record_report(*report, float(second))
        if second in (1, 240) or rng.random() < 0.7:
            rough.record_report(*report, float(second))
            late.append(report)
        if rng.random() < 0.3:
            rough.record_report(*rng.choice(late or [report]), float(second))
    assert rough.traffic_totals("a") == clean.traffic_totals("a")
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
    counts, now, current = [0, 0, 0, 0], 1.0, "n/v0"
    for book in (named, unnamed):
        book.record_report("r0", "b0", 0, 0, [], now)
    named.follow_names({"n": current})
    for seq, (version, seconds, rate) in enumerate(publishes, 1):
        now += seconds
        counts[int(current[-1])] += rate * seconds
        uses = [use(count, lora_id=f"n/v{i}", work_s=count / 10) for i, count in enumerate(counts) if count]
        for book in (named, unnamed):
            book.record_report("r0", "b0", seq, 0, uses, now)
        current = f"n/v{version}"
        named.follow_names({"n": current})
        assert figures(named, now) == pytest.approx(figures(unnamed, now))
        hot = [lora_id for lora_id, per_s in named.snapshot(now).rates.items() if per_s > 1e-9]
        assert set(hot) <= {current}
        assert [named.traffic_totals(f"n/v{i}").requests for i in range(4)] == pytest.approx(counts), "who was asked"


def test_a_superseded_version_has_the_demand_of_those_who_still_ask_for_it():
    book = DemandBook()
    heard(book, *range(1, 100))
    book.follow_names({"n": "a"})
    book.follow_names({"n": "b"})
    assert (book.request_rate("a", 99.0), book.request_rate("b", 99.0)) == (0.0, pytest.approx(3, rel=0.1))
    heard(book, *range(100, 400))
    assert book.request_rate("a", 399.0) == pytest.approx(3, rel=0.05)
    assert book.request_rate("b", 399.0) < 0.05
    book.follow_names({})
    book.follow_names({"n": "b"})
    assert book.request_rate("a", 399.0) == pytest.approx(3, rel=0.05), "a name that is new hands nothing over"


def test_thousands_of_versions_leave_nothing_behind():
    book, size = DemandBook(), {}
    for version in range(4_000):
        now, lora_id = 5.0 * version, f"n/v{version}"
        recent = [use(3, lora_id=f"n/v{v}", last_dispatch_age_s=5.0) for v in range(max(0, version - 5), version + 1)]
        book.record_report("r0", "b0", version, 0, recent, now, holds=[AdapterQueueing(lora_id=lora_id, held=1)])
        book.add_want(lora_id, WantedReplicas(replicas=1, since=now), now + 60)
        book.follow_names({"n": lora_id})
        if version >= 5:
            book.forget_adapter(f"n/v{version - 5}")
        if version % 100 == 0:
            book.snapshot(now)
            size[version] = len(pickle.dumps(book))
    later = [bytes_ for version, bytes_ in size.items() if version > 2000]
    assert max(later) < 1.2 * max(bytes_ for version, bytes_ in size.items() if version <= 2000)
