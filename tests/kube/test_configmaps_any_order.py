"""Apply, edit and delete of ConfigMaps beside REST and the passes, in any order, on an API server that takes its time.

In the end an object that people deleted is gone, one that people applied last stands and counts, and the store says
what the objects say.
"""

import asyncio
import contextlib
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lorafleet.kube.client import connect
from lorafleet.kube.errors import KubeError
from orchestrator.configmaps.objects import KIND, adapter_object_name
from orchestrator.core.errors import OrchestratorError, OrchestratorUnavailable
from orchestrator.intent.registry import spec_of
from tests.kube.conftest import KubeCluster
from tests.kube.server import KubeServer
from tests.kube.stores import ManifestApplier, StoreInstances
from tests.patience import patience, until
from tests.properties import examples
from tests.registered import changed

OBJECTS = 3
# A step: what is done, to which object, and with which tenant in the text.
STEPS = st.tuples(
    st.sampled_from(
        ("apply", "delete", "replace", "register", "patch", "drop", "patch_applied", "drop_applied", "inspect", "end")
    ),
    st.integers(0, OBJECTS - 1),
    st.sampled_from("abc"),
)
# Steps of one group are begun at once.
SCRIPTS = st.lists(st.lists(STEPS, min_size=1, max_size=5), min_size=1, max_size=6)


class WriteScript:
    """What people and REST callers do to one fleet.

    expected   object -> the tenants that may stand in it in the end; None among them: it may be gone
    """

    def __init__(self, instance, manifests):
        self.instance = instance
        self.manifests = manifests
        self.expected = {}

    async def run(self, groups):
        for group in groups:
            # One object has one author at a time; what is done to different ones overlaps.
            by_object = {}
            for what, number, tenant in group:
                by_object.setdefault(number, []).append((what, tenant))
            await asyncio.gather(*(self._steps(number, steps) for number, steps in by_object.items()))

    async def _steps(self, number, steps):
        for what, tenant in steps:
            await getattr(self, f"_{what}")(number, tenant)

    async def _apply(self, number, tenant):
        name = f"applied-{number}"
        body = _said(f"applied/v{number}", tenant)
        before = self.expected.get(name, {None})
        try:
            await self.manifests.apply(name, body)
        except KubeError:  # the orchestrator deleted it between kubectl's look and its write
            return
        # An edit of an object that REST is deleting goes with the object.
        self.expected[name] = {tenant, None} if None in before and len(before) > 1 else {tenant}

    async def _delete(self, number, _tenant):
        name = f"applied-{number}"
        try:
            await self.manifests.delete(name)
        except KubeError:
            return
        self.expected[name] = {None}

    async def _replace(self, number, tenant):
        """As `kubectl replace --force` does it."""
        await self._delete(number, tenant)
        await self._apply(number, tenant)

    async def _register(self, number, tenant):
        await self._over_rest(f"rest-{number}", {tenant}, lambda it: it.register(_spec(number, tenant)))

    async def _patch(self, number, tenant):
        await self._patched(f"rest-{number}", f"rest/v{number}", tenant, is_sole=True)

    async def _drop(self, number, _tenant):
        await self._over_rest(f"rest-{number}", {None}, lambda registry: registry.delete_adapter(f"rest/v{number}"))

    async def _patch_applied(self, number, tenant):
        await self._patched(f"applied-{number}", f"applied/v{number}", tenant, is_sole=False)

    async def _patched(self, name, lora_id, tenant, *, is_sole):
        """`is_sole`: nobody else edits it. What is being deleted goes with the change.

        A delete that was answered with an error may go on, as another object's failed write ends all answers.
        """
        before = self.expected.get(name, {None})
        known = self.instance.store.adapters.get(lora_id)
        goes = {None} if known is not None and known.is_deleting else set()
        after = before if before == {None} else {tenant} | goes if is_sole else before | {tenant}
        await self._over_rest(name, after, lambda registry: registry.patch_adapter(lora_id, {"tenants": (tenant,)}))

    async def _drop_applied(self, number, _tenant):
        name = f"applied-{number}"
        after = self.expected.get(name, {None}) | {None}
        await self._over_rest(name, after, lambda registry: registry.delete_adapter(f"applied/v{number}"))

    async def _over_rest(self, name, after, change):
        """What is answered with an error may stand or not."""
        before = self.expected.get(name, {None})
        self.expected[name] = before | after
        try:
            change(self.instance.registry)
        except OrchestratorError:
            self.expected[name] = before
            return
        try:
            await self.instance.store.wait_durable()
        except OrchestratorError:
            return
        self.expected[name] = after

    async def _inspect(self, _number, _tenant):
        """An agent has read the bytes."""
        store = self.instance.store
        for adapter in list(store.adapters.values()):
            if adapter.is_inspected or adapter.is_deleting:
                continue
            with contextlib.suppress(OrchestratorUnavailable):  # a change before it was refused just now
                store.put_adapter(changed(adapter, digest="d" * 64, rank=8, base_model="tiny", size_bytes=7))

    async def _end(self, _number, _tenant):
        self.end_deletions()

    def end_deletions(self):
        """A pass: no worker holds them any more."""
        for adapter in list(self.instance.store.adapters.values()):
            if adapter.is_deleting:
                self.instance.store.drop_adapter(adapter.lora_id)

    async def differences(self):
        """What is not as it has to be."""
        self.end_deletions()
        objects = {it["metadata"]["name"]: it for it in await self.manifests.all()}
        adapters = dict(self.instance.store.adapters)
        told = []
        for number in range(OBJECTS):
            for name, lora_id, home in (
                (f"applied-{number}", f"applied/v{number}", f"applied-{number}"),
                (f"rest-{number}", f"rest/v{number}", adapter_object_name(f"rest/v{number}")),
            ):
                found = tenant_of(objects.pop(home, None))
                known = adapters.pop(lora_id, None)
                tenant = None if known is None else known.tenants[0]
                if found not in self.expected.get(name, {None}) or tenant != found:
                    told.append(f"{name}: object {found}, store {tenant}, expected {self.expected.get(name)}")
        told += [
            f"{name}: made by nobody" for name, it in objects.items() if it["metadata"]["labels"][KIND] == "adapter"
        ]
        told += [f"{lora_id}: registered by nobody" for lora_id in adapters]
        return told


