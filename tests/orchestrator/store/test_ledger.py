"""The ledger in each store: batches count once, whatever is lost, killed or fenced."""

import asyncio
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.configmaps.backend import ConfigMapBackend
from orchestrator.core.errors import OrchestratorError, OrchestratorRequestError, OrchestratorUnavailable, StateConflict
from orchestrator.core.ledger import router_batch
from orchestrator.model.ledger import PriceList, Prices, UsageBatch, UsageKey, UsageQuery, UsageSums
from orchestrator.store import ledger_rows
from orchestrator.store.ledger import Ledger
from orchestrator.store.sqlite import SqliteBackend
from orchestrator.store.store import IntentStore
from router.fleet.traffic import TrafficLog
from tests.orchestrator.postgres.instances import DatabaseStoreInstances
from tests.patience import within
from tests.postgres import postgres_server  # noqa: F401  (a fixture)
from tests.properties import examples

AT = 1_800_000_000.0
HOUR = 1_800_000_000
DAY_S = 86_400


def batch(number=1, source="b0", *, hour=HOUR, tenant="acme", key="k0", adapter="a/v1", **sums):
    rows = {UsageKey(hour, tenant, key, adapter, "d1", "qwen"): UsageSums(**sums or {"requests": 1})}
    return UsageBatch(source=source, number=number, rows=rows)


@pytest.fixture(params=["sqlite", "memory", "postgresql"])
async def backend(request, tmp_path):
    """A backend that leads."""
    if request.param != "postgresql":
        found = SqliteBackend(tmp_path / "s.db" if request.param == "sqlite" else ":memory:", usage_kept_days=30)
        await found.catch_up()
        yield found
        found.close()
        return
    instances = DatabaseStoreInstances(request.getfixturevalue("postgres_server").new_schema())
    yield (await instances.lead()).backend
    await instances.close_all()


async def requests(backend, **query):
    return sum(sums.requests for sums in (await backend.usage(UsageQuery(**query))).values())


async def test_batches_add_up_and_one_that_comes_again_adds_nothing(backend):
    second = batch(2, requests=3, slot_s=1.5, fetched_bytes=7)
    await backend.add_usage([batch(1, requests=2, prefill_s=0.5), second], AT)
    await backend.add_usage([second, batch(3, requests=10), batch(1, "b1", requests=100)], AT)
    found = await backend.usage(UsageQuery(group_by=("hour", "tenant", "key", "adapter", "version", "base_model")))
    sums = UsageSums(requests=115, prefill_s=0.5, slot_s=1.5, fetched_bytes=7)
    assert found == {UsageKey(HOUR, "acme", "k0", "a/v1", "d1", "qwen"): sums}


async def test_rows_are_grouped_and_filtered_by_any_field_and_by_whole_hours(backend):
    for number, (hour, tenant, adapter) in enumerate(
        [(HOUR, "acme", "a"), (HOUR, "acme", "b"), (HOUR + 3600, "acme", "a"), (HOUR + 3600, "globex", "a")]
    ):
        await backend.add_usage([batch(number, hour=hour, tenant=tenant, adapter=adapter, requests=10**number)], AT)
    by_tenant = await backend.usage(UsageQuery(group_by=("tenant",)))
    assert {key.tenant: sums.requests for key, sums in by_tenant.items()} == {"acme": 111, "globex": 1000}
    by_hour = await backend.usage(UsageQuery(group_by=("hour", "adapter"), tenant="acme"))
    assert {(key.hour - HOUR, key.adapter): sums.requests for key, sums in by_hour.items()} == {
        (0, "a"): 1,
        (0, "b"): 10,
        (3600, "a"): 100,
    }
    assert await requests(backend, since=HOUR + 1.0) == 1100
    assert await requests(backend, since=HOUR, until=HOUR + 3600.0) == 11
    assert await requests(backend, key="k0", adapter="b", base_model="qwen") == 10
    assert await backend.usage(UsageQuery(tenant="nobody")) == {}


async def test_rows_that_are_too_old_go_and_numbers_of_sources_that_may_still_live_stay(backend):
    await backend.add_usage([batch(5, hour=HOUR)], AT)
    later = AT + 29 * DAY_S
    await backend.add_usage([batch(1, "b1", hour=HOUR + 29 * DAY_S), batch(5, "b0")], later)
    assert await requests(backend) == 2
    await backend.add_usage([batch(2, "b1", hour=HOUR + 500 * DAY_S)], AT + 500 * DAY_S)
    assert await requests(backend) == 1


