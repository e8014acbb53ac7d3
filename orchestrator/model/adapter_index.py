"""Registered adapters by what a placement pass asks of them, so that it looks at a few of ten thousand."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.model.adapters import RegisteredAdapter

Shape = tuple[str | None, int]
"""Base model and rank."""


@dataclass(slots=True)
class AdapterIndex:
    """What is known of the registered adapters as a whole. One writer: the store, with each row.

    standing   adapters that a pass looks at though nobody asks for them; see `is_standing`
    by_shape   shape -> adapters that have been inspected and are not being deleted
    """

    standing: set[str] = field(default_factory=set)
    by_shape: dict[Shape, set[str]] = field(default_factory=dict)

    def add(self, adapter: RegisteredAdapter) -> None:
        """Take an adapter in, which the index does not have."""
        if is_standing(adapter):
            self.standing.add(adapter.lora_id)
        if adapter.is_inspected and not adapter.is_deleting:
            self.by_shape.setdefault(shape_of(adapter), set()).add(adapter.lora_id)

    def remove(self, adapter: RegisteredAdapter) -> None:
        """Take an adapter out, as it was taken in."""
        self.standing.discard(adapter.lora_id)
        same = self.by_shape.get(shape_of(adapter), set())
        same.discard(adapter.lora_id)
        if not same:
            self.by_shape.pop(shape_of(adapter), None)

    def with_standing(self, lora_ids: Iterable[str]) -> "AdapterIndex":
        """The index in which these adapters stand, too, because a pass has raised their minimum."""
        return AdapterIndex(self.standing.union(lora_ids), self.by_shape)


def adapter_index(adapters: Mapping[str, RegisteredAdapter]) -> AdapterIndex:
    """The index of all these adapters."""
    index = AdapterIndex()
    for adapter in adapters.values():
        index.add(adapter)
    return index


def shape_of(adapter: RegisteredAdapter) -> Shape:
    """The adapter's shape, with rank 0 before its inspection."""
    return adapter.base_model, adapter.rank or 0


def is_standing(adapter: RegisteredAdapter) -> bool:
    """Whether something may be due for the adapter though nobody asks: its inspection or end, or by its own policy."""
    own = adapter.policy
    has_own_policy = own.min_replicas is not None or own.loading is not None or own.ttl_s is not None
    return has_own_policy or not adapter.is_inspected or adapter.is_deleting or adapter.quarantine is not None
