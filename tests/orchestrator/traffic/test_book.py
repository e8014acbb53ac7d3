"""Past traffic: sums that add up in any order, slices that outlive a restart, and what the routes say of them."""

import asyncio
import itertools
import math
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.keys.key_files import hash_key
from lorafleet.telemetry.histogram import LAST_BUCKET, bucket_of, percentile_s, upper_bound_s
from orchestrator.core.routers import RouterBook
from orchestrator.core.traffic import GRAINS, OTHER, GaugeSums, SeriesSums, bounded, grain_for
from orchestrator.model.usage import CountBatch, CountedRow, RequestCounts, UsageReport, sum_into
from orchestrator.traffic.book import TrafficBook
from orchestrator.traffic.file import TrafficFile
from tests.patience import patience
from tests.properties import examples

COUNTS = st.integers(0, 10**6)
BUCKETS = st.dictionaries(st.integers(0, LAST_BUCKET), st.integers(1, 1000), max_size=6)
COUNTED = st.builds(
    RequestCounts,
    requests=COUNTS,
    prompt_tokens=COUNTS,
    cached_tokens=COUNTS,
    waited_s=st.integers(0, 1000).map(float),
    codes=st.dictionaries(st.sampled_from(["429 saturated", "503 no_replica", "499"]), st.integers(1, 9)),
    first_token=BUCKETS,
)
SUMS = st.builds(
    SeriesSums,
    COUNTED,
    gauges=st.dictionaries(
        st.sampled_from(["running", "kv_usage"]),
        st.builds(GaugeSums, st.integers(1, 9), st.integers(0, 99).map(float), st.integers(0, 99).map(float)),
    ),
)


class Wall:
    """Wall-clock time that a test moves by hand."""

    def __init__(self):
        self.now = 1_800_000_000.0

    def __call__(self):
        return self.now


def added(parts):
    return sum_into(SeriesSums(), parts)


def row(**fields):
    named = {"adapter": "sql/v1", "base_model": "qwen", "worker": "w0", "tenant": "acme"}
    named |= {name: fields.pop(name) for name in CountedRow.__dataclass_fields__ if name in fields}
    return CountedRow(**named, counts=RequestCounts(**{"requests": 1} | fields))


def batch(number=1, *rows, age_s=0.0):
    return CountBatch(number=number, age_s=age_s, rows=rows or (row(),))


@pytest.fixture
def wall():
    return Wall()


@pytest.fixture
def opened(tmp_path, wall):
    made = []

    def make(path=tmp_path / "traffic.db", readings=list, most_bytes=2**26):
        made.append(TrafficBook(TrafficFile(path, most_bytes=most_bytes), readings=readings, wall=wall))
        return made[-1]

    yield make
    for book in made:
        book.close()


@settings(max_examples=examples(300))
@given(st.lists(SUMS, max_size=6), st.randoms(use_true_random=False))
def test_sums_are_the_same_in_any_order_and_grouping(parts, rng):
    shuffled, cut = parts.copy(), rng.randint(0, len(parts))
    rng.shuffle(shuffled)
    assert added([added(shuffled[:cut]), added(shuffled[cut:])]) == added(parts)


@settings(max_examples=examples(300))
@given(st.lists(st.floats(0.0011, 900), min_size=1, max_size=60), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_percentile_of_merged_histograms_is_within_a_fifth_of_the_true_one(durations, share):
    counts = {}
    for duration in durations:
        counts[bucket_of(duration)] = counts.get(bucket_of(duration), 0) + 1
    true = sorted(durations)[max(0, math.ceil(share * len(durations)) - 1)]
    assert true / 1.19 <= percentile_s(counts, share) <= true * 1.19


def test_every_duration_is_in_the_bucket_that_ends_at_or_above_it():
    for duration in (0.0, 0.001, 0.0010001, 0.25, 3.0, 59.9, 1000.0):
        assert duration <= upper_bound_s(bucket_of(duration)) <= max(0.001, duration * 1.19)
    assert bucket_of(1e9) == LAST_BUCKET
    assert percentile_s({}, 0.5) is None


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.sampled_from(["adapter", "key"]), st.integers(0, 30), SUMS), max_size=40), st.integers(2, 8)
)
def test_a_bounded_slice_loses_names_and_no_counts(rows, most):
    series = {(kind, f"n{number}"): sums for kind, number, sums in rows}
    kept = bounded(series, most)
    for kind in ("adapter", "key"):
        assert len([key for key in kept if key[0] == kind]) <= most
        before = added(sums for key, sums in series.items() if key[0] == kind)
        assert added(sums for key, sums in kept.items() if key[0] == kind) == before
        named = {key[1] for key in kept if key[0] == kind} - {OTHER}
        left_out = [sums.counts.requests for key, sums in series.items() if key[0] == kind and key[1] not in named]
        assert all(series[kind, name].counts.requests >= most_left for name in named for most_left in left_out)


