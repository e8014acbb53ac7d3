"""Incidents: each once in history, events and metrics, with cause and next step; bounded while something flaps."""

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.incidents import KINDS_OF_INCIDENTS, Incident, IncidentBook
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.reconcile.incidents import IncidentRecorder
from tests.orchestrator.doubles import FakeAgent

WINDOW_S = 600.0
reported = st.lists(
    st.tuples(st.sampled_from(["engine_died", "engine_back"]), st.sampled_from(["w0", "w1"]), st.floats(0, 400)),
    max_size=80,
)


@given(reported, st.randoms())
def test_each_incident_is_recorded_or_counted_once_however_often_it_is_reported(steps, rng):
    book, now = IncidentBook(), 0.0
    made, stood_for, per_window = Counter(), Counter(), []
    for number, (kind, worker, pause_s) in enumerate(steps):
        now += pause_s
        incident = Incident(kind, now, worker, f"key {number}")
        made[kind, worker] += 1
        for _ in range(rng.randint(1, 3)):
            if book.is_to_record(incident):
                stood_for[kind, worker] += 1
                per_window.append((kind, worker, now))
        for summary in book.due_summaries(now):
            stood_for[summary.kind, summary.subject] += summary.count
    for summary in book.due_summaries(now + WINDOW_S):
        stood_for[summary.kind, summary.subject] += summary.count
    assert stood_for == made
    assert book.due_summaries(now + 10 * WINDOW_S) == []
    for kind, worker, at in per_window:
        near = [each for each in per_window if each[:2] == (kind, worker) and at <= each[2] < at + WINDOW_S]
        # A summary begins a new count, so that a window may have the end of one and the beginning of another.
        assert len(near) <= 10


@given(reported)
def test_a_book_that_read_the_keys_again_records_nothing_twice(steps):
    first, now, recorded = IncidentBook(), 0.0, []
    incidents = []
    for number, (kind, worker, pause_s) in enumerate(steps):
        now += pause_s
        incidents.append(Incident(kind, now, worker, f"key {number}"))
        if first.is_to_record(incidents[-1]):
            recorded.append(incidents[-1].key)
    second = IncidentBook()
    second.add_keys(recorded)
    assert not [each for each in incidents if each.key in recorded and second.is_to_record(each)]


def test_every_kind_that_is_bad_has_a_next_step():
    assert [
        name for name, kind in KINDS_OF_INCIDENTS.items() if (kind.severity != "info") != bool(kind.next_step)
    ] == []


def died(number, **more):
    cause = "the engine exited (killed by SIGKILL, status -9)\nits output ends:\n..."
    return {"id": number, "at": "2027-01-15T08:00:00Z", "kind": "engine_died", "cause": cause} | more