async def test_too_many_rows_are_refused_with_what_to_ask_instead(backend, monkeypatch):
    monkeypatch.setattr(ledger_rows, "MOST_GROUPS", 2)
    await backend.add_usage([batch(number, adapter=f"a{number}") for number in range(3)], AT)
    with pytest.raises(OrchestratorRequestError, match="shorter range"):
        await backend.usage(UsageQuery(group_by=("adapter",)))


@pytest.mark.parametrize("prices", [None, PriceList(currency="EUR", default=Prices(per_engine_second=1))])
async def test_pages_have_each_group_once_with_its_sums_and_cost(backend, prices):
    for number, hour in enumerate((HOUR, HOUR, HOUR + 3600, HOUR - 3600)):
        for adapter in ("b", "a", "Z", "é"):
            await backend.add_usage([batch(number, adapter, hour=hour, adapter=adapter, prefill_s=2.0**number)], AT)
    ledger = Ledger(backend)
    for group_by in (("hour", "adapter"), ("adapter",), ("hour",), ()):
        query = UsageQuery(group_by=group_by)
        whole = await ledger.rows(query)
        for limit in (1, 3, 100):
            page = await ledger.page(query, limit, prices)
            rows, costs = [*page.rows.items()], {**page.costs}
            while page.last is not None:
                page = await ledger.page(replace(query, after=page.last), limit, prices)
                assert 0 < len(page.rows) <= limit
                rows += page.rows.items()
                costs |= page.costs
            assert rows == list(whole.items())
            assert costs == ({} if prices is None else {key: sums.prefill_s for key, sums in rows})


async def test_a_backend_whose_term_is_over_adds_nothing(backend):
    await backend.add_usage([batch(1)], AT)
    backend.end_term()
    with pytest.raises(OrchestratorUnavailable) as caught:
        await backend.add_usage([batch(2)], AT)
    assert caught.value.code == "not_leading"
    assert await requests(backend) == 1


async def test_a_leader_in_sqlite_that_another_one_has_followed_adds_nothing(tmp_path):
    old = SqliteBackend(tmp_path / "s.db")
    await old.catch_up()
    store = IntentStore(old)
    store.raise_epoch(5)
    new = IntentStore(tmp_path / "s.db")
    new.raise_epoch(6)
    with pytest.raises(OrchestratorUnavailable) as caught:
        await old.add_usage([batch(1)], AT)
    assert caught.value.code == "not_leading"
    assert await requests(old) == 0
    old.close()
    new.close()


async def test_a_leader_in_postgresql_whose_lease_was_taken_adds_nothing(postgres_server):  # noqa: F811
    instances = DatabaseStoreInstances(postgres_server.new_schema())
    old = await instances.lead()
    await old.backend.add_usage([batch(1)], AT)
    new = await instances.lead()
    with pytest.raises(OrchestratorUnavailable) as caught:
        await old.backend.add_usage([batch(2)], AT)
    assert caught.value.code == "not_leading"
    await new.backend.add_usage([batch(1), batch(2)], AT)
    assert await requests(new.backend) == 2
    await instances.close_all()


async def test_connections_that_break_at_any_moment_count_nothing_twice(postgres_server):  # noqa: F811
    instances = DatabaseStoreInstances(postgres_server.new_schema())
    leader = await instances.lead()
    for number in range(30):
        adding = asyncio.create_task(leader.backend.add_usage([batch(number)], AT))
        for _ in range(number):
            await asyncio.sleep(0)  # so many turns of the loop: before, within or after the transaction
        leader.session.close()
        await asyncio.gather(adding, return_exceptions=True)
        while True:  # as a router that sends it again until it is accepted
            try:
                await leader.backend.add_usage([batch(number)], AT)
                break
            except OrchestratorError:
                await asyncio.sleep(0)
    assert await requests(leader.backend) == 30
    await instances.close_all()


class SlowBackend(SqliteBackend):
    """A backend in memory that takes batches when it is let."""

    def __init__(self):
        super().__init__(":memory:")
        self.may_go = asyncio.Event()
        self.transactions = 0

    async def add_usage(self, batches, now):
        await self.may_go.wait()
        self.transactions += 1
        await super().add_usage(batches, now)


