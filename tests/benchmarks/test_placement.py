"""The placement benchmark: its simulated fleet, and its quick run."""

import json
import sys
from collections import deque
from dataclasses import replace

import pytest

import benchmarks.placement.__main__ as command
from benchmarks.placement.ideal import shared_lru
from benchmarks.placement.measure import CONTENDERS, TAIL_PEERS, run
from benchmarks.placement.papers import (
    ByRank,
    Migrating,
    RankAware,
    added_s,
    migrations,
    requests_left,
    shares_by_rank,
)
from benchmarks.placement.peers import Discard, OnDemand, Scored
from benchmarks.placement.workload import LOAD_S, PlacementRequest, Scenario, requests_of
from benchmarks.placement.world import Copy, World, sure_after_s
from orchestrator.config import OrchestratorSettings
from tests.benchmarks.smoke import rows_of

SMALL = Scenario(name="small", adapters=20, workers=2, slots=4, rate=2.0, lasts_s=300, warm_s=60, work_s=0.3)


@pytest.mark.thorough
def test_the_quick_benchmark_writes_its_rows(tmp_path):
    rows = rows_of("placement", tmp_path, "--processes", "1")
    (moves, *_) = [row for row in rows if row["what"].startswith("constant")]
    assert moves["value"] == 0


@pytest.mark.slow
def test_the_command_writes_the_rows_of_short_scenes(tmp_path, monkeypatch):
    def short(scene):
        trouble = {} if scene.flash is None else {"flash": (25, 35, 2.0), "lost": 40, "back": 50}
        return replace(scene, lasts_s=60, warm_s=20, **trouble)

    out = tmp_path / "rows.json"
    monkeypatch.setattr(command, "_quick", short)
    monkeypatch.setattr(sys, "argv", ["placement", "--quick", "--processes", "1", "--json", str(out)])
    command.main()
    rows = json.loads(out.read_text())
    assert {row["what"].partition(":")[0] for row in rows} == {"100 adapters", "flash and loss", "constant"}


@pytest.mark.parametrize("contender", sorted({*CONTENDERS, *(peer.name for peer in TAIL_PEERS)}))
def test_every_contender_serves_every_request_in_the_end(contender):
    figures = run(contender, SMALL, seed=1)
    assert figures.unserved == 0
    assert figures.waits > 0
    assert figures.loads > 0


def test_a_run_can_be_repeated_to_the_bit():
    assert run(CONTENDERS[0], SMALL, seed=2) == run(CONTENDERS[0], SMALL, seed=2)


def test_one_lru_over_all_slots_misses_what_it_evicted_and_nothing_else():
    requests = [PlacementRequest(float(at), adapter, 0.1) for at, adapter in enumerate([1, 2, 1, 3, 2, 1])]
    assert shared_lru(requests, 2, warm_s=0.0, takes_time=False) == (5, 5)
    assert shared_lru(requests, 3, warm_s=0.0, takes_time=False) == (3, 3)
    soon = [PlacementRequest(0.0, 1, 0.1), PlacementRequest(0.1, 1, 0.1), PlacementRequest(100.0, 1, 0.1)]
    assert shared_lru(soon, 1, warm_s=0.0, takes_time=True) == (2, 1)


def still_world(**copies):
    """A world at second 100 whose first worker has these adapters ready: `a3` -> when adapter 3 was last used."""
    world = World(SMALL, [], seed=1)
    world.now = 100.0
    for name, last_used in copies.items():
        world.workers["w0"].copies[int(name[1:])] = Copy("ready", 0.0, last_used)
    return world


def test_on_demand_spreads_loads_over_the_workers_in_turn():
    world = still_world()
    rule = OnDemand(world)
    for adapter in (1, 2, 3, 4):
        rule.wanted(adapter)
    assert [name for _, _, name in world.loads] == ["w1", "w0"]
    assert {name: list(queue) for name, queue in rule.queues.items()} == {"w1": [3], "w0": [4]}


def test_an_idle_adapter_is_dropped_and_one_in_use_stays():
    world = still_world(a1=10.0, a2=20.0)
    world.workers["w0"].copies[2].in_flight = 1
    Discard(world).second()
    assert set(world.workers["w0"].copies) == {2}


def test_scored_cache_keeps_what_is_asked_often_before_what_was_asked_last():
    world = still_world(a1=10.0, a2=99.0)
    world.sent = {(1, "w0"): (50, 1.0), (2, "w0"): (2, 1.0)}
    rule, copies = Scored(world), world.workers["w0"].copies
    # 0.45 x 50/50 + 0.10 x 10/100 and 0.45 x 2/50 + 0.10 x 99/100
    assert [round(rule._eviction_rank(adapter, copies[adapter]), 3) for adapter in (1, 2)] == [0.46, 0.117]


