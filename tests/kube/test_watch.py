"""The list-then-watch loop against an API server that fails in every way it can."""

import asyncio
import contextlib
import random
from collections import Counter
from itertools import pairwise

import pytest
import structlog

from lorafleet.kube.client import connect
from lorafleet.kube.errors import KubeError, error_of_answer
from lorafleet.kube.watch import ListWatchLoop, WatchTimes, list_and_watch
from tests.kube.seen import FollowedState, seeing
from tests.kube.server import KubeServer
from tests.patience import patience, within

PATH = "/api/v1/namespaces/default/configmaps"
# As in production, a hundred times faster where it is about waiting.
QUICK = WatchTimes(watch_s=(1.0, 1.2), silent_s=0.3, pause_s=(0.02, 0.1), steady_s=0.2, call_s=0.3)
STEADY = WatchTimes(watch_s=(20.0, 30.0), silent_s=patience(2), pause_s=(0.02, 0.1), steady_s=0.2, call_s=patience(1))


@pytest.fixture
async def server():
    async with KubeServer() as server:
        yield server


def put(server, name, value="0", **labels):
    meta = {"name": name, "namespace": "default", "labels": labels}
    return server.objects.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"value": value}})


@contextlib.asynccontextmanager
async def following(server, tmp_path, **how):
    kube = await connect(server.kubeconfig(tmp_path / "kubeconfig"), environ={})
    async with seeing(kube, PATH, **({"times": STEADY} | how)) as seen:
        yield seen
    await kube.close()


async def watched(server):
    """Until somebody watches, and so is told of what changes from now on."""
    async with within(5):
        while not server.faults.watches:
            await asyncio.sleep(0.002)


async def test_a_watch_that_ends_in_order_resumes_and_misses_nothing(server, tmp_path):
    put(server, "a", "0")
    async with following(server, tmp_path) as seen:
        for number in range(1, 6):
            await watched(server)
            server.faults.drop_watches(cleanly=True)
            put(server, "a", str(number))
            await seen.until(lambda number=number: seen.state.get("a") == str(number))
        assert (seen.lists, seen.failures) == (1, 0)


async def test_a_version_that_is_no_longer_kept_is_listed_again(server, tmp_path):
    put(server, "a", "0")
    async with following(server, tmp_path) as seen:
        await watched(server)
        server.faults.drop_watches(cleanly=True)
        put(server, "a", "1")
        put(server, "a", "2")
        server.faults.compact()
        with structlog.testing.capture_logs() as logs:
            await seen.until(lambda: seen.lists == 2)
        assert seen.state == {"a": "2"}
        assert [entry["why"] for entry in logs if entry["event"] == "objects listed"] == ["version no longer kept"]


async def test_a_compacted_server_is_listed_again_and_meanwhile_nothing_changes(server, tmp_path):
    put(server, "a", "0")
    with structlog.testing.capture_logs() as logs:
        async with following(server, tmp_path, times=QUICK) as seen:
            await watched(server)
            await server.faults.go_down()
            await seen.until(lambda: seen.failures > 5)
            assert (seen.state, seen.lists, seen.events) == ({"a": "0"}, 1, [])
            put(server, "b", "1")
            server.objects.delete("configmaps", "default", "a")
            await server.faults.come_back(rewound=True)
            await seen.until(lambda: seen.state == {"b": "1"})
    told = [entry["event"] for entry in logs]
    assert told.count("API server away") == 1, "once, however often it was tried"
    assert told.count("API server answers again") == 1
    assert "after a failure" in logs[-1]["why"]


async def test_a_server_that_falls_silent_without_an_end_is_noticed(server, tmp_path):
    put(server, "a", "0")
    async with following(server, tmp_path, times=QUICK) as seen:
        await watched(server)
        server.faults.freeze()
        put(server, "a", "1")
        await seen.until(lambda: seen.failures >= 3)
        assert (seen.state, seen.lists) == ({"a": "0"}, 1)
        server.faults.thaw()
        await seen.until(lambda: seen.state == {"a": "1"})


@pytest.mark.parametrize("status", [429, 500])
async def test_a_refusal_is_retried_no_sooner_than_retry_after(server, tmp_path, status):
    put(server, "a", "0")
    server.faults.refuse(status, retry_after_s=1, times=1)
    async with following(server, tmp_path) as seen:
        await seen.until(lambda: seen.lists)
        first, second = [asked.time for asked in server.requests if asked.verb == "list"]
        assert second - first >= (1.0 if status != 500 else 0.01)


async def test_a_token_that_rotates_is_read_again(server, tmp_path):
    server.tokens["t0"] = "admin"
    put(server, "a", "0")
    server.kubeconfig(tmp_path / "kubeconfig", token="t0")
    kube = await connect(tmp_path / "kubeconfig")
    seen = FollowedState()
    loop = asyncio.create_task(list_and_watch(kube, PATH, on_list=seen.listed, on_event=seen.event, times=QUICK))
    await watched(server)
    server.tokens.clear()
    server.tokens["t1"] = "admin"
    server.kubeconfig(tmp_path / "kubeconfig", token="t1")
    server.faults.drop_watches()
    put(server, "a", "1")
    await seen.until(lambda: seen.state == {"a": "1"})
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await kube.close()


