"""The tables in ConfigMaps: each is kept, and objects of another layout are refused."""

import pytest

from orchestrator.configmaps.mirror import ConfigMapMirror
from orchestrator.configmaps.objects import TABLE_OF_KIND, new_object
from orchestrator.configmaps.tables import STATE_TABLES, StoreTables, state_objects, tables_from_objects
from orchestrator.core.errors import StoreError
from orchestrator.store.tables import COUNTERS, PAUSES, TABLES, TOMBSTONES, StoreChange, Tombstone, tombstone_key
from tests.orchestrator.store.test_backend import PAUSE


def test_every_stored_table_is_one_of_people_or_state_of_our_own():
    assert {table.name for table in TABLE_OF_KIND.values()} | STATE_TABLES.keys() == TABLES.keys() | {"known"}


def test_rows_of_our_own_state_are_read_back_from_its_objects():
    tables = StoreTables("fleet")
    stone = tombstone_key("sql/v1", "d" * 64)
    tables.apply_changes(
        [
            StoreChange(COUNTERS.name, "epoch", 7),
            StoreChange(PAUSES.name, PAUSE.scope.key, PAUSE),
            StoreChange(TOMBSTONES.name, stone, Tombstone("d" * 64, 5.0)),
        ]
    )
    mirror = ConfigMapMirror()
    for table, shard in state_objects():
        name = tables.state_name(table, shard)
        layout = {"layout": "1"} if table == COUNTERS.name else {}
        mirror.objects[name] = new_object("fleet", "state", name) | {"data": tables.state_data(table, shard) | layout}
    again = tables_from_objects(mirror, "fleet").intent()
    assert dict(again.of(COUNTERS)) == {"epoch": 7}
    assert dict(again.of(PAUSES)) == {PAUSE.scope.key: PAUSE}
    assert dict(again.of(TOMBSTONES)) == {stone: Tombstone("d" * 64, 5.0)}


@pytest.mark.parametrize("data", [{"layout": "2"}, {"epoch": "7", "schema": "1"}])
def test_configmaps_of_another_layout_are_refused_with_what_to_do(data):
    mirror = ConfigMapMirror()
    mirror.objects["fleet-counters"] = new_object("fleet", "state", "fleet-counters") | {"data": data}
    with pytest.raises(StoreError, match=r"reads layout 1: start the version that wrote them; .*lorafleet import"):
        tables_from_objects(mirror, "fleet")
