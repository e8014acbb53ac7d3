"""The trace of one request: its headers, its stages, and its one end."""

import pytest

from router.telemetry.trace import Trace


def begun(ended, parent_id=None):
    return Trace("POST", "/v1/completions", 100.0, trace_id=7, parent_id=parent_id, on_end=ended.append)


@pytest.mark.parametrize(("status", "code", "is_error"), [(200, "", False), (404, "", False), (503, "saturated", True)])
def test_a_trace_ends_once_with_its_status(status, code, is_error):
    ended = []
    trace = begun(ended)
    trace.end(status, code)
    trace.end(500, "late")
    assert ended == [trace]
    assert trace.attributes["http.response.status_code"] == status
    assert trace.attributes.get("error.type") == (code or (str(status) if status >= 400 else None))
    assert trace.is_error == is_error


def test_a_clients_tracestate_goes_on_only_with_the_clients_trace():
    line = b"traceparent: 00-%032x-%016x-01\r\n"
    alone, child = begun([]), begun([], parent_id=5)
    assert alone.headers(b"vendor=1") == line % (7, alone.span_id)
    assert child.headers(b"vendor=1") == line % (7, child.span_id) + b"tracestate: vendor=1\r\n"
    assert child.headers(None) == line % (7, child.span_id)


def test_a_failed_stage_keeps_its_attributes_and_others_stay():
    trace = begun([])
    trace.fail_stage("before any stage")
    trace.begin_stage("match")
    trace.begin_stage("open", worker="w0")
    trace.fail_stage("unreachable")
    assert [(name, attributes) for name, _, attributes in trace.marks] == [
        ("match", None),
        ("open", {"worker": "w0", "error.type": "unreachable"}),
    ]


def test_stages_have_wall_times_by_the_end_of_the_trace():
    trace = begun([])
    trace.end(200)
    assert trace.wall_ns(trace.ended_at) == trace.ended_wall_ns
    assert trace.wall_ns(trace.ended_at - 1.0) == trace.ended_wall_ns - 1_000_000_000
