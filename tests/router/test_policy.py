from dataclasses import replace
from random import Random
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.placement import rendezvous
from router.core.errors import NoReplica
from router.core.fleet import Replica, Report, Resident
from router.core.load import LoadBook, Own
from router.core.policy import Ask, Costs, decide, kappa, rendezvous_home

SQL = "sql/v1@aaaaaaaaaaaa"


def a_replica(name, *, residents=(), **more):
    held = {n: Resident(n.split("@")[0], "a" * 64, n) for n in residents}
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


def choose(ask, replicas, depths=None, own=None, rho=0.0, seed=0, now=0.0):
    shares = own or {}
    return decide(
        ask,
        replicas,
        depths or {},
        lambda r: shares.get(r.id, Own()),
        rho=rho,
        costs=Costs(),
        rng=Random(seed),
        now=now,
    )


def test_the_replica_that_holds_the_prompt_wins():
    fleet = [a_replica(f"w{i}") for i in range(4)]
    assert {choose(Ask("m", "", 1000), fleet, {"w2": 60}, seed=s).replica.id for s in range(20)} == {"w2"}


def test_a_long_queue_outweighs_a_short_prefix():
    fleet = [a_replica("hot"), a_replica("idle")]
    own = {"hot": Own(prefill_s=5.0, in_flight=3)}
    assert choose(Ask("m", "", 1000), fleet, {"hot": 10}, own).replica.id == "idle"


def test_equal_replicas_share_at_random():
    fleet = [a_replica(f"w{i}") for i in range(4)]
    assert {choose(Ask("m", "", 100), fleet, seed=s).replica.id for s in range(60)} == {"w0", "w1", "w2", "w3"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"state": "draining"}, "draining"),
        ({"state": "unreachable"}, "unreachable"),
        ({"base_model": "other"}, "other base model"),
        ({"residents": MappingProxyType({})}, "adapter not resident"),
        ({"draining": frozenset({SQL})}, "adapter draining"),
    ],
)
def test_a_replica_that_cannot_serve_is_never_chosen_and_the_decision_says_why(change, why):
    bad, good = a_replica("bad", residents=[SQL]), a_replica("good", residents=[SQL])
    decision = choose(Ask("m", SQL, 10), [replace(bad, **change), good], {"bad": 100})
    assert decision.replica.id == "good"
    assert decision.rejected == {"bad": why}
    with pytest.raises(NoReplica, match=why):
        choose(Ask("m", SQL, 10), [replace(bad, **change)])


def test_another_digest_of_the_same_adapter_is_not_resident():
    with pytest.raises(NoReplica, match="not resident"):
        choose(Ask("m", "sql/v1@bbbbbbbbbbbb", 10), [a_replica("w0", residents=[SQL])])


def test_a_replica_with_all_slots_in_use_opens_no_further_adapter_while_another_can():
    names = [SQL, "b/v1@cccccccccccc", "c/v1@dddddddddddd"]
    fleet = [a_replica("full", residents=names), a_replica("free", residents=names)]
    own = {
        "full": Own(engine_names=frozenset(names[1:])),
        "free": Own(prefill_s=9.0, in_flight=5, engine_names=frozenset(names[1:2])),
    }
    assert choose(Ask("m", SQL, 100), fleet, {"full": 6}, own).replica.id == "free"
    assert choose(Ask("m", SQL, 100), fleet[:1], {}, own).replica.id == "full"


def test_a_queue_reported_long_ago_counts_less_and_ours_is_not_counted_twice():
    replica = a_replica("w0", report=Report(waiting=4, running=1, at=100.0))
    own = {"w0": Own(prefill_s=2.0, others_queue_s=3.0)}
    queue = {age: choose(Ask("m", "", 10), [replica], own=own, now=100.0 + age).score.queue_s for age in (0, 1, 60)}
    assert queue == {0: 5.0, 1: 4.0, 60: 2.0}


def test_a_measured_slow_replica_is_charged_its_own_rate():
    slow = a_replica("slow", report=Report(prefill_tokens_per_s=1_000.0))
    fast = a_replica("fast", report=Report(prefill_tokens_per_s=20_000.0))
    decision = choose(Ask("m", "", 4000), [slow, fast])
    assert decision.replica.id == "fast"
    assert decision.scores[0].prefill_s > 1.0 > decision.scores[1].prefill_s


