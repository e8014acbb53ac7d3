"""Names of adapters: which are allowed, and that none of them can be taken for a version or another adapter's key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafleet.identity import asked_version, engine_name, lora_id_of
from orchestrator.configmaps.tables import KNOWN, row_shard
from orchestrator.model.names import checked_lora_id
from orchestrator.model.snapshot import foreign_key
from orchestrator.store.tables import TOMBSTONES, tombstone_key, tombstone_lora_id

DIGEST = "0123456789ab" * 5 + "cdef"
NAMES = st.text("ab0_-./:@", min_size=1, max_size=12)


def is_allowed(name: str) -> bool:
    try:
        return checked_lora_id(name) == name
    except ValueError:
        return False


@pytest.mark.parametrize("name", ["m@3", "m:active", "m:eval@3", "team-a/m:eval@3", "a@b@c", "m@012345678901a", "x/v1"])
def test_names_of_trainers_are_lora_ids(name):
    assert is_allowed(name)


@pytest.mark.parametrize(
    "name",
    ["", ":m", "@m", "m:", "m@", "a/:b", "a:/b", "a/b@", "m@0123456789ab", "m:eval@aaaaaaaaaaaa", "a/..", "m:/retry"],
)
def test_names_that_would_be_read_as_something_else_are_not(name):
    assert not is_allowed(name)


@given(NAMES.filter(is_allowed))
def test_a_lora_id_comes_back_from_every_key_that_is_made_of_it(name):
    assert lora_id_of(name) == name
    assert asked_version(engine_name(name, DIGEST)) == (name, DIGEST[:12])
    assert tombstone_lora_id(tombstone_key(name, DIGEST)) == name
    assert row_shard(TOMBSTONES.name, tombstone_key(name, DIGEST)) == row_shard(KNOWN.name, name)


@given(st.text("ab0:@/", min_size=1, max_size=12))
def test_the_key_of_another_clients_adapter_is_never_a_lora_id(name):
    for called in (name, engine_name(name, DIGEST)):
        assert not is_allowed(foreign_key(called))
