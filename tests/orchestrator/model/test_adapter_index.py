"""The index says of every adapter what a walk over all of them says, whatever was written before."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet.identity import fleet_source
from orchestrator.core.placement.place import place
from orchestrator.model.adapter_index import AdapterIndex, adapter_index
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.snapshot import DemandSnapshot, Intent
from orchestrator.store.store import IntentStore
from tests.orchestrator.core.placement.test_place import NOW, adapter, fleet, fleets, held, worker
from tests.properties import examples
from tests.registered import registered

NAMES = [f"a{number}" for number in range(6)]


@st.composite
def rows(draw):
    """An adapter in any state, or the name of one that goes."""
    name = draw(st.sampled_from(NAMES))
    if draw(st.booleans()) and draw(st.booleans()):
        return name
    if draw(st.booleans()):
        return registered(name, source="s")
    return adapter(
        name,
        base_model=draw(st.sampled_from(["qwen", "llama"])),
        rank=draw(st.sampled_from([8, 64])),
        min_replicas=draw(st.none() | st.integers(0, 2)),
        ttl_s=draw(st.none() | st.sampled_from([0.0, 9.0])),
        is_deleting=draw(st.booleans()),
        quarantine=draw(st.sampled_from([None, "bad bytes"])),
        source=draw(st.sampled_from(["s", fleet_source("0" * 64), fleet_source("1" * 64)])),
        is_adopted=draw(st.booleans()),
    )


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(rows(), max_size=20))
def test_the_stores_index_is_that_of_its_adapters(writes):
    store = IntentStore(":memory:")
    for row in writes:
        if isinstance(row, str):
            if row in store.adapters:
                store.drop_adapter(row)
        else:
            store.put_adapter(row)
        assert store.intent.index == adapter_index(store.adapters)
    store.refresh()
    assert store.intent.index == adapter_index(store.adapters)
    store.close()


@settings(max_examples=examples(100))
@given(fleets(), st.sampled_from(["lazy", "eager", "weighted"]))
def test_a_pass_by_the_index_decides_what_one_over_all_adapters_decides(case, loading):
    """An index in which every adapter stands makes a pass look at all."""
    wanted, observed, demand = case[:3]
    policy = PlacementPolicy(loading=loading)
    index = adapter_index(wanted.adapters)
    every = Intent(
        adapters=wanted.adapters,
        tombstones=wanted.tombstones,
        known_index=AdapterIndex(set(wanted.adapters), index.by_shape),
    )
    assert place(wanted, observed, demand, policy, NOW) == place(every, observed, demand, policy, NOW)


def test_raised_adapters_stand():
    known = {name: adapter(name) for name in ("a", "b")}
    intent = Intent(adapters=known, known_index=adapter_index(known))
    raised = intent.with_raised({"a": known["a"].with_policy(min_replicas=1)})
    assert (intent.index.standing, raised.index.standing) == (set(), {"a"})
    desired = place(raised, fleet(worker("w0", held("b"))), DemandSnapshot(), PlacementPolicy(), NOW)
    assert [load.lora_id for load in desired.loads] == ["a"]
