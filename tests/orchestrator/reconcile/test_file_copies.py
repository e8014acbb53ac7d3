"""Files on the workers' disks, as the orchestrator uses them: who fetches from whom, and how many copies are kept."""

import asyncio

from lorafleet.identity import fleet_source
from orchestrator.core.copies import STALLED_S
from orchestrator.reconcile.agent_view import with_place
from tests.orchestrator.doubles import digest_of
from tests.patience import within

SOURCE = "https://bucket.example/sql.tar.gz"
OWN = "f" * 64
NOBODY = "http://127.0.0.1:9"


async def workers(service, count: int, **shape):
    """Workers that report their files; all of them may load one adapter at once."""
    answer = await service.http.patch("/v1/policy", json={"load_spread_s": 0})
    assert answer.is_success, answer.text
    made = []
    for number in range(count):
        agent = await service.worker(f"w{number}", **shape)
        agent.disk = {}
        made.append(agent)
    await service.beat()
    return made


def loads(agents) -> dict[str, list[str]]:
    """worker_id -> the neighbours of its load."""
    return {
        agent.worker_id: body.get("neighbours", [])
        for agent in agents
        for verb, body in agent.calls
        if verb == "load_lora"
    }


async def test_after_the_inspection_every_other_worker_is_told_to_fetch_from_the_one_that_made_it(service):
    agents = await workers(service, 6)
    await service.register(source=SOURCE, policy={"loading": "eager", "min_replicas": 6})
    await service.settle()
    (inspector,) = [agent for agent in agents if ("inspect_lora", "sql/v1") in agent.operations()]
    named = loads(agents)
    assert named.pop(inspector.worker_id) == [], "it has the files"
    assert len(named) == 5
    assert all(named.values()), "nobody else asks the source"
    first = [agent.url for agent in agents if agent.worker_id in named]
    assert {inspector.url} <= {url for urls in named.values() for url in urls} <= {inspector.url, *first}


async def test_adapters_in_folders_are_read_by_each_worker_at_once(service):
    agents = await workers(service, 4)
    await service.register(policy={"loading": "eager", "min_replicas": 4})
    await service.turn()
    await service.turn()
    assert loads(agents) == {agent.worker_id: [] for agent in agents}


async def _known_and_nowhere(service, count: int):
    """Workers without the files of an inspected adapter."""
    agents = await workers(service, count)
    await service.register(source=SOURCE)
    await service.turn()
    for agent in agents:
        agent.disk.clear()
    await service.beat()
    return agents


async def _begun(agents, count: int) -> set[str]:
    """The workers with a load, once so many have one."""
    async with within(10):
        while len(loads(agents)) < count:
            await asyncio.sleep(0.005)
    return set(loads(agents))


async def test_one_load_asks_the_source_and_the_others_wait_until_it_has_the_files(service):
    agents = await _known_and_nowhere(service, 4)
    go = asyncio.Event()
    for agent in agents:
        agent.hold_loads = go
    await service.ensure(replicas=4)
    service.reconciler.run_pass()
    (first,) = await _begun(agents, 1)
    assert loads(agents)[first] == []
    await service.beat()
    assert service.reconciler.run_pass() == [], "the others wait"
    # It has downloaded and verified them, and its engine loads them: that is enough for the others.
    fetching = next(agent for agent in agents if agent.worker_id == first)
    fetching.disk[digest_of(SOURCE)] = False
    await service.beat()
    service.reconciler.run_pass()
    await _begun(agents, 4)
    assert {tuple(urls) for name, urls in loads(agents).items() if name != first} == {(fetching.url,)}
    go.set()
    await service.reconciler.wait_for_actions()


