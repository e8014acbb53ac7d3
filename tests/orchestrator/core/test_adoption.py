"""Which adapters on workers are registered without a call: what settings name, by the policy, and never other bytes."""

from dataclasses import replace
from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.adoption import adopted_adapter, is_left_nowhere, judged, to_adopt, with_left_at
from orchestrator.model.adapters import AdapterSpec, RegisteredAdapter
from orchestrator.model.cards import AdapterCard
from orchestrator.model.orphans import OrphanItem
from orchestrator.model.policy import PlacementPolicy
from tests.properties import examples

NAMES = ("a/v1", "b/v1", "taken", "not a name")
DIGESTS = ("", "1" * 64, "2" * 64)


@st.composite
def orphans(draw):
    name, digest = draw(st.sampled_from(NAMES)), draw(st.sampled_from(DIGESTS))
    return OrphanItem(
        lora_id=name,
        card=AdapterCard(
            digest=digest,
            base_model=draw(st.sampled_from(("", "base"))),
            rank=draw(st.sampled_from((0, 8))),
            source=draw(st.sampled_from(("", "/adapters/x", "hf://org/x"))),
        ),
        engine_name=name,
        workers=("w0",),
        is_foreign=draw(st.booleans()),
        is_configured=draw(st.booleans()),
        error=draw(st.sampled_from((None, "weights_corrupt: cut off"))),
    )


def adapter(lora_id, digest):
    spec = AdapterSpec(lora_id=lora_id, source="/x", base_model="base", digest=digest)
    return RegisteredAdapter(spec=spec, card=AdapterCard(digest=digest, rank=8))


REGISTERED = st.dictionaries(st.sampled_from(NAMES[:2]), st.sampled_from(DIGESTS[1:]), max_size=2).map(
    lambda found: {name: adapter(name, digest) for name, digest in found.items()}
)
FOUND = st.lists(orphans(), max_size=6, unique_by=lambda item: (item.lora_id, item.card.digest, item.is_foreign))


def name_problem(name):
    return "taken by an alias" if name == "taken" else None


@settings(max_examples=examples(300))
@given(FOUND, REGISTERED)
def test_no_name_gets_other_bytes_or_two_kinds_of_bytes_and_none_that_is_taken(found, registered):
    items = judged(found, registered, name_problem)
    for rule in ("configured", "all"):
        adopted = to_adopt(items, rule)
        for item in adopted:
            known = registered.get(item.lora_id)
            assert known is None or (item.is_foreign and known.digest == item.card.digest)
            assert item.lora_id in NAMES[:2]
            assert item.card.source or known is not None, "else no worker could fetch it"
            assert item.card.digest or item.is_configured or item.is_foreign
        for _, same_name in groupby(sorted(adopted, key=lambda item: item.lora_id), key=lambda item: item.lora_id):
            group = list(same_name)
            for is_configured in (True, False):
                digests = {
                    item.card.digest for item in group if item.is_configured is is_configured and item.card.digest
                }
                assert len(digests) <= 1


@settings(max_examples=examples(200))
@given(FOUND, REGISTERED)
def test_the_policy_says_what_counts_and_a_clients_load_never_keeps_an_operators_adapter_out(found, registered):
    items = judged(found, registered, name_problem)
    assert to_adopt(items, "none") == []
    configured, everything = to_adopt(items, "configured"), to_adopt(items, "all")
    assert all(item.is_configured for item in configured)
    assert [item for item in everything if item.is_configured] == configured
    alone = judged([item for item in found if item.is_configured], registered, name_problem)
    assert to_adopt(alone, "configured") == configured


@given(orphans())
def test_an_adopted_adapter_has_what_its_worker_says_of_it(item):
    if not item.card.source or item.lora_id == NAMES[3]:
        return
    made = adopted_adapter(item, None, is_adopted=True)
    assert (made.lora_id, made.source, made.tenants) == (item.lora_id, item.card.source, None)
    assert (made.digest or "", made.rank or 0, made.base_model or "") == (
        item.card.digest,
        item.card.rank,
        item.card.base_model,
    )


def test_a_faulty_folder_is_registered_so_that_its_fault_is_shown_and_one_without_a_place_says_why_not():
    item = OrphanItem(
        lora_id="a/v1", card=AdapterCard(source="/adapters/a"), engine_name="", workers=("w0",), is_configured=True,
        error="weights_corrupt: cut off",
    )  # fmt: skip
    (shown,) = judged([item], {}, name_problem)
    assert shown.problem is None
    (shown,) = judged([replace(item, card=AdapterCard())], {}, name_problem)
    assert shown.problem == "weights_corrupt: cut off"
    (shown,) = judged([item], {"a/v1": adapter("a/v1", DIGESTS[1])}, name_problem)
    assert "registered with digest" in shown.problem
    assert "cut off" in shown.problem


@given(st.booleans(), st.booleans(), st.none() | st.floats(0, 100), st.floats(0, 200))
def test_only_an_adopted_adapter_that_no_settings_name_ever_goes_and_not_before_its_time(adopted, named, left, asked):
    policy, now = PlacementPolicy(unused_name_s=50), 200.0
    noted = with_left_at(
        replace(adapter("a/v1", DIGESTS[1]), is_adopted=adopted, left_at=left), is_named=named, now=now
    )
    assert (noted.left_at is not None) is (adopted and not named)
    if noted.left_at is not None:
        assert noted.left_at == (now if left is None else left), "the time is that of the first look"
    gone = is_left_nowhere(noted, asked, policy, now)
    assert gone is (adopted and not named and left is not None and now - max(left, asked) >= 50)
    assert not is_left_nowhere(noted, asked, PlacementPolicy(unused_name_s=0), now)
