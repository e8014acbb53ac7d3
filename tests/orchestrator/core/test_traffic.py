"""Shares of traffic: an adapter's by worker and tenant, a worker's by adapter and tenant; bounded, and nothing lost."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.keys.key_files import hash_key
from lorafleet.telemetry.histogram import bucket_of
from orchestrator.core.traffic import (
    GRAINS,
    MOST_SHARES,
    OTHER,
    SHARED,
    TIMED,
    SeriesSums,
    TrafficSlice,
    count_shares,
)
from orchestrator.model.usage import CountedRow, RequestCounts, sum_into
from tests.orchestrator.traffic.test_book import Wall, batch, opened, row, wall  # noqa: F401  (its fixtures)
from tests.properties import examples

COUNTS = st.integers(0, 1000)
PARTS = st.builds(
    RequestCounts,
    requests=COUNTS,
    codes=st.dictionaries(st.sampled_from(["502 engine", "404 x"]), st.integers(1, 9)),
    cold_starts=COUNTS,
    first_token=st.dictionaries(st.integers(0, 9), st.integers(1, 9), max_size=3),
)


ROWS = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["", *"uvwxyz"]), PARTS), max_size=80)


def added(parts):
    return sum_into(RequestCounts(), parts)


def counted(rows):
    table = {}
    for adapter, worker, part in rows:
        count_shares(table, CountedRow(adapter=f"a{adapter}", worker=worker, tenant="acme", counts=part))
    return table


@settings(max_examples=examples(200))
@given(ROWS)
def test_shares_stay_bounded_and_lose_no_counts(rows):
    for (kind, name, by), shares in counted(rows).items():
        mine = [part for adapter, worker, part in rows if name in (f"a{adapter}", worker)]
        assert len(shares) <= 2 * MOST_SHARES[by] + 1
        whole = added(mine)
        if (kind, by) != TIMED:
            whole.first_token = {}
        assert added(shares.values()) == whole


@settings(max_examples=examples(200))
@given(st.dictionaries(st.integers(0, 200).map("a{}".format), PARTS, max_size=90))
def test_the_busiest_names_are_those_that_are_kept_apart(parts):
    held = TrafficSlice(
        {("worker", "w0"): SeriesSums(RequestCounts(requests=1))}, {("worker", "w0", "adapter"): dict(parts)}
    )
    (kept,) = held.bounded(10).shares.values()
    assert len(kept) <= MOST_SHARES["adapter"]
    left_out = [part.requests for name, part in parts.items() if name not in kept]
    assert all(kept[name].requests >= most for name in kept.keys() - {OTHER} for most in left_out)
    assert added(kept.values()) == added(parts.values())


@settings(max_examples=examples(100))
@given(ROWS)
def test_the_shares_of_a_bounded_slice_add_up_to_its_series(rows):
    held = TrafficSlice(shares=counted(rows))
    for adapter, worker, part in rows:
        held.series_of(("adapter", f"a{adapter}")).counts.requests += part.requests
        if worker:
            held.series_of(("worker", worker)).counts.requests += part.requests
    kept = held.bounded(3)
    assert len({name for kind, name in kept.series if kind == "adapter"}) <= 3
    for (kind, name, by), parts in kept.shares.items():
        assert len(parts) <= MOST_SHARES[by]
        assert sum(part.requests for part in parts.values()) == kept.series[kind, name].counts.requests


def used(worker="w0", **fields):
    return row(worker=worker, **fields)


async def test_an_adapter_is_divided_by_worker_and_tenant_and_a_worker_by_adapter_and_tenant(opened):  # noqa: F811
    book = opened()
    rows = [
        used("w0", requests=6, cold_starts=1, codes={"502 engine": 2}, first_token={bucket_of(0.2): 6}),
        used("w1", requests=2, tenant="globex", first_token={bucket_of(2.0): 2}),
        used("w1", adapter="legal/v1", requests=1),
        used("w1", adapter="", requests=4),
        used("", requests=3, codes={"404 x": 3}),
        CountedRow(counts=RequestCounts(requests=9, codes={"401 x": 9})),
    ]
    book.add_batches([batch(1, *rows)])
    found = {key: await book.shares(key, 300) for key in [("adapter", "sql/v1", "worker"), ("worker", "w1", "adapter")]}
    by_worker, by_adapter = found.values()
    assert {name: part.requests for name, part in by_worker.items()} == {"w0": 6, "w1": 2, "": 3}
    assert (by_worker["w0"].cold_starts, by_worker["w0"].errors) == (1, 2)
    assert {name: part.requests for name, part in by_adapter.items()} == {"sql/v1": 2, "legal/v1": 1, "": 4}
    by_tenant = await book.shares(("adapter", "sql/v1", "tenant"), 300)
    assert {name: part.requests for name, part in by_tenant.items()} == {"acme": 9, "globex": 2}
    assert {name: part.requests for name, part in (await book.shares(("worker", "w1", "tenant"), 300)).items()} == {
        "globex": 2,
        "acme": 5,
    }


async def test_shares_are_there_after_a_restart_and_go_on_in_the_same_slices(opened, wall):  # noqa: F811
    first = opened()
    first.add_batches([batch(1, used(requests=3))])
    first.close()
    second = opened()
    second.add_batches([batch(2, used(requests=4), used("w1"))])
    for _ in range(3):  # every grain's slice closes
        wall.now += 700
        second.read_now()
        await second.write_closed()
    for range_s in (3600, 24 * 3600):
        shares = await second.shares(("adapter", "sql/v1", "worker"), range_s)
        assert {name: part.requests for name, part in shares.items()} == {"w0": 7, "w1": 1}, range_s


async def test_old_shares_go_with_their_slices(opened, wall):  # noqa: F811
    book = opened()
    for number in range(5):
        book.add_batches([batch(number + 1, used(requests=3))])
        wall.now += 700
        await book.write_closed()
    wall.now += 3 * 86400
    await book.write_closed()
    assert await book.shares(("adapter", "sql/v1", "worker"), 48 * 3600) == {}
    began_at = Wall().now
    assert all(not book.file.read_slice(grain, grain.start_of(began_at)).shares for grain in GRAINS)


async def test_the_route_says_the_share_of_each_and_what_the_others_had(service):
    busy = [msgspec.to_builtins(used(f"w{number}", requests=100 - number)) for number in range(60)]
    report = {
        "router_id": "r0",
        "boot_id": "b0",
        "seq": 1,
        "revision_seen": 1,
        "batches": [{"number": 1, "rows": busy}],
    }
    assert (await service.http.post("/v1/usage", json=report)).json()["accepted"]
    answer = (await service.http.get("/v1/traffic/shares?name=sql/v1&by=worker&range_s=300")).json()
    names = [item["name"] for item in answer["data"]]
    assert names[0] == "w0"
    assert names[-1] == OTHER
    assert sum(item["share"] for item in answer["data"]) == pytest.approx(1, abs=0.001)
    refused = await service.http.get("/v1/traffic/shares?name=w0&kind=worker&by=worker")
    assert refused.status_code == 400
    for kind, by in SHARED:
        assert f"kind={kind} by={by}" in refused.json()["error"]["message"]


async def test_a_tenants_key_reads_the_workers_of_adapters_that_are_its_alone(open_service, tmp_path):
    path = tmp_path / "keys.yaml"
    entries = [("root", "admin", ""), ("acme", "view", "tenant: acme, ")]
    rows = [f"- {{sha256: {hash_key(key)}, {tenant}scopes: [{scope}]}}\n" for key, scope, tenant in entries]
    path.write_text("keys:\n" + "".join(rows))
    service = open_service(key_files=(path,))
    service.http.headers["authorization"] = "Bearer root"
    await service.register("acme/mine", tenants=["acme"])
    await service.register("shared/both", tenants=["acme", "globex"])
    service.http.headers["authorization"] = "Bearer acme"
    for kind, name, by, status in (
        ("adapter", "acme/mine", "worker", 200),
        ("adapter", "acme/mine", "tenant", 403),
        ("adapter", "shared/both", "worker", 403),
        ("adapter", "no/such", "worker", 403),
        ("worker", "w0", "adapter", 403),
    ):
        asked = {"kind": kind, "name": name, "by": by}
        assert (await service.http.get("/v1/traffic/shares", params=asked)).status_code == status, asked