async def test_reports_that_come_together_are_one_transaction_and_are_answered_after_it():
    backend = SlowBackend()
    ledger = Ledger(backend, wall=lambda: AT)
    first = asyncio.create_task(ledger.add([batch(1)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    others = [asyncio.create_task(ledger.add([batch(1, f"b{number}")])) for number in range(1, 5)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in (first, *others))
    backend.may_go.set()
    async with within(10):
        await asyncio.gather(first, *others)
    assert (backend.transactions, await requests(backend)) == (2, 5)
    await ledger.close()
    backend.close()


async def test_an_error_of_the_store_is_answered_and_the_batch_counts_once_when_it_comes_again(tmp_path):
    backend = SqliteBackend(tmp_path / "s.db")
    ledger = Ledger(backend, wall=lambda: AT)
    await backend.catch_up()
    backend.end_term()
    with pytest.raises(OrchestratorUnavailable):
        await ledger.add([batch(1)])
    await backend.catch_up()
    for _ in range(2):
        await ledger.add([batch(1)])
    assert await requests(backend, tenant="acme", key="k0") == 1
    await ledger.close()
    backend.close()


async def test_a_store_without_a_ledger_drops_what_it_is_given_and_says_so():
    backend = ConfigMapBackend(None, namespace="n", fleet="f", on_undone=lambda: None)
    await Ledger(backend).add([batch(1)])
    with pytest.raises(StateConflict) as caught:
        await backend.usage(UsageQuery())
    assert caught.value.code == "no_ledger"


BUDGETS = ("day k0", "month k0", "day k1", "month tenant acme", "day tenant other", "year k0", "day")


async def spent(ledger, epoch=1, names=BUDGETS):
    """budget -> (tokens, engine-seconds) that the ledger tells."""
    found = await ledger.spent(names, epoch)
    return {name: (each.tokens, each.engine_s) for name, each in found.accounts.items()}


async def test_what_was_spent_is_what_the_ledger_holds_of_the_present_day_and_month(backend):
    now = [AT]
    ledger = Ledger(backend, wall=lambda: now[0])
    day_before = HOUR - DAY_S
    await ledger.add([batch(1, hour=day_before, prompt_tokens=5), batch(2, hour=HOUR - 40 * DAY_S, prompt_tokens=1000)])
    assert await spent(ledger) == {"month k0": (5, 0.0), "month tenant acme": (5, 0.0)}
    await ledger.add([batch(3, prompt_tokens=1, cached_tokens=1, completion_tokens=2, prefill_s=0.5, decode_s=0.25)])
    await ledger.add([batch(3, prompt_tokens=1), batch(1, "b1", key="k1", completion_tokens=7)])
    whole = {"day k0": (3, 0.75), "month k0": (8, 0.75), "day k1": (7, 0.0), "month tenant acme": (15, 0.75)}
    assert await spent(ledger) == whole
    assert await spent(Ledger(backend, wall=lambda: now[0])) == whole, "by an orchestrator that has just started"
    now[0] += DAY_S
    month = {name: each for name, each in whole.items() if name.startswith("month")}
    assert await spent(ledger) == month
    await ledger.add([batch(4, hour=HOUR + DAY_S, prompt_tokens=100), batch(5, prompt_tokens=1)])  # one comes late
    assert await spent(ledger) == {
        "day k0": (100, 0.0),
        "month k0": (109, 0.75),
        "month tenant acme": (116, 0.75),
    }
    now[0] += 31 * DAY_S
    assert await spent(ledger) == {}
    assert len(ledger._spent.by_span) == 2
    assert await ledger.spent((), 1) is None
    await ledger.close()


async def test_what_was_spent_is_read_anew_in_a_new_term_and_after_a_fault(tmp_path):
    backends = [SqliteBackend(tmp_path / "s.db") for _ in range(2)]
    old, new = (Ledger(backend, wall=lambda: AT) for backend in backends)
    await backends[0].catch_up()
    IntentStore(backends[0]).raise_epoch(5)
    await old.add([batch(1, prompt_tokens=1)])
    assert await spent(old, names=["day k0"]) == {"day k0": (1, 0.0)}
    await backends[1].catch_up()
    IntentStore(backends[1]).raise_epoch(6)
    await new.add([batch(2, prompt_tokens=10)])
    with pytest.raises(OrchestratorUnavailable):
        await old.add([batch(2, prompt_tokens=10)])
    assert await spent(old, names=["day k0"]) == {"day k0": (11, 0.0)}, "after a fault"
    await new.add([batch(3, prompt_tokens=100)])
    assert await spent(old, 2, names=["day k0"]) == {"day k0": (111, 0.0)}, "in a new term"
    for ledger, backend in zip((old, new), backends, strict=True):
        await ledger.close()
        backend.close()


async def test_what_many_keys_have_spent_is_read_by_pages(backend, monkeypatch):
    monkeypatch.setattr("orchestrator.store.ledger._PAGE_GROUPS", 2)
    rows = [batch(at, key=f"k{at}", tenant=f"t{at % 2}", prompt_tokens=1) for at in range(5)]
    await backend.add_usage(rows, AT)
    names = [f"day k{at}" for at in range(5)] + ["day tenant t0"]
    found = await spent(Ledger(backend, wall=lambda: AT), names=names)
    assert found == dict.fromkeys(names, (1, 0.0)) | {"day tenant t0": (3, 0.0)}


class Crash(Exception):
    """The orchestrator is killed in the middle of a transaction."""


class KillableBackend(SqliteBackend):
    """A backend that can be killed before its next commit."""

    is_to_die = False

    @contextmanager
    def _transaction(self):
        with super()._transaction():
            yield
            if self.is_to_die:
                raise Crash


class LedgerModel:
    """Two routers, and orchestrators that lead one after another on one SQLite file.

    delivered  (router's boot id, batch number) -> requests, of batches that a transaction has committed
    """

    def __init__(self, path):
        self.path = path
        self.now = AT
        self.epoch = 0
        self.leaders = []
        self.routers = [self.new_router(), self.new_router()]
        self.delivered = {}
        self.counted = self.lost = 0
        self.change_leader()

    def new_router(self):
        return TrafficLog("r", offset_s=0.0)

    def change_leader(self):
        """Begin a term in another process; the one before does not know of it yet."""
        backend = KillableBackend(self.path)
        asyncio.run(backend.catch_up())
        store = IntentStore(backend)
        self.epoch += 1
        store.raise_epoch(self.epoch)
        self.leaders.append(backend)

    def count(self, router, requests):
        self.now += 1.0
        self.routers[router].counts_of(self.now, adapter="a/v1", key=f"k{router}").requests += requests
        self.counted += requests

    def send(self, router, how):
        """Send a report, as `how` says; the router drops what it knows to be accepted."""
        self.now += 1.0
        log = self.routers[router]
        batches = log.batches(self.now)
        if how == "request lost":
            return
        backend = self.leaders[0 if how == "old leader" else -1]
        usage = [router_batch(log.boot_id, each, self.now) for each in batches]
        backend.is_to_die = how == "crash"
        try:
            asyncio.run(backend.add_usage(usage, self.now))
        except OrchestratorUnavailable:
            return
        except Crash:
            self.leaders.remove(backend)
            backend.close()
            self.change_leader()
            return
        for each in batches:
            self.delivered[log.boot_id, each.number] = sum(row.counts.requests for row in each.rows)
        if how != "answer lost":
            log.accept(batches)

    def restart(self, router):
        """Kill a router: what was not delivered is lost."""
        log = self.routers[router]
        log.batches(self.now)
        held = sum(
            counts.requests
            for number, each in log._sent.items()
            if (log.boot_id, number) not in self.delivered
            for counts in each.rows.values()
        )
        self.lost += held + sum(counts.requests for each in log._unsent for counts in each.rows.values())
        self.routers[router] = self.new_router()

    def close(self):
        for backend in self.leaders:
            backend.close()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("count"), st.integers(0, 1), st.integers(1, 9)),
        st.tuples(
            st.just("send"),
            st.integers(0, 1),
            st.sampled_from(["accepted", "answer lost", "request lost", "old leader", "crash"]),
        ),
        st.tuples(st.just("restart"), st.integers(0, 1)),
        st.tuples(st.just("change_leader")),
    ),
    min_size=3,
    max_size=20,
)


@settings(max_examples=examples(150), deadline=None)
@given(STEPS)
def test_sums_are_what_was_accepted_once_whatever_is_lost_killed_or_fenced(steps):
    with tempfile.TemporaryDirectory() as folder:
        model = LedgerModel(Path(folder) / "s.db")
        for name, *arguments in steps:
            getattr(model, name)(*arguments)
        backend = model.leaders[-1]
        found = asyncio.run(requests(backend))
        assert found == sum(model.delivered.values())
        for router in range(2):
            while model.routers[router].batches(model.now):
                model.send(router, "accepted")
        found = asyncio.run(requests(backend))
        assert found == sum(model.delivered.values()) == model.counted - model.lost
        model.close()