async def test_a_fetch_that_gets_no_byte_or_whose_worker_is_lost_is_taken_over_by_one_more(service, clock):
    agents = await _known_and_nowhere(service, 4)
    go = asyncio.Event()
    for agent in agents:
        agent.hold_loads = go
    await service.ensure(replicas=4)
    service.reconciler.run_pass()
    (first,) = await _begun(agents, 1)
    fetching = next(agent for agent in agents if agent.worker_id == first)

    async def progress(size_bytes: int):
        fetching.loading["sql/v1"] = {
            "lora_id": "sql/v1", "digest": digest_of(SOURCE), "engine_name": "", "state": "downloading",
            "location": "remote", "fetched_bytes": size_bytes,
        }  # fmt: skip
        await service.beat()
        return service.reconciler.run_pass()

    for size_bytes in (1, 2, 3):
        clock.now += STALLED_S - 1
        assert await progress(size_bytes) == [], "it moves, slowly"
    clock.now += STALLED_S
    (taken_over,) = await progress(3)
    assert taken_over.operation == "load"
    assert taken_over.neighbours == ()
    assert await progress(3) == [], "one more, and no herd"
    go.set()
    fetching.loading.clear()
    await service.reconciler.wait_for_actions()


async def test_a_new_version_of_the_store_that_knows_no_files_loads_all_the_same(service):
    """Agents of an older version report no files: every load may ask its source."""
    agents = [await service.worker(f"w{number}") for number in range(3)]
    await service.register(source=SOURCE, policy={"loading": "eager", "min_replicas": 3})
    await service.settle()
    assert len(loads(agents)) == 3


# --- copies ------------------------------------------------------------------------------------------------------


async def passes(service, count: int = 4) -> None:
    for _ in range(count):
        await service.turn()


def lose(service, worker_id: str):
    """Let neither the worker's agent nor its engine answer any longer; returns its double."""
    entry = service.reconciler.reports.workers[worker_id]
    transport = entry.report.transport.model_copy(update={"engine_url": NOBODY})
    silent = entry.view.reported.model_copy(update={"agent_url": NOBODY, "transport": transport})
    entry.view = with_place(entry.view, silent)
    return service.agents.pop(worker_id)


async def _uploaded(service, count: int = 4):
    """Workers, of which the first has the files of an adapter that nobody else has."""
    agents = await workers(service, count)
    agents[0].disk[OWN] = True
    await service.beat()
    await service.register(source=fleet_source(OWN), digest=OWN, base_model="tiny-qwen")
    await passes(service)
    return agents


def keepers(agents) -> list[str]:
    return [agent.worker_id for agent in agents if agent.disk.get(OWN)]


async def test_uploaded_bytes_are_kept_twice_and_a_lost_or_drained_keeper_is_replaced(service, clock):
    agents = await _uploaded(service)
    assert len(keepers(agents)) == 2
    item = await service.adapter()
    assert item["status"]["copies"] | {"held_by": []} == {
        "wanted": 2, "state": "kept", "kept_by": keepers(agents), "held_by": [], "reason": "",
    }  # fmt: skip
    second = next(agent for agent in agents[1:] if agent.disk.get(OWN))
    kept = next(body for verb, body in second.calls if verb == "mark_files")
    assert kept["neighbours"] == [agents[0].url]

    # Neither agent nor engine answers. For ten seconds it may be a restart.
    lose(service, "w0")
    assert len(keepers(agents[1:])) == 1
    clock.now += 9.0
    await service.turn()
    assert len(keepers(agents[1:])) == 1
    clock.now += 2.0
    await passes(service)
    assert len(keepers(agents[1:])) == 2

    answer = await service.http.post(f"/v1/workers/{second.worker_id}/drain", json={"deadline_s": 0})
    assert answer.is_success, answer.text
    await passes(service)
    others = [agent for agent in agents[1:] if agent is not second]
    assert len(keepers(others)) == 2
    worker = (await service.http.get(f"/v1/workers/{others[0].worker_id}")).json()
    assert worker["files"]["kept"] == 1


async def test_a_keeper_that_returns_is_one_too_many_and_is_released(service, clock):
    agents = await _uploaded(service)
    gone = lose(service, "w0")
    clock.now += 11.0
    await passes(service)
    assert len(keepers(agents)) == 3
    await service.join(gone)
    await passes(service)
    assert len(keepers(agents)) == 2
    assert any(verb == "mark_files" and body["mark"] == "held" for agent in agents for verb, body in agent.calls)


