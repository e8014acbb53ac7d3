from dataclasses import replace
from random import Random
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.model.catalog import CatalogAdapter, CatalogAlias
from orchestrator.model.served_names import AliasTarget
from router.core.errors import AdapterFailed, BadBody, ModelNotFound
from router.core.fleet import RouterFleet
from router.core.resolve import resolve, usable_adapters, whole_name
from tests.properties import examples
from tests.router.core.schedule.test_policy import a_replica


def an_adapter(lora_id, base_model="tiny", tenants=None, error=None):
    return CatalogAdapter(lora_id=lora_id, base_model=base_model, digest="a" * 64, tenants=tenants, error=error)


def an_alias(name, weights):
    return CatalogAlias(name=name, targets=tuple(AliasTarget(lora_id, weight) for lora_id, weight in weights.items()))


FLEET = RouterFleet(
    revision=1,
    replicas=MappingProxyType(
        {"w0": a_replica("w0", base_model="tiny"), "w1": a_replica("w1", base_model="org:big/7B")}
    ),
    adapters=MappingProxyType(
        {
            a.lora_id: a
            for a in (
                an_adapter("sql/v1"),
                an_adapter("big/v1", "org:big/7B"),
                an_adapter("secret/v1", tenants=("acme",)),
                an_adapter("broken/v1", error="rank 512 is over 16"),
            )
        }
    ),
    aliases=MappingProxyType(
        {
            "sql": an_alias("sql", {"sql/v1": 1.0, "secret/v1": 1.0}),
            "secret": an_alias("secret", {"secret/v1": 1.0}),
            "off": an_alias("off", {"sql/v1": 0.0}),
        }
    ),
)


def test_an_adapter_that_failed_before_anybody_verified_it_is_not_listed():
    never = replace(an_adapter("never/v1", error="source_forbidden"), digest=None, engine_name=None)
    new = replace(an_adapter("new/v1"), digest=None, engine_name=None)
    fleet = replace(FLEET, adapters=FLEET.adapters | {it.lora_id: it for it in (never, new)})
    listed = usable_adapters(fleet, lambda _adapter: True)
    assert listed.keys() == fleet.adapters.keys() - {"never/v1"}


def resolved(model=None, lora_id=None, tenant=None):
    target = resolve(
        FLEET,
        model=model,
        lora_id=lora_id,
        visible=lambda a: a.tenants is None or tenant in a.tenants,
        rng=Random(1),
    )
    return target.base_model, target.adapter.lora_id if target.adapter else None, target.asked


@pytest.mark.parametrize(
    ("model", "lora_id", "expected"),
    [
        ("tiny", None, ("tiny", None, "tiny")),
        ("sql/v1", None, ("tiny", "sql/v1", "sql/v1")),
        ("tiny:sql/v1", None, ("tiny", "sql/v1", "tiny:sql/v1")),
        ("org:big/7B", None, ("org:big/7B", None, "org:big/7B")),
        ("org:big/7B:big/v1", None, ("org:big/7B", "big/v1", "org:big/7B:big/v1")),
        ("tiny", "sql/v1", ("tiny", "sql/v1", "tiny")),
        (None, "sql/v1", ("tiny", "sql/v1", "sql/v1")),
        ("sql/v1", "sql/v1", ("tiny", "sql/v1", "sql/v1")),
        ("tiny:sql/v1", "sql/v1", ("tiny", "sql/v1", "tiny:sql/v1")),
        ("sql", None, ("tiny", "sql/v1", "sql")),
        ("tiny", "sql", ("tiny", "sql/v1", "tiny")),
        ("tiny", "", ("tiny", None, "tiny")),
    ],
)
def test_every_spelling_finds_its_target(model, lora_id, expected):
    assert resolved(model, lora_id) == expected


def test_a_base_model_whose_pool_is_at_zero_exists_for_everybody():
    fleet = RouterFleet(from_zero=frozenset({"tiny"}))
    for model in ("tiny", None):
        target = resolve(fleet, model=model, lora_id=None, visible=lambda _: False, rng=Random(1))
        assert (target.base_model, target.adapter) == ("tiny", None)