def test_dlora_shares_the_busiest_workers_adapter_so_that_both_workers_end_at_once():
    """w0 has 12 s, w1 none, a load takes 2 s: 5 s of adapter 1 move, and both end after 7 s."""
    assert migrations({"w0": {1: 8.0, 2: 4.0}, "w1": {}}, load_s=2.0) == [(1, "w1")]
    # Of 12 s nothing can move that a load of 12 s would not make up for.
    assert migrations({"w0": {1: 8.0, 2: 4.0}, "w1": {}}, load_s=12.0) == []
    # Adapter 1 is on both: its requests move without a load, 6 and 6 s.
    assert migrations({"w0": {1: 12.0}, "w1": {1: 0.0}}, load_s=2.0) == []
    # All 3 s of adapter 1 leave 9 beside 3.5 s; then 2.5 s of adapter 2, and both end after 6.5.
    assert migrations({"w0": {1: 3.0, 2: 3.0, 3: 3.0, 4: 3.0}, "w1": {}}, load_s=0.5) == [(1, "w1"), (2, "w1")]


def test_dlora_migrates_every_ten_seconds_once_a_worker_has_more_than_a_batch():
    world = still_world(a1=10.0)
    rule = Migrating(world)
    world.line[1] = deque(PlacementRequest(99.0, 1, 1.0) for _ in range(rule.batch))
    for _ in range(10):
        rule.second()
    assert world.loads == []
    world.line[1].append(PlacementRequest(99.0, 1, 1.0))
    for _ in range(9):
        rule.second()
    assert world.loads == []
    rule.second()
    assert [(adapter, name) for _, adapter, name in world.loads] == [(1, "w1")]


def test_requests_in_line_count_where_their_adapter_is_served_first():
    world = still_world(a1=10.0)
    world.workers["w1"].copies[1] = Copy("ready", 0.0, 0.0)
    world.workers["w0"].free_at = 102.0
    first, second, third = (PlacementRequest(99.0, 1, work_s) for work_s in (3.0, 1.0, 1.0))
    world.line[1] = deque((first, second, third))
    # w1 is free and takes the first until 103; w0 ends at 102 and takes the second until 103, and by name the third.
    assert requests_left(world) == {"w0": [second, third], "w1": [first]}


def test_toppings_sends_rank_8_to_two_of_its_kind_rather_than_to_one_of_rank_128():
    """3 requests in 3 s for 2 in 2: 1 s more. Rank 128 takes 1.84 times as long: 2 in 3.68 s for 1 in 1.84."""
    assert added_s([(1.0, 8), (1.0, 8)], (1.0, 8)) == pytest.approx(1.0)
    assert added_s([(1.0, 128)], (1.0, 8)) == pytest.approx(1.84)
    # With as many requests there: 1 s x 3 against 1.84 s x 2.
    world = World(replace(SMALL, ranks=(8, 128), work_s=1.0), [], seed=1)
    queue(world, "w0", (0, 2))
    queue(world, "w1", (1,))
    rule = RankAware(world)
    rule.wanted(4)
    assert [(adapter, name) for _, adapter, name in world.loads] == [(4, "w0")]
    # A request of rank 128 would take w0 from 2 s to 5.52, and w1 from 1.84 to 3.68: there it costs less.
    rule.wanted(5)
    assert [(adapter, name) for _, adapter, name in world.loads] == [(4, "w0"), (5, "w1")]


def test_loraserve_gives_each_worker_half_of_the_load_and_the_like_ranks():
    loads, ranks = {1: 0.6, 2: 0.6, 3: 0.4, 4: 0.4}, {1: 128, 2: 64, 3: 8, 4: 8}
    high, low = shares_by_rank(loads, ranks, 2)
    assert high == {1: pytest.approx(0.6), 2: pytest.approx(0.4)}
    assert low == {2: pytest.approx(0.2), 3: pytest.approx(0.4), 4: pytest.approx(0.4)}
    # One adapter may fill several workers.
    shares = shares_by_rank({1: 2.0, 2: 1.0}, {1: 8, 2: 8}, 3)
    assert [share.keys() for share in shares] == [{1}, {1}, {2}]


def test_loraserve_moves_an_adapter_to_its_rank_and_drops_the_old_copy_once_the_new_one_is_ready():
    world = World(replace(SMALL, ranks=(128, 8), slots=2), [], seed=1)
    world.now = 100.0
    world.workers["w0"].copies |= {0: Copy("ready", 0.0, 0.0), 1: Copy("ready", 0.0, 0.0)}
    # One request a second for each: 1.84 and 1 of the load, 1.42 for each worker.
    world.sent = {(0, "w0"): (60, 60.0), (1, "w0"): (60, 60.0)}
    rule = ByRank(world)
    rule.seconds = rule.every_s - 1
    rule.second()
    assert rule.homes == {0: {"w0", "w1"}, 1: {"w1"}}
    assert [(adapter, name) for _, adapter, name in world.loads] == [(1, "w1")]
    assert list(rule.queues["w1"]) == [0]
    assert set(world.workers["w0"].copies) == {0, 1}
    world.workers["w1"].copies = {0: Copy("ready", 0.0, 0.0), 1: Copy("ready", 0.0, 0.0)}
    world.workers["w0"].copies[1].in_flight = 1
    rule.second()
    assert world.workers["w0"].copies[1].state == "draining"
    world.workers["w0"].copies[1].in_flight = 0
    rule.second()
    assert set(world.workers["w0"].copies) == {0}


