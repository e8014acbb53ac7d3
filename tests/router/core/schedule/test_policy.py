import gc
import json
import weakref
from dataclasses import replace
from math import inf
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from lorafleet.identity import rendezvous_order, rendezvous_score
from router.config import RouterSettings
from router.core.errors import NoReplica
from router.core.fleet import EngineReport, Replica, ResidentAdapter, Roster
from router.core.schedule.cost import kappa, lost_work, replica_score
from router.core.schedule.cost_loop import roster_costs
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.load_snapshot import FleetLoad, ReplicaLoad
from router.core.schedule.policies import POLICIES
from router.core.schedule.policies.kv_lora import KvLoraPolicy, within_slots
from router.core.schedule.policy import decide
from router.core.schedule.record import record_of, replay_decision
from router.core.schedule.request import HashedRequest, PrefixMatch, RoutingRequest
from router.core.schedule.snapshot import FleetSnapshot
from router.core.scheduler import Scheduler
from tests.properties import examples

SQL = "sql/v1@aaaaaaaaaaaa"
OTHERS = ("b/v1@cccccccccccc", "c/v1@dddddddddddd")
VICTIMS = st.tuples(st.floats(0, 2000), st.floats(0, 1), st.floats(0, 9000))


def a_replica(name, *, residents=(), location="device", load_s=0.0, **more):
    held = {n: ResidentAdapter(n.split("@")[0], "a" * 64, n, location, load_s=load_s) for n in residents}
    base = Replica(
        id=name,
        base_model="m",
        engine_url=f"http://{name}",
        agent_url=f"http://{name}",
        dialect="vllm",
        state="ready",
        block_size=16,
        max_loras=2,
        max_num_seqs=8,
        max_model_len=4096,
        residents=MappingProxyType(held),
    )
    return replace(base, **more)


def a_snapshot(replicas, own=None, **more):
    shares = own or {}
    return FleetSnapshot(
        roster=Roster(tuple(replicas)), loads=FleetLoad.of(shares.get(r.id, ReplicaLoad()) for r in replicas), **more
    )


def choose(request, replicas, depths=None, own=None, *, policy="kv_lora", **more):
    return decide(POLICIES[policy](), request, a_snapshot(replicas, own, depths=depths or {}, **more))


def queued(seconds, **more):
    return ReplicaLoad(busy_until=seconds, in_prefill=3, **more)


def test_the_replica_that_holds_the_prompt_wins():
    fleet = [a_replica(f"w{i}") for i in range(4)]
    assert {choose(RoutingRequest("m", "", 1000), fleet, {"w2": 60}, seed=s).replica.id for s in range(20)} == {"w2"}


def test_a_long_queue_outweighs_a_short_prefix():
    fleet = [a_replica("hot"), a_replica("idle")]
    assert choose(RoutingRequest("m", "", 1000), fleet, {"hot": 10}, {"hot": queued(5.0)}).replica.id == "idle"


def test_equal_replicas_share_at_random():
    fleet = [a_replica(f"w{i}") for i in range(4)]
    assert {choose(RoutingRequest("m", "", 100), fleet, seed=s).replica.id for s in range(60)} == {
        "w0",
        "w1",
        "w2",
        "w3",
    }


def test_approximate_prompt_goes_to_its_home_where_that_costs_little_more():
    def chosen(conversation, *, order=1, **more):
        request = RoutingRequest("m", "", 1000, first_blocks=conversation, is_approximate=True)
        return choose(request, [a_replica(f"w{i}") for i in range(4)][::order], **more).replica.id

    homes = [chosen(conversation) for conversation in range(1, 41)]
    assert set(homes) == {"w0", "w1", "w2", "w3"}
    for conversation, home in enumerate(homes[:10], 1):
        assert {chosen(conversation, seed=seed, order=-1) for seed in range(10)} == {home}
        # 1,000 tokens are a tenth of a second of prefill, and as much of cost.
        assert chosen(conversation, own={home: queued(0.05)}) == home
        assert chosen(conversation, own={home: queued(0.2)}) != home
        other = next(name for name in set(homes) if name != home)
        assert chosen(conversation, depths={other: 6}) == other, "there is a turn of it"
        # What everybody has says nothing of this conversation.
        everybody = dict.fromkeys(set(homes), 6)
        assert chosen(conversation, depths=everybody, own={home: queued(0.05)}) == home