@pytest.mark.parametrize(
    ("model", "lora_id"),
    [
        ("nope", None),
        ("tiny", "nope"),
        ("gpt-4", "sql/v1"),
        ("org:big/7B:sql/v1", None),
        ("tiny:big/v1", None),
        ("nope:sql/v1", None),
        ("sql/v1@bbbbbbbbbbbb", None),
        ("sql/v1@aaaaaaaaaaa", None),
        ("secret/v1@aaaaaaaaaaaa", None),
        ("secret@aaaaaaaaaaaa", None),
        ("tiny@aaaaaaaaaaaa", None),
        ("org:big/7B:sql/v1@aaaaaaaaaaaa", None),
        ("tiny", "sql/v1@bbbbbbbbbbbb"),
        ("secret/v1", None),
        ("secret", None),
        ("off", None),
        ("tiny", "tiny"),
    ],
)
def test_what_does_not_exist_for_the_caller_is_not_found(model, lora_id):
    with pytest.raises(ModelNotFound):
        resolved(model, lora_id)


def test_a_tenants_own_adapter_exists_for_it():
    assert resolved("secret/v1", tenant="acme")[1] == "secret/v1"
    assert resolved("secret", tenant="acme")[1] == "secret/v1"


def test_an_alias_shares_its_requests_by_weight_among_what_the_caller_may_use():
    rng = Random(0)
    picked = {
        resolve(FLEET, model="sql", lora_id=None, visible=lambda a: True, rng=rng).adapter.lora_id for _ in range(50)
    }
    assert picked == {"sql/v1", "secret/v1"}
    assert {resolved("sql")[1] for _ in range(50)} == {"sql/v1"}


SESSIONS = [f"user-{number}" for number in range(2000)]
WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.sampled_from([0.01, 0.5, 1.0, 3.0, 9.0]), min_size=2)


def named(weights, *, alias="it", sessions=SESSIONS[:300]):
    """session -> lora_id, of an alias with these weights; no two routers need agree on anything for it."""
    fleet = RouterFleet(
        1,
        FLEET.replicas,
        MappingProxyType({name: an_adapter(name) for name in weights}),
        MappingProxyType({alias: an_alias(alias, weights)}),
    )
    return {
        session: resolve(
            fleet, model=alias, lora_id=None, visible=lambda _: True, rng=Random(), session=session
        ).adapter.lora_id
        for session in sessions
    }


def test_sessions_are_shared_by_weight_and_each_keeps_its_target():
    found = named({"a": 6.0, "b": 3.0, "c": 1.0}, sessions=SESSIONS)
    assert found == named({"c": 0.1, "b": 0.3, "a": 0.6}, sessions=SESSIONS)
    shares = [sum(lora_id == name for lora_id in found.values()) / len(SESSIONS) for name in "abc"]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.04)


def test_two_aliases_share_their_sessions_independently():
    one, other = (named({"a": 1.0, "b": 1.0}, alias=alias, sessions=SESSIONS) for alias in ("it", "that"))
    assert 0.4 < sum(one[session] == other[session] for session in SESSIONS) / len(SESSIONS) < 0.6


@settings(max_examples=examples(30))
@given(WEIGHTS, st.sampled_from([1.5, 4.0, 100.0]))
def test_a_weight_that_grows_draws_sessions_and_moves_no_other(weights, factor):
    grown = max(weights)
    before, after = named(weights), named(weights | {grown: weights[grown] * factor})
    assert {after[session] for session in before if before[session] != after[session]} <= {grown}


@settings(max_examples=examples(30))
@given(WEIGHTS)
def test_a_target_that_leaves_moves_only_its_own_sessions(weights):
    gone = max(weights)
    before, after = named(weights), named({name: weight for name, weight in weights.items() if name != gone})
    assert {before[session] for session in before if before[session] != after[session]} <= {gone}


def test_a_rollouts_sessions_move_once_and_as_many_as_its_step_says():
    before = dict.fromkeys(SESSIONS, "old")
    for share in (0.05, 0.25, 0.5, 0.9):
        after = named({"old": 1 - share, "new": share}, sessions=SESSIONS)
        assert all(after[session] == "new" for session in SESSIONS if before[session] == "new")
        assert sum(name == "new" for name in after.values()) / len(SESSIONS) == pytest.approx(share, abs=0.04)
        before = after


@pytest.mark.parametrize(
    ("model", "lora_id"),
    [(7, None), ("tiny", ["sql/v1"]), (None, None), ("org:big/7B", "sql/v1"), ("big/v1", "sql/v1"), ("sql", "big/v1")],
)
def test_a_request_that_contradicts_itself_is_a_bad_body(model, lora_id):
    with pytest.raises(BadBody):
        resolved(model, lora_id)


def test_an_alias_may_stand_beside_what_it_names_and_nothing_that_does_not_exist_may():
    assert resolved("sql", "sql/v1")[1] == "sql/v1"
    assert resolved("tiny:sql", "sql/v1")[1] == "sql/v1"
    for model in ("absent/v1", "secret/v1", "secret", "org:big/7B:absent"):
        with pytest.raises(ModelNotFound):
            resolved(model, "sql/v1")


