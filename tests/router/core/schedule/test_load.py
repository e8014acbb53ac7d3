from dataclasses import replace
from math import inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet import EngineReport
from router.core.schedule.load import LoadBook
from router.core.schedule.load_snapshot import FleetLoad, ReplicaLoad
from router.core.sessions.book import SessionBook
from router.core.sessions.session import Session
from tests.router.core.schedule.test_policy import OTHERS, SQL, a_replica


@given(st.lists(st.sampled_from(["begin", "first_token", "end", "end_again", "forget"]), max_size=60), st.randoms())
def test_the_load_book_forgets_every_request_exactly_once(steps, rng):
    book, open_, done, now = LoadBook(), [], [], 0.0
    for step in steps:
        now += 0.1
        if step == "begin":
            open_.append(book.add("w0", rng.choice(["", SQL]), 0.25, now, prompt_tokens=100))
        elif step == "first_token" and open_:
            book.record_first_token(rng.choice(open_), now)
        elif step == "end" and open_:
            done.append(open_.pop(rng.randrange(len(open_))))
            book.remove(done[-1], now)
        elif step == "end_again" and done:
            book.remove(rng.choice(done), now)
            book.record_first_token(rng.choice(done), now)
        elif step == "forget":
            book.forget("w0")
            done += open_
            open_.clear()
        own = book.replica_load("w0")
        assert own.in_prefill == sum(f.in_prefill for f in open_)
        assert own.in_decode == sum(not f.in_prefill for f in open_)
        assert own.engine_names == {f.engine_name for f in open_}
        assert own.queue_s(now) <= 0.25 * own.in_prefill + 1e-9
        assert sum(count for _, _, count in book.counts_by_name()) == len(open_)
    for flight in open_:
        book.remove(flight, now)
    assert book.replica_load("w0").in_flight == 0
    assert not list(book.counts_by_name())


STEPS = st.tuples(st.sampled_from(["begin", "begin", "first_token", "end", "report"]), st.integers(0, 9))