@given(st.floats(0, 5), st.floats(0, 5))
def test_kappa_grows_with_utilisation_between_one_and_its_cap(low, high):
    low, high = sorted((low, high))
    assert 1.0 <= kappa(low, most=16.0) <= kappa(high, most=16.0) <= 16.0


@given(
    st.lists(st.tuples(st.integers(0, 60), st.floats(0, 3), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(0, 2000),
    st.integers(0, 5),
)
def test_the_winner_is_never_dearer_than_a_tie_and_the_same_seed_decides_the_same(rows, prompt_tokens, seed):
    fleet = [a_replica(f"w{i}") for i in range(len(rows))]
    depths = {f"w{i}": depth for i, (depth, _, _) in enumerate(rows)}
    own = {f"w{i}": Own(prefill_s=s, in_flight=n) for i, (_, s, n) in enumerate(rows)}
    first, again = (choose(Ask("m", "", prompt_tokens), fleet, depths, own, seed=seed) for _ in range(2))
    assert first == again
    best = min(s.cost_s for s in first.scores)
    assert first.score.cost_s <= best * 1.05 + 0.0005
    assert all(s.cached_tokens <= max(0, prompt_tokens - 1) for s in first.scores)


def test_removing_a_replica_moves_only_the_homes_that_it_was():
    fleet = [a_replica(f"w{i}") for i in range(5)]
    names = [f"adapter-{i}/v1" for i in range(200)]
    before = {n: rendezvous_home(n, fleet).id for n in names}
    after = {n: rendezvous_home(n, fleet[1:]).id for n in names}
    assert all(after[n] == home for n, home in before.items() if home != "w0")
    assert set(before.values()) == {r.id for r in fleet}


def test_router_and_orchestrator_mean_the_same_home():
    fleet = [a_replica(f"w{i}") for i in range(5)]
    for name in (f"adapter-{i}/v1" for i in range(50)):
        assert rendezvous_home(name, fleet).id == max((r.id for r in fleet), key=lambda w: rendezvous(name, w))


@given(st.lists(st.sampled_from(["begin", "first_token", "end", "end_again", "forget"]), max_size=60), st.randoms())
def test_the_load_book_forgets_every_request_exactly_once(steps, rng):
    book, open_, done, now = LoadBook(), [], [], 0.0
    for step in steps:
        now += 0.1
        if step == "begin":
            open_.append(book.begin("w0", rng.choice(["", SQL]), 0.25, now))
        elif step == "first_token" and open_:
            book.first_token(rng.choice(open_))
        elif step == "end" and open_:
            done.append(open_.pop(rng.randrange(len(open_))))
            book.end(done[-1], now)
        elif step == "end_again" and done:
            book.end(rng.choice(done), now)
            book.first_token(rng.choice(done))
        elif step == "forget":
            book.forget("w0")
            done += open_
            open_.clear()
        own = book.own("w0", Report())
        assert own.in_flight == len(open_)
        assert own.prefill_s == pytest.approx(0.25 * sum(f.in_prefill for f in open_))
        assert own.engine_names == {f.engine_name for f in open_}


def test_what_is_ours_in_an_engines_report_is_taken_off():
    book = LoadBook()
    for _ in range(3):
        book.begin("w0", "", 0.5, 0.0)
    report = Report(running=1, waiting=4, at=1.0)
    book.reported("w0", report)
    own = book.own("w0", report)
    assert own.others_in_flight == 2
    assert own.others_queue_s == pytest.approx(1 * book._books["w0"].prefill_each_s)


def test_utilisation_fades_and_is_shared_by_the_fleet():
    book = LoadBook()
    book.admit("m", 30.0, now=0.0)
    assert book.utilisation("m", 1, now=0.0) == pytest.approx(1.0)
    assert book.utilisation("m", 4, now=0.0) == pytest.approx(0.25)
    assert book.utilisation("m", 1, now=300.0) < 0.001