def test_a_grain_is_the_finest_that_reaches_back_far_enough():
    assert [grain_for(range_s).step_s for range_s in (60, 900, 901, 6 * 3600, 24 * 3600, 10**9)] == [
        5, 5, 60, 60, 600, 600,
    ]  # fmt: skip
    for finer, coarser in itertools.pairwise(GRAINS):
        assert coarser.step_s % finer.step_s == 0
        assert coarser.kept_s > finer.kept_s


async def test_a_batch_counts_once_however_often_it_is_sent(opened):
    book = opened()
    routers = RouterBook()
    for boot_id, seq, requests in (("b0", 1, 5), ("b0", 2, 5), ("b0", 3, 5), ("b1", 1, 2)):  # it numbers anew
        batches = (batch(1, row(requests=requests)),)
        report = UsageReport(router_id="r0", boot_id=boot_id, seq=seq, revision_seen=1, batches=batches)
        book.add_batches(routers.record(report, 1.0).batches)
    assert {name: sums.counts.requests for name, sums in (await book.totals("adapter", 300)).items()} == {"sql/v1": 7}


async def test_a_row_counts_in_the_fleet_its_adapter_worker_tenant_and_key(opened):
    book = opened()
    book.add_batches(
        [
            batch(
                1,
                row(key="k1"),
                row(adapter="", requests=4),
                CountedRow(counts=RequestCounts(requests=2, codes={"401 x": 2})),
            )
        ]
    )
    for kind, expected in (
        ("fleet", {"": 7}),
        ("adapter", {"sql/v1": 1}),
        ("base", {"qwen": 4}),
        ("worker", {"w0": 5}),
        ("tenant", {"acme": 5, "": 2}),
        ("key", {"k1": 1}),
    ):
        assert {name: sums.counts.requests for name, sums in (await book.totals(kind, 300)).items()} == expected, kind


async def test_traffic_is_there_after_a_restart_and_goes_on_in_the_same_slices(opened, wall):
    first = opened()
    first.add_batches([batch(1, row(requests=3))])
    await first.write_closed()
    first.close()
    second = opened()
    second.add_batches([batch(2, row(requests=4))])
    for _ in range(3):  # every grain's slice closes
        wall.now += 700
        second.read_now()
        await second.write_closed()
    _, slices = await second.series("adapter", "sql/v1", 24 * 3600)
    assert [sums.counts.requests for sums in slices.values()] == [7]


async def test_a_late_batch_counts_in_the_slice_of_its_time(opened, wall):
    book = opened()
    book.add_batches([batch(1, row(requests=3))])
    start, wall.now = wall.now, wall.now + 200
    await book.write_closed()
    book.add_batches([batch(2, row(requests=4), age_s=200)])
    await book.write_closed()
    _, slices = await book.series("fleet", "", 600)
    assert {at: sums.counts.requests for at, sums in slices.items()} == {GRAINS[0].start_of(start): 7}


class SlowFile(TrafficFile):
    """A file whose first write waits for `may_write`."""

    def __init__(self, path):
        super().__init__(path, most_bytes=2**26)
        self.is_writing, self.may_write = threading.Event(), threading.Event()

    def write(self, grain, at, written):
        """Write, once that is allowed."""
        self.is_writing.set()
        assert self.may_write.wait(patience(30))
        super().write(grain, at, written)