def with_adapters(*adapters, aliases=()):
    return RouterFleet(
        1,
        FLEET.replicas,
        MappingProxyType({a.lora_id: a for a in adapters}),
        MappingProxyType({alias.name: alias for alias in aliases}),
    )


def named_in(fleet, model=None, lora_id=None):
    target = resolve(fleet, model=model, lora_id=lora_id, visible=lambda a: a.tenants is None, rng=Random(1))
    return target.adapter.lora_id if target.adapter else None, target.base_model, target.asked


@pytest.mark.parametrize("name", ["m@3", "m:active", "m:eval@3", "team-a/m:eval@3", "tiny:active", "m:a:b@c"])
def test_a_trainers_name_is_found_as_it_is_also_behind_a_base_models(name):
    fleet = with_adapters(an_adapter(name), an_adapter("active"), an_adapter("m"))
    assert named_in(fleet, name) == (name, "tiny", name)
    assert named_in(fleet, lora_id=name) == (name, "tiny", name)
    assert named_in(fleet, f"tiny:{name}") == (name, "tiny", f"tiny:{name}")
    assert named_in(fleet, "tiny", name) == (name, "tiny", "tiny")


def test_a_whole_name_keeps_its_meaning_whichever_base_models_are_served():
    names = ("active", "m:active")
    for model in ("tiny", "m"):
        replicas = MappingProxyType({"w0": a_replica("w0", base_model=model)})
        adapters = MappingProxyType({name: an_adapter(name, None) for name in names})
        assert named_in(RouterFleet(1, replicas, adapters), "m:active")[0] == "m:active"


def a_version(name, digest, tenants=None):
    return CatalogAdapter(lora_id=name, base_model="tiny", digest=digest * 64, tenants=tenants)


VERSIONS = with_adapters(
    a_version("m@3/v1", "1"),
    a_version("m@3/v2", "2"),
    a_version("m@3/v3", "3", tenants=("acme",)),
    a_version("plain", "4"),
    a_version("other/v1", "5"),
    aliases=[an_alias("m@3", {"m@3/v2": 1.0}), an_alias("both", {"plain": 1.0, "other/v1": 9.0})],
)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("m@3", "m@3/v2"),
        (f"m@3@{'1' * 12}", "m@3/v1"),
        (f"m@3@{'2' * 12}", "m@3/v2"),
        (f"tiny:m@3@{'1' * 12}", "m@3/v1"),
        (f"m@3/v1@{'1' * 12}", "m@3/v1"),
        (f"plain@{'4' * 12}", "plain"),
        (f"both@{'4' * 12}", "plain"),
        (f"other@{'5' * 12}", "other/v1"),
    ],
)
def test_a_version_is_asked_for_by_its_digest_while_it_is_kept(model, found):
    assert named_in(VERSIONS, model) == (found, "tiny", model)
    assert named_in(VERSIONS, "tiny", model.removeprefix("tiny:"))[0] == found
    assert named_in(VERSIONS, model, model.removeprefix("tiny:"))[0] == found
    if model != "m@3":
        assert named_in(VERSIONS, model.rpartition("@")[0], model.removeprefix("tiny:"))[0] == found


@pytest.mark.parametrize(
    ("model", "current"),
    [(f"m@3@{'3' * 12}", f"m@3/v2@{'2' * 12}"), (f"plain@{'1' * 12}", f"plain@{'4' * 12}"), (f"both@{'1' * 12}", "or")],
)
def test_a_version_that_is_not_kept_is_unknown_and_the_error_names_the_current_one(model, current):
    for asked in ({"model": model}, {"model": f"tiny:{model}"}, {"lora_id": model}):
        with pytest.raises(ModelNotFound, match="is not kept") as refused:
            named_in(VERSIONS, **asked)
        assert current in str(refused.value)


def test_a_request_for_a_version_never_gets_the_bytes_that_replaced_it_while_it_waited():
    before, after = a_version("plain", "4"), a_version("plain", "6")
    model = f"plain@{'4' * 12}"
    exact = resolve(VERSIONS, model=model, lora_id=None, visible=lambda _: True, rng=Random(0))
    moving = resolve(VERSIONS, model="plain", lora_id=None, visible=lambda _: True, rng=Random(0))
    assert exact.with_adapter(replace(before, priority=1)).adapter.priority == 1
    assert moving.with_adapter(after).adapter is after
    with pytest.raises(ModelNotFound, match="has other bytes now: plain@666666666666"):
        exact.with_adapter(after)