def test_temperature_gives_costlier_replicas_a_smaller_share():
    fleet = [a_replica("hot"), a_replica("cold")]
    won = [
        choose(
            RoutingRequest("m", "", 8000), fleet, {"hot": 400}, seed=s, costs=CostSettings(temperature_s=3.0)
        ).replica.id
        for s in range(200)
    ]
    assert 0 < won.count("cold") < won.count("hot")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"state": "draining"}, "draining"),
        ({"state": "unreachable"}, "unreachable"),
        ({"residents": MappingProxyType({})}, "adapter not resident"),
        ({"draining": frozenset({SQL})}, "adapter draining"),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_chooses_a_replica_that_fails_a_filter(policy, change, why):
    bad, good = a_replica("bad", residents=[SQL]), a_replica("good", residents=[SQL])
    decision = choose(RoutingRequest("m", SQL, 10), [replace(bad, **change), good], {"bad": 100}, policy=policy)
    assert decision.replica.id == "good"
    assert decision.rejected == {"bad": why}
    with pytest.raises(NoReplica, match=why):
        choose(RoutingRequest("m", SQL, 10), [replace(bad, **change)], policy=policy)


def test_replica_is_excluded_after_a_failure_until_its_engine_restarts():
    fleet = [a_replica("w0", engine_boot_id="one"), a_replica("w1")]
    request = RoutingRequest("m", "", 1000, excluded=frozenset({("w0", "one")}))
    assert choose(request, fleet, {"w0": 60}).replica.id == "w1"
    assert choose(request, [replace(fleet[0], engine_boot_id="two"), fleet[1]], {"w0": 60}).replica.id == "w0"


@pytest.mark.parametrize("policy", POLICIES)
def test_request_too_long_for_one_replica_goes_to_another(policy):
    short, long = a_replica("short", residents=[SQL], max_model_len=4096), a_replica("long", max_model_len=8192)
    fleet, request = [short, long], RoutingRequest("m", "", 4000, total_tokens=4097)
    decision = choose(request, fleet, {"short": 200}, policy=policy)
    assert decision.replica.id == "long"
    assert decision.rejected == {"short": "takes 4096 tokens, and this may come to 4097"}
    again = replay_decision(json.loads(json.dumps(record_of(decision))))
    assert (again.replica.id, again.rejected) == ("long", decision.rejected)
    assert (
        choose(structs.replace(request, total_tokens=4096), fleet, {"short": 200}, policy="kv_lora").replica.id
        == "short"
    )


def test_too_long_request_goes_to_a_short_replica_only_where_none_is_longer():
    short, long = a_replica("short", max_model_len=4096), a_replica("long", max_model_len=8192)
    request = RoutingRequest("m", "", 4000, total_tokens=5000)
    for away in (replace(long, state="draining"), replace(long, state="unreachable")):
        with pytest.raises(NoReplica, match="short: takes 4096 tokens, and this may come to 5000"):
            choose(request, [short, away])
    with pytest.raises(NoReplica, match="failed this request before"):
        choose(structs.replace(request, excluded=frozenset({long.incarnation})), [short, long])
    assert choose(request, [short, replace(long, state="starting", max_model_len=0)]).replica.id == "short"
    assert choose(structs.replace(request, total_tokens=9000), [short, long]).rejected == {}
    # Nobody who has the adapter takes it: its engine says so.
    holder = replace(short, residents=a_replica("", residents=[SQL]).residents)
    assert choose(RoutingRequest("m", SQL, 4000, total_tokens=5000), [holder, long]).replica.id == "short"
    assert choose(structs.replace(request, only=short.incarnation), [short, long]).replica.id == "short"
    unknown = replace(short, max_model_len=0)
    assert choose(request, [unknown, long], {"short": 200}).replica.id == "short"


