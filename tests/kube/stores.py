"""Orchestrators' stores on ConfigMaps, without the rest of the orchestrator."""

import asyncio
import contextlib

import yaml

from lorafleet.kube.client import connect
from orchestrator.configmaps.backend import ConfigMapBackend
from orchestrator.configmaps.edits import ObjectEdits
from orchestrator.configmaps.events import KubeEvents
from orchestrator.configmaps.objects import FLEET as FLEET_LABEL
from orchestrator.configmaps.objects import KIND, STATUS
from orchestrator.core.lease import LeaseRecord
from orchestrator.intent.registry import AdapterRegistry
from orchestrator.leadership.kube_lease import KubeLease
from orchestrator.model.served_names import ServedName
from orchestrator.store.store import IntentStore
from tests.patience import patience, until

FLEET = "lorafleet"
_GIVE_UP_S, _CALL_S = patience(5), patience(1)


async def give_back_lease(kube):
    """Write a released Lease, so that the first orchestrator leads at once."""
    lease = KubeLease(kube, namespace=kube.namespace, name=FLEET, timeout_s=5.0)
    await lease.read()
    assert await lease.write(LeaseRecord(holder="before", url="", duration_s=1.0, is_released=True), None)


class StubWorkerReports:
    """Worker reports as far as the adapter registry needs them."""

    def __init__(self):
        self.workers = {}

    def base_model_names(self):
        return {"tiny-qwen"}


class ImmediateMover:
    """Sets aliases at once, as the mover does with `place_s` 0."""

    def __init__(self, store):
        self._store = store

    def point_alias(self, alias, targets, actor, *, place_s):
        with self._store.together():
            self._store.put_name(ServedName(name=alias, targets=targets))
            self._store.record("alias_set", alias, {"targets": targets}, actor)


class StoreInstance:
    """One orchestrator's store with its object edits. `is_looking` False: edits are applied on request only."""

    def __init__(self, kube, *, wall, give_up_s, call_s, is_looking):
        self.kube = kube
        self.backend = ConfigMapBackend(
            kube,
            namespace=kube.namespace,
            fleet=FLEET,
            on_undone=self._refresh,
            give_up_s=give_up_s,
            call_s=call_s,
        )
        self.store = IntentStore(self.backend, wall=wall)
        self.registry = AdapterRegistry(
            self.store,
            StubWorkerReports(),
            ImmediateMover(self.store),
            forget_failures=lambda _lora_id: None,
            wall=wall,
        )
        self.is_leading = False
        self.taken = 0
        events = KubeEvents(kube, namespace=kube.namespace, reporter="test", wall=wall)
        self.edits = ObjectEdits(
            self.backend,
            self.store,
            self.registry,
            events,
            is_leading=lambda: self.is_leading,
            on_changed=self._count,
        )
        works = [self.backend.follow(), events.run(), *([self.edits.run()] if is_looking else [])]
        self._loops = [asyncio.create_task(work) for work in works]

    def _refresh(self):
        self.store.refresh()

    def _count(self):
        self.taken += 1

    async def lead(self):
        """Begin a term as the reconciler does."""
        await until(lambda: self.backend.is_read)
        await self.store.catch_up()
        self.store.reload()
        self.store.raise_epoch(self.store.epoch)
        await self.store.wait_durable()
        self.is_leading = True
        await until(lambda: self.store.is_caught_up)
        return self

    def abdicate(self):
        """End the term as after a kill or a lost lease: nothing more is written."""
        self.is_leading = False
        self.store.end_term()

    async def close(self):
        await self.backend.write_remaining()
        self.abdicate()
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self.store.close()
        await self.kube.close()


class StoreInstances:
    """Opens store instances on one cluster and closes all at the end."""

    def __init__(self, cluster):
        self.cluster = cluster
        self._open = []

    async def open(self, *, wall=lambda: 1_800_000_000.0, give_up_s=_GIVE_UP_S, call_s=_CALL_S, is_looking=True):
        kube = await connect(self.cluster.kubeconfig, environ={})
        instance = StoreInstance(kube, wall=wall, give_up_s=give_up_s, call_s=call_s, is_looking=is_looking)
        self._open.append(instance)
        return instance

    async def lead(self, **options):
        return await (await self.open(**options)).lead()

    async def close(self, instance):
        self._open.remove(instance)
        await instance.close()

    async def close_all(self):
        for instance in self._open:
            with contextlib.suppress(Exception):
                await instance.close()


class ManifestApplier:
    """Applies manifests as people do."""

    def __init__(self, api, namespace):
        self.api = api
        self.folder = f"/api/v1/namespaces/{namespace}"

    async def apply(self, name, body, *, kind="adapter", text=None, labels=None):
        """Apply as kubectl does: unnamed fields stay. `text`: instead of a body, or all the data."""
        labels = {KIND: kind, FLEET_LABEL: FLEET} if labels is None else labels
        data = text if isinstance(text, dict) else {f"{kind}.yaml": yaml.safe_dump(body) if text is None else text}
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels}, "data": data}
        known = {found["metadata"]["name"] for found in await self.all()}
        if name in known:
            return await self.api.patch(f"{self.folder}/configmaps/{name}", {"data": data})
        return await self.api.post(f"{self.folder}/configmaps", made)

    async def all(self):
        return (await self.api.get(f"{self.folder}/configmaps"))["items"]

    async def get(self, name):
        return await self.api.get(f"{self.folder}/configmaps/{name}")

    async def patch(self, name, metadata):
        return await self.api.patch(f"{self.folder}/configmaps/{name}", {"metadata": metadata})

    async def delete(self, name):
        await self.api.delete(f"{self.folder}/configmaps/{name}")

    async def status(self, name):
        return (await self.get(name))["metadata"].get("annotations", {}).get(STATUS, "")

    async def said(self, name, words):
        """Wait until the object's status has this text."""

        async def has_them():
            return words in await self.status(name)

        await until(has_them)

    async def events(self, name):
        found = (await self.api.get(f"{self.folder}/events"))["items"]
        return [event for event in found if event["involvedObject"]["name"] == name]

    async def event(self, name, reason):
        async def there():
            return next((event for event in await self.events(name) if event["reason"] == reason), None)

        return await until(there)
