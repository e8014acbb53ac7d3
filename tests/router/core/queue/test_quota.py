"""Limits of one key, held against a list of everything that was ever granted."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import StreamingResponse
from structlog.testing import capture_logs

from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.key_files import hash_key
from orchestrator.model.limits import AccountLimits
from router.core.errors import RateLimited
from router.core.queue.account import AccountState
from router.core.queue.quota import Quotas, duration_text
from router.processes import shared_quotas
from router.processes.shared_quotas import SharedQuotas, shared_memory
from tests.patience import until
from tests.properties import examples
from tests.router.core.queue.limited import of_key, of_tenant
from tests.router.doubles import BASE, EngineDouble, chunk, echo, fleet


def refused(quotas, limits, now, tokens=0, key="k"):
    with pytest.raises(RateLimited) as exc:
        quotas.take(of_key(key, limits), now, tokens)
    return exc.value


def test_a_minutes_requests_may_come_at_once_and_then_one_after_another():
    quotas, limits = Quotas(), AccountLimits(requests_per_minute=6)
    for _ in range(6):
        quotas.take(of_key("k", limits), 100.0)
    error = refused(quotas, limits, 100.0)
    assert (error.limit, error.status, error.code) == ("requests_per_minute", 429, "rate_limited")
    assert error.retry_after_s == pytest.approx(10.0)
    assert "6 requests per minute" in str(error)
    refused(quotas, limits, 109.0)
    quotas.take(of_key("k", limits), 110.0)
    refused(quotas, limits, 110.0)
    quotas.take(of_key("other", limits), 110.0)


def test_what_is_refused_is_not_counted():
    quotas, limits = Quotas(), AccountLimits(requests_per_minute=2, tokens_per_minute=100)
    quotas.take(of_key("k", limits), 0.0, 60)
    for _ in range(50):
        assert refused(quotas, limits, 0.0, 60).limit == "tokens_per_minute"
    quotas.take(of_key("k", limits), 0.0, 40)
    assert refused(quotas, limits, 0.0).limit == "requests_per_minute"


def test_answers_are_charged_when_they_are_over_and_a_debt_is_paid_off_first():
    quotas, limits = Quotas(), AccountLimits(tokens_per_minute=600)
    granted = quotas.take(of_key("k", limits), 0.0, 100)
    quotas.settle(granted, 1.0, completion_tokens=1100)
    quotas.settle(granted, 1.0, completion_tokens=1100)
    error = refused(quotas, limits, 1.0)
    assert error.retry_after_s == pytest.approx(59.1, abs=0.2)
    assert error.headers["x-ratelimit-remaining-tokens"] == "0"
    quotas.take(of_key("k", limits), 1.0 + error.retry_after_s)


def test_a_prompt_is_charged_once_it_is_known():
    quotas, limits = Quotas(), AccountLimits(tokens_per_minute=100)
    granted = quotas.take(of_key("k", limits), 0.0)
    quotas.charge(granted, 90, 0.0)
    second = quotas.take(of_key("k", limits), 0.0)
    with pytest.raises(RateLimited):
        quotas.charge(second, 20, 0.0)
    quotas.settle(second, 0.0)
    quotas.settle(granted, 0.0, prompt_tokens=0)  # no engine ever saw it
    quotas.take(of_key("k", limits), 0.0, 100)


def test_what_the_engine_counted_of_a_prompt_is_what_it_costs():
    quotas, limits = Quotas(), AccountLimits(tokens_per_minute=100)
    for prompt, counted in ((0, 20), (30, 10), (10, None)):
        granted = quotas.take(of_key("k", limits), 0.0, prompt)
        quotas.settle(granted, 0.0, completion_tokens=5, prompt_tokens=counted)
    assert quotas.headers(granted, 0.0)["x-ratelimit-remaining-tokens"] == "45"


def test_a_request_larger_than_a_minutes_tokens_goes_when_all_of_them_are_there():
    quotas, limits = Quotas(), AccountLimits(tokens_per_minute=100)
    quotas.take(of_key("k", limits), 0.0, 1)
    error = refused(quotas, limits, 0.0, 500)
    assert error.retry_after_s == pytest.approx(0.6)
    assert "this one needs 500" in str(error)
    quotas.take(of_key("k", limits), 0.6, 500)
    assert refused(quotas, limits, 60.0).retry_after_s > 170


def test_requests_at_once_are_counted_until_they_are_settled():
    quotas, limits = Quotas(), AccountLimits(concurrent_requests=2)
    first, _ = quotas.take(of_key("k", limits), 0.0), quotas.take(of_key("k", limits), 0.0)
    error = refused(quotas, limits, 1e9)
    assert (error.limit, error.headers, error.retry_after_s) == ("concurrent_requests", {}, 1.0)
    quotas.settle(first, 0.0)
    quotas.settle(first, 0.0)
    quotas.take(of_key("k", limits), 0.0)
    refused(quotas, limits, 0.0)


def test_a_batch_is_taken_whole_or_not_at_all_and_gives_back_once_what_was_never_begun():
    quotas, limits = Quotas(), AccountLimits(requests_per_minute=6, concurrent_requests=3)
    single = quotas.take(of_key("k", limits), 0.0)
    with pytest.raises(RateLimited) as caught:
        quotas.take_batch(of_key("k", limits), 0.0, 6, at_once=64)
    assert (caught.value.limit, caught.value.retry_after_s) == ("requests_per_minute", pytest.approx(10.0))
    last = quotas.take_batch(of_key("other", limits), 0.0, 1, at_once=64)
    assert quotas.take_batch(of_key("other", limits), 0.0, 5, at_once=2).at_once == 2 * last.at_once == 2
    batch = quotas.take_batch(of_key("k", limits), 0.0, 5, at_once=64)
    assert (len(batch.items), batch.at_once) == (5, 2)
    with pytest.raises(RateLimited):
        quotas.take_batch(of_key("k", limits), 10.0, 1, at_once=64)
    quotas.settle(single, 0.0)
    quotas.settle(quotas.take(of_key("k", limits), 10.0), 10.0)
    for granted in batch.items[:3]:
        quotas.settle(granted, 10.0)
    for _ in range(2):
        quotas.end_batch(batch, 10.0)
    for _ in range(2):
        quotas.settle(quotas.take(of_key("k", limits), 10.0), 10.0)
    assert refused(quotas, limits, 10.0).limit == "requests_per_minute"


def test_a_batch_has_its_room_until_it_ends_and_gives_it_back_once():
    quotas, limits = Quotas(), AccountLimits(concurrent_requests=4)
    quotas.take(of_key("k", limits), 0.0)
    batch = quotas.take_batch(of_key("k", limits), 0.0, 5, at_once=2)
    assert batch.at_once == 2
    assert quotas.take_batch(of_key("k", limits), 0.0, 5, at_once=2).at_once == 1
    for granted in batch.items:
        quotas.settle(granted, 0.0)
    refused(quotas, limits, 0.0)
    for _ in range(2):
        quotas.end_batch(batch, 0.0)
    for _ in range(2):
        quotas.take(of_key("k", limits), 0.0)
    refused(quotas, limits, 0.0)


def test_a_batch_that_was_never_begun_gives_back_no_more_than_there_may_be():
    quotas, limits = Quotas(), AccountLimits(requests_per_minute=6)
    batch = quotas.take_batch(of_key("k", limits), 0.0, 5, at_once=64)
    quotas.end_batch(batch, 60.0)
    for _ in range(6):
        quotas.take(of_key("k", limits), 60.0)
    refused(quotas, limits, 60.0)


def test_a_batch_waits_for_a_debt_of_tokens_as_any_request_does():
    quotas, limits = Quotas(), AccountLimits(tokens_per_minute=60)
    quotas.settle(quotas.take(of_key("k", limits), 0.0), 0.0, completion_tokens=70)
    with pytest.raises(RateLimited) as caught:
        quotas.take_batch(of_key("k", limits), 0.0, 2, at_once=64)
    assert (caught.value.limit, caught.value.retry_after_s) == ("tokens_per_minute", pytest.approx(11.0))
    quotas.end_batch(quotas.take_batch(of_key("k", limits), 11.0, 2, at_once=64), 11.0)


def test_other_limits_count_at_once_and_do_not_forget_what_was_taken():
    quotas = Quotas()
    for _ in range(5):
        quotas.take(of_key("k", AccountLimits(requests_per_minute=10)), 0.0)
    refused(quotas, AccountLimits(requests_per_minute=5), 0.0)
    for _ in range(15):
        quotas.take(of_key("k", AccountLimits(requests_per_minute=20)), 0.0)
    refused(quotas, AccountLimits(requests_per_minute=20), 0.0)
    quotas.take(of_key("k", AccountLimits(concurrent_requests=100)), 0.0)
    with pytest.raises(RateLimited):
        quotas.take_batch(of_key("k", AccountLimits(requests_per_minute=1)), 0.0, 2, at_once=64)
    for most in (1, 2):
        assert f"limit of {most} requests at once" in str(refused(quotas, AccountLimits(concurrent_requests=most), 0.0))


def test_what_an_answer_costs_is_taken_off_a_full_account_however_long_it_took():
    quotas, limits = Quotas(), AccountLimits(tokens_per_minute=600)
    granted = quotas.take(of_key("k", limits), 0.0, 100)
    quotas.settle(granted, 600.0, completion_tokens=600)
    assert refused(quotas, limits, 600.0).retry_after_s == pytest.approx(0.1)


def test_a_lower_limit_makes_no_debt_and_a_debt_is_paid_off_in_the_same_time():
    quotas, many, few = Quotas(), AccountLimits(tokens_per_minute=1_000_000), AccountLimits(tokens_per_minute=10_000)
    quotas.charge(quotas.take(of_key("k", many), 0.0), 500_000, 0.0)
    assert refused(quotas, few, 1.0, tokens=1).retry_after_s <= 1.0
    quotas.take(of_key("k", few), 2.0)
    quotas.charge(quotas.take(of_key("owes", many), 0.0), 1_000_000, 0.0)
    granted = quotas.take(of_key("owes", many), 1.0)
    quotas.settle(granted, 1.0, completion_tokens=500_000)
    for limits in (many, few):
        assert 27 < float(refused(quotas, limits, 2.0, tokens=1, key="owes").retry_after_s) < 33


def test_idle_keys_are_forgotten_and_busy_or_indebted_ones_are_not():
    quotas, limits = Quotas(), AccountLimits(requests_per_minute=60)
    quotas.take(of_key("running", limits), 0.0)
    for number in range(100_000):
        quotas.settle(quotas.take(of_key(f"k{number}", limits), number / 100), number / 100)
    assert len(quotas) <= 2048
    assert "running" in quotas.accounts
    quotas.forget_idle(1e6)
    assert list(quotas.accounts) == ["running"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (-1, "0s"),
        (0.0121, "13ms"),
        (0.999, "999ms"),
        (0.9995, "1s"),
        (1.5, "2s"),
        (6.4, "7s"),
        (360, "6m0s"),
        (3605, "1h0m5s"),
    ],
)
def test_times_are_written_as_openai_writes_them(seconds, shown):
    assert duration_text(seconds) == shown


def test_headers_tell_what_is_left_of_the_limits_that_there_are():
    quotas = Quotas()
    granted = quotas.take(of_key("k", AccountLimits(requests_per_minute=60, tokens_per_minute=150_000)), 0.0, 16)
    assert quotas.headers(granted, 0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "150000",
        "x-ratelimit-remaining-tokens": "149984",
        "x-ratelimit-reset-tokens": "7ms",
    }
    only = quotas.take(of_key("k2", AccountLimits(concurrent_requests=3)), 0.0)
    assert quotas.headers(only, 0.0) == {}


def attempt(quotas, limits, now, tokens):
    try:
        return quotas.take(of_key("k", limits), now, tokens)
    except RateLimited as exc:
        return exc


@dataclass
class ChargedRequest:
    at: float
    tokens: int
    ended: bool = False


@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.integers(0, 60), st.integers(0, 60), st.booleans()), min_size=1, max_size=80
    ),
    st.integers(1, 20),
    st.integers(1, 200),
    st.integers(1, 5),
)
def test_no_stretch_of_time_holds_more_than_the_limits_and_a_told_time_to_come_back_is_true(
    steps, requests, tokens, concurrent
):
    quotas = Quotas()
    limits = AccountLimits(requests_per_minute=requests, tokens_per_minute=tokens, concurrent_requests=concurrent)
    now, granted_all, running = 0.0, [], []
    for wait_s, prompt, completion, is_ending in steps:
        now += wait_s
        if is_ending and running:
            sent, granted = running.pop(0)
            quotas.settle(granted, now, completion_tokens=completion)
            sent.tokens += completion
            continue
        granted = attempt(quotas, limits, now, prompt)
        if isinstance(granted, RateLimited):
            if granted.limit == "concurrent_requests":
                assert len(running) == concurrent
                continue
            first_limit = granted.limit
            now += granted.retry_after_s
            granted = attempt(quotas, limits, now, prompt)
            if isinstance(granted, RateLimited):
                assert granted.limit != first_limit
                continue
        sent = ChargedRequest(now, prompt)
        granted_all.append(sent)
        running.append((sent, granted))
        assert len(running) <= concurrent
        for first in granted_all:
            since = [s for s in granted_all if s.at >= first.at]
            assert len(since) <= requests * (1 + (now - first.at) / 60) + 1e-3
        # What was charged before the last grant was covered, by what the bucket held and what came in since.
        charged = sum(s.tokens for s in granted_all[:-1])
        assert charged < tokens * (1 + now / 60) + 1e-3


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 3000)), max_size=60), st.integers(100, 2000))
def test_bodies_that_are_read_hold_no_more_bytes_than_the_rate_and_one_body(steps, rate):
    quotas, limits, now, read = Quotas(), AccountLimits(bytes_per_minute=rate), 0.0, []
    for wait_s, size in steps:
        now += wait_s
        try:
            quotas.check_body(of_key("k", limits), now, size_bytes=size)
        except RateLimited as exc:
            now += exc.retry_after_s
            quotas.check_body(of_key("k", limits), now, size_bytes=size)  # the time to come back is true
        quotas.charge_bytes(of_key("k", limits), now, size)
        read.append(size)
        assert sum(read[:-1]) <= rate * (1 + now / 60) + 1e-3


def test_requests_whose_bodies_end_early_leave_a_debt_of_a_minute_at_most():
    quotas, limits = Quotas(), AccountLimits(requests_per_minute=6)
    for _ in range(1000):
        quotas.charge_incomplete_body(of_key("k", limits), 0.0)
    assert refused(quotas, limits, 69.0).limit == "requests_per_minute"
    quotas.take(of_key("k", limits), 70.0)


def test_a_large_body_or_one_without_a_length_is_not_read_where_no_request_is_left():
    quotas, limits = Quotas(), AccountLimits(requests_per_minute=1)
    quotas.take(of_key("k", limits), 0.0)
    quotas.check_body(of_key("k", limits), 0.0, size_bytes=1000)
    for size in (2**20, None):
        with pytest.raises(RateLimited):
            quotas.check_body(of_key("k", limits), 0.0, size_bytes=size)


def test_a_batch_gives_back_the_request_that_its_call_counted_as():
    quotas, limits = Quotas(), AccountLimits(requests_per_minute=3, concurrent_requests=2)
    arrived = quotas.take(of_key("k", limits), 0.0)
    batch = quotas.take_batch(of_key("k", limits), 0.0, 3, at_once=64, arrived=arrived)
    assert batch.at_once == 2
    for item in batch.items:
        quotas.settle(item, 0.0)
    quotas.settle(arrived, 0.0)
    quotas.end_batch(batch, 0.0)
    assert refused(quotas, limits, 0.0).limit == "requests_per_minute"


# --- of a tenant ------------------------------------------------------------------------------------------------------


def test_all_keys_of_a_tenant_have_its_limit_together_and_each_has_its_own():
    quotas, limits, whole = Quotas(), AccountLimits(requests_per_minute=4), AccountLimits(requests_per_minute=6)
    for _ in range(4):
        quotas.take(of_tenant("a", limits, whole), 0.0)
    with pytest.raises(RateLimited) as of_the_key:
        quotas.take(of_tenant("a", limits, whole), 0.0)
    assert of_the_key.value.limit == "requests_per_minute"
    for _ in range(2):
        quotas.take(of_tenant("b", None, whole), 0.0)
    with pytest.raises(RateLimited) as of_the_tenant:
        quotas.take(of_tenant("b", None, whole), 0.0)
    assert of_the_tenant.value.limit == "tenant_requests_per_minute"
    assert "all keys of tenant acme together have a limit of 6 requests per minute" in str(of_the_tenant.value)
    quotas.take(of_key("tenant acme's neighbour", limits), 0.0)


def test_what_one_account_refuses_is_counted_in_none():
    quotas, whole = Quotas(), AccountLimits(concurrent_requests=1)
    limits = AccountLimits(concurrent_requests=5, tokens_per_minute=100)
    first = quotas.take(of_tenant("a", limits, whole), 0.0, 60)
    for _ in range(9):
        with pytest.raises(RateLimited):
            quotas.take(of_tenant("a", limits, whole), 0.0, 10)
    quotas.settle(first, 0.0, completion_tokens=30)
    assert (
        quotas.headers(quotas.take(of_tenant("a", limits, whole), 0.0, 4), 0.0)["x-ratelimit-remaining-tokens"] == "6"
    )


def test_the_headers_tell_of_the_account_with_the_least_left():
    quotas = Quotas()
    key, tenant = AccountLimits(requests_per_minute=10, tokens_per_minute=50), AccountLimits(requests_per_minute=30)
    for _ in range(25):
        quotas.take(of_tenant("b", None, tenant), 0.0)
    headers = quotas.headers(quotas.take(of_tenant("a", key, tenant), 0.0), 0.0)
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("30", "4")
    assert headers["x-ratelimit-limit-tokens"] == "50"


def test_bytes_and_batches_count_against_the_tenant_too():
    quotas, whole = Quotas(), AccountLimits(bytes_per_minute=1000, requests_per_minute=10, concurrent_requests=3)
    quotas.charge_bytes(of_tenant("a", None, whole), 0.0, 1500)
    with pytest.raises(RateLimited) as owes:
        quotas.check_body(of_tenant("b", None, whole), 0.0, size_bytes=1)
    assert owes.value.limit == "tenant_bytes_per_minute"
    batch = quotas.take_batch(of_tenant("a", AccountLimits(concurrent_requests=2), whole), 0.0, 8, at_once=64)
    assert batch.at_once == 2
    with pytest.raises(RateLimited):
        quotas.take_batch(of_tenant("b", None, whole), 0.0, 3, at_once=64)
    quotas.end_batch(batch, 0.0)
    assert quotas.take_batch(of_tenant("b", None, whole), 0.0, 10, at_once=64).at_once == 3


# --- in several processes ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def processes(count, pids=None):
    """The accounts of this many processes; without `pids` all are this process, which is alive."""
    descriptor = shared_memory(count)
    try:
        yield [SharedQuotas(descriptor, slot, count, pid=pids and pids[slot]) for slot in range(count)]
    finally:
        os.close(descriptor)


STEP = st.tuples(
    st.sampled_from(["take", "take", "batch", "charge", "settle", "settle", "end", "forget"]),
    st.integers(0, 2),
    st.sampled_from(["k", "other"]),
    st.sampled_from([0.0, 0.5, 7.0, 90.0]),
    st.integers(0, 60),
)


@pytest.mark.slow
@settings(max_examples=examples(400))
@given(st.lists(STEP, max_size=60), st.integers(1, 20), st.integers(1, 200), st.integers(1, 5))
def test_several_processes_give_away_what_one_would(steps, requests, tokens, concurrent):
    limits = AccountLimits(requests_per_minute=requests, tokens_per_minute=tokens, concurrent_requests=concurrent)
    whole = AccountLimits(
        requests_per_minute=requests * 3 / 2, tokens_per_minute=tokens * 2, concurrent_requests=concurrent + 1
    )
    limited = {key: of_tenant(key, limits, whole) for key in ("k", "other")}
    with processes(3) as accounts:
        alone, several, now = Quotas(), [Quotas(each) for each in accounts], 0.0
        singles, batches = [], []
        for step, who, key, wait_s, size in steps:
            now += wait_s
            if step == "take":
                found = [outcome(quotas.take, limited[key], now, size) for quotas in (alone, several[who])]
                kept = singles
            elif step == "batch":
                each = [partial(quotas.take_batch, at_once=2) for quotas in (alone, several[who])]
                found = [outcome(take, limited[key], now, 1 + size // 12) for take in each]
                kept = batches
            elif step == "charge" and singles:
                owner, *both = singles[size % len(singles)]
                charges = [partial(q.charge, granted) for q, granted in zip((alone, several[owner]), both, strict=True)]
                found = [outcome(charge, size, now) for charge in charges]
                kept = []
            elif step == "settle" and singles:
                owner, *both = singles.pop(size % len(singles))
                alone.settle(both[0], now, completion_tokens=size)
                several[owner].settle(both[1], now, completion_tokens=size)
                continue
            elif step == "end" and batches:
                owner, *both = batches.pop(0)
                alone.end_batch(both[0], now)
                several[owner].end_batch(both[1], now)
                continue
            elif step == "forget":
                several[who].forget_idle(now)
                continue
            else:
                continue
            refusals = [one for one in found if isinstance(one, dict)]
            if refusals:
                assert found[0] == found[1]
            else:
                kept.append((who, *found))
            if kept is singles and not refusals:
                assert several[who].headers(found[1], now).keys() == alone.headers(found[0], now).keys()
                levels = [[bucket.fill(now) for each in one.accounts for _, bucket in each.buckets()] for one in found]
                assert levels[1] == pytest.approx(levels[0])


def outcome(ask, *what):
    """What is granted, or what a refusal says."""
    try:
        return ask(*what)
    except RateLimited as exc:
        return {"limit": exc.limit, "retry_after_s": round(exc.retry_after_s, 6)}


def test_what_one_process_charges_settles_or_shows_is_on_top_of_what_the_others_took():
    limits = AccountLimits(requests_per_minute=10, tokens_per_minute=100)
    with processes(2) as tables:
        here, there = map(Quotas, tables)
        mine, theirs = here.take(of_key("k", limits), 0.0, 10), there.take(of_key("k", limits), 0.0)
        there.charge(theirs, 60, 0.0)
        left = here.headers(mine, 0.0)
        assert (left["x-ratelimit-remaining-requests"], left["x-ratelimit-remaining-tokens"]) == ("8", "30")
        there.charge(theirs, 10, 0.0)
        with pytest.raises(RateLimited):
            here.charge(mine, 25, 0.0)
        there.charge(theirs, 15, 0.0)
        here.settle(mine, 0.0, completion_tokens=4)
        assert there.headers(theirs, 0.0)["x-ratelimit-remaining-tokens"] == "1"


def test_a_clock_that_was_read_before_another_process_wrote_neither_hides_what_is_taken_nor_gives_any_back():
    limits = AccountLimits(requests_per_minute=60)
    with processes(2) as tables:
        here, there = map(Quotas, tables)
        mine = here.take(of_key("k", limits), 10.0)
        theirs = there.take(of_key("k", limits), 9.0)
        assert here.headers(mine, 10.0)["x-ratelimit-remaining-requests"] == "58"
        assert there.headers(theirs, 10.0)["x-ratelimit-remaining-requests"] == "58"


def test_a_batch_of_a_key_whose_requests_at_once_are_written_with_a_point_is_counted_in_every_process(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: [{{sha256: {hash_key('mine')}, scopes: [infer], limits: {{concurrent_requests: 2.0}}}}]")
    limits = ApiKeys([path]).caller("Bearer mine").limits
    with processes(2) as (here, there):
        batch = Quotas(here).take_batch(of_key("k", limits), 0.0, 5, at_once=64)
        assert batch.at_once == 2
        refused(Quotas(there), limits, 0.0)


def test_what_a_process_that_died_had_under_way_is_over_and_what_it_took_is_not():
    limits = AccountLimits(requests_per_minute=6, concurrent_requests=2)
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with processes(2, pids=(None, owner.pid)) as (here, there):
        quotas = Quotas(there)
        quotas.take(of_key("k", limits), 0.0)
        quotas.take(of_key("k", limits), 0.0)
        refused(Quotas(here), limits, 0.0)
        owner.communicate(b"\n")
        granted = Quotas(here).take(of_key("k", limits), 0.0)
        assert Quotas(here).headers(granted, 0.0)["x-ratelimit-remaining-requests"] == "3"


def test_bytes_that_one_process_read_are_taken_in_the_others():
    limits = AccountLimits(bytes_per_minute=1000)
    with processes(2) as accounts:
        here, there = (Quotas(each) for each in accounts)
        there.check_body(of_key("k", limits), 0.0, size_bytes=1)
        here.charge_bytes(of_key("k", limits), 0.0, 1500)
        with pytest.raises(RateLimited) as told:
            there.check_body(of_key("k", limits), 0.0, size_bytes=1)
        assert told.value.retry_after_s == pytest.approx(30.06)


def test_a_process_that_takes_anothers_place_begins_with_nothing_of_its_own_under_way():
    limits = AccountLimits(requests_per_minute=6, concurrent_requests=1)
    descriptor = shared_memory(2)
    here, there = (Quotas(SharedQuotas(descriptor, slot, 2)) for slot in range(2))
    here.take(of_key("k", limits), 0.0)
    refused(there, limits, 0.0)
    again = Quotas(SharedQuotas(descriptor, 0, 2))
    os.close(descriptor)
    there.settle(there.take(of_key("k", limits), 0.0), 0.0)
    assert again.headers(again.take(of_key("k", limits), 0.0), 0.0)["x-ratelimit-remaining-requests"] == "3"


def test_what_a_process_took_stays_taken_when_another_takes_its_place_and_nobody_had_looked_meanwhile():
    limits = AccountLimits(requests_per_minute=6, tokens_per_minute=100)
    descriptor = shared_memory(2)
    dead, there = (Quotas(SharedQuotas(descriptor, slot, 2)) for slot in range(2))
    for _ in range(6):
        dead.settle(dead.take(of_key("k", limits), 0.0, 10), 0.0, completion_tokens=5)
    dead.take(of_key("other", limits), 0.0, 100)
    again = Quotas(SharedQuotas(descriptor, 0, 2))
    refused(again, limits, 0.0)
    refused(there, limits, 0.0)
    granted = again.take(of_key("k", limits), 10.0)
    assert again.headers(granted, 10.0)["x-ratelimit-remaining-tokens"] == "26"
    refused(there, limits, 10.0)
    assert refused(Quotas(SharedQuotas(descriptor, 0, 2)), limits, 11.0, 50, key="other").limit == "tokens_per_minute"
    os.close(descriptor)


def test_accounts_of_the_process_before_are_forgotten_like_others_when_the_table_is_full(monkeypatch):
    monkeypatch.setattr(shared_quotas, "MAX_KEYS", 12)
    limits = AccountLimits(requests_per_minute=1)
    descriptor = shared_memory(2)
    dead = Quotas(SharedQuotas(descriptor, 0, 2))
    for number in range(11):
        dead.take(of_key(f"idle{number}", limits), 0.0)
    dead.take(of_key("busy", limits), 100.0)
    here, other = SharedQuotas(descriptor, 0, 2), Quotas(SharedQuotas(descriptor, 1, 2))
    again = Quotas(here)
    again.take(of_key("k", limits), 101.0)
    assert here.accounts == 2
    for quotas in (again, other):
        for key in ("busy", "k"):
            refused(quotas, limits, 101.0, key=key)
    again.take(of_key("idle0", limits), 101.0)  # who was forgotten begins anew
    refused(other, limits, 101.0, key="idle0")
    os.close(descriptor)


def test_keys_whose_cells_meet_have_accounts_of_their_own():
    names = map("k{}".format, count())
    last = list(
        islice(
            (name for name in names if shared_quotas.tag_of(name) % shared_quotas.CELLS == shared_quotas.CELLS - 1), 3
        )
    )
    with processes(2) as (here, there):
        keys = [*last, *islice(names, shared_quotas.MAX_KEYS - len(last))]
        told = {key: AccountState(float(number), number, 1.0, 2.0, number) for number, key in enumerate(keys)}
        for key, left in told.items():
            there.publish(key, left)
        assert {key: tuple(here.states(key)) for key in told} == {key: (left,) for key, left in told.items()}
        assert not list(here.states("unknown"))


def test_a_table_that_is_full_forgets_who_is_idle_and_never_who_is_not(monkeypatch):
    monkeypatch.setattr(shared_quotas, "MAX_KEYS", 12)
    limits = AccountLimits(requests_per_minute=1)
    with processes(2) as (here, there), capture_logs() as logs:
        quotas, other = Quotas(here), Quotas(there)
        for number in range(100):
            quotas.settle(quotas.take(of_key(f"k{number}", limits), 10.0 * number), 10.0 * number)
            refused(other, limits, 10.0 * number, key=f"k{number}")
        assert here.accounts <= 12
        assert not logs
        for number in range(20):
            quotas.take(of_key(f"busy{number}", limits), 2000.0)
        assert [log["log_level"] for log in logs] == ["warning"]
        for number in range(12):
            refused(other, limits, 2000.0, key=f"busy{number}")
        other.take(of_key("busy19", limits), 2000.0)


def test_a_table_that_is_full_keeps_who_is_at_work_or_in_debt_however_long_ago_that_was_told(monkeypatch):
    monkeypatch.setattr(shared_quotas, "MAX_KEYS", 7)
    long_ago = {
        "at work": AccountState(0.0, 1, 5.0, 5.0, 1),
        "owes tokens": AccountState(0.0, 1, 5.0, -5.0, 0),
        "owes requests": AccountState(0.0, 1, -5.0, inf, 0),
        "not full yet": AccountState(50.0, 1, 0.0, 0.0, 0),
        "idle": AccountState(0.0, 1, 5.0, 5.0, 0),
    }
    lately = {f"k{number}": AccountState(100.0 + number, 1, 5.0, 5.0, 0) for number in range(3)}
    with processes(2) as (here, there):
        for key, left in (long_ago | lately).items():
            here.publish(key, left)
        assert {key: tuple(there.states(key)) for key in lately} == {key: (left,) for key, left in lately.items()}
        kept = {key: left for key in long_ago for left in there.states(key)}
        assert kept == {key: left for key, left in long_ago.items() if key != "idle"}


# --- in a router ------------------------------------------------------------------------------------------------------


async def forty(engine, body):
    """Forty events, and then nothing before the engine is told to go on; it never says what it counted."""

    async def pieces():
        yield chunk(body["model"], "word") * 40
        await engine.go_on.wait()

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def silent(engine, body):
    await engine.go_on.wait()
    return await echo(engine, body)


@contextlib.asynccontextmanager
async def limited(folder, engine, **limits):
    """(ask, engine, parts): requests with the key `mine`, which has these limits, or with `other`, which has none."""
    keys = [{"sha256": hash_key(name), "tenant": name, "scopes": ["infer"]} for name in ("mine", "other")]
    path = folder / "keys.yaml"
    path.write_text(json.dumps({"keys": [keys[0] | {"limits": limits}, keys[1]]}))
    async with fleet(engine, key_files=(path,)) as (client, _, parts):

        def ask(path="/v1/completions", key="mine", **body):
            headers = {"authorization": f"Bearer {key}"}
            return client.stream("POST", path, json={"model": BASE, "prompt": [1] * 20, **body}, headers=headers)

        yield ask, parts


async def is_refused(ask):
    async with ask() as answer:
        return answer.status_code == 429


async def read(ask, events, **body):
    """Of a stream so many events, and then its client leaves."""
    async with ask(stream=True, **body) as answer:
        seen = 0
        async for line in answer.aiter_lines():
            seen += line.startswith("data:")
            if seen == events:
                return


LONG = "x" * 2**19
WRONG = {
    "field": ("/v1/completions", {"json": {"model": BASE, "prompt": "hi", "extra_key": "x"}}),
    "not json": ("/v1/completions", {"content": b"{", "headers": {"content-type": "application/json"}}),
    "type": ("/v1/completions", {"content": b"{}", "headers": {"content-type": "text/plain"}}),
    "batch": ("/generate", {"json": {"text": 1}}),
    "long batch": ("/generate", {"json": {"text": 1, "rid": LONG}}),
    "list": ("/v1/completions", {"json": {"model": BASE, "prompt": ["a"], "lora_path": ["sql/v1", "sql/v1"]}}),
}


@contextlib.asynccontextmanager
async def keyed(folder, **limits):
    """(post, parts): requests with a key that has these limits; `post` gives (status, code, answer)."""
    path = folder / "keys.yaml"
    entry = {"sha256": hash_key("mine"), "tenant": "acme", "scopes": ["infer"], "limits": limits}
    path.write_text(json.dumps({"keys": [entry]}))
    more = {"tokenizer": "off", "max_body_bytes": 2**21}
    async with fleet(EngineDouble("w0"), key_files=(path,), **more) as (client, _, parts):

        async def post(where="/v1/completions", headers=None, **sent):
            sent = sent or {"json": {"model": BASE, "prompt": "hi"}}
            headers = {"authorization": "Bearer mine"} | (headers or {})
            return await client.post(where, headers=headers, **sent)

        yield post, parts, client


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_body_that_is_refused_counts_as_a_request(tmp_path, wrong):
    path, sent = WRONG[wrong]
    async with keyed(tmp_path, requests_per_minute=2, concurrent_requests=1) as (post, parts, _):
        for _ in range(2):
            assert (await post(path, **sent)).status_code == 400
        refused_too = await post(path, **sent)
        assert (refused_too.status_code, refused_too.json()["error"]["code"]) == (429, "rate_limited")
        assert int(refused_too.headers["retry-after"]) > 20
        assert (await post()).status_code == 429
        (account,) = parts.quotas.accounts.values()
        assert account.running == 0


async def test_a_good_batch_counts_its_items_and_not_itself(tmp_path):
    async with keyed(tmp_path, requests_per_minute=4, concurrent_requests=2) as (post, parts, _):
        for rid in ("a", LONG):
            answer = await post("/generate", json={"text": ["a", "b"], "sampling_params": {}, "rid": rid})
            assert answer.status_code == 502  # the engine's answers are no completions
        assert (await post()).status_code == 429
        (account,) = parts.quotas.accounts.values()
        assert account.running == 0


async def test_bytes_of_refused_bodies_count_against_the_byte_rate_and_the_next_body_is_not_read(tmp_path):
    async with keyed(tmp_path, bytes_per_minute=2**20) as (post, parts, _):
        body = {"model": BASE, "prompt": "hi", "extra_key": "x" * 2**20}
        assert (await post(json=body)).status_code == 400
        with listening_for_bodies(parts) as held:
            answer = await post(json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limited")
        assert "bytes of bodies per minute" in answer.json()["error"]["message"]
        assert int(answer.headers["x-ratelimit-remaining-bytes"]) < 2**19
        assert int(answer.headers["retry-after"]) > 30
        assert held == []


@contextlib.contextmanager
def listening_for_bodies(parts):
    """The bytes of bodies that are charged meanwhile."""
    charged = []
    parts.quotas = Watched(parts.quotas, charged)
    try:
        yield charged
    finally:
        parts.quotas = parts.quotas.quotas


class Watched:
    """Quotas that note the bytes that they are charged."""

    def __init__(self, quotas, charged):
        self.quotas = quotas
        self.charged = charged

    def __getattr__(self, name):
        return getattr(self.quotas, name)

    def charge_bytes(self, key_id, limits, now, size_bytes):
        self.charged.append(size_bytes)
        self.quotas.charge_bytes(of_key(key_id, limits), now, size_bytes)


async def test_a_body_without_a_length_that_becomes_too_large_counts(tmp_path):
    async def pieces():
        for _ in range(40):
            yield b" " * 2**16

    async with keyed(tmp_path, requests_per_minute=1, bytes_per_minute=2**20) as (post, _, _):
        headers = {"content-type": "application/json"}
        assert (await post(content=pieces(), headers=headers)).status_code == 413
        answer = await post()
        assert (answer.status_code, "bytes" in answer.json()["error"]["message"]) == (429, True)


async def test_a_request_whose_client_leaves_in_the_middle_of_its_body_counts(tmp_path):
    async with keyed(tmp_path, requests_per_minute=1) as (post, parts, client):
        _reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer mine\r\nContent-Length: 9\r\n\r\n"
        writer.write(head + b"half")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        await until(lambda: any(each.requests.level < 1 for each in parts.quotas.accounts.values()))
        assert (await post()).status_code == 429


def idle(parts):
    return until(lambda: not list(parts.scheduler.load.counts_by_name()))


async def test_what_was_read_of_a_stream_is_charged_although_its_client_left_before_the_engine_said_what_it_counted(
    tmp_path,
):
    engine = EngineDouble("w0", forty)
    engine.go_on.clear()
    async with limited(tmp_path, engine, tokens_per_minute=50) as (ask, parts):
        await read(ask, 40)
        await idle(parts)
        assert await is_refused(ask)


@pytest.mark.parametrize("prompt", [[1] * 20, "twenty tokens, as its engine says"], ids=["ids", "text"])
async def test_a_prompt_whose_client_left_before_its_answer_began_is_charged(tmp_path, prompt):
    engine = EngineDouble("w0", silent, ids=[1] * 20)
    async with limited(tmp_path, engine, tokens_per_minute=30) as (ask, parts):
        async with ask(key="other") as answer:
            assert answer.status_code == 200
            await answer.aread()
        engine.go_on.clear()
        leaving = asyncio.create_task(is_refused(partial(ask, prompt=prompt)))
        await until(lambda: len(engine.bodies) == 2)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await idle(parts)
        engine.go_on.set()
        assert await is_refused(ask)


async def test_a_picture_of_a_megabyte_is_charged_as_no_more_tokens_than_an_engine_takes(tmp_path):
    engine = EngineDouble("w0", forty)
    engine.go_on.clear()
    async with limited(tmp_path, engine, tokens_per_minute=4000) as (ask, parts):
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2**20}}
        messages = [{"role": "user", "content": [picture]}]
        await read(ask, 1, path="/v1/chat/completions", messages=messages, media_io_kwargs={}, prompt=None)
        await idle(parts)
        engine.go_on.set()
        assert not await is_refused(ask)
