import asyncio
import contextlib
import itertools
import json
import random
import re
import subprocess
import sys
import threading
import time

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.telemetry import tracing
from router.telemetry.tracing import Tracer, TracingUnavailable, make_tracer
from tests.patience import patience, until, within
from tests.router.doubles import BASE, EngineDouble, fleet, with_sql
from tests.router.doubles import CHAT as ASK
from tests.serving import serving

CHAT = "/v1/chat/completions"
THEIRS = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = THEIRS[:-2] + b"00"


class Collector:
    """An OTLP/HTTP collector double that keeps spans, or refuses them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.asked = asyncio.Event()

    @property
    def app(self):
        async def take(request: Request):
            self.asked.set()
            await self.go_on.wait()
            if self.status == 200:
                self.headers.append(dict(request.headers))
                for group in ExportTraceServiceRequest.FromString(await request.body()).resource_spans:
                    self.resources.append({a.key: a.value.string_value for a in group.resource.attributes})
                    self.spans += [span for scope in group.scope_spans for span in scope.spans]
            content = ExportTraceServiceResponse().SerializeToString()
            return Response(content, self.status, media_type="application/x-protobuf")

        return Starlette(routes=[Route("/v1/traces", take, methods=["POST"])])


class TraceCounts(dict):
    def __call__(self, outcome, traces):
        self[outcome] = self.get(outcome, 0) + traces


@contextlib.asynccontextmanager
async def tracing_to(collector: Collector, *, ratio=1.0, environment=None):
    on_outcome = TraceCounts()
    async with serving(collector.app) as url:
        made = make_tracer(url, ratio=ratio, instance="edge-0", on_outcome=on_outcome, environment=environment or {})
        assert made is not None
        made.counted = on_outcome
        try:
            yield made
        finally:
            collector.go_on.set()
            await made.close()


def attributes(span: Span) -> dict:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


async def test_a_request_is_a_span_and_each_of_its_stages_a_child_from_one_end_to_the_next():
    collector = Collector()
    async with tracing_to(collector) as made:
        before_ns = time.time_ns()
        trace = made.begin(CHAT, time.monotonic(), None)
        trace.attributes["gen_ai.request.model"] = "sql"
        trace.attributes["gen_ai.usage.input_tokens"] = 12
        for stage in ("read", "tokenize", "decide"):
            trace.begin_stage(stage)
        trace.begin_stage("open", **{"lorafleet.worker": "w0"})
        trace.begin_stage("relay")
        trace.end(200)
        after_ns = time.time_ns()
    root, *stages = sorted(collector.spans, key=lambda span: (bool(span.parent_span_id), span.start_time_unix_nano))
    assert (root.name, root.kind, root.parent_span_id) == ("POST /v1/chat/completions", Span.SPAN_KIND_SERVER, b"")
    assert attributes(root) == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.request.model": "sql",
        "gen_ai.usage.input_tokens": 12,
    }
    assert [span.name for span in stages] == ["read", "tokenize", "decide", "open", "relay"]
    assert {span.trace_id for span in stages} == {root.trace_id}
    assert {span.parent_span_id for span in stages} == {root.span_id}
    assert len({span.span_id for span in (root, *stages)}) == 6
    assert attributes(stages[3]) == {"lorafleet.worker": "w0"}
    for span, following in itertools.pairwise(stages):
        assert span.end_time_unix_nano == following.start_time_unix_nano
    assert stages[-1].end_time_unix_nano == root.end_time_unix_nano
    assert before_ns - 10**6 <= root.start_time_unix_nano <= root.end_time_unix_nano <= after_ns + 10**6
    assert collector.resources[0]["service.name"] == "lorafleet-router"
    assert collector.resources[0]["service.instance.id"] == "edge-0"
    assert made.counted == {"sent": 1}


async def test_a_clients_trace_is_continued_to_the_engine():
    collector = Collector()
    async with tracing_to(collector, ratio=0.0) as made:
        trace = made.begin(CHAT, time.monotonic(), THEIRS)
        sent = trace.headers(b"vendor=1").decode()
        trace.begin_stage("read")
        trace.end(200)
    root = next(span for span in collector.spans if span.name.startswith("POST"))
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (THEIRS[3:35].decode(), THEIRS[36:52].decode())
    assert sent == f"traceparent: 00-{root.trace_id.hex()}-{root.span_id.hex()}-01\r\ntracestate: vendor=1\r\n"


async def test_a_foreign_tracestate_is_not_forwarded():
    async with tracing_to(Collector()) as made:
        for broken in (None, b"00-zz-1-01"):
            sent = made.begin(CHAT, 0.0, broken).headers(b"vendor=1")
            assert re.fullmatch(rb"traceparent: 00-[0-9a-f]{32}-[0-9a-f]{16}-01\r\n", sent)


@pytest.mark.parametrize(
    ("given", "goes_on"),
    [
        (THEIRS, True),
        (b"cc" + THEIRS[2:] + b"-what-a-later-version-has", True),
        (THEIRS + b"-more", False),
        (b"ff" + THEIRS[2:], False),
        (THEIRS.upper(), False),
        (b"00-" + b"0" * 32 + THEIRS[35:], False),
        (THEIRS[:36] + b"0" * 16 + b"-01", False),
        (THEIRS[:-1], False),
        (b"", False),
        (b"\xff\x00", False),
    ],
)
async def test_only_a_valid_traceparent_is_a_parent(given, goes_on):
    async with tracing_to(Collector()) as made:
        trace = made.begin(CHAT, 0.0, given)
        assert (trace.parent_id is not None) == goes_on
        assert (trace.trace_id == int(THEIRS[3:35], 16)) == goes_on


async def test_an_unsampled_client_is_not_traced_and_else_a_share_is():
    class DiscardingSender:
        def send(self, traces):
            return True

        def close(self):
            pass

    made = Tracer(DiscardingSender(), ratio=0.25, on_outcome=TraceCounts(), rng=random.Random(0))
    assert made.begin(CHAT, 0.0, NOT_SAMPLED) is None
    assert made.begin(CHAT, 0.0, THEIRS) is not None
    sampled = sum(made.begin(CHAT, 0.0, None) is not None for _ in range(4000))
    assert 900 < sampled < 1100
    await made.close()


async def test_a_route_is_named_by_its_method_and_its_pattern():
    collector = Collector()
    async with tracing_to(collector) as made:
        made.begin("/v1/responses/{id}", time.monotonic(), None, method="GET").end(200)
    (root,) = collector.spans
    assert root.name == "GET /v1/responses/{id}"
    assert attributes(root)["http.request.method"] == "GET"


async def test_failures_have_their_own_error_types():
    collector = Collector()
    async with tracing_to(collector) as made:
        ours, theirs = made.begin(CHAT, time.monotonic(), None), made.begin(CHAT, time.monotonic(), None)
        ours.begin_stage("open")
        ours.fail_stage("connection")
        ours.begin_stage("open")
        ours.end(503, "no_replica")
        ours.end(200)
        theirs.end(404, "model_not_found")
    roots = {attributes(s)["http.response.status_code"]: s for s in collector.spans if s.name.startswith("POST")}
    assert roots.keys() == {503, 404}
    assert [roots[status].status.code for status in (503, 404)] == [Status.STATUS_CODE_ERROR, Status.STATUS_CODE_UNSET]
    assert attributes(roots[404])["error.type"] == "model_not_found"
    failed, fine = sorted((s for s in collector.spans if s.name == "open"), key=lambda s: s.start_time_unix_nano)
    assert attributes(failed) == {"error.type": "connection"}
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert fine.status.code == Status.STATUS_CODE_UNSET


@pytest.mark.parametrize("settings", [{}, {"tokenizer": "off"}])  # off: nothing is waited for but the engine
async def test_a_routed_requests_trace_has_its_stages_and_outcome(settings):
    refusals = []
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}

    async def moody(engine, body):
        if refusals:
            return JSONResponse({"error": {"message": refusals.pop()}}, 503)
        output = {"id": "1", "model": body["model"], "choices": [], "usage": usage}
        if not body.get("stream"):
            return JSONResponse(output)
        return Response(f"data: {json.dumps(output)}\n\ndata: [DONE]\n\n", media_type="text/event-stream")

    collector, bodies = Collector(), [{"model": BASE}, {"model": "sql/v1"}, {"model": BASE, "stream": True}] * 2
    engines = [EngineDouble(name, moody) for name in ("w0", "w1")]
    async with serving(collector.app) as url, contextlib.AsyncExitStack() as stack:
        found = fleet(*engines, control=with_sql("w0", "w1"), otlp_endpoint=url, trace_ratio=1.0, **settings)
        client, _, _ = await stack.enter_async_context(found)
        answers = [await client.post(CHAT, json={**ASK, **body}) for body in bodies]
        refusals.append("no room")
        answers += [await client.post(CHAT, json={**ASK, "model": name}) for name in (BASE, "nobody")]
        await until(lambda: sum(not span.parent_span_id for span in collector.spans) == len(answers))
    traces = []
    for _, spans in itertools.groupby(sorted(collector.spans, key=lambda s: s.trace_id), key=lambda s: s.trace_id):
        root, *stages = sorted(spans, key=lambda s: (bool(s.parent_span_id), s.start_time_unix_nano))
        assert {span.parent_span_id for span in stages} == {root.span_id}
        shown = [(span.name, *attributes(span).values()) for span in stages]
        traces.append((root.start_time_unix_nano, attributes(root), shown))
    *served, (_, _, retried), (_, refused, stages) = sorted(traces, key=lambda trace: trace[0])
    assert (refused["error.type"], stages) == ("model_not_found", [("authenticate",), ("read",), ("resolve",)])
    assert retried[6][0::2] == ("open", "engine_unavailable")
    assert retried[-2:] == [("open", answers[-2].headers["x-lorafleet-worker"]), ("relay",)]
    for (_, told, stages), body, answer in zip(served, bodies, answers[:-2], strict=True):
        worker = answer.headers["x-lorafleet-worker"]
        before = [(name,) for name in ("authenticate", "read", "resolve", "tokenize", "warm", "decide")]
        assert stages == [*before, ("open", worker), ("relay",)]
        assert told.pop("lorafleet.waited_s") < 5
        assert told == {
            "http.request.method": "POST",
            "http.route": CHAT,
            "http.response.status_code": 200,
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": body["model"],
            "gen_ai.usage.input_tokens": 7,
            "gen_ai.usage.output_tokens": 2,
            "gen_ai.usage.cache_read.input_tokens": 5,
            "lorafleet.request_id": answer.headers["x-request-id"],
            "lorafleet.worker": worker,
            "lorafleet.adapter": answer.headers["x-lorafleet-adapter"],
            "lorafleet.cached_tokens": 0,
        }


async def test_traces_are_sent_while_the_router_serves():
    collector = Collector()
    async with tracing_to(collector) as made:
        for _ in range(40):
            made.begin(CHAT, time.monotonic(), None).end(200)
        await until(lambda: len(collector.spans) == 40)


async def test_a_hanging_collector_delays_no_request(monkeypatch):
    monkeypatch.setattr(tracing, "MAX_QUEUED", 100)
    collector = Collector()
    collector.go_on.clear()
    async with tracing_to(collector) as made:
        for _ in range(tracing.BATCH):
            made.begin(CHAT, time.monotonic(), None).end(200)
        await asyncio.wait_for(collector.asked.wait(), patience(5))
        for _ in range(1000):
            made.begin(CHAT, time.monotonic(), None).end(200)
        assert made.counted == {"queue_full": 900}
        async with within(20):  # the collector hangs for ever
            await made.close(within_s=0.2)


async def test_a_collector_that_refuses_is_counted(caplog):
    collector = Collector()
    collector.status = 400
    async with tracing_to(collector) as made:
        made.begin(CHAT, time.monotonic(), None).end(200)
    assert made.counted == {"failed": 1}


async def test_the_environment_configures_tracing(monkeypatch):
    def made(endpoint="", **environment):
        return make_tracer(endpoint, ratio=1.0, instance="i", on_outcome=TraceCounts(), environment=environment)

    assert made() is None
    assert made("http://127.0.0.1:1", OTEL_SDK_DISABLED="true") is None
    assert made("http://127.0.0.1:1", OTEL_TRACES_EXPORTER="none") is None
    collector = Collector()
    async with serving(collector.app) as url:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=acme",
            "OTEL_RESOURCE_ATTRIBUTES": "service.name=edge,zone=a",
        }
        for name, value in environment.items():  # the exporter reads them itself
            monkeypatch.setenv(name, value)
        on = made(**environment)
        on.begin(CHAT, time.monotonic(), None).end(200)
        await on.close()
    assert collector.headers[0]["x-tenant"] == "acme"
    assert {"service.name": "edge", "zone": "a"}.items() <= collector.resources[0].items()


def test_without_opentelemetry_a_setting_is_refused_in_one_line_and_the_environment_is_not():
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from router.telemetry.tracing import TracingUnavailable, make_tracer\n"
        "more = {'ratio': 1.0, 'instance': 'i', 'on_outcome': print}\n"
        "assert make_tracer('', environment={'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://x'}, **more) is None\n"
        "try: make_tracer('http://x', environment={}, **more)\n"
        "except TracingUnavailable as exc: sys.stderr.write(f'said: {exc}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    output = done.stderr.partition("said: ")[2]
    assert "pip install 'lorafleet[tracing]'" in output
    assert "\n" not in output
    assert issubclass(TracingUnavailable, Exception)


def test_a_router_that_does_not_trace_imports_nothing_of_it():
    code = "import sys, router.telemetry.tracing; assert not any(m.startswith('opentelemetry') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_the_sending_thread_ends_with_its_tracer():
    async with tracing_to(Collector()):
        assert any(thread.name == "traces" for thread in threading.enumerate())
    assert not any(thread.name == "traces" for thread in threading.enumerate())
