"""Edits of one object that come before the write of the edit before them: the last one counts, whatever its text.

Edits are looked at on request only. What happens "at once" happens before the next request of the orchestrator.
"""

import asyncio
import copy

import pytest
import yaml

from orchestrator.configmaps.objects import adapter_object_name, alias_object_name
from orchestrator.core.errors import StateConflict
from orchestrator.intent.registry import spec_of
from orchestrator.model.adapters import AdapterSpec
from orchestrator.model.changes import reader_of
from orchestrator.model.served_names import NamedAlias
from tests.patience import until

SQL = {"lora_id": "sql/v1", "source": "hf://acme/sql"}


def _adapter(tenant):
    return SQL | {"tenants": [tenant]}


def _alias(target):
    return {"name": "best", "targets": [{"lora_id": f"{target}/v1"}]}


def _policy(loading):
    return {"loading": {"a": "lazy", "b": "eager"}[loading]}


KINDS = {
    "adapter": (_adapter, lambda store: store.adapters["sql/v1"].tenants[0]),
    "alias": (_alias, lambda store: store.targets_of("best")[0].lora_id.removesuffix("/v1")),
    "policy": (_policy, lambda store: {"lazy": "a", "eager": "b"}[store.rules.loading]),
}


class SlowOrchestrator:
    """A leader that looks at edits on request, beside people who write into the API server at once."""

    def __init__(self, instance, manifests, server):
        self.instance = instance
        self.store = instance.store
        self.mirror = instance.backend.mirror
        self._manifests = manifests
        self._server = server

    async def look(self):
        """Apply the edits that the mirror has; nothing is written before the caller waits for something else."""
        await self.instance.edits.apply_edits()

    async def accept(self, body, *, kind="adapter", name="it"):
        """People apply the text; it is accepted, and its write is queued."""
        await self._manifests.apply(name, body, kind=kind)
        await until(lambda: self.text(name, kind) == body)
        await self.look()

    async def settle(self):
        """Everything that is written, seen and looked at."""
        await self.store.wait_durable()
        await until(lambda: self.mirror.objects["it"]["metadata"]["resourceVersion"] == self._version())
        await self.look()
        await self.store.wait_durable()

    def text(self, name, kind):
        text = self.mirror.objects.get(name, {"data": {}})["data"].get(f"{kind}.yaml")
        return None if text is None else yaml.safe_load(text)

    def edit_at_once(self, body, *, kind="adapter", labels=None, is_seen=False):
        """People edit the object now; `is_seen`: the watch shows it now too."""
        found = self.found()
        found["data"] = {f"{kind}.yaml": yaml.safe_dump(body)}
        found["metadata"]["labels"] |= labels or {}
        self._server.objects.put(found)
        if is_seen:
            self.mirror.on_event("MODIFIED", self.found())

    def replace_at_once(self, body):
        """As `kubectl replace --force` does it, and the watch shows it now."""
        found = self.found()
        self._server.objects.delete("configmaps", found["metadata"]["namespace"], "it")
        self.mirror.on_event("DELETED", copy.deepcopy(found))
        made = {key: found["metadata"][key] for key in ("name", "namespace", "labels")}
        self._server.objects.put(found | {"metadata": made, "data": {"adapter.yaml": yaml.safe_dump(body)}})
        self.mirror.on_event("ADDED", self.found())

    def found(self):
        """The object as it stands on the server."""
        (found,) = (it for it in self._server.objects.list("configmaps") if it["metadata"]["name"] == "it")
        return copy.deepcopy(found)

    def said(self, kind="adapter"):
        return yaml.safe_load(self.found()["data"][f"{kind}.yaml"])

    def _version(self):
        return self.found()["metadata"]["resourceVersion"]


@pytest.fixture
async def slow(kube, instances, manifests):
    return SlowOrchestrator(await instances.lead(is_looking=False), manifests, kube.ours)


