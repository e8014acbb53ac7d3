"""How long a failure counts."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.failures import (
    ANYWHERE,
    ENGINE_REFUSALS,
    FINAL_CODES,
    MOST_TRIED,
    FailureBook,
    failure_everywhere,
    failure_scope,
)
from orchestrator.model.snapshot import AdapterFailure, ObservedFleet, ObservedWorker, ReportedAdapter
from tests.registered import registered

PAIR = ("a", "w0")
ENGINE_REFUSED = "adapter_refused"


def fail(book, now, pair=PAIR, *, first_s=60.0, most_s=3600.0, least_s=0.0, seed=0):
    more = {"first_s": first_s, "most_s": most_s, "least_s": least_s, "now": now, "rng": Random(seed)}
    return book.record_failure(pair, "source_failed", "no", **more)


def test_each_repeated_failure_blocks_twice_as_long_up_to_a_limit():
    book, now, lasted = FailureBook(), 0.0, []
    for _ in range(10):
        until = fail(book, now).until
        lasted.append(until - now)
        now = until
    assert lasted[:3] == pytest.approx([lasted[0], lasted[0] * 2, lasted[0] * 4])
    assert lasted[-1] == pytest.approx(lasted[0] * 60)


def test_a_success_or_a_long_time_ends_the_streak():
    book = FailureBook()
    first = fail(book, 0.0).until
    fail(book, first)
    book.record_success(PAIR)
    assert book.by_pair == {}
    assert fail(book, 1000.0).until == 1000.0 + first
    book.drop_expired(5000.0)
    assert fail(book, 5000.0).until == 5000.0 + first


def test_a_streak_lasts_twice_the_wait_and_is_per_adapter():
    book = FailureBook()
    lasts_s = fail(book, 0.0).until
    fail(book, 0.0, ("b", "w0"))
    book.drop_expired(lasts_s + 59.0)
    assert (book.by_pair, book.failed_ids) == ({}, set())
    book.forget_adapter("b")
    assert fail(book, lasts_s + 59.0).until == lasts_s + 59.0 + 2 * lasts_s
    assert fail(book, 1000.0, ("b", "w0")).until == 1000.0 + lasts_s


STEPS = st.tuples(
    st.sampled_from(["add", "add", "succeeded", "forget", "expire"]), st.sampled_from("ab"), st.sampled_from("xyz")
)


@given(st.lists(STEPS, max_size=40))
def test_an_adapters_newest_failure_and_count_include_only_current_ones(steps):
    book, known, now = FailureBook(), {}, 0.0
    for step, lora_id, worker in steps:
        now += 20.0
        pair = (lora_id, worker)
        if step == "add":
            known[pair] = fail(book, now, pair)
        elif step == "succeeded":
            book.record_success(pair)
            known.pop(pair, None)
        elif step == "forget":
            book.forget_adapter(lora_id)
            known = {pair: failure for pair, failure in known.items() if pair[0] != lora_id}
        else:
            book.drop_expired(now)
            known = {pair: failure for pair, failure in known.items() if failure.until > now}
        assert book.by_pair == known
        assert book.failed_ids == {lora_id for lora_id, _ in known}
        for name in "ab":
            counting = [failure for (n, _), failure in known.items() if n == name and failure.until > now]
            assert book.blocked_worker_count(name, now) == len(counting)
            assert book.newest_failure(name, now) == max(counting, key=lambda failure: failure.until, default=None)


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_jitter_only_shortens_an_expiry_by_at_most_a_quarter(seed, times):
    book, now = FailureBook(), 100.0
    for n in range(times):
        until = fail(book, now, seed=seed).until
        nominal = min(60.0 * 2**n, 3600.0)
        assert 0.75 * nominal <= until - now <= nominal
        now = until


def test_a_workers_retry_after_is_respected():
    assert fail(FailureBook(), 0.0, least_s=500.0).until == 500.0


def test_a_fleet_failure_blocks_every_worker_until_the_adapter_is_forgotten():
    book = FailureBook()
    fail(book, 0.0, ("a", ANYWHERE))
    fail(book, 0.0, ("b", "w1"))
    seen = ObservedFleet(failures=book.by_pair)
    assert seen.current_failure("a", "w7", 1.0) is not None
    assert seen.current_failure("b", "w7", 1.0) is None
    assert book.fleet_failure("a", 1.0) is not None
    assert book.fleet_failure("a", 100.0) is None
    book.forget_adapter("a")
    assert list(book.by_pair) == [("b", "w1")]
    assert book.failed_ids == {"b"}


BAD = registered("a", source="s", digest="d", base_model="m", rank=8)
GOOD_THERE = ReportedAdapter(lora_id="a", digest="d", engine_name="a", state="ready", since=0.0)


def one(name, failed=None, *, until=60.0, **shape):
    worker = ObservedWorker(id=name, **{"state": "ready", "base_model": "m", "slots": 4, "max_lora_rank": 8} | shape)
    return worker, AdapterFailure(until=until, code=failed, message="no") if failed else None


@pytest.mark.parametrize("code", sorted(ENGINE_REFUSALS))
def test_two_engines_that_refuse_or_do_not_use_an_adapter_quarantine_it(code):
    fleet = [one("w0", code), one("w1", code)]
    failures = {("a", worker.id): failure for worker, failure in fleet}
    observed = ObservedFleet(workers={worker.id: worker for worker, _ in fleet}, failures=failures)
    assert ENGINE_REFUSED in ENGINE_REFUSALS
    assert failure_scope(BAD, observed, now=30.0) == "adapter"


@pytest.mark.parametrize(
    ("others", "blame"),
    [
        ([], "fleet"),
        ([one("w1")], "worker"),
        ([one("w1", ENGINE_REFUSED)], "adapter"),
        ([one("w1", ENGINE_REFUSED), one("w2")], "adapter"),
        ([one("w1", ENGINE_REFUSED, until=10.0)], "worker"),
        ([one("w1", "engine_unreachable")], "fleet"),
        ([one("w1", adapters={"a": GOOD_THERE})], "worker"),
        ([one("w1", ENGINE_REFUSED), one("w2", state="cordoned", adapters={"a": GOOD_THERE})], "worker"),
        ([one("w1", ENGINE_REFUSED), one("w2", adapters={"a": replace(GOOD_THERE, digest="other")})], "adapter"),
        ([one("w1", ENGINE_REFUSED), one("w2", adapters={"a": replace(GOOD_THERE, state="failed")})], "adapter"),
        ([one("w1", state="cordoned")], "fleet"),
        ([one("w1", base_model="other")], "fleet"),
        ([one("w1", max_lora_rank=4)], "fleet"),
        ([one("w1", slots=0)], "fleet"),
    ],
)
def test_one_refusal_blocks_its_worker_and_two_quarantine_the_adapter(others, blame):
    fleet = [one("w0", ENGINE_REFUSED), *others]
    failures = {("a", worker.id): failure for worker, failure in fleet if failure is not None}
    observed = ObservedFleet(workers={worker.id: worker for worker, _ in fleet}, failures=failures)
    assert failure_scope(BAD, observed, 10.0) == blame


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "source_not_found", "digest_mismatch", "source_failed", "disk_full"]),
            st.sampled_from([10.0, 20.0, 60.0]),
            st.sampled_from([{}, {}, {"state": "cordoned"}, {"slots": 0}, {"base_model": "other"}]),
        ),
        max_size=6,
    ),
    st.sampled_from([None, None, "loading", "inspecting"]),
)
def test_a_failure_is_everywhere_once_no_worker_that_takes_the_adapter_may_try(shapes, under_way):
    fleet = [one(f"w{n}", code, until=until, **shape) for n, (code, until, shape) in enumerate(shapes)]
    observed = ObservedFleet(
        workers={worker.id: worker for worker, _ in fleet},
        failures={("a", worker.id): failure for worker, failure in fleet if failure},
        load_began={("a", "w0"): 0.0} if under_way == "loading" else {},
        inspecting={"a": "w0"} if under_way == "inspecting" else {},
    )
    takers = [(code, until) for code, until, shape in shapes if not shape]
    current = [(code, until) for code, until in takers if code and until > 15.0]
    final = [until for code, until in current if code in FINAL_CODES]
    passing = [until for code, until in current if code not in FINAL_CODES]
    found = failure_everywhere(BAD, observed, now=15.0)
    if under_way or not current or (len(final) < MOST_TRIED and len(current) < len(takers)):
        assert found is None
    elif len(final) >= MOST_TRIED or not passing:
        assert (found.until, found.code in FINAL_CODES) == (min(final), True)
    else:
        assert (found.until, found.code in FINAL_CODES) == (min(passing), False)
