"""No wire type changes in a way that breaks a service of the last release, unless that was agreed on."""

import copy
import json
import re

import pytest

from orchestrator.model.catalog import Catalog, CatalogAlias
from orchestrator.model.changes import reader_of
from orchestrator.model.served_names import AliasTarget
from router.fleet.catalog import read_catalog, router_catalog
from tests.wire.agreed import ADDED_CALLS, AGREED
from tests.wire.old_peers import with_unknown_fields
from tests.wire.session import CONVERSATIONS, load_session, schema_faults
from tests.wire.wire_types import WireSnapshot, changes, load_snapshot, todays_snapshot

ADVICE = """
Services of the last release and of this one run together during an upgrade, and this breaks one of them. Instead:
1. add the new form as an optional field beside the old one, serve both, and say so in CHANGELOG.md;
2. make a release, in which both forms work;
3. then remove the old form, and add its key to tests/wire/agreed.py with the reason why the release before can do
   without it.
Before the first release is tagged there is no such service: `python -m tests.wire.record` records the wire as it is.
"""

MODEL = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
OLD = WireSnapshot({"workers": 1}, {"Thing": MODEL})


def with_change(change) -> WireSnapshot:
    types = {"Thing": copy.deepcopy(MODEL)}
    change(types)
    return WireSnapshot({"workers": 1}, types)


def test_no_field_of_the_last_release_is_removed_changed_or_newly_required() -> None:
    found = [change for change in changes(load_snapshot(), todays_snapshot()) if change.key not in AGREED]
    assert not found, "\n".join(map(str, found)) + ADVICE


def test_every_agreed_change_is_one() -> None:
    found = {change.key for change in changes(load_snapshot(), todays_snapshot())}
    assert AGREED.keys() <= found, f"no change any more, remove from agreed.py: {sorted(AGREED.keys() - found)}"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda types: types["Thing"]["properties"].pop("b"), ["Thing.b: this field is gone"]),
        (lambda types: types["Thing"]["required"].append("b"), ["Thing.b: this field is newly required"]),
        (
            lambda types: types["Thing"]["properties"].update(b={"type": "string"}),
            ['Thing.b: was {"type": "integer"}, is {"type": "string"}'],
        ),
        (lambda types: types.pop("Thing"), ["Thing: this type is gone"]),
        (
            lambda types: types["Thing"].update(additionalProperties=False),
            ["Thing: unknown fields are newly refused"],
        ),
        (lambda types: types["Thing"]["properties"].update(c={"type": "string"}), []),
        (lambda types: types.update(Other=MODEL), []),
        (lambda types: types["Thing"]["required"].remove("a"), []),
    ],
    ids=["removed", "required", "changed", "type gone", "unknown refused", "added", "type added", "no longer required"],
)
def test_each_kind_of_change_is_told_and_an_addition_is_none(change, told) -> None:
    assert [str(one) for one in changes(OLD, with_change(change))] == told


def test_another_wire_version_is_a_change() -> None:
    newer = WireSnapshot({"workers": 2}, OLD.types)
    assert [str(one) for one in changes(OLD, newer)] == ["WIRE.workers: was 1, is 2"]


def test_types_between_services_ignore_unknown_fields() -> None:
    """All but AliasTarget, which people write, too: its reader ignores them, as the next test shows."""
    types = todays_snapshot().types
    routes = [route for routes in CONVERSATIONS.values() for route in routes]
    waiting = {name for route in routes for name in (route.asks, route.answers) if name}
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        waiting |= set(re.findall(r"#/\$defs/(\w+)", json.dumps(types[name]))) - seen
    refusing = {name for name in seen if types[name].get("additionalProperties") is False}
    assert refusing == {"AliasTarget"}, "these refuse what a later release adds to them"
    assert "CatalogAdapter" in seen


def test_a_router_reads_a_catalog_whose_every_object_has_an_unknown_field() -> None:
    alias = CatalogAlias(name="sql", targets=(AliasTarget(lora_id="sql/v1", weight=2.0),))
    catalog = Catalog(revision=3, aliases=(alias,))
    content = with_unknown_fields(reader_of(Catalog).dump_python(catalog, mode="json"))
    assert router_catalog(read_catalog(json.dumps(content).encode())).aliases["sql"] == alias


def test_recorded_bodies_are_of_the_recorded_types() -> None:
    snapshot = load_snapshot()
    for exchange in load_session(*CONVERSATIONS):
        route = exchange.route
        bodies = [(route.asks, exchange.asked)] if route.asks else []
        if exchange.status == 200:
            items = exchange.answer if route.is_stream else [exchange.answer]
            bodies += [(route.answers, item) for item in items]
        for name, body in bodies:
            assert list(schema_faults(snapshot, name, body)) == [], exchange


def test_every_call_of_each_conversation_is_recorded_unless_it_was_added_since() -> None:
    for conversation, routes in CONVERSATIONS.items():
        recorded = {exchange.route for exchange in load_session(conversation)}
        assert recorded == {route for route in routes if (route.method, route.path) not in ADDED_CALLS}, conversation


def test_every_added_call_is_one_of_a_conversation() -> None:
    calls = {(route.method, route.path) for routes in CONVERSATIONS.values() for route in routes}
    assert ADDED_CALLS.keys() <= calls, f"no call any more, remove from agreed.py: {ADDED_CALLS.keys() - calls}"
