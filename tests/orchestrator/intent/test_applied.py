"""A file that a person wrote, applied: what it leaves alone stays, also under a prune."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from orchestrator.core.errors import OrchestratorRequestError
from orchestrator.intent.applied import import_of_file
from orchestrator.intent.record import differences
from orchestrator.model.apply import ApplyRequest
from orchestrator.model.record import RecordChange
from orchestrator.model.served_names import AliasTarget, NameVersion, Publication, PublishedSpec, ServedName
from orchestrator.store.store import IntentStore
from tests.orchestrator.doubles import digest_of
from tests.registered import registered


def filled_store() -> IntentStore:
    """Two adapters, an alias of one, and a published name: a version in use, and one whose publish is in progress."""
    store = IntentStore(":memory:")
    with store.together():
        for name in ("plain/v1", "other/v1", "run/v1", "run/v2"):
            store.put_adapter(registered(name, source=f"s3://b/{name}", base_model="tiny", digest=digest_of(name)))
        store.put_name(ServedName(name="plain", targets=(AliasTarget("plain/v1", 1.0),)))
        versions = (
            NameVersion(lora_id="run/v1", number=1, digest=digest_of("run/v1"), registered_at=1.0, pointed_at=1.0),
            NameVersion(lora_id="run/v2", number=2, digest=digest_of("run/v2"), registered_at=2.0),
        )
        published = Publication(spec=PublishedSpec(tenant="acme"), next_number=3, versions=versions)
        store.put_name(ServedName(name="run", targets=(AliasTarget("run/v1", 1.0),), published=published))
    return store


def changes_of(store: IntentStore, file: dict[str, Any], *, prune: bool = False) -> list[RecordChange]:
    """What applying the file would change."""
    request, blocked = import_of_file(ApplyRequest.model_validate({"file": file, "prune": prune}), store)
    return [*blocked, *([] if request is None else differences(store, request))]


def named(changes: list[RecordChange]) -> list[tuple[str, str, str]]:
    return [(change.change, change.subject, change.name) for change in changes]


PLAIN = {"lora_id": "plain/v1", "source": "s3://b/plain/v1"}
ALIAS = {"name": "plain", "targets": [{"lora_id": "plain/v1"}]}


def test_a_prune_of_adapters_deletes_those_alone_and_no_version_of_a_published_name() -> None:
    assert named(changes_of(filled_store(), {"adapters": [PLAIN]}, prune=True)) == [("remove", "adapter", "other/v1")]


def test_a_prune_of_aliases_deletes_no_published_name() -> None:
    assert named(changes_of(filled_store(), {"aliases": []}, prune=True)) == [("remove", "alias", "plain")]


def test_a_prune_of_published_names_deletes_no_plain_alias() -> None:
    (change,) = changes_of(filled_store(), {"published": []}, prune=True)
    assert (change.change, change.name, change.is_published) == ("remove", "run", True)


def test_targets_of_a_published_name_in_a_file_leave_its_versions_to_the_published_section() -> None:
    run = {"name": "run", "targets": [{"lora_id": "run/v1"}]}
    assert named(changes_of(filled_store(), {"aliases": [run]}, prune=True)) == [("remove", "alias", "plain")]
    (plain, gone) = changes_of(filled_store(), {"aliases": [run], "published": []}, prune=True)
    assert (plain.name, gone.name, gone.change, gone.is_published) == ("plain", "run", "remove", True)


def test_a_name_that_is_written_twice_is_refused() -> None:
    for section in ("aliases", "published"):
        row = {"name": "run"} | ({"targets": [{"lora_id": "run/v1"}]} if section == "aliases" else {})
        with pytest.raises(OrchestratorRequestError, match="'run' is in the file twice"):
            changes_of(filled_store(), {section: [row, row]})


def test_settings_of_a_name_change_and_its_versions_stay_as_they_are() -> None:
    (change,) = changes_of(filled_store(), {"published": [{"name": "run", "keep_versions": 7}]})
    assert change.fields == {"keep_versions": [None, 7]}
    assert changes_of(filled_store(), {"published": [{"name": "run", "replicas": "all"}]}, prune=True) == []


def test_an_adapter_that_is_blocked_is_not_pruned() -> None:
    moved = PLAIN | {"source": "s3://b/elsewhere"}
    found = changes_of(filled_store(), {"adapters": [moved]}, prune=True)
    assert named(found) == [("blocked", "adapter", "plain/v1"), ("remove", "adapter", "other/v1")]
    same = moved | {"digest": digest_of("plain/v1")}
    assert changes_of(filled_store(), {"adapters": [same]}) == [], "the digest says that the bytes are the same"


def test_a_changed_secret_is_blocked_not_ignored() -> None:
    store = filled_store()
    with store.together():
        store.put_adapter(registered("hub/v1", source="hf://a/b", secret="old/key"))
    spec = {"lora_id": "hub/v1", "source": "hf://a/b"}
    (change,) = changes_of(store, {"adapters": [spec | {"secretRef": {"name": "new", "key": "key"}}]})
    assert (change.change, "secret_ref is old/key here" in change.reason) == ("blocked", True)
    assert changes_of(store, {"adapters": [spec | {"secretRef": {"name": "old", "key": "key"}}]}) == []
    assert changes_of(store, {"adapters": [spec]}) == []


SECTIONS = st.fixed_dictionaries(
    {},
    optional={
        "adapters": st.sampled_from([[], [PLAIN], [PLAIN | {"policy": {"priority": 2}}]]),
        "aliases": st.sampled_from([[], [ALIAS]]),
        "published": st.sampled_from([[], [{"name": "run", "max_staleness_s": 9.0}]]),
        "policy": st.sampled_from([{}, {"loading": "eager"}]),
    },
).filter(bool)


@given(SECTIONS)
def test_without_prune_nothing_is_deleted_and_no_section_changes_another(file: dict[str, Any]) -> None:
    for change in changes_of(filled_store(), file):
        assert change.change == "change"
        section = {"adapter": "adapters", "policy": "policy"}.get(
            change.subject, "published" if change.is_published else "aliases"
        )
        assert section in file


def test_an_unknown_field_and_an_empty_file_are_refused() -> None:
    for file in (
        {"adapters": [PLAIN | {"polcy": {}}]},
        {"policy": {"lodaing": "eager"}},
        {},
        {"aliases": [ALIAS | {"place_s": 0}]},
    ):
        with pytest.raises(ValidationError):
            ApplyRequest.model_validate({"file": file})