async def test_what_comes_or_is_read_while_a_slice_is_written_loses_nothing(tmp_path, wall):
    file = SlowFile(tmp_path / "traffic.db")
    book = TrafficBook(file, readings=list, wall=wall)
    book.add_batches([batch(1, row(requests=5))])
    wall.now += 40
    writing = asyncio.create_task(book.write_closed())
    await asyncio.to_thread(file.is_writing.wait, patience(30))
    try:
        assert (await book.totals("fleet", 60.0))[""].counts.requests == 5
        assert sum(sums.counts.requests for sums in (await book.series("fleet", "", 60.0))[1].values()) == 5
        book.add_batches([batch(2, row(requests=2), age_s=40.0)])
    finally:
        file.may_write.set()
    await writing
    wall.now += 10
    for _ in range(2):
        assert (await book.totals("fleet", 120.0))[""].counts.requests == 7
        await book.write_closed()
        wall.now += 10
    book.close()


async def test_old_slices_go_and_the_file_stays_within_its_bytes(opened, wall, tmp_path):
    book = opened(most_bytes=2**20)
    for number in range(120):
        rows = [row(adapter=f"a{index}", first_token={index % 80: 1, 3: 2}) for index in range(100)]
        book.add_batches([batch(number, *rows)])
        wall.now += 60
        await book.write_closed()
    assert book.file.size_bytes() <= 2**20
    _, slices = await book.series("fleet", "", 24 * 3600)
    assert slices, "the coarse slices, which reach back furthest, are the last to go"
    fine = (await book.series("adapter", "a1", 300))[1]
    assert all(at > wall.now - 900 for at in fine)


def test_a_file_that_is_none_is_begun_anew(tmp_path, wall, opened):
    path = tmp_path / "traffic.db"
    path.write_bytes(b"not a database at all, and long enough to be read as one" * 50)
    book = opened(path)
    book.add_batches([batch()])
    book.close()
    assert path.read_bytes().startswith(b"SQLite format 3")


async def test_readings_are_kept_as_means(opened, wall):
    values = iter((1.0, 5.0))
    book = opened(readings=lambda: [(("worker", "w0"), "running", next(values))])
    book.read_now()
    book.read_now()
    _, slices = await book.series("worker", "w0", 300)
    (sums,) = slices.values()
    assert (sums.gauges["running"].mean, sums.gauges["running"].most) == (3.0, 5.0)


async def test_routers_are_shown_as_they_said(service, clock):
    for seq, more in enumerate(({}, {"is_last": True}), 1):
        report = {"router_id": "r0", "boot_id": "b0", "seq": seq, "revision_seen": 9, "now": {"waiting": {"acme": 2}}}
        assert (await service.http.post("/v1/usage", json=report | more)).status_code == 200
        clock.now += 2
        (shown,) = (await service.http.get("/v1/routers")).json()["data"]
        assert (shown["now"]["waiting"], shown["revision_seen"], shown["age_s"]) == ({"acme": 2}, 9, 2.0)
        assert shown["state"] == ("ended" if more else "live")


async def test_the_routes_say_rates_percentiles_and_hit_shares(service):
    report = {
        "router_id": "r0",
        "boot_id": "b0",
        "seq": 1,
        "revision_seen": 1,
        "now": {"policy": "kv_lora", "in_flight": 3, "waiting": {"acme": 2}, "circuits": {"w0": "open"}},
        "batches": [
            {
                "number": 1,
                "age_s": 20,
                "rows": [
                    {
                        "adapter": "sql/v1",
                        "base_model": "qwen",
                        "worker": "w0",
                        "tenant": "acme",
                        "key": "k1",
                        "counts": {
                            "requests": 10,
                            "prompt_tokens": 1000,
                            "predicted_tokens": 500,
                            "cached_tokens": 400,
                            "compared_tokens": 1000,
                            "lost_tokens": 30,
                            "sampled_tokens": 200,
                            "codes": {"429 saturated": 2, "502 engine": 1, "499": 1},
                            "first_token": {bucket_of(0.2): 9, bucket_of(2.0): 1},
                        },
                    }
                ],
            }
        ],
    }
    assert (await service.http.post("/v1/usage", json=report)).json()["accepted"]
    (row_,) = (await service.http.get("/v1/traffic/totals?kind=adapter&range_s=300")).json()["data"]
    assert (row_["name"], row_["requests"], row_["errors"], row_["refusals"]) == ("sql/v1", 10, 1, 2)
    assert (row_["hit_predicted"], row_["hit_real"], row_["hit_lost"]) == (0.5, 0.4, 0.15)
    assert 0.15 < row_["first_token_s"]["p50"] <= 0.24
    assert 1.6 < row_["first_token_s"]["p99"] <= 2.4
    series = (await service.http.get("/v1/traffic?kind=fleet&range_s=300")).json()
    columns = series["points"]
    assert {len(column) for name, column in columns.items() if isinstance(column, list)} == {len(columns["at"])}
    assert sum(rate for rate in columns["requests_per_s"] if rate) * series["step_s"] == pytest.approx(10)
    (router,) = (await service.http.get("/v1/routers")).json()["data"]
    assert (router["id"], router["state"], router["now"]["circuits"]) == ("r0", "live", {"w0": "open"})
    refused = await service.http.get("/v1/traffic?kind=none")
    assert refused.status_code == 400


