"""The lease as a Lease: what stands in it, who may change it, and two orchestrators that compete for it."""

import asyncio
import contextlib
import json
from dataclasses import replace

import pytest

from lorafleet.kube.client import connect
from orchestrator.core.errors import LeaseUnreachable
from orchestrator.core.lease import Hold
from orchestrator.kube_lease import ANNOTATION, KubeLease, hold_of
from orchestrator.leadership import Leadership
from tests.patience import within

NAME = "lorafleet"
HOLD = Hold(holder="a", url="http://a:8080", duration_s=1.5)
DURATION_S, RENEW_S, MARGIN_S = 1.0, 0.2, 0.2


@pytest.fixture
async def api(kube):
    client = await connect(kube.kubeconfig, environ={})
    yield client
    await client.close()


@pytest.fixture
def lease(api, kube):
    return lambda: KubeLease(api, namespace=kube.namespace, name=NAME, timeout_s=0.4)


def path(kube):
    return f"/apis/coordination.k8s.io/v1/namespaces/{kube.namespace}/leases/{NAME}"


async def test_a_lease_says_to_people_and_tools_what_it_says_to_us(api, kube, lease):
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
    other = Hold(holder="b", url="http://b", beat=2, duration_s=1.5)
    await it.read()
    assert await it.write(other, replace(HOLD, beat=1))
    taken = (await api.get(path(kube)))["spec"]
    assert (taken["holderIdentity"], taken["leaseTransitions"]) == ("b", 1)
    assert taken["acquireTime"] > spec["acquireTime"]
    await it.read()
    assert await it.write(replace(other, beat=3, is_released=True), other)
    assert (await api.get(path(kube)))["spec"]["holderIdentity"] == ""
    assert (await it.read()).is_released


async def test_a_lease_changes_only_by_whoever_saw_its_last_state(lease, api, kube):
    a, b = lease(), lease()
    assert (await a.read(), await b.read()) == (None, None)
    assert await a.write(HOLD, None)
    assert not await b.write(Hold(holder="b", url="", duration_s=5.0), None)
    assert await b.read() == HOLD
    assert await b.write(Hold(holder="b", url="", duration_s=5.0, beat=1), HOLD)
    assert not await a.write(replace(HOLD, beat=1), HOLD)
    await b.read()
    await api.delete(path(kube))
    assert not await b.write(Hold(holder="b", url="", duration_s=5.0, beat=2), await b.read() or HOLD)
    assert await b.read() is None


async def test_of_many_who_make_it_at_once_one_does(lease):
    them = [lease() for _ in range(8)]
    await asyncio.gather(*(it.read() for it in them))
    won = await asyncio.gather(*(it.write(replace(HOLD, holder=str(n)), None) for n, it in enumerate(them)))
    assert won.count(True) == 1
    assert (await them[0].read()).holder == str(won.index(True))


async def test_what_others_keep_in_a_lease_stays_and_is_no_renewal(lease, api, kube):
    it = lease()
    await it.read()
    await it.write(HOLD, None)
    await api.patch(path(kube), {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "x"}}})
    assert await it.read() == HOLD
    assert await it.write(replace(HOLD, beat=1), HOLD)
    metadata = (await api.get(path(kube)))["metadata"]
    assert (metadata["labels"], metadata["annotations"]["note"]) == ({"team": "a"}, "x")


@pytest.mark.parametrize("note", ["", "no json", "[]", json.dumps({"url": 7, "beat": "x", "duration_s": -1})])
def test_a_lease_that_somebody_else_wrote_is_still_somebodys(note):
    found = {
        "metadata": {"annotations": {ANNOTATION: note}},
        "spec": {"holderIdentity": "x", "leaseDurationSeconds": 15},
    }
    assert hold_of(found) == Hold(holder="x", url="", duration_s=15.0)
    assert hold_of({"metadata": {}}).is_released


async def test_an_api_server_that_refuses_is_a_lease_that_cannot_be_reached(lease, kube):
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


class Candidates:
    """Leaderships that run on one Lease. `leads` waits until it is this one alone, and says how long it took."""

    def __init__(self, lease):
        self._lease = lease
        self._all = {}
        self._changed = asyncio.Event()

    def start(self, name):
        it = Leadership(
            self._lease(), holder=name, url=f"http://{name}", duration_s=DURATION_S, renew_s=RENEW_S, margin_s=MARGIN_S
        )
        it.on_begin = it.on_end = self._changed.set
        self._all[name] = it, asyncio.create_task(it.run())
        return it

    async def kill(self, name):
        _, task = self._all.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def leading(self):
        return {name for name, (it, _) in self._all.items() if it.is_leading}

    async def leads(self, *names, within_s=10.0):
        clock = asyncio.get_running_loop().time
        began = clock()
        async with within(within_s):
            while self.leading() != set(names):
                assert len(self.leading()) <= 1
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await self._changed.wait()
        return clock() - began

    async def stop(self):
        for name in list(self._all):
            await self.kill(name)


@pytest.fixture
async def candidates(lease):
    them = Candidates(lease)
    yield them
    await them.stop()


async def test_a_standby_takes_over_from_a_dead_leader_within_the_lease_and_two_seconds(candidates):
    candidates.start("a")
    await candidates.leads("a")
    b = candidates.start("b")
    async with within(5):
        while b.leader_url != "http://a":
            await asyncio.sleep(0.01)
    await candidates.kill("a")
    assert await candidates.leads("b") < DURATION_S + 2.0


async def test_a_lease_that_is_given_back_is_taken_at_the_next_look(candidates):
    a = candidates.start("a")
    await candidates.leads("a")
    candidates.start("b")
    await asyncio.sleep(2 * RENEW_S)
    await candidates.kill("a")
    await a.release()
    assert await candidates.leads("b") < DURATION_S / 2


async def test_while_the_api_server_is_away_nobody_leads_and_when_it_is_back_one_does(candidates, kube):
    for name in ("a", "b"):
        candidates.start(name)
        await candidates.leads("a")
    faults = kube.faults
    await faults.go_down()
    assert await candidates.leads() < DURATION_S
    await asyncio.sleep(DURATION_S)
    assert candidates.leading() == set()
    await faults.come_back()
    async with within(5):
        while not candidates.leading():
            await asyncio.sleep(0.01)
    assert len(candidates.leading()) == 1


async def test_a_leader_whose_api_server_has_frozen_stops_in_time(candidates, kube):
    candidates.start("a")
    await candidates.leads("a")
    kube.faults.freeze()
    assert await candidates.leads() < DURATION_S
    kube.faults.thaw()
    await candidates.leads("a")


async def test_a_deleted_lease_is_made_again_by_its_holder(candidates, api, kube):
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