async def test_a_missing_role_is_logged_and_retried_ever_more_rarely(server, tmp_path):
    server.tokens["t0"] = "nobody"
    server.kubeconfig(tmp_path / "kubeconfig", token="t0")
    kube = await connect(tmp_path / "kubeconfig")
    seen = FollowedState()
    times = WatchTimes(pause_s=(0.01, 0.08))
    with structlog.testing.capture_logs() as logs:
        loop = asyncio.create_task(
            list_and_watch(kube, PATH, on_list=seen.listed, on_event=seen.event, on_failure=seen.failed, times=times)
        )
        await seen.until(lambda: seen.failures == 12)
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
    await kube.close()
    said = [entry for entry in logs if entry["event"] == "objects not followed"]
    assert [entry["failures"] for entry in said] == [1, 10]
    assert "cannot list resource" in said[0]["error"]
    asked = [asked.time for asked in server.requests]
    gaps = [after - before for before, after in pairwise(asked)]
    assert min(gaps[-3:]) >= 0.04, "half of the longest pause"


async def test_a_failing_callback_gets_a_full_list_again(server, tmp_path):
    put(server, "a", "0")
    fails = iter([True, False])
    seen = FollowedState()

    def event(kind, item):
        if next(fails, False):
            raise ZeroDivisionError
        seen.event(kind, item)

    def listed(items):
        seen.listed(items)

    with structlog.testing.capture_logs() as logs:
        async with following(server, tmp_path, on_event=event, on_list=listed):
            await watched(server)
            put(server, "a", "1")
            await seen.until(lambda: seen.lists == 2)
    assert seen.state == {"a": "1"}
    assert [entry["exc_info"] for entry in logs if entry["event"] == "objects not processed"] == [True]


@pytest.mark.parametrize("seed", range(4))
async def test_after_any_failure_the_state_agrees_with_the_server(server, tmp_path, seed):
    chance = random.Random(seed)
    times = WatchTimes(watch_s=(1.0, 1.0), silent_s=0.2, pause_s=(0.005, 0.03), steady_s=0.1, call_s=0.3)
    faults = [
        lambda: server.faults.drop_watches(cleanly=True),
        server.faults.drop_watches,
        server.faults.compact,
        lambda: server.faults.refuse(503, retry_after_s=0, times=chance.randint(1, 4)),
        server.faults.freeze,
        server.faults.thaw,
    ]
    is_down = False
    async with following(server, tmp_path, times=times) as seen:
        for step in range(40):
            names = {item["metadata"]["name"] for item in server.objects.list("configmaps", "default")}
            name = f"m{chance.randrange(6)}"
            if name in names and chance.random() < 0.4:
                server.objects.delete("configmaps", "default", name)
            else:
                put(server, name, str(step))
            if chance.random() < 0.15:
                await (server.faults.come_back() if is_down else server.faults.go_down())
                is_down = not is_down
            elif chance.random() < 0.4:
                chance.choice(faults)()
            await asyncio.sleep(chance.choice([0, 0.005, 0.02]))
        server.faults.thaw()
        server.faults.refuse(None)
        if is_down:
            await server.faults.come_back()
        put(server, "last", "x")
        await seen.until(lambda: "last" in seen.state)
        there = server.objects.list("configmaps", "default")
        assert seen.state == {item["metadata"]["name"]: item["data"]["value"] for item in there}


class BrokenWatchClient:
    """An API server in no time at all: lists work, or do not, and each watch ends in its own way at once."""

    def __init__(self, clock, how):
        self.clock = clock
        self.how = how
        self.asked = []

    async def get(self, path, **params):
        self.asked.append(self.clock.now)
        if self.how == "refuses":
            raise error_of_answer("list", 500, {})
        return {"metadata": {"resourceVersion": "1"}, "items": []}

    @contextlib.asynccontextmanager
    async def stream(self, path, **params):
        self.asked.append(self.clock.now)

        async def lines():
            if self.how == "expires":
                yield b'{"type":"ERROR","object":{"code":410,"reason":"Expired","message":"too old"}}'
            if self.how == "tells and ends":
                yield b'{"type":"ADDED","object":{"metadata":{"resourceVersion":"2"}}}'

        if self.how == "cuts":
            raise KubeError(0, "", "cut")
        yield lines()


class SleepRecorder:
    """A clock, and a sleep that costs nothing."""

    now = 0.0

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize("how", ["refuses", "cuts", "expires", "ends", "tells and ends"])
async def test_a_failing_api_server_gets_a_bounded_number_of_requests_a_minute(how):
    clock = SleepRecorder()
    server = BrokenWatchClient(clock, how)
    told = [lambda *_: None] * 4
    loop = ListWatchLoop(server, PATH, "", 500, *told, WatchTimes(), clock, random.Random(1), clock.sleep)
    while clock.now < 3600 and len(server.asked) < 10_000:
        await loop.watch_then_back_off()
    per_minute = Counter(int(at // 60) for at in server.asked)
    # With pauses of 2.5 to 5 s at the end; each may be followed by a list and a watch.
    assert max(per_minute[minute] for minute in range(1, 60)) <= 40
    assert per_minute[0] <= 60
    assert min(per_minute[minute] for minute in range(60)) >= 10, "and never given up"