async def test_files_that_all_workers_have_lost_are_an_error_that_says_what_to_do(service):
    agents = await _uploaded(service)
    for agent in agents:
        agent.disk.clear()
    await service.beat()
    await service.turn()
    item = await service.adapter()
    assert item["status"]["state"] == "failed"
    assert item["status"]["error"].startswith("files_lost: ")
    assert "publish" in item["status"]["error"]
    assert item["status"]["copies"]["state"] == "lost"
    (entry,) = (await service.catalog())["adapters"]
    assert entry["error"].startswith("files_lost: ")
    page = (await service.http.get("/metrics")).text
    assert 'lorafleet_orchestrator_copies{state="lost"} 1.0' in page
    agents[3].disk[OWN] = False
    await passes(service)
    assert (await service.adapter())["status"]["state"] != "failed"
    assert len(keepers(agents)) == 2


async def test_one_that_leads_no_longer_reports_no_failed_adapters_lost_files_or_frozen_moves(service):
    """Alerts take the largest of all orchestrators: what a former leader last knew would never end."""
    agents = await _uploaded(service)
    for agent in agents:
        agent.disk.clear()
    await service.http.patch("/v1/policy", json={"storm_moves_per_worker": 0})
    await service.beat()
    await service.turn()
    reported = [
        "lorafleet_orchestrator_adapters_failed",
        "lorafleet_orchestrator_frozen",
        'lorafleet_orchestrator_copies{state="lost"}',
    ]
    page = (await service.http.get("/metrics")).text
    assert [name for name in reported if f"{name} 1.0" in page] == reported
    service.built.leadership.on_newer_leader("a test")
    service.reconciler.run_pass()
    page = (await service.http.get("/metrics")).text
    assert [name for name in reported if f"{name} 0.0" in page] == reported


async def test_the_files_of_a_deleted_adapter_are_dropped_and_those_of_an_unknown_one_stay(service):
    agents = await _uploaded(service)
    agents[3].disk["e" * 64] = True
    await service.http.delete("/v1/adapters/sql/v1")
    await passes(service)
    assert keepers(agents) == []
    assert agents[3].disk["e" * 64] is True


async def test_deleted_bytes_that_are_uploaded_again_are_not_dropped_before_they_are_registered(service):
    agents = await _uploaded(service)
    await service.http.delete("/v1/adapters/sql/v1")
    await passes(service)
    with service.reconciler.copies.arriving(OWN):
        agents[0].disk[OWN] = agents[1].disk[OWN] = True  # as an upload has just had them kept
        await passes(service)
        assert keepers(agents) == ["w0", "w1"]
    await passes(service)
    assert keepers(agents) == []  # nobody has registered them


async def test_a_worker_that_cannot_keep_a_copy_is_passed_over_for_a_while(service, clock):
    agents = await workers(service, 3)
    agents[0].disk[OWN] = True
    for agent in agents[1:]:
        agent.fail_calls = {1}
    await service.beat()
    await service.register(source=fleet_source(OWN), digest=OWN, base_model="tiny-qwen")
    await passes(service)
    item = await service.adapter()
    assert (item["status"]["copies"]["state"], item["status"]["copies"]["kept_by"]) == ("short", ["w0"])
    assert "2 copies are wanted" in item["status"]["copies"]["reason"]
    clock.now += 61
    await passes(service)
    assert len(keepers(agents)) == 2, "tried again when the failures have expired"


async def test_agents_learn_of_one_another_once_and_again_when_they_change(service, clock):
    agents = await workers(service, 2)

    async def beat(digest: str):
        body = agents[0].heartbeat() | {"agents_digest": digest}
        return (await service.http.post("/v1/workers/register", json=body)).json()

    clock.now += 2
    answer = await beat("")
    assert answer["agents"] == sorted(agent.url for agent in agents)
    again = await beat(answer["agents_digest"])
    assert again["agents"] is None
    await service.worker("w9")
    clock.now += 2
    assert len((await beat(answer["agents_digest"]))["agents"]) == 3
    assert again["files_seen"] == 0
