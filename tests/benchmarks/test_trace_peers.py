"""The newer rules of peers, each on an example worked by hand."""

from dataclasses import replace
from random import Random

import pytest

from benchmarks.trace.fleet import EngineReading
from benchmarks.trace.learned_peers import LatencyModel, LlmDPredicted, Lodestar
from benchmarks.trace.token_peers import DynamoSessions, LlmDTokenLoad, LMetric, RayPrefixAware, RayTokenLoad
from benchmarks.trace.workload import BLOCK
from lorafleet.engine.decode_step import DecodeStep
from tests.benchmarks.test_trace import a_request, ruled, send


def cache(rule, worker, request, blocks):
    """Events that a worker has the first blocks of a prompt."""
    rule.cached(worker, [(found, True) for found in request.keys[:blocks]])


# --- LMetric, Ray -----------------------------------------------------------------------------------------------------


def test_lmetric_takes_the_least_of_new_prefill_tokens_times_batch():
    # 10 blocks and 1 token. Worker 0: nothing cached, alone: 5121 x 1. Worker 1: 9 blocks cached, three others in
    # decode: 513 x 4 = 2052. Worker 2: 5 blocks cached, one other that still prefills 513: (2561 + 513) x 2 = 6148.
    rule = ruled(LMetric)
    request = a_request(blocks=range(10))
    cache(rule, 1, request, 9)
    cache(rule, 2, request, 5)
    rule.in_flight[:] = [0, 3, 1]
    rule.to_prefill[:] = [0, 0, 513]
    assert rule.choose(request) == 1
    rule.in_flight[1] = 9  # 513 x 10 = 5130
    assert rule.choose(request) == 0
    rule.to_prefill[0] = 2000  # 7121, now behind both
    assert rule.choose(request) == 1


def test_rays_token_load_adds_remaining_prefill_prefill_in_work_and_tokens_held():
    # 513 tokens are not cached on worker 0, which holds 6,000 in decode: 6,513. Worker 1 computes all 5,121 beside
    # 1,000 in prefill, which it holds: 7,121.
    rule = ruled(RayTokenLoad, workers=2)
    request = a_request(blocks=range(10))
    cache(rule, 0, request, 9)
    rule.held[:] = [6000, 1000]
    rule.to_prefill[:] = [0, 1000]
    assert rule.choose(request) == 0
    rule.held[0] = 7000  # 7,513
    assert rule.choose(request) == 1


def test_rays_account_is_empty_when_all_have_ended():
    rule = ruled(RayTokenLoad, workers=2)
    request = a_request(blocks=range(3))
    send(rule, request, 1)
    assert (rule.to_prefill[1], rule.held[1]) == (3 * BLOCK + 1, 3 * BLOCK + 1)
    rule.first_token(request)
    assert (rule.to_prefill[1], rule.held[1]) == (0, 3 * BLOCK + 1)
    rule.ended(request)
    assert (rule.to_prefill[1], rule.held[1]) == (0, 0)


def test_rays_prefix_router_takes_the_shortest_queue_of_the_deepest_and_else_the_smallest_tree():
    rule = ruled(RayPrefixAware)
    for worker in (1, 2):
        send(rule, a_request(worker, blocks=range(9)), worker)
    rule.in_flight[:] = [0, 7, 5]
    assert rule.choose(a_request(5, blocks=(0, 1, 50, 51))) == 2, "2 of 5 blocks match on two, 2's queue is shorter"
    assert rule.choose(a_request(6, blocks=(0, *range(60, 80)))) == 0, "1 of 22 is below a tenth: 0 was sent least"


# --- Dynamo's sessions ------------------------------------------------------------------------------------------------


def test_dynamos_session_stays_bound_for_ten_minutes_and_sub_agents_share_a_binding():
    rule = ruled(DynamoSessions)
    rule.in_use[0] = rule.in_use[1] = dict.fromkeys(range(100), 1)
    first = replace(a_request(blocks=(0, 1)), session=7)
    assert rule.choose(first) == 2, "the others hold 100 blocks"
    rule.in_use[2] = dict.fromkeys(range(900), 1)
    rule.now = 599.0
    assert rule.choose(replace(first, number=1)) == 2
    assert rule.choose(replace(first, session=8)) != 2
    rule.now = 599.0 + 601.0
    assert rule.choose(replace(first, number=2)) != 2, "ten minutes without a request"
    sub_agents = [replace(first, session=20 + n, parent=7) for n in range(4)]
    assert len({rule.choose(request) for request in sub_agents}) == 1


