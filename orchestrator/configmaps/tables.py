"""The store's rows, and their form in ConfigMaps.

People's tables (adapters, names, policy) have an object for each row, see `objects`. All other tables are state of our
own: one object for a table, or sixteen where its rows are many.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import GenericAlias
from typing import Any, TypeVar

import msgspec

from lorafleet.kube.client import Json
from orchestrator.configmaps.mirror import ConfigMapMirror
from orchestrator.configmaps.objects import (
    TABLE_OF_KIND,
    adapter_object_name,
    age_order,
    alias_object_name,
    uid_of,
)
from orchestrator.core.errors import StoreError
from orchestrator.store.tables import (
    ADAPTERS,
    COUNTERS,
    NAMES,
    TABLES,
    TOMBSTONES,
    StoreChange,
    StoredRows,
    Table,
    backup_rows,
    tombstone_lora_id,
)

R = TypeVar("R")

LAYOUT = 1
"""Form of the objects. New stored tables and new fields of their rows leave it as it is."""
_SHARDS = "0123456789abcdef"


class RememberedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """The memory of an adapter's object, by which its deletion is noticed even if no orchestrator ran then."""

    object_name: str
    uid: str
    digest: str | None


KNOWN: Table[RememberedAdapter] = Table("known", "remembered adapter", RememberedAdapter, is_backed_up=False)

STATE_TABLES: Mapping[str, Table[Any]] = {
    table.name: table for table in (*TABLES.values(), KNOWN) if table not in TABLE_OF_KIND.values()
}
"""Tables of our own state."""
_SHARDED = {TOMBSTONES.name: "adapters", KNOWN.name: "adapters"}
"""table -> name of its sixteen objects: one ConfigMap has room for 1 MiB."""


@lru_cache(1 << 17)
def shard_of(lora_id: str) -> str:
    """The shard of an adapter: one hex digit."""
    return hashlib.sha256(lora_id.encode()).hexdigest()[0]


def row_shard(table: str, key: str) -> str:
    """The shard of a row of our own state; "" where one object holds the whole table.

    A tombstone is in the shard of its adapter, whose object is deleted after the tombstone is written.
    """
    if table not in _SHARDED:
        return ""
    return shard_of(tombstone_lora_id(key) if table == TOMBSTONES.name else key)


@dataclass(slots=True)
class StoreTables:
    """The rows, and where they are. `object_names`: (table, key) of a row of people -> name of its object."""

    fleet: str
    rows: StoredRows = field(default_factory=StoredRows)
    object_names: dict[tuple[str, str], str] = field(default_factory=dict)

    def object_name(self, table: str, key: str) -> str:
        """Name of the row's object, or of the one to be created for it."""
        usual = {ADAPTERS.name: adapter_object_name, NAMES.name: alias_object_name}.get(table)
        return self.object_names.get((table, key)) or (f"{self.fleet}-{table}" if usual is None else usual(key))

    def state_name(self, table: str, shard: str = "") -> str:
        """Name of the object that has this shard of a table of our own state."""
        return "-".join(filter(None, (self.fleet, _SHARDED.get(table, table), shard)))

    def has_row(self, row: tuple[str, str]) -> bool:
        """Whether there is this row (table, key)."""
        return row[1] in self.rows.of(TABLES[row[0]])

    def apply_changes(self, changes: Iterable[StoreChange]) -> None:
        """Apply changes to the rows; a new row of people gets an object name."""
        for change in changes:
            self.rows.apply([change])
            row = change.table, change.key
            if change.row is not None and change.table not in STATE_TABLES:
                self.object_names.setdefault(row, self.object_name(*row))

    def intent(self) -> StoredRows:
        """A copy of the stored rows, without tombstones of registered bytes."""
        copy = StoredRows({name: self.rows.of(table) for name, table in TABLES.items()})
        adapters, stones = copy.of(ADAPTERS), copy.of(TOMBSTONES)
        for key, stone in self.rows.of(TOMBSTONES).items():
            adapter = adapters.get(tombstone_lora_id(key))
            if adapter is not None and not adapter.is_deleting and adapter.digest == stone.digest:
                del stones[key]
        return copy

    def state_data(self, table: str, shard: str) -> dict[str, str]:
        """The data of a state object: one key for each of its tables, with the rows of its shard."""
        name = self.state_name(table, shard)
        return {
            f"{other.name}.json": msgspec.json.encode(
                {
                    key: row
                    for key, row in self.rows.of(other).items()
                    if not shard or row_shard(other.name, key) == shard
                }
            ).decode()
            for other in STATE_TABLES.values()
            if self.state_name(other.name, shard) == name
        }

    def backup(self) -> "StoreTables":
        """The tables as a backup has them: all but counters, which a restored fleet goes on with."""
        rows = backup_rows(self.rows)
        rows.of(COUNTERS).clear()
        return StoreTables(self.fleet, rows, self.object_names)


def state_objects() -> Iterator[tuple[str, str]]:
    """(table, shard) of every table of our own state; tables that share objects have one each."""
    for table in STATE_TABLES:
        for shard in _SHARDS if table in _SHARDED else ("",):
            yield table, shard


def tables_from_objects(mirror: ConfigMapMirror, fleet: str) -> StoreTables:
    """The tables as the accepted records in the objects have them; the oldest object of a row counts.

    Raises StoreError.
    """
    tables = StoreTables(fleet)
    require_layout(mirror.objects.get(tables.state_name(COUNTERS.name)))
    for name in sorted(mirror.people_object_names(), key=lambda name: age_order(mirror.objects[name])):
        record = mirror.accepted_record(name)
        if record is None or record.subject in tables.object_names:  # or an older object holds the row
            continue
        tables.object_names[record.subject] = name
        tables.rows.apply([StoreChange(*record.subject, record.row)])
    for table, shard in state_objects():
        found = mirror.objects.get(tables.state_name(table, shard))
        rows = remembered_in_object(found) if table == KNOWN.name else state_rows(found, STATE_TABLES[table])
        tables.rows.of(STATE_TABLES[table]).update(rows)
    return tables


def state_rows(found: Json | None, table: Table[R]) -> dict[str, R]:
    """The rows of the table in a state object; none without the object. Raises StoreError for unreadable data."""
    text = ((found or {}).get("data") or {}).get(f"{table.name}.json") or "{}"
    try:
        rows: dict[str, R] = msgspec.json.decode(text, type=GenericAlias(dict, (str, table.row)))
    except msgspec.MsgspecError as exc:
        name = (found or {})["metadata"]["name"]
        raise StoreError(f"ConfigMap {name}: {table.name}.json cannot be read ({exc}); delete that key") from exc
    return rows


def remembered_in_object(found: Json | None) -> dict[str, RememberedAdapter]:
    """The adapters that a shard's object remembers; none from a copied or restored object, whose uid differs.

    Raises StoreError for unreadable data.
    """
    is_proof = found is not None and (found.get("data") or {}).get("uid") == uid_of(found)
    return state_rows(found, KNOWN) if is_proof else {}


def require_layout(counters: Json | None) -> None:
    """Raise StoreError unless the object of the counters, if there is one, has our layout."""
    data = (counters or {}).get("data")
    if data and (layout := data.get("layout", "unknown")) != str(LAYOUT):
        raise StoreError(
            f"the ConfigMaps of this fleet have layout {layout}, and this version reads layout {LAYOUT}: start the"
            " version that wrote them; or save the fleet with that version's `lorafleet export FILE`, delete the"
            " ConfigMaps of kind state, and run `lorafleet import FILE`"
        )
