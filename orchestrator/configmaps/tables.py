"""The store's tables, and their form in ConfigMaps."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from lorafleet.kube.client import Json
from orchestrator.configmaps.mirror import ConfigMapMirror
from orchestrator.configmaps.objects import (
    AdapterRecord,
    NameRecord,
    PolicyRecord,
    adapter_object_name,
    age_order,
    alias_object_name,
    uid_of,
)
from orchestrator.core.errors import StoreError
from orchestrator.core.pauses import PauseLease
from orchestrator.model.policy import PlacementPolicy
from orchestrator.model.served_names import ServedName
from orchestrator.model.snapshot import RegisteredAdapter
from orchestrator.store.backend import StoreChange, StoredIntent, Tombstone, WorkerIntent, tombstone_lora_id

SCHEMA = 1
SHARDS = "0123456789abcdef"


class RememberedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """The memory of an adapter's object, by which its deletion is noticed even if no orchestrator ran then."""

    object_name: str
    uid: str
    digest: str | None


@lru_cache(1 << 17)
def shard_of(lora_id: str) -> str:
    """The shard that remembers the adapter: one hex digit."""
    return hashlib.sha256(lora_id.encode()).hexdigest()[0]


def tombstone_shard(key: str) -> str:
    """The shard of a tombstone: that of its adapter, whose object is deleted after the tombstone is written."""
    return shard_of(tombstone_lora_id(key))


def _is_registered(adapters: Mapping[str, RegisteredAdapter], key: str, stone: Tombstone) -> bool:
    """Whether the deleted bytes are registered again."""
    adapter = adapters.get(tombstone_lora_id(key))
    return adapter is not None and not adapter.is_deleting and adapter.digest == stone.digest


@dataclass(slots=True)
class StoreTables:
    """Rows by table and key.

    object_names  (table, key) -> name of its object
    remembered    lora_id -> memory of its object
    """

    fleet: str
    adapters: dict[str, RegisteredAdapter] = field(default_factory=dict)
    names: dict[str, ServedName] = field(default_factory=dict)
    workers: dict[str, WorkerIntent] = field(default_factory=dict)
    tombstones: dict[str, Tombstone] = field(default_factory=dict)
    pauses: dict[str, PauseLease] = field(default_factory=dict)
    policy: dict[str, PlacementPolicy] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    object_names: dict[tuple[str, str], str] = field(default_factory=dict)
    remembered: dict[str, RememberedAdapter] = field(default_factory=dict)

    def object_name(self, table: str, key: str) -> str:
        """Name of the row's object, or of the one to be created for it."""
        usual = {"adapters": adapter_object_name, "names": alias_object_name}.get(table)
        return self.object_names.get((table, key)) or (f"{self.fleet}-{table}" if usual is None else usual(key))

    def state_name(self, name: str) -> str:
        """Name of a state object of ours."""
        return f"{self.fleet}-{name}"

    def apply_changes(self, changes: Iterable[StoreChange]) -> None:
        """Apply changes to the rows; a new row gets an object name."""
        for change in changes:
            rows: dict[str, Any] = getattr(self, change.table)
            if change.value is None:
                rows.pop(change.key, None)
            else:
                rows[change.key] = change.value
                if change.table in ("adapters", "names", "policy"):
                    self.object_names.setdefault((change.table, change.key), self.object_name(change.table, change.key))

    def stored_intent(self) -> StoredIntent:
        """The tables as stored intent, without tombstones of registered bytes."""
        adapters = dict(self.adapters)
        return StoredIntent(
            adapters=adapters,
            names=dict(self.names),
            workers=dict(self.workers),
            tombstones={
                key: stone for key, stone in self.tombstones.items() if not _is_registered(adapters, key, stone)
            },
            pauses=dict(self.pauses),
            rules=self.policy.get("", PlacementPolicy()),
            counters=dict(self.counters),
        )


def tables_from_objects(mirror: ConfigMapMirror, fleet: str) -> StoreTables:
    """The tables as the accepted records in the objects have them; the oldest object of a row counts.

    Raises StoreError.
    """
    tables = StoreTables(fleet)
    for name in sorted(mirror.people_object_names(), key=lambda name: age_order(mirror.objects[name])):
        row = row_in_record(mirror.accepted_record(name))
        if row is None or row[:2] in tables.object_names:  # nothing is accepted, or an older object holds the row
            continue
        table, key, value = row
        tables.object_names[table, key] = name
        getattr(tables, table)[key] = value
    _read_state(mirror, tables)
    return tables