async def test_the_live_stream_begins_with_the_fleet_now(service):
    await service.worker()
    asyncio.get_running_loop().call_soon(service.built.stop)  # else the stream goes on
    answer = await service.http.get("/v1/live")
    assert answer.text.startswith("event: now\ndata: {")
    assert '"ready":1' in answer.text


async def test_a_tenants_key_reads_its_own_traffic_and_nothing_of_others(open_service, tmp_path):
    path = tmp_path / "keys.yaml"
    entries = [("root", "admin", ""), ("acme", "view", "tenant: acme, "), ("globex", "view", "tenant: globex, ")]
    rows = [f"- {{sha256: {hash_key(key)}, {tenant}scopes: [{scope}]}}\n" for key, scope, tenant in entries]
    path.write_text("keys:\n" + "".join(rows))
    service = open_service(key_files=(path,))
    service.http.headers["authorization"] = "Bearer root"
    await service.register("acme/mine", tenants=["acme"])
    await service.register("shared/both", tenants=["acme", "globex"])
    used = [
        msgspec.to_builtins(
            row(adapter=name, tenant=tenant, key=hash_key(tenant)[:12], requests=3, lost_tokens=9, sampled_tokens=9)
        )
        for name, tenant in (("acme/mine", "acme"), ("shared/both", "globex"))
    ]
    report = {"router_id": "r0", "boot_id": "b0", "seq": 1, "revision_seen": 1}
    report |= {
        "batches": [{"number": 1, "rows": used}],
        "now": {"waiting": {"acme": 1, "globex": 2}, "paused": {"acme": 3, "globex": 4}},
    }
    assert (await service.http.post("/v1/usage", json=report)).status_code == 200
    service.http.headers["authorization"] = "Bearer acme"
    for kind, names in (
        ("adapter", ["acme/mine"]),
        ("tenant", ["acme"]),
        ("key", [hash_key("acme")[:12]]),
        ("worker", []),
        ("fleet", []),
        ("base", []),
    ):
        data = (await service.http.get(f"/v1/traffic/totals?kind={kind}")).json()["data"]
        assert [item["name"] for item in data] == names, kind
        # What others' caches hold of its prompts would tell it what they asked.
        assert all(item["hit_lost"] is None for item in data)
    for kind, name, status in (
        ("adapter", "acme/mine", 200),
        ("tenant", "acme", 200),
        ("adapter", "shared/both", 403),
        ("tenant", "globex", 403),
        ("fleet", "", 403),
        ("worker", "w0", 403),
    ):
        answer = await service.http.get("/v1/traffic", params={"kind": kind, "name": name})
        assert answer.status_code == status, (kind, name)
        assert status != 200 or answer.json()["total"]["hit_lost"] is None
    assert (await service.http.get("/v1/routers")).status_code == 403
    asyncio.get_running_loop().call_soon(service.built.stop)
    live = (await service.http.get("/v1/live")).text
    assert '"waiting":{"acme":1}' in live
    assert '"paused":{"acme":3}' in live
    assert "globex" not in live