def queue(world, worker, adapters):
    """Requests of a second each for these adapters, without a first token yet."""
    world.workers[worker].queued = [PlacementRequest(0.0, adapter, 1.0, first_token=9.0) for adapter in adapters]


def test_largest_rank_on_an_engine_lengthens_all_that_is_sent_there():
    requests = [PlacementRequest(20.0, 0, 1.0), PlacementRequest(20.1, 1, 1.0), PlacementRequest(60.0, 0, 1.0)]
    world = World(Scenario(name="ranks", workers=1, lasts_s=100, ranks=(8, 128)), requests, seed=1)
    placer = LoadWantedPolicy(world)
    world.at(0.0, lambda: (placer.wanted(0), placer.wanted(1)))
    world.run(placer)
    # The second waits for the first and takes 1.84 s; once both are answered, the third takes a second again.
    assert [request.first_token for request in requests] == pytest.approx([21.0, 22.84, 61.0])


def test_greedy_tenant_asks_for_its_adapters_in_turn():
    scene = replace(SMALL, rate=0.001, lasts_s=10, greedy=(3, 2.0))
    asked = [request.adapter for request in requests_of(scene, 1) if request.adapter >= scene.first_greedy]
    assert asked[:6] == [20, 21, 22, 20, 21, 22]
    assert scene.all_adapters == 23


class LoadWantedPolicy:
    """A policy that loads the wanted adapter on the only worker."""

    name = "nobody"

    def __init__(self, world):
        self.world = world

    def wanted(self, adapter):
        worker = self.world.workers["w0"]
        if adapter not in worker.copies:
            self.world.load(adapter, worker)

    def loaded(self, worker):
        pass

    def lost(self, worker):
        pass

    def joined(self):
        pass

    def second(self):
        pass


def test_a_request_waits_for_its_load_and_then_for_those_before_it():
    requests = [PlacementRequest(1.0, 0, 0.5), PlacementRequest(1.1, 0, 0.5), PlacementRequest(60.0, 0, 0.5)]
    world = World(Scenario(name="one", workers=1, lasts_s=100), requests, seed=1)
    world.run(LoadWantedPolicy(world))
    first, second, third = requests
    assert LOAD_S / 2 < first.first_token - first.at < LOAD_S * 3
    assert second.first_token == pytest.approx(first.first_token + 0.5)
    assert third.first_token == pytest.approx(60.5)
    assert [request.has_waited for request in requests] == [True, True, False]


def test_an_engine_is_given_a_second_of_work_and_the_rest_goes_where_its_adapter_comes_to_be():
    requests = [PlacementRequest(20.0 + number / 100, 0, 1.0) for number in range(10)] + [PlacementRequest(0.0, 0, 0.1)]
    world = World(
        Scenario(name="two", workers=2, lasts_s=100), sorted(requests, key=lambda request: request.at), seed=1
    )
    placer = LoadWantedPolicy(world)
    world.at(20.5, lambda: placer.world.load(0, world.workers["w1"]))
    world.run(placer)
    first = sorted(request.first_token for request in requests[:10])
    assert first[1] == pytest.approx(22.0)
    at_w0 = world.sent[0, "w0"][0] - 1
    assert (at_w0, world.sent[0, "w1"][0]) == (7, 3)
    assert not world.line


def test_a_lost_worker_s_requests_begin_again_where_their_adapter_is():
    requests = [PlacementRequest(1.0, 0, 0.5), PlacementRequest(50.0, 0, 5.0)]
    world = World(Scenario(name="two", workers=1, lasts_s=200, lost=51.0, back=60.0), requests, seed=1)
    placer = LoadWantedPolicy(world)
    placer.lost = lambda worker: None
    placer.wanted = lambda adapter: (
        world.workers
        and [world.load(adapter, worker) for worker in world.workers.values() if adapter not in worker.copies]
    )
    placer.joined = lambda: [placer.wanted(adapter) for adapter in list(world.waiting)]
    world.run(placer)
    assert requests[1].first_token > 60.0


def test_a_loss_is_certain_when_a_probe_has_failed_after_a_silence_that_is_long_enough():
    settings = OrchestratorSettings.model_construct(probe_after_s=2.0, lost_after_s=3.0)
    assert sure_after_s(settings, 0.0) == 4.0
    assert sure_after_s(settings, 0.5) == 4.5
    assert sure_after_s(settings, 1.5) == 3.5


def test_the_same_seed_draws_the_same_requests_and_zipf_the_hottest():
    one, two = requests_of(SMALL, 3), requests_of(SMALL, 3)
    assert [(r.at, r.adapter, r.work_s) for r in one] == [(r.at, r.adapter, r.work_s) for r in two]
    assert one != requests_of(SMALL, 4)