def tenant_of(found):
    return None if found is None else yaml.safe_load(found["data"]["adapter.yaml"])["tenants"][0]


def _said(lora_id, tenant):
    return {"lora_id": lora_id, "source": "hf://acme/it", "tenants": [tenant]}


def _spec(number, tenant):
    return spec_of(_said(f"rest/v{number}", tenant))


async def play(groups, seed):
    """Run a script on a slow API server; what is wrong when everything has come to rest."""
    with TemporaryDirectory() as folder:
        async with KubeServer() as server:
            namespace = "somewhere"
            server.objects.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
            path = server.kubeconfig(Path(folder) / "kubeconfig", namespace=namespace)
            instances = StoreInstances(KubeCluster(path, namespace, "127.0.0.1", server))
            instance = await instances.lead(give_up_s=patience(10), call_s=patience(5))
            manifests = ManifestApplier(await connect(path, environ={}), namespace)
            script = WriteScript(instance, manifests)
            try:
                server.faults.slow_down(random.Random(seed), requests_s=0.02, answers_s=0.04, events_s=0.01)
                await script.run(groups)
                server.faults.slow_down(random.Random(seed))
                with contextlib.suppress(TimeoutError):
                    await until(lambda: _is_right(script), within_s=20)
                return await script.differences()
            finally:
                await instances.close_all()
                await manifests.api.close()


async def _is_right(script):
    return not await script.differences()


@pytest.mark.slow
@given(SCRIPTS, st.integers(0, 2**32))
@settings(max_examples=examples(120), phases=(Phase.explicit, Phase.generate))
def test_the_last_change_by_manifest_or_rest_wins_in_any_order(groups, seed):
    assert asyncio.run(play(groups, seed)) == []


@pytest.mark.slow
async def test_forty_objects_applied_and_deleted_at_once_stay_deleted(kube, instances, manifests):
    kube.ours.faults.slow_down(random.Random(1), requests_s=0.1, answers_s=0.1, events_s=0.002)
    instance = await instances.lead(give_up_s=patience(10), call_s=patience(5))
    numbers = range(40)
    await asyncio.gather(
        *(manifests.apply(f"applied-{number}", _said(f"applied/v{number}", "a")) for number in numbers)
    )
    await asyncio.gather(*(manifests.delete(f"applied-{number}") for number in numbers))
    await manifests.apply("last", _said("last/v1", "a"))  # what was done before is looked at by then
    await manifests.said("last", "accepted")
    script = WriteScript(instance, manifests)
    await until(lambda: set(instance.store.adapters) == {"last/v1"} or script.end_deletions())
    await instance.store.wait_durable()
    stand = [it["metadata"]["name"] for it in await manifests.all() if it["metadata"]["labels"][KIND] == "adapter"]
    assert stand == ["last"]
