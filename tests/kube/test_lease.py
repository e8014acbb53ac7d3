"""The Kubernetes lease: its content, concurrent writes, and competing orchestrators."""

import asyncio
import contextlib
import json
from dataclasses import replace

import pytest

from lorafleet.kube.client import connect
from orchestrator.core.errors import LeaseUnreachable
from orchestrator.core.lease import LeaseRecord
from orchestrator.leadership.kube_lease import ANNOTATION, KubeLease, record_in_lease
from orchestrator.leadership.leadership import Leadership
from tests.patience import patience, until, within

NAME = "lorafleet"
HOLD = LeaseRecord(holder="a", url="http://a:8080", duration_s=1.5)
# A leader that a busy machine keeps from renewing in time is no fault of ours.
DURATION_S, RENEW_S, MARGIN_S = patience(0.4), 0.2, 0.2
NEVER_S = patience(1000)


class CountingKubeLease(KubeLease):
    """`looks`: how often it was looked at."""

    looks = 0

    async def read(self):
        self.looks += 1
        return await super().read()


@pytest.fixture
async def api(kube):
    client = await connect(kube.kubeconfig, environ={})
    yield client
    await client.close()


@pytest.fixture
def lease(api, kube):
    return lambda: CountingKubeLease(api, namespace=kube.namespace, name=NAME, timeout_s=patience(0.2))


def path(kube):
    return f"/apis/coordination.k8s.io/v1/namespaces/{kube.namespace}/leases/{NAME}"


async def test_a_lease_shows_people_and_tools_the_same_record(api, kube, lease):
    it = lease()
    assert await it.read() is None
    assert await it.write(HOLD, None)
    assert await it.read() == HOLD
    spec = (await api.get(path(kube)))["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("a", 2, 0)
    assert spec["acquireTime"] == spec["renewTime"]
    assert await it.write(replace(HOLD, beat=1), HOLD)
    renewed = (await api.get(path(kube)))["spec"]
    assert renewed["acquireTime"] == spec["acquireTime"]
    assert renewed["renewTime"] > spec["renewTime"]
    other = LeaseRecord(holder="b", url="http://b", beat=2, duration_s=1.5)
    await it.read()
    assert await it.write(other, replace(HOLD, beat=1))
    taken = (await api.get(path(kube)))["spec"]
    assert (taken["holderIdentity"], taken["leaseTransitions"]) == ("b", 1)
    assert taken["acquireTime"] > spec["acquireTime"]
    await it.read()
    assert await it.write(replace(other, beat=3, is_released=True), other)
    assert (await api.get(path(kube)))["spec"]["holderIdentity"] == ""
    assert (await it.read()).is_released


async def test_a_lease_changes_only_from_its_last_read_state(lease, api, kube):
    a, b = lease(), lease()
    assert (await a.read(), await b.read()) == (None, None)
    assert await a.write(HOLD, None)
    assert not await b.write(LeaseRecord(holder="b", url="", duration_s=5.0), None)
    assert await b.read() == HOLD
    assert await b.write(LeaseRecord(holder="b", url="", duration_s=5.0, beat=1), HOLD)
    assert not await a.write(replace(HOLD, beat=1), HOLD)
    await b.read()
    await api.delete(path(kube))
    assert not await b.write(LeaseRecord(holder="b", url="", duration_s=5.0, beat=2), await b.read() or HOLD)
    assert await b.read() is None


async def test_only_one_of_many_concurrent_creators_gets_the_lease(lease):
    them = [lease() for _ in range(8)]
    await asyncio.gather(*(it.read() for it in them))
    won = await asyncio.gather(*(it.write(replace(HOLD, holder=str(n)), None) for n, it in enumerate(them)))
    assert won.count(True) == 1
    assert (await them[0].read()).holder == str(won.index(True))


async def test_foreign_fields_in_a_lease_stay_and_are_no_renewal(lease, api, kube):
    it = lease()
    await it.read()
    await it.write(HOLD, None)
    await api.patch(path(kube), {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "x"}}})
    assert await it.read() == HOLD
    assert await it.write(replace(HOLD, beat=1), HOLD)
    metadata = (await api.get(path(kube)))["metadata"]
    assert (metadata["labels"], metadata["annotations"]["note"]) == ({"team": "a"}, "x")


