"""The fleet benchmark: what it sends, what it makes of the answers, and its quick run."""

import json
from dataclasses import replace

import pytest

from benchmarks.fleet.engines import PrefixCounts
from benchmarks.fleet.figures import absent, figures, rows_of
from benchmarks.fleet.replay import FleetOutcome, has_text
from benchmarks.fleet.workload import SCALE, FleetRequest, PromptWriter, chats, engine_flags, thinned
from benchmarks.trace.engine import Hardware
from benchmarks.trace.workload import TraceLine, drawn, session_of
from lorafleet.local.tiny_model import make_model
from lorafleet.tokenizer.chat import ChatTokenizer
from tests.benchmarks import smoke

REQUEST = FleetRequest(at_s=0.0, body=b"", prompt_tokens=10_000, output_tokens=11)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return ChatTokenizer.from_dir(make_model(tmp_path_factory.mktemp("model") / "model"))


def test_engine_an_eighth_as_fast_and_an_eighth_as_large_takes_the_same_seconds():
    flags = dict(zip(*[iter(engine_flags(Hardware()))] * 2, strict=True))
    assert float(flags["--sim-prefill-tokens-per-s"]) == pytest.approx(31_250 / SCALE, rel=1e-3)
    assert int(flags["--num-gpu-blocks-override"]) * int(flags["--block-size"]) == 750 * 512 // SCALE


def test_thinned_trace_has_whole_sessions_in_order():
    lines = drawn(200)
    kept = thinned(lines, 50, seed=1)
    sessions = {session_of(line) for line in kept}
    assert kept == [line for line in lines if session_of(line) in sessions]
    assert 50 <= len(kept) < 100
    assert thinned(lines, 1000, seed=1) == lines


def test_prompts_share_the_words_of_their_common_blocks_and_have_an_eighth_of_the_tokens(tokenizer):
    writer = PromptWriter(tokenizer)
    one = writer.text(TraceLine(0.0, 1300, 1, (0, 1, 2)))
    longer = writer.text(TraceLine(0.0, 1600, 1, (0, 1, 2, 3)))
    other = writer.text(TraceLine(0.0, 1300, 1, (0, 7, 2)))
    assert longer.startswith(one)
    assert one.split()[:20] == other.split()[:20]
    assert one != other
    tokens = len(tokenizer.encode(one, add_special_tokens=False))
    assert tokens == pytest.approx(1300 / SCALE, rel=0.1)


def test_chats_arrive_at_the_rate_asked_for_and_ask_for_an_eighth_of_the_tokens(tokenizer):
    lines = [TraceLine(float(second), 512, 80, (0, second + 1)) for second in range(0, 90, 3)]
    requests = chats(lines, 10.0, tokenizer, seed=1)
    assert requests[0].at_s == 0
    assert requests[-1].at_s == pytest.approx(len(lines) / 10)
    assert {json.loads(request.body)["max_tokens"] for request in requests} == {80 // SCALE}
    assert requests == chats(lines, 10.0, tokenizer, seed=1)


def test_figures_count_a_failure_as_the_timeout_and_judge_the_others_by_their_trace_lengths():
    good, slow, failed = FleetOutcome(), FleetOutcome(), FleetOutcome(failure="500")
    for at_s in (1.5, 1.6, 1.8):
        good.add_token(at_s)
    slow.add_token(2.5)  # 1 s, and 1 s for 10,000 tokens, would be good
    assert good.gaps_s == pytest.approx([0.1, 0.2])
    found = figures([REQUEST] * 3, [good, slow, failed], PrefixCounts(1000.0, 250.0), router_cpu_s=0.3)
    assert found.failed == 1
    assert found.first_mean_s == pytest.approx((1.5 + 2.5 + 120) / 3)
    assert (found.first_p50_s, found.gap_p99_s) == (2.5, pytest.approx(0.2))
    assert (found.good_share, found.hit_share, found.router_cpu_s) == (pytest.approx(1 / 3), 0.25, pytest.approx(0.1))
    values = {row.what: row.value for row in rows_of(replace(found, first_p99_s=float("inf")), "peer")}
    assert values["first token, p99"] == -1.0
    assert values["CPU of the router"] == pytest.approx(100.0)


def test_event_with_a_role_alone_is_no_token():
    assert not has_text(b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}')
    assert not has_text(b'{"choices": [], "usage": {}}')
    assert has_text(b'{"choices": [{"delta": {"content": " a"}}]}')


def test_peer_that_is_missing_is_a_row_with_the_reason():
    row = absent("smg cache_aware", "not installed")
    assert (row.contender, row.value) == ("smg cache_aware", 0)
    assert "not installed" in row.what


@pytest.mark.fleet
@pytest.mark.thorough
def test_the_quick_fleet_benchmark_answers_every_request_and_names_the_missing_peers(tmp_path):
    rows = smoke.rows_of("fleet", tmp_path, within_s=120)
    ours = {row["what"]: row["value"] for row in rows if not row["contender"]}
    assert ours["requests that failed"] == 0
    assert ours["first token, mean"] > 0
    missing = [row for row in rows if row["contender"]]
    assert len(missing) == 4
    assert all("not installed" in row["what"] for row in missing)
