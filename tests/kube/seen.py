"""A follower of ConfigMaps, and the state that its callbacks add up to."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from lorafleet.kube.client import KubeClient
from lorafleet.kube.watch import list_and_watch
from tests.patience import within


@dataclass
class FollowedState:
    """The state that a follower's callbacks add up to."""

    state: dict = field(default_factory=dict)
    lists: int = 0
    events: list = field(default_factory=list)
    failures: int = 0
    answers: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def listed(self, items):
        self.lists += 1
        found = {item["metadata"]["name"]: item["data"].get("value") for item in items}
        self.state = {name: value for name, value in found.items() if value is not None}  # not a cluster's own
        self.changed.set()

    def event(self, kind, item):
        name = item["metadata"]["name"]
        self.events.append((kind, name))
        if kind == "DELETED":
            del self.state[name]
        else:
            self.state[name] = item["data"]["value"]
        self.changed.set()

    def failed(self, _exc):
        self.failures += 1
        self.changed.set()

    def answered(self):
        self.answers += 1

    async def until(self, predicate, within_s=10.0):
        async with within(within_s):
            while not predicate():
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def seeing(kube: KubeClient, path: str, *, selector: str = "", **more) -> AsyncIterator[FollowedState]:
    seen = FollowedState()
    told = {"on_list": seen.listed, "on_event": seen.event, "on_failure": seen.failed, "on_answer": seen.answered}
    loop = asyncio.create_task(
        list_and_watch(kube, path, label_selector=selector, rng=random.Random(1), **(told | more))
    )
    try:
        yield seen
        assert not loop.done(), loop
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
