"""Registered adapters by what a placement pass asks of them, so that it looks at a few of ten thousand."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lorafleet.identity import fleet_digest
from orchestrator.model.adapters import RegisteredAdapter

_Key = TypeVar("_Key")
Shape = tuple[str | None, int]
"""Base model and rank."""


@dataclass(slots=True)
class AdapterIndex:
    """What is known of the registered adapters as a whole. One writer: the store, with each row.

    standing   adapters that a pass looks at though nobody asks for them; see `is_standing`
    by_shape   shape -> adapters that have been inspected and are not being deleted
    by_files   digest -> adapters whose files only the fleet has
    adopted    adapters that workers' settings have named
    """

    standing: set[str] = field(default_factory=set)
    by_shape: dict[Shape, set[str]] = field(default_factory=dict)
    by_files: dict[str, set[str]] = field(default_factory=dict)
    adopted: set[str] = field(default_factory=set)

    def add(self, adapter: RegisteredAdapter) -> None:
        """Take an adapter in, which the index does not have."""
        if is_standing(adapter):
            self.standing.add(adapter.lora_id)
        if adapter.is_inspected and not adapter.is_deleting:
            self.by_shape.setdefault(shape_of(adapter), set()).add(adapter.lora_id)
        if (digest := fleet_digest(adapter.source)) is not None:
            self.by_files.setdefault(digest, set()).add(adapter.lora_id)
        if adapter.is_adopted:
            self.adopted.add(adapter.lora_id)

    def remove(self, adapter: RegisteredAdapter) -> None:
        """Take an adapter out, as it was taken in."""
        self.standing.discard(adapter.lora_id)
        self.adopted.discard(adapter.lora_id)
        _discard(self.by_shape, shape_of(adapter), adapter.lora_id)
        if (digest := fleet_digest(adapter.source)) is not None:
            _discard(self.by_files, digest, adapter.lora_id)

    def with_standing(self, lora_ids: Iterable[str]) -> "AdapterIndex":
        """The index in which these adapters stand, too, because a pass has raised their minimum."""
        return replace(self, standing=self.standing.union(lora_ids))


def adapter_index(adapters: Mapping[str, RegisteredAdapter]) -> AdapterIndex:
    """The index of all these adapters."""
    index = AdapterIndex()
    for adapter in adapters.values():
        index.add(adapter)
    return index


def _discard(index: dict[_Key, set[str]], key: _Key, lora_id: str) -> None:
    """Take an adapter out of the set of a key; an empty set goes."""
    same = index.get(key, set())
    same.discard(lora_id)
    if not same:
        index.pop(key, None)


def shape_of(adapter: RegisteredAdapter) -> Shape:
    """The adapter's shape, with rank 0 before its inspection."""
    return adapter.base_model, adapter.rank or 0


def is_standing(adapter: RegisteredAdapter) -> bool:
    """Whether something may be due for the adapter though nobody asks: its inspection or end, or by its own policy."""
    own = adapter.policy
    has_own_policy = own.min_replicas is not None or own.loading is not None or own.ttl_s is not None
    return has_own_policy or not adapter.is_inspected or adapter.is_deleting or adapter.quarantine is not None