@pytest.mark.parametrize("note", ["", "no json", "[]", json.dumps({"url": 7, "beat": "x", "duration_s": -1})])
def test_a_lease_written_by_a_foreign_holder_is_respected(note):
    found = {
        "metadata": {"annotations": {ANNOTATION: note}},
        "spec": {"holderIdentity": "x", "leaseDurationSeconds": 15},
    }
    assert record_in_lease(found) == LeaseRecord(holder="x", url="", duration_s=15.0)
    assert record_in_lease({"metadata": {}}).is_released


async def test_an_api_server_error_makes_the_lease_unreachable(lease, kube):
    it = lease()
    await it.read()
    kube.faults.refuse(503)
    with pytest.raises(LeaseUnreachable, match=f"Lease {kube.namespace}/lorafleet: .*503"):
        await it.read()
    with pytest.raises(LeaseUnreachable, match="503"):
        await it.write(HOLD, None)
    kube.faults.refuse(None)
    kube.faults.freeze()
    with pytest.raises(LeaseUnreachable, match="no answer"):
        await it.read()
    kube.faults.thaw()


class LeaseContest:
    """Leaderships that run on one Lease. `leads` waits until it is this one alone."""

    def __init__(self, lease):
        self._lease = lease
        self._all, self._leases = {}, {}
        self._changed = asyncio.Event()

    def start(self, name, *, duration_s=DURATION_S):
        lease = self._leases[name] = self._lease()
        it = Leadership(
            lease,
            lambda: self,
            holder=name,
            url=f"http://{name}",
            duration_s=duration_s,
            renew_s=RENEW_S,
            margin_s=MARGIN_S,
        )
        self._all[name] = it, asyncio.create_task(it.run())
        return it

    async def prepare_term(self):
        pass

    def begin_term(self):
        self._changed.set()

    def end_term(self):
        self._changed.set()

    async def kill(self, name):
        _, task = self._all.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def look(self, times):
        """Waits until each has looked so many times more."""
        before = {name: self._leases[name].looks for name in self._all}
        await until(lambda: all(self._leases[name].looks >= seen + times for name, seen in before.items()))

    def leading(self):
        return {name for name, (it, _) in self._all.items() if it.is_leading}

    async def leads(self, *names):
        async with within(10):
            while self.leading() != set(names):
                assert len(self.leading()) <= 1
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await self._changed.wait()

    async def stop(self):
        for name in list(self._all):
            await self.kill(name)


@pytest.fixture
async def candidates(lease):
    them = LeaseContest(lease)
    yield them
    await them.stop()


async def test_a_standby_takes_over_from_a_dead_leader(candidates):
    candidates.start("a")
    await candidates.leads("a")
    b = candidates.start("b")
    await until(lambda: b.leader_url == "http://a")
    await candidates.kill("a")
    await candidates.leads("b")


async def test_a_released_lease_is_taken_at_the_next_check(candidates, lease):
    there = lease()
    await there.read()
    await there.write(replace(HOLD, is_released=True), None)
    a = candidates.start("a", duration_s=NEVER_S)
    await candidates.leads("a")
    b = candidates.start("b", duration_s=NEVER_S)
    await until(lambda: b.leader_url == "http://a")
    await candidates.kill("a")
    await a.release()
    await candidates.leads("b")


async def test_no_process_leads_while_the_api_server_is_away(candidates, kube):
    candidates.start("a")
    await candidates.leads("a")
    b = candidates.start("b")
    await until(lambda: b.leader_url == "http://a")
    await kube.faults.go_down()
    await candidates.leads()
    await candidates.look(3)
    assert candidates.leading() == set()
    assert b.leader_url == "http://a"  # the last that was heard of: it refuses calls itself
    await kube.faults.come_back()
    await until(candidates.leading)
    assert len(candidates.leading()) == 1


async def test_a_leader_stops_when_the_api_server_freezes(candidates, kube):
    candidates.start("a")
    await candidates.leads("a")
    kube.faults.freeze()
    await candidates.leads()
    kube.faults.thaw()
    await candidates.leads("a")


async def test_a_deleted_lease_is_created_again_by_its_holder(candidates, api, kube):
    candidates.start("a")
    await candidates.leads("a")
    candidates.start("b")
    uid = (await api.get(path(kube)))["metadata"]["uid"]
    await api.delete(path(kube))
    async with within(5):
        while True:
            with contextlib.suppress(Exception):
                if (await api.get(path(kube)))["metadata"]["uid"] != uid:
                    break
            assert candidates.leading() <= {"a"}
            await asyncio.sleep(0.02)
    await candidates.leads("a")
