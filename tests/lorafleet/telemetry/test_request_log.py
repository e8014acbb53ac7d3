"""Lines of requests: failures limited by their code, with counts of those left out; the access log by its mode."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from lorafleet.telemetry.request_log import MOST_LINES, WINDOW_S, FailureLimiter, RequestLine, RequestLog, request_id

TIMES = st.lists(st.floats(0, 5 * WINDOW_S), max_size=80).map(sorted)


def line(status=503, code="no_replica", **more) -> RequestLine:
    return RequestLine(request_id="r", method="POST", path="/x", status=status, duration_s=0.1, code=code, **more)


@given(st.lists(st.tuples(st.floats(0, 5 * WINDOW_S), st.sampled_from(["a", "b"])), max_size=100).map(sorted))
def test_each_failure_is_logged_or_counted_once(failures):
    limiter, logged = FailureLimiter(), {"a": 0, "b": 0}
    for at, code in failures:
        logged[code] += limiter.admit(code, at)
    omitted = limiter.take_omitted()
    for code, lines in logged.items():
        assert lines + omitted.get(code, 0) == sum(each == code for _, each in failures)
    assert not limiter.take_omitted()


@given(TIMES)
def test_a_code_has_at_most_twice_its_lines_in_the_time_of_a_window_and_its_first_ones_always(times):
    limiter = FailureLimiter()
    logged = [at for at in times if limiter.admit("a", at)]
    assert logged[:MOST_LINES] == times[:MOST_LINES]
    for begin in logged:
        assert sum(begin <= at < begin + WINDOW_S for at in logged) <= 2 * MOST_LINES


def test_codes_without_end_share_one_window():
    limiter = FailureLimiter()
    assert sum(limiter.admit(f"code {number}", 0.0) for number in range(10_000)) < 300
    assert sum(limiter.take_omitted().values()) > 9_700


async def test_what_was_left_out_is_logged_with_its_count():
    with capture_logs() as logs:
        requests = RequestLog("test")
        for _ in range(MOST_LINES + 3):
            requests.record(line(), is_failure=True)
        requests.record(line(code="saturated", status=429), is_failure=True)
        requests.flush()
        requests.flush()
    assert [each["event"] for each in logs] == ["request failed"] * (MOST_LINES + 1) + [
        "failed requests were not logged"
    ]
    assert (logs[-1]["code"], logs[-1]["count"]) == ("no_replica", 3)
    assert [each["log_level"] for each in logs[-3:]] == ["warning", "info", "warning"]


@pytest.mark.parametrize(
    ("mode", "statuses"), [("off", []), ("errors", [404, 200, 499]), ("all", [200, 404, 200, 499])]
)
def test_the_access_log_has_the_requests_of_its_mode_as_json(mode, statuses):
    written = []
    requests = RequestLog("test", mode, write=written.append)
    lines = [line(200, ""), line(404, "not_found"), line(200, "stream_broken"), line(499, "", tenant="acme")]
    for each in lines:
        requests.record(each, is_failure=False)
    found = [json.loads(each) for each in written]
    assert [each["status"] for each in found] == statuses
    assert all(
        (each["event"], each["component"], bool(each["timestamp"])) == ("request", "test", True) for each in found
    )
    assert all(each.endswith(b"\n") for each in written)


def test_a_succeeding_request_is_not_logged_by_default():
    with capture_logs() as logs:
        requests = RequestLog("test")
        requests.record(line(200, ""), is_failure=False)
    assert not logs
    assert not requests.has_all


@pytest.mark.parametrize("given_id", [None, "", "a b", "x" * 129, "é", "a\r\nb"])
def test_an_id_that_no_header_or_log_should_hold_is_replaced(given_id):
    assert len(request_id(given_id)) == 32
    assert request_id("mine-1") == "mine-1"