FOLDERS = with_adapters(
    replace(an_adapter("sql/v1"), source="/models/lora/sql"),
    replace(an_adapter("legal/v1", tenants=("acme",)), source="file:///models/lora/le%20gal"),
    replace(an_adapter("old/v1"), source="/models/lora/moved"),
    replace(an_adapter("new/v1"), source="/models/lora/moved/", digest="b" * 64, engine_name=None),
    replace(an_adapter("hub/v1"), source="hf://models/lora"),
)


@pytest.mark.parametrize("path", ["/models/lora/sql", "/models/lora/sql/", "/models//lora/./sql"])
def test_a_folder_names_the_adapter_that_was_registered_from_it(path):
    assert named_in(FOLDERS, "tiny", path) == ("sql/v1", "tiny", "tiny")
    assert named_in(FOLDERS, path) == ("sql/v1", "tiny", path)


@pytest.mark.parametrize("path", ["/models/lora/le gal", "/models/lora", "/models/lora/sql/..", "/"])
def test_the_folder_of_a_hidden_adapter_or_of_none_names_nothing(path):
    with pytest.raises(ModelNotFound):
        named_in(FOLDERS, "tiny", path)


def test_a_tenant_names_its_own_adapter_by_the_folder_in_a_file_reference():
    target = resolve(FOLDERS, model=None, lora_id="/models/lora/le gal", visible=lambda _adapter: True, rng=Random(1))
    assert target.adapter is FOLDERS.adapters["legal/v1"]


def test_a_folder_of_adapters_with_different_bytes_names_none_and_the_error_names_them():
    with pytest.raises(BadBody, match="new/v1, old/v1; name one of them"):
        named_in(FOLDERS, lora_id="/models/lora/moved")


def test_a_quarantined_adapter_says_why():
    with pytest.raises(AdapterFailed, match="rank 512"):
        resolved("broken/v1")


@pytest.mark.parametrize("model", ["hidden", "hidden:x/v1", "hidden:sql/v1"])
def test_a_base_model_that_only_a_hidden_adapter_tells_of_does_not_exist(model):
    adapters = {**FLEET.adapters, "far/v1": an_adapter("far/v1", "hidden", tenants=("acme",))}
    fleet = RouterFleet(1, FLEET.replicas, MappingProxyType(adapters))

    def said(name):
        with pytest.raises(ModelNotFound) as refused:
            resolve(fleet, model=name, lora_id=None, visible=lambda a: a.tenants is None, rng=Random(0))
        return str(refused.value)

    assert said(model) == said(model.replace("hidden", "absent")).replace("absent", "hidden")
    with pytest.raises(BadBody) as missing:
        resolve(fleet, model=None, lora_id=None, visible=lambda a: a.tenants is None, rng=Random(0))
    assert "hidden" not in str(missing.value)
    assert resolve(fleet, model="hidden", lora_id=None, visible=lambda _: True, rng=Random(0)).base_model == "hidden"


TEAM = RouterFleet(
    replicas=FLEET.replicas,
    adapters=MappingProxyType(
        {
            name: an_adapter(name)
            for name in ("policy/v1", "team/policy/v1", "team/policy/v2", "team/tiny/v1", "team/org:big/7B/v1")
        }
    ),
    aliases=MappingProxyType(
        {
            "policy": an_alias("policy", {"policy/v1": 1.0}),
            "team/policy": an_alias("team/policy", {"team/policy/v2": 1.0}),
            "team/tiny": an_alias("team/tiny", {"team/tiny/v1": 1.0}),
        }
    ),
)


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("policy", "team/policy"),
        ("policy/v1", "team/policy/v1"),
        ("team/policy", "team/policy"),
        ("other", "other"),
        ("tiny", "tiny"),
        ("tiny:policy", "tiny:team/policy"),
        ("policy@" + "a" * 12, "team/policy@" + "a" * 12),
        ("other@" + "a" * 12, "other@" + "a" * 12),
        ("org:big/7B:policy", "org:big/7B:team/policy"),
    ],
)
def test_name_means_the_one_of_its_namespace_first(name, whole):
    assert whole_name(TEAM, "team", name, may_shadow_base=False) == whole


def test_base_models_name_means_what_shadows_it_for_those_who_may_alone():
    assert whole_name(TEAM, "team", "tiny", may_shadow_base=True) == "team/tiny"
    assert whole_name(TEAM, "team", "tiny", may_shadow_base=False) == "tiny"
    assert whole_name(TEAM, "elsewhere", "tiny", may_shadow_base=True) == "tiny"
