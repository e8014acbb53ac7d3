"""Metrics by adapter: bounded labels, counts that never fall, memory that does not grow with the adapters' number."""

import contextlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from lorafleet.telemetry.adapter_labels import OTHER
from router.processes.aggregate import WorkerProcesses
from router.telemetry.adapter_series import AdapterSeries
from tests.router.doubles import sample_value


class Prometheus:
    """Reads counters as Prometheus does: an increase from one scrape to the next; a lower value is a reset."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self.increase = 0.0

    def scrape(self, text: str) -> dict[str, float]:
        """The routing decisions by labels. Adds what they have grown by, and all of a series that is new."""
        found = {}
        for line in text.splitlines():
            if line.startswith("lora_routing_decisions_total{"):
                labels, _, value = line.rpartition(" ")
                found[labels] = float(value)
        for labels, value in found.items():
            before = self.last.get(labels, 0.0)
            self.increase += value - before if value >= before else value
        # A series that ended is remembered: when it begins again, a lower value is a reset, a higher one an increase.
        self.last |= found
        return found


class Process:
    """One process's series by adapter, with time that tests move."""

    def __init__(self, most_labels: int, most_kept: int = 4096) -> None:
        self.now = 0.0
        self.registry = CollectorRegistry()
        self.series = AdapterSeries(self.registry, most_labels=most_labels, most_kept=most_kept, clock=lambda: self.now)

    def count(self, lora_id: str, times: int = 1) -> None:
        for _ in range(times):
            self.series.of(lora_id).outcomes["success"] += 1

    def page(self) -> str:
        return generate_latest(self.registry).decode()

    def scraped(self) -> str:
        self.series.settle()
        return self.page()


def decisions(text: str, lora_id: str, outcome: str = "success") -> float | None:
    return sample_value(text, "lora_routing_decisions_total", lora_id=lora_id, outcome=outcome)


STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from([*"abcdefg", OTHER]), st.integers(1, 9)), max_size=8),
        st.sampled_from([0, 60, 600]),
        st.integers(0, 2),
    ),
    max_size=12,
)


# The series of `a` ends in the scrape after counts of `a` had to make room.
@example([([(0, "a", 1)], 0, 0), ([(0, "a", 1), (0, "b", 1), (0, "c", 1)], 0, 0)], 1, 1)
@given(STEPS, st.integers(0, 3), st.sampled_from([1, 3, 4096]))
@settings(deadline=None)
def test_a_scraper_sees_each_request_once_whatever_labels_come_and_go(steps, most, kept):
    one, prometheus, counted = Process(most, kept), Prometheus(), 0
    for calls, later_s, _ in steps:
        for _, name, times in calls:
            one.count(name, times)
            counted += times
        one.now += later_s
        found = prometheus.scrape(one.scraped())
        assert len({labels.split(",")[0] for labels in found}) <= most + 1
        assert sum(found.values()) <= counted
        assert prometheus.increase == counted


@contextlib.asynccontextmanager
async def processes(folder, *series: Process):
    """Each process's place among the others of one router."""
    places = [
        WorkerProcesses(folder, slot, metrics=lambda one=one: one.page().encode(), adapters=one.series)
        for slot, one in enumerate(series)
    ]
    for place in places:
        await place.start()
    try:
        yield places
    finally:
        for place in places:
            await place.close()


@given(STEPS)
@settings(deadline=None, max_examples=15)
async def test_a_scraper_sees_each_request_once_whichever_process_answers_it(tmp_path_factory, steps):
    all_of = [Process(2) for _ in range(3)]
    prometheus, counted = Prometheus(), 0
    async with processes(tmp_path_factory.mktemp("place"), *all_of) as places:
        for calls, later_s, asked in steps:
            for number, name, times in calls:
                all_of[number].count(name, times)
                counted += times
            for one in all_of:
                one.now += later_s
            found = prometheus.scrape((await places[asked].metrics()).decode())
            assert len({labels.split(",")[0] for labels in found}) <= 3
            assert prometheus.increase == counted


async def test_an_ended_process_keeps_its_counts_until_their_adapter_loses_its_series(tmp_path):
    one, gone = Process(1), Process(1)
    async with processes(tmp_path, one) as (place,):
        other = WorkerProcesses(tmp_path, 1, metrics=lambda: gone.page().encode(), adapters=gone.series)
        await other.start()
        one.count("a", 2)
        gone.count("a", 3)
        assert decisions((await place.metrics()).decode(), "a") == 5
        await other.close()
        assert decisions((await place.metrics()).decode(), "a") == 5
        for name in ("b", "c"):
            one.count(name, 100)
        text = (await place.metrics()).decode()
        assert (decisions(text, "a"), decisions(text, "c"), decisions(text, OTHER)) == (None, 0, 200)
        one.count("a", 1000)
        one.now += 600
        text = (await place.metrics()).decode()
        one.count("a")
        # Without the three of the ended process: to Prometheus the series began anew.
        assert (decisions(text, "a"), decisions((await place.metrics()).decode(), "a")) == (None, None)
        for _ in range(2):
            one.count("d", 2000)
            one.count("a", 1000)
            one.now += 6000
            text = (await place.metrics()).decode()
        assert decisions(text, "d") == 2000
        one.count("a", 10_000)
        one.count("e", 9_000)
        one.now += 6000
        assert decisions((await place.metrics()).decode(), "a") == 0


def test_the_hit_rate_is_of_the_last_minutes():
    one = Process(1)
    one.count("a")
    one.series.of("a").add_tokens(100, 0)
    assert sample_value(one.scraped(), "lora_cache_hit_rate", lora_id="a") == 0.0
    one.now += 3000
    one.series.of("a").add_tokens(100, 80)
    text = one.scraped()
    assert sample_value(text, "lora_cache_hit_rate", lora_id="a") == pytest.approx(0.8, abs=0.01)
    assert sample_value(text, "lora_prompt_tokens_total", lora_id="a") == 200
    assert sample_value(text, "lora_cached_tokens_total", lora_id="a") == 80


async def test_the_hit_rate_of_several_processes_weighs_them_by_tokens(tmp_path):
    one, two = Process(1), Process(1)
    one.count("a")
    one.series.of("a").add_tokens(100, 100)
    two.series.of("a").add_tokens(300, 0)
    async with processes(tmp_path, one, two) as places:
        for place in places:
            text = (await place.metrics()).decode()
            assert sample_value(text, "lora_cache_hit_rate", lora_id="a") == 0.25


def test_latencies_are_counted_in_cumulative_buckets():
    one = Process(1)
    for seconds in (0.05, 0.3, 0.3, 1000):
        one.series.of("a").observe_latency(seconds)
    text = one.scraped()
    found = [
        sample_value(text, "lora_request_latency_seconds_bucket", lora_id="a", le=le) for le in ("0.1", "0.5", "+Inf")
    ]
    assert found == [1, 3, 4]
    assert sample_value(text, "lora_request_latency_seconds_sum", lora_id="a") == pytest.approx(1000.65)


def test_memory_is_bounded_though_nobody_scrapes():
    one = Process(2, most_kept=50)
    one.count("kept", 10)
    one.scraped()
    for number in range(5000):
        one.count(f"a{number}")
    one.count("kept", 10)
    use = one.series.recent_use()
    text = one.scraped()
    assert len(use.adapters) <= 8
    assert decisions(text, "kept") == 20
    assert sum(v for k, v in Prometheus().scrape(text).items()) == 5020
    one.now += 1e9
    one.scraped()
    assert len(one.series.recent_use().adapters) <= 8
