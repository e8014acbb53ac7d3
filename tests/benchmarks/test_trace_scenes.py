"""The trace benchmark's scenes: programs of agents, a flash crowd, engines and adapters that differ; their figures."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from benchmarks.trace.engine import Hardware, TraceEngine, TraceJob
from benchmarks.trace.fleet import Setting, TraceFleet
from benchmarks.trace.measure import figures, replay
from benchmarks.trace.rules import Peer, Rule
from benchmarks.trace.scenes import (
    CROWD,
    CROWD_ADAPTER,
    CROWD_AT_S,
    CROWD_BLOCKS,
    CROWD_S,
    DAY_S,
    FIRST_TURNS,
    GREEDY,
    GREEDY_AT_S,
    LAST_TURNS,
    SCENES,
    crowd,
    diurnal,
    diurnal_s,
    greedy,
    live_blocks,
    panels,
    programs,
)
from benchmarks.trace.workload import BLOCK, TraceLine, TraceRequest, drawn, key
from router.core.schedule.cost_settings import CostSettings
from tests.benchmarks.test_trace import HARDWARE, Recorder, a_request, finish_all, recorded
from tests.patience import patience


def agents(requests: list[TraceRequest]) -> list[list[TraceRequest]]:
    """The turns of each agent, in order."""
    of_session: dict[int, list[TraceRequest]] = {}
    for request in requests:
        of_session.setdefault(request.session, []).append(request)
    return list(of_session.values())


# --- programs ---------------------------------------------------------------------------------------------------------


def test_each_turn_of_an_agent_begins_with_the_turn_before_and_its_answer():
    found = programs(3, adapters=4, programs=20)
    for turns in agents(found):
        assert len({turn.adapter for turn in turns}) == 1
        for before, after in pairwise(turns):
            assert after.ids[: before.prompt_tokens // BLOCK] == before.ids[: before.prompt_tokens // BLOCK]
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
        for turn in turns:
            assert turn.keys == [key(turn.adapter, block) for block in turn.ids[: turn.prompt_tokens // BLOCK]]


def test_programs_have_ten_to_43_turns_and_about_half_of_them_sub_agents():
    found = programs(1, adapters=1)
    by_agent = agents(found)
    own = [turns for turns in by_agent if turns[0].parent < 0]
    assert len(own) == 200
    assert all(FIRST_TURNS <= len(turns) <= LAST_TURNS for turns in own)
    sub = [turns for turns in by_agent if turns[0].parent >= 0]
    assert all(3 <= len(turns) <= 8 for turns in sub)
    assert 60 <= len({turns[0].program for turns in sub}) <= 140
    assert {turns[0].parent for turns in sub} <= {turns[0].session for turns in own}


def test_equal_seeds_draw_equal_programs():
    def told(seed: int) -> list[object]:
        return [
            (r.number, r.arrived, r.prompt_tokens, r.output_tokens, r.ids, [(t.number, pause) for t, pause in r.then])
            for r in programs(seed, adapters=2, programs=5)
        ]

    assert told(7) == told(7)
    assert told(7) != told(8)


def test_every_turn_but_the_first_of_a_program_is_named_as_often_as_it_waits():
    found = programs(5, adapters=1, programs=30)
    named: dict[int, int] = {}
    for request in found:
        for later, _ in request.then:
            named[later.number] = named.get(later.number, 0) + 1
    assert {r.number: r.waits_for for r in found if r.waits_for} == named
    assert sum(not r.waits_for for r in found) == 30


def follow(before: TraceRequest, after: TraceRequest, pause_s: float) -> None:
    """Let `after` come `pause_s` after the end of `before`."""
    before.then.append((after, pause_s))
    after.waits_for += 1


def a_program() -> list[TraceRequest]:
    """A request, two sub-agents at once, and a last one that waits for both."""
    first, left, right, last = [replace(a_request(n, blocks=(n + 1,)), program=0, then=[]) for n in range(4)]
    right.output_tokens = 300
    follow(first, left, 2.0)
    follow(first, right, 3.0)
    follow(left, last, 5.0)
    follow(right, last, 7.0)
    return [first, left, right, last]


def test_a_turn_comes_its_pause_after_the_last_that_it_waits_for():
    first, left, right, last = found = a_program()
    recorded(found)
    assert left.arrived == first.last_token + 2.0
    assert right.arrived == first.last_token + 3.0
    assert right.last_token > left.last_token
    assert last.arrived == right.last_token + 7.0


def test_a_programs_completion_leaves_out_the_pauses_on_its_longest_way():
    found = a_program()
    fleet, _ = recorded(found)
    first, *_, last = found
    pauses_s = 3.0 + 7.0
    assert figures(found, fleet).completion_mean_s == pytest.approx(last.last_token - first.arrived - pauses_s)


def test_a_program_goes_on_after_a_turn_that_was_refused():
    class Refuses(Recorder):
        def offer(self, request: TraceRequest, now: float) -> None:
            if request.number == 1:
                self.fleet.shed(request)
            else:
                super().offer(request, now)

    found = a_program()
    fleet = TraceFleet(Setting(hardware=HARDWARE), seed=0)
    fleet.routers.append(Refuses(fleet))
    fleet.run(found)
    assert found[1].is_shed
    assert found[3].last_token > 0


def test_live_blocks_are_those_of_agents_between_their_first_and_last_turn():
    # At 0 s: 3 blocks until 2.5 s, then a pause of 10 s with them, then 4 blocks. Another at 5 s: 6 blocks, alone.
    first, second, other = (a_request(n, blocks=range(blocks)) for n, blocks in enumerate((2, 3, 5)))
    first.session = second.session = 1
    other.session = 2
    follow(first, second, 10.0)
    other.arrived = 5.0
    assert live_blocks([first, second, other]) == 3 + 6
    other.arrived = 100.0
    assert live_blocks([first, second, other]) == 6
    other.arrived = 12.6
    assert live_blocks([first, second, other]) == 6, "the first agent has ended"


def test_an_agents_scene_has_caches_of_its_share_of_what_is_live():
    requests, setting = SCENES["agents 0.5"].draw([], 2)
    _, larger = SCENES["agents 2"].draw([], 2)
    engines = len(setting.speeds)
    assert setting.hardware.blocks * engines == pytest.approx(live_blocks(requests) / 2, abs=engines)
    assert larger.hardware.blocks == pytest.approx(4 * setting.hardware.blocks, abs=4)
    assert len({request.adapter for request in requests}) == 1


def test_the_greedy_programs_sub_agents_come_at_once_and_share_nothing_with_the_others():
    found = greedy(3)
    assert sorted(r.number for r in found) == list(range(len(found)))
    own = [r for r in found if r.program == 100]
    others = [r for r in found if r.program < 100]
    firsts = [turns[0] for turns in agents(own)]
    assert len(firsts) == GREEDY
    assert all(GREEDY_AT_S <= first.arrived < GREEDY_AT_S + 1.0 for first in firsts)
    assert len({first.parent for first in firsts}) == 1
    assert not {r.session for r in own} & {r.session for r in others}
    assert not {key for r in own for key in r.keys} & {key for r in others for key in r.keys}


def test_longer_pauses_change_neither_the_turns_nor_the_caches():
    usual, setting = SCENES["agents 1"].draw([], 2)
    longer, same = SCENES["agents pauses 4"].draw([], 2)
    assert same == setting
    assert [(r.arrived, r.prompt_tokens) for r in longer] == [(r.arrived, r.prompt_tokens) for r in usual]
    pauses = [sum(pause_s for request in found for _, pause_s in request.then) for found in (usual, longer)]
    assert pauses[1] == pytest.approx(4 * pauses[0], rel=0.01)


# --- texts for ten adapters -------------------------------------------------------------------------------------------


def test_ten_adapters_are_asked_about_each_text_at_once_and_share_no_block_of_it():
    found = panels(2, texts=5)
    by_text: dict[int, list[list[TraceRequest]]] = {}
    for turns in agents(found):
        assert 1 <= len(turns) <= 4
        by_text.setdefault(turns[0].program, []).append(turns)
    assert sorted(by_text) == list(range(5))
    for of_text in by_text.values():
        assert [turns[0].adapter for turns in of_text] == list(range(10))
        firsts = [turns[0] for turns in of_text]
        assert max(first.arrived for first in firsts) - min(first.arrived for first in firsts) < 1.0
        assert len({first.ids[0] for first in firsts}) == 1
        assert len({first.keys[0] for first in firsts}) == 10


# --- days -------------------------------------------------------------------------------------------------------------


def test_a_day_has_0_15_of_the_mean_speed_at_midnight_and_1_85_at_noon():
    speed = {at_s: 2 / (diurnal_s(at_s + 1.0) - diurnal_s(at_s - 1.0)) for at_s in (DAY_S, 1.5 * DAY_S)}
    assert speed[DAY_S] == pytest.approx(0.15, rel=0.05)
    assert speed[1.5 * DAY_S] == pytest.approx(1.85, rel=0.01)
    assert [diurnal_s(days * DAY_S) for days in (0, 1, 2)] == pytest.approx([0, DAY_S, 2 * DAY_S], abs=0.1)


def test_the_days_requests_are_the_traces_in_its_order():
    lines = [TraceLine(at_s, 1000, 10, (0, 1 + at_s)) for at_s in range(0, 3600, 30)]
    found = diurnal(lines, 4)
    assert len(found) == len(lines)
    assert [r.arrived for r in found] == sorted(r.arrived for r in found)
    by_noon = sum(r.arrived < DAY_S / 2 for r in found)
    by_six = sum(r.arrived < DAY_S / 4 for r in found)
    assert by_six < by_noon / 4


# --- an engine that dies ----------------------------------------------------------------------------------------------


class Elsewhere(Recorder):
    """Sends to worker 0 while that is there, else to worker 1."""

    def offer(self, request: TraceRequest, now: float) -> None:
        self.offered.append(request.number)
        back = [at for at in self.read_at.get(0, []) if self.losses and at > self.losses[-1][0]]
        self.fleet.send(request, 1 if self.losses and not back else 0)


def test_requests_without_a_token_are_sent_again_when_their_engine_dies_and_streams_end_in_an_error():
    streamed = replace(a_request(0, blocks=(1,)), output_tokens=1000, then=[])
    unanswered = a_request(1, blocks=range(2, 200), arrived=1.9)
    during, after = a_request(2, blocks=(1,), arrived=8.0), a_request(3, blocks=(1,), arrived=60.0)
    found = [streamed, unanswered, during, after]
    fleet = TraceFleet(Setting(hardware=replace(HARDWARE, blocks=300), gone_s=(2.0, 40.0)), seed=0)
    router = Elsewhere(fleet)
    fleet.routers.append(router)
    fleet.run(found)
    assert router.losses == [(2.0, 0)]
    assert router.offered == [0, 1, 1, 2, 3]
    assert streamed.first_token > 0
    assert streamed.last_token < 0
    assert [request.worker for request in (unanswered, during, after)] == [1, 1, 0]
    assert unanswered.last_token > 0
    assert figures(found, fleet).failed == 1


def test_an_engine_that_comes_back_has_no_block_and_no_adapter_and_reports_nothing_while_it_is_gone():
    before, after = a_request(0, blocks=(1, 2)), a_request(1, blocks=(1, 2), arrived=60.0)
    fleet, (router,) = recorded([before, after], gone_s=(30.0, 40.0))
    assert before.cached_tokens == after.cached_tokens == 0
    assert before.load_s > 0
    assert after.load_s > 0
    reports = router.read_at[0]
    assert [at for at in reports if 30.0 <= at < 40.0] == []
    assert {int(at) for at in reports} > {29, 40, 41}
    assert [found for _, found in router.forgotten] == before.keys
    assert all(30.0 + fleet.setting.events_s <= at < 40.0 for at, _ in router.forgotten)


def test_a_peer_whose_rule_names_a_lost_engine_sends_to_the_one_with_the_fewest_requests():
    class AlwaysTheFirst(Rule):
        def choose(self, request: TraceRequest) -> int:
            return 0

    found = [a_request(n, blocks=range(10 * n, 10 * n + 9), arrived=at) for n, at in enumerate((1.0, 5.0, 5.1, 30.0))]
    fleet = TraceFleet(Setting(hardware=HARDWARE, speeds=(1.0, 1.0, 1.0), gone_s=(4.0, 20.0)), seed=0)
    fleet.routers.append(Peer(AlwaysTheFirst, fleet, 0))
    fleet.run(found)
    assert [request.worker for request in found] == [0, 1, 2, 0]


def test_our_router_sends_nothing_to_a_lost_engine_and_uses_it_again_when_it_is_back():
    requests, setting = SCENES["failing engine"].draw(drawn(300), 1)
    setting = replace(setting, gone_s=(10.0, 30.0))
    replay("kv_lora", requests, setting, 1, late_binding_s=1.0, costs=CostSettings())
    assert not [r for r in requests if r.worker == 0 and 10.0 < r.sent < 30.0]
    assert [r for r in requests if r.worker == 0 and r.sent < 10.0]
    assert [r for r in requests if r.worker == 0 and r.sent > 30.0]
    assert [r for r in requests if r.first_token < 0] == []


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_a_step_is_longer_by_its_number_of_adapters_at_the_largest_of_their_ranks():
    hardware = Hardware(ranks=(8, 32))
    assert Hardware().step_factor([0, 1]) == 1.0
    assert hardware.step_factor([]) == 1.0
    assert hardware.step_factor([0, 2]) == pytest.approx(1 + 2 * 0.02)
    assert hardware.step_factor([0, 3, 2]) == pytest.approx(1 + 3 * 0.06)


def test_prefill_and_decode_of_a_batch_take_longer_by_its_adapters_ranks_and_loads_do_not():
    plain = replace(HARDWARE, load_s=1.0, load_sigma=0.0, to_device_s=0.0)
    took_s = []
    for hardware in (plain, replace(plain, ranks=(128,))):
        engine = TraceEngine(hardware, Random(0))
        job = TraceJob(1, [], 5000, 400, 7)
        engine.add(job, 0.0)
        finish_all(engine)
        took_s.append((job.first_token - 1.0, job.last_token - job.first_token))
    assert took_s[1] == pytest.approx([1.17 * seconds for seconds in took_s[0]])


# --- a crowd, a slow engine, adapters of two sizes --------------------------------------------------------------------


def test_a_flash_crowd_asks_one_adapter_over_one_text_within_its_seconds():
    lines = [TraceLine(at_s, 1000, 10, (0, 1 + at_s)) for at_s in range(0, 3000, 10)]
    found = crowd(lines, 4)
    assert [request.number for request in found] == list(range(len(found)))
    of_crowd = [request for request in found if len(request.keys) == CROWD_BLOCKS]
    assert len(of_crowd) == CROWD
    assert {(request.adapter, *request.keys) for request in of_crowd} == {(CROWD_ADAPTER, *of_crowd[0].keys)}
    assert all(CROWD_AT_S <= request.arrived <= CROWD_AT_S + CROWD_S for request in of_crowd)
    calm = [request for request in found if len(request.keys) != CROWD_BLOCKS]
    assert len(calm) == 120
    assert not {key for request in calm for key in request.keys} & set(of_crowd[0].keys)


def test_the_first_engine_becomes_four_times_slower_at_its_time():
    early, late = a_request(0, blocks=range(1, 9)), a_request(1, blocks=range(11, 19), arrived=60.0)
    fleet, _ = recorded([early, late], slows_at_s=30.0)
    assert fleet.engines[1].hardware.prefill_s == pytest.approx(HARDWARE.prefill_s / fleet.setting.speeds[1])
    load_s = [request.load_s + HARDWARE.to_device_s * (request is early) for request in (early, late)]
    took_s = [r.first_token - r.sent - wait_s for r, wait_s in zip((early, late), load_s, strict=True)]
    assert took_s[1] == pytest.approx(4 * took_s[0])


def test_adapters_take_turns_in_size_and_load_as_long_as_they_are_large():
    hardware = replace(HARDWARE, load_s=1.0, load_sigma=0.0, to_device_s=0.1, sizes=(0.5, 3.0))
    engine = TraceEngine(hardware, Random(0))
    jobs = [TraceJob(n, [], 10, 1, adapter) for n, adapter in enumerate((2, 3))]
    for job in jobs:
        engine.add(job, 100.0 * job.number)
        finish_all(engine)
    prefill_s = 10 * hardware.prefill_s
    assert jobs[0].load_s == 0.5
    assert jobs[1].load_s == 3.0
    assert jobs[0].first_token == pytest.approx(0.5 + 0.05 + prefill_s, abs=1e-6)
    assert jobs[1].first_token == pytest.approx(100.0 + 3.0 + 0.3 + prefill_s, abs=1e-6)


# --- figures ----------------------------------------------------------------------------------------------------------


def answered(number: int, *, blocks: tuple[int, ...], cached: int, ttft_s: float, adapter: int = 0) -> TraceRequest:
    request = a_request(number, blocks=blocks, adapter=adapter)
    request.sent, request.first_token, request.last_token = 0.0, ttft_s, ttft_s + 1.0
    request.cached_tokens = cached
    return request


def test_computed_again_is_what_exceeds_each_block_once_and_each_tail():
    # Three prompts of two blocks and a token: blocks 1 and 2 twice, of which one block was cached, and 1 and 3.
    found = [
        answered(0, blocks=(1, 2), cached=0, ttft_s=1.0),
        answered(1, blocks=(1, 2), cached=BLOCK, ttft_s=1.0),
        answered(2, blocks=(1, 3), cached=BLOCK, ttft_s=1.0),
    ]
    share = BLOCK / (3 * (2 * BLOCK + 1))  # block 2, once more
    assert figures(found, TraceFleet(Setting(), 0)).again_share == pytest.approx(share)


def test_jains_index_is_one_where_all_adapters_wait_alike_and_a_half_where_one_of_two_waits():
    alike = [answered(n, blocks=(n,), cached=0, ttft_s=2.0, adapter=n) for n in range(2)]
    assert figures(alike, TraceFleet(Setting(), 0)).jain == pytest.approx(1.0)
    uneven = [answered(n, blocks=(n,), cached=0, ttft_s=2.0 * n, adapter=n) for n in range(2)]
    assert figures(uneven, TraceFleet(Setting(), 0)).jain == pytest.approx(0.5)


# --- the command ------------------------------------------------------------------------------------------------------


def scenes_command(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "benchmarks.trace", "--quick", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)


@pytest.mark.slow
def test_scenes_print_a_table_each_and_write_a_row_a_run(tmp_path):
    out = tmp_path / "rows.json"
    flags = ("--scenes", "light,speeds", "--policies", "kv_lora,dynamo", "--first-seed", "5", "--json", str(out))
    ended = scenes_command(*flags)
    assert ended.returncode == 0, ended.stderr
    for scene in ("light", "speeds"):
        assert f"{scene}: {SCENES[scene].about}" in " ".join(ended.stdout.split())
    rows = json.loads(out.read_text())
    runs = [(row["scene"], row["policy"], row["seed"]) for row in rows]
    assert runs == [(scene, policy, 5) for scene in ("light", "speeds") for policy in ("kv_lora", "dynamo")]
    assert all(row["ttft_mean_s"] > 0 and 0 < row["jain"] <= 1 for row in rows)


def test_an_unknown_scene_is_refused_with_those_that_there_are():
    ended = scenes_command("--scenes", "light,moonlight")
    assert ended.returncode == 2
    assert "['moonlight']: unknown; there are conversation, light" in " ".join(ended.stderr.split())


@pytest.mark.parametrize("scene", SCENES)
def test_every_scene_draws_requests_that_fit_into_its_engines(scene):
    requests, setting = SCENES[scene].draw(drawn(40), 1)
    tokens = setting.hardware.blocks * setting.hardware.block_size
    assert requests
    assert all(request.prompt_tokens + request.output_tokens < tokens for request in requests)
    assert {request.router for request in requests} <= set(range(setting.routers))


def test_the_mixed_adapters_scene_has_sizes_of_20_mb_and_2_gb():
    _, setting = SCENES["mixed adapters"].draw(drawn(5), 1)
    assert [round(setting.hardware.size_of(n) * 336) for n in range(4)] == [20, 2048, 20, 2048]
    assert Hardware().size_of(7) == 1.0
