"""`lorafleet bench`: its plan and its figures, failures of a server, and a run against a fleet of sim engines."""

import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random

import httpx
import numpy as np
import pytest
import typer
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.cli.bench.command import chosen_models
from lorafleet.cli.bench.load import code_and_message, run_load
from lorafleet.cli.bench.plan import PlannedRequest, arrival_times, planned_requests, zipf_weights
from lorafleet.cli.bench.report import RequestOutcome, figures, most_at_a_time, percentile, report_lines
from lorafleet.cli.main import app
from lorafleet.local.authority import Authority
from lorafleet.service.failure import CommandFailed
from lorafleet.service.network.tls import Tls, TlsFiles, client_context
from tests.serving import serving

SECONDS = st.floats(0, 1e6, allow_nan=False)
VOCABULARY = list(range(1000, 1200))


@given(st.lists(SECONDS, min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-9)


@given(st.integers(1, 300), st.floats(0.1, 1000), st.integers(0, 5))
def test_arrivals_never_go_back_and_the_last_is_at_count_by_rate(count: int, rate: float, seed: int) -> None:
    times = arrival_times(count, rate, Random(seed))
    assert len(times) == count
    assert all(before <= after for before, after in itertools.pairwise(times))
    assert times[0] >= 0
    assert times[-1] == pytest.approx(count / rate)


@given(st.integers(1, 100), st.floats(0, 4))
def test_zipf_shares_fall_by_rank_and_add_up_to_one(count: int, exponent: float) -> None:
    weights = zipf_weights(count, exponent)
    assert sum(weights) == pytest.approx(1)
    for rank, weight in enumerate(weights, 1):
        assert weight == pytest.approx(weights[0] / rank**exponent)


@given(st.integers(1, 60), st.integers(0, 90), st.integers(1, 4), st.integers(0, 3))
def test_prompts_have_their_length_and_share_the_prefix_of_their_model_alone(
    length: int, prefix: int, models: int, seed: int
) -> None:
    names = [f"m{number}" for number in range(models)]
    shape = {"count": 20, "rate": None, "input_tokens": length, "shared_prefix": prefix, "zipf": 0.0, "seed": seed}
    planned = list(planned_requests(names, VOCABULARY, **shape))  # type: ignore[arg-type]
    assert planned == list(planned_requests(names, VOCABULARY, **shape))  # type: ignore[arg-type]
    assert {len(request.tokens) for request in planned} == {length}
    starts = {(request.model, request.tokens[: min(prefix, length)]) for request in planned}
    assert len(starts) == len({request.model for request in planned})


def test_the_first_models_get_the_most_requests_under_zipf() -> None:
    shape = {"rate": None, "input_tokens": 4, "shared_prefix": 0, "seed": 1}
    planned = planned_requests(["a", "b", "c"], VOCABULARY, count=2000, zipf=2.0, **shape)  # type: ignore[arg-type]
    counts = Counter(request.model for request in planned)
    assert counts["a"] > 3 * counts["b"] > 3 * counts["c"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=20))
def test_the_peak_is_that_of_counting_at_every_moment(spans: list[tuple[int, int]]) -> None:
    whole = [(float(began), float(began + length)) for began, length in spans]
    counted = max((sum(began <= at < ended for began, ended in whole) for at in range(41)), default=0)
    assert most_at_a_time(whole) == counted


OUTCOMES = [
    RequestOutcome(
        model="a", began_s=1.0, ended_s=2.0, prompt_tokens=100, output_tokens=5, chunk_s=(1.2, 1.4, 2.0),
        predicted_tokens=50, cached_tokens=48,
    ),
    RequestOutcome(model="b", began_s=0.0, ended_s=0.5, prompt_tokens=100, output_tokens=1, chunk_s=(0.4,)),
    RequestOutcome(model="a", began_s=1.5, ended_s=1.6, error="503 no_replica", error_message="none is\nready"),
]  # fmt: skip


def test_figures_are_of_successful_requests_and_errors_are_counted_by_code() -> None:
    found = figures(OUTCOMES, 4.0)
    assert (found["successful"], found["failed"], found["errors"]) == (2, 1, {"503 no_replica": 1})
    assert (found["requests_per_s"], found["output_tokens_per_s"], found["total_tokens_per_s"]) == (0.5, 1.5, 51.5)
    assert found["ttft_ms"] == pytest.approx({"mean": 300.0, "median": 300.0, "p99": 398.0})
    assert found["tpot_ms"] == pytest.approx(dict.fromkeys(("mean", "median", "p99"), 200.0)), "one token has none"
    assert found["itl_ms"] == pytest.approx({"mean": 400.0, "median": 400.0, "p99": 596.0})
    assert (found["hit_share"], found["hit_share_predicted"], found["peak_concurrent"]) == (0.48, 0.5, 2)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error": {"message": "m", "type": "BadRequestError", "code": 400}}', ("BadRequestError", "m")),
        (b'{"error": {"message": "m", "type": "invalid_request_error", "code": "too_long"}}', ("too_long", "m")),
        (b'{"error": {}}', ("", "")),
        (b'{"error": "m"}', ("", "")),
        (b"<html>", ("", "")),
    ],
)
def test_an_error_is_counted_by_its_code_or_where_that_is_the_status_by_its_type(body, code) -> None:
    assert code_and_message(body, 400) == code


