"""The columns of a list: the field of an item that each column shows, and when the column is shown. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import reduce
from operator import getitem
from typing import Any

Item = Mapping[str, Any]
TIME = "time (UTC)"
"""The heading of a column whose cells are never broken."""


class Shown(StrEnum):
    always = "always"
    if_any = "if any"
    """where some item has a value, and in a wide table"""
    wide = "wide"
    """in a wide table alone"""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a list.

    of     the field, such as `status.state`, or a function of the item; default: the field named as the heading
    form   what the cell has in place of the value
    short  most characters of the cell, unless the table is wide
    """

    heading: str
    of: str | Callable[[Item], object] = ""
    form: Callable[[Any], object] | None = None
    shown: Shown = Shown.always
    short: int | None = None

    def cell(self, item: Item, *, wide: bool) -> object:
        """The cell of an item; None for empty text. A column that is always shown needs its field."""
        value = self.of(item) if callable(self.of) else self._field(item, (self.of or self.heading).split("."))
        value = value if self.form is None else self.form(value)
        if not isinstance(value, str):
            return value
        return (value if wide else value[: self.short]) or None

    def _field(self, item: Any, path: Sequence[str]) -> Any:
        for name in path:
            if item is None:
                return None
            item = item[name] if self.shown is Shown.always else item.get(name)
        return item


@dataclass(frozen=True, slots=True)
class ListView:
    """The columns of a list's table, and the fields by which `-o name` names an item.

    names  such as `lora_id` or `group.tenant`; printed by `-o name` with a tab between them
    part   what an incomplete answer lacks, before the names of those that did not answer
    """

    columns: tuple[Column, ...]
    names: tuple[str, ...] = ()
    part: str = ""

    def names_of(self, item: Item) -> list[str]:
        """The values of the fields that name an item."""
        return [str(reduce(getitem, name.split("."), item)) for name in self.names]


def time_text(at: str) -> str:
    """A time stamp as a cell: milliseconds, and no offset if it is UTC."""
    return datetime.fromisoformat(at).isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")