@given(st.lists(STEPS, max_size=60))
def test_sums_that_are_kept_are_those_of_all_that_is_in_flight(steps):
    book, flights, dispatched, now, report_at = LoadBook(), [], {}, 0.0, -1.0
    names, freed = ["", SQL, OTHERS[0]], 0
    for step, number in steps:
        now += 0.5
        if step == "begin":
            name = names[number % 3]
            many = {"prompt_tokens": 10 * number, "sequences": 1 + number // 4}
            flights.append(book.add("w0", name, 0.25 * number, now, **many))
            flights[-1].is_streamed = number % 2 == 0
            dispatched[name] = now
        elif step == "report":
            report_at, freed = now - 0.25 * (number % 4), 0
            book.apply_report(a_replica("w0", max_loras=1, total_kv_blocks=100, report=EngineReport(at=report_at)))
            dispatched = {
                n: at for n, at in dispatched.items() if at > report_at or n in {f.engine_name for f in flights}
            }
        elif flights:
            flight = flights[number % len(flights)]
            if step == "first_token":
                book.record_first_token(flight, now)
            else:
                flights.remove(flight)
                book.remove(flight, now)
                freed += flight.uncached_tokens * (flight.began_at <= report_at)
        own, waits = book.replica_load("w0"), [f.prefill_s for f in flights if f.in_prefill]
        assert own.in_prefill == sum(f.sequences for f in flights if f.in_prefill)
        assert own.in_decode == sum(f.sequences for f in flights if not f.in_prefill)
        assert own.behind_s == pytest.approx(sum(waits) - max(waits, default=0.0))
        assert own.engine_names == {f.engine_name for f in flights}
        assert own.fresh == {n for n, at in dispatched.items() if at > report_at}
        if report_at >= 0:
            sent = sum(f.uncached_tokens for f in flights if f.in_prefill or f.began_at > report_at)
            assert own.kv_free_tokens == own.kv_tokens - max(0, sent - freed)
            assert (own.slot_at > -1) == (len(own.engine_names - {""}) >= 1)


def test_our_queue_drains_with_time_but_not_below_unfinished_prefills():
    book = LoadBook()
    flights = [book.add("w0", "", 1.0, 0.0) for _ in range(3)]
    assert book.replica_load("w0").queue_s(0.0) == pytest.approx(3.0)
    assert book.replica_load("w0").queue_s(0.5) == pytest.approx(2.5)
    assert book.replica_load("w0").queue_s(9.0) == pytest.approx(2.0)
    book.record_first_token(flights[0], 9.0)
    assert book.replica_load("w0").queue_s(9.0) == pytest.approx(2.0)
    assert book.replica_load("w0").queue_s(9.5) == pytest.approx(1.5)


def test_our_sequences_at_report_time_are_subtracted_from_the_report():
    book = LoadBook()
    for at in (0.0, 0.0, 0.0):
        book.add("w0", "", 0.2, at)
    book.add("w0", "", 0.2, 2.0)  # after the engine was asked: not in what it said
    book.apply_report(a_replica("w0", report=EngineReport(running=1, waiting=4, at=1.0)))
    own = book.replica_load("w0")
    assert own.others_in_flight == 2
    # Of ours one runs and two wait: two of the four that wait are others'.
    assert own.others_until == pytest.approx(1.0 + 2 * 0.2)
    assert own.queue_s(1.0) > own.queue_s(1.2)


def test_the_answers_of_one_request_are_nobody_elses_load():
    book = LoadBook()
    many = book.add("w0", "", 0.8, 0.0, base_model=a_replica("w0").base_model, sequences=8)
    book.apply_report(a_replica("w0", max_num_seqs=8, report=EngineReport(running=3, waiting=5, at=1.0)))
    own = book.replica_load("w0")
    assert (own.in_flight, own.others_in_flight, own.others_until) == (8, 0, -inf)
    # One more finds no seat.
    assert own.full_s > 0
    book.record_first_token(many, 1.5)
    # Its first answer has begun, and most of them wait still: that is no line of others.
    book.apply_report(a_replica("w0", max_num_seqs=8, report=EngineReport(running=3, waiting=7, at=2.0)))
    own = book.replica_load("w0")
    # A prefill in that line is thought as long as that of one of the eight.
    assert (own.others_in_flight, own.others_until) == (2, pytest.approx(2.0 + 2 * (0.2 - 0.1 * (0.2 - 0.1))))
    book.remove(many, 3.0)
    assert book.replica_load("w0").in_flight == 0


@pytest.mark.parametrize(("waiting", "left"), [(0, 0), (1, 4), (4, 4), (5, 7)])
def test_what_asks_for_several_answers_runs_when_all_of_them_do(waiting, left):
    book = LoadBook()
    for sequences in (3, 4):
        unstreamed(book, 0.5, 0.0, sequences=sequences)
    book.apply_report(a_replica("w0", report=EngineReport(running=7 - waiting, waiting=waiting, at=2.0)))
    own = book.replica_load("w0")
    assert (own.in_prefill, own.in_decode) == (left, 7 - left)


def unstreamed(book, prefill_s, now, **more):
    flight = book.add("w0", "", prefill_s, now, **more)
    flight.is_streamed = False
    return flight


@pytest.mark.parametrize(("waiting", "left"), [(0, 1), (1, 1), (2, 2), (9, 4)])
def test_unstreamed_request_leaves_prefill_when_a_report_shows_it_running(waiting, left):
    book = LoadBook()
    for at in (0.0, 0.1, 0.2):
        unstreamed(book, 0.5, at)
    unstreamed(book, 5.0, 0.3)  # running perhaps, and not prefilled yet
    book.apply_report(a_replica("w0", report=EngineReport(running=4 - min(waiting, 4), waiting=waiting, at=2.0)))
    own = book.replica_load("w0")
    assert (own.in_prefill, own.in_decode) == (left, 4 - left)
    assert own.others_in_flight == max(0, waiting - 4)


def test_unstreamed_requests_get_as_much_engine_work_as_streams():
    book = LoadBook()
    for n in range(20):
        unstreamed(book, 0.2, 0.2 * n)
        book.apply_report(a_replica("w0", report=EngineReport(running=n + 1, at=0.2 * n + 0.19)))
    own = book.replica_load("w0")
    assert (own.in_prefill, own.in_decode, own.others_in_flight) == (1, 19, 0)
    assert own.queue_s(4.0) <= 0.2


def test_unanswered_request_does_not_change_the_mean_request_time():
    book = LoadBook()
    gone, answered = unstreamed(book, 0.1, 0.0), unstreamed(book, 0.1, 0.0)
    book.apply_report(a_replica("w0", report=EngineReport(running=2, at=1.0)))
    assert book.replica_load("w0").in_decode == 2
    usual_s = book.replica_load("w0").request_s
    book.remove(gone, 70.0)
    assert book.replica_load("w0").request_s == usual_s
    book.record_first_token(answered, 80.0)
    book.remove(answered, 80.0)
    assert book.replica_load("w0").request_s == pytest.approx(80.0)


def test_stream_behind_unstreamed_prompts_may_be_silent_as_long_as_they_take():
    book = LoadBook()
    for _ in range(10):
        unstreamed(book, 2.0, 0.0)
    book.add("w0", "", 1.0, 0.0)
    assert book.silent_s("w0", 21.0) == pytest.approx(0.0)
    assert book.silent_s("w0", 25.0) == pytest.approx(4.0)


def test_stream_at_a_full_engine_may_be_silent_for_one_request_time():
    book = LoadBook()
    book.apply_report(a_replica("w0", max_num_seqs=1, report=EngineReport(request_s=7.0, at=0.0)))
    book.record_first_token(book.add("w0", "", 1.0, 0.0), 1.0)
    book.add("w0", "", 1.0, 1.0)
    assert book.silent_s("w0", 12.0) == pytest.approx(12.0 - 1.0 - 1.0 - 7.0)


def test_replica_with_still_counters_is_silent_even_without_streams():
    book = LoadBook()
    flight = unstreamed(book, 2.0, 10.0)

    def silent_s(*, at, moved_at=inf):
        book.apply_report(a_replica("w0", report=EngineReport(running=1, at=at, moved_at=moved_at)))
        return book.silent_s("w0", at + 1.0)

    assert silent_s(at=30.0) == 0.0  # it does not tell
    assert silent_s(at=31.0, moved_at=30.5) == pytest.approx(0.5)
    assert silent_s(at=32.0, moved_at=5.0) == pytest.approx(22.0)  # idle before: from when it had something to do
    assert silent_s(at=33.0, moved_at=12.0) == pytest.approx(21.0)
    late = unstreamed(book, 0.5, 33.5)  # its prefill is not over, as far as is known
    assert silent_s(at=33.6, moved_at=12.0) == pytest.approx(21.1)
    book.remove(late, 33.6)
    book.record_data("w0", 32.0)
    assert silent_s(at=34.0, moved_at=12.0) == pytest.approx(2.0)
    assert book.silent_s("w0", 35.0, since=10.5) == 0.0
    assert book.silent_s("w0", 500.0) == pytest.approx(2.0)  # of what was not read nothing is known
    book.record_first_token(flight, 35.0)  # and its client reads it slowly
    assert silent_s(at=90.0, moved_at=12.0) == 0.0


def test_others_queued_requests_count_as_long_as_ours():
    book = LoadBook()
    for _ in range(100):
        book.remove(book.add("w0", "", 0.001, 0.0, base_model="embed"), 0.0)
        book.remove(book.add("w1", "", 2.0, 0.0, base_model="chat"), 0.0)
    for worker, base_model, each_s in (("w0", "embed", 0.001), ("w1", "chat", 2.0)):
        book.apply_report(a_replica(worker, base_model=base_model, report=EngineReport(waiting=20, at=1.0)))
        assert book.replica_load(worker).queue_s(1.0) == pytest.approx(20 * each_s, rel=0.05)


def test_slot_is_free_when_an_adapters_last_request_ends():
    book = LoadBook()
    book.apply_report(a_replica("w0", max_loras=2))
    book.add("w0", SQL, 0.1, 0.0)
    assert book.replica_load("w0").slot_at < 0
    book.add("w0", OTHERS[0], 0.1, 1.0)
    book.add("w0", SQL, 0.1, 5.0)
    own = book.replica_load("w0")
    usual_s = own.slot_at - 1.0  # the adapter begun at 1.0 ends first
    assert usual_s > 0
    ended = book.add("w0", "", 0.1, 5.0)  # the base model needs no slot
    assert book.replica_load("w0").slot_at == own.slot_at
    book.remove(ended, 5.1)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_request_passed_over_for_a_slot_stops_other_adapters(is_streamed):
    book = LoadBook()
    book.apply_report(a_replica("w0", max_loras=1))
    book.record_first_token(book.add("w0", SQL, 0.1, 0.0), 0.2)
    waits = book.add("w0", OTHERS[0], 0.1, 0.5)
    waits.is_streamed = is_streamed
    for at in range(1, 30):
        book.record_first_token(book.add("w0", SQL, 0.1, at - 0.5), at - 0.4)  # it never pauses
        book.apply_report(a_replica("w0", max_loras=1, report=EngineReport(running=at + 1, waiting=1, at=float(at))))
        own, is_given_way = book.replica_load("w0"), at >= 10.5
        assert waits.in_prefill
        assert (SQL in own.engine_names) != is_given_way
        assert (own.slot_at - at >= 5.0) == is_given_way
    book.record_first_token(waits, 30.0)
    assert book.replica_load("w0").engine_names == {SQL, OTHERS[0]}


def test_nobody_gives_way_while_there_are_slots_or_to_the_base_model():
    book = LoadBook()
    book.apply_report(a_replica("w0", max_loras=2))
    for name in (SQL, OTHERS[0], OTHERS[1]):
        flight = book.add("w0", name, 0.1, 0.0)
    book.record_first_token(book.add("w0", SQL, 0.1, 0.0), 0.2)
    book.add("w0", "", 0.1, 0.0)
    book.apply_report(a_replica("w0", max_loras=2, report=EngineReport(running=2, waiting=2, at=60.0)))
    assert len(book.replica_load("w0").engine_names) == 4
    book.remove(flight, 61.0)
    book.record_first_token(book.add("w0", OTHERS[0], 0.1, 61.0), 61.2)
    book.apply_report(a_replica("w0", max_loras=2, report=EngineReport(running=3, waiting=2, at=99.0)))
    assert len(book.replica_load("w0").engine_names) == 3


def test_kv_in_use_is_the_reported_usage_plus_requests_sent_since():
    book = LoadBook()
    old = book.add("w0", "", 0.1, 0.0, prompt_tokens=400)
    book.record_first_token(old, 0.5)
    book.apply_report(
        a_replica("w0", total_kv_blocks=100, report=EngineReport(kv_usage=0.5, at=1.0))
    )  # 800 of 1,600 tokens
    assert book.replica_load("w0").kv_free_tokens == pytest.approx(800)
    book.add("w0", "", 0.1, 2.0, prompt_tokens=300)
    assert book.replica_load("w0").kv_free_tokens == pytest.approx(500)
    book.remove(old, 3.0)
    assert book.replica_load("w0").kv_free_tokens == pytest.approx(900)


def test_a_prefix_that_many_requests_share_takes_room_once():
    book = LoadBook()
    book.apply_report(a_replica("w0", total_kv_blocks=1000, report=EngineReport(kv_usage=0.1, at=1.0)))
    for _ in range(60):
        book.add("w0", "", 0.01, 2.0, prompt_tokens=8100, cached_tokens=8000)
    assert book.replica_load("w0").kv_free_tokens == pytest.approx(16_000 * 0.9 - 60 * 100)


def test_kv_wait_is_at_most_one_request_time_and_zero_if_never_fitting():
    book = LoadBook()
    book.apply_report(a_replica("w0", total_kv_blocks=100, report=EngineReport(kv_usage=0.9, request_s=3.0, at=1.0)))
    own = book.replica_load("w0")
    assert own.kv_wait_s(100) == 0.0
    assert 0.0 < own.kv_wait_s(300) < own.kv_wait_s(1600) <= 3.0
    assert own.kv_wait_s(1601) == 0.0


def test_only_answered_requests_teach_how_long_one_takes():
    book = LoadBook()
    book.apply_report(a_replica("w0", report=EngineReport(request_s=20.0, at=0.0)))
    for _ in range(10):
        book.remove(book.add("w0", "", 0.01, 1.0), 1.001)
    assert book.replica_load("w0").request_s == 20.0
    flight = book.add("w0", "", 0.01, 2.0)
    book.record_first_token(flight, 3.0)
    book.remove(flight, 7.0)
    assert book.replica_load("w0").request_s == pytest.approx(5.0)


def test_report_older_than_the_history_does_not_turn_ours_into_others():
    book = LoadBook()
    for number in range(200):
        book.record_first_token(book.add("w0", "", 0.01, number / 100), number / 100)
    for number in range(600):
        book.remove(book.add("w0", "", 0.01, 3.0 + number / 50), 3.0 + number / 50)
    book.apply_report(a_replica("w0", report=EngineReport(running=200, at=2.5)))
    assert book.replica_load("w0").others_in_flight == 0


def test_what_was_ours_is_remembered_for_seconds_however_many_requests_come():
    book = LoadBook()
    for at in (0.5, 1.5, 1.5, 1.5):
        book.add("w0", "", 0.01, at)
    for number in range(3000):
        at = 2.0 + number / 1000
        flight = book.add("w0", "", 0.01, at)
        book.record_first_token(flight, at)
        book.remove(flight, at)
    book.apply_report(a_replica("w0", report=EngineReport(running=3, at=1.0)))
    assert book.replica_load("w0").others_in_flight == 2


def test_adapter_is_fresh_from_dispatch_until_the_next_report():
    book = LoadBook()
    book.apply_report(a_replica("w0", report=EngineReport(at=1.0)))
    book.remove(book.add("w0", SQL, 0.1, 2.0), 2.1)
    assert book.replica_load("w0").fresh == {SQL}
    book.apply_report(a_replica("w0", report=EngineReport(at=3.0)))
    assert book.replica_load("w0").fresh == frozenset()


def test_fleet_load_is_frozen_and_a_new_one_has_later_changes():
    book, replicas = LoadBook(), tuple(a_replica(f"w{i}", max_loras=1) for i in range(3))
    for replica in replicas:
        book.apply_report(replica)
    flight = book.add("w1", SQL, 0.1, 0.0, prompt_tokens=100)
    before = book.fleet_load("m", replicas)
    assert (before.without_slot, list(before)) == (1, [book.replica_load(r.id) for r in replicas])
    book.record_first_token(flight, 1.0)
    book.apply_report(a_replica("w2", report=EngineReport(at=1.0, running=4)))
    now = book.fleet_load("m", replicas)
    assert before[1].in_prefill == now[1].in_decode == 1
    assert (before.others_in_flight, now.others_in_flight) == (0, 4)
    assert list(now) == [book.replica_load(r.id) for r in replicas]
    book.remove(flight, 2.0)
    renewed = tuple(reversed(replicas))
    assert not book.fleet_load("m", replicas).without_slot
    assert list(book.fleet_load("m", renewed)) == [book.replica_load(r.id) for r in renewed]
    book.add("w0", SQL, 0.1, 3.0)
    again = tuple(replace(r) for r in renewed)
    assert list(book.fleet_load("m", again)) == [book.replica_load(r.id) for r in again]
    assert now.without_slot == 1


@pytest.mark.parametrize(
    "why",
    [
        {"busy_until": 9.0},
        {"behind_s": 0.1},
        {"others_until": 9.0},
        {"in_prefill": 1},
        {"in_decode": 1},
        {"others_in_flight": 1},
        {"engine_names": frozenset({SQL})},
        {"slots_used": 1},
        {"slot_at": 9.0},
        {"full_s": 0.1},
        {"kv_tokens": 2000, "kv_free_tokens": 1999},
    ],
    ids=lambda why: next(iter(why)),
)
def test_replica_rests_only_without_any_wait_or_running_request(why):
    resting, busy = ReplicaLoad(placed=1.5, request_s=7.0, fresh=frozenset({SQL})), ReplicaLoad(placed=1.5, **why)
    assert FleetLoad.of([resting, busy]).resting == [1.5, None]


def test_utilisation_fades_and_is_shared_by_the_fleet():
    book = LoadBook()
    book.add("w0", "", 25.0, 0.0, base_model="m", adapter_s=5.0)
    assert book.utilisation("m", FleetLoad.of([ReplicaLoad()]), now=0.0)[0] == pytest.approx(1.0)
    assert book.utilisation("m", FleetLoad.of([ReplicaLoad()] * 4), now=0.0)[0] == pytest.approx(0.25)
    assert book.utilisation("m", FleetLoad.of([ReplicaLoad()]), now=300.0)[0] < 0.001


def test_other_routers_work_counts_by_their_share_in_flight():
    book = LoadBook()
    book.remove(book.add("w0", "", 6.0, 0.0, base_model="m"), 0.0)
    flights = [book.add("w0", "", 0.1, now=0.0, base_model="m") for _ in range(9)]
    alone = book.utilisation("m", FleetLoad.of([ReplicaLoad()]), now=0.0)[0]
    assert book.utilisation("m", FleetLoad.of([ReplicaLoad(others_in_flight=30)]), now=0.0)[0] == pytest.approx(
        4 * alone
    )
    for flight in flights:
        book.remove(flight, now=0.0)
    assert book.utilisation("m", FleetLoad.of([ReplicaLoad(others_in_flight=3)]), now=0.0)[0] == pytest.approx(
        4 * alone
    )


def test_placed_tokens_fade_and_count_as_a_share_of_the_kv_cache():
    book = LoadBook()
    for name, blocks in (("small", 1000), ("large", 4000)):
        book.apply_report(a_replica(name, total_kv_blocks=blocks))
        book.add(name, "", 0.1, 0.0, prompt_tokens=9000, cached_tokens=1000)
    small, large = book.replica_load("small"), book.replica_load("large")
    assert small.cache_turnover(0.0) == pytest.approx(log(8000 / 16000))
    assert small.cache_turnover(0.0) - large.cache_turnover(0.0) == pytest.approx(log(4))
    assert small.cache_turnover(120.0) == pytest.approx(log(8000 / 16000) - 1)
    assert small.cache_turnover(9999.0) == large.cache_turnover(9999.0) == log(0.05)
    book.add("small", "", 0.1, 120.0, prompt_tokens=8000)
    assert book.replica_load("small").cache_turnover(120.0) == pytest.approx(log((8000 / 2.718281828 + 8000) / 16000))
    # More crowded than others is who has more than the least crowded of them has.
    both = (a_replica("small", total_kv_blocks=1000), a_replica("large", total_kv_blocks=4000))
    assert (
        book.fleet_load("m", both).base_placed(0.0)
        == book.replica_load("large").placed
        < book.replica_load("small").placed
    )


def test_forgotten_report_drops_other_clients_load_and_keeps_ours():
    book, replica = LoadBook(), a_replica("w0", total_kv_blocks=100)
    book.apply_report(replace(replica, report=EngineReport(running=8, waiting=20, kv_usage=1.0, at=1.0)))
    ours = book.add("w0", SQL, 0.2, 2.0, prompt_tokens=100)
    before = book.fleet_load("m", (replica,))[0]
    assert (before.others_in_flight, before.kv_free_tokens) == (28, -100)
    for _ in range(2):
        book.forget_report("w0")
    own = book.fleet_load("m", (replica,))[0]
    assert own == book.replica_load("w0")
    assert (own.others_in_flight, own.kv_free_tokens, own.in_prefill) == (0, 1500, 1)
    assert own.queue_s(2.0) == pytest.approx(0.2)
    assert before.queue_s(2.0) > 0.2
    book.remove(ours, 3.0)
    book.apply_report(replace(replica, report=EngineReport(running=3, at=4.0)))
    assert book.replica_load("w0").others_in_flight == 3
    book.forget_report("w9")


def test_restarted_engine_has_no_load_of_the_one_before():
    book, old = LoadBook(), a_replica("w0", engine_boot_id="a", report=EngineReport(at=1.0))
    early = book.add("w0", SQL, 1.0, 0.5)
    book.apply_report(old)
    assert book.replica_load("w0").in_prefill == 1  # sent before anything was heard of it
    hanging = [book.add("w0", SQL, 2.0, 2.0) for _ in range(3)]
    new = replace(old, engine_boot_id="b", report=EngineReport(running=2, at=60.0))
    book.apply_report(new)
    own = book.fleet_load("m", (new,))[0]
    assert (own.in_flight, own.others_in_flight, own.fresh) == (0, 2, frozenset())
    assert book.silent_s("w0", 99.0) == 0.0
    now = book.add("w0", "", 0.5, 61.0)
    for flight in (early, *hanging):
        book.record_first_token(flight, 62.0)
        book.remove(flight, 62.0)
    assert book.replica_load("w0").in_prefill == 1
    book.remove(now, 63.0)
    book.apply_report(new)
    assert book.replica_load("w0").in_flight == 0


def test_request_with_seven_sequences_counts_as_seven_requests():
    replica = a_replica("w0", report=EngineReport(running=14, at=1.0))
    rhos = []
    for requests, sequences in ((7, 1), (1, 7)):
        book = LoadBook()
        for _ in range(requests):
            book.add("w0", "", 7.0 / requests, 0.0, base_model=replica.base_model, sequences=sequences)
        book.apply_report(replica)
        rhos.append(book.utilisation(replica.base_model, FleetLoad.of([book.replica_load("w0")]), 1.0)[0])
    assert rhos[0] == pytest.approx(rhos[1])
    assert rhos[0] > 0


def prefill(book, now, predicted_s, took_s, *, waits_s=0.0):
    """A streamed request, alone, whose first token comes after `took_s`; returns when that was."""
    entry = book.add("w0", "", predicted_s, now, first_token_s=predicted_s + waits_s)
    book.record_first_token(entry, now + took_s)
    book.remove(entry, now + took_s)
    return now + took_s


@pytest.mark.parametrize("slower", [0.25, 0.7, 1.0, 4.0, 30.0])
def test_a_few_first_tokens_tell_an_engine_that_is_slower_or_faster_than_its_rate(slower):
    book, now = LoadBook(), 0.0
    for _ in range(25):
        pace = book.replica_load("w0").prefill_pace
        now = prefill(book, now, predicted_s=1.0 * pace, took_s=1.0 * slower)
    assert book.replica_load("w0").prefill_pace == pytest.approx(slower, rel=0.1)


def test_short_prefill_says_nothing_about_the_pace_because_http_takes_as_long():
    book, now = LoadBook(), 0.0
    for _ in range(25):
        now = prefill(book, now, predicted_s=0.02, took_s=0.06)
    assert book.replica_load("w0").prefill_pace == 1.0


@pytest.mark.parametrize("late_s", [0.004, 0.04, 0.4])
def test_first_tokens_of_short_prefills_tell_what_they_take_beyond_the_cost_model(late_s):
    book, now, before = LoadBook(), 0.0, []
    for number in range(200):
        entry = book.add("w0", "", 0.02, now, first_token_s=0.02)
        before.append(entry.predicted_s)
        took_s = 0.02 + late_s * (3.0 if number % 3 == 0 else 1.0)  # a third of them take much longer
        now += took_s
        book.record_first_token(entry, now)
        book.remove(entry, now)
    assert before[0] == 0.02  # nothing is known of the first one
    assert sum(before[100:]) / 100 == pytest.approx(0.02 + late_s, rel=0.4)
    assert book.add("w0", "", 0.02, now, first_token_s=0.02).first_token_s == 0.02  # what decisions go by


def test_what_first_tokens_take_beyond_the_cost_model_is_forgotten_when_they_come_sooner():
    book, now = LoadBook(), 0.0
    for took_s in (0.1,) * 60 + (0.02,) * 60:
        now = prefill(book, now, predicted_s=0.02, took_s=took_s)
    assert book.add("w0", "", 0.02, now, first_token_s=0.02).predicted_s == pytest.approx(0.02, abs=0.003)


def test_first_token_that_mostly_waited_for_others_says_nothing_about_the_pace():
    book, now = LoadBook(), 0.0
    for _ in range(25):
        now = prefill(book, now, predicted_s=0.1, waits_s=0.2, took_s=3.0)
    assert book.replica_load("w0").prefill_pace == 1.0


def test_one_stall_makes_an_engine_no_more_than_a_little_slower():
    book, now = LoadBook(), 0.0
    for _ in range(25):
        now = prefill(book, now, predicted_s=0.1, took_s=0.1)
    prefill(book, now, predicted_s=0.1, took_s=60.0)
    assert 1.0 < book.replica_load("w0").prefill_pace < 2.0


def test_estimate_says_nothing_about_the_pace():
    book = LoadBook()
    entry = book.add("w0", "", 1.0, 0.0, first_token_s=1.0)
    entry.is_exact = False
    book.record_first_token(entry, 0.01)
    assert book.replica_load("w0").prefill_pace == 1.0


def test_replica_without_first_tokens_has_the_pace_of_the_others():
    book = LoadBook()
    for name, model in (("w0", ""), ("w1", ""), ("w2", "another")):
        book.apply_report(replace(a_replica(name), base_model=model))
    prefill(book, 0.0, predicted_s=0.1, took_s=0.4)
    paces = [book.replica_load(name).prefill_pace for name in ("w0", "w1", "w2")]
    assert paces[0] == paces[1] > 1.0 == paces[2]


@pytest.mark.parametrize(("before", "then", "expected"), [(1000.0, 2000.0, 8.0), (0.0, 500.0, 1.0), (500.0, 0.0, 1.0)])
def test_pace_means_the_same_seconds_a_token_when_the_rate_is_learned_anew(before, then, expected):
    book, now = LoadBook(), 0.0
    book.apply_report(a_replica("w0", report=EngineReport(at=1.0, prefill_tokens_per_s=before)))
    for _ in range(60):
        now = prefill(book, now, 0.1 * book.replica_load("w0").prefill_pace, took_s=0.4)
    book.apply_report(a_replica("w0", report=EngineReport(at=2.0, prefill_tokens_per_s=then)))
    assert book.replica_load("w0").prefill_pace == pytest.approx(expected, rel=0.05)


@given(st.lists(st.tuples(st.floats(0.001, 30), st.floats(0.0001, 100)), max_size=60))
def test_pace_stays_within_its_bounds_whatever_first_tokens_take(prefills):
    book, now = LoadBook(), 0.0
    for predicted_s, took_s in prefills:
        now = prefill(book, now, predicted_s * book.replica_load("w0").prefill_pace, took_s)
        assert 0.001 <= book.replica_load("w0").prefill_pace <= 100


def with_session(book, sessions, name, tokens, now, worker="w0", **more):
    """A request of a session that has ended."""
    state = sessions.begin_turn(Session(name), (), 0, "", now)
    entry = book.add(worker, "", 0.1, now, tokens, base_model="m", session=state, **more)
    book.remove(entry, now)
    return entry


def victim_tokens(book):
    return [tokens for tokens, _, _ in book.replica_load("w0").victims]


def test_a_load_has_what_the_next_prompt_pushes_out_and_another_engine_has_nothing_of_it():
    book, sessions = LoadBook(), SessionBook()
    replica = a_replica("w0", total_kv_blocks=100, engine_boot_id="b1")
    assert victim_tokens(book) == []
    book.apply_report(replica)
    assert victim_tokens(book) == [1600]
    with_session(book, sessions, "a", 500, 1.0)
    entry = with_session(book, sessions, "b", 300, 2.0)
    assert victim_tokens(book) == [800, 500, 300]
    assert entry.session.in_flight == 0
    running = book.add("w0", "", 0.1, 3.0, 510, 500, session=sessions.begin_turn(Session("a"), (), 0, "", 3.0))
    assert victim_tokens(book) == [790, 300]
    book.remove(running, 5.0)
    book.remove(running, 5.0)
    assert running.session.in_flight == 0
    assert victim_tokens(book) == [790, 300, 510]
    book.apply_report(replace(replica, engine_boot_id="b2"))
    assert victim_tokens(book) == [1600]


def test_an_engine_that_keeps_no_prefixes_loses_nothing():
    book = LoadBook()
    book.apply_report(a_replica("w0", total_kv_blocks=100, caches_prefixes=False))
    with_session(book, SessionBook(), "a", 500, 1.0)
    assert victim_tokens(book) == []


def test_a_router_counts_on_its_share_of_a_cache_that_others_use_too():
    book = LoadBook()
    book.add("w0", "", 0.1, 0.0, base_model="m")
    for at in range(1, 200):
        book.apply_report(a_replica("w0", total_kv_blocks=100, report=EngineReport(running=4, at=float(at))))
    assert victim_tokens(book) == [pytest.approx(400, rel=0.01)]


WORK_STEPS = st.tuples(st.sampled_from(["begin", "begin", "first_token", "end", "leave"]), st.integers(0, 9))


@given(st.lists(WORK_STEPS, max_size=60))
def test_shares_of_an_engines_time_add_up_to_the_time_for_which_it_is_busy(steps):
    book, open_, all_, now, busy_s = LoadBook(), [], [], 0.0, 0.0
    for step, number in [*steps, *[("end", 0)] * len(steps)]:
        now += 0.5
        busy_s += 0.5 if open_ else 0.0
        if step == "begin":
            open_.append(book.add("w0", SQL, 0.0, now, sequences=1 + number % 3))
            all_.append(open_[-1])
        elif open_ and step == "first_token":
            book.record_first_token(open_[number % len(open_)], now)
        elif open_:
            book.remove(open_.pop(number % len(open_)), now, is_answered=step == "end")
    assert sum(entry.work_s for entry in all_) == pytest.approx(busy_s)
    assert all(0 <= entry.decode_s <= entry.work_s for entry in all_)


def test_a_prefill_is_charged_to_its_request_alone():
    book = LoadBook()
    decoding = book.add("w0", "", 0.0, 0.0)
    book.record_first_token(decoding, 0.0)
    long = book.add("w0", SQL, 4.0, 1.0)
    book.record_first_token(long, 6.0)  # four seconds of its prefill, and one of the other's decoding
    book.remove(long, 8.0)
    book.remove(decoding, 8.0)
    assert long.work_s + decoding.work_s == pytest.approx(8.0)
    assert long.work_s - long.decode_s == pytest.approx(4.0)
    assert decoding.decode_s == decoding.work_s


def test_a_request_that_leaves_within_its_prefill_is_charged_for_its_time_and_an_engine_is_shared_with_others():
    book = LoadBook()
    book.apply_report(a_replica("w0", report=EngineReport(at=0.0, running=3)))
    left = book.add("w0", "", 10.0, 1.0)
    book.remove(left, 3.0)
    assert (left.work_s, left.decode_s) == (pytest.approx(0.5), 0.0)
