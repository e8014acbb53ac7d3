from random import Random
from types import MappingProxyType

import pytest

from router.core.errors import AdapterFailed, BadBody, ModelNotFound
from router.core.fleet import Adapter, Alias, Fleet
from router.core.resolve import resolve
from tests.router.test_policy import a_replica


def an_adapter(lora_id, base_model="tiny", tenants=None, error=None):
    return Adapter(lora_id, base_model, "a" * 64, "file:///x", tenants, error)


FLEET = Fleet(
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
            "sql": Alias("sql", (("sql/v1", 1.0), ("secret/v1", 1.0))),
            "secret": Alias("secret", (("secret/v1", 1.0),)),
            "off": Alias("off", (("sql/v1", 0.0),)),
        }
    ),
)


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


@pytest.mark.parametrize(
    ("model", "lora_id"),
    [
        ("nope", None),
        ("tiny", "nope"),
        ("gpt-4", "sql/v1"),
        ("org:big/7B:sql/v1", None),
        ("tiny:big/v1", None),
        ("nope:sql/v1", None),
        ("sql/v1@aaaaaaaaaaaa", None),
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


@pytest.mark.parametrize(
    ("model", "lora_id"), [(7, None), ("tiny", ["sql/v1"]), (None, None), ("org:big/7B", "sql/v1")]
)
def test_a_request_that_contradicts_itself_is_a_bad_body(model, lora_id):
    with pytest.raises(BadBody):
        resolved(model, lora_id)


def test_a_quarantined_adapter_says_why():
    with pytest.raises(AdapterFailed, match="rank 512"):
        resolved("broken/v1")


@pytest.mark.parametrize("model", ["hidden", "hidden:x/v1", "hidden:sql/v1"])
def test_a_base_model_that_only_a_hidden_adapter_tells_of_does_not_exist(model):
    adapters = {**FLEET.adapters, "far/v1": an_adapter("far/v1", "hidden", tenants=("acme",))}
    fleet = Fleet(1, FLEET.replicas, MappingProxyType(adapters))

    def said(name):
        with pytest.raises(ModelNotFound) as refused:
            resolve(fleet, model=name, lora_id=None, visible=lambda a: a.tenants is None, rng=Random(0))
        return str(refused.value)

    assert said(model) == said(model.replace("hidden", "absent")).replace("absent", "hidden")
    with pytest.raises(BadBody) as missing:
        resolve(fleet, model=None, lora_id=None, visible=lambda a: a.tenants is None, rng=Random(0))
    assert "hidden" not in str(missing.value)
    assert resolve(fleet, model="hidden", lora_id=None, visible=lambda _: True, rng=Random(0)).base_model == "hidden"
