"""The trace benchmark: its workload, bounds, router reports, the peers' rules, and its quick run."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest

from benchmarks.trace.contenders import PEERS
from benchmarks.trace.engine import NEVER, Hardware, TraceEngine, TraceJob
from benchmarks.trace.fleet import Changes, EngineReading, Setting, TraceFleet
from benchmarks.trace.ideals import ideals
from benchmarks.trace.measure import TraceCase, figures, names, run
from benchmarks.trace.peers import CacheAware, Dynamo, LlmD, StackKvAware, StackPrefixAware
from benchmarks.trace.workload import BLOCK, TICK_S, TraceRequest, drawn, key, read, requests_of
from lorafleet.engine.decode_step import DecodeStep
from router.core.schedule.cost_settings import CostSettings
from tests.benchmarks.smoke import rows_of
from tests.patience import patience

SMALL = drawn(80)
HARDWARE = Hardware(blocks=150)


def a_request(number: int = 0, *, blocks: Sequence[int] = (0,), adapter: int = 0, arrived: float = 0.0, tail: int = 1):
    """A prompt of these whole blocks and `tail` tokens more."""
    tokens = len(blocks) * BLOCK + tail
    keys = [key(adapter, block) for block in blocks]
    ids = (*blocks, 1_000_000 + number)
    return TraceRequest(number, arrived, tokens, 3, keys, ids, adapter, session=ids[1], router=0)


# --- workload ---------------------------------------------------------------------------------------------------------


def test_requests_come_within_their_tick_and_sessions_keep_their_adapter():
    requests = requests_of(SMALL, seed=3, load=2.0, routers=4)
    assert [r.arrived for r in requests] == sorted(r.arrived for r in requests)
    by_ids = {line.ids: line for line in SMALL}
    for request in requests:
        assert 0 <= request.arrived * 2.0 - by_ids[request.ids].at_s < TICK_S
    adapters: dict[int, set[int]] = {}
    for request in requests:
        adapters.setdefault(request.session, set()).add(request.adapter)
    assert all(len(found) == 1 for found in adapters.values())
    assert len({request.adapter for request in requests}) > 10
    assert {request.router for request in requests} == {0, 1, 2, 3}


def test_blocks_are_the_same_only_under_the_same_adapter():
    keys = {(adapter, block): key(adapter, block) for adapter in range(100) for block in range(300)}
    assert len(set(keys.values())) == len(keys)
    assert all(0 <= found < 1 << 63 for found in keys.values())


def test_a_file_that_is_no_trace_is_refused_with_its_line_and_where_to_get_one(tmp_path):
    file = tmp_path / "trace.jsonl"
    good = {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    file.write_text(f"{json.dumps(good)}\n{json.dumps(good | {'hash_ids': [0]})}\n")
    with pytest.raises(ValueError, match=r"line 2: 1 ids for 600 tokens"):
        read(file)
    file.write_text(f'{json.dumps(good)}\n{{"prompt": "hello"}}\n')
    with pytest.raises(ValueError, match=r"line 2.*FAST'25"):
        read(file)
    file.write_text(json.dumps(good))
    assert [(line.at_s, line.ids) for line in read(file)] == [(3.0, (0, 1))]


# --- bounds -----------------------------------------------------------------------------------------------------------


def best_possible(order: Sequence[int], blocks: int) -> int:
    """Hits of the best of all ways to evict, tried one by one."""

    def best(at: int, held: frozenset[int]) -> int:
        if at == len(order):
            return 0
        if order[at] in held:
            return 1 + best(at + 1, held)
        full = held | {order[at]}
        if len(full) <= blocks:
            return best(at + 1, full)
        return max(best(at + 1, full - {victim}) for victim in full)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(20))
def test_min_is_the_best_that_any_eviction_can_do(seed):
    rng = Random(seed)
    order = [rng.randrange(4) for _ in range(10)]
    requests = [a_request(n, blocks=(block,)) for n, block in enumerate(order)]
    found = ideals(requests, 2)
    share = BLOCK / sum(request.prompt_tokens for request in requests)
    assert found.belady == pytest.approx(best_possible(order, 2) * share)
    assert found.lru_answers <= found.lru <= found.belady <= found.unlimited
    assert found.unlimited == pytest.approx((10 - len(set(order))) * share)


def test_a_prompt_that_is_all_cached_still_computes_its_last_block():
    requests = [a_request(n, blocks=(1, 2), tail=0) for n in range(2)]
    assert ideals(requests, 10).lru == pytest.approx(BLOCK / (4 * BLOCK))


# --- the engine's additions (the rest is in test_trace_engine.py) -----------------------------------------------------


def finish_all(engine: TraceEngine) -> None:
    while engine.due < NEVER:
        engine.finish()


def test_prefill_grows_with_the_square_and_decode_steps_with_batch_and_context():
    hardware = replace(HARDWARE, to_device_s=0.0, load_s=0.0, max_num_batched_tokens=2048)
    engine = TraceEngine(hardware, Random(0))
    job = TraceJob(1, [], 5000, 200, None)
    engine.add(job, 0.0)
    finish_all(engine)
    assert job.first_token == pytest.approx(5000 * hardware.prefill_s + hardware.attention_s * 5000**2 / 2)
    context = sum(5000 + step for step in range(199))
    decode_s = 199 * (hardware.decode_s + hardware.decode_seq_s) + hardware.decode_context_s * context
    assert job.last_token - job.first_token == pytest.approx(decode_s)
    assert sum(engine.gaps.values()) == 199


def test_an_arrival_cuts_a_stretch_at_the_end_of_the_step_it_falls_into():
    hardware = replace(HARDWARE, attention_s=0.0, decode_seq_s=0.0, decode_context_s=0.0, to_device_s=0.0)
    engine = TraceEngine(hardware, Random(0))
    first, second = TraceJob(1, [], 100, 1000, None), TraceJob(2, [], 100, 1, None)
    engine.add(first, 0.0)
    engine.finish()
    began = first.first_token
    engine.add(second, began + 2.5 * hardware.decode_s)
    assert engine.due == pytest.approx(began + 3 * hardware.decode_s)
    assert engine.read(began + 1.5 * hardware.decode_s).token_gaps == 1
    finish_all(engine)
    assert second.scheduled == pytest.approx(began + 3 * hardware.decode_s)
    prefill_s = 100 * hardware.prefill_s
    assert first.last_token == pytest.approx(began + 999 * hardware.decode_s + prefill_s)


def test_whoever_leaves_gives_back_its_blocks_wherever_it_is():
    engine = TraceEngine(replace(HARDWARE, max_num_seqs=2), Random(0))
    jobs = [TraceJob(n, [], 20_000, 50, n) for n in range(4)]
    for job in jobs:
        engine.add(job, 0.0)
    engine.finish()
    engine.abort(jobs[0], engine.due)  # in the middle of its prefill
    engine.abort(jobs[3], engine.due)  # in line
    finish_all(engine)
    engine.abort(jobs[1], 99.0)  # long over
    assert [job.produced for job in jobs] == [0, 50, 50, 0]
    assert engine.kv_usage == 0.0
    assert not engine.waiting.count


def test_an_adapter_is_read_from_disk_once_while_the_host_has_room_for_it():
    engine = TraceEngine(replace(HARDWARE, load_s=2.0, load_sigma=0.0, max_loras=1, max_cpu_loras=2), Random(0))
    for number, adapter in enumerate((1, 2, 1, 3, 2)):
        engine.add(TraceJob(number, [], 10, 1, adapter), engine.due if engine.due < NEVER else 100.0 * number)
        finish_all(engine)
    assert engine.counters.loads == 4  # 1, 2, then 3 puts out 2
    assert engine.counters.load_seconds == pytest.approx(8.0)


# --- reports to routers -----------------------------------------------------------------------------------------------


class Recorder:
    """A router that sends everything to worker 0 and records its reports."""

    def __init__(self, fleet: TraceFleet) -> None:
        self.fleet = fleet
        self.offered: list[int] = []
        self.answered: list[int] = []
        self.over: list[int] = []
        self.read_at: dict[int, list[float]] = {}
        self.heard: list[tuple[float, int]] = []
        self.forgotten: list[tuple[float, int]] = []
        self.losses: list[tuple[float, int]] = []

    def offer(self, request: TraceRequest, now: float) -> None:
        self.offered.append(request.number)
        self.fleet.send(request, 0)

    def first_token(self, request: TraceRequest) -> None:
        self.answered.append(request.number)

    def ended(self, request: TraceRequest) -> None:
        self.over.append(request.number)

    def read(self, reading: EngineReading) -> None:
        assert reading.at == self.fleet.now
        self.read_at.setdefault(reading.worker, []).append(reading.at)

    def lost(self, worker: int) -> None:
        self.losses.append((self.fleet.now, worker))

    def cached(self, worker: int, changes: Changes) -> None:
        self.heard += [(self.fleet.now, found) for found, is_new in changes if is_new and worker == 0]
        self.forgotten += [(self.fleet.now, found) for found, is_new in changes if not is_new and worker == 0]


def recorded(requests: list[TraceRequest], **changes: object) -> tuple[TraceFleet, list[Recorder]]:
    fleet = TraceFleet(replace(Setting(hardware=HARDWARE), **changes), seed=0)  # type: ignore[arg-type]
    routers = [Recorder(fleet) for _ in range(fleet.setting.routers)]
    fleet.routers += routers
    fleet.run(requests)
    return fleet, routers


def test_each_router_hears_of_its_own_requests_and_of_every_report_and_event():
    requests = requests_of(SMALL, seed=0, load=0.2, routers=2)
    _, routers = recorded(requests, routers=2, report_s=5.0)
    for number, router in enumerate(routers):
        mine = [request.number for request in requests if request.router == number]
        assert router.offered == mine
        assert sorted(router.answered) == sorted(router.over) == mine
        assert all(later - at == pytest.approx(5.0) for at, later in pairwise(router.read_at[3]))
    assert routers[0].heard == routers[1].heard
    assert {found for _, found in routers[0].heard} >= {found for request in requests for found in request.keys}


def test_cached_blocks_are_heard_of_only_after_the_step_that_filled_them():
    request = a_request(blocks=range(1, 31))
    _, (router,) = recorded([request])
    heard = {found: at for at, found in router.heard}
    assert heard[request.keys[0]] >= HARDWARE.prefill_s * HARDWARE.max_num_batched_tokens + 0.03
    assert heard[request.keys[-1]] >= request.first_token + 0.03, "it belongs to the prompt's last piece"


def test_a_client_that_waits_too_long_leaves_and_counts_as_failed():
    requests = [a_request(n, blocks=range(n * 100, n * 100 + 100)) for n in range(6)]
    fleet, (router,) = recorded(requests, timeout_s=5.0)
    found = figures(requests, fleet)
    assert 0 < found.failed < 6
    assert found.ttft_p99_s == inf
    assert sorted(router.over) == [0, 1, 2, 3, 4, 5]
    waited = [r.first_token - r.arrived if r.first_token >= 0 else 5.0 for r in requests]
    assert found.ttft_mean_s == pytest.approx(sum(waited) / 6)
    assert fleet.engines[0].kv_usage == 0.0


# --- policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("policy", names())
def test_every_policy_answers_everything_at_light_load_and_twice_the_same(policy):
    case = TraceCase(capacity=150, load=0.3, routers=2, report_s=1.0)
    outcomes = []
    for _ in range(2):
        found, requests, _ = run(policy, SMALL, case, 1, hardware=HARDWARE, late_binding_s=1.0, costs=CostSettings())
        outcomes.append([(r.worker, r.first_token, r.last_token) for r in requests])
        if "prefixaware" not in policy:  # its trie sends everything that begins alike to one engine
            assert (found.shed, found.failed) == (0, 0)
    assert outcomes[0] == outcomes[1]


def ruled(rule, *, workers=3, blocks=100):
    return rule(workers, blocks, Random(0))


def send(rule, request, worker):
    request.worker = worker
    rule.choose(request)
    rule.in_flight[worker] += 1
    rule.sent(request, worker)


def test_prefixaware_goes_where_the_prompt_went_whatever_the_load_and_the_adapter():
    rule = ruled(StackPrefixAware)
    send(rule, a_request(blocks=(0, 1, 2)), 2)
    rule.in_flight[2] = 1000
    assert rule.choose(a_request(1, blocks=(0, 1, 3), adapter=7)) == 2


def test_cache_aware_balances_only_when_far_apart_and_matches_above_its_threshold():
    rule = ruled(CacheAware)
    send(rule, a_request(blocks=(0, 1, 2, 3)), 1)
    assert rule.choose(a_request(1, blocks=(0, 1, 2, 9))) == 1
    assert rule.choose(a_request(2, blocks=(0, 7, 8, 9))) != 1, "a match of 0.2 is not above 0.3"
    rule.in_flight[:] = [66, 66, 0]
    assert rule.choose(a_request(3, blocks=(0, 1, 2, 9))) == 2


def test_kvaware_asks_the_first_holder_and_else_the_session():
    rule = ruled(StackKvAware)
    request = a_request(blocks=(0, 1, 2, 3))
    home = rule.choose(request)
    other = (home + 1) % 3
    rule.cached(other, [(found, True) for found in request.keys])
    assert rule.choose(request) == other
    rule.cached(other, [(request.keys[0], False)])
    assert rule.choose(request) == home


def test_llm_d_weighs_queue_cache_and_prefix():
    rule = ruled(LlmD)
    request = a_request(blocks=(0, 1, 2, 3))
    send(rule, request, 1)
    assert rule.choose(request) == 1
    reading = EngineReading(1, 0.0, 5, 9, 0.9, 0.0, DecodeStep(), 0.0, 0.0, (), (), frozenset(), frozenset())
    rule.readings[:] = [
        replace(reading, worker=n, waiting=9 if n == 1 else 0, kv_usage=0.9 * (n == 1)) for n in range(3)
    ]
    assert rule.choose(request) != 1, "2 for the queue and 1.8 for the cache outweigh 3 for the prefix"


def test_dynamo_counts_prefill_in_work_and_blocks_in_use_less_the_overlap():
    rule = ruled(Dynamo)
    request = a_request(blocks=range(8))
    rule.cached(2, [(found, True) for found in request.keys])
    assert rule.choose(request) == 2
    for n in range(3):
        send(rule, a_request(10 + n, blocks=range(100 * n + 100, 100 * n + 120)), 2)
    assert rule.choose(request) != 2


def test_what_a_peer_forgets_it_counts_once():
    request = a_request(blocks=range(8))
    for rule in (ruled(peer) for peer in PEERS.values()):
        rule.choose(request)
        request.worker = 1
        rule.sent(request, 1)
        rule.first_token(request)
        rule.ended(request)
    dynamo = ruled(Dynamo)
    send(dynamo, request, 1)
    dynamo.ended(request)
    assert dynamo.prefill_tokens == [0, 0, 0]
    assert dynamo.in_use == [{}, {}, {}]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_quick_benchmark_ends_and_writes_its_rows(tmp_path):
    rows = rows_of("trace", tmp_path, "--policies", "kv_lora,dynamo")
    ours = [row for row in rows if row["what"].endswith("kv_lora: mean TTFT")]
    assert len(ours) == 1
    assert ours[0]["baseline"] == "dynamo"
    assert ours[0]["reach"] == pytest.approx(1.02 * ours[0]["baseline_value"])


def test_without_a_trace_it_says_where_to_get_one():
    command = [sys.executable, "-P", "-m", "benchmarks.trace"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patience(20), check=False, env={"PATH": ""})
    assert ended.returncode == 1
    assert "--trace FILE" in ended.stderr
    assert "kvcache-ai/Mooncake" in ended.stderr
