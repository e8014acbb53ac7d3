"""Leases on adapters in a shared cache folder."""

import json
import os

import pytest

from workers.storage import leases

LOOPBACK, REMOTE = "http://127.0.0.1:8000", "http://10.0.0.7:8000"


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / ("a" * 64)
    folder.mkdir()
    return folder


def lease_of(adapter, agent):
    return adapter / leases.USERS / agent


def take(adapter, agent, engine=REMOTE, *, at=None, outlives_s=0.0):
    leases.renew(adapter, agent, engine_url=engine, engine_outlives_s=outlives_s)
    if at is not None:
        os.utime(lease_of(adapter, agent), (at, at))


def test_an_unexpired_lease_of_another_agent_counts_and_ones_own_does_not(adapter):
    assert not leases.has_other_user(adapter, "ours", now=100.0, lease_s=10.0)
    take(adapter, "ours", at=100.0)
    assert not leases.has_other_user(adapter, "ours", now=100.0, lease_s=10.0)
    take(adapter, "theirs", at=90.0)
    assert leases.has_other_user(adapter, "ours", now=100.0, lease_s=10.0)
    assert not leases.has_other_user(adapter, "ours", now=100.5, lease_s=10.0)


def test_a_lease_lasts_longer_where_the_engine_outlives_its_agent(adapter):
    take(adapter, "theirs")
    taken = lease_of(adapter, "theirs").stat().st_mtime
    take(adapter, "theirs", outlives_s=3600)
    assert leases.has_other_user(adapter, "ours", now=taken + 3000, lease_s=10.0)


def test_a_lease_on_an_adapter_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        take(tmp_path / "gone", "ours")


def test_an_engine_that_lists_the_adapter_renews_its_expired_lease(adapter):
    take(adapter, "theirs", at=100.0)
    assert leases.engine_using(adapter, "ours", lambda url: {adapter.name} if url == REMOTE else ()) == REMOTE
    assert lease_of(adapter, "theirs").stat().st_mtime > 100.0
    assert leases.engine_using(adapter, "ours", lambda _: ()) == ""
    assert leases.engine_using(adapter, "theirs", lambda _: {adapter.name}) == ""


@pytest.mark.parametrize("content", [json.dumps({"engine": LOOPBACK, "host": "another"}), "{", "[]", "{}"])
def test_a_lease_without_an_engine_that_can_be_reached_asks_nobody(adapter, content):
    take(adapter, "theirs", LOOPBACK)
    lease_of(adapter, "theirs").write_text(content)
    asked = []
    assert leases.engine_using(adapter, "ours", lambda url: asked.append(url) or ()) == ""
    assert asked == []


def test_the_last_use_is_that_of_the_newest_lease(adapter):
    os.utime(adapter, (50.0, 50.0))
    assert leases.last_used_at(adapter) == 50.0
    take(adapter, "theirs", at=100.0)
    take(adapter, "ours", at=200.0)
    os.utime(adapter / leases.USERS, (60.0, 60.0))
    assert leases.last_used_at(adapter) == 200.0
