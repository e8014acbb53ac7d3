"""The record: exported by one fleet, imported by another, shown before it is done, and written as a plain file."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.intent.record import differences, fleet_record
from orchestrator.intent.record_file import RecordFile
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.record import ImportRequest
from orchestrator.store.store import IntentStore
from tests.orchestrator.doubles import digest_of
from tests.properties import examples
from tests.registered import registered

ELSEWHERE = "https://orchestrator.eu.example"


@pytest.fixture
def two_fleets(open_service, tmp_path):
    """A fleet to take over from, and one with a store of its own that may fetch from it."""
    return open_service(tmp_path / "there.db"), open_service(tmp_path / "here.db", peer_fleets=(ELSEWHERE,))


async def record_of(service):
    answer = await service.http.get("/v1/export")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def imported(service, record, *, dry_run=False, **ask):
    answer = await service.http.post("/v1/import", params={"dry_run": dry_run}, json={"record": record} | ask)
    assert answer.status_code == 200, answer.text
    return [(change["change"], change["subject"], change["name"]) for change in answer.json()["changes"]]


async def fill(service):
    """Two inspected adapters, an alias and a policy."""
    await service.worker()
    await service.register("sql/v1", policy={"priority": 3}, tenants=["acme"])
    await service.register("legal/v2")
    await service.settle()
    await service.http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "sql/v1"}], "place_s": 0})
    await service.http.patch("/v1/policy", json={"loading": "eager"})


async def test_a_record_is_shown_then_taken_over_and_a_second_import_does_nothing(two_fleets):
    there, here = two_fleets
    await fill(there)
    record = await record_of(there)
    wanted = [
        ("add", "adapter", "legal/v2"),
        ("add", "adapter", "sql/v1"),
        ("add", "alias", "sql"),
        ("change", "policy", ""),
    ]
    assert await imported(here, record, dry_run=True) == wanted
    assert (list(here.store.adapters), list(here.store.names)) == ([], []), "a dry run changes nothing"
    assert await imported(here, record) == wanted
    assert await imported(here, record) == []
    taken = await here.adapter("sql/v1")
    assert (taken["spec"]["source"], taken["spec"]["digest"]) == ("file:///sql/v1", digest_of("file:///sql/v1"))
    assert (taken["spec"]["policy"]["priority"], taken["spec"]["tenants"]) == (3, ["acme"])
    assert here.store.rules.loading == "eager"
    assert await imported(there, await record_of(here)) == []


async def test_adapters_taken_over_from_a_fleet_have_their_files_fetched_there_by_digest(two_fleets):
    there, here = two_fleets
    await fill(there)
    await there.register("hub/v1", source="hf://acme/hub")
    await there.register("uninspected/v1")
    await there.settle()
    record = await record_of(there)
    record["adapters"][-1]["digest"] = None
    changes = await imported(here, record, from_fleet=ELSEWHERE, keep_sources=True, parts=["adapters"])
    assert changes[-1] == ("blocked", "adapter", "uninspected/v1")
    digest = digest_of("file:///sql/v1")
    assert (await here.adapter("sql/v1"))["spec"]["source"] == f"fleet+{ELSEWHERE}/{digest}"
    assert (await here.adapter("hub/v1"))["spec"]["source"] == "hf://acme/hub"
    assert here.store.rules == PlacementPolicy(), "only the named parts are taken over"
    assert [kind for kind, *_ in await imported(here, record, from_fleet=ELSEWHERE, parts=["adapters"])] == ["blocked"]


async def test_only_the_fleets_in_the_settings_may_be_named(two_fleets):
    there, here = two_fleets
    record = await record_of(there)
    answer = await here.http.post("/v1/import", json={"record": record, "from_fleet": "https://else.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "fleet_unknown")
    answer = await here.http.get(f"/v1/files/{'0' * 64}", params={"fleet": "https://else.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "fleet_unknown")
    answer = await here.http.get(f"/v1/files/{'0' * 64}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "files_not_found")


async def test_other_bytes_under_a_name_block_the_adapter_and_its_alias_and_nothing_else(two_fleets):
    there, here = two_fleets
    await fill(there)
    await here.register("sql/v1", digest="f" * 64)
    changes = await imported(here, await record_of(there))
    assert changes == [
        ("add", "adapter", "legal/v2"),
        ("blocked", "adapter", "sql/v1"),
        ("blocked", "alias", "sql"),
        ("change", "policy", ""),
    ]
    assert (await here.adapter("sql/v1"))["spec"]["digest"] == "f" * 64


async def test_a_change_of_tenants_policy_and_targets_is_taken_over(two_fleets):
    there, here = two_fleets
    await fill(there)
    await imported(here, await record_of(there))
    await there.http.patch("/v1/adapters/sql/v1", json={"policy": {"priority": 9}, "tenants": ["beta"]})
    await there.http.put("/v1/aliases/sql", json={"targets": [{"lora_id": "legal/v2"}], "place_s": 0})
    assert await imported(here, await record_of(there)) == [("change", "adapter", "sql/v1"), ("change", "alias", "sql")]
    assert (await here.adapter("sql/v1"))["spec"]["tenants"] == ["beta"]
    assert await imported(here, await record_of(there)) == [], "also while the alias waits for its new targets"


async def test_a_record_of_another_version_changes_only_the_fields_that_both_versions_know(two_fleets):
    there, here = two_fleets
    await fill(there)
    await imported(here, await record_of(there))
    await here.http.patch("/v1/adapters/sql/v1", json={"policy": {"pinned": True}})
    await here.http.patch("/v1/policy", json={"reserve_slots": 1})
    record = await record_of(there)
    record["policy"] = {"loading": "lazy", "of_a_newer_version": 1}
    (sql,) = (adapter for adapter in record["adapters"] if adapter["lora_id"] == "sql/v1")
    sql["policy"] = {"priority": 5, "of_a_newer_version": 1}
    del sql["tenants"]
    assert await imported(here, record) == [("change", "adapter", "sql/v1"), ("change", "policy", "")]
    changed = await here.adapter("sql/v1")
    assert (changed["spec"]["policy"]["priority"], changed["spec"]["policy"]["pinned"], changed["spec"]["tenants"]) == (
        5,
        True,
        ["acme"],
    )
    assert (here.store.rules.loading, here.store.rules.reserve_slots) == ("lazy", 1)
    assert await imported(here, record) == []


@pytest.mark.parametrize(
    "record",
    [
        {"names": [{"name": "x", "targets": [{"lora_id": "a"}, {"lora_id": "a"}]}]},
        {"adapters": [{"lora_id": "a", "source": "file:///a", "secret_ref": {"name": "s", "key": "k"}}]},
        {"adapters": [{"lora_id": "a", "source": "file:///a"}, {"lora_id": "a", "source": "file:///b"}]},
        {"adapters": [{"lora_id": "../a", "source": "file:///a"}]},
    ],
)
async def test_a_record_that_no_fleet_writes_is_refused_whole(service, record):
    answer = await service.http.post("/v1/import", json={"record": record})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    assert list(service.store.adapters) == []


async def test_what_only_this_fleet_has_stays_unless_it_prunes(two_fleets):
    there, here = two_fleets
    await fill(there)
    await here.worker("other")
    await here.register("ours/v1")
    await here.http.put("/v1/aliases/ours", json={"targets": [{"lora_id": "ours/v1"}]})
    record = await record_of(there)
    await imported(here, record)
    assert "ours/v1" in here.store.adapters
    assert await imported(here, record, prune=True) == [("remove", "alias", "ours"), ("remove", "adapter", "ours/v1")]
    await here.settle()
    assert "ours/v1" not in here.store.adapters
    nothing = {"record": {"adapters": []}, "prune": True}
    assert (await here.http.post("/v1/import", json=nothing)).status_code == 400


async def test_import_and_the_deletions_of_a_prune_are_one_write_each(service):
    names = [f"a{number}" for number in range(9)]
    adapters = [{"lora_id": name, "source": f"file:///{name}"} for name in names]
    aliases = [{"name": f"to-{name}", "targets": [{"lora_id": name}]} for name in names]
    begin = service.store.writes
    assert len(await imported(service, {"adapters": adapters, "names": aliases})) == 18
    assert service.store.writes == begin + 1
    assert len(await imported(service, {"adapters": adapters[:1], "names": aliases[:1]}, prune=True)) == 16
    assert service.store.writes == begin + 2
    service.reconciler.finish_deletions()
    assert (service.store.writes, list(service.store.adapters)) == (begin + 3, ["a0"])


async def test_change_that_is_refused_leaves_the_other_changes_of_an_import_stored(service, tmp_path):
    await service.register("b", policy={"max_replicas": 2})
    adapters = [{"lora_id": name, "source": f"file:///{name}"} for name in "abc"]
    adapters[1] |= {"digest": "b" * 64, "policy": {"min_replicas": 3}}
    changes = await imported(service, {"adapters": adapters})
    assert changes == [("add", "adapter", "a"), ("blocked", "adapter", "b"), ("add", "adapter", "c")]
    stored = IntentStore(tmp_path / "store.db")
    assert (list(stored.adapters), stored.adapters["b"].digest) == (["a", "b", "c"], None)
    stored.close()


async def test_the_record_is_a_plain_file_that_follows_every_change(service, tmp_path):
    file = tmp_path / "record.json"
    record = RecordFile(file, service.store)
    await fill(service)
    assert await record.write_if_changed()
    assert not await record.write_if_changed()
    lines = file.read_text().splitlines()
    assert any('"lora_id": "sql/v1"' in line for line in lines), "one field a line"
    assert file.stat().st_mode & 0o777 == 0o600
    await service.http.patch("/v1/policy", json={"loading": "lazy"})
    assert await record.write_if_changed()
    assert await imported(service, json.loads(file.read_text()), dry_run=True) == []


async def publish(service, source, **spec):
    call = asyncio.create_task(service.http.post("/v1/published/policy", json={"source": source, **spec}))
    while not call.done():
        await service.turn()
        await asyncio.wait([call], timeout=0.01)
    assert call.result().status_code == 200, call.result().text


async def test_published_names_are_taken_over_with_their_versions_and_the_next_number(two_fleets):
    there, here = two_fleets
    for fleet in two_fleets:
        await fleet.worker("w0")
    for step in (1, 2):
        await publish(there, f"/run/step-{step}", keep_versions=3)
    record = await record_of(there)

    changes = await imported(here, record)

    assert changes.count(("add", "alias", "policy")) == 1, "its targets and its versions are one change"
    item = (await here.http.get("/v1/published/policy")).json()
    assert (item["status"]["lora_id"], item["spec"]["keep_versions"]) == ("policy/v2", 3)
    assert [version["lora_id"] for version in item["status"]["versions"]] == ["policy/v2", "policy/v1"]
    assert await imported(here, record) == []
    await publish(here, "/run/step-3")
    assert "policy/v3" in here.store.adapters
    gone = await imported(here, {"adapters": record["adapters"][:1], "names": []}, prune=True)
    assert gone.count(("remove", "alias", "policy")) == 1, "its alias goes with the name"
    assert (await here.http.get("/v1/published/policy")).status_code == 404


names = st.sampled_from(["a", "b", "c"])
digests = st.sampled_from([None, "d" * 64, "e" * 64])
adapters = st.builds(
    registered,
    lora_id=names,
    source=st.just("file:///x"),
    digest=digests,
    priority=st.integers(0, 2),
    tenants=st.sampled_from([None, (), ("acme",)]),
)
fleets = st.lists(adapters, max_size=3, unique_by=lambda adapter: adapter.lora_id)


@given(there=fleets, here=fleets)
@settings(max_examples=examples(60), deadline=None)
def test_two_equal_fleets_do_not_differ_and_every_difference_names_its_reason_or_fields(there, here):
    stores = IntentStore(":memory:"), IntentStore(":memory:")
    for store, held in zip(stores, (there, here), strict=True):
        with store.together():
            for adapter in held:
                store.put_adapter(adapter)
    ask = ImportRequest(record=fleet_record(stores[0]))
    found = differences(stores[1], ask)
    assert differences(stores[0], ask) == []
    assert all(change.fields or change.reason for change in found)
    differing = {change.name for change in found}
    ours = {adapter.lora_id: adapter for adapter in here}
    for adapter in there:
        same = ours.get(adapter.lora_id)
        is_met = same is not None and (same.policy.priority, same.tenants) == (adapter.policy.priority, adapter.tenants)
        is_met = is_met and (adapter.digest is None or same.digest == adapter.digest)
        assert is_met == (adapter.lora_id not in differing)
    for store in stores:
        store.close()
