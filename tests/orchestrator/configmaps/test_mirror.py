"""Watch events and responses to our own writes may come in any order; the newer state counts."""

from typing import Any

from orchestrator.configmaps.mirror import ConfigMapMirror, DoubtReason
from orchestrator.configmaps.objects import KIND


def config_map(version: int, **data: str) -> dict[str, Any]:
    meta = {"name": "m", "uid": "u", "resourceVersion": str(version), "labels": {}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}


def test_a_late_response_to_our_write_does_not_undo_a_deletion() -> None:
    mirror = ConfigMapMirror()
    mirror.on_event("ADDED", config_map(5))
    mirror.on_event("DELETED", config_map(7))
    mirror.record_object(config_map(6, ours="1"))
    assert mirror.doubtful == {"m": DoubtReason.DELETED}


def test_a_late_response_to_our_write_does_not_undo_an_edit() -> None:
    mirror = ConfigMapMirror()
    mirror.on_event("ADDED", config_map(5))
    mirror.on_event("MODIFIED", config_map(7, theirs="1"))
    mirror.record_object(config_map(6, ours="1"))
    assert mirror.objects["m"]["data"] == {"theirs": "1"}
    assert mirror.changed == {"m"}


def test_the_newest_response_counts() -> None:
    mirror = ConfigMapMirror()
    mirror.on_event("ADDED", config_map(5))
    mirror.add_doubt("m")
    mirror.record_object(config_map(6, ours="1"))
    assert mirror.objects["m"]["data"] == {"ours": "1"}
    assert mirror.doubtful == {}


def test_after_a_restore_lower_versions_count_once_listed() -> None:
    mirror = ConfigMapMirror()
    mirror.on_event("ADDED", config_map(500))
    mirror.on_list([config_map(3, old="1")])
    assert mirror.doubtful == {"m": DoubtReason.MISSING}
    mirror.record_object(config_map(3, old="1"))
    assert mirror.objects["m"]["data"] == {"old": "1"}


def test_a_late_watch_event_does_not_revive_a_deleted_object() -> None:
    mirror = ConfigMapMirror()
    mirror.record_object(config_map(5))
    mirror.forget("m")
    mirror.changed.clear()
    mirror.on_event("MODIFIED", config_map(5))
    assert (mirror.objects, mirror.changed) == ({}, set())
    mirror.on_event("DELETED", config_map(6))
    mirror.on_event("ADDED", config_map(7) | {"data": {"anew": "1"}})
    assert mirror.objects["m"]["data"] == {"anew": "1"}


def test_a_restored_cluster_has_a_deleted_object_again() -> None:
    mirror = ConfigMapMirror()
    mirror.record_object(config_map(5))
    mirror.forget("m")
    mirror.on_list([config_map(3, old="1")])
    assert mirror.objects["m"]["data"] == {"old": "1"}


def test_two_writes_of_one_object_at_once_end_in_any_order() -> None:
    mirror = ConfigMapMirror()
    mirror.on_event("ADDED", config_map(5))
    mirror.changed.clear()
    first, second = config_map(5, status="1"), config_map(5, text="1")
    one, other = mirror.writing("m", first), mirror.writing("m", second)
    with one:
        other.__enter__()
    mirror.on_event("MODIFIED", config_map(6, text="1"))
    assert mirror.changed == set()
    other.__exit__(None, None, None)
    mirror.on_event("MODIFIED", config_map(7, text="2"))
    assert mirror.changed == {"m"}


def test_our_deletion_of_an_object_takes_no_newer_one_of_its_name() -> None:
    mirror = ConfigMapMirror()
    mirror.on_event("ADDED", config_map(5))
    newer = config_map(8)
    newer["metadata"]["uid"] = "v"
    mirror.on_event("DELETED", config_map(7))
    mirror.on_event("ADDED", newer)
    mirror.forget("m", "u")
    assert mirror.objects["m"]["metadata"]["uid"] == "v"


def test_absence_from_a_list_outweighs_absence_in_a_response() -> None:
    mirror = ConfigMapMirror()
    mirror.on_event("ADDED", config_map(5))
    mirror.add_doubt("m")
    assert mirror.doubtful == {"m": DoubtReason.ASKED}
    mirror.on_list([])
    assert mirror.doubtful == {"m": DoubtReason.MISSING}
    mirror.add_doubt("m")
    assert mirror.doubtful == {"m": DoubtReason.MISSING}


def state(version: int, uid: str) -> dict[str, Any]:
    meta = {"name": "s", "uid": uid, "resourceVersion": str(version), "labels": {KIND: "state"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {}}


def test_state_objects_from_before_the_start_prove_deletions_at_once() -> None:
    mirror = ConfigMapMirror()
    mirror.on_list([state(5, "a")])
    assert mirror.unproven == {}


def test_a_new_state_object_proves_nothing_until_the_watch_reaches_it() -> None:
    proven: list[str] = []
    mirror = ConfigMapMirror(on_proven=proven.append)
    mirror.on_list([state(5, "a")])
    mirror.forget("s")
    mirror.record_object(state(8, "b"))
    mirror.on_event("ADDED", config_map(7))
    assert (list(mirror.unproven), proven) == (["s"], [])
    mirror.on_event("MODIFIED", config_map(9))
    assert (list(mirror.unproven), proven) == ([], ["s"])


def test_a_new_state_object_proves_nothing_while_an_object_is_missing() -> None:
    mirror = ConfigMapMirror()
    mirror.on_list([config_map(4), state(5, "a")])
    mirror.on_list([state(8, "b")])
    assert (list(mirror.doubtful), list(mirror.unproven)) == (["m"], ["s"])
    mirror.forget("m")
    assert mirror.unproven == {}
