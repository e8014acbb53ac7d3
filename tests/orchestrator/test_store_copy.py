"""A store copied from SQLite to PostgreSQL and back."""

import asyncio
import os
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from orchestrator.core.errors import StoreError
from orchestrator.core.lease import LeaseRecord
from orchestrator.leadership.file_lease import FileLease, lease_path
from orchestrator.model.ledger import UsageBatch, UsageKey, UsageQuery, UsageSums
from orchestrator.store.sqlite import SqliteBackend
from orchestrator.store.store import IntentStore
from orchestrator.store_copy import copy_store
from tests.orchestrator.postgres.instances import DatabaseStoreInstances
from tests.patience import patience
from tests.postgres import PASSWORD, postgres_server  # noqa: F401  (a fixture)
from tests.registered import registered

USAGE = UsageBatch(source="b0", number=1, rows={UsageKey(3600, "acme"): UsageSums(requests=3)})


@pytest.fixture
def file(tmp_path):
    """An SQLite store with an adapter, a deletion, history and an epoch."""
    path = tmp_path / "fleet.db"
    store = IntentStore(path)
    store.put_adapter(registered("a/v1", source="x", digest="d" * 64))
    store.put_adapter(registered("gone", source="x", digest="e" * 64))
    store.drop_adapter("gone")
    for number in range(3):
        store.record("load", f"a{number}")
    store.raise_epoch(41)
    store.close()
    backend = SqliteBackend(path)
    asyncio.run(backend.add_usage([USAGE], 7200.0))
    backend.close()
    return path


async def test_a_copy_to_postgresql_and_back_has_everything(file, tmp_path, postgres_server):  # noqa: F811
    address = postgres_server.new_schema()
    text = await copy_store(str(file), address)
    assert len(text.history) == 3
    instances = DatabaseStoreInstances(address)
    leader = await instances.lead()
    store = leader.store
    assert (list(store.adapters), store.tombstones, store.epoch) == (["a/v1"], {"gone": {"e" * 64}}, 43)
    store.record("load", "later")
    await store.wait_durable()
    assert [entry.subject for entry in store.history(limit=9)] == ["later", "a2", "a1", "a0"]
    await instances.close_all()

    back = tmp_path / "back.db"
    await copy_store(address, str(back))
    again = IntentStore(back)
    assert (list(again.adapters), again.tombstones, again.epoch) == (["a/v1"], {"gone": {"e" * 64}}, 43)
    backend = SqliteBackend(back)
    await backend.add_usage([USAGE], 7200.0)
    assert await backend.usage(UsageQuery(group_by=("tenant",))) == {UsageKey(tenant="acme"): UsageSums(requests=3)}
    backend.close()
    again.record("load", "last")
    assert [entry.subject for entry in again.history(limit=9)] == ["last", "later", "a2", "a1", "a0"]
    again.close()


async def test_a_target_that_is_not_empty_is_left_as_it_is(file, tmp_path, postgres_server):  # noqa: F811
    address = postgres_server.new_schema()
    await copy_store(str(file), address)
    with pytest.raises(StoreError, match="expected an empty one"):
        await copy_store(str(file), address)
    with pytest.raises(StoreError, match="name a new file"):
        await copy_store(address, str(file))
    with pytest.raises(StoreError, match="no such file"):
        await copy_store(str(tmp_path / "none.db"), postgres_server.new_schema())


async def test_a_source_on_which_an_orchestrator_leads_is_refused(file, tmp_path, postgres_server):  # noqa: F811
    address = postgres_server.new_schema()
    instances = DatabaseStoreInstances(address)
    leader = await instances.lead()
    copying = asyncio.create_task(copy_store(address, str(tmp_path / "copy.db")))
    while not copying.done():
        await leader.take_lease()  # a renewal
        await asyncio.sleep(0.05)
    with pytest.raises(StoreError, match="an orchestrator leads on the source"):
        await copying
    await instances.close_all()

    lease = FileLease(lease_path(file), holder="leader")
    assert await lease.write(LeaseRecord(holder="leader", url="http://leader", duration_s=0.2), None)
    copying = asyncio.create_task(copy_store(str(file), postgres_server.new_schema()))
    beat = 0
    while not copying.done():
        seen = await lease.read()
        beat += 1
        await lease.write(LeaseRecord(holder="leader", url="http://leader", duration_s=0.2, beat=beat), seen)
    with pytest.raises(StoreError, match="http://leader"):
        await copying
    lease.close()


async def test_the_command_says_what_it_copied_with_a_password_from_the_environment(file, postgres_server):  # noqa: F811
    parts = urlsplit(postgres_server.new_schema())
    address = parts._replace(netloc=f"{parts.username}@{parts.hostname}:{parts.port}").geturl()

    def run(**variables):
        words = [sys.executable, "-P", "-m", "orchestrator.store_copy", str(file), address]
        environment = os.environ | {"PGPASSFILE": "/dev/null"} | variables
        return subprocess.run(words, capture_output=True, text=True, timeout=patience(60), check=False, env=environment)

    refused = await asyncio.to_thread(run)
    assert refused.returncode == 2
    assert "PGPASSFILE" in refused.stderr
    done = await asyncio.to_thread(run, PGPASSWORD=PASSWORD)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 history entries" in done.stdout