def test_another_digest_of_the_same_adapter_is_not_resident():
    with pytest.raises(NoReplica, match="not resident"):
        choose(RoutingRequest("m", "sql/v1@bbbbbbbbbbbb", 10), [a_replica("w0", residents=[SQL])])


def test_full_slots_open_no_adapter_while_another_replica_has_one():
    fleet = [a_replica("full", residents=[SQL]), a_replica("free", residents=[SQL])]
    own = {"full": ReplicaLoad(slot_at=0.1, engine_names=frozenset(OTHERS)), "free": queued(9.0)}
    assert choose(RoutingRequest("m", SQL, 100), fleet, {"full": 6}, own).replica.id == "free"
    assert choose(RoutingRequest("m", SQL, 100), fleet[:1], {}, own).replica.id == "full"
    # Its own adapter runs there already: no slot is opened.
    own["full"] = own["full"]._replace(engine_names=frozenset({SQL, OTHERS[0]}))
    assert choose(RoutingRequest("m", SQL, 100), fleet, {"full": 6}, own).replica.id == "full"


def test_reported_queue_fades_and_our_own_is_not_counted_twice():
    own = {"w0": ReplicaLoad(busy_until=102.0, behind_s=2.0, others_until=103.0)}
    queue = {
        at: choose(RoutingRequest("m", "", 10), [a_replica("w0")], own=own, now=at).score.queue_s
        for at in (100, 101, 160)
    }
    assert queue == {100: 5.0, 101: 4.0, 160: 2.0}


def test_a_measured_slow_replica_is_charged_its_own_rate():
    slow = a_replica("slow", report=EngineReport(prefill_tokens_per_s=1_000.0))
    fast = a_replica("fast", report=EngineReport(prefill_tokens_per_s=20_000.0))
    decision = choose(RoutingRequest("m", "", 4000), [slow, fast])
    assert decision.replica.id == "fast"
    assert decision.scores[0].prefill_s > 1.0 > decision.scores[1].prefill_s


