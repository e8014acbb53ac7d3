"""Stores on ConfigMaps, each an orchestrator's own as far as intent goes: opened, led, looked into."""

import asyncio
import contextlib

from lorafleet.kube.client import connect
from orchestrator.configmaps.backend import ConfigMaps
from orchestrator.configmaps.intake import Intake
from orchestrator.configmaps.notices import Notices
from orchestrator.core.rollout import Rollout
from orchestrator.registry import Registry
from orchestrator.store import Store

FLEET = "lorafleet"


async def until(true, within_s=10.0):
    """Waits for what comes by way of the API server."""
    async with asyncio.timeout(within_s):
        while True:
            found = true()
            if found := (await found if asyncio.iscoroutine(found) else found):
                return found
            await asyncio.sleep(0.01)


class Fleet:
    """As far as the registry asks it."""

    def __init__(self):
        self.entries = {}

    def base_model_names(self):
        return {"tiny-qwen"}


class Rollouts:
    """Points aliases at once, as rollouts do with `place_s` 0."""

    def __init__(self, store):
        self._store = store

    def point(self, alias, targets, actor, *, place_s):
        with self._store.together():
            self._store.put_alias(alias, targets)
            self._store.record("alias_set", alias, {"targets": targets}, actor)


class Seat:
    """One orchestrator's store, with the intake beside it."""

    def __init__(self, kube, *, wall, give_up_s):
        self.kube = kube
        self.backend = ConfigMaps(kube, namespace=kube.namespace, fleet=FLEET, give_up_s=give_up_s, call_s=1.0)
        self.store = Store(self.backend, wall=wall)
        self.registry = Registry(self.store, Fleet(), Rollouts(self.store), wall=wall)
        self.is_leading = False
        self.taken = 0
        notices = Notices(kube, namespace=kube.namespace, reporter="test", wall=wall)
        self.intake = Intake(
            self.backend,
            self.store,
            self.registry,
            notices,
            is_leading=lambda: self.is_leading,
            on_taken=self._count,
        )
        self.backend.on_undone = self.store.refresh
        self._loops = [asyncio.create_task(work) for work in (self.backend.follow(), notices.run(), self.intake.run())]

    def _count(self):
        self.taken += 1

    async def lead(self):
        """A term begins, as the reconciler begins one."""
        await until(lambda: self.backend.is_read)
        await self.store.catch_up()
        self.store.reload()
        self.store.raise_epoch(self.store.epoch)
        await self.store.saved()
        self.is_leading = True
        await until(lambda: self.store.is_caught_up)
        return self

    def abdicate(self):
        """Killed, or without the lease: nothing more is written."""
        self.is_leading = False
        self.store.let_go()

    async def close(self):
        await self.backend.finish()
        self.abdicate()
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self.store.close()
        await self.kube.close()


class Seats:
    """Opens them on one cluster; all are closed at the end."""

    def __init__(self, cluster):
        self.cluster = cluster
        self._open = []

    async def open(self, *, wall=lambda: 1_800_000_000.0, give_up_s=5.0):
        seat = Seat(await connect(self.cluster.kubeconfig, environ={}), wall=wall, give_up_s=give_up_s)
        self._open.append(seat)
        return seat

    async def lead(self, **options):
        return await (await self.open(**options)).lead()

    async def close(self, seat):
        self._open.remove(seat)
        await seat.close()

    async def close_all(self):
        for seat in self._open:
            with contextlib.suppress(Exception):
                await seat.close()


__all__ = ["FLEET", "Rollout", "Seat", "Seats", "until"]