def test_the_table_has_the_rows_of_vllms_benchmark() -> None:
    text = "\n".join(report_lines(figures(OUTCOMES, 4.0)))
    rows = ["Successful requests", "Benchmark duration (s)", "Total input tokens", "Total generated tokens"]
    rows += ["Request throughput (req/s)", "Output token throughput (tok/s)", "Total token throughput (tok/s)"]
    rows += [f"{name} {figure} (ms)" for figure in ("TTFT", "TPOT", "ITL") for name in ("Mean", "Median", "P99")]
    assert [row for row in [*rows, "503 no_replica"] if f"{row}:" not in text] == []
    assert "first 503 no_replica: none is ready" in text
    nothing = "\n".join(report_lines(figures([], 0.0)))
    assert "Mean TTFT (ms):                          -" in nothing


def test_adapters_are_all_some_or_the_base_model() -> None:
    assert chosen_models("all", "tiny", ["a", "b"]) == ["a", "b"]
    assert chosen_models("all", "tiny", []) == ["tiny"]
    assert chosen_models("b, base,b", "tiny", ["a", "b"]) == ["b", "tiny"]
    with pytest.raises(CommandFailed, match="nope: not adapters of tiny"):
        chosen_models("a,nope", "tiny", ["a"])


def test_the_quickstarts_benchmark_is_one_that_the_command_takes() -> None:
    page = (Path(__file__).parents[3] / "docs" / "quickstart.md").read_text()
    (line,) = re.findall(r"^lorafleet bench (.+)$", page, re.MULTILINE)
    taken = typer.main.get_command(app).commands["bench"].make_context("bench", shlex.split(line)).params
    assert (taken["requests"], taken["rate"], taken["shared_prefix"]) == (200, 20.0, 250)


def sse(*events: object) -> bytes:
    return b"".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode() for event in events)


def answering_app() -> FastAPI:
    """A server whose answer depends on the model."""
    app = FastAPI()
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    token = {"choices": [{"text": "x"}]}
    parts = {
        "good": [sse(token), sse(token), sse({"choices": [], "usage": usage}, "[DONE]")],
        "stream": [sse(token), sse({"error": {"code": "stream_broken"}})],
        "empty": [sse("[DONE]")],
        "garbled": [b"data: {no json\n\n"],
    }

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        model = (await request.json())["model"]
        if model not in parts:
            return JSONResponse({"error": {"code": "no_replica"}}, 503)

        async def body() -> AsyncIterator[bytes]:
            for part in parts[model]:
                yield part

        return StreamingResponse(body(), media_type="text/event-stream", headers={"x-lorafleet-cached-tokens": "2"})

    return app


async def test_every_failure_is_an_outcome_and_the_run_goes_on() -> None:
    models = ("good", "missing", "stream", "empty", "garbled", "good")
    seen: list[RequestOutcome] = []
    async with serving(answering_app()) as url:
        planned = [PlannedRequest(0.0, model, (1, 2, 3)) for model in models]
        shape = {"output_tokens": 2, "concurrency": 1, "timeout_s": 30.0}
        outcomes, duration_s = await run_load(url, "", planned, on_end=seen.append, **shape)  # type: ignore[arg-type]
    found = [outcome.error for outcome in outcomes]
    assert found == ["", "503 no_replica", "stream stream_broken", "empty answer", "connection JSONDecodeError", ""]
    assert sorted(seen, key=outcomes.index) == outcomes
    good = outcomes[0]
    assert (good.prompt_tokens, good.output_tokens, good.cached_tokens, good.predicted_tokens) == (3, 2, 1, 2)
    assert len(good.chunk_s) == 2
    assert most_at_a_time((outcome.began_s, outcome.ended_s) for outcome in outcomes) == 1
    assert duration_s >= good.ended_s


async def test_prompts_are_drawn_one_ahead_of_what_is_sent() -> None:
    drawn, ahead = [], []

    def planned() -> Iterator[PlannedRequest]:
        for number in range(6):
            drawn.append(number)
            yield PlannedRequest(0.0, "good", (1, 2, 3))

    shape = {"output_tokens": 2, "concurrency": 1, "timeout_s": 30.0}
    async with serving(answering_app()) as url:
        await run_load(url, "", planned(), on_end=lambda _: ahead.append(len(drawn) - len(ahead)), **shape)  # type: ignore[arg-type]
    assert len(ahead) == 6
    assert max(ahead) <= 2


async def test_a_router_with_a_certificate_is_checked_by_the_authority_that_is_given(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("router", "127.0.0.1")
    shape = {"output_tokens": 2, "concurrency": 1, "timeout_s": 30.0, "on_end": lambda _: None}
    planned = [PlannedRequest(0.0, "good", (1, 2, 3))]
    async with serving(answering_app(), tls=Tls(TlsFiles(cert=files.cert, key=files.key))) as url:
        outcomes, _ = await run_load(url, "", planned, verify=client_context(authority.ca), **shape)  # type: ignore[arg-type]
        strangers, _ = await run_load(url, "", planned, **shape)  # type: ignore[arg-type]
    assert [outcome.error for outcome in outcomes] == [""]
    assert [outcome.error for outcome in strangers] == ["connection ConnectError"]
    assert "CERTIFICATE_VERIFY_FAILED" in strangers[0].error_message


async def test_a_server_that_is_away_is_an_error_of_each_request() -> None:
    shape = {"output_tokens": 2, "concurrency": None, "timeout_s": 30.0}
    away = [PlannedRequest(0.0, "m", (1,))] * 3
    outcomes, _ = await run_load("http://127.0.0.1:1", "", away, on_end=lambda _: None, **shape)  # type: ignore[arg-type]
    assert [outcome.error for outcome in outcomes] == [f"connection {httpx.ConnectError.__name__}"] * 3