async def beat(service, agent, *incidents):
    body = {**agent.heartbeat(), "incidents": incidents}
    answer = await service.http.post("/v1/workers/register", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["recorded_incidents"]


async def incidents(service, **asked):
    answer = await service.http.get("/v1/history", params={"kind": "incident", **asked})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


async def kinds(service, **asked):
    return [item["kind"] for item in await incidents(service, **asked)]


async def test_an_agents_incident_is_in_history_events_and_metrics_once(service):
    agent = await service.worker("w0")
    begin = service.reconciler.catalog.revision
    assert await beat(service, agent, died(1)) == 1
    assert await beat(service, agent, died(1), died(2, kind="engine_back", cause="4 adapters back after 3.2 s")) == 2
    back, death, leader = await incidents(service)
    assert (death["kind"], death["subject"], death["severity"]) == ("engine_died", "w0", "error")
    assert "killed by SIGKILL" in death["body"]["cause"]
    assert "out-of-memory" in death["next_step"]
    assert (back["kind"], back["body"]["cause"]) == ("engine_back", "4 adapters back after 3.2 s")
    assert leader["kind"] == "leader_changed"
    messages = [
        event.message for event, *_ in service.reconciler.catalog.events_since(begin) if event.type == "incident"
    ]
    assert messages[-2:] == [
        "engine_died: the engine exited (killed by SIGKILL, status -9)",
        "engine_back: 4 adapters back after 3.2 s",
    ]
    text = (await service.http.get("/metrics")).text
    assert 'lorafleet_orchestrator_incidents_total{kind="engine_died"} 1.0' in text
    assert 'lorafleet_orchestrator_incidents_total{kind="engine_hung"} 0.0' in text


async def test_an_unknown_kind_of_a_newer_agent_is_passed_over_and_not_sent_again(service):
    agent = await service.worker("w0")
    assert await beat(service, agent, died(1, kind="of_tomorrow"), died(2)) == 2
    assert await kinds(service) == ["engine_died", "leader_changed"]


async def test_a_restarted_orchestrator_loses_nothing_and_doubles_nothing(open_service, tmp_path):
    first = open_service()
    agent = FakeAgent("w0")
    await first.join(agent)
    await beat(first, agent, died(1))
    await first.close()
    second = open_service()
    await second.join(agent)
    # It had not heard that the first one is recorded, and a second came meanwhile.
    assert await beat(second, agent, died(1), died(2)) == 2
    assert Counter(await kinds(second)) == {"engine_died": 2, "leader_changed": 2}
    agent.agent_boot_id = "a2"
    assert await beat(second, agent, died(1)) == 1
    assert (await kinds(second)).count("engine_died") == 3


async def test_a_flapping_engine_is_summed_up(service):
    agent = await service.worker("w0")
    for number in range(1, 41):
        await beat(service, agent, died(number))
    assert (await kinds(service)).count("engine_died") == 5
    service.clock.now += 601
    await service.turn()
    newest = (await incidents(service))[0]
    assert newest["body"]["count"] == 35
    assert newest["body"]["cause"].startswith("35 more within 10 minutes, the last: the engine exited")
    assert 'incidents_total{kind="engine_died"} 40.0' in (await service.http.get("/metrics")).text


async def test_a_lost_worker_and_its_return_are_incidents(service):
    agent = await service.worker("w0")
    entry = service.reconciler.reports.workers["w0"]
    entry.reach = "lost"
    service.reconciler.run_pass()
    service.reconciler.run_pass()
    assert (await kinds(service)).count("worker_lost") == 1
    service.clock.now += 30
    await service.http.post("/v1/workers/register", json=agent.heartbeat())
    service.reconciler.run_pass()
    back = (await incidents(service))[0]
    assert (back["kind"], back["body"]["seconds"]) == ("worker_back", 30.0)


async def test_circuits_in_a_routers_reports_are_incidents_when_they_open_and_close(service):
    await service.worker("w0")
    revision = service.reconciler.catalog.revision
    for seq, circuits in enumerate(({}, {"w0": "open"}, {"w0": "half_open"}, {"w0": "open"}, {}), 1):
        body = {"router_id": "r0", "boot_id": "b0", "seq": seq, "revision_seen": revision}
        answer = await service.http.post("/v1/usage", json=body | {"now": {"circuits": circuits}})
        assert answer.json()["accepted"]
    closed, opened, _ = await incidents(service)
    assert (opened["kind"], opened["subject"], opened["body"]["router_id"]) == ("circuit_opened", "w0", "r0")
    assert closed["kind"] == "circuit_closed"


async def test_the_history_is_filtered_by_worker_adapter_severity_and_time_across_pages(service):
    agents = [await service.worker(f"w{number}") for number in range(2)]
    await service.register("sql/v1")
    for number in range(1, 4):
        for agent in agents:
            await beat(service, agent, died(number, kind="engine_back" if number == 2 else "engine_died"))
        service.clock.now += 700
    assert await kinds(service, worker="w1") == ["engine_died", "engine_back", "engine_died"]
    assert set(await kinds(service, severity="error")) == {"engine_died"}
    assert len(await kinds(service, severity="error")) == 4
    first = (await incidents(service, worker="w1"))[-1]["at"]
    assert len(await kinds(service, worker="w1", until=first)) == 0
    assert len(await kinds(service, worker="w1", since=first)) == 3
    answer = (await service.http.get("/v1/history", params={"adapter": "sql/v1"})).json()["data"]
    assert [item["kind"] for item in answer] == ["adapter_registered"]
    found, cursor = [], None
    while True:
        asked = {"kind": "incident", "worker": "w0", "limit": 1} | ({} if cursor is None else {"cursor": cursor})
        page = (await service.http.get("/v1/history", params=asked)).json()
        found += [item["id"] for item in page["data"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert found == [item["id"] for item in await incidents(service, worker="w0")]
    assert (await service.http.get("/v1/history", params={"kind": "nothing"})).status_code == 400


async def test_pages_of_the_history_since_a_time_have_every_entry_since_then(service):
    for number in range(9):
        await service.register(f"sql/v{number}")
        service.clock.now += 60
    listed = (await service.http.get("/v1/history", params={"limit": 1000})).json()["data"]
    wanted = {"since": listed[5]["at"], "limit": 2}
    found, pages, cursor = [], 0, None
    while cursor is not None or not pages:
        asked = wanted | ({} if cursor is None else {"cursor": cursor})
        page = (await service.http.get("/v1/history", params=asked)).json()
        found, pages, cursor = [*found, *(item["id"] for item in page["data"])], pages + 1, page["next"]
    assert found == [item["id"] for item in listed[:6]]


async def test_the_end_of_a_workers_drain_is_in_the_history(service):
    await service.worker("w0")
    await service.http.post("/v1/workers/w0/drain", json={"deadline_s": 1})
    await service.settle()
    answer = (await service.http.get("/v1/history", params={"kind": "drain"})).json()["data"]
    assert [(item["subject"], item["body"]["outcome"]) for item in answer] == [("w0", "ok")]
    assert json.dumps(answer)


class LeadershipDouble:
    """A leader, or one that cannot reach its lease."""

    holder = "me"
    is_leading = True
    trouble = ""
    lease_place = "the API server"


async def test_a_lease_that_could_not_be_reached_is_an_incident_once_it_can(service):
    leadership, reconciler = LeadershipDouble(), service.reconciler
    recorder = IncidentRecorder(
        store=service.store,
        reports=reconciler.reports,
        catalog=reconciler.catalog,
        metrics=OrchestratorMetrics(),
        leadership=leadership,
        wall=service.clock,
    )
    leadership.trouble, leadership.is_leading = "it does not answer", False
    recorder.look()
    service.clock.now += 40
    leadership.trouble, leadership.is_leading = "", True
    for _ in range(2):
        recorder.look()
    (away,) = [item for item in await incidents(service) if item["kind"] == "lease_away"]
    assert away["body"]["cause"] == "the API server was not reached for 40.0 s: it does not answer"
    assert away["body"]["seconds"] == 40.0