# --- llm-d ------------------------------------------------------------------------------------------------------------


def test_llm_ds_token_load_leaves_a_sticky_worker_only_when_it_is_5_s_of_prefill_behind():
    rule = ruled(LlmDTokenLoad)
    send(rule, a_request(blocks=range(8)), 1)
    again = a_request(1, blocks=range(8))
    rule.tokens[:] = [0, 79_000, 0]  # 4.96 s at 15,928 a second
    assert [rule.choose(again) for _ in range(20)].count(1) >= 18
    rule.tokens[1] = 80_000  # 5.02 s
    assert rule.choose(again) != 1
    rule.tokens[:] = [500, 0, 300]
    assert rule.choose(a_request(2, blocks=range(50, 58))) == 1, "nobody is sticky: the fewest tokens"


def test_a_latency_model_learns_a_linear_law_from_a_few_hundred_measurements():
    rng, model = Random(1), LatencyModel(3)
    for _ in range(300):
        a, b = rng.random(), rng.random()
        model.learn((1.0, a, b), 0.05 + 2.0 * a + 0.3 * b)
    assert model.predict((1.0, 0.5, 0.5)) == pytest.approx(0.05 + 1.0 + 0.15, rel=0.01)
    assert model.predict((1.0, -9.0, 0.0)) == 0.001


def test_llm_d_predicted_weighs_first_token_and_token_time_each_by_its_range():
    rule = ruled(LlmDPredicted)
    rule.first_token_model = Fixed({0: 1.0, 1: 2.0, 2: 3.0})
    rule.token_model = Fixed({0: 0.09, 1: 0.01, 2: 0.05})
    rule._features = lambda _request, worker, _share: worker
    # 0.8 x first token + 0.2 x token time, scaled: 0 + 0.2; 0.4 + 0; 0.8 + 0.1.
    assert rule.choose(a_request(blocks=(0, 1))) == 0
    rule.first_token_model = Fixed({0: 2.0, 1: 2.0, 2: 2.0})
    assert rule.choose(a_request(1, blocks=(0, 1))) == 1, "without a range the first token weighs nothing"


def test_llm_d_predicted_falls_back_to_its_composite_before_it_has_learned():
    rule = ruled(LlmDPredicted)
    reading = EngineReading(0, 0.0, 0, 0, 0.0, 0.0, DecodeStep(), 0.0, 0.0, (), (), frozenset(), frozenset())
    rule.readings[:] = [replace(reading, worker=n, kv_usage=usage) for n, usage in enumerate((0.5, 0.2, 0.9))]
    assert rule.choose(a_request(blocks=(0, 1))) == 1


class Fixed:
    """A model that has learned these seconds by worker."""

    learned = 1000

    def __init__(self, seconds):
        self.seconds = seconds

    def predict(self, worker):
        return self.seconds[worker]


# --- Lodestar ---------------------------------------------------------------------------------------------------------


def test_lodestar_tries_each_engine_and_then_takes_the_soonest_predicted_first_token():
    rule = ruled(Lodestar)
    request = a_request(blocks=range(8))
    rule.models[0].learned = rule.models[2].learned = 30
    assert rule.choose(request) == 1, "its model has learned nothing yet"
    rng = Random(2)
    for worker, seconds_a_token in enumerate((4e-5, 1e-5, 2e-5)):
        for _ in range(200):
            tokens = rng.randrange(100, 20_000)
            features = (1.0, 0.0, 0.0, 0.0, tokens / 10_000, tokens / 10_000, rng.random())
            rule.models[worker].learn(features, tokens * seconds_a_token + features[6])
    assert rule.choose(request) == 1, "it is the fastest"
    rule._behind[1] = 5_000  # half a second, by what was learned
    assert rule.choose(request) == 2