@pytest.mark.parametrize("is_seen", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_edit_back_to_the_text_before_is_an_edit(slow, kind, is_seen):
    """The second `a` stands in the API server before the record of `b`, so the object shows `a` and the record of `a`.

    `is_seen`: it is looked at before `b` is written, else after the write of `b` has failed for it.
    """
    body, value = KINDS[kind]
    for target in "ab":
        await slow.accept({"lora_id": f"{target}/v1", "source": "x"}, name=f"target-{target}")
    await slow.accept(body("a"), kind=kind)
    await slow.settle()
    await slow.accept(body("b"), kind=kind)
    assert value(slow.store) == "b"
    slow.edit_at_once(body("a"), kind=kind, is_seen=is_seen)
    await slow.look()
    await slow.settle()
    assert slow.said(kind) == body("a")
    assert value(slow.store) == "a"
    assert slow.found()["metadata"]["annotations"]["lorafleet.io/status"] == "accepted"
    slow.instance.abdicate()  # it reads the objects again, as the next leader does
    slow.store.refresh()
    assert value(slow.store) == "a"


async def test_an_edit_that_is_refused_leaves_the_edit_before_it_in_force(slow):
    await slow.accept(_adapter("a"))
    await slow.settle()
    await slow.accept(_adapter("b"))
    slow.edit_at_once(_adapter("c") | {"source": "hf://acme/other"}, is_seen=True)
    await slow.look()
    await slow.settle()
    assert slow.store.adapters["sql/v1"].tenants == ("b",)
    assert "it stays as it was accepted before" in slow.found()["metadata"]["annotations"]["lorafleet.io/status"]
    slow.instance.abdicate()  # it reads the objects again, as the next leader does
    slow.store.refresh()
    assert slow.store.adapters["sql/v1"].tenants == ("b",)


async def test_a_change_over_rest_outlives_an_edit_of_labels(slow):
    await slow.accept(_adapter("a"))
    await slow.settle()
    await slow.accept(_adapter("b"))
    slow.instance.registry.patch_adapter("sql/v1", {"tenants": ("rest",)}, "me")
    slow.edit_at_once(_adapter("b"), labels={"team": "x"}, is_seen=True)
    await slow.look()
    await slow.settle()
    assert slow.store.adapters["sql/v1"].tenants == ("rest",)
    assert slow.said() == _adapter("rest")
    assert slow.found()["metadata"]["labels"]["team"] == "x"


async def test_a_change_over_rest_is_refused_after_an_edit_back_to_the_text_before(slow):
    await slow.accept(_adapter("a"))
    await slow.settle()
    await slow.accept(_adapter("b"))
    slow.instance.registry.patch_adapter("sql/v1", {"tenants": ("rest",)}, "me")
    slow.edit_at_once(_adapter("a"))
    with pytest.raises(StateConflict, match="ConfigMap it has been changed meanwhile"):
        await slow.store.wait_durable()
    await slow.settle()
    assert slow.said() == _adapter("a")
    assert slow.store.adapters["sql/v1"].tenants == ("a",)


async def test_a_new_object_with_the_same_text_is_accepted_anew(slow):
    await slow.accept(_adapter("a"))
    await slow.settle()
    await slow.accept(_adapter("b"))
    slow.instance.registry.patch_adapter("sql/v1", {"tenants": ("rest",)}, "me")
    slow.replace_at_once(_adapter("b"))
    await slow.look()
    await slow.settle()
    assert slow.said() == _adapter("b")
    assert slow.store.adapters["sql/v1"].tenants == ("b",)


async def test_an_edit_beside_the_rewriting_of_its_text_is_kept(slow, kube):
    """The API server has rewritten the text for REST, and answers after two edits, the second back to that text."""
    await slow.accept(_adapter("a"))
    await slow.settle()
    kube.faults.hold_answers()
    slow.instance.registry.patch_adapter("sql/v1", {"tenants": ("rest",)}, "me")
    await until(lambda: slow.said() == _adapter("rest") and slow.text("it", "adapter") == _adapter("rest"))
    slow.edit_at_once(_adapter("b"), is_seen=True)
    await slow.look()
    slow.edit_at_once(_adapter("rest"), is_seen=True)
    kube.faults.give_answers()
    await slow.store.wait_durable()
    await slow.settle()
    assert slow.said() == _adapter("rest")
    assert slow.store.adapters["sql/v1"].tenants == ("rest",)


@pytest.mark.parametrize("kind", ["adapter", "alias"])
async def test_our_own_deletion_seen_before_its_answer_deletes_no_new_row(slow, manifests, kind):
    registry, store = slow.instance.registry, slow.store
    body, value = KINDS[kind]
    alias_of = reader_of(NamedAlias).validate_python
    put, name = {
        "adapter": (lambda said: registry.register(spec_of(said)), adapter_object_name("sql/v1")),
        "alias": (
            lambda said: registry.put_alias("best", alias_of(said)),
            alias_object_name("best"),
        ),
    }[kind]
    for target in "ab":
        registry.register(AdapterSpec(lora_id=f"{target}/v1", source="x"))
    put(body("a"))
    await store.wait_durable()
    answer = _hold_deletions(slow.instance.kube)
    if kind == "adapter":
        registry.delete_adapter("sql/v1")
        await store.wait_durable()
        store.drop_adapter("sql/v1")
    else:
        registry.delete_alias("best")
    await until(lambda: name in slow.mirror.doubtful)  # the watch shows the deletion
    put(body("b"))
    await slow.look()
    answer.set()
    for _ in range(2):
        await store.wait_durable()
        await slow.look()
    assert yaml.safe_load((await manifests.get(name))["data"][f"{kind}.yaml"]) == body("b")
    assert value(store) == "b"
    assert not any(adapter.is_deleting for adapter in store.adapters.values())


def _hold_deletions(kube):
    """Deletions are executed; their answers come once the event returned is set."""
    answer, delete = asyncio.Event(), kube.delete

    async def held(*args, **how):
        done = await delete(*args, **how)
        await answer.wait()
        return done

    kube.delete = held
    return answer