def row_in_record(record: object) -> tuple[str, str, Any] | None:
    """(table, key, value) of an AdapterRecord, NameRecord or PolicyRecord; None for anything else."""
    match record:
        case AdapterRecord(_, adapter):
            return "adapters", adapter.lora_id, adapter
        case NameRecord(_, name):
            return "names", name.name, name
        case PolicyRecord(_, rules):
            return "policy", "", rules
        case _:
            return None


def counters_in_object(found: Json | None) -> dict[str, int]:
    """The counters `epoch` and `revision` in the ConfigMap; empty without one.

    Raises StoreError for a value that is not a number, and for a schema newer than ours.
    """
    data: Mapping[str, str] = (found or {}).get("data") or {}
    try:
        counters = {name: int(value) for name, value in data.items() if name != "writer"}
    except ValueError as exc:
        raise StoreError(f"ConfigMap of counters: {exc}; delete it, agents and clock make up for it") from exc
    if (schema := counters.pop("schema", SCHEMA)) > SCHEMA:
        raise StoreError(f"the ConfigMaps have schema {schema}, this version knows {SCHEMA}; start the newer version")
    return counters


def remembered_in_object(found: Json | None) -> dict[str, RememberedAdapter]:
    """The adapters that a shard's object remembers; none from a copied or restored object, whose uid differs.

    Raises StoreError for unreadable data.
    """
    data: Mapping[str, str] = (found or {}).get("data") or {}
    if found is None or data.get("uid") != uid_of(found):
        return {}
    known: dict[str, RememberedAdapter] = _decoded(data.get("known.json"), dict[str, RememberedAdapter])
    return known


def counters_data(tables: StoreTables) -> dict[str, str]:
    """The data of the counters' object."""
    return {name: str(value) for name, value in {**tables.counters, "schema": SCHEMA}.items()}


def workers_data(tables: StoreTables) -> dict[str, str]:
    """The data of the object of operators' orders for workers."""
    return {"workers.json": msgspec.json.encode(tables.workers).decode()}


def pauses_data(tables: StoreTables) -> dict[str, str]:
    """The data of the object of pauses."""
    return {"pauses.json": msgspec.json.encode(tables.pauses).decode()}


def shard_data(tables: StoreTables, shard: str, known: Json | None) -> dict[str, str]:
    """The data of a shard's object.

    known  the present object, whose uid the data carries; None: the data proves no deletion
    """
    adapters = {lora_id: entry for lora_id, entry in sorted(tables.remembered.items()) if shard_of(lora_id) == shard}
    tombstones = {
        key: tuple(stone) for key, stone in sorted(tables.tombstones.items()) if tombstone_shard(key) == shard
    }
    return {
        "uid": "" if known is None else uid_of(known),
        "known.json": msgspec.json.encode(adapters).decode(),
        "tombstones.json": msgspec.json.encode(tombstones).decode(),
    }


def _read_state(mirror: ConfigMapMirror, tables: StoreTables) -> None:
    """Set the tables' counters, orders for workers, pauses, memory and tombstones from state objects.

    Raises StoreError.
    """
    tables.counters = counters_in_object(mirror.objects.get(tables.state_name("counters")))
    workers = (mirror.objects.get(tables.state_name("workers")) or {}).get("data") or {}
    tables.workers = _decoded(workers.get("workers.json"), dict[str, WorkerIntent])
    pauses = (mirror.objects.get(tables.state_name("pauses")) or {}).get("data") or {}
    tables.pauses = _decoded(pauses.get("pauses.json"), dict[str, PauseLease])
    for shard in SHARDS:
        found = mirror.objects.get(tables.state_name(f"adapters-{shard}"))
        tables.remembered |= remembered_in_object(found)
        tombstones = _decoded(((found or {}).get("data") or {}).get("tombstones.json"), dict[str, tuple[str, float]])
        tables.tombstones |= {key: Tombstone(*stone) for key, stone in tombstones.items()}


def _decoded(text: str | None, kind: Any) -> Any:
    """The JSON text decoded as this type; empty without text. Raises StoreError."""
    try:
        return msgspec.json.decode(text or "{}", type=kind)
    except msgspec.MsgspecError as exc:
        raise StoreError(f"a ConfigMap of the orchestrator's state cannot be read ({exc}); delete that key") from exc