def test_tail_of_a_long_prompt_costs_more_than_a_short_prompt():
    short, long = (
        choose(RoutingRequest("m", "", tokens), [a_replica("w0")], {"w0": (tokens - 1600) // 16}).score.prefill_s
        for tokens in (1600, 32000)
    )
    assert long > 1.5 * short


def test_adapter_location_has_a_cost_unless_a_fresh_request_loads_it():
    fleet = [
        a_replica("disk", residents=[SQL], location="disk", report=EngineReport(load_s=4.0)),
        a_replica("host", residents=[SQL], location="host"),
        a_replica("device", residents=[SQL]),
    ]
    costs = {s.worker_id: s.adapter_s for s in choose(RoutingRequest("m", SQL, 100), fleet).scores}
    assert costs == {"disk": 4.0, "host": CostSettings().host_to_device_s, "device": 0.0}
    large = a_replica("disk", residents=[SQL], location="disk", report=EngineReport(load_s=4.0), load_s=9.0)
    assert choose(RoutingRequest("m", SQL, 100), [large]).score.adapter_s == 9.0, "its own load, where it was measured"
    fresh = choose(RoutingRequest("m", SQL, 100), fleet[:1], own={"disk": ReplicaLoad(fresh=frozenset({SQL}))})
    assert fresh.score.adapter_s == 0.0


def test_blocks_on_slower_media_save_less_prefill_than_on_the_device():
    fleet = [a_replica(name) for name in ("device", "host", "storage", "none")]
    lower = {"host": (50, 0), "storage": (0, 50)}
    scores = choose(RoutingRequest("m", "", 1000), fleet, {"device": 50}, lower=lower).scores
    assert [s.cached_tokens for s in scores] == [800, 800, 800, 0]
    times = [s.prefill_s for s in scores]
    assert times == sorted(times)
    assert len(set(times)) == 4


def test_work_goes_where_it_displaces_least_and_a_hot_prefix_outweighs_that():
    fleet = [a_replica("crowded", residents=[SQL]), a_replica("quiet", residents=[SQL])]
    own = {"crowded": ReplicaLoad(placed=1.0), "quiet": ReplicaLoad(placed=-1.0)}
    assert {choose(RoutingRequest("m", SQL, 2000), fleet, own=own, seed=s).replica.id for s in range(20)} == {"quiet"}
    assert choose(RoutingRequest("m", SQL, 2000), fleet, {"crowded": 100}, own=own).replica.id == "crowded"
    # A twentieth of a KV cache is not crowded: what begins empty shares at random.
    own = {"crowded": ReplicaLoad(placed=-4.0), "quiet": ReplicaLoad(placed=-9.0)}
    assert len({choose(RoutingRequest("m", SQL, 2000), fleet, own=own, seed=s).replica.id for s in range(20)}) == 2


def test_a_prompt_pushes_out_what_is_least_likely_to_be_read_again():
    costs = CostSettings(eviction=1.0)
    fleet = [a_replica("kept"), a_replica("left"), a_replica("large")]
    own = {
        "kept": ReplicaLoad(victims=((0, 0.0, 0.0), (5000, 0.9, 0.0))),
        "left": ReplicaLoad(victims=((0, 0.0, 0.0), (5000, 0.1, 0.0))),
        "large": ReplicaLoad(victims=((900, 0.0, 0.0), (5000, 1.0, 0.0))),
    }
    assert {
        choose(RoutingRequest("m", "", 2000), fleet, own=own, costs=costs, seed=s).replica.id for s in range(20)
    } == {"left"}
    assert {
        choose(RoutingRequest("m", "", 800), fleet, own=own, costs=costs, seed=s).replica.id for s in range(20)
    } == {"large"}
    # What is cached of it pushes nothing out.
    assert choose(RoutingRequest("m", "", 2000), fleet, {"kept": 120}, own=own, costs=costs).score.evict_s < 0.01


def test_what_a_prompt_pushes_out_costs_its_expected_prefill():
    costs = CostSettings(prefill_tokens_per_s=1000.0, attention_tokens=9000.0)
    victims = ((100, 0.0, 0.0), (200, 0.5, 1000.0), (500, 0.25, 11_000.0))
    request = RoutingRequest("m", "", 700)
    score = choose(request, [a_replica("w0")], own={"w0": ReplicaLoad(victims=victims)}, costs=costs).score
    # 100 unused tokens, half of 200 at the usual context, and a quarter of 400 at twice what the usual one costs.
    assert score.evict_s == pytest.approx((200 * 0.5 + 400 * 0.25 * 2) / 1000)
    assert score.first_token_s == pytest.approx(score.prefill_s)


@given(st.lists(VICTIMS, max_size=4), st.integers(-99, 9000), st.integers(0, 9000))
def test_more_new_tokens_never_push_out_less(victims, new_tokens, more):
    less, all_of_it = (lost_work(tuple(victims), tokens, 30_000.0) for tokens in (new_tokens, new_tokens + more))
    assert 0 <= less <= all_of_it * (1 + 1e-9)


def test_between_equal_replicas_the_one_that_decodes_faster_wins_where_that_counts():
    fast, slow = (
        a_replica(n, report=EngineReport(token_s=1 / r, output_tokens=300)) for n, r in (("f", 90), ("s", 30))
    )
    costs, request = CostSettings(decode_share=0.05), RoutingRequest("m", "", 500)
    assert {choose(request, [slow, fast], seed=s, costs=costs).replica.id for s in range(20)} == {"f"}
    assert {choose(request, [slow, fast], seed=s).replica.id for s in range(20)} == {"f", "s"}


def test_the_last_free_adapter_slots_are_left_to_who_needs_them():
    fleet = [a_replica("tight", residents=[SQL], max_loras=4), a_replica("roomy", residents=[SQL], max_loras=4)]
    own = {"tight": ReplicaLoad(in_decode=3, slots_used=3), "roomy": ReplicaLoad(in_decode=3, slots_used=1)}
    assert {choose(RoutingRequest("m", SQL, 200), fleet, own=own, seed=s).replica.id for s in range(20)} == {"roomy"}
    own["tight"] = own["tight"]._replace(engine_names=frozenset({SQL}))
    assert choose(RoutingRequest("m", SQL, 200), fleet, own=own).replica.id == "tight"


def test_kv_that_does_not_fit_and_full_sequences_are_waited_for():
    fleet = [a_replica("w0")]
    free = choose(RoutingRequest("m", "", 1000), fleet, own={"w0": ReplicaLoad(in_decode=3)}).score
    tight = choose(
        RoutingRequest("m", "", 1000),
        fleet,
        own={"w0": ReplicaLoad(in_decode=3, full_s=0.5, kv_tokens=9e3, kv_free_tokens=400, kv_token_s=0.001)},
    ).score
    assert tight.queue_s == pytest.approx(free.queue_s + 0.5 + 0.6)


@given(st.floats(0, 5), st.floats(0, 5))
def test_kappa_grows_with_utilisation_between_its_floor_and_its_cap(low, high):
    low, high = sorted((low, high))
    costs = CostSettings()
    assert costs.kappa_min <= kappa(low, costs) <= kappa(high, costs) <= costs.kappa_max


LOCATIONS = st.sampled_from(["device", "host", "disk"])
SECONDS = st.floats(0, 20)
OWNS = st.builds(
    ReplicaLoad,
    busy_until=st.just(-inf) | SECONDS,
    behind_s=SECONDS,
    others_until=st.just(-inf) | SECONDS,
    in_prefill=st.integers(0, 9),
    in_decode=st.integers(0, 9),
    others_in_flight=st.integers(0, 9),
    engine_names=st.sets(st.sampled_from([SQL, *OTHERS])).map(frozenset),
    fresh=st.sets(st.sampled_from([SQL, *OTHERS])).map(frozenset),
    slot_at=st.just(-inf) | SECONDS,
    full_s=SECONDS,
    kv_tokens=st.just(inf) | st.floats(500, 5000),
    kv_free_tokens=st.just(inf) | st.floats(-500, 3000),
    request_s=st.floats(0.1, 9),
    kv_token_s=st.floats(0, 0.01),
    slots_used=st.integers(0, 4),
    placed=st.just(-inf) | st.floats(-5, 3),
    prefill_pace=st.just(1.0) | st.floats(0.01, 9),
    victims=st.just(()) | st.lists(VICTIMS, max_size=4).map(tuple),
)
RESTING = OWNS.map(
    lambda own: ReplicaLoad(
        placed=own.placed,
        fresh=own.fresh,
        request_s=own.request_s,
        prefill_pace=own.prefill_pace,
        victims=own.victims,
    )
)
REPORTS = st.builds(
    EngineReport,
    prefill_tokens_per_s=st.just(0.0) | st.floats(100, 50_000),
    token_s=st.just(0.0) | st.floats(0.002, 1),
    sequence_s=st.floats(0, 0.01),
    context_token_s=st.floats(0, 1e-5),
    output_tokens=st.just(0.0) | st.floats(1, 2000),
    load_s=st.floats(0, 9),
)


@st.composite
def moments(draw):
    """An ask and a scene of one to eight replicas, all of which can serve it; half of them without what is rare."""
    count, is_plain = draw(st.integers(1, 8)), draw(st.booleans())
    ids = [f"w{i}" for i in range(count)]
    locations = st.just("device") if is_plain else LOCATIONS
    replicas = [
        a_replica(
            i,
            residents=[SQL],
            location=draw(locations),
            load_s=draw(st.sampled_from((0.0, 2.5))),
            report=draw(REPORTS),
            engine_boot_id="b",
        )
        for i in ids
    ]
    some = st.dictionaries(st.sampled_from(ids), st.integers(1, 90))
    lower = st.dictionaries(st.sampled_from(ids), st.tuples(st.integers(0, 20), st.integers(0, 20)))
    backlog = st.dictionaries(st.sampled_from(ids), st.floats(0.001, 9))
    snapshot = FleetSnapshot(
        roster=Roster(tuple(replicas)),
        loads=FleetLoad.of(draw(OWNS | RESTING) for _ in ids),
        depths=draw(some),
        lower={} if is_plain else draw(lower),
        backlog={} if is_plain else draw(backlog),
        open_circuits=frozenset((i, "b") for i in draw(st.sets(st.sampled_from(ids)))),
        rho=draw(st.floats(0, 2)),
        context_tokens=draw(st.floats(1, 30_000)),
        now=draw(SECONDS),
        seed=draw(st.integers(0, 2**32 - 1)),
        turn=draw(st.integers(0, 99)),
        costs=CostSettings(
            temperature_s=draw(st.sampled_from([0.0, 0.5])),
            decode_share=draw(st.sampled_from([0.0, 0.05])),
            eviction=draw(st.sampled_from([0.0, 0.5])),
        ),
    )
    request = RoutingRequest(
        "m",
        draw(st.sampled_from(["", SQL])),
        draw(st.integers(0, 3000)),
        frozenset({("gone", "b")}),
        draw(st.sampled_from(["", "s1", "s2"])),
        draw(st.integers(0, 3)),
    )
    return request, snapshot


@given(st.integers(1, 200_000), st.integers(0, 12_000), st.integers(0, 12_000), st.integers(0, 12_000))
def test_blocks_in_lower_tiers_never_make_prefill_more_expensive(prompt_tokens, depth, host, storage):
    fleet = (a_replica("w0"), a_replica("w1"))
    lower, depths = {"w0": (host, storage)} if host + storage else {}, {"w0": depth, "w1": depth}
    with_lower, without = a_snapshot(fleet, depths=depths, lower=lower), a_snapshot(fleet, depths=depths)
    request = RoutingRequest("m", "", prompt_tokens)
    assert replica_score(request, with_lower, 0).prefill_s <= replica_score(request, without, 0).prefill_s * (1 + 1e-9)


@st.composite
def fleets_at_rest(draw):
    """An ask and a scene of replicas of which nearly all are alike."""
    ids = [f"w{i}" for i in range(8)]
    report = EngineReport(prefill_tokens_per_s=1000.0, token_s=0.02, output_tokens=100.0)
    owns = st.sampled_from(
        [
            ReplicaLoad(),
            ReplicaLoad(),
            ReplicaLoad(in_decode=1),
            ReplicaLoad(placed=3.0),
            ReplicaLoad(placed=-2.9),
            ReplicaLoad(busy_until=0.001),
            ReplicaLoad(busy_until=1.0),
        ]
    )
    replicas = [a_replica(i, residents=[SQL], report=report, engine_boot_id="b") for i in ids]
    snapshot = FleetSnapshot(
        roster=Roster(tuple(replicas)),
        loads=FleetLoad.of(draw(owns) for _ in ids),
        depths={i: draw(st.sampled_from([1, 9])) for i in ids},
        lower=draw(st.sampled_from([{}, {}, {"w1": (2, 0)}])),
        backlog=draw(st.sampled_from([{}, {}, {"w1": 0.5}])),
        seed=draw(st.integers(0, 9)),
        costs=CostSettings(decode_share=0.05),
    )
    return RoutingRequest("m", SQL, draw(st.sampled_from([16, 144, 200]))), snapshot


@settings(max_examples=examples(400))
@given(moments() | fleets_at_rest())
def test_the_fast_loop_equals_the_cost_model_to_the_last_bit(moment):
    request, snapshot = moment
    able = snapshot.able(request)
    found = roster_costs(request, snapshot, able)
    scores = [replica_score(request, snapshot, position) for position in able]
    assert found.positions == list(able)
    assert [found.score(k) for k in range(len(found))] == scores
    assert found.costs_s() == [score.cost_s for score in scores]
    assert found.cached_tokens() == [score.cached_tokens for score in scores]


@settings(max_examples=examples(400))
@given(moments() | fleets_at_rest())
def test_close_replicas_are_those_within_the_tie_limit_of_the_best(moment):
    request, snapshot = moment
    able = snapshot.able(request)
    scores = {position: replica_score(request, snapshot, position) for position in able}
    limit_s = snapshot.costs.tie_limit_s(min(score.cost_s for score in scores.values()))
    close = {position: score for position, score in scores.items() if score.cost_s <= limit_s}
    found = roster_costs(request, snapshot, able, only_close=True)
    assert {position: found.score(k) for k, position in enumerate(found.positions)} == close
    assert found.positions == list(close)


@given(moments())
def test_winner_ties_with_the_best_and_never_has_the_whole_prompt_cached(moment):
    request, snapshot = moment
    decision = decide(KvLoraPolicy(), request, structs.replace(snapshot, costs=CostSettings()))
    fits = {snapshot.roster.replicas[i].id for i in within_slots(request, snapshot, snapshot.able(request))}
    best = min(s.cost_s for s in decision.scores if s.worker_id in fits)
    assert decision.score.worker_id in fits
    assert decision.score.cost_s <= best * 1.0501 + 0.0006
    assert all(s.cached_tokens <= max(0, request.prompt_tokens - 1) for s in decision.scores)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@given(moment=moments())
def test_a_decision_replayed_from_its_record_is_the_same_decision(policy, moment):
    decision = decide(POLICIES[policy](), *moment)
    again = replay_decision(json.loads(json.dumps(record_of(decision), allow_nan=False)))
    assert again.replica.id == decision.replica.id
    assert again.scores == decision.scores
    assert again.rejected == decision.rejected


@pytest.mark.parametrize("policy", POLICIES)
def test_follow_up_goes_to_the_engine_with_the_stored_response_or_nowhere(policy):
    fleet = [a_replica("w0", engine_boot_id="a"), a_replica("w1", engine_boot_id="b")]
    request = RoutingRequest("m", "", 100, only=fleet[1].incarnation)
    decision = choose(request, fleet, {"w0": 6}, {"w1": ReplicaLoad(full_s=9.0)}, policy=policy)
    assert decision.replica.id == "w1"
    assert decision.rejected == {"w0": "does not keep the earlier response"}
    assert replay_decision(json.loads(json.dumps(record_of(decision), allow_nan=False))).request == request
    with pytest.raises(NoReplica, match="does not keep"):
        choose(request, [fleet[0], a_replica("w1", engine_boot_id="c")], policy=policy)


def test_a_record_has_nothing_of_adapters_that_the_request_did_not_name():
    fleet = [a_replica("w0", residents=[SQL, *OTHERS], draining=frozenset(OTHERS[:1]))]
    text = json.dumps(record_of(choose(RoutingRequest("m", SQL, 10), fleet)))
    assert SQL in text
    assert not any(name in text for name in OTHERS)


def test_round_robin_gives_each_model_its_own_turns():
    rosters = {m: Roster(tuple(a_replica(f"{m}{i}", base_model=m) for i in range(2))) for m in ("chat", "embed")}
    scheduler = Scheduler(roster=rosters.__getitem__, match=lambda _: PrefixMatch(), policy=POLICIES["round_robin"]())
    sent = [
        scheduler.decide(HashedRequest(RoutingRequest(m, "", 10)), 0.0).replica.id
        for _ in range(10)
        for m in ("embed", "chat")
    ]
    assert {worker: sent.count(worker) for worker in sent} == dict.fromkeys(["chat0", "chat1", "embed0", "embed1"], 5)


def test_round_robin_takes_each_replica_in_its_turn():
    fleet = [a_replica(f"w{i}") for i in range(3)]
    turns = [choose(RoutingRequest("m", "", 10), fleet, policy="round_robin", turn=t).replica.id for t in range(6)]
    assert turns == ["w0", "w1", "w2"] * 2


def test_least_loaded_counts_what_others_sent_too():
    own = {"w0": ReplicaLoad(in_decode=1, others_in_flight=3), "w1": ReplicaLoad(in_prefill=2, in_decode=1)}
    assert (
        choose(RoutingRequest("m", "", 10), [a_replica("w0"), a_replica("w1")], own=own, policy="least_loaded").position
        == 1
    )


def test_a_session_keeps_its_replica_and_moves_only_when_that_one_goes():
    fleet = [a_replica(f"w{i}") for i in range(5)]
    at = {
        s: choose(RoutingRequest("m", "", 10, session=s), fleet, policy="session").replica.id
        for s in map(str, range(100))
    }
    assert len(set(at.values())) == 5
    for s, home in at.items():
        now = choose(RoutingRequest("m", "", 10, session=s), fleet[1:], policy="session").replica.id
        assert home in (now, "w0")


def test_prefix_hash_keeps_a_prefix_at_its_home_until_that_is_overloaded():
    fleet = [a_replica(f"w{i}") for i in range(4)]
    request = RoutingRequest("m", "", 10, first_blocks=77)
    home = choose(request, fleet, policy="prefix_hash").replica.id
    busy = {home: ReplicaLoad(in_decode=4), **{r.id: ReplicaLoad(in_decode=3) for r in fleet if r.id != home}}
    assert choose(request, fleet, own=busy, policy="prefix_hash").replica.id == home
    assert choose(request, fleet, own=busy | {home: ReplicaLoad(in_decode=9)}, policy="prefix_hash").replica.id != home


def test_a_snapshot_that_nobody_has_any_more_waits_for_no_collector():
    gc.collect()
    gc.disable()
    try:
        made = choose(
            RoutingRequest("m", SQL, 100),
            [a_replica("a", residents=[SQL]), a_replica("b", residents=[SQL], location="host")],
        )
        roster = weakref.ref(made.snapshot.roster)
        assert roster() is not None
        del made
        assert roster() is None
    finally:
        gc.enable()


def test_removing_a_replica_moves_only_the_homes_that_it_was():
    fleet = [a_replica(f"w{i}") for i in range(5)]
    names = [f"adapter-{i}/v1" for i in range(200)]
    before = {n: rendezvous_order(n, fleet)[0].id for n in names}
    after = {n: rendezvous_order(n, fleet[1:])[0].id for n in names}
    assert all(after[n] == home for n, home in before.items() if home != "w0")
    assert set(before.values()) == {r.id for r in fleet}


def test_router_and_orchestrator_mean_the_same_home():
    fleet = [a_replica(f"w{i}") for i in range(5)]
    for name in (f"adapter-{i}/v1" for i in range(50)):
        theirs = sorted((r.id for r in fleet), key=lambda w: rendezvous_score(name, w), reverse=True)
        assert [r.id for r in rendezvous_order(name, fleet)] == theirs


@pytest.mark.parametrize(
    ("costs", "why"),
    [({"kappa_min": 20.0}, "kappa_min"), ({"host_credit": 1.5}, "between 0 and 1"), ({"kapa": 1.0}, "unknown.*kapa")],
)
def test_invalid_costs_are_refused_by_name(costs, why):
    with pytest.raises(ValueError, match=why):
        RouterSettings(costs=costs)
    assert RouterSettings(costs={"temperature_s": 0.5}).costs == {"temperature_s": 0.5}
